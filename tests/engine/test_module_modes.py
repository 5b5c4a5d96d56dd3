"""Modules that a user has set to evaluation stay so: in steps, behind evaluations, and where layers are replaced."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import colossal_lite as cl
from tests.shared.pool import RankEnv, run_world

SGD: cl.ConfigDict = dict(precision="fp64", optimizer=dict(type="sgd", lr=0.1), seed=3, timeout_s=30)
MESHES: list[dict[str, Any]] = [
    {},
    dict(zero=dict(stage=1)),
    dict(zero=dict(stage=3)),
    dict(parallel=dict(tensor=dict(size=2))),
    dict(parallel=dict(pipeline=dict(size=2))),
]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.drop, self.down = nn.Linear(8, 16), nn.Dropout(0.5), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.down(self.drop(torch.tanh(self.up(x))))
        return y


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(12, 8), Block(), Block(), nn.Linear(8, 12)).double()


def batch() -> tuple[Tensor, Tensor]:
    ids = torch.randint(12, (4, 6), generator=torch.Generator().manual_seed(1))
    return ids[:, :-1], ids[:, 1:]


def hold(given: nn.Module) -> None:
    for block in given.children():
        if isinstance(block, Block):
            block.drop.eval()


def of_rank(context: cl.Context, rows: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    size, place = context.mesh.size("data"), context.mesh.coord("data")
    return rows[0].chunk(size)[place], rows[1].chunk(size)[place]


def plain() -> tuple[list[float], dict[str, Tensor]]:
    """Losses of three steps of a plain loop, and the weights afterwards."""
    given = model()
    hold(given)
    optimizer, losses = torch.optim.SGD(given.parameters(), lr=0.1), []
    for _ in range(3):
        loss = F.cross_entropy(given(batch()[0]).flatten(0, 1), batch()[1].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, given.state_dict()


def held(env: RankEnv, config: dict[str, Any], when: str) -> tuple[list[float], dict[str, Tensor], list[str]]:
    """The same by an engine that evaluates beside it, and what rank 0 is told."""
    told: list[str] = []
    with env.launch(SGD | config) as context, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        given = model()
        if when == "before":
            hold(given)
        engine = cl.initialize(given, context=context)
        if when == "after":
            hold(engine.model)
        losses = []
        for _ in range(3):
            losses.append(float(engine.train_step(of_rank(context, batch())).loss))
            engine.eval_step(of_rank(context, batch()))
        told = [str(each.message) for each in caught]
        return losses, engine.full_state_dict(), told


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("config", MESHES, ids=str)
def test_modules_that_the_user_set_to_evaluation_stay_so_and_that_is_told_once(
    config: dict[str, Any], when: str
) -> None:
    losses, weights = plain()
    found = run_world(held, 2, config, when)
    for each, state, _ in found:
        assert each == pytest.approx(losses, rel=1e-12)
        for name, right in weights.items():
            torch.testing.assert_close(state[name], right, rtol=1e-10, atol=1e-12)
    assert [sum("stay in eval()" in line for line in told) for *_, told in found] == [1, 0]


def test_a_model_that_is_all_in_evaluation_trains_whole() -> None:
    with cl.launch(SGD, rank=0, world_size=1) as context:
        given = model().eval()
        engine = cl.initialize(given, context=context)
        engine.train_step(batch())
        assert all(module.training for module in given.modules())
        given.eval()
        engine.eval_step(batch())
        assert not any(module.training for module in given.modules())


def test_a_norm_that_the_user_froze_trains_on_parts_of_a_batch() -> None:
    torch.manual_seed(0)
    given = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 3)).double()
    given[1].eval()
    inputs, labels = torch.randn(4, 4, dtype=torch.float64), torch.tensor([0, 1, 2, 0])
    truth = F.cross_entropy(given(inputs), labels).item()
    with cl.launch({**SGD, "gradient_accumulation": 2}, rank=0, world_size=1) as context:
        engine = cl.initialize(given, context=context)
        assert float(engine.train_step((inputs, labels)).loss) == pytest.approx(truth, rel=1e-12)
        given[1].train()
        with pytest.raises(ValueError, match="1 is a BatchNorm1d, which reads the whole batch"):
            engine.train_step((inputs, labels))
