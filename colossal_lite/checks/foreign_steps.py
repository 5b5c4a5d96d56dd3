"""Refuses the step of a torch optimizer over an engine's parameters that would change none of them.

Note: why it would change none.
The engine takes the gradients of its parameters as they come, so `p.grad` is None between steps.  A torch optimizer
that a loop still has would find no gradient and return.  The parameters would train, but by the optimizer of the
config, and nothing would tell.  Cost: a look at the parameters of an optimizer, in each step of one.
"""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.weak import WeakIdKeyDictionary


class ForeignSteps:
    """Looks at the steps of all torch optimizers of this process, until `close`."""

    def __init__(self, model: nn.Module) -> None:
        self._names = WeakIdKeyDictionary({p: name for name, p in model.named_parameters()})
        self._handle = register_optimizer_step_pre_hook(self._check)

    def close(self) -> None:
        self._handle.remove()

    def _check(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        held = [p for group in optimizer.param_groups for p in group["params"] if p in self._names]
        trained = [p for p in held if p.requires_grad]
        if trained and all(p.grad is None for p in held):
            kind = type(optimizer).__name__
            raise ValueError(
                f"{kind}.step: it holds {self._names[trained[0]]}, which an engine trains by its own optimizer. "
                f"Between steps it has no gradient, so this step would change nothing. Legal: engine.step alone, with "
                f"config.optimizer; an optimizer of other parameters. Or, at zero.stage=0, "
                f"cl.initialize(model, optimizer=lambda parameters: torch.optim.{kind}(parameters, ...))"
            )
