"""A fused criterion multiplies in backward, in place, the gradient that it has saved in forward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn import functional as F

import colossal_lite as cl
from colossal_lite.parallel.own_criterion import _check_linear
from tests.checks.test_losses_between_samples import (
    SGD,
    Fused,
    batch,
    fused_rows,
    is_equal,
    model,
    plain,
    three,
)
from tests.shared.pool import RankEnv, run_world


class FusedSum(Function):
    """As `Fused`, of the sum."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, labels: Tensor) -> Tensor:
        ctx.gradient = x.softmax(-1) - F.one_hot(labels, x.shape[-1])
        return F.cross_entropy(x, labels, reduction="sum")

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return ctx.gradient.mul_(gradients[0]), None


class OfAPackage(FusedSum):
    """Of a user's package with a name that a folder of ours has too."""

    __module__ = "kernels.losses"


CRITERIA: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "mean": lambda z, y: Fused.apply(z, y),  # type: ignore[no-untyped-call]
    "a third of the mean": lambda z, y: Fused.apply(z, y) / 3,  # type: ignore[no-untyped-call]
    "sum and count": lambda z, y: (FusedSum.apply(z, y), len(y)),  # type: ignore[no-untyped-call]
    "sum of a package": lambda z, y: (OfAPackage.apply(z, y), len(y)),  # type: ignore[no-untyped-call]
    "losses of rows and count": lambda z, y: (fused_rows(z, y).sum(), len(y)),
    "seven sums and count": lambda z, y: (7 * FusedSum.apply(z, y), len(y)),  # type: ignore[no-untyped-call]
}
SIZES = {"a third of the mean": 1 / 3, "seven sums and count": 7.0}


def trained(env: RankEnv, name: str, config: dict[str, Any]) -> tuple[str, dict[str, Tensor]]:
    """What the first step says, and the weights after three."""
    with env.launch(SGD | config) as context:
        engine = cl.initialize(model(), context=context, criterion=CRITERIA[name])
        x, _, labels = batch()

        def step() -> None:
            engine.train_step((x, labels))

        return three(step, engine)


CONFIGS: dict[str, tuple[int, dict[str, Any]]] = {
    "one rank": (1, {}),
    "micro-batches": (1, dict(gradient_accumulation=2)),
    "data": (2, {}),
    "stage 3": (2, dict(zero=dict(stage=3), gradient_accumulation=2)),
    "stages": (2, dict(parallel=dict(pipeline=2), gradient_accumulation=4)),
}


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("name", CRITERIA)
def test_a_criterion_that_multiplies_its_gradient_in_place_is_exact(name: str, config: str) -> None:
    size = SIZES.get(name, 1.0)
    truth = plain(lambda given: size * F.cross_entropy(given(batch()[0]), batch()[2]))
    for told, state in run_world(trained, CONFIGS[config][0], name, CONFIGS[config][1]):
        assert told == "" and is_equal(state, truth)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_a_look_leaves_what_a_fused_criterion_has_saved(dtype: torch.dtype) -> None:
    for count in (*range(1, 200), 1000, 4095):
        leaf = torch.randn(5, 4, dtype=dtype, generator=torch.Generator().manual_seed(count)).requires_grad_()
        logits = leaf * 1
        loss = Fused.apply(logits, torch.arange(5) % 4)  # type: ignore[no-untyped-call]
        saved = loss.grad_fn.gradient.clone()
        _check_linear(loss.to(torch.promote_types(dtype, torch.float32)) * count, logits)
        assert torch.equal(loss.grad_fn.gradient, saved)
