"""Two losses of one forward, each with a backward of its own, are those of a plain loop on every mesh."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import colossal_lite as cl
from tests.shared.pool import RankEnv, run_world

SGD: cl.ConfigDict = dict(precision="fp64", optimizer=dict(type="sgd", lr=0.1), seed=3, timeout_s=30)
RECOMPUTED = dict(activation_checkpoint="full")
MESHES: list[dict[str, Any]] = [
    {},
    RECOMPUTED,
    dict(zero=dict(stage=2, reduce_every="micro_batch")),
    dict(zero=dict(stage=3)),
    dict(zero=dict(stage=3), **RECOMPUTED),
    dict(parallel=dict(tensor=dict(size=2))),
    dict(parallel=dict(tensor=dict(size=2)), **RECOMPUTED),
    dict(parallel=dict(sequence=dict(size=2))),
    dict(memory=dict(placement="host", chunk_bytes=512)),
]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.down(torch.tanh(self.up(x)))
        return y


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table, self.head = nn.Embedding(12, 8), nn.Linear(8, 12)
        self.blocks = nn.ModuleList(Block() for _ in range(2))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.table(ids)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(x)
        return logits


def batch() -> tuple[Tensor, Tensor]:
    ids = torch.randint(12, (4, 5), generator=torch.Generator().manual_seed(1))
    return ids[:, :-1], ids[:, 1:]


def losses_of(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten()), logits.square().mean()


def plain() -> dict[str, Tensor]:
    """The weights after two steps of a plain loop."""
    given = Model().double()
    optimizer = torch.optim.SGD(given.parameters(), lr=0.1)
    for _ in range(2):
        first, second = losses_of(given(batch()[0]), batch()[1])
        optimizer.zero_grad()
        first.backward(retain_graph=True)
        second.backward()
        optimizer.step()
    return given.state_dict()


def trained(env: RankEnv, config: dict[str, Any]) -> dict[str, Tensor]:
    with env.launch(SGD | config) as context:
        engine = cl.initialize(Model(), context=context)
        size, place = context.mesh.size("data"), context.mesh.coord("data")
        inputs, labels = (x.chunk(size)[place] for x in batch())
        for _ in range(2):
            first, second = losses_of(engine(inputs), labels)
            engine.backward(first, retain_graph=True)
            engine.backward(second)
            engine.step()
        return engine.full_state_dict()


def test_selective_recomputation_refuses_it_and_takes_the_sum_of_the_losses() -> None:
    given: cl.ConfigDict = {**SGD, "activation_checkpoint": "selective"}
    with cl.launch(given, rank=0, world_size=1) as context:
        engine = cl.initialize(Model(), context=context)
        first, second = losses_of(engine(batch()[0]), batch()[1])
        with pytest.raises(
            ValueError, match="Legal: 'full' or 'none', or one backward of the sum of the losses"
        ):
            engine.backward(first, retain_graph=True)
        engine.backward(first + second)
        engine.step()


@pytest.mark.parametrize("config", MESHES, ids=str)
def test_two_losses_of_one_forward_have_each_a_backward(config: dict[str, Any]) -> None:
    truth = plain()
    for state in run_world(trained, 2, config):
        for name, right in truth.items():
            torch.testing.assert_close(state[name], right, rtol=1e-10, atol=1e-13)
