"""Covering arrays: a few cases in which every legal pair of choices meets at least once."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from heapq import heapify, heapreplace
from itertools import combinations, product
from multiprocessing import parent_process
from typing import Any

Choice = dict[str, Any]


def covering_array(
    factors: Mapping[str, Sequence[Any]],
    legal: Callable[[Choice], bool] = lambda choice: True,
    together: int = 2,
) -> list[Choice]:
    """Rows {factor: value} in which each pair of values of two factors, if some legal row has it, occurs; or each three
    values of three factors, with `together` 3.

    Greedy over all legal rows, so the same factors give the same rows. A rank of a test's world, which imports the file
    for its functions, gets none.
    """
    if parent_process() is not None:
        return []
    rows = [dict(zip(factors, values, strict=True)) for values in product(*factors.values())]
    bits: dict[tuple[tuple[str, str], ...], int] = {}  # of each group of values, a bit
    groups_of = {i: _bits(row, together, bits) for i, row in enumerate(rows) if legal(row)}
    missing = (1 << len(bits)) - 1
    chosen = []
    # What a row would add only falls, so a row whose last count is not the largest need not be counted again.
    counted = [(-groups.bit_count(), i) for i, groups in groups_of.items()]
    heapify(counted)
    while missing:
        _, best = counted[0]
        now = (-(groups_of[best] & missing).bit_count(), best)
        if now != counted[0]:
            heapreplace(counted, now)
            continue
        missing &= ~groups_of[best]
        chosen.append(rows[best])
    return chosen


def _bits(row: Choice, together: int, bits: dict[tuple[tuple[str, str], ...], int]) -> int:
    values = [(factor, repr(value)) for factor, value in row.items()]
    found = 0
    for group in combinations(values, together):
        found |= 1 << bits.setdefault(group, len(bits))
    return found


def name_of(row: Choice) -> str:
    """A row as the name of a test."""
    return ", ".join(f"{factor} {value}" for factor, value in row.items())
