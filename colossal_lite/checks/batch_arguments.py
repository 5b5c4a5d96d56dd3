"""Refuses arguments and labels of a batch that a mesh cannot cut or carry as one process would.

Note: proofs are of ids, masks and positions.
Tensor modes and pipelines are proven with these on a small copy.  Other arguments may take ways through a model that no
proof has seen.  Where ranks have parts of the tokens, every tensor must say which of its dimensions are tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from colossal_lite.config.settings import ParallelConfig
from colossal_lite.data.batch_checks import BATCH_KEYS
from colossal_lite.data.batch_forms import ForwardArguments, named
from colossal_lite.distributed.mesh import Mesh
from colossal_lite.layers.hugging_face import is_hugging_face

EMBEDDED = "token_type_ids"
"""An argument of Hugging Face's models beside ids, which they look up in a table as ids are."""


@dataclass(frozen=True)
class AllowedArguments:
    """What a batch may have beside ids, for one engine."""

    forward: ForwardArguments
    unproven: str
    """The settings under which other arguments are not proven; "" for none."""
    cuts: str
    """The settings that cut sequences; "" for none."""
    known: tuple[str, ...]
    shown: tuple[str, ...]
    """Further ones with which the model is proven: each batch has them."""

    @classmethod
    def of(
        cls, model: nn.Module, mesh: Mesh, parallel: ParallelConfig, cuts: str, shown: tuple[str, ...]
    ) -> AllowedArguments:
        """`shown`: those of an example, if it has others beside ids."""
        found = {f"parallel.{axis}={mesh.size(axis)}": mesh.size(axis) for axis in ("tensor", "sequence")}
        found[f"parallel.pipeline={parallel.pipeline.size}"] = 2 if parallel.pipeline.is_staged else 1
        settings = [name for name, size in found.items() if size > 1]
        looks_up = is_hugging_face(model) and not cuts and not parallel.pipeline.is_staged
        known = (*BATCH_KEYS[:-1], *([EMBEDDED] if looks_up else []))
        shown = shown if settings else ()
        return cls(ForwardArguments.of(model), " and ".join(settings), cuts, known, shown)

    def check(self, args: Sequence[Any], kwargs: Mapping[str, Any], labels: Tensor) -> None:
        """Raises ValueError for arguments and labels that this mesh does not take."""
        first = next(iter(self.forward.names), "")
        known = [*dict.fromkeys(name for name in (first, *self.known, *self.shown) if name)]
        given = named(args, kwargs)
        further = [name for name in given if name not in (*known, "inputs")]
        if self.unproven and further:
            raise ValueError(
                f"batch: {', '.join(further)} under {self.unproven}, where {self.forward.model} is proven with "
                f"{', '.join(known)} alone. Legal: these; cl.initialize(..., example=batch) with a batch "
                f"that has all; or parallel.data and zero without {self.unproven}"
            )
        if missing := [name for name in self.shown if name not in (*given, first)]:
            raise ValueError(
                f"batch: no {', '.join(missing)} under {self.unproven}, where {self.forward.model} is proven with what "
                f"the example of cl.initialize has; legal: all of it"
            )
        inputs = args[0] if args else kwargs.get("input_ids", kwargs.get(first))
        are_ids = inputs is not None and not inputs.is_floating_point()
        if self.cuts and are_ids and labels.shape != inputs.shape:
            raise ValueError(
                f"labels: shape {tuple(labels.shape)} beside ids {tuple(inputs.shape)}, whose tokens are cut by "
                f"{self.cuts}. Legal: a label for each token, or without it"
            )
