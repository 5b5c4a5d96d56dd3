"""Writes the whole step of a rank in brief: the passes by name, its list, its gathers, and its updates."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from textwrap import fill

from colossal_lite.config.config import Config
from colossal_lite.distributed.mesh import Mesh
from colossal_lite.pipeline.step_plan import StepShape, passes
from colossal_lite.schedule.gather_plan import GatherPlan, GatherStep
from colossal_lite.schedule.optimizer_updates import ChunkPart, part_of
from colossal_lite.schedule.plan import Action, ActionKind, Plan
from colossal_lite.schedule.plan_brief import Word, brief

MARKS = {ChunkPart.RECORD: "", ChunkPart.GRADIENT: ".gradient", ChunkPart.WEIGHTS: ".weights"}
WIDTH = 100


def step_list(
    config: Config, mesh: Mesh, shape: StepShape, actions: Sequence[Action], chunks: Sequence[int], updates: Plan,
    gathers: GatherPlan | None = None,
) -> str:  # fmt: skip
    """`actions`: this rank's list; `chunks`: the numbers of its chunks; `updates`: their list; `gathers`: those of a
    micro-batch without stages."""
    pipeline = config.parallel.pipeline
    named = [pipeline.schedule if pipeline.is_staged else "one stage", *passes(pipeline, shape)]
    (moves,) = updates
    if len(moves) > len(chunks):
        named.append(f"state in its tiers: {config.memory.placement}")
    like = mesh.world_size // pipeline.size
    lists = f"{pipeline.size} lists in a step" if pipeline.size > 1 else "one list in a step"
    rows = [f"{lists}, each of {like} ranks; of rank {mesh.rank}: {'; '.join(named)}"]
    rows.append(
        brief([Word(a) for a in actions if a.kind is not ActionKind.UPDATE or shape.update == "backward"])
    )
    if gathers is not None and gathers.actions:
        rows.append("within a micro-batch, stages being blocks: " + brief([*map(Word, _by_block(gathers))]))
    when = "with the last gradients" if shape.update == "backward" else "from the norm to the next forward"
    if moves:
        rows.append(f"{when}: {brief([_word(action, chunks) for action in moves])}")
    return "\n".join(fill(row, WIDTH, subsequent_indent="  ", break_on_hyphens=False) for row in rows)


def _by_block(gathers: GatherPlan) -> Iterator[Action]:
    """A micro-batch of a rank without stages: its moments in the place of stages."""
    last = len(gathers.forward) - 1
    for kind, moments in ((ActionKind.F, gathers.forward), (ActionKind.B, gathers.backward)):
        for number, moment in enumerate(moments):
            yield from _bare(moment)
            yield Action(kind, stage=number if kind is ActionKind.F else last - number, micro_batch=0)


def _bare(moment: GatherStep) -> Iterator[Action]:
    return (replace(action, stage=None) for action in moment.actions)


def _word(action: Action, chunks: Sequence[int]) -> Word:
    """An action of the updates, by the number of its chunk in the whole model."""
    part, index = part_of(action.chunk or 0, len(chunks))
    return Word(replace(action, stage=None, chunk=chunks[index]), MARKS[part])
