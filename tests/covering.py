"""Covering arrays: a few cases in which every legal pair of choices meets at least once."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import combinations, product
from multiprocessing import parent_process
from typing import Any

Choice = dict[str, Any]


def covering_array(
    factors: Mapping[str, Sequence[Any]], legal: Callable[[Choice], bool] = lambda choice: True
) -> list[Choice]:
    """Rows {factor: value} in which each pair of values of two factors, if some legal row has it, occurs.

    Greedy over all legal rows, so the same factors give the same rows. A rank of a test's world, which imports the file
    for its functions, gets none.
    """
    if parent_process() is not None:
        return []
    rows = [dict(zip(factors, values, strict=True)) for values in product(*factors.values())]
    pairs_of = {i: _pairs(row) for i, row in enumerate(rows) if legal(row)}
    missing = set().union(*pairs_of.values())
    chosen = []
    while missing:
        best = max(pairs_of, key=lambda i: (len(pairs_of[i] & missing), -i))
        missing -= pairs_of[best]
        chosen.append(rows[best])
    return chosen


def _pairs(row: Choice) -> set[tuple[str, str, str, str]]:
    return {(a, repr(row[a]), b, repr(row[b])) for a, b in combinations(row, 2)}


def name_of(row: Choice) -> str:
    """A row as the name of a test."""
    return ", ".join(f"{factor} {value}" for factor, value in row.items())
