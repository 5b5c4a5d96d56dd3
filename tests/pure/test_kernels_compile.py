"""Every kernel compiles for GPUs that are not there, within the rules of tests/compile_gate.py."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.compile_gate import narrow_strides


@pytest.mark.timeout(900)  # 2 to 3 minutes of computing, which a busy machine stretches
@pytest.mark.parametrize("architecture", ["sm_90", "sm_80"])
def test_every_kernel_compiles_without_spills(architecture: str) -> None:
    plain = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.compile_gate", architecture],
        cwd=Path(__file__).parents[2], env=plain, capture_output=True, text=True,
    )  # fmt: skip
    print(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    assert done.stdout.count(architecture) > 40


def test_a_stride_multiplied_in_32_bits_is_found() -> None:
    wide = "  %3 = tt.splat %x_stride : i64 -> tensor<4x1xi64>\n  %4 = arith.muli %2, %3 : tensor<4x1xi64> loc(#l)"
    assert not narrow_strides(wide)
    assert narrow_strides(wide.replace("i64", "i32"))
    assert narrow_strides("  %9 = arith.muli %8, %x_stride : i32 loc(#loc12)")
    assert not narrow_strides("  %9 = arith.muli %8, %c512 : i32 loc(#loc12)")
