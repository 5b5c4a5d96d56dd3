"""A model whose tokens see padding is refused for lengths that a sequence axis does not divide; others are exact."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import colossal_lite as cl
from tests.shared.pool import RankEnv, run_world

V, D, H = 13, 8, 2
CAUSAL = ("causal",)
SEES_PADDING = ("full", "by hand", "mean of values", "running mean in training")


class Block(nn.Module):
    def __init__(self, way: str) -> None:
        super().__init__()
        self.way, self.qkv, self.out = way, nn.Linear(D, 3 * D), nn.Linear(D, D)

    def forward(self, x: Tensor) -> Tensor:
        samples, tokens, _ = x.shape
        parts = self.qkv(x).chunk(3, -1)
        q, k, v = (part.view(samples, tokens, H, D // H).transpose(1, 2) for part in parts)
        if self.way == "by hand":
            attended = torch.softmax(q @ k.transpose(-1, -2) / 2, -1) @ v
        else:
            attended = F.scaled_dot_product_attention(q, k, v, is_causal=self.way != "full")
        return x + self.out(attended.transpose(1, 2).reshape(samples, tokens, D))


class Model(nn.Module):
    def __init__(self, way: str) -> None:
        super().__init__()
        self.way, self.words = way, nn.Embedding(V, D)
        self.blocks = nn.ModuleList(Block(way) for _ in range(2))
        self.head = nn.Linear(D, V)
        self.register_buffer("mean", torch.zeros(D))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.words(ids)
        for block in self.blocks:
            x = block(x)
        if self.way == "mean of values":
            x = x - x.detach().mean((0, 1))
        if self.way == "running mean in training":
            if self.training:
                self.mean.mul_(0.9).add_(0.1 * x.detach().mean((0, 1)))
            x = x - self.mean
        logits: Tensor = self.head(x)
        return logits


def trained(env: RankEnv, way: str, mode: str, tokens: int) -> list[float] | str:
    ids = torch.randint(V, (3, 2, tokens + 1), generator=torch.Generator().manual_seed(0))
    sequence = dict(sequence=dict(size=env.world_size, mode=mode)) if mode else {}
    config = dict(precision="fp64", optimizer=dict(type="sgd", lr=0.3), timeout_s=60, parallel=sequence)
    torch.manual_seed(0)
    with env.launch(config) as context:
        engine = cl.initialize(Model(way).double(), context=context)
        try:
            return [
                float(engine.train_step((x[:, :-1].contiguous(), x[:, 1:].contiguous())).loss) for x in ids
            ]
        except ValueError as error:
            return str(error)


def modes(way: str) -> list[tuple[str, int]]:
    """Modes of this attention, with a length that two ranks do not divide."""
    full = [("ring_full", 5), ("ulysses", 5), ("allgather_kv", 6)]
    return full if way == "full" else [("ring", 6), ("ulysses", 5), ("allgather_kv", 6)]


@pytest.mark.parametrize("way, mode, tokens", [(w, *each) for w in SEES_PADDING for each in modes(w)])
def test_lengths_that_do_not_divide_are_refused_where_tokens_see_padding(
    way: str, mode: str, tokens: int
) -> None:
    for told in run_world(trained, 2, way, mode, tokens):
        assert (
            isinstance(told, str) and "padding changes what Model gives" in told and "legal: lengths" in told
        )


@pytest.mark.parametrize("way", [*CAUSAL, *SEES_PADDING])
def test_lengths_that_divide_and_causal_models_are_exact(way: str) -> None:
    for mode, tokens in modes(way):
        length = tokens if way in CAUSAL else 8
        (truth,) = run_world(trained, 1, way, "", length)
        for losses in run_world(trained, 2, way, mode, length):
            assert losses == pytest.approx(truth, rel=1e-12), mode
