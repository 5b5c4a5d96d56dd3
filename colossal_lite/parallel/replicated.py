"""Keeps a full copy of the model on one rank: the layers of data parallelism, and the reference of all modes.

Note: the serial strategy.
Parameters are replicated.  Ranks that differ on `data` or `sequence` see different tokens, so every gradient is partial
there.  Nothing else is communicated.  Bytes per step: one all-reduce of the gradient buffers.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from colossal_lite.data.batch import Batch
from colossal_lite.kernels import Ops
from colossal_lite.sharding.shard_spec import Partial, ShardSpec, dims_of


class Serial:
    """Whole layers on every rank of the tensor axis, which has one."""

    name = "serial"

    def spec(self, name: str, shape: Sequence[int], tie: str | None = None) -> ShardSpec:
        """Replicated value, gradient partial over the axes that cut the batch and the sequence."""
        cuts_tokens = tuple((axis, Partial) for axis in ("data", "sequence"))
        return ShardSpec(name, dims_of(shape), gradient=cuts_tokens, tie=tie)

    def cross_entropy(self, ops: Ops, logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Sum of the token losses and number of labels that are not -100. logits [B, T, V], labels [B, T]."""
        total, count = ops.cross_entropy(logits, labels)
        return total, count

    owns_loss = True
    cut_behind = (0, 1)

    def local_part(self, batch: Batch) -> Batch:
        return batch

    def whole_vocabulary(self, logits: Tensor) -> Tensor:
        return logits

    def whole_batch(self, logits: Tensor) -> Tensor:
        return logits
