"""Plants faults in the training step: gradients, masks, losses, optimizers, precision, recomputation."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import torch

from tests.shared.parity import Case
from tests.shared.places import Change, find

Faults = dict[str, tuple[Case, str, Change]]
"""By what is planted: the case that shows it, the place by its name alone, and the change there."""

CASE = Case(
    dropout=0.2, ragged=True, global_batch=5, config=dict(clip_grad_norm=0.05, gradient_accumulation=2)
)


def _scaled(original: Any, self: Any, index: int, gradient: torch.Tensor, **more: Any) -> None:
    original(self, index, gradient * 2, **more)


def _reduce_dropped(original: Any, self: Any, tensor: torch.Tensor, op: str = "sum") -> Any:
    return original(self, tensor.clone() if self.axis == "data" else tensor, op)


def _reduce_averaged(original: Any, self: Any) -> None:
    original(self)
    self.gradient.div_(2)


def _mask_shifted(original: Any, self: Any, step: int, sample: Any, position: Any, **more: Any) -> None:
    original(self, step, sample, position + 1, **more)


def _micro_batch_in_the_counter(
    original: Any, self: Any, step: int, sample: Any, position: Any, **more: Any
) -> None:
    original(self, step, sample - sample.min() if len(sample) else sample, position, **more)


def _rank_in_the_stream(original: Any, self: Any, sizes: Any) -> int:
    original(self, sizes)
    return 0


def _same_step(original: Any, self: Any, step: int, sample: Any, position: Any, **more: Any) -> None:
    original(self, 0, sample, position, **more)


def _tied_twice(original: Any, self: Any, index: int, gradient: torch.Tensor, **more: Any) -> None:
    is_tied = self.spec.entries[index].name == "token.weight"
    original(self, index, gradient * 2 if is_tied else gradient, **more)


def _micro_batch_lost(original: Any, self: Any, index: int, gradient: torch.Tensor, **more: Any) -> None:
    self._filled[index] = False
    original(self, index, gradient, **more)


def _norm_of_one_share(original: Any, self: Any, parts: int, part: int) -> tuple[int, int]:
    return original(self, parts, 0)


def _norm_counts_replicas(original: Any, self: Any, parts: int, part: int) -> tuple[int, int]:
    return 0, self.numel


def _labels_shifted(original: Any, given: Any, **kwargs: Any) -> Any:
    inputs, labels = given
    return original((inputs, labels.roll(1, dims=1)), **kwargs)


def _mean_of_means(original: Any, self: Any, loss: torch.Tensor, weight: Any) -> None:
    original(self, loss / max(float(weight), 1.0), 1.0)


def one_step_count(original: Any, self: Any, chunk: Any, used: Any, **kwargs: Any) -> None:
    original(self, chunk, [False, *used[1:]], **kwargs)


def late_gradient(original: Any, self: Any, *, is_last: bool, **more: Any) -> None:
    original(self, is_last=True, **more)  # lets chunks go before the last micro-batch has added to them


FAULTS_DATA: Faults = {
    "gradient scaled": (CASE, "Chunk.accept", _scaled),
    "reduce dropped": (CASE, "Communicator.all_reduce_async", _reduce_dropped),
    "reduce averaged": (CASE, "Chunk.finish_reduce", _reduce_averaged),
    "mask shifted": (CASE, "DropoutStreams.begin", _mask_shifted),
    "micro-batch in the counter": (CASE, "DropoutStreams.begin", _micro_batch_in_the_counter),
    "samples numbered by rank": (CASE, "MicroBatches.first_sample", _rank_in_the_stream),
    "wrong random stream": (CASE, "DropoutStreams.begin", _same_step),
    "tied gradient counted twice": (CASE, "Chunk.accept", _tied_twice),
    "micro-batch overwrites the one before": (CASE, "Chunk.accept", _micro_batch_lost),
    "norm over one share only": (CASE, "ChunkSpec.shard", _norm_of_one_share),
    "norm counts replicas": (CASE, "ChunkSpec.shard", _norm_counts_replicas),
    "labels shifted": (CASE, "read_batch", _labels_shifted),
    "mean of the ranks' means": (CASE, "LocalSums.add", _mean_of_means),
    "a parameter left out of the update": (CASE, "ChunkOptimizer.update", one_step_count),
    "reduced before the last micro-batch": (CASE, "GradientHooks.begin", late_gradient),
}


# ---- optimizers, precision, recomputation ----


def _stay(original: Any, self: Any, place: Any) -> None:
    return


def _in_two_parts(original: Any, self: Any, ops: Any, group: Any, *tensors: Any, **more: Any) -> None:
    weight, gradient, state = tensors
    rows = [slice(0, weight.shape[0] // 2), slice(weight.shape[0] // 2, None)]
    for part in rows:
        pieces = {name: tensor[part] for name, tensor in state.items()}
        original(self, ops, group, weight[part], gradient[part], pieces, **more)


def _adam_decays_as_adamw(original: Any, group: Any, *compute: Any) -> Any:
    return original(replace(group, type="adamw"), *compute)


def _schedule_a_step_late(original: Any, config: Any, step: int) -> float:
    return original(config, max(step - 1, 0))


def _no_groups(original: Any, names: Any, groups: Any) -> dict[str, int]:
    return dict.fromkeys(original(names, groups), len(groups) - 1)


def _not_clipped(original: Any, self: Any, chunk: Any, used: Any, **more: Any) -> None:
    original(self, chunk, used, **more | {"grad_scale": 6.0 * 12})  # the tokens alone


def _scale_kept(original: Any, self: Any, index: int, gradient: torch.Tensor, *, seed: float) -> None:
    original(self, index, gradient)


def _one_seed_for_all_parts(original: Any, self: Any, *, seed: float, **more: Any) -> None:
    original(self, seed=2.0**16 / 32, **more)


def _not_published(original: Any, self: Any, start: int, stop: int) -> torch.Tensor | None:
    seen: torch.Tensor | None = original(self, start, stop)
    return None if self.state is find("GradientState").REDUCED else seen


def _own(params: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.NAdam(params, lr=1e-2)


def _stepping(**optimizer: Any) -> Case:
    config = dict(clip_grad_norm=0.05, optimizer=dict(lr=1e-2, weight_decay=0.3) | optimizer)
    return Case(family="llama", world_size=2, config=config)


RECOMPUTED = replace(CASE, config=CASE.config | {"activation_checkpoint": "full"})
KEPT = replace(CASE, config=CASE.config | {"activation_checkpoint": "selective"})
HALF = replace(CASE, config=CASE.config | {"precision": "fp16"}, steps=2)
MATRICES = dict(type="muon", groups=[dict(match="*norm*", type="adamw")])
GROUPED = _stepping(type="adamw", groups=[dict(match="blocks.0.*", lr=0.1)])
SCHEDULED = Case(
    config=dict(lr_scheduler=dict(type="linear", total_steps=4)),
    schedule=functools.partial(
        torch.optim.lr_scheduler.LinearLR, start_factor=1.0, end_factor=0.0, total_iters=4
    ),
)
OWN = replace(_stepping(type="adamw"), config=dict(clip_grad_norm=0.05), own=_own)
FAULTS_STEP: Faults = {
    "recomputed with new masks": (RECOMPUTED, "DropoutStreams.go_to", _stay),
    "partly recomputed with new masks": (KEPT, "DropoutStreams.go_to", _stay),
    "length of a part of a tensor": (_stepping(type="lamb"), "LAMB.update", _in_two_parts),
    "a part of a matrix made orthogonal": (_stepping(**MATRICES), "Muon.update", _in_two_parts),
    "adam decays as adamw": (_stepping(type="adam"), "rule_of", _adam_decays_as_adamw),
    "schedule a step late": (SCHEDULED, "learning_rate_factor", _schedule_a_step_late),
    "groups forgotten": (GROUPED, "assign_groups", _no_groups),
    "own optimizer not clipped": (OWN, "OwnOptimizer.update", _not_clipped),
    "loss scale not removed": (HALF, "Chunk.accept", _scale_kept),
    "one seed for parts of all sizes": (HALF, "GradientHooks.begin", _one_seed_for_all_parts),
    "weights in 16 bits not renewed": (HALF, "Chunk.weights_to_write", _not_published),
}

FAULTS: Faults = FAULTS_DATA | FAULTS_STEP
