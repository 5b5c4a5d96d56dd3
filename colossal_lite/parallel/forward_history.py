"""Refuses a forward that reads what an earlier one has kept, where a step runs several of them.

Note: what a module keeps.
A module may keep a tensor, as an attribute or in a list, and read it in its next forward.  The state of an RNN is one,
or a memory of the last batch.  One forward a step is exact, as each rank goes on with its own samples.  But
micro-batches would read each other's, and a recomputed block what its own first forward has left.  A log, or a table
that a forward fills, changes no result.  So a small copy is run twice, and results are compared.
Buffers, numbers and frozen parameters have checks of their own (rank_comparison.py, second_forward.py, first_step.py,
forward_hooks.py).  Here they are set back between two forwards.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import NoReturn

from torch import nn

from colossal_lite.data.batch import Batch
from colossal_lite.numerics.random import DropoutStreams
from colossal_lite.parallel.small_copy import deep_copy, numbers_of, set_back
from colossal_lite.parallel.swap_proof import (
    LossOf,
    NotRunError,
    cross_entropy,
    difference_of_runs,
    runs_in_turn,
)
from colossal_lite.transforms.activation_checkpoint import Mode, apply_activation_checkpoint, blocks_of


@dataclass(frozen=True)
class RepeatedForwards:
    """How often a step runs a module on a rank. `splits`: settings that run it on several parts of a batch, as a user
    writes them. `recomputes`: the mode of activation checkpointing."""

    splits: tuple[str, ...] = ()
    recomputes: Mode = "none"

    def __bool__(self) -> bool:
        return bool(self.splits) or self.recomputes != "none"

    def check(
        self, model: nn.Module, parts: Sequence[Batch], where: str, loss_of: LossOf = cross_entropy
    ) -> None:
        """Raises ValueError for a model, a copy as `where` says, whose forward reads what an earlier one has kept. One
        that does not run on `parts` shows nothing."""
        with suppress(NotRunError):
            self._check_splits(model, parts, where, loss_of)
        with suppress(NotRunError):
            self._check_recomputes(model, parts, where, loss_of)

    def _check_splits(self, model: nn.Module, parts: Sequence[Batch], where: str, loss_of: LossOf) -> None:
        if self.splits:
            (alone,) = runs_in_turn(deep_copy(model), parts[-1:], loss_of)
            behind = runs_in_turn(deep_copy(model), parts, loss_of, set_back)[-1]
            if found := difference_of_runs(alone, [behind]):
                self._refuse(
                    model, f"{found} of a part of a batch depends on the part before, on {where}", self.splits
                )

    def _check_recomputes(
        self, model: nn.Module, parts: Sequence[Batch], where: str, loss_of: LossOf
    ) -> None:
        if self.recomputes != "none" and blocks_of(model):
            plain, again = deep_copy(model), deep_copy(model)
            apply_activation_checkpoint(again, self.recomputes, DropoutStreams(0))
            before, numbers = runs_in_turn(plain, parts, loss_of), _numbers(plain)
            if numbers != _numbers(model):  # first_step.py says which
                return
            for expected, got in zip(before, runs_in_turn(again, parts, loss_of), strict=True):
                if found := difference_of_runs(expected, [got]):
                    what = f"{found} is another where blocks are recomputed, on {where}"
                    self._refuse(model, what, [f"activation_checkpoint={self.recomputes!r}"])

    def _refuse(self, model: nn.Module, what: str, settings: Sequence[str]) -> NoReturn:
        kind = type(getattr(model, "inner", model)).__name__
        raise ValueError(
            f"model: a forward of {kind} reads what an earlier one has kept: {what}. {' and '.join(settings)} runs it "
            f"more often in a step than one process does. Legal: gradient_accumulation=1, pipeline.micro_batches=1 and "
            f"activation_checkpoint='none'"
        )


def _numbers(model: nn.Module) -> list[dict[str, int | float]]:
    return [numbers_of(module) for module in model.modules()]
