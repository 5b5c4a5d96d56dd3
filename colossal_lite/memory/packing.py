"""Packs parameters into chunks: computes the position of each parameter in a flat buffer.

Note: packing.
A chunk is one contiguous run of parameters that share a packing key: whether they train, optimizer group, axes of the
gradient's sum.  Entries have the order in which the model uses them.  So a chunk is complete when a stretch of backward
is.  Every entry starts on an aligned element.  An entry of a block or more starts on a block, a smaller one stays
within one.  A chunk's length is a multiple of `parts * shard_numel`, where `parts` ranks sum its gradient.  So it cuts
into equal shards for any divisor of `parts`.  `shard_numel` is `SHARD_ALIGN_NUMEL`.  With `ordered` a sum over blocks
has the same bits for any chunk size.  Then it is `SHARD_BLOCK_NUMEL`, and no shard cuts a block of an entry.  The
result is plain data, the same on every rank.
Only alignment wastes memory.  With 64 elements a shard it is under 1 % for all sizes of GPT-2, up to 512 ranks.  By
blocks it is under 1 % up to 32 ranks at 124 million, up to 128 at 1.3 thousand million.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from colossal_lite.schedule.interval_packing import round_up
from colossal_lite.sharding.mesh_layout import FAR, REPLICATE

ENTRY_ALIGN_NUMEL = 32  # 128 bytes of float32: views are aligned for vector loads and matrix products
SHARD_ALIGN_NUMEL = 64  # updates take full vectors of so many (kernels/optimizer.py)
SHARD_BLOCK_NUMEL = 1024  # a norm is summed over blocks of so many elements of a parameter


@dataclass(frozen=True)
class ChunkKey:
    """What the parameters of one chunk have in common: optimizer group, the axes that sum the gradient, and whether
    ranks of the other axes hold the same values. Then only the first of them counts in a norm.

    `unit`: where weights are gathered block by block, the unit that is gathered at once: odd for a block of the model,
    even for parameters outside the blocks.  `stages`: the pipeline stages that use them; several: tied. `trains`: False
    for frozen parameters, which have no gradient; the axes are then those of equal values."""

    group: int
    sync_axes: tuple[str, ...] = ()
    replicated: bool = False
    unit: int = 0
    stages: tuple[int, ...] = (0,)
    trains: bool = True

    @property
    def shard_axes(self) -> tuple[str, ...]:
        """Axes of the summing ranks among which one copy is sharded; the other ranks have copies of it."""
        return tuple(axis for axis in self.sync_axes if axis != REPLICATE)

    @property
    def near_axes(self) -> tuple[str, ...]:
        """Axes of a copy among which its weights may be stored from forward to backward."""
        return tuple(axis for axis in self.shard_axes if axis != FAR)

    @property
    def is_block(self) -> bool:
        return self.unit % 2 == 1


@dataclass(frozen=True)
class Item:
    """One parameter to place: its name, elements on this rank, and its packing key."""

    name: str
    numel: int
    key: ChunkKey = ChunkKey(0)


@dataclass(frozen=True)
class Entry:
    """A parameter's place: elements [start, stop) of its chunk."""

    name: str
    start: int
    stop: int


@dataclass(frozen=True)
class ChunkSpec:
    """One flat buffer: `numel` elements (alignment included), its entries in order of use.

    `place`: among all chunks of a model by the forward position of their first entries."""

    id: int
    key: ChunkKey
    numel: int
    entries: tuple[Entry, ...]
    place: int = 0

    @property
    def used_numel(self) -> int:
        return sum(entry.stop - entry.start for entry in self.entries)

    @property
    def few_names(self) -> str:
        """Its first parameters, for messages."""
        return ", ".join(entry.name for entry in self.entries[:3])

    def shard(self, parts: int, part: int) -> tuple[int, int]:
        """Elements [start, stop) of shard `part` of `parts` equal ones."""
        assert self.numel % parts == 0, f"chunk {self.id}: {self.numel} elements do not cut into {parts}"
        length = self.numel // parts
        return part * length, (part + 1) * length


def _place(end: int, numel: int) -> int:
    """Where an entry of `numel` elements starts behind one that ends at `end`."""
    start = round_up(end, SHARD_BLOCK_NUMEL if numel >= SHARD_BLOCK_NUMEL else ENTRY_ALIGN_NUMEL)
    crosses = start // SHARD_BLOCK_NUMEL != max(start, start + numel - 1) // SHARD_BLOCK_NUMEL
    return round_up(start, SHARD_BLOCK_NUMEL) if crosses else start


def pack(
    items: Sequence[Item],
    *,
    target_numel: int,
    parts: Callable[[ChunkKey], int] = lambda key: 1,
    shard_numel: int = SHARD_BLOCK_NUMEL,
) -> tuple[ChunkSpec, ...]:
    """Place `items`, given in forward order, into chunks of about `target_numel` elements. Those of a key cut into
    `parts(key)` shards of a multiple of `shard_numel` elements. A larger parameter gets a chunk of its own; keys never
    mix.  Chunks are numbered by the forward position of their first entry."""
    assert target_numel > 0 and shard_numel > 0
    assert len({item.name for item in items}) == len(items), "a parameter is packed once"
    open_entries: dict[ChunkKey, list[Entry]] = {}
    closed: list[tuple[int, ChunkKey, list[Entry]]] = []
    position = {item.name: i for i, item in enumerate(items)}

    def close(key: ChunkKey) -> None:
        if entries := open_entries.pop(key, None):
            closed.append((position[entries[0].name], key, entries))

    for item in items:
        entries = open_entries.setdefault(item.key, [])
        if entries and _place(entries[-1].stop, item.numel) + item.numel > target_numel:
            close(item.key)
            entries = open_entries.setdefault(item.key, [])
        start = _place(entries[-1].stop, item.numel) if entries else 0
        entries.append(Entry(item.name, start, start + item.numel))
    for key in list(open_entries):
        close(key)
    closed.sort(key=lambda found: found[0])
    return tuple(
        ChunkSpec(i, key, round_up(max(entries[-1].stop, 1), parts(key) * shard_numel), tuple(entries), i)
        for i, (_, key, entries) in enumerate(closed)
    )
