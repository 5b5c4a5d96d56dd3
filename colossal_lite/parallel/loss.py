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
from colossal_lite.data.batch_checks import LossOf, valid_labels
from colossal_lite.numerics.generators import drawn_between, generators_kept, states
from colossal_lite.parallel.criterion_graph import reads_of
from colossal_lite.parallel.fused_head import UnmadeLogits
from colossal_lite.parallel.model_loss import ModelLoss as ModelLoss
from colossal_lite.parallel.tensor_modes import TensorStrategy

Criterion = Callable[[Tensor, Tensor], Any]
MOST_JUDGED = 4
"""First micro-batches of a run in which a criterion is judged: whether its parts add up. Later it is judged in those
whose number is a power of two. A criterion may change its form with its value."""
SURE = 30.0
"""Added to logits, makes their word nearly certain."""
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
    names: Mapping[int, str] = field(default_factory=dict)
    """Of the model's parameters, by `id`."""
    parts: str = ""
    """The settings by which this rank has a part of the model, or of its activations; "" if it has all."""
    shards: str = ""
    """The settings by which weights are not whole between modules; "" if they are."""
    is_cut: bool = False
    """Whether others have a part of the batch: its loss is then put together from those of the parts."""
    _calls: int = field(default=0, init=False)
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
        if valid == 0:
            return logits.sum() * 0.0, 0
        whole = strategy.whole_vocabulary(logits)
        self._calls += torch.is_grad_enabled()
        is_due = self._calls <= MOST_JUDGED or self._calls.bit_count() == 1
        judges = self.is_cut and torch.is_grad_enabled() and is_due
        versions = (whole._version, labels._version) if judges else None  # it may write in them
        made_by, devices = whole.grad_fn, [whole.device] if whole.is_cuda else []
        before = states(devices) if judges else {}
        try:
            result = self.criterion(whole, labels)
        except Exception as error:
            error.add_note(
                f"criterion: it gets logits {tuple(whole.shape)}, (samples, tokens, vocabulary), and labels "
                f"{tuple(labels.shape)}; for torch's losses: logits.flatten(0, 1), labels.flatten()"
            )
            raise
        if judges and (name := drawn_between(before, states(devices))):
            raise ValueError(
                f"criterion: it draws from {name}, and others draw for their parts of the batch. Legal: no random "
                f"numbers, or numbers that the forward gets as an argument"
            )
        total, count = _weighed(result, valid)
        if made_by is not None and torch.is_grad_enabled():
            self._check_reads(total, made_by)
        if judges and versions == (whole._version, labels._version):
            self._judged += 1
            given = CriterionResult(whole.detach(), labels, total.detach(), count)
            self._refuse_other_sums(given)
            if part.positions is not None and (halves := _halves(whole.detach(), labels, 1)):
                self._compare(given, halves, "parallel.sequence")
        return total, count

    def _check_reads(self, total: Tensor, logits: Any) -> None:
        """Raises ValueError for a loss that has no gradient, or whose gradient a step would not have right. `logits`:
        the node of the logits."""
        if not total.requires_grad:
            raise ValueError(
                "criterion: its result has no graph, so nothing would train; legal: a loss of the logits, without "
                "detach() and no_grad"
            )
        reads = reads_of(total, logits, self.names)
        if reads.foreign:
            raise ValueError(
                f"criterion: it reads a tensor {reads.foreign[0]} that requires a gradient and is not of the model. No "
                f"step would train it. Legal: a parameter of the model, requires_grad_(False), or a loop of "
                f"your own with an optimizer for it"
            )
        where = self.parts or self.shards
        if reads.parameters and where:
            raise ValueError(
                f"criterion: it reads the parameter {reads.parameters[0]}. A rank has a part of it, or none ({where}). "
                f"Legal: a loss of the logits, optimizer.weight_decay, or colossal_lite.AuxiliaryLoss"
            )
        if reads.left and self.parts:
            raise ValueError(
                f"criterion: it reads a tensor that the forward has left ({reads.left[0]}). A rank has a part of it "
                f"({self.parts}). Legal: a loss of the logits, or colossal_lite.AuxiliaryLoss in the module"
            )

    def _refuse_other_sums(self, given: CriterionResult) -> None:
        """Compare what the criterion gave with what it gives for two halves, weighted by their labels.

        Halves are of samples, or of the tokens of a single one. Where they cannot be judged, this micro-batch is one
        part of two, and the next one is the other. The criterion is called twice more, or three times. Where it raises
        or draws then, it is not judged. Raises ValueError if they differ. A sum, a mean of other counts or a loss of
        pairs of samples is another one when a batch is cut."""
        whole, labels = given.logits, given.labels
        dim = 0 if labels.dim() and len(labels) > 1 else 1
        halves = _halves(whole, labels, dim)
        if self._judged == 1 and halves:
            self._refuse_other_levels(whole, labels, dim)
        if halves and self._compare(given, halves):
            return
        before, self._unjudged = self._unjudged, (whole, labels)
        if self._judged >= MOST_JUDGED:
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

    def _refuse_other_levels(self, whole: Tensor, labels: Tensor, dim: int) -> None:
        """Compare the criterion where the first half is right and the other is not. There the floor or the cap of a
        mean shows, whatever the mean is at first."""
        made = _half_right(whole, labels, dim)
        if made is None or (given := self._of_half(made, labels)) is None:
            return
        try:
            self._compare(given, _halves(made, labels, dim))
        except ValueError as error:
            error.add_note("criterion: it was given other logits here, which are right in the first half")
            raise

    def _compare(
        self,
        whole: CriterionResult,
        parts: Sequence[tuple[Tensor, Tensor]],
        cut: str = "parallel.data or gradient_accumulation",
    ) -> bool:
        """Whether what the criterion gave for two parts together can be compared with what it gives for each. Raises
        ValueError if it differs. `cut`: the settings by which batches are cut so."""
        results = [value for part in parts if (value := self._of_half(*part)) is not None]
        counts = [float(each.count) for each in results]
        if 0 in counts or len(results) < len(parts):
            return False
        given, *found = (float(each.total) / float(each.count) for each in (whole, *results))
        made = sum(value * count for value, count in zip(found, counts, strict=True)) / sum(counts)
        # terms of a loss may be as large as logits, and cancel
        logits = [float(torch.linalg.vector_norm(whole, math.inf)) for whole, _ in parts]
        most = max(abs(given), *map(abs, found), *logits)
        eps = max(torch.finfo(dtype).eps for dtype in (parts[0][0].dtype, whole.total.dtype))
        sums = eps if eps < torch.finfo(torch.float32).eps else torch.finfo(torch.float32).eps
        slack = max(4 * eps, 16 * sums * sum(counts) ** 0.5)
        if not math.isfinite(most + made):
            return False
        if abs(made - given) <= slack * most:
            return True
        raise ValueError(
            f"criterion: it gives {given:.6g} for {sum(counts):g} labels. Two parts, of {counts[0]:g} and "
            f"{counts[1]:g}, give {found[0]:.6g} and {found[1]:.6g}. These make {made:.6g}. So a batch cut by {cut} "
            f"has another loss. Legal: a mean over all labels that are not -100, or (sum, count) of what parts add "
            f"up to"
        )

    def _of_half(self, whole: Tensor, labels: Tensor) -> CriterionResult | None:
        """What the criterion gives for some samples; None if it raises there, or draws."""
        assert callable(self.criterion)
        devices = [whole.device] if whole.is_cuda else []
        with torch.no_grad(), generators_kept(devices):
            before = states(devices)
            try:
                found = self.criterion(whole, labels)
                total, count = _weighed(found, int(valid_labels(labels)))
            except Exception:  # it may not take this size, and is never given it
                return None
            return (
                None
                if drawn_between(before, states(devices))
                else CriterionResult(whole, labels, total, count)
            )


@dataclass(frozen=True)
class CriterionResult:
    """What a criterion gave for these logits and labels: a sum and its count."""

    logits: Tensor
    labels: Tensor
    total: Tensor
    count: Tensor | int | float


def _weighed(result: Any, valid: int) -> tuple[Tensor, Tensor | int | float]:
    """The sum and count of a criterion's `result`, for so many valid labels. Raises ValueError for other results."""
    if isinstance(result, tuple) and len(result) == 2:
        return result
    if isinstance(result, Tensor) and result.dim() == 0:
        return result.to(torch.promote_types(result.dtype, torch.float32)) * valid, valid
    raise ValueError(
        f"criterion returned {type(result).__name__}; legal: a tuple (sum, count), or a 0-d tensor that is a mean"
    )


def _half_right(whole: Tensor, labels: Tensor, dim: int) -> Tensor | None:
    """Logits, or numbers, that fit the labels in the first half; None for others than [..., classes] or [...]."""
    made, half = whole.clone(), labels.shape[dim] // 2
    first, right = made.narrow(dim, 0, half), labels.narrow(dim, 0, half)
    if labels.is_floating_point() and first.shape == right.shape:
        first.copy_(right)
    elif not labels.is_floating_point() and first.shape[:-1] == right.shape:
        first.scatter_add_(-1, right.clamp(min=0).long()[..., None], first.new_full((*right.shape, 1), SURE))
    else:
        return None
    return made


def reader_of(criterion: Criterion | ModelLoss | None) -> LossOf:
    """What reads the labels of a batch."""
    if criterion is None:
        return "logits"
    return "model" if isinstance(criterion, ModelLoss) else "own"


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


def _halves(whole: Tensor, labels: Tensor, dim: int) -> list[tuple[Tensor, Tensor]]:
    """Halves of logits and labels: of samples (`dim` 0) or tokens. Empty where there are none."""
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
