"""Places hooks around modules that torch.compile has compiled, so that no hook is traced.

Note: a hook of a weight is Python that waits, copies and exchanges.  Traced into a compiled module it takes minutes to
compile, or fails.  So what torch.compile makes one piece of is one unit.  Its hook runs before the compiled code, and
asks for all weights within.  The hooks of its modules are left out where they would be traced.  They run where other
code calls such a module by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from colossal_lite.kernels import Dropout
from colossal_lite.transforms.auxiliary_loss import AuxiliaryLoss

Hook = Callable[..., Any]
_UNTRACED = "Python counts its masks or losses. Legal: torch.compile without fullgraph, or dropouts of p=0"


SET_BY_COMPILING = frozenset(["_compiled_call_impl", "forward"])
"""One of these a module has as an attribute of its own once it is compiled."""


def is_compiled(module: nn.Module) -> bool:
    """Whether a call of it runs compiled code: `module.compile()`, or a compiled forward. An engine has taken away what
    `torch.compile(module)` puts around it (numerics/compile_wrappers.py)."""
    if module._compiled_call_impl is not None:
        return True
    forward = module.forward
    return hasattr(forward, "_torchdynamo_orig_callable") and not hasattr(forward, "_torchdynamo_disable")


def compiled_units(module: nn.Module) -> dict[nn.Module, bool]:
    """Modules that are compiled, and modules within these. The value: whether it is the outermost."""
    found = dict[nn.Module, bool]()
    left = [module]
    while left:
        owner = left.pop()
        if is_compiled(owner):
            found |= {**dict.fromkeys(owner.modules(), False), owner: True}
        else:
            left += owner.children()
    return found


def leave_untraced(modules: Iterable[nn.Module]) -> None:
    """Have torch.compile leave out those of these modules whose counters are Python's."""
    for module in modules:
        counts = isinstance(module, AuxiliaryLoss) or (isinstance(module, Dropout) and module.p > 0)
        if counts and not hasattr(module.forward, "_torchdynamo_disable"):
            untraced = torch.compiler.disable(module.forward, reason=_UNTRACED)
            module.forward = untraced


def trace_again(model: nn.Module) -> None:
    """Undo `leave_untraced`, whose forwards belong to the modules that they were taken from."""
    for module in model.modules():
        if isinstance(module, AuxiliaryLoss | Dropout):
            if hasattr(vars(module).get("forward"), "_torchdynamo_disable"):
                del vars(module)["forward"]


@dataclass
class Place:
    """Where the hooks of a module go. `is_unit`: it is one. `is_within`: in a unit, where they may be traced."""

    owner: nn.Module
    is_unit: bool = False
    is_within: bool = False

    def before(self, hook: Hook) -> Iterator[Any]:
        """Call `hook(module, args)` before each forward. Yields what removes it."""
        if self.is_unit and self.owner._compiled_call_impl is not None:
            yield _AroundCall(self.owner, before=hook)
        else:
            yield self.owner.register_forward_pre_hook(_untraced(hook) if self.is_within else hook)

    def behind(self, hook: Hook) -> Iterator[Any]:
        """Call `hook()` behind each forward, also one that raises. Yields what removes it."""
        if self.is_unit and self.owner._compiled_call_impl is not None:
            yield _AroundCall(self.owner, behind=hook)
        else:
            call = _untraced(hook) if self.is_within else hook
            yield self.owner.register_forward_hook(lambda *_: call(), always_call=True)


class _AroundCall:
    """Calls hooks around the compiled call of a module that has compiled itself."""

    def __init__(self, owner: nn.Module, before: Hook | None = None, behind: Hook | None = None) -> None:
        assert owner._compiled_call_impl is not None
        self._owner, self._inner = owner, owner._compiled_call_impl
        self._before, self._behind = before, behind
        owner._compiled_call_impl = self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._before is not None:
            self._before(self._owner, args)
        try:
            return self._inner(*args, **kwargs)
        finally:
            if self._behind is not None:
                self._behind()

    def remove(self) -> None:
        """Leave the compiled call as it was, once those around this are removed too."""
        self._before = self._behind = None
        call = self._owner._compiled_call_impl
        while isinstance(call, _AroundCall) and call._before is call._behind is None:
            call = self._owner._compiled_call_impl = call._inner


def _untraced(hook: Hook) -> Hook:
    """`hook`, left out of code that torch.compile traces."""
    return lambda *given: None if torch.compiler.is_compiling() else hook(*given)
