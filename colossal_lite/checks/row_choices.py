"""Finds a choice among samples in a loss: a maximum, a median, or a hinge on a difference.

Note: what second derivatives do not show.
Such an operation is linear around each point.  So the gradient at a sample depends on another only where the choice
turns.  Then the operation is found by its name, in the graph from the loss to the outputs of the model.  It couples
samples if one of its results reads rows of two, and the loss depends on that result.  What it reads is a linear map J
of the outputs.  A backward gives J' v, and a second one, by v, gives J u.  With u in rows of an even binary digit, J u
is zero in what does not read them.  What a user's autograd.Function reads is not seen
(numerics/user_functions.py).  A distance matrix has no second derivative at all, and so is among these.
Cost: in steps that look, where there is such an operation, three backwards and two more for each digit.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

HINGES = frozenset(
    "Abs Clamp ClampMax ClampMin Fmax Fmin Hardshrink Hardsigmoid Hardtanh HuberLoss LeakyRelu Maximum Minimum "
    "MultiMarginLoss MultilabelMarginLoss PreluKernel Relu SmoothL1Loss Softshrink Threshold".split()
)
"""Operations whose result at one place reads their inputs there."""
CHOICES = frozenset(
    "Amax Amin Aminmax Cummax Cummin Kthvalue Max Median Min Mode Nanmedian Sort Topk".split()
)
"""Operations whose result reads their input along dims, all of them if the node names none."""
DISTANCES = frozenset(["Cdist", "Pdist"])
"""Distances between the rows of two inputs, or of one."""
FEW = 16
"""Operations that are looked at one by one, where they cannot be together."""
ROUNDING = 1024
"""A gradient of fewer times eps of the largest is none."""

Reads = list[tuple[Tensor, Tensor]]
"""For each input of an operation, which of its elements read rows of an even binary digit, and of an odd one."""


def chooses_between_rows(loss: Tensor, nodes: Sequence[Any], outputs: Sequence[GradientEdge]) -> bool:
    """Whether one of these `nodes` of a loss chooses between rows of `outputs`, which have a row for each sample. One
    that cannot be looked at does not count."""
    quantiles = _quantiles(nodes)
    looked_at = HINGES | CHOICES | DISTANCES
    found = [node for node in dict.fromkeys(nodes) if _stem(node) in looked_at or node in quantiles]
    if not found:
        return False
    arrived = _arrivals(loss, found, outputs)
    used = [node for node in found if node in arrived]
    try:
        return _any_reads_several(used, arrived, outputs)
    except (RuntimeError, NotImplementedError):  # something below one cannot be differentiated twice
        return any(_reads_several(node, arrived, outputs) for node in used[:FEW])


def _stem(node: Any) -> str:
    stem: str = node.name().rstrip("0123456789").removesuffix("Backward")
    return stem


def _quantiles(nodes: Sequence[Any]) -> set[Any]:
    """The two gathers between which each `torch.quantile` interpolates. From torch 2.14 on there is no sort below."""
    ends = ([n for n, _ in node.next_functions if n is not None] for node in nodes if _stem(node) == "Lerp")
    return {n for some in ends if all(_stem(n) == "Gather" for n in some) for n in some}


def _arrivals(loss: Tensor, nodes: Sequence[Any], outputs: Sequence[GradientEdge]) -> dict[Any, Tensor]:
    """For each node that the loss depends on, where its first result has a gradient."""
    found: dict[Any, Tensor] = {}

    def keep(node: Any, gradients: Sequence[Tensor | None]) -> None:
        if gradients[0] is not None:
            found[node] = gradients[0].detach()

    handles = [node.register_prehook(partial(keep, node)) for node in nodes]
    try:
        given = torch.autograd.grad(loss, outputs, retain_graph=True, allow_unused=True)
    finally:
        for handle in handles:
            handle.remove()
    most = max(
        (float(g.abs().nan_to_num().amax()) for g in given if g is not None and g.numel()), default=0.0
    )
    where = {n: g.abs() > ROUNDING * torch.finfo(g.dtype).eps * most for n, g in found.items()}
    return {node: there for node, there in where.items() if bool(there.any())}


def _any_reads_several(
    nodes: Sequence[Any], arrived: dict[Any, Tensor], outputs: Sequence[GradientEdge]
) -> bool:
    """Whether one result of an operation reads rows of an even binary digit and of an odd one."""
    edges = [[GradientEdge(x, n) for x, n in node.next_functions if x is not None] for node in nodes]
    every = list(dict.fromkeys(edge for some in edges for edge in some))
    if not every:
        return False
    look = _Look(every, outputs)
    for digit in range(look.digits):
        reads = look.by(digit)
        for node, some in zip(nodes, edges, strict=True):
            if _meets(node, arrived[node], [reads[edge] for edge in some]):
                return True
    return False


def _reads_several(node: Any, arrived: dict[Any, Tensor], outputs: Sequence[GradientEdge]) -> bool:
    try:
        return _any_reads_several([node], arrived, outputs)
    except (RuntimeError, NotImplementedError):
        return False


class _Look:
    """The rows of `outputs` that the elements of tensors read. `edges`: their places in the graph."""

    def __init__(self, edges: Sequence[GradientEdge], outputs: Sequence[GradientEdge]) -> None:
        self._edges = edges
        made: list[Any] = [edge.node._input_metadata[edge.output_nr] for edge in edges]
        self._starts = [
            torch.zeros(x.shape, dtype=x.dtype, device=x.device, requires_grad=True) for x in made
        ]
        found = torch.autograd.grad(edges, outputs, self._starts, create_graph=True, allow_unused=True)
        self._rows = [g for g in found if g is not None and g.requires_grad]
        self.digits = (max(map(len, self._rows), default=1) - 1).bit_length()

    def by(self, digit: int) -> dict[GradientEdge, tuple[Tensor, Tensor]]:
        """For the elements of each, whether they read rows with an even `digit`, and with an odd one."""
        odds, evens = (self._along(digit, parity) for parity in (1, 0))
        found = {}
        for edge, odd, even in zip(self._edges, odds, evens, strict=True):
            odd, even = odd.abs(), even.abs()
            most = torch.maximum(odd, even).nan_to_num(0.0, 0.0)
            least = torch.finfo(odd.dtype).eps * most.amax() if most.numel() else 0.0
            found[edge] = even > least, odd > least
        return found

    def _along(self, digit: int, parity: int) -> list[Tensor]:
        """What the elements change by with the chosen rows. Near elements change by other numbers, as a softmax reads
        none of a sum."""
        total = self._starts[0].new_zeros(())
        for place, rows in enumerate(self._rows):
            chosen = torch.arange(len(rows), device=rows.device) >> digit & 1 == parity
            by = 1 + (torch.arange(rows[chosen].numel(), device=rows.device) + 31 * place) % 97
            total = total + (rows[chosen].flatten() * by.to(rows.dtype)).sum()
        if not total.requires_grad:
            return [torch.zeros_like(start) for start in self._starts]
        found = torch.autograd.grad(total, self._starts, retain_graph=True, allow_unused=True)
        return [
            torch.zeros_like(start) if x is None else x for start, x in zip(self._starts, found, strict=True)
        ]


def _meets(node: Any, there: Tensor, reads: Reads) -> bool:
    """Whether a result of an operation reads both, by what the elements of its inputs read. `there`: the results on
    which the loss depends."""
    reads = [each for each in reads if bool(each[0].any() | each[1].any())]
    if not reads:
        return False
    even, odd = zip(*reads, strict=True)
    match _stem(node):
        case "Pdist":
            return bool(even[0].any() & odd[0].any())
        case "Cdist" if len(reads) == 2:
            (a, b), (c, d) = ([x.any(-1) for x in some] for some in (even, odd))
            both = (a[..., None] | b[..., None, :]) & (c[..., None] | d[..., None, :])
            return bool((both & there).any())
        case stem if stem in CHOICES or stem == "Gather":
            return _meets_along(node, there, even[0], odd[0])
    return bool((_union(even) & _union(odd) & there).any())


def _meets_along(node: Any, there: Tensor, even: Tensor, odd: Tensor) -> bool:
    """As `_meets`, of one that chooses along dims."""
    given = getattr(node, "_saved_dim", None)
    given = (given,) if isinstance(given, int) else given or range(even.dim())
    dims = tuple(dim - 2**64 if dim >= 2**63 else dim for dim in given)
    if not dims:
        return bool((even & odd).any())
    both = even.any(dims) & odd.any(dims)
    used = there.any(dims) if there.dim() == even.dim() else there
    return bool((both & used).any()) if used.shape == both.shape else bool(both.any())


def _union(some: Sequence[Tensor]) -> Tensor:
    return torch.stack(torch.broadcast_tensors(*some)).any(0)
