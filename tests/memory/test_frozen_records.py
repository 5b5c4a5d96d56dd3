"""Frozen weights of equal name and content are one record: counted, read-only, and shared between processes."""

from __future__ import annotations

import gc
import multiprocessing
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

import colossal_lite as cl
from colossal_lite.distributed import host_handshake
from colossal_lite.engine.engine import Engine
from colossal_lite.many.worker import Order, Worker
from colossal_lite.memory.disk_layout import PAGE_BYTES
from colossal_lite.memory.frozen_chunk import same_bits
from colossal_lite.memory.frozen_records import (
    HOLDERS,
    FrozenError,
    FrozenHandle,
    FrozenRecord,
    FrozenRecords,
    record_name,
)
from tests.many.tasks import CONFIG, adapted
from tests.shared.parity import Case, start
from tests.shared.pool import RankEnv, run_world

CPU, FLOAT = torch.device("cpu"), torch.float32
FORK = multiprocessing.get_context("fork")
AWAY = dict(
    placement="static", host_fraction=dict(weights=1.0, gradients=1.0, optimizer=1.0), update_on="host"
)
STAGES = dict(size=1, schedule="bfs", stages_per_rank=4, micro_batches=2)
CASE = Case(
    world_size=1, layers=4, tokens=6, adapters=2, steps=3, global_batch=4, chunk_bytes=4096, pipeline=STAGES,
    config=dict(optimizer=dict(type="adamw", lr=1e-2), zero=dict(stage=3, prefetch=0), memory=AWAY),
)  # fmt: skip


def pages(size_bytes: int) -> int:
    return -(-size_bytes // PAGE_BYTES) * PAGE_BYTES


def taken(records: FrozenRecords, value: float, name: str = "w", numel: int = 3000, **more: Any) -> Any:
    values = torch.full((numel,), value)
    return records.take(
        record_name(name), numel, FLOAT, CPU, fill=lambda flat: flat.copy_(values),
        same=lambda flat: None if torch.equal(flat, values) else f"{name} differs from", **more,
    )  # fmt: skip


def users_of(records: FrozenRecords, record: FrozenRecord) -> int:
    """Uses of this process, and one for each other that has it."""
    assert records._space is not None
    return record.users + (records._space.word(record.index, HOLDERS) & ~records._bit).bit_count()


# ---- the records ----


def test_equal_ones_are_one_and_its_memory_ends_with_the_last_user() -> None:
    records = FrozenRecords()
    one, same = taken(records, 1.0), taken(records, 1.0)
    other, named = taken(records, 2.0), taken(records, 1.0, "v")
    assert one is same and len({each.index for each in (one, other, named)}) == 3
    assert [float(each.flat[-1]) for each in (one, other, named)] == [1.0, 2.0, 1.0]
    descriptor = records.handle().descriptor  # type: ignore[union-attr]
    assert records.taken_bytes == os.fstat(descriptor).st_blocks * 512 == 3 * pages(12000) + PAGE_BYTES
    records.give(one)
    assert records.taken_bytes == 3 * pages(12000) + PAGE_BYTES and users_of(records, same) == 1
    records.give(same)
    assert records.taken_bytes == os.fstat(descriptor).st_blocks * 512 == 2 * pages(12000) + PAGE_BYTES
    again = taken(records, 3.0)
    assert again.flat.data_ptr() == one.flat.data_ptr(), "where pages were free"
    for each in (other, named, again):
        records.give(each)
    assert records.taken_bytes == PAGE_BYTES


def test_engines_of_one_process_share_them_where_processes_cannot() -> None:
    with patch.object(host_handshake, "why_not", lambda: "this is darwin"):
        records = FrozenRecords()
        assert records.taken_bytes == 0 and records.handle() is None
    one, same, other = taken(records, 1.0), taken(records, 1.0), taken(records, 2.0, "v", 5)
    assert one is same and float(one.flat.sum()) == 3000.0 and float(other.flat.sum()) == 10.0
    assert records.taken_bytes == pages(12000) + 2 * PAGE_BYTES
    with pytest.raises(FrozenError, match="a: these frozen weights are shared with other engines"):
        records.take_alone(one, "a")
    for each in (one, same, other):
        records.give(each)
    assert records.taken_bytes == PAGE_BYTES and float(taken(records, 4.0).flat.sum()) == 12000.0


@pytest.mark.parametrize("numel", [1, 7, 8, 4096])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_records_are_compared_by_bits_at_any_length_and_offset(numel: int, dtype: torch.dtype) -> None:
    room = torch.full((numel + 1,), float("nan"), dtype=dtype)
    for first in (0, 1):
        one = room[first : first + numel]
        other = one.clone()
        assert same_bits(one, other), "NaN is the same as itself"
        other[-1] = -0.0
        assert not same_bits(one, other) and not same_bits(other, torch.where(other == 0, 0.0, other))


def test_a_stated_base_that_differs_is_refused_and_one_that_others_use_is_not_changed() -> None:
    records = FrozenRecords()
    one = taken(records, 1.0, base="gpt2")
    with pytest.raises(FrozenError, match=r"memory.shared_base='gpt2': w differs from another task"):
        taken(records, 2.0, base="gpt2")
    taken(records, 1.0)
    with pytest.raises(FrozenError, match="a: these frozen weights are shared with other engines"):
        records.take_alone(one, "a")
    records.give(one)
    records.take_alone(one, "a")
    one.flat.fill_(5.0)
    assert taken(records, 5.0).index != one.index, "who has changed it has it alone"
    with pytest.raises(FrozenError, match="holder=64; legal: 0 to 63"):
        FrozenRecords(holder=64)
    with pytest.raises(FrozenError, match="process 1 has no frozen weights any more"):
        FrozenRecords(FrozenHandle(1, 9999))


def sibling(pipe: Any, handle: FrozenHandle, holder: int) -> None:
    """Takes the values that come, and tells its index and the bytes of all; ends without a word."""
    records = FrozenRecords(handle, holder)
    while (value := pipe.recv()) is not None:
        record = taken(records, value)
        pipe.send((record.index, records.taken_bytes, float(record.flat.sum())))
    pipe.send("ended")
    os._exit(9)


def started(handle: FrozenHandle, holder: int) -> tuple[Any, Any]:
    here, there = FORK.Pipe()
    child = FORK.Process(target=sibling, args=(there, handle, holder), daemon=True)
    child.start()
    there.close()
    return here, child


def asked(pipe: Any, value: float | None) -> Any:
    pipe.send(value)
    assert pipe.poll(20), "the other process says nothing"
    return pipe.recv()


def test_processes_share_them_and_one_that_dies_leaves_its_records_to_the_next() -> None:
    records = FrozenRecords(holder=1)
    handle = records.handle()
    assert handle is not None
    mine = taken(records, 1.0)
    pipe, child = started(handle, 0)
    assert asked(pipe, 1.0) == (mine.index, pages(12000) + PAGE_BYTES, 3000.0)
    index, size_bytes, _ = asked(pipe, 2.0)
    assert index != mine.index and size_bytes == 2 * pages(12000) + PAGE_BYTES
    assert users_of(records, mine) == 2
    child.kill()
    child.join(20)
    assert records.taken_bytes == size_bytes, "the next one finds them there"
    pipe, child = started(handle, 0)
    assert asked(pipe, 2.0)[:2] == (index, size_bytes)
    assert asked(pipe, None) == "ended"
    child.join(20)
    last = FrozenRecords(handle, 0)
    for value in (1.0, 2.0):
        last.give(taken(last, value))
    assert records.taken_bytes == pages(12000) + PAGE_BYTES and users_of(records, mine) == 1
    records.give(mine)
    assert records.taken_bytes == PAGE_BYTES


def test_a_record_whose_writer_has_died_is_not_used() -> None:
    records = FrozenRecords()

    def dies(flat: Tensor) -> None:
        flat.fill_(1.0)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        records.take(record_name("w"), 3000, FLOAT, CPU, same=lambda flat: None, fill=dies)
    handle = records.handle()
    other = FrozenRecords(handle, 1)
    found = taken(other, 2.0)
    assert float(found.flat.sum()) == 6000.0 and other.taken_bytes == pages(12000) + PAGE_BYTES


# ---- engines ----

Trained = tuple[list[float], dict[str, Tensor]]


def steps(engine: Engine, case: Case) -> Iterator[float]:
    for number in range(case.steps):
        yield float(engine.train_step(case.batch(number)).loss)


def alone(env: RankEnv, cases: list[Case]) -> list[Trained]:
    found = []
    for case in cases:
        with cl.launch(case.full_config, rank=0, world_size=1) as context:
            engine = start(case, context)
            found.append((list(steps(engine, case)), engine.full_state_dict()))
    return found


def together(env: RankEnv, cases: list[Case]) -> tuple[list[Trained], list[int], list[int], list[int]]:
    """In one store, step by step by turns; bytes of each task's records, of its chunks, and of the frozen weights: as
    they begin and as the engines close, one after the other."""
    store = cl.HostStore(parks=False)
    contexts = [cl.launch(case.full_config, rank=0, world_size=1) for case in cases]
    engines = [
        start(case, context, store=store, task=str(i))
        for i, (case, context) in enumerate(zip(cases, contexts, strict=True))
    ]
    losses = list(
        zip(*zip(*(steps(e, c) for e, c in zip(engines, cases, strict=True)), strict=True), strict=True)
    )
    states = [engine.full_state_dict() for engine in engines]
    records = [store.taken_bytes(task) for task in store.tasks]
    frozen = engines[0]._parts.built.frozen
    base = [pages(chunk.local_shard.nbytes) for chunk in frozen]
    assert all(
        chunk.record is not None and users_of(store.frozen, chunk.record) == len(cases) for chunk in frozen
    )
    held = [store.frozen_bytes]
    for engine, context in zip(engines, contexts, strict=True):
        engine.close()
        context.__exit__(None, None, None)
        held.append(store.frozen_bytes)
    assert store.tasks == ()
    return [([*each], state) for each, state in zip(losses, states, strict=True)], records, base, held


def assert_same(found: list[Trained], expected: list[Trained]) -> None:
    for (losses, state), (true, other) in zip(found, expected, strict=True):
        assert losses == true and state.keys() == other.keys()
        assert all(torch.equal(state[name], value) for name, value in other.items())


def test_adapters_over_one_base_hold_one_base_and_each_has_its_own_bits() -> None:
    cases = [
        replace(CASE, adapters=rank, config={**CASE.config, "optimizer": dict(type="adamw", lr=lr)})
        for rank, lr in ((2, 1e-2), (2, 1e-3), (3, 1e-2))
    ]
    found, records, base, held = run_world(together, 1, cases)[0]
    one = sum(base) + pages(64 * (len(base) + 1))
    assert held == [one, one, one, pages(64 * (len(base) + 1))] and min(records) > 0
    assert_same(found, run_world(alone, 1, cases)[0])


WIDE = replace(
    CASE, tokens=8, vocabulary=256, steps=1, chunk_bytes=1 << 20, adapters=8, sizes=dict(width=256, sequence=8),
    config={**CASE.config, "precision": "fp32"},
)  # fmt: skip


def test_sixteen_adapters_hold_one_base_and_sixteen_adapters_in_the_bytes_of_the_formula() -> None:
    """Of each record whole pages, and 64 bytes."""
    assert run_world(sixteen, 1, WIDE)[0] <= 1.05


def sixteen(env: RankEnv, case: Case) -> float:
    store, made = cl.HostStore(parks=False), []
    for task in range(16):
        context = cl.launch(case.full_config, rank=0, world_size=1)
        made.append((context, start(case, context, store=store, task=str(task))))
    for _, engine in made:
        list(steps(engine, case))
        engine._state.rest()
    built = made[0][1]._parts.built
    trained, frozen = built.chunks, built.frozen
    numels = [chunk.spec.numel for chunk in trained]
    widths = (4, 4, 2 * 4)  # weights, gradients, and the moments of AdamW
    adapter = sum(pages(numel * width) for numel in numels for width in widths)
    adapter += pages(64 * (len(widths) * len(trained) + 1))
    base = sum(pages(chunk.spec.numel * 4) for chunk in frozen) + pages(64 * (len(frozen) + 1))
    assert [store.taken_bytes(str(task)) for task in range(16)] == [adapter] * 16
    assert store.frozen_bytes == base
    for context, engine in made:
        engine.close()
        context.__exit__(None, None, None)
    used = sum(p.numel() for name, p in case.model().named_parameters() if not p.requires_grad)
    own = sum(p.numel() for p in case.model().parameters() if p.requires_grad)
    return (base + 16 * adapter) / (used * 4 + 16 * own * sum(widths))


def wrong(env: RankEnv, case: Case) -> list[str]:
    """What is told to engines of one base: with other values, of other shapes, and to one that would change it."""
    store, told = cl.HostStore(parks=False), []
    config = {**case.full_config, "memory": AWAY | dict(shared_base="small")}
    with cl.launch(config, rank=0, world_size=1) as context:
        engine = start(case, context, store=store, task="a")
        before = store.frozen_bytes
        others = [
            (config | dict(seed=8), case), (config, replace(case, layers=5)), (config, replace(case, vocabulary=41)),
        ]  # fmt: skip
        for other, its in others:
            with cl.launch(other, rank=0, world_size=1) as second:
                with pytest.raises(FrozenError) as error:
                    start(its, second, store=store, task="b")
                told.append(str(error.value))
        assert store.frozen_bytes == before and store.tasks == ("a",)
        with cl.launch(config, rank=0, world_size=1) as second:
            same = start(case, second, store=store, task="b")
            state = same.full_state_dict()
            same.load_full_state_dict(state)  # which changes nothing
            frozen = "position.weight"
            with pytest.raises(FrozenError) as error:
                same.load_full_state_dict(state | {frozen: state[frozen] + 1})
            told.append(str(error.value))
            assert torch.equal(engine.full_state_dict()[frozen], state[frozen])
            engine.close()
            same.load_full_state_dict(state | {frozen: state[frozen] + 1})
            assert torch.equal(same.full_state_dict()[frozen], state[frozen] + 1)
    gc.collect()
    return told


def test_a_base_that_differs_though_shared_by_name_is_refused_by_name() -> None:
    values, deeper, wider, written = run_world(wrong, 1, CASE)[0]
    stated = "memory.shared_base='small': "
    assert f"{stated}the frozen weights token.weight differ from those of another" in values
    assert f"{stated}blocks.4.attention.out.base.bias is [16] torch.float64 here, and not frozen in" in deeper
    assert f"{stated}token.weight is [41, 16] torch.float64 here, and [37, 16] torch.float64 in a" in wider
    assert "position.weight: these frozen weights are shared with other engines" in written


def loaded(env: RankEnv, folder: Any) -> list[str]:
    """Two engines of one base, and one that loads a checkpoint of another."""
    store, told = cl.HostStore(parks=False), []
    with cl.launch(CASE.full_config | dict(seed=8), rank=0, world_size=1) as context:
        start(CASE, context).save(folder / "other")
    with cl.launch(CASE.full_config, rank=0, world_size=1) as context:
        engine = start(CASE, context, store=store, task="a")
        engine.save(folder / "own")
        with cl.launch(CASE.full_config, rank=0, world_size=1) as second:
            other = start(CASE, second, store=store, task="b")
            other.load(folder / "own")
            with pytest.raises(FrozenError) as error:
                other.load(folder / "other")
            told.append(str(error.value))
            kept = engine.full_state_dict()
        engine.load(folder / "other")
        assert not torch.equal(engine.full_state_dict()["token.weight"], kept["token.weight"])
    return told


def test_a_checkpoint_of_another_base_is_refused_while_others_use_this_one(tmp_path: Any) -> None:
    assert "token.weight: these frozen weights are shared" in run_world(loaded, 1, tmp_path)[0][0]


ALONE = dict(rank=0, world_size=1)


def trains(pipe: Any, handle: FrozenHandle, tasks: list[cl.Task], folder: Path, to: int) -> None:
    """A worker that opens two tasks and trains each; tells the bytes of frozen weights that it has written."""
    torch.set_num_threads(1)
    order = Order(tasks, CONFIG, folder, 1, cl.launch, folder / "log", lambda: None, handle, 0)
    worker = Worker(order)
    made, make = list[int](), FrozenRecords._made

    def counted(self: FrozenRecords, *record: Any) -> FrozenRecord:
        new = make(self, *record)
        made.append(new.flat.nbytes)
        return new

    with patch.object(FrozenRecords, "_made", counted):
        said = [
            worker.answer(dict(do="run", task=t.name, to=to, evaluates=False, place=ALONE)) for t in tasks
        ]
    pipe.send(([each.get("step", each) for each in said], sum(made)))
    pipe.recv()


def test_a_worker_that_is_started_again_finds_the_base_of_its_tasks(tmp_path: Path) -> None:
    records = FrozenRecords()
    handle, tasks = records.handle(), [adapted("a"), adapted("b")]
    sizes, made = list[int](), list[int]()
    for to in (1, 2):
        here, there = FORK.Pipe()
        child = FORK.Process(target=trains, args=(there, handle, tasks, tmp_path, to), daemon=True)
        child.start()
        assert here.poll(60)
        steps_made, made_bytes = here.recv()
        assert steps_made == [to, to]
        child.kill()
        child.join(20)
        sizes.append(records.taken_bytes), made.append(made_bytes)
    assert sizes[0] == sizes[1] > PAGE_BYTES and made[0] > 0 == made[1]


def test_the_module_of_a_user_shares_as_what_a_function_builds() -> None:
    cases = [replace(CASE, build="module"), CASE, replace(CASE, build="module")]
    assert isinstance(cases[0].model(), nn.Module)
    found, *_ = run_world(apart, 1, cases)[0]
    assert found == [2, 1, 2]


def apart(env: RankEnv, cases: list[Case]) -> tuple[list[int]]:
    """The users of the frozen weights of each: two have one base, and one another."""
    store = cl.HostStore(parks=False)
    contexts = [cl.launch(case.full_config, rank=0, world_size=1) for case in cases]
    engines = [
        start(c, x, store=store, task=str(i)) for i, (c, x) in enumerate(zip(cases, contexts, strict=True))
    ]
    records = [engine._parts.built.frozen[0].record for engine in engines]
    users = [users_of(store.frozen, record) for record in records if record is not None]
    for context in contexts:
        context.__exit__(None, None, None)
    return (users,)
