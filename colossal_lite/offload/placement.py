"""Places weights, gradients and optimizer records on device, host and disk under budgets.

Note: why a placement is fixed.
State that can move is cut into *pieces*: of each chunk this rank's shard of the weights, its sum of the gradient, and
its optimizer record.  The record has the states, and the master where that is separate.  A step uses them in phases.
Weights are read in every forward and backward, and in the update if they are their own master.  Gradients are added in
each backward and read in the update.  Records are read and written in the update.  Frozen weights are read in forwards
and backwards only.  Across the boundary between two phases the device holds at most its capacity.  The other pieces
must be copied again, whatever the policy.  That is `link_bound` of the tests, which Belady's rule (farthest next use
first; 10.1147/sj.52.0078) cannot beat.  A forward and a backward are a palindrome, and an update goes the way of the
next forward.  So every piece is used once in a phase.  A boundary costs the same whichever piece is on the device.  A
fixed placement meets the bound, with one micro-batch and with several, and a step decides nothing.  Keep what saves
most link traffic per byte of device memory.  Modified state counts twice: it is copied both ways.  Where masters are
separate, nothing reads the weights between the last backward and their update.  There gradients, or the last of their
sums, use the same memory at other times (schedule/step_moments.py).

A user can set the share of each kind on the host (`divide`).  The pieces are then spread evenly over the chunks, so
copies are at equal distances in a step.  Every choice of as many bytes moves as much.

A chunk whose record is on the host may be updated there.  Then the record moves nothing.  Weights and gradient on the
device cross the link once a step, those on the host do not.  So what a piece moves depends on the tier of the record of
its chunk (`StatePiece.beside`).  Pieces are chosen chunk by chunk: first those that together save most per byte.

Records beyond the budget of the host go to disk (`spill_to_disk`); weights and gradients are used too often.  Every
byte on disk is read and written once a step, so the fewest bytes are best.  Equal sizes are spread evenly over the
updates, which share the disk's time.  Records on disk pass through slots on the host, each as large as the largest
record.  So large records may be better off the disk, and a handful there saves nothing.  The least sufficient sum of
sizes is sought among all sums that can be reached; with many thousand different ones, among nearly all.

What does not move is counted first: full weights, slots, the gather windows of schedule/gather_plan.py, frozen
parameters, and the activations, as the first micro-batches have shown them.
Cost: none in a step.
Source: arXiv 2108.05818 (chunks, eviction by next use from a traced step), 2302.02599 (placement from chunk sizes),
2101.06840 (states on the host).
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cache, cached_property
from itertools import accumulate, combinations, groupby
from typing import NamedTuple

from colossal_lite.memory.disk_layout import whole_pages
from colossal_lite.offload.arena_waits import waits_of
from colossal_lite.offload.pieces import (
    PASSING,
    VISITING,
    VISITORS,
    Name,
    StagingBuffer,
    StateKind,
    StatePiece,
    passing_bytes,
    unused_bytes,
)
from colossal_lite.schedule.interval_packing import (
    ARENA_ALIGN_BYTES,
    ArenaPlan,
    LiveRange,
    changes_of,
    pack_live_ranges,
    packed_apart,
)
from colossal_lite.schedule.optimizer_updates import NO_ARENA, ArenaWaits
from colossal_lite.schedule.step_moments import ACCUMULATING, Backwards, SharedInterval, shared_interval


@dataclass(frozen=True)
class StatePlacement:
    """The tier of every piece, and the bytes that follow. `fixed`: device bytes that are no pieces, by kind."""

    pieces: tuple[StatePiece, ...]
    on_host: frozenset[Name]
    fixed: tuple[tuple[str, int], ...]
    budget: int | None = None
    beside: tuple[LiveRange, ...] | None = None
    """What shares an arena with the staging buffers of pieces off the device; None: each kind of these has its own
    buffers."""
    on_disk: frozenset[Name] = frozenset()
    """Optimizer records, none in `on_host`."""
    host_budget: int | None = None
    first_host_bytes: int = 0
    """On the host before the first update, if that has a budget."""

    @property
    def off_device(self) -> frozenset[Name]:
        """The pieces that rest off the device."""
        return self.on_host | self.on_disk

    @property
    def rows(self) -> tuple[tuple[str, str, int], ...]:
        """(kind, tier, bytes) of all that is not zero."""
        found: dict[tuple[str, str], int] = {(kind, "device"): held for kind, held in self.fixed}
        for piece in self.pieces:
            where = str(piece.name.kind), (tier := self.tier_of(piece.name))
            held = piece.own_bytes if tier == "device" else piece.resting_bytes
            found[where] = found.get(where, 0) + held
        kind = "visiting" if self.beside is None else "arena"
        found[kind, "device"] = found.get((kind, "device"), 0) + self.visiting_bytes
        found["updating", "host"] = slot_bytes(self.pieces, self.off_device, "host")
        there = {piece.name.chunk: piece.bytes for piece in self.pieces if piece.name in self.on_disk}
        found["passing", "host"], found["unused", "disk"] = passing_bytes(there), unused_bytes(there)
        return tuple((kind, tier, held) for (kind, tier), held in found.items() if held)

    @property
    def visiting_bytes(self) -> int:
        """Slots on the device in which what rests off it is updated, and through which gradients leave; with what else
        is in one arena with them."""
        if self.beside is not None:
            return self.arena.bytes
        return slot_bytes(self.pieces, self.off_device, "device")

    @cached_property
    def arena(self) -> ArenaPlan:
        """Where in it everything is, and when."""
        last = self._last
        ranges = (taker.live_range(last) for taker in _takers(self.pieces, self.off_device))
        return pack_live_ranges([*(self.beside or ()), *ranges])

    @property
    def _last(self) -> int:
        """The highest number of a chunk."""
        return max((piece.name.chunk for piece in self.pieces), default=0)

    @property
    def arena_with_room(self) -> ArenaPlan:
        """As `arena`, in as many bytes. Where these suffice, the first records come while backward runs. And what
        updates leave to a slow link is apart from the first gradients of the next backward, from as many as there is
        room for."""
        plan = self._with_early_records
        begin = min((one.start for one in plan.live_ranges if one.what == ACCUMULATING), default=0)
        leaving = {VISITING[kind].what for kind in (StateKind.WEIGHTS, StateKind.OPTIMIZER)}
        last = self._last
        for count in (last + 1, 8, 4, 2):
            stop = begin + 2 * count
            longer = {
                (one.what, one.number): replace(one, start=begin, gap=range(stop, one.start))
                for one in plan.live_ranges
                if one.what in leaving and one.number > last - VISITORS and stop < one.start
            }
            if (found := packed_apart(plan, longer)) is not plan:
                return found
        return plan

    def waits(self) -> ArenaWaits:
        """What the arena delays in a step; nothing where there is none."""
        return NO_ARENA if self.beside is None else waits_of(self.arena_with_room, self._last + 1)

    @property
    def _with_early_records(self) -> ArenaPlan:
        """As `arena`, in as many bytes. The records that come before the first update exist from a backward on, if
        there is room."""
        plan, what = self.arena, VISITING[StateKind.OPTIMIZER].what
        begin = min((one.start for one in plan.live_ranges), default=0)
        for count in range(VISITORS - 1, 0, -1):
            ranges = [
                replace(one, start=begin) if one.what == what and one.number < count else one
                for one in plan.live_ranges
            ]
            if (found := pack_live_ranges(ranges, plan.align_bytes)).bytes == plan.bytes:
                return found
        return plan

    def tier_of(self, name: Name) -> str:
        return "disk" if name in self.on_disk else "host" if name in self.on_host else "device"

    @property
    def device_bytes(self) -> int:
        return self._bytes_on("device")

    @property
    def host_bytes(self) -> int:
        return self._bytes_on("host")

    def _bytes_on(self, tier: str) -> int:
        return sum(held for _, where, held in self.rows if where == tier)

    @property
    def up_bytes(self) -> int:
        """From host to device in a step."""
        return sum(piece.crossing(self.off_device).ups * piece.bytes for piece in self.pieces)

    @property
    def down_bytes(self) -> int:
        return sum(piece.crossing(self.off_device).downs * piece.bytes for piece in self.pieces)

    @property
    def read_bytes(self) -> int:
        """From disk in a step; as many are written."""
        return sum(piece.bytes for piece in self.pieces if piece.name in self.on_disk)

    def __str__(self) -> str:
        lines = [f"{kind:<12} {tier:<6} {held:>14,}" for kind, tier, held in self.rows]
        lines.append(_held("device", self.device_bytes, self.budget))
        if self.host_budget is not None:
            lines.append(_held("host", self.host_bytes, self.host_budget))
            if self.first_host_bytes > self.host_bytes:
                lines.append(_held("host at first", self.first_host_bytes, self.host_budget))
        for kind in StateKind:
            if kind is StateKind.LAST_SUM or (
                kind is StateKind.FROZEN and not any(piece.name.kind is kind for piece in self.pieces)
            ):
                continue
            chunks = sorted(name.chunk for name in self.on_host if name.kind is kind)
            lines.append(f"{kind} on the host: {_spans(chunks) or 'none'}")
        for shared in SharedInterval:
            turns = sorted(
                p.name.chunk for p in self.pieces if p.shared is shared and p.is_time_shared(self.off_device)
            )
            lines += [f"{shared} that share memory in the arena: {_spans(turns)}"] if turns else []
        if self.on_disk:
            lines.append(f"optimizer on disk: {_spans(sorted(name.chunk for name in self.on_disk))}")
        lines.append(f"link in a step: {self.up_bytes:,} up, {self.down_bytes:,} down")
        if self.on_disk:
            lines.append(f"disk in a step: {self.read_bytes:,} read, {self.read_bytes:,} written")
        return "\n".join(lines)


def _held(tier: str, held_bytes: int, budget: int | None) -> str:
    of = "" if budget is None else f" of {budget:,}{': does not fit' if held_bytes > budget else ''}"
    return f"{tier:<19} {held_bytes:>14,}{of}"


def slot_bytes(pieces: Iterable[StatePiece], on_host: frozenset[Name], tier: str) -> int:
    """What slots take on a tier, those of each kind by themselves."""
    sizes: dict[StagingBuffer, dict[int, int]] = {}  # of each kind, who takes such: chunk -> bytes
    for piece in pieces:
        for slot in piece.crossing(on_host).slots:
            if slot.tier == tier:
                sizes.setdefault(slot, {})[piece.name.chunk] = piece.bytes
    return sum(slot.bytes(some) for slot, some in sizes.items())


class _Taker(NamedTuple):
    """What takes a place on the device, of a chunk. Sums of gradients leave in these backwards, so many in flight."""

    what: StagingBuffer | SharedInterval
    chunk: int
    bytes: int
    backwards: Backwards
    in_flight: int

    def live_range(self, last: int) -> LiveRange:
        if isinstance(self.what, SharedInterval):
            return shared_interval(self.what, self.chunk, self.bytes, last, self.in_flight)
        (live_range,) = self.what.in_step(
            {self.chunk: self.bytes}, last=last, backwards=self.backwards, in_flight=self.in_flight
        )
        return live_range


def _takers(pieces: Iterable[StatePiece], on_host: frozenset[Name]) -> Iterator[_Taker]:
    for piece in pieces:
        way, chunk = piece.crossing(on_host), piece.name.chunk
        when = piece.backwards(on_host), piece.in_flight
        yield from (_Taker(slot, chunk, piece.bytes, *when) for slot in way.slots if slot.tier == "device")
        if piece.shared is not None and piece.is_time_shared(on_host):
            yield _Taker(piece.shared, chunk, piece.bytes, *when)


class _Least:
    """`StatePlacement.visiting_bytes` if places fit together without a gap, which they do as a rule: quickly, for many
    choices of the same pieces that differ in a few from one to the next."""

    def __init__(self, pieces: Sequence[StatePiece], beside: Sequence[LiveRange] | None) -> None:
        self._of_chunk, self._on_host = _by_chunk(pieces), frozenset(piece.name for piece in pieces)
        self._last, self._is_shared = max(self._of_chunk, default=0), beside is not None
        self._known: dict[_Taker, tuple[tuple[int, int], ...]] = {}
        first = shared_interval(SharedInterval.WEIGHTS, 0, 0, self._last)
        self._begin, self._end = first.start, first.stop + VISITORS + 2
        # By how much more is held from a moment on than before: of what shares an arena, or of each kind of slots.
        self._changes: dict[StagingBuffer | SharedInterval | None, list[int]] = {}
        self._count(None, self._changes_of(beside or ()), 1)
        for taker in _takers(pieces, self._on_host):
            self._count(taker.what, self._of(taker), 1)

    def __call__(self, on_host: frozenset[Name]) -> int:
        for chunk in {name.chunk for name in on_host ^ self._on_host}:
            for times, off_device in ((-1, self._on_host), (1, on_host)):
                for taker in _takers(self._of_chunk[chunk], off_device):
                    self._count(taker.what, self._of(taker), times)
        self._on_host = on_host
        return sum(max(accumulate(changes)) for changes in self._changes.values())

    def _count(
        self, what: StagingBuffer | SharedInterval | None, changes: Iterable[tuple[int, int]], times: int
    ) -> None:
        key = None if self._is_shared else what
        held = self._changes.setdefault(key, [0] * (self._end - self._begin))
        for moment, change in changes:
            held[moment] += times * change

    def _of(self, taker: _Taker) -> tuple[tuple[int, int], ...]:
        if (found := self._known.get(taker)) is None:
            found = self._known[taker] = self._changes_of([taker.live_range(self._last)])
        return found

    def _changes_of(self, live_ranges: Iterable[LiveRange]) -> tuple[tuple[int, int], ...]:
        align = ARENA_ALIGN_BYTES if self._is_shared else 1
        changes = changes_of(live_range.sized(align) for live_range in live_ranges)
        return tuple((moment - self._begin, change) for moment, change in changes.items())


def place(
    pieces: Sequence[StatePiece],
    fixed: Mapping[str, int],
    budget: int | None,
    beside: tuple[LiveRange, ...] | None = None,
) -> StatePlacement:
    """The placement with few bytes over the link that the device's `budget` allows; None: no limit. `beside` as
    `StatePlacement` has it.

    If nothing fits, the placement that needs least is returned: `device_bytes` says how much."""

    @cache
    def at(on_host: frozenset[Name]) -> StatePlacement:
        return StatePlacement(tuple(pieces), on_host, tuple(fixed.items()), budget, beside)

    if budget is None or at(frozenset()).device_bytes <= budget:
        return at(frozenset())
    on_host, least = frozenset(piece.name for piece in pieces if piece.moves), _Least(pieces, beside)
    for kind in (StateKind.OPTIMIZER, StateKind.WEIGHTS, StateKind.GRADIENTS, StateKind.FROZEN):
        others = frozenset(name for name in on_host if name.kind is not kind)
        on_host = others | frozenset(_fewest(pieces, kind, others, least))
    room_bytes, groups = budget - at(on_host).device_bytes, _by_worth(_by_chunk(pieces), on_host)
    for _ in range(GAPS_TRIED):
        tried = _filled(pieces, groups, on_host, least, room_bytes)
        if (over := at(tried[-1]).device_bytes - budget) <= 0:
            return at(tried[-1])
        room_bytes -= over
    last = bisect_left(tried, True, 1, key=lambda some: at(some).device_bytes > budget) - 1
    return at(tried[last])


GAPS_TRIED = 4
"""How often the device is filled again with less, because of gaps between places; then the last pieces stay off it."""


def _filled(
    pieces: Sequence[StatePiece],
    groups: Iterable[list[PieceGroup]],
    on_host: frozenset[Name],
    least: _Least,
    room_bytes: int,
) -> list[frozenset[Name]]:
    """Sets of pieces on the host, each smaller than the one before, as far as there is room. The first of `groups`
    leave first."""
    visiting, tried, of_chunk = least(on_host), [on_host], _by_chunk(pieces)
    for group in groups:
        # All of a kind or the rest of it first: with the last of them go its slots.
        for some in (group, *([step] for step in group)):
            names = frozenset(piece.name for step in some for piece in step) & on_host
            less = least(on_host - names) if names else visiting
            own = sum(p.own_bytes for step in some for p in step if p.name in names)
            mine = [piece for chunk in {name.chunk for name in names} for piece in of_chunk[chunk]]
            fits = own + less - visiting <= room_bytes
            if names and fits and _moved(mine, on_host - names) <= _moved(mine, on_host):
                on_host, room_bytes, visiting = on_host - names, room_bytes - own - less + visiting, less
                tried.append(on_host)
    return tried


def spill_to_disk(placed: StatePlacement, host_budget: int, beside_bytes: int = 0) -> StatePlacement:
    """The placement with the fewest bytes on disk whose host holds no more than `host_budget`, `beside_bytes` among
    them. If nothing fits, the one whose host holds least."""
    names = {name.chunk: name for name in placed.on_host if name.kind is StateKind.OPTIMIZER}
    sizes = {piece.name.chunk: piece.bytes for piece in placed.pieces if piece.name in names.values()}
    room = host_budget - beside_bytes - placed.host_bytes + sum(sizes.values())
    down = frozenset(names[chunk] for chunk in spilled(sizes, room))
    return replace(placed, on_host=placed.on_host - down, on_disk=down, host_budget=host_budget)


def spilled(records: Mapping[int, int], room_bytes: int) -> frozenset[int]:
    """Choose the `records`, chunk -> bytes, that go to disk. The others, and the slots for those on disk, take at most
    `room_bytes` of the host: the fewest bytes, of each size evenly spread over the chunks. If nothing is enough, those
    that leave the host least."""
    over = sum(records.values()) - room_bytes
    if over <= 0:
        return frozenset()
    of_size: dict[int, list[int]] = {}
    for chunk in sorted(records):
        of_size.setdefault(records[chunk], []).append(chunk)
    counts = {size: len(of_size[size]) for size in sorted(of_size)}
    # So much must go to disk that the slots for it, which the largest decides, have room too: more than they take.
    taken = _least_sum(counts, lambda largest: over + PASSING * whole_pages(largest))
    if taken is None:
        taken = min(
            ({size: n for size, n in counts.items() if size <= largest} for largest in (0, *counts)),
            key=lambda some: (
                PASSING * whole_pages(max(some, default=0)) - sum(size * n for size, n in some.items())
            ),
        )
    return frozenset(chunk for size, count in taken.items() for chunk in _spread(of_size[size], count))


MOST_SUMS = 2**14


def _least_sum(counts: Mapping[int, int], need: Callable[[int], int]) -> dict[int, int] | None:
    """Of numbers of things of each size, given in growing order, with how many there are: those of least sum that is at
    least `need(largest size among them)`; None if there is none. Of more than `MOST_SUMS` sums that can be reached only
    as many are followed, always the largest among them. The result is then still sufficient."""
    reached: dict[int, tuple[int, int, int]] = {0: (0, 0, 0)}  # sum -> that before, size, how many of it
    followed, best = [0], None
    for size, count in counts.items():
        for several in _powers(count):
            for before in followed:
                reached.setdefault(before + several * size, (before, size, several))
            followed = sorted({*followed, *(before + several * size for before in followed)})
            if len(followed) > MOST_SUMS:
                unit = -(-followed[-1] // MOST_SUMS)
                followed = [*{each // unit: each for each in followed}.values()]
        enough = bisect_left(followed, need(size))
        if enough < len(followed) and (best is None or followed[enough] < best):
            best = followed[enough]
    if best is None:
        return None
    found = Counter[int]()
    while best:
        best, size, several = reached[best]
        found[size] += several
    return dict(found)


def _powers(count: int) -> Iterable[int]:
    """Numbers with subsets that sum up to each number from 0 to `count`, and to no other."""
    power = 1
    while count > 0:
        yield min(power, count)
        count, power = count - power, 2 * power


def _spread(chunks: Sequence[int], count: int) -> list[int]:
    """So many of these, at equal distances."""
    return [chunks[(2 * n + 1) * len(chunks) // (2 * count)] for n in range(count)]


def divide(
    pieces: Sequence[StatePiece],
    fixed: Mapping[str, int],
    fractions: Mapping[str, float],
    budget: int | None = None,
    beside: tuple[LiveRange, ...] | None = None,
) -> StatePlacement:
    """The placement with a share `fractions[kind]` of the bytes of each kind on the host, to the nearest piece: at most
    half of the largest piece off. First come the chunks that the host updates, the last ones first. So what a step
    needs at once, and what it computes last, is on the device sooner. Frozen weights have the share of weights."""
    on_host = {piece.name for piece in pieces if piece.name.kind is StateKind.LAST_SUM}
    for kind in (kind for kind in StateKind if kind is not StateKind.LAST_SUM):
        seen = away = 0
        share = fractions[StateKind.WEIGHTS if kind is StateKind.FROZEN else kind]
        mine = [p for p in pieces if p.name.kind is kind and p.moves]
        for piece in sorted(mine, key=lambda p: (p.beside is None, -p.name.chunk)):
            seen += piece.bytes
            if away + piece.bytes / 2 <= share * seen:
                away += piece.bytes
                on_host.add(piece.name)
    return StatePlacement(tuple(pieces), frozenset(on_host), tuple(fixed.items()), budget, beside)


def _fewest(
    pieces: Sequence[StatePiece], kind: StateKind, others: frozenset[Name], least: _Least
) -> list[Name]:
    """The set of a kind's smallest pieces that leaves least on the device when it is on the host, beside the `others`
    there: a few large ones may take less than the slots for them."""
    mine = sorted(
        (piece for piece in pieces if piece.name.kind is kind and piece.moves), key=lambda piece: piece.bytes
    )

    def on_device(count: int) -> int:
        """Bytes if the `count` smallest are on the host."""
        off_device = frozenset(piece.name for piece in mine[:count])
        return least(others | off_device) + sum(piece.own_bytes for piece in mine[count:])

    return [piece.name for piece in mine[: min(range(len(mine) + 1), key=on_device)]]


def _moved(pieces: Iterable[StatePiece], on_host: frozenset[Name]) -> int:
    """Bytes over the link in a step, both ways."""
    ways = ((piece, piece.crossing(on_host)) for piece in pieces)
    return sum((way.ups + way.downs) * piece.bytes for piece, way in ways)


def _by_chunk(pieces: Iterable[StatePiece]) -> dict[int, list[StatePiece]]:
    found: dict[int, list[StatePiece]] = {}
    for piece in pieces:
        found.setdefault(piece.name.chunk, []).append(piece)
    return found


PieceGroup = tuple[StatePiece, ...]
"""Pieces of one chunk that go to the device together."""


def _steps_of(
    pieces: Sequence[StatePiece], on_host: frozenset[Name]
) -> Iterable[tuple[Fraction, PieceGroup]]:
    """In which order one chunk's pieces go to the device, the most saved per byte first, and what each saves."""
    while True:
        left = [piece for piece in pieces if piece.name in on_host]
        before = _moved(pieces, on_host)
        found: list[tuple[Fraction, PieceGroup]] = []
        for count in range(1, len(left) + 1):
            for some in combinations(left, count):
                saved = before - _moved(pieces, on_host - {piece.name for piece in some})
                found.append((Fraction(saved, sum(piece.bytes for piece in some)), some))
        best = max(found, key=lambda each: each[0], default=None)  # of several the one of fewest pieces
        if best is None or (best[0] <= 0 and any(piece.beside for piece in left)):
            return
        yield best
        on_host -= {piece.name for piece in best[1]}


def _by_worth(
    of_chunk: Mapping[int, Sequence[StatePiece]], on_host: frozenset[Name]
) -> Iterable[list[PieceGroup]]:
    """Steps that save as much per byte and are of the same kinds, those that save most first; larger ones first."""
    steps = [step for pieces in of_chunk.values() for step in _steps_of(pieces, on_host)]

    def worth(step: tuple[Fraction, PieceGroup]) -> tuple[Fraction, tuple[StateKind, ...]]:
        return -step[0], tuple(sorted(piece.name.kind for piece in step[1]))

    def size(step: tuple[Fraction, PieceGroup]) -> tuple[int, Name]:
        return -sum(piece.bytes for piece in step[1]), step[1][0].name

    ordered = sorted(steps, key=lambda step: (*worth(step), *size(step)))
    return [[step for _, step in group] for _, group in groupby(ordered, key=worth)]


def _spans(chunks: Sequence[int]) -> str:
    """`0-3, 7` of sorted numbers."""
    alike = groupby(enumerate(chunks), key=lambda pair: pair[1] - pair[0])
    runs = [[chunk for _, chunk in run] for _, run in alike]
    return ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)
