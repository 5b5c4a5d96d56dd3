"""Computes the layers of 1D tensor parallelism: linears, embedding, head and cross-entropy over one axis.

Note: costs and overlap are in `tensor_1d`.  Autograd functions gather, reduce and multiply in one node, so that a
collective overlaps with a product.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function

from colossal_lite.data.batch import Batch
from colossal_lite.distributed import autograd_collectives
from colossal_lite.distributed.communicator import Communicator, PendingCollective
from colossal_lite.kernels import Ops
from colossal_lite.layers.swap_checks import has_forward_of
from colossal_lite.layers.whole_sizes import Cut, Part, features_of_part, local
from colossal_lite.numerics.torch_modes import left_untraced, refuse_autocast
from colossal_lite.transforms.saved_results import save_for_recompute
from colossal_lite.transforms.split_backward import (
    WeightGradStore,
    deliver,
    embedding,
    linear,
    linear_gradients,
)

AXIS = "tensor"


@dataclass(frozen=True)
class Tensor1D:
    """The strategy of 1D tensor parallelism (`TensorStrategy`), with the settings that its layers share."""

    comm: Communicator
    vocabulary: int = 0
    sequence_parallel: bool = True
    regather_inputs: bool = True
    whole_sizes: bool = False

    @property
    def size(self) -> int:
        return self.comm.size

    @property
    def coord(self) -> int:
        return self.comm.coord

    def cross_entropy(self, ops: Ops, logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """(sum over valid tokens, their number) from logits [B, T, V / n] that no rank ever gathers; labels [B, T]."""
        return vocabulary_cross_entropy(logits, labels, self.comm, ops, self.vocabulary)

    @property
    def owns_loss(self) -> bool:
        """All ranks of the axis compute the same loss."""
        return self.coord == 0

    @property
    def cut_behind(self) -> tuple[int, int] | None:
        return (0, 1) if self.whole_sizes else (self.coord, self.size)

    def local_part(self, batch: Batch) -> Batch:
        return batch

    def whole_vocabulary(self, logits: Tensor) -> Tensor:
        """Logits [B, T, V] on every rank, padding stripped, for a criterion that all ranks then compute alike."""
        return whole_vocabulary(logits, self.comm, self.vocabulary)

    def whole_batch(self, logits: Tensor) -> Tensor:
        return logits


# ---- the layers ----


@dataclass(frozen=True)
class SharedHead:
    """Rows of k or v where there are fewer heads than ranks: all are held, one head is used.

    With `q_rows` they are of a fused [q | k | v], and only the rows of q are cut.
    """

    comm: Communicator
    """The ranks that hold them."""
    head: int
    head_width: int
    q_rows: int = 0

    def used_rows(self, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Of a weight [rows, D_in] and a bias [rows]."""
        return self._used(weight), None if bias is None else self._used(bias)

    def _used(self, rows: Tensor) -> Tensor:
        own = slice(self.head * self.head_width, (self.head + 1) * self.head_width)
        if not self.q_rows:
            return rows[own]
        # One parameter, two kinds of rows: the sum that a replicated parameter gets later is taken here.
        q, keys = rows[: self.q_rows], autograd_collectives.copy(rows[self.q_rows :], self.comm)
        k, v = keys.chunk(2)
        return torch.cat((q, k[own], v[own]))


class Door:
    """Gathers the inputs that several column-wise linears of one module share, once, where that module begins.

    The first one is gathered there. Another argument, such as what a decoder reads of its encoder, is gathered if it
    reaches a linear."""

    def __init__(self, mode: Tensor1D) -> None:
        self._mode = mode
        self._others: dict[int, Tensor] = {}

    @contextmanager
    def opened(self, others: Sequence[Tensor]) -> Iterator[None]:
        """A call of the module, with these arguments beside the first."""
        self._others = {id(x): x for x in others}
        try:
            yield
        finally:
            self._others = {}

    def entered(self, x: Tensor) -> Tensor:
        """The input of a linear, gathered."""
        if id(x) not in self._others:
            return x
        if self._others[id(x)] is x:
            self._others[id(x)] = gather_from_sequence_region(x, self._mode)
        return self._others[id(x)]


class ColwiseLinear(nn.Module):
    """Linear with its output features cut: x [B, T(/n), D_in] -> y [B, T, D_out / n].

    `door`: the parent module gathers the input, for several such layers at once.
    `transposed`: the weight is stored [D_in, D_out], as Conv1D of Hugging Face's GPT-2 has it.
    `blocks`: sizes of the whole output's blocks, each cut by itself. With them y shows the whole sizes (`Part`).
    `shared`: the rows that are used of those held.
    """

    def __init__(
        self, mode: Tensor1D, weight: nn.Parameter, bias: nn.Parameter | None, *, door: Door | None = None,
        transposed: bool = False, blocks: tuple[int, ...] = (), shared: SharedHead | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        self.blocks, self.shared = blocks, shared
        self.weight_grad_store: WeightGradStore | None = None
        self.mode, self.door, self.transposed = mode, door, transposed
        self.weight, self.bias = weight, bias

    @left_untraced
    def forward(self, x: Tensor) -> Tensor:
        weight: Tensor = self.weight.t() if self.transposed else self.weight
        bias: Tensor | None = self.bias
        if self.shared is not None:
            weight, bias = self.shared.used_rows(weight, bias)
        if self.door is not None:
            y = linear(local(self.door.entered(x)), weight, bias, self.weight_grad_store)
        else:
            y = _ColwiseLinear.apply(x, weight, bias, self.mode, self.weight_grad_store)  # type: ignore[no-untyped-call]
        if not self.blocks:
            return y
        size, mode = sum(self.blocks), self.mode
        cut = Cut(x.dim() - 1, size, (size,), mode.coord, mode.size)
        return Part.of(y, mode.comm, cut.on(cut.dim, size, self.blocks))


class RowwiseLinear(nn.Module):
    """Linear with its input features cut: x [B, T, D_in / n] -> y [B, T(/n), D_out]. The bias comes last, once.

    `gives_terms`: the parent module sums the terms [B, T, D_out] and adds the bias.
    """

    def __init__(
        self, mode: Tensor1D, weight: nn.Parameter, bias: nn.Parameter | None, *, transposed: bool = False,
        gives_terms: bool = False,
    ) -> None:  # fmt: skip
        super().__init__()
        self.weight_grad_store: WeightGradStore | None = None
        self.mode, self.transposed, self.gives_terms = mode, transposed, gives_terms
        self.weight, self.bias = weight, bias

    @left_untraced
    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight.t() if self.transposed else self.weight
        if self.mode.whole_sizes:
            x = features_of_part(x)
        if self.gives_terms:
            return linear(x, weight, None, self.weight_grad_store)
        out: Tensor = _RowwiseLinear.apply(x, weight, self.bias, self.mode, self.weight_grad_store)  # type: ignore[no-untyped-call]
        return out


class TablePart(nn.Module):
    """Part `part` of a table [V, D] cut over V: looks ids up, and gives zeros for words of other parts.

    `own`: an embedding's own forward, which acts on each word alone.  It is run on the words of this part.  Then that
    module stands in the model, with the weight and this forward.
    """

    def __init__(self, weight: nn.Parameter, part: int, module: nn.Embedding) -> None:
        super().__init__()
        self.weight_grad_store: WeightGradStore | None = None
        self.weight, self.rows, self.start = weight, weight.shape[0], part * weight.shape[0]
        self.words = module.num_embeddings
        self.padding_idx = self._local(module.padding_idx)
        self.own: Callable[[Tensor], Tensor] | None = None

    def standing_in(self, module: nn.Embedding) -> nn.Module:
        """This layer; or `module` itself, if it has a forward of its own, with the weight of this part."""
        if has_forward_of(module, nn.Embedding):
            return self
        self.own = module.forward
        module.weight, module.padding_idx = self.weight, self.padding_idx
        del self.weight
        module.forward = self.forward  # type: ignore[method-assign]
        return module

    def terms(self, ids: Tensor) -> Tensor:
        """Rows [..., D] of ids [...]. Raises ValueError on a CPU for ids that the table has not. On a GPU the lookup
        fails for them, as in one table: a device-side assert."""
        if ids.device.type == "cpu" and ids.numel():
            low, high = (int(end) for end in ids.aminmax())
            if not 0 <= low <= high < self.words:
                raise ValueError(f"embedding: ids from {low} to {high}; legal: 0 to {self.words - 1}")
        here = (ids >= self.start) & (ids < self.start + self.rows)
        local = torch.where(here, ids - self.start, 0)
        if ids.device.type != "cpu":
            local = self.failing(ids, local)
        return self._rows_of(local) * here.unsqueeze(-1)

    def failing(self, ids: Tensor, local: Tensor) -> Tensor:
        """The rows `local` for ids of the table, and for others a row that no part has."""
        return torch.where((ids >= 0) & (ids < self.words), local, self.rows)

    def _rows_of(self, ids: Tensor) -> Tensor:
        if self.own is not None:
            return self.own(ids)
        rows = embedding(ids, self.weight, self.weight_grad_store)
        if self.padding_idx is None:
            return rows
        return torch.where((ids == self.padding_idx).unsqueeze(-1), rows.detach(), rows)

    def _local(self, word: int | None) -> int | None:
        """The row of a word, if it is one of these."""
        return word - self.start if word is not None and 0 <= word - self.start < self.rows else None


class VocabularyEmbedding(TablePart):
    """Embedding with its rows cut: ids [B, T] -> [B, T(/n), D]."""

    def __init__(self, mode: Tensor1D, weight: nn.Parameter, module: nn.Embedding) -> None:
        super().__init__(weight, mode.coord, module)
        self.mode = mode

    @left_untraced
    def forward(self, ids: Tensor) -> Tensor:
        return reduce_scatter_to_sequence_region(self.terms(ids), self.mode)


class PositionEmbedding(nn.Module):
    """Learned positions, replicated: positions [T] or [B, T] -> this rank's [..., T / n, D]."""

    def __init__(self, mode: Tensor1D, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight_grad_store: WeightGradStore | None = None
        self.mode, self.weight = mode, weight

    def forward(self, positions: Tensor) -> Tensor:
        own = positions.tensor_split(self.mode.size, dim=-1)[self.mode.coord]
        return embedding(own, self.weight, self.weight_grad_store)


class Head(ColwiseLinear):
    """Linear to the vocabulary: x [B, T(/n), D] -> logits [B, T, V / n]. The last `padded` are the least number."""

    def __init__(
        self, mode: Tensor1D, weight: nn.Parameter, bias: nn.Parameter | None, *, padded: int
    ) -> None:
        super().__init__(mode, weight, bias)
        self.padded = padded

    @left_untraced
    def forward(self, x: Tensor) -> Tensor:
        return with_padding(super().forward(x), self.padded)


def with_padding(logits: Tensor, padded: int) -> Tensor:
    """Logits [..., V] of which the last `padded` are the least number of their dtype."""
    if not padded:
        return logits
    real = logits[..., : logits.shape[-1] - padded]
    return F.pad(real, (0, padded), value=torch.finfo(logits.dtype).min)


@left_untraced
def gather_from_sequence_region(x: Tensor, mode: Tensor1D) -> Tensor:
    """Gather the residual stream into the full input of column-wise linears, for several of them at once."""
    return (
        autograd_collectives.gather(x, mode.comm, 1)
        if mode.sequence_parallel
        else autograd_collectives.copy(x, mode.comm)
    )


@left_untraced
def reduce_scatter_to_sequence_region(x: Tensor, mode: Tensor1D) -> Tensor:
    """From terms [B, T, D] on each rank to the residual stream."""
    if mode.sequence_parallel:
        if x.shape[1] % mode.size:
            raise ValueError(
                f"parallel.tensor: {mode.size} ranks do not divide the {x.shape[1]} tokens of {list(x.shape)}; the "
                f"model made them itself, so they cannot be padded; legal: multiples of {mode.size}, or "
                f"parallel.tensor.sequence_parallel=False"
            )
        return autograd_collectives.reduce_scatter(x, mode.comm, 1)
    return autograd_collectives.all_reduce(x, mode.comm)


class _ColwiseLinear(Function):
    """`gather_from_sequence_region`, then the product. Backward communicates beside its products."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        mode: Tensor1D,
        queue: WeightGradStore | None,
    ) -> Tensor:
        def product() -> Tensor:
            return F.linear(_gather_async(x, mode).wait(), weight, bias)

        refuse_autocast(weight)
        ctx.mode, ctx.queue = mode, queue
        if (
            queue is not None
        ):  # the parameters themselves take the gradients; saved tensors may be recomputed copies
            ctx.given = weight, bias
        if mode.sequence_parallel and mode.regather_inputs:
            ctx.save_for_backward(x, weight)
            return save_for_recompute(product, x)
        whole = _gather_async(x, mode).wait() if mode.sequence_parallel else x
        ctx.save_for_backward(whole, weight)
        return F.linear(whole, weight, bias)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        mode: Tensor1D = ctx.mode
        kept, weight = ctx.saved_tensors
        needs_dx, needs_dw, needs_db, *_ = ctx.needs_input_grad
        gathers = needs_dw and mode.sequence_parallel and mode.regather_inputs
        if ctx.queue is not None and ctx.queue.is_open:
            given = ctx.given

            def work() -> None:
                whole = _gather_async(kept, mode).wait() if gathers else kept
                deliver(*linear_gradients(dy, whole, *given))

            if needs_dw or needs_db:
                ctx.queue.put(work, *given)
            dx = _sum_async(dy @ weight, mode).wait() if needs_dx else None
            return dx, None, None, None, None
        again = _gather_async(kept, mode) if gathers else None
        sum_of_terms = _sum_async(dy @ weight, mode) if needs_dx else None
        whole = again.wait() if again is not None else kept
        dw = _weight_gradient(dy, whole) if needs_dw else None
        db = dy.flatten(0, -2).sum(0) if needs_db else None
        return sum_of_terms.wait() if sum_of_terms is not None else None, dw, db, None, None


class _RowwiseLinear(Function):
    """The product, then `reduce_scatter_to_sequence_region`, then the bias."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        mode: Tensor1D,
        queue: WeightGradStore | None,
    ) -> Tensor:
        def product() -> Tensor:
            y = _sum_async(F.linear(x, weight), mode).wait()
            return y if bias is None else y.add_(bias)

        refuse_autocast(weight)
        ctx.mode, ctx.queue = mode, queue
        if (
            queue is not None
        ):  # the parameters themselves take the gradients; saved tensors may be recomputed copies
            ctx.given = weight, bias
        ctx.save_for_backward(x, weight)
        return save_for_recompute(product, x)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        mode: Tensor1D = ctx.mode
        x, weight = ctx.saved_tensors
        needs_dx, needs_dw, needs_db, *_ = ctx.needs_input_grad
        gathered = _gather_async(dy, mode) if mode.sequence_parallel else None
        db = dy.flatten(0, -2).sum(0) if needs_db else None
        whole = gathered.wait() if gathered is not None else dy
        dx = whole @ weight if needs_dx else None
        if (needs_dw or needs_db) and ctx.queue is not None and ctx.queue.is_open:
            given = ctx.given

            def work() -> None:
                dw = [_weight_gradient(whole, x)] if needs_dw else []
                takes = [needs for needs in given if needs is not None and needs.requires_grad]
                deliver(takes, dw if db is None else [*dw, db])

            ctx.queue.put(work, *given)
            return dx, None, None, None, None
        return dx, _weight_gradient(whole, x) if needs_dw else None, db, None, None


def _weight_gradient(dy: Tensor, x: Tensor) -> Tensor:
    """[D_out, D_in] from dy [B, T, D_out] and x [B, T, D_in]."""
    return dy.flatten(0, -2).t() @ x.flatten(0, -2)


def _gather_async(x: Tensor, mode: Tensor1D) -> PendingCollective:
    """All positions of x [B, T / n, D]."""
    return mode.comm.all_gather_async(x, dim=1)


def _sum_async(terms: Tensor, mode: Tensor1D) -> PendingCollective:
    """The sum over ranks of [B, T, D], in place; with sequence_parallel this rank's positions of it, [B, T / n, D]."""
    if not mode.sequence_parallel:
        return mode.comm.all_reduce_async(terms)
    return mode.comm.reduce_scatter_async(terms, dim=1)


# ---- loss ----


def whole_vocabulary(logits: Tensor, comm: Communicator, vocabulary: int) -> Tensor:
    """Logits of all words on every rank of `comm`, from each rank's part of them.

    Raises ValueError for a tensor that is no such part."""
    part = -(-vocabulary // comm.size)
    if logits.shape[-1] != part:
        raise ValueError(
            f"model: {tuple(logits.shape)} stands where logits stand, and a rank's part of {vocabulary} words is "
            f"[..., {part}]. Legal: logits alone, first in a tuple, or as 'logits'"
        )
    return autograd_collectives.join(logits, comm, logits.dim() - 1)[..., :vocabulary]


def vocabulary_cross_entropy(
    logits: Tensor, labels: Tensor, comm: Communicator, ops: Ops, vocabulary: int
) -> tuple[Tensor, Tensor]:
    """(sum over valid tokens, their number) from logits [..., V / n] cut over the ranks of `comm`; labels [...]."""
    flat = labels.reshape(-1)
    total: Tensor = _CrossEntropy.apply(logits.flatten(0, -2), flat, comm, ops, vocabulary)  # type: ignore[no-untyped-call]
    return total, (flat != -100).sum()


class _CrossEntropy(Function):
    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, labels: Tensor, comm: Communicator, ops: Ops, vocabulary: int
    ) -> Tensor:
        ctx.start, ctx.ops, ctx.vocabulary = comm.coord * logits.shape[1], ops, vocabulary
        stats = comm.all_gather(ops.cross_entropy_partial(logits, labels, ctx.start, vocabulary).unsqueeze(0))
        total, _, lse = ops.cross_entropy_combine(stats, labels, vocabulary)
        ctx.save_for_backward(logits, labels, lse)
        result: Tensor = total
        return result

    @staticmethod
    def backward(ctx: Any, d_total: Tensor) -> tuple[Tensor, None, None, None, None]:
        logits, labels, lse = ctx.saved_tensors
        dz = ctx.ops.cross_entropy_gradient(d_total, logits, labels, lse, ctx.start, ctx.vocabulary)
        return dz, None, None, None, None
