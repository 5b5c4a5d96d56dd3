"""A read of what another stage has is refused by name: a call of the model, a criterion that reads modules."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import colossal_lite as cl
from tests.shared.plain_loop import batches
from tests.shared.pool import RankEnv, run_world

V, D = 16, 8
SGD = dict(precision="fp64", optimizer=dict(type="sgd", lr=0.5), timeout_s=60)
TWO_RANKS = dict(pipeline=dict(size=2, micro_batches=2))
ONE_RANK = dict(pipeline=dict(size=1, stages_per_rank=2, schedule="bfs", micro_batches=2))


class Keeps(nn.Module):
    """A block that keeps a number of its last forward."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(D, D)
        self.aux: Any = torch.zeros(())
        self.norm: Any = None

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.inner(x))
        self.aux, self.norm = y.square().mean(), y.norm()
        return x + y


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.blocks = nn.Embedding(V, D), nn.ModuleList(Keeps() for _ in range(4))
        self.head = nn.Linear(D, V)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.words(ids)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(x)
        return logits


def model() -> Any:
    torch.manual_seed(0)
    return Model().double()


def mean(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


READS: dict[str, Callable[[Any], Any]] = {
    "blocks.0.aux": lambda m: m.blocks[0].aux,
    "blocks.0.norm": lambda m: m.blocks[0].norm or 0.0,
    "words.weight": lambda m: m.words.weight.square().sum(),
    "blocks.0.inner.bias": lambda m: m.blocks[0].inner.bias.sum(),
}


def said(action: Callable[[], object], kind: type[Exception]) -> str:
    with pytest.raises(kind) as caught:
        action()
    return f"{type(caught.value).__name__}: {caught.value}"


def reads(env: RankEnv, what: str) -> str:
    with env.launch(SGD | dict(parallel=TWO_RANKS)) as context:
        own = model()
        engine = cl.initialize(
            own, context=context, criterion=lambda x, y: mean(x, y) + 0.1 * READS[what](own)
        )
        if env.rank:
            assert not hasattr(own.blocks[0], "aux"), "an AttributeError, as of any module"
        return said(lambda: engine.train_step(batches(V, 1)[0]), Exception)


@pytest.mark.parametrize("what", READS)
def test_a_criterion_that_reads_a_module_of_another_stage_is_told_where_it_is(what: str) -> None:
    _, last = run_world(reads, 2, what)
    where, legal = f"parallel.pipeline: {what} is read", "colossal_lite.AuxiliaryLoss"
    assert last.startswith("AttributeError") and where in last and "is on stage 0" in last and legal in last


def test_a_criterion_that_reads_what_another_stage_of_this_rank_has_left_is_refused() -> None:
    own = model()
    with cl.launch(SGD | dict(parallel=ONE_RANK), rank=0, world_size=1) as context:
        engine = cl.initialize(
            own, context=context, criterion=lambda x, y: mean(x, y) + 0.1 * own.blocks[0].aux
        )
        told = said(lambda: engine.train_step(batches(V, 1)[0]), ValueError)
    assert "criterion: it reads a tensor that the forward has left" in told and "stages_per_rank" in told
    assert "colossal_lite.AuxiliaryLoss" in told


def calls(env: RankEnv) -> list[str]:
    with env.launch(SGD | dict(parallel=TWO_RANKS)) as context:
        engine = cl.initialize(model(), context=context)
        ids, labels = batches(V, 1)[0]
        engine.train_step((ids, labels))
        told = [said(lambda: engine.model(ids), ValueError)]
        assert float(engine.eval_step((ids, labels))) > 0, "the engine itself calls it"
        engine.close()
        return [*told, said(lambda: engine.model(ids), ValueError)]


def test_a_call_of_a_model_on_stages_is_refused_by_name() -> None:
    for each in (told for row in run_world(calls, 2) for told in row):
        assert "the layers of Model are on the ranks of parallel.pipeline" in each and "eval_step" in each
