"""Every op's torch path against its float64 reference and torch's own function, and what each op refuses."""

from __future__ import annotations

import math
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from colossal_lite.kernels import (
    CAUSAL,
    FULL,
    TORCH,
    Draws,
    Dropout,
    Mask,
    Ops,
    Rows,
    activation,
    attention,
    embedding,
    flat,
    linear_cross_entropy,
    norm,
    optimizer,
    select,
    split,
)
from colossal_lite.kernels import rotary as rotary_file
from colossal_lite.kernels.cross_entropy import combine, gradient, partial
from colossal_lite.kernels.cross_entropy import reference as cross_entropy_reference
from colossal_lite.kernels.philox import round_by
from colossal_lite.kernels.rotary import reference as rotary_reference
from tests.shared.kernel_cases import check_split, masters_with_ties, optimizer_steps


def f64(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(
        *shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed), requires_grad=True
    )


def same(got: Any, want: Any, inputs: tuple[Tensor, ...], tol: float = 1e-11) -> None:
    """Values, and gradients along one random direction, of two tuples of outputs."""
    torch.testing.assert_close(got, want, rtol=tol, atol=tol)
    direction = torch.randn(want.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(9))
    a, b = (torch.autograd.grad(out, inputs, direction) for out in (got, want))
    torch.testing.assert_close(a, b, rtol=tol, atol=tol)


LABELS = torch.tensor([6, 0, -100, 3, 3])
POSITIONS = torch.tensor([0, 3, 1, 200, 70000])
CASES: dict[str, tuple[Callable[..., Tensor], Callable[..., Tensor], tuple[tuple[int, ...], ...]]] = {
    "layer_norm": (
        lambda x, w, b: TORCH.layer_norm(x, w, b, 1e-5),
        lambda x, w, b: norm.layer_norm_reference(x, w, b, 1e-5),
        ((2, 3, 7), (7,), (7,)),
    ),
    "layer_norm without bias": (
        lambda x, w: TORCH.layer_norm(x, w, None, 1e-5),
        lambda x, w: norm.layer_norm_reference(x, w, None, 1e-5),
        ((5, 8), (8,)),
    ),
    "rms_norm": (
        lambda x, w: TORCH.rms_norm(x, w, 1e-6),
        lambda x, w: norm.rms_norm_reference(x, w, 1e-6),
        ((2, 3, 7), (7,)),
    ),
    "gelu tanh": (TORCH.gelu, activation.gelu_reference, ((2, 3, 5),)),
    "gelu tanh bias": (TORCH.gelu, activation.gelu_reference, ((2, 3, 5), (5,))),
    "gelu exact bias": (
        lambda x, b: TORCH.gelu(x, b, approximate="none"),
        lambda x, b: activation.gelu_reference(x, b, approximate="none"),
        ((2, 3, 5), (5,)),
    ),
    "swiglu": (TORCH.swiglu, activation.swiglu_reference, ((2, 3, 5), (2, 3, 5))),
    "linear cross_entropy": (
        lambda x, w: TORCH.linear_cross_entropy(x, w, LABELS, -100, 0.1, 0.01, rows=2)[0],
        lambda x, w: linear_cross_entropy.reference(x, w, LABELS, -100, 0.1, 0.01),
        ((5, 3), (7, 3)),
    ),
    "rotary": (
        lambda x: TORCH.rotary(x, POSITIONS, 500.0),
        lambda x: rotary_reference(x, POSITIONS, 500.0),
        ((2, 5, 3, 6),),
    ),
    "rotary by sample": (
        lambda x: TORCH.rotary(x, torch.stack((POSITIONS, POSITIONS + 1)), 500.0),
        lambda x: rotary_reference(x, torch.stack((POSITIONS, POSITIONS + 1)), 500.0),
        ((2, 5, 3, 6),),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_an_op_is_its_reference_and_its_gradient_is_that_of_differences(name: str) -> None:
    op, reference, shapes = CASES[name]
    inputs = tuple(f64(*shape, seed=i) for i, shape in enumerate(shapes))
    same(op(*inputs), reference(*inputs), inputs)
    assert torch.autograd.gradcheck(op, inputs)


def test_rotary_holds_at_large_positions_in_float32() -> None:
    x, p = torch.randn(1, 2, 1, 8), torch.tensor([1_000_001, 3])
    torch.testing.assert_close(
        TORCH.rotary(x, p, 1e4).double(), rotary_reference(x, p, 1e4), rtol=0, atol=0.2
    )
    torch.testing.assert_close(
        TORCH.rotary(x.bfloat16(), torch.tensor([4097, 3]), 1e4).double(),
        rotary_reference(x.bfloat16(), torch.tensor([4097, 3]), 1e4),
        rtol=0.02,
        atol=0.02,
    )


# -------------------------------------------------------------------------------------------------- attention


def attention_inputs(b: int, t: int, s: int, h: int, g: int, k: int) -> tuple[Tensor, Tensor, Tensor]:
    return f64(b, t, h, k, seed=1), f64(b, s, g, k, seed=2), f64(b, s, g, k, seed=3)


@settings(max_examples=60)
@given(st.data())
def test_attention_is_its_reference_for_every_mask(data: st.DataObject) -> None:
    t, s, g, per = (data.draw(st.integers(1, n)) for n in (9, 9, 3, 3))
    q, k, v = attention_inputs(2, t, s, g * per, g, 4)
    offsets = data.draw(st.tuples(st.integers(0, 12), st.integers(0, 12)))
    window = data.draw(st.none() | st.integers(1, 5))
    documents = None
    if data.draw(st.booleans()):
        numbers = st.lists(st.integers(0, 2), min_size=2 * (t + s), max_size=2 * (t + s))
        d = torch.tensor(data.draw(numbers))
        documents = (d[: 2 * t].view(2, t), d[2 * t :].view(2, s))
    options: dict[str, Any] = dict(
        mask=Mask(data.draw(st.booleans()), documents), offsets=offsets, window=window
    )
    same(TORCH.attend(q, k, v, **options), attention.reference(q, k, v, **options)[0], (q, k, v))
    out, lse = attention.reference(q, k, v, **options)
    got_out, got_lse = attention.attend_lse(q, k, v, **options)
    torch.testing.assert_close(got_lse, lse, rtol=1e-11, atol=1e-11)
    seen = lse > -math.inf
    d_out, d_lse = torch.randn_like(out), torch.where(seen, torch.randn_like(lse), 0.0)
    want = torch.autograd.grad((out, torch.where(seen, lse, 0.0)), (q, k, v), (d_out, d_lse))
    got = torch.autograd.grad((got_out, got_lse), (q, k, v), (d_out, d_lse))
    torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-10)


def test_a_key_is_visible_exactly_where_the_rules_say() -> None:
    q, k, _ = attention_inputs(1, 7, 6, 1, 1, 2)
    documents = (torch.tensor([[0, 0, 1, 1, 1, 2, 2]]), torch.tensor([[0, 1, 1, 1, 2, 2]]))
    for causal in (True, False):
        for window in (None, 1, 3):
            visible = attention.visible_keys(q, k, Mask(causal, documents), (4, 3), window)
            for i in range(7):
                for j in range(6):
                    far = 4 + i - (3 + j)
                    seen = bool(documents[0][0, i] == documents[1][0, j]) and (far >= 0 or not causal)
                    assert visible[0, 0, i, j] == (seen and (window is None or abs(far) < window))


@pytest.mark.parametrize("lag", range(-5, 8))
def test_every_lag_between_queries_and_keys_is_masked_right(lag: int) -> None:
    q, k, v = attention_inputs(1, 4, 6, 2, 1, 4)
    options: dict[str, Any] = dict(offsets=(10 + lag, 10))
    out, lse = attention.reference(q, k, v, **options)
    got_out, got_lse = TORCH.attend_forward(q, k, v, **options)
    torch.testing.assert_close((got_out, got_lse), (out, lse), rtol=1e-11, atol=1e-11)
    torch.testing.assert_close(TORCH.attend(q, k, v, **options), out, rtol=1e-11, atol=1e-11)


def test_a_query_that_sees_nothing_in_any_piece_merges_to_nothing() -> None:
    q, k, v = attention_inputs(1, 2, 2, 1, 1, 4)
    steps = [TORCH.attend_forward(q, k, v, offsets=(0, 1)), TORCH.attend_forward(q, k, v, offsets=(0, 9))]
    out, lse = steps[0]
    attention.merge_(out, lse, *steps[1])
    assert float(lse[0, 0, 0]) == -math.inf and not out[0, 0].any()
    torch.testing.assert_close(out[0, 1], v[0, 0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("causal", [True, False])
def test_ring_steps_merge_into_whole_attention_and_their_gradients_add_up(
    dtype: torch.dtype, causal: bool
) -> None:
    q, k, v = (x.to(dtype) for x in attention_inputs(2, 12, 12, 4, 2, 8))
    mask, cut = Mask(causal), ((0, 5), (5, 9), (9, 12))
    out, lse = TORCH.attend_forward(q, k, v, mask=mask)
    for a, b in cut:  # the rank of queries a..b sees the keys piece by piece
        steps = [
            TORCH.attend_forward(q[:, a:b], k[:, c:d], v[:, c:d], mask=mask, offsets=(a, c)) for c, d in cut
        ]
        merged, merged_lse = steps[0][0].to(steps[0][1].dtype), steps[0][1]
        for step in steps[1:]:
            attention.merge_(merged, merged_lse, *step)
        tol = 1e-5 if dtype == torch.float32 else 2e-2
        torch.testing.assert_close(merged.to(dtype), out[:, a:b], rtol=tol, atol=tol)
        torch.testing.assert_close(merged_lse, lse[:, :, a:b], rtol=tol, atol=tol)
    q64, k64, v64 = (x.double().requires_grad_() for x in (q, k, v))
    d_out = torch.randn_like(q)
    want = torch.autograd.grad(
        attention.reference(q64, k64, v64, mask=mask)[0], (q64, k64, v64), d_out.double()
    )
    total = [torch.zeros_like(x, dtype=torch.float64) for x in (q, k, v)]
    for a, b in cut:
        for c, d in cut:
            dq, dk, dv = TORCH.attend_backward(
                d_out[:, a:b], q[:, a:b], k[:, c:d], v[:, c:d], out[:, a:b], lse[:, :, a:b],
                mask=mask, offsets=(a, c),
            )  # fmt: skip
            total[0][:, a:b] += dq
            total[1][:, c:d] += dk
            total[2][:, c:d] += dv
    tol = 1e-5 if dtype == torch.float32 else 5e-2
    torch.testing.assert_close(total, list(want), rtol=tol, atol=tol)


@pytest.mark.parametrize("options", [{}, dict(mask=FULL), dict(window=2), dict(offsets=(0, 2))], ids=str)
@pytest.mark.parametrize("extra", ["softcap", "bias", "shared bias", "kv_prefix", "all of them"])
def test_a_softcap_a_bias_and_a_prefix_are_their_reference(extra: str, options: dict[str, Any]) -> None:
    """At offsets (0, 2) the first two queries see nothing, or the prefix alone."""
    q, k, v = attention_inputs(2, 5, 6, 4, 2, 4)
    prefix = (f64(2, 3, 2, 4, seed=4), f64(2, 3, 2, 4, seed=5))
    more: dict[str, Any] = {
        "softcap": dict(softcap=0.7), "bias": dict(bias=f64(2, 4, 5, 6, seed=6)),
        "shared bias": dict(bias=f64(1, 5, 6, seed=6)), "kv_prefix": dict(kv_prefix=prefix),
        "all of them": dict(softcap=0.7, bias=f64(1, 4, 5, 6, seed=6), kv_prefix=prefix),
    }[extra]  # fmt: skip
    wanted = [q, k, v, *more.get("kv_prefix", ()), *([more["bias"]] if "bias" in more else [])]
    got, want = TORCH.attend(q, k, v, **options, **more), attention.reference(q, k, v, **options, **more)[0]
    torch.testing.assert_close(got, want, rtol=1e-11, atol=1e-11)
    direction = f64(*got.shape, seed=7)
    gradients = (torch.autograd.grad(out, wanted, direction) for out in (got, want))
    for a, b in zip(*gradients, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (dict(softcap=0.0), "softcap=0.0; legal is a number > 0"),
        (dict(bias=torch.zeros(3, 5, 6)), r"bias has shape \(3, 5, 6\); legal is \(2, 4, 5, 6\)"),
        (dict(bias=torch.zeros(1, 5, 6).long()), "bias is torch.int64"),
        (dict(kv_prefix=(torch.zeros(2, 3, 2, 4),) * 2), "keys of kv_prefix are torch.float32"),
        (dict(kv_prefix=(torch.zeros(2, 0, 2, 4),) * 2), r"keys of kv_prefix have shape \(2, 0, 2, 4\)"),
    ],
    ids=str,
)
def test_extras_of_attention_that_do_not_fit_are_refused(more: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"attend: {message}"):
        TORCH.attend(*attention_inputs(2, 5, 6, 4, 2, 4), **more)


GPU_PATHS = [
    # queries, keys, mask, offsets, window: path on a CPU, on a GPU
    ((9, 9, CAUSAL, (0, 0), None), "causal", "causal"),
    ((9, 9, FULL, (0, 0), None), "full", "full"),
    ((4, 9, CAUSAL, (30, 0), None), "full", "full"),  # a ring step that sees all
    ((4, 9, CAUSAL, (3, 0), None), "masked", "kernel"),
    ((4, 9, CAUSAL, (0, 30), None), "masked", "kernel"),  # sees nothing
    ((9, 9, CAUSAL, (0, 0), 3), "masked", "kernel"),
    ((9, 9, Mask(documents=torch.zeros(1, 9).long()), (0, 0), None), "masked", "kernel"),
    ((9, 9, Mask(False, torch.zeros(1, 9).long()), (0, 0), None), "masked", "kernel"),
]


@pytest.mark.parametrize(("call", "on_cpu", "on_gpu"), GPU_PATHS)
def test_primary_attention_on_a_gpu_is_torchs_with_is_causal_and_never_a_mask_tensor(
    call: Any, on_cpu: str, on_gpu: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert attention.path_of("cpu", *call) == on_cpu and attention.path_of("cuda", *call) == on_gpu
    queries, keys, mask, offsets, window = call
    handed: list[dict[str, Any]] = []
    whole = F.scaled_dot_product_attention

    def recorded(*args: Tensor, **named: Any) -> Tensor:
        handed.append(named)
        return whole(*args, **named)

    monkeypatch.setattr(F, "scaled_dot_product_attention", recorded)
    kernel: Any = object()
    q, k, v = attention_inputs(1, queries, keys, 2, 2, 4)
    options = dict(mask=mask, offsets=offsets, window=window)
    out = attention.attend_best(lambda *args, **named: kernel, q, k, v, **options)
    if on_gpu == "kernel":
        assert out is kernel and not handed
    else:
        assert [(h["is_causal"], h["attn_mask"]) for h in handed] == [(on_gpu == "causal", None)]
    documents = None if mask.documents is None else mask.documents.to("meta")
    TORCH.attend(*(x.to("meta") for x in (q, k, v)), **options | dict(mask=Mask(mask.causal, documents)))
    assert all(h["attn_mask"] is None for h in handed), "a device that is no CPU was handed a mask tensor"


def test_attention_refuses_what_does_not_fit() -> None:
    q, k, v = attention_inputs(1, 3, 3, 4, 2, 8)
    for bad, message in (
        ((q[0], k, v), r"q has shape \(3, 4, 8\); legal is \[B, T, H, K\]"),
        ((q[:, :, :3], k, v), "3 query heads over 2 key heads; legal is a multiple"),
        ((q, k.float(), v), "k is torch.float32 on cpu; legal is torch.float64 on cpu"),
        ((q, k, v[:, :2]), "legal is one B and K, and k as v"),
    ):
        with pytest.raises(ValueError, match=message):
            TORCH.attend(*bad)
    with pytest.raises(ValueError, match="window=0; legal is 1 or more"):
        TORCH.attend(q, k, v, window=0)
    with pytest.raises(ValueError, match=r"documents of the keys have shape \(1, 2\); legal is \(1, 3\)"):
        TORCH.attend(q, k, v, mask=Mask(True, (torch.zeros(1, 3).long(), torch.zeros(1, 2).long())))


# ---------------------------------------------------------------------------------------------- cross-entropy


@given(st.data())
def test_cross_entropy_is_its_reference_with_smoothing_z_loss_and_ignored_labels(data: st.DataObject) -> None:
    n, v = data.draw(st.integers(0, 9)), data.draw(st.integers(1, 12))
    logits = f64(n, v) * data.draw(st.sampled_from([1.0, 300.0]))
    labels = torch.tensor(
        data.draw(st.lists(st.integers(-1, v - 1), min_size=n, max_size=n)), dtype=torch.int64
    )
    smoothing, z_loss = data.draw(st.sampled_from([0.0, 0.1])), data.draw(st.sampled_from([0.0, 1e-2]))
    total, count = TORCH.cross_entropy(logits, labels, ignore_index=-1, smoothing=smoothing, z_loss=z_loss)
    assert count.dtype == torch.int64 and int(count) == int((labels >= 0).sum())
    want = cross_entropy_reference(logits, labels, -1, smoothing, z_loss)
    torch.testing.assert_close(total, want, rtol=1e-11, atol=1e-9)
    a, b = (torch.autograd.grad(x, logits, retain_graph=True)[0] for x in (total, want))
    torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)
    if z_loss == 0 and n:
        torchs = F.cross_entropy(logits, labels, ignore_index=-1, reduction="sum", label_smoothing=smoothing)
        torch.testing.assert_close(total, torchs, rtol=1e-11, atol=1e-9)


def test_cross_entropy_joins_over_blocks_of_rows_and_takes_any_shape() -> None:
    logits = torch.randn(3, 50, 4001, dtype=torch.float32, requires_grad=True)
    labels = torch.randint(0, 4001, (3, 50))
    labels[1, 7] = -100
    total, count = TORCH.cross_entropy(logits, labels)
    assert int(count) == 149
    want = F.cross_entropy(logits.double().flatten(0, 1), labels.flatten(), reduction="sum")
    torch.testing.assert_close(total.double(), want, rtol=1e-6, atol=0)
    a, b = (torch.autograd.grad(x, logits)[0] for x in (total, want))
    torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-7)


def test_cross_entropy_of_bf16_logits_sums_in_float32() -> None:
    logits = torch.randn(4096, 16).bfloat16().requires_grad_()
    labels = torch.randint(0, 16, (4096,))
    total, _ = TORCH.cross_entropy(logits, labels)
    assert total.dtype == torch.float32
    torch.testing.assert_close(total.double(), cross_entropy_reference(logits, labels), rtol=1e-6, atol=0)
    (dz,) = torch.autograd.grad(total, logits)
    want = torch.autograd.grad(cross_entropy_reference(logits, labels), logits)[0]
    assert dz.dtype == torch.bfloat16
    torch.testing.assert_close(dz, want, rtol=2**-7, atol=1e-8)


@pytest.mark.parametrize("scale", [1.0, 1000.0])
@pytest.mark.parametrize(("smoothing", "z_loss"), [(0.0, 0.0), (0.1, 0.0), (0.1, 1e-3)])
@pytest.mark.parametrize("cuts", [(0, 11), (0, 4, 12), (0, 3, 6, 9, 11, 12)])
def test_a_cut_vocabulary_gives_the_whole_loss_and_gradient(
    cuts: tuple[int, ...], smoothing: float, z_loss: float, scale: float
) -> None:
    logits = f64(6, 11) * scale
    padded = F.pad(logits.detach(), (0, 1), value=1e6)  # the last piece of the last cut is padding only
    labels = torch.tensor([0, 10, 5, -100, 3, 4])
    pairs = list(zip(cuts, cuts[1:], strict=False))
    stats = torch.stack([partial(padded[:, a:b], labels, a, 11) for a, b in pairs])
    total, count, lse = combine(stats, labels, 11, -100, smoothing, z_loss)
    want = cross_entropy_reference(logits, labels, -100, smoothing, z_loss)
    torch.testing.assert_close(total, want, rtol=1e-11, atol=1e-9)
    assert int(count) == 5
    pieces = [
        gradient(torch.tensor(0.5), padded[:, a:b], labels, lse, a, 11, -100, smoothing, z_loss)
        for a, b in pairs
    ]
    whole = torch.autograd.grad(want * 0.5, logits)[0]
    torch.testing.assert_close(torch.cat(pieces, 1)[:, :11], whole, rtol=1e-10, atol=1e-10)
    assert not torch.cat(pieces, 1)[:, 11:].any()


def test_cross_entropy_refuses_labels_that_are_none() -> None:
    logits = torch.randn(2, 5)
    for labels, message in (
        (torch.tensor([0, 5]), "label 5; legal is 0 to 4, or ignore_index=-100"),
        (torch.tensor([-1, 0]), "label -1; legal"),
        (torch.tensor([0]), r"labels has shape \(1,\); legal is \(2,\)"),
        (torch.tensor([0, 1], dtype=torch.int32), "labels is torch.int32; legal is torch.int64"),
    ):
        with pytest.raises(ValueError, match=message):
            TORCH.cross_entropy(logits, labels)
    with pytest.raises(ValueError, match="smoothing=1.0; legal is 0 <= smoothing < 1"):
        TORCH.cross_entropy(logits, torch.tensor([0, 1]), smoothing=1.0)


# ------------------------------------------------------------------------------------------------- optimizers

ADAMW = dict(lr=3e-3, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1)


def state(n: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(4)
    p, g, m, v = (torch.randn(n, generator=generator, dtype=dtype) for _ in range(4))
    return p, g, 0.1 * m, 0.01 * v * v


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_adamw_is_torchs_fused_adamw_bit_for_bit(dtype: torch.dtype) -> None:
    p, _, _, _ = state(1024, dtype)  # whole vectors: torch rounds what is left otherwise
    m, v, reference = torch.zeros_like(p), torch.zeros_like(p), torch.nn.Parameter(p.clone())
    torchs = torch.optim.AdamW(
        [reference], lr=3e-3, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1, fused=True
    )
    for step in range(1, 5):
        grad = torch.randn(1024, dtype=dtype)
        reference.grad = grad.clone()
        torchs.step()
        TORCH.adamw_(p, grad, m, v, step=step, **ADAMW)
        assert torch.equal(p, reference)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("scale", [1.0, 7.3, torch.tensor(0.31, dtype=torch.float64)])
@pytest.mark.parametrize("optimizer_name", ["adamw", "sgd", "momentum", "nesterov", "first"])
def test_an_optimizer_step_is_its_reference(dtype: torch.dtype, scale: Any, optimizer_name: str) -> None:
    p, g, m, v = state(501, dtype)
    tol = 1e-5 if dtype == torch.float32 else 1e-12
    plain = float(scale)
    if optimizer_name == "adamw":
        want: Any = optimizer.adamw_reference(p, g, m, v, step=3, grad_scale=plain, **ADAMW)
        TORCH.adamw_(p, g, m, v, step=3, grad_scale=scale, **ADAMW)
        got: Any = (p, m, v)
    else:
        momentum = 0.0 if optimizer_name == "sgd" else 0.9
        options: dict[str, Any] = dict(
            lr=0.1, momentum=momentum, weight_decay=0.01,
            nesterov=optimizer_name == "nesterov", first=optimizer_name == "first",
        )  # fmt: skip
        buffer = m if momentum else None
        want = optimizer.sgd_reference(p, g, buffer, grad_scale=plain, **options)
        TORCH.sgd_(p, g, buffer, grad_scale=scale, **options)
        got = (p, buffer)
    for a, b in zip(got, want, strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            torch.testing.assert_close(a.double(), b, rtol=tol, atol=tol)


@given(st.lists(st.integers(0, 1003), max_size=4), st.sampled_from([1.0, 3.7]))
def test_cutting_a_buffer_changes_no_bit_of_the_step(cuts: list[int], scale: float) -> None:
    whole, pieces = state(1003), state(1003)
    TORCH.adamw_(*whole, step=2, grad_scale=scale, **ADAMW)
    edges = [0, *sorted(cuts), 1003]
    for a, b in zip(edges, edges[1:], strict=False):
        TORCH.adamw_(*(x[a:b] for x in pieces), step=2, grad_scale=scale, **ADAMW)
    for a, b in zip(whole, pieces, strict=True):
        if a is not whole[1]:  # the gradient is consumed
            assert torch.equal(a, b)


def test_a_step_made_by_the_compiler_has_the_same_bits_however_a_buffer_is_cut() -> None:
    if shutil.which("g++") is None:
        pytest.skip("torch.compile needs a C++ compiler")
    step = select("torch", compiled=True).adamw_
    whole, pieces = state(100_003), state(100_003)
    step(*whole, step=2, grad_scale=3.7, **ADAMW)
    for a, b in ((0, 1), (1, 1000), (1000, 4097), (4097, 100_003)):
        step(*(x[a:b] for x in pieces), step=2, grad_scale=3.7, **ADAMW)
    for index, (a, b) in enumerate(zip(whole, pieces, strict=True)):
        assert index == 1 or torch.equal(a, b)  # the gradient is consumed


@pytest.mark.parametrize("compiled", [False, True])
def test_adamw_takes_a_narrow_gradient_and_writes_narrow_weights(compiled: bool) -> None:
    if compiled and shutil.which("g++") is None:
        pytest.skip("torch.compile needs a C++ compiler")
    step = select("torch", compiled=compiled).adamw_
    numel = 5003 if compiled else (1 << 19) + 77  # more than a tile
    p, g, m, v = state(numel)
    grad, low = g.bfloat16(), torch.zeros(numel, dtype=torch.bfloat16)
    want = optimizer.adamw_reference(p, grad, m, v, step=3, grad_scale=0.3, **ADAMW)
    pieces = [t.clone() for t in (p, grad, m, v, low)]
    step(p, grad, m, v, step=3, grad_scale=0.3, low=low, **ADAMW)
    for got, exact in zip((p, m, v), want, strict=True):
        torch.testing.assert_close(got.double(), exact, rtol=1e-5, atol=1e-6)
    assert torch.equal(low, p.bfloat16())
    for a, b in ((0, 1), (1, 1000), (1000, 4097), (4097, numel)):
        piece = [t[a:b] for t in pieces]
        step(*piece[:4], step=3, grad_scale=0.3, low=piece[4], **ADAMW)
    for whole, cut in zip((p, m, v, low), (pieces[0], *pieces[2:]), strict=True):
        assert torch.equal(whole, cut)


def test_lion_is_its_reference() -> None:
    for dtype, tol in ((torch.float32, 1e-6), (torch.float64, 1e-13)):
        p, g, m, _ = state(501, dtype)
        want = optimizer.lion_reference(
            p, g, m, lr=0.1, beta1=0.9, beta2=0.99, weight_decay=0.1, grad_scale=3.0
        )
        TORCH.lion_(p, g, m, lr=0.1, beta1=0.9, beta2=0.99, weight_decay=0.1, grad_scale=3.0)
        torch.testing.assert_close((p.double(), m.double()), want, rtol=tol, atol=tol)


def halves_of(p: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    high, residual = torch.empty_like(p, dtype=torch.bfloat16), torch.empty_like(p, dtype=torch.int16)
    ties = torch.full((split.tie_bytes(p.numel()),), 255, dtype=torch.uint8)
    split.split_(p, high, residual, ties)
    return high, residual, ties


@pytest.mark.parametrize("low", [0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF, None], ids=str)
def test_two_halves_are_a_master_to_the_bit_and_the_upper_one_is_rounded_to_nearest_even(
    low: int | None,
) -> None:
    """Every sign, exponent and upper mantissa under the lower halves that matter, and any under random ones."""
    every = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32)
    lower = torch.randint(1 << 16, (1 << 16,), dtype=torch.int32) if low is None else low
    p = ((every << 16) | lower).view(torch.float32)[: (1 << 16) - 3]  # whole bytes of ties, and five elements
    high, residual, ties = halves_of(p)
    real = ~p.isnan()
    again = split.join(high, residual, ties)
    assert torch.equal(high[real], p.bfloat16()[real]) and again[~real].isnan().all()
    assert torch.equal(again.view(torch.int32)[real], p.view(torch.int32)[real])
    assert (low == 0x8000) == bool(ties.any()) or low is None


@pytest.mark.parametrize("numel", [1, 13, 5000, (1 << 20) + 77])
@pytest.mark.parametrize("name", optimizer_steps())
def test_a_step_on_split_masters_has_the_bits_of_one_on_float32_masters(name: str, numel: int) -> None:
    if numel < 1 << 20 or name == "adamw":
        check_split(TORCH, name, numel)
    check_split(TORCH, name, min(numel, 5000), still=True)


def test_a_compiled_step_on_split_masters_has_the_bits_of_one_on_float32_masters() -> None:
    if shutil.which("g++") is None:
        pytest.skip("torch.compile needs a C++ compiler")
    check_split(select("torch", compiled=True), "adamw", 5003)


@pytest.mark.parametrize("lost", ["ties", "residual"])
def test_a_step_that_loses_a_part_of_the_split_is_noticed(lost: str, monkeypatch: pytest.MonkeyPatch) -> None:
    true = optimizer.split_

    def lossy(master: Tensor, high: Tensor, residual: Tensor, ties: Tensor) -> None:
        true(master, high, residual, ties)
        (ties if lost == "ties" else residual).zero_()

    monkeypatch.setattr(optimizer, "split_", lossy)
    with pytest.raises(AssertionError, match="other masters"):
        check_split(TORCH, "sgd", 5000, still=True)


def test_split_masters_cut_at_bytes_of_ties_have_the_same_bits() -> None:
    _, g, m, v = state(5003)
    whole = [*halves_of(masters_with_ties(5003)), g.clone(), m.clone(), v.clone()]
    cut = [t.clone() for t in whole]

    def step(high: Tensor, residual: Tensor, ties: Tensor, *rest: Tensor) -> None:
        TORCH.adamw_(high, *rest, step=3, residual=residual, ties=ties, **ADAMW)

    step(*whole)
    for a, b in ((0, 8), (8, 1000), (1000, 4096), (4096, 5003)):
        step(cut[0][a:b], cut[1][a:b], cut[2][a // 8 : -(-b // 8)], *(t[a:b] for t in cut[3:]))
    for index, (a_, b_) in enumerate(zip(whole, cut, strict=True)):
        assert index == 3 or torch.equal(a_, b_)  # the gradient is consumed


def test_halves_that_do_not_belong_together_are_refused() -> None:
    p, g, m, v = state(16)
    high, residual, ties = halves_of(p)
    for halves, message in (
        (dict(residual=residual), "residual given; legal is low, or residual and ties"),
        (dict(residual=residual, ties=ties, low=high), "low and residual and ties given"),
        (dict(residual=residual[:8], ties=ties), r"residual is torch.int16 \(8,\)"),
        (dict(residual=residual, ties=ties[:1]), r"ties is torch.uint8 \(1,\).*torch.uint8 \(2,\)"),
        (dict(residual=residual.int(), ties=ties), r"residual is torch.int32"),
    ):
        with pytest.raises(ValueError, match=message):
            TORCH.adamw_(high, g, m, v, step=1, **halves, **ADAMW)
    with pytest.raises(ValueError, match=r"param is torch.float32 .* legal beside a residual is .*bfloat16"):
        TORCH.adamw_(p, g, m, v, step=1, residual=residual, ties=ties, **ADAMW)
    with pytest.raises(ValueError, match=r"exp_avg is torch.bfloat16.*torch.float32"):
        TORCH.adamw_(high, g, m.bfloat16(), v, step=1, residual=residual, ties=ties, **ADAMW)


def test_rounding_by_words_gives_the_neighbours_whose_mean_is_the_number() -> None:
    values = torch.tensor([1.0, -1.0, 1.00001, -3.1415927, 1e-41, 7.25e-9, 0.0, -65504.7, math.inf])
    noise = torch.arange(1 << 16, dtype=torch.int32)
    for value in values:
        out = torch.empty(1 << 16, dtype=torch.bfloat16)
        round_by(value.expand(1 << 16).contiguous(), noise, out)
        ends = out.double().unique()
        assert len(ends) <= 2 and float(ends[0]) <= float(value) <= float(ends[-1])
        assert float(out.double().mean()) == float(value)
    nothing = torch.empty(1, dtype=torch.bfloat16)
    round_by(torch.tensor([math.nan]), noise[-1:], nothing)
    assert nothing.isnan()


def test_moments_rounded_to_nearest_stay_where_they_are_and_those_rounded_by_words_follow() -> None:
    """From squares of 1.5 to a gradient of 1: after 3,000 steps the average is 1.025 at beta2 = 0.999."""
    p, m, v = torch.zeros(4096), torch.zeros(4096).bfloat16(), torch.full((4096,), 1.5).bfloat16()
    numbers = dict(lr=0.0, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.0)
    nearest = v.clone()
    for step in range(1, 3001):
        TORCH.adamw_(p, torch.ones(4096), m, v, step=step, draws=Draws((1, 2)), **numbers)
        nearest = (nearest.float() * 0.999 + 0.001).bfloat16()
    assert bool((nearest == 1.5).all())
    expected = 1 + 0.5 * 0.999**3000
    assert abs(float(v.double().mean()) - expected) < 2e-3  # the spread of 4,096 is below that
    assert abs(float(m.double().mean()) - 1) < 1e-3


@given(st.lists(st.integers(0, 125), max_size=3), st.booleans(), st.integers(0, 1 << 33))
def test_cutting_a_buffer_of_narrow_moments_changes_no_bit(cuts: list[int], split_: bool, group: int) -> None:
    def buffers() -> tuple[list[Tensor], dict[str, Tensor]]:
        p, g, m, v = state(1003)
        if not split_:
            return [p, g, m.bfloat16(), v.bfloat16()], {}
        high, residual = p.bfloat16(), torch.zeros(1003, dtype=torch.int16)
        ties = torch.zeros(126, dtype=torch.uint8)
        split.split_(p, high, residual, ties)
        return [high, g, m.bfloat16(), v.bfloat16()], dict(residual=residual, ties=ties)

    (whole, halves), (pieces, others) = buffers(), buffers()
    draws = Draws((3, 4), 4 * group)
    TORCH.adamw_(*whole, step=2, draws=draws, **halves, **ADAMW)
    edges = [0, *(8 * cut for cut in sorted(cuts)), 1003]
    for a, b in zip(edges, edges[1:], strict=False):
        some = {n: t[a // 8 : -(-b // 8)] if n == "ties" else t[a:b] for n, t in others.items()}
        TORCH.adamw_(*(x[a:b] for x in pieces), step=2, draws=draws.from_element(a), **some, **ADAMW)
    for one, other in zip((whole[0], *whole[2:]), (pieces[0], *pieces[2:]), strict=True):
        assert torch.equal(one, other)
    assert all(torch.equal(t, others[n]) for n, t in halves.items())


def test_narrow_moments_are_refused_where_nothing_can_round_them() -> None:
    p, g, m, v = state(8)
    low = m.bfloat16(), v.bfloat16()
    with pytest.raises(
        ValueError, match="draws from element 2 beside torch.float32 weights; legal is a multiple"
    ):
        TORCH.adamw_(p, g, *low, step=1, draws=Draws((1, 2), 2), **ADAMW)
    with pytest.raises(ValueError, match="beside torch.float64 weights"):
        TORCH.adamw_(p.double(), g, *low, step=1, draws=Draws((1, 2)), **ADAMW)
    with pytest.raises(ValueError, match="exp_avg is torch.float32.*legal is contiguous torch.bfloat16"):
        TORCH.adamw_(p, g, m, v, step=1, draws=Draws((1, 2)), **ADAMW)


def test_an_optimizer_refuses_buffers_that_do_not_match() -> None:
    p, g, m, v = state(8)
    for bad, message in (
        ((p, g[:4], m, v), r"grad is torch.float32 \(4,\)"),
        ((p, g, m.double(), v), r"exp_avg is torch.float64"),
        (
            (p[::2], g[::2], m[::2], v[::2]),
            r"param is torch.float32 \(4,\) with strides \(2,\); legal is contiguous",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            TORCH.adamw_(*bad, step=1, **ADAMW)
    with pytest.raises(ValueError, match="momentum=0.9 without a momentum_buffer"):
        TORCH.sgd_(p, g, None, lr=0.1, momentum=0.9)


# -------------------------------------------------------------------------------------------------- the table


def test_the_table_describes_every_op() -> None:
    described = TORCH.describe()
    assert [c.op for c in described] == [f for f in Ops.__dataclass_fields__ if f != "choices"]
    assert {c.path for c in described} == {"torch"}
    assert select("torch").describe() == described
    with pytest.raises(ValueError, match="legal are 'auto', 'torch' and 'triton'"):
        select("cuda")  # type: ignore[arg-type]


def test_importing_the_table_and_the_models_imports_neither_triton_nor_transformers() -> None:
    program = (
        "import sys, colossal_lite.kernels, colossal_lite.models\n"
        "print(sorted(m for m in sys.modules if m.split('.')[0] in ('triton', 'transformers')))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_every_op_has_a_path_for_meta_tensors() -> None:
    def meta(*shape: int) -> Tensor:
        return torch.empty(*shape, device="meta", requires_grad=True)

    x, q, k = meta(2, 3, 8), meta(2, 3, 4, 8), meta(2, 3, 2, 8)
    rows = Rows((1, 2), 0, torch.arange(2), torch.arange(3))
    outs = [
        TORCH.layer_norm(x, meta(8), None, 1e-5), TORCH.rms_norm(x, meta(8), 1e-5), TORCH.gelu(x),
        TORCH.swiglu(x, x), TORCH.rotary(q, torch.arange(3, device="meta"), 1e4), TORCH.attend(q, k, k),
        TORCH.attend(q, k, k, mask=FULL, offsets=(7, 0)), TORCH.dropout(x, 0.1, rows),
        TORCH.dropout_add(x, x, 0.1, rows),
        TORCH.cross_entropy(x, torch.empty(2, 3, dtype=torch.int64, device="meta"))[0],
    ]  # fmt: skip
    for out in outs:
        assert out.device.type == "meta"
        out.sum().backward()
    out, lse = TORCH.attend_forward(q.detach(), k.detach(), k.detach())
    assert lse.shape == (2, 4, 3)
    assert [g.shape for g in TORCH.attend_backward(out, q.detach(), k.detach(), k.detach(), out, lse)] == [
        q.shape, k.shape, k.shape,
    ]  # fmt: skip
    flat = [torch.empty(8, device="meta") for _ in range(4)]
    TORCH.adamw_(*flat, step=1, grad_scale=2.0, **ADAMW)


def test_the_dropout_module_follows_its_rows() -> None:
    module, x = Dropout(0.5), torch.ones(2, 3, 16)
    assert not torch.equal(module(x), module(x))  # torch's generator
    module.rows = lambda: Rows((1, 2), 0, torch.arange(2), torch.arange(3))
    assert torch.equal(module(x), module(x))
    assert torch.equal(module(x, x), module(x) + x)
    assert torch.equal(module.eval()(x, x), 2 * x)


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "norm of whole numbers": (
        lambda: TORCH.layer_norm(torch.ones(2, 3, dtype=torch.int64), torch.ones(3), None, 1e-5),
        "layer_norm: x is torch.int64; legal is a floating dtype",
    ),
    "weight elsewhere": (
        lambda: TORCH.rms_norm(torch.ones(2, 3), torch.ones(3, device="meta"), 1e-5),
        "rms_norm: weight is on meta; legal is cpu, as x",
    ),
    "residual of another shape": (
        lambda: TORCH.add_rms_norm(torch.ones(2, 3, 4), torch.ones(2, 1, 4), torch.ones(4), 1e-5),
        "add_rms_norm: residual has shape (2, 1, 4); legal is (2, 3, 4), as x",
    ),
    "bias elsewhere": (
        lambda: TORCH.gelu(torch.ones(2, 3), torch.ones(3, device="meta")),
        "gelu: bias is on meta; legal is cpu, as x",
    ),
    "two dtypes": (
        lambda: TORCH.swiglu(torch.ones(2, 3), torch.ones(2, 3, dtype=torch.bfloat16)),
        "swiglu: up is torch.bfloat16; legal is torch.float32, as gate",
    ),
    "whole logits": (
        lambda: TORCH.cross_entropy(torch.ones(2, 3, dtype=torch.int64), torch.zeros(2, dtype=torch.int64)),
        "cross_entropy: logits is torch.int64; legal is a floating dtype",
    ),
    "labels elsewhere": (
        lambda: TORCH.cross_entropy(torch.ones(2, 3), torch.zeros(2, dtype=torch.int64, device="meta")),
        "cross_entropy: labels is on meta; legal is cpu, as logits",
    ),
    "weight of another dtype": (
        lambda: TORCH.linear_cross_entropy(
            torch.ones(2, 3), torch.ones(5, 3).bfloat16(), torch.zeros(2, dtype=torch.int64)
        ),
        "linear_cross_entropy: weight is torch.bfloat16; legal is torch.float32, as x",
    ),
    "labels of another shape": (
        lambda: TORCH.linear_cross_entropy(torch.ones(2, 3), torch.ones(5, 3), torch.zeros(3, dtype=torch.int64)),
        "linear_cross_entropy: labels has shape (3,); legal is (2,), that of x less its last dimension",
    ),
    "no rows at once": (
        lambda: TORCH.linear_cross_entropy(
            torch.ones(2, 3), torch.ones(5, 3), torch.zeros(2, dtype=torch.int64), rows=0
        ),
        "linear_cross_entropy: rows=0; legal is 1 or more",
    ),
    "positions elsewhere": (
        lambda: TORCH.rotary(torch.ones(1, 2, 3, 4), torch.ones(2, dtype=torch.int64, device="meta")),
        "rotary: positions is on meta; legal is cpu, as x",
    ),
    "whole heads": (
        lambda: TORCH.attend(*[torch.ones(1, 2, 3, 4, dtype=torch.int64)] * 3),
        "attend: q is torch.int64; legal is a floating dtype",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_torch_would_misread_or_refuse_in_its_own_words_is_refused_by_name(name: str) -> None:
    call, message = REFUSED[name]
    with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
        call()


def test_the_gradient_of_an_embedding_is_its_reference_on_a_piece_of_the_table() -> None:
    generator = torch.Generator().manual_seed(0)
    grad, dy = torch.randn(4, 3, generator=generator), torch.randn(2, 5, 3, generator=generator)
    ids = torch.tensor([[0, 3, 4, 6, 6], [9, 5, 6, 3, 0]])
    want = embedding.reference(grad, dy, ids, start=3)
    TORCH.embedding_grad_(grad, dy, ids, start=3)
    torch.testing.assert_close(grad.double(), want, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("strange", [None, math.inf, math.nan])
def test_a_sum_of_squares_is_its_reference(strange: float | None, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(1)
    tensors = [torch.randn(n, generator=generator).to(dtype) for n in (300_000, 6, 0)]
    if strange is not None:
        tensors[1][5] = strange
    total = TORCH.square_sum(tensors)
    assert total.dtype == torch.float64 and total.isfinite() == (strange is None)
    assert strange is not None or float(total) == pytest.approx(float(flat.reference(tensors)), rel=1e-6)


def test_a_sum_of_squares_refuses_what_is_not_flat() -> None:
    with pytest.raises(ValueError, match="square_sum: tensors is empty; legal is one or more"):
        TORCH.square_sum([])
    with pytest.raises(
        ValueError, match=r"tensor 1 is torch.float32 \(2, 3\) on cpu .* legal is \[n\], floating"
    ):
        TORCH.square_sum([torch.ones(2), torch.ones(2, 3)])


class Largest(TorchDispatchMode):
    """The most elements of one tensor that anything inside has made."""

    numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        made = [
            x.numel() for x in (out if isinstance(out, tuple | list) else (out,)) if isinstance(x, Tensor)
        ]
        self.numel = max(self.numel, *made, 0)
        return out


@pytest.mark.parametrize("rows", [1, 7, 64])
def test_a_fused_linear_loss_never_holds_more_logits_than_its_rows(rows: int) -> None:
    """Nor, of course, their gradient; gradients of x and weight are smaller here than the logits of 7 rows."""
    x, w = f64(64, 2), f64(97, 2, seed=1)
    labels = torch.randint(97, (64,), generator=torch.Generator().manual_seed(2))
    with Largest() as largest:
        TORCH.linear_cross_entropy(x, w, labels, rows=rows)[0].backward()
    assert largest.numel == max(rows * 97, 97 * 2)


def test_a_fused_linear_loss_in_16_bits_is_made_with_the_loss_scale() -> None:
    """Softmax of a word that is far from likely is no float16 without it: 1e-9 where 6e-8 is the least."""
    x, scale = torch.full((3, 1), 4.0, dtype=torch.float16, requires_grad=True), 65536.0
    w = torch.tensor([[0.0], [-5.0], [-5.25]], dtype=torch.float16, requires_grad=True)
    labels = torch.zeros(3, dtype=torch.int64)
    exact = w.detach().double().requires_grad_()
    linear_cross_entropy.reference(x.detach().double(), exact, labels).backward()
    total, _ = TORCH.linear_cross_entropy(x, w, labels, scale=scale)
    (total * scale).backward()
    assert w.grad is not None and exact.grad is not None
    torch.testing.assert_close(w.grad[1:].double() / scale, exact.grad[1:], rtol=2e-3, atol=0.0)


def halves_of_a_loss() -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x, w = (torch.randn(size, 16, generator=generator).bfloat16() for size in (1024, 24))
    return x.requires_grad_(), w.requires_grad_(), torch.randint(24, (1024,), generator=generator)


def test_the_gradient_of_a_16_bit_head_is_as_near_however_many_chunks_there_are() -> None:
    """A sum of chunks in 16 bits was 8 times as far away here."""
    x, w, labels = halves_of_a_loss()
    exact = w.detach().double().requires_grad_()
    linear_cross_entropy.reference(x.detach().double(), exact, labels).backward()
    found = [
        torch.autograd.grad(TORCH.linear_cross_entropy(x, w, labels, rows=n)[0], w)[0] for n in (1024, 2)
    ]
    assert exact.grad is not None
    whole, cut = (float((each.double() - exact.grad).norm()) for each in found)
    assert cut <= 1.1 * whole


def test_a_fused_linear_loss_in_16_bits_is_scaled_in_32() -> None:
    x, w, labels = halves_of_a_loss()
    factor = 1 / 11
    plain = torch.autograd.grad(TORCH.linear_cross_entropy(x, w, labels)[0], (x, w))
    scaled = torch.autograd.grad(TORCH.linear_cross_entropy(x, w, labels)[0] * factor, (x, w))
    for one, times in zip(plain, scaled, strict=True):
        assert torch.equal(times, (one.float() * factor).bfloat16())


@pytest.mark.parametrize("cut", [1, 6, 11])
def test_a_fused_linear_loss_over_a_cut_vocabulary_is_that_over_the_whole(cut: int) -> None:
    """Each piece is given the partials of both, as an all-gather would; the gradients of x add up."""
    x, w = f64(9, 4), f64(11, 4, seed=1)
    labels = torch.randint(11, (9,), generator=torch.Generator().manual_seed(2))
    want, _ = TORCH.linear_cross_entropy(x, w, labels, -100, 0.1, 0.01, rows=4)
    want_x, want_w = torch.autograd.grad(want, (x, w))
    logits = (x @ w.T).detach()
    pieces = {0: w[:cut], cut: w[cut:]}
    partials = torch.stack([partial(logits[:, a : a + len(p)], labels, a, 11) for a, p in pieces.items()])
    summed = torch.zeros_like(x)
    for start, piece in pieces.items():
        given, begin = piece.detach().requires_grad_(), iter(range(0, 9, 4))

        def gather(own: Tensor, start: int = start, begin: Iterator[int] = begin) -> Tensor:
            first = next(begin)
            both = partials[:, first : first + len(own)]
            torch.testing.assert_close(own, both[0 if start == 0 else 1])
            return both

        got, _ = TORCH.linear_cross_entropy(
            x, given, labels, -100, 0.1, 0.01, start=start, vocabulary=11, gather=gather, rows=4
        )
        torch.testing.assert_close(got, want)
        got_x, got_w = torch.autograd.grad(got, (x, given))
        torch.testing.assert_close(got_w, want_w[start : start + len(piece)])
        summed += got_x
    torch.testing.assert_close(summed, want_x)


def test_layers_that_are_given_the_same_positions_share_one_rotary_table_until_these_change() -> None:
    positions, x = torch.arange(4), torch.randn(1, 4, 2, 8, dtype=torch.float64)
    with patch.object(rotary_file, "_table", wraps=rotary_file._table) as made:
        first, again = TORCH.rotary(x, positions, 10000.0), TORCH.rotary(x, positions, 10000.0)
        other_base = TORCH.rotary(x, positions, 5e5)
        positions += 3
        moved = TORCH.rotary(x, positions, 10000.0)
    assert made.call_count == 3
    assert torch.equal(first, again) and torch.equal(first, TORCH.rotary(x, torch.arange(4), 10000.0))
    assert torch.equal(other_base, TORCH.rotary(x, torch.arange(4), 5e5))
    assert torch.equal(moved, TORCH.rotary(x, torch.arange(3, 7), 10000.0))
