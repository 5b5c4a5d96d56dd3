"""Signals end any loop at a step boundary, with a checkpoint; and what the exit codes say."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch.utils.data import DataLoader

import colossal_lite as cl
from colossal_lite.checkpoint.files import inspect, listed
from colossal_lite.checkpoint.manifest import CheckpointError
from colossal_lite.engine.stopping import STOP_SIGNALS, StopSignals
from tests.shared.pool import RankEnv, run_world

ROOT = Path(__file__).parents[2]
STOPS = [signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1]
CONFIG: dict[str, Any] = dict(precision="fp64", optimizer=dict(type="adamw", lr=1e-2), seed=5, timeout_s=30)
MODEL = dict(vocabulary=32, layers=1, heads=2, width=8, sequence=8)
TOKENS = torch.randint(32, (22, 9), generator=torch.Generator().manual_seed(0))
DATASET = [(row[:-1], row[1:]) for row in TOKENS]


def engine_in(context: cl.Context) -> cl.Engine:
    return cl.initialize(lambda: cl.models.GPT(cl.models.GPTConfig(**MODEL)), context=context)


def readmes_loop(
    env: RankEnv, folder: str, number: int, at: int, steps: int, rank: int, config: dict[str, Any]
) -> dict[str, Any]:
    """Resume, and train to `steps`; before step `at`, `rank` receives a signal."""
    losses, before = {}, {each: signal.getsignal(each) for each in STOP_SIGNALS}
    code, path, text = None, None, ""
    try:
        with env.launch(CONFIG | config) as context:
            engine = engine_in(context)
            loaded = engine.resume(folder)
            loader = context.dataloader(DATASET, global_batch=4, start=loaded.samples if loaded else 0)
            engine.on_step(lambda result: losses.update({result.step: result.loss.item()}))
            for batch in loader.take(steps - engine.steps):
                if engine.steps + 1 == at and env.rank == rank:
                    os.kill(os.getpid(), number)
                engine.train_step(batch)
    except cl.Stopped as stopped:
        code, path, text = stopped.code, stopped.checkpoint, str(stopped)
    assert {each: signal.getsignal(each) for each in STOP_SIGNALS} == before, "a handler was left behind"
    return dict(code=code, losses=losses, path=str(path), text=text)


@pytest.mark.parametrize("number", STOPS)
def test_a_signal_to_any_rank_stops_any_loop_with_a_checkpoint_that_goes_on_to_the_same_bits(
    number: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = run_world(readmes_loop, 2, str(tmp_path / "whole"), number, 0, 9, 0, {})[0]["losses"]
    rank = STOPS.index(signal.Signals(number)) % 2
    capsys.readouterr()
    ended = run_world(readmes_loop, 2, str(tmp_path / "run"), number, 7, 9, rank, dict(zero=dict(stage=1)))
    path = tmp_path / "run" / "step-00000007"
    assert [row["code"] for row in ended] == [0, 0] and {row["path"] for row in ended} == {str(path)}
    said = [line for line in capsys.readouterr().out.splitlines() if "saved" in line]
    by = signal.Signals(number).name if rank == 0 else "a signal to another rank"
    assert said == [f"[rank 0] stopped by {by} after step 7: saved {path}"]
    assert inspect(path).samples == 28  # more than an epoch, whose last two samples are dropped
    again = run_world(readmes_loop, 2, str(tmp_path / "run"), number, 0, 9, 0, dict(zero=dict(stage=1)))
    for row, later in zip(ended, again, strict=True):
        assert row["losses"] | later["losses"] == whole and list(later["losses"]) == [8, 9]


def own_loop(env: RankEnv, folder: str) -> tuple[int, int, Any]:
    """A loop in the Colossal-AI manner, with uneven samples on its ranks, an evaluation, and a save of its own."""
    with pytest.raises(cl.Stopped) as caught, env.launch(CONFIG) as context:
        engine = engine_in(context)
        for step in range(4):
            rows = TOKENS[:5][context.local_batch(5)]
            with torch.no_grad():
                engine(rows[:, :-1])
            for _ in range(2):
                logits = engine(rows[:, :-1])
                loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())
                engine.backward(loss, count=rows[:, 1:].numel())
            if step == 2 and env.rank == 1:
                os.kill(os.getpid(), signal.SIGUSR1)
            engine.step()
            if step == 0:
                engine.save(folder, extra={"mine": 1})
    return engine.steps, engine.samples, caught.value.code


def test_a_loop_of_ones_own_is_stopped_where_it_has_saved_before(tmp_path: Path) -> None:
    assert run_world(own_loop, 2, str(tmp_path)) == [(3, 30, 0)] * 2
    path = listed(tmp_path)[0]
    assert path.name == "step-00000003"
    assert inspect(path).samples == 30 and inspect(path).extra == {"mine": 1}


def places(env: RankEnv, folder: str, how: str) -> tuple[Any, str, list[str]]:
    with (
        pytest.raises(cl.Stopped) as caught,
        env.launch(CONFIG | dict(checkpoint=dict(asynchronous=True))) as context,
    ):
        engine = engine_in(context)
        if how == "given":
            engine.save_on_stop(folder + "/given", samples=lambda: 77, extra={"a": 1})
            engine.save(folder + "/best")
        if how == "loaded":
            saved = engine.save(folder + "/first").wait()
            engine.save(folder + "/second").wait()
            engine.load(saved)
        if how == "unwritable":
            engine.resume("/sys/kernel/checkpoints")
        if how == "saved in this step":
            engine.on_step(lambda result: engine.save(folder + "/mine") and None)
        os.kill(os.getpid(), signal.SIGHUP)
        engine.train_step((TOKENS[:4, :-1], TOKENS[:4, 1:]))
    found = sorted(str(path.relative_to(folder)) for path in Path(folder).glob("*/step-00000001*"))
    return caught.value.code, str(caught.value), found


@pytest.mark.parametrize(
    ("how", "code", "found"),
    [
        ("none", 3, []),
        ("given", 0, ["given/step-00000001"]),
        ("loaded", 0, ["first/step-00000001"]),
        ("unwritable", 3, []),
        ("saved in this step", 0, ["mine/step-00000001"]),
    ],
)
def test_a_stop_saves_where_it_was_told_else_where_the_engine_was_last_and_3_if_it_cannot(
    how: str, code: int, found: list[str], tmp_path: Path
) -> None:
    [(ended, text, there)] = run_world(places, 1, str(tmp_path), how)
    assert (ended, there) == (code, found)
    if code == 0:
        assert text == f"stopped by SIGHUP after step 1: saved {tmp_path / found[0]}"
        assert inspect(tmp_path / found[0]).samples == (77 if how == "given" else 4)
    else:
        reason = {"none": "legal: engine.save_on_stop(directory)", "unwritable": "/sys/kernel/checkpoints"}[
            how
        ]
        assert text.startswith("stopped by SIGHUP after step 1: NOT SAVED: ") and reason in text


# ---------------------------------------------------------------------------------------- saves that fail


def failing(env: RankEnv, folder: str, asynchronous: bool, bad: int, good: bool) -> tuple[int, Any, str]:
    """So many saves that fail, then perhaps one that does not; how many were tried, and how the run ended."""
    checkpoint = dict(asynchronous=asynchronous, max_failures=2)
    tried = 0
    try:
        with env.launch(CONFIG | dict(checkpoint=checkpoint)) as context:
            engine = engine_in(context)
            for place in ["/sys/kernel/checkpoints"] * bad + [folder] * good:
                tried += 1
                try:
                    engine.save(place).wait()
                except CheckpointError:
                    continue
            engine.close()
    except cl.Stopped as stopped:
        return tried, stopped.code, str(stopped)
    return tried, None, ""


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_failed_last_save_ends_with_4_and_so_do_as_many_failures_in_a_row_as_may_be(
    asynchronous: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = str(tmp_path)
    assert run_world(failing, 1, folder, asynchronous, 1, True) == [(2, None, "")]
    for tried, code, text in run_world(failing, 2, folder, asynchronous, 1, False):
        assert (tried, code) == (1, 4)
        assert "the run has ended, and its last save failed: " in text and "/sys/kernel/checkpoints" in text
    for tried, code, text in run_world(failing, 2, folder, asynchronous, 5, True):
        assert (tried, code) == (3 if asynchronous else 2, 4)
        assert "2 saves in a row have failed (checkpoint.max_failures)" in text


# -------------------------------------------------------------------------------------------- real processes

SCRIPT = """
import pathlib, sys, time
from torch.utils.data import DataLoader
import colossal_lite as cl
from colossal_lite.checkpoint import writer
from tests.engine.test_stopping import CONFIG, DATASET, engine_in

folder, pause_s, how = pathlib.Path(sys.argv[1]), float(sys.argv[2]), sys.argv[3]

class Slow:  # so that the loop mostly waits for its worker
    def __len__(self):
        return 8000

    def __getitem__(self, index):
        time.sleep(0.05)
        return DATASET[index % 22]

class OwnLoader(DataLoader):
    def take(self, count):
        return self

try:
    with cl.launch(CONFIG | dict(checkpoint=dict(asynchronous=True))) as context:
        engine = engine_in(context)
        engine.resume(folder / "checkpoints")
        if how == "own loader":
            loader = OwnLoader(Slow(), batch_size=4, num_workers=1)
        else:
            loader = context.dataloader(DATASET, global_batch=4, start=engine.samples, workers=1)
        if how == "save in flight":
            writer.write_file = lambda *given: time.sleep(60)
            engine.save(folder / "checkpoints")
        engine.on_step(lambda result: (folder / f"at-{context.rank}").write_text(str(result.step)))
        engine.on_step(lambda result: time.sleep(pause_s))
        for batch in loader.take(2000):
            engine.train_step(batch)
except SystemExit as ended:
    (folder / f"code-{context.rank}").write_text(str(ended.code))
    raise
"""


def start(folder: Path, *before: str, pause_s: float = 0.02, how: str = "") -> subprocess.Popen[str]:
    """The script, in a process group of its own, whose signals are not ignored, as they are behind a shell's `&`."""
    script = folder / "script.py"
    script.write_text(SCRIPT)
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    pipe = subprocess.PIPE
    held = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        return subprocess.Popen(
            [*(before or [sys.executable]), str(script), str(folder), str(pause_s), how],
            env=environment, stdout=pipe, stderr=pipe, text=True, start_new_session=True,
        )  # fmt: skip
    finally:
        signal.signal(signal.SIGINT, held)


def wait_for_step(process: subprocess.Popen[str], folder: Path, ranks: int) -> None:
    end = time.monotonic() + 60
    while sum(path.stat().st_size > 0 for path in folder.glob("at-*")) < ranks:
        assert process.poll() is None and time.monotonic() < end, process.communicate()
        time.sleep(0.01)


@pytest.mark.parametrize(("number", "how"), [(signal.SIGTERM, "own loader"), (signal.SIGINT, "")])
def test_under_torchrun_a_signal_to_its_agent_ends_all_ranks_with_0_and_one_line(
    number: signal.Signals, how: str, tmp_path: Path
) -> None:
    """The agent hands the signal to each rank's process group, workers of its loader too."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    process = start(tmp_path, *torchrun, how=how)
    wait_for_step(process, tmp_path, 2)
    began = time.monotonic()
    process.send_signal(number)
    out, errors = process.communicate(timeout=60)
    assert [(tmp_path / f"code-{rank}").read_text() for rank in range(2)] == ["0", "0"], errors
    (path,) = listed(tmp_path / "checkpoints")
    said = [line for line in out.splitlines() if not line.startswith("no checkpoint in ")]
    assert said == [f"stopped by {number.name} after step {inspect(path).step}: saved {path}"]
    assert time.monotonic() - began < 20, "the agent kills after 30 s"


def test_a_stop_saves_and_ends_with_0_where_the_reader_of_its_output_has_ended_first(tmp_path: Path) -> None:
    """As Ctrl-C does beside `| tee`: the terminal sends it to all programs of the line."""
    process = start(tmp_path)
    wait_for_step(process, tmp_path, 1)
    assert process.stdout is not None and process.stderr is not None
    process.stdout.close()
    process.send_signal(signal.SIGINT)
    errors = process.stderr.read()
    (path,) = listed(tmp_path / "checkpoints")
    assert (process.wait(60), errors) == (
        0,
        f"stopped by SIGINT after step {inspect(path).step}: saved {path}\n",
    )


@pytest.mark.parametrize("how", ["", "save in flight"])
def test_the_second_sigint_ends_at_once(how: str, tmp_path: Path) -> None:
    process = start(tmp_path, pause_s=60, how=how)
    wait_for_step(process, tmp_path, 1)
    process.send_signal(signal.SIGINT)
    time.sleep(0.5)
    assert process.poll() is None
    began = time.monotonic()
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=30)
    assert process.returncode == -signal.SIGINT and time.monotonic() - began < 10


def loses_its_worker(env: RankEnv, folder: str) -> tuple[Any, str]:
    """A worker that a signal ends by its number, as scancel does, while the loop waits for it."""
    with pytest.raises(cl.Stopped) as caught, env.launch(CONFIG) as context:
        engine = engine_in(context)
        engine.save_on_stop(folder)
        before = set(multiprocessing.active_children())
        batches = iter(
            DataLoader(cast(Any, DATASET), batch_size=4, num_workers=1, multiprocessing_context="fork")
        )
        engine.train_step(next(batches))
        (worker,) = set(multiprocessing.active_children()) - before
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(cast(int, worker.pid), signal.SIGKILL)
        worker.join()
        for _ in batches:
            continue
    return caught.value.code, str(caught.value)


def test_a_worker_that_the_signal_has_ended_is_named_and_the_run_ends_as_not_saved(tmp_path: Path) -> None:
    [(code, text)] = run_world(loses_its_worker, 1, str(tmp_path))
    assert code == 3
    assert text.startswith(
        "stopped by SIGTERM after step 1: NOT SAVED: the signal has ended a worker of a DataLoader"
    )
    assert "Legal: context.dataloader(...), which takes that loader too" in text


def test_what_a_process_ignores_stays_ignored_as_under_nohup() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        signals = StopSignals()
        signals.install()
        os.kill(os.getpid(), signal.SIGHUP)
        assert signals.received is None and signals.name == ""
        signals.restore()
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_dead_child_raises_nothing_in_the_last_step_and_its_handler_comes_back() -> None:
    heard: list[int] = []
    before = signal.signal(signal.SIGCHLD, lambda number, frame: heard.append(number))
    try:
        signals = StopSignals()
        signals.install()
        os.kill(os.getpid(), signal.SIGTERM)
        subprocess.run(["true"], check=True)
        assert heard == [] and signals.name == "SIGTERM"
        signals.restore()
        subprocess.run(["true"], check=True)
        assert heard == [signal.SIGCHLD]
    finally:
        signal.signal(signal.SIGCHLD, before)
