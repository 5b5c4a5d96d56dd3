"""Runs one micro-batch of a model on the meta device, and counts its memory and traffic on this rank.

Note: the real `parallelize` shards the real model, over communicators that only count.  A model of ours with more than
three blocks is measured with two and with three.  The difference is added for each further block.  All except the
packing is linear in the blocks.  Cost: some milliseconds a block.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from types import FrameType
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from colossal_lite.config.config import Config, ConfigError
from colossal_lite.data.batch import Batch
from colossal_lite.distributed.mesh import Mesh
from colossal_lite.layers.batch_norm import shares_statistics, sync_statistics
from colossal_lite.memory.packing import ChunkSpec
from colossal_lite.memory.weight_chunk import WeightChunk
from colossal_lite.models import GPT, GPTConfig
from colossal_lite.models.gpt import Block
from colossal_lite.numerics.precision import Precision
from colossal_lite.numerics.random import DropoutStreams, on_meta
from colossal_lite.numerics.torch_modes import seen_within
from colossal_lite.observe.memory_meter import LiveBytes
from colossal_lite.observe.shape_cache import ShapeCache
from colossal_lite.parallel.fused_head import UnmadeLogits
from colossal_lite.parallel.loss import logits_of
from colossal_lite.parallel.parallelize import NoRolesError, Parallelized, parallelize
from colossal_lite.pipeline.stages import Stages
from colossal_lite.pipeline.step_plan import splits_backward
from colossal_lite.schedule.footprint import StageCost
from colossal_lite.schedule.gather_plan import GatherMoment, GatherPlan, Trace, gather_plan
from colossal_lite.schedule.plan import ActionKind
from colossal_lite.sharding.mesh_layout import MeshLayout
from colossal_lite.sharding.shard_spec import ShardSpec
from colossal_lite.transforms.activation_checkpoint import apply_activation_checkpoint, blocks_of
from colossal_lite.transforms.batch_statistics import is_synced, mark_synced
from colossal_lite.transforms.split_backward import (
    BackwardRoot,
    DeferredWeightGrads,
    WeightGradStore,
    defer_weights,
    restore_weights,
)
from colossal_lite.zero.build_chunks import build_chunks, build_frozen, pack_chunks
from colossal_lite.zero.gather_units import plan_of
from colossal_lite.zero.gradient_hooks import GradientHooks
from colossal_lite.zero.parameter_order import by_order, order_of_use
from colossal_lite.zero.sharded_weights import ParameterGather

Builder = Callable[[], nn.Module]
META = torch.device("meta")
# Blocks of the two models from which deeper ones are extrapolated: the first block and the last are not alike.
MEASURED_BLOCKS = (2, 3)


@dataclass(frozen=True)
class Cost:
    """One micro-batch: payload and calls per (operation, axis), and live bytes beside the state.

    `until` is the peak until the gradients of the last block have arrived, `after` the peak from then on.  A further
    block adds bytes to only one of the two.
    """

    payload: Mapping[tuple[str, str], int]
    calls: Mapping[tuple[str, str], int]
    kept: int
    logits: int
    until: int
    after: int

    def further(self, other: Cost, blocks: int) -> Cost:
        """This cost with `blocks` more blocks. `other` is the cost with one more."""

        def line(a: int, b: int) -> int:
            return a + blocks * (b - a)

        return Cost(
            {key: line(value, other.payload[key]) for key, value in self.payload.items()},
            {key: line(value, other.calls[key]) for key, value in self.calls.items()},
            **{n: line(getattr(self, n), getattr(other, n)) for n in ("kept", "logits", "until", "after")},
        )


@dataclass(frozen=True)
class Whole:
    """The facts of a model that do not depend on the batch: elements of each parameter on this rank, in the order of
    their use, and its spec."""

    trainable: Mapping[str, int]
    frozen: Mapping[str, int]
    specs: Mapping[str, ShardSpec]
    names: tuple[str, ...]
    blocks: tuple[str, ...]
    reported_numbers: int
    """Numbers about its part of a batch that each data rank sends to the others."""
    has_statistics: bool = False
    """Of all data ranks, which then send a number for the shape of their samples too."""
    recurrent: tuple[str, ...] = ()
    """Classes of recurrent layers: their kernels keep memory of their own for backward, which no dry run sees."""

    def packed(
        self, config: Config, layout: MeshLayout, homes: Mapping[str, tuple[int, ...]] | None = None
    ) -> tuple[ChunkSpec, ...]:
        """The chunks of its parameters, frozen ones last."""
        both = {**self.trainable, **self.frozen}
        numels = {name: both[name] for name in self.specs}
        on_cuda = config.backend == "nccl" or (config.backend == "auto" and torch.cuda.is_available())
        device_type = "cuda" if on_cuda else "cpu"  # as `launch` chooses it
        return pack_chunks(numels, self.specs, config, layout, homes, self.blocks, self.frozen, device_type)


@dataclass(frozen=True)
class DryRun:
    """Runs a model without tensors."""

    config: Config
    mesh: Mesh
    sequence: int
    layers: Literal["auto"] | Mapping[str, str]
    trains: bool = True
    forms: ShapeCache = field(default_factory=ShapeCache, repr=False, compare=False)

    def built(self, builder: Builder) -> tuple[nn.Module, Parallelized, DropoutStreams]:
        """The specs are in the order in which parameters are used."""
        config = self.config
        module = on_meta(builder)
        order = dict.fromkeys(
            (*(order_of_use(module) or ()), *(name for name, _ in module.named_parameters()))
        )
        streams = DropoutStreams(config.seed)
        try:
            done = parallelize(
                module,
                self.mesh,
                self.layers,
                sequence_parallel=config.parallel.tensor.sequence_parallel,
                regather_inputs=config.parallel.tensor.regather_inputs,
                sequence_mode=config.parallel.sequence.mode,
                kernels="torch",
                device_type="meta",
                streams=streams,
            )
        except NoRolesError as error:
            legal = "parallel.tensor.size=1, or a model that maps ids to logits and has no buffers"
            raise NoRolesError(
                error.fault, f"{legal}; cl.initialize reads roles with values of buffers"
            ) from None
        for block in blocks_of(module).values():  # backward may run them again, outside the modes
            block.forward = partial(_with_flash, block.forward)
            if isinstance(block, Block):  # a pipeline may run its halves
                block.mix = partial(_with_flash, block.mix)  # type: ignore[method-assign]
        apply_activation_checkpoint(module, config.activation_checkpoint, streams)
        if shares_statistics(config, self.mesh):
            mark_synced(module)
            sync_statistics(module, self.mesh.axis("data"))
        dtype = Precision.of(config.precision).compute
        for parameter in module.parameters():
            parameter.data = _new(parameter, dtype)
        return module.train(), replace(done, specs=by_order(done.specs, tuple(order))), streams

    def whole(self, module: nn.Module, done: Parallelized) -> Whole:
        named = dict(module.named_parameters())
        return Whole(
            {n: named[n].numel() for n in done.specs if named[n].requires_grad},
            {n: p.numel() for n, p in named.items() if not p.requires_grad},
            done.specs,
            tuple(named),
            tuple(blocks_of(module)),
            done.reported_loss,
            any(map(is_synced, module.modules())),
            tuple(sorted({type(m).__name__ for m in module.modules() if isinstance(m, nn.RNNBase)})),
        )

    def batch(self, done: Parallelized, streams: DropoutStreams, samples: int) -> Batch:
        """This rank's part of a micro-batch of `samples`."""
        ids = torch.zeros(samples, self.sequence, dtype=torch.int64, device=META)
        numbers = torch.arange(samples, device=META)
        part = done.local_part(Batch((ids,), {}, labels=ids, samples=numbers))
        streams.begin(0, part.samples, part.token_positions, tokens=part.tokens)
        return part

    def _labels(self, logits: Tensor, part: Batch) -> Tensor:
        """Labels of tokens, or of samples where each has one row of logits. Raises ValuesError for other logits."""
        if logits.dim() == 2 and logits.shape[:1] == part.labels.shape[:1]:
            return part.labels.new_zeros(logits.shape[:1])
        is_whole = self.mesh.size("tensor") == 1
        if logits.dim() != 3 or (is_whole and logits.shape[:2] != part.labels.shape):
            raise ValuesError(
                f"model: gives logits {list(logits.shape)} for ids {list(part.inputs.shape)}. Nothing is planned for "
                f"it; legal: [samples, tokens, vocabulary] or [samples, classes]"
            )
        return part.labels

    def run(self, module: nn.Module, done: Parallelized, streams: DropoutStreams, samples: int) -> Cost:
        """One micro-batch forward and backward, as the engine runs it: gradients are freed as they arrive."""
        self.mesh.ledger.clear()
        meter = LiveBytes(self.forms.run)
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
            with streams.forward(), done.told(part), _on_ids(module, part):
                logits = logits_of(module(*part.args, **part.kwargs))
            logits_bytes = bytes_of(logits)
            loss, _ = done.cross_entropy(logits, self._labels(logits, part))
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
        """One micro-batch forward that saves nothing for backward."""
        with _FlashAttention(), meter, torch.no_grad():
            part = self.batch(done, streams, samples)
            with streams.forward(), done.told(part):
                logits = logits_of(module.eval()(*part.args, **part.kwargs))
            done.cross_entropy(logits, self._labels(logits, part))
        module.train()
        rows = self.mesh.ledger.rows()
        return Cost(
            {(r.operation, r.axis): r.payload_bytes for r in rows},
            {(r.operation, r.axis): r.calls for r in rows},
            0, 0, meter.peak_bytes, meter.peak_bytes,
        )  # fmt: skip

    def trace(
        self, module: nn.Module, done: Parallelized, streams: DropoutStreams, samples: int
    ) -> tuple[Trace, tuple[WeightChunk, ...]]:
        """The order in which one micro-batch reads weights, and the chunks that it names."""
        whole, named = self.whole(module, done), dict(module.named_parameters())
        packed = whole.packed(self.config, self.mesh.layout)
        chunks = build_chunks(whole.trainable, packed, whole.specs, self.config, self.mesh, META)
        frozen = build_frozen(packed, self.config, self.mesh, META)
        for chunk in (*chunks, *frozen):
            chunk.adopt(named, None)
        hooks = GradientHooks(chunks, named)
        weights = ParameterGather(module, named, chunks, hooks, self.mesh.world, self.config.zero, frozen)
        with _FlashAttention(), self.forms:
            part = self.batch(done, streams, samples)
            with weights.forward(), streams.forward(), done.told(part):
                logits = logits_of(module(*part.args, **part.kwargs))
            loss, _ = done.cross_entropy(logits, self._labels(logits, part))
            hooks.begin(is_last=True)
            hooks.expects = True
            with weights.backward():
                loss.backward()
        assert weights.trace is not None
        return weights.trace, (*chunks, *frozen)

    def stages(
        self, stages: Stages, module: nn.Module, done: Parallelized, streams: DropoutStreams, samples: int,
        *, alike: bool,
    ) -> dict[int, StageCost]:  # fmt: skip
        """The cost of one micro-batch on each stage. `alike`: the blocks of the model are, so stages of the same parts
        of blocks are measured once."""
        with self.forms:
            part = self.batch(done, streams, samples)
        found: dict[int, StageCost] = {}
        seen: dict[Hashable, tuple[StageCost, Tensor]] = {}
        carried: Tensor | None = None
        queue, splits = WeightGradStore(), splits_backward(self.config.parallel.pipeline)
        if splits:
            defer_weights(module, queue)
        hooks = [
            p.register_post_accumulate_grad_hook(lambda parameter: setattr(parameter, "grad", None))
            for p in module.parameters()
            if p.requires_grad
        ]
        for stage in sorted(stages.placement):
            form = (_parts_of(stages, stage), carried is not None and carried.requires_grad)
            if form in seen:
                found[stage], carried = seen[form]
                continue
            run = partial(self._stage, stages, stage, carried, part, done, streams)
            self.mesh.ledger.clear()
            with _on_ids(module, part):
                cost, carried = run(queue)
            rows = self.mesh.ledger.rows()
            cost = replace(
                cost,
                payload={(r.operation, r.axis): r.payload_bytes for r in rows},
                calls={(r.operation, r.axis): r.calls for r in rows},
            )
            if splits:  # a plan may still run some backwards in one part
                whole, _ = run(None)
                cost = replace(cost, peaks={**cost.peaks, ActionKind.B: whole.peaks[ActionKind.I]})
            found[stage] = cost
            if alike:
                seen[form] = cost, carried
        for hook in hooks:
            hook.remove()
        restore_weights(module)
        return found

    def _stage(
        self, stages: Stages, stage: int, carried: Tensor | None, part: Batch, done: Parallelized,
        streams: DropoutStreams, queue: WeightGradStore | None,
    ) -> tuple[StageCost, Tensor]:  # fmt: skip
        """A micro-batch on one stage, and a tensor like its output. Backward has two parts if there is a queue.
        Tensors from other stages have buffers of their own, so they are not metered here."""
        leaf = None if carried is None else carried.detach().requires_grad_(carried.requires_grad)
        meter, came, logits = LiveBytes(self.forms.run), list[Tensor](), 0
        with _FlashAttention(), meter:
            with streams.functional(None), done.told(part):
                outputs = stages.run(stage, leaf, part)
            outputs = logits_of(outputs) if stage == stages.last else outputs
            if not isinstance(outputs, Tensor):
                raise ValueError(
                    "plan: stages that pass more than one tensor are not built; legal: one tensor"
                )
            if stage == stages.last:
                logits = bytes_of(outputs)
                outputs, _ = done.cross_entropy(outputs, self._labels(outputs, part))
            ended, peak = meter.now_bytes, meter.window()
            trains, form = outputs.requires_grad, (outputs.shape, outputs.dtype)
            root = outputs if stage == stages.last else BackwardRoot.apply(came, outputs)  # type: ignore[no-untyped-call]
            del outputs
            kept = meter.now_bytes
        given = torch.empty(*form[:1], dtype=form[1], device=META)
        cost = StageCost(
            ended,
            kept,
            0,
            {ActionKind.F: peak, ActionKind.B: 0},
            logits,
            0 if stage == stages.last else bytes_of(given),
        )
        if not trains:
            return cost, given
        if stage != stages.last:
            came.append(given)
        with _FlashAttention(), meter:
            with queue.open() if queue else nullcontext(DeferredWeightGrads()) as later:
                root.backward()
                del root
            peaks = {ActionKind.F: peak, ActionKind.I: meter.window(), ActionKind.B: 0}
            if leaf is not None:
                leaf.grad = None  # it is sent to the stage before
            waiting = meter.now_bytes
            meter.window()
            with torch.no_grad():
                for each in later:
                    each.work()
            peaks[ActionKind.W] = meter.window()
        peaks[ActionKind.B] = peaks[ActionKind.I]
        return replace(cost, waiting=waiting, peaks=peaks), given.requires_grad_()


def _parts_of(stages: Stages, stage: int) -> tuple[str, ...]:
    """The units of a stage without the numbers of their blocks."""
    start, stop = stages.cut.bounds[stage]
    return tuple(unit.name.lstrip("0123456789") for unit in stages.cut.units[start:stop])


def measured(dry: DryRun, model: GPTConfig | Builder, samples: int) -> tuple[Whole, Cost]:
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
        whole.reported_numbers,
    )


def gathers_of(
    dry: DryRun, model: GPTConfig | Builder, samples: int, whole: Whole, chunks: tuple[WeightChunk, ...]
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

    def stretched(moments: Iterable[GatherMoment], order: Sequence[int]) -> Iterator[GatherMoment]:
        for moment in moments:
            names = [entry.name for index in moment.needs for entry in seen[index].spec.entries]
            repeats = order if blocks and all(name.startswith(last) for name in names) else [blocks - 1]
            for i in repeats:
                like = [name.replace(last, f"blocks.{i}.", 1) for name in names]
                yield GatherMoment(frozenset(chunk_of[name] for name in like))

    order = range(blocks - 1, len(whole.blocks))
    stretch = Trace(tuple(stretched(trace.forward, order)), tuple(stretched(trace.backward, order[::-1])))
    return plan_of(stretch, chunks, prefetch=zero.prefetch, reshard_after_forward=zero.reshard_after_forward)


@contextmanager
def _on_ids(module: nn.Module, part: Batch) -> Iterator[None]:
    """Around a forward on ids alone. Raises ValuesError for a model that fails on these, as one of pictures does."""
    try:
        yield
    except (ConfigError, ValuesError):
        raise
    except Exception as error:  # of the user's code, whatever it is
        raise ValuesError(
            f"model: {type(module).__name__} does not run on ids {list(part.inputs.shape)}: {type(error).__name__}: "
            f"{error}. Nothing is planned for it; legal: a model whose forward takes ids [samples, tokens] alone"
        ) from error


class ValuesError(ValueError):
    """The forward of a model reads values of tensors, or other inputs than ids: a run without tensors has neither."""


_heads = seen_within(F.multi_head_attention_forward)
_READS = (Tensor.item, Tensor.tolist, Tensor.__bool__, Tensor.__int__, Tensor.__float__, Tensor.__index__)


class _FlashAttention(TorchFunctionMode):
    """Computes attention by the kernel of real devices. On meta, torch would choose one that keeps a T x T matrix.
    Raises ValuesError where a value is read."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _READS and args[0].is_meta:
            if _asks_for_packing():
                return True
            raise ValuesError(
                f"plan: the model's forward reads a value ({func.__name__} of {tuple(args[0].shape)}), which a run "
                f"without tensors does not have. Legal: a forward whose course depends on shapes alone"
            )
        if func is F.scaled_dot_product_attention:
            return _flash(*args, **(kwargs or {}))
        if func is F.multi_head_attention_forward:
            return _heads(self, *args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def _asks_for_packing() -> bool:
    """Whether transformers asks if each row is one sequence. Without its cache of keys it reads positions for that. A
    planned batch is ids alone, so all rows are."""
    frame: FrameType | None = sys._getframe(1)
    while (
        frame is not None and frame.f_code.co_name == "__torch_function__"
    ):  # another mode may be in between
        frame = frame.f_back
    assert frame is not None
    place = frame.f_globals.get("__name__"), frame.f_code.co_name
    return place == ("transformers.masking_utils", "find_packed_sequence_indices")


def _with_flash(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    with _FlashAttention():
        return forward(*args, **kwargs)


def _flash(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
    is_causal: bool = False, *, scale: float | None = None, enable_gqa: bool = False,
) -> Tensor:  # fmt: skip
    if dropout_p > 0.0:  # which is computed unfused (numerics/functional_dropout.py)
        return F.scaled_dot_product_attention(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )
    out: Tensor = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        query, key, value, 0.0, is_causal, attn_mask=attn_mask, scale=scale
    )[0]
    return out


def _new(like: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.empty(like.shape, dtype=dtype, device=META)


def bytes_of(tensor: Tensor) -> int:
    return 0 if isinstance(tensor, UnmadeLogits) else tensor.numel() * tensor.element_size()
