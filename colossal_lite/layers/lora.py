"""Shards low-rank adapters (2106.09685) on sharded linears: modules that compute base(x) + c up(down(x)).

Note: adapters.
D_in, D_out: sizes of the base; r: the rank.  `down` is [r, D_in] and `up` [D_out, r], as nn.Linear has them.  Any
number of pairs may be in the wrapping module or in modules within it, under any names.  The user's forward is not
changed; its tensors are cut so that the result is right:
    base `colwise`   the input is full (gathered once for all linears that share it); `down` is full, `up` is cut like
                     the base's rows
    base `rowwise`   the input is cut along features; `down` is cut like the base's columns, `up` is full; base and pair
                     give terms, which are summed behind the wrapping module, and then the base's bias is added
So the full factor is replicated and its gradient is partial, whether activations are sharded along the sequence or
not.  An adapter adds one message on the tensor axis: the gradient of that factor, once a step.  The module
must be linear in the outputs of the base and of the pair.  Dropout in it is exact.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from colossal_lite.kernels import Rows
from colossal_lite.layers.roles import Role, match_name
from colossal_lite.layers.swap_checks import is_transposed

CUT = ("colwise", "rowwise")


@dataclass(frozen=True)
class Adapter:
    """One adapted linear: the names of its modules, the role of its base, and its factors by full name."""

    name: str
    base: str
    role: Role
    down: tuple[str, ...]
    up: tuple[str, ...]


def is_linear(module: Any) -> bool:
    """Whether a module is itself a product with a weight of two dimensions, and not something around one."""
    weight = module._parameters.get("weight")
    return weight is not None and weight.dim() == 2


def base_of(wrapper: nn.Module) -> str | None:
    """The child that is adapted: of the linears among the children, the one with the largest weight."""
    found: dict[str, Any] = {name: child for name, child in wrapper.named_children() if is_linear(child)}
    return max(found, key=lambda name: int(found[name].weight.numel()), default=None)


def with_adapters(plan: Mapping[str, str], module: nn.Module) -> dict[str, str]:
    """A plan for a model, some of whose linears have been wrapped since. A wrapping module becomes an `adapter`, its
    base takes the role of the linear. Names that differ in numbers alone share a line where all of them are wrapped."""
    found: dict[str, str] = {}
    for pattern, text in plan.items():
        if Role.parse(text).name not in (*CUT, "lm_head", "embedding"):
            continue
        fits = {name: m for name, m in module.named_modules() if match_name(pattern, name)}
        bases = {name: None if is_linear(m) else base_of(m) for name, m in fits.items()}
        for name, base in bases.items():
            glob = re.sub(r"(?<=\.)\d+(?=\.)", "*", name)
            is_shared = all(other == base for n, other in bases.items() if match_name(glob, n))
            title = glob if is_shared else name
            if base is not None:
                found |= {f"{title}.{base}": text, title: "adapter"}
    return found | {pattern: text for pattern, text in plan.items() if pattern not in found}


def read_adapter(name: str, wrapper: nn.Module, roles: Mapping[str, Role]) -> Adapter | str:
    """What is adapted and by which factors, or the fault that keeps it from being cut."""
    base_name = base_of(wrapper)
    if base_name is None:
        return f"{name}: the role adapter needs a linear among the module's children"
    full = f"{name}.{base_name}"
    base: Any = wrapper.get_submodule(base_name)
    role = roles.get(full, Role("replicate"))
    if role.name not in CUT:
        return (
            f"{full}: an adapter's base has the role {role.name}; legal: {', '.join(CUT)}, with their forms"
        )
    outputs, inputs = base.weight.shape[::-1] if is_transposed(base) else base.weight.shape
    down: list[str] = []
    up: list[str] = []
    for path, factor in wrapper.named_parameters():
        if path.startswith(f"{base_name}."):
            continue
        shape = tuple(factor.shape)
        is_down = len(shape) == 2 and shape[1] == inputs and shape[0] < min(inputs, outputs)
        is_up = len(shape) == 2 and shape[0] == outputs and shape[1] < min(inputs, outputs)
        # With a square base, a factor stored the other way round has a legal shape. Its place shows it.
        if not (is_down or (is_up and len(up) < len(down))):
            return (
                f"{name}.{path} has shape {list(shape)}; legal in an adapter of a linear from {inputs} to {outputs} "
                f"are pairs of factors [r, {inputs}], [{outputs}, r] alone. They have this order, and r is below both"
            )
        (down if is_down else up).append(f"{name}.{path}")
    if len(down) != len(up) or not down:
        return f"{name}: has {len(down)} factors [r, {inputs}] and {len(up)} [{outputs}, r]; legal: pairs of them"
    return Adapter(name, full, role, tuple(down), tuple(up))


def rows_on_features(module: Any, rows: Callable[[], Rows], width: int, coord: int) -> Callable[[], Rows]:
    """Counters of a dropout in the adapter of a `rowwise`. Where it sees `width` features of the base's input, they are
    those of part `coord`. The output of `down` is not cut."""
    seen = 0

    def look(module: nn.Module, args: tuple[Any, ...]) -> None:
        nonlocal seen
        seen = args[0].shape[-1]

    def local() -> Rows:
        return replace(rows(), feature=coord * width, width=width) if seen == width else rows()

    module.register_forward_pre_hook(look)
    return local
