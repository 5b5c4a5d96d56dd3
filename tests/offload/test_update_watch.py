"""Checks that wrong rates are found by watching the lanes, and that the mix then changes between two steps."""

from __future__ import annotations

import io
from contextlib import redirect_stderr
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

import colossal_lite as cl
from colossal_lite.checkpoint.files import inspect
from colossal_lite.config.memory_schema import RatesConfig
from colossal_lite.planner.planner import plan
from colossal_lite.schedule.lane_watch import WATCHED
from colossal_lite.zero import build_chunks as build
from colossal_lite.zero.update_choice import UpdateChoice
from tests.offload.test_waiting import RECORD_BYTES, WIDTH, Model, Seconds, on_the_clock
from tests.shared.parity import Case, start, steps_of
from tests.shared.pool import RankEnv, run_world
from tests.shared.virtual import Clock
from tests.zero.test_memory_budget import DEEP, config_of
from tests.zero.test_zero import SMALL

TRUE = Seconds(forward=2.0, backward=4.0, update=0.5, copy=2.0, host=12.0)
"""Of a host that is slower than its rates say."""
WRONG: dict[str, Any] = dict(
    host_update=WIDTH / 0.5,
    device_update=WIDTH / 0.5,
    up=round(RECORD_BYTES / 2),
    down=round(RECORD_BYTES / 2),
)
MORE = 2


def watched(env: RankEnv, given: bool, update_on: Any, directory: str) -> Any:
    """Before and after the watched steps: the chunks that the host updates, the virtual seconds of a step, and the
    rows of its links; the mix in the config and in a checkpoint, the weights, and what was told."""
    clock, told = Clock(), io.StringIO()
    clock.planted_s = dict.fromkeys(("h2d", "d2h"), TRUE.copy)
    memory = dict(placement="host", update_on=update_on) | (dict(rates=WRONG) if given else {})
    if update_on == "device":
        memory = {}
    config = dict(precision="fp32", optimizer=dict(type="adamw", lr=0.1), memory=memory)
    ids = torch.arange(8).view(2, 4)
    found_here = patch.object(UpdateChoice, "_found_here", lambda self: RatesConfig(**WRONG))
    with env.launch(config) as context, on_the_clock(clock, TRUE), found_here, redirect_stderr(told):
        engine = cl.initialize(Model(clock, TRUE), context=context)
        batch = tuple(t[context.local_batch(2)] for t in (ids, ids.roll(1)))
        states = []
        for step in range(WATCHED + MORE):
            before_s = clock.now_s
            engine.train_step(batch)
            if step in (WATCHED - 1, WATCHED + MORE - 1):
                sides = [engine._optimizer.is_updated_on_host(chunk) for chunk in engine._chunks]
                rows = {row.link: (row.busy_s, row.predicted_s) for row in engine.link_report()}
                states.append((sides, clock.now_s - before_s, rows))
        saved = inspect(engine.save(directory).wait()).config["memory.update_on"]
        weights = engine.full_state_dict()
        return states, engine.config.values()["memory.update_on"], saved, weights, told.getvalue()


@pytest.mark.parametrize("ranks", [1, 2])
def test_rates_that_are_wrong_for_twenty_steps_make_the_mix_anew(ranks: int, tmp_path: Path) -> None:
    found = run_world(watched, ranks, False, "auto", str(tmp_path))
    expected = run_world(watched, ranks, False, "device", str(tmp_path / "device"))
    assert ["20 steps took other seconds than predicted" in told for *_, told in found] == [True, False][
        :ranks
    ]
    for (states, update_on, saved, weights, _), (*_, due, _) in zip(found, expected, strict=True):
        (before, slow_s, rows_before), (after, fast_s, rows_after) = states
        assert (before, after, update_on) == (found[0][0][0][0], found[0][0][1][0], found[0][1]), (
            "ranks agree"
        )
        assert any(before) and sum(after) < sum(before) and fast_s < 0.6 * slow_s
        measured, predicted = rows_before["cpu"]
        assert measured == pytest.approx(sum(before) * TRUE.host) and measured == pytest.approx(
            24 * predicted
        )
        if any(after):
            measured, predicted = rows_after["cpu"]
            assert measured == pytest.approx(predicted, rel=0.15)
        assert saved == update_on and [*update_on["host"]] == [i for i, side in enumerate(after) if side]
        for name, weight in weights.items():
            assert torch.equal(weight, due[name]), name


def test_given_rates_stay_so_that_a_run_repeats(tmp_path: Path) -> None:
    ((states, update_on, saved, _, told),) = run_world(watched, 1, True, "auto", str(tmp_path))
    (before, slow_s, _), (after, later_s, rows) = states
    assert before == after and slow_s == pytest.approx(later_s, rel=0.1)
    assert rows["cpu"][0] == pytest.approx(24 * rows["cpu"][1]) and "steps took" not in told


# ---- what a step computes ----

KNOWN: dict[str, Any] = dict(host_update=4e6, device_update=1e9, up="20MB", down="20MB")


def test_an_engine_takes_the_mix_of_the_whole_step_that_a_plan_takes() -> None:
    """From its first batch on. Without operations a second it takes that of the updates alone, which is another."""
    found = {}
    for flops in (None, 5e7):
        rates = KNOWN | (dict(flops=flops) if flops else {})
        memory = dict(placement="host", update_on="auto", rates=rates)
        case = replace(DEEP, world_size=1, chunk_bytes=SMALL // 4, config=config_of(1) | dict(memory=memory))
        ((lanes, found[flops], planned),) = run_world(lanes_of_both, 1, case)
        assert lanes in planned and ("a step of" in lanes) is (flops is not None)
    assert found[None] != found[5e7]


def lanes_of_both(env: RankEnv, case: Case) -> tuple[str, list[bool], str]:
    with patch.object(build, "CHUNK_BYTES", case.chunk_bytes):
        planned = str(
            plan(case.full_config, case.model, batch=case.global_batch, sequence=case.tokens, world_size=1)
        )
    with env.launch(case.full_config) as context:
        engine = start(case, context)
        list(steps_of(engine, context, case, (0,)))
        assert engine._parts.choice is not None
        sides = [engine._optimizer.is_updated_on_host(chunk) for chunk in engine._chunks]
        return engine._parts.choice.lanes, sides, " ".join(planned.split())
