"""Merges the lists of several tasks on one device, breadth-first over tasks: each stage is loaded once for all.

Note: turns.  A list of gathered stages falls into *turns*: what it does from one group of FETCHes and UNSHARDs to the
next.  The RESHARDs before such a group end the turn before.  Tasks over one base have turns alike, but for their own
chunks.  They take turn 0 one after the other, then turn 1, and so on.  A shared chunk is fetched in the turn of the
first task and dropped in that of the last, and the others find it there.  So its copies cross the link once a visit for
all tasks.  At each moment no more shared chunks are on the device than in the list of one task.
Cost: the boundaries of all tasks wait on the device, or where each task rests them.
Source: breadth-first over micro-batches, arXiv 2211.05953, section 4.2, here over tasks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from colossal_lite.schedule.plan import Action, ActionKind, Memory, Plan

COMES = frozenset({ActionKind.FETCH, ActionKind.UNSHARD})
GATHERS = COMES | {ActionKind.RESHARD}


def begins(actions: Sequence[Action]) -> Iterator[bool]:
    """For each FETCH, UNSHARD and RESHARD of a list, whether it begins a turn."""
    before: Action | None = None
    for action in actions:
        if action.kind in GATHERS:
            yield action.kind in COMES and (before is None or before.kind not in COMES)
        before = action


def turns(actions: Sequence[Action]) -> tuple[tuple[Action, ...], ...]:
    """The turns of a list; what comes before the first group is in the first."""
    flags, found = begins(actions), list[list[Action]]([[]])
    for action in actions:
        if action.kind in GATHERS and next(flags) and any(a.kind in COMES for a in found[-1]):
            found.append([])
        found[-1].append(action)
    return tuple(map(tuple, found))


def abreast(lists: Sequence[Sequence[Action]], shared: Sequence[Mapping[int, int]]) -> Plan:
    """The list of one device that runs these lists by turns; `shared`: for each list the numbers, alike in all, of its
    chunks that all share. They are chunks of task 0 there. Raises ValueError for lists whose turns gather other shared
    chunks."""
    cut = [turns(actions) for actions in lists]
    of_all = [[_gathers(turn, numbers) for turn in one] for one, numbers in zip(cut, shared, strict=True)]
    for task, one in enumerate(of_all):
        if one != of_all[0]:
            raise ValueError(
                f"abreast: task {task} does not gather the shared chunks of task 0, turn by turn; legal: tasks with "
                f"one base, equal stages and equal micro-batches"
            )
    last = len(lists) - 1
    merged = [
        named
        for round_of_turns in zip(*cut, strict=True)
        for task, turn in enumerate(round_of_turns)
        for action in turn
        if (named := _named(action, task, last, shared[task])) is not None
    ]
    return Plan((tuple(merged),))


def memory_of(
    uses: Sequence[Mapping[int, Sequence[int]]], shared: Sequence[Mapping[int, int]],
    sizes_bytes: Sequence[Mapping[int, int]] = (),
) -> Memory:  # fmt: skip
    """What the stages of such a plan read, for the checker: of each task the chunks of each stage, by its own numbers,
    and their bytes."""

    def name(task: int, chunk: int) -> tuple[int, int]:
        return (0, shared[task][chunk]) if chunk in shared[task] else (task, _own(chunk, shared[task]))

    every = {
        (task, stage): tuple(name(task, chunk) for chunk in chunks)
        for task, of in enumerate(uses)
        for stage, chunks in of.items()
    }
    sizes = {name(t, chunk): size for t, of in enumerate(sizes_bytes) for chunk, size in of.items()}
    gathered = frozenset(chunk for chunks in every.values() for chunk in chunks)
    return Memory({}, every, sizes, sharded=gathered, offloaded=frozenset((0, chunk) for chunk in gathered))


def _gathers(turn: Sequence[Action], numbers: Mapping[int, int]) -> list[tuple[ActionKind, int]]:
    gathers = [(a.kind, a.chunk) for a in turn if a.kind in GATHERS and a.chunk is not None]
    return [(kind, numbers[chunk]) for kind, chunk in gathers if chunk in numbers]


def _own(chunk: int, numbers: Mapping[int, int]) -> int:
    """The number of a chunk of its own: behind those that all share."""
    return chunk + 1 + max(numbers.values(), default=-1)


def _named(action: Action, task: int, last: int, numbers: Mapping[int, int]) -> Action | None:
    """An action in the merged list; None: of a shared chunk, which another task fetches or drops."""
    if action.chunk is None:
        return replace(action, task=task)
    if action.chunk not in numbers:
        return replace(action, task=task, chunk=_own(action.chunk, numbers))
    if task != (last if action.kind is ActionKind.RESHARD else 0):
        return None
    return replace(action, task=0, chunk=numbers[action.chunk])
