"""Under a budget, a task trains by the way that fits and moves least; the choice changes bytes, never numbers."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch

from colossal_lite.config.config import Config
from colossal_lite.observe.memory_meter import LiveBytes
from colossal_lite.planner.spill import ROOM, Spill, spill
from tests.shared.parity import Case, start
from tests.shared.pool import RankEnv, run_world
from tests.zero.test_memory_budget import on_tier

LARGE = Case(
    world_size=1, tied=False, layers=4, tokens=8, global_batch=8, steps=2, ragged=True, dropout=0.1,
    sizes=dict(sequence=8, width=64),
    config=dict(
        optimizer=dict(type="adamw", lr=1e-2), precision="bf16", clip_grad_norm=0.05, gradient_accumulation=4,
        zero=dict(sum_order="ordered"),
    ),
)  # fmt: skip

KEPT = replace(LARGE, tokens=64, sizes=dict(sequence=64, width=32))
"""Its activations are larger than its weights."""


def within(budget: int) -> dict[str, Any]:
    return dict(memory=dict(placement="auto", device_budget=budget, update_on="host"))


def chosen(case: Case, budget: int, **over: Any) -> Spill:
    config = Config.load(case.full_config | within(budget) | over)
    return spill(config, case.model, batch=case.global_batch, sequence=case.tokens)


def peaks(case: Case) -> Mapping[str, int]:
    """The least budget of each way."""
    return {way.name: math.ceil(way.peak_bytes / ROOM) + 1 for way in chosen(case, 2).ways}


@pytest.fixture(scope="module")
def least() -> Mapping[str, int]:
    return peaks(LARGE)


def test_of_the_ways_that_fit_the_one_with_the_fewest_bytes_over_the_link_is_taken(
    least: Mapping[str, int],
) -> None:
    assert list(least) == ["as given", "layer by layer", "2 stages", "4 stages"]
    assert chosen(LARGE, 2**40).options == (), "it fits as it is"
    found = chosen(LARGE, max(least["layer by layer"], least["4 stages"]))
    by_name = {way.name: way for way in found.ways}
    assert found.chosen == by_name["4 stages"] and by_name["layer by layer"].fits
    (tight,) = (w for w in chosen(LARGE, least["layer by layer"]).ways if w.name == "layer by layer")
    assert 4 * found.chosen.link_bytes < tight.link_bytes, "up twice for four micro-batches"
    assert 3 * found.chosen.link_bytes < by_name["layer by layer"].link_bytes, "where more of them stay"
    assert str(found).splitlines()[-1].split()[-1] == "*"
    assert chosen(LARGE, min(least.values()) - 3).chosen is None, "initialize refuses it by name"
    kept = chosen(KEPT, peaks(KEPT)["layer by layer"]).chosen
    assert kept is not None and kept.options == ("--zero.stage=3",), (
        "the activations of all micro-batches do not fit"
    )


def test_what_would_change_numbers_or_settings_that_are_given_is_not_chosen(least: Mapping[str, int]) -> None:
    budget = least["4 stages"]
    for over in (
        dict(zero=dict(sum_order="fast")),
        dict(zero=dict(sum_order="ordered", stage=1)),
        dict(memory=dict(placement="host", device_budget=budget)),
        dict(memory=dict(placement="auto")),
        dict(parallel=dict(pipeline=dict(size=1, schedule="bfs", stages_per_rank=2))),
    ):
        assert chosen(LARGE, budget, **over) == Spill((), None), over
    for alone in (
        replace(LARGE, tied=True),
        replace(LARGE, config=dict(LARGE.config) | dict(gradient_accumulation=1)),
    ):
        assert list(peaks(alone)) == ["as given", "layer by layer"]


def trained(env: RankEnv, case: Case, options: tuple[str, ...]) -> dict[str, Any]:
    """Losses, norms and weights of each step; bytes held and moved after the last."""
    with env.launch(case.full_config, overrides=options) as context:
        engine = start(case, context)
        steps = []
        for number in range(case.steps):
            result = engine.train_step(case.batch(number))
            steps.append((float(result.loss), result.grad_norm, engine.full_state_dict()))
        before = on_tier(engine, "cpu") if options else 0
        with LiveBytes() as meter:
            engine.train_step(case.batch(0))
        most = before + meter.peak_bytes
        moved = sum(row.moved_bytes for row in engine.link_report())
        return dict(steps=steps, moved=moved, most=most)


def test_chosen_stages_have_the_bits_of_no_budget_in_the_bytes_that_were_planned(
    least: Mapping[str, int],
) -> None:
    budget = least["4 stages"]
    found = chosen(LARGE, budget).chosen
    assert found is not None and found.name == "4 stages"
    spilled = replace(LARGE, config=dict(LARGE.config) | within(budget))
    plain, ours = (
        run_world(trained, 1, each, options)[0] for each, options in ((LARGE, ()), (spilled, found.options))
    )
    for (loss, norm, state), (other_loss, other_norm, others) in zip(
        ours["steps"], plain["steps"], strict=True
    ):
        assert (loss, norm) == (other_loss, other_norm)
        assert all(torch.equal(value, others[name]) for name, value in state.items())
    assert abs(ours["moved"] - found.link_bytes) <= 0.02 * found.link_bytes
    assert ours["most"] <= budget
