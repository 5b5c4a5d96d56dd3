"""Runs forward and backward for a user's own training loop, one micro-batch a call.

Note: the parts of such a loop.
The loop calls `engine(x)`, computes its own loss, and calls `engine.backward(loss)` and `engine.step()`.  Logits are
gathered over vocabulary, tokens and samples.  So every tensor rank has the loss of the whole micro-batch, and one of
them reports it.  Samples are counted over the micro-batches of a step, so each has dropout masks of its own.  A
pipeline is refused, since only the engine can run its plan.  Auxiliary losses are refused too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from inspect import signature
from math import inf
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from colossal_lite.checks.all_samples import AllSamples
from colossal_lite.checks.loss_means import denominators
from colossal_lite.checks.rank_comparison import RankComparison
from colossal_lite.checks.scaled_loss import ScaledLoss
from colossal_lite.config.config import Config
from colossal_lite.data.batch import Batch, first_input
from colossal_lite.data.batch_forms import named
from colossal_lite.engine.engine_parts import EngineParts
from colossal_lite.engine.micro_batches import MicroBatches
from colossal_lite.engine.step_totals import OpenStep
from colossal_lite.layers.whole_sizes import without_parts
from colossal_lite.numerics.torch_modes import refuse_without_gradients
from colossal_lite.parallel.loss import logits_of, with_logits
from colossal_lite.parallel.model_loss import CLEAR_NAMES, NAMES
from colossal_lite.zero.build_chunks import sharding_of

ALIKE = 1e-5
"""How far weighted sums of an output may be apart on ranks that have the same, as a share of the absolute sum."""
LARGE = 1e200
"""The most that a number weighs in these sums."""
FROM_MODEL = "of the outputs of a model"
"""Metadata of the nodes by which the graph of a loss enters the model."""


class UserLoop:
    """Forward and backward of a loop that the user writes.

    The phases of a step: 1. `local_part` and `whole_outputs` around each forward; 2. `backward` for each micro-batch;
    3. `finish`, when the engine's `step` is called."""

    def __init__(
        self, parts: EngineParts, step: OpenStep, micro_batches: MicroBatches, comparison: RankComparison
    ) -> None:
        built = parts.built
        self._parts, self._step, self._micro_batches = parts, step, micro_batches
        self._comparison = comparison
        self._streams, self._chunks = built.streams, built.chunks
        self._parallelized, self._auxiliary = built.parallelized, built.parallelized.auxiliary
        self._strategy = built.parallelized.strategy
        self._config, self._mesh = parts.context.config, parts.context.mesh
        self._hooks, self._updates = parts.hooks, parts.updates
        self._by_micro_batch = sharding_of(self._config).by_micro_batch
        self._has_parts = self._mesh.size("tensor", "sequence") > 1
        tensor = self._config.parallel.tensor
        self._cuts_all = tensor.size > 1 and tensor.mode != "1d"
        self._cuts_tokens = self._mesh.size("sequence") > 1
        hidden = parts.hidden
        self._not_whole = {id(p): n for n, p in parts.parameters.items() if self._has_parts or n in hidden}
        """Names of the parameters that this rank has in part, or not at all outside of forward."""
        self._all_samples = AllSamples(self._mesh.axis("data"))
        self._scaled = ScaledLoss()
        self._rows = 0  # samples of this rank in the micro-batch at hand
        self._forwards: list[tuple[int, int]] = []
        """Numbers of the nodes of autograd that each forward of this step has made."""
        self._first_node = 0  # of the forward at hand
        self._known: dict[tuple[torch.Size, ...], Sequence[bool]] = {}
        self._is_empty = False  # whether this rank has no sample of the micro-batch at hand
        self._samples = 0  # of all data ranks in that micro-batch
        self._own: Tensor | None = None  # numbers by which this rank's loss of it should weigh
        self._tokens: int | None = None  # of its sequences, if they were padded

    def local_part(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Batch:
        """This rank's part of the arguments of a call of the model. Sets the dropout counters."""
        self._all_samples.record.pause()
        self._refuse("engine(x)")
        self._refuse_labels(args, kwargs)
        self._updates.refuse_within("engine(x)")
        self._parts.linear_hooks.look()
        inputs = first_input(args, kwargs)
        if torch.is_grad_enabled():
            self._comparison.begin((args, kwargs))
            self._comparison.add_read((args, kwargs))
        self._comparison.add_batch({**{f"argument {n}": x for n, x in enumerate(args)}, **kwargs})
        self._micro_batches.look(args, kwargs, is_own_loop=True)
        sizes = self._micro_batches.sizes(inputs, named(args, kwargs), keeps_modes=True)
        self._rows = len(inputs)
        self._samples = sum(sizes)
        if torch.is_grad_enabled() and self._mesh.size("data") > 1:
            given = self._by_name(args, kwargs)
            self._own = _weight_of(inputs, [x for name in NAMES if (x := given.get(name)) is not inputs])
        first = self._step.samples + self._micro_batches.first_sample(sizes)
        samples = torch.arange(first, first + inputs.shape[0], device=self._parts.context.device)
        local = self._parallelized.local_part(Batch(args, kwargs, labels=samples, samples=samples))
        self._tokens = local.tokens
        self._is_empty = local.inputs.shape[0] == 0
        if self._is_empty:
            local = local.with_one_row()
        is_part = local.positions is not None
        self._streams.begin(
            self._step.number, local.samples, local.token_positions, is_part=is_part, tokens=local.tokens
        )
        self._first_node = _next_node()
        return local

    def whole_outputs(self, outputs: Any) -> Any:
        """The model's outputs, with logits gathered over vocabulary, tokens and samples, and without padding. On a
        sequence axis so are other tensors of all tokens. A loss may read these, and those that all tensor ranks have
        alike. Raises ValueError for outputs without logits, where ranks have parts of them."""
        if torch.is_grad_enabled():
            self._forwards.append((self._first_node, _next_node()))
        if self._streams.has_drawn:  # the next forward of this step draws other masks
            self._step.samples += self._samples
        found = self._found_outputs(outputs)
        if torch.is_grad_enabled():
            self._all_samples.note([x for x in tree_leaves(found) if isinstance(x, Tensor)], self._rows)
        else:
            self._all_samples.record.resume()
        return found

    def _found_outputs(self, outputs: Any) -> Any:
        def full(x: Tensor) -> Tensor:
            given = self._strategy.whole_batch(x[:0] if self._is_empty else x)
            given = given if self._tokens is None else given[:, : self._tokens]
            _mark(given)
            return given

        if not self._has_parts:
            return with_logits(outputs, lambda x: full(self._strategy.whole_vocabulary(x)))
        outputs = without_parts(outputs)
        local = logits_of(outputs)
        others = [
            x for x in tree_leaves(outputs) if isinstance(x, Tensor) and x.requires_grad and x is not local
        ]
        found = with_logits(outputs, lambda x: full(self._strategy.whole_vocabulary(x)))
        if not others or self._cuts_all:
            return found
        words, *alike = self._alike([local, *others])
        if words:
            raise ValueError(
                f"model: {tuple(local.shape)} stands where logits stand, and is the same on all tensor ranks. Legal: "
                f"logits alone, first in a tuple, or as 'logits'"
            )
        whole = {id(x): x for x, same in zip(others, alike, strict=True) if same}

        def other(x: Any) -> Any:
            if id(x) not in whole:
                return x
            if self._cuts_tokens:
                return full(x) if x.shape[:2] == local.shape[:2] else x
            _mark(x)
            return x

        return tree_map(other, found)

    def _alike(self, given: Sequence[Tensor]) -> Sequence[bool]:
        """Whether all ranks of the tensor axis have the same numbers, for each of these. The answer is kept for outputs
        of these shapes, once none is zero. Collective."""
        comm, key = self._mesh.axis("tensor"), tuple(x.shape for x in given)
        if comm.size == 1:
            return [False, *[True] * (len(given) - 1)]
        if key not in self._known:
            with comm.ledger.paused(), torch.no_grad():
                sums = torch.stack([_weighted_sums(x) for x in given])
                rows = comm.all_gather(sums.flatten()).view(comm.size, len(given), 2)
            total, size = rows.movedim(-1, 0)
            same = ((total - total[0]).abs() <= ALIKE * size.amax(0)).all(0).tolist()
            if not bool((size > 0).all()):
                return [same[0] and bool(size[:, 0].any()), *same[1:]]
            self._known[key] = same
        return self._known[key]

    def backward(
        self, loss: Tensor, count: int | Tensor | None, factor: float, *, retain_graph: bool = False
    ) -> None:
        """Add the gradient of `loss`. `factor` of the learning rate is for updates in backward."""
        self._all_samples.record.pause()
        if not isinstance(loss, Tensor):
            raise ValueError(
                f"backward: loss is {type(loss).__name__}; legal: a 0-d tensor, which the model computed"
            )
        count = _number_of_labels(count)
        self._refuse_backward(loss, count, retain_graph)
        if not retain_graph:
            self.forget_loss()
        step = self._step
        step.by_count = count is not None
        is_scaled = step.loss_scale.scale != 1.0  # only then the host waits for a count on the device
        seed = step.loss_scale.seed(int(count) if is_scaled and count is not None else 1)
        self._all_samples.seed = seed
        self._hooks.held.release()
        if self._own is not None:
            if count is None:
                self._comparison.add_weight(self._own)
            self._comparison.add_means(denominators(loss, count))
        self._parts.before_backward(own_loss=count is None and seed == 1.0)
        wide = loss.to(torch.promote_types(loss.dtype, torch.float32))
        total = wide if count is None else wide * count
        step.sums.add(_of_labels(total.detach(), count), 0 if count is None else count)
        is_last = step.calls + 1 == self._config.gradient_accumulation
        updates = self._updates.within_backward and is_last
        if updates:
            if count is None:
                step.sums.weigh_alike()
            self._updates.announce(step.sums.reported_loss(self.tells_loss), self._comparison)
            self._updates.begin(factor, self._comparison)
        step.calls += 1
        self._hooks.begin(0, is_last=updates, seed=seed, frees=is_last, sums=self._by_micro_batch)
        with self._parts.measured(), self._parts.around_backward(), self._hooks.expecting():
            (total if seed == 1.0 else total * seed).backward(retain_graph=retain_graph)
        self._comparison.delivered()
        if self._by_micro_batch or updates:
            self._reduce_all(ends=updates)
        self._hooks.held.hold()
        if retain_graph:
            self._all_samples.record.resume()

    def _refuse_backward(self, loss: Tensor, count: int | Tensor | None, retain_graph: bool) -> None:
        """Raises ValueError for a loss that would train otherwise than in one process, or a call out of place. Then
        nothing was changed."""
        self._refuse("backward")
        if loss.numel() != 1:
            shape = tuple(loss.shape)
            raise ValueError(f"backward: a loss of the shape {shape}; legal: one number, such as loss.mean()")
        if retain_graph and self._config.activation_checkpoint == "selective":
            raise ValueError(
                "backward: retain_graph=True with activation_checkpoint='selective', whose results one backward takes. "
                "Legal: 'full' or 'none', or one backward of the sum of the losses"
            )
        self._scaled.refuse(loss)
        self._refuse_reads(loss)
        self._refuse_coupling(loss, counted=count is not None)
        if self._step.by_count is not None and self._step.by_count != (count is not None):
            raise ValueError(
                "backward: count is given in some calls of this step and not in others; give it in all or none"
            )
        self._updates.refuse_within("backward")
        if not loss.requires_grad:
            raise ValueError(
                "backward: the loss has no graph, so nothing would train; legal: a loss of the outputs of engine(x), "
                "outside of no_grad"
            )
        refuse_without_gradients("backward")
        if self._step.totals is not None:
            raise ValueError(
                "backward: the gradients of this step are summed already, by full_gradients; legal: step, or zero_grad"
            )
        if self._step.calls == self._config.gradient_accumulation:
            _refuse_further_backward(self._config)

    def _refuse_reads(self, loss: Tensor) -> None:
        """Raises ValueError for a `loss` that reads a parameter itself, where this rank has no whole one."""
        name = self._read_directly(loss) if self._not_whole else None
        if name is not None and self._has_parts:
            raise ValueError(
                f"backward: the loss reads {name}, not by whole outputs of engine(x). A rank has a part of it, or of "
                f"its gradient (parallel.tensor, parallel.sequence); legal: a loss of the logits, or of outputs that "
                f"have all tokens; optimizer.weight_decay"
            )
        if name is not None:
            raise ValueError(
                f"backward: the loss reads {name} outside of engine(x). At zero.stage=3 it has no values there; legal: "
                f"a term that the model's forward returns, optimizer.weight_decay, or zero.stage=2"
            )

    def all_samples(self, x: Tensor) -> Tensor:
        """The rows of all data ranks."""
        return self._all_samples.of(x)

    def _refuse_coupling(self, loss: Tensor, *, counted: bool) -> None:
        """Raises ValueError for a `loss` between samples of this rank, where others have more, in steps that look. So
        for a sum over them, and for one whose gradient is not linear. `counted`: it has a count."""
        own_loss = not counted and self._step.loss_scale.scale == 1.0
        fault = self._all_samples.fault(loss, self._forwards, own_loss=own_loss, counted=counted)
        if fault == "nonlinear":
            why, legal = self._other_starts(counted=counted)
            raise ValueError(
                f"backward: the gradient of the loss at outputs of engine(x) is not linear, as other starts show. A "
                f"hook on an output, or an autograd.Function in the loss, changes it. {why}, and so another gradient. "
                f"Legal: one that is linear in the gradient, such as a mask or a factor; {legal}"
            )
        if fault == "sums":
            data = self._mesh.size("data")
            raise ValueError(
                f"backward: the loss is a sum over samples, and this rank has a part of them (parallel.data={data}). "
                f"The step takes a mean over ranks, not their sum. Legal: a mean over samples"
                f"{'' if counted else f'; {data} * loss'}; a sum of engine.all_samples(outputs); parallel.data=1"
            )
        if fault is not None:
            raise ValueError(
                f"backward: the loss is one between samples: its gradient at one depends on others. With "
                f"parallel.data={self._mesh.size('data')} this rank has its own samples alone. So the loss would be "
                f"another than in one process. Legal: a loss of engine.all_samples(outputs), of the samples of all "
                f"ranks; a mean of losses of samples; parallel.data=1. For pairs call engine(x) for each half. For a "
                f"mean over samples that outputs choose call engine.backward(loss, count)"
            )

    def _other_starts(self, *, counted: bool) -> tuple[str, str]:
        """Why backward starts from another gradient than in one process, and the legal choices."""
        data, scale = self._mesh.size("data"), self._step.loss_scale.scale
        found = {
            f"Each rank has a part of the samples (parallel.data={data})": "parallel.data=1"
            if data > 1
            else "",
            "Backward starts from count times the loss": "no count" if counted else "",
            f"Backward starts from {scale:g} times the loss": "precision.loss_scale=1"
            if scale != 1.0
            else "",
        }
        found = {why: legal for why, legal in found.items() if legal}
        return ". ".join(found), " with ".join(found.values())

    def _read_directly(self, loss: Tensor) -> str | None:
        """The name of a parameter that `loss` reads beside the outputs of the model. Where whole modules are here, what
        forward has made may be read in any way."""
        nodes, seen = [loss.grad_fn], set[Any]()
        while nodes:
            node: Any = nodes.pop()
            if node is None or node in seen or FROM_MODEL in node.metadata:
                continue
            if not self._has_parts and any(a <= node._sequence_nr() < b for a, b in self._forwards):
                continue
            seen.add(node)
            if (name := self._not_whole.get(id(getattr(node, "variable", None)))) is not None:
                return name
            nodes += [before for before, _ in node.next_functions]
        return None

    def forget_loss(self) -> None:
        """Forget what the loss at hand was computed from, for the looks at it."""
        self._all_samples.record.end()

    def drop(self) -> None:
        """Forget the forwards of this step. What was recorded stays for a loss that is computed already."""
        self._all_samples.record.pause()
        self._forwards.clear()

    def finish(self) -> None:
        """Start the remaining reductions, before the ranks agree. Raises ValueError without a `backward`."""
        self.drop()
        self.forget_loss()
        if self._step.by_count is None:
            raise ValueError("step: there are no gradients; call forward_backward, or backward, first")
        if self._updates.within_backward and self._step.calls < self._config.gradient_accumulation:
            raise ValueError(
                f"step: after {self._step.calls} calls of backward, of which optimizer.update_when='backward' needs as "
                f"many as gradient_accumulation={self._config.gradient_accumulation} says; the last one updates"
            )
        if not self._step.by_count:
            self._step.sums.weigh_alike()  # however many calls
        self._all_samples.next_step()
        if not self._by_micro_batch and not self._updates.within_backward:
            self._reduce_all()

    @property
    def tells_loss(self) -> bool:
        """Whether this rank reports the loss: every tensor rank has the whole micro-batch's, and one reports it."""
        return self._mesh.coord("pipeline", "sequence", "tensor") == 0

    def _reduce_all(self, *, ends: bool = False) -> None:
        for chunk in reversed(self._chunks):
            self._hooks.reduce(chunk.spec.id, ends=ends)

    def _refuse(self, what: str) -> None:
        """Raises ValueError where only the engine can run a step."""
        if self._config.parallel.pipeline.is_staged:
            raise ValueError(
                f"{what}: a pipeline runs forward and backward of many micro-batches by its plan; legal: train_step, "
                f"forward_backward and step, eval_step, or parallel.pipeline=1"
            )
        if self._auxiliary.names:
            raise ValueError(
                f"{what}: the model has an auxiliary loss, {self._auxiliary.names[0]}; its weight depends on labels "
                f"that a loop of your own does not show; legal: train_step, forward_backward and step, eval_step"
            )

    def _by_name(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """The arguments of a call of the model, by the names of its forward."""
        taken = signature(self._parts.built.model.forward).parameters
        return dict(zip(taken, args, strict=False)) | dict(kwargs)

    def _refuse_labels(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Raises ValueError for labels, from which the model's code would compute a loss of a part of its logits."""
        if self._mesh.size("tensor") == 1:
            return
        given = self._by_name(args, kwargs)
        if name := next((name for name in CLEAR_NAMES if given.get(name) is not None), None):
            raise ValueError(
                f"engine(x): {name} with parallel.tensor={self._mesh.size('tensor')}. The model's own loss would read "
                f"a part of the vocabulary. Legal: no {name}, and a loss of the logits; criterion='model' and "
                f"train_step; parallel.tensor=1"
            )


def _next_node() -> int:
    """The sequence number that autograd gives to the next node of this thread; 0 without gradients."""
    node: Any = torch.zeros((), requires_grad=True).neg().grad_fn
    return 0 if node is None else int(node._sequence_nr()) + 1


def _weight_of(inputs: Tensor, labels: Sequence[Any]) -> Tensor:
    """Samples, and valid labels that the model gets. Also those behind the first token, which causal models count.
    Models ignore labels of -100, and others of -1; no class is below 0."""
    counts = [torch.full((), len(inputs), device=inputs.device)]  # which waits for no device
    for each in labels:
        if isinstance(each, Tensor) and not each.is_floating_point():
            valid = each >= 0
            counts += [valid.sum(), valid[:, 1:].sum() if each.dim() > 1 else valid.sum()]
    return torch.stack(counts)


def _number_of_labels(count: Any) -> int | Tensor | None:
    """`count` as a plain number, or as a tensor [] without a graph. Raises ValueError unless it is one number, 0 or
    more. A tensor on a device is not read."""
    if not isinstance(count, Tensor) and getattr(count, "size", 0) == 1:
        count = count.item()  # of numpy
    if isinstance(count, Tensor) and count.numel() == 1 and not count.is_complex():
        count = count.detach().reshape(())
        is_legal = not count.is_cpu or 0 <= float(count) < inf
    else:
        is_legal = count is None or isinstance(count, int | float) and 0 <= count < inf
    if not is_legal:
        raise ValueError(f"backward: count={count!r}; legal: one number of labels, 0 or more, or None")
    found: int | Tensor | None = count
    return found


def _of_labels(total: Tensor, count: int | Tensor | None) -> Tensor:
    """A loss over so many labels, without a gradient. Without labels it is 0, for their mean is NaN."""
    if isinstance(count, Tensor):
        return total.where(count != 0, 0.0)
    return torch.zeros_like(total) if count == 0 else total


def _weighted_sums(x: Tensor) -> Tensor:
    """The sum of all numbers and of their absolute values [2], float64. Each number has another weight than those near
    it, as rows may add up to 1. Each is at most `LARGE`, so that sums are finite beside padded logits."""
    bounded = x.flatten().double().clamp(-LARGE, LARGE)
    weighted = bounded * (1 + torch.arange(x.numel(), device=x.device) % 97)
    return torch.stack((weighted.sum(), weighted.abs().sum()))


def _mark(x: Any) -> None:
    """Note on its graph that the model gives a tensor. A view that changes in place has the graph of its base."""
    for each in (x, x._base) if isinstance(x, Tensor) else ():
        node: Any = None if each is None else each.grad_fn
        if node is not None:
            node.metadata[FROM_MODEL] = True


def _refuse_further_backward(config: Config) -> None:
    """Raises ValueError where a step has as many micro-batches as `gradient_accumulation` says, and no more."""
    if config.precision.gradient == "bf16":
        raise ValueError(
            "backward: a second call before step, and precision.gradient='bf16' keeps the sum of one alone; legal: "
            "'auto', or one call a step"
        )
    if config.optimizer.update_when == "backward":
        raise ValueError(
            f"backward: a further call before step, and optimizer.update_when='backward' has updated the weights in "
            f"the one before. Legal: 'step', or gradient_accumulation, now {config.gradient_accumulation}, as large as "
            f"the calls of a step"
        )
