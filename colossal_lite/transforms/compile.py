"""`compile="block"`: torch.compile of each block of a model.

Note: blocks of one class share compiled code, so its cost is that of one block, not of the model: some 20 s on a CPU,
once for each shape and for evaluation.  Names of modules and parameters stay as they are.  Dropout stays outside the
compiled code: its counters are Python's, and so do auxiliary losses.  Inductor needs a C++ compiler on CPU and Triton
on CUDA; whether it works is found by compiling one line before anything is allocated.  It changes the order of sums
within a block, so its numbers are those of the plain run up to rounding, not to the bit.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from colossal_lite.config.errors import ConfigError, Problem
from colossal_lite.kernels import Dropout
from colossal_lite.transforms.auxiliary_loss import AuxiliaryLoss


def compile_blocks(blocks: Mapping[str, nn.Module], device: torch.device) -> None:
    """Compile every block, in place, when it is first run.

    Raises ConfigError where there are none, and where nothing can be compiled on this device.
    """
    if not blocks:
        rule = "the model has no nn.ModuleList of blocks of one class"
        raise ConfigError([Problem("compile", "block", rule, "'none'")])
    try:
        torch.compile(_line)(torch.zeros(2, device=device))
    except (RuntimeError, OSError, ImportError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        rule = f"torch.compile does not work here ({reason})"
        legal = "'none', or a C++ compiler on the PATH (CPU), Triton (CUDA)"
        raise ConfigError([Problem("compile", "block", rule, legal)]) from error
    for block in blocks.values():
        for child in block.modules():
            if isinstance(child, Dropout | AuxiliaryLoss):
                child.forward = torch.compiler.disable(child.forward)  # type: ignore[method-assign]
        block.compile()


def _line(x: Tensor) -> Tensor:
    return x * 2.0 + 1.0
