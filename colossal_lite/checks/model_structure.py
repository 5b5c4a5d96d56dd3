"""Checks a model's tensors before an engine, whether it still has them later, and who calls it.

Note: an engine trains the Parameter objects that it was given.  Another one in their place, or one that begins to train
later, would get no update, and no error.  Cost: a look at each module and parameter in a step, some microseconds for a
hundred.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from colossal_lite.config.errors import first_few
from colossal_lite.distributed.mesh import Mesh
from colossal_lite.numerics.torch_modes import storage_of
from colossal_lite.observe.printed_lines import warn
from colossal_lite.transforms.compiled_units import SET_BY_COMPILING, compiled_units, is_compiled
from colossal_lite.transforms.module_modes import is_set_by_hand, modes_of

OTHER_ENGINES = ("FullyShardedDataParallel", "DeepSpeedEngine")
"""Classes of modules that other frameworks put around a model, and that cut its weights."""


class ModelStructure:
    """The modules and parameters of a model, as they are now."""

    def __init__(self, model: nn.Module, *, speaks: bool = False) -> None:
        """`speaks`: whether this rank warns."""
        self._speaks = speaks
        self._modules = dict(model.named_modules())
        members = [members for m in self._modules.values() for members in (m._modules, m._parameters)]
        self._members = [*zip((name for name in self._modules for _ in range(2)), members, strict=True)]
        self._places = [members for _, members in self._members]
        self._kept = [[*members.values()] for members in self._places]  # no other object gets their ids
        self._ids = self._found()
        self._compiled = compiled_units(model)
        self._frozen = [p for p in model.parameters() if not p.requires_grad]
        self._has_own_train = any(
            getattr(m.train, "__func__", None) is not nn.Module.train for m in self._modules.values()
        )
        self._modes: dict[str, bool] = {}
        """As `train()` of the model's own has last set them."""

    def _found(self) -> list[int]:
        return [id(member) for members in self._places for member in members.values()]

    def change(self) -> str | None:
        """The difference now, in words; None if there is none."""
        if self._found() != self._ids:
            pairs = zip(self._members, self._kept, strict=True)
            name = next(n for (n, now), was in pairs if [*map(id, now.values())] != [*map(id, was)])
            return f"{name or 'the model'} has other modules or parameters"
        if any(parameter.requires_grad for parameter in self._frozen):
            return "a parameter requires a gradient now that did not"
        return None

    def check_compiled(self, what: str) -> None:
        """Raises ValueError for a module that was compiled since. The compiler would trace its hooks: it takes minutes,
        or fails."""
        for name, module in self._modules.items():
            if SET_BY_COMPILING.isdisjoint(vars(module)) or module in self._compiled:
                continue
            if is_compiled(module):
                raise ValueError(
                    f"{what}: {name or 'the model'} ({type(module).__name__}) was compiled since the engine was made, "
                    f"whose hooks of weights would be compiled too. Legal: the same compilation before cl.initialize"
                )

    def train(self) -> None:
        """Set the model to training before a step. Modules that the user has set to evaluation since then stay so."""
        model = self._modules[""]
        by_hand = is_set_by_hand(model)
        if self._has_own_train and (not by_hand or modes_of(model) == self._modes):
            model.train()  # which may set other modes than the last time
            self._modes = modes_of(model)
        elif not model.training:  # `train` alone takes 2 % of a small step
            model.train()
        elif by_hand and self._speaks:
            self._speaks = False
            rest = [name for name, module in self._modules.items() if not module.training]
            warn(
                f"train_step: {first_few(rest)} stay in eval(), as set while the model trains. If all shall "
                f"train: engine.model.train()"
            )


class OwnForward:
    """Refuses a forward of a model whose layers are this rank's parts, unless its engine runs it. It would give parts
    of the logits, also after the engine has closed."""

    def __init__(self, model: nn.Module, *, is_staged: bool) -> None:
        """`is_staged`: layers are on other ranks as well."""
        self._runs, self._is_staged = False, is_staged
        model.register_forward_pre_hook(self._check)

    @classmethod
    def of(cls, model: nn.Module, mesh: Mesh) -> OwnForward | None:
        """None where a rank has the whole model, and all tokens."""
        is_staged = mesh.size("pipeline") > 1
        return cls(model, is_staged=is_staged) if is_staged or mesh.size("tensor", "sequence") > 1 else None

    @contextmanager
    def running(self) -> Iterator[None]:
        """Around a forward of the engine."""
        self._runs = True
        try:
            yield
        finally:
            self._runs = False

    def _check(self, model: nn.Module, args: object) -> None:
        if not self._runs:
            what, own = "this rank's parts (parallel.tensor, parallel.sequence)", "engine(x), train_step"
            if self._is_staged:
                what, own = "on the ranks of parallel.pipeline", "train_step"
            raise ValueError(
                f"model: the layers of {type(model).__name__} are {what}, so a call of it gives parts. Legal: {own} or "
                f"eval_step; or a model built anew that loads engine.full_state_dict()"
            )


class OwnState:
    """Refuses `state_dict` and `load_state_dict` where this rank has a part of a model. So it does for its modules, and
    after the engine has closed. Only the engine may call them."""

    def __init__(self, model: nn.Module, axes: str) -> None:
        self._axes, self._reads = axes, False
        for module in model.modules():
            module.register_state_dict_pre_hook(partial(self._check, "state_dict"))
            module.register_load_state_dict_pre_hook(partial(self._check, "load_state_dict"))

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Around a call of the engine."""
        self._reads = True
        try:
            yield
        finally:
            self._reads = False

    def _check(self, call: str, *_: object) -> None:
        if self._reads:
            return
        legal = "engine." + call.replace("state", "full_state")
        saves = (
            ". For save_pretrained: its argument state_dict=" + legal + "()" if call == "state_dict" else ""
        )
        raise ValueError(
            f"model.{call}(): with {self._axes} this rank has a part of the model; legal: {legal}(){saves}"
        )


def is_in_parts(model: nn.Module) -> bool:
    """Whether an engine has cut the layers of this model."""
    hooks = model._forward_pre_hooks.values()
    return any(isinstance(getattr(hook, "__self__", None), OwnForward) for hook in hooks)


def check_lazy(module: nn.Module) -> None:
    """Raises ValueError for a module whose parameters get their shapes in its first forward. Also for one whose tensors
    no update may change."""
    for name, owner in module.named_modules():
        for tensor in (*owner._parameters.values(), *owner._buffers.values()):
            if tensor is not None and not is_lazy(tensor) and tensor.is_inference():
                raise ValueError(
                    f"model: {name or 'it'} ({type(owner).__name__}) was built within torch.inference_mode, whose "
                    f"tensors do not train; legal: a model that is built outside of it"
                )
        if any(map(is_lazy, (*owner._parameters.values(), *owner._buffers.values()))):
            raise ValueError(
                f"model: {name or 'it'} is a {type(owner).__name__}, whose parameters have no shape yet. Legal: run "
                f"the model once before cl.initialize, or a module of stated sizes"
            )


def check_values(module: nn.Module) -> None:
    """Raises ValueError for a module with parameters or buffers on meta: there are no values to keep."""
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        if tensor.is_meta:
            raise ValueError(
                f"model: {name} is on meta and has no values. Legal: a model that is built on a device, or a function "
                f"that builds it"
            )


def check_other_engines(module: nn.Module) -> None:
    """Raises ValueError for a model whose weights another framework has cut, or trains."""
    legal = "Legal: the module before that call, and zero.stage=3 or parallel.tensor of the config"
    for path, part in module.named_modules():
        if (kind := type(part).__name__) in OTHER_ENGINES:
            raise ValueError(
                f"model: {path or 'it'} is a {kind}, which cuts and moves weights itself. So does the engine. {legal}"
            )
    for name, parameter in module.named_parameters():
        kept: object = parameter.data
        if is_traceable_wrapper_subclass(kept):
            raise ValueError(
                f"model: {name} is a {type(kept).__name__} and no plain tensor, such as fully_shard or "
                f"parallelize_module makes. The engine cuts weights itself. {legal}"
            )


def check_own_state(module: nn.Module) -> None:
    """Raises ValueError for state of a module that no checkpoint holds: of get_extra_state, sparse buffers, views."""
    for name, buffer in module.named_buffers():
        if buffer.layout is not torch.strided:
            raise ValueError(
                f"model: the buffer {name} is {buffer.layout}, and copies, comparisons and checkpoints are of dense "
                f"ones. Legal: dense buffers of its indices and values, or a plain attribute if it never changes"
            )
        if buffer.is_conj() or buffer.is_neg():
            raise ValueError(
                f"model: the buffer {name} is a conjugate or negative view, whose values no checkpoint holds. Legal: "
                f"x.resolve_conj().resolve_neg() of it"
            )
    for name, owner in module.named_modules():
        if type(owner).get_extra_state is not nn.Module.get_extra_state:
            raise ValueError(
                f"model: {name or 'it'} ({type(owner).__name__}) has get_extra_state. A checkpoint holds parameters "
                f"and buffers, and would lose that state. Legal: register_buffer for it, and no get_extra_state"
            )


def check_storages(module: nn.Module) -> None:
    """Raises ValueError where a parameter shares memory with another one, with a buffer or with another tensor of a
    module. Each parameter gets memory of its own, so the others would no longer follow it. The weight that a hook of
    `torch.nn.utils.spectral_norm` sets in each forward may share it until then."""
    extents: dict[int, list[tuple[int, int, str, bool]]] = {}
    seen: set[int] = set()
    for path, owner in module.named_modules():
        set_again = {
            hook.name for hook in owner._forward_pre_hooks.values() if isinstance(hook, SpectralNorm)
        }
        own: dict[str, Any] = {
            k: v for k, v in vars(owner).items() if isinstance(v, Tensor) and k not in set_again
        }
        for key, tensor in (own | dict(owner._buffers) | dict(owner._parameters)).items():
            if (
                tensor is None
                or id(tensor) in seen
                or tensor.layout is not torch.strided
                or not tensor.numel()
            ):
                continue
            seen.add(id(tensor))
            start = tensor.storage_offset() * tensor.itemsize
            steps = zip(tensor.shape, tensor.stride(), strict=True)
            stop = start + (1 + sum((size - 1) * stride for size, stride in steps)) * tensor.itemsize
            name, is_weight = f"{path}.{key}".removeprefix("."), isinstance(tensor, nn.Parameter)
            others = extents.setdefault(storage_of(tensor), [])
            for low, high, other, is_other in others:
                if (is_weight or is_other) and low < stop and start < high:
                    raise ValueError(
                        f"model: {other} and {name} are two tensors in one memory. Weights move to memory of the "
                        f"engine, and the two would no longer be equal. Legal: one Parameter by two names "
                        f"(head.weight = table.weight), a view made in forward, or .clone()"
                    )
            others.append((start, stop, name, is_weight))
