"""Stands as `p.grad` between a backward and the step, where the gradient itself is the engine's.

Note: why not None.
Gradients are in chunks, perhaps in part and not yet summed over the ranks.  With None, `clip_grad_norm_`, an optimizer
of the user's own and code that changes `p.grad` would do nothing, in silence.  Each operation on a `HeldGradient` is
refused by name, also those of torch's C++.  Its shape, dtype and device may be read.  It has no memory.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn


class HeldGradient(Tensor):
    """The place of one parameter's gradient, of its shape, dtype and device."""

    parameter: str
    """Its name."""
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, parameter: nn.Parameter, name: str) -> HeldGradient:
        held: HeldGradient = Tensor._make_wrapper_subclass(
            cls, parameter.shape, dtype=parameter.dtype, device=parameter.device, storage_size=0
        )
        held.parameter = name
        return held

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"HeldGradient({self.parameter})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        found = next((x for x in torch.utils._pytree.tree_leaves((args, kwargs)) if isinstance(x, cls)), None)
        name = "p" if found is None else found.parameter
        raise ValueError(
            f"{name}.grad: {func._schema.name} of it would have no effect. Between backward and step the gradient is "
            f"the engine's, in parts, not yet summed over ranks. {LEGAL}"
        )


LEGAL = (
    "Legal: clip_grad_norm of the config, engine.full_gradients() for whole ones, or a hook (p.register_hook). Or "
    "engine.zero_grad(), engine.backward(loss) for a further loss, engine.step() in the place of an optimizer's"
)


class HeldGradients:
    """Those of all parameters that train on this rank, and of copies that an optimizer has."""

    def __init__(self, parameters: Mapping[str, nn.Parameter]) -> None:
        self._parameters = [*parameters.items()]
        self._held: list[HeldGradient] = []
        self._stand = False

    def add(self, copies: Mapping[str, nn.Parameter]) -> None:
        """Parameters that an optimizer of the user's own updates in the place of the model's."""
        self._parameters += copies.items()

    def hold(self) -> None:
        """A backward has ended: from now on they stand as `p.grad`."""
        if not self._held:
            self._held = [HeldGradient(own, name) for name, own in self._parameters]
        for (_, own), held in zip(self._parameters, self._held, strict=True):
            own.grad = held
        self._stand = True

    def release(self) -> None:
        """`p.grad` is None again. Raises ValueError where other code has set it."""
        if not self._stand:
            return
        pairs = zip(self._parameters, self._held, strict=True)
        names = [name for (name, own), held in pairs if own.grad is not held]
        self.drop()
        if names:
            raise ValueError(
                f"step: {names[0]}.grad was set by other code than the engine since backward, also to None. It has no "
                f"effect there. {LEGAL}"
            )

    def drop(self) -> None:
        """`p.grad` is None again, if they stood there."""
        if self._stand:
            for _, own in self._parameters:
                own.grad = None
        self._stand = False
