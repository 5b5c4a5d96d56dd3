"""Shards layers over l x l x l ranks (3D, arXiv 2105.14450), without saving gathered copies.

Note: 3d.
Of the residual stream rank (i, j, k) holds samples (i, j), one of l^2 parts, and features k: [B/l^2, T, D/l].  A
*column-wise* linear takes it to hidden activations of samples (i, k) and features j, a *row-wise* one back.  So j and k
change places at every linear.  A weight [D_out, D_in] has its outputs cut l times and its inputs l^2 times.  No
activation and no weight is replicated.  Attention is local: hidden activations have all tokens of their samples and the
heads of j.  So ids, labels, masks and rotary positions are those of samples (i, k); only the counters of dropout, which
acts on the residual stream, are those of (i, j). Positions given for each sample are exchanged.

Per linear of k inputs and m outputs, with T tokens, payload in elements, all divided by l^2:
    forward     gather of x Tk, gather of w km, reduce-scatter of y Tm
    backward    gathers of dy Tm, w km and x Tk again, reduce-scatters of dx Tk and dw km   (total 3 Tk + 2 Tm + 3 km)
which is 39 T h + 36 h^2 for a block of 12 h^2 weights.  Colossal-AI keeps the gathered x and w.  That would move 7 T h
+ 12 h^2 less, and hold l times the activations and weights.  Norms add one number a token and statistic (LayerNorm 2,
RMSNorm 1), forward and backward.  The table is cut as a column-wise linear's weight, V over j and D over k and i.  So a
tied head is one.  The embedding looks all ids up in it, sums over j and exchanges features for samples over i.  That
costs T h (1 + 1/l) / l^2 forward and backward, whatever the vocabulary.  The loss never gathers logits.

Biases, norms and positions are cut l times only; their gradients are terms of a sum over the other two axes.
Where it pays: 64 ranks and more at T/h below 3 (parallel.md 1.3); at 8 ranks 1D moves about as much.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from einops import rearrange
from torch import Tensor, nn

from colossal_lite.config.parallel_schema import TensorConfig
from colossal_lite.data.batch import Batch
from colossal_lite.distributed import autograd_collectives
from colossal_lite.distributed.communicator import Communicator
from colossal_lite.distributed.ledger import LedgerRow
from colossal_lite.distributed.mesh import Mesh
from colossal_lite.layers.grid_layers import OperandAxis, ProductSpec
from colossal_lite.layers.roles import Role
from colossal_lite.layers.tensor_1d_layers import TablePart
from colossal_lite.layers.tensor_grid import (
    Grid,
    GridPlacement,
    GridSizes,
    PayloadCounter,
    TensorParallelGrid,
    parts_of,
    swapped,
    table_dims,
    terms_of,
)
from colossal_lite.layers.tensor_modes import Form, LayerSizes, ModeResult, head_weight
from colossal_lite.numerics.torch_modes import left_untraced
from colossal_lite.sharding.shard_spec import Placements, Shard
from colossal_lite.transforms.split_backward import WeightGradStore, embedding

I, J, K = "tensor.i", "tensor.j", "tensor.k"  # noqa: E741  (the axes' own names)


@dataclass(frozen=True)
class Tensor3D(Grid):
    """The strategy. `i`, `j`, `k`: the communicators along these axes; `plane`: along i and k, in that order."""

    i: Communicator
    j: Communicator
    k: Communicator
    plane: Communicator
    vocabulary: int = 0
    cut_behind = None

    @classmethod
    def on(cls, mesh: Mesh, vocabulary: int) -> Tensor3D:
        return cls(mesh.axis(I), mesh.axis(J), mesh.axis(K), mesh.axis(I, K), vocabulary)

    @property
    def edge(self) -> int:
        return self.i.size

    @property
    def vocabulary_axis(self) -> Communicator:
        return self.j

    def local_part(self, batch: Batch) -> Batch:
        """Samples (i, k), with the numbers of samples (i, j). Raises ValueError if the batch does not divide."""
        parts = parts_of(batch, self.edge**2, f"tensor i {self.edge} x j {self.edge}, and i x k")
        of_stream = parts[self.i.coord * self.edge + self.j.coord].samples
        return replace(parts[self.i.coord * self.edge + self.k.coord], samples=of_stream)

    def whole_batch(self, logits: Tensor) -> Tensor:
        """Logits of the whole micro-batch, alike on every rank of the tensor axis."""
        return autograd_collectives.join(logits, self.plane, 0)


class Embedding3D(TablePart):
    """ids [B/l^2, T] of samples (i, k) -> [B/l^2, T, D/l] of samples (i, j); weight [V/l, D/l^2]."""

    def __init__(self, mode: Tensor3D, weight: nn.Parameter, module: nn.Embedding) -> None:
        super().__init__(weight, mode.j.coord, module)
        self.mode = mode

    @left_untraced
    def forward(self, ids: Tensor) -> Tensor:
        mode, edge = self.mode, self.mode.edge
        everyone = mode.plane.all_gather(ids.contiguous())
        by_j = rearrange(everyone, "(i j b) t -> (j i b) t", i=edge, j=edge)
        own_j = autograd_collectives.reduce_scatter(self.terms(by_j), mode.j, 0)  # [(i b), T, D/l^2]
        parts = autograd_collectives.heads_to_tokens(
            rearrange(own_j, "(i b) t d -> 1 (i b) 1 (t d)", i=edge), mode.i
        )
        return rearrange(parts, "1 b i (t d) -> b t (i d)", t=ids.shape[1])


class Positions3D(nn.Module):
    """Learned positions [T], or [B/l^2, T] of samples (i, k) -> [..., D/l] of samples (i, j); weight [P, D/l]."""

    def __init__(self, mode: Tensor3D, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight_grad_store: WeightGradStore | None = None
        self.mode, self.weight = mode, weight

    @left_untraced
    def forward(self, positions: Tensor) -> Tensor:
        if positions.dim() > 1:
            block = self.mode.k.all_gather(positions.contiguous())
            positions = block.chunk(self.mode.edge)[self.mode.j.coord]
        return embedding(positions, self.weight, self.weight_grad_store)


# ---- formulas (parallel.md 1.5, DESIGN 10), as the ledger counts them ----


def micro_batch_payload(mode: Tensor3D, sizes: LayerSizes) -> tuple[LedgerRow, ...]:
    """Calls and payload bytes on the sub-axes of forward and backward of one micro-batch. Positions are those of all
    samples."""
    facts, itemsize, wide = sizes.facts, sizes.itemsize, max(sizes.itemsize, 4)
    edge, grid = mode.edge, GridSizes(sizes, mode.edge)
    tokens, area, tally = sizes.batch * sizes.sequence, mode.edge**2, PayloadCounter()
    linears = [(linear, role) for pair in grid.pairs for linear, role in zip(pair, (J, K), strict=True)]
    linears = linears * facts.layers + [((facts.width, grid.vocabulary), J)]
    for (inputs, outputs), x_axis in linears:
        x_bytes, y_bytes, w_bytes = (
            numel // area * itemsize for numel in (tokens * inputs, tokens * outputs, inputs * outputs)
        )
        y_axis = K if x_axis == J else J
        for axis, total in ((x_axis, x_bytes), (I, w_bytes)):
            tally.add("all_gather", axis, 2, 2 * total)
            tally.add("reduce_scatter", axis, 1, total)
        tally.add("reduce_scatter", y_axis, 1, y_bytes)
        tally.add("all_gather", y_axis, 1, y_bytes)
    statistics_bytes = grid.norms * 2 * grid.statistics * (tokens // area) * wide
    tally.add("all_reduce", K, grid.norms * (grid.statistics + 1), statistics_bytes)
    tally.add("all_gather", f"{I}*{K}", 1, tokens * 8)  # ids
    embedded_bytes = tokens * facts.width // area * itemsize
    tally.add("reduce_scatter", J, 1, embedded_bytes)
    tally.add("all_gather", J, 1, embedded_bytes)
    tally.add("all_to_all", I, 2, 2 * (embedded_bytes // edge))
    tally.add("all_gather", J, 1, tokens // edge * 3 * wide)  # the loss: 3 numbers a token from each part
    if grid.shared_rows:
        shared_bytes = grid.shared_rows * (facts.width // area + sizes.bias) * itemsize
        tally.add("all_reduce", J, facts.layers * (1 + sizes.bias), facts.layers * shared_bytes)
    return tally.rows()


# ---- swapping ----


@dataclass
class TensorParallel3D(TensorParallelGrid):
    """Swaps for 3D."""

    mode: Tensor3D = field(kw_only=True)

    @property
    def head_parts(self) -> int:
        return self.mode.edge

    @property
    def stream(self) -> Communicator:
        return self.mode.k

    @property
    def stream_terms(self) -> Placements:
        return terms_of(self.mode.i, self.mode.j)

    def lie(self, role: Role) -> GridPlacement:
        mode = self.mode
        inner, outer = (mode.j, mode.k) if role.name == "rowwise" else (mode.k, mode.j)
        cut = ProductSpec(x=OperandAxis(outer, 0), weight=OperandAxis(mode.i, -1), y=OperandAxis(inner, 0))
        return GridPlacement(cut, outer, (inner, mode.i), (), terms_of(mode.i, inner))

    def embedding(self, module: Any) -> nn.Module:
        return Embedding3D(self.mode, self.table(module.weight), module).standing_in(module)

    def table(self, weight: nn.Parameter) -> Any:
        value: Placements = ((J, Shard("vocabulary")), (K, Shard("features")), (I, Shard("features")))
        return self.parameter(weight, table_dims(weight, self.mode.edge), value)

    def replaces(self, name: str, role: Role) -> bool:
        return role.name == "position"

    def position(self, module: Any, weight: Any) -> nn.Module:
        return Positions3D(self.mode, weight)


# ---- the functions of `tensor_modes.ModeFile` ----


def swap_layers(module: nn.Module, mesh: Mesh, roles: Mapping[str, Role], _form: Form) -> ModeResult:
    """Swap the layers of `module` for this rank's parts, in place."""
    vocabulary, width = head_weight(module, roles).shape
    mode = Tensor3D.on(mesh, vocabulary)
    return swapped(TensorParallel3D(module, mesh.layout, roles, mode=mode), mode, width)


def planned_payload(mesh: Mesh, tensor: TensorConfig, sizes: LayerSizes) -> tuple[LedgerRow, ...]:
    """`micro_batch_payload` of a mesh that need not exist."""
    return micro_batch_payload(Tensor3D.on(mesh, sizes.facts.vocabulary), sizes)
