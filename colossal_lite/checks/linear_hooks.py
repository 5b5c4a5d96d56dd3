"""Refuses hooks of the user's own on gradients that would see another gradient than in one process.

Note: what a hook sees.
Backward starts from the sum over the labels of one micro-batch on one rank.  The step divides by their number later
(parallel/loss.py).  So a hook sees a multiple of a part of the gradient.  The step is exact if the hook is linear: a
mask, a factor, a projection.  Clipping by value is not.  With the first gradient that is not zero, a hook is called for
three others as well (numerics/linearity.py).  With one rank and one micro-batch, `engine.backward(loss)` starts from
the user's own loss, so any hook is right there.
Cost: a look at each module and parameter before a step where a hook has come.  Three more calls of each hook that
changes a gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.hooks import RemovableHandle

from colossal_lite.numerics.linearity import is_linear

LEGAL = (
    "Legal: a hook that is linear in the gradient, such as a mask or a factor. Or engine.backward(loss) on one rank "
    "without gradient_accumulation, which starts from the loss itself"
)


@dataclass
class _Watch:
    """Whether hooks must be linear in the backward that runs."""

    is_on: bool = True


@dataclass
class LinearHook:
    """Stands in the place of a hook until it has been seen to be linear. `name`: of the parameter or module."""

    hook: Callable[..., Any]
    name: str
    watch: _Watch
    is_known: bool = False

    def __call__(self, *args: Any) -> Any:
        """`args`: the gradients last, a tensor or a tuple of them for each kind that the hook is given."""
        if self.is_known or not self.watch.is_on:
            return self.hook(*args)
        if isinstance(args[0], nn.Parameter):
            return self._behind(args[0])
        owner, given = _split(args)
        before = tree_map(_copy, given)
        result = _changed(self.hook(*owner, *given), given, before)
        if result is None:
            self.is_known = True
            return result

        def again(scaled: tuple[Any, ...]) -> Any:
            kept = tree_map(_copy, scaled)
            found = _changed(self.hook(*owner, *scaled), scaled, kept)
            return found if found is not None else kept[0]

        self._check(is_linear(again, before, result))
        return result

    def _behind(self, parameter: nn.Parameter) -> None:
        """The same for a hook behind the accumulation of a gradient, which changes it in place or replaces it."""
        assert parameter.grad is not None
        before = parameter.grad.clone()
        self.hook(parameter)
        result = parameter.grad
        if result is None:
            raise ValueError(
                f"{self.name}: a hook behind the accumulation of its gradient ({_told(self.hook)}) takes the gradient, "
                f"which the engine would use. Legal: a hook that leaves it there"
            )
        if torch.equal(result, before):
            self.is_known = True
            return

        def again(scaled: Tensor) -> Tensor | None:
            parameter.grad = scaled
            self.hook(parameter)
            return parameter.grad

        linear = is_linear(again, before, result)
        parameter.grad = result
        self._check(linear)

    def _check(self, linear: bool | None) -> None:
        """Raises ValueError for a hook that is not `linear`. None: it has not been seen yet."""
        if linear is False:
            raise ValueError(
                f"{self.name}: a hook on its gradient ({_told(self.hook)}) is not linear, as other gradients show. "
                f"Backward starts from a sum over the labels of a part of the batch. So the hook would see another "
                f"gradient than in one process. {LEGAL}"
            )
        self.is_known = linear is True


def _split(args: tuple[Any, ...]) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """A module that comes first, and the gradients."""
    return (args[:1], args[1:]) if isinstance(args[0], nn.Module) else ((), args)


def _copy(x: Any) -> Any:
    return x.clone() if isinstance(x, Tensor) else x


def _changed(result: Any, given: tuple[Any, ...], before: tuple[Any, ...]) -> Any:
    """What a hook gives; the gradient that it has written to; None if it leaves the gradient as it is."""
    if result is not None:
        return result
    pairs = zip(tree_leaves(given), tree_leaves(before), strict=True)
    if any(isinstance(x, Tensor) and not torch.equal(x, y) for x, y in pairs):
        return given[0]
    return None


def _told(hook: Any) -> str:
    return str(getattr(hook, "__qualname__", type(hook).__name__))


@dataclass
class LinearHooks:
    """The hooks of one model that are watched."""

    model: nn.Module
    parameters: Mapping[str, nn.Parameter]
    alone: bool
    """Whether a backward of the user's own loss has all samples of a step."""
    _watch: _Watch = field(default_factory=_Watch)
    _looked_at: int = -1
    """The number of the next hook in the process, at the last look."""
    _places: list[tuple[MutableMapping[int, Any], int, LinearHook]] = field(default_factory=list)

    def look(self) -> None:
        """Before a forward: put a watch around each hook that has none. Raises ValueError for a hook behind the
        accumulation of a gradient that comes after the engine's own, and finds none."""
        if self._looked_at == RemovableHandle.next_id:  # no hook has come, of any tensor
            return
        for name, parameter in self.parameters.items():
            is_behind = False
            for hook in (parameter._post_accumulate_grad_hooks or {}).values():
                is_behind = is_behind or _is_ours(hook)
                if is_behind and not _is_ours(hook):
                    raise ValueError(
                        f"{name}: a hook behind the accumulation of its gradient ({_told(hook)}) finds none, as the "
                        f"engine has taken it. Legal: one from before cl.initialize, or engine.full_gradients()"
                    )
        for name, hooks in self._hooks():
            for key, hook in hooks.items():
                if not isinstance(hook, LinearHook) and not _is_ours(hook):
                    hooks[key] = watched = LinearHook(hook, name, self._watch)
                    self._places.append((hooks, key, watched))
        self._looked_at = RemovableHandle.next_id

    def begin(self, *, own_loss: bool) -> None:
        """Before a backward. `own_loss`: of the user's loss as it is."""
        self._watch.is_on = not (self.alone and own_loss)

    def remove(self) -> None:
        """Put the hooks back that were here before."""
        for hooks, key, watched in self._places:
            if hooks.get(key) is watched:
                hooks[key] = watched.hook
        self._places.clear()
        self._looked_at = -1

    def _hooks(self) -> Iterator[tuple[str, MutableMapping[int, Any]]]:
        for name, parameter in self.parameters.items():
            for hooks in (parameter._backward_hooks, parameter._post_accumulate_grad_hooks):
                if hooks:
                    yield name, hooks
        for name, module in self.model.named_modules():
            for hooks in (module._backward_hooks, module._backward_pre_hooks):
                if hooks:
                    yield name, hooks


def _is_ours(hook: Any) -> bool:
    inner = getattr(hook, "func", hook)
    return str(getattr(inner, "__module__", "")).startswith("colossal_lite.")
