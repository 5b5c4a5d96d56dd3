"""Computes the loss of one micro-batch: the sum over its tokens, and their count.

Note: backward starts from the sum, not the mean (engine.py).  The built-in cross-entropy reads logits as they are, cut
over the vocabulary or not.  A user's own criterion gets full logits, and is weighted by its count.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from colossal_lite.data.batch import Batch
from colossal_lite.parallel.model_loss import ModelLoss as ModelLoss
from colossal_lite.parallel.tensor_modes import TensorStrategy

Criterion = Callable[[Tensor, Tensor], Any]
MOST_JUDGED = 4
"""Micro-batches of a run in which a criterion is judged: whether its parts add up."""
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
    if place == 0:
        return (changed, *outputs[1:])
    if isinstance(outputs, dict):
        outputs["logits"] = changed  # an object of Hugging Face's is both
    else:
        outputs.logits = changed
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
    criterion: Criterion | ModelLoss | None
    is_cut: bool = False
    """Whether others have a part of the batch: its loss is then put together from those of the parts."""
    _judged: int = field(default=0, init=False)
    _unjudged: tuple[Tensor, Tensor] | None = field(default=None, init=False)
    """Logits and labels of the last micro-batch, where its halves could not be judged."""

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
        if logits.dim() == 3 and labels.dim() == 2 and logits.shape[1] == 1 < labels.shape[1]:
            raise ValueError(LAST_ONLY.format(shape=tuple(logits.shape), labels=tuple(labels.shape)))
        if self.criterion is None:
            try:
                return self.parallelized.cross_entropy(logits, part.labels)
            except ValueError as error:
                error.add_note(
                    f"model: forward gave logits {tuple(logits.shape)}; legal: (samples, tokens, vocabulary), for each "
                    f"token (forward gets the inputs, and no labels)"
                )
                raise
        logits, labels = part.without_padding(logits), part.without_padding(part.labels)
        valid = int((labels != -100).sum())
        if valid == 0:
            return logits.sum() * 0.0, 0
        whole = strategy.whole_vocabulary(logits)
        judges = self.is_cut and torch.is_grad_enabled() and self._judged < MOST_JUDGED
        versions = (whole._version, labels._version) if judges else None  # it may write in them
        try:
            result = self.criterion(whole, labels)
        except Exception as error:
            error.add_note(
                f"criterion: it gets logits {tuple(whole.shape)}, (samples, tokens, vocabulary), and labels "
                f"{tuple(labels.shape)}; for torch's losses: logits.flatten(0, 1), labels.flatten()"
            )
            raise
        if isinstance(result, tuple) and len(result) == 2:
            return result
        if isinstance(result, Tensor) and result.dim() == 0:
            if judges and versions == (whole._version, labels._version):
                self._judged += 1
                self._refuse_other_sums(whole.detach(), labels, result.detach())
            return result.to(torch.promote_types(result.dtype, torch.float32)) * valid, valid
        raise ValueError(
            f"criterion returned {type(result).__name__}; legal: a tuple (sum, count), or a 0-d tensor that is a mean"
        )

    def _refuse_other_sums(self, whole: Tensor, labels: Tensor, result: Tensor) -> None:
        """Compare the criterion's `result` with what it gives for two halves, weighted by their labels.

        Halves are of samples, or of the tokens of a single one. Where they cannot be judged, this micro-batch is one
        part of two, and the next one is the other. The criterion is called twice more, or three times. Where it raises
        or draws then, it is not judged. Raises ValueError if they differ. A sum, a mean of other counts or a loss of
        pairs of samples is another one when a batch is cut."""
        if (halves := _halves(whole, labels)) and self._compare(result, halves):
            return
        before, self._unjudged = self._unjudged, (whole, labels)
        if self._judged == MOST_JUDGED:
            self._unjudged = None  # the last that is judged
        pair = [*([] if before is None else [before]), (whole, labels)]
        is_pair = len(pair) == 2 and all(
            one.shape[1:] == other.shape[1:] and one.device == other.device
            for one, other in zip(*pair, strict=True)
        )
        if not is_pair or any(x.shape[:1] != y.shape[:1] for x, y in pair):
            return
        both = self._of_half(*(torch.cat(each) for each in zip(*pair, strict=True)))
        if both is not None:
            self._compare(both, pair)

    def _compare(self, result: Tensor, parts: Sequence[tuple[Tensor, Tensor]]) -> bool:
        """Whether the criterion's `result` for two parts together can be compared with what it gives for each. Raises
        ValueError if it differs."""
        counts = [int((labels != -100).sum()) for _, labels in parts]
        results = [value for part in parts if (value := self._of_half(*part)) is not None]
        if 0 in counts or len(results) < len(parts):
            return False
        given, *found = map(float, (result, *results))
        made = sum(value * count for value, count in zip(found, counts, strict=True)) / sum(counts)
        # terms of a loss may be as large as logits, and cancel
        logits = [float(torch.linalg.vector_norm(whole, math.inf)) for whole, _ in parts]
        most = max(abs(given), *map(abs, found), *logits)
        eps = [torch.finfo(dtype).eps for dtype in (parts[0][0].dtype, result.dtype, torch.float32)]
        slack = max(4 * max(eps[:2]), 16 * eps[2] * sum(counts) ** 0.5)
        if not math.isfinite(most + made):
            return False
        if abs(made - given) <= slack * most:
            return True
        raise ValueError(
            f"criterion: it gives {given:.6g} for {sum(counts)} labels. Two parts, of {counts[0]} and {counts[1]}, "
            f"give {found[0]:.6g} and {found[1]:.6g}. These make {made:.6g}. So a batch cut by parallel.data "
            f"or gradient_accumulation has another loss. Legal: a mean over all labels that are not -100, or "
            f"(sum, count) of what parts add up to"
        )

    def _of_half(self, whole: Tensor, labels: Tensor) -> Tensor | None:
        """What the criterion gives for some samples; None if it raises there, or draws."""
        assert callable(self.criterion)
        devices = [whole.device] if whole.is_cuda else []

        def states() -> list[Tensor]:
            return [torch.get_rng_state(), *map(torch.cuda.get_rng_state, devices)]

        with torch.no_grad(), torch.random.fork_rng(devices):
            before = states()
            try:
                found = self.criterion(whole, labels)
            except Exception:  # it may not take this size, and is never given it
                return None
            is_judged = (
                isinstance(found, Tensor) and found.dim() == 0 and all(map(torch.equal, before, states()))
            )
            return found if is_judged else None


def _halves(whole: Tensor, labels: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Halves of logits and labels: of samples, or of the tokens of a single one. Empty where there are none."""
    dim = 0 if labels.dim() and len(labels) > 1 else 1
    by_token = labels.dim() == 2 and whole.dim() == 3 and not labels.is_floating_point()
    fits = whole.shape[: dim + 1] == labels.shape[: dim + 1] and (dim == 0 or by_token)
    if not fits or labels.shape[dim] < 2:
        return []
    return list(zip(whole.tensor_split(2, dim), labels.tensor_split(2, dim), strict=True))


def refuse_means(outputs: Any, model: str) -> None:
    """Raises ValueError for outputs of a `model` with a loss that is not the sum of the losses of parts."""
    found = outputs.get("aux_loss") if isinstance(outputs, Mapping) else getattr(outputs, "aux_loss", None)
    if found is not None:
        raise ValueError(
            f"model: the outputs of {model} carry an aux_loss, a mean to which the parts of a "
            f"batch do not add up. Legal: a model that gives none (output_router_logits=False), and emits its own "
            f"by colossal_lite.AuxiliaryLoss"
        )
