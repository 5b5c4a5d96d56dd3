"""Frozen parameters of integers, as quantised weights are, keep dtype and values in every mode."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import colossal_lite as cl
from tests.shared.plain_loop import OfBlocks, batches, plain_run
from tests.shared.pool import RankEnv, run_world

V, D, STEPS = 16, 8, 2
LARGE = (1 << 40) + 1
"""A number that neither bf16 nor float32 has."""
SETTINGS: dict[str, dict[str, Any]] = {
    "data": {},
    "ZeRO-3": dict(zero=dict(stage=3), activation_checkpoint="full"),
    "weights on the host": dict(
        zero=dict(stage=3), memory=dict(placement="static", host_fraction=dict(weights=1.0), chunk_bytes=512)
    ),
    "tensor 1d": dict(parallel=dict(tensor=dict(size=2))),
    "pipeline": dict(parallel=dict(pipeline=dict(size=2, micro_batches=2))),
}


class Quantised(nn.Module):
    """A block with a weight of bytes, an order of its features, and an adapter that trains."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(D)
        self.bytes = nn.Parameter(torch.randint(-127, 127, (D, D), dtype=torch.int8), requires_grad=False)
        self.order = nn.Parameter(torch.randperm(D) + LARGE, requires_grad=False)
        self.down, self.up = nn.Linear(D, 2), nn.Linear(2, D)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)[..., self.order - LARGE]
        adapted: Tensor = self.up(torch.tanh(self.down(y)))
        return x + F.linear(y, self.bytes.to(x.dtype) / 127) + adapted


def model() -> nn.Module:
    torch.manual_seed(0)
    return OfBlocks(V, D, (Quantised() for _ in range(2))).double()


def trained(
    env: RankEnv, more: dict[str, Any], directory: str
) -> tuple[list[float], dict[str, Tensor], dict[str, Tensor]]:
    config = dict(precision="fp64", optimizer=dict(type="sgd", lr=0.5), timeout_s=60)
    with env.launch(config | more) as context:
        engine = cl.initialize(model(), context=context)
        parts, at = context.mesh.size("data"), context.mesh.coord("data")
        given = [tuple(x.tensor_split(parts)[at] for x in batch) for batch in batches(V, STEPS)]
        losses = [float(engine.train_step(batch).loss) for batch in given]
        engine.save(directory).wait()
        left = engine.full_state_dict()
        engine.load_full_state_dict(model().state_dict())
        engine.load(directory)
        return losses, left, engine.full_state_dict()


@pytest.mark.parametrize("setting", SETTINGS)
def test_integer_parameters_keep_dtype_and_values(setting: str, tmp_path: Path) -> None:
    truth = plain_run(model(), batches(V, STEPS), 0.5)
    for losses, left, loaded in run_world(trained, 2, SETTINGS[setting], str(tmp_path)):
        assert losses == pytest.approx(truth.losses, rel=1e-10)
        for name, expected in truth.weights.items():
            assert left[name].dtype == expected.dtype, name
            torch.testing.assert_close(left[name], expected, rtol=1e-10, atol=1e-13)
            assert torch.equal(loaded[name], left[name]), name


def narrow(env: RankEnv) -> Tensor:
    with env.launch(dict(precision="bf16", timeout_s=60)) as context:
        engine = cl.initialize(model().float(), context=context)
        engine.train_step(tuple(x.chunk(2)[env.rank] for x in batches(V, 1)[0]))
        return engine.full_state_dict()["blocks.1.order"]


def test_integers_are_not_rounded_to_the_dtype_of_weights() -> None:
    expected = dict(model().named_parameters())["blocks.1.order"]
    for order in run_world(narrow, 2):
        assert torch.equal(order, expected)
