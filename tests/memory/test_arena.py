"""Tests the arena: buffers that exist at once never overlap, kinds share memory, the next user waits for transfers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from colossal_lite.memory.arena import Arena, ArenaAllocator, slots
from colossal_lite.offload.pieces import LEAVING, VISITING, StateKind
from colossal_lite.schedule.interval_packing import (
    ARENA_ALIGN_BYTES,
    LiveRange,
    pack_live_ranges,
)
from colossal_lite.schedule.step_moments import (
    ACCUMULATING,
    IN_FLIGHT,
    INCOMING,
    UPDATES,
    fill_intervals,
    flight_intervals,
    moments_of_step,
)
from tests.shared.held_at_once import held_at_once, most_held_bytes

CPU = torch.device("cpu")
some_stays = st.lists(
    st.tuples(
        st.sampled_from("abc"), st.integers(0, 12), st.integers(0, 4), st.integers(0, 2000), st.integers(0, 3)
    ),
    max_size=20,
).map(lambda rows: [_stay(number, *row) for number, row in enumerate(rows)])


def _stay(number: int, what: str, start: int, more: int, size: int, away: int) -> LiveRange:
    """With a gap behind its first moment, if there is a moment behind that."""
    gap = range(start + 1, start + 1 + away) if away < more else range(0)
    return LiveRange(what, number, start, start + more, size, gap)


def moments(live_range: LiveRange) -> set[int]:
    return {*range(live_range.start, live_range.stop + 1)} - {*live_range.gap}


@given(some_stays)
def test_whoever_is_there_at_once_is_apart_in_no_more_than_kinds_take_by_themselves(
    live_ranges: list[LiveRange],
) -> None:
    plan = pack_live_ranges(live_ranges)
    spans = [
        (at, at + live_range.bytes) for live_range, at in zip(plan.live_ranges, plan.offsets, strict=True)
    ]
    for i, (one, (start, stop)) in enumerate(zip(plan.live_ranges, spans, strict=True)):
        assert start % ARENA_ALIGN_BYTES == 0 and stop <= plan.bytes
        for other, (first, end) in zip(plan.live_ranges[:i], spans[:i], strict=True):
            at_once = moments(one) & moments(other)
            assert not (at_once and start < end and first < stop)
    kinds = [[live_range for live_range in live_ranges if live_range.what == what] for what in "abc"]
    sizes = {
        number: -(-live_range.bytes // ARENA_ALIGN_BYTES) * ARENA_ALIGN_BYTES
        for number, live_range in enumerate(live_ranges)
    }
    held = [
        sum(sizes[n] for n, live_range in enumerate(live_ranges) if moment in moments(live_range))
        for moment in range(20)
    ]
    assert most_held_bytes(plan) == max(held)
    assert most_held_bytes(plan) <= plan.bytes <= sum(pack_live_ranges(kind).bytes for kind in kinds)
    assert [live_range for live_range in live_ranges if live_range.bytes] == [*plan.live_ranges]


@given(some_stays)
def test_what_is_never_there_at_once_takes_as_much_as_the_larger(live_ranges: list[LiveRange]) -> None:
    later = [
        LiveRange("later", s.number, s.start + 100, s.stop + 100, s.bytes)
        for s in live_ranges[: len(live_ranges) // 2]
    ]
    apart = max(pack_live_ranges(live_ranges).bytes, pack_live_ranges(later).bytes)
    assert pack_live_ranges([*live_ranges, *later]).bytes <= apart


class Leaving:
    """A transfer by which somebody leaves."""

    waited = False

    def wait(self) -> None:
        self.waited = True


def arena_of(*live_ranges: LiveRange) -> Arena:
    return Arena(pack_live_ranges(live_ranges), CPU)


def test_who_takes_bytes_of_another_kind_waits_for_the_transfers_that_still_use_them() -> None:
    record, gradient = LiveRange("records", 3, 9, 10, 4096), LiveRange("accumulating", 0, 0, 1, 1024)
    arena = arena_of(record, gradient)
    assert arena.bytes == 4096
    records, filling = (ArenaAllocator([one], torch.float32, CPU, arena) for one in (record, gradient))
    leaving: Any = Leaving()
    room, before = records.take(3)
    assert before == () and room.numel() == 1024
    with pytest.raises(AssertionError, match="0 comes to a place that is taken"):
        filling.take(0)
    records.give(3, leaving)
    assert not leaving.waited
    assert filling.take_now(0).data_ptr() == room.data_ptr() and leaving.waited


def test_who_takes_a_part_of_the_bytes_leaves_the_transfer_to_who_takes_the_others() -> None:
    record = LiveRange("records", 0, 9, 10, 1024)
    halves = [LiveRange("accumulating", number, 0, 1, 512) for number in (0, 1)]
    arena = arena_of(record, *halves)
    records, filling = (
        ArenaAllocator([record], torch.float32, CPU, arena),
        ArenaAllocator(halves, torch.float32, CPU, arena),
    )
    leaving: Any = Leaving()
    records.take(0)
    records.give(0, leaving)
    assert filling.take(0)[1] == filling.take(1)[1] == (leaving,)
    for number in (0, 1):
        filling.give(number)
    assert records.take(0)[1] == (leaving,)  # nobody has said that it has ended
    records.give(0)
    assert filling.take(0)[1] == ()  # who has taken all of the bytes has waited


def test_gradients_that_find_another_kind_in_their_place_get_a_further_buffer_that_is_counted() -> None:
    first, second = LiveRange("incoming", 0, 0, 0, 512), LiveRange("accumulating", 0, 1, 1, 512)
    arena = arena_of(first, second)
    incoming, filling = (
        ArenaAllocator([one], torch.float32, CPU, arena, grows=True) for one in (first, second)
    )
    incoming.take_now(0).fill_(1.0)
    filling.take_now(0).fill_(2.0)
    assert filling.bytes == filling.most_bytes == 512 and incoming.bytes == 0
    filling.give(0)
    incoming.give(0)
    filling.shrink()
    assert filling.bytes == filling.most_bytes == 0


def test_places_that_are_let_go_are_nowhere_until_they_join_another_arena() -> None:
    places = slots(fill_intervals([0, 1], [64, 64]), torch.float32, CPU, ACCUMULATING)
    assert places.planned_bytes == 512
    places.join(None)
    with pytest.raises(AssertionError, match="let go"):
        places.take(0)
    places = slots(fill_intervals([0, 1], [64, 64]), torch.float32, CPU, ACCUMULATING)
    places.join(arena_of(*moments_of_step(places.live_ranges, 2)))
    assert places.take_now(1).numel() == 64 and places.bytes == places.planned_bytes == 0


shapes = st.lists(st.tuples(st.integers(1, 40), st.integers(1, 4)), min_size=1, max_size=12)


@settings(max_examples=60)
@given(shapes, st.randoms(use_true_random=False), st.booleans())
def test_a_step_keeps_to_the_plan_of_all_its_kinds_and_holds_as_much_as_that_says(
    shape: list[tuple[int, int]], random: Any, is_away: bool
) -> None:
    """Replayed as hooks and updates do it: chunks fill, are launched from the last, at most two are on their way; what
    has come leaves; then records, weights and gradients visit."""
    numels = [64 * size for size, _ in shape]
    order = _order(shape, random)
    fills = slots(fill_intervals(order, numels), torch.float32, CPU, ACCUMULATING)
    flights = slots(flight_intervals([numel // 2 for numel in numels]), torch.float32, CPU, INCOMING)
    sizes = {chunk: 2 * numel for chunk, numel in enumerate(numels) if is_away}
    records = {chunk: 6 * numel for chunk, numel in enumerate(numels)}
    visits = (
        (VISITING[StateKind.OPTIMIZER], records),
        (VISITING[StateKind.WEIGHTS], sizes),
        (VISITING[StateKind.GRADIENTS], sizes),
    )
    arena = arena_of(
        *moments_of_step([*fills.live_ranges, *flights.live_ranges], len(numels)), *LEAVING.in_step(sizes),
        *(live_range for slot, some in visits for live_range in slot.in_step(some)),
    )  # fmt: skip
    assert all(
        live_range.stop < UPDATES
        for live_range in arena.plan.live_ranges
        if live_range.what in (ACCUMULATING, INCOMING, "leaving")
    )
    fills.join(arena)
    flights.join(arena)
    leaving = ArenaAllocator(LEAVING.live_ranges(sizes), torch.float32, CPU, arena, grows=True)
    visiting = [ArenaAllocator(slot.live_ranges(some), torch.float32, CPU, arena) for slot, some in visits]
    with held_at_once() as held:
        for _ in range(2):
            _backward(order, len(numels), fills, flights, leaving if is_away else None)
            _update(visiting if is_away else visiting[:1], len(numels))
    assert arena.most_bytes == arena.plan.bytes and held[arena] == most_held_bytes(arena.plan)
    assert not any(places.bytes for places in (fills, flights, leaving))


def _order(shape: Sequence[tuple[int, int]], random: Any) -> list[int]:
    """The chunk of each parameter, in forward order: numbered by their first ones."""
    order = [chunk for chunk, (_, parameters) in enumerate(shape) for _ in range(parameters)]
    random.shuffle(order)
    rank = {chunk: number for number, chunk in enumerate(dict.fromkeys(order))}
    return [rank[chunk] for chunk in order]


def _backward(
    order: list[int],
    count: int,
    fills: ArenaAllocator,
    flights: ArenaAllocator,
    leaving: ArenaAllocator | None,
) -> None:
    missing, filling, flying, following = (
        [order.count(chunk) for chunk in range(count)],
        set[int](),
        list[int](),
        count - 1,
    )

    def finish() -> None:
        chunk = flying.pop(0)
        flights.give(chunk)
        if leaving is not None:
            leaving.take_now(chunk)
            leaving.give(chunk, Leaving())  # type: ignore[arg-type]
        fills.give(chunk)

    for chunk in reversed(order):
        if chunk not in filling:
            fills.take_now(chunk)
            filling.add(chunk)
        missing[chunk] -= 1
        while following >= 0 and missing[following] == 0:
            if len(flying) == IN_FLIGHT:
                finish()
            flights.take_now(following)
            flying.append(following)
            following -= 1
    while flying:
        finish()


def _update(visiting: Sequence[ArenaAllocator], count: int) -> None:
    """Each comes a turn before its own; gradients are used up in it, the others leave behind it."""
    for turn in range(count + 1):
        for places in visiting:
            if turn < count:
                places.take(turn)
        for number, places in enumerate(visiting):
            if turn:
                places.give(turn - 1, *([] if number == 2 else [Leaving()]))  # type: ignore[list-item]
