"""The doctor: plain rows, whatever is missing."""

from __future__ import annotations

import configparser
import os
import re
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any, NoReturn

import psutil
import pytest
import torch
from rich.console import Console

from colossal_lite import kernels
from colossal_lite.distributed import host_handshake
from colossal_lite.launcher import doctor, start
from colossal_lite.launcher.doctor import DoctorRow, report
from colossal_lite.memory import disk_file

ROOT = Path(__file__).parents[2]


def find(rows: tuple[DoctorRow, ...], group: str, name: str) -> DoctorRow:
    [row] = [row for row in rows if (row.group, row.name) == (group, name)]
    return row


def raises(*args: Any, **more: Any) -> NoReturn:
    raise OSError("broken")


def test_a_report_has_every_group_and_no_fault_where_the_tests_run() -> None:
    rows = report({"OMP_NUM_THREADS": "1"})
    groups = list(dict.fromkeys(row.group for row in rows))
    assert groups == ["versions", "devices", "kernels", "same bits twice", "host", "limits", "environment"]
    assert not [row for row in rows if row.status == "fault"]
    assert find(rows, "versions", "torch").value == torch.__version__


def test_on_cuda_it_says_what_gives_the_same_bits_and_advises_segments_that_expand(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert find(report({}), "same bits twice", "cpu").value == "always"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    row = find(tuple(doctor.same_bits()), "same bits twice", "cuda")
    assert (row.value, row.status) == ("with deterministic=True", "note")
    (advice,) = doctor.variables({})
    assert advice.name == "PYTORCH_ALLOC_CONF" and "PYTORCH_ALLOC_CONF=expandable_segments:True" in advice.why
    for name in doctor.ALLOCATOR:
        (told,) = doctor.variables({name: "expandable_segments:True,max_split_size_mb:64"})
        assert (told.name, told.status) == (name, "ok")


def test_the_versions_asked_for_are_those_of_the_package() -> None:
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    wanted = {}
    for line in setup["options"]["install_requires"].split("\n"):
        if match := re.match(r"(\w+)(?:>=([\d.]+))?", line):
            wanted[match[1]] = match[2]
    assert set(wanted) == {*doctor.REQUIRED, "torch", "triton"}
    oldest = {name: ".".join(map(str, doctor.OLDEST[name])) for name in ("torch", "triton")}
    assert oldest == {name: wanted[name] for name in oldest}
    assert (
        setup["options"]["python_requires"] == f">={doctor.OLDEST['python'][0]}.{doctor.OLDEST['python'][1]}"
    )


def test_old_and_absent_packages_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    installed = {"triton": "3.5.9", "tyro": None}
    real = metadata.version

    def version(name: str) -> str:
        if (found := installed.get(name, real("numpy"))) is None:
            raise metadata.PackageNotFoundError(name)
        return found

    monkeypatch.setattr(metadata, "version", version)
    rows = report()
    assert find(rows, "versions", "triton") == DoctorRow(
        "versions", "triton", "3.5.9", "fault", "3.6 or newer is needed"
    )
    assert find(rows, "versions", "tyro") == DoctorRow("versions", "tyro", "absent", "fault", "required")
    installed["triton"] = None
    row = find(report(), "versions", "triton")
    assert (row.value, row.status, row.why) == ("absent", "note", "every kernel takes its torch path")
    installed["triton"] = "3.10.0"  # newer than 3.6, though not as text
    assert find(report(), "versions", "triton").status == "ok"


def test_every_kernel_says_which_path_it_takes_and_why() -> None:
    rows = [row for row in report() if row.group == "kernels" and row.name.endswith(" on cpu")]
    choices = kernels.select("auto", "cpu").describe()
    assert [(r.name, r.value, r.why) for r in rows] == [(f"{c.op} on cpu", c.path, c.reason) for c in choices]


def test_it_says_whether_the_triton_kernels_can_run_and_why_not() -> None:
    row = find(report(), "kernels", "triton (cpu)")
    assert (row.value, row.why) == ("cannot run", "triton has no kernels for device 'cpu'")


def test_a_kernel_that_falls_back_on_a_device_is_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    rows = [row for row in report() if row.group == "kernels" and row.name.endswith(" on cuda")]
    assert rows and {(row.value, row.status) for row in rows} <= {("torch", "note"), ("triton", "ok")}


@pytest.mark.parametrize(
    ("group", "target", "name"),
    [
        ("devices", torch, "get_num_threads"),
        ("kernels", kernels, "select"),
        ("host", psutil, "virtual_memory"),
        ("versions", doctor.platform, "platform"),
    ],
)
def test_a_probe_that_breaks_is_a_row_and_the_others_still_speak(
    group: str, target: Any, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(target, name, raises)
    rows = report()
    assert find(rows, group, "probe") == DoctorRow(group, "probe", "failed", "fault", "OSError: broken")
    assert {"versions", "devices", "kernels", "host", "limits"} <= {row.group for row in rows}


def test_rows_before_the_break_are_kept() -> None:
    def probe() -> Iterator[DoctorRow]:
        yield DoctorRow("g", "first", "1")
        raises()

    assert [row.name for row in doctor.attempt("g", probe)] == ["first", "probe"]


def test_absent_shared_memory_is_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "is_dir", lambda self: str(self) != "/dev/shm")
    monkeypatch.delattr(os, "memfd_create")
    rows = report()
    assert (find(rows, "host", "/dev/shm").value, find(rows, "host", "/dev/shm").status) == ("absent", "note")
    assert find(rows, "host", "memfd").status == "note"


def test_whether_the_disk_tier_goes_past_the_page_cache_is_told(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    row = find(report(), "host", "disk tier in the working folder")
    assert (row.value, row.status, row.why) == ("direct", "ok", "") or "refuses O_DIRECT" in row.why
    monkeypatch.setattr(disk_file, "DIRECT", 0)
    row = find(report(), "host", "disk tier in the working folder")
    assert (row.value, row.status) == ("through the page cache", "note") and "no O_DIRECT" in row.why
    assert list(tmp_path.iterdir()) == []
    monkeypatch.setattr(os, "open", raises)
    row = find(report(), "host", "disk tier in the working folder")
    assert (row.value, row.status) == ("no", "note") and "cannot be made" in row.why


def test_a_limit_that_is_too_low_is_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    resource = pytest.importorskip("resource")
    low = {resource.RLIMIT_NOFILE: 64, resource.RLIMIT_FSIZE: 2**20, resource.RLIMIT_MEMLOCK: 1}
    monkeypatch.setattr(resource, "getrlimit", lambda number: (low.get(number, resource.RLIM_INFINITY),) * 2)
    notes = {row.name: row.value for row in report() if row.group == "limits" and row.status == "note"}
    assert notes == {"open files": "64", "bytes of a file": "1,048,576"}


def test_too_many_threads_for_the_cores_are_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 10_000)
    row = find(report(), "devices", "cpu")
    assert row.status == "note" and "OMP_NUM_THREADS" in row.why


def test_only_known_variables_are_shown() -> None:
    secrets = {
        "HUB_TOKEN": "secret",
        "RANK": "1",
        "PATH": "/bin",
        "TRITON_INTERPRET": "1",
        "NCCL_DEBUG": "INFO",
    }
    rows = [row for row in report(secrets) if row.group == "environment"]
    assert [(row.name, row.value, row.status) for row in rows] == [
        ("TRITON_INTERPRET", "1", "note"),
        ("NCCL_DEBUG", "INFO", "ok"),
    ]


def test_the_table_shows_every_row_and_takes_no_text_for_markup() -> None:
    rows = [
        DoctorRow("g", "name", "[red]value", "note", "because [of] this"),
        DoctorRow("h", "other", "2", "fault"),
    ]
    console = Console(width=100, record=True, file=open(os.devnull, "w"))
    console.print(doctor.table(rows))
    text = console.export_text()
    for part in ("g", "h", "name", "[red]value", "because [of] this", "note", "fault"):
        assert part in text


def test_the_launcher_says_what_started_it_and_that_gloo_works(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = tuple(start.findings())
    assert find(rows, "launch", "launcher").value == "none: a world of one"
    assert find(rows, "launch", "gloo") == DoctorRow("launch", "gloo", "works")
    assert find(rows, "launch", "shared memory").value == "works between ranks of one host"
    monkeypatch.setattr(host_handshake.sys, "platform", "darwin")
    row = find(tuple(start.findings()), "launch", "shared memory")
    assert (row.value, row.status) == ("not used", "note") and "this is darwin" in row.why
    monkeypatch.undo()
    assert not torch.distributed.is_initialized()
    monkeypatch.setenv("RANK", "3")
    row = find(tuple(start.findings()), "launch", "launcher")
    assert row.status == "fault" and "WORLD_SIZE is not set" in row.why
    monkeypatch.setattr(
        start, "launch", lambda *_, **__: (_ for _ in ()).throw(RuntimeError("no socket\nmore"))
    )
    row = find(tuple(start.findings()), "launch", "gloo")
    assert row == DoctorRow("launch", "gloo", "fails", "fault", "no socket")
