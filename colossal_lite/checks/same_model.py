"""Refuses a model that is not the same on all ranks: its layers, shapes, values, and which parameters are frozen.

Note: two exchanges at most.  Each rank sends a digest of its layers.  Only if these differ do ranks send the layers
themselves, to name the first that differs.  Values are compared by a digest of each tensor.  Configs of our models
and of Hugging Face's are compared too.  Settings of layers that a user has written are not: ranks may have reasons
for other ones.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

import torch
from torch import nn

from colossal_lite.checks.rank_comparison import RanksDifferError, frozen_apart
from colossal_lite.distributed.communicator import Communicator
from colossal_lite.memory.transfers import to_host


def check_same_model(module: nn.Module, world: Communicator, *, values: bool) -> None:
    """Compare a whole model, before it is sharded. `values`: those of its tensors too.

    Collective over the world. Raises ValueError on every rank, with the first difference and its ranks."""
    if world.size == 1:
        return
    _check_layers(module, world)
    digests = {
        name: hashlib.blake2b(
            to_host(value).contiguous().view(-1).view(torch.uint8).numpy().data, digest_size=8
        ).hexdigest()
        for name, value in (module.state_dict() if values else {}).items()
    }
    frozen = [name for name, parameter in module.named_parameters() if not parameter.requires_grad]
    with world.ledger.paused():
        told = world.gather_json(dict(digests=digests, frozen=frozen))
    rows = [row["digests"] for row in told]
    for name in rows[0]:
        odd = [rank for rank, row in enumerate(rows) if row[name] != rows[0][name]]
        if odd:
            raise ValueError(
                f"model: {name} on ranks {odd} differs from rank 0; build it from one seed on every rank, or pass "
                f"a callable to initialize"
            )
    for rank, row in enumerate(told):
        if fault := frozen_apart(0, told[0]["frozen"], rank, row["frozen"]):
            raise RanksDifferError(fault)


def _configs_of(module: nn.Module) -> dict[str, str]:
    """Every setting of the configs in a model, ours and Hugging Face's."""
    found: dict[str, str] = {}
    seen: set[int] = set()
    for name, layer in module.named_modules():
        config: Any = vars(layer).get("config")
        if id(config) in seen or not type(config).__module__.startswith(("colossal_lite.", "transformers.")):
            continue
        seen.add(id(config))
        values = config.to_dict() if hasattr(config, "to_dict") else asdict(config)
        at = f"{name}.config" if name else "config"
        found |= {f"{at}.{key}": repr(value) for key, value in _settings(values).items()}
    return found


def _settings(value: Any) -> Any:
    """A value of a config without what may differ between ranks: order, paths of its files, addresses."""
    if isinstance(value, Mapping):
        names = [name for name in value if not str(name).startswith("_") and name != "transformers_version"]
        return {name: _settings(value[name]) for name in sorted(names, key=str)}
    if isinstance(value, list | tuple):
        return [_settings(each) for each in value]
    if isinstance(value, set | frozenset):
        return sorted(repr(_settings(each)) for each in value)
    is_plain = value is None or isinstance(value, str | int | float | torch.dtype)
    return value if is_plain else type(value).__qualname__


@contextmanager
def told_to_all(world: Communicator) -> Iterator[None]:
    """Context of checks of a rank's own model. Collective at its end: a ValueError of one rank ends all of them."""
    own: ValueError | None = None
    try:
        yield
    except ValueError as error:
        own = error
    with world.ledger.paused():
        faults = world.gather_json(None if own is None else str(own))
    if own is not None:
        raise own
    if found := [(rank, fault) for rank, fault in enumerate(faults) if fault is not None]:
        raise RanksDifferError(f"{found[0][1]} (on rank {found[0][0]}, and not on rank {world.coord})")


def _check_layers(module: nn.Module, world: Communicator) -> None:
    """Raises RanksDifferError for tensors of other shapes than on rank 0, and layers of torch with other settings.

    So for a model of ours, or of Hugging Face, with another config."""
    layers = {
        name or "it": f"{type(layer).__name__}({layer.extra_repr()})"
        for name, layer in module.named_modules()
        if type(layer).__module__.startswith("torch.nn.")
    } | _configs_of(module)
    mine = layers | {name: f"{[*value.shape]} {value.dtype}" for name, value in module.state_dict().items()}
    digest = hashlib.blake2b(repr(mine).encode(), digest_size=16).hexdigest()
    with world.ledger.paused():
        if len(set(world.gather_json(digest))) == 1:
            return
        rows = world.gather_json(mine)
    for name in {name: None for row in rows for name in row}:
        for rank, row in enumerate(rows):
            if row.get(name) != rows[0].get(name):
                found = f"{row.get(name, 'absent')} on rank {rank}, {rows[0].get(name, 'absent')} on rank 0"
                raise RanksDifferError(f"model: {name} is {found}; legal: the same model on every rank")
    raise RanksDifferError(
        "model: its layers have another order on some rank than on rank 0; legal: the same model on every rank"
    )
