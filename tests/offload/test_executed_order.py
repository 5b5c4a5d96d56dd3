"""What a step does to each chunk is what its lists say, in their order, and in their bytes on each tier."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import wraps
from itertools import groupby
from random import Random
from typing import Any
from unittest.mock import patch

import pytest

from colossal_lite.config.config import Config, ConfigError
from colossal_lite.engine.engine import Engine
from colossal_lite.memory.chunk import Chunk
from colossal_lite.memory.weight_chunk import WeightChunk
from colossal_lite.offload.optimizer_states import OffloadedOptimizerStates
from colossal_lite.offload.placement import place, spill_to_disk
from colossal_lite.pipeline.stages import Stages
from colossal_lite.schedule.optimizer_updates import ChunkPart, part_of
from colossal_lite.schedule.plan import DISK, Action, ActionKind
from colossal_lite.zero.optimizer import ChunkOptimizer
from colossal_lite.zero.sharded_weights import ParameterGather
from tests.offload.test_high_water import held_of
from tests.shared.held_at_once import held_at_once
from tests.shared.parity import Case, start
from tests.shared.pool import RankEnv, run_world
from tests.zero.test_memory_budget import DEEP, config_of
from tests.zero.test_memory_budget import _free as free_placement

Event = tuple[str, int]
"""What was done, by `ActionKind` or of a record, and to which chunk or stage."""
STEPS = 3
PATIENCE_S = 200.0
SCHEDULES = {"1f1b": 1, "gpipe": 1, "interleaved": 2, "bfs": 2, "zb-h1": 1, "zb-v": 2}
"""With the stages on a rank of each."""


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
    for name, kind in (("unshard", "UNSHARD"), ("gather_fetched", "UNSHARD"),
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


def unlike(env: RankEnv, case: Case, memory: dict[str, Any]) -> list[str]:
    """What a run does otherwise than its lists say."""
    events: list[Event] = []
    with ExitStack() as watched:
        for owner, name, noting in seen_by(events):
            watched.enter_context(patch.object(owner, name, noting))
        held_bytes = watched.enter_context(held_at_once())
        full = replace(case, config=dict(case.config) | dict(memory=memory, timeout_s=PATIENCE_S)).full_config
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
            run, plan = engine._runtime, engine._runtime.plan
            assert plan is not None
            planned = [a for a in plan[run.comm.coord] if a.kind is not ActionKind.UPDATE]
            faults = (
                [] if [span.action for span in run.spans] == planned else ["the list is run in another order"]
            )
            held = [] if run.comm.size > 1 else held_of(engine, held_bytes)
    faults += [f"{row}" for row in rows if not row.now_bytes == row.peak_bytes == row.forecast_bytes]
    faults += [f"slots: {most} of {planned} planned" for most, planned in held if most != planned]
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
    # What backward has begun to fetch is asked for again behind the norm.
    moved = [e for i, e in enumerate(later) if e[0] != "record fetch" or e not in later[:i]]
    ours, theirs = ([e for e in some if e[0].startswith("record")] for some in (moved, updates))
    if ours != theirs:
        yield f"records: {ours} for {theirs}"


def asked_in_backward(env: RankEnv, case: Case, shares: dict[str, float]) -> list[str]:
    """Forwards, and what the link is asked for between them, of a step until its first update."""
    events: list[Event] = []
    memory = dict(placement="static", host_fraction=shares, update_on="device")
    full = replace(case, config=dict(case.config) | dict(memory=memory)).full_config
    with ExitStack() as watched:
        for owner, name, noting in seen_by(events):
            watched.enter_context(patch.object(owner, name, noting))
        with env.launch(full) as context:
            engine = start(case, context)
            for number in range(STEPS):
                engine._weights.flush()
                events.clear()
                engine.train_step(case.batch(number))
    kinds = [kind for kind, _ in events]
    return [kind for kind in kinds[: kinds.index("UPDATE")] if kind in ("F", "FETCH", "record fetch")]


@pytest.mark.parametrize("accumulation", [1, 2])
def test_the_first_records_are_asked_for_behind_the_last_weights_of_a_backward(accumulation: int) -> None:
    """They would delay weights that are needed sooner."""
    case = replace(DEEP, world_size=1, config=config_of(3, precision="bf16", accumulation=accumulation))
    (asked,) = run_world(asked_in_backward, 1, case, dict(weights=1.0, gradients=1.0, optimizer=1.0))
    parts = " ".join(asked).split("F ")[1:]
    assert len(parts) == accumulation
    # Behind them come the weights that the next forward begins with, or, behind the norm, the same records again.
    behind = "(FETCH ){2}" if accumulation == 2 else "record fetch record fetch"
    assert re.fullmatch("(FETCH ){8,}(record fetch ){2}" + behind, parts[0]), parts


@dataclass(frozen=True)
class Drawn:
    """A lawful configuration. `share` of a device budget between the least and the most that a run can use; None: no
    budget. `on_disk`: the host has a budget too, beside which records go to disk."""

    case: Case
    memory: dict[str, Any]
    share: float | None = None
    on_disk: bool = False


def drawn(seed: int) -> Drawn:
    random = Random(seed)
    while True:
        found = _draw(random)
        try:
            Config.load({**found.case.full_config, "memory": found.memory})
        except ConfigError:
            continue
        return found


def _draw(random: Random) -> Drawn:
    """Of the whole of what a step's list follows from; not every draw is lawful."""
    ranks = random.choice([1, 1, 1, 2, 2, 2, 2, 4])
    size = random.choice([1, 2] if ranks > 1 else [1])
    pipeline: Any = 1
    if size == 2 or random.random() < 0.4:
        name = random.choice(list(SCHEDULES)) if size == 2 else "bfs"
        stages = SCHEDULES[name] if size == 2 else random.choice([2, 4])
        pipeline = dict(
            size=size, schedule=name, stages_per_rank=stages, micro_batches=random.choice([1, 2, 3])
        )
    parts, within = random.choice([1, 1, 2, 3]), random.random() < 0.25
    config = config_of(
        random.choice([0, 1, 2, 3, 3]), precision=random.choice(["fp32", "bf16"]), prefetch=random.choice([0, 1, 2]),
        accumulation=parts, clip=not within and random.random() < 0.4, sum_order=random.choice(["fast", "ordered"]),
        reshard=random.random() < 0.7, activation_checkpoint=random.choice(["none", "none", "full", "selective"]),
    )  # fmt: skip
    data = ranks // size
    config["zero"] |= dict(shard_size=data // 2) if data > 1 and random.random() < 0.4 else {}
    config["optimizer"] = config["optimizer"] | (dict(update_when="backward") if within else {})
    case = replace(
        DEEP,
        layers=4,
        world_size=ranks,
        config=config,
        steps=STEPS,
        global_batch=12 * parts,
        pipeline=pipeline,
    )
    mixes: list[Any] = ["device", "host", dict(every=2), dict(every=3), dict(host=0.3), dict(host=0.7)]
    update = dict(update_on=random.choice(mixes))
    # Shares and budgets are refused beside updates within backward.
    alone, shared = ["device", "host", "disk"], ["static", "static", "auto", "auto", "three tiers"]
    placement = random.choice(alone if within else alone + shared)
    if placement == "device":
        return Drawn(case, dict(placement=placement))
    if placement in ("host", "disk"):
        return Drawn(case, dict(placement=placement) | update)
    if placement == "static":
        shares = {kind: random.choice([0.0, 0.3, 0.5, 1.0]) for kind in ("weights", "gradients", "optimizer")}
        return Drawn(case, dict(placement="static", host_fraction=shares) | update)
    memory = dict(placement="auto", device_budget=2**40) | update
    return Drawn(
        case, memory, share=random.choice([0.0, 0.2, 0.4, 0.7, 1.0]), on_disk=placement == "three tiers"
    )


def extent(env: RankEnv, drawn: Drawn) -> tuple[int, int, int]:
    """Of a run without a limit: the least and the most bytes on the device, and on the host with half of the records
    that need not be there on disk."""
    placed = free_placement(env, drawn.case, **{"update_on": drawn.memory["update_on"]})
    least, whole = (place(placed.pieces, dict(placed.fixed), at, placed.beside) for at in (1, 2**40))
    first = replace(placed, on_host=frozenset(piece.name for piece in placed.pieces if piece.moves))
    half = (spill_to_disk(least, 0).host_bytes + least.host_bytes) // 2
    return least.device_bytes, whole.device_bytes, max(spill_to_disk(first, 0).host_bytes, half)


def with_budgets(found: Drawn) -> Drawn:
    """The draw with its budgets in bytes, the same on all ranks."""
    if found.share is None:
        return found
    rows = run_world(extent, found.case.world_size, found, timeout_s=PATIENCE_S)
    least, whole, host = (max(row[i] for row in rows) for i in range(3))
    budgets = dict(device_budget=round(least + found.share * (whole - least)))
    budgets |= dict(host_budget=host) if found.on_disk else {}
    return replace(found, memory=found.memory | budgets)


def assert_as_listed(seed: int, directory: str) -> None:
    found = with_budgets(drawn(seed))
    on_disk = found.on_disk or found.memory["placement"] == "disk"
    memory = found.memory | (dict(disk_dir=directory) if on_disk else {})
    for faults in run_world(unlike, found.case.world_size, found.case, memory, timeout_s=PATIENCE_S):
        assert not faults, (found, faults)


@pytest.mark.parametrize(
    "seed", [*range(4), 41, 49]
)  # 41: a visit of one micro-batch; 49: a mix with weights at home
def test_a_drawn_step_does_what_its_lists_say(seed: int, tmp_path: Any) -> None:
    assert_as_listed(seed, str(tmp_path))


@pytest.mark.campaign
@pytest.mark.parametrize("seed", range(4, 204))
def test_each_of_200_drawn_steps_does_what_its_lists_say(seed: int, tmp_path: Any) -> None:
    assert_as_listed(seed, str(tmp_path))
