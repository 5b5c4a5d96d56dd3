"""Measures the bytes of live tensors while code runs: now, and at the peak.

Note: storages, not tensors.
Views share their bytes, so each storage counts once, from the operation that makes it until it is freed.  The meter
sees every operation of torch's dispatcher while it is active.  So it also works on meta tensors, which hold no bytes.
The planner measures a run that way without its devices.  Compiled code runs uncompiled while it is active.  The
storages alive at the end of a forward pass are those that autograd saves for backward, recomputation included.  It does
not see workspace inside one operation.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor

from colossal_lite.numerics.torch_modes import DispatchMode, uncompiled
from colossal_lite.observe.shape_cache import storage_of, tensors_in


def _plainly(func: Any, args: Any, kwargs: Any) -> Any:
    return func(*args, **kwargs)


class LiveBytes(DispatchMode):
    """Counts bytes of storages made while this is active and still alive. `run` executes each operation."""

    def __init__(self, run: Callable[[Any, Any, Any], Any] = _plainly) -> None:
        super().__init__()
        self.now_bytes = self.peak_bytes = 0
        self._alive: set[int] = set()
        self._run = run
        self._around: list[ExitStack] = []

    def __enter__(self) -> Self:
        with ExitStack() as around:
            around.enter_context(uncompiled())
            super().__enter__()  # type: ignore[no-untyped-call]
            self._around.append(around.pop_all())
        return self

    def __exit__(self, *error: Any) -> None:
        with self._around.pop():
            super().__exit__(*error)  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {storage_of(x) for x in tensors_in((args, kwargs))}
        out = self._run(func, args, kwargs or {})
        for x in tensors_in(out):
            if (key := storage_of(x)) not in given and key not in self._alive:
                self._count(x, key)
        return out

    def window(self) -> int:
        """The peak since the last call; the next window starts from the bytes alive now."""
        peak, self.peak_bytes = self.peak_bytes, self.now_bytes
        return peak

    def _count(self, x: Tensor, key: int) -> None:
        storage = x.untyped_storage()
        held_bytes = storage.nbytes()
        self._alive.add(key)
        self.now_bytes += held_bytes
        self.peak_bytes = max(self.peak_bytes, self.now_bytes)
        weakref.finalize(storage, self._forget, key, held_bytes)

    def _forget(self, key: int, held_bytes: int) -> None:
        self._alive.discard(key)
        self.now_bytes -= held_bytes


class AllocatedBytes:
    """Measures the peak of a GPU's allocator over `base_bytes` while this is active. Workspaces inside operations are
    included. The peak is reset at each beginning."""

    def __init__(self, device: torch.device, base_bytes: int, allocator: Any = torch.cuda) -> None:
        """`allocator`: a module with torch.cuda's memory statistics."""
        self._device, self._allocator = device, allocator
        # A base larger than the allocated bytes would hide later allocations.
        self._base_bytes = min(base_bytes, allocator.memory_allocated(device))
        self.peak_bytes = 0

    def __enter__(self) -> None:
        self._allocator.reset_peak_memory_stats(self._device)

    def __exit__(self, *error: object) -> None:
        most = self._allocator.max_memory_allocated(self._device) - self._base_bytes
        self.peak_bytes = max(self.peak_bytes, most)


@dataclass(frozen=True)
class MemoryMoment:
    """A part of a step: live bytes at its end, and their peak within it."""

    name: str
    live_bytes: int
    peak_bytes: int


def _most(moments: Sequence[MemoryMoment]) -> int:
    return max((moment.peak_bytes for moment in moments), default=0)


class StepMeter(LiveBytes):
    """Live bytes over whole steps of training: `kept_bytes` is the most that the end of a forward pass left."""

    def __init__(self) -> None:
        super().__init__()
        self.kept_bytes = 0
        self.shape = (0, 0)
        """Samples of all micro-batches of a step as long as the largest, and tokens of one sample."""
        self._moments: list[MemoryMoment] = []
        self._highest: tuple[MemoryMoment, ...] = ()

    def begin(self) -> None:
        """Starts a step."""
        self._highest, self._moments = self.moments, []

    def moment(self, name: str) -> None:
        """End a moment of the step, and name it."""
        self._moments.append(MemoryMoment(name, self.now_bytes, self.window()))

    @property
    def moments(self) -> tuple[MemoryMoment, ...]:
        """The moments of the step that held most. `end` is the part after the last named moment."""
        here = tuple(self._moments)
        if here and self.peak_bytes > self.now_bytes:
            here = (*here, MemoryMoment("end", self.now_bytes, self.peak_bytes))
        return max(self._highest, here, key=_most)

    @property
    def most_bytes(self) -> int:
        """Live bytes at the worst moment of all steps."""
        return max(_most(self._highest), _most(self._moments), self.peak_bytes)

    def forward_ended(self, shapes: Sequence[Sequence[int]]) -> None:
        """Record that one micro-batch of a step, with these shapes, has gone forward on this rank."""
        self.kept_bytes = max(self.kept_bytes, self.now_bytes)
        sizes = [(len(shapes) * shape[0], shape[1] if len(shape) > 1 else 1) for shape in shapes]
        self.shape = max(self.shape, *sizes)
