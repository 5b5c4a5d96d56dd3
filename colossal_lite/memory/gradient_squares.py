"""Sums the squares of a chunk's gradient for the norm, by blocks: no bit depends on the cut.

Note: blocks.
A block is `SHARD_BLOCK_NUMEL` elements of one parameter, counted from its start.  The norm of a block is taken in
float32, or in float64 for a float64 gradient.  Its square and all sums are float64.  All of it runs on the device,
also for a gradient on the host, so the bits are the same.
Cost: gradients of two bytes are widened `WIDENED_NUMEL` elements at a time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from colossal_lite.memory.packing import SHARD_BLOCK_NUMEL, Entry
from colossal_lite.memory.transfers import to_device

WIDENED_NUMEL = 256 * SHARD_BLOCK_NUMEL
"""Elements of two bytes that are widened at once for their norms."""


def blocks_of(entry: Entry) -> int:
    """Blocks over which an entry's norm is summed."""
    return -(-(entry.stop - entry.start) // SHARD_BLOCK_NUMEL)


def squares_of(gradient: Tensor, spans: Sequence[slice], device: torch.device) -> Tensor:
    """Sum of squares of these spans of a flat gradient, 0-d float64, on the device."""
    found = [_block_norms(to_device(gradient[span], device)).double().square().sum() for span in spans]
    if len(found) == 1:  # nearly always, and a launch less on a GPU
        return found[0]
    return torch.stack(found).sum() if found else torch.zeros((), dtype=torch.float64, device=device)


def block_squares_of(
    gradient: Tensor, entry: Entry, spans: Sequence[slice], first: int, device: torch.device
) -> Tensor:
    """Squares [blocks] of the norms of an entry's blocks, float64, on the device; zero where `spans` has no element.

    `first`: the element of the chunk with which `gradient` begins. `spans`: slices of `gradient` within the entry.
    """
    out = torch.zeros(blocks_of(entry), dtype=torch.float64, device=device)
    for span in spans:
        offset = span.start + first - entry.start
        for start, stop in _cut_to_blocks(offset, offset + span.stop - span.start):
            part = gradient[span.start + start - offset : span.start + stop - offset]
            norms = _block_norms(to_device(part, device))
            at = start // SHARD_BLOCK_NUMEL
            out[at : at + len(norms)] += norms.double().square()
    return out


def _cut_to_blocks(start: int, stop: int) -> Iterator[tuple[int, int]]:
    """Cut [start, stop) into at most three ranges: to the first block boundary, full blocks, the remainder."""
    head = min(-(-start // SHARD_BLOCK_NUMEL) * SHARD_BLOCK_NUMEL, stop)
    body = max(stop // SHARD_BLOCK_NUMEL * SHARD_BLOCK_NUMEL, head)
    yield from ((a, b) for a, b in ((start, head), (head, body), (body, stop)) if a < b)


def _block_norms(flat: Tensor) -> Tensor:
    """Norms of the blocks of a buffer, in float32, or in float64 for a float64 buffer. The last block may be short.

    On CPU a float64 norm of a float32 buffer costs 40 times as much."""
    whole = flat.numel() - flat.numel() % SHARD_BLOCK_NUMEL
    step = WIDENED_NUMEL if flat.dtype.itemsize == 2 else max(1, whole)
    norms = [_norms(part.view(-1, SHARD_BLOCK_NUMEL)) for part in flat[:whole].split(step)] if whole else []
    if whole < flat.numel():
        norms.append(_norms(flat[whole:].view(1, -1)))
    return norms[0] if len(norms) == 1 else torch.cat(norms)


def _norms(rows: Tensor) -> Tensor:
    """The norm of each row, in float32 or better."""
    norms: Tensor = torch.linalg.vector_norm(
        rows, dim=1, dtype=torch.promote_types(rows.dtype, torch.float32)
    )
    return norms
