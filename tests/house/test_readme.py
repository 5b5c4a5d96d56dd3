"""README tells the truth: its commands are the agreed ones, its Python runs, the files it names exist."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
COMMANDS = (
    "pip install -c constraints.txt -e . && torchrun --standalone --nproc-per-node 2 examples/gpt/train.py",
    'pip install -c constraints.txt -e ".[test]" && pytest',
)


def blocks(text: str, language: str) -> list[tuple[int, str]]:
    """(line, text) of each fenced block of a language."""
    found = re.finditer(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    return [(text.count("\n", 0, match.start()) + 1, match[1]) for match in found]


def test_the_two_commands_stand_alone_and_in_this_order() -> None:
    lines = [line for _, block in blocks(README, "bash") for line in block.splitlines()]
    assert tuple(line for line in lines if line.startswith("pip install -c constraints.txt")) == COMMANDS


@pytest.mark.parametrize(
    "code", [pytest.param(code, id=f"line-{line}") for line, code in blocks(README, "python")]
)
def test_a_python_block_runs_alone(code: str, tmp_path: Path) -> None:
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    run = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env=environment,
        text=True,
        capture_output=True,
        timeout=100,
    )
    assert run.returncode == 0, run.stdout + run.stderr


def test_every_path_in_the_text_exists() -> None:
    paths = re.findall(r"`([\w.-]+/[\w./-]*|[\w-]+\.(?:py|txt|cfg|toml))`", README)
    assert len(paths) > 10
    assert not [path for path in paths if not (ROOT / path).exists()]


def test_a_drawn_schedule_is_what_its_command_prints() -> None:
    drawings = [text for _, text in blocks(README, "text") if text.startswith("$ colossal-lite schedule")]
    assert drawings
    for text in drawings:
        command, _, drawn = text.removeprefix("$ colossal-lite ").partition("\n")
        run = subprocess.run(
            [sys.executable, "-m", "colossal_lite", *command.split()],
            cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)}, text=True, capture_output=True, timeout=60,
        )  # fmt: skip
        assert run.stdout == drawn, run.stderr


def test_blocks_are_found_with_their_line() -> None:
    text = "a\n```python\nx = 1\ny = 2\n```\n```bash\nls\n```\n```python\nz\n```\n"
    assert blocks(text, "python") == [(2, "x = 1\ny = 2\n"), (9, "z\n")]
    assert blocks(text, "bash") == [(6, "ls\n")]


LOOP = blocks(README, "python")[0][1]
HUGGING_FACE = next(code for _, code in blocks(README, "python") if "LlamaForCausalLM(" in code)
NOTEBOOK = """
import contextlib, gc, io, json, os, sys, threading
import torch.distributed as dist
sys.path.insert(0, "")
code, cells = json.loads(sys.argv[1]), {"__name__": "__main__"}
exec("from transformers import GPT2LMHeadModel, LlamaForCausalLM", cells)  # `kernels` of the root hides no package
held = []

def cell(text):
    said = io.StringIO()
    try:
        with contextlib.redirect_stdout(said):
            exec(compile(text, "cell", "exec"), cells)
    except KeyError:
        said.write("KeyError")
    cells.pop("engine", None), cells.pop("context", None)
    gc.collect()
    threads = sorted(thread.name for thread in threading.enumerate())
    held.append((threads, len(os.listdir("/proc/self/fd")), os.listdir("/dev/shm"), dist.is_initialized()))
    return said.getvalue()

wrong = code.replace("if context.is_main:", "if result.step == 2: raise KeyError\\n        if context.is_main:")
print(json.dumps([[cell(code), cell(code), cell(wrong), cell(code)], held]))
"""


def told(*command: str) -> str:
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    environment = os.environ | {"PYTHONPATH": path}
    run = subprocess.run(command, cwd=ROOT, env=environment, text=True, capture_output=True, timeout=100)
    assert run.returncode == 0, run.stdout + run.stderr
    return run.stdout


def losses_of(said: str) -> list[float]:
    return [float(line.split()[1]) for line in said.splitlines()]


def test_the_loop_gives_the_same_numbers_in_a_script_under_torchrun_and_in_a_notebook_and_leaves_nothing(
    tmp_path: Path,
) -> None:
    script = tmp_path / "train.py"
    script.write_text(LOOP)
    alone = told(sys.executable, str(script))
    assert len(losses_of(alone)) == 3
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    assert losses_of(told(*torchrun, str(script))) == pytest.approx(losses_of(alone), rel=1e-6)
    (first, second, wrong, third), held = json.loads(told(sys.executable, "-c", NOTEBOOK, json.dumps(LOOP)))
    assert first == second == third == alone and wrong == alone.splitlines(keepends=True)[0] + "KeyError"
    assert held[1:] == held[:1] * 3, "threads, descriptors, groups"
    assert held[0][0] == ["MainThread"] and not held[0][-1]


def test_the_loop_of_a_hugging_face_model_has_the_same_losses_on_one_rank_and_two(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(HUGGING_FACE)
    assert len([line for line in HUGGING_FACE.splitlines() if line and "import" not in line]) <= 20
    alone = losses_of(told(sys.executable, str(script)))
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    cut = losses_of(told(*torchrun, str(script)))
    assert len(alone) == 3 and cut == pytest.approx(alone, rel=1e-6)
