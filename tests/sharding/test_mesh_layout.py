"""A layout maps ranks to coordinates and back, and its groups partition the world."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from colossal_lite.config.parallel_schema import TensorConfig
from colossal_lite.sharding.mesh_layout import AXES, Axis, MeshLayout, split_axis


@st.composite
def layouts(draw: st.DrawFn) -> MeshLayout:
    mode, edge, depth = draw(st.sampled_from(["1d", "2d", "2.5d", "3d"])), draw(st.integers(1, 3)), 1
    if mode == "2.5d":
        depth = draw(st.integers(1, 2))
    tensor = {"1d": edge, "2d": edge**2, "2.5d": edge**2 * depth, "3d": edge**3}[mode]
    ulysses, shard, near = (draw(st.sampled_from([None, 1, 2])) for _ in range(3))
    return MeshLayout.build(
        pipeline=draw(st.integers(1, 3)),
        data=draw(st.integers(1, 3)) * (shard or 1) * (near or 1),
        sequence=draw(st.integers(1, 3)) * (ulysses or 1),
        tensor=TensorConfig(size=tensor, mode=mode, depth=depth).axis(),
        ulysses=ulysses,
        data_shard=shard and shard * (near or 1),
        data_near=near,
    )


@given(layouts())
def test_coordinates_invert_ranks_and_the_fastest_axis_is_the_last(layout: MeshLayout) -> None:
    for rank in range(layout.world_size):
        assert layout.rank(layout.coords(rank)) == rank
    if layout.world_size > 1:
        fastest = [leaf.name for leaf in layout.leaves if leaf.size > 1][-1]
        assert layout.coords(1)[fastest] == 1 and sum(layout.coords(1).values()) == 1


@given(layouts(), st.sets(st.sampled_from(AXES), min_size=1))
def test_groups_partition_the_world_and_coordinates_index_them(layout: MeshLayout, names: set[str]) -> None:
    groups = layout.groups(*names)
    assert sorted(r for group in groups for r in group) == list(range(layout.world_size))
    assert {len(group) for group in groups} == {layout.size(*names)}
    for group in groups:
        for position, rank in enumerate(group):
            assert layout.group(rank, *names) == group
            assert layout.coord(rank, *names) == position


@given(layouts())
def test_each_communicating_set_is_made_once_and_never_of_single_ranks(layout: MeshLayout) -> None:
    sets = layout.communicating_groups()
    assert len({layout.groups(*names) for names in sets}) == len(sets)
    assert all(layout.size(*names) > 1 for names in sets)
    for axis in (*layout.axes, *layout.leaves):
        if axis.size > 1:
            assert layout.spanning(axis.name) in sets
    leaves = {leaf.name for leaf in layout.leaves}
    for inner in (
        {"data.shard"},
        {"data.far", "data.near"},
        {"data.near"},
    ):  # what is sharded, and what is kept
        for rest in ((), ("tensor",)) if inner <= leaves else ():
            names = layout.spanning(*inner, "sequence", *rest)
            assert names in sets or not names


def test_rank_order_puts_tensor_fastest_and_pipeline_slowest() -> None:
    layout = MeshLayout.build(pipeline=2, data=2, tensor=2)
    assert layout.group(0, "tensor") == (0, 1)
    assert layout.group(0, "data") == (0, 2)
    assert layout.group(0, "pipeline") == (0, 4)
    assert layout.group(5, "pipeline", "tensor") == (0, 1, 4, 5)
    assert layout.describe() == "pipeline 2 x data 2 x sequence 1 x tensor 2"


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (dict(sequence=4, ulysses=3), "legal: 1, 2, 4"),
        (dict(data=6, data_shard=4), "legal: 1, 2, 3, 6"),
        (dict(data=0), "at least 1"),
    ],
)
def test_impossible_sizes_are_refused_with_what_is_legal(arguments: dict, word: str) -> None:
    with pytest.raises(ValueError, match=word.replace("*", r"\*")):
        MeshLayout.build(**arguments)


def test_unknown_axis_names_the_axes_that_exist() -> None:
    with pytest.raises(ValueError, match="tensor.row"):
        MeshLayout.build(tensor=TensorConfig(size=4, mode="2d").axis()).size("rows")
    with pytest.raises(ValueError, match="different names"):
        MeshLayout((Axis("data", 2), Axis("data", 2)))
    assert math.prod(leaf.size for leaf in split_axis("tensor", row=2, column=3).leaves) == 6
