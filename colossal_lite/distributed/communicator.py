"""Moves tensors between ranks, the only file that does: collectives on one axis, counted.

Note: the communicator.
A `Communicator` is one rank's end of one group of the mesh.  Every collective of the project is a method of it, so
- the **ledger** counts all calls and *logical payload* bytes per (operation, axis), as a paper would.  Payload is the
  full tensor of the operation, whatever the backend sends.  For all-gather it is the gathered output, for
  reduce-scatter the unreduced input, for all-to-all the local buffer, for every other operation the buffer.  A group
  of one rank makes no call and counts nothing;
- a **recording** communicator has the same methods and no peers.  It counts and returns at once, so a rank of any world
  runs on meta tensors in one process.  Its `PendingCollective` holds the tensors of a real exchange, also those that
  receive.  So a meter sees a real step's bytes;
- every wait has the group's timeout, and its error names axis, ranks, operation and shape.  A watchdog may end it
  earlier.  After such an error messages may be under way, so no collective begins any more on that rank's mesh.

Asynchronous methods return a `PendingCollective`.  Its `wait()` must be called, on every rank in the same order.  Sums
are plain sums: no averaging collective exists.  On gloo, reduce-scatter and all-gather are made of direct exchanges.
For 64 MB and two ranks these take half the bytes and a third of the time of gloo's own.  Such a reduce-scatter adds in
rank order, so its bits do not depend on timing.  torch renamed collectives between 2.11 and 2.13.  That is hidden here.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from colossal_lite.distributed.emulated_ranks import ThreadTransport
from colossal_lite.distributed.key_value_store import NoAnswerError, answered
from colossal_lite.distributed.ledger import Ledger
from colossal_lite.distributed.progress import Progress
from colossal_lite.distributed.shared_memory import nothing
from colossal_lite.distributed.shared_memory_collectives import (
    ReduceOp,
    SharedMemoryTransport,
    Started,
    add_wide,
    cut,
    is_rounded,
)
from colossal_lite.distributed.watchdog import END_S, GRACE_S, CollectiveFingerprint, Watchdog, say
from colossal_lite.observe.clock import mark

NEVER_SENT = 2**31 - 1
"""The tag of a message that is never sent."""
_OPS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX}
# torch 2.13 deprecates the *_tensor names that are the only ones in 2.11.
_native_all_gather: Callable[..., Any] = (
    getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
)
_native_reduce_scatter: Callable[..., Any] = (
    getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
)


class CommError(RuntimeError):
    """A collective failed or timed out: names the rank, the operation, the axis and the ranks waited for."""


class PendingCollective:
    """Operations in flight on one tensor. `wait()` returns the finished tensor; a second call returns it again."""

    def __init__(
        self,
        comm: Communicator,
        what: str,
        result: Tensor,
        works: Sequence[Any] = (),
        finish: Callable[[], None] = nothing,
        call: int = 0,
        peers: Sequence[int] = (),
        holds: Sequence[Tensor] = (),
    ):
        self._comm, self._what, self._result, self._call = comm, what, result, call
        self._peers = tuple(peers)
        self._works, self._finish, self._holds = tuple(works), finish, tuple(holds)
        self._done = False

    def wait(self) -> Tensor:
        if not self._done:
            if self._works or self._finish is not nothing:  # else it is of one rank, or only counted
                self._end()
            self._works, self._finish, self._holds = (), nothing, ()  # free what they hold
            self._done = True
        return self._result

    def _end(self) -> None:
        start = mark(self._result.device)
        try:
            with self._comm.waiting():
                for work in self._works:
                    work.wait()
        except RuntimeError as error:
            raise self._comm.failure(self._what, error, self._call, self._peers) from error
        self._finish()
        self._comm.ledger.waits.add(start, mark(self._result.device))


class Communicator:
    """This rank's end of the group along one axis (or a product of axes).

    `host` sends tensors of the CPU between ranks of one host, `group` all others. Without both no peers are reached.
    Then the group has one rank, or `recording` is set and the collectives of a larger group are only counted
    (`shares_memory`: as between ranks of one host). `explain` is called when a collective fails, and says who stopped
    and why. `made`: the fingerprint of the group, which other axes with the same ranks may share.
    """

    def __init__(
        self,
        axis: str,
        ranks: Sequence[int],
        rank: int,
        ledger: Ledger,
        *,
        group: dist.ProcessGroup | None = None,
        recording: bool = False,
        timeout_s: float = 0.0,
        explain: Callable[[], str] | None = None,
        watch: Watchdog | None = None,
        made: CollectiveFingerprint | None = None,
        host: SharedMemoryTransport | ThreadTransport | None = None,
        shares_memory: bool = False,
    ) -> None:
        self.axis, self.ranks, self.rank, self.ledger = axis, tuple(ranks), rank, ledger
        self.size, self.coord = len(self.ranks), self.ranks.index(rank)
        self.timeout_s = timeout_s
        self._recording, self._explain, self._watch = recording, explain, watch
        self._made = made or CollectiveFingerprint()
        self._host, self._shares_memory = host, shares_memory or host is not None
        self._torch = TorchTransport(group, self.ranks, self.coord) if group is not None else None
        assert self.size == 1 or recording or self._host or self._torch, (
            f"axis {axis} has {self.size} ranks but no way to reach them"
        )
        self._calls = 0

    def __repr__(self) -> str:
        kind = ", recording" if self._recording else ""
        return f"Communicator({self.axis}, ranks {list(self.ranks)}, coord {self.coord}{kind})"

    # ---- collectives; each returns its result tensor, or a PendingCollective when asynchronous ----

    def all_reduce_async(self, tensor: Tensor, op: ReduceOp = "sum") -> PendingCollective:
        """Sum `tensor` over the axis, in place. Payload: the buffer."""
        return self._run(
            "all_reduce", tensor, tensor, lambda tag: self._wire(tensor).all_reduce(tensor, op, tag),
            posted=(tensor,), about="" if op == "sum" else op,
        )  # fmt: skip

    def all_reduce(self, tensor: Tensor, op: ReduceOp = "sum") -> Tensor:
        return self.all_reduce_async(tensor, op).wait()

    def all_gather_async(
        self, shard: Tensor, out: Tensor | None = None, *, dim: int = 0
    ) -> PendingCollective:
        """Concatenate equal shards along `dim` in coordinate order. Payload: the gathered output.

        `shard` is [n, ...], the result [size * n, ...]. `out`, of dim 0 only, may contain `shard` at its own
        position.
        """
        dim %= shard.dim()
        if out is None:
            shape = list(shard.shape)
            shape[dim] *= self.size
            out = shard.new_empty(shape)
        assert out.numel() == self.size * shard.numel() and out.is_contiguous()
        whole = out
        if self.size == 1 and whole.data_ptr() != shard.data_ptr():
            whole.copy_(shard)
        return self._run(
            "all_gather", whole, whole, lambda tag: self._wire(shard).all_gather(shard, whole, dim, tag),
            posted=(shard,),
            landed=lambda: (shard, shard.new_empty((self.size - 1 if dim else 0, *shard.shape))),
        )  # fmt: skip

    def all_gather(self, shard: Tensor, out: Tensor | None = None, *, dim: int = 0) -> Tensor:
        return self.all_gather_async(shard, out, dim=dim).wait()

    def reduce_scatter_async(
        self, full: Tensor, out: Tensor | None = None, *, dim: int = 0, ordered: bool = False,
        scratch: Tensor | None = None,
    ) -> PendingCollective:  # fmt: skip
        """Sum over the axis; this rank gets its 1/size of `dim`. Payload: the unreduced input.

        `full` is [size * n, ...] and is not changed unless `out` is this rank's own part of it. The result is [n,
        ...]. `ordered` adds in rank order on every backend; `scratch`: `scratch_numel` elements that may be
        overwritten. `out`, `ordered` and `scratch` are for dim 0.
        """
        dim %= full.dim()
        assert full.shape[dim] % self.size == 0 and (dim or full.is_contiguous())
        shape = list(full.shape)
        shape[dim] //= self.size
        target = full.new_empty(shape) if out is None else out
        parts = cut(full, self.size, dim, target.shape)
        own = parts[self.coord]
        if self.size == 1 and target.data_ptr() != full.data_ptr():
            target.copy_(own)

        def landed() -> Sequence[Tensor]:
            if scratch is not None:
                return (full, scratch)
            copies = 1 if own.is_contiguous() else 2  # of received pieces, and of sent ones
            return (full, full.new_empty((copies * (self.size - 1), *own.shape)))

        return self._run(
            "reduce_scatter", full, target,
            lambda tag: self._wire(full).reduce_scatter(full, target, dim, tag, ordered, scratch),
            posted=parts[1:], kept=(full,), landed=landed,
        )  # fmt: skip

    def scratch_numel(self, numel: int, *, ordered: bool, native: bool) -> int:
        """Elements that a reduce-scatter of `numel` needs beside its input: the parts of the others."""
        if self.size == 1 or (native and not ordered) or (self._shares_memory and not native):
            return 0
        return numel if native else numel - numel // self.size

    def reduce_scatter(self, full: Tensor, out: Tensor | None = None, *, dim: int = 0) -> Tensor:
        return self.reduce_scatter_async(full, out, dim=dim).wait()

    def broadcast(self, tensor: Tensor, source: int) -> Tensor:
        """Copy `tensor` of coordinate `source` to all, in place. Payload: the buffer."""
        return self._run(
            "broadcast", tensor, tensor, lambda tag: self._wire(tensor).broadcast(tensor, source, tag),
            posted=(tensor,) if self.coord == source else (),
        ).wait()  # fmt: skip

    def reduce(self, tensor: Tensor, target: int) -> Tensor:
        """Sum into coordinate `target`, in place; elsewhere the buffer is undefined. Payload: the buffer."""
        return self._run(
            "reduce", tensor, tensor, lambda tag: self._wire(tensor).reduce(tensor, target, tag),
            posted=(tensor,) if self.coord != target else (),
        ).wait()  # fmt: skip

    def all_to_all(self, tensor: Tensor) -> Tensor:
        """Piece j of dim 0 goes to coordinate j; the result holds one piece of each. Payload: the local buffer."""
        assert tensor.shape[0] % self.size == 0 and tensor.is_contiguous()
        out = tensor.clone() if self.size == 1 else torch.empty_like(tensor)
        parts = tensor.chunk(self.size)
        return self._run(
            "all_to_all", tensor, out, lambda tag: self._wire(tensor).all_to_all(tensor, out, tag),
            posted=parts[1:],
        ).wait()  # fmt: skip

    def send_async(self, tensor: Tensor, to: int, about: str = "") -> PendingCollective:
        """Send to coordinate `to`. Payload: the buffer, counted by the sender only. `about`: shown if it fails."""
        assert to != self.coord and tensor.is_contiguous()
        return self._run(
            "send", tensor, tensor, lambda _: self._wire(tensor).send(tensor, to, _message(tensor)),
            peers=(to,), about=about, posted=(tensor,),
        )  # fmt: skip

    def receive_async(self, into: Tensor, source: int, about: str = "") -> PendingCollective:
        """Receive from coordinate `source` into a contiguous tensor of the sender's shape and dtype."""
        assert source != self.coord and into.is_contiguous()
        return self._run(
            None, into, into, lambda _: self._wire(into).receive(into, source, _message(into)),
            what="receive", peers=(source,), about=about,
        )  # fmt: skip

    def exchange_sum(self, tensor: Tensor, coords: Sequence[int], about: str = "") -> Tensor:
        """Sum the tensors of some coordinates, this one among them, in place and in their order: the same bits on
        each. Payload: the buffer, once for each of the others."""
        assert self.coord in coords and tensor.is_contiguous()
        others = [coord for coord in coords if coord != self.coord]
        came = {coord: torch.empty_like(tensor) for coord in others}
        self._run(
            "send", tensor, tensor,
            lambda _: self._wire(tensor).exchange(dict.fromkeys(others, tensor), came, _message(tensor)),
            what="exchange", peers=others, about=about, posted=(tensor,) * len(others),
        ).wait()  # fmt: skip
        first, *rest = [came.get(coord, tensor) for coord in sorted(coords)]
        total = first.clone()
        for term in rest:
            total.add_(term)
        return tensor.copy_(total)

    def shift_async(self, tensor: Tensor, distance: int = 1) -> PendingCollective:
        """Send `tensor` to the coordinate `distance` further on the ring; the result is from as far behind."""
        assert tensor.is_contiguous()
        to, source = (self.coord + distance) % self.size, (self.coord - distance) % self.size
        if to == self.coord:
            return self._run("send", tensor, tensor.clone(), lambda _: ((), nothing))
        out = torch.empty_like(tensor)
        return self._run(
            "send", tensor, out,
            lambda tag: self._wire(tensor).exchange({to: tensor}, {source: out}, tag, of_all=True),
            posted=(tensor,),
        )  # fmt: skip

    def shift(self, tensor: Tensor, distance: int = 1) -> Tensor:
        return self.shift_async(tensor, distance).wait()

    def barrier(self) -> None:
        """Wait until every rank of the axis calls it. Not counted: it has no payload."""
        if self.size > 1 and not self._recording:
            token = torch.zeros(1)
            self._run(
                None, token, token, lambda tag: self._wire(token).all_reduce(token, "sum", tag),
                what="barrier",
            ).wait()  # fmt: skip

    def gather_json(self, value: Any) -> list[Any]:
        """Each rank's plain value, in coordinate order. JSON on the wire: reading a peer must never run its code."""
        if self.size == 1 or self._recording:
            return [json.loads(json.dumps(value))] * self.size
        data = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
        lengths = self.all_gather(torch.tensor([data.numel()]))
        padded = torch.zeros(int(lengths.max()), dtype=torch.uint8)
        padded[: data.numel()] = data
        rows = self.all_gather(padded).view(self.size, -1)
        return [json.loads(bytes(row[:n].tolist())) for row, n in zip(rows, lengths.tolist(), strict=True)]

    def numbers(self, tensor: Tensor) -> list[Any]:
        """The numbers of a tensor, on the host. On CUDA this waits for the device, as the collectives do not. If one
        has no end within `timeout_s`, the watch ends it. Raises CommError."""
        progress = self._watch.progress if self._watch else Progress()
        try:
            with progress.waiting(self.timeout_s):
                found: list[Any] = tensor.tolist()
        except RuntimeError as error:
            if not progress.broken:
                raise
            raise CommError(progress.broken) from error
        if progress.broken:  # an aborted collective leaves no numbers
            raise CommError(progress.broken)
        return found

    # ---- transport ----

    def failure(self, what: str, error: BaseException, call: int = 0, peers: Sequence[int] = ()) -> CommError:
        """The error of a collective that did not end, naming who waited for whom (`peers`: for some alone)."""
        waited = (self.rank, *(self.ranks[peer] for peer in peers)) if peers else self.ranks
        others = ", ".join(str(r) for r in waited if r != self.rank)
        text = (
            f"rank {self.rank}: {what} on axis {self.axis!r} failed (call {call or self._calls} there), waiting for "
            f"ranks {others}; timeout {self.timeout_s:g} s. {str(error).splitlines()[0] if str(error) else error!r}"
        )
        if not self._watch:
            reason = self._explain() if self._explain else ""
            return CommError(f"{reason}\n{text}" if reason else text)
        progress = self._watch.progress
        say(f"{text}\n{progress.broken}".rstrip())  # before anybody is asked: answers may not come
        if reason := progress.broken or (self._explain() if self._explain else ""):
            progress.breaks(reason)
            return CommError(f"{reason}\n{text}")
        progress.breaks(text)
        blame = self._watch.blame(self.axis, waited, what, call)
        say(f"rank {self.rank}: {blame}")
        return CommError(f"{text}\n{blame}")

    def waiting(self) -> AbstractContextManager[None]:
        """Around a wait of the main thread, which the watch may end."""
        return self._watch.progress.waiting() if self._watch else nullcontext()

    def _run(
        self,
        counted: str | None,
        payload: Tensor,
        result: Tensor,
        start: Callable[[str], Started],
        *,
        posted: Sequence[Tensor] = (),
        kept: Sequence[Tensor] = (),
        landed: Callable[[], Sequence[Tensor]] = tuple,
        what: str | None = None,
        peers: Sequence[int] = (),
        about: str = "",
    ) -> PendingCollective:
        """Count and start. `peers`: the coordinates that it reaches, if not all; each is counted.

        On a recording communicator that shares memory, `posted` is in shared memory and `kept` is held to the end.
        Elsewhere `landed` are the parts of others, and all is held to the end.
        """
        if self.size == 1:
            return PendingCollective(self, what or counted or "", result)
        tag = f"{what or counted} of {_kind(payload)}"
        description = tag + (f" ({about})" if about else "")
        if self._watch and (reason := self._watch.progress.broken):
            raise CommError(f"rank {self.rank}: {description} on axis {self.axis!r}: {refusal(reason)}")
        for _ in range(max(1, len(peers)) if counted else 0):
            self.ledger.add(counted or "", self.axis, _bytes(payload))
        self._calls += 1
        if self._recording:
            if self._shares_memory:
                self.ledger.share(sum(map(_bytes, posted)))
            return PendingCollective(
                self, description, result, holds=kept if self._shares_memory else landed()
            )
        if not peers:
            self._made.add(f"{description} on axis {self.axis!r}")
        if self._watch:
            self._watch.progress.called(self.axis, self.ranks, description)
        try:
            works, finish = start(tag)
        except RuntimeError as error:
            raise self.failure(description, error, self._calls, peers) from error
        return PendingCollective(self, description, result, works, finish, self._calls, peers)

    def _wire(self, tensor: Tensor) -> SharedMemoryTransport | ThreadTransport | TorchTransport:
        """The transport of this tensor."""
        if self._host is not None and (self._torch is None or tensor.device.type == "cpu"):
            return self._host
        assert self._torch is not None
        return self._torch


def group_timeout(timeout_s: float, backend: str | None) -> timedelta:
    """The time limit of torch's own groups: NCCL's watchdog ends the process, so it comes after ours."""
    return timedelta(seconds=timeout_s + (GRACE_S if backend and "nccl" in backend else 0.0))


def leave_group(group: dist.ProcessGroup, *, aborts: bool) -> None:
    """Destroy a group of torch's. `aborts`: its collectives may have no end, for which NCCL would wait here; they are
    aborted. One that is not within `END_S` is left to the end of the process."""
    try:
        if aborts:
            answered(group.abort, END_S)
    except NoAnswerError:
        say(f"ranks {dist.get_process_group_ranks(group)}: their group has not been aborted in {END_S:g} s")
    else:
        dist.destroy_process_group(group)


def refusal(reason: str) -> str:
    """Why nothing can follow what has failed for this reason, and what to do."""
    return (
        f"these ranks have stopped half-way, so messages may be under way and nothing can follow. The cause: {reason}; "
        f"legal: leave the context on every rank, launch again, and resume from a checkpoint"
    )


def everyones(words: bytes, world_size: int) -> list[bytes]:
    """Gather equally long bytes of each rank of torch's default group, before there is a mesh. Collective, not
    counted."""
    own = torch.frombuffer(bytearray(words), dtype=torch.uint8)
    rows = [torch.empty_like(own) for _ in range(world_size)]
    dist.all_gather(rows, own)
    return [bytes(row.tolist()) for row in rows]


class TorchTransport:
    """The collectives of one of torch's groups: NCCL's own for CUDA, on gloo direct exchanges where faster."""

    def __init__(self, group: dist.ProcessGroup, ranks: Sequence[int], coord: int) -> None:
        self._group, self._ranks, self._coord, self._size = group, tuple(ranks), coord, len(ranks)

    def all_reduce(self, tensor: Tensor, op: ReduceOp, tag: str) -> Started:
        return [dist.all_reduce(tensor, op=_OPS[op], group=self._group, async_op=True)], nothing

    def all_gather(self, shard: Tensor, whole: Tensor, dim: int, tag: str) -> Started:
        """Along `dim` > 0, pieces are received one after the other and copied to their positions: the own one
        meanwhile."""
        places = cut(whole, self._size, dim, shard.shape)
        shard, own = shard.contiguous(), places[self._coord]
        if shard.is_cuda:
            flat = shard.new_empty((self._size, *shard.shape)) if dim else whole
            landed = list(flat) if dim else []
            works = [_native_all_gather(flat, shard, group=self._group, async_op=True)]
        else:
            if own.data_ptr() != shard.data_ptr():
                own.copy_(shard)
            landed = [
                shard if j == self._coord else torch.empty_like(shard) for j in range(self._size) if dim
            ]
            works = self._exchange([shard] * self._size, landed or places)

        def put_in_place() -> None:
            for j, piece in enumerate(landed):
                if piece is not shard:
                    places[j].copy_(piece)

        return works, put_in_place

    def reduce_scatter(
        self, full: Tensor, target: Tensor, dim: int, tag: str, ordered: bool, scratch: Tensor | None
    ) -> Started:
        """On gloo always in rank order. Only pieces to send are copied, if they are not contiguous."""
        parts = cut(full, self._size, dim, target.shape)
        own, native = parts[self._coord], full.is_cuda
        if native and not ordered:
            stacked = torch.stack(tuple(parts)) if dim else full
            works = [_native_reduce_scatter(target, stacked, group=self._group, async_op=True)]
            return works, _keep(stacked)
        numel = full.numel() if native else full.numel() - own.numel()
        flat = full.new_empty(numel) if scratch is None else scratch[:numel]
        pieces = list(flat.view(self._size - (not native), *target.shape))
        outgoing = [own if j == self._coord else part.contiguous() for j, part in enumerate(parts)]
        if native:
            del pieces[self._coord]
            works = [dist.all_to_all_single(flat, full.view(-1), group=self._group, async_op=True)]
        else:
            works = self._exchange(outgoing, [*pieces[: self._coord], own, *pieces[self._coord :]])

        def add_in_rank_order() -> None:
            before, after = pieces[: self._coord], pieces[self._coord :]
            if is_rounded(own, self._size):
                add_wide([*before, own, *after], target)
                outgoing.clear()
                return
            for piece in before[1:]:
                before[0].add_(piece)
            torch.add(own, before[0] if before else after.pop(0), out=target)
            for piece in after:
                target.add_(piece)
            outgoing.clear()

        return works, add_in_rank_order

    def broadcast(self, tensor: Tensor, source: int, tag: str) -> Started:
        work = dist.broadcast(tensor, src=self._ranks[source], group=self._group, async_op=True)
        return [work], nothing

    def reduce(self, tensor: Tensor, target: int, tag: str) -> Started:
        return [dist.reduce(tensor, dst=self._ranks[target], group=self._group, async_op=True)], nothing

    def all_to_all(self, tensor: Tensor, out: Tensor, tag: str) -> Started:
        return [dist.all_to_all_single(out, tensor, group=self._group, async_op=True)], nothing

    def send(self, tensor: Tensor, to: int, tag: str) -> Started:
        return [dist.isend(tensor, dst=self._ranks[to], group=self._group)], nothing

    def receive(self, into: Tensor, source: int, tag: str) -> Started:
        return [dist.irecv(into, src=self._ranks[source], group=self._group)], nothing

    def exchange(
        self,
        outgoing: Mapping[int, Tensor],
        incoming: Mapping[int, Tensor],
        tag: str,
        *,
        of_all: bool = False,
    ) -> Started:
        """Send to and receive from several coordinates, as one batch.

        NCCL runs unbatched messages in one queue for each group. So a send before a receive on every rank of a ring
        would wait for ever.
        """
        ranks, group = self._ranks, self._group
        sends = [dist.P2POp(dist.isend, tensor, ranks[to], group) for to, tensor in outgoing.items()]
        receives = [
            dist.P2POp(dist.irecv, tensor, ranks[source], group) for source, tensor in incoming.items()
        ]
        return dist.batch_isend_irecv([*sends, *receives]), nothing

    def interrupt(self) -> None:
        """End all waits for this group, from another thread; the group cannot be used again. Gloo has no call for it: a
        receive that times out closes the group's connections, here and at the peers."""
        self._group.abort()
        if "gloo" in dist.get_backend(self._group):
            other = self._ranks[(self._coord + 1) % self._size]
            with suppress(RuntimeError):
                never = dist.irecv(torch.empty(1), src=other, group=self._group, tag=NEVER_SENT)
                if never is not None:
                    never.wait(timedelta(milliseconds=1))

    def _exchange(self, outgoing: Sequence[Tensor], incoming: Sequence[Tensor]) -> list[Any]:
        """Send piece j to coordinate j and receive one from each; the own piece is not moved."""
        others = [(self._coord + step) % self._size for step in range(1, self._size)]
        receives = [dist.irecv(incoming[j], src=self._ranks[j], group=self._group) for j in reversed(others)]
        sends = [dist.isend(outgoing[j], dst=self._ranks[j], group=self._group) for j in others]
        return [*receives, *sends]


def _keep(*tensors: Tensor) -> Callable[[], None]:
    """Do nothing at the end: these tensors must live until then."""
    held = list(tensors)
    return held.clear


def _kind(tensor: Tensor) -> str:
    return f"{list(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"


def _message(tensor: Tensor) -> str:
    """The name of a message at its two ends."""
    return f"a message of {_kind(tensor)}"


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
