"""Proves a swap of layers with the first batch, for a model that does not run on random words.

Note: the first batch.
A copy of the model is made before the swap.  Before the first forward it runs on a few samples of the real arguments.
So does the copy that the ranks of a small world have.  Labels are random numbers in the shape of its logits.  The form
of the swap is chosen by then, so no other one is tried.  A warning tells of a copy that does not run, or would be too
large.  Each data rank proves with its own samples, and nothing is communicated.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from colossal_lite.config.parallel_schema import TensorConfig
from colossal_lite.data.batch import Batch
from colossal_lite.distributed.mesh import Mesh
from colossal_lite.layers.roles import Role
from colossal_lite.layers.tensor_modes import Form, mode_of
from colossal_lite.parallel.model_loss import ModelLoss
from colossal_lite.parallel.plan_proof import (
    MOST_QUICK_BYTES,
    Trial,
    check_provable,
    legal_forms,
    trial_of,
    warn_of_no_proof,
)
from colossal_lite.parallel.small_copy import NoCopyError, SmallCopy, small_copy
from colossal_lite.parallel.swap_proof import NotRunError

TABLES = ("embedding", "position", "lm_head")
"""Roles whose modules lose rows in a small copy."""


@dataclass(frozen=True)
class FirstSwap:
    """A swap that the first batch proves: the copy in a small world, and the form. `warns`: this rank does. `rows`: of
    the tables of the copy; None if it has all."""

    trial: Trial
    form: Form
    rows: int | None
    warns: bool

    def waits_for(self, samples: int) -> bool:
        """Whether it looks at a forward with so many samples. One that a grid cannot cut is refused elsewhere."""
        return samples >= self._parts

    @property
    def _parts(self) -> int:
        """Parts of the samples in the small world."""
        return TensorConfig(size=self.trial.layout.world_size, mode=self.trial.mode).sample_parts

    def check(self, args: Sequence[Any], kwargs: Mapping[str, Any], samples: int) -> None:
        """Look at the arguments of a forward, on the CPU. Raises UnfitError where the copy of the ranks is another one
        than the plain one, and ValueError without logits. Warns if that does not run."""
        model = self.trial.small.model
        with torch.inference_mode(False):
            given = self._few(args, kwargs, samples)
            try:
                trial = replace(self.trial, given=self.trial.labelled(given))
                if not math.isfinite(loss := trial.truth.run.loss):
                    raise NotRunError(f"its loss is {loss}")
            except NotRunError as error:
                if self.warns:
                    warn_of_no_proof(type(model).__name__, error)
                return
            if found := trial.difference(trial.small.roles, self.form):
                refusal = trial.unfit((self.form,), found)
                refusal.advise()
                raise refusal

    def _few(self, args: Sequence[Any], kwargs: Mapping[str, Any], samples: int) -> Batch:
        """One or two samples for each part of the small world, in the dtype of the copy."""
        count = self._parts * min(2, samples // self._parts)

        def few(value: Any) -> Any:
            if not isinstance(value, Tensor):
                return value
            has_samples = value.dim() and len(value) == samples
            some = value[:count].clone() if has_samples else value.clone()
            return self._in_copy(some)

        given, numbers = tuple(tree_map(few, each) for each in args), torch.arange(count)
        return Batch(given, {n: tree_map(few, x) for n, x in kwargs.items()}, numbers, numbers)

    def _in_copy(self, value: Tensor) -> Tensor:
        """Numbers in float64; ids that tables of the copy have."""
        if value.is_floating_point():
            return value.double()
        is_ids = value.dtype in (torch.int64, torch.int32)
        if self.rows is None or not is_ids or not bool((value >= self.rows).any()):
            return value
        return value.remainder(self.rows)


def form_without_proof(
    model: nn.Module, mesh: Mesh, roles: Mapping[str, Role], sequence_parallel: bool | Literal["auto"],
    regather_inputs: bool, criterion: ModelLoss | None, why: NoCopyError,
) -> tuple[Form, FirstSwap | None]:  # fmt: skip
    """The form of a model that `check_plan` cannot prove, and what proves it later. Call it before the swap. Raises
    ValueError for what must be proven before. Warns if nothing can be proven later either."""
    check_provable(model, roles, why)
    form = legal_forms(mode_of(mesh), sequence_parallel, regather_inputs)[0]
    form = replace(form, sequence_parallel=sequence_parallel is True)
    for keeps_all, has_rows in ((True, True), (True, False), (False, True), (False, False)):
        if criterion is not None:  # the labels of its own loss are not among the arguments
            break
        with suppress(NoCopyError):
            small = _copied(model, roles, keeps_all=keeps_all, has_rows=has_rows)
            trial = trial_of(small, mesh, form, None)
            return form, FirstSwap(trial, form, None if has_rows else small.words, mesh.rank == 0)
    if mesh.rank == 0:
        warn_of_no_proof(type(model).__name__, why)
    return form, None


def _copied(model: nn.Module, roles: Mapping[str, Role], *, keeps_all: bool, has_rows: bool) -> SmallCopy:
    """A small copy, with all rows of tables or with few."""
    kept = {n: r for n, r in roles.items() if not (has_rows and r.name in TABLES)}
    small = small_copy(model, kept, None, MOST_QUICK_BYTES, keeps_all=keeps_all)
    names = {name for name, _ in small.model.named_modules(remove_duplicate=False)}
    return replace(small, roles={n: r for n, r in roles.items() if n in names})
