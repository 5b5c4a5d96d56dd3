"""Checks functional dropouts at their ends: a probability of one or zero, and evaluation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from colossal_lite.numerics.functional_dropout import FunctionalDropout

DROPS: dict[str, tuple[Callable[..., Tensor], tuple[int, ...]]] = {
    "dropout": (F.dropout, (3, 4, 5)),
    "dropout1d": (F.dropout1d, (3, 4, 5)),
    "dropout2d": (F.dropout2d, (3, 4, 5, 2)),
    "dropout3d": (F.dropout3d, (3, 4, 5, 2, 2)),
    "alpha": (F.alpha_dropout, (3, 4, 5)),
    "feature alpha": (F.feature_alpha_dropout, (3, 4, 5)),
}
ENDS: dict[str, dict[str, Any]] = {
    "all": dict(p=1.0, training=True),
    "all, in place": dict(p=1.0, training=True, inplace=True),
    "nothing": dict(p=0.0, training=True),
    "in evaluation": dict(p=0.5, training=False),
}


@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("name", DROPS)
def test_a_dropout_of_all_or_nothing_is_torchs_own(name: str, end: str) -> None:
    drop, shape = DROPS[name]
    x = torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    expected = drop(x.clone(), **ENDS[end])
    with FunctionalDropout({}):  # without a module whose counters it could take
        found = drop(given := x.clone(), **ENDS[end])
    assert torch.equal(found, expected)
    if "inplace" in ENDS[end]:
        assert torch.equal(given, expected)
