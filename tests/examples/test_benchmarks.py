"""The benchmarks that need a GPU run on any machine at a tiny size, and say what is missing."""

from __future__ import annotations

import importlib
import json
import os
import re
import subprocess
import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

pytestmark = pytest.mark.timeout(600)  # a minute of computing for the day, which a busy machine stretches
BENCHMARKS = Path(__file__).parents[2] / "examples" / "benchmarks"


def ran(name: str, *options: str) -> subprocess.CompletedProcess[str]:
    place = {"PYTHONPATH": str(BENCHMARKS.parents[1]), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, str(BENCHMARKS / name), *options]
    return subprocess.run(command, env={**os.environ, **place}, capture_output=True, text=True, timeout=500)


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
        assert all(row[f"{phase}_ms"] > 0 for phase in ("forward", "backward", "update")), row
        exact = side != "FSDP2 offload"
        assert row["loss"] == pytest.approx(rows["device"]["loss"], rel=0 if exact else 1e-3), side
    assert rows["ours host"]["up_gib"] == rows["ours host"]["down_gib"] > rows["ours split"]["up_gib"] > 0


def test_without_a_gpu_the_benchmark_of_offload_says_what_is_legal() -> None:
    done = ran("gpu_offload.py")
    assert done.returncode == 2 and "--tiny" in done.stderr


def test_every_side_makes_a_tiny_model_ready_in_the_benchmark_of_initialize() -> None:
    done = ran("initialize.py", "--dry-run")
    assert done.returncode == 0, done.stderr
    sides = [line[:14].strip() for line in done.stdout.splitlines()]
    assert sides == ["FSDP2", "data", "ZeRO-3", "ZeRO-3, bf16"]


def test_the_benchmark_of_links_runs_updates_on_both_sides_beside_the_simulator() -> None:
    done = ran("offload_link.py", "--unit", "0.01", "--records", "2", "--mixes", "host", "2", "0.3")
    assert done.returncode == 0, done.stderr
    rows = [line.split("│")[2:4] for line in done.stdout.splitlines() if line.startswith("│")]
    assert [[cell.strip() for cell in row] for row in rows] == [
        ["host", "8"], ["{'every': 2}", "4"], ["{'host': 0.3}", "2"]
    ]  # fmt: skip


def test_a_step_is_compared_with_that_of_another_checkout() -> None:
    here = str(BENCHMARKS.parents[1])
    done = ran(
        "step_cost.py", "--against", here, "--steps", "4", "--block", "2", "--modes", "data", "--world", "2"
    )
    assert done.returncode == 0, done.stderr
    number = r"([\d.]+)"
    row = rf"data +{number} ms, before +{number}: {number} \({number} to {number}\)\n"
    found = re.fullmatch(row, done.stdout)
    assert found is not None and all(float(each) > 0 for each in found.groups()), done.stdout


@pytest.fixture(scope="module")
def day(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a whole dry run."""
    out = tmp_path_factory.mktemp("day")
    done = ran("gpu_day.py", "--dry-run", "--out", str(out))
    assert done.returncode == 0, done.stdout + done.stderr
    assert [line.split()[:2] for line in done.stdout.splitlines()[-7:-1]] == [
        ["1", "smoke"], ["2", "kernel"], ["3", "step"], ["4", "kernels"], ["5", "offload"], ["6", "larger"]
    ]  # fmt: skip
    return out


def test_every_part_of_a_gpu_day_runs_on_a_cpu(day: Path) -> None:
    for number, names in (
        (1, ["fp32 triton", "zero 3", "ring", "zb-v"]),
        (5, ["tiny device", "tiny ours host"]),
        (6, ["tiny ours stages", "adapters"]),
    ):
        part = json.loads((day / f"part{number}.json").read_text())
        assert set(part["setting"]) == {"device", "torch", "triton", "python", "date"}
        assert [row["name"] for row in part["rows"]] == names
        assert all(row["verdict"] == "ok" and row["numbers"] for row in part["rows"]), part
    tests = json.loads((day / "part2.json").read_text())["rows"]
    assert len(tests) == 3 and all(row["verdict"] == "ok" for row in tests)


def test_a_part_that_is_cut_short_is_a_shorter_part(tmp_path: Path) -> None:
    done = ran("gpu_day.py", "--dry-run", "--part", "1", "--minutes", "0.01", "--out", str(tmp_path))
    rows = json.loads((tmp_path / "part1.json").read_text())["rows"]
    assert done.returncode == 0 and [row["verdict"] for row in rows] == ["left out"] * 4, done.stdout


def test_every_kernel_is_checked_and_timed_in_the_benchmark_of_kernels(day: Path) -> None:
    rows = json.loads((day / "gpu_kernels.json").read_text())["rows"]
    assert len(rows) >= 50 and len(json.loads((day / "part4.json").read_text())["rows"]) == len(rows)
    for row in rows:
        assert row["note"] == "" and row["ms"]["ours"] > 0, row
        assert row["name"].endswith(" backward") or row["error"] is not None, row


def test_every_side_trains_the_same_in_the_benchmark_of_steps(day: Path) -> None:
    eager, *rows = json.loads((day / "gpu_step.json").read_text())["rows"]
    assert [row["side"] for row in rows] == ["kernels", "engine"]
    for row in rows:
        assert not row["note"] and row["loss"] == pytest.approx(eager["loss"], rel=1e-3), row


def test_the_benchmark_of_steps_frees_one_side_before_it_measures_the_next(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    gpu_step = importlib.import_module("gpu_step")
    made: list[weakref.ref[torch.nn.Module]] = []

    def built(*given: Any, plain: Callable[..., torch.nn.Module] = gpu_step.built) -> torch.nn.Module:
        assert not [1 for model in made if model() is not None], "the model of another side is alive"
        model = plain(*given)
        made.append(weakref.ref(model))
        return model

    monkeypatch.setattr(gpu_step, "built", built)
    for side in ("engine", "kernels", "eager", "engine"):
        assert gpu_step.one("tiny", side, *gpu_step.TINY, "cpu", 1, 1.0).step_ms > 0
    assert len(made) == 4
