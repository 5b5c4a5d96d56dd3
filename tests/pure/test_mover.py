"""A link copies in order, on its own thread, no faster than it is said to, and tells its failures to who waits."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from colossal_lite.memory.lane import LinkSpeed, ThreadLane
from colossal_lite.memory.mover import Link, Places


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


# ---- places for visitors ----


class Leaving:
    """A transfer by which a visitor leaves, after the one that brought it, and after what that has waited for."""

    def __init__(self, waited: set[Leaving]) -> None:
        self.before = waited


visitors = st.dictionaries(st.integers(0, 14), st.integers(1, 60), min_size=1)


@settings(max_examples=60)
@given(visitors, st.integers(2, 5))
def test_visitors_are_apart_while_they_are_there_and_come_when_whoever_was_in_their_place_has_left(
    sizes: dict[int, int], width: int
) -> None:
    """In rounds of turns: each comes `width - 2` turns before its own, and leaves in the one after it. What is used at
    once, at the most, is what is planned, and no less than any place could do with."""
    places = Places(sizes, width, torch.float32, torch.device("cpu"))
    spans = places._spans
    left: list[list[Leaving]] = [[] for _ in range(places.numel)]  # of each element, all who have left it
    waited: dict[int, set[Leaving]] = {}
    for _ in range(3):
        coming = sorted(sizes)
        for turn in range(15):
            while coming and coming[0] <= turn + width - 2:
                number = coming.pop(0)
                start, stop = spans[number]
                assert stop - start == sizes[number] and places.numel >= stop
                assert all(stop <= spans[n][0] or spans[n][1] <= start for n in waited), "two in one place"
                _, before = places.take(number)
                known: set[Any] = {*before}.union(*(each.before for each in before))  # type: ignore[attr-defined]
                assert known >= {leaving for element in left[start:stop] for leaving in element}
                waited[number] = known
            if turn in waited:
                gone = Leaving(waited.pop(turn))
                for element in left[slice(*spans[turn])]:
                    element.append(gone)
                places.give(turn, gone)  # type: ignore[arg-type]
    assert not waited
    window = max(sum(sizes.get(n + k, 0) for k in range(width)) for n in sizes)
    assert places.most_held_numel == places.planned_held_numel == window <= places.numel == places.most_numel
    assert places.numel <= sum(sizes.values())


def test_equal_visitors_in_a_row_take_as_many_places_as_there_are_of_them_at_once() -> None:
    for width in (2, 3, 5):
        places = Places(dict.fromkeys(range(20), 8), width, torch.float32, torch.device("cpu"))
        assert places.numel == width * 8 == places.planned_held_numel


def test_one_large_visitor_among_small_ones_has_one_large_place() -> None:
    """The embedding of a model: equal buffers would each be as large."""
    sizes = {0: 1000} | dict.fromkeys(range(1, 30), 10) | {30: 900}
    places = Places(sizes, 3, torch.float32, torch.device("cpu"))
    assert places.numel == 1000 + 2 * 10


def test_a_place_that_is_taken_is_given_to_nobody_else() -> None:
    places = Places({0: 4, 5: 4}, 3, torch.float32, torch.device("cpu"))
    places.take(0)
    with pytest.raises(AssertionError, match="5 comes to a place that is taken"):
        places.take(5)
