"""Compares the datasets of ranks by length and by a few samples.

Note: a sample is read twice.  Some fields are drawn anew at each read, such as a random crop.  They differ the second
time, and are not compared.

Note: streams, which are also compared at every step (batch_read.py).
A stream whose first sample differs the second time is drawn anew, or shuffled anew.  Ranks may differ in the former,
and must not in the latter.  A steady field tells the two apart: a label, or the number of a sample.  It is the same in
both reads of the first samples, and it varies between them.  Such fields are compared.  If there is none, all are.
Ranks could not know otherwise that they read the same samples.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from colossal_lite.data.checksums import by_field

PROBED = 16
"""Samples of a stream that tell which of its fields are drawn anew."""


def dataset_facts(
    dataset: Any, length: int | None, settings: Mapping[str, Any], soon: Collection[int] = ()
) -> dict[str, Any]:
    """Plain values that are equal where datasets, and the `settings` of their loaders, are.

    They are checksums by field of the first, middle and last sample, and of those that are read `soon`. Without a
    length they are of the first. A field that is drawn anew at each read has None. `steady`: see `steady_fields`."""
    if length is None:
        reads = {"0": [by_field(next(iter(dataset), None)) for _ in range(2)]}
    else:
        places = sorted({0, length // 2, length - 1, *soon}) if length else []
        reads = {str(place): [by_field(dataset[place]) for _ in range(2)] for place in places}
    samples = {
        place: {name: one[name] if one.get(name) == other.get(name) else None for name in {**other, **one}}
        for place, (one, other) in reads.items()
    }
    is_redrawn = length is None and None in samples["0"].values()
    steady = _steady(dataset) if is_redrawn else None
    return dict(length=length, samples=samples, settings=dict(settings), steady=steady)


def steady_fields(told: Sequence[Mapping[str, Any]]) -> tuple[str, ...] | None:
    """By the `dataset_facts` of the ranks, the fields by which samples of a stream are compared; None: by all."""
    steady = [set(row["steady"]) for row in told if row["steady"] is not None]
    return tuple(sorted(set.intersection(*steady))) or None if steady else None


def dataset_fault(told: Sequence[Mapping[str, Any]]) -> str:
    """What differs between the `dataset_facts` of the ranks, or "". One line for people."""
    first = told[0]
    rule = "legal: the same dataset on every rank (seed what it is drawn from); each rank reads its own part of it"
    for rank, row in enumerate(told):
        for name, value in row["settings"].items():
            if value != first["settings"][name]:
                return f"{name}: {first['settings'][name]} on rank 0, {value} on rank {rank}; legal: one for all ranks"
        if row["length"] != first["length"]:
            return f"dataset: {first['length']} samples on rank 0, {row['length']} on rank {rank}; {rule}"
        for place, fields in row["samples"].items():
            if _differ(first["samples"][place], fields):
                return f"dataset: sample {place} is another on rank {rank} than on rank 0; {rule}"
    return ""


def _differ(one: Mapping[str, int | None], other: Mapping[str, int | None]) -> bool:
    """Whether fields differ that neither rank has found to be drawn anew."""
    return any(None not in (a := one.get(n, 0), b := other.get(n, 0)) and a != b for n in {**one, **other})


def _steady(dataset: Any) -> list[str]:
    """The fields that are the same in two reads of a stream's first samples, and vary between these."""
    reads = [[by_field(sample) for sample in itertools.islice(dataset, PROBED)] for _ in range(2)]
    names = {name for rows in reads for fields in rows for name in fields}
    columns = {name: [[fields.get(name) for fields in rows] for rows in reads] for name in sorted(names)}
    return [name for name, (one, other) in columns.items() if one == other and len({*one}) > 1]
