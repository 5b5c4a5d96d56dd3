"""Tests the watchdog: a rank that hangs, dies or diverges is named by the others, with its phase and its line."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import weakref
from collections.abc import Callable
from contextlib import nullcontext, suppress
from typing import Any

import pytest
import torch

import colossal_lite as cl
from colossal_lite.checkpoint.manifest import CheckpointError
from colossal_lite.checkpoint.writer import SaveJob
from colossal_lite.distributed import watchdog
from colossal_lite.distributed.communicator import CommError, Communicator
from colossal_lite.distributed.ledger import Ledger
from colossal_lite.engine import engine as engine_module
from colossal_lite.memory.chunk import Chunk
from colossal_lite.zero.optimizer import ChunkOptimizer
from tests.shared.parity import Case
from tests.shared.pool import RankEnv, WorldError, run_world

TIMEOUT_S = 1.5
CASE = Case(dropout=0.1, config=dict(timeout_s=TIMEOUT_S))


def hang(env: RankEnv) -> None:
    """Until another rank has told what it saw, and long enough for the watch to have answered."""
    end = time.monotonic() + 20
    while not env.store.check(["told"]) and time.monotonic() < end:
        time.sleep(0.05)
    raise InterruptedError("this rank has hung for long enough")


def plant(env: RankEnv, engine: cl.Engine, patch: pytest.MonkeyPatch, where: str) -> None:
    """Make this rank hang at one place of its second step."""

    def here(original: Callable[..., Any]) -> Callable[..., Any]:
        def changed(*args: Any, **kwargs: Any) -> Any:
            if engine.steps == 1:
                hang(env)
            return original(*args, **kwargs)

        return changed

    target: dict[str, tuple[Any, str]] = {
        "forward": (engine.model.get_submodule("blocks.1"), "forward"),
        "backward": (Chunk, "accept"),
        "reduce": (Chunk, "finish_reduce"),
        "agreement": (engine_module, "squares_of"),
        "update": (ChunkOptimizer, "update"),
    }
    if where in target:
        owner, name = target[where]
        patch.setattr(owner, name, here(getattr(owner, name)))


def train_with_a_hang(env: RankEnv, where: str, guilty: int, folder: str) -> tuple[str, float]:
    said, start = "", 0.0
    with suppress(cl.Stopped), env.launch(CASE.full_config) as context, pytest.MonkeyPatch.context() as patch:
        engine = cl.initialize(CASE.model, context=context)
        if env.rank == guilty:
            plant(env, engine, patch, where)
        cut = context.local_batch(CASE.global_batch)
        try:
            for number in range(3):
                inputs, labels = CASE.batch(number)
                start = time.monotonic()
                if env.rank == guilty and number == 1 and where == "between steps":
                    hang(env)
                engine.train_step((inputs[cut], labels[cut]))
                if env.rank == guilty and number == 1 and where == "save":
                    hang(env)
                if where == "save" and number == 1:
                    engine.save(folder)
        except (CommError, CheckpointError) as error:
            said = str(error)
            env.store.set("told", "")
        except InterruptedError:
            pass
    return said, time.monotonic() - start


HANGS = [
    (where, guilty, world_size)
    for where in ("between steps", "forward", "backward", "agreement", "update", "save")
    for guilty, world_size in ((1, 2), (0, 2))
]


@pytest.mark.parametrize(("where", "guilty", "world_size"), [*HANGS, ("forward", 2, 3), ("update", 0, 3)])
def test_a_hang_is_named_with_phase_and_line(where: str, guilty: int, world_size: int, tmp_path: Any) -> None:
    ended = run_world(train_with_a_hang, world_size, where, guilty, str(tmp_path))
    told = [said for rank, (said, _) in enumerate(ended) if rank != guilty and said]
    first = next(said for said in told if "stopped:" not in said.splitlines()[0])
    if where == "save":
        assert f"of ranks {guilty};" in first
        return
    assert f"rank {guilty} has not come to it: rank {guilty} is in phase '{where}' of step 1, at" in first, (
        first
    )
    assert "test_watchdog.py:" in first and "in hang" in first, first
    innocent = [rank for rank in range(world_size) if rank != guilty]
    assert not any(f"rank {rank} has not come" in first for rank in innocent)
    assert all(taken_s < TIMEOUT_S + 6 for _, taken_s in ended)


DESYNCS = {
    "skips one": "has not come to it",
    "leaves": "has not come to it",
    "another operation": "made broadcast of [8] float32 as call 2 there",
}


def collectives(env: RankEnv, kind: str, guilty: int) -> str:
    with env.launch(dict(timeout_s=TIMEOUT_S)) as context:
        world = context.mesh.world
        try:
            for number in range(3):
                x = torch.ones(8)
                if env.rank == guilty and number == 1:
                    if kind == "skips one":
                        continue
                    if kind == "leaves":
                        hang(env)
                    world.broadcast(x, source=guilty)
                else:
                    world.all_reduce(x)
            hang(env)
        except CommError as error:
            env.store.set("told", "")
            return str(error)
        except InterruptedError:
            return ""
    return ""


@pytest.mark.parametrize("guilty", [0, 2])
@pytest.mark.parametrize("kind", DESYNCS)
def test_a_rank_that_leaves_the_sequence_is_named(kind: str, guilty: int) -> None:
    ended = run_world(collectives, 3, kind, guilty)
    told = [said for rank, said in enumerate(ended) if said and rank != guilty]
    assert any(f"rank {guilty} {DESYNCS[kind]}" in said for said in told), ended
    assert not any(f"rank {rank} has not come" in said for said in told for rank in {0, 1, 2} - {guilty})


def die(env: RankEnv, guilty: int, number: int) -> str:
    with env.launch(dict(timeout_s=TIMEOUT_S)) as context:
        context.mesh.progress.phase = "forward"
        context.mesh.world.barrier()
        time.sleep(0.4)  # a first beat
        if env.rank == guilty:
            os.kill(os.getpid(), number)
        context.mesh.world.all_reduce(torch.ones(8))
    return ""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_rank_that_died_or_is_stopped_is_named(number: signal.Signals) -> None:
    with pytest.raises(WorldError) as caught:
        run_world(die, 2, 1, number, timeout_s=30)
    said = caught.value.failures[0].summary
    assert "rank 1 does not answer: it has died or is stopped; it was last heard in phase 'forward'" in said


def leave_early(env: RankEnv, guilty: int, code: int | None) -> str:
    with pytest.raises(CommError) if env.rank != guilty else nullcontext() as caught:
        with suppress(SystemExit), env.launch(dict(timeout_s=TIMEOUT_S)) as context:
            context.mesh.progress.phase = "forward"
            context.mesh.world.barrier()
            if env.rank != guilty:
                context.mesh.world.all_reduce(torch.ones(8))
            elif code is not None:
                raise SystemExit(code)
    return "" if env.rank == guilty else str(caught.value)


@pytest.mark.parametrize("guilty", [0, 1])
@pytest.mark.parametrize("code", [None, 0])
def test_a_rank_that_left_its_context_without_an_error_is_told_so_and_not_as_dead(
    guilty: int, code: int | None
) -> None:
    said = run_world(leave_early, 2, guilty, code, timeout_s=30)[1 - guilty]
    assert f"rank {guilty} has left its context without an error, after step 0" in said, said
    assert "died" not in said, said


def train(env: RankEnv) -> int:
    with env.launch(CASE.full_config) as context:
        engine = cl.initialize(CASE.model, context=context)
        cut = context.local_batch(CASE.global_batch)
        for number in range(3):
            inputs, labels = CASE.batch(number)
            engine.train_step((inputs[cut], labels[cut]))
        return len([1 for key in ("alarm", "record/0", "record/1") if context.store.check([key])])


def test_a_run_without_faults_raises_no_alarm_and_leaves_no_thread() -> None:
    import threading

    assert run_world(train, 2) == [0, 0]
    assert not [thread for thread in threading.enumerate() if thread.name == "watch"]


def test_where_a_rank_is_names_no_line_of_the_watch_itself() -> None:
    store = torch.distributed.HashStore()
    ours = watchdog.Watchdog(store, rank=0, world_size=2, server=0)
    try:
        ours._tell()  # as blame does, in the main thread
    finally:
        ours.close()
    where = json.loads(store.get("record/0"))["where"]
    assert "test_watchdog.py:" in where and "/watchdog.py:" not in where.replace("test_watchdog", ""), where


def test_a_watch_ends_though_the_store_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    import threading

    gate, asked = threading.Event(), threading.Event()

    class Deaf(torch.distributed.HashStore):
        def check(self, keys: list[str]) -> bool:
            asked.set()
            return not gate.wait(60)

    monkeypatch.setattr(watchdog, "ANSWER_S", 0.1)
    ours = watchdog.Watchdog(Deaf(), rank=1, world_size=2, server=0)
    assert asked.wait(20)
    said = ours.blame("data", [0, 1], "all_reduce", 1)
    assert said.startswith(
        "the store does not answer: rank 0, which serves it, has died or is stopped; it was never"
    )
    assert said == ours.standing([0])
    ours.close()
    gate.set()
    assert ours._thread is not None and not ours._thread.is_alive()


def test_the_first_line_of_a_failure_is_told_before_anybody_is_asked(
    capsys: pytest.CaptureFixture[str],
) -> None:
    told_first: list[str] = []

    def explain() -> str:
        told_first.append(capsys.readouterr().err)
        return "rank 1 has died"

    watch = watchdog.Watchdog(torch.distributed.HashStore(), rank=0, world_size=1)
    comm = Communicator(
        "data", (0, 1), 0, Ledger(), recording=True, timeout_s=3, explain=explain, watch=watch
    )
    error = comm.failure("all_reduce", RuntimeError("no answer"))
    (line,) = told_first
    assert line.startswith("rank 0: all_reduce on axis 'data' failed") and "no answer" in line
    assert str(error).startswith("rank 1 has died\n")


def dies_in_a_save(env: RankEnv, folder: str) -> None:
    with env.launch(CASE.full_config | dict(timeout_s=60)) as context, pytest.MonkeyPatch.context() as patch:
        engine = cl.initialize(CASE.model, context=context)
        batch = tuple(t[context.local_batch(CASE.global_batch)] for t in CASE.batch(0))
        engine.train_step(batch)
        if env.rank == 1:
            patch.setattr(
                SaveJob, "_write", lambda *args: time.sleep(0.6) or os.kill(os.getpid(), signal.SIGKILL)
            )
        engine.save(folder)


def test_a_death_in_a_save_is_told_long_before_the_timeout(tmp_path: Any) -> None:
    start = time.monotonic()
    with pytest.raises(WorldError) as caught:
        run_world(dies_in_a_save, 2, str(tmp_path), grace_s=10)
    assert time.monotonic() - start < 10 and caught.value.ranks("died") == [1]
    said = caught.value.failures[0].summary
    assert said.startswith("CheckpointError: rank 1 has died; it was last heard in phase 'save' of step 1"), (
        said
    )


def leaves_in_peace(env: RankEnv) -> bool:
    """Rank 0 leaves first. Rank 1 stays for a while, and makes no collective."""
    with env.launch(CASE.full_config) as context:
        context.mesh.world.barrier()
        if env.rank == 1:
            time.sleep(1.5)
        return bool(context.mesh.progress.broken)


def test_a_rank_that_leaves_in_peace_breaks_nothing_for_those_who_stay() -> None:
    assert run_world(leaves_in_peace, 2) == [False, False]


def keep(env: RankEnv) -> list[bool]:
    """Whether a tensor that a function of the main thread has made is gone when it has returned, while beats are made
    as fast as they can be."""

    def holder() -> weakref.ref[torch.Tensor]:
        tensor = torch.zeros(4)
        time.sleep(0.002)  # a beat may be made here
        return weakref.ref(tensor)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(watchdog, "LOOK_S", 0.0)
        with env.launch(CASE.full_config):
            return [holder()() is None for _ in range(300)]


def test_a_watch_keeps_no_tensor_of_the_main_thread_alive() -> None:
    for gone in run_world(keep, 2):
        assert all(gone)


LEFT_OPEN = """
import time
from datetime import timedelta
import torch.distributed as dist
from colossal_lite.distributed import watchdog

class AnswersLate(dist.PrefixStore):
    def check(self, keys):
        try:
            self.wait(["never"], timedelta(milliseconds=100))
        except RuntimeError:
            return False

class Slow:
    sleep = staticmethod(time.sleep)
    def __del__(self):
        self.sleep(0.5)

watchdog.LOOK_S = 0.0
ends_slowly = Slow()
store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
watch = watchdog.Watchdog(AnswersLate("", store), 0, 2)
time.sleep(0.5)
"""


def test_a_script_that_leaves_its_context_open_ends_with_0_while_its_watch_asks() -> None:
    """A thread that comes back from the store's code while Python ends would abort the process."""
    subprocess.run([sys.executable, "-c", LEFT_OPEN], check=True, timeout=60)
