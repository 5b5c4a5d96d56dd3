"""Gives a loss the samples of all data ranks, and finds a loss that needs them.

Note: a loss between samples.
A contrastive loss of one rank's samples is not that of the whole batch.  So where a batch is divided, steps look at
the second derivative of their losses.  The gradient at one sample must not depend on another.  A choice among samples,
such as a maximum, is found in the graph (row_choices.py).  Weights, masks and indices of detached numbers are found by
running the loss again (loss_record.py, loss_replay.py).  A loss by labels alone shows nothing.

Note: a gradient that is not linear.
Backward starts from a loss of a part of the samples, or from a multiple of the loss.  So a hook on an output, or an
autograd.Function in the loss, sees another gradient than in one process.  It must be linear, as in
checks/linear_hooks.py.

Note: the steps that look.
Loops change their loss: a term begins after a warm-up, or its weight grows from 0.  The first shows as other
operations, which are looked at when they first come.  For the second, steps 1, 2, 4, 8 and so on look again.

Note: the gradient of what was gathered.
Every rank computes a loss of what was gathered: that of all samples, or the terms of its own.  A retrieval loss has its
own queries beside the passages of all.  So the gradient of a row is a sum over the losses of all ranks.  Ranks
exchange it in backward.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.graph import GradientEdge

from colossal_lite.checks.loss_record import LossRecord
from colossal_lite.checks.loss_replay import couples
from colossal_lite.checks.row_choices import chooses_between_rows
from colossal_lite.checks.summed_losses import sums_samples
from colossal_lite.distributed.autograd_collectives import gather, reduce_scatter
from colossal_lite.distributed.communicator import Communicator
from colossal_lite.numerics.retained_gradients import retained_gradients_kept
from colossal_lite.numerics.user_functions import FUNCTION_SEED, UnitArrivals

Fault = Literal["couples", "nonlinear", "sums"]
SEED = 1024.0
"""The multiple from which a second backward of a look starts."""


class AllSamples:
    """Gathers over the data ranks, for one engine."""

    def __init__(self, comm: Communicator) -> None:
        self._comm = comm
        self._is_aside = False
        self.seed = 1.0
        """The factor from which backward starts on this rank, in fp16."""
        self._key = f"outputs of {id(self)}"  # among the metadata of nodes
        self._number = f"number of {id(self)}"
        self._step = 1
        self._known = set[int]()  # hashes of the operations of losses that were looked at
        self.record = LossRecord()

    def of(self, x: Tensor) -> Tensor:
        """The rows of all ranks' x [samples, ...], in the order of ranks."""
        if self._comm.size == 1:
            return x if torch.is_grad_enabled() else x.detach()  # as on several ranks
        shapes = [list(shape) for shape in self._comm.gather_json(list(x.shape))]
        if not x.dim() or any(shape != shapes[0] for shape in shapes):
            raise ValueError(
                f"all_samples: data ranks have tensors of the shapes {shapes}. Legal: one row a sample, and equally "
                f"many samples on each rank"
            )
        with self.record.paused():
            gathered: Tensor = _Gathered.apply(x, self._comm, self)  # type: ignore[no-untyped-call]
        return gathered

    def note(self, outputs: Sequence[Tensor], rows: int) -> None:
        """Mark those `outputs` of a forward that have a row for each of its samples. Then `fault` finds them. So for
        numbers, such as a loss that the forward gives."""
        for x in outputs:
            node: Any = x.grad_fn
            if node is not None and not x.dim():
                node.metadata[self._number] = True
            elif node is not None and len(x) == rows:
                node.metadata.setdefault(self._key, {})[x.output_nr] = rows
        if self._comm.size > 1 and self._looks:
            self.record.begin(outputs, rows)

    @property
    def _looks(self) -> bool:
        """Whether this step looks at all losses."""
        return not self._step & (self._step - 1)

    def next_step(self) -> None:
        """Count a step, for `fault`."""
        self._step += 1

    def fault(
        self,
        loss: Tensor,
        forwards: Sequence[tuple[int, int]],
        *,
        own_loss: bool = True,
        counted: bool = False,
    ) -> Fault | None:
        """Whether the gradient of `loss` at one row of the outputs depends on other rows, which were not gathered. Or
        whether it is not linear in what backward starts from, or a sum over rows. None in steps that do not look.
        `forwards`: numbers of the nodes that each forward has made. `own_loss`: backward starts from the loss as it
        is, so on one rank nothing is wrong. `counted`: it weighs by a count."""
        is_cut = self._comm.size > 1
        if not loss.requires_grad or (own_loss and not is_cut):
            return None
        front, nodes = self._front(loss, forwards)
        operations = hash(tuple(node.name() for node in nodes))
        is_known = operations in self._known
        self._known.add(operations)
        if is_known and not self._looks:
            return None
        within, _ = self._front(loss, forwards, enters=True)
        if is_cut and sums_samples(_edge_of(loss), within):
            return "sums"
        if not front or self._runs_the_model(front):
            return None
        outputs = [edge for edge, rows in front.items() if rows > 1]
        with self._aside(), UnitArrivals(nodes) as arrivals:
            with suppress(RuntimeError, NotImplementedError):  # it has no second derivative
                if is_cut and _couples(loss, arrivals, outputs):
                    return "couples"
            with suppress(RuntimeError, NotImplementedError):  # it has no first one to be looked at
                if is_cut and outputs and chooses_between_rows(loss, nodes, outputs):
                    return "couples"
                if is_cut and outputs and couples(self.record, loss, outputs, counted=counted):
                    return "couples"
                return None if _is_linear(loss, arrivals, list(front)) else "nonlinear"
        return None

    @contextmanager
    def _aside(self) -> Iterator[None]:
        """Context of a look: what was gathered may couple samples, and tensors keep the gradients that they retain. No
        rank waits for others."""
        self._is_aside = True
        try:
            with retained_gradients_kept():
                yield
        finally:
            self._is_aside = False

    def _front(
        self, loss: Tensor, forwards: Sequence[tuple[int, int]], *, enters: bool = False
    ) -> tuple[dict[GradientEdge, int], list[Any]]:
        """The outputs that `loss` reads, with their rows, and the operations between. `enters`: those too from which a
        forward has computed a number that it gives."""
        found, nodes = dict[GradientEdge, int](), list[Any]()
        edges, seen = [(_edge_of(loss), False)], set[tuple[Any, bool]]()
        while edges:
            edge, is_within = edges.pop()
            node: Any = edge.node
            if (rows := node.metadata.get(self._key, {}).get(edge.output_nr)) is not None:
                found[edge] = rows
                continue
            is_within = is_within or (enters and self._number in node.metadata)
            if (node, is_within) in seen:
                continue
            if is_within or not any(a <= node._sequence_nr() < b for a, b in forwards):
                seen.add((node, is_within))
                nodes.append(node)
                edges += [(before, is_within) for before in _before(node)]
        return found, nodes

    def _runs_the_model(self, front: Collection[GradientEdge]) -> bool:
        """Whether an output was computed from another, so that a backward to it would run the model."""
        edges, seen = [before for edge in front for before in _before(edge.node)], set[Any]()
        while edges:
            node: Any = edges.pop().node
            if self._key in node.metadata:
                return True
            if node not in seen:
                seen.add(node)
                edges += _before(node)
        return False


def _edge_of(x: Tensor) -> GradientEdge:
    return torch.autograd.graph.get_gradient_edge(x)


def _before(node: Any) -> list[GradientEdge]:
    return [GradientEdge(each, n) for each, n in node.next_functions if each is not None]


class _Gathered(Function):
    """The rows of all ranks. The gradient of a row is the sum over ranks, which may start from other seeds; 0 in a
    look."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, comm: Communicator, engine: AllSamples) -> Tensor:
        ctx.comm, ctx.engine = comm, engine
        return gather(x, comm, 0)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        given, engine = gradients[0].contiguous(), ctx.engine
        if engine._is_aside:
            return given.chunk(ctx.comm.size)[0] * 0.0, None, None
        if engine.seed == 1.0:
            return reduce_scatter(given, ctx.comm, 0), None, None
        wide = given.to(torch.promote_types(given.dtype, torch.float32)) / engine.seed
        total = reduce_scatter(wide, ctx.comm, 0) * engine.seed
        return total.to(given.dtype), None, None


def _is_linear(loss: Tensor, arrivals: UnitArrivals, outputs: Sequence[GradientEdge]) -> bool:
    """Whether the gradients are as many times as large as what backward starts from. With Functions of a user a last
    backward gives them what they had saved."""
    seed = FUNCTION_SEED if arrivals.functions else SEED

    def gradients(factor: float) -> list[Tensor]:
        arrivals.factor = factor
        start = torch.full_like(loss, factor)
        found = torch.autograd.grad(loss, outputs, start, retain_graph=True, allow_unused=True)
        return [x.clone() for x in (*found, *arrivals.all_arrived()) if x is not None]

    first, times = gradients(1.0), gradients(seed)
    if arrivals.functions:
        gradients(1 / seed)
    for x, y in zip(first, times, strict=True):
        limits = torch.finfo(x.dtype)
        exact, least = limits.eps**0.5, limits.smallest_normal * limits.eps * abs(seed)
        right, found = x.double() * seed, y.double()
        size = torch.maximum(found.norm(), right.norm())
        lost = least * x.numel() ** 0.5  # to small numbers of fp16, which have few digits
        if bool((found - right).norm() > exact * size + lost) and bool(size.isfinite()):
            return False
    return True


def _couples(loss: Tensor, arrivals: UnitArrivals, outputs: Sequence[GradientEdge]) -> bool:
    if not outputs:
        return False
    first = torch.autograd.grad(loss, outputs, create_graph=True, allow_unused=True)
    numbers = [g for g in arrivals.all_arrived() if not g.dim() and g.requires_grad]
    for number in numbers:  # what such a Function has made of all rows meets others in the loss
        found = torch.autograd.grad(number, outputs, retain_graph=True, allow_unused=True)
        if any(g is not None for g in found):
            return True
    gradients = [g for g in first if g is not None and g.requires_grad]
    if not gradients:  # the loss is linear
        return False
    digits = (max(map(len, gradients)) - 1).bit_length()  # any two rows differ in one
    return any(_reaches_others(gradients, digit, outputs) for digit in range(digits))


def _reaches_others(gradients: Sequence[Tensor], digit: int, outputs: Sequence[GradientEdge]) -> bool:
    """Whether `gradients` at rows of an even binary `digit` depend on rows of an odd one."""
    chosen = [(g, torch.arange(len(g), device=g.device) >> digit & 1 == 0) for g in gradients]
    total = sum((g[even] * _weights(g[even], place)).sum() for place, (g, even) in enumerate(chosen))
    assert isinstance(total, Tensor)
    second = torch.autograd.grad(total, outputs, retain_graph=True, allow_unused=True)
    sizes = [
        h.detach().abs().reshape(len(h), -1).sum(1, dtype=torch.float64) for h in second if h is not None
    ]
    if not sizes:
        return False
    odd = [h[torch.arange(len(h), device=h.device) >> digit & 1 == 1].sum() for h in sizes]
    every = torch.stack([h.sum() for h in sizes]).sum()
    return bool(torch.stack(odd).sum() > torch.finfo(total.dtype).eps ** 0.5 * every)


def _weights(rows: Tensor, place: int) -> Tensor:
    """Numbers that differ between near elements, as the gradient of a softmax adds up to zero. And between outputs, as
    the gradients of a difference do."""
    weights = 1 + (torch.arange(rows.numel(), device=rows.device) + 31 * place) % 97
    return weights.to(rows.dtype).view(rows.shape)
