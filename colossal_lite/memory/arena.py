"""Allocates buffers that a step needs for a while, at planned offsets of memory set aside at the start.

Note: arenas.
A buffer that exists for some moments of a step has a planned offset in an arena.  Two buffers that exist at once do
not overlap (schedule/interval_packing.py), so the arena is as large as the worst moment.  Each kind of buffer has an
`ArenaAllocator`, with an arena of its own or a shared one.  A model may leave the plan: parameters that no backward
reaches hold their chunk open.  Its gradients then get further buffers, which are counted.  A wrong plan thus shows in
`memory_report` and never changes a number.  Planned and measured peaks are counted apart; in a right plan they are
equal.

Transfers and reuse.
Memory may be given back while transfers still read or write it.  `Arena.take` returns the transfers of the last users
of its bytes, of any kind.  The next user waits for them.  Computing needs no entry.  It has finished, or comes first on
the device's own stream, and transfers begin after it.  A collective is waited for before its bytes are given back.

What shares an arena.
Where weights or gradients are offloaded to the host, a step ends with its updates.  From the first update on
(zero/memory_budget.py) what backward needs and what updates need share one arena.  It is as large as the larger of the
two.  A 124M GPT in bf16 on 2 ranks at stage 3, all on the host, so needs 354 MB instead of 765.  Gathered
weights (schedule/gather_plan.py) are not in it: the next forward gathers its first ones while updates run.  Nor are
records where they alone are off the device, and messages of a pipeline.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from colossal_lite.memory.link import Transfer
from colossal_lite.memory.pinned import zeros_on
from colossal_lite.schedule.interval_packing import (
    ArenaPlan,
    LiveInterval,
    LiveRange,
    pack_live_ranges,
)

Key = tuple[str, int]
"""A kind and a number."""


class Arena:
    """One allocation with an offset for each live range. A table has the present and last users of its bytes."""

    def __init__(self, plan: ArenaPlan, device: torch.device) -> None:
        self.plan = plan
        self.most_bytes = 0
        """Measured, up to the furthest byte taken."""
        self._stays = {(live_range.what, live_range.number): live_range for live_range in plan.live_ranges}
        self._starts = dict(zip(self._stays, plan.offsets, strict=True))
        self._room = zeros_on(device, plan.bytes, torch.uint8)
        self._taken: dict[Key, None] = {}
        self._left: dict[Key, tuple[Transfer, ...]] = {}

    @property
    def bytes(self) -> int:
        return self._room.nbytes

    def span(self, key: Key) -> tuple[int, int]:
        """Bytes [start, stop) of a buffer."""
        return self._starts[key], self._starts[key] + self._stays[key].bytes

    def is_free(self, key: Key) -> bool:
        """Whether no byte of this buffer is taken."""
        return not any(self._meet(key, other) for other in self._taken)

    def take(self, key: Key) -> tuple[Tensor, tuple[Transfer, ...]]:
        """The bytes of a buffer, and the transfers after which they may be written."""
        assert self.is_free(key), f"{key[1]} comes to a place that is taken"
        start, stop = self.span(key)
        beside = [other for other in self._left if self._meet(key, other)]
        before = tuple(transfer for other in beside for transfer in self._left[other])
        for other in beside:
            first, end = self.span(other)
            if start <= first and end <= stop:
                del self._left[other]  # the next user of these bytes waits for `key`, and so for these
        self._taken[key] = None
        self.most_bytes = max(self.most_bytes, stop)
        return self._room[start:stop], before

    def give(self, key: Key, *last: Transfer) -> None:
        """Give a buffer back; its bytes may be written when `last` are done."""
        del self._taken[key]
        if last:
            self._left[key] = last

    def _meet(self, one: Key, other: Key) -> bool:
        (start, stop), (first, end) = self.span(one), self.span(other)
        return start < end and first < stop


class ArenaAllocator:
    """Allocates the buffers of one kind in an arena, each by its number, in the order of their live ranges."""

    def __init__(
        self, live_ranges: Sequence[LiveRange], dtype: torch.dtype, device: torch.device, arena: Arena | None = None, *,
        grows: bool = False,
    ) -> None:  # fmt: skip
        """`live_ranges` of one kind; `arena`: that has offsets for them; None: one of their own. `grows`: where the
        bytes are taken, a further buffer is allocated."""
        self._dtype, self._device, self._grows = dtype, device, grows
        self._stays = {live_range.number: live_range for live_range in live_ranges}
        self._own = Arena(pack_live_ranges(live_ranges, 1), device) if arena is None else None
        self._arena = self._own or arena
        self._taken: dict[int, Tensor | None] = {}  # number -> the further buffer that it has, or None
        self._spare: list[tuple[Tensor, tuple[Transfer, ...]]] = []
        self._further_bytes = 0
        self.most_bytes = 0
        """Most bytes since `shrink`: up to the furthest taken in the own arena, and of further buffers."""

    def replan(self, live_ranges: Sequence[LiveRange]) -> None:
        """Use these live ranges, of the same numbers, from now on; in a shared arena, from when it is joined."""
        self.shrink()
        self._stays = {live_range.number: live_range for live_range in live_ranges}
        if self._own is not None:
            self._own = self._arena = None  # before there is another
            self._own = self._arena = Arena(pack_live_ranges(live_ranges, 1), self._device)

    def join(self, arena: Arena | None) -> None:
        """Free the own arena, and allocate in this one from now on; None: in none yet. No buffer may be taken."""
        self.shrink()
        self._own, self._arena = None, arena

    def take(self, number: int) -> tuple[Tensor, tuple[Transfer, ...]]:
        """A buffer with undefined elements, and the transfers after which it may be written."""
        assert number not in self._taken, f"slot {number} is taken"
        live_range, arena = self._stays[number], self._arena
        assert arena is not None, f"{live_range.what}: places have been let go"
        if not live_range.bytes:
            self._taken[number] = None
            return torch.empty(0, dtype=self._dtype, device=self._device), ()
        if not self._grows or arena.is_free((live_range.what, number)):
            room, before = arena.take((live_range.what, number))
            self._taken[number] = None
        else:
            further, before = self._one_more(live_range.bytes)
            self._taken[number], room = further, further[: live_range.bytes]
        self._count(arena)
        return room.view(self._dtype), before

    def take_now(self, number: int) -> Tensor:
        """As `take`, for computing that writes at once: it waits for the transfers."""
        room, before = self.take(number)
        for transfer in before:
            transfer.wait()
        return room

    def give(self, number: int, *last: Transfer) -> None:
        """Give a buffer back; it may be written when `last` are done, and nothing else may read it."""
        assert number in self._taken, f"slot {number} was given back twice"
        live_range, arena, further = self._stays[number], self._arena, self._taken.pop(number)
        assert arena is not None
        if further is not None:
            self._spare.append((further, last))
        elif live_range.bytes:
            arena.give((live_range.what, number), *last)

    def shrink(self) -> None:
        """Free further buffers and reset the counts; no buffer may be taken."""
        assert not self._taken, f"slots {sorted(self._taken)} are in use"
        self._spare.clear()
        self._further_bytes = self.most_bytes = 0

    @property
    def live_ranges(self) -> tuple[LiveRange, ...]:
        return tuple(self._stays.values())

    @property
    def planned_bytes(self) -> int:
        """Bytes of the own arena."""
        return 0 if self._own is None else self._own.bytes

    @property
    def bytes(self) -> int:
        """Bytes of the own arena and of further buffers."""
        return self.planned_bytes + self._further_bytes

    def _one_more(self, size_bytes: int) -> tuple[Tensor, tuple[Transfer, ...]]:
        at = next((i for i, (spare, _) in enumerate(self._spare) if spare.nbytes >= size_bytes), None)
        if at is not None:
            return self._spare.pop(at)
        self._further_bytes += size_bytes
        return torch.zeros(size_bytes, dtype=torch.uint8, device=self._device), ()

    def _count(self, arena: Arena) -> None:
        beyond = sum(further.nbytes for further in self._taken.values() if further is not None)
        reached = 0
        if self._own is not None:
            planned = [n for n, further in self._taken.items() if further is None and self._stays[n].bytes]
            reached = max((arena.span((self._stays[n].what, n))[1] for n in planned), default=0)
        self.most_bytes = max(self.most_bytes, reached + beyond)


def slots(
    intervals: Sequence[LiveInterval], dtype: torch.dtype, device: torch.device, what: str = "slots"
) -> ArenaAllocator:
    """An allocator with a buffer of `numel` elements for each interval."""
    live_ranges = [
        LiveRange(what, i, one.start, one.stop, one.numel * dtype.itemsize) for i, one in enumerate(intervals)
    ]
    return ArenaAllocator(live_ranges, dtype, device, grows=True)


class Pool:
    """Lends equal buffers of `numel` elements for messages: `planned` from the start, more if needed."""

    def __init__(self, numel: int, planned: int, dtype: torch.dtype, device: torch.device) -> None:
        self.numel = numel
        self._dtype, self._device = dtype, device
        self._free = list(torch.zeros(planned if numel else 0, max(numel, 1), dtype=dtype, device=device))
        self._planned = self._count = len(self._free)
        self.most_taken = 0
        """Most buffers in use at once so far."""

    def take(self, numel: int) -> Tensor:
        """The first `numel` elements of a free buffer, undefined."""
        assert numel <= self.numel, f"a buffer of {self.numel} elements cannot hold {numel}"
        if not self._free:
            self._count += 1
            self._free.append(torch.zeros(self.numel, dtype=self._dtype, device=self._device))
        buffer: Tensor = self._free.pop()
        self.most_taken = max(self.most_taken, self._count - len(self._free))
        return buffer[:numel]

    def give(self, buffer: Tensor) -> None:
        """Give back a buffer of `take`. Nothing may read it any more."""
        assert len(self._free) < self._count, "a buffer was given back twice"
        self._free.append(buffer.as_strided((self.numel,), (1,), buffer.storage_offset()))

    @property
    def bytes(self) -> int:
        return self._count * self.numel * self._dtype.itemsize

    @property
    def most_bytes(self) -> int:
        """Most bytes of buffers in use at once so far."""
        return self.most_taken * self.numel * self._dtype.itemsize

    @property
    def planned_bytes(self) -> int:
        return self._planned * self.numel * self._dtype.itemsize
