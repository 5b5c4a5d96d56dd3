"""Describes the shard of a tensor that one rank holds; every parameter has one such description.

Note: ShardSpec.
A dimension is a concatenation of blocks.  A block is a product of named factors, as in an einops pattern.  A fused QKV
weight has rows `(heads K | kv_heads K | kv_heads K)`, a gated MLP `(F | F)`.  A mesh axis shards a *factor*.  So one
rule cuts every interleaving, and each rank gets whole heads.  Placement is given per leaf axis, in an explicit order:
the first of two axes on one factor is the outer one.  Value and gradient have separate placements: a norm under
sequence sharding has a replicated value and a partial gradient.  An axis that is not named replicates.

Initial values, the axes of a gradient's sum and the ranks that count in the norm are derived from it.  So are the
slices of a checkpoint, and the tensors that a parity test gathers.  Invariants (property-tested): over the ranks that
differ on sharding axes the pieces are disjoint and cover the tensor.  `join` inverts `cut`.  Padding is in no piece.
This file computes with integers and indexes any array type.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, Literal

from colossal_lite.sharding.mesh_layout import MeshLayout


@dataclass(frozen=True)
class Factor:
    """A named factor of a dimension. `padded` is its stored size where `size` does not divide; 0: not padded."""

    name: str
    size: int
    padded: int = 0

    @property
    def stored(self) -> int:
        return self.padded or self.size


Block = tuple[Factor, ...]
Dim = tuple[Block, ...]


@dataclass(frozen=True)
class AxisPlacement:
    """The placement of a tensor along one mesh axis: shards a factor, replicates, or holds terms of a sum."""

    kind: Literal["shard", "replicate", "partial"]
    factor: str | None = None

    def __str__(self) -> str:
        return f"shard({self.factor})" if self.kind == "shard" else self.kind


def Shard(factor: str) -> AxisPlacement:  # noqa: N802  (a constructor, like Replicate and Partial)
    return AxisPlacement("shard", factor)


Replicate = AxisPlacement("replicate")
Partial = AxisPlacement("partial")
Placements = tuple[tuple[str, AxisPlacement], ...]


@dataclass(frozen=True)
class ShardPiece:
    """`length` consecutive entries of one dimension: at `start` globally, at `local` on the rank."""

    local: int
    start: int
    length: int


@dataclass(frozen=True)
class ShardSpec:
    """Shape, factors, and placement of value and gradient, of one parameter."""

    name: str
    dims: tuple[Dim, ...]
    value: Placements = ()
    gradient: Placements = ()

    def __post_init__(self) -> None:
        names = {factor.name for dim in self.dims for block in dim for factor in block}
        for axis, placement in (*self.value, *self.gradient):
            assert placement.kind != "shard" or placement.factor in names, (
                f"{self.name}: no factor for {axis}"
            )
        for placements in (self.value, self.gradient):
            assert len({axis for axis, _ in placements}) == len(placements), (
                f"{self.name}: an axis is placed twice"
            )
        assert all(p.kind != "partial" for _, p in self.value), (
            f"{self.name}: a stored value is never partial"
        )

    @property
    def shape(self) -> tuple[int, ...]:
        """The global shape, without padding, as in a serial model."""
        return tuple(sum(math.prod(f.size for f in block) for block in dim) for dim in self.dims)

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    def local_shape(self, layout: MeshLayout) -> tuple[int, ...]:
        """The shape one rank stores, padding included; the same on every rank."""
        return tuple(
            sum(math.prod(self._stored(f, layout) for f in block) for block in dim) for dim in self.dims
        )

    def pieces(self, layout: MeshLayout, coords: Mapping[str, int]) -> tuple[tuple[ShardPiece, ...], ...]:
        """For each dimension, the intervals of the global tensor that the rank at `coords` holds."""
        return tuple(tuple(_merged(p for block in dim for p in block)) for dim in self.blocks(layout, coords))

    def blocks(
        self, layout: MeshLayout, coords: Mapping[str, int]
    ) -> tuple[tuple[tuple[ShardPiece, ...], ...], ...]:
        """The pieces of every block of every dimension; `pieces` merges them."""
        return tuple(tuple(self._block_pieces(dim, layout, coords)) for dim in self.dims)

    def sync_axes(self, layout: MeshLayout) -> tuple[str, ...]:
        """Leaf axes of more than one rank over which this gradient must be summed."""
        wanted = {axis for axis, placement in self.gradient if placement.kind == "partial"}
        return tuple(
            leaf.name
            for leaf in layout.leaves
            if leaf.size > 1 and not wanted.isdisjoint((leaf.name, leaf.name.partition(".")[0]))
        )

    def owned(self, layout: MeshLayout, coords: Mapping[str, int]) -> tuple[tuple[int, int], ...]:
        """Intervals of the flattened local tensor that this rank counts, where several ranks hold the same elements.

        The rank with the lowest coordinates counts an element.  Ranks that differ on `sync_axes` all count it, since
        they share that work otherwise.  A block of a fused dimension may be replicated where its neighbours are sharded
        (keys and values of grouped heads).  So blocks are decided one by one.  Padding is counted: it is zero.
        """
        shared = [
            leaf.name
            for leaf in layout.leaves
            if leaf.name not in self.sync_axes(layout) and coords[leaf.name]
        ]
        row_numel = math.prod(self.local_shape(layout)[1:]) if self.dims else 1
        intervals: list[tuple[int, int]] = []
        start = 0
        for block in self.dims[0] if self.dims else ((),):
            factors = {f.name for f in block} | {f.name for dim in self.dims[1:] for b in dim for f in b}
            sharding = {axis for axis, p in self.value if p.factor in factors}
            stop = start + math.prod(self._stored(f, layout) for f in block) * row_numel
            if all(axis in sharding for axis in shared):
                if intervals and intervals[-1][1] == start:
                    intervals[-1] = (intervals[-1][0], stop)
                else:
                    intervals.append((start, stop))
            start = stop
        return tuple(intervals)

    @property
    def sharding_axes(self) -> tuple[str, ...]:
        """Axes that cut the value."""
        return tuple(axis for axis, placement in self.value if placement.kind == "shard")

    def cut(self, full: Any, out: Any, layout: MeshLayout, coords: Mapping[str, int]) -> None:
        """Write this rank's pieces of `full` (global shape) into `out` (local shape); padding is left untouched."""
        for local, start in self._slices(layout, coords):
            out[local] = full[start]

    def join(self, shards: Iterable[tuple[Mapping[str, int], Any]], full: Any, layout: MeshLayout) -> None:
        """Write the pieces of all given (coords, shard) pairs into `full` (global shape): the inverse of `cut`."""
        for coords, shard in shards:
            for local, start in self._slices(layout, coords):
                full[start] = shard[local]

    def _slices(
        self, layout: MeshLayout, coords: Mapping[str, int]
    ) -> Iterable[tuple[tuple[slice, ...], tuple[slice, ...]]]:
        for box in product(*self.pieces(layout, coords)):
            yield (
                tuple(slice(p.local, p.local + p.length) for p in box),
                tuple(slice(p.start, p.start + p.length) for p in box),
            )

    def _shards_of(self, factor: Factor, layout: MeshLayout) -> int:
        return math.prod(layout.size(axis) for axis, p in self.value if p.factor == factor.name)

    def _stored(self, factor: Factor, layout: MeshLayout) -> int:
        shards = self._shards_of(factor, layout)
        assert factor.stored % shards == 0, f"{self.name}: {factor} is not padded to a multiple of {shards}"
        return factor.stored // shards

    def _range(self, factor: Factor, layout: MeshLayout, coords: Mapping[str, int]) -> range:
        """The indices of this factor that the rank stores (padding included): one interval."""
        start, length = 0, factor.stored
        for axis, placement in self.value:
            if placement.factor == factor.name:
                length //= layout.size(axis)
                start += coords[axis] * length
        return range(start, start + length)

    def _block_pieces(
        self, dim: Dim, layout: MeshLayout, coords: Mapping[str, int]
    ) -> Iterable[tuple[ShardPiece, ...]]:
        global_base = local_base = 0
        for block in dim:
            ranges = [self._range(f, layout, coords) for f in block]
            yield tuple(_block_pieces(block, ranges, global_base, local_base))
            global_base += math.prod(f.size for f in block)
            local_base += math.prod(self._stored(f, layout) for f in block)


def dims_of(shape: Sequence[int]) -> tuple[Dim, ...]:
    """Plain dimensions, one factor each, named `d0`, `d1`, ...: the dimensions of a tensor without shards."""
    return tuple(((Factor(f"d{i}", size),),) for i, size in enumerate(shape))


def _block_pieces(
    block: Block, ranges: Sequence[range], global_base: int, local_base: int
) -> list[ShardPiece]:
    """Pieces of one block: rows of its last factor, for every kept choice of the factors before it."""
    *outer, last = range(len(block))
    kept = range(ranges[last].start, min(ranges[last].stop, block[last].size))
    pieces = []
    for choice in product(*(range(len(ranges[i])) for i in outer)):
        indices = [ranges[i].start + c for i, c in zip(outer, choice, strict=True)]
        if not kept or any(index >= block[i].size for i, index in zip(outer, indices, strict=True)):
            continue
        start = local = 0
        for i, index, c in zip(outer, indices, choice, strict=True):
            start, local = start * block[i].size + index, local * len(ranges[i]) + c
        start = start * block[last].size + kept.start
        pieces.append(ShardPiece(local_base + local * len(ranges[last]), global_base + start, len(kept)))
    return pieces


def _merged(pieces: Iterable[ShardPiece]) -> list[ShardPiece]:
    merged: list[ShardPiece] = []
    for piece in pieces:
        if merged:
            last = merged[-1]
            if (last.local + last.length, last.start + last.length) == (piece.local, piece.start):
                merged[-1] = replace(last, length=last.length + piece.length)
                continue
        merged.append(piece)
    return merged
