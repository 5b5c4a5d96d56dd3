"""Chooses the side of each chunk's update: as the config says, or the fastest mix by rates, given or measured here.

Note: one choice for all ranks.
Ranks take the smallest of their rates, and then of their choices the middle one.  So all who share a chunk update it on
the same side.  What a step computes hides updates.  So an engine chooses again when it has seen its first batch
(`expect`), if the operations of the machine are known.  Without given rates it watches its lanes
(engine/update_watch.py), learns from them (`learn`) and chooses again.  Cost: measuring takes some seconds, once an
engine, where `memory.update_on="auto"` has no rates.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Sequence
from dataclasses import astuple, replace
from fractions import Fraction
from math import inf
from pathlib import Path
from typing import Any

import torch

from colossal_lite.config.config import Config
from colossal_lite.config.errors import shown
from colossal_lite.config.memory_schema import RatesConfig, UpdateOn
from colossal_lite.config.rates_file import RatesFile, kept_file, read_rates
from colossal_lite.kernels import Ops
from colossal_lite.memory.copy_streams import LinkSpeed, LinkSpeeds
from colossal_lite.observe.printed_lines import tell
from colossal_lite.schedule.optimizer_updates import NO_ARENA, ArenaWaits
from colossal_lite.schedule.update_mix import ALL_ON_DEVICE, LOOKAHEAD, UpdateMix, mix_of
from colossal_lite.schedule.update_rates import (
    Computing,
    Rates,
    UpdateBytes,
    fastest_mix,
    few_of,
    lanes_of_each,
    simulated_s,
)
from colossal_lite.zero.calibration import machine_name, measure

Gather = Callable[[Any], list[Any]]
"""Gathers the value of each rank to all ranks."""


def alone(value: Any) -> list[Any]:
    """The `Gather` of a single process."""
    return [value]


class UpdateChoice:
    """The mix of a rank's chunks, once their bytes are known."""

    def __init__(self, config: Config, ops: Ops, device: torch.device, gather: Gather = alone) -> None:
        """Raises ValueError for a file of rates that cannot be read."""
        self._config, self._memory = config, (memory := config.memory)
        self._ops, self._device, self._gather = ops, device, gather
        self.found: UpdateOn | None = None
        """The mix that "auto" chose, in the config's form; None under another setting."""
        self.lanes = ""
        """The mix in words, with its lanes where there are rates; empty where nothing rests off the device."""
        self.notices: list[str] = []
        """Lines that rank 0 prints."""
        self.given = memory.rates
        """The rates of the config, or of its file."""
        if memory.rates.file is not None:
            self.given = self._read(Path(memory.rates.file)).rates
        self.rates = rates_of(self.given)
        """By which the mix is found, the same on all ranks under "auto"; None: not known, or not yet."""
        self._flops = self.given.flops
        self.computing: Computing | None = None
        """What a step computes, the same on all ranks; None: not known."""

    @property
    def is_found(self) -> bool:
        """Whether "auto" chooses among chunks off the device."""
        return self._memory.update_on == "auto" and self._memory.records_tier != "device"

    @property
    def learns(self) -> bool:
        """Whether measured lanes may change the rates: given ones stay, so that a run repeats."""
        return self.is_found and rates_of(self.given) is None

    def expect(self, operations: float) -> bool:
        """A step computes so many floating-point operations on this rank. Whether its seconds are known now.
        Collective where they are."""
        if not operations or not self._flops:
            return False
        self._compute(operations / self._flops)
        return True

    def learn(self, rates: Rates, computed_s: float) -> None:
        """Choose by these rates and seconds of computing from now on. Collective."""
        self.rates = rates
        self._compute(computed_s)

    def _compute(self, seconds: float) -> None:
        longest_s = max(self._gather(seconds)) if self.is_found else seconds
        config, zero = self._config, self._config.zero
        self.computing = Computing.of(
            longest_s, recomputes=config.activation_checkpoint == "full",
            gathers_ahead=zero.prefetch if zero.stage == 3 else 0,
            gathers_again=zero.stage == 3 and zero.reshard_after_forward is True,
            micro_batches=config.gradient_accumulation,
        )  # fmt: skip

    def __call__(
        self, parts: Sequence[UpdateBytes], ids: Sequence[int], lookahead: int = LOOKAHEAD
    ) -> UpdateMix:
        """Collective under "auto", and where chunks are named. `ids` and `lookahead`: as `mix_of` has them. Raises
        ValueError where rates are neither given nor can be measured, and for a number that no chunk has."""
        if self._memory.records_tier == "device":
            return ALL_ON_DEVICE
        early = self._memory.sends_gradients_early
        on_host = self._memory.on_host
        if self._memory.update_on == "auto":
            agreed = self.rates = self._agreed(self.rates or rates_of(self._found_here()))
            on_host = self._fastest([replace(part, early=early) for part in parts], agreed, ids, lookahead)
            self.found = {"host": float(on_host) if isinstance(on_host, Fraction) else on_host}
        elif not isinstance(on_host, Fraction):
            self._refuse_unknown(on_host, ids)
        return replace(mix_of(on_host, ids, lookahead), early=early)

    def describe(
        self, parts: Sequence[UpdateBytes], mix: UpdateMix, placed: Callable[[], ArenaWaits] | None = None
    ) -> None:
        """Put the mix of these chunks in words, with its lanes where there are rates, and its seconds where these are
        simulated: not of updates within backward. `placed`: under a budget or shares, where what rests off the device
        is known, what its arena delays. Before it is, there is the choice alone."""
        if self._memory.records_tier == "device":
            return
        if self._memory.moves and placed is None:
            if self.found is not None:
                rule = "chosen as if all that may rest off the device did"
                self.notices.append(f"memory.update_on='auto' is {shown(self.found)}: {rule}")
            return
        on_host = {number for number in mix.on_host if parts[number].record}
        self.lanes = f"{len(on_host)} of {len(parts)} chunks are updated on the host"
        moving = [replace(part, early=mix.early) for part in parts]
        if (rates := self.rates) is not None and any(part.moves for part in moving):
            self.lanes += f": {lanes_of_each(moving, rates, on_host)}"
            if self._config.optimizer.update_when == "step":
                self.lanes += self._seconds(moving, on_host, mix, rates, placed)
        if self.found is not None:
            self.notices.append(f"memory.update_on='auto' is {shown(self.found)}: {self.lanes}")

    def _seconds(
        self, parts: Sequence[UpdateBytes], on_host: Collection[int], mix: UpdateMix, rates: Rates,
        placed: Callable[[], ArenaWaits] | None,
    ) -> str:  # fmt: skip
        few, places = few_of(parts, on_host)
        like = replace(mix, on_host=frozenset(places))
        told = f", {simulated_s(few, rates, like):.3g} s simulated"
        if self.computing is not None:
            is_each = len(few) == len(parts)  # the arena has a place for every chunk
            arena = placed() if placed is not None and is_each else NO_ARENA
            step_s, computed_s = simulated_s(few, rates, like, self.computing, arena), self.computing.s
            told += f"; a step of {step_s:.3g} s simulated, computing {computed_s:.3g} s"
        return told

    def tell(self, rank: int) -> None:
        """Print the notices so far, on rank 0."""
        for line in self.notices if rank == 0 else ():
            tell(line, sys.stderr)
        self.notices.clear()

    def _read(self, path: Path) -> RatesFile:
        found = read_rates(path)
        if self._device.type != "meta" and found.machine != (here := machine_name(self._device)):
            self.notices.append(
                f"memory.rates: {path} is of another machine, {found.machine!r}; this one is {here!r}"
            )
        return found

    def _found_here(self) -> RatesConfig:
        """The rates of this machine that `colossal-lite calibrate` has kept; else measured now by all ranks at once."""
        if self._device.type == "meta":
            raise ValueError(
                "memory.update_on = 'auto': a plan does not measure this machine; legal: memory.rates="
                "dict(host_update=, device_update=, up=) of the machine that it is for, or the file of `colossal-lite "
                "calibrate`"
            )
        if (path := kept_file(machine_name(self._device))) is not None:
            self.notices.append(f"memory.rates: not given; of {path}")
            kept = self._read(path).rates
            self._flops = kept.flops
            return kept
        self.notices.append(
            f"memory.rates: not given; measured now, as `OMP_NUM_THREADS={torch.get_num_threads()} colossal-lite "
            f"calibrate` would keep them"
        )
        return measure(self._device, self._ops).rates

    def _agreed(self, rates: Rates | None) -> Rates:
        """The smallest of all ranks. Collective."""
        assert rates is not None
        return Rates(*(min(row) for row in zip(*self._gather(list(astuple(rates))), strict=True)))

    def _fastest(
        self, parts: Sequence[UpdateBytes], rates: Rates, ids: Sequence[int], lookahead: int
    ) -> Fraction | tuple[int, ...]:
        """The chunks that are updated on the host, where all ranks have the same and find the same; else the middle one
        of their shares. Collective."""
        found = fastest_mix(parts, rates, self.computing, ids, lookahead)
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


def rates_of(rates: RatesConfig) -> Rates | None:
    """The rates by which a mix is found; None where there are none."""
    if rates.host_update is None or rates.device_update is None or rates.up is None:
        return None
    return Rates(
        rates.host_update, rates.device_update, rates.up, rates.down or rates.up, rates.host_memory or inf,
        rates.call_s,
    )  # fmt: skip


def emulated_speeds(rates: RatesConfig) -> LinkSpeeds:
    """The speeds of links and disk that a CPU emulates."""
    up, down = (LinkSpeed(rate, rates.latency_s) for rate in (rates.up, rates.down or rates.up))
    return LinkSpeeds(up, down, LinkSpeed(rates.disk))
