"""Gathers ZeRO-3 weights into slots by a plan, and drops them after use.

Note: requests and the plan.
A gate requests weights before the forward of the module that owns them.  In backward autograd requests them, when it
unpacks a saved tensor in a slot.  The plan decides what then happens (schedule/gather_plan.py).  Its steps run in
order, up to the one that has the weights.  The rest run at the end.  So every rank makes the same gathers and
reductions in the same order, whatever modules it leaves out.  A weight that the plan has dropped is an error, never an
old value.

The first micro-batch has no plan.  At each new unit the ranks exchange which weights they want and how many gradients
are complete.  They reduce the gradients that are complete on any rank, and gather what comes first in the order of the
model.  Ranks that want other weights wait for their turn.  That record is the trace.  It has all units in one order,
also where ranks leave out other modules, such as experts.  The arena is allocated when the trace ends; nothing is
allocated after that.

Code that backward runs again saves real views (zero/weight_slots.py).  So the units that a recomputed block reads are
requested at once, and held until backward leaves the block.  Code of the user that one node of autograd runs again may
read several units too, as torch's checkpoint does.  These are held until the end of backward.  Frozen weights are
gathered like the others, in chunks of their own.  Backward gathers them only where an input gradient needs them.
Source: arXiv 1910.02054, section 5.3; prefetch from the order of the first step as in 2104.07857.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from enum import StrEnum
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from colossal_lite.config.errors import first_few
from colossal_lite.config.schema import ZeroConfig
from colossal_lite.distributed.communicator import Communicator
from colossal_lite.memory.chunk import Chunk
from colossal_lite.memory.weight_chunk import SavedView, WeightChunk
from colossal_lite.numerics.torch_modes import without_modes
from colossal_lite.schedule.gather_plan import FROM_NEAR, GatherMoment, GatherPlan, GatherStep, Needs, Trace
from colossal_lite.schedule.plan import ActionKind
from colossal_lite.transforms.compiled_units import Place
from colossal_lite.zero.build_chunks import slots_of
from colossal_lite.zero.forward_hooks import ForwardGates
from colossal_lite.zero.gather_units import plan_of, units_of
from colossal_lite.zero.gradient_hooks import GradientHooks, StageHooks
from colossal_lite.zero.stage_weights import StageGather
from colossal_lite.zero.weight_slots import ShardedWeights

NOTHING: Needs = frozenset()


class Phase(StrEnum):
    IDLE = "idle"
    FORWARD = "forward"
    BACKWARD = "backward"


class ParameterGather(ShardedWeights):
    """Gathers the weights of one model unit by unit, `prefetch` units ahead."""

    def __init__(
        self, module: nn.Module, parameters: Mapping[str, nn.Parameter], chunks: Sequence[Chunk],
        hooks: GradientHooks, world: Communicator, zero: ZeroConfig, frozen: Sequence[WeightChunk] = (),
    ) -> None:  # fmt: skip
        """`frozen`: the chunks that do not train, numbered behind `chunks`."""
        self._hooks, self._world, self._zero = hooks, world, zero
        self._ordered: tuple[WeightChunk, ...] = (*chunks, *frozen)
        self._units = units_of(self._ordered)
        self.trace: Trace | None = None
        """The order in which the first micro-batch read the weights; None until its end."""
        self.plan: GatherPlan | None = None
        """What a micro-batch does, by the trace."""
        self._phase = Phase.IDLE
        self._steps: tuple[GatherStep, ...] = ()
        self._next = 0  # the step to execute next
        self._current = NOTHING  # gathered now
        self._parents: list[Needs] = []  # of the modules that have begun their forward and not ended it
        self._seen: list[GatherMoment] = []
        self._forward_seen: tuple[GatherMoment, ...] = ()
        self._has_new_plan = False  # whether the plan is new
        self._after_fetches: Callable[[], None] | None = None
        self._own: dict[nn.Module, Needs] = {}  # of modules with weights of their own
        self._at_once: dict[int, Needs] = {}  # chunk -> what the compiled code that reads it needs
        self._node: Any = None  # of autograd, that has asked last
        self._block = NOTHING  # of the block that was recomputed last
        self._again: tuple[Any, Needs] = (None, NOTHING)  # a node that runs code again, and its needs
        self._kept_again = NOTHING  # of code that reads several units
        super().__init__(module, parameters, chunks, frozen)

    @contextmanager
    def forward(self, stage: int = 0) -> Iterator[None]:
        self._begin(Phase.FORWARD)
        keeps = torch.is_grad_enabled()
        with self._watched(stage):
            yield
        self._end()
        self.run_deferred()
        if not keeps or self.plan is None:
            self._make_resident({})

    @contextmanager
    def backward(self) -> Iterator[None]:
        self.run_deferred()
        self._begin(Phase.BACKWARD)
        yield
        self._end()
        self._make_resident({})

    def after_fetches(self, call: Callable[[], None]) -> None:
        self._after_fetches = call

    def _call_after_fetches(self) -> None:
        """If no step that is left has weights to fetch from the host."""
        if self._after_fetches is None:
            return
        left = (action for step in self._steps[self._next :] for action in step.actions)
        if any(action.kind is ActionKind.FETCH and action.resource != FROM_NEAR for action in left):
            return
        call, self._after_fetches = self._after_fetches, None
        call()

    def flush(self) -> None:
        """Run every deferred update and drop every gathered weight."""
        self.run_deferred()
        self._make_resident({})

    def give_up(self) -> bool:
        """After a failed micro-batch: make its remaining gathers; an unfinished trace gives no plan."""
        if self._phase is Phase.IDLE:
            return False
        self._run_remaining()
        self._forward_seen = ()
        self._end_phase()
        self._make_resident({})
        return True

    @property
    def _first(self) -> int:
        return self._last_trained(self.plan.forward[0].resident) if self.plan and self.plan.forward else 0

    def updated(self, chunk: Chunk, *, changed: bool) -> None:
        """Gather the chunks that the next forward begins with, while the others are updated."""
        if self.plan is not None and (offset := self.plan.forward[0].resident.get(chunk.spec.id)) is not None:
            self._fetch(chunk.spec.id, offset)
            self._gather(chunk.spec.id)
        else:
            super().updated(chunk, changed=changed)

    # ---- requests ----

    def _gates(self, place: Place, needed: Sequence[WeightChunk]) -> Iterator[Any]:
        yield from super()._gates(place, needed)
        needs = frozenset[int]().union(*(self._units.get(chunk.spec.id, NOTHING) for chunk in needed))
        if not needs:
            return
        self._own[place.owner] = needs
        if place.is_unit:
            joined = needs.union(*(self._at_once.get(chunk, NOTHING) for chunk in needs))
            self._at_once |= dict.fromkeys(joined, joined)
        if not any(True for _ in place.owner.children()):
            yield from place.before(lambda *_: self._need(self._held_with(needs)))
            return
        # What a module with children owns may be read before, between and behind them.
        yield from place.before(partial(self._enter_parent, needs))
        yield from place.behind(self._leave_parent)

    def _enter_parent(self, needs: Needs, module: nn.Module, args: Any) -> None:
        self._parents.append(self._held_with(needs))
        self._need(self._held)

    def _leave_parent(self) -> None:  # torch would take what a hook returns for the output
        self._parents.pop()

    @contextmanager
    def again(self, owner: nn.Module) -> Iterator[None]:
        self._block = NOTHING.union(*(self._own.get(module, NOTHING) for module in owner.modules()))
        self._need(self._held)
        yield

    @property
    def _held(self) -> Needs:
        return (self._parents[-1] if self._parents else NOTHING) | self._block | self._kept_again

    def _held_with(self, needs: Needs) -> Needs:
        """The weights that are held while a module reads `needs`, with these."""
        if self._phase is Phase.BACKWARD:
            self._run_again(needs)
        return needs | self._held

    def _run_again(self, needs: Needs) -> None:
        """Code that backward runs again asks for `needs`. Hold them if the same code has asked for others."""
        node, asked = torch._C._current_autograd_node(), needs
        if node is not None and node is self._again[0]:
            asked = needs | self._again[1]
            if not asked <= self._again[1] | self._block:
                self._kept_again |= asked
        self._again = node, asked

    def _unpack(self, saved: tuple[Tensor, int] | SavedView) -> Tensor:
        if isinstance(saved, SavedView):
            self._bring(saved)
        return super()._unpack(saved)

    def _bring(self, saved: SavedView) -> None:
        """Make the weights gathered that backward reads through this view."""
        if self._phase is Phase.IDLE:
            raise ValueError(
                "backward: at zero.stage=3 it gathers weights; call engine.backward(loss) in the place of "
                "loss.backward(), on every rank. For torch.autograd.grad of outputs, or the loss of another model: "
                "zero.stage=2"
            )
        chunk, node = saved.chunk.spec.id, torch._C._current_autograd_node()
        needs = self._at_once.get(chunk, self._units[chunk])
        if node is not None and node is self._node and not needs <= self._current:
            raise ValueError(
                f"backward: {node.name()} reads weights of two units at once, which zero.stage=3 gathers one after the "
                f"other; use zero.stage=2"
            )
        self._node, self._block = node, NOTHING
        self._need(needs | self._held)

    def _need(self, needs: Needs) -> None:
        """Make the chunks `needs` gathered."""
        if needs <= self._current:
            return
        if self._phase is Phase.IDLE:
            raise ValueError(
                "model: at zero.stage=3 a forward gathers weights; call engine(inputs), train_step or eval_step in the "
                "place of the model, on every rank"
            )
        with without_modes():
            self._gather_needed(needs)

    def _gather_needed(self, needs: Needs) -> None:
        if self.plan is None:
            while not needs <= self._current:
                self._trace_moment(needs)
            return
        found = next((i for i in range(self._next, len(self._steps)) if needs <= self._steps[i].needs), None)
        if found is None:
            raise ValueError(self._out_of_order(needs))
        while self._next <= found:
            self._step()
        self._wait(self._steps[found].needs)

    def _out_of_order(self, needs: Needs) -> str:
        names = [entry.name for c in sorted(needs) for entry in self._all[c].spec.entries]
        return (
            f"{self._phase}: the weights {first_few(names)} are read when the "
            f"plan of zero.stage=3 has dropped them. A model may leave modules out, but must use them in the order of "
            f"its first step. Each forward needs a backward of its own. zero.stage=2 has no such rule"
        )

    # ---- gathers and drops ----

    def _begin(self, phase: Phase) -> None:
        self._phase, self._next, self._current, self._seen = phase, 0, NOTHING, []
        self._parents.clear()
        if phase is Phase.FORWARD:
            self._has_part.clear()
        self._hooks.limit = 0  # until a step, or the other ranks, say more
        if self.plan is None:
            self._make_resident({})
        elif phase is Phase.FORWARD:
            self._steps = self.plan.forward
            self._make_resident(self.plan.forward[0].resident, gathers=False)  # its steps do
        else:
            self._steps = self.plan.backward
            self._make_resident(self.plan.forward[-1].resident)
            self._limit()
            self._call_after_fetches()
        if phase is Phase.FORWARD and self._has_new_plan:
            for slots in slots_of(self._chunks):
                slots.shrink()
            self._has_new_plan = False

    def _end(self) -> None:
        """Make the remaining gathers, because other ranks may need them."""
        self._run_remaining()
        if self.plan is None:
            self._plan_from_trace()
        self._end_phase()

    def _run_remaining(self) -> None:
        if self.plan is not None:
            while self._next < len(self._steps):
                self._step()
        else:
            while self._trace_moment(None):
                pass

    def _end_phase(self) -> None:
        self._phase, self._current, self._node = Phase.IDLE, NOTHING, None
        self._block, self._again, self._kept_again = NOTHING, (None, NOTHING), NOTHING
        self._after_fetches = None
        self._hooks.limit = len(self._chunks)

    def _step(self) -> None:
        step = self._steps[self._next]
        self._next += 1
        self._current = NOTHING
        for action in step.actions:
            assert action.chunk is not None
            if action.kind is ActionKind.RESHARD:
                self._keep_part(action.chunk)
                self._drop(action.chunk)
            elif action.resource == FROM_NEAR:
                self._fetch(action.chunk, step.resident[action.chunk], near=True)
            elif action.kind in (ActionKind.FETCH, ActionKind.UNSHARD):
                if action.chunk not in self._resident:  # its gather may have started after its update
                    self._fetch_updated(action.chunk, step.resident[action.chunk])
                if action.kind is ActionKind.UNSHARD:
                    self._gather(action.chunk)
            else:
                self._hooks.launch(len(self._chunks) - action.chunk)
        if self._phase is Phase.BACKWARD:
            self._limit()
            self._call_after_fetches()

    def _limit(self) -> None:
        """Until the next step no more reductions may launch than it expects."""
        more = self._next < len(self._steps)
        self._hooks.limit = self._steps[self._next].launched if more else len(self._chunks)

    def _wait(self, needs: Needs) -> None:
        for index in needs:
            self._all[index].finish_gather()
        self._current = needs

    def _make_resident(self, resident: Mapping[int, int], *, gathers: bool = True) -> None:
        """Make exactly the chunks `resident`, each at its offset; if not `gathers`, those of the host only come up."""
        self._run_deferred_until(self._last_trained(resident))
        for index in [i for i, offset in self._resident.items() if resident.get(i) != offset]:
            self._drop(index)
        coming = {index: offset for index, offset in resident.items() if index not in self._resident}
        for index, offset in coming.items():
            self._fetch(index, offset)
        for index in coming if gathers else ():
            self._gather(index)

    # ---- the first micro-batch ----

    def _trace_moment(self, needs: Needs | None) -> bool:
        """One moment of the trace, agreed with all ranks; `needs` None: this rank has no more. False: no rank has."""
        ready = self._hooks.ready if self._phase is Phase.BACKWARD else 0
        with self._world.ledger.paused():
            rows = self._world.gather_json([None if needs is None else sorted(needs), ready])
        launched = max(row[1] for row in rows)
        self._hooks.launch(launched)
        self._hooks.limit = launched
        wanted = [row[0] for row in rows if row[0] is not None]
        if not wanted:
            return False
        forward = self._phase is Phase.FORWARD
        places = [max(some) if forward else -min(some) for some in wanted]
        first = (some for some, place in zip(wanted, places, strict=True) if place == min(places))
        union: Needs = frozenset(index for some in first for index in some)
        self._current = NOTHING
        self._make_resident(dict.fromkeys(sorted(union), -1))
        self._seen.append(GatherMoment(union, launched))
        self._wait(union)
        return True

    def _plan_from_trace(self) -> None:
        """After the first forward and backward: make the plan from their trace."""
        if self._phase is Phase.FORWARD:
            self._forward_seen = tuple(self._seen)
        elif self._forward_seen:
            self._make_resident({})
            self._has_new_plan = True
            self.trace = Trace(self._forward_seen, tuple(self._seen))
            self.replan()
            assert self.plan is not None
            with without_modes():
                self._allocate(self.plan.arena_numel)

    def planned(self, prefetch: int) -> GatherPlan | None:
        """What the plan would be with so many units ahead; None while there is no trace."""
        if self.trace is None:
            return None
        reshards = self._zero.reshard_after_forward
        return plan_of(self.trace, self._ordered, prefetch=prefetch, reshard_after_forward=reshards)

    def replan(self) -> None:
        """Plan again after shards have changed tiers; the order of gathers and the slots do not change."""
        self.plan = self.planned(self._zero.prefetch)
        if self.plan is not None:
            self._planned_numel, self._kept = self.plan.arena_numel, self.plan.kept


def weights_of(
    module: nn.Module, parameters: Mapping[str, nn.Parameter], chunks: Sequence[Chunk], hooks: StageHooks,
    world: Communicator, zero: ZeroConfig, frozen: Sequence[WeightChunk] = (), *, is_staged: bool, is_traced: bool,
) -> ForwardGates:  # fmt: skip
    """The gates for these chunks: none sharded, of pipeline stages (`is_staged`), or of a whole model.

    `is_traced`: the stages are those of a traced model. `parameters`: by the names that the chunks have for them."""
    if not any(chunk.is_sharded for chunk in (*chunks, *frozen)):
        return ForwardGates(module, parameters, chunks)
    if is_staged:
        return StageGather(module, parameters, chunks, frozen, is_traced=is_traced)
    return ParameterGather(module, parameters, chunks, hooks.only, world, zero, frozen)
