"""Sets modules to training or evaluation, and gives each the mode back that it had.

Note: whose choice a mode is.
A model in training may have modules that the user has set to evaluation: a frozen norm, a dropout that is off.
`model.train()` would set them to training, and nothing would tell.  So a step calls it only where the model itself is
in evaluation.  An evaluation gives every module its own mode back.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import MethodType

from torch import nn

SYNCED = "_is_over_all_ranks"
"""Marks a module whose statistics are of all data ranks."""


def modes_of(model: nn.Module) -> dict[str, bool]:
    """Whether each module is in training, by name."""
    return {name: module.training for name, module in model.named_modules()}


def set_modes(model: nn.Module, modes: Mapping[str, bool]) -> None:
    """Give modules these modes. Others, which have been added since, keep theirs."""
    for name, module in model.named_modules():
        module.training = modes.get(name, module.training)


@contextmanager
def modes_kept(model: nn.Module) -> Iterator[None]:
    """Every module has the mode afterwards that it had before."""
    modes = modes_of(model)
    try:
        yield
    finally:
        set_modes(model, modes)


def is_set_by_hand(model: nn.Module) -> bool:
    """Whether the model is in training, and some of its modules are not."""
    return model.training and not all(module.training for module in model.modules())


def hold_evaluation(copy: nn.Module, model: nn.Module) -> None:
    """Have `train()` of a copy leave those modules in evaluation that the user of `model` has set so. Also those that
    are `SYNCED`, for a copy has one rank."""
    modes = modes_of(model) if is_set_by_hand(model) else {}
    for name, module in copy.named_modules():
        if not modes.get(name, True) or SYNCED in vars(module):
            module.__dict__["train"] = MethodType(_train_within, module)


def _train_within(module: nn.Module, mode: bool = True) -> nn.Module:
    module.training = False
    for child in module.children():
        child.train(mode)
    return module
