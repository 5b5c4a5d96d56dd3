"""The same command again goes on where the run stopped, and leaves what an uninterrupted run leaves, to the bit."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import psutil
import pytest

from colossal_lite.checkpoint.files import inspect, listed

ROOT = Path(__file__).parents[2]
TEXT = "".join(f"def f{i}(x):\n    return x + {i}\n" for i in range(3000))
STEPS, SAVE_EVERY = 36, 7  # 29 steps are left, 2 s, when a first checkpoint is seen
PLAIN = (sys.executable,)
TORCHRUN = (
    *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"),
    *("--max-restarts", "1", "--monitor-interval", "0.1"),
)
SAME = ("metrics.jsonl", "evaluation.jsonl", "model.safetensors")


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "functions.py"
    path.write_text(TEXT)
    return path


def command(text: Path, out: Path, launcher: Sequence[str] = PLAIN, *more: str) -> list[str]:
    options = ["--steps", STEPS, "--global-batch", 3, "--data", text, "--out", out, "--sample", 5]
    options += ["--save-every", SAVE_EVERY, "--checkpoint.asynchronous", True]
    return [*launcher, str(ROOT / "examples/gpt/train.py"), *map(str, options), *more]


def start(arguments: list[str]) -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    pipe = subprocess.PIPE
    held = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's `&` has it ignored
    try:
        return subprocess.Popen(arguments, env=environment, stdout=pipe, stderr=pipe, text=True)
    finally:
        signal.signal(signal.SIGINT, held)


def finish(process: subprocess.Popen[str], code: int = 0) -> str:
    out, err = process.communicate(timeout=100)
    assert process.returncode == code, err
    return out


def wait_for_a_checkpoint(process: subprocess.Popen[str], out: Path) -> None:
    """Return when the run has left its first checkpoint; it is in the middle of its steps then."""
    end = time.monotonic() + 60
    while not listed(out / "checkpoints"):
        assert process.poll() is None and time.monotonic() < end, process.communicate()
        time.sleep(0.005)


def assert_same_files(out: Path, reference: Path) -> None:
    for name in SAME:
        assert (out / name).read_bytes() == (reference / name).read_bytes(), name


@pytest.fixture(scope="module")
def uninterrupted(text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("uninterrupted")
    finish(start(command(text, out)))
    return out


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_saves_and_ends_with_0_and_the_same_command_goes_on(
    number: signal.Signals, text: Path, tmp_path: Path, uninterrupted: Path
) -> None:
    process = start(command(text, tmp_path))
    wait_for_a_checkpoint(process, tmp_path)
    process.send_signal(number)
    said = finish(process)
    step = inspect(listed(tmp_path / "checkpoints")[0]).step
    path = tmp_path / "checkpoints" / f"step-{step:08}"
    assert 0 < step < STEPS and f"stopped by {number.name} after step {step}: saved {path}\n" in said
    assert f"resumed from {tmp_path / 'checkpoints' / f'step-{step:08}'}" in finish(
        start(command(text, tmp_path))
    )
    assert_same_files(tmp_path, uninterrupted)


def test_a_killed_run_goes_on_from_its_last_checkpoint(
    text: Path, tmp_path: Path, uninterrupted: Path
) -> None:
    process = start(command(text, tmp_path))
    wait_for_a_checkpoint(process, tmp_path)
    process.kill()
    finish(process, -signal.SIGKILL)
    assert "resumed from" in finish(start(command(text, tmp_path)))
    assert_same_files(tmp_path, uninterrupted)
    said = finish(start(command(text, tmp_path, PLAIN, "--fresh")))
    assert f"fresh: earlier checkpoints are in {tmp_path / 'checkpoints.1'}" in said and "resumed" not in said
    assert_same_files(tmp_path, uninterrupted)


def test_torchrun_restarts_a_run_that_lost_a_rank_and_nothing_is_lost(text: Path, tmp_path: Path) -> None:
    broken, whole = tmp_path / "broken", tmp_path / "whole"
    process = start(command(text, broken, TORCHRUN))
    wait_for_a_checkpoint(process, broken)
    workers = [p for p in psutil.Process(process.pid).children() if "train.py" in " ".join(p.cmdline())]
    assert len(workers) == 2
    workers[-1].kill()
    assert "resumed from" in finish(process)
    finish(start(command(text, whole, TORCHRUN)))
    assert_same_files(broken, whole)
    assert sorted(path.name for path in (broken / "logs").iterdir()) == ["rank-00000.log", "rank-00001.log"]
