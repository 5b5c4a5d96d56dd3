"""Compares the datasets of ranks by length and by a few samples.

Note: a sample is read twice.  One that differs the second time is drawn anew at each read (a random crop), and is not
compared.  Of a sample only tensors, arrays, numbers and text are compared, also within tuples, lists and mappings.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from colossal_lite.memory.transfers import to_host


def dataset_facts(dataset: Any, length: int | None, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Plain values that are equal where datasets, and the `settings` of their loaders, are.

    They are checksums of the first, middle and last sample; without a length, of the first. A sample that is drawn anew
    at each read has None."""
    if length is None:
        reads = {"0": [_checksum(next(iter(dataset), None)) for _ in range(2)]}
    else:
        places = sorted({0, length // 2, length - 1}) if length else []
        reads = {str(place): [_checksum(dataset[place]) for _ in range(2)] for place in places}
    samples = {place: one if one == two else None for place, (one, two) in reads.items()}
    return dict(length=length, samples=samples, settings=dict(settings))


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
        for place, checksum in row["samples"].items():
            if None not in (checksum, first["samples"][place]) and checksum != first["samples"][place]:
                return f"dataset: sample {place} is another on rank {rank} than on rank 0; {rule}"
    return ""


def _checksum(sample: Any, so_far: int = 0) -> int:
    match sample:
        case Tensor():
            return zlib.crc32(
                _bytes(sample), zlib.crc32(f"{sample.dtype} {[*sample.shape]}".encode(), so_far)
            )
        case np.ndarray() if sample.dtype != object:
            return zlib.crc32(sample.tobytes(), zlib.crc32(f"{sample.dtype} {sample.shape}".encode(), so_far))
        case Mapping():
            for key in sample:
                so_far = _checksum(sample[key], zlib.crc32(str(key).encode(), so_far))
            return so_far
        case list() | tuple():
            for each in sample:
                so_far = _checksum(each, so_far)
            return zlib.crc32(str(len(sample)).encode(), so_far)
        case int() | float() | complex() | str() | bytes() | None | np.generic():
            return zlib.crc32(repr(sample).encode(), so_far)
    return zlib.crc32(type(sample).__qualname__.encode(), so_far)


def _bytes(tensor: Tensor) -> bytes:
    return to_host(tensor.detach()).contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
