"""Models whose blocks emit auxiliary losses, and the plain mean of them.

Some are emitted by a hook behind the feed-forward layer, on the residual branch, and some from inside a norm, which a
schedule with split backward runs a second time for its weights.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from colossal_lite.transforms.activation_checkpoint import blocks_of
from colossal_lite.transforms.auxiliary_loss import AuxiliaryLoss

Per = Literal["token", "sample", "element"]
# Weights, and sums of different forms.
TOTALS: dict[Per, tuple[float, Callable[[Tensor], Tensor]]] = {
    "token": (0.3, lambda x: x.logsumexp(-1).square().sum()),
    "sample": (0.2, lambda x: x.flatten(1).norm(dim=1).sum()),
    "element": (0.7, lambda x: x.cos().sum()),
}
INSIDE: tuple[Per, ...] = ("element",)
FIRST_NORMS = ("norm1", "ln_1", "input_layernorm")


def emit(model: nn.Module, kinds: Collection[Per], *, inside: bool = True) -> None:
    """Have every block of a model emit losses of these kinds, in place. `inside`: norms, too, which a grid replaces."""
    for block in blocks_of(model).values() if kinds else ():
        for per in kinds:
            weight, total = TOTALS[per]
            own = AuxiliaryLoss(weight, per=per)
            if inside and per in INSIDE:
                _inside(
                    next(getattr(block, name) for name in FIRST_NORMS if hasattr(block, name)), own, total
                )
            else:
                _behind(block.mlp, own, total)  # type: ignore[arg-type]


def _behind(module: nn.Module, own: AuxiliaryLoss, total: Callable[[Tensor], Tensor]) -> None:
    module.add_module(f"auxiliary_{own.per}", own)
    module.register_forward_hook(lambda module, args, x: own(x, total(_wide(x))))


def _inside(norm: nn.Module, own: AuxiliaryLoss, total: Callable[[Tensor], Tensor]) -> None:
    kind = type(norm)

    def forward(self: Any, x: Tensor) -> Any:
        y = kind.forward(self, x)
        return self.auxiliary(y, total(_wide(y)))

    norm.add_module("auxiliary", own)
    norm.__class__ = type(f"Emitting{kind.__name__}", (kind,), {"forward": forward})


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def emits_plainly(model: nn.Module) -> list[Tensor]:
    """Have a model add to the list that is given back what it emits in a forward, as means over what it sees."""
    found: list[Tensor] = []

    def forward(own: AuxiliaryLoss, x: Tensor, total: Tensor) -> Tensor:
        count = {"sample": len(x), "token": x[..., 0].numel(), "element": x.numel()}[own.per]
        found.append(own.weight * total / count)
        return x

    for module in model.modules():
        if isinstance(module, AuxiliaryLoss):
            module.forward = partial(forward, module)  # type: ignore[method-assign]
    return found
