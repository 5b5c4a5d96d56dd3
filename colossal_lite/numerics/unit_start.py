"""Starts a look at the gradients of a loss so that fused losses keep what they have saved.

Note: fused losses.
Such an autograd.Function computes its gradient in forward.  Backward multiplies that in place by what arrives.  So a
second backward finds other numbers, unless 1 has arrived.  A look starts from a number with which exactly 1 arrives.
After a multiple it starts from the inverse of that (`restore`).  Other operations do not change what they have saved.
Cost: where a Function gives a number, two backwards or more from the loss to it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge


def numbers_of_functions(first: GradientEdge, nodes: Iterable[Any]) -> list[GradientEdge]:
    """The numbers that Functions have given to these `nodes` of a graph. So is the `first` edge, if it is one."""
    edges = {first, *(GradientEdge(x, n) for node in nodes for x, n in node.next_functions if x is not None)}
    return [edge for edge in edges if _is_of_a_function(edge.node) and _is_number(edge)]


def unit_start(loss: Tensor, numbers: Sequence[GradientEdge]) -> Tensor:
    """What backward from `loss` starts from, so that 1 arrives at these `numbers`. 1 where there is no such start."""
    one = torch.ones_like(loss)
    first = _arrived(loss, numbers, one)
    if len(first) != 1 or 0.0 in first or not all(map(math.isfinite, first)):
        return one
    (factor,) = first
    eps = torch.finfo(loss.dtype).eps
    starts = (one / factor * (1 + change) for change in (0.0, eps, -eps / 2, -eps))
    return next((start for start in starts if _arrived(loss, numbers, start) == {1.0}), one)


def _arrived(loss: Tensor, numbers: Sequence[GradientEdge], start: Tensor) -> set[float]:
    if not numbers:
        return set()
    found = torch.autograd.grad([loss], numbers, [start], retain_graph=True, allow_unused=True)
    return {float(x) for x in found if x is not None}


def _is_of_a_function(node: Any) -> bool:
    return isinstance(node, BackwardCFunction)


def _is_number(edge: GradientEdge) -> bool:
    node: Any = edge.node
    return not node._input_metadata[edge.output_nr].shape
