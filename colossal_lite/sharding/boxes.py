"""Computes the boxes of tensors that a rank holds, writes and reads in a checkpoint; integers only.

Note: boxes.
A box is [start, stop) per dimension of the *global*, unpadded tensor.  A rank holds an interval of the flattened local
tensor of a parameter: all of it, or its ZeRO shard.  Every interval is a few boxes, so a checkpoint stores boxes only.
Any mesh writes them, and any other mesh reads the boxes that overlap its own.  A fragment pairs a box with its offset
in the local tensor; its elements have the local tensor's strides.

Invariants (property-tested): over all ranks of a mesh the written boxes are disjoint and cover every tensor.  The held
boxes of one rank are disjoint and cover its interval without padding.  Of ranks that hold the same elements, the one
with coordinate 0 on every replicating axis writes.  A block of a fused dimension may be replicated beside sharded ones
(keys of grouped heads).  So each block is decided alone.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product

from colossal_lite.sharding.mesh_layout import MeshLayout
from colossal_lite.sharding.shard_spec import ShardPiece, ShardSpec

Box = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Fragment:
    """A box of the global tensor whose first element is number `offset` of the flattened local tensor."""

    box: Box
    offset: int


def volume(box: Box) -> int:
    """Elements of a box; 1 for that of a 0-d tensor."""
    return math.prod(stop - start for start, stop in box)


def extent(box: Box) -> tuple[int, ...]:
    return tuple(stop - start for start, stop in box)


def intersect(a: Box, b: Box) -> Box | None:
    """The intersection of two boxes; None if it is empty."""
    both = tuple((max(p[0], q[0]), min(p[1], q[1])) for p, q in zip(a, b, strict=True))
    return both if all(start < stop for start, stop in both) else None


def whole(shape: Sequence[int]) -> Box:
    return tuple((0, size) for size in shape)


def strides_of(shape: Sequence[int]) -> tuple[int, ...]:
    """Row-major strides in elements."""
    return tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))


def boxes_of_interval(shape: Sequence[int], start: int, stop: int) -> Iterator[Box]:
    """Elements [start, stop) of a flattened row-major tensor as at most `2 dims - 1` boxes, in order.

    >>> list(boxes_of_interval((3, 4), 2, 9))
    [((0, 1), (2, 4)), ((1, 2), (0, 4)), ((2, 3), (0, 1))]
    """
    if start >= stop:
        return
    if not shape:
        yield ()
        return
    row = math.prod(shape[1:])
    first, last = start // row, stop // row
    if first * row < start or first == last:  # a row that begins or ends inside
        end = min(stop, (first + 1) * row)
        yield from (
            ((first, first + 1), *box)
            for box in boxes_of_interval(shape[1:], start - first * row, end - first * row)
        )
        yield from boxes_of_interval(shape, end, stop)
        return
    yield ((first, last), *whole(shape[1:]))
    yield from boxes_of_interval(shape, last * row, stop)


def cut(box: Box, limit_numel: int) -> Iterator[Box]:
    """Consecutive parts of at most `limit_numel` elements, cut along the first dimensions, row-major order."""
    assert limit_numel > 0
    if volume(box) <= limit_numel:
        yield box
        return
    dim = next(d for d, (start, stop) in enumerate(box) if stop - start > 1)
    start, stop = box[dim]
    rows = max(1, limit_numel // volume(box[dim + 1 :]))
    for at in range(start, stop, rows):
        yield from cut((*box[:dim], (at, min(at + rows, stop)), *box[dim + 1 :]), limit_numel)


def within(fragment: Fragment, box: Box, local_shape: Sequence[int]) -> Fragment:
    """The part `box` of a fragment, which holds it."""
    steps = zip(box, fragment.box, strides_of(local_shape), strict=True)
    return Fragment(
        box, fragment.offset + sum((low - first) * stride for (low, _), (first, _), stride in steps)
    )


def held(
    spec: ShardSpec, layout: MeshLayout, coords: Mapping[str, int], start: int = 0, stop: int | None = None
) -> Iterator[Fragment]:
    """Fragments of elements [start, stop) of the rank's flattened local tensor; padding is in none."""
    for boxes in product(*spec.pieces(layout, coords)):
        yield from _clipped(boxes, spec.local_shape(layout), start, stop)


def written(
    spec: ShardSpec,
    layout: MeshLayout,
    coords: Mapping[str, int],
    start: int = 0,
    stop: int | None = None,
    flat_axes: Collection[str] = (),
) -> Iterator[Fragment]:
    """The fragments of `held` that this rank writes, and no other rank that holds them.

    `flat_axes`: leaf axes whose ranks hold different intervals of the same local tensor (ZeRO).
    """
    blocks = spec.blocks(layout, coords)
    for choice in product(*(range(len(dim)) for dim in spec.dims)):
        factors = {f.name for dim, block in zip(spec.dims, choice, strict=True) for f in dim[block]}
        sharding = {axis for axis, placement in spec.value if placement.factor in factors}
        if any(coords[leaf.name] and leaf.name not in {*sharding, *flat_axes} for leaf in layout.leaves):
            continue
        for boxes in product(*(dim[block] for dim, block in zip(blocks, choice, strict=True))):
            yield from _clipped(boxes, spec.local_shape(layout), start, stop)


def _clipped(
    pieces: Sequence[ShardPiece], local_shape: Sequence[int], start: int, stop: int | None
) -> Iterator[Fragment]:
    """The elements [start, stop) of the flattened local tensor within one box of pieces."""
    local: Box = tuple((p.local, p.local + p.length) for p in pieces)
    strides = strides_of(local_shape)
    end = math.prod(local_shape) if stop is None else stop
    for box in boxes_of_interval(local_shape, start, end):
        if (common := intersect(local, box)) is not None:
            offset = sum(low * stride for (low, _), stride in zip(common, strides, strict=True))
            moved = zip(common, (p.start - p.local for p in pieces), strict=True)
            yield Fragment(tuple((low + by, high + by) for (low, high), by in moved), offset)
