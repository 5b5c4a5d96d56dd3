"""Compiles each block of a model with torch.compile (`compile="block"`).

Note: blocks of one class share compiled code, so the cost is that of one block: some 20 s on a CPU.  It is paid once
for each shape and for evaluation.  Names of modules and parameters do not change.  Dropout and auxiliary losses run
outside the compiled code, because their counters are Python's.  Inductor needs a C++ compiler on CPU and Triton on
CUDA; one compiled line tests this before anything is allocated.  Compilation changes the order of sums within a block.
So results equal those of the plain run up to rounding, not to the bit.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from colossal_lite.config.errors import ConfigError, Problem


def compile_blocks(blocks: Mapping[str, nn.Module], device: torch.device) -> None:
    """Compile every block, in place, at its first run.

    Raises ConfigError if there are no blocks, or if nothing can be compiled on this device.
    """
    if not blocks:
        rule = "the model has no nn.ModuleList of blocks of one class, with modules in them"
        raise ConfigError([Problem("compile", "block", rule, "'none'")])
    try:
        torch.compile(_line)(torch.zeros(2, device=device))
    except (RuntimeError, OSError, ImportError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        rule = f"torch.compile does not work here ({reason})"
        legal = "'none', or a C++ compiler on the PATH (CPU), Triton (CUDA)"
        raise ConfigError([Problem("compile", "block", rule, legal)]) from error
    for block in blocks.values():
        block.compile()


def _line(x: Tensor) -> Tensor:
    return x * 2.0 + 1.0
