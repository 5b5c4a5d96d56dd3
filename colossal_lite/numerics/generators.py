"""Reads and keeps the global random generators of a process: torch's, Python's and numpy's.

Note: proofs run a user's code on small copies, which may draw.  They leave the generators as they were, so that a run
draws what it would draw without them.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

TORCH, PYTHON, NUMPY = "torch's own generator", "Python's random", "numpy.random"


def states(devices: Sequence[torch.device] = ()) -> Mapping[str, Any]:
    """The state of each generator, by its name. `devices`: of CUDA, whose generators are read too."""
    numpy = sys.modules.get("numpy")
    return {
        TORCH: [torch.get_rng_state(), *map(torch.cuda.get_rng_state, devices)],
        PYTHON: random.getstate(),
        **({} if numpy is None else {NUMPY: numpy.random.get_state()}),
    }


def drawn_between(before: Mapping[str, Any], after: Mapping[str, Any]) -> str:
    """The first generator that has drawn, or ""."""
    return next((name for name, state in after.items() if _differ(before.get(name, state), state)), "")


def _differ(one: Any, other: Any) -> bool:
    if isinstance(one, list):
        return not all(map(torch.equal, one, other))
    pairs = zip(one, other, strict=True)
    return any(bool((a != b).any()) if hasattr(a, "any") else a != b for a, b in pairs)


@contextmanager
def generators_kept(devices: Sequence[torch.device] = ()) -> Iterator[None]:
    """Context: the generators are behind it as they were before it."""
    before = states()
    with torch.random.fork_rng(devices):
        try:
            yield
        finally:
            random.setstate(before[PYTHON])
            if NUMPY in before:
                sys.modules["numpy"].random.set_state(before[NUMPY])
