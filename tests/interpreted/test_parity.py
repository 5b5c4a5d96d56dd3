"""Training with the interpreter in place of every kernel is the plain serial loop, through the engine."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.shared import interpreter  # noqa: F401  (before anything imports triton)
from tests.shared.parity import Case, assert_parity

CASES = {
    "gpt2 alone": Case("gpt2", dropout=0.2, ragged=True, world_size=1),
    "llama over tensor ranks": Case("llama", tensor=2),
    "gpt2 around a ring": Case("gpt2", sequence=2, tied=False),
}


@pytest.mark.parametrize("name", CASES)
def test_every_gradient_is_the_serial_one(name: str) -> None:
    config = dict(precision="fp32", kernels="triton", clip_grad_norm=0.5)
    assert_parity(replace(CASES[name], global_batch=2, steps=2, vocabulary=19, tokens=4, config=config))
