"""Tests what a rank holds and has in flight, as computed from its list, against lists worked out by hand."""

from __future__ import annotations

import pytest

from colossal_lite.schedule.footprint import IN_FLIGHT, StageCost, Walk, most_arrivals, most_unread
from colossal_lite.schedule.pipeline_schedules import generate
from colossal_lite.schedule.plan import SENDS, Action, ActionKind, Plan
from colossal_lite.schedule.step_passes import add_messages

PEAKS = {ActionKind.F: 70, ActionKind.B: 90, ActionKind.I: 80, ActionKind.W: 65}
COST = StageCost(ended=60, kept=50, waiting=40, peaks=PEAKS, logits=0, sent=10)


def one_each(action: Action) -> int:
    return 1


@pytest.mark.parametrize(
    ("name", "chunks", "blocking", "ahead"),
    [("gpipe", 1, [1, 4], [2, 4]), ("1f1b", 1, [1, 2], [1, 2]), ("interleaved", 2, [3, 5], [3, 7])],
)
def test_slots_are_the_messages_from_receive_to_the_last_compute(
    name: str, chunks: int, blocking: list[int], ahead: list[int]
) -> None:
    plan = generate(name, 2, 4, chunks)
    assert [most_arrivals(mine) for mine in add_messages(plan, ahead=False)] == blocking
    assert [most_arrivals(mine) for mine in add_messages(plan)] == ahead


@pytest.mark.parametrize("blocks", [True, False])
@pytest.mark.parametrize(
    ("name", "ranks", "unread"), [("gpipe", 2, [5, 5]), ("gpipe", 3, [5, 5, 5]), ("1f1b", 3, [3, 3, 2])]
)
def test_what_no_answer_has_come_for_may_be_unread(
    name: str, ranks: int, unread: list[int], blocks: bool
) -> None:
    """A rank of gpipe hears of its forwards by the first backward, and of its backwards by nothing; the last one of
    1f1b hears of a backward by the forward after the next."""
    plan = add_messages(generate(name, ranks, 5), ahead=not blocks)
    assert [most_unread(plan, rank, one_each, blocks=blocks) for rank in range(ranks)] == unread


def test_a_tied_chunk_lies_beside_what_may_be_unread() -> None:
    plan = Plan.parse("0F0 0SEND_F0 0RECV_B0 0B0 0TIED_REDUCE#0\n1RECV_F0 1F0 1B0 1SEND_B0 1TIED_REDUCE#0")
    sizes = {ActionKind.SEND_F: 1, ActionKind.SEND_B: 10, ActionKind.TIED_REDUCE: 100}
    found = [most_unread(plan, rank, lambda a: sizes[a.kind], blocks=False) for rank in range(2)]
    assert found == [100, 110]


def walked(lists: str, rank: int, *, empty: tuple[int, ...] = (), tied: int = 0) -> tuple[int, int]:
    plan = Plan.parse(lists)
    made = Walk(plan[rank], plan.placement(), lambda stage, i: None if i in empty else COST, {0: tied})
    assert not (made.graphs or made.leaving or made.gradients or made.came), "nothing is left behind"
    return made.kept, made.most


def test_live_bytes_are_those_of_graphs_and_of_what_has_not_left() -> None:
    first = "0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1"
    last = "1RECV_F0 1F0 1B0 1SEND_B0 1RECV_F1 1F1 1B1 1SEND_B1"
    both = f"{first}\n{last}"
    # A graph of 50, a message of 10 on its way, and the second forward; at the first B both messages are.
    assert walked(both, 0) == (50 + 10 + 60, 50 + 20 + 90)
    # The gradient of the first micro-batch is on its way while the second runs.
    assert walked(both, 1) == (10 + 60, 10 + 90)
    assert walked(both, 0, empty=(1,)) == (60, 10 + 90)


def test_between_i_and_w_less_is_alive_and_at_most_so_many_sends_hold_theirs() -> None:
    count = IN_FLIGHT + 2
    plan = add_messages(generate("zb-h1", 2, count))
    mine = str(plan).split("\n")[1]
    assert mine.count("SEND_B") == count and "1I5" in mine
    kept, most = walked(str(plan), 1)
    assert (
        most == kept - COST.ended + PEAKS[ActionKind.I] == 10 * IN_FLIGHT + COST.waiting + PEAKS[ActionKind.I]
    )


def test_a_stage_on_the_same_rank_keeps_what_it_was_given_until_its_backward_is_done() -> None:
    lists = "0F0 1F0 1I0 0I0 0W0 1W0"
    plan = Plan.parse(lists)
    made = Walk(plan[0], {0: 0, 1: 0}, lambda stage, i: COST, {})
    # 0F0 leaves 50 and gives 10, which lasts to 1W0; 1I0 leaves 40 and a gradient of 10 until 0I0.
    assert (made.kept, made.most) == (50 + 10 + 60, 10 + 40 + 10 + 80)
    assert made.most == max(50 + 10 + PEAKS[ActionKind.I], 10 + 40 + 10 + PEAKS[ActionKind.I])


def test_a_tied_sum_counts_where_it_is_the_worst_moment() -> None:
    lists = "0F0 0SEND_F0 0RECV_B0 0B0 0TIED_REDUCE#0\n1RECV_F0 1F0 1B0 1SEND_B0 1TIED_REDUCE#0"
    assert walked(lists, 0, tied=500)[1] == 510 and walked(lists, 0, tied=5)[1] == 100
    assert set(SENDS) == {ActionKind.SEND_F, ActionKind.SEND_B}
