"""What passes between stages arrives as it was given, of its own kind, and may be written to as in one process."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from transformers.modeling_outputs import BaseModelOutput

import colossal_lite as cl
from colossal_lite.distributed.communicator import CommError
from tests.pipeline.test_model_units import D, ModelCase, V, case_of
from tests.shared.parity import assert_parity
from tests.shared.pool import RankEnv, run_world

ON_ONE_DEVICE = dict(
    zero=dict(stage=3, prefetch=0),
    memory=dict(
        placement="static",
        update_on="host",
        host_fraction=dict(weights=1.0, gradients=1.0, optimizer=1.0),
    ),
)
"""One rank runs all stages, and holds the weights of one."""


class First(nn.Module):
    def __init__(self, gives: Callable[[nn.Embedding, Tensor], Any]) -> None:
        super().__init__()
        self.words, self.gives = nn.Embedding(V, D), gives

    def forward(self, ids: Tensor) -> Any:
        return self.gives(self.words, ids)


class Middle(nn.Module):
    def __init__(self, passes: Callable[[nn.Linear, Any], Any]) -> None:
        super().__init__()
        self.line, self.passes = nn.Linear(D, D), passes

    def forward(self, came: Any) -> Any:
        return self.passes(self.line, came)


class Last(Middle):
    def __init__(self, passes: Callable[[nn.Linear, Any], Any]) -> None:
        super().__init__(passes)
        self.line = nn.Linear(D, V)


def chain(first: Any, middle: Any, last: Any) -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(First(first), Middle(middle), Middle(middle), Middle(middle), Last(last))


def appends() -> nn.Module:
    """Each unit reads all before it, and looks whether it got a list."""

    def middle(line: nn.Linear, came: Any) -> Any:
        if not isinstance(came, list):
            return [came[0]]
        came.append(torch.tanh(line(came[-1])))
        return came

    return chain(lambda words, ids: [words(ids)], middle, lambda line, came: line(sum(came)))


def is_complex() -> nn.Module:
    def middle(line: nn.Linear, came: Tensor) -> Tensor:
        return torch.complex(torch.tanh(line(came.real)), came.imag * 1.1)

    return chain(
        lambda words, ids: torch.complex(words(ids), words(ids).sin()),
        middle,
        lambda line, came: line(came.real + came.imag),
    )


def writes_to_numbers() -> nn.Module:
    """A tensor without a gradient is changed in place, beside one that autograd has saved."""

    def middle(line: nn.Linear, came: Any) -> Any:
        x, numbers = came
        x = torch.tanh(line(x))
        numbers.mul_(0.9)
        return x * numbers[..., None], numbers.clone()

    return chain(
        lambda words, ids: (words(ids), ids.to(words.weight.dtype)), middle, lambda line, came: line(came[0])
    )


def writes_to_its_input() -> nn.Module:
    torch.manual_seed(3)
    lines = [nn.Linear(D, D) for _ in range(3)]
    parts = [part for line in lines for part in (line, nn.ReLU(inplace=True))]
    return nn.Sequential(nn.Embedding(V, D), *parts, nn.Linear(D, V))


def passes_a_weight() -> nn.Module:
    """The last unit reads the table of the first."""
    return chain(
        lambda words, ids: (words(ids), words.weight),
        lambda line, came: (torch.tanh(line(came[0])), came[1]),
        lambda line, came: came[0] @ came[1].T + line(came[0]),
    )


def passes_a_view_of_a_weight() -> nn.Module:
    return chain(
        lambda words, ids: (words(ids), words.weight[:1].expand(*ids.shape, D)),
        lambda line, came: (torch.tanh(line(came[0] + came[1])), came[1]),
        lambda line, came: line(came[0]),
    )


FOUR = dict(schedule="interleaved", stages_per_rank=2, micro_batches=4)
ALONE = dict(size=1, stages_per_rank=3, schedule="bfs", micro_batches=2)
PASSED = {
    "a list": case_of(appends),
    "a list, interleaved": case_of(appends, pipeline=FOUR),
    "complex numbers": case_of(is_complex),
    "numbers that are written to": case_of(writes_to_numbers, pipeline=FOUR),
    "an input that is written to": case_of(writes_to_its_input, pipeline=dict(partition=(2, 6))),
    "an input that is written to, zb-h1": case_of(
        writes_to_its_input, pipeline=dict(partition=(4, 4), schedule="zb-h1")
    ),
    "an input that is written to, profiled": case_of(
        writes_to_its_input, pipeline=dict(partition="profiled"), shows=True
    ),
    "a weight": case_of(passes_a_weight),
    "a weight, whose place another stage takes": case_of(
        passes_a_weight, pipeline=ALONE, world_size=1, config=ON_ONE_DEVICE
    ),
    "a view of a weight, whose place another stage takes": case_of(
        passes_a_view_of_a_weight, pipeline=ALONE, world_size=1, config=ON_ONE_DEVICE
    ),
}


@pytest.mark.parametrize("name", PASSED)
def test_what_passes_between_stages_trains_as_in_one_process(name: str) -> None:
    assert_parity(PASSED[name])


def passes_numbers_on() -> nn.Module:
    """Numbers that each unit reads and gives on as they came."""
    return chain(
        lambda words, ids: (words(ids), ids.to(words.weight.dtype)),
        lambda line, came: (torch.tanh(line(came[0] * came[1][..., None])), came[1]),
        lambda line, came: line(came[0] * came[1][..., None]),
    )


def evaluated(env: RankEnv, case: ModelCase) -> list[float]:
    """Losses of evaluations between steps."""
    losses = []
    with env.launch(case.full_config) as context:
        engine = cl.initialize(case.model, context=context)
        for number in (0, 1, 2, 2):
            batch = tuple(t[context.local_batch(case.global_batch)] for t in case.batch(number))
            losses += [float(engine.eval_step(batch)), float(engine.train_step(batch).loss)]
    return losses


@pytest.mark.parametrize("pipeline", [dict(size=4, micro_batches=6), FOUR], ids=["1f1b", "interleaved"])
def test_what_is_passed_on_as_it_came_is_whole_in_an_evaluation_too(pipeline: dict[str, Any]) -> None:
    """There a message's memory is free right behind the forward, before it is sent on."""
    case = case_of(passes_numbers_on, pipeline=pipeline, global_batch=12)
    (alone,) = run_world(evaluated, 1, replace(case, pipeline=1))
    for losses in run_world(evaluated, pipeline.get("size", 2), case):
        assert losses == pytest.approx(alone, rel=1e-12)


class Pair(NamedTuple):
    x: Tensor
    y: Tensor


KINDS: dict[str, Callable[[Tensor], Any]] = {
    "Pair": lambda x: Pair(x, x),
    "BaseModelOutput": lambda x: BaseModelOutput(last_hidden_state=x),
}


def refused(env: RankEnv, case: ModelCase, kind: str) -> str:
    model = chain(
        lambda words, ids: KINDS[kind](words(ids)), lambda line, came: came, lambda line, came: came
    )
    try:
        with env.launch(case.full_config) as context:
            engine = cl.initialize(model, context=context)
            engine.train_step(tuple(t[context.local_batch(case.global_batch)] for t in case.batch(0)))
    except (ValueError, CommError) as error:
        return str(error)
    return ""


@pytest.mark.parametrize("kind", KINDS)
def test_a_kind_of_tuple_or_dict_that_would_arrive_as_another_is_refused(kind: str) -> None:
    for said in run_world(refused, 2, case_of(nn.Module), kind):
        assert f"gives a {kind}" in said and "legal: a tensor, or a flat tuple, list or dict" in said
