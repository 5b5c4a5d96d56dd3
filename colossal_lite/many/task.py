"""Declares a task of many, the rule that stops tasks early, and all that is refused before anything is allocated."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Integral, Real
from typing import Any, Literal

from torch import nn

from colossal_lite.config.call_forms import with_fields
from colossal_lite.config.config import Config
from colossal_lite.config.source import plain, write_out
from colossal_lite.engine.loader_arguments import loader_names
from colossal_lite.many.build_timetable import QUANTA
from colossal_lite.many.jobs import gang_fault
from colossal_lite.many.policies import POLICIES
from colossal_lite.planner.host_room import room_fault

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._=,+-]{0,127}")
Build = nn.Module | Callable[[], nn.Module]


@with_fields
@dataclass(frozen=True, eq=False)
class Task:
    """One training of `train_many`, on one device or a gang of them.

    `build`, `criterion`: as `cl.initialize` takes a model and a criterion.  `data`: as `Run.batches` takes a dataset,
    with a length, or a function of no argument that returns one.  `loader`: its further arguments there, such as
    `labels` and `collate`.  `steps`: optimizer steps.  `global_batch`: samples of a step.  `evaluate`: held-out data,
    whose mean loss is told after the last step.  `config`: settings of this task, which lie over the shared ones.
    `devices`: how many train it at once, as ranks of a world of its own. It divides the number of all."""

    name: str
    build: Build
    data: Any = field(kw_only=True)
    steps: int = field(kw_only=True)
    global_batch: int = field(kw_only=True)
    evaluate: Any = field(default=None, kw_only=True)
    loader: Mapping[str, Any] = field(default_factory=dict, kw_only=True)
    config: Mapping[str, Any] = field(default_factory=dict, kw_only=True)
    criterion: Any = field(default=None, kw_only=True)
    devices: int = field(default=1, kw_only=True)

    def __post_init__(self) -> None:
        for name in ("steps", "global_batch", "devices"):
            object.__setattr__(self, name, _whole(getattr(self, name)))

    def settings(self, shared: Mapping[str, Any]) -> dict[str, Any]:
        """The shared settings with those of this task over them. A short form, or a key with dots, is the setting that
        it stands for."""
        return lay_over(written_out(shared), written_out(self.config))


@with_fields
@dataclass(frozen=True)
class Halving:
    """Stops the worse tasks early: successive halving, in step.

    When every task with more steps has come to a rung, the best `keep` of them go on, rounded up.  `metric`: "loss",
    the mean of the last tenth of the training losses so far, or "held_out", the loss on `Task.evaluate`; the least is
    best. The choice depends on the losses alone, so it is the same in every run."""

    metric: Literal["loss", "held_out"] = "loss"
    rungs: Sequence[int] = ()
    keep: float = 1 / 3

    def __post_init__(self) -> None:
        if isinstance(self.rungs, list | tuple):
            object.__setattr__(self, "rungs", tuple(map(_whole, self.rungs)))

    def kept(self, metrics: Mapping[str, float]) -> Sequence[str]:
        """The tasks that go on, the best first. Of equals the first named; a loss that is no number is the worst."""
        ranked = sorted(metrics, key=lambda task: (math.isnan(metrics[task]), metrics[task]))
        return ranked[: math.ceil(self.keep * len(ranked) - 1e-9)]


def _whole(value: Any) -> Any:
    """A whole number of any type, such as numpy's, as an int; anything else as it is."""
    return int(value) if type(value) is not bool and isinstance(value, Integral) else value


def written_out(settings: Mapping[str, Any]) -> Mapping[str, Any]:
    """Settings in their sections; as they are where `Config.load` will refuse them."""
    found, problems = plain(settings)
    if problems:
        return settings
    write_out(found)
    return found


def lay_over(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Both mappings as one; where both have a section, setting by setting."""
    out = dict(below)
    for name, value in above.items():
        both = isinstance(value, Mapping) and isinstance(out.get(name), Mapping)
        out[name] = lay_over(out[name], value) if both else value
    return out


def check_kinds(tasks: Any, config: Any, directory: Any, stop: Any, on_report: Any, resume: Any) -> None:
    """Raises ValueError for an argument of `train_many` that is of another kind."""
    are_tasks = isinstance(tasks, Sequence) and all(isinstance(task, Task) for task in tasks)
    is_path = isinstance(directory, (str, os.PathLike)) and directory != ""
    for name, given, fits, legal in (
        ("tasks", tasks, are_tasks, "a list of cl.Task"),
        ("config", config, isinstance(config, Mapping), "a dict of settings"),
        ("directory", directory, is_path, "the path of a folder"),
        ("stop", stop, isinstance(stop, Halving | None), "cl.Halving, or None"),
        ("on_report", on_report, on_report is None or callable(on_report), "a function, or None"),
        ("resume", resume, isinstance(resume, bool), "True or False"),
    ):
        if not fits:
            raise ValueError(f"train_many: {name}={given!r}; legal: {legal}")


def check(
    tasks: Sequence[Task],
    shared: Mapping[str, Any],
    policy: str,
    stop: Halving | None,
    save_every: int | None,
    devices: int,
    quantum: str = "step",
) -> None:
    """Raise one ValueError with everything that is wrong with the request, for so many devices."""
    problems = [*_of_all(tasks, policy, stop, save_every, quantum)]
    for task in tasks:
        problems += [f"task {task.name!r}: {problem}" for problem in _of_task(task, shared, devices)]
    if problems:
        raise ValueError("\n".join(["train_many cannot begin:", *(f"  {problem}" for problem in problems)]))


def _of_all(
    tasks: Sequence[Task], policy: str, stop: Halving | None, save_every: int | None, quantum: str
) -> Iterator[str]:
    names = [str(task.name) for task in tasks]
    if not tasks:
        yield "tasks: there is none; legal: one or more cl.Task"
    for name in sorted({name for name in names if names.count(name) > 1}):
        yield f"tasks: {name!r} names {names.count(name)} tasks; legal: a name of its own for each"
    if policy not in tuple(POLICIES):
        yield f"policy={policy!r}: no such policy; legal: {', '.join(POLICIES)}"
    if quantum not in QUANTA:
        yield f"quantum={quantum!r}: legal: {', '.join(map(repr, QUANTA))}"
    if save_every is not None and not _counts(save_every):
        yield f"save_every={save_every!r}; legal: 1 or more steps, or None"
    if stop is None:
        return
    if stop.metric not in ("loss", "held_out"):
        yield f"stop.metric={stop.metric!r}; legal: 'loss', 'held_out'"
    keep: Any = stop.keep
    if not isinstance(keep, Real) or not 0 < float(keep) < 1:
        yield f"stop.keep={keep!r}; legal: a share between 0 and 1"
    most = max((task.steps for task in tasks if _counts(task.steps)), default=0)
    rungs = list(stop.rungs) if isinstance(stop.rungs, Sequence) else []
    rises = bool(rungs) and all(map(_counts, rungs)) and rungs == sorted(set(rungs))
    if not rises or rungs[-1] >= most > 0:
        yield f"stop.rungs={stop.rungs!r}; legal: rising steps, from 1 and below {most}, the most that a task makes"
    if stop.metric == "held_out" and (without := [task.name for task in tasks if task.evaluate is None]):
        yield f"stop.metric='held_out': {', '.join(without)} have no evaluate; legal: evaluate for every task"


def makes_data(data: Any) -> bool:
    """Whether it is a function of data, or a class of it, and no dataset itself."""
    return callable(data) and (isinstance(data, type) or not hasattr(data, "__len__"))


def _counts(value: Any) -> bool:
    """Whether it is a whole number, 1 or more."""
    return type(value) is not bool and isinstance(value, Integral) and int(value) >= 1


def _of_task(task: Task, shared: Mapping[str, Any], devices: int) -> Iterator[str]:
    if not isinstance(task.name, str) or not NAME.fullmatch(task.name):
        yield "the name is also a folder; legal: up to 128 letters, digits and . _ = , + -, the first a letter or digit"
    if not callable(task.build):
        yield f"build is a {type(task.build).__name__}; legal: an nn.Module, or a function that returns one"
    for name in ("steps", "global_batch"):
        if not _counts(getattr(task, name)):
            yield f"{name}={getattr(task, name)!r}; legal: a whole number, 1 or more"
    for name in ("data", "evaluate"):
        given = getattr(task, name)
        if given is not None and not makes_data(given) and not hasattr(given, "__len__"):
            yield f"{name}: a {type(given).__name__} has no length; legal: a dataset with one, or a function of one"
    if task.criterion not in (None, "model") and not callable(task.criterion):
        yield f"criterion={task.criterion!r}; legal: a callable, 'model' or None"
    legal = loader_names(less=["start", "global_batch"])
    loader: Any = task.loader
    if not isinstance(loader, Mapping) or set(loader) - set(legal):
        yield f"loader={loader!r}; legal: a dict of {', '.join(legal)}"
    if task.data is None:
        yield "data=None; legal: a dataset, or a function that returns one"
    settings: Any = task.config
    if not isinstance(settings, Mapping):
        yield f"config={settings!r}; legal: a dict of settings"
        return
    if fault := gang_fault(task.devices, devices):
        yield fault
        return
    try:
        config = Config.load(task.settings(shared))
        config.check_built()
        config.check_world(task.devices)
        if callable(task.build) and (fault := room_fault(task.build, config)):
            yield fault
    except ValueError as error:
        yield str(error).replace("\n", "\n    ")
