"""Measures the rates of this machine with the kernels, links and host memory that updates use.

Note: the measurements.
AdamW updates `NUMEL` elements, on the host and on the device.  Each direction of the link copies one of these tensors,
alone and beside the other direction.  The host update is measured again while both directions copy.  Host memory is
the most traffic that any of these has shown, so it is a lower bound.  An empty chunk goes down, is updated and goes up,
`EMPTY` times: that is the bookkeeping of a chunk.  Without CUDA both ends of the link are host memory, and its figures
are those of copies there.  The best of `TRIALS` counts.  Cost: about a second on a CPU.
"""

from __future__ import annotations

import platform
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from colossal_lite.config.memory_schema import RatesConfig
from colossal_lite.kernels import TORCH, Ops
from colossal_lite.memory.copy_streams import AS_IT_COPIES, ThreadExecutor, executor_for
from colossal_lite.memory.disk_file import DiskFile
from colossal_lite.memory.disk_layout import FileLayout
from colossal_lite.memory.link import Link, Transfer
from colossal_lite.memory.pinned import host_pages, host_room

NUMEL = 2**22
"""Elements of an update; each of its four tensors has 16 MiB."""
TRIALS = 3
EMPTY = 64
DISK_BYTES = 64 * 2**20
UPDATE_BYTES = 28
"""Of host memory that AdamW reads and writes for a float32 element."""


@dataclass(frozen=True)
class Measured:
    """Rates of a machine, for one process: elements or bytes a second, and seconds of a chunk."""

    host_update: float
    host_update_beside_copies: float
    device_update: float
    up: float
    down: float
    both_ways: float
    host_memory: float
    call_s: float
    disk: float | None = None

    @property
    def rates(self) -> RatesConfig:
        """The settings of `memory.rates`: of the link those of both directions at once, as updates use them."""
        return RatesConfig(
            host_update=self.host_update, device_update=self.device_update, up=round(self.both_ways),
            down=round(self.both_ways), host_memory=round(self.host_memory), call_s=self.call_s,
            disk=None if self.disk is None else round(self.disk),
        )  # fmt: skip


def machine_name(device: torch.device) -> str:
    """Processor, cores and device: what the rates belong to."""
    cpu = Path("/proc/cpuinfo")
    lines = cpu.read_text().splitlines() if cpu.is_file() else []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    processor = models[0] if models else platform.processor() or platform.machine()
    gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else "no CUDA"
    return f"{processor}, {torch.get_num_threads()} threads, {gpu}"


def measure(device: torch.device, ops: Ops, disk_dir: Path | None = None) -> Measured:
    """The rates of this machine between the host and `device`. Raises DiskError where `disk_dir` cannot be written."""
    host = torch.device("cpu")
    state = [host_room(NUMEL, torch.float32, device) for _ in range(4)]
    there = [torch.zeros(NUMEL, dtype=torch.float32, device=device) for _ in range(4)]
    host_ops = ops if device.type == "cpu" else TORCH
    size_bytes = NUMEL * 4
    with (
        closing(Link("h2d", executor_for(device, AS_IT_COPIES))) as up,
        closing(Link("d2h", executor_for(device, AS_IT_COPIES))) as down,
        closing(Link("cpu", ThreadExecutor())) as updates,
    ):
        send = partial(up.copy, there[0], state[0])
        bring = partial(down.copy, state[1], there[1])
        host_s = _best(partial(_update, host_ops, state), host)
        device_s = _best(partial(_update, ops, there), device)
        up_s, down_s = _best(lambda: _all(send()), device), _best(lambda: _all(bring()), device)
        both_s = _best(lambda: _all(send(), bring()), device)
        beside_s = _best(lambda: _beside(host_ops, state, send, bring, host_s / both_s), host)
        call_s = _best(partial(_empty_chunks, ops, device, up, down, updates), device) / EMPTY
    copied = 2 if device.type == "cpu" else 1  # bytes of host memory of a byte that crosses
    moved_s = [
        UPDATE_BYTES * NUMEL / host_s,
        2 * copied * size_bytes / both_s,
        UPDATE_BYTES * NUMEL / beside_s + 2 * copied * size_bytes / both_s * min(1.0, host_s / beside_s),
    ]
    return Measured(
        host_update=NUMEL / host_s, host_update_beside_copies=NUMEL / beside_s, device_update=NUMEL / device_s,
        up=size_bytes / up_s, down=size_bytes / down_s, both_ways=size_bytes / both_s,
        host_memory=max(moved_s), call_s=call_s,
        disk=None if disk_dir is None else _disk(disk_dir, device),
    )  # fmt: skip


def _update(ops: Ops, state: Sequence[Tensor]) -> None:
    param, grad, mean, square = state
    ops.adamw_(param, grad, mean, square, step=1, lr=1e-3, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.0)


def _all(*transfers: Transfer) -> None:
    for transfer in transfers:
        transfer.finish()


def _beside(
    ops: Ops, state: Sequence[Tensor], send: Callable[[], Transfer], bring: Callable[[], Transfer], lasts: float
) -> None:  # fmt: skip
    """An update while both directions copy; `lasts`: of how many copies each way."""
    copies = [copy() for _ in range(max(1, round(lasts))) for copy in (send, bring)]
    _update(ops, state)
    for copy in copies:
        copy.revoke()


def _empty_chunks(ops: Ops, device: torch.device, up: Link, down: Link, updates: Link) -> None:
    """Copies and updates of chunks of few elements."""
    here = [torch.zeros(16, dtype=torch.float32) for _ in range(4)]
    there = [torch.zeros(16, dtype=torch.float32, device=device) for _ in range(4)]
    back: list[Transfer] = []
    for _ in range(EMPTY):
        came = down.copy(here[1], there[1])
        done = updates.run(partial(_update, TORCH, here), 0, after=(came,))
        back.append(up.copy(there[0], here[0], after=(done,)))
    _all(*back)


def _disk(directory: Path, device: torch.device) -> float:
    """Bytes a second of a file there, written and read once."""
    room = host_pages(DISK_BYTES, device)
    with closing(DiskFile(directory, FileLayout((DISK_BYTES,)), label="calibrate")) as file:
        start_s = time.perf_counter()
        file.write(0, room)
        file.read(0, room)
        return 2 * DISK_BYTES / (time.perf_counter() - start_s)


def _best(work: Callable[[], object], device: torch.device) -> float:
    """Seconds of the best of some trials, after one that does not count."""
    found = []
    for _ in range(TRIALS + 1):
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        start_s = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        found.append(time.perf_counter() - start_s)
    return max(min(found[1:]), 1e-9)
