"""Finds weights at which a model is about to take another branch, because of values that its code reads.

Note: the search.
A branch by a value of the whole batch (`if x.mean() > 0`) may be taken alike by the first batches and their halves.
After some training it is not.  So a model is run with other weights.  Each is multiplied by exp(t d) with a drawn d:
signs and zeros stay.  Where a t of `SHARES` leads to other operations or choices than the one before, the place between
is bisected.  There the value is at its limit, and that of a half is on the other side.  A choice is a tensor of
integers or booleans whose shape does not grow with the batch, as in `torch.where(x.mean() > 0, a, b)`.  A branch that
depends on no weight is found in other batches alone.  A forward that does much more than the first one is given up: a
loop may not end with other weights.
Cost: once an engine, two forwards for each batch and for each draw, `BISECTIONS` for each that changes something, and
two comparisons of a batch with its halves there.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import cycle
from typing import Any, Literal, NamedTuple
from zlib import crc32

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from colossal_lite.data.batch import Batch
from colossal_lite.numerics.generators import generators_kept
from colossal_lite.numerics.torch_modes import DispatchMode, uncompiled
from colossal_lite.parallel.small_copy import Model, deep_copy

aten = torch.ops.aten
VALUES_READ = frozenset(
    {
        aten._local_scalar_dense.default, aten.equal.default, aten.nonzero.default, aten.masked_select.default,
        aten._unique2.default, aten.unique_consecutive.default, aten.unique_dim.default,
    }
)  # fmt: skip
"""Operations whose result, or its shape, code may read."""
INDEXED = frozenset({aten.index.Tensor})
"""Those too, by a mask."""
DRAWS = ((0.0, 1.0), (0.0, 1.0), (1.0, 0.5), (-1.0, 0.5), (3.0, 0.5), (-3.0, 0.5), (0.0, 2.0), (0.0, 1.0))
"""Mean and standard deviation of d, for each search."""
SHARES = (0.0, 0.3, 1.0)
BISECTIONS = 12
MOST_OPERATIONS = 10_000
"""Of a forward that is followed."""
MOST_TIMES = 4
"""As many operations, and as large results, as the first forward has, and `MOST_MORE` beside them."""
MOST_MORE = 256
SHARED_NUMEL = 1 << 18
"""Buffers above this size are not copied for each forward, unless the first one writes to them."""
ROUNDED = frozenset(
    {aten.sign.default, aten.round.default, aten.floor.default, aten.ceil.default, aten.trunc.default}
)
"""Operations whose result does not change with small changes, beside those that give integers and booleans."""


class _Choice(NamedTuple):
    """A tensor that does not change with small changes, by a number for its values."""

    shape: tuple[int, ...]
    value: int
    is_rounded: bool


@dataclass(frozen=True)
class _ForwardSeen:
    """What a forward does: values that code reads, operations, choices, and the numbers that operations are given.
    `largest`: elements of its largest result. `written`: the numbers of buffers that it has written to."""

    reads: int
    has_run: bool
    done: list[Any]
    choices: list[_Choice]
    numbers: list[Any]
    largest: int
    written: frozenset[int]

    @property
    def most(self) -> tuple[int, int]:
        """Operations, and elements of a result, that a forward with other weights may have."""
        operations = min(MOST_TIMES * len(self.done) + MOST_MORE, MOST_OPERATIONS)
        return operations, MOST_TIMES * self.largest + MOST_MORE


Change = Literal["operations", "numbers"]


class _TooMuchError(RuntimeError):
    """A forward does much more than the first one."""


class _OperationsSeen(DispatchMode):
    """Counts the values that code reads of tensors, as `float(x.mean())` and `if x.any()` do, and notes operations."""

    def __init__(self, weights: dict[int, int], most: tuple[int, int] | None) -> None:
        """`weights`: a number for the id of each parameter. `most`: operations, and elements of a result; None: no
        limit. Beyond it an operation raises _TooMuchError."""
        super().__init__()
        self._weights, self._most = weights, most
        self.reads: int = 0
        self.done: list[Any] = []
        self.choices: list[_Choice] = []
        self.numbers: list[float] = []
        self.largest: int = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.reads += int(func in VALUES_READ or func in INDEXED and _has_mask(args[1]))
        self.done.append((func, tuple(map(self._named, args))))
        made = func(*args, **(kwargs or {}))
        for x in made if isinstance(made, (tuple, list)) else (made,):
            if isinstance(x, Tensor):
                self.largest = max(self.largest, x.numel())
                self._note(x, func in ROUNDED)
        if self._most is not None and (len(self.done) > self._most[0] or self.largest > self._most[1]):
            raise _TooMuchError
        return made

    def _named(self, value: Any) -> Any:
        """A parameter by its number, and an integer as it is."""
        if isinstance(value, float):
            self.numbers.append(value)
        if isinstance(value, Tensor):
            return self._weights.get(id(value))
        return value if isinstance(value, int) else None

    def _note(self, x: Tensor, is_rounded: bool) -> None:
        if x.layout != torch.strided or x.is_nested or x.device.type != "cpu":
            return
        if is_rounded or not (x.is_floating_point() or x.is_complex() or x.is_quantized):
            values = (x.detach().double() if x.is_floating_point() else x.detach()).numpy().tobytes()
            self.choices.append(_Choice(tuple(x.shape), crc32(values), is_rounded))


def _has_mask(places: Any) -> bool:
    return any(isinstance(x, Tensor) and x.dtype in (torch.bool, torch.uint8) for x in places)


class _ListsRead(TorchFunctionMode):
    """Counts tensors that code makes lists or arrays of."""

    def __init__(self) -> None:
        super().__init__()
        self.count: int = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += int(getattr(func, "__name__", "") in ("tolist", "numpy", "__array__"))
        return func(*args, **(kwargs or {}))


def reads_values(model: nn.Module, batch: Batch) -> bool:
    """Whether a forward of this batch in training reads values of tensors. Then another batch, or other weights, may
    take other branches."""
    return _seen(deep_copy(model), batch).reads > 0


def _seen(made: nn.Module, batch: Batch, most: tuple[int, int] | None = None) -> _ForwardSeen:
    """What a forward of a model in training does. It changes the model. `most`: as `_OperationsSeen` has it."""
    seen, lists = _OperationsSeen({id(p): n for n, p in enumerate(made.parameters())}, most), _ListsRead()
    buffers = list(made.buffers())
    before = [buffer._version for buffer in buffers]
    has_run = False
    with generators_kept(), uncompiled(), torch.no_grad(), suppress(Exception), lists, seen:
        made.train()(*batch.args, **batch.kwargs)
        has_run = True
    written = frozenset(n for n, b in enumerate(buffers) if b._version != before[n])
    return _ForwardSeen(
        seen.reads + lists.count, has_run, seen.done, seen.choices, seen.numbers, seen.largest, written
    )


@dataclass(frozen=True)
class _Branches:
    """Follows the branches that forwards of one batch take. `shared`: the places of choices that are not one for each
    sample. `first`: what the model does with its weights of now."""

    batch: Batch
    shared: frozenset[int]
    first: _ForwardSeen

    @staticmethod
    def of(model: nn.Module, batch: Batch) -> _Branches:
        """A choice for each sample has more rows for a whole batch than for its half."""
        most = MOST_OPERATIONS, sys.maxsize
        whole, half = (_seen(deep_copy(model), some, most) for some in (batch, batch.cut(2)[0]))
        pairs = enumerate(zip(whole.choices, half.choices, strict=False))
        return _Branches(batch, frozenset(n for n, (a, b) in pairs if a.shape == b.shape), whole)

    def change(self, scaled: _ForwardSeen) -> Change | None:
        """What differs with other weights: operations and choices, or numbers alone. None: nothing."""
        changes: tuple[Change, ...] = ("operations", "numbers")
        return next((what for what in changes if self._differs(scaled, what)), None)

    def _differs(self, scaled: _ForwardSeen, what: Change) -> bool:
        return self._path(scaled, what) != self._path(self.first, what)

    def _path(self, seen: _ForwardSeen, what: Change) -> tuple[list[Any], list[_Choice]]:
        rounded = what == "numbers"
        choices = [c for n, c in enumerate(seen.choices) if n in self.shared and c.is_rounded is rounded]
        return seen.numbers if rounded else seen.done, choices

    def limit(self, scaled: Callable[[float], nn.Module]) -> tuple[float, float] | None:
        """The shares on both sides of the first change that is found; None if there is none. `scaled`: the model with
        a share of a draw."""
        for low, high in zip(SHARES, SHARES[1:], strict=False):
            seen = _seen(scaled(high), self.batch, self.first.most)
            if not seen.has_run:
                return None
            if (what := self.change(seen)) is None:
                continue
            for _ in range(BISECTIONS):
                middle = (low + high) / 2
                there = _seen(scaled(middle), self.batch, self.first.most)
                if not there.has_run:
                    return None
                low, high = (low, middle) if self._differs(there, what) else (middle, high)
            return low, high
        return None


def at_branches(model: Model, batches: Sequence[Batch]) -> Iterator[tuple[Model, Batch]]:
    """Copies of `model` with weights on both sides of a change of what it does with one of these batches. None of one
    that takes more than `MOST_OPERATIONS`."""
    followed = [_Branches.of(model, batch) for batch in batches]
    written = frozenset[int]().union(*(branches.first.written for branches in followed))
    large = [b for n, b in enumerate(model.buffers()) if b.numel() > SHARED_NUMEL and n not in written]
    for seed, ((mean, deviation), branches) in enumerate(zip(DRAWS, cycle(followed), strict=False)):
        if not branches.first.has_run:
            continue
        draw = torch.Generator().manual_seed(seed)
        powers = [mean + deviation * torch.randn(p.shape, generator=draw) for p in model.parameters()]
        for share in branches.limit(partial(_scaled, model, powers, large)) or ():
            yield _scaled(model, powers, large, share), branches.batch


def _scaled(model: Model, powers: Sequence[Tensor], large: Sequence[Tensor], share: float) -> Model:
    """A copy whose weights that train are multiplied by exp(share * power). It has the buffers `large` of the model."""
    made = deep_copy(model, {id(buffer): buffer for buffer in large})
    for weight, power in zip(made.parameters(), powers, strict=True):
        if weight.requires_grad and weight.is_floating_point():
            weight.data.mul_((share * power).exp())
    return made
