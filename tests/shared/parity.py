"""One claim, for every mode: the parallel run is the serial run.

Note: the serial model is the truth, and it is plain.  `serial_run` is a loop anyone would write: the module,
one cross-entropy over the valid tokens of the whole batch, `backward`, `clip_grad_norm_`, a torch optimizer.
It shares with the product the model, its initial values and the counters of dropout, and nothing else: no
engine, no chunk, no communicator.  `assert_parity` runs a `Case` on a world of ranks and compares, in every
step, the loss on every rank, every gradient, the gradient norm and every parameter.  A gradient is compared
as DESIGN 4 says: the norm of the difference against the norm of the gradient plus a millionth of that of all
gradients (a key bias has a true gradient of zero).  SGD first: Adam hides every fault of scale.

In 16 bits no tolerance is given: `assert_no_further` compares the distance of the run from the float64 truth
with that of a plain loop in the same dtype, float32 master weights beside it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

import colossal_lite as cl
from colossal_lite.engine.engine import Engine
from colossal_lite.kernels import Dropout
from colossal_lite.models import GPT, GPTConfig
from colossal_lite.numerics.random import DropoutStreams, build_on_meta, replay
from colossal_lite.transforms.activation_checkpoint import blocks_of
from colossal_lite.zero import build_chunks as build
from colossal_lite.zero.user_optimizer import Factory
from tests.shared.emitting import Per, emit, emits_plainly
from tests.shared.plain_optimizers import plain_optimizers
from tests.shared.pool import RankEnv, run_world

TOLERANCE = {"fp64": 1e-10, "fp32": 2e-5}
LOSS_TOLERANCE = {"fp64": 1e-9, "fp32": 1e-5}
DTYPE = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
SIZES: dict[str, Any] = dict(vocabulary=37, layers=2, heads=4, width=16, sequence=12)
FAMILIES: dict[str, dict[str, Any]] = {
    "gpt2": dict(position="learned", norm="layer", activation="gelu"),
    "llama": dict(position="rotary", norm="rms", activation="swiglu", kv_heads=2, bias=False),
}


@dataclass(frozen=True)
class Case:
    """A model, a configuration and a world. `config` lies over SGD in float64 with seed 7."""

    family: str = "gpt2"
    tied: bool = True
    dropout: float = 0.0
    world_size: int = 2
    config: Mapping[str, Any] = field(default_factory=dict)
    global_batch: int = 6
    ragged: bool = False  # labels that are ignored, unevenly, so that ranks have different token counts
    steps: int = 3
    tensor: int = 1
    sequence_parallel: bool = True
    regather_inputs: bool = True
    mode: str = "1d"
    depth: int = 1
    sequence: int = 1
    sequence_mode: str = "ring"
    ulysses: int = 1  # of usp: ranks of the inner axis
    tokens: int = SIZES["sequence"]  # of a sequence
    causal: bool = True
    build: str = "callable"  # or "module": an nn.Module with values of its own
    frozen: tuple[str, ...] = ()
    vocabulary: int = SIZES["vocabulary"]
    layers: int = SIZES["layers"]
    chunk_bytes: int | None = None  # target size of chunks; None: the product's
    adapters: int = 0  # rank of an adapter on every linear of the blocks; all other parameters are frozen
    adapter_kind: Callable[[nn.Module, int], nn.Module] | None = None
    kv_heads: int | None = None  # of our models; None: the family's
    pipeline: Any = 1  # config's parallel.pipeline
    own: Factory | None = None  # an optimizer in the place of config's
    schedule: Callable[[torch.optim.Optimizer], Any] | None = None  # config's lr_scheduler for the plain loop
    sizes: Mapping[str, Any] = field(default_factory=dict)  # over SIZES and those of the family
    auxiliary: tuple[Per, ...] = ()  # losses that every block emits
    shows: bool = False  # a batch to `initialize`

    @property
    def precision(self) -> str:
        given = self.full_config["precision"]
        return str(given["dtype"] if isinstance(given, Mapping) else given)

    @property
    def keeps_masters(self) -> bool:
        """Whether float32 weights stand beside those of a 16-bit model."""
        given = self.full_config["precision"]
        return not isinstance(given, Mapping) or given.get("master") != "none"

    @property
    def full_config(self) -> dict[str, Any]:
        base = dict(precision="fp64", optimizer=dict(type="sgd", lr=0.5), seed=7, timeout_s=60)
        if self.tensor > 1:
            options = (
                dict(sequence_parallel=self.sequence_parallel) if self.mode == "1d" else dict(mode=self.mode)
            )
            options |= {} if self.regather_inputs else dict(regather_inputs=False)
            options |= dict(depth=self.depth) if self.mode == "2.5d" else {}
            base["parallel"] = dict(tensor=dict(size=self.tensor, **options))
        if self.pipeline != 1:
            base["parallel"] = base.get("parallel", {}) | dict(pipeline=self.pipeline)
        if self.sequence > 1:
            axis = dict(sequence=dict(size=self.sequence, mode=self.sequence_mode))
            axis["sequence"] |= dict(ulysses=self.ulysses) if self.sequence_mode == "usp" else {}
            base["parallel"] = base.get("parallel", {}) | axis
        return base | dict(self.config)

    def model(self) -> nn.Module:
        if self.family.startswith("hf-"):
            from tests.shared.hugging_face import MODELS

            model = MODELS[self.family](self.dropout, self.tied, self.causal, max(2, self.layers))
        else:
            own = dict(sequence=self.tokens, vocabulary=self.vocabulary, layers=self.layers)
            options = SIZES | own | FAMILIES[self.family]
            options |= dict(kv_heads=self.kv_heads) if self.kv_heads else {}
            options |= dict(self.sizes)
            model = GPT(GPTConfig(**options, tied=self.tied, dropout=self.dropout, causal=self.causal))
        emit(model, self.auxiliary, inside=self.mode == "1d")
        if self.adapters:
            adapt(model, self.adapters, self.adapter_kind)
        for name, parameter in model.named_parameters():
            if name in self.frozen:
                parameter.requires_grad_(False)
        return model

    def batch(self, step: int) -> tuple[Tensor, Tensor]:
        """The global batch of a step: inputs and labels [global_batch, T]."""
        generator = torch.Generator().manual_seed(1000 + step)
        shape = (self.global_batch, self.tokens)
        inputs = torch.randint(self.vocabulary, shape, generator=generator)
        labels = torch.randint(self.vocabulary, shape, generator=generator)
        if self.ragged:
            lengths = torch.arange(self.global_batch)[:, None] * 2 + 1 + step
            labels = labels.masked_fill(torch.arange(shape[1])[None] >= lengths, -100)
        return inputs, labels


@dataclass(frozen=True)
class Step:
    """What one step left behind, whole."""

    loss: float
    grad_norm: float
    gradients: Mapping[str, Tensor]
    parameters: Mapping[str, Tensor]


def initial_values(case: Case) -> dict[str, Tensor]:
    """Parameters of the serial model: of the seed (callable), or of the module itself."""
    dtype = torch.promote_types(DTYPE[case.precision], torch.float32)
    if case.build == "module":
        torch.manual_seed(3)
        return {n: p.detach().to(dtype) for n, p in case.model().named_parameters()}
    module, recipes = build_on_meta(case.model)
    seed = case.full_config["seed"]
    return {
        name: replay(recipes[name], seed, name, 0, p.numel()).view(p.shape).to(dtype)
        for name, p in module.named_parameters()
    }


READ_BY_ONE = ("precision", "optimizer", "seed", "clip_grad_norm")
"""What of a config the plain loop reads."""
_SERIAL: dict[str, tuple[Case, tuple[Step, ...]]] = {}
"""By the text of a case, which is kept: then no other function has the address that stands there for one of its own."""


def serial_run(case: Case) -> list[Step]:
    """The plain loop on one process, whole batches; 16-bit models beside float32 master weights. It is run once for all
    cases that differ in what only several ranks, or chunks, know."""
    config = {key: case.config[key] for key in READ_BY_ONE if key in case.config}
    alone = replace(
        case, config=config, world_size=1, tensor=1, sequence_parallel=True, regather_inputs=True, depth=1, sequence=1,
        sequence_mode="ring", ulysses=1, pipeline=1, chunk_bytes=None, shows=False,
    )  # fmt: skip
    if repr(alone) not in _SERIAL:
        _SERIAL[repr(alone)] = alone, tuple(_serial_run(alone))
    return list(_SERIAL[repr(alone)][1])


def counted_dropout(model: nn.Module, seed: int) -> DropoutStreams:
    """Put the product's counted masks in the place of every dropout; who runs the model tells the streams a step."""
    streams = DropoutStreams(seed)
    for path, owner in list(model.named_modules()):
        for child_name, child in list(owner._modules.items()):  # repeats included
            if isinstance(child, nn.Dropout | Dropout):
                setattr(owner, child_name, Dropout(child.p))
                name = f"{path}.{child_name}" if path else child_name
                getattr(owner, child_name).rows = partial(streams.rows, name)
    return streams


def _serial_run(case: Case) -> list[Step]:
    config = case.full_config
    model = case.model().to(DTYPE[case.precision]).train()
    named = dict(model.named_parameters())
    masters = initial_values(case)
    trainable = {n: nn.Parameter(masters[n]) for n, p in named.items() if p.requires_grad}
    masters |= {n: p.detach() for n, p in trainable.items()}
    streams = counted_dropout(model, config["seed"])
    if case.own is not None:
        optimizers = [case.own(list(trainable.values()))]
    else:
        optimizers = plain_optimizers(config["optimizer"], trainable)
    schedules = [case.schedule(optimizer) for optimizer in optimizers] if case.schedule else []
    loss_scale = 2.0**16 if case.precision == "fp16" else 1.0
    emitted = emits_plainly(model)
    steps = []
    for number in range(case.steps):
        with torch.no_grad():
            for name, master in masters.items():
                named[name].copy_(master)
                if not case.keeps_masters:
                    master.copy_(named[name])
        inputs, labels = case.batch(number)
        streams.begin(number, torch.arange(len(inputs)), torch.arange(inputs.shape[1]))
        logits = model(inputs)
        logits = getattr(logits, "logits", logits)
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100)
        loss = sum(emitted, loss)
        emitted.clear()
        model.zero_grad()
        (loss * loss_scale).backward()
        for name, master in trainable.items():
            grad = named[name].grad
            master.grad = None if grad is None else grad.to(master.dtype) / loss_scale
        gradients = {n: torch.zeros_like(p) for n, p in trainable.items()}
        gradients |= {n: p.grad.clone() for n, p in trainable.items() if p.grad is not None}
        limit = config.get("clip_grad_norm")
        norm = nn.utils.clip_grad_norm_(trainable.values(), limit if limit is not None else math.inf)
        for each in [*optimizers, *schedules]:
            each.step()
        parameters = {n: p.clone() for n, p in masters.items()}
        steps.append(Step(float(loss.detach()), float(norm), gradients, parameters))
    return steps


def parallel_run(env: RankEnv, case: Case) -> list[Step]:
    """The same steps through launch, initialize and train, on this rank."""
    return list(parallel_steps(env, case)[0])


_sizes: list[int] = []
"""Of chunks: what there was, and what open contexts have set since."""


def resize_chunks(size_bytes: int, context: cl.Context) -> None:
    """Chunks have this size until the context is closed. Contexts may close in any order."""
    if not _sizes:
        _sizes.append(build.CHUNK_BYTES)
    _sizes.append(size_bytes)
    build.CHUNK_BYTES = size_bytes

    def restore() -> None:
        _sizes.reverse()
        _sizes.remove(size_bytes)  # the last of these
        _sizes.reverse()
        build.CHUNK_BYTES = _sizes[-1]
        if len(_sizes) == 1:
            _sizes.clear()

    context.on_close(restore)


def start(case: Case, context: cl.Context, **more: Any) -> Engine:
    """The engine of a case, with `more` of `initialize`. Chunks have its size until the context is closed, as a
    budget is foretold later."""
    torch.manual_seed(3)
    model = case.model() if case.build == "module" else case.model
    if case.chunk_bytes:
        resize_chunks(case.chunk_bytes, context)
    cut = context.local_batch(case.global_batch)
    example = tuple(t[cut] for t in case.batch(0)) if case.shows else None
    return cl.initialize(model, context=context, optimizer=case.own, example=example, **more)


def steps_of(engine: Engine, context: cl.Context, case: Case, numbers: Sequence[int] = ()) -> Iterator[Step]:
    """The steps of a case, or those of `numbers`, with the whole state dict as parameters."""
    cut = context.local_batch(case.global_batch)
    for number in numbers or range(case.steps):
        inputs, labels = case.batch(number)
        loss = engine.forward_backward((inputs[cut], labels[cut]))
        gradients = engine.full_gradients()
        result = engine.step()
        assert result.skipped or torch.equal(loss, result.loss)
        yield Step(float(loss), result.grad_norm, gradients, engine.full_state_dict())


def parallel_steps(env: RankEnv, case: Case) -> tuple[list[Step], list[tuple[str, str, int, int]]]:
    with env.launch(case.full_config) as context:
        engine = start(case, context)
        with torch.random.fork_rng(
            devices=[]
        ):  # not on meta: drawing there imports torch's compiler into the rank
            names = [name for name, _ in case.model().named_parameters()]
        steps = []
        for step in steps_of(engine, context, case):
            assert math.isfinite(step.loss) and math.isfinite(step.grad_norm), "the step was skipped"
            steps.append(replace(step, parameters={name: step.parameters[name] for name in names}))
        rows = [(r.operation, r.axis, r.calls, r.payload_bytes) for r in engine.ledger.rows()]
        engine.close()
    return steps, rows


def first_weights(env: RankEnv, case: Case) -> dict[str, Tensor]:
    """Parameters after one step of a case: with lr=0, the initial ones."""
    return dict(parallel_steps(env, case)[0][0].parameters)


def ledger(env: RankEnv, case: Case) -> list[tuple[str, str, int, int]]:
    """(operation, axis, calls, payload bytes) of the last step of a case."""
    return parallel_steps(env, case)[1]


def mean_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """A criterion of a user's own: the mean over labels other than -100."""
    assert logits.shape[-1] == SIZES["vocabulary"], "a criterion sees the full vocabulary, without padding"
    return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100)


@dataclass(frozen=True)
class OtherWays:
    """What one batch gives under a criterion, in an evaluation, and in a loop of the user's own."""

    loss: float
    gradients: Mapping[str, Tensor]
    evaluated: float
    own_loss: float
    own_parameters: Mapping[str, Tensor]


def in_other_ways(env: RankEnv, case: Case) -> OtherWays:
    with env.launch(case.full_config) as context:
        inputs, labels = (t[context.local_batch(case.global_batch)] for t in case.batch(0))
        engine = cl.initialize(case.model, context=context, criterion=mean_loss)
        loss = engine.forward_backward((inputs, labels)).item()
        gradients = engine.full_gradients()
        own = cl.initialize(case.model, context=context)
        evaluated = own.eval_step((inputs, labels)).item()
        own.backward(mean_loss(own(inputs), labels), int((labels != -100).sum()))
        result = own.step()
        return OtherWays(loss, gradients, evaluated, result.loss.item(), own.full_state_dict())


def assert_other_ways(case: Case, **changes: Any) -> None:
    """A criterion, an evaluation and a loop of the user's own give the serial loss, gradients and parameters."""
    case = replace(case, **changes, ragged=True, steps=1)
    (truth,) = serial_run(case)
    whole = math.sqrt(sum(float(g.norm()) ** 2 for g in truth.gradients.values()))
    for out in run_world(in_other_ways, case.world_size, case):
        for loss in (out.loss, out.evaluated, out.own_loss):
            assert abs(loss - truth.loss) <= 1e-12 * abs(truth.loss)
        for name, expected in truth.gradients.items():
            assert relative_error(out.gradients[name], expected, whole) < 1e-10, name
        for name, expected in truth.parameters.items():
            assert relative_error(out.own_parameters[name], expected, 1.0) < 1e-10, name


def packed(case: Case, positions: bool) -> dict[str, Tensor]:
    """The first batch as packed documents, two to a sample, cut elsewhere in each; perhaps with their positions."""
    inputs, labels = case.batch(0)
    tokens, starts = torch.arange(case.tokens), 3 + 2 * torch.arange(case.global_batch)[:, None] % case.tokens
    documents = (tokens >= starts).long()
    batch = dict(input_ids=inputs, labels=labels, attention_mask=documents)
    return batch | (dict(position_ids=tokens - starts * documents) if positions else {})


def with_documents(env: RankEnv, case: Case, positions: bool) -> dict[str, Tensor]:
    with env.launch(case.full_config) as context:
        engine = cl.initialize(case.model, context=context)
        engine.forward_backward(packed(case, positions))
        return engine.full_gradients()


def assert_documents(case: Case, positions: bool = False) -> None:
    """Packed documents do not see each other: every gradient is that of the serial model under the same mask."""
    batch, model = packed(case, positions), case.model().double()
    named = dict(model.named_parameters())
    with torch.no_grad():
        for name, value in initial_values(case).items():
            named[name].copy_(value)
    labels = batch.pop("labels")
    nn.functional.cross_entropy(model(**batch).flatten(0, 1), labels.flatten()).backward()
    for gradients in run_world(with_documents, case.world_size, case, positions):
        for name, parameter in named.items():
            assert parameter.grad is not None
            assert relative_error(gradients[name], parameter.grad, 1.0) < 1e-10, name


def assert_parity(case: Case, **changes: Any) -> float:
    """The parallel run of `case` is its serial run, on every rank, in every step. Returns the largest error
    found."""
    case = replace(case, **changes)
    reference = serial_run(case)
    ranks = run_world(parallel_run, case.world_size, case, timeout_s=120)
    worst = max(compare(case, reference, steps, rank) for rank, steps in enumerate(ranks))
    assert worst <= TOLERANCE[case.precision]
    return worst


def compare(case: Case, reference: list[Step], steps: list[Step], rank: int) -> float:
    """Raise AssertionError naming the first thing that differs; return the largest relative error of a
    gradient."""
    tolerance, worst = TOLERANCE[case.precision], 0.0
    assert len(steps) == len(reference)
    for number, (ours, truth) in enumerate(zip(steps, reference, strict=True)):
        where = f"rank {rank}, step {number}"
        assert abs(ours.loss - truth.loss) <= LOSS_TOLERANCE[case.precision] * abs(truth.loss), (
            f"{where}: loss"
        )
        assert ours.gradients.keys() == truth.gradients.keys(), f"{where}: names of gradients"
        whole = math.sqrt(sum(float(g.norm()) ** 2 for g in truth.gradients.values()))
        for name, expected in truth.gradients.items():
            error = relative_error(ours.gradients[name], expected, whole)
            assert error <= tolerance, f"{where}: gradient of {name} is off by {error:.3g}"
            worst = max(worst, error)
        assert abs(ours.grad_norm - truth.grad_norm) <= tolerance * truth.grad_norm, f"{where}: gradient norm"
        for name, expected in truth.parameters.items():
            error = relative_error(ours.parameters[name], expected, 1.0)
            assert error <= tolerance, f"{where}: parameter {name} is off by {error:.3g} after the update"
    return worst


def chunk_numel(sizes: list[int], parts: int, *, ordered: bool = False) -> int:
    """Elements of the one chunk that a small model makes: large parameters lie on 1,024, smaller ones on 32; shards are
    of whole vectors of 64, or, where sums are ordered, of whole blocks of 1,024."""
    end = 0
    for size in sizes:
        end += -end % (1024 if size >= 1024 else 32)
        if size < 1024 and end % 1024 + size > 1024:
            end += -end % 1024
        end += size
    return end + -end % (parts * (1024 if ordered else 64))


def relative_error(ours: Tensor, truth: Tensor, whole: float) -> float:
    return float((ours - truth).norm()) / (float(truth.norm()) + 1e-6 * whole)


def assert_no_further(case: Case, times: float = 1.5, *, seeds: Sequence[int] = (7,), **changes: Any) -> None:
    """A run in 16 bits is no further from the float64 truth than `times` the plain run in the same dtype: in
    all gradients together, and in all parameters together, over its steps and `seeds`."""
    case = replace(case, **changes)
    cases = [replace(case, config=case.config | {"seed": seed}) for seed in seeds]
    worlds = [run_world(parallel_run, each.world_size, each, timeout_s=120) for each in cases]
    check_no_further(cases, [list(chain(*runs)) for runs in zip(*worlds, strict=True)], times)


def check_no_further(cases: Sequence[Case], ranks: list[list[Step]], times: float = 1.5) -> None:
    """`ranks`: of each rank the steps of all cases, in turn."""
    exact = [replace(case, config=case.config | {"precision": "fp64"}) for case in cases]
    truth, plain = ([step for case in some for step in serial_run(case)] for some in (exact, cases))
    for rank, ours in enumerate(ranks):
        for kind in ("gradients", "parameters"):
            mine, theirs = distance(ours, truth, kind), distance(plain, truth, kind)
            assert 0 < mine <= times * theirs, f"rank {rank}: {kind} are {mine:.3g} away, not {theirs:.3g}"


def distance(steps: list[Step], truth: list[Step], kind: str) -> float:
    """Root of the sum of squared differences over all steps and tensors, as a share of the truth's."""
    pairs = [
        (getattr(ours, kind)[name].double(), expected)
        for ours, exact in zip(steps, truth, strict=True)
        for name, expected in getattr(exact, kind).items()
    ]
    difference = sum(float((ours - expected).norm()) ** 2 for ours, expected in pairs)
    return math.sqrt(difference / sum(float(expected.norm()) ** 2 for _, expected in pairs))


class Adapter(nn.Module):
    """A low-rank adapter (2106.09685) on a linear layer of any kind: base(x) + up(down(x))."""

    def __init__(self, base: nn.Module, rank: int) -> None:
        super().__init__()
        self.base = base
        outputs, inputs = features_of(base)
        self.down = nn.Parameter(torch.empty(rank, inputs).normal_(0.0, 0.1))
        self.up = nn.Parameter(torch.empty(outputs, rank).normal_(0.0, 0.1))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.base(x) + nn.functional.linear(nn.functional.linear(x, self.down), self.up)
        return y


class ModularAdapter(nn.Module):
    """The same in the form that peft gives it: factors are linears in dictionaries, dropout before them, a scale."""

    def __init__(self, base: nn.Module, rank: int, dropout: float = 0.2) -> None:
        super().__init__()
        self.base_layer = base
        outputs, inputs = features_of(base)
        self.lora_dropout = nn.Dropout(dropout)
        self.lora_A = nn.ModuleDict({"default": nn.Linear(inputs, rank, bias=False)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(rank, outputs, bias=False)})

    def forward(self, x: Tensor) -> Tensor:
        low: Tensor = self.lora_B["default"](self.lora_A["default"](self.lora_dropout(x)))
        y: Tensor = self.base_layer(x) + 2.0 * low
        return y


def features_of(linear: Any) -> tuple[int, int]:
    """(outputs, inputs); Conv1D of Hugging Face's GPT-2 stores its weight the other way round."""
    outputs, inputs = linear.weight.shape
    return (inputs, outputs) if type(linear).__name__ == "Conv1D" else (outputs, inputs)


def adapt(model: nn.Module, rank: int, kind: Callable[[nn.Module, int], nn.Module] | None = None) -> None:
    """Freeze a model and put an adapter on every linear layer of its blocks."""
    model.requires_grad_(False)
    for block in blocks_of(model).values():
        for owner in list(block.modules()):
            for name, child in list(owner.named_children()):
                is_linear = isinstance(child, nn.Linear) or type(child).__name__ == "Conv1D"
                if is_linear and not isinstance(owner, (Adapter, ModularAdapter, nn.ModuleDict)):
                    setattr(owner, name, (kind or Adapter)(child, rank))
