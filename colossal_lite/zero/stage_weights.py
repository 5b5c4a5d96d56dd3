"""Gathers the weights of pipeline stages where the list of a step says.

Note: the list of a step alone decides (schedule/stage_gathers.py).
An UNSHARD starts the gather of a chunk into its slot,
after the deferred update of this chunk.  Where this rank's shard rests on the host, a FETCH has begun to copy it there.
A compute action waits for all chunks of its stage, so its modules need no gate.  Ranks that share weights run one list,
so their gathers have one order, even if some micro-batches are empty.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from torch import nn

from colossal_lite.memory.chunk import Chunk
from colossal_lite.memory.frozen_chunk import FrozenChunk
from colossal_lite.memory.weight_chunk import WeightChunk
from colossal_lite.numerics.torch_modes import without_modes
from colossal_lite.schedule.abreast import begins
from colossal_lite.schedule.gather_plan import FROM_NEAR
from colossal_lite.schedule.plan import Action, ActionKind
from colossal_lite.schedule.stage_gathers import GatherSlots, gather_slots
from colossal_lite.zero.weight_slots import ShardedWeights


class StageGather(ShardedWeights):
    """Gathers the weights of the stages on this rank, action by action."""

    def __init__(
        self, module: nn.Module, parameters: Mapping[str, nn.Parameter], chunks: Sequence[Chunk],
        frozen: Sequence[WeightChunk] = (), *, is_traced: bool = False,
    ) -> None:  # fmt: skip
        """`is_traced`: a stage also runs the model's code before it, on zeros (pipeline/traced_sections.py)."""
        super().__init__(module, parameters, chunks, frozen)
        self._is_traced = is_traced
        self._actions: Sequence[Action] = ()
        self.slots = GatherSlots()
        """Slots of the list that was followed last."""
        self._own_numel = self._shared_numel = 0  # of both arenas, by the plan
        self._shared_offsets: Sequence[int] = ()
        self._offsets: dict[bool, Iterator[int]] = {}  # of chunks in shared slots or not
        self.on_turn: Callable[[], object] | None = None
        """Called where a turn begins (schedule/abreast.py): it returns when this engine may go on."""
        self._begins: Iterator[bool] = iter(())
        self._of_stage: dict[int, list[WeightChunk]] = {}
        for chunk in self._all.values():
            for stage in chunk.spec.key.stages if chunk.is_sharded else ():
                self._of_stage.setdefault(stage, []).append(chunk)

    def follow(self, actions: Sequence[Action]) -> None:
        if actions is not self._actions:
            numels = {index: chunk.spec.numel for index, chunk in self._all.items()}
            parts = {index: chunk.part_numel for index, chunk in self._all.items() if chunk.part_numel}
            self._in_shared = {
                i for i, c in self._all.items() if isinstance(c, FrozenChunk) and c.shares_slots
            }
            own = [action for action in actions if action.chunk not in self._in_shared]
            self._actions, self.slots = actions, gather_slots(own, numels, parts)
            self._kept = self.slots.kept
            if self._in_shared:
                self._follow_shared([action for action in actions if action.chunk in self._in_shared], numels)
            if self.slots.arena_numel > self._own_numel:
                self._own_numel = self.slots.arena_numel
                with without_modes():
                    self._allocate(self._own_numel)
            self._planned_numel = self._own_numel + self._shared_numel
        self._offsets = {False: iter(self.slots.offsets), True: iter(self._shared_offsets)}
        self._begins = begins(actions)
        self._has_part.clear()

    def _follow_shared(self, actions: Sequence[Action], numels: Mapping[int, int]) -> None:
        """Plan the slots that all engines of the store share."""
        slots = gather_slots(actions, numels)
        self._shared_offsets = slots.offsets
        self._shared_numel = max(self._shared_numel, slots.arena_numel)
        records = next((c._records for i, c in self._all.items() if i in self._in_shared), None)
        if records is not None and records.slots is not None:
            with without_modes():
                device = next(iter(self._all.values())).device
                records.slots.reserve(slots.arena_numel * self._dtype.itemsize, device)
            self._shared_arena = records.slots.arena
            self._note_arenas()

    def gather(self, action: Action) -> None:
        index = action.chunk
        assert index is not None
        if next(self._begins) and self.on_turn is not None:
            self.on_turn()
        if action.kind is ActionKind.RESHARD:
            self._keep_part(index)
            self._drop(index)
            return
        if index not in self._resident:
            self._run_deferred_until(self._last_trained([index]))
            offset = next(self._offsets[index in self._in_shared])
            self._fetch(index, offset, near=action.resource == FROM_NEAR)
        if action.kind is ActionKind.UNSHARD:
            self._gather(index)

    def _fetch(self, index: int, offset: int | None, *, near: bool = False) -> None:
        chunk = self._all[index]
        if index not in self._in_shared or offset is None:
            return super()._fetch(index, offset, near=near)
        assert isinstance(chunk, FrozenChunk) and self.up is not None
        chunk.fetch_shared(offset, self.up)
        self._resident[index] = offset
        self._most_shared_numel = max(self._most_shared_numel, offset + chunk.spec.numel)

    def arrive(self, stage: int) -> None:
        for chunk in self._of_stage.get(stage, ()):
            chunk.finish_gather()

    def _refuse_read(self, chunk: WeightChunk) -> None:
        if not self._is_traced or self._stage in chunk.spec.key.stages:
            super()._refuse_read(chunk)
