"""Stores the model state of tasks in host memory, longer than an engine lives, and shares it between processes.

Note: sharing.  The memory and versions of records are in memory/task_records.py.
`HostStore.handle(task)` is a small value that can be pickled.  A process of the same user on the same host attaches
with it, through /proc of the owner.  It may lock the memory beside a device of its own.  When the owner ends, memory
that others have mapped remains.  When the owner drops a task, readers see that its records are gone.

Frozen weights are not a task's own.  Engines of one store that have equal ones share their memory
(memory/frozen_records.py), also with engines of other processes.  It is freed when the last of these engines closes.
Cost: a descriptor and a mapping for each task.  A system without memfd cannot share.
Source: Hydra's host segment, arXiv 2110.08633.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch

from colossal_lite.distributed import host_handshake
from colossal_lite.memory.frozen_records import FrozenRecords
from colossal_lite.memory.frozen_slots import FrozenSlots
from colossal_lite.memory.shared_records import MARK, RecordSpace, StoreError
from colossal_lite.memory.task_records import Records, TaskRecords


@dataclass(frozen=True)
class Handle:
    """The address by which another process finds the records of a task."""

    task: str
    pid: int
    descriptor: int
    token: str


class HostStore:
    """Stores the records of many tasks of this process.

    An engine made with `initialize(..., store=, task=)` leaves its model state here when it is closed. An engine made
    later for the same task resumes from it, bit for bit. State on the device or on disk is copied here for that time.
    An engine whose memory.host_budget has no room for that is rejected. Other tasks do not count in its budget.
    """

    def __init__(self, *, parks: bool = True, frozen: FrozenRecords | None = None) -> None:
        """`parks`: False: a task's records end with its engine, which shares its frozen weights only. `frozen`: those
        of the processes that share them; None: of the engines of this store."""
        self.parks, self.frozen = parks, FrozenRecords() if frozen is None else frozen
        self.slots = FrozenSlots()
        """On the device, of the frozen weights that engines read."""
        self._tasks: dict[str, TaskRecords] = {}

    @property
    def tasks(self) -> tuple[str, ...]:
        """Tasks that have records or an engine."""
        return tuple(task for task, records in self._tasks.items() if records.is_open or not records.is_blank)

    def open(self, task: str, *, beside: torch.device) -> TaskRecords:
        """Open the records of a task for an engine. Raises StoreError while another has them open, or if the last one
        ended before its updates were finished."""
        records = self._tasks.get(task)
        if records is None or (records.is_blank and not records.is_open):
            records = self._tasks[task] = TaskRecords(task, beside, self.frozen, self.slots)
        elif records.is_open:
            raise StoreError(
                f"store: task {task!r} has an engine; legal: close that one first, or another task="
            )
        elif records.kept is None:
            raise StoreError(
                f"store: the engine of task {task!r} has ended by an error, and its records are of different steps; "
                f"legal: store.drop({task!r}), and a checkpoint"
            )
        records.is_open, records.beside = True, beside
        return records

    def handle(self, task: str) -> Handle:
        """A small value, to be pickled, with which a process of this user on this host attaches. Raises StoreError."""
        space = self.records(task).space
        return Handle(task, os.getpid(), space.descriptor, f"{space.words[MARK]:x}")

    @staticmethod
    def attach(handle: Handle) -> Records:
        """Map the records of another process's task; the mapping outlives that process. Raises StoreError."""
        try:
            space = RecordSpace.opened(handle.task, int(handle.token, 16), handle.pid, handle.descriptor)
        except OSError as error:
            raise StoreError(
                f"attach: process {handle.pid} has no records of task {handle.task!r} any more ({error.strerror})"
            ) from error
        return Records(handle.task, handle.pid, space)

    def records(self, task: str) -> Records:
        """The records of a task as other processes see them. Raises StoreError if it has none."""
        if (shared := self._of(task).shared) is None:
            why = host_handshake.why_not() or "it has no records on the host"
            raise StoreError(f"store: task {task!r} cannot be shared: {why}")
        return shared

    def flush(self, task: str | None = None) -> None:
        """Run the deferred updates of a task's engine, or of all, and wait for their bytes. Where ranks own shards,
        call it on every rank."""
        for name in self.tasks if task is None else (task,):
            self._of(name).on_flush()

    def taken_bytes(self, task: str) -> int:
        """Bytes of host memory of a task's records, frozen weights left out (memory/shared_records.py)."""
        return self._of(task).taken_bytes

    @property
    def frozen_bytes(self) -> int:
        """Bytes of host memory of the frozen weights of all tasks."""
        return self.frozen.taken_bytes

    def drop(self, task: str) -> None:
        """Drop a task that has no engine any more. Raises StoreError."""
        records = self._of(task)
        if records.is_open:
            raise StoreError(f"store: task {task!r} has an engine; legal: close it first")
        records.close()
        del self._tasks[task]

    def close(self) -> None:
        """Drop every task. Raises StoreError while one has an engine."""
        for task in self.tasks:
            self.drop(task)

    def __repr__(self) -> str:
        rows = ", ".join(f"{task}: {records.taken_bytes:,} bytes" for task, records in self._tasks.items())
        return f"HostStore({rows}{'; ' * bool(rows)}frozen: {self.frozen_bytes:,} bytes)"

    def _of(self, task: str) -> TaskRecords:
        if task not in self._tasks:
            has = ", ".join(map(repr, self._tasks)) or "none"
            raise StoreError(f"store: there is no task {task!r}; it has {has}")
        return self._tasks[task]
