"""Finds what a module has that the layer in its place would lose: a forward of its own, settings, hooks.

Note: a layer in a module's place carries its weights and bias.  It also carries a norm's eps and an embedding's
padding_idx, and nothing else.  So only modules that are no more than that may be replaced.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

LINEAR_ROLES = ("colwise", "rowwise", "lm_head")
HOOKS = {
    "_forward_hooks": "a forward hook",
    "_forward_pre_hooks": "a forward pre-hook",
    "_backward_hooks": "a backward hook",
    "_backward_pre_hooks": "a backward pre-hook",
}
PARAMETER_HOOKS = {
    "_backward_hooks": "a hook",
    "_post_accumulate_grad_hooks": "a hook behind the accumulation of its gradient",
}


def is_transposed(module: Any) -> bool:
    """Whether a linear stores its weight [D_in, D_out], as Conv1D of Hugging Face's GPT-2 does."""
    return type(module).__name__ == "Conv1D"


def has_forward_of(module: nn.Module, plain: type[nn.Module]) -> bool:
    """Whether a module runs as `plain` does, with parameters that are its own: none computed from others."""
    kind: Any = type(module)
    return (
        isinstance(module, plain)
        and kind.forward is plain.forward
        and kind.__call__ is nn.Module.__call__
        and "forward" not in module.__dict__
        and not hasattr(module, "parametrizations")
    )


def linear_faults(module: nn.Module) -> Iterator[str]:
    """What keeps a linear from being cut."""
    if is_transposed(module) and type(module).__module__.startswith("transformers."):
        if "forward" in module.__dict__:
            yield "its forward was replaced"
    elif not has_forward_of(module, nn.Linear) and not acts_as_linear(module):
        yield "its forward is not that of nn.Linear, nor its class Hugging Face's Conv1D"


def acts_as_linear(module: nn.Module) -> bool:
    """Whether a class with its own forward gives x W^T + b, or x W + b as Conv1D: seen on a copy of few features, in
    training and in evaluation."""
    plain = {"weight", "bias"} if getattr(module, "bias", None) is not None else {"weight"}
    weight = getattr(module, "weight", None)
    if (
        {n for n, _ in module.named_parameters()} != plain
        or not isinstance(weight, Tensor)
        or weight.dim() != 2
    ):
        return False
    if (
        "forward" in module.__dict__
        or any(True for _ in module.buffers())
        or any(True for _ in module.children())
    ):
        return False
    like: Any = dict(generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    outputs, inputs = (3, 2) if not is_transposed(module) else (2, 3)
    sizes = dict(zip(weight.shape, (outputs, inputs), strict=True))
    memo: dict[int, Any] = {id(weight): nn.Parameter(torch.randn(outputs, inputs, **like))}
    if "bias" in plain:
        memo[id(module.bias)] = nn.Parameter(torch.randn(3, **like))
    small: Any = copy.deepcopy(module, memo)
    for name, value in vars(small).items():
        if type(value) is int and value in sizes and name[0] != "_":
            setattr(small, name, sizes[value])
    x = torch.randn(2, 4, 2, **like)
    right = F.linear(
        x, small.weight.t() if is_transposed(small) else small.weight, getattr(small, "bias", None)
    )
    try:
        return all(
            torch.allclose(small.train(trains)(x), right, rtol=1e-12, atol=1e-12) for trains in (True, False)
        )
    except Exception:  # of a user's code, whatever it is
        return False


def embedding_faults(module: Any) -> Iterator[str]:
    """What keeps a table from being cut."""
    if not isinstance(module, nn.Embedding) or hasattr(module, "parametrizations"):
        yield "it is not an nn.Embedding with a weight of its own"
        return
    for setting in ("max_norm", "scale_grad_by_freq", "sparse"):
        if value := getattr(module, setting):
            yield f"{setting}={value}"


def position_faults(module: nn.Module) -> Iterator[str]:
    """What keeps a table of positions from being replaced."""
    if not has_forward_of(module, nn.Embedding):
        yield "its forward is not that of nn.Embedding"
    elif getattr(module, "padding_idx", None) is not None:
        yield f"padding_idx={module.padding_idx}"


def has_hooks(module: nn.Module) -> bool:
    """Whether a module has hooks of its forward or backward."""
    return any(getattr(module, kind) for kind in HOOKS)


def requires_gradients(module: nn.Module) -> bool:
    """Whether a hook of Hugging Face's `enable_input_require_grads` is on a module."""
    names = (getattr(hook, "__qualname__", "") for hook in module._forward_hooks.values())
    return any("enable_input_require_grads" in name for name in names)


def hook_faults(module: nn.Module) -> Iterator[str]:
    """Hooks that a layer in the module's place would not run."""
    yield from (words for kind, words in HOOKS.items() if getattr(module, kind))


def parameter_hook_faults(model: nn.Module) -> list[str]:
    """Parameters with a hook: it would see a part of the gradient, or a term of it."""
    return [
        f"{name}: {words} on a parameter would see a part of its gradient; legal: none in a tensor mode"
        for name, parameter in model.named_parameters()
        for kind, words in PARAMETER_HOOKS.items()
        if getattr(parameter, kind, None)
    ]
