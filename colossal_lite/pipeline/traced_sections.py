"""Runs any stretch of the units that a trace has found, by the model's own forward.

Note: how a stretch runs.
The model's own forward runs on every stage.  Until the first unit of the stretch, modules of other stages are replaced.
Those beside the blocks give zeros of the right shape.  Blocks return their input, and the block before the stretch
returns what came in.  From then on a read of a module or parameter of another stage raises an error.  There a batch
takes a path that the trace has not seen.  At the end of the stretch the forward is left.  So masks, positions and
tables are the model's own on every stage, and its code is not changed.
Cost: the model's code before the first block runs on every stage, on zeros that hold one element.

Before it is used, each unit of the traced copy is run alone, in training and in evaluation.  If the copy has values,
the chain of units must give the loss of the model, and every gradient.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Set
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_map
from torch.utils.checkpoint import CheckpointError

from colossal_lite.data.batch import Batch
from colossal_lite.numerics.proof_modes import Wide
from colossal_lite.numerics.torch_modes import tensors_in
from colossal_lite.parallel.loss import logits_of
from colossal_lite.parallel.model_loss import ModelLoss, loss_in
from colossal_lite.pipeline.unit_trace import (
    Argument,
    Passage,
    TracedCopy,
    UnitModules,
    UnitsError,
    UnitTrace,
    bare_copy,
    settings_of,
    trace_units,
)
from colossal_lite.transforms.module_modes import modes_kept

TOLERANCE = 1e-9


class TracedSections:
    """The units of a trace: what comes before the first block, each block, and what follows the last."""

    def __init__(self, model: nn.Module, trace: UnitTrace, shapes: Mapping[str, nn.Module]) -> None:
        """`shapes`: the modules beside the blocks on meta, which tell the shapes of what they would give."""
        self._model, self._trace, self._shapes = model, trace, dict(shapes)
        self.parts: tuple[UnitModules, ...] = trace.parts
        self.changing = trace.changing
        self.progress = Progress()

    def on(self, model: nn.Module) -> TracedSections:
        """The same units of another build of the model."""
        return TracedSections(model, self._trace, self._shapes)

    def run(self, start: int, stop: int, carried: Any, batch: Batch) -> Any:
        """Units [start, stop) on what came in; the stream that goes out, or the model's outputs."""
        if start in self._trace.written:
            carried = carried.clone()
        with self.progress.before(start), ExitStack() as places:
            places.enter_context(_replaced(self._model, self._others(start, stop, carried)))
            if start == 1:
                takes = self._trace.passages[0].takes
                places.enter_context(_given(self._block(1), takes, carried, self.progress))
            if 1 < stop < len(self.parts):
                places.enter_context(_left_behind(self._block(stop - 1), self._trace.passages[stop - 2]))
            try:
                outputs = self._model(*batch.args, **batch.kwargs)
            except _Left as left:
                return left.stream
        if stop < len(self.parts):
            raise ValueError(
                f"parallel.pipeline: a forward of {type(self._model).__name__} has not called "
                f"{self.parts[stop - 1].name}, as it did when it was traced; legal: the same blocks for every batch"
            )
        return outputs

    def alone(self, unit: int) -> AbstractContextManager[None]:
        """Context in which modules of other units are not there, as on a stage of this unit."""
        own = set(self.parts[unit].modules)
        others = {name for part in self.parts for name in part.modules if name not in own}
        gone = {n: OtherStageModule(n, "is on another stage", self._model.get_submodule(n)) for n in others}
        return _replaced(self._model, gone)

    def _block(self, unit: int) -> nn.Module:
        return self._model.get_submodule(self.parts[unit].name)

    def _others(self, start: int, stop: int, carried: Any) -> dict[str, nn.Module]:
        """What stands in the places of other units while these run."""
        by: dict[str, nn.Module] = {}
        own = {name for part in self.parts[start:stop] for name in part.modules}
        for part in self.parts[:start]:
            for name in part.modules:
                if name not in own and name in self._shapes:
                    by[name] = _Zeros(name, self._shapes[name], carried, self.progress)
        for unit in range(1, start):
            passage = self._trace.passages[unit - 1]
            came = carried if unit == start - 1 else None
            by[self.parts[unit].name] = _Through(self._model, passage, came, self.progress)
        if stop == 1:
            by[self.parts[1].name] = _Through(
                self._model, self._trace.passages[0], None, self.progress, leaves=True
            )
        return by


def traced(model: nn.Module, example: Batch | None = None, loss: ModelLoss | None = None) -> TracedSections:
    """The units of a model of blocks, which must be whole. Raises UnitsError, saying what keeps it from being cut.
    `example` and `loss`: as `trace_units` takes them."""
    trace, proven = trace_units(model, example, loss)
    bare = bare_copy(model)
    blocks = {passage.block for passage in trace.passages}
    names = [name for part in trace.parts[:-1] for name in part.modules if name not in blocks]
    shapes = {name: bare.get_submodule(name) for name in names}
    sections = TracedSections(model, trace, shapes)
    _prove(proven, sections)
    return sections


def _prove(copy: TracedCopy, sections: TracedSections) -> None:
    """Run the units of a copy one by one, and raise UnitsError where they are not the model."""
    alone = sections.on(copy.model)
    with modes_kept(copy.model):
        for trains in (True, False):
            copy.model.train(trains)
            with copy.running() as batch, torch.set_grad_enabled(trains):
                _prove_mode(copy, alone, batch)


def _prove_mode(copy: TracedCopy, alone: TracedSections, batch: Batch) -> None:
    proven = copy.model
    buffers = {name: buffer.clone() for name, buffer in proven.named_buffers()}
    before = torch.get_rng_state()
    reads = logits_of if copy.loss is None else loss_in
    whole = _gradients(proven, reads(proven(*batch.args, **batch.kwargs)))
    draws = not torch.equal(torch.get_rng_state(), before)  # the first step refuses that
    for name, buffer in proven.named_buffers():  # a forward may change them
        buffer.detach().copy_(buffers[name])
    mode = "" if proven.training else " in eval()"
    what = f"parallel.pipeline: {type(proven).__name__}{mode}"
    try:
        outputs, ends = _chain(alone, batch)
        found = _gradients(proven, reads(outputs), ends)
    except CheckpointError as error:
        raise UnitsError(
            f"{what} does not run in parts: it recomputes blocks by torch.utils.checkpoint; legal: "
            f"activation_checkpoint of the config"
        ) from error
    except Exception as error:  # of the model's own code, beside stand-ins
        raise UnitsError(
            f"{what} does not run in parts: {type(error).__name__}: {error}. Legal: code around the blocks that "
            f"reads of blocks and tables nothing but what they give; a method pipeline_sections() "
            f"(docs/pipeline.md); or pipeline=1"
        ) from error
    for name, expected in whole.items() if copy.has_values and not draws else ():
        if not float((found[name] - expected).norm()) <= TOLERANCE * (float(expected.norm()) + 1e-6):
            part = "loss" if name == "loss" else f"gradient of {name}"
            raise UnitsError(
                f"{what}: run in parts, the {part} is another; legal: a method pipeline_sections() "
                f"(docs/pipeline.md), or pipeline=1"
            )


def _chain(sections: TracedSections, batch: Batch) -> tuple[Any, list[tuple[Tensor, Tensor]]]:
    """What the last unit gives, and of each boundary the tensor that left and the leaf that came in."""
    carried: Any = None
    ends: list[tuple[Tensor, Tensor]] = []
    for unit in range(len(sections.parts)):
        with sections.alone(unit):
            given = sections.run(unit, unit + 1, carried, batch)
        if unit < len(sections.parts) - 1:
            carried = given.detach().requires_grad_(given.requires_grad)
            ends.append((given, carried))
    return given, ends


def _gradients(
    model: nn.Module, logits: Tensor, ends: Sequence[tuple[Tensor, Tensor]] = ()
) -> dict[str, Tensor]:
    """The gradient of every parameter that has one, and the loss as `loss`. `logits`: or a loss of the model's own."""
    model.zero_grad()
    if logits.dim() > 1 and logits.shape[-1] > 1:
        logits = logits.flatten(0, -2)
        labels = torch.zeros(len(logits), dtype=torch.long, device=logits.device)
        loss = F.cross_entropy(logits, labels, reduction="sum")
    else:  # numbers, no words
        loss = (logits - 1.0).square().sum()
    if not loss.requires_grad:
        return {"loss": loss}
    loss.backward()
    for left, came in reversed(ends):
        if left.requires_grad:
            left.backward(torch.zeros_like(came) if came.grad is None else came.grad)
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return {"loss": loss.detach(), **found}


# ---- what stands in the place of a module ----


class OtherStageModule(nn.Module):
    """Stands where a module of another stage was. It has the names within that module, for a model's own `train()`."""

    def __init__(self, name: str, where: str, module: nn.Module, changing: Set[str] = frozenset()) -> None:
        """`where`: the place of the module, for code that reads it. `changing`: attributes that are no settings."""
        super().__init__()
        own = settings_of(module).items()
        self.__dict__.update({key: value for key, value in own if f"{name}.{key}" not in changing})
        self._place = name, where
        for child, inner in module.named_children():
            self.add_module(child, OtherStageModule(f"{name}.{child}", where, inner, changing))

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError as error:
            path, where = self._place
            raise AttributeError(
                f"parallel.pipeline: {path}.{name} is read, and {path} {where}. Legal: a criterion of logits and "
                f"labels alone; pipeline=1; colossal_lite.AuxiliaryLoss, for a loss of what a module computes; "
                f"optimizer.weight_decay",
                name=name,
                obj=self,
            ) from error

    def __getitem__(self, key: int | str) -> nn.Module | None:
        return self._modules[key] if isinstance(key, str) else [*self._modules.values()][key]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        name, where = self._place
        raise ValueError(
            f"parallel.pipeline: {name} {where}. Legal: train_step or eval_step of the engine; or a model built anew "
            f"that loads engine.full_state_dict()"
        )


class Progress:
    """Where the forward of a stage is."""

    def __init__(self) -> None:
        self.is_before = False
        """Before the first unit of the stretch. Nothing that is computed there is used."""

    @contextmanager
    def before(self, start: int) -> Iterator[None]:
        """A forward whose stretch begins at unit `start`."""
        self.is_before = start > 0
        try:
            yield
        finally:
            self.is_before = False

    def check(self, name: str) -> None:
        """Raises ValueError where something of another stage is read, but before the stretch."""
        if not self.is_before:
            raise ValueError(
                f"parallel.pipeline: {name} is on another stage, and this batch takes a path on which it is read here. "
                f"The model was traced on a small copy and a few random words, whose path is another. Legal: a "
                f"model that reads the same weights for every batch; a method pipeline_sections() "
                f"(docs/pipeline.md); or pipeline=1"
            )


VALUES = frozenset(
    {
        "item",
        "tolist",
        "numpy",
        "equal",
        "allclose",
        "is_nonzero",
        "__bool__",
        "__float__",
        "__int__",
        "__index__",
    }
)
"""Calls that give the values of a tensor, and no tensor."""


class OtherStageParameter(Tensor):
    """Stands where a parameter of another stage was: zeros, until the first unit of the stretch."""

    _name: str
    _at: Progress

    @staticmethod
    def of(parameter: Tensor, name: str, at: Progress, like: Tensor) -> OtherStageParameter:
        """`like`: of the dtype and device that weights of this rank have in forward."""
        dtype = like.dtype if parameter.is_floating_point() else parameter.dtype
        zeros = like.new_zeros((), dtype=dtype).expand(parameter.shape)
        made = zeros.as_subclass(OtherStageParameter)
        made._name, made._at = name, at
        return made

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            out = func(*args, **(kwargs or {}))
        if (
            tensors_in(out) or getattr(func, "__name__", "") in VALUES
        ):  # all stages may ask for shape and dtype
            for each in tensors_in((args, kwargs)):
                if isinstance(each, cls):
                    each._at.check(each._name)
        return out


class _Left(BaseException):  # noqa: N818  (no error; and no `except Exception` of a model may take it)
    """The stretch is done, and the forward is left."""

    def __init__(self, stream: Tensor) -> None:
        super().__init__()
        self.stream = stream


class _StandIn(nn.Module):
    """Has what code around a module of another stage may read: mode and settings, also of modules in it."""

    def __init__(self, name: str, module: nn.Module) -> None:
        super().__init__()
        self.__dict__.update(settings_of(module))
        self.training = module.training
        self.name, self.module = name, (module,)  # in a tuple: no module of this one

    def __getattr__(self, name: str) -> Any:
        path, value = f"{self.name}.{name}", getattr(self.__dict__["module"][0], name)
        if (found := self.stand_in(path, value)) is None:
            raise AttributeError(f"{path} is read, and {self.name} is on another stage", name=name, obj=self)
        return found

    def stand_in(self, path: str, value: Any) -> Any:
        """What stands for an attribute that is no setting; None: it may not be read."""
        return _StandIn(path, value) if isinstance(value, nn.Module) else None


class _Through(_StandIn):
    """A block of another stage: it hands the stream through, or gives what came in, or leaves the forward."""

    def __init__(
        self, model: nn.Module, passage: Passage, came: Tensor | None, at: Progress, *, leaves: bool = False
    ) -> None:
        super().__init__(passage.block, model.get_submodule(passage.block))
        self.passage, self.came, self.leaves, self.at = passage, came, leaves, at

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        given: dict[Argument, Any] = dict(enumerate(args))
        given.update(kwargs.items())
        passage = self.passage
        stream = given[passage.takes[0]]
        if self.leaves:
            raise _Left(stream)
        if self.came is not None:
            stream, self.at.is_before = self.came, False
        if passage.gives is None:
            return stream
        members = {p: None if by is None else given.get(by) for p, by in passage.members.items()}
        members[passage.gives] = stream
        if isinstance(passage.gives, str):
            return members
        return tuple(members[p] for p in sorted(members, key=int))


class _Zeros(_StandIn):
    """A module beside the blocks on another stage: zeros, of one element each, in the shape that it would give."""

    def __init__(self, name: str, shaped: nn.Module, like: Tensor, at: Progress) -> None:
        super().__init__(name, shaped)
        self.like, self.at = like, at

    def stand_in(self, path: str, value: Any) -> Any:
        """Parameters too, whose shape and dtype all stages may ask for."""
        if isinstance(value, nn.Parameter):
            return OtherStageParameter.of(value, path, self.at, self.like)
        return _Zeros(path, value, self.like, self.at) if isinstance(value, nn.Module) else None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self.at.check(self.name)

        def on_meta(value: Any) -> Any:
            if not isinstance(value, Tensor):
                return value
            dtype = (
                torch.float64 if value.is_floating_point() else value.dtype
            )  # as on_meta_copy has all weights
            return torch.empty_like(value, device="meta", dtype=dtype)

        def zeros(value: Any) -> Any:
            if not isinstance(value, Tensor):
                return value
            dtype = self.like.dtype if value.is_floating_point() else value.dtype
            shape, width = value.shape, self.like.shape[-1]
            if isinstance(self.module[0], nn.Embedding) and shape[-1] % width == 0:
                shape = torch.Size((*shape[:-1], width))  # grids cut features
            return self.like.new_zeros((), dtype=dtype).expand(shape)

        with torch.no_grad(), torch.device("meta"), Wide():
            given = self.module[0](*tree_map(on_meta, args), **tree_map(on_meta, kwargs))
        return tree_map(zeros, given)


@contextmanager
def _replaced(model: nn.Module, by: Mapping[str, nn.Module]) -> Iterator[None]:
    """Other modules in the place of those that are named, for a while."""
    places = [
        (model.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[2], new)
        for name, new in by.items()
    ]
    own = [(parent, child, parent._modules[child]) for parent, child, _ in places]
    try:
        for parent, child, new in places:
            parent._modules[child] = new
        yield
    finally:
        for parent, child, old in own:
            parent._modules[child] = old


def _given(
    block: nn.Module, takes: Sequence[Argument], carried: Tensor, at: Progress
) -> AbstractContextManager[Any]:
    """Context in which a block gets what came in, and not the stream that the model's code hands it."""

    def swap(module: nn.Module, args: Any, kwargs: Any) -> Any:
        at.is_before = False
        return (
            tuple(carried if place in takes else value for place, value in enumerate(args)),
            {name: carried if name in takes else value for name, value in kwargs.items()},
        )

    return block.register_forward_pre_hook(swap, with_kwargs=True, prepend=True)


def _left_behind(block: nn.Module, passage: Passage) -> AbstractContextManager[Any]:
    """Context in which the forward is left when this block has given what it gives."""

    def leave(module: nn.Module, args: Any, out: Any) -> None:
        raise _Left(out if passage.gives is None else out[passage.gives])

    return block.register_forward_hook(leave)
