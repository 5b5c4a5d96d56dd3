"""Refuses arguments of a run's loader that it has not, and counts that are no whole numbers."""

from __future__ import annotations

import inspect
import operator
from collections.abc import Collection, Iterable
from typing import Any

from colossal_lite.config.errors import nearest
from colossal_lite.engine.context import Context

ELSEWHERE = {
    "batch_size": "global_batch",
    "batchsize": "global_batch",
    "per_device_train_batch_size": "global_batch",
    "num_workers": "workers",
    "collate_fn": "collate",
    "data_collator": "collate",
    "max_steps": "steps",
    "num_steps": "steps",
    "epochs": "steps",
    "eval_dataset": "valid",
    "eval_steps": "evaluate_every",
    "eval_every": "evaluate_every",
    "save_steps": "save_every",
}
"""Names that other frameworks have for ours."""


def loader_names(*, less: Collection[str] = ()) -> list[str]:
    """The options of `context.dataloader`."""
    names = inspect.signature(Context.dataloader).parameters
    return [name for name in names if name not in ("self", "dataset", *less)]


def refuse_unknown(call: str, given: Iterable[str], legal: Collection[str]) -> None:
    """Raises ValueError for the first name that `call` has not, with the nearest that it has."""
    for name in given:
        if name not in legal:
            known = ELSEWHERE.get(name)
            near = known if known in legal else nearest(name, legal)
            hint = f"; did you mean {near!r}?" if near else ""
            raise ValueError(f"{call}: unknown argument {name!r}; legal: {', '.join(legal)}{hint}")


def whole(name: str, value: Any, legal: str, *, least: int = 1) -> int:
    """`value` as a whole number from `least` on. Raises ValueError for another, which names `legal`."""
    try:
        number = least - 1 if isinstance(value, bool) else operator.index(value)
    except TypeError:
        number = least - 1
    if number < least:
        raise ValueError(f"{name}: {value!r}; legal: {legal}")
    return number
