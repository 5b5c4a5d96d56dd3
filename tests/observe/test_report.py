"""report.html: one file made from what a run leaves, complete without network or script, readable at any width."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from colossal_lite.launcher import command as cli
from colossal_lite.observe.report import MEASURED, SCHEDULE, report, write_report
from colossal_lite.observe.schedule_report import ScheduleReport
from colossal_lite.schedule.pipeline_schedules import generate
from colossal_lite.schedule.simulator import StageCosts, simulate

STEPS = 40


def lines(rows: list[dict[str, Any]]) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """What a run of two pipeline ranks leaves."""
    out = tmp_path / "first <run>"
    out.mkdir()
    each = dict(bits_per_byte=None, grad_norm=0.5, lr=1e-3, tokens=1000, sent_bytes=3 * 2**20)
    steps = [
        each | dict(step=s, loss=None if s == 3 else 2 + 1 / s, skipped=s == 3) for s in range(1, STEPS + 1)
    ]
    timing = [
        dict(step=s, step_s=0.1, tokens_per_s=10_000.0, mfu=None, memory_bytes=2**29)
        for s in range(1, STEPS + 1)
    ]
    (out / "metrics.jsonl").write_text(lines(steps))
    (out / "timing.jsonl").write_text(lines(timing))
    (out / "evaluation.jsonl").write_text(
        lines([dict(step=s, loss=2.5, bits_per_byte=None) for s in (20, 40)])
    )
    spans = (("step", 0, 1e6), ("step", 2e6, 1e6), ("evaluate", 2.5e6, 5e5), ("save", 5e6, 1e6))
    events = [dict(ph="X", name=name, ts=ts, dur=dur) for name, ts, dur in spans]
    (out / "trace.json").write_text(json.dumps({"traceEvents": events}))
    config = {"parallel.pipeline.size": 2, "optimizer.type": "<script>adamw</script>"}
    run = dict(steps=STEPS, facts={"corpus": "stdlib"}, config=config, changed=["parallel.pipeline.size"])
    (out / "run.json").write_text(json.dumps(run))
    step = simulate(generate("1f1b", 2, 3), StageCosts.uniform(2, 0.01, 0.01, 0.01))
    (out / SCHEDULE).write_text(ScheduleReport(step, step).trace())
    memory = dict(kind="weights", tier="cpu", now_bytes=2**20, peak_bytes=3 * 2**20, forecast_bytes=2**21)
    level = dict(kind="weights", tier="cpu", measured_bytes=[2**20, 3 * 2**20], forecast_bytes=2**21)
    measured = dict(
        where="2 ranks", memory=[memory], timeline=dict(moments=["forward blocks.0", "update 0"], levels=[level]),
        links=[], sent=[dict(operation="send", axis="pipeline", calls=3, payload_bytes=4096)], waited_s=0.002,
    )  # fmt: skip
    (out / MEASURED).write_text(json.dumps(measured))
    return out


class Outline(HTMLParser):
    """Titles of sections, and what a page asks for from elsewhere."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.titles: list[str] = []
        self.asks: list[str] = []
        self._in = ""
        self.feed(page)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self._in = tag
        self.asks += [
            name for name, _ in attributes if name in ("src", "href", "xlink:href", "srcset", "action")
        ]
        self.asks += [tag] * (tag in ("script", "link", "img", "iframe", "object", "base"))

    def handle_data(self, data: str) -> None:
        self.titles += [data] * (self._in == "h2" and bool(data.strip()))


def test_the_page_holds_every_part_and_asks_for_nothing(folder: Path) -> None:
    page = report(folder)
    found = Outline(page)
    assert found.titles == [
        "Loss", "Tokens per second", "Learning rate", "Where time went", "Memory over a step", "Schedule of a step",
        "Memory: the plan beside the measured", "Sent in a step", "Configuration",
    ]  # fmt: skip
    assert found.asks == [] and not re.search(r"url\(|@import", page)
    for words in (
        "first &lt;run&gt;", "<dt>steps</dt><dd>40", "<dt>skipped steps</dt><dd>1<", "held-out loss, lowest",
        ">2.5000<", "2.00 MiB", "3.00 MiB", "1.500", "4.00 KiB", "save", "25.0%", "8.3%", "16.7%",
        "50.0%", "waiting for other ranks 2 ms",
        "&lt;script&gt;adamw", "parallel.pipeline.size", "stdlib", "rank 1 measured",
    ):  # fmt: skip
        assert words in page, words


def test_settings_that_were_changed_stand_before_the_defaults_which_are_folded(folder: Path) -> None:
    changed, folded, defaults = report(folder).partition("<details><summary>1 defaults</summary>")
    assert folded and "<b>parallel.pipeline.size</b><span>2</span>" in changed
    assert "<b>optimizer.type</b>" in defaults and "parallel.pipeline.size" not in defaults


def test_what_a_run_did_not_leave_is_named(folder: Path) -> None:
    for path in folder.iterdir():
        if path.name != "metrics.jsonl":
            path.unlink()
    page = report(folder)
    for words in (
        "not measured: run.step",
        "run.step does it in its third step",
        "trace.json has no spans",
        "run.json was",
    ):
        assert words in page
    (folder / "metrics.jsonl").write_text("")
    with pytest.raises(ValueError, match=r"has no steps in metrics.jsonl; legal: the folder of a cl.Run"):
        report(folder)


def test_a_row_that_a_kill_cut_short_is_left_out_and_a_damaged_one_is_named(folder: Path) -> None:
    whole, rows = report(folder), (folder / "metrics.jsonl").read_text()
    (folder / "metrics.jsonl").write_text(rows + '{"step": 41, "lo')
    assert report(folder) == whole
    (folder / "metrics.jsonl").write_text("what\n" + rows)
    with pytest.raises(ValueError, match=r"metrics.jsonl: line 1 is no JSON object"):
        report(folder)


@pytest.mark.parametrize(
    ("name", "more", "says"),
    [
        ("metrics.jsonl", b'{"step": 1}\n', "not those of a run of this version. KeyError"),
        ("metrics.jsonl", b"\xff\n", "metrics.jsonl: line .* is no JSON object"),
        ("run.json", b"\xff", "run.json: line 1 is no JSON object"),
        ("schedule.json", b"{", "not those of a run of this version. JSONDecodeError"),
    ],
)
def test_files_that_no_run_of_this_version_wrote_are_refused_by_name(
    folder: Path, name: str, more: bytes, says: str
) -> None:
    with (folder / name).open("ab") as file:
        file.write(more)
    with pytest.raises(ValueError, match=says):
        report(folder)


def test_a_curve_of_many_steps_has_few_points(folder: Path) -> None:
    row = json.loads((folder / "metrics.jsonl").read_text().splitlines()[0])
    (folder / "metrics.jsonl").write_text(lines([row | dict(step=s) for s in range(1, 10_001)]))
    (curve, *_) = re.findall(r'<polyline points="([^"]+)"', report(folder))
    assert 100 < len(curve.split()) <= 240


def test_the_command_makes_it_again(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["report", str(folder)]) == 0
    assert (folder / "report.html").read_text() == report(folder)
    assert f"{folder / 'report.html'}: written" in capsys.readouterr().out
    assert cli.main(["report", str(folder / "nothing")]) == 2
    assert "has no steps in metrics.jsonl" in capsys.readouterr().err


CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


@pytest.mark.skipif(CHROMIUM is None, reason="no chromium on this machine (Debian: apt install chromium)")
@pytest.mark.parametrize(
    ("width", "scheme", "paper"), [(400, 1, "rgb(255, 255, 255)"), (1400, 0, "rgb(22, 25, 29)")]
)
def test_a_browser_draws_it_within_its_window_light_and_dark(
    folder: Path, tmp_path: Path, width: int, scheme: int, paper: str
) -> None:
    """A frame of that width, because a window of a browser has a least one; a script reads what was laid out."""
    probe = (
        "<script>const d=document;d.title=[d.documentElement.scrollWidth,getComputedStyle(d.body).backgroundColor,"
        "[...d.querySelectorAll('svg')].filter(s=>s.getBoundingClientRect().height>50).length].join('|')</script>"
    )
    inner = tmp_path / "probed.html"
    inner.write_text(write_report(folder).read_text() + probe)
    outer = tmp_path / "outer.html"
    outer.write_text(
        f'<iframe src="{inner.name}" width="{width}" height="900" style="border:0" '
        'onload="document.title=this.contentDocument.title"></iframe>'
    )
    ended = subprocess.run(
        [
            str(CHROMIUM), "--headless", "--no-sandbox", "--disable-gpu", "--allow-file-access-from-files",
            f"--user-data-dir={tmp_path / 'browser'}", f"--blink-settings=preferredColorScheme={scheme}",
            "--virtual-time-budget=3000", "--dump-dom", outer.as_uri(),
        ],
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    title = re.search("<title>(.*)</title>", ended.stdout)
    assert title, ended.stderr[-2000:]
    across, colour, drawings = title[1].split("|")
    assert int(across) <= width and colour == paper and drawings == "5"
