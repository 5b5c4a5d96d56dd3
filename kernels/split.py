"""Splits float32 master weights into two halves: the model's bf16 weights, and the bits that these lack.

    high = bf16(p), rounded to nearest even        distance = bits(p) - (bits(high) << 16)
    residual = distance as int16                   tie = (distance == 2**15)

Note: 16 bits and one.
The high half has the bits that a model sees beside a float32 master, so it costs nothing extra.  The rest is kept
apart, and the update reads and writes both.  It takes 2 1/8 bytes a parameter in the place of 4, and not a bit differs.
Rounded to
nearest even, an even half stands for 65,537 masters, both ties among them, and an odd one for 65,535. So 16 bits are
one value too few: distances go from -2**15 to 2**15.  The bit that tells the two ends apart is in a map, eight elements
to a byte.  Rounding ties up would need none: `high` and `residual` are then the halves of bits(p) + 2**15. But the
model would see other weights than with float32 masters.  A NaN stays one, with other bits.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from .launch import jit, tl

TIE = 1 << 15
PIECE = 1 << 18
"""Elements that are joined at once, so that all passes over them stay in the caches."""
_TO_BYTES = 0x0101010101010101
_BIT_OF_BYTE = 0x8040201008040201 - (1 << 64)  # bit i of byte i
_CARRY = 0x7F7F7F7F7F7F7F7F
_GATHER = 0x0102040810204080  # the lowest bit of byte i goes to bit 56 + i


def tie_bytes(numel: int) -> int:
    """Of the map of the ties of so many elements."""
    return -(-numel // 8)


def join(high: Tensor, residual: Tensor, ties: Tensor, out: Tensor | None = None) -> Tensor:
    """The masters [n] float32 of two halves: `high` [n] bf16, `residual` [n] int16, `ties` [ceil(n / 8)] uint8."""
    master = high.float() if out is None else out.copy_(high)
    bits = master.view(torch.int32)
    spread = ties.to(torch.int64).mul_(_TO_BYTES).bitwise_and_(_BIT_OF_BYTE)  # byte i has bit i alone
    flags = spread.add_(_CARRY).bitwise_right_shift_(7).bitwise_and_(_TO_BYTES).view(torch.uint8)
    bits.add_(residual).add_(flags[: high.numel()], alpha=1 << 16)
    return master


def split_(master: Tensor, high: Tensor, residual: Tensor, ties: Tensor) -> None:
    """The reverse of `join`: all bits of the map's last byte are written."""
    high.copy_(master)
    distance = high.float().view(torch.int32)
    torch.sub(master.view(torch.int32), distance, out=distance)
    residual.copy_(distance)
    flags = distance.eq_(TIE).to(torch.uint8)  # in int32, whose comparison is fast
    if short := -flags.numel() % 8:
        flags = F.pad(flags, (0, short))
    ties.copy_(flags.view(torch.int64).mul_(_GATHER).bitwise_right_shift_(56))


def joined_bytes(numel: int) -> int:
    """What a step on the CPU takes beside its buffers, at the most: masters of a piece, their upper halves, ties."""
    return 9 * min(numel, PIECE)


def check_halves(op: str, high: Tensor, residual: Tensor, ties: Tensor) -> None:
    """Raises ValueError for halves that do not belong together."""
    want = (
        ("param", high, torch.bfloat16, high.shape),
        ("residual", residual, torch.int16, high.shape),
        ("ties", ties, torch.uint8, torch.Size([tie_bytes(high.numel())])),
    )
    for name, tensor, dtype, shape in want:
        if tensor.dtype != dtype or tensor.shape != shape or not tensor.is_contiguous():
            raise ValueError(
                f"{op}: {name} is {tensor.dtype} {tuple(tensor.shape)} with strides {tensor.stride()}; legal beside a "
                f"residual is contiguous {dtype} {tuple(shape)}"
            )
        if tensor.device != high.device:
            raise ValueError(f"{op}: {name} is on {tensor.device}; legal is {high.device}, as param")


# ----------------------------------------------------------------------------------------------------- triton


@jit
def load_halves(high, residual, ties, i, inside):
    """Masters of elements i; `high` as int16."""
    top = tl.load(high + i, mask=inside).to(tl.int32) << 16
    distance = tl.load(residual + i, mask=inside).to(tl.int32)
    tie = (tl.load(ties + (i >> 3), mask=inside).to(tl.int32) >> (i & 7).to(tl.int32)) & 1
    return (top + distance + (tie << 16)).to(tl.float32, bitcast=True)


@jit
def store_halves(p, high, residual, ties, i, first, numel, MASKED: tl.constexpr, BLOCK: tl.constexpr):
    """Masters p of the block of elements i from `first` on, which is a multiple of 8.  In integers, so that every
    machine rounds as torch does."""
    if MASKED:
        inside = i < numel
    else:
        inside = None
    bits = p.to(tl.int32, bitcast=True)
    top = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    top = tl.where(p != p, 0x7FC0, top)
    distance = bits - (top << 16)
    tl.store(high + i, top.to(tl.int16), mask=inside)
    tl.store(residual + i, distance.to(tl.int16), mask=inside)
    tie = (distance == 0x8000).to(tl.int32)
    if MASKED:
        tie = tl.where(inside, tie, 0)
    rows = tl.reshape(tie, (BLOCK // 8, 8)) << tl.arange(0, 8)[None, :]
    at = (first >> 3) + tl.arange(0, BLOCK // 8)
    if MASKED:
        tl.store(ties + at, tl.sum(rows, axis=1).to(tl.uint8), mask=at < (numel + 7) // 8)
    else:
        tl.store(ties + at, tl.sum(rows, axis=1).to(tl.uint8))
