"""Holds the planned memory and traffic of one rank's step, and prints them.

Note: `peak` counts tensors, as a device holds them.  A process on a CPU holds more, `process_bytes`: libraries that are
loaded after torch, and freed memory that its allocator keeps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from colossal_lite.config.config import Config
from colossal_lite.distributed.ledger import LedgerRow
from colossal_lite.observe.tables import size
from colossal_lite.schedule.simulator import ScheduleTimeline

# Overheads of a process on a CPU, with torch 2.13 and glibc 2.36; a test measures both again.  Libraries, 2026-11-30:
# resident memory of two steps of a model of 50 KB, less that of importing torch.  In bf16 oneDNN makes kernels: 0 MiB
# on AVX2, 6 on AVX-512, 15 where that has bf16.  The middle is counted.  Allocator, 2026-11-21: glibc keeps 14 to 26 %
# of a step's freed memory, over five models of 260 to 620 MB.  With its threshold for mapping at 128 KiB
# (MALLOC_MMAP_THRESHOLD_) it keeps nothing.
LIBRARIES_BYTES = 52 * 2**20
NARROW_BYTES = 8 * 2**20
"""Bytes of the kernels for products in bf16."""
COMPILER_BYTES = 140 * 2**20
"""Bytes of torch's compiler, which torch loads when a block is first computed again or compiled."""
ALLOCATOR_SHARE = 0.2

STATE = (
    "weights", "gathered", "masters", "gradients", "optimizer", "visiting", "staging", "arena", "messages", "frozen",
)  # fmt: skip


SEQUENCES_CUT = "parallel.tensor.sequence_parallel: taken as on; a run proves it, or warns and has it off"
SEQUENCES_WHOLE = "parallel.tensor.sequence_parallel: off, as this model does not run on parts of sequences"

MOST_NAMED = 3
"""Kinds of memory that the first lines of a plan name."""


@dataclass(frozen=True)
class MemoryTerm:
    """Bytes of one kind on one tier of this rank, at the worst moment of a step, and their composition."""

    kind: str
    bytes: int
    origin: str
    tier: str = "device"


@dataclass(frozen=True)
class Term:
    """One number of the batch arithmetic, and its origin."""

    name: str
    value: int
    origin: str


@dataclass(frozen=True)
class RunPlan:
    """One rank's step: its memory, its traffic, and the parts of the batch. Prints as a table."""

    layout: str
    rank: int
    world_size: int
    parameters: int
    """Parameters of the whole model, ties counted once."""
    local_parameters: int
    memory: tuple[MemoryTerm, ...]
    traffic: tuple[LedgerRow, ...]
    batch: tuple[Term, ...]
    micro_batches: tuple[int, ...]
    """Samples of each part that this rank runs in a step."""
    device_bytes: int | None = None
    schedule: str = ""
    """The pipeline's schedule in words: its cut, its bubble, its activations; empty without a pipeline."""
    timeline: ScheduleTimeline | None = None
    """The pipeline's schedule with the costs of its stages."""
    memory_budget: str = ""
    """Under a budget the placement of each chunk, and the traffic of a step; empty without one."""
    link_bytes: int = 0
    """Over the link to the host in a step, both ways, under a budget."""
    updates: str = ""
    """Where updates run, with their lanes where rates are known; empty where all state rests on the device."""
    step_list: str = ""
    """The step's list of actions in brief, with the passes that made it."""
    assumed: str = ""
    """What a run proves first, in one line; "" if it proves nothing."""
    libraries_bytes: int = LIBRARIES_BYTES
    """Bytes that a process on a CPU loads after torch's import."""

    @property
    def peak_bytes(self) -> int:
        """On the device."""
        return sum(row.bytes for row in self.memory if row.tier == "device")

    @property
    def host_bytes(self) -> int:
        """State in host memory, and state that passes through it."""
        return sum(row.bytes for row in self.memory if row.tier == "host")

    @property
    def state_bytes(self) -> int:
        """Bytes allocated on the device from the first step to the last."""
        return sum(row.bytes for row in self.memory if row.kind in STATE and row.tier == "device")

    @property
    def process_bytes(self) -> int:
        """The most that a process on a CPU holds, less the import of torch. Ranks that exchange through shared memory
        read about as much as they post. Those pages are resident too."""
        kept = round(ALLOCATOR_SHARE * (self.peak_bytes - self.state_bytes))
        return self.peak_bytes + self.host_bytes + self.bytes_of("exchange") + self.libraries_bytes + kept

    @property
    def payload_bytes(self) -> int:
        """Logical payload of a step on all axes."""
        return sum(row.payload_bytes for row in self.traffic)

    @property
    def fits(self) -> bool | None:
        """None where the device's memory is not known."""
        return None if self.device_bytes is None else self.peak_bytes <= self.device_bytes

    @property
    def bubble(self) -> float:
        """Share of the step that the pipeline's ranks wait, with the costs of its stages; 0 without a pipeline."""
        return 0.0 if self.timeline is None else self.timeline.idle_share()

    def bytes_of(self, kind: str) -> int:
        return sum(row.bytes for row in self.memory if row.kind == kind)

    def __str__(self) -> str:
        return "\n".join(
            [
                *self.head,
                f"rank {self.rank} of {self.world_size}: {self.layout}",
                f"parameters {self.parameters:,}, here {self.local_parameters:,}",
                *(f"  {term.name:<18} {term.value:>12,}  {term.origin}" for term in self.batch),
                *(f"  {row.kind:<18} {size(row.bytes):>12}  {_told(row)}" for row in self.memory),
                f"  {'peak':<18} {size(self.peak_bytes):>12}  {self.verdict}",
                *(
                    f"  {f'{row.operation} on {row.axis}':<30} {row.calls:>6} x {size(row.payload_bytes):>12}"
                    for row in self.traffic
                ),
                *self.schedule.splitlines(),
                *self.step_list.splitlines(),
                *(f"  {line}" for line in (*self.memory_budget.splitlines(), *self.updates.splitlines())),
            ]
        )

    @property
    def verdict(self) -> str:
        if self.device_bytes is None:
            return "the device's memory is not known"
        return f"{'fits' if self.fits else 'does not fit'} in {size(self.device_bytes)}"

    @property
    def head(self) -> tuple[str, ...]:
        """The answer: whether it fits, the largest kinds of memory, traffic and bubble of a step, and assumptions."""
        rows = sorted(
            (row for row in self.memory if row.tier == "device" and row.bytes), key=lambda row: -row.bytes
        )
        filled = [f"{row.kind} {size(row.bytes)}" for row in rows[:MOST_NAMED]]
        if rest := sum(row.bytes for row in rows[MOST_NAMED:]):
            filled.append(f"others {size(rest)}")
        return (
            f"{self.verdict}: peak {size(self.peak_bytes)} on rank {self.rank} of {self.world_size}",
            f"  filled by {', '.join(filled)}",
            f"  {self.moved}",
            *([f"  {self.assumed}"] if self.assumed else []),
        )

    @property
    def moved(self) -> str:
        return f"moves {size(self.payload_bytes)} a step, bubble {self.bubble:.1%}"


def libraries_bytes(config: Config) -> int:
    """Bytes that a process with this configuration loads after torch's import, without the compiler's workspace."""
    compiler = config.activation_checkpoint != "none" or config.compile != "none"
    narrow = config.precision.dtype == "bf16"
    return LIBRARIES_BYTES + NARROW_BYTES * narrow + COMPILER_BYTES * compiler


def table(made: RunPlan) -> Any:
    """The parts of a plan, as rich tables, one under the other; `head` comes before."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    def columns_of(
        title: str, columns: tuple[str, ...], rows: Sequence[tuple[str, ...]], numbers: tuple[int, ...]
    ) -> Table:
        out = Table(title=title, title_justify="left", box=None, pad_edge=False)
        for index, column in enumerate(columns):
            out.add_column(column, justify="right" if index in numbers else "left", no_wrap=index in numbers)
        for row in rows:
            out.add_row(*map(Text, row))
        return out

    memory = [(row.kind, size(row.bytes), _told(row)) for row in made.memory]
    memory.append(("peak", size(made.peak_bytes), made.verdict))
    memory.append(("on a CPU", size(made.process_bytes), "with libraries and allocator, less torch's import"))
    traffic = [(r.operation, r.axis, f"{r.calls:,}", size(r.payload_bytes)) for r in made.traffic]
    below = [Text(f"\n{text}") for text in (made.memory_budget, made.updates) if text]
    return Group(
        Text(f"rank {made.rank} of {made.world_size}: {made.layout}"),
        Text(f"parameters {made.parameters:,}, here {made.local_parameters:,}"),
        columns_of("\nbatch", ("", "", "origin"), [(t.name, f"{t.value:,}", t.origin) for t in made.batch], (1,)),
        columns_of("\nmemory of this rank", ("", "bytes", "what"), memory, (1,)),
        columns_of(
            "\npayload of a step, of this rank", ("operation", "axis", "calls", "bytes"),
            traffic or [("none", "", "0", "0 B")], (2, 3),
        ),
        *below,
    )  # fmt: skip


def _told(row: MemoryTerm) -> str:
    return row.origin if row.tier == "device" else f"on the {row.tier}: {row.origin}"
