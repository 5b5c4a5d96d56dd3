"""Models an update phase by measured rates, and finds the share of chunks for the host that is fastest.

Note: the model (arXiv 2410.21316, section 4).
N_c elements are updated on the host, N_x streamed to the device.  A record, gradient and weight have s, g, w bytes an
element.  A host update reads and writes a bytes of host memory an element.

    host     N_c / U_c + calls          up     (s N_x + w N_c) / B_up         device   N_x / U_d
    down     (s N_x + g N_c) / B_down   memory (a N_c + 2 s N_x + (g + w) N_c) / B_m

Weights that are their own masters, or half of them, come down too, w bytes more there and of memory.

The longest lane is a bound.  A few shares are simulated, that of the least bound and both ends among them.  Up to
`SHARES` chunks the search then goes from the best of these to its neighbours, while one is faster.  Where there are few
chunks it goes on from these with changes of single chunks and exchanges of two.  Lanes and seconds are those of each
chunk's own bytes.  At most about `SIMULATED` chunks stand for all of them (`few_of`).

Without `Computing` the phase is simulated alone, from the norm to the last write.  With it whole steps are: updates run
beside the next forward, and gradients are copied down in backward.  The period of a step is minimised.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Sequence
from dataclasses import astuple, dataclass, replace
from fractions import Fraction
from functools import cache
from itertools import combinations
from math import inf
from typing import Any

from colossal_lite.schedule.optimizer_updates import (
    NO_ARENA,
    ArenaWaits,
    ChunkPart,
    Crossing,
    Streaming,
    memory_of,
    part_of,
    run_of,
    update_plan,
)
from colossal_lite.schedule.plan import CPU, DISK, Action, ActionKind, Memory, Plan
from colossal_lite.schedule.simulator import HostBandwidth, ScheduleTimeline, simulate
from colossal_lite.schedule.update_mix import LOOKAHEAD, UpdateMix, mix_of, mix_with

SIMULATED = 256
"""About as many chunks stand for all of them, where there are more. Fewer would hide how chunks differ."""
SHARES = 48
"""Most shares between none and all. With more chunks than that the search has no second part: it takes long."""
COARSE = 16
"""Shares at equal distances that are simulated first."""
FEW = 12
"""Chunks, each placed by itself."""
STEPS = 3
"""Simulated steps; the last one counts."""
MOST_MICRO_BATCHES = 4
"""Of a simulated step. Where there are more, the two between the first and the last stand for all others."""
NEAR = 2
"""Chunks more or fewer that are simulated around the best so far."""


@dataclass(frozen=True)
class Rates:
    """What a machine does in a second, for one rank."""

    host_update: float
    """Elements updated on the host."""
    device_update: float
    """Elements updated on the device."""
    up: float
    """Bytes from host to device."""
    down: float
    """Bytes from device to host."""
    host_memory: float = inf
    """Bytes that the host reads and writes, all lanes together."""
    call_s: float = 0.0
    """Seconds that a chunk costs beside its elements, on the host."""


@dataclass(frozen=True)
class UpdateBytes:
    """Elements that update off their resting place, and the bytes of each."""

    elements: float
    chunks: float
    record: float
    """0 where records rest on the device."""
    gradient: float
    """0 where gradients rest on the host."""
    weight: float
    """0 where weights rest on the host."""
    host_memory: float
    """Bytes of host memory that an update there reads and writes."""
    early: bool = False
    """Whether gradients have come down in backward."""
    resting_gradient: float = 0.0
    """Of gradients that rest on the host: they leave in backward, and come up for an update on the device."""
    resting_weight: float = 0.0
    """Of weights that rest on the host: an update on the device writes them back."""
    reads_weights: bool = False
    """Whether an update reads weights too: they are its masters, or half of them."""
    returning_gradient: float = 0.0
    """Of earlier sums that rest on the host between micro-batches, and come up for the last."""

    @property
    def moves(self) -> bool:
        """Whether any of it rests off the device."""
        sizes = self.record, self.resting_gradient, self.resting_weight, self.returning_gradient
        return self.elements > 0 and any(sizes)

    @property
    def streamed(self) -> Streaming:
        """The copies beside a record for an update on the device."""
        weights = (ChunkPart.WEIGHTS,) if self.resting_weight else ()
        gradient = (ChunkPart.GRADIENT,) if self.resting_gradient else ()
        return Streaming((*(weights if self.reads_weights else ()), *gradient), weights)

    @property
    def streamed_up(self) -> float:
        """Bytes that an update on the device has copied to it, records among them."""
        return self.record + self.resting_gradient + self.resting_weight * self.reads_weights

    @property
    def streamed_down(self) -> float:
        """Bytes that it has copied back."""
        return self.record + self.resting_weight

    @property
    def new_weight(self) -> float:
        """Bytes of weight that come up after an update on the host."""
        return self.weight + self.resting_weight

    @property
    def gradient_late(self) -> float:
        """Bytes of gradient that come down for an update on the host, behind the norm."""
        return 0.0 if self.early else self.gradient

    @property
    def read_weight(self) -> float:
        """Bytes of weight that come down for an update on the host."""
        return self.weight * self.reads_weights

    def crossing(self, *, late: bool) -> Crossing:
        """What crosses the link for an update on the host. `late`: behind the norm alone, with weights that a forward
        would fetch."""
        down = {
            ChunkPart.GRADIENT: self.gradient_late if late else self.gradient,
            ChunkPart.WEIGHTS: self.read_weight,
        }
        up = self.new_weight if late else self.weight
        return Crossing(tuple(part for part, size in down.items() if size), up=up > 0)


@dataclass(frozen=True)
class Computing:
    """Seconds that a step computes beside its updates."""

    forward_s: float
    backward_s: float
    gathers_ahead: int = 0
    """How many units early a forward's weights are gathered, at ZeRO-3."""
    gathers_again: bool = False
    """Whether backward gathers them again there."""
    micro_batches: int = 1
    """Whose sums a step accumulates."""

    @property
    def simulated(self) -> int:
        """Micro-batches of a simulated step."""
        return min(self.micro_batches, MOST_MICRO_BATCHES)

    def share_of(self, number: int) -> float:
        """The part of a step's computing that a simulated micro-batch has."""
        ends = min(self.micro_batches, 2)
        between = (self.micro_batches - ends) / max(self.simulated - ends, 1)
        return (1 if number in (0, self.simulated - 1) else between) / self.micro_batches

    @property
    def s(self) -> float:
        return self.forward_s + self.backward_s

    @staticmethod
    def of(
        seconds: float, *, recomputes: bool, gathers_ahead: int = 0, gathers_again: bool = False,
        micro_batches: int = 1,
    ) -> Computing:  # fmt: skip
        """Backward multiplies twice as much as forward, and once more what it recomputes."""
        forward_s = seconds / (4 if recomputes else 3)
        return Computing(forward_s, seconds - forward_s, gathers_ahead, gathers_again, micro_batches)


def operations_of(weights: int, tokens: int, *, recomputes: bool) -> float:
    """Floating-point operations of a step's forward and backward. A weight and token take 2 forward and 4 backward, and
    2 more where backward recomputes the forward."""
    return (8.0 if recomputes else 6.0) * weights * tokens


@dataclass(frozen=True)
class Lanes:
    """Seconds for which each lane of an update phase works."""

    host_s: float
    up_s: float
    down_s: float
    device_s: float
    memory_s: float

    def __add__(self, other: Lanes) -> Lanes:
        return Lanes(*(a + b for a, b in zip(astuple(self), astuple(other), strict=True)))

    @property
    def bound_s(self) -> float:
        """No order of the same work is faster."""
        return max(self.host_s, self.up_s, self.down_s, self.device_s, self.memory_s)

    def __str__(self) -> str:
        rows = {"host": self.host_s, "up": self.up_s, "down": self.down_s, "device": self.device_s}
        lanes = ", ".join(f"{lane} {seconds:.3g} s" for lane, seconds in rows.items())
        return f"{lanes}, host memory {self.memory_s:.3g} s: at least {self.bound_s:.3g} s"


@dataclass(frozen=True)
class FoundMix:
    """The share of chunks that is updated on the host, the lanes that follow, and the simulated seconds."""

    host_share: Fraction
    lanes: Lanes
    simulated_s: float
    chosen: frozenset[int] | None = None
    """The chunks themselves, where there are few; None: `host_share` of them at equal distances."""


def lanes_of(work: UpdateBytes, rates: Rates, host_share: Fraction) -> Lanes:
    """The lanes of a share."""
    on_host = work.elements * float(host_share)
    streamed = work.elements - on_host
    crossing = work.streamed_up + work.streamed_down
    down = work.gradient_late + work.read_weight
    memory = (work.host_memory + down + work.new_weight) * on_host + crossing * streamed
    return Lanes(
        host_s=on_host / rates.host_update + work.chunks * float(host_share) * rates.call_s,
        up_s=(work.streamed_up * streamed + work.new_weight * on_host) / rates.up,
        down_s=(work.streamed_down * streamed + down * on_host) / rates.down,
        device_s=streamed / rates.device_update,
        memory_s=memory / rates.host_memory,
    )


def lanes_of_each(parts: Sequence[UpdateBytes], rates: Rates, on_host: Collection[int]) -> Lanes:
    """The lanes of these chunks, where those `on_host` are updated there."""
    each = (lanes_of(part, rates, Fraction(number in on_host)) for number, part in enumerate(parts))
    return sum(each, Lanes(0.0, 0.0, 0.0, 0.0, 0.0))


def mean_of(parts: Sequence[UpdateBytes]) -> UpdateBytes:
    """All of these chunks' elements, with the bytes that one of them has on average."""
    elements = sum(part.elements for part in parts)

    def mean(size: Callable[[UpdateBytes], float]) -> float:
        return sum(part.elements * size(part) for part in parts) / max(elements, 1)

    return UpdateBytes(
        elements, sum(part.chunks for part in parts), mean(lambda part: part.record),
        mean(lambda part: part.gradient), mean(lambda part: part.weight), mean(lambda part: part.host_memory),
        any(part.early for part in parts), mean(lambda part: part.resting_gradient),
        mean(lambda part: part.resting_weight), any(part.reads_weights for part in parts),
        mean(lambda part: part.returning_gradient),
    )  # fmt: skip


def equal_parts(work: UpdateBytes, count: int) -> tuple[UpdateBytes, ...]:
    """So many chunks of the same size."""
    return (replace(work, elements=work.elements / count, chunks=work.chunks / count),) * count


def few_of(
    parts: Sequence[UpdateBytes], on_host: Collection[int]
) -> tuple[tuple[UpdateBytes, ...], list[int]]:
    """About `SIMULATED` chunks that stand for all of these, and the places of those updated on the host. Each stands
    for its neighbours on the same side and with the same parts off the device."""
    alike: defaultdict[tuple[bool, ...], list[int]] = defaultdict(list)
    for number, part in enumerate(parts):
        rests = part.record, part.resting_gradient, part.resting_weight, part.returning_gradient
        alike[number in on_host, *(size > 0 for size in rests)].append(number)
    found: dict[int, UpdateBytes] = {}
    for numbers in alike.values():
        count = -(-len(numbers) * min(SIMULATED, len(parts)) // len(parts))
        for place in range(count):
            group = numbers[place * len(numbers) // count : (place + 1) * len(numbers) // count]
            found[group[len(group) // 2]] = mean_of([parts[number] for number in group])
    order = sorted(found)
    return tuple(found[n] for n in order), [place for place, n in enumerate(order) if n in on_host]


def fastest_mix(
    parts: Sequence[UpdateBytes],
    rates: Rates,
    computing: Computing | None = None,
    ids: Sequence[int] | None = None,
    lookahead: int = LOOKAHEAD,
) -> FoundMix:
    """The share of these chunks whose simulated updates, or steps, are over first. Of several it is the smallest. Of a
    few chunks it is those with the least bound. 0 where no record moves. `ids` and `lookahead` as `mix_of` has them;
    without `ids`: places."""
    moving = frozenset(number for number, part in enumerate(parts) if part.record)
    if not moving:
        return FoundMix(Fraction(0), lanes_of_each(parts, rates, ()), 0.0, frozenset())
    count, ids = min(len(moving), SHARES), range(len(parts)) if ids is None else ids

    def of_share(number: int) -> frozenset[int]:
        return mix_of(Fraction(number, count), ids).on_host & moving

    @cache
    def of_chosen(chosen: frozenset[int]) -> float:
        few, places = few_of(parts, chosen)
        return simulated_s(few, rates, mix_with(places, len(few), lookahead), computing)

    def seconds(number: int) -> float:
        return of_chosen(of_share(number))

    def bound_of(chosen: frozenset[int]) -> float:
        return lanes_of_each(parts, rates, chosen).bound_s

    least = min(range(count + 1), key=lambda number: bound_of(of_share(number)))
    first = {0, count, least, *range(0, count + 1, max(1, count // COARSE))}
    best, before, near = min(sorted(first), key=seconds), -1, range(0)
    while best != before and len(parts) <= SHARES:
        before = best
        near = range(max(0, best - NEAR), min(count, best + NEAR) + 1)
        best = min(near, key=seconds)
    chosen, share = of_share(best), Fraction(best, count)
    if len(moving) > FEW:
        return FoundMix(share, lanes_of_each(parts, rates, chosen), of_chosen(chosen))
    starts = [of_share(number) for number in near or [best]]
    found = (_improved(of_chosen, start, sorted(moving)) for start in starts)
    chosen = min(found, key=lambda some: (float(f"{of_chosen(some):.3g}"), bound_of(some)))
    share = Fraction(len(chosen), len(moving))
    return FoundMix(share, lanes_of_each(parts, rates, chosen), of_chosen(chosen), chosen)


def _improved(
    simulated: Callable[[frozenset[int]], float], chosen: frozenset[int], moving: Sequence[int]
) -> frozenset[int]:
    """The chunks that changes of at least 0.1 % lead to, each the best of its round."""
    while True:
        single = [chosen ^ {chunk} for chunk in moving]
        others = [chosen ^ {a, b} for a, b in combinations(moving, 2) if (a in chosen) is not (b in chosen)]
        best = min((*single, *others), key=lambda some: (simulated(some), sorted(some)))
        if simulated(best) > 0.999 * simulated(chosen):
            return chosen
        chosen = best


def simulated_s(
    parts: Sequence[UpdateBytes], rates: Rates, mix: UpdateMix, computing: Computing | None = None,
    arena: ArenaWaits = NO_ARENA,
) -> float:  # fmt: skip
    """Seconds of the updates of these chunks, from the norm to the last write. Beside `computing`, of a step. `arena`:
    what its places delay."""
    if computing is None:
        return simulated_updates(parts, rates, mix).makespan_s
    timeline = simulated_steps(parts, rates, mix, computing, arena)
    ends = [span for span in timeline.spans if _ends_step(span.action)]
    last = {span.action.micro_batch: span.end_s for span in sorted(ends, key=lambda span: span.end_s)}
    return last[STEPS - 1] - last[STEPS - 2]


def _ends_step(action: Action) -> bool:
    """A backward, or the update with which the next forward begins at once."""
    is_first = action.kind is ActionKind.UPDATE and action.chunk == 0 and action.resource != CPU
    return is_first or action.kind is ActionKind.B


def simulated_updates(parts: Sequence[UpdateBytes], rates: Rates, mix: UpdateMix) -> ScheduleTimeline:
    """The updates of these chunks, none begun before the norm is known."""
    how = _how(parts, mix, late=True)
    plan, memory = update_plan(len(parts), **how), memory_of(len(parts), **how)
    return _simulated(plan, memory, parts, rates, Computing(0.0, 0.0), mix)


def simulated_steps(
    parts: Sequence[UpdateBytes], rates: Rates, mix: UpdateMix, computing: Computing,
    arena: ArenaWaits = NO_ARENA,
) -> ScheduleTimeline:  # fmt: skip
    """Some steps of as many units as chunks, each with one. A chunk's part of the computing is that of its
    elements."""
    plan, memory = run_of(
        [[unit] for unit in range(len(parts))], STEPS, gathers_ahead=computing.gathers_ahead,
        gathers_again=computing.gathers_again, micro_batches=computing.simulated,
        returning=[number for number, part in enumerate(parts) if part.returning_gradient],
        arena=arena, **_how(parts, mix, late=False),
    )  # fmt: skip
    return _simulated(plan, memory, parts, rates, computing, mix)


def _how(parts: Sequence[UpdateBytes], mix: UpdateMix, *, late: bool) -> dict[str, Any]:
    """Options of `run_of`. `late` as `UpdateBytes.crossing`."""
    moving = [number for number, part in enumerate(parts) if part.record]
    on_host = {number: parts[number].crossing(late=late) for number in moving if number in mix.on_host}
    streamed = {number: part.streamed for number, part in enumerate(parts) if number not in on_host}
    return dict(
        ahead=mix.ahead, ahead_down=mix.ahead_down, moving=moving, on_host=on_host,
        streamed={number: beside for number, beside in streamed.items() if beside.up or beside.down},
        early=any(part.early for part in parts),
    )  # fmt: skip


def _simulated(
    plan: Plan,
    memory: Memory,
    parts: Sequence[UpdateBytes],
    rates: Rates,
    computing: Computing,
    mix: UpdateMix,
) -> ScheduleTimeline:
    elements = sum(part.elements for part in parts)
    each = [computing.share_of(number) * computing.micro_batches for number in range(computing.simulated)]
    computed = {ActionKind.F: computing.forward_s, ActionKind.B: computing.backward_s}

    def of_each(action: Action, part: UpdateBytes, what: ChunkPart, crosses: bool) -> float:
        """Bytes that an element has moved."""
        if what is ChunkPart.RECORD:
            return part.record
        if what is ChunkPart.WEIGHTS:
            up = action.kind is ActionKind.FETCH
            return part.resting_weight if not crosses else part.new_weight if up else part.weight
        if what is ChunkPart.GATHERED:
            return part.resting_weight * each[action.task]
        rests, once = part.resting_gradient + part.returning_gradient, part.gradient if crosses else 0.0
        return once + rests * (each[action.micro_batch or 0] if action.kind is ActionKind.EVICT else 1)

    def moved(action: Action) -> float:
        if action.kind in computed or action.kind in (ActionKind.UNSHARD, ActionKind.RESHARD):
            return 0.0
        what, number = part_of(action.chunk or 0, len(parts))
        part = parts[number]
        if action.kind is ActionKind.UPDATE:
            return part.elements * part.host_memory if action.resource == CPU else 0.0
        return part.elements * of_each(action, part, what, number in mix.on_host and part.record > 0)

    def seconds(action: Action) -> float:
        assert action.resource != DISK
        if action.kind in computed:
            share = parts[action.stage or 0].elements / elements if elements else 0.0
            return computed[action.kind] * share * computing.share_of(action.task)
        if action.kind is not ActionKind.UPDATE:  # a gather takes no part of these lanes
            return moved(action) / (rates.up if action.kind is ActionKind.FETCH else rates.down)
        part = parts[action.chunk or 0]
        if action.resource != CPU:
            return part.elements / rates.device_update
        return part.elements / rates.host_update + rates.call_s * part.chunks

    shared = None if rates.host_memory == inf else HostBandwidth(rates.host_memory, moved)
    return simulate(plan, seconds, memory=memory, host=shared)
