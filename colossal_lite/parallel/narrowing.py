"""Divides the widths of a model's copy by one number, so that a proof of a wide model is small.

Note: widths.
Widths are the features of the stream, the inputs and outputs of linears, and the width of a head.  Every dim of a
parameter or buffer of such a size is divided.  So is every number of that size that a module or its config has.
Numbers of heads, layers, words and positions are known by their names, and stay.  A copy that does not run so is not
used.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from colossal_lite.layers.layer_swap import heads_of
from colossal_lite.layers.roles import Role
from colossal_lite.layers.swap_checks import LINEAR_ROLES

KEPT_WORDS = (
    "heads",
    "n_head",
    "head_count",
    "layer",
    "vocab",
    "position",
    "block_size",
    "groups",
    "token",
    "embeddings",
)
"""Words in the names of numbers that are not widths."""
HEAD_WIDTHS = ("head_dim", "head_width", "head_size")
LEAST_HEAD = 4


@dataclass(frozen=True)
class Narrowing:
    """Sizes that are divided by `factor`."""

    sizes: frozenset[int]
    halves: frozenset[int]
    """Halves of heads' widths, which tables of rotary angles have."""
    factor: int

    def shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """The shape of a parameter."""
        return tuple(size // self.factor if size in self.sizes else size for size in shape)

    def first_entries(self, buffer: Tensor) -> Tensor:
        """The first entries of a buffer along each dim that is a width."""
        for dim, size in enumerate(buffer.shape):
            if size in self.sizes | self.halves:
                buffer = buffer.narrow(dim, 0, size // self.factor)
        return buffer

    def divide_numbers(self, model: nn.Module) -> None:
        """Divide the widths among the numbers of a copy's modules and their configs, in place."""
        seen: set[int] = set()
        for module in model.modules():
            for holder in (module, getattr(module, "config", None)):
                if hasattr(holder, "__dict__") and id(holder) not in seen:
                    seen.add(id(holder))
                    own = vars(holder)
                    own |= {name: self._number(name, value) for name, value in own.items() if name[0] != "_"}

    def _number(self, name: str, value: Any) -> Any:
        if any(word in name for word in KEPT_WORDS):
            return value
        if isinstance(value, int) and not isinstance(value, bool) and value in self.sizes:
            return value // self.factor
        if type(value) in (tuple, list) and all(isinstance(each, int) for each in value):
            return type(value)(self._number(name, each) for each in value)
        return value


def narrowing(model: nn.Module, roles: Mapping[str, Role]) -> Narrowing | None:
    """Find the widths of a model and the largest power of two that divides them; None if only 1 does."""
    heads = set(_head_widths(model, roles)) - {0}
    sizes = (set(_widths(model, roles)) | heads) - {0}
    if not sizes:
        return None
    factor = 1
    while all(size % (8 * factor) == 0 for size in sizes - heads) and all(
        size % (2 * factor * LEAST_HEAD) == 0 for size in heads
    ):
        factor *= 2
    if factor == 1:
        return None
    return Narrowing(frozenset(sizes), frozenset(size // 2 for size in heads), factor)


def _widths(model: nn.Module, roles: Mapping[str, Role]) -> Iterator[int]:
    for name, role in roles.items():
        weight = getattr(model.get_submodule(name), "weight", None)
        if not isinstance(weight, Tensor) or weight.dim() != 2:
            continue
        if role.name in LINEAR_ROLES and role.name != "lm_head":
            yield from weight.shape
        elif role.name in ("embedding", "position", "lm_head"):
            yield weight.shape[1]


def _head_widths(model: nn.Module, roles: Mapping[str, Role]) -> Iterator[int]:
    """As modules state them, whatever their role is; where an attention states none, from its number of heads."""
    width = next((w for n, r in roles.items() if r.name == "embedding" for w in _widths(model, {n: r})), 0)
    for name, module in model.named_modules():
        found = next((v for a in HEAD_WIDTHS if isinstance(v := getattr(module, a, None), int)), None)
        if found:
            yield found
        elif name in roles and roles[name].name == "attention":
            yield math.gcd(width, width // heads_of(module, name).query)
