"""The Triton kernels in the interpreter, in a process of their own (see tests/interpreted)."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

FILES = sorted(Path(__file__).parents[1].joinpath("interpreted").glob("test_*.py"))


@pytest.mark.parametrize("file", FILES, ids=lambda f: f.stem)
def test_the_kernels_pass_in_the_interpreter(file: Path) -> None:
    # PYTEST_ADDOPTS is this run's own: a second -q from it would take away the line that counts the tests.
    environ = {**os.environ, "TRITON_INTERPRET": "1", "PYTEST_ADDOPTS": ""}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", str(file)],
        cwd=file.parents[2], env=environ, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-1000:]
    assert " passed" in done.stdout
