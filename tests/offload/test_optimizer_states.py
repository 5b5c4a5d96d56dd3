"""Checks that state on the host or on disk gives the bits of state on the device."""

from __future__ import annotations

import os
import threading
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from colossal_lite.config.zero_stage import Sharding
from colossal_lite.distributed.mesh import Mesh
from colossal_lite.memory.chunk import Chunk
from colossal_lite.memory.copy_streams import CopyExecutor, LinkSpeed, LinkSpeeds, ThreadExecutor
from colossal_lite.memory.link import Link
from colossal_lite.memory.packing import ChunkKey, Item, pack
from colossal_lite.memory.task_records import TaskRecords
from colossal_lite.memory.weight_chunk import Groups, WeightState
from colossal_lite.numerics.precision import ChunkTypes
from colossal_lite.offload import optimizer_states
from colossal_lite.planner.planner import plan
from tests.shared.parity import Case, chunk_numel, initial_values, start
from tests.shared.pool import RankEnv, run_world
from tests.zero.test_zero import BITS, SMALL, assert_same_bits, assert_same_state, bits, loads, saves

CPU = torch.device("cpu")
HOST = dict(memory=dict(placement="host"))
ADAMW = dict(type="adamw", lr=1e-2, weight_decay=0.1)
# Of optimizers that keep no state, one that does, and one that keeps whole tensors.
MIXED = dict(
    type="adamw", lr=1e-2, groups=[dict(match="*.bias", type="sgd"), dict(match="*norm*", type="lion")]
)
COMBINATIONS: dict[str, tuple[int, dict[str, Any], dict[str, Any]]] = {
    "one rank, float32": (1, {}, {}),
    "ZeRO-1, bf16, masters on the host too": (2, dict(zero=dict(stage=1), precision="bf16"), {}),
    "ZeRO-3, bf16, ordered": (
        2,
        dict(zero=dict(stage=3, sum_order="ordered"), precision="bf16"),
        dict(layers=3, chunk_bytes=SMALL),
    ),
    "ZeRO-2, groups of other optimizers": (2, dict(zero=dict(stage=2), optimizer=MIXED), {}),
    "a pipeline, ZeRO-1": (
        4,
        dict(zero=dict(stage=1), precision="bf16"),
        dict(pipeline=dict(size=2, schedule="1f1b", micro_batches=3), global_batch=12),
    ),
    "cut layers, ZeRO-2, ordered": (
        4,
        dict(zero=dict(stage=2, sum_order="ordered"), precision="bf16"),
        dict(tensor=2),
    ),
    "one chunk": (1, dict(precision="bf16"), dict(chunk_bytes=None)),
    "fp16, steps that overflow": (2, dict(precision="fp16"), {}),
}


def on_disk(directory: Path) -> dict[str, Any]:
    return dict(memory=dict(placement="disk", disk_dir=str(directory)))


def slow(env: RankEnv, case: Case, speeds: dict[str, LinkSpeed]) -> Any:
    make = Link.__init__

    def of_its_own(self: Link, name: str, executor: CopyExecutor, **more: Any) -> None:
        make(self, name, ThreadExecutor(speeds[name]) if name in speeds else executor, **more)

    with patch.object(Link, "__init__", of_its_own):
        return bits(env, case)


@pytest.mark.parametrize("name", COMBINATIONS)
def test_host_and_disk_give_the_bits_of_the_device(name: str, tmp_path: Path) -> None:
    ranks, config, change = COMBINATIONS[name]
    case = replace(BITS, world_size=ranks, config=BITS.config | config, **change)
    expected = run_world(bits, ranks, case)
    where = ("device", "host") if [*COMBINATIONS].index(name) % 2 else ("host", "device")
    for placement, update in zip((HOST, on_disk(tmp_path)), where, strict=True):
        placed = case.config | dict(memory=placement["memory"] | dict(update=update))
        assert_same_bits(run_world(bits, ranks, replace(case, config=placed)), expected)
    assert list(tmp_path.iterdir()) == []


def test_a_pipeline_stage_where_nothing_trains_needs_no_tier(tmp_path: Path) -> None:
    first_block = [
        name for name in initial_values(BITS) if name.startswith(("token", "position", "blocks.0."))
    ]
    case = replace(
        BITS, tied=False, frozen=tuple(first_block), steps=2, global_batch=4,
        pipeline=dict(size=2, micro_batches=2, partition=(3, 3)),
        config=dict(precision="bf16", optimizer=ADAMW, clip_grad_norm=0.05),
    )  # fmt: skip
    expected = run_world(bits, 2, case)
    for memory in (HOST, on_disk(tmp_path)):
        assert_same_bits(run_world(bits, 2, replace(case, config=case.config | memory)), expected)


@pytest.mark.parametrize(
    "slow_ones", [("h2d",), ("d2h",), ("h2d", "d2h"), ("read",), ("write",), ("read", "write")]
)
def test_bits_do_not_depend_on_the_speed_of_a_link(slow_ones: tuple[str, ...], tmp_path: Path) -> None:
    case = replace(BITS, config=BITS.config | dict(precision="bf16"))
    expected = run_world(bits, 1, case)
    placement = on_disk(tmp_path) if {"read", "write"} & {*slow_ones} else HOST
    speeds = dict.fromkeys(slow_ones, LinkSpeed(latency_s=0.002))
    assert_same_bits(run_world(slow, 1, replace(case, config=case.config | placement), speeds), expected)


SLOW_ON_HOST = [("h2d", "host"), ("d2h", "disk"), ("cpu", "host"), ("cpu", "disk"), ("write", "disk")]


@pytest.mark.parametrize(("link", "placement"), SLOW_ON_HOST)
def test_bits_of_updates_on_the_host_do_not_depend_on_the_speed_of_a_link(
    link: str, placement: str, tmp_path: Path
) -> None:
    """Of split masters, whose upper halves come down."""
    precision = dict(dtype="bf16", master="split") if link == "d2h" else "bf16"
    case = replace(BITS, config=BITS.config | dict(precision=precision))
    expected = run_world(bits, 1, case)
    memory = (on_disk(tmp_path) if placement == "disk" else HOST)["memory"] | dict(update_on="host")
    case = replace(case, config=case.config | dict(memory=memory))
    assert_same_bits(run_world(slow, 1, case, {link: LinkSpeed(latency_s=0.002)}), expected)


def report(env: RankEnv, case: Case) -> dict[str, tuple[str, int, int]]:
    with env.launch(case.full_config) as context:
        engine = start(case, context)
        cut = context.local_batch(case.global_batch)
        inputs, labels = case.batch(0)
        for _ in range(3):
            engine.train_step((inputs[cut], labels[cut]))
        moved = engine._optimizer.tiers
        assert isinstance(moved, optimizer_states.OffloadedOptimizerStates)
        rows = {row.kind: (row.tier, row.peak_bytes, row.forecast_bytes) for row in engine.memory_report()}
        links = {row.link: row.moved_bytes for row in engine.link_report()}
        all_bytes = moved.record_bytes("host") + moved.record_bytes("disk")
        assert links == dict.fromkeys(links, all_bytes) and list(links)[:2] == ["h2d", "d2h"]
        if moved.disk is not None:
            assert list(links)[2:] == ["read", "write"]
            file = moved.disk.file
            assert file is not None
            assert os.fstat(file._fds[0]).st_size == moved.disk.bytes == file.layout.starts[-1]
        assert all(torch.isfinite(value).all() for value in engine.full_state_dict().values())
        return rows


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("tier", ["host", "disk"])
def test_memory_and_bytes_over_the_links_are_the_formula(world_size: int, tier: str, tmp_path: Path) -> None:
    """(m + 2 g) P / W where state rests, slots of the largest record on the device, all of it up and down once a step;
    from the disk through slots of whole pages on the host: of one record one of each."""
    placement = on_disk(tmp_path) if tier == "disk" else HOST
    case = Case(
        config=placement | dict(zero=dict(stage=1), precision="bf16", optimizer=ADAMW), world_size=world_size
    )
    owned = chunk_numel([v.numel() for v in initial_values(case).values()], world_size) // world_size
    whole_pages = -(-12 * owned // 4096) * 4096
    for rows in run_world(report, world_size, case):
        assert rows["masters"][:2] == (tier, 4 * owned) and rows["optimizer"][:2] == (tier, 8 * owned)
        assert rows["visiting"] == ("cpu", 12 * owned, 12 * owned)
        assert all(peak == forecast for _, peak, forecast in rows.values())
        away = {"masters", "optimizer"}
        if tier == "disk":
            assert rows["passing"][:2] == ("host", whole_pages)
            assert rows["unused"][:2] == ("disk", whole_pages - 12 * owned)
            away |= {"unused", "passing"}
        assert {kind for kind, (where, _, _) in rows.items() if where != "cpu"} == away


def report_on_host(env: RankEnv, case: Case) -> tuple[dict[str, tuple[str, int, int]], dict[str, int], int]:
    """Rows of memory, bytes over the links in a step, and elements that this rank owns of all chunks."""
    with env.launch(case.full_config) as context:
        engine = start(case, context)
        cut = context.local_batch(case.global_batch)
        for number in range(3):
            inputs, labels = case.batch(number)
            engine.train_step((inputs[cut], labels[cut]))
        rows = {row.kind: (row.tier, row.peak_bytes, row.forecast_bytes) for row in engine.memory_report()}
        links = {row.link: row.moved_bytes for row in engine.link_report()}
        assert list(links)[-1] == "cpu"
        made = plan(context.config, case.model, batch=6, sequence=case.tokens, world_size=case.world_size)
        assert made.bytes_of("updating") == rows["updating"][1] and made.bytes_of("visiting") == 0
        return rows, links, sum(chunk.owned[1] - chunk.owned[0] for chunk in engine._chunks)


FORMS: dict[str, tuple[Any, int, int, int]] = {
    "fp32": ("fp32", 8, 4, 4 + 4),
    "bf16": ("bf16", 4, 2, 4 + 2),
    "split": (dict(dtype="bf16", master="split"), 4 + 2, 2, 4 + 2),
}
"""Bytes of an element that come down and go up, and of the slots of a single chunk."""


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("tier", ["host", "disk"])
def test_of_updates_on_the_host_gradients_come_down_and_weights_go_up_and_no_record_has_a_slot(
    tier: str, form: str, tmp_path: Path
) -> None:
    """One slot of gradients and one of weights: there is one chunk."""
    precision, down, up, slots = FORMS[form]
    placement = on_disk(tmp_path) if tier == "disk" else HOST
    config = dict(
        memory=placement["memory"] | dict(update_on="host"), zero=dict(stage=1), precision=precision
    )
    case = Case(config=config | dict(optimizer=ADAMW))
    for rows, links, owned in run_world(report_on_host, 2, case):
        assert rows["visiting"] == ("cpu", 0, 0)
        assert rows["updating"] == ("host", slots * owned, slots * owned)  # one chunk
        assert all(peak == forecast for _, peak, forecast in rows.values())
        assert (links["d2h"], links["h2d"], links["cpu"]) == (down * owned, up * owned, 0)


@pytest.mark.parametrize("away", ["host", "disk"])
def test_a_checkpoint_of_one_placement_is_the_same_on_the_other(away: str, tmp_path: Path) -> None:
    device = Case(config=dict(precision="bf16", optimizer=ADAMW), chunk_bytes=SMALL // 2)
    placement = on_disk(tmp_path) if away == "disk" else HOST
    other = replace(device, config=device.config | placement | dict(zero=dict(stage=3)))
    for number, (here, there) in enumerate(((device, other), (other, device), (other, other))):
        saved = run_world(saves, 2, here, str(tmp_path / str(number)))[0]
        for loaded in run_world(loads, 2, there, str(tmp_path / str(number))):
            assert_same_state(loaded, saved)


def dropped(env: RankEnv, case: Case) -> tuple[list[float], dict[str, int]]:
    """A run that is read between a backward and its updates, while the links upwards stand still; losses, and bytes of
    the last step."""
    with env.launch(case.full_config) as context:
        engine = start(case, context)
        losses = []
        for number in range(2):
            held = engine._optimizer.tiers if number else None
            assert held is None or isinstance(held, optimizer_states.OffloadedOptimizerStates)
            gate = threading.Event()
            disk = held.disk if held is not None else None
            stands = () if held is None else (held.up, held.up if disk is None else disk.reads)
            engine._state.rest()
            for link in stands:
                link._thread.submit(gate.wait, 10)
            losses.append(float(engine.forward_backward(case.batch(number))))
            assert held is None or held._here or (disk and disk._came), "something was fetched ahead"
            engine.full_optimizer_state()
            assert held is None or not held._here
            assert not stands or not gate.is_set(), "nobody had to wait for it"
            gate.set()
            engine.step()
        engine.full_state_dict()
        return losses, {row.link: row.moved_bytes for row in engine.link_report()}


@pytest.mark.parametrize("tier", ["host", "disk"])
def test_what_was_fetched_ahead_and_is_dropped_is_not_waited_for_nor_counted(
    tier: str, tmp_path: Path
) -> None:
    case = replace(BITS, world_size=1, config=BITS.config | dict(precision="bf16", optimizer=ADAMW))
    placed = replace(case, config=case.config | (on_disk(tmp_path) if tier == "disk" else HOST))
    ((expected, _),) = run_world(dropped, 1, case)
    ((losses, moved),) = run_world(dropped, 1, placed)
    assert losses == expected
    assert set(moved.values()) == {moved["h2d"]} and moved["h2d"] > 0, "all records once each way"


def test_weights_that_are_dropped_before_they_set_out_do_not_come() -> None:
    records = TaskRecords("", CPU)
    (spec,) = pack([Item("w", 256, ChunkKey(0, (), False, 0, (0,)))], target_numel=1)
    types = ChunkTypes(torch.float32, torch.float32, torch.float32)
    alone = Groups(*[Mesh.serial().axis("data")] * 4)
    chunk = Chunk(
        spec, alone, types=types, device=CPU, sharding=Sharding(state=True, weight=True), on_host=records
    )
    chunk.adopt({"w": torch.nn.Parameter(torch.zeros(256))}, lambda _, start, stop: torch.ones(stop - start))
    up, gate, slot = Link("h2d", ThreadExecutor()), threading.Event(), torch.zeros(spec.numel)
    up._thread.submit(gate.wait, 10)
    chunk.fetch(slot, up)
    chunk.reshard()
    assert chunk.weights is WeightState.SHARDED and up.moved_bytes == 0 and not gate.is_set()
    gate.set()
    chunk.fetch(slot, up)
    chunk.gather_fetched()
    chunk.finish_gather()
    assert slot[:256].tolist() == [1.0] * 256 and up.moved_bytes == 4 * spec.numel
    up.close()


@pytest.mark.parametrize("is_planted", [False, True])
def test_a_flush_waits_for_a_record_on_its_way_back_although_it_was_asked_for_again(is_planted: bool) -> None:
    (spec,) = pack([Item("w", 256, ChunkKey(0, (), False, 0, (0,)))], target_numel=1)
    types = ChunkTypes(torch.float32, torch.float32, torch.float32)
    chunk = Chunk(spec, Groups(*[Mesh.serial().axis("data")] * 4), types=types, device=CPU)
    states = optimizer_states.OffloadedOptimizerStates(
        [chunk], [{"m": torch.float32}], 10.0, LinkSpeeds(), TaskRecords("", CPU)
    )
    states.fetch(0)
    states.here(0)["m"].fill_(3.0)
    gate = threading.Event()
    states.down._thread.submit(gate.wait, 10)
    states.evict(0)
    states.fetch(0)
    opens = threading.Timer(0.1, gate.set)
    with (
        patch.object(optimizer_states, "_finish_before", lambda dropped: None)
        if is_planted
        else nullcontext()
    ):
        if not is_planted:
            opens.start()
        states.flush()
        found = set(states.opened(0, write=False)["m"].tolist())
    gate.set()
    assert found == ({0.0} if is_planted else {3.0})
    states.close()
