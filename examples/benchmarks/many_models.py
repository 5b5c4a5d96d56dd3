"""Measures how near many models on few devices come to their bound: the paper's twelve tasks, and drawn loads.

Everything is simulated from costs, and takes about a minute: `python examples/benchmarks/many_models.py`.
"""

from __future__ import annotations

import random
import time
from statistics import mean

from colossal_lite.many.build_timetable import timetable
from colossal_lite.many.jobs import Job
from colossal_lite.many.policies import POLICIES, PolicyName
from colossal_lite.many.timetable import simulate
from colossal_lite.observe.tables import table

STAGES, FORWARD_S, LOAD_S, STEPS, TASKS, DEVICES = 8, 1.0, 0.8, 100, 12, 8


def main() -> None:
    twelve()
    drawn(80)


def twelve() -> None:
    """Twelve equal models of eight stages on eight devices: backward takes three forwards, a load 0.8 of one."""
    parts, step_s = 2 * STAGES - 1, 4 * STAGES * FORWARD_S
    jobs = [Job(f"t{n}", STEPS, step_s, parts * LOAD_S, parts=parts) for n in range(TASKS)]
    compute_s = TASKS * STEPS * step_s
    begun_s = time.process_time()
    plan = timetable(jobs, DEVICES)
    found = simulate(plan)
    took_s, actions = time.process_time() - begun_s, sum(map(len, plan.devices))
    print(f"{TASKS} equal tasks of {STEPS} steps on {DEVICES} devices: {found.over_bound:.4f} of the bound")
    print(f"{actions:,} actions made, checked and simulated in {took_s:.1f} s of CPU")
    # Hydra as published: a visit is a stage, one load at a time and none beside the compute.
    hydra_s = compute_s / DEVICES + TASKS * STEPS * parts * LOAD_S / DEVICES
    others = {
        "model parallelism": compute_s,
        **{f"GPipe, {m} micro-batches": compute_s / DEVICES * (m + DEVICES - 1) / m for m in (4, 8, 16, 32)},
        "one spilled model a device": simulate(timetable(jobs, DEVICES, "fifo")).makespan_s,
        "lrtf by visits, loads not hidden": hydra_s,
    }
    print(table(["beside", "times ours"], [[k, f"{s / found.makespan_s:.2f}"] for k, s in others.items()]))


def drawn(loads: int) -> None:
    """Mixed models on 2 to 8 devices, whose loads take 0.1 to 3 forwards."""
    over: dict[PolicyName, list[float]] = {policy: [] for policy in POLICIES}
    for seed in range(loads):
        draw = random.Random(seed)
        devices = draw.choice([2, 4, 8])
        jobs = []
        for n in range(draw.randint(devices, 3 * devices)):
            stages, forward_s = draw.randint(3, 12), draw.uniform(0.5, 2)
            heavy, steps, parts = draw.choice([0.1, 0.5, 1, 2, 3]), draw.randint(5, 25), 2 * stages - 1
            jobs.append(Job(f"t{n}", steps, stages * 4 * forward_s, parts * heavy * forward_s, parts=parts))
        for policy in POLICIES:
            over[policy].append(simulate(timetable(jobs, devices, policy)).over_bound)
    worst = max(ours / theirs for ours, theirs in zip(over["link"], over["lrtf"], strict=True))
    print(f"\n{loads} drawn loads, times the bound; link is at most {worst:.3f} of lrtf")
    rows = [[policy, f"{mean(found):.3f}", f"{max(found):.3f}"] for policy, found in over.items()]
    print(table(["policy", "mean", "worst"], rows))


if __name__ == "__main__":
    main()
