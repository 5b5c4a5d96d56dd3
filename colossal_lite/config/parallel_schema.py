"""Part of what was parallel.roles."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from colossal_lite.config.schema import Count, Section, UnusedSetting


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


class TensorConfig(Section):
    """Tensor parallelism. A bare int stands for `dict(size=int)`."""

    size: Count = 1
    """Ranks over which each layer is cut."""
    mode: Literal["1d", "2d", "2.5d", "3d"] = "1d"
    """1d (1909.08053); 2d: size = q*q (2104.05343); 2.5d: q*q*depth (2105.14500); 3d: l*l*l (2105.14450)."""
    sequence_parallel: bool = True
    """1d: norms, dropout and residuals are cut along the sequence (2205.05198)."""
    regather_inputs: bool = True
    """with sequence_parallel: inputs of cut linears are gathered again in backward; False keeps them whole instead."""
    depth: Count = 1
    """2.5d: layers of q*q ranks that share the batch."""

    @property
    def edge(self) -> int:
        """Ranks along one side of the tensor mesh: into so many parts the heads are cut."""
        if self.mode == "3d":
            return round(math.cbrt(self.size))
        return self.size if self.mode == "1d" else math.isqrt(self.size // self.sheets)

    @property
    def sheets(self) -> int:
        """Sheets of q*q ranks: `depth` in 2.5d, else one."""
        return self.depth if self.mode == "2.5d" else 1

    def size_of(self, edge: int) -> int:
        """The size of a tensor mesh with sides of `edge` ranks."""
        return self.sheets * math.prod([edge] * {"1d": 1, "3d": 3}.get(self.mode, 2))

    def fits(self, size: int) -> bool:
        """Whether `size` ranks can be cut as the mode needs; one rank can in every mode."""
        return size == 1 or size == self.size_of(self.model_copy(update={"size": size}).edge)

    def unused_settings(self) -> Iterable[UnusedSetting]:
        if self.size == 1:
            for name in ("mode", "sequence_parallel", "regather_inputs", "depth"):
                yield UnusedSetting(name, "tensor.size is 1")
            return
        if self.mode != "2.5d":
            yield UnusedSetting("depth", f"only mode='2.5d' has a depth, and mode is {self.mode!r}")
        if self.mode != "1d":
            yield UnusedSetting("sequence_parallel", f"mode={self.mode!r} cuts activations in any case")
            yield UnusedSetting(
                "regather_inputs", f"only mode='1d' gathers whole inputs, and mode is {self.mode!r}"
            )
        elif not self.sequence_parallel:
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
        """What a sequence length must be a multiple of: zigzag gives every rank an early and a late piece."""
        zigzag = self.size > 1 and self.mode in ("ring", "usp", "allgather_kv")
        return 2 * self.size if zigzag else self.size

    def unused_settings(self) -> Iterable[UnusedSetting]:
        if self.size == 1:
            yield UnusedSetting("mode", "sequence.size is 1")
            yield UnusedSetting("ulysses", "sequence.size is 1")
        elif self.mode != "usp":
            yield UnusedSetting("ulysses", f"only mode='usp' has an inner axis, and mode is {self.mode!r}")
