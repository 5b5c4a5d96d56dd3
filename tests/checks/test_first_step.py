"""Numbers that a model keeps outside of its tensors: exact where a forward runs once a step, else refused by name."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import colossal_lite as cl
from colossal_lite.checks.first_step import FirstStep, _counted
from colossal_lite.config.config import Config
from colossal_lite.distributed.communicator import CommError
from tests.shared.plain_loop import batches, plain_run
from tests.shared.pool import RankEnv, WorldError, run_world

VOCABULARY, WIDTH, TOKENS, BATCH = 19, 8, 6, 4
GIVEN = batches(VOCABULARY, 3, TOKENS)


class Block(nn.Module):
    """Keeps numbers, and computes with some of them."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way, self.linear = way, nn.Linear(WIDTH, WIDTH)
        self.calls, self.temperature, self.longest, self.mean = 0, 1.0, 0, 0.0

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            match self.way:
                case "counts calls":
                    self.calls += 1
                case "anneals":
                    self.temperature *= 0.9
                case "keeps the longest":
                    self.longest = max(self.longest, x.shape[1])
                case "logs a mean":
                    self.mean = float(x.detach().mean())
        return x + F.gelu(self.linear(x)) * (1.0 + 0.1 * self.calls) * self.temperature


class Model(nn.Module):
    """May count its own calls, beside its blocks."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.counts = way == "counts outside of blocks"
        self.embedding, self.calls = nn.Embedding(VOCABULARY, WIDTH), 0
        self.blocks = nn.ModuleList([Block(way) for _ in range(2)])
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids: Tensor) -> Tensor:
        self.calls += self.training and self.counts
        x = self.embedding(ids) * (1.0 + 0.1 * self.calls)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(x)
        return logits


def build(way: str) -> nn.Module:
    torch.manual_seed(3)
    return Model(way)


def serial(way: str) -> list[float]:
    return plain_run(build(way).double(), GIVEN, 0.3).losses


def losses(env: RankEnv, way: str, config: dict[str, Any]) -> list[float]:
    base = dict(precision="fp64", optimizer=dict(type="sgd", lr=0.3), timeout_s=60)
    with env.launch(base | config) as context:
        engine = cl.initialize(build(way), context=context)
        part = context.local_batch(BATCH)
        return [float(engine.train_step(tuple(t[part] for t in GIVEN[step])).loss) for step in range(3)]


ONCE: dict[str, tuple[int, dict[str, Any]]] = {
    "one rank": (1, {}),
    "data": (2, {}),
    "zero 3": (2, dict(zero=dict(stage=3))),
}
OFTEN: dict[str, tuple[int, dict[str, Any]]] = {
    "accumulation": (1, dict(gradient_accumulation=2)),
    "three micro-batches of unlike sizes": (1, dict(gradient_accumulation=3)),
    "recomputed": (1, dict(activation_checkpoint="full")),
    "recomputed at zero 3": (2, dict(activation_checkpoint="full", zero=dict(stage=3))),
}
COUNTED = {"counts calls": "blocks.0.calls", "anneals": "blocks.0.temperature"}


@pytest.mark.parametrize("mesh", ONCE)
@pytest.mark.parametrize("way", [*COUNTED, "counts outside of blocks"])
def test_a_count_is_that_of_one_process_where_a_forward_runs_once_a_step(way: str, mesh: str) -> None:
    for found in run_world(losses, ONCE[mesh][0], way, ONCE[mesh][1]):
        assert found == pytest.approx(serial(way), rel=1e-12, abs=0)


@pytest.mark.parametrize("mesh", OFTEN)
@pytest.mark.parametrize("way", COUNTED)
def test_a_count_is_refused_by_name_where_a_block_runs_more_often(way: str, mesh: str) -> None:
    ranks, config = OFTEN[mesh]
    with pytest.raises(WorldError, match=f"its forward changes {COUNTED[way]}, a number"):
        run_world(losses, ranks, way, config)


def test_a_count_outside_of_blocks_is_refused_in_micro_batches_and_exact_with_recomputation() -> None:
    way = "counts outside of blocks"
    (found,) = run_world(losses, 1, way, dict(activation_checkpoint="full"))
    assert found == pytest.approx(serial(way), rel=1e-12, abs=0)
    with pytest.raises(WorldError, match=r"its forward changes calls, a number.*gradient_accumulation=2"):
        run_world(losses, 1, way, dict(gradient_accumulation=2))


@pytest.mark.parametrize("mesh", [*OFTEN, "pipeline"])
@pytest.mark.parametrize("way", ["keeps the longest", "logs a mean"])
def test_numbers_that_do_not_count_are_let_be(way: str, mesh: str) -> None:
    ranks, config = (OFTEN | {"pipeline": (2, dict(parallel=dict(pipeline=2)))})[mesh]
    for found in run_world(losses, ranks, way, config):
        assert found == pytest.approx(serial(way), rel=1e-12, abs=0)


def test_a_loop_of_the_users_own_counts_as_in_one_process() -> None:
    plain, found = build("counts calls").double(), []
    with cl.launch(dict(precision="fp64", gradient_accumulation=2)) as context:
        engine = cl.initialize(build("counts calls"), context=context)
        for half in GIVEN[0][0].chunk(2):
            loss = engine(half).square().mean()
            engine.backward(loss)
            found.append((loss.item(), plain(half).square().mean().item()))
    assert all(one == pytest.approx(other, rel=1e-12) for one, other in found)


@pytest.mark.parametrize(
    ("values", "is_counted"),
    [
        ((0, 1, 2), True),
        ((5, 3, 1), True),
        ((1.0, 0.9, 0.81), True),
        ((8.0, 0.0, 0.0), False),
        ((0, 6, 6), False),
        ((6, 6, 6), False),
        ((0.3, 0.7, 0.2), False),
        ((0, 1), False),
    ],
)
def test_a_count_is_what_two_forwards_change_alike(values: tuple[float, ...], is_counted: bool) -> None:
    assert bool(_counted([{"n": value} for value in values])) is is_counted


@pytest.mark.parametrize("draws", [True, False])
def test_ranks_whose_draws_part_their_ways_are_told_of_the_draws(draws: bool) -> None:
    first_step = FirstStep(nn.Linear(1, 1), Config.load({}), torch.device("cpu"))
    told, match = (ValueError, "its forward draws") if draws else (CommError, "has come with")
    with pytest.raises(told, match=match), first_step.forward(0):
        torch.rand(int(draws))
        raise CommError("rank 1 has come with all_gather, this rank with reduce_scatter")
