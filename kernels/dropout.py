"""Computes dropout, alone or with the residual addition after it, with masks of global indices only.

    y = residual + keep * x / (1 - p)        keep = philox word >= round(p * 2**32)

The mask is a function of `Rows` (philox.py). So recomputation, any mesh and any number of micro-batches give the same
one.  The torch path keeps one byte an element for backward.  Deriving it again costs 7 ns an element on a core, the
byte 0.5; the Triton path keeps nothing and derives the mask again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.overrides import handle_torch_function, has_torch_function_unary

from .launch import ROWS, Takes, TritonOp, architecture, check_alike, jit, launch, matrix, signed32, tile, tl
from .philox import Rows, keep_mask, keep_tile, threshold


def dropout(x: Tensor, p: float, rows: Rows) -> Tensor:
    """x [B, T, D...] with elements dropped by `rows`, the others divided by 1 - p.

    Raises ValueError if p is not in [0, 1) or rows do not describe x.
    """
    threshold(p)
    rows.check("dropout", x)
    if p == 0.0:
        return x
    out: Tensor = _Dropout.apply(x, p, rows)  # type: ignore[no-untyped-call]
    return out


def dropout_add(x: Tensor, residual: Tensor, p: float, rows: Rows) -> Tensor:
    """residual + dropout(x)."""
    _check_residual(x, residual)
    return residual + dropout(x, p, rows)


def dropped(drop: Callable[[Tensor, float, Rows], Tensor], x: Tensor, p: float, rows: Rows) -> Tensor:
    """x with elements dropped by `drop`, an op on [B, T, D]. `rows` must fit the shape of x."""
    if has_torch_function_unary(x):
        dropped_part: Tensor = handle_torch_function(dropped, (x,), drop, x, p, rows)
        return dropped_part
    rows, shape, turned = rows.fitted("dropout", x.shape)
    if x.shape == shape and not turned:
        return drop(x, p, rows)
    lying = x.transpose(0, 1) if turned else x
    y = drop(lying.reshape(shape), p, rows).view(lying.shape)
    return y.transpose(0, 1) if turned else y


def _check_residual(x: Tensor, residual: Tensor) -> None:
    check_alike("dropout_add", x=x, residual=residual)
    if residual.shape != x.shape:
        raise ValueError(
            f"dropout_add: residual has shape {tuple(residual.shape)}; legal is {tuple(x.shape)}, as x"
        )


class _Dropout(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, p: float, rows: Rows) -> Tensor:
        if x.device.type == "meta":
            keep = torch.empty_like(x, dtype=torch.bool)
        else:
            keep = keep_mask(rows, x.shape[2:].numel(), p).view(x.shape)
        ctx.save_for_backward(keep)
        ctx.scale = 1.0 / (1.0 - p)
        return torch.where(keep, x * ctx.scale, 0.0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None]:
        (keep,) = ctx.saved_tensors
        return torch.where(keep, dy * ctx.scale, 0.0), None, None


@jit
def _dropout_kernel(
    x, residual, y, sample, position, rows, positions, features, first, x_stride, residual_stride,
    k0: tl.int32, k1: tl.int32, step: tl.int32, threshold: tl.int32, scale,
    HAS_RESIDUAL: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    r = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.program_id(1) * COLUMNS
    c = column + tl.arange(0, COLUMNS)[None, :]
    inside = (r < rows) & (c < features)
    s = tl.load(sample + r // positions, mask=r < rows, other=0)
    t = tl.load(position + r % positions, mask=r < rows, other=0)
    keep = keep_tile(k0, k1, step, threshold, s, t, first + column, ROWS, COLUMNS)
    value = tl.load(x + r * x_stride + c, mask=inside, other=0.0)
    value = tl.where(keep, value.to(tl.float32) * scale, 0.0).to(value.dtype)
    if HAS_RESIDUAL:
        value = value.to(tl.float32) + tl.load(residual + r * residual_stride + c, mask=inside, other=0.0).to(
            tl.float32
        )
    tl.store(y + r * features + c, value, mask=inside)


def _launch(x: Tensor, residual: Tensor | None, p: float, rows: Rows) -> Tensor:
    flat = matrix("dropout", "x", x)
    added = flat if residual is None else matrix("dropout", "residual", residual)
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    options = tile("dropout", flat.shape[1], architecture(x.device))
    r, c = options["ROWS"], options["COLUMNS"]
    launch(
        _dropout_kernel, (-(-len(flat) // r), -(-flat.shape[1] // c)),
        flat, added, y, rows.sample.contiguous(), rows.position.contiguous(), len(flat), rows.position.numel(),
        flat.shape[1], rows.feature, flat.stride(0), added.stride(0), *rows.words(), signed32(threshold(p)),
        1.0 / (1.0 - p),
        HAS_RESIDUAL=residual is not None, fuse=False, **options,
    )  # fmt: skip
    return y


class _TritonDropout(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, residual: Tensor | None, p: float, rows: Rows) -> Tensor:
        ctx.p, ctx.rows = p, rows
        return _launch(x, residual, p, rows)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        dx = _launch(dy.contiguous(), None, ctx.p, ctx.rows) if ctx.needs_input_grad[0] else None
        return dx, dy if ctx.needs_input_grad[1] else None, None, None


def _triton(x: Tensor, p: float, rows: Rows) -> Tensor:
    threshold(p)
    rows.check("dropout", x)
    y: Tensor = x if p == 0.0 else _TritonDropout.apply(x, None, p, rows)  # type: ignore[no-untyped-call]
    return y


def _triton_add(x: Tensor, residual: Tensor, p: float, rows: Rows) -> Tensor:
    threshold(p)
    rows.check("dropout_add", x)
    _check_residual(x, residual)
    y: Tensor = _TritonDropout.apply(x, residual, p, rows)  # type: ignore[no-untyped-call]
    return y


def refuses(*args: Any, **named: Any) -> str | None:
    """Four features share a counter, and a kernel draws all four; its rows are tokens."""
    given = (*args, *named.values())
    rows = next((x for x in given if isinstance(x, Rows)), None)
    if rows is None:
        return None
    if rows.feature % 4:
        return f"rows.feature={rows.feature} is no multiple of 4"
    x = named["x"] if "x" in named else args[0]
    return f"x has {x.dim()} dimensions, and kernels drop from [B, T, D]" if x.dim() > 3 else None


_TAKES = {"x": ROWS, "residual": Takes(layout="rows", like="x")}

TRITON = {
    "dropout": TritonOp(_triton, _TAKES, refuses),
    "dropout_add": TritonOp(_triton_add, _TAKES, refuses),
}


def reference(x: Tensor, p: float, rows: Rows) -> Tensor:
    """From first principles, in float64."""
    keep = keep_mask(rows, x.shape[2:].numel(), p).view(x.shape)
    return x.double() * keep / (1.0 - p)
