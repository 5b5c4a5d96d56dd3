"""A loss trains as in one process, or is refused: whatever it reads beside logits, draws, or takes of a mean."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import colossal_lite as cl
from tests.shared.plain_loop import OfBlocks
from tests.shared.pool import RankEnv, WorldError, run_world
from tests.shared.refusals import told_of

WORDS, WIDTH, SAMPLES, TOKENS = 32, 16, 8, 8


class Block(nn.Module):
    """Leaves the mean square of what it adds, as an attribute or in a list."""

    def __init__(self, sink: list[Tensor]) -> None:
        super().__init__()
        self.norm, self.up, self.down = (
            nn.LayerNorm(WIDTH),
            nn.Linear(WIDTH, 2 * WIDTH),
            nn.Linear(2 * WIDTH, WIDTH),
        )
        self.sink, self.left, self.leaves = sink, torch.zeros(()), True

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(F.gelu(self.up(self.norm(x))))
        if self.leaves:
            self.left = y.square().mean()
            self.sink.append(self.left)
        return x + y


class Model(OfBlocks):
    def __init__(self) -> None:
        torch.manual_seed(0)
        self_sink: list[Tensor] = []
        super().__init__(WORDS, WIDTH, (Block(self_sink) for _ in range(4)))
        self.sink = self_sink

    def forward(self, ids: Tensor) -> Tensor:
        self.sink.clear()
        y: Tensor = super().forward(ids)
        return y


def mean(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def attributes(model: Model) -> Callable[..., Any]:
    return lambda y, labels: mean(y, labels) + 0.3 * sum(block.left for block in model.blocks)


def sink(model: Model) -> Callable[..., Any]:
    return lambda y, labels: mean(y, labels) + 0.3 * sum(model.sink)


def penalty(model: Model) -> Callable[..., Any]:
    return lambda y, labels: mean(y, labels) + 0.01 * sum(p.square().sum() for p in model.parameters())


def temperature(model: Model) -> Callable[..., Any]:
    class Temperature(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones((), dtype=torch.float64))

        def forward(self, y: Tensor, labels: Tensor) -> Tensor:
            return mean(y * self.scale, labels)

    return Temperature()


def of_last(model: Model) -> Callable[..., Any]:
    return lambda y, labels: F.cross_entropy(y[:, -1], labels[:, -1])


def sum_of_last(model: Model) -> Callable[..., Any]:
    return lambda y, labels: (
        F.cross_entropy(y[:, -1], labels[:, -1], reduction="sum"),
        labels.numel() // labels.shape[1],
    )


def by_place(model: Model) -> Callable[..., Any]:
    def criterion(y: Tensor, labels: Tensor) -> Tensor:
        rows = F.cross_entropy(y.flatten(0, 1), labels.flatten(), reduction="none").view(labels.shape)
        return (rows * torch.arange(1, labels.shape[1] + 1)).mean()

    return criterion


def noisy(model: Model) -> Callable[..., Any]:
    return lambda y, labels: mean(y + 0.1 * torch.randn_like(y), labels)


def flooded(model: Model) -> Callable[..., Any]:
    return lambda y, labels: (mean(y, labels) - 1.0).abs() + 1.0


def detached(model: Model) -> Callable[..., Any]:
    return lambda y, labels: mean(y, labels).detach()


class Clamped(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Tensor:
        return dy.clamp(-1e-3, 1e-3)


def clamped(model: Model) -> Callable[..., Any]:
    return lambda y, labels: mean(Clamped.apply(y), labels)


def hooked(clamp: bool) -> Callable[[Model], Callable[..., Any]]:
    def criterion(y: Tensor, labels: Tensor) -> Tensor:
        if y.requires_grad:
            y.register_hook(lambda dy: dy.clamp(-1e-3, 1e-3) if clamp else dy * 0.5)
        return mean(y, labels)

    return lambda model: criterion


def hook_that_clamps(model: Model) -> Callable[..., Any]:
    return hooked(True)(model)


def hook_that_halves(model: Model) -> Callable[..., Any]:
    return hooked(False)(model)


def plain(model: Model) -> Callable[..., Any]:
    return lambda y, labels: mean(y, labels)


TENSOR, SEQUENCE = dict(parallel=dict(tensor=2)), dict(parallel=dict(sequence=2))
PIPELINE = dict(parallel=dict(pipeline=dict(size=2, micro_batches=2)))
MODES: dict[str, tuple[int, dict[str, Any]]] = {
    "one": (1, {}),
    "data": (2, {}),
    "accumulation": (1, dict(gradient_accumulation=2)),
    "ZeRO-3": (2, dict(zero=dict(stage=3))),
    "tensor": (2, TENSOR),
    "sequence": (2, SEQUENCE),
    "pipeline": (2, PIPELINE),
    "stages on one": (
        1,
        dict(parallel=dict(pipeline=dict(size=1, stages_per_rank=2, schedule="bfs", micro_batches=2))),
    ),
}
EXACT = [
    *((plain, mode) for mode in MODES),
    *((each, mode) for each in (attributes, sink) for mode in ("one", "data", "accumulation", "ZeRO-3")),
    *((penalty, mode) for mode in ("one", "data", "accumulation")),
    *((each, mode) for each in (of_last, by_place) for mode in ("one", "data", "tensor", "pipeline")),
    *((hook_that_halves, mode) for mode in ("one", "data", "tensor", "pipeline")),
    (noisy, "one"),
    (flooded, "one"),
    (flooded, "tensor"),
]
PART, GRAPH = r"criterion: it reads the parameter .*\. A rank has a part of it", "its result has no graph"
LEFT = "criterion: it reads a tensor that the forward has left"
REFUSED = [
    *((each, mode, LEFT) for each in (attributes, sink) for mode in ("tensor", "stages on one")),
    (sink, "pipeline", LEFT),
    *((penalty, mode, PART) for mode in ("ZeRO-3", "tensor", "pipeline", "stages on one")),
    *((temperature, mode, "requires a gradient and is not of the model") for mode in MODES),
    *((each, "sequence", "So a batch cut by parallel.sequence") for each in (of_last, by_place, sum_of_last)),
    *((noisy, mode, "criterion: it draws from torch's own") for mode in ("data", "accumulation", "sequence")),
    *((flooded, mode, "So a batch cut by") for mode in ("data", "accumulation", "ZeRO-3", "pipeline")),
    *((detached, mode, GRAPH) for mode in MODES),
    *(
        (each, mode, "the gradient of the logits is not linear")
        for each in (clamped, hook_that_clamps)
        for mode in MODES
    ),
]


def batch(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    ids, labels = (torch.randint(WORDS, (SAMPLES, TOKENS), generator=generator) for _ in range(2))
    return ids, labels


def trained(env: RankEnv, criterion: Callable[[Model], Any], changes: dict[str, Any]) -> list[float]:
    config = dict(precision="fp64", optimizer=dict(type="sgd", lr=0.5), timeout_s=30) | changes
    with env.launch(config) as context:
        model = Model().double()
        for block in model.blocks:
            block.leaves = context.mesh.size("sequence") == 1  # else the mean of a part is refused
        engine = cl.initialize(model, context=context, criterion=criterion(model))
        torch.manual_seed(5)
        cut = context.local_batch(SAMPLES)
        return [float(engine.train_step(tuple(x[cut] for x in batch(step))).loss) for step in range(3)]


def serial(criterion: Callable[[Model], Any]) -> list[float]:
    model, losses = Model().double(), list[float]()
    optimizer, loss_of = torch.optim.SGD(model.parameters(), lr=0.5), criterion(model)
    torch.manual_seed(5)
    for step in range(3):
        ids, labels = batch(step)
        optimizer.zero_grad()
        loss = loss_of(model(ids), labels)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize(("criterion", "mode"), EXACT)
def test_a_criterion_trains_as_in_one_process(criterion: Callable[[Model], Any], mode: str) -> None:
    ranks, changes = MODES[mode]
    for losses in run_world(trained, ranks, criterion, changes):
        assert losses == pytest.approx(serial(criterion), rel=1e-12)


@pytest.mark.parametrize(("criterion", "mode", "says"), REFUSED)
def test_or_it_is_refused_before_anything_is_updated(
    criterion: Callable[[Model], Any], mode: str, says: str
) -> None:
    ranks, changes = MODES[mode]
    with pytest.raises(WorldError, match=says):
        run_world(trained, ranks, criterion, changes)


# ---- a loop of one's own ----


def own_loop(env: RankEnv, rows: tuple[int, ...], padded: bool, counts: bool) -> list[float]:
    """Steps on `rows` of the samples for each rank; the model gets labels, some of which do not count."""
    with env.launch(dict(precision="fp64", optimizer=dict(type="sgd", lr=0.5), timeout_s=30)) as context:
        model = Labelled().double()
        engine = cl.initialize(model, context=context)
        start = sum(rows[: env.rank])
        losses = []
        for step in range(2):
            ids, labels = (x[start : start + rows[env.rank]] for x in labelled(step, padded))
            loss = engine(ids, labels=labels)[1]
            engine.backward(loss, int((labels != -100).sum()) if counts else None)
            losses.append(float(engine.step().loss))
        return losses


class Labelled(Model):
    """Gives the loss of its labels behind the logits."""

    def forward(self, ids: Tensor, labels: Tensor | None = None) -> Any:
        logits = super().forward(ids)
        return (logits,) if labels is None else (logits, mean(logits, labels))


def labelled(step: int, padded: bool) -> tuple[Tensor, Tensor]:
    ids, labels = batch(step)
    if padded:
        labels[:2, 3:] = -100
    return ids, labels


def serial_loop(padded: bool) -> list[float]:
    model, losses = Labelled().double(), list[float]()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for step in range(2):
        optimizer.zero_grad()
        loss = model(*labelled(step, padded))[1]
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize(
    ("rows", "padded", "counts"),
    [((4, 4), False, False), ((4, 4), True, True), ((5, 3), False, True), ((3, 3, 2), True, True)],
)
def test_a_loop_of_ones_own_is_exact_where_ranks_weigh_alike_or_counts_are_given(
    rows: tuple[int, ...], padded: bool, counts: bool
) -> None:
    for losses in run_world(own_loop, len(rows), rows, padded, counts):
        assert losses == pytest.approx(serial_loop(padded), rel=1e-12)


@pytest.mark.parametrize(
    ("rows", "padded", "says"),
    [
        ((5, 3), False, "Rank 0 has 5 samples, rank 1 has 3"),
        ((3, 3, 2), False, "Rank 0 has 3 samples, rank 2 has 2"),
        ((4, 4), True, "Rank 0 has 22 valid labels, rank 1 has 32"),
    ],
)
def test_or_the_loss_is_refused_where_they_do_not(rows: tuple[int, ...], padded: bool, says: str) -> None:
    with pytest.raises(WorldError, match=f"a loss without count weighs the same on every rank. {says}"):
        run_world(own_loop, len(rows), rows, padded, False)


class Targets(Model):
    """Takes targets by position, as nanoGPT does, and ignores those of -1."""

    def forward(self, ids: Tensor, targets: Tensor | None = None) -> Any:
        logits = super().forward(ids)
        if targets is None:
            return logits, None
        return logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-1)


def loop_of_targets(env: RankEnv, given: str, gives: Sequence[bool]) -> str:
    """The message of a step whose ranks `gives` the model its targets."""
    with env.launch(dict(precision="fp64", timeout_s=30)) as context:
        engine = cl.initialize(Targets().double(), context=context)
        ids, labels = labelled(0, False)
        labels[:2, 3:] = -1
        ids, labels = ids[context.local_batch(len(ids))], labels[context.local_batch(len(ids))]
        if not gives[env.rank]:
            engine.backward(mean(engine(ids)[0], labels.clamp(min=0)))
        else:
            engine.backward(
                (engine(ids, labels) if given == "by position" else engine(ids, targets=labels))[1]
            )
        return told_of(engine.step)


@pytest.mark.parametrize("given", ["by position", "by name"])
def test_targets_of_minus_1_and_by_position_weigh_too(given: str) -> None:
    for told in run_world(loop_of_targets, 2, given, (True, True)):
        assert "Rank 0 has 22 valid labels, rank 1 has 32. Nothing was updated" in told


def test_targets_on_one_rank_alone_are_refused_by_name() -> None:
    for told in run_world(loop_of_targets, 2, "by name", (True, False)):
        assert "Rank 0 has 22 valid labels, rank 1 has 0. Nothing was updated" in told


# ---- generators of Python and numpy ----


def of_python() -> float:
    return random.random()


def of_numpy() -> float:
    return float(numpy.random.random())


class Drawing(Model):
    """Skips its last block at random."""

    def __init__(self, draw: Callable[[], float]) -> None:
        super().__init__()
        self.draw = draw

    def forward(self, ids: Tensor) -> Tensor:
        y = super().forward(ids)
        return y * 2 if self.training and self.draw() < 0.5 else y


def steps_of(env: RankEnv, draw: Callable[[], float], changes: dict[str, Any]) -> None:
    config = dict(precision="fp64", optimizer=dict(type="sgd", lr=0.5), timeout_s=30) | changes
    with env.launch(config) as context:
        engine = cl.initialize(Drawing(draw).double(), context=context)
        engine.train_step(tuple(x[context.local_batch(SAMPLES)] for x in batch(0)))


@pytest.mark.parametrize("mode", ["one", "data", "accumulation", "tensor"])
@pytest.mark.parametrize("draw", [of_python, of_numpy])
def test_a_forward_that_draws_from_another_generator_is_refused(draw: Callable[[], float], mode: str) -> None:
    ranks, changes = MODES[mode]
    name = "Python's random" if draw is of_python else "numpy.random"
    with pytest.raises(WorldError, match=f"its forward draws from {name}|is not that of one process"):
        run_world(steps_of, ranks, draw, changes)


def leaves_generators(env: RankEnv, changes: dict[str, Any]) -> bool:
    with env.launch(dict(precision="fp64", optimizer=dict(type="sgd", lr=0.5)) | changes) as context:
        model = Drawing(lambda: of_python() + of_numpy())
        before = random.getstate(), numpy.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
        cl.initialize(model.double(), context=context)
        return before == (
            random.getstate(), numpy.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
        )  # fmt: skip


def test_initialize_draws_from_no_generator_of_the_process() -> None:
    assert run_world(leaves_generators, 1, {}) == [True]


def test_a_hook_that_a_criterion_adds_later_is_looked_at_too() -> None:
    calls = list[int]()

    def criterion(logits: Tensor, labels: Tensor) -> Tensor:
        calls.append(1)
        if logits.requires_grad and len(calls) > 4:
            logits.register_hook(lambda g: g.clamp(-1e-3, 1e-3))
        return mean(logits, labels)

    with cl.launch(
        dict(precision="fp64", optimizer=dict(type="sgd", lr=0.5)), rank=0, world_size=1
    ) as context:
        engine = cl.initialize(Model().double(), context=context, criterion=criterion)
        engine.train_step(batch(0))
        told = told_of(lambda: [engine.train_step(batch(n)) for n in range(8)])
    assert "the gradient of the logits is not linear" in told


def test_a_look_leaves_the_gradients_that_tensors_of_a_criterion_retain() -> None:
    kept = list[Tensor]()

    def criterion(logits: Tensor, labels: Tensor) -> Tensor:
        if logits.requires_grad:
            logits.retain_grad()
            kept.append(logits)
        return mean(logits, labels)

    with cl.launch(
        dict(precision="fp64", optimizer=dict(type="sgd", lr=0.0)), rank=0, world_size=1
    ) as context:
        engine = cl.initialize(Model().double(), context=context, criterion=criterion)
        for _ in range(3):
            engine.train_step(batch(0))
    first, *others = [x.grad for x in kept]
    assert first is not None and len(others) == 2
    assert all(each is not None and torch.equal(first, each) for each in others)


@pytest.mark.parametrize("size", [1.0, 1e-2, 1e-4, 1e-6])
def test_small_gradients_of_fp16_are_no_fault_of_a_criterion(size: float) -> None:
    """The numbers of fp16 below 6e-5 have few digits, and there are none below 6e-8."""
    config = dict(precision="fp16", optimizer=dict(type="sgd", lr=0.5))
    with cl.launch(config, rank=0, world_size=1) as context:
        engine = cl.initialize(Model(), context=context, criterion=lambda x, y: size * mean(x.float(), y))
        for n in range(9):
            engine.train_step(batch(n))


def test_a_clamp_of_the_gradient_is_a_fault_of_a_criterion_in_fp16_too() -> None:
    def criterion(logits: Tensor, labels: Tensor) -> Tensor:
        if logits.requires_grad:
            logits.register_hook(lambda g: g.clamp(-1e-3, 1e-3))
        return mean(logits.float(), labels)

    config = dict(precision="fp16", optimizer=dict(type="sgd", lr=0.5))
    with cl.launch(config, rank=0, world_size=1) as context:
        engine = cl.initialize(Model(), context=context, criterion=criterion)
        told = told_of(lambda: [engine.train_step(batch(n)) for n in range(2)])
    assert "the gradient of the logits is not linear" in told
