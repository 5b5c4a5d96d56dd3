"""Gives a folder of checkpoints one owner: `owner.json` names the run that saves there.

Note: who is alive.
A run that resumes from a folder, or saves into it, creates `owner.json`, which only one process can (O_EXCL).  The file
holds the run's id, host and process.  A thread touches it every `BEAT_S`.  The next run reads it.  On the same host it
checks the process, whatever the clock says.  On another host it checks that the file is touched within `STALE_S`; no
two clocks are compared.  A living owner is refused by name.  A dead owner is replaced under a lock of the folder, so
that one of several successors wins.  Before each save a run checks that it still owns the folder.
Where the file system has no locks, two runs that take over at the same moment may both begin.  One of them is refused
at its first save.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import secrets
import socket
import stat
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from colossal_lite.config.whole_file import write_whole
from colossal_lite.observe.printed_lines import warn

OWNER = "owner.json"
BEAT_S = 5.0
STALE_S = 30.0
"""how long a living owner on another host may leave its file untouched"""
EMPTY_S = 2.0
"""how long a file may be empty: its owner created it and has not written it yet"""
LOOK_S = 0.2
LIMIT_BYTES = 1 << 16
KEPT_IDS = 64


class FolderOwnedError(ValueError):
    """Another run is alive in this folder; the text names it."""


@dataclass(frozen=True)
class Owner:
    """The content of `owner.json`, with the file's inode and modification time."""

    run: str
    host: str
    machine: str
    """the boot and the process namespace that `pid` belongs to"""
    pid: int
    started: str
    before: tuple[str, ...]
    """runs that it has taken over, whose leftovers may still be there"""
    seen: tuple[int, int] = (0, 0)

    def __str__(self) -> str:
        return f"run {self.run}, process {self.pid} on {self.host}"

    def encode(self) -> bytes:
        names = ("run", "host", "machine", "pid", "started", "before")
        return json.dumps({name: getattr(self, name) for name in names}).encode()


def this_process(run: str) -> Owner:
    """An owner record for a run of this process."""
    return Owner(run, socket.gethostname(), _machine(), os.getpid(), _started(os.getpid()), ())


class FolderClaims:
    """The folders that one run owns. The rank that writes for all ranks holds it."""

    def __init__(self) -> None:
        self.run = secrets.token_hex(4)
        self._held: dict[Path, Owner] = {}
        self._end = threading.Event()
        self._thread: threading.Thread | None = None

    def claim(self, directory: Path) -> str:
        """Create and own this folder. Returns "", or who owns it if another run is alive there, or why it
        can be no folder. Raises OSError."""
        if fault := _no_folder(directory):
            return fault
        directory.mkdir(parents=True, exist_ok=True)
        path = directory / OWNER
        if path.is_dir():
            return f"{path} is a folder, in the place of the file that names the owner; remove it"
        while True:
            mine = this_process(self.run)
            if _create(path, mine):
                break
            found = _read(path)
            if found is None:
                continue  # it has just ended
            if (found.machine, found.pid, found.started) == (mine.machine, mine.pid, mine.started):
                break  # another engine of this process has it
            if _is_alive(path, found):
                return f"{directory} belongs to {_read(path) or found}, which is running"
            if (heir := _take_over(path, found, mine)) is not None:
                mine = heir
                warn(f"{directory} belonged to {found}, which has ended: taken over")
                break
        found = _read(path)
        if found is None or (found.pid, found.started) != (mine.pid, mine.started):
            return f"{directory} belongs to {found}, which came first"
        if found.run == self.run:
            self._held[directory] = found
            self._beat()
        return ""

    def leftovers(self, directory: Path) -> tuple[str, ...]:
        """Ids of runs whose hidden directories may be removed: this one, and those that it has taken over."""
        owner = self._held.get(directory)
        return (self.run, *(owner.before if owner else ()))

    def close(self) -> None:
        """Release all folders."""
        self._end.set()
        if self._thread is not None:
            self._thread.join(BEAT_S)
        for directory in list(self._held):
            with suppress(OSError):
                if (found := _read(directory / OWNER)) is not None and found.run == self.run:
                    os.unlink(directory / OWNER)
        self._held.clear()
        self._thread, self._end = None, threading.Event()

    def _beat(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._touch, args=(self._end,), name="owner", daemon=True)
            self._thread.start()

    def _touch(self, end: threading.Event) -> None:
        while not end.wait(BEAT_S):
            for directory in list(self._held):
                with suppress(OSError):
                    if (found := _read(directory / OWNER)) is not None and found.run == self.run:
                        os.utime(directory / OWNER)


def _no_folder(directory: Path) -> str:
    """Why there can be no such folder: a file or a broken link on its path; or ""."""
    for path in (directory, *directory.parents):
        try:
            # One look at each: another run may create the folder between two.
            return "" if stat.S_ISDIR(path.stat().st_mode) else f"{path} is no folder"
        except OSError as error:
            if error.errno not in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP):
                raise
        if path.is_symlink():
            return f"{path} is a link to {os.readlink(path)}, which is not there"
    return ""


def _create(path: Path, owner: Owner) -> bool:
    """Create the file, if there is none."""
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
    except FileExistsError:
        return False
    try:
        os.write(fd, owner.encode())
    except OSError:
        os.unlink(path)
        raise
    finally:
        os.close(fd)
    return True


def _read(path: Path) -> Owner | None:
    """The owner in the file; None if there is no file. An empty or foreign file gives an owner without a run."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    try:
        status, text = os.fstat(fd), os.read(fd, LIMIT_BYTES)
    finally:
        os.close(fd)
    seen = (status.st_ino, status.st_mtime_ns)
    try:
        row: dict[str, Any] = json.loads(text)
        run, host, machine = (str(row[name])[:200] for name in ("run", "host", "machine"))
        before = tuple(str(each)[:64] for each in row["before"])[-KEPT_IDS:]
        return Owner(run, host, machine, int(row["pid"]), str(row["started"]), before, seen)
    except (ValueError, KeyError, TypeError, RecursionError):
        return Owner("", "", "", 0, "", (), seen)


def _is_alive(path: Path, owner: Owner) -> bool:
    """Whether the run is alive: by its process on this machine, else by whether it touches the file."""
    if owner.run and owner.machine == _machine():
        return _started(owner.pid) == owner.started
    end = time.monotonic() + (STALE_S if owner.run else EMPTY_S)
    while time.monotonic() < end:
        time.sleep(LOOK_S)
        found = _read(path)
        if found is not None and (found.run, found.seen) != (owner.run, owner.seen):
            return bool(found.run)
    return False


def _take_over(path: Path, dead: Owner, mine: Owner) -> Owner | None:
    """Replace a dead owner by this run; None if another run was first."""
    with _lock(path.parent):
        found = _read(path)
        if found is None or (found.run, found.seen) != (dead.run, dead.seen):
            return None
        before = (*dead.before, dead.run)[-KEPT_IDS:]
        heir = Owner(mine.run, mine.host, mine.machine, mine.pid, mine.started, before)
        write_whole(path, heir.encode().decode(), by=mine.run)
        return heir


@contextmanager
def _lock(directory: Path) -> Iterator[None]:
    """Hold the lock of a folder, if its file system has locks."""
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        with suppress(OSError):
            fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


def _machine() -> str:
    """The boot and the process namespace in which a process number is unique."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:  # no /proc: use the host name alone
        return socket.gethostname()


def _started(pid: int) -> str:
    """When the process with this number started, in ticks since the boot; "" if there is none, or it has ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return "" if fields[0] in "ZX" else fields[19]
    except OSError:
        if Path("/proc/self/stat").exists():
            return ""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return ""
    except PermissionError:
        pass
    return "alive"
