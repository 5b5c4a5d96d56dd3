"""What a run shows: deterministic rows apart from timings, a line for people, a timeline for viewers."""

from __future__ import annotations

import gc
import io
import itertools
import json
import math
import os
import resource
import subprocess
import sys
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
from rich.console import Console
from torch import Tensor

from colossal_lite.observe.dropped_rows import JsonLines
from colossal_lite.observe.flops import peak_flops
from colossal_lite.observe.printed_lines import tell
from colossal_lite.observe.run_log import (
    RankLog,
    RunLog,
    Scale,
    StepRow,
    TimingRow,
    duration,
    progress_line,
    steps_a_line,
)
from colossal_lite.observe.sinks import run_sinks
from colossal_lite.observe.timeline import LogTimeline, memory_bytes

CPU = torch.device("cpu")
ROOT = Path(__file__).parents[2]
SCALE = Scale(bytes_per_token=1)


@dataclass
class Result:
    step: int
    loss: Tensor
    grad_norm: float = 0.5
    tokens: int = 1000
    skipped: bool = False
    lr: float = 1e-3


class Ticks:
    """A clock that moves when it is told to."""

    def __init__(self) -> None:
        self.now_ns = 0

    def __call__(self) -> int:
        return self.now_ns


def run(
    folder: Path | None, *, steps: int = 25, step_ms: int = 100, terminal: bool = False, **options: Any
) -> str:
    """What a run prints of `steps` steps of `step_ms`, with an evaluation of ten seconds after step 3."""
    clock, out = Ticks(), io.StringIO()
    console = Console(file=out, force_terminal=terminal, width=200, highlight=False, soft_wrap=True)
    options = {"scale": SCALE, "device": CPU, "total_steps": steps, **options}
    with RunLog(folder, console=console, clock=clock, **options) as log:
        for step in range(1, steps + 1):
            with log.timeline.span("step"):
                clock.now_ns += step_ms * 10**6
            log.step(Result(step, torch.tensor(1 / step, dtype=torch.float64)), sent_bytes=3 * 2**20)
            if step == 3:
                clock.now_ns += 10**10
                log.evaluated(step, 2.0)
    return out.getvalue()


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_metrics_hold_one_row_a_step_and_nothing_that_a_clock_or_the_memory_decides(tmp_path: Path) -> None:
    run(tmp_path / "a", step_ms=100)
    run(tmp_path / "b", step_ms=37)
    metrics = (tmp_path / "a" / "metrics.jsonl").read_bytes()
    assert metrics == (tmp_path / "b" / "metrics.jsonl").read_bytes()
    found = rows(tmp_path / "a" / "metrics.jsonl")
    assert [row["step"] for row in found] == list(range(1, 26))
    assert found[2] == {
        "step": 3,
        "loss": 1 / 3,
        "bits_per_byte": 1 / 3 / math.log(2),
        "grad_norm": 0.5,
        "lr": 1e-3,
        "tokens": 1000,
        "skipped": False,
        "sent_bytes": 3 * 2**20,
    }
    timings = [rows(tmp_path / run / "timing.jsonl") for run in "ab"]
    assert timings[0] != timings[1] and [len(t) for t in timings] == [25, 25]


def test_time_of_evaluation_counts_for_no_step(tmp_path: Path) -> None:
    run(tmp_path, step_ms=100)
    timing = rows(tmp_path / "timing.jsonl")
    assert [row["step_s"] for row in timing] == pytest.approx([0.1] * 25)
    assert [row["tokens_per_s"] for row in timing] == pytest.approx([10_000] * 25)
    assert rows(tmp_path / "evaluation.jsonl") == [{"step": 3, "loss": 2.0, "bits_per_byte": 2 / math.log(2)}]


@pytest.mark.parametrize("step_ms", [1, 700])
def test_off_a_terminal_there_are_plain_lines_for_the_first_step_the_last_and_round_numbers_between(
    step_ms: int, tmp_path: Path
) -> None:
    lines = run(tmp_path, steps=250, step_ms=step_ms).splitlines()
    assert [line.split("  loss")[0] for line in lines] == [
        "step   1/250",
        "step 3: held-out loss 2.0000, 2.885 bits/byte",
        *(f"step {step:>3}/250" for step in range(20, 251, 20)),
        "step 250/250",
    ]
    assert f"{1000 / step_ms * 1000:,.0f} tok/s  {duration(230 * step_ms / 1000)} left" in lines[2]
    assert not any("\x1b" in line for line in lines) and max(map(len, lines)) < 200


def test_off_a_terminal_slow_steps_have_a_line_a_minute(tmp_path: Path) -> None:
    lines = run(tmp_path, steps=7, step_ms=25_000, total_steps=2000).splitlines()
    assert [line.split("  loss")[0] for line in lines if "held-out" not in line] == [
        f"step {step:>4}/2000" for step in (1, 4, 7)
    ]


@pytest.mark.parametrize(
    "total, each",
    [(None, 10), (3, 1), (20, 1), (21, 2), (40, 2), (100, 5), (1000, 50), (1001, 100), (10**6, 100)],
)
def test_a_line_stands_for_a_round_number_of_steps(total: int | None, each: int) -> None:
    assert steps_a_line(total) == each


def test_on_a_terminal_one_line_moves_and_ends_at_the_last_step(tmp_path: Path) -> None:
    text = run(tmp_path, steps=25, terminal=True)
    assert "\x1b[2K" in text and "step 25/25" in text.splitlines()[-2]
    assert text.count("held-out loss 2.0000") == 1
    drawn = {step for step in range(1, 26) if f"step {step:>2}/25" in text}
    assert {1, 25} <= drawn and len(drawn) < 13, "redrawn at most every 0.25 s, and steps take 0.1 s"


def test_a_rank_without_a_folder_shows_and_writes_nothing() -> None:
    assert run(None) == ""


def test_rows_are_on_disk_before_the_run_ends(tmp_path: Path) -> None:
    with RunLog(tmp_path, total_steps=9, scale=SCALE, device=CPU, console=Console(file=io.StringIO())) as log:
        log.step(Result(1, torch.tensor(1.0)), sent_bytes=0)
        assert len(rows(tmp_path / "metrics.jsonl")) == len(rows(tmp_path / "timing.jsonl")) == 1


def test_numbers_that_are_not_finite_are_null_in_json(tmp_path: Path) -> None:
    file = JsonLines(tmp_path / "x.jsonl")
    file.write({"nan": math.nan, "inf": -math.inf, "one": 1.5, "text": "é"})
    file.close()
    assert rows(tmp_path / "x.jsonl") == [{"nan": None, "inf": None, "one": 1.5, "text": "é"}]


ROW = StepRow(7, 2.0, 2.885, 0.25, 1e-3, 1000, False, 5 * 2**20)
TIMING = TimingRow(7, 0.1, 12_345.6, None, 512 * 2**20)


def test_the_progress_line_says_what_a_person_asks() -> None:
    assert progress_line(ROW, TIMING, 600, 200) == (
        "step   7/600  loss 2.0000  12,346 tok/s  0:59 left  2.885 bits/byte  lr 1.00e-03  mem 512 MiB  norm 0.25  "
        "sent 5.0 MiB"
    )
    busy = progress_line(replace(ROW, skipped=True), replace(TIMING, mfu=0.4567), None, 200)
    assert busy.startswith("step 7  loss 2.0000 SKIPPED  12,346 tok/s  2.885 bits/byte  mfu 45.7%")


@pytest.mark.parametrize("width", [70, 79, 100])
def test_the_progress_line_fits_its_terminal_with_step_loss_rate_and_time_left(width: int) -> None:
    long = replace(ROW, step=123_456, loss=12.3456)
    line = progress_line(long, replace(TIMING, step_s=1.5, tokens_per_s=9_876_543.2), 500_000, width)
    assert len(line) <= width
    assert line.startswith("step 123456/500000  loss 12.3456  9,876,543 tok/s  156:53:36 left")


def test_mfu_is_the_share_of_the_peak_that_the_model_used(tmp_path: Path) -> None:
    run(tmp_path, step_ms=100, scale=Scale(flops_per_token=6e9, peak_flops=120e12))
    assert [row["mfu"] for row in rows(tmp_path / "timing.jsonl")] == pytest.approx([0.5] * 25)


def test_bits_per_byte_take_the_length_of_a_token_into_account() -> None:
    assert Scale(bytes_per_token=4).bits_per_byte(math.log(16)) == pytest.approx(1)


@pytest.mark.parametrize(
    ("name", "dtype", "tflops"),
    [
        ("NVIDIA H200", "bf16", 989),
        ("NVIDIA H100 80GB HBM3", "fp16", 989),
        ("NVIDIA H100 PCIe", "bf16", 756),
        ("NVIDIA A100-SXM4-80GB", "bf16", 312),
        ("NVIDIA A100-SXM4-80GB", "fp32", 19.5),
        ("NVIDIA L4", "bf16", 121),
        ("NVIDIA L40S", "bf16", 362),
        ("NVIDIA L40", "bf16", None),
        ("Tesla V100-SXM2-16GB", "fp16", 125),
        ("NVIDIA H200", "fp64", None),
        ("NVIDIA A1000 Laptop GPU", "bf16", None),
        ("some accelerator", "bf16", None),
    ],
)
def test_peaks_are_known_by_the_name_of_the_device_or_not_at_all(
    name: str, dtype: str, tflops: float | None
) -> None:
    assert peak_flops(name, dtype) == (tflops * 1e12 if tflops else None)


def test_a_timeline_is_a_chrome_trace_with_a_thread_per_track(tmp_path: Path) -> None:
    ticks = itertools.count(0, 1000)
    timeline = LogTimeline(clock=lambda: next(ticks))
    with timeline.span("outer"), timeline.span("inner", track="comm"):
        pass
    with pytest.raises(KeyError), timeline.span("failed"):
        raise KeyError
    timeline.mark("after", CPU)
    timeline.export(tmp_path / "trace.json", rank=3)
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    threads = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    spans = {e["name"]: (threads[e["tid"]], e["ts"], e["dur"]) for e in events if e["ph"] == "X"}
    assert spans == {"outer": ("main", 0, 3), "inner": ("comm", 1, 1), "failed": ("main", 4, 1)}
    assert {e["pid"] for e in events} == {3}
    counters = [e["args"]["bytes"] for e in events if e["ph"] == "C"]
    assert len(counters) == 1 and counters[0] > 10 * 2**20


def test_a_timeline_keeps_the_newest_spans_of_a_long_run() -> None:
    timeline = LogTimeline(limit=3)
    for i in range(10):
        with timeline.span(str(i)):
            pass
    assert [span.name for span in timeline.spans] == ["7", "8", "9"]


def test_memory_of_a_cpu_rank_is_what_is_resident() -> None:
    gc.collect()  # what the tests before left would go in the middle of it
    before = memory_bytes(CPU)
    held = torch.ones(256 * 2**20, dtype=torch.uint8)
    assert memory_bytes(CPU) - before > 0.8 * held.numel()
    assert memory_bytes(CPU) == pytest.approx(psutil.Process().memory_info().rss, rel=0.05)


def test_rows_after_the_resumed_step_are_written_again(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": 2}\n{"step": 3}\n{"step": 4')  # the last one cut short by a kill
    rows = JsonLines(path, keep_step=2)
    rows.write({"step": 3, "again": True})
    rows.close()
    assert path.read_text() == '{"step": 1}\n{"step": 2}\n{"step": 3, "again": true}\n'
    JsonLines(path).close()
    assert path.read_text() == ""


@pytest.mark.parametrize("damaged", [b"\xff\xfe", b"[1]", b'{"a": 1}', b'{"step": "x"}', b"{", b"\0\0"])
def test_rows_that_no_run_wrote_are_left_out_and_those_behind_them_stay(
    tmp_path: Path, damaged: bytes
) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1}\n' + damaged + b'\n{"step": 2}\n')
    JsonLines(path, keep_step=2).close()
    assert path.read_text() == '{"step": 1}\n{"step": 2}\n'


class Kept:
    """A sink that keeps what it is given."""

    def __init__(self) -> None:
        self.rows: list[tuple[str, int, dict[str, Any]]] = []
        self.is_closed = False

    def write(self, group: str, step: int, values: Mapping[str, Any]) -> None:
        self.rows.append((group, step, dict(values)))

    def close(self) -> None:
        self.is_closed = True


def test_sinks_get_every_number_and_are_closed(tmp_path: Path) -> None:
    kept = Kept()
    with RunLog(tmp_path, total_steps=1, scale=Scale(), device=torch.device("cpu"), also=[kept]) as log:
        log.step(Result(1, torch.tensor(0.5), grad_norm=2.0), 3)
        log.evaluated(1, 0.25)
    (train, _, values), (held_out, step, evaluated) = kept.rows
    assert (train, held_out, step) == ("train", "held_out", 1) and kept.is_closed
    assert values["loss"] == 0.5 and values["grad_norm"] == 2.0 and values["tokens_per_s"] > 0
    assert evaluated["loss"] == 0.25


def test_tensorboard_and_offline_wandb_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither need be installed: what they are called with is looked at."""
    calls: list[Any] = []
    writer = SimpleNamespace(add_scalar=lambda *a: calls.append(a), close=lambda: calls.append("closed"))

    def told(what: Any, made: Any) -> Any:
        calls.append(what)
        return made

    board = SimpleNamespace(SummaryWriter=lambda folder, purge_step: told((folder, purge_step), writer))
    run = SimpleNamespace(
        log=lambda values, step: calls.append((values, step)), finish=lambda: calls.append("done")
    )
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", board)
    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=lambda **k: told(k, run), Settings=dict))
    for sink in run_sinks(("tensorboard", "wandb"), tmp_path, {"seed": 1}, resumed_step=2):
        sink.write("train", 3, {"step": 3, "loss": 0.5, "mfu": None, "skipped": False})
        sink.close()
    folder, facts, loss, skipped, closed, row, done = calls
    assert folder == (str(tmp_path / "tensorboard"), 3) and (closed, done) == ("closed", "done")
    assert (
        facts["mode"] == "offline"
        and facts["dir"] == str(tmp_path)
        and facts["config"] == {"seed": 1, "resumed_step": 2}
    )
    assert (loss, skipped) == (("train/loss", 0.5, 3), ("train/skipped", 0.0, 3))
    assert row == ({"train/loss": 0.5, "train/skipped": 0.0}, 3)


@pytest.mark.parametrize("resumed", [0, 4])
def test_tensorboard_hides_what_an_earlier_start_wrote_after_the_step_it_resumes_from(
    resumed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hidden: list[int] = []
    board = SimpleNamespace(SummaryWriter=lambda folder, purge_step: hidden.append(purge_step))
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", board)
    run_sinks("tensorboard", tmp_path, {}, resumed_step=resumed)
    assert hidden == [resumed + 1]


LOGGED_TWICE = """
import sys, torch
from pathlib import Path
from colossal_lite.observe.run_log import RunLog, Scale
from colossal_lite.observe.sinks import run_sinks
from tests.observe.test_run_log import CPU, Result
for resumed, steps in ((0, (1, 2, 3)), (2, (3, 4))):  # killed after step 3, saved after step 2
    also = run_sinks(("tensorboard", "wandb"), Path(sys.argv[1]), {"seed": 1}, resumed)
    with RunLog(Path(sys.argv[1]), total_steps=4, scale=Scale(), device=CPU, resumed_step=resumed, also=also) as log:
        for step in steps:
            log.step(Result(step, torch.tensor(step + 10.0 * resumed)), sent_bytes=3)
"""


@pytest.mark.campaign  # importing both packages takes longer than what is tested
def test_the_real_packages_get_the_rows_of_the_files_and_a_resumed_run_has_each_step_once(
    tmp_path: Path,
) -> None:
    """In a process of its own: the service of wandb ends with it."""
    events = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    pytest.importorskip("wandb")
    command = [sys.executable, "-c", LOGGED_TWICE, str(tmp_path)]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0 and "wandb" not in ended.stdout + ended.stderr, ended
    found = events.EventAccumulator(str(tmp_path / "tensorboard"))
    found.Reload()
    written = rows(tmp_path / "metrics.jsonl")
    assert [row["step"] for row in written] == [1, 2, 3, 4]
    for name in ("loss", "grad_norm", "lr", "tokens", "skipped", "sent_bytes"):
        scalars = [(event.step, event.value) for event in found.Scalars(f"train/{name}")]
        assert scalars == [(row["step"], pytest.approx(float(row[name]))) for row in written]
    offline = [path.read_bytes() for path in (tmp_path / "wandb").glob("offline-run-*/*.wandb")]
    assert len(offline) == 2 and all(
        b"train/loss" in each and b"train/tokens_per_s" in each for each in offline
    )


def test_sinks_that_cannot_be_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ValueError, match=r'pip install -e "\.\[log\]"'):
        run_sinks(("wandb",), tmp_path, {})
    with pytest.raises(ValueError, match="log: mlflow; legal: tensorboard, wandb"):
        run_sinks(("mlflow",), tmp_path, {})
    assert run_sinks(("wandb",), None, {}) == ()
    assert run_sinks("wandb", None, {}) == ()  # one name
    for given, found in ((None, "None; legal: a list of names"), ([3], "3; legal: tensorboard, wandb")):
        with pytest.raises(ValueError, match=f"log: {found}"):
            run_sinks(given, None, {})  # type: ignore[arg-type]


def test_each_rank_has_a_log_of_its_own(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError), RankLog(tmp_path, 3) as log:
        log.info("at work")
        raise RuntimeError("lost")
    text = (tmp_path / "rank-00003.log").read_text()
    assert "rank 3 colossal_lite INFO: at work" in text
    assert "ended by an error" in text and "RuntimeError: lost" in text
    with pytest.warns(UserWarning), RankLog(tmp_path, 3):
        warnings.showwarning("and here", UserWarning, "file", 1)
        warnings.warn("for pytest", stacklevel=1)
    assert "UserWarning: and here" in (tmp_path / "rank-00003.log").read_text()


@contextmanager
def full_disk(room: int) -> Iterator[None]:
    """No file may grow beyond `room` bytes."""
    old = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, old[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, old)


def test_a_full_disk_drops_rows_that_are_counted_and_told_and_ends_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    class Full:
        def write(self, group: str, step: int, values: Mapping[str, Any]) -> None:
            raise OSError(28, "No space left on device")

        def close(self) -> None:
            raise OSError(28, "No space left on device")

    with full_disk(700), RankLog(tmp_path / "logs", 1) as logger:
        said = run(tmp_path, also=[Full()])
        for _ in range(100):
            logger.info("a line of some length that fills the file of this rank")
    found = rows(tmp_path / "metrics.jsonl")
    assert 0 < len(found) < 25 and [row["step"] for row in found] == [*range(1, len(found) + 1)]
    assert "step 25/25" in said and said.count("log: rows are dropped, the run goes on: ") == 1
    count = int(said.split(" rows were dropped: ")[0].split()[-1])
    assert count > 25 + 25 - len(found), "rows of the sink, of metrics, of timing"
    assert "rank 1: log: " in (told := capsys.readouterr().err) and " rows were dropped: " in told


def test_a_run_goes_on_where_the_reader_of_its_lines_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, theirs = os.pipe()
    os.close(ours)
    with os.fdopen(theirs, "w") as closed:
        monkeypatch.setattr(sys, "stdout", closed)
        with RunLog(tmp_path, scale=SCALE, device=CPU, total_steps=3) as log:
            for step in range(1, 4):
                log.step(Result(step, torch.tensor(1.0)), sent_bytes=0)
        print("a line of the script itself", flush=True)
    assert len(rows(tmp_path / "metrics.jsonl")) == 3


@pytest.mark.parametrize("name", ["full", "closed"])
def test_a_line_that_standard_output_does_not_take_goes_to_standard_error(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Refuses(io.StringIO):
        def write(self, text: str) -> int:
            raise BrokenPipeError if name == "closed" else OSError(28, "No space left on device")

    monkeypatch.setattr(sys, "stdout", Refuses())
    tell("saved")
    assert capsys.readouterr().err == "saved\n"


def test_a_folder_that_cannot_be_made_drops_rows_too(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with RankLog(tmp_path / "file" / "logs", 0):
        said = run(tmp_path / "file")
    assert "step 25/25" in said and "rows were dropped" in said
