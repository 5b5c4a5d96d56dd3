"""Times the save and load of a checkpoint of 1 GB, beside a plain program that writes and reads the same bytes.

    python examples/benchmarks/checkpoint_io.py [DIRECTORY]

`save` is a full `engine.save`: written, synced, read back and compared, renamed.  The plain program writes one file of
as many bytes in pieces of 16 MiB from memory, syncs it and renames it over the last one.  `load` is a full
`engine.load`, every byte checked.  The plain program reads the same file into allocated memory: once with the operating
system's cache dropped (speed of the disk), once from the cache (speed of memory).  A row's rate is the median over
rounds, its share the median over rounds of our rate to the plain one of the same round.  Extra memory is the peak of
resident memory over the level before; the limit is one shard (1 GiB).
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

import colossal_lite as cl
from colossal_lite.models import GPT, GPTConfig

MODEL = GPTConfig(
    layers=11, width=768, heads=12, sequence=256, vocabulary=8192
)  # 84 M, times 12 bytes with Adam's
PIECE_BYTES = 16 * 2**20


def plain_write(path: Path, data: memoryview) -> None:
    new = path.with_suffix(".new")  # the old one stays until the new one is whole, as with checkpoints
    with open(new, "wb", buffering=0) as file:
        for at in range(0, len(data), PIECE_BYTES):
            file.write(data[at : at + PIECE_BYTES])
        os.fsync(file.fileno())
    new.replace(path)


def plain_read(path: Path, into: memoryview) -> None:
    with open(path, "rb", buffering=0) as file:
        for at in range(0, len(into), PIECE_BYTES):
            file.readinto(into[at : at + PIECE_BYTES])


def drop_from_cache(*files: Path) -> None:
    """The next read of these files, which are synced, comes from the disk."""
    for path in files:
        with open(path, "rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def timed(action: Callable[[], object]) -> tuple[float, int]:
    """Wall seconds of a call, and by how many bytes resident memory rose within it."""
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before, start = resident_bytes("VmRSS"), time.perf_counter()
    action()
    return time.perf_counter() - start, resident_bytes("VmHWM") - before


def resident_bytes(row: str) -> int:
    status = Path("/proc/self/status").read_text()
    return 1024 * int(next(line.split()[1] for line in status.splitlines() if line.startswith(row)))


def measure(directory: Path, rounds: int) -> tuple[int, dict[str, list[tuple[float, float, int]]]]:
    """Bytes of the checkpoint, and per kind of call (our seconds, plain seconds, our extra bytes) of each round."""
    found: dict[str, list[tuple[float, float, int]]] = {}
    with cl.launch(
        dict(precision="fp32", optimizer=dict(type="adamw", lr=1e-3), checkpoint=dict(keep=1))
    ) as context:
        engine = cl.initialize(GPT(MODEL), context=context)
        tokens = torch.randint(MODEL.vocabulary, (1, 9))
        engine.train_step((tokens[:, :-1], tokens[:, 1:]))
        size = sum(file.stat().st_size for file in engine.save(directory / "ours").wait().iterdir())
        data = memoryview(torch.randint(256, (size,), dtype=torch.uint8).numpy()).cast("B")
        blob = directory / "plain.bin"
        for _ in range(rounds):
            plain = timed(lambda: plain_write(blob, data))
            ours = timed(lambda: engine.save(directory / "ours").wait())
            found.setdefault("save", []).append((ours[0], plain[0], ours[1]))
            shards = [*next((directory / "ours").glob("step-*")).iterdir()]
            for kind, dropped in (("load, from the disk", [blob, *shards]), ("load, from the cache", [])):
                drop_from_cache(*dropped)
                plain = timed(lambda: plain_read(blob, data))
                ours = timed(lambda: engine.load(directory / "ours"))
                found.setdefault(kind, []).append((ours[0], plain[0], ours[1]))
    return size, found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("directory", nargs="?", help="where to write; a temporary directory here by default")
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.directory or ".") as directory:
        size, found = measure(Path(directory), args.rounds)
    table = Table(title=f"a checkpoint of {size / 1e9:.2f} GB, median of {args.rounds} rounds (least-most)")
    for column in ("", "GB/s", "plain GB/s", "share of plain", "extra memory MB, most"):
        table.add_column(column)
    for kind, rows in found.items():
        shares = [plain / ours for ours, plain, _ in rows]
        rates = [[size / row[i] / 1e9 for row in rows] for i in (0, 1)]
        table.add_row(
            kind, *(f"{statistics.median(rate):.2f} ({min(rate):.2f}-{max(rate):.2f})" for rate in rates),
            f"{statistics.median(shares):.2f} ({min(shares):.2f}-{max(shares):.2f})",
            f"{max(extra for *_, extra in rows) / 1e6:.0f}",
        )  # fmt: skip
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
