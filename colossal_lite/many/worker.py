"""Trains tasks in a child process of its own, as its supervisor asks: one request, one answer.

Note: the life of a worker.
A worker has one device. It keeps the engines of its tasks open, so going from one to another costs nothing.  A task
leaves by a checkpoint, and its next worker goes on from there.  An error of a task closes that task alone.
Tasks that are asked for together take turns in their steps. Those over one base read one copy of it. Others hide
their loads beside the compute of the other.
A task by itself goes on when it has answered, as far as its request allows, until the worker is asked again.  So a
device does not stand still while rank 0 decides.  The next answer says what it has done meanwhile.  A run ends
early, after a step, where another request has come.
The workers of a gang get the same requests in the same order. Each is a rank of the gang's world.
Stop signals are for the supervisor. The worker ends when its supervisor does, without saving.
"""

from __future__ import annotations

import copy
import math
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from multiprocessing import parent_process
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from torch import nn

from colossal_lite.checkpoint import tools
from colossal_lite.checkpoint.files import listed
from colossal_lite.config.config import Config
from colossal_lite.engine.context import Context
from colossal_lite.engine.initialize import initialize
from colossal_lite.engine.run import Run
from colossal_lite.engine.step_totals import StepResult
from colossal_lite.engine.stopping import STOP_SIGNALS
from colossal_lite.engine.turn_taking import take_turns, turns_of
from colossal_lite.many.task import Task
from colossal_lite.many.task_plan import data_of, settings_of
from colossal_lite.many.turnstile import Turnstile
from colossal_lite.memory.frozen_records import FrozenHandle, FrozenRecords
from colossal_lite.memory.host_store import HostStore
from colossal_lite.numerics.generators import drawn_between, states

Launch = Callable[..., Context]
Message = dict[str, Any]
SHOWN = 16
"""Samples of each device. Proofs of a model's own loss take a few of them, of two labels."""
TASKS = "tasks"


@dataclass(frozen=True)
class Order:
    """What a worker is made with."""

    tasks: Sequence[Task]
    shared: Mapping[str, Any]
    directory: Path
    save_every: int | None
    launch: Launch
    log: Path
    prepare: Callable[[], object]
    """Called first: chooses the device."""
    frozen: FrozenHandle | None = None
    """Where the frozen weights of all tasks of the host are; None: each worker has its own."""
    holder: int = 0
    """Which of the host's workers this is."""


def folder_of(directory: Path, task: str) -> Path:
    return directory / TASKS / task


def saved_step(directory: Path, task: str) -> int:
    """The step of the newest whole checkpoint of a task; 0 if it has none."""
    folder = folder_of(directory, task) / "checkpoints"
    found = tools.ls(folder) if listed(folder) else iter(())
    return next((each.manifest.step for each in found if each.manifest is not None), 0)


def serve(pipe: Connection, order: Order) -> None:
    """Answer requests until the supervisor ends: the target of the child process."""
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    _write_into(order.log)
    order.prepare()
    worker = Worker(order, pipe.poll)
    pipe.send({"said": "ready", "pid": os.getpid()})
    with suppress(EOFError):
        while (request := pipe.recv())["do"] != "end":
            requests = [request, *(pipe.recv() for _ in range(request.pop("abreast", 0)))]
            for answer in worker.answers(requests):
                pipe.send(answer)
            worker.go_on()
        worker.park_all()
        pipe.send({"said": "ended"})


def _end_with_parent() -> None:
    parent = parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _write_into(log: Path) -> None:
    """Send what this process prints to its log."""
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("a") as file:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)


class OpenTask:
    """The engine of one task, and the position in its data."""

    def __init__(
        self, order: Order, task: Task, config: Config, data: Any, place: Mapping[str, Any], store: HostStore
    ) -> None:
        """`place`: rank and world of this worker, and where its gang meets."""
        self.task = task
        self.context = order.launch(config, **place)
        device = self.context.device
        self._drawing_devices = [device] if device.type == "cuda" else []
        self._before: Mapping[str, Any] = {}
        """The generators when its turn began."""
        try:
            copied: dict[int, Any] = {}  # tasks may have one object, and a criterion its model
            is_model = isinstance(task.build, nn.Module)
            build = copy.deepcopy(task.build, copied) if is_model else task.build
            example = self._first_samples(data)
            engine = initialize(
                build,
                context=self.context,
                criterion=copy.deepcopy(task.criterion, copied),
                example=example,
                store=store,
                task=task.name,
            )
            engine.on_step(self._refuse_faults, reads_weights=False)  # before the run saves this step
            self.run = Run(folder_of(order.directory, task.name), engine, save_every=order.save_every)
            self.batches: Iterator[Any] = iter(
                self.run.batches(data, steps=task.steps, global_batch=task.global_batch, **task.loader)
            )
        except BaseException:
            self.context.__exit__(*sys.exc_info())
            raise

    def _first_samples(self, data: Any) -> Any:
        """The first ones in the order of the task, for proofs; None where none needs them, or if they are too few."""
        parallel, shown = self.context.config.parallel, self.task.global_batch
        load = partial(self.context.dataloader, data, **self.task.loader)
        if self.task.criterion == "model":
            most = load(global_batch=shown).num_samples
            shown = max(shown, min(SHOWN * self.task.devices, most or shown))
        elif parallel.tensor.size == 1 and not parallel.pipeline.is_staged:
            return None
        return next(iter(load(global_batch=shown)), None)

    @property
    def step(self) -> int:
        return self.run.engine.steps

    def advance(
        self, to: int, *, ends: bool = True, until: Callable[[], bool] = lambda: False
    ) -> float | None:
        """Train until so many steps are made, or `until` is so after one; the last loss. `ends`: save the task's last
        step, if it is made. Raises ValueError where a number is not finite."""
        loss = None
        while self.step < to and (loss is None or not until()):
            loss = float(self._stepped(next(self.batches)).loss)
        if ends and self.step == self.task.steps:
            next(self.batches, None)  # which saves the last step
        return loss

    def _refuse_faults(self, result: StepResult) -> None:
        """Raises ValueError for a step that draws, or whose numbers are not finite. No checkpoint has it."""
        self._refuse_draws(self._before)
        scales = self.context.config.precision.dtype == "fp16"  # and a step lowers its scale
        if scales or (result.skipped and not result.tokens):  # which has changed nothing, as alone
            return
        numbers = {"loss": float(result.loss), "norm of the gradients": float(result.grad_norm)}
        for name, number in numbers.items():
            if not math.isfinite(number):
                raise ValueError(f"the {name} of step {result.step} is {number}")

    def _stepped(self, batch: Any) -> StepResult:
        """One step. Raises ValueError for one that draws: other tasks draw between its steps."""
        self._turn_begins()
        result = self.run.step(batch)
        self._turn_ends()
        return result

    def between_turns(self, turn: Callable[[], object]) -> None:
        """Let others run within a step. Their draws are not this task's. Raises ValueError as `_stepped`."""
        self._turn_ends()
        turn()
        self._turn_begins()

    def _turn_begins(self) -> None:
        self._before = states(self._drawing_devices)

    def _turn_ends(self) -> None:
        before, self._before = self._before, {}
        self._refuse_draws(before)

    def _refuse_draws(self, before: Mapping[str, Any]) -> None:
        if name := drawn_between(before, states(self._drawing_devices)):
            raise ValueError(
                f"build, criterion: a step draws from {name}. Other tasks draw between its steps. Legal: no random "
                f"numbers in a model or its criterion"
            )

    def evaluate(self) -> float:
        held_out = data_of(self.task.evaluate, self.context.config.seed, "evaluate")
        return self.run.evaluate(held_out, global_batch=self.task.global_batch)

    def close(self, error: BaseException | None = None) -> None:
        """Close the context, with a checkpoint of the last step where there is no error."""
        self.context.__exit__(type(error) if error else None, error, None)


class Worker:
    """The open tasks of one device."""

    def __init__(self, order: Order, is_asked: Callable[[], bool] = lambda: False) -> None:
        """`is_asked`: whether another request has come."""
        self._is_asked = is_asked
        self._going: tuple[str, int] | None = None
        """The task that goes on, and the step to which it may."""
        self._over: tuple[Message, float] | None = None
        """What it has done since its answer, and when that ended."""
        self._fell: dict[str, Message] = {}
        """Failures since the answer, by task."""
        self._order, self._tasks = order, {task.name: task for task in order.tasks}
        self._open: dict[str, OpenTask] = {}
        self._store = HostStore(parks=False, frozen=FrozenRecords(order.frozen, order.holder))
        self._configs: dict[str, Config] = {}
        """Of each task that was opened here: planned once."""

    def answer(self, request: Message) -> Message:
        """Do what is asked. What goes wrong in a task is its answer."""
        name, do = request["task"], request["do"]
        if (fell := self._fell.pop(name, None)) is not None and do != "drop":
            return fell
        try:
            if do == "park":
                return {"said": "parked", "task": name, **self._park(name)}
            if do == "drop":
                self._close(name, RuntimeError("a worker of its gang has ended"))
                return {"said": "dropped", "task": name}
            return self._run(**{key: value for key, value in request.items() if key != "do"})
        except (Exception, SystemExit) as error:
            return self._failed(name, error)

    def _failed(self, name: str, error: BaseException) -> Message:
        traceback.print_exception(error)
        sys.stderr.flush()
        self._close(name, error)
        said = "full" if isinstance(error, torch.OutOfMemoryError | MemoryError) else "failed"
        return {"said": said, "task": name, "cause": f"{type(error).__name__}: {error}"}

    def answers(self, requests: Sequence[Message]) -> list[Message]:
        """Answer several requests. Of tasks to be run, those whose lists have turns alike take turns in their steps.
        `later_s` of an answer: how long the device has done something else since."""
        found = self._answers(requests)
        if (over := self._over) is not None:
            self._over, (done, end_s) = None, over
            found[0] |= {"over": done | {"ago_s": time.monotonic() - end_s}}
        return found

    def go_on(self) -> None:
        """Train on after an answer, until another request comes or the last step that its run has allowed."""
        going, self._going = self._going, None
        if going is None:
            return
        name, on = going
        held, begun_s, loss = self._open[name], time.monotonic(), None
        before = held.step
        try:
            while held.step < on and not self._is_asked():
                loss = held.advance(held.step + 1, ends=False)
        except (Exception, SystemExit) as error:
            self._fell[name] = self._failed(name, error)
        if held.step > before:
            end_s = time.monotonic()
            self._over = dict(task=name, step=held.step, loss=loss, run_s=end_s - begun_s), end_s

    def _answers(self, requests: Sequence[Message]) -> list[Message]:
        if len(requests) == 1:
            return [self.answer(requests[0])]
        found, alike = dict[str, Message](), dict[Hashable, list[Message]]()
        for request in requests:
            name = request["task"]
            try:
                if name in self._fell:
                    found[name] = self._fell.pop(name)
                    continue
                if name not in self._open:
                    self._open[name] = self._opened(self._tasks[name], request["place"])
                turns = turns_of(self._open[name].run.engine)
                alike.setdefault((name,) if turns is None else turns, []).append(request)
            except (Exception, SystemExit) as error:
                found[name] = self._failed(name, error)
        for those in alike.values():
            found |= self._by_turns(those)
        for request in requests:
            if (made := found[request["task"]])["said"] == "ran":
                ended = self.answer(request)  # evaluates, and saves a task that is over
                found[request["task"]] = ended | (made if ended["said"] == "ran" else {})
        return [
            {
                **found[request["task"]],
                "later_s": sum(found[r["task"]].get("run_s", 0.0) for r in requests[n + 1 :]),
            }
            for n, request in enumerate(requests)
        ]

    def _by_turns(self, requests: Sequence[Message]) -> dict[str, Message]:
        """Where these tasks began, their losses, and the seconds of their turns."""
        turnstile = Turnstile[Message]()

        def work(number: int, name: str, to: int) -> Message:
            held = self._open[name]
            before, takes = held.step, len(requests) > 1
            try:
                if takes:
                    take_turns(held.run.engine, partial(held.between_turns, partial(turnstile.turn, number)))
                loss = held.advance(to, ends=False)
            except (Exception, SystemExit) as error:  # before the others go on
                return self._failed(name, error)
            finally:
                if takes:
                    take_turns(held.run.engine, None)
            return {"said": "ran", "before": before, "loss": loss}

        made = turnstile.run([partial(work, n, r["task"], r["to"]) for n, r in enumerate(requests)])
        found = dict[str, Message]()
        for request, each, ran_s in zip(requests, made, turnstile.ran_s, strict=True):
            if isinstance(each, BaseException):
                raise each
            found[request["task"]] = each | {"run_s": ran_s}
        return found

    def _run(
        self, task: str, to: int, evaluates: bool, place: Mapping[str, Any], on: int | None = None
    ) -> Message:
        """`on`: the step to which it may go on, if it may end early too."""
        begun_s = time.monotonic()
        if task not in self._open:
            self._open[task] = self._opened(self._tasks[task], place)
        held = self._open[task]
        opened_s, before = time.monotonic(), held.step
        loss = held.advance(to) if on is None else held.advance(to, until=self._is_asked)
        ran_s = time.monotonic()
        held_out = held.evaluate() if evaluates and held.step >= to else None
        if done := held.step == self._tasks[task].steps:
            self._open.pop(task).close()
        elif on is not None and held.step >= to:
            self._going = task, on
        return {
            "said": "ran", "task": task, "step": held.step, "before": before, "loss": loss, "held_out": held_out,
            "done": done, "open_s": opened_s - begun_s, "run_s": ran_s - opened_s,
            "end_s": time.monotonic() - ran_s,
        }  # fmt: skip

    def _opened(self, task: Task, place: Mapping[str, Any]) -> OpenTask:
        data = data_of(task.data, Config.load(task.settings(self._order.shared)).seed, "data")
        if task.name not in self._configs:
            self._configs[task.name] = settings_of(task, self._order.shared, data)
        return OpenTask(self._order, task, self._configs[task.name], data, place, self._store)

    def _park(self, task: str) -> Message:
        begun_s = time.monotonic()
        if (held := self._open.pop(task, None)) is not None:
            held.close()
        return {"step": saved_step(self._order.directory, task), "end_s": time.monotonic() - begun_s}

    def park_all(self) -> None:
        """Save and close every open task, in an order that all workers of a gang have."""
        for task in sorted(self._open):
            self._open.pop(task).close()

    def _close(self, task: str, error: BaseException) -> None:
        """Drop a task after an error."""
        if (held := self._open.pop(task, None)) is not None:
            with suppress(Exception, SystemExit):  # the first error is the one to tell
                held.close(error)
