"""Activations of the feed-forward layer: bias + GELU (arXiv 1606.08415) and SwiGLU (arXiv 2002.05202).

    gelu(x, bias) = h * Phi(h), h = x + bias     tanh: Phi(h) = (1 + tanh(sqrt(2/pi) (h + 0.044715 h**3))) / 2
    swiglu(gate, up) = gate * sigmoid(gate) * up

Backward recomputes from the inputs and writes fresh tensors (in-place gradients into saved activations have
cost others silent errors).  The bias gradient is summed over a fixed number of row shares, then over these:
no atomics.
"""

from __future__ import annotations

import math
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

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
    tile,
    tl,
)

Approximate = Literal["tanh", "none"]


def gelu(x: Tensor, bias: Tensor | None = None, approximate: Approximate = "tanh") -> Tensor:
    """x [..., F], bias [F] or None; approximate "none" is the exact form by erf."""
    _check_gelu(x, bias, approximate)
    return F.gelu(x if bias is None else x + bias, approximate=approximate).to(x.dtype)


def swiglu(gate: Tensor, up: Tensor | None = None) -> Tensor:
    """gate and up [..., F]; without up, gate is [..., 2 F] and holds both, gate first."""
    _check_swiglu(gate, up)
    if up is None:
        gate, up = gate.chunk(2, dim=-1)
    return F.silu(gate) * up


def _check_gelu(x: Tensor, bias: Tensor | None, approximate: str) -> None:
    if approximate not in ("tanh", "none"):
        raise ValueError(f"gelu: approximate={approximate!r}; legal are 'tanh' and 'none'")
    if bias is not None and bias.device != x.device:
        raise ValueError(f"gelu: bias is on {bias.device}; legal is {x.device}, as x")
    check_alike("gelu", x=x)
    if bias is not None and bias.shape != x.shape[-1:]:
        raise ValueError(
            f"gelu: bias has shape {tuple(bias.shape)}; legal is ({x.shape[-1]},), the width of x"
        )


def _check_swiglu(gate: Tensor, up: Tensor | None) -> None:
    check_alike("swiglu", gate=gate, up=up)
    if up is None and gate.shape[-1] % 2:
        raise ValueError(f"swiglu: gate alone has width {gate.shape[-1]}; legal is an even one, [gate | up]")
    if up is not None and gate.shape != up.shape:
        raise ValueError(
            f"swiglu: gate has shape {tuple(gate.shape)}, up {tuple(up.shape)}; legal is one shape"
        )


# ------------------------------------------------------------------------------------------------------- gelu


@jit
def _gelu_parts(h, TANH: tl.constexpr):
    """Phi(h) and the derivative of h Phi(h)."""
    if TANH:
        u = 0.7978845608028654 * h * (1.0 + 0.044715 * h * h)
        phi = tl.sigmoid(2.0 * u)  # (1 + tanh(u)) / 2; the interpreter has no tanh
        slope = phi + 2.0 * h * phi * (1.0 - phi) * 0.7978845608028654 * (1.0 + 0.134145 * h * h)
    else:
        phi = 0.5 * (1.0 + tl.erf(h * 0.7071067811865476))
        slope = phi + h * tl.exp(-0.5 * h * h) * 0.3989422804014327
    return phi, slope


@jit
def _gelu_forward(
    x, bias, y, rows, features, x_stride,
    TANH: tl.constexpr, BIAS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    r = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    c = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    inside = (r < rows) & (c < features)
    h = tl.load(x + r * x_stride + c, mask=inside, other=0.0).to(tl.float32)
    if BIAS:
        h += tl.load(bias + c, mask=c < features, other=0.0).to(tl.float32)
    phi, _ = _gelu_parts(h, TANH)
    tl.store(y + r * features + c, h * phi, mask=inside)


@jit
def _gelu_backward(
    dy, x, bias, dx, dbias, rows, features, dy_stride, x_stride, share,
    TANH: tl.constexpr, BIAS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Some columns of `share` rows; with a bias, its gradient over them."""
    begin = tl.program_id(0).to(tl.int64) * share
    c = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    b = tl.zeros((1, COLUMNS), tl.float32)
    if BIAS:
        b = tl.load(bias + c, mask=c < features, other=0.0).to(tl.float32)
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for start in range(0, share, ROWS):
        r = begin + start + tl.arange(0, ROWS)[:, None]
        inside = (r < rows) & (c < features)
        h = tl.load(x + r * x_stride + c, mask=inside, other=0.0).to(tl.float32) + b
        _, slope = _gelu_parts(h, TANH)
        d = tl.load(dy + r * dy_stride + c, mask=inside, other=0.0).to(tl.float32) * slope
        tl.store(dx + r * features + c, d, mask=inside)
        total += d
    if BIAS:
        at = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
        tl.store(
            dbias + tl.program_id(0).to(tl.int64) * features + at, tl.sum(total, axis=0), mask=at < features
        )


class _Gelu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor | None, tanh: bool) -> Tensor:
        flat = matrix("gelu", "x", x)
        rows, features = flat.shape
        y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        options = tile("gelu", features, architecture(x.device))
        launch(
            _gelu_forward, (-(-rows // options["ROWS"]), -(-features // options["COLUMNS"])),
            flat, bias, y, rows, features, flat.stride(0), TANH=tanh, BIAS=bias is not None, **options,
        )  # fmt: skip
        ctx.save_for_backward(x, bias)
        ctx.tanh = tanh
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, bias = ctx.saved_tensors
        flat, dy = matrix("gelu", "x", x), dy.contiguous().view(-1, x.shape[-1])
        rows, features = flat.shape
        dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        options = tile("gelu", features, architecture(x.device))
        columns = -(-features // options["COLUMNS"])
        share = options["ROWS"]
        if bias is not None:
            share *= -(-rows // (options["ROWS"] * max(1, 8 * programs(x.device) // columns)))
        parts = -(-rows // max(1, share))
        db = torch.empty(parts, features, dtype=torch.float32, device=x.device)
        launch(
            _gelu_backward, (parts, columns), dy, flat, bias, dx, db, rows, features, dy.stride(0),
            flat.stride(0),
            share, TANH=ctx.tanh, BIAS=bias is not None, **options,
        )  # fmt: skip
        return dx, None if bias is None else db.sum(0).to(bias.dtype), None


def _triton_gelu(x: Tensor, bias: Tensor | None = None, approximate: Approximate = "tanh") -> Tensor:
    _check_gelu(x, bias, approximate)
    y: Tensor = _Gelu.apply(x, bias, approximate == "tanh")  # type: ignore[no-untyped-call]
    return y


# ----------------------------------------------------------------------------------------------------- swiglu


@jit
def _swiglu_forward(
    gate, up, y, rows, features, gate_stride, up_stride, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    r = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    c = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    inside = (r < rows) & (c < features)
    g = tl.load(gate + r * gate_stride + c, mask=inside, other=0.0).to(tl.float32)
    u = tl.load(up + r * up_stride + c, mask=inside, other=0.0).to(tl.float32)
    tl.store(y + r * features + c, g * tl.sigmoid(g) * u, mask=inside)


@jit
def _swiglu_backward(
    dy, gate, up, dgate, dup, rows, features, dy_stride, gate_stride, up_stride, out_stride,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    r = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    c = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    inside = (r < rows) & (c < features)
    d = tl.load(dy + r * dy_stride + c, mask=inside, other=0.0).to(tl.float32)
    g = tl.load(gate + r * gate_stride + c, mask=inside, other=0.0).to(tl.float32)
    u = tl.load(up + r * up_stride + c, mask=inside, other=0.0).to(tl.float32)
    sigmoid = tl.sigmoid(g)
    tl.store(dgate + r * out_stride + c, d * u * sigmoid * (1.0 + g * (1.0 - sigmoid)), mask=inside)
    tl.store(dup + r * out_stride + c, d * g * sigmoid, mask=inside)


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor | None) -> Tensor:
        ctx.save_for_backward(gate, up)
        g, u = _gate_and_up(gate, up)
        rows, features = g.shape
        shape = (*gate.shape[:-1], features)
        y = torch.empty(shape, dtype=gate.dtype, device=gate.device)
        options = tile("swiglu", features, architecture(gate.device))
        launch(
            _swiglu_forward, (-(-rows // options["ROWS"]), -(-features // options["COLUMNS"])),
            g, u, y, rows, features, g.stride(0), u.stride(0), **options,
        )  # fmt: skip
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        gate, up = ctx.saved_tensors
        g, u = _gate_and_up(gate, up)
        rows, features = g.shape
        dy = dy.contiguous().view(-1, features)
        dgate = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
        dup = None if up is None else torch.empty_like(dgate)
        dg, du = _gate_and_up(dgate, dup)
        options = tile("swiglu", features, architecture(gate.device))
        launch(
            _swiglu_backward, (-(-rows // options["ROWS"]), -(-features // options["COLUMNS"])),
            dy, g, u, dg, du, rows, features, dy.stride(0), g.stride(0), u.stride(0), dg.stride(0), **options,
        )  # fmt: skip
        return dgate, dup


def _gate_and_up(gate: Tensor, up: Tensor | None) -> tuple[Tensor, Tensor]:
    """Both as rows, without a copy."""
    flat = matrix("swiglu", "gate", gate)
    if up is not None:
        return flat, matrix("swiglu", "up", up)
    half = gate.shape[-1] // 2
    return flat[:, :half], flat[:, half:]


def _triton_swiglu(gate: Tensor, up: Tensor | None = None) -> Tensor:
    _check_swiglu(gate, up)
    y: Tensor = _SwiGLU.apply(gate, up)  # type: ignore[no-untyped-call]
    return y


TRITON = {
    "gelu": TritonOp(_triton_gelu, {"x": ROWS, "bias": FLAT}),
    "swiglu": TritonOp(_triton_swiglu, {"gate": ROWS, "up": Takes(layout="rows", like="gate")}),
}


def gelu_reference(x: Tensor, bias: Tensor | None = None, approximate: Approximate = "tanh") -> Tensor:
    h = x.double() if bias is None else x.double() + bias.double()
    if approximate == "none":
        return 0.5 * h * (1.0 + torch.erf(h / math.sqrt(2.0)))
    return 0.5 * h * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (h + 0.044715 * h**3)))


def swiglu_reference(gate: Tensor, up: Tensor) -> Tensor:
    gate = gate.double()
    return gate / (1.0 + torch.exp(-gate)) * up.double()
