"""Adds losses that modules emit to the loss of the labels: a router's balance, a penalty on activations.

Note: auxiliary losses.
A module holds an `AuxiliaryLoss` and passes the residual stream through it, with a sum over its input.  The engine then
trains on

    mean loss of the valid labels + over all that was emitted: weight * sum over the global batch / count of its units

for any mesh, schedule and number of micro-batches, and reports that loss.  The gradient enters where the stream passes,
as in Megatron-LM's scaling of auxiliary losses.  So a pipeline stage needs no second root, and backward may run in
parts.  A block that runs again in backward adds nothing: its second emission is ignored.

The count is declared (`per`), not emitted.  A pipeline needs it for the first backward, which runs before the last
forward.  For the same reason labels are counted when the batch is read; a criterion that counts otherwise raises.
Engine and modules share one object, to which modules are bound like dropouts to their counters.  Nothing is global, and
a model without auxiliary losses costs nothing.  Cost: 8 bytes more in the all-gather of batch sizes over data ranks,
which dropout and pipelines need anyway.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, get_args

from torch import Tensor, nn
from torch.autograd import Function

Per = Literal["token", "sample", "element"]


class AuxiliaryLoss(nn.Module):
    """Adds `weight * sum(total) / count` to the loss: sums and count over the global batch.

    `per` names the unit of the count, and so of the sum `total`.  "element": each element of the stream, for itself.
    "token": a function of all features of a token.  "sample": a function of all tokens of a sample.  Outside an engine
    it returns the stream and does nothing: the training loop must then add the total.
    """

    def __init__(self, weight: float = 1.0, *, per: Per = "token") -> None:
        """Raises ValueError for a weight that is not finite, and for another `per`."""
        super().__init__()
        if not math.isfinite(weight):
            raise ValueError(f"AuxiliaryLoss: weight={weight}; legal is a finite number")
        if per not in get_args(Per):
            raise ValueError(f"AuxiliaryLoss: per={per!r}; legal are {', '.join(map(repr, get_args(Per)))}")
        self.weight, self.per = weight, per
        self.emit: Callable[[Tensor, Tensor], Tensor] | None = None

    def forward(self, x: Tensor, total: Tensor) -> Tensor:
        """Returns the stream x [samples, ..., features] unchanged, to be used in its place. `total`: 0-d, float32 or
        better.

        Called twice in a forward it counts twice. Raises ValueError for a total of another shape.  In a step of an
        engine raises ValueError too if x's first dimension is not the samples.
        """
        if total.dim():
            raise ValueError(f"AuxiliaryLoss: total has the shape {list(total.shape)}; legal is a 0-d sum")
        return x if self.emit is None else self.emit(x, total)

    def extra_repr(self) -> str:
        return f"weight={self.weight}, per={self.per!r}"


@dataclass(frozen=True)
class Share:
    """The part of each sample's stream that a rank sees at a module: one of so many parts of tokens and of features."""

    tokens: int = 1
    features: int = 1
    tells: bool = True
    """Whether this rank is the first of those that see the same part."""

    def units_of_a_sample(self, per: Per, x: Tensor) -> int:
        """Units to count in a whole sample."""
        if per == "sample":
            return 1
        tokens = x.shape[1:-1].numel() * self.tokens
        return tokens if per == "token" else tokens * x.shape[-1] * self.features


class AuxiliaryLosses:
    """The auxiliary losses of one model on one rank, and the current step's sums and counts."""

    def __init__(self) -> None:
        self.names: tuple[str, ...] = ()
        """Names in the whole model, the same on every rank."""
        self.labels, self.samples = 0, 1
        self.seed = 1.0
        """The factor of the running backward, by which the loss of the labels is multiplied."""
        self.behind = ""
        """The linear after which activations are sharded otherwise than the stream; empty outside of such a region."""
        self._heard: Tensor | None = None
        self._samples_here = 0
        self._emitted: Counter[str] = Counter()
        self._delivered: Counter[str] = Counter()

    def bind(self, module: nn.Module, share_at: Callable[[str], Share]) -> None:
        """Connect every `AuxiliaryLoss` of a whole model to this object. `share_at`: by module name."""
        found = modules_of(module)
        self.names = tuple(found)
        for name, each in found.items():
            each.emit = partial(self._emit, name, each.weight, each.per, share_at(name))

    def begin(self, *, samples: int, labels: int) -> None:
        """Begin a step on a global batch of so many samples and valid labels."""
        self.samples, self.labels = max(samples, 1), labels
        self._emitted.clear()
        self._delivered.clear()

    @contextmanager
    def heard(self, into: Tensor, samples: int) -> Iterator[None]:
        """Within a forward of `samples` samples: add its auxiliary losses to `into`, as parts of a sum over labels."""
        self._heard, self._samples_here, self.behind = into, samples, ""
        try:
            yield
        finally:
            self._heard = None

    def check_delivered(self) -> None:
        """Check after the backward of a step. Raises ValueError if backward did not pass an emitted loss."""
        if lost := [name for name, count in self._emitted.items() if self._delivered[name] < count]:
            raise ValueError(
                f"auxiliary loss {lost[0]}: its gradient was asked for {self._delivered[lost[0]]} times, not "
                f"{self._emitted[lost[0]]}; legal: go on with the returned tensor, x = auxiliary(x, total)"
            )

    def check_count(self, count: float) -> None:
        """Raises ValueError if the criterion's count differs from the labels that auxiliary losses are weighed by."""
        if self.names and count != self.labels:
            raise ValueError(
                f"criterion: its counts add up to {count:g}, not to the batch's {self.labels} labels other than -100. "
                f"Auxiliary losses are weighed by the labels; legal: that count, a mean, or a model without them"
            )

    def _emit(self, name: str, weight: float, per: Per, share: Share, x: Tensor, total: Tensor) -> Tensor:
        factor = weight * self.labels / (self.samples * share.units_of_a_sample(per, x))
        if self._heard is not None:
            self._check(name, share, x)
            if share.tells:
                self._heard += total.detach() * factor
            self._emitted[name] += int(total.requires_grad)
        if not total.requires_grad:
            return x
        out: Tensor = _Emit.apply(x, total, partial(self._gradient, name, factor))  # type: ignore[no-untyped-call]
        return out

    def _gradient(self, name: str, factor: float) -> float:
        self._delivered[name] += 1
        return factor * self.seed

    def _check(self, name: str, share: Share, x: Tensor) -> None:
        if self.behind:
            raise ValueError(
                f"auxiliary loss {name}: it runs after {self.behind}, where activations are sharded over the tensor "
                f"axis otherwise than between layers. Legal: before the column-wise linear of a pair or after its "
                f"row-wise one; for logits, a criterion"
            )
        if x.dim() < 2 + (share.tokens > 1) or x.shape[0] != self._samples_here:
            form = "[samples, tokens, ..., features]" if share.tokens > 1 else "[samples, ..., features]"
            raise ValueError(
                f"auxiliary loss {name}: x has the shape {list(x.shape)} in a micro-batch of {self._samples_here} "
                f"samples; legal: {form}"
            )


class _Emit(Function):
    """Returns x unchanged; in backward `total` gets the gradient `gradient()`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, total: Tensor, gradient: Callable[[], float]) -> Tensor:
        ctx.gradient, ctx.dtype = gradient, total.dtype
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, dx: Tensor) -> tuple[Tensor, Tensor, None]:
        return dx, dx.new_full((), ctx.gradient(), dtype=ctx.dtype), None


def modules_of(module: nn.Module) -> Mapping[str, AuxiliaryLoss]:
    """The auxiliary losses of a model, by name."""
    return {name: each for name, each in module.named_modules() if isinstance(each, AuxiliaryLoss)}


def check_cuts(module: nn.Module, *, tokens: str | None, features: str | None) -> None:
    """Raises ValueError for auxiliary losses that cannot be summed by parts. `tokens`, `features`: what cuts these."""
    for name, each in modules_of(module).items():
        cut = features if each.per != "element" and features else tokens if each.per == "sample" else None
        if cut is not None:
            legal = "'element'" if features else "'element', 'token'"
            raise ValueError(
                f"auxiliary loss {name}: per={each.per!r} is a function of what {cut} cuts. The sum of its parts would "
                f"be another; legal: per={legal}, or without {cut}"
            )


def unbind(module: nn.Module) -> None:
    """Disconnect the auxiliary losses of a model: they emit nowhere."""
    for each in modules_of(module).values():
        each.emit = None
