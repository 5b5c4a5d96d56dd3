"""A recomputed block that reads weights of its own, before or without its children, reads them in backward as well."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

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


class Sharing(nn.Module):
    """A block whose last part is a module of all blocks."""

    def __init__(self, shared: nn.Module) -> None:
        super().__init__()
        self.norm, self.inner, self.shared = nn.LayerNorm(D), nn.Linear(D, D), shared

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.shared(torch.tanh(self.inner(self.norm(x))))
        return y


class Sections(nn.Module):
    """Blocks that share a module, or a part of which torch's own function runs again. `way`: which."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way, shared = way, nn.Sequential(nn.Linear(D, 2 * D), nn.Tanh(), nn.Linear(2 * D, D))
        self.words = nn.Embedding(V, D)
        apart = (nn.Linear(D, D) for _ in range(4))
        self.blocks = nn.ModuleList(Sharing(shared if way == "shared" else own) for own in apart)
        self.norm, self.head = nn.LayerNorm(D), nn.Linear(D, V)

    def middle(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        y: Tensor = self.norm(x)
        return y

    def forward(self, ids: Tensor) -> Tensor:
        x = self.words(ids)
        x = (
            self.middle(x)
            if self.way == "shared"
            else checkpoint(self.middle, x, use_reentrant=self.way == "reentrant")
        )
        logits: Tensor = self.head(x)
        return logits


def sections(env: RankEnv, way: str, more: dict[str, Any]) -> list[float]:
    config = dict(precision="fp64", optimizer=dict(type="sgd", lr=0.3), timeout_s=60)
    torch.manual_seed(0)
    with env.launch(config | more) as context:
        engine = cl.initialize(Sections(way).double(), context=context)
        own = slice(env.rank, None, env.world_size)
        given = batches(V, STEPS)
        return [
            float(engine.train_step(tuple(part[own].contiguous() for part in each)).loss) for each in given
        ]


@pytest.mark.parametrize(
    "stage", [dict(prefetch=0), dict(prefetch=1), dict(reshard_after_forward=False)], ids=str
)
@pytest.mark.parametrize(
    ("way", "mode"),
    [
        ("shared", "full"),
        ("shared", "selective"),
        ("again", "none"),
        ("reentrant", "none"),
        ("again", "full"),
    ],
)
def test_all_weights_that_run_again_in_one_node_are_there_until_backward_has_read_them(
    way: str, mode: str, stage: dict[str, Any]
) -> None:
    torch.manual_seed(0)
    expected = plain_run(Sections(way).double(), batches(V, STEPS), 0.3).losses
    more = dict(zero=dict(stage=3, **stage), activation_checkpoint=mode, memory=dict(chunk_bytes=512))
    for losses in run_world(sections, 2, way, more):
        assert losses == pytest.approx(expected, rel=1e-12)
