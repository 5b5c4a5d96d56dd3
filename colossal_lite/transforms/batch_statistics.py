"""Modules whose forward is a function of the whole batch, or that count batches: what is cut into parts they get wrong.

Note: what is refused.
The mean of a batch is not the mean of a part of it, so batch norm gives other numbers on each data rank, under
accumulation and in each micro-batch of a pipeline, and so do running statistics of any norm, which besides are moved
once for each part, and twice where a block is run again in backward.  Nothing here makes that exact (a sum over ranks
within the forward would, at two collectives a layer, but not over micro-batches that run one after the other), so that
such a module is refused, by name, with whatever cuts the batch.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm


def is_over_the_batch(module: nn.Module) -> bool:
    """Whether it normalises over a batch, or keeps running statistics of batches."""
    return isinstance(module, _BatchNorm) or (
        isinstance(module, _InstanceNorm) and bool(module.track_running_stats)
    )


def check_batchwide(module: nn.Module, cuts: Sequence[str]) -> None:
    """Raises ValueError for a module over the batch where settings `cuts` (as a user writes them) cut the batch."""
    found = [(name, each) for name, each in module.named_modules() if is_over_the_batch(each)]
    if found and cuts:
        name, each = found[0]
        raise ValueError(
            f"model: {name} is a {type(each).__name__}, whose numbers are those of the whole batch, and "
            f"{' and '.join(cuts)} would run it on parts of one, or twice; legal: a norm of each sample alone "
            f"(LayerNorm, GroupNorm, RMSNorm), or the whole batch at once (data=1, gradient_accumulation=1, a pipeline "
            f"with micro_batches=1, activation_checkpoint='none')"
        )
