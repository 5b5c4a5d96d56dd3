"""Checks the model of an update phase: its bound, its ends, and that no other choice of chunks is much faster."""

from __future__ import annotations

import random
from fractions import Fraction
from itertools import combinations
from math import inf

import pytest

from colossal_lite.schedule.update_mix import mix_of, mix_with
from colossal_lite.schedule.update_rates import Rates, UpdateBytes, fastest_mix, lanes_of, simulated_s

BILLIONS = UpdateBytes(elements=32 * 10**8, chunks=32, record=12, gradient=0, weight=2, host_memory=28)
"""32 chunks of AdamW beside bf16 weights, whose gradients have come down."""
LINK = Rates(host_update=4e9, device_update=130e9, up=50e9, down=50e9)


def seconds_of(share: Fraction, rates: Rates) -> float:
    return simulated_s(BILLIONS, rates, mix_of(share, range(32)), 32)


def test_a_mix_of_32_chunks_takes_nearly_its_bound_where_either_end_takes_twice_that() -> None:
    found = fastest_mix(BILLIONS, LINK)
    assert found.host_share == Fraction(17, 32) and found.lanes.bound_s == pytest.approx(0.428)
    assert found.simulated_s <= 0.45
    assert seconds_of(Fraction(0), LINK) == pytest.approx(0.79, abs=0.01)
    assert seconds_of(Fraction(1), LINK) == pytest.approx(0.80, abs=0.01)


def test_so_it_is_where_the_host_s_memory_limits_all_lanes() -> None:
    found = fastest_mix(BILLIONS, Rates(4e9, 130e9, 50e9, 50e9, host_memory=160e9))
    assert found.lanes.memory_s == found.lanes.bound_s and found.simulated_s <= 0.62


@pytest.mark.parametrize("share", [Fraction(n, 8) for n in range(9)])
def test_nothing_is_simulated_faster_than_its_bound(share: Fraction) -> None:
    for rates in (LINK, Rates(2e9, 130e9, 20e9, 25e9, 80e9, call_s=1e-3)):
        assert seconds_of(share, rates) >= lanes_of(BILLIONS, rates, share).bound_s - 1e-9


def test_a_slow_host_updates_nothing_and_a_slow_link_moves_nothing() -> None:
    assert fastest_mix(BILLIONS, Rates(1e7, 130e9, 50e9, 50e9)).host_share == 0
    assert fastest_mix(BILLIONS, Rates(4e9, 130e9, 1e8, 1e8)).host_share == 1


def assert_near_the_best(seed: int, most: int) -> None:
    draw = random.Random(seed)
    count = draw.randint(2, most)
    rates = Rates(
        host_update=draw.uniform(1e9, 8e9), device_update=draw.uniform(5e10, 3e11), up=draw.uniform(1e10, 6e10),
        down=draw.uniform(1e10, 6e10), host_memory=draw.choice([inf, draw.uniform(8e10, 3e11)]),
    )  # fmt: skip
    gradient, weight = draw.choice([(4, 2), (0, 2), (4, 4), (0, 0)])
    work = UpdateBytes(count * 10**8, count, draw.choice([8, 12]), gradient, weight, 28)
    chosen = (some for size in range(count + 1) for some in combinations(range(count), size))
    best_s = min(simulated_s(work, rates, mix_with(some, count), count) for some in chosen)
    assert fastest_mix(work, rates).simulated_s <= 1.03 * best_s


@pytest.mark.parametrize("seed", range(4))
def test_no_choice_of_up_to_5_chunks_is_more_than_3_percent_faster(seed: int) -> None:
    assert_near_the_best(seed, 5)


@pytest.mark.campaign
@pytest.mark.parametrize("seed", range(200))
def test_no_choice_of_up_to_10_chunks_is_more_than_3_percent_faster(seed: int) -> None:
    assert_near_the_best(seed, 10)
