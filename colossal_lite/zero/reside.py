"""A run under a budget: what its first step shows, where everything rests from then on, and what is refused.

Note: when.
At first all that may move rests on the host, so the first step holds the least that this model can.  What it holds
beside is foretold by a run without tensors (`foresee`), and what cannot fit is refused on every rank before anything is
computed; where a model cannot be run so (a module that was handed over built, a loss of a user's own) the first step is
measured alone, and goes beyond the budget before it is refused.  Its micro-batches are measured in any case: every
tensor that the model makes is counted while it lives (memory/tracer.py).  Before the first update the ranks agree on
the worst peak, measured or foretold, the plan is made (zero/budget.py), and what has room goes to the device, once;
from then on nothing is decided in a step.  Fractions of a user's (`static`) are a plan that is known before, and are
put in force at the same moment.  What cannot fit whatever the batch is refused when the engine is made; `plan` says all
of it without a run.  A later batch that holds more than the first is not foreseen.  With one rank a shard that rests on
the device is copied to its slot for a use, as with several.  Cost: the run without tensors; counting makes the first
step slower.

A GPU's kernels hold other things than those of a run without tensors, so its first step is measured alone, by the peak
of torch's allocator: with what others had put on the device by then, with workspaces, and with the weights that were
gathered meanwhile, which count twice.  The budget is of bytes that are allocated; what the allocator has reserved
beyond them (`torch.cuda.memory_reserved`) is not counted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import ceil

import torch

from colossal_lite.comm import AxisComm
from colossal_lite.memory.chunk import Chunk
from colossal_lite.memory.placement import MemoryConfig
from colossal_lite.memory.tracer import AllocatedBytes, LiveBytes
from colossal_lite.problems import Problem, refuse
from colossal_lite.zero.budget import Kind, Name, Piece, Placement, divide, place, visiting_bytes
from colossal_lite.zero.build import slots_of
from colossal_lite.zero.optimizer import ChunkOptimizer
from colossal_lite.zero.own import OwnOptimizer
from colossal_lite.zero.sharded import ShardedWeights, units_of
from colossal_lite.zero.unshard import GatherPlan
from colossal_lite.zero.weights import Weights


def pieces_of(
    chunks: Sequence[Chunk], optimizer: ChunkOptimizer, gathers: GatherPlan | None, accumulation: int
) -> tuple[Piece, ...]:
    """What may rest on either tier, while all of it rests on the host. The weights that a step begins with are taken
    from the slots of the update before."""
    stays = gathers.stays() if gathers else {}
    begins = gathers.forward[0].resident if gathers and gathers.forward else {}
    out = []
    for index, chunk in enumerate(chunks):
        number = chunk.spec.id
        if chunk.weights_at_rest is not None:
            comes = accumulation * stays.get(number, 0) - (number in begins)
            ups = comes + chunk.updates_weights
            out.append(Piece(Name(index, Kind.WEIGHTS), chunk.resting_bytes, ups, 1))
        if chunk.gradient_at_rest is not None:
            size_bytes = chunk.gradient.numel() * chunk.gradient.element_size()
            out.append(Piece(Name(index, Kind.GRADIENTS), size_bytes, 1, accumulation))
        record_bytes = 0 if optimizer.tier_of(chunk) == "disk" else optimizer.record_bytes(index)
        if record_bytes:
            out.append(Piece(Name(index, Kind.OPTIMIZER), record_bytes, 1, 1))
    return tuple(out)


def fixed_of(chunks: Sequence[Chunk], optimizer: ChunkOptimizer | OwnOptimizer) -> dict[str, int]:
    """Bytes on the device of model state that does not move, by kind."""
    gradients = [c.gradient if c.filling is None else c.filling for c in chunks if c.gradient_at_rest is None]
    fixed = {
        "weights": sum(c.resting_bytes for c in chunks if c.weights_at_rest is None),
        "gradients": sum(t.numel() * t.element_size() for t in gradients),
        "staging": sum(slots.planned_bytes for slots in slots_of(chunks)),
    }
    if optimizer.tiers is not None and optimizer.tiers.tier == "disk":
        fixed["visiting"] = optimizer.tiers.device_bytes
    if optimizer.tiers is None:
        fixed["masters"] = sum(c.master_bytes for c in chunks)
        fixed["optimizer"] = optimizer.forecast_bytes
    return fixed


def placed_by(memory: MemoryConfig, pieces: Sequence[Piece], fixed: Mapping[str, int]) -> Placement:
    """Where these pieces rest by a config under which they move."""
    if memory.placement == "static":
        return divide(pieces, fixed, memory.host_fraction.model_dump(), memory.device_budget)
    return place(pieces, fixed, memory.device_budget)


class Residence:
    """Measures the first step, decides where everything rests, and takes it there."""

    def __init__(
        self, memory: MemoryConfig, chunks: Sequence[Chunk], weights: Weights,
        optimizer: ChunkOptimizer | OwnOptimizer, world: AxisComm, *, device: torch.device, accumulation: int,
        frozen_bytes: int,
    ) -> None:  # fmt: skip
        """Raises ConfigError for a budget that is too small for any batch."""
        self._memory, self._chunks, self._weights, self._optimizer = memory, tuple(chunks), weights, optimizer
        self._world, self._accumulation, self._frozen_bytes = world, accumulation, frozen_bytes
        self._device = device
        self._meter: LiveBytes | AllocatedBytes | None = None
        self.placement: Placement | None = None
        """Where everything rests; None before the first update."""
        self.is_foreseen = False
        """Whether a first step's batch has been looked at."""
        self.activations_bytes = 0
        """The most that the model holds in the first step, on any rank, foretold or measured."""
        self._gathered_bytes: Callable[[int], int | None] = lambda prefetch: None
        """Foretold, of slots of gathered weights with so many units ahead."""
        self._refuse(self._placed(self._gathered(None), 0))

    @contextmanager
    def measured(self) -> Iterator[None]:
        """Around what a step computes; the first one is measured."""
        if self.placement is not None or self._memory.device_budget is None:
            yield
            return
        self._meter = self._meter or self._new_meter()
        with self._meter:
            yield

    def _new_meter(self) -> LiveBytes | AllocatedBytes:
        """On a GPU what is there beside the state of this moment, all of whose pieces rest on the host, counts too."""
        if self._device.type != "cuda":
            return LiveBytes()
        fixed, pieces = fixed_of(self._chunks, self._optimizer), self._pieces(None)
        if not self._memory.moves and self._optimizer.tiers is not None:
            fixed["visiting"] = self._optimizer.tiers.device_bytes
        slots = visiting_bytes(pieces, frozenset(piece.name for piece in pieces))
        return AllocatedBytes(self._device, sum(fixed.values()) + self._frozen_bytes + slots)

    def foresee(self, foretell: Callable[..., Mapping[str, int] | None]) -> None:
        """Before the first micro-batch: what does not fit by what `foretell` says this rank will hold (`prefetch=`:
        with so many units ahead; None: nobody knows) is refused. Collective; raises ConfigError on every rank."""
        self.is_foreseen = True
        if self._memory.device_budget is None:
            return
        found = foretell()
        mine = None if found is None else [found["activations"] + found["temporaries"], found["gathered"]]
        with self._world.ledger.paused():
            rows = [row for row in self._world.gather_json(mine) if row is not None]
        if not rows:
            return
        self.activations_bytes = max(activations for activations, _ in rows)
        if found is not None:
            self._gathered_bytes = lambda prefetch: (foretell(prefetch=prefetch) or {}).get("gathered")
        self._refuse(self._placed(max(gathered for _, gathered in rows), self.activations_bytes))

    def settle(self) -> None:
        """Before the first update: where everything rests from now on. Collective; raises ConfigError on every rank."""
        if self.placement is not None:
            return
        self._weights.flush()
        for slots in slots_of(self._chunks):  # what a step without a plan took beyond it
            slots.shrink()
        with self._world.ledger.paused():
            measured = max(self._world.gather_json(self._meter.peak_bytes if self._meter else 0))
        self.activations_bytes = max(measured, self.activations_bytes)
        plan = self._weights.plan if isinstance(self._weights, ShardedWeights) else None
        placed = self._placed(self._gathered(plan), self.activations_bytes, plan)
        self._refuse(placed)
        self.placement = placed
        if self._memory.moves:
            self._move(placed)

    def _move(self, placed: Placement) -> None:
        assert isinstance(self._optimizer, ChunkOptimizer)
        stays = {piece.name for piece in placed.pieces} - placed.on_host
        for link in self._optimizer.links:
            link.drain()
        for index, chunk in enumerate(self._chunks):
            if Name(index, Kind.WEIGHTS) in stays:
                chunk.keep_weights_on_device()
            if Name(index, Kind.GRADIENTS) in stays:
                chunk.keep_gradient_on_device()
        self._optimizer.settle_on_device(
            {index for index in range(len(self._chunks)) if Name(index, Kind.OPTIMIZER) not in placed.on_host}
        )
        if isinstance(self._weights, ShardedWeights):
            self._weights.replan()

    def _placed(self, gathered: int, activations: int, plan: GatherPlan | None = None) -> Placement:
        update = max((c.update_bytes for c in self._chunks), default=0)
        fixed = fixed_of(self._chunks, self._optimizer) | {
            "gathered": gathered,
            "frozen": self._frozen_bytes,
            "activations": max(activations, update),
        }
        if not self._memory.moves and self._optimizer.tiers is not None:
            fixed["visiting"] = self._optimizer.tiers.device_bytes
        return placed_by(self._memory, self._pieces(plan), fixed)

    def _pieces(self, plan: GatherPlan | None) -> tuple[Piece, ...]:
        if not self._memory.moves:
            return ()
        assert isinstance(self._optimizer, ChunkOptimizer)
        return pieces_of(self._chunks, self._optimizer, plan, self._accumulation)

    def _gathered(self, plan: GatherPlan | None) -> int:
        """Bytes of the slots of gathered weights; without a plan the least that any has."""
        widths = {c.spec.id: c.spec.numel * c.own_value.element_size() for c in self._chunks}
        if plan is not None:
            return plan.arena_numel * self._chunks[0].own_value.element_size()
        return max((sum(widths[c] for c in unit) for unit in units_of(self._chunks).values()), default=0)

    def _refuse(self, placed: Placement) -> None:
        refuse([*_device_problems(self._memory, placed, self._smaller(placed)), *self._host_problems(placed)])

    def _host_problems(self, placed: Placement) -> Iterator[Problem]:
        tiers, budget = self._optimizer.tiers, self._memory.host_budget
        held = placed.host_bytes if self._memory.moves else 0
        if tiers is not None and (tiers.tier == "disk" or not self._memory.moves):
            held += tiers.host_bytes
        if isinstance(self._optimizer, ChunkOptimizer) and self._optimizer.shards is not None:
            held += self._optimizer.shards.host_bytes
        if budget is not None and held > budget:
            rule = f"{held:,} bytes rest on the host or pass through it"
            other = "smaller fractions" if self._memory.placement == "static" else "a larger device_budget"
            yield Problem("memory.host_budget", budget, rule, f"{held:,} or more, {other}, more ranks")

    def _smaller(self, placed: Placement) -> Iterator[tuple[str, int]]:
        """Single changes, and what the device would then hold."""
        need, of = placed.device_bytes, dict(placed.fixed)
        if isinstance(self._weights, ShardedWeights):
            for prefetch in range(self._weights.prefetch - 1, -1, -1):
                plan = self._weights.planned(prefetch)
                gathered = self._gathered_bytes(prefetch) if plan is None else self._gathered(plan)
                if gathered is not None:
                    yield f"zero.prefetch={prefetch}", need - of["gathered"] + gathered
        budget, activations = self._memory.device_budget or 0, of.get("activations", 0)
        if self.activations_bytes and need - activations < budget:
            parts = self._accumulation * ceil(activations / (budget - need + activations))
            about = need - activations + ceil(activations * self._accumulation / parts)
            yield f"gradient_accumulation={parts}, if the batch has as many samples", about


def _device_problems(
    memory: MemoryConfig, placed: Placement, smaller: Iterator[tuple[str, int]]
) -> Iterator[Problem]:
    budget, need = memory.device_budget, placed.device_bytes
    if budget is None or need <= budget:
        return
    rows = ", ".join(f"{kind} {held:,}" for kind, tier, held in placed.rows if tier == "device")
    is_least = memory.placement == "auto" and memory.moves
    what = "at the least " if is_least else ""
    change = next((f"{change} ({held:,} bytes)" for change, held in smaller if held <= budget), None)
    others = "" if is_least else ", or memory.placement='auto', or a higher zero.stage"
    legal = f"{need:,} or more{f'; or {change}' if change else others}"
    yield Problem("memory.device_budget", budget, f"the device needs {need:,} bytes {what}({rows})", legal)
