"""Shows a rank's part of a tensor to a module's own code with the sizes of the whole.

Note: whole sizes.
The code of an attention or MLP splits, views and chunks by sizes.  It keeps them under any name, or computes them.  All
of them are of the whole model.  Between a column-wise linear and its row-wise one a rank has a part of the heads or
features.  A `Part` is that tensor: its `shape` is that of the whole.  Sizes in calls are divided at the cut, and torch
computes on the part.  So no attribute of a module is changed, and none has to be found.

Two runs of a call on meta tensors, with whole and with local sizes, show where the cut is after it; the answer is kept
by the call's arguments.  Nothing here is trusted: the proof of a plan (`plan_proof`) runs the model so.

A tensor that every rank has whole, and that meets a part, is narrowed to the part's heads or features.  Gradients
within the region are terms of a sum over the ranks.  The specs of its parameters say so; others enter by `copy`.
"""

from __future__ import annotations

import copy
import linecache
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, count
from types import MappingProxyType
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_map

from colossal_lite.distributed import autograd_collectives
from colossal_lite.distributed.communicator import Communicator
from colossal_lite.kernels import Rows, dropped

LOCAL = torch._C.DisableTorchFunctionSubclass
MOST_CALLS = 4096
"""Calls whose cuts are remembered, over all models of the process."""


class CutError(ValueError):
    """A call that cannot be computed on a part."""


@dataclass(frozen=True)
class Cut:
    """Part `part` of `parts` of every block of a dim of `size`; `blocks`, repeated, fill the dim."""

    dim: int
    size: int
    blocks: tuple[int, ...]
    part: int
    parts: int
    what: ClassVar[str] = "heads or features"
    rules: ClassVar[Mapping[Any, Callable[[Any, Any, Any], Any]]] = MappingProxyType({})
    """Calls that have a rule of their own with this kind of cut, beside `_RULES`."""

    @property
    def local(self) -> int:
        return self.size // self.parts

    def on(self, dim: int, size: int, blocks: Sequence[int]) -> Cut:
        """The cut of another dim. Raises CutError where a block does not divide."""
        if odd := [block for block in blocks if block % self.parts]:
            raise CutError(f"{odd[0]} {self.what} do not divide into {self.parts} parts")
        alike = tuple(blocks) if len(set(blocks)) > 1 else (blocks[0],)
        return replace(self, dim=dim, size=size, blocks=alike)

    def taken(self, x: Tensor, dim: int) -> Tensor:
        """This part of a tensor that every rank has whole. The dim has this size, or one entry for each group of
        heads."""
        size = x.shape[dim]
        if size != self.size:
            start, length = self.groups(size)
            return x.narrow(dim, start, length)
        block = self.blocks[0]
        one = x.unflatten(dim, (size // block, block))
        own = block // self.parts
        part: Tensor = one.narrow(dim + 1, self.part * own, own).flatten(dim, dim + 1)
        return part

    def groups(self, size: int) -> tuple[int, int]:
        """(first, number) of the entries that this part's heads use, where each is shared by a group of heads."""
        heads = self.size // size
        return self.part * self.local // heads, max(1, self.local // heads)

    def fits(self, size: int) -> bool:
        """Whether a dim of `size` can be taken so."""
        if len(self.blocks) > 1:
            return False
        heads, rest = divmod(self.size, size)
        is_group = size > 1 and not rest and self.blocks[0] == self.size
        return size == self.size or (is_group and (self.local % heads == 0 or heads % self.local == 0))

    def sections(self) -> list[int]:
        """Where blocks end along the dim."""
        return list(accumulate(self.blocks * (self.size // sum(self.blocks))))

    def entered(self, x: Tensor, comm: Any) -> Tensor:
        """A tensor of outside of the region, whose gradient is the sum of terms of all parts."""
        return autograd_collectives.copy(x, comm)

    def dropped(self, drop: Any, x: Tensor, p: float, rows: Rows) -> Tensor:
        """This part of a dropout whose counters, `rows`, are of the whole."""
        if len(self.blocks) == 1 and self.blocks[0] == self.size:
            if self.dim == x.dim() - 1:
                return dropped(
                    drop, local(x), p, replace(rows, feature=self.part * self.local, width=self.local)
                )
            if x.dim() == 4 and self.dim == 1:
                return dropped(drop, local(x), p, replace(rows, heads=(self.part * self.local, self.local)))
        raise CutError(
            f"a dropout of {tuple(whole_shape(x))}, cut in dim {self.dim}; legal: heads second, or p=0"
        )

    def otherwise(self, func: Any, args: Any, kwargs: Any, comm: Any, error: CutError) -> Any:
        """What a call gives that cannot be computed on parts. Raises the error where there is no way."""
        raise error


class Part(Tensor):
    """A tensor within the region of a column-wise and a row-wise linear. `cut` None: every rank has all of it."""

    cut: Cut | None
    comm: Any
    """The axis; of a cut of tokens, what `token_parts.Sequences` says."""

    @classmethod
    def of(cls, x: Tensor, comm: Any, cut: Cut | None) -> Part:
        made: Part = x.as_subclass(cls)
        made.cut, made.comm = cut, comm
        return made

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with LOCAL():
            if _is_in_backward():
                return func(*args, **(kwargs or {}))
            cut = getattr(args[0], "cut", None) if args else None
            rule = cut.rules.get(func) if cut is not None else None
            rule = rule or _RULES.get(func, compute)
            try:
                return rule(func, args, kwargs or {})
            except CutError as error:
                raise CutError(f"{_line_of_code()}: {error}") from None


def _is_in_backward() -> bool:
    """Whether the backward of a user's autograd function runs: what it saved is as local as its gradients are. A
    forward that checkpointing runs again has gradients enabled."""
    return not torch.is_grad_enabled() and torch._C._current_graph_task_id() != -1


def local(x: Tensor) -> Tensor:
    """The tensor as torch has it."""
    return x.as_subclass(Tensor) if isinstance(x, Part) else x


def features_of_part(x: Tensor) -> Tensor:
    """The input [..., D / n] of a row-wise linear. Raises CutError for one whose last dim is not cut in one piece."""
    cut = getattr(x, "cut", None)
    if cut is None or cut.dim != x.dim() - 1 or cut.blocks != (cut.size,):
        raise CutError(
            f"the input {list(whole_shape(x))} of a row-wise linear is not cut in features in one piece, as the "
            f"output of its column-wise linear is"
        )
    return local(x)


def without_parts(outputs: Any) -> Any:
    """What a module returns to the code around it. Of an object, tensors among its attributes."""

    def plain(leaf: Any) -> Any:
        if isinstance(leaf, Part):
            return local(leaf)
        own = {} if isinstance(leaf, Tensor | nn.Module | type) else getattr(leaf, "__dict__", {})
        if parts := {name: local(value) for name, value in own.items() if isinstance(value, Part)}:
            leaf = copy.copy(leaf)
            vars(leaf).update(parts)
        return leaf

    return tree_map(plain, outputs)


def whole_shape(x: Tensor) -> torch.Size:
    """The shape that code sees."""
    shape = Tensor.shape.__get__(x)  # type: ignore[attr-defined]
    cut = getattr(x, "cut", None)
    return shape if cut is None else torch.Size((*shape[: cut.dim], cut.size, *shape[cut.dim + 1 :]))


# ---- rules of calls ----


def _shape(func: Any, args: Any, kwargs: Any) -> Any:
    shape = whole_shape(args[0])
    if func is Tensor.size and (len(args) > 1 or kwargs):
        return shape[args[1] if len(args) > 1 else kwargs["dim"]]
    return shape


def _numel(func: Any, args: Any, kwargs: Any) -> int:
    return math.prod(whole_shape(args[0]))


def _len(func: Any, args: Any, kwargs: Any) -> int:
    return whole_shape(args[0])[0]


def _values(func: Any, args: Any, kwargs: Any) -> Any:
    x = args[0]
    if x.cut is not None:
        error = CutError(f"{_name(func)} reads values of which a rank has a part")
        return x.cut.otherwise(func, args, kwargs, x.comm, error)
    return func(*args, **kwargs)


def _hook(func: Any, args: Any, kwargs: Any) -> Any:
    """A hook on a gradient sees that of the part. The proof shows whether the sum over ranks is that of one process."""
    return func(*args, **kwargs)


def _retain_grad(func: Any, args: Any, kwargs: Any) -> Any:
    cut = args[0].cut
    raise CutError(
        f"retain_grad keeps a rank's part of a gradient{'' if cut is None else ', of its ' + cut.what}. Legal: no "
        f"retain_grad, or register_hook with a function that is linear in the gradient"
    )


def _view(func: Any, args: Any, kwargs: Any) -> Any:
    """view, reshape, flatten, unflatten: elements stay in order, so the cut keeps its place among them."""
    x = args[0]
    if not isinstance(x, Part) or x.cut is None or _has_dtype(args):
        return compute(func, args, kwargs)
    shape = list(_on_meta(func, args, kwargs).shape)
    cut = viewed(whole_shape(x), x.cut, shape)
    shape[cut.dim] = cut.local
    call = Tensor.view if func is Tensor.view else Tensor.reshape
    return Part.of(call(x, shape), x.comm, cut)


def viewed(whole: Sequence[int], cut: Cut, shape: Sequence[int]) -> Cut:
    """The cut of a tensor of sizes `whole`, when it is viewed in another `shape`."""
    inner = math.prod(whole[cut.dim + 1 :])
    lengths = [block * inner for block in cut.blocks]
    period = sum(lengths)
    for dim, size in enumerate(shape):
        inner = math.prod(shape[dim + 1 :])
        if inner < period <= inner * size and inner * size % period == 0:
            if all(length % inner == 0 for length in lengths):
                return cut.on(dim, size, [length // inner for length in lengths])
    raise CutError(
        f"a view of {tuple(whole)}, cut in dim {cut.dim}, as {tuple(shape)} has no dim with that cut"
    )


def _expand(func: Any, args: Any, kwargs: Any) -> Any:
    x = args[0]
    if not isinstance(x, Part) or x.cut is None:
        return compute(func, args, kwargs)
    shape = list(_on_meta(func, args, kwargs).shape)
    cut = replace(x.cut, dim=x.cut.dim + len(shape) - x.dim())
    shape[cut.dim] = cut.local
    return Part.of(Tensor.expand(x, shape), x.comm, cut)


def _pieces(func: Any, args: Any, kwargs: Any) -> Any:
    """split, chunk and their like along the cut: pieces of whole blocks."""
    x = args[0]
    if not isinstance(x, Part) or x.cut is None:
        return compute(func, args, kwargs)
    pieces = _on_meta(func, args, kwargs)
    shape, cut = whole_shape(x), x.cut
    if all(piece.shape[cut.dim : cut.dim + 1] == shape[cut.dim : cut.dim + 1] for piece in pieces):
        return compute(func, args, kwargs)
    if any(piece.dim() != x.dim() for piece in pieces):
        raise CutError(f"{_name(func)} takes {cut.what} apart, and a rank has a part of them")
    ends = list(accumulate(piece.shape[cut.dim] for piece in pieces))
    cuts = [_section(cut, start, end) for start, end in zip([0, *ends], ends, strict=False)]
    found = Tensor.split_with_sizes(x, [each.local for each in cuts], cut.dim)
    return tuple(Part.of(y, x.comm, each) for y, each in zip(found, cuts, strict=True))


def _section(cut: Cut, start: int, stop: int) -> Cut:
    """The cut of entries [start, stop) of the dim, which must be whole blocks."""
    ends = cut.sections()
    inside = [end for end in ends if start < end <= stop]
    if (start and start not in ends) or stop not in ends:
        if cut.what == "tokens":
            raise CutError(f"{start} to {stop} of {cut.size} tokens, of which a rank has a part")
        raise CutError(
            f"entries {start} to {stop} of {cut.size} are not whole blocks of the linear's rows, which end at "
            f"{', '.join(map(str, ends[:4]))}; its role may be colwise:qkv, colwise:gate_up or another proportion"
        )
    return cut.on(cut.dim, stop - start, [b - a for a, b in zip([start, *inside], inside, strict=False)])


def _index(func: Any, args: Any, kwargs: Any) -> Any:
    """x[...]: a slice along the cut is one of whole blocks."""
    x, index = args[0], args[1] if isinstance(args[1], tuple) else (args[1],)
    if not isinstance(x, Part) or x.cut is None:
        return compute(func, args, kwargs)
    taken = sum(each is not None and each is not Ellipsis for each in index)
    at = next((i for i, each in enumerate(index) if each is Ellipsis), len(index))
    spread = [*index[:at], *[slice(None)] * (x.dim() - taken), *index[at + 1 :]]
    places = [i for i, each in enumerate(spread) if each is not None]
    place = places[x.cut.dim]
    each = spread[place]
    if not isinstance(each, slice):
        raise CutError(f"an index {type(each).__name__} along {x.cut.what}, and a rank has a part of them")
    start, stop, step = each.indices(x.cut.size)
    if (start, stop, step) == (0, x.cut.size, 1):
        spread[place] = slice(None)
        return compute(func, (x, tuple(spread)), kwargs)
    if step != 1:
        raise CutError(f"a slice with steps along {x.cut.what}, and a rank has a part of them")
    section = _section(x.cut, start, stop)
    before = _section(x.cut, 0, start).local if start else 0
    narrowed = Part.of(Tensor.narrow(x, x.cut.dim, before, section.local), x.comm, section)
    spread[place] = slice(None)
    return compute(func, (narrowed, tuple(spread)), kwargs)


def _join(func: Any, args: Any, kwargs: Any) -> Any:
    """cat along the cut: blocks side by side."""
    tensors = args[0] if args else kwargs["tensors"]
    dim = args[1] if len(args) > 1 else kwargs.get("dim", 0)
    found = [getattr(x, "cut", None) for x in tensors]
    cuts = [
        cut for x, cut in zip(tensors, found, strict=True) if cut is not None and dim % x.dim() == cut.dim
    ]
    if not cuts:
        return compute(func, args, kwargs)
    if len(cuts) < len(tensors):
        raise CutError("cat of parts with a tensor that every rank has whole, along the cut")
    blocks = [block for cut in cuts for block in cut.blocks * (cut.size // sum(cut.blocks))]
    joined = cuts[0].on(cuts[0].dim, sum(blocks), blocks)
    return Part.of(func(*args, **kwargs), tensors[0].comm, joined)


def _drop(func: Any, args: Any, kwargs: Any) -> Any:
    """Our dropout, whose counters are of the whole: those of this part are taken."""
    drop, x, p, rows = args
    cut: Cut | None = x.cut
    found = dropped(drop, local(x), p, rows) if cut is None else cut.dropped(drop, x, p, rows)
    return Part.of(found, x.comm, cut)


# ---- any other call ----


@dataclass(frozen=True)
class _Plan:
    """How a call is computed on parts: which tensors are narrowed, and the cut of each tensor that it gives."""

    narrowed: tuple[tuple[int, int], ...]
    cuts: tuple[Cut | None, ...]


_plans: dict[Any, _Plan] = {}


def compute(func: Any, args: Any, kwargs: Any) -> Any:
    tensors = list(tensors_in((args, kwargs)))
    comm = next(x.comm for x in tensors if isinstance(x, Part))
    cut = next((x.cut for x in tensors if isinstance(x, Part) and x.cut is not None), None)
    plan = None
    if cut is not None:
        key = (func, _key(args), _key(kwargs))
        plan = _plans.get(key)
        if plan is None:
            try:
                with _disable_current_modes():  # selective recomputation does not see these trials
                    plan = _find_plan(func, args, kwargs, cut)
            except CutError as error:
                return cut.otherwise(func, args, kwargs, comm, error)
            if len(_plans) < MOST_CALLS:
                _plans[key] = plan
    args, kwargs = _entered(args, kwargs, tensors, comm, cut, plan)
    out = func(*args, **kwargs)
    cuts = iter(plan.cuts) if plan is not None else None
    return _wrapped(out, comm, cuts)


def _entered(
    args: Any, kwargs: Any, tensors: list[Tensor], comm: Communicator, cut: Cut | None, plan: _Plan | None
) -> tuple[Any, Any]:
    """The arguments, with tensors of outside of the region as their gradients need, and narrowed."""
    changed: dict[int, Tensor] = {}
    for x in tensors:
        if not isinstance(x, Part | nn.Parameter) and x.requires_grad and torch.is_grad_enabled():
            changed[id(x)] = autograd_collectives.copy(x, comm) if cut is None else cut.entered(x, comm)
    if plan is not None and cut is not None:
        for place, dim in plan.narrowed:
            x = changed.get(id(tensors[place]), tensors[place])
            changed[id(tensors[place])] = cut.taken(x, dim)
    if not changed:
        return args, kwargs
    return mapped(lambda x: changed.get(id(x), x), args), mapped(lambda x: changed.get(id(x), x), kwargs)


MIXING = {
    "softmax": (1, None), "log_softmax": (1, None), "cumsum": (1, None), "cumprod": (1, None), "sort": (1, -1),
    "argsort": (1, -1), "normalize": (2, 1), "flip": (1, None), "roll": (2, None), "topk": (2, -1),
}  # fmt: skip
"""Calls that keep a shape and mix the entries of a dim: where that argument stands, and what it is if left out."""


def _check_mixing(func: Any, args: Any, kwargs: Any) -> None:
    """Raises CutError for a call that mixes sharded heads or features."""
    place, default = MIXING.get(_name(func), (0, None))
    cut: Cut | None = getattr(args[0], "cut", None) if args else None
    if not place or cut is None:
        return
    dims = args[place] if len(args) > place else kwargs.get("dim", kwargs.get("dims", default))
    if dims is None or any(
        d % args[0].dim() == cut.dim for d in (dims if type(dims) in (tuple, list) else (dims,))
    ):
        raise CutError(f"{_name(func)} over {cut.what}, and a rank has a part of them")


def _find_plan(func: Any, args: Any, kwargs: Any, cut: Cut) -> _Plan:
    _check_mixing(func, args, kwargs)
    whole = list(tensors_in(_on_meta(func, args, kwargs)))
    tensors = list(tensors_in((args, kwargs)))
    why = ""
    # A part of size 1 would be broadcast where it does not fit, so the trial gives it a size that divides no other.
    tried = _prime_above(max(n for x in (*whole, *tensors) for n in x.shape)) if cut.local == 1 else 1
    for narrowed in _narrowings(tensors, cut, [x.shape for x in whole]):
        chosen = {id(tensors[place]): dim for place, dim in narrowed}

        def part(x: Tensor, chosen: dict[int, int] = chosen) -> Tensor:
            shape, its = list(_local_shape(x)), getattr(x, "cut", None)
            if its is not None and its.local == 1:
                shape[its.dim] = tried
            meta = torch.empty(shape, dtype=x.dtype, device="meta")
            if id(x) not in chosen:
                return meta
            own = cut.taken(meta, chosen[id(x)])
            return own if tried == 1 else own.expand(_with(own.shape, chosen[id(x)], tried))

        try:
            parts = list(tensors_in(func(*mapped(part, args), **mapped(part, kwargs))))
            shapes = [[n if n % tried else n // tried for n in x.shape] for x in parts]
            cuts = tuple(_cut_of(a.shape, b, tensors, cut) for a, b in zip(whole, shapes, strict=True))
        except (RuntimeError, IndexError, CutError) as error:
            why = why or str(error).splitlines()[0]
            continue
        return _Plan(narrowed, cuts)
    raise CutError(f"{_name(func)} of {_sizes(tensors)} cannot be computed on a part: {why}")


def _local_shape(x: Tensor) -> Sequence[int]:
    """The local sizes of a tensor, a part or not."""
    sizes: Sequence[int] = Tensor.shape.__get__(x)  # type: ignore[attr-defined]
    return sizes


def _prime_above(size: int) -> int:
    return next(n for n in count(size + 1) if all(n % d for d in range(2, math.isqrt(n) + 1)))


def _with(shape: Sequence[int], dim: int, size: int) -> list[int]:
    return [size if i == dim % len(shape) else n for i, n in enumerate(shape)]


def _cut_of(whole: Sequence[int], part: Sequence[int], tensors: Sequence[Tensor], like: Cut) -> Cut:
    """The cut of an output by its two shapes."""
    differing = [dim for dim, (a, b) in enumerate(zip(whole, part, strict=True)) if a != b]
    if len(differing) != 1 or whole[differing[0]] != part[differing[0]] * like.parts:
        raise CutError(f"gives {tuple(part)}, where the whole is {tuple(whole)}")
    dim = differing[0]
    known = [x.cut for x in tensors if isinstance(x, Part) and x.cut is not None]
    same = next((cut for cut in known if cut.size == whole[dim]), None)
    if same is not None:
        return replace(same, dim=dim)
    if whole[dim] % like.size == 0 and len(like.blocks) == 1:
        return like.on(dim, whole[dim], [like.blocks[0] * (whole[dim] // like.size)])
    raise CutError(f"gives a dim of {whole[dim]} from one of {like.size} in blocks {like.blocks}")


def _narrowings(
    tensors: Sequence[Tensor], cut: Cut, outputs: Sequence[Sequence[int]]
) -> Iterator[tuple[tuple[int, int], ...]]:
    """None, then each way of narrowing tensors that every rank has whole; dims aligned from the right come first."""
    yield ()
    behind = max(
        (x.dim() - x.cut.dim for x in tensors if isinstance(x, Part) and x.cut is not None), default=0
    )
    whole = [(i, x) for i, x in enumerate(tensors) if getattr(x, "cut", None) is None]
    aligned = tuple(
        (i, x.dim() - behind) for i, x in whole if x.dim() >= behind and cut.fits(x.shape[x.dim() - behind])
    )
    if aligned:
        yield aligned
    for i, x in whole:
        for dim, size in enumerate(x.shape):
            if size == cut.size and len(cut.blocks) == 1 and ((i, dim),) != aligned:
                yield ((i, dim),)


def _on_meta(func: Any, args: Any, kwargs: Any) -> Any:
    """What a call gives of whole sizes."""

    def whole(x: Tensor) -> Tensor:
        return torch.empty(whole_shape(x), dtype=x.dtype, device="meta")

    try:
        return func(*mapped(whole, args), **mapped(whole, kwargs))
    except (RuntimeError, NotImplementedError) as error:
        raise CutError(f"{_name(func)}: {str(error).splitlines()[0]}") from None


def _wrapped(out: Any, comm: Communicator, cuts: Iterator[Cut | None] | None) -> Any:
    if isinstance(out, Part):  # in place
        return out
    if isinstance(out, Tensor):
        return Part.of(out, comm, None if cuts is None else next(cuts))
    if type(out) in (tuple, list):
        return type(out)(_wrapped(each, comm, cuts) for each in out)
    if isinstance(out, tuple) and any(isinstance(each, Tensor) for each in out):
        parts = [_wrapped(each, comm, cuts) for each in out]
        return type(out)(parts) if _is_named_result(out) else tuple(parts)
    return out


def tensors_in(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, tuple | list):
        for each in value:
            yield from tensors_in(each)
    elif isinstance(value, dict):
        for each in value.values():
            yield from tensors_in(each)


def _is_named_result(value: Any) -> bool:
    """Whether torch has made this tuple, with names for its members."""
    return type(value).__module__ == "torch.return_types"


def mapped(change: Callable[[Tensor], Tensor], value: Any) -> Any:
    if isinstance(value, Tensor):
        return change(value)
    if type(value) in (tuple, list) or _is_named_result(value):
        return type(value)([mapped(change, each) for each in value])
    if type(value) is dict:
        return {name: mapped(change, each) for name, each in value.items()}
    return value


def _key(value: Any) -> Any:
    if isinstance(value, Tensor):
        return Tensor.shape.__get__(value), value.dtype, getattr(value, "cut", None)  # type: ignore[attr-defined]
    if isinstance(value, tuple | list):
        return type(value), *map(_key, value)
    if isinstance(value, dict):
        return tuple((name, _key(each)) for name, each in value.items())
    if isinstance(value, slice):
        return slice, value.start, value.stop, value.step
    return value if value.__hash__ is not None else repr(value)


def _has_dtype(args: Any) -> bool:
    return len(args) > 1 and isinstance(args[1], torch.dtype)


def _name(func: Any) -> str:
    return str(getattr(func, "__name__", func))


def _sizes(tensors: Sequence[Tensor]) -> str:
    return ", ".join(str(list(whole_shape(x))) for x in tensors)


def _line_of_code() -> str:
    """The line of the model that made the call."""
    frame = sys._getframe(2)
    while frame.f_back is not None:
        name = frame.f_globals.get("__name__", "")
        if not name.startswith(("torch.", "colossal_lite.", "einops.")) and name != "torch":
            break
        frame = frame.f_back
    path, number = frame.f_code.co_filename, frame.f_lineno
    return f"{path}:{number} `{linecache.getline(path, number).strip()}`"


_RULES: dict[Any, Callable[[Any, Any, Any], Any]] = {
    **dict.fromkeys((Tensor.shape.__get__, Tensor.size), _shape),  # type: ignore[attr-defined]
    **dict.fromkeys((Tensor.numel, Tensor.nelement, torch.numel), _numel),
    Tensor.__len__: _len,
    **dict.fromkeys(
        (Tensor.item, Tensor.tolist, Tensor.numpy, Tensor.__bool__, Tensor.__float__, Tensor.__int__), _values
    ),
    **dict.fromkeys(
        (
            Tensor.view, Tensor.reshape, torch.reshape, Tensor.flatten, torch.flatten, Tensor.unflatten,
            torch.unflatten, Tensor.view_as, Tensor.reshape_as,
        ),
        _view,
    ),
    Tensor.register_hook: _hook,
    Tensor.retain_grad: _retain_grad,
    **dict.fromkeys((Tensor.expand, Tensor.expand_as, Tensor.broadcast_to, torch.broadcast_to), _expand),
    **dict.fromkeys(
        (
            Tensor.split, torch.split, Tensor.split_with_sizes, torch.split_with_sizes, Tensor.chunk, torch.chunk,
            Tensor.tensor_split, torch.tensor_split, Tensor.unbind, torch.unbind,
        ),
        _pieces,
    ),
    Tensor.__getitem__: _index,
    **dict.fromkeys((torch.cat, torch.concat, torch.concatenate), _join),
    dropped: _drop,
}  # fmt: skip
