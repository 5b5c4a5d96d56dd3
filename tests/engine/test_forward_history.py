"""A model whose forward reads what an earlier one has kept is exact in one forward a step, and refused in several."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import colossal_lite as cl
from tests.shared.plain_loop import OfBlocks, batches, plain_run
from tests.shared.pool import RankEnv, run_world

V, D, STEPS = 16, 8, 3
SGD = dict(precision="fp64", optimizer=dict(type="sgd", lr=0.5), timeout_s=60)
CUTS: dict[str, dict[str, Any]] = {
    "gradient_accumulation=2": dict(gradient_accumulation=2),
    "pipeline.micro_batches=2": dict(parallel=dict(pipeline=dict(size=2, micro_batches=2))),
    "activation_checkpoint='full'": dict(activation_checkpoint="full"),
    "activation_checkpoint='selective'": dict(activation_checkpoint="selective"),
}
ONCE: dict[str, dict[str, Any]] = {
    "data": {},
    "pipeline of whole batches": dict(parallel=dict(pipeline=dict(size=2, micro_batches=1))),
}


class Keeping(nn.Module):
    """A block that keeps its input of the last forward. `way`: where, and whether results depend on it."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way, self.norm, self.inner = way, nn.LayerNorm(D), nn.Linear(D, D)
        self.kept: Any = [] if way == "in a list" else None

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        if self.way == "in a list":
            last, self.kept[:] = (self.kept or [None])[-1], [y.detach()]
        elif self.way == "a table that a forward fills":
            if self.kept is None:
                self.kept = torch.linspace(-1, 1, D, dtype=torch.float64)
            last = self.kept
        else:
            last, self.kept = self.kept, y.detach()
        reads = last is not None and self.way != "a log"
        return x + torch.tanh(self.inner(y + 0.5 * last if reads else y))


def model(way: str) -> nn.Module:
    torch.manual_seed(0)
    return OfBlocks(V, D, (Keeping(way) for _ in range(2))).double()


def trained(env: RankEnv, way: str, more: dict[str, Any]) -> str | tuple[list[float], dict[str, Tensor]]:
    with env.launch(SGD | more) as context:
        try:
            engine = cl.initialize(model(way), context=context)
        except ValueError as error:
            return str(error)
        parts, at = context.mesh.size("data"), context.mesh.coord("data")
        given = [tuple(x.tensor_split(parts)[at] for x in batch) for batch in batches(V, STEPS)]
        losses = [float(engine.train_step(batch).loss) for batch in given]
        return losses, engine.full_state_dict()


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("way", ["an attribute", "in a list"])
def test_a_forward_that_reads_what_another_kept_is_refused_where_a_step_has_more(way: str, cut: str) -> None:
    for told in run_world(trained, 2 if "pipeline" in cut else 1, way, CUTS[cut]):
        assert isinstance(told, str), told
        assert "reads what an earlier one has kept" in told
        assert cut in told


@pytest.mark.parametrize("setting", ONCE)
@pytest.mark.parametrize("way", ["an attribute", "in a list"])
def test_a_forward_that_reads_what_the_last_step_kept_is_exact_in_one_forward_a_step(
    way: str, setting: str
) -> None:
    is_plain(way, 2, ONCE[setting])


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("way", ["a log", "a table that a forward fills"])
def test_what_a_forward_keeps_may_stay_where_results_do_not_depend_on_it(way: str, cut: str) -> None:
    is_plain(way, 2 if "pipeline" in cut else 1, CUTS[cut])


def is_plain(way: str, world: int, more: dict[str, Any]) -> None:
    truth = plain_run(model(way), batches(V, STEPS), 0.5)
    for told in run_world(trained, world, way, more):
        assert not isinstance(told, str), told
        losses, weights = told
        assert losses == pytest.approx(truth.losses, rel=1e-10)
        for name, expected in truth.weights.items():
            assert float((weights[name] - expected).norm()) <= 1e-10 * float(expected.norm()), name


class OfPictures(nn.Module):
    """Keeps what it saw, and does not run on words."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.head = nn.Conv2d(3, D, 3), nn.Linear(D, 5)
        self.kept: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        y = self.inner(x).mean((2, 3))
        last, self.kept = self.kept, y.detach()
        logits: Tensor = self.head(y if last is None else y + 0.5 * last)
        return logits


def a_picture_step(env: RankEnv) -> str:
    torch.manual_seed(0)
    with env.launch(SGD | dict(gradient_accumulation=2)) as context:
        engine = cl.initialize(OfPictures().double(), context=context, criterion=F.cross_entropy)
        try:
            engine.train_step((torch.randn(4, 3, 6, 6, dtype=torch.float64), torch.randint(5, (4,))))
        except ValueError as error:
            return str(error)
    return "trained"


def test_a_model_of_other_inputs_is_refused_with_its_first_batch() -> None:
    (told,) = run_world(a_picture_step, 1)
    assert "reads what an earlier one has kept" in told


class Scratch(nn.Module):
    """A block that writes to a buffer, or reads it and clears it."""

    def __init__(self, note: Tensor, *, writes: bool) -> None:
        super().__init__()
        self.writes, self.inner = writes, nn.Linear(D, D)
        self.register_buffer("note", note)

    def forward(self, x: Tensor) -> Tensor:
        y = x + torch.tanh(self.inner(x)) * (1 + self.note)
        with torch.no_grad():
            self.note.copy_(self.inner.weight.norm() if self.writes else torch.zeros(()))
        return y


@pytest.mark.parametrize("world", [1, 2])
def test_modules_that_share_a_buffer_share_it_in_each_part_of_a_batch(world: int) -> None:
    truth = plain_run(of_scratch(), batches(V, STEPS), 0.5)
    for losses in run_world(losses_of_scratch, world):
        assert losses == pytest.approx(truth.losses, rel=1e-10)


def of_scratch() -> nn.Module:
    torch.manual_seed(0)
    note = torch.zeros((), dtype=torch.float64)
    return OfBlocks(V, D, [Scratch(note, writes=True), Scratch(note, writes=False)]).double()


def losses_of_scratch(env: RankEnv) -> list[float]:
    with env.launch(SGD | CUTS["gradient_accumulation=2"]) as context:
        engine = cl.initialize(of_scratch(), context=context)
        return [float(engine.train_step(context.local_batch(batch)).loss) for batch in batches(V, STEPS)]
