"""Low-rank adapters over frozen layers train exactly under tensor parallelism, and move next to nothing."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import colossal_lite as cl
from colossal_lite.distributed.mesh import Mesh
from colossal_lite.layers.tensor_1d import micro_batch_payload
from colossal_lite.layers.tensor_1d_layers import Tensor1D
from colossal_lite.layers.tensor_modes import LayerSizes
from colossal_lite.parallel.parallelize import facts_of, parallelize
from colossal_lite.sharding.mesh_layout import MeshLayout
from tests.shared.parity import SIZES, Adapter, Case, ModularAdapter, adapt, assert_parity, ledger
from tests.shared.pool import RankEnv, WorldError, run_world

BOTH = pytest.mark.parametrize("sequence_parallel", [True, False], ids=["cut", "whole"])
STEP: dict[str, Any] = dict(steps=2, adapters=2, ragged=True, config=dict(clip_grad_norm=0.05))
CASES = {
    "gpt2, data 2 x tensor 2": Case(world_size=4, tensor=2, dropout=0.2, global_batch=5, **STEP),
    "gpt2, tensor 4": Case(world_size=4, tensor=4, **STEP),
    "llama, as peft has them": Case("llama", tensor=2, adapter_kind=ModularAdapter, **STEP),
    "hf-gpt2, as peft has them": Case(
        "hf-gpt2", tensor=2, build="module", adapter_kind=ModularAdapter, **STEP
    ),
    "hf-llama": Case("hf-llama", tied=False, tensor=2, build="module", **STEP),
}


@BOTH
@pytest.mark.parametrize("name", CASES)
def test_every_gradient_of_an_adapter_is_the_serial_one(name: str, sequence_parallel: bool) -> None:
    case = CASES[name]
    assert_parity(case, sequence_parallel=sequence_parallel)


SEQUENCES = {
    "gpt2": Case(world_size=2, sequence=2, tokens=16, **STEP),
    "llama, as peft has them": Case(
        "llama", world_size=2, sequence=2, tokens=16, adapter_kind=ModularAdapter, **STEP
    ),
    "hf-gpt2, as peft has them": Case(
        "hf-gpt2", world_size=2, sequence=2, tokens=16, build="module", adapter_kind=ModularAdapter, **STEP
    ),
    "hf-llama": Case("hf-llama", world_size=2, tied=False, sequence=2, tokens=16, build="module", **STEP),
    "gpt2, ring 2 x tensor 2": Case(world_size=4, sequence=2, tensor=2, tokens=16, **STEP),
}


@pytest.mark.parametrize("name", SEQUENCES)
def test_every_gradient_of_an_adapter_is_the_serial_one_on_a_sequence_axis(name: str) -> None:
    assert_parity(SEQUENCES[name])


# ---- bytes ----


@BOTH
def test_bytes_of_a_step_are_the_formula(sequence_parallel: bool) -> None:
    """Those of the frozen model alone, and once a step one all-reduce of the whole factors' gradients."""
    case = Case(tensor=2, steps=1, adapters=2, sequence_parallel=sequence_parallel)
    mesh = Mesh.recording(MeshLayout.build(tensor=2))
    mode = Tensor1D(mesh.axis("tensor"), SIZES["vocabulary"], sequence_parallel)
    facts = facts_of(case.model())
    assert facts is not None
    sizes = LayerSizes(facts, case.global_batch, SIZES["sequence"], itemsize=8, bias=True)
    rows = micro_batch_payload(mode, sizes, adapted=True)
    expected = {(row.operation, row.calls, row.payload_bytes) for row in rows}
    for found in run_world(ledger, 2, case):
        on_axis = {(o, calls, size) for o, axis, calls, size in found if axis == "tensor"}
        (extra,) = on_axis - expected
        own = next((row for row in expected if row[0] == "all_reduce"), ("all_reduce", 0, 0))
        assert extra[0] == "all_reduce" and extra[1] == own[1] + 1
        whole_factors = SIZES["layers"] * 2 * 4 * SIZES["width"]  # in each block down, up, down, up of rank 2
        assert 8 * whole_factors <= extra[2] - own[2] <= 8 * (whole_factors + 2 * 1024)
        assert expected - {own} <= on_axis


# ---- plans ----


def planned(kind: Any, only: str = "") -> dict[str, str]:
    with torch.device("meta"):
        model = Case().model()
        adapt(model, 2, lambda base, rank: kind(base, rank))
        if only:
            for block in model.get_submodule("blocks"):
                for path in ("attention.out", "mlp.up", "mlp.down"):
                    owner, _, leaf = path.rpartition(".")
                    wrapped = block.get_submodule(path)
                    setattr(block.get_submodule(owner), leaf, getattr(wrapped, only))
    return dict(parallelize(model, Mesh.recording(MeshLayout.build(tensor=2))).plan)


def test_the_automatic_plan_says_what_it_found() -> None:
    plan = planned(Adapter)
    assert (
        plan["blocks.*.attention.qkv"] == "adapter" and plan["blocks.*.attention.qkv.base"] == "colwise:qkv"
    )
    assert plan["blocks.*.mlp.down"] == "adapter" and plan["blocks.*.mlp.down.base"] == "rowwise"
    some = planned(ModularAdapter, only="base_layer")
    assert some["blocks.*.attention.qkv"] == "adapter" and some["blocks.*.mlp.down"] == "rowwise"


# ---- bad input ----


class Turned(Adapter):
    """Factors stored as matrices that x is multiplied with from the right."""

    def __init__(self, base: nn.Module, rank: int) -> None:
        super().__init__(base, rank)
        self.down, self.up = nn.Parameter(self.down.data.t()), nn.Parameter(self.up.data.t())


class Scaled(Adapter):
    def __init__(self, base: nn.Module, rank: int) -> None:
        super().__init__(base, rank)
        self.scale = nn.Parameter(torch.ones(self.up.shape[0]))


class Half(Adapter):
    def __init__(self, base: nn.Module, rank: int) -> None:
        super().__init__(base, rank)
        del self.up


KINDS = {"turned": Turned, "scaled": Scaled, "half": Half}


def refused(env: RankEnv, what: str) -> None:
    size = dict(size=4, mode="2d") if what == "2d" else dict(size=env.world_size)
    case = Case("llama" if what == "shared" else "gpt2")
    model = case.model()
    adapt(model, 2, KINDS.get(what))
    with env.launch(dict(parallel=dict(tensor=size))) as context:
        cl.initialize(model, context=context)


REFUSALS = {
    "turned": r"attention\.qkv\.down has shape \[16, 2\]; legal in an adapter of a linear from 16 to 48",
    "scaled": r"qkv\.scale has shape \[48\]",
    "half": r"has 1 factors \[r, 16\] and 0 \[48, r\]; legal: pairs",
    "2d": "the role adapter is not built in this tensor mode; legal: mode='1d'",
    "shared": "2 key heads that 4 ranks share is not built; legal: tensor up to 2",
}


@pytest.mark.parametrize("what", REFUSALS)
def test_what_cannot_be_cut_is_refused_on_every_rank(what: str) -> None:
    size = 4 if what in ("2d", "shared") else 2
    with pytest.raises(WorldError, match=REFUSALS[what]) as error:
        run_world(refused, size, what)
    assert error.value.ranks("raised") == list(range(size))
