"""Checks the model of an update phase: its bound, its ends, and that no other choice of chunks is much faster."""

from __future__ import annotations

import random
from dataclasses import astuple, replace
from fractions import Fraction
from itertools import combinations
from math import inf
from typing import Any

import pytest

from colossal_lite.schedule import update_rates
from colossal_lite.schedule.update_mix import LOOKAHEAD, mix_of, mix_with
from colossal_lite.schedule.update_rates import (
    SIMULATED,
    Computing,
    Rates,
    UpdateBytes,
    equal_parts,
    fastest_mix,
    few_of,
    lanes_of,
    lanes_of_each,
    simulated_s,
)

BILLIONS = UpdateBytes(elements=32 * 10**8, chunks=32, record=12, gradient=0, weight=2, host_memory=28)
"""32 chunks of AdamW beside bf16 weights, whose gradients have come down."""
LINK = Rates(host_update=4e9, device_update=130e9, up=50e9, down=50e9)


def seconds_of(share: Fraction, rates: Rates) -> float:
    return simulated_s(equal_parts(BILLIONS, 32), rates, mix_of(share, range(32)))


def test_a_mix_of_32_chunks_takes_nearly_its_bound_where_either_end_takes_twice_that() -> None:
    found = fastest_mix(equal_parts(BILLIONS, 32), LINK)
    assert found.host_share == Fraction(17, 32) and found.lanes.bound_s == pytest.approx(0.428)
    assert found.simulated_s <= 0.45
    assert seconds_of(Fraction(0), LINK) == pytest.approx(0.79, abs=0.01)
    assert seconds_of(Fraction(1), LINK) == pytest.approx(0.80, abs=0.01)


def test_so_it_is_where_the_host_s_memory_limits_all_lanes() -> None:
    found = fastest_mix(equal_parts(BILLIONS, 32), Rates(4e9, 130e9, 50e9, 50e9, host_memory=160e9))
    assert found.lanes.memory_s == found.lanes.bound_s and found.simulated_s <= 0.62


@pytest.mark.parametrize("share", [Fraction(n, 8) for n in range(9)])
def test_nothing_is_simulated_faster_than_its_bound(share: Fraction) -> None:
    for rates in (LINK, Rates(2e9, 130e9, 20e9, 25e9, 80e9, call_s=1e-3)):
        assert seconds_of(share, rates) >= lanes_of(BILLIONS, rates, share).bound_s - 1e-9


def test_gradients_that_are_down_already_are_in_no_update_phase() -> None:
    early, down = replace(BILLIONS, gradient=4, early=True), replace(BILLIONS, gradient=0)
    assert (
        fastest_mix(equal_parts(early, 32), LINK)
        == fastest_mix(equal_parts(down, 32), LINK)
        != fastest_mix(equal_parts(replace(early, early=False), 32), LINK)
    )


def test_a_slow_host_updates_nothing_and_a_slow_link_moves_nothing() -> None:
    assert fastest_mix(equal_parts(BILLIONS, 32), Rates(1e7, 130e9, 50e9, 50e9)).host_share == 0
    assert fastest_mix(equal_parts(BILLIONS, 32), Rates(4e9, 130e9, 1e8, 1e8)).host_share == 1


MACHINES = ((2e9, 80e9), (4e9, 160e9), (7e9, 300e9))
WHOLE = UpdateBytes(67 * 10**8, 16, record=12, gradient=4, weight=2, host_memory=28, early=True)
COMPUTED = Computing(*(WHOLE.elements * 4096 * each / 400e12 for each in (2, 4)))
"""6.7 B, 4,096 tokens, 400 TFLOP/s."""


@pytest.mark.parametrize("machine", range(3))
def test_a_whole_step_of_a_mix_is_never_slower_than_either_end(machine: int) -> None:
    """And on the second machine 1.3 times as fast as all updates on the host."""
    updates, memory = MACHINES[machine]
    rates = Rates(updates, 130e9, 50e9, 50e9, memory)
    count = 16
    streamed_s, host_s = (
        simulated_s(equal_parts(WHOLE, count), rates, mix_of(Fraction(share), range(count)), COMPUTED)
        for share in (0, 1)
    )
    found = fastest_mix(equal_parts(WHOLE, count), rates, COMPUTED)
    assert found.simulated_s <= min(streamed_s, host_s)
    assert machine != 1 or host_s / found.simulated_s >= 1.3
    late = fastest_mix(equal_parts(replace(WHOLE, early=False), count), rates, COMPUTED)
    assert found.simulated_s <= late.simulated_s, "gradients that leave in backward never cost time"


def test_a_step_without_updates_to_wait_for_takes_what_it_computes() -> None:
    rates = Rates(1e13, 1e13, 1e15, 1e15)
    for share in (0, 1):
        mix = mix_of(Fraction(share), range(8))
        seconds = simulated_s(equal_parts(replace(WHOLE, chunks=8), 8), rates, mix, COMPUTED)
        assert seconds == pytest.approx(COMPUTED.forward_s + COMPUTED.backward_s, rel=0.01)


@pytest.mark.parametrize("share", [Fraction(0), Fraction(1, 2), Fraction(1)])
@pytest.mark.parametrize("backward_s, waits", [(0.01, True), (100.0, False)])
def test_weights_at_rest_that_backward_fetches_again_are_waited_for_where_it_cannot_hide_them(
    backward_s: float, waits: bool, share: Fraction
) -> None:
    """At ZeRO-3, one unit ahead. Of 8 units all but the last two are fetched again, each for as long as its copy."""
    work = replace(WHOLE, chunks=8, weight=0, resting_weight=2)
    rates = Rates(1e13, 1e13, up=1e9, down=1e15)
    mix = mix_of(share, range(8))
    kept, again = (
        simulated_s(
            equal_parts(work, 8),
            rates,
            mix,
            Computing(100.0, backward_s, gathers_ahead=1, gathers_again=each),
        )
        for each in (False, True)
    )
    fetched_s = 6 / 8 * work.elements * work.resting_weight / rates.up
    assert again - kept == pytest.approx(fetched_s if waits else 0.0, rel=0.02, abs=0.02 * fetched_s)


@pytest.mark.parametrize("micro_batches", [1, 2, 4, 9])
def test_updates_hide_behind_the_first_of_several_forwards_alone(micro_batches: int) -> None:
    """A first forward of 40 units hides 7 of 8 records; what is left of them is waited for."""
    work, rates = replace(WHOLE, chunks=8, weight=0), Rates(1e13, 1e13, up=1e9, down=1e15)
    mix = mix_of(Fraction(0), range(8))
    copy_s = work.elements * work.record / 8 / rates.up
    computing = Computing(8 * copy_s * micro_batches / 2, 1000 * copy_s, micro_batches=micro_batches)
    waited_s = simulated_s(equal_parts(work, 8), rates, mix, computing) - computing.s
    assert waited_s == pytest.approx(6 * copy_s - 7 * copy_s / 2, rel=0.01)
    assert sum(computing.share_of(number) for number in range(computing.simulated)) == pytest.approx(1)


@pytest.mark.parametrize(
    ("resting", "hidden"),
    [
        *((dict(weight=0, resting_weight=2), hidden) for hidden in (0.5, 0.9, 1.5)),
        *((dict(gradient=0, resting_gradient=4), hidden) for hidden in (0.25, 0.5, 0.9)),
    ],
)
@pytest.mark.parametrize("again", [False, True])
def test_four_micro_batches_stand_for_nine_also_beside_what_rests_on_the_host(
    resting: dict[str, Any], hidden: float, again: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each moves what those move for which it computes. `hidden`: a copy of weights takes so many forwards."""
    work, rates = replace(WHOLE, chunks=8, **resting), Rates(1e13, 1e13, up=1e9, down=1e9)
    forward_s = 2 * work.elements / rates.up / hidden
    computing = Computing(9 * forward_s, 18 * forward_s, 1, again, micro_batches=9)
    for share in (Fraction(0), Fraction(1, 2), Fraction(1)):
        monkeypatch.setattr(update_rates, "MOST_MICRO_BATCHES", 9)
        each_s = simulated_s(equal_parts(work, 8), rates, mix_of(share, range(8)), computing)
        monkeypatch.undo()
        assert simulated_s(equal_parts(work, 8), rates, mix_of(share, range(8)), computing) == pytest.approx(
            each_s, rel=5e-3
        )


@pytest.mark.parametrize("seed", range(20))
def test_a_few_chunks_that_stand_for_all_have_their_lanes(seed: int) -> None:
    draw = random.Random(seed)
    kinds = [
        UpdateBytes(1, 1, record, draw.choice([0, 4]), weight, 28, True, resting_weight=2 - weight)
        for record in (0, 8, 12)
        for weight in (0, 2)
    ]
    count = draw.choice([draw.randint(1, 100), draw.randint(200, 900)])
    parts = [replace(draw.choice(kinds), elements=draw.randint(0, 10**8)) for _ in range(count)]
    on_host = {number for number, part in enumerate(parts) if part.record and draw.random() < 0.5}
    few, places = few_of(parts, on_host)
    assert len(few) <= min(count, SIMULATED + 2 * len(kinds)) and (count > SIMULATED or [*few] == parts)
    rates = Rates(4e9, 130e9, 50e9, 40e9, 160e9, call_s=1e-4)
    every, some = lanes_of_each(parts, rates, on_host), lanes_of_each(few, rates, places)
    assert astuple(some) == pytest.approx(astuple(every))
    for number, part in enumerate(few):
        assert part.elements == 0 or (number in places) <= (part.record > 0)


def assert_near_the_best(seed: int, most: int) -> None:
    draw = random.Random(seed)
    count = draw.randint(2, most)
    rates = Rates(
        host_update=draw.uniform(1e9, 8e9), device_update=draw.uniform(5e10, 3e11), up=draw.uniform(1e10, 6e10),
        down=draw.uniform(1e10, 6e10), host_memory=draw.choice([inf, draw.uniform(8e10, 3e11)]),
    )  # fmt: skip
    gradient, weight = draw.choice([(4, 2), (0, 2), (4, 4), (0, 0)])
    work = UpdateBytes(count * 10**8, count, draw.choice([8, 12]), gradient, weight, 28)
    parts = equal_parts(work, count)
    if seed % 2:
        parts = tuple(replace(part, elements=draw.randint(10**6, 4 * 10**8)) for part in parts)
    chosen = [some for size in range(count + 1) for some in combinations(range(count), size)]
    for lookahead in (LOOKAHEAD, 1):
        best_s = min(simulated_s(parts, rates, mix_with(some, count, lookahead)) for some in chosen)
        assert fastest_mix(parts, rates, lookahead=lookahead).simulated_s <= 1.03 * best_s


@pytest.mark.parametrize("count", [40, 60])
def test_the_chosen_share_of_chunks_that_differ_is_simulated_with_their_own_bytes(count: int) -> None:
    """As in a model with a large embedding."""
    draw = random.Random(count)
    sizes = [10**9, *(draw.choice([10**6, 3 * 10**7, 10**8]) for _ in range(count - 1))]
    parts = [UpdateBytes(size, 1, 12, 4, 2, 28, early=True) for size in sizes]
    rates = Rates(2e9, 20e9, 25e9, 25e9)
    found = fastest_mix(parts, rates, Computing(0.5, 1.0))

    def seconds(share: Fraction) -> float:
        return simulated_s(parts, rates, mix_of(share, range(count)), Computing(0.5, 1.0))

    assert found.simulated_s == seconds(found.host_share)
    assert found.simulated_s <= min(seconds(Fraction(k, 16)) for k in (0, 4, 8, 12, 16))


@pytest.mark.parametrize("seed", range(4))
def test_no_choice_of_up_to_5_chunks_is_more_than_3_percent_faster(seed: int) -> None:
    assert_near_the_best(seed, 5)


def test_a_search_from_one_share_alone_would_miss_a_choice_that_is_faster() -> None:
    assert_near_the_best(116, 10)


@pytest.mark.campaign
@pytest.mark.parametrize("seed", range(200))
def test_no_choice_of_up_to_10_chunks_is_more_than_3_percent_faster(seed: int) -> None:
    assert_near_the_best(seed, 10)
