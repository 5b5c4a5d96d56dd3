"""Builds the mesh of one rank: its layout, its coordinates, and a communicator for each axis.

Note: groups.
Ranks of one host exchange through shared memory (distributed/shared_memory.py), all others through torch's groups.
The positions of a group's ranks decide which, so every rank knows it of every group.
Every rank makes all groups at once, in the layout's order.  No group is made inside a step, so none is made in a
different order on two ranks.  Sets of axes with the same ranks share a group.  A group of one rank has no process
group.  `axis("data")` and `axis("data", "sequence")` look up; they never create.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, partial
from typing import Any

import torch.distributed as dist

from colossal_lite.distributed.communicator import (
    CommError,
    Communicator,
    TorchTransport,
    everyones,
    group_timeout,
    leave_group,
    refusal,
)
from colossal_lite.distributed.emulated_ranks import EmulatedWorld, ThreadTransport
from colossal_lite.distributed.host_handshake import HostHandshake, host_of
from colossal_lite.distributed.ledger import Ledger
from colossal_lite.distributed.progress import Progress, reason_of
from colossal_lite.distributed.shared_memory import Exchange
from colossal_lite.distributed.shared_memory_collectives import SharedMemoryTransport
from colossal_lite.distributed.watchdog import CollectiveFingerprint, Watchdog, differences
from colossal_lite.sharding.mesh_layout import AXES, MeshLayout


class Mesh:
    """One rank's mesh: `mesh.axis(name)` to communicate, `mesh.coord(name)` and `mesh.size(name)` for its
    position."""

    def __init__(
        self,
        layout: MeshLayout,
        rank: int,
        *,
        groups: dict[tuple[str, ...], dist.ProcessGroup] | None = None,
        exchange: Exchange | None = None,
        hosts: Sequence[int] = (),
        recording: bool = False,
        emulated: EmulatedWorld | None = None,
        timeout_s: float = 0.0,
        explain: Callable[[], str] | None = None,
        watch: Watchdog | None = None,
    ) -> None:
        self.layout, self.rank, self.coords = layout, rank, layout.coords(rank)
        self._size, self._coord = cache(layout.size), cache(partial(layout.coord, rank))  # a step asks often
        self.ledger = Ledger()
        self._groups, self._exchange = groups or {}, exchange
        self._hosts = tuple(hosts)
        """Of each rank: the first rank of its host. Empty: no rank shares memory with another."""
        self.is_recording, self._emulated = recording, emulated
        self._timeout_s, self._explain = timeout_s, explain
        self._watch = watch
        self.progress = watch.progress if watch else Progress()
        """What this rank is doing, for the errors of ranks that wait for it."""
        self._axes: dict[tuple[str, ...], Communicator] = {}
        self._made: dict[tuple[str, ...], CollectiveFingerprint] = {}
        self._meetings = 0
        self.is_ended = False
        """Whether its groups are destroyed, so that ranks no longer reach each other."""
        self._open = threading.Lock()
        """Held while wires are closed, or interrupted by the watch."""
        if watch:
            watch.breakers.append(self._interrupt)

    @classmethod
    def serial(cls) -> Mesh:
        """A world of one: every axis has size 1 and no collective is ever made."""
        return cls(MeshLayout.build(), 0)

    @classmethod
    def recording(cls, layout: MeshLayout, rank: int = 0, *, one_host: bool = False) -> Mesh:
        """Rank `rank` of a world that need not exist. Its collectives are counted in the ledger and return at once.

        `one_host`: as if all its ranks shared memory.
        """
        return cls(layout, rank, recording=True, hosts=[0] * layout.world_size if one_host else ())

    @classmethod
    def emulated(cls, layout: MeshLayout, world: EmulatedWorld) -> tuple[Mesh, ...]:
        """The meshes of all ranks of a world whose ranks are threads of this process: `run_emulated` runs them."""
        ranks = range(layout.world_size)
        return tuple(cls(layout, rank, emulated=world, timeout_s=world.timeout_s) for rank in ranks)

    @classmethod
    def create(
        cls,
        layout: MeshLayout,
        rank: int,
        *,
        timeout_s: float,
        backend: str | None = None,
        share_memory: bool = False,
        explain: Callable[[], str] | None = None,
        watch: Watchdog | None = None,
    ) -> Mesh:
        """Create the groups of a live world. Collective: every rank of the default group calls it.

        Needs torch's default process group of `layout.world_size` ranks unless the world is one.  `share_memory`:
        between ranks of one host; groups all of whose ranks share it have no group of torch's.  With a backend of GPUs
        the group of all ranks is the default one: a second one would have buffers of its own on each device.
        """
        groups: dict[tuple[str, ...], dist.ProcessGroup] = {}
        limit = group_timeout(timeout_s, backend)
        meets = share_memory and layout.world_size > 1
        exchange, hosts = _meet(rank, layout.world_size, timeout_s) if meets else (None, ())
        for names in layout.communicating_groups():
            for ranks in layout.groups(*names):
                if _on_one_host(hosts, ranks):
                    continue
                is_default = len(ranks) == layout.world_size and backend not in (None, "gloo")
                group = (
                    dist.group.WORLD
                    if is_default
                    else dist.new_group(list(ranks), timeout=limit, backend=backend)
                )
                if rank in ranks and group is not None:
                    groups[names] = group
        return cls(
            layout, rank, groups=groups, exchange=exchange, hosts=hosts, timeout_s=timeout_s, explain=explain,
            watch=watch,
        )  # fmt: skip

    @property
    def world_size(self) -> int:
        return self.layout.world_size

    def size(self, *names: str) -> int:
        return self._size(*names)

    def coord(self, *names: str) -> int:
        return self._coord(*names)

    def axis(self, *names: str) -> Communicator:
        """The communicator along these axes; ValueError names the axes that exist."""
        if names not in self._axes:
            spanning, ranks = self.layout.spanning(*names), self.layout.group(self.rank, *names)
            self._axes[names] = Communicator(
                "world" if names == AXES else "*".join(names),
                ranks,
                self.rank,
                self.ledger,
                group=self._groups.get(spanning),
                host=self._host_wire(spanning, ranks),
                shares_memory=_on_one_host(self._hosts, ranks),
                recording=self.is_recording,
                timeout_s=self._timeout_s,
                explain=self._explain,
                watch=self._watch,
                made=self._made.setdefault(spanning, CollectiveFingerprint()),
            )
        return self._axes[names]

    def _host_wire(
        self, spanning: tuple[str, ...], ranks: Sequence[int]
    ) -> SharedMemoryTransport | ThreadTransport | None:
        if self._emulated is not None and len(ranks) > 1:
            return ThreadTransport(self._emulated, ranks, ranks.index(self.rank))
        if self._exchange is None or len(ranks) == 1 or not _on_one_host(self._hosts, ranks):
            return None
        number = self.layout.communicating_groups().index(spanning)
        return SharedMemoryTransport(self._exchange, number, ranks, ranks.index(self.rank), self._timeout_s)

    @property
    def shares_memory(self) -> bool:
        """Whether all ranks of the world exchange through shared memory."""
        return self.world_size > 1 and _on_one_host(self._hosts, range(self.world_size))

    @property
    def shared_bytes(self) -> int:
        """Most bytes that this rank had in shared memory at once; 0 where no memory is shared."""
        return self._exchange.send_buffer.peak_bytes if self._exchange else 0

    @property
    def posted_bytes(self) -> int:
        """Bytes that this rank has posted in shared memory since the launch, each piece once for all its readers."""
        return self._exchange.send_buffer.posted_bytes if self._exchange else 0

    @property
    def world(self) -> Communicator:
        return self.axis(*AXES)

    @property
    def collectives_differ(self) -> int:
        """This rank's term of a sum over the world. The sum is zero where the ranks of each group have made the same
        collectives. The first counts its own for each of the others, and these subtract theirs."""
        terms = [
            made.mark * (self.size(*names) - 1 if self.coord(*names) == 0 else -1)
            for names, made in self._made.items()
            if names
        ]
        return sum(terms)

    def check_together(self, apart: float) -> None:
        """Raise CommError where the sum of `collectives_differ` over the world is not zero. Collective, on all
        ranks."""
        if not apart:
            return
        raise CommError(
            f"rank {self.rank}: ranks have made other collectives than each other, so sums of this step may be wrong; "
            f"nothing was updated: {differences(self.world.gather_json(self._own_collectives()))}"
        )

    @contextmanager
    def engine_call(self, what: str, *, gives_up: bool = False) -> Iterator[None]:
        """Around a call of the engine: records an error of this rank, for ranks that wait for it.

        `gives_up`: it ends a step without its update.  Raises CommError where an earlier call has failed half-way."""
        progress = self.progress
        if progress.broken:
            raise CommError(f"rank {self.rank}: {what}: {refusal(progress.broken)}")
        progress.call_begins(gives_up=gives_up)
        try:
            if not gives_up:
                self.meet_after_fault(what)
            yield
        except SystemExit:  # the call has done its work, and the run stops
            progress.call_succeeded()
            raise
        except (Exception, KeyboardInterrupt) as error:
            progress.call_raised(reason_of(error), is_own=not isinstance(error, CommError))
            if self._watch:
                self._watch.look_now()
            raise
        progress.call_succeeded()

    def meet_after_fault(self, what: str) -> bool:
        """After a call that raised half-way: return True when all ranks have come here, and have made the same
        collectives. False where none was begun. Collective, through the store: no message can be read by a wrong one.

        Raises CommError where one has not come, or has made others."""
        if not self.progress.is_half_way or self._watch is None or self.world_size == 1:
            return False
        self._meetings += 1
        word = f"gave up/{self.progress.raised}/{self._meetings}"
        try:
            rows = self._watch.meet(word, self._own_collectives(), self._timeout_s)
        except RuntimeError as error:
            self.progress.breaks(str(error))
            raise CommError(f"{error}\nrank {self.rank}: {what}: {refusal(self.progress.broken)}") from error
        if apart := differences(rows):
            raise CommError(
                f"rank {self.rank}: {what}: the last call has failed ({self.progress.fault}), on some ranks after "
                f"other collectives than on others: {apart}; legal: engine.zero_grad() on every rank first"
            )
        return True

    def _own_collectives(self) -> list[dict[str, Any]]:
        """What this rank has made in each of its groups, as `differences` takes it."""
        return [
            {
                "ranks": self.layout.group(self.rank, *names),
                "calls": made.calls,
                "mark": made.mark,
                "last": [*made.last],
            }
            for names, made in self._made.items()
            if names
        ]

    def _interrupt(self, why: str) -> None:
        """End the waits of this rank, from another thread. Nothing can follow."""
        with self._open:
            if self._exchange:
                self._exchange.interrupt(why)
            for names, group in self._groups.items():
                ranks = self.layout.group(self.rank, *names)
                TorchTransport(group, ranks, ranks.index(self.rank)).interrupt()

    def destroy(self) -> None:
        """Destroy the groups of this mesh; they may have ended with the default one. Call once, on every rank."""
        self.is_ended = True
        with self._open:
            if self._exchange:
                self._exchange.close()
            self._exchange, groups, self._groups = None, self._groups, {}
        for group in groups.values() if dist.is_initialized() else ():
            if group is dist.group.WORLD:  # whoever made it ends it
                continue
            leave_group(group, aborts=bool(self.progress.broken))
        self._axes.clear()

    def __repr__(self) -> str:
        return f"Mesh(rank {self.rank}: {self.layout.describe()})"


def _meet(rank: int, world_size: int, timeout_s: float) -> tuple[Exchange | None, tuple[int, ...]]:
    """This rank's exchange with the ranks of its host, and for each rank the first of its host. Collective."""
    meeting = HostHandshake.call(rank)
    try:
        known = everyones(meeting.card, world_size)
        exchange = meeting.join(known, timeout_s)
    except RuntimeError as error:
        raise CommError(f"rank {rank}: the ranks of this host do not meet: {error}") from error
    finally:
        meeting.close()
    first: dict[bytes, int] = {}
    return exchange, tuple(first.setdefault(host_of(card), other) for other, card in enumerate(known))


def _on_one_host(hosts: Sequence[int], ranks: Sequence[int]) -> bool:
    return bool(hosts) and len({hosts[rank] for rank in ranks}) == 1
