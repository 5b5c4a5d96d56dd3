"""Communicates under autograd, in pairs of functions: each one's backward is the other's forward.

Note: adjoints.
A collective is a linear map from the tensors of all ranks to the tensors of all ranks.  Its gradient is its adjoint:

    copy        identity            <->  all_reduce     sum over the axis
    gather      all-gather          <->  reduce_scatter sum, then one's own part
    split       one's own part      <->  join           all-gather of parts that are equal work (see below)
    tokens_to_heads  all-to-all     <->  heads_to_tokens  all-to-all back
    shift       ring step by +d     <->  shift          ring step by -d
    broadcast   from one coordinate <->  reduce         to that coordinate

Two conventions exist for the gradient of a tensor that every rank has.  After `copy` each rank has a *term* of it, and
terms are summed.  After `split` and `join` each rank has *all* of it.  `gather` takes terms in its backward, `join`
takes all of it.  Inputs are never changed.  Payload of each is counted under its own name on the axis, in forward and
in backward.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from einops import rearrange
from torch import Tensor
from torch.autograd import Function

from colossal_lite.distributed.communicator import Communicator
from colossal_lite.numerics.torch_modes import left_untraced
from colossal_lite.transforms.saved_results import save_for_recompute


@left_untraced
def copy(x: Tensor, comm: Communicator) -> Tensor:
    """x [...] unchanged; its gradient is the sum of the ranks' gradients."""
    return x if comm.size == 1 else _apply(_Copy, x, comm)


@left_untraced
def all_reduce(x: Tensor, comm: Communicator) -> Tensor:
    """The sum of all ranks' x [...]; the gradient passes to each unchanged."""
    return x if comm.size == 1 else _apply(_AllReduce, x, comm)


@left_untraced
def gather(x: Tensor, comm: Communicator, dim: int) -> Tensor:
    """All ranks' x concatenated along `dim`; each rank's gradient is a term, and its part of the sum comes back."""
    return x if comm.size == 1 else _apply(_Gather, x, comm, dim)


@left_untraced
def reduce_scatter(x: Tensor, comm: Communicator, dim: int) -> Tensor:
    """This rank's part along `dim` of the sum of all ranks' x. Raises ValueError if the size does not divide."""
    _check_divides(x, comm, dim)
    return x if comm.size == 1 else _apply(_ReduceScatter, x, comm, dim)


@left_untraced
def split(x: Tensor, comm: Communicator, dim: int) -> Tensor:
    """This rank's part of an x that is equal on all ranks. The gradients of the parts are joined for each."""
    _check_divides(x, comm, dim)
    return x if comm.size == 1 else _apply(_Split, x, comm, dim)


@left_untraced
def join(x: Tensor, comm: Communicator, dim: int) -> Tensor:
    """All ranks' x concatenated along `dim`, for equal use on all; each takes its own part of the gradient."""
    return x if comm.size == 1 else _apply(_Join, x, comm, dim)


@left_untraced
def tokens_to_heads(tensors: Sequence[Tensor], comm: Communicator) -> tuple[Tensor, ...]:
    """Exchanges tensors [B, t, H_i, K] of this rank's tokens for [B, n t, H_i / n, K]: its heads of all ranks' tokens,
    in rank order. One exchange serves all tensors. Raises ValueError for heads that do not divide."""
    for x in tensors:
        _check_divides(x, comm, 2)
    if comm.size == 1:
        return tuple(tensors)
    out: tuple[Tensor, ...] = _ToHeads.apply(comm, *tensors)  # type: ignore[no-untyped-call]
    return out


@left_untraced
def heads_to_tokens(x: Tensor, comm: Communicator) -> Tensor:
    """The inverse: this rank's heads [B, n t, H, K] of all tokens to all heads [B, t, n H, K] of its tokens."""
    _check_divides(x, comm, 1)
    return x if comm.size == 1 else _apply(_ToTokens, x, comm)


@left_untraced
def shift(x: Tensor, comm: Communicator, distance: int = 1) -> Tensor:
    """The x of the coordinate `distance` behind on the ring."""
    return x if comm.size == 1 else _apply(_Shift, x, comm, distance)


@left_untraced
def broadcast(x: Tensor, comm: Communicator, source: int) -> Tensor:
    """The x of coordinate `source`; that rank gets the sum of the gradients, the others none."""
    return x if comm.size == 1 else _apply(_Broadcast, x, comm, source)


@left_untraced
def reduce(x: Tensor, comm: Communicator, target: int) -> Tensor:
    """The sum of all ranks' x on coordinate `target`, zeros elsewhere; its gradient goes to all."""
    return x if comm.size == 1 else _apply(_Reduce, x, comm, target)


def _apply(function: type[Function], *args: Any) -> Tensor:
    out: Tensor = function.apply(*args)
    return out


# ---- plain functions, on tensors without a graph ----


def _sum(x: Tensor, comm: Communicator) -> Tensor:
    return comm.all_reduce(x.clone(memory_format=torch.contiguous_format))


def _concat(x: Tensor, comm: Communicator, dim: int) -> Tensor:
    return comm.all_gather(x.contiguous(), dim=dim)


def _sum_part(x: Tensor, comm: Communicator, dim: int) -> Tensor:
    return comm.reduce_scatter(x if dim % x.dim() else x.contiguous(), dim=dim)


def _part(x: Tensor, comm: Communicator, dim: int) -> Tensor:
    return x.chunk(comm.size, dim)[comm.coord].contiguous()


def _to_heads(tensors: Sequence[Tensor], comm: Communicator) -> tuple[Tensor, ...]:
    """Messages have tokens before samples, so received sequences are contiguous without a copy."""
    n, (batch, tokens, _, width) = comm.size, tensors[0].shape
    heads = [x.shape[2] // n for x in tensors]
    wire = tensors[0].new_empty(n, tokens, batch, sum(heads), width)
    for part, *shares in zip(wire, *(x.transpose(0, 1).chunk(n, 2) for x in tensors), strict=True):
        torch.cat(shares, 2, out=part)
    parts: tuple[Tensor, ...] = comm.all_to_all(wire).flatten(0, 1).transpose(0, 1).split(heads, 2)
    return parts


def _to_tokens(tensors: Sequence[Tensor], comm: Communicator) -> tuple[Tensor, ...]:
    n, (batch, tokens, _, width) = comm.size, tensors[0].shape
    heads = [x.shape[2] for x in tensors]
    wire = tensors[0].new_empty(tokens, batch, sum(heads), width)
    torch.cat([x.transpose(0, 1) for x in tensors], 2, out=wire)
    parts = comm.all_to_all(wire.unflatten(0, (n, tokens // n))).split(heads, 3)
    return tuple(rearrange(part, "n t b h k -> b t (n h) k") for part in parts)


def _check_divides(x: Tensor, comm: Communicator, dim: int) -> None:
    if x.shape[dim] % comm.size:
        raise ValueError(
            f"axis {comm.axis!r}: {comm.size} ranks do not divide dim {dim} of {list(x.shape)}; "
            f"legal: a multiple of {comm.size}"
        )


# ---- the pairs ----


class _Copy(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, comm: Communicator) -> Tensor:
        ctx.comm = comm
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        return _sum(dy, ctx.comm), None


class _AllReduce(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, comm: Communicator) -> Tensor:
        return save_for_recompute(lambda: _sum(x, comm), x)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        return dy, None


class _Gather(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, comm: Communicator, dim: int) -> Tensor:
        ctx.comm, ctx.dim = comm, dim
        return _concat(x, comm, dim)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None]:
        return _sum_part(dy, ctx.comm, ctx.dim), None, None


class _ReduceScatter(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, comm: Communicator, dim: int) -> Tensor:
        ctx.comm, ctx.dim = comm, dim
        return save_for_recompute(lambda: _sum_part(x, comm, dim), x)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None]:
        return _concat(dy, ctx.comm, ctx.dim), None, None


class _Split(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, comm: Communicator, dim: int) -> Tensor:
        ctx.comm, ctx.dim = comm, dim
        return _part(x, comm, dim)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None]:
        return _concat(dy, ctx.comm, ctx.dim), None, None


class _Join(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, comm: Communicator, dim: int) -> Tensor:
        ctx.comm, ctx.dim = comm, dim
        return _concat(x, comm, dim)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None]:
        return _part(dy, ctx.comm, ctx.dim), None, None


class _ToHeads(Function):
    @staticmethod
    def forward(ctx: Any, comm: Communicator, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.comm = comm
        return _to_heads(tensors, comm)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return None, *_to_tokens(gradients, ctx.comm)


class _ToTokens(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, comm: Communicator) -> Tensor:
        ctx.comm = comm
        return _to_tokens((x,), comm)[0]

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        return _to_heads((dy,), ctx.comm)[0], None


class _Shift(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, comm: Communicator, distance: int) -> Tensor:
        ctx.comm, ctx.distance = comm, distance
        return comm.shift(x.contiguous(), distance)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None]:
        return ctx.comm.shift(dy.contiguous(), -ctx.distance), None, None


class _Broadcast(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, comm: Communicator, source: int) -> Tensor:
        ctx.comm, ctx.source = comm, source
        return comm.broadcast(x.clone(memory_format=torch.contiguous_format), source)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None]:
        return _to_target(dy, ctx.comm, ctx.source), None, None


class _Reduce(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, comm: Communicator, target: int) -> Tensor:
        ctx.comm, ctx.target = comm, target
        return _to_target(x, comm, target)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None]:
        return ctx.comm.broadcast(dy.clone(memory_format=torch.contiguous_format), ctx.target), None, None


def _to_target(x: Tensor, comm: Communicator, target: int) -> Tensor:
    summed = comm.reduce(x.clone(memory_format=torch.contiguous_format), target)
    return summed if comm.coord == target else torch.zeros_like(summed)
