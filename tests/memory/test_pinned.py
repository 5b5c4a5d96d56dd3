"""Tests host memory beside a GPU: full pages, locked once and unlocked when freed; and the errors of its allocator."""

from __future__ import annotations

import gc
import resource
from typing import Any

import pytest
import torch

from colossal_lite.memory.disk_layout import PAGE_BYTES
from colossal_lite.memory.pinned import host_pages, host_room, locked, make_pages, zeros_on
from colossal_lite.observe.memory_meter import AllocatedBytes, LiveBytes

CPU = torch.device("cpu")


class Runtime:
    """CUDA's, of a system that has 1 MiB to lock."""

    def __init__(self) -> None:
        self.locked: dict[int, int] = {}

    def cudaHostRegister(self, start: int, size: int, flags: int) -> int:  # noqa: N802
        if size > 2**20:
            return 2
        assert start % PAGE_BYTES == 0 and size % PAGE_BYTES == 0, "nobody else's memory is on these pages"
        assert all(start + size <= a or a + held <= start for a, held in self.locked.items())
        self.locked[start] = size
        return 0

    def cudaHostUnregister(self, start: int) -> int:  # noqa: N802
        del self.locked[start]
        return 0


def test_pages_are_locked_for_as_long_as_any_part_of_them_lives() -> None:
    runtime = Runtime()
    rooms = [locked(host_pages(size, CPU), runtime, CPU) for size in (1, PAGE_BYTES, 3 * PAGE_BYTES + 5)]
    assert [room.numel() for room in rooms] == [1, PAGE_BYTES, 3 * PAGE_BYTES + 5]
    assert sorted(runtime.locked.values()) == [PAGE_BYTES, PAGE_BYTES, 4 * PAGE_BYTES]
    part = rooms[2][4:8].view(torch.float32)
    rooms.clear()
    gc.collect()
    assert list(runtime.locked.values()) == [4 * PAGE_BYTES] and float(part) == 0.0
    del part
    gc.collect()
    assert runtime.locked == {}


def test_what_cannot_be_locked_is_a_pinned_copy_that_has_its_values(monkeypatch: pytest.MonkeyPatch) -> None:
    room, zeros = host_pages(2**20 + 1, CPU).fill_(7), torch.zeros
    pinned = list[torch.Tensor]()

    def made(*size: Any, pin_memory: bool, **more: Any) -> torch.Tensor:
        pinned.append(zeros(*size, **more))
        return pinned[-1]

    monkeypatch.setattr(torch, "zeros", made)
    with pytest.warns(UserWarning, match="could not be locked in place"):
        held = locked(room, Runtime(), torch.device("meta"))
    assert held is pinned[0] and torch.equal(held, room)


def test_new_pages_are_made_and_stay_zeros() -> None:
    room = host_pages(3 * PAGE_BYTES, CPU)
    make_pages(room)
    assert not room.any()


def test_rooms_beside_no_gpu_are_plain_memory_and_on_meta_none() -> None:
    assert host_room(5, torch.float64, CPU).tolist() == [0.0] * 5
    assert host_room(5, torch.bfloat16, torch.device("meta")).is_meta
    assert host_pages(5, CPU).data_ptr() % PAGE_BYTES == 0 and host_pages(5, torch.device("meta")).is_meta


class Allocator:
    """Torch's statistics of a device."""

    def __init__(self, now_bytes: int) -> None:
        self.now_bytes = self.peak_bytes = now_bytes

    def give(self, size_bytes: int) -> None:
        self.now_bytes += size_bytes
        self.peak_bytes = max(self.peak_bytes, self.now_bytes)

    def memory_allocated(self, device: torch.device) -> int:
        return self.now_bytes

    def max_memory_allocated(self, device: torch.device) -> int:
        return self.peak_bytes

    def reset_peak_memory_stats(self, device: torch.device) -> None:
        self.peak_bytes = self.now_bytes


def test_what_is_allocated_beside_the_state_counts_in_every_stretch_and_nothing_between() -> None:
    allocator = Allocator(1000)
    meter = AllocatedBytes(CPU, 900, allocator)
    with meter:
        allocator.give(50)
        allocator.give(-50)
    assert meter.peak_bytes == 150, "100 of others"
    allocator.give(500)
    allocator.give(-480)
    with meter:
        allocator.give(40)
    assert meter.peak_bytes == 160
    meter = AllocatedBytes(CPU, 2000, allocator)  # state that is not there
    with meter:
        allocator.give(7)
    assert meter.peak_bytes == 7


def test_large_zeros_take_memory_when_they_are_written_and_a_meter_counts_them_at_once() -> None:
    def faults() -> int:
        return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

    before = faults()
    room = zeros_on(CPU, 8 * 2**20, torch.bfloat16)
    assert faults() - before < 100, "4096 pages of 4 KiB"
    assert room.shape == (8 * 2**20,) and room.dtype == torch.bfloat16 and not room[:: 2**12].any()
    assert room.add_(1).sum(dtype=torch.float64) == room.numel()
    with LiveBytes() as meter:
        kept = zeros_on(CPU, 2**20, torch.float32)
    assert meter.now_bytes == kept.nbytes == 4 * 2**20
