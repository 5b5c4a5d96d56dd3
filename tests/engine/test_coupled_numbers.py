"""A number that a forward gives, and a loop trains on, is a mean over its samples, or is refused on data ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import colossal_lite as cl
from tests.shared.pool import RankEnv, run_world

D = 6


def contrastive(z: Tensor) -> Tensor:
    z = F.normalize(z, dim=1)
    return F.cross_entropy(3 * z @ z.T, torch.arange(len(z)))


LOSSES: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "contrastive": lambda z, w: contrastive(z),
    "contrastive beside outputs": lambda z, w: dict(loss=contrastive(z), logits=z),
    "root of a mean": lambda z, w: z.square().mean().sqrt(),
    "spread": lambda z, w: z.square().mean() - z.std(0).mean(),
    "mean": lambda z, w: (z - 1).square().mean(),
    "weighted mean": lambda z, w: dict(loss=((z - 1).square().mean(1) * w).sum() / w.sum(), logits=z),
    "sum": lambda z, w: (z - 1).square().mean(1).sum(),
    "log beside it": lambda z, w: dict(loss=(z - 1).square().mean(), log=z.detach().norm()),
}
COUPLED = ("contrastive", "contrastive beside outputs", "root of a mean", "spread")


class Model(nn.Module):
    def __init__(self, loss: str) -> None:
        super().__init__()
        self.loss, self.inner = loss, nn.Sequential(nn.Linear(D, D), nn.Tanh(), nn.Linear(D, 3))

    def forward(self, x: Tensor, weights: Tensor) -> Any:
        return LOSSES[self.loss](self.inner(x), weights)


def batch(samples: int) -> tuple[Tensor, Tensor]:
    x = torch.randn(samples, D, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    return x, x[:, 0].abs() + 0.1


def loss_of(model: Any, loss: str, x: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """The loss, a mean over so many."""
    out = model(x, weights)
    out = out["loss"] if isinstance(out, dict) else out
    if loss == "sum":
        return out / len(x), torch.tensor(len(x))
    return out, weights.sum() if loss == "weighted mean" else torch.tensor(len(x))


def trained(env: RankEnv, loss: str, samples: int, stage: int) -> str | dict[str, Tensor]:
    torch.manual_seed(0)
    config = dict(precision="fp64", optimizer=dict(type="sgd", lr=0.2), zero=dict(stage=stage), timeout_s=60)
    with env.launch(config) as context:
        engine = cl.initialize(Model(loss).double(), context=context)
        try:
            for _ in range(3):
                value, count = loss_of(engine, loss, *context.local_batch(batch(samples)))
                engine.backward(value, count=count)
                engine.step()
        except ValueError as error:
            return str(error)
        return engine.full_state_dict()


@pytest.mark.parametrize(("samples", "stage"), [(2, 0), (4, 3), (9, 0)])
@pytest.mark.parametrize("loss", COUPLED)
def test_a_number_between_samples_is_refused_on_data_ranks(loss: str, samples: int, stage: int) -> None:
    for told in run_world(trained, 2, loss, samples, stage):
        assert isinstance(told, str) and "Model gives a number that is no mean over its samples." in told


@pytest.mark.parametrize(
    ("loss", "samples", "ranks"),
    [*((loss, 9, 2) for loss in LOSSES if loss not in COUPLED), *((loss, 4, 1) for loss in COUPLED)],
)
def test_all_others_train_as_in_one_process(loss: str, samples: int, ranks: int) -> None:
    torch.manual_seed(0)
    plain = Model(loss).double()
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.2)
    for _ in range(3):
        optimizer.zero_grad()
        loss_of(plain, loss, *batch(samples))[0].backward()
        optimizer.step()
    for weights in run_world(trained, ranks, loss, samples, 0):
        for name, p in plain.named_parameters():
            torch.testing.assert_close(weights[name], p.detach(), rtol=1e-10, atol=1e-12)


class Words(nn.Module):
    """A model of words: what is proven of it is proven without labels."""

    def __init__(self, loss: str) -> None:
        super().__init__()
        self.loss, self.embed, self.head = loss, nn.Embedding(9, D), nn.Linear(D, 9)

    def forward(self, ids: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        x = torch.tanh(self.embed(ids))
        logits = self.head(x)
        if labels is None:
            return dict(logits=logits)
        total = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
        if self.loss == "sum":
            return dict(logits=logits, loss=total)
        return dict(logits=logits, loss=total / labels.numel() + contrastive(x.mean(1)))


def told_of_words(env: RankEnv, loss: str, stage: int) -> str:
    torch.manual_seed(0)
    config = dict(precision="fp64", optimizer=dict(type="sgd", lr=0.2), zero=dict(stage=stage), timeout_s=60)
    with env.launch(config) as context:
        engine = cl.initialize(Words(loss).double(), context=context)
        ids, labels = context.local_batch((torch.arange(24).view(4, 6) % 9, torch.arange(24).view(4, 6) % 7))
        with pytest.raises(ValueError) as caught:
            engine.backward(engine(ids, labels=labels)["loss"])
        return str(caught.value)


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize(
    ("loss", "words"),
    [("sum", "the loss is a sum over samples"), ("contrastive", "gives a number that is no mean over its samples")],
)  # fmt: skip
def test_a_loss_that_a_model_of_words_gives_is_looked_at_too(loss: str, words: str, stage: int) -> None:
    for told in run_world(told_of_words, 2, loss, stage):
        assert words in told
