"""1D tensor parallelism (Megatron, arXiv 1909.08053), with activations cut along the sequence (2205.05198) or whole.

Note: 1d.
n ranks; M = B T D elements of one activation.  A *first* linear holds rows of its weight (output features), a *second*
one columns (input features), so that between the two nothing is communicated; heads are never cut.  Between pairs, the
residual stream is whole on every rank, or, with `sequence_parallel`, each rank holds T / n of its positions: then
norms, dropout and residual sums cost 1 / n, and the gradients of what they hold are terms of a sum over the axis.

Per pair and micro-batch, payload M each:     forward             backward
    whole                                     all-reduce          all-reduce
    sequence_parallel                         gather, scatter     gather, scatter, and gather again (`regather`)
Embedding and head count as one pair together.  The loss never gathers logits: one all-gather of 3 numbers a token and
rank.  A first linear overlaps the reduction of its input gradient with the product for its weight gradient, and the
second gather with the product before that; `overlap=False` waits at once and gives the same bits.

Where there are fewer key and value heads than ranks, each rank keeps all of them whole and uses the one its queries
share; their gradients are summed over the axis.  A vocabulary that n does not divide is padded inside the layout, and
padded logits are the least number there is.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function

from colossal_lite import conjugate
from colossal_lite.auxiliary import Share
from colossal_lite.batch import Batch
from colossal_lite.comm import AxisComm, LedgerRow, Pending
from colossal_lite.deferral import WeightQueue, deliver, embedding, linear, linear_gradients
from colossal_lite.keep import keep
from colossal_lite.kernels import Dropout, Ops, Rows
from colossal_lite.parallel.adapter import Adapter, read_adapter, rows_on_features
from colossal_lite.parallel.roles import ModelFacts, Role
from colossal_lite.parallel.swap import (
    Heads,
    Swap,
    ancestors,
    heads_of,
    is_transposed,
    oriented,
    output_rows,
    padded,
    plain,
)
from colossal_lite.shard import Dim, Partial, Placements, Shard, dims_of

AXIS = "tensor"


@dataclass(frozen=True)
class Tensor1D:
    """The strategy: settings that every layer of this mode shares, and how its loss is taken."""

    comm: AxisComm
    vocabulary: int = 0
    sequence_parallel: bool = True
    regather: bool = True
    overlap: bool = True
    name = "1d"

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
    def tells_loss(self) -> bool:
        """All ranks of the axis compute the same loss."""
        return self.coord == 0

    def local_part(self, batch: Batch) -> Batch:
        return batch

    def whole_vocabulary(self, logits: Tensor) -> Tensor:
        """Logits [B, T, V] on every rank, padding stripped, for a criterion that all ranks then compute alike."""
        return conjugate.join(logits, self.comm, logits.dim() - 1)[..., : self.vocabulary]

    def whole_batch(self, logits: Tensor) -> Tensor:
        return logits


# ---- the layers ----


class FirstLinear(nn.Module):
    """Linear with its output features cut: x [B, T(/n), D_in] -> y [B, T, D_out / n].

    `input_is_whole`: whoever holds this layer has gathered the input already, for several such layers at once.
    `transposed`: the weight is stored [D_in, D_out], as Conv1D of Hugging Face's GPT-2 has it.
    """

    def __init__(
        self, mode: Tensor1D, weight: nn.Parameter, bias: nn.Parameter | None, *, input_is_whole: bool = False,
        transposed: bool = False,
    ) -> None:  # fmt: skip
        super().__init__()
        self.weight_queue: WeightQueue | None = None
        self.mode, self.input_is_whole, self.transposed = mode, input_is_whole, transposed
        self.weight, self.bias = weight, bias

    def forward(self, x: Tensor) -> Tensor:
        weight, bias = self.used_parameters()
        if self.input_is_whole:
            return linear(x, weight, bias, self.weight_queue)
        out: Tensor = _FirstLinear.apply(x, weight, bias, self.mode, self.weight_queue)  # type: ignore[no-untyped-call]
        return out

    def used_parameters(self) -> tuple[Tensor, Tensor | None]:
        """Weight [D_out, D_in] and bias [D_out] of the product."""
        weight = self.weight.t() if self.transposed else self.weight
        return self.used_rows(weight), None if self.bias is None else self.used_rows(self.bias)

    def used_rows(self, rows: Tensor) -> Tensor:
        return rows


@dataclass(frozen=True)
class SharedHead:
    """Which of the key heads, all of them held here, this rank's queries use."""

    head: int
    heads: int
    head_width: int

    def rows_of(self, keys: Tensor) -> Tensor:
        return keys[self.head * self.head_width : (self.head + 1) * self.head_width]


class SharedKeysLinear(FirstLinear):
    """Rows of k or v where there are fewer heads than ranks: all are held, one head is used.

    With `q_rows` it is a fused [q | k | v], of which the rows of q are cut.
    """

    def __init__(self, shared: SharedHead, *args: Any, q_rows: int = 0, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.shared, self.q_rows = shared, q_rows

    def used_rows(self, rows: Tensor) -> Tensor:
        if not self.q_rows:
            return self.shared.rows_of(rows)
        # One parameter, two kinds of rows: the sum that a whole replicated parameter gets later is taken here.
        q, keys = rows[: self.q_rows], conjugate.copy(rows[self.q_rows :], self.mode.comm)
        k, v = keys.chunk(2)
        return torch.cat((q, self.shared.rows_of(k), self.shared.rows_of(v)))


class SecondLinear(nn.Module):
    """Linear with its input features cut: x [B, T, D_in / n] -> y [B, T(/n), D_out]. The bias comes last, once.

    `gives_terms`: whoever holds this layer sums the terms [B, T, D_out] and adds the bias.
    """

    def __init__(
        self, mode: Tensor1D, weight: nn.Parameter, bias: nn.Parameter | None, *, transposed: bool = False,
        gives_terms: bool = False,
    ) -> None:  # fmt: skip
        super().__init__()
        self.weight_queue: WeightQueue | None = None
        self.mode, self.transposed, self.gives_terms = mode, transposed, gives_terms
        self.weight, self.bias = weight, bias

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight.t() if self.transposed else self.weight
        if self.gives_terms:
            return linear(x, weight, None, self.weight_queue)
        out: Tensor = _SecondLinear.apply(x, weight, self.bias, self.mode, self.weight_queue)  # type: ignore[no-untyped-call]
        return out


class VocabularyEmbedding(nn.Module):
    """Embedding with its rows cut: ids [B, T] -> [B, T(/n), D]."""

    def __init__(self, mode: Tensor1D, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight_queue: WeightQueue | None = None
        self.mode, self.weight = mode, weight

    def forward(self, ids: Tensor) -> Tensor:
        start = self.mode.coord * self.weight.shape[0]
        here = (ids >= start) & (ids < start + self.weight.shape[0])
        x = embedding(torch.where(here, ids - start, 0), self.weight, self.weight_queue)
        return leave(x * here.unsqueeze(-1), self.mode)


class PositionEmbedding(nn.Module):
    """Learned positions, whole on every rank: positions [T] or [B, T] -> this rank's [..., T / n, D]."""

    def __init__(self, mode: Tensor1D, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight_queue: WeightQueue | None = None
        self.mode, self.weight = mode, weight

    def forward(self, positions: Tensor) -> Tensor:
        own = positions.tensor_split(self.mode.size, dim=-1)[self.mode.coord]
        return embedding(own, self.weight, self.weight_queue)


class Head(FirstLinear):
    """Linear to the vocabulary: x [B, T(/n), D] -> logits [B, T, V / n]; the last `padded` stand for nothing."""

    def __init__(
        self, mode: Tensor1D, weight: nn.Parameter, bias: nn.Parameter | None, *, padded: int
    ) -> None:
        super().__init__(mode, weight, bias)
        self.padded = padded

    def forward(self, x: Tensor) -> Tensor:
        logits = super().forward(x)
        if not self.padded:
            return logits
        real = logits[..., : logits.shape[-1] - self.padded]
        return F.pad(real, (0, self.padded), value=torch.finfo(logits.dtype).min)


def enter(x: Tensor, mode: Tensor1D) -> Tensor:
    """From the residual stream to the whole input of first linears, for several of them at once."""
    return conjugate.gather(x, mode.comm, 1) if mode.sequence_parallel else conjugate.copy(x, mode.comm)


def leave(x: Tensor, mode: Tensor1D) -> Tensor:
    """From terms [B, T, D] on each rank to the residual stream."""
    if mode.sequence_parallel:
        return conjugate.reduce_scatter(x, mode.comm, 1)
    return conjugate.all_reduce(x, mode.comm)


class _FirstLinear(Function):
    """`enter`, then the product, with backward's communication beside its products."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, mode: Tensor1D, queue: WeightQueue | None
    ) -> Tensor:
        def product() -> Tensor:
            return F.linear(_gather_async(x, mode).wait(), weight, bias)

        ctx.mode, ctx.queue = mode, queue
        if queue is not None:  # as they are, not as recomputation would give them back: gradients go to these
            ctx.given = weight, bias
        if mode.sequence_parallel and mode.regather:
            ctx.save_for_backward(x, weight)
            return keep(product, x)
        whole = _gather_async(x, mode).wait() if mode.sequence_parallel else x
        ctx.save_for_backward(whole, weight)
        return F.linear(whole, weight, bias)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        mode: Tensor1D = ctx.mode
        kept, weight = ctx.saved_tensors
        needs_dx, needs_dw, needs_db, *_ = ctx.needs_input_grad
        gathers = needs_dw and mode.sequence_parallel and mode.regather
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
        if again is not None and not mode.overlap:
            again.wait()
        sum_of_terms = _sum_async(dy @ weight, mode) if needs_dx else None
        if sum_of_terms is not None and not mode.overlap:
            sum_of_terms.wait()
        whole = again.wait() if again is not None else kept
        dw = _weight_gradient(dy, whole) if needs_dw else None
        db = dy.flatten(0, -2).sum(0) if needs_db else None
        return sum_of_terms.wait() if sum_of_terms is not None else None, dw, db, None, None


class _SecondLinear(Function):
    """The product, then `leave`, then the bias."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, mode: Tensor1D, queue: WeightQueue | None
    ) -> Tensor:
        def product() -> Tensor:
            y = _sum_async(F.linear(x, weight), mode).wait()
            return y if bias is None else y.add_(bias)

        ctx.mode, ctx.queue = mode, queue
        if queue is not None:  # as they are, not as recomputation would give them back: gradients go to these
            ctx.given = weight, bias
        ctx.save_for_backward(x, weight)
        return keep(product, x)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        mode: Tensor1D = ctx.mode
        x, weight = ctx.saved_tensors
        needs_dx, needs_dw, needs_db, *_ = ctx.needs_input_grad
        gathered = _gather_async(dy, mode) if mode.sequence_parallel else None
        if gathered is not None and not mode.overlap:
            gathered.wait()
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


def _gather_async(x: Tensor, mode: Tensor1D) -> Pending:
    """All positions of x [B, T / n, D]."""
    return mode.comm.all_gather_async(x, dim=1)


def _sum_async(terms: Tensor, mode: Tensor1D) -> Pending:
    """The sum over ranks of [B, T, D], in place; with sequence_parallel this rank's positions of it, [B, T / n, D]."""
    if not mode.sequence_parallel:
        return mode.comm.all_reduce_async(terms)
    return mode.comm.reduce_scatter_async(terms, dim=1)


# ---- loss ----


def vocabulary_cross_entropy(
    logits: Tensor, labels: Tensor, comm: AxisComm, ops: Ops, vocabulary: int
) -> tuple[Tensor, Tensor]:
    """(sum over valid tokens, their number) from logits [..., V / n] cut over the ranks of `comm`; labels [...]."""
    flat = labels.reshape(-1)
    total: Tensor = _CrossEntropy.apply(logits.flatten(0, -2), flat, comm, ops, vocabulary)  # type: ignore[no-untyped-call]
    return total, (flat != -100).sum()


class _CrossEntropy(Function):
    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, labels: Tensor, comm: AxisComm, ops: Ops, vocabulary: int
    ) -> Tensor:
        ctx.start, ctx.ops, ctx.vocabulary = comm.coord * logits.shape[1], ops, vocabulary
        stats = comm.all_gather(ops.cross_entropy_partial(logits, labels, ctx.start).unsqueeze(0))
        total, _, lse = ops.cross_entropy_combine(stats, labels, vocabulary)
        ctx.save_for_backward(logits, labels, lse)
        result: Tensor = total
        return result

    @staticmethod
    def backward(ctx: Any, d_total: Tensor) -> tuple[Tensor, None, None, None, None]:
        logits, labels, lse = ctx.saved_tensors
        dz = ctx.ops.cross_entropy_gradient(d_total, logits, labels, lse, ctx.start, ctx.vocabulary)
        return dz, None, None, None, None


# ---- formulas (parallel.md 1.1, 1.1b), as the ledger counts them ----


def micro_batch_payload(
    facts: ModelFacts, mode: Tensor1D, *, batch: int, sequence: int, itemsize: int, bias: bool,
    adapted: bool = False,
) -> tuple[LedgerRow, ...]:  # fmt: skip
    """Calls and payload bytes on the tensor axis of forward and backward of one micro-batch [batch, sequence].

    `adapted`: every linear of the blocks has an adapter and all else is frozen.  Then no weight gradient asks for an
    input again, and nothing goes back through the first block's input and the embedding.

    `itemsize`: bytes of an activation element.  Fused or separate q, k, v move the same: they share one input.
    """
    if mode.size == 1:
        return ()
    activation_bytes = batch * sequence * facts.width * itemsize
    pairs = 2 * facts.layers + 1  # attention, MLP; embedding and head together
    stats_bytes = mode.size * batch * sequence * 3 * max(itemsize, 4)
    rows = []
    # Forward sums where a pair ends, backward where one begins; gathers are the conjugates.
    gathers, reduces = 0, 2 * pairs - adapted
    if mode.sequence_parallel:
        gathers = pairs * (3 if mode.regather and not adapted else 2) - adapted
        rows.append(LedgerRow("reduce_scatter", AXIS, reduces, reduces * activation_bytes))
        reduces = 0
    rows.append(LedgerRow("all_gather", AXIS, gathers + 1, gathers * activation_bytes + stats_bytes))
    shared = 0
    if facts.kv_heads < mode.size:
        per_layer = 2 * facts.kv_heads * (facts.width // facts.heads)
        shared = facts.layers * (per_layer * facts.width + (per_layer if bias else 0)) * itemsize
    calls = reduces + (facts.layers * (1 + bias) if shared else 0)
    if calls:
        rows.append(LedgerRow("all_reduce", AXIS, calls, reduces * activation_bytes + shared))
    return tuple(sorted(rows, key=lambda row: row.operation))


# ---- swapping ----


@dataclass
class Swap1D(Swap):
    """Swaps for 1D, over the axis `tensor`."""

    mode: Tensor1D = field(kw_only=True)
    _shared: set[str] = field(default_factory=set)
    _adapters: dict[str, Adapter] = field(default_factory=dict)
    has_adapters = True

    @property
    def head_parts(self) -> int:
        return self.mode.size

    def mode_at(self, name: str) -> Tensor1D:
        """The mode as it holds for a module: with `embedding:whole` activations are cut within blocks only."""
        is_inside = any(self.roles.get(a, Role("")).name == "block" for a in ancestors(name))
        if is_inside or not any(role == Role("embedding", "whole") for role in self.roles.values()):
            return self.mode
        return replace(self.mode, sequence_parallel=False)

    def size_faults(self, name: str, role: Role, module: Any) -> list[str]:
        if role.name == "adapter":
            return self._adapter_faults(name, module)
        if role.name not in ("first", "second") or role.detail in ("qkv", "kv"):
            return []
        features = module.weight.shape[int((role.name == "first") == is_transposed(module))]
        parts = 2 if role.detail == "gate_up" else 1
        if features % (parts * self.mode.size):
            kind = "outputs" if role.name == "first" else "inputs"
            return [f"{name}: tensor={self.mode.size} does not divide its {features // parts} {kind}"]
        return []

    def prepare(self) -> None:
        """Inputs that several first linears share are entered once, at their parent; with `embedding:whole` the
        sequence is cut where the first block begins and joined where the last one ends."""
        by_parent: dict[str, list[str]] = {}
        wrapper_of = {adapter.base: name for name, adapter in self._adapters.items()}
        for name, role in self.roles.items():
            if role.name == "first":
                outermost = wrapper_of.get(name, name)
                by_parent.setdefault(outermost.rpartition(".")[0], []).append(name)
        for parent, sisters in by_parent.items():
            if len(sisters) > 1 or sisters[0] in wrapper_of:
                self._shared.update(sisters)
                door = parent if len(sisters) > 1 else wrapper_of[sisters[0]]
                hook = _on_stream(partial(enter, mode=self.mode_at(door)))
                self.module.get_submodule(door).register_forward_pre_hook(hook, with_kwargs=True)
        if self.mode_at("") == self.mode:
            return
        blocks = [name for name, role in self.roles.items() if role.name == "block"]
        if not blocks:
            raise ValueError("plan: embedding:whole needs modules with the role block")
        comm = self.mode.comm
        first, last = self.module.get_submodule(blocks[0]), self.module.get_submodule(blocks[-1])
        first.register_forward_pre_hook(_on_stream(lambda x: conjugate.split(x, comm, 1)), with_kwargs=True)
        last.register_forward_hook(lambda m, a, out: _first_of(out, lambda x: conjugate.join(x, comm, 1)))

    def layer(self, name: str, module: Any, role: Role, heads: Heads | None) -> nn.Module:
        mode = self.mode_at(name)
        per_token: Placements = ((AXIS, Partial),) if mode.sequence_parallel else ()
        kept: nn.Module = module
        match role.name:
            case "first":
                return self._first(name, module, mode, role, heads)
            case "second":
                transposed = is_transposed(module)
                outputs, inputs = module.weight.shape[::-1] if transposed else module.weight.shape
                weight = self._cut(
                    module.weight, oriented(plain("out", outputs), plain("in", inputs), transposed), "in"
                )
                bias = self.parameter(module.bias, gradient=per_token)
                gives_terms = any(adapter.base == name for adapter in self._adapters.values())
                return SecondLinear(mode, weight, bias, transposed=transposed, gives_terms=gives_terms)
            case "adapter":
                self._adapt(self._adapters[name], module, mode)
                return kept
            case "embedding":
                return VocabularyEmbedding(mode, self._cut_vocabulary(module.weight))
            case "lm_head":
                weight, bias = (
                    self._cut_vocabulary(p) for p in (module.weight, getattr(module, "bias", None))
                )
                rows, stored = module.weight.shape[0], -(-module.weight.shape[0] // mode.size)
                return Head(mode, weight, bias, padded=min(stored, max(0, (mode.coord + 1) * stored - rows)))
            case "position" if mode.sequence_parallel:
                return PositionEmbedding(mode, self.parameter(module.weight, gradient=per_token))
        for parameter in module.parameters(recurse=False):
            self.parameter(parameter, gradient=per_token if role.name == "norm" else ())
        return kept

    # ---- adapters ----

    def _adapter_faults(self, name: str, module: nn.Module) -> list[str]:
        found = read_adapter(name, module, self.roles)
        if isinstance(found, str):
            return [found]
        self._adapters[name] = found
        base: Any = self.module.get_submodule(found.base)
        inputs = base.weight.shape[int(not is_transposed(base))]
        drops = any(isinstance(m, Dropout | nn.Dropout) for m in module.modules())
        ranks = {self._parameter_at(full).shape[0] for full in found.down}
        if found.role.name == "second" and drops and inputs // self.mode.size in ranks:
            return [
                f"{name}: its rank is the size of its part of the input, {inputs} / {self.mode.size}, so that dropout "
                f"in it could not tell the two apart; legal: another rank, or no dropout"
            ]
        heads = self._heads_at(found.base)
        if found.role.detail in ("qkv", "kv") and heads is not None and heads.key < self.mode.size:
            return [
                f"{name}: an adapter on {heads.key} key heads that {self.mode.size} ranks share is not built; "
                f"legal: tensor up to {heads.key}, or no adapter on keys and values"
            ]
        return []

    def _heads_at(self, name: str) -> Heads | None:
        owners = [a for a in ancestors(name) if self.roles.get(a, Role("")).name == "attention"]
        return heads_of(self.module.get_submodule(owners[0]), owners[0]) if owners else None

    def _adapt(self, adapter: Adapter, module: nn.Module, mode: Tensor1D) -> None:
        """Cut the factors as the base is cut; behind a `second`, sum base and pair together."""
        base: Any = self.module.get_submodule(adapter.base)
        outputs, inputs = base.weight.shape[::-1] if is_transposed(base) else base.weight.shape
        cut, whole = (
            (adapter.up, adapter.down) if adapter.role.name == "first" else (adapter.down, adapter.up)
        )
        for full in whole:
            self.parameter(self._parameter_at(full), gradient=((AXIS, Partial),))
        for full in cut:
            factor = self._parameter_at(full)
            if adapter.role.name == "first":
                rows, name = output_rows(outputs, adapter.role, self._heads_at(adapter.base), mode.size)
                assert name is not None, "refused: key heads that ranks share"
                local = self._cut(factor, (rows, plain("rank", factor.shape[1])), name)
            else:
                local = self._cut(factor, (plain("rank", factor.shape[0]), plain("in", inputs)), "in")
            owner, _, leaf = full.rpartition(".")
            setattr(self.module.get_submodule(owner), leaf, local)
        if adapter.role.name == "second":
            path = adapter.base.removeprefix(f"{adapter.name}.")

            def finish(module: nn.Module, args: Any, terms: Tensor) -> Tensor:
                inner: Any = module.get_submodule(path)
                bias: Tensor | None = inner.bias
                y = leave(terms, mode)
                return y if bias is None else y + bias

            module.register_forward_hook(finish)

    def _parameter_at(self, full: str) -> nn.Parameter:
        return self.module.get_parameter(full)

    def local_rows(self, name: str, rows: Callable[..., Rows]) -> Callable[[], Rows]:
        """The counters of a dropout: of the tokens, or of the features in an adapter, that it sees here."""
        adapter = next((self._adapters[a] for a in ancestors(name) if a in self._adapters), None)
        if adapter is None:
            mode = self.mode_at(name)
            return partial(rows, mode.size, mode.coord) if mode.sequence_parallel else rows
        if adapter.role.name == "first":
            return rows
        base: Any = self.module.get_submodule(adapter.base)
        width = base.weight.shape[int(not base.transposed)]
        return rows_on_features(self.module.get_submodule(name), rows, width, self.mode.coord)

    def share_at(self, name: str) -> Share:
        """What of the stream this rank sees at a module."""
        mode = self.mode_at(name)
        return Share(tokens=mode.size) if mode.sequence_parallel else Share(tells=mode.coord == 0)

    def _first(self, name: str, module: Any, mode: Tensor1D, role: Role, heads: Heads | None) -> nn.Module:
        transposed = is_transposed(module)
        rows, inputs = module.weight.shape[::-1] if transposed else module.weight.shape
        dim, factor = output_rows(rows, role, heads, mode.size)
        if factor is None:
            weight, bias = (
                self.parameter(p, gradient=((AXIS, Partial),)) for p in (module.weight, module.bias)
            )
        else:
            weight = self._cut(module.weight, oriented(dim, plain("in", inputs), transposed), factor)
            bias = self._cut(module.bias, (dim,), factor)
        options: dict[str, Any] = dict(input_is_whole=name in self._shared, transposed=transposed)
        if role.detail in ("qkv", "kv") and heads is not None and heads.key < mode.size:
            shared, q_rows = shared_head(rows, role, heads, mode.size, mode.coord)
            return SharedKeysLinear(shared, mode, weight, bias, q_rows=q_rows, **options)
        return FirstLinear(mode, weight, bias, **options)

    def _cut(self, parameter: nn.Parameter | None, dims: tuple[Dim, ...], factor: str) -> Any:
        return self.parameter(parameter, dims, ((AXIS, Shard(factor)),))

    def _cut_vocabulary(self, parameter: nn.Parameter | None) -> Any:
        if parameter is None:
            return None
        rows = padded("vocabulary", parameter.shape[0], self.mode.size)
        return self._cut(parameter, (rows, *dims_of(parameter.shape[1:])), "vocabulary")


def shared_head(rows: int, role: Role, heads: Heads, parts: int, part: int) -> tuple[SharedHead, int]:
    """The key head that one part of the queries shares, and the rows of q in a fused weight (0 beside no q)."""
    is_fused = role.detail == "qkv"
    width = rows // (heads.query + 2 * heads.key if is_fused else heads.key)
    shared = SharedHead(part * heads.key // parts, heads.key, width)
    return shared, heads.query // parts * width if is_fused else 0


def _on_stream(change: Callable[[Tensor], Tensor]) -> Callable[..., Any]:
    """A pre-hook that changes a module's first argument, or the one Hugging Face calls `hidden_states`."""

    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        if args:
            return (change(args[0]), *args[1:]), kwargs
        return args, kwargs | {"hidden_states": change(kwargs["hidden_states"])}

    return hook


def _first_of(outputs: Any, change: Callable[[Tensor], Tensor]) -> Any:
    return (change(outputs[0]), *outputs[1:]) if isinstance(outputs, tuple) else change(outputs)
