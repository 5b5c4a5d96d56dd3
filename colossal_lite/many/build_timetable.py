"""Builds a timetable: asks the policy whenever a device begins a part, so that the next load hides beside it.

Note: gangs.
A policy that chooses a gang claims the block of the device that asks.  The others of it take nothing else, and the gang
begins when all are idle.  A block is claimed whole or not at all.  So its first load has no compute beside it.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import Literal, NamedTuple

from colossal_lite.many.jobs import Job, block_of, gang_fault, spread_s
from colossal_lite.many.policies import POLICIES, Candidate, Choose, Moment, PolicyName
from colossal_lite.many.timetable import Action, Clock, Kind, Timetable

Quantum = Literal["step", "stage"]
"""What a device does of a job before it may take another."""
QUANTA: tuple[Quantum, ...] = ("step", "stage")


def timetable(
    jobs: Sequence[Job], devices: int, policy: PolicyName = "link", *, memory_bytes: int | None = None,
    quantum: Quantum | None = None, seed: int = 0,
) -> Timetable:  # fmt: skip
    """Lists what each device does until all jobs have made their steps.

    `memory_bytes`: of each device.  `quantum`: None: a stage under the policy "link", which hides loads beside other
    jobs, else a step.  Raises ValueError for a job larger than a device, two jobs of one name, or an unknown policy.
    """
    if policy not in POLICIES:
        raise ValueError(f"policy={policy!r}: no such policy; legal: {', '.join(POLICIES)}")
    if devices < 1:
        raise ValueError(f"devices={devices}; legal: 1 or more")
    if len({job.task for job in jobs}) < len(jobs):
        raise ValueError("jobs: two have one name; legal: a name of its own for each")
    for job in jobs:
        if fault := gang_fault(job.devices, devices):
            raise ValueError(f"job {job.task!r}: {fault}")
        if memory_bytes is not None and job.device_bytes > memory_bytes:
            raise ValueError(
                f"job {job.task!r}: it takes {job.device_bytes:,} bytes of a device of {memory_bytes:,}; legal: a "
                f"smaller memory.device_budget of the task, or a larger device"
            )
    builder = _Builder(jobs, devices, POLICIES[policy](jobs, devices, seed), memory_bytes)
    builder.by_step = (quantum or ("stage" if policy == "link" else "step")) == "step"
    builder.run()
    return Timetable(tuple(jobs), tuple(map(tuple, builder.lists)), memory_bytes)


class _Unit(NamedTuple):
    task: str
    step: int
    part: int


class _Builder:
    """Plays the devices along the clock. Each computes one unit (a part of a step), and has reserved the next."""

    def __init__(self, jobs: Sequence[Job], devices: int, choose: Choose, memory_bytes: int | None) -> None:
        self.lists: list[list[Action]] = [[] for _ in range(devices)]
        self.by_step = True
        self._jobs = {job.task: job for job in jobs}
        self._order = {job.task: n for n, job in enumerate(jobs)}
        self._choose, self._memory_bytes = choose, memory_bytes
        self._clock = Clock(jobs, devices)
        self._done = dict.fromkeys(self._jobs, 0)  # parts that have begun
        self._free = {job.task for job in jobs if job.left}
        self._reserved: list[_Unit | None] = [None] * devices
        self._claims: list[str | None] = [None] * devices
        """The gang that waits for each device."""
        self._last: list[str | None] = [None] * devices
        self._kept: list[_Unit | None] = [None] * devices
        """The part that each device has without a load: the last part of a step is the first of the next."""
        self._whole: list[dict[str, None]] = [{} for _ in range(devices)]
        """Jobs of one part that each device holds, the one used last at the end."""
        self._asked = 0
        self._events: list[tuple[float, int, int, _Unit | None]] = []
        for device in range(devices):
            self._at(0.0, device, None)

    def run(self) -> None:
        while self._events:
            at_s, _, device, unit = heapq.heappop(self._events)
            if self._reserved[device] != unit:  # the device was idle then, and has begun a unit since
                continue
            if unit is not None:
                self._advance(unit, self._block(device, unit.task), at_s)
            elif self._claims[device] is not None:
                continue
            elif (task := self._ask(device, at_s, at_s, None)) is None:
                later = [free_s for task in self._free if (free_s := self._clock.ready_s[task]) > at_s]
                if later:
                    self._at(min(later), device, None)
            elif len(block := self._block(device, task)) > 1:
                self._claim(task, block, at_s)
            else:
                self._reserve(block, task, None)
        assert all(self._done[job.task] == job.units for job in self._jobs.values()), "a job starves"

    def _block(self, device: int, task: str) -> Sequence[int]:
        """The devices of a task that this device takes."""
        return block_of(device, self._jobs[task].devices)

    def _at(self, at_s: float, device: int, unit: _Unit | None) -> None:
        """Go on with a device at this time: it begins `unit`, or it is idle and asks."""
        self._asked += 1  # events of one time run in the order of these calls
        heapq.heappush(self._events, (at_s, self._asked, device, unit))

    def _advance(self, unit: _Unit, block: Sequence[int], at_s: float) -> None:
        """Devices begin to compute `unit`: reserve what follows."""
        job, device = self._jobs[unit.task], block[0]
        self._done[unit.task] += 1
        for each in block:
            self._last[each] = unit.task
        end_s = at_s + job.unit_s
        own = unit.task if self._done[unit.task] < job.units else None
        is_within = own is not None and self.by_step and unit.part + 1 < job.parts
        is_claimed = any(self._claims[each] for each in block)
        task = own if is_within else None if is_claimed else self._ask(device, at_s, end_s, own)
        if task is not None and (task == own or len(block) == self._jobs[task].devices == 1):
            self._reserve(block, task, unit)
        else:
            self._run(block, unit)
            for each in block:
                self._reserved[each] = None
                self._at(end_s, each, None)
        if own is not None and task != own:
            self._free.add(own)
            self._wake(end_s)
        if task not in (None, own) and self._jobs[task].devices > 1:
            self._claim(task, self._block(device, task), at_s)
        for claim in filter(None, {self._claims[each] for each in block}):
            self._begin(claim, at_s)

    def _wake(self, at_s: float) -> None:
        """Let idle devices ask."""
        for device in [d for d, reserved in enumerate(self._reserved) if reserved is None]:
            self._at(at_s, device, None)

    def _claim(self, task: str, block: Sequence[int], at_s: float) -> None:
        """Let a gang wait for its devices."""
        self._free.discard(task)
        for device in block:
            self._claims[device] = task
        self._begin(task, at_s)

    def _begin(self, task: str, at_s: float) -> None:
        """Begin a gang, if none of its devices has something else to do before it."""
        block = [device for device, claim in enumerate(self._claims) if claim == task]
        if all(self._reserved[device] is None for device in block):
            for device in block:
                self._claims[device] = None
            self._reserve(block, task, None)
            self._wake(at_s)

    def _ask(self, device: int, at_s: float, end_s: float, own: str | None) -> str | None:
        """The policy's choice among the jobs that are ready when the device is."""
        tasks = [task for task in self._free if self._clock.ready_s[task] <= end_s]
        if any(self._claims):
            tasks = [task for task in tasks if not any(self._claims[d] for d in self._block(device, task))]
        candidates = [self._candidate(device, task, own) for task in (*tasks, *([own] if own else ()))]
        if not candidates:
            return None
        left = [(self._remaining_s(job), job.devices) for job in self._jobs.values()]
        bound_s = spread_s(left, len(self.lists))
        chosen = self._choose(Moment(device, at_s, end_s - at_s, bound_s, candidates))
        return chosen.task if chosen else None

    def _candidate(self, device: int, task: str, own: str | None) -> Candidate:
        job = self._jobs[task]
        parts = job.units - self._done[task]
        is_held = self._is_held(self._block(device, task), task, own)
        return Candidate(
            task, self._order[task], -(-parts // job.parts), job.step_s, self._remaining_s(job),
            0.0 if is_held else job.unit_load_s, self._last[device] == task,
        )  # fmt: skip

    def _is_held(self, block: Sequence[int], task: str, own: str | None) -> bool:
        """Whether the next part of a job needs no load. `own`: the job that the devices compute now."""
        unit = self._next(task)
        kept = all(unit == self._kept[device] for device in block)
        return task in self._whole[block[0]] or kept or task == own and unit.part == 0

    def _next(self, task: str) -> _Unit:
        return _Unit(task, *divmod(self._done[task], self._jobs[task].parts))

    def _remaining_s(self, job: Job) -> float:
        return (job.units - self._done[job.task]) / job.parts * max(job.step_s, job.link_s)

    # ---- the list ----

    def _reserve(self, block: Sequence[int], task: str, beside: _Unit | None) -> None:
        """List the load of a job's next part, and then `beside`, which the devices compute meanwhile."""
        job = self._jobs[task]
        unit = self._next(task)
        self._free.discard(task)
        if not self._is_held(block, task, beside and beside.task):
            for other, theirs in enumerate(self._whole):
                if task in theirs:
                    self._evict(other, task)
            if not all([self._make_room(device, job, beside) for device in block]):
                assert beside is not None, "a job that fits an empty device"
                self._run(block, beside)
                beside = None
                for device in block:
                    self._make_room(device, job, None)
            self._list(block, "FETCH", *unit)
        if job.parts == 1:
            for device in block:
                self._whole[device][task] = self._whole[device].pop(task, None)
        if beside is not None:
            self._run(block, beside)
        for device in block:
            self._reserved[device] = unit
        self._at(self._clock.start_s(block, task, unit.part), block[0], unit)

    def _make_room(self, device: int, job: Job, beside: _Unit | None) -> bool:
        """Evict jobs that were used longest ago, until there is room for this one; False: not beside `beside`."""
        held = self._whole[device]
        others = [task for task in held if beside is None or task != beside.task]
        slots = [each for each in (job, beside and self._jobs[beside.task]) if each and each.parts > 1]
        needed = max((each.device_bytes for each in slots), default=0)
        needed += job.device_bytes if job.parts == 1 else 0
        while self._memory_bytes is not None and self._memory_bytes < needed + sum(
            self._jobs[task].device_bytes for task in held
        ):
            if not others:
                return False
            self._evict(device, others.pop(0))
        return True

    def _evict(self, device: int, task: str) -> None:
        block = self._block(device, task)
        for each in block:
            del self._whole[each][task]
        self._list(block, "EVICT", task, self._done[task], 0)

    def _run(self, block: Sequence[int], unit: _Unit) -> None:
        self._list(block, "RUN", *unit)
        if 0 < unit.part == self._jobs[unit.task].parts - 1:
            for device in block:
                self._kept[device] = _Unit(unit.task, unit.step + 1, 0)

    def _list(self, block: Sequence[int], kind: Kind, task: str, step: int, part: int) -> None:
        action = Action(kind, task, step, part)
        for device in block:
            self.lists[device].append(action)
            self._kept[device] = None if kind == "FETCH" else self._kept[device]
        self._clock.play(block, action)
