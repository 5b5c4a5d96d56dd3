"""Reports print in units that people read, aligned, within 100 columns; the rows keep their plain numbers."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from colossal_lite.distributed.ledger import Ledger, LedgerRow
from colossal_lite.engine.memory_report import LinkRow, MemoryReport, MemoryRow
from colossal_lite.observe.svg import Scale
from colossal_lite.observe.tables import BYTES, SECONDS, Rows, seconds, size

MEMORY = (
    MemoryRow("weights", "cpu", 3 * 2**20, 3 * 2**20, 3 * 2**20),
    MemoryRow("activations", "cpu", 0, 1536, None),
    MemoryRow("optimizer", "host", 2**31, 2**31, 2**31),
)


def test_bytes_and_seconds_have_the_unit_that_fits() -> None:
    assert [size(n) for n in (0, 1023, 1536, 2**20, 5 * 2**40)] == [
        "0 B", "1,023 B", "1.50 KiB", "1.00 MiB", "5,120.00 GiB",
    ]  # fmt: skip
    assert [seconds(s) for s in (0, 2.5e-7, 4.2e-5, 0.0125, 1, 119, 125, 3 * 3600 + 300)] == [
        "0 s", "0.25 us", "42 us", "12.5 ms", "1 s", "119 s", "2 min 05 s", "3 h 05 min",
    ]  # fmt: skip


def test_a_memory_report_prints_as_a_table_with_the_total_of_each_tier() -> None:
    report = MemoryReport(MEMORY)
    assert report == MEMORY and report[0].now_bytes == 3145728
    assert str(report).splitlines() == [
        "kind         tier       now      peak  forecast",
        "weights      cpu   3.00 MiB  3.00 MiB  3.00 MiB",
        "activations  cpu        0 B  1.50 KiB         -",
        "optimizer    host  2.00 GiB  2.00 GiB  2.00 GiB",
        "total        cpu   3.00 MiB  3.00 MiB         -",
        "total        host  2.00 GiB  2.00 GiB  2.00 GiB",
    ]


def test_links_and_the_ledger_print_as_tables_and_say_when_there_is_nothing() -> None:
    assert str(Rows([LinkRow("h2d", 2048, 0.5)])) == (
        "link     moved  waited  busy  predicted\nh2d   2.00 KiB  500 ms   0 s          -"
    )
    assert str(Rows[LinkRow]()) == "no rows"
    ledger = Ledger()
    assert str(ledger) == "nothing was sent\nwaited for other ranks: 0 s"
    ledger.add("all_reduce", "data", 4096)
    ledger.waits.add(1.0, 1.002)
    assert str(ledger).splitlines() == [
        "operation   axis  calls   payload", "all_reduce  data      1  4.00 KiB", "waited for other ranks: 2 ms",
    ]  # fmt: skip
    assert ledger.rows() == (LedgerRow("all_reduce", "data", 1, 4096),)


@dataclass(frozen=True)
class Wide:
    kind: str
    first_bytes: int
    wait_s: float
    calls: int


def test_columns_are_aligned_whatever_stands_in_them() -> None:
    lines = str(Rows([Wide("a", 10**12, 3.0, 10**6), Wide("of several words", 0, 1e-9, 1)])).splitlines()
    assert len({len(line) for line in lines}) == 1 <= len(lines[0]) <= 100


@pytest.mark.parametrize(
    ("low", "high", "units", "labels", "unit"),
    [
        (0.0, 10.0, (("", 1.0),), ["0", "2", "4", "6", "8", "10"], ""),
        (2.31, 2.39, (("", 1.0),), ["2.32", "2.34", "2.36", "2.38"], ""),
        (0.0, 3.1 * 2**20, BYTES, ["0", "1", "2", "3"], "MiB"),
        (0.0, 0.0042, SECONDS, ["0", "1", "2", "3", "4"], "ms"),
        (0.0, 5e5, (("", 1.0),), ["0", "100,000", "200,000", "300,000", "400,000", "500,000"], ""),
        (1.0, 1.0, (("", 1.0),), ["1"], ""),
    ],
)
def test_ticks_are_round_within_the_scale_and_in_its_unit(
    low: float, high: float, units: tuple[tuple[str, float], ...], labels: list[str], unit: str
) -> None:
    scale = Scale(low, high, 100.0, 500.0, units)
    ticks = scale.ticks()
    assert [label for _, label in ticks] == labels and scale.unit == unit
    assert all(low <= value <= high * (1 + 1e-9) and 100 <= scale.at(value) <= 500.001 for value, _ in ticks)
