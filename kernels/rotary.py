"""Applies rotary position embeddings (arXiv 2104.09864); feature i of a head is paired with i + K / 2 (as in
Llama).

    y[i] = x[i] cos(t w_i) - x[i + K/2] sin(t w_i)      w_i = base ** (-2 i / K)
    y[i + K/2] = x[i + K/2] cos(t w_i) + x[i] sin(t w_i)

Angles come from integer positions, in float32 or better: a bf16 angle is wrong from position 256 on.  Both paths take
the same table of cos and sin, computed by torch.  Triton's cos is approximate, and wrong for large angles; backward is
the same turn the other way round.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from .launch import DENSE, WHOLE, Takes, TritonOp, architecture, jit, launch, power_of_2, tile, tl

_KEPT = "_rotary_table"
"""Where a tensor of positions has the last table made of it, with what that depends on."""


def rotary(x_BTHK: Tensor, positions: Tensor, base: float = 10000.0) -> Tensor:
    """x [B, T, H, K] turned by integer positions [T] or [B, T]; q and k may be side by side in H."""
    _check(x_BTHK, positions)
    half = x_BTHK.shape[-1] // 2
    acc = torch.promote_types(x_BTHK.dtype, torch.float32)
    cos, sin = (t.to(x_BTHK.dtype) for t in _kept_table(positions, half, base, acc))
    low, high = x_BTHK[..., :half], x_BTHK[..., half:]
    return torch.cat((low * cos - high * sin, high * cos + low * sin), dim=-1)


def _kept_table(positions: Tensor, half: int, base: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """`_table`, made once for the same positions: all layers of a forward are given one tensor."""
    if torch.compiler.is_compiling() or positions.is_inference():
        return _table(positions, half, base, dtype)
    key = (half, base, dtype, positions._version)
    kept = getattr(positions, _KEPT, None)
    if kept is None or kept[0] != key:
        kept = key, _table(positions, half, base, dtype)
        setattr(positions, _KEPT, kept)
    return kept[1]


def _table(positions: Tensor, half: int, base: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """cos and sin [..., T, 1, K / 2]."""
    exponent = torch.arange(half, dtype=torch.float64, device=positions.device) * (-1.0 / half)
    frequency = torch.pow(base, exponent).to(dtype)
    angle = (positions.to(dtype)[..., None] * frequency)[..., None, :]
    return angle.cos(), angle.sin()


def _check(x_BTHK: Tensor, positions: Tensor) -> None:
    if x_BTHK.dim() != 4 or x_BTHK.shape[-1] % 2:
        raise ValueError(f"rotary: x has shape {tuple(x_BTHK.shape)}; legal is [B, T, H, K] with an even K")
    if positions.device != x_BTHK.device:
        raise ValueError(f"rotary: positions is on {positions.device}; legal is {x_BTHK.device}, as x")
    if positions.is_floating_point():
        raise ValueError(f"rotary: positions is {positions.dtype}; legal are integers")
    if positions.shape not in (x_BTHK.shape[1:2], x_BTHK.shape[:2]):
        raise ValueError(
            f"rotary: positions has shape {tuple(positions.shape)}; legal is {tuple(x_BTHK.shape[1:2])} "
            f"or {tuple(x_BTHK.shape[:2])}, the [T] or [B, T] of x"
        )


@jit
def _rotary_kernel(
    x, cos, sin, y, tokens, heads, half, batch_stride, token_stride, head_stride, table_stride, sign,
    HEADS: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    """All heads of one token; table_stride is 0 where all samples have one table."""
    b = tl.program_id(1).to(tl.int64)
    t = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, HALF)[None, :]
    table = b * table_stride + t * half + i
    c = tl.load(cos + table, mask=i < half, other=0.0)
    s = tl.load(sin + table, mask=i < half, other=0.0) * sign
    for start in range(0, heads, HEADS):
        h = start + tl.arange(0, HEADS)[:, None]
        inside = (h < heads) & (i < half)
        source = x + b * batch_stride + t * token_stride + h.to(tl.int64) * head_stride + i
        low = tl.load(source, mask=inside, other=0.0).to(tl.float32)
        high = tl.load(source + half, mask=inside, other=0.0).to(tl.float32)
        target = y + ((b * tokens + t) * heads + h) * (2 * half) + i
        tl.store(target, low * c - high * s, mask=inside)
        tl.store(target + half, high * c + low * s, mask=inside)


def _turn(x: Tensor, cos: Tensor, sin: Tensor, sign: float) -> Tensor:
    b, t, h, k = x.shape
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    launch(
        _rotary_kernel, (t, b), x, cos, sin, y, t, h, k // 2, x.stride(0), x.stride(1), x.stride(2),
        t * (k // 2) if cos.dim() == 4 else 0, sign, HALF=power_of_2(k // 2),
        **tile("rotary", k, architecture(x.device)),
    )  # fmt: skip
    return y


class _Rotary(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, positions: Tensor, base: float) -> Tensor:
        cos, sin = _kept_table(positions, x.shape[-1] // 2, base, torch.float32)
        ctx.save_for_backward(cos, sin)
        return _turn(x, cos, sin, 1.0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return _turn(dy if dy.stride(-1) == 1 else dy.contiguous(), cos, sin, -1.0), None, None


def _triton(x_BTHK: Tensor, positions: Tensor, base: float = 10000.0) -> Tensor:
    _check(x_BTHK, positions)
    y: Tensor = _Rotary.apply(x_BTHK, positions.contiguous(), base)  # type: ignore[no-untyped-call]
    return y


TRITON = {"rotary": TritonOp(_triton, {"x_BTHK": DENSE, "positions": Takes(WHOLE, "any")})}


def reference(x_BTHK: Tensor, positions: Tensor, base: float = 10000.0) -> Tensor:
    """The same as a product of complex numbers, in float64."""
    half = x_BTHK.shape[-1] // 2
    w = torch.tensor([base ** (-i / half) for i in range(half)], dtype=torch.float64)
    turn = torch.polar(torch.ones(1, dtype=torch.float64), positions.double()[..., None, None] * w)
    x = x_BTHK.double()
    y = torch.complex(x[..., :half], x[..., half:]) * turn
    return torch.cat((y.real, y.imag), dim=-1)
