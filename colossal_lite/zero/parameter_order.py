"""Finds the order in which a forward first uses the parameters of a model: chunks are packed in it.

Note: why it matters.
Updates run in the order of the chunks during the next forward.  Reductions run in the reverse order during backward.
If modules are defined in another order than they are used, neither overlaps with computing.  So a model from a callable
is first run forward without tensors, on ids [1, T].  `plan` does the same, so both pack alike.  Models built outside,
or that cannot be run so, are packed in the order of definition.  `warn_if_out_of_order` warns if the first forward
shows another.  Numbers do not depend on the order.
Cost: one more build without storage and one forward without tensors, at the start; our own GPT needs neither.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

import torch
from torch import nn

from colossal_lite.memory.packing import ChunkSpec
from colossal_lite.models import GPT
from colossal_lite.observe.printed_lines import warn

V = TypeVar("V")
PARAMETER_LISTS = (nn.ParameterList, nn.ParameterDict)
TOKENS = 8  # of the ids that are sent through: as few as positions, masks and windows allow


def own_parameters(module: nn.Module) -> list[nn.Parameter]:
    """The parameters that a forward of this module may read: its own, and those of modules that it has and never calls.
    These are lists of parameters, and `out_proj` of torch's attention."""
    if isinstance(module, PARAMETER_LISTS):
        return []
    left, found = [module], list[nn.Parameter]()
    while left:
        owner = left.pop()
        found += owner.parameters(recurse=False)
        reads_all = isinstance(owner, nn.MultiheadAttention)
        left += [child for child in owner.children() if reads_all or isinstance(child, PARAMETER_LISTS)]
    return found


def order_of_use(module: nn.Module) -> tuple[str, ...] | None:
    """Names of the parameters in the order of their first use in a forward of ids [1, TOKENS].

    `module` is wholly on the meta device. Unused parameters are left out. None if the module does not run on ids. Also
    None for our GPT, whose modules are defined in the order of use."""
    if type(module) is GPT:
        return None
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    found: dict[str, None] = {}

    def note(owner: nn.Module, args: Any) -> None:
        found.update(dict.fromkeys(names[id(p)] for p in own_parameters(owner)))

    handles = [owner.register_forward_pre_hook(note) for owner in module.modules()]
    was_training = module.training
    try:
        with torch.no_grad(), torch.device("meta"):
            module.eval()(torch.zeros(1, TOKENS, dtype=torch.int64))
    except Exception:  # a model's own code, which need not know ids or tensors without values
        return None
    finally:
        module.train(was_training)
        for handle in handles:
            handle.remove()
    return tuple(found)


def by_order(held: Mapping[str, V], order: Sequence[str] | None) -> dict[str, V]:
    """Sort `held` into this order. Names that it lacks come last, as given; None keeps the order."""
    place = {name: index for index, name in enumerate(order or ())}
    return {name: held[name] for name in sorted(held, key=lambda name: place.get(name, len(place)))}


def warn_if_out_of_order(module: nn.Module, packed: Sequence[ChunkSpec], names: Mapping[int, str]) -> None:
    """Warn if the first forward of `module` uses the chunks in another order than that of their updates.

    It warns where a quarter of the updates would not overlap with computing. `names`: of the parameters, by identity.
    Its hooks stay until it warns or all chunks have been used."""
    chunk_of = {entry.name: place for place, spec in enumerate(packed) for entry in spec.entries}
    used, handles = set[int](), list[Any]()

    def note(needed: frozenset[int], owner: nn.Module, args: Any) -> None:
        used.update(needed)
        early = max(used) + 1 - len(used)
        if early > max(2, len(packed) // 4):
            warn(
                f"model: {type(owner).__name__} is used before {early} chunks of parameters that are defined before "
                f"its own. Their updates and sums do not overlap with computing. Define modules in the order of "
                f"their use, or hand `initialize` a callable that builds a model of ids"
            )
        if early > max(2, len(packed) // 4) or len(used) == len(packed):
            for handle in handles:
                handle.remove()

    for owner in module.modules():
        own = [names[id(p)] for p in own_parameters(owner) if id(p) in names]
        needed = frozenset(chunk_of[name] for name in own if name in chunk_of)
        if needed:
            handles.append(owner.register_forward_pre_hook(partial(note, needed)))
