"""Reads what many tasks have left in their directory: losses, the best task, the timeline, and a page of all."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from html import escape
from pathlib import Path
from statistics import fmean
from typing import Any, Literal

from colossal_lite.config.whole_file import write_whole
from colossal_lite.many.jobs import Job
from colossal_lite.many.timetable import Action, Simulation, Span, summary
from colossal_lite.many.timetable_drawing import svg, trace
from colossal_lite.observe.printed_lines import tell
from colossal_lite.observe.report import REPORT, STYLE, RunFiles
from colossal_lite.observe.svg import PALETTE, Scale, curve, drawing, legend, x_axis, y_axis
from colossal_lite.observe.tables import table

RESULT, TIMELINE, TRACE = "result.json", "timeline.svg", "trace.json"
TASKS = "tasks"
POINTS = 240


@dataclass(frozen=True)
class TaskResult:
    """How one task has ended."""

    name: str
    status: Literal["open", "done", "stopped", "failed"]
    """open: the run was stopped before its end."""
    cause: str
    """Why it was stopped or has failed, or which of its rows are gone."""
    step: int
    losses: Sequence[float]
    """Training loss of each step; NaN for one that was no number, or whose row is gone."""
    held_out: float | None
    directory: Path
    """Its folder, as `cl.Run` leaves it: checkpoints, metrics.jsonl, report.html."""

    @property
    def training_loss(self) -> float:
        """The mean of the last tenth of the training losses; NaN without any."""
        return last_tenth(self.losses)


@dataclass(frozen=True)
class ManyResult:
    """How many tasks have ended. `result["name"]` is one of them, and `for name in result` gives all names."""

    tasks: Mapping[str, TaskResult]
    timeline: Simulation
    """What each device did in this session; its bound is that of the measured times."""
    directory: Path

    def __getitem__(self, name: str) -> TaskResult:
        return self.tasks[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.tasks)

    @property
    def best_by(self) -> str:
        """What `best` compares: "held_out" if every finished task has it, else "training_loss"."""
        finished = self._finished()
        has_held_out = bool(finished) and all(task.held_out is not None for task in finished)
        return "held_out" if has_held_out else "training_loss"

    @property
    def best(self) -> str | None:
        """The name of the finished task with the least loss; None if none has finished."""
        by = self.best_by
        found = [task for task in self._finished() if not math.isnan(getattr(task, by))]
        return min(found, key=lambda task: float(getattr(task, by))).name if found else None

    def _finished(self) -> list[TaskResult]:
        return [task for task in self.tasks.values() if task.status == "done"]

    def __str__(self) -> str:
        rows = [
            [
                task.name, task.status, f"{task.step:,}", number(task.training_loss), number(task.held_out),
                task.cause.partition("\n")[0][:60],
            ]
            for task in self.tasks.values()
        ]  # fmt: skip
        heads = ["task", "status", "steps", "training loss", "held out", "cause"]
        best = f"best: {self.best}, by {self.best_by}" if self.best else "best: none has finished"
        return f"{table(heads, rows, 2)}\n{best}"


def last_tenth(losses: Sequence[float]) -> float:
    """The mean of those that are numbers; NaN if none is. A step without a label has none."""
    found = [loss for loss in losses[-max(1, len(losses) // 10) :] if not math.isnan(loss)]
    return fmean(found) if found else math.nan


def losses_of(directory: Path, task: str) -> list[float]:
    """The training loss of each step up to the last row. NaN: it was no number, or has no row."""
    rows = {row["step"]: row["loss"] for row in RunFiles(directory / TASKS / task).rows("metrics.jsonl")}
    found = (rows.get(step) for step in range(1, max(rows, default=0) + 1))
    return [math.nan if loss is None else float(loss) for loss in found]


def metric_of(directory: Path, task: str, step: int, metric: Literal["loss", "held_out"]) -> float | None:
    """What tasks are compared by after `step` steps; None if it is not there yet."""
    if metric == "loss":
        losses = losses_of(directory, task)
        return last_tenth(losses[:step]) if len(losses) >= step else None
    rows = RunFiles(directory / TASKS / task).rows("evaluation.jsonl")
    found = [row["loss"] for row in rows if row["step"] == step]
    return None if not found else math.nan if found[-1] is None else float(found[-1])


def write_result(
    directory: Path,
    rows: Sequence[Mapping[str, Any]],
    spans: Sequence[Span],
    jobs: Sequence[Job],
    devices: int,
) -> str:
    """Write result.json, the timeline twice, and report.html. Returns why there is no result.json, or "". A page that
    cannot be written is named in a printed line, and left out."""
    timeline = summary(spans, jobs, devices)
    words = f"{timeline.makespan_s:.1f} s, {timeline.over_bound:.2f} of the bound, {timeline.moves} moves"
    drawn = svg(timeline.spans, devices, words)
    facts = {
        "tasks": list(rows), "devices": devices,
        "jobs": [[job.task, job.left, job.step_s, job.devices] for job in jobs],
        "spans": [[span.device, list(span.action), span.start_s, span.end_s] for span in spans],
    }  # fmt: skip
    pages: dict[str, Callable[[], str]] = {
        RESULT: partial(json.dumps, facts), TIMELINE: lambda: drawn,
        TRACE: partial(trace, timeline.spans, devices), REPORT: lambda: _page(read_result(directory), drawn),
    }  # fmt: skip
    for name, page in pages.items():
        try:
            write_whole(directory / name, page())
        except OSError as error:
            fault = f"{directory / name} cannot be written: {error.strerror}"
            if name == RESULT:
                return fault
            tell(fault)
    return ""


def read_result(directory: Path) -> ManyResult:
    """What `write_result` has written. Raises ValueError for a directory without it."""
    found = RunFiles(directory).mapping(RESULT)
    if not found:
        raise ValueError(f"{directory}: no {RESULT}; legal: the directory of train_many")
    tasks = {row["name"]: _task_result(directory, row) for row in found["tasks"]}
    jobs = [Job(task, left, step_s, devices=devices) for task, left, step_s, devices in found["jobs"]]
    spans = [
        Span(device, Action(*action), start_s, end_s) for device, action, start_s, end_s in found["spans"]
    ]
    return ManyResult(tasks, summary(spans, jobs, found["devices"]), directory)


def _task_result(directory: Path, row: Mapping[str, Any]) -> TaskResult:
    """The result of one task. If its last rows are gone, its cause says so."""
    folder, steps = directory / TASKS / row["name"], row["step"]
    losses = losses_of(directory, row["name"])[:steps]
    if len(losses) < steps:
        gone = f"metrics.jsonl has {len(losses)} of {steps} steps, so later losses are NaN"
        losses, row = (
            losses + [math.nan] * (steps - len(losses)),
            {**row, "cause": "; ".join(filter(None, [row["cause"], gone]))},
        )
    return TaskResult(**row, losses=losses, directory=folder)


def measured_step_s(directory: Path) -> dict[str, float]:
    """Seconds of a step of each task that the last session in this directory has trained."""
    jobs = RunFiles(directory).mapping(RESULT).get("jobs", [])
    return {task: step_s for task, left, step_s, _ in jobs if left and step_s > 0}


def _page(result: ManyResult, drawn: str) -> str:
    """One file that asks for nothing from outside, in the style of the page of a run."""
    name = escape(result.directory.resolve().name)
    heads = "".join(
        f"<th>{head}</th>" for head in ("task", "status", "steps", "training loss", "held-out loss", "cause")
    )
    rows = "".join(
        f'<tr><td><a href="{TASKS}/{escape(task.name)}/{REPORT}">{escape(task.name)}</a></td><td>{task.status}</td>'
        f'<td class="n">{task.step:,}</td><td class="n">{number(task.training_loss)}</td>'
        f'<td class="n">{number(task.held_out)}</td><td>{escape(task.cause)}</td></tr>'
        for task in result.tasks.values()
    )
    best = f"Best: {escape(result.best)}, by {result.best_by}." if result.best else "None has finished."
    return (
        f'<!doctype html>\n<html lang="en"><meta charset="utf-8"><title>{name}</title>'
        f'<meta name="viewport" content="width=device-width,initial-scale=1"><style>{STYLE}</style>\n'
        f"<h1>{name}</h1><p>{best}</p>\n"
        f'<section><h2>Tasks</h2><div class="scroll"><table><tr>{heads}</tr>{rows}</table></div></section>\n'
        f'<section><h2>Loss</h2><div class="scroll">{_curves(result)}</div></section>\n'
        f'<section><h2>Timeline of the devices</h2><div class="scroll">{drawn}</div></section></html>\n'
    )


def _curves(result: ManyResult, width: int = 960) -> str:
    """The training losses of all tasks on one axis of steps."""
    points = {
        name: [(n + 1, loss) for n, loss in enumerate(task.losses) if math.isfinite(loss)]
        for name, task in result.tasks.items()
    }
    every = [point for found in points.values() for point in found]
    if not every:
        return "<p>No step was made.</p>"
    colours = {name: PALETTE[n % len(PALETTE)] for n, name in enumerate(points)}
    names, top = legend(colours, 4, 4, width)
    across = Scale(0, max(step for step, _ in every), 60, width - 20)
    up = Scale(min(loss for _, loss in every), max(loss for _, loss in every), top + 260, top + 30)
    lines = [*names, *y_axis(up, 60, width - 20, "loss"), *x_axis(across, top + 264, "step")]
    for name, found in points.items():
        kept = found[:: max(1, len(found) // POINTS)]
        lines += curve([(across.at(step), up.at(loss)) for step, loss in kept], colours[name])
    return drawing(width, top + 310, lines, "training loss of each task")


def number(value: float | None) -> str:
    return (
        "-" if value is None or math.isnan(value) else f"{value:.4f}" if abs(value) < 1e6 else f"{value:.3g}"
    )
