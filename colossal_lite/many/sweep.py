"""Reads a sweep file: which tasks there are, from names of functions, shared settings and a grid."""

from __future__ import annotations

import importlib
import inspect
import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

from colossal_lite.config.errors import nearest
from colossal_lite.config.source import read_source
from colossal_lite.many.task import Halving, Task, lay_over, written_out

OF_A_TASK = (
    "build",
    "data",
    "evaluate",
    "criterion",
    "steps",
    "global_batch",
    "devices",
    "loader",
    "config",
    "step_s",
)
TOP = (*OF_A_TASK, "directory", "policy", "quantum", "save_every", "stop", "task", "grid")
FUNCTIONS = ("build", "data", "evaluate", "criterion")
KINDS: Mapping[str, tuple[type | tuple[type, ...], str]] = {
    "name": (str, "a text"), "directory": (str, "a text"), "config": (Mapping, "a table of settings"),
    "loader": (Mapping, "a table of arguments"),
    "stop": (Mapping, "a table of metric, rungs and keep"), "step_s": ((int, float), "seconds"),
}  # fmt: skip
"""Of keys whose values are read here; `task.check` judges the others."""


@dataclass(frozen=True)
class Sweep:
    """What a sweep file asks for."""

    tasks: tuple[Task, ...]
    step_s: Mapping[str, float]
    """Seconds of a step, where the file says them: for `--plan`."""
    config: Mapping[str, Any]
    directory: Path
    policy: Any
    save_every: int | None
    stop: Halving | None
    quantum: Any


def read_sweep(path: Path) -> Sweep:
    """The sweep in a .toml, .json or .py file. Raises ValueError with everything that is wrong with it."""
    raw = dict(read_source(path)[0])
    problems = [*_unknown(raw, TOP, "")]
    given = raw.get("task", [{}])
    rows = list(given) if isinstance(given, list) else []
    if not rows or not all(isinstance(row, Mapping) for row in rows):
        problems.append("task: legal: [[task]] tables, or none for the grid alone")
        rows = []
    shared = {name: raw[name] for name in OF_A_TASK if name in raw and name not in ("config", "step_s")}
    tasks, step_s = [], dict[str, float]()
    for number, row in enumerate(rows):
        problems += _unknown(row, ("name", *OF_A_TASK), f"task[{number}].")
    kinds = [_of_other_kinds(row, f"task[{number}].") for number, row in enumerate(rows)]
    if found := [*_of_other_kinds(raw, ""), *chain.from_iterable(kinds)]:
        raise _unreadable(path, [*problems, *found])
    for number, row in enumerate(rows):
        for name, settings, keywords in _grid(raw.get("grid", {}), row.get("name", ""), problems):
            task = _task(name or f"task{number}", shared | dict(row), settings, keywords, problems)
            tasks += [task] if task else []
            if "step_s" in {**raw, **row}:
                step_s[name or f"task{number}"] = float({**raw, **row}["step_s"])
    stop = raw.get("stop")
    if stop is not None:
        problems += _unknown(stop, ("metric", "rungs", "keep"), "stop.")
    if problems:
        raise _unreadable(path, problems)
    return Sweep(
        tuple(tasks), step_s, raw.get("config", {}), Path(raw.get("directory", Path("runs") / path.stem)),
        raw.get("policy", "link"), raw.get("save_every"), None if stop is None else Halving(**stop),
        raw.get("quantum", "step"),
    )  # fmt: skip


def _unreadable(path: Path, problems: Sequence[str]) -> ValueError:
    return ValueError("\n".join([f"{path} cannot be read:", *(f"  {p}" for p in dict.fromkeys(problems))]))


def _of_other_kinds(given: Mapping[str, Any], where: str) -> Iterator[str]:
    for name, (kind, words) in KINDS.items():
        if name in given and not isinstance(given[name], kind):
            yield f"{where}{name}={given[name]!r}; legal: {words}"


def _unknown(given: Mapping[str, Any], known: tuple[str, ...], where: str) -> Iterator[str]:
    for name in sorted(set(given) - set(known)):
        near = nearest(name, known)
        yield f"{where}{name}: no such key; legal: {', '.join(known)}" + (
            f"; did you mean {near}?" if near else ""
        )


def _grid(grid: Any, name: str, problems: list[str]) -> Iterator[tuple[str, dict[str, Any], dict[str, Any]]]:
    """For each point: the name of its task, its settings, and the arguments of its build."""
    if not isinstance(grid, Mapping) or not all(
        isinstance(path, str) and isinstance(values, list) and values for path, values in grid.items()
    ):
        problems.append('grid: legal: setting = [value, ...], such as "optimizer.lr" = [1e-4, 3e-4]')
        return
    if of_a_task := [path for path in grid if path in (*OF_A_TASK, "name")]:
        problems.append(
            f'grid: {", ".join(of_a_task)}; legal: settings of the config, such as "optimizer.lr", and arguments of '
            f'build, such as "build.layers". What else a task has stands in its [[task]]'
        )
        return
    for point in itertools.product(*grid.values()):
        settings: dict[str, Any] = {}
        keywords: dict[str, Any] = {}
        words = [name] if name else []
        for path, value in zip(grid, point, strict=True):
            head, _, rest = path.partition(".")
            words.append(f"{path.rpartition('.')[2]}={_word(value)}")
            if head == "build" and rest:
                keywords[rest] = value
            else:
                for part in reversed(path.split(".")):
                    value = {part: value}
                settings = lay_over(settings, value)
        yield ",".join(words), settings, keywords


def _word(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, default=_named).strip('"')
    return "".join(c if c.isalnum() or c in "._+-" else "_" for c in text)


def _named(value: Any) -> str:
    """A value that JSON does not have, such as a date, or a class of a .py file."""
    return str(getattr(value, "__qualname__", value))


def _task(
    name: str, row: Mapping[str, Any], settings: Mapping[str, Any], keywords: Mapping[str, Any],
    problems: list[str],
) -> Task | None:  # fmt: skip
    found = {key: _function(f"{name}: {key}", row[key], problems) for key in FUNCTIONS if key in row}
    missing = [key for key in ("build", "data", "steps", "global_batch") if key not in row]
    if missing:
        problems.append(
            f"{name}: {', '.join(missing)} not given; legal: in its [[task]], or at the top for all"
        )
    if missing or None in found.values():
        return None
    numbers = {key: row.get(key, 1) for key in ("steps", "global_batch", "devices")}
    for key, value in numbers.items():
        if not isinstance(value, int) or isinstance(value, bool):
            problems.append(f"{name}: {key}={value!r}; legal: a whole number")
            return None
    loader = dict(row.get("loader", {}))
    if "collate" in loader:
        loader["collate"] = _function(f"{name}: loader.collate", loader["collate"], problems)
    build = found.pop("build")
    if unknown := _not_taken(build, keywords):
        problems.append(f"{name}: build.{unknown} in grid; legal: an argument that {row['build']} takes")
        return None
    build = partial(build, **keywords) if keywords else build
    config = lay_over(written_out(row.get("config", {})), settings)
    return Task(name, build, config=config, loader=loader, **numbers, **found)


def _not_taken(build: Any, keywords: Mapping[str, Any]) -> str:
    """The first of `keywords` that the function has no argument for, or ""."""
    for name in keywords:
        try:
            inspect.signature(build).bind_partial(**{name: None})
        except TypeError:
            return name
    return ""


def _function(where: str, text: Any, problems: list[str]) -> Any:
    """The function `module:function`."""
    if where.endswith("criterion") and text == "model":
        return text
    place, colon, name = str(text).partition(":")
    try:
        found = getattr(importlib.import_module(place), name, None) if colon else None
    except (Exception, SystemExit) as error:  # whatever the user's file raises is the user's, on one line
        problems.append(f"{where} = {text!r}: {type(error).__name__}: {error}; legal: 'module:function'")
        return None
    if not callable(found):
        problems.append(f"{where} = {text!r}: no such function; legal: 'module:function'")
        return None
    return found
