"""Finds room for records in one shared mapping with a directory of them, and frees it.

Note: the mapping.
It is a memfd like that of distributed/send_buffer.py.  Addresses for all of the host's memory are reserved at once.  A
page is taken when it is first written.  Each record starts on a page, and its size is rounded up to pages.  A
directory of 64 bytes a record comes first.  `taken_bytes` is 64 (records + 1) and the bytes of each record, each
rounded up to pages.  Where memory cannot be shared, each record has memory of its own.
"""

from __future__ import annotations

import errno
import mmap
import os
import weakref

import torch
from torch import Tensor

from colossal_lite.distributed import host_handshake, send_buffer
from colossal_lite.memory.disk_layout import whole_pages
from colossal_lite.memory.pinned import host_pages

ENTRY_WORDS = 8
ENTRY_BYTES = ENTRY_WORDS * 8
MOST_RECORDS = 2**16 - 1
DIRECTORY_BYTES = (MOST_RECORDS + 1) * ENTRY_BYTES

# The first words of an entry, whose user has the others. STATE is 0 for no record.
STATE, OFFSET, SIZE = range(3)
# Words of the first entry: a mark, then the entries ever used.
MARK, COUNT = range(2)


class StoreError(RuntimeError):
    """A record is missing, incomplete, or not of the requested kind, or has no room."""


class RecordSpace:
    """The mapping, as one process has it. Only one thread at a time may make and free records."""

    def __init__(self, name: str, descriptor: int, memory: mmap.mmap | None) -> None:
        """`name`: for messages. `descriptor` is closed with this object; -1 where `memory` cannot be shared."""
        self.name, self.descriptor, self._memory = name, descriptor, memory
        self.words = memoryview(memory or bytearray(DIRECTORY_BYTES))[:DIRECTORY_BYTES].cast("Q")
        self._close = weakref.finalize(self, os.close, descriptor) if descriptor >= 0 else None
        self._apart: dict[int, Tensor] = {}  # memory that cannot be shared
        self._used: set[int] = set()
        self._gaps: list[tuple[int, int]] | None = None  # free pages [start, stop); None: to be found

    @classmethod
    def made(cls, name: str, mark: int) -> RecordSpace:
        """One without records; `mark` tells it from others. Raises OSError."""
        is_shared = host_handshake.why_not() is None
        space = cls(name, *(send_buffer.shared_memory(name, _capacity_bytes()) if is_shared else (-1, None)))
        space.words[MARK] = mark
        return space

    @classmethod
    def opened(cls, name: str, mark: int, pid: int, descriptor: int) -> RecordSpace:
        """That of another process of this user. Raises OSError where it is there no more."""
        own = os.open(f"/proc/{pid}/fd/{descriptor}", os.O_RDWR | os.O_CLOEXEC)
        try:
            memory = send_buffer.mapped(own, max(os.fstat(own).st_size, DIRECTORY_BYTES))
        except (OSError, ValueError) as error:
            os.close(own)
            raise OSError(errno.ESTALE, str(error)) from error
        space = cls(name, own, memory)
        if space.words[MARK] != mark:
            raise OSError(errno.ESTALE, "other memory is there now")
        space.look()
        return space

    def close(self) -> None:
        """Let no process open it any more. The memory is freed with its last tensor."""
        if self._close is not None:
            self._close()

    def word(self, index: int, word: int) -> int:
        """A word of an entry."""
        return self.words[index * ENTRY_WORDS + word]

    def put(self, index: int, word: int, value: int) -> None:
        self.words[index * ENTRY_WORDS + word] = value

    def live(self) -> list[int]:
        """The entries that have a record now, whoever has made it."""
        return [index for index in range(1, self.words[COUNT] + 1) if self.word(index, STATE)]

    def look(self) -> None:
        """Find the records and the free pages again, which other processes have changed."""
        self._used, self._gaps = {*self.live()}, None

    def make(self, size_bytes: int) -> int:
        """Allocate zeros; their entry, which is no record while its STATE is 0. Raises StoreError without room."""
        count, taken_bytes = self.words[COUNT], whole_pages(size_bytes)
        self._gaps = self._free_pages() if self._gaps is None else self._gaps
        index = count + 1 if len(self._used) == count else min({*range(1, count + 1)} - self._used)
        at = next((i for i, (start, stop) in enumerate(self._gaps) if stop - start >= taken_bytes), None)
        if at is None or index > MOST_RECORDS:
            raise StoreError(
                f"{self.name}: no room for {size_bytes:,} bytes beside {count:,} records; legal: {MOST_RECORDS:,} "
                f"records in {self._capacity_bytes:,} bytes. Fewer: larger chunks"
            )
        start, stop = self._gaps[at]
        self._gaps[at : at + 1] = [(start + taken_bytes, stop)] * (stop - start > taken_bytes)
        self.put(index, OFFSET, start)
        self.put(index, SIZE, size_bytes)
        self.words[COUNT] = max(count, index)
        self._used.add(index)
        if self._memory is None:
            self._apart[index] = host_pages(size_bytes, torch.device("cpu"))
        return index

    def flat(self, index: int, dtype: torch.dtype) -> Tensor:
        """The memory [numel] of a record."""
        if self._memory is None:
            return self._apart[index].view(dtype)
        count = self.word(index, SIZE) // dtype.itemsize
        return torch.frombuffer(self._memory, dtype=dtype, count=count, offset=self.word(index, OFFSET))

    def free(self, index: int) -> None:
        """End a record and free its pages. No tensor in them may be used any more."""
        self.put(index, STATE, 0)
        self._used.discard(index)
        self._apart.pop(index, None)
        self._gaps = None
        if self._memory is not None:
            start, stop = self._pages(index)
            self._memory.madvise(mmap.MADV_REMOVE, start, stop - start)

    @property
    def taken_bytes(self) -> int:
        """Bytes of host memory when every record has been written: by the formula in the Note."""
        records = sum(whole_pages(self.word(index, SIZE)) for index in self._used)
        return records + whole_pages(ENTRY_BYTES * (self.words[COUNT] + 1))

    @property
    def _capacity_bytes(self) -> int:
        return _capacity_bytes() if self._memory is None else len(self._memory)

    def _pages(self, index: int) -> tuple[int, int]:
        start = self.word(index, OFFSET)
        return start, start + whole_pages(self.word(index, SIZE))

    def _free_pages(self) -> list[tuple[int, int]]:
        """Between records, and behind all."""
        used = sorted(map(self._pages, self._used))
        starts = [DIRECTORY_BYTES, *(stop for _, stop in used)]
        stops = [*(start for start, _ in used), self._capacity_bytes]
        return [(start, stop) for start, stop in zip(starts, stops, strict=True) if start < stop]


def _capacity_bytes() -> int:
    return DIRECTORY_BYTES + 4 * send_buffer.physical_bytes()
