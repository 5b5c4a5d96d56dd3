"""Checks that a step uses its buffers to the last byte, at every stage and placement, and fails if it does not."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from colossal_lite.engine.engine import Engine
from colossal_lite.engine.memory_report import MemoryRow
from colossal_lite.memory.arena import ArenaAllocator
from colossal_lite.memory.chunk import Chunk
from colossal_lite.offload import pieces, state_storage
from colossal_lite.offload import placement as budget
from colossal_lite.schedule.interval_packing import LiveInterval, LiveRange
from colossal_lite.schedule.step_moments import SharedInterval
from colossal_lite.schedule.update_mix import UpdateMix
from colossal_lite.zero import build_chunks as build
from colossal_lite.zero.build_chunks import slots_of
from colossal_lite.zero.optimizer import ChunkOptimizer
from colossal_lite.zero.sharded_weights import ParameterGather
from tests.shared.covering import covering_array, name_of
from tests.shared.held_at_once import HeldAtOnce, held_at_once, most_held_bytes, planned_at_once
from tests.shared.parity import Case, start
from tests.shared.pool import RankEnv, run_world
from tests.zero.test_memory_budget import DEEP, config_of, memory_of

PLACEMENTS = [
    *("device", "host", "disk", "static", "all away", "auto, least", "auto, some"),
    *("host, updated there", "disk, updated there", "static, updated there", "auto, some, updated there"),
    *("auto, three tiers", "auto, three tiers, updated there"),
]
ROWS = covering_array(
    dict(
        ranks=[1, 2],
        stage=[0, 1, 2, 3],
        placement=PLACEMENTS,
        chunks=["many", "two", "one"],
        prefetch=[0, 1, 2],
        accumulation=[1, 2],
        sum_order=["fast", "ordered"],
        reshard=[True, False],
        backend=["auto", "gloo"],
    ),
    lambda row: row["stage"] == 3 or (row["prefetch"] == 1 and row["reshard"]),
)
CHUNKS = dict(many=DEEP.chunk_bytes, two=80_000, one=None)


SMALL_BYTES = 2048
"""Of numbers by the block of a norm, by the entry, by the rank: not by the chunk."""
OURS = Path(budget.__file__).parents[1]


class Made(TorchDispatchMode):
    """Notes larger storages that the framework's own code for memory makes, by the line that did."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {x.untyped_storage()._cdata for x in tree_iter((args, kwargs)) if isinstance(x, Tensor)}
        out = func(*args, **(kwargs or {}))
        for x in tree_iter(out):
            if isinstance(x, Tensor) and not x.is_meta and x.untyped_storage()._cdata not in given:
                if x.untyped_storage().nbytes() > SMALL_BYTES:
                    where = _our_line()
                    self.lines |= {where} if where.startswith(("zero/", "memory/")) else set()
        return out


def _our_line() -> str:
    """Where the innermost function of the product is that has been called."""
    frame = inspect.currentframe()
    while frame is not None and not (path := Path(frame.f_code.co_filename)).is_relative_to(OURS):
        frame = frame.f_back
    return "" if frame is None else f"{path.relative_to(OURS)}:{frame.f_lineno} {frame.f_code.co_qualname}"


@dataclass(frozen=True)
class Found:
    """Of a run: the report's rows; and of each kind of slots, and of the arena that kinds share, what was taken at
    once, and planned to be."""

    rows: tuple[MemoryRow, ...]
    held: tuple[tuple[int, int], ...]
    made: tuple[str, ...]
    """Lines that made storages in the last step."""

    @property
    def unequal(self) -> list[object]:
        """What was used otherwise than planned."""
        rows = [row for row in self.rows if not row.now_bytes == row.peak_bytes == row.forecast_bytes]
        return [*rows, *(pair for pair in self.held if pair[0] != pair[1])]


def time_shared(chunks: Sequence[Chunk]) -> tuple[ArenaAllocator, ...]:
    """The places of what rests so."""
    found = [
        p for c in chunks for p in (c._weight_turns, c._gradient_turns, c._last_sums and c._last_sums[0]) if p
    ]
    return tuple(dict.fromkeys(found))


def held_of(engine: Engine, held_bytes: HeldAtOnce) -> list[tuple[int, int]]:
    """Of each kind of slots, and of the arena that kinds share: most bytes at once, measured and planned."""
    optimizer, weights = engine._optimizer, engine._weights
    assert isinstance(optimizer, ChunkOptimizer)
    tiers, shards = optimizer.tiers, optimizer.shards
    places_of_copies = [
        *([tiers.staging_places] if tiers else ()),
        *(shards.staging_places if shards else ()),
    ]
    kinds = (*slots_of(engine._chunks), *places_of_copies, *time_shared(engine._chunks))
    held = [(held_bytes[places], planned_at_once(places)) for places in kinds]
    if (arena := optimizer.arena) is not None:
        held.append((held_bytes[arena], most_held_bytes(arena.plan)))
    if isinstance(weights, ParameterGather):
        assert weights.plan is not None
        held.append((held_bytes[weights], weights.plan.live_numel))
    return held


def used(env: RankEnv, case: Case, placement: str, directory: str, faults: tuple[str, ...] = ()) -> Found:
    """After three steps."""
    with ExitStack() as planted:
        for fault in faults:
            target, name, value = FAULTS[fault][0]()
            planted.enter_context(patch.object(target, name, value))
        held = planted.enter_context(held_at_once())
        memory = memory_of(env, case, placement, directory)
        with env.launch(replace(case, config=dict(case.config) | dict(memory=memory)).full_config) as context:
            engine = start(case, context)
            cut = context.local_batch(case.global_batch)
            mode = Made()
            for number in range(3):
                batch = tuple(part[cut] for part in case.batch(number))
                with mode if number == 2 else nullcontext():
                    engine.train_step(batch)
            engine._state.rest()
            return Found(engine.memory_report(), tuple(held_of(engine, held)), tuple(sorted(mode.lines)))


@pytest.mark.parametrize("row", ROWS, ids=name_of)
def test_every_slot_that_is_planned_is_used_no_longer_than_planned_and_a_step_allocates_nothing(
    row: dict[str, Any], tmp_path: Path
) -> None:
    """But for one chunk's masters at a time, a copy that shows whether an update has changed them; it counts as
    temporaries."""
    row = dict(row)
    ranks, placement, chunks = row.pop("ranks"), row.pop("placement"), row.pop("chunks")
    case = replace(DEEP, world_size=ranks, chunk_bytes=CHUNKS[chunks], config=config_of(**row))
    for found in run_world(used, ranks, case, placement, str(tmp_path)):
        assert not found.unequal, found.unequal
        assert not [line for line in found.made if "_copies" not in line], found.made


TIME_SHARED = covering_array(
    dict(
        ranks=[1, 2],
        placement=["static", "auto, least", "auto, some", "auto, three tiers"],
        chunks=["many", "two"],
        prefetch=[0, 1, 2],
        accumulation=[1, 2, 3],
        sum_order=["fast", "ordered"],
        reshard=[True, False],
        backend=["auto", "gloo"],
    )
)


@pytest.mark.parametrize("row", TIME_SHARED, ids=name_of)
def test_so_it_is_where_weights_and_gradients_rest_by_turns(row: dict[str, Any], tmp_path: Path) -> None:
    """As they do where masters are apart."""
    row = dict(row)
    ranks, placement, chunks = row.pop("ranks"), row.pop("placement"), row.pop("chunks")
    config = config_of(3, precision="bf16", **row)
    case = replace(DEEP, world_size=ranks, chunk_bytes=CHUNKS[chunks], config=config)
    for found in run_world(used, ranks, case, placement, str(tmp_path)):
        assert not found.unequal, found.unequal
        assert not [line for line in found.made if "_copies" not in line], found.made


IN_BACKWARD = covering_array(
    dict(
        ranks=[1, 2],
        stage=[0, 1, 2, 3],
        placement=["device", "host", "disk"],
        chunks=["many", "one"],
        precision=["fp32", dict(dtype="bf16", master="split", gradient="bf16")],
        sum_order=["fast", "ordered"],
        backend=["auto", "gloo"],
    )
)


@pytest.mark.parametrize("row", IN_BACKWARD, ids=name_of)
def test_so_it_is_where_updates_are_made_in_backward(row: dict[str, Any], tmp_path: Path) -> None:
    row = dict(row)
    ranks, placement, chunks = row.pop("ranks"), row.pop("placement"), row.pop("chunks")
    config = config_of(**row)
    config |= dict(optimizer=config["optimizer"] | dict(update_when="backward"))
    case = replace(DEEP, world_size=ranks, chunk_bytes=CHUNKS[chunks], config=config)
    for found in run_world(used, ranks, case, placement, str(tmp_path)):
        assert not found.unequal, found.unequal
        assert not [line for line in found.made if "_copies" not in line], found.made


# ---- planted faults ----


def _longer(module: Any, name: str) -> Callable[[], tuple[Any, str, Any]]:
    """The intervals of `module.name`, each a moment longer."""

    def planted() -> tuple[Any, str, Any]:
        original = getattr(module, name)

        def longer(*args: Any, **options: Any) -> tuple[LiveInterval, ...]:
            return tuple(replace(one, stop=one.stop + 1) for one in original(*args, **options))

        return module, name, longer

    return planted


def _wider(what: str) -> Callable[[], tuple[Any, str, Any]]:
    """Places of this kind for one more in a row, in the plan as in what is made by it."""

    def planted() -> tuple[Any, str, Any]:
        original = pieces.StagingBuffer.live_ranges

        def wider(self: pieces.StagingBuffer, *args: Any, **options: Any) -> tuple[LiveRange, ...]:
            return tuple(
                replace(stay, stop=stay.stop + (self.what == what))
                for stay in original(self, *args, **options)
            )

        return pieces.StagingBuffer, "live_ranges", wider

    return planted


def _rests_longer(what: SharedInterval) -> Callable[[], tuple[Any, str, Any]]:
    """Such time-shared tensors are allocated for nearly all of a step."""

    def planted() -> tuple[Any, str, Any]:
        original = budget.shared_interval

        def longer(kind: SharedInterval, *args: Any) -> LiveRange:
            stay = original(kind, *args)
            if kind is not what:
                return stay
            gap = range(stay.gap.stop - 1, stay.gap.stop)
            return replace(stay, gap=gap) if stay.gap else replace(stay, start=-2 * args[2])

        return budget, "shared_interval", longer

    return planted


def _wider_records() -> tuple[Any, str, Any]:
    return UpdateMix, "record_width", property(lambda mix: mix.ahead + 3)


FAULTS: dict[str, tuple[Callable[[], tuple[Any, str, Any]], int, str]] = {
    "weights that rest by turns stay": (_rests_longer(SharedInterval.WEIGHTS), 3, "static"),
    "gradients that rest by turns are there before they come": (
        _rests_longer(SharedInterval.GRADIENTS),
        3,
        "auto, some",
    ),
    "a slot more for records": (_wider_records, 1, "host"),
    "a slot more for records on disk": (
        lambda: (state_storage, "HOST_SLOTS", state_storage.HOST_SLOTS + 1),
        1,
        "disk",
    ),
    "a place more for weights": (_wider("weights"), 3, "all away"),
    "a place more for gradients that come": (_wider("gradients"), 3, "static"),
    "a place more for sums that go": (_wider("leaving"), 3, "static"),
    "gradients fill for longer": (_longer(build, "fill_intervals"), 3, "device"),
    "sums are on their way for longer": (_longer(build, "flight_intervals"), 3, "device"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_plan_that_asks_for_more_than_is_used_is_seen(fault: str, tmp_path: Path) -> None:
    _, stage, placement = FAULTS[fault]
    case = replace(DEEP, world_size=2, config=config_of(stage, precision="bf16", backend="gloo"))
    for found in run_world(used, 2, case, placement, str(tmp_path), (fault,)):
        assert found.unequal
