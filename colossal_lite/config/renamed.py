"""Translates the setting names of before version 0.2, for one release.

Note: a configuration, a command-line option and the manifest of a checkpoint may have old names.  Each is translated
with one line of notice.  An old name beside its new one is an error.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

RENAMED: Mapping[str, str] = {
    "zero.reduce": "zero.reduce_every",
    "zero.reduction": "zero.sum_order",
    "zero.shard": "zero.shard_size",
    "optimizer.update": "optimizer.update_when",
    "memory.update": "memory.update_on",
    "memory.link_bandwidth": "memory.rates.up",
    "memory.link_latency_s": "memory.rates.latency_s",
    "memory.disk_bandwidth": "memory.rates.disk",
    "parallel.pipeline.chunks": "parallel.pipeline.stages_per_rank",
    "parallel.tensor.regather": "parallel.tensor.regather_inputs",
}
"""Old path -> new path, same value."""


def renamed(settings: Mapping[str, Any]) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Resolved settings (path -> value) by their new names, and the old names that were found."""
    found = tuple(path for path in settings if path in RENAMED)
    return {RENAMED.get(path, path): value for path, value in settings.items()}, found
