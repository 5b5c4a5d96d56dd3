"""Logs the steps of a run: rows of JSON in files, a progress line, a timeline.

Note: two kinds of numbers.
`metrics.jsonl` and `evaluation.jsonl` hold numbers that seed, configuration and data determine.  The same command twice
writes the same bytes.  Times, rates and memory differ from run to run and go to `timing.jsonl`.  Every row is written
at once, so a killed run keeps its rows.  Rows that do not fit on a full disk are dropped, counted and reported.  A
number that is not finite is written as null, because JSON has no other word.
Nothing is sampled: time is read at the calls, memory once a step, and no thread runs.  One rank logs. On the others
the same calls do nothing.
"""

from __future__ import annotations

import json
import logging
import math
import sys
import time
import warnings
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

import torch
from rich.console import Console
from rich.progress import Progress, TextColumn
from torch import Tensor

from colossal_lite.observe.dropped_rows import DroppedRows, JsonLines, RankFile
from colossal_lite.observe.printed_lines import RunConsole, tell
from colossal_lite.observe.report import REPORT, write_report
from colossal_lite.observe.sinks import Sink
from colossal_lite.observe.timeline import LogTimeline, memory_bytes

# ------------------------------------------------------------------------------------------------------- rows


@dataclass(frozen=True)
class StepRow:
    """One optimizer step, as determined by seed, configuration and data: a row of metrics.jsonl."""

    step: int
    loss: float
    """nats per token, mean over the valid tokens of the global batch"""
    bits_per_byte: float | None
    """the same in bits per byte of text; None where the bytes of a token are unknown"""
    grad_norm: float
    """before clipping"""
    lr: float
    tokens: int
    """valid tokens of the global batch"""
    skipped: bool
    """the optimizer did not move, because a gradient was not finite or no token was valid"""
    sent_bytes: int
    """logical payload that this rank gave to its communicators"""


@dataclass(frozen=True)
class TimingRow:
    """The same step in time and memory: a row of timing.jsonl."""

    step: int
    step_s: float
    """from the end of the step before, with the wait for data, without evaluation"""
    tokens_per_s: float | None
    """of all ranks; None where a step tells no tokens, as in a loop without `count`"""
    mfu: float | None
    """share of the devices' peak that the model's own FLOPs take; None where no peak is known"""
    memory_bytes: int
    """host: resident now; CUDA: the most that was allocated so far"""


@dataclass(frozen=True)
class EvaluationRow:
    """Loss on held-out text after a step: a row of evaluation.jsonl."""

    step: int
    loss: float
    bits_per_byte: float | None


# -------------------------------------------------------------------------------------------------------- run


REDRAW_NS = 250_000_000
"""between two drawings of the moving line: more often would slow the run"""
LINE_NS = 60_000_000_000
"""after which a line is printed in any case, where no line can move: in a pipe or a file"""


def steps_a_line(total_steps: int | None) -> int:
    """Steps between two printed lines: a round number, so that a run has 20 lines or fewer; at most 100."""
    if total_steps is None:
        return 10
    return next((steps for steps in (1, 2, 5, 10, 20, 50) if steps * 20 >= total_steps), 100)


class LogStep(Protocol):
    """The fields of a step that are logged (the engine's StepResult has them)."""

    @property
    def step(self) -> int: ...
    @property
    def loss(self) -> Tensor: ...
    @property
    def grad_norm(self) -> float: ...
    @property
    def tokens(self) -> int: ...
    @property
    def skipped(self) -> bool: ...
    @property
    def lr(self) -> float: ...


@dataclass(frozen=True)
class Scale:
    """Constants of a run that make its numbers comparable with other runs."""

    bytes_per_token: float | None = None
    """of the text: 1 for a vocabulary of bytes; None if unknown"""
    flops_per_token: float = 0.0
    """`model_flops_per_token`"""
    peak_flops: float | None = None
    """of all devices together; None where no peak is known"""

    def bits_per_byte(self, loss: float) -> float | None:
        """Bits per byte of a loss in nats per token."""
        return loss / math.log(2) / self.bytes_per_token if self.bytes_per_token else None


def progress_line(row: StepRow, timing: TimingRow, total_steps: int | None, width: int) -> str:
    """Formats one step as a line of at most `width` columns; fields that do not fit are left out."""
    of = f"{row.step:>{len(str(total_steps))}}/{total_steps}" if total_steps else str(row.step)
    left = max((total_steps or 0) - row.step, 0) * timing.step_s
    line = "  ".join(
        [
            f"step {of}",
            f"loss {row.loss:.4f}{' SKIPPED' if row.skipped else ''}",
            *([] if timing.tokens_per_s is None else [f"{timing.tokens_per_s:,.0f} tok/s"]),
            *([f"{duration(left)} left"] if total_steps else []),
        ]
    )
    more = [
        f"{row.bits_per_byte:.3f} bits/byte" if row.bits_per_byte is not None else "",
        f"mfu {timing.mfu:.1%}" if timing.mfu is not None else "",
        f"lr {row.lr:.2e}",
        f"mem {timing.memory_bytes / 2**20:,.0f} MiB",
        f"norm {row.grad_norm:.2f}",
        f"sent {row.sent_bytes / 2**20:.1f} MiB",
    ]
    for part in filter(None, more):
        if len(line) + 2 + len(part) <= width:
            line = f"{line}  {part}"
    return line


def duration(seconds: float) -> str:
    """Hours, minutes and seconds: `4:05`, `1:00:09`."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


class RunLog:
    """Logs one run: `with RunLog(folder, ...) as log:`, and `log.step(result, sent_bytes)` after a step.

    A terminal shows one line that moves. Elsewhere a line is printed for the first step and the last, for the steps
    that `steps_a_line` divides, and where the last line is a minute old. The rows go to metrics.jsonl, timing.jsonl and
    evaluation.jsonl in `folder`, which is made. At the end the timeline is written to trace.json, and report.html is
    made from these files. With `folder` None nothing is written or printed: only one rank has a folder.
    """

    def __init__(
        self, folder: Path | None, *, scale: Scale, device: torch.device, total_steps: int | None = None,
        console: Console | None = None, clock: Callable[[], int] = time.perf_counter_ns, resumed_step: int = 0,
        also: Sequence[Sink] = (),
    ) -> None:  # fmt: skip
        """`resumed_step`: the last step of a resumed run, whose rows up to it are kept. `also`: further sinks of the
        numbers (`run_sinks`)."""
        self._resumed_step, self._sinks = resumed_step, tuple(also)
        self.timeline = LogTimeline(clock=clock)
        self.total_steps = total_steps
        """The last step of the run; None: not known yet."""
        self._folder, self._scale, self._device, self._clock = folder, scale, device, clock
        self._console = console or RunConsole(file=sys.stdout, highlight=False, soft_wrap=True)
        self._files: dict[type, JsonLines] = {}
        self.dropped = DroppedRows(self.say)
        self._recent: deque[tuple[int, float]] = deque(maxlen=20)
        self._line: Progress | None = None
        self._shown_ns = self._lap_ns = 0

    def __enter__(self) -> RunLog:
        self._lap_ns = self._clock()
        if self._folder is None:
            return self
        names = {StepRow: "metrics", TimingRow: "timing", EvaluationRow: "evaluation"}
        for kind, name in names.items():
            self.dropped.attempt(partial(self._open, self._folder / f"{name}.jsonl", kind))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop_line()
        for file in self._files.values():
            self.dropped.attempt(file.close)
        for sink in self._sinks:
            self.dropped.attempt(sink.close)
        self.report()
        if self.dropped.count:
            self.say(self.dropped.summary())

    def report(self) -> None:
        """Write the timeline so far to trace.json, and report.html, of a run that has made a step."""
        if self._folder is None or not self._recent:
            return
        self.dropped.attempt(partial(self.timeline.export, self._folder / "trace.json"))
        try:
            self.dropped.attempt(partial(write_report, self._folder))
        except ValueError as error:  # rows were dropped, or files of an earlier run are damaged
            self.say(f"no {REPORT}: {error}")

    def _open(self, path: Path, kind: type) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._files[kind] = JsonLines(path, self._resumed_step)

    def _write(self, group: str, row: StepRow | EvaluationRow, timing: TimingRow | None = None) -> None:
        """Write a row, and its time, to the files and the further sinks."""
        for each in filter(None, (row, timing)):
            if type(each) in self._files:
                self.dropped.attempt(partial(self._files[type(each)].write, each))
        values = asdict(row) | (asdict(timing) if timing else {})
        for sink in self._sinks:
            self.dropped.attempt(partial(sink.write, group, row.step, values))

    def describe(self, facts: Mapping[str, Any]) -> None:
        """Write the facts of the run to run.json."""
        if self._folder is not None:
            text = json.dumps(facts, indent=2)
            self.dropped.attempt(partial((self._folder / "run.json").write_text, text, "utf-8"))

    def step(self, result: LogStep, sent_bytes: int) -> None:
        """Record and show a step that has just ended."""
        if self._folder is None:
            return
        loss = float(result.loss)
        row = StepRow(
            result.step, loss, self._scale.bits_per_byte(loss), result.grad_norm, result.lr, result.tokens,
            result.skipped, sent_bytes,
        )  # fmt: skip
        step_s = (self._clock() - self._lap_ns) / 1e9
        self._recent.append((row.tokens, step_s))
        timing = self._timing(row.step, row.tokens, step_s)
        self._write("train", row, timing)
        tokens, seconds = (sum(each) / len(each) for each in zip(*self._recent, strict=True))
        self._show(row, self._timing(row.step, tokens if row.tokens else 0, seconds))
        self._lap_ns = self._clock()

    def evaluated(self, step: int, loss: float) -> None:
        """Record and show the held-out loss after a step. The time since then counts for no step."""
        if self._folder is None:
            return
        row = EvaluationRow(step, loss, self._scale.bits_per_byte(loss))
        self._write("held_out", row)
        bits = f", {row.bits_per_byte:.3f} bits/byte" if row.bits_per_byte is not None else ""
        self.say(f"step {step}: held-out loss {loss:.4f}{bits}")
        self._lap_ns = self._clock()

    def say(self, text: str) -> None:
        """Print a line above the moving one."""
        if self._folder is not None:
            try:
                self._console.print(text, markup=False)
            except OSError as error:  # standard output on a full disk
                self.dropped.count, self.dropped.reason = self.dropped.count + 1, str(error)

    def lap(self) -> None:
        """Leave the time since the last step out of the timing: a save took it."""
        self._lap_ns = self._clock()

    def leave_out(self, span_ns: int) -> None:
        """Leave so much of the time since the last step out of the timing: an evaluation took it."""
        self._lap_ns += span_ns

    def _timing(self, step: int, tokens: float, seconds: float) -> TimingRow:
        rate, peak = tokens / seconds or None, self._scale.peak_flops
        mfu = self._scale.flops_per_token * rate / peak if peak and rate else None
        return TimingRow(step, seconds, rate, mfu, memory_bytes(self._device))

    def _show(self, row: StepRow, timing: TimingRow) -> None:
        now_ns, is_last = self._clock(), row.step == self.total_steps
        moves = self._console.is_terminal
        is_due = is_last or not moves and row.step % steps_a_line(self.total_steps) == 0
        if self._shown_ns and not is_due and now_ns - self._shown_ns < (REDRAW_NS if moves else LINE_NS):
            return
        line = progress_line(row, timing, self.total_steps, self._console.width - 1)
        self._shown_ns = now_ns
        if not moves:
            self.say(line)
            return
        if self._line is None:
            column = TextColumn("{task.description}", markup=False)
            self._line = Progress(column, console=self._console, auto_refresh=False)
            self._line.add_task("")
            self._line.start()
        self._line.update(self._line.task_ids[0], description=line)
        self._line.refresh()
        if is_last:
            self._stop_line()

    def _stop_line(self) -> None:
        """End the moving line and keep its last text."""
        if self._line:
            self._line.refresh()
            self._line.stop()
            self._line = None


class RankLog:
    """Writes the log of one rank to its own file: `with RankLog(folder, rank):` appends to `folder/rank-00003.log`.

    The file gets lines of Python's logging from INFO on, warnings, and the traceback of an error. Each has its time.
    Printed text is not captured.
    """

    def __init__(self, folder: Path, rank: int) -> None:
        self._rank = rank
        self.dropped = DroppedRows(lambda text: tell(f"rank {rank}: {text}", sys.stderr))
        self._handler = RankFile(folder / f"rank-{rank:05}.log", self.dropped)
        self._handler.setFormatter(
            logging.Formatter(f"%(asctime)s rank {rank} %(name)s %(levelname)s: %(message)s")
        )
        self._logger = logging.getLogger()
        self._level = self._logger.level

    def __enter__(self) -> logging.Logger:
        self._shown, warnings.showwarning = warnings.showwarning, self._show
        self._logger.addHandler(self._handler)
        self._logger.setLevel(min(self._level or logging.INFO, logging.INFO))
        return logging.getLogger("colossal_lite")

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, SystemExit):
            logging.getLogger("colossal_lite").info("ended: %s", error)
        elif error is not None:
            logging.getLogger("colossal_lite").error("ended by an error", exc_info=error)
            error.add_note(f"all of the traceback: {self._handler.path}")
        warnings.showwarning = self._shown
        self._logger.setLevel(self._level)
        self._logger.removeHandler(self._handler)
        self._handler.close()
        if self.dropped.count:
            tell(f"rank {self._rank}: {self.dropped.summary()}", sys.stderr)

    def _show(self, message: Warning | str, category: type[Warning], *rest: Any, **more: Any) -> None:
        logging.getLogger("colossal_lite").warning("%s: %s", category.__name__, message)
        self._shown(message, category, *rest, **more)
