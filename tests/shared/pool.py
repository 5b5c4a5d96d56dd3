"""A pool of ranks for tests: started once, one world after another.

Note. A world is `n` processes that run one module-level function `fn(env, *args)` and hand back what it
returns. Processes come from a forkserver that has torch loaded (spawning 8 ranks costs 48 s, this 0.2 s) and
live until the session ends: a world costs 1 ms (1 rank) to 5 ms (8), a new rank 50 ms. Ranks meet through a
fresh FileStore in a temporary directory, so no port is ever opened for rendezvous, and gloo binds to the
loopback interface.

What is invariant: a world that succeeds leaves its ranks clean (no process group; environment and random
state as before); a world that fails in any way (a rank raises, dies, or does not come back in time) loses all
its ranks and their children, and the next world gets new ones. The error tells for every rank how it ended
and, for a rank that had to be ended, where its main thread was.

    def sum_of_ranks(env: RankEnv, factor: int) -> float: ...
    assert run_world(sum_of_ranks, 4, 10) == [60.0] * 4
"""

from __future__ import annotations

import atexit
import faulthandler
import functools
import gc
import importlib
import itertools
import multiprocessing
import os
import pickle
import random
import shutil
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal
from unittest.mock import patch

import psutil

if TYPE_CHECKING:
    from torch.distributed import Store

    from colossal_lite.engine.context import Context

MAX_RANKS = 16
# After the first failure the others have this long to say what they saw, if not told otherwise; then they are ended.
GRACE_S = 2.0
START_S = 120.0
STACK_S = 2.0
STACK_SIGNAL = signal.SIGUSR2
LOG_TAIL_BYTES = 4000
RANK_ENVIRONMENT = {
    "GLOO_SOCKET_IFNAME": "lo",
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
}
# Imported once, in the server of forks. In a rank they would take seconds (ours 0.65 s, which every rank after a world
# that failed would pay), and a tenth of one after each world: then they are collected with what the world has left.
PRELOADED = [
    *("torch", "torch.distributed", "torch._dynamo", "numpy", "pydantic", "pytest", "hypothesis", "rich"),
    *("colossal_lite.launcher", "colossal_lite.engine.initialize", "colossal_lite.launcher.doctor"),
    *("tests.shared.parity", "tests.shared.hugging_face"),
]


@dataclass(frozen=True)
class RankEnv:
    """What a function on a rank is given first: who it is, and where the ranks of its world meet."""

    rank: int
    world_size: int
    store: Store

    def launch(self, config: Any = None, **more: Any) -> Context:
        """`colossal_lite.launch` on this rank of this world."""
        from colossal_lite.launcher import launch

        return launch(config or {}, store=self.store, rank=self.rank, world_size=self.world_size, **more)


@dataclass(frozen=True)
class RankFailure:
    """How one rank of a failed world ended.

    kind: "raised" (its function raised), "died" (the process ended), "late" (it was still running, the others
    may have waited for it), "waiting" (it waited for others, in a collective), "done" (it had returned).
    """

    rank: int
    kind: Literal["raised", "died", "late", "waiting", "done"]
    summary: str
    """One line: the exception with its type, the signal, or the place where it was."""
    text: str = ""
    """Traceback or stack, and the end of what the rank had printed."""


class WorldError(RuntimeError):
    """A world failed. `.failures` has one RankFailure per rank, in rank order."""

    def __init__(self, headline: str, failures: Sequence[RankFailure]) -> None:
        self.failures = tuple(failures)
        rows = [f"rank {f.rank} {f.kind}: {f.summary}" for f in failures]
        texts = [f"--- rank {f.rank} ({f.kind}) ---\n{f.text}" for f in failures if f.text]
        super().__init__("\n".join([headline, *rows, *texts]))

    def ranks(self, kind: str) -> list[int]:
        return [f.rank for f in self.failures if f.kind == kind]


def run_world(
    fn: Callable[..., Any], world_size: int, *args: Any, timeout_s: float = 60.0, grace_s: float = GRACE_S
) -> list[Any]:
    """Run `fn(RankEnv, *args)` on `world_size` ranks; what each returned, in rank order.

    `fn` is a module-level function (the rank imports it by name); arguments and results are plain data or
    tensors. Raises WorldError if a rank raises, dies or is not done within `timeout_s`; the others then have `grace_s`
    to say what they saw.
    """
    return pool().run(_import_name(fn), world_size, args, timeout_s, grace_s)


@functools.cache
def pool() -> Pool:
    """The pool of this process."""
    made = Pool()
    atexit.register(made.close)
    return made


def _import_name(fn: Callable[..., Any]) -> str:
    """`module:qualname` of a function that another process can import."""
    name = f"{getattr(fn, '__module__', '?')}:{getattr(fn, '__qualname__', '?')}"
    if "<" in name or "?" in name or name.startswith("__main__:"):
        raise ValueError(f"{name} cannot run on a rank: only a module-level function can be imported there")
    if _resolve(name) is not fn:
        raise ValueError(f"{name} cannot run on a rank: that name means another object")
    return name


def _resolve(name: str) -> Any:
    module, qualname = name.split(":")
    return functools.reduce(getattr, qualname.split("."), importlib.import_module(module))


# ----------------------------------------------------------------------------------------------------
# On a rank


@dataclass(frozen=True)
class _Task:
    function: str
    rank: int
    world_size: int
    store_path: str
    args: tuple[Any, ...]


@dataclass(frozen=True)
class _Answer:
    """What a rank sends back. `error` is None where the function returned."""

    value: Any = None
    error: str | None = None
    traceback: str = ""


def _serve(tasks: Connection, directory: str, name: str) -> None:
    """Main function of a rank: run one task after another until the other end is closed."""
    import torch

    threading.Thread(target=_end_with_the_test_process, daemon=True).start()
    log = os.open(f"{directory}/{name}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    stack = open(f"{directory}/{name}.stack", "w")  # noqa: SIM115 (open as long as the process lives)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    faulthandler.enable()
    faulthandler.register(STACK_SIGNAL, file=stack, all_threads=True)
    torch.set_num_threads(1)
    torch.set_num_interop_threads(1)
    os.environ.update(RANK_ENVIRONMENT)
    gc.freeze()  # what was imported is never garbage: collecting after each world is cheap
    tasks.send_bytes(b"started")
    while True:
        try:
            task: _Task = pickle.loads(tasks.recv_bytes())
        except EOFError:
            return
        os.ftruncate(log, 0)
        answer = _run(task)
        sys.stdout.flush()
        sys.stderr.flush()
        tasks.send_bytes(answer)


def _end_with_the_test_process() -> None:
    """An idle rank sees its pipe closed; this is for one that is stuck in a collective or in a loop."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _chunk_bytes() -> int | None:
    """The size of chunks that tests patch; None before the module is there."""
    return getattr(sys.modules.get("colossal_lite.zero.build_chunks"), "CHUNK_BYTES", None)


def _run(task: _Task) -> bytes:
    """The pickled answer of one task; the process is as before, or the answer is an error."""
    import numpy
    import torch
    import torch.distributed as dist

    environment, directory, known = dict(os.environ), os.getcwd(), len(sys.modules)
    chunk_bytes = _chunk_bytes()
    random.seed(0)
    numpy.random.seed(0)
    torch.manual_seed(0)
    try:
        store = dist.FileStore(task.store_path, task.world_size)
        value = _resolve(task.function)(RankEnv(task.rank, task.world_size, store), *task.args)
        assert not dist.is_initialized(), "the function returned and left torch's default process group open"
        assert chunk_bytes in (None, _chunk_bytes()), "the function returned and left chunks of another size"
        answer = pickle.dumps(_Answer(value))
        del value, store
    except BaseException as error:  # SystemExit too: the other end must hear of it
        text = "".join(traceback.format_exception(error))
        answer = pickle.dumps(_Answer(error=f"{type(error).__name__}: {error}", traceback=text))
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(directory)
    torch.set_default_dtype(torch.float32)
    if torch.are_deterministic_algorithms_enabled():  # the setter loads inductor, 2 s
        torch.use_deterministic_algorithms(False)
    gc.collect()
    if len(sys.modules) > known:
        gc.freeze()
    return answer


# ----------------------------------------------------------------------------------------------------
# In the test process


@dataclass
class _Rank:
    process: multiprocessing.process.BaseProcess
    tasks: Connection
    log: Path
    stack: Path

    def send(self, task: _Task) -> None:
        self.tasks.send_bytes(pickle.dumps(task))

    def await_start(self) -> None:
        if not self.tasks.poll(START_S):
            raise RuntimeError(
                f"rank process {self.process.pid} has not started within {START_S:g} s\n{self.output()}"
            )
        with suppress(EOFError, ConnectionError):  # it has died: so the world will say
            self.tasks.recv_bytes()

    def answer(self) -> _Answer | None:
        """What it sent, or None if it died."""
        try:
            if self.tasks.poll():
                answer: _Answer = pickle.loads(self.tasks.recv_bytes())
                return answer
        except (EOFError, ConnectionError):
            pass
        return None

    def output(self) -> str:
        return self.log.read_text(errors="replace") if self.log.exists() else ""

    def where(self) -> str:
        """The stack of its threads now, most recent call first; empty if the process does not answer."""
        try:
            os.kill(self.process.pid or 0, STACK_SIGNAL)
        except ProcessLookupError:
            return ""
        end = time.monotonic() + STACK_S
        while time.monotonic() < end:
            text = self.stack.read_text()
            # The main thread comes last; a stack of more than 100 frames ends in dots instead of at _serve.
            if " in _serve\n" in text or "\n  ...\n" in text:
                return text
            time.sleep(0.01)
        return ""

    def kill(self) -> None:
        try:
            family = psutil.Process(self.process.pid).children(recursive=True)
        except psutil.NoSuchProcess:
            family = []
        self.process.kill()
        for child in family:
            try:
                child.kill()
            except psutil.NoSuchProcess:
                continue  # gone by itself
        self.process.join()
        self.tasks.close()


@dataclass
class Pool:
    """Ranks that wait for work. `run` is the whole interface; it is not re-entrant."""

    _ranks: list[_Rank] = field(default_factory=list)
    _directory: Path | None = None
    _serial: itertools.count[int] = field(default_factory=itertools.count)

    def pids(self) -> list[int]:
        return [rank.process.pid for rank in self._ranks if rank.process.pid]

    def run(
        self,
        function: str,
        world_size: int,
        args: tuple[Any, ...],
        timeout_s: float,
        grace_s: float = GRACE_S,
    ) -> list[Any]:
        if not 1 <= world_size <= MAX_RANKS:
            raise ValueError(f"world_size must be 1 to {MAX_RANKS}, got {world_size}")
        try:
            ranks = self._at_least(world_size)[:world_size]
            store = f"{self._directory}/store{next(self._serial)}"
            for number, rank in enumerate(ranks):
                rank.send(_Task(function, number, world_size, store, args))
            answers = _collect(ranks, timeout_s, grace_s)
        except BaseException:  # an interrupt or pytest's own timeout: nobody waits for these ranks any more
            self._end_ranks()
            raise
        good = [answer for answer in answers.values() if answer and answer.error is None]
        if len(good) < world_size:
            failures = [
                _failure(number, rank, number in answers, answers.get(number))
                for number, rank in enumerate(ranks)
            ]
            self._end_ranks()
            late = f" within {timeout_s:g} s" if len(good) == len(answers) else ""
            raise WorldError(f"world of {world_size} failed{late}: {function}", failures)
        for number, rank in enumerate(ranks):
            for line in rank.output().splitlines():
                print(f"[rank {number}] {line}")
        return [answer.value for _, answer in sorted(answers.items()) if answer]

    def close(self) -> None:
        """End all ranks; a later `run` starts new ones."""
        for rank in self._ranks:
            rank.tasks.close()
        for rank in self._ranks:
            rank.process.join(GRACE_S)
        self._end_ranks()
        if self._directory:
            shutil.rmtree(self._directory)
            self._directory = None

    def _at_least(self, count: int) -> list[_Rank]:
        if self._directory is None:
            self._directory = Path(tempfile.mkdtemp(prefix="ranks-"))
        # BLAS makes its threads when it is loaded, in the forkserver: the variables must be there before.
        with patch.dict(os.environ, RANK_ENVIRONMENT):
            context = multiprocessing.get_context("forkserver")
            context.set_forkserver_preload(PRELOADED)
            started = [self._start(context) for _ in range(count - len(self._ranks))]
        self._ranks += started
        for rank in started:  # a world's time is its own, not what its ranks take to start
            rank.await_start()
        return self._ranks

    def _start(self, context: multiprocessing.context.ForkServerContext) -> _Rank:
        ours, theirs = context.Pipe()
        name = f"process{next(self._serial)}"
        # Not a daemon: a rank may have children of its own (loader workers).
        process = context.Process(target=_serve, args=(theirs, str(self._directory), name), daemon=False)
        process.start()
        theirs.close()
        assert self._directory is not None
        return _Rank(process, ours, self._directory / f"{name}.log", self._directory / f"{name}.stack")

    def _end_ranks(self) -> None:
        for rank in self._ranks:
            rank.kill()
        self._ranks.clear()


def _collect(ranks: Sequence[_Rank], timeout_s: float, grace_s: float) -> dict[int, _Answer | None]:
    """Answers by rank, None for a rank that died; a rank that did not come back in time has no entry."""
    answers: dict[int, _Answer | None] = {}
    end = time.monotonic() + timeout_s
    while len(answers) < len(ranks) and (left := end - time.monotonic()) > 0:
        pending = {number: rank for number, rank in enumerate(ranks) if number not in answers}
        wait([h for rank in pending.values() for h in (rank.tasks, rank.process.sentinel)], timeout=left)
        for number, rank in pending.items():
            dead = (
                rank.process.exitcode is not None
            )  # read before the pipe: what it had sent is still in there
            answer = rank.answer()
            if answer is None and not dead:
                continue
            answers[number] = answer
            if answer is None or answer.error is not None:
                end = min(end, time.monotonic() + grace_s)
    return answers


def _failure(number: int, rank: _Rank, came: bool, answer: _Answer | None) -> RankFailure:
    printed = rank.output()[-LOG_TAIL_BYTES:]
    printed = f"\nit had printed:\n{printed}" if printed else ""
    if answer is not None:
        if answer.error is None:
            return RankFailure(number, "done", "returned", printed)
        return RankFailure(number, "raised", answer.error, answer.traceback + printed)
    if came:
        rank.process.join()
        code = rank.process.exitcode or 0
        how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        return RankFailure(number, "died", how, printed)
    stack = rank.where()
    frames = _main_thread(stack)
    if not frames:
        return RankFailure(number, "late", "the process does not answer signals", printed)
    waits = "torch/distributed/" in frames[0] or "colossal_lite/distributed/communicator.py" in frames[0]
    return RankFailure(number, "waiting" if waits else "late", frames[0], stack + printed)


def _main_thread(stack: str) -> list[str]:
    """Frames of the thread that runs the task, innermost first, as `path:line in function`."""
    last = stack.rpartition("(most recent call first):\n")[2]
    rows = [line.split('"', 2)[1:] for line in last.splitlines() if line.startswith("  File ")]
    return [path + rest.replace(", line ", ":", 1) for path, rest in rows]
