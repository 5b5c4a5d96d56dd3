"""2D (SUMMA, arXiv 2104.05343) and 2.5D (Tesseract, 2105.14500) tensor parallelism on q x q x depth ranks.

Note: 2d.
Rank (r, c) holds block r of the batch and block c of the features of every activation, [B/q, T, D/q], and of a weight
[D_out, D_in] block c of the outputs and block r of the inputs: nothing is whole anywhere, and nothing is replicated.
Attention is local: a rank has all tokens of its samples and 1/q of the heads.  2.5D cuts the batch further, into
`depth` sheets of such grids; weights are the same on each sheet, so their gradients are terms of a sum over depth.

Per linear of k inputs and m outputs, with T tokens a sheet, payload in elements:
    forward     gather of x along the row Tk/q, gather of w along the column km/q
    backward    the same again, then reduce-scatters of dx Tk/q and dw km/q         (total 3 (Tk + km)/q)
which is SUMMA's count with its broadcasts merged into one call.  Norms add one number a token and statistic (LayerNorm
2, RMSNorm 1), forward and backward.  The embedding exchanges its partial rows, Tk/q forward and backward, and the ids.
A tied head multiplies by the embedding as it lies (the product AB^T): the weight is gathered along the column, the
logits are reduce-scattered along the row.  The loss never gathers logits.

Axes: `tensor.column` joins the ranks of one row of the grid (they differ in c), `tensor.row` those of one column.
At equal ranks it moves more than 1D x ZeRO-3 on the same grid (parallel.md 1.3); its place is memory.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn
from torch.autograd import Function

from colossal_lite import conjugate
from colossal_lite.batch import Batch
from colossal_lite.comm import AxisComm, LedgerRow, Pending
from colossal_lite.kernels import Ops, Rows
from colossal_lite.mesh import Mesh
from colossal_lite.parallel.roles import ModelFacts, Role
from colossal_lite.parallel.swap import Heads, Swap, is_transposed, oriented, output_rows, padded, plain
from colossal_lite.parallel.tensor_1d import SharedHead, shared_head, vocabulary_cross_entropy
from colossal_lite.shard import Dim, Partial, Placements, Shard

ROW, COLUMN, DEPTH = "tensor.row", "tensor.column", "tensor.depth"


@dataclass(frozen=True)
class Tensor2D:
    """The strategy. `row`, `column`, `depth`: the communicators along these axes (depth has one rank in 2D)."""

    row: AxisComm
    column: AxisComm
    depth: AxisComm
    vocabulary: int = 0
    overlap: bool = True
    name = "2d"

    @classmethod
    def on(cls, mesh: Mesh, vocabulary: int) -> Tensor2D:
        has_depth = any(leaf.name == DEPTH for leaf in mesh.layout.leaves)
        depth = mesh.axis(DEPTH) if has_depth else mesh.axis()
        return cls(mesh.axis(ROW), mesh.axis(COLUMN), depth, vocabulary)

    @property
    def edge(self) -> int:
        return self.row.size

    @property
    def tells_loss(self) -> bool:
        """Ranks of one row of the grid compute the same loss."""
        return self.column.coord == 0

    def local_part(self, batch: Batch) -> Batch:
        """The samples of this rank's sheet and row. Raises ValueError if the batch does not divide."""
        parts = self.depth.size * self.row.size
        if batch.size % parts:
            raise ValueError(
                f"batch: a micro-batch of {batch.size} samples does not divide over {parts} parts "
                f"(tensor depth {self.depth.size} x rows {self.row.size}); legal: a multiple of {parts}"
            )
        return batch.cut(parts)[self.depth.coord * self.row.size + self.row.coord]

    def cross_entropy(self, ops: Ops, logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """(sum over this part's valid tokens, their number) from logits [B/q, T, V/q]."""
        return vocabulary_cross_entropy(logits, labels, self.column, ops, self.vocabulary)

    def whole_vocabulary(self, logits: Tensor) -> Tensor:
        """Logits [B/q, T, V] of this part of the batch, padding stripped, alike along the row of the grid."""
        return conjugate.join(logits, self.column, logits.dim() - 1)[..., : self.vocabulary]

    def whole_batch(self, logits: Tensor) -> Tensor:
        """Logits of the whole micro-batch, alike on every rank of the tensor axis."""
        return conjugate.join(conjugate.join(logits, self.row, 0), self.depth, 0)


# ---- products ----


def _gather_async(x: Tensor, comm: AxisComm) -> Pending:
    return comm.all_gather_async(x.unsqueeze(0).contiguous())


def _joined(pending: Pending, dim: int) -> Tensor:
    """Gathered pieces [q, ...] concatenated along `dim` of a piece (0 or the last)."""
    pieces = pending.wait()
    return rearrange(pieces, "q n ... -> (q n) ..." if dim == 0 else "q ... n -> ... (q n)")


def _scatter_async(x: Tensor, comm: AxisComm, dim: int) -> Pending:
    pattern = "(q n) ... -> q n ..." if dim == 0 else "... (q n) -> q ... n"
    return comm.reduce_scatter_async(rearrange(x, pattern, q=comm.size).contiguous())


class _Product(Function):
    """y = x w^T over the grid (the product AB of 2104.05343, algorithm 1, and its two gradients)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, mode: Tensor2D) -> Tensor:
        ctx.mode = mode
        ctx.save_for_backward(x, weight)
        x_parts, w_parts = _gather_async(x, mode.column), _gather_async(weight, mode.row)
        return F.linear(_joined(x_parts, -1), _joined(w_parts, -1))

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor, None]:
        mode: Tensor2D = ctx.mode
        x, weight = ctx.saved_tensors
        w_parts, x_parts = _gather_async(weight, mode.row), _gather_async(x, mode.column)
        dx = _scatter_async(dy @ _joined(w_parts, -1), mode.column, -1)
        if not mode.overlap:
            dx.wait()
        dw = _scatter_async(dy.flatten(0, -2).t() @ _joined(x_parts, -1).flatten(0, -2), mode.row, -1)
        return dx.wait()[0], dw.wait()[0], None


class _ProductWithTransposed(Function):
    """y = x e^T for a table e [V, D] with V along rows and D along columns of the grid (the product AB^T)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, table: Tensor, mode: Tensor2D) -> Tensor:
        ctx.mode = mode
        ctx.save_for_backward(x, table)
        terms = F.linear(x, _joined(_gather_async(table, mode.row), 0))
        return _scatter_async(terms, mode.column, -1).wait()[0]

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor, None]:
        mode: Tensor2D = ctx.mode
        x, table = ctx.saved_tensors
        dy_parts, parts = _gather_async(dy, mode.column), _gather_async(table, mode.row)
        dy_whole = _joined(dy_parts, -1)
        d_table = _scatter_async(dy_whole.flatten(0, -2).t() @ x.flatten(0, -2), mode.row, 0)
        if not mode.overlap:
            d_table.wait()
        dx = dy_whole @ _joined(parts, 0)
        return dx, d_table.wait()[0], None


class _Norm(Function):
    """LayerNorm (centred) or RMSNorm over features that lie along the row of the grid; statistics in float32 or better.

    x_hat = (x - mean) r, r = (var + eps)^(-1/2); dx = r (g - mean(g) - x_hat mean(g x_hat)), g = dy w.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, centred: bool, mode: Tensor2D
    ) -> Tensor:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        width = x.shape[-1] * mode.edge
        if centred:
            wide = wide - mode.column.all_reduce(wide.sum(-1, keepdim=True)) / width
        square = mode.column.all_reduce(wide.square().sum(-1, keepdim=True))
        rstd = (square / width + eps).rsqrt()
        x_hat = wide * rstd
        ctx.save_for_backward(x_hat.to(x.dtype), rstd, weight)
        ctx.centred, ctx.mode, ctx.has_bias = centred, mode, bias is not None
        y = x_hat * weight
        return (y if bias is None else y + bias).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor, Tensor | None, None, None, None]:
        x_hat, rstd, weight = ctx.saved_tensors
        mode: Tensor2D = ctx.mode
        wide, g = x_hat.to(rstd.dtype), (dy * weight).to(rstd.dtype)
        width = dy.shape[-1] * mode.edge
        sums = [(g * wide).sum(-1, keepdim=True)] + ([g.sum(-1, keepdim=True)] if ctx.centred else [])
        means = mode.column.all_reduce(torch.cat(sums, -1)) / width
        dx = g - wide * means[..., :1]
        if ctx.centred:
            dx = dx - means[..., 1:]
        rows = dy.flatten(0, -2)
        dw = (rows * x_hat.flatten(0, -2)).sum(0)
        return (
            (dx * rstd).to(dy.dtype),
            dw.to(weight.dtype),
            rows.sum(0) if ctx.has_bias else None,
            None,
            None,
            None,
        )


# ---- layers ----


class Linear2D(nn.Module):
    """x [B/q, T, D_in/q] -> y [B/q, T, D_out/q]; weight [D_out/q, D_in/q] (or [D_in/q, D_out/q] if `transposed`).

    With `shared`, all key heads' rows lie on each rank of a row of the grid and one head of them is used; `q_rows` are
    those of a fused weight that are cut.
    """

    def __init__(
        self, mode: Tensor2D, weight: nn.Parameter, bias: nn.Parameter | None, *, transposed: bool = False,
        shared: SharedHead | None = None, q_rows: int = 0,
    ) -> None:  # fmt: skip
        super().__init__()
        self.mode, self.transposed, self.shared, self.q_rows = mode, transposed, shared, q_rows
        self.weight, self.bias = weight, bias

    def forward(self, x: Tensor) -> Tensor:
        weight = self._used(self.weight.t() if self.transposed else self.weight)
        y: Tensor = _Product.apply(x, weight, self.mode)  # type: ignore[no-untyped-call]
        return y if self.bias is None else y + self._used(self.bias)

    def _used(self, rows: Tensor) -> Tensor:
        if self.shared is None:
            return rows
        if not self.q_rows:
            return self.shared.rows_of(rows)
        q, keys = rows[: self.q_rows], conjugate.copy(rows[self.q_rows :], self.mode.column)
        k, v = keys.chunk(2)
        return torch.cat((q, self.shared.rows_of(k), self.shared.rows_of(v)))


class Embedding2D(nn.Module):
    """ids [B/q, T] of this rank's samples -> [B/q, T, D/q]; weight [V/q, D/q], V along rows of the grid."""

    def __init__(self, mode: Tensor2D, weight: nn.Parameter) -> None:
        super().__init__()
        self.mode, self.weight = mode, weight

    def forward(self, ids: Tensor) -> Tensor:
        sheet = self.mode.row.all_gather(ids.contiguous())  # every row of the grid looks its words up for all
        start = self.mode.row.coord * self.weight.shape[0]
        here = (sheet >= start) & (sheet < start + self.weight.shape[0])
        terms = F.embedding(torch.where(here, sheet - start, 0), self.weight) * here.unsqueeze(-1)
        return conjugate.reduce_scatter(terms, self.mode.row, 0)


class TiedHead2D(nn.Module):
    """x [B/q, T, D/q] -> logits [B/q, T, V/q], V along columns of the grid, by a table that lies as an embedding."""

    def __init__(
        self, mode: Tensor2D, weight: nn.Parameter, bias: nn.Parameter | None, *, padded: int
    ) -> None:
        super().__init__()
        self.mode, self.padded = mode, padded
        self.weight, self.bias = weight, bias

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = _ProductWithTransposed.apply(x, self.weight, self.mode)  # type: ignore[no-untyped-call]
        return _without_padding(logits if self.bias is None else logits + self.bias, self.padded)


class Head2D(Linear2D):
    """A head with a weight of its own: a linear to the vocabulary, whose last `padded` rows stand for nothing."""

    def __init__(self, *args: Any, padded: int, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.padded = padded

    def forward(self, x: Tensor) -> Tensor:
        return _without_padding(super().forward(x), self.padded)


def _without_padding(logits: Tensor, padded: int) -> Tensor:
    if not padded:
        return logits
    return F.pad(logits[..., : logits.shape[-1] - padded], (0, padded), value=torch.finfo(logits.dtype).min)


class Norm2D(nn.Module):
    """LayerNorm (`centred`) or RMSNorm: x [..., D/q]; weight and bias [D/q]."""

    def __init__(
        self, mode: Tensor2D, weight: nn.Parameter, bias: nn.Parameter | None, *, eps: float, centred: bool
    ) -> None:
        super().__init__()
        self.mode, self.eps, self.centred = mode, eps, centred
        self.weight, self.bias = weight, bias

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = _Norm.apply(x, self.weight, self.bias, self.eps, self.centred, self.mode)  # type: ignore[no-untyped-call]
        return y


# ---- formulas (parallel.md 1.2, 1.4), as the ledger counts them ----


def micro_batch_payload(
    facts: ModelFacts, mode: Tensor2D, *, batch: int, sequence: int, itemsize: int, bias: bool, gated: bool,
    centred: bool,
) -> tuple[LedgerRow, ...]:  # fmt: skip
    """Calls and payload bytes on the sub-axes of forward and backward of one micro-batch [batch, sequence].

    `gated`: the MLP has a gate (SwiGLU); `centred`: the norms are LayerNorms.
    """
    q, head, wide = mode.edge, facts.width // facts.heads, max(itemsize, 4)
    tokens = batch // mode.depth.size * sequence  # of one sheet
    vocabulary = -(-facts.vocabulary // q) * q
    are_cut = facts.kv_heads % q == 0
    keys = 2 * facts.kv_heads * head if are_cut else 2 * q * head  # rows in use, over all columns
    linears = [
        (facts.width, facts.heads * head + keys),
        (facts.heads * head, facts.width),
        (facts.width, facts.ffn * (2 if gated else 1)),
        (facts.ffn, facts.width),
    ] * facts.layers + ([] if facts.tied else [(facts.width, vocabulary)])
    x_bytes, w_bytes = (
        sum(sizes) // q * itemsize for sizes in zip(*((tokens * k, k * m) for k, m in linears), strict=True)
    )
    counts: dict[tuple[str, str], list[int]] = {}

    def add(operation: str, axis: str, calls: int, payload_bytes: int) -> None:
        row = counts.setdefault((operation, axis), [0, 0])
        row[0] += calls
        row[1] += payload_bytes

    for axis, total in ((COLUMN, x_bytes), (ROW, w_bytes)):
        add("all_gather", axis, 2 * len(linears), 2 * total)
        add("reduce_scatter", axis, len(linears), total)
    statistics, norms = (2 if centred else 1), 2 * facts.layers + 1
    add("all_reduce", COLUMN, norms * (statistics + 1), norms * 2 * statistics * tokens // q * wide)
    add("all_gather", ROW, 2, tokens * 8 + tokens * facts.width // q * itemsize)  # ids; gradient of the rows
    add("reduce_scatter", ROW, 1, tokens * facts.width // q * itemsize)
    add("all_gather", COLUMN, 1, tokens * 3 * wide)  # the loss: 3 numbers a token from each column
    if facts.tied:
        table_bytes, logits_bytes = (
            vocabulary * facts.width // q * itemsize,
            tokens * vocabulary // q * itemsize,
        )
        add("all_gather", ROW, 2, 2 * table_bytes)
        add("reduce_scatter", ROW, 1, table_bytes)
        add("reduce_scatter", COLUMN, 1, logits_bytes)
        add("all_gather", COLUMN, 1, logits_bytes)
    if not are_cut:
        rows = 2 * facts.kv_heads * head
        shared_bytes = (rows * facts.width // q + (rows if bias else 0)) * itemsize
        add("all_reduce", COLUMN, facts.layers * (1 + bias), facts.layers * shared_bytes)
    return tuple(
        sorted(
            (LedgerRow(*key, *value) for key, value in counts.items()), key=lambda r: (r.operation, r.axis)
        )
    )


# ---- swapping ----


@dataclass
class Swap2D(Swap):
    """Swaps for 2D and 2.5D."""

    mode: Tensor2D = None  # type: ignore[assignment]  # given by keyword: fields of the base have defaults
    _ties: set[int] = field(default_factory=set)

    @property
    def head_parts(self) -> int:
        return self.mode.edge

    @property
    def _terms(self) -> Placements:
        """Axes that cut the batch: what is not cut by them has terms of its gradient on each of their ranks."""
        depth: Placements = ((DEPTH, Partial),) if self.mode.depth.size > 1 else ()
        return (*depth, (ROW, Partial))

    def prepare(self) -> None:
        seen: set[int] = set()
        for parameter in (p for _, p in self.module.named_parameters(remove_duplicate=False)):
            (self._ties if id(parameter) in seen else seen).add(id(parameter))

    def size_faults(self, name: str, role: Role, module: Any) -> list[str]:
        q, faults = self.mode.edge, []
        weight = getattr(module, "weight", None)
        if role.name in ("first", "second", "norm", "position", "embedding") and weight is not None:
            cut = weight.shape[1:] if role.name in ("position", "embedding") else weight.shape
            if role.detail in ("qkv", "kv"):
                cut = weight.shape[:1] if is_transposed(module) else weight.shape[1:]
            parts = 2 if role.detail == "gate_up" else 1
            if any(size % q for size in cut) or cut[0] % (q * parts):
                faults.append(f"{name}: {q} x {q} ranks do not divide its weight {list(weight.shape)}")
        if role.name in ("norm", "replicate") and any(True for _ in module.children()):
            faults.append(f"{name}: a {role.name} that holds modules of its own cannot be cut in 2D")
        if role.name == "replicate":
            faults.append(f"{name}: the role replicate has no meaning in 2D, where no activation is whole")
        return faults

    def layer(self, name: str, module: Any, role: Role, heads: Heads | None) -> nn.Module:
        mode, q = self.mode, self.mode.edge
        features: Placements = ((COLUMN, Shard("features")),)
        match role.name:
            case "first" | "second":
                return self._linear(module, role, heads)
            case "embedding":
                dims = (
                    padded("vocabulary", module.weight.shape[0], q),
                    plain("features", module.weight.shape[1]),
                )
                return Embedding2D(mode, self._table(module.weight, dims))
            case "lm_head":
                return self._head(module)
            case "position":
                dims = (plain("positions", module.weight.shape[0]), plain("features", module.weight.shape[1]))
                module.weight = self.parameter(module.weight, dims, features, self._terms)
            case "norm":
                width = (plain("features", module.weight.shape[0]),)
                weight = self.parameter(module.weight, width, features, self._terms)
                bias = self.parameter(getattr(module, "bias", None), width, features, self._terms)
                centred = isinstance(module, nn.LayerNorm) or getattr(module, "kind", "") == "layer"
                eps = next(getattr(module, a) for a in ("eps", "variance_epsilon") if hasattr(module, a))
                eps = torch.finfo(module.weight.dtype).eps if eps is None else eps
                return Norm2D(mode, weight, bias, eps=eps, centred=centred)
        kept: nn.Module = module
        return kept

    def _linear(self, module: Any, role: Role, heads: Heads | None) -> nn.Module:
        mode, q, transposed = self.mode, self.mode.edge, is_transposed(module)
        rows, inputs = module.weight.shape[::-1] if transposed else module.weight.shape
        outputs, factor = (
            output_rows(rows, role, heads, q) if role.name == "first" else (plain("out", rows), "out")
        )
        depth: Placements = ((DEPTH, Partial),) if mode.depth.size > 1 else ()
        value: Placements = (
            ((ROW, Shard("in")),) if factor is None else ((COLUMN, Shard(factor)), (ROW, Shard("in")))
        )
        # rows that all ranks of a row of the grid hold: each has the terms of the head it uses
        terms = (*depth, (COLUMN, Partial)) if factor is None else depth
        weight = self.parameter(
            module.weight, oriented(outputs, plain("in", inputs), transposed), value, terms
        )
        bias_value = () if factor is None else ((COLUMN, Shard(factor)),)
        bias_terms = (*self._terms, (COLUMN, Partial)) if factor is None else self._terms
        bias = self.parameter(getattr(module, "bias", None), (outputs,), bias_value, bias_terms)
        if role.detail in ("qkv", "kv") and heads is not None and heads.key < q:
            shared, q_rows = shared_head(rows, role, heads, q, mode.column.coord)
            return Linear2D(mode, weight, bias, transposed=transposed, shared=shared, q_rows=q_rows)
        return Linear2D(mode, weight, bias, transposed=transposed)

    def _head(self, module: Any) -> nn.Module:
        mode, q = self.mode, self.mode.edge
        rows, width = module.weight.shape
        vocabulary, stored = padded("vocabulary", rows, q), -(-rows // q)
        missing = min(stored, max(0, (mode.column.coord + 1) * stored - rows))
        bias = self.parameter(
            getattr(module, "bias", None), (vocabulary,), ((COLUMN, Shard("vocabulary")),), self._terms
        )
        if id(module.weight) in self._ties:
            table = self._table(module.weight, (vocabulary, plain("features", width)))
            return TiedHead2D(mode, table, bias, padded=missing)
        depth: Placements = ((DEPTH, Partial),) if mode.depth.size > 1 else ()
        value: Placements = ((COLUMN, Shard("vocabulary")), (ROW, Shard("in")))
        weight = self.parameter(module.weight, (vocabulary, plain("in", width)), value, depth)
        return Head2D(mode, weight, bias, padded=missing)

    def _table(self, weight: nn.Parameter, dims: tuple[Dim, ...]) -> Any:
        depth: Placements = ((DEPTH, Partial),) if self.mode.depth.size > 1 else ()
        return self.parameter(weight, dims, ((ROW, Shard("vocabulary")), (COLUMN, Shard("features"))), depth)


def features_of(rows: Callable[[], Rows], mode: Tensor2D, width: int) -> Callable[[], Rows]:
    """Counters of a dropout that sees this rank's features of `width`."""

    def local() -> Rows:
        return replace(rows(), feature=mode.column.coord * (width // mode.edge))

    return local
