"""Computes checksums of samples, so that ranks can tell whether their datasets give the same.

Note: of a sample tensors, arrays, numbers and text are read, also within tuples, lists and mappings.  Of anything else
only the type is.
"""

from __future__ import annotations

import zlib
from array import array
from collections.abc import Collection, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from colossal_lite.memory.transfers import to_host

_PLAIN = {int, float, complex, bool, str, type(None)}


def checksum(sample: Any, fields: Collection[str] | None = None) -> int:
    """The checksum of a sample; with `fields`, of these alone."""
    if fields is None:
        return _checksum(sample)
    return zlib.crc32(
        repr([(name, one) for name, one in by_field(sample).items() if name in fields]).encode()
    )


def by_field(sample: Any) -> dict[str, int]:
    """The checksum of each entry of a mapping, tuple or list, and of anything else, numbers too, as a whole."""
    match sample:
        case Mapping():
            return {str(name): _checksum(each) for name, each in sample.items()}
        case tuple() | list() if isinstance(sample, tuple) or _packed(sample) is None:
            return {str(place): _checksum(each) for place, each in enumerate(sample)}
    return {"": _checksum(sample)}


def _checksum(sample: Any, so_far: int = 0) -> int:
    match sample:
        case Tensor():
            return zlib.crc32(_bytes(sample), zlib.crc32(f"{sample.dtype}{sample.shape}".encode(), so_far))
        case np.ndarray() if sample.dtype != object:
            return zlib.crc32(sample.tobytes(), zlib.crc32(f"{sample.dtype}{sample.shape}".encode(), so_far))
        case Mapping():
            for key in sample:
                so_far = _checksum(sample[key], zlib.crc32(str(key).encode(), so_far))
            return so_far
        case list() | tuple():
            if (packed := _packed(sample)) is not None:
                return zlib.crc32(packed, so_far)
            for each in sample:
                so_far = _checksum(each, so_far)
            return zlib.crc32(str(len(sample)).encode(), so_far)
        case bytes() | bytearray():
            return zlib.crc32(sample, zlib.crc32(b"bytes", so_far))
        case int() | float() | complex() | str() | None | np.generic():
            return zlib.crc32(repr(sample).encode(), so_far)
    return zlib.crc32(type(sample).__qualname__.encode(), so_far)


def _packed(sample: list[Any] | tuple[Any, ...]) -> bytes | None:
    """The bytes of numbers and text, as rows of token ids have them, read at once; None for anything else."""
    try:
        return array("q", sample).tobytes()
    except (TypeError, ValueError, OverflowError):  # not whole numbers of at most 64 bits
        return repr(sample).encode() if {*map(type, sample)} <= _PLAIN else None


def _bytes(tensor: Tensor) -> Any:
    here = tensor.detach() if tensor.device.type == "cpu" else to_host(tensor)
    return here.contiguous().reshape(-1).view(torch.uint8).numpy()
