"""Layers whose weight gradients a zero-bubble schedule defers, or not: each model trains as in one process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations, parametrize

import colossal_lite as cl
from tests.shared.plain_loop import OfBlocks, batches, plain_run
from tests.shared.pool import RankEnv, run_world

V, D, STEPS = 16, 8, 2
SGD = dict(precision="fp64", optimizer=dict(type="sgd", lr=0.3), timeout_s=60)


class Exp(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return weight.exp()


class Conditioned(nn.LayerNorm):
    """Takes two tensors."""

    def __init__(self) -> None:
        super().__init__(D)
        self.scale = nn.Linear(D, D)

    def forward(self, x: Tensor, beside: Tensor) -> Any:  # type: ignore[override]
        return super().forward(x) * self.scale(beside)


class WithResidual(nn.LayerNorm):
    """Gives two tensors."""

    def __init__(self) -> None:
        super().__init__(D)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        return super().forward(x), x


class AddRMSNorm(nn.Module):
    """Takes two tensors, under a name that norms of one tensor have."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(D))

    def forward(self, x: Tensor, residual: Tensor) -> Tensor:
        return F.rms_norm(x + residual, (D,), self.weight)


class GatedRMSNorm(nn.Module):
    """Holds another layer."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.gate = nn.Parameter(torch.ones(D)), nn.Linear(D, D)

    def forward(self, x: Tensor) -> Any:
        return F.rms_norm(x, (D,), self.weight) * self.gate(x).sigmoid()


class DropRMSNorm(AddRMSNorm):
    """Draws: run again it is another function."""

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        return F.dropout(F.rms_norm(x, (D,), self.weight), 0.4, self.training)


NORMS: dict[str, Callable[[], nn.Module]] = {
    "conditioned": Conditioned,
    "with residual": WithResidual,
    "add": AddRMSNorm,
    "gated": GatedRMSNorm,
}


class Block(nn.Module):
    """`way`: its norm, how it is called, or what is parametrized."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way
        self.norm = DropRMSNorm() if way == "drops" else NORMS.get(way, lambda: nn.LayerNorm(D))()
        self.up, self.down = nn.Linear(D, 2 * D), nn.Linear(2 * D, D)
        if way == "norm weight":
            parametrize.register_parametrization(self.norm, "weight", Exp())
        if way == "bias":
            parametrize.register_parametrization(self.up, "bias", Exp())

    def forward(self, x: Tensor) -> Any:
        if self.way in ("conditioned", "add"):
            h = self.norm(x, x.sin())
        elif self.way == "with residual":
            h, x = self.norm(x)
        else:
            h = self.norm(input=x) if self.way == "by name" else self.norm(x)
        h = self.up(input=h) if self.way == "by name" else self.up(h)
        return x + self.down(h.tanh())


class Model(OfBlocks):
    def __init__(self, way: str) -> None:
        super().__init__(V, D, (Block(way) for _ in range(2)))
        self.way = way
        self.head = nn.Linear(D, V, bias=False)
        if way == "head":
            parametrizations.weight_norm(self.head)
        if way == "table":
            parametrizations.weight_norm(self.words)

    def forward(self, ids: Tensor) -> Any:
        x = self.words(input=ids) if self.way == "by name" else self.words(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(input=x) if self.way == "by name" else self.head(x)


def made(way: str) -> Model:
    torch.manual_seed(0)
    return Model(way).double()


def trained(env: RankEnv, way: str, more: dict[str, Any]) -> tuple[list[float], dict[str, Tensor]]:
    with env.launch(SGD | more) as context:
        engine = cl.initialize(made(way), context=context)
        losses = [float(engine.train_step(batch).loss) for batch in batches(V, STEPS)]
        return [*losses, float(engine.eval_step(batches(V, 1)[0]))], engine.full_state_dict()


def assert_plain(way: str, ranks: int, more: dict[str, Any]) -> None:
    truth = plain_run(made(way), batches(V, STEPS), 0.3)
    for losses, weights in run_world(trained, ranks, way, more):
        assert losses == pytest.approx([*truth.losses, truth.evaluated], rel=1e-11)
        for name, right in truth.weights.items():
            torch.testing.assert_close(weights[name], right, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("schedule", ["zb-h1", "zb-v"])
@pytest.mark.parametrize("way", ["by name", "head", "table", "bias", "norm weight", *NORMS])
def test_a_layer_that_cannot_defer_its_weights_is_exact_in_a_zero_bubble_schedule(
    way: str, schedule: str
) -> None:
    assert_plain(way, 2, dict(parallel=dict(pipeline=dict(size=2, schedule=schedule, micro_batches=4))))


@pytest.mark.parametrize("schedule", ["zb-h1", "zb-v"])
def test_a_norm_that_drops_features_has_the_masks_of_one_rank_in_a_zero_bubble_schedule(
    schedule: str,
) -> None:
    ((losses, weights),) = run_world(trained, 1, "drops", {})
    pipeline = dict(size=2, schedule=schedule, micro_batches=4)
    for found, state in run_world(trained, 2, "drops", dict(parallel=dict(pipeline=pipeline))):
        assert found == pytest.approx(losses, rel=1e-11)
        for name, right in weights.items():
            torch.testing.assert_close(state[name], right, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("more", [{}, dict(gradient_accumulation=2)], ids=str)
def test_a_head_may_be_called_by_the_name_of_its_argument(more: dict[str, Any]) -> None:
    assert_plain("by name", 1, more)
