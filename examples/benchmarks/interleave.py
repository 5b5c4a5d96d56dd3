"""Simulates updates on host and device at once: one update phase, and whole steps of a 6.7 B model on three machines.

    python examples/benchmarks/interleave.py

Nothing is trained, and no figure is measured: the simulator runs the plans that an engine runs.
Phase: 32 chunks of 100 M elements, 12 bytes of record and 2 of weight an element, gradients already down; nothing is
fetched before the norm.  Steps: 6.7 B elements in 48 chunks, 12, 4 and 2 bytes of record, gradient and weight, 4,096
tokens, 2 and 4 operations a weight and token in forward and backward, no recomputation, nothing resident.  All lanes
share the host's memory.  `late`: gradients come down behind the norm.  (arXiv 2410.21316.)
"""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

from colossal_lite.schedule.update_mix import mix_of
from colossal_lite.schedule.update_rates import (
    Computing,
    Rates,
    UpdateBytes,
    equal_parts,
    fastest_mix,
    lanes_of,
    simulated_s,
)

PHASE = UpdateBytes(elements=32 * 10**8, chunks=32, record=12, gradient=0, weight=2, host_memory=28)
STEP = UpdateBytes(67 * 10**8, 48, record=12, gradient=4, weight=2, host_memory=28, early=True)
TOKENS, DEVICE, UPDATED, LINK = 4096, 400e12, 130e9, 50e9
MACHINES = ((2e9, 80e9), (4e9, 160e9), (7e9, 300e9))
"""Elements updated on the host, and bytes of its memory, a second."""
COMPUTING = Computing(*(STEP.elements * TOKENS * each / DEVICE for each in (2, 4)))


def phase() -> None:
    print("| simulated phase: host memory | host | streamed | every 2 | mix | on the host | bound |")
    print("|---|---|---|---|---|---|---|")
    for memory in (float("inf"), 160e9):
        rates = Rates(4e9, UPDATED, LINK, LINK, memory)
        shares = [
            simulated_s(equal_parts(PHASE, 32), rates, mix_of(Fraction(n, 2), range(32))) for n in (2, 0, 1)
        ]
        found = fastest_mix(equal_parts(PHASE, 32), rates)
        bound_s = lanes_of(PHASE, rates, found.host_share).bound_s
        told = "no limit" if memory == float("inf") else f"{memory / 1e9:.0f} GB/s"
        row = [*(f"{seconds:.3f} s" for seconds in (*shares, found.simulated_s)), f"{found.host_share}"]
        print(f"| {told} | {' | '.join(row)} | {bound_s:.3f} s |", flush=True)


def steps() -> None:
    print(
        "\n| simulated step: host | host memory | host | streamed | mix | on the host | host / mix | late |"
    )
    print("|---|---|---|---|---|---|---|---|")
    count = int(STEP.chunks)
    for updates, memory in MACHINES:
        rates = Rates(updates, UPDATED, LINK, LINK, memory)
        host_s, streamed_s = (
            simulated_s(equal_parts(STEP, count), rates, mix_of(Fraction(share), range(count)), COMPUTING)
            for share in (1, 0)
        )
        found = fastest_mix(equal_parts(STEP, count), rates, COMPUTING)
        late_s = fastest_mix(equal_parts(replace(STEP, early=False), count), rates, COMPUTING).simulated_s
        row = [
            f"{updates / 1e9:.0f} G/s", f"{memory / 1e9:.0f} GB/s", f"{host_s:.2f} s", f"{streamed_s:.2f} s",
            f"{found.simulated_s:.2f} s", f"{found.host_share}", f"{host_s / found.simulated_s:.2f}", f"{late_s:.2f} s",
        ]  # fmt: skip
        print(f"| {' | '.join(row)} |", flush=True)


if __name__ == "__main__":
    phase()
    steps()
