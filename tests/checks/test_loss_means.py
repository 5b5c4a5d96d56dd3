"""A loss without a count is a mean over as many labels on every data rank, or a warning tells: read from its graph."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import colossal_lite as cl
from colossal_lite.checks.loss_means import denominators
from tests.shared.pool import RankEnv, run_world

WORDS, STEPS = 5, 3
EVEN = ((0, 1, 2), (3, 4, 0), (1, 2, 3), (4, 4, 4))
FEWER = ((0, 1, 2), (3, 4, 0), (1, -100, -100), (4, 4, -100))
"""Labels of two samples for each of two ranks, which the model does not get."""
WEIGHTS = torch.arange(1.0, WORDS + 1, dtype=torch.float64)


def each(z: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(z.flatten(0, 1), y.flatten(), reduction="none")


def masked(z: Tensor, y: Tensor) -> Tensor:
    return each(z, y).sum() / (y >= 0).sum()


def mean(z: Tensor, y: Tensor, **more: Any) -> Tensor:
    return F.cross_entropy(z.flatten(0, 1), y.flatten(), **more)


LOSSES: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], Callable[[Tensor], Tensor]]] = {
    "mean": (mean, lambda y: (y >= 0).sum()),
    "of classes": (lambda z, y: F.cross_entropy(z.transpose(1, 2), y), lambda y: (y >= 0).sum()),
    "class weights": (lambda z, y: mean(z, y, weight=WEIGHTS), lambda y: (WEIGHTS[y.clamp(min=0)] * (y >= 0)).sum()),
    "divided": (masked, lambda y: (y >= 0).sum()),
    "log": (lambda z, y: F.nll_loss(z.log_softmax(-1).flatten(0, 1), y.flatten()), lambda y: (y >= 0).sum()),
    "halves": (lambda z, y: (mean(z, y) + masked(z, y)) / 2, lambda y: (y >= 0).sum()),
    "scaled": (lambda z, y: mean(z, y) * 0.5, lambda y: (y >= 0).sum()),
    "smooth": (lambda z, y: mean(z, y, label_smoothing=0.1), lambda y: (y >= 0).sum()),
    "smooth class weights": (
        lambda z, y: mean(z, y, label_smoothing=0.1, weight=WEIGHTS),
        lambda y: (WEIGHTS[y.clamp(min=0)] * (y >= 0)).sum(),
    ),
    "of chosen": (lambda z, y: each(z, y)[y.flatten() >= 0].mean(), lambda y: (y >= 0).sum()),
    "quarters": (lambda z, y: (masked(z, y) + mean(z, y)) * 0.25, lambda y: (y >= 0).sum()),
    "given by the forward": (mean, lambda y: (y >= 0).sum()),
}  # fmt: skip


class Model(nn.Module):
    """Gives logits, and a mean over `answers`, a name that the engine does not take for labels."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(WORDS, 4), nn.Linear(4, WORDS)

    def forward(self, ids: Tensor, answers: Tensor | None = None) -> Any:
        z = self.head(torch.tanh(self.embed(ids)))
        return z if answers is None else dict(logits=z, loss=mean(z, answers))


def loss_of(model: Any, name: str, x: Tensor, y: Tensor) -> Tensor:
    found: Tensor = model(x, answers=y)["loss"] if "forward" in name else LOSSES[name][0](model(x), y)
    return found


def batch(labels: Any) -> tuple[Tensor, Tensor]:
    return torch.arange(12).view(4, 3) % WORDS, torch.tensor(labels)


def new_model() -> nn.Module:
    torch.manual_seed(0)
    return Model().double()


def trained(
    env: RankEnv, name: str, labels: Any, counts: bool, stage: int
) -> tuple[list[str], dict[str, Tensor]]:
    with (
        warnings.catch_warnings(record=True) as said,
        env.launch(
            dict(precision="fp64", optimizer=dict(type="sgd", lr=0.2), zero=dict(stage=stage), timeout_s=60)
        ) as context,
    ):
        engine = cl.initialize(new_model(), context=context)
        warnings.simplefilter("always")
        x, y = context.local_batch(batch(labels))
        for _ in range(STEPS):
            loss = loss_of(engine, name, x, y)
            engine.backward(loss, **(dict(count=LOSSES[name][1](y)) if counts else {}))
            engine.step()
        told = [str(each.message) for each in said if "the mean of the ranks' means" in str(each.message)]
        return told, engine.full_state_dict()


def assert_exact(name: str, labels: Any, found: list[dict[str, Tensor]], parts: int = 1) -> None:
    """`parts`: the loss is the mean of the means of so many parts of the batch."""
    model = new_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    for _ in range(STEPS):
        optimizer.zero_grad()
        for x, y in zip(*(each.tensor_split(parts) for each in batch(labels)), strict=True):
            (loss_of(model, name, x, y) / parts).backward()
        optimizer.step()
    for state in found:
        for key, p in model.named_parameters():
            torch.testing.assert_close(state[key], p.detach(), rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize("name", LOSSES)
def test_of_a_mean_over_other_numbers_of_labels_on_ranks_a_warning_tells_once(name: str) -> None:
    (told, state), (none, _) = run_world(trained, 2, name, FEWER, False, 0)
    assert len(told) == 1 and "engine.backward(loss, count=n)" in told[0] and not none
    assert_exact(name, FEWER, [state], parts=2)
    for none, state in run_world(trained, 2, name, FEWER, True, 3):
        assert not none
        assert_exact(name, FEWER, [state])


@pytest.mark.parametrize("name", [name for name in LOSSES if "class weights" not in name])
def test_a_mean_over_equally_many_labels_needs_no_count(name: str) -> None:
    for told, state in run_world(trained, 2, name, EVEN, False, 0):
        assert not told
        assert_exact(name, EVEN, [state])


def test_class_weights_are_compared_where_labels_are_equally_many() -> None:
    (told, _), _ = run_world(trained, 2, "class weights", EVEN, False, 0)
    assert len(told) == 1 and "divide by 16 on rank 0, and by 24 on rank 1" in told[0]


def weighed_by_hand(env: RankEnv) -> dict[str, Tensor]:
    """A loop that weighs its own mean by a factor."""
    with env.launch(dict(precision="fp64", optimizer=dict(type="sgd", lr=0.2), timeout_s=60)) as context:
        engine = cl.initialize(new_model(), context=context)
        x, y = context.local_batch(batch(FEWER))
        for _ in range(STEPS):
            factor = 2 * int((y >= 0).sum()) / int((batch(FEWER)[1] >= 0).sum())
            engine.backward(mean(engine(x), y) * factor)
            engine.step()
        return engine.full_state_dict()


def test_a_rank_may_weigh_its_mean_by_a_factor() -> None:
    assert_exact("mean", FEWER, run_world(weighed_by_hand, 2))


def test_what_a_mean_divides_by_is_read_from_the_graph() -> None:
    z, y = torch.randn(4, 3, WORDS, requires_grad=True), torch.tensor(FEWER)
    read = {name: denominators(loss(z.double(), y)) for name, (loss, _) in LOSSES.items()}
    weighted = float(LOSSES["class weights"][1](y))
    expected = {
        "class weights": [[weighted] * 3],
        "halves": [[18.0] * 3] * 2,
        "scaled": [[9.0, 9.0, 18.0]],
        "smooth": [[9.0, 9.0, 9 * WORDS / 0.1], [9.0, 9.0, 9 / 0.9]],
        "smooth class weights": [[weighted, weighted, x * weighted] for x in (WORDS / 0.1, 1 / 0.9)],
        "quarters": [[9.0, 9.0, 36.0]] * 2,
    }
    for name, found in read.items():
        assert found is not None
        pairs = torch.tensor(expected.get(name, [[9.0] * 3]), dtype=torch.float64)
        torch.testing.assert_close(found, pairs, rtol=1e-12, atol=0.0, msg=name)
    each_mean = z.square().mean((0, -1)).mean() * 2 + F.mse_loss(z, z.detach())
    expected_means = [[60.0, 60.0, 60.0], [60.0, 60.0, 30.0]]
    assert denominators(each_mean).tolist() == expected_means  # type: ignore[union-attr]
    counted = denominators(mean(z, y).nan_to_num() * 0.5, count=torch.tensor(3))
    assert counted is not None and counted.tolist() == [[9.0, 3.0, 6.0]]
    two = denominators(torch.add(mean(z, y), z.square().mean(), alpha=4) - mean(z, y) * 2)
    assert two is not None and two.tolist() == [[9.0, 9.0, 4.5], [60.0, 60.0, 15.0], [9.0, 9.0, 9.0]]
    for other in (z.sum(), mean(z, y, reduction="sum"), z.sum() * 2):
        assert denominators(other) is None


MISCOUNTED: dict[str, tuple[str, Any, Callable[[Tensor], Any]]] = {
    "samples": ("mean", FEWER, lambda y: len(y)),
    "labels beside class weights": ("class weights", FEWER, lambda y: (y >= 0).sum()),
    "all tokens": ("smooth", FEWER, lambda y: y.numel()),
}


def counted(env: RankEnv, name: str, labels: Any, count_of: str) -> list[str]:
    with (
        warnings.catch_warnings(record=True) as said,
        env.launch(dict(precision="fp64", optimizer=dict(type="sgd", lr=0.2), timeout_s=60)) as context,
    ):
        engine = cl.initialize(new_model(), context=context)
        warnings.simplefilter("always")
        x, y = context.local_batch(batch(labels))
        for _ in range(STEPS):
            loss = loss_of(engine, name, x, y).nan_to_num()
            if count_of == "of parameters":
                loss = loss + sum(p.square().mean() for p in engine.model.parameters())
            engine.backward(
                loss, count=(MISCOUNTED[count_of][2] if count_of in MISCOUNTED else LOSSES[name][1])(y)
            )
            engine.step()
        return [str(each.message) for each in said if "times the count" in str(each.message)]


@pytest.mark.parametrize("count_of", MISCOUNTED)
def test_a_count_of_something_else_than_the_mean_divides_by_is_told_once(count_of: str) -> None:
    name, labels, _ = MISCOUNTED[count_of]
    told, none = run_world(counted, 2, name, labels, count_of)
    assert len(told) == 1 and "weighs otherwise than in one process" in told[0] and not none


@pytest.mark.parametrize(
    ("name", "labels"), [("mean", FEWER), ("mean", (*EVEN[:2], *[(-100,) * 3] * 2)), ("smooth", FEWER)]
)
def test_a_mean_of_parameters_and_a_rank_without_labels_need_no_word(name: str, labels: Any) -> None:
    assert run_world(counted, 2, name, labels, "of parameters") == [[], []]


def at_count(env: RankEnv, count: Any) -> tuple[str, dict[str, Tensor]]:
    """The refusal of a count, if any, and the weights after steps."""
    with env.launch(dict(precision="fp64", optimizer=dict(type="sgd", lr=0.2), timeout_s=60)) as context:
        engine, told = cl.initialize(new_model(), context=context), ""
        x, y = context.local_batch(batch(EVEN))
        for _ in range(STEPS):
            loss = mean(engine(x), y)
            try:
                engine.backward(loss, count=count)
            except ValueError as error:
                told = str(error)
                engine.backward(loss, count=6)
            engine.step()
        return told, engine.full_state_dict()


NUMBERS = {
    "[1]": torch.tensor([6]), "of a graph": torch.tensor(6.0, requires_grad=True), "numpy": numpy.int64(6),
    "numpy [1]": numpy.array([6]), "float": 6.0,
}  # fmt: skip
NO_NUMBERS = {
    "below 0": -6, "tensor below 0": torch.tensor(-6), "nan": float("nan"), "inf": torch.tensor(torch.inf),
    "text": "6", "two": torch.tensor([3, 3]), "list": [6], "complex": 6j,
}  # fmt: skip


@pytest.mark.parametrize("name", NUMBERS | NO_NUMBERS)
def test_a_count_is_one_number_or_refused_before_anything_is_added(name: str) -> None:
    found = run_world(at_count, 2, (NUMBERS | NO_NUMBERS)[name])
    assert_exact("mean", EVEN, [state for _, state in found])
    for told, _ in found:
        assert ("legal: one number of labels, 0 or more, or None" in told) == (name in NO_NUMBERS)


class Recomputes(Model):
    """Its loss is run again in backward, by weights that ZeRO-3 gathers for it."""

    def forward(self, ids: Tensor, answers: Tensor | None = None) -> Any:
        return checkpoint(super().forward, ids, answers, use_reentrant=False)


def recomputed(env: RankEnv, stage: int) -> dict[str, Tensor]:
    torch.manual_seed(0)
    config = dict(precision="fp64", optimizer=dict(type="sgd", lr=0.2), zero=dict(stage=stage), timeout_s=60)
    with env.launch(config) as context:
        engine = cl.initialize(Recomputes().double(), context=context)
        x, y = context.local_batch(batch(EVEN))
        for _ in range(STEPS):
            engine.backward(engine(x, answers=y)["loss"])
            engine.step()
        return engine.full_state_dict()


@pytest.mark.parametrize("stage", [0, 3])
def test_a_loss_that_is_recomputed_is_not_read_before_its_backward(stage: int) -> None:
    assert_exact("mean", EVEN, run_world(recomputed, 2, stage))


class Told(Model):
    """Gets its labels by the name that the engine takes for labels."""

    def forward(self, ids: Tensor, labels: Tensor | None = None) -> Any:
        return super().forward(ids, labels)


def updated_in_backward(env: RankEnv) -> tuple[str, bool, dict[str, Tensor]]:
    """The refusal, whether the weights are those of before, and those after steps with counts."""
    optimizer = dict(type="sgd", lr=0.2, update_when="backward")
    with env.launch(dict(precision="fp64", optimizer=optimizer, timeout_s=60)) as context:
        torch.manual_seed(0)
        engine = cl.initialize(Told().double(), context=context)
        before = {name: x.clone() for name, x in engine.full_state_dict().items()}
        x, y = context.local_batch(batch(FEWER))
        with pytest.raises(ValueError) as caught:
            engine.backward(engine(x, labels=y)["loss"])
        after = engine.full_state_dict()
        is_unchanged = all(torch.equal(before[name], after[name]) for name in before)
        engine.zero_grad()
        for _ in range(STEPS):
            engine.backward(engine(x, labels=y)["loss"], count=(y >= 0).sum())
            engine.step()
        return str(caught.value), is_unchanged, engine.full_state_dict()


def test_ranks_are_compared_before_an_update_within_backward() -> None:
    for told, is_unchanged, state in run_world(updated_in_backward, 2):
        assert "Rank 0 has 6 valid labels, rank 1 has 3. Nothing was updated" in told and is_unchanged
        assert_exact("mean", FEWER, [state])
