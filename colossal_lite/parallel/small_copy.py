"""Makes a small copy of a model for proofs: a few blocks of each kind, tables of a few rows, float64 values.

Note: the sizes that are cut.
The copy runs the model's own code, its hooks included.  Of blocks that are alike two are kept.  Tables and the head
keep `ROWS` rows.  Widths are divided where the model is wide.  The run's random state stays as it is.

Note: values.
A proof shows nothing of a path that the values close, such as a gate below its threshold, or zeros.  So parameters have
the model's own values with random ones added.  Those on meta are random.
"""

from __future__ import annotations

import copy
import copyreg
import gc
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from types import CellType, FunctionType, ModuleType
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from colossal_lite.data.batch import Batch
from colossal_lite.layers.roles import Role
from colossal_lite.parallel.copy_batches import ROWS, labels_samples, samples_of, words
from colossal_lite.parallel.narrowing import Narrowing
from colossal_lite.transforms.activation_checkpoint import blocks_of
from colossal_lite.transforms.module_modes import hold_evaluation

Model = TypeVar("Model", bound=nn.Module)
POSITIONS, TOKENS = 64, 8
MOST_TOKENS = 128
LIMIT_BYTES = 256 << 20
"""Two blocks as wide as 1,024, of a model whose widths cannot be divided."""
KEPT_ALIKE = 2
NO_FULL_LOOK = 1 << 30
"""Looks at newer objects before Python looks at all."""
LARGE_NUMEL = 1 << 22
"""Buffers above this size keep their dtype, as float64 may take twice the memory. They too are copied, as forwards may
write to them."""


@dataclass(frozen=True)
class SmallCopy:
    """The copy, the roles of the modules in it, and its words."""

    model: nn.Module
    roles: Mapping[str, Role]
    words: int
    padding: tuple[int, ...]
    """Words whose rows are not trained."""
    has_all_blocks: bool
    is_as_wide: bool
    """Whether it has the widths of the model."""
    cut_rows: Mapping[str, int] = field(default_factory=lambda: dict(lm_head=0, embedding=0))
    """The most rows of the model's heads and tables that have fewer in the copy, by role."""
    tokens: int | None = None
    """Of each sequence, where the model takes no other length; None: any."""
    example: Batch | None = None
    """What it is run on, where it does not run on random words."""

    def batch(self, samples: int, tokens: int) -> Batch:
        """Random words with every padding word among them, and random labels; or samples of the example. `tokens`: of
        each sequence, if the model takes any."""
        if self.example is not None:
            return self.samples_of(self.example, samples)
        return words(samples, self.tokens or tokens, self.words, self.padding)

    def samples_of(self, example: Batch, count: int) -> Batch:
        """So many samples of an example, with labels that the copy's head has."""
        are_words = not (example.inputs.is_floating_point() or labels_samples(example))
        cut_rows = self.cut_rows["lm_head"] or (self.cut_rows["embedding"] if are_words else 0)
        return samples_of(example, count, cut_rows=cut_rows)


class NoCopyError(ValueError):
    """A model that has no small copy; the text says why."""


def small_copy(
    model: nn.Module,
    roles: Mapping[str, Role],
    narrow: Narrowing | None = None,
    limit_bytes: int = LIMIT_BYTES,
    *,
    keeps_all: bool = False,
) -> SmallCopy:
    """A copy of at most `limit_bytes` of float64 values, on the CPU; with `narrow`, of smaller widths; with
    `keeps_all`, of all blocks.

    Raises NoCopyError, saying why there is none."""
    dropped = () if keeps_all else _alike(model, roles)
    kept = {n: p for n, p in model.named_parameters() if not n.startswith(dropped)} if dropped else None
    named = dict(model.named_parameters()) if kept is None else kept
    rows = _rows(model, roles)
    shapes = {name: _shape(p, rows.get(id(p)), narrow) for name, p in named.items()}
    size_bytes = 8 * sum(torch.Size(shape).numel() for shape in shapes.values())
    if size_bytes > limit_bytes:
        raise NoCopyError(
            f"a small copy of it needs {size_bytes >> 20} MiB; at most {limit_bytes >> 20} are taken"
        )
    generator = torch.Generator().manual_seed(0)
    memo: dict[int, Any] = {
        id(p): nn.Parameter(torch.empty(0, device="meta"), requires_grad=False) for p in model.parameters()
    }
    for name, parameter in named.items():
        value = _drawn(name, shapes[name], parameter, generator)
        memo[id(parameter)] = nn.Parameter(value, requires_grad=parameter.requires_grad)
    for buffer in model.buffers():
        if buffer.is_meta:
            raise NoCopyError("it has buffers on meta")
        memo[id(buffer)] = _copied(buffer if narrow is None else narrow.first_entries(buffer))
    for name in dropped:  # they are left out below
        memo[id(model.get_submodule(name.removesuffix(".")))] = nn.Module()
    try:
        made = deep_copy(model, memo)
    except (TypeError, RuntimeError, ValueError, NotImplementedError) as error:
        raise NoCopyError(f"it cannot be copied: {type(error).__name__}: {error}") from error
    check_apart(made, model)
    for name in dropped:
        parent, _, child = name.removesuffix(".").rpartition(".")
        del made.get_submodule(parent)._modules[child]
    left = {n: role for n, role in roles.items() if not f"{n}.".startswith(dropped)} if dropped else roles
    if narrow is not None:
        narrow.divide_numbers(made)
    words, padding = _resize(made, left, model)
    hold_evaluation(made, model)
    cut_rows = {kind: _cut_rows(model, left, kind) for kind in ("lm_head", "embedding")}
    return SmallCopy(made.eval(), dict(left), words, padding, keeps_all, narrow is None, cut_rows=cut_rows)


def has_more_blocks(model: nn.Module, roles: Mapping[str, Role]) -> bool:
    """Whether a small copy leaves out blocks."""
    return bool(_alike(model, roles))


@contextmanager
def frozen_heap() -> Iterator[None]:
    """Context of many copies: Python looks for garbage among new objects alone. A look at all takes up to a second."""
    thresholds = gc.get_threshold()
    gc.set_threshold(*thresholds[:2], NO_FULL_LOOK)
    try:
        yield
    finally:
        gc.set_threshold(*thresholds)


def deep_copy(model: Model, memo: dict[int, Any] | None = None) -> Model:
    """A copy, in which functions that a module keeps refer to the modules of the copy."""
    memo = {} if memo is None else memo
    made: Model = _copied_by_parts(model, memo)
    for module in made.modules():
        for name, value in list(vars(module).items()):
            module.__dict__[name] = _rebound(value, memo)
    return made


def numbers_of(module: nn.Module) -> dict[str, int | float]:
    """Numbers that it keeps as attributes."""
    return {name: value for name, value in vars(module).items() if type(value) in (int, float)}


def set_back(model: nn.Module) -> Callable[[], None]:
    """A function that gives buffers, numbers and frozen parameters of `model` the values that they have now. Those that
    share memory share it again."""
    buffers = [(m._buffers, name, buffer) for m in model.modules() for name, buffer in m._buffers.items()]
    numbers = [(module, numbers_of(module)) for module in model.modules()]
    frozen = [p for p in model.parameters() if not p.requires_grad]
    tensors: dict[int, Tensor] = {id(t): t for t in (*frozen, *(b for *_, b in buffers)) if t is not None}
    values = copy.deepcopy({key: tensor.detach() for key, tensor in tensors.items()})

    def run() -> None:
        again = copy.deepcopy(values)  # with one memory for tensors that share it
        for owner, name, buffer in buffers:
            owner[name] = None if buffer is None else again[id(buffer)]
        for module, kept in numbers:
            module.__dict__.update(kept)
        for parameter in frozen:
            parameter.data = again[id(parameter)]

    return run


def on_meta_copy(model: nn.Module) -> nn.Module:
    """A copy without values, in evaluation. Raises NoCopyError for a model that cannot be copied."""

    def bare(tensor: Tensor) -> Tensor:
        dtype = torch.float64 if tensor.is_floating_point() else tensor.dtype
        return torch.empty_like(tensor, device="meta", dtype=dtype)

    memo: dict[int, Any] = {
        id(p): nn.Parameter(bare(p), requires_grad=p.requires_grad) for p in model.parameters()
    }
    kept = [value for module in model.modules() for value in vars(module).values()]
    tables = [*model.buffers(), *(value for value in kept if isinstance(value, Tensor))]
    memo |= {id(table): bare(table) for table in tables}
    try:
        made = deep_copy(model, memo).eval()
    except (TypeError, RuntimeError, ValueError, NotImplementedError) as error:
        raise NoCopyError(f"{type(error).__name__}: {error}") from error
    check_apart(made, model)
    hold_evaluation(made, model)
    return made


ATOMS = frozenset(
    {type(None), bool, int, float, complex, str, bytes, type, torch.dtype, torch.device, torch.Size}
)
"""Classes whose values a copy shares."""
OWN_COPIES = ("__deepcopy__", "__getnewargs__", "__getnewargs_ex__", "__slots__")
COPYING = ("__new__", "__reduce__", "__reduce_ex__", "__getstate__", "__setstate__")
"""What tells copy.deepcopy how to make an object."""


def _copied_by_parts(value: Any, memo: dict[int, Any]) -> Any:
    """As copy.deepcopy, several times as fast for modules and the dicts that they have."""
    kind: Any = type(value)
    if kind in ATOMS:
        return value
    if id(value) in memo:
        return memo[id(value)]
    if kind is dict or (kind is OrderedDict and not value):
        made = memo[id(value)] = kind()
        for key, each in value.items():
            made[_copied_by_parts(key, memo)] = _copied_by_parts(each, memo)
        return made
    if not isinstance(value, nn.Module) or not _copies_as_module(kind) or "__deepcopy__" in vars(value):
        return copy.deepcopy(value, memo)
    made = memo[id(value)] = object.__new__(kind)
    for name, each in vars(value).items():
        if name != "_compiled_call_impl":
            made.__dict__[name] = _copied_by_parts(each, memo)
    return made


@lru_cache
def _copies_as_module(kind: Any) -> bool:
    """Whether copy.deepcopy makes a new object of this class and copies its attributes one by one."""
    return (
        not any(hasattr(kind, name) for name in OWN_COPIES)
        and not issubclass(kind, (list, dict))
        and kind not in copyreg.dispatch_table
        and all(getattr(kind, name) is getattr(nn.Module, name) for name in COPYING)
    )


def _rebound(value: Any, memo: dict[int, Any]) -> Any:
    """A value of a copy, in which functions hold what stands in the copy: deepcopy takes them as they are."""
    if type(value) in ATOMS:
        return value
    if id(value) in memo:
        return memo[id(value)]
    if type(value) in (list, tuple):
        return type(value)(_rebound(each, memo) for each in value)
    if isinstance(value, dict):
        again = {key: new for key, each in value.items() if (new := _rebound(each, memo)) is not each}
        if again:  # one in a closure is still the original's
            value = copy.copy(value)
            value.update(again)
    if not isinstance(value, FunctionType) or not (
        value.__closure__ or value.__defaults__ or value.__kwdefaults__
    ):
        return value
    cells = tuple(CellType() for _ in value.__closure__ or ())
    made = FunctionType(value.__code__, value.__globals__, value.__name__, None, cells)
    memo[id(value)] = made
    made.__defaults__ = _rebound(value.__defaults__, memo)
    made.__kwdefaults__ = _rebound(dict(value.__kwdefaults__ or {}), memo) or None
    for cell, own in zip(cells, value.__closure__ or (), strict=True):
        if not _is_empty(own):
            cell.cell_contents = _rebound(own.cell_contents, memo)
    return made


def _is_empty(cell: CellType) -> bool:
    try:
        return cell.cell_contents is None
    except ValueError:
        return True


def check_apart(made: nn.Module, model: nn.Module) -> None:
    """Raises NoCopyError for a copy whose code reaches modules or parameters of the original: a change of the copy
    would change the original, such as gradients."""
    names = {id(m): name for name, m in model.named_modules()} | {
        id(p): n for n, p in model.named_parameters()
    }
    seen, left = set[int](), [made]
    while left:
        value: Any = left.pop()
        if id(value) in seen or isinstance(value, type | ModuleType | str):
            continue
        seen.add(id(value))
        if id(value) in names:
            raise NoCopyError(
                f"a copy of it reaches {names[id(value)] or 'the model itself'} of the original, by an object that is "
                f"not copied; legal: modules found by self"
            )
        left += _held(value) if isinstance(value, FunctionType) else gc.get_referents(value)


def _held(function: FunctionType) -> list[Any]:
    """What a function's code can read beside its arguments."""
    used = [function.__globals__[n] for n in function.__code__.co_names if n in function.__globals__]
    return [*used, function.__closure__, function.__defaults__, function.__kwdefaults__, function.__dict__]


def table_roles(model: nn.Module) -> dict[str, Role]:
    """Tables and heads over the words; a small copy keeps few of their rows; without a plan."""
    tables = {name: m for name, m in model.named_modules() if isinstance(m, nn.Embedding)}
    rows = {m.num_embeddings for m in tables.values()}
    heads = [n for n, m in model.named_modules() if isinstance(m, nn.Linear) and m.out_features in rows]
    inside = tuple(f"{name}." for name in blocks_of(model))
    return {name: Role("embedding") for name in tables if not name.startswith(inside)} | {
        name: Role("lm_head") for name in heads if not name.startswith(inside)
    }


LENGTH_NAMES = ("sequence", "max_position_embeddings", "n_positions", "block_size")
"""Names under which the configurations of models state the most tokens: ours, Hugging Face's, nanoGPT's."""


def stated_length(model: nn.Module) -> int | None:
    """The most tokens that a model's configuration states. None: it states none, or a number below 1, which means no
    limit."""
    config = getattr(model, "config", None)
    stated = (getattr(config, name, None) for name in LENGTH_NAMES)
    return next((length for length in stated if length is not None and length >= 1), None)


def few_tokens(model: nn.Module) -> int:
    """TOKENS, or as many as the model's configuration states where these are fewer."""
    return min(TOKENS, stated_length(model) or TOKENS)


def own_lengths(model: nn.Module) -> tuple[int, ...]:
    """Lengths of sequences that a model may be made for: rows of tensors that it holds beside its layers. Few of them,
    and none that takes long. `x + self.table` takes no other length."""
    own = (m for m in model.modules() if any(True for _ in m.children()))
    held = (x for m in own for x in (*m.parameters(recurse=False), *m.buffers(recurse=False)) if x.dim() > 1)
    found = dict.fromkeys(
        x.shape[-2] for x in held if 1 < x.shape[-2] <= MOST_TOKENS and x.shape[-2] != TOKENS
    )
    return tuple(found)[:3]


def few_ids(model: nn.Module, samples: int = 2, tokens: int | None = None) -> Tensor:
    """Ids [samples, tokens] that every table of a model has, other ones in each sample, on its device."""
    rows = few_rows(model)
    device = next(model.parameters()).device
    sample = torch.arange(samples, device=device)[:, None]
    place = torch.arange(tokens or few_tokens(model), device=device)
    return ((sample + 1) * place + sample).remainder(rows)


def few_rows(model: nn.Module) -> int:
    """The rows that every table of a model has."""
    rows = min((m.num_embeddings for m in model.modules() if isinstance(m, nn.Embedding)), default=TOKENS)
    return max(rows, 1)


def _shape(parameter: Tensor, rows: int | None, narrow: Narrowing | None) -> tuple[int, ...]:
    shape = tuple(parameter.shape)
    if rows is not None and shape:
        return (min(rows, shape[0]), *(narrow.shape(shape[1:]) if narrow else shape[1:]))
    return narrow.shape(shape) if narrow else shape


def _alike(model: nn.Module, roles: Mapping[str, Role]) -> tuple[str, ...]:
    """Prefixes, with a dot, of blocks beyond the first ones that are like them in class, shapes and roles."""
    dropped: list[str] = []
    within: tuple[str, ...] = ()
    for path, owner in model.named_modules():
        if not isinstance(owner, nn.ModuleList | nn.Sequential) or path.startswith(within):
            continue
        if path and any(any(True for _ in child.children()) for child in owner.children()):
            within = (*within, f"{path}.")  # lists within blocks are parts of them, such as heads
        seen: dict[Any, int] = {}
        for name, child in owner.named_children():
            full = f"{path}.{name}." if path else f"{name}."
            if not any(True for _ in child.children()):
                continue
            inside = tuple(
                (f"{n}.".removeprefix(full), r) for n, r in roles.items() if f"{n}.".startswith(full)
            )
            kind = (
                tuple((n, type(m)) for n, m in child.named_modules()),
                tuple((n, p.shape, p.requires_grad) for n, p in child.named_parameters()),
                inside,
            )
            seen[kind] = seen.get(kind, 0) + 1
            if seen[kind] > KEPT_ALIKE:
                dropped.append(full)
    return tuple(dropped)


def _rows(model: nn.Module, roles: Mapping[str, Role]) -> dict[int, int]:
    """Rows that the copy keeps of tables, by parameter."""
    found: dict[int, int] = {}
    for name, role in roles.items():
        if role.name in ("embedding", "lm_head", "position"):
            for parameter in model.get_submodule(name).parameters(recurse=False):
                found[id(parameter)] = POSITIONS if role.name == "position" else ROWS
    return found


def _cut_rows(model: nn.Module, roles: Mapping[str, Role], kind: str) -> int:
    """The most rows of a weight with this role, of those that have more than a copy keeps; else 0."""
    owners = (model.get_submodule(name) for name, role in roles.items() if role.name == kind)
    counts = (len(p) for owner in owners for p in owner.parameters(recurse=False) if p.dim())
    return max((count for count in counts if count > ROWS), default=0)


def _resize(made: nn.Module, roles: Mapping[str, Role], model: nn.Module) -> tuple[int, tuple[int, ...]]:
    """Tell tables how many rows they have now: the words, and those that are padding."""
    words, padding, fewer = ROWS, set[int](), dict[int, int]()
    for name, role in roles.items():
        owner: Any = made.get_submodule(name)
        weight = getattr(owner, "weight", None)
        if role.name not in ("embedding", "lm_head", "position") or not isinstance(weight, Tensor):
            continue
        for attribute in ("num_embeddings", "out_features"):
            if isinstance(rows := getattr(owner, attribute, None), int):
                fewer |= {rows: weight.shape[0]} if role.name != "position" else {}
                setattr(owner, attribute, weight.shape[0])
        if role.name == "position":
            continue
        words = min(words, weight.shape[0])
        if isinstance(getattr(owner, "padding_idx", None), int):
            owner.padding_idx %= weight.shape[0]
            padding.add(owner.padding_idx)
    _tell_words(made, {rows: left for rows, left in fewer.items() if rows != left}, model)
    unknown = {
        name: m for name, m in made.named_modules() if isinstance(m, nn.Embedding) and name not in roles
    }
    return min([words, *(table.weight.shape[0] for table in unknown.values())]), tuple(sorted(padding))


def _tell_words(made: nn.Module, fewer: Mapping[int, int], model: nn.Module) -> None:
    """Have a copy state as many words as its tables have, and cut its vectors over the words. `fewer`: these numbers by
    the model's."""
    theirs = {id(getattr(module, "config", None)) for module in model.modules()}
    for module in made.modules():
        config = getattr(module, "config", None)
        for holder in (module, config) if id(config) not in theirs else (module,):
            own = getattr(holder, "__dict__", {})
            stated = {n: x for n, x in own.items() if "vocab" in n and isinstance(x, int) and x in fewer}
            own.update({name: fewer[number] for name, number in stated.items()})
        for name, buffer in module.named_buffers(recurse=False):
            if buffer.is_floating_point() and buffer.numel() in fewer and buffer.numel() == buffer.shape[-1]:
                module._buffers[name] = buffer[..., : fewer[buffer.numel()]]


def _drawn(name: str, shape: tuple[int, ...], own: Tensor, generator: torch.Generator) -> Tensor:
    """Random values, added to the first entries of `own` if that has finite ones. Integers stay as they are."""
    if not (own.is_floating_point() or own.is_complex() or own.is_meta):
        return torch.empty(shape, dtype=own.dtype).copy_(own.detach()[tuple(map(slice, shape))])
    value = torch.randn(shape, generator=generator, dtype=torch.float64)
    value.mul_(0.3 if len(shape) < 2 else float(max(shape[-1], 1)) ** -0.5)
    if not own.is_meta and not own.is_complex():
        first = torch.empty(shape, dtype=torch.float64).copy_(own.detach()[tuple(map(slice, shape))])
        if first.isfinite().all():
            return value.add_(first)
    return value.add_(1.0) if len(shape) < 2 and name.endswith("weight") else value


def _copied(buffer: Tensor) -> Tensor:
    if buffer.numel() > LARGE_NUMEL and not buffer.is_cuda:
        return copy.deepcopy(buffer.detach())
    dtype = torch.float64 if buffer.is_floating_point() else buffer.dtype
    return torch.empty(buffer.shape, dtype=dtype, device="cpu").copy_(buffer)
