"""Describes the tensors and facts that a save takes and a load fills, and the result of a load."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from colossal_lite.checkpoint.files import NAMES
from colossal_lite.checkpoint.manifest import MOST_DIMS, Change, Manifest, TensorSlice
from colossal_lite.sharding.boxes import Fragment, extent, strides_of
from colossal_lite.sharding.mesh_layout import MeshLayout
from colossal_lite.sharding.shard_spec import ShardSpec


@dataclass(frozen=True)
class HeldTensor:
    """A tensor of this rank to save or to fill: elements [start, start + numel) of the flattened local tensor of
    `spec`, contiguous. `flat_axes`: leaf axes whose ranks hold other intervals (ZeRO). `is_copy`: a rank of another
    pipeline stage saves it. `fetch` lends the elements where `tensor` is on the meta device, or is not to be written
    in place. Elements fetched with True may be changed."""

    name: str
    spec: ShardSpec
    tensor: Tensor
    start: int = 0
    flat_axes: tuple[str, ...] = ()
    is_copy: bool = False
    fetch: Callable[[bool], Tensor] | None = None

    def part(self) -> TensorSlice:
        """Its place in a checkpoint. Raises ValueError for a dtype that no checkpoint holds."""
        stop = self.start + self.tensor.numel()
        if (dtype := NAMES.get(self.tensor.dtype)) is None:
            raise ValueError(
                f"checkpoint: {self.name} is {self.tensor.dtype}, which no checkpoint holds. Legal: another dtype, or "
                f"register_buffer(..., persistent=False)"
            )
        if len(self.spec.shape) > MOST_DIMS:
            raise ValueError(
                f"checkpoint: {self.name} has {len(self.spec.shape)} dimensions, and a checkpoint holds at most "
                f"{MOST_DIMS}. Legal: fewer, and x.view(...) in forward, or register_buffer(..., persistent=False)"
            )
        return TensorSlice(self.name, dtype, self.spec, self.start, stop, self.flat_axes, self.is_copy)

    def elements(self, *, write: bool = False) -> Tensor:
        """The tensor in memory, to be changed if `write`."""
        return self.tensor if self.fetch is None else self.fetch(write)

    def view(self, fragment: Fragment, layout: MeshLayout, *, write: bool = False) -> Tensor:
        """The elements of a fragment, in its shape, sharing memory; to be changed if `write`."""
        tensor = self.elements(write=write)
        assert tensor.is_contiguous(), f"{self.name}: only a contiguous tensor can be sliced flat"
        offset = tensor.storage_offset() + fragment.offset - self.start
        return tensor.as_strided(extent(fragment.box), strides_of(self.spec.local_shape(layout)), offset)


@dataclass(frozen=True)
class RunFacts:
    """Facts that a save records beside its tensors; see `Manifest`. `updates` are this rank's own."""

    step: int
    samples: int
    seed: int
    config: Mapping[str, Any]
    model: Mapping[str, Any] | None
    updates: Mapping[str, int]
    extra: Mapping[str, Any]
    loss_scale: tuple[float, int] | None = None
    unit_seconds: tuple[tuple[float, float, float], ...] | None = None
    most_samples: int = 0
    loaded: int = 0
    """The mark of a state that this rank has loaded by hand. Nothing is written if ranks have other ones."""


@dataclass(frozen=True)
class Loaded:
    """The result of a load: path, manifest, differences from the run, and skipped checkpoints with reasons."""

    path: Path
    manifest: Manifest
    changes: tuple[Change, ...]
    skipped: tuple[str, ...]

    @property
    def step(self) -> int:
        return self.manifest.step

    @property
    def samples(self) -> int:
        return self.manifest.samples

    def __str__(self) -> str:
        lines = [f"resumed from {self.path}: step {self.step}, {self.samples} samples"]
        return "\n".join(
            [*lines, *(f"  passed over {text}" for text in self.skipped), *map("  {}".format, self.changes)]
        )
