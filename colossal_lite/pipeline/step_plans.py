"""Chooses, checks and caches the plan that the ranks of a pipeline execute in a step.

Note: a plan follows from the config's schedule, the model's stages, and three properties of a step: its micro-batches,
whether gradients are computed, and whether RECVs are posted ahead.  It is built and checked once for each combination.
One rank is a pipeline of one stage.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Literal

from colossal_lite.distributed.communicator import Communicator
from colossal_lite.memory.packing import ChunkSpec
from colossal_lite.memory.weight_chunk import WeightChunk
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
    backward: bool = True, ahead: bool = True, on_host: frozenset[tuple[int, int]] | None = None,
) -> StepShape:  # fmt: skip
    """`micro_batches` of each accumulated part; `packed`: the chunks of the whole pipeline; `on_host`: the ranks and
    chunks whose shards of weights rest on the host, None: all that can."""
    placed, sharding = sorted(stages.placement.items()), sharding_of(config)
    reduce: Literal["step", "micro_batch", "visit"] = "micro_batch" if sharding.by_micro_batch else "step"
    return StepShape(
        micro_batches=micro_batches,
        accumulation_steps=config.gradient_accumulation,
        stages_per_rank=_by_stage(stages, (spec for spec in packed if spec.key.trains)),
        trainable=stages.trainable,
        reduce="visit" if sharding.by_visit else reduce,
        backward=backward,
        ahead=ahead,
        costs=stages.cut.stage_costs(),
        placement=tuple(rank for _, rank in placed),
        update=config.optimizer.update_when,
        weights=_weights_of(config, layout, stages, packed, on_host),
    )


def _by_stage(stages: Stages, packed: Iterable[ChunkSpec]) -> tuple[tuple[int, ...], ...]:
    """The chunks that each stage uses."""
    some = tuple(packed)
    return tuple(
        tuple(spec.id for spec in some if stage in spec.key.stages) for stage in sorted(stages.placement)
    )


def _weights_of(
    config: Config, layout: MeshLayout, stages: Stages, packed: Sequence[ChunkSpec],
    on_host: frozenset[tuple[int, int]] | None,
) -> StageWeights | None:  # fmt: skip
    """The chunks that are gathered for the stages of a pipeline; None where none is."""
    if not config.parallel.pipeline.is_staged or not sharding_of(config).weight:
        return None
    sharded, near = list[ChunkSpec](), set[int]()
    for spec in packed:
        over = layout.size(*spec.key.shard_axes)
        sharded += [spec] if over > 1 or config.memory.moves else []
        near |= {spec.id} if layout.size(*spec.key.near_axes) < over else set()
    zero = config.zero
    keeps = zero.reshard_after_forward is False
    if on_host is None:
        held = sharded if config.memory.moves else []
        on_host = frozenset((rank, spec.id) for spec in held for rank in stages.holders(spec.key.stages))
    return StageWeights(_by_stage(stages, sharded), zero.prefetch, not keeps, frozenset(near), on_host)


class StepPlans:
    """The plans of one engine's steps, each made when it is first asked for."""

    def __init__(
        self, config: Config, layout: MeshLayout, stages: Stages, packed: Sequence[ChunkSpec]
    ) -> None:
        self._config, self._layout, self._stages, self._packed = config, layout, stages, tuple(packed)
        self._made: dict[tuple[int, bool, bool], Plan] = {}
        self._on_host: frozenset[tuple[int, int]] | None = None

    def place(self, chunks: Iterable[WeightChunk], comm: Communicator) -> None:
        """This rank's `chunks` have their tiers: lists fetch from now on what rests on the host. Collective over the
        pipeline, `comm`."""
        with comm.ledger.paused():
            rows = comm.gather_json([chunk.spec.id for chunk in chunks if chunk.weights_at_rest is not None])
        self._on_host = frozenset((rank, chunk) for rank, row in enumerate(rows) for chunk in row)
        self._made.clear()

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
                self._config, self._layout, self._stages, self._packed, parts, backward=backward, ahead=ahead,
                on_host=self._on_host,
            )  # fmt: skip
            self._made[key] = step_plan(self._config.parallel.pipeline, shape)
        return self._made[key]


def report_of(
    plan: Plan, stages: Stages, measured: ScheduleTimeline, *, by_visit: bool = False
) -> ScheduleReport:
    """A step or evaluation as its plan simulates it from the stages' costs, beside what was measured: all but the
    UPDATEs, which are not the pipeline's. `by_visit` as in `Shape`."""
    run = Plan(tuple(tuple(a for a in actions if a.kind is not ActionKind.UPDATE) for actions in plan))
    trains = any(a.kind in (ActionKind.I, ActionKind.B) for actions in run for a in actions)
    parts = 1 + max(a.micro_batch or 0 for actions in run for a in actions)
    shape = Shape(
        len(stages.placement), parts, trainable=stages.trainable, backward=trains, by_visit=by_visit
    )
    return ScheduleReport.of(run, measured, stages.cut.stage_costs(), shape)
