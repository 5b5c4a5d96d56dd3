"""Checks that steps with a mix of updates take what the simulator says, where a placement keeps some records on the
device."""

from __future__ import annotations

from dataclasses import dataclass, replace
from random import Random
from typing import Any

import pytest
import torch

import colossal_lite as cl
from colossal_lite.schedule.checker import check
from colossal_lite.schedule.optimizer_updates import (
    NO_ARENA,
    ArenaWaits,
    ChunkPart,
    Crossing,
    Streaming,
    run_of,
)
from colossal_lite.schedule.plan import Action, ActionKind
from colossal_lite.schedule.simulator import simulate
from colossal_lite.schedule.update_mix import UpdateMix
from colossal_lite.schedule.update_rates import Computing, Rates, UpdateBytes, simulated_s
from tests.offload.test_waiting import (
    LAYERS,
    RECORD_BYTES,
    VOCABULARY,
    WIDTH,
    Model,
    Seconds,
    budgeted,
    drawn_mix,
    last_step_s,
    on_the_clock,
)
from tests.shared.pool import RankEnv, run_world
from tests.shared.virtual import Clock
from tests.zero.test_memory_budget import placement_of

STEPS = 8
"""The first begins with all records on the host."""
PLACEMENTS: dict[str, dict[str, Any]] = {
    "host": dict(placement="host"),
    "all records": dict(placement="static", host_fraction=dict(optimizer=1.0)),
    "half of the records": dict(placement="static", host_fraction=dict(optimizer=0.5)),
    "a budget": dict(placement="auto", device_budget=880_000),
}


@dataclass(frozen=True)
class Ran:
    """Virtual seconds of the last of some real steps, and what they were planned as."""

    step_s: float
    crossings: dict[int, Crossing]
    """Of the chunks that the host updates."""
    moving: list[int]
    """Those whose records are off the device."""
    streamed: dict[int, Streaming]
    mix: UpdateMix
    gathers_ahead: int
    gathers_again: bool
    micro_batches: int
    returning: list[int]
    """Whose sums of earlier micro-batches come back to the device for the last."""
    arena: ArenaWaits
    sizes_bytes: dict[int, int]
    """By the numbers of the plan."""
    work: list[UpdateBytes]
    """Of each chunk, as `plan` has it."""


def ran_mixed(
    env: RankEnv, seconds: Seconds, memory: dict[str, Any], stage: int, precision: str = "fp32",
    share: float | None = None, reads_again: bool = False, micro_batches: int = 1,
) -> Ran:  # fmt: skip
    """`share` of a budget between the least and the most that it can use. `reads_again`: backward reads the weights."""
    clock = Clock()
    memory = memory | dict(rates=dict(up=round(RECORD_BYTES / seconds.copy)))
    optimizer = dict(type="adamw", lr=0.1)
    config = dict(
        precision=precision, optimizer=optimizer, zero=dict(stage=stage), memory=memory,
        gradient_accumulation=micro_batches,
    )  # fmt: skip
    if share is not None:
        config = budgeted(env, config, seconds, share)
    ids = (torch.arange(4 * max(2, micro_batches)) % VOCABULARY).view(-1, 4)
    with env.launch(config) as context, on_the_clock(clock, seconds):
        engine = cl.initialize(Model(clock, seconds, LAYERS, reads_again), context=context)
        for _ in range(STEPS):
            before_s = clock.now_s
            engine.train_step((ids, ids.roll(1)))
        optimizer, chunks, shards = engine._optimizer, engine._chunks, engine._optimizer.shards
        crossings = dict(optimizer.host_updates.crossings) if optimizer.host_updates else {}
        away = [
            i for i, c in enumerate(chunks) if c.weights_at_rest is not None or c.gradient_at_rest is not None
        ]
        streamed = shards.streamed if shards else {}
        waiting = [i for i, c in enumerate(chunks) if c.waits_on_device]
        assert {*away} <= {*crossings, *streamed, *waiting}
        moving = [i for i in range(LAYERS) if i not in optimizer._on_device]
        arena = NO_ARENA if shards is None else placement_of(engine).waits()
        sizes = {
            part.of(i, LAYERS): size
            for i, c in enumerate(chunks)
            for part, size in zip(
                ChunkPart,
                (optimizer.record_bytes(i), c.gradient.nbytes, c.resting_bytes, c.resting_bytes),
                strict=True,
            )
        }
        work = [
            optimizer.work_of(
                i, record=i in moving, gradient=c.gradient_at_rest is not None and i not in waiting,
                weights=c.weights_at_rest is not None, returns=i in waiting,
            )
            for i, c in enumerate(chunks)
        ]  # fmt: skip
        step_s = clock.now_s - before_s
        return Ran(
            step_s,
            crossings,
            moving,
            streamed,
            optimizer.mix,
            int(stage == 3),
            reads_again,
            micro_batches,
            waiting,
            arena,
            sizes,
            work,
        )


def assert_as_simulated(seed: int, placement: str) -> None:
    """Within 0.1 % of the step, by the clock of planted seconds."""
    seconds, how, _ = drawn_mix(seed)
    (ran,) = run_world(ran_mixed, 1, seconds, PLACEMENTS[placement] | dict(update_on=how), 2)
    assert ran.crossings and (placement in ("host", "all records")) is (len(ran.moving) == LAYERS)
    assert_so(ran, seconds)


def assert_so(ran: Ran, seconds: Seconds) -> None:
    assert ran.step_s == pytest.approx(simulated(ran, seconds), rel=1e-6)
    assert described(ran, seconds) == pytest.approx(ran.step_s, rel=1e-6)


def described(ran: Ran, seconds: Seconds) -> float:
    """As `plan` describes the step."""
    rate = round(RECORD_BYTES / seconds.copy)
    rates = Rates(WIDTH / (seconds.host or seconds.update), WIDTH / seconds.update, rate, rate)
    computed_s = (LAYERS * ran.micro_batches * each for each in (seconds.forward, seconds.backward))
    computing = Computing(*computed_s, ran.gathers_ahead, ran.gathers_again, ran.micro_batches)
    return simulated_s(
        [replace(each, early=ran.mix.early) for each in ran.work], rates, ran.mix, computing, ran.arena
    )


def simulated(ran: Ran, seconds: Seconds) -> float:
    plan, held = run_of(
        [[number] for number in range(LAYERS)], STEPS, ahead=ran.mix.ahead, ahead_down=ran.mix.ahead_down,
        moving=ran.moving, on_host=ran.crossings, streamed=ran.streamed, early=True,
        gathers_ahead=ran.gathers_ahead, gathers_again=ran.gathers_again, micro_batches=ran.micro_batches,
        returning=ran.returning, arena=ran.arena,
    )  # fmt: skip
    check(plan, memory=held)

    def cost(action: Action) -> float:
        if action.kind in (ActionKind.FETCH, ActionKind.EVICT):
            return ran.sizes_bytes[action.chunk or 0] / round(RECORD_BYTES / seconds.copy)
        return 0.0 if action.kind in (ActionKind.UNSHARD, ActionKind.RESHARD) else seconds(action)

    return last_step_s(simulate(plan, cost, memory=held), STEPS)


@pytest.mark.parametrize("placement", [*PLACEMENTS])
def test_a_step_with_a_mix_takes_what_the_simulator_says_wherever_records_rest(placement: str) -> None:
    assert_as_simulated(1, placement)


@pytest.mark.campaign
@pytest.mark.parametrize("seed", range(30))
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_so_do_steps_of_thirty_drawn_mixes(placement: str, seed: int) -> None:
    assert_as_simulated(seed, placement)


RESTING: dict[str, dict[str, float]] = {
    "all": dict(optimizer=1.0, weights=1.0, gradients=1.0),
    "records and weights": dict(optimizer=1.0, weights=1.0),
    "records and gradients": dict(optimizer=1.0, gradients=1.0),
    "half of all": dict(optimizer=0.5, weights=0.5, gradients=0.5),
    "gradients alone": dict(gradients=1.0),
}


@pytest.mark.parametrize(("precision", "reads_again"), [("fp32", False), ("fp32", True), ("bf16", True)])
@pytest.mark.parametrize("what", RESTING)
@pytest.mark.parametrize("update_on", ["device", "host"])
def test_so_does_a_step_whose_weights_or_gradients_rest_on_the_host(
    update_on: str, what: str, precision: str, reads_again: bool
) -> None:
    """With updates on the host these hold up no forward but that which reads the weights. Backward may fetch them
    again."""
    seconds = replace(drawn_mix(1)[0], host=12.0)
    memory = dict(placement="static", host_fraction=RESTING[what], update_on=update_on)
    (ran,) = run_world(ran_mixed, 1, seconds, memory, 3, precision, None, reads_again)
    assert_so(ran, seconds)


@pytest.mark.parametrize("copy_s", [0.5, 1.9, 5.0, 20.0])
@pytest.mark.parametrize("micro_batches", [1, 2, 3])
def test_so_does_a_step_that_accumulates_beside_weights_at_rest(micro_batches: int, copy_s: float) -> None:
    seconds = Seconds(forward=2.0, backward=4.0, update=0.5, copy=4 * copy_s)
    memory = dict(placement="static", host_fraction=dict(weights=1.0))
    for reads_again in (False, True):
        (ran,) = run_world(ran_mixed, 1, seconds, memory, 3, "bf16", None, reads_again, micro_batches)
        assert len(ran.streamed) == LAYERS and not ran.returning
        assert_so(ran, seconds)


@pytest.mark.parametrize("copy_s", [0.5, 5.0])
@pytest.mark.parametrize("micro_batches", [2, 3])
def test_so_does_a_step_whose_earlier_sums_come_back_for_the_last_micro_batch(
    micro_batches: int, copy_s: float
) -> None:
    """On a budget that is hardly more than the least."""
    seconds = Seconds(forward=2.0, backward=4.0, update=0.5, copy=copy_s)
    memory = dict(placement="auto", device_budget=2**40)
    (ran,) = run_world(ran_mixed, 1, seconds, memory, 3, "bf16", 0.05, False, micro_batches)
    assert ran.returning and ran.streamed
    assert_so(ran, seconds)


def assert_drawn_as_simulated(seed: int) -> None:
    seconds, how, _ = drawn_mix(seed)
    draw = Random(1000 + seed)
    update_on = draw.choice(["device", "host", how])
    stage, precision = draw.choice([1, 2, 3, 3]), draw.choice(["fp32", "bf16"])
    share, memory = draw.choice([0.0, 0.2, 0.5, 0.8]), dict(placement="auto", device_budget=2**40)
    if draw.random() < 0.5:
        shares = {kind: draw.choice([0.3, 0.5, 1.0]) for kind in ("weights", "gradients", "optimizer")}
        share, memory = None, dict(placement="static", host_fraction=shares)
    memory |= dict(update_on=update_on)
    how_read = draw.choice([False, True]), draw.choice([1, 1, 2])
    (ran,) = run_world(ran_mixed, 1, seconds, memory, stage, precision, share, *how_read)
    assert_so(ran, seconds)


@pytest.mark.parametrize("seed", [*range(4), 22, 43])
def test_so_does_a_step_of_drawn_shares_or_a_drawn_budget(seed: int) -> None:
    assert_drawn_as_simulated(seed)


@pytest.mark.campaign
@pytest.mark.parametrize("seed", range(4, 110))
def test_so_do_steps_of_more_of_them(seed: int) -> None:
    assert_drawn_as_simulated(seed)
