"""1D tensor parallelism is the serial run, with its residual stream whole or cut along the sequence."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import colossal_lite as cl
from colossal_lite.data.batch import Batch
from colossal_lite.distributed.mesh import Mesh
from colossal_lite.layers.tensor_1d import micro_batch_payload
from colossal_lite.layers.tensor_1d_layers import Tensor1D
from colossal_lite.layers.tensor_modes import LayerSizes
from colossal_lite.models import GPT, GPTConfig
from colossal_lite.parallel.parallelize import facts_of, parallelize
from colossal_lite.sharding.mesh_layout import MeshLayout
from tests.shared.parity import (
    FAMILIES,
    SIZES,
    Case,
    assert_other_ways,
    assert_parity,
    first_weights,
    initial_values,
    ledger,
    relative_error,
)
from tests.shared.pool import RankEnv, WorldError, run_world

BOTH = pytest.mark.parametrize("sequence_parallel", [True, False], ids=["cut", "whole"])


@BOTH
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize(
    ("family", "tied"), [("gpt2", True), ("gpt2", False), ("llama", True), ("llama", False)]
)
def test_every_gradient_is_the_serial_one(
    family: str, tied: bool, size: int, sequence_parallel: bool
) -> None:
    assert_parity(
        Case(family=family, tied=tied, world_size=size, tensor=size, sequence_parallel=sequence_parallel)
    )


COMBINATIONS = {
    "data 2 x tensor 2, everything": Case(
        world_size=4,
        tensor=2,
        dropout=0.2,
        ragged=True,
        global_batch=5,
        config=dict(clip_grad_norm=0.05, gradient_accumulation=2),
    ),
    "key heads shared, clipped, data 2": Case(
        family="llama", world_size=8, tensor=4, global_batch=3, ragged=True, config=dict(clip_grad_norm=0.05)
    ),
    "frozen, of a module, AdamW": Case(
        tensor=2,
        build="module",
        frozen=("blocks.0.mlp.up.weight", "blocks.1.norm1.bias", "position.weight"),
        config=dict(optimizer=dict(type="adamw", lr=1e-2, weight_decay=0.1)),
    ),
    "an empty cut": Case(world_size=4, tensor=2, global_batch=1, dropout=0.1),
}


@BOTH
@pytest.mark.parametrize("name", COMBINATIONS)
def test_every_gradient_is_the_serial_one_with(name: str, sequence_parallel: bool) -> None:
    assert_parity(COMBINATIONS[name], sequence_parallel=sequence_parallel)


KEPT = Case(tensor=2, regather_inputs=False, dropout=0.2, global_batch=3, ragged=True)


@pytest.mark.parametrize("name", ["plain", "recomputed", "selective", "zb-v"])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_gradient_is_the_serial_one_with_inputs_kept_whole(family: str, name: str) -> None:
    changes: dict[str, Any] = {
        "plain": dict(tied=False),
        "recomputed": dict(config=dict(activation_checkpoint="full")),
        "selective": dict(config=dict(activation_checkpoint="selective")),
        "zb-v": dict(
            layers=4, world_size=4, global_batch=4,
            pipeline=dict(size=2, schedule="zb-v", stages_per_rank=2, micro_batches=4),
        ),
    }  # fmt: skip
    assert_parity(KEPT, family=family, **changes[name])


@pytest.mark.parametrize("family", FAMILIES)
def test_inputs_kept_whole_are_gathered_once(family: str) -> None:
    case = replace(KEPT, family=family, steps=1, ragged=False, dropout=0.0)
    gathers: list[int] = []
    for each in (case, replace(case, regather_inputs=True)):
        (expected,) = (row for row in formula(each) if row[0] == "all_gather")
        for rows in run_world(ledger, 2, each):
            assert [row for row in rows if row[:2] == ("all_gather", "tensor")] == [expected]
        gathers.append(expected[2])
    pairs = 2 * 2  # of a column-wise and a row-wise linear, in two layers
    assert gathers[1] - gathers[0] == pairs  # the head's gradients are made in forward


def test_float32_is_within_its_own_rounding() -> None:
    assert_parity(Case(tensor=2, config=dict(precision="fp32", clip_grad_norm=0.05)))


@BOTH
def test_initial_bits_are_those_of_the_seed(sequence_parallel: bool) -> None:
    case = Case(
        family="llama", steps=1, world_size=4, tensor=4, sequence_parallel=sequence_parallel,
        config=dict(optimizer=dict(type="sgd", lr=0.0)),
    )  # fmt: skip
    values = initial_values(case)
    for rank in run_world(first_weights, 4, case):
        assert all(torch.equal(rank[name], value) for name, value in values.items())


# ---- bytes ----


def formula(case: Case) -> set[tuple[str, str, int, int]]:
    mesh = Mesh.recording(MeshLayout.build(tensor=case.tensor))
    mode = Tensor1D(mesh.axis("tensor"), SIZES["vocabulary"], case.sequence_parallel, case.regather_inputs)
    facts = facts_of(case.model())
    assert facts is not None
    sizes = LayerSizes(facts, case.global_batch, SIZES["sequence"], itemsize=8, bias=case.family == "gpt2")
    rows = micro_batch_payload(mode, sizes)
    return {(row.operation, row.axis, row.calls, row.payload_bytes) for row in rows}


@BOTH
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("size", [2, 4])
def test_bytes_of_a_step_are_the_formula(family: str, size: int, sequence_parallel: bool) -> None:
    case = Case(family=family, steps=1, world_size=size, tensor=size, sequence_parallel=sequence_parallel)
    for rows in run_world(ledger, size, case):
        on_axis = {row for row in rows if row[1] == "tensor"}
        gradients = {row for row in on_axis if row[0] == "all_reduce"} - formula(case)
        layers = on_axis - gradients
        expected = formula(case)
        if (
            gradients
        ):  # chunks of whole parameters are summed over the axis too, once a step, beside the layers' own
            ((_, _, calls, payload),) = gradients
            own = next((row for row in expected if row[0] == "all_reduce"), ("all_reduce", "tensor", 0, 0))
            assert calls == own[2] + 1 and payload > own[3]
            expected = {row for row in expected if row[0] != "all_reduce"}
        assert layers == expected
        assert {row[1] for row in rows} == {"tensor", "world"}


@pytest.mark.parametrize("size", [8, 64])
@BOTH
def test_a_world_that_is_not_here_moves_what_the_formula_says(size: int, sequence_parallel: bool) -> None:
    config = GPTConfig(vocabulary=1000, layers=3, heads=64, width=128, sequence=128, kv_heads=16)
    mesh = Mesh.recording(MeshLayout.build(tensor=size), rank=size - 1)
    with torch.device("meta"):
        model = GPT(config)
    result = parallelize(model, mesh, sequence_parallel=sequence_parallel)
    inputs = torch.zeros(2, 128, dtype=torch.int64, device="meta")
    part = Batch((inputs,), {}, labels=inputs, samples=torch.zeros(2, dtype=torch.int64))
    with result.told(part):
        logits = model(inputs)
    total, _ = result.cross_entropy(logits, inputs)
    total.backward()
    assert isinstance(result.strategy, Tensor1D)
    facts = facts_of(model)
    assert facts is not None
    expected = micro_batch_payload(result.strategy, LayerSizes(facts, 2, 128, itemsize=4, bias=True))
    assert mesh.ledger.rows() == expected


# ---- other ways to use it ----


@BOTH
def test_a_criterion_an_evaluation_and_an_own_loop_give_the_serial_numbers(sequence_parallel: bool) -> None:
    assert_other_ways(Case(world_size=4, tensor=2, global_batch=5), sequence_parallel=sequence_parallel)


class Plain(nn.Module):
    """A user's own transformer with separate q, k, v, under names that no built-in plan knows."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(20, 8)
        self.mixing = nn.ModuleList(Mixer() for _ in range(2))
        self.last = nn.LayerNorm(8)
        self.out = nn.Linear(8, 20)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.words(ids)
        for layer in self.mixing:
            x = layer(x)
        return self.out(self.last(x))


class Mixer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.before = nn.LayerNorm(8)
        self.heads_of = SelfAttention()
        self.wide = nn.Linear(8, 16)
        self.narrow = nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.heads_of(self.before(x))
        return x + self.narrow(torch.tanh(self.wide(x)))


class SelfAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.num_heads = 4
        self.q, self.k, self.v = (nn.Linear(8, 8) for _ in range(3))
        self.o = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            layer(x).unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for layer in (self.q, self.k, self.v)
        )
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o(y.transpose(1, 2).flatten(2))


PLAN = {
    "words": "embedding",
    "mixing.*.before": "norm",
    "mixing.*.heads_of": "attention",
    "mixing.*.heads_of.q": "colwise",
    "mixing.*.heads_of.[kv]": "colwise:kv",
    "mixing.*.heads_of.o": "rowwise",
    "mixing.*.wide": "colwise",
    "mixing.*.narrow": "rowwise",
    "last": "norm",
    "out": "lm_head",
}


def plain_batch() -> tuple[Tensor, Tensor]:
    ids = torch.arange(24).view(3, 8) * 7 % 20
    return ids, (ids + 5) % 20


def plan_of_ten_lines(env: RankEnv, sequence_parallel: bool) -> dict[str, Any]:
    tensor = dict(size=env.world_size, sequence_parallel=sequence_parallel)
    config = dict(precision="fp64", optimizer=dict(type="sgd", lr=0.1), parallel=dict(tensor=tensor))
    with env.launch(config) as context:
        torch.manual_seed(0)
        engine = cl.initialize(Plain().double(), context=context, plan=PLAN)
        engine.forward_backward(plain_batch())
        gradients = engine.full_gradients()
        rows = {(r.operation, r.calls) for r in engine.ledger.rows() if r.axis == "tensor"}
        return dict(gradients=gradients, rows=rows)


@BOTH
def test_a_plain_module_by_a_plan_of_ten_lines(sequence_parallel: bool) -> None:
    torch.manual_seed(0)
    model = Plain().double()
    ids, labels = plain_batch()
    nn.functional.cross_entropy(model(ids).flatten(0, 1), labels.flatten()).backward()
    for out in run_world(plan_of_ten_lines, 2, sequence_parallel):
        for name, parameter in model.named_parameters():
            assert parameter.grad is not None
            assert relative_error(out["gradients"][name], parameter.grad, 1.0) < 1e-10, name
        # separate q, k, v share one input: 5 pairs would be 6 collectives more
        calls = dict(out["rows"])
        if sequence_parallel:
            assert calls["reduce_scatter"] == 10
        else:
            assert calls["all_reduce"] == 10


# ---- bad input ----


def refused(env: RankEnv, what: str) -> None:
    tensor = dict(size=env.world_size, sequence_parallel=what != "heads")
    plan: Any = dict(PLAN)
    if what == "left out":
        del plan["last"]
    if what == "no such module":
        plan["mixing.*.nowhere"] = "norm"
    if what == "no such role":
        plan["last"] = "layernorm"
    if what == "reserved role":
        plan["last"] = "expert"
    if what == "two heads":
        plan["mixing.*.wide"] = "lm_head"
    model = Plain()
    if what == "attention without heads":
        del model.mixing[0].heads_of.num_heads
    config = dict(parallel=dict(tensor=tensor))
    with env.launch(config) as context:
        if what == "facts":
            cl.initialize(GPT(GPTConfig(**SIZES)), context=context)
        cl.initialize(model, context=context, plan=plan)


REFUSALS = {
    "left out": "no pattern fits last, which has parameters",
    "no such module": "'mixing.\\*.nowhere' fits no module",
    "no such role": "no role 'layernorm'; legal: colwise, rowwise",
    "reserved role": "expert is not built yet",
    "two heads": "exactly one module must be the lm_head",
    "attention without heads": "does not state its heads",
    "heads": "tensor=3 does not divide 4 heads; legal: 1, 2, 4",
    "facts": "4 heads do not divide into 3 parts",
}


@pytest.mark.parametrize("what", REFUSALS)
def test_what_cannot_be_cut_is_refused_in_words_on_every_rank(what: str) -> None:
    with pytest.raises(WorldError, match=REFUSALS[what]) as error:
        run_world(refused, 3 if what in ("heads", "facts") else 2, what)
    assert error.value.ranks("raised") == list(range(3 if what in ("heads", "facts") else 2))


class Dropping(nn.Module):
    """A pair of linears with a dropout between them, or behind them."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.token, self.up, self.down = nn.Embedding(32, 16), nn.Linear(16, 64), nn.Linear(64, 16)
        self.between = nn.Dropout(0.3 if where == "between" else 0.0)
        self.behind = nn.Dropout(0.3)
        self.norm, self.head = nn.LayerNorm(16), nn.Linear(16, 32)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.behind(self.token(ids))
        x = x + self.behind(self.down(self.between(self.up(x).relu())))
        return self.head(self.norm(x))


def dropping(env: RankEnv, where: str, tensor: Any) -> list[float]:
    torch.manual_seed(0)
    model, ids = Dropping(where), torch.randint(32, (4, 9), generator=torch.Generator().manual_seed(1))
    plan = {"token": "embedding", "up": "colwise", "down": "rowwise", "norm": "norm", "head": "lm_head"}
    config = dict(precision="fp64", optimizer=dict(type="sgd", lr=0.1), parallel=dict(tensor=tensor))
    with env.launch(config) as context:
        engine = cl.initialize(model, context=context, plan=plan)
        return [float(engine.train_step((ids[:, :-1], ids[:, 1:])).loss) for _ in range(2)]


@pytest.mark.parametrize("where", ["between", "behind"])
@pytest.mark.parametrize(
    "tensor", [dict(size=2), dict(size=2, sequence_parallel=False), dict(size=4, mode="2d")], ids=str
)
def test_a_dropout_within_a_pair_of_linears_or_behind_it_is_the_serial_one(
    tensor: dict[str, Any], where: str
) -> None:
    (serial,) = run_world(dropping, 1, where, 1)
    for found in run_world(dropping, tensor["size"], where, tensor):
        assert found == pytest.approx(serial, rel=1e-12)
