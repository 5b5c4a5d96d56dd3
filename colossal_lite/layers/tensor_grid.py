"""Shares among the grid modes (2D, 2.5D, 3D) the strategy, the formulas' sizes and the swap of layers.

Note: one product.
The products AB, AB^T and A^TB of 2104.05343 and 2105.14450 are one here, closed under differentiation.  A rank holds a
part of each of x, w and y in y = x w^T.  A `ProductSpec` says along which axis each is gathered or reduce-scattered:

    forward     gather x, gather w; multiply; reduce-scatter y
    backward    gather y's gradient, w and x again; multiply twice; reduce-scatter the gradients of x and of w

An operand without an axis is not moved.  So a gradient is complete on the rank that holds the part.  Payload is 3 times
x and w and 2 times y, and no gathered copy is saved.  Gathers run side by side, and the sum of one gradient beside the
product for the other.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor, nn

from colossal_lite.config.parallel_schema import ModelFacts
from colossal_lite.data.batch import Batch
from colossal_lite.distributed.communicator import Communicator
from colossal_lite.distributed.ledger import LedgerRow
from colossal_lite.kernels import Ops, Rows
from colossal_lite.layers.grid_layers import GridLinear, GridNorm, ProductSpec
from colossal_lite.layers.grid_norms import NormKind, key_of, norm_kind, on_whole_features
from colossal_lite.layers.layer_swap import (
    Heads,
    Swap,
    around,
    oriented,
    output_rows,
    padded,
    plain,
)
from colossal_lite.layers.roles import Role
from colossal_lite.layers.swap_checks import is_transposed
from colossal_lite.layers.tensor_1d import shared_head
from colossal_lite.layers.tensor_1d_layers import vocabulary_cross_entropy, whole_vocabulary
from colossal_lite.layers.tensor_modes import LayerSizes, ModeResult, TensorStrategy
from colossal_lite.sharding.shard_spec import Dim, Partial, Placements, Shard
from colossal_lite.transforms.auxiliary_loss import Share


class Grid:
    """A strategy on a mesh of several tensor axes; `vocabulary_axis` cuts the logits."""

    vocabulary: int

    @property
    @abstractmethod
    def vocabulary_axis(self) -> Communicator:
        """The axis along which the ranks of one part of the batch hold the vocabulary."""

    @property
    def owns_loss(self) -> bool:
        """Ranks of one part of the batch compute the same loss."""
        return self.vocabulary_axis.coord == 0

    @property
    def cut_behind(self) -> tuple[int, int] | None:
        return self.vocabulary_axis.coord, self.vocabulary_axis.size

    def cross_entropy(self, ops: Ops, logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """(sum over this part's valid tokens, their number) from logits [B, T, V], B and V this rank's parts."""
        return vocabulary_cross_entropy(logits, labels, self.vocabulary_axis, ops, self.vocabulary)

    def whole_vocabulary(self, logits: Tensor) -> Tensor:
        """Logits of this part of the batch, padding stripped, alike on all ranks that hold some of them."""
        return whole_vocabulary(logits, self.vocabulary_axis, self.vocabulary)


def parts_of(batch: Batch, parts: int, words: str) -> tuple[Batch, ...]:
    """A micro-batch in equal parts. Raises ValueError, naming what the parts are, if it does not divide."""
    if batch.size % parts:
        low = batch.size // parts * parts
        near = f"{low} or {low + parts}" if low else f"{parts}"
        raise ValueError(
            f"batch: a micro-batch of {batch.size} samples does not divide over {parts} parts ({words}); legal: a "
            f"multiple of {parts}, such as {near}"
        )
    return batch.cut(parts)


def features_of(rows: Callable[[], Rows], comm: Communicator, width: int) -> Callable[[], Rows]:
    """Counters of a dropout that sees this rank's features of `width`."""

    def local() -> Rows:
        part = width // comm.size
        return replace(rows(), feature=comm.coord * part, width=part)

    return local


# ---- formulas, as the ledger counts them ----


class PayloadCounter:
    """Calls and payload by (operation, axis), being added up."""

    def __init__(self) -> None:
        self._counts: dict[tuple[str, str], list[int]] = {}

    def add(self, operation: str, axis: str, calls: int, payload_bytes: int) -> None:
        row = self._counts.setdefault((operation, axis), [0, 0])
        row[0] += calls
        row[1] += payload_bytes

    def rows(self) -> tuple[LedgerRow, ...]:
        return tuple(LedgerRow(*key, *value) for key, value in sorted(self._counts.items()))


@dataclass(frozen=True)
class GridSizes:
    """What a formula needs of a model whose heads and vocabulary are cut over `parts` ranks."""

    sizes: LayerSizes
    parts: int

    @property
    def facts(self) -> ModelFacts:
        return self.sizes.facts

    @property
    def head_width(self) -> int:
        return self.facts.width // self.facts.heads

    @property
    def vocabulary(self) -> int:
        """Rows of the table as it is stored."""
        return -(-self.facts.vocabulary // self.parts) * self.parts

    @property
    def shared_rows(self) -> int:
        """Rows of k and v that every rank holds, where there are fewer key heads than ranks."""
        return 2 * self.facts.kv_heads * self.head_width if self.facts.kv_heads % self.parts else 0

    @property
    def pairs(self) -> tuple[tuple[tuple[int, int], tuple[int, int]], ...]:
        """(inputs, outputs) of the column-wise and the row-wise linear of attention and of MLP, as used over all
        ranks."""
        facts, keys = self.facts, max(self.facts.kv_heads, self.parts) * self.head_width
        queries, gates = facts.heads * self.head_width, 2 if self.sizes.gated else 1
        return (
            ((facts.width, queries + 2 * keys), (queries, facts.width)),
            ((facts.width, facts.ffn * gates), (facts.ffn, facts.width)),
        )

    @property
    def norms(self) -> int:
        return 2 * self.facts.layers + 1

    @property
    def statistics(self) -> int:
        return 2 if self.sizes.centred else 1


# ---- swapping ----


@dataclass(frozen=True)
class GridPlacement:
    """How a linear's product is cut, and over which axes its weight is: outputs, inputs; terms of its gradients."""

    cut: ProductSpec
    outputs: Communicator
    inputs: tuple[Communicator, ...]
    weight_terms: Placements
    bias_terms: Placements

    def weight(self, outputs: str | None, inputs: str) -> Placements:
        """The placement of a weight by its two factors; no outputs: they are not cut."""
        cut_inputs = tuple((comm.axis, Shard(inputs)) for comm in self.inputs)
        return cut_inputs if outputs is None else ((self.outputs.axis, Shard(outputs)), *cut_inputs)


def terms_of(*comms: Communicator) -> Placements:
    """A gradient with terms on each rank of these axes."""
    return tuple((comm.axis, Partial) for comm in comms if comm.size > 1)


@dataclass
class TensorParallelGrid(Swap):
    """Swaps for a mode in which every linear is a `product`."""

    _ties: set[int] = field(default_factory=set)
    _kinds: dict[tuple[Any, ...], NormKind | None] = field(default_factory=dict)

    @property
    @abstractmethod
    def stream(self) -> Communicator:
        """The axis over which the features of the residual stream are cut."""

    @property
    @abstractmethod
    def stream_terms(self) -> Placements:
        """Axes that cut the batch of the residual stream."""

    @abstractmethod
    def lie(self, role: Role) -> GridPlacement:
        """The placement of a linear of this role (colwise, rowwise, lm_head)."""

    @abstractmethod
    def embedding(self, module: Any) -> nn.Module:
        """The layer in the place of a token embedding."""

    def tied_head(self, module: Any, bias: Any, missing: int) -> nn.Module:
        """The layer in the place of a head that shares the embedding's table."""
        return GridLinear(self.lie(Role("lm_head")).cut, self.table(module.weight), bias, padded=missing)

    @abstractmethod
    def table(self, weight: nn.Parameter) -> Any:
        """The local part of an embedding's table."""

    def position(self, module: Any, weight: Any) -> nn.Module:
        """The layer in the place of learned positions, whose local part is `weight`."""
        module.weight = weight
        kept: nn.Module = module
        return kept

    def prepare(self) -> None:
        seen: set[int] = set()
        for parameter in (p for _, p in self.module.named_parameters(remove_duplicate=False)):
            (self._ties if id(parameter) in seen else seen).add(id(parameter))

    def size_faults(self, name: str, role: Role, module: Any) -> list[str]:
        faults = []
        if (weight := getattr(module, "weight", None)) is not None:
            bad = [
                f"{what} {size} by {parts}"
                for what, size, parts in self._divisions(role, module, weight)
                if size % parts
            ]
            if bad:
                faults.append(f"{name}: its weight {list(weight.shape)} does not divide: {', '.join(bad)}")
        if role.name == "norm" and any(True for _ in module.children()):
            faults.append(f"{name}: a {role.name} that holds modules of its own cannot be cut in 2D or 3D")
        return faults

    def _divisions(self, role: Role, module: Any, weight: Tensor) -> Iterable[tuple[str, int, int]]:
        """(what, size, parts) of everything that is cut without padding, and is not heads."""
        match role.name:
            case "colwise" | "rowwise" | "lm_head" | "embedding":  # a table is cut like the weight of a head
                lie = self.lie(role)
                outputs, inputs = weight.shape[::-1] if is_transposed(module) else weight.shape
                yield "inputs", inputs, math.prod(comm.size for comm in lie.inputs)
                if role.name in ("colwise", "rowwise") and role.detail not in ("qkv", "kv"):
                    yield "outputs", outputs * math.gcd(*role.shares), lie.outputs.size * sum(role.shares)
            case "norm" | "position":
                yield "features", weight.shape[-1], self.stream.size

    def layer(self, name: str, module: Any, role: Role, heads: Heads | None) -> nn.Module:
        features: Placements = ((self.stream.axis, Shard("features")),)
        match role.name:
            case "colwise" | "rowwise":
                return self._linear(module, role, heads)
            case "embedding":
                return self.embedding(module)
            case "lm_head":
                return self._head(module)
            case "position":
                dims = (plain("positions", module.weight.shape[0]), plain("features", module.weight.shape[1]))
                return self.position(module, self.parameter(module.weight, dims, features, self.stream_terms))
            case "norm":
                return self._norm(module, features)
            case "replicate":
                self.replicated(module, (*terms_of(self.stream), *self.stream_terms))
                is_in_attention = around(self.roles, name, "attention") is not None
                if not is_in_attention and not any(True for _ in module.children()):
                    on_whole_features(module, self.stream)
        kept: nn.Module = module
        return kept

    def _norm(self, module: Any, features: Placements) -> nn.Module:
        key = key_of(module)
        if key not in self._kinds:
            self._kinds[key] = norm_kind(module)
        if (kind := self._kinds[key]) is None:
            for parameter in module.parameters():
                self.parameter(parameter, gradient=(*terms_of(self.stream), *self.stream_terms))
            on_whole_features(module, self.stream)
            kept: nn.Module = module
            return kept
        width = (plain("features", module.weight.shape[0]),)
        weight = self.parameter(module.weight, width, features, self.stream_terms)
        bias = self.parameter(getattr(module, "bias", None), width, features, self.stream_terms)
        return GridNorm(self.stream, weight, bias, eps=kind.eps, centred=kind.centred)

    def _linear(self, module: Any, role: Role, heads: Heads | None) -> nn.Module:
        lie, transposed = self.lie(role), is_transposed(module)
        parts = lie.outputs.size
        rows, inputs = module.weight.shape[::-1] if transposed else module.weight.shape
        outputs, factor = (
            output_rows(rows, role, heads, parts) if role.name == "colwise" else (plain("out", rows), "out")
        )
        # rows that all ranks of `outputs` hold: each has the terms of the head it uses
        shared_terms = terms_of(lie.outputs) if factor is None else ()
        weight = self.parameter(
            module.weight,
            oriented(outputs, plain("in", inputs), transposed),
            lie.weight(factor, "in"),
            (*lie.weight_terms, *shared_terms),
        )
        bias = self.parameter(
            getattr(module, "bias", None),
            (outputs,),
            () if factor is None else ((lie.outputs.axis, Shard(factor)),),
            (*lie.bias_terms, *shared_terms),
        )
        shared = None
        if role.detail in ("qkv", "kv") and heads is not None and heads.key < parts:
            shared = shared_head(rows, role, heads, lie.outputs)
        return GridLinear(lie.cut, weight, bias, transposed=transposed, shared=shared)

    def _head(self, module: Any) -> nn.Module:
        lie = self.lie(Role("lm_head"))
        rows, width = module.weight.shape
        vocabulary, stored = padded("vocabulary", rows, lie.outputs.size), -(-rows // lie.outputs.size)
        missing = min(stored, max(0, (lie.outputs.coord + 1) * stored - rows))
        bias_value: Placements = ((lie.outputs.axis, Shard("vocabulary")),)
        bias = self.parameter(getattr(module, "bias", None), (vocabulary,), bias_value, lie.bias_terms)
        if id(module.weight) in self._ties:
            return self.tied_head(module, bias, missing)
        dims = (vocabulary, plain("in", width))
        weight = self.parameter(module.weight, dims, lie.weight("vocabulary", "in"), lie.weight_terms)
        return GridLinear(lie.cut, weight, bias, padded=missing)


def table_dims(weight: Tensor, parts: int) -> tuple[Dim, ...]:
    """A table [V, D] whose vocabulary is padded to `parts`."""
    return padded("vocabulary", weight.shape[0], parts), plain("features", weight.shape[1])


def swapped(swap: TensorParallelGrid, strategy: TensorStrategy, width: int) -> ModeResult:
    """Swap the layers, and give the result as every mode does. `width`: features of the residual stream."""
    share = Share(features=swap.stream.size)
    return strategy, swap.run(), lambda name, rows: features_of(rows, swap.stream, width), lambda name: share
