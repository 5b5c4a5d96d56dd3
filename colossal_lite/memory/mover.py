"""The only file that copies tensors between devices and tiers.

Note: two forms.
Functions move what is moved once: initial values, buffers, batches.  A `Link` moves what travels in a step, by plan:
one direction between two tiers, copies in order on a thread of its own, each with a `Transfer` to wait for.  Two links
run at once, so both directions of a bus are in use.  On one machine a link can be given a speed, and then emulates a
device behind a bus: every order of copies, waits and reuse of slots is tried without one.
"""

from __future__ import annotations

import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

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


class Transfer:
    """A copy on its way. `wait()` returns when its target holds the bytes; it raises what the copy raised."""

    def __init__(self, link: Link, done: Future[None]) -> None:
        self._link, self._done = link, done

    def wait(self) -> None:
        start = time.perf_counter()
        self._done.result(timeout=self._link.timeout_s)
        self._link.waited_s += time.perf_counter() - start

    def join(self) -> None:
        """`wait`, on the thread of another link, which does not count."""
        self._done.result(timeout=self._link.timeout_s)


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

    def copy(self, target: Tensor, source: Tensor, *, after: Transfer | None = None) -> Transfer:
        """Copy `source` to `target` of the same size and dtype, when `after` is done. Neither may be written until
        then, nor `target` read."""
        assert target.shape == source.shape and target.dtype == source.dtype
        size_bytes = source.numel() * source.element_size()
        self.moved_bytes += size_bytes
        return Transfer(self, self._thread.submit(self._copy, target, source, size_bytes, after))

    def close(self) -> None:
        """No copy is asked for any more; those on their way are finished at once."""
        self._closed.set()
        self._thread.shutdown()

    def _copy(self, target: Tensor, source: Tensor, size_bytes: int, after: Transfer | None) -> None:
        if after is not None:
            after.join()
        start = time.perf_counter()
        target.copy_(source)
        left_s = self._speed.seconds(size_bytes) - (time.perf_counter() - start)
        if left_s > 0:
            self._closed.wait(left_s)
