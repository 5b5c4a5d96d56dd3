"""Packs and allocates a rank's chunks, from names, sizes and specs alone.

Note: `initialize` fills them; `plan` makes the same ones on the meta device, so forecast and allocation are equal.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from colossal_lite.config.config import Config
from colossal_lite.config.errors import Problem, more_ranks, refuse
from colossal_lite.config.memory_schema import MemoryConfig
from colossal_lite.config.zero_stage import Sharding
from colossal_lite.distributed.communicator import Communicator
from colossal_lite.distributed.mesh import Mesh
from colossal_lite.kernels import TORCH, Ops
from colossal_lite.memory.arena import ArenaAllocator, slots
from colossal_lite.memory.chunk import Chunk
from colossal_lite.memory.disk_file import DiskError, DiskFile
from colossal_lite.memory.disk_layout import FileLayout
from colossal_lite.memory.frozen_chunk import FrozenChunk
from colossal_lite.memory.packing import (
    SHARD_ALIGN_NUMEL,
    SHARD_BLOCK_NUMEL,
    ChunkKey,
    ChunkSpec,
    Item,
    pack,
)
from colossal_lite.memory.task_records import TaskRecords
from colossal_lite.memory.weight_chunk import Groups, WeightChunk
from colossal_lite.numerics.optimizers import assign_groups, groups_of
from colossal_lite.numerics.precision import ChunkTypes, Precision, wide_as
from colossal_lite.offload.shard_streaming import landing_bytes
from colossal_lite.offload.state_storage import OpenFile
from colossal_lite.schedule.interval_packing import LiveInterval
from colossal_lite.schedule.step_moments import (
    ACCUMULATING,
    INCOMING,
    fill_intervals,
    flight_intervals,
    in_turn,
    sums_in_flight,
)
from colossal_lite.sharding.mesh_layout import MeshLayout
from colossal_lite.sharding.shard_spec import ShardSpec
from colossal_lite.zero.optimizer import ChunkOptimizer
from colossal_lite.zero.update_choice import UpdateChoice

# Chunks of this size are reduced while the next one fills; smaller ones pay more latency, larger ones overlap less.
# Between GPUs latency weighs more: links move 8 MiB at a fraction of their bandwidth.
CHUNK_BYTES = 8 * 2**20
CUDA_CHUNK_BYTES = 64 * 2**20
PIPELINE = "pipeline"


def sharding_of(config: Config) -> Sharding:
    """What the stage of a config shards, and when it reduces: by the micro-batches of one step."""
    pipeline = config.parallel.pipeline
    parts = pipeline.micro_batches or 4 * pipeline.size if pipeline.is_staged else 1
    in_backward = config.optimizer.update_when == "backward"
    visits = pipeline.reduces_by_visit
    if visits and config.zero.sum_order == "ordered":  # a rank alone adds in the same order
        visits = all(leaf.size == 1 for leaf in config.layout().leaves if leaf.name != PIPELINE)
    return Sharding.of(
        config.zero, config.gradient_accumulation * parts, updates_in_backward=in_backward, visits=visits
    )


def defers_updates(config: Config) -> bool:
    """Whether updates of state off the device run beside the next forward. Compiled blocks cannot run updates. Weights
    of stages that rest on the host would have to go home first: a stage is fetched before the forward of another."""
    by_stage = config.memory.moves and config.parallel.pipeline.is_staged
    return config.compile == "none" and config.optimizer.update_when == "step" and not by_stage


def pack_chunks(
    numels: Mapping[str, int], specs: Mapping[str, ShardSpec], config: Config, layout: MeshLayout,
    homes: Mapping[str, tuple[int, ...]] | None = None, blocks: Sequence[str] = (),
    frozen: Collection[str] = (), device_type: str = "cpu",
) -> tuple[ChunkSpec, ...]:  # fmt: skip
    """The chunks of the whole pipeline: of parameters of `numels` elements each on the ranks that hold them, in forward
    order. The same on every rank. If weights are sharded, those of `frozen` are in chunks of their own, numbered behind
    all others. If each rank holds them in full they are in none.

    `homes`: the pipeline stages that use each parameter; None: one stage has all. `blocks`: names of the model's
    blocks, with which sharded weights are gathered. Raises ValueError for an optimizer group that fits no parameter."""
    precision = Precision.of(config.precision)
    settings = groups_of(config.optimizer)
    alike = [replace(group, match="") for group in settings]
    trained = [name for name in numels if name not in frozen]
    groups = {name: alike.index(alike[i]) for name, i in assign_groups(trained, settings).items()}
    stages = dict.fromkeys(numels, (0,)) if homes is None else homes
    sharding = sharding_of(config)
    chunk_bytes = config.memory.chunk_bytes or (CUDA_CHUNK_BYTES if device_type == "cuda" else CHUNK_BYTES)
    units = _units(numels, blocks) if sharding.weight else dict.fromkeys(numels, 0)
    packed = pack(
        [
            Item(n, numel, _key(groups.get(n), specs[n], layout, units[n], stages[n]))
            for n, numel in numels.items()
            if n in groups or sharding.weight
        ],
        target_numel=max(1, chunk_bytes // wide_as(precision.master).itemsize),
        parts=lambda key: layout.size(*key.sync_axes),
        shard_numel=SHARD_BLOCK_NUMEL if sharding.ordered else SHARD_ALIGN_NUMEL,
    )
    return tuple(
        replace(spec, id=i)
        for i, spec in enumerate(sorted(packed, key=lambda spec: (not spec.key.trains, spec.id)))
    )


def build_chunks(
    names: Iterable[str], packed: Sequence[ChunkSpec], specs: Mapping[str, ShardSpec], config: Config,
    mesh: Mesh, device: torch.device, counts: Callable[[ChunkSpec], bool] = lambda spec: True,
    records: TaskRecords | None = None, ops: Ops = TORCH,
) -> tuple[Chunk, ...]:  # fmt: skip
    """This rank's chunks that train, without values; what rests on the host does in `records`, or, on meta, nowhere.

    `names`: its trainable parameters, and perhaps others, in forward order; `counts`: whether of the pipeline ranks
    with a chunk this one adds to the norm."""
    packed = [spec for spec in packed if spec.key.trains]
    precision = Precision.of(config.precision)
    sharding = sharding_of(config)
    records = records or TaskRecords("", device)
    groups = [_groups(spec, mesh) for spec in packed]
    scatterers = [group.scatterers(ordered=sharding.ordered) for group in groups]
    in_flight = sums_in_flight(group.all.size for group in groups)
    staging, received = _slots(sharding, names, packed, scatterers, precision.gradient, device, in_flight)
    return tuple(
        Chunk(
            spec, group, types=ChunkTypes.of(precision), device=device, sharding=sharding,
            counted=_counted(spec, specs, mesh) if counts(spec) else (),
            on_host=records if config.memory.moves else None,
            master_on_host=config.memory.records_tier != "device",
            staging=staging, received=received if sharding.scatters else None, slot=slot,
            square_sum=ops.square_sum,
        )
        for slot, (spec, group) in enumerate(zip(packed, groups, strict=True))
    )  # fmt: skip


def build_frozen(
    packed: Sequence[ChunkSpec], config: Config, mesh: Mesh, device: torch.device,
    records: TaskRecords | None = None,
) -> tuple[FrozenChunk, ...]:  # fmt: skip
    """This rank's chunks that do not train, without values; `records` as above."""
    records = records or TaskRecords("", device)
    precision, sharding = Precision.of(config.precision), sharding_of(config)
    found = tuple(
        FrozenChunk(
            spec, _groups(spec, mesh), types=ChunkTypes.of(precision), device=device, sharding=sharding,
            on_host=records if config.memory.moves else None,
        )
        for spec in packed
        if not spec.key.trains
    )  # fmt: skip
    for chunk in found:
        chunk.base, chunk.world = config.memory.shared_base, mesh.world
    return found


def chunk_optimizer(
    chunks: Sequence[Chunk], config: Config, ops: Ops, shapes: Mapping[str, torch.Size], mesh: Mesh,
    records: TaskRecords, frozen: Sequence[WeightChunk],
) -> tuple[ChunkOptimizer, UpdateChoice]:  # fmt: skip
    """The optimizer over these chunks, whose state on the host is in `records`, beside `frozen` ones; and what has
    chosen the mix of its updates. If state may be on disk it is collective. It raises ConfigError on every
    rank if the disk of one has no room or cannot be written."""
    memory, faults, made = config.memory, [], None
    open_file: OpenFile | None = None
    if (memory.records_tier == "disk" or memory.spills_to_disk) and memory.disk_dir is not None:
        directory = Path(os.path.expanduser(memory.disk_dir))
        label, timeout_s = f"rank{mesh.rank}", config.timeout_s

        def open_file(layout: FileLayout, resting: Collection[int]) -> DiskFile:
            return DiskFile(directory, layout, label=label, timeout_s=timeout_s, resting=resting)

    device = chunks[0].device if chunks else torch.device("cpu")
    choice = UpdateChoice(config, ops, device, mesh.world.gather_json)
    try:
        made = ChunkOptimizer(
            chunks, config, ops, shapes, records=records, choice=choice, open_file=open_file,
            host_room=host_room(memory, chunks, frozen),
        )  # fmt: skip
    except DiskError as error:
        faults = [f"rank {mesh.rank}: {error}"]
    if open_file is not None:
        faults = [fault for row in mesh.world.gather_json(faults) for fault in row]
    if faults and made is not None:
        made.close()
    other = "a larger memory.host_budget" if memory.spills_to_disk else "memory.placement='host'"
    legal = f"an existing directory with room, {other}, or {more_ranks(config.zero.stage)}"
    refuse(Problem("memory.disk_dir", memory.disk_dir, fault, legal) for fault in faults)
    assert made is not None
    choice.tell(mesh.rank)
    return made, choice


def host_room(memory: MemoryConfig, chunks: Sequence[Chunk], frozen: Sequence[WeightChunk]) -> int | None:
    """Bytes of the host for records and for their updates, when all weights and gradients that may be on the host are
    there. None: no limit, or nothing goes to disk."""
    if not memory.spills_to_disk or memory.host_budget is None:
        return None
    weights = [c.resting_bytes for c in (*chunks, *frozen) if c.weights_at_rest is not None]
    gradients = [c.gradient.nbytes for c in chunks if c.gradient_at_rest is not None]
    landing = landing_bytes(gradients, chunks[0].device) if chunks else 0
    return memory.host_budget - sum(weights) - sum(gradients) - landing


def slots_of(chunks: Sequence[Chunk]) -> tuple[ArenaAllocator, ...]:
    """The slots that these chunks share."""
    found = (places for chunk in chunks for places in (chunk.staging, chunk.received))
    return tuple(dict.fromkeys(places for places in found if places is not None))


def _slots(
    sharding: Sharding, names: Iterable[str], packed: Sequence[ChunkSpec], comms: Sequence[Communicator],
    dtype: torch.dtype, device: torch.device, in_flight: int,
) -> tuple[ArenaAllocator, ArenaAllocator]:  # fmt: skip
    """Slots for accumulating gradients, and for what other ranks send in reductions, for each of `packed`.

    The stages on a rank of a pipeline run one after the other; a chunk of several stages accumulates all step."""
    groups: dict[tuple[int, ...], list[int]] = {}
    for index, spec in enumerate(packed):
        groups.setdefault(spec.key.stages, []).append(index)
    fill: dict[int, LiveInterval] = {}
    own = [indices for stages, indices in groups.items() if len(stages) == 1]
    turns = list(in_turn([_fill_of([packed[i] for i in part], names, sharding, in_flight) for part in own]))
    fill |= zip((i for indices in own for i in indices), turns, strict=True)
    end = max((one.stop for one in turns), default=0)
    fill |= {i: LiveInterval(0, end, spec.numel) for i, spec in enumerate(packed) if i not in fill}
    incoming = [
        comm.scratch_numel(spec.numel, ordered=sharding.ordered, native=device.type == "cuda")
        for spec, comm in zip(packed, comms, strict=True)
    ]
    turns = list(in_turn([flight_intervals([incoming[i] for i in indices]) for indices in groups.values()]))
    flight = dict(zip((i for indices in groups.values() for i in indices), turns, strict=True))
    filling = [fill[i] for i in sorted(fill)] if sharding.by_micro_batch else ()
    flying = [flight[i] for i in sorted(flight)] if sharding.scatters else ()
    return slots(filling, dtype, device, ACCUMULATING), slots(flying, dtype, device, INCOMING)


def _fill_of(
    packed: Sequence[ChunkSpec], names: Iterable[str], sharding: Sharding, in_flight: int
) -> tuple[LiveInterval, ...]:
    """When each of these chunks fills in one backward, or in all of one visit; `names` as for `build_chunks`."""
    place = {entry.name: index for index, spec in enumerate(packed) for entry in spec.entries}
    order = [place[name] for name in names if name in place]
    found = fill_intervals(order, [spec.numel for spec in packed], in_flight)
    return tuple(replace(one, start=0) for one in found) if sharding.by_visit else found


def _groups(spec: ChunkSpec, mesh: Mesh) -> Groups:
    key, data = spec.key, mesh.layout.leaf_names("data")

    def along(names: Sequence[str]) -> Communicator:
        if len(data) > 1 and {*data} <= {*names}:
            names = ("data", *(name for name in names if name not in data))
        return mesh.axis(*names)

    copies = [axis for axis in key.sync_axes if axis not in key.shard_axes]
    return Groups(along(key.sync_axes), along(key.shard_axes), along(copies), along(key.near_axes))


def _units(names: Iterable[str], blocks: Sequence[str]) -> dict[str, int]:
    """The unit of each parameter, given in forward order: that of its block, or of the stretch between two."""
    number = {block: 2 * index + 1 for index, block in enumerate(blocks)}
    units, last = {}, 0
    for name in names:
        block = next((number[b] for b in blocks if name.startswith(f"{b}.")), None)
        last = block if block is not None else last + last % 2
        units[name] = last
    return units


def _key(
    group: int | None, spec: ShardSpec, layout: MeshLayout, unit: int, stages: tuple[int, ...]
) -> ChunkKey:
    """`group`: None for a frozen parameter."""
    cut_or_summed = {*spec.sharding_axes, *spec.sync_axes(layout), PIPELINE}
    replicated = any(leaf.size > 1 and leaf.name not in cut_or_summed for leaf in layout.leaves)
    return ChunkKey(group or 0, spec.sync_axes(layout), replicated, unit, stages, group is not None)


def _counted(chunk: ChunkSpec, specs: Mapping[str, ShardSpec], mesh: Mesh) -> list[tuple[int, int]] | None:
    """Elements of a chunk whose squares this rank adds to the norm; None where that is all of them."""
    coords = {axis: 0 if axis == PIPELINE else coord for axis, coord in mesh.coords.items()}
    intervals = [
        (entry.start + start, entry.start + stop)
        for entry in chunk.entries
        for start, stop in specs[entry.name].owned(mesh.layout, coords)
    ]
    return None if sum(stop - start for start, stop in intervals) == chunk.used_numel else intervals
