"""Maps ranks of the world to coordinates on named axes, and axes to groups.

Note: the mesh.
The world is a row-major grid over `pipeline, data, sequence, tensor`, slowest to fastest in rank order.  So
neighbouring ranks share the axis that moves most bytes per second.  An axis may be cut into sub-axes, again slowest to
fastest.  A sub-axis is named after its parent (`tensor.row`, `sequence.ulysses`).  A set of axes spans one group per
choice of the remaining coordinates, and those groups partition the world.  No other code computes with rank numbers: it
asks a layout for coordinates and groups.  All values are integers, and no message is sent.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations

AXES = ("pipeline", "data", "sequence", "tensor")
# Groups besides the axes themselves that a step reduces over (parallel.md 5.5): gradients of replicated parameters, the
# norm over all owned pieces, and totals that all ranks of one model replica need.
DERIVED_GROUPS = (
    ("data", "sequence"),
    ("data", "sequence", "tensor"),
    ("pipeline", "tensor"),
    ("pipeline", "sequence", "tensor"),
    AXES,
)
# Sub-axes of the data axis, slowest first.  Hybrid sharding has copies of the model, and the ranks of one copy.  These
# may be groups of neighbours that keep the weights sharded between them from forward to backward.
REPLICATE, FAR, NEAR = "data.replicate", "data.far", "data.near"


@dataclass(frozen=True)
class Axis:
    """One named mesh axis of `size` coordinates. It may be a product of sub-axes (slowest first)."""

    name: str
    size: int
    parts: tuple[Axis, ...] = ()
    mode: str = ""
    """The tensor mode that defines the sub-axes; empty: the default."""

    def __post_init__(self) -> None:
        if self.size < 1:
            raise ValueError(f"axis {self.name}: size {self.size} must be at least 1")
        if self.parts and math.prod(part.size for part in self.parts) != self.size:
            factors = " x ".join(f"{part.name} {part.size}" for part in self.parts)
            raise ValueError(
                f"axis {self.name}: size {self.size} is not the product of its sub-axes {factors}"
            )

    @property
    def leaves(self) -> tuple[Axis, ...]:
        return tuple(leaf for part in self.parts for leaf in part.leaves) if self.parts else (self,)


def split_axis(name: str, **sizes: int) -> Axis:
    """An axis made of sub-axes `name.key`, slowest first: `split_axis("tensor", row=2, column=2)`."""
    parts = tuple(Axis(f"{name}.{key}", size) for key, size in sizes.items())
    return Axis(name, math.prod(sizes.values()), parts)


@dataclass(frozen=True)
class MeshLayout:
    """A frozen map between ranks and coordinates. Axes are given slowest to fastest.

    Methods take names of axes (`"tensor"`) or of sub-axes (`"tensor.row"`).  Several names mean the product of these
    axes, in the layout's own order, not that of the arguments.  An unknown name raises ValueError with the names that
    exist.
    """

    axes: tuple[Axis, ...]

    def __post_init__(self) -> None:
        names = [axis.name for axis in self.axes] + [
            leaf.name for leaf in self.leaves if leaf not in self.axes
        ]
        if len(set(names)) != len(names):
            raise ValueError(f"mesh axes must have different names, got {', '.join(names)}")

    @classmethod
    def build(
        cls,
        *,
        pipeline: int = 1,
        data: int = 1,
        sequence: int = 1,
        tensor: int | Axis = 1,
        ulysses: int | None = None,
        data_shard: int | None = None,
        data_near: int | None = None,
    ) -> MeshLayout:
        """The layout of a config: sizes of the four axes and their sub-axes.

        `tensor` is a size, or an axis with the sub-axes of a tensor mode (`TensorConfig.axis`).  `ulysses` is the inner
        part of a `usp` sequence axis.  `data_shard`: the ranks that shard one copy in hybrid sharding.  `data_near`:
        those of them that keep weights sharded between them.  Raises ValueError where a size has no such cut.
        """
        return cls(
            (
                Axis("pipeline", pipeline),
                _data_axis(data, data_shard, data_near),
                _cut("sequence", sequence, "ring", "ulysses", ulysses),
                tensor if isinstance(tensor, Axis) else Axis("tensor", tensor),
            )
        )

    @cached_property
    def leaves(self) -> tuple[Axis, ...]:
        return tuple(leaf for axis in self.axes for leaf in axis.leaves)

    @cached_property
    def _spanned(self) -> dict[str, frozenset[str]]:
        """The leaf axes of each axis and of each leaf, by name."""
        legal = {axis.name: axis.leaves for axis in self.axes} | {leaf.name: (leaf,) for leaf in self.leaves}
        return {name: frozenset(leaf.name for leaf in leaves) for name, leaves in legal.items()}

    @cached_property
    def world_size(self) -> int:
        return math.prod(axis.size for axis in self.axes)

    def leaf_names(self, *names: str) -> tuple[str, ...]:
        """The leaf axes that the named axes span, in layout order."""
        legal = self._spanned
        for name in names:
            if name not in legal:
                raise ValueError(f"axis {name!r} is not in this mesh; it has {', '.join(legal)}")
        wanted = frozenset[str]().union(*(legal[name] for name in names))
        return tuple(leaf.name for leaf in self.leaves if leaf.name in wanted)

    def size(self, *names: str) -> int:
        wanted = self.leaf_names(*names)
        return math.prod(leaf.size for leaf in self.leaves if leaf.name in wanted)

    def coords(self, rank: int) -> dict[str, int]:
        """Coordinates of a rank on every leaf axis."""
        if not 0 <= rank < self.world_size:
            raise ValueError(f"rank {rank} is outside a world of {self.world_size}")
        coords: dict[str, int] = {}
        for leaf in reversed(self.leaves):
            rank, coords[leaf.name] = divmod(rank, leaf.size)
        return {leaf.name: coords[leaf.name] for leaf in self.leaves}

    def rank(self, coords: Mapping[str, int]) -> int:
        """The rank at these coordinates, one for each leaf axis. Inverse of `coords`."""
        rank = 0
        for leaf in self.leaves:
            assert 0 <= coords[leaf.name] < leaf.size, f"{leaf.name} has no coordinate {coords[leaf.name]}"
            rank = rank * leaf.size + coords[leaf.name]
        return rank

    def coord(self, rank: int, *names: str) -> int:
        """Position of a rank on the product of the named axes: its index in `group(rank, *names)`."""
        coords, wanted, position = self.coords(rank), self.leaf_names(*names), 0
        for leaf in self.leaves:
            if leaf.name in wanted:
                position = position * leaf.size + coords[leaf.name]
        return position

    def group(self, rank: int, *names: str) -> tuple[int, ...]:
        """The ranks that differ from `rank` on the named axes only, in the order of their coordinate there."""
        wanted = self.leaf_names(*names)
        coords = self.coords(rank)
        first = self.rank({name: 0 if name in wanted else coord for name, coord in coords.items()})
        return tuple(first + step for step in self._steps(wanted))

    def groups(self, *names: str) -> tuple[tuple[int, ...], ...]:
        """All groups along the named axes, by their lowest rank: a partition of the world."""
        wanted = self.leaf_names(*names)
        others = tuple(leaf.name for leaf in self.leaves if leaf.name not in wanted)
        steps = self._steps(wanted)
        return tuple(tuple(first + step for step in steps) for first in self._steps(others))

    def _steps(self, names: Collection[str]) -> tuple[int, ...]:
        """Rank offsets of all coordinates on these leaf axes, in their order, from the first coordinate."""
        steps: tuple[int, ...] = (0,)
        width = 1
        for leaf in reversed(self.leaves):
            if leaf.name in names:
                steps = tuple(outer * width + step for outer in range(leaf.size) for step in steps)
            width *= leaf.size
        return steps

    def communicating_groups(self) -> tuple[tuple[str, ...], ...]:
        """The leaf sets whose groups `launch` creates: each axis, each sub-axis, each derived set, once each."""
        wanted: list[tuple[str, ...]] = [(axis.name,) for axis in (*self.axes, *self.leaves)]
        wanted += [tuple(n for n in names if n in {a.name for a in self.axes}) for names in DERIVED_GROUPS]
        tensor = next((axis.leaves for axis in self.axes if axis.name == "tensor"), ())
        if len(tensor) > 1:  # in 2D to 3D some sub-axes sum a gradient or shard a tensor
            subsets = [some for n in range(1, len(tensor) + 1) for some in combinations(tensor, n)]
            inner = [tuple(leaf.name for leaf in some) for some in subsets]
            wanted += [*inner, *(("data", "sequence", *names) for names in inner)]
        data = [leaf.name for axis in self.axes if axis.name == "data" and axis.parts for leaf in axis.leaves]
        summed = [names for names in wanted if "data" in names and "pipeline" not in names]
        for outer in ({REPLICATE}, {REPLICATE, FAR}):  # without them: a copy, and a group of neighbours
            cut = tuple(name for name in data if name not in outer)
            wanted += [(*cut, *(n for n in names if n != "data")) for names in summed if cut]
        sets = dict.fromkeys(self.spanning(*names) for names in wanted)
        return tuple(names for names in sets if names)

    def spanning(self, *names: str) -> tuple[str, ...]:
        """The named leaf axes that hold more than one rank. Sets with equal results have the same groups."""
        return tuple(name for name in self.leaf_names(*names) if self.size(name) > 1)

    def describe(self) -> str:
        """One line for people: `pipeline 2 x data 4 x sequence 1 x tensor 4 (row 2 x column 2)`."""

        def one(axis: Axis) -> str:
            inner = " x ".join(f"{part.name.rpartition('.')[2]} {part.size}" for part in axis.parts)
            return f"{axis.name} {axis.size}" + (f" ({inner})" if inner else "")

        return " x ".join(one(axis) for axis in self.axes)


def _cut(name: str, size: int, outer: str, inner: str, inner_size: int | None) -> Axis:
    if inner_size is None:
        return Axis(name, size)
    if inner_size < 1 or size % inner_size:
        divisors = ", ".join(str(d) for d in range(1, size + 1) if size % d == 0)
        raise ValueError(f"axis {name}: {inner}={inner_size} must divide the size {size}; legal: {divisors}")
    return split_axis(name, **{outer: size // inner_size, inner: inner_size})


def _data_axis(size: int, shard: int | None, near: int | None) -> Axis:
    axis = _cut("data", size, "replicate", "shard", shard)
    if near is None:
        return axis
    *outer, copy = axis.leaves
    inner = _cut("data", copy.size, "far", "near", near)
    return Axis("data", size, (*outer, *inner.parts))
