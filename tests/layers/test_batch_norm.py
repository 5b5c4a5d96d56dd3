"""A batch norm over data ranks has the statistics, outputs and gradients of the whole batch in one process."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import colossal_lite as cl
from colossal_lite.layers.batch_norm import sync_statistics
from colossal_lite.planner.planner import plan
from colossal_lite.transforms.batch_statistics import mark_synced
from tests.shared.pool import RankEnv, run_world

STEPS, CLASSES, CHANNELS = 3, 5, 6
BASE: dict[str, Any] = dict(precision="fp64", optimizer=dict(type="sgd", lr=0.3, momentum=0.9), timeout_s=30)


def pictures(norm: Callable[[int], nn.Module]) -> nn.Module:
    """A residual block, as in a ResNet; x [B, 3, 8, 8]."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.norm = nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1, bias=False), norm(CHANNELS)
            self.second, self.last = nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1, bias=False), norm(CHANNELS)

        def forward(self, x: Tensor) -> Tensor:
            y = self.last(self.second(self.norm(self.first(x)).relu()))
            return torch.relu(x + y)

    return nn.Sequential(
        nn.Conv2d(3, CHANNELS, 3, bias=False), norm(CHANNELS), nn.ReLU(), Block(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(CHANNELS, CLASSES),
    )  # fmt: skip


def numbers(norm: Callable[[int], nn.Module]) -> nn.Module:
    """x [B, 7]."""
    return nn.Sequential(nn.Linear(7, CHANNELS), norm(CHANNELS), nn.ReLU(), nn.Linear(CHANNELS, CLASSES))


def series(norm: Callable[[int], nn.Module]) -> nn.Module:
    """x [B, 3, 9]."""
    return nn.Sequential(
        nn.Conv1d(3, CHANNELS, 3), norm(CHANNELS), nn.ReLU(), nn.Flatten(), nn.Linear(7 * CHANNELS, CLASSES)
    )


def volumes(norm: Callable[[int], nn.Module]) -> nn.Module:
    """x [B, 3, 4, 4, 4]."""
    return nn.Sequential(
        nn.Conv3d(3, CHANNELS, 3), norm(CHANNELS), nn.Tanh(), nn.Flatten(), nn.Linear(8 * CHANNELS, CLASSES)
    )


SHAPES: dict[str, tuple[Callable[..., nn.Module], tuple[int, ...], Callable[..., nn.Module]]] = {
    "pictures": (pictures, (3, 8, 8), nn.BatchNorm2d),
    "numbers": (numbers, (7,), nn.BatchNorm1d),
    "series": (series, (3, 9), nn.BatchNorm1d),
    "volumes": (volumes, (3, 4, 4, 4), nn.BatchNorm3d),
    "SyncBatchNorm": (pictures, (3, 8, 8), nn.SyncBatchNorm),
    "no weight": (pictures, (3, 8, 8), lambda n: nn.BatchNorm2d(n, affine=False)),
    "a plain average": (pictures, (3, 8, 8), lambda n: nn.BatchNorm2d(n, momentum=None)),
}


def built(what: str, *, plainly: bool = False) -> nn.Module:
    make, _, norm = SHAPES[what]
    torch.manual_seed(0)
    model = make(nn.BatchNorm2d if plainly and norm is nn.SyncBatchNorm else norm).double()
    generator = torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        parameter.data += 0.2 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
    return model


def batch(what: str, step: int, samples: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(100 + step)
    x = torch.randn(samples, *SHAPES[what][1], generator=generator, dtype=torch.float64)
    return 1 + 2 * x, torch.randint(CLASSES, (samples,), generator=generator)


Found = tuple[list[float], list[dict[str, Tensor]], dict[str, Tensor], list[Tensor]]
"""Losses, gradients, the state at the end, and what an evaluation gives."""


def plainly(what: str, samples: int) -> Found:
    model = built(what, plainly=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
    losses, gradients = [], []
    for step in range(STEPS):
        x, labels = batch(what, step, samples)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), labels)
        loss.backward()
        losses.append(float(loss.detach()))
        gradients.append({n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None})
        optimizer.step()
    x, labels = batch(what, STEPS, samples)
    with torch.no_grad():
        evaluated = F.cross_entropy(model.eval()(x), labels)
    return losses, gradients, model.state_dict(), [evaluated]


def on_ranks(env: RankEnv, what: str, samples: int, config: dict[str, Any], own_loop: bool = False) -> Any:
    with env.launch(BASE | config) as context:
        model = built(what)
        engine = cl.initialize(model, context=context, criterion=F.cross_entropy)
        losses, gradients = [], []
        for step in range(STEPS):
            x, labels = (part.tensor_split(env.world_size)[env.rank] for part in batch(what, step, samples))
            if own_loop:
                loss = F.cross_entropy(engine(x), labels)
                engine.backward(loss, count=len(labels))
            else:
                loss = engine.forward_backward((x, labels))
            gradients.append(engine.full_gradients() if "backward" not in str(config) else {})
            losses.append(float(engine.step().loss))
        x, labels = (part.tensor_split(env.world_size)[env.rank] for part in batch(what, STEPS, samples))
        evaluated = engine.eval_step((x, labels))
        state = engine.full_state_dict()
        buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
        engine.close()
        assert all("forward" not in vars(module) for module in model.modules())
        return losses, gradients, {**state, **buffers}, [torch.as_tensor(evaluated, dtype=torch.float64)]


def assert_alike(
    ranks: int, what: str, samples: int, config: dict[str, Any], *, own_loop: bool = False
) -> None:  # fmt: skip
    losses, gradients, state, evaluated = plainly(what, samples)
    for found in run_world(on_ranks, ranks, what, samples, config, own_loop):
        assert found[0] == pytest.approx(losses, rel=1e-12)
        for ours, right in zip(found[1], gradients, strict=True):
            assert not ours or ours.keys() == right.keys()
            largest = max(float(g.norm()) for g in right.values())
            for name in ours:
                assert float((ours[name] - right[name]).norm()) <= 1e-11 * largest, name
        assert found[2].keys() == state.keys()
        for name, value in state.items():
            torch.testing.assert_close(found[2][name], value, rtol=1e-10, atol=1e-12)
        torch.testing.assert_close(found[3][0], evaluated[0], rtol=1e-11, atol=0)


@pytest.mark.parametrize("what", SHAPES)
def test_each_kind_has_the_numbers_of_one_process(what: str) -> None:
    assert_alike(2, what, 8, {})


@pytest.mark.parametrize(
    "config",
    [
        dict(zero=dict(stage=1)), dict(zero=dict(stage=2)), dict(zero=dict(stage=3)), dict(backend="gloo"),
        dict(zero=dict(stage=3), memory=dict(placement="host")),
        dict(optimizer=dict(type="sgd", lr=0.3, momentum=0.9, update_when="backward")),
    ],
)  # fmt: skip
def test_so_it_does_however_state_is_kept(config: dict[str, Any]) -> None:
    assert_alike(2, "pictures", 8, config)


@pytest.mark.parametrize(("ranks", "samples"), [(2, 5), (4, 6), (2, 3)])
def test_ranks_may_have_other_numbers_of_samples(ranks: int, samples: int) -> None:
    assert_alike(ranks, "pictures", samples, {})
    assert_alike(ranks, "numbers", samples, {})


def test_so_it_does_in_a_loop_of_the_users_own() -> None:
    assert_alike(2, "pictures", 5, {}, own_loop=True)


def continued(env: RankEnv, folder: str, start: int) -> float:
    """The loss of a step after those before `start`."""
    with env.launch(BASE | dict(zero=dict(stage=3))) as context:
        engine = cl.initialize(built("pictures"), context=context, criterion=F.cross_entropy)
        if start:
            engine.resume(folder)
        x, labels = (part.tensor_split(env.world_size)[env.rank] for part in batch("pictures", start, 8))
        loss = float(engine.train_step((x, labels)).loss)
        engine.save(folder).wait()
        return loss


def test_a_run_goes_on_on_other_numbers_of_ranks(tmp_path: Path) -> None:
    losses = [run_world(continued, ranks, str(tmp_path), start)[0] for start, ranks in enumerate((2, 1, 4))]
    assert losses == pytest.approx(plainly("pictures", 8)[0], rel=1e-12)


def few(env: RankEnv, own_loop: bool) -> tuple[str, float]:
    """What a step on a rank without samples says, and the loss of an evaluation of as few."""
    with env.launch(BASE) as context:
        engine = cl.initialize(built("pictures"), context=context, criterion=F.cross_entropy)
        x, labels = (part.tensor_split(env.world_size)[env.rank] for part in batch("pictures", 0, 1))
        with pytest.raises(ValueError) as told:
            if own_loop:
                with torch.no_grad():  # which changes the statistics too
                    engine(x)
            else:
                engine.train_step((x, labels))
        return str(told.value), float(engine.eval_step((x, labels)))


@pytest.mark.parametrize("own_loop", [False, True])
def test_a_rank_without_samples_is_refused_in_training_alone(own_loop: bool) -> None:
    x, labels = batch("pictures", 0, 1)
    with torch.no_grad():
        truth = float(F.cross_entropy(built("pictures").eval()(x), labels))
    for told, evaluated in run_world(few, 2, own_loop):
        assert "[1, 0] samples on the data ranks, and a batch norm reads those of all" in told
        assert evaluated == pytest.approx(truth, rel=1e-12)


def sent(env: RankEnv, is_frozen: bool) -> dict[str, tuple[int, int]]:
    """Calls and bytes over the data axis in a step."""
    with env.launch(BASE) as context:
        model = built("numbers")
        engine = cl.initialize(model, context=context, criterion=F.cross_entropy)
        if is_frozen:
            model[1].eval()  # type: ignore[index]
        x, labels = (part.tensor_split(env.world_size)[env.rank] for part in batch("numbers", 0, 8))
        engine.train_step((x, labels))
        return {r.operation: (r.calls, r.payload_bytes) for r in engine.ledger.rows() if r.axis == "data"}


def test_a_norm_sends_two_numbers_a_channel_each_way_and_one_more() -> None:
    for found, none in zip(run_world(sent, 2, False), run_world(sent, 2, True), strict=True):
        samples_and_shape = 2 * 8 * 2
        assert found["all_gather"] == (2, 2 * 8 * (2 * CHANNELS + 1) + samples_and_shape)
        assert "all_gather" not in none
        assert found["all_reduce"] == (none["all_reduce"][0] + 1, none["all_reduce"][1] + 8 * 2 * CHANNELS)


def halves(env: RankEnv, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Outputs and the gradient of the input of this rank."""
    with env.launch(dict(precision="bf16")) as context:
        norm = nn.BatchNorm2d(3).to(dtype)
        mark_synced(norm)
        sync_statistics(norm, context.mesh.axis("data"))
        x, dy = (part.to(dtype).tensor_split(2)[env.rank].requires_grad_() for part in halved())
        y = norm(x)
        (dx,) = torch.autograd.grad(y, x, dy)
        assert norm.running_var is not None and norm.running_var.dtype == dtype
        return y.detach(), dx


def halved() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x, dy = (torch.randn(6, 3, 4, 4, generator=generator) for _ in range(2))
    return 3 + x, dy


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sums_of_half_precision_are_of_float32(dtype: torch.dtype) -> None:
    """As in torch: so outputs differ by their own rounding alone."""
    x, dy = (part.to(dtype) for part in halved())
    x.requires_grad_()
    right = nn.BatchNorm2d(3).to(dtype)(x)
    (dx,) = torch.autograd.grad(right, x, dy)
    for found, whole in zip(zip(*run_world(halves, 2, dtype), strict=True), (right, dx), strict=True):
        torch.testing.assert_close(
            torch.cat(found), whole.detach(), rtol=2 * torch.finfo(dtype).eps, atol=1e-2
        )


class OfAll(nn.BatchNorm1d):
    """With a forward of its own."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + 0.0


REFUSED: dict[str, tuple[dict[str, Any], Callable[[int], nn.Module], str]] = {
    "accumulation": (dict(gradient_accumulation=2), nn.BatchNorm1d, "gradient_accumulation=2"),
    "without statistics": ({}, lambda n: nn.BatchNorm1d(n, track_running_stats=False), "data=2"),
    "a forward of its own": ({}, OfAll, "1 is a OfAll, which reads the whole batch, and data=2"),
    "compiled": (dict(compile="block"), nn.BatchNorm1d, "data=2"),
}


def refused(env: RankEnv, what: str) -> list[str]:
    config, norm, _ = REFUSED[what]
    model = numbers(norm).double()
    with env.launch(BASE | config) as context:
        with pytest.raises(ValueError) as told:
            cl.initialize(model, context=context, criterion=F.cross_entropy)
    return [str(told.value), *(name for module in model.modules() for name in vars(module) if "rank" in name)]


@pytest.mark.parametrize("what", REFUSED)
def test_what_data_ranks_cannot_share_is_refused_by_name_and_the_model_is_left_as_it_was(what: str) -> None:
    for told, *left in run_world(refused, 2, what):
        assert REFUSED[what][2] in told and "where data ranks alone split the batch" in told
        assert not left


class Words(nn.Module):
    """Hugging Face's way to give tokens; ids [B, T]."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.norm = nn.Embedding(11, CHANNELS), nn.BatchNorm1d(CHANNELS)
        self.head = nn.Linear(CHANNELS, 11)

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        x = self.norm(self.table(input_ids).transpose(1, 2)).transpose(1, 2)
        logits: Tensor = self.head(x)
        return logits


class Sound(nn.Module):
    """x [B, T], or [B, T, 3] of features, to one label a sample."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.inner = nn.Conv1d(features, CHANNELS, 3)
        self.norm, self.head = nn.BatchNorm1d(CHANNELS), nn.Linear(CHANNELS, 11)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(self.inner(x[:, None] if x.dim() == 2 else x.transpose(1, 2)))
        logits: Tensor = self.head(h.relu().mean(2))
        return logits


def padded(what: str, start: int, stop: int, length: int) -> tuple[nn.Module, dict[str, Tensor], Tensor]:
    """A model, and samples of a batch that are padded to this length: arguments and labels."""
    torch.manual_seed(0)
    ids = (torch.arange(4 * 6).view(4, 6) % 11)[start:stop, :length]
    if what.startswith("words"):
        mask = dict(attention_mask=torch.ones_like(ids)) if "masked" in what else {}
        return Words().double(), dict(input_ids=ids, **mask), ids * 7 % 11
    x = ids.double().sin()
    features = 3 if what == "features" else 1
    return Sound(features).double(), dict(x=torch.stack([x] * 3, 2) if features == 3 else x), ids[:, 0]


def of_lengths(env: RankEnv, what: str, lengths: list[int], own_loop: bool) -> tuple[float, str]:
    with env.launch(BASE) as context:
        model, given, labels = padded(what, 2 * env.rank, 2 * env.rank + 2, lengths[env.rank])
        words = what.startswith("words")
        engine = cl.initialize(model, context=context, criterion=None if words else F.cross_entropy)
        try:
            if own_loop:
                logits = engine(**given)
                loss = F.cross_entropy(logits.flatten(0, -2), labels.flatten())
                engine.backward(loss)
                return float(engine.step().loss), ""
            return float(engine.train_step(dict(given, labels=labels)).loss), ""
        except ValueError as error:
            return 0.0, str(error)


@pytest.mark.parametrize("own_loop", [False, True])
@pytest.mark.parametrize("what", ["words", "words, masked", "sound", "features"])
def test_samples_of_one_length_train_and_of_other_lengths_are_refused_masked_or_not(
    what: str, own_loop: bool
) -> None:
    model, given, labels = padded(what, 0, 4, 6)
    truth = float(F.cross_entropy(model(**given).flatten(0, -2), labels.flatten()).detach())
    for loss, told in run_world(of_lengths, 2, what, [6, 6], own_loop):
        assert not told and loss == pytest.approx(truth, rel=1e-12)
    for _, told in run_world(of_lengths, 2, what, [6, 5], own_loop):
        assert "other shapes on other data ranks" in told and "masked or not" in told


def rows_of(env: RankEnv) -> list[tuple[str, str, int, int]]:
    with env.launch(BASE) as context:
        torch.manual_seed(0)
        engine = cl.initialize(Words().double(), context=context)
        ids = torch.arange(2 * 6).view(2, 6) % 11
        engine.train_step((ids, ids.roll(-1, 1)))
        return [(r.operation, r.axis, r.calls, r.payload_bytes) for r in engine.ledger.rows()]


def test_a_plan_counts_what_a_norm_sends() -> None:
    planned = plan(BASE, lambda: Words().double(), batch=4, sequence=6, world_size=2).traffic
    for found in run_world(rows_of, 2):
        assert found == [(r.operation, r.axis, r.calls, r.payload_bytes) for r in planned]
