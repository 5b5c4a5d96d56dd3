"""Checks functional dropouts at their ends, a probability of one or zero and evaluation, and in place."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from colossal_lite.kernels import Rows
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


class Dropping(nn.Module):
    def __init__(self, drop: Callable[..., Tensor], *, inplace: bool) -> None:
        super().__init__()
        self.drop, self.inplace = drop, inplace

    def forward(self, x: Tensor) -> Tensor:
        return self.drop(x, 0.3, True, self.inplace)


def dropping(name: str, samples: int, *, inplace: bool) -> tuple[Tensor, Tensor, Tensor]:
    """An x as it was, x behind a dropout of 0.3, and what that gives."""
    drop, shape = DROPS[name]
    x = torch.randn(samples, *shape[1:], dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    module = Dropping(drop, inplace=inplace)
    rows = Rows((1, 2), 0, torch.arange(samples), torch.arange(shape[1]))
    before = x.clone()
    with FunctionalDropout({module: lambda: rows}):
        return before, x, module(x)


@pytest.mark.parametrize("name", DROPS)
def test_a_dropout_in_place_changes_its_input_and_no_other_does(name: str) -> None:
    before, x, apart = dropping(name, 3, inplace=False)
    assert torch.equal(x, before) and not torch.equal(apart, before)
    _, x, found = dropping(name, 3, inplace=True)
    assert torch.equal(x, apart) and torch.equal(found, apart)


@pytest.mark.parametrize("name", ["alpha", "feature alpha"])
def test_an_alpha_dropout_keeps_mean_and_variance(name: str) -> None:
    _, _, y = dropping(name, 20_000, inplace=False)
    assert abs(float(y.mean())) < 0.02 and abs(float(y.var()) - 1.0) < 0.02
