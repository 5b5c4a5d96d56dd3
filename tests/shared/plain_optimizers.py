"""What the optimizers of the table are compared with: torch's own where it has one, else the paper's lines,
one tensor at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer


class Plain(Optimizer):
    """An optimizer of single tensors: `rule(p, g, state, group)` returns the new value of p."""

    def __init__(self, parameters: Any, **settings: Any) -> None:
        super().__init__(parameters, settings)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    state = self.state[p]
                    state["step"] = state.get("step", 0) + 1
                    p.copy_(self.rule(p.clone(), p.grad.clone(), state, group))

    def rule(self, p: Tensor, g: Tensor, state: dict[str, Any], group: Mapping[str, Any]) -> Tensor:
        raise NotImplementedError


class Lion(Plain):
    """2302.06675, algorithm 2."""

    def __init__(
        self, parameters: Any, lr: float, betas: Any = (0.9, 0.99), weight_decay: float = 0.0
    ) -> None:
        super().__init__(parameters, lr=lr, betas=betas, weight_decay=weight_decay)

    def rule(self, p: Tensor, g: Tensor, state: dict[str, Any], group: Mapping[str, Any]) -> Tensor:
        (b1, b2), m = group["betas"], state.get("m", torch.zeros_like(p))
        update = torch.sign(b1 * m + (1 - b1) * g) + group["weight_decay"] * p
        state["m"] = b2 * m + (1 - b2) * g
        return p - group["lr"] * update


class LAMB(Plain):
    """1904.00962, algorithm 2."""

    def __init__(
        self,
        parameters: Any,
        lr: float,
        betas: Any = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(parameters, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay)

    def rule(self, p: Tensor, g: Tensor, state: dict[str, Any], group: Mapping[str, Any]) -> Tensor:
        (b1, b2), t = group["betas"], state["step"]
        state["m"] = b1 * state.get("m", 0) + (1 - b1) * g
        state["v"] = b2 * state.get("v", 0) + (1 - b2) * g * g
        r = state["m"] / (1 - b1**t) / ((state["v"] / (1 - b2**t)).sqrt() + group["eps"])
        r = r + group["weight_decay"] * p
        lengths = float(p.norm()), float(r.norm())
        return p - group["lr"] * (lengths[0] / lengths[1] if all(lengths) else 1.0) * r


class Muon(Plain):
    """Jordan et al., "Muon", 2024, in the parameters' own dtype; torch's scale of a tall matrix.

    `half`: the iteration runs in bfloat16, as torch's does."""

    half = False

    def __init__(
        self,
        parameters: Any,
        lr: float,
        momentum: float = 0.95,
        nesterov: bool = True,
        weight_decay: float = 0.1,
    ) -> None:
        super().__init__(parameters, lr=lr, momentum=momentum, nesterov=nesterov, weight_decay=weight_decay)

    def rule(self, p: Tensor, g: Tensor, state: dict[str, Any], group: Mapping[str, Any]) -> Tensor:
        mu = group["momentum"]
        b = state["b"] = mu * state.get("b", 0) + (1 - mu) * g
        x = (1 - mu) * g + mu * b if group["nesterov"] else b
        x = x.bfloat16() if self.half else x
        x = x / x.norm().clamp(min=1e-7)  # a gradient of zeros is an update of zeros
        for _ in range(5):  # x (a + b s + c s s) with s = x^T x
            s = x.T @ x
            x = 3.4445 * x - 4.7750 * x @ s + 2.0315 * x @ s @ s
        x = x.to(p.dtype)
        scale = max(1.0, p.shape[0] / p.shape[1]) ** 0.5
        return p * (1 - group["lr"] * group["weight_decay"]) - group["lr"] * scale * x


PLAIN: dict[str, Callable[..., Optimizer]] = {
    "sgd": torch.optim.SGD,
    "adamw": torch.optim.AdamW,
    "adam": torch.optim.Adam,
    "lion": Lion,
    "lamb": LAMB,
    "muon": Muon,
}


def plain_optimizers(config: Mapping[str, Any], named: Mapping[str, nn.Parameter]) -> list[Optimizer]:
    """One optimizer for each group of a config, the rest last."""
    return list(_optimizers(dict(config), dict(named)))


def _optimizers(config: dict[str, Any], named: dict[str, nn.Parameter]) -> Iterator[Optimizer]:
    kind, groups = config.pop("type"), config.pop("groups", ())
    for group in groups:
        chosen = [named.pop(name) for name in list(named) if fnmatchcase(name, group["match"])]
        own = {key: value for key, value in group.items() if key not in ("match", "type")}
        shared = config if group.get("type", kind) == kind else {"lr": config["lr"]}
        if chosen:
            yield PLAIN[group.get("type", kind)](chosen, **(shared | own))
    if named:
        yield PLAIN[kind](list(named.values()), **config)
