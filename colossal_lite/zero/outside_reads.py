"""Watches the first forwards of a model for weights that are read where no gate has asked for them.

Note: why to watch.
A gate stands before the forward of a module, and asks for the weights that this module owns.  Code may read a weight
without calling its owner, as in `x @ self.codebook.weight.T`.  Where weights are hidden until a gate asks, such code
would read NaN.  Autograd's saved tensors show some of these reads, but none under `no_grad` and none of a sum.  So the
first forward in each mode (with gradients, and without) is seen operation by operation.  It shows the weights that were
read before their gates, and the tensors that were changed.  A view reads nothing.  Cost: the CPU time of two forwards,
some microseconds for each of their operations.  Code that first runs in a later forward is not seen.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor

from colossal_lite.memory.weight_chunk import WeightChunk
from colossal_lite.numerics.torch_modes import WatchingMode, read_by, storage_of, written_by


class OutsideReads(WatchingMode):
    """One forward, seen operation by operation."""

    def __init__(
        self, chunks: Iterable[WeightChunk], read: Callable[[WeightChunk], object],
        written: Callable[[Tensor], object],
    ) -> None:  # fmt: skip
        """`read` is called with a chunk whose weights, or their placeholder, an operation reads. `written` is called
        with a tensor that an operation has changed."""
        super().__init__()
        self._read, self._written = read, written
        self.has_seen = False
        """Whether there was an operation."""
        self._chunks: dict[int, list[WeightChunk]] = {}
        for chunk in chunks:
            self._chunks.setdefault(chunk.seen_in, []).append(chunk)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.has_seen = True
        for tensor in read_by(func, args, kwargs):
            chunks = self._chunks.get(storage_of(tensor), ())
            for chunk in chunks:
                if len(chunks) == 1 or chunk.saved(tensor) is not None:
                    self._read(chunk)
        out = func(*args, **(kwargs or {}))
        for tensor in written_by(func, args, kwargs):
            self._written(tensor)
        return out
