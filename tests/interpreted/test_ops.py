"""Every kernel, forward and every gradient, against its float64 reference, under the sanitizer."""

from __future__ import annotations

import pytest
import torch

from colossal_lite.kernels import TORCH, Ops, linear_cross_entropy, select
from tests.shared.interpreter import sanitized  # before anything imports triton
from tests.shared.kernel_cases import Case, cases, check

OPS = select("triton", "cpu", strict=True)


@pytest.mark.parametrize("case", cases(), ids=lambda c: c.name)
def test_a_kernel_is_its_reference(case: Case) -> None:
    for index, dtype in enumerate((torch.float32, torch.bfloat16)):
        with sanitized(reverse=bool(index)):
            check(case, OPS, dtype)


BOTH = pytest.mark.parametrize("ops", [OPS, TORCH], ids=["triton", "torch"])


@BOTH
def test_the_loss_of_no_rows_has_a_gradient_of_no_rows(ops: Ops) -> None:
    logits = torch.empty(0, 8, requires_grad=True)
    total, count = ops.cross_entropy(logits, torch.empty(0, dtype=torch.int64))
    total.backward()
    assert total == 0 and count == 0 and logits.grad is not None and logits.grad.shape == (0, 8)


@BOTH
def test_a_norm_whose_output_nobody_uses_passes_the_gradient_of_its_sum(ops: Ops) -> None:
    x, d_s = torch.randn(2, 3, 4, requires_grad=True), torch.randn(3, 2, 4)
    _, s = ops.add_rms_norm(x, torch.randn(2, 3, 4), torch.ones(4), 1e-5)
    (s.transpose(0, 1) * d_s).sum().backward()  # a gradient whose strides are not those of x
    assert x.grad is not None and torch.equal(x.grad, d_s.transpose(0, 1))


@BOTH
@pytest.mark.parametrize(("dtype", "scale"), [(torch.bfloat16, 1 / 11), (torch.float16, 65_536.0)])
def test_a_loss_is_scaled_in_float32(ops: Ops, dtype: torch.dtype, scale: float) -> None:
    """1 / 11 in bf16 is 0.1 % too much in every gradient, and 65,536 in float16 is infinite."""
    generator = torch.Generator().manual_seed(3)
    x, w = (1e-3 * torch.randn(n, 64, generator=generator).to(dtype) for n in (128, 32))
    labels = torch.randint(32, (128,), generator=generator)
    given = [a.to(dtype).requires_grad_() for a in (x, w)]
    plain = torch.autograd.grad(ops.linear_cross_entropy(*given, labels)[0], given)
    scaled = torch.autograd.grad(ops.linear_cross_entropy(*given, labels)[0] * scale, given)
    exact = [a.detach().double().requires_grad_() for a in given]
    truth = torch.autograd.grad(linear_cross_entropy.reference(*exact, labels), exact)
    for a, b, c in zip(scaled, plain, truth, strict=True):
        assert along(a, b) == pytest.approx(scale, rel=2e-4)
        assert along(b, c) == pytest.approx(1.0, rel=2e-3)


def along(a: torch.Tensor, b: torch.Tensor) -> float:
    """What of b there is in a."""
    a, b = a.double(), b.double()
    return float((a * b).sum() / (b * b).sum())


@BOTH
def test_a_wide_bias_leaves_a_narrow_activation_narrow(ops: Ops) -> None:
    x, bias = torch.randn(5, 8).bfloat16(), torch.randn(8)
    y = ops.gelu(x, bias)
    assert y.dtype == torch.bfloat16
    torch.testing.assert_close(y, torch.nn.functional.gelu(x.float() + bias, approximate="tanh").bfloat16())
