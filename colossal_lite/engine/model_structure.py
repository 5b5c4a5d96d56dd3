"""Tells whether a model still has the modules and parameters that its engine was made for.

Note: an engine trains the Parameter objects that it was given.  Another one in the place of these, or one that begins
to train later, would get no update, and no error.  Cost: a look at each module and parameter in a step, some
microseconds for a hundred.
"""

from __future__ import annotations

from torch import nn


class ModelStructure:
    """The modules and parameters of a model, as they are now."""

    def __init__(self, model: nn.Module) -> None:
        self._modules = dict(model.named_modules())
        members = [members for m in self._modules.values() for members in (m._modules, m._parameters)]
        self._members = [*zip((name for name in self._modules for _ in range(2)), members, strict=True)]
        self._places = [members for _, members in self._members]
        self._kept = [[*members.values()] for members in self._places]  # no other object gets their ids
        self._ids = self._found()
        self._frozen = [p for p in model.parameters() if not p.requires_grad]

    def _found(self) -> list[int]:
        return [id(member) for members in self._places for member in members.values()]

    def change(self) -> str | None:
        """The difference now, in words; None if there is none."""
        if self._found() != self._ids:
            pairs = zip(self._members, self._kept, strict=True)
            name = next(n for (n, now), was in pairs if [*map(id, now.values())] != [*map(id, was)])
            return f"{name or 'the model'} has other modules or parameters"
        if any(parameter.requires_grad for parameter in self._frozen):
            return "a parameter requires a gradient now that did not"
        return None

    @property
    def trains(self) -> bool:
        """Whether all modules are in training mode."""
        return all(module.training for module in self._modules.values())
