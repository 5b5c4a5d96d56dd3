"""Computes how much of a GPU a budget may have: not what drivers and NCCL hold, nor the gaps of the allocator.

Note: `memory.device_budget` counts bytes of tensors.  Communicators exist when this is asked.  So their memory, and the
driver's, is measured: memory in use that torch's allocator has not reserved.  Gaps between allocations are a stated
share of the budget.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from colossal_lite.config.errors import Problem

GAPS = 16
"""One byte in so many of a budget is for gaps between allocations."""


def room_of(total_bytes: int, free_bytes: int, reserved_bytes: int) -> int:
    """The largest budget of a device, by bytes of it, those that are free and those that torch has reserved."""
    beside_others = free_bytes + reserved_bytes
    return max(1, min(beside_others, total_bytes) * GAPS // (GAPS + 1))


def room_problems(budget: int | None, device: torch.device) -> Iterator[Problem]:
    """A budget that a GPU has no room for, now."""
    if budget is None or device.type != "cuda":
        return
    free_bytes, total_bytes = torch.cuda.mem_get_info(device)
    reserved_bytes = torch.cuda.memory_reserved(device)
    room = room_of(total_bytes, free_bytes, reserved_bytes)
    if budget > room:
        others = total_bytes - free_bytes - reserved_bytes
        rule = (
            f"is too near to the {total_bytes:,} bytes of {device}: drivers, NCCL and other processes hold {others:,}, "
            f"and gaps between allocations may take 1/{GAPS} of a budget"
        )
        yield Problem("memory.device_budget", budget, rule, f"at most {room}")
