"""Boxes of a checkpoint: every element is written once, whatever the mesh, and every rank finds what it holds."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from colossal_lite.checkpoint.manifest import (
    Manifest,
    Slice,
    Stored,
    TensorSlice,
    misfits,
    reads,
    unexpected,
    writes,
)
from colossal_lite.config.parallel_schema import TensorConfig
from colossal_lite.sharding.boxes import (
    Fragment,
    boxes_of_interval,
    cut,
    extent,
    held,
    strides_of,
    volume,
    written,
)
from colossal_lite.sharding.mesh_layout import MeshLayout
from colossal_lite.sharding.shard_spec import Factor, Shard, ShardSpec, dims_of

shapes = st.lists(st.integers(1, 5), max_size=4)


def index_of(box: Any) -> tuple[slice, ...]:
    return tuple(slice(*interval) for interval in box)


@given(shapes, st.data())
def test_an_interval_is_its_boxes_in_order(shape: list[int], data: st.DataObject) -> None:
    numel = math.prod(shape)
    start = data.draw(st.integers(0, numel))
    stop = data.draw(st.integers(start, numel))
    full = np.arange(numel).reshape(shape)
    boxes = list(boxes_of_interval(shape, start, stop))
    joined = np.concatenate([full[index_of(box)].reshape(-1) for box in boxes] or [full.reshape(-1)[:0]])
    assert joined.tolist() == list(range(start, stop))
    assert len(boxes) <= max(1, 2 * len(shape) - 1)


@given(shapes, st.integers(1, 30))
def test_cut_parts_are_small_and_in_order(shape: list[int], limit: int) -> None:
    full = np.arange(math.prod(shape)).reshape(shape)
    parts = list(cut(tuple((0, n) for n in shape), limit))
    assert all(volume(part) <= limit for part in parts)
    assert np.concatenate([full[index_of(part)].reshape(-1) for part in parts]).tolist() == list(
        range(full.size)
    )


def fused() -> ShardSpec:
    """Grouped heads on one tensor axis: queries cut, the two key heads' blocks replicated; columns whole."""
    q, kv, width = Factor("heads", 4), Factor("kv", 1), Factor("k", 3)
    dims = (((q, width), (kv, width), (kv, width)), ((Factor("d", 5),),))
    return ShardSpec("qkv.weight", dims, (("tensor", Shard("heads")),))


SPECS = {
    "plain": ShardSpec("plain", dims_of((3, 4, 2))),
    "scalar": ShardSpec("scalar", dims_of(())),
    "rows": ShardSpec("rows", (((Factor("v", 37, 40),),), ((Factor("d", 3),),)), (("tensor", Shard("v")),)),
    "columns": ShardSpec("columns", (((Factor("o", 3),),), ((Factor("i", 8),),)), (("tensor", Shard("i")),)),
    "fused": fused(),
    "gate up": ShardSpec(
        "gate_up", (((Factor("f", 8),), (Factor("f", 8),)), ((Factor("d", 2),),)), (("tensor", Shard("f")),)
    ),
    "2d": ShardSpec(
        "2d",
        (((Factor("o", 6),),), ((Factor("i", 4),),)),
        (("tensor.row", Shard("o")), ("tensor.column", Shard("i"))),
    ),
}
LAYOUTS = {
    "1": MeshLayout.build(),
    "data 3": MeshLayout.build(data=3),
    "tensor 2": MeshLayout.build(tensor=2),
    "tensor 4": MeshLayout.build(tensor=4),
    "data 2 tensor 2": MeshLayout.build(data=2, tensor=2),
    "sequence 2 tensor 2": MeshLayout.build(sequence=2, tensor=2),
    "data 2 tensor 2d": MeshLayout.build(data=2, tensor=TensorConfig(size=4, mode="2d").axis()),
}


def fits(spec: ShardSpec, layout: MeshLayout) -> bool:
    """Whether the spec speaks of this layout's axes (a 2d spec needs a 2d mesh, and the others a plain one)."""
    names = {leaf.name for leaf in layout.leaves}
    return {axis for axis, _ in spec.value} <= names


CASES = [(s, m) for s, spec in SPECS.items() for m, layout in LAYOUTS.items() if fits(spec, layout)]


def local_of(spec: ShardSpec, full: Any, layout: MeshLayout, coords: Mapping[str, int]) -> Any:
    local = np.full(spec.local_shape(layout), -1)
    spec.cut(full, local, layout, coords)
    return local


def taken(local: Any, fragment: Fragment) -> Any:
    flat = local.reshape(-1)
    strides = [stride * flat.itemsize for stride in strides_of(local.shape)]
    return np.lib.stride_tricks.as_strided(flat[fragment.offset :], extent(fragment.box), strides)


@pytest.mark.parametrize("zero", [False, True], ids=["whole", "zero"])
@pytest.mark.parametrize(("spec", "mesh"), CASES)
def test_every_element_is_written_once_and_every_rank_holds_what_it_cuts(
    spec: str, mesh: str, zero: bool
) -> None:
    one, layout = SPECS[spec], LAYOUTS[mesh]
    full = np.arange(one.numel).reshape(one.shape)
    count, seen = np.zeros(one.shape, int), np.full(one.shape, -1)
    for rank in range(layout.world_size):
        coords = layout.coords(rank)
        local = local_of(one, full, layout, coords)
        start, stop, axes = 0, local.size, tuple[str, ...]()
        if zero:
            parts, part = layout.size("data", "sequence"), layout.coord(rank, "data", "sequence")
            start, stop = part * local.size // parts, (part + 1) * local.size // parts
            axes = ("data", "sequence")
        mine = np.zeros(local.size, bool)
        mine[start:stop] = True
        got = np.zeros(local.size, bool)
        for fragment in held(one, layout, coords, start, stop):
            assert np.array_equal(taken(local, fragment), full[index_of(fragment.box)])
            assert not taken(got.reshape(local.shape), fragment).any(), "held twice"
            taken(got.reshape(local.shape), fragment)[...] = True
        assert np.array_equal(got, mine & (local.reshape(-1) >= 0))
        for fragment in written(one, layout, coords, start, stop, axes):
            count[index_of(fragment.box)] += 1
            seen[index_of(fragment.box)] = taken(local, fragment)
    assert (count == 1).all() and np.array_equal(seen, full)


def manifest_of(tensors: dict[str, Stored]) -> Manifest:
    return Manifest(step=0, samples=0, seed=0, config={}, mesh={}, tensors=tensors)


def parts_of(layout: MeshLayout, rank: int, zero: bool) -> list[TensorSlice]:
    parts = []
    for name, spec in SPECS.items():
        if fits(spec, layout):
            numel = math.prod(spec.local_shape(layout))
            count, index = layout.size("data"), layout.coord(rank, "data")
            span = (index * numel // count, (index + 1) * numel // count) if zero else (0, numel)
            parts.append(TensorSlice(name, "F32", spec, *span, ("data",) if zero else ()))
    return parts


@pytest.mark.parametrize("zero", [False, True])
@pytest.mark.parametrize("reader", [name for name in LAYOUTS if "2d" not in name])
@pytest.mark.parametrize("writer", [name for name in LAYOUTS if "2d" not in name])
def test_planned_files_hold_what_any_other_mesh_reads(writer: str, reader: str, zero: bool) -> None:
    """The whole way from one mesh to another on numpy arrays: write plan, bytes, read plan."""
    truth = {
        name: np.arange(spec.numel, dtype=np.float32).reshape(spec.shape) for name, spec in SPECS.items()
    }
    layout, files, stored = LAYOUTS[writer], dict[str, bytes](), dict[str, Stored]()
    for rank in range(layout.world_size):
        parts = parts_of(layout, rank, zero)
        for file, rows in writes(parts, layout, rank, slice_bytes=40, file_bytes=100).items():
            assert file not in files
            data = b""
            for write in rows:
                part = parts[write.part]
                local = local_of(part.spec, truth[part.name], layout, layout.coords(rank)).astype(np.float32)
                assert write.slice.start == len(data)
                data += taken(local, write.fragment).tobytes()
                before = stored.get(part.name, Stored(dtype="F32", shape=part.spec.shape, slices=()))
                stored[part.name] = replace(before, slices=(*before.slices, write.slice))
                assert len(data) == write.slice.stop and write.slice.stop - write.slice.start <= 40
            assert len(data) <= 100
            files[file] = data
    manifest, layout = manifest_of(stored), LAYOUTS[reader]
    for rank in range(layout.world_size):
        parts = parts_of(layout, rank, False)
        assert misfits(parts, manifest) == []
        locals_ = [np.full(part.spec.local_shape(layout), -1, np.float32) for part in parts]
        for read in reads(parts, manifest, layout, rank):
            row = read.slice
            array = np.frombuffer(files[row.file][row.start : row.stop], np.float32).reshape(extent(row.box))
            for index, fragment in read.into:
                inner = tuple(
                    slice(a - c, b - c) for (a, b), (c, _) in zip(fragment.box, row.box, strict=True)
                )
                taken(locals_[index], fragment)[...] = array[inner]
        for part, local in zip(parts, locals_, strict=True):
            expected = local_of(part.spec, truth[part.name], layout, layout.coords(rank))
            assert np.array_equal(local, expected), part.name


def test_what_does_not_fit_is_listed_by_name() -> None:
    row = Slice(box=((0, 2),), file="shard-00000-000.safetensors", start=0, stop=8, crc32=0)
    manifest = manifest_of({"a": Stored(dtype="F32", shape=(2,), slices=(row,))})
    parts = [
        TensorSlice("a", "F32", ShardSpec("a", dims_of((3,)))),
        TensorSlice("b", "F32", ShardSpec("b", dims_of((1,)))),
    ]
    assert misfits(parts, manifest) == [
        "missing: b (1,) is not in the checkpoint",
        "shape: a is (2,), the run has (3,)",
    ]
    assert unexpected((), manifest) == ["unexpected: a (2,) is not in this run"]
    assert unexpected({"a"}, manifest) == []
    assert misfits([], manifest) == []
