"""Random numbers have the same bits on both paths; wide rows take the kernels meant for them."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch

from colossal_lite.kernels import TORCH, Draws, norm, select
from tests.shared.interpreter import sanitized
from tests.shared.kernel_cases import (
    Case,
    check,
    check_narrow,
    check_split,
    norm_cases,
    optimizer_steps,
    rows,
)

OPS = select("triton", "cpu", strict=True)
HAVE_FMA = ("AVX2", "AVX512")
_PLAIN = dict(step=100, lr=3e-4, eps=1e-8)
OTHER_STEPS: dict[str, Any] = {
    "adamw of small betas": lambda o, p, g, m, v, **k: o.adamw_(
        p, g, m, v.abs_(), **_PLAIN, beta1=0.4, beta2=0.5, weight_decay=0.1, **k
    ),
    "adamw without decay": lambda o, p, g, m, v, **k: o.adamw_(
        p, g, m, v.abs_(), **_PLAIN, beta1=0.9, beta2=0.999, weight_decay=0.0, **k
    ),
}
CARRY = 8 * 2**32  # where the counter needs more than 32 bits


@pytest.mark.parametrize(
    ("start", "stop"), [(0, 1), (0, 2048), (3, 700), (5, 6), (CARRY - 7, CARRY + 9), (9, 9)]
)
@pytest.mark.parametrize("draw", ["normal", "uniform"])
def test_initial_values_have_the_same_bits(draw: str, start: int, stop: int) -> None:
    key = (2**32 - 3, 2**31 + 11)
    with sanitized():
        got = getattr(OPS, draw)(key, start, stop)
    assert got.dtype == dict(normal=torch.float32, uniform=torch.float64)[draw]
    assert torch.equal(got, getattr(TORCH, draw)(key, start, stop))


def test_initial_values_in_the_tails_have_the_same_bits() -> None:
    z = TORCH.normal((1, 2), 0, 40_000)
    assert float(z.abs().max()) > 4
    assert torch.equal(OPS.normal((1, 2), 0, 40_000), z)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("feature", [0, 8])
def test_dropout_has_the_same_bits(dtype: torch.dtype, feature: int) -> None:
    r, x, residual = rows(feature=feature), torch.randn(2, 3, 530).to(dtype), torch.randn(2, 3, 530).to(dtype)
    with sanitized():
        assert torch.equal(OPS.dropout(x, 0.3, r), TORCH.dropout(x, 0.3, r))
        assert torch.equal(OPS.dropout_add(x, residual, 0.3, r), TORCH.dropout_add(x, residual, 0.3, r))
        _, s = OPS.add_rms_norm(x, residual, torch.ones(530, dtype=dtype), 1e-5, 0.3, r)
    assert torch.equal(s, TORCH.dropout_add(x, residual, 0.3, r))


@pytest.mark.parametrize("name", optimizer_steps())
def test_a_step_on_split_masters_has_the_bits_of_one_on_float32_masters(name: str) -> None:
    with sanitized():
        for numel in (0, 1, 13, 1024, 2500):
            check_split(OPS, name, numel)
        check_split(OPS, name, 2500, still=True)


@pytest.mark.parametrize("split_", [False, True])
def test_a_step_on_bf16_moments_is_one_on_float32_ones_rounded_by_the_same_words(split_: bool) -> None:
    with sanitized():
        for numel, first in ((0, 0), (1, 4), (1024, 0), (2500, (1 << 34) + 64)):
            check_narrow(OPS, numel, first=first, split_=split_)


@pytest.mark.skipif(
    torch.backends.cpu.get_cpu_capability() not in HAVE_FMA, reason="a CPU without FMA rounds more often"
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", [*optimizer_steps(), "adamw of small betas", "adamw without decay"])
def test_a_step_has_the_bits_of_the_one_on_the_host(name: str, dtype: torch.dtype) -> None:
    """So a chunk may be updated on either side of a link; numbers over 60 binary orders, and gradients of zero."""
    step = {**optimizer_steps(), **OTHER_STEPS}[name]
    generator = torch.Generator().manual_seed(1)
    for numel, scale in ((64, 1.0), (1024, 0.37), (40_000, torch.tensor(1.7))):
        p, g, m, v = (torch.randn(numel, generator=generator) for _ in range(4))
        g = (g * torch.exp2(torch.randint(-30, 30, (numel,), generator=generator).float())).to(dtype)
        g[::7] = 0
        found = []
        for ops in (OPS, TORCH):
            state = [p.clone(), g.clone(), m.clone(), v.clone(), p.bfloat16()]
            step(ops, *state[:4], grad_scale=scale, low=state[4])
            found.append([*state[:1], *state[2:]])
        assert all(map(torch.equal, *found)), f"{name} {numel}"


def test_an_engine_s_step_on_narrow_moments_has_the_bits_of_the_host_s() -> None:
    generator = torch.Generator().manual_seed(1)
    p, g, m, v = (torch.randn(2500, generator=generator) for _ in range(4))
    found = []
    for ops in (OPS, TORCH):
        state = [p.clone(), g.bfloat16(), m.bfloat16(), v.abs().bfloat16()]
        optimizer_steps()["adamw"](ops, *state, grad_scale=0.37, draws=Draws((7, 1 << 31), 64))
        found.append([state[0], *state[2:]])
    assert all(map(torch.equal, *found))


WIDE = [case for case in norm_cases() if "norm" in case.name and case.name.endswith(("37", "128"))]


@pytest.mark.parametrize("case", WIDE, ids=lambda c: c.name)
def test_rows_wider_than_a_tile_are_norms_too(case: Case) -> None:
    def narrow(kernel: str, width: int, arch: str) -> dict[str, Any]:
        return {"norm_weights": dict(ROWS=4, COLUMNS=64)}.get(
            kernel, dict(COLUMNS=64 if width == 128 else 16)
        )

    for index, dtype in enumerate((torch.float32, torch.bfloat16)):
        with sanitized(reverse=bool(index)), mock.patch.object(norm, "tile", narrow):
            check(case, OPS, dtype)


def test_a_weight_gradient_is_summed_over_many_programs() -> None:
    x, w = torch.randn(70, 40, requires_grad=True), torch.randn(40, requires_grad=True)
    dy = torch.randn(70, 40)
    got, want = (torch.autograd.grad(ops.rms_norm(x, w, 1e-5), (x, w), dy) for ops in (OPS, TORCH))
    torch.testing.assert_close(got, want)
