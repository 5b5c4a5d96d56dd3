"""Numbers the actions of a plan, and records their needs and their faults.

Nodes are actions, counted rank after rank.  The checker and the walk over each rank's list write to these tables.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from itertools import accumulate

from colossal_lite.schedule.plan import COMPUTE_KINDS, Action, ActionKind, Plan, Shape


class PlanNodes:
    """places[node]: rank, and position in its list. firsts: the first node of each rank. needs[node]: nodes whose work
    must be done before it starts, beside the order of its lane. where: the node of each kind of work on each
    micro-batch. due: what each stage of a task must run after F. kinds: those of each task that there are. problems:
    what is wrong, with places.
    """

    def __init__(self, plan: Plan, shapes: Mapping[int, Shape] | None = None) -> None:
        self.plan = plan
        self.places = [(rank, i) for rank, actions in enumerate(plan) for i in range(len(actions))]
        self.actions = [action for actions in plan for action in actions]
        self.firsts = [0, *accumulate(map(len, plan))]
        self.needs: list[list[int]] = [[] for _ in self.actions]
        self.problems: list[tuple[str, tuple[tuple[int, int], ...]]] = []
        tasks = sorted({action.task for action in self.actions})
        self.shapes = shapes if shapes is not None else {task: Shape.of(plan, task) for task in tasks}
        self.due = {t: tuple(map(s.backward_kinds, range(s.stages))) for t, s in self.shapes.items()}
        self.kinds = {(action.kind, action.task) for action in self.actions}
        self.where: dict[tuple[Hashable, ...], int] = {}

    def frees(self, action: Action) -> bool:
        """Whether this is the last use of a micro-batch's activations in its stage."""
        if action.kind not in COMPUTE_KINDS or action.stage is None:
            return False
        due = self.due[action.task][action.stage]
        return bool(due) and action.kind in (due[-1], ActionKind.B)

    def fault(self, text: str, *nodes: int) -> None:
        """Record a fault at these nodes."""
        named = ", ".join(f"rank {self.places[n][0]} {self.actions[n]}" for n in nodes)
        self.problems.append((f"{named}: {text}" if named else text, tuple(self.places[n] for n in nodes)))


def work_of(action: Action) -> tuple[int, int, int, int]:
    """Task, stage, micro-batch and slice of a compute action or a message."""
    assert action.stage is not None and action.micro_batch is not None
    return action.task, action.stage, action.micro_batch, action.slice or 0
