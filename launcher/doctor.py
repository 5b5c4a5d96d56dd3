"""Checks this machine for training: versions, devices, limits and fallbacks, as rows and as a table.

Note: a row is data.  Each probe yields rows of one group.  A probe that fails becomes a row with its error, so a broken
machine still gets a report.  Nothing is downloaded, compiled or left on disk.  Of the environment only the variables in
VARIABLES are shown: others may hold secrets.
"""

from __future__ import annotations

import os
import platform
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Literal

import psutil
import torch
from rich.table import Table
from rich.text import Text

from colossal_lite import __version__, kernels
from colossal_lite.memory.disk_file import DiskError, DiskFile
from colossal_lite.memory.disk_layout import FileLayout

Status = Literal["ok", "note", "fault"]
Probe = Callable[[], Iterable["DoctorRow"]]

GIB = 2**30
OLDEST = {"python": (3, 11), "torch": (2, 11), "triton": (3, 6)}
REQUIRED = ("numpy", "einops", "safetensors", "pydantic", "tyro", "rich", "psutil")
OPTIONAL = {
    "transformers": "models and checkpoints of Hugging Face",
    "tokenizers": "the tokenizer of examples/gpt",
}
ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
EXPANDABLE = "expandable_segments:True"
VARIABLES = (
    "CUDA_VISIBLE_DEVICES",
    "CUDA_LAUNCH_BLOCKING",
    *ALLOCATOR,
    "CUBLAS_WORKSPACE_CONFIG",
    "TRITON_INTERPRET",
    "OMP_NUM_THREADS",
    "GLOO_SOCKET_IFNAME",
    "NCCL_SOCKET_IFNAME",
    "NCCL_DEBUG",
    "TORCH_DISTRIBUTED_DEBUG",
)


@dataclass(frozen=True)
class DoctorRow:
    """One finding. ok: no problem; note: works with a restriction; fault: something here cannot work."""

    group: str
    name: str
    value: str
    status: Status = "ok"
    why: str = ""


def report(environment: Mapping[str, str] | None = None) -> tuple[DoctorRow, ...]:
    """Every finding about this process and its machine. Never raises.

    `environment` is this process's environment; without it the report has no rows about variables.
    """
    probes: tuple[tuple[str, Probe], ...] = (
        ("versions", versions),
        ("devices", devices),
        ("kernels", kernel_paths),
        ("same bits twice", same_bits),
        ("host", host),
        ("limits", limits),
        ("environment", lambda: variables(environment or {})),
    )
    return tuple(row for group, probe in probes for row in attempt(group, probe))


def attempt(group: str, probe: Probe) -> Iterator[DoctorRow]:
    """The rows of a probe; if it fails, a row with its error follows those made so far."""
    try:
        yield from probe()
    except Exception as error:  # any fault of this machine belongs in the report
        yield DoctorRow(group, "probe", "failed", "fault", f"{type(error).__name__}: {error}")


def table(rows: Iterable[DoctorRow]) -> Table:
    """The rows for people, one section a group."""
    colours = {"ok": "green", "note": "yellow", "fault": "red"}
    drawn = Table(box=None, pad_edge=False, show_header=False)
    for _ in range(4):
        drawn.add_column(overflow="fold")
    group = None
    for row in rows:
        if row.group != group:
            drawn.add_row("", Text(row.group, "bold"))
            group = row.group
        drawn.add_row(Text(row.status, colours[row.status]), row.name, Text(row.value), Text(row.why))
    return drawn


# ---------------------------------------------------------------------------------------------------- probes


def versions() -> Iterator[DoctorRow]:
    yield DoctorRow("versions", "colossal_lite", __version__)
    yield _version("python", platform.python_version())
    yield DoctorRow("versions", "platform", platform.platform())
    build = f"CUDA {torch.version.cuda}" if torch.version.cuda else "no CUDA in this build"
    yield _version("torch", torch.__version__, build)
    triton = _installed("triton")
    if triton is None:
        yield DoctorRow("versions", "triton", "absent", "note", "every kernel takes its torch path")
    else:
        yield _version("triton", triton)
    for name in REQUIRED:
        found = _installed(name)
        yield DoctorRow(
            "versions", name, found or "absent", "ok" if found else "fault", "" if found else "required"
        )
    for name, use in OPTIONAL.items():
        found = _installed(name)
        yield DoctorRow("versions", name, found or "absent", "ok", "" if found else f"optional: {use}")


def _installed(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _version(name: str, found: str, why: str = "") -> DoctorRow:
    oldest = OLDEST[name]
    numbers = tuple(int(part) for part in found.split(".")[:2] if part.isdecimal())
    if numbers >= oldest:
        return DoctorRow("versions", name, found, "ok", why)
    return DoctorRow("versions", name, found, "fault", f"{'.'.join(map(str, oldest))} or newer is needed")


def devices() -> Iterator[DoctorRow]:
    cores, usable = os.cpu_count() or 1, len(psutil.Process().cpu_affinity() or [0])
    threads = torch.get_num_threads()
    crowded = threads > usable
    why = f"{threads} threads share {usable} cores: set OMP_NUM_THREADS" if crowded else ""
    capability = torch.backends.cpu.get_cpu_capability()
    text = f"{usable} of {cores} cores, {threads} threads in torch, {capability}"
    yield DoctorRow("devices", "cpu", text, "note" if crowded else "ok", why)
    if not torch.cuda.is_available():
        why = (
            "the driver or the device does not answer"
            if torch.version.cuda
            else "torch is built without CUDA"
        )
        yield DoctorRow("devices", "cuda", "none", "note", f"training runs on the CPU: {why}")
        return
    for index in range(torch.cuda.device_count()):
        name, (major, minor) = torch.cuda.get_device_name(index), torch.cuda.get_device_capability(index)
        free, total = torch.cuda.mem_get_info(index)
        memory = f"{free / GIB:.1f} of {total / GIB:.1f} GiB free"
        half_full = free < total / 2
        why = "other processes hold its memory" if half_full else ""
        text = f"{name}, capability {major}.{minor}, {memory}"
        yield DoctorRow("devices", f"cuda:{index}", text, "note" if half_full else "ok", why)


def same_bits() -> Iterator[DoctorRow]:
    """What holds of two runs on one machine with one configuration."""
    yield DoctorRow("same bits twice", "cpu", "always", "ok", "with one number of threads")
    if torch.cuda.is_available():
        why = "else the backward of torch's attention adds in any order, and results differ by rounding"
        yield DoctorRow("same bits twice", "cuda", "with deterministic=True", "note", why)


def kernel_paths() -> Iterator[DoctorRow]:
    """The implementation that each op uses on the devices here."""
    types = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
    for device_type in types:
        why = kernels.why_not_triton(device_type)
        fault = why is not None and device_type == "cuda"
        value = "can run" if why is None else "cannot run"
        yield DoctorRow("kernels", f"triton ({device_type})", value, "note" if fault else "ok", why or "")
        for choice in kernels.select("auto", device_type).describe():
            fell_back = device_type == "cuda" and choice.path == "torch"
            name = f"{choice.op} on {device_type}"
            yield DoctorRow("kernels", name, choice.path, "note" if fell_back else "ok", choice.reason)


def host() -> Iterator[DoctorRow]:
    memory = psutil.virtual_memory()
    text = f"{memory.available / GIB:.1f} of {memory.total / GIB:.1f} GiB available"
    limit = _cgroup_limit_bytes()
    if limit is not None and limit < memory.total:
        yield DoctorRow(
            "host", "memory", text, "note", f"this group of processes may have {limit / GIB:.1f} GiB"
        )
    else:
        yield DoctorRow("host", "memory", text)
    yield _space("/dev/shm", Path("/dev/shm"), GIB, "loader workers hand batches over in it")
    yield _space("working folder", Path.cwd(), 10 * GIB, "checkpoints go there")
    yield _space("temporary folder", Path(tempfile.gettempdir()), GIB, "")
    for name, path in (("working folder", Path.cwd()), ("temporary folder", Path(tempfile.gettempdir()))):
        yield _direct(name, path)
    shared = hasattr(os, "memfd_create")
    why = "" if shared else "host memory cannot be shared between processes"
    yield DoctorRow("host", "memfd", "yes" if shared else "no", "ok" if shared else "note", why)


def _cgroup_limit_bytes() -> int | None:
    for name in ("memory.max", "memory/memory.limit_in_bytes"):
        path = Path("/sys/fs/cgroup") / name
        if path.is_file() and (text := path.read_text().strip()).isdecimal():
            return int(text)
    return None


def _space(name: str, path: Path, enough_bytes: int, use: str) -> DoctorRow:
    if not path.is_dir():
        return DoctorRow("host", name, "absent", "note", use)
    free = shutil.disk_usage(path).free
    text = f"{free / GIB:.1f} GiB free"
    return (
        DoctorRow("host", name, text)
        if free >= enough_bytes
        else DoctorRow("host", name, text, "note", use or "little")
    )


def _direct(name: str, path: Path) -> DoctorRow:
    """Whether `memory.disk_dir` could be in a folder, and whether its files bypass the page cache."""
    try:
        file = DiskFile(path, FileLayout(()), label="doctor")
    except DiskError as error:
        return DoctorRow("host", f"disk tier in the {name}", "no", "note", str(error))
    file.close()
    text = "direct" if file.is_direct else "through the page cache"
    return DoctorRow(
        "host", f"disk tier in the {name}", text, "ok" if file.is_direct else "note", file.why_buffered
    )


def limits() -> Iterator[DoctorRow]:
    """Limits of the system on a process. A low limit shows late, as another error."""
    import resource  # not on every platform

    unlimited = resource.RLIM_INFINITY
    for name, number, enough, why in (
        ("open files", resource.RLIMIT_NOFILE, 1024, "each rank opens sockets to the others"),
        ("processes", resource.RLIMIT_NPROC, 1024, "ranks, loader workers and their threads count"),
        ("locked bytes", resource.RLIMIT_MEMLOCK, 0, ""),
        ("bytes of a file", resource.RLIMIT_FSIZE, unlimited, "a checkpoint may not fit"),
        ("address space bytes", resource.RLIMIT_AS, unlimited, "torch maps far more than it uses"),
    ):
        soft, _ = resource.getrlimit(number)
        low = soft != unlimited and (enough == unlimited or soft < enough)
        text = "unlimited" if soft == unlimited else f"{soft:,}"
        yield DoctorRow("limits", name, text, "note" if low else "ok", why if low else "")


def variables(environment: Mapping[str, str]) -> Iterator[DoctorRow]:
    for name in VARIABLES:
        if name in environment:
            slow = name == "CUDA_LAUNCH_BLOCKING" or (name, environment[name]) == ("TRITON_INTERPRET", "1")
            why = "every kernel runs far slower: meant for debugging" if slow else ""
            yield DoctorRow("environment", name, environment[name], "note" if slow else "ok", why)
    if torch.cuda.is_available() and not any(EXPANDABLE in environment.get(name, "") for name in ALLOCATOR):
        why = (
            f"{ALLOCATOR[0]}={EXPANDABLE} leaves fewer gaps: memory.device_budget may be nearer to all of it"
        )
        yield DoctorRow("environment", ALLOCATOR[0], "without expandable segments", "note", why)
