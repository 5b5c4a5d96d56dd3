"""Formats bytes and seconds for people, and the rows of a report as an aligned table with units."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any, TypeVar

Row = TypeVar("Row")

BYTES = (("GiB", 2.0**30), ("MiB", 2.0**20), ("KiB", 2.0**10), ("B", 1.0))
SECONDS = (("s", 1.0), ("ms", 1e-3), ("us", 1e-6))


def unit_of(most: float, units: Sequence[tuple[str, float]]) -> tuple[str, float]:
    """The largest unit in which `most` is at least 1, and its factor."""
    return next((unit for unit in units if most >= unit[1]), units[-1])


def size(number: float) -> str:
    """Bytes, such as `1.50 MiB`."""
    unit, factor = unit_of(abs(number), BYTES)
    return f"{number / factor:,.{0 if factor == 1 else 2}f} {unit}"


def seconds(number: float) -> str:
    """Seconds, such as `12.5 ms`. From two minutes on as `2 min 05 s`, from two hours on as `2 h 05 min`."""
    if number >= 120:
        parts, names = divmod(round(number), 60), ("min", "s")
        if number >= 7200:
            parts, names = divmod(round(number / 60), 60), ("h", "min")
        return f"{parts[0]} {names[0]} {parts[1]:02} {names[1]}"
    unit, factor = unit_of(abs(number), SECONDS)
    return "0 s" if number == 0 else f"{number / factor:.3g} {unit}"


def told(name: str, value: Any) -> str:
    """A value by the unit in its field's name: bytes, seconds or a count; `-` for None."""
    if value is None:
        return "-"
    if name.endswith("_bytes"):
        return size(value)
    if name.endswith("_s"):
        return seconds(value)
    return f"{value:,}" if isinstance(value, int | float) else str(value)


def table(columns: Sequence[str], rows: Sequence[Sequence[str]], words: int = 1) -> str:
    """Lines of aligned columns under a header; the first `words` columns to the left, the others to the right."""
    lines = [columns, *rows]
    widths = [max(len(line[i]) for line in lines) for i in range(len(columns))]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if i < words else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    )


class Rows(tuple[Row, ...]):
    """Rows of a report, all of one dataclass. The tuple prints as a table, in the units of its field names."""

    def __str__(self) -> str:
        if not self:
            return "no rows"
        cells: list[dict[str, Any]] = [asdict(row) for row in self]  # type: ignore[call-overload]
        names = list(cells[0])
        words = sum(isinstance(value, str) for value in cells[0].values())
        heads = [name.removesuffix("_bytes").removesuffix("_s").replace("_", " ") for name in names]
        return table(heads, [[told(name, row[name]) for name in names] for row in cells], words)
