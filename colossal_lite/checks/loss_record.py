"""Records what a loop makes of a model's outputs, to find a loss between samples by numbers that are detached.

Note: what a record shows.
Neither the graph of a loss nor its derivatives show how a mask, a weight or an index was made.  So in steps that look,
the operations between `engine(x)` and `engine.backward` are written down.  If a detached number of theirs meets one
that trains, they run again with some rows of the outputs changed.  The gradient of the others must stay
(loss_replay.py).

Note: what it does not hold.
First the operations run as they were.  If that does not give the gradient of the loss, the record shows nothing.  So
for a custom autograd.Function, and for code that was compiled.  Collectives never run again: what they give stays as it
was.  So do random numbers, and what went through Python or numpy.
Cost: in steps that look, a call of Python for each operation.  It holds the outputs until backward.  Of others it holds
at most `LIMIT_BYTES` and four times the outputs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._C import _pop_torch_dispatch_stack, _push_on_torch_dispatch_stack
from torch._ops import OpOverload
from torch.autograd.graph import GradientEdge
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack, _len_torch_dispatch_stack
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.weak import WeakTensorKeyDictionary

from colossal_lite.numerics.torch_modes import READ_NO_VALUES, WatchingMode, tensors_in, written_by

aten = torch.ops.aten
MOST_OPERATIONS = 20_000
MOST_FORWARDS = 4
"""Forwards whose outputs one loss may read."""
LIMIT_BYTES = 64 << 20


@dataclass(frozen=True)
class Number:
    """A tensor of a record, by its place. `trains`: whether a gradient flows where it is read."""

    place: int
    trains: bool


@dataclass(frozen=True)
class Operation:
    """A call of aten, with each tensor of the record as a `Number`; others are constants. `made`: the places of its
    results, in their order. `writes`: it changes one of its arguments. `has_gradients`: whether autograd was on."""

    call: OpOverload
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    made: Sequence[int]
    writes: bool
    has_gradients: bool

    @property
    def read(self) -> list[Number]:
        return [x for x in tree_leaves((self.args, self.kwargs)) if isinstance(x, Number)]

    @property
    def meets_detached(self) -> bool:
        """Whether numbers that train meet numbers of the outputs that do not."""
        kinds = {number.trains for number in self.read}
        return self.has_gradients and self.call is not aten.detach.default and len(kinds) == 2


@dataclass(frozen=True)
class Recorded:
    """How a loss was made. `starts`: tensors that the operations start from, by their places. `rows`: of those that are
    outputs. `loss`: its place."""

    operations: Sequence[Operation]
    starts: Mapping[int, Tensor]
    rows: Mapping[int, int]
    loss: int


class LossRecord(WatchingMode):
    """The operations on outputs of a model, while it is on."""

    def __init__(self) -> None:
        super().__init__()
        self._key = f"place of {id(self)}"  # among the metadata of nodes
        self._forwards = 0
        self._forget(gives_up=False)

    def _forget(self, *, gives_up: bool) -> None:
        self._places = WeakTensorKeyDictionary()
        self._starts: dict[int, Tensor] = {}  # outputs, and tensors that an operation was about to change
        self._rows: dict[int, int] = {}  # of the outputs among them
        self._operations: list[Operation] = []
        self._count = 0  # of places
        self._bytes_left = 0
        self._gave_up = gives_up

    # ---- on and off ----

    def begin(self, outputs: Sequence[Tensor], rows: int) -> None:
        """Record what the loop makes of these outputs of a forward, from now on. Not beside another mode. Nor of more
        than `MOST_FORWARDS` that no backward has ended."""
        self._forwards += 1
        if self._forwards > MOST_FORWARDS:
            self._forget(gives_up=True)
        if self._gave_up:
            return
        if not self._rows:
            self._bytes_left = LIMIT_BYTES
        for x in outputs:
            node: Any = x.grad_fn
            if node is not None and x.dim() and len(x) == rows and x.layout is torch.strided:
                place = self._place_of(x)
                self._starts[place], self._rows[place] = x.detach(), rows
                self._bytes_left += 4 * x.nbytes
                node.metadata.setdefault(self._key, {})[x.output_nr] = place
        self.resume()

    def resume(self) -> None:
        """Record further, if there are outputs."""
        if self._rows and not _len_torch_dispatch_stack():
            _push_on_torch_dispatch_stack(self)

    def pause(self) -> bool:
        """Record no more, until `begin` or `resume`. So for records of other engines. Whether this one did."""
        modes = _get_current_dispatch_mode_stack()
        records = [mode for mode in modes if isinstance(mode, LossRecord)]
        if records:
            above = modes[modes.index(records[0]) :]
            for _ in above:
                _pop_torch_dispatch_stack(None)
            for mode in above:
                if mode not in records:
                    _push_on_torch_dispatch_stack(mode)
        return self in records

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Within, nothing is recorded."""
        was_on = self.pause()
        try:
            yield
        finally:
            if was_on:
                self.resume()

    def end(self) -> None:
        """Record no more, and forget all."""
        self.pause()
        self._forget(gives_up=False)
        self._forwards = 0

    # ---- an operation ----

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = tensors_in((args, kwargs))
        if not any(self._is_known(x) for x in given):
            return func(*args, **kwargs)
        written = list(written_by(func, args, kwargs))
        if not _runs_again(func, given):
            for x in given if _is_collective(func) else written:
                self._places.pop(x, None)  # a constant from now on
            return func(*args, **kwargs)
        for x in written:
            self._keep(x)
        noted, named = tree_map_only(Tensor, self._noted, (tuple(args), kwargs))
        result = func(*args, **kwargs)
        self._add(func, noted, named, tensors_in(result), writes=bool(written))
        if self._gave_up or len(self._operations) > MOST_OPERATIONS or self._bytes_left < 0:
            self._forget(gives_up=True)
        return result

    def _add(
        self, func: OpOverload, args: Any, kwargs: Any, results: Sequence[Tensor], *, writes: bool
    ) -> None:
        made = [self._place_of(x) for x in results]
        self._operations.append(Operation(func, args, kwargs, made, writes, torch.is_grad_enabled()))

    def _is_known(self, x: Tensor) -> bool:
        """Whether a tensor was made of the outputs, or its base was."""
        return x in self._places or (x._base is not None and x._base in self._places)

    def _place_of(self, x: Tensor) -> int:
        if x not in self._places:
            self._places[x] = self._count
            self._count += 1
        place: int = self._places[x]
        return place

    def _noted(self, x: Tensor) -> Number | Tensor:
        if self._is_known(x):
            self._note_view(x)
            return Number(self._places[x], x.requires_grad)
        self._bytes_left -= x.nbytes
        return x.detach()

    def _note_view(self, x: Tensor) -> None:
        """Note a view whose base is known, if it is not yet: it was made before."""
        if x in self._places:
            return
        base = x._base
        assert base is not None
        self._gave_up |= not base.is_contiguous() or base.storage_offset() != 0  # its copy has other strides
        number = Number(self._places[base], base.requires_grad)
        self._add(
            aten.as_strided.default, (number, list(x.shape), list(x.stride()), x.storage_offset()), {}, [x],
            writes=False,
        )  # fmt: skip

    def _keep(self, x: Tensor) -> None:
        """Copy a tensor that an operation is about to change, as it is before."""
        if not self._is_known(x):
            self._start(x if x._base is None else x._base)
        self._note_view(x)
        storage = x.untyped_storage()._cdata
        for place, start in self._starts.items():
            if start.untyped_storage()._cdata == storage:
                self._starts[place] = start.clone()

    def _start(self, x: Tensor) -> None:
        self._starts[self._place_of(x)] = x.detach().clone()
        self._bytes_left -= x.nbytes

    # ---- after the loss ----

    def of(self, loss: Tensor) -> Recorded | None:
        """How `loss` was made, if detached numbers of the outputs meet there what trains."""
        if loss not in self._places:
            return None
        wanted, found = {self._places[loss]}, list[Operation]()
        for operation in reversed(self._operations):
            if operation.writes or not wanted.isdisjoint(operation.made):
                found.append(operation)
                wanted.update(number.place for number in operation.read)
        if not any(operation.meets_detached for operation in found):
            return None
        return Recorded(found[::-1], self._starts, self._rows, self._places[loss])

    def places(self, edges: Sequence[GradientEdge]) -> list[int | None]:
        """The places of outputs, by the edges of their gradients."""
        found = list[int | None]()
        for edge in edges:
            node: Any = edge.node
            found.append(node.metadata.get(self._key, {}).get(edge.output_nr))
        return found


def _runs_again(func: Any, given: Sequence[Tensor]) -> bool:
    """Whether an operation gives the same of the same tensors, and reads their values."""
    if not isinstance(func, OpOverload) or func.namespace != "aten" or func in READ_NO_VALUES:
        return False
    is_drawn = torch.Tag.nondeterministic_seeded in func.tags
    return not is_drawn and all(x.layout is torch.strided for x in given)


def _is_collective(func: Any) -> bool:
    """Whether tensors are exchanged. These operations do not say what they write."""
    return isinstance(func, OpOverload) and "c10d" in func.namespace
