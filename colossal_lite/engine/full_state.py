"""Gathers and loads full tensors by the serial model's names, and lists the part of each that this rank holds.

Note: full and held.
Every tensor of a run has one name, the serial model's, and one `ShardSpec`.  A rank holds a box of it (tensor
parallelism), and of that an interval (ZeRO).  It holds no part of another pipeline stage's tensor.  Full tensors are
gathered one at a time into host memory, and broadcast from their stage to the others.  Cost of a read: a full copy on
this rank, and one all-gather and one broadcast a tensor.  The ledger does not count these.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from dataclasses import asdict, is_dataclass
from functools import partial
from typing import Any, Literal, TypeGuard

import torch
from torch import Tensor, nn

from colossal_lite.checkpoint.run_state import HeldTensor
from colossal_lite.engine.engine_parts import EngineParts
from colossal_lite.layers.layer_swap import cut_values
from colossal_lite.memory.chunk import Chunk
from colossal_lite.memory.frozen_chunk import FrozenChunk
from colossal_lite.memory.transfers import to_device, to_host
from colossal_lite.numerics.compile_wrappers import plain_names
from colossal_lite.sharding.shard_spec import ShardSpec, dims_of


class FullState:
    """Reads and writes one model in training, by the serial model's names."""

    def __init__(self, parts: EngineParts) -> None:
        built = parts.built
        self._mesh, self._names, self._stages = parts.context.mesh, built.names, built.stages
        self._specs, self._chunks, self._frozen = built.parallelized.specs, built.chunks, built.frozen
        self._weights, self._optimizer = parts.weights, parts.optimizer
        self._lent: tuple[FrozenChunk, slice, Tensor] | None = None
        """Frozen weights that a load may have changed: a copy of elements of a record."""
        self._parameters = built.names.parameters(built.model)

    def gradients(self, weight: float) -> dict[str, Tensor]:
        """The summed gradients, divided by `weight`; zeros for a parameter that no rank used. Collective."""
        with self._mesh.ledger.paused():
            wide = torch.float32  # or wider
            mine = {
                name: whole.to(torch.promote_types(whole.dtype, wide)) / weight
                for name, whole in self._tensors("gradient")
            }
            return self._of_all_stages(mine)

    def state_dict(self) -> dict[str, Tensor]:
        """As `Engine.full_state_dict`. Collective."""
        first = self._names.first
        with self._mesh.ledger.paused():
            mine = dict(self._tensors("master"))
            for chunk in self._frozen:
                flat = chunk.whole(chunk.local_shard)
                for entry in chunk.spec.entries:
                    local = chunk.of(flat, entry, self._parameters[entry.name].shape)
                    mine[entry.name] = self._whole(entry.name, local)
            in_chunks = set(mine)
            for name, parameter in self._parameters.items():
                if name not in in_chunks:
                    mine[name] = self._whole(name, parameter.detach())
            for name, value in self._weights.state_dict().items():
                if name not in first:
                    mine[name] = to_host(value)
            whole = self._of_all_stages(mine)
        return {
            name: whole[first[name]].clone() if name in first else whole[name] for name in self._names.state
        }

    def optimizer_state(self) -> dict[str, dict[str, Tensor]]:
        """As `Engine.full_optimizer_state`. Collective."""
        with self._mesh.ledger.paused():
            mine = {
                (entry.name, n): self._whole(entry.name, t) if t.dim() else t
                for chunk in self._chunks
                for entry, state in zip(chunk.spec.entries, self._optimizer.states_of(chunk), strict=True)
                for n, t in state.items()
            }
            whole = self._of_all_stages({f"{kind}/{name}": t for (name, kind), t in mine.items()})
        found: dict[str, dict[str, Tensor]] = {}
        for key, tensor in whole.items():
            kind, _, name = key.partition("/")
            found.setdefault(name, {})[kind] = tensor
        return found

    def load(self, state: Mapping[str, Tensor]) -> None:
        """As `Engine.load_full_state_dict`. Raises ValueError for tensors that do not fit, and then changes nothing."""
        first = self._names.first
        state = plain_names(state, self._names.state)
        if faults := _misfits(self._names.state, state):
            raise ValueError("load_full_state_dict:\n  " + "\n  ".join(faults))
        self._weights.flush()
        layout, coords = self._mesh.layout, self._mesh.coords
        chunked = {entry.name: (chunk, entry) for chunk in self._chunks for entry in chunk.spec.entries}
        kept = {entry.name: (chunk, entry) for chunk in self._frozen for entry in chunk.spec.entries}
        with torch.no_grad():
            for name, target in self._weights.state_dict().items():
                value = to_device(state[name], target.device)
                if name in first:
                    value = cut_values(self._specs[first[name]], layout, coords, value)
                if first.get(name) in chunked:
                    chunk, entry = chunked[first[name]]
                    with self._optimizer.at_hand(chunk, write=True):
                        chunk.load(entry, value)
                elif first.get(name) in kept:
                    frozen, entry = kept[first[name]]
                    frozen.load(entry, value)
                else:
                    target.copy_(value)
        self._optimizer.settle()

    def held(self) -> Iterator[HeldTensor]:
        """This rank's part of all tensors of a checkpoint: `model/NAME`, and `STATE/NAME` of the optimizer."""
        for chunk in (*self._chunks, *self._frozen):
            buffers: Mapping[str, Tensor] = {"model": chunk.local_shard}
            if isinstance(chunk, Chunk):
                buffers = {"model": chunk.master, **self._optimizer.flat_state(chunk)}
            flat_axes, is_copy = chunk.sharding_axes, not self._stages.is_first_holder(chunk.spec.key.stages)
            for entry in chunk.spec.entries:
                local, start = chunk.part_of(entry) or (slice(0, 0), 0)
                for kind, flat in buffers.items():
                    spec, fetch = self._specs[entry.name], None
                    if flat.is_meta and isinstance(chunk, Chunk):
                        fetch = partial(self._fetched, chunk, kind, local)
                    elif isinstance(chunk, FrozenChunk) and chunk.record is not None:
                        fetch = partial(self._lend, chunk, local)
                    yield HeldTensor(
                        f"{kind}/{entry.name}", spec, flat[local], start, flat_axes, is_copy, fetch
                    )
        seen = {entry.name for chunk in (*self._chunks, *self._frozen) for entry in chunk.spec.entries}
        for name, value in self._weights.state_dict(keep_vars=True).items():
            name = self._names.first.get(name, name)
            if name not in seen:
                seen.add(name)
                if not value.is_contiguous():
                    value.data = value.data.contiguous()
                if value.is_complex():  # no format of safetensors: pairs of numbers in the last axis
                    value = torch.view_as_real(value)
                spec = self._specs.get(name) or ShardSpec(name, dims_of(value.shape))
                is_copy = name in self._stages.homes and not self._stages.is_first_holder(
                    self._stages.homes[name]
                )
                yield HeldTensor(f"model/{name}", spec, value.detach().view(-1), is_copy=is_copy)

    def _fetched(self, chunk: Chunk, kind: str, local: slice, write: bool) -> Tensor:
        return self._optimizer.opened(chunk, kind, local, write=write)

    def _lend(self, chunk: FrozenChunk, local: slice, write: bool) -> Tensor:
        """Elements of frozen weights; to be changed a copy, which `settle` writes."""
        self.settle()
        if not write:
            return chunk.local_shard[local]
        self._lent = chunk, local, chunk.local_shard[local].clone()
        return self._lent[2]

    def settle(self) -> None:
        """Write the frozen weights that a load has changed. Raises FrozenError where others have them too."""
        if self._lent is not None:
            (chunk, local, changed), self._lent = self._lent, None
            chunk.load_own(local, changed)

    def _tensors(self, buffer: Literal["gradient", "master"]) -> Iterator[tuple[str, Tensor]]:
        """Each trainable parameter's full tensor in host memory, from a buffer [owned] of its chunk. Collective."""
        self._weights.flush()
        for chunk in self._chunks:
            with self._optimizer.at_hand(chunk) if buffer == "master" else nullcontext():
                flat = chunk.whole(chunk.masters() if buffer == "master" else chunk.gradient)
                for entry in chunk.spec.entries:
                    local = chunk.of(flat, entry, self._parameters[entry.name].shape)
                    yield entry.name, self._whole(entry.name, local)

    def _whole(self, name: str, local: Tensor) -> Tensor:
        """Gather a tensor of a parameter's shape into host memory. Collective if the parameter is split."""
        spec, layout = self._specs[name], self._mesh.layout
        if layout.size(*spec.sharding_axes) == 1:
            return to_host(local)
        comm = self._mesh.axis(*spec.sharding_axes)
        parts = to_host(comm.all_gather(local.contiguous().unsqueeze(0)))
        full = torch.zeros(spec.shape, dtype=local.dtype)
        spec.join(zip(map(layout.coords, comm.ranks), parts, strict=True), full, layout)
        return full

    def _of_all_stages(self, mine: dict[str, Tensor]) -> dict[str, Tensor]:
        """Add the other stages' tensors to this rank's own; the first stage that has one broadcasts it."""
        pipeline = self._mesh.axis("pipeline")
        if pipeline.size == 1:
            return mine
        forms = {name: [str(t.dtype).removeprefix("torch."), list(t.shape)] for name, t in mine.items()}
        rows = pipeline.gather_json(forms)
        whole = {}
        for name in dict.fromkeys(name for row in rows for name in row):
            source = next(coord for coord, row in enumerate(rows) if name in row)
            dtype, shape = rows[source][name]
            blank = torch.empty(shape, dtype=getattr(torch, dtype))
            tensor = mine[name].contiguous() if source == pipeline.coord else blank
            whole[name] = pipeline.broadcast(tensor, source)
        return whole


def _misfits(own: Mapping[str, tuple[int, ...]], state: object) -> list[str]:
    """Every missing, unexpected and misshapen tensor of `state`, and all that is no tensor with values, a line each."""
    if not isinstance(state, Mapping):
        return [
            f"it is of type {type(state).__name__}; legal: a mapping of names to tensors, as model.state_dict()"
        ]
    faults = [f"missing: {name} {own[name]}" for name in own.keys() - state.keys()]
    for name, value in state.items():
        if name not in own:
            inner = isinstance(value, Mapping) and not own.keys().isdisjoint(plain_names(value, own))
            legal = f"; legal: state[{name!r}] alone, which has the weights" * inner
            faults.append(f"unexpected: {name} {_form(value)}{legal}")
        elif not _has_values(value):
            faults.append(f"type: {name} is {_form(value)}; legal: a dense tensor with values")
        elif own[name] != tuple(value.shape):
            faults.append(f"shape: {name} is {_form(value)}, the model has {own[name]}")
    return sorted(faults)


def _has_values(value: object) -> TypeGuard[Tensor]:
    """Whether it is a tensor that can be copied into another of its shape."""
    if not isinstance(value, Tensor):
        return False
    return value.layout is torch.strided and not (value.is_nested or value.is_meta or value.is_quantized)


def _form(value: object) -> str:
    """A tensor's shape, or what a value is that is no plain tensor."""
    if _has_values(value):
        return f"{tuple(value.shape)}"
    if not isinstance(value, Tensor):
        return f"of type {type(value).__name__}"
    kinds = {"nested": value.is_nested, "quantized": value.is_quantized, "on the meta device": value.is_meta}
    return next((kind for kind, is_so in kinds.items() if is_so), f"{value.layout}")


def own_config(model: nn.Module) -> dict[str, Any] | None:
    """A model's own configuration as JSON values: a dataclass, or Hugging Face's configuration."""
    config: Any = getattr(model, "config", None)
    if hasattr(config, "to_dict"):
        facts = _as_json(config.to_dict())
        return facts | {"architectures": facts.get("architectures") or [type(model).__name__]}
    return _as_json(asdict(config)) if is_dataclass(config) and not isinstance(config, type) else None


def _as_json(facts: dict[str, Any]) -> dict[str, Any]:
    """The values as they are read back from a file."""
    found: dict[str, Any] = json.loads(json.dumps(facts, default=str))
    return found
