"""A pipeline is the serial run, under every schedule, and does what its plan says."""

from __future__ import annotations

import json
import math
import os
import signal
import time
import weakref
import xml.etree.ElementTree as ElementTree
from collections import Counter
from dataclasses import replace
from itertools import chain, cycle, product
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

import colossal_lite as cl
from colossal_lite.config.errors import ConfigError
from colossal_lite.config.pipeline_schema import PipelineConfig
from colossal_lite.distributed.communicator import CommError, Communicator
from colossal_lite.engine.engine import Engine
from colossal_lite.models import GPT, GPTConfig
from colossal_lite.parallel.parallelize import facts_of
from colossal_lite.pipeline.stages import lay_out
from colossal_lite.pipeline.step_plan import StepShape, compute_plan
from colossal_lite.planner import planner
from colossal_lite.schedule.checker import check
from colossal_lite.schedule.plan import COMPUTE_KINDS, MESSAGES, SENDS, Action, ActionKind, Plan
from colossal_lite.schedule.simulator import StageCosts
from colossal_lite.schedule.step_passes import add_messages
from colossal_lite.zero import build_chunks as build
from tests.shared.covering import Choice, covering_array, name_of
from tests.shared.parity import (
    SIZES,
    Case,
    assert_no_further,
    assert_parity,
    chunk_numel,
    ledger,
    mean_loss,
    parallel_steps,
    relative_error,
    serial_run,
    start,
)
from tests.shared.pool import RankEnv, WorldError, run_world
from tests.zero.test_zero import KINDS, assert_same_bits, assert_same_state, bits, loads, saves

SCHEDULES = {"gpipe": 1, "1f1b": 1, "interleaved": 2, "bfs": 2, "zb-h1": 1, "zb-v": 2, "auto": 1}
"""With the chunks that each is tried with."""
ZERO = {name: zero for name, zero in KINDS.items() if zero.get("stage", 0) < 3}
FACTORS: dict[str, list[Any]] = dict(
    schedule=list(SCHEDULES),
    size=[2, 4],
    micro_batches=[1, 2, 4, 7, 8],
    data=[1, 2],
    tensor=[None, True, False],  # sequence_parallel of two ranks
    recompute=["none", "full"],
    dropout=[0.0, 0.2],
    tied=[True, False],
    family=["gpt2", "llama"],
    zero=list(ZERO),
)


def legal(row: Choice, most_ranks: int = 8) -> bool:
    stages = row["size"] * SCHEDULES[row["schedule"]]
    ranks = row["size"] * row["data"] * (1 if row["tensor"] is None else 2)
    return stages <= 4 and ranks <= most_ranks


def quick_or_deep(row: Choice) -> bool:
    """Four ranks at the most, with two stages on each too."""
    ranks = row["size"] * row["data"] * (1 if row["tensor"] is None else 2)
    return ranks <= 4


DEEP_FACTORS = FACTORS | dict(schedule=["interleaved", "bfs", "zb-v", "auto"], size=[4], stages_per_rank=[2])
"""Eight stages over four ranks."""


def legal_deep(row: Choice) -> bool:
    return bool(row["data"] * (1 if row["tensor"] is None else 2) <= 2)


DEEP_ROWS = covering_array(DEEP_FACTORS, legal_deep, together=3)


def case_of(row: Choice) -> Case:
    """Stages are cut within blocks beside dropout; a stage has several chunks where they are reduced by micro-batch;
    blocks of untied models emit auxiliary losses."""
    chunks = row.get("stages_per_rank", SCHEDULES[row["schedule"]])
    stages = row["size"] * chunks
    layers = max(stages, 2)
    pipeline = dict(
        size=row["size"], schedule=row["schedule"], stages_per_rank=chunks, micro_batches=row["micro_batches"]
    )
    if row["dropout"]:
        pipeline["partition"] = uneven(2 * layers + 2, stages)
    ranks = row["size"] * row["data"]
    tensor: dict[str, Any] = {}
    if row["tensor"] is not None:
        ranks, tensor = 2 * ranks, dict(tensor=2, sequence_parallel=row["tensor"])
    accumulation = 2 if row["micro_batches"] == 2 else 1
    parts = row["data"] * accumulation
    return Case(
        family=row["family"],
        tied=row["tied"],
        dropout=row["dropout"],
        world_size=ranks,
        layers=layers,
        tokens=6,
        steps=2,
        ragged=True,
        # the last micro-batch is smaller than the others where it can be
        global_batch=parts * row["micro_batches"] + (parts if row["micro_batches"] > 1 else 0),
        pipeline=pipeline,
        config=dict(
            clip_grad_norm=0.05,
            gradient_accumulation=accumulation,
            activation_checkpoint=row["recompute"],
            zero=ZERO[row["zero"]],
        ),
        chunk_bytes=4096 if row["zero"] not in ("0", "1") else None,
        auxiliary=() if row["tied"] else ("token", "element"),
        **tensor,
    )


def uneven(units: int, stages: int) -> tuple[int, ...]:
    """Counts of which most cut a block in two."""
    counts = [1] * stages
    counts[-1] += (units - stages) // 2
    counts[0] += units - sum(counts)
    return tuple(counts)


def auto_and_deep() -> list[Choice]:
    """`auto` with two stages on each of four ranks."""
    return [row for row in DEEP_ROWS if row["schedule"] == "auto" and quick_or_deep(row)][:1]


@pytest.mark.parametrize("row", covering_array(FACTORS, quick_or_deep) + auto_and_deep(), ids=name_of)
def test_every_gradient_is_the_serial_one(row: Choice) -> None:
    assert_parity(case_of(row))


@pytest.mark.campaign
@pytest.mark.parametrize("row", DEEP_ROWS, ids=name_of)
def test_every_gradient_of_eight_stages_is_the_serial_one_for_each_three_choices(row: Choice) -> None:
    assert_parity(case_of(row))


def product_of_all() -> list[Choice]:
    """Of the other factors, one way of sharding after the other."""
    others = {name: values for name, values in FACTORS.items() if name != "zero"}
    rows = [dict(zip(others, values, strict=True)) for values in product(*others.values())]
    return [row | dict(zero=zero) for row, zero in zip(filter(legal, rows), cycle(ZERO), strict=False)]


@pytest.mark.campaign
@pytest.mark.parametrize("row", product_of_all(), ids=name_of)
def test_every_gradient_of_the_whole_product_is_the_serial_one(row: Choice) -> None:
    assert_parity(case_of(row))


CUTS: dict[str, dict[str, Any]] = {
    "1d": dict(tensor=2),
    "2d": dict(tensor=4, mode="2d"),
    "2.5d": dict(tensor=2, mode="2.5d", depth=2),
    "ring": dict(sequence=2),
    "ulysses": dict(sequence=2, sequence_mode="ulysses"),
    "allgather_kv": dict(sequence=2, sequence_mode="allgather_kv"),
    "ring_full": dict(sequence=2, sequence_mode="ring_full", causal=False),
    "usp": dict(sequence=4, sequence_mode="usp", ulysses=2),
    "1d x ring": dict(tensor=2, sequence=2),
    "2.5d x ulysses": dict(tensor=2, mode="2.5d", depth=2, sequence=2, sequence_mode="ulysses"),
}
CUT_FACTORS: dict[str, list[Any]] = dict(
    cut=list(CUTS),
    schedule=["zb-v", "1f1b", "zb-h1", "interleaved", "gpipe"],
    zero=["2 by micro-batch", "0", "0 ordered", "1"],
    data=[1, 2],
    recompute=["none", "full"],
    dropout=[0.2, 0.0],
    tied=[True, False],
    family=["gpt2", "llama", "hf-gpt2"],
)


def cut_case(row: Choice) -> Case:
    """A pipeline of two ranks whose activations are cut, or no pipeline."""
    cut, stages = CUTS[row["cut"]], 1 if row["schedule"] == "none" else 2
    chunks, parts = SCHEDULES.get(row["schedule"], 1), row.get("parts", 1)
    samples = (
        1 if "tensor" not in cut or cut.get("mode", "1d") == "1d" else 2
    )  # that a micro-batch divides into
    theirs = row["family"].startswith("hf-")
    pipeline: Any = 1
    if stages > 1:
        pipeline = dict(size=2, schedule=row["schedule"], stages_per_rank=chunks, micro_batches=3)
    case = Case(
        family=row["family"], tied=row["tied"], dropout=row["dropout"], layers=2 * chunks, tokens=12 if theirs else 8,
        steps=1, ragged=True, global_batch=3 * samples * row["data"] * parts, pipeline=pipeline,
        config=dict(
            clip_grad_norm=0.05, activation_checkpoint=row["recompute"], zero=ZERO[row["zero"]],
            gradient_accumulation=parts,
        ),
        chunk_bytes=4096, build="module" if theirs else "callable",
        auxiliary=() if row["tied"] else ("element",) if "mode" in cut else ("token", "element"),
    )  # fmt: skip
    case = replace(case, **cut)
    return replace(case, world_size=stages * row["data"] * case.tensor * case.sequence)


def legal_cut(row: Choice) -> bool:
    cut = CUTS[row["cut"]]
    ranks = 2 * row["data"] * cut.get("tensor", 1) * cut.get("sequence", 1)
    theirs = row["family"].startswith("hf-")  # has two layers, a sequence of 12, and its masks
    odd = SCHEDULES.get(row["schedule"], 1) > 1 or "causal" in cut or row["cut"] in ("usp", "1d x ring")
    return ranks <= 8 and not (theirs and odd)


CUT_ROWS = covering_array(CUT_FACTORS, legal_cut)


def one_of_each(rows: list[Choice]) -> list[Choice]:
    """Of each cut of one axis the first row, the next for the schedules and families that are then missing; on no more
    ranks than the cut needs."""
    small = [row for row in rows if row["data"] == 1 and " x " not in row["cut"]]
    chosen, seen = [], set[tuple[str, Any]]()
    for factor in ("cut", "schedule", "family"):
        for row in small:
            if (factor, row[factor]) not in seen:
                chosen.append(row)
                seen |= row.items()
    return chosen


@pytest.mark.parametrize("row", one_of_each(CUT_ROWS), ids=name_of)
def test_every_gradient_is_the_serial_one_where_activations_are_cut(row: Choice) -> None:
    assert_parity(cut_case(row))


@pytest.mark.campaign
@pytest.mark.parametrize("row", CUT_ROWS, ids=name_of)
def test_every_gradient_is_the_serial_one_for_each_pair_of_cuts_and_the_rest(row: Choice) -> None:
    assert_parity(cut_case(row))


CUT_TRIPLES = covering_array(
    CUT_FACTORS | dict(schedule=["none", *CUT_FACTORS["schedule"]], parts=[1, 2]), legal_cut, together=3
)


@pytest.mark.campaign
@pytest.mark.parametrize("row", CUT_TRIPLES, ids=name_of)
def test_every_gradient_is_the_serial_one_for_each_three_of_cuts_and_the_rest(row: Choice) -> None:
    assert_parity(cut_case(row))


@pytest.mark.campaign  # sixteen ranks
def test_every_gradient_is_the_serial_one_in_three_dimensions() -> None:
    assert_parity(
        Case(
            tensor=8, mode="3d", world_size=16, layers=2, tokens=4, steps=1, ragged=True, dropout=0.2, global_batch=8,
            pipeline=dict(size=2, schedule="zb-h1", micro_batches=2), config=dict(clip_grad_norm=0.05),
        )
    )  # fmt: skip


def by_place(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    """NAdam in two groups, by where a parameter stands in the model."""
    half = len(params) // 2
    groups = [dict(params=params[:half], lr=1e-2), dict(params=params[half:], lr=3e-2, weight_decay=0.1)]
    return torch.optim.NAdam(groups)


MATRICES = dict(type="muon", lr=1e-2, groups=[dict(match="*norm*", type="adamw")])
SMALL: dict[str, Any] = dict(layers=2, tokens=6, steps=2, ragged=True)
PAIR = Case(pipeline=dict(size=2, micro_batches=3), **SMALL)
CLIPPED = dict(clip_grad_norm=0.05)
AUTO = dict(size=2, schedule="auto", stages_per_rank=2, micro_batches=2)
"""By the costs of the cut a fold is best, by uniform ones a loop; with a larger head it is the other way round."""
OTHERS = {
    "pipeline 2 x tensor 2 x data 2, unequal batches": replace(
        PAIR,
        world_size=8,
        tensor=2,
        dropout=0.2,
        global_batch=9,
        config=CLIPPED | dict(zero=dict(stage=1)),
    ),
    "fewer samples than ranks": replace(PAIR, world_size=4, global_batch=1, dropout=0.1, pipeline=2),
    "of a module, AdamW": replace(
        PAIR, build="module", config=dict(optimizer=dict(type="adamw", lr=1e-2, weight_decay=0.1))
    ),
    "a rule that needs whole matrices": replace(
        PAIR, family="llama", config=dict(optimizer=MATRICES)
    ),
    "a first stage without gradients": replace(
        PAIR,
        tied=False,
        frozen=("token.weight", "position.weight", *(f"blocks.0.{n}" for n in (
            "norm1.weight", "norm1.bias", "attention.qkv.weight", "attention.qkv.bias", "attention.out.weight",
            "attention.out.bias", "norm2.weight", "norm2.bias", "mlp.up.weight", "mlp.up.bias", "mlp.down.weight",
            "mlp.down.bias",
        ))),
        pipeline=dict(size=2, micro_batches=3, partition=(3, 3)),
        config=CLIPPED,
    ),
    "a last stage without gradients": replace(
        PAIR, tied=False, frozen=("norm.weight", "norm.bias", "head.weight"),
        pipeline=dict(size=2, micro_batches=2, partition=(5, 1)),
    ),
    "an optimizer of one's own": replace(PAIR, family="llama", own=by_place, config=CLIPPED, steps=3),
    "adapters": replace(PAIR, adapters=2, config=CLIPPED),
    "chunks of 2 KB": replace(PAIR, chunk_bytes=2048, config=CLIPPED | dict(zero=dict(stage=1)), world_size=4),
    "GPT-2 of Hugging Face": replace(
        PAIR, family="hf-gpt2", tokens=12, dropout=0.2, pipeline=dict(size=2, schedule="zb-h1", micro_batches=3),
        config=CLIPPED | dict(activation_checkpoint="full"),
    ),
    "GPT-2 of Hugging Face, tensor 2": replace(
        PAIR, family="hf-gpt2", tokens=12, tied=False, world_size=4, tensor=2, sequence_parallel=False,
    ),
    "GPT-2 of Hugging Face, tensor 2, sequences cut between blocks": replace(
        PAIR, family="hf-gpt2", tokens=12, dropout=0.2, world_size=4, tensor=2, auxiliary=("token",),
        pipeline=dict(size=2, schedule="zb-h1", micro_batches=3), config=CLIPPED | dict(activation_checkpoint="full"),
    ),
    "Llama of Hugging Face, tensor 2, sequences cut, cut behind the embedding": replace(
        PAIR, family="hf-llama", tokens=12, tied=False, world_size=4, tensor=2,
        pipeline=dict(size=2, micro_batches=3, partition=(1, 3)),
    ),
    "Llama of Hugging Face": replace(PAIR, family="hf-llama", tokens=12, tied=True, config=CLIPPED),
    "float32": replace(PAIR, config=CLIPPED | dict(precision="fp32")),
    "auto, folded": replace(PAIR, layers=4, vocabulary=64, pipeline=AUTO, config=CLIPPED),
    "auto, in a loop": replace(
        PAIR, layers=4, vocabulary=2048, tied=False, pipeline=dict(AUTO, micro_batches=3), config=CLIPPED,
    ),
}  # fmt: skip


OTHERS |= {
    "a first stage without gradients, zb-h1": replace(
        OTHERS["a first stage without gradients"],
        pipeline=dict(size=2, schedule="zb-h1", micro_batches=3, partition=(3, 3)),
    ),
    "a last stage without gradients, zb-v": replace(
        OTHERS["a last stage without gradients"], layers=4,
        pipeline=dict(size=2, schedule="zb-v", micro_batches=3, partition=(3, 3, 3, 1)),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", OTHERS)
def test_every_gradient_is_the_serial_one_with(name: str) -> None:
    assert_parity(OTHERS[name])


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_sixteen_bits_are_no_further_off(precision: str) -> None:
    assert_no_further(replace(PAIR, config=CLIPPED | dict(precision=precision)))


# ---- evaluation, a criterion, other models ----


def evaluates(env: RankEnv, case: Case) -> tuple[list[float], dict[str, Tensor], float]:
    with env.launch(case.full_config) as context:
        inputs, labels = (t[context.local_batch(case.global_batch)] for t in case.batch(0))
        engine = cl.initialize(case.model, context=context, criterion=mean_loss)
        before = engine.eval_step((inputs, labels)).item()
        loss = engine.forward_backward((inputs, labels)).item()
        gradients = engine.full_gradients()
        engine.zero_grad()
        odd = engine.eval_step((inputs[:1], labels[:1])).item()
        after = engine.eval_step((inputs, labels)).item()
        return [before, loss, after], gradients, odd


@pytest.mark.parametrize("pipeline", [PAIR.pipeline, AUTO], ids=["1f1b", "auto in a loop"])
def test_evaluation_and_a_criterion_are_the_serial_ones(pipeline: dict[str, Any]) -> None:
    case = replace(PAIR, layers=4, steps=1, pipeline=pipeline)
    (truth,) = serial_run(case)
    whole = math.sqrt(sum(float(g.norm()) ** 2 for g in truth.gradients.values()))
    alone = run_world(evaluates, 1, replace(case, pipeline=1))[0]
    for losses, gradients, odd in run_world(evaluates, 2, case):
        assert all(abs(loss - truth.loss) <= 1e-12 * abs(truth.loss) for loss in losses)
        assert all(relative_error(gradients[n], g, whole) < 1e-10 for n, g in truth.gradients.items())
        assert math.isclose(odd, alone[2], rel_tol=1e-12)


class Pass(nn.Module):
    """What goes between stages may be a dict or a tuple of tensors, some of which take no gradient."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self.form = form
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Any) -> Any:
        if isinstance(x, Tensor):
            h, ids = x, (100 * x[..., 0]).long().abs() % 5
        else:
            h, ids = x.values() if isinstance(x, dict) else x
        h = h + torch.tanh(self.linear(h)) * (ids[..., None] + 1)
        return dict(h=h, ids=ids) if self.form == "dict" else (h, ids)


class First(nn.Module):
    def forward(self, x: Any) -> Tensor:
        h: Tensor = next(iter(x.values())) if isinstance(x, dict) else x[0]
        return h


def sequential(form: str) -> nn.Module:
    return nn.Sequential(
        nn.Embedding(SIZES["vocabulary"], 8), Pass(form), Pass(form), First(), nn.Linear(8, 37)
    )


def trains_members(env: RankEnv, form: str, pipeline: Any) -> tuple[list[float], dict[str, Tensor]]:
    case = replace(PAIR, pipeline=pipeline)
    with env.launch(case.full_config) as context:
        torch.manual_seed(3)
        engine = cl.initialize(sequential(form), context=context)
        losses = []
        for number in range(3):
            inputs, labels = case.batch(number)
            losses.append(engine.train_step((inputs, labels)).loss.item())
            losses.append(engine.eval_step((inputs, labels)).item())
        return losses, engine.full_state_dict()


@pytest.mark.parametrize("form", ["tuple", "dict"])
def test_members_of_a_sequential_may_pass_tuples_and_dicts(form: str) -> None:
    pipeline = dict(size=2, schedule="interleaved", micro_batches=6, partition=(2, 1, 1, 1))
    ((losses, state),) = run_world(trains_members, 1, form, 1)
    for theirs, parameters in run_world(trains_members, 2, form, pipeline):
        assert all(math.isclose(a, b, rel_tol=1e-12) for a, b in zip(theirs, losses, strict=True))
        assert parameters.keys() == state.keys()
        assert all(torch.allclose(parameters[n], state[n], rtol=1e-11, atol=1e-13) for n in state)


SHRINKS: list[bool] = []
"""Whether each of the next forwards does. A form by the values of a batch is refused before."""


class Shrinks(nn.Module):
    """Drops the last position of a micro-batch, or of a dict its other member, where `SHRINKS` says so."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.what = what

    def forward(self, x: Tensor) -> Any:
        told = SHRINKS.pop(0) if SHRINKS else False
        if self.what == "member":
            return dict(x=x) if told else dict(x=x, y=2 * x)
        return x[:, :-1] if told else x


class Stretches(nn.Module):
    """Makes [B, T, D] of whatever comes."""

    def forward(self, x: Any) -> Tensor:
        h: Tensor = x["x"] if isinstance(x, dict) else x
        return nn.functional.pad(h, (0, 0, 0, 6 - h.shape[1]))


def changes_a_form(env: RankEnv, pipeline: dict[str, Any], backend: str, what: str, trains: bool) -> str:
    """What this rank says when the second of three micro-batches has a message of another form, shapes being agreed."""
    case = replace(PAIR, pipeline=pipeline, config=dict(backend=backend, timeout_s=10))
    with env.launch(case.full_config) as context:
        torch.manual_seed(3)
        model = nn.Sequential(
            nn.Embedding(SIZES["vocabulary"], 8),
            Shrinks(what),
            Stretches(),
            nn.Linear(8, SIZES["vocabulary"]),
        )
        engine = cl.initialize(model, context=context)
        inputs, labels = (t[context.local_batch(case.global_batch)] for t in case.batch(0))
        step = engine.forward_backward if trains else engine.eval_step
        for odd in (False, False, True):
            SHRINKS[:] = [False, True, False] if odd else []
            try:
                step((inputs, labels))
                engine.zero_grad()
            except ValueError as error:
                assert odd
                return str(error)
            except CommError as error:
                return f"lost: {error}"
    return ""


@pytest.mark.parametrize(
    ("what", "backend", "trains", "schedule", "agreed"),
    [
        (
            "tensor",
            "gloo",
            False,
            "1f1b",
            ("[2, 5, 8] float64 without", "[2, 6, 8] float64 without gradient is"),
        ),
        ("tensor", "auto", True, "zb-v", ("[2, 5, 8] float64 for", "where [2, 6, 8] float64 is")),
        ("member", "gloo", True, "1f1b", ("x [2, 6, 8] float64 for", "x [2, 6, 8] float64 and y [2, 6, 8]")),
    ],
)
def test_a_message_of_another_form_than_is_agreed_is_told_by_its_stage(
    what: str, backend: str, trains: bool, schedule: str, agreed: tuple[str, ...]
) -> None:
    """Over gloo, where nothing else compares shapes, and within a rank (zb-v: from stage 1 to stage 2)."""
    chunks, guilty = (2, 1) if schedule == "zb-v" else (1, 0)
    partition = (1,) * 4 if chunks == 2 else (2, 2)
    pipeline = dict(size=2, schedule=schedule, stages_per_rank=chunks, micro_batches=3, partition=partition)
    said = run_world(changes_a_form, 2, pipeline, backend, what, trains)
    words = (f"stage {chunks - 1} passes on", "micro-batch 1", "is agreed", *agreed)
    assert all(word in said[guilty] for word in words), said
    assert (
        "legal" in said[guilty]
        and said[1 - guilty].startswith("lost: ")
        and f"rank {guilty}" in said[1 - guilty]
    )


def freezes_late(env: RankEnv, when: int) -> list[Any]:
    """Losses of two steps of zb-v; before step `when` (-1: before initialize) the table, a stage of its own, is
    frozen."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(37, 8), *(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(2)))
    model.append(nn.Linear(8, 37))
    given: list[Any] = []
    pipeline = dict(size=2, schedule="zb-v", micro_batches=2, partition=(1,) * 4)
    settings = dict(precision="fp64", optimizer=dict(type="sgd", lr=0.5), timeout_s=30)
    with env.launch(
        settings | (dict(parallel=dict(pipeline=pipeline)) if env.world_size > 1 else {})
    ) as context:

        def freeze(now: int) -> None:
            for name, parameter in model.named_parameters():
                if now == when and name == "0.weight":
                    parameter.requires_grad_(False)

        freeze(-1)
        engine = cl.initialize(model, context=context)
        try:
            for step in range(2):
                freeze(step)
                generator = torch.Generator().manual_seed(step)
                batch = torch.randint(37, (2, 4, 6), generator=generator)
                given.append(float(engine.train_step((batch[0], batch[1])).loss))
        except (ValueError, CommError) as error:
            given.append(str(error))
    return given


def test_a_stage_that_is_frozen_between_two_steps_is_refused_with_what_to_do() -> None:
    said = run_world(freezes_late, 2, 1)[0]
    words = "stage 0 passes on [2, 6, 8] float64 without gradient for micro-batch 0, where [2, 6, 8] float64 is agreed"
    legal = "legal: parameters that are frozen before the first step, not between two (requires_grad_(False))"
    assert len(said) == 2 and words in said[1] and said[1].endswith(legal), said


@pytest.mark.parametrize("when", [-1, 0])
def test_a_stage_that_is_frozen_before_the_first_step_is_exact(when: int) -> None:
    (truth,) = run_world(freezes_late, 1, when)
    assert run_world(freezes_late, 2, when) == [pytest.approx(truth, rel=1e-12)] * 2


# ---- what a rank holds and does ----


def looks(env: RankEnv, case: Case) -> dict[str, Any]:
    """Two steps of a case, and what this rank did in the second."""
    alive: Counter[tuple[int, int]] = Counter()
    most = 0

    class Box:
        def __init__(self, tensor: Tensor) -> None:
            self.tensor = tensor

    def forward(self: Engine, stage: int, part: Any, carried: Any, sums: Tensor) -> Any:
        subject = stage, int(part.samples[0])

        def gone() -> None:
            alive[subject] -= 1

        def pack(tensor: Tensor) -> Box:
            nonlocal most
            alive[subject] += 1
            # What W still needs after the graph has gone is a tensor.
            box = Box(tensor.view_as(tensor))
            weakref.finalize(box.tensor, gone)
            most = max(most, sum(n > 0 for n in alive.values()))
            return box

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda box: box.tensor):
            return original(self, stage, part, carried, sums)

    original = Engine._forward
    with pytest.MonkeyPatch.context() as patch, env.launch(case.full_config) as context:
        patch.setattr(Engine, "_forward", forward)
        engine = start(case, context)
        inputs, labels = (t[context.local_batch(case.global_batch)] for t in case.batch(0))
        with pytest.raises(ValueError, match="schedule_report: no step has run; legal: after train_step"):
            engine.schedule_report()
        runtime, slots = engine._runtime, list[Any]()
        for _ in range(2):
            engine.train_step((inputs, labels))
            slots.append(
                [(pool.most_taken, pool.bytes, pool.planned_bytes) for pool in runtime._slots.values()]
            )
        rows = [(r.operation, r.axis, r.calls, r.payload_bytes) for r in engine.ledger.rows()]
        timeline, report = engine.timeline(), engine.schedule_report()
        return dict(
            trace=report.trace(),
            svg=report.svg(),
            most=most,
            live=runtime.live_peak,
            rows=rows,
            spans=[(s.rank, str(s.action), s.start_s, s.end_s) for s in timeline.spans],
            own=[str(span.action) for span in runtime.spans],
            slots=slots,
            names={n: p.numel() for n, p in engine.model.named_parameters()},
            tied=engine._parts.parameters["token.weight"].detach().clone()
            if "token.weight" in engine._parts.parameters
            else None,
        )


RUNS = {
    "gpipe": dict(size=2, schedule="gpipe", micro_batches=4),
    "1f1b": dict(size=4, schedule="1f1b", micro_batches=6),
    "interleaved": dict(size=2, schedule="interleaved", stages_per_rank=2, micro_batches=4),
    "bfs": dict(size=2, schedule="bfs", stages_per_rank=2, micro_batches=3),
    "zb-h1": dict(size=4, schedule="zb-h1", micro_batches=5),
    "zb-v": dict(size=2, schedule="zb-v", micro_batches=5),
    "auto": dict(size=2, schedule="auto", stages_per_rank=2, micro_batches=2),
}


def plan_of(case: Case) -> tuple[Plan, StageCosts]:
    """The compute of a case's step, and the costs that it is cut by."""
    config, model = PipelineConfig(**case.pipeline), case.model()
    stages = lay_out(model, facts_of(model), config, 0)
    placement = tuple(rank for _, rank in sorted(stages.placement.items()))
    costs = stages.cut.stage_costs()
    return compute_plan(config, StepShape(config.micro_batches or 0, costs=costs, placement=placement)), costs


def run_case(pipeline: dict[str, Any], **changes: Any) -> Case:
    """Two samples of six tokens in each micro-batch."""
    ranks = int(pipeline["size"]) * int(changes.get("tensor", 1))
    parts = 2 * int(pipeline["micro_batches"])
    return Case(world_size=ranks, layers=4, tokens=6, global_batch=parts, pipeline=pipeline, **changes)


@pytest.mark.parametrize("name", RUNS)
def test_a_run_does_what_its_plan_says(name: str) -> None:
    case = run_case(RUNS[name])
    (plan, _), tokens, micro_batches = plan_of(case), case.tokens, case.global_batch // 2
    ranks = run_world(looks, len(plan), case)
    live = check(plan).live
    placement = plan.placement()
    for rank, seen in enumerate(ranks):
        compute = [a for a in seen["own"] if Action.parse(a).kind in COMPUTE_KINDS]
        assert compute == [str(a) for a in plan[rank]]
        assert seen["most"] == seen["live"] == live[rank], "activations that autograd really kept"
        sends = [a for a in plan[rank] if a.kind is not ActionKind.W and crosses(a, placement)]
        message_bytes = 2 * tokens * SIZES["width"] * 8
        ends = {placement[0], placement[max(placement)]}
        tied = int(rank in ends and len(ends) > 1)
        numel = chunk_numel([37 * SIZES["width"]], 1)  # the tied table in a chunk of its own
        expected = ("send", "pipeline", len(sends) + tied, len(sends) * message_bytes + tied * numel * 8)
        assert [row for row in seen["rows"] if row[1] == "pipeline"] == [expected]
        for _, held, planned in chain.from_iterable(seen["slots"]):
            assert held == planned, "allocated in the first step, and then no more"
        assert seen["slots"][1] == [(planned // message_bytes, planned, planned)], "each of them was needed"
        assert seen["spans"] == ranks[0]["spans"]
    assert_in_order(ranks[0]["spans"], 2 * len(placement) * micro_batches)
    assert_reported(ranks[0]["trace"], ranks[0]["svg"], plan, ranks)
    copies = [seen["tied"] for seen in ranks if seen["tied"] is not None]
    assert len(copies) == len(ends)
    whole = {name: p.numel() for name, p in case.model().named_parameters()}
    held: Counter[str] = Counter()
    for seen in ranks:
        held.update(seen["names"])
    extra = (len(copies) - 1) * whole["token.weight"]
    assert sum(held.values()) == sum(whole.values()) + extra, "each parameter on its own stage"
    assert torch.equal(copies[0], copies[-1]), "both copies of the tied table have the same bits"


def assert_reported(trace: str, svg: str, plan: Plan, ranks: list[dict[str, Any]]) -> None:
    """The trace of a run has what each rank did, in its order; the drawing every compute action, twice."""
    events = json.loads(trace)["traceEvents"]
    processes = {e["args"]["name"]: e["pid"] for e in events if e["name"] == "process_name"}
    predicted_s: dict[str, float] = {}
    for rank, seen in enumerate(ranks):
        done = [e for e in events if e["ph"] == "X" and e["pid"] == processes[f"measured rank {rank}"]]
        assert sorted(e["name"] for e in done) == sorted(seen["own"])
        compute = [e for e in done if Action.parse(e["name"]).kind in COMPUTE_KINDS]
        assert [e["name"] for e in sorted(compute, key=lambda e: e["ts"])] == [str(a) for a in plan[rank]]
        predicted = [e for e in events if e["ph"] == "X" and e["pid"] == processes[f"predicted rank {rank}"]]
        assert sorted(e["name"] for e in predicted) == sorted(seen["own"]), "the plan of that very step"
        predicted_s |= {e["name"]: e["dur"] for e in predicted}
    assert min(e["ts"] for e in events if e["ph"] == "X") == 0
    root = ElementTree.fromstring(svg)
    tips = Counter((tip.text or "").split()[0] for tip in root.iter("{http://www.w3.org/2000/svg}title"))
    # what is foretold to take no time, the lookup's gradient of nothing, has no width
    drawn = {str(a): 1 + (predicted_s[str(a)] > 0) for actions in plan for a in actions}
    assert {word: tips[word] for word in drawn} == drawn, "predicted beside measured"
    assert 2 in drawn.values()


def crosses(action: Any, placement: dict[int, int]) -> bool:
    """Whether what a compute action makes goes to another rank."""
    to = action.stage + (1 if action.kind is ActionKind.F else -1)
    return to in placement and placement[to] != placement[action.stage]


def assert_in_order(spans: list[tuple[int, str, float, float]], count: int) -> None:
    """Nothing ends before what it needs has ended, over all ranks."""
    ends = {word: end for _, word, _, end in spans}
    compute = [word for word in ends if Action.parse(word).kind in (ActionKind.F, ActionKind.B, ActionKind.I)]
    assert len(compute) == count
    for word in compute:
        stage = int(word[: len(word) - len(word.lstrip("0123456789"))])
        rest = word.lstrip("0123456789")
        before = f"{stage - 1}{rest}" if rest[0] == "F" else f"{stage + 1}{rest}"
        if before in ends:
            assert ends[before] <= ends[word], (before, word)
        if rest[0] != "F":
            assert ends[f"{stage}F{rest[1:]}"] <= ends[word]


def acts(env: RankEnv, case: Case) -> list[str]:
    """What this rank's second step did, seen from outside of its runtime: calls of the communicator, forwards, when
    gradients reach what a stage gave, and when they reach its weights."""
    seen: list[str] = []
    forward, send, receive = Engine._forward, Communicator.send_async, Communicator.receive_async

    def note(word: str) -> None:
        if not seen or seen[-1] != word:
            seen.append(word)

    def runs(self: Engine, stage: int, part: Any, carried: Any, sums: Tensor) -> Any:
        subject = f"{stage}.{int(part.samples[0]) // 2}"
        note(f"forward {subject}")
        out = forward(self, stage, part, carried, sums)
        out.register_hook(lambda _: note(f"backward {subject}"))
        return out

    def sends(self: Communicator, tensor: Tensor, to: int, about: str = "") -> Any:
        if self.axis == "pipeline" and "header" not in about and "TIED" not in about:
            note(f"send {list(tensor.shape)} to {to}")
            seen.append("")  # the next may look alike
        return send(self, tensor, to, about)

    def receives(self: Communicator, into: Tensor, source: int, about: str = "") -> Any:
        if self.axis == "pipeline" and "header" not in about and "TIED" not in about:
            note(f"receive {list(into.shape)} from {source}")
            seen.append("")
        return receive(self, into, source, about)

    with pytest.MonkeyPatch.context() as patch, env.launch(case.full_config) as context:
        patch.setattr(Engine, "_forward", runs)
        patch.setattr(Communicator, "send_async", sends)
        patch.setattr(Communicator, "receive_async", receives)
        engine = start(case, context)
        homes = engine._stages.homes
        for name, parameter in engine._parts.parameters.items():
            if len(homes[name]) == 1:
                word = f"weights {homes[name][0]}"
                parameter.register_hook(lambda grad, word=word: None if grad is None else note(word))
        engine.train_step(case.batch(0))
        seen.clear()
        engine.train_step(case.batch(0))
    return [word for word in seen if word]


def predicted_acts(plan: Plan, costs: StageCosts, coord: int, tokens: int) -> list[str]:
    placement, out = plan.placement(), list[str]()
    for action in add_messages(plan, costs)[coord]:
        assert action.stage is not None
        subject, behind = (
            f"{action.stage}.{action.micro_batch}",
            action.kind in (ActionKind.SEND_F, ActionKind.RECV_B),
        )
        form = [2, tokens, SIZES["width"]]
        if action.kind is ActionKind.F:
            out.append(f"forward {subject}")
        if action.kind in (ActionKind.B, ActionKind.I):
            out.append(f"backward {subject}")
        if (
            action.kind in (ActionKind.B, ActionKind.W) and out[-1] != f"weights {action.stage}"
        ):  # two W in turn look like one
            out.append(f"weights {action.stage}")
        if action.kind in MESSAGES:
            peer = placement[action.stage + (1 if behind else -1)]
            words = ("send", "to") if action.kind in SENDS else ("receive", "from")
            out.append(f"{words[0]} {form} {words[1]} {peer}")
    return out


@pytest.mark.parametrize("name", [*RUNS, "zb-h1, tensor 2"])
def test_the_order_of_a_run_seen_from_outside_is_that_of_its_plan(name: str) -> None:
    """Messages, forwards and backwards; and weights get their gradients in W, none of them in I."""
    case = run_case(RUNS[name]) if name in RUNS else run_case(
        dict(RUNS["zb-h1"], size=2), tensor=2, sequence_parallel=False
    )  # fmt: skip
    plan, costs = plan_of(case)
    for rank, seen in enumerate(run_world(acts, case.world_size, case)):
        assert seen == predicted_acts(plan, costs, rank // case.tensor, case.tokens), rank


def test_the_same_run_twice_gives_the_same_bits() -> None:
    case = replace(PAIR, dropout=0.2, world_size=4, config=CLIPPED)
    first, second = (run_world(steps_of, 4, case) for _ in range(2))
    for a, b in zip(first[0], second[0], strict=True):
        assert all(torch.equal(a[n], b[n]) for n in a)


def steps_of(env: RankEnv, case: Case) -> list[dict[str, Tensor]]:
    return [dict(step.parameters) for step in parallel_steps(env, case)[0]]


# ---- sharded state ----

ADAMW = dict(type="adamw", lr=1e-2, weight_decay=0.1)
IN_ORDER = Case(
    dropout=0.1, ragged=True, layers=2, tokens=6, steps=2, global_batch=7, vocabulary=200, chunk_bytes=4 * 1500,
    config=dict(precision="fp32", optimizer=ADAMW, clip_grad_norm=0.05, gradient_accumulation=3),
)  # fmt: skip


def in_rank_order(case: Case, stage: int, **changes: Any) -> Case:
    config = case.config | dict(zero=dict(stage=stage, sum_order="ordered"))
    if changes.get("pipeline"):
        config |= dict(gradient_accumulation=1)
    return replace(case, world_size=4 if changes.get("pipeline") else 2, config=config, **changes)


def test_sums_in_rank_order_have_the_bits_of_accumulation_without_a_pipeline() -> None:
    alone = run_world(bits, 2, in_rank_order(IN_ORDER, 0, tied=False))
    for stage, schedule in ((0, "1f1b"), (2, "gpipe")):
        pipeline = dict(size=2, schedule=schedule, micro_batches=3)
        piped = run_world(bits, 4, in_rank_order(IN_ORDER, stage, tied=False, pipeline=pipeline))
        assert_same_bits([piped[0], piped[3]], alone)


def test_sums_in_rank_order_have_the_same_bits_at_every_stage_of_sharding() -> None:
    pipeline = dict(size=2, schedule="zb-v", micro_batches=3)
    case = replace(IN_ORDER, layers=4, pipeline=pipeline)
    plain = run_world(bits, 4, in_rank_order(case, 0, pipeline=pipeline, chunk_bytes=None))
    assert_same_bits(run_world(bits, 4, in_rank_order(case, 2, pipeline=pipeline)), plain)


def state_of(env: RankEnv, case: Case) -> tuple[set[Any], dict[str, tuple[int, int]], list[int]]:
    """Of a second step its bytes over data ranks, then memory by kind, as it is and as foreseen, and sizes of
    parameters."""
    with env.launch(case.full_config) as context:
        engine = start(case, context)
        for number in range(2):
            inputs, labels = (t[context.local_batch(case.global_batch)] for t in case.batch(number))
            engine.train_step((inputs, labels))
        rows = {(r.operation, r.calls, r.payload_bytes) for r in engine.ledger.rows() if r.axis == "data"}
        memory = {row.kind: (row.peak_bytes, row.forecast_bytes) for row in engine.memory_report()}
        return rows, memory, [p.numel() for p in engine.model.parameters()]


@pytest.mark.parametrize(
    ("reduce", "backend"), [("step", "gloo"), ("micro_batch", "gloo"), ("micro_batch", "auto")]
)
def test_bytes_and_memory_of_sharded_gradients_are_the_formula(reduce: str, backend: str) -> None:
    """(k r + w) P of the stage's own chunk, k = 1 by step; gradients whole, or P / 2 and a slot that fills; where ranks
    share no memory, room for what the others send."""
    k, two_sizes_bytes = 3 if reduce == "micro_batch" else 1, 2 * 8
    case = replace(
        PAIR, world_size=4, tied=False, pipeline=dict(size=2, micro_batches=3), global_batch=6,
        config=dict(zero=dict(stage=2, reduce=reduce), precision="bf16", optimizer=ADAMW, backend=backend),
    )  # fmt: skip
    for rank, (rows, memory, sizes) in enumerate(run_world(state_of, 4, case)):
        numel = chunk_numel(sizes, 2)
        assert rows == {("reduce_scatter", k, 4 * k * numel), ("all_gather", 2, 2 * numel + two_sizes_bytes)}
        expected = {
            "weights": 2 * numel,
            "masters": 4 * numel // 2,
            "gradients": 4 * numel // (2 if k > 1 else 1),
            "optimizer": 8 * numel // 2,
            "staging": 4 * ((numel // 2 if backend == "gloo" else 0) + (numel if k > 1 else 0)),
            # the last stage of 1f1b has one posted ahead beside the one in use
            "messages": (1 if rank < 2 else 2) * 2 * 6 * SIZES["width"],
        }
        assert memory == {kind: (held, held) for kind, held in expected.items()}


# ---- messages and checkpoints where activations are cut ----


@pytest.mark.parametrize("cut", ["2d", "ring"])
def test_bytes_of_messages_are_those_of_the_local_pieces(cut: str) -> None:
    """B T D / 4 on a grid of 2 x 2, B T D / 2 on a sequence of two ranks: forward, and as much back."""
    case = replace(cut_case(dict(PLAIN, cut=cut)), tied=False)
    parts = 4 if cut == "2d" else 2
    numel = case.global_batch * case.tokens * SIZES["width"] // parts
    for rows in run_world(ledger, case.world_size, case):
        assert [row for row in rows if row[1] == "pipeline"] == [("send", "pipeline", 3, 8 * numel)]


PLAIN = dict(schedule="1f1b", zero="0", data=1, recompute="none", dropout=0.0, tied=False, family="gpt2")
KEEPS = dict(precision="bf16", optimizer=ADAMW, zero=dict(stage=2, reduce_every="micro_batch"))
WHERE = {
    "2d": replace(cut_case(dict(PLAIN, cut="2d", tied=True)), config=KEEPS),
    "ring": replace(cut_case(dict(PLAIN, cut="ring", tied=True, schedule="zb-h1")), config=KEEPS, global_batch=6),
    "one": Case(world_size=1, tokens=8, layers=2, ragged=True, config=dict(precision="bf16", optimizer=ADAMW)),
}  # fmt: skip


@pytest.mark.parametrize(("here", "there"), [("2d", "ring"), ("ring", "one"), ("one", "2d")])
def test_a_checkpoint_of_cut_stages_is_the_same_elsewhere(here: str, there: str, tmp_path: Path) -> None:
    saved = run_world(saves, WHERE[here].world_size, WHERE[here], str(tmp_path))[0]
    for loaded in run_world(loads, WHERE[there].world_size, WHERE[there], str(tmp_path)):
        assert_same_state(loaded, saved)


# ---- the plan of a run that is not here ----


def traffic_of(env: RankEnv, case: Case) -> tuple[list[tuple[str, str, int, int]], dict[str, int]]:
    """What this rank's second step moves, and the state that it holds."""
    with env.launch(case.full_config) as context:
        engine = start(case, context)
        for number in range(2):
            inputs, labels = (t[context.local_batch(case.global_batch)] for t in case.batch(number))
            engine.train_step((inputs, labels))
        rows = [(r.operation, r.axis, r.calls, r.payload_bytes) for r in engine.ledger.rows()]
        return rows, {row.kind: row.now_bytes for row in engine.memory_report()}


PLANNED = {
    "zb-v, tied, dropout": replace(
        PAIR, layers=4, dropout=0.1, pipeline=dict(size=2, schedule="zb-v", micro_batches=4), global_batch=9
    ),
    "1f1b, data 2, ZeRO 1, accumulation": replace(
        PAIR, world_size=4, layers=3, global_batch=9, pipeline=dict(size=2, micro_batches=2),
        config=dict(zero=dict(stage=1), gradient_accumulation=2, optimizer=dict(type="adamw", lr=1e-3)),
    ),
    "zb-v, tied, data 2, ZeRO 2 by micro-batch": replace(
        PAIR, world_size=4, layers=4, global_batch=9, pipeline=dict(size=2, schedule="zb-v", micro_batches=3),
        config=dict(zero=dict(stage=2, reduce_every="micro_batch"), precision="bf16"), chunk_bytes=4096,
    ),
    "1f1b, tensor 2, sums in rank order, accumulation": replace(
        PAIR, world_size=4, tensor=2, pipeline=dict(size=2, micro_batches=2), global_batch=6,
        config=dict(zero=dict(stage=1, sum_order="ordered"), gradient_accumulation=2),
    ),
    "2d, zb-h1, ZeRO 2 by micro-batch": replace(
        PAIR, world_size=8, tensor=4, mode="2d", global_batch=6, dropout=0.1,
        pipeline=dict(size=2, schedule="zb-h1", micro_batches=3),
        config=dict(zero=dict(stage=2, reduce_every="micro_batch")), chunk_bytes=4096,
    ),
    "ring, zb-h1, uneven, recomputed": replace(
        PAIR, world_size=4, sequence=2, tokens=8, global_batch=7, family="llama", tied=False,
        pipeline=dict(size=2, schedule="zb-h1", micro_batches=3), config=dict(activation_checkpoint="full"),
    ),
    "ulysses, data 2, interleaved": replace(
        PAIR, world_size=8, layers=4, sequence=2, sequence_mode="ulysses", tokens=8, global_batch=8,
        pipeline=dict(size=2, schedule="interleaved", micro_batches=2), config=dict(zero=dict(stage=1)),
    ),
    "auto in a loop": replace(PAIR, layers=4, vocabulary=64, tied=False, pipeline=AUTO, global_batch=8),
    "interleaved, tensor 2, recomputed": replace(
        PAIR, world_size=4, layers=4, tensor=2, family="llama", tied=False, global_batch=4,
        pipeline=dict(size=2, schedule="interleaved", micro_batches=4), config=dict(activation_checkpoint="full"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", PLANNED)
def test_bytes_of_a_run_and_its_state_are_those_of_its_plan(name: str) -> None:
    case = PLANNED[name]
    model = case.model()
    assert isinstance(model, GPT)
    for rank, (rows, state) in enumerate(run_world(traffic_of, case.world_size, case)):
        with patch.object(build, "CHUNK_BYTES", case.chunk_bytes or build.CHUNK_BYTES):
            plan = planner.plan(
                case.full_config, model.config, batch=case.global_batch, sequence=case.tokens,
                world_size=case.world_size, rank=rank, one_host=True,
            )  # fmt: skip
        assert [(r.operation, r.axis, r.calls, r.payload_bytes) for r in plan.traffic] == rows
        assert {kind: plan.bytes_of(kind) for kind in state} == state
        assert plan.bytes_of("activations") > 0 and "bubble" in plan.schedule


# ---- partition by the clock ----

SLOW_S = 0.1


def lopsided() -> nn.Module:
    """The first block costs what no formula knows."""
    model = GPT(GPTConfig(**SIZES | dict(layers=4)))
    for module in (model.blocks[0].attention, model.blocks[0].mlp):
        module.register_forward_pre_hook(lambda *_: time.sleep(SLOW_S))
    return model


def cut_of(env: RankEnv, partition: str) -> tuple[tuple[int, int], ...]:
    case = replace(PAIR, pipeline=dict(size=2, partition=partition))
    with env.launch(case.full_config) as context:
        engine = cl.initialize(lopsided, context=context)
        assert not engine.ledger.rows()
        return engine._stages.cut.bounds


def test_a_profiled_partition_is_balanced_by_what_a_micro_batch_takes() -> None:
    by_formula = run_world(cut_of, 2, "balanced")
    assert by_formula[0] == by_formula[1] and by_formula[0][0][1] > 3, "both slow halves on the first stage"
    for bounds in run_world(cut_of, 2, "profiled"):
        assert bounds == ((0, 2), (2, 10)), "one slow half on each stage"


def test_every_gradient_is_the_serial_one_with_a_profiled_partition() -> None:
    pipeline = dict(size=2, schedule="zb-h1", micro_batches=3, partition="profiled")
    assert_parity(replace(PAIR, world_size=4, tensor=2, dropout=0.2, pipeline=pipeline, config=CLIPPED))


# ---- bad input ----


class Odd(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(SIZES["vocabulary"], SIZES["vocabulary"])

    def forward(self, ids: Tensor) -> Tensor:
        logits: Tensor = self.table(ids)
        return logits


class Routed(nn.Module):
    """A head whose output carries a loss beside the logits."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(8, SIZES["vocabulary"])

    def forward(self, x: Tensor) -> Any:
        return SimpleNamespace(logits=self.head(x), aux_loss=x.square().mean())


def routed() -> nn.Module:
    return nn.Sequential(nn.Embedding(SIZES["vocabulary"], 8), nn.Linear(8, 8), Routed())


MODELS = {"odd": Odd, "routed": routed}


def fails(env: RankEnv, case: Case, how: str) -> str:
    try:
        with env.launch(case.full_config) as context:
            model = MODELS.get(how, case.model)
            engine = cl.initialize(model, context=context, optimizer=case.own)
            inputs, labels = (t[context.local_batch(case.global_batch)] for t in case.batch(0))
            if how == "manual":
                engine(inputs)
            engine.forward_backward((inputs, labels))
    except (ValueError, ConfigError) as error:
        return str(error)
    return ""


class Coupled(torch.optim.SGD):
    """Its step is as long as all gradients together say."""

    def __init__(self, params: list[nn.Parameter]) -> None:
        super().__init__(params, lr=1e-2)

    def step(self, closure: Any = None) -> Any:
        held = [p.grad for group in self.param_groups for p in group["params"] if p.grad is not None]
        length = torch.stack([grad.square().sum() for grad in held]).sum().sqrt()
        for grad in held:
            grad /= length
        return super().step(closure)


def _reads(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=max(float(p.abs().max()) for p in params))


BAD: dict[str, tuple[Case, str, tuple[str, ...]]] = {
    "fewer layers than stages": (
        replace(PAIR, layers=1), "", ("parallel.pipeline.size = 2", "1 layers are fewer than 2 stages"),
    ),
    "fewer samples than micro-batches": (
        replace(PAIR, global_batch=2), "", ("micro_batches=3", "2 samples", "at most 2 micro-batches"),
    ),
    "counts that do not cover": (
        replace(PAIR, pipeline=dict(size=2, partition=(2, 2))), "", ("partition=(2, 2)", "6 units", "6 in all"),
    ),
    "a schedule's rule on chunks": (
        replace(PAIR, pipeline=dict(size=2, stages_per_rank=2)),
        "",
        ("pipeline.stages_per_rank = 2", "'1f1b' takes 1 on each rank"),
    ),
    "a loop of one's own": (PAIR, "manual", ("engine(x)", "train_step", "parallel.pipeline=1")),
    "an optimizer whose step couples parameters": (
        replace(PAIR, own=Coupled), "",
        ("optimizer: in its step token.weight depends on parameters that are not on pipeline stage 0", "Legal"),
    ),
    "an optimizer that reads values": (
        replace(PAIR, own=_reads), "", ("optimizer: the callable fails", "meta device", "parallel.pipeline=1"),
    ),
    "micro-batches that a grid cannot cut": (
        replace(PAIR, world_size=8, tensor=4, mode="2d", global_batch=9), "",
        ("a micro-batch of 3 samples does not divide over 2 parts", "such as 2 or 4"),
    ),
    "a loss beside the logits": (replace(PAIR, pipeline=1, world_size=1), "routed", ("Sequential carry an aux_loss",)),
    "a profile of a model without sizes": (
        replace(PAIR, pipeline=dict(size=2, partition="profiled")), "routed", ("Sequential states no sizes",),
    ),
    "a model without units": (PAIR, "odd", ("Odd does not say what its units are", "pipeline_sections()")),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_told_on_every_rank(name: str) -> None:
    case, how, words = BAD[name]
    for said in run_world(fails, case.world_size, case, how):
        assert all(word in said for word in words), said


TIMEOUT_S = 1.5


def stops_in_the_middle(env: RankEnv, guilty: int, how: str, folder: str) -> tuple[str, float]:
    """Train, with one rank that ends or stalls in its third forward of the second step; the others leave in `folder`
    what they say of it."""
    case = replace(PAIR, layers=4, world_size=4, pipeline=dict(size=4, micro_batches=4), global_batch=4)
    config = dict(case.full_config) | dict(timeout_s=TIMEOUT_S)
    original, begun = Engine._forward, time.monotonic()

    def forward(self: Engine, stage: int, part: Any, carried: Any, sums: Tensor) -> Any:
        if env.rank == guilty and self.steps == 1 and int(part.samples[0]) == 2:
            if how == "dies":  # when it has been heard once: the steps before take less than a beat
                end = time.monotonic() + TIMEOUT_S / 2
                while not self.context.store.check([f"beat/{guilty}"]) and time.monotonic() < end:
                    time.sleep(0.02)
                os.kill(os.getpid(), signal.SIGKILL)
            end = time.monotonic() + 20
            while not env.store.check(["told 0", "told 2"]) and time.monotonic() < end:
                time.sleep(0.05)
            raise InterruptedError("stalled for long enough")
        return original(self, stage, part, carried, sums)

    with pytest.MonkeyPatch.context() as patch, env.launch(config) as context:
        patch.setattr(Engine, "_forward", forward)
        engine = start(case, context)
        try:
            for number in range(2):
                begun = time.monotonic()
                engine.train_step(case.batch(number))
        except CommError as error:
            taken_s = time.monotonic() - begun
            Path(folder, str(env.rank)).write_text(str(error))
            env.store.set(f"told {env.rank}", "")
            # Whoever leaves first is who the others hear of: both neighbours are to say what they saw.
            while not env.store.check(["told 0", "told 2"]) and time.monotonic() < begun + 20:
                time.sleep(0.05)
            return str(error), taken_s
        except InterruptedError:
            pass
    return "", 0.0


def test_a_rank_that_stalls_is_named_with_stage_micro_batch_and_action(tmp_path: Path) -> None:
    ended = run_world(stops_in_the_middle, 4, 1, "stalls", str(tmp_path))
    assert all(taken_s < TIMEOUT_S + 6 for _, taken_s in ended)
    for rank, waited in ((0, "0RECV_B0, stage 0, micro-batch 0"), (2, "2RECV_F2, stage 2, micro-batch 2")):
        said = ended[rank][0]
        assert f"{waited}, from rank 1" in said and "waiting for ranks 1;" in said, said
        assert "rank 1 is in phase 'forward of 1F2, stage 1, micro-batch 2' of step 1" in said, said


def test_a_rank_that_dies_is_named_with_stage_micro_batch_and_action(tmp_path: Path) -> None:
    with pytest.raises(WorldError) as caught:
        run_world(stops_in_the_middle, 4, 1, "dies", str(tmp_path), grace_s=20)
    assert caught.value.ranks("died") == [1]
    said = (tmp_path / "2").read_text()
    assert "2RECV_F2, stage 2, micro-batch 2, from rank 1" in said and "waiting for ranks 1;" in said, said
    assert "rank 1 does not answer: it has died or is stopped" in said, said


RESUMED = replace(
    PAIR, layers=4, dropout=0.2, pipeline=dict(size=2, schedule="zb-v", micro_batches=3), config=CLIPPED
)


def trains_until(env: RankEnv, folder: str, dies: bool) -> list[float]:
    """Losses of the steps up to the third, from the newest checkpoint on; one is saved after each. Rank 1 may die in
    the middle of the second."""
    original = Engine._forward

    def forward(self: Engine, stage: int, part: Any, carried: Any, sums: Tensor) -> Any:
        if dies and env.rank == 1 and self.steps == 1 and stage == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        return original(self, stage, part, carried, sums)

    losses = []
    with pytest.MonkeyPatch.context() as patch, env.launch(RESUMED.full_config) as context:
        patch.setattr(Engine, "_forward", forward)
        engine = start(RESUMED, context)
        engine.resume(folder)
        for number in range(engine.steps, 3):
            losses.append(float(engine.train_step(RESUMED.batch(number)).loss))
            engine.save(folder).wait()
    return losses


def test_a_run_whose_rank_died_in_mid_step_goes_on_with_the_same_losses(tmp_path: Path) -> None:
    whole = run_world(trains_until, 2, str(tmp_path / "whole"), False)
    with pytest.raises(WorldError) as caught:
        run_world(trains_until, 2, str(tmp_path / "killed"), True)
    assert caught.value.ranks("died") == [1]
    again = run_world(trains_until, 2, str(tmp_path / "killed"), False)
    assert len(whole[0]) == 3 and again == [losses[1:] for losses in whole]
