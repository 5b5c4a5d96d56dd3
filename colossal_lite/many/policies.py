"""Chooses which job an idle device takes next: all policies, in one table.

Note: sources.
`lrtf` is Sharded-LRTF of Hydra (arXiv 2110.08633): the longest remaining time first.  `mcnaughton` is McNaughton's
wrap-around rule (1959). It is optimal for jobs that may be interrupted, with at most D - 1 moves.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from colossal_lite.many.jobs import Job, block_of, spread_s

PolicyName = Literal["fifo", "random", "sjf", "lrtf", "lrtf_affinity", "mcnaughton", "link"]
AFFINITY = 1.1
"""How much more the job counts that a device holds already."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A job that a device may take now."""

    task: str
    order: int
    """Its place in the list of jobs."""
    left: int
    """Steps still to make, the open one included."""
    step_s: float
    remaining_s: float
    """As `Job.alone_s`, less the parts of the open step that are done."""
    load_s: float
    """Of its next part; 0 if the device holds that already."""
    is_here: bool
    """Whether this device computed it last."""


@dataclass(frozen=True, slots=True)
class Moment:
    """What a policy sees when a device asks."""

    device: int
    clock_s: float
    hides_s: float
    """How long the device still computes, beside which a load hides."""
    bound_s: float
    """The lower bound of all that is left, on all devices."""
    candidates: Sequence[Candidate]
    """At least one."""


Choose = Callable[[Moment], Candidate | None]
"""None: the device waits until another job is free."""
Policy = Callable[[Sequence[Job], int, int], Choose]
"""Makes a choice function for these jobs, so many devices and a seed."""


def fifo(jobs: Sequence[Job], devices: int, seed: int) -> Choose:
    """The first of the list."""
    return lambda moment: min(moment.candidates, key=lambda c: c.order)


def drawn(jobs: Sequence[Job], devices: int, seed: int) -> Choose:
    """Any, by a seeded draw."""
    draw = random.Random(seed)
    return lambda moment: draw.choice(sorted(moment.candidates, key=lambda c: c.order))


def sjf(jobs: Sequence[Job], devices: int, seed: int) -> Choose:
    """The shortest remaining time."""
    return lambda moment: min(moment.candidates, key=lambda c: (c.remaining_s, c.order))


def lrtf(jobs: Sequence[Job], devices: int, seed: int) -> Choose:
    """The longest remaining time; of equals the one that is here."""
    return lambda moment: _longest(moment.candidates)


def lrtf_affinity(jobs: Sequence[Job], devices: int, seed: int) -> Choose:
    """As lrtf; the job that is here counts for a tenth more, so there are fewer switches."""

    def worth(c: Candidate) -> tuple[float, int]:
        return c.remaining_s * (AFFINITY if c.is_here else 1.0), -c.order

    return lambda moment: max(moment.candidates, key=worth)


def link(jobs: Sequence[Job], devices: int, seed: int) -> Choose:
    """A job that the bound waits for, if there is one: the longest, less what its load costs here. Else the one whose
    load hides best.

    Of equals: the heaviest load that hides, then the job that is here, then the longest."""

    def choose(moment: Moment) -> Candidate:
        def exposed_s(c: Candidate) -> float:
            return max(0.0, c.load_s - moment.hides_s)

        critical = [c for c in moment.candidates if c.remaining_s >= moment.bound_s - c.step_s]
        if critical:
            return max(critical, key=lambda c: (c.remaining_s - exposed_s(c), c.is_here, -c.order))

        def worth(c: Candidate) -> tuple[float, float, bool, float, int]:
            return -exposed_s(c), c.load_s, c.is_here, c.remaining_s, -c.order

        return max(moment.candidates, key=worth)

    return choose


def mcnaughton(jobs: Sequence[Job], devices: int, seed: int) -> Choose:
    """Each device takes the first of its list in `wrap_around` that is free."""
    lists = wrap_around(jobs, devices)

    def choose(moment: Moment) -> Candidate | None:
        free = {c.task: c for c in moment.candidates}
        mine = (
            free[task] for task, after in lists[moment.device] if task in free and free[task].left > after
        )
        return next(mine, None)

    return choose


def wrap_around(jobs: Sequence[Job], devices: int) -> Sequence[Sequence[tuple[str, int]]]:
    """For each device its jobs in order, each with the steps that are left when it leaves the device.

    The jobs are laid one behind another and cut at every bound; at most devices - 1 are cut.  The largest gangs are
    laid first, each on the blocks of its size."""
    bound_s = spread_s([(job.alone_s, job.devices) for job in jobs], devices)
    lists: list[list[tuple[str, int]]] = [[] for _ in range(devices)]
    filled_s, device = [0.0] * devices, 0
    for job in sorted(jobs, key=lambda job: -job.devices):
        left, one_s = job.left, job.alone_s / max(job.left, 1)
        while left:
            block = block_of(device, job.devices)
            begin_s = max(filled_s[each] for each in block)
            fits = left
            if block.stop < devices and one_s:
                fits = min(left, max(0, round((bound_s - begin_s) / one_s)))
            for each in block if fits else ():
                # a job that is cut has its last steps at the end of a device, and its first on the next
                lists[each].append((job.task, job.left - left))
                filled_s[each] = begin_s + fits * one_s
            left -= fits
            device = block.stop if left else device
    return lists


def _longest(candidates: Sequence[Candidate]) -> Candidate:
    return max(candidates, key=lambda c: (c.remaining_s, c.is_here, -c.order))


POLICIES: Mapping[PolicyName, Policy] = {
    "fifo": fifo,
    "random": drawn,
    "sjf": sjf,
    "lrtf": lrtf,
    "lrtf_affinity": lrtf_affinity,
    "mcnaughton": mcnaughton,
    "link": link,
}
