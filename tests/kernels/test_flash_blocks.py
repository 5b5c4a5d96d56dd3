"""Blocks of a ring on a GPU take torch's flash attention where it knows the mask: tested by its CPU twin."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from colossal_lite.kernels import CAUSAL, FULL, Mask, attention

aten = torch.ops.aten
CUT = ((0, 8), (8, 16))
DOCUMENTS = Mask(True, torch.zeros(1, 8, dtype=torch.int64))


class Twin:
    """torch's flash attention by what a CPU has of it, which counts its calls."""

    def __init__(self) -> None:
        self.forwards = self.backwards = 0

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, p: float, causal: bool, *, scale: float | None
    ) -> tuple[Any, ...]:
        assert p == 0.0 and (not causal or q.shape[2] == k.shape[2]), "the last query would be aligned"
        self.forwards += 1
        return *aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, p, causal, scale=scale), None, None

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, first_q: None, first_k: None,
        queries: int, keys: int, p: float, causal: bool, seed: Tensor, offset: Tensor, *, scale: float | None,
    ) -> Any:  # fmt: skip
        assert (queries, keys) == (q.shape[2], k.shape[2]) and lse.is_contiguous()
        self.backwards += 1
        return aten._scaled_dot_product_flash_attention_for_cpu_backward(
            dout, q, k, v, out, lse, p, causal, scale=scale
        )


@pytest.fixture
def twin() -> Iterator[Twin]:
    made = Twin()
    names = SimpleNamespace(
        _scaled_dot_product_flash_attention=made.forward,
        _scaled_dot_product_flash_attention_backward=made.backward,
    )
    with (
        patch.object(attention, "aten", names),
        patch.object(torch.backends.cuda, "is_flash_attention_available", lambda: True),
        patch.object(torch.cuda, "get_device_capability", lambda _: (9, 0)),
        patch.object(attention, "FLASH_DEVICE", "cpu"),
    ):
        yield made


def inputs(dtype: torch.dtype = torch.bfloat16, width: int = 8) -> tuple[Tensor, ...]:
    torch.manual_seed(0)
    return tuple(torch.randn(2, 16, heads, width).to(dtype) for heads in (4, 2, 2, 4))


def refused(*_: Any, **__: Any) -> Any:
    raise AssertionError("the Triton kernel is asked")


@pytest.mark.parametrize("mask", [CAUSAL, FULL], ids=["causal", "full"])
def test_blocks_merge_to_whole_attention_and_their_gradients_add_to_its(twin: Twin, mask: Mask) -> None:
    q, k, v, dout = inputs()
    out, lse, dq = torch.zeros(2, 16, 4, 8), torch.empty(2, 4, 16), torch.zeros(2, 16, 4, 8)
    dk, dv = torch.zeros(2, 16, 2, 8), torch.zeros(2, 16, 2, 8)
    seen = [(i, j) for i in range(2) for j in range(2) if j <= i or mask is FULL]
    for i, j in seen:
        (a, b), (c, d) = CUT[i], CUT[j]
        part = attention.forward_best(refused, q[:, a:b], k[:, c:d], v[:, c:d], mask=mask, offsets=(a, c))
        if j == 0:
            out[:, a:b], lse[:, :, a:b] = part
        else:
            attention.merge_(out[:, a:b], lse[:, :, a:b], *part)
    for i, j in seen:
        (a, b), (c, d) = CUT[i], CUT[j]
        terms = attention.backward_best(
            refused, dout[:, a:b], q[:, a:b], k[:, c:d], v[:, c:d], out[:, a:b].to(q.dtype), lse[:, :, a:b],
            mask=mask, offsets=(a, c),
        )  # fmt: skip
        for whole, place, term in zip((dq, dk, dv), ((a, b), (c, d), (c, d)), terms, strict=True):
            whole[:, slice(*place)] += term
    assert twin.forwards == twin.backwards == len(seen)
    wide = [x.double().requires_grad_() for x in (q, k, v)]
    want, want_lse = attention.reference(*wide, mask=mask)
    torch.testing.assert_close(out.double(), want, rtol=2e-2, atol=2e-2)
    torch.testing.assert_close(lse.double(), want_lse, rtol=2e-2, atol=2e-2)
    gradients = torch.autograd.grad(want, wide, dout.double())
    torch.testing.assert_close([dq, dk, dv], [g.float() for g in gradients], rtol=5e-2, atol=5e-2)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (dict(mask=CAUSAL, offsets=(4, 0)), "a causal mask that is not aligned"),
        (dict(mask=DOCUMENTS), "documents"),
        (dict(mask=FULL, window=3), "a window"),
        (dict(dtype=torch.float32), "float32"),
        (dict(width=12), "a head width that is no multiple of 8"),
        (dict(width=264), "a head width beyond 256"),
        (dict(keys=4), "causal over fewer keys than queries"),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_what_it_does_not_know_the_kernel_does(twin: Twin, call: dict[str, Any], words: str) -> None:
    keys, dtype, width = call.pop("keys", 8), call.pop("dtype", torch.bfloat16), call.pop("width", 8)
    q, k, v, dout = (x[:1, :8] for x in inputs(dtype, width))
    asked: list[str] = []
    attention.forward_best(lambda *_, **__: asked.append("forward"), q, k[:, :keys], v[:, :keys], **call)  # type: ignore[arg-type,return-value]
    lse = torch.zeros(1, 4, 8)
    attention.backward_best(
        lambda *_, **__: asked.append("backward"),
        dout,
        q,
        k[:, :keys],
        v[:, :keys],
        q,
        lse,
        **call,  # type: ignore[arg-type,return-value]
    )
    assert asked == ["forward", "backward"] and twin.forwards == twin.backwards == 0, words
    kernel = lambda *_, **named: asked.append(str(named["dlse"] is lse))  # noqa: E731
    attention.backward_best(kernel, dout, q, k, v, q, lse, dlse=lse, mask=FULL)  # type: ignore[arg-type]
    assert asked[-1] == "True", "a gradient of lse is the kernel's"


def test_its_arguments_are_those_of_this_torch() -> None:
    forward = aten._scaled_dot_product_flash_attention.default._schema
    backward = aten._scaled_dot_product_flash_attention_backward.default._schema
    assert [x.name for x in forward.arguments] == [
        "query", "key", "value", "dropout_p", "is_causal", "return_debug_mask", "scale",
    ]  # fmt: skip
    assert [x.name for x in forward.returns][:2] == ["output", "logsumexp"]
    assert [x.name for x in backward.arguments] == [
        "grad_out", "query", "key", "value", "out", "logsumexp", "cum_seq_q", "cum_seq_k", "max_q", "max_k",
        "dropout_p", "is_causal", "philox_seed", "philox_offset", "scale",
    ]  # fmt: skip
