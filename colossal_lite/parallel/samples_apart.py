"""Refuses a model whose samples see each other, where a batch is cut.

Note: looks at batches and their halves.
Losses and gradients of two halves must add up to those of the whole, on a small copy and on random words.  A model that
does not run on these is looked at with its first batch.  One that reads values of tensors is looked at with more words,
in its first batches, and in those whose number is a power of two.  It is also looked at with weights near a change of
its branch (parallel/value_branches.py).  Nothing is communicated.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from colossal_lite.data.batch import Batch, take_rows
from colossal_lite.data.loader import apply_to_tensors
from colossal_lite.numerics.generators import generators_kept
from colossal_lite.numerics.linearity import SEED
from colossal_lite.parallel.copy_batches import words
from colossal_lite.parallel.coupled_numbers import gives_coupled_number, tensors_given
from colossal_lite.parallel.forward_history import RepeatedForwards
from colossal_lite.parallel.plan_proof import MOST_QUICK_BYTES, TOKENS, is_our_own, on_a_copy
from colossal_lite.parallel.small_copy import (
    NoCopyError,
    SmallCopy,
    deep_copy,
    small_copy,
    table_roles,
)
from colossal_lite.parallel.swap_proof import (
    NotRunError,
    difference_of_parts,
    sum_of_squares,
)
from colossal_lite.parallel.value_branches import at_branches, reads_values

FEW_SAMPLES = 4
OTHER_WEIGHTS = "whose weights are near a change of its branch"
PAIRS = 4
"""Pairs of samples with which branches are looked for."""
MOST_DRAWS, MOST_BATCHES = 8, 4
"""Draws of words, and first batches, with which a model is looked at that reads values of tensors. In each it may take
other branches."""


@dataclass(frozen=True)
class FirstBatch:
    """Compares batches of a model with their halves: the first one, where it does not run on random words. Later ones
    too, where it reads values of tensors."""

    model: PerSample | None
    """Of a copy, float64 on the CPU; None if nothing is compared."""
    cuts: tuple[str, ...]
    repeats: RepeatedForwards = field(default_factory=RepeatedForwards)
    refusal: str = ""
    """Why the engine cannot start a backward from a sum over labels; "" if it can."""
    numbers_alone: bool = False
    """Whether random words have shown all but the numbers of a forward with labels."""
    _forwards: list[int] = field(default_factory=lambda: [0], compare=False)
    """How many it was asked for."""

    def waits_for(self, samples: int) -> bool:
        """Whether it looks at a forward with so many samples: the first ones, and those whose number is a power of two.
        An evaluation cuts no batch."""
        if self.model is None or not torch.is_grad_enabled() or samples == 0:
            return False
        self._forwards[0] += 1
        return self._forwards[0] <= MOST_BATCHES or self._forwards[0].bit_count() == 1

    def check(self, args: Sequence[Any], kwargs: Mapping[str, Any], samples: int) -> bool:
        """As `check_samples_apart`, with the first of the `samples` of a forward's arguments, on the CPU. Then with
        rows for further ranks as well. A copy that does not run on them shows nothing. Returns whether it looks at
        later forwards too."""
        assert self.model is not None
        if self.numbers_alone:
            return False
        size, is_first = min(samples, FEW_SAMPLES), self._forwards[0] == 1
        few = _rows(args, kwargs, samples, size)
        if self.repeats and not size % 2 and is_first:
            with suppress(NotRunError):
                self.repeats.check(self.model, few.cut(2), "a copy", sum_of_squares)
        if size > 1:
            with suppress(NotRunError):
                self._check_parts(few, 2)
        if size == 1 or is_first:
            ranks = max(2, FEW_SAMPLES // size)
            with suppress(NotRunError):
                self._check_parts(_with_more_rows(args, kwargs, samples, size, ranks), ranks)
        if self.cuts and is_first and size > 1:
            for near, _ in at_branches(self.model, [few]):
                with suppress(NotRunError):
                    replace(self, model=near)._check_parts(few, 2, f"a copy {OTHER_WEIGHTS}")
        return bool(self.cuts) and (not is_first or reads_values(self.model, few))

    def check_numbers(self, args: Sequence[Any], kwargs: Mapping[str, Any], samples: int) -> None:
        """As `check`, for a loop of one's own, which may train on a number that forward gives. Raises ValueError for
        one between samples."""
        assert self.model is not None
        few = min(samples, FEW_SAMPLES)
        self._check_halves(_rows(args, kwargs, samples, few))
        self._check_halves(_with_more_rows(args, kwargs, samples, few, max(2, FEW_SAMPLES // few)))

    def _check_halves(self, batch: Batch) -> None:
        assert self.model is not None
        model = self.model.inner
        with suppress(NotRunError):
            if self.cuts and batch.size > 1 and gives_coupled_number(model, batch, batch.cut(2)):
                raise ValueError(
                    f"model: {type(model).__name__} gives a number that is no mean over its samples. On a copy, that "
                    f"of a batch is not one of its halves. {' and '.join(self.cuts)} would run it on parts of a batch, "
                    f"with another result. Legal: outputs of samples, and a loss of engine.all_samples(outputs); "
                    f"a mean; .detach() of a mere log"
                )

    def _check_parts(self, batch: Batch, number: int, where: str = "a copy") -> None:
        assert self.model is not None
        parts, model, kind = batch.cut(number), self.model, type(self.model.inner).__name__
        if not self.cuts or not difference_of_parts(model, batch, parts, sum_of_squares, SEED):
            return
        if difference_of_parts(model, batch, parts, sum_of_squares):
            model = PerSample(model.inner, fixed_outputs(model.inner, batch, parts[0]))
            if found := difference_of_parts(model, batch, parts, sum_of_squares):
                _refuse_mixing(kind, where, found.removeprefix("inner."), self.cuts)
        if found := difference_of_parts(model, batch, parts, sum_of_squares, SEED):
            raise ValueError(_not_linear(kind, found.removeprefix("inner.")))


def _rows(args: Sequence[Any], kwargs: Mapping[str, Any], samples: int, count: int) -> Batch:
    """The first `count` of the `samples` rows of the arguments of a forward, on the CPU and in float64."""

    def plain(x: Tensor) -> Tensor:
        return x.detach().double() if x.is_floating_point() else x.detach()

    def few(value: Any) -> Any:
        return apply_to_tensors(take_rows(value, samples, lambda rows: rows[:count]), plain)

    numbers = torch.arange(count)
    return Batch(tuple(map(few, args)), {n: few(x) for n, x in kwargs.items()}, numbers, numbers)


def _with_more_rows(
    args: Sequence[Any], kwargs: Mapping[str, Any], samples: int, count: int, ranks: int
) -> Batch:
    """As `_rows`, with as many for each of further `ranks`: the same ones rolled, where rows have several values."""

    def more(rows: Any) -> Any:
        some = rows[:count]
        if not isinstance(some, Tensor):
            return some * ranks
        return torch.cat([some.roll(rank, -1) if some.dim() > 1 else some for rank in range(ranks)])

    def for_all(value: Any) -> Any:
        return take_rows(value, samples, more)

    total = ranks * count
    return _rows([for_all(x) for x in args], {n: for_all(x) for n, x in kwargs.items()}, total, total)


class PerSample(nn.Module):
    """Gives a number [samples] for each sample: a random projection of what a model gives for it. `fixed`: outputs
    that are not of samples, by their numbers."""

    def __init__(self, inner: nn.Module, fixed: Collection[int] = ()) -> None:
        super().__init__()
        self.inner, self._fixed = inner, fixed

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        outputs = self.inner(*args, **kwargs)
        rows = [x for i, x in enumerate(_rows_of(outputs)) if i not in self._fixed]
        generator = torch.Generator().manual_seed(0)
        found = torch.zeros(len(rows[0]), dtype=torch.float64)
        for x in (each for each in rows if len(each) == len(found)):
            flat = x.reshape(len(x), -1).double()
            found = found + flat @ torch.randn(flat.shape[1], generator=generator, dtype=torch.float64)
        return found


def _rows_of(outputs: Any) -> list[Tensor]:
    """The tensors of floating point in what a model gives, less numbers."""
    return [x for x in tensors_given(outputs) if x.dim() and x.is_floating_point()]


def fixed_outputs(model: nn.Module, batch: Batch, part: Batch) -> frozenset[int]:
    """The numbers of outputs that have no more rows for more samples: a `part` of a batch, and the batch. One is a
    parameter, another the last state of an RNN, with the samples second. They may have as many rows as the part has
    samples. None if all are such, or the model does not run."""
    with generators_kept(), torch.no_grad(), suppress(Exception):
        whole, some = (
            [x.shape for x in _rows_of(deep_copy(model).train()(*each.args, **each.kwargs))]
            for each in (batch, part)
        )
        pairs = enumerate(zip(whole, some, strict=True))
        fixed = frozenset(i for i, (a, b) in pairs if a == b or a[0] * part.size != b[0] * batch.size)
        return fixed if len(fixed) < len(whole) else frozenset()
    return frozenset()


def check_samples_apart(
    model: nn.Module, cuts: Sequence[str], repeats: RepeatedForwards
) -> FirstBatch | None:
    """Raises ValueError for a model whose samples see each other, where `cuts` (as a user writes them) split a batch.
    On a quick small copy, losses and gradients of two halves must add up to those of the whole. Nothing is
    communicated. So must they if backward starts from another number. If not, a model is refused. Without cuts it is
    refused only in steps whose loss the engine computes. As for `repeats`, no forward may read what another has kept.

    A model that does not run on random words is looked at with its first batch, by the result. So is one that reads
    values of tensors. None: no such model, or too large a one."""
    if is_our_own(model, {}):
        return None

    def tried(small: SmallCopy) -> tuple[str, str, bool]:
        found, mixed, reads = "", "", False
        for number, batch in enumerate(_draws(small, more=bool(cuts))):
            reads = number > 0
            parts = batch.cut(2) if cuts else (batch,)
            found = difference_of_parts(small.model, batch, parts, seed=SEED)
            mixed = difference_of_parts(small.model, batch, parts) if found and cuts else ""
            if found:
                break
        if cuts and not found and (mixed := _mixed_at_branches(small)):
            _refuse_mixing(type(model).__name__, f"a small copy {OTHER_WEIGHTS}", mixed, cuts)
        if repeats and not mixed:
            repeats.check(small.model, batch.cut(2), "a small copy")
        return found, mixed, reads

    try:
        found, mixed, reads = on_a_copy(model, table_roles(model), tried, is_quick=True)
    except NoCopyError:
        if not (cuts or repeats):
            return None
        copied = _quick_copy(model)
        return None if copied is None else FirstBatch(copied, tuple(cuts), repeats)
    if mixed:
        _refuse_mixing(type(model).__name__, "a small copy", mixed, cuts)
    if not found:
        copied = _quick_copy(model) if cuts else None
        return None if copied is None else FirstBatch(copied, tuple(cuts), numbers_alone=not reads)
    refusal = _not_linear(type(model).__name__, found)
    if cuts:
        raise ValueError(refusal)
    return FirstBatch(None, (), refusal=refusal)


def _mixed_at_branches(small: SmallCopy) -> str:
    """What differs between a batch and its halves, with weights at which the copy takes another branch; or ""."""
    # Each half has one sample twice: halves of different samples have more words in common.
    pairs = [words(2, small.tokens or TOKENS, small.words, (), seed) for seed in range(PAIRS)]
    twice = [
        Batch((x.inputs.repeat_interleave(2, 0),), {}, x.labels.repeat_interleave(2, 0), torch.arange(4))
        for x in pairs
    ]
    for near, batch in at_branches(small.model, twice):
        with suppress(NotRunError):
            if found := difference_of_parts(near, batch, batch.cut(2)):
                return found
    return ""


def _draws(small: SmallCopy, *, more: bool) -> Iterator[Batch]:
    """Random words. `more`: so many of them, where the model reads values."""
    for seed in range(1, MOST_DRAWS + 1):
        batch = words(4, small.tokens or TOKENS, small.words, (), seed)
        yield batch
        if not more or not reads_values(small.model, batch):
            return


def _quick_copy(model: nn.Module) -> PerSample | None:
    """A copy of the model as it is, in float64 on the CPU; None if it is too large."""
    for keeps_all in (True, False):
        with suppress(NoCopyError):
            return PerSample(small_copy(model, {}, None, MOST_QUICK_BYTES, keeps_all=keeps_all).model)
    return None


def _not_linear(kind: str, found: str) -> str:
    return (
        f"model: the backward of {kind} is not linear, as the gradient of {found} shows at {SEED:g} times the loss. "
        f"Backward starts from a sum over the labels of a part of the batch. So the result would be another than in "
        f"one process. Legal: hooks and autograd.Functions that are linear in the gradient. Or engine.backward(loss) "
        f"on one rank without gradient_accumulation, which starts from the loss itself"
    )


def _refuse_mixing(kind: str, where: str, found: str, cuts: Sequence[str]) -> NoReturn:
    raise ValueError(
        f"model: samples of {kind} see each other. On {where}, {found} of a batch is not that of its halves together. "
        f"{' and '.join(cuts)} would run it on parts of a batch, with another result. Legal: inputs that have "
        f"samples first, code that acts on each sample alone, or the whole batch at once"
    )
