"""Checks `colossal-lite calibrate`, its file, and what `memory.rates` does with one."""

from __future__ import annotations

import errno
import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from colossal_lite.config.config import Config, ConfigError
from colossal_lite.config.memory_schema import RatesConfig
from colossal_lite.config.rates_file import RatesFile, default_file, read_rates, write_rates
from colossal_lite.kernels import TORCH
from colossal_lite.launcher.calibrate_command import CalibrateCommand
from colossal_lite.memory.copy_streams import LinkSpeed
from colossal_lite.zero import calibration, update_choice
from colossal_lite.zero.update_choice import UpdateChoice, emulated_speeds, rates_of

CPU = torch.device("cpu")
GOOD = dict(machine="a big one", made="2026-01-01", rates=dict(host_update=4e9, device_update=1e11, up=10**9))


def choice_of(rates: Any, **more: Any) -> UpdateChoice:
    config = Config.load({"memory": dict(placement="host", rates=rates) | more})
    return UpdateChoice(config, TORCH, CPU)


def test_rates_that_a_full_disk_cuts_short_leave_the_old_file(tmp_path: Path) -> None:
    path, real = tmp_path / "rates.json", Path.write_text
    old = RatesFile("a big one", "2026-01-01", RatesConfig(host_update=4e9, device_update=1e11, up=10**9))
    write_rates(path, old, {})

    def half(where: Path, text: str, encoding: str) -> int:
        real(where, text[: len(text) // 2], encoding)
        raise OSError(errno.ENOSPC, "no space left on the device")

    with patch.object(Path, "write_text", half), pytest.raises(OSError, match="no space left"):
        write_rates(path, replace(old, made="2026-01-02"), {})
    assert read_rates(path) == old and [*tmp_path.iterdir()] == [path]


def test_processes_that_calibrate_at_once_each_write_a_whole_file(tmp_path: Path) -> None:
    path, real = tmp_path / "rates.json", Path.write_text
    mine = RatesFile("a big one", "2026-01-01", RatesConfig(host_update=4e9, device_update=1e11, up=10**9))
    numbers = iter([1, 2])

    def between(where: Path, text: str, encoding: str) -> int:
        written = real(where, text, encoding)
        if "2026-01-01" in text:  # the other process writes and renames its file here
            write_rates(path, replace(mine, made="2026-01-02"), {})
            assert read_rates(path).made == "2026-01-02"
        return written

    with patch.object(Path, "write_text", between), patch.object(os, "getpid", lambda: next(numbers)):
        write_rates(path, mine, {})
    assert read_rates(path) == mine and [*tmp_path.iterdir()] == [path]


@pytest.mark.parametrize("error", [RuntimeError("no home"), PermissionError(13, "Permission denied")])
def test_a_user_without_a_home_of_its_own_has_no_kept_rates_and_measures(error: Exception) -> None:
    """Such as a number without a name in a container, or one whose HOME is still that of root."""
    choice = choice_of(dict())
    what = "home" if isinstance(error, RuntimeError) else "is_file"
    with patch.object(Path, what, side_effect=error), patch.object(calibration, "NUMEL", 2**14):
        with patch.object(update_choice, "machine_name", lambda device: "a big one"):
            assert choice._found_here().up
    assert "measured now" in choice.notices[0]


def test_the_command_of_a_user_without_a_home_asks_for_a_file_before_it_measures() -> None:
    with (
        patch.object(Path, "home", side_effect=RuntimeError("no home")),
        patch.object(calibration, "measure") as measured,
    ):
        with pytest.raises(ValueError, match="this user has no home folder; legal: --file PATH"):
            CalibrateCommand().run()
    assert not measured.called


def test_rates_may_go_to_a_device(tmp_path: Path) -> None:
    path = tmp_path / "pipe"
    os.mkfifo(path)
    with open(os.open(path, os.O_RDWR)) as pipe:
        write_rates(path, RatesFile("a big one", "2026-01-01", RatesConfig()), {"up": 1})
        assert path.is_fifo() and pipe.readline() == "{\n"


def test_the_command_writes_a_file_that_a_run_reads_and_says_what_the_link_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "rates.json"
    with patch.object(calibration, "NUMEL", 2**14), patch.object(calibration, "DISK_BYTES", 2**16):
        assert CalibrateCommand(path, tmp_path).run() == 0
    told = capsys.readouterr().out
    for what in (
        "update on the host while the link copies",
        "link up, and down, while",
        "bookkeeping",
        "disk, both",
        "block",
    ):
        assert what in told
    if not torch.cuda.is_available():
        assert "there is no CUDA device" in told
    choice = choice_of(str(path))
    assert choice.notices == [], "of this machine"
    assert rates_of(choice.given) and choice.given.disk and choice.given.flops
    assert emulated_speeds(choice.given).up.bandwidth_bytes_s == choice.given.up


def test_a_file_of_another_machine_is_named_and_used(tmp_path: Path) -> None:
    path = tmp_path / "rates.json"
    path.write_text(json.dumps(GOOD))
    (line,) = choice_of(str(path)).notices
    assert "is of another machine, 'a big one'; this one is" in line
    assert emulated_speeds(read_rates(path).rates).down == LinkSpeed(10**9), "as up, where it is not given"


@pytest.mark.parametrize(
    "text, why",
    [
        (None, "cannot be read: No such file"),
        ("{", "is no file of rates"),
        ("[]", "is no file of rates"),
        (json.dumps(GOOD | dict(rates={})), "lacks host_update, device_update, up"),
        (json.dumps(GOOD | dict(rates=dict(GOOD["rates"], up=0))), "has 0 as up"),
        (
            json.dumps(GOOD | dict(rates=dict(GOOD["rates"], host_update=float("nan")))),
            "has nan as host_update",
        ),
        (json.dumps(GOOD | dict(rates=dict(GOOD["rates"], speed=1))), "has 1 as speed"),
    ],
)
def test_a_file_that_has_no_rates_is_refused_by_name(text: str | None, why: str, tmp_path: Path) -> None:
    path = tmp_path / "rates.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ValueError, match="memory.rates = ") as caught:
        choice_of(str(path))
    assert why in str(caught.value) and "colossal-lite calibrate" in str(caught.value)


@pytest.mark.parametrize(
    "rates, path",
    [
        (dict(file="x", up=9), "memory.rates.file"),
        (dict(up=9), "memory.rates.host_update"),
        (dict(host_update=1e9, device_update=1e9), "memory.rates.up"),
    ],
)
def test_rates_that_do_not_fit_together_are_refused_by_name(rates: Any, path: str) -> None:
    with pytest.raises(ConfigError) as caught:
        choice_of(rates, update_on="auto")
    assert [problem.path for problem in caught.value.problems] == [path]


def test_auto_takes_the_file_of_this_machine_and_measures_where_there_is_none(tmp_path: Path) -> None:
    path = default_file(calibration.machine_name(CPU), tmp_path / ".cache")
    with patch.object(Path, "home", lambda: tmp_path), patch.object(calibration, "NUMEL", 2**14):
        choice = choice_of({}, update_on="auto")
        assert choice._found_here().up and "measured now" in choice.notices[0]
        CalibrateCommand().run()
        choice = choice_of({}, update_on="auto")
        assert choice._found_here() == read_rates(path).rates and f"not given; of {path}" in choice.notices[0]


def test_a_file_that_cannot_be_written_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "taken").touch()
    with (
        patch.object(calibration, "NUMEL", 2**14),
        pytest.raises(ValueError, match="--file .* cannot be written"),
    ):
        CalibrateCommand(tmp_path / "taken" / "rates.json").run()


@pytest.mark.parametrize("place", ["taken/rates.json", "folder"])
def test_a_file_that_cannot_be_written_is_refused_before_it_measures(place: str, tmp_path: Path) -> None:
    (tmp_path / "taken").touch()
    (tmp_path / "folder").mkdir()
    with patch.object(calibration, "measure") as measured:
        with pytest.raises(ValueError, match="--file .* cannot be written"):
            CalibrateCommand(tmp_path / place).run()
    assert not measured.called


def test_the_file_is_found_by_processes_of_as_many_threads_and_what_is_printed_names_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(calibration, "NUMEL", 2**14)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        assert CalibrateCommand().run() == 0
        assert choice_of({})._found_here() == read_rates(*(tmp_path / ".cache/colossal_lite").iterdir()).rates
        assert "OMP_NUM_THREADS=1 colossal-lite calibrate" in capsys.readouterr().out
        torch.set_num_threads(1)
        choice = choice_of({})
        choice._found_here()
        assert "measured now, as `OMP_NUM_THREADS=1 colossal-lite calibrate`" in choice.notices[0]
    finally:
        torch.set_num_threads(threads)
