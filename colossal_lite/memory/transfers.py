"""Copies tensors between devices and tiers once: initial values, buffers, batches; and lends buffers to links.

Note: this file and `link`, which does the copies of a step, are the only ones that copy between devices.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from functools import partial

import torch
from torch import Tensor, nn

from colossal_lite.memory.arena import ArenaAllocator
from colossal_lite.memory.link import Link, Transfer

_SENT = "_sent_from"
"""Where a sent tensor has what the host holds, and its own version then."""


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """The tensor on `device`; itself if it is there already. From pinned memory the copy is asynchronous."""
    return tensor.to(device, non_blocking=tensor.is_pinned())


def sent(tensor: Tensor, device: torch.device) -> Tensor:
    """A small tensor on `device`, itself if it is there. The host goes on at once; `host_copy` finds what it sent."""
    if tensor.device == device or device.type != "cuda" or tensor.device.type != "cpu":
        return to_device(tensor, device)
    there = to_device(tensor if tensor.is_pinned() else tensor.pin_memory(), device)
    setattr(there, _SENT, (tensor, there._version))
    return there


def host_copy(tensor: Tensor) -> Tensor:
    """What the host has of a tensor that was `sent` and not changed since; else the tensor itself."""
    host, version = getattr(tensor, _SENT, (None, 0))
    return tensor if host is None or version != tensor._version else host


def sent_back(tensor: Tensor) -> Tensor:
    """A small tensor on the host, itself if it is there. From CUDA the host goes on at once. It is right when the host
    has next waited for what the device does."""
    if not tensor.is_cuda:
        return tensor
    return torch.zeros(tensor.shape, dtype=tensor.dtype).pin_memory().copy_(tensor, non_blocking=True)


def copied_to(tensor: Tensor, device: torch.device) -> Tensor:
    """A copy on `device`, finished for later computing there and for the host."""
    return tensor.to(device, copy=True)


def copy_into(target: Tensor, source: Tensor) -> None:
    """Copy `source` to `target` of its shape. From a GPU to the host it has the dtype of `target` before it is copied,
    if that is no larger. torch copies first, to new memory whose pages cost twenty times as much."""
    comes_down = source.is_cuda and not target.is_cuda and target.itemsize <= source.itemsize
    target.copy_(source.to(target.dtype) if comes_down else source)


def to_host(tensor: Tensor) -> Tensor:
    """A copy in host memory, finished when this returns."""
    return tensor.detach().to("cpu", copy=True)


def buffers_to_device(module: nn.Module, device: torch.device) -> None:
    """Move every buffer of a module, in place."""
    for owner in module.modules():
        for name, buffer in owner.named_buffers(recurse=False):
            if buffer.device != device:
                owner._buffers[name] = to_device(buffer, device)


class Buffers:
    """Lends equal buffers that transfers fill and empty, the one given back first is lent first. One that was given
    back counts as in use while its last transfer is the last of its link."""

    def __init__(self, buffers: Iterable[Tensor]) -> None:
        self._free: deque[tuple[Tensor, tuple[Transfer, ...]]] = deque((one, ()) for one in buffers)
        self._count = len(self._free)
        self._leaving: dict[str, Transfer] = {}  # link -> the last transfer of a buffer given back
        self.most_bytes = 0
        """Most bytes of buffers in use at once so far."""

    def __len__(self) -> int:
        return self._count

    def take(self, *after: Transfer) -> tuple[Tensor, tuple[Transfer, ...]]:
        """A buffer, and the transfers after which it may be written. The writer waits for `after` too."""
        assert self._free, "the plan takes more buffers than there are"
        buffer, before = self._free.popleft()
        self._leaving = {name: t for name, t in self._leaving.items() if t not in (*before, *after)}
        in_use = self._count - len(self._free) + len(set(self._leaving.values()))
        self.most_bytes = max(self.most_bytes, in_use * buffer.nbytes)
        return buffer, before

    def give(self, buffer: Tensor, *last: Transfer) -> None:
        """Give a buffer back; it may be written when `last` are done."""
        self._free.append((buffer, last))
        self._leaving |= {transfer.link.name: transfer for transfer in last}

    def rest(self) -> None:
        """Count no buffer as in use: all their transfers are done."""
        self._leaving.clear()


class GradientOffloadBuffer:
    """Sends sums from the device to the host through buffers on the device, so that the sender need not wait. A thread
    adds on the host as it copies. A stream copies its sums to `landings` [numel] on the host. The link `adds` adds them
    from there."""

    def __init__(
        self, down: Link, adds: Link, places: ArenaAllocator, landings: Iterable[Tensor] = ()
    ) -> None:
        self._down, self._adds = down, adds
        self.places, self.landings = places, Buffers(landings)
        self._sent: list[Transfer] = []
        self.on_stream = down.executor.on_stream

    def send(self, number: int, target: Tensor, source: Tensor, *, add: bool) -> Transfer:
        """Copy `source` to `target` on the host, or add it there, through buffer `number`. `source` may be written
        when this returns. `target` may be read after the returned transfer or after `flush`."""
        here = self.places.take_now(number)
        here.copy_(source)
        if not add:
            gone = sent = self._down.copy(target, here)
        elif not self.on_stream:
            gone = sent = self._down.run(partial(target.add_, here), source.nbytes)
        else:
            landing, free = self.landings.take()
            landed = landing[: source.numel()]
            gone = self._down.copy(landed, here, after=free)
            sent = self._adds.run(partial(target.add_, landed), 0, after=(gone,))
            self.landings.give(landing, sent)
        self.places.give(number, gone)
        self._sent.append(sent)
        return sent

    def flush(self) -> None:
        """Wait until all sums are on the host."""
        while self._sent:
            self._sent.pop().finish()
        self.landings.rest()
