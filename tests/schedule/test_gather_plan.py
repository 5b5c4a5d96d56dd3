"""Tests the plan of gathers: needed weights are gathered, nothing overlaps, nothing is gathered twice at once."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from colossal_lite.schedule.gather_plan import GatherMoment, GatherPlan, Trace, gather_plan
from colossal_lite.schedule.interval_packing import LiveInterval, pack_intervals
from colossal_lite.schedule.plan import ActionKind

BLOCK, OUTER = 1000, 300


def trace_of(blocks: int, *, tied: bool = True) -> Trace:
    """Chunk 0 is the embedding's, 1 to `blocks` the blocks', the next one the last norm's; a head beside it or tied."""
    inner, norm, head = range(1, blocks + 1), blocks + 1, 0 if tied else blocks + 2
    forward = [0, *inner, norm, head]
    backward = [head, norm, *reversed(inner)]  # the embedding's backward reads no weight
    return Trace(
        tuple(GatherMoment(frozenset({c})) for c in forward),
        tuple(GatherMoment(frozenset({c})) for c in backward),
    )


def numels_of(blocks: int) -> dict[int, int]:
    return {c: BLOCK if 1 <= c <= blocks else OUTER for c in range(blocks + 3)}


def live(step_resident: dict[int, int], numels: dict[int, int]) -> list[tuple[int, int]]:
    return sorted((offset, offset + numels[c]) for c, offset in step_resident.items())


def assert_sound(plan: GatherPlan, numels: dict[int, int]) -> None:
    here: dict[int, int] = {}
    for step in (*plan.forward, *plan.backward):
        for action in step.actions:
            assert action.chunk is not None
            if action.kind is ActionKind.RESHARD:
                del here[action.chunk]
            elif action.kind is ActionKind.UNSHARD:
                assert action.chunk not in here, "gathered while it is there"
                here[action.chunk] = step.resident[action.chunk]
        assert here == dict(step.resident), "what stays, stays where it is"
        assert step.needs <= here.keys()
        spans = live(here, numels)
        assert all(a[1] <= b[0] for a, b in pairwise(spans)), "two chunks share a byte"
        assert all(stop <= plan.arena_numel for _, stop in spans)
    assert plan.live_numel <= plan.arena_numel


def test_the_plan_of_a_small_model_reads_as_it_runs() -> None:
    plan = gather_plan(trace_of(2), numels_of(2), num_chunks=4)
    assert str(plan) == (
        "0UNSHARD#0 0UNSHARD#1 0RESHARD#0 0UNSHARD#2 0RESHARD#1 0UNSHARD#3 0RESHARD#2 0UNSHARD#0 "
        "0RESHARD#0 0UNSHARD#2 0RESHARD#3 0UNSHARD#1 0RESHARD#2 0RESHARD#1"
    )


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("prefetch", [0, 1, 2, 3, 50])
@pytest.mark.parametrize("reshard", [True, False])
def test_peak_and_gathers_of_a_transformer_are_the_formula(tied: bool, prefetch: int, reshard: bool) -> None:
    blocks = 12
    numels = numels_of(blocks)
    plan = gather_plan(
        trace_of(blocks, tied=tied), numels, num_chunks=blocks + 3,
        prefetch=prefetch, reshard_after_forward=reshard,
    )  # fmt: skip
    assert_sound(plan, numels)
    times = plan.gathers()
    if not reshard or prefetch >= 50:
        used = range(blocks + 2 + (not tied))
        assert times == dict.fromkeys(used, 1)
        assert plan.arena_numel >= sum(numels[c] for c in range(1, blocks + 2))
        return
    # (1 + prefetch) blocks, the largest unit; what follows a unit within the window stays over the turn.
    assert plan.live_numel == (1 + prefetch) * BLOCK
    assert plan.arena_numel <= (1 + prefetch) * BLOCK + OUTER
    kept = [c for c in range(1, blocks + 1) if 2 * (blocks - c) + 3 <= prefetch]
    assert all(times[c] == 2 - (c in kept) for c in range(1, blocks + 1))
    assert times[0] == 1 + tied


def test_what_neighbours_keep_is_gathered_from_them_the_second_time() -> None:
    numels = numels_of(3)
    parts = {c: numel // 2 for c, numel in numels.items()}
    plan = gather_plan(trace_of(3), numels, num_chunks=5, parts=parts)
    assert_sound(plan, numels)
    assert plan.gathers() == {0: 2, 1: 2, 2: 2, 3: 2, 4: 1} and set(plan.kept) == {0, 1, 2, 3}
    assert plan.gathers(near=True) == {0: 1, 1: 1, 2: 1, 3: 1, 4: 0}
    assert [str(a) for a in plan.actions if a.chunk == 1 and a.kind is ActionKind.UNSHARD] == [
        "0UNSHARD#1",
        "0UNSHARD#1@net:near",
    ]
    slots = gather_plan(trace_of(3), numels, num_chunks=5).arena_numel
    assert plan.arena_numel == slots + sum(parts[c] for c in plan.kept)
    spans = sorted((offset, offset + parts[c]) for c, offset in plan.kept.items())
    assert spans[0][0] == slots and all(a[1] == b[0] for a, b in pairwise(spans))
    once = gather_plan(trace_of(3), numels, num_chunks=5, reshard_after_forward=False, parts=parts)
    assert not once.kept and not any(once.gathers(near=True).values())


def test_reductions_stand_where_gradients_are_complete_and_once() -> None:
    trace = trace_of(2)
    backward = tuple(GatherMoment(m.needs, n) for m, n in zip(trace.backward, (0, 0, 1, 2), strict=True))
    plan = gather_plan(Trace(trace.forward, backward), numels_of(2), num_chunks=4)
    reduced = [[a.chunk for a in step.actions if a.kind is ActionKind.REDUCE] for step in plan.backward]
    assert reduced == [[], [], [3], [2]]


def test_chunks_that_the_first_step_left_out_are_put_where_the_model_has_them() -> None:
    units = {c: frozenset({c}) for c in range(4)}
    seen = Trace(
        (
            GatherMoment(frozenset({0})),
            GatherMoment(frozenset({1})),
            GatherMoment(frozenset({3})),
            GatherMoment(frozenset({0})),
        ),
        (GatherMoment(frozenset({0})), GatherMoment(frozenset({3}), 1), GatherMoment(frozenset({1}), 1)),
    )
    covered = seen.covering(units, units)
    assert [set(m.needs) for m in covered.forward] == [{0}, {1}, {2}, {3}, {0}]
    assert [(set(m.needs), m.launched) for m in covered.backward] == [({0}, 0), ({3}, 1), ({2}, 1), ({1}, 1)]


intervals = st.lists(
    st.tuples(st.integers(0, 20), st.integers(0, 6), st.integers(1, 50)).map(
        lambda t: LiveInterval(t[0], t[0] + t[1], t[2])
    ),
    max_size=25,
)


@given(intervals)
def test_packed_intervals_never_overlap_and_take_what_is_said(found: list[LiveInterval]) -> None:
    offsets, numel = pack_intervals(found)
    for i, (one, a) in enumerate(zip(found, offsets, strict=True)):
        assert 0 <= a and a + one.numel <= numel
        for other, b in zip(found[i + 1 :], offsets[i + 1 :], strict=True):
            if one.start <= other.stop and other.start <= one.stop:
                assert a + one.numel <= b or b + other.numel <= a
    most = max(
        (sum(i.numel for i in found if i.start <= m <= i.stop) for m in range(27)),
        default=0,
    )
    assert most <= numel <= max(2 * most, most)


@given(
    st.lists(st.frozensets(st.integers(0, 6), min_size=1, max_size=3), min_size=1, max_size=12),
    st.lists(st.frozensets(st.integers(0, 6), min_size=1, max_size=3), max_size=12),
    st.integers(0, 4),
    st.booleans(),
)
def test_i2_any_trace_makes_a_plan_that_drops_nothing_while_it_is_used(
    forward: list[frozenset[int]], backward: list[frozenset[int]], prefetch: int, reshard: bool
) -> None:
    trace = Trace(tuple(map(GatherMoment, forward)), tuple(map(GatherMoment, backward)))
    numels = {c: 64 * (1 + c % 3) for c in range(7)}
    plan = gather_plan(trace, numels, num_chunks=7, prefetch=prefetch, reshard_after_forward=reshard)
    assert_sound(plan, numels)
    alone = {c: frozenset({c}) for c in range(7)}
    covered = trace.covering(alone, alone)
    assert set().union(*(m.needs for m in covered.forward)) == set(range(7))
    assert_sound(gather_plan(covered, numels, num_chunks=7, prefetch=prefetch), numels)


def test_a_chunk_that_backward_reads_again_when_its_gradients_are_complete_is_told() -> None:
    """Its weights may not leave their place then."""
    forward = tuple(GatherMoment(frozenset({c})) for c in range(4))
    once = [(3, 0), (2, 1), (1, 2), (0, 3)]
    for backward, late in ((once, frozenset()), ([*once[:3], (3, 3), once[3]], {3}), ([*once, (2, 4)], {2})):
        moments = tuple(GatherMoment(frozenset({chunk}), launched) for chunk, launched in backward)
        plan = gather_plan(Trace(forward, moments), dict.fromkeys(range(4), BLOCK), num_chunks=4, prefetch=0)
        assert plan.read_late(4) == late
