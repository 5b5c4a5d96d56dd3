"""Finds a choice among samples in a loss: a maximum, a median, or a hinge on a difference.

Note: what second derivatives do not show.
Such an operation is linear around each point.  So the gradient at a sample depends on another only where the choice
turns.  Then the operation is found by its name, in the graph from the loss to the outputs of the model.  It couples
samples if one of its results reads rows of two.  What it reads is a linear map J of the outputs.  A backward gives
J' v, and a second one, by v, gives J u.  With u in rows of an even binary digit, J u is zero in what does not read
them.  A choice above a number of an autograd.Function is not looked at (numerics/unit_start.py).  A distance matrix has
no second derivative at all, and so is among these.
Cost: in steps that look, for each such operation, a backward and two more for each digit.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from colossal_lite.numerics.unit_start import numbers_of_functions

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


def chooses_between_rows(nodes: Iterable[Any], outputs: Sequence[GradientEdge]) -> bool:
    """Whether one of these `nodes` of a loss chooses between rows of `outputs`, which have a row for each sample. One
    that cannot be looked at does not count."""
    return any(_reads_several(node, outputs) for node in nodes if _stem(node) in HINGES | CHOICES | DISTANCES)


def _stem(node: Any) -> str:
    stem: str = node.name().rstrip("0123456789").removesuffix("Backward")
    return stem


def _reads_several(node: Any, outputs: Sequence[GradientEdge]) -> bool:
    """Whether one result of an operation reads rows of an even binary digit and of an odd one."""
    edges = [GradientEdge(x, n) for x, n in node.next_functions if x is not None]
    if any(numbers_of_functions(edge, _nodes_below(edge, outputs)) for edge in edges):
        return False
    with suppress(RuntimeError, NotImplementedError):  # something below it cannot be differentiated twice
        reads = [_Reads(edge, outputs) for edge in edges]
        digits = max((each.digits for each in reads), default=0)
        return any(_meets(node, [each.by(digit) for each in reads]) for digit in range(digits))
    return False


def _nodes_below(edge: GradientEdge, outputs: Sequence[GradientEdge]) -> list[Any]:
    """The operations from which a tensor is computed, from the outputs on."""
    edges, found = [edge], dict[Any, None]()
    while edges:
        edge = edges.pop()
        if edge not in outputs and edge.node not in found:
            found[edge.node] = None
            edges += [GradientEdge(x, n) for x, n in edge.node.next_functions if x is not None]
    return list(found)


class _Reads:
    """The rows of `outputs` that the elements of a tensor read. `edge`: its place in the graph."""

    def __init__(self, edge: GradientEdge, outputs: Sequence[GradientEdge]) -> None:
        node: Any = edge.node
        made = node._input_metadata[edge.output_nr]
        self._start = torch.zeros(made.shape, dtype=made.dtype, device=made.device, requires_grad=True)
        found = torch.autograd.grad([edge], outputs, [self._start], create_graph=True, allow_unused=True)
        self._rows = [g for g in found if g is not None and g.requires_grad]
        self.digits = (max(map(len, self._rows), default=1) - 1).bit_length()

    def by(self, digit: int) -> tuple[Tensor, Tensor]:
        """For each element, whether it reads rows with an even `digit`, and with an odd one."""
        odd, even = (self._along(digit, parity).abs() for parity in (1, 0))
        least = torch.finfo(odd.dtype).eps * torch.maximum(odd, even).nan_to_num(0.0, 0.0).amax()
        return even > least, odd > least

    def _along(self, digit: int, parity: int) -> Tensor:
        """What the elements change by with the chosen rows. Near elements change by other numbers, as a softmax reads
        none of a sum."""
        total = self._start.new_zeros(())
        for place, rows in enumerate(self._rows):
            chosen = torch.arange(len(rows), device=rows.device) >> digit & 1 == parity
            by = 1 + (torch.arange(rows[chosen].numel(), device=rows.device) + 31 * place) % 97
            total = total + (rows[chosen].flatten() * by.to(rows.dtype)).sum()
        if not total.requires_grad:
            return torch.zeros_like(self._start)
        (found,) = torch.autograd.grad(total, self._start, retain_graph=True, allow_unused=True)
        return torch.zeros_like(self._start) if found is None else found


def _meets(node: Any, reads: Sequence[tuple[Tensor, Tensor]]) -> bool:
    """Whether one result of an operation reads both, by what the elements of its inputs read."""
    reads = [each for each in reads if bool(each[0].any() | each[1].any())]
    if not reads:
        return False
    even, odd = zip(*reads, strict=True)
    match _stem(node):
        case "Pdist":
            return bool(even[0].any() & odd[0].any())
        case "Cdist" if len(reads) == 2:
            (a, b), (c, d) = ([x.any(-1) for x in some] for some in (even, odd))
            return bool(((a[..., None] | b[..., None, :]) & (c[..., None] | d[..., None, :])).any())
        case stem if stem in CHOICES:
            dims = _dims(node, even[0].dim())
            return bool((even[0].any(dims) & odd[0].any(dims)).any() if dims else (even[0] & odd[0]).any())
    return bool((_union(even) & _union(odd)).any())


def _union(some: Sequence[Tensor]) -> Tensor:
    return torch.stack(torch.broadcast_tensors(*some)).any(0)


def _dims(node: Any, rank: int) -> tuple[int, ...]:
    """The dims along which an operation chooses."""
    given = getattr(node, "_saved_dim", None)
    given = (given,) if isinstance(given, int) else given or range(rank)
    return tuple(dim - 2**64 if dim >= 2**63 else dim for dim in given)
