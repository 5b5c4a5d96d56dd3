"""Computes exact attention under a mask that is data: causal, window, documents, grouped queries, offsets.

    s_ij = scale q_i . k_j    lse_i = log sum_j exp(s_ij)    P_ij = exp(s_ij - lse_i)   out_i = sum_j P_ij v_j

Tensors are [B, T, H, K].  k and v have G heads, and G divides H. Query head h reads key head h // (H / G). The sums run
over visible keys.  With p_i = offset_q + i and p_j = offset_k + j, three rules hide keys:
    causal: p_j > p_i;
    a window of w: p_j <= p_i - w, and also p_j >= p_i + w unless causal;
    documents: keys of another document.
Options, as published:
    softcap c replaces the scaled scores by c tanh(s / c) (Gemma 2, arXiv 2408.00118, 2.3);
    bias is added after that (ALiBi, arXiv 2108.12409; T5);
    keys of kv_prefix have no positions, so every query sees them (prefix tuning, arXiv 2101.00190).
No caller passes a [T, S] mask, so one op serves ring steps, token slices, packed documents and generation.

lse is natural, [B, H, T], float32 or better.  A query that sees nothing has out 0 and lse -inf.  torch's CPU kernel
gives lse 0.0 there, which would spoil a merge, so it is rewritten.  Backward of one ring step needs the out and lse
over *all* keys: D_i = dout_i . out_i - dlse_i, dS = P (dout_i . v_j - D_i) scale.

The kernels for GPUs are in attention_triton.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

import colossal_lite.kernels.attention_triton as _kernels

from .launch import DENSE, HALVES, Takes, TritonOp
from .mask import CAUSAL, FULL, Mask, Offsets

aten = torch.ops.aten
FLASH_DEVICE = "cuda"


def attend(
    q_BTHK: Tensor,
    k_BSGK: Tensor,
    v_BSGK: Tensor,
    *,
    mask: Mask = CAUSAL,
    offsets: Offsets = (0, 0),
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
    bias: Tensor | None = None,
    kv_prefix: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """out [B, T, H, K].  scale defaults to 1 / sqrt(K); bias expands to [B, H, T, S]; kv_prefix is a pair [B, P, G, K].

    softcap and bias hold the scores [B, H, T, S] in memory.  Raises ValueError for shapes that do not fit.
    """
    check("attend", q_BTHK, k_BSGK, v_BSGK, mask, window, softcap, bias, kv_prefix)
    options: dict[str, Any] = dict(mask=mask, offsets=offsets, scale=scale, window=window)
    if kv_prefix is not None:
        return _with_prefix(attend_lse, q_BTHK, k_BSGK, v_BSGK, kv_prefix, options, softcap, bias)
    if softcap is not None or bias is not None:
        return _attend_scores(q_BTHK, k_BSGK, v_BSGK, softcap, bias, **options)[0]
    path = path_of(q_BTHK.device.type, q_BTHK.shape[1], k_BSGK.shape[1], mask, offsets, window)
    if path == "kernel":
        return attend_lse(q_BTHK, k_BSGK, v_BSGK, **options)[0]
    visible = visible_keys(q_BTHK, k_BSGK, mask, offsets, window) if path == "masked" else None
    q, k, v = (x.transpose(1, 2) for x in (q_BTHK, k_BSGK, v_BSGK))
    out = F.scaled_dot_product_attention(
        q, k, v, attn_mask=visible, is_causal=path == "causal", scale=scale, enable_gqa=q.shape[1] != k.shape[1]
    )  # fmt: skip
    return out.transpose(1, 2)


def path_of(
    device_type: str, queries: int, keys: int, mask: Mask, offsets: Offsets, window: int | None
) -> Literal["full", "causal", "masked", "kernel"]:
    """How an attention is computed: by torch's own (flash or cuDNN on a GPU) without a mask or with is_causal. On a CPU
    also with a mask tensor; else by a kernel that takes the mask as data.

    On a GPU torch is never handed a mask tensor: cuDNN's backward gives NaN with one (pytorch #196678).
    """
    shape = _shape_of_mask(queries, keys, mask, offsets, window)
    if shape == "full":
        return "full"
    if shape == "causal":
        return "causal"
    return "masked" if device_type == "cpu" else "kernel"


def _with_prefix(
    lse_of: Callable[..., tuple[Tensor, Tensor]], q: Tensor, k: Tensor, v: Tensor, prefix: tuple[Tensor, Tensor],
    options: dict[str, Any], softcap: float | None, bias: Tensor | None,
) -> Tensor:  # fmt: skip
    """Attention over the prefix and over the rest, merged by their lse."""
    more: dict[str, Any] = {}
    if softcap is not None or bias is not None:
        lse_of, more = _attend_scores, dict(softcap=softcap)
    scale = options["scale"]
    before, before_lse = lse_of(
        q, *prefix, mask=FULL, scale=scale, **more, **({"bias": None} if more else {})
    )
    rest, rest_lse = lse_of(q, k, v, **options, **more, **({"bias": bias} if more else {}))
    share = (
        (rest_lse - before_lse).sigmoid().transpose(1, 2)[..., None]
    )  # the prefix is seen by all: never -inf
    return torch.lerp(before.to(share.dtype), rest.to(share.dtype), share).to(q.dtype)


def _attend_scores(
    q: Tensor, k: Tensor, v: Tensor, softcap: float | None, bias: Tensor | None, *, mask: Mask = CAUSAL,
    offsets: Offsets = (0, 0), scale: float | None = None, window: int | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(out, lse) with the scores in memory, for autograd to differentiate."""
    scores, _ = _scores(q, k, scale)  # [B, G, R, T, S]
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if bias is not None:
        heads = bias.to(scores.dtype).expand(*bias.shape[:-3], q.shape[2], *bias.shape[-2:])
        scores = scores + heads.unflatten(-3, (k.shape[2], -1))
    visible = visible_keys(q, k, mask, offsets, window)[:, :, None]
    nothing = ~visible.any(dim=-1, keepdim=True)
    scores = scores.masked_fill(
        ~visible & ~nothing, -math.inf
    )  # an emptied row would have NaN for a gradient
    p = scores.softmax(dim=-1).masked_fill(nothing, 0.0)
    lse = torch.logsumexp(scores, dim=-1).masked_fill(nothing[..., 0], -math.inf)
    out = torch.einsum("bgrts,bsgk->btgrk", p, v.to(p.dtype)).flatten(2, 3)
    return out.to(q.dtype), lse.flatten(1, 2)


def attend_lse(
    q_BTHK: Tensor,
    k_BSGK: Tensor,
    v_BSGK: Tensor,
    *,
    mask: Mask = CAUSAL,
    offsets: Offsets = (0, 0),
    scale: float | None = None,
    window: int | None = None,
) -> tuple[Tensor, Tensor]:
    """(out [B, T, H, K], lse [B, H, T]), differentiable through both."""
    check("attend_lse", q_BTHK, k_BSGK, v_BSGK, mask, window)
    options = dict(mask=mask, offsets=offsets, scale=scale, window=window)
    result: tuple[Tensor, Tensor] = _AttendLse.apply(  # type: ignore[no-untyped-call]
        q_BTHK, k_BSGK, v_BSGK, attend_forward, attend_backward, options
    )
    return result


class _AttendLse(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, forward: Callable[..., tuple[Tensor, Tensor]],
        backward: Callable[..., tuple[Tensor, Tensor, Tensor]], options: dict[str, Any],
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        out, lse = forward(q, k, v, **options)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.run, ctx.options = backward, options
        return out, lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        dout = torch.zeros_like(out) if dout is None else dout
        return *ctx.run(dout, q, k, v, out, lse, dlse=dlse, **ctx.options), None, None, None


def attend_forward(
    q_BTHK: Tensor,
    k_BSGK: Tensor,
    v_BSGK: Tensor,
    *,
    mask: Mask = CAUSAL,
    offsets: Offsets = (0, 0),
    scale: float | None = None,
    window: int | None = None,
) -> tuple[Tensor, Tensor]:
    """(out [B, T, H, K], lse [B, H, T]) without autograd: one step of a ring."""
    check("attend_forward", q_BTHK, k_BSGK, v_BSGK, mask, window)
    shape = _shape_of_mask(q_BTHK.shape[1], k_BSGK.shape[1], mask, offsets, window)
    if shape == "nothing" or 0 in (q_BTHK.numel(), k_BSGK.numel()):
        return torch.zeros_like(q_BTHK), q_BTHK.new_full(
            (q_BTHK.shape[0], q_BTHK.shape[2], q_BTHK.shape[1]), -math.inf, dtype=_acc(q_BTHK)
        )
    q, k, v = (x.transpose(1, 2) for x in (q_BTHK, k_BSGK, v_BSGK))
    if flash_takes(q_BTHK, k_BSGK, mask, offsets, window):
        out, lse, *_ = aten._scaled_dot_product_flash_attention(q, k, v, 0.0, shape == "causal", scale=scale)
        return out.transpose(1, 2), lse
    if q_BTHK.device.type not in ("cpu", "meta"):
        return _forward_plain(q_BTHK, k_BSGK, v_BSGK, mask, offsets, scale, window)
    visible = None if shape in ("full", "causal") else visible_keys(q_BTHK, k_BSGK, mask, offsets, window)
    out, lse = aten._scaled_dot_product_flash_attention_for_cpu(
        q, k, v, 0.0, shape == "causal", attn_mask=_additive(visible, q.dtype), scale=scale
    )
    if visible is not None:
        lse = lse.masked_fill(~visible.any(dim=-1), -math.inf)
    return out.transpose(1, 2), lse


def attend_backward(
    dout_BTHK: Tensor,
    q_BTHK: Tensor,
    k_BSGK: Tensor,
    v_BSGK: Tensor,
    out_BTHK: Tensor,
    lse_BHT: Tensor,
    *,
    dlse: Tensor | None = None,
    mask: Mask = CAUSAL,
    offsets: Offsets = (0, 0),
    scale: float | None = None,
    window: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """(dq, dk, dv) of these keys. out and lse are over *all* keys (those of a ring after its last step)."""
    check("attend_backward", q_BTHK, k_BSGK, v_BSGK, mask, window)
    _check_backward(dout_BTHK, q_BTHK, out_BTHK, lse_BHT, dlse)
    shape = _shape_of_mask(q_BTHK.shape[1], k_BSGK.shape[1], mask, offsets, window)
    if shape == "nothing" or 0 in (q_BTHK.numel(), k_BSGK.numel()):
        return torch.zeros_like(q_BTHK), torch.zeros_like(k_BSGK), torch.zeros_like(v_BSGK)
    flash = dlse is None and flash_takes(q_BTHK, k_BSGK, mask, offsets, window)
    if not flash and (q_BTHK.device.type not in ("cpu", "meta") or dlse is not None or shape == "masked"):
        return _backward_plain(
            dout_BTHK, q_BTHK, k_BSGK, v_BSGK, out_BTHK, lse_BHT, dlse, mask, offsets, scale, window
        )
    dout, q, k, v, out = (x.transpose(1, 2) for x in (dout_BTHK, q_BTHK, k_BSGK, v_BSGK, out_BTHK))
    if flash:
        no_dropout = torch.empty(
            2, dtype=torch.uint64, device=q.device
        )  # its seed and offset, which nothing reads
        grads = aten._scaled_dot_product_flash_attention_backward(
            dout, q, k, v, out, lse_BHT.contiguous(), None, None, q.shape[2], k.shape[2], 0.0, shape == "causal",
            no_dropout, no_dropout, scale=scale,
        )  # fmt: skip
    else:
        grads = aten._scaled_dot_product_flash_attention_for_cpu_backward(
            dout, q, k, v, out, lse_BHT, 0.0, shape == "causal", scale=scale
        )
    dq, dk, dv = (g.transpose(1, 2) for g in grads)
    return dq, dk, dv


def flash_takes(
    q_BTHK: Tensor, k_BSGK: Tensor, mask: Mask, offsets: Offsets = (0, 0), window: int | None = None
) -> bool:
    """Whether torch's flash attention on a GPU, forward and backward with a given lse, computes this.

    It takes 16 bits, head widths of whole eights up to 256, and full masks.  Causal ones need as many queries as keys:
    else its last query, not its first, is aligned.
    """
    queries, keys, width = q_BTHK.shape[1], k_BSGK.shape[1], q_BTHK.shape[3]
    shape = _shape_of_mask(queries, keys, mask, offsets, window)
    return (
        q_BTHK.device.type == FLASH_DEVICE
        and torch.backends.cuda.is_flash_attention_available()
        and torch.cuda.get_device_capability(q_BTHK.device) >= (8, 0)
        and q_BTHK.dtype in HALVES
        and width % 8 == 0
        and width <= 256
        and (shape == "full" or (shape == "causal" and queries == keys))
        and 0 not in (q_BTHK.numel(), k_BSGK.numel())
    )


def merge_(out_BTHK: Tensor, lse_BHT: Tensor, part_BTHK: Tensor, part_lse_BHT: Tensor) -> None:
    """Add to (out, lse) of some keys, in place, those of disjoint keys; out and lse are float32 or better."""
    gain = torch.where(part_lse_BHT == -math.inf, -math.inf, part_lse_BHT - lse_BHT)
    share = gain.sigmoid().transpose(1, 2)[..., None]
    out_BTHK.lerp_(part_BTHK.to(out_BTHK.dtype), share)
    lse_BHT.copy_(torch.logaddexp(lse_BHT, part_lse_BHT))


def visible_keys(
    q_BTHK: Tensor, k_BSGK: Tensor, mask: Mask, offsets: Offsets = (0, 0), window: int | None = None
) -> Tensor:
    """Bool [B or 1, 1, T, S]: the mask as a tensor, for paths that need one."""
    device = q_BTHK.device
    p_q = torch.arange(q_BTHK.shape[1], device=device)[:, None] + offsets[0]
    p_k = torch.arange(k_BSGK.shape[1], device=device)[None, :] + offsets[1]
    visible = torch.ones(q_BTHK.shape[1], k_BSGK.shape[1], dtype=torch.bool, device=device)
    if mask.causal:
        visible = visible & (p_k <= p_q)
    if window is not None:
        visible = visible & (p_k > p_q - window) & (p_k < p_q + window)
    documents = mask.document_pair()
    if documents is None:
        return visible[None, None]
    return (visible & (documents[0][:, :, None] == documents[1][:, None, :]))[:, None]


def _shape_of_mask(queries: int, keys: int, mask: Mask, offsets: Offsets, window: int | None) -> str:
    """ "full", "causal" (aligned at the first query and key), "nothing", or "masked" (anything else)."""
    lag = offsets[0] - offsets[1]
    if mask.causal and lag + queries - 1 < 0:
        return "nothing"
    if mask.documents is not None or window is not None:
        return "masked"
    if not mask.causal or lag >= keys - 1:
        return "full"
    return "causal" if lag == 0 else "masked"


def _additive(visible: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    if visible is None:
        return None
    return torch.zeros(visible.shape, dtype=dtype, device=visible.device).masked_fill_(~visible, -math.inf)


def _acc(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def _scores(q: Tensor, k: Tensor, scale: float | None) -> tuple[Tensor, float]:
    """Scaled scores [B, G, R, T, S] with R = H / G, and the scale."""
    factor = q.shape[-1] ** -0.5 if scale is None else scale
    q5 = q.to(_acc(q)).unflatten(2, (k.shape[2], -1))  # [B, T, G, R, K]
    return torch.einsum("btgrk,bsgk->bgrts", q5, k.to(q5.dtype)) * factor, factor


def _forward_plain(
    q: Tensor, k: Tensor, v: Tensor, mask: Mask, offsets: Offsets, scale: float | None, window: int | None
) -> tuple[Tensor, Tensor]:
    scores, _ = _scores(q, k, scale)
    scores = scores.masked_fill(~visible_keys(q, k, mask, offsets, window)[:, :, None], -math.inf)
    lse = torch.logsumexp(scores, dim=-1)
    p = torch.where(lse[..., None] == -math.inf, 0.0, (scores - lse[..., None]).exp())
    out = torch.einsum("bgrts,bsgk->btgrk", p, v.to(p.dtype)).flatten(2, 3)
    return out.to(q.dtype), lse.flatten(1, 2)


def _backward_plain(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, dlse: Tensor | None,
    mask: Mask, offsets: Offsets, scale: float | None, window: int | None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    acc = _acc(q)
    scores, factor = _scores(q, k, scale)
    visible = visible_keys(q, k, mask, offsets, window)[:, :, None]
    delta = torch.einsum("bthk,bthk->bht", dout.to(acc), out.to(acc))
    if dlse is not None:
        delta = delta - dlse
    lse5, delta5 = (x.unflatten(1, (k.shape[2], -1))[..., None] for x in (lse, delta))  # [B, G, R, T, 1]
    dout5, q5 = (x.to(acc).unflatten(2, (k.shape[2], -1)) for x in (dout, q))  # [B, T, G, R, K]
    p = torch.where(visible, (scores - lse5).exp(), 0.0)
    ds = p * (torch.einsum("btgrk,bsgk->bgrts", dout5, v.to(acc)) - delta5) * factor
    dq = torch.einsum("bgrts,bsgk->btgrk", ds, k.to(acc)).flatten(2, 3)
    dk = torch.einsum("bgrts,btgrk->bsgk", ds, q5)
    dv = torch.einsum("bgrts,btgrk->bsgk", p, dout5)
    return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)


def check(
    op: str, q: Tensor, k: Tensor, v: Tensor, mask: Mask, window: int | None, softcap: float | None = None,
    bias: Tensor | None = None, kv_prefix: tuple[Tensor, Tensor] | None = None,
) -> None:  # fmt: skip
    """Raises ValueError unless q is [B, T, H, K], k, v are [B, S, G, K], and G divides H. The rest must fit them."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.dim() != 4:
            raise ValueError(f"{op}: {name} has shape {tuple(x.shape)}; legal is [B, T, H, K]")
        if not x.is_floating_point():
            raise ValueError(f"{op}: {name} is {x.dtype}; legal is a floating dtype")
        if x.dtype != q.dtype or x.device != q.device:
            raise ValueError(
                f"{op}: {name} is {x.dtype} on {x.device}; legal is {q.dtype} on {q.device}, as q"
            )
    if k.shape != v.shape or k.shape[0] != q.shape[0] or k.shape[3] != q.shape[3]:
        raise ValueError(
            f"{op}: q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}; "
            "legal is one B and K, and k as v"
        )
    if k.shape[2] == 0 or q.shape[2] % k.shape[2]:
        raise ValueError(f"{op}: {q.shape[2]} query heads over {k.shape[2]} key heads; legal is a multiple")
    if window is not None and window < 1:
        raise ValueError(f"{op}: window={window}; legal is 1 or more, or None")
    if softcap is not None and not softcap > 0:
        raise ValueError(f"{op}: softcap={softcap}; legal is a number > 0, or None")
    if bias is not None:
        _check_bias(op, q, k, bias)
    if kv_prefix is not None:
        _check_prefix(op, q, k, kv_prefix)
    if (pair := mask.document_pair()) is not None:
        _check_documents(op, "queries", pair[0], q)
        _check_documents(op, "keys", pair[1], k)


def _check_bias(op: str, q: Tensor, k: Tensor, bias: Tensor) -> None:
    scores = (q.shape[0], q.shape[2], q.shape[1], k.shape[1])
    fits = bias.dim() in (3, 4) and all(n in (1, m) for n, m in zip(bias.shape[-3:], scores[1:], strict=True))
    if (
        not fits
        or bias.shape[-2:] != scores[-2:]
        or (bias.dim() == 4 and bias.shape[0] not in (1, scores[0]))
    ):
        raise ValueError(
            f"{op}: bias has shape {tuple(bias.shape)}; legal is {scores}, with 1 for samples or heads alike"
        )
    if not bias.is_floating_point() or bias.device != q.device:
        raise ValueError(
            f"{op}: bias is {bias.dtype} on {bias.device}; legal is floating on {q.device}, as q"
        )


def _check_prefix(op: str, q: Tensor, k: Tensor, kv_prefix: tuple[Tensor, Tensor]) -> None:
    for name, x in zip(("keys", "values"), kv_prefix, strict=True):
        if x.dim() != 4 or x.shape[:1] + x.shape[2:] != k.shape[:1] + k.shape[2:] or not x.shape[1]:
            legal = f"({k.shape[0]}, P >= 1, {k.shape[2]}, {k.shape[3]})"
            raise ValueError(f"{op}: {name} of kv_prefix have shape {tuple(x.shape)}; legal is {legal}")
        if x.dtype != q.dtype or x.device != q.device or x.shape != kv_prefix[0].shape:
            raise ValueError(
                f"{op}: {name} of kv_prefix are {x.dtype} {tuple(x.shape)} on {x.device}; "
                f"legal is {q.dtype} on {q.device}, as q, and one shape for both"
            )


def _check_documents(op: str, name: str, documents: Tensor, x: Tensor) -> None:
    """Those of queries or keys `x`."""
    if documents.is_floating_point() or documents.is_complex() or documents.device != x.device:
        raise ValueError(
            f"{op}: documents of the {name} are {documents.dtype} on {documents.device}; "
            f"legal are integers on {x.device}, as q"
        )
    if documents.shape != x.shape[:2]:
        raise ValueError(
            f"{op}: documents of the {name} have shape {tuple(documents.shape)}; "
            f"legal is {tuple(x.shape[:2])}"
        )


def _check_backward(dout: Tensor, q: Tensor, out: Tensor, lse: Tensor, dlse: Tensor | None) -> None:
    rows = (q.shape[0], q.shape[2], q.shape[1])
    for name, x, legal in (
        ("dout", dout, q.shape),
        ("out", out, q.shape),
        ("lse", lse, rows),
        ("dlse", dlse, rows),
    ):
        if x is not None and x.shape != legal:
            raise ValueError(f"attend_backward: {name} has shape {tuple(x.shape)}; legal is {tuple(legal)}")


# -------------------------------------------------------------------------------------------------------- triton


def _triton_forward(
    q_BTHK: Tensor, k_BSGK: Tensor, v_BSGK: Tensor, *, mask: Mask = CAUSAL, offsets: Offsets = (0, 0),
    scale: float | None = None, window: int | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    check("attend_forward", q_BTHK, k_BSGK, v_BSGK, mask, window)
    return _kernels.forward(q_BTHK, k_BSGK, v_BSGK, mask=mask, offsets=offsets, scale=scale, window=window)


def _triton_backward(
    dout_BTHK: Tensor, q_BTHK: Tensor, k_BSGK: Tensor, v_BSGK: Tensor, out_BTHK: Tensor, lse_BHT: Tensor, *,
    dlse: Tensor | None = None, mask: Mask = CAUSAL, offsets: Offsets = (0, 0), scale: float | None = None,
    window: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    check("attend_backward", q_BTHK, k_BSGK, v_BSGK, mask, window)
    _check_backward(dout_BTHK, q_BTHK, out_BTHK, lse_BHT, dlse)
    return _kernels.backward(
        dout_BTHK, q_BTHK, k_BSGK, v_BSGK, out_BTHK, lse_BHT,
        dlse=dlse, mask=mask, offsets=offsets, scale=scale, window=window,
    )  # fmt: skip


def _triton_attend_lse(
    q_BTHK: Tensor, k_BSGK: Tensor, v_BSGK: Tensor, *, mask: Mask = CAUSAL, offsets: Offsets = (0, 0),
    scale: float | None = None, window: int | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    check("attend_lse", q_BTHK, k_BSGK, v_BSGK, mask, window)
    options = dict(mask=mask, offsets=offsets, scale=scale, window=window)
    result: tuple[Tensor, Tensor] = _AttendLse.apply(  # type: ignore[no-untyped-call]
        q_BTHK, k_BSGK, v_BSGK, _triton_forward, _triton_backward, options
    )
    return result


def _triton_attend(
    q_BTHK: Tensor, k_BSGK: Tensor, v_BSGK: Tensor, *, mask: Mask = CAUSAL, offsets: Offsets = (0, 0),
    scale: float | None = None, window: int | None = None, softcap: None = None, bias: None = None,
    kv_prefix: tuple[Tensor, Tensor] | None = None,
) -> Tensor:  # fmt: skip
    check("attend", q_BTHK, k_BSGK, v_BSGK, mask, window, kv_prefix=kv_prefix)
    options: dict[str, Any] = dict(mask=mask, offsets=offsets, scale=scale, window=window)
    if kv_prefix is not None:
        return _with_prefix(_triton_attend_lse, q_BTHK, k_BSGK, v_BSGK, kv_prefix, options, None, None)
    return _triton_attend_lse(q_BTHK, k_BSGK, v_BSGK, **options)[0]


def attend_best(
    kernel: Callable[..., Tensor], q_BTHK: Tensor, k_BSGK: Tensor, v_BSGK: Tensor, *, mask: Mask = CAUSAL,
    offsets: Offsets = (0, 0), scale: float | None = None, window: int | None = None, **more: Any,
) -> Tensor:  # fmt: skip
    """On a GPU: torch's flash or cuDNN attention where is_causal or no mask says it all, else the Triton `kernel`."""
    options: dict[str, Any] = dict(mask=mask, offsets=offsets, scale=scale, window=window, **more)
    path = path_of("cuda", q_BTHK.shape[1], k_BSGK.shape[1], mask, offsets, window)
    if path == "kernel" or more.get("kv_prefix") is not None:
        return kernel(q_BTHK, k_BSGK, v_BSGK, **options)
    return attend(q_BTHK, k_BSGK, v_BSGK, **options)


def forward_best(
    kernel: Callable[..., tuple[Tensor, Tensor]], q_BTHK: Tensor, k_BSGK: Tensor, v_BSGK: Tensor, *,
    mask: Mask = CAUSAL, offsets: Offsets = (0, 0), scale: float | None = None, window: int | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """A step of a ring on a GPU: by torch's flash attention where it takes the mask, else the Triton `kernel`."""
    takes = flash_takes(q_BTHK, k_BSGK, mask, offsets, window)
    path = attend_forward if takes else kernel
    return path(q_BTHK, k_BSGK, v_BSGK, mask=mask, offsets=offsets, scale=scale, window=window)


def backward_best(
    kernel: Callable[..., tuple[Tensor, Tensor, Tensor]], dout_BTHK: Tensor, q_BTHK: Tensor, k_BSGK: Tensor,
    v_BSGK: Tensor, out_BTHK: Tensor, lse_BHT: Tensor, *, dlse: Tensor | None = None, mask: Mask = CAUSAL,
    offsets: Offsets = (0, 0), scale: float | None = None, window: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """The backward of `forward_best`."""
    takes = dlse is None and flash_takes(q_BTHK, k_BSGK, mask, offsets, window)
    path = attend_backward if takes else kernel
    return path(
        dout_BTHK, q_BTHK, k_BSGK, v_BSGK, out_BTHK, lse_BHT, dlse=dlse, mask=mask, offsets=offsets, scale=scale,
        window=window,
    )  # fmt: skip


BEST: dict[str, Callable[..., Any]] = {
    "attend": attend_best,
    "attend_forward": forward_best,
    "attend_backward": backward_best,
}
"""What "auto" takes on a GPU in place of the Triton paths alone."""


def _refuses(*args: Any, **named: Any) -> str | None:
    k = next((x for x in (*args, *named.values()) if isinstance(x, Tensor) and x.dim() == 4), None)
    if k is None:
        return None  # the check of shapes says it
    for name in ("softcap", "bias"):
        if named.get(name) is not None:
            return f"{name} has no kernel"
    widest = 128 if k.dtype == torch.float32 else 256
    return None if k.shape[-1] <= widest else f"a head width of {k.shape[-1]} is beyond {widest} in {k.dtype}"


_LIKE_Q = Takes(layout="any", like="q_BTHK")
_SUMS = Takes((torch.float32,), "any")
_TAKES = {"q_BTHK": DENSE} | dict.fromkeys(("k_BSGK", "v_BSGK"), Takes(layout="dense", like="q_BTHK"))
_TAKES_MORE = {"kv_prefix": Takes(layout="dense", like="q_BTHK"), "bias": Takes(layout="any")}
_TAKES_BACKWARD = {"dout_BTHK": _LIKE_Q, "out_BTHK": _LIKE_Q, "lse_BHT": _SUMS, "dlse": _SUMS}

TRITON = {
    "attend": TritonOp(_triton_attend, _TAKES | _TAKES_MORE, _refuses),
    "attend_lse": TritonOp(_triton_attend_lse, _TAKES, _refuses),
    "attend_forward": TritonOp(_triton_forward, _TAKES, _refuses),
    "attend_backward": TritonOp(_triton_backward, _TAKES | _TAKES_BACKWARD, _refuses),
}


def reference(
    q_BTHK: Tensor,
    k_BSGK: Tensor,
    v_BSGK: Tensor,
    *,
    mask: Mask = CAUSAL,
    offsets: Offsets = (0, 0),
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
    bias: Tensor | None = None,
    kv_prefix: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """(out, lse) from first principles in float64, one query head at a time; differentiable."""
    q, k, v = (x.double().transpose(1, 2) for x in (q_BTHK, k_BSGK, v_BSGK))
    visible = visible_keys(q_BTHK, k_BSGK, mask, offsets, window)[:, 0]
    per_key = q.shape[1] // k.shape[1]
    shape = (q.shape[0], q.shape[1], q.shape[2], k.shape[2])
    added = torch.zeros((), dtype=q.dtype, device=q.device) if bias is None else bias.double()
    added = added.expand(shape)
    if kv_prefix is not None:
        k, v = (torch.cat([p.double().transpose(1, 2), x], 2) for p, x in zip(kv_prefix, (k, v), strict=True))
        visible = F.pad(visible, (kv_prefix[0].shape[1], 0), value=True)
        added = F.pad(added, (kv_prefix[0].shape[1], 0))
    outs, lses = [], []
    for h in range(q.shape[1]):
        s = q[:, h] @ k[:, h // per_key].transpose(1, 2) * (q.shape[-1] ** -0.5 if scale is None else scale)
        if softcap is not None:
            s = softcap * torch.tanh(s / softcap)
        e = torch.where(visible, (s + added[:, h]).exp(), 0.0)
        total = e.sum(-1, keepdim=True)
        outs.append((e / torch.where(total == 0, 1.0, total)) @ v[:, h // per_key])
        lses.append(total[..., 0].log())
    return torch.stack(outs, dim=2), torch.stack(lses, dim=1)
