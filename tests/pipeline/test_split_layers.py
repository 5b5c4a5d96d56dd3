"""Layers of people's own models under schedules that split backward: exact, as with backward in one part."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations

import colossal_lite as cl
from tests.shared.plain_loop import OfBlocks
from tests.shared.pool import RankEnv, run_world

V, D, STEPS = 13, 8, 3


class Block(nn.Module):
    def __init__(self, way: str) -> None:
        super().__init__()
        self.way, self.norm, self.first, self.second = (
            way,
            nn.LayerNorm(D),
            nn.Linear(D, 16),
            nn.Linear(16, D),
        )
        self.calls = 0
        if way == "weight_norm":
            parametrizations.weight_norm(self.first)
        elif way == "orthogonal":
            parametrizations.orthogonal(self.second)
        elif way == "a hook on a weight":
            self.first.weight.register_hook(lambda gradient: 0.5 * gradient)
        elif way == "a hook behind a gradient":
            self.first.weight.register_post_accumulate_grad_hook(self._halve)

    @staticmethod
    def _halve(parameter: Tensor) -> None:
        assert parameter.grad is not None

    def forward(self, x: Tensor) -> Tensor:
        if self.way == "changed in place":
            return x + self.second(torch.relu_(self.first(self.norm(x))))
        return x + self.second(torch.tanh(self.first(self.norm(x))))


def trained(env: RankEnv, way: str, pipeline: dict[str, Any]) -> tuple[list[float], dict[str, Tensor]]:
    ids = torch.randint(V, (STEPS, 4, 7), generator=torch.Generator().manual_seed(0))
    config = dict(precision="fp64", optimizer=dict(type="sgd", lr=0.3), timeout_s=60)
    torch.manual_seed(0)
    with env.launch(config | (dict(parallel=dict(pipeline=pipeline)) if pipeline else {})) as context:
        engine = cl.initialize(OfBlocks(V, D, (Block(way) for _ in range(4))).double(), context=context)
        losses = [float(engine.train_step((x[:, :-1].contiguous(), x[:, 1:].contiguous())).loss) for x in ids]
        return losses, engine.full_state_dict()


WAYS = (
    "plain",
    "changed in place",
    "weight_norm",
    "orthogonal",
    "a hook on a weight",
    "a hook behind a gradient",
)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("schedule", ["zb-h1", "zb-v"])
def test_a_layer_of_ones_own_has_its_gradients_where_backward_is_split(schedule: str, way: str) -> None:
    ((losses, weights),) = run_world(trained, 1, way, {})
    pipeline = dict(
        size=2, schedule=schedule, micro_batches=4, stages_per_rank=2 if schedule == "zb-v" else 1
    )
    for found, state in run_world(trained, 2, way, pipeline):
        assert found == pytest.approx(losses, rel=1e-12)
        for name, right in weights.items():
            torch.testing.assert_close(state[name], right, rtol=1e-10, atol=1e-13)
