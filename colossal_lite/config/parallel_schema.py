"""Describes tensor and sequence parallelism: the table of tensor modes, their schemas, and the sizes of a model.

Note: `TENSOR_MODES` drives the schema, its checks, the mesh and the swap of layers.  No other file branches on the
name of a tensor mode.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from colossal_lite.config.schema import Count, Section, UnusedSetting
from colossal_lite.sharding.mesh_layout import Axis, split_axis


@dataclass(frozen=True)
class ModelFacts:
    """Sizes of a transformer, the same on every rank; known before anything is allocated."""

    layers: int
    heads: int
    kv_heads: int
    width: int
    ffn: int
    vocabulary: int
    sequence: int
    tied: bool
    causal: bool = True
    """Whether a token sees only those before it."""


@dataclass(frozen=True)
class TensorMode:
    """One way to shard layers over the tensor axis: size rule, sub-axes, the settings it reads, its file."""

    summary: str
    """One line for people, with its source."""
    file: str
    """Module in `colossal_lite.layers` with the functions of `layers.tensor_modes.ModeFile`."""
    sub_axes: tuple[str, ...] = ()
    """Sub-axes of the tensor axis, slowest first: "depth" has `depth` ranks, each other `edge`. Empty: none."""
    shape: str = "any size"
    """Legal sizes, in words."""
    reads: frozenset[str] = frozenset()
    """Settings of `TensorConfig` that this mode reads, besides mode and size."""
    cuts_features: bool = True
    """Whether the residual stream is cut along its features."""
    hidden_cuts: int = 1
    """How many times `edge` divides the hidden sizes of a weight."""

    @property
    def sides(self) -> int:
        """Sub-axes of `edge` ranks; without sub-axes the tensor axis is one."""
        return len([name for name in self.sub_axes if name != "depth"]) or 1


TENSOR_MODES: dict[str, TensorMode] = {
    "1d": TensorMode(
        "1d (1909.08053)", "tensor_1d",
        reads=frozenset({"sequence_parallel", "regather_inputs"}), cuts_features=False,
    ),
    "2d": TensorMode("2d: size = q*q (2104.05343)", "tensor_2d", ("row", "column"), "a square, q*q"),
    "2.5d": TensorMode(
        "2.5d: q*q*depth (2105.14500)", "tensor_2d", ("depth", "row", "column"), "q*q*depth with depth={depth}",
        reads=frozenset({"depth"}),
    ),
    "3d": TensorMode("3d: l*l*l (2105.14450)", "tensor_3d", ("i", "j", "k"), "a cube, l*l*l", hidden_cuts=2),
}  # fmt: skip
"""Every tensor mode by name, the default first. A new mode is a line here and a file in `layers`."""
FLAT = next(iter(TENSOR_MODES))
"""The default mode, which moves no weights; other modes are compared with it."""

if TYPE_CHECKING:
    ModeName = str
else:
    ModeName = Literal[tuple(TENSOR_MODES)]

# Setting -> why it has no effect. `{readers}`: the modes that read it; `{mode}`: the mode that ignores it.
_NOT_READ = {
    "depth": "only {readers} has a depth, and mode is {mode!r}",
    "sequence_parallel": "mode={mode!r} cuts activations in any case",
    "regather_inputs": "only {readers} gathers whole inputs, and mode is {mode!r}",
}


class TensorConfig(Section):
    """Tensor parallelism. A bare int stands for `dict(size=int)`."""

    size: Count = 1
    """Ranks over which each layer is cut."""
    mode: Annotated[
        ModeName, Field(description="; ".join(mode.summary for mode in TENSOR_MODES.values()) + ".")
    ] = FLAT
    sequence_parallel: bool | Literal["auto"] = "auto"
    """1d: norms, dropout and residuals are sharded along the sequence (2205.05198); auto: if the model is proven so."""
    regather_inputs: bool = True
    """with sequence_parallel: backward gathers the inputs of sharded linears again; False keeps them whole instead."""
    depth: Count = 1
    """2.5d: layers of q*q ranks that share the batch."""

    @property
    def rule(self) -> TensorMode:
        """The row of `TENSOR_MODES`."""
        return TENSOR_MODES[self.mode]

    @property
    def edge(self) -> int:
        """Ranks along one side of the tensor mesh: the heads are cut into that many parts."""
        return int(round((self.size // self.sheets) ** (1 / self.rule.sides)))

    @property
    def sheets(self) -> int:
        """Grids of ranks that share the batch: `depth` where the mode reads it, else one."""
        return self.depth if "depth" in self.rule.reads else 1

    def size_of(self, edge: int) -> int:
        """The size of a tensor mesh with sides of `edge` ranks."""
        return self.sheets * int(edge**self.rule.sides)

    def fits(self, size: int) -> bool:
        """Whether `size` ranks can be cut as the mode needs; one rank can in every mode."""
        return size == 1 or size == self.size_of(self.model_copy(update={"size": size}).edge)

    @property
    def shape_rule(self) -> str:
        """The mode's rule for the size, in words."""
        return f"mode={self.mode!r} needs {self.rule.shape.format(depth=self.depth)}"

    def axis(self) -> Axis:
        """The tensor axis of a mesh, with the sub-axes of the mode. Raises ValueError for a size that does not fit."""
        if not self.fits(self.size):
            raise ValueError(f"axis tensor: {self.shape_rule}, got size {self.size}")
        if self.size == 1 or self.mode == FLAT:
            return Axis("tensor", self.size)
        sizes = {name: self.sheets if name == "depth" else self.edge for name in self.rule.sub_axes}
        return Axis("tensor", self.size, split_axis("tensor", **sizes).parts, self.mode)

    @property
    def sample_parts(self) -> int:
        """Equal parts that a micro-batch is cut into over the tensor axis."""
        return self.sheets * self.edge ** (self.rule.sides - 1) if self.cuts_features else 1

    @property
    def cuts_features(self) -> bool:
        """Whether a rank holds a part of the features of the residual stream."""
        return self.size > 1 and self.rule.cuts_features

    @property
    def cuts_sequence(self) -> bool:
        """Whether a rank holds a part of the tokens between the layers."""
        return self.size > 1 and bool(self.sequence_parallel) and "sequence_parallel" in self.rule.reads

    def unused_settings(self) -> Iterable[UnusedSetting]:
        if self.size == 1:
            for name in ("mode", "sequence_parallel", "regather_inputs", "depth"):
                yield UnusedSetting(name, "tensor.size is 1")
            return
        for name, why in _NOT_READ.items():
            if name not in self.rule.reads:
                readers = " or ".join(f"mode={m!r}" for m, rule in TENSOR_MODES.items() if name in rule.reads)
                yield UnusedSetting(name, why.format(readers=readers, mode=self.mode))
        if "regather_inputs" in self.rule.reads and not self.sequence_parallel:
            yield UnusedSetting("regather_inputs", "without sequence_parallel inputs are whole already")


class SequenceConfig(Section):
    """Sequence (context) parallelism. A bare int stands for `dict(size=int)`."""

    size: Count = 1
    """Ranks over which each sequence is cut."""
    mode: Literal["ring", "ulysses", "usp", "allgather_kv", "ring_full"] = "ring"
    """ring (2310.01889, zigzag); ulysses (2309.14509); usp: both (2405.07719); allgather_kv: keys and values
    gathered at once; ring_full: ring self-attention (2105.13120)."""
    ulysses: Count = 1
    """usp: size of the inner, Ulysses axis; it divides `size`."""

    def fits(self, size: int) -> bool:
        """Whether `size` ranks can be cut as the mode needs."""
        return size == 1 or self.mode != "usp" or size % self.ulysses == 0

    @property
    def head_parts(self) -> int:
        """Parts that the heads are cut into inside attention."""
        return {"ulysses": self.size, "usp": self.ulysses}.get(self.mode, 1) if self.size > 1 else 1

    @property
    def multiple(self) -> int:
        """Pieces of a sequence: zigzag gives every rank an early and a late one."""
        zigzag = self.size > 1 and self.mode in ("ring", "usp", "allgather_kv")
        return 2 * self.size if zigzag else self.size

    def unused_settings(self) -> Iterable[UnusedSetting]:
        if self.size == 1:
            yield UnusedSetting("mode", "sequence.size is 1")
            yield UnusedSetting("ulysses", "sequence.size is 1")
        elif self.mode != "usp":
            yield UnusedSetting("ulysses", f"only mode='usp' has an inner axis, and mode is {self.mode!r}")


def token_parts(tensor: TensorConfig, sequence: SequenceConfig) -> int:
    """The divisor of a sequence's length when ranks shard it; other lengths are padded (parallel/padding.py)."""
    return math.lcm(sequence.multiple, sequence.size * (tensor.size if tensor.cuts_sequence else 1))
