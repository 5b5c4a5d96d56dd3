"""Updates weights by the rule of an optimizer, and assigns parameters to groups by name.

Note: a rule.
A rule names the state tensors that it keeps beside the master weights, and updates tensors in place.  An elementwise
rule (AdamW, Adam, SGD, Lion) updates any flat range of a chunk, with the same bits: a full chunk, a range around unused
parameters, a ZeRO shard.  The others (LAMB, Muon) update one full parameter in its own shape. They raise where a rank
holds only a part of one.  The gradient is unscaled. The update divides it by `grad_scale` (token count over the clip
factor), which costs AdamW, SGD and Lion no pass.  `OPTIMIZERS` is the table: a rule is one class and one line.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, ClassVar, Protocol

import torch
from torch import Tensor

from colossal_lite.config.errors import first_few

if TYPE_CHECKING:
    from colossal_lite.config.schema import OptimizerConfig
    from colossal_lite.kernels import Draws, Ops


@dataclass(frozen=True)
class Group:
    """Optimizer and settings of the parameters that one pattern matches; `lr` is the peak."""

    match: str
    type: str
    lr: float
    betas: tuple[float, float]
    eps: float
    weight_decay: float
    momentum: float
    nesterov: bool
    moments: str = "auto"


def groups_of(config: OptimizerConfig) -> tuple[Group, ...]:
    """The groups of a config in order; the last one matches every other parameter."""

    def group(match: str, held: OptimizerConfig) -> Group:
        names = [field.name for field in fields(Group) if field.name != "match"]
        return Group(match, **{name: getattr(held, name) for name in names})

    return (*(group(g.match, config.of_group(g)) for g in config.groups), group("*", config))


def assign_groups(names: Iterable[str], groups: tuple[Group, ...]) -> dict[str, int]:
    """Parameter name -> index of the first group whose pattern matches it (`*` spans dots).

    Raises ValueError for a user's pattern that matches no parameter, and names some parameters.
    """
    assigned = {
        name: next(i for i, group in enumerate(groups) if fnmatchcase(name, group.match)) for name in names
    }
    for i, group in enumerate(groups[:-1]):
        if not any(fnmatchcase(name, group.match) for name in assigned):
            raise ValueError(
                f"optimizer.groups.{i}.match = {group.match!r}: no trainable parameter has such a name; "
                f"they are named like {first_few(assigned)}"
            )
    return assigned


def check_whole_tensors(
    shapes: Mapping[str, Sequence[int]],
    assigned: Mapping[str, int],
    groups: Sequence[Group],
    sharded: Collection[str] = (),
) -> None:
    """Raises ValueError that names parameters that the optimizer of its group cannot update. LAMB and Muon update no
    part of a tensor (`sharded`), and Muon updates matrices only."""
    cut: dict[str, list[str]] = {}
    without_matrix = []
    for name, shape in shapes.items():
        kind = groups[assigned[name]].type
        if not rule_of(groups[assigned[name]]).is_elementwise and name in sharded:
            cut.setdefault(kind, []).append(name)
        elif kind == "muon" and len(shape) != 2:
            without_matrix.append(f"{name} {tuple(shape)}")
    faults = [
        f"{first_few(names)}: {kind} needs whole tensors, and each rank holds a part; legal: {ELEMENTWISE}"
        for kind, names in cut.items()
    ]
    if without_matrix:
        faults.append(
            f"{first_few(without_matrix)}: muon updates matrices only; give each other parameter a group with "
            f"another type"
        )
    if faults:
        raise ValueError("optimizer:\n  " + "\n  ".join(faults))


class Rule(Protocol):
    """An optimizer of tensors. `is_elementwise`: it updates any flat range; any other updates full parameters in their
    shape."""

    is_elementwise: ClassVar[bool]

    @property
    def narrow(self) -> torch.dtype | None:
        """The dtype of its states, if it differs from the weight's. Then it updates one parameter at a time."""

    @property
    def states(self) -> tuple[str, ...]:
        """Names of its state tensors, each of the shape of the updated tensor."""

    def update(
        self,
        ops: Ops,
        group: Group,
        weight: Tensor,
        gradient: Tensor,
        state: Mapping[str, Tensor],
        *,
        step: int,
        lr: float,
        grad_scale: float,
        low: Tensor | None = None,
        residual: Tensor | None = None,
        ties: Tensor | None = None,
        draws: Draws | None = None,
    ) -> None:
        """Update `weight` and `state` in place; the gradient is consumed. `step` counts from 1.

        All tensors have one shape and dtype, with two exceptions.  States of `narrow` dtype are rounded by `draws`.  A
        gradient may be narrower unless the rule `joins`.  `low` receives the new weights in its own dtype.  With
        `residual` and `ties`, `weight` is the upper half of masters (kernels/split.py); no rule that `joins` gets them.
        """

    def joins(self, group: Group) -> bool:
        """Whether the caller joins split masters for it, and widens its gradient to their dtype."""


@dataclass(frozen=True)
class AdamW:
    """arXiv 1711.05101, torch's order of operations."""

    is_elementwise: ClassVar[bool] = True
    states: tuple[str, ...] = ("exp_avg", "exp_avg_sq")
    is_decoupled: bool = True
    narrow: torch.dtype | None = None

    def update(
        self, ops: Ops, group: Group, weight: Tensor, gradient: Tensor, state: Mapping[str, Tensor],
        *, step: int, lr: float, grad_scale: float, low: Tensor | None = None, residual: Tensor | None = None,
        ties: Tensor | None = None, draws: Draws | None = None,
    ) -> None:  # fmt: skip
        decay = group.weight_decay
        if decay and not self.is_decoupled:
            gradient.div_(grad_scale).add_(weight, alpha=decay)
            grad_scale, decay = 1.0, 0.0
        ops.adamw_(
            weight,
            gradient,
            state["exp_avg"],
            state["exp_avg_sq"],
            step=step,
            lr=lr,
            beta1=group.betas[0],
            beta2=group.betas[1],
            eps=group.eps,
            weight_decay=decay,
            grad_scale=grad_scale,
            low=low,
            residual=residual,
            ties=ties,
            **({} if draws is None else {"draws": draws}),
        )

    def joins(self, group: Group) -> bool:
        return bool(group.weight_decay) and not self.is_decoupled


@dataclass(frozen=True)
class SGD:
    """Stochastic gradient descent, with momentum if `states` has its buffer. Weight decay is added to the gradient."""

    is_elementwise: ClassVar[bool] = True
    narrow: ClassVar[torch.dtype | None] = None
    states: tuple[str, ...] = ("momentum_buffer",)

    def update(
        self, ops: Ops, group: Group, weight: Tensor, gradient: Tensor, state: Mapping[str, Tensor],
        *, step: int, lr: float, grad_scale: float, low: Tensor | None = None, residual: Tensor | None = None,
        ties: Tensor | None = None, draws: Draws | None = None,
    ) -> None:  # fmt: skip
        ops.sgd_(
            weight,
            gradient,
            state["momentum_buffer"] if self.states else None,
            lr=lr,
            momentum=group.momentum,
            weight_decay=group.weight_decay,
            nesterov=group.nesterov,
            grad_scale=grad_scale,
            first=step == 1,
            low=low,
            residual=residual,
            ties=ties,
        )

    def joins(self, group: Group) -> bool:
        return False


@dataclass(frozen=True)
class Lion:
    """arXiv 2302.06675, algorithm 2: the sign of one average, another kept; weight decay decoupled."""

    is_elementwise: ClassVar[bool] = True
    narrow: ClassVar[torch.dtype | None] = None
    states: tuple[str, ...] = ("exp_avg",)

    def update(
        self, ops: Ops, group: Group, weight: Tensor, gradient: Tensor, state: Mapping[str, Tensor],
        *, step: int, lr: float, grad_scale: float, low: Tensor | None = None, residual: Tensor | None = None,
        ties: Tensor | None = None, draws: Draws | None = None,
    ) -> None:  # fmt: skip
        ops.lion_(
            weight,
            gradient,
            state["exp_avg"],
            lr=lr,
            beta1=group.betas[0],
            beta2=group.betas[1],
            weight_decay=group.weight_decay,
            grad_scale=grad_scale,
            low=low,
            residual=residual,
            ties=ties,
        )

    def joins(self, group: Group) -> bool:
        return False


@dataclass(frozen=True)
class LAMB:
    """arXiv 1904.00962, algorithm 2: Adam's direction, scaled to the length of the weights, parameter by parameter. A
    length of zero gives a ratio of 1."""

    is_elementwise: ClassVar[bool] = False
    narrow: ClassVar[torch.dtype | None] = None
    states: tuple[str, ...] = ("exp_avg", "exp_avg_sq")

    def update(
        self, ops: Ops, group: Group, weight: Tensor, gradient: Tensor, state: Mapping[str, Tensor],
        *, step: int, lr: float, grad_scale: float, low: Tensor | None = None, residual: Tensor | None = None,
        ties: Tensor | None = None, draws: Draws | None = None,
    ) -> None:  # fmt: skip
        (beta1, beta2), mean, square = group.betas, state["exp_avg"], state["exp_avg_sq"]
        gradient.div_(grad_scale)
        mean.lerp_(gradient, 1.0 - beta1)
        square.mul_(beta2).addcmul_(gradient, gradient, value=1.0 - beta2)
        denominator = (square / (1.0 - beta2**step)).sqrt_().add_(group.eps)
        direction = torch.div(mean, denominator, out=gradient).div_(1.0 - beta1**step)
        direction.add_(weight, alpha=group.weight_decay)
        ratio = weight.norm() / direction.norm()
        ratio = torch.where(torch.isfinite(ratio) & (ratio > 0), ratio, 1.0)  # stays on the device
        weight.sub_(direction.mul_(ratio), alpha=lr)
        if low is not None:
            low.copy_(weight)

    def joins(self, group: Group) -> bool:
        return True


# Coefficients of the quintic with the steepest slope at zero (Jordan et al., "Muon", 2024), as in torch.
NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
NEWTON_SCHULZ_STEPS = 5


@dataclass(frozen=True)
class Muon:
    """Momentum, orthogonalised (Jordan et al., "Muon", 2024; 2502.16982): torch's steps.

    The iteration runs in bfloat16 where the model computes in 16 bits, as torch's always does.  Elsewhere it runs in
    the gradient's dtype. bfloat16 would turn the last bit of a sum over ranks into its third digit.
    """

    is_elementwise: ClassVar[bool] = False
    narrow: ClassVar[torch.dtype | None] = None
    states: tuple[str, ...] = ("momentum_buffer",)
    half: bool = False

    def update(
        self, ops: Ops, group: Group, weight: Tensor, gradient: Tensor, state: Mapping[str, Tensor],
        *, step: int, lr: float, grad_scale: float, low: Tensor | None = None, residual: Tensor | None = None,
        ties: Tensor | None = None, draws: Draws | None = None,
    ) -> None:  # fmt: skip
        buffer = state["momentum_buffer"]
        gradient.div_(grad_scale)
        buffer.lerp_(gradient, 1.0 - group.momentum)
        direction = gradient.lerp_(buffer, group.momentum) if group.nesterov else buffer
        direction = orthogonal(direction.bfloat16() if self.half else direction).to(weight.dtype)
        rows, columns = weight.shape
        weight.mul_(1.0 - lr * group.weight_decay)
        weight.add_(direction, alpha=-lr * math.sqrt(max(1.0, rows / columns)))
        if low is not None:
            low.copy_(weight)

    def joins(self, group: Group) -> bool:
        return True


def orthogonal(matrix: Tensor) -> Tensor:
    """About U V^T of a matrix U S V^T (singular values within 0.7 to 1.2), by five Newton-Schulz steps."""
    a, b, c = NEWTON_SCHULZ
    is_tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.T if is_tall else matrix
    x = x / x.norm().clamp(min=1e-7)
    for _ in range(NEWTON_SCHULZ_STEPS):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if is_tall else x


OPTIMIZERS: dict[str, Rule] = {
    "adamw": AdamW(),
    "adam": AdamW(is_decoupled=False),
    "sgd": SGD(),
    "lion": Lion(),
    "lamb": LAMB(),
    "muon": Muon(),
}
ELEMENTWISE = ", ".join(repr(name) for name, rule in OPTIMIZERS.items() if rule.is_elementwise)


def rule_of(group: Group, compute: torch.dtype = torch.float32) -> Rule:
    """The rule of a group; `compute` is the dtype that the model multiplies in."""
    if group.type == "sgd" and not group.momentum:
        return SGD(states=())
    if group.type == "muon" and compute.itemsize == 2:
        return Muon(half=True)
    if group.type in ("adamw", "adam") and group.moments == "bf16":
        return AdamW(is_decoupled=group.type == "adamw", narrow=torch.bfloat16)
    return OPTIMIZERS[group.type]
