"""Lists what each device loads and computes for many jobs, and checks and times such lists.

Note: the language.
`FETCH a#3.0` loads part 0 of step 3 of task a, as 3 steps left it.  `RUN a#3.0` computes it.  `EVICT a#4`
writes a job of one part back, after 4 steps, and frees its place.  Jobs of several parts write back as they compute.
A device runs its list in order: a FETCH waits for the RUN listed before it, and is beside the RUN listed after it.
Across devices an action waits for what it needs: the part before it, and the write that it reads.
An action of a gang stands in the lists of all devices of its block, which do it at once.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from colossal_lite.many.jobs import Job, block_of, gang_fault, lower_bound_s

Kind = Literal["FETCH", "RUN", "EVICT"]


class TimetableError(ValueError):
    """A timetable that cannot run, or that would compute with wrong numbers."""


class Action(NamedTuple):
    """One thing that a device does."""

    kind: Kind
    task: str
    step: int
    part: int = 0

    def __str__(self) -> str:
        part = "" if self.kind == "EVICT" else f".{self.part}"
        return f"{self.kind} {self.task}#{self.step}{part}"


@dataclass(frozen=True)
class Timetable:
    """What each device does, in order. `str` prints it, a line a device."""

    jobs: tuple[Job, ...]
    devices: tuple[tuple[Action, ...], ...]
    memory_bytes: int | None = None
    """Of each device; None: enough."""

    def __str__(self) -> str:
        return "\n".join(f"device {d}: {' '.join(map(str, row))}" for d, row in enumerate(self.devices))


class Span(NamedTuple):
    """An action, where it ran and when."""

    device: int
    action: Action
    start_s: float
    end_s: float


@dataclass(frozen=True)
class Simulation:
    """When each action of a timetable runs."""

    spans: tuple[Span, ...]
    makespan_s: float
    bound_s: float
    moves: int
    """How often a task goes on, on another device than before."""
    switches: int
    """How often a device goes on with another task."""
    busy_s: tuple[float, ...]
    """Compute of each device."""

    @property
    def over_bound(self) -> float:
        """1.0 is the best there is."""
        return self.makespan_s / self.bound_s if self.bound_s else 1.0


def check(timetable: Timetable) -> None:
    """Raise TimetableError unless every step runs once, in order, and within the memory of its device. A step needs the
    numbers of the step before."""
    for _ in walk(timetable):
        pass


def simulate(timetable: Timetable) -> Simulation:
    """Check a timetable and time it: one compute lane and one link lane each way on every device."""
    clock = Clock(timetable.jobs, len(timetable.devices))
    spans = [span for block, action in walk(timetable) for span in clock.play(block, action)]
    return summary(spans, timetable.jobs, len(timetable.devices))


def summary(spans: Sequence[Span], jobs: Sequence[Job], devices: int) -> Simulation:
    """Count what a run of these jobs did; spans in the order in which each device ran them."""
    runs = [span for span in spans if span.action.kind == "RUN"]
    sizes = {job.task: job.devices for job in jobs}
    at: dict[str, int] = {}
    on: dict[int, str] = {}
    moves = switches = 0
    busy_s = [0.0] * devices
    for device, (_, task, _, _), start_s, end_s in runs:
        block = device // sizes[task]
        moves += at.get(task, block) != block
        switches += on.get(device, task) != task
        at[task], on[device] = block, task
        busy_s[device] += end_s - start_s
    makespan_s = max((span.end_s for span in spans), default=0.0)
    return Simulation(tuple(spans), makespan_s, lower_bound_s(jobs, devices), moves, switches, tuple(busy_s))


class Clock:
    """When actions run, if played in an order that `walk` allows."""

    def __init__(self, jobs: Sequence[Job], devices: int) -> None:
        self.jobs = {job.task: job for job in jobs}
        self.run_end_s = [0.0] * devices
        self.ready_s = dict.fromkeys(self.jobs, 0.0)
        """When the last part of each task was done."""
        self._up_s, self._down_s = [0.0] * devices, [0.0] * devices
        self._written_s = dict.fromkeys(self.jobs, 0.0)
        self._fetched_s: dict[tuple[int, str, int], float] = {}

    def start_s(self, block: Sequence[int], task: str, part: int) -> float:
        """When the devices could begin this part."""
        fetched_s = max(self._fetched_s.get((device, task, part), 0.0) for device in block)
        return max(*(self.run_end_s[device] for device in block), fetched_s, self.ready_s[task])

    def play(self, block: Sequence[int], action: Action) -> list[Span]:
        """Time an action that these devices do at once."""
        kind, task, step, part = action
        job = self.jobs[task]
        if kind == "FETCH":
            free_s = max(max(self._up_s[device], self.run_end_s[device]) for device in block)
            start_s = max(free_s, self._written_s[task])
            end_s = start_s + job.unit_load_s
            for device in block:
                self._up_s[device] = self._fetched_s[device, task, part] = end_s
        elif kind == "RUN":
            start_s = self.start_s(block, task, part)
            end_s = self.ready_s[task] = start_s + job.unit_s
            for device in block:
                self.run_end_s[device] = end_s
            if job.parts > 1 and part == job.parts - 1:
                self._written_s[task] = end_s
        else:
            start_s = max(*(self._down_s[device] for device in block), self.ready_s[task])
            end_s = self._written_s[task] = start_s + job.load_s
            for device in block:
                self._down_s[device] = end_s
        return [Span(device, action, start_s, end_s) for device in block]


# ------------------------------------------------------------------------------------------------- the checker


@dataclass
class Standing:
    """Where a task stands while a timetable is read."""

    job: Job
    done: int = 0
    """Parts computed so far."""
    written: int = 0
    """Steps that the copy on the host has seen."""
    holder: int | None = None
    """The first device that holds a job of one part."""


@dataclass
class Held:
    """What a device holds while its list is read: the step of each whole task, and two slots of parts."""

    whole: dict[str, int] = field(default_factory=dict)
    slots: list[tuple[str, int, int]] = field(default_factory=list)
    kept: set[tuple[str, int, int]] = field(default_factory=set)
    """Slots of first parts that the steps before have left. They give way to a FETCH, but the next to run."""


def walk(timetable: Timetable) -> Iterator[tuple[Sequence[int], Action]]:
    """The actions, each with its devices, in an order in which each finds what it needs. Raises TimetableError where
    there is none."""
    reader = _Reader(timetable)
    at = reader.at
    waits: dict[int, str] = {}
    moved = True
    while moved:
        moved = False
        for device, row in enumerate(timetable.devices):
            while at[device] < len(row):
                action = row[at[device]]
                block = reader.block(device, action)
                if why := reader.waits(device, block, action):
                    waits[device] = f"device {device}: {action} waits: {why}"
                    break
                reader.take(block, action)
                for each in block:
                    at[each] += 1
                moved = True
                yield block, action
    stuck = [waits[d] for d, row in enumerate(timetable.devices) if at[d] < len(row)]
    if faults := stuck or reader.missing():
        raise TimetableError("\n".join(faults))


class _Reader:
    """Applies the rules: `waits` says why an action cannot run yet, and raises where it never can."""

    def __init__(self, timetable: Timetable) -> None:
        names = [job.task for job in timetable.jobs]
        if twice := {name for name in names if names.count(name) > 1}:
            raise TimetableError(f"jobs of one name: {', '.join(sorted(twice))}")
        self.tasks = {job.task: Standing(job) for job in timetable.jobs}
        self.held = [Held() for _ in timetable.devices]
        self.memory_bytes = timetable.memory_bytes
        self.rows, self.at = timetable.devices, [0] * len(timetable.devices)
        """Lists of the devices, and how many actions of each have run."""

    def block(self, device: int, action: Action) -> Sequence[int]:
        """The devices that do an action at once. Raises TimetableError for what these devices cannot do."""
        if action.task not in self.tasks:
            raise TimetableError(f"device {device}: {action}: there is no such task")
        size = self.tasks[action.task].job.devices
        if fault := gang_fault(size, len(self.rows)):
            raise TimetableError(f"device {device}: {action}: {fault}")
        return block_of(device, size)

    def waits(self, device: int, block: Sequence[int], action: Action) -> str:
        """What `device` waits for, before all of its block do this action."""
        standing = self.tasks[action.task]
        rule = {"FETCH": self._fetch, "RUN": self._run, "EVICT": self._evict}[action.kind]
        if why := rule(device, action, standing):
            return why
        others = [each for each in block if each != device]
        if late := [each for each in others if self._next(each) != action]:
            return f"device {late[0]} of its gang is not there"
        return next(filter(None, (rule(each, action, standing) for each in others)), "")

    def _next(self, device: int) -> Action | None:
        row, at = self.rows[device], self.at[device]
        return row[at] if at < len(row) else None

    def _fetch(self, device: int, action: Action, standing: Standing) -> str:
        _, task, step, part = action
        job, held = standing.job, self.held[device]
        if standing.written > step or standing.done > step * job.parts + part:
            raise TimetableError(
                f"device {device}: {action} is stale: {task} has made {standing.done // job.parts} steps by then"
            )
        if not 0 <= part < job.parts:
            raise TimetableError(f"device {device}: {action}: a step of {task} has {job.parts} parts")
        slots = self._needed(device, (task, step, part))
        if task in held.whole or (task, step, part) in slots:
            raise TimetableError(f"device {device}: {action}: the device holds it already")
        if job.parts > 1 and len(slots) == 2:
            raise TimetableError(f"device {device}: {action}: both slots are taken")
        if standing.holder is not None:
            return f"device {standing.holder} holds {task}, and a task is on one device at a time"
        if standing.written < step:
            return f"nobody has written {task} after {step} steps"
        self._check_room(device, action, job, slots)
        return ""

    def _needed(self, device: int, fetched: tuple[str, int, int]) -> list[tuple[str, int, int]]:
        """The slots that a FETCH does not overwrite."""
        held = self.held[device]
        row, at = self.rows[device], self.at[device]
        runs = (tuple(action[1:]) for action in itertools.islice(row, at, None) if action.kind == "RUN")
        upcoming = next(runs, None)
        dropped = {slot for slot in held.kept if slot != upcoming or slot == fetched}
        return [slot for slot in held.slots if slot not in dropped]

    def _check_room(self, device: int, action: Action, job: Job, slots: list[tuple[str, int, int]]) -> None:
        held = self.held[device]
        parts = [self.tasks[task].job for task, _, _ in slots] + ([job] if job.parts > 1 else [])
        needed = sum(self.tasks[task].job.device_bytes for task in held.whole)
        needed += job.device_bytes if job.parts == 1 else 0
        needed += max((part.device_bytes for part in parts), default=0)
        if self.memory_bytes is not None and needed > self.memory_bytes:
            raise TimetableError(
                f"device {device}: {action} needs {needed:,} bytes of the device, which has {self.memory_bytes:,}"
            )

    def _run(self, device: int, action: Action, standing: Standing) -> str:
        _, task, step, part = action
        job, held, unit = standing.job, self.held[device], action.step * standing.job.parts + action.part
        if not (0 <= part < job.parts and 0 <= step < job.left):
            raise TimetableError(
                f"device {device}: {action}: {task} has {job.left} steps of {job.parts} parts"
            )
        if unit < standing.done:
            raise TimetableError(f"device {device}: {action} is repeated")
        if unit > standing.done:
            return f"{task} has made {standing.done} parts, and this is part {unit}"
        if job.parts == 1 and held.whole.get(task) != step:
            raise TimetableError(f"device {device}: {action}: {_holds(task, held.whole.get(task))}")
        if job.parts > 1 and (task, step, part) not in held.slots:
            raise TimetableError(f"device {device}: {action}: the device has not fetched it")
        return ""

    def _evict(self, device: int, action: Action, standing: Standing) -> str:
        if standing.job.parts > 1:
            raise TimetableError(f"device {device}: {action}: parts are written back as they are computed")
        if (found := self.held[device].whole.get(action.task)) != action.step:
            raise TimetableError(f"device {device}: {action}: {_holds(action.task, found)}")
        return ""

    def take(self, block: Sequence[int], action: Action) -> None:
        """Note that these devices have done an action."""
        kind, task, step, part = action
        standing = self.tasks[task]
        is_last = part == standing.job.parts - 1
        for device in block:
            self._hold(device, action, standing.job, is_last)
        if kind == "RUN":
            standing.done += 1
            standing.written = step + 1 if is_last and part else standing.written
        elif kind == "EVICT":
            standing.written, standing.holder = step, None
        elif standing.job.parts == 1:
            standing.holder = block[0]

    def _hold(self, device: int, action: Action, job: Job, is_last: bool) -> None:
        """Note what a device has after an action."""
        kind, task, step, part = action
        held = self.held[device]
        if kind == "FETCH":
            held.slots = self._needed(device, (task, step, part))
            held.kept.intersection_update(held.slots)
            if job.parts == 1:
                held.whole[task] = step
            else:
                held.slots.append((task, step, part))
        elif kind == "EVICT":
            del held.whole[task]
        elif job.parts == 1:
            held.whole[task] = step + 1
        else:
            held.slots.remove((task, step, part))
            held.kept.discard((task, step, part))
            if is_last:
                held.slots.append((task, step + 1, 0))
                held.kept.add((task, step + 1, 0))

    def missing(self) -> list[str]:
        """Steps that no device has run."""
        return [
            f"{task}: {standing.job.units - standing.done} of {standing.job.units} parts are lost"
            for task, standing in self.tasks.items()
            if standing.done != standing.job.units
        ]


def _holds(task: str, step: int | None) -> str:
    return (
        f"the device does not hold {task}" if step is None else f"the device holds {task} after {step} steps"
    )
