"""Tests links: copies run in order, on a thread of their own, at the set speed; errors reach the waiting thread."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from colossal_lite.memory import link as link_module
from colossal_lite.memory.arena import ArenaAllocator
from colossal_lite.memory.copy_streams import LinkSpeed, StreamExecutor, ThreadExecutor
from colossal_lite.memory.link import Link, Transfer
from colossal_lite.schedule.interval_packing import visits
from tests.shared.held_at_once import held_at_once, planned_at_once
from tests.shared.streams import Recorder


@pytest.fixture
def links() -> Iterator[list[Link]]:
    made: list[Link] = []
    yield made
    for link in made:
        link.close()


def test_copies_arrive_in_order_and_are_counted(links: list[Link]) -> None:
    link = Link("up", ThreadExecutor(LinkSpeed(latency_s=0.002)))
    links.append(link)
    slot, sources = torch.zeros(8), [torch.full((8,), float(i)) for i in range(5)]
    seen = []
    for transfer in [link.copy(slot, source) for source in sources]:
        transfer.wait()
        seen.append(float(slot[0]))
    assert seen == sorted(seen) and seen[-1] == 4.0
    assert link.moved_bytes == 5 * 8 * 4 and link.waited_s > 0


def test_a_copy_takes_as_long_as_the_link_needs(links: list[Link]) -> None:
    link = Link("up", ThreadExecutor(LinkSpeed(bandwidth_bytes_s=4e5, latency_s=0.01)))
    links.append(link)
    start = time.perf_counter()
    for transfer in [link.copy(torch.zeros(1000), torch.ones(1000)) for _ in range(3)]:
        transfer.wait()
    assert time.perf_counter() - start >= 3 * (0.01 + 4000 / 4e5)


def test_a_copy_waits_for_the_one_it_comes_after_on_another_link(links: list[Link]) -> None:
    """Else a slot is refilled while it is still emptied."""
    up, down = Link("up", ThreadExecutor()), Link("down", ThreadExecutor(LinkSpeed(latency_s=0.05)))
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
    link = Link("up", ThreadExecutor())
    links.append(link)
    transfer = link.copy(torch.zeros(4), torch.zeros(4))
    transfer.wait()
    broken = link._thread.submit(lambda: torch.zeros(2).copy_(torch.zeros(3)))
    with pytest.raises(RuntimeError, match="size"):
        broken.result(timeout=10)
    with pytest.raises(AssertionError):
        link.copy(torch.zeros(4), torch.zeros(5))


def test_a_link_that_is_closed_keeps_nobody_waiting(links: list[Link]) -> None:
    link = Link("up", ThreadExecutor(LinkSpeed(latency_s=60.0)))
    target = torch.zeros(4)
    transfer = link.copy(target, torch.ones(4))
    link.close()
    transfer.wait()
    assert float(target[0]) == 1.0


def test_a_link_whose_copy_does_not_end_is_closed_and_says_so() -> None:
    gate, link = threading.Event(), Link("up", ThreadExecutor(), timeout_s=0.1)
    link.run(lambda: gate.wait(60), 8)
    queued = link.run(lambda: None, 8)
    with pytest.warns(UserWarning, match="over the link up has not ended in 0.1 s.* is left behind"):
        link.close()
    gate.set()
    link._thread.shutdown()
    assert not queued.is_handed, "nothing that was still to come is begun"


def test_a_copy_that_was_interrupted_is_over_for_whoever_waits_or_closes() -> None:
    def interrupted() -> None:
        raise KeyboardInterrupt("planted")

    link = Link("up", ThreadExecutor(), timeout_s=60.0)
    transfer = link.run(interrupted, 8)
    start = time.monotonic()
    with pytest.raises(KeyboardInterrupt, match="planted"):
        transfer.finish()
    link.close()
    assert time.monotonic() - start < 30.0


def test_an_interrupt_of_who_asks_for_a_copy_on_a_stream_is_raised_there_and_the_link_goes_on() -> None:
    def interrupted() -> None:
        raise KeyboardInterrupt("planted")

    link = Link("up", StreamExecutor(torch.device("cuda", 0), Recorder()))
    with pytest.raises(KeyboardInterrupt, match="planted"):
        link.run(interrupted, 8)
    after = link.run(lambda: None, 8)
    after.finish()
    link.close()


# ---- who goes first ----


class Held:
    """Links whose copies note that they ran, and do so only when `let` has been called."""

    def __init__(self, *names: str) -> None:
        self.ran: list[object] = []
        self._gate = threading.Event()
        self.links = {name: Link(name, ThreadExecutor(), timeout_s=10.0) for name in names}
        for link in self.links.values():
            link._thread.submit(self._gate.wait, 10)

    def ask(self, link: str, what: object, **more: Any) -> Transfer:
        return self.links[link].run(lambda: self.ran.append(what), 8, **more)

    def let(self) -> None:
        self._gate.set()

    def close(self) -> list[object]:
        self.let()
        for link in self.links.values():
            link.drain()
            link.close()
        return self.ran


AHEAD: dict[str, Any] = dict(prefetch=True)


def test_demanded_copies_go_before_prefetches_and_each_keep_their_order() -> None:
    held = Held("up")
    for what in ("p1", "d1", "p2", "d2", "p3"):
        held.ask("up", what, prefetch=what[0] == "p")
    assert held.close() == ["d1", "d2", "p1", "p2", "p3"]


def test_a_demanded_copy_that_waits_for_another_link_lets_only_older_prefetches_pass() -> None:
    held, down = Held("up"), Held("down")
    out = down.ask("down", "out")
    older = held.ask("up", "older", **AHEAD)
    into = held.ask("up", "into", after=(out,))
    younger = held.ask("up", "younger", **AHEAD)
    held.let()
    assert older.handed() is None
    assert held.ran == ["older"] and not into.is_handed and not younger.is_handed
    down.let()
    assert held.close() == ["older", "into", "younger"] and down.close() == ["out"]


def test_a_demanded_copy_that_comes_later_passes_a_prefetch_that_the_thread_waits_for() -> None:
    held = Held("down")
    out = held.ask("down", "out")
    up = Link("up", ThreadExecutor(), timeout_s=10.0)
    waiting = up.run(lambda: None, 0, after=(out,), prefetch=True)
    start = time.monotonic()
    while not up._waits and time.monotonic() - start < 5.0:
        time.sleep(0.001)
    assert up._waits
    demanded = up.run(lambda: None, 0)
    demanded.handed()
    assert not waiting.is_handed and time.monotonic() - start < 5.0
    assert held.close() == ["out"]
    up.close()


def test_who_waits_for_a_prefetch_puts_it_and_what_it_comes_after_in_demand_over_every_link() -> None:
    held = Held("read", "up")
    reads = [held.ask("read", f"read {i}", **AHEAD) for i in range(4)]
    ups = [held.ask("up", f"up {i}", after=(read,), **AHEAD) for i, read in enumerate(reads)]
    waits = threading.Thread(target=ups[2].finish)
    waits.start()
    while ups[2].is_prefetch or reads[2].is_prefetch:
        assert waits.is_alive() and threading.active_count()
    held.let()
    waits.join(10)
    assert "up 2" in held.ran
    ran = held.close()
    assert [what for what in ran if str(what).startswith("read")] == ["read 2", "read 0", "read 1", "read 3"]
    assert sorted(ran, key=str) == sorted(
        (f"{link} {i}" for link in ("read", "up") for i in range(4)), key=str
    )


def test_a_copy_that_is_revoked_is_not_made_nor_counted_and_its_buffer_waits_for_what_it_came_after() -> None:
    held = Held("up", "down")
    out = held.ask("down", "out")
    into = held.ask("up", "into", after=(out,), **AHEAD)
    again = held.ask("up", "again", after=(into,))
    assert into.revoke() and not into.revoke() and into.is_handed
    assert held.links["up"].moved_bytes == 8, "of one copy"
    assert list(again.after[0].roots()) == [out] and not again.is_handed
    held.let()
    into.finish()  # nothing more than what it came after
    assert "out" in held.ran
    again.finish()
    assert not again.revoke() and held.close() == ["out", "again"]


def test_a_copy_that_has_begun_cannot_be_revoked() -> None:
    held = Held("up")
    begun, go_on = threading.Event(), threading.Event()
    transfer = held.links["up"].run(lambda: (begun.set(), go_on.wait(10)), 8, **AHEAD)
    held.let()
    assert begun.wait(10) and not transfer.revoke()
    go_on.set()
    assert held.close() == [] and held.links["up"].moved_bytes == 8


def test_what_a_stream_was_handed_cannot_be_revoked() -> None:
    recorder = Recorder()
    with recorder.active():
        link = Link("up", StreamExecutor(torch.device("cpu"), recorder))
        at_once = link.copy(torch.zeros(4), torch.ones(4), **AHEAD)
        assert at_once.is_handed and not at_once.revoke()
        gate = threading.Event()
        other = Link("read", ThreadExecutor())
        read = other.run(lambda: gate.wait(10), 0)
        waits = link.copy(torch.zeros(4), torch.ones(4), after=(read,), **AHEAD)
        assert waits.revoke() and link.moved_bytes == 16
        gate.set()
        for each in (link, other):
            each.close()


def test_who_waits_for_too_long_for_another_link_is_told_which() -> None:
    held = Held("down")
    out = held.ask("down", "out")
    up = Link("up", ThreadExecutor(), timeout_s=0.1)
    into = up.run(lambda: None, 0, after=(out,))
    with pytest.raises(TimeoutError, match="link (down has not ended in 10|up has not ended in 0.1) s"):
        into.finish()
    up.close()
    assert held.close() == ["out"]


class EndsUnseen(Transfer):
    """Has not ended when a link's thread has asked for both of its next copies, and has right after."""

    asked = 0

    @property
    def is_handed(self) -> bool:
        ended = super().is_handed
        if not ended and threading.current_thread() is not threading.main_thread():
            self.asked += 1
            if self.asked == 2:
                self._hand()
        return ended


def test_a_copy_whose_predecessor_ends_while_it_is_looked_at_begins(links: list[Link]) -> None:
    """Else nobody wakes the thread, as it once happened on a busy machine."""
    other, link = Link("down", ThreadExecutor()), Link("up", ThreadExecutor(), timeout_s=5.0)
    links += [other, link]
    before = EndsUnseen(other, lambda: None, (), False, 0)
    start = time.monotonic()
    copy = link.run(lambda: None, 0, after=(before,))
    copy.handed()
    assert before.is_handed and time.monotonic() - start < 2.5, "not at the end of the link's time"


def test_a_copy_that_was_made_keeps_neither_its_tensors_nor_the_copies_before_it() -> None:
    link, source = Link("up", ThreadExecutor()), torch.ones(4)
    first = link.copy(torch.zeros(4), source)
    last = link.copy(torch.zeros(4), source, after=(first,))
    last.finish()
    link.drain()
    seen = weakref.ref(source), weakref.ref(first)
    del source, first
    gc.collect()
    assert [each() for each in seen] == [None, None] and last.is_handed
    link.close()


@dataclass(frozen=True)
class Asked:
    """One copy of a random graph: its link, what it comes after, how it is asked for, and what becomes of it."""

    link: int
    after: tuple[int, ...]
    is_prefetch: bool
    fate: str
    pause: int


@st.composite
def graphs(draw: st.DrawFn) -> list[Asked]:
    made: list[Asked] = []
    for number in range(draw(st.integers(2, 24))):
        after = draw(st.sets(st.integers(0, number - 1), max_size=3)) if number else set()
        is_prefetch = draw(st.booleans())
        fate = draw(st.sampled_from(["left", "left", "waited for", "revoked", "expedited"]))
        made.append(Asked(draw(st.integers(0, 2)), tuple(after), is_prefetch, fate, draw(st.integers(0, 3))))
    return made


def assert_runs_by_the_rules(graph: list[Asked], timeout_s: float) -> None:
    """Ask for all copies of a graph, act on them by other threads meanwhile, and hold what ran against the rules."""
    links = [Link(str(number), ThreadExecutor(), timeout_s=timeout_s) for number in range(3)]
    lock, began, ended_ = threading.Lock(), list[int](), set[int]()
    transfers: list[Transfer] = []
    revoked: set[int] = set()

    def work(number: int, asked: Asked) -> None:
        with lock:
            began.append(number)
            missing = {i for i in before(number) if i not in ended_ and i not in revoked}
        assert not missing, f"{number} began before {missing}"
        time.sleep(asked.pause * 2e-4)
        with lock:
            ended_.add(number)

    def before(number: int) -> set[int]:
        """What it comes after that moves anything."""
        found = set[int]()
        for each in graph[number].after:
            found |= before(each) if transfers[each].is_revoked else {each}
        return found

    def act(number: int, asked: Asked) -> None:
        if asked.fate == "revoked":
            if transfers[number].revoke():
                revoked.add(number)
        elif asked.fate == "expedited":
            transfers[number].expedite()
        elif asked.fate == "waited for":
            transfers[number].finish()

    with ThreadPoolExecutor(4) as pool:
        acts = []
        for number, asked in enumerate(graph):
            after = [transfers[each] for each in asked.after]
            transfers.append(
                links[asked.link].run(
                    partial(work, number, asked), 1, after=after, prefetch=asked.is_prefetch
                )
            )
            acts.append(pool.submit(act, number, asked))
        for each in acts:
            each.result(timeout=20)
    for transfer in transfers:
        transfer.finish()
    for link in links:
        link.drain()
        link.close()
    assert sorted([*began, *revoked]) == list(range(len(graph))), "each once, or revoked"
    assert sum(link.moved_bytes for link in links) == len(graph) - len(revoked)
    place = {number: at for at, number in enumerate(began)}
    for number, asked in enumerate(graph):
        for older in range(number):
            if {number, older} & revoked or graph[older].link != asked.link:
                continue
            if not graph[older].is_prefetch:  # nothing goes before what was in demand when it came
                assert place[older] < place[number], "an older demanded copy was overtaken"


@settings(max_examples=60, deadline=None)
@given(graphs())
def test_random_graphs_of_copies_over_three_links_come_to_their_end_by_the_rules(graph: list[Asked]) -> None:
    assert_runs_by_the_rules(graph, 10.0)


@pytest.mark.parametrize("is_planted", [False, True])
def test_a_link_that_begins_what_still_waits_waits_in_a_circle_and_ours_does_not(is_planted: bool) -> None:
    up, down, ends = Held("up"), Link("down", ThreadExecutor()), threading.Event()

    def waits(self: Link, work: Any, size_bytes: int, after: Any, *more: Any) -> None:
        while not ends.is_set() and not all(transfer.is_handed for transfer in after):
            time.sleep(1e-3)
        work()

    def until(is_so: Callable[[], bool]) -> None:
        end_s = time.monotonic() + 10.0
        while not is_so():
            assert time.monotonic() < end_s
            time.sleep(1e-3)

    faults = (
        (
            patch.object(link_module, "_missing", lambda transfer: iter(())),
            patch.object(Link, "_begin", waits),
        )
        if is_planted
        else (nullcontext(), nullcontext())
    )
    with faults[0], faults[1]:
        first = up.ask("up", "first", **AHEAD)
        second = down.run(lambda: up.ran.append("second"), 8, after=(first,), **AHEAD)
        if is_planted:
            until(lambda: not down._queue)
        third = down.run(lambda: up.ran.append("third"), 8)
        fourth = up.ask("up", "fourth", after=(third,))
        up.let()
        if is_planted:  # each has begun one that waits for what stands behind the other's
            until(lambda: up.links["up"]._queue == {first: None})
            assert down._queue == {third: None} and not second.is_handed and not fourth.is_handed
            ends.set()
        up.close()
        down.drain()
        down.close()
    assert sorted(map(str, up.ran)) == ["first", "fourth", "second", "third"]


# ---- places for visitors ----


class Leaving:
    """A transfer by which a visitor leaves, after the one that brought it, and after what that has waited for."""

    def __init__(self, waited: set[Leaving]) -> None:
        self.before = waited


def places_of(sizes: dict[int, int], width: int) -> ArenaAllocator:
    """For visitors of so many elements."""
    stays = visits({number: 4 * size for number, size in sizes.items()}, width)
    return ArenaAllocator(stays, torch.float32, torch.device("cpu"))


visitors = st.dictionaries(st.integers(0, 14), st.integers(1, 60), min_size=1)


@settings(max_examples=60)
@given(visitors, st.integers(2, 5))
def test_visitors_are_apart_while_they_are_there_and_come_when_whoever_was_in_their_place_has_left(
    sizes: dict[int, int], width: int
) -> None:
    """In rounds of turns: each comes `width - 2` turns before its own, and leaves in the one after it. What is used at
    once, at the most, is what is planned, and no less than any place could do with."""
    places = places_of(sizes, width)
    arena = places._arena
    assert arena is not None
    spans = {number: tuple(at // 4 for at in arena.span(("visitors", number))) for number in sizes}
    left: list[list[Leaving]] = [
        [] for _ in range(places.planned_bytes // 4)
    ]  # of each element, all who have left it
    waited: dict[int, set[Leaving]] = {}
    with held_at_once() as held:
        for _ in range(3):
            coming = sorted(sizes)
            for turn in range(15):
                while coming and coming[0] <= turn + width - 2:
                    number = coming.pop(0)
                    start, stop = spans[number]
                    assert stop - start == sizes[number] and places.planned_bytes >= 4 * stop
                    assert all(stop <= spans[n][0] or spans[n][1] <= start for n in waited), (
                        "two in one place"
                    )
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
    assert held[places] == planned_at_once(places) == held[arena] == 4 * window
    assert 4 * window <= places.planned_bytes == places.most_bytes == arena.most_bytes
    assert places.planned_bytes <= 4 * sum(sizes.values())


def test_equal_visitors_in_a_row_take_as_many_places_as_there_are_of_them_at_once() -> None:
    for width in (2, 3, 5):
        places = places_of(dict.fromkeys(range(20), 8), width)
        assert places.planned_bytes == 4 * width * 8 == planned_at_once(places)


def test_one_large_visitor_among_small_ones_has_one_large_place() -> None:
    """The embedding of a model: equal buffers would each be as large."""
    sizes = {0: 1000} | dict.fromkeys(range(1, 30), 10) | {30: 900}
    places = places_of(sizes, 3)
    assert places.planned_bytes == 4 * (1000 + 2 * 10)


def test_a_place_that_is_taken_is_given_to_nobody_else() -> None:
    places = places_of({0: 4, 5: 4}, 3)
    places.take(0)
    with pytest.raises(AssertionError, match="5 comes to a place that is taken"):
        places.take(5)


def test_each_thread_of_a_link_sets_the_device_that_it_copies_for() -> None:
    """Else leaving a stream would set device 0 there, and each other rank would hold memory on it."""
    recorder, device = Recorder(), torch.device("cuda", 1)
    link = Link("up", StreamExecutor(device, recorder))
    link._thread.submit(link._turns).result(timeout=10)
    link._teller.submit(link._turns).result(timeout=10)
    link.close()
    assert {name.rpartition("_")[0]: found for name, found in recorder.devices.items()} == {
        "link-up": device, "link-up-ends": device
    }  # fmt: skip
