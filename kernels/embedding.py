"""Adds the gradient of an embedding into an existing weight gradient.

    grad[v] += sum of dy[n] over the tokens n with ids[n] == v

No model calls it yet: autograd makes a dense gradient, which writes all V rows first.  Here only rows that occur are
written.  The Triton kernel sorts the tokens by id.  One program sums the tokens of one id, in float32 and in their
order, without atomics.  So the bits are always the same.  The torch path adds in grad's dtype.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .launch import INDEX, ROWS, Takes, TritonOp, architecture, jit, launch, matrix, tile, tl


def embedding_grad_(grad: Tensor, dy: Tensor, ids: Tensor, start: int = 0) -> None:
    """Add the gradient of an embedding to grad [V_local, D]. dy [..., D] is that of its output for ids [...].

    grad holds rows [start, start + V_local) of the table; other ids leave it alone.  Raises ValueError for
    shapes that do not fit.
    """
    _check(grad, dy, ids)
    local, rows = ids.reshape(-1) - start, dy.reshape(-1, dy.shape[-1])
    here = (local >= 0) & (local < grad.shape[0])
    rows = torch.where(here[:, None], rows.to(grad.dtype), 0.0)
    grad.index_add_(0, torch.where(here, local, 0), rows)


def _check(grad: Tensor, dy: Tensor, ids: Tensor) -> None:
    if grad.dim() != 2 or dy.shape != (*ids.shape, grad.shape[1]):
        raise ValueError(
            f"embedding_grad_: grad {tuple(grad.shape)}, dy {tuple(dy.shape)}, ids {tuple(ids.shape)}; "
            "legal are [V, D], [..., D] and [...]"
        )
    if ids.dtype != torch.int64:
        raise ValueError(f"embedding_grad_: ids is {ids.dtype}; legal is torch.int64")


@jit
def _embedding_kernel(
    grad, dy, ids, order, tokens, features, start, rows, grad_stride, dy_stride, COLUMNS: tl.constexpr
):
    """Program n works if sorted token n is the first of its id, and sums the run."""
    n = tl.program_id(0).to(tl.int64)
    v = tl.load(ids + n)
    before = tl.load(ids + n - 1, mask=n > 0, other=-1)
    local = v - start
    if (v != before) & (local >= 0) & (local < rows):
        c = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
        inside = c < features
        total = tl.load(grad + local * grad_stride + c, mask=inside, other=0.0)
        kind = total.dtype
        total = total.to(tl.float32)
        at = n
        while (at < tokens) & (tl.load(ids + at, mask=at < tokens, other=-1) == v):
            token = tl.load(order + at)
            total += tl.load(dy + token * dy_stride + c, mask=inside, other=0.0).to(tl.float32)
            at += 1
        tl.store(grad + local * grad_stride + c, total.to(kind), mask=inside)


def _triton(grad: Tensor, dy: Tensor, ids: Tensor, start: int = 0) -> None:
    _check(grad, dy, ids)
    rows = matrix("embedding_grad_", "dy", dy)
    target = matrix("embedding_grad_", "grad", grad)
    ordered, order = ids.reshape(-1).sort(stable=True)
    options = tile("embedding", grad.shape[1], architecture(grad.device))
    launch(
        _embedding_kernel, (ordered.numel(), -(-grad.shape[1] // options["COLUMNS"])), target, rows, ordered, order,
        ordered.numel(), grad.shape[1], start, grad.shape[0], target.stride(0), rows.stride(0), **options,
    )  # fmt: skip


TRITON = {"embedding_grad_": TritonOp(_triton, {"grad": Takes(layout="apart"), "dy": ROWS, "ids": INDEX})}


def reference(grad: Tensor, dy: Tensor, ids: Tensor, start: int = 0) -> Tensor:
    """grad afterwards, in float64, one token at a time."""
    total = grad.double().clone()
    for v, row in zip(ids.flatten().tolist(), dy.double().flatten(0, -2), strict=True):
        if 0 <= v - start < len(total):
            total[v - start] += row
    return total
