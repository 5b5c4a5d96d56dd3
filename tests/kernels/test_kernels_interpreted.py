"""The Triton kernels in the interpreter, in a process of their own (see tests/interpreted)."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FILES = sorted(file.name for file in ROOT.joinpath("tests", "interpreted").glob("test_*.py"))


@pytest.mark.timeout(600)  # a minute of computing, which a busy machine stretches
def test_the_kernels_pass_in_the_interpreter() -> None:
    """All files in one process, which takes 2 s to start."""
    # PYTEST_ADDOPTS is this run's own: a -q from it would take away the lines that name the tests.
    environ = {**os.environ, "TRITON_INTERPRET": "1", "PYTEST_ADDOPTS": ""}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-v", "-x", "-p", "no:cacheprovider", "tests/interpreted"],
        cwd=ROOT, env=environ, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-1000:]
    for file in FILES:
        assert re.search(rf"^tests/interpreted/{file}::.* PASSED", done.stdout, re.MULTILINE), file
