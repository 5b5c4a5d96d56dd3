"""Launches ranks: creates a context from the environment, and runs the command `colossal-lite` and its `doctor`.

May import: kernels, sharding, schedule, config, models, numerics, observe, distributed, memory, checkpoint, parallel,
zero, planner, engine, many.  Read first: `start`.  Its names are loaded on first use, so the command starts without
torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from colossal_lite import stands_aside

if TYPE_CHECKING:
    from .env import LaunchError as LaunchError
    from .many_tasks import train_many as train_many
    from .script_end import options as options
    from .start import findings as findings
    from .start import launch as launch

_MODULE_OF = {
    "LaunchError": "env",
    "findings": "start",
    "launch": "start",
    "options": "script_end",
    "train_many": "many_tasks",
}
__all__ = sorted(_MODULE_OF)

if not stands_aside(__name__) and not TYPE_CHECKING:

    def __getattr__(name: str) -> object:
        if name not in _MODULE_OF:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(importlib.import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
