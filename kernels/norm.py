"""Computes LayerNorm (arXiv 1607.06450) and RMSNorm (arXiv 1910.07467) over the last dim, alone or after dropout and
residual sum.

    layer: y = (s - mean) * rstd * weight + bias        rstd = 1 / sqrt(variance + eps), biased variance
    rms:   y = s * rstd * weight                        rstd = 1 / sqrt(mean(s**2) + eps)
    add:   s = residual + dropout(x), or x where there is no residual, and both y and s come back

Note on the Triton path: forward keeps s, mean and rstd (8 bytes a row).  Let n be the normalised row and g = dy *
weight.  Then ds = rstd (g - mean(g) - n mean(g n)) plus the gradient of s from the residual stream.  ds is also the
residual's gradient; dropout of it, by the same mask, is the gradient of x.  Weight gradients are sums over rows: each
of a fixed number of programs keeps one float32 row, and a second pass adds these.  There are no atomics, so the bits
are always the same.  Rows up to 8192 (forward 16384) lie in registers whole.  Wider ones are read tile by tile, twice:
a register-resident backward spills from 16384 on.  Then 8 T D bytes become 12 T D, mostly out of the second-level
cache.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from .dropout import dropout_add, refuses
from .launch import (
    FLAT,
    ROWS,
    Takes,
    TritonOp,
    architecture,
    check_alike,
    jit,
    launch,
    matrix,
    programs,
    signed32,
    tile,
    tl,
)
from .philox import Rows, keep_tile, threshold


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    """x [..., D], weight [D], bias [D] or None; the same shape and dtype as x."""
    _check("layer_norm", x, weight, bias)
    return F.layer_norm(x, weight.shape, weight, bias, eps)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x [..., D], weight [D]; the same shape and dtype as x."""
    _check("rms_norm", x, weight, None)
    return F.rms_norm(x, weight.shape, weight, eps)


def add_layer_norm(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    p: float = 0.0,
    rows: Rows | None = None,
) -> tuple[Tensor, Tensor]:
    """(y, s): s = residual + dropout(x, p, rows), y its LayerNorm.

    Without rows nothing is dropped.  Without a residual s is x.
    """
    s = _sum("add_layer_norm", x, residual, p, rows)
    return layer_norm(s, weight, bias, eps), s


def add_rms_norm(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    eps: float,
    p: float = 0.0,
    rows: Rows | None = None,
) -> tuple[Tensor, Tensor]:
    """(y, s): as `add_layer_norm`, y the RMSNorm of s."""
    s = _sum("add_rms_norm", x, residual, p, rows)
    return rms_norm(s, weight, eps), s


def _sum(op: str, x: Tensor, residual: Tensor | None, p: float, rows: Rows | None) -> Tensor:
    if residual is None:
        return x
    _check_residual(op, x, residual)
    return residual + x if rows is None else dropout_add(x, residual, p, rows)


def _check(op: str, x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    check_alike(op, x=x)
    for name, vector in (("weight", weight), ("bias", bias)):
        if vector is not None and vector.shape != x.shape[-1:]:
            raise ValueError(
                f"{op}: {name} has shape {tuple(vector.shape)}; legal is ({x.shape[-1]},), the width of x"
            )
        if vector is not None and vector.device != x.device:
            raise ValueError(f"{op}: {name} is on {vector.device}; legal is {x.device}, as x")


def _check_residual(op: str, x: Tensor, residual: Tensor) -> None:
    check_alike(op, x=x, residual=residual)
    if residual.shape != x.shape:
        raise ValueError(f"{op}: residual has shape {tuple(residual.shape)}; legal is {tuple(x.shape)}, as x")


# ---------------------------------------------------------------------------------------------------- forward


@jit
def _norm_forward(
    x, residual, weight, bias, y, s, mean, rstd, x_stride, residual_stride, features, eps,
    sample, position, positions, first, k0: tl.int32, k1: tl.int32, step: tl.int32, limit: tl.int32, scale,
    RMS: tl.constexpr, ADD: tl.constexpr, DROP: tl.constexpr, BIAS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """One row a program, whole in registers."""
    row = tl.program_id(0).to(tl.int64)
    c = tl.arange(0, COLUMNS)
    inside = c < features
    value = tl.load(x + row * x_stride + c, mask=inside, other=0.0)
    kind = value.dtype
    value = value.to(tl.float32)
    if DROP:
        at = tl.load(sample + row // positions), tl.load(position + row % positions)
        keep = keep_tile(k0, k1, step, limit, at[0], at[1], first, 1, COLUMNS).reshape(COLUMNS)
        value = tl.where(keep, value * scale, 0.0).to(kind).to(tl.float32)
    if ADD:
        value += tl.load(residual + row * residual_stride + c, mask=inside, other=0.0).to(tl.float32)
        value = value.to(kind)
        tl.store(s + row * features + c, value, mask=inside)
        value = value.to(tl.float32)
    centre = 0.0
    if not RMS:
        centre = tl.sum(value, axis=0) / features
        tl.store(mean + row, centre)
    centred = tl.where(inside, value - centre, 0.0)
    r = 1.0 / tl.sqrt(tl.sum(centred * centred, axis=0) / features + eps)
    tl.store(rstd + row, r)
    out = centred * r * tl.load(weight + c, mask=inside, other=0.0).to(tl.float32)
    if BIAS:
        out += tl.load(bias + c, mask=inside, other=0.0).to(tl.float32)
    tl.store(y + row * features + c, out, mask=inside)


@jit
def _norm_forward_wide(
    x, residual, weight, bias, y, s, mean, rstd, x_stride, residual_stride, features, eps,
    sample, position, positions, first, k0: tl.int32, k1: tl.int32, step: tl.int32, limit: tl.int32, scale,
    RMS: tl.constexpr, ADD: tl.constexpr, DROP: tl.constexpr, BIAS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """One row a program, tile by tile: sum (and s), then squares, then y."""
    row = tl.program_id(0).to(tl.int64)
    source = x + row * x_stride
    total = tl.zeros((COLUMNS,), tl.float32)
    squares = tl.zeros((COLUMNS,), tl.float32)
    for start in range(0, features, COLUMNS):
        c = start + tl.arange(0, COLUMNS)
        inside = c < features
        value = tl.load(source + c, mask=inside, other=0.0)
        kind = value.dtype
        value = value.to(tl.float32)
        if DROP:
            at = tl.load(sample + row // positions), tl.load(position + row % positions)
            keep = keep_tile(k0, k1, step, limit, at[0], at[1], first + start, 1, COLUMNS).reshape(COLUMNS)
            value = tl.where(keep, value * scale, 0.0).to(kind).to(tl.float32)
        if ADD:
            value += tl.load(residual + row * residual_stride + c, mask=inside, other=0.0).to(tl.float32)
            value = value.to(kind)
            tl.store(s + row * features + c, value, mask=inside)
            value = value.to(tl.float32)
        total += value
        squares += value * value
    if ADD:
        source = s + row * features
        tl.debug_barrier()  # the row was written by other threads of this program
    centre = 0.0
    if RMS:
        spread = tl.sum(squares, axis=0)
    else:
        centre = tl.sum(total, axis=0) / features
        tl.store(mean + row, centre)
        squares = tl.zeros((COLUMNS,), tl.float32)
        for start in range(0, features, COLUMNS):
            c = start + tl.arange(0, COLUMNS)
            value = tl.load(source + c, mask=c < features, other=0.0).to(tl.float32)
            centred = tl.where(c < features, value - centre, 0.0)
            squares += centred * centred
        spread = tl.sum(squares, axis=0)
    r = 1.0 / tl.sqrt(spread / features + eps)
    tl.store(rstd + row, r)
    for start in range(0, features, COLUMNS):
        c = start + tl.arange(0, COLUMNS)
        inside = c < features
        value = tl.load(source + c, mask=inside, other=0.0).to(tl.float32)
        out = (value - centre) * r * tl.load(weight + c, mask=inside, other=0.0).to(tl.float32)
        if BIAS:
            out += tl.load(bias + c, mask=inside, other=0.0).to(tl.float32)
        tl.store(y + row * features + c, out, mask=inside)


# --------------------------------------------------------------------------------------------------- backward


@jit
def _norm_backward(
    dy, s, weight, mean, rstd, ds_in, ds, dx, dweight, dbias, dy_stride, s_stride, ds_in_stride, rows,
    features,
    sample, position, positions, first, k0: tl.int32, k1: tl.int32, step: tl.int32, limit: tl.int32, scale,
    RMS: tl.constexpr, STREAM: tl.constexpr, DROP: tl.constexpr, BIAS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Each program takes every n-th row and keeps its share of the weight gradients in registers."""
    program, count = tl.program_id(0), tl.num_programs(0)
    c = tl.arange(0, COLUMNS)
    inside = c < features
    w = tl.load(weight + c, mask=inside, other=0.0).to(tl.float32)
    sum_w = tl.zeros((COLUMNS,), tl.float32)
    sum_b = tl.zeros((COLUMNS,), tl.float32)
    for index in range(program, rows, count):
        row = tl.cast(index, tl.int64)
        r = tl.load(rstd + row)
        normal = tl.load(s + row * s_stride + c, mask=inside, other=0.0)
        kind = normal.dtype
        normal = normal.to(tl.float32)
        if not RMS:
            normal = tl.where(inside, normal - tl.load(mean + row), 0.0)
        normal *= r
        d = tl.load(dy + row * dy_stride + c, mask=inside, other=0.0).to(tl.float32)
        if STREAM:  # with the other loads: behind the sums ptxas spills
            stream = tl.load(ds_in + row * ds_in_stride + c, mask=inside, other=0.0)
        sum_w += d * normal
        if BIAS:
            sum_b += d
        g = d * w
        out = g - normal * (tl.sum(g * normal, axis=0) / features)
        if not RMS:
            out -= tl.sum(g, axis=0) / features
        out *= r
        if STREAM:
            out += stream.to(tl.float32)
        out = out.to(kind)
        tl.store(ds + row * features + c, out, mask=inside)
        if DROP:
            at = tl.load(sample + row // positions), tl.load(position + row % positions)
            keep = keep_tile(k0, k1, step, limit, at[0], at[1], first, 1, COLUMNS).reshape(COLUMNS)
            tl.store(dx + row * features + c, tl.where(keep, out.to(tl.float32) * scale, 0.0), mask=inside)
    tl.store(dweight + program.to(tl.int64) * features + c, sum_w, mask=inside)
    if BIAS:
        tl.store(dbias + program.to(tl.int64) * features + c, sum_b, mask=inside)


@jit
def _norm_backward_wide(
    dy, s, weight, mean, rstd, ds_in, ds, dx, dy_stride, s_stride, ds_in_stride, features,
    sample, position, positions, first, k0: tl.int32, k1: tl.int32, step: tl.int32, limit: tl.int32, scale,
    RMS: tl.constexpr, STREAM: tl.constexpr, DROP: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """The row gradient of one row, tile by tile: two sums, then the row."""
    row = tl.program_id(0).to(tl.int64)
    r = tl.load(rstd + row)
    centre = 0.0
    if not RMS:
        centre = tl.load(mean + row)
    sum_gn = tl.zeros((COLUMNS,), tl.float32)
    sum_g = tl.zeros((COLUMNS,), tl.float32)
    for start in range(0, features, COLUMNS):
        c = start + tl.arange(0, COLUMNS)
        inside = c < features
        g = tl.load(dy + row * dy_stride + c, mask=inside, other=0.0).to(tl.float32)
        g *= tl.load(weight + c, mask=inside, other=0.0).to(tl.float32)
        normal = (tl.load(s + row * s_stride + c, mask=inside, other=0.0).to(tl.float32) - centre) * r
        sum_gn += g * normal
        sum_g += g
    mean_gn = tl.sum(sum_gn, axis=0) / features
    mean_g = 0.0
    if not RMS:
        mean_g = tl.sum(sum_g, axis=0) / features
    for start in range(0, features, COLUMNS):
        c = start + tl.arange(0, COLUMNS)
        inside = c < features
        g = tl.load(dy + row * dy_stride + c, mask=inside, other=0.0).to(tl.float32)
        g *= tl.load(weight + c, mask=inside, other=0.0).to(tl.float32)
        value = tl.load(s + row * s_stride + c, mask=inside, other=0.0)
        normal = (value.to(tl.float32) - centre) * r
        out = (g - normal * mean_gn - mean_g) * r
        if STREAM:
            out += tl.load(ds_in + row * ds_in_stride + c, mask=inside, other=0.0).to(tl.float32)
        out = out.to(value.dtype)
        tl.store(ds + row * features + c, out, mask=inside)
        if DROP:
            at = tl.load(sample + row // positions), tl.load(position + row % positions)
            keep = keep_tile(k0, k1, step, limit, at[0], at[1], first + start, 1, COLUMNS).reshape(COLUMNS)
            tl.store(dx + row * features + c, tl.where(keep, out.to(tl.float32) * scale, 0.0), mask=inside)


@jit
def _norm_weights_wide(
    dy, s, mean, rstd, dweight, dbias, dy_stride, s_stride, rows, features, share,
    RMS: tl.constexpr, BIAS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Weight gradients of some columns over some rows, `share` of them."""
    c = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    begin = tl.program_id(1).to(tl.int64) * share
    sum_w = tl.zeros((ROWS, COLUMNS), tl.float32)
    sum_b = tl.zeros((ROWS, COLUMNS), tl.float32)
    for start in range(0, share, ROWS):
        row = begin + start + tl.arange(0, ROWS)[:, None]
        inside = (row < rows) & (row < begin + share)
        normal = tl.load(s + row * s_stride + c, mask=inside & (c < features), other=0.0).to(tl.float32)
        if not RMS:
            normal -= tl.load(mean + row, mask=inside, other=0.0)
        normal *= tl.load(rstd + row, mask=inside, other=0.0)
        d = tl.load(dy + row * dy_stride + c, mask=inside & (c < features), other=0.0).to(tl.float32)
        sum_w += d * normal
        if BIAS:
            sum_b += d
    at = tl.program_id(1).to(tl.int64) * features + tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    inside = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS) < features
    tl.store(dweight + at, tl.sum(sum_w, axis=0), mask=inside)
    if BIAS:
        tl.store(dbias + at, tl.sum(sum_b, axis=0), mask=inside)


# ------------------------------------------------------------------------------------------------------- host


class _Norm(torch.autograd.Function):
    """(y, s); residual, bias and rows may be None, and s is x without a residual.

    `streams`: s goes on, so its gradient is added to that of y.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, residual: Tensor | None, weight: Tensor, bias: Tensor | None, eps: float,
        rms: bool, p: float, rows: Rows | None, streams: bool,
    ) -> tuple[Tensor, Tensor | None]:  # fmt: skip
        flat = matrix("norm", "x", x)
        added = flat if residual is None else matrix("norm", "residual", residual)
        y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        s = flat if residual is None else torch.empty_like(y)
        mean, rstd = torch.empty(2, len(flat), dtype=torch.float32, device=x.device)
        drop = _drop(p if residual is not None else 0.0, rows, x)
        options = tile("norm_forward", flat.shape[1], architecture(x.device))
        launch(
            _norm_forward if options["COLUMNS"] >= flat.shape[1] else _norm_forward_wide, (len(flat),),
            flat, added, weight, bias, y, s, mean, rstd, flat.stride(0), added.stride(0), flat.shape[1], eps,
            *drop[1:],
            RMS=rms, ADD=residual is not None, DROP=drop[0], BIAS=bias is not None, **options,
        )  # fmt: skip
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(s, weight, mean, rstd)
        ctx.rms, ctx.biased, ctx.p, ctx.rows, ctx.added = rms, bias is not None, p, rows, residual is not None
        return y, (x if residual is None else s) if streams else None

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor | None, ds_in: Tensor | None) -> tuple[Tensor | None, ...]:
        s, weight, mean, rstd = ctx.saved_tensors
        given = dy if ds_in is None else ds_in
        assert given is not None
        shape = given.shape
        s = s.view(-1, shape[-1])
        dy = (given.new_zeros(shape) if dy is None else dy.contiguous()).view(-1, shape[-1])
        ds_in = None if ds_in is None else ds_in.contiguous()
        drop = _drop(ctx.p if ctx.added else 0.0, ctx.rows, dy)
        ds = torch.empty(shape, dtype=dy.dtype, device=dy.device)
        dx = torch.empty_like(ds) if drop[0] else ds
        flags = dict(RMS=ctx.rms, STREAM=ds_in is not None, DROP=drop[0])
        stream = dy if ds_in is None else ds_in
        options = tile("norm_backward", shape[-1], architecture(dy.device))
        if options["COLUMNS"] >= shape[-1]:
            parts = min(len(dy), options.pop("PROGRAMS") * programs(dy.device))
            sums = torch.empty(1 + ctx.biased, parts, shape[-1], dtype=torch.float32, device=dy.device)
            launch(
                _norm_backward, (parts,), dy, s, weight, mean, rstd, stream, ds, dx, sums[0], sums[-1],
                dy.stride(0), s.stride(0), shape[-1], len(dy), shape[-1], *drop[1:], BIAS=ctx.biased, **flags,
                **options,
            )  # fmt: skip
        else:
            launch(
                _norm_backward_wide, (len(dy),), dy, s, weight, mean, rstd, stream, ds, dx, dy.stride(0),
                s.stride(0),
                shape[-1], shape[-1], *drop[1:], **flags, **options,
            )  # fmt: skip
            sums = _weights_wide(dy, s, mean, rstd, ctx.rms, ctx.biased)
        dweight, dbias = (*sums.sum(1).to(weight.dtype), None)[:2]
        return dx, ds if ctx.added else None, dweight, dbias, None, None, None, None, None


def _weights_wide(dy: Tensor, s: Tensor, mean: Tensor, rstd: Tensor, rms: bool, biased: bool) -> Tensor:
    """Partial gradients [1 or 2, parts, D] of the weight, and of a bias."""
    rows, features = dy.shape
    options = tile("norm_weights", features, architecture(dy.device))
    columns = -(-features // options["COLUMNS"])
    parts = max(1, min(-(-rows // options["ROWS"]), 4 * programs(dy.device) // columns))
    share = -(-rows // (parts * options["ROWS"])) * options["ROWS"]
    parts = -(-rows // share) if rows else 0
    sums = torch.empty(1 + biased, parts, features, dtype=torch.float32, device=dy.device)
    launch(
        _norm_weights_wide, (columns, parts), dy, s, mean, rstd, sums[0], sums[-1], dy.stride(0), s.stride(0),
        rows, features, share, RMS=rms, BIAS=biased, **options,
    )  # fmt: skip
    return sums


def _drop(p: float, rows: Rows | None, x: Tensor) -> tuple[Any, ...]:
    """(whether anything is dropped, and the kernels' arguments that say which)."""
    if p == 0.0 or rows is None:
        return False, x, x, 1, 0, 0, 0, 0, 0, 1.0
    positions = rows.position.numel()
    words = rows.words()
    return (
        True,
        rows.sample.contiguous(),
        rows.position.contiguous(),
        positions,
        rows.feature,
        *words,
        signed32(threshold(p)),
        1.0 / (1.0 - p),
    )


def _apply(
    op: str, x: Tensor, residual: Tensor | None, weight: Tensor, bias: Tensor | None, eps: float, p: float,
    rows: Rows | None, *, streams: bool = True,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    _check(op, x, weight, bias)
    if residual is not None:
        _check_residual(op, x, residual)
    if rows is not None:
        threshold(p)
        rows.check(op, x)
    result: tuple[Tensor, Tensor] = _Norm.apply(  # type: ignore[no-untyped-call]
        x, residual, weight, bias, eps, op.endswith("rms_norm"), p, rows, streams
    )
    return result


_TAKES = {
    "x": ROWS, "residual": Takes(layout="rows", like="x"), "weight": FLAT, "bias": Takes(like="weight"),
}  # fmt: skip


def _triton_layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    return _apply("layer_norm", x, None, weight, bias, eps, 0.0, None, streams=False)[0]


def _triton_rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return _apply("rms_norm", x, None, weight, None, eps, 0.0, None, streams=False)[0]


def _triton_add_layer_norm(
    x: Tensor, residual: Tensor | None, weight: Tensor, bias: Tensor | None, eps: float, p: float = 0.0,
    rows: Rows | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    return _apply("add_layer_norm", x, residual, weight, bias, eps, p, rows)


def _triton_add_rms_norm(
    x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, p: float = 0.0, rows: Rows | None = None
) -> tuple[Tensor, Tensor]:
    return _apply("add_rms_norm", x, residual, weight, None, eps, p, rows)


TRITON = {
    "layer_norm": TritonOp(_triton_layer_norm, _TAKES),
    "rms_norm": TritonOp(_triton_rms_norm, _TAKES),
    "add_layer_norm": TritonOp(_triton_add_layer_norm, _TAKES, refuses),
    "add_rms_norm": TritonOp(_triton_add_rms_norm, _TAKES, refuses),
}


def layer_norm_reference(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    x, weight = x.double(), weight.double()
    centred = x - x.mean(-1, keepdim=True)
    y = centred / torch.sqrt((centred * centred).mean(-1, keepdim=True) + eps) * weight
    return y if bias is None else y + bias.double()


def rms_norm_reference(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    x = x.double()
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps) * weight.double()
