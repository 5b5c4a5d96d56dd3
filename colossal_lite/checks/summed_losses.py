"""Finds a loss that is a sum over samples, where the step takes a mean over the parts of ranks.

Note: the graph of a loss.  It is walked from the loss to the outputs of the model.  Only operations that keep the scale
of each sample are passed.  A factor or a division may make a mean of a sum, so the walk ends there.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch.autograd.graph import GradientEdge

SUM = 2  # the number of torch for reduction="sum"
ARRANGING = "Add Sub Neg View UnsafeView Squeeze Unsqueeze Gather ToCopy Clone Alias".split()
POINTWISE = "LogSoftmax Softmax LogSigmoid Sigmoid Softplus Tanh Relu Pow Abs Exp Log".split()
KEEPS_SCALE = {f"{name}Backward{n}" for n in range(3) for name in (*ARRANGING, *POINTWISE)}
"""Operations of torch in which each sample keeps its weight."""


def sums_samples(loss: GradientEdge, outputs: Mapping[GradientEdge, int]) -> bool:
    """Whether `loss` is surely a sum over the rows of one of the `outputs`, which have so many."""
    edges, seen = [(loss, False)], set[tuple[GradientEdge, bool]]()
    while edges:
        edge, is_summed = each = edges.pop()
        if each in seen:
            continue
        seen.add(each)
        if edge in outputs:
            if is_summed and outputs[edge] > 1:
                return True
            continue
        node: Any = edge.node
        if (summed := _sums(node)) is not None:
            edges += [
                (GradientEdge(x, n), is_summed or summed) for x, n in node.next_functions if x is not None
            ]
    return False


def _sums(node: Any) -> bool | None:
    """Whether an operation sums over samples. None if it may change their scale."""
    name, alpha = node.name(), getattr(node, "_saved_alpha", 1)
    if (reduction := getattr(node, "_saved_reduction", None)) is not None:
        return {0: False, SUM: True}.get(reduction)
    if name == "SumBackward0":
        return True
    if name in ("SumBackward1", "MeanBackward1"):
        sizes = node._saved_self_sym_sizes
        over_samples = not node._saved_dim or any(
            d % 2**64 in (0, 2**64 - len(sizes)) for d in node._saved_dim
        )
        return over_samples if name == "SumBackward1" else None if over_samples or sizes[0] == 1 else False
    return False if name in KEEPS_SCALE and alpha == 1 else None
