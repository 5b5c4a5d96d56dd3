"""Reads the batch of a step into one form and cuts it into micro-batches.

Note: a batch is `(inputs, labels)` or a mapping, as a tokenizer or collator gives it.  Inputs are one argument of the
model, or a tuple of them.  The mapping has `labels`, and arguments of the model by name.  All of it is batch first,
holds full sequences, and is the same on all ranks of one data coordinate.  Labels never reach the model.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, is_dataclass, replace
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from colossal_lite.data.batch_forms import named, parts_of_batch
from colossal_lite.memory.transfers import sent


@dataclass(frozen=True)
class Batch:
    """Arguments for the model and the labels. `samples` [B] indexes the step's global batch. `positions` [T] indexes
    the whole sequence; None: all of it is here. `tokens`: of the whole sequence without its padding, None if it has
    none."""

    args: tuple[Tensor, ...]
    kwargs: Mapping[str, Tensor]
    labels: Tensor
    samples: Tensor
    positions: Tensor | None = None
    tokens: int | None = None

    @property
    def size(self) -> int:
        return self.labels.shape[0]

    @property
    def inputs(self) -> Tensor:
        return first_input(self.args, self.kwargs)

    @property
    def arguments(self) -> dict[str, Any]:
        """The model's arguments by name."""
        return named(self.args, self.kwargs)

    @property
    def tensors(self) -> dict[str, Tensor]:
        """The model's arguments and the labels by name."""
        return self.arguments | {"labels": self.labels}

    @property
    def token_positions(self) -> Tensor:
        """Global positions [T] of the tokens here; inputs without a sequence dimension, such as vectors, have one."""
        if self.positions is not None:
            return self.positions
        vectors = self.inputs.dim() == 2 and self.inputs.is_floating_point()
        has_tokens = self.inputs.dim() > 1 and not vectors
        return torch.arange(self.inputs.shape[1] if has_tokens else 1, device=self.inputs.device)

    @contextmanager
    def unchanged(self) -> Iterator[None]:
        """Around a forward. Raises ValueError if it has changed a tensor of the batch in place."""
        tensors = {n: x for n, x in self.tensors.items() if isinstance(x, Tensor) and not x.is_inference()}
        before = {name: x._version for name, x in tensors.items()}
        yield
        if changed := [name for name, x in tensors.items() if x._version != before[name]]:
            raise ValueError(
                f"model: its forward changes {changed[0]} of the batch in place. Whoever reads the batch again has "
                f"another; legal: a new tensor, such as x = x + 1 in the place of x += 1"
            )

    def without_padding(self, x: Tensor) -> Tensor:
        """An x [B, T, ...] of the tokens here, less those that are padding."""
        if self.tokens is None:
            return x
        return x[:, : self.tokens] if self.positions is None else x[:, self.positions < self.tokens]

    def with_one_row(self) -> Batch:
        """This batch; or one row of ones in the place of no rows. A model that is not ours may fail on zero samples.
        The rank must still take part in gathers and sums. Whoever asks drops the outputs of that row."""

        def padded(rows: Any) -> Any:
            if not isinstance(rows, Tensor) or len(rows):
                return rows
            return rows.new_ones((1, *rows.shape[1:]))

        return replace(
            self,
            args=tuple(take_rows(value, 0, padded) for value in self.args),
            kwargs={name: take_rows(value, 0, padded) for name, value in self.kwargs.items()},
            labels=padded(self.labels),
            samples=padded(self.samples),
        )

    def cut(self, parts: int) -> tuple[Batch, ...]:
        """`parts` consecutive micro-batches whose sizes differ by one at most, larger ones first; some may be empty. An
        argument without a row for each sample, such as a number, is in all of them."""
        if parts == 1:
            return (self,)

        labels, samples = self.labels.tensor_split(parts), self.samples.tensor_split(parts)
        stops = list(accumulate(len(part) for part in samples))

        def piece(part: int, value: Any) -> Any:
            rows = slice(stops[part] - len(samples[part]), stops[part])
            return take_rows(value, self.size, lambda whole: whole[rows])

        return tuple(
            Batch(
                tuple(piece(part, value) for value in self.args),
                {name: piece(part, value) for name, value in self.kwargs.items()},
                labels[part],
                samples[part],
            )
            for part in range(parts)
        )


def take_rows(value: Any, samples: int, take: Callable[[Any], Any]) -> Any:
    """An argument of a forward, with `take` of all in it that has a row for each of the `samples`. These are tensors,
    also in lists, tuples, mappings and dataclasses, and lists of one entry for each. All else stays."""

    def is_rows(each: Any) -> bool:
        return isinstance(each, Tensor) and each.dim() > 0 and len(each) == samples

    match value:
        case Tensor():
            return take(value) if is_rows(value) else value
        case Mapping():
            return {key: take_rows(each, samples, take) for key, each in value.items()}
        case list() if len(value) == samples:
            return take(value)
        case tuple() if len(value) == samples and not any(map(is_rows, value)):
            return take(value)
        case list():
            return [take_rows(each, samples, take) for each in value]
        case tuple():
            rows = [take_rows(each, samples, take) for each in value]
            return type(value)(*rows) if hasattr(value, "_fields") else tuple(rows)
        case _ if is_dataclass(value) and not isinstance(value, type):
            part = copy.copy(value)
            for each in fields(value):
                object.__setattr__(part, each.name, take_rows(getattr(value, each.name), samples, take))
            return part
    return value


def first_input(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tensor:
    """The argument that has a row for each sample. It is the first positional one, `input_ids`, or the first tensor by
    name. Raises ValueError if there is no tensor."""
    for given in (*args[:1], kwargs.get("input_ids"), *kwargs.values()):
        if isinstance(given, Tensor):
            return given
    raise ValueError(
        f"batch: the model is called with {len(args)} positional arguments and the names {sorted(kwargs)}, and the "
        f"first is no tensor. Legal: a tensor [B, ...] first, as input_ids or by another name"
    )


def read_batch(batch: Any, *, device: torch.device, first_sample: int = 0) -> Batch:
    """The batch on `device`; its first sample is number `first_sample` of the step's global batch.

    `check_batch` has checked its form.
    """
    args, kwargs, labels = parts_of_batch(batch)
    samples = torch.arange(first_sample, first_sample + labels.shape[0], device=device)
    rest = {name: sent(tensor, device) for name, tensor in kwargs.items()}
    return Batch(tuple(sent(tensor, device) for tensor in args), rest, sent(labels, device), samples)
