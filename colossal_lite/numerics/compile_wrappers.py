"""Takes away what `torch.compile(module)` puts around modules: these are compiled in place then.

Note: a wrapper is a module of its own, so names within it begin with `_orig_mod`.  Dropouts would have other masks than
those of the plain model, and checkpoints other names.  Proofs would compile it again and again, until torch gives up
and runs it uncompiled.  A module that is compiled in place, as by `module.compile()`, has none of this: its copies are
not compiled.  `put_back` leaves the model as it was given.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from typing import Any

from torch import nn

HOOKS = (
    "_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks", "_state_dict_hooks",
    "_state_dict_pre_hooks", "_load_state_dict_pre_hooks", "_load_state_dict_post_hooks",
)  # fmt: skip
PARTS = ("_orig_mod.", "_fsdp_wrapped_module.", "_checkpoint_wrapped_module.")
"""Of the names within a wrapper of torch, anywhere."""
FIRST = "module."
"""Of all names of a model in DistributedDataParallel."""


class CompileWrappers:
    """The wrappers that were around a model and its modules. `model`: it, without them."""

    def __init__(self, given: nn.Module) -> None:
        """Raises ValueError for a wrapper that has hooks of its own."""
        self._places = [
            (owner, name, child)
            for owner in given.modules()
            if not _is_wrapper(owner)
            for name, child in owner._modules.items()
            if child is not None and _is_wrapper(child)
        ]
        wrappers = [child for _, _, child in self._places]
        for wrapper in [*wrappers, given] if _is_wrapper(given) else wrappers:
            _refuse_hooks(wrapper)
        self._compiled: list[tuple[nn.Module, Any]] = []  # and its compiled call
        for owner, name, child in self._places:
            owner._modules[name] = self._within(child)
        self.model = self._within(given)

    def _within(self, module: nn.Module) -> nn.Module:
        """The module in a wrapper, compiled as that says. Itself, if it is none."""
        while _is_wrapper(module):
            around: Any = module
            module = around._orig_mod
            if module._compiled_call_impl is None:
                module._compiled_call_impl = around.dynamo_ctx(module._call_impl)
                self._compiled.append((module, module._compiled_call_impl))
        return module

    def put_back(self) -> None:
        """Put the wrappers where they were, but where another module has come in the place of theirs. Their modules
        have not compiled themselves."""
        for owner, name, wrapper in self._places:
            if owner._modules.get(name) is _inmost(wrapper):
                owner._modules[name] = wrapper
        for module, call in self._compiled:
            if module._compiled_call_impl is call:
                module._compiled_call_impl = None
        self._places, self._compiled = [], []


def plain_names(state: Any, known: Container[str]) -> Any:
    """A state dict with the names of torch's wrappers as they are `known` without them. Names that are not known then,
    or are there already, stay as they are. So do other objects."""
    if not isinstance(state, Mapping):
        return state
    found: dict[Any, Any] = {}
    for name, x in state.items():
        plain = _plain(name, known) if isinstance(name, str) else name
        found[name if plain in state or plain in found or plain not in known else plain] = x
    return found


def _plain(name: str, known: Container[str]) -> str:
    for part in PARTS:
        name = name if name in known else name.replace(part, "")
    while name not in known and name.startswith(FIRST):
        name = name.removeprefix(FIRST)
    return name


def _inmost(module: Any) -> Any:
    while _is_wrapper(module):
        module = module._orig_mod
    return module


def _is_wrapper(module: nn.Module) -> bool:
    return "dynamo_ctx" in vars(module)


def _refuse_hooks(wrapper: Any) -> None:
    if any(vars(wrapper)[kind] for kind in HOOKS):
        raise ValueError(
            f"model: a hook is on what torch.compile has put around a {type(wrapper._orig_mod).__name__}. The engine "
            f"compiles that module in place, without it. Legal: the hook on the module, before torch.compile"
        )
