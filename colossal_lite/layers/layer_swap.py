"""Replaces the modules of a plan by a mode's layers, and records the ShardSpec of every parameter.

Note: swapping.
Every parameter gets one ShardSpec, by its first name.  A placeholder of the local shape on the meta device replaces a
cut one.  It has the same name, and replaces all ties at once.  Values come later, from the originals or from an
initializer, so a rank need never hold a full parameter.  All errors are found before anything is changed.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn

from colossal_lite.distributed.mesh import Mesh
from colossal_lite.layers.roles import Role
from colossal_lite.layers.swap_checks import (
    LINEAR_ROLES,
    embedding_faults,
    hook_faults,
    linear_faults,
    parameter_hook_faults,
    position_faults,
    requires_gradients,
)
from colossal_lite.sharding.mesh_layout import MeshLayout
from colossal_lite.sharding.shard_spec import Dim, Factor, Partial, Placements, ShardSpec, dims_of

# Attributes under which attention modules keep what a share of the heads changes: ours, and Hugging Face's.
HEADS = ("heads", "num_heads", "num_attention_heads", "n_head")
KEY_HEADS = ("kv_heads", "num_key_value_heads", "num_kv_heads")
TABLES = ("embedding", "position")
LEGAL = {
    **dict.fromkeys(LINEAR_ROLES, "nn.Linear, or Hugging Face's Conv1D, as they are, without hooks"),
    "embedding": "an nn.Embedding without max_norm, scale_grad_by_freq, sparse and hooks",
    "position": "an nn.Embedding without max_norm, scale_grad_by_freq and sparse",
}
LEGAL_CHECKPOINTING = (
    "; or model.disable_input_require_grads() behind gradient_checkpointing_enable(), or activation_checkpoint of the "
    "config in its place"
)
TOKENS_CUT: Placements = (("data", Partial), ("sequence", Partial))


@dataclass(frozen=True)
class Heads:
    """Query and key heads of one attention module."""

    query: int
    key: int


@dataclass
class Swap(ABC):
    """One module being turned into one rank's part. `specs` and the new layers are the result."""

    module: nn.Module
    layout: MeshLayout
    roles: Mapping[str, Role]
    specs: dict[str, ShardSpec] = field(default_factory=dict)
    _local: dict[int, nn.Parameter] = field(default_factory=dict)
    _names: dict[int, str] = field(default_factory=dict)

    @property
    @abstractmethod
    def head_parts(self) -> int:
        """Parts that the heads are cut into."""

    @abstractmethod
    def layer(self, name: str, module: Any, role: Role, heads: Heads | None) -> nn.Module:
        """The layer that takes the place of `module`; itself where only specs are needed. Calls `parameter` for each
        parameter that the module holds."""

    @property
    def tells_heads(self) -> bool:
        """Whether modules of the role `attention` get the number of this rank's heads."""
        return True

    @property
    def at_root(self) -> Placements:
        """How gradients of the model's own parameters lie, beside data and sequence."""
        return ()

    has_adapters = False
    """Whether this mode knows the role `adapter`."""

    def size_faults(self, name: str, role: Role, module: Any) -> list[str]:
        """What this mode cannot cut in a module."""
        return []

    def prepare(self) -> None:  # noqa: B027  (a mode may have nothing to prepare)
        """Called before the first layer is made."""

    def run(self) -> dict[str, ShardSpec]:
        """Swap every module that has a role; returns the spec of each parameter by its first name."""
        owners: dict[str, Any] = dict(self.module.named_modules())
        heads = {
            name: heads_of(owners[name], name)
            for name, role in self.roles.items()
            if role.name == "attention"
        }
        faults = [text for name, held in heads.items() for text in self._head_faults(name, held)]
        faults += [
            text for name, role in self.roles.items() for text in self.size_faults(name, role, owners[name])
        ]
        faults += self._module_faults(owners)
        for name, role in self.roles.items():
            if role.name == "adapter" and not self.has_adapters:
                faults.append(f"{name}: the role adapter is not built in this tensor mode; legal: mode='1d'")
        if faults:
            raise ValueError("parallelize: " + "; ".join(faults))
        self._names = {id(p): name for name, p in self.module.named_parameters()}
        self.prepare()
        for name, role in sorted(self.roles.items(), key=lambda each: each[1].name == "replicate"):
            held = next((heads[a] for a in ancestors(name) if a in heads), None)
            layer = self.layer(name, owners[name], role, held)
            if layer is not owners[name]:
                _replace(self.module, name, layer)
        for parameter in self.module.parameters(recurse=False):
            self.parameter(parameter, gradient=self.at_root)
        for name, held in heads.items():
            if self.tells_heads:
                _set_heads(owners[name], held, self.head_parts)
        return self.specs

    def replaces(self, name: str, role: Role) -> bool:
        """Whether a layer takes the place of this module, which is neither a linear nor a token embedding."""
        return False

    def _module_faults(self, owners: Mapping[str, nn.Module]) -> list[str]:
        """What the modules that are replaced have, and the layers in their place would not."""
        found: list[tuple[str, str]] = []
        for name, role in self.roles.items():
            module = owners[name]
            if role.name in LINEAR_ROLES:
                found += [(name, words) for words in linear_faults(module)]
            elif role.name in TABLES:
                found += [(name, words) for words in embedding_faults(module)]
            if role.name == "position" and self.replaces(name, role):
                found += [(name, words) for words in position_faults(module)]
            if role.name in (*LINEAR_ROLES, "embedding") or self.replaces(name, role):
                found += [(name, words) for words in hook_faults(module)]
        faults = [
            f"{name} ({type(owners[name]).__name__}): {words}, which no layer in its place carries; legal in the role "
            f"{self.roles[name].name}: {LEGAL.get(self.roles[name].name, 'a module without it')}"
            f"{LEGAL_CHECKPOINTING if requires_gradients(owners[name]) else ''}"
            for name, words in found
        ]
        return [*faults, *parameter_hook_faults(self.module)]

    def parameter(
        self, original: nn.Parameter | None, dims: tuple[Dim, ...] | None = None, value: Placements = (),
        gradient: Placements = (),
    ) -> Any:  # fmt: skip
        """The local parameter of `original`, the same one for every tie of it; `gradient` beside data and sequence."""
        if original is None:
            return None
        name = self._names[id(original)]
        spec = ShardSpec(name, dims or dims_of(original.shape), value, (*TOKENS_CUT, *gradient))
        known = self.specs.setdefault(name, spec)
        if known != spec:
            raise ValueError(f"plan: {name} is shared by modules whose roles cut it in different ways")
        if not value:
            return original
        if id(original) not in self._local:
            shape = spec.local_shape(self.layout)
            empty = torch.empty(shape, dtype=original.dtype, device="meta")
            self._local[id(original)] = nn.Parameter(empty, requires_grad=original.requires_grad)
        return self._local[id(original)]

    def replicated(self, module: nn.Module, gradient: Placements = ()) -> None:
        """Every rank has the parameters of a module; one that a layer shares is the part of that layer."""
        for name, parameter in module.named_parameters(recurse=False):
            known = self.specs.get(self._names[id(parameter)])
            if known is None or not known.value:
                self.parameter(parameter, gradient=gradient)
            else:
                module.register_parameter(name, self._local[id(parameter)])

    def _head_faults(self, name: str, heads: Heads) -> list[str]:
        n, faults = self.head_parts, []
        if heads.query % n:
            legal = ", ".join(str(d) for d in range(1, heads.query + 1) if heads.query % d == 0)
            faults.append(f"{name}: tensor={n} does not divide {heads.query} heads; legal: {legal}")
        if heads.key % n and n % heads.key:
            faults.append(
                f"{name}: {heads.key} key heads neither divide into {n} parts nor divide that number"
            )
        return faults


def output_rows(rows: int, role: Role, heads: Heads | None, parts: int) -> tuple[Dim, str | None]:
    """Output features of a column-wise linear as factors, and the factor that is cut (None: all rows are kept)."""
    if role.detail not in ("qkv", "kv"):
        unit = rows // sum(role.shares)
        return tuple((Factor("out", unit * share),) for share in role.shares), "out"
    assert heads is not None
    total = heads.query + 2 * heads.key if role.detail == "qkv" else heads.key
    width = Factor("K", rows // total)
    are_cut = heads.key % parts == 0
    keys = (Factor("heads" if are_cut else "keys", heads.key), width)
    if role.detail == "kv":
        return (keys,), "heads" if are_cut else None
    return ((Factor("heads", heads.query), width), keys, keys), "heads"


def plain(name: str, size: int) -> Dim:
    """A dimension of one factor."""
    return ((Factor(name, size),),)


def padded(name: str, size: int, parts: int) -> Dim:
    """A dimension of one factor, stored with the next size that `parts` divide."""
    return ((Factor(name, size, -(-size // parts) * parts),),)


def oriented(outputs: Dim, inputs: Dim, transposed: bool) -> tuple[Dim, ...]:
    return (inputs, outputs) if transposed else (outputs, inputs)


def heads_of(module: Any, name: str) -> Heads:
    """Heads as an attention module states them. Raises ValueError naming the attributes looked for."""
    query = next((getattr(module, a) for a in HEADS if isinstance(getattr(module, a, None), int)), None)
    config = getattr(module, "config", None)
    if query is None:
        query = next((getattr(config, a) for a in HEADS if isinstance(getattr(config, a, None), int)), None)
    if query is None:
        raise ValueError(f"parallelize: {name} does not state its heads; it needs one of {', '.join(HEADS)}")
    places = (module, config)
    key = next(
        (getattr(p, a) for p in places for a in KEY_HEADS if isinstance(getattr(p, a, None), int)), query
    )
    return Heads(query, key)


def _set_heads(module: Any, heads: Heads, parts: int) -> None:
    """Tell an attention module that it holds a share of the heads."""
    query, key = heads.query // parts, max(heads.key // parts, 1)
    for names, value in ((HEADS, query), (KEY_HEADS, key)):
        for name in names:
            if isinstance(getattr(module, name, None), int):
                setattr(module, name, value)
    if isinstance(getattr(module, "num_key_value_groups", None), int):
        module.num_key_value_groups = query // key
    if isinstance(getattr(module, "split_size", None), int):  # GPT-2 of Hugging Face: features of q
        module.split_size //= parts


def ancestors(name: str) -> list[str]:
    """A module's name and those of the modules around it, the innermost first."""
    parts = name.split(".")
    return [".".join(parts[:i]) for i in range(len(parts), 0, -1)]


def around(roles: Mapping[str, Role], name: str, role: str) -> str | None:
    """The innermost module of a role: the one of this name, or one around it."""
    return next((a for a in ancestors(name) if a in roles and roles[a].name == role), None)


def heads_around(module: nn.Module, roles: Mapping[str, Role], name: str) -> Heads | None:
    """Heads of the attention around a module of this name, if it is in one."""
    owner = around(roles, name, "attention")
    return heads_of(module.get_submodule(owner), owner) if owner else None


def _replace(module: nn.Module, name: str, layer: nn.Module) -> None:
    parent, _, child = name.rpartition(".")
    setattr(module.get_submodule(parent), child, layer)


def cut_values(spec: ShardSpec, layout: MeshLayout, coords: Mapping[str, int], whole: Tensor) -> Tensor:
    """This rank's part of a tensor of the spec's shape; padding is zero."""
    flat, shape = whole.reshape(-1), spec.local_shape(layout)
    part = cut_range(spec, layout, coords, lambda start, stop: flat[start:stop], 0, math.prod(shape))
    return part.view(shape)


def cut_range(
    spec: ShardSpec, layout: MeshLayout, coords: Mapping[str, int], fetch: Callable[[int, int], Tensor],
    start: int, stop: int,
) -> Tensor:  # fmt: skip
    """Elements [start, stop) of this rank's flattened part of a tensor; padding is zero. `fetch(start, stop)` gives
    elements of the whole one, flattened. Only rows of this part are fetched."""
    if not spec.sharding_axes:
        return fetch(start, stop)
    shape = spec.local_shape(layout)
    local_numel, row_numel = math.prod(shape[1:]), math.prod(spec.shape[1:])
    first, last = (start // local_numel, -(-stop // local_numel)) if stop > start else (0, 0)
    rows, *rest = spec.pieces(layout, coords)
    local = fetch(0, 0).new_zeros((last - first, *shape[1:]))
    for piece in rows:
        low, high = max(piece.local, first), min(piece.local + piece.length, last)
        if low >= high:
            continue
        begin = piece.start + low - piece.local
        part = fetch(begin * row_numel, (begin + high - low) * row_numel)
        part = part.view(high - low, *spec.shape[1:])
        for box in product(*rest):
            into = (slice(low - first, high - first), *(slice(p.local, p.local + p.length) for p in box))
            local[into] = part[(slice(None), *(slice(p.start, p.start + p.length) for p in box))]
    return local.view(-1)[start - first * local_numel : stop - first * local_numel]


def fill_placeholders(
    module: nn.Module, originals: Mapping[str, nn.Parameter], specs: Mapping[str, ShardSpec], mesh: Mesh
) -> None:
    """Replace the placeholders by this rank's values of the originals; ties remain."""
    real: dict[int, nn.Parameter] = {}
    for name, parameter in list(module.named_parameters()):
        if parameter.is_meta:
            value = cut_values(specs[name], mesh.layout, mesh.coords, originals[name].detach())
            real[id(parameter)] = nn.Parameter(
                value.contiguous().clone(), requires_grad=parameter.requires_grad
            )
    for owner in module.modules():
        for name, held in owner.named_parameters(recurse=False):
            if id(held) in real:
                setattr(owner, name, real[id(held)])
