"""Watches the first step for what a model does beside its tensors: random draws, and numbers that it counts with.

Note: what depends on how often a forward runs.
A number drawn from a global generator depends on the number of ranks.  A module may also count: it keeps a number as an
attribute and changes it in each forward, such as a temperature.  One process changes it once a step, micro-batches and
a recomputation more often.  A number counts if two forwards in turn add the same to it, or multiply it by the same.
Others may change, such as a mean for a log.
Cost: in the first step alone, a look at the generators and attributes around each forward and backward.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from colossal_lite.checks.rank_comparison import splits
from colossal_lite.config.config import Config
from colossal_lite.distributed.communicator import CommError
from colossal_lite.numerics.generators import drawn_between, states

Numbers = Mapping[str, int | float]
"""Numbers that modules keep as attributes, by their paths."""


class FirstStep:
    """The checks of one engine. `is_open`: whether its first step is still to come, or under way."""

    def __init__(self, model: nn.Module, config: Config, device: torch.device) -> None:
        self.is_open = True
        self._model, self._devices = model, [device] if device.type == "cuda" else []
        self._splits, self._recomputes = splits(config), config.activation_checkpoint
        self._seen: dict[int, list[Numbers]] = {}
        """Of each stage: before its first forward, and after each."""
        self._changed: set[str] = set()
        """Numbers that forwards have changed."""

    @contextmanager
    def forward(self, stage: int | None) -> Iterator[None]:
        """Context of a forward. None: of a loop of the user's own, which calls the model as often as in one process.

        Raises ValueError if the forward has drawn from a global generator. And for a number that it counts with, where
        micro-batches make several forwards."""
        if not (self.is_open and self._model.training):
            yield
            return
        before, numbers = states(self._devices), self._numbers()
        try:
            yield
        except CommError:  # ranks that draw may take other paths
            self._refuse_forward_draws(before)
            raise
        self._refuse_forward_draws(before)
        after = self._numbers()
        self._changed |= {name for name, value in after.items() if numbers.get(name, value) != value}
        if stage is not None and self._splits:
            seen = self._seen.setdefault(stage, [numbers])
            seen.append(after)
            if found := _counted(seen[-3:]):
                self._refuse_count(found, f"{' and '.join(self._splits)} would change it several times")

    @contextmanager
    def backward(self) -> Iterator[None]:
        """Context of a backward. Raises ValueError if it has drawn from a global generator. And for a number that a
        recomputation has changed a second time."""
        if not self.is_open:
            yield
            return
        before, numbers = states(self._devices), self._numbers()
        yield
        self._refuse_draws(
            before, "backward", "Noise of a hook on a gradient, or of the backward of an autograd.Function, does so",
            "draw numbers before, and give them to forward, which saves them for backward: engine(x, noise)",
        )  # fmt: skip
        if self._recomputes != "none":
            after = self._numbers()
            found = [name for name in self._changed if after.get(name) != numbers.get(name)]
            if found:
                self._refuse_count(
                    min(found), f"activation_checkpoint={self._recomputes!r} would change it twice"
                )

    def _refuse_forward_draws(self, before: Mapping[str, Any]) -> None:
        self._refuse_draws(
            before, "forward", "torch.rand, bernoulli, dropout in an RNN, or a functional dropout in blocks that "
            "compile='block' compiles do so", "nn.Dropout, torch.nn.functional.dropout, scaled_dot_product_attention "
            "with dropout_p, or a probability of 0. Or draw numbers before, and give them to forward: engine(x, noise)",
        )  # fmt: skip

    def _refuse_draws(self, before: Mapping[str, Any], what: str, such: str, legal: str) -> None:
        """Raises ValueError if a global generator has drawn since these states `before`."""
        if name := drawn_between(before, states(self._devices)):
            raise ValueError(
                f"model: its {what} draws from {name}, so its numbers would depend on the number of ranks. ({such}.) "
                f"Legal: {legal}"
            )

    def _numbers(self) -> Numbers:
        return {
            f"{path}.{name}".removeprefix("."): value
            for path, module in self._model.named_modules()
            for name, value in vars(module).items()
            if type(value) in (int, float)
        }

    def _refuse_count(self, name: str, why: str) -> None:
        raise ValueError(
            f"model: its forward changes {name}, a number, and {why} in a step, where one process changes it once. "
            f"Legal: without that setting; or a number that the training loop sets between steps. A list or dict may "
            f"hold it, if only a log reads it"
        )


def _counted(seen: Sequence[Numbers]) -> str:
    """A number to which two forwards have added the same, or that they have multiplied by the same; "" if none."""
    if len(seen) < 3:
        return ""
    first, second, third = seen
    for name, last in third.items():
        if name in first and name in second and first[name] != second[name]:
            added = math.isclose(second[name] - first[name], last - second[name], rel_tol=1e-9)
            if added or (
                last and math.isclose(second[name] * second[name], first[name] * last, rel_tol=1e-9)
            ):
                return name
    return ""
