"""Stages on one device are loaded once a pass for all micro-batches: the serial run, in the bytes of the formula."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import colossal_lite as cl
from colossal_lite.config.pipeline_schema import PipelineConfig
from colossal_lite.models import GPT, GPTConfig
from colossal_lite.pipeline.step_plan import StepShape, step_plan
from colossal_lite.schedule.checker import check
from colossal_lite.schedule.plan import ActionKind, Plan, PlanError, Shape
from colossal_lite.schedule.stage_gathers import StageWeights
from tests.planner.test_planner import assert_predicted
from tests.shared.covering import Choice, covering_array, name_of
from tests.shared.hugging_face import sized
from tests.shared.parity import Case, assert_parity, start
from tests.shared.pool import RankEnv, run_world

AWAY = dict(
    placement="static", host_fraction=dict(weights=1.0, gradients=1.0, optimizer=1.0), update_on="host"
)
SPILLED = dict(size=1, schedule="bfs", stages_per_rank=4, micro_batches=3)
CASE = Case(
    world_size=1, layers=4, tokens=6, steps=3, ragged=True, global_batch=7, chunk_bytes=4096, pipeline=SPILLED,
    config=dict(clip_grad_norm=0.05, zero=dict(stage=3, prefetch=0), memory=AWAY),
)  # fmt: skip
OTHERS = {
    "alone": CASE,
    "two ranks, tied, dropout": replace(CASE, world_size=2, dropout=0.1, global_batch=8),
    "untied, ordered, accumulation": replace(
        CASE, tied=False, world_size=2, global_batch=14,
        config=dict(CASE.config) | dict(zero=dict(stage=3, sum_order="ordered"), gradient_accumulation=2),
    ),
    "on the device, whole gradients": replace(CASE, config=dict(clip_grad_norm=0.05, zero=dict(stage=1))),
    "tensor, recomputed": replace(
        CASE, world_size=2, tensor=2, config=dict(CASE.config) | dict(activation_checkpoint="full")
    ),
    "split backward": replace(CASE, pipeline=SPILLED | dict(schedule="zb-v", stages_per_rank=2)),
    "interleaved": replace(CASE, pipeline=SPILLED | dict(schedule="interleaved", stages_per_rank=2)),
}  # fmt: skip


@pytest.mark.parametrize("name", OTHERS)
def test_every_gradient_is_the_serial_one(name: str) -> None:
    assert_parity(OTHERS[name])


def trained(env: RankEnv, case: Case) -> Any:
    """Losses, norms and weights of each step, the bytes over the link in a last one, and chunks by their stages."""
    with env.launch(case.full_config) as context:
        engine = start(case, context)
        cut, found = context.local_batch(case.global_batch), []
        for number in range(case.steps):
            result = engine.train_step(tuple(part[cut] for part in case.batch(number)))
            found.append((float(result.loss), result.grad_norm, engine.full_state_dict()))
        engine.train_step(tuple(part[cut] for part in case.batch(0)))
        moved = {row.link: row.moved_bytes for row in engine.link_report()}
        assert engine.schedule_report().predicted.spans
        rows = [
            row for row in engine.memory_report() if not row.now_bytes == row.peak_bytes == row.forecast_bytes
        ]
        return found, moved, rows, [(chunk.spec.key.stages, chunk.spec.numel) for chunk in engine._chunks]


ADAMW = dict(optimizer=dict(type="adamw", lr=1e-2), precision="bf16", clip_grad_norm=0.05)


def test_bits_are_those_of_accumulation_without_stages() -> None:
    """But of a weight that two stages share: its two gradients are added as wide as they are summed."""
    spilled = replace(
        CASE,
        tied=False,
        dropout=0.1,
        config=ADAMW | dict(zero=dict(stage=3, sum_order="ordered"), memory=AWAY),
    )
    plain = replace(
        spilled, pipeline=1,
        config=ADAMW | dict(zero=dict(stage=0, sum_order="ordered"), gradient_accumulation=3),
    )  # fmt: skip
    (ours, *_), (theirs, *_) = (run_world(trained, 1, case)[0] for case in (spilled, plain))
    for (loss, norm, state), (other_loss, other_norm, others) in zip(ours, theirs, strict=True):
        assert (loss, norm) == (other_loss, other_norm)
        assert all(torch.equal(value, others[name]) for name, value in state.items())


COVER: dict[str, list[Any]] = dict(
    model=["ours", "Hugging Face", "Sequential"],
    optimizer=["adamw", "sgd", "lion"],
    tied=[False, True],
    dropout=[0.0, 0.1],
    clip=[None, 0.05],
    micro_batches=[1, 2, 4, 8],
    stages=[1, 2, 3, 4],
    precision=["fp32", "bf16"],
)


def covered(row: Choice) -> nn.Module:
    sizes: dict[str, Any] = dict(vocabulary=37, sequence=6, layers=4, heads=2, width=16)
    if row["model"] == "ours":
        return GPT(GPTConfig(**sizes, tied=row["tied"], dropout=row["dropout"]))
    if row["model"] == "Hugging Face":
        return sized("hf-gpt2", **sizes, tied=row["tied"], dropout=row["dropout"])
    inner = [nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Dropout(row["dropout"])) for _ in range(4)]
    model = nn.Sequential(nn.Embedding(37, 16), *inner, nn.Linear(16, 37, bias=False))
    if row["tied"]:
        model[-1].weight = model[0].weight
    return model


def steps_of_row(env: RankEnv, row: Choice, staged: bool, state: dict[str, Any]) -> list[Any]:
    parts = row["micro_batches"]
    if staged:
        pipeline = dict(size=1, schedule="bfs", stages_per_rank=row["stages"], micro_batches=parts)
        how: dict[str, Any] = dict(parallel=dict(pipeline=pipeline))
    else:
        how = dict(gradient_accumulation=parts)
    config = dict(
        precision=row["precision"], optimizer=dict(type=row["optimizer"], lr=1e-2), clip_grad_norm=row["clip"], seed=3,
        backend="gloo",
    )  # fmt: skip
    found = []
    with env.launch(config | how | state) as context:
        engine = cl.initialize(partial(covered, row), context=context)
        for number in range(3):
            batch = Case(tokens=6, global_batch=8, ragged=True).batch(number)
            result = engine.train_step(batch)
            found.append((float(result.loss), result.grad_norm, engine.full_state_dict()))
    return found


@pytest.mark.campaign
@pytest.mark.parametrize("row", covering_array(COVER), ids=name_of)
def test_a_spilled_run_has_the_bits_of_a_plain_one_for_each_two_choices(row: Choice) -> None:
    """Of a weight that two stages share: those of the same stages, with all state on the device."""
    staged = row["stages"] > 1
    away = dict(zero=dict(stage=3, prefetch=0, sum_order="ordered"), memory=AWAY)
    here = dict(zero=dict(stage=0, sum_order="ordered"))
    spilled = run_world(steps_of_row, 1, row, staged, away)[0]
    plain = run_world(steps_of_row, 1, row, staged and row["tied"], here)[0]
    for (loss, norm, state), (other_loss, other_norm, others) in zip(spilled, plain, strict=True):
        assert (loss, norm) == (other_loss, other_norm)
        assert all(torch.equal(value, others[name]) for name, value in state.items())


@pytest.mark.parametrize("micro_batches", [1, 4])
def test_weights_go_up_twice_but_for_the_last_stage_and_gradients_come_down_once(micro_batches: int) -> None:
    case = replace(
        CASE, tied=False, global_batch=8, pipeline=SPILLED | dict(micro_batches=micro_batches),
        config=ADAMW | dict(zero=dict(stage=3, prefetch=0), memory=AWAY),
    )  # fmt: skip
    _, moved, rows, numels = run_world(trained, 1, case)[0]
    whole, last = (
        sum(numel for stages, numel in numels if stages in of) for of in ([(s,) for s in range(4)], [(3,)])
    )
    assert rows == [] and 0 < last < whole == sum(numel for _, numel in numels)
    assert moved["h2d"] == 2 * (2 * whole - last)
    assert moved["d2h"] == 4 * whole


def test_bytes_of_state_and_of_the_wire_are_as_planned() -> None:
    assert_predicted(replace(CASE, world_size=2, global_batch=8, config=ADAMW | dict(zero=dict(stage=3))))


def test_a_stage_is_loaded_once_a_pass_and_summed_once_a_visit() -> None:
    chunks = tuple((stage,) for stage in range(4))
    on_host = frozenset((0, chunk) for chunk in range(4))
    step = StepShape(
        5, stages_per_rank=chunks, trainable=(True,) * 4, reduce="visit",
        weights=StageWeights(chunks, prefetch=0, on_host=on_host),
    )  # fmt: skip
    (actions,) = step_plan(PipelineConfig(size=1, schedule="bfs", stages_per_rank=4), step)
    assert [a.chunk for a in actions if a.kind is ActionKind.FETCH] == [0, 1, 2, 3, 2, 1, 0]
    assert [(a.chunk, a.micro_batch) for a in actions if a.kind is ActionKind.REDUCE] == [
        (c, 4) for c in (3, 2, 1, 0)
    ]
    without = Plan((tuple(a for a in actions if a.kind is not ActionKind.REDUCE or a.chunk != 2),))
    with pytest.raises(PlanError, match="stage 2 chunk 2 has no REDUCE"):
        check(without, shapes={0: Shape(4, 5, by_visit=True)}, memory=step.weights.memory())
    with pytest.raises(PlanError, match="has no REDUCE for every micro-batch"):
        check(Plan((actions,)), shapes={0: Shape(4, 5)}, memory=step.weights.memory())
