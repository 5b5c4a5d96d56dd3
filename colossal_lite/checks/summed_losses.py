"""Finds a loss that is a sum over samples, where the step takes a mean over the parts of ranks.

Note: the graph of a loss.
It is walked from the loss to the outputs of the model.  Above the sum stand linear operations alone: a logarithm of a
sum is none.  Below it each sample has its own, so a further sum over samples ends the walk.  So does a factor or a
division, which may make a mean of a sum.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from torch.autograd.graph import GradientEdge

SUM = 2  # the number of torch for reduction="sum"
LINEAR = "Add Sub Neg View UnsafeView Squeeze Unsqueeze Transpose Gather ToCopy Clone Alias".split()
POINTWISE = "CtcLoss LogSoftmax Softmax LogSigmoid Sigmoid Softplus Tanh Relu Pow Abs Exp Log".split()


def sums_samples(loss: GradientEdge, outputs: Mapping[GradientEdge, int]) -> bool:
    """Whether `loss` is surely a sum over the rows of one of the `outputs`, which have so many."""
    Place = tuple[GradientEdge, bool, bool]  # whether a sum stands above it, and below that a curve
    places, seen = list[Place]([(loss, False, False)]), set[Place]()
    while places:
        edge, is_summed, is_curved = place = places.pop()
        if place in seen:
            continue
        seen.add(place)
        if edge in outputs:
            if is_summed and outputs[edge] > 1:
                return True
            continue
        node: Any = edge.node
        match _kind_of(node):
            case "sum" if not is_curved:
                is_summed = True
            case "curve and sum" if not is_curved:
                is_summed = is_curved = True
            case "curve" if is_summed:
                is_curved = True
            case "linear":
                pass
            case _:
                continue
        places += [
            (GradientEdge(x, n), is_summed, is_curved) for x, n in node.next_functions if x is not None
        ]
    return False


def _kind_of(node: Any) -> Literal["sum", "curve and sum", "curve", "linear"] | None:
    """Whether an operation sums over samples, or keeps them apart and of one scale, or is none of these."""
    name = node.name()
    if (reduction := getattr(node, "_saved_reduction", None)) is not None:
        return "curve and sum" if reduction == SUM else "curve" if reduction == 0 else None
    if name == "SumBackward0":
        return "sum"
    if name in ("SumBackward1", "MeanBackward1"):
        sizes = node._saved_self_sym_sizes
        first = (0, 2**64 - len(sizes))
        if not node._saved_dim or any(dim % 2**64 in first for dim in node._saved_dim):
            return "sum" if name == "SumBackward1" else None
        return "linear" if sizes[0] > 1 else None
    stem = name.rstrip("0123456789").removesuffix("Backward")
    if stem in POINTWISE:
        return "curve"
    return "linear" if stem in LINEAR and getattr(node, "_saved_alpha", 1) == 1 else None
