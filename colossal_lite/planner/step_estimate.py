"""Measures the rest of a planned step: state and its tiers, reductions, totals, batch sizes.

Note: bytes of state are those of the real chunks and the real optimizer on the meta device.  Collectives are those that
the chunks call on a communicator that counts.  `temporaries` include the receive buffers of an exchange, as on gloo.
Native collectives take as much or less.  The transport's own buffers are not included.  Ranks on CPUs of one host need
no receive buffers: they read shared memory.  The row `exchange` is what two successive exchanges post there.  A rank
far ahead of the others may have posted more.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from colossal_lite.config.config import Config
from colossal_lite.config.zero_stage import Sharding
from colossal_lite.data.loader import cut
from colossal_lite.distributed.mesh import Mesh
from colossal_lite.distributed.send_buffer import ALIGN_BYTES
from colossal_lite.kernels import TORCH
from colossal_lite.memory.chunk import Chunk
from colossal_lite.memory.packing import ChunkSpec
from colossal_lite.memory.task_records import TaskRecords
from colossal_lite.memory.weight_chunk import WeightChunk
from colossal_lite.numerics.precision import ChunkTypes, Precision, wide_as
from colossal_lite.offload.pieces import StateKind
from colossal_lite.offload.placement import StatePlacement
from colossal_lite.offload.shard_streaming import streaming
from colossal_lite.planner.dry_run import META, Cost, Whole, bytes_of
from colossal_lite.planner.run_plan import MemoryTerm, Term
from colossal_lite.schedule.gather_plan import GatherPlan
from colossal_lite.schedule.plan import Action, Plan
from colossal_lite.schedule.update_rates import UpdateBytes
from colossal_lite.zero.build_chunks import defers_updates, host_room, sharding_of, slots_of
from colossal_lite.zero.grad_norm import in_order, ordered_squares
from colossal_lite.zero.optimizer import ORIGINS, ChunkOptimizer
from colossal_lite.zero.state_pieces import (
    StepUses,
    beside_of,
    fixed_of,
    pieces_of,
    placed_by,
    update_bytes_of,
)
from colossal_lite.zero.update_choice import UpdateChoice

TIERS = ("device", "host", "disk")
BESIDE_STATE = ("gathered", "frozen", "activations", "logits", "temporaries", "messages")


def record_step(
    chunks: tuple[Chunk, ...], gathers: GatherPlan, config: Config, mesh: Mesh, whole: Whole,
    frozen: tuple[WeightChunk, ...],
) -> None:  # fmt: skip
    """Record the communication of a step besides its micro-batches: batch sizes, gradients, totals, weights."""
    numbers = max(whole.reported_numbers, 1) + 1 if whole.has_statistics else whole.reported_numbers
    if numbers:
        mesh.axis("data").all_gather(torch.empty(1, numbers, dtype=torch.int64, device=META))
    sharding = sharding_of(config)
    for part in reversed(range(config.gradient_accumulation if sharding.by_micro_batch else 1)):
        for chunk in reversed(chunks):
            chunk.start_reduce()
            chunk.finish_reduce()
            if sharding.updates_in_backward and part == 0:
                chunk.conclude()
                chunk.keep_squares()
                chunk.free_gradient()
    if sharding.updates_in_backward:
        mesh.world.all_reduce(torch.empty(5, dtype=torch.float64, device=META))  # loss, weight, differences
    for chunk in chunks if not sharding.updates_in_backward else ():
        chunk.conclude()
    record_agreement(chunks, [chunk.spec for chunk in chunks], sharding, mesh, whole)
    for near in (False, True):
        for index, times in gathers.gathers(near=near).items():
            for _ in range(times * config.gradient_accumulation):
                record_gather((*chunks, *frozen)[index], near=near)


def record_gather(chunk: WeightChunk, *, near: bool) -> None:
    """Gather the weights of a chunk, from the neighbours or from all ranks of a copy."""
    comm = chunk.groups.near if near else chunk.shards
    sent_bytes = chunk.types.wire_bytes(chunk.spec.numel // comm.size)
    comm.all_gather(torch.empty(sent_bytes, dtype=torch.uint8, device=META))


def record_agreement(
    chunks: Sequence[Chunk], packed: Sequence[ChunkSpec], sharding: Sharding, mesh: Mesh, whole: Whole
) -> None:
    """Reduce the totals of a step, and gather the updated weights. `packed`: the chunks of the whole pipeline."""
    # Loss, weight, stop with samples; three differences; what was used; squares.
    numel = 6 + sum(len(spec.entries) for spec in packed) + 1
    if sharding.ordered:
        numel += ordered_squares(chunks, in_order(packed, whole.names), mesh, META).numel() - 1
    mesh.world.all_reduce(torch.empty(numel, dtype=torch.float64, device=META))
    for chunk in chunks:
        chunk.start_gather()


@dataclass(frozen=True)
class StateForecast:
    """The state of a rank.

    - rows: its memory
    - placed: under a budget the placement of its state
    - updates, told: the list of its updates, and in words where they run
    """

    rows: tuple[MemoryTerm, ...]
    placed: StatePlacement | None
    updates: Plan
    told: str

    @property
    def link_bytes(self) -> int:
        """Bytes over the links in a step, both ways, of what a placement moves."""
        return self.placed.up_bytes + self.placed.down_bytes if self.placed else 0


def memory_rows(
    config: Config, chunks: tuple[Chunk, ...], gathers: GatherPlan, whole: Whole, cost: Cost,
    frozen: tuple[WeightChunk, ...] = (), operations: float = 0.0, actions: Sequence[Action] | None = None,
    messages: MemoryTerm | None = None,
) -> StateForecast:  # fmt: skip
    """The memory of a rank, row by row, the placement of its state, and its updates. `operations` as `UpdateChoice` has
    them; `actions`: this rank's list of a step in a pipeline, `messages`: the row of its messages."""
    choice = UpdateChoice(config, TORCH, META)
    choice.expect(operations)
    optimizer = ChunkOptimizer(
        chunks,
        config,
        TORCH,
        {},
        records=TaskRecords("", META),
        choice=choice,
        host_room=None if config.memory.moves else host_room(config.memory, chunks, frozen),
    )
    rows = (
        *_weight_rows(config, chunks, gathers),
        *_master_rows(config, chunks, optimizer),
        *_gradient_rows(config, chunks),
        *_state_rows(config, chunks, optimizer),
        _frozen_row(config, whole, frozen),
        *_activation_rows(config, whole, cost, update_bytes_of(config.memory, chunks, optimizer)),
        *([] if messages is None else [messages]),
    )
    placed, updates = None, optimizer.plan
    if config.memory.moves:
        plan = gathers if any(chunk.is_sharded for chunk in (*chunks, *frozen)) else None
        defers = defers_updates(config)
        uses = StepUses.of_trace(plan, config.gradient_accumulation, len(chunks), defers=defers)
        if actions is not None:
            uses = StepUses.of_list(actions)
        placed = _placed(config, chunks, uses, frozen, optimizer, rows)
        origins = {row.kind: row.origin for row in rows} | ORIGINS
        origins["optimizer"] = f"{config.optimizer.type}, with its masters"
        rows = tuple(MemoryTerm(kind, held, origins[kind], tier) for kind, tier, held in placed.rows)
        updates = _updates(optimizer, placed, chunks)
        choice.describe(_work_of_each(optimizer, placed, chunks), optimizer.mix, placed.waits)
    shown = tuple(row for row in rows if row.bytes or row.kind in ("weights", "activations"))
    return StateForecast(shown, placed, updates, choice.lanes)


def _off_device(placed: StatePlacement) -> dict[StateKind, set[int]]:
    """The chunks whose parts a placement has off the device. Of LAST_SUM, those whose earlier sums alone it has there.
    These are not among those of GRADIENTS."""
    off = {kind: {name.chunk for name in placed.off_device if name.kind is kind} for kind in StateKind}
    has_last = {piece.name.chunk for piece in placed.pieces if piece.last_sum}
    returning = off[StateKind.GRADIENTS] & (has_last - off[StateKind.LAST_SUM])
    return off | {StateKind.GRADIENTS: off[StateKind.GRADIENTS] - returning, StateKind.LAST_SUM: returning}


def _work_of_each(
    optimizer: ChunkOptimizer, placed: StatePlacement, chunks: Sequence[Chunk]
) -> list[UpdateBytes]:
    """What the update of each chunk reads and writes where a placement has its parts."""
    off = _off_device(placed)
    return [
        optimizer.work_of(
            index, record=index in off[StateKind.OPTIMIZER], gradient=index in off[StateKind.GRADIENTS],
            weights=index in off[StateKind.WEIGHTS], returns=index in off[StateKind.LAST_SUM],
        )
        for index in range(len(chunks))
    ]  # fmt: skip


def _updates(optimizer: ChunkOptimizer, placed: StatePlacement, chunks: Sequence[Chunk]) -> Plan:
    """The list of updates of a placement."""
    off = _off_device(placed)
    records, weights, gradients = (
        off[kind] for kind in (StateKind.OPTIMIZER, StateKind.WEIGHTS, StateKind.GRADIENTS)
    )
    there = {index for index, chunk in enumerate(chunks) if optimizer.is_updated_on_host(chunk)} & records
    streamed = {
        index: streaming(chunks[index], weights=index in weights, gradient=index in gradients)
        for index in sorted((weights | gradients) - there)
    }
    return optimizer.planned(records, {name.chunk for name in placed.on_disk}, streamed)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _weight_rows(config: Config, chunks: Sequence[Chunk], gathers: GatherPlan) -> tuple[MemoryTerm, ...]:
    compute = Precision.of(config.precision).compute
    units = "stages" if config.parallel.pipeline.is_staged else "blocks"
    numel = sum(chunk.spec.numel for chunk in chunks)
    used = sum(chunk.spec.used_numel for chunk in chunks)
    return (
        MemoryTerm(
            "weights",
            sum(c.resting_bytes for c in chunks),
            f"{numel:,} x {_name(compute)} in {len(chunks)} chunks, {numel - used:,} of them alignment",
        ),
        MemoryTerm(
            "gathered",
            gathers.arena_numel * compute.itemsize,
            f"slots of {units}, {config.zero.prefetch} ahead of the one that computes",
        ),
    )


def _by_tier(chunks: Sequence[Chunk], optimizer: ChunkOptimizer) -> dict[str, list[Chunk]]:
    return {tier: [c for c in chunks if (optimizer.tier_of(c) or "device") == tier] for tier in TIERS}


def _master_rows(config: Config, chunks: Sequence[Chunk], optimizer: ChunkOptimizer) -> Iterator[MemoryTerm]:
    precision = Precision.of(config.precision)
    origin = "what float32 has beyond bfloat16" if precision.split else _name(precision.master)
    for tier, some in _by_tier(chunks, optimizer).items():
        yield MemoryTerm("masters", sum(c.master_bytes for c in some), origin, tier)


def _gradient_rows(config: Config, chunks: Sequence[Chunk]) -> tuple[MemoryTerm, ...]:
    held = sum(bytes_of(c.gradient if c.accumulating is None else c.accumulating) for c in chunks)
    staging = sum(slots.bytes for slots in slots_of(chunks))
    return (
        MemoryTerm("gradients", held, _name(Precision.of(config.precision).gradient)),
        MemoryTerm("staging", staging, "slots of gradients on their way"),
    )


def _state_rows(config: Config, chunks: Sequence[Chunk], optimizer: ChunkOptimizer) -> Iterator[MemoryTerm]:
    """Optimizer states, and the staging buffers of their copies."""
    origin = f"{config.optimizer.type}, {_name(wide_as(Precision.of(config.precision).master))}"
    for tier, some in _by_tier(chunks, optimizer).items():
        yield MemoryTerm("optimizer", sum(optimizer.bytes_of(c)[0] for c in some), origin, tier)
    for visit in optimizer.visits:
        yield MemoryTerm(visit.kind, visit.forecast_bytes, ORIGINS[visit.kind], visit.tier or "device")


def _frozen_row(config: Config, whole: Whole, frozen: Sequence[WeightChunk]) -> MemoryTerm:
    precision = Precision.of(config.precision)
    held, compute = _frozen_bytes(whole, frozen, precision), _name(precision.compute)
    return MemoryTerm("frozen", held, f"{compute}, parameters that do not train")


def _activation_rows(config: Config, whole: Whole, cost: Cost, update_bytes: int) -> tuple[MemoryTerm, ...]:
    """Activations at the end of forward, and the temporaries on top of them at the peak."""
    peak = max(cost.until, cost.after, update_bytes)
    deferred = config.memory.moves and defers_updates(config)
    if deferred or sharding_of(config).updates_in_backward:  # an update runs beside activations
        peak = max(cost.until, cost.after) + update_bytes
    kept = min(cost.kept, peak)
    origin = f"kept for backward, checkpointing {config.activation_checkpoint}"
    if whole.recurrent:
        origin += f"; without what kernels of {', '.join(whole.recurrent)} keep, often more than this"
    return (
        MemoryTerm("activations", kept - cost.logits, origin),
        MemoryTerm("logits", cost.logits, _name(Precision.of(config.precision).compute)),
        MemoryTerm("temporaries", peak - kept, "on top at the worst moment"),
    )


def _placed(
    config: Config, chunks: tuple[Chunk, ...], uses: StepUses, frozen: tuple[WeightChunk, ...],
    optimizer: ChunkOptimizer, rows: Sequence[MemoryTerm],
) -> StatePlacement:  # fmt: skip
    """The placement of the state under the budget of the config, beside these rows."""
    is_staged = config.parallel.pipeline.is_staged
    fixed = fixed_of(chunks, optimizer, is_staged=is_staged)
    fixed |= {row.kind: row.bytes for row in rows if row.kind in BESIDE_STATE}
    pieces = pieces_of(chunks, optimizer, uses, frozen)
    fixed["frozen"] -= sum(piece.bytes for piece in pieces if piece.name.kind is StateKind.FROZEN)
    beside = beside_of(chunks, optimizer, config.gradient_accumulation, is_staged=is_staged)
    return placed_by(config.memory, pieces, fixed, META, beside)


def _frozen_bytes(whole: Whole, frozen: Sequence[WeightChunk], precision: Precision) -> int:
    """Bytes of the frozen chunks, or of the frozen parameters if these are in no chunk."""
    in_chunks = {entry.name for chunk in frozen for entry in chunk.spec.entries}
    apart = sum(numel for name, numel in whole.frozen.items() if name not in in_chunks)
    return sum(chunk.resting_bytes for chunk in frozen) + ChunkTypes.of(precision).resting_bytes(apart)


def exchange_rows(mesh: Mesh, unread: int = 0) -> tuple[MemoryTerm, ...]:
    """Bytes in shared memory for other ranks to read, with `unread` messages of a pipeline. Each is aligned to a cache
    line."""
    posted = mesh.ledger.shared_bytes + unread
    posted += -posted % ALIGN_BYTES
    return (
        (MemoryTerm("exchange", posted, "posted for ranks of this host to read", "host"),) if posted else ()
    )


def samples_of(config: Config, batch: int, mesh: Mesh) -> tuple[int, ...]:
    """Samples of this rank's micro-batches, larger ones first."""
    start, stop = cut(batch, mesh.size("data"), mesh.coord("data"))
    parts = config.gradient_accumulation
    bounds = [cut(stop - start, parts, part) for part in range(parts)]
    return tuple(last - first for first, last in bounds)


def batch_terms(
    config: Config, batch: int, sequence: int, mesh: Mesh, pieces: tuple[int, ...]
) -> tuple[Term, ...]:
    origins = {row.path: row.origin for row in config.resolved()}
    data = mesh.size("data")
    return (
        Term("global batch", batch, "given: samples a step"),
        Term("sequence", sequence, "given: tokens a sample"),
        Term("tokens a step", batch * sequence, "global batch x sequence"),
        Term("data", data, f"parallel.data, {origins['parallel.data']}"),
        Term("local batch", sum(pieces), f"this rank's part of {batch} over {data}"),
        Term(
            "accumulation",
            config.gradient_accumulation,
            f"gradient_accumulation, {origins['gradient_accumulation']}",
        ),
        Term("micro-batch", max(pieces), "the largest of " + ", ".join(map(str, sorted(set(pieces))))),
    )
