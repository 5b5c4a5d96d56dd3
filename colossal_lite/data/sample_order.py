"""Orders samples: a keyed permutation for each epoch, and the batches along the stream of epochs."""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

Ids = npt.NDArray[np.int64]


SAMPLE_ORDER_KEY = "colossal_lite.data.Permutation"
"""Part of the key of the order of samples. It looks like a module path and must never change with one."""


@dataclass(frozen=True)
class Permutation:
    """A keyed bijection of range(n): `Permutation(n, seed, epoch)(indices)`; state and memory are O(1).

    A Feistel network over Z_a x Z_b with addition modulo a and b. a * b is the least such product near n. Cycle
    walking handles the few values outside range(n) (Black and Rogaway, "Ciphers with
    arbitrary finite domains", 2002, section 5). Not meant to be secret, only to be even.
    """

    n: int
    seed: int
    epoch: int = 0

    NUM_ROUNDS = 8

    def __post_init__(self) -> None:
        if not 1 <= self.n < 1 << 62:
            raise ValueError(f"n: {self.n} samples cannot be permuted; legal: 1 to 2**62 - 1")

    @cached_property
    def _keys(self) -> npt.NDArray[np.uint64]:
        name = f"{SAMPLE_ORDER_KEY}/{self.n}/{self.seed}/{self.epoch}"
        return np.frombuffer(hashlib.blake2b(name.encode(), digest_size=8 * self.NUM_ROUNDS).digest(), "<u8")

    @cached_property
    def _sides(self) -> tuple[np.uint64, np.uint64]:
        a = math.isqrt(self.n)
        return np.uint64(a), np.uint64(-(-self.n // a))

    def __call__(self, indices: npt.ArrayLike) -> Ids:
        """The values at `indices` (integers in [0, n), any shape), int64."""
        given = np.asarray(indices, dtype=np.int64)
        if given.size and not 0 <= given.min() <= given.max() < self.n:
            raise ValueError(f"indices: {given.min()} to {given.max()}; legal: 0 to n - 1 = {self.n - 1}")
        values = self._network(given.reshape(-1).astype(np.uint64))
        while (outside := values >= self.n).any():
            values[outside] = self._network(values[outside])
        return values.astype(np.int64).reshape(given.shape)

    def _network(self, x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
        a, b = self._sides
        left, right = x % a, x // a
        for key_left, key_right in self._keys.reshape(-1, 2):
            left = (left + _mix(right ^ key_left) % a) % a
            right = (right + _mix(left ^ key_right) % b) % b
        return right * a + left


def _mix(x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """The 64-bit finaliser of SplitMix64 (Steele, Lea, Flood 2014, figure 16); arrays wrap silently."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


@dataclass(frozen=True)
class Order:
    """The samples of every batch of a run; positions count samples along the stream."""

    num_samples: int
    global_batch: int
    seed: int
    shuffle: bool = True
    drop_last: bool = True

    def __post_init__(self) -> None:
        if self.num_samples < 1:
            raise ValueError("dataset: 0 samples found, at least 1 needed")
        if self.global_batch < 1:
            raise ValueError(
                f"global_batch: {self.global_batch}; legal: 1 or more samples per optimizer step"
            )
        if self.drop_last and self.num_samples < self.global_batch:
            raise ValueError(
                f"dataset: {self.num_samples} samples found, {self.global_batch} needed for one batch; "
                f"legal: more data, global_batch <= {self.num_samples}, or drop_last=False"
            )

    @property
    def epoch_samples(self) -> int:
        """Samples that one epoch yields: all, less the ragged last batch where that is dropped."""
        return self.num_samples - self.num_samples % self.global_batch * self.drop_last

    def starts(self, position: int) -> range:
        """Where the batches from stream position `position` to the end of its epoch begin; never empty.

        A rest too short for a batch is skipped. Only a position off the multiples of `global_batch` leaves one.
        """
        size = self.epoch_samples
        end = (position // size + 1) * size
        if self.drop_last and end - position < self.global_batch:
            position, end = end, end + size
        return range(position, end - (self.global_batch - 1) * self.drop_last, self.global_batch)

    def stop(self, start: int) -> int:
        """Where the batch that begins at `start` ends: after `global_batch` samples, or with the epoch."""
        size = self.epoch_samples
        return min(start + self.global_batch, (start // size + 1) * size)

    def ids(self, start: int, stop: int) -> Ids:
        """Dataset indices of stream positions [start, stop), which lie in one epoch."""
        epoch, first = divmod(start, self.epoch_samples)
        offsets = np.arange(first, first + stop - start, dtype=np.int64)
        return Permutation(self.num_samples, self.seed, epoch)(offsets) if self.shuffle else offsets
