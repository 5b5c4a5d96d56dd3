"""The training step, on one page, and what it needs around it.

Note: a step.
`train_step` executes a plan: F and B of each micro-batch, REDUCE of each chunk (begun by hooks while B runs), then one
small all-reduce in which the ranks agree on the sums of loss, tokens and squares, on which parameters were used, and on
whether to stop, then UPDATE of each chunk.  Backward is seeded with the *sum* of the token losses, so that no count is
needed before it; the division by the global number of valid tokens is done together with the clip factor inside the
optimizer.  Hence the loss is the mean over all valid tokens of the global batch whatever the cut, and gradients are
those of that mean.  A step whose loss or gradient is not finite, or that has no valid token, is skipped and says so.

Cost of data parallelism per step: one all-reduce of each gradient chunk, one of `4 + parameters` float64, and, where
the model has dropout, one all-gather of the ranks' batch sizes.
"""

from __future__ import annotations

import hashlib
import json
import math
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, is_dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from colossal_lite.batch import Batch, read_batch
from colossal_lite.checkpoint import Checkpointer, Facts, Held, Loaded, Saving
from colossal_lite.compiled import compile_blocks
from colossal_lite.context import Context
from colossal_lite.data import check_batch
from colossal_lite.memory.chunk import Chunk
from colossal_lite.memory.mover import buffers_to_device, to_device, to_host
from colossal_lite.optim import assign_groups, check_whole_tensors, groups_of, learning_rate_factor
from colossal_lite.parallel.parallelize import Parallelized, facts_of, parallelize
from colossal_lite.parallel.swap import cut_values
from colossal_lite.pipeline import runtime
from colossal_lite.pipeline.schedule import serial_plan
from colossal_lite.plan import Action, Kind
from colossal_lite.precision import LossScale, Precision
from colossal_lite.recompute import blocks_of, recompute, restore
from colossal_lite.rng import DropoutStreams, Recipe, build_on_meta, replay
from colossal_lite.settings import OptimizerConfig
from colossal_lite.shard import ShardSpec, dims_of
from colossal_lite.zero.build import build_chunks, slots_of
from colossal_lite.zero.hooks import GradientHooks
from colossal_lite.zero.norm import fast_squares, ordered_squares
from colossal_lite.zero.optimizer import ChunkOptimizer
from colossal_lite.zero.own import Factory, OwnOptimizer
from colossal_lite.zero.stages import Extent, Sharding, Widths, forecast
from colossal_lite.zero.weights import Weights

Criterion = Callable[[Tensor, Tensor], Any]


@dataclass(frozen=True)
class StepResult:
    """One optimizer step. `loss` 0-d, equal on every rank; `grad_norm` before clipping; `lr` of the default group."""

    step: int
    loss: Tensor
    grad_norm: float
    tokens: int
    skipped: bool
    lr: float


@dataclass(frozen=True)
class Totals:
    """What the ranks have agreed on at the end of a backward: sums over the world."""

    loss: float
    weight: float
    squares: float
    stop: bool
    used: tuple[bool, ...]

    @property
    def is_finite(self) -> bool:
        return math.isfinite(self.loss) and math.isfinite(self.squares)

    @property
    def grad_norm(self) -> float:
        return math.sqrt(self.squares) / self.weight if self.weight else 0.0


@dataclass(frozen=True)
class MemoryRow:
    """Bytes of one kind of state on one tier of this rank: now, at the peak, and as the plan foretold."""

    kind: str
    tier: str
    now_bytes: int
    peak_bytes: int
    forecast_bytes: int


class Engine:
    """A model in training. Made by `initialize`; see DESIGN 2 for the two ways to drive it."""

    def __init__(
        self, model: nn.Module, context: Context, parallelized: Parallelized, streams: DropoutStreams,
        chunks: tuple[Chunk, ...], criterion: Criterion | None, optimizer: Factory | None = None,
    ) -> None:  # fmt: skip
        config = context.config
        self.model, self.context, self.mesh = model, context, context.mesh
        self.steps = 0
        self.stop_agreed = False
        self._parallelized, self._streams = parallelized, streams
        self._chunks = chunks
        self._criterion = criterion
        self._facts = facts_of(model)
        self._parameters = dict(model.named_parameters())
        self._sharding = Sharding.of(config.zero, config.gradient_accumulation)
        self._hooks = GradientHooks(chunks, self._parameters, by_micro_batch=self._sharding.by_micro_batch)
        self._weights = Weights(model, chunks)
        # Ranks of one data coordinate compute the same loss; one of them tells it.
        self._tells_loss = parallelized.strategy.tells_loss and self.mesh.coord("pipeline") == 0
        shapes = {name: parameter.shape for name, parameter in self._parameters.items()}
        self._optimizer: ChunkOptimizer | OwnOptimizer
        if optimizer is None:
            self._optimizer = ChunkOptimizer(chunks, groups_of(config.optimizer), parallelized.ops, shapes)
        else:
            scheduled = config.lr_scheduler.type != "constant"
            self._optimizer = OwnOptimizer(chunks, shapes, optimizer, scheduled=scheduled)
        self._loss_scale = LossScale.of(config.precision)
        self._callbacks: list[Callable[[StepResult], None]] = []
        self._losses: dict[int, Tensor] = {}
        self._sums = torch.zeros(
            2, dtype=torch.float64, device=context.device
        )  # loss and weight since the last step
        self._by_count: bool | None = None  # manual mode: whether backward was given counts
        self._totals: Totals | None = None
        self._has_checked_generator = False
        self._checkpoints = Checkpointer(
            self.mesh.layout, self.mesh.rank, context.store, keep=config.checkpoint.keep,
            timeout_s=config.timeout_s, heard=context.heard,
        )  # fmt: skip
        context.on_close(self._checkpoints.settle)

    # ---- a step ----

    def train_step(self, batch: Any) -> StepResult:
        """One optimizer step on this rank's part of the global batch."""
        self.forward_backward(batch)
        return self.step()

    def forward_backward(self, batch: Any) -> Tensor:
        """Gradients of the global mean loss, which is returned: 0-d, equal on every rank."""
        parts = self._begin(batch).cut(self.context.config.gradient_accumulation)
        self.model.train()
        when: Literal["step", "micro_batch"] = "micro_batch" if self._sharding.by_micro_batch else "step"
        actions = serial_plan(len(parts), len(self._chunks), when).ranks[0]
        runtime.run(
            (action for action in actions if action.kind is not Kind.UPDATE),
            {
                Kind.F: lambda action: self._forward(action, parts),
                Kind.B: lambda action: self._backward(action, parts),
                Kind.REDUCE: lambda action: self._hooks.reduce(_chunk_of(action)),
            },
        )
        self._hooks.conclude()
        self._totals = self._agree()
        return self._mean_loss(self._totals)

    def step(self) -> StepResult:
        """Update the parameters from the gradients gathered since the last step."""
        if self._totals is None:
            self._finish_manual()
        totals = self._totals
        assert totals is not None
        factor = learning_rate_factor(self.context.config.lr_scheduler, self.steps)
        skipped = not totals.is_finite or totals.weight == 0
        if not skipped:
            self._optimizer.changed = False
            scale = totals.weight / self._clip_factor(totals.grad_norm)
            runtime.run(
                (a for a in serial_plan(1, len(self._chunks)).ranks[0] if a.kind is Kind.UPDATE),
                {Kind.UPDATE: lambda action: self._update(_chunk_of(action), totals, factor, scale)},
            )
            self._optimizer.finish(factor)
            self._warn_if_unchanged(factor)
        if totals.weight:
            self._loss_scale = self._loss_scale.after(totals.is_finite)
        tokens = (
            int(totals.weight) if self._by_count is not False else 0
        )  # unknown when backward got no counts
        self._clear()
        self.steps += 1
        self.mesh.progress.phase, self.mesh.progress.step = "between steps", self.steps
        self.stop_agreed = totals.stop
        result = StepResult(
            self.steps, self._mean_loss(totals), totals.grad_norm, tokens, skipped,
            self._optimizer.peak_lr * factor,
        )  # fmt: skip
        for callback in self._callbacks:
            callback(result)
        return result

    @torch.no_grad()
    def eval_step(self, batch: Any) -> Tensor:
        """The global mean loss of a batch, without gradients: 0-d, equal on every rank."""
        whole = self._read(batch)
        self._weights.flush()
        was_training = self.model.training
        self.model.eval()
        sums = torch.zeros(2, dtype=torch.float64, device=self.context.device)
        for part in whole.cut(self.context.config.gradient_accumulation):
            if part.size:
                local = self._parallelized.strategy.local_part(part)
                loss, count = self._loss(self._outputs(local), local.labels)
                sums += torch.stack([loss.double(), torch.as_tensor(count, device=loss.device).double()])
        self.model.train(was_training)
        sums = sums if self._tells_loss else torch.zeros_like(sums)
        loss_sum, count = self.mesh.world.all_reduce(sums).tolist()
        return torch.tensor(loss_sum / count if count else math.nan, dtype=torch.float64)

    # ---- the Colossal-AI manner: the user's own loop ----

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model on this rank's micro-batch; logits come over the full vocabulary."""
        inputs = args[0] if args else kwargs["input_ids"]
        first = self._first_sample(inputs.shape[0])
        samples = torch.arange(first, first + inputs.shape[0], device=self.context.device)
        strategy = self._parallelized.strategy
        local = strategy.local_part(Batch(args, kwargs, labels=samples, samples=samples))
        self._streams.begin(self.steps, local.samples, _positions(local))
        outputs = self.model(*local.args, **local.kwargs)
        if not isinstance(outputs, Tensor):
            return outputs
        return strategy.whole_batch(strategy.whole_vocabulary(outputs))

    def zero_grad(self) -> None:
        """Forget gradients that no step has used."""
        self._clear()

    def backward(self, loss: Tensor, count: int | Tensor | None = None) -> None:
        """Add the gradient of `loss` (0-d); where gradients are reduced by micro-batch, every rank makes as many
        calls.

        `count`: the loss is a mean over so many tokens, and the step divides by
        the global number; None: every data rank weighs the same, and the losses of several calls add up."""
        if self._by_count is not None and self._by_count != (count is not None):
            raise ValueError(
                "backward: count is given in some calls of this step and not in others; give it in all or none"
            )
        self._by_count = count is not None
        is_scaled = self.loss_scale != 1.0  # then, and only then, a count on the device is waited for
        seed = self._loss_scale.seed(int(count) if is_scaled and count is not None else 1)
        self._hooks.begin(is_last=False, seed=seed)
        wide = loss.to(torch.promote_types(loss.dtype, torch.float32))
        total = wide if count is None else wide * count
        (total if seed == 1.0 else total * seed).backward()
        if self._sharding.by_micro_batch:
            self._reduce_all()
        self._add(total.detach(), 0 if count is None else count)

    # ---- whole tensors ----

    def full_gradients(self) -> dict[str, Tensor]:
        """Gradients of the global mean loss, unclipped, by the serial model's parameter names.

        After `forward_backward`, before `step`. A parameter that no rank used has zeros.
        """
        if self._totals is None:
            raise ValueError("full_gradients: there are none; call it after forward_backward and before step")
        weight = self._totals.weight
        with self.mesh.ledger.paused():
            return {name: whole / weight for name, whole in self._whole_tensors(lambda chunk: chunk.gradient)}

    def full_state_dict(self) -> dict[str, Tensor]:
        """The serial model's `state_dict()`: copies in host memory, parameters in the master dtype."""
        first = self._first_names()
        with self.mesh.ledger.paused():
            masters = dict(self._whole_tensors(lambda chunk: chunk.master))
            frozen = {
                name: self._whole(name, p.detach())
                for name, p in self._parameters.items()
                if name not in masters
            }
        whole = masters | frozen
        return {
            name: whole[first[name]].clone() if name in first else to_host(value)
            for name, value in self.model.state_dict().items()
        }

    def full_optimizer_state(self) -> dict[str, dict[str, Tensor]]:
        """For each trainable parameter its state tensors in its own shape, and `step`, the updates it has taken."""
        with self.mesh.ledger.paused():
            return {
                entry.name: {n: self._whole(entry.name, t) if t.dim() else t for n, t in state.items()}
                for chunk in self._chunks
                for entry, state in zip(chunk.spec.entries, self._optimizer.states_of(chunk), strict=True)
            }

    def load_full_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Set all parameters and buffers from a serial state dict.

        Raises ValueError listing every missing, unexpected and misshapen tensor, and then changes nothing.
        """
        first = self._first_names()
        own = {  # tensors of the whole shape, without storage
            name: torch.empty(self._specs[first[name]].shape if name in first else value.shape, device="meta")
            for name, value in self.model.state_dict().items()
        }
        faults = [f"missing: {name} {tuple(own[name].shape)}" for name in own.keys() - state.keys()]
        faults += [f"unexpected: {name} {tuple(state[name].shape)}" for name in state.keys() - own.keys()]
        faults += [
            f"shape: {name} is {tuple(state[name].shape)}, the model has {tuple(own[name].shape)}"
            for name in own.keys() & state.keys()
            if own[name].shape != state[name].shape
        ]
        if faults:
            raise ValueError("load_full_state_dict:\n  " + "\n  ".join(sorted(faults)))
        self._weights.flush()
        chunked = {entry.name: (chunk, entry) for chunk in self._chunks for entry in chunk.spec.entries}
        with torch.no_grad():
            for name, target in self.model.state_dict().items():
                value = to_device(state[name], target.device)
                if name in first:
                    spec = self._specs[first[name]]
                    value = cut_values(spec, self.mesh.layout, self.mesh.coords, _reader(value))
                if first.get(name) in chunked:
                    chunk, entry = chunked[first[name]]
                    chunk.load(entry, value)
                else:
                    target.copy_(value)

    # ---- checkpoints ----

    def save(
        self, directory: str | Path, *, samples: int = 0, extra: Mapping[str, Any] | None = None
    ) -> Saving:
        """Write a checkpoint `directory/step-NNNNNNNN`, whole or not at all. Collective: every rank calls it.

        `samples`: what the run has used of its stream (`Loader.samples`); `extra`: JSON of one's own.  With
        `checkpoint.asynchronous` it returns when this rank's state is copied; `.wait()` then tells how it ended.
        Raises CheckpointError, on every rank alike, if it failed twice; training may go on.
        """
        config = self.context.config
        facts = Facts(
            self.steps, samples, config.seed, self._settings(), _own_config(self.model), self._optimizer.updates(),
            extra or {}, self._loss_scale.state,
        )  # fmt: skip
        with self._phase("save"):
            held = list(self._held())
            return self._checkpoints.save(
                Path(directory), held, facts, asynchronous=config.checkpoint.asynchronous
            )

    def load(self, directory: str | Path) -> Loaded:
        """Continue from the newest whole checkpoint in `directory`, or from `directory` if it is one. Collective.

        Any mesh may have saved it.  Raises CheckpointError, on every rank alike, if there is none, or if it does not
        fit (and then changes nothing).
        """
        loaded = self._load(directory, missing_ok=False)
        assert loaded is not None
        return loaded

    def resume(self, directory: str | Path) -> Loaded | None:
        """`load`, or None where `directory` holds no checkpoint yet."""
        return self._load(directory, missing_ok=True)

    def _load(self, directory: str | Path, *, missing_ok: bool) -> Loaded | None:
        held, complete = list(self._held()), self.mesh.size("pipeline") == 1
        with self._phase("load"):
            loaded = self._checkpoints.load(
                Path(directory), held, self._settings(), complete=complete, missing_ok=missing_ok
            )
        if loaded is not None:
            for chunk in self._chunks:
                chunk.publish(0, chunk.owned[1] - chunk.owned[0])
                chunk.start_gather()
            self._weights.flush()
            self._clear()
            self._optimizer.set_updates(loaded.manifest.updates)
            self._loss_scale = self._loss_scale.at(loaded.manifest.loss_scale)
            self.steps = loaded.step
        return loaded

    @contextmanager
    def _phase(self, name: str) -> Iterator[None]:
        before, self.mesh.progress.phase = self.mesh.progress.phase, name
        yield
        self.mesh.progress.phase = before

    def _held(self) -> Iterator[Held]:
        """All that a run must find again, as this rank holds it: `model/NAME`, and `STATE/NAME` of the optimizer."""
        for chunk in self._chunks:
            buffers = {"model": chunk.master, **self._optimizer.flat_state(chunk)}
            flat_axes = chunk.sharding_axes
            for entry in chunk.spec.entries:
                local, start = chunk.part_of(entry) or (slice(0, 0), 0)
                for kind, flat in buffers.items():
                    yield Held(f"{kind}/{entry.name}", self._specs[entry.name], flat[local], start, flat_axes)
        trained = {entry.name for chunk in self._chunks for entry in chunk.spec.entries}
        first = self._first_names()
        for name, value in self.model.state_dict(keep_vars=True).items():
            if name not in trained and first.get(name, name) == name:
                if not value.is_contiguous():
                    value.data = value.data.contiguous()
                spec = self._specs.get(name) or ShardSpec(name, dims_of(value.shape))
                yield Held(f"model/{name}", spec, value.detach().view(-1))

    def _settings(self) -> dict[str, Any]:
        return {row.path: row.value for row in self.context.config.resolved()}

    def memory_report(self) -> tuple[MemoryRow, ...]:
        """Bytes of weights, masters, gradients and optimizer state on this rank, and of the slots in which gradients
        wait to be summed. All are allocated once, at the start, so that the peak is what they hold now; a model whose
        backward leaves parameters out may take more slots than were planned."""
        device, config = self.context.device.type, self.context.config
        precision = Precision.of(config.precision.dtype, config.precision.master_dtype)
        widths = Widths(precision.compute.itemsize, precision.master_copy_bytes, precision.gradient.itemsize)
        kinds = {
            "weights": _bytes(c.value for c in self._chunks),
            "masters": _bytes(c.master for c in self._chunks if precision.master_copy_bytes),
            "gradients": _bytes(c.gradient if c.filling is None else c.filling for c in self._chunks),
            "optimizer": self._optimizer.state_bytes,
            "staging": sum(slots.bytes for slots in slots_of(self._chunks)),
        }
        extents = [Extent(chunk.spec.numel, chunk.comm.size) for chunk in self._chunks]
        foreseen = forecast(self._sharding, extents, widths) | {"optimizer": self._optimizer.forecast_bytes}
        return tuple(MemoryRow(kind, device, now, now, foreseen[kind]) for kind, now in kinds.items())

    def on_step(self, callback: Callable[[StepResult], None]) -> None:
        """Call `callback` with the result of every step from now on."""
        self._callbacks.append(callback)

    @property
    def loss_scale(self) -> float:
        """What fp16 gradients are multiplied with while they are fp16; 1 in every other dtype."""
        return self._loss_scale.scale

    @property
    def ledger(self) -> Any:
        """Payload bytes and calls per (operation, axis) since the last step began."""
        return self.mesh.ledger

    def close(self) -> None:
        """Take the hooks off the model; its parameters keep their values. A save in flight is waited for."""
        self._checkpoints.settle()
        self._hooks.remove()
        restore(self.model)
        self._weights.remove()

    # ---- what the actions do ----

    def _begin(self, batch: Any) -> Batch:
        self.mesh.progress.phase = "batch"
        if self._checkpoints.is_mixed:
            raise ValueError(
                "forward_backward: a load failed halfway, the weights are a mix; load a checkpoint first"
            )
        if not self._hooks.is_clear:
            raise ValueError(
                "forward_backward: the gradients of the last one were not used; call step or zero_grad"
            )
        self.mesh.ledger.clear()
        return self._read(batch)

    def _read(self, batch: Any) -> Batch:
        check_batch(batch, vocabulary=self._facts.vocabulary if self._facts else None)
        labels = batch["labels"] if isinstance(batch, Mapping) else batch[1]
        return read_batch(batch, device=self.context.device, first_sample=self._first_sample(labels.shape[0]))

    def _first_sample(self, size: int) -> int:
        """Where this rank's samples begin in the global batch; only dropout asks."""
        data = self.mesh.axis("data")
        if not self._parallelized.has_dropout or data.size == 1:
            return 0
        sizes = data.all_gather(torch.tensor([size], device=self.context.device)).tolist()
        return int(sum(sizes[: data.coord]))

    def _forward(self, action: Action, parts: tuple[Batch, ...]) -> None:
        self.mesh.progress.phase = "forward"
        assert action.micro_batch is not None
        part = parts[action.micro_batch]
        if part.size == 0:
            return
        part = self._parallelized.strategy.local_part(part)
        with self._only_counted_randomness():
            outputs = self._outputs(part)
        loss, count = self._loss(outputs, part.labels)
        self._losses[action.micro_batch] = loss
        self._add(loss.detach(), count)

    def _backward(self, action: Action, parts: tuple[Batch, ...]) -> None:
        self.mesh.progress.phase = "backward"
        assert action.micro_batch is not None
        seed = self._loss_scale.seed(parts[action.micro_batch].labels.numel())
        self._hooks.begin(is_last=action.micro_batch == len(parts) - 1, seed=seed)
        loss = self._losses.pop(action.micro_batch, None)
        if loss is not None and loss.requires_grad:
            # not backward(seed): torch looks at the shape of one by its symbolic shapes, which import 45 MB of sympy
            (loss if seed == 1.0 else loss * seed).backward()

    def _outputs(self, part: Batch) -> Tensor:
        self._streams.begin(self.steps, part.samples, _positions(part))
        outputs = self.model(*part.args, **part.kwargs)
        outputs = getattr(outputs, "logits", outputs)
        logits: Tensor = outputs[0] if isinstance(outputs, tuple) else outputs
        return logits

    def _loss(self, outputs: Tensor, labels: Tensor) -> tuple[Tensor, Tensor | int | float]:
        """(sum, count) of one micro-batch."""
        if self._criterion is None:
            return self._parallelized.strategy.cross_entropy(self._parallelized.ops, outputs, labels)
        valid = int((labels != -100).sum())
        if valid == 0:
            return outputs.sum() * 0.0, 0
        result = self._criterion(self._parallelized.strategy.whole_vocabulary(outputs), labels)
        if isinstance(result, tuple) and len(result) == 2:
            return result
        if isinstance(result, Tensor) and result.dim() == 0:
            return result.to(torch.promote_types(result.dtype, torch.float32)) * valid, valid
        raise ValueError(
            f"criterion returned {type(result).__name__}; legal: a tuple (sum, count), or a 0-d tensor that is a mean"
        )

    def _agree(self) -> Totals:
        """One all-reduce over the world: every rank knows the same sums afterwards.

        The ranks that hold one sum of a chunk add the squares of a share each, so that no element counts twice."""
        self.mesh.progress.phase = "agreement"
        if self._sharding.ordered:
            squares = ordered_squares(self._chunks, list(self._parameters), self.mesh)
        else:
            squares = fast_squares(self._chunks)
        # In a loop of the user's own every tensor rank has the whole micro-batch's loss.
        tells = (
            self._tells_loss
            if self._by_count is None
            else self.mesh.coord("pipeline", "sequence", "tensor") == 0
        )
        sums = self._sums if tells else torch.zeros_like(self._sums)
        flags = [self.context.stop_requested, *(used for chunk in self._chunks for used in chunk.used)]
        marks = to_device(torch.tensor(flags, dtype=torch.float64), self.context.device)
        row = self.mesh.world.all_reduce(torch.cat([sums, marks, squares]))
        total = row[2 + len(flags) :].sum().item()
        loss, weight, stop, *used = row[: 2 + len(flags)].tolist()
        return Totals(loss, weight, total, stop > 0, tuple(flag > 0 for flag in used))

    def _update(self, index: int, totals: Totals, factor: float, scale: float) -> None:
        self.mesh.progress.phase = "update"
        first = sum(len(chunk.spec.entries) for chunk in self._chunks[:index])
        chunk = self._chunks[index]
        used = totals.used[first : first + len(chunk.spec.entries)]
        self._optimizer.update(chunk, used, factor=factor, grad_scale=scale)
        if any(used):
            chunk.start_gather()

    def _warn_if_unchanged(self, factor: float) -> None:
        lr = self._optimizer.peak_lr * factor
        if lr and not self._optimizer.changed and self.context.is_main:
            warnings.warn(
                f"step: it changed no parameter that rank 0 holds; either all gradients are zero, or steps at "
                f"lr={lr:g} are lost in rounding ({self.context.config.precision.master_dtype} master weights)",
                stacklevel=3,
            )

    def _finish_manual(self) -> None:
        if self._by_count is None:
            raise ValueError("step: there are no gradients; call forward_backward, or backward, first")
        if not self._by_count:
            self._sums[1] = 1.0  # this rank's weight, however many calls
        if not self._sharding.by_micro_batch:
            self._reduce_all()
        self._hooks.conclude()
        self._totals = self._agree()

    def _reduce_all(self) -> None:
        for index in reversed(range(len(self._chunks))):
            self._hooks.reduce(index)

    def _clear(self) -> None:
        self._hooks.clear()
        self._totals, self._by_count = None, None
        self._sums.zero_()
        self._losses.clear()

    def _add(self, loss: Tensor, weight: Tensor | int | float) -> None:
        self._sums[0] += loss
        self._sums[1] += weight

    def _clip_factor(self, norm: float) -> float:
        limit = self.context.config.clip_grad_norm
        return min(1.0, limit / (norm + 1e-6)) if limit is not None else 1.0

    def _mean_loss(self, totals: Totals) -> Tensor:
        return torch.tensor(totals.loss / totals.weight if totals.weight else math.nan, dtype=torch.float64)

    def _whole_tensors(self, buffer_of: Callable[[Chunk], Tensor]) -> Iterator[tuple[str, Tensor]]:
        """Each trainable parameter's whole tensor in host memory from a buffer [owned] of its chunk. Collective."""
        self._weights.flush()
        for chunk in self._chunks:
            flat = chunk.whole(buffer_of(chunk))
            for entry in chunk.spec.entries:
                local = chunk.of(flat, entry, self._parameters[entry.name].shape)
                yield entry.name, self._whole(entry.name, local)

    def _whole(self, name: str, local: Tensor) -> Tensor:
        """The whole tensor of a parameter's shape in host memory, from every rank's part; collective if it is cut."""
        spec, layout = self._specs[name], self.mesh.layout
        if layout.size(*spec.sharding_axes) == 1:
            return to_host(local)
        comm = self.mesh.axis(*spec.sharding_axes)
        parts = to_host(comm.all_gather(local.contiguous().unsqueeze(0)))
        full = torch.zeros(spec.shape, dtype=local.dtype)
        spec.join(zip(map(layout.coords, comm.ranks), parts, strict=True), full, layout)
        return full

    def _first_names(self) -> dict[str, str]:
        """Every name of a parameter, ties included, to its first."""
        first = {id(p): name for name, p in self._parameters.items()}
        return {n: first[id(p)] for n, p in self.model.named_parameters(remove_duplicate=False)}

    @property
    def _specs(self) -> Mapping[str, ShardSpec]:
        return self._parallelized.specs

    @contextmanager
    def _only_counted_randomness(self) -> Iterator[None]:
        """The first training forward must not draw from torch's generator: such numbers differ between meshes."""
        if self._has_checked_generator:
            yield
            return
        before = torch.get_rng_state()
        yield
        self._has_checked_generator = True
        if not torch.equal(torch.get_rng_state(), before):
            raise ValueError(
                "model: its forward draws from torch's own generator (a functional dropout?), so that masks would "
                "depend on the number of ranks; use nn.Dropout, which is replaced, or set its probability to 0"
            )


def initialize(
    model: nn.Module | Callable[[], nn.Module],
    *,
    context: Context,
    criterion: Criterion | None = None,
    plan: Literal["auto"] | Mapping[str, str] = "auto",
    optimizer: Factory | None = None,
) -> Engine:
    """A model and a context to an engine that trains it.

    An nn.Module keeps its values, which must be the same on every rank (hashes are compared).  A callable is run with
    parameters on the meta device; its initialisers are replayed from the seed, so it need never fit on one rank.
    The trainable parameters are those that require a gradient now.  Raises ConfigError for a model that the config
    cannot cut, ValueError for one that cannot be built or differs between ranks; before anything is allocated.
    `optimizer` makes a torch optimizer over the list of parameters it is given, in the place of `config.optimizer`.
    """
    config = context.config
    module, recipes = (model, None) if isinstance(model, nn.Module) else build_on_meta(model)
    facts = facts_of(module)
    if facts is not None:
        config.check_model(facts)
    if not any(p.requires_grad for p in module.parameters()):
        raise ValueError("model: no parameter requires a gradient; there is nothing to train")
    streams = DropoutStreams(config.seed)
    originals = dict(module.named_parameters())
    if recipes is None:
        _assert_same_on_all_ranks(module, context)
    parallelized = parallelize(
        module,
        context.mesh,
        plan,
        sequence_parallel=config.parallel.tensor.sequence_parallel,
        sequence_mode=config.parallel.sequence.mode,
        kernels=config.kernels,
        device_type=context.device.type,
        streams=streams,
    )
    recompute(module, config.activation_checkpoint, streams)
    if config.compile == "block":
        compile_blocks(blocks_of(module), context.device)
    _check_optimizer(optimizer, module, parallelized.specs, context)
    chunks = _build_chunks(module, originals, recipes, parallelized.specs, context)
    buffers_to_device(module, context.device)
    return Engine(module, context, parallelized, streams, chunks, criterion, optimizer)


def _check_optimizer(
    optimizer: object, module: nn.Module, specs: Mapping[str, ShardSpec], context: Context
) -> None:
    """What the optimizer cannot update here, said before anything is allocated."""
    config, mesh = context.config, context.mesh
    shapes = {name: p.shape for name, p in module.named_parameters() if p.requires_grad}
    in_parts = {n for n in shapes if config.zero.stage or mesh.size(*specs[n].sharding_axes) > 1}
    if optimizer is None:
        groups = groups_of(config.optimizer)
        return check_whole_tensors(shapes, assign_groups(shapes, groups), groups, in_parts)
    if not callable(optimizer):
        raise ValueError(
            f"optimizer: {type(optimizer).__name__} is not callable; legal is a callable that takes the list of "
            f"parameters and returns an optimizer, such as functools.partial(torch.optim.NAdam, lr=1e-3)"
        )
    if in_parts or config.memory.placement != "device":
        raise ValueError(
            f"optimizer: one of your own needs whole tensors and whole state on each device; legal is "
            f"zero.stage=0 (now {config.zero.stage}), memory.placement='device' (now {config.memory.placement!r}) "
            f"and no tensor axis (now {mesh.size('tensor')}); or a type of config.optimizer"
        )
    if config.optimizer != OptimizerConfig():
        warnings.warn("optimizer: config.optimizer has no effect beside one of your own", stacklevel=3)


def _build_chunks(
    module: nn.Module, originals: Mapping[str, nn.Parameter], recipes: Mapping[str, Recipe] | None,
    specs: Mapping[str, ShardSpec], context: Context,
) -> tuple[Chunk, ...]:  # fmt: skip
    """Allocate the chunks of all trainable parameters and fill them; frozen ones are converted where they are."""
    config, device = context.config, context.device
    precision = Precision.of(config.precision.dtype, config.precision.master_dtype)
    layout, coords = context.mesh.layout, context.mesh.coords
    _materialise(module, device, precision.compute)
    named = dict(module.named_parameters())

    def initial(name: str) -> Tensor:
        def fetch(start: int, stop: int) -> Tensor:
            if recipes is None:
                return originals[name].detach().reshape(-1)[start:stop]
            return replay(recipes[name], config.seed, name, start, stop)

        return to_device(cut_values(specs[name], layout, coords, fetch), device)

    trainable = {name: parameter for name, parameter in named.items() if parameter.requires_grad}
    numels = {name: parameter.numel() for name, parameter in trainable.items()}
    chunks = build_chunks(numels, specs, config, context.mesh, device)
    for chunk in chunks:
        chunk.adopt(trainable, {entry.name: initial(entry.name) for entry in chunk.spec.entries})
    for name, parameter in named.items():
        if not parameter.requires_grad:
            parameter.data = initial(name).to(precision.compute)
    return chunks


def _materialise(module: nn.Module, device: torch.device, dtype: torch.dtype) -> None:
    """Put real parameters without storage of their own in the place of those on meta; ties stay ties."""
    real: dict[int, nn.Parameter] = {}
    for owner in module.modules():
        for name, parameter in owner.named_parameters(recurse=False):
            if not parameter.is_meta:
                continue
            if id(parameter) not in real:
                empty = torch.empty((), dtype=dtype, device=device).expand(parameter.shape)
                real[id(parameter)] = nn.Parameter(empty, requires_grad=parameter.requires_grad)
            owner._parameters[name] = real[id(parameter)]


def _assert_same_on_all_ranks(module: nn.Module, context: Context) -> None:
    """Refuse a module whose values differ between the ranks, naming the first tensor and the ranks."""
    if context.world_size == 1:
        return
    digests = {
        name: hashlib.blake2b(
            to_host(value).contiguous().view(-1).view(torch.uint8).numpy().data, digest_size=8
        ).hexdigest()
        for name, value in module.state_dict().items()
    }
    rows = context.mesh.world.gather_json(digests)
    for name in {name: None for row in rows for name in row}:
        seen = [row.get(name, "absent") for row in rows]
        if len(set(seen)) > 1:
            odd = [rank for rank, digest in enumerate(seen) if digest != seen[0]]
            raise ValueError(
                f"model: {name} on ranks {odd} differs from rank 0; build it from one seed on every rank, or pass "
                f"a callable to initialize"
            )


def _own_config(model: nn.Module) -> dict[str, Any] | None:
    """What a model says of itself, as JSON has it: a dataclass, or Hugging Face's configuration."""
    config: Any = getattr(model, "config", None)
    if hasattr(config, "to_dict"):
        return dict(json.loads(json.dumps(config.to_dict(), default=str)))
    return asdict(config) if is_dataclass(config) and not isinstance(config, type) else None


def _positions(part: Batch) -> Tensor:
    """Global positions [T] of the tokens here; inputs without a sequence dimension have one position."""
    if part.positions is not None:
        return part.positions
    return torch.arange(part.inputs.shape[1] if part.inputs.dim() > 1 else 1, device=part.inputs.device)


def _reader(value: Tensor) -> Callable[[int, int], Tensor]:
    flat = value.reshape(-1)
    return lambda start, stop: flat[start:stop]


def _chunk_of(action: Action) -> int:
    assert action.chunk is not None
    return action.chunk


def _bytes(tensors: Any) -> int:
    return sum(t.numel() * t.element_size() for t in tensors)
