"""What every test runs under: one thread, fixed seeds, no process left behind."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import hypothesis
import psutil
import pytest
import torch

from tests.shared.pool import pool

hypothesis.settings.register_profile("suite", deadline=None, derandomize="CI" in os.environ)
hypothesis.settings.load_profile("suite")
# Ranks have one thread each; a serial reference with two would add in another order.
torch.set_num_threads(1)

# The two helpers that the standard library starts beside the ranks; both end with this process.
HELPERS = ("multiprocessing.forkserver", "multiprocessing.resource_tracker")


def children() -> dict[int, str]:
    """Processes below this one that are neither ranks of the pool nor helpers: pid to command line."""
    known = set(pool().pids())
    found = {}
    for child in psutil.Process().children(recursive=True):
        try:
            command = " ".join(child.cmdline())
            helper = any(name in command for name in HELPERS) and child.ppid() == os.getpid()
            if child.pid not in known and not helper and child.status() != psutil.STATUS_ZOMBIE:
                found[child.pid] = command
        except psutil.NoSuchProcess:
            continue  # gone by itself
    return found


@dataclass
class Look:
    """Who ran after the last test, where the next one begins: on the whole machine, and below this process."""

    everywhere: set[int]
    below: dict[int, str]

    def again(self) -> dict[int, str]:
        """Who is new below this process. Whom a process has below it takes 2 ms to find, all that there are 0.05 ms, so
        that is asked first: after most tests nobody is new."""
        before, self.everywhere = self.everywhere, set(psutil.pids())
        if self.everywhere <= before:
            self.below = {pid: command for pid, command in self.below.items() if pid in self.everywhere}
            return {}
        known, self.below = self.below, children()
        return {pid: command for pid, command in self.below.items() if pid not in known}


@pytest.fixture(scope="session")
def seen() -> Look:
    return Look(set(psutil.pids()), children())


@pytest.fixture(autouse=True)
def no_process_is_left_behind(seen: Look) -> Iterator[None]:
    yield
    left = seen.again()
    assert not left, f"the test left processes running: {left}"


@pytest.fixture(scope="session", autouse=True)
def ranks_end_with_the_session() -> Iterator[None]:
    yield
    pool().close()
    assert not children(), f"processes outlived the session: {children()}"


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Print what the compile gate has read, which is for people, where all is well too."""
    for report in terminalreporter.stats.get("passed", []):
        if report.capstdout and "test_kernels_compile" in report.nodeid:
            terminalreporter.section(report.nodeid.split("::")[1])
            terminalreporter.write(report.capstdout)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    gpu = [item for item in items if item.get_closest_marker("gpu")]
    config.hook.pytest_deselected(items=gpu)
    items[:] = [item for item in items if item not in gpu]
