"""2D and 2.5D tensor parallelism are the serial run; bytes are the formula; what does not divide is refused."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

import colossal_lite as cl
from colossal_lite.layout import MeshLayout
from colossal_lite.mesh import Mesh
from colossal_lite.models import GPT, GPTConfig
from colossal_lite.parallel.parallelize import facts_of, parallelize
from colossal_lite.parallel.tensor_2d import Tensor2D, micro_batch_payload
from tests.parity import (
    SIZES,
    Case,
    assert_other_ways,
    assert_parity,
    first_weights,
    initial_values,
    ledger,
)
from tests.pool import RankEnv, WorldError, run_world

FAMILIES = [("gpt2", True), ("gpt2", False), ("llama", True), ("llama", False)]
CASE = Case(world_size=4, tensor=4, mode="2d")
DEEP = Case(world_size=8, tensor=8, mode="2.5d", depth=2, global_batch=8)


@pytest.mark.parametrize(("family", "tied"), FAMILIES)
def test_every_gradient_is_the_serial_one_in_2d(family: str, tied: bool) -> None:
    assert_parity(CASE, family=family, tied=tied)


@pytest.mark.parametrize(("family", "tied"), [("gpt2", True), ("llama", False)])
def test_every_gradient_is_the_serial_one_in_2_5d(family: str, tied: bool) -> None:
    assert_parity(DEEP, family=family, tied=tied, config=dict(clip_grad_norm=0.05), ragged=True)


COMBINATIONS = {
    "everything": replace(
        CASE,
        dropout=0.2,
        ragged=True,
        global_batch=8,
        config=dict(clip_grad_norm=0.05, gradient_accumulation=2),
    ),
    "data 2": replace(CASE, world_size=8, global_batch=4, ragged=True, config=dict(clip_grad_norm=0.05)),
    "frozen, AdamW": replace(
        CASE,
        frozen=("blocks.0.mlp.up.weight", "blocks.1.norm1.bias", "position.weight"),
        config=dict(optimizer=dict(type="adamw", lr=1e-2, weight_decay=0.1)),
    ),
    "depth, dropout": replace(DEEP, dropout=0.2, steps=2),
    "data 2, ZeRO-1": replace(
        CASE, world_size=8, global_batch=4, ragged=True, config=dict(clip_grad_norm=0.05, zero=dict(stage=1))
    ),
    "depth, ZeRO-2": replace(DEEP, config=dict(clip_grad_norm=0.05, zero=dict(stage=2))),
    "hf-gpt2": replace(CASE, family="hf-gpt2", build="module", dropout=0.1),
    "hf-llama": replace(CASE, family="hf-llama", build="module", tied=False),
}


@pytest.mark.parametrize("name", COMBINATIONS)
def test_every_gradient_is_the_serial_one_with(name: str) -> None:
    assert_parity(COMBINATIONS[name])


def test_initial_bits_are_those_of_the_seed() -> None:
    case = replace(CASE, family="llama", steps=1, config=dict(optimizer=dict(type="sgd", lr=0.0)))
    values = initial_values(case)
    for rank in run_world(first_weights, 4, case):
        assert all(torch.equal(rank[name], value) for name, value in values.items())


# ---- bytes ----


def formula(
    model: nn.Module, mesh: Mesh, *, batch: int, sequence: int, itemsize: int
) -> set[tuple[str, str, int, int]]:
    facts, config = facts_of(model), model.config
    assert facts is not None and isinstance(config, GPTConfig)
    rows = micro_batch_payload(
        facts,
        Tensor2D.on(mesh, config.vocabulary),
        batch=batch,
        sequence=sequence,
        itemsize=itemsize,
        bias=config.bias,
        gated=config.activation == "swiglu",
        centred=config.norm == "layer",
    )
    return {(r.operation, r.axis, r.calls, r.payload_bytes) for r in rows}


@pytest.mark.parametrize("case", [CASE, DEEP], ids=["2d", "2.5d"])
@pytest.mark.parametrize(("family", "tied"), [("gpt2", True), ("llama", False)])
def test_bytes_of_a_step_are_the_formula(case: Case, family: str, tied: bool) -> None:
    case = replace(case, family=family, tied=tied, steps=1)
    layout = MeshLayout.build(tensor=case.tensor, tensor_mode=case.mode, tensor_depth=case.depth)
    for rank, rows in enumerate(run_world(ledger, case.world_size, case)):
        expected = formula(
            case.model(),
            Mesh.recording(layout, rank),
            batch=case.global_batch,
            sequence=SIZES["sequence"],
            itemsize=8,
        )
        in_layers = {
            row for row in rows if row[1] in ("tensor.row", "tensor.column") and row[0] != "all_reduce"
        }
        assert in_layers == {row for row in expected if row[0] != "all_reduce"}
        (own,) = (row for row in expected if row[:2] == ("all_reduce", "tensor.column"))
        assert own in rows
        # beside the layers: one sum of each gradient chunk over the axes that cut the batch, and the agreement
        others = {row[1] for row in set(rows) - in_layers - {own}}
        assert (
            others <= {"world", "tensor.row", "tensor.depth", "tensor.depth*tensor.row"} and "world" in others
        )


@pytest.mark.parametrize(
    ("size", "mode", "depth", "kv_heads"), [(64, "2d", 1, 4), (64, "2.5d", 4, 4), (9, "2d", 1, 3)]
)
@pytest.mark.parametrize("tied", [True, False])
def test_a_world_that_is_not_here_moves_what_the_formula_says(
    size: int, mode: str, depth: int, kv_heads: int, tied: bool
) -> None:
    config = GPTConfig(
        vocabulary=1000, layers=3, heads=24, width=144, sequence=24, kv_heads=kv_heads, tied=tied
    )
    layout = MeshLayout.build(tensor=size, tensor_mode=mode, tensor_depth=depth)
    mesh = Mesh.recording(layout, rank=size - 1)
    with torch.device("meta"):
        model = GPT(config)
    expected = formula(model, mesh, batch=96, sequence=24, itemsize=4)
    result = parallelize(model, mesh)
    edge = result.strategy.row.size  # type: ignore[attr-defined]
    inputs = torch.zeros(96 // edge // depth, 24, dtype=torch.int64, device="meta")
    total, _ = result.strategy.cross_entropy(result.ops, model(inputs), inputs)
    total.backward()
    assert {(r.operation, r.axis, r.calls, r.payload_bytes) for r in mesh.ledger.rows()} == expected


# ---- other ways to use it ----


@pytest.mark.parametrize("case", [CASE, DEEP], ids=["2d", "2.5d"])
def test_a_criterion_an_evaluation_and_an_own_loop_give_the_serial_numbers(case: Case) -> None:
    assert_other_ways(case)


# ---- bad input ----


def refused(env: RankEnv, what: str) -> None:
    sizes = dict(SIZES)
    if what == "heads":
        sizes |= dict(heads=3, width=12)
    if what == "width":
        sizes |= dict(heads=2, width=6, ffn=9)
    case = CASE
    with env.launch(case.full_config) as context:
        engine = cl.initialize(GPT(GPTConfig(**sizes)), context=context)
        if what == "batch":
            inputs, labels = case.batch(0)
            engine.train_step((inputs[:3], labels[:3]))


REFUSALS = {
    "heads": "3 heads do not divide into 2 parts",
    "width": "ffn 9 does not divide into 2 parts",
    "batch": "a micro-batch of 3 samples does not divide over 2 parts.*multiple of 2",
}


@pytest.mark.parametrize("what", REFUSALS)
def test_what_cannot_be_cut_is_refused_in_words_on_every_rank(what: str) -> None:
    with pytest.raises(WorldError, match=REFUSALS[what]) as error:
        run_world(refused, 4, what)
    assert error.value.ranks("raised") == [0, 1, 2, 3]
