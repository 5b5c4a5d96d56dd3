"""Reads and writes the files of a checkpoint in threads, checks every slice, and limits every wait.

Note: on the disk.
A checkpoint is a directory of safetensors files and a manifest of all tensors and their slices, with checksums.  A
slice is read whole and its checksum compared, several slices ahead of the caller.  A written slice is read back while
the next is written.  Nothing is pickled, no link is followed, nothing outside the directory is opened.  A disk that
does not answer in time raises LateError.  The files then stay open, as a thread is still inside the read.
Cost: memory of nine slices when reading, none for slices read in place; two when writing.
"""

from __future__ import annotations

import os
import re
import stat
import threading
import zlib
from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import Future, wait
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from colossal_lite.checkpoint.manifest import (
    LIMIT_BYTES,
    MANIFEST,
    CheckpointError,
    Manifest,
    Read,
    Slice,
    Stored,
    decode,
    escaped,
    header,
    serial_of,
)
from colossal_lite.config.errors import first_few
from colossal_lite.memory.disk_file import Workers
from colossal_lite.sharding.boxes import extent

THREADS = 4
"""that read and check slices: some wait for the disk while others compute checksums"""
AHEAD = 8
"""slices read or being read before the caller needs them, so that no thread waits for a slow one"""
DISK_S = 600.0
"""how long a disk may take for one slice where the caller gives no `timeout_s`"""
GRACE_S = 5.0
"""how long `write_file` waits for its reads when it has failed"""
DTYPES: dict[str, torch.dtype] = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8,
    "U64": torch.uint64, "U32": torch.uint32, "U16": torch.uint16, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip
NAMES = {dtype: name for name, dtype in DTYPES.items()}
STEP = re.compile(r"step-(\d{8,14})(?:-(\d{1,6}))?")
T = TypeVar("T")


class LateError(CheckpointError):
    """A disk does not answer. Its thread may stay inside a read or a write for ever, or return at any time."""


def folder_given(what: str, directory: Any) -> Path:
    """The absolute path of a folder that the user gives; ~ is the home. Raises ValueError for what can be none."""
    is_path = isinstance(directory, str | os.PathLike) and str(directory) and "\0" not in str(directory)
    if not is_path:
        raise ValueError(f"{what}: directory={directory!r}; legal: the path of a folder")
    try:
        return Path(directory).expanduser().absolute()
    except RuntimeError as error:
        raise ValueError(f"{what}: directory={str(directory)!r}: {error} Legal: an absolute path") from None
    except FileNotFoundError:
        raise ValueError(
            f"{what}: directory={str(directory)!r}, and the folder that the process works in is gone. Legal: an "
            f"absolute path"
        ) from None


def listed(directory: Path) -> list[Path]:
    """Checkpoints in a directory, whole or not, the one saved last first. Empty if there is no directory.

    Those without a readable manifest come before all others, and those without a serial in order of their step."""
    found = []
    for path in directory.iterdir() if directory.is_dir() else ():
        if match := STEP.fullmatch(path.name):
            serial = _serial(path)
            order = 1 << 62 if serial is None else serial
            found.append((order, int(match[1]), int(match[2] or 1), path))
    return [path for *_, path in sorted(found, reverse=True)]


def _serial(path: Path) -> int | None:
    try:
        with _opened(path / MANIFEST, "the list of tensors") as source:
            is_small = os.fstat(source.fileno()).st_size <= LIMIT_BYTES
            return serial_of(source.read()) if is_small else None
    except (CheckpointError, OSError):
        return None


def next_serial(directory: Path) -> int:
    """The serial of the next save into this directory."""
    return 1 + max((_serial(path) or 0 for path in listed(directory)), default=0)


def inspect(path: Path) -> Manifest:
    """The manifest of a checkpoint whose files are all there, of the right size, with the right headers.

    Raises CheckpointError that names the file and a tensor in it. Raises it too for a folder named as another step.
    Tensor data is not read.
    """
    manifest = read_manifest(path)
    _refuse_other_name(path, manifest.step)
    for file, rows in manifest.by_file().items():
        expected = header(rows)
        with _opened(path / file, f"tensors {_some(rows)}") as source:
            size, should = os.fstat(source.fileno()).st_size, len(expected) + rows[-1][2].stop
            if size != should:
                lost = [name for name, _, part in rows if len(expected) + part.stop > size]
                who = f"tensor {lost[0]} is cut off" if lost else "bytes are appended"
                raise CheckpointError(f"{path / file}: has {size} bytes, not {should}: {who}")
            if source.read(len(expected)) != expected:
                raise CheckpointError(f"{path / file}: its header is not that of tensors {_some(rows)}")
    return manifest


def _refuse_other_name(path: Path, step: int) -> None:
    """Raises CheckpointError for a link that is named as a step's folder, or a folder that holds another step."""
    if (match := STEP.fullmatch(path.name)) is None:
        return
    if path.is_symlink():
        raise CheckpointError(
            f"{path}: is a link to {escaped(os.readlink(path))}, and a run resumes only from a folder of its own; "
            f"legal: a copy in its place, or load() of the link's target"
        )
    if int(match[1]) != step:
        raise CheckpointError(
            f"{path}: holds step {step}: it was renamed; legal: step-{step:08}, or a name that is no step's"
        )


def read_manifest(path: Path) -> Manifest:
    """The manifest of a checkpoint, checked in itself. Raises CheckpointError."""
    where = path / MANIFEST
    with _opened(where, "the list of tensors") as source:
        if os.fstat(source.fileno()).st_size > LIMIT_BYTES:
            raise CheckpointError(f"{where}: is larger than {LIMIT_BYTES} bytes")
        return decode(source.read(), str(where))


def verify(path: Path) -> Iterator[str]:
    """Read every byte of a checkpoint and yield one line a fault. Yields nothing if it is whole."""
    try:
        manifest = inspect(path)
    except CheckpointError as error:
        yield str(error)
        return
    plan = [
        Read(name, stored.dtype, part, ())
        for rows in manifest.by_file().values()
        for name, stored, part in rows
    ]
    try:
        for read, data in stream(path, plan, manifest):
            if isinstance(data, str):
                yield escaped(f"{path / read.slice.file}: tensor {read.name}{box_of(read.slice)}: {data}")
    except LateError as error:
        yield str(error)


def tensors(path: Path, manifest: Manifest, names: Sequence[str]) -> dict[str, Tensor]:
    """Whole tensors of a checkpoint, in host memory. Raises CheckpointError at the first fault."""
    full = {
        name: torch.empty(manifest.tensors[name].shape, dtype=DTYPES[manifest.tensors[name].dtype])
        for name in names
    }
    plan = [
        Read(name, stored.dtype, part, ())
        for rows in manifest.by_file().values()
        for name, stored, part in rows
        if name in full
    ]
    for read, data in stream(path, plan, manifest):
        if isinstance(data, str):
            raise CheckpointError(f"{path / read.slice.file}: tensor {read.name}{box_of(read.slice)}: {data}")
        full[read.name][tuple(slice(*interval) for interval in read.slice.box)] = data
    return full


def box_of(part: Slice) -> str:
    return f"[{', '.join(f'{start}:{stop}' for start, stop in part.box)}]"


def _some(rows: Sequence[tuple[str, Stored, Slice]]) -> str:
    return first_few(dict.fromkeys(name for name, _, _ in rows))


def _opened(path: Path, holds: str) -> Any:
    """A file of a checkpoint opened for reading. It must be a regular file; links are not followed."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror} (it holds {holds})") from error
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise CheckpointError(f"{path}: is not a regular file (it should hold {holds})")
    return os.fdopen(fd, "rb", buffering=0)


class _Files:
    """Files of one directory, each opened at most once: the system reads ahead within what stays open."""

    def __init__(self, path: Path) -> None:
        self._path, self._lock = path, threading.Lock()
        self._found: dict[str, Any] = {}

    def of(self, name: str, holds: str) -> int:
        """The descriptor of a file, from any thread."""
        with self._lock:
            if name not in self._found:
                self._found[name] = _opened(self._path / name, holds)
                os.posix_fadvise(self._found[name].fileno(), 0, 0, os.POSIX_FADV_SEQUENTIAL)
            return int(self._found[name].fileno())

    def close(self) -> None:
        for file in self._found.values():
            file.close()


def stream(
    path: Path, plan: Sequence[Read], manifest: Manifest, *,
    places: Sequence[Tensor | None] = (), timeout_s: float = DISK_S,
) -> Generator[tuple[Read, Tensor | str], None, None]:  # fmt: skip
    """Each slice as a tensor of its box's shape, or its fault as text. Raises LateError if one has not been read in
    `timeout_s`.

    Threads read and check at most `AHEAD` slices while the caller uses the one before. Its memory is then reused.
    Where `places[i]` is given, slice i is read into it instead: contiguous, in host memory, of the slice's dtype.
    """
    if not plan:
        return
    bases = {file: len(header(rows)) for file, rows in manifest.by_file().items()}
    places = places or [None] * len(plan)
    passing = [read.slice for read, place in zip(plan, places, strict=True) if place is None]
    largest = max((part.stop - part.start for part in passing), default=0)
    buffers = [bytearray(largest) for _ in range(AHEAD + 1)]
    files, readers = _Files(path), Workers(THREADS, "checkpoint-read")

    def fill(index: int) -> Tensor | str:
        part, place = plan[index].slice, places[index]
        into = memoryview(buffers[index % len(buffers)]) if place is None else _bytes_of(place)
        view = into[: part.stop - part.start]
        source = files.of(part.file, f"tensor {plan[index].name}")
        at = 0
        try:
            while at < len(view):
                count = os.preadv(source, [view[at:]], bases[part.file] + part.start + at)
                if not count:
                    return f"only {at} of {len(view)} bytes are there"
                at += count
        except OSError as error:
            return f"byte {at} of {len(view)} cannot be read: {error.strerror}"
        if (found := zlib.crc32(view)) != part.crc32:
            return f"checksum is {found:08x}, not {part.crc32:08x} as stated"
        if place is not None:
            return place
        return torch.frombuffer(view, dtype=DTYPES[plan[index].dtype]).view(extent(part.box))

    waits_s = timeout_s
    try:
        pending = [readers.submit(partial(fill, index)) for index in range(min(AHEAD, len(plan)))]
        for index, read in enumerate(plan):
            what = f"{path / read.slice.file}: tensor {read.name}{box_of(read.slice)}"
            data = _within(timeout_s, pending.pop(0), what)
            if index + AHEAD < len(plan):
                pending.append(readers.submit(partial(fill, index + AHEAD)))
            yield read, data
    except (LateError, KeyboardInterrupt):
        waits_s = 0.0
        raise
    finally:
        left = readers.close(waits_s)
        if not left:
            files.close()  # else they are the readers': a descriptor closed under them could be another file's
        elif waits_s:
            raise LateError(f"{path}: {left} reads have not ended in {timeout_s:g} s (timeout_s)")


def _within(timeout_s: float, future: Future[T], what: str) -> T:
    """The result of a thread's read. Raises the thread's exception, or LateError."""
    if not wait([future], timeout=timeout_s).done:
        raise LateError(f"{what} was not read in {timeout_s:g} s (timeout_s): the disk does not answer")
    return future.result(timeout=0)


def _bytes_of(tensor: Tensor) -> memoryview:
    """The memory of a contiguous host tensor."""
    return tensor.reshape(-1).view(torch.uint8).numpy().data.cast("B")


def write_file(
    path: Path, rows: Sequence[tuple[str, Stored, Slice]], data: Iterator[Tensor], timeout_s: float = DISK_S
) -> list[int]:
    """Write one safetensors file from tensors in order of `rows`, and fsync it; the checksum of each.

    A thread reads each slice back while the next one is written. Raises CheckpointError if a slice reads back
    differently, or not within `timeout_s`.
    """
    head = header(list(rows))
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
    file, reader = os.fdopen(fd, "wb", buffering=0), Workers(1, "checkpoint-sum")
    back = bytearray(max((row.stop - row.start for *_, row in rows), default=0))

    def check(view: memoryview, row: tuple[str, Stored, Slice]) -> int:
        crc32, start = zlib.crc32(view), len(head) + row[2].start
        count = os.preadv(file.fileno(), [memoryview(back)[: len(view)]], start)
        # The disk begins to write it now, not at fsync.
        os.posix_fadvise(file.fileno(), start, len(view), os.POSIX_FADV_DONTNEED)
        if count != len(view) or not back.startswith(view):
            raise CheckpointError(
                f"{path}: tensor {row[0]}{box_of(row[2])} does not read back as it was written"
            )
        return crc32

    def checked(index: int) -> int:
        name, _, part = rows[index]
        return _within(timeout_s, sums[index], f"{path}: what was written of tensor {name}{box_of(part)}")

    sums: list[Future[int]] = []
    try:
        _write(file, memoryview(head))
        for index, (row, tensor) in enumerate(zip(rows, data, strict=True)):
            view = _bytes_of(tensor)
            _write(file, view)
            if sums:
                checked(index - 1)  # so that at most two slices are held
            sums.append(reader.submit(partial(check, view, row)))
        os.fsync(file.fileno())
        return [checked(index) for index in range(len(sums))]
    finally:
        if not reader.close(GRACE_S):
            file.close()  # else it is the reader's: a descriptor closed under it could be another file's by then


def _write(file: Any, view: memoryview) -> None:
    at = 0
    while at < len(view):
        at += file.write(view[at:])


def sync_directory(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
