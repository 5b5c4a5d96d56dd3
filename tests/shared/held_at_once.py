"""Measures the most bytes that buffers of an arena take at once, in total and of each kind.

Note: a buffer that a copy removes counts as present until its planned end.  In a right plan what is measured is what is
planned.  Cost: a sum over the buffers in use, at each allocation.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch
from weakref import WeakKeyDictionary

from torch import Tensor

from colossal_lite.memory.arena import Arena, ArenaAllocator, Key
from colossal_lite.memory.link import Transfer
from colossal_lite.schedule.interval_packing import (
    ArenaPlan,
    LiveRange,
    most_held,
    pack_live_ranges,
    round_up,
)
from colossal_lite.schedule.step_moments import SharedInterval
from colossal_lite.zero.weight_slots import ShardedWeights

Taken = tuple[Tensor, tuple[Transfer, ...]]


class HeldAtOnce:
    """The most at once so far: bytes of arenas and of kinds of places, elements of gathered weights."""

    def __init__(self) -> None:
        self._most: WeakKeyDictionary[Any, int] = WeakKeyDictionary()
        self._leaving: WeakKeyDictionary[Arena, dict[str, tuple[Key, Transfer]]] = WeakKeyDictionary()
        """By kind: the last buffer that a transfer removes, and that transfer."""

    def __getitem__(self, places: Arena | ArenaAllocator | ShardedWeights) -> int:
        return self._most.get(places, 0)

    def note(self, places: Arena | ArenaAllocator | ShardedWeights, held: int) -> None:
        self._most[places] = max(self[places], held)

    def forget(self, places: ArenaAllocator) -> None:
        self._most.pop(places, None)

    def here(self, arena: Arena) -> list[Key]:
        """Buffers that are taken, or that a transfer is removing."""
        leaving = self._leaving.get(arena, {})
        return [*arena._taken, *(key for key, _ in leaving.values() if key not in arena._taken)]

    def took(self, arena: Arena, key: Key, before: tuple[Transfer, ...]) -> None:
        leaving = self._leaving.setdefault(arena, {})
        for what, (last, transfer) in tuple(leaving.items()):
            if transfer in before or not _is_beside(arena, arena._stays[last], arena._stays[key]):
                del leaving[what]
        align = arena.plan.align_bytes
        self.note(arena, sum(round_up(arena._stays[k].bytes, align) for k in self.here(arena)))

    def gave(self, arena: Arena, key: Key, last: tuple[Transfer, ...]) -> None:
        leaving = self._leaving.setdefault(arena, {})
        leaving.pop(key[0], None)
        if last:
            leaving[key[0]] = key, last[-1]

    def took_place(self, places: ArenaAllocator) -> None:
        arena, kinds = places._arena, {live_range.what for live_range in places.live_ranges}
        assert arena is not None
        here = sum(places._stays[number].bytes for what, number in self.here(arena) if what in kinds)
        further = sum(places._stays[n].bytes for n, more in places._taken.items() if more is not None)
        self.note(places, here + further)


def _is_beside(arena: Arena, leaving: LiveRange, come: LiveRange) -> bool:
    """Whether the plan still has `leaving` when `come` begins. In an arena of one kind the order may be the reverse."""
    is_of_one_kind = len({live_range.what for live_range in arena.plan.live_ranges}) == 1
    is_kept = come.what == SharedInterval.WEIGHTS  # from one step to the next: they come when their gap ends
    comes = come.gap.stop if is_kept else come.start
    return leaving.start <= (come.stop if is_of_one_kind else comes) and comes <= leaving.stop


def planned_at_once(places: ArenaAllocator) -> int:
    """Most bytes of such places at once, by the plan."""
    return most_held_bytes(pack_live_ranges(places.live_ranges, 1))


def most_held_bytes(plan: ArenaPlan) -> int:
    """Most bytes that exist at one moment of a plan."""
    return most_held([live_range.sized(plan.align_bytes) for live_range in plan.live_ranges])


@contextmanager
def held_at_once() -> Iterator[HeldAtOnce]:
    """Measures all arenas that are used within."""
    held = HeldAtOnce()
    take, give, take_place, shrink = Arena.take, Arena.give, ArenaAllocator.take, ArenaAllocator.shrink
    count = ShardedWeights._count

    def taking(arena: Arena, key: Key) -> Taken:
        room, before = take(arena, key)
        held.took(arena, key, before)
        return room, before

    def giving(arena: Arena, key: Key, *last: Transfer) -> None:
        give(arena, key, *last)
        held.gave(arena, key, last)

    def taking_place(places: ArenaAllocator, number: int) -> Taken:
        found = take_place(places, number)
        if places._stays[number].bytes:
            held.took_place(places)
        return found

    def shrinking(places: ArenaAllocator) -> None:
        shrink(places)
        held.forget(places)

    def counting(weights: ShardedWeights, stop: int) -> None:
        count(weights, stop)
        held.note(weights, sum(weights._all[index].spec.numel for index in weights._resident))

    with (
        patch.object(Arena, "take", taking),
        patch.object(Arena, "give", giving),
        patch.object(ArenaAllocator, "take", taking_place),
        patch.object(ArenaAllocator, "shrink", shrinking),
        patch.object(ShardedWeights, "_count", counting),
    ):
        yield held
