"""Describes optimizer, learning rate, precision, ZeRO and checkpoints: their schemas.

Note: a `Section` is a frozen pydantic model.  It takes no unknown key and converts nothing: "8" and True are no int,
NaN is no float.  Two methods check what types cannot.  `errors` yields settings that contradict each other.
`unused_settings` yields settings without effect in this combination.  Both return data, so all is reported at once.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, model_validator


class SettingError(NamedTuple):
    """A setting of a section (dotted name below it) that its other settings forbid."""

    name: str
    rule: str
    legal: str
    reads: str = ""
    """The section whose settings the rule reads, if it is one below. If these are invalid, the rule is not reported."""


class UnusedSetting(NamedTuple):
    """A setting of a section (dotted name below it) that has no effect, and why."""

    name: str
    why: str


@dataclass(frozen=True)
class Legal:
    """Annotation of a field: its legal values in a message, where the type alone does not give them."""

    text: str


class Section(BaseModel):
    """One part of the configuration. `errors` and `unused_settings` are called on validated values."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, allow_inf_nan=False, use_attribute_docstrings=True
    )

    def errors(self) -> Iterable[SettingError]:
        return ()

    def unused_settings(self) -> Iterable[UnusedSetting]:
        return ()


Count = Annotated[int, Field(ge=1)]
Steps = Annotated[int, Field(ge=0)]
Ratio = Annotated[float, Field(ge=0, le=1)]
Beta = Annotated[float, Field(ge=0, lt=1)]
Betas = tuple[Beta, Beta]
NotNegative = Annotated[float, Field(ge=0)]
Positive = Annotated[float, Field(gt=0)]

# The settings that each optimizer reads besides lr.
OPTIMIZER_READS: Mapping[str, frozenset[str]] = {
    "adamw": frozenset({"betas", "eps", "moments", "weight_decay"}),
    "adam": frozenset({"betas", "eps", "moments", "weight_decay"}),
    "sgd": frozenset({"momentum", "nesterov", "weight_decay"}),
    "lamb": frozenset({"betas", "eps", "weight_decay"}),
    "lion": frozenset({"betas", "weight_decay"}),
    "muon": frozenset({"momentum", "nesterov", "weight_decay"}),
}
# Defaults that differ from AdamW's: torch's own, for Lion and LAMB those of their papers.
OPTIMIZER_DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "adamw": {},
    "adam": {"weight_decay": 0.0},
    "sgd": {"weight_decay": 0.0},
    "lamb": {"weight_decay": 0.0, "eps": 1e-6},
    "lion": {"weight_decay": 0.0, "betas": (0.9, 0.99)},
    "muon": {"weight_decay": 0.1, "momentum": 0.95, "nesterov": True},
}


WHOLE_TENSORS = frozenset({"lamb", "muon"})
"""Optimizers that need full parameters."""
Moments = Literal["auto", "bf16"]
OptimizerType = Literal["adamw", "adam", "sgd", "lamb", "lion", "muon"]


class ParamGroup(Section):
    """Parameters whose names match a pattern, and what differs for them. The first match holds."""

    match: Annotated[str, Field(min_length=1), Legal("a pattern over parameter names, such as '*.bias'")]
    """Shell pattern over whole parameter names: `*` is any text, dots included."""
    type: OptimizerType | None = None
    """Optimizer of the group, with its own defaults and the lr of the whole; None: the optimizer's."""
    lr: NotNegative | None = None
    """Peak learning rate of the group; None: the optimizer's."""
    betas: Betas | None = None
    """Decay of the two averages; None: the optimizer's."""
    eps: Positive | None = None
    """Added to the denominator; None: the optimizer's."""
    weight_decay: NotNegative | None = None
    """Weight decay; None: the optimizer's."""
    momentum: Beta | None = None
    """Momentum; None: the optimizer's."""
    nesterov: bool | None = None
    """Nesterov momentum; None: the optimizer's."""
    moments: Moments | None = None
    """How both averages are kept; None: the optimizer's."""


class OptimizerConfig(Section):
    """The optimizer. A setting that is not given has the default of its `type`."""

    type: OptimizerType = "adamw"
    """AdamW (1711.05101), Adam (1412.6980), SGD, LAMB (1904.00962), Lion (2302.06675), Muon (2502.16982)."""
    lr: NotNegative = 1e-3
    """Peak learning rate."""
    betas: Betas = (0.9, 0.999)
    """Decay of the averages of the gradient and of its square (Lion: of the update and of the average)."""
    eps: Positive = 1e-8
    """Added to the denominator of the update."""
    weight_decay: NotNegative = 0.01
    """Weight decay: decoupled from the gradient, except in adam and sgd."""
    momentum: Beta = 0.0
    """Momentum of sgd and muon."""
    nesterov: bool = False
    """Nesterov momentum in sgd and muon."""
    moments: Moments = "auto"
    """Format of both averages of adamw and adam. auto: as wide as gradients are summed. bf16, lossy: 4 bytes a
    parameter instead of 8, rounded stochastically by counted random numbers. A load rounds wide averages of a
    checkpoint to nearest."""
    update_when: Literal["step", "backward"] = "step"
    """step: update when all gradients are summed. backward: update each chunk in the last backward of a step, as soon
    as its gradients are summed. In steps of one micro-batch gradients then need only a few slots. backward needs steps
    without clipping. A gradient that is not finite ends the run, because weights already have it."""
    max_skipped_steps: Count | None = 20
    """Consecutive steps that may be skipped because loss or gradient is not finite, or no token counts. Each gives a
    warning, and the last raises an error. None: no limit."""
    groups: tuple[ParamGroup, ...] = ()
    """Parameters that have settings of their own."""

    @model_validator(mode="before")
    @classmethod
    def _defaults_of_the_type(cls, given: Any) -> Any:
        if not isinstance(given, dict) or not isinstance(given.get("type", ""), str):
            return given
        return {**OPTIMIZER_DEFAULTS.get(given.get("type", "adamw"), {}), **given}

    def of_group(self, group: ParamGroup) -> OptimizerConfig:
        """The settings of the parameters of one group."""
        own = {name: value for name, value in group if name != "match" and value is not None}
        if group.type in (None, self.type):
            return self.model_copy(update=own | {"groups": ()})
        return OptimizerConfig.model_validate({"lr": self.lr} | own)

    def by_prefix(self) -> Mapping[str, OptimizerConfig]:
        """The settings of each group's parameters, by the group's path; "" holds those of all others."""
        groups = {f"groups.{index}.": self.of_group(group) for index, group in enumerate(self.groups)}
        return {"": self} | groups

    def errors(self) -> Iterable[SettingError]:
        for prefix, held in self.by_prefix().items():
            if held.type == "sgd" and held.nesterov and not held.momentum:
                legal = "nesterov=False, or momentum=0.9"
                yield SettingError(f"{prefix}nesterov", "needs a momentum above 0", legal)

    def unused_settings(self) -> Iterable[UnusedSetting]:
        settings = frozenset().union(*OPTIMIZER_READS.values())
        for prefix, held in self.by_prefix().items():
            reads = OPTIMIZER_READS[held.type]
            for name in sorted(settings - reads):
                yield UnusedSetting(prefix + name, f"{held.type} reads {', '.join(['lr', *sorted(reads)])}")
        for index, group in enumerate(self.groups):
            if group.model_fields_set == {"match"}:
                yield UnusedSetting(f"groups.{index}.match", "the group changes no setting")


# The settings that each learning-rate schedule reads.
SCHEDULE_READS: Mapping[str, frozenset[str]] = {
    "constant": frozenset(),
    "cosine": frozenset({"warmup_steps", "total_steps", "final_ratio"}),
    "linear": frozenset({"warmup_steps", "total_steps", "final_ratio"}),
    "polynomial": frozenset({"warmup_steps", "total_steps", "final_ratio", "power"}),
    "wsd": frozenset({"warmup_steps", "total_steps", "final_ratio", "decay_steps"}),
    "one_cycle": frozenset({"warmup_steps", "total_steps", "final_ratio", "start_ratio"}),
}


class LRSchedulerConfig(Section):
    """The learning rate over optimizer steps, as a factor on every group's `lr`."""

    type: Literal["constant", "cosine", "linear", "wsd", "one_cycle", "polynomial"] = "constant"
    """Constant; warm-up, then cosine, linear or polynomial decay; warm-up, stable, decay; one cycle."""
    warmup_steps: Steps = 0
    """Steps of linear rise at the start: step k of w, from 1, has k / (w + 1) of the peak."""
    total_steps: Count | None = None
    """Steps after which the factor stays at `final_ratio`; every type but constant needs it."""
    final_ratio: Ratio = 0.0
    """Last learning rate over the peak."""
    power: Positive = 1.0
    """Exponent of the polynomial decay."""
    decay_steps: Count | None = None
    """wsd: steps of the decay at the end."""
    start_ratio: Ratio = 0.04
    """one_cycle: first learning rate over the peak."""

    def errors(self) -> Iterable[SettingError]:
        if self.type == "constant":
            return
        if self.total_steps is None:
            least = max(1, self.warmup_steps + (self.decay_steps or 1 if self.type == "wsd" else 0))
            rule = f"an int >= {least}: the optimizer steps of the run"
            if self.type == "wsd" and self.decay_steps is None:
                rule += "; and decay_steps, an int >= 1"
            yield SettingError("total_steps", f"{self.type} needs it", rule)
            return
        if self.warmup_steps > self.total_steps:
            decay = min(self.decay_steps or 1, self.total_steps) if self.type == "wsd" else 0
            legal = f"0 to {self.total_steps - decay}"
            if self.type == "wsd" and self.decay_steps != decay:
                legal += f"; and decay_steps={decay}"
            yield SettingError("warmup_steps", f"exceeds total_steps={self.total_steps}", legal)
            return
        if self.type == "wsd":
            rest = self.total_steps - self.warmup_steps
            if self.decay_steps is None or self.decay_steps > rest:
                rule = f"must lie within the {rest} steps that warmup_steps leaves of total_steps"
                yield SettingError("decay_steps", rule, f"1 to {rest}" if rest else "a smaller warmup_steps")

    def unused_settings(self) -> Iterable[UnusedSetting]:
        reads = SCHEDULE_READS[self.type]
        for name in sorted(set(type(self).model_fields) - {"type"} - reads):
            known = ", ".join(kind for kind, names in SCHEDULE_READS.items() if name in names)
            yield UnusedSetting(name, f"the {self.type} schedule does not read it; {known} would")


class PrecisionConfig(Section):
    """Number formats. The bare name of a dtype stands for `dict(dtype=name)`."""

    dtype: Literal["fp64", "fp32", "bf16", "fp16"] = "bf16"
    """Format of weights and activations in forward and backward."""
    master: Literal["auto", "fp32", "split", "none"] = "auto"
    """Weights that the optimizer updates. fp32: a copy. split: the same bits, 17 of them beside each bf16 weight. none:
    no copy, update in `dtype`. auto: fp32 under bf16 and fp16, none under fp32 and fp64."""
    gradient: Literal["auto", "bf16"] = "auto"
    """Format in which gradients are kept and summed over ranks. auto: fp32 or better. bf16: 2 bytes a parameter instead
    of 4, under dtype bf16 and steps of one micro-batch only (precision.py says what is exact)."""
    loss_scale: Literal["dynamic"] | Positive = "dynamic"
    """fp16 only: factor on the loss before backward; dynamic starts at 2**16 and follows overflows."""

    @property
    def master_dtype(self) -> str:
        """Format of the weights that the optimizer updates; "split" is fp32 in two halves."""
        keeps_own = self.master == "none" or self.dtype in ("fp32", "fp64")
        return self.dtype if keeps_own else "split" if self.master == "split" else "fp32"

    def errors(self) -> Iterable[SettingError]:
        if self.master == "split" and self.dtype != "bf16":
            yield SettingError(
                "master", f"only bf16 is the high half of an fp32 number, {self.dtype} is not", "'auto'"
            )
        if self.gradient == "bf16" and self.dtype != "bf16":
            yield SettingError("gradient", f"would round what backward gives in {self.dtype}", "'auto'")
        if self.master == "fp32" and self.dtype == "fp64":
            yield SettingError("master", "is narrower than dtype='fp64'", "'auto', 'none'")

    def unused_settings(self) -> Iterable[UnusedSetting]:
        if self.dtype != "fp16":
            yield UnusedSetting("loss_scale", f"only fp16 needs it, and dtype is {self.dtype}")
        if self.dtype in ("fp32", "fp64"):
            yield UnusedSetting("master", f"{self.dtype} weights are their own master")


class ZeroConfig(Section):
    """What data parallelism shards (1910.02054). Every stage gives the same numbers."""

    stage: Annotated[int, Field(ge=0, le=3)] = 0
    """Shards over the data axis, and a sequence axis. 0: nothing; 1: optimizer state; 2: also gradients; 3: also
    weights."""
    sum_order: Literal["fast", "ordered"] = "fast"
    """fast: the backend's order of sums; ordered: rank order, the same bits at every stage and placement."""
    reduce_every: Literal["step", "micro_batch"] = "step"
    """Stage 2 with several micro-batches a step. step: reduce gradients once a step (memory of stage 1). micro_batch:
    reduce after each (more traffic)."""
    reshard_after_forward: bool | Annotated[int, Field(ge=2)] = True
    """Stage 3: drop gathered weights after forward and gather them again in backward. A number: keep them sharded over
    so many neighbours on the data axis until backward, and gather from these. It divides the ranks of a copy."""
    shard_size: Count | None = None
    """Hybrid sharding: how many neighbours on the data axis shard one copy, a divisor of parallel.data. Gradients are
    also summed over the copies. A sequence axis always shards. None: one copy, sharded over all."""
    prefetch: Annotated[int, Field(ge=0)] = 1
    """Stage 3: blocks whose weights are gathered ahead of the block that computes. In a pipeline: visits of a stage."""

    def is_hybrid(self, data: int) -> bool:
        """Whether `data` ranks keep more than one copy of the sharded state."""
        return self.stage > 0 and self.shard_size not in (None, data)

    @property
    def near(self) -> int | None:
        """Neighbours that keep the weights sharded between them from forward to backward."""
        resharded = self.reshard_after_forward
        return None if self.stage < 3 or isinstance(resharded, bool) else resharded

    def unused_settings(self) -> Iterable[UnusedSetting]:
        if self.stage == 0:
            yield UnusedSetting("shard_size", "stage 0 shards nothing")
        if self.stage < 2:
            yield UnusedSetting(
                "reduce_every", f"gradients are sharded from stage 2 on, and stage is {self.stage}"
            )
        if self.stage == 3:
            yield UnusedSetting("reduce_every", "stage 3 reduces after each micro-batch in any case")
        if self.stage < 3:
            for name in ("reshard_after_forward", "prefetch"):
                yield UnusedSetting(name, f"weights are sharded at stage 3 only, and stage is {self.stage}")


class CheckpointConfig(Section):
    """How `engine.save` writes and keeps checkpoints."""

    keep: Count = 3
    """Complete checkpoints kept; older ones are deleted."""
    asynchronous: bool = False
    """Write while training goes on."""
    max_failures: Count = 3
    """Consecutive saves that may fail; this many end the run, with exit code 4."""
