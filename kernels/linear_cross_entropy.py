"""Computes the cross-entropy of x @ weight.T without holding all logits.

Rows are taken in chunks of `chunk_rows`.  A chunk's logits become their own gradient in place, and add to dx and
dweight in forward.  Backward only scales these two.  dweight is summed in float32 where there are several chunks.  In
bf16 the error would grow with their number (Liger #827, #1391).
With the vocabulary cut between ranks, the caller's `gather` turns this rank's partial [N, 3] into [ranks, N, 3].
The three numbers are in kernels/cross_entropy.py.  dx is then this rank's term, and the caller sums it.

Others: Cut Your Losses (arXiv 2411.09009) keeps less and computes more.  Liger's chunks of V / D rows are too small for
a matrix product at full rate.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from .cross_entropy import TRITON as PARTS
from .cross_entropy import check_labels, check_range, combine, cross_entropy_, gradient, partial
from .cross_entropy import reference as whole_reference
from .launch import INDEX, Takes, TritonOp, check_alike

_BLOCK_ELEMENTS = 1 << 20
ROWS, ROWS_IN_16_BITS = 256, 2048
"""A chunk reads and writes all of dweight.  So many rows make its products cost more than that, at a GPU's rate."""


def linear_cross_entropy(
    x: Tensor,
    weight: Tensor,
    labels: Tensor,
    ignore_index: int = -100,
    smoothing: float = 0.0,
    z_loss: float = 0.0,
    *,
    start: int = 0,
    vocabulary: int | None = None,
    gather: Callable[[Tensor], Tensor] | None = None,
    rows: int | None = None,
    scale: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """(sum over valid rows, their number) of the cross-entropy of x [..., D] @ weight [V_local, D].T.

    weight holds rows [start, start + V_local) of a vocabulary of `vocabulary`.  smoothing: label smoothing.  z_loss:
    factor of the squared log-sum-exp.  rows: rows a chunk, `chunk_rows` unless given.  scale: what backward will begin
    with, a loss scale; gradients in 16 bits are made with it, and are as exact as those of whole logits.  Raises
    ValueError for shapes that do not fit, and on the CPU for labels outside the vocabulary.
    """
    return _run(
        partial,
        gradient,
        x,
        weight,
        labels,
        ignore_index,
        smoothing,
        z_loss,
        start,
        vocabulary,
        gather,
        rows,
        scale,
    )


def _run(
    partial_of: Callable[..., Tensor],
    gradient_of: Callable[..., Tensor],
    x: Tensor,
    weight: Tensor,
    labels: Tensor,
    ignore_index: int = -100,
    smoothing: float = 0.0,
    z_loss: float = 0.0,
    start: int = 0,
    vocabulary: int | None = None,
    gather: Callable[[Tensor], Tensor] | None = None,
    rows: int | None = None,
    scale: float = 1.0,
) -> tuple[Tensor, Tensor]:
    vocabulary = weight.shape[0] if vocabulary is None else vocabulary
    if x.shape[-1] != weight.shape[-1] or weight.dim() != 2:
        raise ValueError(
            f"linear_cross_entropy: x has shape {tuple(x.shape)}, weight {tuple(weight.shape)}; "
            "legal are [..., D] and [V, D]"
        )
    check_alike("linear_cross_entropy", x=x, weight=weight)
    if rows is not None and rows < 1:
        raise ValueError(f"linear_cross_entropy: rows={rows}; legal is 1 or more")
    check_labels("linear_cross_entropy", x, labels, smoothing, given="x")
    check_range("linear_cross_entropy", labels, vocabulary, ignore_index)
    flat = labels.reshape(-1)
    rows = chunk_rows(x.element_size()) if rows is None else rows
    options = (start, vocabulary, ignore_index, smoothing, z_loss)
    trains = torch.is_grad_enabled()  # what a Function's forward no longer knows
    total: Tensor = _LinearCrossEntropy.apply(  # type: ignore[no-untyped-call]
        x.reshape(-1, x.shape[-1]),
        weight,
        flat,
        options,
        gather,
        rows,
        partial_of,
        gradient_of,
        scale,
        trains,
    )
    return total, (flat != ignore_index).sum()


def chunk_rows(element_bytes: int) -> int:
    """Rows of a chunk, by the size of an element of x."""
    return ROWS_IN_16_BITS if element_bytes <= 2 else ROWS


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, labels: Tensor, options: tuple[Any, ...],
        gather: Callable[[Tensor], Tensor] | None, rows: int, partial_of: Callable[..., Tensor],
        gradient_of: Callable[..., Tensor], scale: float, trains: bool,
    ) -> Tensor:  # fmt: skip
        acc = torch.promote_types(x.dtype, torch.float32)
        total = torch.zeros((), dtype=acc, device=x.device)
        needs_dx, needs_dweight = (trains and needs for needs in ctx.needs_input_grad[:2])
        seed = scale if needs_dx or needs_dweight else None
        is_whole = (
            gather is None and partial_of is partial and options[:2] == (0, len(weight)) and not x.is_cuda
        )

        def loss_of(logits: Tensor, labels: Tensor) -> Tensor:
            """The sum of a chunk. Its logits become their gradient, if there is one."""
            if is_whole:
                return cross_entropy_(logits, labels, seed, *options[2:])
            stats = partial_of(logits, labels, *options[:2])
            loss, _, lse = combine(stats[None] if gather is None else gather(stats), labels, *options[1:])
            if seed is not None:
                d_total = torch.full((), seed, dtype=acc, device=x.device)
                gradient_of(d_total, logits, labels, lse, *options, out=logits)
            return loss

        dx = torch.empty_like(x) if needs_dx else None
        dweight: Tensor | None = None
        for begin in range(0, max(len(x), 1), rows):
            part = slice(begin, begin + rows)
            logits = x[part] @ weight.T
            total += loss_of(logits, labels[part])
            if dx is not None:
                torch.mm(logits, weight, out=dx[part])
            if needs_dweight and len(x) <= rows:
                dweight = logits.T @ x
            elif needs_dweight:
                dweight = (
                    torch.zeros(weight.shape, dtype=acc, device=x.device) if dweight is None else dweight
                )
                _add_product(dweight, logits.T, x[part])
            del logits  # before the next chunk's
        ctx.save_for_backward(dx, None if dweight is None else dweight.to(weight.dtype))
        ctx.scale = scale
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_total: Tensor) -> tuple[Tensor | None, ...]:
        factor = d_total / ctx.scale
        dx, dweight = (None if g is None else _scaled(g, factor) for g in ctx.saved_tensors)
        return dx, dweight, *[None] * 8


def _scaled(g: Tensor, factor: Tensor) -> Tensor:
    """g * factor, multiplied in factor's dtype. In 16 bits a factor of 1 / 11 would be off by a thousandth."""
    if g.dtype == factor.dtype:
        return g * factor
    scaled = torch.empty_like(g)
    for part, out in zip(g.split(ROWS_IN_16_BITS), scaled.split(ROWS_IN_16_BITS), strict=True):
        out.copy_(part.to(factor.dtype).mul_(factor))
    return scaled


def _add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """total += a @ b, summed in total's dtype."""
    if total.dtype == a.dtype:
        total.addmm_(a, b)
    elif total.device.type == "cuda":  # the matrix units add bf16 products into float32 themselves
        torch.addmm(total, a, b, out_dtype=total.dtype, out=total)
    else:  # in blocks, else a wide copy of `a` is as large as two chunks of logits
        b, step = b.to(total.dtype), max(1, _BLOCK_ELEMENTS // a.shape[1])
        blocks = range(
            0, min(step, len(a)) if a.is_meta else len(a), step
        )  # no values: one block has all shapes
        for block in (slice(i, i + step) for i in blocks):
            total[block].addmm_(a[block].to(total.dtype), b)


def _triton(x: Tensor, weight: Tensor, labels: Tensor, *args: Any, **named: Any) -> tuple[Tensor, Tensor]:
    return _run(
        PARTS["cross_entropy_partial"].run, PARTS["cross_entropy_gradient"].run,
        x, weight, labels, *args, **named,
    )  # fmt: skip


_TAKES = {"x": Takes(layout="any"), "weight": Takes(layout="any", like="x"), "labels": INDEX}

TRITON = {"linear_cross_entropy": TritonOp(_triton, _TAKES)}


def reference(x: Tensor, weight: Tensor, labels: Tensor, *args: Any) -> Tensor:
    """The sum, from all logits in float64."""
    return whole_reference(x.double() @ weight.double().T, labels, *args)
