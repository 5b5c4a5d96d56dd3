"""The files of a directory of many: cut short by a kill or a full disk, damaged, or left without their tasks."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from colossal_lite.checkpoint.owner import FolderClaims
from colossal_lite.many import trainer
from colossal_lite.many.journal import JOURNAL, Journal, journal_rows, stop_fault
from tests.many.tasks import task

OURS = {"a": "0123"}


def refused(directory: Path) -> str:
    claims = FolderClaims()
    try:
        return trainer._refused(claims, OURS, directory, resume=True)
    finally:
        claims.close()


def test_a_journal_that_a_kill_cut_short_goes_on_with_whole_rows(tmp_path: Path) -> None:
    for number in range(3):
        journal = Journal(tmp_path)
        journal.write(decision="run", number=number)
        journal.close()
        with (tmp_path / JOURNAL).open("a") as file:
            file.write('{"decision": "r')
    assert [row["number"] for row in journal_rows(tmp_path)] == [0, 1, 2]


def test_a_damaged_journal_is_refused_with_its_line(tmp_path: Path) -> None:
    (tmp_path / JOURNAL).write_text('{"decision": "run"}\n{"dec\n')
    assert "journal.jsonl: line 2 is damaged" in stop_fault(tmp_path, [task("a")], None)


def test_a_decision_that_a_full_disk_does_not_take_is_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(number: int) -> None:
        raise OSError(28, "No space left on device")

    journal = Journal(tmp_path)
    journal.write(decision="run", number=0)
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(
            ValueError, match="journal.jsonl cannot be written: No space left on device.*legal: "
        ):
            journal.write(decision="run", number=1)
    journal.close()
    assert journal_rows(tmp_path)[0]["number"] == 0


@pytest.mark.parametrize("text", ["", "[]", '{"a"'])
def test_a_file_of_tasks_that_is_none_is_refused_as_such(tmp_path: Path, text: str) -> None:
    (tmp_path / trainer.SWEEP).write_text(text)
    assert "sweep.json there is not one of train_many; legal: another directory" in refused(tmp_path)


def test_a_name_that_no_file_can_have_is_refused_as_such() -> None:
    assert "embedded null byte; legal: a folder that can be written to" in refused(Path("a\0b"))


@pytest.mark.parametrize("left", ["tasks", JOURNAL])
def test_what_other_tasks_have_left_is_refused_without_their_file(tmp_path: Path, left: str) -> None:
    (tmp_path / left).mkdir()
    assert f"{left} there, without sweep.json; legal: another directory" in refused(tmp_path)
    assert not (tmp_path / trainer.SWEEP).exists()


def test_the_file_of_tasks_is_there_as_a_whole_or_not_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Path, text: str, **more: object) -> int:
        path.touch()
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_text", full)
        assert "No space left on device; legal: a folder that can be written to" in refused(tmp_path)
    assert refused(tmp_path) == ""
    assert json.loads((tmp_path / trainer.SWEEP).read_text()) == OURS
