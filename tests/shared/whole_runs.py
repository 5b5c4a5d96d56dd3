"""Starts whole runs under torchrun, reads how far they are, signals them, and reads how each rank has ended.

Two scripts: README's loop with checkpoints, and examples/gpt/train.py by its command line. Both are run as they are; a
few lines around them write the exit code of each rank into a file, because torchrun's own says nothing of it.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from colossal_lite.checkpoint.files import inspect, listed, verify

ROOT = Path(__file__).parents[2]
LIMIT_S = 120.0
AROUND = """
import os, runpy, sys
note, sys.argv = sys.argv[1], sys.argv[2:]
sys.path[0], code = os.path.dirname(sys.argv[0]), 1
try:
    runpy.run_path(sys.argv[0], run_name="__main__")
    code = 0
except SystemExit as ended:
    code = ended.code or 0
    raise
except Exception as error:  # as Python does: the hook tells the error, and may end the process with a code
    try:
        sys.excepthook(type(error), error, error.__traceback__)
    except SystemExit as ended:
        code = ended.code
    raise SystemExit(code)
finally:
    with open(f"{note}-{os.environ['RANK']}", "w") as file:
        file.write(f"{os.getpid()} {code}")
"""
READMES_LOOP = """
import sys

import torch
import colossal_lite as cl

config = dict(
    parallel=dict(data="auto", tensor=dict(size=1, mode="1d")),
    precision="fp32",
    optimizer=dict(type="adamw", lr=3e-4, weight_decay=0.1, groups=[dict(match="*.bias", weight_decay=0.0)]),
    lr_scheduler=dict(type="cosine", warmup_steps=10, total_steps=1000),
    clip_grad_norm=1.0,
    gradient_accumulation=2,
    seed=1024,
)
model = cl.models.GPTConfig(vocabulary=256, layers=2, heads=4, width=64, sequence=32, dropout=0.1)
text = torch.randint(256, (64, 33), generator=torch.Generator().manual_seed(0))
dataset = [(row[:-1], row[1:]) for row in text]
folder, steps = sys.argv[1], int(sys.argv[2])

with cl.launch(config) as context:
    engine = cl.initialize(lambda: cl.models.GPT(model), context=context)
    engine.resume(folder + "/checkpoints")
    for batch in context.dataloader(dataset, global_batch=8, start=engine.samples).take(steps - engine.steps):
        result = engine.train_step(batch)
        if context.is_main:
            print(result.step, float(result.loss), result.grad_norm, flush=True)
        if result.step % 10 == 0:
            engine.save(folder + "/checkpoints")
"""


@dataclass
class WholeRun:
    """One run in a folder. `kind`: "loop" or "example"; `number`: of the run in this folder, from 0."""

    kind: str
    folder: Path
    world_size: int
    steps: int
    number: int = 0
    begins_at: int = 0
    notes: Path = field(init=False)
    process: subprocess.Popen[bytes] = field(init=False)

    def __post_init__(self) -> None:
        """Its notes stand not on its disk, which may be full."""
        self.notes = self.noted(self.number)
        self.notes.mkdir(parents=True)
        self.begins_at = max((inspect(path).step for path in listed(self.checkpoints)[:1]), default=0)

    def noted(self, number: int) -> Path:
        """Where the notes of a run in this folder are."""
        return self.folder.parent.parent / f"notes of {self.folder.parent.name}" / str(number)

    @property
    def checkpoints(self) -> Path:
        return self.folder / "checkpoints"

    @property
    def command(self) -> list[str]:
        around = self.notes / "around.py"
        around.write_text(AROUND)
        if self.kind == "loop":
            script, options = self.notes / "loop.py", [str(self.folder), str(self.steps)]
            script.write_text(READMES_LOOP)
        else:
            script, text = ROOT / "examples" / "gpt" / "train.py", self.notes / "text.py"
            text.write_text("".join(f"def f{i}(x):\n    return x + {i}\n" for i in range(3000)))
            options = ["--steps", str(self.steps), "--global-batch", "4", "--data", str(text), "--out"]
            options += [str(self.folder), "--save-every", "5", "--sample", "5"]
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        torchrun += ["--signals-to-handle=SIGTERM,SIGINT,SIGHUP,SIGUSR1", "--nproc-per-node"]
        return [
            *torchrun,
            str(self.world_size),
            str(around),
            str(self.notes / "code"),
            str(script),
            *options,
        ]

    @contextmanager
    def started(self) -> Iterator[WholeRun]:
        """In a session of its own, its signals not ignored; at the end nothing of it is left."""
        clean = {key: value for key, value in os.environ.items() if not key.startswith(("RANK", "WORLD"))}
        path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
        clean |= {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
        before = signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            with open(self.notes / "printed", "wb") as printed, open(self.notes / "errors", "wb") as errors:
                self.process = subprocess.Popen(
                    self.command, env=clean, stdout=printed, stderr=errors, start_new_session=True
                )
        finally:
            signal.signal(signal.SIGINT, before)
        try:
            yield self
        finally:
            for pid in (self.process.pid, *self.ranks()):
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    continue
            self.process.wait()

    def ranks(self) -> list[int]:
        """Process numbers of its ranks that live."""
        found = {}
        for entry in Path("/proc").iterdir():
            try:
                words = (entry / "cmdline").read_bytes().split(b"\0") if entry.name.isdigit() else []
                if str(self.notes / "code").encode() in words and b"torch.distributed.run" not in words:
                    environ = (entry / "environ").read_bytes().split(b"\0")
                    rank = next((int(each[5:]) for each in environ if each.startswith(b"RANK=")), -1)
                    found[rank] = int(entry.name)
            except OSError:
                continue
        return [found[rank] for rank in sorted(found)]

    @property
    def printed(self) -> str:
        return (self.notes / "printed").read_text()

    @property
    def errors(self) -> str:
        return (self.notes / "errors").read_text()

    def step(self) -> int:
        """The last step that this run has told."""
        if self.kind == "loop":
            rows = [line.split(" ", 1)[0] for line in self.printed.splitlines(keepends=True) if "\n" in line]
            return max((int(word) for word in rows if word.isdigit()), default=0)
        path = self.folder / "timing.jsonl"
        is_of_this_run = (
            path.exists() and path.stat().st_mtime_ns > (self.notes / "around.py").stat().st_mtime_ns
        )
        lines = path.read_text().splitlines(keepends=True) if is_of_this_run else []
        return max((int(json.loads(line)["step"]) for line in lines if "\n" in line), default=0)

    def wait_until(self, step: int, then_s: float = 0.0) -> float:
        """Until it has made this step, and so much longer; the seconds of a step, as far as they are known."""
        seen: list[tuple[int, float]] = []
        self.until(lambda: self._saw(seen) >= max(step, self.begins_at + 1))
        per_step_s = 0.0
        if len(seen) > 1:
            per_step_s = (seen[-1][1] - seen[0][1]) / (seen[-1][0] - seen[0][0])
        time.sleep(then_s)
        return per_step_s

    def _saw(self, seen: list[tuple[int, float]]) -> int:
        now = self.step()
        if now > self.begins_at and (not seen or now > seen[-1][0]):
            seen.append((now, time.monotonic()))
        return now

    def until(self, holds: Callable[[], bool]) -> None:
        """Wait until it holds or the run has ended. Raises TimeoutError."""
        end = time.monotonic() + LIMIT_S
        while not holds() and self.process.poll() is None:
            if time.monotonic() > end:
                raise TimeoutError(f"run {self.notes}: {self.printed[-500:]} {self.errors[-2000:]}")
            time.sleep(0.004)

    def signal(self, number: int, to: str) -> None:
        """`to`: "agent", "rank N" or "all ranks"."""
        ranks = self.ranks()
        who = {"agent": [self.process.pid], "all ranks": ranks}.get(to)
        for pid in who if who is not None else ranks[int(to[-1]) : int(to[-1]) + 1]:
            try:
                os.kill(pid, number)
            except ProcessLookupError:
                continue

    def end(self) -> tuple[int, list[int]]:
        """Wait for it: the exit codes of torchrun and of each rank."""
        code = self.process.wait(LIMIT_S)
        return code, [self.code(rank) for rank in range(self.world_size)]

    def code(self, rank: int) -> int:
        """The exit code of a rank; 256 if it has written none: torchrun ends the ranks beside one that fails."""
        path = self.notes / f"code-{rank}"
        words = path.read_text().split() if path.exists() else []
        return int(words[1]) if words else 256

    def stopped(self) -> list[str]:
        """The lines that say that a signal has stopped it."""
        return [line for line in self.printed.splitlines() if line.startswith("stopped by ")]

    def newest(self) -> tuple[int, Path]:
        """Step and folder of the newest checkpoint, of which every byte is whole."""
        path = listed(self.checkpoints)[0]
        assert list(verify(path)) == [], path
        return inspect(path).step, path

    def numbers(self) -> dict[str, object]:
        """What the run has computed from its beginning on, over all its runs in this folder."""
        if self.kind == "loop":
            rows: dict[str, object] = {}
            for number in range(self.number + 1):
                text = (self.noted(number) / "printed").read_text()
                rows |= {line.split()[0]: line for line in text.splitlines() if line.split(" ")[0].isdigit()}
            path = self.newest()[1]
            sums = {
                name: [part.crc32 for part in stored.slices] for name, stored in inspect(path).tensors.items()
            }
            return rows | sums
        names = ("metrics.jsonl", "evaluation.jsonl", "model.safetensors")
        return {name: (self.folder / name).read_bytes() for name in names}
