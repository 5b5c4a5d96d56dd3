"""Saves results that activation checkpointing would otherwise compute again.

Note: activation checkpointing runs a block again in backward.  A `SavedResults` holds the results that the second run
must not repeat: outputs of some torch operations, and results of `save_for_recompute(compute, like)`.  The second run
takes them in the order in which they were computed, and computes the rest.  A layer calls `save_for_recompute` where a
choice by operation is too coarse.  For a sum over ranks, the terms would be saved before the sum, and the sum would run
again.  The call is in the forward of an autograd function, below the graph; within `compute` no operation is saved.
Outside of a `SavedResults`, `save_for_recompute` only calls `compute`.  Layers find the recorder through torch's mode
stack.  No argument is passed.  (torch's selective contexts count the calls of an operation.  They return the wrong
result once calls are left out.)
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode, handle_torch_function, has_torch_function
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

Result = TypeVar("Result")


def save_for_recompute(compute: Callable[[], Result], like: Tensor) -> Result:
    """`compute()`, of tensors, or its result of the first run when a block runs again. `like`: any tensor that it
    reads."""
    if has_torch_function((like,)):
        call: Callable[..., Any] = save_for_recompute
        result: Result = handle_torch_function(call, (like,), compute, like)
        return result
    if (handle := getattr(_within, "handle", None)) is None:
        return compute()
    with _found(None):
        found: Result = handle(compute)
        return found


_within = threading.local()
"""`handle` of the recorder whose mode torch has taken off the stack, while the mode handles a call of this thread."""


@contextmanager
def _found(handle: Callable[[Callable[[], Any]], Any] | None) -> Iterator[None]:
    before, _within.handle = getattr(_within, "handle", None), handle
    try:
        yield
    finally:
        _within.handle = before


class SavedResults:
    """The results of the first run of one block, each with its version, to detect a later change."""

    def __init__(self, operations: Collection[Any]) -> None:
        self.operations = operations
        self._results: deque[Any] = deque()
        self.is_computing = False

    @contextmanager
    def first(self) -> Iterator[None]:
        """Context of the first run."""
        with _Operations(self, self._remember), _Calls(self._remember):
            yield

    @contextmanager
    def again(self) -> Iterator[None]:
        """Context of the second run. Raises RuntimeError if it needs more results than were saved, or a changed one."""
        with _Operations(self, self._take), _Calls(self._take):
            yield

    def _remember(self, compute: Callable[[], Any]) -> Any:
        self.is_computing = True
        try:
            result = compute()
        finally:
            self.is_computing = False
        self._results.append(tree_map_only(Tensor, lambda t: (_alias(t), t._version), result))
        return result

    def _take(self, compute: Callable[[], Any]) -> Any:
        if not self._results:
            raise RuntimeError(
                "activation_checkpoint='selective': a block's second run does more than its first did; legal: one "
                "backward, of a block that computes the same each time"
            )
        return tree_map_only(tuple, _unchanged, self._results.popleft(), is_leaf=_is_versioned)


class _Operations(TorchDispatchMode):
    def __init__(self, kept: SavedResults, handle: Callable[[Callable[[], Any]], Any]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._kept, self._handle = kept, handle

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in self._kept.operations or self._kept.is_computing:
            return func(*args, **(kwargs or {}))
        return self._handle(lambda: func(*args, **(kwargs or {})))


class _Calls(TorchFunctionMode):
    def __init__(self, handle: Callable[[Callable[[], Any]], Any]) -> None:
        super().__init__()
        self._handle = handle

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Code of ours may stand in the place of a call, such as attention of a model that is shown whole sequences."""
        if func is save_for_recompute:
            with _found(None):
                return self._handle(args[0])
        with _found(self._handle):
            return func(*args, **(kwargs or {}))


def _alias(tensor: Tensor) -> Tensor:
    """The same elements and version, without the autograd graph."""
    with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False):
        return tensor.detach()


def _is_versioned(node: Any) -> bool:
    return isinstance(node, tuple) and len(node) == 2 and isinstance(node[0], Tensor) and type(node[1]) is int


def _unchanged(node: Any) -> Any:
    if not _is_versioned(node):
        return node
    tensor, version = node
    if tensor._version != version:
        raise RuntimeError(
            "activation_checkpoint='selective': a product that was saved for backward has been changed in place; "
            "change a copy of it, or use 'full'"
        )
    return tensor
