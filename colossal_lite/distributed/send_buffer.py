"""Allocates shared memory without a file, and lends parts of it to the ranks that read them.

Note: addresses for all of the host's memory are reserved at once.  A page is taken when it is first written.
"""

from __future__ import annotations

import mmap
import os

ALIGN_BYTES = 64
"""Alignment of parts: a cache line, which suits every dtype."""


class ExchangeError(RuntimeError):
    """A neighbour has ended, does not answer, or runs another operation."""


class SendBuffer:
    """This rank's shared memory. It lends parts to readers, the lowest free one first."""

    def __init__(self) -> None:
        self.capacity_bytes = physical_bytes()
        self.descriptor, self.memory = shared_memory("send buffer", self.capacity_bytes)
        self.posted_bytes = 0
        """Bytes of all messages so far."""
        self.peak_bytes = 0
        """The end of the highest part lent so far: the host memory that the send buffer takes."""
        self._lent: list[tuple[int, int]] = []
        self._readers: dict[int, int] = {}

    @property
    def lent(self) -> int:
        """Number of parts that have readers."""
        return len(self._lent)

    def lend(self, size_bytes: int, readers: int) -> int:
        """The offset of a free part of `size_bytes`, lent until `readers` have given it back."""
        size_bytes = -(-max(size_bytes, 1) // ALIGN_BYTES) * ALIGN_BYTES
        offset, index = 0, len(self._lent)
        for position, (start, end) in enumerate(self._lent):
            if start - offset >= size_bytes:
                index = position
                break
            offset = end
        if offset + size_bytes > self.capacity_bytes:
            raise ExchangeError(f"{size_bytes} bytes do not fit a send buffer of {self.capacity_bytes} bytes")
        self._lent.insert(index, (offset, offset + size_bytes))
        self._readers[offset] = readers
        self.peak_bytes = max(self.peak_bytes, offset + size_bytes)
        return offset

    def give_back(self, offset: int) -> None:
        """Count one reader as done with the part at `offset`."""
        self._readers[offset] -= 1
        if not self._readers[offset]:
            del self._readers[offset]
            self._lent = [place for place in self._lent if place[0] != offset]


def physical_bytes() -> int:
    """Bytes of the host's memory."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def shared_memory(name: str, size_bytes: int) -> tuple[int, mmap.mmap]:
    """Make shared memory without a file: its descriptor, and its mapping. Pages are taken when first written. Raises
    OSError."""
    descriptor = os.memfd_create(f"colossal_lite {name}", os.MFD_CLOEXEC)
    try:
        os.ftruncate(descriptor, size_bytes)
        return descriptor, mapped(descriptor, size_bytes)
    except OSError:
        os.close(descriptor)
        raise


def mapped(descriptor: int, size_bytes: int) -> mmap.mmap:
    """Map the memory of a descriptor until its last tensor is freed. Raises OSError."""
    memory = mmap.mmap(descriptor, size_bytes)
    memory.madvise(mmap.MADV_DONTFORK)  # a loader's workers need none of it
    return memory
