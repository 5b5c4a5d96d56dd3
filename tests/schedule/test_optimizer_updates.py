"""Tests the order of updates and copies: all once, within their slots, nothing read before it is fetched."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from colossal_lite.schedule.checker import check
from colossal_lite.schedule.optimizer_updates import (
    ArenaWaits,
    ChunkPart,
    Crossing,
    Streaming,
    memory_of,
    run_of,
    update_plan,
)
from colossal_lite.schedule.plan import CPU, D2H, DISK, H2D, Action, ActionKind, Memory, Plan, PlanError
from colossal_lite.schedule.simulator import simulate


def memory(num_chunks: int, slots: int, host_slots: int | None = None) -> Memory:
    """Of state that rests on the host, or on disk where slots on the host are given."""
    chunks = [(0, c) for c in range(num_chunks)]
    return Memory(
        dict.fromkeys(chunks, "host" if host_slots is None else "disk"),
        {},
        sizes_bytes=dict.fromkeys(chunks, 1),
        budget_bytes={"device": slots} | ({} if host_slots is None else {"host": host_slots}),
    )


def test_the_plan_reads_as_it_runs() -> None:
    assert str(update_plan(3, ahead=1)) == (
        "0FETCH#0 0FETCH#1 0UPDATE#0 0EVICT#0 0FETCH#2 0UPDATE#1 0EVICT#1 0UPDATE#2 0EVICT#2"
    )
    assert str(update_plan(2)) == "0UPDATE#0 0UPDATE#1"
    assert str(update_plan(3, ahead=0, below=1)) == (
        "0FETCH#0@disk 0FETCH#1@disk 0FETCH#0 0UPDATE#0 0EVICT#0 0EVICT#0@disk "
        "0FETCH#2@disk 0FETCH#1 0UPDATE#1 0EVICT#1 0EVICT#1@disk "
        "0FETCH#2 0UPDATE#2 0EVICT#2 0EVICT#2@disk"
    )


@pytest.mark.parametrize("slots", range(2, 13))
def test_p3_every_chunk_is_updated_once_flushed_once_and_alone_in_its_slot(slots: int) -> None:
    """For all numbers of chunks, multiples of the number of slots among them."""
    for num_chunks in range(1, 13):
        plan = update_plan(num_chunks, ahead=slots - 2)
        for kind in (ActionKind.FETCH, ActionKind.UPDATE, ActionKind.EVICT):
            assert [a.chunk for a in plan[0] if a.kind is kind] == list(range(num_chunks))
        found = check(plan, memory=memory(num_chunks, slots))
        assert found.bytes[0]["device"] == min(num_chunks, slots - 1)
        for seconds in (COPIES_ARE_SLOW, UPDATES_ARE_SLOW):
            assert _is_alone(plan, seconds, memory(num_chunks, slots), slots)


def test_p3_goes_red_where_a_slot_is_not_waited_for() -> None:
    assert not _is_alone(update_plan(12, ahead=2), COPIES_ARE_SLOW, memory(12, 12), 3)


def _is_alone(plan: Plan, seconds: Mapping[ActionKind, float], memory: Memory, slots: int) -> bool:
    """Whether each chunk has left its slot when the next one comes there: slots are taken in turn, so the one of a
    chunk is then that of the chunk `slots` further on."""
    spans = simulate(plan, lambda action: seconds[action.kind], memory=memory).spans
    begins = {s.action.chunk: s.start_s for s in spans if s.action.kind is ActionKind.FETCH}
    ends = {s.action.chunk: s.end_s for s in spans if s.action.kind is ActionKind.EVICT}
    return all(ends[c] <= begins[c + slots] for c in range(len(ends) - slots))


COPIES_ARE_SLOW = {ActionKind.FETCH: 3.0, ActionKind.UPDATE: 1.0, ActionKind.EVICT: 4.0}
UPDATES_ARE_SLOW = {ActionKind.FETCH: 1.0, ActionKind.UPDATE: 3.0, ActionKind.EVICT: 0.5}


@pytest.mark.parametrize("stride", range(1, 13))
def test_p3_where_only_some_chunks_move_these_alone_are_fetched_and_all_are_flushed(stride: int) -> None:
    """Every stride-th of n, multiples of the stride among them: the last one moves, or none does."""
    for num_chunks in range(1, 13):
        moving = set(range(stride - 1, num_chunks, stride))
        plan = update_plan(num_chunks, ahead=1, moving=moving)
        assert [a.chunk for a in plan[0] if a.kind is ActionKind.UPDATE] == list(range(num_chunks))
        assert {a.chunk for a in plan[0] if a.kind is not ActionKind.UPDATE} == moving
        some = {(0, c): 1 for c in range(num_chunks)}
        homes = {key: "host" if key[1] in moving else "device" for key in some}
        stay = num_chunks - len(moving)
        check(plan, memory=Memory(homes, {}, some, budget_bytes={"device": stay + 3}))


# ---- updates on the host ----

CROSSINGS = {
    "weights beside whole masters": Crossing(),
    "weights that are masters": Crossing((ChunkPart.GRADIENT, ChunkPart.WEIGHTS)),
    "a gradient on the host": Crossing(()),
    "all on the host": Crossing((), up=False),
}


def test_the_plan_of_updates_on_the_host_reads_as_it_runs() -> None:
    """Of three chunks #3 to #5 are the gradients, #6 to #8 the weights."""
    on_host = dict.fromkeys(range(3), Crossing())
    assert str(update_plan(3, ahead=1, on_host=on_host)) == (
        "0EVICT#3 0UPDATE#0@cpu 0EVICT#4 0UPDATE#1@cpu 0FETCH#6 0EVICT#5 0UPDATE#2@cpu 0FETCH#7 0FETCH#8"
    )
    own = {0: CROSSINGS["weights that are masters"], 2: CROSSINGS["all on the host"]}
    assert str(update_plan(3, ahead=1, on_host=own)) == (
        "0FETCH#1 0EVICT#3 0EVICT#6 0UPDATE#0@cpu 0FETCH#6 0UPDATE#2@cpu 0UPDATE#1 0EVICT#1"
    )
    assert str(update_plan(2, ahead=1, below=0, on_host=dict.fromkeys(range(2), Crossing()))) == (
        "0FETCH#0@disk 0FETCH#1@disk 0EVICT#2 0UPDATE#0@cpu 0EVICT#3 0UPDATE#1@cpu 0FETCH#4 0EVICT#0@disk "
        "0FETCH#5 0EVICT#1@disk"
    )


ALL_STREAMED = Streaming((ChunkPart.WEIGHTS, ChunkPart.GRADIENT), (ChunkPart.WEIGHTS,))


def test_the_plan_says_what_is_copied_beside_records_for_updates_on_the_device() -> None:
    """Of two chunks #2 and #3 are the gradients, #4 and #5 the weights."""
    assert str(update_plan(2, ahead=1, streamed={0: Streaming((ChunkPart.GRADIENT,)), 1: ALL_STREAMED})) == (
        "0FETCH#0 0FETCH#2 0FETCH#1 0FETCH#5 0FETCH#3 0UPDATE#0 0EVICT#0 0UPDATE#1 0EVICT#1 0EVICT#5"
    )
    alone = {0: Streaming((), (ChunkPart.WEIGHTS,))}
    assert str(update_plan(2, ahead=1, moving=(), streamed=alone)) == "0UPDATE#0 0EVICT#4 0UPDATE#1"
    assert str(update_plan(2, ahead=1, streamed={1: ALL_STREAMED}, backward=True)) == (
        "0FETCH#1 0FETCH#5 0FETCH#3 0FETCH#0 0UPDATE#1 0EVICT#1 0EVICT#5 0UPDATE#0 0EVICT#0"
    )


@pytest.mark.parametrize(
    "left_out, fault",
    [
        ("1FETCH#5", "chunk 5 is not on the device"), ("1EVICT#9", "chunk 9 ends on"),
        ("1EVICT#5", "chunk 5 is not on the host"), ("1FETCH#9", "chunk 9 is not on the device"),
    ],
)  # fmt: skip
def test_a_run_that_leaves_out_a_copy_of_streamed_weights_or_gradients_is_refused(
    left_out: str, fault: str
) -> None:
    run, held = run_of(
        [[0], [1], [2], [3]],
        2,
        ahead=1,
        arena=ArenaWaits(prepares=0),
        streamed=dict.fromkeys(range(4), ALL_STREAMED),
    )
    check(run, memory=held)
    words = str(run).split()
    words.reverse()
    words.remove(left_out)  # the last one
    words.reverse()
    with pytest.raises(PlanError, match=fault):
        check(Plan.parse(" ".join(words)), memory=held)


AT_REST: dict[str, Any] = dict(
    ahead=1, early=True, gathers_ahead=1, gathers_again=True,
    on_host={1: Crossing((ChunkPart.GRADIENT,), up=False)},
    streamed={2: Streaming((ChunkPart.WEIGHTS,), (ChunkPart.WEIGHTS,))},
)  # fmt: skip
"""Chunk 1 is updated on the host and 2 on the device, and the weights of both rest on the host."""


def test_weights_at_rest_are_fetched_when_they_are_gathered_but_for_those_that_an_update_has_on_the_device() -> (
    None
):
    """`#13` and `#14` are the copies that forward and backward read."""
    run, held = run_of([[0], [1], [2], [3]], 2, **AT_REST)
    check(run, memory=held)
    words = str(run).split()
    assert " ".join(words[words.index("0B0") + 1 : words.index("0B1") + 1]) == (
        "1UPDATE0#1@cpu 0UPDATE0#0 0EVICT#0 2FETCH#2 2FETCH#10 3FETCH#3 1FETCH#13 1UNSHARD#13 0F1 "
        "2UPDATE0#2 2EVICT#2 2EVICT#10 2UNSHARD#14 1F1 3UPDATE0#3 3EVICT#3 1RESHARD#13 2F1 3F1 "
        "3B1 1FETCH#13 1UNSHARD#13 0FETCH#0 2B1 2RESHARD#14 1B1 1EVICT#5 1RESHARD#13 0B1"
    )


@pytest.mark.parametrize(
    "word, to, fault",
    [
        ("1UPDATE0#1@cpu", "0F1", "was gathered before the update"), ("2UPDATE0#2", "1F1", "was gathered before"),
        ("2EVICT#10", None, "chunk 10 is stale on the host"),
        ("1FETCH#13", None, "the shard of chunk 13 is on the host"),
    ],
)  # fmt: skip
def test_a_gather_of_weights_at_rest_before_their_update_is_refused(
    word: str, to: str | None, fault: str
) -> None:
    run, held = run_of([[0], [1], [2], [3]], 2, **AT_REST)
    words = str(run).split()
    words.remove(word)
    if to is not None:
        words.insert(words.index(to), word)
    with pytest.raises(PlanError, match=fault):
        check(Plan.parse(" ".join(words)), memory=held)


RETURNING: dict[str, Any] = dict(ahead=0, micro_batches=2, returning=[1])
"""The sums of chunk 1 are on the host between two micro-batches. Its number as a gradient is 3."""


def test_earlier_sums_come_back_behind_the_last_backward_of_their_unit_and_stay_for_its_update() -> None:
    run, held = run_of([[0], [1]], 1, **RETURNING)
    check(run, memory=held)
    assert str(run) == (
        "0F0 1F0 0FETCH#0 1B0 1EVICT#3 0B0 t1:0F0 t1:1F0 t1:1B0 1FETCH1#3 t1:0B0 "
        "0UPDATE0#0 0EVICT#0 1FETCH#1 1UPDATE0#1 1EVICT#1"
    )
    made = simulate(run, lambda action: 1.0 if action.chunk == 3 else 0.0, memory=held)
    start_s = {str(span.action): span.start_s for span in made.spans}
    assert (start_s["1FETCH1#3"], start_s["t1:0B0"]) == (1.0, 2.0), "backward goes on when they are added"
    alone, _ = run_of([[0], [1]], 1, **RETURNING | dict(micro_batches=1))
    assert "#3" not in str(alone), "one micro-batch has no earlier sums"


def test_sums_come_back_while_those_of_other_units_still_leave() -> None:
    """The end of a backward waits for these, and what comes back is before it."""
    run, held = run_of(
        [[0], [1]],
        1,
        ahead=0,
        micro_batches=2,
        returning=[0],
        streamed={1: Streaming((ChunkPart.GRADIENT,), ())},
    )
    check(run, memory=held)
    seconds = {"1EVICT1#3": 5.0, "0FETCH1#2": 1.0}
    made = simulate(run, lambda action: seconds.get(str(action), 0.0), memory=held)
    spans = {str(span.action): (span.start_s, span.end_s) for span in made.spans}
    assert (spans["1EVICT1#3"], spans["0FETCH1#2"]) == ((0.0, 5.0), (0.0, 1.0))
    assert spans["0UPDATE0#0"][0] == 5.0, "the step is over when all have left"


@pytest.mark.parametrize(
    "left_out, fault",
    [("1EVICT#3", "chunk 3 is already on the device"), ("1FETCH1#3", "chunk 3 is not on the device")],
)
def test_a_run_that_leaves_out_a_move_of_sums_that_return_is_refused(left_out: str, fault: str) -> None:
    run, held = run_of([[0], [1]], 1, **RETURNING)
    words = [word for word in str(run).split() if word != left_out]
    with pytest.raises(PlanError, match=fault):
        check(Plan.parse(" ".join(words)), memory=held)


@pytest.mark.parametrize("crossing", CROSSINGS)
@pytest.mark.parametrize("below", [None, 0, 1])
@pytest.mark.parametrize("stride", range(1, 6))
def test_p3_every_kth_chunk_on_the_device_and_the_others_on_the_host_within_their_slots(
    stride: int, below: int | None, crossing: str
) -> None:
    """A stride of 1 leaves all on the device; of more than there are chunks, none."""
    for num_chunks in range(1, 5):
        for ahead in (0, 1, 2):
            on_host = {c: CROSSINGS[crossing] for c in range(num_chunks) if c % stride != stride - 1}
            plan = update_plan(num_chunks, ahead=ahead, below=below, on_host=on_host)
            updated = [a.chunk or 0 for a in plan[0] if a.kind is ActionKind.UPDATE]
            assert sorted(updated) == list(range(num_chunks))
            assert {a.chunk for a in plan[0] if (a.kind, a.resource) == (ActionKind.UPDATE, CPU)} == {
                *on_host
            }
            assert {a.chunk for a in plan[0] if (a.kind, a.resource) == (ActionKind.FETCH, H2D)} == {
                *(c for c in range(num_chunks) if c not in on_host),
                *(ChunkPart.WEIGHTS.of(c, num_chunks) for c in on_host if on_host[c].up),
            }
            memory = memory_of(num_chunks, ahead=ahead, below=below, on_host=on_host)
            check(plan, memory=memory)
            for number, action in enumerate(plan[0]):
                if action.kind is not ActionKind.UPDATE:
                    fewer = (*plan[0][:number], *plan[0][number + 1 :])
                    with pytest.raises(PlanError):
                        check(Plan((fewer,)), memory=memory)


def test_updates_on_the_host_take_what_the_slowest_lane_takes_and_one_fill_and_drain() -> None:
    n, on_host = 10, dict.fromkeys(range(10), Crossing())
    for down_s, update_s, up_s in [(3.0, 1.0, 1.0), (1.0, 3.0, 1.0), (1.0, 1.0, 3.0)]:
        seconds = {ActionKind.EVICT: down_s, ActionKind.UPDATE: update_s, ActionKind.FETCH: up_s}
        made = simulate(
            update_plan(n, ahead=1, on_host=on_host), lambda a, s=seconds: s[a.kind],
            memory=memory_of(n, ahead=1, on_host=on_host),
        )  # fmt: skip
        assert made.makespan_s == down_s + update_s + up_s + (n - 1) * 3.0


@pytest.mark.parametrize("num_chunks", [1, 2, 3, 5, 9])
@pytest.mark.parametrize("ahead", [0, 1, 2])
@pytest.mark.parametrize("below", [0, 1, 2])
def test_state_on_disk_is_there_again_in_its_newest_version(num_chunks: int, ahead: int, below: int) -> None:
    plan = update_plan(num_chunks, ahead=ahead, below=below)
    found = check(plan, memory=memory(num_chunks, ahead + 2, below + 3))
    assert found.bytes[0] == {
        "disk": num_chunks,
        "host": min(num_chunks, below + 1),
        "device": min(num_chunks, ahead + 1),
    }
    reads = [a.chunk for a in plan[0] if (a.kind, a.resource) == (ActionKind.FETCH, DISK)]
    writes = [a.chunk for a in plan[0] if (a.kind, a.resource) == (ActionKind.EVICT, DISK)]
    assert reads == writes == list(range(num_chunks))


@pytest.mark.parametrize(
    "without",
    [(ActionKind.FETCH, DISK), (ActionKind.EVICT, DISK), (ActionKind.FETCH, H2D), (ActionKind.EVICT, D2H)],
)
def test_a_plan_that_leaves_out_one_way_of_a_record_is_refused(without: tuple[ActionKind, str]) -> None:
    (actions,) = update_plan(4, ahead=1, below=1)
    fewer = tuple(a for a in actions if a.chunk != 2 or (a.kind, a.resource) != without)
    with pytest.raises(PlanError):
        check(Plan((fewer,)), memory=memory(4, 3, 4))


def test_a_plan_that_forgets_to_take_the_last_chunk_back_is_refused() -> None:
    (actions,) = update_plan(4, ahead=1)
    with pytest.raises(PlanError, match="must end on host"):
        check(Plan((actions[:-1],)), memory=memory(4, 3))


def test_a_plan_that_updates_before_the_state_is_there_is_refused() -> None:
    (actions,) = update_plan(4, ahead=1)
    without = tuple(a for a in actions if (a.kind, a.chunk) != (ActionKind.FETCH, 2))
    with pytest.raises(PlanError):
        check(Plan((without,)), memory=memory(4, 3))


@pytest.mark.parametrize(("copy_s", "update_s"), [(1.0, 3.0), (3.0, 1.0), (2.0, 2.0)])
def test_a_step_takes_what_the_slower_of_link_and_update_takes_and_one_fill_and_drain(
    copy_s: float, update_s: float
) -> None:
    """Both directions of the link at once: the bound is max(n copies, n updates), plus the first copy and the last."""

    def seconds(action: Action) -> float:
        return update_s if action.kind is ActionKind.UPDATE else copy_s

    n = 10
    makespan_s = simulate(update_plan(n, ahead=1), seconds, memory=memory(n, 3)).makespan_s
    slower, faster = max(copy_s, update_s), min(copy_s, update_s)
    assert (
        n * slower + 2 * copy_s - copy_s * (copy_s > update_s) <= makespan_s <= (n + 2) * slower + 2 * faster
    )


@pytest.mark.parametrize(
    ("disk_s", "copy_s", "update_s"), [(3.0, 1.0, 1.0), (1.0, 3.0, 1.0), (1.0, 1.0, 3.0), (2.0, 2.0, 2.0)]
)
def test_with_the_disk_a_step_takes_what_the_slowest_takes_and_one_fill_and_drain(
    disk_s: float, copy_s: float, update_s: float
) -> None:
    """A disk that reads and writes by turns is one resource, so its share is both."""

    def seconds(action: Action) -> float:
        return {ActionKind.UPDATE: update_s}.get(action.kind, disk_s if action.resource == DISK else copy_s)

    n = 12
    made = simulate(update_plan(n, ahead=1, below=1), seconds, memory=memory(n, 3, 4))
    slowest = n * max(2 * disk_s, copy_s, update_s)
    assert slowest <= made.makespan_s <= slowest + 3 * (2 * disk_s + 2 * copy_s + update_s)


def test_updates_within_backward_go_the_way_of_gradients_and_their_records_too() -> None:
    (plain,) = update_plan(3, backward=True)
    assert [str(action) for action in plain] == ["0UPDATE#2", "0UPDATE#1", "0UPDATE#0"]
    (forward,), (turned,) = update_plan(5, ahead=1, below=1), update_plan(5, ahead=1, below=1, backward=True)
    assert [(a.kind, a.resource, 4 - (a.chunk or 0)) for a in turned] == [
        (a.kind, a.resource, a.chunk) for a in forward
    ]
    (some,) = update_plan(3, ahead=1, moving={0}, backward=True)
    assert {a.chunk for a in some if a.kind is not ActionKind.UPDATE} == {0}


SOME = [set[int](), {0}, {3}, {8}, {0, 8}, {1, 2}, {0, 4, 8}, {1, 4, 7}, {0, 1, 2, 5, 6, 8}, set(range(9))]


@pytest.mark.parametrize("crossing", [None, *CROSSINGS])
@pytest.mark.parametrize("on_disk", SOME, ids=str)
def test_p3_where_some_records_rest_on_disk_these_alone_pass_and_all_are_there_again(
    on_disk: set[int], crossing: str | None
) -> None:
    """Within the slots of those alone, however far apart they are; and every action is needed."""
    on_host = {} if crossing is None else dict.fromkeys(range(0, 9, 2), CROSSINGS[crossing])
    for ahead in (0, 1, 2):
        for below in (0, 1, 2):
            plan = update_plan(9, ahead=ahead, below=below, on_disk=on_disk, on_host=on_host)
            reads = [a.chunk for a in plan[0] if (a.kind, a.resource) == (ActionKind.FETCH, DISK)]
            writes = [a.chunk for a in plan[0] if (a.kind, a.resource) == (ActionKind.EVICT, DISK)]
            assert reads == writes == sorted(on_disk)
            memory = memory_of(9, ahead=ahead, below=below, on_disk=on_disk, on_host=on_host)
            check(plan, memory=memory)
    for number, action in enumerate(plan[0]):
        if action.resource == DISK:
            with pytest.raises(PlanError):
                check(Plan(((*plan[0][:number], *plan[0][number + 1 :]),)), memory=memory)


def test_records_on_disk_are_read_when_those_before_them_have_their_turn() -> None:
    """The chunks between them are what a slow disk hides behind."""
    assert str(update_plan(7, ahead=1, below=1, on_disk={1, 4, 6})) == (
        "0FETCH#1@disk 0FETCH#4@disk 0FETCH#0 0FETCH#1 0UPDATE#0 0EVICT#0 "
        "0FETCH#6@disk 0FETCH#2 0UPDATE#1 0EVICT#1 0EVICT#1@disk 0FETCH#3 0UPDATE#2 0EVICT#2 "
        "0FETCH#4 0UPDATE#3 0EVICT#3 0FETCH#5 0UPDATE#4 0EVICT#4 0EVICT#4@disk "
        "0FETCH#6 0UPDATE#5 0EVICT#5 0UPDATE#6 0EVICT#6 0EVICT#6@disk"
    )
    seconds = {ActionKind.FETCH: 0.1, ActionKind.EVICT: 0.1, ActionKind.UPDATE: 1.0}
    for stride, hides in ((1, False), (2, False), (5, True)):
        some = set(range(0, 20, stride))
        made = simulate(
            update_plan(20, ahead=1, below=1, on_disk=some),
            lambda a: 2.4 if a.resource == DISK else seconds[a.kind],
            memory=memory_of(20, ahead=1, below=1, on_disk=some),
        )
        assert (made.makespan_s < 20 + 6 * 2.4) == hides, (
            "every fifth is read and written in the time of five"
        )
