"""Gives a loss the samples of all data ranks, and finds a loss that needs them.

Note: a loss between samples.
A contrastive loss of one rank's samples is not that of the whole batch.  So where a batch is divided, the first step
looks at the second derivative of its losses.  The gradient at one sample must not depend on another.  A loss that
cannot be differentiated twice shows nothing, and neither does one by labels alone.

Note: the weight of what was gathered.
Every rank computes the loss of all samples, and takes the gradient of its own.  The step averages over ranks.  So the
gradient of what was gathered weighs as many times more as there are ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from colossal_lite.distributed.autograd_collectives import join
from colossal_lite.distributed.communicator import Communicator


class AllSamples:
    """Gathers over the data ranks, for one engine."""

    def __init__(self, comm: Communicator) -> None:
        self._comm = comm
        self._weight = float(comm.size)

    def of(self, x: Tensor) -> Tensor:
        """The rows of all ranks' x [samples, ...], in the order of ranks."""
        if self._comm.size == 1:
            return x
        shapes = [list(shape) for shape in self._comm.gather_json(list(x.shape))]
        if not x.dim() or any(shape != shapes[0] for shape in shapes):
            raise ValueError(
                f"all_samples: data ranks have tensors of the shapes {shapes}. Legal: one row a sample, and equally "
                f"many samples on each rank"
            )
        weighed: Tensor = _Weighed.apply(x, lambda: self._weight) if x.requires_grad else x  # type: ignore[no-untyped-call]
        return join(weighed, self._comm, 0)

    def couples(self, loss: Tensor, outputs: Sequence[Tensor]) -> bool:
        """Whether the gradient of `loss` at one row of `outputs` depends on other rows, which were not gathered."""
        self._weight = 0.0  # what was gathered may couple samples
        try:
            with suppress(RuntimeError, NotImplementedError):  # it has no second derivative
                return _couples(loss, [x for x in outputs if len(x) > 1])
        finally:
            self._weight = float(self._comm.size)
        return False


class _Weighed(Function):
    """x itself, whose gradient is multiplied by what `weight` gives then."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Callable[[], float]) -> Tensor:
        ctx.weight = weight
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0] * ctx.weight(), None


def _couples(loss: Tensor, outputs: Sequence[Tensor]) -> bool:
    if not outputs:
        return False
    first = torch.autograd.grad(loss, outputs, create_graph=True, allow_unused=True)
    rows = [g[0] for g in first if g is not None and g.requires_grad]
    if not rows:  # the loss is linear
        return False
    total = sum((row * _weights(row)).sum() for row in rows)
    assert isinstance(total, Tensor)
    second = torch.autograd.grad(total, outputs, retain_graph=True, allow_unused=True)
    sizes = [h.detach().abs() for h in second if h is not None]
    if not sizes:
        return False
    others = torch.stack([h[1:].sum(dtype=torch.float64) for h in sizes]).sum()
    every = torch.stack([h.sum(dtype=torch.float64) for h in sizes]).sum()
    return bool(others > torch.finfo(loss.dtype).eps ** 0.5 * every)


def _weights(row: Tensor) -> Tensor:
    """Numbers that differ between near elements, as the gradient of a softmax adds up to zero."""
    return (1 + torch.arange(row.numel(), device=row.device) % 97).to(row.dtype).view(row.shape)
