"""Reads by how many labels a loss is a mean, from its graph.

Note: means of ranks.
A step weighs the losses of its ranks by their counts, or alike.  For the mean over all labels each rank's mean divides
by its count, or all by as many labels.  So ranks compare by what their means divide.  The walk goes
from the loss through sums, means and products with one number.  A mean keeps its sizes, a product its factor, and
`nll_loss` its labels and class weights.  A rank may weigh its own mean by a factor.  So each divisor is given alone,
over the count, and over the factors too.  Tensors that a hook has packed are left alone.  To unpack one may run a
forward again (torch.utils.checkpoint).
"""

from __future__ import annotations

from math import prod
from typing import Any

import torch
from torch import Tensor

from colossal_lite.memory.transfers import sent

MEAN = 1  # the number of torch for reduction="mean"
SAME = (
    "Sum Neg View UnsafeView Squeeze Unsqueeze Transpose Permute Select Stack Cat ToCopy Clone Alias "
    "Where Clamp ClampMin NanToNum"
).split()
"""Operations whose result has the numbers of their inputs with a factor of 1, -1 or 0."""


def denominators(loss: Tensor, count: int | Tensor | None = None) -> Tensor | None:
    """What each mean in `loss` divides by, that over `count`, and that over the factors above it too. float64
    [means, 3] in the order of the graph. None without a mean."""
    one = torch.ones((), dtype=torch.float64)
    weight = one if count is None else torch.as_tensor(count).detach().reshape(()).double()
    nodes: list[tuple[Any, Tensor | None, Tensor]] = [(loss.grad_fn, None, one)]
    found, seen = list[Tensor](), set[Any]()
    while nodes:
        node, divisor, factor = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        further = _inputs(node)
        for before, by, times in further:
            nodes.append((before, _product(divisor, by), factor if times is None else factor * times))
        if not further and (divisor := _product(divisor, _of_a_reduction(node))) is not None:
            found += [sent(x, loss.device) for x in (divisor, divisor / weight, divisor / weight / factor)]
    return torch.stack(found).view(-1, 3) if found else None


def _inputs(node: Any) -> list[tuple[Any, Tensor | None, Tensor | None]]:
    """The inputs of an operation, each with what it divides them by, and what it multiplies them by. Empty where the
    walk ends."""
    before = [each for each, _ in node.next_functions]
    match node.name().rstrip("0123456789").removesuffix("Backward"):
        case "Div" if (other := _number(node, "other")) is not None:
            return [(before[0], other, None)]
        case "Mul":
            factors = [_number(node, name) for name, _ in zip(("other", "self"), before, strict=False)]
            return [(x, None, by) for x, by in zip(before, factors, strict=True) if by is not None]
        case "Mean":
            sizes, dims = node._saved_self_sym_sizes, getattr(node, "_saved_dim", ())
            count = prod(sizes[dim - 2**64 if dim >= 2**63 else dim] for dim in dims or range(len(sizes)))
            return [(before[0], torch.tensor(float(count), dtype=torch.float64), None)]
        case "Add" | "Sub":
            return [(before[0], None, None), *((x, None, _number(node, "alpha")) for x in before[1:])]
        case stem if stem in SAME:
            return [(x, None, None) for x in before]
    return []


def _product(one: Tensor | None, other: Tensor | None) -> Tensor | None:
    return other if one is None else one if other is None else one * other


def _of_a_reduction(node: Any) -> Tensor | None:
    """By what an operation with reduction="mean" divides. None for others. `nll_loss` divides by the labels that are
    not ignored: their number, or the sum of their class weights."""
    if getattr(node, "_saved_reduction", None) != MEAN:
        return None
    if not node.name().startswith("NllLoss"):
        x = _saved(node, "self")
        return None if x is None else torch.tensor(float(x.numel()), dtype=torch.float64)
    target, weight = _saved(node, "target"), _saved(node, "weight")
    if target is None:
        return None
    valid: Tensor = target != node._saved_ignore_index
    each = valid if weight is None else weight.detach().double()[target.where(valid, 0)] * valid
    return each.sum(dtype=torch.float64)


def _number(node: Any, name: str) -> Tensor | None:
    """A factor or divisor that is one number, float64. None for other tensors, and for one that a hook has packed."""
    if not hasattr(node, f"_raw_saved_{name}"):
        number = getattr(node, f"_saved_{name}", None)
        return torch.tensor(float(number), dtype=torch.float64) if isinstance(number, int | float) else None
    tensor = _saved(node, name)
    if tensor is None or tensor.numel() != 1 or tensor.is_complex():
        return None
    return tensor.detach().reshape(()).double()


def _saved(node: Any, name: str) -> Tensor | None:
    """A tensor that a node of autograd has saved. None without one, and for one that a hook has packed."""
    kept = getattr(node, f"_raw_saved_{name}", None)
    if getattr(kept, "unpack_hook", None) is not None:
        return None
    tensor = getattr(kept, "data", None)
    return tensor if isinstance(tensor, Tensor) else None
