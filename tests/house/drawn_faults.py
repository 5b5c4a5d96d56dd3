"""Faults that drawn cases have to find, beyond those of the mutation suite: places by name, and what stands there.

Each is planted on every rank.  `python -m tests.draws --faults` draws cases for each until one of them shows it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from colossal_lite.distributed.emulated_ranks import ThreadTransport

Change = Callable[..., Any]


def first(result: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """`change` of the first tensor in a result."""
    if isinstance(result, Tensor):
        return change(result)
    for i, part in enumerate(result):
        if isinstance(part, Tensor):
            return (*result[:i], change(part), *result[i + 1 :])
    return result


def scaled(by: float = 1.01) -> Change:
    return lambda original, *args, **named: first(original(*args, **named), lambda x: x * by)


def rolled(dim: int = 0, by: int = 1) -> Change:
    return lambda original, *args, **named: first(original(*args, **named), lambda x: x.roll(by, dim))


def second_scaled(original: Any, *args: Any, **named: Any) -> Any:
    head, *rest = original(*args, **named)
    return (head, *first(tuple(rest), lambda x: x * 1.01))


def forgotten(original: Any, *args: Any, **named: Any) -> None:
    return None


def stale(original: Any, *args: Any, **named: Any) -> Any:
    """The result of the first call with tensors of such shapes."""
    shapes = tuple(x.shape for x in args if isinstance(x, Tensor))
    kept = _KEPT.setdefault((id(original), shapes), original(*args, **named))
    return kept.detach().clone().requires_grad_(kept.requires_grad) if isinstance(kept, Tensor) else kept


_KEPT: dict[Any, Any] = {}


def _reversed_parts(original: Any, x: Tensor, comm: Any, dim: int) -> Tensor:
    return torch.cat(original(x, comm, dim).chunk(comm.size, dim)[::-1], dim)


def _neighbours_part(original: Any, x: Tensor, comm: Any, dim: int) -> Tensor:
    return x.chunk(comm.size, dim)[(comm.coord + 1) % comm.size].contiguous()


def _a_rank_left_out(original: Any, self: Any, own: Tensor, theirs: Any, target: Tensor) -> None:
    original(
        self, own, {rank: t * (0.0 if i == 0 else 1.0) for i, (rank, t) in enumerate(theirs.items())}, target
    )


def _other_way(original: Any, self: Any, tensor: Tensor, distance: int = 1) -> Any:
    return original(self, tensor, -distance)


def _factor_twice(original: Any, self: Any, action: Any, used: Any, factor: float, scale: float) -> None:
    original(self, action, used, 2 * factor, scale)


def _without_memory(
    original: Any, self: Any, ops: Any, group: Any, weight: Any, gradient: Any, state: Any, **more: Any
) -> None:
    original(self, ops, group, weight, gradient, {name: t.clone() for name, t in state.items()}, **more)


def _step_count_kept(original: Any, self: Any, *args: Any, **more: Any) -> None:
    original(self, *args, **more | dict(step=1))


def _micro_batch_lost(original: Any, self: Any, batch: Any) -> Any:
    parts = original(self, batch)
    return (
        (*parts[:-1], replace(parts[-1], labels=torch.full_like(parts[-1].labels, -100)))
        if len(parts) > 1
        else parts
    )


def _labels_of_the_next_sample(original: Any, self: Any, parts: int) -> Any:
    found = original(self, parts)
    return tuple(replace(part, labels=part.labels.roll(1, 0)) for part in found)


def _told_a_little_more(original: Any, self: Any, tells: bool) -> Tensor:
    return original(self, tells) * torch.tensor([1.001, 1.0], dtype=torch.float64)


def _all_used(original: Any, *args: Any, **more: Any) -> Any:
    totals = original(*args, **more)
    return replace(totals, used={chunk: (True,) * len(used) for chunk, used in totals.used.items()})


def _one_token_more(original: Any, self: Any, loss: Tensor, count: Any, factor: float) -> None:
    original(self, loss, None if count is None else count + 1, factor)


def _in_training_mode(original: Any, self: Any, batch: Any) -> Any:
    self.model.eval, kept = self.model.train, self.model.eval
    try:
        return original(self, batch)
    finally:
        self.model.eval = kept


def _ids_of_the_next_sample(original: Any, *args: Any) -> Tensor:
    at = next(i for i, x in enumerate(args) if isinstance(x, Tensor))
    return original(*args[:at], args[at].roll(1, 0), *args[at + 1 :])


def _positions_one_on(original: Any, self: Any, positions: Tensor) -> Tensor:
    return original(self, positions.roll(1, -1))


def _next_share(original: Any, rows: int, role: Any, heads: Any, comm: Any) -> Any:
    return replace(
        original(rows, role, heads, comm), head=(comm.coord + 1) % comm.size * heads.key // comm.size
    )


def _other_tokens(original: Any, self: Any, whole: Tensor, dim: int) -> Tensor:
    return original(self, whole.roll(1, dim) if whole.dim() == 2 else whole, dim)


def _count_twice(original: Any, self: Any, ops: Any, logits: Tensor, labels: Tensor) -> Any:
    total, count = original(self, ops, logits, labels)
    return total, count * 2


def _keys_for_values(original: Any, ctx: Any, *grads: Tensor) -> Any:
    dq, dk, dv, *rest = original(ctx, *grads)
    return (dq, dv, dk, *rest)


def _last_unit_left_out(original: Any, self: Any, start: int, stop: int, carried: Any, batch: Any) -> Any:
    return original(
        self, start, max(start + 1, stop - (stop - start > 1 and stop < len(self.parts))), carried, batch
    )


def _half_published(original: Any, self: Any, start: int, stop: int) -> None:
    original(self, start, stop - (stop - start) // 2)


def _old_numbers_where_absent(original: Any, self: Any) -> Tensor:
    return self._to_accumulate()


def _masters_rolled(original: Any, self: Any, local: Any = None) -> Tensor:
    return original(self, local).roll(1)


def _low_bits_lost(original: Any, master: Tensor, high: Tensor, residual: Tensor, ties: Tensor) -> None:
    original(master, high, residual, ties)
    residual.zero_()


def _from_the_beginning(original: Any, recipe: Any, seed: int, name: str, start: int, stop: int) -> Tensor:
    return original(recipe, seed, name, 0, stop - start)


def _no_updates(original: Any, self: Any) -> Any:
    return dict.fromkeys(original(self), 0)


def _step_of_the_load_forgotten(original: Any, self: Any, loaded: Any) -> None:
    original(self, loaded)
    self._step.number = 0


def _weight_more(original: Any, self: Any, weight: float) -> Any:
    return original(self, weight * 1.01)


def _twice_the_loss(original: Any, self: Any, name: str, weight: float, *args: Any) -> Any:
    return original(self, name, 2 * weight, *args)


def _only_once(original: Any, self: Any, action: Any) -> None:
    if self.steps == 0:
        original(self, action)


def _clip_looser(original: Any, self: Any, limit: float | None) -> float:
    return min(1.0, 1.5 * original(self, limit))


def _drops_the_buffer(original: Any, self: Any, slot: Tensor, *part: Any) -> None:
    original(self, slot, *part)
    slot.mul_(1.0 + 1e-6)


def _written_nowhere(original: Any, self: Any, index: int, *, write: bool) -> Any:
    return {name: state.clone() for name, state in original(self, index, write=write).items()}


def _all_scaled(original: Any, *args: Any) -> Any:
    targets, gradients = original(*args)
    return targets, [gradient * 1.01 for gradient in gradients]


def _no_documents(original: Any, self: Any, mask: Any) -> None:
    return None


def _reduced_in_halves(original: Any, self: Any) -> None:
    original(self)
    self.gradient.mul_(0.5)


def _no_gate_where_one_rank_keeps(original: Any, self: Any, owner: Any, needed: Any) -> Any:
    return original(self, owner, [chunk for chunk in needed if chunk.is_sharded])


def _as_it_is(original: Any, batch: Any) -> Any:
    return batch


def _stale_across_ranks(original: Any, self: Any, x: Tensor) -> Any:
    """On one rank a norm is proven, and one that is not right there keeps its own forward."""
    return stale(original, self, x) if self.comm.size > 1 else original(self, x)


def _scaled_across_ranks(original: Any, ctx: Any, dy: Tensor) -> Any:
    found = original(ctx, dy)
    return first(found, lambda x: x * 1.01) if ctx.comm.size > 1 else found


def _own_term_alone(original: Any, ctx: Any, dy: Tensor) -> Any:
    """On emulated ranks a plan is proven, and one that is not right there is carried out in another form."""
    if isinstance(ctx.comm._host, ThreadTransport):
        return original(ctx, dy)
    return dy.chunk(ctx.comm.size, ctx.dim)[ctx.comm.coord].contiguous(), None, None


FAULTS: dict[str, tuple[str, Change]] = {
    # collectives
    "a reduce is dropped": ("SharedMemoryTransport._add_up", _a_rank_left_out),
    "gathered parts are in reverse order": ("_concat", _reversed_parts),
    "a split takes the neighbour's part": ("split:_part", _neighbours_part),
    "a part of a sum is scaled": ("_sum_part", scaled()),
    "heads come back to other tokens": ("_to_tokens", rolled(1)),
    "the gradient of a gather is not summed": ("_Gather.backward", _own_term_alone),
    "the gradient of a join is scaled": ("_Join.backward", scaled()),
    "a ring turns the other way": ("Communicator.shift_async", _other_way),
    # the step
    "clipping is looser": ("StepTotals.clip_factor", _clip_looser),
    "the rate counts twice": ("Updates._update", _factor_twice),
    "a gradient is scaled": ("Chunk.conclude", _reduced_in_halves),
    "a micro-batch is lost": ("MicroBatches.of", _micro_batch_lost),
    "labels of the next sample": ("Batch.cut", _labels_of_the_next_sample),
    "a loss is told a little larger": ("LocalSums.reported_loss", _told_a_little_more),
    "unused parameters are updated": ("all_reduce_totals", _all_used),
    "a user's loop counts one token more": ("UserLoop.backward", _one_token_more),
    "an evaluation drops": ("Engine.eval_step", _in_training_mode),
    "full gradients are of another mean": ("FullState.gradients", _weight_more),
    # optimizers
    "SGD forgets its momentum": ("SGD.update", _without_memory),
    "AdamW forgets its averages": ("AdamW.update", _without_memory),
    "AdamW is always in its first step": ("AdamW.update", _step_count_kept),
    "Lion forgets its average": ("Lion.update", _without_memory),
    "LAMB forgets its averages": ("LAMB.update", _without_memory),
    "Muon's matrix is not orthogonal": ("orthogonal", scaled(1.1)),
    # tensor modes
    "1d: weight gradients are scaled": ("_weight_gradient", scaled()),
    "1d: the gradient of the cut loss is scaled": (
        "vocabulary_cross_entropy:_CrossEntropy.backward",
        scaled(),
    ),
    "1d: ids of the next sample": ("VocabularyEmbedding.forward", _ids_of_the_next_sample),
    "1d: positions one on": ("PositionEmbedding.forward", _positions_one_on),
    "1d: outputs of the next feature": ("ColwiseLinear.forward", rolled(-1)),
    "1d: the head of another rank": ("shared_head", _next_share),
    "1d: tokens gathered in another order": ("gather_from_sequence_region", rolled(1)),
    "grid: the gradient of a norm is scaled": ("GridNorm:_Norm.backward", _scaled_across_ranks),
    "grid: weight gradients are scaled": ("_Product.backward", second_scaled),
    "grid: ids of the next sample": ("Embedding2D.forward", _ids_of_the_next_sample),
    "grid: outputs are stale": ("GridNorm.forward", _stale_across_ranks),
    "2d: samples gathered in another order": ("Tensor2D.whole_batch", rolled(0)),
    # sequences
    "sequence: tokens one on": ("SequenceParallel.take", _other_tokens),
    "sequence: documents see each other": ("SequenceParallel._documents", _no_documents),
    "sequence: gathered gradients are scaled": ("_ScatteredGradients.home", scaled()),
    "sequence: keys and values swapped": ("_FullRing.backward", _keys_for_values),
    "sequence: gradients of queries are scaled": ("_Blocks.backward", scaled()),
    "sequence: tokens count twice": ("OnSequence.cross_entropy", _count_twice),
    # pipelines
    "pipeline: a unit is left out": ("SequentialSections.run", _last_unit_left_out),
    "pipeline: tied gradients are summed in the first step only": ("Engine._tied_reduce", _only_once),
    "pipeline: weight gradients put off are scaled": ("linear_gradients", _all_scaled),
    # shards, tiers and checkpoints
    "half a chunk is published": ("Chunk.publish", _half_published),
    "absent gradients are those of the step before": ("Chunk._zeros_where_absent", _old_numbers_where_absent),
    "gathered weights drift": ("Chunk.unshard", _drops_the_buffer),
    "a weight that one rank keeps is read before its update": (
        "ParameterGather._gates",
        _no_gate_where_one_rank_keeps,
    ),
    "a rank without samples runs none": ("Batch.with_one_row", _as_it_is),
    "masters are rolled": ("LocalShard.masters", _masters_rolled),
    "an update of the next forward comes too late": ("DeferredUpdates.until", forgotten),
    "what is written to state on the host is lost": ("HostStorage.opened", _written_nowhere),
    "step counts are not loaded": ("OptimizerState.set_updates", forgotten),
    "the step of a checkpoint is forgotten": ("EngineState._use_loaded", _step_of_the_load_forgotten),
    "a shard begins with the parameter's first values": ("replay", _from_the_beginning),
    "low bits of split masters are lost": ("split_", _low_bits_lost),
    "auxiliary losses count twice": ("AuxiliaryLosses._emit", _twice_the_loss),
}
