"""Chooses the side of each chunk's update: as the config says, or the fastest mix by rates, given or measured here.

Note: one choice for all ranks.
Ranks take the smallest of their rates, and then of their choices the middle one.  So all who share a chunk update it
on the same side.  Cost: measuring takes about a second, once an engine, where `memory.update_on="auto"` has no rates.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import astuple
from fractions import Fraction
from math import inf
from typing import Any

import torch
from torch import Tensor

from colossal_lite.config.memory_schema import MemoryConfig, UpdateOn
from colossal_lite.kernels import TORCH, Ops
from colossal_lite.memory.copy_streams import LinkSpeed
from colossal_lite.memory.transfers import copied_to, to_host
from colossal_lite.schedule.update_mix import ALL_ON_DEVICE, UpdateMix, mix_of
from colossal_lite.schedule.update_rates import (
    Rates,
    UpdateBytes,
    fastest_mix,
    lanes_of,
    simulated_chunks,
    simulated_s,
)

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
        self.found: UpdateOn | None = None
        """What "auto" has found, as the config says it; None where it was not asked."""
        self.lanes = ""
        """The mix in words, with its lanes where there are rates; empty where nothing rests off the device."""

    def __call__(self, work: UpdateBytes, ids: Sequence[int]) -> UpdateMix:
        """Collective under "auto", and where chunks are named. `ids`: as `mix_of` has them. Raises ValueError where
        rates are neither given nor can be measured, and for a number that no chunk has."""
        if self._memory.records_tier == "device":
            return ALL_ON_DEVICE
        rates, on_host = given_rates(self._memory), self._memory.on_host
        if self._memory.update_on == "auto":
            rates = self._agreed(rates or self._measured())
            on_host = self._fastest(work, rates, ids)
            self.found = {"host": float(on_host) if isinstance(on_host, Fraction) else on_host}
        elif not isinstance(on_host, Fraction):
            self._refuse_unknown(on_host, ids)
        mix = mix_of(on_host, ids)
        share = Fraction(len(mix.on_host), max(len(ids), 1))
        self.lanes = f"{len(mix.on_host)} of {len(ids)} chunks are updated on the host"
        if rates is not None:
            count = simulated_chunks(work)
            like = mix if count == len(ids) else mix_of(share, range(count))
            self.lanes += (
                f": {lanes_of(work, rates, share)}, {simulated_s(work, rates, like, count):.3g} s simulated"
            )
        return mix

    def _agreed(self, rates: Rates) -> Rates:
        """The smallest of all ranks. Collective."""
        return Rates(*(min(row) for row in zip(*self._gather(list(astuple(rates))), strict=True)))

    def _fastest(self, work: UpdateBytes, rates: Rates, ids: Sequence[int]) -> Fraction | tuple[int, ...]:
        """The chunks that are updated on the host, where all ranks have the same and find the same; else the middle one
        of their shares. Collective."""
        found = fastest_mix(work, rates)
        chosen = sorted(ids[place] for place in found.chosen or ())
        rows = self._gather([[*found.host_share.as_integer_ratio()], chosen, [*ids]])
        if found.chosen is not None and all(row == rows[0] for row in rows):
            return tuple(chosen)
        shares = sorted(Fraction(*share) for share, _, _ in rows)
        return shares[len(shares) // 2]

    def _refuse_unknown(self, numbers: Collection[int], ids: Sequence[int]) -> None:
        if self._gather is alone:
            return  # a plan knows the chunks of one rank
        known = {number for row in self._gather([*ids]) for number in row}
        if unknown := sorted({*numbers} - known):
            raise ValueError(
                f"memory.update_on = {self._memory.update_on}: no chunk has the number {unknown[0]}; legal: "
                f"{min(known, default=0)} to {max(known, default=0)}"
            )

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
