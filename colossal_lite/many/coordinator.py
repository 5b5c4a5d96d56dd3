"""Decides on rank 0 which device trains which task next, and keeps the journal of it.

Note: what is written when.
A decision is in the journal, on disk, before it is sent.  A task's numbers do not depend on the journal: they come from
its checkpoint alone.  So after a kill the journal says which tasks have failed or were stopped, and which rungs are
decided.  The steps that each task has made are those of its newest checkpoint.  A task that was stopped, and killed
before it was saved, trains to its last step again.

Note: gangs.
A task of several devices trains on a block of them (many/jobs.py).  A policy that chooses it claims the block: no
device of it takes another task.  The gang begins when the last of them has ended its own.  A block is claimed whole or
not at all, so no two gangs wait for each other.  A request to a gang is put into the queues of its workers at once. So
all have requests in one order.  An answer of a gang is whole when each worker has answered, or has died.
A worker is in gangs of one size at a time: torch has one default group in a process.

Note: the quantum.
A device is asked again when it has made some steps of a task, about half a second.  Until then it goes on, for at most
as long again, but not to a step where something is decided, nor where a report may stop the task.  With the quantum
"stage" it trains two tasks at once that have stages: they take turns stage by stage, so that the loads of one are
hidden by the other.  The policy chooses both.  A task that the end of the run waits for trains by itself.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from colossal_lite.config.config import Config
from colossal_lite.many.build_timetable import Quantum
from colossal_lite.many.jobs import Job, block_of, spread_s
from colossal_lite.many.journal import Journal, journal_rows
from colossal_lite.many.policies import POLICIES, Candidate, Choose, Moment, PolicyName
from colossal_lite.many.results import losses_of, metric_of
from colossal_lite.many.task import Halving, Task
from colossal_lite.many.timetable import Action, Span
from colossal_lite.many.worker import Message, saved_step

QUANTUM_S = 0.5
"""How long a device trains a task before it is asked again; at least a step."""
LAST_QUANTA = 16
"""Quanta in the least time that is left: towards the end they are shorter, so that all devices end together."""
HANGS_S = 30.0
"""When a worker of a gang is lost, the others have so long to notice it. Then they are ended."""
MOST_DEATHS = 3
"""Workers in a row that may die over one step of a task."""
Status = Literal["open", "done", "stopped", "failed"]
OnReport = Callable[[str, int, Mapping[str, float | None]], Literal["go", "stop"] | None]


Block = tuple[int, ...]


@dataclass
class TaskState:
    """Where a task stands."""

    task: Task
    order: int
    step: int = 0
    status: Status = "open"
    cause: str = ""
    ends_at: int | None = None
    """The step at which it was stopped, if a kill came before its checkpoint."""
    loss: float | None = None
    held_out: float | None = None
    step_s: float | None = None
    """Of its last quantum; None: not measured yet."""
    at: Block = ()
    """The devices whose workers have its engine open."""
    claims: Block = ()
    """The devices that it waits for."""
    busy_on: Block = ()
    """The devices that train it now, or wait for it."""
    awaits: set[str] = field(default_factory=set)
    """Tasks that are parked before it runs."""
    reach: int = 0
    """The step that its worker may have come to since its last answer."""
    fell_at: int = 0
    """The step that it may have been at when its process died."""
    meetings: int = 0
    """How often its engine was opened."""
    deaths: int = 0
    busy_s: float = 0.0
    base: str | None = None
    """The name of its frozen weights, if it states one."""
    has_stages: bool = False
    """Whether it may take turns with another task: not if it had no room beside one."""


@dataclass
class Request:
    """What rank 0 waits for from the devices of a task."""

    task: str
    kind: Literal["run", "park", "drop"]
    devices: Block
    answers: dict[int, Message] = field(default_factory=dict)
    fault_s: float | None = None
    """When the first of them has died or failed."""
    killed: set[int] = field(default_factory=set)
    """Devices whose workers were ended because they did not notice."""

    def said(self, *words: str) -> list[Message]:
        """The answers of these kinds, those first that tell more than that another worker is lost."""
        found = [answer for answer in self.answers.values() if answer["said"] in words]
        return sorted(found, key=lambda answer: answer.get("cause", "").startswith("CommError"))


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
    port: int
    """Of the store where gangs meet."""
    send: Callable[[int, Message], None]
    shared: Mapping[str, Any] = field(default_factory=dict)
    """Settings of all tasks."""
    quantum: Quantum = "step"
    spans: list[Span] = field(default_factory=list)
    fault: str = ""
    """How `on_report` has failed: the run ends."""
    fault_from: BaseException | None = None
    """The error that it has raised."""

    def __post_init__(self) -> None:
        self.states = {
            task.name: TaskState(
                task, n, base=base_of(task, self.shared), has_stages=has_stages(task, self.shared)
            )
            for n, task in enumerate(self.tasks)
        }
        self.pending: list[list[Request]] = [[] for _ in range(self.devices)]
        self._decided: dict[int, dict[str, float]] = {}
        """The metrics of all tasks that were compared at a rung."""
        self._last: list[str | None] = [None] * self.devices
        self._heads: list[tuple[Request | None, float]] = [(None, 0.0)] * self.devices
        """The request that each device is at, and since when."""
        self._save_s, self._open_s = 0.5, 0.5
        """Of a move, as measured last: to save and close a task, and to open and load it."""
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
        ends = dict[str, int]()
        for row in journal_rows(self.directory):
            if row["decision"] == "rung":
                known = self._decided.setdefault(row["rung"], {})
                known |= row["metrics"]
                for name in set(row["metrics"]) - set(row["kept"]):
                    cause = row.get("cause") or _fell(row["rung"], row["metrics"], row["kept"])
                    self.states[name].status, self.states[name].cause = "stopped", cause
                    ends[name] = row["rung"]
            elif row["decision"] in ("stopped", "done"):
                state = self.states[row["task"]]
                state.status, state.cause, state.held_out = row["decision"], row["cause"], row["held_out"]
                ends[state.task.name] = row["step"]
        for name, state in self.states.items():
            state.step = saved_step(self.directory, name)
            if state.status == "stopped" and state.step < ends[name]:
                state.status, state.ends_at = "open", ends[name]
            if state.status == "done" and state.step < ends[name]:  # its last checkpoint is gone, or torn
                state.status, state.held_out = "open", None
            rows = losses_of(self.directory, name)
            state.loss = rows[min(state.step, len(rows)) - 1] if rows and state.step else None

    # ---- decisions ----

    @property
    def is_over(self) -> bool:
        return all(state.status != "open" for state in self.states.values()) and not any(self.pending)

    def assign(self) -> None:
        """Give every idle device something to do, if there is anything."""
        self._begin_claims()
        for device in range(self.devices):
            if not self._is_taken(device) and not self._is_claimed([device]):
                self._choose_for(device)
        self._begin_claims()

    def _is_taken(self, device: int) -> bool:
        """Whether it has something to do."""
        return bool(self.pending[device]) or any(device in state.busy_on for state in self.states.values())

    def _is_claimed(self, devices: Iterable[int]) -> bool:
        return any(not set(state.claims).isdisjoint(devices) for state in self.states.values())

    def _choose_for(self, device: int) -> None:
        """Let the policy choose what this device does next."""
        ready = [state for state in self.states.values() if self._is_ready(state)]
        ready = [state for state in ready if not self._is_claimed(block_of(device, state.task.devices))]
        if not ready:
            return
        moment = self._moment(device, ready)
        chosen = self._choose(moment)
        if chosen is None and not any(self.pending):  # a plan that others than it foresaw have overtaken
            self._choose = self._new_choice()
            chosen = self._choose(moment)
        if chosen is not None:
            state = self.states[chosen.task]
            state.claims = tuple(block_of(device, state.task.devices))

    def _begin_claims(self) -> None:
        """Begin the tasks whose devices are all idle. What is in their way is parked first."""
        for name, state in self.states.items():
            if not state.claims or any(map(self._is_taken, state.claims)):
                continue
            state.busy_on, state.claims = state.claims, ()
            if state.at not in ((), state.busy_on):
                self._journal.write(
                    at_s=self._now_s, decision="move", task=name, step=state.step, devices=state.busy_on
                )
                self._park_for(state, state)
            for other in self.states.values() if len(state.busy_on) > 1 else ():
                is_near = not set(other.at).isdisjoint(state.busy_on)
                if is_near and len(other.at) not in (1, len(state.busy_on)):
                    self._park_for(other, state)
            if not state.awaits:
                self._run(state)

    def _park_for(self, state: TaskState, waits: TaskState) -> None:
        """Save and close a task, for which another (or itself, elsewhere) waits."""
        waits.awaits.add(state.task.name)
        self._ask(state.at, "park", state.task.name)

    def end_hung(self) -> None:
        """End workers that wait for one of their gang that is lost, and do not notice."""
        for device, queue in enumerate(self.pending):
            request = queue[0] if queue else None
            if request is not self._heads[device][0]:
                self._heads[device] = request, self._now_s
            if request is None or request.fault_s is None:
                continue
            if self._now_s - max(request.fault_s, self._heads[device][1]) > HANGS_S:
                request.killed.add(device)
                self._heads[device] = request, self._now_s
                self.send(device, {"do": "kill"})

    def _run(self, state: TaskState) -> None:
        group = self._group(state)
        for left, (each, to) in zip(reversed(range(len(group))), group, strict=True):
            each.busy_on, name = state.busy_on, each.task.name
            self._journal.write(
                at_s=self._now_s, decision="run", task=name, step=each.step, to=to, devices=each.busy_on
            )
            each.meetings += not each.at
            place = {"world_size": len(each.busy_on), "port": self.port, "name": f"{name}/{each.meetings}"}
            more: dict[str, Any] = {"abreast": left} if each is state and left else {}
            each.reach = to
            if len(group) == len(each.busy_on) == 1:
                each.reach = more["on"] = self._goes_on_to(each, to)
            self._ask(
                each.busy_on, "run", name, to=to, evaluates=self._evaluates(each, to), place=place, **more
            )

    def _group(self, state: TaskState) -> list[tuple[TaskState, int]]:
        """What a device does at once, the task that was chosen first: each with the step to come to."""
        if (most := self._most_abreast(state)) > 1:
            to = self._step_after(state, self._quantum_s() / most)
            return [(each, to) for each in (state, *self._abreast(state, to)[: most - 1])]
        if (other := self._beside(state)) is None:
            return [(state, self._step_after(state, self._quantum_s()))]
        long_s = max(self._quantum_s() / 2, *(each.step_s or 0.0 for each in (state, other)))
        return [(each, self._step_after(each, long_s)) for each in (state, other)]

    def _quantum_s(self) -> float:
        return min(QUANTUM_S, self._bound_s() / LAST_QUANTA)

    def _goes_on_to(self, state: TaskState, to: int) -> int:
        """The step to which a worker may go on after step `to`, until it is asked again."""
        if self.on_report is not None or state.deaths or state.step_s is None or state.step_s > QUANTUM_S:
            return to
        return max(to, min(self._next_goal(state) - 1, 2 * to - state.step))

    def _step_after(self, state: TaskState, long_s: float) -> int:
        """The step to which a task comes in so long: at least the next one, at most its goal."""
        steps = 1 if state.step_s is None else max(1, round(long_s / max(state.step_s, 1e-6)))
        return min(self._next_goal(state), state.step + steps)

    def _beside(self, state: TaskState) -> TaskState | None:
        """The task that takes turns with this one, stage by stage. One whose process has died runs by itself."""
        job = self._job(state)
        is_critical = job.alone_s >= self._bound_s() - job.step_s
        if self.quantum == "step" or not state.has_stages or state.deaths or is_critical:
            return None
        ready = [s for s in self.states.values() if self._is_ready(s)]
        idle = sum(not self._is_taken(device) for device in range(self.devices))
        able = [s for s in ready if s.has_stages and not s.deaths and s.at in ((), state.busy_on)]
        if not able or len(ready) <= idle:
            return None
        chosen = self._choose(self._moment(state.busy_on[0], able))
        return None if chosen is None else self.states[chosen.task]

    def _bound_s(self) -> float:
        """The least time of all that is left."""
        jobs = [self._job(state) for state in self.states.values() if state.status == "open"]
        return spread_s([(job.alone_s, job.devices) for job in jobs], self.devices)

    def _evaluates(self, state: TaskState, to: int) -> bool:
        rung = self._rung_after(state) if state.ends_at is None else state.ends_at
        held_out = self.stop is not None and self.stop.metric == "held_out" and to == rung
        return state.task.evaluate is not None and (to == state.task.steps or held_out)

    def _most_abreast(self, state: TaskState) -> int:
        """A device's share of the open tasks over one base. One whose process has died runs by itself."""
        if state.base is None or state.deaths or len(state.busy_on) > 1:
            return 1
        racing = [s for s in self.states.values() if s.base == state.base and s.status == "open"]
        return -(-len(racing) // self.devices)

    def _abreast(self, state: TaskState, to: int) -> list[TaskState]:
        """Tasks that can make the same steps beside this one, on its device: those that are open there first."""
        found = [
            s for s in self.states.values()
            if s is not state and s.base == state.base and self._is_ready(s) and self._most_abreast(s) > 1
            and s.task.devices == 1 and s.at in ((), state.busy_on)
            and s.step == state.step and to <= self._next_goal(s)
        ]  # fmt: skip
        return sorted(found, key=lambda s: not s.at)

    def _ask(self, devices: Block, kind: Literal["run", "park", "drop"], task: str, **more: Any) -> None:
        request = Request(task, kind, devices)
        for rank, device in enumerate(devices):
            self.pending[device].append(request)
            own = {"place": {**more["place"], "rank": rank}} if "place" in more else {}
            self.send(device, {"do": kind, "task": task, **more, **own})

    def _is_ready(self, state: TaskState) -> bool:
        if state.status != "open" or state.busy_on or state.claims:
            return False
        return not (state.step == self._rung_after(state) and self._metric(state, state.step) is not None)

    def _rung_after(self, state: TaskState) -> int | None:
        """The first rung that holds this task up."""
        rungs = self.stop.rungs if self.stop and state.ends_at is None else ()
        name, most = state.task.name, state.task.steps
        ahead = (r for r in rungs if state.step <= r < most)
        return next((r for r in ahead if name not in self._decided.get(r, ())), None)

    def _next_goal(self, state: TaskState) -> int:
        rung = self._rung_after(state) if state.ends_at is None else state.ends_at
        return state.task.steps if rung is None else rung

    def _moment(self, device: int, ready: Sequence[TaskState]) -> Moment:
        candidates = []
        for state in ready:
            job, block = self._job(state), tuple(block_of(device, state.task.devices))
            moves = state.at not in ((), block)
            candidates.append(
                Candidate(
                    job.task,
                    state.order,
                    max(job.left, 1),
                    job.step_s,
                    job.alone_s,
                    self._save_s + self._open_s if moves else 0.0,
                    self._last[device] == job.task,
                )  # fmt: skip
            )
        return Moment(device, self._now_s, 0.0, self._bound_s(), candidates)

    def _job(self, state: TaskState) -> Job:
        known = [s.step_s for s in self.states.values() if s.step_s is not None]
        guess_s = sum(known) / len(known) if known else 1.0
        step_s = guess_s if state.step_s is None else state.step_s
        return Job(state.task.name, state.task.steps - state.step, step_s, devices=state.task.devices)

    def _new_choice(self) -> Choose:
        jobs = [self._job(state) for state in self.states.values() if state.status == "open"]
        return POLICIES[self.policy](jobs, self.devices, self.seed)

    # ---- answers ----

    def hear(self, device: int, answer: Message) -> None:
        """Take what a worker has said."""
        if (over := answer.pop("over", None)) is not None:
            self._went_on(device, **over)
        if answer["said"] == "died":
            self._died(device, answer)
        elif answer["said"] != "ended":
            request = self.pending[device].pop(0)
            assert answer["task"] == request.task, "answers come in the order of requests"
            self._take(request, device, answer)
        self._decide_rungs()

    def _went_on(
        self, device: int, task: str, step: int, loss: float | None, run_s: float, ago_s: float
    ) -> None:
        """What a task has done after its answer."""
        state = self.states[task]
        self._span(device, "RUN", state, self._now_s - ago_s - run_s, run_s)
        state.busy_s += run_s
        if state.status == "open" and device in state.at:
            state.step, state.loss = step, state.loss if loss is None else loss

    def _take(self, request: Request, device: int, answer: Message) -> None:
        """Note an answer; act when it is whole."""
        request.answers[device] = answer
        if answer["said"] in ("died", "failed", "full") and request.fault_s is None:
            request.fault_s = self._now_s
        if len(request.answers) < len(request.devices):
            return
        state = self.states[request.task]
        if request.kind == "park":
            self._parked(request, state)
        elif request.kind == "run" and state.status == "open":
            self._answered(request, state)

    def _answered(self, request: Request, state: TaskState) -> None:
        """What has come of a run."""
        died, full, failed = (request.said(word) for word in ("died", "full", "failed"))
        if not (died or full or failed):
            self._ran(request, state)
            return
        self._forget(state, request.devices)
        fell = [
            d for d, answer in request.answers.items() if answer["said"] == "died" and d not in request.killed
        ]
        if fell or (died and not failed and not full):
            self._lost(state, request.devices, died[0]["how"])
        elif failed and not full:
            self._leave(state, "failed", failed[0]["cause"])
        elif others := [s for s in self.states.values() if not set(s.at).isdisjoint(request.devices)]:
            state.has_stages = False
            for other in others:
                self._park_for(other, state)
        else:
            self._leave(state, "failed", full[0]["cause"])

    def _parked(self, request: Request, state: TaskState) -> None:
        """A task is closed: those that wait for this begin."""
        for device, answer in request.answers.items():
            if answer["said"] == "parked":
                self._span(device, "EVICT", state, self._now_s - answer["end_s"], answer["end_s"])
                self._save_s = max(answer["end_s"], 1e-3)
        failed = request.said("failed", "full")
        self._forget(state, request.devices if failed else ())
        if failed and not request.said("died"):
            self._leave(state, "failed", failed[0]["cause"])
        for other in self.states.values():
            if state.task.name in other.awaits:
                other.awaits.discard(state.task.name)
                if not other.awaits and other.status == "open":
                    self._run(other)

    def _forget(self, state: TaskState, devices: Block) -> None:
        """A task is open no more: it stands at its checkpoint. What workers of `devices` hold of it is dropped."""
        state.at, state.step = (), saved_step(self.directory, state.task.name)
        for device in devices:
            self._ask((device,), "drop", state.task.name)

    def _ran(self, request: Request, state: TaskState) -> None:
        answers = list(request.answers.values())
        answer = answers[0]
        run_s, open_s, end_s = min(a["run_s"] for a in answers), answer["open_s"], answer["end_s"]
        steps, now_s = answer["step"] - answer["before"], self._now_s - answer.get("later_s", 0.0)
        begin_s = now_s - end_s - run_s
        for device in request.devices:
            if open_s > 1e-3:
                self._span(device, "FETCH", state, begin_s - open_s, open_s)
                self._open_s = open_s
            self._span(device, "RUN", state, begin_s, run_s + end_s)
            self._last[device] = state.task.name
        if steps > 0:
            state.step_s = run_s / steps
        if answer["step"] > state.fell_at:
            state.deaths = 0
        state.busy_s += run_s
        state.step, state.busy_on = answer["step"], ()
        state.at = request.devices
        state.loss = state.loss if answer["loss"] is None else answer["loss"]
        state.held_out = state.held_out if answer["held_out"] is None else answer["held_out"]
        if answer["done"]:
            self._leave(state, "done", "")
        if state.ends_at == state.step:
            self._leave(state, "stopped", state.cause)
        elif self.on_report is not None and not self.fault:
            self._report(self.on_report, state)

    def _report(self, on_report: OnReport, state: TaskState) -> None:
        """Call the user's function. If it fails, the run ends."""
        metrics = {"loss": state.loss, "held_out": state.held_out}
        where = f"on_report of task {state.task.name!r} at step {state.step}"
        try:
            word = on_report(state.task.name, state.step, metrics)
        except (Exception, SystemExit) as error:
            self.fault, self.fault_from = f"{where} raised {type(error).__name__}: {error}", error
            return
        if word not in (None, "go", "stop"):
            self.fault = f"{where} returned {word!r}; legal: 'go', 'stop' or None"
        elif word == "stop" and state.status == "open":
            self._leave(state, "stopped", f"on_report said stop at step {state.step}")

    def _leave(self, state: TaskState, status: Status, cause: str) -> None:
        """A task is over. What is open of it is saved."""
        self._journal.write(
            at_s=self._now_s, decision=status, task=state.task.name, step=state.step,
            devices=state.at or state.busy_on, cause=cause,
            held_out=state.held_out,
        )  # fmt: skip
        state.status, state.cause, state.busy_on, state.claims = status, cause, (), ()
        if state.at and status == "stopped":
            self._ask(state.at, "park", state.task.name)
        state.at = ()
        if any(each.status == "open" for each in self.states.values()):
            self._choose = self._new_choice()

    def _died(self, device: int, answer: Message) -> None:
        """A worker is lost, and with it what its tasks have done since their checkpoints."""
        lost, self.pending[device] = self.pending[device], []
        for name, state in self.states.items():
            if device in state.at:
                went_on = not lost and self._last[device] == name and state.reach > state.step
                self._forget(state, tuple(other for other in state.at if other != device))
                if went_on:
                    self._lost(state, (device,), answer["how"])
        for request in lost:
            self._take(request, device, answer)

    def _lost(self, state: TaskState, devices: Block, how: str) -> None:
        """A worker died while it trained this task."""
        state.deaths, state.busy_on, state.fell_at = state.deaths + 1, (), max(state.fell_at, state.reach)
        self._journal.write(
            at_s=self._now_s, decision="died", task=state.task.name, step=state.step, devices=devices, cause=how
        )  # fmt: skip
        if state.deaths >= MOST_DEATHS:
            cause = f"its process died {state.deaths} times after step {state.step}, the last time by {how}"
            self._leave(state, "failed", cause)

    # ---- rungs ----

    def _metric(self, state: TaskState, step: int) -> float | None:
        """The metric of a task at a rung; None if it has none yet."""
        assert self.stop is not None
        return metric_of(self.directory, state.task.name, step, self.stop.metric)

    def _decide_rungs(self) -> None:
        """Stop the worse tasks at each rung that all others have come to."""
        self._judge_late()
        for rung in self.stop.rungs if self.stop else ():
            racing = [s for s in self.states.values() if s.status == "open" and s.task.steps > rung]
            if rung in self._decided or not racing:
                continue
            if any(s.step < rung or s.busy_on or s.claims for s in racing):
                return
            metrics = {s.task.name: self._metric(s, rung) for s in racing}
            if any(metric is None for metric in metrics.values()):
                return
            self._stop_at(rung, {name: metric for name, metric in metrics.items() if metric is not None})

    def _judge_late(self) -> None:
        """Compare tasks that come to a rung after its decision, as they had failed before, with all that were there."""
        for state in self.states.values():
            rung = self._rung_after(state)
            is_late = state.status == "open" and rung in self._decided and state.step == rung
            if rung is None or not is_late or state.busy_on or state.claims:
                continue
            if (metric := self._metric(state, rung)) is not None:
                self._stop_at(rung, {state.task.name: metric})

    def _stop_at(self, rung: int, metrics: Mapping[str, float]) -> None:
        """Stop the worse ones of these tasks, beside those that were compared at the rung before."""
        assert self.stop is not None
        known = self._decided.setdefault(rung, {})
        known |= metrics
        best = self.stop.kept(known)
        kept, cause = [name for name in best if name in metrics], _fell(rung, known, best)
        self._journal.write(
            at_s=self._now_s, decision="rung", task=None, rung=rung, metrics=dict(metrics), kept=kept, cause=cause,
            metric=self.stop.metric, keep=float(self.stop.keep),
        )  # fmt: skip
        for name in metrics:
            if name not in kept:
                self._leave(self.states[name], "stopped", cause)

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
        return [
            Job(name, max(steps, 0), state.busy_s / max(steps, 1), devices=state.task.devices)
            for name, steps, state in made
        ]

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


def has_stages(task: Task, shared: Mapping[str, Any]) -> bool:
    """Whether a task of one device has stages, or may get some under its budget, and no base in common with others."""
    if task.devices > 1 or base_of(task, shared) is not None:
        return False
    config = Config.load(task.settings(shared))
    return config.parallel.pipeline.is_staged or config.memory.device_budget is not None


def _fell(rung: int, metrics: Mapping[str, float], kept: Sequence[str]) -> str:
    return f"not among the best {len(kept)} of {len(metrics)} at step {rung}"
