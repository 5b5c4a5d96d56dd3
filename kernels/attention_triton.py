"""Computes exact attention on a GPU by Triton kernels: forward, and backward from the saved lse.

The formulas and the checks of arguments are in attention.py, which calls `forward` and `backward` here.  One program
works on one tile of queries (or of keys) of one head.  It loops over the tiles of the other side.  Forward keeps a
running maximum and weight (online softmax, arXiv 1805.02867), in base 2. Backward computes the weights again from lse.
One kernel computes dk and dv, another dq, so it needs no atomics.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .launch import architecture, jit, launch, power_of_2, tile, tl
from .mask import CAUSAL, Mask, Offsets


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
def _range_of_queries(
    begin, queries, lag, window, CAUSAL: tl.constexpr, WINDOW: tl.constexpr, DOCUMENTS: tl.constexpr,
    SPLIT: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """For keys begin .. begin + KEYS - 1, counted in queries: (first tile, end of the masked tiles, end)."""
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
    return low, tl.minimum(tl.maximum(masked_end, low), tl.maximum(end, low)), end


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
    low, masked_end, end = _range_of_queries(
        begin, queries, lag, window, CAUSAL, WINDOW, DOCUMENTS, SPLIT, QUERIES, KEYS
    )
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
    """Arguments that all kernels share."""

    numbers: tuple[Any, ...]
    flags: dict[str, Any]
    natural_scale: float
    documents: tuple[Tensor, Tensor]


def _call(
    q: Tensor, k: Tensor, mask: Mask, offsets: Offsets, scale: float | None, window: int | None
) -> _Call:
    pair = mask.document_pair()
    natural = q.shape[-1] ** -0.5 if scale is None else scale
    head, per_key = q.shape[-1], q.shape[2] // k.shape[2]
    flags = dict(
        CAUSAL=mask.causal, WINDOW=window is not None, DOCUMENTS=pair is not None, HEAD=head,
        WIDTH=max(16, power_of_2(head)), PRECISION=_precision(q),
    )  # fmt: skip
    numbers = (q.shape[1], k.shape[1], q.shape[2], per_key, offsets[0] - offsets[1], window or 0)
    documents = (q, q) if pair is None else (pair[0].contiguous(), pair[1].contiguous())
    return _Call((*numbers, natural * math.log2(math.e)), flags, natural, documents)


def _precision(q: Tensor) -> str:
    """Precision of products: three TF32 products for a float32 one on NVIDIA; exact elsewhere; 16 bits as they are."""
    if not architecture(q.device).startswith("sm_"):
        return "ieee"
    return "tf32x3" if q.dtype == torch.float32 else "tf32"


def _tile(kernel: str, q: Tensor) -> dict[str, Any]:
    """Tile sizes; float32 needs twice the memory and three products for one, so it has its own rows."""
    name = f"{kernel}_float32" if q.dtype == torch.float32 else kernel
    return tile(name, q.shape[-1], architecture(q.device))


def _strides(*tensors: Tensor) -> tuple[int, ...]:
    return tuple(s for x in tensors for s in x.stride()[:3])


def forward(
    q: Tensor, k: Tensor, v: Tensor, *, mask: Mask = CAUSAL, offsets: Offsets = (0, 0), scale: float | None = None,
    window: int | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(out, lse) of tensors that attention.py has checked."""
    call = _call(q, k, mask, offsets, scale, window)
    b, t, h, _ = q.shape
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    lse = torch.empty(b, h, t, dtype=torch.float32, device=q.device)
    options = _tile("flash_forward", q)
    launch(
        _attend_forward_kernel, (-(-t // options["QUERIES"]), b * h if out.numel() else 0),
        q, k, v, out, lse, *call.documents, *call.numbers, *_strides(q, k, v), **call.flags, **options,
    )  # fmt: skip
    return out, lse


def backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *, dlse: Tensor | None = None,
    mask: Mask = CAUSAL, offsets: Offsets = (0, 0), scale: float | None = None, window: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """(dq, dk, dv) of tensors that attention.py has checked."""
    call = _call(q, k, mask, offsets, scale, window)
    out, lse = out.contiguous(), lse.contiguous()
    dout = dout if dout.stride(-1) == 1 else dout.contiguous()
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
