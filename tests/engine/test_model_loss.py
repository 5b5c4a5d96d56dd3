"""criterion="model" trains on the loss that a model's own forward gives: exact where it is a mean, else refused."""

from __future__ import annotations

import math
import re
from typing import Any, Literal

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import colossal_lite as cl
from colossal_lite.data.batch import Batch
from colossal_lite.parallel.model_loss import ModelLoss, ModelLossError, model_loss
from colossal_lite.parallel.own_criterion import OwnCriterion
from tests.shared.own_models import PLAN, TOKENS, WORDS, Model
from tests.shared.pool import RankEnv, WorldError, run_world


class OwnLoss(Model):
    """As nanoGPT: the loss beside the logits with targets, and the last position without."""

    ignored = -1

    def forward(self, ids: Tensor, targets: Tensor | None = None) -> Any:  # type: ignore[override]
        x = self.words(ids) + self.places(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        x = self.norm(x)
        if targets is None:
            return self.head(x[:, [-1], :]), None
        logits = self.head(x)
        return logits, self.loss(logits.flatten(0, 1), targets.flatten())

    def loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(logits, targets, ignore_index=self.ignored, label_smoothing=0.1)


class Summed(OwnLoss):
    def loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(logits, targets, reduction="sum")


class PlusAMeanOfTheBatch(OwnLoss):
    def loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        return super().loss(logits, targets) + logits.mean(0).square().sum()


class SquaresInTraining(OwnLoss):
    def loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        return super().loss(logits, targets) + self.training * 1e-3 * logits.square().sum()


class IgnoresInTraining(OwnLoss):
    def loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(logits, targets, ignore_index=-1 if self.training else -100)


class Shifts(OwnLoss):
    def forward(self, ids: Tensor, labels: Tensor | None = None) -> Any:  # type: ignore[override]
        logits, _ = super().forward(ids, torch.zeros_like(ids))
        if labels is None:
            return {"logits": logits}
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        return {"loss": loss, "logits": logits}


class Keeps(OwnLoss):
    """As llama2.c: logits alone, and the loss as an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.last_loss: Tensor | None = None

    def forward(self, ids: Tensor, targets: Tensor | None = None) -> Any:  # type: ignore[override]
        logits, self.last_loss = super().forward(ids, targets)
        return logits


class Requires(OwnLoss):
    def forward(self, ids: Tensor, targets: Tensor) -> Any:  # type: ignore[override]
        return super().forward(ids, targets)


def batch(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    ids, labels = (torch.randint(WORDS, (4, TOKENS), generator=generator) for _ in range(2))
    labels[0, 3:], labels[1] = -100, -100
    return ids, labels


def build(kind: Any = OwnLoss) -> Any:
    torch.manual_seed(0)
    return kind().double()


def plain() -> tuple[list[float], dict[str, Tensor]]:
    model, losses = build(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(2):
        ids, labels = batch(step)
        _, loss = model(ids, labels.where(labels != -100, -1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss))
    return losses, {name: value.detach() for name, value in model.named_parameters()}


def trains(
    env: RankEnv, kind: type[OwnLoss], changes: dict[str, Any]
) -> tuple[list[float], float, dict[str, Tensor]]:
    config = dict(precision="fp64", optimizer=dict(type="sgd", lr=0.1), timeout_s=60) | changes
    with env.launch(config) as context:
        engine = cl.initialize(build(kind), context=context, criterion="model", plan=PLAN)
        cut = context.local_batch(4)
        steps = [tuple(t[cut] for t in batch(step)) for step in range(2)]
        evaluated = float(engine.eval_step(steps[0]))
        losses = [float(engine.train_step(step).loss) for step in steps]
        return losses, evaluated, engine.full_state_dict()


MODES: dict[str, dict[str, Any]] = {
    "data, ZeRO 3": dict(zero=dict(stage=3)),
    "accumulation, a part without valid labels": dict(gradient_accumulation=2, zero=dict(stage=1)),
    "tensor 1d": dict(parallel=dict(tensor=2)),
    "tensor 1d, whole": dict(parallel=dict(tensor=dict(size=2, sequence_parallel=False))),
    "pipeline": dict(parallel=dict(pipeline=dict(size=2, micro_batches=2))),
    "kept as an attribute, tensor 1d": dict(parallel=dict(tensor=2)),
    "kept as an attribute, pipeline": dict(parallel=dict(pipeline=dict(size=2, micro_batches=2))),
}


@pytest.mark.parametrize("mode", MODES)
def test_a_models_own_loss_trains_as_in_a_plain_loop(mode: str) -> None:
    losses, weights = plain()
    kind = Keeps if mode.startswith("kept") else OwnLoss
    for theirs, evaluated, state in run_world(trains, 2, kind, MODES[mode]):
        assert all(math.isclose(a, b, rel_tol=1e-12) for a, b in zip(losses, theirs, strict=True))
        assert math.isclose(evaluated, losses[0], rel_tol=1e-12), "an evaluation gives the same loss"
        for name, value in weights.items():
            assert torch.allclose(state[name], value, rtol=1e-11, atol=1e-13), name


class Padded(OwnLoss):
    """The id of padding is ignored, as labels come from a tokenizer."""

    ignored = WORDS - 1


class Masked(OwnLoss):
    def loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        counted = targets != WORDS - 1
        losses = F.cross_entropy(logits, targets, reduction="none")
        return losses.where(counted, 0.0).sum() / counted.sum()


class Doubled(OwnLoss):
    """A class of words weighs twice, which is no mean over labels; it is compared with as padding is."""

    def loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        weights = 1.0 + (targets == 1)
        return (F.cross_entropy(logits, targets, reduction="none") * weights).sum() / weights.sum()


class Weighed(OwnLoss):
    def loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(logits, targets, weight=logits.new_ones(WORDS).index_fill(0, RARE, 5.0))


RARE = torch.tensor([WORDS - 1])


class Segments(nn.Module):
    """Features [B, T, 6] to 150 classes of each place; the label 255 is ignored, and -100 too if it says so."""

    def __init__(self, *, ignores_both: bool = False) -> None:
        super().__init__()
        self.a, self.b, self.ignores_both = nn.Linear(6, 16), nn.Linear(16, 150), ignores_both

    def forward(self, x: Tensor, labels: Tensor | None = None) -> Any:
        logits = self.b(torch.tanh(self.a(x)))
        if labels is None:
            return logits
        if self.ignores_both:
            labels = labels.masked_fill(labels < 0, 255)
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=255)
        return dict(loss=loss, logits=logits)


def padded(step: int) -> tuple[Tensor, Tensor]:
    ids, labels = batch(step)
    return ids, labels.where(labels != -100, WORDS - 1)


def pictures(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(4, 8, 6, generator=generator, dtype=torch.float64)
    labels = torch.randint(150, (4, 8), generator=generator)
    labels[0, 1:], labels[1, :3] = 255, 255
    return x, labels


PASSING: dict[str, tuple[Any, Any]] = {
    "the id of padding": (Padded, padded),
    "the id of padding, by a mask": (Masked, padded),
    "255 in pictures": (Segments, pictures),
    "255 in pictures, and -100": (lambda: Segments(ignores_both=True), pictures),
}


def passes_over(env: RankEnv, name: str, changes: dict[str, Any]) -> list[float]:
    kind, batches = PASSING[name]
    config = dict(precision="fp64", optimizer=dict(type="sgd", lr=0.1), timeout_s=60) | changes
    with env.launch(config) as context:
        shown = dict(example=batches(9)) if batches is pictures else dict(plan=PLAN)
        engine = cl.initialize(build(kind), context=context, criterion="model", **shown)
        cut = context.local_batch(4)
        return [float(engine.train_step(tuple(t[cut] for t in batches(step))).loss) for step in range(3)]


@pytest.mark.parametrize("changes", [dict(), dict(gradient_accumulation=2, zero=dict(stage=2))])
@pytest.mark.parametrize("name", PASSING)
def test_labels_that_a_model_passes_over_do_not_count(name: str, changes: dict[str, Any]) -> None:
    """Those other than -100 and -1 once counted, so ranks with more of them weighed too much, in silence."""
    kind, batches = PASSING[name]
    model, losses = build(kind), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        out = model(*batches(step))
        loss = out["loss"] if isinstance(out, dict) else out[1]
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    for theirs in run_world(passes_over, 2, name, changes):
        assert all(math.isclose(a, b, rel_tol=1e-12) for a, b in zip(losses, theirs, strict=True))


def test_labels_that_are_passed_over_are_seen_whatever_the_example_has() -> None:
    x = torch.randn(3, 4, 6)
    for labels in ([1, 5, 7, 9], [1, 255, 7, 9], [255, 255, 255, 255]):
        some = torch.tensor([labels, [149, 8, 3, 37], [0, 37, 74, 111]])
        given = Batch((x,), {}, some, torch.arange(3))
        assert model_loss(Segments(), given) == ModelLoss("labels", 255, is_shown=True)
        both = ModelLoss("labels", -100, is_shown=True, others=(-1, 255))
        assert model_loss(Segments(ignores_both=True), given) == both


class Focal(nn.Module):
    """Features [B, T, 6] to a probability of each place, over the number of positives."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 1)

    def forward(self, x: Tensor, labels: Tensor) -> Any:
        logits = self.layer(x)[..., 0]
        right = torch.where(labels == 1, logits, -logits).sigmoid()
        loss = (-((1 - right) ** 2) * right.log()).sum() / (labels == 1).sum().clamp(1)
        return dict(loss=loss, logits=logits)


@pytest.mark.parametrize("seed", range(8))
def test_a_sum_over_the_number_of_positives_is_no_mean_over_them(seed: int) -> None:
    """Negatives add to it, so 0 is no label that it ignores."""
    torch.manual_seed(seed)
    model, labels = Focal(), torch.randint(2, (3, 8))
    labels[:, 0] = 1
    try:
        found = model_loss(model, Batch((torch.randn(3, 8, 6),), {}, labels, torch.arange(3)))
    except ModelLossError as error:
        assert "is no mean over tokens" in str(error)
    else:  # as many positives in each part prove nothing else
        assert found == ModelLoss("labels", None, is_shown=True)


class Bounded(Segments):
    def __init__(self, bound: float) -> None:
        super().__init__()
        self.bound = bound

    def forward(self, x: Tensor, labels: Tensor | None = None) -> Any:
        if labels is not None:
            labels = labels.where((labels >= 0) & (labels < self.bound), 255)
            labels = labels.long()
        return super().forward(x, labels)


@pytest.mark.parametrize(
    ("bound", "dtype"),
    [(1e30, torch.int64), (2**63 - 1, torch.int64), (1e30, torch.uint8), (40_000.0, torch.int16)],
)
def test_numbers_that_no_label_can_be_are_no_labels(bound: float, dtype: torch.dtype) -> None:
    some = torch.tensor([[1, 5, 7, 9], [149, 8, 3, 37], [0, 37, 74, 111]], dtype=dtype)
    found = model_loss(Bounded(bound), Batch((torch.randn(3, 4, 6),), {}, some, torch.arange(3)))
    assert 255 in (found.ignored, *found.others)


class NeedsOne(OwnLoss):
    def loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        if not bool((targets != -1).any()):
            raise ValueError("a batch without labels")
        return super().loss(logits, targets)


def test_a_forward_says_how_it_takes_labels() -> None:
    assert model_loss(OwnLoss()) == ModelLoss("targets", -1)
    assert model_loss(NeedsOne()) == ModelLoss("targets", -1)


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (Summed, "is a sum: .* of three samples"),
        (PlusAMeanOfTheBatch, "is no mean over tokens"),
        (SquaresInTraining, "in training is no mean over tokens"),
        (IgnoresInTraining, r"ignores the label -1 in training and -100 in eval\(\)"),
        (Doubled, "is no mean over tokens"),
        (Weighed, "weighs classes by 1 to 5, so it is no mean over labels"),
        (Shifts, "does not read the first label .* it shifts labels itself"),
        (Model, "has no argument for labels; legal: one named targets, labels"),
    ],
)
def test_a_loss_that_is_no_mean_is_refused_by_name(kind: type[nn.Module], words: str) -> None:
    with pytest.raises(ModelLossError, match=words):
        model_loss(kind())


def without_labels(env: RankEnv) -> None:
    with env.launch(dict(precision="fp64")) as context:
        cl.initialize(build(), context=context).train_step(batch(0))


def test_logits_of_the_last_position_are_answered_with_the_criterion() -> None:
    with pytest.raises(
        WorldError, match=r"last position only.*Legal: cl.initialize\(..., criterion='model'\)"
    ):
        run_world(without_labels, 1)


def refused(env: RankEnv, parallel: dict[str, int], criterion: Literal["model"] | None) -> str:
    with env.launch(dict(precision="fp64", parallel=parallel, timeout_s=60)) as context:
        with pytest.raises(ModelLossError) as caught:
            cl.initialize(build(Requires), context=context, criterion=criterion)
        return str(caught.value)


@pytest.mark.parametrize("criterion", [None, "model"])
@pytest.mark.parametrize("parallel", [{}, dict(pipeline=2)], ids=["data", "pipeline"])
def test_a_forward_that_requires_labels_is_refused_with_what_to_write(
    criterion: Literal["model"] | None, parallel: dict[str, int]
) -> None:
    for told in run_world(refused, 2, parallel, criterion):
        assert "requires targets, and a model gets the inputs; legal: targets=None in its signature." in told
        assert "criterion='model'" in told


class OfStages(OwnLoss):
    """Adds to its loss what a stage with the labels has (`aux`, `words`), or has not."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way, self.aux = way, nn.Linear(16, WORDS)

    def forward(self, ids: Tensor, targets: Tensor | None = None) -> Any:  # type: ignore[override]
        x = self.words(ids) + self.places(torch.arange(ids.shape[1], device=ids.device))
        seen = []
        for block in self.blocks:
            x = block(x)
            seen.append(x)
        logits = self.head(self.norm(x))
        if targets is None:
            return logits, None
        loss = self.loss(logits.flatten(0, 1), targets.flatten())
        if self.way in ("first", "last"):
            told = self.aux(seen[0 if self.way == "first" else -1])
            return logits, loss + 0.5 * self.loss(told.flatten(0, 1), targets.flatten())
        penalised = self.words if self.way == "words" else self.blocks
        return logits, loss + 0.01 * sum(p.square().sum() for p in penalised.parameters())


def of_stages(
    env: RankEnv, way: str, parallel: dict[str, Any]
) -> tuple[list[float], dict[str, Tensor]] | str:
    torch.manual_seed(0)
    config = dict(precision="fp64", optimizer=dict(type="sgd", lr=0.3), timeout_s=30, parallel=parallel)
    with env.launch(config) as context:
        try:
            engine = cl.initialize(OfStages(way).double(), context=context, criterion="model")
        except ValueError as error:
            return str(error)
        ids = torch.randint(WORDS, (3, 4, TOKENS), generator=torch.Generator().manual_seed(1))
        return [
            float(engine.train_step((each, each.roll(1, 0))).loss) for each in ids
        ], engine.full_state_dict()


STAGES: dict[str, Any] = dict(pipeline=dict(size=2, micro_batches=2))


@pytest.mark.parametrize("way", ["last", "words"])
def test_stages_have_what_a_loss_reads_beside_the_blocks(way: str) -> None:
    (expected,) = run_world(of_stages, 1, way, {})
    for losses, weights in run_world(of_stages, 2, way, STAGES):
        assert losses == pytest.approx(expected[0], rel=1e-12)
        for name, value in expected[1].items():
            assert float((weights[name] - value).norm()) <= 1e-12 * float(value.norm()), name


@pytest.mark.parametrize(
    ("way", "words"),
    [("first", "reads a tensor made by blocks"), ("blocks", "blocks.0.*is read outside its block")],
)
def test_a_loss_that_reads_what_other_stages_have_is_refused(way: str, words: str) -> None:
    for told in run_world(of_stages, 2, way, STAGES):
        assert isinstance(told, str) and re.search(words, told), told


class Conditioned(OwnLoss):
    """Has an argument that other models have for labels, beside its own for labels."""

    def forward(self, ids: Tensor, y: Tensor, labels: Tensor | None = None) -> Any:  # type: ignore[override]
        logits = self.head(self.norm(self.words(ids) + self.words(y)))
        return logits, None if labels is None else self.loss(logits.flatten(0, 1), labels.flatten())


def conditioned(env: RankEnv) -> list[float]:
    torch.manual_seed(0)
    with env.launch(dict(precision="fp64", optimizer=dict(type="sgd", lr=0.3), timeout_s=30)) as context:
        ids = torch.randint(WORDS, (3, 4, TOKENS), generator=torch.Generator().manual_seed(1))
        own = context.local_batch(4)
        given = [dict(ids=each[own], y=each.roll(1, 1)[own], labels=each.roll(1, 0)[own]) for each in ids]
        engine = cl.initialize(Conditioned().double(), context=context, criterion="model", example=given[0])
        return [float(engine.train_step(each).loss) for each in given]


def test_an_argument_y_beside_labels_is_an_input() -> None:
    (expected,) = run_world(conditioned, 1)
    for losses in run_world(conditioned, 2):
        assert losses == pytest.approx(expected, rel=1e-12)


class OfSound(nn.Module):
    """Trains on torch's CTC loss, which reads other memory where a label is below 0."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(8, 5)

    def forward(self, x: Tensor, labels: Tensor | None = None) -> Any:
        logits = self.head(x)
        if labels is None:
            return {"logits": logits}
        frames, words = (torch.full((len(x),), part.shape[1]) for part in (x, labels))
        by_frame = logits.log_softmax(-1).transpose(0, 1)
        return {"loss": F.ctc_loss(by_frame, labels, frames, words), "logits": logits}


def proven_ctc(env: RankEnv) -> int | None:
    torch.manual_seed(0)
    args = (torch.randn(3, 12, 8, dtype=torch.float64),)
    labels = torch.tensor([[1, 2, 3], [4, 1, 2], [3, 4, 1]])
    example = Batch(args, {}, labels=labels, samples=torch.arange(3))
    return model_loss(OfSound().double(), example).ignored


def test_a_ctc_loss_is_not_tried_with_labels_below_0() -> None:
    assert run_world(proven_ctc, 1) == [None]


class NormsItsHead(OwnLoss):
    """Its forward moves buffers in training, as a power iteration does."""

    def __init__(self) -> None:
        super().__init__()
        nn.utils.parametrizations.spectral_norm(self.head)


class RecomputesADropout(OwnLoss):
    def loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        dropped = checkpoint(
            lambda x: (F.dropout(x, 0.5, self.training) * x).tanh(), logits, use_reentrant=False
        )
        return super().loss(dropped, targets)


class HasWholeNumbers(OwnLoss):
    """A parameter of integers, which has no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.order = nn.Parameter(torch.arange(WORDS), requires_grad=False)


@pytest.mark.parametrize("kind", [NormsItsHead, RecomputesADropout, HasWholeNumbers])
def test_a_loss_is_a_mean_whatever_its_forward_keeps_or_its_backward_runs_again(kind: type[OwnLoss]) -> None:
    assert model_loss(build(kind)) == ModelLoss("targets", -1)


def test_a_mean_in_16_bits_is_weighed_in_32() -> None:
    """The sum of 257 labels was 260 in bfloat16, and it is 259.0078125."""
    mean = torch.tensor(1.0078125, dtype=torch.bfloat16, requires_grad=True)
    labels = torch.zeros(1, 257, dtype=torch.int64)
    total, count = ModelLoss("labels", -100).of(dict(loss=mean), labels)
    assert (total.dtype, float(total.detach()), count) == (torch.float32, 1.0078125 * 257, 257)
    logits = torch.zeros(1, 257, 2)
    of_own, count_of_own = OwnCriterion(lambda *_: mean).run(
        logits, labels, 257, is_cut=False, cuts_tokens=False
    )
    assert (of_own.dtype, float(of_own.detach()), count_of_own) == (torch.float32, 1.0078125 * 257, 257)
