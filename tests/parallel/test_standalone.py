"""`cl.parallelize` and `cl.finish_gradients` in a user's own loop with torch's own optimizer: the serial run."""

from __future__ import annotations

import math
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import colossal_lite as cl
from colossal_lite.models import GPT
from tests.shared.parity import Case, relative_error
from tests.shared.places import patched
from tests.shared.pool import RankEnv, WorldError, run_world

BOTH = pytest.mark.parametrize("sequence_parallel", [True, False], ids=["cut", "whole"])
LR = 0.5


def built(case: Case) -> GPT:
    torch.manual_seed(5)
    return case.model().double()


def serial(case: Case) -> list[dict[str, Tensor]]:
    """Parameters after each step of a loop that knows of no ranks."""
    model = built(case)
    optimizer = torch.optim.SGD(model.parameters(), LR)
    steps = []
    for number in range(case.steps):
        inputs, labels = case.batch(number)
        optimizer.zero_grad()
        logits = model(inputs)
        nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()).backward()
        optimizer.step()
        steps.append({name: p.detach().clone() for name, p in model.named_parameters()})
    return steps


def _first_gradient_halved(original: Any, parameters: list[nn.Parameter], *rest: Any) -> None:
    original(parameters, *rest)
    assert parameters[0].grad is not None
    parameters[0].grad.mul_(0.5)


# Name of the function, and what takes its place, given the original.
FAULTS: dict[str, tuple[str, Any]] = {
    "gradients not summed": ("finish_gradients:_sum", lambda original, *rest: None),
    "a gradient averaged": ("finish_gradients:_sum", _first_gradient_halved),
    "summed over data only": (
        "ShardSpec.sync_axes", lambda original, *given: tuple(a for a in original(*given) if a != "tensor")
    ),
    "a neighbour's values": (
        "cut_values",
        lambda original, spec, layout, coords, whole: original(
            spec, layout, {**coords, "tensor": 1 - coords["tensor"]}, whole
        ),
    ),
}  # fmt: skip


def planted(fault: str) -> AbstractContextManager[Any]:
    return patched(*FAULTS[fault]) if fault else nullcontext()


def own_loop(env: RankEnv, case: Case, fault: str = "") -> dict[str, Any]:
    with planted(fault), env.launch(case.full_config) as context:
        model, mesh = built(case), context.mesh
        layers = cl.parallelize(model, mesh, sequence_parallel=case.sequence_parallel)
        optimizer = torch.optim.SGD(model.parameters(), LR)
        steps = []
        for number in range(case.steps):
            inputs, labels = (t[context.local_batch(case.global_batch)] for t in case.batch(number))
            optimizer.zero_grad()
            total, count = layers.cross_entropy(model(inputs), labels)
            tokens = mesh.axis("data").all_reduce(count.clone())
            (total / tokens).backward()
            mesh.ledger.clear()
            cl.finish_gradients(model)
            sums = [(r.operation, r.axis, r.calls) for r in mesh.ledger.rows()]
            optimizer.step()
            steps.append({name: p.detach().clone() for name, p in model.named_parameters()})
        return dict(steps=steps, coords=mesh.coords, specs=dict(layers.specs), layout=mesh.layout, sums=sums)


CASES = {
    "data 2 x tensor 2": Case(world_size=4, tensor=2, ragged=True, global_batch=5),
    "llama, untied, data 2 x tensor 2": Case(family="llama", tied=False, world_size=4, tensor=2),
    "key heads shared, tensor 4": Case(family="llama", world_size=4, tensor=4),
    "frozen": Case(world_size=2, tensor=2, frozen=("blocks.0.mlp.up.weight", "norm.bias")),
}


def assert_serial(case: Case, fault: str = "") -> list[dict[str, Any]]:
    truth, ranks = serial(case), run_world(own_loop, case.world_size, case, fault)
    for number, whole in enumerate(truth):
        for name, expected in whole.items():
            full = torch.full_like(expected, math.nan)
            spec = ranks[0]["specs"][name]
            spec.join(((r["coords"], r["steps"][number][name]) for r in ranks), full, ranks[0]["layout"])
            error = relative_error(full, expected, 1.0)
            assert error < 1e-10, f"step {number}: {name} is off by {error:.3g}"
    for rank in ranks:  # copies agree to the last bit, or they would drift apart
        for name, spec in rank["specs"].items():
            if not spec.sharding_axes:
                assert torch.equal(rank["steps"][-1][name], ranks[0]["steps"][-1][name]), name
    return ranks


@BOTH
@pytest.mark.parametrize("name", CASES)
def test_a_plain_loop_over_parallel_layers_is_the_serial_loop(name: str, sequence_parallel: bool) -> None:
    assert_serial(replace(CASES[name], sequence_parallel=sequence_parallel))


def test_under_data_parallelism_alone_too_in_one_sum() -> None:
    ranks = assert_serial(Case(world_size=2, family="llama"))
    assert all(rank["sums"] == [("all_reduce", "data", 1)] for rank in ranks)


def test_gradients_are_summed_once_for_each_set_of_axes() -> None:
    ranks = assert_serial(CASES["data 2 x tensor 2"])
    assert ranks[0]["sums"] == [("all_reduce", "data", 1), ("all_reduce", "data*tensor", 1)]


@pytest.mark.parametrize("fault", FAULTS)
def test_parity_goes_red_for(fault: str) -> None:
    with pytest.raises(AssertionError):
        assert_serial(CASES["data 2 x tensor 2"], fault)


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(2, 2, bias=False) for _ in range(3))


def unused(env: RankEnv) -> list[Tensor | None]:
    """Every rank uses `a`, rank 1 alone uses `b`, nobody `c`."""
    with env.launch(dict(parallel=dict(data=2))) as context:
        torch.manual_seed(0)
        module = Two()
        cl.parallelize(module, context.mesh)
        x = torch.ones(1, 2)
        y = module.a(x) if env.rank == 0 else module.a(x) + module.b(x)
        y.sum().backward()
        cl.finish_gradients(module)
        return [layer.weight.grad for layer in (module.a, module.b, module.c)]


def test_a_parameter_has_a_gradient_where_any_rank_used_it() -> None:
    for a, b, c in run_world(unused, 2):
        assert torch.equal(a, torch.full((2, 2), 2.0)) and torch.equal(b, torch.ones(2, 2)) and c is None


# ---- bad input ----


def refused(env: RankEnv, what: str) -> None:
    config: dict[str, Any] = dict(parallel=dict(tensor=env.world_size))
    if what == "2d":
        config = dict(parallel=dict(tensor=dict(size=4, mode="2d")))
    case = Case(dropout=0.1 if what == "dropout" else 0.0)
    with env.launch(config) as context:
        if what == "not parallel":
            cl.finish_gradients(built(case))
        with torch.device("meta" if what == "meta" else "cpu"):
            model = case.model()
        before = {name: id(p) for name, p in model.named_parameters()}
        try:
            cl.parallelize(model, context.mesh)
        except ValueError:
            assert before == {name: id(p) for name, p in model.named_parameters()}
            raise
        cl.parallelize(model, context.mesh)


REFUSALS = {
    "not parallel": "finish_gradients: this module is not parallel",
    "twice": "this module is parallel already",
    "dropout": "dropout .* needs masks that agree",
    "meta": "is on meta and has no values",
    "2d": "cuts the batch",
}


@pytest.mark.parametrize("what", REFUSALS)
def test_what_cannot_be_is_refused_in_words(what: str) -> None:
    with pytest.raises(WorldError, match=REFUSALS[what]):
        run_world(refused, 4 if what == "2d" else 2, what)
