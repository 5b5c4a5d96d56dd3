"""Watches the lanes of updates, step by step, and chooses the mix of updates anew where the rates were wrong.

Note: when.
With `memory.update_on="auto"` the mix is chosen when an engine is built.  Computing hides
updates, so it is chosen again before the first step, if the machine's operations a second are known.  Without given
rates every step is watched.  The seconds of its links and updates stand beside those that rates predict for the same
work.  Every `WATCHED` steps the ranks agree.  If each of these steps was off on any rank, rates are corrected.  Then
the mix is chosen between two steps.
Given rates stay, so such a run repeats.  Under a budget, or with static shares, the mix stays, as the places of all
state count on it.  Bits are the same whatever the mix.  Cost: one exchange of six numbers in `WATCHED` steps.
Source: arXiv 2410.21316.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import astuple

from torch import Tensor

from colossal_lite.engine.engine_parts import EngineParts
from colossal_lite.engine.memory_report import LinkMarks, LinkRow
from colossal_lite.schedule.lane_watch import WATCHED, LaneSeconds, WatchedStep, computed_s, corrected, is_off
from colossal_lite.schedule.update_rates import Rates, operations_of
from colossal_lite.zero.optimizer import ChunkOptimizer

LANES = {"cpu": "host_s", "h2d": "up_s", "d2h": "down_s", "device": "device_s"}
"""The lane of each row of `link_report`."""


class UpdateWatch:
    """Watches one engine."""

    def __init__(self, parts: EngineParts, rest: Callable[[], object]) -> None:
        """`rest` brings all state to rest."""
        self._parts, self._rest, self._choice = parts, rest, parts.choice
        optimizer, mesh = parts.optimizer, parts.context.mesh
        self._optimizer = optimizer if isinstance(optimizer, ChunkOptimizer) else None
        self._may = (
            self._optimizer is not None and self._optimizer.can_choose_again
            and self._choice is not None and self._choice.is_found and not parts.config.parallel.pipeline.is_staged
        )  # fmt: skip
        self._is_first = True
        self._marks = LinkMarks(optimizer, parts.choice)
        self._steps: list[WatchedStep] = []
        self._computed_s = 0.0
        self._sequence_ranks = mesh.size("sequence")

    def begin(self, inputs: Sequence[Tensor]) -> bool:
        """Before a step on micro-batches `inputs` [B, T]: whether the mix was chosen anew. Collective."""
        if not self._may or self._choice is None:
            return False
        if self._is_first:
            self._is_first, config = False, self._parts.config
            tokens = sum(each.shape[:2].numel() for each in inputs) // self._sequence_ranks
            weights = sum(shape.numel() for shape in self._parts.built.trainable.values())
            recomputes = config.activation_checkpoint == "full"
            known = self._choice.expect(operations_of(weights, tokens, recomputes=recomputes))
            if known:
                self._choose()
            self._marks.begin()
            return known
        chooses = self._choice.learns and self._look()
        self._marks.begin()
        return chooses

    @contextmanager
    def computing(self) -> Iterator[None]:
        """Around the forward and backward of a step."""
        start_s = time.perf_counter()
        yield
        self._computed_s = time.perf_counter() - start_s

    def _look(self) -> bool:
        """Note the step that is over; after `WATCHED` of them agree whether all are off, and choose."""
        assert self._choice is not None and self._choice.rates is not None
        rows = self._marks.rows()
        measured, predicted = (
            {LANES[r.link]: v for r, v in _known(rows, name)} for name in ("busy_s", "predicted_s")
        )
        now_s = max(0.0, self._computed_s - sum(row.waited_s for row in rows))
        due_s = 0.0 if self._choice.computing is None else self._choice.computing.s
        self._steps.append(
            WatchedStep(LaneSeconds(**predicted, computed_s=due_s), LaneSeconds(**measured, computed_s=now_s))
        )
        if len(self._steps) < WATCHED:
            return False
        steps, self._steps = self._steps, []
        mine = [is_off(steps), *astuple(corrected(self._choice.rates, steps)), computed_s(steps)]
        with self._parts.context.mesh.ledger.paused():
            rows_of_all = self._parts.context.mesh.world.gather_json(mine)
        if not any(off for off, *_ in rows_of_all):
            return False
        least = [min(column) for column in zip(*(row[1:] for row in rows_of_all), strict=True)]
        self._choice.learn(Rates(*least[:-1]), max(row[-1] for row in rows_of_all))
        self._choice.notices.append(
            f"memory.rates: {WATCHED} steps took other seconds than predicted; the mix is chosen by what they took"
        )
        self._choose()
        return True

    def _choose(self) -> None:
        assert self._optimizer is not None and self._choice is not None
        self._rest()
        with self._parts.context.mesh.ledger.paused():
            self._optimizer.choose_again()
        self._choice.tell(self._parts.context.mesh.rank)


def _known(rows: Sequence[LinkRow], name: str) -> Iterator[tuple[LinkRow, float]]:
    for row in rows:
        if row.link in LANES and row.predicted_s is not None:
            yield row, getattr(row, name)
