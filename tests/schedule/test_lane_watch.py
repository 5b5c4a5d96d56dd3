"""Checks when measured lanes count as off, and that corrected rates predict them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from colossal_lite.schedule.lane_watch import WATCHED, LaneSeconds, WatchedStep, computed_s, corrected, is_off
from colossal_lite.schedule.update_rates import Rates

DUE = LaneSeconds(host_s=1.0, up_s=0.8, down_s=0.3, device_s=0.02)
RATES = Rates(4e9, 130e9, 50e9, 40e9, call_s=1e-3)


@pytest.mark.parametrize(
    "took, off",
    [
        ({}, False), (dict(host_s=1.14), False), (dict(host_s=1.16), True), (dict(host_s=0.84), True),
        (dict(host_s=0.86), False), (dict(up_s=0.93), True), (dict(down_s=0.45), False), (dict(device_s=0.4), False),
        (dict(device_s=0.6), True), (dict(down_s=3.0), True), (dict(computed_s=0.4), False),
        (dict(computed_s=2.0), True),
    ],
)  # fmt: skip
def test_a_lane_that_counts_is_off_by_more_than_15_percent(took: dict[str, float], off: bool) -> None:
    step = WatchedStep(DUE, replace(DUE, **took))
    assert step.is_off is off
    assert is_off([step] * WATCHED) is off


def test_nothing_is_off_before_twenty_steps_or_with_one_of_them_in_time() -> None:
    late, fine = WatchedStep(DUE, replace(DUE, host_s=2.0)), WatchedStep(DUE, DUE)
    assert not is_off([late] * (WATCHED - 1)) and is_off([late] * WATCHED)
    assert not is_off([*[late] * (WATCHED - 1), fine])
    assert not is_off([WatchedStep(LaneSeconds(), LaneSeconds())] * WATCHED), "a step without updates"


def test_corrected_rates_predict_what_the_median_step_took() -> None:
    took = LaneSeconds(host_s=2.0, up_s=0.4, down_s=0.0, device_s=0.03, computed_s=1.5)
    rare = replace(took, host_s=90.0)
    steps = [WatchedStep(DUE, rare), *[WatchedStep(DUE, took)] * (WATCHED - 1)]
    found = corrected(RATES, steps)
    assert found == replace(
        RATES, host_update=pytest.approx(2e9), call_s=pytest.approx(2e-3), up=pytest.approx(100e9),
        device_update=pytest.approx(130e9 * 2 / 3),
    ), "and a lane that did nothing keeps its rate"  # fmt: skip
    assert computed_s(steps) == 1.5
