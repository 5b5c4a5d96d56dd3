"""Draws charts as SVG text: scales with round ticks, axes, legends, and boxes with words and tips, light and dark."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape

from colossal_lite.observe.tables import unit_of

PALETTE = (
    *("#4c8dd6", "#f2a65a", "#62b66a", "#b68ad1", "#63c1bb", "#e6c84f", "#e8706a"),
    *("#a98467", "#a7abb0", "#d98cb3", "#8fae3c", "#3f6f9e", "#7d6bb0", "#c9b08f"),
)
"""As many as memory has kinds."""
CHARACTER = 6.7
"""Width of a character of a drawing, in pixels."""
STYLE = (
    "svg{color:#1f2328;background:#fff}svg text{fill:currentColor;pointer-events:none}svg text.in{fill:#111}"
    "svg .grid{stroke:currentColor;stroke-opacity:.15}"
    "@media(prefers-color-scheme:dark){svg{color:#d5dbe3;background:#16191d}}"
)


@dataclass(frozen=True)
class Scale:
    """Maps values from `low` to `high` to pixels from `start` to `stop`, and labels them in one unit."""

    low: float
    high: float
    start: float
    stop: float
    units: Sequence[tuple[str, float]] = (("", 1.0),)

    @property
    def unit(self) -> str:
        return unit_of(self.high, self.units)[0]

    def at(self, value: float) -> float:
        share = (value - self.low) / (self.high - self.low or 1.0)
        return self.start + share * (self.stop - self.start)

    def ticks(self, most: int = 6) -> list[tuple[float, str]]:
        """At most so many round values, each with its label in the unit of the scale."""
        factor = unit_of(self.high, self.units)[1]
        span = (self.high - self.low) / factor
        if not span > 0:
            return [(self.low, f"{self.low / factor:g}")]
        power = 10.0 ** math.floor(math.log10(span / most))
        step = next(power * n for n in (1, 2, 5, 10, 20) if span / (power * n) < most)
        digits = max(0, -math.floor(math.log10(step) + 1e-9))
        first = math.ceil(self.low / factor / step - 1e-9)
        last = math.floor(self.high / factor / step + 1e-9)
        return [(n * step * factor, f"{n * step:,.{digits}f}") for n in range(first, last + 1)]


def text(x: float, y: float, words: str, anchor: str = "start", css: str = "") -> str:
    css = f' class="{css}"' if css else ""
    return f'<text x="{x:.2f}" y="{y:.2f}" text-anchor="{anchor}"{css}>{escape(words)}</text>'


def box(
    x: float, y: float, width: float, height: float, fill: str, tip: str = "", words: str = ""
) -> Sequence[str]:
    """A rectangle with a tip, and with words in its middle if they fit."""
    told = f"<title>{escape(tip)}</title>" if tip else ""
    rect = (
        f'<rect x="{x:.2f}" y="{y:.2f}" width="{width:.2f}" height="{height:.2f}" fill="{fill}">{told}</rect>'
    )
    fits = words and width >= len(words) * CHARACTER + 1
    return [rect, text(x + width / 2, y + height / 2 + 4, words, "middle", "in")] if fits else [rect]


def line(x1: float, y1: float, x2: float, y2: float, *, dashed: bool = False, grid: bool = False) -> str:
    look = 'class="grid"' if grid else 'stroke="currentColor"'
    dashes = ' stroke-dasharray="6 3"' if dashed else ""
    return f'<line x1="{x1:.2f}" x2="{x2:.2f}" y1="{y1:.2f}" y2="{y2:.2f}" {look}{dashes}/>'


def curve(points: Iterable[tuple[float, float]], colour: str, *, dots: bool = False) -> Sequence[str]:
    """A line through points in pixels, with a dot at each if asked."""
    found = [(f"{x:.1f}", f"{y:.1f}") for x, y in points]
    path = " ".join(f"{x},{y}" for x, y in found)
    marks = [f'<circle cx="{x}" cy="{y}" r="3" fill="{colour}"/>' for x, y in found] if dots else []
    return [f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.8"/>', *marks]


def y_axis(scale: Scale, left: float, right: float, name: str) -> list[str]:
    """Grid lines with labels to their left, and the name with its unit above."""
    lines = [line(left, scale.at(value), right, scale.at(value), grid=True) for value, _ in scale.ticks()]
    labels = [text(left - 6, scale.at(value) + 4, label, "end") for value, label in scale.ticks()]
    return [*lines, *labels, text(2, scale.stop - 10, named(name, scale))]


def x_axis(scale: Scale, bottom: float, name: str) -> list[str]:
    """Ticks with labels beneath, and the name with its unit under them."""
    lines = [line(scale.start, bottom, scale.stop, bottom)]
    ticks = scale.ticks(max(2, int((scale.stop - scale.start) / 70)))
    lines += [line(scale.at(value), bottom, scale.at(value), bottom + 4) for value, _ in ticks]
    labels = [text(scale.at(value), bottom + 16, label, "middle") for value, label in ticks]
    return [*lines, *labels, text((scale.start + scale.stop) / 2, bottom + 32, named(name, scale), "middle")]


def named(name: str, scale: Scale) -> str:
    return f"{name} ({scale.unit})" if scale.unit else name


def legend(entries: Mapping[str, str], y: float, left: float, width: float) -> tuple[list[str], float]:
    """Names beside boxes of their colours, in as many lines as needed; and the y below them."""
    x, out = left, list[str]()
    for name, colour in entries.items():
        wide = 26 + len(name) * CHARACTER
        if x > left and x + wide > width:
            x, y = left, y + 16
        out += [*box(x, y, 10, 10, colour), text(x + 14, y + 9, name)]
        x += wide
    return out, y + 16


def drawing(width: float, height: float, elements: Iterable[str], title: str) -> str:
    """An SVG image of these elements; `title` is its text for screen readers."""
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:.0f}" height="{height:.0f}" '
            f'viewBox="0 0 {width:.0f} {height:.0f}" role="img" aria-label="{escape(title)}" '
            'font-family="ui-monospace, Menlo, Consolas, DejaVu Sans Mono, monospace" font-size="11">',
            f"<style>{STYLE}</style>",
            *elements,
            "</svg>",
        ]
    )
