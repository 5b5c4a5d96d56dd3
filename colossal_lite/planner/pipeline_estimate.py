"""Plans a run with a pipeline: measures its stages one by one, and walks a rank's list of actions.

Note: the fullest moment of the list gives the memory of a step, and its sends give the traffic.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from textwrap import fill

import torch

from colossal_lite.config.config import Config
from colossal_lite.config.errors import ConfigError, Problem
from colossal_lite.config.parallel_schema import ModelFacts
from colossal_lite.config.pipeline_schema import PipelineConfig
from colossal_lite.data.loader import cut
from colossal_lite.distributed.mesh import Mesh
from colossal_lite.memory.chunk import Chunk
from colossal_lite.memory.packing import ChunkSpec
from colossal_lite.memory.weight_chunk import WeightChunk
from colossal_lite.models import GPT, GPTConfig
from colossal_lite.numerics.random import on_meta
from colossal_lite.pipeline.model_units import traced_units
from colossal_lite.pipeline.stages import Stages, lay_out
from colossal_lite.pipeline.step_plan import StepShape, compute_plan, step_plan
from colossal_lite.pipeline.step_plans import shape_of
from colossal_lite.planner.dry_run import META, Builder, Cost, DryRun, Whole, bytes_of
from colossal_lite.planner.run_plan import MemoryTerm, RunPlan, Term, libraries_bytes
from colossal_lite.planner.step_estimate import (
    StateForecast,
    batch_terms,
    exchange_rows,
    memory_rows,
    record_agreement,
    record_gather,
    samples_of,
)
from colossal_lite.planner.step_list import step_list
from colossal_lite.schedule.checker import Reading
from colossal_lite.schedule.footprint import HEADER_BYTES, StageCost, Walk, most_arrivals, most_unread
from colossal_lite.schedule.gather_plan import FROM_NEAR, GatherPlan
from colossal_lite.schedule.plan import SENDS, Action, ActionKind, Plan
from colossal_lite.schedule.simulator import ScheduleTimeline, simulate
from colossal_lite.schedule.stage_gathers import gather_slots
from colossal_lite.zero.build_chunks import build_chunks, build_frozen, sharding_of

BY_THE_CLOCK = (
    "partition 'profiled': a run is cut by the clock, perhaps otherwise; this is the cut by the formula"
)


def staged_plan(
    dry: DryRun, model: GPTConfig | Builder, facts: ModelFacts | None, batch: int, device_bytes: int | None
) -> RunPlan:
    """The step of one rank of a pipeline: measures its stages one by one, and walks its list of actions."""
    config, mesh = dry.config, dry.mesh
    pipeline = config.parallel.pipeline
    count, pieces = _pieces(config, batch, mesh)
    builder = partial(GPT, model) if isinstance(model, GPTConfig) else model
    module, done, streams = dry.built(builder)
    units = traced_units(on_meta(builder))
    # Nothing runs here, so stages that a run cuts by measured time are cut by the formula.
    stages = lay_out(module, facts, pipeline, mesh.coord("pipeline"), None, units and units.on(module))
    whole = dry.whole(module, done)
    packed = whole.packed(config, mesh.layout, stages.homes)
    mine = [spec for spec in packed if stages.is_holder(spec.key.stages)]
    chunks = build_chunks(
        whole.trainable, mine, whole.specs, config, mesh, META,
        lambda spec: stages.is_first_holder(spec.key.stages),
    )  # fmt: skip
    frozen = build_frozen(mine, config, mesh, META)
    shape = shape_of(config, mesh.layout, stages, packed, count)
    reading = Reading(compute_plan(pipeline, shape))
    made, first = (step_plan(pipeline, replace(shape, ahead=ahead), reading) for ahead in (True, False))
    slots = max(most_arrivals(plan[stages.coord]) for plan in (made, first))
    alike = isinstance(model, GPTConfig)
    costs = {n: dry.stages(stages, module, done, streams, n, alike=alike) for n in sorted({*pieces} - {0})}
    unread = _unread(made, first, stages, chunks, costs, pieces) if mesh.shares_memory else 0
    mesh.ledger.clear()
    actions = made[stages.coord]
    with dry.forms:
        _record_pipeline(actions, chunks, frozen, packed, config, mesh, whole, costs, pieces, stages)
    local = _held(whole, stages)
    rows = mesh.ledger.rows()
    assert shape.costs is not None
    state = _pipeline_memory(
        actions, chunks, frozen, config, local, costs, pieces, stages, slots, dry.sequence
    )  # fmt: skip
    timeline = simulate(reading, shape.costs)
    return RunPlan(
        layout=mesh.layout.describe(),
        rank=mesh.rank,
        world_size=mesh.world_size,
        parameters=sum(whole.specs[name].numel for name in whole.names),
        local_parameters=sum(local.trainable.values()) + sum(local.frozen.values()),
        memory=state.rows + exchange_rows(mesh, unread),
        traffic=rows,
        batch=(
            *batch_terms(config, batch, dry.sequence, mesh, pieces),
            Term("micro-batches", count, "of each accumulated part"),
        ),
        micro_batches=pieces,
        device_bytes=device_bytes if device_bytes is not None else config.memory.device_budget,
        memory_budget=str(state.placed or ""),
        link_bytes=state.link_bytes,
        schedule=_schedule_text(pipeline, shape, stages, timeline, reading.footprint.live),
        timeline=timeline,
        updates=state.told,
        step_list=step_list(config, mesh, shape, actions, [c.spec.id for c in chunks], state.updates),
        libraries_bytes=libraries_bytes(config),
    )


def _held(whole: Whole, stages: Stages) -> Whole:
    """The model with the parameters of this rank's stages alone."""
    return replace(
        whole,
        trainable={n: numel for n, numel in whole.trainable.items() if stages.holds(n)},
        frozen={n: numel for n, numel in whole.frozen.items() if stages.holds(n)},
    )


def _pieces(config: Config, batch: int, mesh: Mesh) -> tuple[int, tuple[int, ...]]:
    """Number of micro-batches in each accumulated part, and the samples of each one on this rank. Raises
    ConfigError."""
    data = mesh.size("data")
    sizes = [stop - start for start, stop in (cut(batch, data, part) for part in range(data))]
    try:
        unit = config.parallel.tensor.sample_parts
        count = config.parallel.pipeline.parts_of(sizes, config.gradient_accumulation, unit)
    except ValueError as error:
        given = config.parallel.pipeline.micro_batches
        rule, _, legal = str(error).removeprefix(f"micro_batches={given}: ").partition("; legal: ")
        problem = Problem("parallel.pipeline.micro_batches", given, rule, legal or "fewer")
        raise ConfigError([problem]) from error
    bounds = [cut(size, count, i) for size in samples_of(config, batch, mesh) for i in range(count)]
    return count, tuple(stop - start for start, stop in bounds)


def _record_pipeline(
    actions: Sequence[Action], chunks: tuple[Chunk, ...], frozen: tuple[WeightChunk, ...],
    packed: Sequence[ChunkSpec], config: Config, mesh: Mesh, whole: Whole,
    costs: Mapping[int, Mapping[int, StageCost]], pieces: Sequence[int], stages: Stages,
) -> None:  # fmt: skip
    """Record the communication of one rank's list, and of the rest of a step."""
    sharding = sharding_of(config)
    if mesh.size("data") > 1:
        mesh.axis("data").all_gather(
            torch.empty(1, max(1, whole.reported_numbers), dtype=torch.int64, device=META)
        )
    of = {chunk.spec.id: chunk for chunk in chunks}
    weights: dict[int | None, WeightChunk] = {chunk.spec.id: chunk for chunk in (*chunks, *frozen)}
    axis = mesh.axis("pipeline").axis
    for action in actions:
        size = 0 if action.micro_batch is None else pieces[action.micro_batch]
        if action.kind is ActionKind.TIED_REDUCE:
            chunk = of[action.chunk or 0]
            for _ in range(len(stages.holders(chunk.spec.key.stages)) - 1):
                mesh.ledger.add("send", axis, bytes_of(chunk.completed()))
        elif action.kind is ActionKind.UNSHARD:
            record_gather(weights[action.chunk], near=action.resource == FROM_NEAR)
        elif action.kind is ActionKind.REDUCE:
            of[action.chunk or 0].start_reduce()
            of[action.chunk or 0].finish_reduce()
        elif action.kind is ActionKind.UPDATE and sharding.updates_in_backward:
            of[action.chunk or 0].conclude()
            of[action.chunk or 0].keep_squares()
            of[action.chunk or 0].free_gradient()
        elif size and action.kind in SENDS:
            assert action.stage is not None
            source = action.stage if action.kind is ActionKind.SEND_F else action.stage - 1
            mesh.ledger.add("send", axis, costs[size][source].sent)
        elif size and action.kind is ActionKind.F:
            cost = costs[size][action.stage or 0]
            for key, total in cost.payload.items():
                mesh.ledger.add(*key, total, calls=cost.calls[key])
    if sharding.updates_in_backward:
        mesh.world.all_reduce(torch.empty(5, dtype=torch.float64, device=META))  # loss, weight, differences
    for chunk in chunks if not sharding.updates_in_backward else ():
        chunk.conclude()
    record_agreement(chunks, [spec for spec in packed if spec.key.trains], sharding, mesh, whole)


def _pipeline_memory(
    actions: Sequence[Action], chunks: tuple[Chunk, ...], frozen: tuple[WeightChunk, ...], config: Config,
    whole: Whole, costs: Mapping[int, Mapping[int, StageCost]], pieces: Sequence[int], stages: Stages, slots: int,
    tokens: int,
) -> StateForecast:  # fmt: skip
    """As `memory_rows`, at the fullest moment of the list, with `slots` of messages; `tokens` of a sample."""
    # Other ranks' gradients of a tied chunk are received beside it and summed in a buffer of their own.
    tied = {
        chunk.spec.id: len(stages.holders(chunk.spec.key.stages)) * _whole_bytes(chunk) for chunk in chunks
    }
    walk = Walk(
        actions, stages.placement, lambda stage, i: costs[pieces[i]][stage] if pieces[i] else None, tied
    )
    # Numbers of all samples of the step, and the positions of the micro-batch that computes.
    numbers = 8 * (sum(pieces) + tokens)
    worst = Cost({}, {}, walk.kept + numbers, walk.logits, walk.most + numbers, walk.most + numbers)
    weights = {chunk.spec.id: chunk for chunk in (*chunks, *frozen)}
    numels = {index: chunk.spec.numel for index, chunk in weights.items()}
    parts = {index: chunk.part_numel for index, chunk in weights.items() if chunk.part_numel}
    gathered = gather_slots(actions, numels, parts)
    largest = 0
    for action in actions:
        if action.kind in SENDS.values() and pieces[action.micro_batch or 0]:
            source = (action.stage or 0) - (action.kind is ActionKind.RECV_F)
            largest = max(largest, costs[pieces[action.micro_batch or 0]][source].sent)
    messages = MemoryTerm("messages", slots * largest, "slots of what comes from other stages")
    gathers = GatherPlan((), (), gathered.arena_numel, gathered.live_numel)
    return memory_rows(config, chunks, gathers, whole, worst, frozen, actions=actions, messages=messages)


def _whole_bytes(chunk: Chunk) -> int:
    """Bytes of all gradients of a chunk."""
    return chunk.spec.numel * chunk.gradient.element_size()


def _unread(
    made: Plan, first: Plan, stages: Stages, chunks: tuple[Chunk, ...],
    costs: Mapping[int, Mapping[int, StageCost]], pieces: Sequence[int],
) -> int:  # fmt: skip
    """The most host memory that unread messages of this rank take in shared memory, in any step.

    The RECVs of the first step block, and its messages have headers."""
    of = {chunk.spec.id: chunk for chunk in chunks}

    def sent_bytes(action: Action, header_bytes: int) -> int:
        if action.kind is ActionKind.TIED_REDUCE:
            chunk = of[action.chunk or 0]
            return (len(stages.holders(chunk.spec.key.stages)) - 1) * _whole_bytes(chunk)
        if not pieces[action.micro_batch or 0]:
            return 0
        source = (action.stage or 0) - (action.kind is ActionKind.SEND_B)
        return costs[pieces[action.micro_batch or 0]][source].sent + header_bytes

    return max(
        most_unread(made, stages.coord, partial(sent_bytes, header_bytes=0), blocks=False),
        most_unread(first, stages.coord, partial(sent_bytes, header_bytes=HEADER_BYTES), blocks=True),
    )


def _schedule_text(
    pipeline: PipelineConfig, step: StepShape, stages: Stages, timeline: ScheduleTimeline, live: Iterable[int]
) -> str:
    """Describes the schedule: the cut with its stages' costs, the bubble, and the activations of each rank."""
    held = ", ".join(map(str, live))
    return "\n".join(
        [
            f"{pipeline.schedule}: {pipeline.size} ranks, {step.micro_batches} micro-batches, by the stages' costs",
            *([BY_THE_CLOCK] if pipeline.partition == "profiled" else []),
            *str(stages.cut).splitlines(),
            f"bubble {timeline.idle_share():.1%}",
            fill(f"activations held at most, of one stage and micro-batch, by rank: {held}", width=100),
        ]
    )
