"""Says whether something that a gradient goes through is linear: by its result for a multiple of the gradient."""

from __future__ import annotations

from torch import Tensor

SEED = -(2.0**20)
"""Exact in floating point. Its sign shows absolute values, its size a limit."""
TOLERANCE = 1e-3
"""Of a result for the multiple, relative to its largest element: above the rounding of 16 bits."""


def is_multiple(found: Tensor, given: Tensor, factor: float) -> bool:
    """Whether `found` is `factor` times what was `given`, as far as numbers are finite."""
    right, made = given.detach().double() * factor, found.detach().double()
    if not bool(right.isfinite().all() & made.isfinite().all()):  # 16 bits may have no room
        return True
    return not right.numel() or bool(((made - right).abs() <= TOLERANCE * right.abs().amax()).all())
