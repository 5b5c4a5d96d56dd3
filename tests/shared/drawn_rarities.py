"""Names what chance alone seldom brings together in a drawn case, and says which draw has which of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

RARE: tuple[Mapping[str, Any], ...] = (
    {"axis": "tensor", "tensor": "2d", "drive": "own loop", "ranks": 4},
    {"axis": "tensor", "tensor": "1d", "kv_heads": 2, "kind": "gpt", "ranks": 4},
    {"axis": "sequence", "sequence": "ring", "ranks": 4},  # a ring of two turns both ways at once
    {"axis": "sequence", "sequence": "ring_full", "kind": "gpt", "causal": False, "ranks": 2},
    {"axis": "tensor", "tensor": "1d", "zero": 3, "memory": "host", "ranks": 2},
    {"axis": "pipeline", "schedule": "zb-h1", "ranks": 2},
    {"axis": "data", "drive": "own loop", "kind": "hf-llama", "samples": 1, "ranks": 2},
    {"axis": "sequence", "sequence": "allgather_kv", "kind": "gpt", "ranks": 2},
    {"axis": "pipeline", "schedule": "gpipe", "kind": "own", "ranks": 2},
    {"axis": "sequence", "sequence": "ring", "kind": "gpt", "mask": "documents", "ranks": 2},
    {"axis": "pipeline", "tied": True, "ranks": 2},
    {"axis": "tensor", "tensor": "2.5d", "ranks": 2},
    {"axis": "pipeline", "schedule": "zb-v", "kind": "gpt", "ranks": 2},
    {"axis": "sequence", "sequence": "ulysses", "ranks": 2},
    {"axis": "tensor", "tensor": "1d", "tied": True, "ranks": 2},
    {"optimizer": "muon", "ranks": 1},
    {"precision": "split", "ranks": 1},
    {"precision": "bf16", "memory": "host", "load_before": 2, "ranks": 1},  # masters in records
    {"optimizer": "lamb", "ranks": 1},
    {"memory": "host", "ranks": 1},
    {"auxiliary": True, "ranks": 1},
    {"drive": "own loop", "ranks": 1},
    {"optimizer": "lion", "ranks": 1},
)
"""Settings that a draw then has, and the least number of ranks for them."""


def rare_of(world: int, number: int) -> Mapping[str, Any]:
    """What draw `number` has of RARE: nothing in each third one, else one after the other."""
    fitting = [rare for rare in RARE if rare["ranks"] <= world]
    return {} if number % 3 == 0 else fitting[(number - number // 3 - 1) % len(fitting)]
