"""States which keys each query of an attention sees, as data instead of a [T, S] tensor."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, eq=False)
class Mask:
    """Which keys a query sees.  documents: integers [B, T], one per token; a pair (of queries, of keys) if
    they differ."""

    causal: bool = True
    documents: Tensor | tuple[Tensor, Tensor] | None = None

    def document_pair(self) -> tuple[Tensor, Tensor] | None:
        return (self.documents, self.documents) if isinstance(self.documents, Tensor) else self.documents


CAUSAL = Mask()
FULL = Mask(causal=False)
Offsets = tuple[int, int]
"""Position of the first query and of the first key."""
