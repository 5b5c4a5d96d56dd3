"""Trains a model serially and on ranks, side by side, and names the first module in which the two differ.

Note: the comparison, and how a fault gets its name.
Every rank trains the whole model in a plain loop: forward, one mean over valid labels, `backward`, SGD.  Beside it runs
the engine of the configuration, with the same values, batches and dropout counters, all in float64.  Each step compares
the loss and every gradient, and the last step every weight.  The first forward also compares the result of each module.
Each row (sample and token) that a rank has must hold numbers of that row of the serial module.  So the first module
with a different result is named, however its features are sharded.  If all results agree, a wrong gradient names its
module.  Of several, the last in the forward is named: there the backward went wrong first.
"""

from __future__ import annotations

import copy
import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from colossal_lite.config.config import Config
from colossal_lite.data.batch import Batch
from colossal_lite.data.batch_checks import IGNORED
from colossal_lite.distributed.mesh import Mesh
from colossal_lite.engine.context import Context
from colossal_lite.engine.engine import Engine
from colossal_lite.engine.initialize import initialize
from colossal_lite.layers.whole_sizes import local
from colossal_lite.numerics.generators import generators_kept
from colossal_lite.numerics.proof_modes import Wide
from colossal_lite.numerics.random import DropoutStreams, on_meta
from colossal_lite.parallel.loss import logits_of
from colossal_lite.parallel.model_loss import ModelLoss, model_loss
from colossal_lite.parallel.parallelize import FACT_NAMES, facts_of, parallelize

CUT_WORDS = ("tensor.column", "tensor.j")
"""Axes along which 2D and 3D modes cut logits."""
TOLERANCE = 1e-9
"""Relative, of float64; for a gradient also a millionth of all gradients."""
LEARNING_RATE = 0.1
SMALL_NUMEL = 1 << 21
"""Models of more parameters are made smaller by their config."""
LEFT_OUT = ("optimizer", "lr_scheduler", "precision", "kernels", "compile", "checkpoint")
"""Parts of a configuration that are not proven. SGD in float64 replaces them, as Adam hides faults of scale."""
HEAD_WIDTH, WORDS, POSITIONS, LAYERS = 8, 211, 64, 4
Build = Callable[[], nn.Module]


@dataclass(frozen=True)
class Fault:
    """The first difference on a rank. `tensor`: "output", "loss", or a parameter's name and "gradient" or the like."""

    step: int
    module: str
    kind: str
    """Class of the module."""
    tensor: str
    error: float
    rank: int
    order: int
    """Position among the comparisons: the fault with the least is the first."""
    axis: str = ""

    def __str__(self) -> str:
        axis = f", axis {self.axis}" if self.axis else ""
        return (
            f"step {self.step}, module {self.module or 'the model itself'} ({self.kind}): {self.tensor} is off by "
            f"{self.error:.3g}{axis} (rank {self.rank})"
        )


@dataclass(frozen=True)
class ProofCase:
    """The model, batches and configuration of both sides. `config`: of the run, in float64 with SGD."""

    config: Mapping[str, Any]
    steps: int
    samples: int
    tokens: int
    words: int
    padding: tuple[int, ...] = ()
    """Words whose rows are not trained."""
    criterion: Literal["model"] | None = None
    plan: Literal["auto"] | Mapping[str, str] = "auto"

    def batch(self, step: int) -> tuple[Tensor, Tensor]:
        """ids and labels [samples, tokens]; some labels are ignored, unevenly."""
        generator = torch.Generator().manual_seed(1000 + step)
        ids, labels = (
            torch.randint(self.words, (self.samples, self.tokens), generator=generator) for _ in range(2)
        )
        every = torch.arange(self.words)[: ids.numel()]
        ids.view(-1)[: len(every)] = every[torch.randperm(len(every), generator=generator)]
        for sample, word in enumerate(self.padding[: self.samples]):
            ids[sample, 1] = word  # where later tokens see it
        lengths = self.tokens - torch.arange(self.samples)[:, None] % 3
        return ids, labels.masked_fill(torch.arange(self.tokens)[None] >= lengths, IGNORED)


@dataclass(frozen=True)
class Proof:
    """The result of a proof on one rank."""

    losses: tuple[float, ...]
    largest_error: float
    compared: int
    """Tensors that were compared."""
    faults: tuple[Fault, ...]


def shrunk(build: Build) -> tuple[Build, str]:
    """A builder of a smaller model of the same kind, by its own config, and a line about it."""
    model = on_meta(build)
    numel, facts = sum(p.numel() for p in model.parameters()), facts_of(model)
    if numel <= SMALL_NUMEL:
        return build, f"the whole model, {numel:,} parameters"
    config = copy.deepcopy(getattr(model, "config", None))
    if facts is None or config is None:
        return build, f"the whole model, {numel:,} parameters (it states no sizes in a config)"
    width = min(facts.width, facts.heads * HEAD_WIDTH)
    ffn = max(8, facts.ffn * width // facts.width // 8 * 8)
    sizes = dict(
        layers=min(facts.layers, 2 * LAYERS), width=width, ffn=ffn, vocabulary=min(facts.vocabulary, WORDS),
        sequence=min(facts.sequence, POSITIONS), head_dim=HEAD_WIDTH,
    )  # fmt: skip
    for fact, names in {**FACT_NAMES, "head_dim": ("head_dim",)}.items():
        for name in names if fact in sizes else ():
            if isinstance(getattr(config, name, None), int):
                object.__setattr__(config, name, sizes[fact])
    smaller = partial(type(model), config)
    try:
        left = sum(p.numel() for p in on_meta(smaller).parameters())
    except Exception as error:  # the model's own code raised it
        return (
            build,
            f"the whole model, {numel:,} parameters (its config does not make a smaller one: {error})",
        )
    return smaller, f"{numel:,} parameters made {left:,} by its config"


def case_of(
    config: Config, model: nn.Module, *, steps: int, criterion: Literal["model"] | None = None,
    plan: Literal["auto"] | Mapping[str, str] = "auto",
) -> ProofCase:  # fmt: skip
    """The case for a configuration whose world is known. Its batch fits the mesh and the model."""
    parallel, layout = config.parallel, config.layout()
    micro = parallel.pipeline.micro_batches or parallel.pipeline.size
    samples = layout.size("data") * config.gradient_accumulation * micro * parallel.tensor.sample_parts
    samples *= max(1, 4 // samples)
    unit = 2 * layout.size("tensor") * layout.size("sequence")
    made = {k: v for k, v in config.model_dump(exclude_unset=True).items() if k not in LEFT_OUT}
    made |= dict(precision="fp64", optimizer=dict(type="sgd", lr=LEARNING_RATE), kernels="torch")
    tables = [m for m in model.modules() if isinstance(m, nn.Embedding)]
    padding = {m.padding_idx for m in tables if m.padding_idx is not None}
    rows = sorted({m.num_embeddings for m in tables}, reverse=True) or [2]
    why: Exception | None = None
    for tokens in dict.fromkeys(max(unit, low // unit * unit) for low in (16, 8, unit)):
        for words in rows:
            case = ProofCase(
                made,
                steps,
                samples,
                tokens,
                words,
                tuple(sorted(n for n in padding if n < words)),
                criterion,
                plan,
            )
            try:
                with torch.no_grad(), generators_kept():
                    model.eval()(case.batch(0)[0])
                return case
            except Exception as error:  # the model's own code takes other ids, or fewer tokens
                why = why or error
    raise ValueError(
        f"model: {type(model).__name__} does not run on ids [{samples}, {unit}]: {type(why).__name__}: {why}. "
        f"Legal: a model whose forward takes ids [samples, tokens] alone. Another is proven by cl.initialize(..., "
        f"example=batch)"
    ) from why


def prove_on_rank(context: Context, build: Build, case: ProofCase) -> Proof:
    """Train the model serially and on the engine, and compare. Collective."""
    serial, model = _built(build), _built(build)
    loss = model_loss(serial) if case.criterion == "model" else None
    with Wide():
        alone = _Serial(serial, case, context.config.seed, context.config.clip_grad_norm, loss)
        engine = initialize(model, context=context, criterion=case.criterion, plan=case.plan)
        beside = _Beside(engine, context, case)
        found = _Findings(context.rank, serial)
        losses = []
        for step in range(case.steps):
            seen = alone.step(step)
            given, theirs, gradients = beside.step(step)
            if step == 0:
                found.outputs(seen, given, context)
            found.loss(step, alone.losses[-1], theirs)
            found.gradients(step, alone.gradients, gradients)
            losses.append(theirs)
            if any(context.mesh.world.gather_json(bool(found.faults))):
                break
        trained = {name: p.detach() for name, p in serial.named_parameters()}
        found.weights(case.steps - 1, trained, engine.full_state_dict())
        engine.close()
    return Proof(
        tuple(losses), found.largest, found.compared, tuple(sorted(found.faults, key=lambda f: f.order))
    )


def _built(build: Build) -> nn.Module:
    with generators_kept():
        torch.manual_seed(0)
        random.seed(0)
        model = build().double()
        for parameter in model.parameters():  # ones and zeros would hide faults
            if bool((parameter == parameter.flatten()[0]).all()):
                parameter.data.add_(0.1 * torch.randn(parameter.shape, dtype=parameter.dtype))
    return model


@dataclass
class _Serial:
    """The plain loop."""

    model: nn.Module
    case: ProofCase
    seed: int
    clip: float | None
    loss: ModelLoss | None
    losses: list[float] = field(default_factory=list)
    gradients: dict[str, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.streams = DropoutStreams(self.seed)
        parallelize(self.model, Mesh.serial(), streams=self.streams, kernels="torch")

    def step(self, number: int) -> dict[str, list[Tensor]]:
        """One step; the results of each module, by name, in the order in which they ended."""
        ids, labels = self.case.batch(number)
        batch = Batch((ids,), {}, labels=labels, samples=torch.arange(len(ids)))
        self.streams.begin(number, batch.samples, torch.arange(ids.shape[1]))
        self.model.train().zero_grad()
        seen: dict[str, list[Tensor]] = {}
        with _watched(self.model, lambda name, out: seen.setdefault(name, []).append(out)):
            with self.streams.forward():
                asked = batch if self.loss is None else self.loss.asked(batch)
                outputs = self.model(*asked.args, **asked.kwargs)
        if self.loss is not None:
            total, count = self.loss.of(outputs, labels)
        else:
            flat = logits_of(outputs).flatten(0, -2)
            total = F.cross_entropy(flat, labels.flatten(), ignore_index=IGNORED, reduction="sum")
            count = int((labels != IGNORED).sum())
        mean = total / count
        mean.backward()
        named = {n: p for n, p in self.model.named_parameters() if p.requires_grad}
        self.gradients = {
            n: torch.zeros_like(p) if p.grad is None else p.grad.clone() for n, p in named.items()
        }
        if self.clip is not None:
            nn.utils.clip_grad_norm_(named.values(), self.clip)
        with torch.no_grad():
            for parameter in named.values():
                if parameter.grad is not None:
                    parameter.sub_(LEARNING_RATE * parameter.grad)
        self.losses.append(float(mean.detach()))
        return seen


@dataclass(frozen=True)
class _Part:
    """The result of one call of a module on this rank, with its samples and tokens."""

    value: Tensor
    samples: Tensor
    positions: Tensor


@dataclass
class _Beside:
    """The engine of the configuration, which trains beside the serial model."""

    engine: Engine
    context: Context
    case: ProofCase

    def step(self, number: int) -> tuple[dict[str, list[_Part]], float, dict[str, Tensor]]:
        """The results of each module, the loss, and the full gradients of one step."""
        seen: dict[str, list[_Part]] = {}
        streams = self.engine._streams
        cut = self.context.local_batch(self.case.samples)
        counted = self.engine._parallelized.has_dropout  # else the engine counts samples of each rank from 0
        first = 0 if counted else cut.start

        def see(name: str, out: Tensor) -> None:
            place = streams.place()
            seen.setdefault(name, []).append(_Part(out, place.sample + first, place.position))

        ids, labels = self.case.batch(number)
        with _watched(self.engine.model, see):
            loss = float(self.engine.forward_backward((ids[cut], labels[cut])))
        gradients = self.engine.full_gradients()
        self.engine.step()
        return seen, loss, gradients


@contextmanager
def _watched(model: nn.Module, see: Callable[[str, Tensor], None]) -> Iterator[None]:
    """Call `see` with the result of each module of a model, when it has run."""

    def hook(name: str, module: nn.Module, args: Any, out: Any) -> None:
        first = logits_of(out) if isinstance(out, tuple) and out else getattr(out, "logits", out)
        if isinstance(first, Tensor) and first.is_floating_point() and first.dim() > 1:
            see(name, local(first.detach()))

    with ExitStack() as hooks:
        for name, module in model.named_modules():
            hooks.enter_context(module.register_forward_hook(partial(hook, name)))
        yield


@dataclass
class _Findings:
    """Differences of one rank, as they are found."""

    rank: int
    serial: nn.Module
    largest: float = 0.0
    compared: int = 0
    faults: list[Fault] = field(default_factory=list)

    def outputs(
        self, truth: Mapping[str, Sequence[Tensor]], given: Mapping[str, Sequence[_Part]], context: Context
    ) -> None:
        for order, (name, wholes) in enumerate(truth.items()):
            parts = given.get(name, ())
            if len(wholes) != 1:  # a module that runs several times has no single result
                continue
            errors = [error for part in parts if (error := _row_error(part, wholes[0], context)) is not None]
            if errors:
                self._judge(0, name, "output", max(errors), order)

    def loss(self, step: int, truth: float, theirs: float) -> None:
        self._judge(step, "", "loss", abs(theirs - truth) / abs(truth), 100_000)

    def gradients(self, step: int, truth: Mapping[str, Tensor], given: Mapping[str, Tensor]) -> None:
        whole = sum(float(g.square().sum()) for g in truth.values()) ** 0.5
        for index, (name, expected) in enumerate(truth.items()):
            error = float((given[name] - expected).norm()) / (float(expected.norm()) + 1e-6 * whole + 1e-300)
            module, _, own = name.rpartition(".")
            self._judge(step, module, f"gradient of {own}", error, 300_000 - index)

    def weights(self, step: int, truth: Mapping[str, Tensor], given: Mapping[str, Tensor]) -> None:
        for index, (name, expected) in enumerate(truth.items()):
            error = float((given[name] - expected).norm()) / (float(expected.norm()) + 1e-300)
            module, _, own = name.rpartition(".")
            self._judge(step, module, f"weight {own}", error, 400_000 + index)

    def _judge(self, step: int, module: str, tensor: str, error: float, order: int) -> None:
        self.compared += 1
        if error <= TOLERANCE:
            self.largest = max(self.largest, error)
            return
        kind = type(self.serial.get_submodule(module)).__name__
        self.faults.append(Fault(step, module, kind, tensor, error, self.rank, order))


def _row_error(part: _Part, whole: Tensor, context: Context) -> float | None:
    """How far a rank's rows are from numbers of the serial rows. None for a result without rows of samples and
    tokens."""
    value, tokens, samples, positions = part.value, len(part.positions), part.samples, part.positions
    if value.dim() == whole.dim() == 2:  # of each position, alike for all samples
        value, whole = value[None], whole[None]
    if len(whole) == 1:
        samples = samples[:1] * 0
    if value.dim() < 3 or whole.dim() < 3 or value.shape[0] != len(samples) or not value.numel():
        return None
    if value.shape[1] != tokens:  # cut over the tensor ranks as well
        cuts = tokens // max(value.shape[1], 1)
        if cuts != context.mesh.size("tensor") or value.shape[1] * cuts != tokens:
            return None
        positions = positions.tensor_split(cuts)[context.mesh.coord("tensor")]
    if len(whole) <= int(samples.max()) or whole.shape[1] <= int(positions.max()):
        return None
    axis = next((leaf.name for leaf in context.mesh.layout.leaves if leaf.name in CUT_WORDS), "tensor")
    ranks, width = context.mesh.size(axis), value.shape[-1]
    if 0 < width * ranks - whole.shape[-1] < ranks:  # logits: the last ones are of no word
        value = value[..., : max(whole.shape[-1] - width * context.mesh.coord(axis), 0)]
    rows = whole[samples][:, positions].flatten(0, 1).flatten(1)
    mine = value.flatten(0, 1).flatten(1)
    scale: float = float(rows.norm()) / math.sqrt(rows.numel()) + 1e-300
    if mine.shape == rows.shape:
        return float((mine - rows).abs().max()) / scale
    known = torch.cat([rows, rows.new_zeros(len(rows), 1)], 1).sort(-1).values.contiguous()
    mine = mine.masked_fill(mine <= torch.finfo(torch.float32).min, 0.0)  # words that are padding
    after = torch.searchsorted(known, mine.contiguous()).clamp(max=known.shape[1] - 1)
    nearest = torch.minimum(
        (known.gather(1, after) - mine).abs(), (known.gather(1, (after - 1).clamp(min=0)) - mine).abs()
    )
    return float(nearest.max()) / scale if nearest.numel() else None


def on_one_axis(config: Config) -> dict[str, Config]:
    """The configuration with one axis of several ranks at a time, by its name. Empty if at most one axis has
    several."""
    layout, whole = config.layout(), config.parallel
    axes = [axis for axis in ("tensor", "sequence", "pipeline", "data") if layout.size(axis) > 1]
    alone = {}
    for axis in axes if len(axes) > 1 else ():
        given = {"data": 1} | {axis: getattr(whole, axis)}
        if axis != "data":
            given[axis] = given[axis].model_dump(exclude_unset=True)
        alone[axis] = Config.load(config.model_dump(exclude_unset=True) | {"parallel": given})
    return alone
