"""Lets engines of one device take turns within their steps: over one frozen base, or to hide each other's loads.

Note: schedule/abreast.py has the turns, many/turnstile.py who is next, memory/frozen_slots.py what all of them read.
Engines over one base read one place on the device, so their lists must gather it alike.  Other engines share nothing:
while one computes a stage, the next stage of another is on its way.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable

from colossal_lite.engine.engine import Engine
from colossal_lite.zero.stage_weights import StageGather

BY_ITSELF = "by itself"


def turns_of(engine: Engine) -> Hashable | None:
    """Equal for engines that may take turns: the shared weights of each stage, and what orders their loads. BY_ITSELF
    for one that shares none, None for one that gathers no stages."""
    parts, config = engine._parts, engine.config
    shared = [(c.spec.key.stages, c.record) for c in parts.built.frozen if c.shares_slots]
    if not isinstance(parts.weights, StageGather):
        return None
    if not shared:
        return BY_ITSELF
    pipeline = config.parallel.pipeline.model_dump_json()
    return tuple(shared), pipeline, parts.built.stages.trainable, config.gradient_accumulation, config.zero


def take_turns(engine: Engine, turn: Callable[[], object] | None) -> None:
    """Call `turn` where a turn of this engine's step begins, in the thread of the step, which goes on when it returns.
    None: no more. The engine has turns (`turns_of`)."""
    assert isinstance(engine._parts.weights, StageGather)
    engine._parts.weights.on_turn = turn
