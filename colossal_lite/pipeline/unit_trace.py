"""Finds the units of any model of blocks. It watches a forward in each mode, and says what passes between blocks.

Note: the trace.
Blocks are those of `blocks_of`, called one after another.  Each operation of the forward is seen.  What comes from a
parameter is marked with the unit that made it.  Where a block begins or ends, one tensor goes on: the stream.  Whatever
else was made of parameters before is *left behind*, and an operation that reads it later is refused: a second tensor
would have to pass.  What comes from the batch and from buffers alone (masks, positions, rotary tables) carries no mark:
every stage makes it again.  Training and evaluation must pass the same stream.  A model whose copy would be large is
run on meta, without values: the verdict does not depend on them.  Where its code asks for a value, tensors made of ids
and sizes alone have values (`ValuesOfIds`).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

from colossal_lite.data.batch import Batch
from colossal_lite.layers.layer_swap import ancestors
from colossal_lite.layers.swap_checks import has_hooks
from colossal_lite.numerics.generators import generators_kept
from colossal_lite.numerics.proof_modes import Plainly
from colossal_lite.numerics.torch_modes import READ_NO_VALUES, DispatchMode, storage_of, tensors_in
from colossal_lite.parallel.copy_batches import is_more_than_words, samples_of
from colossal_lite.parallel.model_loss import ModelLoss
from colossal_lite.parallel.small_copy import (
    LIMIT_BYTES,
    NoCopyError,
    few_ids,
    few_tokens,
    on_meta_copy,
    own_lengths,
    small_copy,
    table_roles,
)
from colossal_lite.transforms.activation_checkpoint import blocks_of
from colossal_lite.transforms.module_modes import modes_kept

Argument = int | str
"""An argument or a member of a result: its number, or its name."""


class UnitsError(ValueError):
    """A model that cannot be cut between its blocks; the text says where, why, and what to write instead."""


@dataclass(frozen=True)
class UnitModules:
    """One unit of a model: its name, and the modules (by name, their children included) that are its own."""

    name: str
    modules: tuple[str, ...]
    parameters: tuple[str, ...] = ()
    """Parameters of its own beside them, of modules that are in no unit as a whole."""


@dataclass(frozen=True)
class Passage:
    """How the stream passes a block. `gives`: the member of the result that goes on, None if the result is that tensor.
    `members`: of a result with several, the argument that each hands through, None for one that no block reads."""

    block: str
    takes: tuple[Argument, ...]
    gives: Argument | None
    members: Mapping[Argument, Argument | None]


@dataclass(frozen=True)
class UnitTrace:
    """What a forward has shown. Unit 0 ends where the first block begins; the last begins where the last one ends."""

    parts: tuple[UnitModules, ...]
    passages: tuple[Passage, ...]
    written: frozenset[int]
    """Units that change in place what comes in."""
    changing: frozenset[str] = frozenset()
    """Plain attributes of modules that a forward sets: a rank without the module does not know them."""


PLAIN = (int, float, str, bool, type(None), torch.dtype)


def is_plain(value: Any) -> bool:
    """Whether it is a number, a word, or a tuple of them."""
    return all(map(is_plain, value)) if type(value) is tuple else isinstance(value, PLAIN)


def settings_of(module: nn.Module) -> dict[str, Any]:
    """The plain settings of a module, which code around it may read."""
    own = vars(module).items()
    return {k: v for k, v in own if is_plain(v) and not k.startswith("_") and k != "training"}


class ValuesOfIds(TorchFunctionMode):
    """Beside parameters on meta, keeps what no parameter made on the CPU: code may decide by positions and masks."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = args, kwargs or {}
        tensors = tensors_in(given)
        if not any(t.is_meta for t in tensors):
            args, kwargs = tree_map(_off_meta, given)
            return func(*args, **kwargs)
        bare = {id(t): t.to("meta") for t in tensors if not t.is_meta}
        before = {key: t._version for key, t in bare.items()}
        args, kwargs = tree_map(lambda value: bare.get(id(value), value), given)
        out = func(*args, **kwargs)
        if any(t._version != before[key] for key, t in bare.items()):
            raise RuntimeError(f"{func.__name__} writes what parameters made to a tensor of their device")
        return out


def _off_meta(value: Any) -> Any:
    return "cpu" if isinstance(value, str | torch.device) and str(value) == "meta" else value


@dataclass(frozen=True)
class TracedCopy:
    """The copy of a model that a trace has run, and the context that its code needs."""

    model: nn.Module
    around: Callable[[], AbstractContextManager[Any]] = nullcontext
    tokens: int | None = None
    """Of a sequence, where the model takes no other length."""
    example: Batch | None = None
    """What it is run on; None: a few ids."""
    loss: ModelLoss | None = None
    """The loss that the model itself computes, where it trains on that: it is asked for it here too."""
    why_bare: str = ""
    """Why it has no values, for messages; "" if it has."""

    @property
    def has_values(self) -> bool:
        return not any(p.is_meta for p in self.model.parameters())

    @property
    def told(self) -> str:
        """What it is run on, in words."""
        if self.example is None:
            return f"ids [2, {self.tokens or few_tokens(self.model)}] alone"
        return f"the example {', '.join(f'{n} {[*x.shape]}' for n, x in self.example.tensors.items() if n != 'labels')}"

    @contextmanager
    def running(self) -> Iterator[Batch]:
        """Context: a batch for a forward, and the settings under which every trace of the model runs it."""
        with self.around():
            device = next(self.model.parameters()).device
            if self.example is None:
                ids = few_ids(self.model, tokens=self.tokens)
                batch = Batch((ids,), {}, labels=ids, samples=ids[:, 0])
            else:
                batch = samples_of(self.example.with_one_row(), 2, device)
            batch = batch if self.loss is None else self.loss.asked(batch)
            with generators_kept(), device, Plainly():
                yield batch


def trace_units(
    model: nn.Module, example: Batch | None = None, loss: ModelLoss | None = None
) -> tuple[UnitTrace, TracedCopy]:
    """The units of a model of blocks, in the order of their calls in one forward, and the copy that was run: with
    values if it is small. It runs on a few ids, or on an `example` where that has no ids or they do not do. With labels
    too, where the model trains on its own `loss`.

    Only shapes and buffers of the model are read, and nothing of it is changed. Raises UnitsError for a model without
    blocks, and for one that passes more than one tensor from block to block.
    """
    blocks = tuple(blocks_of(model))
    if len(blocks) < 2:
        raise UnitsError(
            f"parallel.pipeline: {type(model).__name__} does not say what its units are; legal: blocks of one class, "
            f"with modules in them, in an nn.ModuleList, nn.ModuleDict or nn.Sequential, or a method "
            f"pipeline_sections() (docs/pipeline.md)"
        )
    _check_kinds(model, blocks)
    failed: tuple[TracedCopy, Exception] | None = None
    for each in (replace(copy, loss=loss) for copy in _copies(model, example)):
        try:
            return _watched(each, blocks), each
        except UnitsError:
            raise
        except Exception as error:  # of the model's own code
            failed = failed if failed and each.tokens else (each, error)
    assert failed is not None
    each, fault = failed
    told = f"{type(fault).__name__}: {(str(fault).splitlines() or [''])[0][:200]}"
    shown = "" if example else "cl.initialize(..., example=(inputs, labels)), if no ids are its inputs; "
    raise UnitsError(
        f"parallel.pipeline: a copy of {type(model).__name__}{each.why_bare} does not run on {each.told}: {told}. "
        f"Legal: {shown}a default for every further argument of its forward, as targets=None"
        f"{'; no value of a tensor read in it' if each.why_bare else ''}; a method pipeline_sections() "
        f"(docs/pipeline.md); or pipeline=1"
    ) from fault


def _copies(model: nn.Module, example: Batch | None) -> Iterator[TracedCopy]:
    """Copies to run, one after another until one runs: of few rows, of all rows, at most without values."""
    shown = [] if example is None else [example]
    takes_ids = example is None or not (example.inputs.is_floating_point() or is_more_than_words(example))
    for roles in (table_roles(model), {}):
        try:
            copy = TracedCopy(small_copy(model, roles, None, LIMIT_BYTES, keeps_all=True).model)
        except NoCopyError as error:
            bare = TracedCopy(bare_copy(model), why_bare=f" without values ({error})")
            copies = [bare, replace(bare, around=ValuesOfIds)]
        else:
            copies = [copy]
        lengths = (None, *own_lengths(model)) if takes_ids else ()
        yield from (replace(each, tokens=tokens) for tokens in lengths for each in copies)
        yield from (replace(each, example=batch) for batch in shown for each in copies)
        if not copies[0].has_values:
            return


def bare_copy(model: nn.Module) -> nn.Module:
    """A copy without values. Raises UnitsError for a model that cannot be copied."""
    try:
        return on_meta_copy(model)
    except NoCopyError as error:
        raise UnitsError(f"parallel.pipeline: {type(model).__name__} cannot be copied: {error}") from error


def _watched(copy: TracedCopy, blocks: Sequence[str]) -> UnitTrace:
    """What a forward shows of its units, in evaluation and in training. Raises UnitsError, or what the model's own code
    raises."""
    model = copy.model
    watches = []
    settings = {name: settings_of(module) for name, module in model.named_modules()}
    with modes_kept(model):
        for trains in (False, True):
            watch = _Watch(model.train(trains), tuple(blocks))
            with copy.running() as batch, watch.hooks(), torch.no_grad(), watch:
                model(*batch.args, **batch.kwargs)
            watches.append(watch)
    evaluated, trained = watches
    evaluated.join(trained)
    changing = {
        f"{name}.{key}"
        for name, module in model.named_modules()
        for key, value in settings[name].items()
        if not is_plain(now := vars(module).get(key)) or now != value
    }
    return replace(evaluated.result(), changing=frozenset(changing))


def _check_kinds(model: nn.Module, blocks: Sequence[str]) -> None:
    """Raises UnitsError for what a stage cannot run in part: scripted code, and hooks around the blocks."""
    for name, module in model.named_modules():
        kind = type(module).__name__
        if isinstance(module, torch.jit.ScriptModule):
            raise UnitsError(
                f"parallel.pipeline: {name or 'the model itself'} is a {kind}, whose code no stage can run in part; "
                f"legal: the module as it was before"
            )
        around = not name or any(block.startswith(f"{name}.") for block in blocks)
        if around and module._compiled_call_impl is not None:
            raise UnitsError(
                f"parallel.pipeline: {name or 'the model itself'} ({kind}) is compiled, and holds the blocks. No stage "
                f"can run a part of that code; legal: the blocks compiled, each by itself"
            )
        if name and around and has_hooks(module):
            raise UnitsError(
                f"parallel.pipeline: a forward or backward hook on {name} ({kind}), which holds the blocks, would run "
                f"on a part of its work; legal: hooks on the blocks, or within them"
            )


@dataclass(eq=False)
class _Watch(DispatchMode):
    """One forward, seen operation by operation."""

    model: nn.Module
    blocks: tuple[str, ...]
    unit: int = 0
    """The unit whose code runs."""
    made: dict[int, int] = field(default_factory=dict)
    """Of each storage made of parameters: the unit that made it."""
    alive: list[Tensor] = field(default_factory=list)  # a freed storage would hand its address to another
    readers: dict[str, set[int]] = field(default_factory=dict)
    """Units that read each parameter."""
    callers: dict[str, set[int]] = field(default_factory=dict)
    """Units in which each outermost module outside the blocks is called and gives what parameters made."""
    passages: list[Passage] = field(default_factory=list)
    written: set[int] = field(default_factory=set)
    boundary: int = 0
    """Storage of what came into this unit."""
    depth: int = 0
    outside: str = ""
    """The outermost module outside the blocks that is being called."""
    inside: int | None = None
    """The block that is being called."""

    def __post_init__(self) -> None:
        super().__init__()
        self.names: dict[int, list[str]] = {}
        for name, parameter in self.model.named_parameters(remove_duplicate=False):
            self.names.setdefault(parameter.untyped_storage()._cdata, []).append(name)

    # ---- operations ----

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func in READ_NO_VALUES:
            return out
        is_made = False
        for tensor in tensors_in((args, kwargs)):
            key = storage_of(tensor)
            if key in self.names:
                self._read(self.names[key])
                is_made = True
            elif key in self.made:
                is_made = True
                if self.made[key] != self.unit:
                    self._refuse_left_behind(self.made[key])
        if func._schema.is_mutable and args and isinstance(args[0], Tensor) and self.unit:
            if storage_of(args[0]) == self.boundary:
                self.written.add(self.unit)
        if is_made:
            for tensor in tensors_in(out):
                self._mark(tensor)
        return out

    def _mark(self, tensor: Tensor) -> None:
        self.made[storage_of(tensor)] = self.unit
        self.alive.append(tensor)

    def _read(self, names: Sequence[str]) -> None:
        """A parameter, by all its names, is read now."""
        here = -1 if self.inside is None else self.inside
        own = [n for n in names if self._block_of(n) == here >= 0]
        own = own or [n for n in names if self.outside and n.startswith(f"{self.outside}.")]
        own = own or [n for n in names if self._block_of(n) < 0]
        if not own:
            raise UnitsError(
                f"{self._where()}: {names[0]} is read outside its block; legal: blocks called as modules, block(x); "
                f"weights that only their own block reads, or that are the same Parameter in both (tied)"
            )
        for name in own:
            self.readers.setdefault(name, set()).add(self.unit)

    def _block_of(self, name: str) -> int:
        return next((i for i, block in enumerate(self.blocks) if name.startswith(f"{block}.")), -1)

    def _refuse_left_behind(self, unit: int) -> None:
        made = "before the first block" if unit == 0 else f"by {self.blocks[unit - 1]} or code before it"
        raise UnitsError(
            f"{self._where()}: this reads a tensor made {made}, beside the one that the last block gave. One tensor "
            f"may pass between blocks. Legal: code within a block reads what the block is handed; a method "
            f"pipeline_sections() that passes both (docs/pipeline.md); or pipeline=1"
        )

    def _where(self) -> str:
        """The model, the block, and the line of its source that runs."""
        frame, place = sys._getframe(1), ""
        own = (Path(torch.__file__).parent.as_posix(), Path(__file__).parents[1].as_posix())
        while frame is not None:
            name, code = frame.f_code.co_filename, frame.f_code
            first = frame.f_locals.get(code.co_varnames[0]) if code.co_argcount else None
            if not name.startswith(own) and isinstance(first, nn.Module):
                owner = type(first).__name__
                place = f" at {name}:{frame.f_lineno} ({owner}.{frame.f_code.co_name})"
                break
            frame = frame.f_back  # type: ignore[assignment]
        block = f", in {self.blocks[self.inside]}" if self.inside is not None else ""
        return f"parallel.pipeline: {type(self.model).__name__}{block}{place}"

    # ---- modules ----

    @contextmanager
    def hooks(self) -> Iterator[None]:
        """Watch the calls of modules, too."""
        around = {".".join(b.split(".")[:n]) for b in self.blocks for n in range(b.count(".") + 1)}
        with ExitStack() as hooks:
            for name, module in self.model.named_modules():
                if name in self.blocks:
                    index = self.blocks.index(name)
                    begin, end = partial(self._begin, index), partial(self._end, index)
                    hooks.enter_context(
                        module.register_forward_pre_hook(begin, with_kwargs=True, prepend=True)
                    )
                    hooks.enter_context(module.register_forward_hook(end, with_kwargs=True))
                elif name not in around and self._block_of(name) < 0:
                    hooks.enter_context(module.register_forward_pre_hook(partial(self._enter, name)))
                    hooks.enter_context(module.register_forward_hook(partial(self._leave, name)))
            yield

    def _enter(self, name: str, *_: Any) -> None:
        if self.depth == 0:
            self.outside = name
        self.depth += 1

    def _leave(self, name: str, module: nn.Module, args: Any, out: Any) -> None:
        self.depth -= 1
        if self.depth:
            return
        self.outside = ""
        if self.inside is None and any(storage_of(t) in self.made for t in tensors_in(out)):
            self.callers.setdefault(name, set()).add(self.unit)

    def _begin(self, index: int, module: nn.Module, args: Any, kwargs: Any) -> None:
        if index != len(self.passages):
            due = self.blocks[len(self.passages)] if len(self.passages) < len(self.blocks) else "no block"
            raise UnitsError(
                f"{self._where()}: {self.blocks[index]} is called where {due} is due; legal: each block once, in the "
                f"order of its list; a method pipeline_sections() (docs/pipeline.md); or pipeline=1"
            )
        given = [*enumerate(args), *kwargs.items()]
        came = [(p, t) for p, t in given if isinstance(t, Tensor) and self._is_fresh(t)]
        hidden = [
            p for p, v in given if not isinstance(v, Tensor) and any(map(self._is_fresh, tensors_in(v)))
        ]
        kinds = {id(t) for _, t in came}
        if hidden or not came or (index == 0 and len(kinds) > 1):
            what = f"{len(kinds)} tensors of parameters" if came else "none as an argument of its own"
            if hidden:
                what = f"one within argument {hidden[0]!r}"
            raise UnitsError(
                f"{self._where()}: {self.blocks[index]} ({type(module).__name__}) is handed {what}; legal: one tensor "
                f"that parameters made, beside masks, positions and tables that the batch and buffers make; a method "
                f"pipeline_sections() (docs/pipeline.md); or pipeline=1"
            )
        for value in tensors_in((args, kwargs)):
            key = storage_of(value)
            if key in self.made and self.made[key] != self.unit:
                self._refuse_left_behind(self.made[key])
        stream = came[0][1]
        if index == 0:
            self._pass_on(stream)
        self.inside = index
        takes = tuple(p for p, t in came if t is stream)
        self.passages.append(Passage(self.blocks[index], takes, None, {}))

    def _is_fresh(self, tensor: Tensor) -> bool:
        return self.made.get(storage_of(tensor)) == self.unit

    def _pass_on(self, stream: Tensor) -> None:
        self.unit += 1
        self._mark(stream)
        self.boundary = storage_of(stream)

    def _end(self, index: int, module: nn.Module, args: Any, kwargs: Any, out: Any) -> None:
        taken = self.passages[-1].takes
        given: dict[Argument, Any] = {**dict(enumerate(args)), **kwargs}
        self.inside = None
        if isinstance(out, Tensor):
            return self._pass_on(out)
        members: dict[Argument, Any] = {}
        if isinstance(out, Mapping):
            members = dict(out)
        elif isinstance(out, tuple | list):
            members = dict(enumerate(out))
        fresh = [p for p, t in members.items() if isinstance(t, Tensor) and self._is_fresh(t)]
        alike = [p for p in fresh if members[p].shape == given[taken[0]].shape]
        if not fresh:
            raise UnitsError(
                f"{self._where()}: {self.blocks[index]} ({type(module).__name__}) gives a {type(out).__name__} without "
                f"a tensor of its own; legal: a tensor, or a tuple or dict with one"
            )
        gives = (alike or fresh)[0]
        by = {id(value): place for place, value in given.items() if value is not None}
        self.passages[-1] = Passage(
            self.blocks[index], taken, gives, {p: by.get(id(v)) for p, v in members.items() if p != gives}
        )
        self._pass_on(members[gives])

    # ---- the result ----

    def join(self, other: _Watch) -> None:
        """Add what a forward in another mode has shown. Raises UnitsError for another stream between blocks."""
        for one, its in zip(self.passages, other.passages, strict=False):
            if one != its:
                raise UnitsError(
                    f"parallel.pipeline: {type(self.model).__name__}, {one.block}: training and eval() call it "
                    f"otherwise, or it gives something else; legal: the same stream between blocks"
                )
        for mine, theirs in ((self.readers, other.readers), (self.callers, other.callers)):
            for name, units in theirs.items():
                mine.setdefault(name, set()).update(units)
        self.written |= other.written
        if len(other.passages) < len(self.passages):
            self.passages = other.passages  # which `result` refuses

    def result(self) -> UnitTrace:
        if len(self.passages) < len(self.blocks):
            raise UnitsError(
                f"parallel.pipeline: {type(self.model).__name__} calls {len(self.passages)} of its {len(self.blocks)} "
                f"blocks as modules, {self.blocks[len(self.passages)]} not; legal: every block called, block(x) and "
                f"not block.forward(x)"
            )
        last = len(self.blocks) + 1
        modules: list[dict[str, None]] = [{} for _ in range(last + 1)]
        parameters: list[dict[str, None]] = [{} for _ in range(last + 1)]
        for index, block in enumerate(self.blocks):
            modules[index + 1][block] = None
        callers, around = self._callers()
        for name, units in callers.items():
            for unit in units:
                modules[unit][name] = None
        for name, _ in self.model.named_parameters(remove_duplicate=False):
            if self._block_of(name) < 0 and name.rpartition(".")[0] in around:
                for unit in self.readers.get(name, {0}):
                    parameters[unit][name] = None
        names = ("embedding", *self.blocks, "head")
        return UnitTrace(
            tuple(UnitModules(n, tuple(m), tuple(p)) for n, m, p in zip(names, modules, parameters, strict=True)),
            tuple(self.passages), frozenset(self.written),
        )  # fmt: skip

    def _callers(self) -> tuple[dict[str, set[int]], set[str]]:
        """The units of each outermost module with parameters outside the blocks, or that is called there; and the
        modules around the blocks."""
        around = {".".join(b.split(".")[:n]) for b in self.blocks for n in range(b.count(".") + 1)}
        callers = {name: set(units) for name, units in self.callers.items()}
        for name, _ in self.model.named_parameters(remove_duplicate=False):
            owner = name.rpartition(".")[0]
            if self._block_of(name) >= 0 or owner in around:
                continue
            outer = next((a for a in ancestors(owner) if a in callers), None)
            if outer is None:
                outer = next((a for a in reversed(ancestors(owner)) if a not in around), owner)
                callers.setdefault(outer, set())
            callers[outer] |= self.readers.get(name, set())
        return {name: units or {0} for name, units in callers.items()}, around
