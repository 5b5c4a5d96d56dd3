"""The state of a run as the serial model names it: whole tensors, and what of them this rank holds.

Note: whole and held.
Every tensor of a run has one name, the serial model's, and one `ShardSpec`; a rank holds a box of it (tensor
parallelism) and of that an interval (ZeRO).  Whole tensors are gathered one at a time into host memory, so a read costs
the rank one whole copy of what it returns and the ranks one all-gather a tensor; none of it is in the ledger.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn

from colossal_lite.checkpoint import Held
from colossal_lite.memory.chunk import Chunk
from colossal_lite.memory.mover import to_device, to_host
from colossal_lite.mesh import Mesh
from colossal_lite.parallel.swap import cut_values
from colossal_lite.shard import ShardSpec, dims_of
from colossal_lite.zero.optimizer import ChunkOptimizer
from colossal_lite.zero.own import OwnOptimizer
from colossal_lite.zero.weights import Weights


class WholeState:
    """Reads and writes of one model in training, by the serial model's names."""

    def __init__(
        self, model: nn.Module, mesh: Mesh, specs: Mapping[str, ShardSpec], chunks: Sequence[Chunk],
        weights: Weights, optimizer: ChunkOptimizer | OwnOptimizer,
    ) -> None:  # fmt: skip
        self._model, self._mesh, self._specs = model, mesh, specs
        self._chunks, self._weights, self._optimizer = tuple(chunks), weights, optimizer
        self._parameters = dict(model.named_parameters())

    def gradients(self, weight: float) -> dict[str, Tensor]:
        """What the chunks have summed, divided by `weight`; zeros for a parameter that no rank used. Collective."""
        with self._mesh.ledger.paused():
            return {name: whole / weight for name, whole in self._tensors(lambda chunk: chunk.gradient)}

    def state_dict(self) -> dict[str, Tensor]:
        """The serial model's `state_dict()`: copies in host memory, parameters in the master dtype. Collective."""
        first = self._first_names()
        with self._mesh.ledger.paused():
            masters = dict(self._tensors(lambda chunk: chunk.master))
            frozen = {
                name: self._whole(name, p.detach())
                for name, p in self._parameters.items()
                if name not in masters
            }
        whole = masters | frozen
        return {
            name: whole[first[name]].clone() if name in first else to_host(value)
            for name, value in self._weights.state_dict().items()
        }

    def optimizer_state(self) -> dict[str, dict[str, Tensor]]:
        """For each trainable parameter its state tensors in its own shape, and `step`, the updates it has taken."""
        with self._mesh.ledger.paused():
            return {
                entry.name: {n: self._whole(entry.name, t) if t.dim() else t for n, t in state.items()}
                for chunk in self._chunks
                for entry, state in zip(chunk.spec.entries, self._optimizer.states_of(chunk), strict=True)
            }

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Set all parameters and buffers from a serial state dict.

        Raises ValueError listing every missing, unexpected and misshapen tensor, and then changes nothing.
        """
        first = self._first_names()
        own = {  # tensors of the whole shape, without storage
            name: torch.empty(self._specs[first[name]].shape if name in first else value.shape, device="meta")
            for name, value in self._weights.state_dict().items()
        }
        if faults := _misfits(own, state):
            raise ValueError("load_full_state_dict:\n  " + "\n  ".join(faults))
        self._weights.flush()
        layout, coords = self._mesh.layout, self._mesh.coords
        chunked = {entry.name: (chunk, entry) for chunk in self._chunks for entry in chunk.spec.entries}
        with torch.no_grad():
            for name, target in self._weights.state_dict().items():
                value = to_device(state[name], target.device)
                if name in first:
                    value = cut_values(self._specs[first[name]], layout, coords, _reader(value))
                if first.get(name) in chunked:
                    chunk, entry = chunked[first[name]]
                    chunk.load(entry, value)
                else:
                    target.copy_(value)

    def held(self) -> Iterator[Held]:
        """All that a run must find again, as this rank holds it: `model/NAME`, and `STATE/NAME` of the optimizer."""
        for chunk in self._chunks:
            buffers = {"model": chunk.master, **self._optimizer.flat_state(chunk)}
            flat_axes = chunk.sharding_axes
            for entry in chunk.spec.entries:
                local, start = chunk.part_of(entry) or (slice(0, 0), 0)
                for kind, flat in buffers.items():
                    yield Held(f"{kind}/{entry.name}", self._specs[entry.name], flat[local], start, flat_axes)
        trained = {entry.name for chunk in self._chunks for entry in chunk.spec.entries}
        first = self._first_names()
        for name, value in self._weights.state_dict(keep_vars=True).items():
            if name not in trained and first.get(name, name) == name:
                if not value.is_contiguous():
                    value.data = value.data.contiguous()
                spec = self._specs.get(name) or ShardSpec(name, dims_of(value.shape))
                yield Held(f"model/{name}", spec, value.detach().view(-1))

    def _tensors(self, buffer_of: Callable[[Chunk], Tensor]) -> Iterator[tuple[str, Tensor]]:
        """Each trainable parameter's whole tensor in host memory from a buffer [owned] of its chunk. Collective."""
        self._weights.flush()
        for chunk in self._chunks:
            flat = chunk.whole(buffer_of(chunk))
            for entry in chunk.spec.entries:
                local = chunk.of(flat, entry, self._parameters[entry.name].shape)
                yield entry.name, self._whole(entry.name, local)

    def _whole(self, name: str, local: Tensor) -> Tensor:
        """The whole tensor of a parameter's shape in host memory, from every rank's part; collective if it is cut."""
        spec, layout = self._specs[name], self._mesh.layout
        if layout.size(*spec.sharding_axes) == 1:
            return to_host(local)
        comm = self._mesh.axis(*spec.sharding_axes)
        parts = to_host(comm.all_gather(local.contiguous().unsqueeze(0)))
        full = torch.zeros(spec.shape, dtype=local.dtype)
        spec.join(zip(map(layout.coords, comm.ranks), parts, strict=True), full, layout)
        return full

    def _first_names(self) -> dict[str, str]:
        """Every name of a parameter, ties included, to its first."""
        first = {id(p): name for name, p in self._parameters.items()}
        return {n: first[id(p)] for n, p in self._model.named_parameters(remove_duplicate=False)}


def _misfits(own: Mapping[str, Tensor], state: Mapping[str, Tensor]) -> list[str]:
    """Every missing, unexpected and misshapen tensor of `state`, a line each."""
    faults = [f"missing: {name} {tuple(own[name].shape)}" for name in own.keys() - state.keys()]
    faults += [f"unexpected: {name} {tuple(state[name].shape)}" for name in state.keys() - own.keys()]
    faults += [
        f"shape: {name} is {tuple(state[name].shape)}, the model has {tuple(own[name].shape)}"
        for name in own.keys() & state.keys()
        if own[name].shape != state[name].shape
    ]
    return sorted(faults)


def _reader(value: Tensor) -> Callable[[int, int], Tensor]:
    flat = value.reshape(-1)
    return lambda start, stop: flat[start:stop]
