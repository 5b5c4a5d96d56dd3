"""Finds the roles of a model's modules from one run of a small copy, whatever their names are.

Note: how roles are found.
A table that is called with the ids is a token embedding; any other table holds positions.  The head is the last linear
as wide as the logits, or as there are words.  Blocks are the children of a list of modules of one class.  Within a
block a pair of linears is found by gradients.  The inputs of a linear are cut into parts, and each part is traced to
the rows of earlier linears. If each part needs rows of its own, the earlier linear is `colwise` and this one `rowwise`.
The order of the rows shows the blocks of a fused weight.  If parts need the same rows (heads that do not divide,
experts), the pair is left whole. A plan that is found so is only a proposal: `plan_proof` proves it.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import groupby
from math import gcd
from typing import Any

import torch
from torch import Tensor, nn

from colossal_lite.data.batch import Batch
from colossal_lite.layers.layer_swap import ancestors, heads_of
from colossal_lite.layers.roles import Patterns, Role
from colossal_lite.layers.swap_checks import is_transposed, linear_faults
from colossal_lite.numerics.proof_modes import Plainly
from colossal_lite.parallel.loss import logits_of
from colossal_lite.parallel.model_loss import ModelLoss
from colossal_lite.parallel.plan_proof import on_a_copy
from colossal_lite.parallel.small_copy import SmallCopy
from colossal_lite.parallel.swap_proof import run_plainly

SAMPLES, TOKENS = 2, 8
NEGLIGIBLE = 1e-13
"""Share of the largest gradient below which a gradient is rounding, not a dependence."""
MOST_ALONE = 8
"""Modules that are left whole one by one, to see whether the others can be cut."""
CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)


@dataclass(frozen=True)
class AutoPlan:
    """Patterns and their roles, and the modules that stay whole, with the reason."""

    plan: Mapping[str, str]
    whole: Mapping[str, str]
    mixing: Collection[str] = ()
    """Modules whose code mixes tokens: whole, they need whole sequences."""

    def choices(self) -> Iterator[AutoPlan]:
        """This plan, then plans that leave the linears of one module whole, of all that mix tokens, of all. Of many
        modules, those whose names differ in numbers alone, such as experts, are left whole together."""
        yield self
        cut = {
            pattern: role for pattern, role in self.plan.items() if role.startswith(("colwise", "rowwise"))
        }
        owners = list(dict.fromkeys(pattern.rpartition(".")[0] for pattern in cut))
        alike: dict[str, list[str]] = {}
        for owner in owners:
            kind = re.sub(r"\.(\d+|\*)(?=\.|$)", ".*", owner) if len(owners) > MOST_ALONE else owner
            alike.setdefault(kind, []).append(owner)
        for chosen in alike.values() if len(alike) > 1 else ():
            yield self._without(cut, chosen)
        attentions = [owner for owner in owners if owner in self.mixing]
        if 1 < len(attentions) < len(owners):
            yield self._without(cut, attentions)
        yield self._without(cut, owners)

    def _without(self, cut: Mapping[str, str], owners: Sequence[str]) -> AutoPlan:
        left = {p: "replicate" for p in cut if p.rpartition(".")[0] in owners}
        left |= {owner: "replicate:whole" for owner in owners if owner in self.mixing}
        kept = {p: r for p, r in self.plan.items() if r != "attention" or p not in owners}
        whole = dict.fromkeys(owners, "with its linears cut a small copy is not that of one process")
        return AutoPlan(kept | left, {**self.whole, **whole}, self.mixing)


@dataclass
class _Call:
    """One call of a linear in the run: what went in and came out."""

    name: str
    input: Tensor
    output: Tensor


@dataclass
class _Found:
    """What is known of the linears of one block: the part that each row belongs to (-1: none yet)."""

    parts: int
    owner: dict[str, Tensor] = field(default_factory=dict)
    rowwise: dict[str, list[str]] = field(default_factory=dict)
    """Row-wise linears, each with its column-wise ones."""
    mixing: set[str] = field(default_factory=set)
    """Row-wise linears whose input sees other tokens: those of attention."""
    faults: dict[str, str] = field(default_factory=dict)


def auto_plan(
    model: nn.Module, parts: int, criterion: ModelLoss | None = None, example: Batch | None = None
) -> AutoPlan:
    """The roles of a model whose layers are cut into `parts`. `criterion`: it is run with labels, for its own loss.
    Raises NoCopyError for one that runs neither on words nor on the `example`."""
    return on_a_copy(
        model, roles_by_shape(model), lambda small: _read(model, small, parts, criterion), example=example
    )


def _read(model: nn.Module, small: SmallCopy, parts: int, criterion: ModelLoss | None) -> AutoPlan:
    calls, tokens, positions, width = _run(small, criterion)
    blocks = list(_blocks(model))
    roles: dict[str, str] = {name: "block" for name in blocks}
    # Sequences are whole outside of blocks. A model without blocks has no place where they would be cut.
    embedding = "embedding:whole" if blocks else "embedding"
    head = _head(small, calls, blocks, width)
    roles |= {} if head is None else {head: "lm_head"}
    # A decoder's table takes other words, such as labels. It shares the weight of a table of words, or the head's.
    owners: dict[str, Any] = dict(small.model.named_modules())
    shared = {id(owners[name].weight) for name in (head, *tokens) if name is not None}
    for name in (*tokens, *positions):
        roles[name] = embedding if id(owners[name].weight) in shared else "position"
    whole: dict[str, str] = {}
    mixing: dict[str, str] = {}
    for block in blocks:
        inside = [call for call in calls if call.name.startswith(f"{block}.")]
        if inside:
            found = _pairs(small.model, inside, parts)
            roles |= _linear_roles(found)
            roles |= {name: "attention" for name in _attentions(small.model, found, block)}
            whole |= found.faults
            mixing |= {name: "replicate:whole" for name in _mixing(small.model, inside) if name != block}
    dropped = [b for b in blocks if not any(c.name.startswith(f"{b}.") for c in calls)]
    cut = [name for name, role in roles.items() if role.startswith(("colwise", "rowwise"))]
    roles |= {n: r for n, r in mixing.items() if not any(each.startswith(f"{n}.") for each in cut)}
    roles |= _as_in_kept(roles, blocks, dropped)
    mixing |= _as_in_kept(mixing, blocks, dropped)
    prefixes = tuple(f"{block}." for block in blocks)
    attentions = tuple(f"{name}." for name, role in roles.items() if role == "attention")
    for name, module in model.named_modules():
        if name and name not in roles and any(True for _ in module.parameters(recurse=False)):
            is_norm = _is_norm(module) and not name.startswith(attentions)
            roles[name] = "norm" if is_norm else "replicate"
    for name, role in roles.items():
        if role == "replicate" and name.startswith(prefixes) and _is_linear(model.get_submodule(name)):
            if not any(other.rpartition(".")[0] == name.rpartition(".")[0] for other in whole):
                whole[name] = f"it is in no pair of linears that {parts} parts divide"
    return AutoPlan(_patterns(roles, blocks), _patterns(whole, blocks), _patterns(mixing, blocks).keys())


# ---- the run ----


def roles_by_shape(model: nn.Module) -> dict[str, Role]:
    """Tables and heads, as far as shapes tell: the copy keeps few rows of them."""
    found, sizes = {}, set()
    inside = tuple(f"{block}." for block in _blocks(model))
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding):
            found[name] = Role("embedding")
            sizes.add(module.num_embeddings)
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and module.out_features in sizes and not name.startswith(inside):
            if module.out_features > module.in_features:
                found[name] = Role("lm_head")
        if _is_linear(module) and name not in found:
            found[name] = Role("colwise")
        elif sum(map(_is_linear, module.children())) > 1 and _states_heads(module, name):
            found[name] = Role("attention")
    return found


def _states_heads(module: nn.Module, name: str) -> bool:
    try:
        heads_of(module, name)
    except ValueError:
        return False
    return True


def _run(
    small: SmallCopy, criterion: ModelLoss | None
) -> tuple[list[_Call], list[str], list[str], int | None]:
    """The calls of linears in order, the tables that take the words, others, and the width of logits."""
    calls, tokens, others = list[_Call](), dict[str, None](), dict[str, None]()
    batch = small.batch(SAMPLES, TOKENS)
    asked = batch if criterion is None else criterion.asked(batch)

    def linear(name: str, args: tuple[Any, ...], out: Any) -> None:
        if args and isinstance(args[0], Tensor) and isinstance(out, Tensor) and out.requires_grad:
            calls.append(_Call(name, args[0], out))

    def table(name: str, args: tuple[Any, ...]) -> None:
        given = bool(args) and isinstance(args[0], Tensor) and args[0].shape == batch.inputs.shape
        (tokens if given and torch.equal(args[0], batch.inputs) else others)[name] = None

    for parameter in small.model.parameters():
        parameter.requires_grad_(parameter.is_floating_point())
    for name, module in small.model.named_modules():
        if isinstance(module, nn.Linear) or is_transposed(module):
            module.register_forward_hook(lambda m, a, out, name=name: linear(name, a, out))
        elif isinstance(module, nn.Embedding):
            module.register_forward_pre_hook(lambda m, a, name=name: table(name, a))
    outputs: list[Any] = []
    small.model.register_forward_hook(lambda m, a, out: outputs.append(out))
    run_plainly(small.model.train(), asked)
    width = None
    with suppress(ValueError):
        width = logits_of(outputs[0]).shape[-1]
    return calls, list(tokens), [name for name in others if name not in tokens], width


def _blocks(model: nn.Module) -> Iterator[str]:
    """Children of the outermost lists of modules of one class, each with two linears or more."""
    taken: tuple[str, ...] = ()
    for path, owner in model.named_modules():
        children = list(owner.children())
        if not isinstance(owner, CONTAINERS) or not children or f"{path}.".startswith(taken):
            continue
        large = {n: m for n, m in owner.named_children() if sum(map(_is_linear, m.modules())) > 1}
        if len({type(child) for child in large.values()}) == 1 and not isinstance(
            next(iter(large.values())), CONTAINERS
        ):
            taken = (*taken, f"{path}." if path else "")
            yield from (f"{path}.{name}" if path else name for name in large)


def _is_linear(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear) or is_transposed(module)


def _head(small: SmallCopy, calls: Sequence[_Call], blocks: Sequence[str], width: int | None) -> str | None:
    """The last linear behind all blocks that is as wide as the logits, or gives a number for each word."""
    prefixes = tuple(f"{block}." for block in blocks)
    last = max((place for place, call in enumerate(calls) if call.name.startswith(prefixes)), default=-1)
    rows = {m.num_embeddings for m in small.model.modules() if isinstance(m, nn.Embedding)}
    widths = {width, *rows}
    return next((c.name for c in reversed(calls[last + 1 :]) if c.output.shape[-1] in widths), None)


# ---- pairs ----


def _pairs(model: nn.Module, calls: Sequence[_Call], parts: int) -> _Found:
    """Pairs among the linears of one block."""
    found = _Found(parts)
    called = [call.name for call in calls]
    legal = {
        name for name in called
        if called.count(name) == 1 and not list(linear_faults(model.get_submodule(name)))
    }  # fmt: skip
    for place, call in enumerate(calls):
        if call.name not in legal or call.input.shape[-1] % parts or not call.input.requires_grad:
            continue
        earlier = [c for c in calls[:place] if c.name in legal and c.name not in found.rowwise]
        if earlier:
            _pair_with_earlier(found, call, earlier)
    return found


def _pair_with_earlier(found: _Found, call: _Call, earlier: Sequence[_Call]) -> None:
    """Record in `found` whether each part of a linear's inputs needs rows of its own of earlier linears, and which."""
    width, n = call.input.shape[-1] // found.parts, found.parts
    outputs = [c.output for c in earlier]
    needs = [_needed(call.input[..., part * width : (part + 1) * width], outputs) for part in range(n)]
    claims: dict[str, Tensor] = {}
    shared = []
    for each, of_parts in zip(earlier, zip(*needs, strict=True), strict=True):
        uses = torch.stack(of_parts)
        if not uses.any():
            continue
        if (uses.sum(0) > 1).any():
            shared.append(each.name)
        else:
            claims[each.name] = torch.where(uses.any(0), uses.int().argmax(0), -1)
    if not claims:
        partly = [
            c.name for c, uses in zip(earlier, zip(*needs, strict=True), strict=True) if 0 < _share(uses) < 1
        ]
        if partly:
            found.faults[call.name] = (
                f"{n} parts of its input need the same rows of {partly[0].rpartition('.')[2]}, as where {n} divides no "
                f"number of heads"
            )
        return
    clash = [n for n, o in claims.items() if n in found.owner and ((found.owner[n] >= 0) & (o >= 0)).any()]
    if clash:
        found.faults[call.name] = f"{clash[0]} gives to several linears"
        return
    for name, owner in claims.items():
        before = found.owner.get(name)
        found.owner[name] = owner if before is None else torch.where(owner >= 0, owner, before)
    found.rowwise[call.name] = list(claims)
    at_end = _gradients(call.input[:, -1], [c.output for c in earlier if c.name in claims])
    if any(g is not None and bool(g[:, :-1].any()) for g in at_end):
        found.mixing.add(call.name)


def _mixing(model: nn.Module, calls: Sequence[_Call]) -> Iterator[str]:
    """Modules in a block in which the input of a linear sees other tokens of an earlier one in the same module."""
    for place, call in enumerate(calls):
        owner = call.name.rpartition(".")[0]
        while isinstance(model.get_submodule(owner), nn.ModuleList | nn.ModuleDict):  # which is not called
            owner = owner.rpartition(".")[0]
        inside = [c.output for c in calls[:place] if c.name.startswith(f"{owner}.")]
        if inside and call.input.requires_grad:
            if any(g is not None and bool(g[:, :-1].any()) for g in _gradients(call.input[:, -1], inside)):
                yield owner


def _share(uses: Sequence[Tensor]) -> float:
    """The share of its rows that the parts need."""
    return float(torch.stack(list(uses)).double().mean())


def _needed(x: Tensor, outputs: Sequence[Tensor]) -> list[Tensor]:
    """Which features of each output `x` depends on."""
    sizes = [
        torch.zeros(out.shape[-1]) if g is None else g.abs().flatten(0, -2).amax(0)
        for out, g in zip(outputs, _gradients(x, outputs), strict=True)
    ]
    return [size > NEGLIGIBLE * float(size.max()) for size in sizes]


def _gradients(x: Tensor, outputs: Sequence[Tensor]) -> Sequence[Tensor | None]:
    generator = torch.Generator().manual_seed(0)
    weights = torch.randn(x.shape, generator=generator, dtype=x.dtype)
    with Plainly():  # which recomputes what the forward has computed
        return torch.autograd.grad(x, outputs, weights, retain_graph=True, allow_unused=True)


def _linear_roles(found: _Found) -> dict[str, str]:
    """Roles of the linears of one block. Pairs with a column-wise linear that has no legal form are left whole."""
    shares = {name: shares_of(owner.tolist(), found.parts) for name, owner in found.owner.items()}
    bad = {name for name, found_shares in shares.items() if found_shares is None}
    for name in sorted(bad):
        found.faults[name] = f"its rows do not divide into {found.parts} parts block by block"
    left: set[str] = set()
    while more := {row for row, firsts in found.rowwise.items() if row not in left and bad & set(firsts)}:
        left |= more
        bad |= {first for row in more for first in found.rowwise[row]}
    roles = dict.fromkeys(sorted(bad | left), "replicate")
    for name in [row for row in found.rowwise if row not in left]:
        roles[name] = "rowwise"
        for first in found.rowwise[name]:
            blocks = shares[first] or (1,)
            roles[first] = "colwise" if len(blocks) == 1 else f"colwise:{'+'.join(map(str, blocks))}"
    found.mixing -= left
    return roles


def shares_of(owners: Sequence[int], parts: int) -> tuple[int, ...] | None:
    """The proportions of the blocks of rows, each cut into equal parts in order. None if the rows have no such order.

    `owners`: the part of each row, or -1 for a unit that was zero in the run (ReLU). Where most rows are known, the
    others follow."""
    if -1 in owners:
        known = [(row, part) for row, part in enumerate(owners) if part >= 0]
        for count in (1, 2, 3) if 2 * len(known) > len(owners) else ():
            size, rest = divmod(len(owners), count)
            if not rest and all(row % size * parts // size == part for row, part in known):
                return (1,) * count
        return None
    runs_ = [(part, len(list(run))) for part, run in groupby(owners)]
    blocks = []
    for start in range(0, len(runs_), parts):
        cycle = runs_[start : start + parts]
        if [part for part, _ in cycle] != list(range(parts)) or len({size for _, size in cycle}) > 1:
            return None
        blocks.append(cycle[0][1])
    unit = gcd(*blocks)
    return tuple(block // unit for block in blocks)


def _attentions(model: nn.Module, found: _Found, block: str) -> Iterator[str]:
    """Modules within a block around the column-wise linears of attention that state their heads. The row-wise one may
    stand elsewhere."""
    for name in sorted(found.mixing & set(found.rowwise)):
        firsts = found.rowwise[name]
        for around in ancestors(firsts[0])[1:]:
            if not around.startswith(f"{block}."):  # a block that is its own attention stays a block
                break
            has_all = all(first.startswith(f"{around}.") for first in firsts)
            if has_all and _states_heads(model.get_submodule(around), around):
                yield around
                break


# ---- the rest, and patterns ----


def _is_norm(module: nn.Module) -> bool:
    """Whether a module may act as a norm does: all it has are vectors of one size."""
    shapes = {tuple(p.shape) for p in module.parameters()}
    return not list(module.children()) and len(shapes) == 1 and len(next(iter(shapes))) == 1


def _as_in_kept(roles: Mapping[str, str], blocks: Sequence[str], dropped: Sequence[str]) -> dict[str, str]:
    """Roles in blocks that the copy has not, as in the last one that it has and that is alike."""
    found: dict[str, str] = {}
    for block in dropped:
        owner = block.rpartition(".")[0]
        kept = [b for b in blocks if b not in dropped and b.rpartition(".")[0] == owner]
        if kept:
            prefix = f"{kept[-1]}."
            found |= {
                block + "." + n.removeprefix(prefix): r for n, r in roles.items() if n.startswith(prefix)
            }
    return found


def _patterns(roles: Mapping[str, str], blocks: Sequence[str]) -> dict[str, str]:
    """Roles by patterns: a block's number is `*` where all blocks of its list agree."""
    numbered = set(blocks)
    globs: dict[str, str] = {}
    for name in roles:
        block = next((b for b in ancestors(name) if b in numbered), None)
        if block is not None:
            owner, inner = block.rpartition(".")[0], name.removeprefix(block)
            globs[name] = f"{owner}.*{inner}" if owner else f"*{inner}"
    fitting, alike = Patterns(dict.fromkeys(globs.values())), dict[str, set[str]]()
    for name, text in roles.items():
        for glob in fitting.of(name):
            alike.setdefault(glob, set()).add(text)
    return {
        globs[name] if name in globs and len(alike[globs[name]]) == 1 else name: text
        for name, text in roles.items()
    }
