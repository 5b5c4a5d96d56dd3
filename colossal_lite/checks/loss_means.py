"""Reads by how many labels a loss is a mean, from its graph.

Note: losses without a count.
A step takes the mean of the losses of its ranks.  That is the mean over all labels only where each rank has equally
many.  The nodes of `cross_entropy` and `nll_loss` keep their labels and class weights, and a division keeps what it
divides by.  So ranks can compare these.  The walk goes from the loss through sums of losses alone.  It ends at a
factor, by which a rank may weigh its own mean.  Tensors that a hook has packed are left alone.  To unpack one may run
a forward again (torch.utils.checkpoint).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from colossal_lite.memory.transfers import sent

MEAN = 1  # the number of torch for reduction="mean"
SUMS = "Add Sub Neg View Squeeze Unsqueeze ToCopy Clone Alias".split()


def denominators(loss: Tensor) -> Tensor | None:
    """The numbers by which the means in `loss` divide, float64 [means] in the order of its graph. None without one."""
    found, nodes, seen = list[Tensor](), [loss.grad_fn], set[Any]()
    while nodes:
        node: Any = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        stem = node.name().rstrip("0123456789").removesuffix("Backward")
        if stem in ("NllLoss", "NllLoss2D"):
            found += _of_labels(node)
        elif stem == "Div":
            divisor = _saved(node, "other")
            if divisor is not None and divisor.numel() == 1:
                found.append(divisor.detach().reshape(()).double())
                nodes += [before for before, _ in node.next_functions[:1]]
        elif stem in SUMS and getattr(node, "_saved_alpha", 1) == 1:
            nodes += [before for before, _ in node.next_functions]
    return torch.stack([sent(x, loss.device) for x in found]) if found else None


def _of_labels(node: Any) -> list[Tensor]:
    """The labels of a mean that are not ignored: their number, or the sum of their class weights."""
    target, weight = _saved(node, "target"), _saved(node, "weight")
    if node._saved_reduction != MEAN or target is None:
        return []
    valid = target != node._saved_ignore_index
    if weight is None:
        return [valid.sum().double()]
    return [(weight.detach().double()[target.where(valid, 0)] * valid).sum()]


def _saved(node: Any, name: str) -> Tensor | None:
    """A tensor that a node of autograd has saved. None without one, and for one that a hook has packed."""
    kept = getattr(node, f"_raw_saved_{name}", None)
    if getattr(kept, "unpack_hook", None) is not None:
        return None
    tensor = getattr(kept, "data", None)
    return tensor if isinstance(tensor, Tensor) else None
