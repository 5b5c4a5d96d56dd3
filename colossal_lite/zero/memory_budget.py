"""Measures the first step, chooses a placement within the budget, and rejects budgets that cannot fit.

Note: phases.
1. At first all state that can move is on the host.  A budget that is too small for any batch is refused.
2. A batch arrives.  A run without tensors forecasts what it holds beside the state (`forecast`).  If that does not fit,
   every rank raises before anything is computed.  Models built outside, or with a loss of the user's own, may have no
   forecast.  Then the first step may exceed the budget before it is refused.
3. The first step is measured: every tensor of the model is counted while it lives (observe/memory_meter.py).
4. Before the first update the ranks agree on the highest peak, measured or forecast.  The placement is planned
   (offload/placement.py), and what fits is copied to the device, once.  `static` fractions take effect then too.

Gradients may arrive earlier than planned, behind parameters that no backward reaches (`_learn_accumulation`).  If
parameters are left out only later, a warning names the bytes beyond the budget.

A larger or longer batch, for training or evaluation, is forecast before it runs.  It is refused if it does not fit.
Without a forecast the bytes are taken to grow with the samples and with the square of the length.  For this the ranks
exchange the shape of every batch.  A larger budget would also take more state, so the refusal names one that has room
for all of it.  Evaluations before the first step are measured, and refused afterwards.
Cost: some milliseconds a block for the run without tensors, and one exchange of sizes a batch.  Counting makes
the first step slower.

A GPU's first step is measured by the peak of torch's allocator, as its kernels allocate other buffers.  That includes
what others had allocated by then, workspaces, and gathered weights, which count twice.  The budget counts allocated
bytes, not what the allocator reserves beyond them (`torch.cuda.memory_reserved`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from math import ceil
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from colossal_lite.config.config import Config
from colossal_lite.config.errors import Problem, refuse
from colossal_lite.distributed.communicator import Communicator
from colossal_lite.memory.arena import Arena, ArenaAllocator
from colossal_lite.memory.chunk import Chunk
from colossal_lite.memory.pinned import give_back_freed
from colossal_lite.memory.weight_chunk import WeightChunk
from colossal_lite.observe.memory_meter import AllocatedBytes, LiveBytes
from colossal_lite.observe.printed_lines import warn
from colossal_lite.offload.pieces import LEAVING, Name, StateKind, StatePiece
from colossal_lite.offload.placement import StatePlacement, slot_bytes
from colossal_lite.schedule.interval_packing import LiveRange, pack_live_ranges
from colossal_lite.schedule.plan import Action
from colossal_lite.schedule.step_moments import SharedInterval
from colossal_lite.zero.budget_messages import (
    Forecast,
    HostBudget,
    LaterBatch,
    device_problems,
    smaller_steps,
)
from colossal_lite.zero.build_chunks import defers_updates, slots_of
from colossal_lite.zero.forward_hooks import ForwardGates
from colossal_lite.zero.gradient_hooks import in_flight_of
from colossal_lite.zero.optimizer import ChunkOptimizer
from colossal_lite.zero.sharded_weights import ParameterGather
from colossal_lite.zero.state_pieces import (
    StepUses,
    backwards_of,
    beside_of,
    fixed_of,
    least_gathered_bytes,
    pieces_of,
    placed_by,
    update_bytes_of,
)
from colossal_lite.zero.user_optimizer import OwnOptimizer
from colossal_lite.zero.weight_slots import ShardedWeights

TOKENS = "tokens"
"""The name, in `lengths_of`, of the length of a first input that has one number for each token."""


def lengths_of(inputs: Tensor, given: Mapping[str, Any]) -> dict[str, int]:
    """How long a sample is: the tokens of `inputs`, the first one, or all values of a picture. So for each further
    input of another length in `given`, the arguments by name. A mask is as long as what it masks."""
    length = inputs.shape[1:].numel()
    first = next((name for name, x in given.items() if x is inputs), "inputs")
    lengths = {TOKENS if inputs.dim() <= 2 else f"values of {first}": length}
    for name, value in given.items():
        tensors = [x for x in tree_leaves(value) if isinstance(x, Tensor) and x.dim() > 1]
        held = sum(x.shape[1:].numel() for x in tensors)
        if "mask" not in name and held not in (0, length):
            lengths[f"values of {name}"] = held
    return lengths


class MemoryBudget:
    """Measures the first step, plans the placement, and moves all state to it."""

    def __init__(
        self, config: Config, chunks: Sequence[Chunk], weights: ForwardGates,
        optimizer: ChunkOptimizer | OwnOptimizer, world: Communicator, *, coord: int, device: torch.device,
        frozen: Sequence[WeightChunk], apart_bytes: int, outlives: bool, began: Callable[[], Sequence[int] | None],
    ) -> None:  # fmt: skip
        """`coord`: of this rank on the pipeline axis; `frozen`: the chunks that do not train; `apart_bytes`: of frozen
        parameters that are in none; `outlives`: all state goes to a store when the engine is closed; `began`: as
        `StageHooks.began`. Collective; raises ConfigError on every rank for a budget too small for any batch."""
        self._coord, self._is_staged = coord, config.parallel.pipeline.is_staged
        self._defers = defers_updates(config)
        self._began, self._has_warned = began, False
        self._config, self._memory, self._accumulation = config, config.memory, config.gradient_accumulation
        self._chunks, self._weights, self._optimizer = tuple(chunks), weights, optimizer
        self._world, self._frozen, self._apart_bytes = world, tuple(frozen), apart_bytes
        self._device, stage = device, config.zero.stage
        self._host = HostBudget(config.memory, self._chunks, optimizer, device, outlives, stage)
        self._meter: LiveBytes | AllocatedBytes | None = None
        self._uses = self._uses_of(())
        self.messages_bytes = 0
        """Of the slots of messages between stages, forecast or allocated."""
        self.placement: StatePlacement | None = None
        """The tier of every piece; None before the first update."""
        self.activations_bytes = 0
        """The most that the model holds in a step of an admitted batch, on any rank, forecast or measured."""
        self._admitted: list[tuple[bool, int, Mapping[str, int]]] = []
        """Whether they train, samples of a step of a rank and their lengths, of the batches that fit."""
        self._measured_by: float | None = None
        """What the first step held, as a factor of its forecast; None: there was no forecast."""
        self._evaluated_bytes = 0
        """The most that the model has held in an evaluation before that, on any rank."""
        self._changed_forecast: Forecast = lambda **_: None
        """Of the batch that was looked at last, with such `changes` of the config."""
        self._samples = 0  # of that batch
        self._gathered_bytes = least_gathered_bytes((*chunks, *frozen))
        self._refuse(self._placed(self._gathered_bytes, 0), is_floor=True)
        self._begin()

    def _uses_of(self, actions: Sequence[Action]) -> StepUses:
        """What a step does, by this rank's list of a pipeline, or by the plan of its gathers."""
        if self._is_staged:
            return StepUses.of_list(actions)
        plan = self._weights.plan if isinstance(self._weights, ParameterGather) else None
        return StepUses.of_trace(plan, self._accumulation, len(self._chunks), defers=self._defers)

    def _alike(self, mine: Any) -> list[Any]:
        """What the ranks with this rank's stages say. Collective over all."""
        return [told for coord, told in self._of_all([self._coord, mine]) if coord == self._coord]

    def _of_all(self, mine: Any) -> list[Any]:
        """What all ranks say. Collective."""
        with self._world.ledger.paused():
            return self._world.gather_json(mine)

    def _raise(self, problems: Iterable[Problem]) -> None:
        """Refuse what any rank has found. Collective over a pipeline; raises ConfigError on every rank."""
        found = list(problems)
        if self._is_staged:
            rows = self._of_all([[p.path, p.value, p.rule, p.legal] for p in found])
            found = list(dict.fromkeys(Problem(*told) for row in rows for told in row))
        refuse(found)

    def _begin(self) -> None:
        """The buffers of a backward share an arena before the first update too."""
        beside = self._beside
        if beside is None:
            return
        assert isinstance(self._optimizer, ChunkOptimizer)
        self._release_slots()
        sizes = {i: c.gradient.nbytes for i, c in enumerate(self._chunks) if c.gradient_at_rest is not None}
        leaving = LEAVING.in_step(
            sizes, last=len(self._chunks) - 1, backwards=backwards_of(self._accumulation),
            in_flight=in_flight_of(self._chunks),
        )  # fmt: skip
        ranges = (*beside, *leaving)
        self._optimizer.share_first_arena(Arena(pack_live_ranges(ranges), self._device))
        self._join_slots()

    def _release_slots(self) -> None:
        """Free the old slots, before there are new ones."""
        assert isinstance(self._optimizer, ChunkOptimizer) and self._optimizer.shards is not None
        self._optimizer.arena = None
        self._optimizer.shards.release_slots()
        for slots in slots_of(self._chunks):
            slots.join(None)

    def _join_slots(self) -> None:
        assert isinstance(self._optimizer, ChunkOptimizer)
        for slots in slots_of(self._chunks):
            slots.join(self._optimizer.arena)

    @contextmanager
    def measured(self) -> Iterator[None]:
        """Around the computing of a step; the first one is measured."""
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
        most = max(self._alike(meter.peak_bytes))
        admitted, self._admitted = self._admitted, [each for each in self._admitted if each[0]]
        self._refuse(self._placed(self._gathered_bytes, most))
        self._admitted, self._evaluated_bytes = admitted, max(self._evaluated_bytes, most)

    def _new_meter(self) -> LiveBytes | AllocatedBytes:
        """On a GPU all allocated bytes count but the state of this moment, whose pieces are all on the host."""
        if self._device.type != "cuda":
            return LiveBytes()
        fixed, pieces = self._fixed | self._visiting, self._pieces()
        slots = slot_bytes(pieces, frozenset(piece.name for piece in pieces), "device")
        if self._optimizer.shards is not None:
            slots = sum(visit.bytes for visit in self._optimizer.visits if visit.tier is None)
        return AllocatedBytes(self._device, sum(fixed.values()) + self._frozen_bytes + slots)

    @property
    def _visiting(self) -> dict[str, int]:
        """Slots on the device for records that are copied there, where these are no pieces."""
        tiers = self._optimizer.tiers
        return {} if self._memory.moves or tiers is None else {"visiting": tiers.staging_places.bytes}

    @property
    def _frozen_bytes(self) -> int:
        """Of frozen parameters that are on the device and stay there."""
        in_chunks = sum(chunk.resting_bytes for chunk in self._frozen if chunk.weights_at_rest is None)
        return self._apart_bytes + in_chunks

    def forecast(
        self, samples: int, lengths: Mapping[str, int], forecast_batch: Forecast | None, *, trains: bool = True
    ) -> None:  # fmt: skip
        """Before a batch with so many samples on this rank: what does not fit by what `forecast_batch` says (None:
        no forecast) is refused. `lengths`: of a sample, as `lengths_of` gives them; a forecast is asked with its
        `tokens`. Collective; raises ConfigError on every rank."""
        if self._memory.device_budget is None:
            return
        rows = self._of_all([samples, dict(lengths)])
        samples = max(held for held, _ in rows)
        lengths = {name: max(long.get(name, 0) for _, long in rows) for _, own in rows for name in own}
        if self._is_known(trains, samples, lengths):
            return
        self._samples, tokens = samples if trains else 0, lengths.get(TOKENS, 0)
        found = None if forecast_batch is None else forecast_batch(samples, tokens, trains=trains)
        mine = None if found is None else [found["activations"] + found["temporaries"], found["gathered"]]
        messages = 0 if found is None else found["messages"]
        forecasts = [row for row in self._alike(mine) if row is not None]
        self._changed_forecast = lambda **_: None
        if forecast_batch is not None and found is not None and trains:
            self._changed_forecast = partial(forecast_batch, samples, tokens)
        if self.placement is not None:
            found_bytes = max((activations for activations, _ in forecasts), default=None)
            self._admit(trains, samples, lengths, found_bytes, messages)
        elif forecasts or self._is_staged:
            activations = max((activations for activations, _ in forecasts), default=0)
            self.messages_bytes = max(self.messages_bytes, messages)
            gathered = max((gathered for _, gathered in forecasts), default=self._gathered_bytes)
            self._refuse(self._placed(gathered, activations))
            self.activations_bytes = max(self.activations_bytes, activations)
        self._admitted.append((trains, samples, lengths))

    def _is_known(self, trains: bool, samples: int, lengths: Mapping[str, int]) -> bool:
        """Whether as many samples as long have fitted before; a step of training holds all that an evaluation does."""
        return any(
            samples <= s and _times_as_long(lengths, long) <= 1 and trained >= trains
            for trained, s, long in self._admitted
        )

    def _admit(
        self, trains: bool, samples: int, lengths: Mapping[str, int], forecast_bytes: int | None,
        messages_bytes: int,
    ) -> None:  # fmt: skip
        """After the placement is final: refuse a batch that does not fit beside it."""
        assert self.placement is not None
        activations = 0 if forecast_bytes is None else ceil(forecast_bytes * (self._measured_by or 1.0))
        if forecast_bytes is None:
            largest = [(s, long) for trained, s, long in self._admitted if trained]
            growth = min(
                max(1, samples / s) * max(1, _times_as_long(lengths, long)) ** 2 for s, long in largest
            )
            activations = ceil(self.activations_bytes * growth)
            messages_bytes = ceil(self.messages_bytes * growth)
        fixed = dict(self.placement.fixed)
        grown = {"activations": max(fixed["activations"], activations)}
        if self._is_staged:
            self.messages_bytes = grown["messages"] = max(self.messages_bytes, messages_bytes)
        placed = replace(self.placement, fixed=tuple((fixed | grown).items()))
        long = " and ".join(f"{length:,} {name}" for name, length in lengths.items())
        what = f"{'a step' if trains else 'an evaluation'} of {samples} samples of {long} on a rank: "
        self._raise(self._device_problems(placed, what, is_foretold=forecast_bytes is not None))
        self.placement, self.activations_bytes = placed, max(self.activations_bytes, activations)

    def settle(self, actions: Sequence[Action], messages_bytes: int) -> bool:
        """Before the first update: choose the placement, move to it; True. `actions`: this rank's list of the step in a
        pipeline, `messages_bytes`: of the slots of its messages. Collective; raises ConfigError on every rank."""
        if self.placement is not None:
            self._warn_beyond_plan(self.placement)
            return False
        self._weights.flush()
        for slots in slots_of(self._chunks):  # what a step without a plan took beyond it
            slots.shrink()
        self._learn_accumulation()
        measured = max(self._alike(self._meter.peak_bytes if self._meter else 0))
        if measured and self._memory.moves and self._defers:  # the first step has had none beside its forward
            measured += update_bytes_of(self._memory, self._chunks, self._optimizer)
        self._measured_by = max(1.0, measured / self.activations_bytes) if self.activations_bytes else None
        self.activations_bytes = max(measured, self.activations_bytes)
        self.messages_bytes = max(messages_bytes, self.messages_bytes)
        self._uses = self._uses_of(actions)
        gathered = self._gathered_bytes
        if isinstance(self._weights, ShardedWeights) and self._weights.forecast_bytes:
            gathered = self._weights.forecast_bytes
        placed = self._placed(gathered, max(self.activations_bytes, self._evaluated_bytes))
        self._refuse(placed)
        self.placement = placed
        if self._memory.moves:
            if self._device.type == "cpu":
                give_back_freed()  # the first step's activations lie where state is to come
            self._move(placed)
        return True

    def _warn_beyond_plan(self, placed: StatePlacement) -> None:
        """Warn, once, if gradients arrived otherwise than in the first step and exceeded the budget."""
        budget = self._memory.device_budget
        if budget is None or self._has_warned:
            return
        further = sum(slots.bytes - slots.planned_bytes for slots in slots_of(self._chunks))
        if further and placed.device_bytes + further > budget:
            self._has_warned = True
            warn(
                f"memory.device_budget = {budget:,}: parameters that the first step used had no gradient; chunks "
                f"behind them took {further:,} bytes beyond the {placed.device_bytes:,} of the plan"
            )

    def _learn_accumulation(self) -> None:
        """Plan gradients as early as they arrived in the first step, on any rank. A chunk that lacks one is open until
        backward is over, and so are those behind it."""
        staging = self._chunks[0].staging if self._chunks else None
        rows = self._alike(self._began())
        if staging is None or any(row is None for row in rows):
            return
        began = [min(row[each.number] for row in rows) for each in staging.live_ranges]
        ranges = [
            replace(s, start=min(s.start, start)) for s, start in zip(staging.live_ranges, began, strict=True)
        ]
        if ranges != [*staging.live_ranges]:
            staging.replan(ranges)

    def _move(self, placed: StatePlacement) -> None:
        assert isinstance(self._optimizer, ChunkOptimizer)
        own = {piece.name for piece in placed.pieces if piece.moves and piece.shared is None}
        on_device = own - placed.off_device
        for link in self._optimizer.links:
            link.drain()
        if placed.beside is not None:
            self._release_slots()
        for index, chunk in enumerate(self._chunks):
            if Name(index, StateKind.WEIGHTS) in on_device:
                chunk.keep_weights_on_device()
            if Name(index, StateKind.GRADIENTS) in on_device:
                chunk.keep_gradient_on_device()
        for each in self._frozen:
            if Name(each.spec.id, StateKind.FROZEN) in on_device:
                each.keep_weights_on_device()
        off_device = {name.chunk for name in placed.off_device if name.kind is StateKind.OPTIMIZER}
        on_disk = {name.chunk for name in placed.on_disk}
        arena = None if placed.beside is None else partial(self._arena_of, placed)
        self._optimizer.settle_tiers({*range(len(self._chunks))} - off_device, on_disk, arena)
        if placed.beside is not None:
            self._join_slots()
        if isinstance(self._weights, ParameterGather):
            self._weights.replan()

    def _arena_of(self, placed: StatePlacement) -> Arena:
        """An arena with the time-shared weights and gradients in it."""
        assert isinstance(self._optimizer, ChunkOptimizer) and self._optimizer.tiers is not None
        arena, types = Arena(placed.arena_with_room, self._device), self._chunks[0].types
        allocators: dict[SharedInterval, dict[int, ArenaAllocator]] = {}
        for shared in SharedInterval:
            ranges = [each for each in arena.plan.live_ranges if each.what is shared]
            dtype = types.compute if shared is SharedInterval.WEIGHTS else types.gradient
            allocator = ArenaAllocator(ranges, dtype, self._device, arena)
            allocators[shared] = dict.fromkeys((each.number for each in ranges), allocator)
        for index, chunk in enumerate(self._chunks):
            weights, gradients, last = (allocators[shared].get(index) for shared in SharedInterval)
            chunk.share_time(weights, gradients, None if last is None else (last, self._optimizer.tiers.up))
        return arena

    @property
    def _fixed(self) -> dict[str, int]:
        return fixed_of(self._chunks, self._optimizer, is_staged=self._is_staged)

    @property
    def _beside(self) -> tuple[LiveRange, ...] | None:
        return beside_of(self._chunks, self._optimizer, self._accumulation, is_staged=self._is_staged)

    def _placed(self, gathered: int, activations: int) -> StatePlacement:
        update = update_bytes_of(self._memory, self._chunks, self._optimizer)
        fixed = self._fixed | {
            "gathered": gathered,
            "frozen": self._frozen_bytes,
            "activations": max(activations, update),
            "messages": self.messages_bytes,
        }
        return placed_by(self._memory, self._pieces(), fixed | self._visiting, self._device, self._beside)

    def _pieces(self) -> tuple[StatePiece, ...]:
        if not self._memory.moves:
            return ()
        assert isinstance(self._optimizer, ChunkOptimizer)
        return pieces_of(self._chunks, self._optimizer, self._uses, self._frozen)

    def _refuse(self, placed: StatePlacement, *, is_floor: bool = False) -> None:
        self._raise([*self._device_problems(placed, is_floor=is_floor), *self._host.problems(placed)])

    def _device_problems(
        self, placed: StatePlacement, whose: str = "", *, is_floor: bool = False, is_foretold: bool = False
    ) -> Iterator[Problem]:
        """`whose`: words of a batch that comes after the first step; `is_foretold`: by a forecast."""
        memory, later, told = self._memory, None, placed
        if whose and memory.device_budget is not None and placed.device_bytes > memory.device_budget:
            told, whole = (
                placed_by(each, placed.pieces, dict(placed.fixed), self._device, placed.beside)
                for each in (memory, memory.model_copy(update={"device_budget": None}))
            )
            later = LaterBatch(whose, whole.device_bytes, told.device_bytes, is_foretold)
        chunks = (*self._chunks, *self._frozen)
        smaller = smaller_steps(
            self._config, self._samples, told, self._weights, chunks, self._changed_forecast
        )
        return device_problems(memory, placed, smaller, later, is_floor=is_floor)


def _times_as_long(lengths: Mapping[str, int], known: Mapping[str, int]) -> float:
    """The length of a sample over a known one. Of several inputs it is the largest such ratio. An input that the known
    one has not is compared with its longest."""
    longest = max(known.values(), default=1)
    return max((held / max(1, known.get(name, longest)) for name, held in lengths.items()), default=1.0)
