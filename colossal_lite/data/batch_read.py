"""Describes what a rank has read of a stream for one global batch, so that ranks can compare it.

Note: the way of a `BatchRead`.
The loader makes one from the checksums of all samples of the batch, those of other ranks too.  The tensors that it
hands out carry it.  The step that trains on one of them, or on a view of it, compares it (checks/rank_comparison.py).
A batch whose tensors are all made anew, as by a cast, carries none, and is not compared.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from colossal_lite.data.fingerprint import BITS

_READ = "_batch_read"
"""Where a tensor has the fields of the `BatchRead` of its batch: plain values, so that `torch.load` takes it."""


@dataclass(frozen=True)
class BatchRead:
    """What one rank has read for a global batch."""

    start: int
    """Samples of the run before it."""
    samples: tuple[int, ...]
    """A checksum of each of its samples."""
    ahead: int
    """Samples that the pass still has for the next global batch; 0 at its end."""

    @property
    def mark(self) -> int:
        """A number of `BITS` bits for all of it."""
        return zlib.crc32(repr((self.start, self.samples, self.ahead)).encode()) & ((1 << BITS) - 1)

    def carried_by(self, tensor: Tensor) -> Tensor:
        """The tensor, which carries this from now on."""
        setattr(tensor, _READ, (self.start, self.samples, self.ahead))
        return tensor


def read_of(batch: Any) -> BatchRead | None:
    """What a tensor of the batch carries, or the tensor that it is a view of."""
    for x in _tensors(batch):
        for each in (x, x._base):
            if found := getattr(each, _READ, None):
                return BatchRead(*found)
    return None


def _tensors(batch: Any) -> Iterator[Tensor]:
    match batch:
        case Tensor():
            yield batch
        case Mapping():
            yield from _tensors(tuple(batch.values()))
        case list() | tuple():
            for each in batch:
                yield from _tensors(each)
