"""Reads from the kernel's process table whether the process of a rank on this host has died or is stopped.

Linux only. Of ranks on other hosts, or in other containers of this one, nothing is known.
"""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class ProcessCard:
    """A process among those of all hosts. Plain values: it goes through the store as JSON."""

    host: str
    """Equal for processes that see one table of processes; empty where there is none."""
    pid: int
    started: int
    """When it was started, in ticks since boot: process numbers are used again."""

    @classmethod
    def own(cls) -> ProcessCard:
        """That of this process."""
        pid = os.getpid()
        _, started = _read(pid)
        return cls(_host(), pid, started)

    def end(self) -> str:
        """`has died` or `is stopped`; empty if it lives, or if this cannot be known here."""
        if not self.host or self.host != _host():
            return ""
        state, started = _read(self.pid)
        if started != self.started or state in "ZX":
            return "has died"
        return "is stopped" if state in "Tt" else ""


def _host() -> str:
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text()
        return hashlib.sha256(f"{boot}{os.stat('/proc/self/ns/pid').st_ino}".encode()).hexdigest()[:16]
    except OSError:
        return ""


def _read(pid: int) -> tuple[str, int]:
    """State and start of a process, as proc(5) has them in fields 3 and 22; ("X", 0) if there is none."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return "X", 0
    return fields[0], int(fields[19])
