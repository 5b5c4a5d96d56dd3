"""examples/many_models: adapters over one base, and a model larger than its device, at small sizes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def output_of(name: str, *options: object) -> str:
    command = [sys.executable, ROOT / "examples" / "many_models" / name, *options]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    ran = subprocess.run([*map(str, command)], capture_output=True, text=True, env=environment, timeout=110)
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


def test_adapters_over_one_base_train_abreast(tmp_path: Path) -> None:
    sizes = ("--tasks", 3, "--steps", 2, "--layers", 4, "--width", 16)
    told = output_of("adapters.py", *sizes, "--directory", tmp_path / "many")
    assert told.count("done        2") == 3 and "best: lr" in told
    rows = (tmp_path / "many" / "journal.jsonl").read_text().splitlines()
    assert [row for row in rows if '"decision": "run"' in row and '"step": 0' in row] == rows[:3], "at once"


def test_a_model_eight_times_its_device_trains(tmp_path: Path) -> None:
    told = output_of("larger.py", "--steps", 1, "--directory", tmp_path / "many")
    assert "done        1" in told and "state of 25,921,536 bytes on a device of 3,240,192" in told
    log = (tmp_path / "many" / "logs" / "device-0.log").read_text()
    assert "layer by layer" in log and "* is taken" in log
