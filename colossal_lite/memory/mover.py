"""The only file that copies tensors between devices and tiers.

Note: two forms.
Functions move what is moved once: initial values, buffers, batches.  A `Link` moves what travels in a step, by plan:
one direction between two tiers, copies in order on a thread of its own, each with a `Transfer` to wait for.  Two links
run at once, so both directions of a bus are in use.  On one machine a link can be given a speed, and then emulates a
device behind a bus: every order of copies, waits and reuse of slots is tried without one.  Transfers come after
transfers that were asked for before them, on whatever link, so none waits in a circle.  `Buffers` hand out equal
buffers, each with the transfer that still uses it.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """The tensor on `device`; itself if it is there already. From pinned memory the copy is asynchronous."""
    return tensor.to(device, non_blocking=tensor.is_pinned())


def to_host(tensor: Tensor) -> Tensor:
    """A copy in host memory, finished when this returns."""
    return tensor.detach().to("cpu", copy=True)


def buffers_to_device(module: nn.Module, device: torch.device) -> None:
    """Move every buffer of a module, in place."""
    for owner in module.modules():
        for name, buffer in owner.named_buffers(recurse=False):
            if buffer.device != device:
                owner._buffers[name] = to_device(buffer, device)


@dataclass(frozen=True)
class LinkSpeed:
    """What a link between two tiers does: a copy takes `latency_s` and its bytes over `bandwidth_bytes_s` (None: as
    fast as the machine copies). On one machine the emulation of a device behind a bus."""

    bandwidth_bytes_s: float | None = None
    latency_s: float = 0.0

    def seconds(self, size_bytes: int) -> float:
        return self.latency_s + (size_bytes / self.bandwidth_bytes_s if self.bandwidth_bytes_s else 0.0)


AS_IT_COPIES = LinkSpeed()


class Transfer:
    """A copy on its way. `wait()` returns when its target holds the bytes; it raises what the copy raised."""

    def __init__(self, link: Link, done: Future[None]) -> None:
        self._link, self._done = link, done

    def wait(self) -> None:
        start = time.perf_counter()
        self.join()
        self._link.waited_s += time.perf_counter() - start

    def join(self) -> None:
        """`wait`, on the thread of another link, which does not count."""
        try:
            self._done.result(timeout=self._link.timeout_s)
        except TimeoutError as error:
            if self._done.done():  # the copy's own
                raise
            raise TimeoutError(
                f"a copy over the link {self._link.name} has not ended in {self._link.timeout_s:g} s (timeout_s)"
            ) from error


class Link:
    """One direction between two tiers: copies one after the other, in the order they are asked for, on a thread."""

    def __init__(self, name: str, speed: LinkSpeed, *, timeout_s: float = 600.0) -> None:
        self.name, self.timeout_s = name, timeout_s
        self.moved_bytes = 0
        """Of all copies so far."""
        self.waited_s = 0.0
        """That whoever needed a copy has waited for it."""
        self._speed = speed
        self._thread = ThreadPoolExecutor(1, f"link-{name}")
        self._closed = threading.Event()

    def copy(self, target: Tensor, source: Tensor, *, after: Sequence[Transfer] = ()) -> Transfer:
        """Copy `source` to `target` of the same size and dtype, when all `after` are done. Neither may be written until
        then, nor `target` read."""
        assert target.shape == source.shape and target.dtype == source.dtype
        return self.run(partial(target.copy_, source), source.numel() * source.element_size(), after=after)

    def run(self, work: Callable[[], object], size_bytes: int, *, after: Sequence[Transfer] = ()) -> Transfer:
        """As `copy`, where `work` moves the `size_bytes`."""
        self.moved_bytes += size_bytes
        return Transfer(self, self._thread.submit(self._run, work, size_bytes, after))

    def close(self) -> None:
        """No copy is asked for any more; those on their way are finished at once."""
        self._closed.set()
        self._thread.shutdown()

    def _run(self, work: Callable[[], object], size_bytes: int, after: Sequence[Transfer]) -> None:
        for transfer in after:
            transfer.join()
        start = time.perf_counter()
        work()
        left_s = self._speed.seconds(size_bytes) - (time.perf_counter() - start)
        if left_s > 0:
            self._closed.wait(left_s)


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
    """Buffers [numel] on the device through which sums go down a link, so that whoever sends need not wait."""

    def __init__(self, down: Link, buffers: Iterable[Tensor]) -> None:
        self._down, self._buffers = down, Buffers(buffers)
        self._sent: list[Transfer] = []

    def send(self, target: Tensor, source: Tensor, *, add: bool) -> None:
        """Copy `source` to `target` on the host, or add it there. `source` may be written when this returns, `target`
        read after `flush`."""
        buffer, before = self._buffers.take()
        for transfer in before:
            transfer.wait()
        here = buffer[: source.numel()]
        here.copy_(source)
        work = partial(target.add_ if add else target.copy_, here)
        transfer = self._down.run(work, source.numel() * source.element_size())
        self._buffers.give(buffer, transfer)
        self._sent.append(transfer)

    def flush(self) -> None:
        """All that was sent is there."""
        while self._sent:
            self._sent.pop().wait()
