"""Measures the time of each unit of a model on this machine, for the partition 'profiled'.

Note: profiling.
One micro-batch passes through the model unit by unit: the first of an `example` of the run's batches.  Without an
example it is made from the model's sizes.  It has the fewest samples that the mode can cut, and the longest sequence.
Forward and the two halves of backward are timed, as a split schedule runs them.  A unit's parameters exist, with
arbitrary values, only while it runs: a rank never holds more than one unit that is not its own.  Buffers are copies.
All ranks run all units, together with the ranks that share them.  They take the slowest rank's times, so all cut alike.
Two runs may cut differently, since times vary.  The results of a step do not depend on the cut, but for the order of a
norm's sum.
Cost: `ROUNDS` times forward and backward of the model on one micro-batch, once.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from colossal_lite.config.parallel_schema import ModelFacts
from colossal_lite.data.batch import Batch
from colossal_lite.distributed.mesh import Mesh
from colossal_lite.memory.transfers import to_device
from colossal_lite.numerics.random import DropoutStreams
from colossal_lite.parallel.loss import Loss
from colossal_lite.parallel.parallelize import Parallelized
from colossal_lite.pipeline.model_units import Sections, UnitModules
from colossal_lite.pipeline.partition import Unit
from colossal_lite.pipeline.runtime import MessageMeta, flat, inlet
from colossal_lite.transforms.split_backward import (
    BackwardRoot,
    WeightGradStore,
    defer_weights,
    restore_weights,
)

ROUNDS = 3
"""The fastest of these is taken."""
MOST_SAMPLES = 4096


@dataclass(frozen=True)
class Profiler:
    """Times the units of a sharded model whose parameters are not allocated yet."""

    module: nn.Module
    parallelized: Parallelized
    streams: DropoutStreams
    mesh: Mesh
    device: torch.device
    dtype: torch.dtype
    example: Batch | None
    """A micro-batch of the run, on this data rank; None: it is made."""
    loss: Loss

    def costs(self, sections: Sections, units: Sequence[Unit], facts: ModelFacts | None) -> tuple[Unit, ...]:
        """Measure the seconds of each unit's F, I and W (forward, input half and weight half of backward). Collective.

        Raises ValueError for a model without sizes and without an example."""
        if facts is None and self.example is None:
            raise ValueError(
                f"parallel.pipeline.partition='profiled': {type(self.module).__name__} states no sizes in a config, so "
                f"that no batch can be made for it. Legal: initialize(..., example=a batch of the run's size), or "
                f"'balanced', 'uniform', the counts of all stages"
            )
        queue = WeightGradStore()
        defer_weights(self.module, queue)
        try:
            with self.mesh.ledger.paused(), copied_buffers(self.module, self.device):
                seconds = self._seconds(sections, self._micro_batch(facts), queue)
                agreed = self.mesh.world.numbers(self.mesh.world.all_reduce(seconds, op="max"))
        finally:
            restore_weights(self.module)
        return tuple(
            replace(unit, forward=f, input=i, weight=w) for unit, (f, i, w) in zip(units, agreed, strict=True)
        )

    def _micro_batch(self, facts: ModelFacts | None) -> Batch:
        """The example, or the smallest that the mode can cut, as this rank sees it; one row where it has none of it."""
        if self.example is not None:
            return self.parallelized.local_part(self.example).with_one_row()
        assert facts is not None
        for samples in range(1, MOST_SAMPLES):
            ids = (
                torch.arange(samples * facts.sequence, device=self.device).view(samples, -1)
                % facts.vocabulary
            )
            numbers = torch.arange(samples, device=self.device)
            try:
                return self.parallelized.local_part(Batch((ids,), {}, labels=ids, samples=numbers))
            except ValueError:
                if samples == MOST_SAMPLES - 1:
                    raise
        raise AssertionError

    def _seconds(self, sections: Sections, part: Batch, queue: WeightGradStore) -> Tensor:
        """[units, 3] seconds of F, I and W."""
        found, carried = [], None
        for index, unit in enumerate(sections.parts):
            with allocated_parameters(self.module, unit, self.device, self.dtype):
                rounds = []
                for _ in range(ROUNDS):
                    times, given = self._once(sections, index, carried, part, queue)
                    rounds.append(times)
            carried = given
            found.append([min(times) for times in zip(*rounds, strict=True)])
        return torch.tensor(found, dtype=torch.float64, device=self.device)

    def _once(
        self, sections: Sections, index: int, carried: Any, part: Batch, queue: WeightGradStore
    ) -> tuple[tuple[float, float, float], Any]:
        """Run one unit forward and backward. Returns its times, and its outputs for the next unit."""
        self.streams.begin(0, part.samples, part.token_positions, tokens=part.tokens)
        came = None if carried is None else _leaves(carried)
        is_last = index == len(sections.parts) - 1
        begun_s = self._now_s()
        with self.streams.forward(), self.loss.told(part, 1.0):
            outputs = sections.run(index, index + 1, came, self.loss.asked(part))
        if is_last:
            outputs, _ = self.loss.of(outputs, part)
        giver = f"unit {sections.parts[index].name!r}"
        grown = [tensor for tensor in flat(outputs, giver)[1] if tensor.requires_grad]
        forward_s = self._now_s()
        later = []
        if grown:
            ones = [torch.ones_like(tensor) for tensor in grown]
            root = grown[0] if is_last else BackwardRoot.apply(ones, *grown)  # type: ignore[no-untyped-call]
            with queue.open() as later:
                root.backward()
        input_s = self._now_s()
        with torch.no_grad():
            for each in later:
                each.work()
        weight_s = self._now_s()
        return (forward_s - begun_s, input_s - forward_s, weight_s - input_s), outputs

    def _now_s(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()


def _leaves(carried: Any) -> Any:
    """The outputs of a unit, detached. Those that had gradients take gradients."""
    tensors = [inlet(t.detach().requires_grad_(t.requires_grad)) for t in flat(carried)[1]]
    return MessageMeta.of(carried).packed(tensors)


@contextmanager
def copied_buffers(module: nn.Module, device: torch.device) -> Iterator[None]:
    """Replaces a model's buffers by copies on `device` inside the context, so a forward's changes are dropped."""
    kept = [(owner, key, own) for owner in module.modules() for key, own in owner._buffers.items()]
    try:
        for owner, key, own in kept:
            owner._buffers[key] = None if own is None else to_device(own.clone(), device)
        yield
    finally:
        for owner, key, own in kept:
            owner._buffers[key] = own


@contextmanager
def allocated_parameters(
    module: nn.Module, unit: UnitModules, device: torch.device, dtype: torch.dtype
) -> Iterator[None]:
    """Allocates the parameters of one unit on `device` inside the context, with small random values. Ties stay tied."""
    generator = torch.Generator(device).manual_seed(0)
    made: dict[int, nn.Parameter] = {}
    owners = [owner for name in unit.modules for owner in module.get_submodule(name).modules()]
    kept = [(owner, key, p) for owner in owners for key, p in owner.named_parameters(recurse=False)]
    for name in unit.parameters:
        parent, _, key = name.rpartition(".")
        kept.append((module.get_submodule(parent), key, module.get_parameter(name)))
    for _, _, parameter in kept:
        if id(parameter) not in made:
            values = torch.empty(parameter.shape, dtype=dtype, device=device)
            values.normal_(0.0, 0.02, generator=generator)
            made[id(parameter)] = nn.Parameter(values, requires_grad=parameter.requires_grad)
    try:
        for owner, key, parameter in kept:
            owner._parameters[key] = made[id(parameter)]
        yield
    finally:
        for owner, key, parameter in kept:
            owner._parameters[key] = parameter
