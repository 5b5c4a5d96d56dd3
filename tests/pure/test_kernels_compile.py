"""Every kernel compiles for GPUs that are not there, within the rules of tests/compile_gate.py."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.compile_gate import narrow_products


@pytest.mark.timeout(900)  # a minute or two of computing each, which a busy machine stretches
@pytest.mark.parametrize(
    "architecture", ["sm_90", "sm_80", pytest.param("gfx942", marks=pytest.mark.campaign)]
)
def test_every_kernel_compiles_and_on_nvidia_without_spills(architecture: str) -> None:
    """gfx942 has to compile; its table is for the reader."""
    plain = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.compile_gate", architecture],
        cwd=Path(__file__).parents[2], env=plain, capture_output=True, text=True,
    )  # fmt: skip
    print(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    assert done.stdout.count(architecture) > 40


PRODUCT = """
  %0 = tt.get_program_id x : i32 loc(#l)
  %1 = tt.splat %x_stride : i64 -> tensor<4x1xi64> loc(#l)
  %c512 = arith.constant 512 : i32 loc(#l)
  %2 = arith.muli %left, %right : TYPE loc(#l)
"""


@pytest.mark.parametrize(
    ("left", "right", "type_", "is_found"),
    [
        ("%9", "%1", "tensor<4x1xi64>", False),
        ("%9", "%1", "tensor<4x1xi32>", True),
        ("%8", "%x_stride", "i32", True),
        ("%8", "%c512", "i32", False),
        ("%0", "%c512", "i32", True),  # the program's index times a tile
        ("%0", "%x_stride", "i32", True),
    ],
)
def test_a_product_of_sizes_in_32_bits_is_found(left: str, right: str, type_: str, is_found: bool) -> None:
    ttir = PRODUCT.replace("%left", left).replace("%right", right).replace("TYPE", type_)
    assert bool(narrow_products(ttir)) is is_found
    assert bool(narrow_products(ttir, is_short=True)) is (is_found and right != "%c512")
