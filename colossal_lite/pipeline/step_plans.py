"""Chooses, checks and caches the plan that the ranks of a pipeline execute in a step.

Note: a plan follows from the config's schedule, the model's stages, and three properties of a step: its micro-batches,
whether gradients are computed, and whether RECVs are posted ahead.  It is built and checked once for each combination.
One rank is a pipeline of one stage.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from colossal_lite.memory.packing import ChunkKey, ChunkSpec, stages_of, trains
from colossal_lite.observe.schedule_report import ScheduleReport
from colossal_lite.pipeline.stages import Stages
from colossal_lite.pipeline.step_plan import StepShape, step_plan
from colossal_lite.schedule.footprint import most_arrivals
from colossal_lite.schedule.plan import ActionKind, Plan, Shape
from colossal_lite.schedule.simulator import ScheduleTimeline
from colossal_lite.schedule.stage_gathers import StageWeights
from colossal_lite.sharding.mesh_layout import MeshLayout
from colossal_lite.zero.build_chunks import sharding_of

if TYPE_CHECKING:
    from colossal_lite.config.config import Config


def shape_of(
    config: Config, layout: MeshLayout, stages: Stages, packed: Sequence[ChunkSpec], micro_batches: int, *,
    backward: bool = True, ahead: bool = True,
) -> StepShape:  # fmt: skip
    """`micro_batches` of each accumulated part; `packed`: the chunks of the whole pipeline."""
    placed = sorted(stages.placement.items())
    return StepShape(
        micro_batches=micro_batches,
        accumulation_steps=config.gradient_accumulation,
        stages_per_rank=_by_stage(stages, filter(trains, packed)),
        trainable=stages.trainable,
        reduce="micro_batch" if sharding_of(config).by_micro_batch else "step",
        backward=backward,
        ahead=ahead,
        costs=stages.cut.stage_costs(),
        placement=tuple(rank for _, rank in placed),
        update=config.optimizer.update_when,
        weights=_weights_of(config, layout, stages, packed),
    )


def _by_stage(stages: Stages, packed: Iterable[ChunkSpec]) -> tuple[tuple[int, ...], ...]:
    """The chunks that each stage uses."""
    some = tuple(packed)
    return tuple(
        tuple(spec.id for spec in some if stage in stages_of(spec)) for stage in sorted(stages.placement)
    )


def _weights_of(
    config: Config, layout: MeshLayout, stages: Stages, packed: Sequence[ChunkSpec]
) -> StageWeights | None:
    """The chunks that are gathered for the stages of a pipeline; None where none is."""
    if config.parallel.pipeline.size == 1 or not sharding_of(config).weight:
        return None
    sharded, near = list[ChunkSpec](), set[int]()
    for spec in packed:
        assert isinstance(spec.key, ChunkKey)
        over = layout.size(*spec.key.shard_axes)
        sharded += [spec] if over > 1 else []
        near |= {spec.id} if layout.size(*spec.key.near_axes) < over else set()
    zero = config.zero
    keeps = zero.reshard_after_forward is False
    return StageWeights(_by_stage(stages, sharded), zero.prefetch, not keeps, frozenset(near))


class StepPlans:
    """The plans of one engine's steps, each made when it is first asked for."""

    def __init__(
        self, config: Config, layout: MeshLayout, stages: Stages, packed: Sequence[ChunkSpec]
    ) -> None:
        self._config, self._layout, self._stages, self._packed = config, layout, stages, tuple(packed)
        self._made: dict[tuple[int, bool, bool], Plan] = {}

    def of_step(
        self, micro_batches: int, rank: int, *, backward: bool, knows_shapes: bool, posts_ahead: bool
    ) -> tuple[Plan, int]:
        """The plan of a step, and the message slots of `rank`. RECVs are posted ahead where shapes are known.

        The slots suffice for both plans of this engine: a later step with known shapes needs no others."""
        plans = {
            ahead: self.of(micro_batches, backward=backward, ahead=ahead)
            for ahead in {knows_shapes and posts_ahead, posts_ahead}
        }
        slots = max(most_arrivals(plan[rank]) for plan in plans.values())
        return plans[knows_shapes and posts_ahead], slots

    def of(self, micro_batches: int, *, backward: bool, ahead: bool) -> Plan:
        """The lists that all ranks execute in a step of so many micro-batches. Raises PlanError as `step_plan`."""
        key = micro_batches, backward, ahead
        if key not in self._made:
            parts = micro_batches // self._config.gradient_accumulation
            shape = shape_of(
                self._config, self._layout, self._stages, self._packed, parts, backward=backward, ahead=ahead
            )
            self._made[key] = step_plan(self._config.parallel.pipeline, shape)
        return self._made[key]


def report_of(plan: Plan, stages: Stages, measured: ScheduleTimeline) -> ScheduleReport:
    """A step or evaluation as its plan simulates it from the stages' costs, beside what was measured: all but the
    UPDATEs, which are not the pipeline's."""
    run = Plan(tuple(tuple(a for a in actions if a.kind is not ActionKind.UPDATE) for actions in plan))
    trains = any(a.kind in (ActionKind.I, ActionKind.B) for actions in run for a in actions)
    parts = 1 + max(a.micro_batch or 0 for actions in run for a in actions)
    shape = Shape(len(stages.placement), parts, trainable=stages.trainable, backward=trains)
    return ScheduleReport.of(run, measured, stages.cut.stage_costs(), shape)
