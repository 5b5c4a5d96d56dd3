"""Finds a number of a model that is no mean over its samples, such as a loss between them.

Note: a loop of one's own may train on a number that forward gives.  Its samples do not meet in the loss, so only a copy
shows whether they meet in forward.  With the gradients beside it, the number of a batch must lie between those of two
halves.  Where is free, as a mean may be over unevenly many labels.  It may also be their sum.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from colossal_lite.data.batch import Batch
from colossal_lite.numerics.generators import drawn_between, generators_kept, states
from colossal_lite.numerics.proof_modes import Plainly
from colossal_lite.parallel.small_copy import deep_copy
from colossal_lite.parallel.swap_proof import NotRunError

BOUND = 1e-6


def gives_coupled_number(model: nn.Module, batch: Batch, halves: Sequence[Batch]) -> bool:
    """Whether `model` gives a number for a batch that is neither mean nor sum of those of its `halves`.

    Raises NotRunError if it does not run on them, or draws random numbers."""
    with generators_kept():
        before = states()
        try:
            whole, first, second = (_numbers(deep_copy(model).train(), each) for each in (batch, *halves))
        except Exception as error:  # of a user's code, whatever it is
            raise NotRunError(f"{type(model).__name__}: {type(error).__name__}") from error
        if drawn_between(before, states()):
            raise NotRunError("it draws random numbers")
    if not len(whole) == len(first) == len(second):
        return False
    return not all(map(_is_mean_or_sum, whole, first, second))


def tensors_given(outputs: Any) -> list[Tensor]:
    """The tensors in what a forward gives, those of its objects included."""
    leaves = [
        each for leaf in tree_leaves(outputs) for each in (leaf, *getattr(leaf, "__dict__", {}).values())
    ]
    return [x for x in leaves if isinstance(x, Tensor)]


def _numbers(model: nn.Module, batch: Batch) -> list[Tensor]:
    """For each number that depends on parameters: its value and gradients in one row."""
    trained = [p for p in model.parameters() if p.requires_grad]
    rows = []
    with torch.enable_grad(), Plainly():
        given = tensors_given(model(*batch.args, **batch.kwargs))
        for number in (x for x in given if not x.dim() and x.requires_grad):
            found = torch.autograd.grad(
                number, trained, retain_graph=True, allow_unused=True, materialize_grads=True
            )
            rows.append(torch.cat([number.detach().reshape(1), *(g.flatten() for g in found)]).double())
    return rows


def _is_mean_or_sum(whole: Tensor, first: Tensor, second: Tensor) -> bool:
    if not bool(torch.isfinite(torch.cat([whole, first, second])).all()):
        return True  # it shows nothing
    size = BOUND * float(torch.stack([whole, first, second]).norm(dim=1).max())
    if float((whole - first - second).norm()) <= size:
        return True
    between = first - second
    share = float((whole - second) @ between / (between @ between).clamp(min=1e-300))
    return float((whole - second - min(1.0, max(0.0, share)) * between).norm()) <= size
