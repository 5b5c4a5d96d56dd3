"""Tests two engines in one process, each on an emulated device: budgets, links and counts are separate."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

import colossal_lite as cl
from colossal_lite.engine.engine import Engine
from colossal_lite.zero import build_chunks as build
from tests.offload.test_streams import CASE, placed
from tests.shared.parity import Case, start
from tests.shared.pool import RankEnv, run_world


@dataclass(frozen=True)
class Seen:
    """What one engine has told of itself."""

    losses: list[float]
    weights: dict[str, Tensor]
    links: list[list[tuple[str, int]]]
    """Bytes of each step."""
    memory: list[tuple[str, str, int, int, int | None]]
    activations_bytes: int
    """The most that its budget was charged with, beside the state."""
    placement: str
    moments: int


def steps(engine: Engine, case: Case) -> Iterator[tuple[float, list[tuple[str, int]]]]:
    for number in range(case.steps):
        loss = float(engine.train_step(case.batch(number)).loss)
        engine._state.rest()  # what a step owes to its updates counts in the one in which they run
        yield loss, [(row.link, row.moved_bytes) for row in engine.link_report()]


def seen(engine: Engine, done: list[tuple[float, list[tuple[str, int]]]], case: Case) -> Seen:
    with engine.metered():
        engine.train_step(case.batch(0))
    rows = [(r.kind, r.tier, r.now_bytes, r.peak_bytes, r.forecast_bytes) for r in engine.memory_report()]
    memory_budget = engine._memory_budget
    assert memory_budget is not None
    return Seen(
        [loss for loss, _ in done], engine.full_state_dict(), [links for _, links in done], rows,
        memory_budget.activations_bytes, str(memory_budget.placement), len(engine.memory_timeline().moments),
    )  # fmt: skip


def alone(env: RankEnv, case: Case) -> Seen:
    with cl.launch(case.full_config) as context:
        engine = start(case, context)
        return seen(engine, list(steps(engine, case)), case)


def in_turns(env: RankEnv, cases: list[Case]) -> list[Seen]:
    """Step by step, on one thread."""
    with cl.launch(cases[0].full_config) as first, cl.launch(cases[1].full_config) as second:
        engines = [start(case, context) for case, context in zip(cases, (first, second), strict=True)]
        rows = zip(*(steps(engine, case) for engine, case in zip(engines, cases, strict=True)), strict=True)
        done = list(zip(*rows, strict=True))
        return [
            seen(engine, list(rows), case) for engine, rows, case in zip(engines, done, cases, strict=True)
        ]


def at_once(env: RankEnv, cases: list[Case]) -> list[Seen]:
    """Each on a thread, which begins each step with the other."""
    together = threading.Barrier(2, timeout=60.0)

    def train(case: Case) -> Seen:
        try:
            with cl.launch(case.full_config) as context:
                engine, done = start(case, context), []
                run = steps(engine, case)
                for _ in range(case.steps):
                    together.wait()
                    done.append(next(run))
                together.wait()
                return seen(engine, done, case)
        except BaseException:
            together.abort()  # nobody waits for a thread that has raised
            raise

    # The size of chunks is of the process: patches of two threads do not end in reverse order.
    alike = [replace(case, chunk_bytes=None) for case in cases]
    with patch.object(build, "CHUNK_BYTES", CASE.chunk_bytes), ThreadPoolExecutor(2) as threads:
        return list(threads.map(train, alike))


@pytest.mark.parametrize("run", [in_turns, at_once])
def test_each_of_two_engines_in_a_process_trains_and_counts_as_if_it_were_alone(
    run: Any, tmp_path: Path
) -> None:
    slow = dict(rates=dict(up="200MB", latency_s=1e-4))
    cases = []
    for name, layers in (("a budget", 3), ("half of each", 2)):
        case = replace(placed(name, tmp_path), layers=layers, steps=2)
        memory = {**case.config["memory"], **(slow if layers == 3 else {})}
        cases.append(replace(case, config={**case.config, "memory": memory}))
    expected = [run_world(alone, 1, case)[0] for case in cases]
    assert expected[0].memory != expected[1].memory and expected[0].links != expected[1].links
    (found,) = run_world(run, 1, cases)
    for one, true in zip(found, expected, strict=True):
        assert replace(one, weights={}) == replace(true, weights={})
        assert all(torch.equal(one.weights[name], value) for name, value in true.weights.items())
