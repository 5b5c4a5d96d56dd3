"""With `deterministic=True` the bits are those without it, and an operation that has no such kernel is refused."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import colossal_lite as cl
from colossal_lite.engine.engine import Engine


class Pooling(nn.Module):
    """Tokens to logits by way of an unpooling, which overwrites in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(8, 4), nn.Linear(4, 8)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.table(ids)
        pooled, places = F.max_pool2d(x, 2, return_indices=True)
        logits: Tensor = self.head(F.max_unpool2d(pooled, places, 2))
        return logits


@pytest.fixture(autouse=True)
def switches() -> Iterator[None]:
    yield
    assert not torch.are_deterministic_algorithms_enabled(), "the engine has left its switch on"
    assert torch.utils.deterministic.fill_uninitialized_memory


def engine_of(context: cl.Context, model: type[nn.Module] | None = None) -> Engine:
    sizes = cl.models.GPTConfig(vocabulary=8, layers=1, heads=2, width=8, sequence=8, dropout=0.1)
    return cl.initialize(model or (lambda: cl.models.GPT(sizes)), context=context)


IDS = torch.arange(16).view(2, 8) % 8
LABELS = IDS.roll(-1, 1)


def test_the_bits_are_those_without_it_and_the_switch_is_set_back() -> None:
    told = []
    for deterministic in (False, True):
        with cl.launch(dict(deterministic=deterministic, optimizer=dict(type="adamw"))) as context:
            engine = engine_of(context)
            assert torch.are_deterministic_algorithms_enabled() == deterministic
            steps = [engine.train_step((IDS, LABELS)) for _ in range(3)]
            told.append([(float(step.loss), step.grad_norm) for step in steps])
            engine.close()
            assert not torch.are_deterministic_algorithms_enabled()
    assert told[0] == told[1]


def test_an_operation_without_such_a_kernel_is_refused_by_name() -> None:
    words = (
        r"deterministic=True: max_unpooling2d_forward_out has no kernel here that gives the same bits twice; legal: "
        r"another operation in its place, or deterministic=False"
    )
    with cl.launch(dict(deterministic=False)) as context:
        assert engine_of(context, Pooling).train_step((IDS, LABELS)).loss.isfinite()
    with cl.launch(dict(deterministic=True)) as context:
        engine = engine_of(context, Pooling)
        for call in (engine.train_step, engine.eval_step):
            with pytest.raises(ValueError, match=words):
                call((IDS, LABELS))
        with pytest.raises(ValueError, match=words):
            engine(IDS)
