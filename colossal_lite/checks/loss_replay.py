"""Runs a recorded loss again with other rows of the outputs, and compares the gradients of those that stay.

Note: which rows, and by what.
Rows are parted by up to three binary digits of their numbers, each way round.  Some rows become those that stay, which
a model does give.  Then the gradient at the others must be the same.  With a count of labels it may have a factor, as
for a mean over some samples.  Or they become multiples of themselves, which turns many a choice.  That may meet a guard
that no output of a model does, so there a factor is always allowed.
Cost: up to 19 losses with their gradients, and as much memory as one of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge
from torch.utils._pytree import tree_map_only

from colossal_lite.checks.loss_record import LossRecord, Number, Operation, Recorded
from colossal_lite.numerics.torch_modes import tensors_in

aten = torch.ops.aten
Gradients = Sequence[Tensor | None]
Change = Callable[[Tensor, Tensor], Tensor]
"""What rows of an output become, by their own numbers and by rows that stay."""


def couples(record: LossRecord, loss: Tensor, outputs: Sequence[GradientEdge], *, counted: bool) -> bool:
    """Whether the gradient of `loss` at rows of these `outputs` depends on other rows by detached numbers. `counted`:
    backward weighs it by a count."""
    recorded, places = record.of(loss), [place for place in record.places(outputs) if place is not None]
    if recorded is None or len(places) < len(outputs):
        return False
    right = torch.autograd.grad(loss, outputs, retain_graph=True, allow_unused=True)
    replay = _Replay(recorded, places)
    whole = [slice(None)] * len(places)
    with suppress(RuntimeError, IndexError):
        if _is_apart(right, replay.gradients({}), whole, by_factor=False):
            return False  # the record is not whole
        return any(_depends(replay, right, trial, counted=counted) for trial in _trials(recorded))
    return False


@dataclass(frozen=True)
class _Trial:
    """`kept`: rows that stay, of each output. `changed`: outputs whose other rows are others."""

    kept: Mapping[int, Tensor]
    changed: Mapping[int, Tensor]
    is_of_model: bool
    """Whether all rows are some that the model has given."""


def _trials(recorded: Recorded) -> Iterator[_Trial]:
    bits = (max(recorded.rows.values()) - 1).bit_length()
    starts = recorded.starts
    for digit in sorted({0, 1, bits - 1} & set(range(bits))):
        for parity in (0, 1):
            stays = {
                place: torch.arange(rows, device=starts[place].device) >> digit & 1 == parity
                for place, rows in recorded.rows.items()
            }
            kept = {place: some.nonzero()[:, 0] for place, some in stays.items() if some.any()}
            for change in (_others, partial(_multiple, sign=1), partial(_multiple, sign=-1)):
                changed = {
                    place: _with_rows(starts[place], rows, (~stays[place]).nonzero()[:, 0], change)
                    for place, rows in kept.items()
                }
                yield _Trial(kept, changed, is_of_model=change is _others)


def _others(own: Tensor, others: Tensor) -> Tensor:
    return others


def _multiple(own: Tensor, others: Tensor, sign: int) -> Tensor:
    return own * sign * (32 if torch.finfo(own.dtype).eps < 1e-4 else 4)


def _with_rows(x: Tensor, stay: Tensor, change: Tensor, by: Change) -> Tensor:
    """x with some rows changed, by rows that stay in turn."""
    others = x[stay[torch.arange(len(change), device=x.device) % len(stay)]]
    return x.index_copy(0, change, by(x[change], others))


def _depends(replay: _Replay, right: Gradients, trial: _Trial, *, counted: bool) -> bool:
    """Whether the gradient at rows that stay is another. Not where the loss cannot be computed."""
    rows = [trial.kept.get(place, slice(0)) for place in replay.places]
    with suppress(RuntimeError, IndexError):
        found = replay.gradients(trial.changed)
        return _is_apart(right, found, rows, by_factor=counted or not trial.is_of_model)
    return False


@dataclass(frozen=True)
class _Replay:
    """`places`: where gradients are taken."""

    recorded: Recorded
    places: Sequence[int]

    def gradients(self, changed: Mapping[int, Tensor]) -> Gradients:
        """The gradients at the outputs, with these numbers `changed`. Raises RuntimeError where an operation gives
        another number of results."""
        starts = {**self.recorded.starts, **changed}
        last = {x.place: n for n, each in enumerate(self.recorded.operations) for x in each.read}
        with torch.enable_grad(), _without_habits():
            leaves = {place: starts[place].detach().requires_grad_() for place in self.places}
            values = {place: leaves.get(place, x).clone() for place, x in starts.items()}
            for n, operation in enumerate(self.recorded.operations):
                _compute(operation, values)
                for number in operation.read:
                    if last[number.place] == n and number.place != self.recorded.loss:
                        values.pop(number.place, None)
            loss = values[self.recorded.loss]
            return torch.autograd.grad(loss, list(leaves.values()), allow_unused=True)


def _compute(operation: Operation, values: dict[int, Tensor]) -> None:
    """Run an operation with these `values`, and note its results among them."""
    if (
        operation.call is aten.detach.default
    ):  # of a user, or of torch for a view: its readers say if it trains
        values[operation.made[0]] = values[operation.read[0].place]
        return

    def given(x: Number) -> Tensor:
        return values[x.place] if x.trains else values[x.place].detach()

    args, kwargs = tree_map_only(Number, given, (operation.args, dict(operation.kwargs)))
    with torch.set_grad_enabled(operation.has_gradients):
        results = tensors_in(operation.call(*args, **kwargs))
    if len(results) != len(operation.made):
        raise RuntimeError("other rows have another number of results")
    values.update(zip(operation.made, results, strict=True))


def _is_apart(right: Gradients, found: Gradients, rows: Sequence[Any], *, by_factor: bool) -> bool:
    """Whether gradients differ in some rows, by over the root of eps of their norm. `by_factor`: from each positive
    multiple of the right ones. Not where they are not finite."""
    pairs = list[tuple[Tensor, Tensor]]()
    for x, y, some in zip(right, found, rows, strict=True):
        if (shaped := y if x is None else x) is not None:
            none = torch.zeros_like(shaped)
            pairs.append(((none if x is None else x)[some], (none if y is None else y)[some]))
    factor = 1.0
    if by_factor and (square := sum(_product(x, x) for x, _ in pairs)):
        factor = sum(_product(x, y) for x, y in pairs) / square
    wrong = sum(_norm(y - factor * x) ** 2 for x, y in pairs)
    size = sum(_norm(x) ** 2 + _norm(y) ** 2 for x, y in pairs)
    eps = max((torch.finfo(x.dtype).eps for x, _ in pairs), default=0.0)
    return math.isfinite(size) and (wrong > eps * size or factor <= 0.0)


def _product(x: Tensor, y: Tensor) -> float:
    return float((x * y).sum(dtype=torch.float64))


def _norm(x: Tensor) -> float:
    return float(torch.linalg.vector_norm(x, dtype=torch.float64))


@contextmanager
def _without_habits() -> Iterator[None]:
    """Without what the user has switched on for operations: casts were recorded, and a warning would name a replay."""
    with torch.autocast("cpu", enabled=False), torch.autocast("cuda", enabled=False):
        with torch.autograd.set_detect_anomaly(False):
            yield
