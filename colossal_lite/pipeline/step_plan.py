"""Builds the list of actions of one training step from the schedule, the stages and the batch.

Note: plain values in and out.  `step_plans` caches the plans of a run.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

from colossal_lite.config.pipeline_schema import PipelineConfig
from colossal_lite.schedule.checker import Reading, check
from colossal_lite.schedule.pipeline_schedules import SCHEDULES, auto, generate, placements, ranks_of
from colossal_lite.schedule.plan import ActionKind, Plan, PlanError, Shape
from colossal_lite.schedule.simulator import StageCosts
from colossal_lite.schedule.stage_gathers import StageWeights, add_gathers
from colossal_lite.schedule.step_passes import add_messages, add_step, freeze, one_stage, repeat


@dataclass(frozen=True, slots=True)
class StepShape:
    """What a step's plan follows from, beside the schedule.

    - micro_batches: of each of `accumulation_steps` parts
    - stages_per_rank: chunks of each stage, none where nothing trains
    - trainable: for each stage whether anything of it trains
    - costs: for `auto`, and for where messages stand
    - ahead: RECVs are posted before the compute under which they hide, or block
    - placement: rank of each stage, once a model is laid out. By then `auto` has no choice of it, whatever the costs,
      the micro-batches or the direction
    - weights: those that are gathered for each stage, None where none is
    """

    micro_batches: int
    accumulation_steps: int = 1
    stages_per_rank: tuple[tuple[int, ...], ...] = ((0,),)
    trainable: tuple[bool, ...] = (True,)
    reduce: Literal["step", "micro_batch", "visit"] = "step"
    backward: bool = True
    ahead: bool = True
    costs: StageCosts | None = None
    placement: tuple[int, ...] | None = None
    update: Literal["step", "backward"] = "step"
    weights: StageWeights | None = None


def step_plan(pipeline: PipelineConfig, step: StepShape, compute: Reading | None = None) -> Plan:
    """All passes over a schedule, in their order, checked: what every rank of a pipeline executes in a step.

    One rank gives the serial step: F0 B0 F1 B1 ..., REDUCE, UPDATE.  `compute`: its `compute_plan`, if that was read.
    Raises PlanError for a plan that must not run.
    """
    plan = compute_plan(pipeline, step) if compute is None else compute.plan
    for one_pass in passes(pipeline, step, compute).values():
        plan = one_pass(plan)
    shape = Shape(
        pipeline.stages,
        step.micro_batches * step.accumulation_steps,
        trainable=step.trainable,
        backward=step.backward,
        by_visit=step.reduce == "visit",
    )
    memory = None if step.weights is None else step.weights.memory()
    check(plan, shapes={0: shape}, memory=memory, strict=not step.ahead)
    return plan


def passes(
    pipeline: PipelineConfig, step: StepShape, compute: Reading | None = None
) -> dict[str, Callable[[Plan], Plan]]:
    """The passes over a schedule that a step needs, in their order, by their names."""
    needed: dict[str, Callable[[Plan], Plan]] = {}
    if (parts := step.accumulation_steps) > 1:
        needed[f"repeated for {parts} accumulated parts"] = partial(repeat, times=parts)
    if pipeline.is_staged and pipeline.size > 1:
        posted = "ahead" if step.ahead else "in turn"
        read = compute if parts == 1 else None
        needed[f"messages, received {posted}"] = partial(
            add_messages, seconds=step.costs, ahead=step.ahead, reading=read
        )
    if step.backward and not all(step.trainable):
        needed["without the backward of frozen stages"] = partial(freeze, trainable=step.trainable)
    if step.weights is not None:
        kept = "a visit" if step.weights.reshards else "a step"
        name = f"weights gathered once {kept}, prefetch {step.weights.prefetch}"
        needed[name] = partial(add_gathers, weights=step.weights)
    if step.backward:
        every, chunks = step.reduce.replace("_", "-"), dict(enumerate(step.stages_per_rank))
        name = f"gradients summed by {every}, updates by {step.update}"
        needed[name] = partial(add_step, chunks=chunks, reduce=step.reduce, update=step.update)
    return needed


def compute_plan(pipeline: PipelineConfig, step: StepShape) -> Plan:
    """The compute of one turn, before any pass. Raises ValueError, drawn, for one that holds more than the cap."""
    name, ranks, chunks, cap = (
        pipeline.schedule,
        pipeline.size,
        pipeline.stages_per_rank,
        pipeline.activation_cap,
    )
    if not pipeline.is_staged:
        plan = one_stage(step.micro_batches)
    elif name == "auto":
        plan = auto(ranks, step.micro_batches, chunks, costs=step.costs, cap=cap, placement=step.placement)
    else:
        plan = generate(name, ranks, step.micro_batches, chunks)
        if cap is not None and step.backward:
            _refuse_over(cap, plan, name)
    assert step.placement is None or ranks_of(plan) == step.placement, "stages lie elsewhere"
    return plan if step.backward else plan.only(ActionKind.F)


def plans_by_placement(pipeline: PipelineConfig, step: StepShape) -> tuple[Plan, ...]:
    """The compute of one turn for each way in which stages may lie on ranks: two for `auto` with several stages on a
    rank, one for any other. Raises ValueError if no way has a plan."""
    if pipeline.schedule != "auto" or pipeline.stages_per_rank == 1:
        return (compute_plan(pipeline, step),)
    found, why = list[Plan](), ValueError()
    for placement in placements(pipeline.size, pipeline.stages_per_rank):
        try:
            found.append(compute_plan(pipeline, replace(step, placement=placement)))
        except ValueError as error:  # within the cap there may be one of them only
            why = error
    if not found:
        raise why
    return tuple(found)


def _refuse_over(cap: int, plan: Plan, name: str) -> None:
    """Raises ValueError if a rank holds more activations than `cap`, with the plan drawn."""
    try:
        check(plan, cap=cap)
    except PlanError as error:
        raise ValueError(
            f"parallel.pipeline.activation_cap={cap}: {name} holds more; legal: {max(check(plan).live)} or more, "
            f"fewer micro_batches where all are held, or schedule='auto', which searches within the cap\n{error}"
        ) from error


def splits_backward(pipeline: PipelineConfig) -> bool:
    """Whether a plan of this schedule may have I and W apart."""
    return pipeline.is_staged and SCHEDULES[pipeline.schedule].splits
