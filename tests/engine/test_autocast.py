"""torch.autocast in a model's forward or around a step: the losses of plain torch, or a refusal by name."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import colossal_lite as cl
from colossal_lite.distributed.communicator import CommError
from tests.shared.pool import RankEnv, run_world

CONFIG: cl.ConfigDict = dict(precision="fp32", optimizer=dict(type="sgd", lr=0.5), timeout_s=60)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(16), nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Words(nn.Module):
    """A model whose own forward is in autocast, if it says so."""

    def __init__(self, casts: bool) -> None:
        super().__init__()
        self.casts = casts
        self.embedding = nn.Embedding(12, 16)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(16, 12, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16) if self.casts else nullcontext():
            x = self.embedding(ids)
            for block in self.blocks:
                x = block(x)
            out: Tensor = self.head(x)
            return out


def words(casts: bool) -> nn.Module:
    torch.manual_seed(0)
    return Words(casts)


def batch(step: int) -> tuple[Tensor, Tensor]:
    rows = torch.randint(12, (4, 9), generator=torch.Generator().manual_seed(step))
    return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()


def plain_losses(where: str) -> list[float]:
    model = words(where == "forward")
    optimizer, found = torch.optim.SGD(model.parameters(), lr=0.5), []
    for step in range(3):
        ids, labels = batch(step)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=where == "loop"):
            loss = F.cross_entropy(model(ids).flatten(0, 1).float(), labels.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


def engine_losses(env: RankEnv, where: str, more: dict[str, Any]) -> list[float]:
    with env.launch(CONFIG | more) as context:
        engine = cl.initialize(words(where == "forward"), context=context)
        found, axis = [], context.mesh.axis("data")
        for step in range(3):
            part = tuple(x.chunk(axis.size)[context.mesh.coord("data")] for x in batch(step))
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=where == "loop"):
                found.append(float(engine.train_step(part).loss))
        return found


@pytest.mark.parametrize("where", ["forward", "loop"])
@pytest.mark.parametrize(("ranks", "more"), [(1, {}), (2, {"zero": {"stage": 3}})])
def test_a_step_of_the_engine_in_autocast_is_that_of_plain_torch(
    where: str, ranks: int, more: dict[str, Any]
) -> None:
    """One rank rounds nearly as plain torch, for 32 labels: a power of two. Two ranks round their halves apart."""
    bound = 1e-4 if ranks == 1 else 5e-3
    for found in run_world(engine_losses, ranks, where, more):
        assert found == pytest.approx(plain_losses(where), abs=bound)


def refusal(env: RankEnv, where: str, more: dict[str, Any]) -> str:
    try:
        return str(engine_losses(env, where, more))
    except (ValueError, CommError) as error:  # another rank's error names it too
        return str(error)


@pytest.mark.parametrize("where", ["forward", "loop"])
@pytest.mark.parametrize("axis", [{"tensor": 2}, {"pipeline": {"size": 2, "schedule": "zb-h1"}}])
def test_autocast_is_refused_where_a_layers_backward_is_written_by_hand(
    where: str, axis: dict[str, Any]
) -> None:
    told = run_world(refusal, 2, where, {"parallel": axis})[0]
    assert "torch.autocast: it casts to torch.bfloat16" in told
    assert "Legal: precision='bf16' in the config, without autocast" in told
