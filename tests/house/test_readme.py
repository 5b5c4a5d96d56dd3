"""README tells the truth: its commands are the agreed ones, its Python runs, the files it names exist."""

from __future__ import annotations

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
