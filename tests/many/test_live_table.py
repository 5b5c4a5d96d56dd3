"""What many tasks print while they train: a reader that is gone ends none of them."""

from __future__ import annotations

import os
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from colossal_lite.many.live_table import LiveTable


def test_a_reader_that_is_gone_is_sent_no_line_and_ends_no_task(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    state = SimpleNamespace(status="done", step=3, loss=None, held_out=None, cause="")
    coordinator: Any = SimpleNamespace(states={"a": state, "b": state})
    ours, theirs = os.pipe()
    os.close(ours)
    with os.fdopen(theirs, "w") as closed:
        monkeypatch.setattr(sys, "stdout", closed)
        table = LiveTable(coordinator)
        with table.shown():
            table.show(last=True)
    assert capsys.readouterr().err == "a: done at step 3\n"
