"""Block-wise int8 for communication: symmetric, one float32 scale for each 256 values (ZeRO++, arXiv
2306.10209).

    scale = max |x| / 127, q = round(x / scale) to nearest even; the error of a value is at most scale / 2

1 + 4 / 256 bytes a value on the wire.  `dequantise_add_` sums what arrives in float32 without a dequantised
copy.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from .launch import FLAT, Takes, TritonOp, architecture, jit, launch, tile, tl

GROUP = 256


def quantise(x: Tensor) -> tuple[Tensor, Tensor]:
    """(q int8 of x's shape, scale float32 [ceil(numel / 256)]) of a contiguous floating x.

    A group that holds a value which is not finite gets a scale that is not finite.
    """
    _check("quantise", x)
    groups = _groups(x.float().view(-1))
    scale = groups.abs().amax(dim=1) / 127.0
    q = (groups / torch.where(scale == 0, 1.0, scale)[:, None]).round_().nan_to_num_(0.0)
    return q.to(torch.int8).view(-1)[: x.numel()].view(x.shape), scale


def dequantise(q: Tensor, scale: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """q * scale, in dtype."""
    _check_pair("dequantise", q, scale, dtype)
    return (_groups(q.view(-1)) * scale[:, None]).view(-1)[: q.numel()].view(q.shape).to(dtype)


def dequantise_add_(total: Tensor, q: Tensor, scale: Tensor) -> None:
    """total (float32) += q * scale."""
    _check_total(total, q)
    _check_pair("dequantise_add_", q, scale)
    total += dequantise(q, scale)


def _groups(x: Tensor) -> Tensor:
    return F.pad(x, (0, -x.numel() % GROUP)).view(-1, GROUP)


def _check(op: str, x: Tensor) -> None:
    if not x.is_floating_point() or not x.is_contiguous():
        raise ValueError(f"{op}: x is {x.dtype} with strides {x.stride()}; legal is floating and contiguous")


def _check_pair(op: str, q: Tensor, scale: Tensor, dtype: torch.dtype = torch.float32) -> None:
    if not dtype.is_floating_point:
        raise ValueError(f"{op}: dtype={dtype}; legal is a floating one")
    groups = -(-q.numel() // GROUP)
    if q.dtype != torch.int8 or not q.is_contiguous():
        raise ValueError(f"{op}: q is {q.dtype} with strides {q.stride()}; legal is contiguous torch.int8")
    if scale.dtype != torch.float32 or scale.shape != (groups,):
        raise ValueError(
            f"{op}: scale is {scale.dtype} {tuple(scale.shape)}; legal is torch.float32 ({groups},)"
        )


def _check_total(total: Tensor, q: Tensor) -> None:
    if total.dtype != torch.float32 or total.shape != q.shape or not total.is_contiguous():
        raise ValueError(
            f"dequantise_add_: total is {total.dtype} {tuple(total.shape)} with strides {total.stride()}; "
            f"legal is contiguous torch.float32 {tuple(q.shape)}"
        )


@jit
def _quantise_kernel(x, q, scales, numel, groups, GROUPS: tl.constexpr, GROUP: tl.constexpr):
    g = tl.program_id(0).to(tl.int64) * GROUPS + tl.arange(0, GROUPS)
    i = g[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    value = tl.load(x + i, mask=i < numel, other=0.0).to(tl.float32)
    strange = tl.sum((value != value).to(tl.int32), axis=1) > 0  # a maximum may pass over NaN
    top = tl.max(tl.abs(value), axis=1)
    scale = tl.where(strange, float("nan"), tl.div_rn(top, 127.0))
    ratio = tl.div_rn(value, tl.where(scale == 0.0, 1.0, scale)[:, None] + tl.zeros_like(value))
    # to nearest even by the float32 trick: adding 1.5 * 2**23 leaves no fraction bits
    whole = (ratio + 12582912.0) - 12582912.0
    whole = tl.where(tl.abs(whole) <= 127.0, whole, 0.0)
    tl.store(q + i, whole.to(tl.int8), mask=i < numel)
    tl.store(scales + g, scale, mask=g < groups)


@jit
def _dequantise_kernel(q, scales, out, numel, ADD: tl.constexpr, GROUPS: tl.constexpr, GROUP: tl.constexpr):
    g = tl.program_id(0).to(tl.int64) * GROUPS + tl.arange(0, GROUPS)
    i = g[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    scale = tl.load(scales + g, mask=g * GROUP < numel, other=0.0)
    value = tl.load(q + i, mask=i < numel, other=0).to(tl.float32) * scale[:, None]
    if ADD:
        value += tl.load(out + i, mask=i < numel, other=0.0)
    tl.store(out + i, value, mask=i < numel)


def _triton_quantise(x: Tensor) -> tuple[Tensor, Tensor]:
    _check("quantise", x)
    groups = -(-x.numel() // GROUP)
    q = torch.empty(x.shape, dtype=torch.int8, device=x.device)
    scale = torch.empty(groups, dtype=torch.float32, device=x.device)
    options = tile("int8", 1, architecture(x.device))
    grid = (-(-groups // options["GROUPS"]),)
    launch(_quantise_kernel, grid, x, q, scale, x.numel(), groups, GROUP=GROUP, fuse=False, **options)
    return q, scale


def _dequantise_into(out: Tensor, q: Tensor, scale: Tensor, add: bool) -> None:
    options = tile("int8", 1, architecture(q.device))
    grid = (-(-scale.numel() // options["GROUPS"]),)
    launch(_dequantise_kernel, grid, q, scale, out, q.numel(), ADD=add, GROUP=GROUP, fuse=False, **options)


def _triton_dequantise(q: Tensor, scale: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    _check_pair("dequantise", q, scale, dtype)
    out = torch.empty(q.shape, dtype=dtype, device=q.device)
    _dequantise_into(out, q, scale, add=False)
    return out


def _triton_add(total: Tensor, q: Tensor, scale: Tensor) -> None:
    _check_total(total, q)
    _check_pair("dequantise_add_", q, scale)
    _dequantise_into(total, q, scale, add=True)


_TAKES = {"q": Takes((torch.int8,)), "scale": Takes((torch.float32,)), "total": Takes((torch.float32,))}

TRITON = {
    "quantise": TritonOp(_triton_quantise, {"x": FLAT}),
    "dequantise": TritonOp(_triton_dequantise, _TAKES),
    "dequantise_add_": TritonOp(_triton_add, _TAKES),
}


def reference(x: Tensor) -> tuple[Tensor, Tensor]:
    """(x as it may arrive, how far from x each value may be), group by group in float64."""
    arrived, bound = x.double().flatten().clone(), torch.empty(x.numel(), dtype=torch.float64)
    for group, limit in zip(arrived.split(GROUP), bound.split(GROUP), strict=True):
        scale = float(group.abs().max()) / 127
        limit.fill_(scale / 2)
        if scale:
            group.copy_((group / scale).round() * scale)
    return arrived.view(x.shape), bound.view(x.shape)
