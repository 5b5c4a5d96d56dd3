"""Learning rates of the user's own: exact on any mesh and stage, compared between ranks, or refused."""

from __future__ import annotations

import os
import signal
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import colossal_lite as cl
from tests.shared.pool import RankEnv, run_world
from tests.shared.refusals import told_of

ADAMW = dict(type="adamw", lr=0.1, groups=[dict(match="*.bias", lr=0.02)])
CONFIG: dict[str, Any] = dict(precision="fp64", optimizer=ADAMW, seed=3, timeout_s=30)
STEPS = 4


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(8, 4), nn.Linear(4, 8)).double()


def batch() -> tuple[Tensor, Tensor]:
    inputs = torch.arange(16).view(4, 4) % 7
    return inputs, inputs + 1


def own_part(env: RankEnv) -> tuple[Tensor, Tensor]:
    inputs, labels = batch()
    return inputs.chunk(env.world_size)[env.rank], labels.chunk(env.world_size)[env.rank]


class Plateau:
    """Halves the rate when the loss has not fallen to a share of the last one: a state that no step number has."""

    def __init__(self) -> None:
        self.factor, self.last = 1.0, float("inf")

    def see(self, loss: float) -> None:
        self.factor *= 0.5 if loss > 0.9 * self.last else 1.0
        self.last = loss

    def __call__(self, step: int) -> float:
        return self.factor / (step + 1)


def plain() -> tuple[list[float], dict[str, Tensor]]:
    """Learning rates and weights of a loop that sets the rates by hand."""
    trained, rates, plateau = model(), list[float](), Plateau()
    groups = [dict(params=[p for n, p in trained.named_parameters() if n.endswith("bias")], peak=0.02)]
    groups.append(dict(params=[p for n, p in trained.named_parameters() if not n.endswith("bias")], peak=0.1))
    optimizer = torch.optim.AdamW(groups, weight_decay=0.01)
    for step in range(STEPS):
        for group in optimizer.param_groups:
            group["lr"] = group["peak"] * plateau(step)
        rates.append(optimizer.param_groups[-1]["lr"])
        optimizer.zero_grad()
        loss = F.cross_entropy(trained(batch()[0]).flatten(0, 1), batch()[1].flatten())
        loss.backward()
        optimizer.step()
        plateau.see(float(loss.detach()))
    return rates, trained.state_dict()


def trained(env: RankEnv, config: dict[str, Any], own_loop: bool) -> tuple[list[float], dict[str, Tensor]]:
    with env.launch(CONFIG | config | dict(optimizer=ADAMW | config.get("optimizer", {}))) as context:
        plateau, rates = Plateau(), list[float]()
        engine = cl.initialize(model(), context=context, lr_lambda=plateau)
        inputs, labels = own_part(env)
        for _ in range(STEPS):
            if own_loop:
                loss = F.cross_entropy(engine(inputs).flatten(0, 1), labels.flatten())
                engine.backward(loss, count=labels.numel())
                result = engine.step()
            else:
                result = engine.train_step((inputs, labels))
            plateau.see(float(result.loss))
            rates.append(result.lr)
        return rates, engine.full_state_dict()


@pytest.mark.parametrize("own_loop", [False, True])
@pytest.mark.parametrize(
    "config",
    [
        dict(zero=dict(stage=0)),
        dict(zero=dict(stage=2), memory=dict(placement="host")),
        dict(zero=dict(stage=3)),
        dict(zero=dict(stage=1), optimizer=dict(update_when="backward")),
    ],
    ids=["0", "2, state on host", "3", "updates in backward"],
)
def test_rates_set_by_hand_train_as_in_one_process(config: dict[str, Any], own_loop: bool) -> None:
    rates, weights = plain()
    assert rates[2] != rates[1]
    for found, state in run_world(trained, 2, config, own_loop):
        assert found == pytest.approx(rates, rel=1e-12)
        for name, right in weights.items():
            torch.testing.assert_close(state[name], right, rtol=1e-12, atol=1e-13)


def resumed(env: RankEnv, directory: str) -> list[float]:
    asked: list[float] = []
    for _ in range(2):
        with env.launch(CONFIG | dict(zero=dict(stage=1))) as context:
            engine = cl.initialize(model(), context=context, lr_lambda=lambda step: asked.append(step) or 1.0)
            engine.resume(directory)
            for _ in range(2):
                engine.train_step(own_part(env))
            engine.save(directory)
    return asked


def test_the_function_is_asked_once_a_step_and_goes_on_after_a_resume() -> None:
    with tempfile.TemporaryDirectory() as folder:
        assert run_world(resumed, 2, folder) == [[0, 1, 2, 3]] * 2


def apart(env: RankEnv, when: str) -> tuple[str, float]:
    """What a step says whose ranks have other rates, and the loss of the next one."""
    with env.launch(CONFIG | dict(optimizer=ADAMW | dict(update_when=when))) as context:
        rates = [1.0 + env.rank, 1.0]
        engine = cl.initialize(model(), context=context, lr_lambda=lambda step: rates.pop(0))
        told = told_of(lambda: engine.train_step(own_part(env)))
        return told, float(engine.train_step(own_part(env)).loss)


def keeps_a_plateau(env: RankEnv, folder: str, signalled: bool) -> list[float]:
    """Rates of the steps of one engine, which goes on from where the last one saved."""
    rates, plateau, kept = list[float](), Plateau(), dict[str, float]()

    def see(result: cl.StepResult) -> None:
        rates.append(result.lr)
        plateau.see(result.step)  # it rises, so the rate is halved
        kept.update(vars(plateau))

    with suppress(cl.Stopped), env.launch(CONFIG) as context:
        engine = cl.initialize(model(), context=context, lr_lambda=plateau)
        engine.on_step(see)
        engine.save_on_stop(folder, extra=kept)
        if (loaded := engine.resume(folder)) is not None:
            vars(plateau).update(loaded.manifest.extra)
        while engine.steps < STEPS:
            if signalled and engine.steps == 1:
                os.kill(os.getpid(), signal.SIGTERM)
            engine.train_step(own_part(env))
    return rates


def test_what_a_function_keeps_goes_on_after_a_signal_by_the_extra_of_its_save(tmp_path: Path) -> None:
    whole = run_world(keeps_a_plateau, 1, str(tmp_path / "whole"), False)[0]
    begun = run_world(keeps_a_plateau, 2, str(tmp_path / "cut"), True)[0]
    gone_on = run_world(keeps_a_plateau, 1, str(tmp_path / "cut"), False)[0]
    assert len(begun) == 2 and begun + gone_on == whole == [0.1, 0.1 / 2, 0.1 / 3 / 2, 0.1 / 4 / 4]


@pytest.mark.parametrize("when", ["step", "backward"])
def test_other_rates_on_one_rank_are_refused_and_update_nothing(when: str) -> None:
    first = float(F.cross_entropy(model()(batch()[0]).flatten(0, 1), batch()[1].flatten()).detach())
    for told, loss in run_world(apart, 2, when):
        assert "lr_lambda: it gives 1.0 on rank 0 and 2.0 on rank 1. Nothing was updated" in told
        assert loss == pytest.approx(first, rel=1e-12)


@pytest.mark.parametrize("given", [float("nan"), -0.1, None, "fast"])
def test_what_is_no_factor_is_refused(given: Any) -> None:
    with cl.launch(CONFIG, rank=0, world_size=1) as context:
        engine = cl.initialize(model(), context=context, lr_lambda=lambda step: given)
        told = told_of(lambda: engine.train_step(batch()))
        assert f"lr_lambda: it gives {given!r} for step 0; legal: a finite number >= 0" in told


LINEAR = dict(lr_scheduler=dict(type="linear", total_steps=9))
OTHERS: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    (LINEAR, dict(lr_lambda=lambda step: 1.0), "lr_lambda beside lr_scheduler.type='linear'"),
    ({}, dict(lr_lambda=lambda step: 1.0, optimizer=torch.optim.SGD), "lr_lambda beside optimizer="),
    ({}, dict(lr_lambda=0.5), "lr_lambda=0.5; legal: None, or a function"),
]


@pytest.mark.parametrize(("config", "arguments", "says"), OTHERS)
def test_two_schedules_and_what_is_no_function_are_refused(
    config: dict[str, Any], arguments: dict[str, Any], says: str
) -> None:
    with cl.launch(CONFIG | config, rank=0, world_size=1) as context:
        assert says in told_of(lambda: cl.initialize(model(), context=context, **arguments))
