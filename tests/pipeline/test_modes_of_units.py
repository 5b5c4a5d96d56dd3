"""Code and modules between blocks are exact on stages or refused, also where only training or evaluation has them."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import colossal_lite as cl
from colossal_lite.pipeline.traced_sections import traced
from colossal_lite.pipeline.unit_trace import UnitsError
from tests.shared.plain_loop import batches, plain_run
from tests.shared.pool import RankEnv, run_world

V, D, STEPS = 16, 8, 3
STAGES = dict(pipeline=dict(size=1, stages_per_rank=2, schedule="bfs", micro_batches=2))
SGD = dict(precision="fp64", optimizer=dict(type="sgd", lr=0.5), timeout_s=60)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(D, D)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.inner(x))


class Modal(nn.Module):
    """Does `what` when it trains, or, where that begins with "eval ", when it evaluates."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.what = what
        self.words, self.drop = nn.Embedding(V, D), nn.Dropout(0.3)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.extra, self.norm, self.head = nn.Linear(D, D), nn.LayerNorm(D), nn.Linear(D, V)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, ids: Tensor) -> Tensor:
        does = "" if self.what.startswith("eval ") == self.training else self.what.removeprefix("eval ")
        first = x = self.words(ids)
        if does == "drop":
            x = self.drop(x)
        for block in self.blocks:
            x = block(x)
        if does == "skip":
            x = x + first
        elif does == "extra":
            x = x + self.extra(x)
        elif does == "table":
            x = x + self.words.weight.mean()
        elif does == "twice":
            x = self.blocks[0](x)
        logits: Tensor = self.head(self.norm(x))
        return logits


def model(what: str) -> Modal:
    torch.manual_seed(0)
    return Modal(what).double()


def staged(what: str) -> list[float]:
    with cl.launch(SGD | dict(parallel=STAGES), rank=0, world_size=1) as context:
        engine = cl.initialize(model(what), context=context)
        losses = [float(engine.train_step(batch).loss) for batch in batches(V, STEPS)]
        return [*losses, float(engine.eval_step(batches(V, STEPS)[0]))]


@pytest.mark.parametrize("what", ["", "extra", "eval extra", "table", "eval table"])
def test_what_a_mode_adds_to_a_unit_is_exact_on_stages(what: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # of parameters that no step trains
        truth = plain_run(model(what), batches(V, STEPS), 0.5)
        assert staged(what) == pytest.approx([*truth.losses, truth.evaluated], rel=1e-12)


@pytest.mark.parametrize("what", ["skip", "eval skip", "twice", "eval twice"])
def test_what_a_mode_alone_passes_beside_the_stream_is_refused(what: str) -> None:
    with pytest.raises(UnitsError, match=r"One tensor may pass between blocks|where no block is due"):
        traced(model(what))


def test_dropout_in_training_alone_does_not_make_the_modes_differ() -> None:
    assert len(traced(model("drop")).parts) == 6


class Beside(nn.Module):
    """A module of each block stands in a list of its own, and acts before or behind the block."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.where, self.words = where, nn.Embedding(V, D)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.norms = nn.ModuleList(nn.LayerNorm(D) for _ in range(4))
        self.head = nn.Linear(D, V)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.words(ids)
        for norm, block in zip(self.norms, self.blocks, strict=True):
            x = block(norm(x)) if self.where == "before" else norm(block(x))
        logits: Tensor = self.head(x)
        return logits


def beside(env: RankEnv, where: str, parallel: dict[str, Any]) -> tuple[list[float], dict[str, Tensor]]:
    torch.manual_seed(0)
    with env.launch(SGD | dict(parallel=parallel)) as context:
        engine = cl.initialize(Beside(where).double(), context=context)
        losses = [float(engine.train_step(batch).loss) for batch in batches(V, STEPS)]
        return losses, engine.full_state_dict()


@pytest.mark.parametrize("where", ["before", "behind"])
@pytest.mark.parametrize("schedule", ["1f1b", "interleaved"])
def test_modules_beside_the_blocks_go_with_their_stage(schedule: str, where: str) -> None:
    ((losses, weights),) = run_world(beside, 1, where, {})
    stages = dict(size=2, schedule=schedule, stages_per_rank=1 if schedule == "1f1b" else 2)
    for found, state in run_world(beside, 2, where, dict(pipeline=stages)):
        assert found == pytest.approx(losses, rel=1e-12)
        for name, right in weights.items():
            torch.testing.assert_close(state[name], right, rtol=1e-11, atol=1e-13)
