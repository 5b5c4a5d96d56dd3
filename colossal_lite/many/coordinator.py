"""Decides on rank 0 which device trains which task next, and keeps the journal of it.

Note: what is written when.
A decision is in the journal, on disk, before it is sent.  A task's numbers do not depend on the journal: they come from
its checkpoint alone.  So after a kill the journal says which tasks have failed or were stopped, and which rungs are
decided.  The steps that each task has made are those of its newest checkpoint.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from colossal_lite.many.jobs import Job
from colossal_lite.many.policies import POLICIES, Candidate, Choose, Moment, PolicyName
from colossal_lite.many.results import losses_of, metric_of
from colossal_lite.many.task import Halving, Task
from colossal_lite.many.timetable import Action, Span
from colossal_lite.many.worker import Message, saved_step

QUANTUM_S = 0.5
"""How long a device trains a task before it is asked again; at least a step."""
MOST_DEATHS = 3
"""Workers in a row that may die over one step of a task."""
JOURNAL = "journal.jsonl"
Status = Literal["open", "done", "stopped", "failed"]
OnReport = Callable[[str, int, Mapping[str, float | None]], Literal["go", "stop"] | None]


@dataclass
class TaskState:
    """Where a task stands."""

    task: Task
    order: int
    step: int = 0
    status: Status = "open"
    cause: str = ""
    loss: float | None = None
    held_out: float | None = None
    step_s: float | None = None
    """Of its last quantum; None: not measured yet."""
    at: int | None = None
    """The device whose worker has its engine open."""
    busy_on: int | None = None
    """The device that trains it now, or waits for it."""
    moves_to: int | None = None
    deaths: int = 0
    busy_s: float = 0.0
    base: str | None = None
    """The name of its frozen weights, if it states one."""


class Journal:
    """Rows of JSON, each on disk before the next."""

    def __init__(self, directory: Path) -> None:
        self._file = (directory / JOURNAL).open("a", encoding="utf-8")

    def write(self, **row: Any) -> None:
        self._file.write(json.dumps(row) + "\n")
        self._file.flush()
        os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()


def journal_rows(directory: Path) -> list[dict[str, Any]]:
    """What a journal says; a last line that a kill cut short is left out."""
    path = directory / JOURNAL
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True) if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


@dataclass
class Request:
    """What rank 0 waits for from one device."""

    task: str
    kind: Literal["run", "park"]
    sent_s: float
    others: Sequence[str] = ()
    """Tasks that run abreast of it."""


@dataclass
class Coordinator:
    """The state of the run on rank 0. `send` hands a request to a device."""

    tasks: Sequence[Task]
    directory: Path
    policy: PolicyName
    stop: Halving | None
    on_report: OnReport | None
    devices: int
    seed: int
    send: Callable[[int, Message], None]
    shared: Mapping[str, Any] = field(default_factory=dict)
    """Settings of all tasks."""
    spans: list[Span] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.states = {
            task.name: TaskState(task, n, base=base_of(task, self.shared))
            for n, task in enumerate(self.tasks)
        }
        self.pending: list[list[Request]] = [[] for _ in range(self.devices)]
        self._decided: set[int] = set()
        self._last: list[str | None] = [None] * self.devices
        self._move_s = 1.0
        self._begun_s = time.monotonic()
        self._recall()
        self._first = {name: state.step for name, state in self.states.items()}
        self._journal = Journal(self.directory)
        self._choose: Choose = self._new_choice()
        self._decide_rungs()

    def close(self) -> None:
        self._journal.close()

    def _recall(self) -> None:
        """What an earlier run of these tasks has left. Tasks that failed are tried again."""
        for row in journal_rows(self.directory):
            if row["decision"] == "rung":
                self._decided.add(row["rung"])
                for name in set(row["metrics"]) - set(row["kept"]):
                    cause = _fell(row["rung"], row["metrics"], row["kept"])
                    self.states[name].status, self.states[name].cause = "stopped", cause
            elif row["decision"] in ("stopped", "done"):
                state = self.states[row["task"]]
                state.status, state.cause, state.held_out = row["decision"], row["cause"], row["held_out"]
        for name, state in self.states.items():
            state.step = saved_step(self.directory, name)
            rows = losses_of(self.directory, name)
            state.loss = rows[min(state.step, len(rows)) - 1] if rows and state.step else None

    # ---- decisions ----

    @property
    def is_over(self) -> bool:
        return all(state.status != "open" for state in self.states.values()) and not any(self.pending)

    def assign(self) -> None:
        """Give every idle device something to do, if there is anything."""
        for device in range(self.devices):
            if not self.pending[device] and not any(s.busy_on == device for s in self.states.values()):
                self._assign(device)

    def _assign(self, device: int) -> None:
        ready = [state for state in self.states.values() if self._is_ready(state)]
        if not ready:
            return
        moment = self._moment(device, ready)
        chosen = self._choose(moment)
        if chosen is None and not any(self.pending):  # a plan that others than it foresaw have overtaken
            self._choose = self._new_choice()
            chosen = self._choose(moment)
        if chosen is None:
            return
        state = self.states[chosen.task]
        state.busy_on = device
        if state.at is not None and state.at != device:
            self._journal.write(
                at_s=self._now_s, decision="move", task=chosen.task, step=state.step, device=device
            )
            state.moves_to = device
            self._ask(state.at, "park", chosen.task)
        else:
            self._run(device, state)

    def _run(self, device: int, state: TaskState) -> None:
        racing = [s for s in self.states.values() if s.base == state.base and s.status == "open"]
        most = -(-len(racing) // self.devices) if state.base is not None and not state.deaths else 1
        quantum_s = QUANTUM_S / most
        steps = 1 if state.step_s is None else max(1, round(quantum_s / max(state.step_s, 1e-6)))
        to = min(self._next_goal(state), state.step + steps)
        others = self._abreast(device, state, to, racing)[: most - 1]
        for each in (state, *others):
            each.busy_on = device
            self._journal.write(
                at_s=self._now_s, decision="run", task=each.task.name, step=state.step, to=to, device=device
            )
        names = [each.task.name for each in others]
        self._ask(device, "run", state.task.name, others=names, to=to, evaluates=self._evaluates(state, to))

    def _evaluates(self, state: TaskState, to: int) -> bool:
        held_out = self.stop is not None and self.stop.metric == "held_out" and to == self._rung_after(state)
        return state.task.evaluate is not None and (to == state.task.steps or held_out)

    def _abreast(
        self, device: int, state: TaskState, to: int, racing: Sequence[TaskState]
    ) -> list[TaskState]:
        """Those of `racing`, over one base, that make the same steps beside this task: here or nowhere, the open ones
        first. One whose process has died runs by itself."""
        found = [
            s for s in racing
            if s is not state and self._is_ready(s) and not s.deaths and s.at in (None, device)
            and s.step == state.step and to <= self._next_goal(s)
            and self._evaluates(s, to) == self._evaluates(state, to)
        ]  # fmt: skip
        return sorted(found, key=lambda s: s.at is None)

    def _ask(
        self, device: int, kind: Literal["run", "park"], task: str, others: Sequence[str] = (), **more: Any
    ) -> None:
        self.pending[device].append(Request(task, kind, self._now_s, others))
        self.send(device, {"do": kind, "task": task, **more, **({"abreast": others} if others else {})})

    def _is_ready(self, state: TaskState) -> bool:
        if state.status != "open" or state.busy_on is not None:
            return False
        return not (state.step == self._rung_after(state) and self._metric(state, state.step) is not None)

    def _rung_after(self, state: TaskState) -> int | None:
        """The first rung that holds this task up."""
        rungs = self.stop.rungs if self.stop else ()
        return next((r for r in rungs if r not in self._decided and state.step <= r < state.task.steps), None)

    def _next_goal(self, state: TaskState) -> int:
        rung = self._rung_after(state)
        return state.task.steps if rung is None else rung

    def _moment(self, device: int, ready: Sequence[TaskState]) -> Moment:
        jobs = [self._job(state) for state in self.states.values() if state.status == "open"]
        left_s = [job.alone_s for job in jobs]
        bound_s = max(max(left_s), sum(left_s) / self.devices)
        candidates = []
        for state in ready:
            job, moves = self._job(state), state.at not in (None, device)
            candidates.append(
                Candidate(
                    job.task,
                    state.order,
                    max(job.left, 1),
                    job.step_s,
                    job.alone_s,
                    self._move_s if moves else 0.0,
                    self._last[device] == job.task,
                )  # fmt: skip
            )
        return Moment(device, self._now_s, 0.0, bound_s, candidates)

    def _job(self, state: TaskState) -> Job:
        known = [s.step_s for s in self.states.values() if s.step_s is not None]
        guess_s = sum(known) / len(known) if known else 1.0
        step_s = guess_s if state.step_s is None else state.step_s
        return Job(state.task.name, state.task.steps - state.step, step_s)

    def _new_choice(self) -> Choose:
        jobs = [self._job(state) for state in self.states.values() if state.status == "open"]
        return POLICIES[self.policy](jobs, self.devices, self.seed)

    # ---- answers ----

    def hear(self, device: int, answer: Message) -> None:
        """Take what a worker has said."""
        if answer["said"] == "died":
            self._died(device, answer["how"])
            return
        if answer["said"] == "ended":
            return
        request = self.pending[device].pop(0)
        assert answer["task"] == request.task, "answers come in the order of requests"
        for each in (answer, *answer.get("others", ())):
            self._heard(device, each)
        self._decide_rungs()

    def _heard(self, device: int, answer: Message) -> None:
        """Take what a worker has said of one task."""
        state = self.states[answer["task"]]
        if answer["said"] == "failed":
            self._leave(state, "failed", answer["cause"])
        elif answer["said"] == "parked":
            state.at, state.step = None, answer["step"]
            self._span(device, "EVICT", state, self._now_s - answer["end_s"], answer["end_s"])
            self._move_s = max(answer["end_s"], 1e-3)
            self._go_on(state)
        else:
            self._ran(device, state, answer)

    def _ran(self, device: int, state: TaskState, answer: Message) -> None:
        steps = answer["step"] - answer["before"]
        end_s = self._now_s
        begin_s = end_s - answer["end_s"] - answer["run_s"]
        if answer["open_s"] > 1e-3:
            self._span(device, "FETCH", state, begin_s - answer["open_s"], answer["open_s"])
        self._span(device, "RUN", state, begin_s, answer["run_s"] + answer["end_s"])
        if steps > 0:
            state.step_s = answer["run_s"] / steps
            state.deaths = 0
        state.busy_s += answer["run_s"]
        state.step, state.busy_on, self._last[device] = answer["step"], None, state.task.name
        state.at = None if answer["done"] else device
        state.loss = state.loss if answer["loss"] is None else answer["loss"]
        state.held_out = state.held_out if answer["held_out"] is None else answer["held_out"]
        if answer["done"]:
            self._leave(state, "done", "")
        if self.on_report is not None:
            word = self.on_report(
                state.task.name, state.step, {"loss": state.loss, "held_out": state.held_out}
            )
            if word not in (None, "go", "stop"):
                raise ValueError(f"on_report returned {word!r}; legal: 'go', 'stop' or None")
            if word == "stop" and state.status == "open":
                self._leave(state, "stopped", f"on_report said stop at step {state.step}")

    def _leave(self, state: TaskState, status: Status, cause: str) -> None:
        """A task is over. What is open of it is saved."""
        state.status, state.cause, state.busy_on, state.moves_to = status, cause, None, None
        self._journal.write(
            at_s=self._now_s, decision=status, task=state.task.name, step=state.step, device=state.at,
            cause=cause, held_out=state.held_out,
        )  # fmt: skip
        if state.at is not None and status == "stopped":
            self._ask(state.at, "park", state.task.name)
        state.at = None
        if any(each.status == "open" for each in self.states.values()):
            self._choose = self._new_choice()

    def _go_on(self, state: TaskState) -> None:
        """A task has been parked: the device that waits for it begins."""
        device, state.moves_to = state.moves_to, None
        if device is not None and state.status == "open":
            self._run(device, state)

    def _died(self, device: int, how: str) -> None:
        """A worker is lost, and with it what its tasks have done since their checkpoints."""
        lost, self.pending[device] = self.pending[device], []
        running = [
            name for request in lost if request.kind == "run" for name in (request.task, *request.others)
        ]
        for name, state in self.states.items():
            if state.at == device or name in running:
                state.at, state.step = None, saved_step(self.directory, name)
                if name in running:
                    state.busy_on = None
        for name in running:
            state = self.states[name]
            state.deaths += 1
            self._journal.write(
                at_s=self._now_s, decision="died", task=name, step=state.step, device=device, cause=how
            )
            if state.deaths >= MOST_DEATHS:
                cause = (
                    f"its process died {state.deaths} times after step {state.step}, the last time by {how}"
                )
                self._leave(state, "failed", cause)
        for request in lost:
            if request.kind == "park":
                self._go_on(self.states[request.task])

    # ---- rungs ----

    def _metric(self, state: TaskState, step: int) -> float | None:
        """The metric of a task at a rung; None if it has none yet."""
        assert self.stop is not None
        return metric_of(self.directory, state.task.name, step, self.stop.metric)

    def _decide_rungs(self) -> None:
        """Stop the worse tasks at each rung that all others have come to."""
        for rung in self.stop.rungs if self.stop else ():
            racing = [s for s in self.states.values() if s.status == "open" and s.task.steps > rung]
            if rung in self._decided or not racing:
                continue
            if any(s.step < rung or s.busy_on is not None for s in racing):
                return
            metrics = {s.task.name: self._metric(s, rung) for s in racing}
            if any(metric is None for metric in metrics.values()):
                return
            self._stop_at(rung, {name: metric for name, metric in metrics.items() if metric is not None})

    def _stop_at(self, rung: int, metrics: Mapping[str, float]) -> None:
        assert self.stop is not None
        kept = list(self.stop.kept(metrics))
        self._journal.write(
            at_s=self._now_s, decision="rung", task=None, rung=rung, metrics=dict(metrics), kept=kept
        )
        self._decided.add(rung)
        for name in metrics:
            if name not in kept:
                self._leave(self.states[name], "stopped", _fell(rung, metrics, kept))

    # ---- times, and what is left of it all ----

    def rows(self) -> list[dict[str, Any]]:
        """A row for each task: name, status, cause, step and held-out loss."""
        return [
            {
                "name": name, "status": state.status, "cause": state.cause, "held_out": state.held_out,
                "step": saved_step(self.directory, name) if state.status == "open" else state.step,
            }
            for name, state in self.states.items()
        ]  # fmt: skip

    def jobs(self) -> list[Job]:
        """What this session has made, with the times that were measured."""
        made = [
            (state.task.name, state.step - self._first[state.task.name], state)
            for state in self.states.values()
        ]
        return [Job(name, max(steps, 0), state.busy_s / max(steps, 1)) for name, steps, state in made]

    @property
    def _now_s(self) -> float:
        return time.monotonic() - self._begun_s

    def _span(
        self, device: int, kind: Literal["FETCH", "RUN", "EVICT"], state: TaskState, start_s: float, long_s: float
    ) -> None:  # fmt: skip
        action = Action(kind, state.task.name, state.step)
        self.spans.append(Span(device, action, max(start_s, 0.0), max(start_s, 0.0) + long_s))


def base_of(task: Task, shared: Mapping[str, Any]) -> str | None:
    """The name that a task states for its frozen weights."""
    memory = task.settings(shared).get("memory")
    return memory.get("shared_base") if isinstance(memory, Mapping) else None


def _fell(rung: int, metrics: Mapping[str, float], kept: Sequence[str]) -> str:
    return f"not among the best {len(kept)} of {len(metrics)} at step {rung}"
