"""Trains many tasks on few devices: starts the supervisors, and says how a worker finds its device and its gang."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from colossal_lite.launcher import env
from colossal_lite.launcher.start import launch, launch_gang, serve_gangs

if TYPE_CHECKING:
    from colossal_lite.many.build_timetable import Quantum
    from colossal_lite.many.coordinator import OnReport
    from colossal_lite.many.policies import PolicyName
    from colossal_lite.many.results import ManyResult
    from colossal_lite.many.task import Halving, Task


def train_many(
    tasks: Sequence[Task], *, config: Mapping[str, Any], directory: str | Path, policy: PolicyName = "link",
    stop: Halving | None = None, on_report: OnReport | None = None, save_every: int | None = None,
    resume: bool = False, quantum: Quantum = "step", timeout_s: float = 600.0,
) -> ManyResult:  # fmt: skip
    """Train every task to its steps, with the losses and weights that it has alone. Collective.

    Each process of the launch (torchrun, or none: one) has one device.  Tasks change devices by their checkpoints.
    `config`: the settings that all share, as a dict.  `directory`: of this run; each task is a `cl.Run` in
    `directory/tasks/NAME`.  `policy`: which task an idle device takes; it changes times, never numbers.  `stop`: ends
    the worse tasks early.  `quantum`: "stage": a device trains two tasks at once that have stages. Each hides the loads
    of the other, and both are in memory.  `on_report(task, step, metrics)` is called on rank 0 about every half second
    of steps. It gets the last loss and held_out loss, and may return "stop".  `save_every`: steps between saves, to
    which a task goes back if its process dies; None: only when it moves or ends.  `resume`: go on with what is in
    `directory`, also on another number of devices.

    A task that raises is marked as failed with its cause, and the others go on.  A worker that dies is started again.
    Raises ValueError, before anything is allocated, with everything that is wrong.  Raises WorkersLostError if a
    supervisor dies, and Stopped, with all saved, after a stop signal.  Raises OnReportError, with all saved, if
    `on_report` raises or returns something else.
    """
    from colossal_lite.many.task import check_kinds
    from colossal_lite.many.trainer import train

    check_kinds(tasks, config, directory, stop, on_report, resume)
    place = env.detect(env.environment())
    if not place.one_node:
        raise ValueError(
            f"train_many: {place.world_size} processes, {place.local_world_size} of them of this host's launcher; "
            f"legal: one launcher on one host, such as torchrun --nproc-per-node {place.world_size}"
        )
    with launch({"backend": "gloo", "timeout_s": timeout_s}) as context:
        prepare = partial(env.show_one_device, context.local_rank)
        return train(
            tasks, context, launch=launch_gang, serve=serve_gangs, prepare=prepare, config=config, directory=directory,
            policy=policy, stop=stop, on_report=on_report, save_every=save_every, resume=resume, quantum=quantum,
        )  # fmt: skip
