"""Checks the table of what waits for copies whose places in an arena are in the same bytes."""

from __future__ import annotations

import pytest

from colossal_lite.offload.arena_waits import early_records, waits_of
from colossal_lite.offload.pieces import LEAVING, VISITING, StateKind
from colossal_lite.schedule.interval_packing import ArenaPlan, LiveRange
from colossal_lite.schedule.optimizer_updates import ChunkPart
from colossal_lite.schedule.plan import ActionKind
from colossal_lite.schedule.step_moments import ACCUMULATING, INCOMING, UPDATES, SharedInterval

CHUNKS = 4
RECORDS, WEIGHTS, GRADIENTS = (
    VISITING[kind].what for kind in (StateKind.OPTIMIZER, StateKind.WEIGHTS, StateKind.GRADIENTS)
)
B, FETCH, UPDATE = ActionKind.B, ActionKind.FETCH, ActionKind.UPDATE


def arena_of(*places: tuple[str, int, int, int]) -> ArenaPlan:
    """An arena of places (kind, chunk, first byte, bytes), which exist at other times."""
    ranges = tuple(LiveRange(what, chunk, n, n, held) for n, (what, chunk, _, held) in enumerate(places))
    return ArenaPlan(ranges, tuple(start for _, _, start, _ in places), 1024, 1)


@pytest.mark.parametrize(
    ("what", "waiting"),
    [
        (ACCUMULATING, [(B, 1)]),
        (LEAVING.what, [(B, 1)]),
        (SharedInterval.GRADIENTS, [(B, 1)]),
        (RECORDS, [(FETCH, 1)]),
        (GRADIENTS, [(FETCH, CHUNKS + 1)]),
        (SharedInterval.LAST_SUMS, [(FETCH, CHUNKS + 1)]),
        (WEIGHTS, [(FETCH, 2 * CHUNKS + 1), (UPDATE, 1)]),
        (SharedInterval.WEIGHTS, [(UPDATE, 1)]),
        (INCOMING, []),
    ],
)
@pytest.mark.parametrize(
    ("leaves", "part"),
    [(RECORDS, ChunkPart.RECORD), (WEIGHTS, ChunkPart.WEIGHTS), (LEAVING.what, ChunkPart.GRADIENT)],
)
def test_what_comes_to_a_place_waits_for_the_copy_that_leaves_its_bytes(
    what: str, waiting: list[tuple[ActionKind, int]], leaves: str, part: ChunkPart
) -> None:
    awaited = waits_of(arena_of((leaves, 3, 64, 64), (what, 1, 96, 8)), CHUNKS).awaited
    assert {key: awaited[key] for key in waiting} == dict.fromkeys(waiting, [part.of(3, CHUNKS)])
    assert all(chunks == [part.of(3, CHUNKS)] for key, chunks in awaited.items() if key[1] % CHUNKS == 1)
    assert [key for key in awaited if key[1] % CHUNKS == 1] == waiting


@pytest.mark.parametrize("start", [0, 56, 128, 200])
def test_what_comes_beside_it_waits_for_nothing(start: int) -> None:
    assert not waits_of(arena_of((RECORDS, 3, 64, 64), (ACCUMULATING, 1, start, 8)), CHUNKS).awaited


def test_records_whose_places_begin_before_the_updates_come_in_backward() -> None:
    places = {0: UPDATES - 3, 1: UPDATES - 1, 2: UPDATES, 3: UPDATES + 1}
    ranges = (*(LiveRange(RECORDS, c, at, at, 8) for c, at in places.items()), LiveRange(WEIGHTS, 3, 0, 0, 8))
    arena = ArenaPlan(ranges, (0, 8, 16, 24, 32), 40, 1)
    assert early_records(arena) == {0, 1} and waits_of(arena, CHUNKS).prepares == 2
