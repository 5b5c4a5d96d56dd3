"""Shards layers over one tensor axis (Megatron, arXiv 1909.08053), with or without sequence parallelism (2205.05198).

Note: 1d.
n ranks; M = B T D elements of one activation.  A *column-wise* linear holds rows of its weight (output features), a
*row-wise* one columns (input features). Nothing is communicated between the two; heads are never cut.  Between pairs
the residual stream is replicated, or, with `sequence_parallel`, each rank holds T / n of its positions.  Then norms,
dropout and residual sums cost 1 / n.  The gradients of their parameters are terms of a sum over the axis.

Per pair and micro-batch, payload M each:     forward             backward
    replicated stream                         all-reduce          all-reduce
    sequence_parallel                         gather, scatter     gather, scatter, and gather again (`regather_inputs`)
Embedding and head count as one pair together.  The head computes its loss and gradients in forward, so its input is
gathered once.  It works in chunks of rows (kernels/linear_cross_entropy.py), with an all-gather of 3 numbers a token
and rank for each.  A column-wise linear overlaps the reduction of its input gradient with the product for its weight
gradient.  The second gather overlaps with the product before.

With fewer key and value heads than ranks, each rank holds all of them and uses one.  Their gradients are summed over
the axis.  A vocabulary that n does not divide is padded inside the layout.  Padded logits are the least number of the
dtype.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial, wraps
from typing import Any

from torch import Tensor, nn

from colossal_lite.config.parallel_schema import TensorConfig
from colossal_lite.distributed import autograd_collectives
from colossal_lite.distributed.communicator import Communicator
from colossal_lite.distributed.ledger import LedgerRow
from colossal_lite.distributed.mesh import Mesh
from colossal_lite.kernels import Dropout, Rows
from colossal_lite.kernels.linear_cross_entropy import chunk_rows
from colossal_lite.layers.layer_swap import (
    Heads,
    Swap,
    ancestors,
    around,
    heads_around,
    oriented,
    output_rows,
    padded,
    plain,
)
from colossal_lite.layers.lora import Adapter, read_adapter, rows_on_features
from colossal_lite.layers.roles import Role
from colossal_lite.layers.swap_checks import is_transposed
from colossal_lite.layers.tensor_1d_layers import (
    AXIS,
    ColwiseLinear,
    Door,
    Head,
    PositionEmbedding,
    RowwiseLinear,
    SharedHead,
    Tensor1D,
    VocabularyEmbedding,
    gather_from_sequence_region,
    reduce_scatter_to_sequence_region,
)
from colossal_lite.layers.tensor_modes import Form, LayerSizes, ModeResult, head_weight
from colossal_lite.layers.whole_sizes import Part, without_parts
from colossal_lite.sharding.shard_spec import Dim, Partial, Placements, Shard, dims_of
from colossal_lite.transforms.auxiliary_loss import Share

# ---- formulas (parallel.md 1.1, 1.1b), as the ledger counts them ----


def micro_batch_payload(mode: Tensor1D, sizes: LayerSizes, *, adapted: bool = False) -> tuple[LedgerRow, ...]:
    """Calls and payload bytes on the tensor axis of forward and backward of one micro-batch.

    `adapted`: every linear of the blocks has an adapter and all else is frozen.  Then no weight gradient gathers an
    input again.  Backward stops before the first block's input and the embedding.

    Fused or separate q, k, v move the same: they share one input.
    """
    if mode.size == 1:
        return ()
    facts, batch, sequence, itemsize = sizes.facts, sizes.batch, sizes.sequence, sizes.itemsize
    activation_bytes = batch * sequence * facts.width * itemsize
    pairs = 2 * facts.layers + 1  # attention, MLP; embedding and head together
    stats_bytes = mode.size * batch * sequence * 3 * max(itemsize, 4)
    rows = []
    # Forward sums where a pair ends, backward where one begins; gathers are the opposite.
    gathers, reduces = 0, 2 * pairs - adapted
    if mode.sequence_parallel:
        gathers = 2 * pairs - adapted
        if mode.regather_inputs and not adapted:
            gathers += pairs - 1  # the head's gradients are made in forward
        rows.append(LedgerRow("reduce_scatter", AXIS, reduces, reduces * activation_bytes))
        reduces = 0
    chunks = -(-batch * sequence // chunk_rows(itemsize))
    rows.append(LedgerRow("all_gather", AXIS, gathers + chunks, gathers * activation_bytes + stats_bytes))
    shared = 0
    if facts.kv_heads < mode.size:
        per_layer = 2 * facts.kv_heads * (facts.width // facts.heads)
        shared = facts.layers * (per_layer * facts.width + (per_layer if sizes.bias else 0)) * itemsize
    calls = reduces + (facts.layers * (1 + sizes.bias) if shared else 0)
    if calls:
        rows.append(LedgerRow("all_reduce", AXIS, calls, reduces * activation_bytes + shared))
    return tuple(sorted(rows, key=lambda row: row.operation))


# ---- swapping ----


@dataclass
class TensorParallel1D(Swap):
    """Swaps for 1D, over the axis `tensor`."""

    mode: Tensor1D = field(kw_only=True)
    _doors: dict[str, Door] = field(default_factory=dict)
    """Of column-wise linears whose inputs are gathered where a module around them begins."""
    _regions: set[str] = field(default_factory=set)
    """Modules at whose beginning the sequence is gathered: within them gradients are terms."""
    _wholes: set[str] = field(default_factory=set)
    """Modules that see whole sequences, computed alike on every rank, and give this rank's tokens."""
    _adapters: dict[str, Adapter] = field(default_factory=dict)
    has_adapters = True

    @property
    def head_parts(self) -> int:
        return self.mode.size

    @property
    def tells_heads(self) -> bool:
        return not self.mode.whole_sizes

    @property
    def at_root(self) -> Placements:
        return ((AXIS, Partial),) if self.mode_at("").sequence_parallel else ()

    def mode_at(self, name: str) -> Tensor1D:
        """The mode for a module: with `embedding:whole` activations are cut within blocks only."""
        is_inside = around(self.roles, name, "block") is not None
        if is_inside or not any(role == Role("embedding", "whole") for role in self.roles.values()):
            return self.mode
        return replace(self.mode, sequence_parallel=False)

    def replaces(self, name: str, role: Role) -> bool:
        return role.name == "position" and self.mode_at(name).sequence_parallel

    def size_faults(self, name: str, role: Role, module: Any) -> list[str]:
        if role.name == "adapter":
            return self._adapter_faults(name, module)
        if role.name not in ("colwise", "rowwise") or role.detail in ("qkv", "kv"):
            return []
        features = module.weight.shape[int((role.name == "colwise") == is_transposed(module))]
        shares = role.shares
        if odd := [n for n in shares if features * n % (sum(shares) * self.mode.size)]:
            kind = "outputs" if role.name == "colwise" else "inputs"
            size = features * odd[0] // sum(shares)
            return [f"{name}: tensor={self.mode.size} does not divide its {size} {kind}"]
        return []

    def prepare(self) -> None:
        """Inputs that several column-wise linears share are entered once, at their parent; with `embedding:whole` the
        sequence is cut where the first block begins and joined where the last one ends."""
        by_parent: dict[str, list[str]] = {}
        wrapper_of = {adapter.base: name for name, adapter in self._adapters.items()}
        for name, role in self.roles.items():
            if role.name == "colwise":
                outermost = wrapper_of.get(name, name)
                by_parent.setdefault(outermost.rpartition(".")[0], []).append(name)
        for parent, sisters in by_parent.items():
            if self._is_door(parent) and (self.mode.whole_sizes or len(sisters) > 1):
                door = parent
            elif sisters[0] in wrapper_of:
                door = wrapper_of[sisters[0]]
            else:
                continue
            self._regions.add(door)
            opened = self._open(self.module.get_submodule(door), self.mode_at(door))
            self._doors |= dict.fromkeys(sisters, opened)
        for name in sorted(self.roles):
            role = self.roles[name]
            is_whole = role == Role("replicate", "whole") and self.mode_at(name).sequence_parallel
            if is_whole and not self._sees_whole(name):  # within one
                self._wholes.add(name)
                self._show_whole(self.module.get_submodule(name))
        if self.mode_at("") == self.mode:
            return
        blocks = [name for name, role in self.roles.items() if role.name == "block"]
        if not blocks:
            raise ValueError("plan: embedding:whole needs modules with the role block")
        comm = self.mode.comm
        first, last = self.module.get_submodule(blocks[0]), self.module.get_submodule(blocks[-1])
        _around(first, before=lambda x: autograd_collectives.split(x, comm, 1))
        _around(last, behind=partial(_first_of, change=lambda x: autograd_collectives.join(x, comm, 1)))

    def _is_door(self, parent: str) -> bool:
        """Whether the sequence may be gathered where this module begins: it is an attention or MLP that is called."""
        is_block = not parent or self.roles.get(parent, Role("")).name == "block"
        return not is_block and not isinstance(
            self.module.get_submodule(parent), nn.ModuleDict | nn.ModuleList
        )

    def _open(self, module: nn.Module, mode: Tensor1D) -> Door:
        """Gather the sequence where the module begins."""
        door = Door(mode)

        def enter(x: Tensor) -> Tensor:
            whole = gather_from_sequence_region(x, mode)
            return Part.of(whole, mode.comm, None) if mode.whole_sizes else whole

        _around(module, enter, without_parts if mode.whole_sizes else None, door)
        return door

    def _show_whole(self, module: nn.Module) -> None:
        """Gather the sequence where a module begins, and keep this rank's tokens of what it gives."""
        mode = self.mode
        _around(
            module,
            before=partial(gather_from_sequence_region, mode=mode),
            behind=partial(_first_of, change=lambda x: x.chunk(mode.size, 1)[mode.coord]),
        )

    def _sees_whole(self, name: str) -> bool:
        return not self._wholes.isdisjoint(ancestors(name))

    def layer(self, name: str, module: Any, role: Role, heads: Heads | None) -> nn.Module:
        mode = self.mode_at(name)
        per_token: Placements = ((AXIS, Partial),) if mode.sequence_parallel else ()
        kept: nn.Module = module
        match role.name:
            case "colwise":
                return self._first(name, module, mode, role, heads)
            case "rowwise":
                transposed = is_transposed(module)
                outputs, inputs = module.weight.shape[::-1] if transposed else module.weight.shape
                weight = self._cut(
                    module.weight, oriented(plain("out", outputs), plain("in", inputs), transposed), "in"
                )
                bias = self.parameter(module.bias, gradient=per_token)
                gives_terms = any(adapter.base == name for adapter in self._adapters.values())
                return RowwiseLinear(mode, weight, bias, transposed=transposed, gives_terms=gives_terms)
            case "adapter":
                self._adapt(self._adapters[name], module, mode)
                return kept
            case "embedding":
                made = VocabularyEmbedding(mode, self._cut_vocabulary(module.weight), module)
                return made.standing_in(module)
            case "lm_head":
                weight, bias = (
                    self._cut_vocabulary(p) for p in (module.weight, getattr(module, "bias", None))
                )
                rows, stored = module.weight.shape[0], -(-module.weight.shape[0] // mode.size)
                return Head(mode, weight, bias, padded=min(stored, max(0, (mode.coord + 1) * stored - rows)))
            case "position" if mode.sequence_parallel:
                return PositionEmbedding(mode, self.parameter(module.weight, gradient=per_token))
        sees_part = role.name in ("norm", "replicate", "block") and mode.sequence_parallel  # of the tokens
        sees_part = sees_part or not self._regions.isdisjoint(ancestors(name))  # of the heads
        self.replicated(module, gradient=((AXIS, Partial),) if sees_part else ())
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
        ranks = {self.module.get_parameter(full).shape[0] for full in found.down}
        if found.role.name == "rowwise" and drops and inputs // self.mode.size in ranks:
            return [
                f"{name}: its rank is the size of its part of the input, {inputs} / {self.mode.size}; dropout "
                f"in it could not tell the two apart; legal: another rank, or no dropout"
            ]
        heads = heads_around(self.module, self.roles, found.base)
        if found.role.detail in ("qkv", "kv") and heads is not None and heads.key < self.mode.size:
            return [
                f"{name}: an adapter on {heads.key} key heads that {self.mode.size} ranks share is not built; "
                f"legal: tensor up to {heads.key}, or no adapter on keys and values"
            ]
        return []

    def _adapt(self, adapter: Adapter, module: nn.Module, mode: Tensor1D) -> None:
        """Cut the factors as the base is cut; behind a `rowwise`, sum base and pair together."""
        base: Any = self.module.get_submodule(adapter.base)
        outputs, inputs = base.weight.shape[::-1] if is_transposed(base) else base.weight.shape
        cut, whole = (
            (adapter.up, adapter.down) if adapter.role.name == "colwise" else (adapter.down, adapter.up)
        )
        for full in whole:
            self.parameter(self.module.get_parameter(full), gradient=((AXIS, Partial),))
        for full in cut:
            factor = self.module.get_parameter(full)
            if adapter.role.name == "colwise":
                heads = heads_around(self.module, self.roles, adapter.base)
                rows, name = output_rows(outputs, adapter.role, heads, mode.size)
                assert name is not None, "refused: key heads that ranks share"
                local = self._cut(factor, (rows, plain("rank", factor.shape[1])), name)
            else:
                local = self._cut(factor, (plain("rank", factor.shape[0]), plain("in", inputs)), "in")
            owner, _, leaf = full.rpartition(".")
            setattr(self.module.get_submodule(owner), leaf, local)
        if adapter.role.name == "rowwise":
            path = adapter.base.removeprefix(f"{adapter.name}.")

            def finish(module: nn.Module, args: Any, terms: Tensor) -> Tensor:
                inner: Any = module.get_submodule(path)
                bias: Tensor | None = inner.bias
                y = reduce_scatter_to_sequence_region(terms, mode)
                return y if bias is None else y + bias

            module.register_forward_hook(finish)

    def local_rows(self, name: str, rows: Callable[..., Rows]) -> Callable[[], Rows]:
        """The counters of a dropout: of the tokens, or of the features in an adapter, that it sees here."""
        adapter = next((self._adapters[a] for a in ancestors(name) if a in self._adapters), None)
        if adapter is None:
            mode = self.mode_at(name)
            if mode is not self.mode and self.mode.sequence_parallel:  # between blocks the stream is cut
                return partial(rows, mode.size, mode.coord, may_be_whole=True)
            is_cut = mode.sequence_parallel and not self._sees_whole(name)
            return partial(rows, mode.size, mode.coord) if is_cut else rows
        if adapter.role.name == "colwise":
            return rows
        base: Any = self.module.get_submodule(adapter.base)
        width = base.weight.shape[int(not base.transposed)]
        return rows_on_features(self.module.get_submodule(name), rows, width, self.mode.coord)

    def share_at(self, name: str) -> Share:
        """What of the stream this rank sees at a module."""
        mode = self.mode_at(name)
        is_cut = mode.sequence_parallel and not self._sees_whole(name)
        return Share(tokens=mode.size) if is_cut else Share(tells=mode.coord == 0)

    def _first(self, name: str, module: Any, mode: Tensor1D, role: Role, heads: Heads | None) -> nn.Module:
        transposed = is_transposed(module)
        rows, inputs = module.weight.shape[::-1] if transposed else module.weight.shape
        if heads is None and role.detail in ("qkv", "kv"):
            raise ValueError(
                f"plan: {name} has the role colwise:{role.detail}. No module above it has the role attention, which "
                f"says its heads. Legal: that role, or colwise:1+1+1"
            )
        dim, factor = output_rows(rows, role, heads, mode.size)
        if factor is None:
            weight, bias = (
                self.parameter(p, gradient=((AXIS, Partial),)) for p in (module.weight, module.bias)
            )
        else:
            weight = self._cut(module.weight, oriented(dim, plain("in", inputs), transposed), factor)
            bias = self._cut(module.bias, (dim,), factor)
        options: dict[str, Any] = dict(door=self._doors.get(name), transposed=transposed)
        if mode.whole_sizes:
            if factor is None:
                raise ValueError(
                    f"{name}: {heads.key if heads else 0} key heads that {mode.size} ranks share; legal where code "
                    f"sees whole sizes: tensor up to their number"
                )
            options["blocks"] = tuple(math.prod(each.size for each in block) for block in dim)
        if role.detail in ("qkv", "kv") and heads is not None and heads.key < mode.size:
            options["shared"] = shared_head(rows, role, heads, mode.comm)
        return ColwiseLinear(mode, weight, bias, **options)

    def _cut(self, parameter: nn.Parameter | None, dims: tuple[Dim, ...], factor: str) -> Any:
        return self.parameter(parameter, dims, ((AXIS, Shard(factor)),))

    def _cut_vocabulary(self, parameter: nn.Parameter | None) -> Any:
        if parameter is None:
            return None
        rows = padded("vocabulary", parameter.shape[0], self.mode.size)
        return self._cut(parameter, (rows, *dims_of(parameter.shape[1:])), "vocabulary")


def shared_head(rows: int, role: Role, heads: Heads, comm: Communicator) -> SharedHead:
    """The key head that this rank's part of the queries uses, of a linear of so many rows."""
    is_fused, parts = role.detail == "qkv", comm.size
    width = rows // (heads.query + 2 * heads.key if is_fused else heads.key)
    q_rows = heads.query // parts * width if is_fused else 0
    return SharedHead(comm, comm.coord * heads.key // parts, width, q_rows)


def _around(
    module: nn.Module, before: Callable[[Tensor], Tensor] | None = None, behind: Callable[[Any], Any] | None = None,
    door: Door | None = None,
) -> None:  # fmt: skip
    """Change the first argument of a module's forward (by name, the first float tensor [B, T, D]) and its output.
    `door` gets the other arguments of that kind.

    Its `forward` is replaced, as some models call that itself, which runs no hooks.
    """
    forward = module.forward

    @wraps(forward)
    def changed(*args: Any, **kwargs: Any) -> Any:
        named = {n: x for n, x in kwargs.items() if _is_stream(x)}
        others = [*filter(_is_stream, args[1:]), *named.values()]
        if before is not None and args:
            args = (before(args[0]), *args[1:])
        elif before is not None:
            stream = next(iter(named))
            others.pop(0)
            kwargs = kwargs | {stream: before(kwargs[stream])}
        with nullcontext() if door is None or not others else door.opened(others):
            outputs = forward(*args, **kwargs)
        return outputs if behind is None else behind(outputs)

    module.forward = changed


def _is_stream(x: Any) -> bool:
    """Whether it may be activations [B, T, D]."""
    return isinstance(x, Tensor) and x.dim() == 3 and x.is_floating_point()


def _first_of(outputs: Any, change: Callable[[Tensor], Tensor]) -> Any:
    return (change(outputs[0]), *outputs[1:]) if isinstance(outputs, tuple) else change(outputs)


# ---- the functions of `tensor_modes.ModeFile` ----


def swap_layers(module: nn.Module, mesh: Mesh, roles: Mapping[str, Role], form: Form) -> ModeResult:
    """Swap the layers of `module` for this rank's parts, in place."""
    vocabulary = head_weight(module, roles).shape[0]
    strategy = Tensor1D(
        mesh.axis("tensor"), vocabulary, form.sequence_parallel, form.regather_inputs, form.whole_sizes
    )
    swap = TensorParallel1D(module, mesh.layout, roles, mode=strategy)
    return strategy, swap.run(), swap.local_rows, swap.share_at


def planned_payload(mesh: Mesh, tensor: TensorConfig, sizes: LayerSizes) -> tuple[LedgerRow, ...]:
    """`micro_batch_payload` of a mesh that need not exist."""
    mode = Tensor1D(mesh.axis("tensor"), 0, bool(tensor.sequence_parallel), tensor.regather_inputs)
    return micro_batch_payload(mode, sizes)
