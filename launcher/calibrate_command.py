"""Runs `colossal-lite calibrate`: what this machine does in a second, kept in a file for `memory.rates`."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path


@dataclass(frozen=True)
class CalibrateCommand:
    """Measure the rates of this machine, for `memory.rates` and for `plan`, in at most 10 seconds.

    One process measures alone: ranks that share a host get less of its cores and memory. The rates count for
    its number of threads. torchrun gives each of several ranks one (OMP_NUM_THREADS=1)."""

    file: Path | None = None
    """Where to keep them; left out, where `memory.update_on='auto'` looks for those of this machine, in
    ~/.cache."""
    disk_dir: Path | None = None
    """Measure the disk of this folder too, with 64 MiB that are gone afterwards."""

    def run(self) -> int:
        import torch

        from colossal_lite import kernels
        from colossal_lite.config.rates_file import RatesFile, check_place, default_file, write_rates
        from colossal_lite.zero.calibration import machine_name, measure

        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        started_s = time.perf_counter()
        machine = machine_name(device)
        try:
            path = self.file or default_file(machine, Path.home() / ".cache")
        except RuntimeError as error:
            raise ValueError(
                "--file: not given, and this user has no home folder; legal: --file PATH, a file in a folder of yours"
            ) from error
        with _naming(path):
            check_place(path)
        found = measure(device, kernels.select("auto", device.type), self.disk_dir)
        flops = block_flops(device)
        rates = found.rates.model_copy(update={"flops": flops})
        measured = {name: value for name, value in asdict(found).items() if value is not None}
        with _naming(path):
            write_rates(path, RatesFile(machine, time.strftime("%Y-%m-%d"), rates), measured)
        print(f"{machine}, measured in {time.perf_counter() - started_s:.1f} s")
        for what, figure, unit in rows(measured | {"flops": flops}):
            print(f"  {what:<48} {figure:>10,.2f} {unit}")
        if device.type == "cpu":
            print("there is no CUDA device: the device is the CPU, and the link is copies in its memory")
        if self.disk_dir is None:
            print("the disk was not measured; --disk-dir FOLDER does")
        print(f'{path}: written; memory.rates="{path}" uses it')
        if (threads := torch.get_num_threads()) > 1 and self.file is None:
            print(
                f"without memory.rates, processes of {threads} threads find it. torchrun gives each of several ranks "
                f"one thread: OMP_NUM_THREADS=1 colossal-lite calibrate"
            )
        return 0


@contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Context of writing the file. Raises ValueError, which names it, if that cannot be done."""
    try:
        yield
    except OSError as error:
        raise ValueError(
            f"--file {path}: cannot be written: {error.strerror}; legal: a file in a folder of yours"
        ) from error


def rows(measured: dict[str, float]) -> list[tuple[str, float, str]]:
    """The printed columns of each figure: its meaning, the figure, the unit."""
    told = {
        "flops": ("forward and backward of a block", 1e9, "GFLOP/s"),
        "host_update": ("update on the host", 1e9, "G elements/s"),
        "host_update_beside_copies": ("update on the host while the link copies", 1e9, "G elements/s"),
        "device_update": ("update on the device", 1e9, "G elements/s"),
        "up": ("link up", 1e9, "GB/s"),
        "down": ("link down", 1e9, "GB/s"),
        "both_ways": ("link up, and down, while it copies both ways", 1e9, "GB/s"),
        "host_memory": ("host memory, read and written, at least", 1e9, "GB/s"),
        "call_s": ("bookkeeping of a chunk", 1e-3, "ms"),
        "disk": ("disk, both ways together", 1e9, "GB/s"),
    }
    return [(what, measured[name] / by, unit) for name, (what, by, unit) in told.items() if name in measured]


def block_flops(device: object) -> float:
    """Floating-point operations a second of a block's forward and backward: 6 for a weight and token, the best of
    some."""
    import torch

    from colossal_lite.models import GPT, GPTConfig

    assert isinstance(device, torch.device)
    is_gpu = device.type == "cuda"
    width, tokens = (4096, 4096) if is_gpu else (256, 128)
    config = GPTConfig(vocabulary=64, layers=1, heads=width // 64, width=width, sequence=tokens)
    with device:
        model = GPT(config)
    if is_gpu:
        model.bfloat16()
    ids = torch.zeros(1, tokens, dtype=torch.int64, device=device)
    weights = sum(p.numel() for p in model.blocks.parameters())
    best_s = float("inf")
    for _ in range(4):
        start_s = time.perf_counter()
        model(ids).sum().backward()
        if is_gpu:
            torch.cuda.synchronize(device)
        best_s = min(best_s, time.perf_counter() - start_s)
    return 6.0 * weights * tokens / best_s
