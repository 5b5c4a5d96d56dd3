"""Runs `colossal-lite many`: trains the tasks of a sweep file, or prints how each policy would order them."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tyro.conf import Positional

if TYPE_CHECKING:
    from colossal_lite.many.sweep import Sweep


@dataclass(frozen=True)
class ManyCommand:
    """Train many tasks on few devices: `torchrun --nproc-per-node 8 -m colossal_lite many sweep.toml`.

    Each process has one device; without torchrun there is one. Exit code 1 if a task has failed.
    """

    path: Positional[Path]
    """Sweep file (.toml, .json, .py): `build`, `data`, `evaluate` as module:function, `steps`, `global_batch`,
    [config], [[task]], [grid], [stop]; functions are found from the working directory."""
    plan: bool = False
    """Train nothing: print for each policy how long all tasks take, and the bytes of host and device. Times are those
    measured in the directory, or `step_s` of the file."""
    resume: bool = False
    """Go on with what the directory holds, also on another number of devices."""
    devices: int | None = None
    """For --plan: how many devices; left out, the processes of this launch."""

    def run(self) -> int:
        from colossal_lite import launcher
        from colossal_lite.launcher import env
        from colossal_lite.many.sweep import read_sweep

        sys.path.insert(0, str(Path.cwd()))
        sweep = read_sweep(self.path)
        place = env.detect(env.environment())
        if self.plan:
            return _plan(sweep, self.devices or place.world_size)
        if self.devices is not None:
            raise ValueError(
                f"--devices {self.devices} without --plan: a device is a process of the launch; legal: torchrun "
                f"--nproc-per-node {self.devices} -m colossal_lite many {self.path}"
            )
        result = launcher.train_many(
            sweep.tasks, config=sweep.config, directory=sweep.directory, policy=sweep.policy, stop=sweep.stop,
            save_every=sweep.save_every, resume=self.resume, quantum=sweep.quantum,
        )  # fmt: skip
        if place.rank == 0:
            print(f"{result}\n{result.directory / 'report.html'}: losses, and what each device did")
        return int(any(task.status == "failed" for task in result.tasks.values()))


def _plan(sweep: Sweep, devices: int) -> int:
    from colossal_lite.many.build_timetable import timetable
    from colossal_lite.many.jobs import Job, lower_bound_s
    from colossal_lite.many.policies import POLICIES
    from colossal_lite.many.results import measured_step_s
    from colossal_lite.many.task import check
    from colossal_lite.many.timetable import simulate
    from colossal_lite.observe.tables import seconds, table

    check(sweep.tasks, sweep.config, sweep.policy, sweep.stop, sweep.save_every, devices, sweep.quantum)
    step_s = {**sweep.step_s, **measured_step_s(sweep.directory)}
    if unknown := [task.name for task in sweep.tasks if task.name not in step_s]:
        raise ValueError(
            f"--plan: nobody knows how long a step of {', '.join(unknown)} takes; legal: step_s = SECONDS in the file, "
            f"or a first run in {sweep.directory}, which measures it"
        )
    jobs = [Job(task.name, task.steps, step_s[task.name], devices=task.devices) for task in sweep.tasks]
    rows = []
    for policy in POLICIES:
        found = simulate(timetable(jobs, devices, policy))
        mark = "*" if policy == sweep.policy else ""
        rows.append([policy + mark, seconds(found.makespan_s), f"{found.over_bound:.3f}", f"{found.moves:,}"])
    print(
        f"{len(jobs)} tasks on {devices} devices, no task stopped early; bound {seconds(lower_bound_s(jobs, devices))}"
    )
    print(table(["policy", "makespan", "of the bound", "moves"], rows))
    print("\n".join(_bytes(sweep)))
    return 0


def _bytes(sweep: Sweep) -> list[str]:
    """What the tasks take of the host and of a device, in words."""
    from colossal_lite.many.task_plan import plan_of
    from colossal_lite.observe.tables import size

    plans = {}
    for task in sweep.tasks:
        try:
            plans[task.name] = plan_of(task, sweep.config)
        except (OSError, ValueError) as error:
            raise ValueError(f"task {task.name!r} cannot be planned: {error}") from error
    known = {name: made for name, made in plans.items() if made is not None}
    lines = []
    if known:
        largest = max(known, key=lambda name: known[name].peak_bytes)
        host_bytes = sum(
            known[task.name].host_bytes * task.devices for task in sweep.tasks if task.name in known
        )
        lines.append(
            f"host {size(host_bytes)} with all tasks open; device {size(known[largest].peak_bytes)} at the most, "
            f"{largest}"
        )
    lines += [f"{name}: {made.verdict}" for name, made in known.items() if made.fits is False]
    if unknown := [name for name in plans if name not in known]:
        lines.append(f"bytes not known before a first step: {', '.join(unknown)}")
    return lines
