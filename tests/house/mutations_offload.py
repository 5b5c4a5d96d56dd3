"""Plants faults in offloaded state: on the host, updated on the host, on disk, on three tiers."""

from __future__ import annotations

import tempfile
import time
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from tests.house.mutations_step import CASE, Faults
from tests.house.mutations_zero import SHARDED

# ---- state on the host ----


def _refilled_before_it_is_empty(original: Any, self: Any, target: Any, source: Any, **more: Any) -> Any:
    if self.name == "d2h":
        self.run(partial(time.sleep, 0.02), 0)  # what is copied out is what is there by then
    return original(self, target, source)


def _not_taken_back(original: Any, self: Any, index: int) -> None:
    before = self._host.rest[index].clone()
    original(self, index)
    if index == len(self._records) - 1:
        self.flush()
        self._host.rest[index].copy_(before)


def _read_before_it_came(original: Any, self: Any, index: int) -> Any:
    self._incoming[index].wait()
    self._here[index].fill_(0.1)
    return original(self, index)


HOST = replace(
    SHARDED,
    chunk_bytes=8 * 1500,
    config=CASE.config
    | dict(memory=dict(placement="host"), optimizer=dict(type="adamw", lr=0.01, weight_decay=0.1)),
)
FAULTS_HOST: Faults = {
    "a slot is refilled before it is empty": (HOST, "Link.copy", _refilled_before_it_is_empty),
    "the last state is not taken back": (HOST, "OffloadedOptimizerStates.evict", _not_taken_back),
    "state is read before it has come": (HOST, "OffloadedOptimizerStates.here", _read_before_it_came),
}


# ---- updates on the host ----


def _not_down_yet(original: Any, self: Any, index: int, part: Any) -> None:
    self._down.run(partial(time.sleep, 0.2), 0)
    original(self, index, part)
    self._came[index, part] = self._came[index, part][0], self.updates_link.run(int, 0)


def _read_before_they_are_up(original: Any, self: Any, index: int) -> None:
    self._up.run(partial(time.sleep, 0.2), 0)
    original(self, index)
    self._coming[index] = self.updates_link.run(int, 0)


def _without_the_norm(original: Any, self: Any, totals: Any, factor: float) -> Any:
    return original(self, replace(totals, squares=0.0), factor)


def _one_count_late(original: Any, self: Any, index: int, spans: Any, *more: Any, **named: Any) -> Any:
    original(self, index, [span._replace(steps=span.steps + 1) for span in spans], *more, **named)


ON_HOST = replace(HOST, config=HOST.config | dict(memory=dict(placement="host", update_on="host")))
FAULTS_ON_HOST: Faults = {
    "an update does not wait for its gradient": (ON_HOST, "HostUpdates.bring", _not_down_yet),
    "weights are read before they are up": (ON_HOST, "HostUpdates.take_up", _read_before_they_are_up),
    "an update before the norm is known": (ON_HOST, "Updates.deferred", _without_the_norm),
    "a step count of the step after": (ON_HOST, "ChunkOptimizer._apply", _one_count_late),
}


# ---- weights and gradients on the host ----


def _sum_overwritten(
    original: Any, self: Any, number: int, target: Any, source: Any, *, add: bool
) -> None:  # fmt: skip
    original(self, number, target, source, add=False)


def _weights_not_taken_back(original: Any, self: Any, index: int) -> None:
    weights = self._chunks[index].weights_at_rest
    assert weights is not None
    before = weights.clone()
    original(self, index)
    self.flush()
    if index == len(self._chunks) - 1:
        weights.copy_(before)


def _gathered_before_it_came(original: Any, self: Any) -> None:
    self._finish_fetch()
    self.full_weight.fill_(0.1)
    original(self)


def _gradient_not_brought(original: Any, self: Any, index: int, **more: Any) -> None:
    original(self, index, **more)
    self._chunks[index].gradient.fill_(0.1)


EVERYTHING = dict(placement="static", host_fraction=dict(weights=1.0, gradients=1.0, optimizer=1.0))
BUDGET = replace(
    HOST,
    layers=3,
    config=HOST.config | dict(zero=dict(stage=3), memory=EVERYTHING, activation_checkpoint="none"),
)
FAULTS_BUDGET: Faults = {
    "a sum on the host is overwritten": (BUDGET, "GradientOffloadBuffer.send", _sum_overwritten),
    "the last weights are not taken back": (BUDGET, "HostShardStream.evict", _weights_not_taken_back),
    "a shard is gathered before it has come": (BUDGET, "Chunk.gather_fetched", _gathered_before_it_came),
    "a gradient is not brought for its update": (BUDGET, "HostShardStream.here", _gradient_not_brought),
}


# ---- state on disk ----


def _not_awaited(original: Any, self: Any, index: int, bring: Any) -> None:
    slot, came = self._came[index]
    came.wait()
    self._elements(slot, index).fill_(0.1)  # what was in the slot before
    original(self, index, bring)


def _of_the_record_before(original: Any, self: Any, record: int, target: torch.Tensor) -> None:
    original(self, max(record - 1, 0), target)


def _written_before_it_came(original: Any, self: Any, index: int) -> None:
    slot, came = self._leaving[index]
    came.wait()
    before = slot.clone()
    slot.zero_()
    original(self, index)
    self._outgoing[index].wait()
    slot.copy_(before)


def _not_written(original: Any, self: Any, index: int) -> None:
    if index == 0:
        _nothing_written(original, self, index)
    else:
        original(self, index)


def _nothing_written(original: Any, self: Any, index: int) -> None:
    slot, came = self._leaving.pop(index)
    self._passing.give(slot, came)


DISK = replace(
    HOST,
    config=HOST.config | dict(memory=dict(placement="disk", disk_dir=tempfile.gettempdir())),
)
FAULTS_DISK: Faults = {
    "a read from disk is not awaited": (DISK, "DiskStorage.leave", _not_awaited),
    "a record is read for another": (DISK, "DiskFile.read", _of_the_record_before),
    "a record is written before it has come": (DISK, "DiskStorage.write", _written_before_it_came),
    "a record is not written": (DISK, "DiskStorage.write", _not_written),
}


# ---- state on three tiers ----


def _not_brought_along(original: Any, self: Any, index: int, home: Any) -> None:
    original(self, index, home)
    for part in home.opened(index, write=True).values():
        part.fill_(0.1)  # what was there before
    home.settle()


def _stays_as_it_was(original: Any, self: Any, index: int, take: Any) -> None:
    before = self.rest[index].clone()
    original(self, index, take)
    self.finish()
    if index == max(self.rest):
        self.rest[index].copy_(before)


BUDGETS = dict(placement="auto", device_budget=400_000, host_budget=195_000, disk_dir=tempfile.gettempdir())
THREE = replace(BUDGET, config=BUDGET.config | dict(memory=BUDGETS))
"""When it is settled eight of twelve records are on disk and four on the host."""
FAULTS_THREE: Faults = {
    "a record that changes its tier is not brought along": (
        THREE,
        "OffloadedOptimizerStates._move",
        _not_brought_along,
    ),
    "the last state on the host is not taken back there": (THREE, "HostStorage.come_back", _stays_as_it_was),
    "a record among others on disk is not written": (THREE, "DiskStorage.write", _nothing_written),
}

FAULTS: Faults = FAULTS_HOST | FAULTS_ON_HOST | FAULTS_BUDGET | FAULTS_DISK | FAULTS_THREE
