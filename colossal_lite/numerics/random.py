"""Draws random numbers that do not depend on the mesh: dropout masks, and initial values replayed from a recording.

Note: counters, not states.
Every random number of a run is a pure function of (key, counter) through Philox.  The key names the stream (seed and
name), the counter the element.
- Initial values: key = (seed, parameter name, ordinal of the draw), counter = global element index.
- Dropout: key = (seed, module name, index of the call within one forward pass); counter = (step, index of the sample in
  the step's global batch, position, feature).  Neither has a rank or a micro-batch.  For attention weights the head
  replaces the position, and query and key together replace the feature.
So weights and masks are the same on every mesh and for every number of micro-batches.  There is no generator state to
save, and recomputation draws the same mask again.

A callable builds its module with parameters on the meta device.  The in-place initialisers that run on them are
recorded as data (`InitOp`).  They are replayed for the elements that a rank holds, so no rank allocates more than
those.
"""

from __future__ import annotations

import hashlib
import math
import re
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.overrides import TorchFunctionMode

from colossal_lite.kernels import TORCH, Ops
from colossal_lite.kernels.philox import Rows, SampleDim, inverse_erf
from colossal_lite.numerics.compile_wrappers import CompileWrappers
from colossal_lite.numerics.torch_modes import DispatchMode, written_by

aten = torch.ops.aten


def key(seed: int, *parts: str | int) -> tuple[int, int]:
    """The Philox key of a named stream: two uint32 words of a hash, the same on every machine."""
    text = "\x1f".join(str(part) for part in (seed, *parts))
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(digest[:4], "little"), int.from_bytes(digest[4:], "little")


def kind_of(name: str) -> str:
    """A module's name without numbers: blocks that are alike have modules of one kind."""
    return re.sub(r"\d+", "*", name)


@dataclass(frozen=True)
class Place:
    """A position of the counters in a forward pass."""

    step: int
    sample: Tensor
    position: Tensor
    calls: Mapping[str, int]
    is_part: bool = False
    behind: str = ""
    is_open: bool = True
    tokens: int | None = None


class DropoutStreams:
    """Gives each dropout module the counters of its next rows.

    The engine calls `begin` before each forward pass with the step and the global position of the rows.  A module then
    asks for `rows(name)`.  A module that runs twice in one pass gets two calls, hence two masks.
    """

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._step = 0
        self._sample = self._position = torch.empty(0, dtype=torch.int64)
        self._calls: dict[str, int] = {}
        self._is_part = self._is_open = False
        self._tokens: int | None = None
        self.sample_dims: Mapping[tuple[str, int], SampleDim] = {}
        """Where samples are in the tensors of calls that do not have them first, by kind of module and call."""
        self.behind = ""
        """The linear after which activations are sharded otherwise than the stream; empty outside of such a region."""
        self.functional: Callable[[nn.Module | None], AbstractContextManager[Any]] = nullcontext
        """A context in which functional dropouts draw from these counters too. It takes the module that runs again."""

    def begin(
        self, step: int, sample: Tensor, position: Tensor, *, is_part: bool = False, tokens: int | None = None
    ) -> None:
        """`sample` [B] indexes the step's global batch, `position` [T] the sequence; both int64. `is_part`: other ranks
        hold other tokens of the sequence. `tokens`: how many tokens count, the others are padding; None: all."""
        self._step, self._sample, self._position, self._is_part = step, sample, position, is_part
        self._tokens = tokens
        self._calls.clear()
        self._is_open, self.behind = True, ""

    @property
    def has_drawn(self) -> bool:
        """Whether the last forward has drawn any mask."""
        return bool(self._calls)

    @contextmanager
    def forward(self) -> Iterator[None]:
        """The forward pass that `begin` has begun."""
        try:
            with self.functional(None):
                yield
        finally:
            self._is_open = False

    def place(self) -> Place:
        """The position that `go_to` restores, so that a part of the pass draws the same masks a second time."""
        return Place(
            self._step,
            self._sample,
            self._position,
            dict(self._calls),
            self._is_part,
            self.behind,
            self._is_open,
            self._tokens,
        )

    def go_to(self, place: Place) -> None:
        self._step, self._sample, self._position = place.step, place.sample, place.position
        self._calls = dict(place.calls)
        self._is_part, self.behind, self._is_open = place.is_part, place.behind, place.is_open
        self._tokens = place.tokens

    def rows(self, name: str, parts: int = 1, part: int = 0, *, may_be_whole: bool = False) -> Rows:
        """Counters of the next call of module `name`. `parts` and `part`: the module sees only that part of the
        positions; `may_be_whole`: or all, as its tensor tells. Raises ValueError outside a forward pass."""
        if not self._is_open:
            raise ValueError(
                f"{name or 'model'}: a dropout outside the forward pass of a step, such as in a checkpoint of the "
                f"model's own. Its mask would be another; legal: activation_checkpoint, which draws the same masks "
                f"again, engine(x), or the model in eval()"
            )
        call = self._calls.get(name, 0)
        self._calls[name] = call + 1
        samples = self.sample_dims.get((kind_of(name), call), "first") if self.sample_dims else "first"
        position = self._position.tensor_split(parts)[part]
        if may_be_whole:
            whole = self._position if self._is_part else None
            return Rows(
                key(self._seed, name, call), self._step, self._sample, self._position, whole=whole,
                tokens=self._tokens, part=position, samples=samples,
            )  # fmt: skip
        whole = self._position if parts > 1 or self._is_part else None
        return Rows(
            key(self._seed, name, call), self._step, self._sample, position, whole=whole, tokens=self._tokens,
            samples=samples,
        )  # fmt: skip


# ---- recording initialisers on meta, replaying them on shards ----


@dataclass(frozen=True)
class InitOp:
    """One recorded in-place initialiser on elements [start, stop) of a flattened parameter."""

    kind: str
    arguments: tuple[float, ...]
    start: int
    stop: int


@dataclass(frozen=True)
class Recipe:
    """The operations that make the initial values of one parameter, in order, over `numel` elements."""

    numel: int
    ops: tuple[InitOp, ...] = ()

    def then(
        self, kind: str, arguments: tuple[float, ...], start: int = 0, stop: int | None = None
    ) -> Recipe:
        stop = self.numel if stop is None else stop
        return replace(self, ops=(*self.ops, InitOp(kind, arguments, start, stop)))

    def seen(self) -> Iterator[tuple[int, InitOp]]:
        """The operations, by ordinal, without those whose elements a later one sets anew."""
        for ordinal, op in enumerate(self.ops):
            later = (other for other in self.ops[ordinal + 1 :] if other.kind in _SETS)
            if not any(other.start <= op.start and op.stop <= other.stop for other in later):
                yield ordinal, op


_SETS = ("fill", "normal", "uniform")


class InitialiserError(ValueError):
    """A parameter comes from an operation that cannot be replayed by shards; the text names both."""


WHOLE = "or pass the model itself, as for weights that are loaded: cl.initialize(build()), not cl.initialize(build)"

# aten in-place operation -> (name in a recipe, its arguments with their defaults); all are elementwise
_RECORDED: dict[Any, tuple[str, tuple[tuple[str, float], ...]]] = {
    aten.zero_.default: ("fill", ()),
    aten.fill_.Scalar: ("fill", (("value", 0.0),)),
    aten.normal_.default: ("normal", (("mean", 0.0), ("std", 1.0))),
    aten.uniform_.default: ("uniform", (("from", 0.0), ("to", 1.0))),
    aten.mul_.Scalar: ("mul", (("other", 1.0),)),
    aten.mul_.Tensor: ("mul", (("other", 1.0),)),
    aten.add_.Scalar: ("add", (("other", 0.0),)),
    aten.add_.Tensor: ("add", (("other", 0.0),)),
    aten.clamp_.default: ("clamp", (("min", -float("inf")), ("max", float("inf")))),
    aten.erfinv_.default: ("erfinv", ()),
}
# factories and out-of-place forms, by which `nn.Parameter(torch.ones(n))` and `torch.randn(n) * 0.02` are made
_FACTORIES: dict[Any, tuple[str, tuple[float, ...]]] = {
    aten.empty.memory_format: ("", ()),
    aten.zeros.default: ("fill", (0.0,)),
    aten.ones.default: ("fill", (1.0,)),
    aten.randn.default: ("normal", (0.0, 1.0)),
    aten.rand.default: ("uniform", (0.0, 1.0)),
}
_OUT_OF_PLACE: dict[Any, str] = {aten.mul.Tensor: "mul", aten.mul.Scalar: "mul", aten.add.Tensor: "add"}


class _Recorder(DispatchMode):
    """Records the operations on storages from factory to registered parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.recipes: dict[int, Recipe] = {}  # by storage
        self.alive: list[Tensor] = []  # another tensor would get the address of a freed storage
        self.parameters: dict[int, str] = {}
        self.refused: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _RECORDED and args[0].is_meta and self._recipe(args[0]) is not None:
            # Running it changes nothing, and torch's meta form of normal_ is Python that imports the compiler.
            self._record(args[0], func, args[1:], kwargs)
            return args[0]
        out = func(*args, **kwargs)
        if func in _FACTORIES:
            kind, arguments = _FACTORIES[func]
            recipe = Recipe(out.numel())
            self._track(out, recipe.then(kind, arguments) if kind else recipe)
        elif func is aten.full.default:
            self._track(out, Recipe(out.numel()).then("fill", (float(args[1]),)))
        elif func in _OUT_OF_PLACE and self._recipe(args[0]) and isinstance(args[1], (int, float)):
            made = self._recipe(args[0])
            assert made is not None
            self._track(out, made.then(_OUT_OF_PLACE[func], (float(args[1]),)))
        elif func in _RECORDED and self._recipe(args[0]) is not None:
            self._record(args[0], func, args[1:], kwargs)
        elif func._schema.is_mutable:
            for target in written_by(func, args, kwargs):
                if self._recipe(target) is not None:
                    self._refuse(target, str(func))
        return out

    def _record(self, target: Tensor, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        kind, defaults = _RECORDED[func]
        named = {name: value for (name, _), value in zip(defaults, args, strict=False)} | kwargs
        values = [named.get(name, default) for name, default in defaults]
        values = [default if v is None else v for v, (_, default) in zip(values, defaults, strict=True)]
        if not target.is_contiguous() or any(isinstance(v, Tensor) for v in values) or named.get("generator"):
            return self._refuse(target, str(func))
        start = int(target.storage_offset())
        arguments = tuple(float(v) for v in values) if kind != "fill" or values else (0.0,)
        storage = target.untyped_storage()._cdata
        self.recipes[storage] = self.recipes[storage].then(kind, arguments, start, start + target.numel())

    def truncated_normal(self, target: Tensor, mean: float, std: float, a: float, b: float) -> None:
        """Inverse of the distribution function, on a uniform between its values at the bounds."""
        low, high = (math.erf((bound - mean) / (std * math.sqrt(2.0))) for bound in (a, b))
        with torch.no_grad():
            target.uniform_(low, high).erfinv_().mul_(std * math.sqrt(2.0)).add_(mean).clamp_(a, b)

    def skipped(self, tensor: Tensor, initialiser: str) -> None:
        """torch's own `initialiser` does nothing to this tensor, as it is on meta."""
        if self._recipe(tensor) is not None:
            self._refuse(tensor, f"nn.init.{initialiser}")

    def _refuse(self, target: Tensor, what: str) -> None:
        storage = target.untyped_storage()._cdata
        self.refused.append(f"{self.parameters.get(storage, 'a tensor')}: {what}")

    def _recipe(self, tensor: Any) -> Recipe | None:
        return self.recipes.get(tensor.untyped_storage()._cdata) if isinstance(tensor, Tensor) else None

    def _track(self, tensor: Tensor, recipe: Recipe) -> None:
        self.recipes[tensor.untyped_storage()._cdata] = recipe
        self.alive.append(tensor)

    def to_meta(self, name: str, parameter: nn.Parameter) -> nn.Parameter:
        """The meta twin of a parameter that is being registered; it takes over the recipe of the parameter's values."""
        if is_lazy(parameter):
            raise InitialiserError(
                f"parameter {name}: it has no shape before the first forward. Legal: a module of stated sizes, or a "
                f"model that has run once in the place of a callable"
            )
        recipe = self._recipe(parameter)
        if recipe is None or recipe.numel != parameter.numel():
            raise InitialiserError(
                f"parameter {name}: its values come from an operation that cannot be replayed shard by shard. "
                f"Make it with torch.empty, zeros, ones, full, rand or randn and initialise it in place with "
                f"{', '.join(sorted({kind for kind, _ in _RECORDED.values()}))}; {WHOLE}"
            )
        meta = nn.Parameter(parameter.to("meta"), requires_grad=parameter.requires_grad)
        self._track(meta, recipe)
        self.parameters[meta.untyped_storage()._cdata] = name
        self.alive = [t for t in self.alive if t is not parameter]
        return meta


_IS_META: Any = Tensor.is_meta  # the descriptor; a mode is given its __get__


class _AsksForMeta(TorchFunctionMode):
    """Sees initialisers that ask for meta and do nothing there, as `nn.init.orthogonal_`, under any imported name."""

    def __init__(self, recorder: _Recorder) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func == _IS_META.__get__ and out:
            caller = sys._getframe(1)
            if caller.f_globals.get("__name__") == nn.init.__name__:
                self._recorder.skipped(args[0], caller.f_code.co_name)
        return out


# torch's registration hooks are global, so one thread at a time installs them; other threads build meanwhile.
_HOLDS_HOOKS = threading.RLock()


@contextmanager
def _parameters_on_meta(recorder: _Recorder) -> Iterator[None]:
    with _HOLDS_HOOKS, _hooks_of(recorder, threading.get_ident()):
        yield


@contextmanager
def _hooks_of(recorder: _Recorder, thread: int) -> Iterator[None]:
    """Within it, the recorder gets the modules that `thread` builds, and those of no other thread."""

    def register(module: nn.Module, name: str, parameter: Any) -> Any:
        is_ours = threading.get_ident() == thread
        if not is_ours or not isinstance(parameter, nn.Parameter) or parameter.is_meta:
            return parameter
        return recorder.to_meta(f"{type(module).__name__}.{name}", parameter)

    def truncated(
        tensor: Tensor, mean: float, std: float, a: float, b: float, generator: Any = None
    ) -> Tensor:
        if threading.get_ident() != thread:
            drawn: Tensor = original(tensor, mean, std, a, b, generator=generator)
            return drawn
        recorder.truncated_normal(tensor, mean, std, a, b)
        return tensor

    # On a meta tensor torch's own trunc_normal_ does nothing (2.13), so its steps are recorded instead.
    original = nn.init._no_grad_trunc_normal_
    hook = nn.modules.module.register_module_parameter_registration_hook(register)
    nn.init._no_grad_trunc_normal_ = truncated
    try:
        with recorder, _AsksForMeta(recorder):
            yield
    finally:
        nn.init._no_grad_trunc_normal_ = original
        hook.remove()


class _Undrawn(DispatchMode):
    """Skips random draws into meta tensors: they change nothing, and import torch's compiler (155 MB, 2 s)."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        draws = func in (aten.normal_.default, aten.uniform_.default) and args[0].is_meta
        return args[0] if draws else func(*args, **(kwargs or {}))


def on_meta(builder: Callable[[], nn.Module]) -> nn.Module:
    """Builds a module with parameters and buffers on meta: names and shapes, no values."""
    with torch.device("meta"), _Undrawn():
        module = builder()
    return CompileWrappers(module).model if isinstance(module, nn.Module) else module


def build_on_meta(builder: Callable[[], nn.Module]) -> tuple[nn.Module, dict[str, Recipe]]:
    """Run `builder` with parameters on meta and buffers real.

    Returns the module and, for each parameter (tied ones once, by their first name), the recipe of its values.
    Raises InitialiserError naming each parameter whose values cannot be replayed, and if the builder meets what a
    tensor without values cannot do.
    """
    recorder = _Recorder()
    try:
        with _parameters_on_meta(recorder):
            module = builder()
    except InitialiserError:
        raise
    except RuntimeError as error:
        raise InitialiserError(
            f"model: the callable raises {type(error).__name__}: {error}. It runs with parameters on the meta device, "
            f"which have no values yet. Legal: a callable that reads and replaces none; {WHOLE}"
        ) from error
    if not isinstance(module, nn.Module):
        raise ValueError(f"model: the callable returned {type(module).__name__}; it must return an nn.Module")
    module = CompileWrappers(module).model
    if recorder.refused:
        raise InitialiserError(
            "these initialisers cannot be replayed shard by shard:\n  "
            + "\n  ".join(recorder.refused)
            + f"\nlegal in-place initialisers: {', '.join(sorted({kind for kind, _ in _RECORDED.values()}))}; {WHOLE}"
        )
    recipes = {}
    for name, parameter in module.named_parameters():
        recipe = recorder._recipe(parameter)
        if not parameter.is_meta or recipe is None:
            raise InitialiserError(
                f"parameter {name}: it was not made while the callable ran; build it inside, {WHOLE}"
            )
        if not recipe.ops and recipe.numel:
            raise InitialiserError(
                f"parameter {name}: nothing gives it a value; initialise it while it is built"
            )
        recipes[name] = recipe
    return module, recipes


def replay(
    recipe: Recipe,
    seed: int,
    name: str,
    start: int,
    stop: int,
    device: torch.device | str = "cpu",
    ops: Ops = TORCH,
) -> Tensor:
    """Elements [start, stop) of the flattened parameter, float64, drawn on `device` by `ops`; their bits depend neither
    on those nor on the bounds.

    Each operation is exactly rounded: a library's function differs between the body and the tail of a vector loop.
    Work and memory: the range.
    """
    assert 0 <= start <= stop <= recipe.numel
    values = torch.zeros(stop - start, dtype=torch.float64, device=device)
    for ordinal, op in recipe.seen():
        first, last = max(op.start, start), min(op.stop, stop)
        if first < last:
            part = values[first - start : last - start]
            _apply(op, part, key(seed, name, ordinal), first - op.start, ops)
    return values


def _apply(op: InitOp, values: Tensor, stream: tuple[int, int], offset: int, ops: Ops) -> None:
    drawn = dict(start=offset, stop=offset + values.numel(), device=values.device)
    match op.kind:
        case "fill":
            values.fill_(op.arguments[0])
        case "normal":
            mean, std = op.arguments
            values.copy_(ops.normal(stream, **drawn)).mul_(std).add_(mean)
        case "uniform":
            low, high = op.arguments
            values.copy_(ops.uniform(stream, **drawn)).mul_(high - low).add_(low)
        case "mul":
            values.mul_(op.arguments[0])
        case "add":
            values.add_(op.arguments[0])
        case "clamp":
            values.clamp_(*op.arguments)
        case "erfinv":
            values.copy_(inverse_erf(values))
        case _:
            raise AssertionError(f"recipe with unknown operation {op.kind}")
