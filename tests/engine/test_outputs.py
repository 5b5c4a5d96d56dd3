"""What a model may give instead of plain logits, what a criterion gets, and one engine for a model."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import colossal_lite as cl
from colossal_lite.parallel.loss import logits_of
from colossal_lite.parallel.own_criterion import CriterionResult, OwnCriterion
from tests.shared.pool import RankEnv, WorldError, run_world

CONFIG: dict[str, Any] = dict(precision="fp64", optimizer=dict(type="sgd", lr=0.1), timeout_s=30)
PLAN = {"layers.0": "embedding", "layers.1": "lm_head"}
TOKENS = torch.randint(50, (8, 9), generator=torch.Generator().manual_seed(0))
FORMS: dict[str, Any] = {
    "logits": lambda logits: logits,
    "tuple": lambda logits: (logits, None),
    "dict": lambda logits: {"logits": logits},
    "dict with a loss": lambda logits: {"loss": logits.logsumexp(-1).mean(), "logits": logits},
    "object": lambda logits: SimpleNamespace(logits=logits),
}


class Net(nn.Module):
    def __init__(self, form: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers, self.form = nn.Sequential(nn.Embedding(50, 8), nn.Linear(8, 50)), FORMS[form]

    def forward(self, x: Tensor) -> Any:
        return self.form(self.layers(x))


def trained(env: RankEnv, form: str, tensor: int) -> tuple[float, float]:
    """The loss of a step, and of the next one in a loop of one's own."""
    with env.launch(CONFIG | dict(parallel=dict(tensor=tensor))) as context:
        engine = cl.initialize(Net(form), context=context, plan=PLAN)
        inputs, labels = context.local_batch((TOKENS[:, :-1].contiguous(), TOKENS[:, 1:].contiguous()))
        first = engine.train_step((inputs, labels)).loss
        outputs = engine(inputs)
        found = outputs["logits"] if isinstance(outputs, dict) else getattr(outputs, "logits", outputs)
        found = found[0] if isinstance(found, tuple) else found
        loss = nn.functional.cross_entropy(found.flatten(0, 1), labels.flatten())
        engine.backward(loss, count=labels.numel())
        engine.step()
        return first.item(), loss.item()


def test_logits_may_come_in_any_form_and_are_whole_in_a_loop_of_ones_own() -> None:
    (truth,) = run_world(trained, 1, "logits", 1)
    for form in FORMS:
        for row in run_world(trained, 2, form, 2):
            assert row == pytest.approx(truth, rel=1e-12), form


@pytest.mark.parametrize(
    ("outputs", "says"),
    [
        (None, "model: forward gives None; legal: logits, a tuple that begins with them"),
        ((None, torch.zeros(2)), "a tuple of (NoneType, Tensor)"),
        ({"out": torch.zeros(2)}, "a dict with 'out': Tensor"),
        ({"logits": None}, "a dict with 'logits': NoneType"),
        ([1, 2], "a list of (int, int)"),
        (torch.zeros(2, 3, dtype=torch.int64), "a tensor (2, 3) of torch.int64"),
        ((), "a tuple of ()"),
    ],
)
def test_what_a_model_gives_in_place_of_logits_is_named_by_its_types(outputs: Any, says: str) -> None:
    with pytest.raises(ValueError) as error:
        logits_of(outputs)
    assert says in str(error.value)


def misused(env: RankEnv, how: str) -> str:
    with env.launch(CONFIG | dict(lr_scheduler=dict(type="cosine", total_steps=2))) as context:
        model = Net("logits")
        batch = TOKENS[:, :-1].contiguous(), TOKENS[:, 1:].contiguous()
        if how == "criterion":
            engine = cl.initialize(model, context=context, criterion=nn.CrossEntropyLoss())
            with pytest.raises(RuntimeError, match="Expected target size") as caught:
                engine.train_step(batch)
            return str(caught.value.__notes__)
        engine = cl.initialize(model, context=context)
        if how == "ids":
            with pytest.raises(IndexError) as caught:
                engine.train_step((batch[0] + 1000, batch[1]))
            return str(caught.value.__notes__)
        if how == "twice":
            with pytest.raises(ValueError) as refused:
                cl.initialize(model, context=context)
            engine.train_step(batch)
            engine.close()
            cl.initialize(model, context=context).train_step(batch)
            return str(refused.value)
        engine.train_step(batch), engine.train_step(batch)
        with pytest.warns(UserWarning) as warned:
            engine.train_step(batch)
            engine.train_step(batch)
        return str([str(each.message) for each in warned])


@pytest.mark.parametrize(
    ("how", "says"),
    [
        (
            "criterion",
            "criterion: it gets logits (8, 8, 50), (samples, tokens, vocabulary), and labels (8, 8)",
        ),
        (
            "twice",
            "model: an engine trains it already; legal: one call of initialize for a model, or engine.close()",
        ),
        (
            "ids",
            "batch: the ids go from 1000 to 1049, and (8, 8) is their shape; legal: ids below the rows of",
        ),
        (
            "schedule",
            "['lr_scheduler.total_steps=2 is less than the run has, 3: from step 3 on the learning rate is 0 of "
            "its peak']",
        ),
    ],
)
def test_what_is_misunderstood_is_told(how: str, says: str) -> None:
    assert says in run_world(misused, 1, how)[0]


# ---- losses of parts ----

LABELS = torch.tensor([0, 1, 2, 3, -100, 2, 0, 3])
CLASS_WEIGHTS = torch.tensor([0.2, 1.0, 3.0, 0.5], dtype=torch.float64)


def of_pairs(logits: Tensor, labels: Tensor) -> Tensor:
    """Each sample beside all others, as contrastive losses have it."""
    return F.cross_entropy(logits @ logits.T, torch.arange(len(labels)))


def of_two_or_more(logits: Tensor, labels: Tensor) -> Tensor:
    if len(labels) < 2:
        raise ValueError("no pairs")
    return of_pairs(logits, labels)


def of_spread(logits: Tensor, labels: Tensor) -> Tensor:
    """NaN for a single sample."""
    return F.cross_entropy(logits, labels) + logits.std(0).sum()


def of_parts(logits: Tensor, labels: Tensor) -> tuple[Tensor, int]:
    """A weighted mean as a sum of its own."""
    weights = torch.where(labels == -100, 0.0, CLASS_WEIGHTS[labels.clamp(min=0)])
    losses = F.cross_entropy(logits, labels, reduction="none")
    return (losses * weights).sum(), weights.sum()


ADDS_UP = dict(
    mean=F.cross_entropy, smoothed=partial(F.cross_entropy, label_smoothing=0.1), parts=of_parts,
)  # fmt: skip
DOES_NOT = dict(
    sum=partial(F.cross_entropy, reduction="sum"), weighted=partial(F.cross_entropy, weight=CLASS_WEIGHTS),
    pairs=of_pairs, two=of_two_or_more, spread=of_spread,
)  # fmt: skip


def vectors_with(criterion: Any, labels: Tensor, **config: Any) -> float:
    """The loss of a step of a linear."""
    with cl.launch(dict(precision="fp64", seed=3) | config, rank=0, world_size=1) as context:
        engine = cl.initialize(lambda: nn.Linear(6, 4), context=context, criterion=criterion)
        inputs = torch.randn(8, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        return float(engine.train_step((inputs.to(engine.model.weight.dtype), labels)).loss)


@pytest.mark.parametrize(
    "name, micro_batches",
    [
        (name, count)
        for name in (*ADDS_UP, *DOES_NOT)
        for count in (2, 4, 8)
        if count < 8 or name not in ("two", "spread")  # which have no loss of one sample
    ],
)
def test_a_criterion_whose_parts_do_not_add_up_is_refused_where_a_batch_is_cut(
    name: str, micro_batches: int
) -> None:
    criterion: Any = (ADDS_UP | DOES_NOT)[name]
    whole = vectors_with(criterion, LABELS)
    if name in ADDS_UP:
        assert vectors_with(criterion, LABELS, gradient_accumulation=micro_batches) == pytest.approx(
            whole, rel=1e-13
        )
        return
    with pytest.raises(
        ValueError, match="criterion: it gives .*Legal: a mean over all labels that are not -100, or"
    ):
        vectors_with(criterion, LABELS, gradient_accumulation=micro_batches)


def of_samples(logits: Tensor, labels: Tensor) -> tuple[Tensor, int]:
    """A mean over samples, also those without a label."""
    return F.cross_entropy(logits, labels, reduction="sum"), len(labels)


def of_squares(logits: Tensor, labels: Tensor) -> tuple[Tensor, int]:
    """Reads logits without a label too, and writes in them."""
    return logits.mul_(2.0).square().sum(), logits.numel()


def of_numpy(logits: Tensor, labels: Tensor) -> tuple[Tensor, Any]:
    return F.cross_entropy(logits, labels, reduction="sum"), (labels.numpy() >= 0).sum()


def of_any(logits: Tensor, labels: Tensor) -> Tensor:
    if not (labels >= 0).any():
        raise IndexError("no labels")
    return F.cross_entropy(logits, labels)


@pytest.mark.parametrize("criterion", [of_samples, of_squares, of_numpy, of_any, F.cross_entropy])
@pytest.mark.parametrize("parts", [2, 4, 8])
def test_a_part_without_labels_has_the_count_that_its_criterion_gives(criterion: Any, parts: int) -> None:
    labels = torch.tensor([0, 1, 2, -100, -100, -100, -100, -100])
    whole = vectors_with(criterion, labels)
    assert vectors_with(criterion, labels, gradient_accumulation=parts) == pytest.approx(whole, rel=1e-13)


@pytest.mark.parametrize(
    "given, told",
    [
        (lambda loss, logits: (loss, logits), r"tuple, Tensor \(\), Tensor \(8, 4\)"),
        (lambda loss, logits: (loss, dict(accuracy=0.5)), r"tuple, Tensor \(\), dict"),
        (lambda loss, logits: (float(loss.detach()), 8), "tuple, float, int"),
        (lambda loss, logits: (loss[None], 8), r"tuple, Tensor \(1,\), int"),
        (lambda loss, logits: (loss, 1, 2), r"tuple, Tensor \(\), int, int"),
        (lambda loss, logits: dict(loss=loss), "dict"),
        (lambda loss, logits: loss[None], r"Tensor \(1,\)"),
    ],
)
def test_a_result_that_is_no_sum_and_count_is_refused_by_its_types(given: Any, told: str) -> None:
    with pytest.raises(
        ValueError, match=f"criterion returned {told}; legal: a tuple \\(sum, count\\), of a number"
    ):
        vectors_with(lambda logits, labels: given(F.cross_entropy(logits, labels), logits), LABELS)


def half_as_it_is(logits: Tensor, labels: Tensor) -> Tensor:
    """Computed in 16 bits, returned in 32."""
    return F.cross_entropy(logits, labels).float()


def of_four(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.view(4, 4), labels.view(4))


def in_place(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.div_(0.5), labels)


def that_cancels(logits: Tensor, labels: Tensor) -> Tensor:
    signs = torch.tensor([1.0, -1.0] * (len(logits) // 2), dtype=logits.dtype)
    return (logits[:, 0] * signs).mean()


def own_hook(logits: Tensor, labels: Tensor) -> Tensor:
    logits.register_hook(lambda gradient: gradient)
    return F.cross_entropy(logits, labels)


LAWFUL = dict(cast=half_as_it_is, four=of_four, in_place=in_place, cancels=that_cancels, hook=own_hook)


@pytest.mark.parametrize("precision", ["bf16", "fp32", "fp64"])
@pytest.mark.parametrize("name", LAWFUL)
def test_what_cannot_be_judged_or_adds_up_to_rounding_is_not_refused(name: str, precision: str) -> None:
    labels = torch.tensor([0, 1, 2, 3, 1, 2, 0, 3])
    loss = vectors_with(LAWFUL[name], labels, gradient_accumulation=2, precision=precision)
    if name in ("cast", "four", "hook"):
        whole = vectors_with(half_as_it_is, labels, precision=precision)
        assert loss == pytest.approx(
            whole, rel=2e-2 if precision == "bf16" else 1e-6
        )  # three roundings to 8 bits


def test_terms_of_a_loss_that_cancel_are_judged_by_their_size() -> None:
    loss, labels = OwnCriterion(that_cancels), torch.zeros(64, dtype=torch.int64)
    for seed in range(20):
        logits = 1.0 + 1e-3 * torch.randn(64, 2, generator=torch.Generator().manual_seed(seed))
        total = that_cancels(logits, labels) * len(labels)
        loss._refuse_other_sums(CriterionResult(logits, labels, total, len(labels)))
        with pytest.raises(ValueError, match="criterion: it gives"):
            loss._refuse_other_sums(CriterionResult(logits, labels, total + 0.1 * len(labels), len(labels)))


def test_a_criterion_that_counts_its_calls_is_refused_with_the_reason_where_a_batch_is_cut() -> None:
    calls = list[int]()

    def anneal(logits: Tensor, labels: Tensor) -> Tensor:
        calls.append(1)
        return F.cross_entropy(logits, labels) + 0.01 * len(calls) * logits.square().mean()

    with pytest.raises(
        ValueError, match="for the same logits and labels. So it has state that its calls change"
    ):
        vectors_with(anneal, LABELS, gradient_accumulation=2)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_a_single_sample_is_judged_by_its_tokens(reduction: str) -> None:
    def criterion(logits: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction=reduction)

    with cl.launch(CONFIG | dict(gradient_accumulation=len(TOKENS)), rank=0, world_size=1) as context:
        engine = cl.initialize(Net("logits"), context=context, criterion=criterion)
        batch = TOKENS[:, :-1].contiguous(), TOKENS[:, 1:].contiguous()
        if reduction == "mean":
            engine.train_step(batch)
            return
        with pytest.raises(ValueError, match="criterion: it gives"):
            engine.train_step(batch)


def test_a_first_loss_that_is_not_finite_does_not_end_the_judging() -> None:
    calls = 0

    def criterion(logits: Tensor, labels: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        return F.cross_entropy(logits, labels, reduction="sum") * (float("nan") if calls == 1 else 1.0)

    with pytest.raises(ValueError, match="criterion: it gives"):
        vectors_with(criterion, LABELS, gradient_accumulation=4)


@pytest.mark.parametrize("labels", [[0, 0, 0, 1, 0, 0, 0, 0], [0, 0, 1, -100, 0, 0, 0, 0]])
def test_an_accuracy_beside_the_loss_is_not_taken_as_its_count(labels: list[int]) -> None:
    """Neither in one process nor where a batch is cut. A count may be the sum of any weights."""
    whole = torch.tensor(labels)

    def with_accuracy(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        right = (labels == 0)[labels != -100].float().mean()  # of a model that says 0
        return F.cross_entropy(logits, labels), right

    def with_weights(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        weights = torch.tensor([0.3, 0.05, 0.1, 0.1], dtype=torch.float64)
        total = F.cross_entropy(logits, labels, weight=weights, reduction="sum")
        return total, weights[labels[labels != -100]].sum()

    for parts in (1, 2):
        with pytest.raises(ValueError, match="criterion: its second value .* is a mean"):
            vectors_with(with_accuracy, whole, gradient_accumulation=parts)
        loss = vectors_with(with_weights, whole, gradient_accumulation=parts)
        assert loss == pytest.approx(vectors_with(with_weights, whole), rel=1e-12)


def test_a_criterion_is_evaluated_in_inference_mode_too() -> None:
    with cl.launch(dict(precision="fp64", seed=3), rank=0, world_size=1) as context:
        engine = cl.initialize(lambda: nn.Linear(6, 4), context=context, criterion=F.cross_entropy)
        inputs = torch.randn(8, 6, dtype=torch.float64)
        loss = engine.eval_step((inputs, LABELS))
        with torch.inference_mode():
            assert engine.eval_step((inputs, LABELS.clone())) == loss


def in_data_ranks(env: RankEnv, name: str) -> float:
    with env.launch(dict(precision="fp64", seed=3)) as context:
        engine = cl.initialize(lambda: nn.Linear(6, 4), context=context, criterion=(ADDS_UP | DOES_NOT)[name])
        inputs = torch.randn(8, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        own = context.local_batch(8)
        return float(engine.train_step((inputs[own], LABELS[own])).loss)


@pytest.mark.parametrize("name", ["mean", "weighted"])
def test_so_is_one_beside_other_ranks(name: str) -> None:
    if name == "weighted":
        with pytest.raises(WorldError, match="criterion: it gives"):
            run_world(in_data_ranks, 2, name)
        return
    whole = vectors_with(ADDS_UP[name], LABELS)
    assert run_world(in_data_ranks, 2, name) == [pytest.approx(whole, rel=1e-13)] * 2
