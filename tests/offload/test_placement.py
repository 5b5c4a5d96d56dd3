"""Checks placements under a budget: they fit, and move the least bytes, compared with every policy."""

from __future__ import annotations

import functools
import itertools
import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from colossal_lite.memory.disk_layout import PAGE_BYTES
from colossal_lite.offload import pieces as pieces_module
from colossal_lite.offload import placement as placement_module
from colossal_lite.offload.pieces import (
    GRADIENT_DOWN,
    LEAVING,
    WEIGHTS_BOTH,
    WEIGHTS_UP,
    LinkCrossing,
    Name,
    StateKind,
    StatePiece,
    passing_bytes,
)
from colossal_lite.offload.placement import (
    StatePlacement,
    divide,
    place,
    slot_bytes,
    spill_to_disk,
    spilled,
)
from colossal_lite.schedule.interval_packing import LiveRange, pack_live_ranges
from colossal_lite.schedule.step_moments import (
    ACCUMULATING,
    INCOMING,
    SharedInterval,
    fill_intervals,
    flight_intervals,
    moments_of_step,
)
from colossal_lite.zero.state_pieces import gradients_of
from tests.shared.link_bound import Phase, Use, link_bound

RANDOM = range(20)


def pieces_of(
    sizes: list[tuple[int, int, int]], accumulation: int = 1, own_master: bool = True
) -> list[StatePiece]:
    """Of chunks whose weights, gradients and records are of these sizes."""
    k, out = accumulation, []
    for chunk, (weights, gradients, optimizer) in enumerate(sizes):
        out += [
            StatePiece(Name(chunk, StateKind.WEIGHTS), weights, 2 * k + own_master, 1),
            StatePiece(Name(chunk, StateKind.GRADIENTS), gradients, 1, k),
            StatePiece(Name(chunk, StateKind.OPTIMIZER), optimizer, 1, 1),
        ]
    return [piece for piece in out if piece.bytes]


def link_bytes(piece: StatePiece) -> int:
    """Over the link in a step, both ways, if it rests on the host."""
    return (piece.ups + piece.downs) * piece.bytes


def updated_on_host(
    sizes: list[tuple[int, int, int]], accumulation: int = 1, own_master: bool = True
) -> list[StatePiece]:
    """As `pieces_of`, where a chunk whose record rests on the host is updated there."""
    k, weights_slot = accumulation, WEIGHTS_BOTH if own_master else WEIGHTS_UP
    beside = {
        StateKind.WEIGHTS: (LinkCrossing(2 * k), LinkCrossing(1, own_master, (weights_slot,))),
        StateKind.GRADIENTS: (LinkCrossing(0, k, (LEAVING,)), LinkCrossing(0, 1, (GRADIENT_DOWN,))),
        StateKind.OPTIMIZER: (LinkCrossing(), LinkCrossing()),
    }
    return [replace(piece, beside=beside[piece.name.kind]) for piece in pieces_of(sizes, k, own_master)]


def phases_of(pieces: list[StatePiece], accumulation: int = 1, own_master: bool = True) -> list[Phase]:
    """Forward and backward of each micro-batch, which adds to the gradients of those before, then the update."""

    def some(kinds: dict[StateKind, tuple[bool, ...]]) -> Phase:
        return {p.name: Use(p.bytes, *kinds[p.name.kind]) for p in pieces if p.name.kind in kinds}

    read = (True, False)
    forward, first, later = (
        some({StateKind.WEIGHTS: read, **more})
        for more in ({}, {StateKind.GRADIENTS: (False, True)}, {StateKind.GRADIENTS: (False, True, True)})
    )
    update = {
        StateKind.WEIGHTS: (own_master, True),
        StateKind.GRADIENTS: read,
        StateKind.OPTIMIZER: (True, True),
    }
    return [forward, first, *[forward, later] * (accumulation - 1), some(update)]


def time_shared(pieces: Sequence[StatePiece], accumulation: int) -> list[StatePiece]:
    """As on a device whose weights and gradients share memory."""
    out: list[StatePiece] = []
    for piece in pieces:
        if piece.name.kind is StateKind.WEIGHTS:
            out.append(replace(piece, shared=SharedInterval.WEIGHTS))
        elif piece.name.kind is StateKind.GRADIENTS:
            out += gradients_of(piece.name.chunk, piece.bytes, accumulation, time_shared=True)
        else:
            out.append(piece)
    return out


def anything(seed: int, chunks: int) -> tuple[list[StatePiece], dict[str, Any]]:
    draw = random.Random(seed)
    how = dict(accumulation=draw.choice((1, 2, 3)), own_master=draw.choice((True, False)))
    sizes = [(draw.randint(0, 9), draw.randint(0, 9), draw.randint(0, 20)) for _ in range(chunks)]
    return pieces_of(sizes, **how), how


def least_by_search(phases: Sequence[Phase], capacity: int) -> int:
    """The least bytes, up and down together, of any policy that keeps at most `capacity` bytes at the end of each
    phase, found by trying all sets that may be kept: for a few pieces, to hold `link_bound` and `place` against.

    A state is what is kept, which of it is newer than the host's copy, and which of that is to be added to the host's;
    a cycle of phases ends as it began."""
    names = sorted({name for phase in phases for name in phase})
    size = {name: use.bytes for phase in phases for name, use in phase.items()}
    State = tuple[frozenset[Name], frozenset[Name], frozenset[Name]]

    @functools.cache
    def kept(some: frozenset[Name]) -> list[frozenset[Name]]:
        """Subsets of `some` within the capacity to which nothing can be added: to keep more never costs."""
        fitting = _subsets(some, size, capacity)
        return [each for each in fitting if not any(each < other for other in fitting)]

    @functools.cache
    def following(state: State, number: int) -> list[tuple[State, int]]:
        (here, dirty, part), phase = state, phases[number]
        up = sum(use.bytes for name, use in phase.items() if use.reads and (name not in here or name in part))
        added = {name for name, use in phase.items() if use.adds and (name not in here or name in part)}
        part = frozenset((part - phase.keys()) | added)
        new = frozenset(name for name, use in phase.items() if use.writes)
        dirty = new | frozenset(n for n in dirty if n not in phase or not _is_last_read(phases, number, n))
        return [
            ((keep, dirty & keep, part & keep), up + sum(size[name] for name in dirty - keep))
            for keep in kept(frozenset({*here, *phase}))
        ]

    written = frozenset(name for phase in phases for name, use in phase.items() if use.writes)
    none = frozenset[Name]()  # every step begins sums of its own
    starts = [
        (keep, dirty, none)
        for keep in kept(frozenset(names))
        for dirty in _subsets(keep & written, size, capacity)
    ]
    best: int | None = None
    for start in starts:
        costs: dict[State, int] = {start: 0}
        for number in range(len(phases)):
            after: dict[State, int] = {}
            for state, cost in costs.items():
                for to, more in following(state, number):
                    if cost + more < after.get(to, cost + more + 1):
                        after[to] = cost + more
            costs = after
        if start in costs:
            best = costs[start] if best is None else min(best, costs[start])
    assert best is not None
    return best


def _subsets(some: frozenset[Name], size: Mapping[Name, int], capacity: int) -> list[frozenset[Name]]:
    found = [frozenset[Name]()]
    for name in sorted(some):
        found += [each | {name} for each in found if sum(size[n] for n in each) + size[name] <= capacity]
    return found


def _is_last_read(phases: Sequence[Phase], number: int, name: Name) -> bool:
    """Whether the phase after this one that uses a piece writes it anew: nothing needs its bytes any more."""
    later = [phase[name] for phase in (*phases[number + 1 :], *phases[: number + 1]) if name in phase]
    return not later[0].reads


@pytest.mark.parametrize("seed", RANDOM)
def test_i7_what_is_placed_is_within_the_budget_or_nothing_is(seed: int) -> None:
    pieces, _ = anything(seed, 7)
    least = place(pieces, {"staging": 11}, 0).device_bytes
    whole = place(pieces, {"staging": 11}, None)
    assert not whole.on_host and whole.device_bytes == 11 + sum(piece.bytes for piece in pieces)
    moved = []
    for budget in range(least - 5, max(least, whole.device_bytes) + 5):
        placed = place(pieces, {"staging": 11}, budget)
        assert placed.device_bytes <= budget or (budget < least and placed.device_bytes == least)
        assert (
            placed.device_bytes + placed.host_bytes
            == 11 + sum(p.bytes for p in pieces) + placed.visiting_bytes
        )
        moved.append(placed.up_bytes + placed.down_bytes)
    assert moved[-1] == 0, "with room for everything, nothing moves"


def shared(seed: int) -> tuple[list[StatePiece], tuple[LiveRange, ...], int]:
    """Pieces of chunks, one of them larger than the others, what their gradients need in a backward beside visitors,
    and what that takes where no two kinds share."""
    draw = random.Random(seed)
    numels = [256 * draw.randint(1, 4) for _ in range(12)]
    numels[0] *= 16
    pieces = pieces_of([(2 * numel, 4 * numel, 12 * numel) for numel in numels])
    fills, flights = fill_intervals(range(12), numels), flight_intervals(numels)
    kinds = [
        [LiveRange(what, i, one.start, one.stop, 4 * one.numel) for i, one in enumerate(some)]
        for what, some in ((ACCUMULATING, fills), (INCOMING, flights))
    ]
    beside = moments_of_step([stay for kind in kinds for stay in kind], 12)
    return pieces, beside, sum(pack_live_ranges(kind).bytes for kind in kinds)


@pytest.mark.parametrize("seed", range(4))
def test_visitors_in_the_places_of_gradients_make_a_budget_fit_that_did_not_or_move_less(seed: int) -> None:
    pieces, beside, staging = shared(seed)
    least = place(pieces, {}, 0, beside).device_bytes
    apart = place(pieces, {"staging": staging}, 0).device_bytes
    whole = place(pieces, {}, None, beside)
    assert least < apart and place(pieces, {"staging": staging}, least).device_bytes > least
    assert not whole.on_host and whole.device_bytes <= staging + sum(piece.bytes for piece in pieces)
    moves_less = False
    for budget in range(least, apart + sum(piece.bytes for piece in pieces), 23719):
        placed = place(pieces, {}, budget, beside)
        assert placed.arena.bytes == placed.visiting_bytes and placed.device_bytes <= budget
        assert ("arena", "device", placed.arena.bytes) in placed.rows
        if budget >= apart:
            before = place(pieces, {"staging": staging}, budget)
            now, then = (each.up_bytes + each.down_bytes for each in (placed, before))
            assert now <= then
            moves_less |= now < then
    assert moves_less


@pytest.mark.parametrize("seed", RANDOM)
def test_the_least_is_less_than_any_other_set_of_pieces_needs(seed: int) -> None:
    pieces, _ = anything(seed, 3)
    names = [piece.name for piece in pieces]
    needs = [
        StatePlacement(tuple(pieces), frozenset(away), ()).device_bytes
        for count in range(len(names) + 1)
        for away in itertools.combinations(names, count)
    ]
    assert place(pieces, {}, 0).device_bytes == min(needs)


@pytest.mark.parametrize("seed", RANDOM)
def test_no_other_set_of_pieces_that_fits_moves_much_less(seed: int) -> None:
    """A knapsack by worth misses at most one piece of the best."""
    pieces, _ = anything(seed, 3)
    most = max(link_bytes(piece) for piece in pieces)
    for budget in (20, 40, 60, 80):
        placed = place(pieces, {}, budget)
        best = min(
            (
                sum(link_bytes(piece) for piece in away)
                for count in range(len(pieces) + 1)
                for away in itertools.combinations(pieces, count)
                if StatePlacement(tuple(pieces), frozenset(p.name for p in away), ()).device_bytes <= budget
            ),
            default=None,
        )
        if best is not None:
            assert best <= placed.up_bytes + placed.down_bytes <= best + most


@pytest.mark.parametrize("seed", range(8))
def test_p5_no_policy_moves_less_than_the_bound(seed: int) -> None:
    pieces, how = anything(seed, 2)
    phases = phases_of(pieces, **how)
    for capacity in (0, 7, 15, 40):
        assert link_bound(phases, capacity) <= least_by_search(phases, capacity)


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("chunks", [2, 4, 8])
def test_p5_weights_that_stay_for_good_meet_the_best_policy_and_the_bound(
    chunks: int, accumulation: int
) -> None:
    """Belady's own case: equal pieces that are only read."""
    pieces = [StatePiece(Name(c, StateKind.WEIGHTS), 10, 2 * accumulation, 0) for c in range(chunks)]
    read = {piece.name: Use(10, reads=True, writes=False) for piece in pieces}
    phases = [read] * (2 * accumulation)
    for stay in range(chunks + 1):
        moved = sum(link_bytes(piece) for piece in pieces[stay:])
        assert moved == link_bound(phases, 10 * stay)
        if chunks <= 4 or (stay in (3, 5) and accumulation == 1):
            assert moved == least_by_search(phases, 10 * stay)


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("sizes", [(10, 10, 20), (5, 10, 25), (10, 10, 10)])
def test_p5_what_stays_for_good_meets_the_bound_with_several_micro_batches_too(
    accumulation: int, sizes: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the weights are their own masters: to move something out of the way for a phase saves nothing. Here without
    slots, and with room for whole pieces."""
    monkeypatch.setattr(pieces_module, "STAGING", dict.fromkeys(StateKind, ()))
    pieces = pieces_of([sizes] * 6, accumulation)
    phases = phases_of(pieces, accumulation)
    for capacity in range(0, 6 * sum(sizes) + 1, 40):
        placed = place(pieces, {}, capacity)
        bound = link_bound(phases, placed.device_bytes)
        assert placed.up_bytes + placed.down_bytes == bound


def test_where_masters_are_apart_weights_that_stay_for_good_are_above_the_bound(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nobody reads weights between a backward and their update: to leave them there costs what gradients in their room
    would save."""
    monkeypatch.setattr(pieces_module, "STAGING", dict.fromkeys(StateKind, ()))
    pieces = pieces_of([(5, 10, 30)] * 6, own_master=False)
    placed = place(pieces, {}, 30)
    moved, bound = placed.up_bytes + placed.down_bytes, link_bound(phases_of(pieces, own_master=False), 30)
    assert placed.device_bytes == 30 and moved - bound == 2 * 30


@pytest.mark.parametrize("accumulation", [1, 2, 3])
@pytest.mark.parametrize("sizes", [(256, 512, 1536), (256, 256, 1536)])
def test_p5_weights_and_gradients_that_rest_by_turns_move_at_most_two_chunks_more_than_the_bound(
    accumulation: int, sizes: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """For the others to be there at other times. Here without slots."""
    monkeypatch.setattr(pieces_module, "STAGING", dict.fromkeys(StateKind, ()))
    monkeypatch.setattr(pieces_module, "LEAVING", LEAVING._replace(tier="nowhere"))
    pieces = pieces_of([sizes] * 40, accumulation, own_master=False)
    phases = phases_of(pieces, accumulation, own_master=False)
    turns = time_shared(pieces, accumulation)
    for capacity in range(sum(sizes), 40 * sum(sizes), 4 * sum(sizes) + 100):
        placed, for_good = place(turns, {}, capacity, ()), place(pieces, {}, capacity)
        moved = placed.up_bytes + placed.down_bytes
        assert placed.device_bytes <= capacity
        assert moved <= link_bound(phases, capacity) + 2 * 2 * sum(sizes)
        assert moved <= for_good.up_bytes + for_good.down_bytes


def test_the_bound_is_what_the_best_policy_moves_where_pieces_can_be_cut() -> None:
    """Pieces of one byte each are all kinds cut as finely as can be."""
    for own_master, accumulation in itertools.product((True, False), (1, 2)):
        pieces = pieces_of([(1, 1, 1), (1, 1, 0)], accumulation, own_master)
        phases = phases_of(pieces, accumulation, own_master)
        for capacity in range(6):
            assert link_bound(phases, capacity) == least_by_search(phases, capacity)


def misses(trace: Sequence[int], capacity: int, rule: str, between: range | None = None) -> int:
    """Reads of `trace`, all or those `between`, that miss a cache of `capacity` equal pieces, empty at first: by
    Belady's rule (which may leave out what it has read), least recently used, or first in first out."""
    cache: dict[int, int] = {}  # piece -> the sooner it must go, the less
    missed = 0
    for now, piece in enumerate(trace):
        if piece not in cache:
            missed += between is None or now in between
            cache[piece] = now
        if rule == "belady":
            cache[piece] = -next((t for t in range(now + 1, len(trace)) if trace[t] == piece), len(trace))
        elif rule == "lru":
            cache[piece] = now
        if len(cache) > capacity:
            del cache[min(cache, key=cache.__getitem__)]
    return missed


def fewest_misses(
    trace: Sequence[int], capacity: int, start: frozenset[int], end: frozenset[int] | None
) -> int:
    """By trying all that may be kept after each read; what is there at the end must be `end`, if that is given."""
    costs = {start: 0}
    for piece in trace:
        after: dict[frozenset[int], int] = {}
        for kept, cost in costs.items():
            hit = piece in kept
            ways = [kept] if hit or len(kept) == capacity else [kept | {piece}]
            ways += [] if hit or len(kept) < capacity else [kept - {out} | {piece} for out in kept]
            for to in ways:
                after[to] = min(after.get(to, cost + (not hit)), cost + (not hit))
        costs = after
    return min(costs.values()) if end is None else costs.get(end, len(trace) + 1)


@pytest.mark.parametrize("seed", range(12))
def test_p5_beladys_rule_is_the_best_of_all_on_random_traces_of_at_most_8_chunks(seed: int) -> None:
    """The yardstick of the next test."""
    draw = random.Random(seed)
    chunks = draw.randint(2, 8)
    trace = [draw.randrange(chunks) for _ in range(draw.randint(4, 20))]
    for capacity in range(1, chunks + 1):
        best = misses(trace, capacity, "belady")
        assert best == fewest_misses(trace, capacity, frozenset(), None)
        assert best <= min(misses(trace, capacity, rule) for rule in ("lru", "fifo"))


@pytest.mark.parametrize("chunks", range(1, 13))
def test_p5_what_stays_for_good_misses_as_often_as_beladys_rule_and_no_more_than_any_other(
    chunks: int,
) -> None:
    """Weights in a forward and the backward of it, the other way round, again and again: at the capacity of what
    stays."""
    there = list(range(chunks))
    once = [*there, *reversed(there)]
    second = range(len(once), 2 * len(once))
    pieces = [StatePiece(Name(c, StateKind.WEIGHTS), 10, 2, 0) for c in there]
    read = {piece.name: Use(10, reads=True, writes=False) for piece in pieces}
    for capacity in range(1, chunks + 1):
        stays = sum(piece.ups for piece in pieces[capacity:])
        assert stays * 10 == link_bound([read, read], 10 * capacity)
        assert stays == misses(once * 3, capacity, "belady", second)
        assert stays <= min(misses(once * 3, capacity, rule, second) for rule in ("lru", "fifo"))
        if chunks <= 8:
            kept = (frozenset(some) for some in itertools.combinations(there, capacity))
            assert stays == min(fewest_misses(once, capacity, each, each) for each in kept)


@pytest.mark.parametrize("own_master", [True, False])
def test_without_capacity_everything_on_the_host_is_the_bound_and_the_best(own_master: bool) -> None:
    pieces = pieces_of([(4, 4, 8), (4, 4, 8)], own_master=own_master)
    phases = phases_of(pieces, own_master=own_master)
    up, down = sum(p.ups * p.bytes for p in pieces), sum(p.downs * p.bytes for p in pieces)
    assert link_bound(phases, 0) == up + down
    assert least_by_search(phases, 0) == up + down


def test_what_is_used_most_often_stays_first() -> None:
    pieces = pieces_of([(4, 4, 8)] * 12, accumulation=2)
    slots = slot_bytes(pieces, frozenset(p.name for p in pieces), "device")
    placed = place(pieces, {}, slots + 3 * 4)
    kept = {piece.name for piece in pieces} - placed.on_host
    assert kept == {Name(chunk, StateKind.WEIGHTS) for chunk in range(3)}


def test_with_the_last_piece_of_a_kind_its_slots_go() -> None:
    """All weights fit without the slots in which they would visit, though not beside them."""
    pieces = pieces_of([(10, 1, 1)] * 4)
    others = frozenset(p.name for p in pieces if p.name.kind is not StateKind.WEIGHTS)
    rest = slot_bytes(pieces, others, "device")
    placed = place(pieces, {}, 40 + rest)
    assert not any(name.kind is StateKind.WEIGHTS for name in placed.on_host)


@pytest.mark.parametrize("seed", RANDOM)
def test_a_share_of_each_kind_rests_on_the_host_to_the_nearest_piece_at_any_point_of_a_step(
    seed: int,
) -> None:
    pieces, _ = anything(seed, 9)
    draw = random.Random(seed)
    shares = {kind: draw.choice((0.0, 1.0, 0.5, draw.random())) for kind in StateKind}
    placed = divide(pieces, {"staging": 11}, shares)
    assert (placed.pieces, placed.fixed, placed.budget) == (tuple(pieces), (("staging", 11),), None)
    for kind, share in shares.items():
        mine = [piece for piece in reversed(pieces) if piece.name.kind is kind]
        for count in range(1, len(mine) + 1):
            away = sum(piece.bytes for piece in mine[:count] if piece.name in placed.on_host)
            off = abs(away - share * sum(piece.bytes for piece in mine[:count]))
            assert off <= max(piece.bytes for piece in mine[:count]) / 2 + 1e-9


def test_pieces_of_half_a_kind_are_every_second_one_but_those_of_the_first_chunk() -> None:
    pieces = pieces_of([(4, 4, 8)] * 6)
    placed = divide(pieces, {}, {StateKind.WEIGHTS: 0.5, StateKind.GRADIENTS: 1.0, StateKind.OPTIMIZER: 0.0})
    assert placed.on_host == {
        *(Name(chunk, StateKind.WEIGHTS) for chunk in (1, 3, 5)),
        *(Name(chunk, StateKind.GRADIENTS) for chunk in range(6)),
    }


def test_a_placement_prints_what_rests_where_and_what_moves() -> None:
    text = str(place(pieces_of([(4, 4, 8)] * 4), {"staging": 5}, 57))
    for said in ("weights", "host", "of 57", "optimizer on the host: 0, 3", "link in a step"):
        assert said in text, text


# ---- updates on the host ----


@pytest.mark.parametrize("seed", RANDOM)
def test_where_updates_may_be_on_the_host_the_least_and_the_bytes_over_the_link_are_nearly_the_best_of_all(
    seed: int,
) -> None:
    """Of all sets of pieces on the host; within the budget, and with the slots of either tier."""
    draw = random.Random(seed)
    sizes = [(draw.randint(1, 5), draw.randint(1, 5), draw.randint(4, 12)) for _ in range(3)]
    pieces = updated_on_host(sizes, draw.choice((1, 2, 3)), draw.choice((True, False)))
    names = [piece.name for piece in pieces]
    all_of_them = [
        StatePlacement(tuple(pieces), frozenset(away), ())
        for count in range(len(names) + 1)
        for away in itertools.combinations(names, count)
    ]
    least = min(each.device_bytes for each in all_of_them)
    assert place(pieces, {}, 0).device_bytes == least
    most = max(
        _moves(StatePlacement(tuple(pieces), frozenset({*names} - {*some}), ())) for some in [names, []]
    )
    for budget in range(least, sum(piece.bytes for piece in pieces) + 9, 6):
        placed = place(pieces, {}, budget)
        best = min(_moves(each) for each in all_of_them if each.device_bytes <= budget)
        assert placed.device_bytes <= budget and best <= _moves(placed) <= best + most / 3 + 10
        assert placed.host_bytes == slot_bytes(pieces, placed.on_host, "host") + sum(
            piece.bytes for piece in pieces if piece.name in placed.on_host
        )


def _moves(placed: StatePlacement) -> int:
    return placed.up_bytes + placed.down_bytes


def test_a_record_on_the_host_moves_what_is_beside_it_on_the_device() -> None:
    pieces = updated_on_host([(2, 4, 12)], accumulation=3, own_master=False)
    weights, gradient, record = (piece.name for piece in pieces)

    def moved(*on_host: Name) -> tuple[int, int]:
        placed = StatePlacement(tuple(pieces), frozenset(on_host), ())
        return placed.up_bytes, placed.down_bytes

    assert moved() == (0, 0)
    assert moved(record) == (2, 4)
    assert moved(record, gradient) == (2, 3 * 4)
    assert moved(record, weights) == (6 * 2, 4)
    assert moved(record, weights, gradient) == (6 * 2, 3 * 4)
    assert moved(weights, gradient) == (6 * 2 + 4, 2 + 3 * 4)


# ---- three tiers ----

RECORDS = st.lists(
    st.one_of(st.integers(1, 20).map(lambda pages: pages * PAGE_BYTES), st.integers(0, 60_000)), max_size=9
)


def held(records: Mapping[int, int], down: frozenset[int]) -> int:
    """On the host."""
    some = {chunk: records[chunk] for chunk in down}
    return sum(records.values()) - sum(some.values()) + passing_bytes(some)


def each_set(records: Mapping[int, int]) -> list[frozenset[int]]:
    counts = range(len(records) + 1)
    return [frozenset(some) for count in counts for some in itertools.combinations(records, count)]


@settings(max_examples=40, deadline=None)
@given(RECORDS, st.data())
def test_no_other_set_of_records_that_the_host_has_room_for_has_fewer_bytes_on_disk(
    sizes: list[int], data: st.DataObject
) -> None:
    """By trying all of them. Where none is enough, no other leaves the host with less; and more room never costs."""
    records = dict(enumerate(sizes))
    tried = each_set(records)
    before = None
    for room in sorted(data.draw(st.lists(st.integers(-1, sum(sizes) + 1), min_size=4, max_size=4))):
        down = spilled(records, room)
        read = sum(records[chunk] for chunk in down)
        fitting = [sum(records[c] for c in some) for some in tried if held(records, some) <= room]
        if fitting:
            assert held(records, down) <= room and read == min(fitting)
            assert before is None or read <= before
            before = read
        else:
            assert held(records, down) == min(held(records, some) for some in tried)


@settings(max_examples=20, deadline=None)
@given(st.lists(st.integers(1, 10**9), min_size=20, max_size=40), st.floats(0, 1))
def test_of_too_many_sums_to_follow_all_what_is_found_is_enough_and_hardly_more(
    sizes: list[int], share: float
) -> None:
    records = dict(enumerate(sizes))
    room = round(share * sum(sizes))
    with patch.object(placement_module, "MOST_SUMS", 2**9):
        down = spilled(records, room)
    read, over = sum(records[c] for c in down), sum(sizes) - room
    if held(records, down) <= room and down:
        spare = room - held(records, down)
        assert spare <= max(min(records[c] for c in down), 0.1 * sum(sizes)), "not a record more than needed"
        assert read > over
    elif over > 0:
        whole = [frozenset(c for c in records if records[c] <= largest) for largest in sizes]
        assert min(held(records, some) for some in whole) > room


@pytest.mark.parametrize("count", [1, 2, 3, 7, 100, 5000])
def test_records_on_disk_are_at_equal_distances_and_thousands_are_placed_at_once(count: int) -> None:
    records = dict.fromkeys(range(5000), 10 * PAGE_BYTES)
    down = sorted(spilled(records, (5000 - count + 4 * (count >= 5)) * 10 * PAGE_BYTES))
    assert len(down) == (count if count >= 5 else 4 + count)
    gaps = [b - a for a, b in zip(down, [*down[1:], 5000 + down[0]], strict=True)]
    assert max(gaps) - min(gaps) <= 1


@pytest.mark.parametrize("seed", RANDOM[:5])
@pytest.mark.parametrize("updates", [pieces_of, updated_on_host])
def test_i7_neither_budget_is_exceeded_where_there_is_a_disk_or_the_host_holds_the_least_it_can(
    seed: int, updates: Any
) -> None:
    draw = random.Random(seed)
    page = PAGE_BYTES
    sizes = [tuple(draw.randint(0, 9) * page + draw.choice((0, 100)) for _ in range(3)) for _ in range(7)]
    pieces = updates(sizes, draw.choice((1, 2)), draw.choice((True, False)))
    whole = place(pieces, {"staging": 11}, None).device_bytes
    records = {p.name.chunk: p.bytes for p in pieces if p.name.kind is StateKind.OPTIMIZER}
    for device in (0, whole // 2):
        placed, beside = place(pieces, {"staging": 11}, device), draw.choice((0, 7 * page))
        away = {c: b for c, b in records.items() if Name(c, StateKind.OPTIMIZER) in placed.on_host}
        saved = max(sum(away.values()) - held(away, some) for some in each_set(away))
        least, read = placed.host_bytes - saved, list[int]()
        for share in (0.0, 0.3, 0.5, 0.8, 1.0):
            host = round(share * (placed.host_bytes + beside))
            found = spill_to_disk(placed, host, beside)
            assert found.off_device == placed.on_host and not found.on_host & found.on_disk
            assert {name.kind for name in found.on_disk} <= {StateKind.OPTIMIZER}
            assert (found.device_bytes, found.up_bytes, found.down_bytes) == (
                placed.device_bytes, placed.up_bytes, placed.down_bytes,
            )  # fmt: skip
            if least + beside <= host:
                assert found.host_bytes + beside <= host
                read.append(found.read_bytes)
            else:
                assert found.host_bytes == least
        assert read == sorted(read, reverse=True) and read[-1] == 0, "with room for all none is on disk"


def test_a_placement_on_three_tiers_prints_what_is_read() -> None:
    pieces = pieces_of([(4, 4, 2 * PAGE_BYTES)] * 9)
    text = str(spill_to_disk(place(pieces, {"staging": 5}, 30_000), 60_000))
    said = ("optimizer    disk", "passing      host", "of 60,000", "optimizer on disk: ", "disk in a step: ")
    assert all(each in text for each in said), text
