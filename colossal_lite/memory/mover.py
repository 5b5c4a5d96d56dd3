"""The only file that copies tensors between devices and tiers.

Note: two forms.
Functions move what is moved once: initial values, buffers, batches.  A `Link` moves what travels in a step, by plan:
one direction between two tiers, copies in order on a lane of its own (memory/lane.py: a thread, or a stream of a GPU),
each with a `Transfer` to wait for.  Two links run at once, so both directions of a bus are in use.  On one machine a
link can be given a speed, and then emulates a device behind a bus: every order of copies, waits and reuse of slots is
tried without one.  Transfers come after transfers that were asked for before them, on whatever link, so none waits in a
circle; a stream that comes after work of a thread is handed its own by the link's thread, when that is done.  `Buffers`
hand out equal buffers, and `Places` places for visitors of different sizes, with the transfers that still use them.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial

import torch
from torch import Tensor, nn

from colossal_lite.memory.lane import Event, Lane, ended
from colossal_lite.memory.pack import most_held, pack_intervals, visits


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """The tensor on `device`; itself if it is there already. From pinned memory the copy is asynchronous."""
    return tensor.to(device, non_blocking=tensor.is_pinned())


def copied_to(tensor: Tensor, device: torch.device) -> Tensor:
    """A copy on `device`, finished for whatever is computed there and for the host."""
    return tensor.to(device, copy=True)


def to_host(tensor: Tensor) -> Tensor:
    """A copy in host memory, finished when this returns."""
    return tensor.detach().to("cpu", copy=True)


def buffers_to_device(module: nn.Module, device: torch.device) -> None:
    """Move every buffer of a module, in place."""
    for owner in module.modules():
        for name, buffer in owner.named_buffers(recurse=False):
            if buffer.device != device:
                owner._buffers[name] = to_device(buffer, device)


class Transfer:
    """A copy on its way. Whoever waits for it is told what it raised."""

    def __init__(self, link: Link, handed: Future[Event | None]) -> None:
        self._link, self._handed = link, handed

    @property
    def link_name(self) -> str:
        return self._link.name

    def wait(self) -> None:
        """What is computed from now on finds the bytes in the target. On a GPU the device waits, and not the host."""
        self._link.lane.hold(self.handed)

    def finish(self) -> None:
        """The target holds the bytes when this returns: for a host that reads or frees them itself."""
        start = time.perf_counter()
        if (event := self.handed()) is not None:
            ended(event, self._link.timeout_s)
        self._link.blocked_s += time.perf_counter() - start

    @property
    def is_handed(self) -> bool:
        """Whether its lane has it, or it has ended."""
        return self._handed.done()

    def handed(self) -> Event | None:
        """When its lane has it: the event of its end, or None where it has ended."""
        try:
            return self._handed.result(timeout=self._link.timeout_s)
        except TimeoutError as error:
            if self._handed.done():  # the copy's own
                raise
            raise TimeoutError(
                f"a copy over the link {self._link.name} has not ended in {self._link.timeout_s:g} s (timeout_s)"
            ) from error


class Link:
    """One direction between two tiers: copies one after the other, in the order they are asked for, on a lane."""

    def __init__(self, name: str, lane: Lane, *, timeout_s: float = 600.0) -> None:
        self.name, self.lane, self.timeout_s = name, lane, timeout_s
        self.moved_bytes = 0
        """Of all copies so far."""
        self.blocked_s = 0.0
        """That the host has waited for bytes that it reads itself."""
        self._thread = ThreadPoolExecutor(1, f"link-{name}")
        self._last: Transfer | None = None

    @property
    def waited_s(self) -> float:
        """That whoever needed a copy has waited for it: on a GPU that its computing stood still, by its own clock, and
        that the host did."""
        return self.lane.held_s + self.blocked_s

    def copy(self, target: Tensor, source: Tensor, *, after: Sequence[Transfer] = ()) -> Transfer:
        """Copy `source` to `target` of the same size and dtype, when all `after` are done, and all that was computed so
        far.  Neither may be written until then, nor `target` read."""
        assert target.shape == source.shape and target.dtype == source.dtype
        work = partial(target.copy_, source, non_blocking=self.lane.on_stream)
        return self.run(work, source.numel() * source.element_size(), after=after)

    def run(self, work: Callable[[], object], size_bytes: int, *, after: Sequence[Transfer] = ()) -> Transfer:
        """As `copy`, where `work` moves the `size_bytes`."""
        self.moved_bytes += size_bytes
        begin = partial(self._begin, work, size_bytes, after, self.lane.now())
        ahead = after if self._last is None else (*after, self._last)
        if self.lane.on_stream and all(transfer.is_handed for transfer in ahead):
            handed = _at_once(begin)
        else:
            handed = self._thread.submit(begin)
        self._last = Transfer(self, handed)
        return self._last

    def drain(self) -> None:
        """All copies so far have ended, and their memory may be freed."""
        if self._last is not None:
            self._last.finish()

    def close(self) -> None:
        """No copy is asked for any more; those on their way are finished at once."""
        self.lane.hurry()
        self._thread.shutdown()
        if self.lane.on_stream and self._last is not None and self._last._handed.exception() is None:
            self._last.finish()

    def _begin(
        self, work: Callable[[], object], size_bytes: int, after: Sequence[Transfer], now: Event | None
    ) -> Event | None:
        ends = (now, *(transfer.handed() for transfer in after))
        return self.lane.run(work, size_bytes, [end for end in ends if end is not None], self.timeout_s)


def _at_once(begin: Callable[[], Event | None]) -> Future[Event | None]:
    """What a thread would do, without one: an error is for whoever waits here too."""
    done: Future[Event | None] = Future()
    try:
        done.set_result(begin())
    except Exception as error:
        done.set_exception(error)
    return done


class Buffers:
    """Equal buffers that transfers fill and empty: the one that was handed back first is taken first.

    A buffer is in use while it is taken, and from then on while the transfer that it was handed back with is the last
    of its link: a link does one after the other, so those before are done, or the plan would have it wait."""

    def __init__(self, buffers: Iterable[Tensor]) -> None:
        self._free: deque[tuple[Tensor, tuple[Transfer, ...]]] = deque((one, ()) for one in buffers)
        self._count = len(self._free)
        self._leaving: dict[
            str, Transfer
        ] = {}  # link -> the last transfer with which a buffer was handed back
        self._each_bytes = self._free[0][0].nbytes if self._free else 0
        self.most_taken = 0
        """Buffers in use at once, at the most so far."""

    @property
    def most_bytes(self) -> int:
        """Of those."""
        return self.most_taken * self._each_bytes

    def __len__(self) -> int:
        return self._count

    def take(self, *after: Transfer) -> tuple[Tensor, tuple[Transfer, ...]]:
        """A buffer, and the transfers after which it may be written. `after`: what has to be done before there is
        anything to write, too."""
        assert self._free, "the plan takes more buffers than there are"
        buffer, before = self._free.popleft()
        self._leaving = {name: t for name, t in self._leaving.items() if t not in (*before, *after)}
        held = self._count - len(self._free)
        self.most_taken = max(self.most_taken, held + len(set(self._leaving.values())))
        return buffer, before

    def give(self, buffer: Tensor, *last: Transfer) -> None:
        """Hand a buffer back, which may be written when `last` are done."""
        self._free.append((buffer, last))
        self._leaving |= {transfer.link_name: transfer for transfer in last}

    def rest(self) -> None:
        """All transfers that buffers were handed back with are done."""
        self._leaving.clear()


class Places:
    """Places in one allocation for visitors that transfers bring and take away, each by its number, in this order again
    and again: those that are never there at once may have the same place (`pack.visits`).

    Counted as `Buffers` are: a visitor is there while its place is taken, and while the last transfer that took one of
    this round away does so."""

    def __init__(
        self, sizes: Mapping[int, int], width: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        """`sizes` in elements; none has no place."""
        intervals = visits({number: size for number, size in sizes.items() if size}, width)
        offsets, self.numel = pack_intervals(intervals)
        self.planned_held_numel = most_held(intervals)
        """Elements that are there at once, at the most, by the plan."""
        self.most_numel = self.most_held_numel = 0
        """As it really was: up to the furthest that was taken, and of those that were there at once."""
        self._spans = {one.start: (at, at + one.numel) for at, one in zip(offsets, intervals, strict=True)}
        self._room = torch.zeros(self.numel, dtype=dtype, device=device)
        self._width = width
        self._taken: list[int] = []
        self._left: dict[int, tuple[Transfer, ...]] = {}
        self._leaving: tuple[int, Transfer | None] = (
            -1,
            None,
        )  # who left last in this round, and by which transfer

    @property
    def bytes(self) -> int:
        return self._room.nbytes

    @property
    def most_bytes(self) -> int:
        return self.most_numel * self._room.element_size()

    def take(self, number: int) -> tuple[Tensor, tuple[Transfer, ...]]:
        """A visitor's place, and the transfers after which it may be written."""
        start, stop = self._spans[number]
        beside = [other for other in (*self._taken, *self._left) if self._meet(number, other)]
        assert not {*beside} & {*self._taken}, f"{number} comes to a place that is taken"
        before = tuple(transfer for other in beside for transfer in self._left[other])
        for other in beside:
            if start <= self._spans[other][0] and self._spans[other][1] <= stop:
                del self._left[other]  # whoever waits for what comes now waits for that too
        self._taken.append(number)
        last, leaving = self._leaving
        if leaving in before or not last <= number < last + self._width:
            self._leaving = (-1, None)
        here = [*self._taken, *([last] if self._leaving[1] is not None else [])]
        self.most_numel = max(self.most_numel, stop)
        self.most_held_numel = max(
            self.most_held_numel, sum(b - a for a, b in map(self._spans.__getitem__, here))
        )
        return self._room[start:stop], before

    def give(self, number: int, *last: Transfer) -> None:
        """A visitor has left; its place may be written when `last` are done."""
        self._taken.remove(number)
        self._left[number] = last
        self._leaving = (number, last[-1]) if last else (-1, None)

    def _meet(self, one: int, other: int) -> bool:
        (start, stop), (first, end) = self._spans[one], self._spans[other]
        return start < end and first < stop


class Outbox:
    """Buffers [numel] on the device through which sums go down a link, so that whoever sends need not wait.

    A thread adds on the host as it copies.  A stream cannot: its sums come down into `landings` [numel] there, from
    which `adds` adds them."""

    def __init__(
        self, down: Link, adds: Link, buffers: Iterable[Tensor], landings: Iterable[Tensor] = ()
    ) -> None:
        self._down, self._adds = down, adds
        self._buffers, self._landings = Buffers(buffers), Buffers(landings)
        self._sent: list[Transfer] = []
        self.on_stream = down.lane.on_stream

    def send(self, target: Tensor, source: Tensor, *, add: bool) -> None:
        """Copy `source` to `target` on the host, or add it there. `source` may be written when this returns, `target`
        read after `flush`."""
        buffer, before = self._buffers.take()
        for transfer in before:
            transfer.wait()
        here = buffer[: source.numel()]
        here.copy_(source)
        size_bytes = source.numel() * source.element_size()
        if not add:
            gone = sent = self._down.copy(target, here)
        elif not self.on_stream:
            gone = sent = self._down.run(partial(target.add_, here), size_bytes)
        else:
            landing, free = self._landings.take()
            landed = landing[: source.numel()]
            gone = self._down.copy(landed, here, after=free)
            sent = self._adds.run(partial(target.add_, landed), 0, after=(gone,))
            self._landings.give(landing, sent)
        self._buffers.give(buffer, gone)
        self._sent.append(sent)

    def flush(self) -> None:
        """All that was sent is there."""
        while self._sent:
            self._sent.pop().finish()
        self._buffers.rest()
        self._landings.rest()

    @property
    def most_sent(self) -> int:
        """Buffers on the device in use at once, at the most so far."""
        return self._buffers.most_taken

    @property
    def most_landed(self) -> int:
        """As many on the host."""
        return self._landings.most_taken
