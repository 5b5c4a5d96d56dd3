"""Every kernel, forward and every gradient, against its float64 reference, under the sanitizer."""

from __future__ import annotations

import pytest
import torch

from colossal_lite.kernels import select
from tests.interpreter import sanitized  # before anything imports triton
from tests.kernel_cases import Case, cases, check

OPS = select("triton", "cpu", strict=True)


@pytest.mark.parametrize("case", cases(), ids=lambda c: c.name)
def test_a_kernel_is_its_reference(case: Case) -> None:
    for index, dtype in enumerate((torch.float32, torch.bfloat16)):
        with sanitized(reverse=bool(index)):
            check(case, OPS, dtype)
