"""A loss between samples in a loop of one's own on data ranks: of all samples it is exact, of a rank's refused."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.graph import GradientEdge
from torch.nn import functional as F

import colossal_lite as cl
from colossal_lite.checks.summed_losses import sums_samples
from tests.shared.pool import RankEnv, run_world
from tests.shared.refusals import told_of

SGD: cl.ConfigDict = dict(precision="fp64", optimizer=dict(type="sgd", lr=0.1), seed=3, timeout_s=30)
Given = tuple[Tensor, Tensor, Tensor]


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4)).double()


def batch() -> Given:
    x, y = torch.randn(2, 8, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    return x, y, torch.arange(8) % 2


def contrast(a: Tensor, b: Tensor) -> Tensor:
    scores = F.normalize(a, dim=-1) @ F.normalize(b, dim=-1).T
    return F.cross_entropy(5 * scores, torch.arange(len(a)))


def supervised(a: Tensor, labels: Tensor) -> Tensor:
    alike = (labels[:, None] == labels).double().fill_diagonal_(0)
    scores = (a @ a.T).fill_diagonal_(-1e9).log_softmax(-1)
    return -(scores * alike).sum() / alike.sum()


def between_means(a: Tensor, b: Tensor) -> Tensor:
    return (a.mean(0) - b.mean(0)).square().sum()


def log_of_mean(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits, labels).exp().add(1).log()


def preferred(a: Tensor, b: Tensor, labels: Tensor) -> Tensor:
    first, second = (-F.cross_entropy(each, labels, reduction="none") for each in (a, b))
    return -F.logsigmoid(0.5 * (first - second)).mean()


Model = Callable[[Tensor], Tensor]
LOSSES: dict[str, Callable[[Model, Model, Given], Tensor]] = {
    "contrastive": lambda f, every, g: contrast(every(f(g[0])), every(f(g[1]))),
    "by labels": lambda f, every, g: supervised(every(f(g[0])), every(g[2])),
    "of a mean": lambda f, every, g: log_of_mean(every(f(g[0])), every(g[2])),
    "of a difference of means": lambda f, every, g: between_means(every(f(g[0])), every(f(g[1]))),
    "of some samples": lambda f, every, g: (
        contrast(*(every(f(x))[every(g[2]) == 1] for x in g[:2])) + F.cross_entropy(f(g[0]), g[2])
    ),
    "beside one of samples": lambda f, every, g: (
        contrast(every(out := f(g[0])), every(f(g[1]))) + F.cross_entropy(out, g[2])
    ),
}
APART: dict[str, Callable[[Model, Given], Tensor]] = {
    "cross-entropy": lambda f, g: F.cross_entropy(f(g[0]), g[2]),
    "preferences": lambda f, g: preferred(f(g[0]), f(g[1]), g[2]),
    "linear": lambda f, g: f(g[0]).mean(),
    "of its own outputs": lambda f, g: F.cross_entropy(f(F.pad(f(g[0]).sigmoid(), (1, 1))), g[2]),
    "not twice": lambda f, g: F.ctc_loss(
        f(g[0]).log_softmax(-1).expand(3, -1, -1),
        1 + g[2][:, None] % 3,
        torch.full_like(g[2], 3),
        torch.ones_like(g[2]),
    ),
}


def itself(x: Tensor) -> Tensor:
    return x


def plain(loss_of: Callable[[Model], Tensor]) -> dict[str, Tensor]:
    """The weights after three steps of a plain loop."""
    given = model()
    optimizer = torch.optim.SGD(given.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        loss_of(given).backward()
        optimizer.step()
    return given.state_dict()


def three(step: Callable[[], None], engine: Any) -> tuple[str, dict[str, Tensor]]:
    """What the first step says, and the weights after three."""
    if told := told_of(step):
        return told, engine.full_state_dict()
    step()
    step()
    return "", engine.full_state_dict()


def trained(env: RankEnv, name: str, config: dict[str, Any], gathers: bool) -> tuple[str, dict[str, Tensor]]:
    """What the first step says, and the weights after three."""
    with env.launch(SGD | config) as context:
        engine = cl.initialize(model(), context=context)
        own: Any = tuple(x.chunk(env.world_size)[env.rank] for x in batch())
        every = engine.all_samples if gathers else itself

        def step() -> None:
            loss = LOSSES[name](engine, every, own) if name in LOSSES else APART[name](engine, own)
            engine.backward(loss, count=3) if config.get("seed") else engine.backward(loss)
            engine.step()

        return three(step, engine)


def is_equal(state: dict[str, Tensor], right: dict[str, Tensor]) -> bool:
    return all(torch.allclose(state[name], right[name], rtol=1e-10, atol=1e-13) for name in right)


def retrieval(queries: Tensor, passages: Tensor, first: int) -> Tensor:
    return F.cross_entropy(queries @ passages.T, first + torch.arange(len(queries)))


def prototypes(queries: Tensor, support: Tensor, labels: Tensor, all_labels: Tensor) -> Tensor:
    means = torch.stack([support[all_labels % 2 == each].mean(0) for each in range(2)])
    return F.cross_entropy(-torch.cdist(queries, means), labels % 2)


def penalized(f: Model, every: Callable[[Tensor], Tensor], given: Given, parts: int) -> Tensor:
    """A contrastive loss and the size of its gradient at the inputs. Ranks add up to a gradient of `parts` losses."""
    x = given[0].clone().requires_grad_()
    loss = contrast(every(f(x)), every(f(given[1])).tanh())
    (gradient,) = torch.autograd.grad(loss, x, create_graph=True)
    return loss + gradient.square().sum() / parts


PARTLY: dict[str, Callable[[Model, Model, Given, int, int], Tensor]] = {
    "queries beside all passages": lambda f, every, g, first, _: retrieval(f(g[0]), every(f(g[1])), first),
    "both ways": lambda f, every, g, first, _: (
        retrieval(a := f(g[0]), every(b := f(g[1])), first) + retrieval(b, every(a), first)
    ),
    "queries beside prototypes": lambda f, every, g, _, __: prototypes(
        f(g[0]), every(f(g[1])), g[2], every(g[2])
    ),
    "a penalty on its gradient": lambda f, every, g, _, parts: penalized(f, every, g, parts),
}


def partly(env: RankEnv, name: str, counts: bool) -> tuple[str, dict[str, Tensor]]:
    with env.launch(SGD) as context:
        engine = cl.initialize(model(), context=context)
        own: Any = tuple(x.chunk(env.world_size)[env.rank] for x in batch())

        def step() -> None:
            loss = PARTLY[name](engine, engine.all_samples, own, env.rank * len(own[0]), env.world_size)
            engine.backward(loss, count=len(own[0]) if counts else None)
            engine.step()

        return three(step, engine)


def scaled(env: RankEnv, counts: list[int]) -> dict[str, Tensor]:
    """Three steps in fp16 with a loss scale, with a count of each rank."""
    config: dict[str, Any] = SGD | dict(precision=dict(dtype="fp16", loss_scale=1024.0))
    with env.launch(config) as context:
        engine = cl.initialize(model().float(), context=context)
        x, y, _ = (given.half().chunk(env.world_size)[env.rank] for given in batch())
        for _ in range(3):
            every = engine.all_samples(engine(y).float())
            loss = retrieval(engine(x).float(), every, env.rank * len(x))
            engine.backward(loss, count=counts[env.rank])
            engine.step()
        return engine.full_state_dict()


@pytest.mark.parametrize("counts", [[4, 4], [8, 1], [1, 64]])
def test_ranks_add_up_gradients_of_one_scale_in_fp16(counts: list[int]) -> None:
    """The start of a backward depends on the count of a rank."""
    given = model().float()
    optimizer = torch.optim.SGD(given.parameters(), lr=0.1)
    parts = [x.float().chunk(2) for x in batch()[:2]]
    for _ in range(3):
        every = torch.cat([given(y) for y in parts[1]])
        losses = [retrieval(given(x), every, 4 * n) for n, x in enumerate(parts[0])]
        optimizer.zero_grad()
        (sum(n * loss for n, loss in zip(counts, losses, strict=True)) / sum(counts)).backward()
        optimizer.step()
    for state in run_world(scaled, 2, counts):
        for name, right in given.state_dict().items():
            assert torch.allclose(state[name].float(), right, rtol=1e-3, atol=2e-3), name


def gathered_without_gradients(env: RankEnv) -> bool:
    with env.launch(SGD) as context:
        engine = cl.initialize(model(), context=context)
        z = engine(batch()[0].chunk(env.world_size)[env.rank])
        with torch.no_grad():
            return engine.all_samples(z).requires_grad


@pytest.mark.parametrize("ranks", [1, 2])
def test_what_is_gathered_without_gradients_has_none(ranks: int) -> None:
    assert not any(run_world(gathered_without_gradients, ranks))


@pytest.mark.parametrize("counts", [False, True])
@pytest.mark.parametrize("name", PARTLY)
def test_a_rank_s_own_terms_over_all_samples_are_exact(name: str, counts: bool) -> None:
    """A row once had the gradient of its own rank's terms alone, in silence."""
    truth = plain(lambda given: PARTLY[name](given, itself, batch(), 0, 1))
    for told, state in run_world(partly, 2, name, counts):
        assert told == "" and is_equal(state, truth)


@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_between_samples_is_exact_over_all_samples_and_refused_over_a_rank_s(name: str) -> None:
    truth = plain(lambda given: LOSSES[name](given, itself, batch()))
    for told, state in run_world(trained, 2, name, {}, True):
        assert told == "" and is_equal(state, truth)
    if name != "beside one of samples":
        for told, state in run_world(trained, 2, name, {}, False):
            assert "the loss is one between samples" in told and "engine.all_samples(outputs)" in told
            assert is_equal(state, model().state_dict())
    for told, state in run_world(trained, 1, name, {}, True):
        assert told == "" and is_equal(state, truth)


@pytest.mark.parametrize("config", [dict(zero=dict(stage=3)), dict(seed=5)], ids=["stage 3", "counts"])
def test_it_is_so_at_zero_3_and_with_counts(config: dict[str, Any]) -> None:
    truth = plain(lambda given: LOSSES["contrastive"](given, itself, batch()))
    for told, state in run_world(trained, 2, "contrastive", config, True):
        assert told == "" and is_equal(state, truth)


TWICE = "of its own outputs"
"""Its backward runs the model's twice, and at stage 3 each forward needs one of its own."""


@pytest.mark.parametrize(
    ("name", "stage"), [(name, stage) for name in APART for stage in (0, 3) if (name, stage) != (TWICE, 3)]
)
def test_a_mean_of_losses_of_samples_is_none_between_them(name: str, stage: int) -> None:
    truth = plain(lambda given: APART[name](given, batch()))
    for told, state in run_world(trained, 2, name, dict(zero=dict(stage=stage)), False):
        assert told == "" and is_equal(state, truth)


LATER: dict[str, tuple[int, Callable[[int, Tensor], Tensor]]] = {
    "begins in step 3": (3, lambda step, z: between(z) if step == 3 else z.new_zeros(())),
    "grows from 0": (2, lambda step, z: (step - 1) * between(z)),
    "grows from 0 after step 6": (8, lambda step, z: max(0, step - 6) * between(z)),
}
"""The step that refuses a term, and the term."""


def between(z: Tensor) -> Tensor:
    return F.cross_entropy(z @ z.T, torch.arange(len(z)))


def told_later(env: RankEnv, name: str, stage: int) -> tuple[int, str]:
    """The step that is refused, and what is told."""
    _, term = LATER[name]
    with env.launch(SGD | dict(zero=dict(stage=stage))) as context:
        engine = cl.initialize(model(), context=context)
        ids, _, labels = (x.chunk(env.world_size)[env.rank] for x in batch())

        def step(n: int) -> None:
            z = engine(ids)
            engine.backward(F.cross_entropy(z, labels) + term(n, z))
            engine.step()

        return next((n, told) for n in range(1, 10) if (told := told_of(partial(step, n))) or n == 9)


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("name", LATER)
def test_a_term_between_samples_of_later_steps_is_refused_too(name: str, stage: int) -> None:
    for n, told in run_world(told_later, 2, name, stage):
        assert n == LATER[name][0] and "the loss is one between samples" in told


def retained(env: RankEnv) -> bool:
    """Whether outputs, and what a loss makes of them, have the gradients of a plain loss, after each of three steps."""
    with env.launch(SGD) as context:
        engine = cl.initialize(model(), context=context)
        ids, _, labels = (x.chunk(env.world_size)[env.rank] for x in batch())
        right = []
        for _ in range(3):
            z = engine(ids)
            z.retain_grad()
            words = z.log_softmax(-1)
            words.retain_grad()
            plain = z.detach().requires_grad_()
            F.cross_entropy(plain, labels).backward()
            other = words.detach().requires_grad_()
            F.nll_loss(other, labels).backward()
            engine.backward(F.nll_loss(words, labels))
            for found, true in ((z, plain), (words, other)):
                assert found.grad is not None and true.grad is not None
                right.append(torch.allclose(found.grad, true.grad, rtol=1e-12, atol=1e-15))
            engine.step()
        return all(right)


def test_a_look_leaves_the_gradients_that_tensors_retain() -> None:
    assert run_world(retained, 2) == [True, True]


class Clipped(Function):
    """x, whose gradient is clipped."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0].clamp(-0.01, 0.01)


class Fused(Function):
    """A cross-entropy that computes its gradient in forward. Backward multiplies it in place."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, labels: Tensor) -> Tensor:
        ctx.gradient = (x.softmax(-1) - F.one_hot(labels, x.shape[-1])) / len(x)
        return F.cross_entropy(x, labels)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return ctx.gradient.mul_(gradients[0]), None


def clipped_by_hook(z: Tensor) -> Tensor:
    z.register_hook(lambda g: g.clamp(-0.01, 0.01))
    return z


NONLINEAR: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "hook": lambda z, labels: F.cross_entropy(clipped_by_hook(z), labels),
    "function": lambda z, labels: F.cross_entropy(Clipped.apply(z), labels),  # type: ignore[no-untyped-call]
    "fused": lambda z, labels: Fused.apply(z, labels),  # type: ignore[no-untyped-call]
}


def trained_by(env: RankEnv, name: str, count: int | None) -> tuple[str, dict[str, Tensor]]:
    """What a step says, and the weights after three."""
    with env.launch(SGD) as context:
        engine = cl.initialize(model(), context=context)
        ids, _, labels = (x.chunk(env.world_size)[env.rank] for x in batch())

        def step() -> None:
            engine.backward(NONLINEAR[name](engine(ids), labels), count=count)
            engine.step()

        told = told_of(lambda: [step() for _ in range(3)])
        return told, engine.full_state_dict()


@pytest.mark.parametrize("name", NONLINEAR)
@pytest.mark.parametrize(
    ("ranks", "count", "legal"),
    [
        (1, None, ""),
        (1, 8, "; no count"),
        (2, None, "; parallel.data=1"),
        (2, 4, "; parallel.data=1 with no count"),
    ],
)
def test_a_gradient_of_outputs_that_is_not_linear_is_refused_where_backward_starts_from_another(
    name: str, ranks: int, count: int | None, legal: str
) -> None:
    truth = plain(lambda given: NONLINEAR[name](given(batch()[0]), batch()[2]))
    for told, state in run_world(trained_by, ranks, name, count):
        if legal and name != "fused":
            assert "the gradient of the loss at outputs of engine(x) is not linear" in told
            assert told.endswith(legal)
        else:
            assert told == "" and is_equal(state, truth)


def accumulated(env: RankEnv, given: cl.ConfigDict) -> tuple[str, dict[str, Tensor]]:
    """As `trained_by`, in two micro-batches a step."""
    with env.launch(SGD | given) as context:
        engine = cl.initialize(model(), context=context)

        def step() -> None:
            for x, y in zip(batch()[0].chunk(2), batch()[2].chunk(2), strict=True):
                engine.backward(NONLINEAR["hook"](engine(x), y) / 2)
            engine.step()

        told = told_of(lambda: [step() for _ in range(3)])
        return told, engine.full_state_dict()


def test_on_one_rank_micro_batches_without_counts_start_from_their_losses() -> None:
    x, y = batch()[0].chunk(2), batch()[2].chunk(2)
    truth = plain(
        lambda f: torch.stack([NONLINEAR["hook"](f(a), b) / 2 for a, b in zip(x, y, strict=True)]).sum()
    )
    for told, state in run_world(accumulated, 1, dict(gradient_accumulation=2)):
        assert told == "" and is_equal(state, truth)


def small_gradients(env: RankEnv) -> str:
    config: dict[str, Any] = dict(precision="fp16", optimizer=dict(type="sgd", lr=0.1), seed=3, timeout_s=30)
    with env.launch(config) as context:
        engine = cl.initialize(nn.Sequential(nn.Embedding(64, 16), nn.Linear(16, 64)), context=context)
        words, labels = torch.randint(64, (2, 2048, 8), generator=torch.Generator().manual_seed(env.rank))

        def step() -> None:
            engine.backward(F.cross_entropy(engine(words).float().flatten(0, 1), labels.flatten()))
            engine.step()

        return told_of(step)


def test_gradients_that_fp16_rounds_to_few_digits_are_linear() -> None:
    assert run_world(small_gradients, 2) == ["", ""]


def uneven(env: RankEnv) -> str:
    with env.launch(SGD) as context:
        engine = cl.initialize(model(), context=context)
        x = batch()[0][: 2 + env.rank]
        return told_of(lambda: engine.all_samples(engine(x)))


def test_other_numbers_of_samples_on_ranks_are_refused() -> None:
    for told in run_world(uneven, 2):
        assert "data ranks have tensors of the shapes [[2, 4], [3, 4]]" in told


SUMS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "cross-entropy": partial(F.cross_entropy, reduction="sum"),
    "losses of samples": lambda logits, labels: F.cross_entropy(logits, labels, reduction="none").sum(),
    "squares": lambda logits, labels: (logits - labels[:, None]).square().mean(1).sum(),
    "by dimension": lambda logits, labels: -logits.log_softmax(-1).sum(0).sum(),
}


def summed(env: RankEnv, name: str, how: str) -> tuple[str, dict[str, Tensor]]:
    """What the first step says, and the weights after three. `how`: what the refusal calls legal."""
    with env.launch(SGD) as context:
        engine = cl.initialize(model(), context=context)
        x, _, labels = (given.chunk(env.world_size)[env.rank] for given in batch())
        every = engine.all_samples if how == "all samples" else itself

        def step() -> None:
            loss = SUMS[name](every(engine(x)), every(labels))
            if how == "mean":
                loss = loss / len(x)
            engine.backward(env.world_size * loss if how == "ranks" else loss)
            engine.step()

        return three(step, engine)


@pytest.mark.parametrize("name", SUMS)
def test_a_sum_over_samples_is_refused_and_what_is_legal_in_its_place_is_exact(name: str) -> None:
    for told, state in run_world(summed, 2, name, "as it is"):
        assert "the loss is a sum over samples" in told and "2 * loss" in told
        assert is_equal(state, model().state_dict())
    total = plain(lambda given: SUMS[name](given(batch()[0]), batch()[2]))
    mean = plain(lambda given: SUMS[name](given(batch()[0]), batch()[2]) / 8)
    for how, ranks, truth in [
        ("as it is", 1, total),
        ("ranks", 2, total),
        ("all samples", 2, total),
        ("mean", 2, mean),
    ]:
        for told, state in run_world(summed, ranks, name, how):
            assert told == "" and is_equal(state, truth), how


NO_SUMS: dict[str, Callable[[Tensor], Tensor]] = {
    "a logarithm of a sum": lambda x: x.exp().sum().log(),
    "sizes of a sum": lambda x: x.sum(0).abs().sum(),
    "distances of a sum": lambda x: F.l1_loss(x.sum(0), torch.ones(3), reduction="sum"),
    "squares of a sum": lambda x: x.sum(0).square().sum(),
    "a mean": lambda x: x.square().mean(),
    "a mean of sums": lambda x: x.square().sum(1).mean(),
    "a part of a sum": lambda x: 0.25 * x.square().sum(),
    "a sum over ranks' mean": lambda x: x.square().sum() / len(x),
}


@pytest.mark.parametrize("name", NO_SUMS)
def test_what_only_looks_like_a_sum_over_samples_is_none(name: str) -> None:
    """Its multiple would be another loss than that of one process."""
    x = torch.rand(4, 3, requires_grad=True) * 1.0
    front = {GradientEdge(x.grad_fn, 0): 4}
    assert not sums_samples(GradientEdge(NO_SUMS[name](x).grad_fn, 0), front)
    assert sums_samples(GradientEdge(x.square().sum().grad_fn, 0), front)


# ---- a choice among samples ----


def each(z: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(z, labels, reduction="none")


def hardest_triplets(z: Tensor, labels: Tensor) -> Tensor:
    far, alike = torch.cdist(z, z), labels[:, None] == labels
    return (far.masked_fill(~alike, -1).amax(1) - far.masked_fill(alike, 1e9).amin(1) + 9).relu().mean()


CHOOSING: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "the hardest samples": lambda z, y: each(z, y).topk(2).values.mean(),
    "the hardest sample": lambda z, y: each(z, y).max(),
    "the median": lambda z, y: each(z, y).median(),
    "a quantile": lambda z, y: torch.quantile(each(z, y), 0.7),
    "weights by rank": lambda z, y: (each(z, y).sort().values * torch.arange(len(z))).mean(),
    "the largest of each class": lambda z, _: z.max(0).values.mean(),
    "a hinge on pairs": lambda z, _: (1 - z[:, None, 0] + z[:, 0]).relu().mean(),
    "a hinge on halves": lambda z, _: F.margin_ranking_loss(*z[:, 0].chunk(2), torch.ones(1), margin=1),
    "a hinge on triplets": lambda z, _: F.triplet_margin_loss(z, z.roll(1, 0), z.roll(2, 0)),
    "the hardest triplets": hardest_triplets,
    "distances": lambda z, _: torch.cdist(z, z.flip(0)).mean(),
    "distances of pairs": lambda z, _: F.pdist(z).mean(),
    "a mean that is kept above a floor": lambda z, y: (F.cross_entropy(z, y) - 0.1).abs() + 0.1,
}
"""Losses of some samples, chosen by their values."""
CHOOSING_WITHIN: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "the largest of a sample": lambda z, y: (z.max(-1).values - z.gather(1, y[:, None])[:, 0] + 1).relu().mean(),
    "some of a sample": lambda z, _: z.topk(2, -1).values.mean(),
    "the sorted numbers of a sample": lambda z, _: z.sort(-1).values[:, 0].mean(),
    "a clipped ratio": lambda z, _: -torch.min(3 * z.softmax(-1), z.softmax(-1).clamp(0.2, 0.3)).mean(),
    "margins of classes": lambda z, y: F.multi_margin_loss(z, y),
    "distances to labels": lambda z, y: F.smooth_l1_loss(z, y[:, None].to(z).expand(-1, 4)),
    "a triplet of one sample": lambda z, _: F.triplet_margin_loss(z[:, :2], z[:, 2:], z[:, 1:3]),
    "a distance within a sample": lambda z, _: torch.cdist(z[:, :2, None], z[:, 2:, None]).mean(),
    "a shift that cancels": lambda z, y: F.cross_entropy(z - z.max(), y),
    "another shift that cancels": lambda z, y: F.cross_entropy(z - z.amax((0, 1)), y),
    "distances of one sample each": lambda z, _: torch.cdist(z[:, :2], z[:, 2:]).diagonal().mean(),
    "a choice of no weight": lambda z, y: F.cross_entropy(z, y) + 0.0 * z.max(),
    "one sample after another": lambda z, y: torch.stack(
        [(row.max() - row[label] + 1).relu() for row, label in zip(z, y, strict=True)]
    ).mean(),
}  # fmt: skip


class FusedRows(Function):
    """As `Fused`, of each row, or of all in a tensor of one number."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, labels: Tensor, is_whole: bool) -> Tensor:
        ctx.gradient, ctx.is_whole = x.softmax(-1) - F.one_hot(labels, x.shape[-1]), is_whole
        each = F.cross_entropy(x, labels, reduction="none")
        return each.sum()[None] if is_whole else each

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return ctx.gradient.mul_(gradients[0] if ctx.is_whole else gradients[0][:, None]), None, None


def fused_rows(z: Tensor, labels: Tensor, is_whole: bool = False) -> Tensor:
    return FusedRows.apply(z, labels, is_whole)  # type: ignore[no-untyped-call, no-any-return]


FUSED: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    f"a fused loss, {factor} times": lambda z, y, f=factor: f * Fused.apply(z, y)  # type: ignore[misc, no-untyped-call]
    for factor in (1.0, 0.5, 1 / 3, 1 / 7, 0.85, 0.91)
} | {
    "two fused losses": lambda z, y: 0.7 * Fused.apply(z, y) + 0.3 * Fused.apply(2 * z, y),  # type: ignore[no-untyped-call]
    "fused losses of rows": lambda z, y: fused_rows(z, y).mean(),
    "fused losses of rows, clipped": lambda z, y: fused_rows(z, y).clamp(max=50).mean(),
    "a fused loss in a row": lambda z, y: fused_rows(z, y, True).sum() / len(z),
    "one beside another": lambda z, y: Fused.apply(z, y) + F.cross_entropy(z, y),  # type: ignore[no-untyped-call]
}


def trained_on(env: RankEnv, name: str, gathers: bool, count: int | None) -> tuple[str, dict[str, Tensor]]:
    """What the first step says, and the weights after three."""
    with env.launch(SGD) as context:
        engine = cl.initialize(model(), context=context)
        x, _, y = (each.chunk(env.world_size)[env.rank] for each in batch())
        every = engine.all_samples if gathers else itself

        def step() -> None:
            loss = (CHOOSING | CHOOSING_WITHIN | FUSED)[name](every(engine(x)), every(y))
            engine.backward(loss, count=count)
            engine.step()

        return three(step, engine)


@pytest.mark.parametrize("name", CHOOSING)
def test_a_choice_among_samples_is_exact_over_all_samples_and_refused_over_a_rank_s(name: str) -> None:
    truth = plain(lambda given: CHOOSING[name](given(batch()[0]), batch()[2]))
    for told, state in run_world(trained_on, 2, name, True, None):
        assert told == "" and is_equal(state, truth)
    for told, state in run_world(trained_on, 2, name, False, None):
        assert "the loss is one between samples" in told and is_equal(state, model().state_dict())


@pytest.mark.parametrize("name", [*CHOOSING_WITHIN, *FUSED])
@pytest.mark.parametrize(("ranks", "count"), [(2, None), (2, 4), (1, 8)])
def test_a_choice_within_samples_and_a_fused_loss_under_a_factor_are_exact(
    name: str, ranks: int, count: int | None
) -> None:
    truth = plain(lambda given: (CHOOSING_WITHIN | FUSED)[name](given(batch()[0]), batch()[2]))
    for told, state in run_world(trained_on, ranks, name, False, count):
        assert told == "" and is_equal(state, truth)
