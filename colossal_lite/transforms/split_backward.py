"""Splits backward in two: gradients of inputs now, gradients of weights later.

Note: the deferred gradients. Between the input gradient (I) and the weight gradient (W) of a stage a schedule may do
other work (2401.10241).  While a `WeightGradStore` is open, supporting layers return the gradient of their input and
store a callable for their weights. The callable runs later and delivers the gradients through autograd.  So hooks on
parameters, views of them and sums of ties work as usual.  The result is that of backward in one part, to the bit where
a weight is used once.
- linear: I is `dy W`; W is `dy^T x` and the sum of dy.  x and dy are saved until then;
- embedding: all of it is W;
- linear of a grid (2D, 2.5D, 3D): W gathers x again and sums its terms, as backward in one part does.  If y's gradient
  was gathered, it is saved from I to W;
- norm of torch, ours or Hugging Face: W runs it forward again on the saved x, and backward for its weights alone.
  Other parameters, and computed weights, get their gradients in I, which is right and no faster.
With the store closed every layer computes both at once.  Cost: x and dy of each layer are saved from I to W; a norm is
computed once more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function

from colossal_lite.models.gpt import Norm
from colossal_lite.numerics.torch_modes import refuse_autocast


@dataclass(frozen=True)
class PendingWeightGrad:
    """A callable that computes some weight gradients later, and the weights: tensors of a graph, or its leaves."""

    work: Callable[[], None]
    weights: tuple[Tensor, ...]

    def leaves(self) -> set[Tensor]:
        """The parameters that get a gradient, each once."""
        found = {weight for weight in self.weights if weight.grad_fn is None}
        nodes: list[Any] = [weight.grad_fn for weight in self.weights if weight.grad_fn is not None]
        while nodes:
            node = nodes.pop()
            if hasattr(node, "variable"):
                found.add(node.variable)
            nodes += [after for after, _ in node.next_functions if after is not None]
        return found


DeferredWeightGrads = list[PendingWeightGrad]


class WeightGradStore:
    """Collects, while it is open, the callables by which layers compute their weight gradients later."""

    def __init__(self) -> None:
        self._later: DeferredWeightGrads | None = None

    @property
    def is_open(self) -> bool:
        return self._later is not None

    @contextmanager
    def open(self) -> Iterator[DeferredWeightGrads]:
        """Collect the weight gradients that backward defers inside; the caller runs each of these once."""
        assert self._later is None, "one backward at a time"
        later: DeferredWeightGrads = []
        self._later = later
        try:
            yield later
        finally:
            self._later = None

    def put(self, work: Callable[[], None], *weights: Tensor | None) -> None:
        """`weights`: the tensors that get a gradient from the work, and those that take none."""
        assert self._later is not None
        takes = tuple(weight for weight in weights if weight is not None and weight.requires_grad)
        self._later.append(PendingWeightGrad(work, takes))


class BackwardRoot(Function):
    """A scalar over `outputs`. Its backward delivers the gradients in `given` to them, and empties the list. A leaf
    takes over a gradient that has no other reference, and copies any other.

    It replaces `torch.autograd.backward(outputs, given)`, which checks shapes by symbolic shapes: 45 MB of sympy. And
    the outputs themselves need not stay allocated.
    """

    @staticmethod
    def forward(ctx: Any, given: list[Tensor], *outputs: Tensor) -> Tensor:
        ctx.given = given
        return outputs[0].new_zeros((), dtype=outputs[0].dtype.to_real())

    @staticmethod
    def backward(ctx: Any, one: Tensor) -> tuple[Tensor | None, ...]:
        gradients = (None, *ctx.given)
        ctx.given.clear()
        return gradients


def deliver(weights: list[Tensor], gradients: list[Tensor]) -> None:
    """Deliver gradients to tensors of a graph, or its leaves: the last first, as backward does. `gradients` is empty
    afterwards."""
    gradients.reverse()
    with torch.enable_grad():
        root: Tensor = BackwardRoot.apply(gradients, *weights[::-1])  # type: ignore[no-untyped-call]
        root.backward()


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, queue: WeightGradStore | None) -> Tensor:
    """x [..., D_in], weight [D_out, D_in] -> [..., D_out]."""
    if queue is None:
        return F.linear(x, weight, bias)
    out: Tensor = _Linear.apply(x, weight, bias, queue)  # type: ignore[no-untyped-call]
    return out


def embedding(ids: Tensor, weight: Tensor, queue: WeightGradStore | None) -> Tensor:
    """ids [...], weight [V, D] -> [..., D]."""
    if queue is None:
        return F.embedding(ids, weight)
    out: Tensor = _Embedding.apply(ids, weight, queue)  # type: ignore[no-untyped-call]
    return out


def add_bias(y: Tensor, bias: Tensor, queue: WeightGradStore | None) -> Tensor:
    """y [..., D] + bias [D]."""
    if queue is None:
        return y + bias
    out: Tensor = _Bias.apply(y, bias, queue)  # type: ignore[no-untyped-call]
    return out


def linear_gradients(
    dy: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None
) -> tuple[list[Tensor], list[Tensor]]:
    """Weight [D_out, D_in] and bias, if they take a gradient, and their gradients from dy [..., D_out], x [...,
    D_in]."""
    rows = dy.flatten(0, -2)
    found: list[tuple[Tensor, Tensor]] = []
    if weight.requires_grad:
        found.append((weight, rows.t() @ x.flatten(0, -2)))
    if bias is not None and bias.requires_grad:
        found.append((bias, rows.sum(0)))
    return [w for w, _ in found], [g for _, g in found]


def _no_view(y: Tensor) -> Tensor:
    """The same elements in the same memory, for autograd no view. So code behind a layer may change its output in
    place, as ReLU(inplace=True)."""
    same: Tensor = torch.ops.aten._unsafe_view(y, y.shape) if y._is_view() else y
    return same


class _Linear(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, queue: WeightGradStore) -> Tensor:
        refuse_autocast(weight)
        ctx.save_for_backward(x, weight)
        # The tensors themselves, not recomputation's copies: gradients are delivered to them.
        ctx.weight, ctx.bias, ctx.queue = weight, bias, queue
        return _no_view(F.linear(x, weight, bias))

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        target, bias = ctx.weight, ctx.bias
        dx = dy @ weight if ctx.needs_input_grad[0] else None
        if not ctx.queue.is_open:
            dw = dy.flatten(0, -2).t() @ x.flatten(0, -2) if ctx.needs_input_grad[1] else None
            db = dy.flatten(0, -2).sum(0) if ctx.needs_input_grad[2] else None
            return dx, dw, db, None

        def work() -> None:
            deliver(*linear_gradients(dy, x, target, bias))

        if ctx.needs_input_grad[1] or ctx.needs_input_grad[2]:
            ctx.queue.put(work, target, bias)
        return dx, None, None, None


class _Bias(Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor, bias: Tensor, queue: WeightGradStore) -> Tensor:
        ctx.bias, ctx.queue = bias, queue
        return y + bias

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        bias = ctx.bias
        if not ctx.needs_input_grad[1]:
            return dy, None, None
        if not ctx.queue.is_open:
            return dy, dy.flatten(0, -2).sum(0), None
        ctx.queue.put(lambda: deliver([bias], [dy.flatten(0, -2).sum(0)]), bias)
        return dy, None, None


class _Embedding(Function):
    @staticmethod
    def forward(ctx: Any, ids: Tensor, weight: Tensor, queue: WeightGradStore) -> Tensor:
        ctx.save_for_backward(ids)
        ctx.weight, ctx.queue = weight, queue
        return F.embedding(ids, weight)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        (ids,) = ctx.saved_tensors
        weight = ctx.weight

        def gradient() -> Tensor:
            made: Tensor = torch.ops.aten.embedding_dense_backward(dy, ids, weight.shape[0], -1, False)
            return made

        if not ctx.queue.is_open:
            return None, gradient(), None
        ctx.queue.put(lambda: deliver([weight], [gradient()]), weight)
        return None, None, None


class _Tap(Function):
    """y = forward(x) unchanged; its gradient passes, and those of the weights in `forward` are deferred."""

    @staticmethod
    def forward(
        ctx: Any,
        y: Tensor,
        x: Tensor,
        forward: Callable[[Tensor], Tensor],
        queue: WeightGradStore,
        *weights: Tensor,
    ) -> Tensor:
        ctx.save_for_backward(x)
        ctx.run, ctx.queue, ctx.weights = forward, queue, weights
        return y.view_as(y)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        (x,), run = ctx.saved_tensors, ctx.run

        def work() -> None:
            with torch.enable_grad():
                again = run(x)
            # Those of other parameters, as of modules within, were computed in I.
            found = torch.autograd.grad(again, ctx.weights, dy, allow_unused=True)
            read = [number for number, gradient in enumerate(found) if gradient is not None]
            deliver([ctx.weights[number] for number in read], [found[number] for number in read])

        if ctx.queue.is_open:
            ctx.queue.put(work, *ctx.weights)
        else:
            work()
        return (dy, *[None] * (len(ctx.needs_input_grad) - 1))


def defer_weights(module: nn.Module, queue: WeightGradStore) -> None:
    """Let the layers of `module` that can defer the gradients of their weights do so, in place.

    A layer with an attribute `weight_grad_store` gets the store.  Torch's and our models' linears, embeddings and norms
    get another forward on the instance.  So names and hooks do not change.  Layers with a hook on a parameter stay as
    they are: it would be called without a gradient.
    """
    for owner in module.modules():
        made: Any = owner
        if any(map(_has_hooks, made.parameters(recurse=False))):
            continue
        if hasattr(made, "weight_grad_store"):
            made.weight_grad_store = queue
        elif isinstance(made, nn.Linear) and _runs_as(made, nn.Linear):
            made.__dict__["forward"] = partial(_linear_forward, made, queue)
        elif isinstance(made, nn.Embedding) and _runs_as(made, nn.Embedding) and _is_plain(made):
            made.__dict__["forward"] = partial(_embedding_forward, made, queue)
        elif _is_norm(made):
            made.__dict__["forward"] = partial(_norm_forward, made, made.forward, queue)


def restore_weights(module: nn.Module) -> None:
    """Undo `defer_weights`."""
    for owner in module.modules():
        made: Any = owner
        given = made.__dict__.get("forward")
        if isinstance(given, partial) and given.func in (_linear_forward, _embedding_forward, _norm_forward):
            del made.forward
            if (
                given.func is _norm_forward
                and getattr(given.args[1], "__func__", None) is not type(made).forward
            ):
                made.forward = given.args[1]  # it was on the instance before
        elif hasattr(made, "weight_grad_store"):
            made.weight_grad_store = None


def _has_hooks(parameter: nn.Parameter) -> bool:
    """Whether others than the engine, which has one hook on a parameter that trains, have put hooks on it."""
    after: Any = getattr(parameter, "_post_accumulate_grad_hooks", None)
    return bool(parameter._backward_hooks) or len(after or ()) > 1


def _runs_as(made: nn.Module, kind: type[nn.Module]) -> bool:
    """Whether a module's forward is that of torch's class, without a wrapper."""
    return type(made).forward is kind.forward and "forward" not in made.__dict__


def _is_norm(made: nn.Module) -> bool:
    """Whether it is one of torch, of ours or of Hugging Face: the same when it runs again. A user's may draw or
    count."""
    kind = next((kind for kind in (nn.LayerNorm, nn.RMSNorm) if isinstance(made, kind)), None)
    if kind is not None:
        return type(made).forward is kind.forward
    of_hugging_face = type(made).__module__.startswith("transformers.")
    return isinstance(made, Norm) or (of_hugging_face and type(made).__name__.endswith("RMSNorm"))


def _is_plain(table: nn.Embedding) -> bool:
    return (
        table.padding_idx is None
        and table.max_norm is None
        and not (table.sparse or table.scale_grad_by_freq)
    )


def store_for(queue: WeightGradStore | None, *weights: Tensor | None) -> WeightGradStore | None:
    """The store, unless one of the weights is computed, as by weight_norm or parametrize. Those get their gradients in
    I, with what they are made of: its graph runs once."""
    return queue if all(weight is None or weight.grad_fn is None for weight in weights) else None


# The names of arguments are torch's: callers may write them.
def _linear_forward(module: nn.Linear, queue: WeightGradStore, input: Tensor) -> Tensor:
    weight, bias = module.weight, module.bias
    return linear(input, weight, bias, store_for(queue, weight, bias))


def _embedding_forward(module: nn.Embedding, queue: WeightGradStore, input: Tensor) -> Tensor:
    weight = module.weight
    return embedding(input, weight, store_for(queue, weight))


def _norm_forward(
    module: nn.Module, original: Callable[..., Any], queue: WeightGradStore, *args: Any, **named: Any
) -> Any:
    weights = [p for p in module.parameters(recurse=False) if p.requires_grad]
    given = (*args, *named.values())
    if not weights or len(given) != 1 or not torch.is_grad_enabled():
        return original(*args, **named)
    own = module._parameters
    # Replaces the whole table of parameters for one call: no other attribute names them all.
    module.__dict__["_parameters"] = {name: None if p is None else p.detach() for name, p in own.items()}
    try:
        y = original(*given)
    finally:
        module.__dict__["_parameters"] = own
    return _Tap.apply(y, given[0].detach(), original, queue, *weights)  # type: ignore[no-untyped-call]
