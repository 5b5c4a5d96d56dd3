"""Computes the loss of one micro-batch: the sum over its tokens, and their count.

Note: backward starts from the sum, not the mean (engine.py).  The built-in cross-entropy reads logits as they are, cut
over the vocabulary or not.  A user's own criterion gets full logits, and is weighted by its count.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from colossal_lite.data.batch import Batch
from colossal_lite.data.batch_checks import LossOf, valid_labels
from colossal_lite.layers.tensor_modes import TensorStrategy
from colossal_lite.parallel.fused_head import UnmadeLogits
from colossal_lite.parallel.model_loss import ModelLoss as ModelLoss
from colossal_lite.parallel.own_criterion import Criterion as Criterion
from colossal_lite.parallel.own_criterion import OwnCriterion as OwnCriterion

NO_NAMES: Mapping[int, str] = {}
LAST_ONLY = (
    "model: logits {shape} of one position for labels {labels}: the model gives those of the last position only, as it "
    "was called without labels. Legal: cl.initialize(..., criterion='model'), which hands them to it and trains on the "
    "loss that it gives, or a forward that gives the logits of all positions"
)


class _Parallelized(Protocol):
    """What a loss asks of `parallelize.Parallelized`."""

    @property
    def strategy(self) -> TensorStrategy: ...

    def told(self, part: Batch, scale: float = 1.0) -> AbstractContextManager[None]: ...

    def cross_entropy(self, logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]: ...


def logits_of(outputs: Any) -> Tensor:
    """Of what a model gives: a tensor, a tuple that begins with one, or a mapping or an object that has `logits`.

    Raises ValueError, with the types, for anything else."""
    found, _ = _logits_in(outputs)
    if not (isinstance(found, Tensor) and found.is_floating_point()):
        raise ValueError(
            f"model: forward gives {_told(outputs)}; legal: logits, a tuple that begins with them, or a mapping or an "
            f"object that has them as 'logits' (forward gets the inputs, and no labels)"
        )
    return found


def with_logits(outputs: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """The same outputs with other logits; the outputs themselves where there are none."""
    found, place = _logits_in(outputs)
    if not isinstance(found, Tensor) or found.dim() == 0:
        return outputs
    changed = change(found)
    if place == "":
        return changed
    if isinstance(outputs, tuple) and hasattr(outputs, "_fields"):
        return type(outputs)(*(changed if each is found else each for each in outputs))
    if place == 0:
        return (changed, *outputs[1:])
    if isinstance(outputs, dict):
        outputs["logits"] = changed  # an object of Hugging Face's is both
        return outputs
    object.__setattr__(outputs, "logits", changed)  # of a frozen dataclass too
    return outputs


def _logits_in(outputs: Any) -> tuple[Any, str | int]:
    """What stands where logits stand, and where: "" for the outputs themselves."""
    if isinstance(outputs, Mapping):
        return outputs.get("logits"), "logits"
    if isinstance(outputs, tuple) and not hasattr(outputs, "logits"):
        return (outputs[0], 0) if outputs else (None, 0)
    return (outputs.logits, "logits") if hasattr(outputs, "logits") else (outputs, "")


def _told(outputs: Any) -> str:
    """Names what a model gives by its types."""
    match outputs:
        case Tensor():
            return f"a tensor {tuple(outputs.shape)} of {outputs.dtype}"
        case Mapping():
            return f"a {type(outputs).__name__} with " + ", ".join(
                f"{key!r}: {type(value).__name__}" for key, value in outputs.items()
            )
        case tuple() | list():
            return f"a {type(outputs).__name__} of ({', '.join(type(each).__name__ for each in outputs)})"
    return "None" if outputs is None else f"a {type(outputs).__name__}"


@dataclass
class Loss:
    """`criterion`: None for cross-entropy; a ModelLoss for the model's own loss."""

    parallelized: _Parallelized
    criterion: OwnCriterion | ModelLoss | None
    is_cut: bool = False
    """Whether others have a part of the batch: its loss is then put together from those of the parts."""

    def asked(self, batch: Batch) -> Batch:
        """What the model is called with, to give a loss if it is asked for its own."""
        return self.criterion.asked(batch) if isinstance(self.criterion, ModelLoss) else batch

    def told(self, part: Batch, scale: float) -> AbstractContextManager[None]:
        """Context of a forward, in which the head may compute the loss. `scale`: what backward will begin with."""
        return self.parallelized.told(part, scale) if self.criterion is None else nullcontext()

    def refuse_calls(self, tensor: int) -> None:
        """Raises ValueError where `engine(x)` would gather logits that the model's own code has whole."""
        if isinstance(self.criterion, ModelLoss) and tensor > 1:
            raise ValueError(
                f"engine(x) with criterion='model' and parallel.tensor={tensor}; legal: train_step and eval_step"
            )

    def of(self, outputs: Any, part: Batch) -> tuple[Tensor, Tensor | int | float]:
        """(sum, count) of this rank's part of a micro-batch, from these outputs of the last stage. Raises
        ValueError for a criterion that returns neither that nor a mean, and for logits of one position."""
        labels = part.labels
        if isinstance(self.criterion, ModelLoss):
            return self.criterion.of(outputs, labels)
        strategy, logits = self.parallelized.strategy, logits_of(outputs)
        are_tokens = labels.dim() == 2 and not labels.is_floating_point()
        if are_tokens and logits.dim() == 3 and logits.shape[1] == 1 < labels.shape[1]:
            raise ValueError(LAST_ONLY.format(shape=tuple(logits.shape), labels=tuple(labels.shape)))
        if self.criterion is None:
            _check_labels_fit(logits, labels)
            try:
                return self.parallelized.cross_entropy(logits, part.labels)
            except ValueError as error:
                error.add_note(
                    f"model: forward gave logits {tuple(logits.shape)}. Legal: (samples, tokens, vocabulary), or "
                    f"(samples, classes) for a label each (forward gets the inputs, and no labels)"
                )
                raise
        logits, labels = part.without_padding(logits), part.without_padding(part.labels)
        valid = int(valid_labels(labels))
        if labels.numel() == 0:
            return logits.sum() * 0.0, 0
        whole = strategy.whole_vocabulary(logits)
        if valid == 0 and not self.criterion.counts(whole, labels):
            return logits.sum() * 0.0, 0
        return self.criterion.run(
            whole, labels, valid, is_cut=self.is_cut, cuts_tokens=part.positions is not None
        )


def checked(
    criterion: Criterion | ModelLoss | None, names: Mapping[int, str] = NO_NAMES, hidden: Collection[str] = (),
    parts: str = "",
) -> OwnCriterion | ModelLoss | None:  # fmt: skip
    """What a `Loss` takes for a criterion; the rest as in `OwnCriterion`."""
    if criterion is None or isinstance(criterion, ModelLoss):
        return criterion
    return OwnCriterion(criterion, names, hidden, parts)


def reader_of(criterion: Criterion | ModelLoss | None) -> LossOf:
    """What reads the labels of a batch."""
    if criterion is None:
        return "logits"
    if isinstance(criterion, ModelLoss):
        return "shown" if criterion.is_shown else "model"
    return "own"


def _check_labels_fit(logits: Tensor, labels: Tensor) -> None:
    """Raises ValueError for labels that are not one for each vector of logits. Dimensions of one count for none."""
    if isinstance(logits, UnmadeLogits):
        return  # of a head that has seen the shape of its labels
    rows, given = ([n for n in shape if n != 1] for shape in (logits.shape[:-1], labels.shape))
    if rows != given:
        raise ValueError(
            f"labels: shape {tuple(labels.shape)} for logits {tuple(logits.shape)}. Legal: a label for each vector of "
            f"logits, {tuple(logits.shape[:-1])}, or criterion=, a function of the logits and the labels"
        )


def refuse_means(outputs: Any, model: str) -> None:
    """Raises ValueError for outputs of a `model` with a loss that is not the sum of the losses of parts."""
    found = outputs.get("aux_loss") if isinstance(outputs, Mapping) else getattr(outputs, "aux_loss", None)
    if found is not None:
        raise ValueError(
            f"model: the outputs of {model} carry an aux_loss, a mean to which the parts of a "
            f"batch do not add up. Legal: a model that gives none (output_router_logits=False), and emits its own "
            f"by colossal_lite.AuxiliaryLoss"
        )
