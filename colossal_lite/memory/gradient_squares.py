"""Sums the squares of each block of a parameter's gradient for the norm: no bit depends on the cut.

Note: blocks.
A block is `SHARD_BLOCK_NUMEL` elements of one parameter, counted from its start.  The norm of a block is taken by
kernels/flat.py, in float32, or in float64 for a float64 gradient.  Its square and all sums are float64.  All of it
runs on the device, also for a gradient on the host, so the bits are the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from colossal_lite.kernels.flat import BLOCK_NUMEL, block_norms
from colossal_lite.memory.packing import SHARD_BLOCK_NUMEL, Entry
from colossal_lite.memory.transfers import to_device

assert BLOCK_NUMEL == SHARD_BLOCK_NUMEL, "a block of a norm is a block of a shard"


def blocks_of(entry: Entry) -> int:
    """Blocks over which an entry's norm is summed."""
    return -(-(entry.stop - entry.start) // SHARD_BLOCK_NUMEL)


def block_squares_of(
    gradient: Tensor, entry: Entry, spans: Sequence[slice], first: int, device: torch.device
) -> Tensor:
    """Squares [blocks] of the norms of an entry's blocks, float64, on the device; zero outside `spans`, slices of
    `gradient`, which begins with element `first` of the chunk."""
    out = torch.zeros(blocks_of(entry), dtype=torch.float64, device=device)
    for span in spans:
        offset = span.start + first - entry.start
        for start, stop in _cut_to_blocks(offset, offset + span.stop - span.start):
            part = gradient[span.start + start - offset : span.start + stop - offset]
            norms = block_norms(to_device(part, device))
            at = start // SHARD_BLOCK_NUMEL
            out[at : at + len(norms)] += norms.double().square()
    return out


def _cut_to_blocks(start: int, stop: int) -> Iterator[tuple[int, int]]:
    """Cut [start, stop) into at most three ranges: to the first block boundary, full blocks, the remainder."""
    head = min(-(-start // SHARD_BLOCK_NUMEL) * SHARD_BLOCK_NUMEL, stop)
    body = max(stop // SHARD_BLOCK_NUMEL * SHARD_BLOCK_NUMEL, head)
    yield from ((a, b) for a, b in ((start, head), (head, body), (body, stop)) if a < b)
