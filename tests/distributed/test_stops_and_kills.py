"""Ranks, and their launcher, that are stopped or killed as processes: who is left says so, ends, and loses nothing.

A few trials stand in the suite. `pytest tests/distributed/test_stops_and_kills.py -m campaign -s` runs all of them, and
prints a line for each; `-k evaluation` or `-k piece_2` runs some.
"""

from __future__ import annotations

import os
import random
import re
import signal
import socket
import time
from pathlib import Path

import pytest
import torch

from tests.shared.run_trials import (
    Trial,
    agent,
    ends_within,
    processes,
    ranks_of,
    srun,
    torchrun,
    wait_for,
    write_script,
)

TOLD_S = 2.0
"""Seconds after the timeout by which a stopped rank is named."""
PHASES = ("start", "forward", "backward", "update", "evaluation", "save")


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def stop_in(folder: Path, phase: str, guilty: int) -> str:
    """A run of two ranks as srun starts them, of which one stops itself in a phase. A line of what the other told."""
    script, other = write_script(folder), 1 - guilty
    trial = Trial(folder, steps=60, phase=phase, guilty=guilty)
    printed = folder / f"printed.{other}"

    def stopped() -> bool:
        return any(text.startswith("stopped in") for _, text in trial.phases(guilty))

    def told() -> bool:
        return bool(re.search(rf"rank {guilty}\b[^\n]* in phase '", printed.read_text()))

    with processes(script, srun(script, trial, 2, free_port())) as started:
        wait_for(stopped, 60, f"rank {guilty} comes to {phase}")
        at, _ = trial.phases(guilty)[-1]
        late_s = wait_for(told, trial.timeout_s + 20, "a word of the stopped rank") - at
        code = ends_within(started[other], 15)
        text = printed.read_text()
    assert late_s < trial.timeout_s + TOLD_S, (late_s, text)
    (words,) = set(re.findall(rf"rank {guilty}\b[^\n]* in phase '([^']+)'", text))
    assert words.startswith(phase), (words, phase, text)
    assert f"rank {other} " not in "".join(re.findall(r"[^;\n]*does not answer[^;\n]*", text)), text
    assert code not in (None, 0), (code, text)
    return (
        f"{phase}, rank {guilty} stopped: told after {late_s:.2f} s (timeout {trial.timeout_s:g}): {words!r}"
    )


@pytest.mark.parametrize(("phase", "guilty"), [("forward", 0), ("save", 1)])
def test_a_stopped_rank_is_named_in_its_phase_within_the_timeout_and_two_seconds(
    phase: str, guilty: int, tmp_path: Path
) -> None:
    print(stop_in(tmp_path, phase, guilty))


ROWS = [(phase, guilty, turn) for turn in (1, 2) for phase in PHASES for guilty in (0, 1)]


@pytest.mark.campaign
@pytest.mark.parametrize(("phase", "guilty", "turn"), ROWS[:20])
def test_20_stops_of_each_rank_in_each_phase_are_told(
    phase: str, guilty: int, turn: int, tmp_path: Path
) -> None:
    print(f"turn {turn}:", stop_in(tmp_path, phase, guilty), flush=True)


def kill_the_launcher(folder: Path, delay_s: float, *, saves: bool) -> str:
    """SIGKILL torchrun in a run of two ranks; how long its ranks live. Without saves their watch alone sees it."""
    script = write_script(folder)
    trial = Trial(folder, steps=1_000_000, timeout_s=600, saves=saves)
    with processes(script, [torchrun(script, trial, 2)]) as (agent,):
        wait_for(lambda: len(trial.phases(0)) > 20 and len(trial.phases(1)) > 20, 90, "training")
        time.sleep(delay_s)
        ranks = ranks_of(script)
        assert len(ranks) == 2
        os.kill(agent.pid, signal.SIGKILL)
        killed = time.time()
        gone_s = wait_for(lambda: not ranks_of(script), 15, "ranks end with their launcher") - killed
        text = (folder / "printed.0").read_text()
    assert text.count(" has ended: this rank ends, in phase ") + text.count("the store is gone") >= 2, text
    return f"torchrun killed: both ranks were gone after {gone_s:.2f} s"


def test_no_rank_outlives_its_launcher(tmp_path: Path) -> None:
    print(kill_the_launcher(tmp_path, 0.1, saves=False))


@pytest.mark.parametrize(
    ("killed", "words"), [("launcher", "its launcher (process "), ("store", "the store is gone")]
)
def test_a_rank_ends_when_its_launcher_alone_or_its_store_alone_is_gone(
    killed: str, words: str, tmp_path: Path
) -> None:
    script, printed = write_script(tmp_path), tmp_path / "printed.0"
    trial = Trial(tmp_path, steps=1_000_000, timeout_s=600, saves=False)
    with processes(script, agent(script, trial, 2, free_port())) as (launcher, store):
        wait_for(lambda: len(trial.phases(0)) > 20 and len(trial.phases(1)) > 20, 90, "training")
        (store if killed == "store" else launcher).kill()
        wait_for(lambda: not ranks_of(script), 10, "ranks end")
        if killed == "store":
            wait_for(lambda: "codes [1, 1]" in printed.read_text(), 5, "the codes of the ranks")
        else:
            assert store.poll() is None, "it lives"
    text = printed.read_text()
    assert all(re.search(rf"rank {rank}: {re.escape(words)}", text) for rank in (0, 1)), text


@pytest.mark.campaign
@pytest.mark.timeout(1200)
def test_10_kills_of_torchrun_leave_no_rank(tmp_path: Path) -> None:
    chance = random.Random(3)
    for number in range(10):
        folder = tmp_path / str(number)
        folder.mkdir()
        print(number + 1, kill_the_launcher(folder, chance.uniform(0, 3), saves=bool(number % 2)), flush=True)


STEPS = 30


def losses(folder: Path) -> dict[int, str]:
    """The loss of each step, by the last run that made it."""
    return dict((int(a), b) for a, b in (r.split() for r in (folder / "losses.0").read_text().splitlines()))


def run_to_the_end(folder: Path, script: Path) -> None:
    trial = Trial(folder, steps=STEPS, timeout_s=30)
    with processes(script, srun(script, trial, 2, free_port())) as started:
        codes = [ends_within(each, 90) for each in started]
    assert codes == [0, 0], (codes, (folder / "printed.0").read_text())


def kill_once(folder: Path, script: Path, guilty: int, within_save: bool, chance: random.Random) -> str:
    """SIGKILL one rank of a run, at a random moment or within a save; how long the other lives, and what it says."""
    trial = Trial(folder, steps=STEPS, timeout_s=30)
    before = len(trial.phases(guilty))

    def is_there() -> bool:
        rows = trial.phases(guilty)[before:]
        return rows[-1:] != [] and rows[-1][1] == "save" if within_save else len(rows) > least

    least = chance.randrange(30, 120)
    with processes(script, srun(script, trial, 2, free_port())) as started:
        wait_for(is_there, 60, "the moment of the kill")
        started[guilty].kill()
        killed = time.time()
        code = ends_within(started[1 - guilty], 30)
        lived_s = time.time() - killed
        text = (folder / f"printed.{1 - guilty}").read_text()
    assert code not in (None, 0), (code, text)
    assert re.search(rf"ranks? {guilty}\b", text), text
    return f"rank {guilty} killed {'in a save' if within_save else 'at random'}: the other ended after {lived_s:.2f} s"


def kill_and_resume(folder: Path, script: Path, whole: Path, number: int, chance: random.Random) -> str:
    """Kill a run, go on with the same command, and compare with a run without a kill, bit by bit."""
    told = kill_once(folder, script, number % 2, bool(number // 2 % 2), chance)
    run_to_the_end(folder, script)
    assert losses(folder) == losses(whole), "a loss differs"
    ours, theirs = (torch.load(path / "weights.pt") for path in (folder, whole))
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in theirs)
    return f"{told}; resumed with the same bits"


def trials_of_kills(folder: Path, numbers: range) -> None:
    whole = folder / "whole"
    whole.mkdir()
    script = write_script(whole)
    run_to_the_end(whole, script)
    for number in numbers:
        at = folder / str(number)
        at.mkdir()
        told = kill_and_resume(at, write_script(at), whole, number, random.Random(number))
        print(number + 1, told, flush=True)


@pytest.mark.campaign
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("first", range(0, 30, 5), ids=lambda first: f"piece_{first // 5}")
def test_30_kills_of_a_rank_resume_with_the_same_bits(first: int, tmp_path: Path) -> None:
    trials_of_kills(tmp_path, range(first, first + 5))
