"""Optimizer state that rests on the host or on disk and visits the device for its update.

Note: records and slots.
A chunk has a record: its state tensors and what its masters have beside the weights, if anything, side by side in one
buffer, so that a visit is one copy each way.  On the device it has a place that it shares with those that are there at
other times: one is updated, `AHEAD` come, one goes, so `AHEAD + 2` in a row have places apart (memory/mover.py).
At rest each is in a home of its own (zero/homes.py): in a place on the host (memory/store.py), where it is pending from
the end of a step until what its update wrote is back; or on disk (memory/disk.py), from where it passes through slots
on the host.  One that comes again waits for its own going.  A slot is refilled only when the copy out of it is done, a
record is read only when the copy into it is done and comes only when the one that took it away is (`Transfer`s say so).
What is computed, and in which order, is the same as without tiers: so are the bits.  Records that are updated on the
host (zero/on_host.py) do not visit: they are updated where they rest, or in the slot on the host between their read and
their write.

The first records are fetched while backward still runs (`prepare`), and the last ones are on their way back when the
next step has begun.  Whoever reads or changes a record outside of a step first brings everything to rest (`flush`):
what was fetched ahead is dropped, without waiting for it where its copy has not begun, and is fetched again.  A record
that rests on disk is then in one of the slots on the host; what was changed is written before the next step, or when
the slot is needed for another record.

Once, between steps, records may change their homes (`release`, `settle_homes`): first those that the device takes go,
then those that go to disk, then those that come from it, each by one slot on the host, the largest first: while that is
done the host may hold one record's slot more than before and after.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

from colossal_lite.memory.arena import Arena, ArenaAllocator
from colossal_lite.memory.chunk import Chunk
from colossal_lite.memory.copy_streams import AS_IT_COPIES, LinkSpeed, executor_for
from colossal_lite.memory.link import Link, Priority, Transfer
from colossal_lite.memory.task_records import TaskRecords
from colossal_lite.offload.pieces import VISITING, StateKind
from colossal_lite.offload.state_storage import (
    MASTER,
    DiskStorage,
    HostStorage,
    OpenFile,
    StateStorage,
    record_of,
)
from colossal_lite.schedule.plan import DISK, Action, ActionKind

AHEAD = 1
SLOTS = AHEAD + 2


class OffloadedOptimizerStates:
    """The records of all chunks that rest off the device, and the slots and links by which they visit it."""

    def __init__(
        self, chunks: Sequence[Chunk], states: Sequence[Mapping[str, torch.dtype]], timeout_s: float,
        speed: LinkSpeed, places: TaskRecords, *, update: str = "device", on_disk: Collection[int] | None = None,
        open_file: OpenFile | None = None, disk_speed: LinkSpeed = AS_IT_COPIES, shares: bool = False,
    ) -> None:  # fmt: skip
        """`states`: for each chunk its state tensors, which begin as zeros, by name and dtype; `speed` of the links
        between device and host; records rest in `places`, but those of the chunks `on_disk` (None: none ever does) in
        what `open_file` makes (None: nowhere; nothing is ever read or written), which is no faster than `disk_speed`,
        both ways together; `update`: on the "host", where no record visits the device, or on the "device";
        `shares`: there are no places on the device before `settle_places`. Raises DiskError."""
        self._chunks, self._update = tuple(chunks), update
        self._records = tuple(record_of(chunk, some) for chunk, some in zip(chunks, states, strict=True))
        self._dtype, device = chunks[0].types.state, chunks[0].device
        self._device = device
        self._host = HostStorage(self._records, self._dtype, self._chunks, places)
        self.disk: DiskStorage | None = None
        """None where no record ever rests on disk."""
        if on_disk is not None:
            self.disk = DiskStorage(self._records, self._dtype, device, open_file, disk_speed, timeout_s)
        is_all = self.disk is not None and len(on_disk or ()) == len(self._chunks)
        self._of_none: StateStorage = self.disk if self.disk is not None and is_all else self._host
        there = {index for index in on_disk or () if self._records[index].size}
        self._home: dict[int, StateStorage] = {
            index: self.disk if self.disk is not None and index in there else self._host
            for index, record in enumerate(self._records)
            if record.size
        }
        self._slots = ArenaAllocator((), self._dtype, device)
        if not shares:
            self.settle_places(None)
        self._here: dict[int, Tensor] = {}
        self._incoming: dict[int, Transfer] = {}
        self.up = Link("h2d", executor_for(device, speed), timeout_s=timeout_s)
        self.down = Link("d2h", executor_for(device, speed), timeout_s=timeout_s)
        if self.disk is not None:
            self.disk.begin(there)
        for index, home in self._home.items():
            # One after the other: the chunk's own memory of its masters goes as soon as they are here.
            home.take_in(index, partial(_fill_master, self._chunks[index]))
            self.at_rest(index)

    @property
    def moves(self) -> dict[ActionKind, Callable[[Action], None]]:
        """What the actions of the plan beside UPDATE do."""
        ways = {ActionKind.FETCH: (self.fetch, self.read), ActionKind.EVICT: (self.evict, self.write)}

        def move(action: Action) -> None:
            ways[action.kind][action.resource == DISK](action.chunk or 0)

        return dict.fromkeys(ways, move)

    # ---- what rests where ----

    def tier_of(self, index: int) -> str:
        """Where the record of a chunk rests that does not stay on the device; or would, if it has none."""
        return self._home.get(index, self._of_none).tier

    @property
    def on_disk(self) -> frozenset[int]:
        """Chunks whose records rest there."""
        return frozenset() if self.disk is None else self.disk.resting

    @property
    def on_host(self) -> frozenset[int]:
        """Chunks with a record that are updated on the host."""
        return frozenset(self._home if self._update == "host" else ())

    def record_bytes(self, tier: str) -> int:
        """Of all records that rest on a tier."""
        numel = sum(self._records[index].size for index, home in self._home.items() if home.tier == tier)
        return numel * self._dtype.itemsize

    @property
    def host_bytes(self) -> int:
        """Of the places, and of the slots."""
        return self.record_bytes("host") + (self.disk.host_bytes if self.disk else 0)

    def settle_places(self, arena: Arena | None) -> None:
        """Places on the device for the records that visit it, in `arena`; None: in one of their own."""
        self._slots = ArenaAllocator((), self._dtype, self._device)  # the old ones go first
        visiting, width = sorted({*self._home} - self.on_host), self._dtype.itemsize
        sizes = {index: self._records[index].size * width for index in visiting}
        stays = VISITING[StateKind.OPTIMIZER].live_ranges(sizes, width=SLOTS)
        self._slots = ArenaAllocator(stays, self._dtype, self._device, arena)

    @property
    def device_bytes(self) -> int:
        """Of the places on the device."""
        return self._slots.bytes

    @property
    def most_device_bytes(self) -> int:
        """As much of them as was used, at the most so far."""
        return self._slots.most_bytes

    @property
    def visited(self) -> ArenaAllocator:
        """The places on the device."""
        return self._slots

    @property
    def links(self) -> tuple[Link, ...]:
        return self.up, self.down, *(self.disk.links if self.disk else ())

    @property
    def _homes(self) -> tuple[StateStorage, ...]:
        return (self._host, self.disk) if self.disk else (self._host,)

    # ---- in a step ----

    def read(self, index: int) -> None:
        """Begin to read a record from disk; nothing if that has begun."""
        if self.disk is not None and index in self.disk.resting and index not in self._here:
            self.disk.settle()
            self.disk.read(index)

    def fetch(self, index: int) -> None:
        """Begin to bring a record to the device; nothing if that has begun."""
        if index in self._home and index not in self._here:
            self._home[index].leave(index, partial(self._bring, index))

    def here(self, index: int) -> dict[str, Tensor]:
        """The state of a chunk on the device, whose master is there too from now on."""
        if index not in self._home:
            return {}
        self._incoming.pop(index).wait()
        return self._without_master(index, self._records[index].parts(self._here[index]))

    def evict(self, index: int) -> None:
        """Begin to take a record back to the host."""
        if index in self._home:
            self._home[index].come_back(index, partial(self._take_back, index))
            self.at_rest(index)

    def write(self, index: int) -> None:
        """Begin to write a record to disk."""
        if self.disk is not None and index in self.disk.resting:
            self.disk.write(index)

    def begin_on_host(self, index: int) -> tuple[dict[str, Tensor], tuple[Transfer, ...]]:
        """The parts of a record where it is updated on the host, and what must be done before."""
        return self._home[index].begin_update(index)

    def end_on_host(self, index: int, updated: Transfer) -> None:
        """The update of that record is on its way."""
        self._home[index].end_update(index, updated)

    def flush(self) -> None:
        """Every record is whole where it rests; what was fetched and not updated is dropped."""
        read = [transfer for home in self._homes for transfer in home.drop()]
        dropped = list[Transfer]()
        for index in tuple(self._here):
            if (coming := self._incoming.pop(index, None)) is not None:
                dropped.append(coming)
                if coming.revoke():
                    for feeding in coming.after:
                        if feeding.priority is Priority.PREFETCH:
                            feeding.revoke()
            del self._here[index]
            self._slots.give(index, *() if coming is None else (coming,))
        for home in self._homes:
            home.finish()
        for transfer in (*dropped, *read):
            _finish_before(transfer)
        if self.disk is not None:
            self.disk.rest()

    def close(self) -> None:
        self.up.close()
        self.down.close()
        if self.disk is not None:
            self.disk.close()

    def defer(self) -> None:
        """A step has ended whose updates of all records have yet to come. Nobody else reads the file."""
        self._host.defer()

    # ---- between steps ----

    def check(self) -> None:
        """Raise what has ended the use of these records, if anything has: DiskError."""
        if self.disk is not None:
            self.disk.check()

    def at_rest(self, index: int) -> dict[str, Tensor]:
        """The state of a chunk between steps: where there is no memory of it, its shapes on the meta device."""
        home = self._home.get(index)
        return {} if home is None else self._without_master(index, home.at_rest(index))

    def opened(self, index: int, *, write: bool) -> dict[str, Tensor]:
        """All parts of a record in host memory, until some others are asked for; to be changed if `write`. Raises
        DiskError."""
        self.check()
        self.flush()
        home = self._home.get(index)
        return {} if home is None else home.opened(index, write=write)

    def settle(self) -> None:
        """What was changed between steps is where it rests. Raises DiskError."""
        for home in self._homes:
            home.settle()

    # ---- once ----

    def release(self, index: int) -> None:
        """A record rests on the device from now on: what it took is given back. Nothing may be on its way;
        `settle_homes` follows."""
        self.settle()
        if (home := self._home.pop(index, None)) is not None:
            home.release(index)

    def settle_homes(self, on_disk: Collection[int]) -> None:
        """Of the records that are left, those of the chunks `on_disk` rest there from now on and the others on the
        host, and slots there are as large as they need; `settle_places` follows. Raises DiskError."""
        self.flush()
        self._slots = ArenaAllocator((), self._dtype, self._device)
        if self.disk is not None:
            there = {*on_disk} & {*self._home}
            moved = (there - self.disk.resting) | (self.disk.resting - there)
            self.disk.make_slots(moved, 1)
            largest_first = sorted(moved, key=lambda index: (index not in there, -self._records[index].size))
            for index in largest_first:
                self._move(index, self.disk if index in there else self._host)
            self.disk.make_slots(there)

    def _move(self, index: int, home: StateStorage) -> None:
        before = self._home[index]
        parts = before.opened(index, write=False)

        def fill(empty: dict[str, Tensor]) -> None:
            for name, part in parts.items():
                empty[name].copy_(part)

        home.take_in(index, fill)
        before.settle()
        before.release(index)
        self._home[index] = home
        self.at_rest(index)

    # ---- how ----

    def _bring(self, index: int, source: Tensor, *after: Transfer) -> Transfer:
        slot, emptied = self._slots.take(index)
        self._here[index] = slot
        self._incoming[index] = transfer = self.up.copy(
            slot[: source.numel()], source, after=(*emptied, *after), priority=Priority.PREFETCH
        )
        return transfer

    def _take_back(
        self, index: int, target: Tensor, *after: Transfer, then: Callable[[], object] | None = None
    ) -> Transfer:
        slot = self._here.pop(index)
        transfer = self.down.copy(target, slot[: target.numel()], after=after, then=then)
        self._slots.give(index, transfer)
        return transfer

    def _without_master(self, index: int, parts: dict[str, Tensor]) -> dict[str, Tensor]:
        """The other parts; the chunk has its master in these."""
        if (words := parts.pop(MASTER, None)) is not None:
            self._chunks[index].rest_master(words)
        return parts


def _fill_master(chunk: Chunk, parts: Mapping[str, Tensor]) -> None:
    """States begin as zeros, masters as they are."""
    if MASTER in parts:
        parts[MASTER].copy_(chunk.master_words)


def _finish_before(dropped: Transfer) -> None:
    """What a copy that was dropped came after has ended: its record's way back is among it. A thread that has begun the
    copy has seen that end."""
    if dropped.is_revoked or dropped.link.executor.on_stream:
        dropped.finish()
