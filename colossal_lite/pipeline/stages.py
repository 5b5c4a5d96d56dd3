"""Assigns units to this rank's stages, and removes the modules of other stages.

Note: `OtherStageModule` replaces a removed module, so that names do not change.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from torch import Tensor, nn

from colossal_lite.config.errors import first_few
from colossal_lite.config.parallel_schema import ModelFacts
from colossal_lite.config.pipeline_schema import PipelineConfig
from colossal_lite.data.batch import Batch
from colossal_lite.kernels import Dropout
from colossal_lite.layers.layer_swap import ancestors
from colossal_lite.layers.swap_checks import has_hooks
from colossal_lite.models import GPT
from colossal_lite.numerics.torch_modes import naming_transforms
from colossal_lite.pipeline.model_units import Carried, Sections, WholeSections, costs_of, sections_of
from colossal_lite.pipeline.partition import Partition, Unit, partition
from colossal_lite.pipeline.runtime import flat
from colossal_lite.pipeline.step_plan import StepShape, compute_plan, plans_by_placement
from colossal_lite.pipeline.traced_sections import (
    OtherStageModule,
    OtherStageParameter,
    Progress,
    TracedSections,
)
from colossal_lite.schedule.checker import Reading
from colossal_lite.schedule.pipeline_schedules import ranks_of
from colossal_lite.schedule.plan import Plan
from colossal_lite.schedule.simulator import simulate
from colossal_lite.transforms.auxiliary_loss import modules_of
from colossal_lite.transforms.batch_statistics import is_over_the_batch


@dataclass(frozen=True)
class Stages:
    """The stages of a pipeline, and which of them this rank has: the same on every rank but `here`."""

    sections: Sections
    cut: Partition
    placement: Mapping[int, int]
    """Pipeline coordinate of each stage."""
    coord: int
    homes: Mapping[str, tuple[int, ...]]
    """Stages that use each parameter, by its first name in the serial model."""
    trainable: tuple[bool, ...]
    """For each stage, whether anything of it trains."""

    @property
    def here(self) -> tuple[int, ...]:
        """Stages of this rank, ascending."""
        return tuple(stage for stage, coord in sorted(self.placement.items()) if coord == self.coord)

    @property
    def last(self) -> int:
        return len(self.cut.bounds) - 1

    def holds(self, name: str) -> bool:
        """Whether this rank holds a parameter."""
        return any(self.placement[stage] == self.coord for stage in self.homes[name])

    def holders(self, stages: Sequence[int]) -> list[int]:
        """Pipeline coordinates that have one of these stages, ascending."""
        return sorted({self.placement[stage] for stage in stages})

    def is_holder(self, stages: Sequence[int]) -> bool:
        """Whether this rank has one of these stages."""
        return self.coord in self.holders(stages)

    def is_first_holder(self, stages: Sequence[int]) -> bool:
        """Whether of the ranks with these stages this one has the first: it counts what they hold in common."""
        return self.placement[stages[0]] == self.coord

    def run(self, stage: int, carried: Carried | None, batch: Batch) -> Any:
        """What a stage gives. Raises ValueError for what cannot go on to the next."""
        start, stop = self.cut.bounds[stage]
        try:
            with naming_transforms():
                given = self.sections.run(start, stop, carried, batch)
        except (AttributeError, TypeError) as error:
            given_names = ["the inputs" if batch.args else "", *batch.kwargs]
            error.add_note(
                f"model: forward gets {', '.join(filter(None, given_names))}; labels go to the loss alone; "
                f"legal: a default for each other argument; with targets=None, criterion='model' gives it the labels"
            )
            raise
        except IndexError as error:
            if batch.inputs.numel() and not batch.inputs.is_floating_point():
                low, high = batch.inputs.aminmax()
                error.add_note(
                    f"batch: the ids go from {low} to {high}, and {tuple(batch.inputs.shape)} is their shape; "
                    f"legal: ids below the rows of the embedding, and positions below those of its table"
                )
            raise
        if stage < self.last:
            flat(given, f"stage {stage}, by its last unit {self.sections.parts[stop - 1].name!r},")
        return given


def one_stage(model: nn.Module) -> Stages:
    """All of a model on this rank: what runs without a pipeline."""
    names = {name: (0,) for name, _ in model.named_parameters()}
    whole = Unit("model", 1.0, 1.0, 1.0)
    return Stages(WholeSections(model), Partition((whole,), ((0, 1),)), {0: 0}, 0, names, (True,))


def lay_out(
    model: nn.Module, facts: ModelFacts | None, pipeline: PipelineConfig, coord: int,
    measure: Callable[[Sections, Sequence[Unit]], Sequence[Unit]] | None = None, sections: Sections | None = None,
) -> Stages:  # fmt: skip
    """Assign a full model to the stages of a pipeline; nothing is changed yet.

    `coord`: this rank's on its axis. `sections`: its units, found before its layers were replaced. `measure` gives
    units the costs by which they are balanced, in the place of a formula's. Cuts are compared in a step of four
    micro-batches a rank, if the config does not say. Raises ValueError for a model without units, with fewer units than
    stages, or with a parameter under none of them.
    """
    sections = sections or sections_of(model)
    units = costs_of(sections, model, facts)
    if measure is not None:
        units = tuple(measure(sections, units))
    cut, placement = _fastest(units, pipeline)
    stages_of: dict[str, set[int]] = {}
    for stage, (start, stop) in enumerate(cut.bounds):
        for part in sections.parts[start:stop]:
            for name in (*part.modules, *part.parameters):
                stages_of.setdefault(name, set()).add(stage)
    first = {id(p): name for name, p in model.named_parameters()}
    homes: dict[str, set[int]] = {name: set() for name in first.values()}
    lost = []
    for name, tensor in model.state_dict(keep_vars=True).items():
        stages = next((stages_of[a] for a in ancestors(name) if a in stages_of), set())
        if id(tensor) in first:
            homes[first[id(tensor)]] |= stages
        elif not stages and isinstance(sections, TracedSections):  # a buffer that every stage keeps
            homes[name] = set(range(len(cut.bounds)))
        lost += [] if stages or homes.get(name) else [name]
    lost += [name for name in modules_of(model) if not any(a in stages_of for a in ancestors(name))]
    if lost:
        raise ValueError(
            f"parallel.pipeline: {first_few(lost)} of {type(model).__name__} is under none of its units; each "
            f"parameter, buffer and auxiliary loss must be"
        )
    _check_shared(model, stages_of)
    trains = {name for name, p in model.named_parameters() if p.requires_grad}
    trainable = tuple(any(stage in homes[n] for n in trains) for stage in range(len(cut.bounds)))
    used = {name: tuple(sorted(stages)) for name, stages in homes.items()}
    return Stages(sections, cut, dict(placement), coord, used, trainable)


def _fastest(units: Sequence[Unit], pipeline: PipelineConfig) -> tuple[Partition, Mapping[int, int]]:
    """The cut into stages, and the rank of each of them: of the legal placements of a schedule's stages, the one with
    the shortest step by the costs of its cut."""
    step = StepShape(pipeline.micro_batches or 4 * pipeline.size)
    how = "balanced" if pipeline.partition == "profiled" else pipeline.partition

    def cut_by(plan: Plan) -> Partition:
        reading = cache(lambda: Reading(plan))
        return partition(
            units, pipeline.stages, how, placement=plan.placement(),
            makespan=lambda costs: simulate(reading(), costs).makespan_s,
        )  # fmt: skip

    def makespan(cut: Partition, plan: Plan) -> float:
        costs = cut.stage_costs()
        return simulate(
            compute_plan(pipeline, replace(step, costs=costs, placement=ranks_of(plan))), costs
        ).makespan_s

    ways = [(cut_by(plan), plan) for plan in plans_by_placement(pipeline, step)]
    cut, plan = ways[0] if len(ways) == 1 else min(ways, key=lambda way: makespan(*way))
    return cut, plan.placement()


def check_hooks(model: nn.Module) -> None:
    """Raises ValueError for hooks on what stages pass over: on the model itself, which no rank runs as a whole. Also on
    blocks of ours, which may be cut between their halves."""
    blocks = model.blocks if isinstance(model, GPT) else ()
    for module in (model, *blocks):
        if has_hooks(module):
            name = next(name for name, each in model.named_modules() if each is module) or "the model itself"
            raise ValueError(
                f"parallel.pipeline: a forward or backward hook on {name} ({type(module).__name__}) is not run, or "
                f"on a part of its work. Legal: hooks on modules within its units, such as a block's norm or linears"
            )


def _check_shared(model: nn.Module, stages_of: Mapping[str, set[int]]) -> None:
    """Raises ValueError for a module that keeps count of its own calls and is called on several stages."""
    places: dict[int, dict[int, str]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        counts = isinstance(module, Dropout) and module.p > 0
        if counts or is_over_the_batch(module):
            for stage in next((stages_of[a] for a in ancestors(name) if a in stages_of), set()):
                places.setdefault(id(module), {}).setdefault(stage, name)
    for found in places.values():
        if len(found) > 1:
            raise ValueError(
                f"parallel.pipeline: {' and '.join(found.values())} are one module on stages "
                f"{', '.join(map(str, found))}, and keep count of their calls, which no stage can for another. Legal: "
                f"a module for each place, or a partition that has them on one stage"
            )


def drop_other_stages(model: nn.Module, stages: Stages, like: Tensor) -> None:
    """Remove the modules of other ranks from `model`, in place; names do not change. `like`: of the dtype and device
    that weights have in forward."""
    parts = {
        is_here: [
            (stage, part)
            for stage, (start, stop) in enumerate(stages.cut.bounds)
            if (stages.placement[stage] == stages.coord) is is_here
            for part in stages.sections.parts[start:stop]
        ]
        for is_here in (True, False)
    }
    traced = stages.sections if isinstance(stages.sections, TracedSections) else None
    progress, changing = (traced.progress, traced.changing) if traced else (Progress(), frozenset[str]())
    kept = {name for _, part in parts[True] for name in (*part.modules, *part.parameters)}
    for stage, part in parts[False]:
        where = f"is on stage {stage}, on another rank"
        for name in {*part.modules} - kept:
            parent, child = _place(model, name)
            setattr(parent, child, OtherStageModule(name, where, model.get_submodule(name), changing))
        for name in {*part.parameters} - kept:
            parent, child = _place(model, name)
            if (own := parent._parameters.pop(child, None)) is not None:
                setattr(parent, child, OtherStageParameter.of(own, name, progress, like))


def _place(model: nn.Module, name: str) -> tuple[nn.Module, str]:
    parent, _, child = name.rpartition(".")
    return model.get_submodule(parent), child
