"""Packs buffers with known lifetimes into one arena, so that no two that exist at once overlap.

Note: lifetimes are moments [start, stop], both included.  A lifetime may have a gap, in which another buffer has the
bytes.  The arena's size is at least the most that exists at one moment (`most_held`).
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate
from math import inf


def round_up(numel: int, multiple: int) -> int:
    return -(-numel // multiple) * multiple


@dataclass(frozen=True)
class LiveInterval:
    """`numel` elements that exist from moment `start` to moment `stop`, both included. In the moments of `gap`
    another buffer has their bytes."""

    start: int
    stop: int
    numel: int
    gap: range = range(0)

    def mask(self, begin: int) -> int:
        """The moments in which it exists, as bits, counted from `begin`."""
        held = (1 << (self.stop + 1 - begin)) - (1 << (self.start - begin))
        if self.gap:
            held -= (1 << (self.gap.stop - begin)) - (1 << (self.gap.start - begin))
        return held


def most_held(intervals: Iterable[LiveInterval]) -> int:
    """Most elements that exist at one moment: no arena of these intervals is smaller."""
    changes = changes_of(intervals)
    return max(accumulate(change for _, change in sorted(changes.items())), default=0)


def changes_of(intervals: Iterable[LiveInterval]) -> Counter[int]:
    """The change of existing elements at each moment."""
    changes: Counter[int] = Counter()
    for one in intervals:
        changes[one.start] += one.numel
        changes[one.stop + 1] -= one.numel
        if one.gap:
            changes[one.gap.start] -= one.numel
            changes[one.gap.stop] += one.numel
    return changes


def pack_intervals(intervals: Sequence[LiveInterval]) -> tuple[tuple[int, ...], int]:
    """An offset for each interval, so that no two that exist at once overlap, and the elements of the arena.

    Each gets the lowest offset that is free while it exists. Four orders are tried and the smallest arena is used:
    the largest first, with the earliest or the latest first among equals, and by time from either end.
    """
    orders: tuple[Callable[[LiveInterval], tuple[int, int]], ...] = (
        lambda one: (-one.numel, one.start),
        lambda one: (-one.numel, -one.stop),
        lambda one: (one.start, -one.numel),
        lambda one: (-one.stop, -one.numel),
    )
    least, best = most_held(intervals), _first_fit(intervals, orders[0])
    assert best is not None
    for order in orders[1:]:
        if best[1] == least:
            break
        best = _first_fit(intervals, order, below=best[1]) or best
    return best


def _first_fit(
    intervals: Sequence[LiveInterval],
    order: Callable[[LiveInterval], tuple[int, int]],
    below: float = inf,
) -> tuple[tuple[int, ...], int] | None:
    """None, as soon as that is known, for an arena that would not be smaller than `below`."""
    begin = min((one.start for one in intervals), default=0)
    offsets = [0] * len(intervals)
    placed: list[tuple[int, int, int]] = []  # by offset: start, stop, and the moments in which it exists
    for i in sorted(range(len(intervals)), key=lambda i: order(intervals[i])):
        numel, mask, offset = intervals[i].numel, intervals[i].mask(begin), 0
        for start, stop, held in placed:
            if stop > offset and mask & held:
                if offset + numel <= start:
                    break
                offset = stop
        if offset + numel >= below:
            return None
        offsets[i] = offset
        insort(placed, (offset, offset + numel, mask))
    ends = [offset + one.numel for offset, one in zip(offsets, intervals, strict=True)]
    return tuple(offsets), max(ends, default=0)


ARENA_ALIGN_BYTES = 128  # of buffers beside other kinds: for views of any dtype, and vector loads


@dataclass(frozen=True)
class LiveRange:
    """A buffer of kind `what` and a number that exists from moment `start` to moment `stop`, both included. In the
    moments of `gap` another buffer has its bytes."""

    what: str
    number: int
    start: int
    stop: int
    bytes: int
    gap: range = range(0)

    def sized(self, align_bytes: int) -> LiveInterval:
        """The same as an interval, its bytes rounded up to a multiple of `align_bytes`."""
        return LiveInterval(self.start, self.stop, round_up(self.bytes, align_bytes), self.gap)


@dataclass(frozen=True)
class ArenaPlan:
    """The offset of each live range, and `bytes` of the arena."""

    live_ranges: tuple[LiveRange, ...]
    offsets: tuple[int, ...]
    bytes: int
    align_bytes: int


def pack_live_ranges(live_ranges: Sequence[LiveRange], align_bytes: int = ARENA_ALIGN_BYTES) -> ArenaPlan:
    """Pack all live ranges into one arena, each on a multiple of `align_bytes`. Those that no others overlap in time
    are packed by themselves. Kinds lie one behind the other where that takes less than packing them together. Live
    ranges of no bytes are left out."""
    return _packed(tuple(live_range for live_range in live_ranges if live_range.bytes), align_bytes)


@lru_cache(maxsize=64)
def _packed(some: tuple[LiveRange, ...], align_bytes: int) -> ArenaPlan:
    """A plan asks for the same arena several times."""
    sized = [live_range.sized(align_bytes) for live_range in some]
    offsets, total = [0] * len(some), 0
    for mine in _at_other_times(some):
        found, length = _pack_together([some[i] for i in mine], [sized[i] for i in mine])
        total = max(total, length)
        for i, offset in zip(mine, found, strict=True):
            offsets[i] = offset
    return ArenaPlan(some, tuple(offsets), total, align_bytes)


def _at_other_times(live_ranges: Sequence[LiveRange]) -> Iterator[list[int]]:
    """The places of live ranges that are linked by overlaps in time."""
    together, stop = list[int](), 0
    for i in sorted(range(len(live_ranges)), key=lambda i: live_ranges[i].start):
        if together and live_ranges[i].start > stop:
            yield sorted(together)
            together = []
        stop = max(stop, live_ranges[i].stop) if together else live_ranges[i].stop
        together.append(i)
    if together:
        yield sorted(together)


def _pack_together(some: Sequence[LiveRange], sized: Sequence[LiveInterval]) -> tuple[Sequence[int], int]:
    """An offset for each, and the bytes that they take."""
    offsets, total = pack_intervals(sized)
    if total == most_held(sized):
        return offsets, total
    apart, end = [0] * len(some), 0
    for what in dict.fromkeys(live_range.what for live_range in some):
        mine = [i for i, live_range in enumerate(some) if live_range.what == what]
        found, length = pack_intervals([sized[i] for i in mine])
        for i, offset in zip(mine, found, strict=True):
            apart[i] = end + offset
        end += length
    return (apart, end) if end < total else (offsets, total)


def packed_apart(plan: ArenaPlan, longer: Mapping[tuple[str, int], LiveRange]) -> ArenaPlan:
    """The plan with other offsets, at which live ranges may last as long as in `longer`, by kind and number. The same
    plan if that takes other bytes."""
    ranges = [longer.get((one.what, one.number), one) for one in plan.live_ranges]
    found = pack_live_ranges(ranges, plan.align_bytes)
    return replace(plan, offsets=found.offsets) if found.bytes == plan.bytes else plan


def most_at_once(chunks: Collection[int], width: int) -> int:
    """The most of these chunks among any `width` in a row: those that are fetched, updated or written back at once."""
    some = sorted({*chunks})
    return max((bisect_left(some, c + width) - place for place, c in enumerate(some)), default=0)


def visits(
    sizes_bytes: Mapping[int, int], width: int, what: str = "visitors", *, last_first: bool = False
) -> tuple[LiveRange, ...]:
    """Live intervals of records that are copied in for their turn, one after the other. Each exists while the `width`
    numbers from its own on have their turns: so many exist at once, some fetched ahead, one in use, and some written
    back. `last_first`: higher numbers come first. The turn of number 0 is moment 0."""
    turns = {number: -number if last_first else number for number in sizes_bytes}
    return tuple(LiveRange(what, n, turn, turn + width - 1, sizes_bytes[n]) for n, turn in turns.items())
