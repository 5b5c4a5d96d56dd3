"""Describes a training as a scheduler sees it: steps left, their costs, and the bounds on the time of many.

Note: two kinds of jobs.
A job of one part fits its device whole.  Its state is loaded when it comes to a device, and stays while there is room.
A job of several parts is larger than its device.  Each part of a step (a stage's forward or backward) is first loaded
into one of two slots.  The last part of a step leaves the first of the next step in its slot.
A job of several devices is a gang. It takes a block: that many devices in line, from a multiple of their number.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Job:
    """One training, from where it stands. Times are in seconds, sizes in bytes."""

    task: str
    left: int
    """Optimizer steps still to make."""
    step_s: float
    """Compute of one step."""
    load_s: float = 0.0
    """Copies to the device: of the whole state for one part, of all parts of a step for several."""
    device_bytes: int = 0
    """What it takes of its device; for several parts, both slots."""
    host_bytes: int = 0
    parts: int = 1
    """Visits of a step, each with its load. See the note of this file."""
    devices: int = 1
    """What computes a step, all at once."""

    def __post_init__(self) -> None:
        faults = [
            f"{name}={value}: must not be negative"
            for name, value in vars(self).items()
            if name not in ("task", "parts", "devices") and not value >= 0
        ]
        if self.parts < 1:
            faults.append(f"parts={self.parts}: a step has at least one part")
        if self.devices < 1:
            faults.append(f"devices={self.devices}: a job takes at least one")
        if faults:
            raise ValueError(f"job {self.task!r}: {'; '.join(faults)}")

    @property
    def units(self) -> int:
        """Parts still to compute."""
        return self.left * self.parts

    @property
    def unit_s(self) -> float:
        """Compute of one part."""
        return self.step_s / self.parts

    @property
    def unit_load_s(self) -> float:
        """The load before one part."""
        return self.load_s / self.parts

    @property
    def link_s(self) -> float:
        """Loads of one step that no order can avoid."""
        return self.unit_load_s * (self.parts - 1)

    @property
    def alone_s(self) -> float:
        """The least time of all its steps on its devices, when loads hide."""
        return self.left * max(self.step_s, self.link_s)


def lower_bound_s(jobs: Sequence[Job], devices: int) -> float:
    """No timetable is shorter: the longest job, or the compute or the loads of all jobs spread over the devices."""
    compute_s = sum(job.left * job.step_s * job.devices for job in jobs)
    link_s = sum(job.left * job.link_s * job.devices for job in jobs)
    return max([*(job.alone_s for job in jobs), compute_s / devices, link_s / devices], default=0.0)


def block_of(device: int, size: int) -> range:
    """The devices of a gang of so many that has this one."""
    first = device // size * size
    return range(first, first + size)


def spread_s(lefts: Iterable[tuple[float, int]], devices: int) -> float:
    """The bound of times that are left, each on so many of the devices."""
    rows = list(lefts)
    return max(*(left_s for left_s, _ in rows), sum(left_s * size for left_s, size in rows) / devices, 0.0)


def gang_fault(size: int, devices: int) -> str:
    """Why so many devices are no gang in this world; "" if they are one."""
    legal = [n for n in range(1, devices + 1) if devices % n == 0]
    if type(size) is int and size in legal:
        return ""
    return f"devices={size!r} in a world of {devices}; legal: {', '.join(map(str, legal))}"
