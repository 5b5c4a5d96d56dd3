"""Refuses a second forward of a block that reads other values than the first, or changes a buffer once more.

Note: inputs and buffers.
The inputs of a block and all buffers of the model are noted when its first forward begins.  What has changed when the
second begins may be read there no more: it would give other activations.  It may not be changed there either: one
forward changes it once.  So a buffer that changes outside of recomputed blocks may have any values.
Cost: a look at each buffer and input, twice a block.  Where one has changed, the second forward is seen operation by
operation.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import _StopRecomputationError

from colossal_lite.numerics.torch_modes import WatchingMode, read_by, storage_of, tensors_in

Seen = Mapping[str, tuple[Tensor | None, int]]
"""Tensors by what a message calls them, each with its version."""


class Buffers:
    """The buffers of one model, as code may exchange or change them."""

    def __init__(self, model: nn.Module) -> None:
        self._places = [
            (f"the buffer {path}.{name}".replace(" .", " "), module._buffers, name)
            for path, module in model.named_modules()
            for name in module._buffers
        ]

    def now(self) -> Seen:
        with torch._C.DisableTorchFunctionSubclass():
            return {name: _seen(owner.get(key)) for name, owner, key in self._places}


def inputs_now(given: Mapping[str, Any]) -> Seen:
    """The tensors among the arguments of a block."""
    with torch._C.DisableTorchFunctionSubclass():
        return {
            f"its argument {name}{place or ''}": _seen(x)
            for name, value in given.items()
            for place, x in enumerate(tensors_in(value))
        }


def _seen(x: Tensor | None) -> tuple[Tensor | None, int]:
    return x, 0 if x is None or x.is_inference() else x._version


def _differing(before: Seen, now: Seen) -> dict[str, Tensor | None]:
    return {
        name: x for name, (x, number) in now.items()
        if x is not before[name][0] or number != before[name][1]
    }  # fmt: skip


class SecondForward:
    """The second forward of a block. Raises ValueError where it reads a tensor that has changed since the first began,
    or changes a buffer."""

    def __init__(self, block: str, setting: str, buffers: Buffers, given: Mapping[str, Any]) -> None:
        """Made when the first forward begins, whose arguments are `given`."""
        self._block, self._setting, self._buffers = block, setting, buffers
        self._before, self._inputs = buffers.now(), inputs_now(given)
        self._now, self._watch = self._before, ExitStack()

    def begin(self) -> None:
        """It begins now."""
        self._now = self._buffers.now()
        changed = _differing(self._before, self._now)
        with torch._C.DisableTorchFunctionSubclass():
            changed |= _differing(self._inputs, {name: _seen(x) for name, (x, _) in self._inputs.items()})
        if changed:
            self._watch.enter_context(_Touched(self._block, self._setting, changed))

    def close(self) -> None:
        """It has ended."""
        self._watch.close()

    def check(self, error: BaseException | None) -> None:
        """Behind it: raises ValueError for a buffer that it has changed, unless it ended with an `error` of its own."""
        if error is not None and not isinstance(error, _StopRecomputationError):
            return
        for name, x in _differing(self._now, self._buffers.now()).items():
            was = self._now[name][0]
            if x is was or x is None or was is None or not torch.equal(x, was):
                raise _fault(self._block, self._setting, name)


class _Touched(WatchingMode):
    """Raises ValueError for an operation on one of the `changed` tensors."""

    def __init__(self, block: str, setting: str, changed: Mapping[str, Tensor | None]) -> None:
        super().__init__()
        self._block, self._setting = block, setting
        self._names = {storage_of(x): name for name, x in changed.items() if x is not None}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for tensor in read_by(func, args, kwargs):
            if name := self._names.get(storage_of(tensor)):
                raise _fault(self._block, self._setting, name)
        return func(*args, **(kwargs or {}))


def _fault(block: str, setting: str, name: str) -> ValueError:
    return ValueError(
        f"{setting}: {block} runs again in backward, and {name} has changed since its forward, or would change once "
        f"more. Legal: activation_checkpoint='none', or a model that changes it neither in a block nor behind one that "
        f"reads it"
    )
