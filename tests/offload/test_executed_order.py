"""What a step does to each chunk is what its lists say, in their order, and in their bytes on each tier."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from functools import wraps
from itertools import groupby
from random import Random
from typing import Any
from unittest.mock import patch

import pytest

from colossal_lite.engine.engine import Engine
from colossal_lite.memory.chunk import Chunk
from colossal_lite.memory.weight_chunk import WeightChunk
from colossal_lite.offload.optimizer_states import OffloadedOptimizerStates
from colossal_lite.pipeline.stages import Stages
from colossal_lite.schedule.optimizer_updates import ChunkPart, part_of
from colossal_lite.schedule.plan import DISK, Action, ActionKind
from colossal_lite.zero.optimizer import ChunkOptimizer
from colossal_lite.zero.sharded_weights import ParameterGather
from tests.shared.parity import Case, start
from tests.shared.pool import RankEnv, run_world
from tests.zero.test_memory_budget import DEEP, config_of, memory_of

Event = tuple[str, int]
"""What was done, by `ActionKind` or of a record, and to which chunk or stage."""
STEPS = 4
PIPELINES: dict[str, dict[str, Any] | None] = {
    "none": None,
    "stages on one device": dict(size=1, schedule="bfs", stages_per_rank=2, micro_batches=2),
    "1f1b": dict(size=2, schedule="1f1b", micro_batches=2),
    "interleaved": dict(size=2, schedule="interleaved", stages_per_rank=2, micro_batches=2),
    "bfs": dict(size=2, schedule="bfs", stages_per_rank=2, micro_batches=2),
    "zb-v": dict(size=2, schedule="zb-v", stages_per_rank=2, micro_batches=2),
}
PLACEMENTS = ["device", "host", "disk", "static", "all away", "auto, some"]
PLACEMENTS += [f"{name}, updated there" for name in PLACEMENTS[1:]]


def seen_by(events: list[Event]) -> Iterator[tuple[type, str, Callable[..., Any]]]:
    """What to put in the place of each function that does something to a chunk or a stage."""

    def noted(owner: type, name: str, kind: str, subject: Callable[..., int]) -> tuple[type, str, Any]:
        original = getattr(owner, name)

        @wraps(original)
        def noting(self: Any, *args: Any, **options: Any) -> Any:
            events.append((kind, subject(self, *args)))
            return original(self, *args, **options)

        return owner, name, noting

    def of_chunk(chunk: WeightChunk, *_: Any) -> int:
        return chunk.spec.id

    def given(_: Any, subject: Any, *__: Any) -> int:
        return subject.spec.id if isinstance(subject, Chunk) else subject

    yield noted(Stages, "run", "F", given)
    for name, kind in (("unshard", "UNSHARD"), ("unshard_near", "UNSHARD"), ("gather_fetched", "UNSHARD"),
                       ("fetch", "FETCH"), ("reshard", "RESHARD")):  # fmt: skip
        yield noted(WeightChunk, name, kind, of_chunk)
    yield noted(Chunk, "start_reduce", "REDUCE", of_chunk)
    yield noted(ChunkOptimizer, "update", "UPDATE", given)
    for name in ("fetch", "evict"):
        yield noted(OffloadedOptimizerStates, name, f"record {name}", given)


def listed(engine: Engine) -> list[Action]:
    """The step's list of this rank, its gathers in their places, without its updates."""
    plan = engine._runtime.plan
    assert plan is not None
    actions = [a for a in plan[engine._runtime.comm.coord] if a.kind is not ActionKind.UPDATE]
    weights = engine._weights
    if not isinstance(weights, ParameterGather):
        return actions
    assert weights.plan is not None
    gathers = [a for a in weights.plan.actions if a.kind is not ActionKind.REDUCE]
    return [b for a in actions for b in (gathers if a.kind is ActionKind.B else [a])]


def by_chunk(events: Iterable[Event], kinds: tuple[str, ...]) -> dict[int, list[str]]:
    """The history of each chunk; what is asked for twice is done once."""
    found: defaultdict[int, list[str]] = defaultdict(list)
    for kind, subject in events:
        if kind in kinds:
            found[subject].append(kind)
    return {chunk: [kind for kind, _ in groupby(history)] for chunk, history in found.items()}


GATHERS = ("FETCH", "UNSHARD", "RESHARD")
RECORDS = ("record fetch", "UPDATE", "record evict")


def events_of(engine: Engine) -> tuple[list[Event], list[Event]]:
    """What the lists say: of a step until its norm, and of its updates."""
    step = [
        (a.kind.value, a.stage if a.kind is ActionKind.F else a.chunk)
        for a in listed(engine)
        if a.kind in (ActionKind.F, ActionKind.REDUCE, *map(ActionKind, GATHERS))
    ]
    optimizer = engine._optimizer
    assert isinstance(optimizer, ChunkOptimizer)
    ids, updates = [chunk.spec.id for chunk in engine._chunks], list[Event]()
    names = {ActionKind.FETCH: "record fetch", ActionKind.EVICT: "record evict", ActionKind.UPDATE: "UPDATE"}
    for action in optimizer.plan[0]:
        part, index = part_of(action.chunk or 0, len(ids))
        if part is ChunkPart.RECORD and action.resource != DISK:
            updates.append((names[action.kind], ids[index] if action.kind is ActionKind.UPDATE else index))
    return [(kind, subject or 0) for kind, subject in step], updates


def unlike(env: RankEnv, case: Case, placement: str, directory: str) -> list[str]:
    """What a run does otherwise than its lists say."""
    memory = memory_of(env, case, placement, directory)
    events: list[Event] = []
    with ExitStack() as watched:
        for owner, name, noting in seen_by(events):
            watched.enter_context(patch.object(owner, name, noting))
        full = replace(case, config=dict(case.config) | dict(memory=memory)).full_config
        with env.launch(full) as context:
            engine = start(case, context)
            cut = context.local_batch(case.global_batch)
            for number in range(STEPS):
                if number == STEPS - 1:
                    engine._weights.flush()
                    events.clear()
                engine.train_step(tuple(part[cut] for part in case.batch(number)))
            engine._weights.flush()
            engine._state.rest()
            rows = engine.memory_report()
            step, updates = events_of(engine)
    faults = [f"{row}" for row in rows if not row.now_bytes == row.peak_bytes == row.forecast_bytes]
    return faults + list(_differences(events, step, updates, is_staged=bool(case.pipeline != 1)))


def _differences(
    events: list[Event], step: list[Event], updates: list[Event], *, is_staged: bool
) -> Iterator[str]:
    """Compared: forwards, sums and updates by order, gathers and moves of records by chunk. In a pipeline all until the
    norm has one order."""
    last = max((i for i, (kind, _) in enumerate(events) if kind in ("F", "REDUCE")), default=0)
    done, later = events[: last + 1], events
    if is_staged:
        kinds = ("F", "REDUCE", *GATHERS)
        ours = [event for event in done if event[0] in kinds]
        if ours != step[: len(ours)] or any(kind not in ("RESHARD",) for kind, _ in step[len(ours) :]):
            at = next((i for i, (a, b) in enumerate(zip(ours, step, strict=False)) if a != b), len(step))
            yield f"step, from {at}: {ours[max(0, at - 6) :]} for {step[max(0, at - 6) :]}"
    else:
        for kind in ("F", "REDUCE"):
            if kind == "F" and not any(k == "F" for k, _ in step):
                continue  # its place is taken by the gathers of the blocks
            ours, theirs = ([s for k, s in some if k == kind] for some in (done, step))
            if ours != theirs and (kind == "F" or sorted(ours) != sorted(theirs)):
                yield f"{kind}: {ours} for {theirs}"
        ours_of, theirs_of = (by_chunk(some, GATHERS) for some in (done, step))
        for chunk, history in ours_of.items():
            if history != (told := theirs_of.get(chunk, []))[: len(history)]:
                yield f"gathers of chunk {chunk}: {history} for {told}"
    ours, theirs = ([s for k, s in some if k == "UPDATE"] for some in (later, updates))
    if ours != theirs:
        yield f"updates: {ours} for {theirs}"
    moved = [(k, s) for k, s in later if k.startswith("record")]
    ours_of, theirs_of = (by_chunk(some, ("record fetch", "record evict")) for some in (moved, updates))
    if {c: h for c, h in ours_of.items() if c in theirs_of} != theirs_of:
        yield f"records: {ours_of} for {theirs_of}"


def drawn(seed: int) -> tuple[Case, str]:
    """A lawful configuration and its placement."""
    random = Random(seed)
    name = random.choice(list(PIPELINES))
    pipeline = PIPELINES[name]
    is_cut = pipeline is not None and pipeline["size"] == 2
    ranks = 2 if is_cut else random.choice([1, 2])
    # A budget between two extents is another one on each stage, and must be the same on every rank.
    placement = random.choice([name for name in PLACEMENTS if not (is_cut and name.startswith("auto"))])
    parts = random.choice([1, 2])
    config = config_of(
        random.choice([0, 1, 2, 3]), precision=random.choice(["fp32", "bf16"]), prefetch=random.choice([0, 1, 2]),
        accumulation=parts, clip=random.choice([True, False]), sum_order=random.choice(["fast", "ordered"]),
    )  # fmt: skip
    case = replace(
        DEEP, layers=4, world_size=ranks, config=config, steps=STEPS, global_batch=8 * parts,
        pipeline=1 if pipeline is None else pipeline,
    )  # fmt: skip
    return case, placement


def assert_as_listed(seed: int, directory: str) -> None:
    case, placement = drawn(seed)
    for faults in run_world(unlike, case.world_size, case, placement, directory):
        assert not faults, (case.pipeline, case.config, placement, faults)


@pytest.mark.parametrize("seed", range(4))
def test_a_drawn_step_does_what_its_lists_say(seed: int, tmp_path: Any) -> None:
    assert_as_listed(seed, str(tmp_path))


@pytest.mark.campaign
@pytest.mark.parametrize("seed", range(4, 204))
def test_each_of_200_drawn_steps_does_what_its_lists_say(seed: int, tmp_path: Any) -> None:
    assert_as_listed(seed, str(tmp_path))
