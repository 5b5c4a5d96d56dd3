"""Runs the ranks of a small world as threads of one process, with collectives between them.

Note: every collective is a meeting: each rank puts its tensor down, and all read.  So the numbers are those of real
ranks, in rank order, and no message leaves the process.  For checks of small models; nothing here is fast.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence, Set
from queue import Empty, Queue
from typing import Literal, TypeVar

import torch
from torch import Tensor

from colossal_lite.distributed.shared_memory import nothing
from colossal_lite.distributed.shared_memory_collectives import ReduceOp, Started, cut

T = TypeVar("T")


class EmulatedWorld:
    """What the threads of one world share. A meeting lasts at most `timeout_s`."""

    def __init__(self, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self._lock = threading.Lock()
        self._meetings: dict[tuple[int, ...], _Meeting] = {}
        self._mail: dict[tuple[int, int, int], Queue[Tensor]] = {}
        self._posted: Counter[tuple[str, int, int]] = Counter()
        self._ended: set[int] = set()

    def meeting(self, ranks: Sequence[int]) -> _Meeting:
        """The meeting of these ranks, made by the first that asks."""
        with self._lock:
            return self._meetings.setdefault(
                tuple(ranks), _Meeting(tuple(ranks), self._ended, self.timeout_s)
            )

    def mail(self, end: Literal["send", "receive"], source: int, to: int) -> Queue[Tensor]:
        """The queue of the next message between two ranks. The nth receive gets the nth message, in any order of
        waits."""
        with self._lock:
            self._posted[end, source, to] += 1
            number = self._posted[end, source, to]
            key = (source, to, number)
            is_last = self._posted["send", source, to] >= number <= self._posted["receive", source, to]
            return self._mail.pop(key) if is_last else self._mail.setdefault(key, Queue())

    def end(self, rank: int) -> None:
        """Wake the ranks that wait for this one, or will; they raise EndedError. Others go on until they wait for it:
        so which ranks fail does not follow from their speed."""
        with self._lock:
            self._ended.add(rank)
            meetings = list(self._meetings.values())
        for meeting in meetings:
            with meeting.changed:
                meeting.changed.notify_all()


class EndedError(Exception):
    """A rank waits for one that has ended, or is late."""


class _Meeting:
    def __init__(self, ranks: tuple[int, ...], ended: Set[int], timeout_s: float) -> None:
        self.changed, self.timeout_s = threading.Condition(), timeout_s
        self._ranks, self._ended = ranks, ended
        self._brought: dict[int, Tensor] = {}
        self._round, self._of_all = 0, list[Tensor]()

    def all_of(self, coord: int, mine: Tensor) -> list[Tensor]:
        """Copies of what every rank brings, in order. Raises EndedError for a rank that does not come."""
        with self.changed:
            self._brought[coord] = mine.detach().clone()
            now = self._round
            if len(self._brought) == len(self._ranks):
                self._of_all = [tensor for _, tensor in sorted(self._brought.items())]
                self._brought, self._round = {}, now + 1
                self.changed.notify_all()
            self.changed.wait_for(lambda: self._round > now or self._missing() & self._ended, self.timeout_s)
            if self._round == now:
                raise EndedError(f"emulated ranks {sorted(self._missing())} do not come")
            return self._of_all  # the next round needs this rank

    def _missing(self) -> set[int]:
        return {rank for coord, rank in enumerate(self._ranks) if coord not in self._brought}


class ThreadTransport:
    """The collectives of one group of an emulated world, as `SharedMemoryTransport` has them."""

    def __init__(self, world: EmulatedWorld, ranks: Sequence[int], coord: int) -> None:
        self._world, self._ranks, self._coord = world, tuple(ranks), coord
        self._meeting = world.meeting(ranks)

    def all_reduce(self, tensor: Tensor, op: ReduceOp, tag: str) -> Started:
        every = torch.stack(self._all_of(tensor))
        tensor.data.copy_(every.sum(0) if op == "sum" else every.amax(0))
        return (), nothing

    def all_gather(self, shard: Tensor, whole: Tensor, dim: int, tag: str) -> Started:
        whole.data.copy_(torch.cat(self._all_of(shard), dim).view(whole.shape))
        return (), nothing

    def reduce_scatter(
        self, full: Tensor, target: Tensor, dim: int, tag: str, ordered: bool, scratch: Tensor | None
    ) -> Started:
        total = torch.stack(self._all_of(full)).sum(0)
        target.data.copy_(cut(total, len(self._ranks), dim, target.shape)[self._coord])
        return (), nothing

    def broadcast(self, tensor: Tensor, source: int, tag: str) -> Started:
        tensor.data.copy_(self._all_of(tensor)[source])
        return (), nothing

    def reduce(self, tensor: Tensor, target: int, tag: str) -> Started:
        every = self._all_of(tensor)
        if self._coord == target:
            tensor.data.copy_(torch.stack(every).sum(0))
        return (), nothing

    def all_to_all(self, tensor: Tensor, out: Tensor, tag: str) -> Started:
        size = len(self._ranks)
        pieces = [each.chunk(size)[self._coord] for each in self._all_of(tensor)]
        out.data.copy_(torch.cat(pieces).view(out.shape))
        return (), nothing

    def send(self, tensor: Tensor, to: int, tag: str) -> Started:
        return self.exchange({to: tensor}, {}, tag)

    def receive(self, into: Tensor, source: int, tag: str) -> Started:
        return self.exchange({}, {source: into}, tag)

    def exchange(
        self,
        outgoing: Mapping[int, Tensor],
        incoming: Mapping[int, Tensor],
        tag: str,
        *,
        of_all: bool = False,
    ) -> Started:
        own = self._ranks[self._coord]
        for to, tensor in outgoing.items():
            self._world.mail("send", own, self._ranks[to]).put(tensor.detach().clone())
        mail = {source: self._world.mail("receive", self._ranks[source], own) for source in incoming}

        def take() -> None:
            for source, into in incoming.items():
                try:
                    into.data.copy_(mail[source].get(timeout=self._world.timeout_s))
                except Empty as error:
                    raise RuntimeError(f"no message from emulated rank {self._ranks[source]}") from error

        return (), take

    def _all_of(self, tensor: Tensor) -> list[Tensor]:
        return self._meeting.all_of(self._coord, tensor.contiguous())


def run_emulated(world: EmulatedWorld, ranks: Sequence[Callable[[], T]]) -> list[T]:
    """What each rank's function gives, all run at once. Raises the error of the first rank that has one of its own."""
    results: dict[int, T] = {}
    errors: dict[int, BaseException] = {}

    def run(rank: int) -> None:
        try:
            results[rank] = ranks[rank]()
        except BaseException as error:  # it is raised again below, and no rank may wait for this one
            errors[rank] = error
        finally:
            world.end(rank)

    threads = [
        threading.Thread(target=run, args=(rank,), name=f"emulated rank {rank}", daemon=True)
        for rank in range(len(ranks))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise min(errors.items(), key=lambda each: (isinstance(each[1], EndedError), each[0]))[1]
    return [results[rank] for rank in range(len(ranks))]
