"""Allocates zeros on the host: pages that are locked, for a device to copy while the host goes on, and large buffers.

Note: why not torch's own pinned memory.
A GPU copies from and to page-locked memory while the host goes on.  torch's allocator rounds each request up to a power
of two: twice the bytes, for records of gigabytes.  So pages are allocated as needed and locked in place once, until
they are freed.  Where a system refuses that, torch's allocator is used, with a warning.  Beside an emulated device,
memory is not locked.
"""

from __future__ import annotations

import ctypes
import mmap
import platform
import warnings
import weakref
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from colossal_lite.memory.disk_layout import whole_pages


def give_back_freed() -> None:
    """Return freed memory to the system, where the C library caches it (glibc)."""
    if platform.libc_ver()[0] == "glibc":
        ctypes.CDLL(None).malloc_trim(0)


LAZY_BYTES = 1 << 20
HUGE_BYTES = 32 << 20
"""From so many bytes on, large pages of the system are asked for: the host's updates read gigabytes in turn."""


def zeros_on(device: torch.device, numel: int, dtype: torch.dtype) -> Tensor:
    """Zeros [numel]. On the host, large ones are pages of the system, which take memory and time once they are used.

    A dispatch mode, such as a meter's, sees torch's own zeros instead."""
    size_bytes = numel * dtype.itemsize
    if device.type != "cpu" or size_bytes < LAZY_BYTES or torch._C._len_torch_dispatch_stack():
        return torch.zeros(numel, dtype=dtype, device=device)
    return mapped(size_bytes).view(dtype)


def host_room(numel: int, dtype: torch.dtype, beside: torch.device) -> Tensor:
    """Zeros [numel] on the host beside a device, page-locked beside a GPU; on meta beside meta."""
    if beside.type != "cuda":
        return torch.zeros(numel, dtype=dtype, device="meta" if beside.type == "meta" else "cpu")
    return host_pages(numel * dtype.itemsize, beside).view(dtype)


def host_pages(size_bytes: int, beside: torch.device) -> Tensor:
    """As `host_room`, uint8 [size_bytes] that begin on a page; no other tensor is on its last page. The storage begins
    there too: torch asks for its first byte when it decides whether memory is pinned."""
    if beside.type == "meta" or not size_bytes:
        return torch.zeros(size_bytes, dtype=torch.uint8, device="meta" if beside.type == "meta" else "cpu")
    room = mapped(whole_pages(size_bytes))[:size_bytes]
    if beside.type != "cuda":
        return room
    make_pages(room)
    return locked(room, torch.cuda.cudart(), beside)


def mapped(size_bytes: int) -> Tensor:
    """Zeros uint8 [size_bytes] in pages of the system, large ones where it has them."""
    memory = mmap.mmap(-1, size_bytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if size_bytes >= HUGE_BYTES and hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a kernel without them
            memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8)


def locked(room: Tensor, runtime: Any, beside: torch.device) -> Tensor:
    """`room`, its pages locked by CUDA's `runtime` until they are freed; or else a copy in torch's pinned memory."""
    error = lock(room, runtime)
    if error == 0:
        return room
    with suppress(RuntimeError):
        torch.empty(1, device=beside).zero_()  # the next launch would raise the error of this call
    warnings.warn(
        f"memory: {room.numel():,} bytes of the host could not be locked in place (CUDA error {error}); they are "
        f"taken from torch's pinned memory, which rounds up to a power of two",
        stacklevel=2,
    )
    return torch.zeros(room.numel(), dtype=torch.uint8, pin_memory=True).copy_(room)


def make_pages(room: Tensor) -> None:
    """Let all cores make the pages of new host memory, which is zeros: a first copy, or CUDA, makes them one by one.
    Every byte is written, as torch gives each core 32,768 elements at the least."""
    room.zero_()


def lock(room: Tensor, runtime: Any) -> int:
    """Lock the pages of `room` with CUDA's `runtime` until its storage is freed. Returns the error, 0 for none."""
    start = room.data_ptr()
    error = int(runtime.cudaHostRegister(start, whole_pages(room.nbytes), 0))
    if error == 0:
        weakref.finalize(room.untyped_storage(), runtime.cudaHostUnregister, start).atexit = False
    return error
