"""Computes the loss of one micro-batch: the sum over its tokens, and their count.

Note: backward starts from the sum, not the mean (engine.py).  The built-in cross-entropy reads logits as they are, cut
over the vocabulary or not.  A user's own criterion gets full logits, and is weighted by its count.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from colossal_lite.data.batch import Batch
from colossal_lite.kernels import Ops
from colossal_lite.parallel.model_loss import ModelLoss as ModelLoss
from colossal_lite.parallel.tensor_modes import TensorStrategy

Criterion = Callable[[Tensor, Tensor], Any]
LAST_ONLY = (
    "model: logits {shape} of one position for labels {labels}: the model gives those of the last position only, as it "
    "was called without labels; legal: cl.initialize(..., criterion='model'), which hands them to it and trains on the "
    "loss that it gives; or a forward that gives the logits of all positions"
)


class _Parallelized(Protocol):
    """What a loss asks of `parallelize.Parallelized`."""

    @property
    def strategy(self) -> TensorStrategy: ...

    @property
    def ops(self) -> Ops: ...


def logits_of(outputs: Any) -> Tensor:
    """Of what a model gives: a tensor, a tuple that begins with one, or an object that has them by name."""
    outputs = getattr(outputs, "logits", outputs)
    logits: Tensor = outputs[0] if isinstance(outputs, tuple) else outputs
    return logits


@dataclass
class Loss:
    """`criterion`: None for cross-entropy; a ModelLoss for the model's own loss."""

    parallelized: _Parallelized
    criterion: Criterion | ModelLoss | None

    def asked(self, batch: Batch) -> Batch:
        """What the model is called with, to give a loss if it is asked for its own."""
        return self.criterion.asked(batch) if isinstance(self.criterion, ModelLoss) else batch

    def refuse_calls(self, tensor: int) -> None:
        """Raises ValueError where `engine(x)` would gather logits that the model's own code has whole."""
        if isinstance(self.criterion, ModelLoss) and tensor > 1:
            raise ValueError(
                f"engine(x) with criterion='model' and parallel.tensor={tensor}; legal: train_step and eval_step"
            )

    def of(self, outputs: Any, part: Batch) -> tuple[Tensor, Tensor | int | float]:
        """(sum, count) of this rank's part of a micro-batch, of which the last stage gives these outputs. Raises
        ValueError for a criterion that returns neither that nor a mean, and for logits of one position."""
        labels = part.labels
        if isinstance(self.criterion, ModelLoss):
            return self.criterion.of(outputs, labels)
        strategy, logits = self.parallelized.strategy, logits_of(outputs)
        if logits.dim() == 3 and labels.dim() == 2 and logits.shape[1] == 1 < labels.shape[1]:
            raise ValueError(LAST_ONLY.format(shape=tuple(logits.shape), labels=tuple(labels.shape)))
        if self.criterion is None:
            return strategy.cross_entropy(self.parallelized.ops, logits, part.labels)
        logits, labels = part.without_padding(logits), part.without_padding(part.labels)
        valid = int((labels != -100).sum())
        if valid == 0:
            return logits.sum() * 0.0, 0
        result = self.criterion(strategy.whole_vocabulary(logits), labels)
        if isinstance(result, tuple) and len(result) == 2:
            return result
        if isinstance(result, Tensor) and result.dim() == 0:
            return result.to(torch.promote_types(result.dtype, torch.float32)) * valid, valid
        raise ValueError(
            f"criterion returned {type(result).__name__}; legal: a tuple (sum, count), or a 0-d tensor that is a mean"
        )


def refuse_means(outputs: Any, model: str) -> None:
    """Raises ValueError for outputs of a `model` that carry a loss of their own to which parts of a batch do not add
    up."""
    if getattr(outputs, "aux_loss", None) is not None:
        raise ValueError(
            f"model: the outputs of {model} carry an aux_loss, a mean to which the parts of a "
            f"batch do not add up; legal: a model that gives none (output_router_logits=False), and emits its own "
            f"by colossal_lite.AuxiliaryLoss"
        )
