"""The benchmarks that need a GPU run on any machine at a tiny size, and say what is missing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "examples" / "benchmarks"


def ran(name: str, *options: str) -> subprocess.CompletedProcess[str]:
    place = {"PYTHONPATH": str(BENCHMARKS.parents[1]), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, str(BENCHMARKS / name), *options]
    return subprocess.run(command, env={**os.environ, **place}, capture_output=True, text=True, timeout=180)


def test_every_placement_and_fsdp_train_the_same_in_the_benchmark_of_offload(tmp_path: Path) -> None:
    out = tmp_path / "offload.json"
    sides = [
        "device",
        "ours host",
        "FSDP2 offload",
        "ours auto",
        "ours static 0.5",
        "ours split",
        "DeepSpeed ZeRO-2",
    ]
    done = ran(
        "gpu_offload.py", "--tiny", "--warm", "1", "--steps", "2", "--out", str(out), "--sides", *sides
    )
    assert done.returncode == 0, done.stderr
    rows = {row["side"]: row for row in json.loads(out.read_text())["rows"]}
    assert list(rows) == sides and len(done.stdout.splitlines()) == len(sides)
    peer = rows.pop("DeepSpeed ZeRO-2")
    assert "deepspeed" in peer["note"] or peer["loss"] == pytest.approx(rows["device"]["loss"], rel=1e-2)
    for side, row in rows.items():
        assert not row["note"] and row["least_ms"] > 0, row
        exact = side != "FSDP2 offload"
        assert row["loss"] == pytest.approx(rows["device"]["loss"], rel=0 if exact else 1e-3), side
    assert rows["ours host"]["up_gib"] == rows["ours host"]["down_gib"] > rows["ours split"]["up_gib"] > 0


def test_without_a_gpu_the_benchmark_of_offload_says_what_is_legal() -> None:
    done = ran("gpu_offload.py")
    assert done.returncode == 2 and "--tiny" in done.stderr


def test_every_kernel_is_checked_and_timed_in_the_benchmark_of_kernels(tmp_path: Path) -> None:
    done = ran("gpu_kernels.py", "--dry-run", "--out", str(tmp_path / "kernels.json"))
    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads((tmp_path / "kernels.json").read_text())["rows"]
    assert len(rows) >= 50
    for row in rows:
        assert row["note"] == "" and row["ms"]["ours"] > 0, row
        assert row["name"].endswith(" backward") or row["error"] is not None, row


def test_every_side_trains_the_same_in_the_benchmark_of_steps(tmp_path: Path) -> None:
    done = ran("gpu_step.py", "--dry-run", "--out", str(tmp_path / "step.json"))
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "step.json").read_text())
    assert set(found["setting"]) == {"device", "torch", "triton", "python", "date"}
    eager, *rows = found["rows"]
    assert [row["side"] for row in rows] == ["kernels", "engine"]
    for row in rows:
        assert not row["note"] and row["loss"] == pytest.approx(eager["loss"], rel=1e-3), row
