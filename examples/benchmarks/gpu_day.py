"""Runs the first day on a GPU: smoke of every mode, kernel tests, steps, kernels and offload, each within its minutes.

    PYTHONPATH=. python examples/benchmarks/gpu_day.py --part 1 --minutes 9 --out day      (then --part 2 to 6)
    PYTHONPATH=. python examples/benchmarks/gpu_day.py --dry-run --out day                 (any machine: tiny sizes)

    1  smoke     every mode trains, evaluates, saves and loads on one device (benchmarks/smoke.py): waits told
    2  tests     tests/gpu/test_kernels_gpu.py, by several processes at once
    3  step      a whole step beside eager and compiled PyTorch (benchmarks/gpu_step.py)
    4  kernels   every kernel beside its peers (benchmarks/gpu_kernels.py)
    5  offload   state on the host (benchmarks/gpu_offload.py)
    6  larger    6 B in 11 GiB, and eight adapters over one base of 6.7 B (gpu_offload.py, many_models.py)

Needed are torch and triton, the pure Python wheels of pytest for part 2, and for parts 1, 3 and 5 what docs/gpu-day.md
names.  `--minutes` are those of each part.  OUT/part1.json is rewritten after each row, so a part that is cut short is
a shorter part; OUT/part1.log holds what its processes said.  The end is a table, and exit code 1 if a row is wrong.
A dry run takes kernels through Triton's interpreter.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from gpu_step import setting

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
GPU_TESTS = "tests/gpu/test_kernels_gpu.py"
INTERPRETED, QUICK = "tests/interpreted/test_ops.py", ("[rms_norm 128]", "[sgd 1 ")
HIDDEN = ("CUDA_VISIBLE_DEVICES=", "TRITON_INTERPRET=1")
"""A dry run is one of the CPU wherever it runs."""
ROW_S = 120.0
"""The longest that one row of parts 1 and 2 may take; then its process is ended, and the next row has a new one."""
MARK = "ROW "


@dataclass(frozen=True)
class Row:
    """One result. `wrong`: the numbers are; `failed`: there are none, and `note` says why."""

    name: str
    verdict: Literal["ok", "wrong", "failed", "left out"]
    note: str = ""
    numbers: dict[str, Any] = field(default_factory=dict)


@dataclass
class Part:
    """One part of the day: its rows so far, where they go, and until when."""

    number: int
    title: str
    out: Path
    end_s: float
    tiny: bool
    rows: list[Row] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def left_s(self) -> float:
        return self.end_s - time.monotonic()

    def add(self, row: Row) -> None:
        with self._lock:
            self.rows.append(row)
            print(f"{self.number} {line(row)}", flush=True)
            self.write()

    def write(self) -> None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
        found = {"part": self.title, "setting": setting(device), "rows": [asdict(row) for row in self.rows]}
        written = self.out / f"part{self.number}.new"
        written.write_text(json.dumps(found, indent=1))
        written.replace(self.out / f"part{self.number}.json")  # whole, whenever the machine ends

    @contextmanager
    def process(self, command: Sequence[str]) -> Iterator[subprocess.Popen[str]]:
        """A process of its own group, ended with all below it. What it says goes to the log or is read."""
        with (self.out / f"part{self.number}.log").open("a") as log:
            started = subprocess.Popen(
                [*in_root(*HIDDEN * self.tiny), *command], cwd=ROOT, text=True, start_new_session=True,
                stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=log,
            )  # fmt: skip
        try:
            yield started
        finally:
            with suppress(ProcessLookupError):
                os.killpg(started.pid, signal.SIGKILL)
            started.wait()

    def log(self, text: str) -> None:
        with self._lock, (self.out / f"part{self.number}.log").open("a") as log:
            log.write(text)


def line(row: Row) -> str:
    numbers = "  ".join(f"{name} {short(value)}" for name, value in row.numbers.items())
    return f"{row.verdict:8} {row.name:44} {numbers} {row.note}".rstrip()


def short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


# --------------------------------------------------------------------------------------- rows in processes of their own


def in_processes(
    part: Part, names: Sequence[str], jobs: int, command: Callable[[Sequence[str]], Sequence[str]],
    read: Callable[[str], Row | None],
) -> None:  # fmt: skip
    """Rows `names`, shared out over `jobs` processes at once. `read`: the row that a line of theirs tells, if any."""
    with ThreadPoolExecutor(jobs) as pool:
        shares = [list(names[job::jobs]) for job in range(jobs)]
        for each in [pool.submit(in_turn, part, share, command, read) for share in shares]:
            each.result()


def in_turn(
    part: Part, names: list[str], command: Callable[[Sequence[str]], Sequence[str]],
    read: Callable[[str], Row | None],
) -> None:  # fmt: skip
    """One process after another: a row that ends its process, or that takes too long, is a row that says so."""
    while names:
        if part.left_s < 5:
            for name in names:
                part.add(Row(name, "left out", "no time left"))
            return
        limit_s = min(ROW_S, part.left_s)
        with part.process(command(names)) as running:
            late = threading.Timer(limit_s, kill, [running])
            late.start()
            assert running.stdout is not None
            for text in running.stdout:
                part.log(text)
                row = read(text)
                if row is not None and row.name in names:
                    names.remove(row.name)
                    part.add(row)
                    late.cancel()
                    late = threading.Timer(min(ROW_S, max(0.0, part.left_s)), kill, [running])
                    late.start()
            late.cancel()
            code = running.wait()
        if names and code:
            why = "not done in time" if code == -signal.SIGKILL else f"its process ended with {code}"
            part.add(Row(names.pop(0), "failed", f"{why}; see part{part.number}.log"))
        elif names:
            part.add(Row(names.pop(0), "failed", f"not told; see part{part.number}.log"))


def kill(running: subprocess.Popen[str]) -> None:
    with suppress(ProcessLookupError):
        os.killpg(running.pid, signal.SIGKILL)


def smoke(part: Part) -> None:
    """Each process trains one mode after another."""
    tiny = ["--tiny"] * part.tiny
    jobs = 1 if part.tiny else 4
    threads = max(1, (os.cpu_count() or 1) // jobs)  # else each takes all cores for the run in float64
    command = ["env", f"OMP_NUM_THREADS={threads}", sys.executable, str(HERE / "smoke.py"), *tiny]
    try:
        names = importlib.import_module("smoke").modes(tiny=part.tiny)
    except ImportError as error:
        return part.add(Row("smoke", "failed", f"{error}; legal: the packages that docs/gpu-day.md names"))

    def read(text: str) -> Row | None:
        return Row(**json.loads(text.removeprefix(MARK))) if text.startswith(MARK) else None

    in_processes(part, names, jobs, lambda names: [*command, *names], read)


def in_root(*more: str) -> list[str]:
    """The command `env` with what every process of a day is given: our sources before what this one imports."""
    path = os.pathsep.join(map(os.path.abspath, (str(ROOT), *sys.path[1:])))
    return ["env", f"PYTHONPATH={path}", "PYTHONUNBUFFERED=1", "PYTEST_ADDOPTS=", *more]


def kernel_tests(part: Part) -> None:
    """Tests of kernels, compiled by as many processes at once as there are cores for."""
    pytest = [sys.executable, "-m", "pytest", "--noconftest", "-p", "no:cacheprovider", "-W", "ignore"]
    listed = subprocess.run(
        [*in_root(*HIDDEN * part.tiny), *pytest, "--collect-only", "-q", INTERPRETED if part.tiny else GPU_TESTS],
        cwd=ROOT, capture_output=True, text=True,
    )  # fmt: skip
    names = [text for text in listed.stdout.splitlines() if "::" in text]
    names = [name for name in names if not part.tiny or any(quick in name for quick in QUICK)]
    if not names:
        part.log(listed.stdout + listed.stderr)
        last = (listed.stdout + listed.stderr).strip().splitlines()
        return part.add(Row("kernel tests", "failed", last[-1] if last else "pytest said nothing"))
    jobs = 1 if part.tiny else max(1, min(12, (os.cpu_count() or 1) - 2))
    in_processes(part, names, jobs, lambda some: [*pytest, "-v", "--tb=short", *some], verdict)


def verdict(text: str) -> Row | None:
    """What pytest -v says of a test when it has ended."""
    told = re.match(r"(tests/\S+::.*?) (PASSED|FAILED|ERROR|SKIPPED)(.*)", text)
    if told is None:
        return None
    verdicts: dict[str, Any] = {"PASSED": "ok", "FAILED": "wrong", "ERROR": "failed", "SKIPPED": "left out"}
    return Row(told[1], verdicts[told[2]], told[3].partition("[")[0].strip() if told[2] == "SKIPPED" else "")


# ------------------------------------------------------------------------------------------------- other benchmarks


def benchmark(
    part: Part, script: str, options: Sequence[str], row_of: Callable[[dict[str, Any]], Row]
) -> None:
    """A script of this folder that rewrites a JSON file after each of its rows."""
    told, seen = part.out / f"{Path(script).stem}.json", 0
    told.unlink(missing_ok=True)
    with part.process([sys.executable, str(HERE / script), "--out", str(told), *options]) as running:
        assert running.stdout is not None
        threading.Thread(
            target=lambda: [part.log(text) for text in running.stdout or ()], daemon=True
        ).start()
        while True:
            code = running.poll()
            with suppress(OSError, json.JSONDecodeError):  # not there yet, or half written
                rows = json.loads(told.read_text())["rows"]
                for row in rows[seen:]:
                    part.add(row_of(row))
                seen = len(rows)
            if code is not None or part.left_s < 0:
                break
            time.sleep(0.2)
    if code is None:
        part.add(Row(script, "left out", f"ended by the clock after {seen} rows"))
    elif code and not any(row.verdict == "wrong" for row in part.rows):
        part.add(Row(script, "failed", f"ended with {code}; see part{part.number}.log"))


def step(part: Part) -> None:
    def row_of(told: dict[str, Any]) -> Row:
        numbers = {n: told[n] for n in ("step_ms", "tokens_per_s", "mfu", "peak_gib", "loss")}
        name = f"{told['model']} {told['side']}"
        return Row(name, "left out" if told["note"] else "ok", told["note"], {} if told["note"] else numbers)

    benchmark(part, "gpu_step.py", ["--dry-run"] * part.tiny, row_of)


def kernels(part: Part) -> None:
    def row_of(told: dict[str, Any]) -> Row:
        shares = {side: told["rate"][side] for side in told["ms"]}
        is_wrong = "WRONG" in told["note"]
        kind: Any = "wrong" if is_wrong else "ok" if told["ms"] else "left out"
        return Row(told["name"], kind, told["note"], shares | {"in": told["unit"]})

    options = ["--dry-run"] if part.tiny else ["--minutes", f"{part.left_s / 60 - 0.2:.2f}"]
    benchmark(part, "gpu_kernels.py", options, row_of)


def offload(part: Part) -> None:
    def row_of(told: dict[str, Any]) -> Row:
        shown = ("step_ms", "forward_ms", "backward_ms", "update_ms", "tokens_per_s", "device_gib", "host_gib",
                 "waited_ms", "loss")  # fmt: skip
        numbers = {name: told[name] for name in shown}
        name = f"{told['model']} {told['side']}"
        return Row(name, "left out" if told["note"] else "ok", told["note"], {} if told["note"] else numbers)

    tiny = ["--tiny", "--warm", "1", "--steps", "1", "--sides", "device", "ours host"]
    benchmark(part, "gpu_offload.py", tiny if part.tiny else ["--seconds", f"{part.left_s - 15:.0f}"], row_of)


def larger(part: Part) -> None:
    """Models larger than what torch may allocate: one by stages, and adapters through one loaded base."""

    def row_of(told: dict[str, Any]) -> Row:
        shown = (
            "step_ms",
            "over_busiest",
            "tokens_per_s",
            "device_gib",
            "host_gib",
            "up_gib",
            "down_gib",
            "waited_ms",
        )
        numbers = {name: told[name] for name in shown} | {"lanes": told["lanes"]}
        name = f"{told['model']} {told['side']}"
        return Row(name, "left out" if told["note"] else "ok", told["note"], {} if told["note"] else numbers)

    def adapters(told: dict[str, Any]) -> Row:
        return Row(
            "adapters", "ok", numbers={name: told[name] for name in ("billions", "all_s", "one_s", "gain")}
        )

    size = ["--tiny"] if part.tiny else ["--models", "6B in 11GiB", "--seconds", f"{part.left_s - 15:.0f}"]
    stages = ["--sides", "ours stages", "--warm", "1", "--steps", "2"]
    benchmark(part, "gpu_offload.py", [*size, *stages], row_of)
    benchmark(part, "many_models.py", ["adapters", *["--tiny"] * part.tiny], adapters)


PARTS: dict[int, tuple[str, Callable[[Part], None]]] = {
    1: ("smoke", smoke),
    2: ("kernel tests", kernel_tests),
    3: ("step", step),
    4: ("kernels", kernels),
    5: ("offload", offload),
    6: ("larger", larger),
}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--part", type=int, nargs="*", default=list(PARTS), choices=list(PARTS))
    parser.add_argument("--minutes", type=float, default=9.0, help="of each part")
    parser.add_argument("--out", type=Path, default=Path("gpu_day"), help="the folder of JSON files and logs")
    parser.add_argument("--dry-run", action="store_true", help="tiny sizes, on the CPU; any machine")
    arguments = parser.parse_args()
    if not torch.cuda.is_available() and not arguments.dry_run:
        print("gpu_day: no CUDA device is visible; legal here: --dry-run", file=sys.stderr)
        return 2
    out = arguments.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    parts = []
    for number in arguments.part:
        title, run = PARTS[number]
        (out / f"part{number}.log").unlink(missing_ok=True)
        end_s = time.monotonic() + 60 * arguments.minutes
        parts.append(Part(number, title, out, end_s, arguments.dry_run))
        parts[-1].write()
        run(parts[-1])
    print(table(parts), f"files in {out}", sep="\n", flush=True)
    bad = any(row.verdict in ("wrong", "failed") for part in parts for row in part.rows)
    return int(bad or not all(part.rows for part in parts))


def table(parts: Sequence[Part]) -> str:
    """Rows of each part by verdict, and each row that is not ok."""
    verdicts = ("ok", "wrong", "failed", "left out")
    lines = ["", f"{'part':16}" + "".join(f"{verdict:>10}" for verdict in verdicts)]
    for part in parts:
        counts = [sum(row.verdict == verdict for row in part.rows) for verdict in verdicts]
        lines.append(f"{part.number} {part.title:14}" + "".join(f"{count:>10}" for count in counts))
    lines += [f"{part.number} {line(row)}" for part in parts for row in part.rows if row.verdict != "ok"]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
