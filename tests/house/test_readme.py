"""README and docs tell the truth: the two commands are the agreed ones, and all Python of all pages runs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.shared.pages import ROOT, blocks, pages

README = (ROOT / "README.md").read_text()
COMMANDS = (
    "pip install -c constraints.txt -e . && torchrun --standalone --nproc-per-node 2 examples/gpt/train.py",
    'pip install -c constraints.txt -e ".[test]" && pytest',
)
MOST_LINES = 200


def snippets() -> list[tuple[str, str]]:
    """(page and line, Python) of every block of README and docs, once where it stands on two pages."""
    found: dict[str, str] = {}
    for page in pages():
        for line, code in blocks(page.text, "python"):
            found.setdefault(code, f"{page.path.stem}-{line}")
    return [(name, code) for code, name in found.items()]


def test_readme_is_one_page() -> None:
    assert len(README.splitlines()) <= MOST_LINES


def test_the_two_commands_stand_alone_and_in_this_order() -> None:
    lines = [line for _, block in blocks(README, "bash") for line in block.splitlines()]
    assert tuple(line for line in lines if line.startswith("pip install -c constraints.txt")) == COMMANDS


LOOP = next(code for _, code in snippets() if "engine.train_step" in code and "is_main" in code)
BLOCKS = [pytest.param(code, id=name) for name, code in snippets() if code != LOOP]
RUNS = [block for block in BLOCKS if "cl.Run(" in block.values[0] or "cl.fit(" in block.values[0]]


@pytest.mark.parametrize("code", [block for block in BLOCKS if block not in RUNS])
def test_a_python_block_runs_alone(code: str, tmp_path: Path) -> None:
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    (tmp_path / "block.py").write_text(code)  # a file: workers of train_many import it
    run = subprocess.run(
        [sys.executable, "block.py"],
        cwd=tmp_path,
        env=environment,
        text=True,
        capture_output=True,
        timeout=100,
    )
    assert run.returncode == 0, run.stdout + run.stderr


def test_blocks_are_found_with_their_line() -> None:
    text = "a\n```python\nx = 1\ny = 2\n```\n```bash\nls\n```\n```python\nz\n```\n"
    assert blocks(text, "python") == [(2, "x = 1\ny = 2\n"), (9, "z\n")]
    assert blocks(text, "bash") == [(6, "ls\n")]


NOTEBOOK = """
import contextlib, gc, io, json, os, signal, sys, threading
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
    handlers = [str(signal.getsignal(each)) for each in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)]
    files = len(os.listdir("/proc/self/fd"))
    held.append((threads, files, os.listdir("/dev/shm"), handlers, dist.is_initialized()))
    return said.getvalue()

wrong = code.replace("if context.is_main:", "if result.step == 2: raise KeyError\\n        if context.is_main:")
print(json.dumps([[cell(code), cell(code), cell(wrong), cell(code)], held]))
"""


def told(*command: str, cwd: Path = ROOT) -> str:
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    environment = os.environ | {"PYTHONPATH": path}
    run = subprocess.run(command, cwd=cwd, env=environment, text=True, capture_output=True, timeout=100)
    assert run.returncode == 0, run.stdout + run.stderr
    return run.stdout


@pytest.mark.parametrize("code", RUNS)
def test_a_run_of_the_first_page_has_twenty_lines_and_the_losses_of_one_rank_on_two(
    code: str, tmp_path: Path
) -> None:
    assert len(code.splitlines()) <= 20
    (tmp_path / "train.py").write_text(code)
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    cut = ("--parallel.tensor.size", "2") if "sys.argv" in code else ()
    losses = []
    for place, before, options in (("one", (), ()), ("two", torchrun, cut)):
        (tmp_path / place).mkdir()
        told(sys.executable, *before, str(tmp_path / "train.py"), *options, cwd=tmp_path / place)
        (metrics,) = (tmp_path / place).glob("runs/*/metrics.jsonl")
        losses.append([json.loads(line)["loss"] for line in metrics.read_text().splitlines()])
    assert len(losses[0]) == 10 and losses[1] == pytest.approx(losses[0], rel=1e-5)


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
    assert held[1:] == held[:1] * 3, "threads, descriptors, shared memory, handlers of signals, groups"
    assert held[0][0] == ["MainThread"] and not held[0][-1]
