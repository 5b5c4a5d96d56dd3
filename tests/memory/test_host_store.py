"""Tests records on the host: names, exact sizes, versions seen by other processes, no torn reads, freed on drop."""

from __future__ import annotations

import gc
import multiprocessing
import os
import pickle
import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from torch import Tensor

from colossal_lite.distributed import host_handshake
from colossal_lite.memory.disk_layout import PAGE_BYTES
from colossal_lite.memory.host_store import HostStore
from colossal_lite.memory.shared_records import DIRECTORY_BYTES
from colossal_lite.memory.task_records import (
    GRADIENTS,
    OPTIMIZER,
    WEIGHTS,
    ParkedState,
    Records,
    Snapshot,
    StoreError,
    TaskRecords,
)

CPU, FLOAT = torch.device("cpu"), torch.float32
FORK = multiprocessing.get_context("fork")
TIMEOUT_S = 20.0


def opened(numel: int = 5000, task: str = "gpt") -> tuple[HostStore, TaskRecords, Tensor]:
    store = HostStore()
    records = store.open(task, beside=CPU)
    return store, records, records.room(3, OPTIMIZER, numel, FLOAT)


@contextmanager
def process(work: Callable[..., Any], *args: Any) -> Iterator[Any]:
    """Another process that runs `work(pipe, *args)`, and the other end of the pipe."""
    here, there = FORK.Pipe()
    child = FORK.Process(target=work, args=(there, *args), daemon=True)
    child.start()
    there.close()
    try:
        yield here, child
    finally:
        child.kill()
        child.join(TIMEOUT_S)


def heard(pipe: Any) -> Any:
    assert pipe.poll(TIMEOUT_S), "the other process says nothing"
    return pipe.recv()


def sibling(pipe: Any) -> None:
    """Attaches by the handle that comes first, then reads whenever a timeout comes, or tells what was raised."""
    records = HostStore.attach(pickle.loads(pipe.recv_bytes()))
    while True:
        try:
            got = records.read(3, timeout_s=pipe.recv())
            pipe.send((got.version, got.flat.tolist()))
        except StoreError as error:
            pipe.send(str(error))


def test_a_sibling_reads_each_version_when_it_is_whole_and_is_told_while_it_is_not() -> None:
    store, records, room = opened(5)
    handle = pickle.dumps(store.handle("gpt"))
    assert len(handle) < 300
    with process(sibling) as (pipe, _):
        pipe.send_bytes(handle)
        pipe.send(0.0)
        assert heard(pipe) == (0, [0.0] * 5)
        for version in (1, 2):
            records.begin(3)
            room.fill_(version * 1.5)
            pipe.send(0.01)
            assert re.fullmatch(
                rf"task 'gpt': an update of \(3, 'optimizer'\) is owed or on its way by process {os.getpid()}, after "
                r"0\.01 s; legal: HostStore\.flush there, or a longer timeout_s",
                heard(pipe),
            )
            pipe.send(TIMEOUT_S)  # waits for
            assert not pipe.poll(0.05)
            records.commit(3)
            assert heard(pipe) == (version, [version * 1.5] * 5)
        records.begin(3)
        records.cancel(3)
        pipe.send(0.0)
        assert heard(pipe) == (2, [3.0] * 5)
        records.leave(None)
        store.drop("gpt")
        pipe.send(0.0)
        assert "has no record (3, 'optimizer')" in (told := heard(pipe)) and "it was dropped" in told


def owner(pipe: Any) -> None:
    store, records, room = opened()
    room.fill_(7.0)
    records.commit(3)
    records.room(4, WEIGHTS, 9, torch.bfloat16)
    records.begin(4, WEIGHTS)
    pipe.send_bytes(pickle.dumps(store.handle("gpt")))
    pipe.recv()


def test_the_end_of_the_owner_leaves_a_siblings_mapping_as_it_is_and_lets_nobody_else_in() -> None:
    with process(owner) as (pipe, child):
        handle = pickle.loads(pipe.recv_bytes())
        records = HostStore.attach(handle)
        view = records.view(3)
        child.kill()
        child.join(TIMEOUT_S)
    assert records.names == ((3, OPTIMIZER), (4, WEIGHTS))
    assert records.read(3).version == 1 and float(view.sum()) == float(records.read(3).flat.sum()) == 35000.0
    with pytest.raises(StoreError, match="which has ended and will not make it, after 0 s"):
        records.flush()
    with pytest.raises(StoreError, match=f"process {handle.pid} has no records of task 'gpt' any more"):
        HostStore.attach(handle)
    with pytest.raises(StoreError, match="has no records of task 'gpt' any more"):
        store, _, _ = opened()
        HostStore.attach(replace(store.handle("gpt"), token="00" * 16))


def test_a_descriptor_that_is_other_memory_by_now_is_not_read_as_records() -> None:
    store, _, _ = opened()
    other = os.memfd_create("other")
    try:
        os.truncate(other, 2 * DIRECTORY_BYTES)
        os.pwrite(other, b"\xff" * DIRECTORY_BYTES, 0)
        with pytest.raises(StoreError, match="has no records of task 'gpt' any more"):
            HostStore.attach(replace(store.handle("gpt"), descriptor=other))
    finally:
        os.close(other)


def memory_of_this_process() -> tuple[int, int]:
    """Shared memory that it maps, in bytes, and descriptors of shared memory that it has open."""
    (kib,) = re.findall(r"RssShmem:\s+(\d+) kB", Path("/proc/self/status").read_text())
    names = [os.path.realpath(f"/proc/self/fd/{number}") for number in os.listdir("/proc/self/fd")]
    return int(kib) * 1024, sum("memfd:" in name for name in names)


def test_records_take_their_pages_and_a_directory_and_give_them_back() -> None:
    gc.collect()
    shared, descriptors = memory_of_this_process()
    store, records, room = opened(2**20 + 1)
    second = records.room(4, WEIGHTS, 2**20, FLOAT)
    room.fill_(1.0), second.fill_(2.0)
    taken = (2**22 + PAGE_BYTES) + 2**22 + PAGE_BYTES
    assert store.taken_bytes("gpt") == os.fstat(store.handle("gpt").descriptor).st_blocks * 512 == taken
    assert memory_of_this_process() == (shared + taken, descriptors + 2), "of the memory, and of its mapping"
    records.free(4, WEIGHTS)
    assert (
        os.fstat(store.handle("gpt").descriptor).st_blocks * 512 == store.taken_bytes("gpt") == taken - 2**22
    )
    again = records.room(5, WEIGHTS, 2**19, FLOAT)
    assert float(again.abs().sum()) == 0.0 and again.data_ptr() == second.data_ptr(), "where pages were free"
    records.leave(None)
    store.close()
    del records, room, second, again
    gc.collect()
    assert memory_of_this_process() == (shared, descriptors)


class HalfRead:
    """A record of which an update comes between the two halves of a copy."""

    def __init__(self, flat: Tensor, between: Callable[[], None]) -> None:
        self.flat, self.between = flat, between

    def clone(self) -> Tensor:
        half = self.flat.numel() // 2
        first = self.flat[:half].clone()
        self.between()
        return torch.cat([first, self.flat[half:]])


@pytest.mark.parametrize("is_checked", [True, False])
def test_a_read_that_an_update_has_torn_is_made_again_and_without_the_check_it_is_torn(
    is_checked: bool,
) -> None:
    store, records, room = opened()
    flat_of, updates = Records._flat, iter(range(1, 3))

    def update() -> None:
        if number := next(updates, 0):
            records.begin(3)
            room.fill_(float(number))
            records.commit(3)

    siblings = HostStore.attach(store.handle("gpt"))
    state = (lambda self, index: 1) if not is_checked else Records._state
    with (
        patch.object(Records, "_flat", lambda self, index: HalfRead(flat_of(self, index), update)),
        patch.object(Records, "_state", state),
    ):
        got = siblings.read(3, timeout_s=TIMEOUT_S)
    if is_checked:
        assert got.version == 2 and set(got.flat.tolist()) == {2.0}
    else:
        assert set(got.flat.tolist()) == {0.0, 1.0}


def writer(pipe: Any) -> None:
    store, records, room = opened(200_000)
    pipe.send_bytes(pickle.dumps(store.handle("gpt")))
    number = 0
    while not pipe.poll():
        number += 1
        records.begin(3)
        room.fill_(float(number))
        records.commit(3)
        time.sleep(2e-4)


def test_reads_beside_a_process_that_updates_all_the_time_are_of_one_version_each() -> None:
    with process(writer) as (pipe, _):
        records = HostStore.attach(pickle.loads(pipe.recv_bytes()))
        seen, end_s = list[Snapshot](), time.monotonic() + TIMEOUT_S
        while len(seen) < 50 or len({got.version for got in seen}) < 6:
            seen.append(records.read(3, timeout_s=TIMEOUT_S))
            assert time.monotonic() < end_s
    for got in seen:
        assert float(got.flat[0]) == got.version and bool((got.flat == got.flat[0]).all())
    assert [got.version for got in seen] == sorted(got.version for got in seen)


class StoreMachine(RuleBasedStateMachine):
    """One owner and one sibling against a dictionary."""

    @initialize()
    def begin(self) -> None:
        self.store = HostStore()
        self.records = self.store.open("a", beside=CPU)
        self.true: dict[tuple[int, str], list[Any]] = {}  # version, pending, numel, value
        self.rooms: dict[tuple[int, str], Tensor] = {}
        self.records.room(99, WEIGHTS, 1, FLOAT)
        self.sibling = HostStore.attach(self.store.handle("a"))

    @rule(
        chunk=st.integers(0, 5),
        kind=st.sampled_from([OPTIMIZER, WEIGHTS]),
        numel=st.sampled_from([1, 1024, 1025]),
    )
    def make(self, chunk: int, kind: str, numel: int) -> None:
        room = self.records.room(chunk, kind, numel, FLOAT)
        if (chunk, kind) in self.true and self.true[chunk, kind][2] != numel:
            assert self.records.misfits.pop().startswith(f"chunk {chunk}: {kind} of ")
            return
        self.true.setdefault((chunk, kind), [0, False, numel, 0.0])
        self.rooms[chunk, kind] = room
        assert room.numel() == numel and float(room[0]) == float(room[-1]) == self.true[chunk, kind][3]

    @precondition(lambda self: self.true)
    @rule(data=st.data(), what=st.sampled_from(["begin", "write", "commit", "cancel", "free"]))
    def change(self, data: st.DataObject, what: str) -> None:
        name = data.draw(st.sampled_from(sorted(self.true)))
        known = self.true[name]
        if what == "begin":
            self.records.begin(*name)
            known[1] = True
        elif what == "write" and known[1]:
            known[3] += 1.0
            self.rooms[name].fill_(known[3])
        elif what == "commit":
            self.records.commit(*name)
            known[0], known[1] = known[0] + 1, False
        elif what == "cancel":
            self.records.cancel(*name)
            known[1] = False
        elif what == "free":
            del self.rooms[name]
            self.records.free(*name)
            del self.true[name]

    @invariant()
    def siblings_see_it(self) -> None:
        if not hasattr(self, "true"):
            return
        assert self.sibling.names == tuple(sorted([*self.true, (99, WEIGHTS)]))
        pages = sum(-(-4 * numel // PAGE_BYTES) for _, _, numel, _ in self.true.values())
        assert self.records.taken_bytes == (pages + 2) * PAGE_BYTES, "with the directory and one record"
        for (chunk, kind), (version, pending, numel, value) in self.true.items():
            assert self.sibling.version(chunk, kind) == version
            assert self.sibling.is_pending(chunk, kind) == pending
            if pending:
                with pytest.raises(StoreError, match="owed or on its way"):
                    self.sibling.read(chunk, kind)
            else:
                got = self.sibling.read(chunk, kind)
                assert got.version == version and got.flat.tolist() == [value] * numel

    def teardown(self) -> None:
        if hasattr(self, "records"):
            self.records.leave(None)
            self.store.close()


TestStore = StoreMachine.TestCase
TestStore.settings = settings(max_examples=30, stateful_step_count=25, deadline=None)


def test_what_cannot_be_is_refused_by_name() -> None:
    store, records, _ = opened()
    with pytest.raises(
        StoreError, match=r"task 'gpt' has an engine; legal: close that one first, or another"
    ):
        store.open("gpt", beside=CPU)
    with pytest.raises(StoreError, match="task 'gpt' has an engine; legal: close it first"):
        store.drop("gpt")
    for ask in (store.drop, store.handle, store.flush, store.records, store.taken_bytes):
        with pytest.raises(StoreError, match="there is no task 'bert'; it has 'gpt'"):
            ask("bert")
    shared = store.records("gpt")
    with pytest.raises(StoreError, match=r"kind='moments' names no records; legal: 'optimizer', 'weights', "):
        shared.read(3, "moments")
    with pytest.raises(
        StoreError, match=r"no record \(9, 'optimizer'\) in process \d+; it has \(3, 'optimizer'\)"
    ):
        shared.version(9)
    records.leave(None)
    with pytest.raises(
        StoreError, match="ended by an error, and its records are of different steps; legal: st"
    ):
        store.open("gpt", beside=CPU)
    store.drop("gpt")
    assert store.tasks == ()
    store.open("empty", beside=CPU)
    with pytest.raises(StoreError, match="task 'empty' cannot be shared: it has no records on the host"):
        store.handle("empty")
    with patch.object(
        host_handshake, "why_not", lambda: "shared memory without a name is Linux's, this is darwin"
    ):
        other, more, room = opened()
        more.commit(3)
        assert room.tolist() == [0.0] * 5000 and more.room(3, OPTIMIZER, 5000, FLOAT) is room
        for ask in (other.handle, other.records):
            with pytest.raises(StoreError, match="task 'gpt' .*: shared memory without a name is Linux's"):
                ask("gpt")


def test_records_that_an_engine_leaves_are_the_next_ones_and_gradients_are_nobodys() -> None:
    store, records, room = opened(8)
    gradient = records.room(3, GRADIENTS, 8, FLOAT)
    assert store.records("gpt").is_pending(3, GRADIENTS) and gradient.numel() == 8
    store.records("gpt").flush()
    room.fill_(4.0)
    records.leave(ParkedState({"chunk 3": []}, {"steps": 1}))
    next_one = store.open("gpt", beside=CPU)
    assert next_one.kept is not None and next_one.kept.facts == {"steps": 1}
    assert store.records("gpt").names == ((3, OPTIMIZER),)
    assert next_one.room(3, OPTIMIZER, 8, FLOAT) is room and not next_one.is_new(3, OPTIMIZER)
    next_one.room(4, OPTIMIZER, 8, FLOAT)
    next_one.give_up()
    assert store.records("gpt").names == ((3, OPTIMIZER),), "what it had made is gone, what was left is not"
    assert store.open("gpt", beside=CPU).kept is not None


def test_pages_are_locked_for_a_sibling_for_as_long_as_it_has_a_tensor_in_them() -> None:
    class Runtime:
        locked: dict[int, int] = {}

        def cudaHostRegister(self, start: int, size: int, flags: int) -> int:  # noqa: N802
            self.locked[start] = size
            return 0 if size < 2**20 else 1

        def cudaHostUnregister(self, start: int) -> int:  # noqa: N802
            del self.locked[start]
            return 0

    store, records, room = opened(1500)
    records.room(4, OPTIMIZER, 2**19, FLOAT)
    attached = HostStore.attach(store.handle("gpt"))
    view = attached.view(3, runtime=Runtime())
    room.fill_(2.0)
    assert list(Runtime.locked.values()) == [2 * PAGE_BYTES] and float(view[-1]) == 2.0
    part = view[3:5]
    del view
    gc.collect()
    assert len(Runtime.locked) == 1 and float(part[0]) == 2.0
    del part
    gc.collect()
    assert Runtime.locked == {}
    with pytest.raises(StoreError, match=r"\(4, 'optimizer'\) cannot be locked \(CUDA error 1\)"):
        attached.view(4, runtime=Runtime())


def test_marks_come_from_any_thread() -> None:
    _, records, _ = opened()
    threads = [threading.Thread(target=lambda: [records.commit(3) for _ in range(500)]) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(TIMEOUT_S)
    assert records.shared is not None and records.shared.version(3) == 2000
