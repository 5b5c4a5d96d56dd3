"""Finds a loss between samples whose numbers meet outside of its graph, as in weights that are detached.

Note: what a record shows.
Neither the graph of a loss nor its derivatives show how a mask, a weight or an index was made.  So in steps that look,
the operations between `engine(x)` and `engine.backward` are written down.  If a detached number of theirs meets one
that trains, they run again with some rows of the outputs changed.  The gradient of the others must stay.  With a count
of labels it may have another factor, as for a mean over some samples.  First they run as they were.  If that does not
give the gradient of the loss, the record is not whole and shows nothing.  So for a custom autograd.Function, and for
code that was compiled.  Numbers that went through Python or numpy stay as they were.  So do random ones.
Cost: in steps that look, a call of Python for each operation of the loss.  Where detached numbers meet, ten losses
with their gradients for each binary digit of the number of rows.  In later steps of the same operations four.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
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
MOST = 20_000
"""Operations of a record. A loss of more is not looked at."""
MOST_FORWARDS = 4
"""Forwards whose outputs one loss may read."""
Change = Callable[[Tensor, Tensor], Tensor]
CHANGES: Sequence[Change] = (
    lambda own, other: other,  # numbers that a model gives
    lambda own, other: 32 * own,
    lambda own, other: torch.zeros_like(own),
    lambda own, other: -other,
    lambda own, other: other / 4,
)
"""What the rows of an output become, by their own numbers and by those of rows that stay."""
AGAIN = CHANGES[:2]
"""Those of a loss whose operations have been looked at before."""


@dataclass(frozen=True)
class _Number:
    """A tensor of a record. `trains`: whether a gradient flows where it is read."""

    place: int
    trains: bool


@dataclass(frozen=True)
class _Constant:
    """A tensor that was made without the outputs, and its version then."""

    tensor: Tensor
    version: int


@dataclass(frozen=True)
class _Operation:
    """A call of aten. `made`: the places of its results, in their order. `writes`: it changes one of its arguments."""

    call: OpOverload
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    made: Sequence[int]
    writes: bool
    has_gradients: bool

    @property
    def read(self) -> list[_Number]:
        return list(_numbers_in((self.args, self.kwargs)))

    @property
    def meets_detached(self) -> bool:
        """Whether numbers that train meet numbers of the outputs that do not."""
        kinds = {number.trains for number in self.read}
        return self.has_gradients and self.call is not aten.detach.default and len(kinds) == 2


class LossRecord(WatchingMode):
    """The operations from the outputs of a model on, while it is on."""

    def __init__(self) -> None:
        super().__init__()
        self._key = f"place of {id(self)}"  # among the metadata of nodes
        self._forwards = 0
        self._forget_numbers()

    def _forget_numbers(self) -> None:
        self._places = WeakTensorKeyDictionary()
        self._first: dict[int, Tensor] = {}  # outputs, and what an operation has changed first
        self._sources: dict[int, int] = {}  # rows of the outputs
        self._operations: list[_Operation] = []
        self._count = 0

    def begin(self, outputs: Sequence[Tensor], rows: int) -> None:
        """Record what the loop makes of these outputs of a forward, from now on. Not beside another mode. Nor of more
        than `MOST_FORWARDS` that no backward has ended."""
        self._forwards += 1
        if self._forwards > MOST_FORWARDS:
            self._forget_numbers()
            return
        for x in outputs:
            if x.dim() and len(x) == rows and x.is_floating_point():
                place = self._place_of(x)
                self._first[place], self._sources[place] = x.detach(), rows
                node: Any = x.grad_fn
                if node is not None:
                    node.metadata.setdefault(self._key, {})[x.output_nr] = place
        if self._sources and not _len_torch_dispatch_stack():
            _push_on_torch_dispatch_stack(self)

    def pause(self) -> bool:
        """Record no more, until `begin` or `resume`. Whether it did."""
        stack = _get_current_dispatch_mode_stack()
        if self not in stack:
            return False
        above = stack[stack.index(self) + 1 :]  # modes that were entered since
        for _ in range(len(above) + 1):
            _pop_torch_dispatch_stack(None)
        for mode in above:
            _push_on_torch_dispatch_stack(mode)
        return True

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Within, nothing is recorded."""
        was_on = self.pause()
        try:
            yield
        finally:
            if was_on and not _len_torch_dispatch_stack():
                _push_on_torch_dispatch_stack(self)

    def end(self) -> None:
        """Record no more, and forget all."""
        self.pause()
        self._forget_numbers()
        self._forwards = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        is_read = any(x in self._places for x in tensors_in((args, kwargs)))
        if not is_read or not isinstance(func, OpOverload) or func in READ_NO_VALUES:
            return func(*args, **kwargs)
        if torch.Tag.nondeterministic_seeded in func.tags or self._count > MOST:
            return func(*args, **kwargs)
        written = list(written_by(func, args, kwargs))
        for x in written:
            self._keep(x)
        noted, named = tree_map_only(Tensor, self._noted, (tuple(args), kwargs))
        result = func(*args, **kwargs)
        made = [self._place_of(x) for x in tensors_in(result)]
        self._operations.append(_Operation(func, noted, named, made, bool(written), torch.is_grad_enabled()))
        return result

    def _place_of(self, x: Tensor) -> int:
        if x not in self._places:
            self._places[x] = self._count
            self._count += 1
        place: int = self._places[x]
        return place

    def _noted(self, x: Tensor) -> _Number | _Constant:
        if x in self._places:
            return _Number(self._places[x], x.requires_grad)
        constant = x.detach()
        return _Constant(constant, _version_of(constant))

    def _keep(self, x: Tensor) -> None:
        """Copy a tensor that an operation is about to change, as it is before."""
        if x not in self._places:
            self._first[self._place_of(x)] = x.detach().clone()
            return
        storage = x.untyped_storage()._cdata
        for place, kept in self._first.items():
            if kept.untyped_storage()._cdata == storage:
                self._first[place] = kept.clone()

    # ---- after the loss ----

    def couples(
        self, loss: Tensor, outputs: Sequence[GradientEdge], *, by_factor: bool, again: bool = False
    ) -> bool:
        """Whether the gradient of `loss` at rows of these `outputs` depends on other rows by detached numbers.
        `by_factor`: a common factor of them may. `again`: its operations have been looked at before."""
        if loss not in self._places or self._count > MOST:
            return False
        nodes: list[Any] = [edge.node for edge in outputs]
        places = [
            node.metadata.get(self._key, {}).get(edge.output_nr)
            for node, edge in zip(nodes, outputs, strict=True)
        ]
        last = self._places[loss]
        needed = self._needed(last)
        if None in places or not any(operation.meets_detached for operation in needed):
            return False
        right = torch.autograd.grad(loss, outputs, retain_graph=True, allow_unused=True)
        run = _Run(needed, self._first, places, last)
        with suppress(RuntimeError, IndexError, NotImplementedError):
            if _is_apart(right, run.gradients(), [slice(None)] * len(right), by_factor=False):
                return False  # the record is not whole
            return any(
                _is_apart(
                    right,
                    run.gradients(changed),
                    [kept.get(place, slice(0)) for place in places],
                    by_factor=by_factor,
                )
                for kept, changed in self._changes(AGAIN if again else CHANGES)
            )
        return False

    def _needed(self, last: int) -> list[_Operation]:
        """The operations that a number depends on, and all that change one."""
        wanted, found = {last}, list[_Operation]()
        for operation in reversed(self._operations):
            if operation.writes or not wanted.isdisjoint(operation.made):
                found.append(operation)
                wanted.update(number.place for number in operation.read)
        return found[::-1]

    def _changes(self, changes: Sequence[Change]) -> Iterator[tuple[dict[int, Tensor], dict[int, Tensor]]]:
        """Rows that stay, of each output, and outputs whose other rows are changed. Any two rows are once apart."""
        for digit in range((max(self._sources.values()) - 1).bit_length()):
            for parity in (0, 1):
                digits = {
                    place: torch.arange(rows, device=self._first[place].device) >> digit & 1
                    for place, rows in self._sources.items()
                }
                kept = {
                    place: found for place, x in digits.items() if len(found := (x == parity).nonzero()[:, 0])
                }
                for change in changes:
                    yield (
                        kept,
                        {
                            place: _with_rows(
                                self._first[place], rows, (digits[place] != parity).nonzero()[:, 0], change
                            )
                            for place, rows in kept.items()
                        },
                    )


@dataclass(frozen=True)
class _Run:
    """Operations that run again. `first`: numbers that they start from. `places`: where gradients are taken, of what
    stands at `last`."""

    operations: Sequence[_Operation]
    first: Mapping[int, Tensor]
    places: Sequence[int]
    last: int

    def gradients(self, changed: Mapping[int, Tensor] | None = None) -> Sequence[Tensor | None]:
        """The gradients at the outputs, with these numbers `changed`."""
        starts = dict(self.first) | dict(changed or {})
        with torch.enable_grad(), _without_autocast():
            leaves = {place: starts[place].detach().requires_grad_() for place in self.places}
            values = {place: leaves.get(place, x).clone() for place, x in starts.items()}
            for operation in self.operations:
                _compute(operation, values)
            return torch.autograd.grad(values[self.last], list(leaves.values()), allow_unused=True)


def _compute(operation: _Operation, values: dict[int, Tensor]) -> None:
    """Run an operation with these `values`, and note its results among them."""

    def given(x: Any) -> Any:
        match x:
            case _Number(place, trains):
                return values[place] if trains else values[place].detach()
            case _Constant(tensor, version):
                if _version_of(tensor) != version:
                    raise RuntimeError("a constant has changed since")
                return tensor
        return x

    if operation.call is aten.detach.default:  # of a user, or of torch itself for a view
        values[operation.made[0]] = values[operation.read[0].place]
        return
    args, kwargs = tree_map_only((_Number, _Constant), given, (operation.args, dict(operation.kwargs)))
    with torch.set_grad_enabled(operation.has_gradients):
        result = operation.call(*args, **kwargs)
    values.update(zip(operation.made, tensors_in(result), strict=True))


def _is_apart(
    right: Sequence[Tensor | None], found: Sequence[Tensor | None], rows: Sequence[Any], *, by_factor: bool
) -> bool:
    """Whether gradients differ in some rows. `by_factor`: from each multiple of the right ones. Not where they are not
    finite."""
    pairs = list[tuple[Tensor, Tensor]]()
    for x, y, some in zip(right, found, rows, strict=True):
        if (shaped := y if x is None else x) is not None:
            none = torch.zeros_like(shaped)
            pairs.append(((none if x is None else x)[some], (none if y is None else y)[some]))
    factor = 1.0
    if by_factor and (square := sum(_product(x, x) for x, _ in pairs)):
        factor = sum(_product(x, y) for x, y in pairs) / square
    wrong = sum(_norm(y - factor * x) ** 2 for x, y in pairs)
    size = sum(max(_norm(x), _norm(y)) ** 2 for x, y in pairs)
    rounding = max((torch.finfo(x.dtype).eps for x, _ in pairs), default=0.0)
    return wrong > rounding * size and math.isfinite(size)


def _product(x: Tensor, y: Tensor) -> float:
    return float((x * y).sum(dtype=torch.float64))


def _norm(x: Tensor) -> float:
    return float(torch.linalg.vector_norm(x, dtype=torch.float64))


def _with_rows(x: Tensor, stay: Tensor, change: Tensor, by: Change) -> Tensor:
    """x with some rows changed, by rows that stay in turn."""
    others = x[stay[torch.arange(len(change), device=x.device) % len(stay)]]
    return x.index_copy(0, change, by(x[change], others))


def _numbers_in(values: Any) -> Iterator[_Number]:
    return (x for x in tree_leaves(values) if isinstance(x, _Number))


def _version_of(x: Tensor) -> int:
    return 0 if x.is_inference() else x._version


@contextmanager
def _without_autocast() -> Iterator[None]:
    with torch.autocast("cpu", enabled=False), torch.autocast("cuda", enabled=False):
        yield
