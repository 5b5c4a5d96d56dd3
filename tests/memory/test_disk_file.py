"""Tests the disk file under faulty system calls: a read returns the last write or names the record."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from itertools import cycle
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from colossal_lite.memory import disk_file
from colossal_lite.memory.disk_file import DiskError, DiskFile
from colossal_lite.memory.disk_layout import PAGE_BYTES, FileLayout
from colossal_lite.memory.pinned import host_pages

LAYOUT = FileLayout((3 * PAGE_BYTES + 100, 0, 7 * PAGE_BYTES, 1), block_bytes=2 * PAGE_BYTES)
CPU = torch.device("cpu")
Open = Callable[..., DiskFile]


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[Open]:
    made: list[DiskFile] = []

    def make(layout: FileLayout = LAYOUT, **more: Any) -> DiskFile:
        made.append(DiskFile(tmp_path, layout, label="rank0", **({"timeout_s": 30.0} | more)))
        return made[-1]

    yield make
    for file in made:
        file.close()


def content(record: int, version: int = 0) -> Tensor:
    out = host_pages(LAYOUT.padded_bytes(record), CPU)
    generator = torch.Generator().manual_seed(100 * version + record)
    return out.copy_(torch.randint(256, out.shape, generator=generator, dtype=torch.uint8))


def read(file: DiskFile, record: int) -> Tensor:
    target = host_pages(LAYOUT.padded_bytes(record), CPU).fill_(77)
    file.read(record, target)
    return target


def write_all(file: DiskFile, version: int = 0) -> None:
    for record in range(len(LAYOUT.sizes_bytes)):
        file.write(record, content(record, version))


def assert_holds(file: DiskFile, version: int = 0) -> None:
    for record in reversed(range(len(LAYOUT.sizes_bytes))):
        assert torch.equal(read(file, record), content(record, version)), record


# ---- the layout ----


def test_records_lie_one_after_the_other_on_whole_pages() -> None:
    assert LAYOUT.starts == (0, 16384, 16384, 45056, 49152)
    assert [len(LAYOUT.blocks(record)) for record in range(4)] == [2, 0, 4, 1]


@pytest.mark.parametrize("block_pages", [1, 2, 3, 100])
def test_blocks_are_whole_pages_and_cover_the_file_once_in_order(block_pages: int) -> None:
    layout = FileLayout((5, 0, 4096, 4097, 100_000), block_bytes=block_pages * PAGE_BYTES)
    blocks = [(layout.starts[i], block) for i in range(5) for block in layout.blocks(i)]
    ends = [start + block.stop for start, block in blocks]
    assert [start + block.start for start, block in blocks] == [0, *ends[:-1]]
    assert ends[-1] == layout.starts[-1] and all(end % PAGE_BYTES == 0 for end in ends)
    assert all(layout.padded_bytes(i) - layout.sizes_bytes[i] in range(PAGE_BYTES) for i in range(5))
    assert max(map(layout.padded_bytes, range(5))) == 25 * PAGE_BYTES and FileLayout(()).starts[-1] == 0


# ---- direct and buffered ----


def _refused(original: Any, *args: Any) -> Any:
    if any(isinstance(arg, int) and arg & disk_file.DIRECT for arg in args[1:2]):
        raise OSError(errno.EINVAL, "Invalid argument")
    return original(*args)


def test_records_come_back_as_they_were_written_last(opened: Open) -> None:
    file = opened()
    for version in range(3):
        write_all(file, version)
        assert_holds(file, version)
    assert os.fstat(file._fds[0]).st_size == LAYOUT.starts[-1]


def test_where_direct_access_is_refused_it_goes_through_the_page_cache(opened: Open) -> None:
    make = os.open
    with patch.object(os, "open", lambda *args: _refused(make, *args)):
        at_open = opened()
    do = os.pwritev

    def at_write(fd: int, *args: Any) -> int:
        if _flags(fd) & disk_file.DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return do(fd, *args)

    with patch.object(os, "pwritev", at_write):
        at_first_write = opened()
    for file in (at_open, at_first_write):
        assert not file.is_direct and "refuses O_DIRECT (Invalid argument)" in file.why_buffered
        for version in range(2):
            write_all(file, version)
            assert_holds(file, version)


def _flags(fd: int) -> int:
    text = Path(f"/proc/self/fdinfo/{fd}").read_text()
    return int(next(line for line in text.splitlines() if line.startswith("flags:")).split()[1], 8)


def test_another_fault_of_the_probe_is_no_reason_to_go_on(tmp_path: Path) -> None:
    with (
        patch.object(os, "pwritev", side_effect=OSError(errno.EIO, "Input/output error")),
        pytest.raises(DiskError, match="cannot be made: Input/output error"),
    ):
        DiskFile(tmp_path, LAYOUT, label="rank0")


# ---- system calls that do less, or fail ----

COUNTS = (PAGE_BYTES, 100, 10**9, 1, 2 * PAGE_BYTES - 1)


@pytest.mark.parametrize("direct", [True, False])
def test_short_reads_and_writes_are_continued(opened: Open, direct: bool) -> None:
    file, counts, lock = opened(), cycle(COUNTS), threading.Lock()
    if not direct:
        file.why_buffered = "said so by the test"

    def count_of(view: memoryview) -> int:
        with lock:
            return min(len(view), next(counts))

    def read_some(fd: int, view: memoryview, offset: int) -> int:
        count = count_of(view)
        view[:count] = os.pread(file._fds[0], count, offset)
        return count

    def write_some(fd: int, view: memoryview, offset: int) -> int:
        return os.pwrite(file._fds[0], view[: count_of(view)], offset)

    with patch.object(disk_file, "_read_some", read_some), patch.object(disk_file, "_write_some", write_some):
        write_all(file)
    assert_holds(file)
    with patch.object(disk_file, "_read_some", read_some):
        assert_holds(file)


@pytest.mark.parametrize("call", ["_read_some", "_write_some"])
def test_a_fault_names_file_record_bytes_and_a_way_out_and_ends_all_use(opened: Open, call: str) -> None:
    file = opened()
    write_all(file)
    original = getattr(disk_file, call)

    def some(fd: int, view: memoryview, offset: int) -> int:
        if offset == LAYOUT.starts[2] + 2 * PAGE_BYTES:
            raise OSError(errno.EIO, "Input/output error")
        return int(original(fd, view, offset))

    with patch.object(disk_file, call, some), pytest.raises(DiskError) as told:
        file.write(2, content(2, 1))
        read(file, 2)
    verb = "written" if call == "_write_some" else "read"
    assert str(told.value).startswith(
        f"{file.path}: bytes 8,192 to 16,384 of record 2 were not {verb}: Input/output error; the step is lost: "
        f"continue from the last checkpoint"
    )
    assert told.value.errno == errno.EIO
    for use in (lambda: read(file, 0), lambda: file.write(0, content(0)), file.check):
        with pytest.raises(DiskError) as again:
            use()
        assert again.value is told.value


def test_a_disk_that_takes_no_more_is_a_fault(opened: Open) -> None:
    file = opened()
    with (
        patch.object(disk_file, "_write_some", return_value=0),
        pytest.raises(DiskError, match="0 bytes and no more"),
    ):
        file.write(0, content(0))


def test_a_file_that_is_cut_is_a_fault(opened: Open) -> None:
    file = opened()
    write_all(file)
    os.ftruncate(file._fds[0], LAYOUT.starts[2] + PAGE_BYTES)
    assert torch.equal(read(file, 0), content(0))
    with pytest.raises(DiskError, match="record 2 were not read: the file ends after"):
        read(file, 2)


def test_a_disk_that_does_not_answer_is_a_fault(opened: Open) -> None:
    file, gate = opened(timeout_s=0.05), threading.Event()
    write_all(file)
    original = disk_file._read_some

    def stuck(fd: int, view: memoryview, offset: int) -> int:
        gate.wait(10)
        return original(fd, view, offset)

    with (
        patch.object(disk_file, "_read_some", stuck),
        pytest.raises(DiskError, match="was not read in 0.05 s"),
    ):
        read(file, 0)
    gate.set()


@pytest.fixture
def stuck() -> Iterator[threading.Event]:
    """Reads of the disk do not return before the event is set."""
    gate, original = threading.Event(), disk_file._read_some
    with patch.object(disk_file, "_read_some", lambda *args: (gate.wait(60), original(*args))[1]):
        yield gate
    gate.set()


def test_a_file_whose_reads_never_return_is_closed_and_its_descriptors_are_left_to_them(
    tmp_path: Path, stuck: threading.Event
) -> None:
    file = DiskFile(tmp_path, LAYOUT, label="rank0", timeout_s=0.05)
    write_all(file)
    fds = list(file._fds)
    with pytest.raises(DiskError, match="was not read in 0.05 s"):
        read(file, 2)
    with pytest.warns(UserWarning, match="4 reads or writes have not ended 0.05 s after the file was closed"):
        file.close()
    assert all(os.fstat(fd).st_nlink == 0 for fd in fds), "a read that wakes must not find another file there"
    with pytest.raises(DiskError, match="was not read in 0.05 s"):
        file.check()
    stuck.set()
    assert file._workers.close(30.0) == 0
    file.close()
    for fd in fds:
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(fd)


def test_a_process_ends_though_its_disk_does_not_answer(tmp_path: Path) -> None:
    code = f"""
import threading, torch
from pathlib import Path
from colossal_lite.memory import disk_file
from colossal_lite.memory.disk_layout import FileLayout
from colossal_lite.memory.pinned import host_pages
disk_file._read_some = lambda *args: threading.Event().wait()
file = disk_file.DiskFile(Path({str(tmp_path)!r}), FileLayout((5000,)), label="rank0", timeout_s=0.05)
try:
    file.read(0, host_pages(8192, torch.device("cpu")))
except disk_file.DiskError as error:
    print(error)
"""
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert ended.returncode == 0 and "was not read in 0.05 s" in ended.stdout, ended.stderr


# ---- never a wrong number ----


def _flip(file: DiskFile) -> None:
    at = LAYOUT.starts[2] + 5 * PAGE_BYTES + 17
    (byte,) = os.pread(file._fds[0], 1, at)
    os.pwrite(file._fds[0], bytes([byte ^ 4]), at)


def _misplaced(file: DiskFile) -> None:
    original = disk_file._write_some
    with patch.object(disk_file, "_write_some", lambda fd, view, at: original(fd, view, at - PAGE_BYTES)):
        file.write(2, content(2, 1))


def _lost(file: DiskFile) -> None:
    with patch.object(disk_file, "_write_some", lambda fd, view, at: len(view)):
        file.write(2, content(2, 1))


def _swapped(file: DiskFile) -> None:
    first, second = (LAYOUT.starts[2] + block.start for block in LAYOUT.blocks(2)[:2])
    a, b = (os.pread(file._fds[0], 2 * PAGE_BYTES, at) for at in (first, second))
    os.pwrite(file._fds[0], b, first)
    os.pwrite(file._fds[0], a, second)


def _half_read(file: DiskFile) -> Any:
    original = disk_file._read_some

    def some(fd: int, view: memoryview, offset: int) -> int:
        original(fd, view[:PAGE_BYTES], offset)
        return len(view)

    return patch.object(disk_file, "_read_some", some)


# What has happened, and which version of record 2 should be there; perhaps a patch under which it is read.
FAULTS: dict[str, tuple[Callable[[DiskFile], Any], int]] = {
    "a flipped bit": (_flip, 0),
    "a record written a page too early": (_misplaced, 1),
    "a write that was lost": (_lost, 1),
    "two blocks in each other's place": (_swapped, 0),
    "a read that says more than it did": (_half_read, 0),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_what_the_disk_makes_of_a_record_is_an_error(opened: Open, fault: str) -> None:
    file = opened()
    write_all(file)
    happens, _ = FAULTS[fault]
    with happens(file) or nullcontext(), pytest.raises(DiskError, match="2 were not read: their checksum is"):
        read(file, 2)


@pytest.mark.parametrize("fault", FAULTS)
def test_without_the_checksum_it_would_be_a_wrong_number(opened: Open, fault: str) -> None:
    """So the checksum is what finds it, and nothing that merely happens to be there."""
    file = opened()
    write_all(file)
    file._sums = [[0] * len(row) for row in file._sums]
    happens, version = FAULTS[fault]
    with patch.object(disk_file.zlib, "crc32", return_value=0), happens(file) or nullcontext():
        assert not torch.equal(read(file, 2), content(2, version))


def test_a_record_that_was_never_written_cannot_be_read(opened: Open) -> None:
    with pytest.raises(DiskError, match="nothing was written"):
        read(opened(), 0)


# ---- the file's life ----


def test_the_file_has_no_name_and_outlives_its_directory(opened: Open, tmp_path: Path) -> None:
    """So nobody can remove it under the run, and none is left behind however a process ends."""
    file = opened()
    assert list(tmp_path.iterdir()) == []
    assert os.fstat(file._fds[0]).st_nlink == 0
    write_all(file)
    shutil.rmtree(tmp_path)
    assert_holds(file)


def test_records_that_rest_elsewhere_are_holes_and_room_that_is_given_back_is_free(opened: Open) -> None:
    """Where the file system makes holes, as tmpfs, ext4, xfs and btrfs do."""

    def taken(file: DiskFile) -> int:
        return os.fstat(file._fds[0]).st_blocks * 512

    file, probe = opened(resting={2}), PAGE_BYTES
    assert 7 * PAGE_BYTES <= taken(file) <= 7 * PAGE_BYTES + probe
    file.write(2, content(2))
    file.make_room(0)
    file.write(0, content(0))
    assert torch.equal(read(file, 0), content(0)) and torch.equal(read(file, 2), content(2))
    assert taken(file) >= 11 * PAGE_BYTES
    file.give_back(2)
    assert torch.equal(read(file, 0), content(0))
    if taken(file) > 11 * PAGE_BYTES:
        pytest.skip("this file system makes no holes in a file")
    assert taken(file) == 4 * PAGE_BYTES
    with pytest.raises(DiskError, match="nothing was written"):
        read(file, 2)


def test_a_disk_that_has_no_room_for_one_more_record_says_so(opened: Open) -> None:
    file = opened(resting={0})
    with (
        patch.object(os, "posix_fallocate", side_effect=OSError(errno.ENOSPC, "No space left on device")),
        pytest.raises(DiskError, match="record 2 of 28,672 bytes has no room: No space left on device"),
    ):
        file.make_room(2)
    with pytest.raises(DiskError, match="has no room"):
        file.check()


def test_a_full_disk_is_told_before_anything_is_written(tmp_path: Path) -> None:
    with (
        patch.object(os, "posix_fallocate", side_effect=OSError(errno.ENOSPC, "No space left on device")),
        pytest.raises(DiskError) as told,
    ):
        DiskFile(tmp_path, LAYOUT, label="rank0")
    assert str(told.value) == (
        f"{tmp_path}: a file of 49,152 bytes for the disk tier cannot be made: No space left on device"
    )
    assert told.value.errno == errno.ENOSPC
    assert list(tmp_path.iterdir()) == []
    still_open = [os.readlink(path) for path in Path("/proc/self/fd").iterdir() if path.is_symlink()]
    assert not [target for target in still_open if str(tmp_path) in target]


def test_a_directory_that_is_not_there_is_told(tmp_path: Path) -> None:
    with pytest.raises(
        DiskError, match="nowhere: .* cannot be made: there is no such directory, so create it"
    ):
        DiskFile(tmp_path / "nowhere", LAYOUT, label="rank0")


def test_a_closed_file_is_gone_and_says_so(opened: Open) -> None:
    file = opened()
    write_all(file)
    fds = list(file._fds)
    file.close()
    file.close()
    for fd in fds:
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(fd)
    with pytest.raises(DiskError, match="the file is closed"):
        read(file, 0)


def test_reads_and_writes_at_once_do_not_disturb_each_other(opened: Open) -> None:
    file = opened()
    write_all(file)
    failed: list[BaseException] = []

    def again_and_again(work: Callable[[], None]) -> None:
        try:
            for _ in range(20):
                work()
        except (AssertionError, OSError) as error:
            failed.append(error)

    def reads() -> None:
        assert torch.equal(read(file, 0), content(0))

    threads = [
        threading.Thread(target=again_and_again, args=(work,))
        for work in (reads, lambda: file.write(2, content(2)))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert failed == []
    assert_holds(file)
