"""Keeps a full copy of the model on one rank: the layers of data parallelism, and the reference of all modes.

Note: the serial strategy.
Parameters are replicated.  Ranks that differ on `data` or `sequence` see different tokens, so every gradient is partial
there.  Nothing else is communicated.  Bytes per step: one all-reduce of the gradient buffers.
"""

from __future__ import annotations

from torch import Tensor, nn

from colossal_lite.data.batch import Batch
from colossal_lite.kernels import Ops
from colossal_lite.layers.layer_swap import TOKENS_CUT
from colossal_lite.layers.tensor_modes import ModeResult
from colossal_lite.sharding.shard_spec import ShardSpec, dims_of
from colossal_lite.transforms.auxiliary_loss import Share


class Serial:
    """Whole layers on every rank of the tensor axis, which has one."""

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


def serial(module: nn.Module) -> ModeResult:
    """A module as it is: values replicated, gradients partial over the axes that cut the batch and the sequence."""
    specs = {
        name: ShardSpec(name, dims_of(p.shape), gradient=TOKENS_CUT) for name, p in module.named_parameters()
    }
    return Serial(), specs, lambda name, rows: rows, lambda name: Share()


def tied_names(module: nn.Module) -> dict[str, str]:
    """First name -> itself, for each parameter that has several names."""
    seen: dict[int, str] = {}
    tied: dict[str, str] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        first = seen.setdefault(id(parameter), name)
        if first != name:
            tied[first] = first
    return tied
