"""Finds modules such as BatchNorm, or tables with max_norm, that change when a batch is split. They are rejected.

Note: what is rejected.
The mean of a batch is not the mean of its parts.  So batch norm differs on each data rank, under accumulation, and in
each micro-batch of a pipeline.  Running statistics of any norm differ too: they are updated once for each part, and
twice where a block runs again in backward.  A sum over ranks within the forward would cost two collectives a layer, and
would not cover micro-batches that run one after the other.  So such a module is rejected, by name, with the setting
that splits the batch.  A table with `max_norm` writes to its rows in forward: on each rank to those of its own words.
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


def check_max_norm(module: nn.Module, settings: Sequence[str]) -> None:
    """Raises ValueError for a table with max_norm where `settings` keep other copies of its rows than forward writes
    to."""
    found = [
        (name, each)
        for name, each in module.named_modules()
        if isinstance(each, nn.Embedding | nn.EmbeddingBag) and each.max_norm is not None
    ]
    if found and settings:
        name, each = found[0]
        raise ValueError(
            f"model: {name} is a {type(each).__name__} with max_norm={each.max_norm:g}: its forward shortens rows of "
            f"the words that a rank sees, and not where {' and '.join(settings)} keeps them too; legal: max_norm=None, "
            f"or one rank of data and of sequence, weights without masters, all on the device"
        )
