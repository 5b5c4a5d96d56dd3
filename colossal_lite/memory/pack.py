"""Parameters into chunks: which parameter lies where in which flat buffer.

Note: packing.
A chunk is one contiguous run of parameters that share a packing key (whether they train, optimizer group, axes that the
gradient is summed over), in the order the model uses them, so that a chunk is complete when a stretch of the backward
is.  Every entry starts on an aligned element: one of a block or more on a block, a smaller one lies within one.  A
chunk's length is a multiple of `parts * shard_numel`, so that it cuts into equal shards for any part count that divides
`parts`, the ranks that sum its gradient.  `shard_numel` is `SHARD_ALIGN_NUMEL`, and where a sum over blocks must have
the same bits however the chunks are cut (`ordered`) `SHARD_BLOCK_NUMEL`: then no shard cuts a block of an entry.  Plain
data: the same on every rank, and nothing here moves a byte.

Waste is alignment only.  By 64 elements a shard it is under 1 % for GPT-2 of 124 million parameters and more, up to 512
ranks.  By blocks it is at most `parts * SHARD_BLOCK_NUMEL` elements a chunk, half of that on the average: under 1 % up
to 32 ranks at 124 million, up to 128 at 1.3 thousand million; equal shards of whole blocks leave no other choice.
"""

from __future__ import annotations

from bisect import insort
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from colossal_lite.layout import FAR, REPLICATE

ENTRY_ALIGN_NUMEL = 32  # 128 bytes of float32: views stay aligned for vector loads and matrix products
SHARD_ALIGN_NUMEL = 64  # updates take whole vectors of so many (kernels/optimizer.py)
SHARD_BLOCK_NUMEL = 1024  # a norm is summed over blocks of so many elements of a parameter


@dataclass(frozen=True)
class ChunkKey:
    """What the parameters of one chunk have in common: optimizer group, axes the gradient is summed over, and whether
    the ranks of the other axes hold the same values too (then only the first of them counts in a norm).

    `unit`: where weights are gathered block by block, what is gathered together: odd for a block of the model, even for
    what lies before, between and behind the blocks.  `stages`: the pipeline stages that use them; several: tied.
    `trains`: False for frozen parameters, of which there is no gradient; the axes are then those of equal values."""

    group: int
    sync_axes: tuple[str, ...] = ()
    replicated: bool = False
    unit: int = 0
    stages: tuple[int, ...] = (0,)
    trains: bool = True

    @property
    def shard_axes(self) -> tuple[str, ...]:
        """Those of the summing ranks among which one copy is sharded; the others have copies of it."""
        return tuple(axis for axis in self.sync_axes if axis != REPLICATE)

    @property
    def near_axes(self) -> tuple[str, ...]:
        """Those of a copy among which its weights may stay from forward to backward."""
        return tuple(axis for axis in self.shard_axes if axis != FAR)

    @property
    def is_block(self) -> bool:
        return self.unit % 2 == 1


@dataclass(frozen=True)
class Item:
    """One parameter to place: its name, elements on this rank, and its packing key."""

    name: str
    numel: int
    key: Hashable = ()


@dataclass(frozen=True)
class Entry:
    """A parameter's place: elements [start, stop) of its chunk."""

    name: str
    start: int
    stop: int


@dataclass(frozen=True)
class ChunkSpec:
    """One flat buffer: `numel` elements (alignment included), its entries in order of use.

    `place`: among all chunks of a model by the forward position of their first entries."""

    id: int
    key: Hashable
    numel: int
    entries: tuple[Entry, ...]
    place: int = 0

    @property
    def used_numel(self) -> int:
        return sum(entry.stop - entry.start for entry in self.entries)

    def shard(self, parts: int, part: int) -> tuple[int, int]:
        """Elements [start, stop) of shard `part` of `parts` equal ones."""
        assert self.numel % parts == 0, f"chunk {self.id}: {self.numel} elements do not cut into {parts}"
        length = self.numel // parts
        return part * length, (part + 1) * length


def stages_of(spec: ChunkSpec) -> tuple[int, ...]:
    """The pipeline stages that use a chunk; its gradient is summed over them."""
    assert isinstance(spec.key, ChunkKey)
    return spec.key.stages


def trains(spec: ChunkSpec) -> bool:
    """Whether the parameters of a chunk are trained, and not frozen."""
    assert isinstance(spec.key, ChunkKey)
    return spec.key.trains


def _up(numel: int, multiple: int) -> int:
    return -(-numel // multiple) * multiple


def _place(end: int, numel: int) -> int:
    """Where an entry of `numel` elements starts behind one that ends at `end`."""
    start = _up(end, SHARD_BLOCK_NUMEL if numel >= SHARD_BLOCK_NUMEL else ENTRY_ALIGN_NUMEL)
    crosses = start // SHARD_BLOCK_NUMEL != max(start, start + numel - 1) // SHARD_BLOCK_NUMEL
    return _up(start, SHARD_BLOCK_NUMEL) if crosses else start


def pack(
    items: Sequence[Item],
    *,
    target_numel: int,
    parts: Callable[[Hashable], int] = lambda key: 1,
    shard_numel: int = SHARD_BLOCK_NUMEL,
) -> tuple[ChunkSpec, ...]:
    """Place `items`, given in forward order, into chunks of about `target_numel` elements. Those of a key cut into
    `parts(key)` shards of a multiple of `shard_numel` elements.

    A parameter larger than the target gets a chunk of its own; keys never mix.  Chunks are numbered by the forward
    position of their first entry.
    """
    assert target_numel > 0 and shard_numel > 0
    assert len({item.name for item in items}) == len(items), "a parameter is packed once"
    open_entries: dict[Hashable, list[Entry]] = {}
    closed: list[tuple[int, Hashable, list[Entry]]] = []
    position = {item.name: i for i, item in enumerate(items)}

    def close(key: Hashable) -> None:
        if entries := open_entries.pop(key, None):
            closed.append((position[entries[0].name], key, entries))

    for item in items:
        entries = open_entries.setdefault(item.key, [])
        if entries and _place(entries[-1].stop, item.numel) + item.numel > target_numel:
            close(item.key)
            entries = open_entries.setdefault(item.key, [])
        start = _place(entries[-1].stop, item.numel) if entries else 0
        entries.append(Entry(item.name, start, start + item.numel))
    for key in list(open_entries):
        close(key)
    closed.sort(key=lambda found: found[0])
    return tuple(
        ChunkSpec(i, key, _up(max(entries[-1].stop, 1), parts(key) * shard_numel), tuple(entries), i)
        for i, (_, key, entries) in enumerate(closed)
    )


@dataclass(frozen=True)
class Interval:
    """`numel` elements that are held from moment `start` to moment `stop`, both included, but for the moments of
    `gap`: then their place is another's."""

    start: int
    stop: int
    numel: int
    gap: range = range(0)

    def mask(self, begin: int) -> int:
        """The moments in which it is held, as bits, counted from `begin`."""
        held = (1 << (self.stop + 1 - begin)) - (1 << (self.start - begin))
        if self.gap:
            held -= (1 << (self.gap.stop - begin)) - (1 << (self.gap.start - begin))
        return held


def most_held(intervals: Iterable[Interval]) -> int:
    """The elements of all that is held at the worst moment: no arena of these intervals is smaller."""
    changes = changes_of(intervals)
    return max(accumulate(change for _, change in sorted(changes.items())), default=0)


def changes_of(intervals: Iterable[Interval]) -> Counter[int]:
    """By how much more is held from some moments on than before."""
    changes: Counter[int] = Counter()
    for one in intervals:
        changes[one.start] += one.numel
        changes[one.stop + 1] -= one.numel
        if one.gap:
            changes[one.gap.start] -= one.numel
            changes[one.gap.stop] += one.numel
    return changes


def pack_intervals(intervals: Sequence[Interval]) -> tuple[tuple[int, ...], int]:
    """An offset for each interval, so that no two that are held at once overlap, and the elements that all take.

    Each goes to the lowest place that is free while it is held; of four orders of placing them, the one that takes
    least is kept: the largest first, with the earliest or the latest first among equals, and by time from either end.
    """
    orders: tuple[Callable[[Interval], tuple[int, int]], ...] = (
        lambda one: (-one.numel, one.start),
        lambda one: (-one.numel, -one.stop),
        lambda one: (one.start, -one.numel),
        lambda one: (-one.stop, -one.numel),
    )
    least, best = most_held(intervals), _first_fit(intervals, orders[0])
    for order in orders[1:]:
        if best[1] == least:
            break
        best = min(best, _first_fit(intervals, order), key=lambda found: found[1])
    return best


def _first_fit(
    intervals: Sequence[Interval], order: Callable[[Interval], tuple[int, int]]
) -> tuple[tuple[int, ...], int]:
    begin = min((one.start for one in intervals), default=0)
    offsets = [0] * len(intervals)
    placed: list[tuple[int, int, int]] = []  # by offset: where each starts and stops, and when it is held
    for i in sorted(range(len(intervals)), key=lambda i: order(intervals[i])):
        numel, mask, offset = intervals[i].numel, intervals[i].mask(begin), 0
        for start, stop, held in placed:
            if mask & held:
                if offset + numel <= start:
                    break
                if stop > offset:
                    offset = stop
        offsets[i] = offset
        insort(placed, (offset, offset + numel, mask))
    ends = [offset + one.numel for offset, one in zip(offsets, intervals, strict=True)]
    return tuple(offsets), max(ends, default=0)


ARENA_ALIGN_BYTES = 128  # of what lies beside other kinds: views of any dtype, and vector loads


@dataclass(frozen=True)
class Stay:
    """What of which number is in an arena from moment `start` to moment `stop`, both included, but for the moments of
    `gap`: then its place is another's. `is_kept`: from one step to the next, so that it comes when the gap is over."""

    what: str
    number: int
    start: int
    stop: int
    bytes: int
    gap: range = range(0)
    is_kept: bool = False

    @property
    def comes(self) -> int:
        """The moment in which it does."""
        return self.gap.stop if self.is_kept else self.start

    def sized(self, align_bytes: int) -> Interval:
        """With its bytes on a multiple of so many."""
        return Interval(self.start, self.stop, _up(self.bytes, align_bytes), self.gap)


@dataclass(frozen=True)
class ArenaPlan:
    """Where each stay lies, `bytes` of the whole, and the most that is held at one moment, `held_bytes`."""

    stays: tuple[Stay, ...]
    offsets: tuple[int, ...]
    bytes: int
    held_bytes: int
    align_bytes: int = 1

    def sized(self, stay: Stay) -> int:
        """What a stay counts in `held_bytes`."""
        return _up(stay.bytes, self.align_bytes)

    def __str__(self) -> str:
        lines = [
            f"{stay.what:<9} {stay.number:>5}  moments {stay.start:>5} to {stay.stop:<5} {offset:>14,} + {stay.bytes:,}"
            for stay, offset in zip(self.stays, self.offsets, strict=True)
        ]
        return "\n".join([*lines, f"arena {self.bytes:,}, held at once {self.held_bytes:,}"])


def pack_stays(stays: Sequence[Stay], align_bytes: int = ARENA_ALIGN_BYTES) -> ArenaPlan:
    """All stays in one arena, each on a multiple of `align_bytes`; kinds one behind the other, where that takes less
    than what they have together. Stays of no bytes are left out."""
    some = tuple(stay for stay in stays if stay.bytes)
    sized = [stay.sized(align_bytes) for stay in some]
    offsets, total = pack_intervals(sized)
    held = most_held(sized)
    if total == held:
        return ArenaPlan(some, offsets, total, held, align_bytes)
    apart, end = [0] * len(some), 0
    for what in dict.fromkeys(stay.what for stay in some):
        mine = [i for i, stay in enumerate(some) if stay.what == what]
        found, length = pack_intervals([sized[i] for i in mine])
        for i, offset in zip(mine, found, strict=True):
            apart[i] = end + offset
        end += length
    if end < total:
        offsets, total = tuple(apart), end
    return ArenaPlan(some, offsets, total, held, align_bytes)


def held_stays(stays: Sequence[Stay], align_bytes: int = ARENA_ALIGN_BYTES) -> int:
    """The least that an arena of these stays takes: what is held at the worst moment."""
    return most_held([stay.sized(align_bytes) for stay in stays])


def visits(
    sizes_bytes: Mapping[int, int], width: int, what: str = "visitors", *, last_first: bool = False
) -> tuple[Stay, ...]:
    """When visitors of such sizes, by their numbers, are there, who come one after the other: each while the `width`
    numbers from its own on have their turns. So many in a row are there at once: some that come, one whose turn it is,
    and some that go. `last_first`: those of higher numbers come first. The turn of number 0 is moment 0."""
    turns = {number: -number if last_first else number for number in sizes_bytes}
    return tuple(Stay(what, n, turn, turn + width - 1, sizes_bytes[n]) for n, turn in turns.items())
