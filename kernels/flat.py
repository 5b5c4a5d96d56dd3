"""Sums the squares of flat gradients and says whether all elements are finite, in one pass.

No engine calls it yet: memory/gradient_squares.py sums the norm.  The pass stays on the device, so a clip factor never
waits for it.  Fixed blocks give partial sums in float32, which are added in float64 in one order, without atomics.  An
element that is not finite makes its block's sum not finite. A square beyond float32 (1.8e19 in magnitude) does so too;
a loss scaler counts it as an overflow as well.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from .launch import FLAT, SCALAR, TritonOp, architecture, jit, launch, tile, tl

_BLOCK = 1 << 16


def square_sum(tensors: Sequence[Tensor], unscale: float | Tensor = 1.0) -> Tensor:
    """Float64 [2]: the sum of squares over all tensors, and 1.0 if anything is not finite.

    unscale: every element is divided by it in the same pass, in place, and squared afterwards.
    """
    _check(tensors)
    if not tensors:
        return torch.zeros(2, dtype=torch.float64)
    sums = []
    for x in tensors:
        for piece in x.view(-1).split(_BLOCK):
            if isinstance(unscale, Tensor) or unscale != 1.0:
                piece.div_(unscale)
            acc = torch.promote_types(piece.dtype, torch.float32)
            sums.append(torch.linalg.vector_norm(piece, dtype=acc).double().square())
    return _total(
        torch.stack(sums) if sums else torch.zeros(1, dtype=torch.float64, device=tensors[0].device)
    )


def _total(sums: Tensor) -> Tensor:
    total = sums.double().sum()
    return torch.stack((total, (~total.isfinite()).double()))


def _check(tensors: Sequence[Tensor]) -> None:
    for index, x in enumerate(tensors):
        if not x.is_contiguous() or not x.is_floating_point() or x.device != tensors[0].device:
            raise ValueError(
                f"square_sum: tensor {index} is {x.dtype} on {x.device} with strides {x.stride()}; "
                f"legal is floating, contiguous and on {tensors[0].device}"
            )


# ----------------------------------------------------------------------------------------------------- triton


@jit
def _square_kernel(
    x,
    sums,
    scale_pointer,
    numel,
    first,
    scale: tl.float32,
    POINTER: tl.constexpr,
    UNSCALE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Sums the squares of one block."""
    program = tl.program_id(0).to(tl.int64)
    i = program * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + i, mask=i < numel, other=0.0)
    kind = value.dtype
    value = value.to(tl.float32)
    if UNSCALE:
        if POINTER:
            scale = tl.load(scale_pointer).to(tl.float32)
        value = (value / scale).to(kind)
        tl.store(x + i, value, mask=i < numel)
        value = value.to(tl.float32)
    tl.store(sums + first + program, tl.sum(value * value, axis=0))


def _triton_square_sum(tensors: Sequence[Tensor], unscale: float | Tensor = 1.0) -> Tensor:
    _check(tensors)
    if not tensors:
        return torch.zeros(2, dtype=torch.float64)
    device = tensors[0].device
    options = tile("square_sum", 1, architecture(device))
    blocks = [-(-x.numel() // options["BLOCK"]) for x in tensors]
    sums = torch.empty(sum(blocks), dtype=torch.float32, device=device)
    pointer = unscale if isinstance(unscale, Tensor) else None
    scale = 1.0 if isinstance(unscale, Tensor) else float(unscale)
    first = 0
    for x, count in zip(tensors, blocks, strict=True):
        launch(
            _square_kernel, (count,), x, sums, pointer, x.numel(), first, scale, POINTER=pointer is not None,
            UNSCALE=pointer is not None or scale != 1.0, **options,
        )  # fmt: skip
        first += count
    return _total(sums)


TRITON = {"square_sum": TritonOp(_triton_square_sum, {"tensors": FLAT, "unscale": SCALAR})}


def reference(tensors: Sequence[Tensor], unscale: float = 1.0) -> Tensor:
    """The result of `square_sum`, computed one element at a time."""
    elements = [float(e) / unscale for x in tensors for e in x.double().flatten().tolist()]
    finite = all(math.isfinite(e) for e in elements)
    return torch.tensor(
        [math.fsum(e * e for e in elements) if finite else math.nan, not finite], dtype=torch.float64
    )
