"""Computes the fused operations of models and optimizers, by torch and by Triton kernels.

May import: nothing of ours.  Read first: `ops`.  It holds the table of all operations and chooses their paths.  Each
operation has a file with its formula, its torch path and a float64 reference.  Its kernel is there too, or in the file
that adds `_triton` to the name.  `launch` declares, loads and launches kernels.
"""

from __future__ import annotations

from colossal_lite import stands_aside

if not stands_aside(__name__):
    from .dropout import dropped
    from .mask import CAUSAL, FULL, Mask
    from .ops import LEGAL_WITHOUT, TORCH, Dropout, OpChoice, Ops, select, triton_paths, why_not_triton
    from .philox import Draws, Rows

__all__ = [
    "CAUSAL",
    "FULL",
    "LEGAL_WITHOUT",
    "TORCH",
    "Draws",
    "Dropout",
    "Mask",
    "OpChoice",
    "Ops",
    "Rows",
    "dropped",
    "select",
    "triton_paths",
    "why_not_triton",
]
