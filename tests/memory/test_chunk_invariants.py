"""Tests invariants of chunks and tiers for any model and number of slots: every element has one owner, and only the
newest version of a record is read."""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from colossal_lite.config.config import Config
from colossal_lite.distributed.mesh import Mesh
from colossal_lite.memory.chunk import Chunk
from colossal_lite.memory.copy_streams import LinkSpeeds, ThreadExecutor
from colossal_lite.memory.disk_file import DiskFile
from colossal_lite.memory.disk_layout import FileLayout
from colossal_lite.memory.link import Link, Transfer
from colossal_lite.memory.packing import ChunkSpec, Item, pack
from colossal_lite.memory.task_records import TaskRecords
from colossal_lite.memory.weight_chunk import Groups, WeightChunk
from colossal_lite.numerics.precision import ChunkTypes
from colossal_lite.offload import optimizer_states, state_storage
from colossal_lite.parallel.parallelize import parallelize
from colossal_lite.schedule.optimizer_updates import update_plan
from colossal_lite.schedule.plan import ActionKind
from colossal_lite.schedule.update_mix import UpdateMix
from colossal_lite.zero import build_chunks as build
from tests.shared.places import patched

# ---- I1: every element of a parameter is in one shard of one chunk, and what lies between adds to no norm ----

SHAPES = ((), (0,), (1,), (3, 5), (7, 0, 2), (31,), (1023,), (1024,), (1025,), (9, 257), (4097,))


@dataclass(frozen=True)
class Drawn:
    """A parameter of a random model."""

    shape: tuple[int, ...]
    frozen: bool
    shared: bool
    """Registered under a second name, in another module."""


class Model(nn.Module):
    """Parameters in modules of three each; no forward reads the last one, and nobody asks here."""

    def __init__(self, drawn: Sequence[Drawn]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Module() for _ in range(len(drawn) // 3 + 1))
        self.again = nn.Module()
        for i, one in enumerate(drawn):
            parameter = nn.Parameter(torch.zeros(one.shape), requires_grad=not one.frozen)
            self.blocks[i // 3].register_parameter(f"p{i}", parameter)
            if one.shared:
                self.again.register_parameter(f"q{i}", parameter)


@dataclass(frozen=True)
class Cut:
    """Over how many ranks a model is sharded, and how."""

    ranks: int
    stage: int
    shard: int | None = None
    """Ranks of a copy, in hybrid sharding."""
    by: str = "data"


CUTS = [
    *(Cut(ranks, stage) for ranks in (1, 2, 3, 4) for stage in (0, 1, 2, 3)),
    *(Cut(4, stage, shard) for stage in (1, 2, 3) for shard in (1, 2)),
    *(Cut(3, stage, by="sequence") for stage in (1, 3)),
]
drawn_parameters = st.builds(Drawn, st.sampled_from(SHAPES), st.booleans(), st.booleans())
models = st.lists(drawn_parameters, min_size=1, max_size=10).filter(lambda ps: not all(p.frozen for p in ps))


def chunks_of(module: nn.Module, cut: Cut, rank: int) -> tuple[tuple[Chunk, ...], tuple[WeightChunk, ...]]:
    """This rank's chunks of a model, as `initialize` makes them: those that train, and those that do not."""
    zero = dict(stage=cut.stage, reduce_every="micro_batch") | (
        {} if cut.shard is None else dict(shard_size=cut.shard)
    )
    if cut.stage != 2:
        zero.pop("reduce_every")
    config = Config.load(dict(zero=zero, precision="fp32", parallel={cut.by: cut.ranks}))
    mesh = Mesh.recording(config.check_world(cut.ranks).layout(), rank)
    specs = parallelize(module, Mesh.serial()).specs
    named = dict(module.named_parameters())
    numels = {name: p.numel() for name, p in named.items()}
    still = [name for name, p in named.items() if not p.requires_grad]
    blocks = [f"blocks.{i}" for i in range(len(module.blocks))]
    with patch.object(build, "CHUNK_BYTES", 4 * 3000):
        packed = build.pack_chunks(numels, specs, config, mesh.layout, None, blocks, still)
    chunks = build.build_chunks(named, packed, specs, config, mesh, torch.device("cpu"))
    return chunks, build.build_frozen(packed, config, mesh, torch.device("cpu"))


def assert_each_element_has_one_owner(module: nn.Module, cut: Cut) -> None:
    trained, still = zip(*(chunks_of(module, cut, rank) for rank in range(cut.ranks)), strict=True)
    trainable = {name: p.numel() for name, p in module.named_parameters() if p.requires_grad}
    frozen = {name: p.numel() for name, p in module.named_parameters() if not p.requires_grad}
    assert_parts_cover(trained, cut, trainable)
    assert_parts_cover(still, cut, frozen if cut.stage == 3 else {})
    squares = sum(_squares_of_ones(chunk, trainable) for chunks in trained for chunk in chunks)
    assert squares == pytest.approx(sum(trainable.values()), abs=0.25), "what lies between counts in the norm"


def assert_parts_cover(ranks: Sequence[Sequence[WeightChunk]], cut: Cut, numels: Mapping[str, int]) -> None:
    """The chunks of all ranks have each element of these parameters in one shard, and nothing else."""
    assert all([c.spec for c in chunks] == [c.spec for c in ranks[0]] for chunks in ranks)
    assert sorted(e.name for c in ranks[0] for e in c.spec.entries) == sorted(numels)
    copies = 1 if not cut.stage else cut.ranks // (cut.shard or cut.ranks)
    expected = cut.ranks if not cut.stage else copies  # how many ranks own each element
    for same in zip(*ranks, strict=True):
        owners, shares = torch.zeros(2, same[0].spec.numel, dtype=torch.int64)
        for chunk in same:
            owners[slice(*chunk.owned)] += 1
            if isinstance(chunk, Chunk):
                shares[slice(*chunk.share)] += 1
        assert (owners == expected).all()
        assert (shares == 1).all() or not isinstance(same[0], Chunk)
        for entry in same[0].spec.entries:
            seen = torch.zeros(numels[entry.name], dtype=torch.int64)
            for chunk in same:
                if part := chunk.part_of(entry):
                    local, start = part
                    seen[start : start + local.stop - local.start] += 1
            assert (seen == expected).all(), entry


def _squares_of_ones(chunk: Chunk, numels: Mapping[str, int]) -> float:
    """This rank's term of the norm where each element of a gradient is one and what slots held before is no number. On
    a mesh that only records, a sum over ranks is this rank's term of it."""
    if chunk.staging is not None:
        assert chunk.staging._arena is not None
        chunk.staging._arena._room.view(chunk.gradient.dtype).fill_(torch.nan)
    for index, entry in enumerate(chunk.spec.entries):
        chunk.accept(index, torch.ones(numels[entry.name]))
    chunk.start_reduce()
    chunk.finish_reduce()
    chunk.conclude()
    return float(chunk.squares())


@settings(max_examples=40)
@given(models, st.sampled_from(CUTS))
def test_i1_every_element_of_any_model_is_in_one_shard_of_one_chunk_and_padding_in_no_norm(
    drawn: list[Drawn], cut: Cut
) -> None:
    assert_each_element_has_one_owner(Model(drawn), cut)


def _of_the_next_rank(original: Any, self: ChunkSpec, parts: int, part: int) -> tuple[int, int]:
    return original(self, parts, max(part - 1, 0))


def _without_the_first(original: Any, numels: Mapping[str, int], *more: Any, **options: Any) -> Any:
    return original({name: numel for name, numel in list(numels.items())[1:]}, *more, **options)


FAULTS_I1: dict[str, tuple[str, Callable[..., Any]]] = {
    "two ranks own one shard": ("ChunkSpec.shard", _of_the_next_rank),
    "gaps are not cleared": ("Chunk._gaps", lambda original, self: iter(())),
    "a parameter is in no chunk": ("pack_chunks", _without_the_first),
}


@pytest.mark.parametrize("fault", FAULTS_I1)
def test_i1_goes_red_where(fault: str) -> None:
    module = Model([Drawn((9, 257), False, True), Drawn((31,), True, False), Drawn((3, 5), False, False)])
    assert_each_element_has_one_owner(module, Cut(2, 2))
    with patched(*FAULTS_I1[fault]), pytest.raises(AssertionError):
        assert_each_element_has_one_owner(module, Cut(2, 2))


# ---- I4 and I5: records in their newest version, whatever the number of chunks, of slots, and the speed of links ----

STEPS = 3
CHUNK = 1024


def records(count: int, numels: Sequence[int] = ()) -> tuple[Chunk, ...]:
    """Chunks of one block each in bf16, or of so many elements, whose masters are apart from the weights."""
    numels = numels or [CHUNK] * count
    specs = pack([Item(f"p{i}", numels[i]) for i in range(count)], target_numel=1)
    alone = Groups(*[Mesh.serial().axis("data")] * 4)
    types = ChunkTypes(torch.bfloat16, torch.float32, torch.float32)
    return tuple(Chunk(spec, alone, device=torch.device("cpu"), types=types) for spec in specs)


def assert_newest_versions(
    count: int,
    ahead: int,
    below: int | None,
    directory: Path,
    delays: Callable[[str], float] = lambda link: 0.0,
    on_disk: Callable[[int], Collection[int]] = range,
) -> None:
    """Steps of updates by the plan, on the real tiers. Every element of a record is stamped with its chunk and its
    version: an update must find the last one, and so must whoever looks where the records rest, after each step."""
    run = Link.run

    def delayed(self: Link, work: Callable[[], object], size_bytes: int, **more: Any) -> Any:
        if seconds := delays(self.name):
            assert isinstance(self.executor, ThreadExecutor)
            self._thread.submit(self.executor._hurries.wait, seconds)
        return run(self, work, size_bytes, **more)

    chunks, states = records(count), [{"moment": torch.float32}] * count

    def opened(layout: FileLayout, resting: Collection[int]) -> DiskFile:
        return DiskFile(directory, layout, label="test", timeout_s=20.0, resting=resting)

    with (
        patch.object(state_storage, "HOST_SLOTS", (below or 0) + 3),
        patch.object(Link, "run", delayed),
    ):
        made = optimizer_states.OffloadedOptimizerStates(
            chunks, states, 20.0, LinkSpeeds(), TaskRecords("", torch.device("cpu")),
            mix=UpdateMix(ahead=ahead), on_disk=None if below is None else on_disk(count), open_file=opened,
        )  # fmt: skip
        try:
            (plan,) = update_plan(count, ahead=ahead, below=below, on_disk=made.on_disk)
            for index in range(count):
                for part in made.opened(index, write=True).values():
                    part.fill_(100 * index)
            made.settle()
            for version in range(STEPS):
                for action in plan:
                    if action.kind is not ActionKind.UPDATE:
                        made.move(action)
                        continue
                    index = action.chunk or 0
                    here = [made.here(index)["moment"], chunks[index].master]
                    assert all((part == 100 * index + version).all() for part in here), f"chunk {index}"
                    for part in here:
                        part.add_(1)
                made.flush()
                for index in range(count):
                    parts = made.opened(index, write=False)
                    assert len(parts) == 2
                    found = [(part == 100 * index + version + 1).all() for part in parts.values()]
                    assert all(found), f"chunk {index}"
                made.settle()
        finally:
            made.close()


@pytest.mark.parametrize("slots", range(2, 13))
def test_i4_every_record_is_at_home_in_its_newest_version_for_any_number_of_chunks(
    slots: int, tmp_path: Path
) -> None:
    """Multiples of the number of slots among them, where the last record could be left behind."""
    for count in range(1, 13):
        assert_newest_versions(count, slots - 2, None, tmp_path)


@pytest.mark.parametrize(("ahead", "below"), [(0, 0), (1, 1), (0, 2)])
def test_i4_and_so_is_every_record_on_disk(ahead: int, below: int, tmp_path: Path) -> None:
    for count in (1, 2, 3, 4, 8, 9):
        assert_newest_versions(count, ahead, below, tmp_path)


@pytest.mark.parametrize("some", [{0}, {8}, {2, 3}, {0, 4, 8}, {1, 2, 5, 6, 8}, set(range(1, 9))], ids=str)
def test_i4_and_so_it_is_where_some_rest_on_disk_and_the_others_on_the_host(
    some: set[int], tmp_path: Path
) -> None:
    assert_newest_versions(9, 1, 1, tmp_path, on_disk=lambda count: some)
    draw = random.Random(len(some))
    assert_newest_versions(
        9, 1, 1, tmp_path, lambda _: draw.choice((0.0, 0.0, 0.001, 0.004)), on_disk=lambda count: some
    )


@pytest.mark.parametrize("seed", range(6))
def test_i4_records_that_change_their_homes_are_there_as_they_were(seed: int, tmp_path: Path) -> None:
    """Any to any: some to the device, some to disk, some to the host; those that are left are updated as before."""
    draw = random.Random(seed)

    def some(of: Collection[int]) -> set[int]:
        return {index for index in of if draw.random() < 0.5}

    def opened(layout: FileLayout, resting: Collection[int]) -> DiskFile:
        return DiskFile(tmp_path, layout, label="test", timeout_s=20.0, resting=resting)

    sizes = [draw.choice((CHUNK, 3 * CHUNK)) for _ in range(9)]
    chunks, records_of_task = records(9, sizes), TaskRecords("", torch.device("cpu"))
    made = optimizer_states.OffloadedOptimizerStates(
        chunks, [{"moment": torch.float32}] * 9, 20.0, LinkSpeeds(), records_of_task,
        on_disk=some(range(9)) if seed else (), open_file=opened,
    )  # fmt: skip
    for index in range(9):
        for number, part in enumerate(made.opened(index, write=True).values()):
            part.fill_(10 * index + number)
    left = some(range(9)) | {0, 8}
    for index in {*range(9)} - left:
        assert [set(part.tolist()) for part in made.opened(index, write=False).values()] == [
            {10 * index}, {10 * index + 1},
        ]  # fmt: skip
        made.release(index)
    there = some(left) | {0}
    made.settle_storages(there)
    made.settle_places(None)
    assert made.disk is not None and made.on_disk == there
    assert {i for i in left if made.tier_of(i) == "host"} == left - there
    assert {number for number, _ in records_of_task._rooms} == left - there, "no other room is kept"
    room_bytes = sum(room.nbytes for room in records_of_task._rooms.values())
    assert made.host_bytes == room_bytes + min(4, len(there)) * max(8 * sizes[i] for i in there)
    (plan,) = update_plan(9, ahead=1, below=1, on_disk=made.on_disk, moving=left)
    for action in plan:
        if action.kind is not ActionKind.UPDATE:
            made.move(action)
        elif (index := action.chunk or 0) in left:
            made.here(index)["moment"].add_(1)
    made.flush()
    for index in left:
        parts = made.opened(index, write=False).values()
        assert [set(part.tolist()) for part in parts] == [{10 * index + 1}, {10 * index + 1}]
    made.close()


@pytest.mark.parametrize("below", [None, 1])
@pytest.mark.parametrize("seed", range(3))
def test_i5_no_record_is_read_before_it_has_come_however_long_copies_take(
    seed: int, below: int | None, tmp_path: Path
) -> None:
    draw = random.Random(seed)
    assert_newest_versions(5, 1, below, tmp_path, lambda _: draw.choice((0.0, 0.0, 0.001, 0.004)))


def _not_taken_back(original: Any, self: Any, index: int) -> None:
    """The hole of a plan that empties a slot only when another record needs it."""
    if index < len(self._records) - 1:
        original(self, index)
    else:
        del self._here[index]
        self.staging_places.give(index)


def _not_awaited(original: Any, self: Transfer) -> None:
    if self.link.name != "h2d":
        original(self)


def _refilled_before_it_is_empty(
    original: Any, self: Link, *copied: Any, after: Any = (), **more: Any
) -> Transfer:
    return original(self, *copied, **more)


FAULTS_TIERS: dict[str, tuple[str, str, Callable[..., Any]]] = {
    "the last record is not taken back": (
        "",
        "OffloadedOptimizerStates.evict",
        _not_taken_back,
    ),
    "a record is read before it has come": ("h2d", "Transfer.wait", _not_awaited),
    "a slot is refilled before it is empty": ("d2h", "Link.copy", _refilled_before_it_is_empty),
}
"""And the link that is slow."""


@pytest.mark.parametrize("fault", FAULTS_TIERS)
def test_i4_and_i5_go_red_where(fault: str, tmp_path: Path) -> None:
    slow, name, change = FAULTS_TIERS[fault]
    with (
        patched(name, change),
        pytest.raises(AssertionError, match="chunk"),
    ):
        assert_newest_versions(6, 1, None, tmp_path, lambda link: 0.01 * (link == slow))
