"""Computes cross-entropy: whole, or over a vocabulary that is cut between ranks (a partial and a combine; kernels
never talk).

For one row of logits z, with label y, smoothing s over a vocabulary of V, and z-loss weight c (PaLM, arXiv
2204.02311, 5):

    lse  = log sum exp z
    loss = (1 - s) (lse - z_y) + s (lse - mean z) + c lse**2
    dz   = softmax(z) (1 + 2 c lse) - (1 - s) onehot(y) - s / V

`cross_entropy` keeps the logits and one number a row for backward; torch's log_softmax keeps a second [N, V] tensor. A
rank with columns [start, start + V_local) computes `partial`, three numbers a row. `combine` takes the stacked partials
of all ranks. `gradient` needs no other rank: one all-gather of at most 12 bytes a token. Rows are taken in blocks that
fit the second-level cache.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from .launch import (
    INDEX,
    ROWS,
    SCALAR,
    Takes,
    TritonOp,
    architecture,
    check_alike,
    jit,
    launch,
    matrix,
    tile,
    tl,
)  # fmt: skip

_BLOCK_ELEMENTS = 1 << 17


def cross_entropy(
    logits: Tensor, labels: Tensor, ignore_index: int = -100, smoothing: float = 0.0, z_loss: float = 0.0
) -> tuple[Tensor, Tensor]:
    """(sum over the valid rows, in float32 or better; their number, int64), both 0-d.

    logits [..., V], labels [...] int64.  Raises ValueError for labels outside [0, V) other than ignore_index
    (on the CPU; elsewhere the check would stall the device).
    """
    check_labels("cross_entropy", logits, labels, smoothing)
    check_range("cross_entropy", labels, logits.shape[-1], ignore_index)
    flat = labels.reshape(-1)
    total: Tensor = _CrossEntropy.apply(  # type: ignore[no-untyped-call]
        logits.reshape(-1, logits.shape[-1]), flat, ignore_index, smoothing, z_loss
    )
    return total, (flat != ignore_index).sum()


class _CrossEntropy(torch.autograd.Function):
    """The whole vocabulary, by torch's softmax kernels (0.6 ns an element where exp alone takes 0.8)."""

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, labels: Tensor, ignore_index: int, smoothing: float, z_loss: float
    ) -> Tensor:
        valid = labels != ignore_index
        label = torch.where(valid, labels, 0)[:, None]
        loss = torch.empty(len(labels), dtype=_acc(logits), device=logits.device)
        for rows in _blocks(logits):
            log_p = torch.log_softmax(logits[rows], dim=1, dtype=loss.dtype)
            at = log_p.gather(1, label[rows])[:, 0]
            loss[rows] = -at
            if smoothing:
                loss[rows] += smoothing * (at - log_p.mean(dim=1))
            if z_loss:
                loss[rows] += z_loss * (logits[rows].gather(1, label[rows])[:, 0].to(at.dtype) - at).square()
        ctx.save_for_backward(logits, labels)
        ctx.options = (ignore_index, smoothing, z_loss)
        return torch.where(valid, loss, 0.0).sum()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_total: Tensor) -> tuple[Tensor | None, ...]:
        logits, labels = ctx.saved_tensors
        ignore_index, smoothing, z_loss = ctx.options
        valid = labels != ignore_index
        label = torch.where(valid, labels, 0)[:, None]
        weight = (d_total * valid)[:, None]
        dz = torch.empty_like(logits)
        at_label = torch.full((), -(1.0 - smoothing), dtype=_acc(logits), device=logits.device)
        for rows in _blocks(logits):
            z = logits[rows].to(at_label.dtype)
            p = torch.softmax(z, dim=1)
            if z_loss:
                p.mul_(1.0 + 2.0 * z_loss * torch.logsumexp(z, dim=1, keepdim=True))
            if smoothing:
                p.sub_(smoothing / p.shape[1])
            p.scatter_add_(1, label[rows], at_label.expand(len(p), 1))
            torch.mul(p, weight[rows], out=dz[rows]) if dz.dtype == p.dtype else dz[rows].copy_(
                p.mul_(weight[rows])
            )
        return dz, None, None, None, None


def cross_entropy_(
    logits: Tensor,
    labels: Tensor,
    seed: float | None,
    ignore_index: int = -100,
    smoothing: float = 0.0,
    z_loss: float = 0.0,
) -> Tensor:
    """Sum over valid rows of logits [N, V] that have the whole vocabulary, by torch's softmax, in float32 or better.
    With a seed the logits become the gradient of seed * sum."""
    total = torch.zeros((), dtype=_acc(logits), device=logits.device)
    at_label = torch.full((), -(1.0 - smoothing), dtype=total.dtype, device=logits.device)
    valid = labels != ignore_index
    label, counts = torch.where(valid, labels, 0)[:, None], valid[:, None]
    weight = None if seed is None else counts * torch.full((), seed, dtype=total.dtype, device=total.device)
    for rows in _blocks(logits):
        log_p = torch.log_softmax(logits[rows], dim=1, dtype=total.dtype)
        at = log_p.gather(1, label[rows])
        lse = logits[rows].gather(1, label[rows]).to(at.dtype) - at if z_loss else at
        loss = -at
        if smoothing:
            loss += smoothing * (at - log_p.mean(dim=1, keepdim=True))
        if z_loss:
            loss += z_loss * lse.square()
        total += torch.where(counts[rows], loss, 0.0).sum()
        if weight is None:
            continue
        p = log_p.exp_()
        if z_loss:
            p.mul_(1.0 + 2.0 * z_loss * lse)
        if smoothing:
            p.sub_(smoothing / p.shape[1])
        p.scatter_add_(1, label[rows], at_label.expand(len(p), 1))
        logits[rows] = p.mul_(weight[rows])
    return total


def partial(logits: Tensor, labels: Tensor, start: int, vocabulary: int | None = None) -> Tensor:
    """What one rank knows: [N, 3]: lse of its columns, logit of the label (0 if it is elsewhere), sum of its logits.

    logits [N, V_local] holds columns [start, start + V_local); those from `vocabulary` on are padding and count for
    nothing, whatever they hold.  Float32 or better.
    """
    check_rows("cross_entropy_partial", logits, labels)
    stats = torch.zeros(logits.shape[0], 3, dtype=_acc(logits), device=logits.device)
    logits = logits[:, : _columns(logits, start, vocabulary)]
    if logits.shape[1] == 0:
        stats[:, 0] = -math.inf
        return stats
    local, here = _local(labels, start, logits.shape[1])
    for rows in _blocks(logits):
        z = logits[rows].to(stats.dtype)
        top = z.amax(dim=1, keepdim=True)
        stats[rows, 0] = (z - top).exp_().sum(dim=1).log_() + top[:, 0]
        stats[rows, 1] = torch.where(here[rows], z.gather(1, local[rows, None])[:, 0], 0.0)
        stats[rows, 2] = z.sum(dim=1)
    return stats


def _columns(logits: Tensor, start: int, vocabulary: int | None) -> int:
    """How many of the local columns are true ones."""
    return logits.shape[1] if vocabulary is None else max(0, min(logits.shape[1], vocabulary - start))


def combine(
    stats: Tensor,
    labels: Tensor,
    vocabulary: int,
    ignore_index: int = -100,
    smoothing: float = 0.0,
    z_loss: float = 0.0,
) -> tuple[Tensor, Tensor, Tensor]:
    """(sum of the loss, number of valid rows, lse [N]) from the partials of all ranks, stats [ranks, N,
    3]."""
    lse = torch.logsumexp(stats[..., 0], dim=0) if stats.shape[0] > 1 else stats[0, :, 0].clone()
    loss = lse - (1.0 - smoothing) * stats[..., 1].sum(0)
    if smoothing:
        loss = loss - (smoothing / vocabulary) * stats[..., 2].sum(0)
    if z_loss:
        loss = loss + z_loss * lse * lse
    valid = labels != ignore_index
    loss = torch.where((labels < 0) | (labels >= vocabulary), math.nan, loss)  # no rank had it
    return torch.where(valid, loss, 0.0).sum(), valid.sum(), lse


def gradient(
    d_total: Tensor,
    logits: Tensor,
    labels: Tensor,
    lse: Tensor,
    start: int,
    vocabulary: int,
    ignore_index: int = -100,
    smoothing: float = 0.0,
    z_loss: float = 0.0,
    out: Tensor | None = None,
) -> Tensor:
    """Gradient of d_total * sum for the local columns, [N, V_local], in the logits' dtype; 0 for padding.

    `out` may be the logits themselves, if the caller owns them and needs them no more.
    """
    check_rows("cross_entropy_gradient", logits, labels, lse, out)
    result = torch.empty_like(logits) if out is None else out
    columns = _columns(logits, start, vocabulary)
    result[:, columns:] = 0.0
    logits, target = logits[:, :columns], result[:, :columns]
    local, here = _local(labels, start, columns)
    weight = d_total.to(lse.dtype) * (labels != ignore_index)
    peak = -(1.0 - smoothing) * here.to(lse.dtype)
    for rows in _blocks(logits) if columns else ():
        p = (logits[rows] - lse[rows, None]).exp_()  # in lse's dtype, float32 or better
        if z_loss:
            p.mul_(1.0 + 2.0 * z_loss * lse[rows, None])
        if smoothing:
            p.sub_(smoothing / vocabulary)
        p.scatter_add_(1, local[rows, None], peak[rows, None])
        torch.mul(p, weight[rows, None], out=p)
        target[rows] = p
    return result


def _local(labels: Tensor, start: int, columns: int) -> tuple[Tensor, Tensor]:
    """Column of each label in the local piece (0 where it is elsewhere), and whether it is here."""
    here = (labels >= start) & (labels < start + columns)
    return torch.where(here, labels - start, 0), here


def _blocks(logits: Tensor) -> Iterator[slice]:
    step = max(1, _BLOCK_ELEMENTS // max(1, logits.shape[1]))
    rows = (
        min(step, logits.shape[0]) if logits.is_meta else logits.shape[0]
    )  # no values: one block has all shapes
    return (slice(i, i + step) for i in range(0, rows, step))


def _acc(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def check_labels(op: str, logits: Tensor, labels: Tensor, smoothing: float, given: str = "logits") -> None:
    """`given`: what people call the tensor whose rows are labelled."""
    check_alike(op, **{given: logits})
    if labels.device != logits.device:
        raise ValueError(f"{op}: labels is on {labels.device}; legal is {logits.device}, as {given}")
    if labels.shape != logits.shape[:-1]:
        raise ValueError(
            f"{op}: labels has shape {tuple(labels.shape)}; "
            f"legal is {tuple(logits.shape[:-1])}, that of {given} less its last dimension"
        )
    if labels.dtype != torch.int64:
        raise ValueError(f"{op}: labels is {labels.dtype}; legal is torch.int64")
    if not 0.0 <= smoothing < 1.0:
        raise ValueError(f"{op}: smoothing={smoothing}; legal is 0 <= smoothing < 1")


def check_rows(
    op: str, logits: Tensor, labels: Tensor, lse: Tensor | None = None, out: Tensor | None = None
) -> None:
    """Raises ValueError unless logits [N, V_local], labels [N], lse [N] and out [N, V_local] fit."""
    if logits.dim() != 2:
        raise ValueError(f"{op}: logits has shape {tuple(logits.shape)}; legal is [N, V]")
    rows, legal = logits.shape[:1], {"labels": labels, "lse": lse}
    for name, x in legal.items():
        if x is not None and x.shape != rows:
            raise ValueError(
                f"{op}: {name} has shape {tuple(x.shape)}; legal is {tuple(rows)}, the rows of logits"
            )
    if out is not None and out.shape != logits.shape:
        raise ValueError(f"{op}: out has shape {tuple(out.shape)}; legal is {tuple(logits.shape)}, as logits")


def check_range(op: str, labels: Tensor, vocabulary: int, ignore_index: int) -> None:
    if labels.device.type != "cpu" or labels.numel() == 0:
        return
    low, high = labels.aminmax()
    if 0 <= low and high < vocabulary:
        return
    bad = labels[((labels < 0) | (labels >= vocabulary)) & (labels != ignore_index)]
    if bad.numel():
        raise ValueError(
            f"{op}: label {int(bad[0])}; legal is 0 to {vocabulary - 1}, or ignore_index={ignore_index}"
        )


# ----------------------------------------------------------------------------------------------------- triton


@jit
def _partial_kernel(logits, labels, stats, columns, start, logits_stride, COLUMNS: tl.constexpr):
    """One row: its maximum and sum of exponentials on the way (2 bytes read a bf16 logit, none written)."""
    row = tl.program_id(0).to(tl.int64)
    label = tl.load(labels + row) - start
    top = -float("inf")
    total = 0.0
    plain = 0.0
    for begin in range(0, columns, COLUMNS):
        c = begin + tl.arange(0, COLUMNS)
        z = tl.load(logits + row * logits_stride + c, mask=c < columns, other=-float("inf")).to(tl.float32)
        higher = tl.maximum(top, tl.max(z, axis=0))
        safe = tl.where(higher == -float("inf"), 0.0, higher)  # all columns may be padding
        total = total * tl.exp(top - safe) + tl.sum(tl.exp(z - safe), axis=0)
        plain += tl.sum(tl.where(c < columns, z, 0.0), axis=0)
        top = higher
    here = (label >= 0) & (label < columns)
    at = tl.load(logits + row * logits_stride + label, mask=here, other=0.0)
    tl.store(stats + row * 3, tl.where(top == -float("inf"), top, top + tl.log(total)))
    tl.store(stats + row * 3 + 1, tl.where(here, at.to(tl.float32), 0.0))
    tl.store(stats + row * 3 + 2, plain)


@jit
def _gradient_kernel(
    logits, labels, lse, d_total, out, columns, true_columns, start, logits_stride, out_stride, ignore_index, share,
    smoothing, z_loss, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Some columns of one row; out may be the logits."""
    row = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    label = tl.load(labels + row)
    weight = tl.where(label == ignore_index, 0.0, tl.load(d_total).to(tl.float32))
    all_rows = tl.load(lse + row)
    z = tl.load(logits + row * logits_stride + c, mask=c < columns, other=-float("inf")).to(tl.float32)
    z = tl.where(c < true_columns, z, -float("inf"))
    p = tl.exp(z - all_rows) * (1.0 + 2.0 * z_loss * all_rows) - share
    p = tl.where(c + start == label, p - (1.0 - smoothing), p)
    tl.store(out + row * out_stride + c, tl.where(c < true_columns, p * weight, 0.0), mask=c < columns)


def _triton_partial(logits: Tensor, labels: Tensor, start: int, vocabulary: int | None = None) -> Tensor:
    check_rows("cross_entropy_partial", logits, labels)
    columns = _columns(logits, start, vocabulary)
    stats = torch.empty(logits.shape[0], 3, dtype=torch.float32, device=logits.device)
    launch(
        _partial_kernel, (len(logits),), logits, labels.contiguous(), stats, columns, start, logits.stride(0),
        **tile("cross_entropy", logits.shape[1], architecture(logits.device)),
    )  # fmt: skip
    return stats


def _triton_gradient(
    d_total: Tensor,
    logits: Tensor,
    labels: Tensor,
    lse: Tensor,
    start: int,
    vocabulary: int,
    ignore_index: int = -100,
    smoothing: float = 0.0,
    z_loss: float = 0.0,
    out: Tensor | None = None,
) -> Tensor:
    check_rows("cross_entropy_gradient", logits, labels, lse, out)
    out = torch.empty(logits.shape, dtype=logits.dtype, device=logits.device) if out is None else out
    options = tile("cross_entropy_gradient", logits.shape[1], architecture(logits.device))
    launch(
        _gradient_kernel, (len(logits), -(-logits.shape[1] // options["COLUMNS"])),
        logits, labels.contiguous(), lse, d_total, out, logits.shape[1], _columns(logits, start, vocabulary), start,
        logits.stride(0), out.stride(0), ignore_index, smoothing / vocabulary, smoothing, z_loss, **options,
    )  # fmt: skip
    return out


class _TritonCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, labels: Tensor, ignore_index: int, smoothing: float, z_loss: float
    ) -> Tensor:
        stats = _triton_partial(logits, labels, 0)[None]
        total, _, lse = combine(stats, labels, logits.shape[1], ignore_index, smoothing, z_loss)
        ctx.save_for_backward(logits, labels, lse)
        ctx.options = (0, logits.shape[1], ignore_index, smoothing, z_loss)
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_total: Tensor) -> tuple[Tensor | None, ...]:
        return _triton_gradient(d_total, *ctx.saved_tensors, *ctx.options), None, None, None, None


def _triton(
    logits: Tensor, labels: Tensor, ignore_index: int = -100, smoothing: float = 0.0, z_loss: float = 0.0
) -> tuple[Tensor, Tensor]:
    check_labels("cross_entropy", logits, labels, smoothing)
    flat = labels.reshape(-1)
    total: Tensor = _TritonCrossEntropy.apply(  # type: ignore[no-untyped-call]
        matrix("cross_entropy", "logits", logits), flat, ignore_index, smoothing, z_loss
    )
    return total, (flat != ignore_index).sum()


_TAKES = {"logits": ROWS, "labels": INDEX}

TRITON = {
    "cross_entropy": TritonOp(_triton, _TAKES),
    "cross_entropy_partial": TritonOp(_triton_partial, _TAKES),
    "cross_entropy_gradient": TritonOp(
        _triton_gradient,
        _TAKES
        | {"d_total": SCALAR, "lse": Takes((torch.float32,)), "out": Takes(layout="apart", like="logits")},
    ),
}


def reference(
    logits: Tensor, labels: Tensor, ignore_index: int = -100, smoothing: float = 0.0, z_loss: float = 0.0
) -> Tensor:
    """The sum, from first principles in float64."""
    valid = labels != ignore_index
    z, y = logits.double()[valid], labels[valid]
    top = z.amax(-1, keepdim=True)
    lse = (z - top).exp().sum(-1).log() + top[..., 0]
    at = z.gather(-1, y[..., None])[..., 0]
    return ((1 - smoothing) * (lse - at) + smoothing * (lse - z.mean(-1)) + z_loss * lse**2).sum()
