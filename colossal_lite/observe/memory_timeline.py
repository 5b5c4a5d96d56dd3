"""Draws the memory of a rank over the moments of a step, by kind and tier, beside the plan's forecast.

Note: moments.
Model state is allocated once, so its levels are flat.  `activations` are the bytes alive at the end of a moment.
`temporaries` are the rest of the peak within it.  The highest column is the peak of the report.  The forecasts are
those of `plan`, for the worst moment.
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass

from colossal_lite.observe.svg import CHARACTER, PALETTE, Scale, box, drawing, legend, line, text, y_axis
from colossal_lite.observe.tables import BYTES, Rows, size


@dataclass(frozen=True)
class Level:
    """Bytes of one kind on one tier: at each moment, and the plan's maximum."""

    kind: str
    tier: str
    measured_bytes: tuple[int, ...]
    forecast_bytes: int | None
    """None without a forecast."""


@dataclass(frozen=True)
class Peak:
    """Bytes of one kind at the highest moment of its tier, beside the plan's forecast."""

    kind: str
    tier: str
    held_bytes: int
    plan_bytes: int | None


@dataclass(frozen=True)
class MemoryTimeline:
    """The levels of a step; every one has as many measurements as there are moments."""

    moments: tuple[str, ...]
    levels: tuple[Level, ...]

    @property
    def tiers(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(level.tier for level in self.levels))

    def totals_bytes(self, tier: str) -> tuple[int, ...]:
        """Bytes of all kinds together, at each moment."""
        of_tier = [level.measured_bytes for level in self.levels if level.tier == tier]
        return tuple(map(sum, zip(*of_tier, strict=True)))

    def peak_bytes(self, tier: str) -> int:
        return max(self.totals_bytes(tier), default=0)

    def forecast_bytes(self, tier: str) -> int | None:
        """The plan's peak; None where a part of it has no forecast."""
        of_tier = [level.forecast_bytes for level in self.levels if level.tier == tier]
        return None if None in of_tier else sum(held for held in of_tier if held is not None)

    def json(self) -> str:
        """Moments and levels as JSON; `parse` reads it."""
        return json.dumps(asdict(self))

    @classmethod
    def parse(cls, text: str) -> MemoryTimeline:
        """Reads the text that `json` has written."""
        found = json.loads(text)
        levels = (
            Level(row["kind"], row["tier"], tuple(row["measured_bytes"]), row["forecast_bytes"])
            for row in found["levels"]
        )
        return cls(tuple(found["moments"]), tuple(levels))

    def __str__(self) -> str:
        """Bytes of each kind at the highest moment of its tier, and the plan's maximum."""
        rows = []
        for tier in self.tiers:
            totals = self.totals_bytes(tier)
            at = totals.index(max(totals))
            here = [level for level in self.levels if level.tier == tier]
            rows += [Peak(each.kind, tier, each.measured_bytes[at], each.forecast_bytes) for each in here]
            when = f", at {self.moments[at]}" if min(totals) < max(totals) else ""
            rows.append(Peak(f"all{when}", tier, totals[at], self.forecast_bytes(tier)))
        return str(Rows(rows))

    def svg(self, width: int = 960) -> str:
        """A chart for each tier: a column for each moment, with its kinds stacked. A dashed line marks the plan's peak.
        The tip of each box shows its moment, kind and bytes."""
        kinds = dict.fromkeys(level.kind for level in self.levels if any(level.measured_bytes))
        colours = {kind: PALETTE[number % len(PALETTE)] for number, kind in enumerate(kinds)}
        lines, y = legend(colours, 24, 4, width)
        for tier in self.tiers:
            forecast_bytes, peak_bytes = self.forecast_bytes(tier), self.peak_bytes(tier)
            unknown = [lv.kind for lv in self.levels if lv.tier == tier and lv.forecast_bytes is None]
            plan = f"no plan of {', '.join(unknown)}" if unknown else f"plan {size(forecast_bytes or 0)}"
            lines.append(text(4, y + 16, f"{tier}: peak {size(peak_bytes)}, {plan}"))
            most = max(peak_bytes, forecast_bytes or 0) or 1
            scale = Scale(0.0, most, y + 210.0, y + 50.0, BYTES)
            x = Scale(0.0, max(1, len(self.moments)), 62.0, width - 10.0)
            lines += y_axis(scale, x.start, x.stop, "held")
            for level in (level for level in self.levels if level.tier == tier):
                lines += self._boxes(level, x, scale, colours.get(level.kind, PALETTE[-1]))
            if forecast_bytes is not None:
                at = scale.at(forecast_bytes)
                lines += [line(x.start, at, x.stop, at, dashed=True), text(x.stop, at - 4, "plan", "end")]
            lines += self._names(x, scale.start)
            y += 234
        title = "moments of a step: F, B forward and backward of a block, O output of the stage, U update of a chunk"
        return drawing(width, y, [text(4, 16, title), *lines], title)

    def _boxes(self, level: Level, x: Scale, scale: Scale, colour: str) -> list[str]:
        """The column parts of one kind, on top of the kinds before it."""
        under = self.levels[: self.levels.index(level)]
        lines: list[str] = []
        for number, (moment, held_bytes) in enumerate(zip(self.moments, level.measured_bytes, strict=True)):
            base = sum(each.measured_bytes[number] for each in under if each.tier == level.tier)
            left, right = round(x.at(number)), round(x.at(number + 1))  # whole pixels: no seams
            top, bottom = round(scale.at(base + held_bytes)), round(scale.at(base))
            tip = f"{moment}: {level.kind} {size(held_bytes)}"
            lines += box(left, top, right - left, bottom - top, colour, tip)
        return lines

    def _names(self, x: Scale, bottom: float) -> list[str]:
        """Names of the moments under the columns, as many as fit."""
        heads = {"forward": "F", "backward": "B", "update": "U", "output": "O"}
        names = []
        for moment in self.moments:
            head, _, tail = moment.partition(" ")
            names.append(heads.get(head, head) + tail.rpartition(".")[2])
        wide, needed = x.at(1) - x.start, CHARACTER * (1 + max(map(len, names), default=0))
        every = math.ceil(needed / wide)
        told = [(x.at(n + 0.5), name) for n, name in enumerate(names) if n % every == 0]
        return [
            line(x.start, bottom, x.stop, bottom),
            *(text(at, bottom + 13, name, "middle") for at, name in told),
        ]
