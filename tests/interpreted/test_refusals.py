"""Every Triton path refuses a tensor that its kernel would misread, by name, or computes what the torch path does."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from colossal_lite.kernels import TORCH, Mask, Ops, Rows, launch, select, triton_paths
from tests.shared.interpreter import sanitized  # before anything imports triton

OPS = select("triton", "cpu")
ADAMW = dict(step=3, lr=0.1, beta1=0.9, beta2=0.95, eps=1e-3, weight_decay=0.1)
GPU = "a cuda tensor|cuda"


def f(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


def i(*shape: int, high: int = 5) -> Tensor:
    return torch.arange(torch.Size(shape).numel()).view(shape) % high


def rows() -> Rows:
    return Rows((1, 2), 3, torch.arange(2), torch.arange(3))


def attention(**more: Any) -> dict[str, Any]:
    return dict(q_BTHK=f(2, 3, 4, 8), k_BSGK=f(2, 3, 2, 8, seed=1), v_BSGK=f(2, 3, 2, 8, seed=2), **more)


def calls() -> dict[str, dict[str, Any]]:
    """One legal call of every op that has a Triton path, with every tensor that it can take."""
    x, w = f(2, 3, 8), f(8)
    out, lse = TORCH.attend_forward(**attention())
    return {
        "layer_norm": dict(x=x, weight=w, bias=f(8, seed=1), eps=1e-5),
        "rms_norm": dict(x=x, weight=w, eps=1e-5),
        "add_layer_norm": dict(x=x, residual=x + 1, weight=w, bias=w + 1, eps=1e-5, p=0.2, rows=rows()),
        "add_rms_norm": dict(x=x, residual=x + 1, weight=w, eps=1e-5, p=0.2, rows=rows()),
        "gelu": dict(x=x, bias=w),
        "swiglu": dict(gate=x, up=x + 1),
        "rotary": dict(x_BTHK=f(2, 3, 4, 8), positions=i(2, 3)),
        "attend": attention(mask=Mask(documents=i(2, 3, high=2)), kv_prefix=[f(2, 4, 2, 8), f(2, 4, 2, 8, seed=1)]),
        "attend_lse": attention(mask=Mask(documents=i(2, 3, high=2))),
        "attend_forward": attention(),
        "attend_backward": attention(dout_BTHK=out + 1, out_BTHK=out, lse_BHT=lse, dlse=lse + 1),
        "cross_entropy": dict(logits=f(6, 5), labels=i(6)),
        "cross_entropy_partial": dict(logits=f(6, 5), labels=i(6), start=0),
        "cross_entropy_gradient": dict(
            d_total=f(1)[0], logits=f(6, 5), labels=i(6), lse=f(6), start=0, vocabulary=5, out=f(6, 5)
        ),
        "linear_cross_entropy": dict(x=f(6, 8), weight=f(5, 8), labels=i(6)),
        "dropout": dict(x=x, p=0.2, rows=rows()),
        "dropout_add": dict(x=x, residual=x + 1, p=0.2, rows=rows()),
        "adamw_": dict(
            param=f(9), grad=f(9), exp_avg=f(9), exp_avg_sq=f(9).abs(), low=f(9), grad_scale=torch.tensor(2.0), **ADAMW
        ),
        "sgd_": dict(param=f(9), grad=f(9), momentum_buffer=f(9), lr=0.1, momentum=0.9, low=f(9)),
        "lion_": dict(param=f(9), grad=f(9), exp_avg=f(9), lr=0.1, beta1=0.9, beta2=0.9, weight_decay=0.1, low=f(9)),
        "square_sum": dict(tensors=[f(5), f(9)]),
        "embedding_grad_": dict(grad=f(5, 8), dy=f(2, 3, 8), ids=i(2, 3)),
        "normal": dict(key=(1, 2), start=0, stop=4),
        "uniform": dict(key=(1, 2), start=0, stop=4),
    }  # fmt: skip


def test_every_op_is_tried_and_every_tensor_of_it() -> None:
    made = calls()
    assert set(made) == set(triton_paths())
    for op, path in triton_paths().items():
        tensors = {n for n, x in made[op].items() if isinstance(x, Tensor | list)}
        assert tensors <= set(path.takes), f"{op}: {tensors - set(path.takes)}"


def tensors() -> list[tuple[str, str]]:
    return [(op, n) for op, made in calls().items() for n, x in made.items() if isinstance(x, Tensor | list)]


def changed(op: str, name: str, change: Callable[[Tensor], Tensor]) -> dict[str, Any]:
    """The call with one tensor changed (of a list, the last)."""
    made = calls()[op]
    x = made[name]
    made[name] = [*x[:-1], change(x[-1])] if isinstance(x, list) else change(x)
    return made


def refused(op: str, name: str, made: dict[str, Any], ops: Ops = OPS) -> str:
    """The message, which names op and argument and says what is legal."""
    with pytest.raises(ValueError) as caught:
        getattr(ops, op)(**made)
    message = str(caught.value)
    plain = re.sub("_[A-Z]+$", "", name)
    assert message.startswith(f"{op}: ") and plain in message and "legal" in message, message
    return message


WRONG_DTYPE: dict[str, Callable[[Tensor], Tensor]] = {
    "whole numbers": lambda x: (x > 0).to(torch.int32) if x.is_floating_point() else x.to(torch.float32),
    "complex": lambda x: x.to(torch.complex64),
}


@pytest.mark.parametrize("kind", WRONG_DTYPE)
@pytest.mark.parametrize(("op", "name"), tensors())
def test_a_tensor_of_a_wrong_dtype_is_refused(op: str, name: str, kind: str) -> None:
    assert "torch." in refused(op, name, changed(op, name, WRONG_DTYPE[kind]))


@pytest.mark.parametrize(("op", "name"), tensors())
def test_a_tensor_on_another_device_is_refused(op: str, name: str) -> None:
    made = changed(op, name, lambda x: x.to("meta"))
    if (
        sum(isinstance(x, Tensor | list) for x in made.values()) > 1
    ):  # on meta tensors alone every op tells shapes
        with pytest.raises(ValueError, match=f"^{op}: .* is on .*; legal is "):
            getattr(OPS, op)(**made)
    with (
        patch.object(launch, "interpreting", lambda: False),
        pytest.raises(ValueError, match=rf"^{op}: .* on cpu; legal is {GPU}"),
    ):
        getattr(select("triton", "cuda"), op)(**calls()[op])


ANY_LENGTH = {
    *(("layer_norm", "x"), ("rms_norm", "x"), ("gelu", "x"), ("square_sum", "tensors")),
    *(("linear_cross_entropy", "weight"), ("embedding_grad_", "grad")),
}


@pytest.mark.parametrize(("op", "name"), [pair for pair in tensors() if pair not in ANY_LENGTH])
def test_a_tensor_of_a_wrong_shape_is_refused(op: str, name: str) -> None:
    def longer(x: Tensor) -> Tensor:
        return torch.cat([x, x[:1]]) if x.dim() else x.expand(2)

    with pytest.raises(ValueError, match=rf"^{op}: .*legal"):
        getattr(OPS, op)(**changed(op, name, longer))


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "every second element": lambda x: (
        torch.stack([x, x + (x == x).to(x.dtype)], -1)[..., 0] if x.dim() else x
    ),
    "transposed": lambda x: x.transpose(0, -1).contiguous().transpose(0, -1) if x.dim() > 1 else x,
    "one row for all": lambda x: x[:1].expand(x.shape) if x.dim() else x,
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("op", "name"), tensors())
def test_strides_are_refused_or_right(op: str, name: str, layout: str) -> None:
    made = changed(op, name, LAYOUTS[layout])
    x = made[name][-1] if isinstance(made[name], list) else made[name]
    try:
        with sanitized():
            got = getattr(OPS, op)(**made)
    except ValueError:
        message = refused(op, name, made)
        assert "stride" in message or "legal" in message
        assert not x.is_contiguous(), f"what is contiguous is legal: {message}"
        return
    want_call = {n: _dense(v) for n, v in changed(op, name, LAYOUTS[layout]).items()}
    want = getattr(TORCH, op)(**want_call)
    for a, b in zip(_results(got, made), _results(want, want_call), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


def _dense(value: Any) -> Any:
    if isinstance(value, list):
        return [x.contiguous() for x in value]
    return value.contiguous() if isinstance(value, Tensor) else value


def _results(returned: Any, made: dict[str, Any]) -> list[Tensor]:
    """What an op gives: what it returns, and else what it wrote (its gradient may be used up)."""
    if returned is None:
        keep = {n: x for n, x in made.items() if n not in ("grad", "tensors") or "ids" in made}
        return [
            x for v in keep.values() for x in (v if isinstance(v, list) else [v]) if isinstance(x, Tensor)
        ]
    return [returned] if isinstance(returned, Tensor) else [x for x in returned if isinstance(x, Tensor)]


@pytest.mark.parametrize("op", ["dropout", "dropout_add", "add_rms_norm", "add_layer_norm"])
def test_rows_may_be_strided(op: str) -> None:
    made = calls()[op]
    made["rows"] = Rows((1, 2), 3, torch.arange(4)[::2], torch.arange(9)[1::3])
    want = getattr(TORCH, op)(**made)
    got = getattr(OPS, op)(**made)
    for a, b in zip(_results(got, made), _results(want, made), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("op", "change", "words"),
    [
        ("rotary", dict(positions=f(2, 3)), "positions is torch.float32; legal"),
        ("attend", dict(mask=Mask(documents=f(2, 3))), "documents of the queries are torch.float32"),
        ("attend", dict(mask=Mask(documents=i(2, 4))), r"documents of the queries have shape \(2, 4\)"),
        ("attend", dict(window=0), "window=0; legal is 1 or more"),
        ("normal", dict(device="cuda"), "device is cuda; legal is cpu"),
        ("normal", dict(start=-1), "elements -1 to 4; legal is 0 <= start <= stop"),
        ("dropout", dict(p=1.0), "p=1.0; legal is 0 <= p < 1"),
        ("cross_entropy", dict(smoothing=1.0), "smoothing=1.0; legal"),
        ("gelu", dict(approximate="fast"), "approximate='fast'; legal"),
        ("adamw_", dict(grad_scale=f(2)), r"grad_scale has shape \(2,\); legal is one element"),
        ("sgd_", dict(momentum=0.0), "momentum=0.0 with a momentum_buffer"),
    ],
)
def test_a_number_or_a_mask_that_is_none_is_refused(op: str, change: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        getattr(OPS, op)(**calls()[op] | change)


@pytest.mark.parametrize(
    ("op", "change", "words"),
    [
        ("rms_norm", dict(x=f(2, 3, 8).double()), "x is torch.float64"),
        ("square_sum", dict(tensors=[f(5).double()]), r"tensors\[0\] is torch.float64"),
        ("dropout", dict(rows=Rows((1, 2), 3, torch.arange(2), torch.arange(3), 6)), "rows.feature=6"),
        (
            "attend",
            attention(kv_prefix=None) | {n: f(2, 3, 4, 264) for n in ("q_BTHK", "k_BSGK", "v_BSGK")},
            "a head width of 264",
        ),
    ],
)
def test_what_falls_back_is_refused_by_strict_kernels(op: str, change: dict[str, Any], words: str) -> None:
    def made() -> dict[str, Any]:
        return {
            n: [x.clone() for x in v] if isinstance(v, list) else v for n, v in (calls()[op] | change).items()
        }

    with pytest.raises(ValueError, match=f"^{op}: {words}.* strict kernels do not hand to torch"):
        getattr(OPS, op)(**made())
    lenient = select("triton", "cpu", strict=False)
    got, want = (_results(getattr(ops, op)(**made()), {}) for ops in (lenient, TORCH))
    for a, b in zip(got, want, strict=True):
        assert torch.equal(a, b)


def test_heads_of_three_dimensions_are_refused_by_name() -> None:
    for op in ("attend", "attend_lse", "attend_forward"):
        with pytest.raises(ValueError, match=rf"^{op}: q has shape \(3, 4, 8\); legal is"):
            getattr(OPS, op)(f(3, 4, 8), f(3, 2, 8), f(3, 2, 8))


@pytest.mark.parametrize("op", ["dropout", "dropout_add", "add_rms_norm", "add_layer_norm"])
def test_masks_of_more_than_three_dimensions_are_left_to_torch(op: str) -> None:
    made = calls()[op]
    for name in ("x", "residual"):
        if name in made:
            made[name] = f(2, 3, 4, 8)
    with pytest.raises(ValueError, match=f"^{op}: x has 4 dimensions"):
        getattr(OPS, op)(**made)
    got, want = (getattr(ops, op)(**made) for ops in (select("triton", "cpu", strict=False), TORCH))
    for a, b in zip(*((x if isinstance(x, tuple) else (x,)) for x in (got, want)), strict=True):
        assert torch.equal(a, b)


def test_more_programs_than_a_grid_holds_are_refused() -> None:
    q = torch.empty(1, 1, 1, 16).expand(65_536, 1, 1, 16)
    with pytest.raises(
        ValueError, match="_attend_forward_kernel: 65,536 programs in one dimension; legal is"
    ):
        OPS.attend_forward(q, q, q)


def test_the_interpreter_is_never_chosen_for_a_gpu() -> None:
    assert {choice.path for choice in select("auto", "cuda").describe()} == {"torch"}
    with pytest.raises(ValueError, match="TRITON_INTERPRET=1 has kernels interpreted, on the CPU"):
        select("triton", "cuda")
