"""A link copies in order, on its own thread, no faster than it is said to, and tells its failures to who waits."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest
import torch

from colossal_lite.memory.lane import LinkSpeed, ThreadLane
from colossal_lite.memory.mover import Link


@pytest.fixture
def links() -> Iterator[list[Link]]:
    made: list[Link] = []
    yield made
    for link in made:
        link.close()


def test_copies_arrive_in_order_and_are_counted(links: list[Link]) -> None:
    link = Link("up", ThreadLane(LinkSpeed(latency_s=0.002)))
    links.append(link)
    slot, sources = torch.zeros(8), [torch.full((8,), float(i)) for i in range(5)]
    seen = []
    for transfer in [link.copy(slot, source) for source in sources]:
        transfer.wait()
        seen.append(float(slot[0]))
    assert seen == sorted(seen) and seen[-1] == 4.0
    assert link.moved_bytes == 5 * 8 * 4 and link.waited_s > 0


def test_a_copy_takes_as_long_as_the_link_needs(links: list[Link]) -> None:
    link = Link("up", ThreadLane(LinkSpeed(bandwidth_bytes_s=4e5, latency_s=0.01)))
    links.append(link)
    start = time.perf_counter()
    for transfer in [link.copy(torch.zeros(1000), torch.ones(1000)) for _ in range(3)]:
        transfer.wait()
    assert time.perf_counter() - start >= 3 * (0.01 + 4000 / 4e5)


def test_a_copy_waits_for_the_one_it_comes_after_on_another_link(links: list[Link]) -> None:
    """Else a slot is refilled while it is still emptied."""
    up, down = Link("up", ThreadLane()), Link("down", ThreadLane(LinkSpeed(latency_s=0.05)))
    links.extend((up, down))
    slot, host = torch.full((4,), 1.0), torch.zeros(4)
    gate = threading.Event()
    down._thread.submit(gate.wait, 10)
    out = down.copy(host, slot)
    into = up.copy(slot, torch.full((4,), 2.0), after=(out,))
    assert not into.is_handed and float(slot[0]) == 1.0
    gate.set()
    into.wait()
    assert float(host[0]) == 1.0 and float(slot[0]) == 2.0


def test_a_failed_copy_is_told_to_whoever_waits(links: list[Link]) -> None:
    link = Link("up", ThreadLane())
    links.append(link)
    transfer = link.copy(torch.zeros(4), torch.zeros(4))
    transfer.wait()
    broken = link._thread.submit(lambda: torch.zeros(2).copy_(torch.zeros(3)))
    with pytest.raises(RuntimeError, match="size"):
        broken.result(timeout=10)
    with pytest.raises(AssertionError):
        link.copy(torch.zeros(4), torch.zeros(5))


def test_a_link_that_is_closed_keeps_nobody_waiting(links: list[Link]) -> None:
    link = Link("up", ThreadLane(LinkSpeed(latency_s=60.0)))
    target = torch.zeros(4)
    transfer = link.copy(target, torch.ones(4))
    link.close()
    transfer.wait()
    assert float(target[0]) == 1.0
