"""A run under a budget: what its first step shows, where everything rests from then on, and what is refused.

Note: when.
At first all that may move rests on the host, so the first step holds the least that this model can.  What it holds
beside is foretold by a run without tensors (`forecast`), and what cannot fit is refused on every rank before anything
is computed; where a model cannot be run so (a module that was handed over built, a loss of a user's own) the first
step is measured alone, and goes beyond the budget before it is refused.  Its micro-batches are measured in any case:
every tensor that the model makes is counted while it lives (memory/tracer.py).  Before the first update the ranks
agree on the worst peak, measured or foretold, the plan is made (zero/budget.py), and what has room goes to the
device, once; from then on nothing is decided in a step.  Fractions of a user's (`static`) are a plan that is known
before, and are put in force at the same moment.  Gradients that come sooner than foreseen, behind parameters that no
backward reaches, are planned as they came (`_learn_fills`); where parameters are left out only later, what that takes
beyond the budget is told.  What cannot fit whatever the batch is refused when the engine is made; `plan` says all of
it without a run.  With one rank a shard that rests on the device is copied to its slot for a use, as with several.

A later batch with more samples or longer ones than any before, to train on or to evaluate, is foretold in the same way
before it runs: it is let in where it fits beside what has been settled, and else refused with the bytes that it needs.
Where nobody can foretell it, it is taken to need no more than in proportion to the largest that was measured, by the
square of the length. So ranks tell each other the shape of every batch. Evaluations before the first step are measured,
and refused, if they held more than fits, when they are over. What is advised where nothing fits has been planned as it
is told. Cost: the run without tensors, some milliseconds a block; one exchange of two numbers a batch; counting makes
the first step slower.

A GPU's kernels hold other things than those of a run without tensors, so its first step is measured alone, by the peak
of torch's allocator: with what others had put on the device by then, with workspaces, and with the weights that were
gathered meanwhile, which count twice.  The budget is of bytes that are allocated; what the allocator has reserved
beyond them (`torch.cuda.memory_reserved`) is not counted.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from math import ceil
from typing import TYPE_CHECKING

import torch

from colossal_lite.config.errors import Problem, refuse
from colossal_lite.config.memory_schema import MemoryConfig
from colossal_lite.distributed.communicator import Communicator
from colossal_lite.memory.arena import Arena, ArenaAllocator
from colossal_lite.memory.chunk import Chunk
from colossal_lite.memory.pinned import give_back_freed
from colossal_lite.memory.weight_chunk import WeightChunk
from colossal_lite.observe.memory_meter import AllocatedBytes, LiveBytes
from colossal_lite.offload.pieces import (
    GRADIENT_DOWN,
    LEAVING,
    WEIGHTS_BOTH,
    WEIGHTS_UP,
    LinkCrossing,
    Name,
    StateKind,
    StatePiece,
    passing_bytes,
)
from colossal_lite.offload.placement import (
    StatePlacement,
    divide,
    place,
    spill_to_disk,
    spilled,
    visiting_bytes,
)
from colossal_lite.offload.shard_streaming import landing_bytes
from colossal_lite.schedule.gather_plan import GatherPlan
from colossal_lite.schedule.interval_packing import LiveRange, pack_live_ranges
from colossal_lite.schedule.step_moments import Backwards, SharedInterval, moments_of_step
from colossal_lite.zero.build_chunks import slots_of
from colossal_lite.zero.forward_hooks import ForwardGates
from colossal_lite.zero.optimizer import ChunkOptimizer
from colossal_lite.zero.sharded_weights import ParameterGather, units_of
from colossal_lite.zero.user_optimizer import OwnOptimizer

if TYPE_CHECKING:
    from colossal_lite.config.config import Config

Forecast = Callable[..., Mapping[str, int] | None]
"""From the samples of a step on this rank, their tokens and, if others than the config's, `changes=` of it as a command
line has them, or `trains=False`, to bytes of each kind beside the state, and to those of the whole `device`."""


def pieces_of(
    chunks: Sequence[Chunk], optimizer: ChunkOptimizer, gathers: GatherPlan | None, accumulation: int,
    frozen: Sequence[WeightChunk] = (),
) -> tuple[StatePiece, ...]:  # fmt: skip
    """What may rest on either tier, while all of it rests on the host. The weights that a step begins with are taken
    from the slots of the update before, if they are updated."""
    stays = gathers.stays() if gathers else {}
    begins = gathers.forward[0].resident if gathers and gathers.forward else {}
    turns = _time_shared(chunks, gathers)
    out: list[StatePiece] = []
    for index, chunk in enumerate(chunks):
        if optimizer.is_updated_on_host(chunk):
            comes = accumulation * stays.get(chunk.spec.id, 0)
            out += _updated_on_host(index, chunk, optimizer, comes, accumulation, chunk.spec.id in begins)
            continue
        if chunk.weights_at_rest is not None:
            comes = accumulation * stays.get(chunk.spec.id, 0) - (chunk.spec.id in begins)
            ups = comes + chunk.updates_weights
            rest = SharedInterval.WEIGHTS if index in turns else None
            out.append(StatePiece(Name(index, StateKind.WEIGHTS), chunk.resting_bytes, ups, 1, rest=rest))
        if chunk.gradient_at_rest is not None:
            out += gradients_of(index, chunk.gradient.nbytes, accumulation, time_shared=bool(turns))
        record_bytes = optimizer.record_bytes(index)
        if record_bytes:
            out.append(StatePiece(Name(index, StateKind.OPTIMIZER), record_bytes, 1, 1))
    for kept in frozen:
        if kept.weights_at_rest is not None:
            ups = accumulation * stays.get(kept.spec.id, 0)
            out.append(StatePiece(Name(kept.spec.id, StateKind.FROZEN), kept.resting_bytes, ups, 0))
    return tuple(out)


def gradients_of(index: int, size_bytes: int, sums: int, *, time_shared: bool) -> Iterator[StatePiece]:
    """What of a chunk's gradient, the sum of so many, may rest on either tier; `time_shared`: beside weights that
    do."""
    apart = time_shared and sums > 1
    rest = SharedInterval.GRADIENTS if time_shared and sums == 1 else None
    yield StatePiece(
        Name(index, StateKind.GRADIENTS), size_bytes, 1, sums - apart, rest=rest, sums=sums, last_sum=apart
    )
    if apart:
        yield StatePiece(Name(index, StateKind.LAST_SUM), size_bytes, 0, 1, rest=SharedInterval.LAST_SUMS)


def _time_shared(chunks: Sequence[Chunk], gathers: GatherPlan | None) -> frozenset[int]:
    """The chunks whose weights, while they rest on the device, need be there for a part of a step only: no update reads
    them, and no backward that has their gradients."""
    late = gathers.read_late(len(chunks)) if gathers else ()
    return frozenset(
        index
        for index, chunk in enumerate(chunks)
        if chunk.weights_at_rest is not None and not chunk.updates_weights and chunk.spec.id not in late
    )


def _updated_on_host(
    index: int, chunk: Chunk, optimizer: ChunkOptimizer, comes: int, accumulation: int, begins: bool
) -> Iterator[StatePiece]:
    """Of a chunk whose update is on the host while its record rests there. What cannot rest there crosses the link all
    the same."""
    both = int(chunk.updates_weights)
    ways = {
        StateKind.WEIGHTS: (
            LinkCrossing(comes),
            LinkCrossing(1, both, (WEIGHTS_BOTH if both else WEIGHTS_UP,)),
        ),
        StateKind.GRADIENTS: (
            LinkCrossing(0, accumulation, (LEAVING,)),
            LinkCrossing(0, 1, (GRADIENT_DOWN,)),
        ),
        StateKind.OPTIMIZER: (LinkCrossing(), LinkCrossing()),
    }
    shard_bytes = (chunk.owned[1] - chunk.owned[0]) * chunk.local_shard.element_size()
    held = {
        StateKind.WEIGHTS: (shard_bytes, comes - begins + both, 1, chunk.weights_at_rest is not None),
        StateKind.GRADIENTS: (chunk.gradient.nbytes, 1, accumulation, chunk.gradient_at_rest is not None),
        StateKind.OPTIMIZER: (optimizer.record_bytes(index), 1, 1, True),
    }
    for kind, (size_bytes, ups, downs, moves) in held.items():
        if size_bytes:
            yield StatePiece(
                Name(index, kind), size_bytes, ups, downs, beside=ways[kind], moves=moves, sums=accumulation
            )


def fixed_of(chunks: Sequence[Chunk], optimizer: ChunkOptimizer | OwnOptimizer) -> dict[str, int]:
    """Bytes on the device of model state that does not move, by kind."""
    gradients = [
        c.gradient if c.accumulating is None else c.accumulating for c in chunks if c.gradient_at_rest is None
    ]
    fixed = {
        "weights": sum(c.resting_bytes for c in chunks if c.weights_at_rest is None),
        "gradients": sum(t.numel() * t.element_size() for t in gradients),
    }
    if not _shares(optimizer):
        fixed["staging"] = sum(slots.planned_bytes for slots in slots_of(chunks))
    if optimizer.tiers is None:
        fixed["masters"] = sum(c.master_bytes for c in chunks)
        fixed["optimizer"] = optimizer.forecast_bytes
    return fixed


def _shares(optimizer: ChunkOptimizer | OwnOptimizer) -> bool:
    """Whether gradients in a backward and what visits for an update are in one arena (memory/arena.py)."""
    return isinstance(optimizer, ChunkOptimizer) and optimizer.shards is not None


def beside_of(
    chunks: Sequence[Chunk], optimizer: ChunkOptimizer | OwnOptimizer, accumulation: int
) -> tuple[LiveRange, ...] | None:  # fmt: skip
    """What is in one arena with pieces that visit the device, or rest there by turns; None: nothing may be."""
    if not isinstance(optimizer, ChunkOptimizer) or optimizer.shards is None:
        return None
    backward = (stay for slots in slots_of(chunks) for stay in slots.live_ranges)
    stays = moments_of_step(backward, len(chunks))
    return tuple(_backwards(accumulation).of(stay, len(chunks) - 1) for stay in stays)


def _backwards(accumulation: int) -> Backwards:
    return Backwards.EACH if accumulation > 1 else Backwards.LAST


def update_bytes_of(
    memory: MemoryConfig, chunks: Sequence[Chunk], optimizer: ChunkOptimizer | OwnOptimizer
) -> int:
    """What an update on the device may hold beside the state, wherever records come to rest."""
    if isinstance(optimizer, ChunkOptimizer) and not memory.moves:
        return optimizer.update_bytes
    return max((chunk.update_bytes for chunk in chunks), default=0)


def placed_by(
    memory: MemoryConfig, pieces: Sequence[StatePiece], fixed: Mapping[str, int], device: torch.device,
    beside: tuple[LiveRange, ...] | None,
) -> StatePlacement:  # fmt: skip
    """Where these pieces rest by a config under which they move; `beside` as `Placement` has it."""
    if memory.placement == "static":
        placed = divide(pieces, fixed, memory.host_fraction.model_dump(), memory.device_budget, beside)
    else:
        placed = _sunk_by(memory, place(pieces, fixed, memory.device_budget, beside), device)
    budget = memory.host_budget
    first_bytes = 0 if budget is None else _host_bytes(_at_first(memory, placed, device), device)
    return replace(placed, host_budget=budget, first_host_bytes=first_bytes)


def _sunk_by(memory: MemoryConfig, placed: StatePlacement, device: torch.device) -> StatePlacement:
    """As `placed`, with what the host has no room for on disk, where there is one."""
    if not memory.spills_to_disk:
        return placed
    assert memory.host_budget is not None
    return spill_to_disk(placed, memory.host_budget, landing_bytes(_gradients_on_host(placed), device))


def _at_first(memory: MemoryConfig, placed: StatePlacement, device: torch.device) -> StatePlacement:
    """Before the first update: all that may rest off the device does."""
    every = frozenset(piece.name for piece in placed.pieces if piece.moves)
    return _sunk_by(memory, replace(placed, on_host=every, on_disk=frozenset()), device)


def _host_bytes(placed: StatePlacement, device: torch.device) -> int:
    return placed.host_bytes + landing_bytes(_gradients_on_host(placed), device)


def _gradients_on_host(placed: StatePlacement) -> list[int]:
    return [p.bytes for p in placed.pieces if p.name.kind is StateKind.GRADIENTS and p.name in placed.on_host]


class MemoryBudget:
    """Measures the first step, decides where everything rests, and takes it there."""

    def __init__(
        self, config: Config, chunks: Sequence[Chunk], weights: ForwardGates,
        optimizer: ChunkOptimizer | OwnOptimizer, world: Communicator, *, device: torch.device,
        frozen: Sequence[WeightChunk], apart_bytes: int, outlives: bool, began: Callable[[], Sequence[int] | None],
    ) -> None:  # fmt: skip
        """`frozen`: the chunks that do not train; `apart_bytes`: of frozen parameters that are in none; `outlives`: all
        state comes to a store when the engine is closed; `began` tells of a backward as `StageHooks.began`. Raises
        ConfigError for a budget that is too small for any batch."""
        self._began, self._has_told = began, False
        self._config, self._memory, self._accumulation = config, config.memory, config.gradient_accumulation
        self._chunks, self._weights, self._optimizer = tuple(chunks), weights, optimizer
        self._world, self._frozen, self._apart_bytes = world, tuple(frozen), apart_bytes
        self._device, self._outlives = device, outlives
        self._meter: LiveBytes | AllocatedBytes | None = None
        self.placement: StatePlacement | None = None
        """Where everything rests; None before the first update."""
        self.activations_bytes = 0
        """The most that the model holds in a step of what has been let in, on any rank, foretold or measured."""
        self._let_in: set[tuple[bool, int, int]] = set()
        """Whether they train, samples of a step of a rank and their tokens, of the batches that fit."""
        self._measured_by: float | None = None
        """How much more the first step has held than was foretold, as a factor; None: nobody could."""
        self._evaluated_bytes = 0
        """The most that the model has held in an evaluation before that, on any rank."""
        self._tell: Callable[[Sequence[str]], Mapping[str, int] | None] = lambda changes: None
        """Of the batch that was looked at last, with such changes of the config."""
        self._samples = 0
        """Of that batch."""
        self._refuse(self._placed(self._gathered(None), 0))
        self._begin()

    def _begin(self) -> None:
        """What a backward needs before the first update shares an arena too."""
        if not isinstance(self._optimizer, ChunkOptimizer) or self._optimizer.shards is None:
            return
        self._let_go()
        sizes = {i: c.gradient.nbytes for i, c in enumerate(self._chunks) if c.gradient_at_rest is not None}
        beside = beside_of(self._chunks, self._optimizer, self._accumulation) or ()
        last = len(self._chunks) - 1
        stays = (*beside, *LEAVING.in_step(sizes, last=last, backwards=_backwards(self._accumulation)))
        self._optimizer.begin_in(Arena(pack_live_ranges(stays), self._device))
        self._join()

    def _let_go(self) -> None:
        """Of the old places, before there are new ones."""
        assert isinstance(self._optimizer, ChunkOptimizer) and self._optimizer.shards is not None
        self._optimizer.arena = None
        self._optimizer.shards.let_go()
        for slots in slots_of(self._chunks):
            slots.join(None)

    def _join(self) -> None:
        assert isinstance(self._optimizer, ChunkOptimizer)
        for slots in slots_of(self._chunks):
            slots.join(self._optimizer.arena)

    @contextmanager
    def measured(self) -> Iterator[None]:
        """Around what a step computes; the first one is measured."""
        if self.placement is not None or self._memory.device_budget is None:
            yield
            return
        self._meter = self._meter or self._new_meter()
        with self._meter:
            yield

    @contextmanager
    def evaluated(self) -> Iterator[None]:
        """Around an evaluation; those before the first update are measured. Collective; raises ConfigError on every
        rank, when it is over, for one that held more than fits."""
        if self.placement is not None or self._memory.device_budget is None:
            yield
            return
        meter = self._new_meter()
        with meter:
            yield
        with self._world.ledger.paused():
            most = max(self._world.gather_json(meter.peak_bytes))
        let_in, self._let_in = self._let_in, {each for each in self._let_in if each[0]}
        self._refuse(self._placed(self._gathered(None), most))
        self._let_in, self._evaluated_bytes = let_in, max(self._evaluated_bytes, most)

    def _new_meter(self) -> LiveBytes | AllocatedBytes:
        """On a GPU what is there beside the state of this moment, all of whose pieces rest on the host, counts too."""
        if self._device.type != "cuda":
            return LiveBytes()
        fixed, pieces = fixed_of(self._chunks, self._optimizer) | self._visiting, self._pieces(None)
        slots = visiting_bytes(pieces, frozenset(piece.name for piece in pieces))
        if isinstance(self._optimizer, ChunkOptimizer) and self._optimizer.shards is not None:
            slots = sum(visit.bytes for visit in self._optimizer.visits if visit.tier is None)
        return AllocatedBytes(self._device, sum(fixed.values()) + self._frozen_bytes + slots)

    @property
    def _visiting(self) -> dict[str, int]:
        """Slots on the device of records that visit it, where these are no pieces."""
        tiers = self._optimizer.tiers
        return {} if self._memory.moves or tiers is None else {"visiting": tiers.device_bytes}

    @property
    def _frozen_bytes(self) -> int:
        """Of frozen parameters that are on the device and stay there."""
        kept = sum(chunk.resting_bytes for chunk in self._frozen if chunk.weights_at_rest is None)
        return self._apart_bytes + kept

    def forecast(
        self, samples: int, tokens: int, forecast_batch: Forecast | None, *, trains: bool = True
    ) -> None:
        """Before a batch of which this rank has so many samples: what does not fit by what `forecast_batch` says (None:
        nobody knows) is refused. Collective; raises ConfigError on every rank."""
        if self._memory.device_budget is None:
            return
        with self._world.ledger.paused():
            rows = self._world.gather_json([samples, tokens])
        samples, tokens = (max(row[i] for row in rows) for i in (0, 1))
        if self._is_known(trains, samples, tokens):
            return
        self._samples = samples if trains else 0
        found = None if forecast_batch is None else forecast_batch(samples, tokens, trains=trains)
        mine = None if found is None else [found["activations"] + found["temporaries"], found["gathered"]]
        with self._world.ledger.paused():
            told = [row for row in self._world.gather_json(mine) if row is not None]
        self._tell = lambda changes: None
        if forecast_batch is not None and found is not None and trains:
            self._tell = partial(_changed, forecast_batch, samples, tokens)
        if self.placement is not None:
            self._let(trains, samples, tokens, max((activations for activations, _ in told), default=None))
        elif told:
            activations = max(activations for activations, _ in told)
            self._refuse(self._placed(max(gathered for _, gathered in told), activations))
            self.activations_bytes = max(self.activations_bytes, activations)
        self._let_in.add((trains, samples, tokens))

    def _is_known(self, trains: bool, samples: int, tokens: int) -> bool:
        """Whether as many samples as long have fitted before; a step of training holds all that an evaluation does."""
        return any(samples <= s and tokens <= t and trained >= trains for trained, s, t in self._let_in)

    def _let(self, trains: bool, samples: int, tokens: int, forecast_bytes: int | None) -> None:
        """After everything rests for good: refuse a batch that does not fit beside it."""
        assert self.placement is not None
        activations = 0 if forecast_bytes is None else ceil(forecast_bytes * (self._measured_by or 1.0))
        if forecast_bytes is None:
            largest = [(s, t) for trained, s, t in self._let_in if trained]
            activations = min(
                ceil(self.activations_bytes * max(1, samples / s) * max(1, tokens / t) ** 2)
                for s, t in largest
            )
        fixed = dict(self.placement.fixed)
        placed = replace(
            self.placement,
            fixed=tuple((fixed | {"activations": max(fixed["activations"], activations)}).items()),
        )
        what = (
            f"{'a step' if trains else 'an evaluation'} of {samples} samples of {tokens} tokens on a rank: "
        )
        refuse(_device_problems(self._memory, placed, self._smaller(placed), what))
        self.placement, self.activations_bytes = placed, max(self.activations_bytes, activations)

    def settle(self) -> None:
        """Before the first update: where everything rests from now on. Collective; raises ConfigError on every rank."""
        if self.placement is not None:
            self._tell_further(self.placement)
            return
        self._weights.flush()
        for slots in slots_of(self._chunks):  # what a step without a plan took beyond it
            slots.shrink()
        self._learn_fills()
        with self._world.ledger.paused():
            measured = max(self._world.gather_json(self._meter.peak_bytes if self._meter else 0))
        self._measured_by = max(1.0, measured / self.activations_bytes) if self.activations_bytes else None
        self.activations_bytes = max(measured, self.activations_bytes)
        plan = self._weights.plan if isinstance(self._weights, ParameterGather) else None
        activations = max(self.activations_bytes, self._evaluated_bytes)
        placed = self._placed(self._gathered(plan), activations, plan)
        self._refuse(placed)
        self.placement = placed
        if self._memory.moves:
            if self._device.type == "cpu":
                give_back_freed()  # the first step's activations lie where state is to come
            self._move(placed)

    def _tell_further(self, placed: StatePlacement) -> None:
        """Warn, once, where gradients that came otherwise than in the first step took more than there is."""
        budget = self._memory.device_budget
        if budget is None or self._has_told:
            return
        further = sum(slots.bytes - slots.planned_bytes for slots in slots_of(self._chunks))
        if further and placed.device_bytes + further > budget:
            self._has_told = True
            warnings.warn(
                f"memory.device_budget = {budget:,}: parameters that the first step used have had no gradient, so that "
                f"those behind them took {further:,} bytes beyond the {placed.device_bytes:,} that were planned",
                stacklevel=2,
            )

    def _learn_fills(self) -> None:
        """Gradients that have come sooner than was foreseen, on any rank, will come so again: behind a chunk that lacks
        one, which is open until backward is over, the others are too."""
        staging = self._chunks[0].staging if self._chunks else None
        with self._world.ledger.paused():
            rows = self._world.gather_json(self._began())
        if staging is None or any(row is None for row in rows):
            return
        began = [min(row[stay.number] for row in rows) for stay in staging.live_ranges]
        stays = [
            replace(s, start=min(s.start, start)) for s, start in zip(staging.live_ranges, began, strict=True)
        ]
        if stays != [*staging.live_ranges]:
            staging.replan(stays)

    def _move(self, placed: StatePlacement) -> None:
        assert isinstance(self._optimizer, ChunkOptimizer)
        stays = {piece.name for piece in placed.pieces if piece.moves and piece.rest is None} - placed.away
        for link in self._optimizer.links:
            link.drain()
        if self._optimizer.shards is not None:
            self._let_go()
        for index, chunk in enumerate(self._chunks):
            if Name(index, StateKind.WEIGHTS) in stays:
                chunk.keep_weights_on_device()
            if Name(index, StateKind.GRADIENTS) in stays:
                chunk.keep_gradient_on_device()
        for kept in self._frozen:
            if Name(kept.spec.id, StateKind.FROZEN) in stays:
                kept.keep_weights_on_device()
        away = {name.chunk for name in placed.away if name.kind is StateKind.OPTIMIZER}
        on_disk = {name.chunk for name in placed.on_disk}
        arena = None if placed.beside is None else partial(self._arena_of, placed)
        self._optimizer.settle_tiers({*range(len(self._chunks))} - away, on_disk, arena)
        if self._optimizer.shards is not None:
            self._join()
        if isinstance(self._weights, ParameterGather):
            self._weights.replan()

    def _arena_of(self, placed: StatePlacement) -> Arena:
        """With what rests there by turns in it."""
        assert isinstance(self._optimizer, ChunkOptimizer) and self._optimizer.tiers is not None
        arena, types = Arena(placed.arena, self._device), self._chunks[0].types
        places: dict[SharedInterval, dict[int, ArenaAllocator]] = {}
        for rest in SharedInterval:
            stays = [stay for stay in arena.plan.live_ranges if stay.what is rest]
            dtype = types.compute if rest is SharedInterval.WEIGHTS else types.gradient
            some = ArenaAllocator(stays, dtype, self._device, arena)
            places[rest] = dict.fromkeys((stay.number for stay in stays), some)
        for index, chunk in enumerate(self._chunks):
            weights, gradients, last = (places[rest].get(index) for rest in SharedInterval)
            chunk.share_time(weights, gradients, None if last is None else (last, self._optimizer.tiers.up))
        return arena

    def _placed(self, gathered: int, activations: int, plan: GatherPlan | None = None) -> StatePlacement:
        update = update_bytes_of(self._memory, self._chunks, self._optimizer)
        fixed = fixed_of(self._chunks, self._optimizer) | {
            "gathered": gathered,
            "frozen": self._frozen_bytes,
            "activations": max(activations, update),
        }
        return placed_by(
            self._memory,
            self._pieces(plan),
            fixed | self._visiting,
            self._device,
            beside_of(self._chunks, self._optimizer, self._accumulation),
        )

    def _pieces(self, plan: GatherPlan | None) -> tuple[StatePiece, ...]:
        if not self._memory.moves:
            return ()
        assert isinstance(self._optimizer, ChunkOptimizer)
        return pieces_of(self._chunks, self._optimizer, plan, self._accumulation, self._frozen)

    def _gathered(self, plan: GatherPlan | None) -> int:
        """Bytes of the slots of gathered weights; without a plan the least that any has."""
        chunks: tuple[WeightChunk, ...] = (*self._chunks, *self._frozen)
        widths = {c.spec.id: c.spec.numel * c.types.compute.itemsize for c in chunks}
        if plan is not None:
            return plan.arena_numel * chunks[0].types.compute.itemsize
        return max((sum(widths[c] for c in unit) for unit in units_of(chunks).values()), default=0)

    def _refuse(self, placed: StatePlacement) -> None:
        refuse([*_device_problems(self._memory, placed, self._smaller(placed)), *self._host_problems(placed)])

    def _host_problems(self, placed: StatePlacement) -> Iterator[Problem]:
        memory, budget = self._memory, self._memory.host_budget
        if budget is None:
            return
        held, first = self._host_bytes(placed), placed.first_host_bytes
        at_first = _at_first(memory, placed, self._device)
        left = max(self._left_bytes(each) for each in (placed, at_first)) if self._outlives else 0
        if left > max(held, first, budget):
            rule = f"{left:,} bytes are on the host when the engine is closed: the store takes all state"
            legal = (
                f"{left:,} or more, more ranks; or no store: a checkpoint hands on what the host cannot hold"
            )
            yield Problem("memory.host_budget", budget, rule, legal)
        elif max(held, first) > budget:
            least = " at the least" if memory.spills_to_disk else ""
            when = ", before the device takes any" if first > held else ""
            rule = f"{max(held, first):,} bytes rest on the host or pass through it{least}{when}"
            other = "smaller fractions, " if memory.placement == "static" else ""
            other += "a larger device_budget, " if memory.placement == "auto" and not when else ""
            disk_bytes = self._on_disk_instead(placed)
            disk = f"; or memory.disk_dir, for {disk_bytes:,} bytes of optimizer state" if disk_bytes else ""
            legal = f"{max(held, first):,} or more, {other}more ranks{disk}"
            yield Problem("memory.host_budget", budget, rule, legal)

    def _host_bytes(self, placed: StatePlacement) -> int:
        if self._memory.moves:
            return _host_bytes(placed, self._device)
        found = self._optimizer.tiers.host_bytes if self._optimizer.tiers else 0
        if isinstance(self._optimizer, ChunkOptimizer) and self._optimizer.below:
            found += self._optimizer.below.host_bytes
        return found

    def _left_bytes(self, placed: StatePlacement) -> int:
        """On the host while the engine is closed, when weights and records that rest elsewhere have come to its store,
        and gradients and buffers are still there."""
        assert isinstance(self._optimizer, ChunkOptimizer)
        stored = (StateKind.WEIGHTS, StateKind.OPTIMIZER)
        there = sum(
            p.resting_bytes for p in placed.pieces if p.name in placed.on_host and p.name.kind in stored
        )
        if not self._memory.moves and self._optimizer.tiers:
            there = self._optimizer.tiers.record_bytes("host")
        records = sum(map(self._optimizer.record_bytes, range(len(self._chunks))))
        weights = sum(chunk.types.resting_bytes(chunk.local_shard.numel()) for chunk in self._chunks)
        return self._host_bytes(placed) - there + records + weights

    def _on_disk_instead(self, placed: StatePlacement) -> int | None:
        """Bytes that would rest on disk, at the most, if there were one; None if that would not help."""
        memory, optimizer = self._memory, self._optimizer
        with_disk = memory.model_copy(update={"disk_dir": "."})
        if (
            memory.spills_to_disk
            or not with_disk.spills_to_disk
            or memory.host_budget is None
            or optimizer.tiers is None
        ):
            return None
        if not memory.moves:
            sizes = {i: size for i in range(len(self._chunks)) if (size := optimizer.record_bytes(i))}
            there = spilled(
                sizes, room := memory.host_budget - self._host_bytes(placed) + sum(sizes.values())
            )
            some = {i: sizes[i] for i in there}
            rest = sum(sizes.values()) - sum(some.values()) + passing_bytes(some)
            return sum(some.values()) if rest <= room else None
        every = frozenset(piece.name for piece in placed.pieces if piece.moves)
        found = [_sunk_by(with_disk, each, self._device) for each in (placed, replace(placed, on_host=every))]
        fits = all(self._host_bytes(each) <= memory.host_budget for each in found)
        return max(each.read_bytes for each in found) if fits else None

    def _smaller(self, placed: StatePlacement) -> Iterator[tuple[str, int]]:
        """Changes, the least first, and what the device would then hold: as `plan` has it, if it knows the model."""
        need, of = placed.device_bytes, dict(placed.fixed)
        plan = self._weights.planned if isinstance(self._weights, ParameterGather) else lambda prefetch: None
        is_told = self._tell(()) is not None
        by_step = self._config.zero.stage == 2 and self._config.zero.reduce_every == "step"
        for changes in _changes(self._config, self._samples):
            if is_told:
                told = self._tell(
                    [word for path, value in changes.items() for word in (f"--{path}", str(value))]
                )
                if told is not None:
                    yield _in_words(changes), told["device"]
            elif changes.keys() == {"zero.prefetch"} and (gathers := plan(int(changes["zero.prefetch"]))):
                yield _in_words(changes), need - of["gathered"] + self._gathered(gathers)
            elif changes.keys() == {"gradient_accumulation"} and (self._accumulation > 1 or not by_step):
                share = self._accumulation / int(changes["gradient_accumulation"])
                about = need - of["activations"] + ceil(of["activations"] * share)
                yield _in_words(changes), about


def _changed(
    forecast_batch: Forecast, samples: int, tokens: int, changes: Sequence[str]
) -> Mapping[str, int] | None:
    return forecast_batch(samples, tokens, changes=changes)


def _changes(config: Config, samples: int) -> Iterator[Mapping[str, str | int]]:
    """What may make a step of so many samples of a rank smaller, the least change first."""
    zero, now = config.zero, config.gradient_accumulation
    parts = [now * 2**n for n in range(1, samples.bit_length()) if now * 2**n < samples]
    parts += [samples] * (samples > now)
    if zero.stage == 3:
        yield from ({"zero.prefetch": prefetch} for prefetch in range(zero.prefetch - 1, -1, -1))
    by_step = zero.stage == 2 and zero.reduce_every == "step"
    if by_step and now > 1:
        yield {"zero.reduce_every": "micro_batch"}
    yield from ({"gradient_accumulation": k} for k in parts)
    if by_step:  # more micro-batches than one would keep gradients whole
        yield from ({"gradient_accumulation": k, "zero.reduce_every": "micro_batch"} for k in parts)
    if config.activation_checkpoint != "full":
        yield {"activation_checkpoint": "full"}
    if config.memory.placement != "auto":
        yield {"memory.placement": "auto"}
    most: dict[str, str | int] = {"activation_checkpoint": "full"}
    most |= {"gradient_accumulation": samples} if parts else {}
    most |= {"zero.prefetch": 0} if zero.stage == 3 else {}
    most |= {"zero.reduce_every": "micro_batch"} if by_step else {}
    yield most
    yield most | {"memory.placement": "auto"}


def _in_words(changes: Mapping[str, str | int]) -> str:
    return " with ".join(f"{path}={value!r}" for path, value in changes.items())


def _device_problems(
    memory: MemoryConfig, placed: StatePlacement, smaller: Iterator[tuple[str, int]], whose: str = ""
) -> Iterator[Problem]:
    budget, need = memory.device_budget, placed.device_bytes
    if budget is None or need <= budget:
        return
    rows = ", ".join(f"{kind} {held:,}" for kind, tier, held in placed.rows if tier == "device")
    is_least = memory.placement == "auto" and memory.moves
    what = "at the least " if is_least else ""
    change = next((f"{change} ({held:,} bytes)" for change, held in smaller if held <= budget), None)
    largest = "; or begin with the largest batch, beside which state is then placed" if whose else ""
    others = "" if is_least else ", or, if that is enough, memory.placement='auto' or a higher zero.stage"
    legal = f"{need:,} or more{f'; or {change}' if change else others}{largest}"
    yield Problem(
        "memory.device_budget", budget, f"{whose}the device needs {need:,} bytes {what}({rows})", legal
    )
