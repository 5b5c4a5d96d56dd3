"""A tensor mode is one file and one line: a copy of the product gets both, and runs it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from colossal_lite.config.parallel_schema import TENSOR_MODES
from colossal_lite.layers.tensor_modes import mode_file

ROOT = Path(__file__).parents[2]
LINE = """    "toy": TensorMode("toy: as 1d, activations whole", "tensor_toy", cuts_features=False),\n"""
FILE = '''"""Cuts layers as 1d does, and keeps activations whole."""

from colossal_lite.layers import tensor_1d
from colossal_lite.layers.tensor_modes import Form


def swap_layers(module, mesh, roles, form):
    print("toy layers")
    return tensor_1d.swap_layers(module, mesh, roles, Form(False, False))


def planned_payload(mesh, tensor, sizes):
    whole = tensor.model_copy(update={"sequence_parallel": False})
    return tensor_1d.planned_payload(mesh, whole, sizes)
'''
SCRIPT = """
import json, os, sys
import torch
import colossal_lite as cl
from colossal_lite.config.config import Config
from colossal_lite.planner.compare import compare_tensor

def main():
    ranks, out = int(os.environ.get("WORLD_SIZE", 1)), sys.argv[1]
    model = cl.models.GPTConfig(vocabulary=37, layers=2, heads=4, width=16, sequence=12)
    tensor = dict(size=ranks, mode="toy") if ranks > 1 else 1
    config = dict(precision="fp64", seed=7, parallel=dict(tensor=tensor), backend="gloo", timeout_s=60)
    with cl.launch(config) as context:
        engine = cl.initialize(lambda: cl.models.GPT(model), context=context)
        text = torch.randint(37, (4, 13), generator=torch.Generator().manual_seed(1))
        losses = [float(engine.train_step((text[:, :-1], text[:, 1:])).loss) for _ in range(3)]
        numel = sum(p.numel() for p in engine.model.parameters())
        found = dict(losses=losses, mesh=context.mesh.layout.describe(), numel=numel)
        engine.close()
    if int(os.environ.get("RANK", 0)) == 0:
        rows = compare_tensor(config, model, batch=4, sequence=12, world_size=2).rows
        found["compared"] = {row.title: row.layers_payload_bytes for row in rows}
        found["notes"] = list(Config.load(dict(parallel=dict(tensor=dict(size=2, mode="toy", depth=3)))).warnings())
        found["enum"] = Config.schema()["$defs"]["TensorConfig"]["properties"]["mode"]["enum"]
        open(out, "w").write(json.dumps(found))

main()
"""


@pytest.mark.parametrize("mode", TENSOR_MODES)
def test_every_mode_has_a_file_with_the_functions_of_a_mode(mode: str) -> None:
    assert callable(mode_file(mode).swap_layers) and callable(mode_file(mode).planned_payload)


def test_a_new_mode_is_one_file_and_one_line(tmp_path: Path) -> None:
    for folder in ("colossal_lite", "kernels", "launcher"):
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__"))
    table = tmp_path / "colossal_lite/config/parallel_schema.py"
    text = table.read_text()
    start = '    "2d": TensorMode('
    assert text.count(start) == 1
    table.write_text(text.replace(start, LINE + start))
    (tmp_path / "colossal_lite/layers/tensor_toy.py").write_text(FILE)
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    found = []
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    for launcher in ([], torchrun):
        out = tmp_path / "found.json"
        command = [sys.executable, *launcher, str(script), str(out)]
        environment = {**os.environ, "PYTHONPATH": str(tmp_path), "OMP_NUM_THREADS": "1"}
        done = subprocess.run(
            command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=100
        )
        assert done.returncode == 0, done.stderr
        assert "toy layers" in done.stdout  # of the ranks, or of the comparison's plan
        found.append(json.loads(out.read_text()))
    one, two = found
    assert two["losses"] == pytest.approx(one["losses"], rel=1e-12) and len(set(two["losses"])) == 3
    assert two["mesh"].endswith("tensor 2") and two["numel"] < one["numel"]
    assert two["compared"]["toy 2"] > 0 and {"toy 2", "1d 2"} <= two["compared"].keys()
    assert "toy" in two["enum"] and len(two["enum"]) == len(TENSOR_MODES) + 1
    assert any("depth=3 has no effect: only mode='2.5d' has a depth" in line for line in two["notes"])
