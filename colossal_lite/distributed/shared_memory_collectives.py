"""Runs the collectives of a group whose ranks share a host, over distributed/shared_memory.py.

Note: who copies and who adds.
An operation posts tensors for other ranks, and lists the messages that it expects.  It copies or adds when these have
arrived.  A posted piece with one reader is summed in place, so sums need no scratch.  Sums of more than two terms of
16 bits need some. They are added in float32, tile by tile, and rounded once.  A large sum of more than two ranks has
two stages, in which each rank adds one piece.
Bytes that a rank of n writes and reads, for a tensor of B bytes:
    all-reduce                     B and B for n = 2, else (1 + 1/n) B and 2 (n - 1)/n B
    all-gather                     its shard, and the others' shards
    reduce-scatter, all-to-all     (n - 1)/n B each
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from colossal_lite.distributed.shared_memory import (
    Arrival,
    Exchange,
    Finish,
    Lost,
    MessageChannel,
    Operation,
    Stage,
    nothing,
)

ReduceOp = Literal["sum", "max"]
Started = tuple[Sequence[Any], Callable[[], Any]]
"""Operations to wait for, and the function to call then."""
WIDE_NUMEL = 1 << 18
"""Elements of 16 bits that are summed in float32 at once, few enough for the caches."""
WHOLE_BYTES = 1 << 16
"""Above this size a sum of more than two ranks has two stages. Each rank adds one piece and posts it."""


class SharedMemoryTransport:
    """Runs the collectives of one group whose ranks share a host. It has the interface of TorchTransport.

    Autograd sees no write, as with torch's groups. Tensors are written through `data`: this does not raise the version
    that views of one buffer share. `ordered` and `scratch` have no effect here.
    """

    def __init__(self, exchange: Exchange, number: int, ranks: Sequence[int], coord: int, timeout_s: float):
        self._exchange = exchange
        self._together = MessageChannel(exchange, 2 * number, tuple(ranks), timeout_s)
        self._pairs = MessageChannel(exchange, 2 * number + 1, tuple(ranks), timeout_s)
        """Messages of two ranks have a sequence of their own: they may be posted and expected ahead of collectives."""
        self._size, self._coord = len(ranks), coord
        self._others = [coord for coord in range(self._size) if coord != self._coord]

    def all_reduce(self, tensor: Tensor, op: ReduceOp, tag: str) -> Started:
        tensor, combine = tensor.data, _COMBINE[op]
        self._post(self._together, tensor, self._others, tag)
        came = {j: self._together.expect(tensor, j, tag) for j in self._others}
        is_large = tensor.numel() * tensor.element_size() > WHOLE_BYTES
        if self._size > 2 and is_large and tensor.is_contiguous():
            return self._started(
                list(came.values()), self._by_pieces(tensor, came, combine, f"{tag}, a piece")
            )

        def add_all() -> None:
            views = {j: each.view() for j, each in came.items()}
            if self._size == 2:
                combine(tensor, views[1 - self._coord], out=tensor)
            else:
                tensor.copy_(self._combined(tensor, views, combine))

        return self._started(list(came.values()), add_all)

    def _by_pieces(
        self, tensor: Tensor, came: Mapping[int, Arrival], combine: Combine, tag: str
    ) -> Callable[[], Stage]:
        """Combine this rank's piece, send it to the others, and receive theirs.

        The numbers of these messages are reserved now. Ranks reach this stage at different times, beside other
        operations.
        """
        pieces = tensor.view(-1).tensor_split(self._size)
        place = self._together.reserve(self._others)
        copy_theirs = self._copy_stage({j: pieces[j] for j in self._others}, tag)

        def add_own_piece() -> Stage:
            own = pieces[self._coord]
            parts = {j: each.view().view(-1).tensor_split(self._size) for j, each in came.items()}
            own.copy_(self._combined(own, {j: part[self._coord] for j, part in parts.items()}, combine))
            self._together.post(own, place, tag)
            return copy_theirs

        return add_own_piece

    def all_gather(self, shard: Tensor, whole: Tensor, dim: int, tag: str) -> Started:
        shard, whole = shard.data, whole.data
        self._post(self._together, shard, self._others, tag)
        places = cut(whole, self._size, dim, shard.shape)
        if places[self._coord].data_ptr() != shard.data_ptr():
            places[self._coord].copy_(shard)
        return self._started(*self._copy_stage({j: places[j] for j in self._others}, tag))

    def reduce_scatter(
        self, full: Tensor, target: Tensor, dim: int, tag: str, ordered: bool, scratch: Tensor | None
    ) -> Started:
        """Sum in rank order. `target` may be this rank's own part."""
        full, target = full.data, target.data
        parts = cut(full, self._size, dim, target.shape)
        own = parts[self._coord]
        for j in self._others:
            self._post(self._together, parts[j], [j], tag)
        came = {j: self._together.expect(own, j, tag) for j in self._others}

        def add_in_rank_order() -> None:
            self._add_up(own, {j: each.view() for j, each in came.items()}, target)

        return self._started(list(came.values()), add_in_rank_order)

    def broadcast(self, tensor: Tensor, source: int, tag: str) -> Started:
        tensor = tensor.data
        if self._coord == source:
            return self._post(self._together, tensor, self._others, tag), nothing
        return self._started(*self._copy_stage({source: tensor}, tag))

    def reduce(self, tensor: Tensor, target: int, tag: str) -> Started:
        tensor = tensor.data
        if self._coord != target:
            return self._post(self._together, tensor, [target], tag), nothing
        came = {j: self._together.expect(tensor, j, tag) for j in self._others}

        def add_in_rank_order() -> None:
            self._add_up(tensor, {j: each.view() for j, each in came.items()}, tensor)

        return self._started(list(came.values()), add_in_rank_order)

    def all_to_all(self, tensor: Tensor, out: Tensor, tag: str) -> Started:
        parts, places = tensor.data.chunk(self._size), out.data.chunk(self._size)
        for j in self._others:
            self._post(self._together, parts[j], [j], tag)
        places[self._coord].copy_(parts[self._coord])
        return self._started(*self._copy_stage({j: places[j] for j in self._others}, tag))

    def exchange(
        self,
        outgoing: Mapping[int, Tensor],
        incoming: Mapping[int, Tensor],
        tag: str,
        *,
        of_all: bool = False,
    ) -> Started:
        """Send to and receive from several coordinates; `of_all`: every rank of the group does."""
        channel = self._together if of_all else self._pairs
        for to, tensor in outgoing.items():
            self._post(channel, tensor.data, [to], tag)
        places = {source: tensor.data for source, tensor in incoming.items()}
        return self._started(*self._copy_stage(places, tag, channel))

    def send(self, tensor: Tensor, to: int, tag: str) -> Started:
        return self._post(self._pairs, tensor.data, [to], tag), nothing

    def receive(self, into: Tensor, source: int, tag: str) -> Started:
        return self._started(*self._copy_stage({source: into.data}, tag, self._pairs))

    def _post(
        self, channel: MessageChannel, tensor: Tensor, readers: Sequence[int], tag: str
    ) -> Sequence[Lost]:
        self._exchange.advance()
        return channel.post(tensor, channel.reserve(readers), tag)

    def _started(self, arrivals: list[Arrival], finish: Finish) -> Started:
        return [Operation(self._exchange, arrivals, finish)], nothing

    def _copy_stage(
        self, places: Mapping[int, Tensor], tag: str, channel: MessageChannel | None = None
    ) -> Stage:
        """A stage that copies the next message of each of these coordinates into its tensor."""
        came = [((channel or self._together).expect(place, j, tag), place) for j, place in places.items()]

        def copy() -> None:
            for message, place in came:
                place.copy_(message.view())

        return [message for message, _ in came], copy

    def _add_up(self, own: Tensor, theirs: Mapping[int, Tensor], target: Tensor) -> None:
        """Sum all terms in rank order, without scratch: `theirs` were posted for this rank alone."""
        before = [theirs[j] for j in range(self._coord)]
        after = [theirs[j] for j in range(self._coord + 1, self._size)]
        if is_rounded(own, self._size):
            return add_wide([*before, own, *after], target)
        # The own term may be in `target`: the terms before it are summed where they were posted.
        for term in before[1:]:
            before[0].add_(term)
        torch.add(own, before[0] if before else after.pop(0), out=target)
        for term in after:
            target.add_(term)

    def _combined(self, own: Tensor, theirs: Mapping[int, Tensor], combine: Combine) -> Tensor:
        """Sum all terms in rank order, in new memory."""
        terms = [theirs.get(j, own) for j in range(self._size)]
        if combine is torch.add and is_rounded(own, self._size):
            total = torch.empty_like(own)
            add_wide(terms, total)
            return total
        first, second, *rest = terms
        total = combine(first, second)
        for term in rest:
            combine(total, term, out=total)
        return total


def is_rounded(term: Tensor, count: int) -> bool:
    """Whether a sum of so many terms would be rounded more than once in their dtype."""
    return count > 2 and term.is_floating_point() and term.element_size() == 2


def add_wide(terms: Sequence[Tensor], target: Tensor) -> None:
    """Sum terms of 16 bits in float32, in their order, rounded once, into `target`, which may be one of them."""
    flat, out = [term.reshape(-1) for term in terms], target.reshape(-1)
    wide = torch.empty(min(WIDE_NUMEL, out.numel()), dtype=torch.float32, device=target.device)
    scratch = torch.empty_like(wide)
    for start in range(0, out.numel(), WIDE_NUMEL):
        first, *rest = (each[start : start + WIDE_NUMEL] for each in flat)
        total = wide[: first.numel()].copy_(first)
        for term in rest:  # widened first: torch adds other dtypes one by one
            total.add_(scratch[: total.numel()].copy_(term))
        out[start : start + WIDE_NUMEL].copy_(total)
    if not target.is_contiguous():  # then `out` is a copy
        target.copy_(out.view(target.shape))


def cut(whole: Tensor, size: int, dim: int, piece: Sequence[int]) -> Sequence[Tensor]:
    """Cut `whole` into one piece a rank, of the shape `piece`: along `dim`, or one after the other if that is 0."""
    return whole.chunk(size, dim) if dim else whole.view(size, *piece).unbind()


Combine = Callable[..., Tensor]
_COMBINE: Mapping[ReduceOp, Combine] = {"sum": torch.add, "max": torch.maximum}
