"""Writes report.html of a run from the files in its folder: curves, time, memory, schedule, configuration.

Note: one file.
It contains its drawings and its style, loads nothing from outside, and runs no script.  Where a file of the run is
missing, the page says which call writes it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from statistics import fmean, median
from typing import Any

from colossal_lite.config.whole_file import write_whole
from colossal_lite.observe.memory_timeline import MemoryTimeline
from colossal_lite.observe.schedule_report import ScheduleReport
from colossal_lite.observe.svg import PALETTE, Scale, curve, drawing, legend, x_axis, y_axis
from colossal_lite.observe.tables import seconds, size, told
from colossal_lite.schedule.plan import COMPUTE

REPORT, MEASURED, SCHEDULE = "report.html", "measured.json", "schedule.json"
TENSORS = "tensors alone: the process also holds Python and its libraries"
POINTS = 240
"""Most points of a curve; each is the mean of the steps that it stands for."""
STYLE = """
:root{color-scheme:light dark;--paper:#fff;--ink:#1f2328;--soft:#656d76;--rule:#d8dee4;--bar:#4c8dd6}
@media(prefers-color-scheme:dark){:root{--paper:#16191d;--ink:#d5dbe3;--soft:#939ba5;--rule:#30363d}}
*{box-sizing:border-box}
body{margin:0 auto;max-width:1400px;padding:16px;font:15px/1.5 system-ui,sans-serif}
body{background:var(--paper);color:var(--ink)}
h1{font-size:1.4em;margin:0 0 .3em;overflow-wrap:anywhere}h2{font-size:1.1em;margin:0 0 .4em}
section{margin:28px 0 0}p{margin:.3em 0;color:var(--soft)}
.cards{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,380px),1fr));gap:28px 36px;align-items:start}
.cards section{margin:0;min-width:0}.cards svg{width:100%;height:auto}
.scroll{overflow-x:auto}
.facts{display:grid;grid-template-columns:repeat(auto-fit,minmax(150px,1fr));gap:10px;margin:14px 0 0}
.facts div{border:1px solid var(--rule);border-radius:6px;padding:6px 10px}
.facts dt{color:var(--soft);font-size:.85em}.facts dd{margin:0;font-size:1.1em}dl{margin:0}
table{border-collapse:collapse;font-variant-numeric:tabular-nums}
th,td{text-align:left;padding:3px 18px 3px 0;border-bottom:1px solid var(--rule);font-weight:normal}
th{color:var(--soft)}td.n,th.n{text-align:right;white-space:nowrap}
.bars td{border:0;white-space:nowrap}.bars{width:100%}
.bars i{display:block;height:.8em;min-width:1px;background:var(--bar)}
.config{columns:2 560px;column-gap:36px;overflow-wrap:anywhere;font:13px/1.6 ui-monospace,Menlo,Consolas,monospace}
.config div{display:flex;gap:8px;justify-content:space-between;border-bottom:1px solid var(--rule);break-inside:avoid}
.config b{font-weight:normal;color:var(--soft);overflow-wrap:normal}.config span{text-align:right}
"""


@dataclass(frozen=True)
class RunFiles:
    """The files in the folder of a run; a missing file is empty."""

    folder: Path

    def rows(self, name: str) -> list[dict[str, Any]]:
        """Rows of a file of JSON lines. A last line that a kill cut short is left out; ValueError for any other."""
        path = self.folder / name
        lines = self.text(name).splitlines(keepends=True)
        whole = [line for line in lines if line.endswith("\n")]
        return [_parsed(path, line, number) for number, line in enumerate(whole, 1)]

    def text(self, name: str) -> str:
        """Bytes that are no UTF-8 are replaced, so that its line is named."""
        path = self.folder / name
        return path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""

    def mapping(self, name: str) -> dict[str, Any]:
        text = self.text(name)
        return _parsed(self.folder / name, text, 1) if text else {}


def _parsed(path: Path, text: str, number: int) -> dict[str, Any]:
    try:
        found = json.loads(text)
        if isinstance(found, dict):
            return found
    except ValueError:
        pass
    raise ValueError(f"{path}: line {number} is no JSON object; legal: the files as a run wrote them")


def write_report(folder: Path) -> Path:
    """Make report.html in the folder of a run; its path. Raises ValueError for a folder without the rows of a run."""
    path = folder / REPORT
    write_whole(path, report(folder))
    return path


def report(folder: Path) -> str:
    """The page, as HTML. Raises ValueError for a folder without the rows of a run, or with others than a run writes."""
    try:
        return _page(folder)
    except (KeyError, TypeError, AttributeError, json.JSONDecodeError) as error:
        raise ValueError(
            f"report: the files of {folder} are not those of a run of this version. {type(error).__name__}: {error}. "
            f"Legal: the files as a run wrote them"
        ) from error


def _page(folder: Path) -> str:
    files = RunFiles(folder)
    steps, timing = files.rows("metrics.jsonl"), files.rows("timing.jsonl")
    if not steps:
        raise ValueError(f"report: {folder} has no steps in metrics.jsonl; legal: the folder of a cl.Run")
    held_out, run, measured = (
        files.rows("evaluation.jsonl"),
        files.mapping("run.json"),
        files.mapping(MEASURED),
    )
    cards = [
        _section("Loss", _loss_chart(steps, held_out)),
        _section("Tokens per second", _rate_chart(timing)),
        _section("Learning rate", _chart("learning rate", {"lr": _points(steps, "lr")}, low=0.0)),
        _section("Where time went", _time_bars(files, measured)),
    ]
    sections = [
        _section("Memory over a step", *_memory(measured)),
        _section("Schedule of a step", *_schedule(files.text(SCHEDULE))),
        f'<section class="cards">{_beside(measured)}</section>',
        _section("Configuration", _settings(run)),
    ]
    name = escape(folder.resolve().name)
    where = f"<p>{escape(measured['where'])}</p>" if "where" in measured else ""
    return (
        f'<!doctype html>\n<html lang="en"><meta charset="utf-8"><title>{name}</title>'
        f'<meta name="viewport" content="width=device-width,initial-scale=1"><style>{STYLE}</style>\n'
        f"<h1>{name}</h1>{where}{_facts(steps, timing, held_out)}\n"
        f'<section class="cards">{"".join(cards)}</section>\n{"".join(sections)}</html>\n'
    )


def _section(title: str, body: str, note: str = "") -> str:
    told = f"<p>{escape(note)}</p>" if note else ""
    return f"<section><h2>{escape(title)}</h2>{told}{body}</section>\n"


def _facts(
    steps: Sequence[Mapping[str, Any]], timing: Sequence[Mapping[str, Any]], held_out: Sequence[Any]
) -> str:
    losses = [row["loss"] for row in held_out if row["loss"] is not None]
    skipped = sum(bool(row["skipped"]) for row in steps)
    found = {
        "steps": f"{steps[-1]['step']:,}",
        "tokens": f"{sum(row['tokens'] for row in steps):,}",
        "last loss": _number(steps[-1]["loss"]),
    }
    if skipped:
        found["skipped steps"] = f"{skipped:,}"
    if losses:
        found |= {"held-out loss, last": _number(losses[-1]), "held-out loss, lowest": _number(min(losses))}
    if timing:
        found["time in steps"] = seconds(sum(row["step_s"] for row in timing))
        found["step, median"] = seconds(median(row["step_s"] for row in timing))
        found["memory of the process"] = size(timing[-1]["memory_bytes"])
    items = (f"<div><dt>{name}</dt><dd>{value}</dd></div>" for name, value in found.items())
    return f'<dl class="facts">{"".join(items)}</dl>'


def _number(value: float | None) -> str:
    return "not finite" if value is None else f"{value:.4f}"


# ---- curves ----


def _points(rows: Sequence[Mapping[str, Any]], name: str) -> list[tuple[float, float]]:
    """Step and value of the rows that have one, at most POINTS of them."""
    found = [(row["step"], row[name]) for row in rows if row.get(name) is not None]
    each = -(-len(found) // POINTS) or 1
    runs = (found[i : i + each] for i in range(0, len(found), each))
    return [(fmean(step for step, _ in run), fmean(value for _, value in run)) for run in runs]


def _chart(name: str, curves: Mapping[str, Sequence[tuple[float, float]]], low: float | None = None) -> str:
    """Curves over steps, on one axis; the further ones have a dot at each point. `low`: the axis begins there."""
    values = [value for points in curves.values() for _, value in points]
    if not values:
        return "<p>no finite value</p>"
    reach = [step for points in curves.values() for step, _ in points]
    width, height, top = 440, 270, 46
    bottom, low = height - 44.0, min(values) if low is None else low
    high = max(values) if max(values) > low else low + (abs(low) or 1.0)
    margin, aside = (high - low) / 20, (max(reach) - min(reach)) / 50  # no curve is on an edge
    y = Scale(low - margin * (low > 0), high + margin, bottom, top)
    x = Scale(min(reach) - aside, max(reach) + aside, 66.0, width - 14.0)
    colours = dict(zip(curves, PALETTE, strict=False))
    lines = legend(colours, 4, x.start, width)[0] if len(curves) > 1 else []
    lines += [*y_axis(y, x.start, x.stop, name), *x_axis(x, bottom, "step")]
    for number, (title, points) in enumerate(curves.items()):
        lines += curve(
            ((x.at(s), y.at(v)) for s, v in points), colours[title], dots=number > 0 or len(points) == 1
        )
    return drawing(width, height, lines, f"{name} over steps")


def _loss_chart(steps: Sequence[Mapping[str, Any]], held_out: Sequence[Mapping[str, Any]]) -> str:
    curves = {"training": _points(steps, "loss"), "held out": _points(held_out, "loss")}
    return _chart("nats per token", {name: points for name, points in curves.items() if points})


def _rate_chart(timing: Sequence[Mapping[str, Any]]) -> str:
    return _chart("tokens/s of all ranks", {"tokens/s": _points(timing, "tokens_per_s")}, low=0.0)


# ---- time ----


def _time_bars(files: RunFiles, measured: Mapping[str, Any]) -> str:
    """Time of the run since its last start, by span; then time of a step on rank 0."""
    events = files.mapping("trace.json").get("traceEvents", [])
    spans = [(e["name"], e["ts"] / 1e6, e["dur"] / 1e6) for e in events if e["ph"] == "X"]
    if not spans:
        return "<p>trace.json has no spans: run.step, run.evaluate and run.save record them</p>"
    whole_s = max(start + dur for _, start, dur in spans) - min(start for _, start, _ in spans)
    spent = _own_s(spans)
    spent["data and the rest"] = max(0.0, whole_s - sum(spent.values()))
    out = [f"<p>{seconds(whole_s)} since the run was last started</p>", _bars(spent, whole_s)]
    schedule = files.text(SCHEDULE)
    if schedule:
        timeline = ScheduleReport.parse(schedule).measured
        step_s, parts = timeline.makespan_s, dict[str, float]()
        for span in timeline.spans:
            if span.rank == 0 and span.action.resource == COMPUTE:
                name = {"F": "forward", "UPDATE": "update"}.get(span.action.kind, "backward")
                parts[name] = parts.get(name, 0.0) + span.end_s - span.start_s
        parts["idle"] = max(0.0, step_s - sum(parts.values()))
        waited = (
            f"; of it waiting for other ranks {seconds(measured['waited_s'])}"
            if "waited_s" in measured
            else ""
        )
        out += [
            f"<p>{seconds(step_s)} in the third step, without its update{waited}</p>",
            _bars(parts, step_s),
        ]
    return "".join(out)


def _own_s(spans: Sequence[tuple[str, float, float]]) -> dict[str, float]:
    """Seconds of each name, without spans nested in it: a save is within its step."""
    own, around = dict[str, float](), list[tuple[str, float]]()
    for name, start, dur in sorted(spans, key=lambda span: (span[1], -span[2])):
        while around and around[-1][1] <= start:
            around.pop()
        own[name] = own.get(name, 0.0) + dur
        if around:
            own[around[-1][0]] -= dur
        around.append((name, start + dur))
    return own


def _bars(spent: Mapping[str, float], whole_s: float) -> str:
    rows = (
        f'<tr><td>{escape(name)}<td class="n">{seconds(each)}<td class="n">{each / (whole_s or 1):.1%}'
        f'<td style="width:45%"><i style="width:{100 * each / (whole_s or 1):.1f}%"></i>'
        for name, each in spent.items()
    )
    return f'<table class="bars">{"".join(rows)}</table>'


# ---- memory, schedule, configuration ----


def _memory(measured: Mapping[str, Any]) -> tuple[str, str]:
    if not measured.get("timeline"):
        return "", "not measured: run.step does it in its second step, unless blocks are compiled"
    timeline = MemoryTimeline.parse(json.dumps(measured["timeline"]))
    return f'<div class="scroll">{timeline.svg(1100)}</div>', f"the second step of rank 0, by kind; {TENSORS}"


def _schedule(text: str) -> tuple[str, str]:
    if not text:
        return "", "not measured: run.step does it in its third step"
    return (
        f'<div class="scroll">{ScheduleReport.parse(text).svg()}</div>',
        "the third step, without its update",
    )


def _beside(measured: Mapping[str, Any]) -> str:
    """The peak memory of rank 0 beside the plan, and the bytes that it sent and moved in a step."""
    rows = []
    for row in measured.get("memory", []):
        plan_bytes, peak_bytes = row["forecast_bytes"], row["peak_bytes"]
        ratio = f"{peak_bytes / plan_bytes:.3f}" if plan_bytes else "-"
        names = {"kind": row["kind"], "tier": row["tier"]}
        rows.append(names | {"plan_bytes": plan_bytes, "measured_bytes": peak_bytes, "ratio": ratio})
    if not rows:
        return ""
    out = [
        _section("Memory: the plan beside the measured", _table(rows), f"at the most, on rank 0; {TENSORS}")
    ]
    sent = _table(measured["sent"]) + _table(measured["links"]) or "<p>nothing</p>"
    out.append(
        _section("Sent in a step", sent, "payload that rank 0 gave to other ranks, and links between tiers")
    )
    return "".join(out)


def _table(rows: Sequence[Mapping[str, Any]]) -> str:
    if not rows:
        return ""
    words = [name for name, value in rows[0].items() if isinstance(value, str) and name != "ratio"]
    css = {name: "" if name in words else ' class="n"' for name in rows[0]}
    heads = (f"<th{css[name]}>{escape(name.removesuffix('_bytes').removesuffix('_s'))}" for name in css)
    body = ("<tr>" + "".join(f"<td{css[n]}>{escape(told(n, v))}" for n, v in row.items()) for row in rows)
    return f'<div class="scroll"><table><tr>{"".join(heads)}{"".join(body)}</table></div>'


def _settings(run: Mapping[str, Any]) -> str:
    """The caller's own facts and the settings that are no defaults; those that are, folded."""
    config = run.get("config", {})
    changed = run.get("changed", list(config))
    own = {name: run[name] for name in ("facts", "data", "steps") if run.get(name)}
    if not config and not own:
        return "<p>run.json was not left</p>"
    defaults = {name: value for name, value in config.items() if name not in changed}
    folded = f"<details><summary>{len(defaults)} defaults</summary>{_pairs(defaults)}</details>"
    return _pairs(own | {name: config[name] for name in changed}) + (folded if defaults else "")


def _pairs(values: Mapping[str, Any]) -> str:
    words = {name: value if isinstance(value, str) else json.dumps(value) for name, value in values.items()}
    rows = (f"<div><b>{escape(name)}</b><span>{escape(value)}</span></div>" for name, value in words.items())
    return f'<div class="config">{"".join(rows)}</div>'
