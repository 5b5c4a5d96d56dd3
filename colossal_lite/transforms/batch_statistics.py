"""Finds modules such as BatchNorm, or tables with max_norm, that change when a batch is split.

Note: which are rejected.
The mean of a batch is not the mean of its parts.  So batch norm differs on each data rank, under accumulation, and in
each micro-batch of a pipeline.  Running statistics of any norm differ too.  They are updated once for each part, and
twice where a block runs again in backward.  Where data ranks alone split the batch, torch's batch norms take the
statistics of all of them (`layers/batch_norm.py`).  Others are rejected by name, with the setting that splits.
A table with `max_norm` writes to its rows in forward: each rank writes only the rows of its own words.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import NoReturn

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm

from colossal_lite.transforms.activation_checkpoint import blocks_of
from colossal_lite.transforms.module_modes import SYNCED, is_set_by_hand, modes_kept

WATCH = "_stays_in_evaluation"


def is_over_the_batch(module: nn.Module) -> bool:
    """Whether the module normalises over a batch, or keeps running statistics of batches."""
    return isinstance(module, _BatchNorm) or (
        isinstance(module, _InstanceNorm) and bool(module.track_running_stats)
    )


def is_synced(module: nn.Module) -> bool:
    """Whether it is marked, as its statistics are of all data ranks."""
    return SYNCED in vars(module)


def mark_synced(model: nn.Module) -> None:
    """Mark the batch norms whose statistics can be of all data ranks: torch's own, with running statistics."""
    forwards = (_BatchNorm.forward, nn.SyncBatchNorm.forward)
    for module in model.modules():
        if (
            isinstance(module, _BatchNorm)
            and type(module).forward in forwards
            and "forward" not in vars(module)
            and module.running_mean is not None
        ):
            module.__dict__[SYNCED] = True


def check_batchwide(model: nn.Module, cuts: Sequence[str], recomputes: Sequence[str] = ()) -> None:
    """Raises ValueError for a module over the batch if settings `cuts` (as a user writes them) split the batch. Also
    for one whose statistics a block updates twice, as it `recomputes`. Not for one that is marked.

    One with running statistics that is in evaluation while the model trains reads no batch (`hold_statistics`)."""
    if not (over := _over_the_batch(model, cuts, recomputes)):
        return
    with modes_kept(model):
        if not is_set_by_hand(model):
            model.train()
        found = [each for each in over if each[1].training or getattr(each[1], "running_mean", None) is None]
    for name, module, why in found:
        _refuse(name, module, why)


def hold_statistics(model: nn.Module, cuts: Sequence[str], recomputes: Sequence[str] = ()) -> None:
    """Have the modules over the batch raise ValueError where they train later, until `free_statistics`."""
    for name, each, why in _over_the_batch(model, cuts, recomputes):
        each.__dict__[WATCH] = each.register_forward_pre_hook(partial(_stay_in_evaluation, name, why))


def _over_the_batch(
    model: nn.Module, cuts: Sequence[str], recomputes: Sequence[str]
) -> list[tuple[str, nn.Module, Sequence[str]]]:
    """Modules over the batch by name, each with the settings that change what it computes or keeps."""
    blocks = tuple(f"{name}." for name in blocks_of(model)) if recomputes else ()
    found: list[tuple[str, nn.Module, Sequence[str]]] = []
    for name, each in model.named_modules():
        is_again = getattr(each, "running_mean", None) is not None and f"{name}.".startswith(blocks)
        here = () if is_synced(each) else cuts
        if is_over_the_batch(each) and (why := (*here, *(recomputes if is_again else ()))):
            found.append((name, each, why))
    return found


def _stay_in_evaluation(name: str, cuts: Sequence[str], each: nn.Module, args: object) -> None:
    if each.training:
        _refuse(name, each, cuts)


def _refuse(name: str, each: nn.Module, cuts: Sequence[str]) -> NoReturn:
    raise ValueError(
        f"model: {name} is a {type(each).__name__}, which reads the whole batch, and {' and '.join(cuts)} would "
        f"run it on parts of one, or twice. Legal: a norm of each sample (LayerNorm, GroupNorm, RMSNorm), or one "
        f"that the model's own train() leaves in eval(). Or torch's BatchNorm with running statistics where data ranks "
        f"alone split the batch. Or the whole batch at once (data=1, gradient_accumulation=1, a pipeline with "
        f"micro_batches=1, activation_checkpoint='none')"
    )


def free_statistics(model: nn.Module) -> None:
    """Let modules over the batch train by themselves: those that are held in evaluation, or marked."""
    for module in model.modules():
        if (handle := module.__dict__.pop(WATCH, None)) is not None:
            handle.remove()
        if module.__dict__.pop(SYNCED, False):
            module.__dict__.pop("forward", None)


def check_tables(module: nn.Module, cuts: Sequence[str]) -> None:
    """Raises ValueError for a table whose gradient is sparse. And, where `cuts` split a batch, for one whose gradient
    depends on how often a word is in the batch."""
    for name, each in module.named_modules():
        if not isinstance(each, nn.Embedding | nn.EmbeddingBag):
            continue
        if each.sparse:
            raise ValueError(
                f"model: {name} is a {type(each).__name__} with sparse=True, and gradients are summed as dense ones; "
                f"legal: sparse=False"
            )
        if each.scale_grad_by_freq and cuts:
            raise ValueError(
                f"model: {name} is a {type(each).__name__} with scale_grad_by_freq=True. It counts words in a part of "
                f"the batch ({' and '.join(cuts)}). Legal: scale_grad_by_freq=False, or the whole batch at once"
            )


def check_max_norm(module: nn.Module, settings: Sequence[str]) -> None:
    """Raises ValueError for a table with max_norm where `settings` keep copies of its rows that forward does not
    update."""
    found = [
        (name, each)
        for name, each in module.named_modules()
        if isinstance(each, nn.Embedding | nn.EmbeddingBag) and each.max_norm is not None
    ]
    if found and settings:
        name, each = found[0]
        raise ValueError(
            f"model: {name} is a {type(each).__name__} with max_norm={each.max_norm:g}: its forward shortens rows of "
            f"the words that a rank sees, but not the copies under {' and '.join(settings)}. Legal: max_norm=None, or "
            f"one rank of data and of sequence, weights without masters, all on the device"
        )
