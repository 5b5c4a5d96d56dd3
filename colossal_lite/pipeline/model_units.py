"""Splits a model into an ordered list of units, and runs any stretch of them.

Note: units and names.
A unit is the smallest thing at which a stage can begin or end: the embedding, the attention and the MLP half of each
block, the head with its norm.  A `Sections` lists the modules of each unit.  It runs a stretch of units on the output
of the unit before.  Integers that every rank has in its batch (ids, positions, document numbers) are never sent.  An
`OtherStageModule` replaces each module of other stages.  So names do not change, and a rank holds no parameter of
another stage.  Every parameter belongs to a unit, or the model is rejected.  A parameter that several units use is
tied: the stage of each of them holds it.

A model of blocks has them by a trace of its forward (unit_trace.py, traced_sections.py).  A model that is cut elsewhere
brings its own sections by a method `pipeline_sections()` (docs/pipeline.md).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from torch import Tensor, nn

from colossal_lite.config.parallel_schema import ModelFacts
from colossal_lite.data.batch import Batch
from colossal_lite.kernels import Mask
from colossal_lite.layers.tensor_1d_layers import PositionEmbedding, VocabularyEmbedding
from colossal_lite.layers.tensor_2d import Embedding2D
from colossal_lite.layers.tensor_3d import Embedding3D
from colossal_lite.models import GPT
from colossal_lite.models.gpt import Block
from colossal_lite.parallel.model_loss import ModelLoss
from colossal_lite.pipeline.partition import (
    FLOPS_PER_BYTE,
    Unit,
    lookup_costs,
    transformer_units,
)
from colossal_lite.pipeline.traced_sections import TracedSections, traced
from colossal_lite.pipeline.unit_trace import UnitModules as UnitModules
from colossal_lite.transforms.activation_checkpoint import part_of

TOKENS = 1024
"""Of a micro-batch, where a model does not say how long its sequences are."""
TABLES = (nn.Embedding, nn.EmbeddingBag, VocabularyEmbedding, PositionEmbedding, Embedding2D, Embedding3D)
"""Modules whose weight is looked up."""

Carried = Tensor | tuple[Tensor, ...] | list[Tensor] | Mapping[str, Tensor]
"""What passes from one unit to the next: a tensor, or a flat tuple, list or dict of them."""


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
    """The units of a model, which must be whole. Raises ValueError saying what keeps it from being cut."""
    return traced_units(model) or _stated_units(model)


def traced_units(
    model: nn.Module, example: Batch | None = None, loss: ModelLoss | None = None
) -> TracedSections | None:
    """The units of a model that has them by a trace, which must be whole; None for one that has others. `example` and
    `loss`: as `trace_units` takes them."""
    return None if has_stated_units(model) else traced(model, example, loss)


def has_stated_units(model: nn.Module) -> bool:
    """Whether a model's units are stated, by its kind or by itself, and its forward is not what stages run."""
    own = callable(getattr(model, "pipeline_sections", None))
    return own or isinstance(model, tuple(kind for kind, _ in SECTIONS))


def _stated_units(model: nn.Module) -> Sections:
    if callable(own := getattr(model, "pipeline_sections", None)):
        made: Sections = own()
        _check_parts(model, made.parts)
        return made
    kind, make = next((kind, make) for kind, make in SECTIONS if isinstance(model, kind))
    is_kinds = type(model).forward is kind.forward and "forward" not in vars(model)
    cut, legal = f"the units of a {kind.__name__}", "a method pipeline_sections() of its own"
    _check_forward(model, kind, is_kinds, cut, legal)
    return make(model)


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


def costs_of(sections: Sections, model: nn.Module, facts: ModelFacts | None) -> tuple[Unit, ...]:
    """What each unit costs, for the partition: by formula for transformers that are known, else by its layers."""
    if isinstance(sections, GPTSections) and facts is not None:
        gated = getattr(model.config, "activation", "") == "swiglu"
        return transformer_units(facts, facts.sequence, gated=gated)
    if isinstance(sections, TracedSections) and facts is not None and len(sections.parts) == facts.layers + 2:
        gated = _matrices(model, sections.parts[1], facts) == 3
        first, *halves, last = transformer_units(facts, facts.sequence, gated=gated)
        blocks = [_joined(*pair) for pair in zip(halves[::2], halves[1::2], strict=True)]
        return (first, *blocks, last)
    tokens = facts.sequence if facts is not None else TOKENS
    return tuple(_by_layers(model, part, tokens) for part in sections.parts)


def _matrices(model: nn.Module, block: UnitModules, facts: ModelFacts) -> int:
    """Matrices of an MLP, by the elements that a block has beside its attention."""
    shapes = [p.shape for p in model.get_submodule(block.name).parameters()]
    numel = sum(shape.numel() for shape in shapes if len(shape) > 1)
    attention = 2 * facts.width**2 * (1 + facts.kv_heads / facts.heads)
    return round((numel - attention) / (facts.width * facts.ffn))


def _by_layers(model: nn.Module, part: UnitModules, tokens: int) -> Unit:
    """A unit of any layers that see every token: a matrix (a kernel, too) costs its FLOPs, a table its lookups, and a
    vector the bytes moved."""
    f, i, w = 1.0, 1.0, 1.0  # what has no parameters costs little, not nothing
    owners = {id(m): m for name in part.modules for m in model.get_submodule(name).modules()}.values()
    held = [(owner, p) for owner in owners for p in owner.parameters(recurse=False)]
    for owner, parameter in [*held, *((model, model.get_parameter(name)) for name in part.parameters)]:
        n = float(parameter.numel())
        if isinstance(owner, TABLES):
            own = lookup_costs(tokens, n, parameter.shape[-1])
        else:
            own = (2 * tokens * n if parameter.dim() > 1 else tokens * n * 4 * FLOPS_PER_BYTE,) * 3
        f, i, w = f + own[0], i + own[1], w + own[2] * parameter.requires_grad
    return Unit(part.name, f, i, w)


def _joined(a: Unit, b: Unit) -> Unit:
    return Unit(a.name.partition(".")[0], a.forward + b.forward, a.input + b.input, a.weight + b.weight)
