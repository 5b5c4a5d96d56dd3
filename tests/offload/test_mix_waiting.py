"""Checks that steps with a mix of updates take what the simulator says, where a placement keeps some records on the
device."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import colossal_lite as cl
from colossal_lite.engine.engine import Engine
from colossal_lite.offload.pieces import VISITING, StateKind
from colossal_lite.schedule.checker import check
from colossal_lite.schedule.optimizer_updates import ChunkPart, run_of
from colossal_lite.schedule.simulator import simulate
from colossal_lite.schedule.step_moments import ACCUMULATING
from colossal_lite.schedule.update_mix import UpdateMix
from tests.offload.test_waiting import (
    LAYERS,
    ON_HOST,
    RECORD_BYTES,
    Model,
    Seconds,
    drawn_mix,
    last_step_s,
    on_the_clock,
)
from tests.shared.pool import RankEnv, run_world
from tests.shared.virtual import Clock

RECORDS = VISITING[StateKind.OPTIMIZER].what
STEPS = 8
"""The first begins with all records on the host."""
PLACEMENTS: dict[str, dict[str, Any]] = {
    "host": dict(placement="host"),
    "all records": dict(placement="static", host_fraction=dict(optimizer=1.0)),
    "half of the records": dict(placement="static", host_fraction=dict(optimizer=0.5)),
    "a budget": dict(placement="auto", device_budget=880_000),
}


def ran_mixed(
    env: RankEnv, seconds: Seconds, memory: dict[str, Any], stage: int
) -> tuple[float, list[int], list[int], UpdateMix, int | None, dict[int, list[int]]]:
    """Virtual seconds of the last of some real steps; the chunks that the host updates, and those whose records are off
    the device; how early copies begin; how many come in backward; and what computing waits for after the
    backward of each layer."""
    clock = Clock()
    rates = dict(up=round(RECORD_BYTES / seconds.copy))
    config = dict(precision="fp32", optimizer=dict(type="adamw", lr=0.1), zero=dict(stage=stage))
    ids = torch.arange(8).view(2, 4)
    with (
        env.launch(config | dict(memory=memory | dict(rates=rates))) as context,
        on_the_clock(clock, seconds),
    ):
        engine = cl.initialize(Model(clock, seconds), context=context)
        for _ in range(STEPS):
            before_s = clock.now_s
            engine.train_step((ids, ids.roll(1)))
        optimizer, chunks = engine._optimizer, engine._chunks
        on_host = [i for i, chunk in enumerate(chunks) if optimizer.is_updated_on_host(chunk)]
        away = [
            i for i, c in enumerate(chunks) if c.weights_at_rest is not None or c.gradient_at_rest is not None
        ]
        assert {*away} <= {*on_host}, "sums that rest on the host leave as those that are only updated there"
        moving = [i for i in range(LAYERS) if i not in optimizer._on_device]
        mix, prepares = optimizer.mix, None if optimizer.shards is None else len(optimizer.early_records)
        return clock.now_s - before_s, on_host, moving, mix, prepares, awaited_by(engine, away)


def awaited_by(engine: Engine, away: list[int]) -> dict[int, list[int]]:
    """For each layer the records over whose places its gradient comes. After the last backward, all gradients that rest
    on the host."""
    found = {0: [ChunkPart.GRADIENT.of(chunk, LAYERS) for chunk in away]}
    arena = engine._optimizer.arena
    for layer in range(LAYERS) if arena is not None else ():
        records = [one.number for one in arena.plan.live_ranges if one.what == RECORDS]
        over = [n for n in records if arena._meet((ACCUMULATING, layer), (RECORDS, n))]
        found[layer] = found.get(layer, []) + over
    return found


def assert_as_simulated(seed: int, placement: str) -> None:
    """Within 0.1 % of the step, by the clock of planted seconds."""
    seconds, how, _ = drawn_mix(seed)
    memory = PLACEMENTS[placement] | dict(update_on=how)
    ((real_s, on_host, moving, mix, prepares, awaited),) = run_world(ran_mixed, 1, seconds, memory, 2)
    assert on_host and (placement in ("host", "all records")) is (len(moving) == LAYERS)
    plan, held = run_of(
        [[number] for number in range(LAYERS)], STEPS, ahead=mix.ahead, ahead_down=mix.ahead_down, moving=moving,
        on_host={chunk: ON_HOST[chunk] for chunk in on_host}, early=True, prepares=prepares,
        awaited=awaited,
    )  # fmt: skip
    check(plan, memory=held)
    assert real_s == pytest.approx(last_step_s(simulate(plan, seconds, memory=held), STEPS), rel=1e-3)


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_a_step_with_a_mix_takes_what_the_simulator_says_wherever_records_rest(placement: str) -> None:
    assert_as_simulated(1, placement)


@pytest.mark.campaign
@pytest.mark.parametrize("seed", range(30))
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_so_do_steps_of_thirty_drawn_mixes(placement: str, seed: int) -> None:
    assert_as_simulated(seed, placement)
