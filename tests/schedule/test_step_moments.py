"""Tests the slots of gradients in flight: one for each chunk when it needs it, and no more than the worst moment."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from colossal_lite.memory.arena import Pool, slots
from colossal_lite.schedule.interval_packing import LiveInterval, LiveRange
from colossal_lite.schedule.step_moments import (
    ACCUMULATING,
    IN_FLIGHT,
    LEAVING,
    UPDATES,
    SharedInterval,
    fill_intervals,
    flight_intervals,
    moments_of_step,
    shared_interval,
    sums_in_flight,
)

CPU = torch.device("cpu")


def test_a_chunk_needs_room_from_its_first_gradient_until_two_more_are_on_their_way() -> None:
    found = fill_intervals([0, 0, 1, 1, 2, 3], [10, 20, 30, 40])
    assert found == (
        LiveInterval(3, 5, 10),
        LiveInterval(2, 4, 20),
        LiveInterval(1, 3, 30),
        LiveInterval(0, 2, 40),
    )


def test_on_one_rank_a_chunk_needs_room_only_while_it_fills_and_leaves_at_once() -> None:
    assert sums_in_flight([1, 1]) == 0 and sums_in_flight([1, 2]) == IN_FLIGHT
    found = fill_intervals([0, 0, 1, 1, 2, 3], [10, 20, 30, 40], 0)
    assert [(one.start, one.stop) for one in found] == [(3, 3), (2, 2), (1, 1), (0, 0)]
    first = [LiveRange(LEAVING, 3, -3, -2, 40), LiveRange(ACCUMULATING, 3, 0, 0, 40)]
    leaves, fills = moments_of_step(first, 4, 0)
    assert (fills.start, fills.stop) == (-6, -5), (
        "it fills before any launch, and its sum leaves in the moment after"
    )
    assert (leaves.start, leaves.stop) == (-5, -3)
    rests = shared_interval(SharedInterval.GRADIENTS, 3, 40, 3, 0)
    assert (rests.start, rests.stop) == (-5, UPDATES + 4)


def test_a_chunk_of_another_key_fills_beside_those_that_its_parameters_lie_between() -> None:
    """Chunk 1 holds the biases of all blocks: it fills from the first gradient on and goes with the first block."""
    found = fill_intervals([0, 1, 2, 1, 3, 1], [5, 1, 5, 5])
    assert found[1] == LiveInterval(0, 4, 1)
    assert (
        found[3] == LiveInterval(0, 2, 5)
        and found[2] == LiveInterval(1, 3, 5)
        and found[0] == LiveInterval(3, 5, 5)
    )


def test_an_embedding_much_larger_than_the_rest_has_one_slot() -> None:
    order, numels = list(range(8)), [1000] + [10] * 7
    assert slots(fill_intervals(order, numels), torch.float32, CPU).planned_bytes == 4 * (1000 + 2 * 10)
    assert slots(flight_intervals(numels), torch.float32, CPU).planned_bytes == 4 * (1000 + 10)


def test_slots_of_neighbours_take_what_three_of_them_need_though_one_is_larger() -> None:
    order, numels = list(range(15)), [4096] + [2048] * 14
    assert slots(fill_intervals(order, numels), torch.float32, CPU).planned_bytes == 4 * (4096 + 2 * 2048)


def test_slots_that_keep_to_the_plan_take_nothing_beside_it_and_others_are_counted() -> None:
    places = slots([LiveInterval(0, 1, 4), LiveInterval(1, 2, 4), LiveInterval(2, 3, 4)], torch.float32, CPU)
    assert places.bytes == places.planned_bytes == 32
    first, second = places.take_now(0), places.take_now(1)
    places.give(0)
    third = places.take_now(2)
    assert third.data_ptr() == first.data_ptr() != second.data_ptr() and places.bytes == 32
    early = places.take_now(0)  # before the third is done, which has its place
    early.fill_(1.0)
    assert float(third.sum()) == 0.0 and places.bytes == 48
    for slot in (0, 1, 2):
        places.give(slot)
    assert places.bytes == 48
    places.shrink()
    assert places.bytes == 32


def test_i2_a_slot_is_neither_lent_twice_nor_given_back_twice() -> None:
    places = slots([LiveInterval(0, 1, 4), LiveInterval(1, 2, 4)], torch.float32, CPU)
    places.take_now(0)
    with pytest.raises(AssertionError, match="slot 0 is taken"):
        places.take_now(0)
    places.give(0)
    with pytest.raises(AssertionError, match="slot 0 was given back twice"):
        places.give(0)
    pool = Pool(4, 1, torch.float32, CPU)
    buffer = pool.take(4)
    pool.give(buffer)
    with pytest.raises(AssertionError, match="given back twice"):
        pool.give(buffer)


@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(1, 6)), min_size=1, max_size=12),
    st.randoms(use_true_random=False),
    st.sampled_from([0, IN_FLIGHT]),
)
def test_any_order_of_parameters_fits_into_its_plan(
    shape: list[tuple[int, int]], random: object, in_flight: int
) -> None:
    """Replayed as the hooks do it: chunks fill, are launched from the last, and at most so many are on their way."""
    order = [chunk for chunk, (_, parameters) in enumerate(shape) for _ in range(parameters)]
    assert hasattr(random, "shuffle")
    tail = order[1:]
    random.shuffle(
        tail
    )  # a chunk's number is the place of its first parameter, the others lie anywhere behind
    first_seen = {chunk: i for i, chunk in reversed([*enumerate([order[0], *tail])])}
    rank = {chunk: n for n, chunk in enumerate(sorted(first_seen, key=lambda c: first_seen[c]))}
    order = [rank[chunk] for chunk in (order[0], *tail)]
    numels = [1 + shape[chunk][0] for chunk in range(len(shape))]
    places = slots(fill_intervals(order, numels, in_flight), torch.float32, CPU)
    missing = [order.count(chunk) for chunk in range(len(numels))]
    taken: set[int] = set()
    flying: list[int] = []
    following = len(numels) - 1
    for chunk in reversed(order):
        if chunk not in taken:
            places.take_now(chunk)
            taken.add(chunk)
        missing[chunk] -= 1
        while following >= 0 and missing[following] == 0:
            if len(flying) == in_flight and flying:
                places.give(flying.pop(0))
            flying.append(following)
            if not in_flight:
                places.give(flying.pop(0))
            following -= 1
    assert following == -1 and places.bytes == places.planned_bytes
