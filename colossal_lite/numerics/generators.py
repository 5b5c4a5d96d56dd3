"""Reads, keeps and seeds the global random generators of a process: torch's, Python's and numpy's.

Note: proofs run a user's code on small copies, which may draw.  They leave the generators as they were, so that a run
draws what it would draw without them.  Datasets, and an optimizer of the user's own, may draw too.  Their numbers
follow from the seed of the run alone: every rank has them, and so has a resumed run.
"""

from __future__ import annotations

import hashlib
import random
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

TORCH, PYTHON, NUMPY = "torch's own generator", "Python's random", "numpy.random"


def states(devices: Sequence[torch.device] = ()) -> Mapping[str, Any]:
    """The state of each generator, by its name. `devices`: of CUDA, whose generators are read too."""
    numpy = sys.modules.get("numpy")
    return {
        TORCH: [torch.get_rng_state(), *map(torch.cuda.get_rng_state, devices)],
        PYTHON: random.getstate(),
        **({} if numpy is None else {NUMPY: numpy.random.get_state()}),
    }


def drawn_between(before: Mapping[str, Any], after: Mapping[str, Any]) -> str:
    """The first generator that has drawn, or ""."""
    return next((name for name, state in after.items() if _differ(before.get(name, state), state)), "")


def _differ(one: Any, other: Any) -> bool:
    if isinstance(one, list):
        return not all(map(torch.equal, one, other))
    pairs = zip(one, other, strict=True)
    return any(bool((a != b).any()) if hasattr(a, "any") else a != b for a, b in pairs)


@contextmanager
def generators_kept(devices: Sequence[torch.device] = ()) -> Iterator[None]:
    """Context: the generators are behind it as they were before it."""
    before = states(devices)
    try:
        yield
    finally:
        _restore(before, devices)


def _restore(kept: Mapping[str, Any], devices: Sequence[torch.device]) -> None:
    own, *on_devices = kept[TORCH]
    torch.set_rng_state(own)
    for state, device in zip(on_devices, devices, strict=True):
        torch.cuda.set_rng_state(state, device)
    random.setstate(kept[PYTHON])
    if NUMPY in kept:
        sys.modules["numpy"].random.set_state(kept[NUMPY])


def seed_from(*key: int | str, devices: Sequence[torch.device] = ()) -> None:
    """Set the generators to what follows from `key`, and from nothing else."""
    digest = hashlib.blake2b(repr(key).encode(), digest_size=8).digest()
    number = int.from_bytes(digest, "little")
    torch.default_generator.manual_seed(number >> 1)
    for device in devices:
        with torch.cuda.device(device):
            torch.cuda.manual_seed(number >> 1)
    random.seed(number)
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed(number & 0xFFFFFFFF)


class OwnDraws:
    """Generators of code that runs in turns with other code. They begin at `key`, and go on in each turn."""

    def __init__(self, *key: int | str, devices: Sequence[torch.device] = ()) -> None:
        self._key, self._devices = key, devices
        self._state: Mapping[str, Any] | None = None

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Context in which that code runs. The generators of all other code are behind it as they were."""
        with generators_kept(self._devices):
            if self._state is None:
                seed_from(*self._key, devices=self._devices)
            else:
                _restore(self._state, self._devices)
            try:
                yield
            finally:
                self._state = states(self._devices)
