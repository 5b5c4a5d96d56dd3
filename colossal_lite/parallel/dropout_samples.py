"""Finds the dropouts of a model that do not see samples first, from runs of a small copy.

Note: samples.
A mask follows from the sample that an element is of, and a shape does not always tell it.  A table of relative
positions [2 T, D] has no samples: one mask holds for all.  Where they have been expanded, [2 T, B, D], samples are
second.  So a copy is run with several numbers of samples.  The dim that grows with them is theirs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from functools import partial

import torch
from torch import Tensor, nn

from colossal_lite.data.batch import Batch
from colossal_lite.kernels.philox import SampleDim
from colossal_lite.numerics.functional_dropout import FunctionalDropout, may_draw
from colossal_lite.numerics.random import kind_of
from colossal_lite.parallel.model_loss import ModelLoss
from colossal_lite.parallel.plan_proof import TOKENS, on_a_copy
from colossal_lite.parallel.small_copy import NoCopyError, SmallCopy, table_roles
from colossal_lite.parallel.swap_proof import run_plainly

SAMPLES = (2, 3, 5)
"""Of the runs. Two could agree where a shape follows from values."""
Call = tuple[str, int]
"""A module, and the number of its call in a forward."""


def sample_dims(
    model: nn.Module, criterion: ModelLoss | None, example: Batch | None = None
) -> Mapping[Call, SampleDim]:
    """Where dropouts have samples that are not first, by `kind_of` their module and call. Empty for a model that runs
    neither on words nor on the `example`: there shapes tell."""
    if not may_draw(model) and not any(isinstance(module, nn.Dropout) for module in model.modules()):
        return {}
    try:
        return on_a_copy(model, table_roles(model), partial(_seen, criterion), example=example)
    except NoCopyError:
        return {}


def _seen(criterion: ModelLoss | None, small: SmallCopy) -> Mapping[Call, SampleDim]:
    runs = [_shapes(small, samples, criterion) for samples in SAMPLES]
    found: dict[Call, set[SampleDim]] = {}
    for name, call in runs[0].keys() & runs[1].keys() & runs[2].keys():
        shapes = [run[name, call] for run in runs]
        found.setdefault((kind_of(name), call), set()).add(_dim(shapes))
    return {call: dims.pop() for call, dims in found.items() if len(dims) == 1 and "first" not in dims}


def _dim(shapes: list[torch.Size]) -> SampleDim:
    if len({(len(shape), *shape[:1]) for shape in shapes}) > 1:
        return "first"
    return "second" if tuple(shape[1] for shape in shapes if len(shape) > 1) == SAMPLES else "none"


def _shapes(small: SmallCopy, samples: int, criterion: ModelLoss | None) -> dict[Call, torch.Size]:
    """Shapes of the tensors that dropouts see, in a run on so many samples."""
    batch, mode = small.batch(samples, TOKENS), _Shapes(small.model)
    run_plainly(small.model.train(), batch if criterion is None else criterion.asked(batch), mode)
    return mode.shapes


class _Shapes(FunctionalDropout):
    """Notes the shapes that dropouts see, and drops nothing."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__({module: partial(self._call, name) for name, module in model.named_modules()})
        self.shapes: dict[Call, torch.Size] = {}
        self._calls = Counter[str]()

    def _call(self, name: str) -> Call:
        self._calls[name] += 1
        return name, self._calls[name] - 1

    def drop(self, x: Tensor, p: float) -> Tensor:
        self.shapes[self._caller()()] = x.shape
        return x
