"""Computes the loss in the head of a model, block of rows by block, so that its logits are never whole.

Note: which heads, and what the model sees.
A head computes the loss if the logits that forward returns are what one linear without bias gives, untouched.  A copy
of the model that has no values is run once to see it.  The engine gives the head its labels; then the head gives
`UnmadeLogits`.  Code or a hook that reads those gets true logits, made then. The loss is that of the head still, and
that of the logits if they were written to.  A user's own criterion gets logits.
Backward needs no weight of the head, but says that it reads it.  So at ZeRO-3 the order of weights is that of a
user's own loop, whose backward does read it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

from colossal_lite.kernels import Ops
from colossal_lite.layers.tensor_1d_layers import Head, gather_from_sequence_region, with_padding
from colossal_lite.models import GPT
from colossal_lite.numerics.torch_modes import autocast_dtype
from colossal_lite.parallel.small_copy import TOKENS, deep_copy
from colossal_lite.transforms.compiled_units import compiled_units
from colossal_lite.transforms.split_backward import WeightGradStore, deliver, linear, store_for


class UnmadeLogits(Tensor):
    """Has shape, dtype and device of logits [B, T, V], and no storage. Any operation on it makes them."""

    rows: Tensor
    make: Callable[[], Tensor]
    loss: tuple[Tensor, Tensor]
    made: Tensor | None
    version: int

    @staticmethod
    def of(
        rows: Tensor, vocabulary: int, make: Callable[[], Tensor], loss: tuple[Tensor, Tensor]
    ) -> UnmadeLogits:
        """`make` gives the logits of rows [B, T, D]; `loss`: sum over valid labels and their number."""
        nothing = torch.empty((), dtype=rows.dtype, device="meta")  # where no mode puts a subclass of its own
        found = nothing.expand(*rows.shape[:-1], vocabulary).as_subclass(UnmadeLogits)
        found.rows, found.make, found.loss, found.made, found.version = rows, make, loss, None, 0
        return found

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            if func in _FACTS:
                return func(*args, **(kwargs or {}))
            if func in _PLACES:
                return func(args[0].rows)
            made = tree_map(_true, (args, kwargs or {}))
        return func(*made[0], **made[1])

    @property
    def written(self) -> Tensor | None:
        """The true logits, if they were made and then written to."""
        return self.made if self.made is not None and self.made._version != self.version else None


_FACTS = {
    *(Tensor.dim, Tensor.size, Tensor.numel, Tensor.element_size, Tensor.is_floating_point),
    *(getattr(Tensor, name).__get__ for name in ("shape", "ndim", "dtype")),
}
_PLACES = {getattr(Tensor, name).__get__ for name in ("device", "is_meta", "is_cuda", "is_cpu")}


def _true(value: Any) -> Any:
    if not isinstance(value, UnmadeLogits):
        return value
    if value.made is None:
        value.made = value.make()
        value.version = value.made._version
    return value.made


class FusedHead:
    """The forward of a head (`nn.Linear` without bias, or that of 1d), which computes the loss while it has labels."""

    def __init__(self, head: Any, ops: Ops) -> None:
        self.head, self.ops = head, ops
        self._plain = head.forward if isinstance(head, Head) else self._product
        self._labels: Tensor | None = None
        self._scale = 1.0
        if not isinstance(head, Head):
            head.weight_grad_store = None
        head.__dict__["forward"] = self

    @contextmanager
    def told(self, labels: Tensor, scale: float = 1.0) -> Iterator[None]:
        """Context of a forward whose loss is the cross-entropy of `labels` [B, T]. `scale`: what its backward begins
        with."""
        self._labels, self._scale = labels, scale
        try:
            yield
        finally:
            self._labels = None

    def __call__(self, input: Tensor) -> Tensor:
        """The logits of `input` [B, T(/n), D]; unmade, if their labels are known."""
        head, labels, mode = self.head, self._labels, getattr(self.head, "mode", None)
        parts = mode.size if mode is not None and mode.sequence_parallel else 1
        if labels is None or input.dim() != 3 or (input.shape[0], input.shape[1] * parts) != labels.shape:
            return self._plain(input)
        if autocast_dtype(input) or autocast_dtype(head.weight):
            return self._plain(input)  # torch casts for its own products, not for ours
        rows = input if mode is None else gather_from_sequence_region(input, mode)
        weight, cut = head.weight, dict[str, Any]()
        weight = _deferring(weight, store_for(head.weight_grad_store, weight))
        if mode is not None:
            cut = dict(
                start=mode.coord * len(weight), vocabulary=mode.vocabulary,
                gather=lambda stats: mode.comm.all_gather(stats.unsqueeze(0)),
            )  # fmt: skip
        total, count = self.ops.linear_cross_entropy(rows, weight, labels, scale=self._scale, **cut)

        def make() -> Tensor:
            logits = self._product(rows)
            return logits if mode is None else with_padding(logits, head.padded)

        return UnmadeLogits.of(rows, len(weight), make, (_read_in_backward(total, head.weight), count))

    def _product(self, x: Tensor) -> Tensor:
        weight = self.head.weight
        return linear(x, weight, None, store_for(self.head.weight_grad_store, weight))


def free_head(module: nn.Module) -> None:
    """Undo `fuse_head`."""
    for owner in module.modules():
        if isinstance(owner.__dict__.get("forward"), FusedHead):
            del owner.forward
            if not isinstance(owner, Head):
                del owner.weight_grad_store


def fuse_head(module: nn.Module, name: str | None, ops: Ops, *, is_cut: bool) -> FusedHead | None:
    """Have the head of this name compute the loss, if it is a linear without bias; if the vocabulary `is_cut`, that
    of 1d. Not in compiled code, which is traced as it was written."""
    if name is None:
        return None
    head: Any = module.get_submodule(name)
    fits = isinstance(head, Head) if is_cut else type(head).forward is nn.Linear.forward
    is_fused = fits and head.bias is None and head not in compiled_units(module)
    return FusedHead(head, ops) if is_fused else None


def head_of(module: nn.Module) -> str | None:
    """The name of the linear that gives the logits of `module`, as they are. None if there is none, or if the module
    does not run on ids without values."""
    free_head(module)  # of an engine that was closed
    if type(module) is GPT:
        return "head"
    gave: list[tuple[str, Tensor]] = []
    try:
        made = deep_copy(module, {id(x): _unmade(x) for x in (*module.parameters(), *module.buffers())})
        for name, owner in made.named_modules():
            owner._forward_hooks.clear()
            owner._forward_pre_hooks.clear()
            if isinstance(owner, nn.Linear):
                owner.register_forward_hook(lambda m, a, out, name=name: gave.append((name, out)))
        with torch.no_grad(), torch.device("meta"), _Ones():
            outputs = made.eval()(torch.zeros(1, TOKENS, dtype=torch.int64))
    except Exception:  # a model's own code, which need not know ids or tensors without values
        return None
    found = outputs if isinstance(outputs, Tensor) else getattr(outputs, "logits", None)
    return next((name for name, out in gave if out is found and not out._version), None)


class _Ones(TorchFunctionMode):
    """A value that code reads of a tensor without values is one, or True: what follows decides no loss. Raises
    RuntimeError after `MOST` reads, as in a loop until a value is small."""

    MOST = 1000

    READS = MappingProxyType(
        {Tensor.item: 1, Tensor.__bool__: True, Tensor.__int__: 1, Tensor.__float__: 1.0, Tensor.__index__: 1}
    )

    def __init__(self) -> None:
        super().__init__()
        self.reads: int = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in self.READS:
            return func(*args, **(kwargs or {}))
        self.reads += 1
        if self.reads > self.MOST:
            raise RuntimeError(f"{self.reads} values read")
        return self.READS[func]


def _unmade(x: Tensor) -> Tensor:
    found = torch.empty_like(x, device="meta")
    return nn.Parameter(found, requires_grad=False) if isinstance(x, nn.Parameter) else found


def _read_in_backward(x: Tensor, weight: Tensor) -> Tensor:
    found: Tensor = _ReadInBackward.apply(x, weight)  # type: ignore[no-untyped-call]
    return found


class _ReadInBackward(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(weight)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        _ = ctx.saved_tensors
        return gradient, None


def _deferring(weight: Tensor, store: WeightGradStore | None) -> Tensor:
    """The weight; while the store is open its gradient waits there."""
    return weight if store is None else _Deferring.apply(weight, store)  # type: ignore[no-untyped-call]


class _Deferring(Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, store: WeightGradStore) -> Tensor:
        ctx.weight, ctx.store = weight, store
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, None]:
        weight, store = ctx.weight, ctx.store
        if not store.is_open:
            return gradient, None
        store.put(lambda: deliver([weight], [gradient]), weight)
        return None, None
