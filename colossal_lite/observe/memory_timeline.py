"""Draws the memory of a rank over the moments of a step, by kind and tier, beside the plan's forecast.

Note: moments.
Model state is allocated once, so its levels are flat.  `activations` are the bytes alive at the end of a moment, and
`temporaries` the rest of the peak within it.  The highest column is the peak of the report.  Forecasts are those of
`plan`, for the worst moment.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from html import escape

from colossal_lite.schedule.drawing import drawing

COLOURS = ("#4c78a8", "#f58518", "#54a24b", "#b279a2", "#72b7b2", "#eeca3b", "#e45756", "#9d755d", "#bab0ac")


@dataclass(frozen=True)
class Level:
    """Bytes of one kind on one tier: at each moment, and at the most by the plan."""

    kind: str
    tier: str
    measured_bytes: tuple[int, ...]
    forecast_bytes: int | None
    """None without a forecast."""


@dataclass(frozen=True)
class MemoryTimeline:
    """The levels of a step; every one has as many measurements as there are moments."""

    moments: tuple[str, ...]
    levels: tuple[Level, ...]

    @property
    def tiers(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(level.tier for level in self.levels))

    def totals_bytes(self, tier: str) -> tuple[int, ...]:
        """All kinds together, at each moment."""
        of_tier = [level.measured_bytes for level in self.levels if level.tier == tier]
        return tuple(map(sum, zip(*of_tier, strict=True)))

    def peak_bytes(self, tier: str) -> int:
        return max(self.totals_bytes(tier), default=0)

    def forecast_bytes(self, tier: str) -> int | None:
        """The peak by the plan; None where a part of it has no forecast."""
        of_tier = [level.forecast_bytes for level in self.levels if level.tier == tier]
        return None if None in of_tier else sum(held for held in of_tier if held is not None)

    def json(self) -> str:
        """Moments and levels as JSON; `parse` reads it."""
        return json.dumps(asdict(self))

    @classmethod
    def parse(cls, text: str) -> MemoryTimeline:
        """What `json` has written."""
        found = json.loads(text)
        levels = (
            Level(row["kind"], row["tier"], tuple(row["measured_bytes"]), row["forecast_bytes"])
            for row in found["levels"]
        )
        return cls(tuple(found["moments"]), tuple(levels))

    def svg(self, width: int = 960) -> str:
        """A chart for each tier: a column for each moment, its kinds stacked, and a dashed line where the plan has the
        peak.  Every box has its moment, kind and bytes as a tooltip."""
        left, height, top = 110, 160, 30
        lines, y = [], top
        for tier in self.tiers:
            forecast_bytes, peak = self.forecast_bytes(tier), self.peak_bytes(tier)
            scale = height / (max(peak, forecast_bytes or 0) or 1)
            said = "not foretold" if forecast_bytes is None else f"foretold {forecast_bytes:,}"
            lines.append(f'<text x="4" y="{y - 4}">{escape(tier)}: peak {peak:,} bytes, {said}</text>')
            lines += self._columns(
                tier, left, y + height, (width - left - 10) / max(1, len(self.moments)), scale
            )
            if forecast_bytes is not None:
                at = y + height - forecast_bytes * scale
                lines.append(
                    f'<line x1="{left}" x2="{width - 10}" y1="{at:.2f}" y2="{at:.2f}" stroke="black" '
                    'stroke-dasharray="6 3"/>'
                )
            y += height + top
        for number, kind in enumerate(dict.fromkeys(level.kind for level in self.levels)):
            colour = COLOURS[number % len(COLOURS)]
            lines.append(f'<rect x="4" y="{y + 16 * number}" width="10" height="10" fill="{colour}"/>')
            lines.append(f'<text x="20" y="{y + 16 * number + 9}">{escape(kind)}</text>')
        kinds = len({level.kind for level in self.levels})
        return drawing(width, y + 16 * kinds + 8, "memory over the moments of a step", lines)

    def _columns(self, tier: str, left: float, bottom: float, w: float, scale: float) -> list[str]:
        kinds = list(dict.fromkeys(level.kind for level in self.levels))
        lines = []
        for number, moment in enumerate(self.moments):
            at = bottom
            for level in (level for level in self.levels if level.tier == tier):
                held = level.measured_bytes[number]
                h = held * scale
                at -= h
                colour = COLOURS[kinds.index(level.kind) % len(COLOURS)]
                tip = escape(f"{moment}: {level.kind} {held:,} bytes")
                lines.append(
                    f'<rect x="{left + number * w:.2f}" y="{at:.2f}" width="{w:.2f}" height="{h:.2f}" '
                    f'fill="{colour}"><title>{tip}</title></rect>'
                )
        return lines
