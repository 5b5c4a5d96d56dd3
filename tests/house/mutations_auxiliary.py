"""Plants faults in auxiliary losses: their weights, their gradients, their recomputation."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from typing import Any

import torch

from tests.house.mutations_step import Faults
from tests.shared.parity import Case

# ---- auxiliary losses ----


def _told_by_all(original: Any, self: Any, name: str) -> Any:
    return replace(original(self, name), tells=True)


def _of_own_samples(original: Any, self: Any, *, samples: int, labels: int) -> None:
    original(self, samples=samples // 2, labels=labels)


def _of_own_tokens(original: Any, self: Any, per: Any, x: torch.Tensor) -> int:
    return original(replace(self, tokens=1), per, x)


def _heard_for_ever(original: Any, self: Any, into: torch.Tensor, samples: int) -> Any:
    original(self, into, samples).__enter__()
    return contextlib.nullcontext()


def _without_a_gradient(original: Any, self: Any, name: str, factor: float) -> float:
    return original(self, name, factor) * (not name.startswith("blocks.0"))


def _seed_of_one(original: Any, self: Any, name: str, factor: float) -> float:
    original(self, name, factor)
    return factor


def _as_many_as_samples(original: Any, self: Any, *, samples: int, labels: int) -> None:
    original(self, samples=samples, labels=12 * samples)


EMITS = Case(auxiliary=("token", "element"), ragged=True, steps=1, config=dict(clip_grad_norm=0.05))
EMITS_PIPED = replace(EMITS, pipeline=dict(size=2, schedule="zb-h1", micro_batches=3))
EMITS_AGAIN = replace(EMITS, config=dict(activation_checkpoint="full"))
EMITS_WHOLE = replace(EMITS, tensor=2, sequence_parallel=False)
EMITS_RING = replace(EMITS, sequence=2)
EMITS_HALF = replace(EMITS, config=dict(precision="fp16"))
FAULTS_AUXILIARY: Faults = {
    "auxiliary losses told by every rank": (EMITS_WHOLE, "TensorParallel1D.share_at", _told_by_all),
    "auxiliary losses over a rank's own samples": (EMITS, "AuxiliaryLosses.begin", _of_own_samples),
    "auxiliary losses over a rank's own tokens": (EMITS_RING, "Share.units_of_a_sample", _of_own_tokens),
    "auxiliary losses weighed against all labels": (EMITS, "AuxiliaryLosses.begin", _as_many_as_samples),
    "recomputed auxiliary losses count again": (EMITS_AGAIN, "AuxiliaryLosses.heard", _heard_for_ever),
    "auxiliary gradients of a stage lost": (EMITS_PIPED, "AuxiliaryLosses._gradient", _without_a_gradient),
    "auxiliary gradients without the loss scale": (EMITS_HALF, "AuxiliaryLosses._gradient", _seed_of_one),
}

FAULTS: Faults = FAULTS_AUXILIARY
