"""Exact attention: causal, full, document boundaries, a window, grouped queries, offsets for ring steps and
generation.

    s_ij = scale q_i . k_j    lse_i = log sum_j exp(s_ij)    P_ij = exp(s_ij - lse_i)   out_i = sum_j P_ij v_j

Note: tensors are [B, T, H, K]; k and v have G heads, G divides H, and query head h reads key head h // (H /
G).  The sums run over visible keys: with p_i = offset_q + i and p_j = offset_k + j, causal hides p_j > p_i, a
window of w hides p_j <= p_i - w (and, unless causal, p_j >= p_i + w), and documents hide keys of another
document.  A softcap c bends the scaled scores to c tanh(s / c) (Gemma 2, arXiv 2408.00118, 2.3), a bias is added
to them then (ALiBi, arXiv 2108.12409; T5), and keys of kv_prefix, which have no positions, are seen by every
query (prefix tuning, arXiv 2101.00190).  The mask is data, never a [T, S] tensor in the interface, so ring steps,
token slices, packed documents and generation are calls of one op. lse is natural, [B, H, T], float32 or better; a
query that sees nothing has out 0 and lse -inf (torch's CPU kernel says 0.0 there, which would spoil a merge, so
it is rewritten).  Backward of one ring step needs the *global* out and lse: D_i = dout_i . out_i - dlse_i, dS = P
(dout_i . v_j - D_i) scale.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from .launch import DENSE, Takes, TritonOp, architecture, jit, launch, power_of_2, tile, tl


@dataclass(frozen=True, eq=False)
class Mask:
    """Which keys a query sees.  documents: integers [B, T], one per token; a pair (of queries, of keys) if
    they differ."""

    causal: bool = True
    documents: Tensor | tuple[Tensor, Tensor] | None = None

    def document_pair(self) -> tuple[Tensor, Tensor] | None:
        return (self.documents, self.documents) if isinstance(self.documents, Tensor) else self.documents


CAUSAL = Mask()
FULL = Mask(causal=False)
Offsets = tuple[int, int]
"""Position of the first query and of the first key."""


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
    """How an attention is computed: by torch's own (flash or cuDNN on a GPU) with nothing hidden, with is_causal, or,
    on a CPU only, with a mask tensor; else by a kernel that takes the mask as data.

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
    if q_BTHK.device.type not in ("cpu", "meta"):
        return _forward_plain(q_BTHK, k_BSGK, v_BSGK, mask, offsets, scale, window)
    q, k, v = (x.transpose(1, 2) for x in (q_BTHK, k_BSGK, v_BSGK))
    visible = None if shape in ("full", "causal") else visible_keys(q_BTHK, k_BSGK, mask, offsets, window)
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
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
    """(dq, dk, dv) of these keys, given out and lse over *all* keys (those of a ring after its last step)."""
    check("attend_backward", q_BTHK, k_BSGK, v_BSGK, mask, window)
    _check_backward(dout_BTHK, q_BTHK, out_BTHK, lse_BHT, dlse)
    shape = _shape_of_mask(q_BTHK.shape[1], k_BSGK.shape[1], mask, offsets, window)
    if shape == "nothing" or 0 in (q_BTHK.numel(), k_BSGK.numel()):
        return torch.zeros_like(q_BTHK), torch.zeros_like(k_BSGK), torch.zeros_like(v_BSGK)
    if q_BTHK.device.type not in ("cpu", "meta") or dlse is not None or shape == "masked":
        return _backward_plain(
            dout_BTHK, q_BTHK, k_BSGK, v_BSGK, out_BTHK, lse_BHT, dlse, mask, offsets, scale, window
        )
    dout, q, k, v, out = (x.transpose(1, 2) for x in (dout_BTHK, q_BTHK, k_BSGK, v_BSGK, out_BTHK))
    grads = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        dout, q, k, v, out, lse_BHT, 0.0, shape == "causal", scale=scale
    )
    dq, dk, dv = (g.transpose(1, 2) for g in grads)
    return dq, dk, dv


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
    """Raises ValueError unless q [B, T, H, K], k and v [B, S, G, K], G divides H, and the rest fits them."""
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


@jit
def _range_of_keys(
    first, queries, keys, window, CAUSAL: tl.constexpr, WINDOW: tl.constexpr, DOCUMENTS: tl.constexpr,
    QUERIES: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """For queries first .. first + QUERIES - 1, counted in keys: (first tile, end of the tiles seen whole, end)."""
    low = 0
    end = keys
    whole = keys // KEYS * KEYS
    if CAUSAL:
        end = tl.minimum(end, tl.maximum(first + QUERIES, 0))
        whole = tl.minimum(whole, tl.maximum(first + 1, 0) // KEYS * KEYS)
    if WINDOW:
        low = tl.maximum(first - window + 1, 0) // KEYS * KEYS
        if not CAUSAL:
            end = tl.minimum(end, tl.maximum(first + QUERIES - 1 + window, 0))
    if WINDOW or DOCUMENTS:
        whole = low
    return low, tl.minimum(whole, end), end


@jit
def _visible(
    distance,
    inside,
    window,
    of_query,
    of_key,
    CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
    DOCUMENTS: tl.constexpr,
):
    """distance: position of the query less that of the key."""
    seen = inside
    if CAUSAL:
        seen = seen & (distance >= 0)
    if WINDOW:
        seen = seen & (distance < window) & (distance > -window)
    if DOCUMENTS:
        seen = seen & (of_query == of_key)
    return seen


@jit
def _forward_tile(
    total, top, weight, q_tile, k_at, v_at, k_stride, v_stride, start, keys, first, window, of_query, documents, scale,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, DOCUMENTS: tl.constexpr, MASKED: tl.constexpr,
    PRECISION: tl.constexpr, HEAD: tl.constexpr, WIDTH: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """One tile of keys into the running sum, its maximum and its weight (online softmax, base 2)."""
    c = tl.arange(0, WIDTH)
    j = start + tl.arange(0, KEYS)
    inside = (j < keys)[:, None] & (c < HEAD)[None, :]
    rows = j.to(tl.int64)[:, None]
    k_tile = tl.load(k_at + rows * k_stride + c[None, :], mask=inside, other=0.0)
    s = tl.dot(q_tile, tl.trans(k_tile), input_precision=PRECISION) * scale
    if MASKED:
        of_key = 0
        if DOCUMENTS:
            of_key = tl.load(documents + j, mask=j < keys, other=0)[None, :]
        distance = first + tl.arange(0, QUERIES)[:, None] - j[None, :]
        seen = _visible(distance, (j < keys)[None, :], window, of_query, of_key, CAUSAL, WINDOW, DOCUMENTS)
        s = tl.where(seen, s, -float("inf"))
    higher = tl.maximum(top, tl.max(s, axis=1))
    safe = tl.where(higher == -float("inf"), 0.0, higher)
    p = tl.exp2(s - safe[:, None])
    shrink = tl.exp2(top - safe)
    weight = weight * shrink + tl.sum(p, axis=1)
    v_tile = tl.load(v_at + rows * v_stride + c[None, :], mask=inside, other=0.0)
    total = tl.dot(p.to(v_tile.dtype), v_tile, total * shrink[:, None], input_precision=PRECISION)
    return total, higher, weight


@jit
def _attend_forward_kernel(
    q, k, v, out, lse, q_documents, k_documents, queries, keys, heads, per_key, lag, window, scale,
    q_batch_stride, q_stride, q_head_stride, k_batch_stride, k_stride, k_head_stride,
    v_batch_stride, v_stride, v_head_stride,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, DOCUMENTS: tl.constexpr, PRECISION: tl.constexpr,
    HEAD: tl.constexpr, WIDTH: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """One tile of queries of one head; lag is the position of the first query less that of the first key."""
    begin = (tl.num_programs(0) - 1 - tl.program_id(0)) * QUERIES  # the longest rows of a causal mask first
    b = (tl.program_id(1) // heads).to(tl.int64)
    h = (tl.program_id(1) % heads).to(tl.int64)
    i = begin + tl.arange(0, QUERIES)
    c = tl.arange(0, WIDTH)
    inside = (i < queries)[:, None] & (c < HEAD)[None, :]
    q_at = q + b * q_batch_stride + h * q_head_stride + i.to(tl.int64)[:, None] * q_stride + c[None, :]
    q_tile = tl.load(q_at, mask=inside, other=0.0)
    k_at = k + b * k_batch_stride + h // per_key * k_head_stride
    v_at = v + b * v_batch_stride + h // per_key * v_head_stride
    of_query = 0
    documents = k_documents
    if DOCUMENTS:
        of_query = tl.load(q_documents + b * queries + i, mask=i < queries, other=0)[:, None]
        documents = k_documents + b * keys
    total = tl.zeros((QUERIES, WIDTH), tl.float32)
    top = tl.full((QUERIES,), -float("inf"), tl.float32)
    weight = tl.zeros((QUERIES,), tl.float32)
    first = begin + lag
    low, whole, end = _range_of_keys(first, queries, keys, window, CAUSAL, WINDOW, DOCUMENTS, QUERIES, KEYS)
    for start in range(low, whole, KEYS):
        total, top, weight = _forward_tile(
            total, top, weight, q_tile, k_at, v_at, k_stride, v_stride, start, keys, first, window, of_query, documents,
            scale, CAUSAL, WINDOW, DOCUMENTS, False, PRECISION, HEAD, WIDTH, QUERIES, KEYS,
        )  # fmt: skip
    for start in range(whole, end, KEYS):
        total, top, weight = _forward_tile(
            total, top, weight, q_tile, k_at, v_at, k_stride, v_stride, start, keys, first, window, of_query, documents,
            scale, CAUSAL, WINDOW, DOCUMENTS, True, PRECISION, HEAD, WIDTH, QUERIES, KEYS,
        )  # fmt: skip
    nothing = weight == 0.0
    result = total / tl.where(nothing, 1.0, weight)[:, None]
    rows = (b * queries + i.to(tl.int64)) * heads + h
    tl.store(out + rows[:, None] * HEAD + c[None, :], result, mask=inside)
    natural = tl.where(
        nothing, -float("inf"), (top + tl.log2(tl.where(nothing, 1.0, weight))) * 0.6931471805599453
    )
    tl.store(lse + (b * heads + h) * queries + i, natural, mask=i < queries)


@jit
def _delta_kernel(
    dout, out, dlse, delta, queries, heads, dout_batch_stride, dout_stride, dout_head_stride,
    LSE: tl.constexpr, HEAD: tl.constexpr, WIDTH: tl.constexpr, QUERIES: tl.constexpr,
):  # fmt: skip
    """D = dout . out - dlse of one tile of queries of one head."""
    b = (tl.program_id(1) // heads).to(tl.int64)
    h = (tl.program_id(1) % heads).to(tl.int64)
    i = tl.program_id(0) * QUERIES + tl.arange(0, QUERIES)
    c = tl.arange(0, WIDTH)
    inside = (i < queries)[:, None] & (c < HEAD)[None, :]
    d_at = (
        dout
        + b * dout_batch_stride
        + h * dout_head_stride
        + i.to(tl.int64)[:, None] * dout_stride
        + c[None, :]
    )
    rows = (b * queries + i.to(tl.int64)) * heads + h
    d = tl.load(d_at, mask=inside, other=0.0).to(tl.float32)
    o = tl.load(out + rows[:, None] * HEAD + c[None, :], mask=inside, other=0.0).to(tl.float32)
    total = tl.sum(d * o, axis=1)
    at = (b * heads + h) * queries + i
    if LSE:
        total -= tl.load(dlse + at, mask=i < queries, other=0.0)
    tl.store(delta + at, total, mask=i < queries)


@jit
def _log2_weights(lse, at, inside):
    """lse in base 2; +inf where a query sees nothing or is none, so that its weights are 0."""
    natural = tl.load(lse + at, mask=inside, other=-float("inf"))
    return tl.where(natural == -float("inf"), float("inf"), natural * 1.4426950408889634)


@jit
def _keys_tile(
    dk_tile, dv_tile, k_tile, v_tile, q_at, dout_at, lse, delta, start, queries, q_stride, dout_stride, last, window,
    of_key, documents, scale,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, DOCUMENTS: tl.constexpr, MASKED: tl.constexpr,
    PRECISION: tl.constexpr, HEAD: tl.constexpr, WIDTH: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """What one tile of queries adds to dk and dv; `last` is the lag less the first key."""
    c = tl.arange(0, WIDTH)
    i = start + tl.arange(0, QUERIES)
    inside = (i < queries)[:, None] & (c < HEAD)[None, :]
    rows = i.to(tl.int64)[:, None]
    q_tile = tl.load(q_at + rows * q_stride + c[None, :], mask=inside, other=0.0)
    dout_tile = tl.load(dout_at + rows * dout_stride + c[None, :], mask=inside, other=0.0)
    s = tl.dot(k_tile, tl.trans(q_tile), input_precision=PRECISION) * scale
    p = tl.exp2(s - _log2_weights(lse, i, i < queries)[None, :])
    if MASKED:
        of_query = 0
        if DOCUMENTS:
            of_query = tl.load(documents + i, mask=i < queries, other=0)[None, :]
        distance = last + i[None, :] - tl.arange(0, KEYS)[:, None]
        seen = _visible(distance, (i < queries)[None, :], window, of_query, of_key, CAUSAL, WINDOW, DOCUMENTS)
        p = tl.where(seen, p, 0.0)
    dv_tile = tl.dot(p.to(dout_tile.dtype), dout_tile, dv_tile, input_precision=PRECISION)
    dp = tl.dot(v_tile, tl.trans(dout_tile), input_precision=PRECISION)
    ds = p * (dp - tl.load(delta + i, mask=i < queries, other=0.0)[None, :])
    dk_tile = tl.dot(ds.to(q_tile.dtype), q_tile, dk_tile, input_precision=PRECISION)
    return dk_tile, dv_tile


@jit
def _attend_keys_kernel(
    q, k, v, dout, lse, delta, dk, dv, q_documents, k_documents, queries, keys, heads, per_key, lag, window, scale,
    natural_scale, q_batch_stride, q_stride, q_head_stride, k_batch_stride, k_stride, k_head_stride,
    v_batch_stride, v_stride, v_head_stride, dout_batch_stride, dout_stride, dout_head_stride,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, DOCUMENTS: tl.constexpr, PRECISION: tl.constexpr,
    HEAD: tl.constexpr, WIDTH: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """dk and dv of one tile of keys of one key head, over all its query heads.

    SPLIT: tiles that need no mask get a loop of their own (which costs registers).
    """
    begin = tl.program_id(0) * KEYS
    groups = heads // per_key
    b = (tl.program_id(1) // groups).to(tl.int64)
    g = (tl.program_id(1) % groups).to(tl.int64)
    j = begin + tl.arange(0, KEYS)
    c = tl.arange(0, WIDTH)
    inside = (j < keys)[:, None] & (c < HEAD)[None, :]
    rows = j.to(tl.int64)[:, None]
    k_tile = tl.load(
        k + b * k_batch_stride + g * k_head_stride + rows * k_stride + c[None, :], mask=inside, other=0.0
    )
    v_tile = tl.load(
        v + b * v_batch_stride + g * v_head_stride + rows * v_stride + c[None, :], mask=inside, other=0.0
    )
    of_key = 0
    documents = q_documents
    if DOCUMENTS:
        of_key = tl.load(k_documents + b * keys + j, mask=j < keys, other=0)[:, None]
        documents = q_documents + b * queries
    dk_tile = tl.zeros((KEYS, WIDTH), tl.float32)
    dv_tile = tl.zeros((KEYS, WIDTH), tl.float32)
    low = 0
    end = queries
    masked_end = 0
    if CAUSAL:
        low = tl.maximum(begin - lag, 0) // QUERIES * QUERIES
        masked_end = (tl.maximum(begin + KEYS - 1 - lag, 0) + QUERIES - 1) // QUERIES * QUERIES
    if WINDOW:
        end = tl.minimum(end, tl.maximum(begin + KEYS - 1 - lag + window, 0))
        if not CAUSAL:
            low = tl.maximum(begin - lag - window + 1, 0) // QUERIES * QUERIES
    if WINDOW or DOCUMENTS or not SPLIT:
        masked_end = end
    masked_end = tl.minimum(tl.maximum(masked_end, low), tl.maximum(end, low))
    for r in range(0, per_key):
        h = g * per_key + r
        q_at = q + b * q_batch_stride + h * q_head_stride
        dout_at = dout + b * dout_batch_stride + h * dout_head_stride
        row_at = (b * heads + h) * queries
        for start in range(low, masked_end, QUERIES):
            dk_tile, dv_tile = _keys_tile(
                dk_tile, dv_tile, k_tile, v_tile, q_at, dout_at, lse + row_at, delta + row_at, start, queries, q_stride,
                dout_stride, lag - begin, window, of_key, documents, scale,
                CAUSAL, WINDOW, DOCUMENTS, True, PRECISION, HEAD, WIDTH, QUERIES, KEYS,
            )  # fmt: skip
        if SPLIT:
            for start in range(masked_end, end, QUERIES):
                dk_tile, dv_tile = _keys_tile(
                    dk_tile, dv_tile, k_tile, v_tile, q_at, dout_at, lse + row_at, delta + row_at, start, queries,
                    q_stride,
                    dout_stride, lag - begin, window, of_key, documents, scale,
                    CAUSAL, WINDOW, DOCUMENTS, False, PRECISION, HEAD, WIDTH, QUERIES, KEYS,
                )  # fmt: skip
    target = ((b * keys + j.to(tl.int64)) * groups + g)[:, None] * HEAD + c[None, :]
    tl.store(dk + target, dk_tile * natural_scale, mask=inside)
    tl.store(dv + target, dv_tile, mask=inside)


@jit
def _queries_tile(
    dq_tile, q_tile, dout_tile, weights, delta_row, k_at, v_at, k_stride, v_stride, start, keys, first, window,
    of_query,
    documents, scale,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, DOCUMENTS: tl.constexpr, MASKED: tl.constexpr,
    PRECISION: tl.constexpr, HEAD: tl.constexpr, WIDTH: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """What one tile of keys adds to dq."""
    c = tl.arange(0, WIDTH)
    j = start + tl.arange(0, KEYS)
    inside = (j < keys)[:, None] & (c < HEAD)[None, :]
    rows = j.to(tl.int64)[:, None]
    k_tile = tl.load(k_at + rows * k_stride + c[None, :], mask=inside, other=0.0)
    v_tile = tl.load(v_at + rows * v_stride + c[None, :], mask=inside, other=0.0)
    s = tl.dot(q_tile, tl.trans(k_tile), input_precision=PRECISION) * scale
    p = tl.exp2(s - weights[:, None])
    if MASKED:
        of_key = 0
        if DOCUMENTS:
            of_key = tl.load(documents + j, mask=j < keys, other=0)[None, :]
        distance = first + tl.arange(0, QUERIES)[:, None] - j[None, :]
        seen = _visible(distance, (j < keys)[None, :], window, of_query, of_key, CAUSAL, WINDOW, DOCUMENTS)
        p = tl.where(seen, p, 0.0)
    dp = tl.dot(dout_tile, tl.trans(v_tile), input_precision=PRECISION)
    ds = p * (dp - delta_row[:, None])
    return tl.dot(ds.to(k_tile.dtype), k_tile, dq_tile, input_precision=PRECISION)


@jit
def _attend_queries_kernel(
    q, k, v, dout, lse, delta, dq, q_documents, k_documents, queries, keys, heads, per_key, lag, window, scale,
    natural_scale, q_batch_stride, q_stride, q_head_stride, k_batch_stride, k_stride, k_head_stride,
    v_batch_stride, v_stride, v_head_stride, dout_batch_stride, dout_stride, dout_head_stride,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, DOCUMENTS: tl.constexpr, PRECISION: tl.constexpr,
    HEAD: tl.constexpr, WIDTH: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """dq of one tile of queries of one head."""
    begin = (tl.num_programs(0) - 1 - tl.program_id(0)) * QUERIES
    b = (tl.program_id(1) // heads).to(tl.int64)
    h = (tl.program_id(1) % heads).to(tl.int64)
    i = begin + tl.arange(0, QUERIES)
    c = tl.arange(0, WIDTH)
    inside = (i < queries)[:, None] & (c < HEAD)[None, :]
    rows = i.to(tl.int64)[:, None]
    q_tile = tl.load(
        q + b * q_batch_stride + h * q_head_stride + rows * q_stride + c[None, :], mask=inside, other=0.0
    )
    dout_at = dout + b * dout_batch_stride + h * dout_head_stride + rows * dout_stride + c[None, :]
    dout_tile = tl.load(dout_at, mask=inside, other=0.0)
    row_at = (b * heads + h) * queries
    weights = _log2_weights(lse + row_at, i, i < queries)
    delta_row = tl.load(delta + row_at + i, mask=i < queries, other=0.0)
    k_at = k + b * k_batch_stride + h // per_key * k_head_stride
    v_at = v + b * v_batch_stride + h // per_key * v_head_stride
    of_query = 0
    documents = k_documents
    if DOCUMENTS:
        of_query = tl.load(q_documents + b * queries + i, mask=i < queries, other=0)[:, None]
        documents = k_documents + b * keys
    dq_tile = tl.zeros((QUERIES, WIDTH), tl.float32)
    first = begin + lag
    low, whole, end = _range_of_keys(first, queries, keys, window, CAUSAL, WINDOW, DOCUMENTS, QUERIES, KEYS)
    for start in range(low, whole, KEYS):
        dq_tile = _queries_tile(
            dq_tile, q_tile, dout_tile, weights, delta_row, k_at, v_at, k_stride, v_stride, start, keys, first, window,
            of_query, documents, scale, CAUSAL, WINDOW, DOCUMENTS, False, PRECISION, HEAD, WIDTH, QUERIES, KEYS,
        )  # fmt: skip
    for start in range(whole, end, KEYS):
        dq_tile = _queries_tile(
            dq_tile, q_tile, dout_tile, weights, delta_row, k_at, v_at, k_stride, v_stride, start, keys, first, window,
            of_query, documents, scale, CAUSAL, WINDOW, DOCUMENTS, True, PRECISION, HEAD, WIDTH, QUERIES, KEYS,
        )  # fmt: skip
    target = ((b * queries + i.to(tl.int64)) * heads + h)[:, None] * HEAD + c[None, :]
    tl.store(dq + target, dq_tile * natural_scale, mask=inside)


@dataclass(frozen=True)
class _Call:
    """What the three kernels are all given."""

    numbers: tuple[Any, ...]
    flags: dict[str, Any]
    natural_scale: float
    documents: tuple[Tensor, Tensor]
    grid_rows: int


def _call(
    op: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Mask,
    offsets: Offsets,
    scale: float | None,
    window: int | None,
) -> _Call:
    check(op, q, k, v, mask, window)
    pair = mask.document_pair()
    natural = q.shape[-1] ** -0.5 if scale is None else scale
    head, per_key = q.shape[-1], q.shape[2] // k.shape[2]
    flags = dict(
        CAUSAL=mask.causal, WINDOW=window is not None, DOCUMENTS=pair is not None, HEAD=head,
        WIDTH=max(16, power_of_2(head)), PRECISION=_precision(q),
    )  # fmt: skip
    numbers = (q.shape[1], k.shape[1], q.shape[2], per_key, offsets[0] - offsets[1], window or 0)
    documents = (q, q) if pair is None else (pair[0].contiguous(), pair[1].contiguous())
    return _Call((*numbers, natural * math.log2(math.e)), flags, natural, documents, q.shape[0])


def _precision(q: Tensor) -> str:
    """Of products: float32 by three of TF32 where the device has that, exact elsewhere; 16 bits are as they are."""
    if not architecture(q.device).startswith("sm_"):
        return "ieee"
    return "tf32x3" if q.dtype == torch.float32 else "tf32"


def _tile(kernel: str, q: Tensor) -> dict[str, Any]:
    """float32 takes twice the memory and three products for one, so it has rows of its own."""
    name = f"{kernel}_float32" if q.dtype == torch.float32 else kernel
    return tile(name, q.shape[-1], architecture(q.device))


def _strides(*tensors: Tensor) -> tuple[int, ...]:
    return tuple(s for x in tensors for s in x.stride()[:3])


def _triton_forward(
    q_BTHK: Tensor, k_BSGK: Tensor, v_BSGK: Tensor, *, mask: Mask = CAUSAL, offsets: Offsets = (0, 0),
    scale: float | None = None, window: int | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    q, k, v = q_BTHK, k_BSGK, v_BSGK
    call = _call("attend_forward", q, k, v, mask, offsets, scale, window)
    b, t, h, _ = q.shape
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    lse = torch.empty(b, h, t, dtype=torch.float32, device=q.device)
    options = _tile("flash_forward", q)
    launch(
        _attend_forward_kernel, (-(-t // options["QUERIES"]), b * h if out.numel() else 0),
        q, k, v, out, lse, *call.documents, *call.numbers, *_strides(q, k, v), **call.flags, **options,
    )  # fmt: skip
    return out, lse


def _triton_backward(
    dout_BTHK: Tensor, q_BTHK: Tensor, k_BSGK: Tensor, v_BSGK: Tensor, out_BTHK: Tensor, lse_BHT: Tensor, *,
    dlse: Tensor | None = None, mask: Mask = CAUSAL, offsets: Offsets = (0, 0), scale: float | None = None,
    window: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    q, k, v, out, lse = q_BTHK, k_BSGK, v_BSGK, out_BTHK.contiguous(), lse_BHT.contiguous()
    call = _call("attend_backward", q, k, v, mask, offsets, scale, window)
    _check_backward(dout_BTHK, q, out, lse, dlse)
    dout = dout_BTHK if dout_BTHK.stride(-1) == 1 else dout_BTHK.contiguous()
    b, t, h, head = q.shape
    s, g = k.shape[1:3]
    delta = torch.empty_like(lse)
    dq = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    dk, dv = (torch.empty(k.shape, dtype=k.dtype, device=k.device) for _ in range(2))
    options = tile("flash_delta", head, architecture(q.device))
    launch(
        _delta_kernel, (-(-t // options["QUERIES"]), b * h if q.numel() else 0), dout, out,
        None if dlse is None else dlse.contiguous(), delta, t, h, *_strides(dout), LSE=dlse is not None, HEAD=head,
        WIDTH=call.flags["WIDTH"], **options,
    )  # fmt: skip
    strides = _strides(q, k, v, dout)
    options = _tile("flash_keys", q)
    launch(
        _attend_keys_kernel, (-(-s // options["KEYS"]), b * g if k.numel() else 0), q, k, v, dout, lse, delta, dk, dv,
        *call.documents, *call.numbers, call.natural_scale, *strides, **call.flags, **options,
    )  # fmt: skip
    options = _tile("flash_queries", q)
    launch(
        _attend_queries_kernel, (-(-t // options["QUERIES"]), b * h if q.numel() else 0), q, k, v, dout, lse, delta,
        dq, *call.documents, *call.numbers, call.natural_scale, *strides, **call.flags, **options,
    )  # fmt: skip
    return dq, dk, dv


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
