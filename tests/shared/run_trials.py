"""Starts training runs in processes of their own, as torchrun, srun or a shell would, and looks how they end.

`TRAIN` is the script of a rank: it writes its phases, with the time of each, into `FOLDER/phases.RANK`, and stops
itself by SIGSTOP in the phase that it is told.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil

ROOT = Path(__file__).parents[2]
TRAIN = """
import json, os, signal, sys, time
from pathlib import Path
import torch
import colossal_lite as cl
from colossal_lite.distributed import progress
from colossal_lite.checkpoint.manifest import CheckpointError

folder, steps, phase, guilty, timeout_s, pause_s, saves, mesh = json.loads(sys.argv[1])
rank = int(os.environ.get("RANK", os.environ.get("SLURM_PROCID", "0")))
noted = open(f"{folder}/phases.{rank}", "a", buffering=1)

def note(value):
    noted.write(f"{time.time()!r} {value}\\n")

class Noted(progress.Progress):
    def __setattr__(self, name, value):
        super().__setattr__(name, value)
        if name == "phase":
            note(value)
            if rank == guilty and value.startswith(phase) and self.step >= 2:
                time.sleep(pause_s)
                note(f"stopped in {value}")
                os.kill(os.getpid(), signal.SIGSTOP)

def main():
    from colossal_lite.distributed import watchdog
    watchdog.Progress = Noted
    if phase == "start" and rank == guilty:
        from colossal_lite.launcher import start
        arrives = start._enter_default_group
        def stops(*args):
            note("stopped in start")
            os.kill(os.getpid(), signal.SIGSTOP)
            arrives(*args)
        start._enter_default_group = stops
    config = dict(precision="fp64", optimizer=dict(type="adamw", lr=1e-2), timeout_s=timeout_s, seed=5, **mesh)
    with cl.launch(config) as context:
        model = cl.models.GPTConfig(vocabulary=32, layers=2, heads=2, width=16, sequence=8)
        engine = cl.initialize(lambda: cl.models.GPT(model), context=context)
        engine.resume(Path(folder, "checkpoints"))
        cut = context.local_batch(4)
        while engine.steps < steps:
            tokens = torch.randint(32, (4, 9), generator=torch.Generator().manual_seed(engine.steps))
            batch = tokens[cut, :-1], tokens[cut, 1:]
            result = engine.train_step(batch)
            with open(f"{folder}/losses.{rank}", "a") as log:
                log.write(f"{result.step} {float(result.loss).hex()}\\n")
            if result.step % 2 == 0:
                engine.eval_step(batch)
            if saves and result.step % 3 == 0:
                try:
                    engine.save(Path(folder, "checkpoints"))
                except CheckpointError as error:
                    print(f"NOT SAVED: {error}", flush=True)
        weights = engine.full_state_dict() | {
            f"{name}/{key}": value for name, row in engine.full_optimizer_state().items() for key, value in row.items()
        }
        if rank == 0:
            torch.save(weights, f"{folder}/weights.pt")

if __name__ == "__main__":
    main()
"""
STORE = """
import sys, time, torch.distributed as dist
store = dist.TCPStore("127.0.0.1", int(sys.argv[1]), is_master=True, wait_for_workers=False)
time.sleep(600)
"""
"""Serves the store of a run, apart from its launcher."""
AGENT = """
import os, subprocess, sys
world_size, port, *command = sys.argv[1:]
shared = dict(
    WORLD_SIZE=world_size, LOCAL_WORLD_SIZE=world_size, MASTER_ADDR="127.0.0.1", MASTER_PORT=port,
    TORCHELASTIC_RUN_ID="trial", TORCHELASTIC_RESTART_COUNT="0", TORCHELASTIC_USE_AGENT_STORE="True",
)
def start(rank):
    return subprocess.Popen([sys.executable, *command], env=os.environ | shared | dict(RANK=rank, LOCAL_RANK=rank))
ranks = [start(str(rank)) for rank in range(int(world_size))]
print("codes", [each.wait() for each in ranks], flush=True)
"""
"""Starts ranks as torchrun's agent does, with a store that another process serves."""


@dataclass(frozen=True)
class Trial:
    """A run: where it writes, how long it is, and who stops in which phase."""

    folder: Path
    steps: int = 6
    phase: str = ""
    guilty: int = -1
    timeout_s: float = 4.0
    pause_s: float = 0.6
    """How long the guilty rank is in that phase before it stops: a beat is sent meanwhile."""
    saves: bool = True
    """Every third step. Else the main thread asks nothing of the store."""
    mesh: Mapping[str, object] | None = None

    def arguments(self) -> list[str]:
        import json

        values = [
            str(self.folder),
            self.steps,
            self.phase,
            self.guilty,
            self.timeout_s,
            self.pause_s,
            self.saves,
        ]
        return [json.dumps([*values, dict(self.mesh or {})])]

    def phases(self, rank: int) -> list[tuple[float, str]]:
        """What a rank has been in, with the time at which it came to it."""
        path = self.folder / f"phases.{rank}"
        rows = [line.split(" ", 1) for line in path.read_text().splitlines()] if path.exists() else []
        return [(float(at), phase) for at, phase in rows]


def by_srun(rank: int, world_size: int, port: int) -> dict[str, str]:
    """The environment of a rank of srun: rank 0 serves the store."""
    return {
        "SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank), "SLURM_NTASKS": str(world_size),
        "SLURM_TASKS_PER_NODE": str(world_size), "SLURM_NODELIST": "here", "SLURM_JOB_ID": "9",
        "SLURM_STEP_ID": "0", "MASTER_PORT": str(port),
    }  # fmt: skip


@contextmanager
def processes(
    script: Path, commands: Sequence[tuple[Sequence[str], Mapping[str, str]]]
) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Start each command with its environment; what it prints goes to `FOLDER/printed.NUMBER` beside the script. At the
    end all of them, and all that they have started, are killed."""
    taken = ("SLURM", "OMPI", "RANK", "WORLD", "GLOO", "TORCHELASTIC", "MASTER", "LOCAL_")
    clean = {key: value for key, value in os.environ.items() if not key.startswith(taken)}
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    clean |= {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    started: list[subprocess.Popen[bytes]] = []
    try:
        for number, (command, environ) in enumerate(commands):
            with open(script.with_name(f"printed.{number}"), "wb") as printed:
                started.append(
                    subprocess.Popen(command, env=clean | dict(environ), stdout=printed, stderr=printed)
                )
        yield started
    finally:
        for process in [*started, *ranks_of(script)]:
            process.kill()
        for each in started:
            each.wait()


def ranks_of(script: Path) -> list[psutil.Process]:
    """Processes that run this script, by whomever they were started, but no launchers."""
    found = []
    for process in psutil.process_iter(["cmdline", "status"]):
        command = process.info["cmdline"] or []
        is_rank = str(script) in command[1:3] and process.info["status"] != psutil.STATUS_ZOMBIE
        if is_rank and "torch.distributed.run" not in command:
            found.append(process)
    return found


def ends_within(process: subprocess.Popen[bytes], limit_s: float) -> int | None:
    """The exit code of a process; None if it still runs after `limit_s`."""
    try:
        return process.wait(limit_s)
    except subprocess.TimeoutExpired:
        return None


def wait_for(condition: object, limit_s: float, what: str) -> float:
    """Wait until `condition()` holds; when that was, by `time.time`. Raises TimeoutError with `what`."""
    end = time.monotonic() + limit_s
    assert callable(condition)
    while not condition():
        if time.monotonic() > end:
            raise TimeoutError(f"{what}: not within {limit_s:g} s")
        time.sleep(0.02)
    return time.time()


def write_script(folder: Path) -> Path:
    """`TRAIN` in a file of this folder."""
    path = folder / "train_trial.py"
    path.write_text(TRAIN)
    return path


def torchrun(script: Path, trial: Trial, world_size: int) -> tuple[list[str], dict[str, str]]:
    """The command of a run under torchrun."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    return [*command, "--nproc-per-node", str(world_size), str(script), *trial.arguments()], {}


def srun(script: Path, trial: Trial, world_size: int, port: int) -> list[tuple[list[str], dict[str, str]]]:
    """The commands of all ranks of a run as srun starts them."""
    command = [sys.executable, str(script), *trial.arguments()]
    return [(command, by_srun(rank, world_size, port)) for rank in range(world_size)]


def agent(script: Path, trial: Trial, world_size: int, port: int) -> list[tuple[list[str], dict[str, str]]]:
    """The commands of a run whose launcher and whose store are processes apart."""
    command = [sys.executable, "-c", AGENT, str(world_size), str(port), str(script), *trial.arguments()]
    return [(command, {}), ([sys.executable, "-c", STORE, str(port)], {})]
