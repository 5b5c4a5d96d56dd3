"""A recomputed block that reads weights of its own, before or without its children, reads them in backward as well."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import colossal_lite as cl
from tests.shared.plain_loop import batches, plain_run
from tests.shared.pool import RankEnv, run_world

V, D, STEPS = 13, 8, 4


class Block(nn.Module):
    """Reads its own weight as `way` says."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way
        self.gain = nn.Parameter(torch.randn(D, D) / 3)
        self.inner = nn.Linear(D, D)

    def forward(self, x: Tensor) -> Tensor:
        if self.way == "before a child":
            return x + torch.tanh(self.inner(x @ self.gain))
        if self.way == "behind a child":
            return x + torch.tanh(self.inner(x)) @ self.gain
        if self.way == "hidden":  # where NaN would choose, and leave no trace
            return x + self.inner(torch.where(self.gain[0] > 0, x, 2 * x)) + 0 * self.gain.sum()
        return x + torch.tanh(x @ self.gain)


class Model(nn.Module):
    def __init__(self, way: str) -> None:
        super().__init__()
        self.words = nn.Embedding(V, D)
        self.blocks = nn.ModuleList(Block(way) for _ in range(3))
        self.norm, self.head = nn.LayerNorm(D), nn.Linear(D, V)
        if way == "weight_norm of the head":
            nn.utils.parametrizations.weight_norm(self.head)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.words(ids)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


WAYS = ("before a child", "behind a child", "hidden", "without a child", "weight_norm of the head")


def model(way: str) -> nn.Module:
    torch.manual_seed(0)
    return Model(way).double()


def recomputed(env: RankEnv, way: str, more: dict[str, Any]) -> list[float]:
    config = dict(precision="fp64", optimizer=dict(type="sgd", lr=0.3), timeout_s=60, zero=dict(stage=3))
    with env.launch(config | more) as context:
        engine = cl.initialize(model(way), context=context)
        own = slice(env.rank, None, env.world_size)
        return [
            float(engine.train_step((inputs[own].contiguous(), labels[own].contiguous())).loss)
            for inputs, labels in batches(V, STEPS)
        ]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("mode", ["full", "selective"])
def test_at_stage_3_a_recomputed_block_has_its_own_weights(mode: str, way: str) -> None:
    for losses in run_world(recomputed, 2, way, dict(activation_checkpoint=mode)):
        assert losses == pytest.approx(plain_run(model(way), batches(V, STEPS), 0.3).losses, rel=1e-12)


@pytest.mark.parametrize("way", WAYS)
def test_weights_on_the_host_come_for_a_recomputed_block(way: str) -> None:
    shares = dict(weights=1.0, gradients=1.0, optimizer=1.0)
    more = dict(
        activation_checkpoint="full",
        memory=dict(placement="static", host_fraction=shares, chunk_bytes=512),
    )
    (losses,) = run_world(recomputed, 1, way, more)
    assert losses == pytest.approx(plain_run(model(way), batches(V, STEPS), 0.3).losses, rel=1e-12)
