"""bf16 and fp16 beside a plain loop in the same dtype, the loss scale, and steps that change nothing."""

from __future__ import annotations

import math
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

import colossal_lite as cl
from colossal_lite.config.schema import PrecisionConfig
from colossal_lite.distributed.mesh import Mesh
from colossal_lite.engine.engine import StepTotals
from colossal_lite.memory.chunk import Chunk
from colossal_lite.memory.packing import Item, pack
from colossal_lite.memory.weight_chunk import Groups
from colossal_lite.numerics.precision import FIRST_SCALE, GROWTH_STEPS, LARGEST_SCALE, ChunkTypes, LossScale
from tests.shared.parity import Case, assert_no_further
from tests.shared.pool import RankEnv, run_world

PLAIN = Case(ragged=True, steps=2)
HARD = Case(
    dropout=0.2,
    ragged=True,
    global_batch=5,
    config=dict(clip_grad_norm=0.05, gradient_accumulation=2),
    steps=2,
)


@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize("family", ["gpt2", "llama"])
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_sixteen_bits_are_no_further_from_the_truth_than_a_plain_loop(
    dtype: str, family: str, world_size: int
) -> None:
    case = HARD if world_size > 1 else PLAIN
    assert_no_further(case, family=family, config=case.config | {"precision": dtype}, world_size=world_size)


AXES: dict[str, dict[str, Any]] = {
    "1d": dict(tensor=2),
    "2d": dict(tensor=4, mode="2d", world_size=4, global_batch=8),
    "ring": dict(sequence=2),
}


@pytest.mark.parametrize("axes", AXES)
def test_fp16_is_no_further_from_the_truth_on_other_axes(axes: str) -> None:
    assert_no_further(HARD, config=HARD.config | {"precision": "fp16"}, **AXES[axes])


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_weights_without_a_master_are_no_further_from_the_truth_than_a_plain_loops(dtype: str) -> None:
    # It makes steps of a key bias's rounding: Llama has none. One seed is one draw of where Adam's signs turn round.
    adamw = dict(optimizer=dict(type="adamw", lr=1e-2))
    config = HARD.config | {"precision": dict(dtype=dtype, master="none")} | adamw
    assert_no_further(HARD, family="llama", config=config, seeds=range(12))


def test_the_scale_halves_at_an_overflow_and_doubles_after_enough_finite_steps() -> None:
    scale = LossScale.of(PrecisionConfig(dtype="fp16"))
    assert scale.scale == FIRST_SCALE == 2**16
    assert scale.after(False).scale == 2**15
    for _ in range(GROWTH_STEPS - 1):
        scale = scale.after(True)
    assert scale.scale == 2**16 and scale.after(True) == LossScale(2.0**17, True, 0)
    assert scale.after(False).after(True).finite_steps == 1
    for _ in range(40):
        scale = scale.after(False)
    assert scale.scale == 1.0 and scale.is_dynamic and scale.seed(1) == 1.0
    top = replace(scale, scale=LARGEST_SCALE, finite_steps=GROWTH_STEPS - 1)
    assert top.after(True).scale == LARGEST_SCALE


def test_a_fixed_scale_stays_and_other_dtypes_have_none() -> None:
    fixed = LossScale.of(PrecisionConfig(dtype="fp16", loss_scale=1000.0))
    assert fixed.after(False) == fixed.after(True) == fixed and fixed.seed(3) == 250.0
    for dtype in ("fp64", "fp32", "bf16"):
        assert LossScale.of(PrecisionConfig(dtype=dtype)).seed(1000) == 1.0


def test_the_seed_of_a_sum_is_that_of_a_mean_over_the_next_power_of_two() -> None:
    scale = LossScale.of(PrecisionConfig(dtype="fp16"))
    for positions, divisor in ((0, 1), (1, 1), (2, 2), (3, 4), (1024, 1024), (1025, 2048)):
        assert scale.seed(positions) == 2**16 / divisor


def test_the_scale_is_removed_exactly_where_fp16_would_end() -> None:
    (spec,) = pack([Item("w", 64)], target_numel=64)
    types = ChunkTypes(torch.float16, torch.float32, torch.float32)
    chunk = Chunk(spec, Groups(*[Mesh.serial().axis("data")] * 4), types=types, device=torch.device("cpu"))
    small = torch.arange(64).half() * 2.0**-24  # the least numbers of fp16
    chunk.accept(0, small, seed=2.0**16)
    chunk.accept(0, small, seed=2.0**10)
    assert torch.equal(chunk.gradient[:64], torch.arange(64) * (2.0**-40 + 2.0**-34))


def overflowing(env: RankEnv, manual: bool, tensor: int = 1) -> list[dict[str, Any]]:
    """Four fp16 steps; on the last rank the gradient of the first two overflows, while every loss is finite."""
    case = Case(config=dict(precision="fp16", gradient_accumulation=1), tensor=tensor)
    rows = []
    with env.launch(case.full_config) as context:
        number = 0

        def criterion(logits: Tensor, labels: Tensor) -> tuple[Tensor, int]:
            loss = nn.functional.cross_entropy(
                logits.float().flatten(0, 1), labels.flatten(), reduction="sum"
            )
            if number < 2 and env.rank == env.world_size - 1:
                loss = loss + 1e9 * (logits[0, 0, -1].float() - logits[0, 0, -1].detach().float())
            return loss, labels.numel()

        engine = cl.initialize(case.model, context=context, criterion=criterion)
        cut = context.local_batch(case.global_batch)
        for number in range(4):  # noqa: B007 (the criterion reads it)
            before, scale = engine.full_state_dict(), engine.loss_scale
            x, y = (part[cut] for part in case.batch(number))
            if manual:
                total, count = criterion(engine(x), y)
                engine.backward(total / count, count)
                result = engine.step()
            else:
                result = engine.train_step((x, y))
            after = engine.full_state_dict()
            same = all(torch.equal(after[name], before[name]) for name in before)
            row = dict(skipped=result.skipped, same=same, scale=scale, loss=float(result.loss), state=after)
            rows.append(row)
    return rows


@pytest.mark.parametrize(("manual", "tensor"), [(False, 1), (True, 1), (False, 2)])
def test_an_overflow_on_one_rank_is_one_decision_of_all(manual: bool, tensor: int) -> None:
    """Under tensor parallelism the last logit, and what flows back from it alone, is the last rank's."""
    ranks = run_world(overflowing, 2, manual, tensor)
    for rows in ranks:
        assert [row["skipped"] for row in rows] == [row["same"] for row in rows] == [True, True, False, False]
        assert [row["scale"] for row in rows] == [2.0**16, 2.0**15, 2.0**14, 2.0**14]
        assert all(torch.isfinite(torch.tensor(row["loss"])) for row in rows)
    for name, value in ranks[0][-1]["state"].items():
        assert torch.equal(value, ranks[1][-1]["state"][name])


def deciding_alone(env: RankEnv) -> list[dict[str, Any]]:
    """A planted fault: rank 0 judges by its own gradients, which are finite."""
    with patch.object(
        StepTotals, "is_finite", property(lambda self: env.rank == 0 or math.isfinite(self.squares))
    ):
        return overflowing(env, False)


def test_a_decision_of_one_rank_would_be_seen() -> None:
    first, last = run_world(deciding_alone, 2)
    assert not first[0]["skipped"] and not first[0]["same"] and last[0]["skipped"] and last[0]["same"]


def resumed(env: RankEnv, directory: str, precision: Any) -> tuple[float, float]:
    """The scale that a run has after an overflow, and that of the run that continues it."""
    config = Case(config=dict(precision="fp16")).full_config
    with env.launch(config) as context:
        engine = cl.initialize(Case().model, context=context, criterion=_infinite)
        assert engine.train_step(Case().batch(0)).skipped
        scale = engine.loss_scale
        engine.save(directory)
    with env.launch(config | {"precision": precision}) as context:
        engine = cl.initialize(Case().model, context=context)
        engine.load(directory)
        return scale, engine.loss_scale


def _infinite(logits: Tensor, labels: Tensor) -> tuple[Tensor, int]:
    return logits.float().square().sum() * 1e30, labels.numel()


@pytest.mark.parametrize(
    ("precision", "scale"), [("fp16", 2.0**15), (dict(dtype="fp16", loss_scale=8.0), 8.0), ("bf16", 1.0)]
)
def test_the_scale_is_part_of_a_checkpoint(precision: Any, scale: float, tmp_path: Path) -> None:
    assert run_world(resumed, 1, str(tmp_path), precision) == [(2.0**15, scale)]


def tiny_steps(env: RankEnv, precision: Any, lr: float, own: bool) -> list[str]:
    case = Case("llama", config=dict(precision=precision, optimizer=dict(type="sgd", lr=lr)))
    with env.launch(case.full_config) as context, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        sgd = (lambda params: torch.optim.SGD(params, lr=lr)) if own else None
        engine = cl.initialize(case.model, context=context, optimizer=sgd)
        for number in range(2):
            engine.train_step(tuple(part[context.local_batch(6)] for part in case.batch(number)))
        return [str(w.message) for w in caught if "changed no parameter" in str(w.message)]


ALONE = dict(dtype="bf16", master="none")


@pytest.mark.parametrize(
    ("precision", "lr", "times"), [(ALONE, 1e-12, 2), (ALONE, 0.5, 0), (ALONE, 0.0, 0), ("fp32", 1e-3, 0)]
)
@pytest.mark.parametrize("own", [False, True])
def test_a_step_that_changes_no_parameter_warns_once_and_says_why(
    precision: Any, lr: float, times: int, own: bool
) -> None:
    first, second = run_world(tiny_steps, 2, precision, lr, own)
    assert len(first) == times and not second
    assert all("lr=1e-12" in line and "bf16 master weights" in line for line in first)


def bytes_of(env: RankEnv, precision: Any) -> dict[str, tuple[int, int]]:
    case = Case(config=dict(precision=precision, optimizer=dict(type="adamw", lr=1e-3)))
    with env.launch(case.full_config) as context:
        engine = cl.initialize(case.model, context=context)
        return {row.kind: (row.now_bytes, row.forecast_bytes) for row in engine.memory_report()}


def test_weights_without_a_master_are_four_bytes_less_and_the_rest_is_the_same() -> None:
    ((with_master,), (alone,)) = (
        run_world(bytes_of, 1, "fp16"),
        run_world(bytes_of, 1, dict(dtype="fp16", master="none")),
    )
    numel = with_master["weights"][0] // 2
    assert with_master.pop("masters") == (4 * numel, 4 * numel) and alone.pop("masters") == (0, 0)
    assert alone == with_master and alone["optimizer"] == (8 * numel, 8 * numel)
