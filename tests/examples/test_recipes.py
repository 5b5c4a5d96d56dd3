"""The recipes of examples/gpt run, and train what the first of them trains."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest
import torch

import colossal_lite as cl
from colossal_lite.config.config import Config
from colossal_lite.models import GPT, GPTConfig
from tests.shared.pool import RankEnv, run_world

CONFIGS = runpy.run_path(str(Path(__file__).parents[2] / "examples" / "gpt" / "configs.py"))["CONFIGS"]
SAME = [name for name in CONFIGS if name not in ("small_llama", "small_fp64") and not name.startswith("gpt2")]
STEPS = 3


def losses(env: RankEnv, recipe: dict[str, Any]) -> list[float]:
    model = GPTConfig(**recipe["model"])
    with env.launch(recipe["config"]) as context:
        engine = cl.initialize(lambda: GPT(model), context=context)
        cut, found = context.local_batch(recipe["global_batch"]), []
        for step in range(STEPS):
            generator = torch.Generator().manual_seed(step)
            tokens = torch.randint(model.vocabulary, (recipe["global_batch"], 65), generator=generator)[cut]
            found.append(engine.train_step((tokens[:, :-1], tokens[:, 1:])).loss.item())
        engine.close()
        return found


def ranks_of(recipe: dict[str, Any]) -> int:
    """What its axes fill, with data left at one; two ranks where data is all there is."""
    config = Config.load(recipe["config"])
    parallel = config.parallel
    inner = parallel.tensor.size * parallel.pipeline.size * parallel.sequence.size
    return inner if inner > 1 else 2


@pytest.fixture(scope="module")
def truth() -> list[float]:
    (found,) = run_world(losses, 1, CONFIGS["small"](STEPS))
    return found


@pytest.mark.parametrize("name", SAME)
def test_a_recipe_trains_what_small_trains(name: str, truth: list[float]) -> None:
    recipe = CONFIGS[name](STEPS)
    for found in run_world(losses, ranks_of(recipe), recipe, timeout_s=100):
        assert found == pytest.approx(truth, rel=1e-5)


@pytest.mark.parametrize("name", ["small_llama", "small_fp64"])
def test_other_recipes_run_on_two_ranks_as_on_one(name: str) -> None:
    recipe = CONFIGS[name](STEPS)
    (alone,) = run_world(losses, 1, recipe)
    for found in run_world(losses, 2, recipe):
        assert found == pytest.approx(alone, rel=1e-5)


def rests_on_the_host(env: RankEnv, recipe: dict[str, Any]) -> tuple[list[float], int]:
    with env.launch(recipe["config"]) as context:
        model = GPTConfig(**recipe["model"])
        engine = cl.initialize(lambda: GPT(model), context=context)
        tokens = torch.randint(256, (recipe["global_batch"], 129), generator=torch.Generator().manual_seed(0))
        tokens = tokens[context.local_batch(recipe["global_batch"])]
        losses = [float(engine.train_step((tokens[:, :-1], tokens[:, 1:])).loss) for _ in range(2)]
        return losses, sum(row.now_bytes for row in engine.memory_report() if row.tier == "host")


def test_of_gemini_a_part_rests_on_the_host_and_changes_nothing() -> None:
    """At the length of its sequences, with two ranks."""
    found = run_world(rests_on_the_host, 2, CONFIGS["gemini"](STEPS))
    on_device = run_world(rests_on_the_host, 2, CONFIGS["zero3"](STEPS))
    assert all(host_bytes > 10**6 for _, host_bytes in found) and all(not there for _, there in on_device)
    assert [losses for losses, _ in found] == [losses for losses, _ in on_device]
