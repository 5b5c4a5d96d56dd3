"""What a run will hold and move, on one rank of a world that need not exist.

Note: measured, not listed again.
`plan` runs one micro-batch of the real model, cut by the real `parallelize`, on meta tensors over communicators that
only count; it makes the real chunks, reduces them and builds the real optimizer there.  So bytes on each axis and bytes
of state are those of the engine by construction; what is stated here is how often each part happens in a step.
`activations` is what is alive when a forward pass ends, `temporaries` what comes on top at the worst moment of forward,
backward or update.  A model of ours deeper than three blocks is measured with two and with three, and the difference is
added for each further one: everything but the packing is linear in the blocks.  Cost: some milliseconds a block, at any
size of the world.

`peak` is of tensors, which is what a device holds.  A process on a CPU holds more, `process_bytes`: the libraries that
it loads beside torch's import, and what its allocator keeps of freed memory.  What the pieces of an exchange land in is
part of `temporaries`, as on gloo (native collectives take as much or less); what a transport buffers itself is not.
On CPUs of `one_host` pieces land nowhere: they are read where they were posted, in shared memory of the host, the row
`exchange`: what two exchanges, one after the other, post.  A rank far ahead of the others may have posted more.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from colossal_lite.batch import Batch
from colossal_lite.comm import LedgerRow
from colossal_lite.config import Config
from colossal_lite.data import cut
from colossal_lite.deferral import Later, Root, WeightQueue, defer_weights, restore_weights
from colossal_lite.exchange import ALIGN_BYTES
from colossal_lite.kernels import TORCH
from colossal_lite.memory.chunk import Chunk
from colossal_lite.memory.pack import ChunkSpec, stages_of
from colossal_lite.memory.placement import UNITS, parse_bytes
from colossal_lite.memory.tracer import LiveBytes
from colossal_lite.mesh import Mesh
from colossal_lite.models import GPT, GPTConfig
from colossal_lite.models.gpt import Block
from colossal_lite.optim import groups_of
from colossal_lite.parallel.parallelize import Parallelized, facts_of, parallelize
from colossal_lite.parallel.roles import ModelFacts
from colossal_lite.pipeline.footprint import HEADER_BYTES, StageCost, Walk, most_arrivals, most_unread
from colossal_lite.pipeline.schedule import (
    PipelineConfig,
    StepShape,
    compute_plan,
    splits_backward,
    step_plan,
)
from colossal_lite.pipeline.units import Stages, lay_out
from colossal_lite.plan import SENDS, Action, Kind, Plan, check
from colossal_lite.precision import Precision
from colossal_lite.problems import ConfigError, Problem
from colossal_lite.recompute import blocks_of, recompute
from colossal_lite.rng import DropoutStreams, on_meta
from colossal_lite.shard import ShardSpec
from colossal_lite.simulate import grid, simulate
from colossal_lite.zero.budget import Placement
from colossal_lite.zero.build import build_chunks, pack_chunks, sharding_of, slots_of
from colossal_lite.zero.hooks import GradientHooks
from colossal_lite.zero.norm import in_order, ordered_squares
from colossal_lite.zero.optimizer import ChunkOptimizer
from colossal_lite.zero.order import by_order, order_of_use
from colossal_lite.zero.reside import fixed_of, pieces_of, placed_by
from colossal_lite.zero.sharded import ShardedWeights, contexts_of, plan_of, units_of
from colossal_lite.zero.stages import Sharding
from colossal_lite.zero.unshard import GatherPlan, Moment, Trace, gather_plan

Builder = Callable[[], nn.Module]
META = torch.device("meta")
BY_THE_CLOCK = (
    "partition 'profiled': a run is cut by the clock, perhaps otherwise; this is the cut by the formula"
)
# Blocks of the two models from which deeper ones are extrapolated: the first block and the last are not alike.
MEASURED_BLOCKS = (2, 3)
# Of a process on a CPU, measured with torch 2.13 and glibc 2.36 on 2026-11-21; a test measures both again.  Libraries:
# resident memory of two steps of a model of 50 KB, less that of importing torch.  Allocator: what glibc keeps of the
# memory that is freed within a step, 14 to 26 % of it over five models of 260 to 620 MB; with its threshold for mapping
# held at 128 KiB (MALLOC_MMAP_THRESHOLD_) it keeps nothing.
LIBRARIES_BYTES = 40 * 2**20
ALLOCATOR_SHARE = 0.2


@dataclass(frozen=True)
class Held:
    """Bytes of one kind on this rank at the worst moment of a step, what they are made of, and on which tier."""

    kind: str
    bytes: int
    origin: str
    tier: str = "device"


@dataclass(frozen=True)
class Term:
    """One number of the batch arithmetic, and where it comes from."""

    name: str
    value: int
    origin: str


@dataclass(frozen=True)
class RunPlan:
    """One rank's step: what it holds, what it moves, how the batch is cut. Printing it gives the whole story."""

    layout: str
    rank: int
    world_size: int
    parameters: int
    """Of the whole model, ties once."""
    local_parameters: int
    memory: tuple[Held, ...]
    traffic: tuple[LedgerRow, ...]
    batch: tuple[Term, ...]
    micro_batches: tuple[int, ...]
    """Samples of each part that this rank runs in a step."""
    device_bytes: int | None = None
    schedule: str = ""
    """The pipeline's, drawn, with its bubble and what its ranks hold; empty without one."""
    residence: str = ""
    """What rests where under a budget, chunk by chunk, and what a step moves; empty without one."""

    @property
    def peak_bytes(self) -> int:
        """On the device."""
        return sum(row.bytes for row in self.memory if row.tier == "device")

    @property
    def host_bytes(self) -> int:
        """State that rests in host memory or passes through it."""
        return sum(row.bytes for row in self.memory if row.tier == "host")

    @property
    def disk_bytes(self) -> int:
        """Of the file of state that rests on disk."""
        return sum(row.bytes for row in self.memory if row.tier == "disk")

    @property
    def state_bytes(self) -> int:
        """Allocated on the device from the first step to the last."""
        return sum(row.bytes for row in self.memory if row.kind in STATE and row.tier == "device")

    @property
    def process_bytes(self) -> int:
        """What a process on a CPU holds at the most, less what importing torch takes."""
        freed_in_step = self.peak_bytes - self.state_bytes
        return self.peak_bytes + self.host_bytes + LIBRARIES_BYTES + round(ALLOCATOR_SHARE * freed_in_step)

    @property
    def payload_bytes(self) -> int:
        """Logical payload of a step on all axes."""
        return sum(row.payload_bytes for row in self.traffic)

    @property
    def fits(self) -> bool | None:
        """None where the device's memory is not known."""
        return None if self.device_bytes is None else self.peak_bytes <= self.device_bytes

    def bytes_of(self, kind: str) -> int:
        return sum(row.bytes for row in self.memory if row.kind == kind)

    def __str__(self) -> str:
        return "\n".join(
            [
                f"rank {self.rank} of {self.world_size}: {self.layout}",
                f"parameters {self.parameters:,}, here {self.local_parameters:,}",
                *(f"  {term.name:<18} {term.value:>12,}  {term.origin}" for term in self.batch),
                *(f"  {row.kind:<18} {size(row.bytes):>12}  {_told(row)}" for row in self.memory),
                f"  {'peak':<18} {size(self.peak_bytes):>12}  {self.verdict}",
                *(
                    f"  {f'{row.operation} on {row.axis}':<30} {row.calls:>6} x {size(row.payload_bytes):>12}"
                    for row in self.traffic
                ),
                *self.schedule.splitlines(),
                *(f"  {line}" for line in self.residence.splitlines()),
            ]
        )

    @property
    def verdict(self) -> str:
        if self.device_bytes is None:
            return "the device's memory is not known"
        return f"{'fits' if self.fits else 'does not fit'} in {size(self.device_bytes)}"


BESIDE_STATE = ("gathered", "frozen", "activations", "logits", "temporaries")
STATE = (
    "weights", "gathered", "masters", "gradients", "optimizer", "visiting", "staging", "messages", "frozen",
)  # fmt: skip


def plan(
    config: Config | Mapping[str, Any],
    model: GPTConfig | Builder,
    *,
    batch: int,
    sequence: int,
    world_size: int,
    rank: int = 0,
    layers: Literal["auto"] | Mapping[str, str] = "auto",
    device_bytes: int | None = None,
    one_host: bool = False,
    trains: bool = True,
) -> RunPlan:
    """The step of `rank` in a world of `world_size`, for `batch` samples of `sequence` tokens a step over all ranks.

    `model` is a GPTConfig or whatever builds a module that maps ids [B, T] to logits; `layers` its plan, as
    `initialize` takes it; `device_bytes` the memory of a device, if it is known; `one_host`: all ranks are processes
    of one host's CPUs; not `trains`: of what a forward holds beside the state, that of an evaluation (without a
    pipeline).  Nothing is allocated and no other rank is needed.  Raises ConfigError for what the config
    cannot do with this world or this model.
    """
    config = Config.load(config)
    config.check_built()
    config = config.check_world(world_size)
    _check_sizes(batch, sequence, world_size, rank)
    mesh = Mesh.recording(config.layout(), rank, one_host=one_host and config.backend == "auto")
    facts = _facts(model)
    if facts is not None:
        _check_sequence(facts, sequence)
        config.check_model(replace(facts, sequence=sequence))
    if config.parallel.pipeline.size > 1:
        dry = _Dry(config, mesh, sequence, layers, trains)
        return _staged_plan(dry, model, facts, batch, device_bytes)
    pieces = _pieces(config, batch, mesh)
    dry = _Dry(config, mesh, sequence, layers, trains)
    whole, cost = _measured(dry, model, max(pieces) or 1)
    costs = {max(pieces): cost} | {n: _measured(dry, model, n)[1] for n in set(pieces) - {0, max(pieces)}}
    if not any(pieces):
        cost = Cost({}, {}, 0, 0, 0, 0)
    packed = pack_chunks(whole.trainable, whole.specs, config, mesh.layout, blocks=whole.blocks)
    chunks = build_chunks(whole.trainable, packed, whole.specs, config, mesh, META)
    gathers = _gathers(dry, model, max(pieces) or 1, whole, chunks)
    mesh.ledger.clear()
    memory, placed = _memory(config, chunks, gathers, whole, cost)
    _record_step(chunks, gathers, config, mesh, whole)
    traffic = Counter({(r.operation, r.axis): r.payload_bytes for r in mesh.ledger.rows()})
    calls = Counter({(r.operation, r.axis): r.calls for r in mesh.ledger.rows()})
    for samples in filter(None, pieces):
        traffic.update(costs[samples].payload)
        calls.update(costs[samples].calls)
    memory += _exchanged(mesh)
    return RunPlan(
        layout=mesh.layout.describe(),
        rank=rank,
        world_size=world_size,
        parameters=sum(whole.specs[name].numel for name in whole.names),
        local_parameters=sum(whole.trainable.values()) + sum(whole.frozen.values()),
        memory=memory,
        traffic=tuple(LedgerRow(*key, calls[key], traffic[key]) for key in sorted(traffic)),
        batch=_arithmetic(config, batch, sequence, mesh, pieces),
        micro_batches=pieces,
        device_bytes=device_bytes if device_bytes is not None else config.memory.device_budget,
        residence=str(placed) if placed else "",
    )


# ---- the model, measured ----


@dataclass(frozen=True)
class Cost:
    """One micro-batch: payload and calls per (operation, axis), and live bytes beside the state.

    `until` is the peak until the gradients of the last block have come, `after` the peak from then on: what a further
    block adds to the one it does not add to the other.
    """

    payload: Mapping[tuple[str, str], int]
    calls: Mapping[tuple[str, str], int]
    kept: int
    logits: int
    until: int
    after: int

    def further(self, other: Cost, blocks: int) -> Cost:
        """This cost with `blocks` more blocks, of which `other` has one."""

        def line(a: int, b: int) -> int:
            return a + blocks * (b - a)

        return Cost(
            {key: line(value, other.payload[key]) for key, value in self.payload.items()},
            {key: line(value, other.calls[key]) for key, value in self.calls.items()},
            **{n: line(getattr(self, n), getattr(other, n)) for n in ("kept", "logits", "until", "after")},
        )


@dataclass(frozen=True)
class Whole:
    """What of a model does not depend on the batch: elements of each parameter on this rank, in the order of their use,
    and its spec."""

    trainable: Mapping[str, int]
    frozen: Mapping[str, int]
    specs: Mapping[str, ShardSpec]
    names: tuple[str, ...]
    blocks: tuple[str, ...]
    told: int
    """Numbers that each data rank tells the others of its batch."""


@dataclass(frozen=True)
class _Dry:
    """How a model is run without tensors."""

    config: Config
    mesh: Mesh
    sequence: int
    layers: Literal["auto"] | Mapping[str, str]
    trains: bool = True

    def built(self, builder: Builder) -> tuple[nn.Module, Parallelized, DropoutStreams]:
        """The specs are in the order in which parameters are used."""
        config = self.config
        module = on_meta(builder)
        order = dict.fromkeys(
            (*(order_of_use(module) or ()), *(name for name, _ in module.named_parameters()))
        )
        streams = DropoutStreams(config.seed)
        done = parallelize(
            module,
            self.mesh,
            self.layers,
            sequence_parallel=config.parallel.tensor.sequence_parallel,
            regather=config.parallel.tensor.regather,
            sequence_mode=config.parallel.sequence.mode,
            kernels="torch",
            device_type="meta",
            streams=streams,
        )
        for block in blocks_of(
            module
        ).values():  # backward may run them again, and no mode reaches into backward
            block.forward = partial(_with_flash, block.forward)
            if isinstance(block, Block):  # a pipeline may run its halves
                block.mix = partial(_with_flash, block.mix)  # type: ignore[method-assign]
        recompute(module, config.activation_checkpoint, streams)
        dtype = Precision.of(config.precision.dtype, config.precision.master_dtype).compute
        for parameter in module.parameters():
            parameter.data = torch.empty_like(parameter, dtype=dtype)
        return module.train(), replace(done, specs=by_order(done.specs, tuple(order))), streams

    def whole(self, module: nn.Module, done: Parallelized) -> Whole:
        named = dict(module.named_parameters())
        return Whole(
            {n: named[n].numel() for n in done.specs if named[n].requires_grad},
            {n: p.numel() for n, p in named.items() if not p.requires_grad},
            done.specs,
            tuple(named),
            tuple(blocks_of(module)),
            done.told,
        )

    def batch(self, done: Parallelized, streams: DropoutStreams, samples: int) -> Batch:
        """What this rank sees of a micro-batch of `samples`."""
        ids = torch.zeros(samples, self.sequence, dtype=torch.int64, device=META)
        numbers = torch.arange(samples, device=META)
        part = done.strategy.local_part(Batch((ids,), {}, labels=ids, samples=numbers))
        here = torch.arange(self.sequence, device=META) if part.positions is None else part.positions
        streams.begin(0, part.samples, here)
        return part

    def run(self, module: nn.Module, done: Parallelized, streams: DropoutStreams, samples: int) -> Cost:
        """One micro-batch forward and backward, as the engine runs it: gradients are taken away as they come."""
        self.mesh.ledger.clear()
        meter = LiveBytes()
        if not self.trains:
            return self._evaluated(module, done, streams, samples, meter)
        until: list[int] = []
        last = next(reversed(blocks_of(module)), "")
        missing = {
            n for n, p in module.named_parameters() if p.requires_grad and last and n.startswith(last + ".")
        }

        def arrived(name: str, parameter: Tensor) -> None:
            parameter.grad = None
            missing.discard(name)
            if not missing and not until:
                until.append(meter.window())

        hooks = [
            p.register_post_accumulate_grad_hook(partial(arrived, n))
            for n, p in module.named_parameters()
            if p.requires_grad
        ]
        with _FlashAttention(), meter:
            part = self.batch(done, streams, samples)
            logits = _logits_of(module(*part.args, **part.kwargs))
            logits_bytes = logits.numel() * logits.element_size()
            loss, _ = done.strategy.cross_entropy(done.ops, logits, part.labels)
            del logits
            kept = meter.now_bytes
            loss.backward()
        for hook in hooks:
            hook.remove()
        rows = self.mesh.ledger.rows()
        after = meter.window()
        return Cost(
            {(r.operation, r.axis): r.payload_bytes for r in rows},
            {(r.operation, r.axis): r.calls for r in rows},
            kept, logits_bytes, until[0] if until else after, after,
        )  # fmt: skip

    def _evaluated(
        self, module: nn.Module, done: Parallelized, streams: DropoutStreams, samples: int, meter: LiveBytes
    ) -> Cost:
        """One micro-batch forward, of which nothing is kept."""
        with _FlashAttention(), meter, torch.no_grad():
            part = self.batch(done, streams, samples)
            logits = _logits_of(module.eval()(*part.args, **part.kwargs))
            done.strategy.cross_entropy(done.ops, logits, part.labels)
        module.train()
        rows = self.mesh.ledger.rows()
        return Cost(
            {(r.operation, r.axis): r.payload_bytes for r in rows},
            {(r.operation, r.axis): r.calls for r in rows},
            0, 0, meter.peak_bytes, meter.peak_bytes,
        )  # fmt: skip

    def trace(
        self, module: nn.Module, done: Parallelized, streams: DropoutStreams, samples: int
    ) -> tuple[Trace, tuple[Chunk, ...]]:
        """The order in which one micro-batch reads weights, and the chunks of this module that it speaks of."""
        whole, named = self.whole(module, done), dict(module.named_parameters())
        packed = pack_chunks(whole.trainable, whole.specs, self.config, self.mesh.layout, blocks=whole.blocks)
        chunks = build_chunks(whole.trainable, packed, whole.specs, self.config, self.mesh, META)
        for chunk in chunks:
            chunk.adopt(named, {e.name: torch.empty_like(named[e.name]) for e in chunk.spec.entries})
        hooks = GradientHooks(chunks, named)
        weights = ShardedWeights(module, named, chunks, hooks, self.mesh.world)
        with _FlashAttention():
            part = self.batch(done, streams, samples)
            with weights.forward():
                logits = _logits_of(module(*part.args, **part.kwargs))
            loss, _ = done.strategy.cross_entropy(done.ops, logits, part.labels)
            hooks.begin(is_last=True)
            with weights.backward():
                loss.backward()
        assert weights.trace is not None
        return weights.trace, chunks

    def stages(
        self, stages: Stages, module: nn.Module, done: Parallelized, streams: DropoutStreams, samples: int
    ) -> dict[int, StageCost]:
        """What one micro-batch costs on each stage."""
        part, found = self.batch(done, streams, samples), dict[int, StageCost]()
        carried: Tensor | None = None
        queue, splits = WeightQueue(), splits_backward(self.config.parallel.pipeline)
        if splits:
            defer_weights(module, queue)
        hooks = [
            p.register_post_accumulate_grad_hook(lambda parameter: setattr(parameter, "grad", None))
            for p in module.parameters()
            if p.requires_grad
        ]
        for stage in sorted(stages.placement):
            run = partial(self._stage, stages, stage, carried, part, done)
            self.mesh.ledger.clear()
            cost, carried = run(queue)
            rows = self.mesh.ledger.rows()
            cost = replace(
                cost,
                payload={(r.operation, r.axis): r.payload_bytes for r in rows},
                calls={(r.operation, r.axis): r.calls for r in rows},
            )
            if splits:  # of which a plan may run some backwards in one part
                whole, _ = run(None)
                cost = replace(cost, peaks={**cost.peaks, Kind.B: whole.peaks[Kind.I]})
            found[stage] = cost
        for hook in hooks:
            hook.remove()
        restore_weights(module)
        return found

    def _stage(
        self, stages: Stages, stage: int, carried: Tensor | None, part: Batch, done: Parallelized,
        queue: WeightQueue | None,
    ) -> tuple[StageCost, Tensor]:  # fmt: skip
        """A micro-batch on one stage, backward in two parts if there is a queue, and something like what it gives:
        tensors that come from elsewhere lie in slots, or are another stage's, and are not metered here."""
        leaf = None if carried is None else carried.detach().requires_grad_(carried.requires_grad)
        meter, came, logits = LiveBytes(), list[Tensor](), 0
        with _FlashAttention(), meter:
            outputs = stages.run(stage, leaf, part)
            outputs = _logits_of(outputs) if stage == stages.last else outputs
            if not isinstance(outputs, Tensor):
                raise ValueError(
                    "plan: stages that pass more than one tensor are not built; legal: one tensor"
                )
            if stage == stages.last:
                logits = _bytes(outputs)
                outputs, _ = done.strategy.cross_entropy(done.ops, outputs, part.labels)
            ended, peak = meter.now_bytes, meter.window()
            trains, form = outputs.requires_grad, (outputs.shape, outputs.dtype)
            root = outputs if stage == stages.last else Root.apply(came, outputs)  # type: ignore[no-untyped-call]
            del outputs
            kept = meter.now_bytes
        given = torch.empty(*form[:1], dtype=form[1], device=META)
        cost = StageCost(
            ended, kept, 0, {Kind.F: peak, Kind.B: 0}, logits, 0 if stage == stages.last else _bytes(given)
        )
        if not trains:
            return cost, given
        if stage != stages.last:
            came.append(given)
        with _FlashAttention(), meter:
            with queue.open() if queue else nullcontext(Later()) as later:
                root.backward()
                del root
            peaks = {Kind.F: peak, Kind.I: meter.window(), Kind.B: 0}
            if leaf is not None:
                leaf.grad = None  # goes on
            waiting = meter.now_bytes
            meter.window()
            with torch.no_grad():
                for each in later:
                    each.work()
            peaks[Kind.W] = meter.window()
        peaks[Kind.B] = peaks[Kind.I]
        return replace(cost, waiting=waiting, peaks=peaks), given.requires_grad_()


def _logits_of(outputs: Any) -> Tensor:
    outputs = getattr(outputs, "logits", outputs)
    logits: Tensor = outputs[0] if isinstance(outputs, tuple) else outputs
    return logits


def _measured(dry: _Dry, model: GPTConfig | Builder, samples: int) -> tuple[Whole, Cost]:
    """The model's parameters and the cost of one micro-batch of `samples`."""
    if not isinstance(model, GPTConfig):
        built = dry.built(model)
        return dry.whole(*built[:2]), dry.run(*built, samples)
    blocks = [n for n in MEASURED_BLOCKS if n < model.layers] or [model.layers]
    if len(blocks) < len(MEASURED_BLOCKS):
        blocks = [model.layers]
    made = [dry.built(partial(GPT, replace(model, layers=n))) for n in blocks]
    costs = [dry.run(*built, samples) for built in made]
    whole = dry.whole(*made[-1][:2])
    if len(blocks) == 1:
        return whole, costs[0]
    return _deeper(whole, model.layers, blocks[-1]), costs[0].further(costs[1], model.layers - blocks[0])


def _deeper(whole: Whole, layers: int, blocks: int) -> Whole:
    """The parameters of a GPT of `layers` blocks, from those of one of `blocks`: the last block is repeated."""
    last = f"blocks.{blocks - 1}."

    def repeated(names: tuple[str, ...]) -> list[tuple[str, str]]:
        """(name, name of its like), in the order of the model."""
        own = [name for name in names if name.startswith(last)]
        out: list[tuple[str, str]] = []
        for name in names:
            out.append((name, name))
            if own and name == own[-1]:
                out += [(n.replace(last, f"blocks.{i}.", 1), n) for i in range(blocks, layers) for n in own]
        return out

    return Whole(
        {new: whole.trainable[old] for new, old in repeated(tuple(whole.trainable))},
        {new: whole.frozen[old] for new, old in repeated(tuple(whole.frozen))},
        {new: replace(whole.specs[old], name=new) for new, old in repeated(tuple(whole.specs))},
        tuple(new for new, _ in repeated(whole.names)),
        tuple(f"blocks.{i}" for i in range(layers)),
        whole.told,
    )


def _gathers(
    dry: _Dry, model: GPTConfig | Builder, samples: int, whole: Whole, chunks: tuple[Chunk, ...]
) -> GatherPlan:
    """How these chunks are gathered in a micro-batch: the real gates of the measured model, in its order."""
    if not any(chunk.is_sharded for chunk in chunks):
        return gather_plan(Trace((), ()), {}, num_chunks=len(chunks))
    builder, blocks, zero = model, 0, dry.config.zero
    if isinstance(builder, GPTConfig):
        blocks = min(MEASURED_BLOCKS[-1], builder.layers)
        builder = partial(GPT, replace(builder, layers=blocks))
    module, done, streams = dry.built(builder)
    trace, seen = dry.trace(module, done, streams, samples)
    chunk_of = {entry.name: chunk.spec.id for chunk in chunks for entry in chunk.spec.entries}
    last = f"blocks.{blocks - 1}."

    def stretched(moments: Iterable[Moment], order: Sequence[int]) -> Iterator[Moment]:
        for moment in moments:
            names = [entry.name for index in moment.needs for entry in seen[index].spec.entries]
            repeats = order if blocks and all(name.startswith(last) for name in names) else [blocks - 1]
            for i in repeats:
                like = [name.replace(last, f"blocks.{i}.", 1) for name in names]
                yield Moment(frozenset(chunk_of[name] for name in like))

    order = range(blocks - 1, len(whole.blocks))
    stretch = Trace(tuple(stretched(trace.forward, order)), tuple(stretched(trace.backward, order[::-1])))
    return plan_of(
        stretch.covering(contexts_of(chunks), units_of(chunks)), chunks,
        prefetch=zero.prefetch, reshard_after_forward=zero.reshard_after_forward,
    )  # fmt: skip


class _FlashAttention(TorchFunctionMode):
    """Attention by the kernel that real devices take: on meta, torch would choose the one that keeps a T x T matrix."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.scaled_dot_product_attention:
            return _flash(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def _with_flash(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    with _FlashAttention():
        return forward(*args, **kwargs)


def _flash(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
    is_causal: bool = False, *, scale: float | None = None, enable_gqa: bool = False,
) -> Tensor:  # fmt: skip
    out: Tensor = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        query, key, value, 0.0, is_causal, attn_mask=attn_mask, scale=scale
    )[0]
    return out


# ---- a pipeline ----


def _staged_plan(
    dry: _Dry, model: GPTConfig | Builder, facts: ModelFacts | None, batch: int, device_bytes: int | None
) -> RunPlan:
    """The step of one rank of a pipeline: its stages measured one by one, and its list of actions walked."""
    config, mesh = dry.config, dry.mesh
    pipeline, turns, data = config.parallel.pipeline, config.gradient_accumulation, mesh.size("data")
    bounds = [cut(batch, data, part) for part in range(data)]
    sizes = [stop - start for start, stop in bounds]
    try:
        count = pipeline.parts(
            -(-max(sizes) // turns) if pipeline.micro_batches is None else min(sizes) // turns
        )
    except ValueError as error:
        raise ConfigError(
            [Problem("parallel.pipeline.micro_batches", pipeline.micro_batches, str(error), "fewer")]
        ) from error
    own = [_part(sizes[mesh.coord("data")], turns, turn) for turn in range(turns)]
    pieces = tuple(_part(size, count, i) for size in own for i in range(count))
    module, done, streams = dry.built(partial(GPT, model) if isinstance(model, GPTConfig) else model)
    # Nothing runs here: stages that a run cuts by the clock are cut by the formula.
    stages = lay_out(module, facts, pipeline, mesh.coord("pipeline"))
    whole = dry.whole(module, done)
    packed = pack_chunks(whole.trainable, whole.specs, config, mesh.layout, stages.homes, whole.blocks)
    mine = [spec for spec in packed if any(stage in stages.here for stage in stages_of(spec))]
    chunks = build_chunks(
        whole.trainable, mine, whole.specs, config, mesh, META,
        lambda spec: stages.is_first_holder(stages_of(spec)),
    )  # fmt: skip
    numbers = tuple(
        tuple(spec.id for spec in packed if stage in stages_of(spec)) for stage in sorted(stages.placement)
    )
    reduce: Any = "micro_batch" if sharding_of(config).by_micro_batch else "step"
    shape = StepShape(
        count, turns, numbers, stages.trainable, reduce, costs=stages.cut.stage_costs(),
        placement=tuple(rank for _, rank in sorted(stages.placement.items())),
    )  # fmt: skip
    made, first = step_plan(pipeline, shape), step_plan(pipeline, replace(shape, ahead=False))
    slots = max(most_arrivals(plan[stages.coord]) for plan in (made, first))
    costs = {n: dry.stages(stages, module, done, streams, n) for n in sorted({*pieces} - {0})}
    unread = 0
    if mesh.shares_memory:
        unread = max(
            _unread(made, stages, chunks, costs, pieces, 0, blocks=False),
            _unread(first, stages, chunks, costs, pieces, HEADER_BYTES, blocks=True),
        )
    mesh.ledger.clear()
    _record_pipeline(made[stages.coord], chunks, packed, config, mesh, whole, costs, pieces, stages)
    local = Whole(
        {n: numel for n, numel in whole.trainable.items() if stages.holds(n)},
        {n: numel for n, numel in whole.frozen.items() if stages.holds(n)},
        whole.specs, whole.names, whole.blocks, whole.told,
    )  # fmt: skip
    rows = mesh.ledger.rows()
    return RunPlan(
        layout=mesh.layout.describe(),
        rank=mesh.rank,
        world_size=mesh.world_size,
        parameters=sum(whole.specs[name].numel for name in whole.names),
        local_parameters=sum(local.trainable.values()) + sum(local.frozen.values()),
        memory=_pipeline_memory(made[stages.coord], chunks, config, local, costs, pieces, stages, slots)
        + _exchanged(mesh, unread),
        traffic=rows,
        batch=(
            *_arithmetic(config, batch, dry.sequence, mesh, pieces),
            Term("micro-batches", count, "of each accumulated part"),
        ),
        micro_batches=pieces,
        device_bytes=device_bytes,
        schedule=_drawn(pipeline, shape, stages),
    )


def _part(size: int, parts: int, part: int) -> int:
    start, stop = cut(size, parts, part)
    return stop - start


def _record_pipeline(
    actions: Sequence[Action], chunks: tuple[Chunk, ...], packed: Sequence[ChunkSpec], config: Config, mesh: Mesh,
    whole: Whole, costs: Mapping[int, Mapping[int, StageCost]], pieces: Sequence[int], stages: Stages,
) -> None:  # fmt: skip
    """What the list of one rank communicates, and a step beside it."""
    if mesh.size("data") > 1:
        mesh.axis("data").all_gather(torch.empty(1, max(1, whole.told), dtype=torch.int64, device=META))
    of = {chunk.spec.id: chunk for chunk in chunks}
    axis = mesh.axis("pipeline").axis
    for action in actions:
        size = 0 if action.micro_batch is None else pieces[action.micro_batch]
        if action.kind is Kind.TIED_REDUCE:
            chunk = of[action.chunk or 0]
            for _ in range(len(_holders(chunk, stages)) - 1):
                mesh.ledger.add("send", axis, _bytes(chunk.completed()))
        elif action.kind is Kind.REDUCE:
            of[action.chunk or 0].start_reduce()
            of[action.chunk or 0].finish_reduce()
        elif size and action.kind in SENDS:
            assert action.stage is not None
            source = action.stage if action.kind is Kind.SEND_F else action.stage - 1
            mesh.ledger.add("send", axis, costs[size][source].sent)
        elif size and action.kind is Kind.F:
            cost = costs[size][action.stage or 0]
            for key, total in cost.payload.items():
                mesh.ledger.add(*key, total, calls=cost.calls[key])
    for chunk in chunks:
        chunk.conclude()
    _record_agreement(chunks, packed, sharding_of(config), mesh, whole)


def _pipeline_memory(
    actions: Sequence[Action], chunks: tuple[Chunk, ...], config: Config, whole: Whole,
    costs: Mapping[int, Mapping[int, StageCost]], pieces: Sequence[int], stages: Stages, slots: int,
) -> tuple[Held, ...]:  # fmt: skip
    """The rows of any plan, with what lives at the fullest moment of the list; and `slots` of messages."""
    # What the others have of a tied chunk comes beside it, and the sum is made apart.
    tied = {chunk.spec.id: len(_holders(chunk, stages)) * _whole_bytes(chunk) for chunk in chunks}
    walk = Walk(
        actions, stages.placement, lambda stage, i: costs[pieces[i]][stage] if pieces[i] else None, tied
    )
    worst = Cost({}, {}, walk.kept, walk.logits, walk.most, walk.most)
    rows, _ = _memory(config, chunks, gather_plan(Trace((), ()), {}, num_chunks=len(chunks)), whole, worst)
    largest = 0
    for action in actions:
        if action.kind in SENDS.values() and pieces[action.micro_batch or 0]:
            source = (action.stage or 0) - (action.kind is Kind.RECV_F)
            largest = max(largest, costs[pieces[action.micro_batch or 0]][source].sent)
    return (*rows, Held("messages", slots * largest, "slots of what comes from other stages"))


def _holders(chunk: Chunk, stages: Stages) -> set[int]:
    """Pipeline coordinates that have a chunk."""
    return {stages.placement[stage] for stage in stages_of(chunk.spec)}


def _whole_bytes(chunk: Chunk) -> int:
    """Of all gradients of a chunk."""
    return chunk.spec.numel * chunk.gradient.element_size()


def _unread(
    made: Plan, stages: Stages, chunks: tuple[Chunk, ...], costs: Mapping[int, Mapping[int, StageCost]],
    pieces: Sequence[int], header_bytes: int, *, blocks: bool,
) -> int:  # fmt: skip
    """The most that the messages of this rank take of its host's memory, if they go that way."""
    of = {chunk.spec.id: chunk for chunk in chunks}

    def sent_bytes(action: Action) -> int:
        if action.kind is Kind.TIED_REDUCE:
            chunk = of[action.chunk or 0]
            return (len(_holders(chunk, stages)) - 1) * _whole_bytes(chunk)
        if not pieces[action.micro_batch or 0]:
            return 0
        source = (action.stage or 0) - (action.kind is Kind.SEND_B)
        return costs[pieces[action.micro_batch or 0]][source].sent + header_bytes

    return most_unread(made, stages.coord, sent_bytes, blocks=blocks)


def _drawn(pipeline: PipelineConfig, step: StepShape, stages: Stages) -> str:
    """The schedule by the costs of its stages, its bubble, and what its ranks hold."""
    assert step.costs is not None
    made = compute_plan(pipeline, step)
    timeline = simulate(made, step.costs)
    live = ", ".join(map(str, check(made).live))
    return "\n".join(
        [
            f"{pipeline.schedule}: {pipeline.size} ranks, {step.micro_batches} micro-batches, by the stages' costs",
            *([BY_THE_CLOCK] if pipeline.partition == "profiled" else []),
            *str(stages.cut).splitlines(),
            grid(timeline, columns=120),
            f"bubble {timeline.idle_share():.1%}; activations held at most, of one stage and micro-batch: {live}",
        ]
    )


# ---- the rest of a step ----


def _record_step(
    chunks: tuple[Chunk, ...], gathers: GatherPlan, config: Config, mesh: Mesh, whole: Whole
) -> None:
    """What a step communicates beside its micro-batches' own: places of samples, gradients, agreement, weights."""
    if whole.told:
        mesh.axis("data").all_gather(torch.empty(1, whole.told, dtype=torch.int64, device=META))
    sharding = sharding_of(config)
    for _ in range(config.gradient_accumulation if sharding.by_micro_batch else 1):
        for chunk in reversed(chunks):
            chunk.start_reduce()
            chunk.finish_reduce()
    for chunk in chunks:
        chunk.conclude()
    _record_agreement(chunks, [chunk.spec for chunk in chunks], sharding, mesh, whole)
    for near in (False, True):
        for index, times in gathers.gathers(near=near).items():
            chunk = chunks[index]
            comm = chunk.groups.near if near else chunk.shards
            part = chunk.own_value.new_empty(chunk.spec.numel // comm.size)
            for _ in range(times * config.gradient_accumulation):
                comm.all_gather(part)


def _record_agreement(
    chunks: Sequence[Chunk], packed: Sequence[ChunkSpec], sharding: Sharding, mesh: Mesh, whole: Whole
) -> None:
    """What the ranks agree on at the end of a step, and the weights that they have updated. `packed`: the chunks of the
    whole pipeline."""
    # Loss, weight, stop, apart; what was used; squares.
    numel = 4 + sum(len(spec.entries) for spec in packed) + 1
    if sharding.ordered:
        numel += ordered_squares(chunks, in_order(packed, whole.names), mesh, META).numel() - 1
    mesh.world.all_reduce(torch.empty(numel, dtype=torch.float64, device=META))
    for chunk in chunks:
        chunk.start_gather()


def _memory(
    config: Config, chunks: tuple[Chunk, ...], gathers: GatherPlan, whole: Whole, cost: Cost
) -> tuple[tuple[Held, ...], Placement | None]:
    """What is held, and under a budget what rests where."""
    precision = Precision.of(config.precision.dtype, config.precision.master_dtype)
    placement = config.memory.records_tier
    optimizer = ChunkOptimizer(chunks, groups_of(config.optimizer), TORCH, {}, placement=placement)
    rests = optimizer.tiers.tier if optimizer.tiers else "device"
    update = max((chunk.update_bytes for chunk in chunks), default=0)
    peak = max(cost.until, cost.after, update)
    kept = min(cost.kept, peak)
    compute, gradient = (str(t).removeprefix("torch.") for t in (precision.compute, precision.gradient))
    master = (
        "what float32 has beyond bfloat16"
        if precision.split
        else str(precision.master).removeprefix("torch.")
    )
    numel = sum(chunk.spec.numel for chunk in chunks)
    used = sum(chunk.spec.used_numel for chunk in chunks)
    rows = (
        Held("weights", sum(c.resting_bytes for c in chunks),
             f"{numel:,} x {compute} in {len(chunks)} chunks, {numel - used:,} of them alignment"),
        Held("gathered", gathers.arena_numel * precision.compute.itemsize,
             f"slots of blocks, {config.zero.prefetch} ahead of the one that computes"),
        Held("masters", sum(chunk.master_bytes for chunk in chunks), master, rests),
        Held("gradients", sum(_bytes(c.gradient if c.filling is None else c.filling) for c in chunks), gradient),
        Held("staging", sum(slots.bytes for slots in slots_of(chunks)), "slots of gradients on their way"),
        Held("optimizer", optimizer.state_bytes, f"{config.optimizer.type}, {gradient}", rests),
        *(Held(v.kind, v.forecast_bytes, v.origin, v.tier or "device") for v in optimizer.visits),
        Held("frozen", sum(whole.frozen.values()) * precision.compute.itemsize, compute),
        Held("activations", kept - cost.logits, f"kept for backward, checkpointing {config.activation_checkpoint}"),
        Held("logits", cost.logits, compute),
        Held("temporaries", peak - kept, "on top at the worst moment"),
    )  # fmt: skip
    placed = None
    if config.memory.moves:
        plan = gathers if any(chunk.is_sharded for chunk in chunks) else None
        fixed = fixed_of(chunks, optimizer) | {
            row.kind: row.bytes for row in rows if row.kind in BESIDE_STATE
        }
        pieces = pieces_of(chunks, optimizer, plan, config.gradient_accumulation)
        placed = placed_by(config.memory, pieces, fixed)
        told = {row.kind: row.origin for row in rows} | {
            "optimizer": f"{config.optimizer.type}, with its masters"
        }
        on_disk = [row for row in rows if row.tier != "device"] if rests == "disk" else []
        rows = (*(Held(kind, held, told[kind], tier) for kind, tier, held in placed.rows), *on_disk)
    return tuple(row for row in rows if row.bytes or row.kind in ("weights", "activations")), placed


def _exchanged(mesh: Mesh, unread: int = 0) -> tuple[Held, ...]:
    """What lies in shared memory for other ranks to read, `unread` messages of a pipeline among it; places begin on
    lines of the cache."""
    posted = mesh.ledger.shared_bytes + unread
    posted += -posted % ALIGN_BYTES
    return (Held("exchange", posted, "posted for ranks of this host to read", "host"),) if posted else ()


def _pieces(config: Config, batch: int, mesh: Mesh) -> tuple[int, ...]:
    """Samples of this rank's micro-batches, larger ones first."""
    start, stop = cut(batch, mesh.size("data"), mesh.coord("data"))
    parts = config.gradient_accumulation
    bounds = [cut(stop - start, parts, part) for part in range(parts)]
    return tuple(last - first for first, last in bounds)


def _arithmetic(
    config: Config, batch: int, sequence: int, mesh: Mesh, pieces: tuple[int, ...]
) -> tuple[Term, ...]:
    origins = {row.path: row.origin for row in config.resolved()}
    data = mesh.size("data")
    return (
        Term("global batch", batch, "given: samples a step"),
        Term("sequence", sequence, "given: tokens a sample"),
        Term("tokens a step", batch * sequence, "global batch x sequence"),
        Term("data", data, f"parallel.data, {origins['parallel.data']}"),
        Term("local batch", sum(pieces), f"this rank's part of {batch} over {data}"),
        Term(
            "accumulation",
            config.gradient_accumulation,
            f"gradient_accumulation, {origins['gradient_accumulation']}",
        ),
        Term("micro-batch", max(pieces), "the largest of " + ", ".join(map(str, sorted(set(pieces))))),
    )


# ---- what is asked ----


def _facts(model: GPTConfig | Builder) -> ModelFacts | None:
    if isinstance(model, GPTConfig):
        return facts_of_config(model)
    with META:
        return facts_of(model())


def facts_of_config(model: GPTConfig) -> ModelFacts:
    """The sizes of a model of ours that need not be built."""
    return ModelFacts(
        layers=model.layers, heads=model.heads, kv_heads=model.key_heads, width=model.width,
        ffn=model.ffn_width, vocabulary=model.vocabulary, sequence=model.sequence, tied=model.tied,
        causal=model.causal,
    )  # fmt: skip


def _check_sizes(batch: int, sequence: int, world_size: int, rank: int) -> None:
    problems = [
        Problem(name, value, "is out of range", "an int >= 1")
        for name, value in (("batch", batch), ("sequence", sequence))
        if value < 1
    ]
    if not 0 <= rank < world_size:
        problems.append(Problem("rank", rank, "is out of range", f"0 to {world_size - 1}"))
    if problems:
        raise ConfigError(problems)


def _check_sequence(facts: ModelFacts, sequence: int) -> None:
    if sequence > facts.sequence:
        raise ConfigError(
            [Problem("sequence", sequence, "is more than the model takes", f"1 to {facts.sequence}")]
        )


def parse_model(text: str) -> GPTConfig:
    """From `gpt2-124M`, `llama-8B`, fields such as `layers=6,width=384`, or both: `llama-8B,layers=4`.

    Raises ValueError naming what is legal.
    """
    head, *rest = text.split(",")
    if "=" in head:
        head, rest = "", [head, *rest]
    changes = dict(_field(item) for item in rest)
    if not head:
        return GPTConfig(**changes)
    family, _, named_size = head.partition("-")
    families = {"gpt2": GPTConfig.gpt2, "llama": GPTConfig.llama}
    if family not in families:
        raise ValueError(
            f"model: {head!r}; legal: gpt2-SIZE, llama-SIZE, or fields of GPTConfig: "
            f"{', '.join(field.name for field in fields(GPTConfig))}"
        )
    return families[family](named_size, **changes)


def _field(item: str) -> tuple[str, Any]:
    """`layers=6` as a name and a value of the field's type."""
    name, sign, value = item.partition("=")
    known = {field.name: str(field.type) for field in fields(GPTConfig)}
    if not sign or name not in known:
        raise ValueError(f"model: {item!r}; legal: FIELD=VALUE with a field of GPTConfig: {', '.join(known)}")
    kind = known[name]
    try:
        if kind == "bool":
            return name, {"true": True, "false": False}[value.lower()]
        return name, int(value) if "int" in kind else float(value) if kind == "float" else value
    except (KeyError, ValueError) as error:
        raise ValueError(f"model: {item!r}; legal: a value of type {kind}") from error


def device_memory(text: str | None) -> int | None:
    """Bytes of a device: as given (`80GiB`), else of the CUDA device here, else None. ValueError for other text."""
    if text is not None:
        number = parse_bytes(text)
        if not isinstance(number, int):
            raise ValueError(
                f"device memory: {text!r}; legal: a number with one of {', '.join(UNITS)}, as in 80GiB"
            )
        return number
    return torch.cuda.get_device_properties(0).total_memory if torch.cuda.is_available() else None


def table(made: RunPlan) -> Any:
    """A plan as rich tables, one under the other."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    def columns_of(
        title: str, columns: tuple[str, ...], rows: Sequence[tuple[str, ...]], numbers: tuple[int, ...]
    ) -> Table:
        out = Table(title=title, title_justify="left", box=None, pad_edge=False)
        for index, column in enumerate(columns):
            out.add_column(column, justify="right" if index in numbers else "left", no_wrap=index in numbers)
        for row in rows:
            out.add_row(*map(Text, row))
        return out

    memory = [(row.kind, size(row.bytes), _told(row)) for row in made.memory]
    memory.append(("peak", size(made.peak_bytes), made.verdict))
    memory.append(("on a CPU", size(made.process_bytes), "with libraries and allocator, less torch's import"))
    traffic = [(r.operation, r.axis, f"{r.calls:,}", size(r.payload_bytes)) for r in made.traffic]
    residence = [Text(f"\n{made.residence}")] if made.residence else []
    return Group(
        Text(f"rank {made.rank} of {made.world_size}: {made.layout}"),
        Text(f"parameters {made.parameters:,}, of which here {made.local_parameters:,}"),
        columns_of("\nbatch", ("", "", "origin"), [(t.name, f"{t.value:,}", t.origin) for t in made.batch], (1,)),
        columns_of("\nmemory of this rank", ("", "bytes", "what"), memory, (1,)),
        columns_of(
            "\npayload of a step, of this rank", ("operation", "axis", "calls", "bytes"),
            traffic or [("none", "", "0", "0 B")], (2, 3),
        ),
        *residence,
    )  # fmt: skip


def _told(row: Held) -> str:
    return row.origin if row.tier == "device" else f"on the {row.tier}: {row.origin}"


def size(number: int) -> str:
    """Bytes for people."""
    value = float(number)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024 or unit == "GiB":
            break
        value /= 1024
    return f"{value:,.0f} {unit}" if unit == "B" else f"{value:,.2f} {unit}"


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
