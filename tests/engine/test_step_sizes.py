"""A global batch that is another one after a resume is told, in a loop of one's own too."""

from __future__ import annotations

import tempfile
import warnings
from typing import Any

import pytest
import torch
from torch import nn

import colossal_lite as cl
from tests.shared.pool import RankEnv, run_world

CONFIG: dict[str, Any] = dict(precision="fp64", optimizer=dict(type="sgd", lr=0.1), seed=3, timeout_s=30)
SAMPLES = [(row[:-1], row[1:]) for row in torch.arange(60).view(12, 5) % 8]


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(8, 4), nn.Linear(4, 8)).double()


def resumed(
    env: RankEnv, directory: str, batches: tuple[int, ...], steps: tuple[int, ...], drop_last: bool = True
) -> list[list[str]]:
    """What each of several runs warns of. They resume one another, with so many samples a step and so many steps."""
    told: list[list[str]] = []
    for batch, wanted in zip(batches, steps, strict=True):
        with warnings.catch_warnings(record=True) as found, env.launch(CONFIG) as context:
            warnings.simplefilter("always")
            engine = cl.initialize(model(), context=context)
            engine.resume(directory)
            loader = context.dataloader(
                SAMPLES, global_batch=batch, start=engine.samples, drop_last=drop_last
            )
            for part in loader.take(wanted):
                engine.train_step(part)
            engine.save(directory)
        told.append([str(each.message) for each in found if "samples of a step" in str(each.message)])
    return told


@pytest.mark.parametrize(
    ("batches", "is_told"), [((4, 8), True), ((4, 2), True), ((4, 4), False), ((5, 5), False)]
)
@pytest.mark.parametrize("steps", [2, 3])
def test_another_global_batch_after_a_resume_is_told_once(
    batches: tuple[int, int], is_told: bool, steps: int
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        first, other = run_world(resumed, 2, folder, batches, (steps, 3))
    before, after = batches
    says = f"samples of a step: {after} since the load, and {before} before it"
    assert first[0] == [] and other == [[], []]  # the main rank tells
    assert [says in told for told in first[1]] == [True] * is_told


def test_a_short_last_batch_behind_a_resume_is_not_told() -> None:
    with tempfile.TemporaryDirectory() as folder:
        assert run_world(resumed, 2, folder, (5, 5), (2, 3), False) == [[[], []]] * 2  # 5, 5, | 2, 5, 5


def test_a_save_behind_a_short_step_alone_still_has_the_size_of_the_steps_before() -> None:
    with tempfile.TemporaryDirectory() as folder:  # 5, 5, | 2, | 5, 5
        assert run_world(resumed, 2, folder, (5, 5, 5), (2, 1, 2), False) == [[[], [], []]] * 2
