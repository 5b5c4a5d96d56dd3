"""Lists the model state that can move between device and host, and the device bytes that cannot.

Note: the planner and the running engine call the same functions, so a planned placement is the one that is used.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from colossal_lite.config.memory_schema import MemoryConfig
from colossal_lite.memory.chunk import Chunk
from colossal_lite.memory.weight_chunk import WeightChunk
from colossal_lite.offload.pieces import (
    GRADIENT_DOWN,
    LEAVING,
    WEIGHTS_BOTH,
    WEIGHTS_UP,
    LinkCrossing,
    Name,
    StateKind,
    StatePiece,
)
from colossal_lite.offload.placement import StatePlacement, divide, place, spill_to_disk
from colossal_lite.offload.shard_streaming import landing_bytes
from colossal_lite.schedule.gather_plan import FROM_NEAR, GatherPlan
from colossal_lite.schedule.interval_packing import LiveRange
from colossal_lite.schedule.plan import Action, ActionKind
from colossal_lite.schedule.step_moments import Backwards, SharedInterval, moments_of_step
from colossal_lite.zero.build_chunks import slots_of
from colossal_lite.zero.gather_units import units_of
from colossal_lite.zero.gradient_hooks import in_flight_of
from colossal_lite.zero.optimizer import ChunkOptimizer
from colossal_lite.zero.user_optimizer import OwnOptimizer


@dataclass(frozen=True)
class StepUses:
    """How often a step uses each chunk, by its number in the whole model.

    - fetches: times that its weights come into a slot
    - begins: those whose weights are copied to one right behind their update, from the device
    - read_late: those whose shard backward reads when its gradient may be complete
    - sums: of its gradient, None: as many as `every`
    - shares_time: whether buffers of different times share an arena. Then one backward after the other has all chunks
    """

    every: int = 1
    fetches: Mapping[int, int] = field(default_factory=dict)
    begins: frozenset[int] = frozenset()
    read_late: frozenset[int] = frozenset()
    sums: Mapping[int, int] | None = None
    shares_time: bool = True

    @classmethod
    def of_trace(
        cls, gathers: GatherPlan | None, accumulation: int, num_chunks: int, *, defers: bool
    ) -> StepUses:
        """Of a step without stages, whose micro-batches gather by that plan. `defers`: updates run in a forward."""
        if gathers is None:
            return cls(accumulation)
        begins = frozenset(gathers.forward[0].resident) if gathers.forward else frozenset[int]()
        fetches = {chunk: accumulation * times for chunk, times in gathers.stays().items()}
        if defers and all(chunk in fetches for chunk in range(num_chunks)):
            actions = (action for step in gathers.forward for action in step.actions)
            last = max((chunk for chunk in begins if chunk < num_chunks), default=-1)
            begins |= _fetched_in_order(actions, last, num_chunks)
        return cls(accumulation, fetches, begins, gathers.read_late(num_chunks))

    @classmethod
    def of_list(cls, actions: Sequence[Action]) -> StepUses:
        """Of a rank's list of a step of a pipeline; an empty one: of no step yet."""
        counts = {
            kind: Counter(a.chunk for a in actions if a.kind is kind and a.chunk is not None)
            for kind in (ActionKind.RESHARD, ActionKind.REDUCE)
        }  # each stay ends with a RESHARD
        return cls(fetches=counts[ActionKind.RESHARD], sums=counts[ActionKind.REDUCE], shares_time=False)


def _fetched_in_order(actions: Iterable[Action], last: int, stop: int) -> frozenset[int]:
    """The chunks between the updated `last` and `stop` that are fetched first when their update is the last so far."""
    found = set[int]()
    for action in actions:
        if action.kind in (ActionKind.FETCH, ActionKind.UNSHARD) and action.resource != FROM_NEAR:
            assert action.chunk is not None
            if last < action.chunk < stop:
                last = action.chunk
                found.add(last)
    return frozenset(found)


def pieces_of(
    chunks: Sequence[Chunk], optimizer: ChunkOptimizer, uses: StepUses, frozen: Sequence[WeightChunk] = ()
) -> tuple[StatePiece, ...]:
    """The pieces that may rest on device or host; call it while all of them are on the host. The weights that a step
    begins with are taken from the slots of the update before, if they are updated."""
    time_shared, in_flight = _time_shared(chunks, uses), in_flight_of(chunks)
    out: list[StatePiece] = []
    for index, chunk in enumerate(chunks):
        fetches = uses.fetches.get(chunk.spec.id, 0)
        sums = uses.every if uses.sums is None else uses.sums.get(chunk.spec.id, 1)
        begins = chunk.spec.id in uses.begins
        if optimizer.is_updated_on_host(chunk):
            for piece in _updated_on_host(index, chunk, optimizer, fetches, sums, begins):
                out.append(replace(piece, in_flight=in_flight))
            continue
        if chunk.weights_at_rest is not None:
            ups = fetches - begins + chunk.updates_weights
            shared = SharedInterval.WEIGHTS if index in time_shared else None
            name, is_written = Name(index, StateKind.WEIGHTS), not chunk.updates_weights
            out.append(StatePiece(name, chunk.resting_bytes, ups, 1, is_written=is_written, shared=shared))
        if chunk.gradient_at_rest is not None:
            for piece in gradients_of(index, chunk.gradient.nbytes, sums, time_shared=uses.shares_time):
                out.append(replace(piece, in_flight=in_flight))
        if record_bytes := optimizer.record_bytes(index):
            out.append(StatePiece(Name(index, StateKind.OPTIMIZER), record_bytes, 1, 1))
    for each in frozen:
        if each.weights_at_rest is not None:
            ups = uses.fetches.get(each.spec.id, 0)
            out.append(StatePiece(Name(each.spec.id, StateKind.FROZEN), each.resting_bytes, ups, 0))
    return tuple(out)


def gradients_of(index: int, size_bytes: int, sums: int, *, time_shared: bool) -> Iterator[StatePiece]:
    """The pieces of a chunk's gradient, a sum of so many; `time_shared`: it shares memory with weights."""
    has_last = time_shared and sums > 1
    shared = SharedInterval.GRADIENTS if time_shared and sums == 1 else None
    name = Name(index, StateKind.GRADIENTS)
    yield StatePiece(name, size_bytes, 1, sums - has_last, shared=shared, sums=sums, last_sum=has_last)
    if has_last:
        yield StatePiece(Name(index, StateKind.LAST_SUM), size_bytes, 0, 1, shared=SharedInterval.LAST_SUMS)


def _time_shared(chunks: Sequence[Chunk], uses: StepUses) -> frozenset[int]:
    """The chunks whose weights, if on the device, are needed for a part of a step only. No update reads them, and no
    backward does after their gradients."""
    apart = (c.weights_at_rest is not None and not c.updates_weights for c in chunks)
    some = {index for index, is_apart in enumerate(apart) if is_apart and uses.shares_time}
    return frozenset(index for index in some if chunks[index].spec.id not in uses.read_late)


def _updated_on_host(
    index: int, chunk: Chunk, optimizer: ChunkOptimizer, fetches: int, sums: int, begins: bool
) -> Iterator[StatePiece]:
    """The pieces of a chunk that is updated on the host while its record is there. What cannot rest there crosses the
    link all the same."""
    both = int(chunk.updates_weights)
    weights, gradients = Name(index, StateKind.WEIGHTS), Name(index, StateKind.GRADIENTS)
    up, down = WEIGHTS_BOTH if both else WEIGHTS_UP, GRADIENT_DOWN.wide(optimizer.mix.gradient_width)
    shard_bytes = chunk.owned_numel * chunk.local_shard.element_size()
    pieces = (
        StatePiece(
            weights, shard_bytes, fetches - begins + both, 1, moves=chunk.weights_at_rest is not None,
            beside=(LinkCrossing(fetches), LinkCrossing(1, both, (up,))),
        ),
        StatePiece(
            gradients, chunk.gradient.nbytes, 1, sums, moves=chunk.gradient_at_rest is not None, sums=sums,
            beside=(LinkCrossing(0, sums, (LEAVING,)), LinkCrossing(0, 1, (down,))),
        ),
        StatePiece(
            Name(index, StateKind.OPTIMIZER), optimizer.record_bytes(index), 1, 1,
            beside=(LinkCrossing(), LinkCrossing()),
        ),
    )  # fmt: skip
    return (piece for piece in pieces if piece.bytes)


def fixed_of(
    chunks: Sequence[Chunk], optimizer: ChunkOptimizer | OwnOptimizer, *, is_staged: bool
) -> dict[str, int]:
    """Bytes on the device of model state that does not move, by kind; `is_staged`: of stages of a pipeline."""
    gradients = [
        c.gradient if c.accumulating is None else c.accumulating for c in chunks if c.gradient_at_rest is None
    ]
    fixed = {
        "weights": sum(c.resting_bytes for c in chunks if c.weights_at_rest is None),
        "gradients": sum(t.nbytes for t in gradients),
    }
    if is_staged or optimizer.shards is None:
        fixed["staging"] = sum(slots.planned_bytes for slots in slots_of(chunks))
    if optimizer.tiers is None:
        fixed["masters"] = sum(c.master_bytes for c in chunks)
        fixed["optimizer"] = sum(optimizer.bytes_of(c)[1] for c in chunks)
    return fixed


def beside_of(
    chunks: Sequence[Chunk], optimizer: ChunkOptimizer | OwnOptimizer, accumulation: int, *, is_staged: bool
) -> tuple[LiveRange, ...] | None:  # fmt: skip
    """The live ranges that share an arena with pieces on the device (memory/arena.py); None: there is no such arena,
    as in a pipeline. The backwards of its stages have no order that all its schedules keep."""
    if is_staged or optimizer.shards is None:
        return None
    backward = (each for slots in slots_of(chunks) for each in slots.live_ranges)
    ranges = moments_of_step(backward, len(chunks), in_flight_of(chunks))
    return tuple(backwards_of(accumulation).of(each, len(chunks) - 1) for each in ranges)


def least_gathered_bytes(chunks: Sequence[WeightChunk]) -> int:
    """The least that slots of gathered weights take, by any plan."""
    widths = {c.spec.id: c.spec.numel * c.types.compute.itemsize for c in chunks}
    return max((sum(widths[c] for c in unit) for unit in units_of(chunks).values()), default=0)


def backwards_of(accumulation: int) -> Backwards:
    return Backwards.EACH if accumulation > 1 else Backwards.LAST


def update_bytes_of(
    memory: MemoryConfig, chunks: Sequence[Chunk], optimizer: ChunkOptimizer | OwnOptimizer
) -> int:
    """The most that an update on the device may hold beside the state, wherever records rest."""
    there = (chunk for chunk in chunks if memory.moves or not optimizer.is_updated_on_host(chunk))
    return max((chunk.update_bytes for chunk in there), default=0)


def placed_by(
    memory: MemoryConfig, pieces: Sequence[StatePiece], fixed: Mapping[str, int], device: torch.device,
    beside: tuple[LiveRange, ...] | None,
) -> StatePlacement:  # fmt: skip
    """The placement of these pieces under a config that moves them; `beside` as in `StatePlacement`."""
    if memory.placement == "static":
        placed = divide(pieces, fixed, memory.host_fraction.model_dump(), memory.device_budget, beside)
    else:
        placed = spilled_by(memory, place(pieces, fixed, memory.device_budget, beside), device)
    budget = memory.host_budget
    first_bytes = 0 if budget is None else host_bytes_of(first_placement(memory, placed, device), device)
    return replace(placed, host_budget=budget, first_host_bytes=first_bytes)


def spilled_by(memory: MemoryConfig, placed: StatePlacement, device: torch.device) -> StatePlacement:
    """As `placed`, with records on disk that the host has no room for, if there is a disk."""
    if not memory.spills_to_disk:
        return placed
    assert memory.host_budget is not None
    return spill_to_disk(placed, memory.host_budget, landing_bytes(_gradients_on_host(placed), device))


def first_placement(memory: MemoryConfig, placed: StatePlacement, device: torch.device) -> StatePlacement:
    """Before the first update: all that can rest off the device does."""
    every = frozenset(piece.name for piece in placed.pieces if piece.moves)
    return spilled_by(memory, replace(placed, on_host=every, on_disk=frozenset()), device)


def host_bytes_of(placed: StatePlacement, device: torch.device) -> int:
    return placed.host_bytes + landing_bytes(_gradients_on_host(placed), device)


def _gradients_on_host(placed: StatePlacement) -> list[int]:
    return [p.bytes for p in placed.pieces if p.name.kind is StateKind.GRADIENTS and p.name in placed.on_host]
