"""Weights of chunks brought together again before anything computes with them.

Note: gates.
From stage 1 on a rank updates its shard of a chunk and fetches the others' shards, chunk by chunk in forward order,
while the next forward already runs.  A hook before the forward of every module that owns a parameter waits for that
parameter's chunk, so a chunk that is used late has all the time before it.  A parameter that is read in any other way
while its chunk is on its way is NaN (memory/chunk.py), until `flush`.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from torch import nn

from colossal_lite.memory.chunk import Chunk


class Weights:
    """Gates before the modules of one model."""

    def __init__(self, module: nn.Module, chunks: Sequence[Chunk]) -> None:
        self._chunks = tuple(chunks)
        names = {id(parameter): name for name, parameter in module.named_parameters()}
        chunk_of = {entry.name: chunk for chunk in chunks for entry in chunk.spec.entries}
        self._handles = []
        for owner in module.modules():
            own = [names[id(p)] for p in owner.parameters(recurse=False)]
            needed = tuple(dict.fromkeys(chunk_of[name] for name in own if name in chunk_of))
            if needed:
                self._handles.append(owner.register_forward_pre_hook(partial(self._enter, needed)))
        self._handles.append(module.register_state_dict_pre_hook(lambda *_: self.flush()))

    def flush(self) -> None:
        """Wait until every weight is whole."""
        for chunk in self._chunks:
            chunk.finish_gather()

    def remove(self) -> None:
        """Take the gates away; every weight is whole before."""
        self.flush()
        for handle in self._handles:
            handle.remove()

    def _enter(self, needed: Sequence[Chunk], module: nn.Module, args: Any) -> None:
        for chunk in needed:
            chunk.finish_gather()
