"""What modes of torch see of a forward, and how the framework itself computes without them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FunctionType
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch._C._dynamo import eval_frame
from torch._ops import OpOverload
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes, _len_torch_dispatch_stack
from torch.utils._pytree import tree_leaves

Given = ParamSpec("Given")
Found = TypeVar("Found")
Call = TypeVar("Call", bound=Callable[..., Any])
aten = torch.ops.aten
READ_NO_VALUES = frozenset(
    {
        aten.empty_like.default, aten.zeros_like.default, aten.ones_like.default, aten.full_like.default,
        aten.new_empty.default, aten.new_zeros.default, aten.new_ones.default, aten.new_full.default,
    }
)  # fmt: skip
"""Operations that take of a tensor its shape and dtype alone."""


_UNTRACED = eval_frame._FrameExecStrategy(eval_frame._FrameAction.SKIP, eval_frame._FrameAction.SKIP)
"""Of code and all that it calls, as a mode's, where a user's code is compiled. Else torch.compile compiles it too."""


class DispatchMode(TorchDispatchMode):
    """A mode that is given each operation."""

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)  # type: ignore[no-untyped-call]
        eval_frame.set_code_exec_strategy(cls.__torch_dispatch__.__code__, _UNTRACED)

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # else torch wraps __torch_dispatch__, which imports its compiler: 155 MB of each rank, and 2 s


class WatchingMode(DispatchMode):
    """A mode that leaves each operation as it is, and compiled blocks compiled."""

    supports_higher_order_operators = True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True


def seen_within(function: Any) -> Callable[..., Any]:
    """`run(mode, ...)` of a torch function: a copy that does not check for modes at its start, run within `mode`. So
    the mode sees the calls inside it."""
    looks = {name: lambda *tensors: False for name in ("has_torch_function", "has_torch_function_unary")}
    inner = FunctionType(function.__code__, function.__globals__ | looks, argdefs=function.__defaults__)

    def run(mode: TorchFunctionMode, *args: Any, **kwargs: Any) -> Any:
        with mode:
            return inner(*args, **kwargs)

    return run


@contextmanager
def without_modes() -> Iterator[None]:
    """Within, no mode and no transform of torch.func sees an operation. Selective recomputation would take ours for the
    block's. A memory meter would count state as activations. Functional dropout would look at each of them. A transform
    lets no tensor change that it has not made."""
    with torch._C.DisableTorchFunction(), torch._C._DisableFuncTorch():
        if not _len_torch_dispatch_stack():
            yield
            return
        with _disable_current_modes():
            yield


@contextmanager
def outside_inference() -> Iterator[None]:
    """Context without torch.inference_mode, if it is on. A tensor that is allocated in it takes no later update.
    Gradients stay off."""
    if not torch.is_inference_mode_enabled():
        yield
        return
    with torch.inference_mode(False), torch.no_grad():
        yield


def outside_compiler(call: Callable[Given, Found]) -> Callable[Given, Found]:
    """`call`, which torch.compile does not trace where it traces the caller. Compiled code within stays compiled."""
    found: Callable[Given, Found] = torch.compiler.disable(
        call, reason="an engine's step is Python that is not traced; compile the model, or the loss"
    )
    return found


def left_untraced(call: Call) -> Call:
    """`call` itself, which torch.compile leaves out with all that it calls. What `torch.compiler.disable` gives imports
    the compiler, and calls it each time."""
    marked: Any = call
    marked._torchdynamo_disable = True
    marked._torchdynamo_disable_msg = "ranks exchange in it. Legal: torch.compile without fullgraph"
    eval_frame.set_code_exec_strategy(marked.__code__, _UNTRACED)
    return call


@contextmanager
def uncompiled() -> Iterator[None]:
    """Within, compiled code runs as it was written. Beside a mode torch would leave it uncompiled for good."""
    if "torch._dynamo" not in sys.modules:  # nothing is compiled, and the import costs each rank 155 MB
        yield
        return
    with torch.compiler.set_stance("force_eager"):
        yield


def refuse_without_gradients(what: str) -> None:
    """Raises ValueError where a call that computes gradients is made while torch computes none."""
    if not torch.is_grad_enabled():
        raise ValueError(
            f"{what}: within torch.no_grad or torch.inference_mode, where there are no gradients. Legal: outside of "
            f"both, or eval_step"
        )


@contextmanager
def naming_transforms() -> Iterator[None]:
    """Around a model's forward. Raises ValueError, with legal ways, for transforms of torch.func beside hooks of saved
    tensors."""
    try:
        yield
    except RuntimeError as error:
        if "saved tensor hooks" not in str(error):
            raise
        raise ValueError(
            "model: transforms of torch.func save no tensors for zero.stage=3 or a recomputed block. Legal: "
            "zero.stage=2 and activation_checkpoint='none', or torch.autograd.grad(..., create_graph=True)"
        ) from error


def autocast_dtype(x: Tensor) -> torch.dtype | None:
    """The dtype to which torch.autocast casts x for a product, if it is on and that is another dtype."""
    kind = x.device.type
    if kind == "meta" or x.dtype == torch.float64 or not torch.is_autocast_enabled(kind):
        return None
    cast = torch.get_autocast_dtype(kind)
    return None if cast == x.dtype else cast


def refuse_autocast(weight: Tensor) -> None:
    """Raises ValueError where torch.autocast would cast the weight of a product whose backward is written by hand."""
    if (cast := autocast_dtype(weight)) is not None:
        name = {torch.bfloat16: "precision='bf16'", torch.float16: "precision='fp16'"}.get(cast, "precision")
        raise ValueError(
            f"torch.autocast: it casts to {cast} in a layer of parallel.tensor or of schedule zb-h1 or zb-v, whose "
            f"weights stay {weight.dtype}. Legal: {name} in the config, without autocast. Or autocast without both"
        )


def tensors_in(values: Any) -> list[Tensor]:
    """The tensors among the arguments or results of an operation."""
    return [value for value in tree_leaves(values) if isinstance(value, Tensor)]


def read_by(func: Any, args: Any, kwargs: Any) -> list[Tensor]:
    """The tensors with strides whose values an operation may read. A view reads none."""
    if func in READ_NO_VALUES or isinstance(func, OpOverload) and func.is_view:
        return []
    return [tensor for tensor in tensors_in((args, kwargs)) if tensor.layout is torch.strided]


def written_by(func: Any, args: Any, kwargs: Any) -> Iterator[Tensor]:
    """The tensors that an operation writes to: its first argument, each of a list, or `out`."""
    for place, argument in enumerate(func._schema.arguments if isinstance(func, OpOverload) else ()):
        if argument.alias_info is not None and argument.alias_info.is_write:
            yield from tensors_in(args[place] if place < len(args) else (kwargs or {}).get(argument.name))


def storage_of(tensor: Tensor) -> int:
    """The identity of a tensor's storage, while that lives."""
    key: int = tensor.untyped_storage()._cdata
    return key
