"""Reads and writes records of model state in a file of this rank, past the system's page cache.

Note: the file.
Every record that starts on disk has room from the start (`posix_fallocate`).  A disk that is too small thus fails
before the first step.  The file is unlinked as soon as it is open.  No process can remove or cut it, and it is gone
when the process ends, however that ends.  Records that are elsewhere are holes, which take nothing (`give_back`), where
the file system has holes.

`THREADS` threads read and write the blocks of a record at once.  They use `preadv` and `pwritev` on an `O_DIRECT` file
descriptor, from and to pages in memory.  A system call may do only a part.  The rest is requested again, through the
page cache if it begins off a page.  Without direct access everything passes the page cache, which is then emptied of
it.  Every block has a checksum, taken when it is written and compared at each read.  A page that was flipped, lost,
misplaced or not yet written is an error, never a number.

After a fault nothing is read or written any more: file and memory may be of different steps.  A system call that never
returns keeps its thread and pages until exit.  Exit does not wait for it.
Cost: `THREADS` threads, and the caller's buffers.  crc32 runs at 2.8 GB/s a thread.
Source: ZeRO-Infinity, arXiv 2104.07857, section 6.3.
"""

from __future__ import annotations

import errno
import mmap
import os
import secrets
import threading
import time
import warnings
import zlib
from collections.abc import Callable, Collection
from concurrent.futures import Future, wait
from contextlib import suppress
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any, TypeVar

import torch
from torch import Tensor

from colossal_lite.memory.disk_layout import PAGE_BYTES, FileLayout
from colossal_lite.memory.pinned import host_pages

THREADS = 4
GRACE_S = 1.0
"""Seconds that `close` waits for reads and writes after a fault."""
DIRECT = getattr(os, "O_DIRECT", 0)
T = TypeVar("T")


class DiskError(OSError):
    """The disk tier has failed. `errno` of the system, `filename`; `strerror`: what failed, why, and what to do."""

    def __str__(self) -> str:
        return f"{self.filename}: {self.strerror}"


class DiskFile:
    """The records of `layout` in an unnamed file in `directory`. Raises DiskError where there is no room for it.

    `label`: for messages. No wait is longer than `timeout_s`. `resting`: the records that have room from the start,
    None: all."""

    def __init__(
        self, directory: Path, layout: FileLayout, *, label: str, timeout_s: float = 600.0,
        resting: Collection[int] | None = None,
    ) -> None:  # fmt: skip
        self.layout, self.timeout_s = layout, timeout_s
        records = range(len(layout.sizes_bytes))
        resting = records if resting is None else resting
        self.path = directory / f"colossal-lite-{label}-{secrets.token_hex(4)}"
        self.why_buffered = ""
        """Why there is no direct access; empty where there is."""
        self.failure: DiskError | None = None
        """The first fault. Every later call raises it."""
        self._sums: list[list[int | None]] = [[None] * len(layout.blocks(i)) for i in records]
        self._lock = threading.Lock()
        self._fds: list[int] = []
        try:
            self._open()
            for record in sorted(resting):
                self._allocate(record)
        except OSError as error:
            self._close_fds()
            size_bytes = sum(map(layout.padded_bytes, resting))
            why = error.strerror or error
            if error.errno == errno.ENOENT and not directory.exists():
                why = "there is no such directory, so create it first"
            raise DiskError(
                error.errno,
                f"a file of {size_bytes:,} bytes for the disk tier cannot be made: {why}",
                str(directory),
            ) from error
        self._workers = Workers(THREADS, "disk")

    @property
    def is_direct(self) -> bool:
        return not self.why_buffered

    def write(self, record: int, source: Tensor) -> None:
        """Write a record from `source`: uint8, its pages, in memory from a page's start on. Raises DiskError."""
        self._all_blocks("written", record, source, self._write_block)

    def read(self, record: int, target: Tensor) -> None:
        """Read a record into `target`, as `source` of `write`. Raises DiskError, also for bytes not last written."""
        self._all_blocks("read", record, target, self._read_block)

    def make_room(self, record: int) -> None:
        """Allocate the room of a record that is on disk from now on. Raises DiskError where there is none."""
        self.check()
        try:
            self._allocate(record)
        except OSError as error:
            what = f"record {record} of {self.layout.sizes_bytes[record]:,} bytes has no room"
            self._fail(f"{what}: {error.strerror}", error.errno or errno.EIO, error)

    def give_back(self, record: int) -> None:
        """Free the room of a record that is elsewhere from now on. No copy of it may be in flight."""
        self._sums[record] = [None] * len(self._sums[record])
        if size_bytes := self.layout.padded_bytes(record):
            # With larger pages, or a file system without holes, the room is not freed.
            with (
                suppress(OSError, ValueError),
                mmap.mmap(self._fds[0], size_bytes, offset=self.layout.starts[record]) as place,
            ):
                place.madvise(mmap.MADV_REMOVE)

    def check(self) -> None:
        """Raise the first DiskError of this file, if there was one."""
        if self.failure is not None:
            raise self.failure

    def close(self) -> None:
        """Finish reads and writes, then drop the file. A second call does nothing. What does not end in time
        (`GRACE_S` after a fault) is abandoned with a warning."""
        grace_s = self.timeout_s if self.failure is None else min(GRACE_S, self.timeout_s)
        if left := self._workers.close(grace_s):
            # A closed descriptor could belong to another file when they use it.
            warnings.warn(
                f"{self.path}: {left} reads or writes have not ended {grace_s:g} s after the file was closed; they and "
                f"the file stay until the process ends",
                stacklevel=2,
            )
        else:
            self._close_fds()
        self.failure = self.failure or DiskError(
            errno.EBADF, "the file is closed: the run is over", str(self.path)
        )

    # ---- how it is opened ----

    def _open(self) -> None:
        self._fds = [os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)]
        try:
            self._open_direct()
        finally:
            os.unlink(self.path)

    def _allocate(self, record: int) -> None:
        if size_bytes := self.layout.padded_bytes(record):
            os.posix_fallocate(self._fds[0], self.layout.starts[record], size_bytes)

    def _open_direct(self) -> None:
        """A second descriptor past the page cache, if a page can be written and read through it."""
        if not DIRECT:
            self.why_buffered = "this system has no O_DIRECT"
            return
        try:
            self._fds.append(os.open(self.path, os.O_RDWR | DIRECT | os.O_CLOEXEC))
            page = host_pages(PAGE_BYTES, torch.device("cpu")).numpy().data
            os.pwritev(self._fds[1], [page], 0)
            os.preadv(self._fds[1], [page], 0)
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP):
                raise
            self.why_buffered = f"the file system of {self.path.parent} refuses O_DIRECT ({error.strerror})"

    def _close_fds(self) -> None:
        fds, self._fds = self._fds, []
        for fd in fds:
            os.close(fd)

    # ---- blocks ----

    def _all_blocks(
        self, verb: str, record: int, buffer: Tensor, work: Callable[[int, int, int, memoryview], None]
    ) -> None:
        """`work` gets a record, the number of a block, its offset in the file, and its bytes in the buffer."""
        self.check()
        assert buffer.numel() == self.layout.padded_bytes(record) and buffer.data_ptr() % PAGE_BYTES == 0
        view, blocks, start = buffer.numpy().data, self.layout.blocks(record), self.layout.starts[record]
        futures = [
            self._workers.submit(partial(work, record, number, start + block.start, view[block]))
            for number, block in enumerate(blocks)
        ]
        # Wait for all: no thread may use a buffer after it is given back.
        ended, late = wait(futures, timeout=self.timeout_s)
        if late:
            self._fail(f"record {record} was not {verb} in {self.timeout_s:g} s", errno.ETIMEDOUT)
        for block, future in zip(blocks, futures, strict=True):
            if (error := future.exception()) is not None:
                if not isinstance(error, OSError):
                    raise error
                what = f"bytes {block.start:,} to {block.stop:,} of record {record} were not {verb}"
                self._fail(f"{what}: {error.strerror or error}", error.errno or errno.EIO, error)

    def _fail(self, what: str, number: int, cause: BaseException | None = None) -> None:
        error = DiskError(
            number,
            f"{what}; the step is lost: continue from the last checkpoint, with memory.disk_dir on a disk that is "
            f"whole, or memory.placement='host'",
            str(self.path),
        )
        with self._lock:
            self.failure = self.failure or error
        raise error from cause

    def _write_block(self, record: int, number: int, offset: int, view: memoryview) -> None:
        self._sums[record][number] = zlib.crc32(view)
        if (done := self._move(_write_some, offset, view)) < len(view):
            raise OSError(errno.ENOSPC, f"the file takes {done:,} bytes and no more")
        self._forget(offset, len(view))

    def _read_block(self, record: int, number: int, offset: int, view: memoryview) -> None:
        if (done := self._move(_read_some, offset, view)) < len(view):
            raise OSError(errno.EIO, f"the file ends after {done:,} bytes of them")
        self._forget(offset, len(view))
        found, expected = zlib.crc32(view), self._sums[record][number]
        if found != expected:
            stated = "nothing was" if expected is None else f"{expected:08x} was"
            raise OSError(errno.EIO, f"their checksum is {found:08x}, and {stated} written")

    def _move(self, some: Callable[[int, memoryview, int], int], offset: int, view: memoryview) -> int:
        """Bytes of a block that calls of `some` have moved, until one moved none."""
        done = 0
        while done < len(view) and (count := some(self._fd(done), view[done:], offset + done)):
            done += count
        return done

    def _fd(self, done: int) -> int:
        """The descriptor for the next call. Direct access begins on a page, and a call may have stopped elsewhere."""
        return self._fds[1 if self.is_direct and done % PAGE_BYTES == 0 else 0]

    def _forget(self, offset: int, size_bytes: int) -> None:
        """Drop a block from the page cache: no other process reads it."""
        if not self.is_direct:
            os.posix_fadvise(self._fds[0], offset, size_bytes, os.POSIX_FADV_DONTNEED)


class Workers:
    """Runs jobs on daemon threads. An executor's threads would delay exit until the last job has ended."""

    def __init__(self, count: int, name: str) -> None:
        self._jobs: SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = SimpleQueue()
        self._threads = [
            threading.Thread(target=self._run, name=f"{name}-{i}", daemon=True) for i in range(count)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, job: Callable[[], T]) -> Future[T]:
        future: Future[T] = Future()
        self._jobs.put((future, job))
        return future

    def close(self, timeout_s: float) -> int:
        """Finish the jobs so far and end the threads. Returns how many have not ended after `timeout_s`."""
        end_s = time.monotonic() + timeout_s
        for _ in self._threads:
            self._jobs.put(None)
        for thread in self._threads:
            thread.join(max(0.0, end_s - time.monotonic()))
        return sum(thread.is_alive() for thread in self._threads)

    def _run(self) -> None:
        while (given := self._jobs.get()) is not None:  # `close` ends an idle thread
            future, job = given
            try:
                future.set_result(job())
            except Exception as error:
                future.set_exception(error)
            del given, future, job  # an idle thread holds no buffer


def _read_some(fd: int, view: memoryview, offset: int) -> int:
    """Read some bytes of a file from `offset` on, at most as many as `view` has; how many."""
    return os.preadv(fd, [view], offset)


def _write_some(fd: int, view: memoryview, offset: int) -> int:
    return os.pwritev(fd, [view], offset)
