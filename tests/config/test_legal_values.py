"""What a refusal calls legal is accepted beside the other settings, in the world and for the model."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Mapping
from typing import Any

import pytest

from colossal_lite.config.config import Config, ConfigError
from colossal_lite.config.errors import Problem
from colossal_lite.config.parallel_schema import ModelFacts
from colossal_lite.config.rules import nearest_factorisations

SMALL = ModelFacts(layers=2, heads=6, kv_heads=6, width=24, ffn=96, vocabulary=33, sequence=12, tied=True)


def checked(raw: Mapping[str, Any] | Config, world: int, options: list[str]) -> Config:
    """All that is decided without ranks."""
    config = Config.load(raw, options)
    config.check_built()
    config = config.check_world(world, SMALL)
    config.check_model(SMALL)
    return config


def refused(call: Callable[..., object], *arguments: object) -> tuple[Problem, ...]:
    try:
        call(*arguments)
    except ConfigError as error:
        return error.problems
    return ()


@pytest.mark.parametrize(
    "raw, world, path, legal",
    [
        (dict(parallel=dict(data=3), compile="block"), 8, "parallel.data", ["data 8 x pipeline 1 x"]),
        (dict(parallel=dict(data=3), zero=dict(stage=1, shard_size=4)), 8, "parallel.data", ["data 8", "data 4", ""]),
        (dict(parallel=dict(pipeline=3)), 3, "parallel.pipeline.size", ["1"]),
        (dict(parallel=dict(pipeline=4, data=2)), 8, "parallel.pipeline.size", ["data 4 x pipeline 2", "data 8", ""]),
        (dict(parallel=dict(tensor=4)), 4, "parallel.tensor.size", ["1, 2"]),
        (dict(parallel=dict(tensor=dict(size=3, mode="2d"))), 3, "parallel.tensor.size", ["1"]),
    ],
)  # fmt: skip
def test_legal_sizes_fit_the_world_the_model_and_the_other_settings(
    raw: dict[str, Any], world: int, path: str, legal: list[str]
) -> None:
    (told, *_) = refused(checked, raw, world, [])
    offers = told.legal.split("; ")
    assert told.path == path and len(offers) == len(legal)
    assert all(offer.startswith(begin) for offer, begin in zip(offers, legal, strict=True)), told


@pytest.mark.parametrize(
    "size, mode, legal", [(3, "2d", "1"), (8, "2d", "4"), (4, "3d", "1"), (2, "2.5d", "1")]
)
def test_only_tensor_sizes_that_fit_the_world_are_named(size: int, mode: str, legal: str) -> None:
    config = Config.load(dict(parallel=dict(tensor=dict(size=size, mode=mode))))
    (told,) = refused(config.check_world, size)
    assert told.legal == legal


def drawn(rng: random.Random) -> tuple[dict[str, Any], int]:
    size: Callable[[], int] = lambda: rng.choice([1, 1, 1, 2, 3, 4])  # noqa: E731
    tensor = dict(size=size(), mode=rng.choice(["1d", "2d", "2.5d"]), depth=rng.choice([1, 2]))
    sequence = dict(size=size(), mode=rng.choice(["ring", "ulysses", "usp"]), ulysses=rng.choice([1, 2, 3]))
    parallel = dict(data=rng.choice(["auto", 2, 4]), pipeline=size(), tensor=tensor, sequence=sequence)
    zero = dict(stage=rng.choice([0, 1, 3]), shard_size=rng.choice([None, 2, 4]))
    return dict(parallel=parallel, zero=zero, compile=rng.choice(["none", "none", "block"])), rng.randint(
        1, 8
    )


@pytest.mark.parametrize("seed", range(4))
def test_each_legal_figure_of_drawn_configurations_is_taken_when_tried(seed: int) -> None:
    rng, tried = random.Random(seed), 0
    for _ in range(25):
        raw, world = drawn(rng)
        found = refused(checked, raw, world, [])
        known = {problem.path for problem in found}
        for problem in found:
            for figure in problem.figures:
                left = {other.path for other in refused(checked, raw, world, [f"--{problem.path}={figure}"])}
                assert problem.path not in left, (raw, world, problem, figure)
                tried += 1
            for mesh in re.findall(
                r"data (\d+) x pipeline (\d+) x sequence (\d+) x tensor (\d+)", problem.legal
            ):
                names = ("data", "pipeline.size", "sequence.size", "tensor.size")
                options = [f"--parallel.{name}={n}" for name, n in zip(names, mesh, strict=True)]
                left = {other.path for other in refused(checked, raw, world, options)}
                assert not {path for path in left - known if path.startswith("parallel.")}, (
                    raw,
                    world,
                    problem,
                )
                tried += 1
    assert tried > 20


def test_without_a_mesh_that_all_settings_take_the_nearest_are_named() -> None:
    parallel = Config.load(dict(parallel=dict(tensor=2))).parallel
    nearest = nearest_factorisations(parallel, 7)
    assert nearest and nearest_factorisations(parallel, 7, takes=lambda sizes: False) == nearest


@pytest.mark.parametrize(
    "raw, taken, others",
    [
        (dict(precision=dict(dtype="fp32", master=4)), "'auto', 'fp32', 'none'", "'split'"),
        (dict(precision=dict(dtype="fp64", master="half")), "'auto', 'none'", "'fp32', 'split'"),
        (dict(memory=dict(placement="Static")), "'device', 'host', 'disk', 'auto'", "'static'"),
        (dict(optimizer=dict(update_when="end"), clip_grad_norm=1.0), "'step'", "'backward'"),
        (dict(compile="all", zero=dict(stage=3)), "'none'", "'block'"),
        (dict(kernels=True, precision="fp64"), "'auto', 'torch'", "'triton'"),
        (dict(optimizer=dict(moments=1), precision="fp64"), "'auto'", "'bf16'"),
    ],
)
def test_choices_that_other_settings_refuse_are_named_apart(
    raw: dict[str, Any], taken: str, others: str
) -> None:
    (problem,) = refused(Config.load, raw)
    assert problem.legal == f"{taken}; with other settings {others}"


def test_a_partition_by_counts_is_told_beside_the_stages_of_a_schedule() -> None:
    raw = dict(parallel=dict(pipeline=dict(stages_per_rank=3, partition=[1, 1, 1])))
    (problem,) = refused(Config.load, raw)
    assert problem.legal.startswith("1 with 1 count in partition, or a schedule that takes 3: interleaved")
    changed = dict(stages_per_rank=1, partition=[3])
    assert not refused(Config.load, dict(parallel=dict(pipeline=changed)))


@pytest.mark.parametrize(
    "given, legal, then",
    [
        (dict(), "an int >= 1: the optimizer steps of the run; and decay_steps, an int >= 1",
         dict(total_steps=1, decay_steps=1)),
        (dict(total_steps=5, warmup_steps=9, decay_steps=2), "0 to 3", dict(warmup_steps=3)),
        (dict(total_steps=5, warmup_steps=9), "0 to 4; and decay_steps=1", dict(warmup_steps=4, decay_steps=1)),
        (dict(total_steps=5, warmup_steps=9, decay_steps=8), "0 to 0; and decay_steps=5",
         dict(warmup_steps=0, decay_steps=5)),
    ],
)  # fmt: skip
def test_steps_that_wsd_calls_legal_leave_room_for_its_decay(
    given: dict[str, int], legal: str, then: dict[str, int]
) -> None:
    (problem,) = refused(Config.load, dict(lr_scheduler=dict(type="wsd", **given)))
    assert problem.legal == legal
    assert not refused(Config.load, dict(lr_scheduler=dict(type="wsd") | given | then))
