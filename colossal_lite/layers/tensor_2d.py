"""Shards layers over q x q x depth ranks: 2D (SUMMA, arXiv 2104.05343) and 2.5D (Tesseract, 2105.14500).

Note: 2d.
Of every activation rank (r, c) holds block r of the batch and block c of the features, [B/q, T, D/q].  Of a weight
[D_out, D_in] it holds block c of the outputs and block r of the inputs.  So nothing is replicated.  Attention is
local: a rank has all tokens of its samples and 1/q of the heads.  2.5D cuts the batch further, into `depth` sheets of
such grids; weights are the same on each sheet, so their gradients are terms of a sum over depth.

Per linear of k inputs and m outputs, with T tokens a sheet, payload in elements:
    forward     gather of x along the row Tk/q, gather of w along the column km/q
    backward    the same again, then reduce-scatters of dx Tk/q and dw km/q         (total 3 (Tk + km)/q)
which is SUMMA's count with its broadcasts merged into one call.  Norms add one number a token and statistic (LayerNorm
2, RMSNorm 1), forward and backward.  The embedding exchanges its partial rows, Tk/q forward and backward, and the ids.
A tied head multiplies by the sharded embedding (the product AB^T): the weight is gathered along the column, the logits
are reduce-scattered along the row.  The loss never gathers logits.

Axes: `tensor.column` joins the ranks of one row of the grid (they differ in c), `tensor.row` those of one column.
At equal ranks it moves more than 1D x ZeRO-3 on the same grid (parallel.md 1.3); it saves memory.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from colossal_lite.config.parallel_schema import TensorConfig
from colossal_lite.data.batch import Batch
from colossal_lite.distributed import autograd_collectives
from colossal_lite.distributed.communicator import Communicator
from colossal_lite.distributed.ledger import LedgerRow
from colossal_lite.distributed.mesh import Mesh
from colossal_lite.layers.grid_layers import GridLinear, OperandAxis, ProductSpec
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

ROW, COLUMN, DEPTH = "tensor.row", "tensor.column", "tensor.depth"


@dataclass(frozen=True)
class Tensor2D(Grid):
    """The strategy. `row`, `column`, `depth`: the communicators along these axes (depth has one rank in 2D)."""

    row: Communicator
    column: Communicator
    depth: Communicator
    vocabulary: int = 0

    @classmethod
    def on(cls, mesh: Mesh, vocabulary: int) -> Tensor2D:
        has_depth = any(leaf.name == DEPTH for leaf in mesh.layout.leaves)
        depth = mesh.axis(DEPTH) if has_depth else mesh.axis()
        return cls(mesh.axis(ROW), mesh.axis(COLUMN), depth, vocabulary)

    @property
    def edge(self) -> int:
        return self.row.size

    @property
    def vocabulary_axis(self) -> Communicator:
        return self.column

    def local_part(self, batch: Batch) -> Batch:
        """The samples of this rank's sheet and row. Raises ValueError if the batch does not divide."""
        words = f"tensor depth {self.depth.size} x rows {self.row.size}"
        parts = parts_of(batch, self.depth.size * self.row.size, words)
        return parts[self.depth.coord * self.row.size + self.row.coord]

    def whole_batch(self, logits: Tensor) -> Tensor:
        """Logits of the whole micro-batch, alike on every rank of the tensor axis."""
        return autograd_collectives.join(autograd_collectives.join(logits, self.row, 0), self.depth, 0)


class Embedding2D(TablePart):
    """ids [B/q, T] of this rank's samples -> [B/q, T, D/q]; weight [V/q, D/q], V along rows of the grid."""

    def __init__(self, mode: Tensor2D, weight: nn.Parameter, module: nn.Embedding) -> None:
        super().__init__(weight, mode.row.coord, module)
        self.mode = mode

    @left_untraced
    def forward(self, ids: Tensor) -> Tensor:
        sheet = self.mode.row.all_gather(ids.contiguous())  # every row of the grid looks its words up for all
        return autograd_collectives.reduce_scatter(self.terms(sheet), self.mode.row, 0)


# ---- formulas (parallel.md 1.2, 1.4), as the ledger counts them ----


def micro_batch_payload(mode: Tensor2D, sizes: LayerSizes) -> tuple[LedgerRow, ...]:
    """Calls and payload bytes on the sub-axes of forward and backward of one micro-batch."""
    facts, itemsize, wide = sizes.facts, sizes.itemsize, max(sizes.itemsize, 4)
    q, grid = mode.edge, GridSizes(sizes, mode.edge)
    tokens = sizes.batch // mode.depth.size * sizes.sequence  # of one sheet
    linears = [linear for pair in grid.pairs for linear in pair] * facts.layers
    linears += [] if facts.tied else [(facts.width, grid.vocabulary)]
    x_bytes, w_bytes = (
        sum(numels) // q * itemsize for numels in zip(*((tokens * k, k * m) for k, m in linears), strict=True)
    )
    tally, residual_bytes = PayloadCounter(), tokens * facts.width // q * itemsize
    for axis, total in ((COLUMN, x_bytes), (ROW, w_bytes)):
        tally.add("all_gather", axis, 2 * len(linears), 2 * total)
        tally.add("reduce_scatter", axis, len(linears), total)
    statistics_bytes = grid.norms * 2 * grid.statistics * tokens // q * wide
    tally.add("all_reduce", COLUMN, grid.norms * (grid.statistics + 1), statistics_bytes)
    tally.add("all_gather", ROW, 2, tokens * 8 + residual_bytes)  # ids; gradient of the rows
    tally.add("reduce_scatter", ROW, 1, residual_bytes)
    tally.add("all_gather", COLUMN, 1, tokens * 3 * wide)  # the loss: 3 numbers a token from each column
    if facts.tied:
        table_bytes = grid.vocabulary * facts.width // q * itemsize
        logits_bytes = tokens * grid.vocabulary // q * itemsize
        tally.add("all_gather", ROW, 2, 2 * table_bytes)
        tally.add("reduce_scatter", ROW, 1, table_bytes)
        tally.add("reduce_scatter", COLUMN, 1, logits_bytes)
        tally.add("all_gather", COLUMN, 1, logits_bytes)
    if grid.shared_rows:
        shared_bytes = grid.shared_rows * (facts.width // q + sizes.bias) * itemsize
        tally.add("all_reduce", COLUMN, facts.layers * (1 + sizes.bias), facts.layers * shared_bytes)
    return tally.rows()


# ---- swapping ----


@dataclass
class TensorParallel2D(TensorParallelGrid):
    """Swaps for 2D and 2.5D."""

    mode: Tensor2D = field(kw_only=True)

    @property
    def head_parts(self) -> int:
        return self.mode.edge

    @property
    def stream(self) -> Communicator:
        return self.mode.column

    @property
    def stream_terms(self) -> Placements:
        return terms_of(self.mode.depth, self.mode.row)

    def lie(self, role: Role) -> GridPlacement:
        mode = self.mode
        cut = ProductSpec(x=OperandAxis(mode.column, -1), weight=OperandAxis(mode.row, -1))
        return GridPlacement(cut, mode.column, (mode.row,), terms_of(mode.depth), self.stream_terms)

    def embedding(self, module: Any) -> nn.Module:
        return Embedding2D(self.mode, self.table(module.weight), module).standing_in(module)

    def tied_head(self, module: Any, bias: Any, missing: int) -> nn.Module:
        """The table has its outputs cut along rows and its inputs along columns, and is used so."""
        mode = self.mode
        cut = ProductSpec(x=None, weight=OperandAxis(mode.row, 0), y=OperandAxis(mode.column, -1))
        return GridLinear(cut, self.table(module.weight), bias, padded=missing)

    def table(self, weight: nn.Parameter) -> Any:
        value: Placements = ((ROW, Shard("vocabulary")), (COLUMN, Shard("features")))
        return self.parameter(weight, table_dims(weight, self.mode.edge), value, terms_of(self.mode.depth))


# ---- the functions of `tensor_modes.ModeFile` ----


def swap_layers(module: nn.Module, mesh: Mesh, roles: Mapping[str, Role], _form: Form) -> ModeResult:
    """Swap the layers of `module` for this rank's parts, in place."""
    vocabulary, width = head_weight(module, roles).shape
    mode = Tensor2D.on(mesh, vocabulary)
    return swapped(TensorParallel2D(module, mesh.layout, roles, mode=mode), mode, width)


def planned_payload(mesh: Mesh, tensor: TensorConfig, sizes: LayerSizes) -> tuple[LedgerRow, ...]:
    """`micro_batch_payload` of a mesh that need not exist."""
    return micro_batch_payload(Tensor2D.on(mesh, sizes.facts.vocabulary), sizes)
