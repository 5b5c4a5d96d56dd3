"""What tensor and sequence parallelism are told: their schemas, and the facts of a model that decide what is
legal."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Literal

from colossal_lite.settings import Count, Section, Unread


@dataclass(frozen=True)
class ModelFacts:
    """Sizes of a transformer, the same on every rank; known before anything is allocated."""

    layers: int
    heads: int
    kv_heads: int
    width: int
    ffn: int
    vocabulary: int
    sequence: int
    tied: bool
    causal: bool = True
    """Whether a token sees only those before it."""


class TensorConfig(Section):
    """Tensor parallelism. A bare int stands for `dict(size=int)`."""

    size: Count = 1
    """Ranks over which each layer is cut."""
    mode: Literal["1d", "2d", "2.5d", "3d"] = "1d"
    """1d (1909.08053); 2d: size = q*q (2104.05343); 2.5d: q*q*depth (2105.14500); 3d: l*l*l (2105.14450)."""
    sequence_parallel: bool = True
    """1d: norms, dropout and residuals are cut along the sequence (2205.05198)."""
    regather: bool = True
    """with sequence_parallel: inputs of cut linears are gathered again in backward; False keeps them whole instead."""
    depth: Count = 1
    """2.5d: layers of q*q ranks that share the batch."""

    @property
    def edge(self) -> int:
        """Ranks along one side of the tensor mesh: into so many parts the heads are cut."""
        if self.mode == "3d":
            return round(math.cbrt(self.size))
        return self.size if self.mode == "1d" else math.isqrt(self.size // self.sheets)

    @property
    def sheets(self) -> int:
        """Sheets of q*q ranks: `depth` in 2.5d, else one."""
        return self.depth if self.mode == "2.5d" else 1

    def size_of(self, edge: int) -> int:
        """The size of a tensor mesh with sides of `edge` ranks."""
        return self.sheets * math.prod([edge] * {"1d": 1, "3d": 3}.get(self.mode, 2))

    def fits(self, size: int) -> bool:
        """Whether `size` ranks can be cut as the mode needs; one rank can in every mode."""
        return size == 1 or size == self.size_of(self.model_copy(update={"size": size}).edge)

    def unread(self) -> Iterable[Unread]:
        if self.size == 1:
            for name in ("mode", "sequence_parallel", "regather", "depth"):
                yield Unread(name, "tensor.size is 1")
            return
        if self.mode != "2.5d":
            yield Unread("depth", f"only mode='2.5d' has a depth, and mode is {self.mode!r}")
        if self.mode != "1d":
            yield Unread("sequence_parallel", f"mode={self.mode!r} cuts activations in any case")
            yield Unread("regather", f"only mode='1d' gathers whole inputs, and mode is {self.mode!r}")
        elif not self.sequence_parallel:
            yield Unread("regather", "without sequence_parallel inputs are whole already")


class SequenceConfig(Section):
    """Sequence (context) parallelism. A bare int stands for `dict(size=int)`."""

    size: Count = 1
    """Ranks over which each sequence is cut."""
    mode: Literal["ring", "ulysses", "usp", "allgather_kv", "ring_full"] = "ring"
    """ring (2310.01889, zigzag); ulysses (2309.14509); usp: both (2405.07719); allgather_kv: keys and values
    gathered at once; ring_full: ring self-attention (2105.13120)."""
    ulysses: Count = 1
    """usp: size of the inner, Ulysses axis; it divides `size`."""

    def fits(self, size: int) -> bool:
        """Whether `size` ranks can be cut as the mode needs."""
        return size == 1 or self.mode != "usp" or size % self.ulysses == 0

    @property
    def head_parts(self) -> int:
        """Parts that the heads are cut into inside attention."""
        return {"ulysses": self.size, "usp": self.ulysses}.get(self.mode, 1) if self.size > 1 else 1

    @property
    def multiple(self) -> int:
        """What a sequence length must be a multiple of: zigzag gives every rank an early and a late piece."""
        zigzag = self.size > 1 and self.mode in ("ring", "usp", "allgather_kv")
        return 2 * self.size if zigzag else self.size

    def unread(self) -> Iterable[Unread]:
        if self.size == 1:
            yield Unread("mode", "sequence.size is 1")
            yield Unread("ulysses", "sequence.size is 1")
        elif self.mode != "usp":
            yield Unread("ulysses", f"only mode='usp' has an inner axis, and mode is {self.mode!r}")


# ---- layer plans: globs over module names to roles ----

ROLES = (
    "first",  # linear whose output features are cut: the first of a pair (`first:qkv`, `first:kv`, `first:gate_up`)
    "second",  # linear whose input features are cut: the second of a pair
    "embedding",  # token embedding, cut over the vocabulary
    "position",  # learned positions
    "lm_head",  # linear to the vocabulary
    "norm",  # LayerNorm, RMSNorm: acts on each token alone
    "attention",  # module that holds the number of heads
    "block",  # one transformer block
    "replicate",  # whole on every rank
    "adapter",  # module around a first or second linear that adds a product of low rank; what it holds needs no role
)
DETAILS = {
    "first": ("qkv", "kv", "gate_up"),
    # `embedding:whole`: the model counts on whole sequences outside its blocks, so activations are cut within them only
    "embedding": ("whole",),
}
NOT_BUILT_ROLES = ("per_head", "latent", "expert")


@dataclass(frozen=True)
class Role:
    """What a module is, to a strategy. `tie`: the module whose weight this one shares."""

    name: str
    detail: str = ""
    tie: str = ""

    @classmethod
    def parse(cls, text: str, pattern: str = "") -> Role:
        """From a plan's word, such as `first:qkv` or `lm_head:tie=token`. Raises ValueError naming what is legal."""
        name, *rest = text.split(":")
        detail = tie = ""
        for word in rest:
            if word.startswith("tie="):
                tie = word.removeprefix("tie=")
            else:
                detail = word
        where = f"plan[{pattern!r}] = {text!r}: "
        if name in NOT_BUILT_ROLES:
            raise ValueError(f"{where}the role {name} is not built yet; legal: {', '.join(ROLES)}")
        if name not in ROLES:
            raise ValueError(f"{where}there is no role {name!r}; legal: {', '.join(ROLES)}")
        if detail and detail not in DETAILS.get(name, ()):
            legal = ", ".join(f"{name}:{word}" for word in DETAILS.get(name, ())) or name
            raise ValueError(f"{where}{name} has no form {detail!r}; legal: {legal}")
        return cls(name, detail, tie)


def match_name(pattern: str, name: str) -> bool:
    """Whether a dotted name fits a pattern: `*` is any text within one component, `**` any number of components."""

    def fits(globs: Sequence[str], parts: Sequence[str]) -> bool:
        if not globs:
            return not parts
        if globs[0] == "**":
            return any(fits(globs[1:], parts[i:]) for i in range(len(parts) + 1))
        return bool(parts) and fnmatchcase(parts[0], globs[0]) and fits(globs[1:], parts[1:])

    return fits(pattern.split("."), name.split("."))


def assign_roles(plan: Mapping[str, str], modules: Iterable[str], owners: Iterable[str]) -> dict[str, Role]:
    """Module name -> role; the first pattern that fits wins.

    `owners` are the modules that hold parameters of their own: each needs a role, unless an adapter holds it.  Raises
    ValueError listing every one that is left without, and every pattern that fits no module.
    """
    parsed = {pattern: Role.parse(text, pattern) for pattern, text in plan.items()}
    names = list(modules)
    roles: dict[str, Role] = {}
    for name in names:
        for pattern, role in parsed.items():
            if match_name(pattern, name):
                roles[name] = role
                break
    adapters = tuple(f"{name}." for name, role in roles.items() if role.name == "adapter")
    faults = [
        f"no pattern fits {name}, which has parameters"
        for name in owners
        if name not in roles and not name.startswith(adapters)
    ]
    faults += [
        f"pattern {pattern!r} fits no module"
        for pattern in parsed
        if not any(match_name(pattern, name) for name in names)
    ]
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
        "blocks.*.attention.qkv": "first:qkv",
        "blocks.*.attention.out": "second",
        "blocks.*.mlp.up": "first",
        "blocks.*.mlp.gate_up": "first:gate_up",
        "blocks.*.mlp.down": "second",
        "norm": "norm",
        "head": "lm_head",
    },
    "gpt2": {
        "transformer.wte": "embedding:whole",
        "transformer.wpe": "position",
        "transformer.h.*": "block",
        "transformer.h.*.ln_*": "norm",
        "transformer.h.*.attn": "attention",
        "transformer.h.*.attn.c_attn": "first:qkv",
        "transformer.h.*.attn.c_proj": "second",
        "transformer.h.*.mlp.c_fc": "first",
        "transformer.h.*.mlp.c_proj": "second",
        "transformer.ln_f": "norm",
        "lm_head": "lm_head",
    },
    "llama": {
        "model.embed_tokens": "embedding:whole",
        "model.layers.*": "block",
        "model.layers.*.*norm": "norm",
        "model.layers.*.self_attn": "attention",
        "model.layers.*.self_attn.q_proj": "first",
        "model.layers.*.self_attn.[kv]_proj": "first:kv",
        "model.layers.*.self_attn.o_proj": "second",
        "model.layers.*.mlp.gate_proj": "first",
        "model.layers.*.mlp.up_proj": "first",
        "model.layers.*.mlp.down_proj": "second",
        "model.norm": "norm",
        "lm_head": "lm_head",
    },
}


_MAY_BE_WRAPPED = ("first", "second", "lm_head", "embedding")


def known_plan(modules: Collection[str], owners: Collection[str]) -> tuple[str, dict[str, str]] | None:
    """The first known plan that gives every parameter a role, without the patterns this model has no module for.

    A linear may have become a module around one: what lies within a module with a role needs none."""
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
