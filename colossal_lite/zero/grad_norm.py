"""Computes the squared norm of all gradients, fast or in a fixed order.

Note: `ordered`.
Each block of 1,024 elements of a parameter is in one rank's shard of its chunk (memory/packing.py). So no other rank
adds to its square.  The ranks exchange the squares of all blocks, with zeros for blocks of others.  Every rank adds
them in the order of the model's parameters: the same bits for any stage and chunk size.
Cost: 8 bytes a block in the
all-reduce of the step's totals, 0.2 % of the gradients in float32.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from colossal_lite.distributed.mesh import Mesh
from colossal_lite.memory.chunk import Chunk
from colossal_lite.memory.gradient_squares import blocks_of
from colossal_lite.memory.packing import ChunkSpec, Entry


def squares_of(
    chunks: Sequence[Chunk], order: Sequence[Entry] | None, mesh: Mesh, device: torch.device
) -> Tensor:
    """This rank's terms of the sum of squares: one, or those of `ordered_squares` in an `order`. Ranks with the same
    sum of a chunk each add the squares of a share of it. So no element counts twice."""
    if order is not None:
        return ordered_squares(chunks, order, mesh, device)
    terms, parts = [], []  # parts are on the device, and summed at once
    for chunk in chunks:
        if (counted := chunk.counted()) is None:
            terms.append(chunk.squares())
        else:
            parts += counted
    if parts:
        terms.append(chunks[0].square_sum(parts))
    if not terms:
        return torch.zeros(1, dtype=torch.float64, device=device)
    return (terms[0] if len(terms) == 1 else torch.stack(terms).sum()).view(1)


def ordered_squares(
    chunks: Sequence[Chunk], entries: Sequence[Entry], mesh: Mesh, device: torch.device
) -> Tensor:
    """This rank's terms [sections * blocks]: the squares of its blocks, in the order of `entries` of all stages. Each
    rank of the tensor axis has a section. What some of them hold in common is in that of the first of these."""
    found = {entry.name: (chunk, entry) for chunk in chunks for entry in chunk.spec.entries}
    blocks = sum(blocks_of(entry) for entry in entries)
    out = torch.zeros(mesh.size("tensor"), blocks, dtype=torch.float64, device=device)
    start = 0
    for each in entries:
        stop = start + blocks_of(each)
        if each.name in found:
            chunk, entry = found[each.name]
            out[_section(chunk, mesh), start:stop] = chunk.block_squares(entry)
        start = stop
    return out.view(-1)


def in_order(packed: Sequence[ChunkSpec], names: Iterable[str]) -> tuple[Entry, ...]:
    """The entries of chunks in the order of `names`; names that are in none are left out."""
    found = {entry.name: entry for spec in packed for entry in spec.entries}
    return tuple(found[name] for name in names if name in found)


def _section(chunk: Chunk, mesh: Mesh) -> int:
    """Coordinate on the tensor axis of the first rank that holds the same sums of this chunk as this rank."""
    section = 0
    for leaf in mesh.layout.leaves:
        if leaf.name.split(".")[0] == "tensor":
            coord = 0 if leaf.name in chunk.spec.key.sync_axes else mesh.coords[leaf.name]
            section = section * leaf.size + coord
    return section
