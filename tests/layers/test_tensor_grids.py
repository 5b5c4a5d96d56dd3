"""2D, 2.5D and 3D tensor parallelism are the serial run; bytes are the formula; what does not divide is refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import colossal_lite as cl
from colossal_lite.config.parallel_schema import TensorConfig
from colossal_lite.data.batch import Batch
from colossal_lite.distributed.mesh import Mesh
from colossal_lite.layers import tensor_2d, tensor_3d
from colossal_lite.layers.grid_layers import GridNorm
from colossal_lite.layers.tensor_2d import Tensor2D
from colossal_lite.layers.tensor_3d import Tensor3D
from colossal_lite.layers.tensor_modes import LayerSizes
from colossal_lite.models import GPT, GPTConfig
from colossal_lite.parallel.parallelize import facts_of, parallelize
from colossal_lite.planner.planner import plan
from colossal_lite.sharding.mesh_layout import MeshLayout
from tests.shared.covering import Choice, covering_array, name_of
from tests.shared.parity import (
    SIZES,
    Case,
    assert_documents,
    assert_no_further,
    assert_other_ways,
    assert_parity,
    first_weights,
    initial_values,
    ledger,
)
from tests.shared.pool import RankEnv, WorldError, run_world

FAMILIES = [("gpt2", True), ("gpt2", False), ("llama", True), ("llama", False)]
CASE = Case(world_size=4, tensor=4, mode="2d")
DEEP = Case(world_size=8, tensor=8, mode="2.5d", depth=2, global_batch=8, steps=2)
CUBE = Case(world_size=8, tensor=8, mode="3d", global_batch=8, steps=2)
NINE = dict(heads=3, kv_heads=3, width=12, ffn=24)  # sizes that three parts divide
GRIDS = pytest.mark.parametrize("case", [CASE, DEEP, CUBE], ids=["2d", "2.5d", "3d"])
CLIPPED = dict(clip_grad_norm=0.05)


@pytest.mark.parametrize(("family", "tied"), FAMILIES)
def test_every_gradient_is_the_serial_one_in_2d(family: str, tied: bool) -> None:
    assert_parity(CASE, family=family, tied=tied)


@pytest.mark.parametrize(("family", "tied"), [("gpt2", True), ("llama", False)])
@pytest.mark.parametrize("case", [DEEP, CUBE], ids=["2.5d", "3d"])
def test_every_gradient_is_the_serial_one_on_eight_ranks(case: Case, family: str, tied: bool) -> None:
    assert_parity(case, family=family, tied=tied, config=CLIPPED, ragged=True)


COMBINATIONS = {
    "frozen, AdamW": replace(
        CASE,
        frozen=("blocks.0.mlp.up.weight", "blocks.1.norm1.bias", "position.weight"),
        config=dict(optimizer=dict(type="adamw", lr=1e-2, weight_decay=0.1)),
    ),
    "2d, q=3": replace(CASE, world_size=9, tensor=9, dropout=0.1, sizes=NINE, steps=1),
    "2d, q=3, one key head": replace(
        CASE, family="llama", world_size=9, tensor=9, tied=False, sizes=NINE | dict(kv_heads=1), steps=1
    ),
    "3d, one key head, untied, recomputed": replace(
        CUBE,
        family="llama",
        sizes=dict(kv_heads=1, bias=True),
        tied=False,
        steps=1,
        config=dict(activation_checkpoint="full", optimizer=dict(type="adamw", lr=1e-2)),
    ),
    "hf-gpt2": replace(CASE, family="hf-gpt2", build="module", dropout=0.1),
    "hf-llama": replace(CASE, family="hf-llama", build="module", tied=False),
    "3d, hf-gpt2": replace(CUBE, family="hf-gpt2", build="module", dropout=0.1, steps=1),
    "3d, hf-llama": replace(CUBE, family="hf-llama", build="module", tied=False, steps=1),
    "3d x ring": replace(
        CUBE, world_size=16, sequence=2, tokens=8, layers=1, dropout=0.1, ragged=True, steps=1, config=CLIPPED
    ),
}


@pytest.mark.parametrize("name", COMBINATIONS)
def test_every_gradient_is_the_serial_one_with(name: str) -> None:
    assert_parity(COMBINATIONS[name])


MODES: dict[str, dict[str, Any]] = {
    "2d": dict(tensor=4, mode="2d"),
    "2.5d": dict(tensor=8, mode="2.5d", depth=2),
    "2.5d, q=1": dict(tensor=2, mode="2.5d", depth=2),
    "3d": dict(tensor=8, mode="3d"),
}
BESIDE: dict[str, dict[str, Any]] = {
    "nothing": {},
    "ring": dict(sequence=2),
    "zb-h1": dict(pipeline=dict(size=2, schedule="zb-h1", micro_batches=2)),
}


def together(row: Choice) -> Case:
    config = CLIPPED | dict(
        gradient_accumulation=row["parts"],
        zero=dict(stage=row["zero"]),
        activation_checkpoint=row["recompute"],
    )
    case = Case(
        family=row["family"], tied=row["tied"], dropout=row["dropout"], layers=2, tokens=8, ragged=True, steps=1,
        global_batch=16, config=config,
    )  # fmt: skip
    case = replace(case, **MODES[row["grid"]], **BESIDE[row["beside"]])
    stages = 2 if "pipeline" in BESIDE[row["beside"]] else 1
    return replace(case, world_size=case.tensor * case.sequence * stages * row["data"])


TOGETHER = covering_array(
    dict(
        grid=tuple(MODES),
        beside=tuple(BESIDE),
        data=(1, 2),
        parts=(1, 2),
        zero=(0, 2),
        recompute=("none", "full"),
        dropout=(0.0, 0.2),
        family=("gpt2", "llama"),
        tied=(True, False),
    ),
    lambda row: together(row).world_size <= 8,
)


@pytest.mark.parametrize("row", TOGETHER, ids=name_of)
def test_every_gradient_is_the_serial_one_together_with(row: Choice) -> None:
    assert_parity(together(row))


@GRIDS
def test_16_bits_are_no_further_from_the_truth_than_a_plain_run(case: Case) -> None:
    assert_no_further(case, config=dict(precision="bf16"), steps=2)


LARGE = {
    "data 2 x 3d": replace(CUBE, world_size=16, dropout=0.1, ragged=True, config=CLIPPED),
    "data 2 x 3d, ZeRO-2": replace(CUBE, world_size=16, config=CLIPPED | dict(zero=dict(stage=2))),
    "data 2 x 2.5d": replace(DEEP, world_size=16, dropout=0.1, ragged=True, config=CLIPPED),
    "ulysses x 3d": replace(
        CUBE, world_size=16, sequence=2, sequence_mode="ulysses", dropout=0.1, ragged=True
    ),
    "sequence 2 x 2.5d": replace(DEEP, world_size=16, sequence=2, dropout=0.1, ragged=True),
}


@pytest.mark.campaign  # 16 ranks
@pytest.mark.parametrize("name", LARGE)
def test_every_gradient_is_the_serial_one_in_a_large_world(name: str) -> None:
    assert_parity(LARGE[name])


@pytest.mark.parametrize("case", [CASE, CUBE], ids=["2d", "3d"])
def test_initial_bits_are_those_of_the_seed(case: Case) -> None:
    case = replace(case, family="llama", steps=1, config=dict(optimizer=dict(type="sgd", lr=0.0)))
    values = initial_values(case)
    for rank in run_world(first_weights, case.world_size, case):
        assert all(torch.equal(rank[name], value) for name, value in values.items())


@pytest.mark.parametrize("case", [CASE, CUBE], ids=["2d", "3d"])
def test_documents_and_positions_of_each_sample_meet_their_tokens(case: Case) -> None:
    assert_documents(case, positions=True)


# ---- bytes ----

Rows = set[tuple[str, str, int, int]]


def formula(model: nn.Module, mesh: Mesh, *, batch: int, sequence: int, itemsize: int) -> Rows:
    facts, config = facts_of(model), model.config
    assert facts is not None and isinstance(config, GPTConfig)
    gated, centred = config.activation == "swiglu", config.norm == "layer"
    sizes = LayerSizes(facts, batch, sequence, itemsize, config.bias, gated, centred)
    if any(leaf.name == tensor_3d.I for leaf in mesh.layout.leaves):
        rows = tensor_3d.micro_batch_payload(Tensor3D.on(mesh, 0), sizes)
    else:
        rows = tensor_2d.micro_batch_payload(Tensor2D.on(mesh, 0), sizes)
    return {(r.operation, r.axis, r.calls, r.payload_bytes) for r in rows}


# One sum of each gradient chunk over the axes that cut the batch.
SUMMED_OVER = {
    "2d": {"tensor.row"},
    "2.5d": {"tensor.depth", "tensor.depth*tensor.row"},
    "3d": {"tensor.i*tensor.j", "tensor.i*tensor.k"},
}


@GRIDS
@pytest.mark.parametrize(("family", "tied"), [("gpt2", True), ("llama", False)])
def test_bytes_of_a_step_are_the_formula(case: Case, family: str, tied: bool) -> None:
    case = replace(case, family=family, tied=tied, steps=1)
    layout = MeshLayout.build(tensor=TensorConfig(size=case.tensor, mode=case.mode, depth=case.depth).axis())
    sizes = dict(batch=case.global_batch, sequence=SIZES["sequence"], itemsize=8)
    for rank, rows in enumerate(run_world(ledger, case.world_size, case)):
        expected = formula(case.model(), Mesh.recording(layout, rank), **sizes)
        assert expected <= set(rows)
        others = {row[:2] for row in set(rows) - expected}
        assert others <= {("all_reduce", axis) for axis in (*SUMMED_OVER[case.mode], "world")}
        assert ("all_reduce", "world") in others


@pytest.mark.parametrize(
    ("size", "mode", "depth", "kv_heads"),
    [
        (64, "2d", 1, 4),
        (64, "2.5d", 4, 4),
        (9, "2d", 1, 3),
        (8, "3d", 1, 1),
        (27, "3d", 1, 1),
        (64, "3d", 1, 2),
    ],
)
@pytest.mark.parametrize("tied", [True, False])
def test_a_world_that_is_not_here_moves_what_the_formula_says(
    size: int, mode: str, depth: int, kv_heads: int, tied: bool
) -> None:
    config = GPTConfig(
        vocabulary=1000, layers=3, heads=24, width=144, sequence=24, kv_heads=kv_heads, tied=tied
    )
    layout = MeshLayout.build(tensor=TensorConfig(size=size, mode=mode, depth=depth).axis())
    mesh = Mesh.recording(layout, rank=size - 1)
    with torch.device("meta"):
        model = GPT(config)
    expected = formula(model, mesh, batch=144, sequence=24, itemsize=4)
    result = parallelize(model, mesh)
    ids = torch.zeros(144, 24, dtype=torch.int64, device="meta")
    part = result.strategy.local_part(Batch((ids,), {}, ids, ids[:, 0]))
    total, _ = result.strategy.cross_entropy(result.ops, model(*part.args), part.labels)
    total.backward()
    assert {(r.operation, r.axis, r.calls, r.payload_bytes) for r in mesh.ledger.rows()} == expected


@pytest.mark.parametrize("edge", [2, 3, 4])
def test_a_block_moves_39_th_and_36_hh_in_3d(edge: int) -> None:
    """DESIGN 10: what a block of 12 h^2 weights moves, whatever its heads; the norms' statistics come on top."""
    width, tokens = 144, 144 * 24
    config = GPTConfig(vocabulary=1000, layers=3, heads=12, width=width, sequence=24, bias=False)
    mesh = Mesh.recording(MeshLayout.build(tensor=TensorConfig(size=edge**3, mode="3d").axis()))
    moved = []
    for layers in (2, 3):
        with torch.device("meta"):
            model = GPT(replace(config, layers=layers))
        rows = formula(model, mesh, batch=144, sequence=24, itemsize=4)
        moved.append(sum(row[3] for row in rows if row[0] != "all_reduce"))
    assert moved[1] - moved[0] == (39 * tokens * width + 36 * width**2) * 4 // edge**2


@pytest.mark.parametrize(("mode", "size", "parts"), [("2d", 16, 4), ("3d", 64, 16)])
def test_data_ranks_move_the_formula_of_their_part_of_the_batch(mode: str, size: int, parts: int) -> None:
    """Two data ranks of a world that is not here: the layers move those of half the batch, gradients over both."""
    config = GPTConfig(vocabulary=1000, layers=2, heads=8, width=64, sequence=24)
    parallel = dict(data=2, tensor=dict(size=size, mode=mode))
    found = plan(
        dict(precision="fp32", parallel=parallel), config, batch=4 * parts, sequence=24, world_size=2 * size
    )
    with torch.device("meta"):
        model = GPT(config)
    mesh = Mesh.recording(MeshLayout.build(data=2, tensor=TensorConfig(size=size, mode=mode).axis()))
    expected = formula(model, mesh, batch=2 * parts, sequence=24, itemsize=4)
    rows = {(r.operation, r.axis, r.calls, r.payload_bytes) for r in found.traffic}
    assert expected <= rows
    gradients = {axis: size for op, axis, _, size in rows - expected if axis != "world"}
    assert all(axis.startswith("data") for axis in gradients), gradients
    assert sum(gradients.values()) > 4 * found.local_parameters


# ---- other ways to use it ----


@GRIDS
def test_a_criterion_an_evaluation_and_an_own_loop_give_the_serial_numbers(case: Case) -> None:
    assert_other_ways(case)


# ---- bad input ----

BAD_SIZES: dict[str, dict[str, int]] = {
    "heads": dict(heads=3, width=12),
    "ffn": dict(heads=2, width=6, ffn=9),
    "width of a cube": dict(heads=2, width=6, ffn=8),
    "vocabulary": dict(vocabulary=1),
}
REFUSALS = {
    "heads": "3 heads do not divide into 2 parts",
    "ffn": "ffn 9 does not divide into 2 parts",
    "batch": "a micro-batch of 3 samples does not divide over 2 parts.*multiple of 2, such as 2 or 4",
    "batch of a cube": "a micro-batch of 3 samples does not divide over 4 parts.*multiple of 4, such as 4",
    "width of a cube": "width 6 does not divide into 4 parts.*legal: 1",
    "vocabulary": "a vocabulary of 1 leaves some of 2 parts empty",
}


def refused(env: RankEnv, what: str, case: Case) -> None:
    with env.launch(case.full_config) as context:
        engine = cl.initialize(GPT(GPTConfig(**SIZES | BAD_SIZES.get(what, {}))), context=context)
        inputs, labels = case.batch(0)
        engine.train_step((inputs[:3], labels[:3]))


@pytest.mark.parametrize("what", REFUSALS)
def test_what_cannot_be_cut_is_refused_in_words_on_every_rank(what: str) -> None:
    case = CUBE if "cube" in what else CASE
    with pytest.raises(WorldError, match=REFUSALS[what]) as error:
        run_world(refused, case.world_size, what, case)
    assert error.value.ranks("raised") == list(range(case.world_size))


@pytest.mark.parametrize("mode", ["2d", "3d"])
def test_roles_and_widths_that_only_the_layers_know_are_refused_before_anything_is_changed(mode: str) -> None:
    """A model without a config states no facts: what its plan meets is said by module."""
    mesh = Mesh.recording(
        MeshLayout.build(tensor=TensorConfig(size={"2d": 4, "3d": 8}[mode], mode=mode).axis())
    )
    model = nn.Sequential(nn.Linear(6, 10), nn.Linear(10, 6), nn.LayerNorm(7), nn.Linear(7, 7))
    before = [p.shape for p in model.parameters()]
    with pytest.raises(ValueError) as told:
        parallelize(model, mesh, {"0": "colwise", "1": "rowwise", "2": "norm", "3": "lm_head"})
    text = str(told.value)
    assert "2: its weight [7] does not divide: features 7 by 2" in text
    assert ("0: its weight [10, 6] does not divide: inputs 6 by 4" in text) == (mode == "3d")
    assert [p.shape for p in model.parameters()] == before


def norm_gradients(env: RankEnv, centred: bool) -> list[Tensor]:
    """Gradients of x, weight and bias of a norm of this rank's features in float32."""
    x, weight, bias, dy = (part.chunk(2, -1)[env.rank].float() for part in norm_parts())
    with env.launch() as context:
        given = nn.Parameter(weight), nn.Parameter(bias)
        norm = GridNorm(context.mesh.world, *given, eps=1e-5, centred=centred)
        norm(x.requires_grad_()).backward(dy)
    return [t.grad for t in (x, *given) if t.grad is not None]


def norm_parts() -> list[Tensor]:
    draws = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=draws).double() for shape in ((5, 3, 16), (16,), (16,), (5, 3, 16))]


@pytest.mark.parametrize("centred", [True, False])
def test_gradients_of_a_norm_in_float32_are_as_near_as_float32_is(centred: bool) -> None:
    *parts, dy = norm_parts()
    x, weight, bias = (part.requires_grad_() for part in parts)
    if centred:
        nn.functional.layer_norm(x, (16,), weight, bias, 1e-5).backward(dy)
    else:
        (nn.functional.rms_norm(x, (16,), weight, 1e-5) + bias).backward(dy)
    ranks = run_world(norm_gradients, 2, centred)
    for n, truth in enumerate((x, weight, bias)):
        assert truth.grad is not None
        found = torch.cat([rank[n] for rank in ranks], -1)
        assert float((found - truth.grad).abs().max()) <= 1e-5 * float(truth.grad.abs().max())
