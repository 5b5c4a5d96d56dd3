"""The only file that moves tensors between ranks: collectives on one axis, counted.

Note: the communicator.
An `AxisComm` is one rank's end of one group of the mesh.  Every collective of the project is a method of it, so that
- the **ledger** sees all: it counts calls and *logical payload* bytes per (operation, axis), as a paper would: the
  full tensor handed to the operation (all-reduce: the buffer; all-gather: the gathered output; reduce-scatter: the
  unreduced input; broadcast, reduce, send: the buffer; all-to-all: the local buffer), whatever the backend sends.  A
  group of one rank makes no call and counts nothing.
- a **recording** communicator has the same methods and no peers: it counts and returns at once, so that a rank of any
  world can be run on meta tensors in one process.  A `Pending` of it holds what that of an exchange holds, what the
  pieces of the others land in among it, so that a meter sees a real step's bytes;
- whoever waits has a timeout (the group's), and the error says for whom: axis, ranks, operation, shape.

Asynchronous methods return a `Pending`; its `wait()` must be called, on every rank in the same order.  Sums are plain
sums; no averaging collective exists.  On gloo, reduce-scatter and all-gather are made of direct exchanges (half the
bytes and a third of the time of gloo's own at 64 MB, two ranks); a reduce-scatter then adds in rank order, so its
bits do not depend on timing.  The names of torch's collectives changed between 2.11 and 2.13; that is hidden here.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from colossal_lite.watch import Watch

ReduceOp = Literal["sum", "max"]
_OPS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX}
# torch 2.13 deprecates the *_tensor names that are the only ones in 2.11.
_native_all_gather: Callable[..., Any] = (
    getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
)
_native_reduce_scatter: Callable[..., Any] = (
    getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
)


class CommError(RuntimeError):
    """A collective failed or timed out: names the rank, the operation, the axis and whom it waited for."""


@dataclass(frozen=True)
class LedgerRow:
    """Calls and logical payload bytes of one operation on one axis."""

    operation: str
    axis: str
    calls: int
    payload_bytes: int


@dataclass
class Ledger:
    """What one rank handed to its communicators since the last `clear`, and how long it waited for them."""

    waited_s: float = 0.0
    _counts: dict[tuple[str, str], tuple[int, int]] = field(default_factory=dict)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Count nothing: reads of whole tensors are not part of a step."""
        kept, waited = dict(self._counts), self.waited_s
        yield
        self._counts, self.waited_s = kept, waited

    def add(self, operation: str, axis: str, payload_bytes: int, calls: int = 1) -> None:
        before, total = self._counts.get((operation, axis), (0, 0))
        self._counts[operation, axis] = (before + calls, total + payload_bytes)

    def rows(self) -> tuple[LedgerRow, ...]:
        return tuple(LedgerRow(*key, *value) for key, value in sorted(self._counts.items()))

    @property
    def payload_bytes(self) -> int:
        return sum(total for _, total in self._counts.values())

    def clear(self) -> None:
        self._counts.clear()
        self.waited_s = 0.0


class Pending:
    """Operations in flight on one tensor. `wait()` returns the finished tensor; a second call returns it again."""

    def __init__(
        self,
        comm: AxisComm,
        what: str,
        result: Tensor,
        works: Sequence[Any],
        finish: Callable[[], None],
        call: int = 0,
        peer: int | None = None,
        holds: Sequence[Tensor] = (),
    ):
        self._comm, self._what, self._result, self._call = comm, what, result, call
        self._peer = peer
        self._works, self._finish, self._holds = tuple(works), finish, tuple(holds)
        self._done = False

    def wait(self) -> Tensor:
        if not self._done:
            start = time.perf_counter()
            try:
                for work in self._works:
                    work.wait()
            except RuntimeError as error:
                raise self._comm.failure(self._what, error, self._call, self._peer) from error
            self._finish()
            self._works, self._finish, self._holds = (), _nothing, ()  # what they hold may go
            self._done = True
            self._comm.ledger.waited_s += time.perf_counter() - start
        return self._result


def _nothing() -> None:
    return None


class AxisComm:
    """This rank's end of the group along one axis (or a product of axes).

    `group` None means no peers are reached: either the group has one rank, or `recording` is set and the collectives
    of a larger group are only counted.  `explain` is asked, when a collective fails, who stopped and why.
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
        watch: Watch | None = None,
    ) -> None:
        self.axis, self.ranks, self.rank, self.ledger = axis, tuple(ranks), rank, ledger
        self.size, self.coord = len(self.ranks), self.ranks.index(rank)
        self.timeout_s = timeout_s
        self._group, self._recording, self._explain, self._watch = group, recording, explain, watch
        assert self.size == 1 or recording or group is not None, (
            f"axis {axis} has {self.size} ranks but no group"
        )
        self._calls = 0

    def __repr__(self) -> str:
        kind = ", recording" if self._recording else ""
        return f"AxisComm({self.axis}, ranks {list(self.ranks)}, coord {self.coord}{kind})"

    # ---- collectives; each returns its result tensor, or a Pending when asynchronous ----

    def all_reduce_async(self, tensor: Tensor, op: ReduceOp = "sum") -> Pending:
        """Reduce `tensor` over the axis, in place. Payload: the buffer."""
        return self._run(
            "all_reduce",
            tensor,
            tensor,
            lambda: [dist.all_reduce(tensor, op=_OPS[op], group=self._group, async_op=True)],
        )

    def all_reduce(self, tensor: Tensor, op: ReduceOp = "sum") -> Tensor:
        return self.all_reduce_async(tensor, op).wait()

    def all_gather_async(self, shard: Tensor, out: Tensor | None = None, *, dim: int = 0) -> Pending:
        """Concatenate equal shards along `dim` in coordinate order. Payload: the gathered output.

        `shard` is [n, ...], the result [size * n, ...]; `out`, of dim 0 only, may hold `shard` in its own place.
        """
        if dim % shard.dim():
            return self._gather_along(shard.contiguous(), dim)
        if out is None:
            out = shard.new_empty((self.size * shard.shape[0], *shard.shape[1:]))
        assert out.numel() == self.size * shard.numel() and out.is_contiguous() and shard.is_contiguous()
        target = out
        if self.size == 1 and target.data_ptr() != shard.data_ptr():
            target.copy_(shard)
        return self._run(
            "all_gather", target, target, lambda: self._start_all_gather(shard, target),
            recorded=lambda: (shard,),
        )  # fmt: skip

    def all_gather(self, shard: Tensor, out: Tensor | None = None, *, dim: int = 0) -> Tensor:
        return self.all_gather_async(shard, out, dim=dim).wait()

    def _gather_along(self, shard: Tensor, dim: int) -> Pending:
        """Pieces land one after the other, and are copied to their places: the own one while the others travel."""
        shape = list(shard.shape)
        shape[dim] *= self.size
        whole = shard.new_empty(shape)
        places = whole.chunk(self.size, dim)
        others = [j for j in range(self.size) if j != self.coord]
        landed: list[Tensor] = []

        def start() -> list[Any]:
            if self._native(shard):
                flat = shard.new_empty((self.size, *shard.shape))
                landed.extend(flat)
                return [_native_all_gather(flat, shard, group=self._group, async_op=True)]
            landed.extend(shard if j == self.coord else torch.empty_like(shard) for j in range(self.size))
            works = self._exchange([shard] * self.size, landed)
            places[self.coord].copy_(shard)
            return works

        def put_in_place() -> None:
            for j in range(self.size) if self._native(shard) else others:
                places[j].copy_(landed[j])

        if self.size == 1:
            whole.copy_(shard)
        return self._run(
            "all_gather", whole, whole, start, put_in_place,
            recorded=lambda: (shard, shard.new_empty((len(others), *shard.shape))),
        )  # fmt: skip

    def reduce_scatter_async(
        self, full: Tensor, out: Tensor | None = None, *, dim: int = 0, ordered: bool = False,
        scratch: Tensor | None = None,
    ) -> Pending:  # fmt: skip
        """Sum over the axis; this rank keeps its 1/size of `dim`. Payload: the unreduced input.

        `full` is [size * n, ...] and is not changed unless `out` is this rank's own part of it; the result is [n, ...].
        `ordered` adds in rank order on every backend; `scratch`: `scratch_numel` elements that may be overwritten.
        `out`, `ordered` and `scratch` are for dim 0.
        """
        if dim % full.dim():
            return self._scatter_along(full, dim)
        assert full.shape[0] % self.size == 0 and full.is_contiguous()
        if out is None:
            out = full.new_empty((full.shape[0] // self.size, *full.shape[1:]))
        target = out
        native = self._native(full)
        if self.size == 1 and target.data_ptr() != full.data_ptr():
            target.copy_(full)
        if self.size == 1 or (native and not ordered):
            return self._run(
                "reduce_scatter",
                full,
                target,
                lambda: [_native_reduce_scatter(target, full, group=self._group, async_op=True)],
            )
        numel = self.scratch_numel(full.numel(), ordered=ordered, native=native)
        flat = full.new_empty(numel) if scratch is None else scratch[:numel]
        if self._recording:
            return self._run("reduce_scatter", full, target, list, recorded=lambda: (full, flat))
        own = full.view(self.size, *target.shape)[self.coord]
        if native:
            pieces = list(flat.view(self.size, *target.shape))
            del pieces[self.coord]
        else:
            pieces = list(flat.view(self.size - 1, *target.shape))

        def start() -> list[Any]:
            if native:
                return [dist.all_to_all_single(flat, full.view(-1), group=self._group, async_op=True)]
            incoming = [*pieces[: self.coord], own, *pieces[self.coord :]]
            return self._exchange(list(full.view(self.size, *target.shape)), incoming)

        def add_in_rank_order() -> None:
            before, after = pieces[: self.coord], pieces[self.coord :]
            for piece in before[1:]:
                before[0].add_(piece)
            if before:
                torch.add(before[0], own, out=target)
            elif target.data_ptr() != own.data_ptr():
                target.copy_(own)
            for piece in after:
                target.add_(piece)

        return self._run("reduce_scatter", full, target, start, add_in_rank_order)

    def scratch_numel(self, numel: int, *, ordered: bool, native: bool) -> int:
        """Elements that a reduce-scatter of `numel` needs beside its input: what the others send."""
        if self.size == 1 or (native and not ordered):
            return 0
        return numel if native else numel - numel // self.size

    def reduce_scatter(self, full: Tensor, out: Tensor | None = None, *, dim: int = 0) -> Tensor:
        return self.reduce_scatter_async(full, out, dim=dim).wait()

    def _scatter_along(self, full: Tensor, dim: int) -> Pending:
        """Only the pieces that leave are copied; the own one is added where it lies, in rank order."""
        assert full.shape[dim] % self.size == 0
        parts = full.chunk(self.size, dim)
        own = parts[self.coord]
        result = torch.empty_like(own, memory_format=torch.contiguous_format)
        kept: list[Tensor] = []  # alive until they are sent, or received
        native = self._native(full)

        def start() -> list[Any]:
            if native:
                kept.append(torch.stack(parts))
                return [_native_reduce_scatter(result, kept[0], group=self._group, async_op=True)]
            outgoing = [own if j == self.coord else part.contiguous() for j, part in enumerate(parts)]
            kept.extend(own if j == self.coord else torch.empty_like(result) for j in range(self.size))
            works = self._exchange(outgoing, kept)
            kept.extend(outgoing)
            return works

        def add_in_rank_order() -> None:
            if not native:
                torch.add(kept[0], kept[1], out=result)
                for piece in kept[2 : self.size]:
                    result.add_(piece)

        if self.size == 1:
            result.copy_(own)
        copies = 1 if own.is_contiguous() else 2  # of what comes, and of what leaves
        return self._run(
            "reduce_scatter", full, result, start, add_in_rank_order,
            recorded=lambda: (full, full.new_empty((copies * (self.size - 1), *own.shape))),
        )  # fmt: skip

    def broadcast(self, tensor: Tensor, source: int) -> Tensor:
        """Copy `tensor` of coordinate `source` to all, in place. Payload: the buffer."""
        return self._run(
            "broadcast",
            tensor,
            tensor,
            lambda: [dist.broadcast(tensor, src=self.ranks[source], group=self._group, async_op=True)],
        ).wait()

    def reduce(self, tensor: Tensor, target: int) -> Tensor:
        """Sum into coordinate `target`, in place; elsewhere the buffer holds nothing of use. Payload: the buffer."""
        return self._run(
            "reduce",
            tensor,
            tensor,
            lambda: [dist.reduce(tensor, dst=self.ranks[target], group=self._group, async_op=True)],
        ).wait()

    def all_to_all(self, tensor: Tensor) -> Tensor:
        """Piece j of dim 0 goes to coordinate j; the result holds one piece of each. Payload: the local buffer."""
        assert tensor.shape[0] % self.size == 0 and tensor.is_contiguous()
        out = tensor.clone() if self.size == 1 else torch.empty_like(tensor)
        return self._run(
            "all_to_all",
            tensor,
            out,
            lambda: [dist.all_to_all_single(out, tensor, group=self._group, async_op=True)],
        ).wait()

    def send_async(self, tensor: Tensor, to: int, about: str = "") -> Pending:
        """Send to coordinate `to`. Payload: the buffer, counted by the sender only. `about`: told if it fails."""
        assert to != self.coord and tensor.is_contiguous()
        return self._run(
            "send",
            tensor,
            tensor,
            lambda: [dist.isend(tensor, dst=self.ranks[to], group=self._group)],
            peer=to,
            about=about,
        )

    def receive_async(self, into: Tensor, source: int, about: str = "") -> Pending:
        """Receive from coordinate `source` into a contiguous tensor of the sender's shape and dtype."""
        assert source != self.coord and into.is_contiguous()
        return self._run(
            None,
            into,
            into,
            lambda: [dist.irecv(into, src=self.ranks[source], group=self._group)],
            what="receive",
            peer=source,
            about=about,
        )

    def exchange_sum(self, tensor: Tensor, coords: Sequence[int], about: str = "") -> Tensor:
        """The sum of what some coordinates hold, this one among them, in place and in their order: the same bits on
        each. Payload: the buffer, once for each of the others."""
        assert self.coord in coords and tensor.is_contiguous()
        others = [coord for coord in coords if coord != self.coord]
        came = {coord: torch.empty_like(tensor) for coord in others}
        pending = [self.receive_async(came[coord], coord, about) for coord in others]
        pending += [self.send_async(tensor, coord, about) for coord in others]
        for each in pending:
            each.wait()
        first, *rest = [came.get(coord, tensor) for coord in sorted(coords)]
        total = first.clone()
        for term in rest:
            total.add_(term)
        return tensor.copy_(total)

    def shift_async(self, tensor: Tensor, distance: int = 1) -> Pending:
        """Pass `tensor` to the coordinate `distance` further on the ring; the result came from as far behind."""
        assert tensor.is_contiguous()
        out = tensor.clone() if self.size == 1 or distance % self.size == 0 else torch.empty_like(tensor)

        def start() -> list[Any]:
            to, source = (self.coord + distance) % self.size, (self.coord - distance) % self.size
            if to == self.coord:
                return []
            return [
                dist.isend(tensor, dst=self.ranks[to], group=self._group),
                dist.irecv(out, src=self.ranks[source], group=self._group),
            ]

        return self._run("send", tensor, out, start)

    def shift(self, tensor: Tensor, distance: int = 1) -> Tensor:
        return self.shift_async(tensor, distance).wait()

    def barrier(self) -> None:
        """Return when every rank of the axis has come here. Not counted: it carries no payload."""
        if self.size > 1 and not self._recording:
            token = torch.zeros(1)
            self._run(
                None,
                token,
                token,
                lambda: [dist.all_reduce(token, group=self._group, async_op=True)],
                what="barrier",
            ).wait()

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

    # ---- how they run ----

    def failure(self, what: str, error: BaseException, call: int = 0, peer: int | None = None) -> CommError:
        """The error of a collective that did not come to its end, naming who waited for whom (`peer`: for one)."""
        waited = self.ranks if peer is None else (self.rank, self.ranks[peer])
        peers = ", ".join(str(r) for r in waited if r != self.rank)
        text = (
            f"rank {self.rank}: {what} on axis {self.axis!r} failed (call {call or self._calls} there), waiting for "
            f"ranks {peers}; timeout {self.timeout_s:g} s. {str(error).splitlines()[0] if str(error) else error!r}"
        )
        if reason := self._explain() if self._explain else "":
            return CommError(f"{reason}\n{text}")
        return CommError(
            f"{text}\n{self._watch.blame(self.axis, waited, what, call)}" if self._watch else text
        )

    def _run(
        self,
        counted: str | None,
        payload: Tensor,
        result: Tensor,
        start: Callable[[], list[Any]],
        finish: Callable[[], None] = _nothing,
        *,
        recorded: Callable[[], Sequence[Tensor]] = tuple,
        what: str | None = None,
        peer: int | None = None,
        about: str = "",
    ) -> Pending:
        description = (
            f"{what or counted} of {list(payload.shape)} {str(payload.dtype).removeprefix('torch.')}"
            + (f" ({about})" if about else "")
        )
        if self.size == 1:
            return Pending(self, description, result, (), _nothing)
        if counted:
            self.ledger.add(counted, self.axis, payload.numel() * payload.element_size())
        self._calls += 1
        if self._recording:
            return Pending(self, description, result, (), _nothing, holds=recorded())
        if self._watch:
            self._watch.progress.called(self.axis, description)
        try:
            works = start()
        except RuntimeError as error:
            raise self.failure(description, error, self._calls, peer) from error
        return Pending(self, description, result, works, finish, self._calls, peer)

    def _native(self, tensor: Tensor) -> bool:
        return tensor.is_cuda

    def _start_all_gather(self, shard: Tensor, out: Tensor) -> list[Any]:
        if self._native(shard):
            return [_native_all_gather(out, shard, group=self._group, async_op=True)]
        pieces = out.view(self.size, *shard.shape)
        if pieces[self.coord].data_ptr() != shard.data_ptr():
            pieces[self.coord].copy_(shard)
        return self._exchange([shard] * self.size, list(pieces))

    def _exchange(self, outgoing: list[Tensor], incoming: list[Tensor]) -> list[Any]:
        """Send piece j to coordinate j and receive one from each; the own piece stays where it is."""
        others = [(self.coord + step) % self.size for step in range(1, self.size)]
        receives = [dist.irecv(incoming[j], src=self.ranks[j], group=self._group) for j in reversed(others)]
        sends = [dist.isend(outgoing[j], dst=self.ranks[j], group=self._group) for j in others]
        return [*receives, *sends]
