"""Says whether something that a gradient goes through is linear: by its results for other gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

SEED = -(2.0**20)
"""Exact in floating point. Its sign shows absolute values, its size a limit."""
TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-4}
"""Of a result for a multiple, relative to its largest element: above the rounding of sums."""
TOLERANCE_16_BIT = 1e-3
SUM_TOLERANCE = {torch.bfloat16: 2.0**-5, torch.float16: 2.0**-8}
"""The same for a sum, whose parts 16 bits round."""
LARGEST_HALF = 2.0**14
OTHER_PART = -16.0
"""The multiple of every other element: none goes below a threshold that depends on the largest unseen."""


def is_multiple(found: Tensor, given: Tensor, factor: float, *, terms: int = 1) -> bool:
    """Whether `found` is `factor` times what was `given`, as far as numbers are finite. `terms`: of how many numbers
    each is a sum."""
    right = given.detach().double() * factor
    lost = terms * abs(factor) * _lost_digits(given.dtype)
    return _is_near(found, right, TOLERANCE.get(given.dtype, TOLERANCE_16_BIT), lost)


def _lost_digits(dtype: torch.dtype) -> float:
    """What the smallest numbers may be off. Those of fp16 below 6e-5 have few digits, and gradients are as small."""
    limits = torch.finfo(dtype)
    return float(4 * limits.smallest_normal * limits.eps)


def is_linear(apply: Callable[[Any], Any], given: Any, result: Any) -> bool | None:
    """Whether `apply`, which gave `result` for the `given` tensors, is linear; None if they are zero and say nothing.

    It is called three times more: for a multiple, for every other element, and for a sum. That is these plus a multiple
    of the rest, without rounding."""
    factor = _factor(given)
    if factor == 0.0:
        return None
    again = apply(_scaled(given, factor, factor))
    one, both = apply(_scaled(given, 1.0, 0.0)), apply(_scaled(given, 1.0, OTHER_PART))
    for whole, times, part, mixed in zip(*map(tree_leaves, (result, again, one, both)), strict=True):
        if isinstance(whole, Tensor) and not (
            all(isinstance(x, Tensor) for x in (times, part, mixed))
            and _has_same_room(whole, times, part, mixed)
            and is_multiple(times, whole, factor)
            and _adds_up(whole, part, mixed)
        ):
            return False
    return True


def _has_same_room(whole: Tensor, *others: Tensor) -> bool:
    """Whether the others are finite as the whole is, where it has the room of 32 bits or more."""
    checks = whole.dtype in TOLERANCE and bool(whole.isfinite().all())
    return not checks or all(bool(x.isfinite().all()) for x in others)


def _adds_up(whole: Tensor, part: Tensor, mixed: Tensor) -> bool:
    """Whether `mixed` is a `part` of the result plus `OTHER_PART` times the rest of the `whole`."""
    first = part.detach().double()
    right = first + OTHER_PART * (whole.detach().double() - first)
    tolerance = SUM_TOLERANCE.get(whole.dtype, TOLERANCE.get(whole.dtype, TOLERANCE_16_BIT))
    return _is_near(mixed, right, tolerance, abs(OTHER_PART) * _lost_digits(whole.dtype))


def _is_near(found: Tensor, right: Tensor, tolerance: float, lost: float) -> bool:
    made = found.detach().double()
    if not bool(right.isfinite().all() & made.isfinite().all()):  # 16 bits may have no room
        return True
    return not right.numel() or bool(((made - right).abs() <= tolerance * right.abs().amax() + lost).all())


def _scaled(given: Any, even: float, odd: float) -> Any:
    """The tensors with their elements of even and of odd places times these."""

    def scale(x: Any) -> Any:
        if not isinstance(x, Tensor):
            return x
        if even == odd:
            return x * even
        factors = x.new_full((x.numel(),), even)
        factors[1::2] = odd
        return x * factors.view(x.shape)

    return tree_map(scale, given)


def _factor(given: Any) -> float:
    """By which gradients are multiplied; 0 if they are zero or not finite, and say nothing.

    A power of two leaves all rounding as it is. Where 24 bits or more are kept, another number shows a hook that rounds
    to fewer. But a product on a GPU may round to TF32."""
    tensors = [x for x in tree_leaves(given) if isinstance(x, Tensor) and x.numel()]
    most = max((float(x.detach().abs().amax()) for x in tensors), default=0.0)
    if not 0.0 < most < float("inf"):
        return 0.0
    if all(x.dtype is torch.float64 or (x.dtype is torch.float32 and not x.is_cuda) for x in tensors):
        return 1.25 * SEED
    factor = SEED
    while (
        any(x.dtype is torch.float16 for x in tensors) and abs(factor) * most > LARGEST_HALF and factor < -2.0
    ):
        factor /= 2.0
    return factor
