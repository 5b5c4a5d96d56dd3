"""Auxiliary losses mean what a plain loop means by them, on every mesh. Beside pipelines: test_pipeline.py."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import colossal_lite as cl
from colossal_lite.planner import planner
from colossal_lite.transforms.auxiliary_loss import AuxiliaryLoss
from tests.shared.parity import Case, assert_no_further, assert_parity, serial_run
from tests.shared.pool import RankEnv, WorldError, run_world

ALL = ("token", "sample", "element")
CLIPPED = dict(clip_grad_norm=0.05)
CASE = Case(auxiliary=ALL, ragged=True, steps=2, config=CLIPPED, tokens=8)
TWO = replace(CASE, auxiliary=("token", "element"))
CASES = {
    "one rank": replace(CASE, world_size=1),
    "data 3, uneven, accumulated, recomputed": replace(
        CASE, world_size=3, global_batch=8, dropout=0.2,
        config=CLIPPED | dict(gradient_accumulation=2, activation_checkpoint="full"),
    ),
    "ZeRO-3, partly recomputed": replace(
        CASE, family="llama", config=CLIPPED | dict(zero=dict(stage=3), activation_checkpoint="selective")
    ),
    "fewer samples than ranks": replace(CASE, global_batch=1),
    "1d": replace(TWO, world_size=4, tensor=2, dropout=0.2),
    "1d, whole sequences": replace(CASE, world_size=4, tensor=2, sequence_parallel=False),
    "2d": replace(CASE, world_size=4, tensor=4, mode="2d", auxiliary=("element",), global_batch=4),
    "2.5d x ring": replace(
        CASE, world_size=4, tensor=2, mode="2.5d", depth=2, sequence=2, auxiliary=("element",), global_batch=4
    ),
    "3d": replace(CASE, world_size=8, tensor=8, mode="3d", auxiliary=("element",), global_batch=4, steps=1),
    "ring x data": replace(TWO, world_size=4, sequence=2),
    "ulysses, llama": replace(TWO, sequence=2, sequence_mode="ulysses", family="llama"),
    "allgather_kv x 1d": replace(TWO, world_size=4, sequence=2, sequence_mode="allgather_kv", tensor=2, steps=1),
    "GPT-2 of Hugging Face, 1d": replace(TWO, family="hf-gpt2", tensor=2, tokens=12, build="module"),
    "Llama of Hugging Face, ring": replace(TWO, family="hf-llama", tied=False, sequence=2, tokens=12),
    "pipeline, per sample": replace(
        CASE, world_size=4, pipeline=dict(size=2, schedule="zb-h1", micro_batches=3), global_batch=7,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_loss_and_every_gradient_are_those_of_the_plain_sum(name: str) -> None:
    assert_parity(CASES[name])


def test_sixteen_bits_are_no_further_off() -> None:
    assert_no_further(replace(CASE, config=CLIPPED | dict(precision="fp16", gradient_accumulation=2)))


def evaluates(env: RankEnv, case: Case) -> tuple[float, float]:
    with env.launch(case.full_config) as context:
        inputs, labels = (t[context.local_batch(case.global_batch)] for t in case.batch(0))
        engine = cl.initialize(case.model, context=context)
        return engine.eval_step((inputs, labels)).item(), engine.train_step((inputs, labels)).loss.item()


@pytest.mark.parametrize("pipeline", [1, dict(size=2, micro_batches=3)], ids=["data", "pipeline"])
def test_an_evaluation_has_the_loss_of_a_step(pipeline: Any) -> None:
    case = replace(CASE, pipeline=pipeline, steps=1)
    (truth,) = serial_run(case)
    for losses in run_world(evaluates, 2, case):
        assert all(math.isclose(loss, truth.loss, rel_tol=1e-12) for loss in losses)


def traffic(env: RankEnv, case: Case) -> list[tuple[str, str, int, int]]:
    """Of the second step, when forms of messages are agreed."""
    with env.launch(case.full_config) as context:
        engine = cl.initialize(case.model, context=context)
        for number in range(2):
            engine.train_step(tuple(t[context.local_batch(case.global_batch)] for t in case.batch(number)))
        return [(r.operation, r.axis, r.calls, r.payload_bytes) for r in engine.ledger.rows()]


@pytest.mark.parametrize("pipeline", [1, dict(size=2, micro_batches=3)], ids=["data", "pipeline"])
def test_bytes_of_a_run_are_those_of_its_plan(pipeline: Any) -> None:
    case = replace(CASE, pipeline=pipeline, world_size=2 if pipeline == 1 else 4)
    for rank, rows in enumerate(run_world(traffic, case.world_size, case)):
        plan = planner.plan(
            case.full_config, case.model, batch=case.global_batch, sequence=case.tokens, world_size=case.world_size,
            rank=rank,
        )  # fmt: skip
        assert [(r.operation, r.axis, r.calls, r.payload_bytes) for r in plan.traffic] == rows
        gathered = [
            calls_bytes for name, axis, *calls_bytes in rows if (name, axis) == ("all_gather", "data")
        ]
        assert gathered == [[1, 2 * 16]], "samples and valid labels of two ranks"


# ---- where it stands alone, and bad input ----


def test_without_an_engine_the_stream_passes_as_it_is() -> None:
    x = torch.randn(2, 3, requires_grad=True)
    assert AuxiliaryLoss()(x, x.sum()) is x


@pytest.mark.parametrize(
    ("options", "words"), [(dict(weight=math.nan), "weight=nan"), (dict(per="batch"), "per='batch'; legal are 'token'")]
)  # fmt: skip
def test_bad_options_are_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        AuxiliaryLoss(**options)


class Emits(nn.Module):
    """A layer that emits in the way that `how` says."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.linear = how, nn.Linear(16, 16)
        self.own = AuxiliaryLoss()

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(x)
        if self.how == "not a sum":
            return self.own(y, y.square().sum(-1))
        if self.how == "flat":
            return self.own(y.flatten(0, 1), y.square().sum()).view_as(y)
        if self.how == "not used":
            self.own(y, y.square().sum())
            return y
        return self.own(y, y.square().sum())


def three_for_each(outputs: Tensor, labels: Tensor) -> tuple[Tensor, int]:
    return outputs.square().sum(), 3 * len(labels)


def in_a_linear(model: nn.Module) -> None:
    model.blocks[0].mlp.up.add_module("own", AuxiliaryLoss())


class Pair(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.wide, self.narrow = nn.Linear(16, 32), nn.Linear(32, 16)
        self.own = AuxiliaryLoss() if how == "inside a pair" else None

    def forward(self, x: Tensor) -> Tensor:
        h = self.wide(x)
        y: Tensor = self.narrow(h if self.own is None else self.own(h, h.square().sum()))
        return y


class Last(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.own = AuxiliaryLoss()

    def forward(self, logits: Tensor) -> Tensor:
        return self.own(logits, logits.square().sum())


def at_the_root(model: nn.Module) -> None:
    model.add_module("own", AuxiliaryLoss())


CHANGES = {"in a linear": in_a_linear, "at the root": at_the_root}


def fails(env: RankEnv, case: Case, how: str) -> None:
    def model() -> nn.Module:
        if how in CHANGES:
            made = case.model()
            CHANGES[how](made)
            return made
        if how in ("own loop", "cut"):
            return case.model()
        middle, tail = (Pair(how), [Last()]) if how in PAIRS else (Emits(how), [])
        return nn.Sequential(nn.Embedding(37, 16), middle, nn.Linear(16, 37), *tail)

    with env.launch(case.full_config) as context:
        criterion = three_for_each if how in ("criterion", "evaluation") else None
        if how == "alone":
            cl.parallelize(model(), context.mesh)
        plan: Any = PAIR_PLAN if how in PAIRS else "auto"
        engine = cl.initialize(model, context=context, criterion=criterion, plan=plan)
        inputs, labels = (t[context.local_batch(case.global_batch)] for t in case.batch(0))
        if how == "own loop":
            engine(inputs)
        run = engine.eval_step if how == "evaluation" else engine.forward_backward
        run((inputs, labels))


PAIRS = ("inside a pair", "behind the head")
PAIR_PLAN = {"0": "embedding", "1.wide": "colwise", "1.narrow": "rowwise", "2": "lm_head"}
PLAIN = Case(tokens=8)
BAD: dict[str, tuple[Case, str]] = {
    "not a sum": (PLAIN, "total has the shape .3, 8.; legal is a 0-d sum"),
    "flat": (PLAIN, r"auxiliary loss 1.own: x has the shape .24, 16. in a micro-batch of 3 samples"),
    "not used": (PLAIN, "auxiliary loss 1.own: its gradient was asked for 0 times, not 1; legal: go on with"),
    "criterion": (PLAIN, "criterion: its counts add up to 18, not to the batch.s 48 labels"),
    "evaluation": (PLAIN, "criterion: its counts add up to 18, not to the batch.s 48 labels"),
    "alone": (PLAIN, "1.own is an auxiliary loss, which an engine collects"),
    "own loop": (CASE, r"engine\(x\): the model has an auxiliary loss, blocks.0.norm1.auxiliary"),
    "behind the head": (replace(PLAIN, tensor=2), "3.own: it runs after 2, where activations are sharded.*a criterion"),
    "inside a pair": (replace(PLAIN, tensor=2), "1.own: it runs after 1.wide, where activations are sharded"),
    "in a linear": (replace(PLAIN, tensor=2), "blocks.0.mlp.up.own: it lies in a module that becomes.* mode 1d"),
    "at the root": (replace(PLAIN, pipeline=2), "own of GPT is under none of its units"),
}  # fmt: skip
CUT = {
    "features": (replace(TWO, tensor=4, mode="2d", world_size=4), "per='token' is a.*tensor mode 2d.*per='element'"),
    "tokens": (replace(CASE, tensor=2), "per='sample' is a.*what sequence_parallel=True cuts.*per='element', 'token'"),
    "sequence": (replace(CASE, sequence=2), r"per='sample' is a.*what sequence parallelism \(mode 'ring'\) cuts"),
}  # fmt: skip


@pytest.mark.parametrize("how", BAD)
def test_bad_input_is_told_by_name(how: str) -> None:
    case, words = BAD[how]
    with pytest.raises(WorldError, match=words) as error:
        run_world(fails, case.world_size, case, how)
    assert error.value.ranks("raised") == list(range(case.world_size))


@pytest.mark.parametrize("what", CUT)
def test_what_parts_do_not_add_up_to_is_refused_before_anything_is_allocated(what: str) -> None:
    case, words = CUT[what]
    with pytest.raises(WorldError, match=words) as error:
        run_world(fails, case.world_size, case, "cut")
    assert error.value.ranks("raised") == list(range(case.world_size))
