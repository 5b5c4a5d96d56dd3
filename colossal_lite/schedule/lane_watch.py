"""Compares the measured lanes of updates with those that rates predict, and corrects the rates.

Note: lanes.
A lane is predicted for the work that it has done.  That is the bytes that a link has copied, or the elements that a
side has updated, over their rate.  The seconds that a step computes are one more.  A lane that takes less than half of
the longest one decides nothing, and is not compared.  A rate is corrected by the median of the lane's factors, so one
slow step changes nothing.
Source: arXiv 2410.21316, section 4 (the rates of a machine decide the mix).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median

from colossal_lite.schedule.update_rates import Rates

OFF = 0.15
"""Of a lane's predicted seconds."""
WATCHED = 20
"""Steps, in a row."""


@dataclass(frozen=True)
class LaneSeconds:
    """Seconds of a step's lanes, predicted by rates or measured; 0 where nothing is known."""

    host_s: float = 0.0
    up_s: float = 0.0
    down_s: float = 0.0
    device_s: float = 0.0
    computed_s: float = 0.0

    @property
    def all(self) -> tuple[float, ...]:
        return self.host_s, self.up_s, self.down_s, self.device_s, self.computed_s


@dataclass(frozen=True)
class WatchedStep:
    """The lanes of one step."""

    predicted: LaneSeconds
    measured: LaneSeconds

    @property
    def is_off(self) -> bool:
        """Whether a lane that counts differs from its prediction by more than `OFF` of that."""
        least = max(*self.predicted.all, *self.measured.all) / 2
        pairs = zip(self.predicted.all, self.measured.all, strict=True)
        return any(abs(took - due) > OFF * due for due, took in pairs if max(due, took) >= least > 0)


def is_off(steps: Sequence[WatchedStep]) -> bool:
    """Whether `WATCHED` steps are there, and each is off."""
    return len(steps) >= WATCHED and all(step.is_off for step in steps)


def corrected(rates: Rates, steps: Sequence[WatchedStep]) -> Rates:
    """The rates by which these steps would have been predicted. A lane without work keeps its rate."""

    def factor(lane: int) -> float:
        pairs = [(step.predicted.all[lane], step.measured.all[lane]) for step in steps]
        known = [due / took for due, took in pairs if due and took]
        return median(known) if known else 1.0

    host, up, down, device = (factor(lane) for lane in range(4))
    return replace(
        rates, host_update=rates.host_update * host, call_s=rates.call_s / host, up=rates.up * up,
        down=rates.down * down, device_update=rates.device_update * device,
    )  # fmt: skip


def computed_s(steps: Sequence[WatchedStep]) -> float:
    """Seconds that a step computes."""
    return median(step.measured.computed_s for step in steps)
