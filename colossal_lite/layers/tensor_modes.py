"""Finds the file of a tensor mode, and states what that file must have.

Note: a new mode is a file here with the two functions of `ModeFile`, and a line in `TENSOR_MODES`.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol, cast

from torch import Tensor, nn

from colossal_lite.config.parallel_schema import FLAT, TENSOR_MODES, ModelFacts, TensorConfig
from colossal_lite.data.batch import Batch
from colossal_lite.distributed.ledger import LedgerRow
from colossal_lite.distributed.mesh import Mesh
from colossal_lite.kernels import Ops, Rows
from colossal_lite.layers.roles import Role
from colossal_lite.sharding.shard_spec import ShardSpec
from colossal_lite.transforms.auxiliary_loss import Share


@dataclass(frozen=True)
class Form:
    """How 1d swaps layers; the other modes have no choice."""

    sequence_parallel: bool = True
    """Between the layers each rank has a part of the sequence."""
    regather_inputs: bool = True
    whole_sizes: bool = False
    """The code of an attention or MLP sees the sizes of the whole (whole_sizes.py), not those of a rank's part."""


class TensorStrategy(Protocol):
    """What the engine calls in a mode, once the layers are replaced."""

    @property
    def owns_loss(self) -> bool:
        """Whether this rank's loss counts: of ranks that compute the same loss, the first does."""

    @property
    def cut_behind(self) -> tuple[int, int] | None:
        """(part, parts) of the heads and features behind a column-wise linear that this rank has; None where these are
        of other samples than the residual stream."""

    def local_part(self, batch: Batch) -> Batch:
        """The samples that this rank's layers see. Raises ValueError if the batch cannot be cut so."""

    def cross_entropy(self, ops: Ops, logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """(sum of token losses, number of valid labels) from the logits that this rank's model gives."""

    def whole_vocabulary(self, logits: Tensor) -> Tensor:
        """Logits of the local part over the full vocabulary."""

    def whole_batch(self, logits: Tensor) -> Tensor:
        """Full logits of the full micro-batch, the same on all ranks of the tensor axis, from those of the parts."""


LocalRows = Callable[[str, Callable[..., Rows]], Callable[[], Rows]]
ModeResult = tuple[TensorStrategy, Mapping[str, ShardSpec], LocalRows, Callable[[str], Share]]
"""What a mode gives: its strategy, the spec of each parameter, and two functions of a module's name. They return which
rows of the counters its dropout sees, and which share of the stream its auxiliary loss sees."""


@dataclass(frozen=True)
class LayerSizes:
    """What the payload of forward and backward of one micro-batch [batch, sequence] follows from."""

    facts: ModelFacts
    batch: int
    sequence: int
    itemsize: int
    """Bytes of an activation element."""
    bias: bool
    gated: bool = False
    """The MLP has a gate (SwiGLU)."""
    centred: bool = False
    """The norms are LayerNorms."""


class ModeFile(Protocol):
    """The functions that the file of a mode has."""

    def swap_layers(self, module: nn.Module, mesh: Mesh, roles: Mapping[str, Role], form: Form) -> ModeResult:
        """Replace the layers of `module` by this rank's parts, in place. A mode may ignore the form."""

    def planned_payload(self, mesh: Mesh, tensor: TensorConfig, sizes: LayerSizes) -> tuple[LedgerRow, ...]:
        """Calls and payload bytes of forward and backward of one micro-batch, by formula."""


def mode_file(mode: str) -> ModeFile:
    """The module of a mode."""
    return cast("ModeFile", importlib.import_module(f"colossal_lite.layers.{TENSOR_MODES[mode].file}"))


def mode_of(mesh: Mesh) -> str:
    """The mode for which the tensor axis of a mesh is cut."""
    return next((axis.mode for axis in mesh.layout.axes if axis.name == "tensor"), "") or FLAT


def head_weight(module: nn.Module, roles: Mapping[str, Role]) -> Tensor:
    """Weight [V, D] of the head: it tells the vocabulary, to which padded logits are cut back, and the width."""
    heads = [name for name, role in roles.items() if role.name == "lm_head"]
    if len(heads) != 1:
        raise ValueError(
            f"plan: exactly one module must be the lm_head, found {heads or 'none'}. Legal: a plan that gives this "
            f"role to the linear that makes the logits, or parallel.tensor=1"
        )
    weight = module.get_submodule(heads[0]).weight
    assert isinstance(weight, Tensor)
    return weight
