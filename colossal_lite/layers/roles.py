"""Assigns a role to each module of a model, by patterns over module names.

Note: a plan maps patterns to roles.  Every module with parameters needs a role, and every pattern must match a module.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from colossal_lite.observe.printed_lines import warn

# ---- layer plans: globs over module names to roles ----

ROLES = (
    "colwise",  # linear whose output features are cut: the first of a pair (details: qkv, kv, gate_up)
    "rowwise",  # linear whose input features are cut: the second of a pair
    "embedding",  # token embedding, cut over the vocabulary
    "position",  # learned positions
    "lm_head",  # linear to the vocabulary
    "norm",  # LayerNorm, RMSNorm: acts on each token alone
    "attention",  # module that holds the number of heads
    "block",  # one transformer block
    "replicate",  # a full copy on every rank
    "adapter",  # module around a colwise or rowwise linear that adds a product of low rank; what it holds needs no role
)
DETAILS = {
    # rows of one weight: [q, k, v]; keys or values, which ranks share where there are fewer heads; [gate, up]
    "colwise": ("qkv", "kv", "gate_up"),
    # `embedding:whole`: the model counts on whole sequences outside its blocks, so activations are cut within them only
    "embedding": ("whole",),
    # a module whose code mixes tokens: it sees whole sequences, where activations are cut, and gives its part
    "replicate": ("whole",),
}
RENAMED_ROLES = {"first": "colwise", "second": "rowwise"}
"""Names of before version 0.2 -> names of now. A plan may have the old ones for one release."""
NOT_BUILT_ROLES = ("per_head", "latent", "expert")


SHARES = re.compile(r"[1-9]\d*(\+[1-9]\d*)+")
"""A form of `colwise`: the proportion of the blocks of rows in one weight, such as 4+1+1; each block is cut."""


@dataclass(frozen=True)
class Role:
    """What a module is, to a strategy."""

    name: str
    detail: str = ""

    @property
    def shares(self) -> tuple[int, ...]:
        """The proportion of the blocks of rows that are cut one by one, where the form states it."""
        if self.detail == "gate_up":
            return 1, 1
        return tuple(map(int, self.detail.split("+"))) if SHARES.fullmatch(self.detail) else (1,)

    @classmethod
    def parse(cls, text: str, pattern: str = "") -> Role:
        """From a plan's word, such as `colwise:qkv` or `lm_head`. Raises ValueError with the legal roles."""
        name, _, detail = text.partition(":")
        where = f"plan[{pattern!r}] = {text!r}: "
        if name in NOT_BUILT_ROLES:
            raise ValueError(f"{where}the role {name} is not built yet; legal: {', '.join(ROLES)}")
        if name not in ROLES:
            raise ValueError(f"{where}there is no role {name!r}; legal: {', '.join(ROLES)}")
        is_shares = name == "colwise" and SHARES.fullmatch(detail)
        if detail and detail not in DETAILS.get(name, ()) and not is_shares:
            legal = ", ".join(f"{name}:{word}" for word in DETAILS.get(name, ())) or name
            legal += ", or a proportion such as colwise:4+1+1" if name == "colwise" else ""
            raise ValueError(f"{where}{name} has no form {detail!r}; legal: {legal}")
        return cls(name, detail)


def match_name(pattern: str, name: str) -> bool:
    """Whether a dotted name fits a pattern: `*` is any text within one component, `**` any number of components."""

    def fits(globs: Sequence[str], parts: Sequence[str]) -> bool:
        if not globs:
            return not parts
        if globs[0] == "**":
            return any(fits(globs[1:], parts[i:]) for i in range(len(parts) + 1))
        return bool(parts) and fnmatchcase(parts[0], globs[0]) and fits(globs[1:], parts[1:])

    return fits(pattern.split("."), name.split("."))


class Patterns:
    """Finds the patterns that fit a name, by the components that are plain text: a model may have thousands of both."""

    def __init__(self, patterns: Iterable[str]) -> None:
        self._place: dict[str, int] = {}
        self._by_text: dict[tuple[int, tuple[int, ...]], dict[tuple[str, ...], list[str]]] = {}
        self._of_any_length: list[str] = []
        for place, pattern in enumerate(patterns):
            self._place[pattern] = place
            parts = pattern.split(".")
            if "**" in parts:
                self._of_any_length.append(pattern)
                continue
            plain = tuple(i for i, part in enumerate(parts) if not any(sign in part for sign in "*?["))
            same = self._by_text.setdefault((len(parts), plain), {})
            same.setdefault(tuple(parts[i] for i in plain), []).append(pattern)

    def of(self, name: str) -> list[str]:
        """The patterns that fit, in order."""
        parts = name.split(".")
        near = list(self._of_any_length)
        for (count, plain), same in self._by_text.items():
            if count == len(parts):
                near += same.get(tuple(parts[i] for i in plain), ())
        return sorted((p for p in near if match_name(p, name)), key=self._place.__getitem__)


def with_new_names(plan: Mapping[str, str]) -> dict[str, str]:
    """The plan with roles by their new names, and a line of notice if it had old ones. Raises ValueError for both."""
    names = {pattern: text.split(":")[0] for pattern, text in plan.items()}
    old = [f"{pattern!r}: {plan[pattern]!r}" for pattern, name in names.items() if name in RENAMED_ROLES]
    if not old:
        return dict(plan)
    told = ", ".join(f"{name!r} is now {new!r}" for name, new in RENAMED_ROLES.items())
    if set(RENAMED_ROLES.values()) & set(names.values()):
        raise ValueError(
            f"plan: {', '.join(old)} stand beside new names of roles ({told}); use new names alone"
        )
    warn(f"plan: roles have new names: {told}")
    return {
        pattern: RENAMED_ROLES.get(name, name) + plan[pattern].removeprefix(name)
        for pattern, name in names.items()
    }


def assign_roles(plan: Mapping[str, str], modules: Iterable[str], owners: Iterable[str]) -> dict[str, Role]:
    """Module name -> role; the first pattern that fits wins.

    `owners` are the modules that hold parameters of their own: each needs a role, unless an adapter holds it.  Raises
    ValueError listing every one that is left without, and every pattern that fits no module.
    """
    parsed = {pattern: Role.parse(text, pattern) for pattern, text in plan.items()}
    names = list(modules)
    fitting = Patterns(parsed)
    roles: dict[str, Role] = {}
    used: set[str] = set()
    for name in names:
        fits = fitting.of(name)
        used.update(fits)
        if fits:
            roles[name] = parsed[fits[0]]
    adapters = tuple(f"{name}." for name, role in roles.items() if role.name == "adapter")
    faults = [
        f"no pattern fits {name}, which has parameters"
        for name in owners
        if name and name not in roles and not name.startswith(adapters)
    ]
    faults += [f"pattern {pattern!r} fits no module" for pattern in parsed if pattern not in used]
    if faults:
        raise ValueError("plan: " + "; ".join(faults) + f"; roles are {', '.join(ROLES)}")
    return roles


# Plans of models whose names we know: ours, GPT-2 as Hugging Face has it, and Llama.
PLANS: dict[str, dict[str, str]] = {
    "gpt": {
        "token": "embedding",
        "position": "position",
        "blocks.*": "block",
        "blocks.*.norm*": "norm",
        "blocks.*.attention": "attention",
        "blocks.*.attention.qkv": "colwise:qkv",
        "blocks.*.attention.out": "rowwise",
        "blocks.*.mlp.up": "colwise",
        "blocks.*.mlp.gate_up": "colwise:gate_up",
        "blocks.*.mlp.down": "rowwise",
        "norm": "norm",
        "head": "lm_head",
    },
    "gpt2": {
        "transformer.wte": "embedding:whole",
        "transformer.wpe": "position",
        "transformer.h.*": "block",
        "transformer.h.*.ln_*": "norm",
        "transformer.h.*.attn": "attention",
        "transformer.h.*.attn.c_attn": "colwise:qkv",
        "transformer.h.*.attn.c_proj": "rowwise",
        "transformer.h.*.mlp.c_fc": "colwise",
        "transformer.h.*.mlp.c_proj": "rowwise",
        "transformer.ln_f": "norm",
        "lm_head": "lm_head",
    },
    "llama": {
        "model.embed_tokens": "embedding:whole",
        "model.layers.*": "block",
        "model.layers.*.*norm": "norm",
        "model.layers.*.self_attn": "attention",
        "model.layers.*.self_attn.q_proj": "colwise",
        "model.layers.*.self_attn.[kv]_proj": "colwise:kv",
        "model.layers.*.self_attn.o_proj": "rowwise",
        "model.layers.*.mlp.gate_proj": "colwise",
        "model.layers.*.mlp.up_proj": "colwise",
        "model.layers.*.mlp.down_proj": "rowwise",
        "model.norm": "norm",
        "lm_head": "lm_head",
    },
}


_MAY_BE_WRAPPED = ("colwise", "rowwise", "lm_head", "embedding")


def known_plan(modules: Collection[str], owners: Collection[str]) -> tuple[str, dict[str, str]] | None:
    """The first known plan that gives every parameter a role, without the patterns this model has no module for.

    A linear may have become a module around one: modules within a module with a role need none."""
    for title, plan in PLANS.items():
        used = {p: text for p, text in plan.items() if any(match_name(p, name) for name in modules)}
        linears = [p for p, text in used.items() if Role.parse(text).name in _MAY_BE_WRAPPED]

        def has_role(name: str, used: Collection[str] = used, linears: Collection[str] = linears) -> bool:
            parts = name.split(".")
            around = [".".join(parts[:i]) for i in range(1, len(parts))]
            return any(match_name(p, name) for p in used) or any(
                match_name(p, outer) for p in linears for outer in around
            )

        if used and all(has_role(name) for name in owners):
            return title, used
    return None
