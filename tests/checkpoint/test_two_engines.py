"""Two engines of one context, such as a generator and its critic: each saves and loads its own."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch

import colossal_lite as cl
from colossal_lite.checkpoint.files import listed, verify
from tests.shared.pool import RankEnv, run_world


def two_engines(env: RankEnv, folder: str, slow: int) -> list[float]:
    """Two engines of one context, saved and loaded one after the other. One rank comes late to each call."""
    places = [Path(folder) / name for name in "ab"]
    with env.launch(dict(precision="fp64", zero=dict(stage=3), timeout_s=20)) as context:
        engines = []
        for seed in (0, 1):
            torch.manual_seed(seed)
            engines.append(cl.initialize(torch.nn.Linear(4, 6), context=context))
        before = [engine.full_state_dict() for engine in engines]
        for call in ("save", "load"):
            for engine, place in zip(engines, places, strict=True):
                if env.rank == slow:
                    time.sleep(0.3)
                getattr(engine, call)(place)
        after = [engine.full_state_dict() for engine in engines]
        faults = [fault for place in places for fault in verify(listed(place)[0])]
    assert not faults, faults
    return [float((a[n] - b[n]).abs().max()) for a, b in zip(before, after, strict=True) for n in a]


@pytest.mark.parametrize("slow", [0, 1])
def test_saves_and_loads_of_two_engines_of_one_context_are_apart(slow: int, tmp_path: Path) -> None:
    """Their messages once had the same keys: a rank heard those of the other engine's save."""
    assert run_world(two_engines, 2, str(tmp_path), slow) == [[0.0] * 4] * 2
