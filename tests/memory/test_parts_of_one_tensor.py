"""Parameters that are parts of one tensor train, and a write of others in one of them is still refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import colossal_lite as cl
from tests.shared.plain_loop import batches, plain_run
from tests.shared.pool import RankEnv, WorldError, run_world

V, D, STEPS = 16, 8, 3


class Fused(nn.Module):
    """Takes the parts of a fused weight apart, as for a checkpoint of another library: torch gives all one version."""

    def __init__(self, clones: bool = False) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(V, D), nn.Linear(D, V)
        parts = torch.randn(3 * D, D).chunk(3)
        q, k, v = (part.clone() for part in parts) if clones else parts
        self.q, self.k = nn.Parameter(q), nn.Parameter(k)
        self.v = nn.Parameter(v, requires_grad=False)  # in a chunk of other parameters

    def forward(self, ids: Tensor) -> Tensor:
        x = self.words(ids)
        logits: Tensor = self.head(F.linear(torch.tanh(F.linear(x, self.q)) + F.linear(x, self.k), self.v))
        return logits


def model(clones: bool = False) -> Fused:
    torch.manual_seed(0)
    return Fused(clones)


def _train(
    env: RankEnv, zero: dict[str, Any], chunk_bytes: int, precision: str, write: str, clones: bool = False
) -> list[float]:
    config = dict(precision=precision, optimizer=dict(type="sgd", lr=0.5), zero=zero, timeout_s=60)
    with env.launch(config | dict(memory=dict(chunk_bytes=chunk_bytes))) as context:
        engine, losses = cl.initialize(model(clones), context=context), []
        for batch in batches(V, STEPS):
            losses.append(float(engine.train_step(context.local_batch(batch)).loss))
            if write:
                with torch.no_grad():
                    engine.model.get_parameter(write).add_(1.0)
        return losses


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("chunk_bytes", [128, 1_000_000])  # each in a chunk of its own, or together
def test_parts_of_one_tensor_train_sharded(stage: int, chunk_bytes: int) -> None:
    expected = plain_run(model(), batches(V, STEPS), lr=0.5).losses
    for losses in run_world(_train, 2, dict(stage=stage), chunk_bytes, "fp32", ""):
        assert losses == pytest.approx(expected, rel=1e-5)


def test_a_write_of_others_in_a_part_is_refused_beside_masters() -> None:
    assert len(run_world(_train, 1, dict(stage=0), 128, "bf16", "")[0]) == STEPS
    with pytest.raises(WorldError, match="was changed in place by other code than the engine"):
        run_world(_train, 1, dict(stage=0), 128, "bf16", "k")


def test_a_write_in_a_frozen_part_names_all_parts_and_a_clone_takes_it() -> None:
    with pytest.raises(
        WorldError, match="one of q, k, v, which are parts of one tensor, was changed in place"
    ):
        run_world(_train, 1, dict(stage=0), 128, "bf16", "v")
    assert len(run_world(_train, 1, dict(stage=0), 128, "bf16", "v", True)[0]) == STEPS
