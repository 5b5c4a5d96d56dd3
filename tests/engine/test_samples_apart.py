"""A model whose samples see each other is refused where a batch is cut, in data ranks or in micro-batches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import colossal_lite as cl
from tests.shared.pool import RankEnv, run_world

V, D = 13, 8


class Model(nn.Module):
    def __init__(self, way: str) -> None:
        super().__init__()
        self.way, self.words, self.inner = way, nn.Embedding(V, D), nn.Linear(D, D)
        self.attention = nn.MultiheadAttention(D, 2, dropout=0.3, batch_first=True)
        self.drop, self.head = nn.Dropout(0.2), nn.Linear(D, V)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.words(ids)
        if self.way == "mean of the batch":
            x = x - x.mean((0, 1))
        elif self.way == "mean of the batch in training" and self.training:
            x = x - x.detach().mean(0)
        elif self.way == "mean of the batch in evaluation" and not self.training:
            x = x - x.mean(0)
        elif self.way == "attention over samples":
            x = nn.functional.scaled_dot_product_attention(*[x.transpose(0, 1)] * 3).transpose(0, 1)
        elif self.way == "mean of tokens":
            x = x - x.mean(1, keepdim=True)
        elif self.way == "dropout":
            x = self.drop(x)
        elif self.way == "attention with dropout":
            x = x + self.attention(x, x, x)[0]
        elif self.way == "counter":
            self.calls += self.training
            x = x * (1 + 0 * self.calls)
        logits: Tensor = self.head(torch.tanh(self.inner(x)))
        return logits


APART = ("plain", "mean of tokens", "dropout", "attention with dropout", "counter")
TOGETHER = (
    "mean of the batch", "mean of the batch in training", "mean of the batch in evaluation",
    "attention over samples",
)  # fmt: skip


def one_step(env: RankEnv, way: str, more: dict[str, Any]) -> str | float:
    config = dict(precision="fp64", optimizer=dict(type="sgd", lr=0.3), timeout_s=60)
    torch.manual_seed(0)
    with env.launch(config | more) as context:
        try:
            engine = cl.initialize(Model(way).double(), context=context)
        except ValueError as error:
            return str(error)
        ids = torch.randint(V, (4, 7), generator=torch.Generator().manual_seed(1))
        return float(engine.train_step((ids[:, :-1].contiguous(), ids[:, 1:].contiguous())).loss)


CUTS: dict[str, tuple[dict[str, Any], int]] = {
    "data": ({}, 2),
    "accumulated": (dict(gradient_accumulation=2), 1),
}


@pytest.mark.parametrize("cut", ["data", "accumulated"])
@pytest.mark.parametrize("way", TOGETHER)
def test_samples_that_see_each_other_are_refused_where_a_batch_is_cut(way: str, cut: str) -> None:
    more, world = CUTS[cut]
    for told in run_world(one_step, world, way, more):
        assert isinstance(told, str) and "samples of Model see each other" in told
        assert ("data=2" if cut == "data" else "gradient_accumulation=2") in told


@pytest.mark.parametrize("way", [*APART, *TOGETHER])
def test_a_batch_that_is_whole_is_not_refused(way: str) -> None:
    (loss,) = run_world(one_step, 1, way, {})
    assert isinstance(loss, float)


@pytest.mark.parametrize(
    "way, cut",
    [
        (way, cut)
        for way in APART
        for cut in ("data", "accumulated")
        if (way, cut) != ("counter", "accumulated")  # refused in the step: a buffer would count twice
    ],
)
def test_samples_apart_are_not_refused(way: str, cut: str) -> None:
    more, world = CUTS[cut]
    for loss in run_world(one_step, world, way, more):
        assert isinstance(loss, float), loss


class Tempered(nn.Module):
    """Gives its logits, and beside them a parameter of as many values as a part of the batch has samples."""

    def __init__(self, mixes: bool) -> None:
        super().__init__()
        self.mixes, self.inner, self.scale = mixes, nn.Linear(D, V), nn.Parameter(torch.ones(2))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.inner(x - x.mean(0) if self.mixes else x) * self.scale.sum()
        return logits, self.scale


def tempered(env: RankEnv, mixes: bool) -> str | list[float]:
    torch.manual_seed(0)
    with env.launch(dict(precision="fp64", optimizer=dict(type="sgd", lr=0.3), timeout_s=60)) as context:
        engine = cl.initialize(
            Tempered(mixes).double(), context=context, criterion=nn.functional.cross_entropy
        )
        batch = torch.randn(4, D, dtype=torch.float64), torch.arange(4)
        try:
            return [float(engine.train_step(context.local_batch(batch)).loss) for _ in range(3)]
        except ValueError as error:
            return str(error)


def test_an_output_that_is_not_of_samples_is_not_taken_for_one() -> None:
    (serial,) = run_world(tempered, 1, False)
    for losses in run_world(tempered, 2, False):
        assert losses == pytest.approx(serial, rel=1e-12)
    for told in run_world(tempered, 2, True):
        assert isinstance(told, str) and "samples of Tempered see each other" in told


READS: dict[str, Callable[[Tensor], float]] = {
    "float": lambda x: float(x.mean()),
    "list": lambda x: sum(x.flatten().tolist()),
    "array": lambda x: x.numpy().sum(),
    "shape": lambda x: 2 * x[x > 0].numel() - x.numel(),
    "places": lambda x: 2 * len((x > 0).nonzero()) - x.numel(),
}
"""How code reads a value that is positive in half of all batches."""


LIMITS: dict[str, Callable[[Tensor], Any]] = {
    "any": lambda x: (x > 2.5).any(),
    "deviation": lambda x: x.std() > 1,
    "largest": lambda x: float(x.amax()) > 3,
    "norm": lambda x: x.norm() ** 2 > x.numel(),
    "rounded": lambda x: (4 * x.mean()).round() > 0,
}
"""Conditions on a value that most first batches and their halves meet alike, and later ones may not."""


class Branched(nn.Module):
    """Takes a branch by the mean of a batch, or of each sample. Its first values decide which batches show it."""

    def __init__(self, takes_ids: bool, of_batch: bool, seed: int, read: str) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.of_batch, self.read = of_batch, read
        self.words = nn.Embedding(V, D) if takes_ids else nn.Linear(4, D)
        self.one, self.other, self.head = nn.Linear(D, D), nn.Linear(D, D), nn.Linear(D, V)

    def forward(self, inputs: Tensor) -> Tensor:
        x = self.words(inputs)
        parts = [x] if self.of_batch else x.split(1)
        branches = [self.one if READS[self.read](part.detach()) > 0 else self.other for part in parts]
        logits: Tensor = self.head(
            torch.cat([f(part) for f, part in zip(branches, parts, strict=True)]).relu()
        )
        return logits


def branched(env: RankEnv, takes_ids: bool, of_batch: bool, seed: int, read: str) -> str:
    """The refusal of a loop that accumulates, or "" after three steps."""
    config = dict(precision="fp64", optimizer=dict(type="sgd", lr=0.1), gradient_accumulation=3)
    draw = torch.Generator().manual_seed(1)
    with env.launch(config) as context:
        try:
            engine = cl.initialize(Branched(takes_ids, of_batch, seed, read).double(), context=context)
            for number in range(9):
                numbers = torch.randn(4, 4, generator=draw, dtype=torch.float64)
                inputs = torch.randint(V, (4, 4), generator=draw) if takes_ids else numbers
                logits = engine(inputs).flatten(0, -2)
                engine.backward(
                    nn.functional.cross_entropy(logits, torch.randint(V, logits.shape[:1], generator=draw))
                )
                if number % 3 == 2:
                    engine.step()
        except ValueError as error:
            return str(error)
        return ""


@pytest.mark.parametrize("takes_ids", [True, False])
@pytest.mark.parametrize(
    ("read", "seed"), [*(("float", n) for n in range(8)), *((read, n) for read in READS for n in (3, 5))]
)
def test_a_branch_by_the_mean_of_a_batch_is_seen_though_one_batch_may_not_show_it(
    read: str, seed: int, takes_ids: bool
) -> None:
    (told,) = run_world(branched, 1, takes_ids, True, seed, read)
    assert "samples of Branched see each other" in told


@pytest.mark.parametrize("read", READS)
@pytest.mark.parametrize("takes_ids", [True, False])
def test_a_branch_by_the_mean_of_each_sample_trains(takes_ids: bool, read: str) -> None:
    assert run_world(branched, 1, takes_ids, False, 0, read) == [""]


class Limited(nn.Module):
    """Takes one of two layers by a condition on a batch, or on each sample: in a branch, or by torch.where."""

    def __init__(self, limit: str, of_batch: bool, in_code: bool, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.limit, self.of_batch, self.in_code = limit, of_batch, in_code
        self.words = nn.Embedding(V, D)
        self.one, self.other, self.head = nn.Linear(D, D), nn.Linear(D, D), nn.Linear(D, V)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.words(ids)
        made = [self.chosen(part) for part in ([x] if self.of_batch else x.split(1))]
        logits: Tensor = self.head((torch.cat(made) + x).relu())
        return logits

    def chosen(self, x: Tensor) -> Tensor:
        is_met = LIMITS[self.limit](x.detach())
        if self.in_code:
            return self.one(x) if is_met else self.other(x)
        return torch.where(torch.as_tensor(is_met), self.one(x), self.other(x))


def limited(env: RankEnv, limit: str, of_batch: bool, in_code: bool, seed: int) -> str:
    """What initialize refuses, or ""."""
    config = dict(precision="fp64", optimizer=dict(type="sgd", lr=0.1), gradient_accumulation=2)
    with env.launch(config) as context:
        try:
            cl.initialize(Limited(limit, of_batch, in_code, seed).double(), context=context)
        except ValueError as error:
            return str(error)
        return ""


@pytest.mark.parametrize("in_code", [True, False])
@pytest.mark.parametrize("limit", LIMITS)
def test_a_branch_that_no_first_batch_shows_is_found_with_other_weights(limit: str, in_code: bool) -> None:
    for seed in range(3):
        (told,) = run_world(limited, 1, limit, True, in_code, seed)
        assert "samples of Limited see each other" in told
        assert run_world(limited, 1, limit, False, in_code, seed) == [""], "each sample by itself"


class Harmless(nn.Module):
    """Acts on each sample alone, in a way that other weights make long, large or not a number."""

    def __init__(self, way: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.way, self.words, self.one, self.head = way, nn.Embedding(V, D), nn.Linear(D, D), nn.Linear(D, V)
        self.gain = nn.Parameter(torch.ones(()))
        with torch.no_grad():
            self.one.weight.mul_(0.3)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.words(ids)
        x = getattr(self, self.way)(x)
        logits: Tensor = self.head(x if float(self.gain) < 10 else -x)
        return logits

    def to_a_fixed_point(self, x: Tensor) -> Tensor:
        def solved(x: Tensor) -> Tensor:
            z = torch.zeros_like(x)
            while True:
                last, z = z, (self.one(z) + x).tanh()
                if float((z - last).abs().max()) < 1e-9:
                    return z

        return torch.cat([solved(sample) for sample in x.split(1)])

    def as_long_as_it_says(self, x: Tensor) -> Tensor:
        def frames(x: Tensor) -> Tensor:
            lengths = (3 * self.one(x.detach())[..., 0]).exp().round().long().clamp(1).flatten()
            return x.flatten(0, 1).repeat_interleave(lengths, 0).mean(0).expand(1, *x.shape[1:])

        return torch.cat([frames(sample) for sample in x.split(1)])

    def gated(self, x: Tensor) -> Tensor:
        gate = self.one(x).tanh()
        return gate * x + (1 - gate**2).sqrt() * self.one(x)

    def one_sample_otherwise(self, x: Tensor) -> Tensor:
        return x + x.squeeze().square().sum(0, keepdim=True) if len(x) == 1 else x


def harmless(env: RankEnv, way: str) -> str:
    """What initialize refuses, or ""."""
    config = dict(precision="fp64", optimizer=dict(type="sgd", lr=0.1), gradient_accumulation=2)
    with env.launch(config) as context:
        try:
            cl.initialize(Harmless(way).double(), context=context)
        except ValueError as error:
            return str(error)
        return ""


@pytest.mark.parametrize("way", ["to_a_fixed_point", "as_long_as_it_says", "gated", "one_sample_otherwise"])
def test_what_only_other_weights_make_long_large_or_no_number_is_not_refused(way: str) -> None:
    assert run_world(harmless, 1, way) == [""]


class FirstWords(Limited):
    """Reads words that are no block of memory before it takes a branch."""

    def forward(self, ids: Tensor) -> Tensor:
        assert len(ids[:, 0].unique()) and len(ids[:, ::2].topk(2, -1)[1][..., 0])
        return super().forward(ids)


def first_words(env: RankEnv, seed: int) -> str:
    config = dict(precision="fp64", optimizer=dict(type="sgd", lr=0.1), gradient_accumulation=2)
    with env.launch(config) as context:
        try:
            cl.initialize(FirstWords("deviation", True, True, seed).double(), context=context)
        except ValueError as error:
            return str(error)
        return ""


@pytest.mark.parametrize("seed", range(3))
def test_integers_in_any_layout_end_no_search(seed: int) -> None:
    (told,) = run_world(first_words, 1, seed)
    assert "samples of FirstWords see each other" in told
