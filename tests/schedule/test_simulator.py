"""The simulator against numbers worked out by hand and published, and what is drawn from it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from colossal_lite.schedule.pipeline_schedules import SCHEDULES, generate
from colossal_lite.schedule.plan import COMPUTE, CPU, H2D, Action, ActionKind, Memory, Plan, PlanError
from colossal_lite.schedule.schedule_drawing import grid
from colossal_lite.schedule.simulator import HostBandwidth, ScheduleTimeline, StageCosts, simulate
from colossal_lite.schedule.step_passes import add_messages


def seconds(**by_kind: float) -> Callable[[Action], float]:
    """Seconds by kind, 0 elsewhere."""
    return lambda action: by_kind.get(action.kind, 0.0)


UNIT = seconds(F=1, I=1, W=1, B=2)

# F, I, W = 1, 1.3, 0.7 on 4 ranks with 16 micro-batches, at three latencies of a hop.
REALISTIC = {
    "1f1b": (57.0, 59.8, 65.4),
    "gpipe": (57.0, 57.6, 58.8),
    "interleaved": (52.5, 53.9, 56.7),
    "bfs": (52.5, 53.1, 54.3),
    "zb-h1": (52.8, 54.0, 56.4),
    "zb-v": (49.95, 51.4, 54.85),
}


@pytest.mark.parametrize("name", REALISTIC)
def test_makespan_with_latency_is_the_published_one(name: str) -> None:
    chunks = max(2, SCHEDULES[name].stages_per_rank[0]) if name in ("interleaved", "bfs", "zb-v") else 1
    plan = generate(name, 4, 16, chunks)
    costs = StageCosts.uniform(4 * chunks, 1 / chunks, 1.3 / chunks, 0.7 / chunks)
    got = tuple(simulate(plan, costs, latency_s=s).makespan_s for s in (0.0, 0.1, 0.3))
    assert got == pytest.approx(REALISTIC[name], abs=1e-9)


def test_gpipe_by_the_clock() -> None:
    plan = generate("gpipe", 2, 2)
    spans = {str(s.action): (s.rank, s.start_s, s.end_s) for s in simulate(plan, UNIT).spans}
    assert spans == {
        "0F0": (0, 0, 1),
        "0F1": (0, 1, 2),
        "1F0": (1, 1, 2),
        "1F1": (1, 2, 3),
        "1B0": (1, 3, 5),
        "0B0": (0, 5, 7),
        "1B1": (1, 5, 7),
        "0B1": (0, 7, 9),
    }


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "interleaved", "zb-h1", "zb-v"])
@pytest.mark.parametrize("latency_s", [0.0, 0.25])
def test_messages_posted_ahead_cost_what_needs_without_messages_cost(name: str, latency_s: float) -> None:
    plan = generate(name, 3, 5)
    lowered = add_messages(plan, UNIT)
    assert simulate(lowered, UNIT).makespan_s == pytest.approx(simulate(plan, UNIT).makespan_s)
    # A RECV is posted when the compute before it ends, so with latency the lowered plan can only be later.
    times = [simulate(p, UNIT, latency_s=latency_s).makespan_s for p in (plan, lowered)]
    assert times[0] <= times[1]


def test_messages_of_one_link_queue_and_their_latency_overlaps() -> None:
    plan = Plan.parse("0F0 0SEND_F0 0F1 0SEND_F1 0F2 0SEND_F2\n1RECV_F0 1RECV_F1 1RECV_F2 1F0 1F1 1F2")
    spans = simulate(plan, seconds(F=1, SEND_F=3), latency_s=10.0).spans
    received = {
        s.action.micro_batch: (s.start_s, s.end_s) for s in spans if s.action.kind is ActionKind.RECV_F
    }
    assert received == {0: (1, 4), 1: (4, 7), 2: (7, 10)}
    assert [s.start_s for s in spans if s.action.kind is ActionKind.F and s.rank == 1] == [14, 17, 20]


def test_messages_of_two_links_do_not_queue_for_each_other() -> None:
    plan = Plan.parse("0F0 0SEND_F0\n1RECV_F0 t1:1RECV_F0 1F0 t1:1F0\nt1:0F0 t1:0SEND_F0")
    spans = simulate(plan, seconds(F=1, SEND_F=3)).spans
    assert [(s.start_s, s.end_s) for s in spans if s.action.kind is ActionKind.RECV_F] == [(1, 4), (1, 4)]


def test_a_message_waits_until_its_receive_is_posted() -> None:
    late = Plan.parse("0F0 0SEND_F0\nt1:0F0 1RECV_F0 1F0")
    timeline = simulate(late, lambda a: {"F": 5.0 if a.task else 1.0, "SEND_F": 2.0}.get(a.kind, 0.0))
    assert [(s.start_s, s.end_s) for s in timeline.spans if s.action.kind is ActionKind.RECV_F] == [(5, 7)]


# Lanes --------------------------------------------------------------------------------------------


def spilled(ahead: bool) -> Plan:
    """Four stages on one device, each fetched before its use or one ahead of it."""
    words = ["0FETCH#0"] if ahead else []
    for i in range(4):
        fetch = i + 1 if ahead else i
        words += [f"{fetch}FETCH#{fetch}"] if fetch < 4 else []
        words += [f"{i}F0", f"{i}EVICT#{i}"]
    return Plan.parse(" ".join(words))


def test_a_fetch_one_ahead_hides_under_compute() -> None:
    cost = seconds(F=2, FETCH=2)
    assert simulate(spilled(ahead=False), cost).makespan_s == 16
    hidden = simulate(spilled(ahead=True), cost)
    assert hidden.makespan_s == 10
    assert hidden.idle_s(COMPUTE) == (2,) and hidden.idle_s(H2D) == pytest.approx((2,))


def test_a_fetch_waits_for_the_eviction_that_makes_room() -> None:
    chunks = {(0, i): 10 for i in range(4)}
    uses = {(0, i): ((0, i),) for i in range(4)}
    cost = seconds(F=2, FETCH=2, EVICT=3)

    def makespan(slots: int) -> float:
        memory = Memory(dict.fromkeys(chunks, "host"), uses, chunks, budget_bytes={"device": 10 * slots})
        return simulate(spilled(ahead=True), cost, memory=memory).makespan_s

    # With two slots the fetch of chunk 2 waits for chunk 0 to be gone at 7; with three it need not.
    assert makespan(3) < makespan(2)
    spans = simulate(
        spilled(ahead=True),
        cost,
        memory=Memory(dict.fromkeys(chunks, "host"), uses, chunks, budget_bytes={"device": 20}),
    ).spans
    when = {str(s.action): (s.start_s, s.end_s) for s in spans}
    assert when["0EVICT#0"] == (4, 7) and when["2FETCH#2"] == (7, 9) and when["2F0"] == (9, 11)
    with pytest.raises(PlanError, match="which has 10"):
        makespan(1)


def test_an_update_on_the_host_runs_beside_the_device() -> None:
    plan = Plan.parse("UPDATE#0@cpu UPDATE#1@cpu FETCH#2 UPDATE#2 EVICT#2")
    cost = {("UPDATE", CPU): 4.0, ("UPDATE", COMPUTE): 1.0}
    timeline = simulate(plan, lambda a: cost.get((a.kind, a.resource), 3.0))
    assert timeline.makespan_s == 8 and timeline.idle_s(CPU) == (0,)
    when = {str(s.action): (s.start_s, s.end_s) for s in timeline.spans}
    assert when["UPDATE#2"] == (3, 4) and when["EVICT#2"] == (4, 7)


def test_an_update_waits_for_the_copy_that_still_reads_its_chunk() -> None:
    plan = Plan.parse("0FETCH#0 0F0 0B0 0UPDATE#0@cpu 0EVICT#0")
    memory = Memory({(0, 0): "host"}, {})
    timeline = simulate(plan, seconds(FETCH=9, UPDATE=1, F=1, B=1), memory=memory)
    assert {str(s.action): s.start_s for s in timeline.spans}["0UPDATE#0@cpu"] == 9


def test_lanes_that_ask_for_too_much_host_bandwidth_slow_each_other_down() -> None:
    plan = Plan.parse("UPDATE#0@cpu FETCH#1 EVICT#1")
    cost = {("UPDATE"): 10.0, "FETCH": 4.0, "EVICT": 0.0}
    moved = {"UPDATE": 800.0, "FETCH": 320.0, "EVICT": 0.0}

    def run(bytes_per_s: float) -> dict[str, float]:
        host = HostBandwidth(bytes_per_s, lambda a: moved[a.kind])
        return {str(s.action): s.end_s for s in simulate(plan, lambda a: cost[a.kind], host=host).spans}

    # 80 + 80 bytes a second asked: of 160 there is enough; of 120 both run at 3/4 until the fetch is done at
    # 16/3 s, when the update still has 6 of its 10 s to go.
    assert run(160.0)["UPDATE#0@cpu"] == 10 and run(160.0)["FETCH#1"] == 4
    assert run(120.0)["FETCH#1"] == pytest.approx(16 / 3)
    assert run(120.0)["UPDATE#0@cpu"] == pytest.approx(16 / 3 + 6)
    # 40 bytes a second: half of what the update alone asks for.
    assert run(40.0)["FETCH#1"] == pytest.approx(16)
    assert run(40.0)["UPDATE#0@cpu"] == pytest.approx(16 + 12)


def test_a_meeting_starts_when_its_last_rank_is_there() -> None:
    plan = Plan.parse("0F0 0B0 0TIED_REDUCE#0 0REDUCE#0\n1F0 1B0 1TIED_REDUCE#0 1REDUCE#0")
    spans = simulate(plan, seconds(F=1, B=2, TIED_REDUCE=5)).spans
    assert {(s.start_s, s.end_s) for s in spans if s.action.kind is ActionKind.TIED_REDUCE} == {(6, 11)}


@given(
    st.sampled_from(["gpipe", "1f1b", "interleaved", "bfs", "zb-h1", "zb-v"]),
    st.integers(1, 5),
    st.integers(1, 8),
    st.lists(st.floats(0.1, 5), min_size=3, max_size=3),
)
def test_makespan_lies_between_the_longest_path_and_the_sum(
    name: str, p: int, m: int, cost: list[float]
) -> None:
    plan = generate(name, p, m)
    timeline = simulate(plan, StageCosts.uniform(len(plan.placement()), *cost))
    work = sum(s.end_s - s.start_s for s in timeline.spans)
    assert timeline.makespan_s <= work + 1e-9
    assert timeline.makespan_s >= max(work / p, cost[0] * len(plan.placement())) - 1e-9
    for rank in range(p):
        mine = sorted((s.start_s, s.end_s) for s in timeline.spans if s.rank == rank)
        assert all(a[1] <= b[0] + 1e-9 for a, b in zip(mine, mine[1:], strict=False))


def test_a_smaller_last_micro_batch_takes_its_share() -> None:
    costs = StageCosts((2.0,), (2.0,), (2.0,), micro_batches=2, last=0.5)
    assert simulate(generate("1f1b", 1, 2), costs).makespan_s == 6 + 3


def test_the_simulator_refuses_what_the_checker_refuses() -> None:
    with pytest.raises(PlanError, match="waits for ever"):
        simulate(Plan.parse("0F0 0RECV_B0 0B0 0SEND_F0\n1RECV_F0 1F0 1B0 1SEND_B0"), UNIT)


# Drawing ----------------------------------------------------------------------------------------


def test_the_grid_is_the_clock() -> None:
    timeline = simulate(generate("1f1b", 2, 2), UNIT)
    assert grid(timeline) == "rank 0 | F0 F1 .  .  B0 -  .  B1 -\nrank 1 | .  F0 B0 -  F1 B1 -  .  ."


def test_the_grid_does_not_drift_with_rounding() -> None:
    plan = generate("interleaved", 3, 9, 3)
    tenth = simulate(plan, StageCosts.uniform(9, 0.1, 0.1, 0.1))
    assert grid(tenth) == grid(simulate(plan, StageCosts.uniform(9)))


def test_the_grid_shows_every_action_whatever_the_costs() -> None:
    plan = generate("zb-v", 3, 5)
    text = grid(simulate(plan, StageCosts.uniform(6, 1.0, 1.3, 0.7)))
    for rank, line in enumerate(text.split("\n")):
        assert [w for w in line.split("| ")[1].split() if w not in ".-"] == [str(a) for a in plan[rank]]


def test_an_empty_timeline_is_idle_for_no_time() -> None:
    assert ScheduleTimeline(2, ()).makespan_s == 0 and ScheduleTimeline(2, ()).idle_share() == 0
    assert grid(ScheduleTimeline(2, ())) == "rank 0 |\nrank 1 |"
