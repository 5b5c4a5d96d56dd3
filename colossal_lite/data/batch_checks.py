"""Checks shapes, dtypes and values of a batch before a step trains on it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from colossal_lite.data.batch_forms import ForwardArguments, check_known, named, parts_of_batch

BATCH_KEYS = ("input_ids", "attention_mask", "position_ids", "labels")
MAIN = ("inputs", "input_ids")
"""What a batch has its ids or samples under, if it is one of these."""
IGNORED = -100
LossOf = Literal["logits", "model", "shown", "own"]
"""What reads the labels. "shown": the model itself, proven on an example. "own": a function of the user's."""
FREE: tuple[LossOf, ...] = ("shown", "own")
"""Labels of any form, of samples too."""

OTHERS = "others with criterion=, a function of yours of the logits and the labels"


@dataclass(frozen=True)
class StatedSizes:
    """Sizes that a model states; None where it states none."""

    vocabulary: int | None = None
    """Ids and labels are below it."""
    tokens: int | None = None
    """The longest sequence, where positions are counted from 0."""
    positions: int | None = None
    """`position_ids` are below it: the rows of a table."""
    causal: bool = True
    """Whether labels are next tokens. They are not where a model states that it is not causal, such as one of masked
    words."""
    takes_ids: bool = False
    """Whether the model looks its inputs up in a table, and takes no floating point."""


def check_batch(
    batch: Any, sizes: StatedSizes = StatedSizes(), forward: ForwardArguments | None = None,  # noqa: B008 (frozen)
    loss: LossOf = "logits",
) -> None:  # fmt: skip
    """Raises ValueError with path, value, rule and legal values if `batch` is no batch to train on.

    A batch is (inputs, labels), ((x, y), labels), or a mapping. That has labels, and arguments that `forward` takes by
    name; `BATCH_KEYS` without one. Every entry has the samples first. Ids are (B, T) in int64 or int32, and fit the
    `sizes` that the model states. Beside them masks and positions are (B, T). `loss`: what reads the labels, which
    decides what they may be. All checks of values wait for the device once.
    """
    args, kwargs, labels = parts_of_batch(batch)
    _check_tensors(named(args, {}))
    if forward is not None:
        forward.check(args, kwargs)
        if loss not in ("model", "shown"):
            forward.check_decoder(kwargs)
    elif not args:
        check_known(kwargs, BATCH_KEYS)
    entries = named(args, kwargs) | {"labels": labels}
    _check_tensors(entries)
    if len(entries) == 1:
        raise ValueError("batch: labels alone; legal: the inputs beside them")
    rules = _Rules(entries, sizes, loss, makes_tokens=forward is not None and forward.makes_tokens)
    rules.check_forms()
    found = [rule for path, x in entries.items() for rule in rules.of_values(path, x)]
    broken = torch.stack([broken for broken, _ in found]).tolist()
    if faults := [describe() for (_, describe), bad in zip(found, broken, strict=True) if bad]:
        raise ValueError("; ".join(faults))


def _check_tensors(entries: Mapping[str, Any]) -> None:
    for path, x in entries.items():
        if not isinstance(x, Tensor):
            raise ValueError(f"{path}: {type(x).__name__}; legal: a torch.Tensor")


def valid_labels(labels: Tensor) -> Tensor:
    """How many labels count, 0-d: all numbers, and of whole ones those that are not to be ignored."""
    return torch.tensor(labels.numel()) if labels.is_floating_point() else (labels != IGNORED).sum()


class _Rules:
    """The rules for the tensors of one batch."""

    def __init__(
        self, entries: Mapping[str, Tensor], sizes: StatedSizes, loss: LossOf, *, makes_tokens: bool
    ) -> None:
        self.entries, self.sizes, self.loss, self.makes_tokens = entries, sizes, loss, makes_tokens
        self.main = next((name for name in MAIN if name in entries), next(iter(entries)))
        self.inputs = entries[self.main]
        self.has_ids = self.main in MAIN and not self.inputs.is_floating_point()
        self.is_alone = not [name for name in entries if name not in (*BATCH_KEYS, "inputs")]

    def check_forms(self) -> None:
        """Checks shapes and dtypes, which need no values of the device."""
        inputs, sizes = self.inputs, self.sizes
        ids = self.has_ids and inputs.ndim == 2 and "position_ids" not in self.entries
        if sizes.tokens is not None and ids and inputs.shape[1] > sizes.tokens:
            rule = f"at most {sizes.tokens} tokens, which the model states"
            raise ValueError(f"{self.main}: shape {tuple(inputs.shape)}; legal: {rule}")
        if sizes.takes_ids and self.main in MAIN and not self.has_ids:
            raise ValueError(
                f"{self.main}: dtype {inputs.dtype}; legal: torch.int64, torch.int32 (the model takes ids)"
            )
        for path, x in self.entries.items():
            legal = self._dtypes(path)
            if legal and x.dtype not in legal:
                more = f"; {OTHERS}" if path == "labels" and x.is_floating_point() else ""
                raise ValueError(f"{path}: dtype {x.dtype}; legal: {', '.join(map(str, legal))}{more}")
            is_ids = x is inputs and self.has_ids
            if x.ndim == 0 or (is_ids and x.ndim != 2):
                rule = "(batch, tokens)" if is_ids else "batch first"
                raise ValueError(f"{path}: shape {tuple(x.shape)}; legal: {rule}")
            if rule := self._broken_shape(path, x):
                raise ValueError(f"{path}: shape {tuple(x.shape)}; legal: {rule}")

    def _dtypes(self, path: str) -> tuple[torch.dtype, ...]:
        """The legal dtypes of an entry; empty: any."""
        if path == "labels":
            is_number = self.loss in FREE or self.inputs.is_floating_point()
            return (torch.int64, *_FLOATS) if is_number else (torch.int64,)
        known = {
            "attention_mask": (torch.bool, torch.int64, torch.int32, *_FLOATS),
            "inputs": (torch.int64, torch.int32, *_FLOATS),
            "input_ids": (torch.int64, torch.int32),
            "position_ids": (torch.int64, torch.int32),
        }
        return known.get(path, ())

    def _broken_shape(self, path: str, x: Tensor) -> str:
        """The rule that the shape of an entry breaks, or ""."""
        inputs = self.inputs
        of_ids = f"the shape of the inputs, {tuple(inputs.shape)}"
        if x.shape[0] != inputs.shape[0]:
            return of_ids if self.has_ids and path in BATCH_KEYS[1:3] else f"a batch of {inputs.shape[0]}"
        if not self.has_ids or x.shape == inputs.shape:
            return ""
        if path in BATCH_KEYS:
            if path != "labels":
                return of_ids
            if self.loss in FREE or self.makes_tokens or not self.is_alone:
                return ""
            one = f"one label a sample, ({len(x)},)"
            if self.loss == "logits":
                return "" if x.ndim == 1 else f"{of_ids}, {one}; {OTHERS}"
            return (
                f"{of_ids}. Others, such as {one}: with criterion=, a function of the logits and the labels"
            )
        return ""

    def of_values(self, path: str, x: Tensor) -> Iterator[_Rule]:
        """What the values of an entry must be."""
        is_known = path in (*BATCH_KEYS, "inputs")

        def first(bad: Tensor) -> str:
            where = tuple(bad.nonzero()[0].tolist())
            return f"{path}[{', '.join(map(str, where))}]: {x[where].item()}"

        if x.is_floating_point():
            bad = ~x.isfinite() if is_known else x.isnan()  # a mask of the user's own may be infinite
            yield bad.any(), lambda: f"{first(bad)}; legal: {'finite numbers' if is_known else 'numbers'}"
            return
        if path == "attention_mask" or not is_known:
            return
        bound, what = self._bound(path, x)
        if bound is None:
            outside, legal = x < 0, "0 or more"
        else:
            outside, legal = (x < 0) | (x >= bound), f"0 to {bound - 1} ({what})"
        if path == "labels":
            outside, legal = outside & (x != IGNORED), f"{legal}, or {IGNORED} for a position to be ignored"
        yield outside.any(), lambda: f"{first(outside)}; legal: {legal}"
        if path == "labels" and self.sizes.causal and self.has_ids and not self.makes_tokens:
            yield from self._unshifted(x)

    def _bound(self, path: str, x: Tensor) -> tuple[int | None, str]:
        """What the numbers of an entry are below, and its name."""
        if path == "position_ids":
            return self.sizes.positions, "the positions that the model states"
        are_tokens = (
            path != "labels" or x.shape == self.inputs.shape or (self.loss not in FREE and x.ndim == 2)
        )
        return (self.sizes.vocabulary if are_tokens else None), "the vocabulary"

    def _unshifted(self, x: Tensor) -> Iterator[_Rule]:
        """Next tokens equal the inputs only along a run of one token, and such a run is no fault."""
        inputs = self.inputs
        if x.shape != inputs.shape:
            return
        counted = x != IGNORED
        unshifted = counted[:, :-1] & (inputs[:, 1:] != inputs[:, :-1])
        rule = (
            'legal: already shifted, labels[:, t] = inputs[:, t + 1]; labels="unshifted" of run.batches, cl.fit or '
            "context.dataloader shifts those of Hugging Face; by hand: "
            "torch.nn.functional.pad(labels[:, 1:], (0, 1), value=-100). A model of masked words says causal=False in "
            "its config, and has no such rule"
        )
        equal = (~counted | (x == inputs)).all() & unshifted.any()
        yield equal, lambda: f"labels: equal to the inputs; {rule}"


_FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
_Rule = tuple[Tensor, Callable[[], str]]
"""whether the rule is broken, as a 0-d bool on the device of the batch, and its message"""
