"""Sums the squares of flat gradients in one pass, a launch a buffer on a GPU.

The sum stays on the device, so a clip factor never waits for it.  Fixed blocks give norms in float32, or in float64
for float64.  Their squares are added in float64 in one order, without atomics.  An element that is not finite makes
the sum not finite. A square beyond float32 (1.8e19 in magnitude) does so too; a loss scaler counts it as an overflow.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from .launch import FLAT, TritonOp, architecture, jit, launch, tile, tl

BLOCK_NUMEL = 1024
WIDENED_NUMEL = 256 * BLOCK_NUMEL
"""Elements of two bytes that are widened at once for their norms."""


def square_sum(tensors: Sequence[Tensor]) -> Tensor:
    """The sum of squares over one or more flat tensors [n] of one device; 0-d float64, there.

    Raises ValueError for none, or for one that is not flat, floating, contiguous and on the device of the first.
    """
    _check(tensors)
    found = [block_norms(x).double().square().sum() for x in tensors]
    return found[0] if len(found) == 1 else torch.stack(found).sum()


def block_norms(flat: Tensor) -> Tensor:
    """Norms of the blocks of a buffer [n], in float32, or in float64 for float64. The last block may be short.

    On CPU a float64 norm of a float32 buffer costs 40 times as much."""
    whole = flat.numel() - flat.numel() % BLOCK_NUMEL
    step = WIDENED_NUMEL if flat.dtype.itemsize == 2 else max(1, whole)
    norms = [_norms(part.view(-1, BLOCK_NUMEL)) for part in flat[:whole].split(step)] if whole else []
    if whole < flat.numel() or not norms:
        norms.append(_norms(flat[whole:].view(1, -1)))
    return norms[0] if len(norms) == 1 else torch.cat(norms)


def _norms(rows: Tensor) -> Tensor:
    """The norm of each row, in float32 or better."""
    norms: Tensor = torch.linalg.vector_norm(
        rows, dim=1, dtype=torch.promote_types(rows.dtype, torch.float32)
    )
    return norms


def _check(tensors: Sequence[Tensor]) -> None:
    if not tensors:
        raise ValueError("square_sum: tensors is empty; legal is one or more")
    for index, x in enumerate(tensors):
        flat = x.dim() == 1 and x.is_contiguous() and x.is_floating_point()
        if not flat or x.device != tensors[0].device:
            raise ValueError(
                f"square_sum: tensor {index} is {x.dtype} {tuple(x.shape)} on {x.device} with strides {x.stride()}; "
                f"legal is [n], floating, contiguous and on {tensors[0].device}"
            )


@jit
def _square_kernel(x, sums, numel, first, BLOCK: tl.constexpr):
    """The sum of squares of one block."""
    program = tl.program_id(0).to(tl.int64)
    i = program * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + i, mask=i < numel, other=0.0).to(tl.float32)
    tl.store(sums + first + program, tl.sum(value * value, axis=0).to(tl.float64))


def _triton(tensors: Sequence[Tensor]) -> Tensor:
    _check(tensors)
    device = tensors[0].device
    options = tile("square_sum", 1, architecture(device))
    blocks = [-(-x.numel() // options["BLOCK"]) for x in tensors]
    sums, first = torch.empty(sum(blocks), dtype=torch.float64, device=device), 0
    for x, count in zip(tensors, blocks, strict=True):
        launch(_square_kernel, (count,), x, sums, x.numel(), first, **options)
        first += count
    return sums.sum()


TRITON = {"square_sum": TritonOp(_triton, {"tensors": FLAT})}


def reference(tensors: Sequence[Tensor]) -> Tensor:
    """The result of `square_sum`, computed one element at a time."""
    return torch.tensor(math.fsum(e * e for x in tensors for e in x.double().tolist()), dtype=torch.float64)
