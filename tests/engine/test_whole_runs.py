"""Whole runs under torchrun at drawn moments: stopped by signals, on a disk that fills, twice in one folder."""

from __future__ import annotations

import random
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from colossal_lite.checkpoint.files import listed
from tests.shared.whole_runs import WholeRun

pytestmark = [pytest.mark.campaign, pytest.mark.timeout(1800)]
MOMENTS = 10
STEPS = {"loop": 150, "example": 60}
WHOLE: dict[tuple[str, int], dict[str, object]] = {}


def whole(kind: str, world_size: int, steps: int, folder: Path) -> dict[str, object]:
    """The numbers of the run that nobody stops."""
    if (kind, world_size) not in WHOLE:
        with WholeRun(kind, folder / "not stopped" / "run", world_size, steps).started() as run:
            assert run.end() == (0, [0] * world_size), run.errors
            WHOLE[kind, world_size] = run.numbers()
    return WHOLE[kind, world_size]


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("kind", ["loop", "example"])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1])
def test_10_drawn_stops_lose_no_step_and_the_end_is_that_of_the_run_that_was_not_stopped(
    number: signal.Signals, kind: str, world_size: int, tmp_path: Path
) -> None:
    """One folder: each run goes on from the stop of the one before, and the last one to the end."""
    seed = 1000 * number + 10 * world_size + (kind == "loop")
    chance, folder = random.Random(seed), tmp_path / "stopped" / "run"
    expected = whole(kind, world_size, STEPS[kind], tmp_path)
    receivers = ["agent", "all ranks", *(f"rank {rank}" for rank in range(world_size))]
    stops = set()
    for moment in range(MOMENTS):
        to = chance.choice(receivers)
        run = WholeRun(kind, folder, world_size, STEPS[kind], moment)
        more, fraction = chance.randint(1, 7 if kind == "loop" else 3), chance.random()
        with run.started():
            step_s = run.wait_until(run.begins_at + more)
            run.wait_until(run.begins_at + more, then_s=step_s * fraction)
            run.signal(number, to)
            code, codes = run.end()
        step, path = run.newest()
        where = f"seed {seed} moment {moment}: {number.name} to {to} after step {run.begins_at + more} + {fraction:.2f}"
        print(f"{where}: {run.stopped()}", flush=True)
        assert codes == [0] * world_size and code == int(to == "agent"), (where, code, codes, run.errors)
        (line,) = run.stopped()
        assert line.endswith(f" after step {step}: saved {path}"), where
        assert run.begins_at < step < STEPS[kind], where
        stops.add(str(step))
        assert run.errors.count("Traceback") == int(to == "agent"), (where, run.errors)  # torchrun's own
    with WholeRun(kind, folder, world_size, STEPS[kind], MOMENTS).started() as run:
        assert run.end() == (0, [0] * world_size), run.errors
    found = run.numbers()
    missing = (
        expected.keys() - found.keys()
    )  # README's loop prints a step after it, where a stop leaves the loop
    assert missing <= stops and found == {name: expected[name] for name in found}, f"seed {seed}"


# ------------------------------------------------------------------------------------------------- a full disk


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 200 MB."""
    place = tmp_path / "disk"
    place.mkdir()
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=200m", "tmpfs", str(place)], capture_output=True, text=True
    )
    if done.returncode:
        pytest.skip(f"no disk can be mounted here: {done.stderr.strip()}")
    yield place
    subprocess.run(["umount", "-l", str(place)], check=True)


def fill(disk: Path) -> None:
    """Take what is left of a disk."""
    with open(disk / "filler", "wb", buffering=0) as file:
        try:
            while file.write(bytes(1 << 16)):
                continue
        except OSError:
            return


@pytest.mark.parametrize("draw", range(20))
def test_a_disk_that_fills_at_a_drawn_moment_never_ends_with_0_without_the_state(
    draw: int, disk: Path, tmp_path: Path
) -> None:
    chance = random.Random(draw)
    kind, world_size = chance.choice(["loop", "example"]), chance.choice([1, 2])
    steps = {"loop": 120, "example": 40}[kind]
    full_at, fraction = chance.randint(1, steps // 2), chance.random()
    then = chance.choice(["stop", "run on", "free again"])
    with WholeRun(kind, disk / "a" / "run", world_size, steps).started() as run:
        step_s = run.wait_until(full_at)
        run.wait_until(full_at, then_s=step_s * fraction)
        before = listed(run.checkpoints)[:1]
        fill(disk)
        if then != "run on":
            time_to = chance.uniform(0, 1)
            run.wait_until(full_at, then_s=time_to)
        if then == "stop":
            run.signal(signal.SIGTERM, "all ranks")
        if then == "free again":
            (disk / "filler").unlink()
        code, codes = run.end()
    print(
        f"seed {draw}: {kind} on {world_size}, full at {full_at} + {fraction:.2f}, {then}: {codes}",
        flush=True,
    )
    assert (code, set(codes)) == (0, {0}) or code == 1 and 0 not in codes, (code, codes, run.errors)
    if before:
        assert listed(run.checkpoints), "a checkpoint that was there is gone"
    newest = run.newest() if listed(run.checkpoints) else (0, None)
    if code == 0:
        (line,) = run.stopped() or [""]
        expected = int(line.split(" after step ")[1].split(":")[0]) if line else steps
        assert newest[0] == expected, (line, newest, run.printed)
    (disk / "filler").unlink(missing_ok=True)
    with WholeRun(kind, disk / "a" / "run", world_size, steps, 1).started() as again:
        assert again.begins_at == newest[0]
        assert again.end() == (0, [0] * world_size), again.errors
    assert again.newest()[0] == steps


# --------------------------------------------------------------------------------------------- two in a folder


@pytest.mark.parametrize("draw", range(20))
def test_of_two_runs_started_in_one_folder_at_once_one_trains_and_the_other_is_refused_by_name(
    draw: int, tmp_path: Path
) -> None:
    world_size, steps, folder = 1 + draw % 2, 5000, tmp_path / "both" / "run"
    one, two = (WholeRun("example", folder, world_size, steps, number) for number in range(2))
    with one.started():
        with two.started():
            one.until(lambda: two.process.poll() is not None)
            loser, winner = (one, two) if one.process.poll() is not None else (two, one)
            assert loser.end() == (1, [2] * world_size), (loser.printed, loser.errors)
            winner.wait_until(5)
            winner.signal(signal.SIGTERM, "all ranks")
            assert winner.end() == (0, [0] * world_size), (winner.printed, winner.errors)
    owner = f"{folder / 'checkpoints'} belongs to run "
    assert owner in loser.errors and "which is running" in loser.errors and not loser.stopped()
    (line,) = winner.stopped()
    assert line.endswith(f"saved {winner.newest()[1]}")
