"""Sequence (context) parallelism: each rank holds 1/N of every sequence, and only attention looks across.

Note: sequence.
Weights are whole along this axis; their gradients are terms of a sum over it, as over `data`.  Tokens carry their
global positions, so rotary and learned positions, dropout and the loss come out right wherever a token lies.
    contiguous  rank r holds tokens [r T/N, (r+1) T/N)
    zigzag      rank r holds pieces r and 2N-1-r of 2N, so that causal work is the same on every rank (2311.09431)
Modes, with payload per layer in elements, M_kv = B T G K:
    ring          (2310.01889, zigzag) keys and values travel round the ring, the next block in flight while this one
                  is used; softmax parts are merged by their log-sum-exp.  Sends of 2 M_kv/N: N-1 forward; backward
                  N-1 again, and N of the gradients, which travel with their keys (in float32 or better)
    allgather_kv  keys and values gathered at once: 2 M_kv forward, reduce-scatter of 2 M_kv backward
    ulysses       (2309.14509, contiguous) all-to-all from tokens to heads and back: 2 M/N + 2 M_kv/N each way; where
                  key heads are fewer than ranks each is sent to the ranks whose queries share it
A rank never holds scores of more than one pair of blocks.  Attention is the one op of kernels, called on blocks with
offsets: no mask tensor crosses a rank.  Documents (the attention mask) are gathered once a layer, as integers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from colossal_lite import conjugate
from colossal_lite.batch import Batch
from colossal_lite.comm import AxisComm, LedgerRow
from colossal_lite.kernels import Mask, Ops
from colossal_lite.kernels.attention import merge

ZIGZAG = ("ring", "allgather_kv")
BUILT = (*ZIGZAG, "ulysses")


@dataclass(frozen=True)
class Pieces:
    """Which pieces of a sequence each rank holds, in local order, of `total` equal ones."""

    by_rank: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, size: int, mode: str) -> Pieces:
        if mode in ZIGZAG:
            return cls(tuple((r, 2 * size - 1 - r) for r in range(size)))
        return cls(tuple((r,) for r in range(size)))

    @property
    def total(self) -> int:
        return sum(map(len, self.by_rank))

    def order(self) -> list[int]:
        """Where each global piece stands in the concatenation of all ranks' pieces."""
        held = [piece for pieces in self.by_rank for piece in pieces]
        return [held.index(piece) for piece in range(self.total)]


@dataclass(frozen=True)
class SequenceParallel:
    """One rank's share of the sequence axis."""

    comm: AxisComm
    mode: str

    @property
    def pieces(self) -> Pieces:
        return Pieces.of(self.comm.size, self.mode)

    def take(self, whole: Tensor, dim: int) -> Tensor:
        """This rank's tokens of a tensor that holds all. Raises ValueError if they do not divide."""
        total = self.pieces.total
        if whole.shape[dim] % total:
            raise ValueError(
                f"sequence: {whole.shape[dim]} tokens do not divide into {total} pieces "
                f"(mode {self.mode!r} on {self.comm.size} ranks); legal: a multiple of {total}"
            )
        parts = whole.chunk(total, dim)
        return torch.cat([parts[piece] for piece in self.pieces.by_rank[self.comm.coord]], dim)

    def in_order(self, ranks: Tensor, dim: int) -> Tensor:
        """All tokens in global order from the concatenation of all ranks' along `dim`."""
        parts = ranks.chunk(self.pieces.total, dim)
        return torch.cat([parts[place] for place in self.pieces.order()], dim)

    def local_part(self, batch: Batch) -> Batch:
        """This rank's tokens of every sequence, with their global positions."""
        positions = self.take(torch.arange(batch.inputs.shape[1], device=batch.inputs.device), 0)
        kwargs = {name: self.take(tensor, 1) for name, tensor in batch.kwargs.items()}
        kwargs.setdefault("position_ids", positions)
        labels = batch.labels if batch.labels.dim() == 1 else self.take(batch.labels, 1)
        return Batch(tuple(self.take(t, 1) for t in batch.args), kwargs, labels, batch.samples, positions)

    def ops(self, ops: Ops) -> Ops:
        """The op table with attention over the whole sequence."""
        attend = {"ring": self._ring, "allgather_kv": self._all_gather, "ulysses": self._ulysses}[self.mode]
        return replace(ops, attend=lambda q, k, v, **options: attend(ops, q, k, v, **options))

    # ---- attention of local queries [B, T/N, H, K] with all keys; k and v [B, T/N, G, K] ----

    def _ring(
        self, ops: Ops, q: Tensor, k: Tensor, v: Tensor, *, mask: Mask, scale: float | None = None
    ) -> Tensor:
        documents = self._documents(mask)
        out: Tensor = _Ring.apply(q, k, v, self, ops, mask.causal, documents, scale)  # type: ignore[no-untyped-call]
        return out

    def _all_gather(
        self, ops: Ops, q: Tensor, k: Tensor, v: Tensor, *, mask: Mask, scale: float | None = None
    ) -> Tensor:
        both = self.in_order(conjugate.gather(torch.stack((k, v)), self.comm, 2), 2)
        documents, piece = self._documents(mask), q.shape[1] // len(self.pieces.by_rank[0])
        outs = []
        for mine, number in zip(q.split(piece, 1), self.pieces.by_rank[self.comm.coord], strict=True):
            start = number * piece
            # keys before the piece are all seen, its own causally, later ones not at all
            spans = [(0, start), (start, start + piece)] if mask.causal else [(0, both.shape[2])]
            parts = []
            for low, high in spans:
                if low == high:
                    continue
                part = Mask(mask.causal, _pair(documents, (start, start + piece), (low, high)))
                keys, values = both[:, :, low:high]
                parts.append(ops.attend_lse(mine, keys, values, mask=part, offsets=(start, low), scale=scale))
            outs.append(merge(parts)[0].to(q.dtype))
        return torch.cat(outs, 1)

    def _ulysses(
        self, ops: Ops, q: Tensor, k: Tensor, v: Tensor, *, mask: Mask, scale: float | None = None
    ) -> Tensor:
        n = self.comm.size
        if q.shape[2] % n:
            raise ValueError(
                f"sequence: ulysses over {n} ranks needs a multiple of {n} heads, got {q.shape[2]}"
            )
        if k.shape[2] % n:  # checked against the model's facts: then n is a multiple of the key heads
            k, v = (x.repeat_interleave(n // x.shape[2], dim=2) for x in (k, v))
        q, k, v = (conjugate.all_to_all(x, self.comm, 2, 1) for x in (q, k, v))
        documents = self._documents(mask)
        y = ops.attend(q, k, v, mask=Mask(mask.causal, documents), scale=scale)
        return conjugate.all_to_all(y, self.comm, 1, 2)

    def _documents(self, mask: Mask) -> Tensor | None:
        """Document numbers [B, T] of the whole sequence, in global order."""
        if mask.documents is None:
            return None
        assert isinstance(mask.documents, Tensor), "queries and keys are the same tokens"
        parts = self.comm.all_gather(mask.documents.contiguous().unsqueeze(0))
        return self.in_order(torch.cat(parts.unbind(0), 1), 1)


def _pair(documents: Tensor | None, queries: tuple[int, int], keys: tuple[int, int]) -> Any:
    if documents is None:
        return None
    return documents[:, slice(*queries)], documents[:, slice(*keys)]


class _Ring(Function):
    """Blockwise attention while keys and values travel; backward takes them round again with their gradients."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, sequence: SequenceParallel, ops: Ops, causal: bool,
        documents: Tensor | None, scale: float | None,
    ) -> Tensor:  # fmt: skip
        n, piece = sequence.comm.size, q.shape[1] // 2
        queries = list(zip(q.split(piece, 1), sequence.pieces.by_rank[sequence.comm.coord], strict=True))
        parts: list[list[tuple[Tensor, Tensor]]] = [[] for _ in queries]
        block = torch.stack((k, v))
        for step in range(n):
            pending = sequence.comm.shift_async(block) if step < n - 1 else None
            source = sequence.pieces.by_rank[(sequence.comm.coord - step) % n]
            for found, (mine, at) in zip(parts, queries, strict=True):
                for keys, values, of in _halves(block, source, piece):
                    if not causal or of <= at:
                        options = _options(at, of, piece, causal, documents, scale)
                        found.append(ops.attend_forward(mine, keys, values, **options))
            block = pending.wait() if pending else block
        outs, lses = zip(*(merge(found) for found in parts), strict=True)
        out = torch.cat(outs, 1).to(q.dtype)
        ctx.save_for_backward(q, k, v, out, torch.cat(lses, 2))
        ctx.rest = (sequence, ops, causal, documents, scale)
        return out

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Any, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        sequence, ops, causal, documents, scale = ctx.rest
        n, piece, comm = sequence.comm.size, q.shape[1] // 2, sequence.comm
        wide = torch.promote_types(q.dtype, torch.float32)
        mine = list(
            zip(*(x.split(piece, 1) for x in (dout.contiguous(), q, out)), lse.split(piece, 2), strict=True)
        )
        held = sequence.pieces.by_rank[comm.coord]
        dq = [torch.zeros_like(part, dtype=wide) for _, part, _, _ in mine]
        block = torch.stack((k, v))
        gradients = torch.zeros_like(block, dtype=wide)
        for step in range(n):
            pending = comm.shift_async(block) if step < n - 1 else None
            source = sequence.pieces.by_rank[(comm.coord - step) % n]
            for half, (keys, values, of) in enumerate(_halves(block, source, piece)):
                rows = slice(half * piece, (half + 1) * piece)
                for i, ((d_i, q_i, out_i, lse_i), at) in enumerate(zip(mine, held, strict=True)):
                    if causal and of > at:
                        continue
                    options = _options(at, of, piece, causal, documents, scale)
                    terms = ops.attend_backward(d_i, q_i, keys, values, out_i, lse_i, **options)
                    dq[i] += terms[0]
                    gradients[0, :, rows] += terms[1]
                    gradients[1, :, rows] += terms[2]
            gradients = comm.shift(gradients)
            block = pending.wait() if pending else block
        dk, dv = gradients.to(q.dtype)
        return torch.cat(dq, 1).to(q.dtype), dk, dv, None, None, None, None, None


def _halves(block: Tensor, source: Sequence[int], piece: int) -> list[tuple[Tensor, Tensor, int]]:
    """(keys, values, number) of the two pieces of a travelling block [2, B, T/N, G, K]."""
    return [(*part, number) for part, number in zip(block.split(piece, 2), source, strict=True)]


def _options(
    query: int, key: int, piece: int, causal: bool, documents: Tensor | None, scale: float | None
) -> dict[str, Any]:
    """How piece `query` sees piece `key`: the later of two pieces sees all of the earlier."""
    offsets = (query * piece, key * piece)
    pair = _pair(documents, (offsets[0], offsets[0] + piece), (offsets[1], offsets[1] + piece))
    return dict(mask=Mask(causal, pair), offsets=offsets, scale=scale)


# ---- formulas (parallel.md 1.7), as the ledger counts them ----


def micro_batch_payload(
    sequence: SequenceParallel, *, layers: int, heads: int, kv_heads: int, head_width: int, batch: int, tokens: int,
    itemsize: int,
) -> tuple[LedgerRow, ...]:  # fmt: skip
    """Calls and payload bytes on the sequence axis of forward and backward of one micro-batch without documents.

    `heads` and `kv_heads`: those of this rank (a share where the tensor axis cuts them); `tokens`: of a whole sequence.
    """
    n = sequence.comm.size
    if n == 1:
        return ()
    head_bytes = batch * tokens // n * head_width * itemsize  # of one head of this rank's tokens
    both_bytes = 2 * kv_heads * head_bytes
    match sequence.mode:
        case "ring":
            gradient_bytes = both_bytes // itemsize * max(itemsize, 4)
            calls, payload_bytes = 2 * (n - 1) + n, 2 * (n - 1) * both_bytes + n * gradient_bytes
            rows = [("send", calls, payload_bytes)]
        case "allgather_kv":
            rows = [("all_gather", 1, n * both_bytes), ("reduce_scatter", 1, n * both_bytes)]
        case _:
            sent = kv_heads if kv_heads % n == 0 else n
            rows = [("all_to_all", 8, 2 * (2 * heads + 2 * sent) * head_bytes)]
    return tuple(LedgerRow(name, "sequence", layers * calls, layers * size) for name, calls, size in rows)


@dataclass(frozen=True)
class OnSequence:
    """A tensor strategy whose tokens are cut along the sequence axis as well."""

    inner: Any
    sequence: SequenceParallel

    @property
    def name(self) -> str:
        return f"{self.inner.name} x {self.sequence.mode}"

    @property
    def tells_loss(self) -> bool:
        tells: bool = self.inner.tells_loss
        return tells

    def local_part(self, batch: Batch) -> Batch:
        return self.sequence.local_part(self.inner.local_part(batch))

    def cross_entropy(self, ops: Ops, logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        result: tuple[Tensor, Tensor] = self.inner.cross_entropy(ops, logits, labels)
        return result

    def whole_vocabulary(self, logits: Tensor) -> Tensor:
        whole: Tensor = self.inner.whole_vocabulary(logits)
        return whole

    def whole_batch(self, logits: Tensor) -> Tensor:
        tokens = self.sequence.in_order(conjugate.join(logits, self.sequence.comm, 1), 1)
        whole: Tensor = self.inner.whole_batch(tokens)
        return whole
