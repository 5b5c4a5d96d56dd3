"""Shards each sequence over N ranks (context parallelism); only attention communicates.

Note: sequence.
Weights are replicated along this axis; their gradients are terms of a sum over it, as over `data`.  Tokens carry their
global positions.  So rotary and learned positions, dropout and the loss are right for any token.
    contiguous  rank r holds tokens [r T/N, (r+1) T/N)
    zigzag      rank r of a ring of R holds pieces r and 2R-1-r of 2R, so that causal work is the same on every rank
                (2311.09431); in usp the U ranks of an inner group hold those two pieces between them, in order
Modes; M = B T H K and M_kv = B T G K elements a layer. They move (ring_attention.py has the rings):
    ring          (2310.01889, zigzag) keys and values go round, their gradients behind them: 6 (N-1) M_kv/N
    allgather_kv  (zigzag) keys and values gathered at once, in forward and again in backward: 6 M_kv
    ulysses       (2309.14509, contiguous) one all-to-all from tokens to heads for q, k and v, one back for the output,
                  and both again in backward: 2 (2 M + 2 M_kv)/N; where key heads are fewer than ranks each is sent to
                  the ranks whose queries share it
    usp           (2405.07719, zigzag) ulysses over U neighbours, inside it a ring over R: of its heads' M_kv/U each
    ring_full     (2105.13120, contiguous) full attention with full rows of scores: 6 (N-1) M_kv/N
Attention is one op of kernels, called on blocks: no mask tensor is sent.  Documents (the attention mask) are gathered
once a layer, as integers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from colossal_lite.data.batch import Batch
from colossal_lite.distributed import autograd_collectives
from colossal_lite.distributed.communicator import Communicator
from colossal_lite.distributed.mesh import Mesh
from colossal_lite.kernels import Mask, Ops
from colossal_lite.layers import hugging_face
from colossal_lite.layers.ring_attention import Carrier, Documents, Gather, Ring, attend_blocks, full_ring
from colossal_lite.layers.tensor_modes import TensorStrategy
from colossal_lite.layers.token_parts import Sequences, show_whole_sequences
from colossal_lite.models import GPT
from colossal_lite.transforms.key_cache import is_key_cache_off

CARRIERS: dict[str, Callable[[Communicator], Carrier]] = {"ring": Ring, "usp": Ring, "allgather_kv": Gather}


@dataclass(frozen=True)
class Pieces:
    """Which pieces of a sequence each rank holds, in local order, of `total` equal ones."""

    by_rank: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, ring: int, heads: int, mode: str) -> Pieces:
        """Of `ring` groups of `heads` ranks, ranks of one group next to each other."""
        if mode not in CARRIERS:
            return cls(tuple((rank,) for rank in range(ring * heads)))
        early = [range(r * heads, (r + 1) * heads) for r in range(2 * ring)]
        groups = [(*early[r], *early[-1 - r]) for r in range(ring)]
        return cls(tuple(group[2 * i : 2 * i + 2] for group in groups for i in range(heads)))

    @property
    def total(self) -> int:
        return sum(map(len, self.by_rank))

    def order(self) -> list[int]:
        """Where each global piece stands in the concatenation of all ranks' pieces."""
        held = [piece for pieces in self.by_rank for piece in pieces]
        return [held.index(piece) for piece in range(self.total)]


@dataclass(frozen=True)
class SequenceParallel:
    """One rank's share of the sequence axis `comm`: keys travel on `ring`, tokens are changed for heads on `heads`."""

    mode: str
    comm: Communicator
    ring: Communicator
    heads: Communicator

    @classmethod
    def on(cls, mesh: Mesh, mode: str) -> SequenceParallel:
        whole, alone = mesh.axis("sequence"), mesh.axis()
        if mode == "usp":
            return cls(mode, whole, mesh.axis("sequence.ring"), mesh.axis("sequence.ulysses"))
        return cls(mode, whole, alone, whole) if mode == "ulysses" else cls(mode, whole, whole, alone)

    @property
    def pieces(self) -> Pieces:
        return Pieces.of(self.ring.size, self.heads.size, self.mode)

    def take(self, whole: Tensor, dim: int) -> Tensor:
        """This rank's tokens of a tensor that holds all. Raises ValueError if they do not divide."""
        total, n = self.pieces.total, whole.shape[dim]
        if n % total:
            near = f"{n // total * total} or {n + -n % total}" if n > total else f"{total}"
            raise ValueError(
                f"sequence: {n} tokens do not divide into {total} pieces (mode {self.mode!r} on {self.comm.size} "
                f"ranks); legal: a multiple of {total}, such as {near}: pad the inputs, with labels of -100"
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
        last = None if batch.tokens is None else batch.tokens - 1  # which padding repeats
        kwargs.setdefault("position_ids", positions if last is None else positions.clamp(max=last))
        labels = batch.labels if batch.labels.dim() == 1 else self.take(batch.labels, 1)
        args = tuple(self.take(t, 1) for t in batch.args)
        return replace(batch, args=args, kwargs=kwargs, labels=labels, positions=positions)

    def ops(self, ops: Ops) -> Ops:
        """The op table with attention over the whole sequence."""
        return replace(ops, attend=partial(self._attend, ops))

    def _attend(
        self,
        ops: Ops,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        mask: Mask,
        scale: float | None = None,
        **others: Any,
    ) -> Tensor:
        """out [B, T/N, H, K] of this rank's queries [B, T/N, H, K] over all keys; k and v [B, T/N, G, K].

        `others`: arguments of the op of one rank, which have no form across ranks yet: a ValueError names them."""
        if asked := sorted(name for name, value in others.items() if value is not None):
            raise ValueError(
                f"attend: {', '.join(asked)} across sequence ranks (mode {self.mode!r}) is not built; legal: mask and "
                f"scale, or sequence=1"
            )
        n = self.heads.size
        if k.shape[2] % n:  # checked against the model's facts: then n is a multiple of the key heads
            k, v = (x.repeat_interleave(n // x.shape[2], dim=2) for x in (k, v))
        q, k, v = autograd_collectives.tokens_to_heads((q, k, v), self.heads)
        return autograd_collectives.heads_to_tokens(
            self._attend_across(ops, q, k, v, mask, scale), self.heads
        )

    def _attend_across(
        self, ops: Ops, q: Tensor, k: Tensor, v: Tensor, mask: Mask, scale: float | None
    ) -> Tensor:
        documents = self._documents(mask)
        if self.ring.size == 1:
            pair = (documents.queries[0], documents.keys[0]) if documents else None
            whole: Tensor = ops.attend(q, k, v, mask=Mask(mask.causal, pair), scale=scale)
            return whole
        if self.mode == "ring_full":
            if mask.causal:
                raise ValueError("sequence: mode 'ring_full' is of full attention, and this one is causal")
            return full_ring(q, k, v, comm=self.ring, documents=documents, scale=scale)
        return attend_blocks(
            q, k, v, carrier=CARRIERS[self.mode](self.ring), ops=ops, causal=mask.causal, documents=documents,
            scale=scale,
        )  # fmt: skip

    def _documents(self, mask: Mask) -> Documents | None:
        """Document numbers of every ring rank's tokens, as they lie there between the two exchanges."""
        pair = mask.document_pair()
        if pair is None:
            return None
        every = self.comm.all_gather(torch.stack(pair).unsqueeze(0))  # [N, 2, B, T/N]
        groups = every.unflatten(0, (self.ring.size, self.heads.size)).permute(2, 0, 3, 1, 4)
        return Documents(*groups.flatten(3))


@dataclass(frozen=True)
class OnSequence:
    """A tensor strategy whose tokens are cut along the sequence axis as well."""

    inner: TensorStrategy
    sequence: SequenceParallel
    longest: int | None = None
    """Tokens of the model's longest sequence; each rank sees a part of it."""
    is_hugging_face: bool = False
    makes_positions: bool = False
    """Whether the model's own code makes positions, of whole sequences."""
    lost_cache: bool = False
    """Whether a cache of keys was switched off. Without one transformers reads documents from positions."""

    @property
    def owns_loss(self) -> bool:
        return self.inner.owns_loss

    @property
    def cut_behind(self) -> tuple[int, int] | None:
        return self.inner.cut_behind

    def local_part(self, batch: Batch) -> Batch:
        tokens = batch.inputs.shape[1] if batch.tokens is None else batch.tokens
        if self.longest is not None and tokens > self.longest:
            raise ValueError(f"sequence: {tokens} tokens; the model takes at most {self.longest}")
        if self.lost_cache and "position_ids" in batch.kwargs and "attention_mask" not in batch.kwargs:
            raise ValueError(
                "batch: position_ids alone under sequence > 1, where the model's cache is off. Transformers reads "
                "packed documents from them then, and with config.use_cache=True it does not. Legal: an attention_mask "
                "beside them, or none of the two"
            )
        if not self.is_hugging_face:
            part = self.sequence.local_part(self.inner.local_part(batch))
            if self.makes_positions and "position_ids" not in batch.kwargs:
                return replace(part, kwargs={n: x for n, x in part.kwargs.items() if n != "position_ids"})
            return part
        if "position_ids" in batch.kwargs:
            raise ValueError(
                "batch: position_ids of a Hugging Face model under sequence > 1, where packed documents are not read "
                "from them; legal: input_ids, attention_mask, labels"
            )
        return hugging_face.local_arguments(self.sequence.local_part(self.inner.local_part(batch)))

    def cross_entropy(self, ops: Ops, logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        return self.inner.cross_entropy(ops, logits, labels)

    def whole_vocabulary(self, logits: Tensor) -> Tensor:
        return self.inner.whole_vocabulary(logits)

    def whole_batch(self, logits: Tensor) -> Tensor:
        tokens = self.sequence.in_order(autograd_collectives.join(logits, self.sequence.comm, 1), 1)
        return self.inner.whole_batch(tokens)


def across_sequence(
    module: nn.Module, mesh: Mesh, mode: str, strategy: TensorStrategy, ops: Ops, longest: int | None = None
) -> tuple[OnSequence, Ops]:
    """The strategy and the ops with which `module` sees this rank's tokens; attention of Hugging Face becomes ours, and
    code of a model of one's own sees whole sequences."""
    sequence, makes_positions = SequenceParallel.on(mesh, mode), sees_whole_sequences(module)
    across, theirs = sequence.ops(ops), hugging_face.is_bound(module)
    if makes_positions:
        own = sequence.pieces.by_rank[sequence.comm.coord]
        tokens = Sequences(sequence.comm, across.attend, sequence.in_order)
        show_whole_sequences(module, tokens, own, sequence.pieces.total)
    elif theirs:
        hugging_face.bind(module)
    lost_cache = makes_positions and is_key_cache_off(module)
    return OnSequence(strategy, sequence, longest, theirs, makes_positions, lost_cache), across


def sees_whole_sequences(module: nn.Module) -> bool:
    """Whether a model's code is shown whole sequences: any but ours, and those whose attention becomes ours."""
    return not isinstance(module, GPT) and not hugging_face.is_bound(module)


def give_ops(module: nn.Module, ops: Ops) -> None:
    """Have every module that computes by a table of ops use this one."""
    for owner in module.modules():
        if hasattr(owner, "ops"):
            setattr(owner, "ops", ops)  # noqa: B010  (nn.Module types its attributes as tensors and modules)
