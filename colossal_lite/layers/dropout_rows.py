"""Gives every dropout of a model, module or function, the counters of the elements that it sees on this rank.

Note: where a dropout is.
In the residual stream a mode says which positions or features are here (`LocalRows`).  Between a column-wise linear and
its row-wise one, and behind the head, features are cut in another way: heads in attention, else a part of the features.
Hooks on the linears record where a forward is; names cannot.  The rows of such a place say what is cut.  They are
fitted to the tensor by its shape (`Rows.fitted`), or refuse it.  An adapter's own dropout has counters of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NoReturn

from torch import nn

from colossal_lite.kernels import Dropout, Rows
from colossal_lite.layers.layer_swap import ancestors, heads_around
from colossal_lite.layers.roles import Role
from colossal_lite.layers.swap_checks import is_transposed
from colossal_lite.layers.tensor_modes import LocalRows
from colossal_lite.models import GPT
from colossal_lite.numerics.functional_dropout import FunctionalDropout, may_draw
from colossal_lite.numerics.random import DropoutStreams


@dataclass(frozen=True)
class CutLinear:
    """What a rank has behind a column-wise linear or the head: heads in attention, else features."""

    name: str
    role: Role
    features: int
    """Outputs of the whole linear."""
    heads: int | None
    """Of the whole attention around it."""

    def rows(self, rows: Rows, cut: tuple[int, int] | None) -> Rows:
        """The rows of the layers after it, from those of all tokens. `cut`: (part, parts) of heads and features."""
        if cut is None:
            self._refuse("of other samples than the residual stream in mode 3d")
        part, parts = cut
        if parts == 1:  # later modules state their own part (whole_sizes.py)
            return rows
        if self.heads is not None:
            count = self.heads // parts
            return replace(rows, heads=(part * count, count))
        if self.role.detail:
            self._refuse(f"whose features ({self.role.detail}) are not cut in one piece")
        width = -(-self.features // parts)
        return replace(rows, feature=part * width, width=width)

    def _refuse(self, why: str) -> NoReturn:
        raise ValueError(
            f"a dropout behind {self.name}, {why}: its mask would not be that of one process; legal: a dropout behind "
            f"the row-wise linear, p=0, or tensor=1"
        )


def cut_linears(module: nn.Module, roles: Mapping[str, Role]) -> tuple[CutLinear, ...]:
    """The linears of a whole model behind which features are cut."""
    found = []
    for name, role in roles.items():
        linear: Any = module.get_submodule(name)
        if role.name not in ("colwise", "lm_head") or getattr(linear, "weight", None) is None:
            continue
        heads = heads_around(module, roles, name)
        features = linear.weight.shape[int(is_transposed(linear))]
        found.append(CutLinear(name, role, features, None if heads is None else heads.query))
    return tuple(found)


def note_places(
    module: nn.Module, roles: Mapping[str, Role], cut: Iterable[str], note: Callable[[str], None]
) -> None:
    """Have `note` called where activations become cut in another way than the residual stream. It gets the name of each
    linear of `cut` behind that, and "" where a row-wise linear or a block begins."""
    for name in cut:
        module.get_submodule(name).register_forward_hook(lambda *_, name=name: note(name))
    for name, role in roles.items():
        if role.name in ("rowwise", "block"):
            module.get_submodule(name).register_forward_pre_hook(lambda *_: note(""))


def rows_behind(
    module: nn.Module, roles: Mapping[str, Role], linears: tuple[CutLinear, ...], streams: DropoutStreams,
    cut: tuple[int, int] | None, local_rows: LocalRows,
) -> LocalRows:  # fmt: skip
    """`local_rows` of a model whose layers are swapped, which also knows the layers after its linears."""
    behind = {linear.name: linear for linear in linears}
    note_places(module, roles, behind, partial(setattr, streams, "behind"))
    adapters = {name for name, role in roles.items() if role.name == "adapter"}

    def outside(name: str, rows: Callable[..., Rows]) -> Callable[[], Rows]:
        local = local_rows(name, rows)
        if not adapters.isdisjoint(ancestors(name)):
            return local
        return lambda: behind[streams.behind].rows(rows(), cut) if streams.behind else local()

    return outside


def bind_dropout(
    module: nn.Module, streams: DropoutStreams, local_rows: LocalRows, refused: Mapping[str, str] | None
) -> bool:
    """Give every dropout its counters. nn.Dropout is replaced under its name, once for each place where it stands.

    `refused`: modules in which functional dropouts raise, with the reason; None: functional dropouts get no counters.
    Returns whether the model has a dropout, or may have a functional one."""
    found, bound = False, set[int]()
    for path, owner in list(module.named_modules()):
        for name, child in list(owner._modules.items()):
            if type(child) is nn.Dropout or (type(child) is Dropout and id(child) in bound):
                setattr(owner, name, Dropout(child.p))
                child = getattr(owner, name)
            if isinstance(child, Dropout):
                full_name = f"{path}.{name}" if path else name
                child.rows = local_rows(full_name, partial(streams.rows, full_name))
                bound.add(id(child))
                found = found or child.p > 0
    if refused is None or not may_draw(module):
        return found
    rows: dict[nn.Module, Callable[[], Rows]] = {}
    for path, each in module.named_modules():
        why = next((refused[a] for a in (*ancestors(path), "") if a in refused), None)
        rows[each] = partial(_refuse, path, why) if why else local_rows(path, partial(streams.rows, path))
    streams.functional = partial(FunctionalDropout, rows)
    return True


def unbind_dropout(module: nn.Module) -> None:
    """Have every dropout draw from torch's own generator again."""
    for each in module.modules():
        if isinstance(each, Dropout):
            each.rows = None


def _refuse(name: str, why: str) -> NoReturn:
    raise ValueError(f"{name}: a functional dropout in {why}")


def in_several_places(module: nn.Module) -> Mapping[str, str]:
    """Modules that a pipeline may call on several stages, which cannot count each other's calls."""
    first: dict[int, str] = {}
    found = {}
    for name, each in module.named_modules(remove_duplicate=False):
        if first.setdefault(id(each), name) != name:
            found[first[id(each)]] = (
                f"a module that stands in several places ({first[id(each)]}, {name}), whose calls the stages of a "
                f"pipeline cannot count for each other; legal: a module for each place, or pipeline=1"
            )
    return found


def adapters_of(roles: Mapping[str, Role]) -> Mapping[str, str]:
    """Adapters, in which functional dropouts raise: their tensors may be cut, and no shape shows it."""
    legal = "an adapter, whose cut it cannot know; legal: nn.Dropout there, p=0, or tensor=1"
    return {name: legal for name, role in roles.items() if role.name == "adapter"}


def is_known(module: nn.Module) -> bool:
    """Whether a model's dropouts all lie in the residual stream."""
    return isinstance(module, GPT) and not may_draw(module)
