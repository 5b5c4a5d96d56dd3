"""Weights of chunks brought together again before anything computes with them.

Note: gates.
From stage 1 on a rank updates its shard of a chunk and fetches the others' shards, chunk by chunk in forward order,
while the next forward already runs.  A hook before the forward of every module that owns a parameter waits for that
parameter's chunk, so a chunk that is used late has all the time before it.  A parameter that is read in any other way
while its chunk is on its way is NaN (memory/chunk.py), until `flush`.  At stage 3 the same gates gather
(zero/sharded.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

from torch import nn

from colossal_lite.memory.chunk import Chunk


class Weights:
    """Gates before the modules of one model, whose weights are whole between steps."""

    def __init__(
        self, module: nn.Module, parameters: Mapping[str, nn.Parameter], chunks: Sequence[Chunk]
    ) -> None:
        """`parameters`: those of `module` by the names that the chunks have for them."""
        self._module, self._chunks = module, tuple(chunks)
        names = {id(parameter): name for name, parameter in parameters.items()}
        chunk_of = {entry.name: chunk for chunk in chunks for entry in chunk.spec.entries}
        self._handles: list[Any] = []
        for owner in module.modules():
            own = [names[id(p)] for p in owner.parameters(recurse=False)]
            needed = tuple(dict.fromkeys(chunk_of[name] for name in own if name in chunk_of))
            if needed:
                self._handles += self._gates(owner, needed)
        self._handles.append(module.register_state_dict_pre_hook(lambda *_: self._before_state_dict()))

    def forward(self) -> AbstractContextManager[None]:
        """Around the forward of one micro-batch, also where this rank has none."""
        return nullcontext()

    def backward(self) -> AbstractContextManager[None]:
        """Around the backward of one micro-batch, also where this rank has none."""
        return nullcontext()

    def flush(self) -> None:
        """Whatever is on its way has come."""
        for chunk in self._chunks:
            chunk.finish_gather()

    def updated(self, chunk: Chunk, *, changed: bool) -> None:
        """After the update of a chunk, in forward order, on every rank: what the next forward needs may set out."""
        if changed:
            chunk.start_gather()

    def state_dict(self, *, keep_vars: bool = False) -> dict[str, Any]:
        """The model's own `state_dict()`, for names, shapes and buffers: its weights may be placeholders."""
        return dict(self._module.state_dict(keep_vars=keep_vars))

    def remove(self) -> None:
        """Take the gates away; every weight is whole before."""
        self.flush()
        for handle in self._handles:
            handle.remove()

    def _gates(self, owner: nn.Module, needed: Sequence[Chunk]) -> Iterator[Any]:
        yield owner.register_forward_pre_hook(partial(self._enter, needed))

    def _before_state_dict(self) -> None:
        self.flush()

    def _enter(self, needed: Sequence[Chunk], module: nn.Module, args: Any) -> None:
        for chunk in needed:
            chunk.finish_gather()
