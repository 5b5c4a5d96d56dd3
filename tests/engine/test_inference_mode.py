"""Within torch.inference_mode an engine evaluates and updates as outside of it, and refuses by name to train."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import colossal_lite as cl
from tests.shared.plain_loop import OfBlocks, batches
from tests.shared.pool import RankEnv, run_world
from tests.shared.refusals import told_of

V, D = 16, 8
SGD = dict(precision="fp64", optimizer=dict(type="adamw", lr=0.1), timeout_s=60)
ALL = dict(weights=1.0, gradients=1.0, optimizer=1.0)
MODES: dict[str, dict[str, Any]] = {
    "device": {},
    "ZeRO-3": dict(zero=dict(stage=3)),
    "state on the host": dict(zero=dict(stage=2), memory=dict(placement="host")),
    "state on disk": dict(zero=dict(stage=1), memory=dict(placement="disk")),
    "weights on the host": dict(zero=dict(stage=3), memory=dict(placement="static", host_fraction=ALL)),
}


def model() -> nn.Module:
    torch.manual_seed(0)
    return OfBlocks(V, D, (nn.Sequential(nn.Linear(D, D), nn.Tanh()) for _ in range(2))).double()


def evaluated(env: RankEnv, config: dict[str, Any], disk: str, within: bool) -> list[float]:
    """What an engine gives between training steps, with everything but training within inference mode or not."""
    if config.get("memory", {}).get("placement") == "disk":
        config = config | dict(memory=dict(placement="disk", disk_dir=disk))
    given: list[float] = []
    with env.launch(SGD | config) as context:
        cut = context.local_batch(4)
        built = model()
        with torch.inference_mode(within):
            engine = cl.initialize(built, context=context)
        for ids, labels in ((x[cut], y[cut]) for x, y in batches(V, 2)):
            with torch.inference_mode(within):
                fresh = ids.clone()
                given.append(float(engine(fresh).detach().double().sum()))
                given.append(float(engine.eval_step((fresh, labels))))
                engine.zero_grad()
            given.append(float(engine.forward_backward((ids, labels))))
            with torch.inference_mode(within):
                engine.step()
                engine.load_full_state_dict(engine.full_state_dict())
        with torch.inference_mode(within):
            engine.close()
    return given


@pytest.mark.parametrize("mode", MODES)
def test_all_but_training_gives_the_same_numbers_within_inference_mode(mode: str, tmp_path: Path) -> None:
    outside = run_world(evaluated, 2, MODES[mode], str(tmp_path), False)
    assert run_world(evaluated, 2, MODES[mode], str(tmp_path), True) == outside


def refused(env: RankEnv, mode: str) -> list[str]:
    off = torch.inference_mode if mode == "inference_mode" else torch.no_grad
    with env.launch(SGD) as context:
        engine = cl.initialize(model(), context=context)
        ids, labels = batches(V, 1)[0]
        loss = F.cross_entropy(engine(ids).flatten(0, 1), labels.flatten())
        with off():
            told = [told_of(lambda: engine.train_step((ids, labels))), told_of(lambda: engine.backward(loss))]
            built = model() if mode == "inference_mode" else None
        engine.zero_grad()
        engine.train_step((ids, labels))  # outside, as the message says
        if built is not None:
            told.append(told_of(lambda: cl.initialize(built, context=context)))
    return told


@pytest.mark.parametrize("mode", ["inference_mode", "no_grad"])
def test_what_needs_gradients_is_refused_by_name(mode: str) -> None:
    ((step, backward, *built),) = run_world(refused, 1, mode)
    words = (
        ": within torch.no_grad or torch.inference_mode, where there are no gradients. Legal: outside of both"
    )
    assert step.startswith(f"forward_backward{words}") and backward.startswith(f"backward{words}")
    assert all("words (Embedding) was built within torch.inference_mode" in told for told in built)
