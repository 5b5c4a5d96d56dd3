"""What a run shows of itself: rows for machines, a line for people, a timeline of where time went.

Note: observe
    *Two kinds of numbers.* `metrics.jsonl` and `evaluation.jsonl` hold what seed, configuration and data
    determine: the same command twice gives the same bytes. Times, rates and memory differ from run to run and
    stand in `timing.jsonl`. Every row is flushed as it is written, so a killed run keeps all the rows it
    earned. A number that is not finite is null, because JSON has no other word for it.
    *Nothing is sampled.* Times are taken where the loop stands, memory once a step; no thread runs.
    *Who shows.* One rank; on the others the same calls do nothing.
"""

from __future__ import annotations

import json
import logging
import math
import os
import re
import sys
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, TextIO

import psutil
import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor

# ------------------------------------------------------------------------------------------------------- rows


@dataclass(frozen=True)
class StepRow:
    """One optimizer step, as determined by seed, configuration and data: a row of metrics.jsonl."""

    step: int
    loss: float
    """nats per token, mean over the valid tokens of the global batch"""
    bits_per_byte: float
    """the same in bits per byte of text"""
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
    tokens_per_s: float
    """of all ranks"""
    mfu: float | None
    """share of the devices' peak that the model's own FLOPs took; None where no peak is known"""
    memory_bytes: int
    """host: resident now; CUDA: the most that was allocated so far"""


@dataclass(frozen=True)
class EvaluationRow:
    """Loss on held-out text after a step: a row of evaluation.jsonl."""

    step: int
    loss: float
    bits_per_byte: float


class JsonLines:
    """Writes rows to a file, one JSON object a line, each flushed. Of a file that is there, rows up to `keep_step`
    stay: what a killed run wrote after its last checkpoint is written again."""

    def __init__(self, path: Path, keep_step: int = 0) -> None:
        kept = list(_rows_up_to(path, keep_step)) if keep_step and path.exists() else []
        part = path.with_name(f".{path.name}.part")
        part.write_text("".join(kept), encoding="utf-8")
        os.replace(part, path)  # a kill here loses no row
        self._file: TextIO = path.open("a", encoding="utf-8")

    def write(self, row: Any) -> None:
        """Append a dataclass or dict."""
        values: Mapping[str, Any] = row if isinstance(row, Mapping) else asdict(row)
        self._file.write(json.dumps({key: _finite(value) for key, value in values.items()}) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def _rows_up_to(path: Path, step: int) -> Iterator[str]:
    for line in path.read_text(encoding="utf-8").splitlines(keepends=True):
        try:
            if line.endswith("\n") and json.loads(line)["step"] <= step:
                yield line
        except ValueError:  # cut short by a kill
            return


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


# ----------------------------------------------------------------------------------------------------- device


PEAK_TFLOPS: tuple[tuple[str, float, float | None], ...] = (
    # name of the device, dense 16-bit matrix FLOPs, fp32 without TF32; from the vendors' data sheets
    (r"\bB200\b", 2250, 75),
    (r"\bH200\b|\bGH200\b", 989, 67),
    (r"\bH100 PCIe\b", 756, 51),
    (r"\bH100 NVL\b", 835, 60),
    (r"\bH[18]00\b", 989, 67),
    (r"\bA[18]00\b", 312, 19.5),
    (r"\bL40S\b", 362, 91.6),
    (r"\bL4\b", 121, 30.3),
    (r"\bA10\b", 125, 31.2),
    (r"\bRTX 4090\b", 165, 82.6),
    (r"\bRTX 3090\b", 71, 35.6),
    (r"\bV100\b", 125, 15.7),
    (r"\bMI300X\b", 1307, 163),
)


def peak_flops(device_name: str, dtype: str) -> float | None:
    """Peak FLOP/s of a device (`torch.cuda.get_device_name()`) in "bf16", "fp16", "fp32"; None if unknown."""
    for pattern, half, single in PEAK_TFLOPS:
        if re.search(pattern, device_name):
            tflops = {"bf16": half, "fp16": half, "fp32": single}.get(dtype)
            return tflops * 1e12 if tflops else None
    return None


def device_peak_flops(device: torch.device, dtype: str) -> float | None:
    """`peak_flops` of the device itself; a CPU has none worth naming."""
    return peak_flops(torch.cuda.get_device_name(device), dtype) if device.type == "cuda" else None


def model_flops_per_token(matmul_params: int, layers: int, width: int, sequence: int) -> int:
    """FLOPs of forward and backward for one token: 6 N + 12 L D T (arXiv 2204.02311, appendix B).

    `matmul_params` are those that a token is multiplied with: all but embeddings that are only looked up.
    """
    return 6 * matmul_params + 12 * layers * width * sequence


def memory_bytes(device: torch.device) -> int:
    """CUDA: the most that torch has allocated so far; else the resident memory of this process now."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    return int(psutil.Process().memory_info().rss)


# --------------------------------------------------------------------------------------------------- timeline


@dataclass(frozen=True)
class Span:
    """Something that took time."""

    name: str
    track: str
    start_ns: int
    stop_ns: int


@dataclass(frozen=True)
class MemoryMark:
    """Memory at one moment."""

    name: str
    at_ns: int
    memory_bytes: int


class Timeline:
    """Spans and memory marks of one rank, the newest `limit` of each, for chrome://tracing and Perfetto."""

    def __init__(self, limit: int = 100_000, clock: Callable[[], int] = time.perf_counter_ns) -> None:
        self.spans: deque[Span] = deque(maxlen=limit)
        self.marks: deque[MemoryMark] = deque(maxlen=limit)
        self._clock = clock

    @contextmanager
    def span(self, name: str, track: str = "main") -> Iterator[None]:
        """Records the time that the block takes, also if it raises."""
        start_ns = self._clock()
        try:
            yield
        finally:
            self.spans.append(Span(name, track, start_ns, self._clock()))

    def mark(self, name: str, device: torch.device) -> MemoryMark:
        """Records how much memory is in use now."""
        mark = MemoryMark(name, self._clock(), memory_bytes(device))
        self.marks.append(mark)
        return mark

    def chrome_trace(self, rank: int = 0) -> dict[str, Any]:
        """As a Chrome trace: a process per rank, a thread per track, a counter of memory; times in us."""
        tracks = {track: i for i, track in enumerate(dict.fromkeys(span.track for span in self.spans))}
        named = [
            ("process_name", 0, f"rank {rank}"),
            *(("thread_name", i, track) for track, i in tracks.items()),
        ]
        events: list[dict[str, Any]] = [
            {"ph": "M", "name": what, "pid": rank, "tid": i, "args": {"name": name}}
            for what, i, name in named
        ]
        for span in self.spans:
            times = {"ts": span.start_ns / 1e3, "dur": (span.stop_ns - span.start_ns) / 1e3}
            events.append({"ph": "X", "name": span.name, "pid": rank, "tid": tracks[span.track], **times})
        for mark in self.marks:
            args = {"bytes": mark.memory_bytes}
            events.append({"ph": "C", "name": "memory", "pid": rank, "ts": mark.at_ns / 1e3, "args": args})
            events.append(
                {"ph": "i", "name": mark.name, "pid": rank, "tid": 0, "ts": mark.at_ns / 1e3, "s": "p"}
            )
        return {"traceEvents": events, "displayTimeUnit": "ms"}

    def export(self, path: Path, rank: int = 0) -> None:
        """Writes the Chrome trace as JSON."""
        path.write_text(json.dumps(self.chrome_trace(rank)), encoding="utf-8")


# -------------------------------------------------------------------------------------------------------- run


REDRAW_NS = 250_000_000
"""between two drawings of the moving line: more often costs more than it tells"""


class Step(Protocol):
    """What a step tells of itself (the engine's StepResult)."""

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
    """What makes the numbers of a run comparable with others."""

    bytes_per_token: float = 1.0
    """of the text; 1 for a vocabulary of bytes"""
    yardsticks: str = ""
    """shown beside bits per byte, such as "zlib 1.91, lzma 1.61" """
    flops_per_token: float = 0.0
    """`model_flops_per_token`"""
    peak_flops: float | None = None
    """of all devices together; None where no peak is known"""

    def bits_per_byte(self, loss: float) -> float:
        """Of a loss in nats per token."""
        return loss / math.log(2) / self.bytes_per_token


def progress_line(row: StepRow, timing: TimingRow, total_steps: int, scale: Scale) -> str:
    """One step for people."""
    beside = f" ({scale.yardsticks})" if scale.yardsticks else ""
    parts = [
        f"step {row.step:>{len(str(total_steps))}}/{total_steps}",
        f"loss {row.loss:.4f}",
        f"{row.bits_per_byte:.3f} bits/byte{beside}",
        f"norm {row.grad_norm:.2f}",
        f"lr {row.lr:.2e}",
        f"{timing.tokens_per_s:,.0f} tok/s",
        f"mfu {timing.mfu:.1%}" if timing.mfu is not None else "",
        f"mem {timing.memory_bytes / 2**20:,.0f} MiB",
        f"sent {row.sent_bytes / 2**20:.1f} MiB",
        "SKIPPED" if row.skipped else "",
    ]
    return "  ".join(filter(None, parts))


class RunLog:
    """Shows one run: `with RunLog(folder, ...) as log:`, and `log.step(result, sent_bytes)` after a step.

    On a terminal, a line that moves; elsewhere a line for the first step and every `every` steps. The rows go
    to metrics.jsonl, timing.jsonl and evaluation.jsonl in `folder`, which is made, and the timeline to
    trace.json at the end. With `folder` None nothing is written and nothing shown: so it is on all ranks but
    one.
    """

    def __init__(
        self, folder: Path | None, *, total_steps: int, scale: Scale, device: torch.device, every: int = 10,
        console: Console | None = None, clock: Callable[[], int] = time.perf_counter_ns, resumed_step: int = 0,
        also: Sequence[Sink] = (),
    ) -> None:  # fmt: skip
        """`resumed_step`: the step a resumed run goes on from, whose rows so far are kept; `also`: further
        places that numbers go to (`run_sinks`)."""
        self._resumed_step, self._sinks = resumed_step, tuple(also)
        self.timeline = Timeline(clock=clock)
        self._folder, self._total_steps, self._scale, self._device = folder, total_steps, scale, device
        self._every, self._clock = every, clock
        self._console = console or Console(file=sys.stdout, highlight=False, soft_wrap=True)
        self._files: dict[type, JsonLines] = {}
        self._recent: deque[tuple[int, float]] = deque(maxlen=20)
        self._bar: Progress | None = None
        self._shown_ns = self._lap_ns = 0

    def __enter__(self) -> RunLog:
        self._lap_ns = self._clock()
        if self._folder is None:
            return self
        self._folder.mkdir(parents=True, exist_ok=True)
        names = {StepRow: "metrics", TimingRow: "timing", EvaluationRow: "evaluation"}
        self._files = {
            kind: JsonLines(self._folder / f"{name}.jsonl", self._resumed_step)
            for kind, name in names.items()
        }
        if self._console.is_terminal:
            columns = (BarColumn(bar_width=12), TextColumn("{task.description}"), TimeRemainingColumn())
            self._bar = Progress(*columns, console=self._console, auto_refresh=False)
            self._bar.add_task("first step", total=self._total_steps)
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar:
            self._bar.refresh()
            self._bar.stop()
        for file in self._files.values():
            file.close()
        for sink in self._sinks:
            sink.close()
        if self._folder:
            self.timeline.export(self._folder / "trace.json")

    def step(self, result: Step, sent_bytes: int) -> None:
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
        self._files[StepRow].write(row)
        self._files[TimingRow].write(timing)
        for sink in self._sinks:
            sink.write("train", row.step, asdict(row) | asdict(timing))
        tokens, seconds = map(sum, zip(*self._recent, strict=True))
        self._show(row, self._timing(row.step, tokens, seconds))
        self._lap_ns = self._clock()

    def evaluated(self, step: int, loss: float) -> None:
        """Record and show the held-out loss after a step; the time since then counts for no step."""
        if self._folder is None:
            return
        row = EvaluationRow(step, loss, self._scale.bits_per_byte(loss))
        self._files[EvaluationRow].write(row)
        for sink in self._sinks:
            sink.write("held_out", row.step, asdict(row))
        self.say(f"step {step}: held-out loss {loss:.4f}, {row.bits_per_byte:.3f} bits/byte")
        self._lap_ns = self._clock()

    def say(self, text: str) -> None:
        """A line of its own, above the moving one."""
        if self._folder is not None:
            self._console.print(text, markup=False)

    def lap(self) -> None:
        """The time since the last step counts for no step: the run was saved."""
        self._lap_ns = self._clock()

    def _timing(self, step: int, tokens: float, seconds: float) -> TimingRow:
        rate, peak = tokens / seconds, self._scale.peak_flops
        mfu = self._scale.flops_per_token * rate / peak if peak else None
        return TimingRow(step, seconds, rate, mfu, memory_bytes(self._device))

    def _show(self, row: StepRow, timing: TimingRow) -> None:
        line = progress_line(row, timing, self._total_steps, self._scale)
        now_ns, is_last = self._clock(), row.step == self._total_steps
        if self._bar is None:
            if not self._shown_ns or row.step % self._every == 0 or is_last:
                self.say(line)
                self._shown_ns = now_ns
        elif is_last or now_ns - self._shown_ns > REDRAW_NS:
            self._bar.update(self._bar.task_ids[0], completed=row.step, description=line)
            self._bar.refresh()
            self._shown_ns = now_ns


# ------------------------------------------------------------------------------------------------ further places


class Sink(Protocol):
    """Somewhere else that numbers go."""

    def write(self, group: str, step: int, values: Mapping[str, Any]) -> None: ...
    def close(self) -> None: ...


class TensorBoard:
    """Event files in `folder/tensorboard`: `tensorboard --logdir runs`."""

    def __init__(self, folder: Path, facts: Mapping[str, Any]) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer: Any = SummaryWriter(str(folder / "tensorboard"))

    def write(self, group: str, step: int, values: Mapping[str, Any]) -> None:
        for name, value in _numbers(values):
            self._writer.add_scalar(f"{group}/{name}", value, step)

    def close(self) -> None:
        self._writer.close()


class WandB:
    """An offline run in `folder/wandb`; nothing leaves the machine until `wandb sync` is called on it."""

    def __init__(self, folder: Path, facts: Mapping[str, Any]) -> None:
        import wandb

        self._run = wandb.init(
            mode="offline", dir=str(folder), project="colossal_lite", name=folder.name, config=dict(facts)
        )

    def write(self, group: str, step: int, values: Mapping[str, Any]) -> None:
        self._run.log({f"{group}/{name}": value for name, value in _numbers(values)}, step=step)

    def close(self) -> None:
        self._run.finish()


def _numbers(values: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    for name, value in values.items():
        if name != "step" and isinstance(value, int | float):
            yield name, float(value)


SINKS: Mapping[str, Callable[[Path, Mapping[str, Any]], Sink]] = {"tensorboard": TensorBoard, "wandb": WandB}


def run_sinks(names: Sequence[str], folder: Path | None, facts: Mapping[str, Any]) -> tuple[Sink, ...]:
    """The named sinks of a run; none where `folder` is None. `facts` describe the run.

    Raises ValueError for an unknown name, and for one whose package is not installed.
    """
    if unknown := [name for name in names if name not in SINKS]:
        raise ValueError(f"log: {', '.join(unknown)}; legal: {', '.join(SINKS)}")
    if folder is None:
        return ()
    try:
        return tuple(SINKS[name](folder, facts) for name in names)
    except ImportError as error:
        raise ValueError(f"log: {error}; install it with pip install 'colossal_lite[log]'") from error


class RankLog:
    """What one rank says, in a file of its own: `with RankLog(folder, rank):` appends to `folder/rank-00003.log`.

    Lines of Python's logging from INFO on, warnings, and the traceback of an error that leaves the block, each with
    its time. What is printed stays where it was.
    """

    def __init__(self, folder: Path, rank: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._handler = logging.FileHandler(folder / f"rank-{rank:05}.log", encoding="utf-8")
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
        if error is not None:
            logging.getLogger("colossal_lite").error("ended by an error", exc_info=error)
        warnings.showwarning = self._shown
        self._logger.setLevel(self._level)
        self._logger.removeHandler(self._handler)
        self._handler.close()

    def _show(self, message: Warning | str, category: type[Warning], *rest: Any, **more: Any) -> None:
        logging.getLogger("colossal_lite").warning("%s: %s", category.__name__, message)
        self._shown(message, category, *rest, **more)
