"""Checks attention that drops elements against torch's own: what it computes around the dropout."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from colossal_lite.numerics.functional_dropout import FunctionalDropout

TOKENS = 6


class Attention(nn.Module):
    def forward(self, heads: list[Tensor], p: float, how: dict[str, Any]) -> Tensor:
        return F.scaled_dot_product_attention(*heads, dropout_p=p, **how)


def drawn(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(len(shape)))


HOW: dict[str, Callable[[], dict[str, Any]]] = {
    "whole": dict,
    "causal": lambda: dict(is_causal=True),
    "scaled": lambda: dict(is_causal=True, scale=0.7),
    "a mask of booleans": lambda: dict(attn_mask=drawn(TOKENS, TOKENS) > -1),
    "a mask that hides all keys of a query": lambda: dict(attn_mask=torch.arange(TOKENS)[:, None] > 0),
    "a mask that is added": lambda: dict(attn_mask=drawn(2, 1, TOKENS, TOKENS)),
    "shared heads": lambda: dict(is_causal=True, enable_gqa=True),
}


@pytest.mark.parametrize("how", HOW)
def test_attention_that_drops_nothing_is_torchs_own(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, others = Attention(), 2 if how == "shared heads" else 4
    heads = [drawn(2, count, TOKENS, 8) + number for number, count in enumerate((4, others, others))]
    monkeypatch.setattr(FunctionalDropout, "drop", lambda self, x, p: x)
    with FunctionalDropout({}):
        found = model(heads, 0.5, HOW[how]())
    torch.testing.assert_close(found, model(heads, 0.0, HOW[how]()), rtol=1e-12, atol=1e-12)
