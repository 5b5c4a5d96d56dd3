"""Computes the offset, pages and blocks of each chunk's record in a file.

Note: direct reads and writes need pages, at a page's start in the file and in memory.  So each record begins on a page
and takes full pages, less than a page of it unused.  Records lie in the order of their chunks, which is the order of
their updates.  A step reads and writes the file once, from its start to its end.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

PAGE_BYTES = 4096
BLOCK_BYTES = 8 * 2**20
"""Bytes of one read or write: enough for a disk's full speed, and several are in flight for a record."""


def whole_pages(size_bytes: int) -> int:
    """Bytes, rounded up to a page."""
    return -(-size_bytes // PAGE_BYTES) * PAGE_BYTES


@dataclass(frozen=True)
class FileLayout:
    """Records of `sizes_bytes`, one after the other, each from a page's start on."""

    sizes_bytes: tuple[int, ...]
    block_bytes: int = BLOCK_BYTES
    """Full pages."""

    def padded_bytes(self, record: int) -> int:
        """The pages of a record."""
        return whole_pages(self.sizes_bytes[record])

    @cached_property
    def starts(self) -> tuple[int, ...]:
        """Where each record begins in the file, and at last where the file ends."""
        return tuple(accumulate((self.padded_bytes(i) for i in range(len(self.sizes_bytes))), initial=0))

    def blocks(self, record: int) -> tuple[slice, ...]:
        """The bytes of a record that are read and written at once; full pages."""
        size = self.padded_bytes(record)
        starts = range(0, size, self.block_bytes)
        return tuple(slice(start, min(start + self.block_bytes, size)) for start in starts)
