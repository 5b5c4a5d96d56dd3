"""Splits a model into an ordered list of units, and runs any stretch of them.

Note: units and names.
A unit is the smallest thing at which a stage can begin or end: the embedding, the attention and the MLP half of each
block, the head with its norm.  A `Sections` says which modules each unit has, and runs a stretch of units on the output
of the unit before.  Integers that every rank has in its batch (ids, positions, document numbers) are never sent.
Modules of other stages are removed, and an `OtherStageModule` replaces each, so names do not change and a rank holds
no parameter of another stage.  Every parameter belongs to a unit, or the model is rejected.  A parameter that several
units use is tied: the stage of each of them holds it.

A new kind of model is one class and one line in `SECTIONS`.  A user's model may bring its own sections by a method
`pipeline_sections()` (docs/pipeline.md).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from colossal_lite.data.batch import Batch
from colossal_lite.kernels import Mask
from colossal_lite.models import GPT
from colossal_lite.models.gpt import Block
from colossal_lite.parallel.roles import known_plan
from colossal_lite.parallel.tensor_1d_layers import PositionEmbedding, VocabularyEmbedding
from colossal_lite.parallel.tensor_2d import Embedding2D
from colossal_lite.parallel.tensor_3d import Embedding3D
from colossal_lite.pipeline.partition import (
    FLOPS_PER_BYTE,
    PartitionFacts,
    Unit,
    lookup_costs,
    transformer_units,
)
from colossal_lite.transforms.activation_checkpoint import part_of

TOKENS = 1024
"""Of a micro-batch, where a model does not say how long its sequences are."""
TABLES = (nn.Embedding, nn.EmbeddingBag, VocabularyEmbedding, PositionEmbedding, Embedding2D, Embedding3D)
"""Modules whose weight is looked up."""

Carried = Tensor | tuple[Tensor, ...] | Mapping[str, Tensor]
"""What passes from one unit to the next: a tensor, or a flat tuple or dict of them."""


@dataclass(frozen=True)
class UnitModules:
    """One unit of a model: its name, and the modules (by name, their children included) that are its own."""

    name: str
    modules: tuple[str, ...]


class Sections(Protocol):
    """A model that can be run in stretches."""

    @property
    def parts(self) -> tuple[UnitModules, ...]:
        """All units, in order."""

    def run(self, start: int, stop: int, carried: Carried | None, batch: Batch) -> Any:
        """Units [start, stop) on what unit start - 1 gave (None before the first); the last one gives the outputs."""


class GPTSections:
    """Our GPT and Llama families: embedding, two halves a block, head. [B, T, D] passes between them."""

    def __init__(self, model: GPT) -> None:
        self._model = model
        for block in model.blocks:
            is_kinds = type(block).forward is Block.forward  # on the block itself recomputation sets its own
            _check_forward(
                block, Block, is_kinds, "a cut between its two halves", "methods mix and feed of its own"
            )
        positions = ("position",) if model.position is not None else ()
        halves = (
            part
            for i in range(len(model.blocks))
            for part in (
                UnitModules(
                    f"{i}.attention", tuple(f"blocks.{i}.{n}" for n in ("norm1", "attention", "dropout1"))
                ),
                UnitModules(f"{i}.mlp", tuple(f"blocks.{i}.{n}" for n in ("norm2", "mlp", "dropout2"))),
            )
        )
        self.parts = (
            UnitModules("embedding", ("token", *positions, "dropout")),
            *halves,
            UnitModules("head", ("norm", "head")),
        )

    def run(self, start: int, stop: int, carried: Carried | None, batch: Batch) -> Any:
        model, last = self._model, len(self.parts) - 1
        given = dict(zip(("input_ids", "position_ids", "attention_mask"), batch.args, strict=False))
        given |= batch.kwargs
        positions = model.positions(batch.inputs, given.get("position_ids"))
        mask = Mask(model.config.causal, given.get("attention_mask"))
        x: Any = model.embed(batch.inputs, positions) if start == 0 else carried
        at = max(start, 1)
        while at < min(stop, last):
            block: Any = model.blocks[(at - 1) // 2]
            if at % 2 and at + 1 < min(stop, last):
                x, at = block(x, positions, mask), at + 2
            elif at % 2:
                x, at = part_of(block, block.mix)(x, positions, mask), at + 1
            else:
                x, at = part_of(block, block.feed)(x), at + 1
        return model.finish(x) if stop == last + 1 else x


class SequentialSections:
    """`nn.Sequential`: a unit for each place in it; a module that stands in several of them is that many units."""

    def __init__(self, model: nn.Sequential) -> None:
        self._model = model
        self.parts = tuple(
            UnitModules(name, (name,)) for name in model._modules
        )  # named_children leaves repeats out

    def run(self, start: int, stop: int, carried: Carried | None, batch: Batch) -> Any:
        x: Any = batch.inputs if start == 0 else carried
        for member in list(self._model)[start:stop]:
            x = member(x)
        return x


@dataclass(frozen=True)
class LibraryNames:
    """Where a model of a library keeps its units: tables whose place the input takes, tables that then add nothing,
    what is passed over beside them, the list of blocks, and what follows them; whether MLPs have three matrices."""

    tables: tuple[str, ...]
    added: tuple[str, ...]
    beside: tuple[str, ...]
    blocks: str
    tail: tuple[str, ...]
    gated: bool = False


LIBRARY: dict[str, LibraryNames] = {
    "gpt2": LibraryNames(
        ("transformer.wte",), ("transformer.wpe",), ("transformer.drop",), "transformer.h",
        ("transformer.ln_f", "lm_head"),
    ),
    "llama": LibraryNames(("model.embed_tokens",), (), (), "model.layers", ("model.norm", "lm_head"), gated=True),
}  # fmt: skip


class LibrarySections:
    """Hugging Face's GPT-2 and Llama: embedding, blocks, head, run by the model's own forward.

    For a stretch of units all others are replaced while it runs: the unit before gives what came in, the unit behind
    takes what goes out, and apart from these zeros of whole sequences pass, which hold one element.  So masks,
    positions and whatever else the library computes are its own, on every stage, and of whole sequences also where
    what passes between blocks is cut.
    """

    def __init__(self, model: nn.Module, names: LibraryNames) -> None:
        self._model, self._names, self.gated = model, names, names.gated
        blocks = [f"{names.blocks}.{i}" for i, _ in enumerate(model.get_submodule(names.blocks))]  # type: ignore[arg-type]
        self.parts = (
            UnitModules("embedding", (*names.tables, *names.added, *names.beside)),
            *(UnitModules(name, (name,)) for name in blocks),
            UnitModules("head", names.tail),
        )

    def run(self, start: int, stop: int, carried: Carried | None, batch: Batch) -> Any:
        assert carried is None or isinstance(carried, Tensor)
        outside = [name for part in (*self.parts[:start], *self.parts[stop:]) for name in part.modules]
        by: dict[str, nn.Module] = {name: _Passes() for name in outside}
        if carried is not None:
            zeros = carried.new_zeros(()).expand(*batch.inputs.shape, carried.shape[-1])
            by |= {name: _Gives(zeros) for name in self._names.tables}
            by |= {name: _Gives(carried.new_zeros(())) for name in self._names.added}
            by[self.parts[start - 1].modules[0]] = _Gives(carried)  # a block, or the table
        takes = _Takes(batch.inputs.shape)
        if stop < len(self.parts):
            by[self.parts[stop].modules[0]] = takes
        with _replaced(self._model, by):
            outputs = self._model(*batch.args, **batch.kwargs)
        return outputs if stop == len(self.parts) else takes.taken


class _Passes(nn.Module):
    """Gives what it is given."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return args[0] if args else kwargs["hidden_states"]


class _Gives(nn.Module):
    """Gives a tensor, whatever it is given."""

    def __init__(self, tensor: Tensor) -> None:
        super().__init__()
        self.tensor = tensor

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        return self.tensor


class _Takes(_Passes):
    """Saves its input, and returns zeros of full sequences [B, T] instead."""

    def __init__(self, shape: torch.Size) -> None:
        super().__init__()
        self.shape = shape
        self.taken: Tensor | None = None

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        x: Tensor = super().forward(*args, **kwargs)
        self.taken = x
        return x.new_zeros(()).expand(*self.shape, x.shape[-1])


@contextmanager
def _replaced(model: nn.Module, by: Mapping[str, nn.Module]) -> Iterator[None]:
    """Other modules in the place of those that are named, for a while."""
    places = [
        (model.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[2], new)
        for name, new in by.items()
    ]
    own = [(parent, child, parent._modules[child]) for parent, child, _ in places]
    try:
        for parent, child, new in places:
            parent._modules[child] = new
        yield
    finally:
        for parent, child, old in own:
            parent._modules[child] = old


class WholeSections:
    """Any model as one unit: what runs without a pipeline."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self.parts = (UnitModules("model", ("",)),)

    def run(self, start: int, stop: int, carried: Carried | None, batch: Batch) -> Any:
        return self._model(*batch.args, **batch.kwargs)


SECTIONS: tuple[tuple[type[nn.Module], Callable[[Any], Sections]], ...] = (
    (GPT, GPTSections),
    (nn.Sequential, SequentialSections),
)


def sections_of(model: nn.Module) -> Sections:
    """The units of a model. Raises ValueError naming the models that have some."""
    if callable(own := getattr(model, "pipeline_sections", None)):
        made: Sections = own()
        _check_parts(model, made.parts)
        return made
    for kind, make in SECTIONS:
        if isinstance(model, kind):
            is_kinds = type(model).forward is kind.forward and "forward" not in vars(model)
            _check_forward(
                model,
                kind,
                is_kinds,
                f"the units of a {kind.__name__}",
                "a method pipeline_sections() of its own",
            )
            return make(model)
    modules = [name for name, _ in model.named_modules() if name]
    owners = [name for name, m in model.named_modules() if any(True for _ in m.parameters(recurse=False))]
    known = known_plan(modules, owners)
    if known is not None and known[0] in LIBRARY:
        return LibrarySections(model, LIBRARY[known[0]])
    raise ValueError(
        f"parallel.pipeline: {type(model).__name__} does not say what its units are; legal: "
        f"{', '.join(kind.__name__ for kind, _ in SECTIONS)}, a model named as Hugging Face's {' or '.join(LIBRARY)}, "
        f"or one with a method pipeline_sections()"
    )


def _check_parts(model: nn.Module, parts: Sequence[UnitModules]) -> None:
    """Raises ValueError for units that name no module, or one twice."""
    known, listed = {name for name, _ in model.named_modules(remove_duplicate=False)} - {""}, set[str]()
    for name, unit in [(name, part.name) for part in parts for name in part.modules]:
        twice = next((n for n in listed if f"{n}.".startswith(f"{name}.") or name.startswith(f"{n}.")), None)
        if name not in known or twice is not None:
            fault = f"{twice} is in a unit" if twice else f"{type(model).__name__} has no module {name!r}"
            raise ValueError(
                f"parallel.pipeline: unit {unit!r} of pipeline_sections() lists {name!r}, and {fault}; legal: "
                f"each of the names of named_modules() once, children with their parents"
            )
        listed.add(name)


def _check_forward(module: nn.Module, kind: type[nn.Module], is_kinds: bool, cut: str, legal: str) -> None:
    """Raises ValueError for a module of a kind whose forward, which stages do not run, is not the kind's."""
    if not is_kinds:
        raise ValueError(
            f"parallel.pipeline: {type(module).__name__} has a forward of its own, which {cut} would pass over; "
            f"legal: the forward of {kind.__name__}, or {legal}"
        )


def costs_of(sections: Sections, model: nn.Module, facts: PartitionFacts | None) -> tuple[Unit, ...]:
    """What each unit costs, for the partition: by formula for transformers that are known, else by its layers."""
    if isinstance(sections, GPTSections) and facts is not None:
        gated = getattr(model.config, "activation", "") == "swiglu"
        return transformer_units(facts, facts.sequence, gated=gated)
    if isinstance(sections, LibrarySections) and facts is not None:
        first, *halves, last = transformer_units(facts, facts.sequence, gated=sections.gated)
        blocks = [_joined(*pair) for pair in zip(halves[::2], halves[1::2], strict=True)]
        return (first, *blocks, last)
    tokens = facts.sequence if facts is not None else TOKENS
    return tuple(_by_layers(model, part, tokens) for part in sections.parts)


def _by_layers(model: nn.Module, part: UnitModules, tokens: int) -> Unit:
    """A unit of any layers, each of which sees every token: a matrix (a kernel, too) costs its FLOPs, a table its
    lookups, and a vector what is moved of its features."""
    f, i, w, numel = 1.0, 1.0, 1.0, 0  # what has no parameters costs little, not nothing
    for owner in {id(m): m for name in part.modules for m in model.get_submodule(name).modules()}.values():
        for parameter in owner.parameters(recurse=False):
            n = float(parameter.numel())
            if isinstance(owner, TABLES):
                own = lookup_costs(tokens, n, parameter.shape[-1])
            else:
                own = (2 * tokens * n if parameter.dim() > 1 else tokens * n * 4 * FLOPS_PER_BYTE,) * 3
            f, i, w = f + own[0], i + own[1], w + own[2] * parameter.requires_grad
            numel += parameter.numel()
    return Unit(part.name, f, i, w, 16.0 * numel)


def _joined(a: Unit, b: Unit) -> Unit:
    return Unit(
        a.name.partition(".")[0], a.forward + b.forward, a.input + b.input, a.weight + b.weight,
        a.states_bytes + b.states_bytes, a.saved_bytes + b.saved_bytes,
    )  # fmt: skip
