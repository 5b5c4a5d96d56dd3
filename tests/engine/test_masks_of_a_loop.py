"""In a loop of one's own each forward draws dropout masks of its own, the same on one rank and on several."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import colossal_lite as cl
from tests.shared.pool import RankEnv, run_world

SGD: cl.ConfigDict = dict(precision="fp64", optimizer=dict(type="sgd", lr=0.1), seed=3, timeout_s=30)


class Model(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.how = how
        self.up, self.drop, self.down = nn.Linear(6, 16), nn.Dropout(0.5), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.up(x))
        y = self.drop(y) if self.how == "module" else F.dropout(y, 0.5, self.training)
        logits: Tensor = self.down(y)
        return logits


def batch(number: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(number)
    return torch.randn(4, 6, generator=generator, dtype=torch.float64), torch.arange(4)


def two_forwards(env: RankEnv, how: str) -> tuple[list[float], dict[str, Tensor]]:
    """How far two forwards of one batch are apart, in a step, in evaluation with dropout on, and in evaluation. Then
    the weights after two steps of two micro-batches, whose loss pulls two forwards together."""
    with env.launch(SGD) as context:
        engine = cl.initialize(Model(how), context=context)

        def apart(x: Tensor) -> float:
            return float((engine(x) - engine(x)).abs().max())

        inputs = [tuple(x.chunk(env.world_size)[env.rank] for x in batch(n)) for n in range(2)]
        found = [apart(inputs[0][0])]
        engine.zero_grad()
        with torch.no_grad():
            found.append(apart(inputs[0][0]))
            engine.model.eval()
            found.append(apart(inputs[0][0]))
            engine.model.train()
        engine.zero_grad()
        for _ in range(2):
            for x, labels in inputs:
                first, second = engine(x), engine(x)
                engine.backward(F.cross_entropy(first, labels) + (first - second).square().mean())
            engine.step()
        return found, engine.full_state_dict()


@pytest.mark.parametrize("how", ["module", "function"])
def test_two_forwards_of_a_step_have_masks_of_their_own_that_are_the_same_on_any_mesh(how: str) -> None:
    ((apart, weights),) = run_world(two_forwards, 1, how)
    assert apart[0] > 0.1 and apart[1] > 0.1 and apart[2] == 0.0
    for found, state in run_world(two_forwards, 2, how):
        assert found[0] > 0.1 and found[1] > 0.1 and found[2] == 0.0
        for name, right in weights.items():
            torch.testing.assert_close(state[name], right, rtol=1e-10, atol=1e-13)
