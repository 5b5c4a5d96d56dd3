"""Groups sharded chunks into the units that are gathered together, and plans their gathers.

Note: a unit is a block, or the chunks that share a module outside the blocks.  One operation reads all weights of its
module, so these are gathered and dropped together.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from colossal_lite.memory.weight_chunk import WeightChunk
from colossal_lite.schedule.gather_plan import GatherPlan, Needs, Trace, gather_plan


def units_of(chunks: Sequence[WeightChunk]) -> dict[int, Needs]:
    """Groups the sharded chunks: id -> ids of the chunks that are gathered with it, in forward order.

    These are the chunks of its block. Outside the blocks they are the chunks that share a module with it."""
    units: dict[int, set[int]] = {}
    first: dict[int | str, int] = {}
    for chunk in sorted(chunks, key=lambda chunk: chunk.spec.place):
        key, own = chunk.spec.key, chunk.spec.id
        if not chunk.is_sharded:
            continue
        units[own] = {own}
        owners = {entry.name.rpartition(".")[0] for entry in chunk.spec.entries}
        for holder in {key.unit} if key.is_block else owners:
            joined = units[own] | units[first.setdefault(holder, own)]
            units |= dict.fromkeys(joined, joined)
    return {index: frozenset(unit) for index, unit in units.items()}


def contexts_of(chunks: Sequence[WeightChunk], units: Mapping[int, Needs]) -> dict[int, Needs]:
    """Finds what a forward of a chunk's modules needs: its unit, and the units of the modules around them.

    `chunks` stand in the order of their ids."""
    owned: dict[str, set[int]] = {}
    for chunk in chunks:
        for entry in chunk.spec.entries:
            owned.setdefault(entry.name.rpartition(".")[0], set()).update(units.get(chunk.spec.id, ()))

    def around(name: str) -> Iterator[int]:
        while name:
            name = name.rpartition(".")[0]
            yield from owned.get(name, ())

    return {
        index: needs.union(*(around(entry.name) for entry in chunks[index].spec.entries))
        for index, needs in units.items()
    }


def plan_of(
    trace: Trace, chunks: Sequence[WeightChunk], *, prefetch: int, reshard_after_forward: bool | int
) -> GatherPlan:
    """Plans the gathers of these chunks, in the order of their ids, by this trace."""
    units = units_of(chunks)
    num_trained = sum(chunk.spec.key.trains for chunk in chunks)
    numels = {chunk.spec.id: chunk.spec.numel for chunk in chunks if chunk.is_sharded}
    on_host = frozenset(chunk.spec.id for chunk in chunks if chunk.weights_at_rest is not None)
    return gather_plan(
        trace.covering(contexts_of(chunks, units), units), numels, num_chunks=num_trained, prefetch=prefetch,
        reshard_after_forward=bool(reshard_after_forward), on_host=on_host,
        parts={chunk.spec.id: chunk.part_numel for chunk in chunks if chunk.part_numel},
    )  # fmt: skip
