"""Shows a rank's tokens to a model's own code with the sizes of whole sequences.

Note: tokens.
On a sequence axis the ids that enter a model are `Part`s (whole_sizes.py), cut in their tokens.  So code sees whole
sequences: `arange`, slices of tables and masks cover all tokens.  They are narrowed to the rank's where they meet its
part.  A call that mixes tokens has one of three forms:
    scaled_dot_product_attention, causal or full    the attention of the axis: ring, ulysses, usp, allgather_kv
    any other product of two parts                  all but the first are gathered, so each rank computes its rows of
                                                    the scores, and of the output: softmax(q k^T) v by hand, attention
                                                    with a mask or dropout
    values that need no gradient                    gathered
Anything else is refused with its line.  Gradients of parameters are terms of a sum over the axis.  Nothing here is
trusted: `plan_proof.check_sequence` runs a copy on emulated ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, ClassVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from colossal_lite.distributed import autograd_collectives
from colossal_lite.distributed.communicator import Communicator
from colossal_lite.kernels import Mask, Rows, dropped
from colossal_lite.layers.whole_sizes import (
    Cut,
    CutError,
    Part,
    compute,
    local,
    mapped,
    tensors_in,
    whole_shape,
    without_parts,
)


@dataclass(frozen=True, eq=False)
class Sequences:
    """What a rank of a sequence axis can do with its tokens."""

    comm: Communicator
    attend: Callable[..., Tensor]
    """Gives out [B, t, H, K] of queries of this rank over all keys [B, t, G, K]; takes `mask` and `scale`."""
    in_order: Callable[[Tensor, int], Tensor]
    """All tokens in global order from the concatenation of all ranks' along a dim."""


@dataclass(frozen=True)
class TokenCut(Cut):
    """A rank's tokens: `pieces` of `total` equal ones of every block."""

    pieces: tuple[int, ...] = ()
    total: int = 1
    what: ClassVar[str] = "tokens"
    rules: ClassVar[Mapping[Any, Callable[[Any, Any, Any], Any]]] = MappingProxyType({})

    def taken(self, x: Tensor, dim: int) -> Tensor:
        block = self.blocks[0]
        parts = x.unflatten(dim, (-1, block)).chunk(self.total, dim + 1)
        own: Tensor = torch.cat([parts[piece] for piece in self.pieces], dim + 1).flatten(dim, dim + 1)
        return own

    def fits(self, size: int) -> bool:
        return size == self.size

    def entered(self, x: Tensor, comm: Any) -> Tensor:
        return x

    def dropped(self, drop: Any, x: Tensor, p: float, rows: Rows) -> Tensor:
        if self.dim == 1 and x.shape[0] == rows.sample.numel() and whole_shape(x)[1] == self.size:
            return dropped(drop, local(x), p, rows)
        # Of scores [B, H, t, T] the counters of a row follow from its place among all: the whole mask is drawn.
        every = replace(rows, position=torch.arange(self.blocks[0], device=x.device), whole=None)
        ones = torch.ones(whole_shape(x), dtype=x.dtype, device=x.device)
        return local(x) * self.taken(dropped(drop, ones, p, every), self.dim)

    def otherwise(self, func: Any, args: Any, kwargs: Any, comm: Any, error: CutError) -> Any:
        parts = [x for x in tensors_in((args, kwargs)) if isinstance(x, Part)]
        if not any(x.requires_grad for x in parts) or not torch.is_grad_enabled():
            whole = {id(x): _gathered(x) for x in parts}
        elif len(parts) > 1:
            whole = {id(x): _gathered(x) for x in parts[1:] if x is not parts[0]}
        else:
            raise error
        if not whole:
            raise error
        args, kwargs = (mapped(lambda x: whole.get(id(x), x), value) for value in (args, kwargs))
        if len(whole) == len({id(x) for x in parts}):
            return func(*args, **kwargs)
        try:
            return compute(func, args, kwargs)
        except CutError:
            raise error from None


def _gathered(x: Part) -> Tensor:
    """All tokens of a part, on every rank."""
    cut, plain = x.cut, local(x)
    assert isinstance(cut, TokenCut)
    is_bool, sequences = plain.dtype == torch.bool, cast(Sequences, x.comm)
    blocks = (plain.byte() if is_bool else plain).unflatten(cut.dim, (-1, cut.blocks[0] // cut.parts))
    every = autograd_collectives.gather(blocks.contiguous(), sequences.comm, cut.dim + 1)
    whole = sequences.in_order(every, cut.dim + 1).flatten(cut.dim, cut.dim + 1)
    return whole.bool() if is_bool else whole


def _attend(
    func: Any, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
    is_causal: bool = False, *, scale: float | None = None, enable_gqa: bool = False,
) -> Tensor:  # fmt: skip
    """Attention of a model's own code, by that of the sequence axis where it has the form."""
    parts = [x for x in (query, key, value) if isinstance(x, Part)]
    cuts = {(x.cut.dim, x.cut.size, x.cut.blocks) for x in parts if x.cut is not None}
    size = whole_shape(query)[-2]
    tokens = query.dim() - 2, size, (size,)
    if len(parts) < 3 or cuts != {tokens}:
        if is_causal:
            raise CutError("causal attention where query, key or value is not cut in tokens")
        options = dict(scale=scale, enable_gqa=enable_gqa)
        plain: Tensor = compute(func, (query, key, value, attn_mask, dropout_p), options)
        return plain
    sequences: Any = parts[0].comm
    q, k, v = (local(x) for x in (query, key, value))
    if attn_mask is None and dropout_p == 0.0 and q.dim() == 4 and q.shape[-1] == v.shape[-1]:
        if not enable_gqa and k.shape[1] != q.shape[1]:
            k, v = (x.expand(-1, q.shape[1], -1, -1) for x in (k, v))
        turned = (x.transpose(1, 2) for x in (q, k, v))
        out = sequences.attend(*turned, mask=Mask(is_causal), scale=scale)
        turned_back: Tensor = Part.of(out.transpose(1, 2), sequences, parts[0].cut)
        return turned_back
    if is_causal:
        attn_mask = torch.ones(size, size, dtype=torch.bool, device=q.device).tril()
    more = dict(attn_mask=attn_mask, dropout_p=dropout_p, scale=scale, enable_gqa=enable_gqa)
    found: Tensor = compute(func, (query, _gathered(parts[1]), _gathered(parts[2])), more)
    return found


def _loss(func: Any, args: Any, kwargs: Any) -> Any:
    """A model's own loss: that of this rank's tokens, which the engine weighs by their number."""
    if any(isinstance(x, Part) is False and x.dim() > 0 for x in tensors_in((args[:2], kwargs))):
        raise CutError("a loss of the tokens of a rank, with labels of all")
    return func(*mapped(local, args), **mapped(local, kwargs))


TokenCut.rules = MappingProxyType(
    {
        F.scaled_dot_product_attention: lambda func, args, kwargs: _attend(func, *args, **kwargs),
        F.cross_entropy: _loss,
    }
)


def show_whole_sequences(
    module: nn.Module, sequences: Sequences, pieces: tuple[int, ...], total: int
) -> None:
    """Have the code of `module` see the tokens [B, t, ...] that it is handed as those of whole sequences."""
    comm = sequences.comm

    def entered(x: Any) -> Any:
        if not isinstance(x, Tensor) or x.dim() < 2:
            return x
        size = x.shape[1] * comm.size
        return Part.of(x, sequences, TokenCut(1, size, (size,), comm.coord, comm.size, pieces, total))

    def enter(_: nn.Module, args: Any, kwargs: Any) -> Any:
        given = tree_map(entered, kwargs)
        if isinstance(
            mask := given.get("attention_mask"), Part
        ):  # code makes masks of queries and keys of it
            given["attention_mask"] = _gathered(mask)
        return tree_map(entered, args), given

    module.register_forward_pre_hook(enter, with_kwargs=True, prepend=True)
    module.register_forward_hook(lambda _, args, out: without_parts(out))
