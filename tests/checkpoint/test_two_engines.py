"""Two engines of one context, such as a generator and its critic: each saves and loads its own."""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

import colossal_lite as cl
from colossal_lite.checkpoint.files import listed, verify
from tests.shared.pool import RankEnv, run_world


def two_engines(env: RankEnv, folder: str, slow: int) -> list[float]:
    """Two engines of one context, saved and loaded one after the other. One rank comes late to each call."""
    places = [Path(folder) / name for name in "ab"]
    with env.launch(dict(precision="fp64", zero=dict(stage=3), timeout_s=20)) as context:
        engines = []
        for seed in (0, 1):
            torch.manual_seed(seed)
            engines.append(cl.initialize(torch.nn.Linear(4, 6), context=context))
        before = [engine.full_state_dict() for engine in engines]
        for call in ("save", "load"):
            for engine, place in zip(engines, places, strict=True):
                if env.rank == slow:
                    time.sleep(0.3)
                getattr(engine, call)(place)
        after = [engine.full_state_dict() for engine in engines]
        faults = [fault for place in places for fault in verify(listed(place)[0])]
    assert not faults, faults
    return [float((a[n] - b[n]).abs().max()) for a, b in zip(before, after, strict=True) for n in a]


@pytest.mark.parametrize("slow", [0, 1])
def test_saves_and_loads_of_two_engines_of_one_context_are_apart(slow: int, tmp_path: Path) -> None:
    """Their messages once had the same keys: a rank heard those of the other engine's save."""
    assert run_world(two_engines, 2, str(tmp_path), slow) == [[0.0] * 4] * 2


BATCHES = torch.randn(6, 4, 4, generator=torch.Generator().manual_seed(2)).double()
LABELS = torch.arange(24).view(6, 4) % 6


def made(context: cl.Context, seed: int) -> cl.Engine:
    torch.manual_seed(seed)
    return cl.initialize(torch.nn.Linear(4, 6), context=context)


def one_loop(
    env: RankEnv, folder: str, at: tuple[int, int, int] | None, critics: int, own: bool
) -> list[Any]:
    """A loop over a critic of several steps and its generator. `at`: the rank, round and step that get a signal."""
    rows, steps = [], [0] * critics + [1]
    with suppress(cl.Stopped), env.launch(dict(precision="fp64", timeout_s=20)) as context:
        engines = [made(context, seed) for seed in (0, 1)]
        for engine, name in zip(engines, "ab", strict=True):
            engine.resume(Path(folder) / name)
            if own:
                engine.save_on_stop(Path(folder) / name)
        for turn in range(engines[1].steps, 6):
            batch = context.local_batch((BATCHES[turn], LABELS[turn]))
            for number, which in enumerate(steps):
                if at == (env.rank, turn, number):
                    os.kill(os.getpid(), signal.SIGTERM)
                row = [turn, number, 0.0]
                rows.append(row)
                row[2] = engines[which].train_step(batch).loss.item()
    return rows


@pytest.mark.parametrize(
    ("critics", "at", "round_", "own"),
    [(1, (0, 2, 0), 2, True), (1, (1, 2, 1), 2, False), (3, (1, 2, 1), 2, True)],
)
def test_a_signal_stops_a_loop_over_two_engines_after_a_round_and_saves_both(
    critics: int, at: tuple[int, int, int], round_: int, own: bool, tmp_path: Path
) -> None:
    """It once stopped after the step of the first engine, and the other was not saved: it began anew in silence."""
    whole = run_world(one_loop, 2, str(tmp_path / "whole"), None, critics, own)[0]
    run_world(one_loop, 2, str(tmp_path / "two"), at, critics, own)
    steps = [[path.name for path in listed(tmp_path / "two" / name)] for name in "ab"]
    turns = round_ + 1
    assert steps == [[f"step-{turns * critics:08}"], [f"step-{turns:08}"]]
    later = run_world(one_loop, 2, str(tmp_path / "two"), None, critics, own)[0]
    assert later == whole[turns * (critics + 1) :]


def of_phases(env: RankEnv, folder: str, phases: list[tuple[int, int]]) -> list[int]:
    """Phases, each of one engine and its steps; both stay open. A signal comes in the third step of the last one."""
    engines: list[cl.Engine] = []
    with suppress(cl.Stopped), env.launch(dict(precision="fp64", timeout_s=20)) as context:
        engines += [made(context, seed) for seed in (0, 1)]
        batch = context.local_batch((BATCHES[0], LABELS[0]))
        for engine, name in zip(engines, "ab", strict=True):
            engine.save_on_stop(Path(folder) / name)
        for number, (which, steps) in enumerate(phases):
            for step in range(steps):
                if number == len(phases) - 1 and step == 2:
                    os.kill(os.getpid(), signal.SIGTERM)
                engines[which].train_step(batch)
    return [engine.steps for engine in engines]


@pytest.mark.parametrize(
    ("phases", "steps"), [([(0, 5), (1, 5)], [5, 3]), ([(0, 9), (1, 9), (0, 9)], [12, 9])]
)
def test_a_signal_in_a_later_phase_of_training_waits_for_no_round(
    phases: list[tuple[int, int]], steps: list[int], tmp_path: Path
) -> None:
    assert run_world(of_phases, 2, str(tmp_path), phases) == [steps, steps]
    found = [[path.name for path in listed(tmp_path / name)] for name in "ab"]
    assert found == [[f"step-{number:08}"] for number in steps]


def one_folder(env: RankEnv, folder: str, how: str) -> str:
    """What is told to a second engine that would save where the first does, and whose weights are there."""
    place = Path(folder)
    with env.launch(dict(precision="fp64", timeout_s=20)) as context:
        first, second = (made(context, seed) for seed in (0, 1))
        first.save(place)
        if how == "loaded":
            second.resume(place)
            second, first = first, second
        with pytest.raises(ValueError) as told:
            (second.save_on_stop if how == "stop" else second.save)(place)
        second.close()
        first.save(place)  # as the message says
    return str(told.value)


@pytest.mark.parametrize("how", ["save", "stop", "loaded"])
def test_two_open_engines_do_not_save_to_one_directory(how: str, tmp_path: Path) -> None:
    """Both once resumed with the weights of the last that had saved."""
    for text in run_world(one_folder, 2, str(tmp_path), how):
        assert "has the checkpoints of another open engine of this context" in text
