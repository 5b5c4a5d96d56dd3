"""Data parallelism is the serial run: loss, gradients, norm and weights, on every rank, in every step."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import colossal_lite as cl
from tests.shared.parity import Case, assert_parity, chunk_numel, initial_values, parallel_steps
from tests.shared.pool import RankEnv, run_world

FAMILIES = [("gpt2", True), ("gpt2", False), ("llama", True), ("llama", False)]


@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize(("family", "tied"), FAMILIES)
def test_every_gradient_is_the_serial_one(family: str, tied: bool, world_size: int) -> None:
    assert_parity(Case(family=family, tied=tied, world_size=world_size))


COMBINATIONS = {
    "dropout": Case(dropout=0.2),
    "ragged": Case(ragged=True),
    "clip": Case(config=dict(clip_grad_norm=0.05)),
    "accumulation": Case(config=dict(gradient_accumulation=3)),
    "uneven cut": Case(global_batch=5),
    "an empty cut": Case(global_batch=1),
    "more parts than samples": Case(global_batch=3, config=dict(gradient_accumulation=4)),
    "frozen": Case(frozen=("blocks.0.mlp.up.weight", "blocks.1.norm1.bias")),
    "module": Case(build="module"),
    "adapters": Case(adapters=2, dropout=0.1, ragged=True, config=dict(clip_grad_norm=0.05)),
    "adapters in every block anew": Case(
        family="llama",
        tied=False,
        adapters=2,
        build="module",
        config=dict(
            activation_checkpoint="full", gradient_accumulation=2, optimizer=dict(type="adamw", lr=1e-2)
        ),
    ),
    "adamw": Case(config=dict(optimizer=dict(type="adamw", lr=1e-2, weight_decay=0.1))),
    "everything": Case(
        family="llama",
        dropout=0.1,
        ragged=True,
        global_batch=7,
        config=dict(clip_grad_norm=0.05, gradient_accumulation=2),
    ),
}


@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize("name", COMBINATIONS)
def test_every_gradient_is_the_serial_one_with(name: str, world_size: int) -> None:
    assert_parity(COMBINATIONS[name], world_size=world_size)


def test_float32_is_within_its_own_rounding() -> None:
    assert_parity(Case(config=dict(precision="fp32", clip_grad_norm=0.05)), world_size=2)


def launched_values(env: RankEnv, case: Case) -> dict[str, torch.Tensor]:
    return dict(parallel_steps(env, case)[0][0].parameters)


def test_initial_bits_are_those_of_the_seed_at_every_world_size() -> None:
    case = Case(steps=1, config=dict(optimizer=dict(type="sgd", lr=0.0)), dropout=0.3)
    values = initial_values(case)
    for world_size in (1, 2, 4):
        for rank in run_world(launched_values, world_size, case):
            assert all(torch.equal(rank[name], value) for name, value in values.items())


def step_and_ledger(env: RankEnv, case: Case) -> list[tuple[str, str, int, int]]:
    return parallel_steps(env, case)[1]


@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_bytes_of_a_step_are_the_formula(accumulation: int, dropout: float) -> None:
    """One all-reduce of each gradient chunk, one agreement of 4 + parameters float64, sizes where there is dropout."""
    case = Case(steps=1, dropout=dropout, config=dict(gradient_accumulation=accumulation))
    parameters = initial_values(case)
    numel = chunk_numel([v.numel() for v in parameters.values()], 2)
    expected = {
        ("all_reduce", "data", 1, numel * 8),
        ("all_reduce", "world", 1, (7 + len(parameters)) * 8),
    }
    if dropout:
        expected.add(("all_gather", "data", 1, 2 * 8))
    for rows in run_world(step_and_ledger, 2, case):
        assert set(rows) == expected
    assert run_world(step_and_ledger, 1, case) == [[]]


def on_vectors(env: RankEnv, accumulation: int) -> dict[str, torch.Tensor]:
    """Weights after a step of a classifier of vectors [B, features], with dropout."""
    config = dict(precision="fp64", optimizer=dict(type="sgd", lr=0.5), gradient_accumulation=accumulation)
    with env.launch(config) as context:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.5), nn.Linear(8, 4))
        engine = cl.initialize(model, context=context)
        inputs, labels = torch.randn(5, 3, dtype=torch.float64), torch.randint(4, (5,))
        cut = context.local_batch(5)
        engine.train_step((inputs[cut], labels[cut]))
        return engine.full_state_dict()


def test_a_vector_has_one_position_and_its_dropout_masks_are_the_same_on_every_mesh() -> None:
    (truth,) = run_world(on_vectors, 1, 1)
    for world_size, accumulation in ((1, 2), (2, 1), (2, 3)):
        for weights in run_world(on_vectors, world_size, accumulation):
            assert all(torch.allclose(weights[name], truth[name], rtol=1e-12) for name in truth)
