"""Explains why a memory budget is too small or too large, and names the least change of the config that fits.

Note: the error of a device budget names one change; changes are tried in order, the smallest first.  If the batch can
be forecast, `plan` computes the bytes of each.  If not, only changes are tried whose bytes follow from the measured
ones.
A budget counts bytes of tensors.  A GPU must also have room for drivers, NCCL and gaps between allocations.
Communicators exist when `room_problems` is asked, so what others hold is measured: all that torch has not reserved.
Cost: nothing unless a budget is exceeded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import ceil
from typing import NamedTuple

import torch

from colossal_lite.config.config import Config
from colossal_lite.config.errors import Problem, more_ranks
from colossal_lite.config.memory_schema import MemoryConfig
from colossal_lite.memory.chunk import Chunk
from colossal_lite.memory.weight_chunk import WeightChunk
from colossal_lite.offload.pieces import StateKind, passing_bytes
from colossal_lite.offload.placement import StatePlacement, spilled
from colossal_lite.zero.forward_hooks import ForwardGates
from colossal_lite.zero.optimizer import ChunkOptimizer
from colossal_lite.zero.sharded_weights import ParameterGather
from colossal_lite.zero.state_pieces import first_placement, host_bytes_of, spilled_by
from colossal_lite.zero.user_optimizer import OwnOptimizer

Forecast = Callable[..., Mapping[str, int] | None]
"""Maps a step's samples and tokens on this rank to bytes: of each kind beside the state, and of the whole `device`.
`changes=`: options other than the config's. `trains=False`: an evaluation. `found=`: returns the config
with the mix of updates that the engine has found."""

GAPS = 16
"""One byte in so many is for uncounted ones: of a budget, gaps between allocations."""


def room_problems(budget: int | None, device: torch.device) -> Iterator[Problem]:
    """A budget that a GPU has no room for, now."""
    if budget is None or device.type != "cuda":
        return
    free_bytes, total_bytes = torch.cuda.mem_get_info(device)
    reserved_bytes = torch.cuda.memory_reserved(device)
    room = max(1, min(free_bytes + reserved_bytes, total_bytes) * GAPS // (GAPS + 1))
    if budget > room:
        others = total_bytes - free_bytes - reserved_bytes
        rule = (
            f"is too near to the {total_bytes:,} bytes of {device}: drivers, NCCL and other processes hold {others:,}, "
            f"and gaps between allocations may take 1/{GAPS} of a budget"
        )
        yield Problem("memory.device_budget", budget, rule, f"at most {room}")


class LaterBatch(NamedTuple):
    """A batch after the first step. State lies beside that one and does not move again."""

    words: str
    whole_bytes: int
    """On the device beside this batch, with all state there."""
    first_bytes: int
    """On the device beside this batch, if a run began with it. State would lie elsewhere then."""
    is_foretold: bool
    """Whether a forecast says what it needs. Else that is inferred from smaller batches, and may be far less."""

    def legal(self, budget: int, need: int, change: str | None) -> str:
        """What would fit. A budget between `need` and `whole_bytes` would take more state as well."""
        begin = "; or begin with the largest batch, "
        begin += "beside which state is then placed" if self.is_foretold else "which is then measured"
        if self.first_bytes == self.whole_bytes == need:  # no state that a budget moves
            return f"{need:,} or more{'' if self.is_foretold else begin}"
        if self.is_foretold and self.first_bytes > budget:
            begin += f", with {change}" if change else f", with {self.first_bytes:,} or more"
        return f"{self.whole_bytes:,} or more, which has room for all state{begin}"


def device_problems(
    memory: MemoryConfig, placed: StatePlacement, smaller: Iterator[tuple[str, int]],
    later: LaterBatch | None = None, *, is_floor: bool = False,
) -> Iterator[Problem]:  # fmt: skip
    """Why the device's budget is too small, if it is. `smaller`: changes and the bytes with them, from
    `smaller_steps`; `later`: what the placement is for; `is_floor`: it is of no batch yet."""
    budget, need = memory.device_budget, placed.device_bytes
    if budget is None or need <= budget:
        return
    rows = ", ".join(f"{kind} {held:,}" for kind, tier, held in placed.rows if tier == "device")
    is_least = memory.placement == "auto" and memory.moves
    what = "at the least " if is_least and later is None else ""
    change = next((f"{change} ({held:,} bytes)" for change, held in smaller if held <= budget), None)
    others = "" if is_least else ", or, if that is enough, memory.placement='auto' or a higher zero.stage"
    rest = f"; or {change}" if change else others
    legal = f"{need:,} or more{rest}"
    if is_floor:
        legal = f"more than {need:,}, by what a batch needs, which the first step tells{rest}"
    elif later is not None:
        legal = later.legal(budget, need, change)
        legal += "" if is_least else rest
    whose = "" if later is None else later.words
    yield Problem(
        "memory.device_budget", budget, f"{whose}the device needs {need:,} bytes {what}({rows})", legal
    )


@dataclass(frozen=True)
class HostBudget:
    """Why the host's budget is too small for the state of an engine, if it is."""

    memory: MemoryConfig
    chunks: Sequence[Chunk]
    optimizer: ChunkOptimizer | OwnOptimizer
    device: torch.device
    outlives: bool
    """Whether a store takes all state when the engine is closed."""
    stage: int
    """Of ZeRO; without it each data rank has all state."""

    def problems(self, placed: StatePlacement) -> Iterator[Problem]:
        memory, budget, ranks, left = self.memory, self.memory.host_budget, more_ranks(self.stage), 0
        if budget is None:
            return
        held, first = self._bytes(placed), placed.first_host_bytes
        if self.outlives:
            at_first = first_placement(memory, placed, self.device)
            left = max(self._left_bytes(placed), self._left_bytes(at_first))
        if left > max(held, first, budget):
            rule = f"{left:,} bytes are on the host when the engine is closed: the store takes all state"
            legal = f"{left:,} or more, {ranks}; or no store: a checkpoint hands on what the host cannot hold"
            yield Problem("memory.host_budget", budget, rule, legal)
        elif max(held, first) > budget:
            least = " at the least" if memory.spills_to_disk else ""
            when = ", before the device takes any" if first > held else ""
            rule = f"{max(held, first):,} bytes rest on the host or pass through it{least}{when}"
            other = "smaller fractions, " if memory.placement == "static" else ""
            other += "a larger device_budget, " if memory.placement == "auto" and not when else ""
            disk_bytes = self._on_disk_instead(placed, budget)
            disk = f"; or memory.disk_dir, for {disk_bytes:,} bytes of optimizer state" if disk_bytes else ""
            legal = f"{max(held, first):,} or more, {other}{ranks}{disk}"
            yield Problem("memory.host_budget", budget, rule, legal)

    def _bytes(self, placed: StatePlacement) -> int:
        if self.memory.moves:
            return host_bytes_of(placed, self.device)
        parts = (self.optimizer.tiers, self.optimizer.host_updates)
        return sum(part.host_bytes for part in parts if part)

    def _left_bytes(self, placed: StatePlacement) -> int:
        """On the host while the engine is closed. Then weights and records from elsewhere are in its store, and
        gradients and buffers are still allocated."""
        optimizer, stored = self.optimizer, (StateKind.WEIGHTS, StateKind.OPTIMIZER)
        assert isinstance(optimizer, ChunkOptimizer)
        there = sum(
            p.resting_bytes for p in placed.pieces if p.name in placed.on_host and p.name.kind in stored
        )
        if not self.memory.moves and optimizer.tiers:
            there = optimizer.tiers.record_bytes("host")
        records = sum(map(optimizer.record_bytes, range(len(self.chunks))))
        weights = sum(chunk.types.resting_bytes(chunk.local_shard.numel()) for chunk in self.chunks)
        return self._bytes(placed) - there + records + weights

    def _on_disk_instead(self, placed: StatePlacement, budget: int) -> int | None:
        """Bytes that a disk would hold, at the most, if there were one; None if that would not help."""
        with_disk = self.memory.model_copy(update={"disk_dir": "."})
        could_spill = with_disk.spills_to_disk and not self.memory.spills_to_disk
        if not could_spill or self.optimizer.tiers is None:
            return None
        if not self.memory.moves:
            sizes = {i: size for i in range(len(self.chunks)) if (size := self.optimizer.record_bytes(i))}
            room = budget - self._bytes(placed) + sum(sizes.values())
            some = {i: sizes[i] for i in spilled(sizes, room)}
            left = sum(sizes.values()) - sum(some.values()) + passing_bytes(some)
            return sum(some.values()) if left <= room else None
        every = frozenset(piece.name for piece in placed.pieces if piece.moves)
        found = [
            spilled_by(with_disk, each, self.device) for each in (placed, replace(placed, on_host=every))
        ]
        return max(each.read_bytes for each in found) if max(map(self._bytes, found)) <= budget else None


def smaller_steps(
    config: Config, samples: int, placed: StatePlacement, weights: ForwardGates,
    chunks: Sequence[WeightChunk], forecast: Forecast,
) -> Iterator[tuple[str, int]]:  # fmt: skip
    """Changes of the config, the least first, and the bytes that the device would then hold. `samples`: of a step of a
    rank; `chunks`: frozen ones too."""
    need, of, accumulation = placed.device_bytes, dict(placed.fixed), config.gradient_accumulation
    plan = weights.planned if isinstance(weights, ParameterGather) else lambda prefetch: None
    is_known = forecast(changes=()) is not None
    by_step = config.zero.stage == 2 and config.zero.reduce_every == "step"
    for changes in _changes(config, samples):
        if is_known:
            words = [word for path, value in changes.items() for word in (f"--{path}", str(value))]
            found = forecast(changes=words)
            if found is not None:
                yield _in_words(changes), found["device"]
        elif changes.keys() == {"zero.prefetch"} and (gathers := plan(int(changes["zero.prefetch"]))):
            yield (
                _in_words(changes),
                need - of["gathered"] + gathers.arena_numel * chunks[0].types.compute.itemsize,
            )
        elif changes.keys() == {"gradient_accumulation"} and (accumulation > 1 or not by_step):
            share = accumulation / int(changes["gradient_accumulation"])
            kept = min(of["activations"], _at_any_batch(of["activations"], chunks))
            yield _in_words(changes), need - ceil((of["activations"] - kept) * (1 - share))


def _at_any_batch(activation_bytes: int, chunks: Sequence[WeightChunk]) -> int:
    """Of the bytes measured beside state, those that no smaller batch saves, at the most.  Backward holds the gradient
    of a weight, and a copy.  One byte in `GAPS` is for what else does not follow the batch, as tables of positions."""
    entries = [(entry, chunk.types.compute.itemsize) for chunk in chunks for entry in chunk.spec.entries]
    largest = max(((entry.stop - entry.start) * width for entry, width in entries), default=0)
    return 2 * largest + activation_bytes // GAPS


def _changes(config: Config, samples: int) -> Iterator[Mapping[str, str | int]]:
    """What may make a step of so many samples of a rank smaller, the least change first."""
    zero, now, unit = config.zero, config.gradient_accumulation, config.parallel.tensor.sample_parts
    pipeline = config.parallel.pipeline
    most_parts = samples // (unit * (pipeline.micro_batches or 1) if pipeline.is_staged else unit)
    parts = [now * 2**n for n in range(1, most_parts.bit_length()) if now * 2**n < most_parts]
    parts += [most_parts] * (most_parts > now)
    if unit > 1:  # a grid cuts each micro-batch into equal parts
        parts = [k for k in parts if samples % (k * unit) == 0]
    if zero.stage == 3:
        yield from ({"zero.prefetch": prefetch} for prefetch in range(zero.prefetch - 1, -1, -1))
    by_step = zero.stage == 2 and zero.reduce_every == "step"
    if by_step and now > 1:
        yield {"zero.reduce_every": "micro_batch"}
    yield from ({"gradient_accumulation": k} for k in parts)
    if by_step:  # more micro-batches than one would keep gradients whole
        yield from ({"gradient_accumulation": k, "zero.reduce_every": "micro_batch"} for k in parts)
    if config.activation_checkpoint != "full":
        yield {"activation_checkpoint": "full"}
    if config.memory.placement != "auto":
        yield {"memory.placement": "auto"}
    most: dict[str, str | int] = {"activation_checkpoint": "full"}
    most |= {"gradient_accumulation": parts[-1]} if parts else {}
    most |= {"zero.prefetch": 0} if zero.stage == 3 else {}
    most |= {"zero.reduce_every": "micro_batch"} if by_step else {}
    yield most
    yield most | {"memory.placement": "auto"}


def _in_words(changes: Mapping[str, str | int]) -> str:
    return " with ".join(f"{path}={value!r}" for path, value in changes.items())
