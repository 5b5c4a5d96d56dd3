"""Every kernel on a real GPU: the cases of the interpreter, larger ones, and what only a GPU can show.

pytest -m gpu tests/gpu        (skipped, with the reason, where there is no CUDA device)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from colossal_lite.kernels import TORCH, Ops, Rows, select
from tests.shared.kernel_cases import (
    TOLERANCE,
    Case,
    assert_agree,
    cases,
    check,
    check_narrow,
    check_split,
    optimizer_steps,
)

if not torch.cuda.is_available():
    pytest.skip("no CUDA device is visible", allow_module_level=True)
pytest.importorskip("triton", reason="triton is not installed")
pytestmark = pytest.mark.gpu
CUDA = "cuda"


@pytest.fixture(scope="module")
def ops() -> Ops:
    return select("triton", "cuda", strict=True)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("case", cases(), ids=lambda c: c.name)
def test_a_kernel_is_its_reference(case: Case, dtype: torch.dtype, ops: Ops) -> None:
    check(case, ops, dtype, CUDA)


# Forward and backward at the widths of real models, where other rows of the tile table apply.
WIDE: dict[str, tuple[Callable[..., Any], tuple[tuple[int, ...], ...]]] = {
    **{
        f"{name} {width}": (call, ((64, 8, width), *((width,),) * vectors))
        for width in (768, 4096, 8192, 16384, 32768)
        for name, call, vectors in (
            ("rms_norm", lambda o, x, w: o.rms_norm(x, w, 1e-5), 1),
            ("layer_norm", lambda o, x, w, b: o.layer_norm(x, w, b, 1e-5), 2),
        )
    },
    **{
        f"attend {head}": (lambda o, q, k, v: o.attend_lse(q, k, v), ((1, 515, 4, head), *((1, 515, 2, head),) * 2))
        for head in (64, 128)
    },
    "swiglu 14336": (lambda o, x: o.swiglu(x), ((64, 2 * 14336),)),
}  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", WIDE)
def test_a_kernel_at_the_width_of_a_model_is_its_reference(name: str, dtype: torch.dtype, ops: Ops) -> None:
    call, shapes = WIDE[name]
    check(Case(name, call, lambda *inputs: call(TORCH, *inputs), shapes), ops, dtype, CUDA)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_dropout_has_the_bits_of_the_cpu(dtype: torch.dtype, ops: Ops) -> None:
    x, residual = torch.randn(4, 33, 1000).to(dtype), torch.randn(4, 33, 1000).to(dtype)
    here = Rows((5, 2**32 - 7), 9, torch.arange(4) * 1000, torch.arange(33) * 7)
    there = Rows(here.key, here.step, here.sample.to(CUDA), here.position.to(CUDA))
    got = ops.dropout_add(x.to(CUDA), residual.to(CUDA), 0.3, there)
    assert torch.equal(got.cpu(), TORCH.dropout_add(x, residual, 0.3, here))


@pytest.mark.parametrize("draw", ["normal", "uniform"])
def test_initial_values_have_the_bits_of_the_cpu(draw: str, ops: Ops) -> None:
    start, stop = 4 * 2**32 - 500_001, 4 * 2**32 + 500_003
    got = getattr(ops, draw)((2**32 - 3, 2**31 + 11), start, stop, device="cuda")
    assert torch.equal(got.cpu(), getattr(TORCH, draw)((2**32 - 3, 2**31 + 11), start, stop))


def test_adamw_has_the_same_bits_however_a_buffer_is_cut(ops: Ops) -> None:
    numbers = dict(step=3, lr=1e-3, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1, grad_scale=0.7)
    whole = [torch.rand(1_000_003, device=CUDA) for _ in range(4)]
    pieces = [t.clone() for t in whole]
    ops.adamw_(*whole, **numbers)
    for a, b in ((0, 1), (1, 1000), (1000, 4096), (4096, 1_000_003)):
        ops.adamw_(*(t[a:b] for t in pieces), **numbers)
    for a_, b_ in zip(whole, pieces, strict=True):
        assert torch.equal(a_, b_)


@pytest.mark.parametrize("name", optimizer_steps())
@pytest.mark.parametrize("path", ["triton", "torch"])
def test_a_step_on_split_masters_has_the_bits_of_one_on_float32_masters(
    name: str, path: str, ops: Ops
) -> None:
    for still in (False, True):
        check_split(ops if path == "triton" else TORCH, name, 1_000_003, still=still, device=CUDA)


@pytest.mark.parametrize("split_", [False, True])
@pytest.mark.parametrize("path", ["triton", "torch"])
def test_a_step_on_bf16_moments_is_one_on_float32_ones_rounded_by_the_same_words(
    path: str, split_: bool, ops: Ops
) -> None:
    check_narrow(ops if path == "triton" else TORCH, 1_000_003, first=64, split_=split_, device=CUDA)


def test_two_runs_have_the_same_bits(ops: Ops) -> None:
    """No atomics: a sum over rows is taken in one order."""
    x, w = (
        torch.randn(4096, 1024, device=CUDA, requires_grad=True),
        torch.randn(1024, device=CUDA, requires_grad=True),
    )
    ids = torch.randint(50, (4096,), device=CUDA)
    for _ in range(2):
        gradients: list[list[Tensor]] = []
        for _ in range(2):
            y = ops.rms_norm(x, w, 1e-5)
            table = torch.zeros(50, 1024, device=CUDA)
            ops.embedding_grad_(table, y.detach(), ids)
            gradients.append(
                [*torch.autograd.grad(y.square().sum(), (x, w)), table, ops.square_sum([y.detach().view(-1)])]
            )
        for a, b in zip(*gradients, strict=True):
            assert torch.equal(a, b)


def room(needed_bytes: int) -> None:
    if torch.cuda.mem_get_info()[0] < needed_bytes:
        pytest.skip(f"needs {needed_bytes / 2**30:.0f} GiB of free device memory")


def test_offsets_beyond_2_to_the_31_are_right(ops: Ops) -> None:
    """Rows and elements behind the first 2**31 come out as they do alone."""
    rows, width = 600_000, 4096
    room(6 * rows * width * 2)
    x = torch.empty(rows, width, dtype=torch.bfloat16, device=CUDA).normal_()
    w = torch.randn(width, dtype=torch.bfloat16, device=CUDA)
    tail = slice(rows - 512, rows)
    with torch.no_grad():
        y = ops.rms_norm(x, w, 1e-5)
        assert torch.equal(y[tail], ops.rms_norm(x[tail].clone(), w, 1e-5))
        y = ops.gelu(x)
        assert torch.equal(y[tail], ops.gelu(x[tail].clone()))
    flat, last = x.view(-1), slice(rows * width - 1_000_003, rows * width)
    expected = TORCH.square_sum([flat[last].clone()])
    flat[: last.start].zero_()
    torch.testing.assert_close(ops.square_sum([flat]), expected, rtol=1e-5, atol=0)


def test_adamw_steps_the_elements_behind_2_to_the_31(ops: Ops) -> None:
    numel = 2**31 + 4099
    room(5 * 2 * numel)
    numbers = dict(step=3, lr=1e-3, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1)
    buffers = [torch.rand(numel, dtype=torch.bfloat16, device=CUDA) for _ in range(4)]
    alone = [t[-5000:].clone() for t in buffers]
    ops.adamw_(*buffers, **numbers)
    ops.adamw_(*alone, **numbers)
    for whole, piece in zip(buffers, alone, strict=True):
        assert torch.equal(whole[-5000:], piece)


@pytest.mark.parametrize("tokens", [64, 192, 448])
def test_primary_attention_has_finite_gradients_where_cudnn_with_a_mask_has_none(tokens: int) -> None:
    """S % 128 == 64 and a mask tensor: cuDNN's backward gives NaN (pytorch #196678); we hand it none."""
    auto = select("auto", "cuda")
    q, k, v = (
        torch.randn(2, tokens, 4, 64, dtype=torch.bfloat16, device=CUDA, requires_grad=True) for _ in range(3)
    )
    exact = [x.detach().double().cpu().requires_grad_() for x in (q, k, v)]
    out, want = auto.attend(q, k, v), TORCH.attend(*exact)
    assert_agree("out", out, want, TOLERANCE[torch.bfloat16])
    direction = torch.randn_like(out)
    got = torch.autograd.grad(out, (q, k, v), direction)
    expected = torch.autograd.grad(want, exact, direction.double().cpu())
    for a, b in zip(got, expected, strict=True):
        assert_agree("gradient", a, b, 2 * TOLERANCE[torch.bfloat16])


@contextmanager
def assert_never_waits() -> Iterator[None]:
    """Torch raises RuntimeError for an operation within that waits for the device."""
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_no_op_waits_for_the_device(ops: Ops) -> None:
    x, w = (
        torch.randn(64, 256, device=CUDA, requires_grad=True),
        torch.randn(256, device=CUDA, requires_grad=True),
    )
    labels = torch.randint(256, (64,), device=CUDA)
    ops.cross_entropy(ops.rms_norm(x, w, 1e-5), labels)[0].backward()  # compiled now
    with assert_never_waits():
        ops.cross_entropy(ops.rms_norm(x, w, 1e-5), labels)[0].backward()
        total = ops.square_sum([x.detach().view(-1)])
        ops.adamw_(
            x.detach().view(-1), x.grad.view(-1), torch.zeros_like(x).view(-1), torch.zeros_like(x).view(-1),  # type: ignore[union-attr]
            step=1, lr=1e-3, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.0, grad_scale=total.sqrt(),
        )  # fmt: skip
