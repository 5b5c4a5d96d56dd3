"""Scaled masked softmax over the last dimension, for attention that a flash kernel does not serve.

    p_j = exp(scale x_j - m) / sum_k exp(scale x_k - m) over the keys k that the mask leaves; dx = scale p (dy
    - sum(dy p))

A row that the mask empties is zero.  Any width; Megatron's kernels take 16 to 4096 and multiples of 4.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from .launch import ROWS, Takes, TritonOp, architecture, jit, launch, matrix, tile, tl


def softmax(x: Tensor, mask: Tensor | None = None, scale: float = 1.0, causal: bool = False) -> Tensor:
    """x [..., T, S]; mask bool, true where a key is seen, of a shape that expands to x's; causal: key j <=
    query i.

    Raises ValueError for a mask of another type or shape.
    """
    x, mask = _checked(x, mask)
    if causal:
        lower = torch.ones(x.shape[-2:], dtype=torch.bool, device=x.device).tril()
        mask = lower if mask is None else mask & lower
    z = x if scale == 1.0 else x * scale
    if mask is None:
        return z.softmax(dim=-1)
    p = z.masked_fill(~mask, -math.inf).softmax(dim=-1)
    return torch.where(mask, p, 0.0)  # an emptied row is NaN so far


def _checked(x: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor | None]:
    if x.dim() < 2:
        raise ValueError(f"softmax: x has shape {tuple(x.shape)}; legal is [..., T, S]")
    if mask is None:
        return x, None
    if mask.dtype != torch.bool:
        raise ValueError(f"softmax: mask is {mask.dtype}; legal is torch.bool")
    try:
        return x, mask.expand(x.shape)
    except RuntimeError as error:
        raise ValueError(
            f"softmax: mask has shape {tuple(mask.shape)}; legal is one that expands to {tuple(x.shape)}"
        ) from error


@jit
def _scores(x, mask, row, c, query, columns, x_stride, scale, MASK: tl.constexpr, CAUSAL: tl.constexpr):
    """Scaled scores of some columns of one row, -inf where nothing is seen."""
    inside = c < columns  # alone on the loads: any other mask would break their 128 bits up
    z = tl.load(x + row * x_stride + c, mask=inside, other=0.0).to(tl.float32) * scale
    seen = inside
    if MASK:
        seen = seen & (tl.load(mask + row * columns + c, mask=inside, other=0) != 0)
    if CAUSAL:
        seen = seen & (c <= query)
    return tl.where(seen, z, -float("inf"))


@jit
def _softmax_forward(
    x,
    mask,
    y,
    queries,
    columns,
    x_stride,
    scale,
    MASK: tl.constexpr,
    CAUSAL: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """One row: maximum and sum on the way, then the row again."""
    row = tl.program_id(0).to(tl.int64)
    query = row % queries
    top = -float("inf")
    total = 0.0
    for start in range(0, columns, COLUMNS):
        c = start + tl.arange(0, COLUMNS)
        z = _scores(x, mask, row, c, query, columns, x_stride, scale, MASK, CAUSAL)
        higher = tl.maximum(top, tl.max(z, axis=0))
        safe = tl.where(higher == -float("inf"), 0.0, higher)
        total = total * tl.exp(top - safe) + tl.sum(tl.exp(z - safe), axis=0)
        top = higher
    safe = tl.where(top == -float("inf"), 0.0, top)
    share = tl.where(total == 0.0, 0.0, 1.0 / total)
    for start in range(0, columns, COLUMNS):
        c = start + tl.arange(0, COLUMNS)
        z = _scores(x, mask, row, c, query, columns, x_stride, scale, MASK, CAUSAL)
        tl.store(y + row * columns + c, tl.exp(z - safe) * share, mask=c < columns)


@jit
def _softmax_backward(dy, y, dx, columns, scale, COLUMNS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    total = tl.zeros((COLUMNS,), tl.float32)
    for start in range(0, columns, COLUMNS):
        c = start + tl.arange(0, COLUMNS)
        p = tl.load(y + row * columns + c, mask=c < columns, other=0.0).to(tl.float32)
        total += p * tl.load(dy + row * columns + c, mask=c < columns, other=0.0).to(tl.float32)
    mean = tl.sum(total, axis=0)
    for start in range(0, columns, COLUMNS):
        c = start + tl.arange(0, COLUMNS)
        p = tl.load(y + row * columns + c, mask=c < columns, other=0.0).to(tl.float32)
        d = tl.load(dy + row * columns + c, mask=c < columns, other=0.0).to(tl.float32)
        tl.store(dx + row * columns + c, scale * p * (d - mean), mask=c < columns)


class _Softmax(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, mask: Tensor | None, scale: float, causal: bool) -> Tensor:
        flat = matrix("softmax", "x", x)
        y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        whole = None if mask is None else mask.contiguous()
        launch(
            _softmax_forward, (len(flat),), flat, whole, y, x.shape[-2], x.shape[-1], flat.stride(0), scale,
            MASK=mask is not None, CAUSAL=causal, **tile("softmax", x.shape[-1], architecture(x.device)),
        )  # fmt: skip
        ctx.save_for_backward(y)
        ctx.scale = scale
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        (y,) = ctx.saved_tensors
        dx = torch.empty_like(y)
        rows = y.numel() // max(1, y.shape[-1])
        options = tile("softmax", y.shape[-1], architecture(y.device))
        launch(_softmax_backward, (rows,), dy.contiguous(), y, dx, y.shape[-1], ctx.scale, **options)
        return dx, None, None, None


def _triton(x: Tensor, mask: Tensor | None = None, scale: float = 1.0, causal: bool = False) -> Tensor:
    y: Tensor = _Softmax.apply(*_checked(x, mask), scale, causal)  # type: ignore[no-untyped-call]
    return y


TRITON = {"softmax": TritonOp(_triton, {"x": ROWS, "mask": Takes((torch.bool,), "any")})}


def reference(x: Tensor, mask: Tensor | None = None, scale: float = 1.0, causal: bool = False) -> Tensor:
    """From first principles, in float64."""
    seen = torch.ones(x.shape, dtype=torch.bool) if mask is None else mask.expand(x.shape).clone()
    if causal:
        seen &= torch.arange(x.shape[-1]) <= torch.arange(x.shape[-2])[:, None]
    e = torch.where(seen, (x.double() * scale).exp(), 0.0)
    total = e.sum(-1, keepdim=True)
    return e / torch.where(total == 0, 1.0, total)
