"""Every kernel compiles for GPUs that are not there, within the rules of tests/shared/compile_gate.py."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.shared.compile_gate import Launch, Row, faults, narrow_products


@pytest.mark.timeout(900)  # a minute or two of computing each, which a busy machine stretches
@pytest.mark.parametrize(
    "architecture",
    [
        *("sm_90", "sm_80"),
        *(
            pytest.param(other, marks=pytest.mark.campaign)
            for other in ("sm_89", "sm_100", "sm_120", "gfx942")
        ),
    ],
)
def test_every_kernel_compiles_and_on_nvidia_without_spills(architecture: str) -> None:
    """gfx942 has to compile; its table is for the reader.  sm_89 has the least shared memory."""
    plain = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.shared.compile_gate", architecture],
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


SOUND = Row(
    Launch("", "", "_attend_keys_kernel", (), (), (), ()), "sm_90", registers=255, warps=8, shared_bytes=227 * 1024,
    loads_128=1, loads=1, tensor_core=1,
)  # fmt: skip


DRAWS = replace(SOUND.launch, kernel="_draw_kernel", options=(("enable_fp_fusion", False),))
STEPS = replace(
    DRAWS, kernel="_step_kernel", constants=(("RULE", "adamw"), ("BLOCK", 1024)),
    options=(*DRAWS.options, ("num_warps", 4)),
)  # fmt: skip


@pytest.mark.parametrize(
    ("change", "ptx", "said"),
    [
        (dict(spills=3), "", "3 spills"),
        (dict(shared_bytes=227 * 1024 + 1), "", "232449 bytes of shared memory; the limit is 232448"),
        (dict(arch="sm_89"), "", "the limit is 101376"),
        (dict(registers=255, warps=16), "", "255 registers x 16 warps exceed 65536"),
        (dict(loads_128=0), "", "no 128-bit load"),
        (dict(tensor_core=0), "", "no tensor-core instruction"),
        (dict(launch=DRAWS), "div.full.f32 %f1", "div"),
        (dict(launch=DRAWS), "sqrt.approx.f32 %f1", "approx"),
        (dict(launch=replace(DRAWS, options=())), "", "may fuse"),
        (dict(launch=STEPS), "fma.rn.f32 %f1\n" * 17, "17 fused multiply-adds a thread; the source has 16"),
        (dict(launch=STEPS), "fma.rn.f32x2 %f1\n" * 9, "18 fused multiply-adds a thread; the source has 16"),
        (dict(launch=STEPS), "fma.rn.f32 %f1\n" * 15, "15 fused multiply-adds a thread; the source has 16"),
    ],
)
def test_a_kernel_that_breaks_a_rule_is_a_fault_of_the_gate(
    change: dict[str, Any], ptx: str, said: str
) -> None:
    assert faults(SOUND, "", "div.full.f32 %f1") == []
    (fault,) = faults(replace(SOUND, **change), "", ptx)
    assert said in fault
