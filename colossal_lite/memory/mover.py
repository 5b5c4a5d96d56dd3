"""The only file that copies tensors between devices and tiers.

Note: two forms.
Functions move what is moved once: initial values, buffers, batches.  A `Link` moves what travels in a step, by plan:
one direction between two tiers, copies in order on a lane of its own (memory/lane.py: a thread, or a stream of a GPU),
each with a `Transfer` to wait for.  Two links run at once, so both directions of a bus are in use.  On one machine a
link can be given a speed, and then emulates a device behind a bus: every order of copies, waits and reuse of slots is
tried without one.  Transfers come after transfers that were asked for before them, on whatever link, so none waits in a
circle; a stream that comes after work of a thread is handed its own by the link's thread, when that is done.  `Buffers`
hand out equal buffers, each with the transfers that still use it.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial

import torch
from torch import Tensor, nn

from colossal_lite.memory.lane import Event, Lane, ended


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
    """Equal buffers that transfers fill and empty: the one that was handed back first is taken first."""

    def __init__(self, buffers: Iterable[Tensor]) -> None:
        self._free: deque[tuple[Tensor, tuple[Transfer, ...]]] = deque((one, ()) for one in buffers)

    def take(self) -> tuple[Tensor, tuple[Transfer, ...]]:
        """A buffer, and the transfers after which it may be written."""
        assert self._free, "the plan takes more buffers than there are"
        return self._free.popleft()

    def give(self, buffer: Tensor, *last: Transfer) -> None:
        """Hand a buffer back, which may be written when `last` are done."""
        self._free.append((buffer, last))


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
