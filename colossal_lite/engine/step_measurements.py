"""Writes the measurements of one step into a run's folder, for its report: memory, traffic, and schedule beside
plan."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from colossal_lite.engine.engine import Engine
from colossal_lite.observe.report import MEASURED, SCHEDULE


def leave_measurements(engine: Engine, folder: Path | None) -> None:
    """Write measured.json and schedule.json of the last step of this rank; on ranks with `folder` None nothing.

    Memory over the step is there if a step was metered. Collective over the pipeline. Raises OSError."""
    if folder is None:
        engine.timeline()
        return
    schedule, memory, context = engine.schedule_report(), engine.memory_report(), engine.context
    metered = any(row.kind == "activations" for row in memory)
    measured = {
        "where": f"{context.mesh.layout.describe()} on {context.device.type}",
        "memory": _plain(memory),
        "timeline": json.loads(engine.memory_timeline().json()) if metered else None,
        "links": _plain(engine.link_report()),
        "sent": _plain(engine.ledger.rows()),
        "waited_s": engine.ledger.waited_s,
    }
    (folder / MEASURED).write_text(json.dumps(measured), encoding="utf-8")
    (folder / SCHEDULE).write_text(schedule.trace(), encoding="utf-8")


def _plain(rows: Iterable[Any]) -> list[dict[str, Any]]:
    return [asdict(row) for row in rows]
