"""A stop signal to a whole group of processes, as a terminal or a scheduler sends it, reaches the supervisor alone."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

SCRIPT = """
import os, signal
from pathlib import Path
import torch
from torch import nn
import colossal_lite as cl

if __name__ == "__mp_main__" and not Path("sent").exists():  # the worker begins to import this
    Path("sent").touch()
    os.killpg(os.getpgrp(), signal.SIGTERM)

def build():
    return nn.Sequential(nn.Embedding(20, 8), nn.Linear(8, 20))

def data():
    return [(row[:-1], row[1:]) for row in torch.randint(20, (64, 9))]

if __name__ == "__main__":
    tasks = [cl.Task(name, build=build, data=data, steps=10**6, global_batch=8) for name in "ab"]
    cl.train_many(tasks, config=dict(precision="fp32"), directory="out")
"""


def test_a_signal_to_the_group_while_a_worker_starts_saves_and_stops(tmp_path: Path) -> None:
    """Its worker and the fork server, which both have the signal too, stay until the tasks are saved."""
    (tmp_path / "script.py").write_text(SCRIPT)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "script.py"], cwd=tmp_path, env=environment, capture_output=True, text=True,
        timeout=240, start_new_session=True,
    )  # fmt: skip
    assert (tmp_path / "sent").exists()
    assert done.returncode == 0 and "stopped by SIGTERM" in done.stderr + done.stdout, done.stderr
