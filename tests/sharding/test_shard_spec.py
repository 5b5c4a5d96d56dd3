"""A ShardSpec cuts a tensor into pieces that are disjoint, cover it, and join again."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from colossal_lite.config.parallel_schema import TensorConfig
from colossal_lite.sharding.mesh_layout import MeshLayout
from colossal_lite.sharding.shard_spec import (
    Factor,
    Partial,
    Replicate,
    Shard,
    ShardPiece,
    ShardSpec,
    dims_of,
)

LAYOUT = MeshLayout.build(data=2, tensor=TensorConfig(size=4, mode="2d").axis())


def _padded(size: int, parts: int) -> int:
    return -(-size // parts) * parts


@st.composite
def specs(draw: st.DrawFn) -> ShardSpec:
    """Random two-dimensional specs: fused blocks, padded factors, up to two axes, in either order."""
    axes = draw(st.permutations(["tensor.row", "tensor.column"]))
    names = ["a", "b", "c"]
    placements = tuple(
        (axis, Shard(draw(st.sampled_from(names)))) if draw(st.booleans()) else (axis, Replicate)
        for axis in axes
    )
    shards = {n: 2 ** sum(p.factor == n for _, p in placements) for n in names}

    def factor(name: str) -> Factor:
        size = draw(st.integers(1, 6))
        return Factor(name, size, _padded(size, shards[name]))

    blocks = tuple((factor("a"), factor("b")) for _ in range(draw(st.integers(1, 3))))
    used = {name for name in ("a", "b", "c")}
    assert used
    return ShardSpec("w", (blocks, ((factor("c"),),)), placements)


def is_owner(spec: ShardSpec, coords: Mapping[str, int]) -> bool:
    """Whether this rank holds the copy that counts: coordinate 0 on every axis that replicates the value."""
    return all(coords[leaf.name] == 0 for leaf in LAYOUT.leaves if leaf.name not in spec.sharding_axes)


@given(specs())
def test_pieces_are_disjoint_cover_the_tensor_and_join_inverts_cut(spec: ShardSpec) -> None:
    full = np.arange(spec.numel).reshape(spec.shape) + 1
    seen = np.zeros_like(full)
    shards = []
    for rank in range(LAYOUT.world_size):
        coords = LAYOUT.coords(rank)
        out = np.zeros(spec.local_shape(LAYOUT), dtype=full.dtype)
        spec.cut(full, out, LAYOUT, coords)
        shards.append((coords, out))
        if is_owner(spec, coords):
            seen += np.isin(full, out)
            assert len(set(out[out > 0].tolist())) == (out > 0).sum(), "an element lies twice in one shard"
    assert (seen == 1).all(), "owners must hold every element exactly once"
    joined = np.zeros_like(full)
    spec.join(shards, joined, LAYOUT)
    assert (joined == full).all()


def test_fused_qkv_gives_each_rank_whole_heads_of_q_k_and_v() -> None:
    layout = MeshLayout.build(tensor=2)
    rows = (
        (Factor("heads", 4), Factor("K", 2)),
        (Factor("kv", 2), Factor("K", 2)),
        (Factor("kv", 2), Factor("K", 2)),
    )
    spec = ShardSpec("qkv", (rows, ((Factor("D", 3),),)), (("tensor", Shard("heads")),))
    with pytest.raises(AssertionError):
        ShardSpec("qkv", (rows,), (("tensor", Shard("nothing")),))
    assert spec.shape == (16, 3)
    # only q is sharded by "heads"; k and v stay whole
    assert spec.pieces(layout, layout.coords(1))[0] == (ShardPiece(0, 4, 12),)
    both = tuple(tuple(Factor("heads", f.size) if f.name == "kv" else f for f in block) for block in rows)
    spec = ShardSpec("qkv", (both, ((Factor("D", 3),),)), (("tensor", Shard("heads")),))
    assert spec.local_shape(layout) == (8, 3)
    assert spec.pieces(layout, layout.coords(1))[0] == (
        ShardPiece(0, 4, 4),
        ShardPiece(4, 10, 2),
        ShardPiece(6, 14, 2),
    )


def test_padding_is_in_no_piece() -> None:
    layout = MeshLayout.build(tensor=4)
    spec = ShardSpec(
        "embedding", (((Factor("V", 10, 12),),), ((Factor("D", 2),),)), (("tensor", Shard("V")),)
    )
    lengths = [sum(p.length for p in spec.pieces(layout, layout.coords(r))[0]) for r in range(4)]
    assert spec.local_shape(layout) == (3, 2) and lengths == [3, 3, 3, 1]


def test_gradient_placement_alone_decides_the_sync_axes() -> None:
    spec = ShardSpec(
        "norm", dims_of((8,)), gradient=(("data", Partial), ("tensor.row", Partial), ("sequence", Partial))
    )
    assert spec.sync_axes(LAYOUT) == ("data", "tensor.row")
    owners = [r for r in range(LAYOUT.world_size) if is_owner(spec, LAYOUT.coords(r))]
    assert owners == [0]
