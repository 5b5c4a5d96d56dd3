"""Chooses the side of each chunk's update: as the config says, or the fastest mix by rates, given or measured here.

Note: one choice for all ranks.
Ranks take the smallest of their rates, and then of their choices the middle one.  So all who share a chunk update it
on the same side.  Cost: measuring takes about a second, once an engine, where `memory.update_on="auto"` has no rates.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import astuple
from fractions import Fraction
from math import inf
from typing import Any

import torch
from torch import Tensor

from colossal_lite.config.memory_schema import MemoryConfig
from colossal_lite.kernels import TORCH, Ops
from colossal_lite.memory.copy_streams import LinkSpeed
from colossal_lite.memory.transfers import copied_to, to_host
from colossal_lite.schedule.update_mix import UpdateMix, mix_of, mix_with
from colossal_lite.schedule.update_rates import FoundMix, Rates, UpdateBytes, fastest_mix

Gather = Callable[[Any], list[Any]]
"""Returns what each rank gave, on all ranks."""
MEASURED_NUMEL = 2**20
TRIALS = 5


def alone(value: Any) -> list[Any]:
    """The `Gather` of a single process."""
    return [value]


class UpdateChoice:
    """The mix of a rank's chunks, once their bytes are known."""

    def __init__(self, memory: MemoryConfig, ops: Ops, device: torch.device, gather: Gather = alone) -> None:
        self._memory, self._ops, self._device, self._gather = memory, ops, device, gather
        self.found: FoundMix | None = None
        """What "auto" has found; None where the config says."""

    def __call__(self, work: UpdateBytes, ids: Sequence[int]) -> UpdateMix:
        """Collective under "auto". `ids`: as `mix_of` has them. Raises ValueError where rates are neither given nor can
        be measured."""
        if self._memory.update_on != "auto":
            return mix_of(self._memory.host_share, ids)
        given = given_rates(self._memory) or self._measured()
        rates = Rates(*(min(row) for row in zip(*self._gather(list(astuple(given))), strict=True)))
        found = fastest_mix(work, rates)
        rows = self._gather([[*found.host_share.as_integer_ratio()], sorted(found.chosen or ()), [*ids]])
        shares = sorted(Fraction(*share) for share, _, _ in rows)
        self.found = found
        if found.chosen is not None and all(row == rows[0] for row in rows):
            return mix_with(sorted(found.chosen), len(ids))
        return mix_of(shares[len(shares) // 2], ids)

    def _measured(self) -> Rates:
        if self._device.type == "meta":
            raise ValueError(
                "memory.update_on = 'auto': a plan does not measure this machine; legal: memory.rates="
                "dict(host_update=, device_update=, up=, down=) of the machine that it is for"
            )
        return measured_rates(
            self._device, self._ops, LinkSpeed(self._memory.link_bandwidth, self._memory.link_latency_s)
        )


def given_rates(memory: MemoryConfig) -> Rates | None:
    """The rates of the config; None if it has none."""
    rates = memory.rates
    if None in (rates.host_update, rates.device_update, rates.up, rates.down):
        return None
    assert rates.host_update and rates.device_update and rates.up and rates.down
    return Rates(
        rates.host_update, rates.device_update, rates.up, rates.down, rates.host_memory or inf, rates.call_s
    )


def measured_rates(device: torch.device, ops: Ops, speed: LinkSpeed) -> Rates:
    """Of this machine, by the AdamW of each side and copies of a few megabytes, the best of some trials. A link with an
    emulated speed has that."""
    host_s = _seconds(
        lambda state: _updated(TORCH if device.type != "cpu" else ops, state), torch.device("cpu")
    )
    device_s = _seconds(lambda state: _updated(ops, state), device)
    up = down = copied = (
        MEASURED_NUMEL * 4 / _seconds(lambda state: state[0].copy_(state[1]), torch.device("cpu"))
    )
    if speed.bandwidth_bytes_s:
        up = down = speed.bandwidth_bytes_s
    elif device.type != "cpu":
        up = MEASURED_NUMEL * 4 / _seconds(lambda state: copied_to(state[0], device), torch.device("cpu"))
        down = MEASURED_NUMEL * 4 / _seconds(lambda state: to_host(state[0]), device)
    return Rates(MEASURED_NUMEL / host_s, MEASURED_NUMEL / device_s, up, down, 2 * copied, speed.latency_s)


def _updated(ops: Ops, state: Sequence[Tensor]) -> None:
    param, grad, mean, square = state
    ops.adamw_(param, grad, mean, square, step=1, lr=1e-3, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.0)


def _seconds(work: Callable[[Sequence[Tensor]], object], device: torch.device) -> float:
    state = [torch.zeros(MEASURED_NUMEL, device=device) for _ in range(4)]
    found = []
    for _ in range(TRIALS + 1):
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        start = time.perf_counter()
        work(state)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        found.append(time.perf_counter() - start)
    return max(min(found[1:]), 1e-9)
