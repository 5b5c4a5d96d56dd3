"""Runs a criterion of the user's own, and refuses one that would train otherwise than in one process.

Note: a criterion sees a part of a batch.
Where batches are cut, its parts must add up.  So it is run on two halves of a part as well, by samples, and by tokens
where ranks have parts of these.  Once it is given logits that are right in the first half.  There the floor or the cap
of a mean shows.  What it reads beside the logits is seen in its graph (criterion_graph.py).
A count that is no whole number may be an accuracy, which divides the loss.  So it is taken of two halves too.
Cost: two more calls in the first micro-batches, and in those whose number is a power of two; there two more backwards
to the logits; a walk of its graph.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from colossal_lite.data.batch_checks import valid_labels
from colossal_lite.numerics.generators import drawn_between, generators_kept, states
from colossal_lite.numerics.linearity import SEED, is_multiple
from colossal_lite.numerics.retained_gradients import retained_gradients_kept
from colossal_lite.numerics.user_functions import FUNCTION_SEED, UnitArrivals
from colossal_lite.parallel.criterion_graph import nodes_between, reads_of

Criterion = Callable[[Tensor, Tensor], Any]
MOST_JUDGED = 4
"""First micro-batches of a run in which a criterion is judged: whether its parts add up. Later it is judged in those
whose number is a power of two. A criterion may change its form with its value."""
SURE = 30.0
"""Added to logits, makes their word nearly certain."""


@dataclass
class OwnCriterion:
    """A criterion of logits and labels that gives a mean, or (sum, count)."""

    criterion: Criterion
    names: Mapping[int, str] = field(default_factory=dict)
    """Of the model's parameters, by `id`."""
    hidden: Collection[str] = ()
    """Names of the parameters that have no values outside of forward."""
    parts: str = ""
    """The settings by which this rank has a part of the model, or of its activations; "" if it has all."""
    _calls: int = field(default=0, init=False)
    _judged: int = field(default=0, init=False)
    _unjudged: tuple[Tensor, Tensor] | None = field(default=None, init=False)
    """Logits and labels of the last micro-batch, where its halves could not be judged."""

    def run(
        self, whole: Tensor, labels: Tensor, valid: int, *, is_cut: bool, cuts_tokens: bool
    ) -> tuple[Tensor, Tensor | int | float]:
        """(sum, count) of a micro-batch with so many `valid` labels. `is_cut`: others have a part of the batch, or of
        its tokens if that `cuts_tokens`. Raises ValueError for another result, and for a criterion that would train
        otherwise than in one process."""
        trains = torch.is_grad_enabled()
        self._calls += trains
        is_early = trains and (self._calls <= MOST_JUDGED or self._calls.bit_count() == 1)
        judges = is_cut and is_early
        versions = _versions(whole, labels) if is_early else None  # it may write in them
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
        if made_by is not None and trains:
            self._check_reads(total, made_by)
            if self._calls.bit_count() == 1 and whole.grad_fn is made_by:
                with retained_gradients_kept():
                    _check_linear(total, whole)
        given = CriterionResult(whole.detach(), labels, total.detach(), count)
        if is_early and versions == _versions(whole, labels):
            self._refuse_mean_as_count(given)
            self._judged += judges
            if judges:
                self._judge(given, cuts_tokens=cuts_tokens)
        return total, count

    def counts(self, whole: Tensor, labels: Tensor) -> bool:
        """Whether the criterion gives a count of its own for a part whose labels are all -100. A mean counts nothing
        there, and neither does a criterion that raises."""
        given = self._of_half(whole.detach().clone(), labels.clone())  # it may write in them
        return given is not None and float(given.count) != 0

    def _judge(self, given: CriterionResult, *, cuts_tokens: bool) -> None:
        self._refuse_other_sums(given)
        if cuts_tokens and (halves := _halves(given.logits, given.labels, 1)):
            self._compare(given, halves, "parallel.sequence")

    def _refuse_mean_as_count(self, given: CriterionResult) -> None:
        """Raises ValueError for a count, no whole number, that is the mean of what two halves give: an accuracy."""
        count, labels = float(given.count), given.labels
        parts = _halves(given.logits, labels, 0 if labels.dim() and len(labels) > 1 else 1)
        if not math.isfinite(count) or count.is_integer() or not parts:
            return
        found = [float(each.count) for part in parts if (each := self._of_half(*part)) is not None]
        if len(found) < 2 or found[0] == found[1]:
            return
        sizes = ([int(valid_labels(ids)) for _, ids in parts], [ids.numel() for _, ids in parts])
        means = (
            sum(n * each for n, each in zip(some, found, strict=True)) / max(sum(some), 1) for some in sizes
        )
        if any(math.isclose(mean, count, rel_tol=1e-5) for mean in means):
            raise ValueError(
                f"criterion: its second value {count:.6g} is a mean: {found[0]:.6g} and {found[1]:.6g} for two halves "
                f"of the batch. It is taken as the count by which the loss is divided. Legal: the loss alone, or "
                f"(sum, count) of what parts add up to. An accuracy is for your loop"
            )

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
        gone = [name for name in reads.parameters if self.parts or name in self.hidden]
        if gone:
            where = self.parts or "zero.stage=3"
            raise ValueError(
                f"criterion: it reads the parameter {gone[0]}. A rank has a part of it, or none ({where}). "
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
        self._refuse_state(whole, given, slack * most)
        raise ValueError(
            f"criterion: it gives {given:.6g} for {sum(counts):g} labels. Two parts, of {counts[0]:g} and "
            f"{counts[1]:g}, give {found[0]:.6g} and {found[1]:.6g}. These make {made:.6g}. So a batch cut by {cut} "
            f"has another loss. Legal: a mean over all labels that are not -100, or (sum, count) of what parts add "
            f"up to"
        )

    def _refuse_state(self, whole: CriterionResult, given: float, slack: float) -> None:
        """Raises ValueError if another call, for the same logits, gives another number."""
        again = self._of_half(whole.logits, whole.labels)
        if again is not None and abs((found := float(again.total) / float(again.count)) - given) > slack:
            raise ValueError(
                f"criterion: it gives {given:.6g}, and then {found:.6g} for the same logits and labels. So it has "
                f"state that its calls change, and a batch that is cut has other calls. Legal: state that only your "
                f"loop changes, between steps"
            )

    def _of_half(self, whole: Tensor, labels: Tensor) -> CriterionResult | None:
        """What the criterion gives for some samples; None if it raises there, or draws."""
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


def _check_linear(total: Tensor, whole: Tensor) -> None:
    """Raises ValueError where the gradient of the logits is not linear in what backward starts from."""
    arrivals = UnitArrivals(nodes_between(total.grad_fn, whole.grad_fn))
    seed = FUNCTION_SEED if arrivals.functions else SEED

    def rows(factor: float) -> Tensor:
        """Of each row the least, the largest, and the sum of sizes. One gradient of the logits is there at a time."""
        arrivals.factor = factor
        start = torch.full_like(total, factor)
        (found,) = torch.autograd.grad(total, whole, start, retain_graph=True, allow_unused=True)
        if found is None or not found.numel():
            return torch.zeros(3)
        found = found.reshape(-1, found.shape[-1]) if found.dim() else found.reshape(1, 1)
        return torch.stack((found.amin(-1), found.amax(-1), torch.linalg.vector_norm(found, 1, -1)))

    with arrivals:
        (one, reached), (times, others) = ((rows(factor), arrivals.all_arrived()) for factor in (1.0, seed))
        if arrivals.functions:
            rows(1 / seed)
    turned = torch.stack((times[1], times[0], -times[2]))  # as the factor is negative
    pairs = zip(turned, one, (1, 1, whole.shape[-1] if whole.dim() else 1), strict=True)
    is_linear = all(is_multiple(found, given, seed, terms=terms) for found, given, terms in pairs)
    if not (is_linear and all(is_multiple(y, x, seed) for x, y in zip(reached, others, strict=True))):
        raise ValueError(
            f"criterion: the gradient of the logits is not linear, as {seed:g} times the loss shows. Backward starts "
            f"from a sum over the labels of a part of the batch. So the result would be another than in one process. "
            f"Legal: hooks and autograd.Functions that are linear in the gradient"
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
        total, count = result
        if isinstance(total, Tensor) and total.dim() == 0 and _is_number(count):
            return total, count
    if isinstance(result, Tensor) and result.dim() == 0:
        return result.to(torch.promote_types(result.dtype, torch.float32)) * valid, valid
    given = [result, *result] if isinstance(result, tuple) else [result]
    told = ", ".join(_kind(each) for each in given)
    raise ValueError(
        f"criterion returned {told}; legal: a tuple (sum, count), of a number each, or a 0-d tensor that is a mean"
    )


def _versions(*tensors: Tensor) -> list[int]:
    """How often each was written to; 0 of one that is made in inference mode, which does not count that."""
    return [0 if x.is_inference() else x._version for x in tensors]


def _is_number(x: Any) -> bool:
    return isinstance(x, Real) or (isinstance(x, Tensor) and x.numel() == 1)


def _kind(x: Any) -> str:
    return f"Tensor {tuple(x.shape)}" if isinstance(x, Tensor) else type(x).__name__


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


def _halves(whole: Tensor, labels: Tensor, dim: int) -> list[tuple[Tensor, Tensor]]:
    """Halves of logits and labels: of samples (`dim` 0) or tokens. Empty where there are none."""
    by_token = labels.dim() == 2 and whole.dim() == 3 and not labels.is_floating_point()
    fits = whole.shape[: dim + 1] == labels.shape[: dim + 1] and (dim == 0 or by_token)
    if not fits or labels.shape[dim] < 2:
        return []
    return list(zip(whole.tensor_split(2, dim), labels.tensor_split(2, dim), strict=True))
