"""A covering array holds every legal pair, and is small."""

from __future__ import annotations

from itertools import combinations, product

from tests.shared.covering import covering_array


def test_every_legal_pair_occurs_in_few_rows_all_legal() -> None:
    factors = dict(a=(1, 2, 3, 4), b="xyz", c=(True, False), d=(0.0, 0.2), e=(None, 1, 2))
    legal = lambda row: not (row["a"] == 4 and row["b"] == "z") and (row["c"] or row["e"] is None)  # noqa: E731
    rows = covering_array(factors, legal)
    assert all(map(legal, rows)) and len(rows) <= 20
    every = [dict(zip(factors, values, strict=True)) for values in product(*factors.values())]
    for a, b in combinations(factors, 2):
        assert {(r[a], r[b]) for r in rows} == {(r[a], r[b]) for r in every if legal(r)}
    assert rows == covering_array(factors, legal)
