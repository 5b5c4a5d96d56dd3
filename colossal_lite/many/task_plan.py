"""Plans one task before it trains: its settings within a device budget, and the bytes that it takes.

Note: what can be planned.
A model that a function builds, with the built-in loss, on samples of ids and labels.  What others need, only a step
shows: their settings stay as they are, and their bytes are not known.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import Tensor, nn

from colossal_lite.config.config import Config
from colossal_lite.many.task import Task, makes_data
from colossal_lite.numerics.generators import generators_kept, seed_from
from colossal_lite.observe.printed_lines import tell
from colossal_lite.planner.dry_run import ValuesError
from colossal_lite.planner.planner import plan
from colossal_lite.planner.run_plan import RunPlan
from colossal_lite.planner.spill import spill


def settings_of(task: Task, shared: Mapping[str, Any], data: Any) -> Config:
    """The settings of a task; under a device budget, those by which it trains within it (planner/spill.py)."""
    config = Config.load(task.settings(shared))
    tokens = _tokens_of(task, data)
    is_alone = task.devices == 1  # the ways are those of one device
    if (
        config.memory.device_budget is None
        or isinstance(task.build, nn.Module)
        or tokens is None
        or not is_alone
    ):
        return config
    found = spill(config, task.build, batch=task.global_batch, sequence=tokens)
    if len(found.ways) > 1:
        taken = "* is taken" if found.chosen else "none fits"
        tell(f"{task.name}: ways to train within memory.device_budget; {taken}\n{found}")
    return Config.load(config, found.options)


def plan_of(task: Task, shared: Mapping[str, Any]) -> RunPlan | None:
    """Bytes of a step of a task on each of its devices; None where they are not known. Raises ConfigError for a task
    that cannot be planned, and ValueError for data without a length."""
    data = data_of(task.data, Config.load(task.settings(shared)).seed, "data")
    tokens = _tokens_of(task, data)
    if tokens is None or isinstance(task.build, nn.Module):
        return None
    try:
        return plan(
            settings_of(task, shared, data),
            task.build,
            batch=task.global_batch,
            sequence=tokens,
            world_size=task.devices,
        )
    except ValuesError:
        return None


def _tokens_of(task: Task, data: Any) -> int | None:
    """Tokens of the first sample; None for a task that cannot be planned."""
    has_rows = len(data) and hasattr(data, "__getitem__") and task.criterion is None
    row, inputs = data[0] if has_rows else None, None
    if isinstance(row, Mapping):
        inputs = row.get("input_ids")
    elif isinstance(row, tuple | list) and row:
        inputs = row[0]
    ids = torch.as_tensor(inputs) if isinstance(inputs, Tensor | list) else None
    return len(ids) if ids is not None and ids.dim() == 1 and not ids.is_floating_point() else None


def data_of(data: Any, seed: int, use: Literal["data", "evaluate"]) -> Any:
    """A dataset, or what a function of no argument returns. It draws by `seed` and `use` alone, each time that it is
    called. So one function gives other samples to train on than to evaluate on.

    Raises ValueError for data without a length."""
    found = data
    if makes_data(data):
        with generators_kept():
            seed_from(use, seed)
            found = data()
    if not hasattr(found, "__len__"):
        raise ValueError(f"{use}: a {type(found).__name__} has no length; legal: a dataset with one")
    return found
