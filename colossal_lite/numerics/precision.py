"""Chooses the dtypes of weights, masters, gradients and states, and scales the loss of fp16 runs.

Note: the loss scale.
fp16 gradients end at 6e-8 below and 65504 above, so backward starts from a seed above 1.  A plain loop seeds the *mean*
loss of its N tokens with S = 2^16.  Then the largest gradient of a logit is S / N, and all later ones are in fp16's
range.  We seed the *sum*.  A part of T label positions has the seed S over the power of two at or above T.  If S is a
power of two, so is the seed, and dividing by it is exact.  The division happens where a gradient leaves fp16: in the
pass that adds it to the chunk's float32 buffer.  So parts and ranks may have different seeds.  Only that addition uses
the scale: sums, norms, clipping and `full_gradients` see true gradients.  An overflow makes an infinity or NaN in some
chunk of some rank.  So the all-reduced sum of squares is not finite.  Then every rank skips the update and halves the
scale.  After 2,000 consecutive finite steps the scale is doubled.  T is the size of the labels, ignored ones included.
It is known without a wait for the device.  It is the same on all ranks of one data coordinate, whichever stage or
tensor shard they hold.

Note: gradients of two bytes.
Backward of a bf16 model gives bf16 gradients, so a bf16 buffer holds one micro-batch of one rank exactly.  A run on one
rank has the bits of float32 buffers.  The sum over ranks is sent in bf16 and rounded to bf16.  Where this package adds,
it adds in float32 in rank order and rounds once.  These are ranks of one host, reduce-scatters elsewhere, and all sums
with `ordered`. In other `fast` sums the backend rounds.  Over the copies of hybrid sharding the sum is rounded a second
time.  A sum of micro-batches would lose more with each of them, so it raises.  Norm, clipping and update are computed
in float32 from the buffer, and so are the full tensors of `full_gradients`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from colossal_lite.config.schema import PrecisionConfig

DTYPES = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Precision:
    """Dtypes of a run. `compute`: the weights that the model multiplies with. `master`: the weights that the optimizer
    updates, in two halves if `split` (kernels/split.py). `gradient`: the buffer that sums micro-batches and ranks."""

    compute: torch.dtype
    master: torch.dtype
    gradient: torch.dtype
    split: bool = False

    @classmethod
    def of(cls, config: PrecisionConfig) -> Precision:
        """The dtypes of a config. Gradients are summed in float32 or better, unless the config names their dtype."""
        split = config.master_dtype == "split"
        master = torch.float32 if split else DTYPES[config.master_dtype]
        gradient = wide_as(master) if config.gradient == "auto" else DTYPES[config.gradient]
        return cls(DTYPES[config.dtype], master, gradient, split)

    @property
    def master_copy_bits(self) -> int:
        """Bits for each parameter of master weights beside the model's weights."""
        if self.split:
            return 17
        return 8 * self.master.itemsize if self.master != self.compute else 0


def wide_as(master: torch.dtype) -> torch.dtype:
    """The dtype of updates and states for such masters: float32 or better."""
    return torch.promote_types(master, torch.float32)


@dataclass(frozen=True)
class ChunkTypes:
    """Dtypes of a chunk: weights between steps (`storage`), in a gather (`wire`) and in the model (`compute`); sums of
    gradients; masters, in two halves if `split`.

    `storage` and `wire` None: as `compute`.  `scale_block`: elements of the wire that share one float32 scale; 0: none.
    All code that allocates, gathers or counts weights reads these, and `WeightChunk._gather` does all gathers.  Another
    wire (int8 in blocks, arXiv 2306.10209 section 3) needs a conversion there and a receive buffer.  None is built:
    raises ValueError for weights stored or sent in another dtype than `compute`."""

    compute: torch.dtype
    master: torch.dtype
    gradient: torch.dtype
    split: bool = False
    storage: torch.dtype | None = None
    wire: torch.dtype | None = None
    scale_block: int = 0

    def __post_init__(self) -> None:
        for name, dtype in (("storage", self.storage), ("wire", self.wire)):
            if dtype not in (None, self.compute):
                raise ValueError(
                    f"chunk: {name}={dtype} is not built; legal: {self.compute}, the dtype of compute"
                )
        if self.scale_block:
            raise ValueError(
                f"chunk: scale_block={self.scale_block} is not built; legal: 0, a wire without scales"
            )

    @classmethod
    def of(cls, precision: Precision) -> ChunkTypes:
        return cls(precision.compute, precision.master, precision.gradient, precision.split)

    @property
    def state(self) -> torch.dtype:
        """The dtype of optimizer states, and of the optimizer's arithmetic."""
        return wide_as(self.master)

    def resting_bytes(self, numel: int) -> int:
        """Bytes of so many weights between steps."""
        return numel * (self.storage or self.compute).itemsize

    def wire_bytes(self, numel: int) -> int:
        """Bytes of so many weights in a gather, with their scales."""
        scales = -(-numel // self.scale_block) if self.scale_block else 0
        return numel * (self.wire or self.compute).itemsize + 4 * scales


GROWTH_STEPS = 2000
FIRST_SCALE, LEAST_SCALE, LARGEST_SCALE = 2.0**16, 1.0, 2.0**24


@dataclass(frozen=True)
class LossScale:
    """The seed of backward for a mean loss. `scale` is 1 for every dtype but fp16."""

    scale: float
    is_dynamic: bool
    finite_steps: int = 0

    @classmethod
    def of(cls, config: PrecisionConfig) -> LossScale:
        if config.dtype != "fp16":
            return cls(1.0, is_dynamic=False)
        if config.loss_scale == "dynamic":
            return cls(FIRST_SCALE, is_dynamic=True)
        return cls(float(config.loss_scale), is_dynamic=False)

    @property
    def fixed(self) -> float | None:
        """The scale, if no step changes it and it makes gradients larger."""
        return self.scale if not self.is_dynamic and self.scale > 1.0 else None

    def after(self, is_finite: bool) -> LossScale:
        """The scale of the next step."""
        if not self.is_dynamic:
            return self
        if not is_finite:
            return replace(self, scale=max(self.scale / 2.0, LEAST_SCALE), finite_steps=0)
        if self.finite_steps + 1 < GROWTH_STEPS:
            return replace(self, finite_steps=self.finite_steps + 1)
        return replace(self, scale=min(self.scale * 2.0, LARGEST_SCALE), finite_steps=0)

    @property
    def state(self) -> tuple[float, int] | None:
        """The state that a checkpoint stores; None if the scale is fixed."""
        return (self.scale, self.finite_steps) if self.is_dynamic else None

    def at(self, state: tuple[float, int] | None) -> LossScale:
        """This scale with the state of a checkpoint; a fixed one keeps the config's value."""
        if state is None or not self.is_dynamic:
            return self
        return replace(self, scale=state[0], finite_steps=state[1])

    def seed(self, positions: int) -> float:
        """The factor that starts backward of the sum of the losses at so many positions; 1 without a scale."""
        if self.scale == 1.0 and not self.is_dynamic:
            return 1.0
        return self.scale / float(1 << max(positions - 1, 0).bit_length())
