"""What torch alone gives for a few steps of a model: the truth for models that tests write."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class OfBlocks(nn.Module):
    """ids [B, T] to logits [B, T, vocabulary] through a table, blocks and a head."""

    def __init__(self, vocabulary: int, width: int, blocks: Iterable[nn.Module]) -> None:
        super().__init__()
        self.words, self.blocks = nn.Embedding(vocabulary, width), nn.ModuleList(blocks)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, ids: Tensor) -> Any:
        x = self.words(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


@dataclass(frozen=True)
class PlainRun:
    """Losses of the steps, the loss of an evaluation on the first batch after them, and the weights by name."""

    losses: list[float]
    evaluated: float
    weights: dict[str, Tensor]


def batches(vocabulary: int, steps: int, tokens: int = 5) -> list[tuple[Tensor, Tensor]]:
    """For each step the ids and labels [4, tokens] of the global batch."""
    ids = torch.randint(vocabulary, (steps, 4, tokens + 1), generator=torch.Generator().manual_seed(1))
    return [(each[:, :-1].contiguous(), each[:, 1:].contiguous()) for each in ids]


def plain_run(model: nn.Module, given: list[tuple[Tensor, Tensor]], lr: float) -> PlainRun:
    """Train `model` by SGD on the mean over all labels."""

    def loss_of(inputs: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(model(inputs).flatten(0, 1), labels.flatten())

    optimizer, losses = torch.optim.SGD(model.parameters(), lr=lr), []
    for batch in given:
        loss = loss_of(*batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    model.eval()
    with torch.no_grad():
        evaluated = float(loss_of(*given[0]))
    return PlainRun(losses, evaluated, {name: p.detach() for name, p in model.named_parameters()})
