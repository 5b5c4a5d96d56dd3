"""Checks shapes, dtypes and values of a batch before a step trains on it."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator, Mapping, Sized
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

BATCH_KEYS = ("input_ids", "attention_mask", "position_ids", "labels")
IGNORED = -100


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


def check_batch(batch: Any, sizes: StatedSizes = StatedSizes()) -> None:  # noqa: B008 (frozen)
    """Raises ValueError with path, value, rule and legal values if `batch` is no batch to train on.

    A batch is (inputs, labels), or a mapping of `BATCH_KEYS` with at least input_ids and labels. Inputs are ids
    (B, T) in int64 or int32, or floating point (B, ...). Beside ids every entry is (B, T), labels are int64,
    and all fits the `sizes` that the model states. All checks of values wait for the device once.
    """
    entries = _entries(batch)
    inputs, *_ = entries.values()
    given = "position_ids" in entries or inputs.is_floating_point() or inputs.ndim != 2
    if sizes.tokens is not None and not given and inputs.shape[1] > sizes.tokens:
        rule = f"at most {sizes.tokens} tokens, which the model states"
        raise ValueError(f"{next(iter(entries))}: shape {tuple(inputs.shape)}; legal: {rule}")
    if sizes.takes_ids and inputs.is_floating_point():
        raise ValueError(
            f"{next(iter(entries))}: dtype {inputs.dtype}; legal: torch.int64, torch.int32 (the model takes ids)"
        )
    for path, x in entries.items():
        _check_form(path, x, inputs)
    rules = [rule for path, x in entries.items() for rule in _value_rules(path, x, inputs, sizes)]
    broken = torch.stack([broken for broken, _ in rules]).tolist()
    if faults := [describe() for (_, describe), bad in zip(rules, broken, strict=True) if bad]:
        raise ValueError("; ".join(faults))


def _entries(batch: Any) -> dict[str, Tensor]:
    """The tensors of a batch by name, the inputs first."""
    if isinstance(batch, Mapping):
        faults = [f"unknown key {key!r}{_nearest(key)}" for key in batch if key not in BATCH_KEYS]
        faults += [f"no key {key!r}" for key in ("input_ids", "labels") if key not in batch]
        if faults:
            raise ValueError(f"batch: {', '.join(faults)}; legal: {', '.join(BATCH_KEYS)}")
        entries = {key: batch[key] for key in BATCH_KEYS if key in batch}
    elif isinstance(batch, (tuple, list)) and len(batch) == 2:
        entries = {"inputs": batch[0], "labels": batch[1]}
    else:
        what = f"{type(batch).__name__} of {len(batch)}" if isinstance(batch, Sized) else type(batch).__name__
        raise ValueError(f"batch: {what}; legal: (inputs, labels), or a dict of {', '.join(BATCH_KEYS)}")
    for path, x in entries.items():
        if not isinstance(x, Tensor):
            raise ValueError(f"{path}: {type(x).__name__}; legal: a torch.Tensor")
    return entries


def _nearest(key: object) -> str:
    if key == "token_type_ids":
        return " (tokenizer(..., return_token_type_ids=False) gives none)"
    near = difflib.get_close_matches(str(key), BATCH_KEYS, 1)
    return f" (did you mean {near[0]!r}?)" if near else ""


def _check_form(path: str, x: Tensor, inputs: Tensor) -> None:
    """Checks shapes and dtypes, which need no values of the device."""
    ids = not inputs.is_floating_point()
    dtypes: dict[str, tuple[torch.dtype, ...]] = {
        "labels": (torch.int64,) if ids else (torch.int64, *_FLOATS),
        "attention_mask": (torch.bool, torch.int64, torch.int32, *_FLOATS),
        "inputs": (torch.int64, torch.int32, *_FLOATS),
    }
    legal = dtypes.get(path, (torch.int64, torch.int32))
    if x.dtype not in legal:
        raise ValueError(f"{path}: dtype {x.dtype}; legal: {', '.join(map(str, legal))}")
    if x.ndim == 0 or (ids and inputs.ndim != 2 and x is inputs):
        rule = "(batch, tokens)" if ids else "batch first"
        raise ValueError(f"{path}: shape {tuple(x.shape)}; legal: {rule}")
    if ids and x.shape != inputs.shape or x.shape[0] != inputs.shape[0]:
        rule = f"the shape of the inputs, {tuple(inputs.shape)}" if ids else f"a batch of {inputs.shape[0]}"
        raise ValueError(f"{path}: shape {tuple(x.shape)}; legal: {rule}")


_FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
_Rule = tuple[Tensor, Callable[[], str]]
"""whether the rule is broken, as a 0-d bool on the device of the batch, and its message"""


def _value_rules(path: str, x: Tensor, inputs: Tensor, sizes: StatedSizes) -> Iterator[_Rule]:
    bound, what = sizes.vocabulary, "the vocabulary"
    if path == "position_ids":
        bound, what = sizes.positions, "the positions that the model states"

    def first(bad: Tensor) -> str:
        where = tuple(bad.nonzero()[0].tolist())
        return f"{path}[{', '.join(map(str, where))}]: {x[where].item()}"

    if x.is_floating_point():
        bad = ~x.isfinite()
        yield bad.any(), lambda: f"{first(bad)}; legal: finite numbers"
        return
    if path == "attention_mask":
        return
    if bound is None:
        outside, legal = x < 0, "0 or more"
    else:
        outside, legal = (x < 0) | (x >= bound), f"0 to {bound - 1} ({what})"
    if path == "labels":
        outside, legal = outside & (x != IGNORED), f"{legal}, or {IGNORED} for a position to be ignored"
    yield outside.any(), lambda: f"{first(outside)}; legal: {legal}"
    if path == "labels" and sizes.causal and not inputs.is_floating_point():
        # Next tokens equal the inputs only along a run of one token, and such a run is no fault.
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
