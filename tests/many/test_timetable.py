"""Timetables of many jobs: what the checker refuses, how near the policies come to the bound, and that none starves."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from statistics import mean
from typing import Any

import pytest

from colossal_lite.many.build_timetable import QUANTA, timetable
from colossal_lite.many.jobs import Job, lower_bound_s
from colossal_lite.many.policies import POLICIES, Candidate, Choose, Moment, wrap_around
from colossal_lite.many.timetable import Action, Timetable, TimetableError, check, simulate
from colossal_lite.many.timetable_drawing import svg, trace

EQUAL = [Job(f"t{n}", 100, step_s=16.0, load_s=7 * 0.8, parts=7) for n in range(12)]
"""The paper's twelve, in 4 stages, so 7 visits of a step; a load takes 0.8 of a forward."""


def drawn_spilled(seed: int) -> tuple[list[Job], int]:
    """Models of 3 to 12 stages whose loads take 0.1 to 3 times a forward."""
    draw = random.Random(seed)
    devices = draw.choice([2, 4, 8])
    jobs = []
    for n in range(draw.randint(devices, 3 * devices)):
        stages, forward_s, heavy = draw.randint(3, 12), draw.uniform(0.5, 2), draw.choice([0.1, 0.5, 1, 2, 3])
        parts, steps = 2 * stages - 1, draw.randint(5, 25)
        jobs.append(Job(f"t{n}", steps, stages * 4 * forward_s, parts * heavy * forward_s, parts=parts))
    return jobs, devices


def drawn_mixed(seed: int) -> tuple[list[Job], int, int]:
    """Jobs of one part and of several, some of them gangs, on devices that hold two or three of them."""
    draw = random.Random(seed)
    devices, jobs = draw.choice([1, 2, 3, 4, 6]), []
    sizes = [1, 1, *(size for size in range(2, devices + 1) if devices % size == 0)]
    for n in range(draw.randint(2, 6)):
        parts = draw.choice([1, 1, 3])
        jobs.append(
            Job(
                f"t{n}",
                draw.randint(1, 5),
                draw.uniform(0.5, 3),
                draw.uniform(0.1, 2),
                device_bytes=draw.randint(20, 40),
                parts=parts,
                devices=draw.choice(sizes),
            )  # fmt: skip
        )
    return jobs, devices, 100


def lists_of(table: Timetable) -> list[list[Action]]:
    return [list(row) for row in table.devices]


def test_no_policy_starves_a_task_or_a_gang() -> None:
    """Each step is made once, within the memory of each device, and sooner than by one task after another."""
    for seed in range(60):
        jobs, devices, memory_bytes = drawn_mixed(seed)
        serial_s = sum(
            job.left * (job.step_s + 3 * job.load_s) for job in jobs
        )  # each step loaded and written
        for policy in POLICIES:
            for quantum in QUANTA:
                table = timetable(
                    jobs, devices, policy, memory_bytes=memory_bytes, quantum=quantum, seed=seed
                )
                found = simulate(table)
                assert found.bound_s * (1 - 1e-9) <= found.makespan_s <= serial_s, (seed, policy)


def test_gangs_that_share_devices_come_near_the_bound() -> None:
    jobs = [Job(f"t{n}", 60, 1.0, devices=size) for n, size in enumerate((4, 2, 2, 1, 1, 1, 1))]
    for policy in ("link", "lrtf", "mcnaughton"):
        assert simulate(timetable(jobs, 4, policy)).over_bound <= 1.05, policy
    cut = [
        Job(f"t{n}", 30, 1.0, devices=2) for n in range(3)
    ]  # the third on both pairs: no list without a move
    found = simulate(timetable(cut, 4, "mcnaughton"))
    assert found.over_bound <= 1.05 and found.moves == 1


def a_run(table: Timetable, draw: random.Random) -> tuple[int, int]:
    runs = [(d, n) for d, row in enumerate(table.devices) for n, a in enumerate(row) if a.kind == "RUN"]
    return draw.choice(runs)


def lose_a_run(table: Timetable, draw: random.Random) -> Timetable:
    rows, (device, n) = lists_of(table), a_run(table, draw)
    del rows[device][n]
    return replace(table, devices=tuple(map(tuple, rows)))


def repeat_a_run(table: Timetable, draw: random.Random) -> Timetable:
    rows, (device, n) = lists_of(table), a_run(table, draw)
    rows[device].insert(n + 1, rows[device][n])
    return replace(table, devices=tuple(map(tuple, rows)))


def move_a_run(table: Timetable, draw: random.Random) -> Timetable:
    rows, (device, n) = lists_of(table), a_run(table, draw)
    other = rows[(device + 1) % len(rows)] if len(rows) > 1 else rows[device]
    action = rows[device].pop(n)
    other.insert(draw.randint(0, len(other)) if other is not rows[device] else 0, action)
    return replace(table, devices=tuple(map(tuple, rows)))


def swap_runs_of_a_task(table: Timetable, draw: random.Random) -> Timetable:
    rows, (device, n) = lists_of(table), a_run(table, draw)
    row = rows[device]
    same = [m for m, a in enumerate(row) if a.kind == "RUN" and a.task == row[n].task and m != n]
    if not same:
        return lose_a_run(table, draw)
    m = draw.choice(same)
    row[n], row[m] = row[m], row[n]
    return replace(table, devices=tuple(map(tuple, rows)))


def change_a_step(table: Timetable, draw: random.Random) -> Timetable:
    rows = lists_of(table)
    device = draw.choice([d for d, row in enumerate(rows) if row])
    n = draw.randrange(len(rows[device]))
    rows[device][n] = rows[device][n]._replace(step=rows[device][n].step + draw.choice([-1, 1]))
    return replace(table, devices=tuple(map(tuple, rows)))


def lose_a_copy(table: Timetable, draw: random.Random) -> Timetable:
    rows = lists_of(table)
    copies = [(d, n) for d, row in enumerate(rows) for n, a in enumerate(row) if a.kind != "RUN"]
    device, n = draw.choice(copies)
    del rows[device][n]
    return replace(table, devices=tuple(map(tuple, rows)))


def shrink_the_device(table: Timetable, draw: random.Random) -> Timetable:
    return replace(table, memory_bytes=max(job.device_bytes for job in table.jobs) - 1)


MUTATIONS: Sequence[Callable[[Timetable, random.Random], Timetable]] = (
    lose_a_run, repeat_a_run, move_a_run, swap_runs_of_a_task, change_a_step, lose_a_copy, shrink_the_device,
)  # fmt: skip


def test_500_mutated_timetables_are_all_caught() -> None:
    names = list(POLICIES)
    for seed in range(500):
        draw = random.Random(seed)
        jobs, devices, memory_bytes = drawn_mixed(seed)
        table = timetable(jobs, devices, draw.choice(names), memory_bytes=memory_bytes, seed=seed)
        mutate = MUTATIONS[seed % len(MUTATIONS)]
        mutated = mutate(table, draw)
        with pytest.raises(TimetableError):
            check(mutated)
            pytest.fail(f"seed {seed}: {mutate.__name__} is not caught:\n{table}\nbecame\n{mutated}")


def rows(*lines: str) -> tuple[tuple[Action, ...], ...]:
    """`FETCH a#0` as `Timetable` prints it, a line a device."""

    def action(kind: str, rest: str) -> Action:
        task, _, number = rest.partition("#")
        step, _, part = number.partition(".")
        return Action(kind, task, int(step), int(part or 0))  # type: ignore[arg-type]

    return tuple(tuple(action(*pair.split()) for pair in line.split(", ")) for line in lines)


@pytest.mark.parametrize(
    ("lists", "told"),
    [
        (
            rows("FETCH a#0, RUN a#0, EVICT a#1, FETCH a#0, RUN a#1", "FETCH b#0, RUN b#0"),
            "FETCH a#0.0 is stale",
        ),
        (rows("FETCH a#0, RUN a#0", "FETCH b#0, RUN b#0, FETCH a#1, RUN a#1"), "device 0 holds a"),
        (rows("FETCH a#0, RUN a#0, RUN a#0", "FETCH b#0, RUN b#0"), "RUN a#0.0 is repeated"),
        (rows("FETCH a#0, RUN a#0", "FETCH b#0, RUN b#0"), "a: 1 of 2 parts are lost"),
        (rows("FETCH a#0, RUN a#1, RUN a#0", "FETCH b#0, RUN b#0"), "has made 0 parts, and this is part 1"),
        (rows("FETCH a#0, RUN a#0, FETCH b#0, RUN b#0, RUN a#1"), "needs 13 bytes of the device, which has 10"),
        (
            rows("FETCH a#0, RUN a#0, EVICT a#1", "FETCH b#0, RUN b#0, EVICT b#1, RUN a#1"),
            "does not hold a",
        ),
        (rows("FETCH a#0, RUN a#0, RUN a#1, FETCH c#0"), "there is no such task"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_told(lists: tuple[tuple[Action, ...], ...], told: str) -> None:
    jobs = (Job("a", 2, 1.0, device_bytes=6), Job("b", 1, 1.0, device_bytes=7))
    with pytest.raises(TimetableError, match=told):
        check(Timetable(jobs, lists, memory_bytes=10))


@pytest.mark.parametrize(
    ("lists", "told"),
    [
        (rows("FETCH a#0, RUN a#0", "FETCH a#0"), "device 1 of its gang is not there"),
        (rows("FETCH a#0, RUN a#0", "FETCH a#0, FETCH b#0, RUN b#0"), "device 0: RUN a#0.0 waits: device 1"),
        (rows("FETCH a#0, RUN a#0", "RUN a#0"), "device 1: RUN a#0.0: the device does not hold a"),
        (rows("FETCH a#0, RUN a#0", "FETCH a#0, RUN a#0, RUN a#0"), "device 1: RUN a#0.0 is repeated"),
        (rows("FETCH a#0, RUN a#0", "FETCH a#0, RUN a#0", "FETCH b#0, RUN b#0"), "devices=2 in a world of 3"),
        (
            rows("FETCH a#0, RUN a#0, FETCH b#0, RUN b#0", "FETCH b#0, RUN b#0, FETCH a#0, RUN a#0"),
            "waits: device . of its gang is not there",
        ),
    ],
)  # fmt: skip
def test_a_gang_whose_devices_do_not_do_the_same_is_told(
    lists: tuple[tuple[Action, ...], ...], told: str
) -> None:
    jobs = (Job("a", 1, 1.0, devices=2), Job("b", 1, 1.0, devices=1 if "3" in told or "RUN" in told else 2))
    with pytest.raises(TimetableError, match=told):
        check(Timetable(jobs, lists))


def test_a_part_loaded_before_the_other_device_has_updated_it_is_refused() -> None:
    """Hydra's own race: device 1 loads a stage while device 0 still trains the step before."""
    jobs = (Job("a", 2, 2.0, 0.2, parts=2),)
    first = "FETCH a#0.0, FETCH a#0.1, RUN a#0.0, RUN a#0.1"
    late = simulate(Timetable(jobs, rows(first, "FETCH a#1.0, RUN a#1.0, FETCH a#1.1, RUN a#1.1")))
    fetch = next(s for s in late.spans if s.device == 1)
    assert fetch.start_s == late.spans[3].end_s, "it waits for the last part of the step before"
    with pytest.raises(TimetableError, match="is stale"):
        check(Timetable(jobs, rows(first + ", RUN a#1.0, FETCH a#0.1, RUN a#1.1")))


def test_twelve_equal_tasks_on_eight_devices_beat_the_paper_s_baselines() -> None:
    found = simulate(timetable(EQUAL, 8))
    assert found.over_bound <= 1.02
    compute_s = sum(job.left * job.step_s for job in EQUAL)
    assert compute_s / found.makespan_s >= 7.8  # model parallelism: one device works at a time
    pipeline_s = compute_s / 8 * (8 + 8 - 1) / 8  # GPipe, 8 stages, 8 micro-batches
    assert pipeline_s / found.makespan_s >= 1.8
    assert (
        simulate(timetable(EQUAL, 8, "fifo")).makespan_s / found.makespan_s >= 1.3
    )  # one a device to its end


def test_24_000_actions_are_made_checked_and_simulated_in_5_s() -> None:
    begun_s = time.process_time()
    table = timetable([replace(job, parts=10) for job in EQUAL], 8)
    simulate(table)
    took_s = time.process_time() - begun_s
    assert sum(map(len, table.devices)) >= 20_000 and took_s <= 5, took_s


def test_link_is_near_the_bound_of_drawn_loads_and_never_slower_than_lrtf(loads: int = 8) -> None:
    over: dict[str, list[float]] = {"link": [], "lrtf": []}
    for seed in range(loads):
        jobs, devices = drawn_spilled(seed)
        for policy in ("link", "lrtf"):
            over[policy].append(simulate(timetable(jobs, devices, policy)).over_bound)
    assert mean(over["link"]) <= 1.13
    assert all(ours <= 1.02 * theirs for ours, theirs in zip(over["link"], over["lrtf"], strict=True))


@pytest.mark.campaign
def test_link_is_near_the_bound_of_80_drawn_loads() -> None:
    test_link_is_near_the_bound_of_drawn_loads_and_never_slower_than_lrtf(80)


def test_a_load_heavy_and_a_compute_heavy_task_hide_each_other_s_loads() -> None:
    two = [Job("loads", 40, 4, 12, parts=6), Job("computes", 40, 12, 1.2, parts=6)]
    assert simulate(timetable(two, 1)).over_bound <= 1.05
    assert simulate(timetable(two, 1, "lrtf")).over_bound >= 1.2


def test_mcnaughton_moves_at_most_one_task_a_device_but_the_last() -> None:
    for seed in range(40):
        draw = random.Random(seed)
        devices = draw.randint(1, 5)
        jobs = [Job(f"t{n}", draw.randint(1, 30), draw.uniform(0.1, 2)) for n in range(draw.randint(1, 12))]
        lists = wrap_around(jobs, devices)
        assert sum(map(len, lists)) - len(jobs) <= devices - 1
        found = simulate(timetable(jobs, devices, "mcnaughton"))
        assert found.moves <= devices - 1
        assert found.makespan_s <= found.bound_s + 2 * max(job.step_s for job in jobs)


def best_s(jobs: Sequence[Job], devices: int, monkeypatch: pytest.MonkeyPatch) -> float:
    """The shortest makespan over every list of choices."""
    found, script = [], list[int]()
    table: dict[str, Any] = POLICIES  # type: ignore[assignment]
    while True:
        widths: list[int] = []

        def exhaustive(jobs: object, devices: int, seed: int, widths: list[int] = widths) -> Choose:
            def choose(moment: Moment) -> Candidate:
                at = len(widths)
                widths.append(len(moment.candidates))
                script.extend([0] * (at + 1 - len(script)))
                return sorted(moment.candidates, key=lambda c: c.order)[script[at]]

            return choose

        monkeypatch.setitem(table, "exhaustive", exhaustive)
        found.append(simulate(timetable(jobs, devices, "exhaustive")).makespan_s)  # type: ignore[arg-type]
        del script[len(widths) :]
        while script and script[-1] + 1 == widths[len(script) - 1]:
            script.pop()
        if not script:
            return min(found)
        script[-1] += 1


def test_the_default_is_within_a_step_of_every_possible_order(monkeypatch: pytest.MonkeyPatch) -> None:
    for seed in range(6):
        draw = random.Random(seed)
        jobs = [Job(f"t{n}", draw.randint(1, 2), draw.choice([1.0, 2.0, 3.0])) for n in range(3)]
        best = best_s(jobs, 2, monkeypatch)
        assert lower_bound_s(jobs, 2) <= best
        for policy in ("link", "lrtf"):
            assert simulate(timetable(jobs, 2, policy)).makespan_s <= best + max(job.step_s for job in jobs)


def test_a_timetable_prints_and_draws() -> None:
    jobs = [Job("a", 2, 1.0, 0.5, device_bytes=6), Job("b<c", 1, 1.0, 0.5, device_bytes=7)]
    table = timetable(jobs, 1, "fifo", memory_bytes=10)
    assert str(table) == ("device 0: FETCH a#0.0 RUN a#0.0 RUN a#1.0 EVICT a#2 FETCH b<c#0.0 RUN b<c#0.0")
    found = simulate(table)
    assert "b&lt;c" in svg(found.spans, 1, "two")
    events = json.loads(trace(found.spans, 1))["traceEvents"]
    assert sum(event["dur"] for event in events if event.get("tid") == 0 and event["ph"] == "X") == 3e6


def test_jobs_that_cannot_be_planned_are_refused() -> None:
    with pytest.raises(ValueError, match="legal: fifo, random"):
        timetable([], 1, "best")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="two have one name"):
        timetable([Job("a", 1, 1), Job("a", 1, 1)], 1)
    with pytest.raises(ValueError, match="11 bytes of a device of 10"):
        timetable([Job("a", 1, 1, device_bytes=11)], 1, memory_bytes=10)
    with pytest.raises(ValueError, match="step_s=-1"):
        Job("a", 1, -1)
    with pytest.raises(ValueError, match="job 'a': devices=2 in a world of 3; legal: 1, 3"):
        timetable([Job("a", 1, 1, devices=2)], 3)
    assert simulate(timetable([], 2)).makespan_s == 0
