"""Computes the learning rate of a step: constant, linear, cosine, one_cycle, polynomial or wsd, with warm-up."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from colossal_lite.config.schema import LRSchedulerConfig


def learning_rate_factor(config: LRSchedulerConfig, step: int) -> float:
    """Learning rate of optimizer step `step` (from 0) over its peak; `final_ratio` from `total_steps` on."""
    if config.type == "constant":
        return 1.0
    assert config.total_steps is not None
    warmup, total, final = config.warmup_steps, config.total_steps, config.final_ratio
    if config.type == "one_cycle" and step < warmup:
        return config.start_ratio + (1.0 - config.start_ratio) * _half_cosine(step / warmup)
    if step < warmup:
        return (step + 1) / (warmup + 1)
    if config.type == "wsd":
        assert config.decay_steps is not None
        warmup = total - config.decay_steps
    done = min(max((step - warmup) / max(total - warmup, 1), 0.0), 1.0)
    match config.type:
        case "cosine" | "one_cycle":
            left = 1.0 - _half_cosine(done)
        case "polynomial":
            left = (1.0 - done) ** config.power
        case _:
            left = 1.0 - done
    return final + (1.0 - final) * left


def factor_by(lr_lambda: Callable[[int], float], step: int) -> float:
    """What a function of the user's own gives for `step`. Raises ValueError for anything but a factor."""
    given = lr_lambda(step)
    try:
        factor = float(given)
    except (TypeError, ValueError):
        factor = math.nan
    if not (math.isfinite(factor) and factor >= 0):
        raise ValueError(
            f"lr_lambda: it gives {given!r} for step {step}; legal: a finite number >= 0. It is a factor "
            f"on optimizer.lr and on the lr of each group"
        )
    return factor


def told_of_end(config: LRSchedulerConfig, steps: int) -> str:
    """The notice for a run of more steps than its schedule; "" for any other."""
    if config.type == "constant" or config.total_steps is None or steps <= config.total_steps:
        return ""
    return (
        f"lr_scheduler.total_steps={config.total_steps} is less than the run has, {steps}: from step "
        f"{config.total_steps + 1} on the learning rate is {config.final_ratio:g} of its peak"
    )


def _half_cosine(x: float) -> float:
    """From 0 at x = 0 to 1 at x = 1."""
    return 0.5 * (1.0 - math.cos(math.pi * x))
