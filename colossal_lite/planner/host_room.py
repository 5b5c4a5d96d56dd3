"""Refuses a task whose model state is larger than the host and its disk, before anything is allocated.

Note: at the least.
Weights, masters and optimizer state count once for all devices of a task; gradients, activations and copies do not.  So
a task that passes may still be too large for its step.  Beside a GPU only the placements "host" and "disk" are bounded,
with their weights at ZeRO stage 3.  A build that fails on meta is left to its worker.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable

import torch
from torch import nn

from colossal_lite.config.config import Config
from colossal_lite.distributed.send_buffer import physical_bytes
from colossal_lite.numerics.optimizers import assign_groups, groups_of, rule_of
from colossal_lite.numerics.precision import Precision, wide_as
from colossal_lite.numerics.random import on_meta
from colossal_lite.observe.tables import size


def room_fault(build: nn.Module | Callable[[], nn.Module], config: Config) -> str:
    """Why the host has no room for the model state of a task; "" if it has, or if that is not known. Raises ValueError
    for a group of the optimizer that matches no parameter."""
    memory, has_gpu = config.memory, torch.cuda.is_available()
    if has_gpu and memory.placement not in ("host", "disk"):
        return ""
    try:
        model = build if isinstance(build, nn.Module) else on_meta(build)
    except Exception:  # the user's function raises: its worker tells it, as the end of this task alone
        return ""
    needed = sum(state_bytes(model, config, counts_weights=not has_gpu or config.zero.stage == 3))
    host_bytes, disk_bytes = physical_bytes(), 0
    disk_dir = os.path.expanduser(memory.disk_dir or "")
    if os.path.isdir(disk_dir):
        disk_bytes = shutil.disk_usage(disk_dir).free
    if needed <= host_bytes + disk_bytes:
        return ""
    disk = f" and {size(disk_bytes)} are free in {memory.disk_dir}" if memory.disk_dir else ""
    return (
        f"weights and optimizer state take {size(needed)} at the least; the host has {size(host_bytes)}{disk}; legal: "
        f"a smaller model, narrower optimizer.moments, or a memory.disk_dir with room for the rest"
    )


def state_bytes(model: nn.Module, config: Config, *, counts_weights: bool = True) -> tuple[int, int]:
    """Weights, and masters with optimizer states, of a model, each once."""
    precision, groups = Precision.of(config.precision), groups_of(config.optimizer)
    numels = {name: p.numel() for name, p in model.named_parameters() if p.requires_grad}
    weights = sum(p.numel() for p in model.parameters()) * precision.compute.itemsize
    records, of = 0, assign_groups(numels, groups)
    for name, numel in numels.items():
        rule = rule_of(groups[of[name]])
        width = (rule.narrow or wide_as(precision.master)).itemsize
        records += numel * len(rule.states) * width + numel * precision.master_copy_bits // 8
    return weights * counts_weights, records
