"""Checks models whose later blocks, or whose code between blocks, do what the first two blocks do not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import colossal_lite as cl
from tests.shared.pool import RankEnv, run_world

WORDS, WIDTH, BLOCKS, STEPS = 13, 8, 4, 3
CUT = dict(tensor=dict(size=2))


class Block(nn.Module):
    def __init__(self, number: int, kind: str) -> None:
        super().__init__()
        self.number, self.kind = number, kind
        self.norm, self.first, self.second = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 16), nn.Linear(16, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.second(F.gelu(self.first(self.norm(x))))
        if self.kind == "a later block mixes tokens" and self.number == 2:
            return x - x.mean(1, keepdim=True)
        return x


class Model(nn.Module):
    """ids [B, T] to logits [B, T, WORDS]."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.words = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Block(number, kind) for number in range(BLOCKS))
        self.between, self.norm, self.head = nn.Dropout(0.3), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS)
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.words(ids)
        for number, block in enumerate(self.blocks):
            x = block(x)
            if self.kind == "a scale behind a later block" and number == 2:
                x = x * self.scale
            if self.kind == "a flip behind a later block" and number == 2:
                x = x.flip(1)
            if self.kind == "an evaluation that mixes tokens" and number == 2 and not self.training:
                x = x - x.mean(1, keepdim=True)
            if self.kind == "a dropout between blocks":
                x = self.between(x)
            if self.kind == "a functional dropout between blocks":
                x = F.dropout(x, 0.3, self.training)
        if self.kind == "a dropout of one vector a sample":
            x = x + self.between(x.mean(1)).unsqueeze(1)
        return self.head(self.norm(x))


KINDS = (
    "a later block mixes tokens", "a scale behind a later block", "a flip behind a later block",
    "a dropout between blocks", "a functional dropout between blocks", "a dropout of one vector a sample",
    "an evaluation that mixes tokens",
)  # fmt: skip


def trained(env: RankEnv, kind: str, parallel: dict[str, Any]) -> tuple[list[float], dict[str, Tensor]]:
    draws = torch.Generator().manual_seed(0)
    batches = [torch.randint(WORDS, (2, 4, 6), generator=draws) for _ in range(STEPS)]
    torch.manual_seed(0)
    config = dict(precision="fp64", optimizer=dict(type="sgd", lr=0.5), parallel=parallel)
    with env.launch(config) as context:
        engine = cl.initialize(Model(kind), context=context)
        losses = [float(engine.train_step((ids, labels)).loss) for ids, labels in batches]
        ids, labels = batches[0]
        losses.append(float(engine.eval_step((ids, labels))))
        return losses, engine.full_state_dict()


@pytest.mark.parametrize("kind", KINDS)
def test_what_only_later_blocks_do_or_code_between_them_is_exact_on_two_tensor_ranks(kind: str) -> None:
    ((losses, weights),) = run_world(trained, 1, kind, {})
    for found, state in run_world(trained, 2, kind, CUT):
        assert found == pytest.approx(losses, rel=1e-12)
        for name, right in weights.items():
            torch.testing.assert_close(state[name], right, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("kind", KINDS[:3])
def test_sequence_parallelism_that_a_later_block_makes_wrong_is_refused(kind: str) -> None:
    parallel = dict(tensor=dict(size=2, sequence_parallel=True))
    for told in run_world(refused, 2, kind, parallel):
        assert "is not that of one process" in told


def refused(env: RankEnv, kind: str, parallel: dict[str, Any]) -> str:
    with pytest.raises(ValueError) as error:
        trained(env, kind, parallel)
    return str(error.value)
