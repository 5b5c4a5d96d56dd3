"""Computes attention over keys of several ranks, one block at a time: ring, gather and full ring.

Note: blocks.
n ranks hold t = T/n tokens each: B samples, H query heads, G key heads, K head width.  For causal attention rank r of n
holds pieces r and 2n-1-r of 2n (zigzag, 2311.09431). The early piece comes first, so local order is global order.  Then
each pair of ranks is one rectangle and one call of the kernel (`seen`).  A rank's own tokens are causal.  All queries
see the first half of an earlier rank's keys; the second half of the queries sees all of a later rank's.  Every rank
computes half of a block in every step, so none waits for another.

Parts are merged by their log-sum-exp (2310.01889) in float32 or better.  Forward saves q, k, v, out and the log-sums of
this rank alone; backward fetches the others' keys once more.  Payload a layer in elements, M_kv = B T G K, of `ring`:
    keys and values     2 M_kv/n a hop, n-1 hops forward and n-1 backward, the next block in flight while one is used
    their gradients     2 M_kv/n a hop, n-1 hops, in float32 or better.  They start at the first rank that is not their
                        owner, each rank adds its term and passes them on, and the owner gets them last
and of `gather`: 2 M_kv gathered in each direction, 2 M_kv of gradients scattered.  `full_ring` (2105.13120, section 3)
keeps full rows of scores, B H t T elements: keys go round for the scores, values for the output.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from einops import rearrange
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from colossal_lite.distributed.communicator import Communicator, PendingCollective
from colossal_lite.kernels import Mask, Ops
from colossal_lite.numerics.torch_modes import left_untraced
from colossal_lite.transforms.saved_results import save_for_recompute


class Seen(NamedTuple):
    """The queries of a rank that attend to keys of a block, and those keys. `causal`: only to earlier ones."""

    queries: slice
    keys: slice
    causal: bool


def seen(coord: int, source: int, tokens: int, causal: bool) -> Seen:
    """The part of the scores that rank `coord` of a zigzag computes with the block of rank `source`.

    Both have `tokens` tokens."""
    whole, half = slice(0, tokens), tokens // 2
    if source == coord or not causal:
        return Seen(whole, whole, causal and source == coord)
    return Seen(whole, slice(0, half), False) if source < coord else Seen(slice(half, tokens), whole, False)


@dataclass(frozen=True, eq=False)
class Documents:
    """Document numbers [n, B, t] of every rank's queries and keys; a query sees keys of its own number."""

    queries: Tensor
    keys: Tensor

    def pair(self, coord: int, source: int, part: Seen) -> tuple[Tensor, Tensor]:
        return self.queries[coord, :, part.queries], self.keys[source, :, part.keys]


class _RingGradients:
    """Sums the gradients [2, B, t, G, K] of every block, and sends each to the block's rank (`home`).

    They travel round the ring behind their keys. `add` is called in the order of the ring, own block first."""

    def __init__(self, comm: Communicator, block: Tensor) -> None:
        self._comm, self._block = comm, block
        self._own: tuple[Tensor, Tensor] | None = None
        self._on_the_way: PendingCollective | None = None

    def add(self, source: int, keys: slice, dk: Tensor, dv: Tensor) -> None:
        if source == self._comm.coord:
            self._own = dk, dv
            return
        total = self._on_the_way.wait() if self._on_the_way else torch.zeros_like(self._block)
        total[0, :, keys] += dk
        total[1, :, keys] += dv
        self._on_the_way = self._comm.shift_async(total)

    def home(self) -> Tensor:
        assert self._own is not None and self._on_the_way is not None
        total = self._on_the_way.wait()
        for part, own in zip(total, self._own, strict=True):
            part += own
        return total


class _ScatteredGradients:
    """As `_RingGradients`: those of all blocks are held, then summed at once."""

    def __init__(self, comm: Communicator, block: Tensor) -> None:
        self._comm, self._total = comm, block.new_zeros(comm.size, *block.shape)

    def add(self, source: int, keys: slice, dk: Tensor, dv: Tensor) -> None:
        self._total[source, 0, :, keys] += dk
        self._total[source, 1, :, keys] += dv

    def home(self) -> Tensor:
        return self._comm.reduce_scatter(self._total)[0]


@dataclass(frozen=True)
class Ring:
    """Sends blocks of keys and values [2, B, t, G, K] to the ranks of `comm`, and their gradients back.

    Each block passes around the ring; the next is in flight while one is used."""

    comm: Communicator

    def blocks(self, block: Tensor) -> Iterator[tuple[int, Tensor]]:
        """(source, its block) of every rank, this one's first."""
        n, coord = self.comm.size, self.comm.coord
        for step in range(n):
            coming = self.comm.shift_async(block) if step < n - 1 else None
            yield (coord - step) % n, block
            block = coming.wait() if coming else block

    def gradients(self, block: Tensor) -> _RingGradients:
        """An empty collector for gradients of blocks of this shape."""
        return _RingGradients(self.comm, block)


@dataclass(frozen=True)
class Gather:
    """As `Ring`: all blocks are sent at once, while the own one is used."""

    comm: Communicator

    def blocks(self, block: Tensor) -> Iterator[tuple[int, Tensor]]:
        coming = self.comm.all_gather_async(block.unsqueeze(0))
        yield self.comm.coord, block
        whole = coming.wait()
        for source in range(self.comm.size):
            if source != self.comm.coord:
                yield source, whole[source]

    def gradients(self, block: Tensor) -> _ScatteredGradients:
        return _ScatteredGradients(self.comm, block)


Carrier = Ring | Gather


@left_untraced
def attend_blocks(
    q: Tensor, k: Tensor, v: Tensor, *, carrier: Carrier, ops: Ops, causal: bool, documents: Documents | None,
    scale: float | None,
) -> Tensor:  # fmt: skip
    """out [B, t, H, K] of this rank's q, of the same shape. Keys and values [B, t, G, K] are those of the carrier's
    ranks."""
    out: Tensor = _Blocks.apply(q, k, v, carrier, ops, causal, documents, scale)  # type: ignore[no-untyped-call]
    return out


@left_untraced
def full_ring(
    q: Tensor, k: Tensor, v: Tensor, *, comm: Communicator, documents: Documents | None, scale: float | None
) -> Tensor:
    """The same for full attention by the original ring self-attention. Shapes as `attend_blocks`."""
    out: Tensor = _FullRing.apply(q, k, v, comm, documents, scale)  # type: ignore[no-untyped-call]
    return out


def _options(
    coord: int, source: int, part: Seen, documents: Documents | None, scale: float | None
) -> dict[str, Any]:
    pair = documents.pair(coord, source, part) if documents else None
    return dict(mask=Mask(part.causal, pair), scale=scale)


class _Blocks(Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, carrier: Carrier, ops: Ops, causal: bool,
        documents: Documents | None, scale: float | None,
    ) -> Tensor:  # fmt: skip
        coord = carrier.comm.coord

        def attended() -> tuple[Tensor, Tensor]:
            out: Tensor | None = None
            lse: Tensor | None = None
            for source, (keys, values) in carrier.blocks(torch.stack((k, v))):
                part = seen(coord, source, q.shape[1], causal)
                options = _options(coord, source, part, documents, scale)
                more = ops.attend_forward(
                    q[:, part.queries], keys[:, part.keys], values[:, part.keys], **options
                )
                if out is None or lse is None:
                    out, lse = more[0].to(more[1].dtype), more[1]
                else:
                    ops.attend_merge_(out[:, part.queries], lse[:, :, part.queries], *more)
            assert out is not None and lse is not None
            return out.to(q.dtype), lse

        result, lse = save_for_recompute(attended, q)
        ctx.save_for_backward(q, k, v, result, lse)
        ctx.rest = (carrier, ops, causal, documents, scale)
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Any, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        carrier, ops, causal, documents, scale = ctx.rest
        coord = carrier.comm.coord
        wide = torch.promote_types(q.dtype, torch.float32)
        block = torch.stack((k, v))
        gradients = carrier.gradients(block.to(wide))
        dq: Tensor | None = None
        for source, (keys, values) in carrier.blocks(block):
            part = seen(coord, source, q.shape[1], causal)
            mine = (x[:, part.queries] for x in (dout, q))
            terms = ops.attend_backward(
                *mine, keys[:, part.keys], values[:, part.keys], out[:, part.queries], lse[:, :, part.queries],
                **_options(coord, source, part, documents, scale),
            )  # fmt: skip
            if dq is None:  # the own block, which all queries see
                dq = terms[0].to(wide)
            else:
                dq[:, part.queries] += terms[0]
            gradients.add(source, part.keys, *terms[1:])
        assert dq is not None
        return dq.to(q.dtype), *gradients.home().to(q.dtype), *(None,) * 5


class _FullRing(Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, comm: Communicator, documents: Documents | None,
        scale: float | None,
    ) -> Tensor:  # fmt: skip
        wide, tokens = torch.promote_types(q.dtype, torch.float32), k.shape[1]
        factor = q.shape[-1] ** -0.5 if scale is None else scale
        queries = _by_key_head(q, k).to(wide)
        rows = queries.new_empty(
            *queries.shape[:-1], comm.size, tokens
        )  # [B, G, R, t, n, t]: scores, then shares
        for source, keys in Ring(comm).blocks(k.contiguous()):
            rows[..., source, :] = torch.einsum("bgrtk,bsgk->bgrts", queries, keys.to(wide)) * factor
        if documents is not None:
            hidden = (
                documents.queries[comm.coord][:, :, None, None] != documents.keys.transpose(0, 1)[:, None]
            )
            rows.masked_fill_(hidden[:, None, None], -torch.inf)
        rows = rows.flatten(-2).softmax(-1).unflatten(-1, (comm.size, tokens))
        if documents is not None:  # a query that sees nothing has out 0
            rows = rows.masked_fill(hidden[:, None, None], 0.0)
        out = torch.zeros_like(queries)
        for source, values in Ring(comm).blocks(v.contiguous()):
            out += torch.einsum("bgrts,bsgk->bgrtk", rows[..., source, :], values.to(wide))
        result = rearrange(out, "b g r t k -> b t (g r) k").to(q.dtype)
        ctx.save_for_backward(q, k, v, rows.to(q.dtype), result)
        ctx.rest = (comm, factor)
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Any, ...]:
        q, k, v, rows, out = ctx.saved_tensors
        comm, factor = ctx.rest
        wide = torch.promote_types(q.dtype, torch.float32)
        queries, dout5, out5 = (_by_key_head(x, k).to(wide) for x in (q, dout, out))
        delta = (dout5 * out5).sum(-1, keepdim=True)
        block, dq = torch.stack((k, v)), torch.zeros_like(queries)
        gradients = _RingGradients(comm, block.to(wide))
        for source, (keys, values) in Ring(comm).blocks(block):
            shares = rows[..., source, :].to(wide)
            ds = shares * (torch.einsum("bgrtk,bsgk->bgrts", dout5, values.to(wide)) - delta) * factor
            dq += torch.einsum("bgrts,bsgk->bgrtk", ds, keys.to(wide))
            dk = torch.einsum("bgrts,bgrtk->bsgk", ds, queries)
            dv = torch.einsum("bgrts,bgrtk->bsgk", shares, dout5)
            gradients.add(source, slice(None), dk, dv)
        dk, dv = gradients.home().to(q.dtype)
        return rearrange(dq, "b g r t k -> b t (g r) k").to(q.dtype), dk, dv, None, None, None


def _by_key_head(x: Tensor, k: Tensor) -> Tensor:
    """[B, t, H, K] to [B, G, R, t, K] with R = H / G."""
    return rearrange(x, "b t (g r) k -> b g r t k", g=k.shape[2])
