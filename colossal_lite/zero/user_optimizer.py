"""Wraps an optimizer of the user's own: any torch optimizer that steps from gradients alone.

Note: parameters.
The optimizer gets one `nn.Parameter` for each trainable parameter of the model, in the model's order.  Each is a view
of the master weights.  Before its step each has as `.grad` a view of the reduced gradient, divided by tokens and clip
factor.  It is a copy where the master weights are narrower, or None where no rank used it.  Its state is full on every
rank, so the weights must be too: ZeRO stage 0, no tensor axis, on the device.

With a pipeline, parameters of other stages are on the meta device and never have a gradient.  So groups are alike on
all ranks.  A step that makes one parameter depend on another is refused by `check_apart`.  An optimizer that draws, as
for noise, has generators of its own, seeded by the run's seed.  So all ranks draw alike.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from colossal_lite.config.errors import first_few
from colossal_lite.memory.chunk import Chunk, GradientState
from colossal_lite.memory.link import Link
from colossal_lite.memory.transfers import sent_back
from colossal_lite.numerics.generators import OwnDraws, generators_kept
from colossal_lite.numerics.torch_modes import storage_of
from colossal_lite.schedule.optimizer_updates import update_plan
from colossal_lite.schedule.plan import Action, ActionKind

Factory = Callable[[list[nn.Parameter]], Optimizer]


class OwnOptimizer:
    """The interface of `ChunkOptimizer` over a torch optimizer that `factory` makes. Raises ValueError for a factory
    that makes no optimizer, and for one whose step needs a closure. Also for one that does not hold exactly the
    parameters it was given, or cannot take parameters without values."""

    def __init__(
        self, chunks: Sequence[Chunk], shapes: Mapping[str, torch.Size], factory: Factory, *, scheduled: bool, seed: int
    ) -> None:  # fmt: skip
        """`shapes` of the whole model, in its order; `scheduled`: the learning rates follow the config's schedule.
        `seed`: of what the optimizer draws."""
        self._chunks, self._scheduled = tuple(chunks), scheduled
        self.parameters: dict[str, nn.Parameter] = {}
        for chunk in self._chunks:
            for entry in chunk.spec.entries:
                self.parameters[entry.name] = nn.Parameter(chunk.of(chunk.master, entry, shapes[entry.name]))
        dtype = self._chunks[0].master.dtype if self._chunks else torch.float32
        given = in_order_of(shapes, self.parameters, dtype)
        devices = {chunk.master.device for chunk in self._chunks if chunk.master.is_cuda}
        self._draws = OwnDraws("optimizer", seed, devices=list(devices))
        try:
            with self._draws.turn():
                self._optimizer = factory(list(given.values()))
        except (RuntimeError, NotImplementedError) as error:
            if len(self.parameters) == len(given):
                raise
            raise ValueError(
                f"optimizer: the callable fails ({error}) on a list in which parameters of other pipeline stages are "
                f"on the meta device; legal is one that reads no values, or parallel.pipeline=1"
            ) from error
        _check(self._optimizer, given)
        self.plan = update_plan(len(self._chunks))
        self.tiers = self.shards = self.host_updates = None
        self.visits = ()
        self.links: tuple[Link, ...] = ()
        self.moves: dict[ActionKind, Callable[[Action], None]] = {}
        self._peaks = [float(group["lr"]) for group in self._optimizer.param_groups]
        self._rates = self._peaks  # learning rates that a schedule of the config has set last
        self._held = self._held_now()
        self.changed = False
        """Whether the last step has changed any weight; on CUDA, where the host does not wait for it, the one
        before."""
        self._same = torch.tensor(False)

    @property
    def peak_lr(self) -> float:
        """Of the first group: as the optimizer has it now, or, under a schedule, as it was made."""
        return self._peaks[0] if self._scheduled else float(self._optimizer.param_groups[0]["lr"])

    def update(self, chunk: Chunk, used: Sequence[bool], *, factor: float, grad_scale: float) -> None:
        """Show the optimizer this chunk's gradient; `finish` takes the step."""
        assert chunk.state is GradientState.REDUCED
        for entry, is_used in zip(chunk.spec.entries, used, strict=True):
            parameter = self.parameters[entry.name]
            gradient = chunk.of(chunk.gradient, entry, parameter.shape).div_(grad_scale)
            parameter.grad = gradient.to(parameter.dtype) if is_used else None

    def finish(self, factor: float) -> None:
        """The optimizer's step, over all parameters at once."""
        self._refuse_other_groups()
        if self._scheduled:
            self._rates = [peak * factor for peak in self._peaks]
            for group, rate in zip(self._optimizer.param_groups, self._rates, strict=True):
                group["lr"] = rate
        before = self._bits()
        with self._draws.turn():
            self._optimizer.step()
        self._refuse_other_memory()
        for chunk in self._chunks:
            chunk.publish(0, chunk.spec.numel)
        self._optimizer.zero_grad(set_to_none=True)
        last, self._same = self._same, sent_back((self._bits() == before).all())
        self.changed = not (last if before.is_cuda else self._same)

    def _held_now(self) -> list[int]:
        return [id(p) for group in self._optimizer.param_groups for p in group["params"]]

    def _refuse_other_groups(self) -> None:
        """Raises ValueError for parameters that the optimizer was given later: no engine has their gradients. Also for
        learning rates that the config's schedule would replace."""
        kind, groups = type(self._optimizer).__name__, self._optimizer.param_groups
        if self._held_now() != self._held:
            raise ValueError(
                f"optimizer: {kind} has other parameters than when it was made (add_param_group). The engine trains "
                f"those of its model. Legal: all groups in the callable of initialize(optimizer=...)"
            )
        now = [float(group["lr"]) for group in groups]
        if self._scheduled and now != self._rates:
            raise ValueError(
                f"optimizer: other code has set the lr of {kind} to {now}, and lr_scheduler of the config would "
                f"replace it. Legal: one of the two, a scheduler of torch or lr_scheduler"
            )

    def _refuse_other_memory(self) -> None:
        """Raises ValueError for a parameter that the step has given other data: the model would not get it."""
        for chunk in self._chunks:
            own = storage_of(chunk.master)
            for entry in chunk.spec.entries:
                if storage_of(self.parameters[entry.name]) != own:
                    raise ValueError(
                        f"optimizer: {type(self._optimizer).__name__} has given {entry.name} other data "
                        f"(p.data = ...), which the model does not get; legal: changes in place, as p.data.copy_(...)"
                    )

    def _bits(self) -> Tensor:
        """A sum over the bits of each chunk's weights, which differs if one element does."""
        words = {2: torch.int16, 4: torch.int32, 8: torch.int64}
        sums = [chunk.master.view(words[chunk.master.itemsize]).sum() for chunk in self._chunks]
        return torch.stack(sums) if sums else torch.zeros(0)

    def _nothing(self, *_: object) -> None:
        """State is the optimizer's own, on the device: nothing of it is fetched, deferred, shared, counted or open."""

    tier_of = close = check = settle = prepare = begin = defer = changing = unchanged = rest = _nothing
    set_updates = arrived = finish_on_host = is_updated_on_host = _nothing

    def bytes_of(self, chunk: Chunk) -> tuple[int, int]:
        """Bytes of a chunk's state now, twice: only the optimizer knows what its first step makes."""
        held = sum(t.nbytes for state in self.states_of(chunk) for t in state.values())
        return held, held

    @contextmanager
    def at_hand(self, chunk: Chunk, *, write: bool = False) -> Iterator[Mapping[str, Tensor]]:
        """All is in memory; which state a chunk has, only the optimizer knows."""
        yield {}

    def opened(self, chunk: Chunk, name: str, local: slice, *, write: bool) -> Tensor:
        raise AssertionError("everything is in memory")

    def states_of(self, chunk: Chunk) -> Iterator[Mapping[str, Tensor]]:
        """For each entry of a chunk the tensors that the optimizer has for it."""
        for entry in chunk.spec.entries:
            state = self._optimizer.state.get(self.parameters[entry.name], {})
            yield {name: value for name, value in state.items() if isinstance(value, Tensor)}

    def flat_state(self, chunk: Chunk) -> Mapping[str, Tensor]:
        """Refused: only the optimizer knows its state and how to restore it."""
        name = type(self._optimizer).__name__
        raise ValueError(
            f"optimizer: checkpoints of {name}, an optimizer of your own, are not built; legal is a type of the "
            f"config. Without dropout, lr_scheduler and other draws also torch's own state_dict() of it, beside "
            f"engine.full_state_dict(): an engine that loads these counts its steps from 0"
        )

    def updates(self) -> dict[str, int]:
        """None is counted here."""
        return {}


def in_order_of(
    shapes: Mapping[str, torch.Size], here: Mapping[str, nn.Parameter], dtype: torch.dtype
) -> dict[str, nn.Parameter]:
    """All parameters of a model: those of other stages without values."""
    elsewhere = partial(torch.empty, dtype=dtype, device="meta")
    return {n: here[n] if n in here else nn.Parameter(elsewhere(shape)) for n, shape in shapes.items()}


def check_apart(
    factory: Factory, shapes: Mapping[str, torch.Size], stages: Iterable[Collection[str]], device: torch.device
) -> None:  # fmt: skip
    """Raises ValueError for an optimizer that cannot step the parameters of each of `stages` without the others. Two
    steps of a model of this form with dims of 2 are compared with those of each stage, bitwise."""
    whole = _probe(factory, shapes, shapes, device)
    for number, names in enumerate(stages):
        alone = _probe(factory, shapes, names, device)
        if other := [name for name in names if not torch.equal(whole[name], alone[name])]:
            raise ValueError(
                f"optimizer: in its step {other[0]} depends on parameters that are not on pipeline stage {number}. "
                f"Legal is an optimizer that updates each parameter by itself, parallel.pipeline=1, or a type of "
                f"config.optimizer"
            )


def _probe(
    factory: Factory, shapes: Mapping[str, torch.Size], used: Collection[str], device: torch.device
) -> dict[str, Tensor]:
    """Small parameters after two steps in which those of `used` have gradients."""
    with generators_kept():
        torch.manual_seed(0)
        small = {
            name: nn.Parameter(torch.randn([min(size, 2) for size in shape], device=device))
            for name, shape in shapes.items()
        }
        gradients = {name: torch.randn_like(parameter) for name, parameter in small.items()}
        torch.manual_seed(0)
        optimizer = factory(list(small.values()))
        _check(optimizer, small)
        for _ in range(2):
            for name in used:
                small[name].grad = gradients[name].clone()
            optimizer.step()
    return {name: parameter.detach() for name, parameter in small.items()}


def _check(optimizer: object, given: Mapping[str, nn.Parameter]) -> None:
    if not isinstance(optimizer, Optimizer):
        raise ValueError(
            f"optimizer: the callable returned {type(optimizer).__name__}; legal is a torch.optim.Optimizer "
            f"over the parameters that it is given"
        )
    name = type(optimizer).__name__
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise ValueError(
            f"optimizer: the step of {name} needs a closure that computes the loss again, which the "
            f"engine's step cannot do; legal is an optimizer that steps from gradients alone"
        )
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    foreign = len(held - {id(p) for p in given.values()})
    lacking = [key for key, p in given.items() if id(p) not in held]
    if foreign or lacking:
        raise ValueError(
            f"optimizer: {name} holds {foreign} parameters that it was not given, and lacks {first_few(lacking)}; "
            f"legal is each parameter of the list once (freeze one before initialize to leave it out)"
        )
