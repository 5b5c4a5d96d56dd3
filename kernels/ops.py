"""Lists every fused operation of a model and of its optimizer, and chooses the path that computes each.

A model or a parallel layer holds an `Ops` and calls nothing else of this package.  `TORCH`, the default, serves every
device.  The engine chooses with `select` and gives the choice to every module that has an attribute `ops`.  No op
keeps global state, communicates, reads the environment, or waits for the device.  Sums run in float32 or better.
A saved tensor is never overwritten.  The formulas stand at the head of each op's file, beside its float64 reference.
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

import colossal_lite.kernels.activation as _activation
import colossal_lite.kernels.attention as _attention
import colossal_lite.kernels.cross_entropy as _cross_entropy
import colossal_lite.kernels.dropout as _dropout
import colossal_lite.kernels.embedding as _embedding
import colossal_lite.kernels.flat as _flat
import colossal_lite.kernels.launch as _launch
import colossal_lite.kernels.linear_cross_entropy as _linear_cross_entropy
import colossal_lite.kernels.norm as _norm
import colossal_lite.kernels.optimizer as _optimizer
import colossal_lite.kernels.philox as _philox
import colossal_lite.kernels.rotary as _rotary

from .philox import Rows

Choice = Literal["auto", "torch", "triton"]
Op = Callable[..., Any]


@dataclass(frozen=True)
class OpChoice:
    """Which path an op takes, and why."""

    op: str
    path: Literal["torch", "triton"]
    reason: str


@dataclass(frozen=True)
class Ops:
    """One callable per op, with the signature of its default.  `choices` says which path each op takes."""

    layer_norm: Op = _norm.layer_norm
    rms_norm: Op = _norm.rms_norm
    add_layer_norm: Op = _norm.add_layer_norm
    add_rms_norm: Op = _norm.add_rms_norm
    gelu: Op = _activation.gelu
    swiglu: Op = _activation.swiglu
    rotary: Op = _rotary.rotary
    attend: Op = _attention.attend
    attend_lse: Op = _attention.attend_lse
    attend_forward: Op = _attention.attend_forward
    attend_backward: Op = _attention.attend_backward
    attend_merge_: Op = _attention.merge_
    cross_entropy: Op = _cross_entropy.cross_entropy
    linear_cross_entropy: Op = _linear_cross_entropy.linear_cross_entropy
    cross_entropy_partial: Op = _cross_entropy.partial
    cross_entropy_combine: Op = _cross_entropy.combine
    cross_entropy_gradient: Op = _cross_entropy.gradient
    dropout: Op = _dropout.dropout
    dropout_add: Op = _dropout.dropout_add
    adamw_: Op = _optimizer.adamw_
    sgd_: Op = _optimizer.sgd_
    lion_: Op = _optimizer.lion_
    square_sum: Op = _flat.square_sum
    embedding_grad_: Op = _embedding.embedding_grad_
    normal: Op = _philox.normal
    uniform: Op = _philox.uniform
    choices: tuple[OpChoice, ...] = ()

    def describe(self) -> tuple[OpChoice, ...]:
        """One line per op, in table order."""
        by_name = {choice.op: choice for choice in self.choices}
        return tuple(by_name.get(op, OpChoice(op, "torch", "the default")) for op in self.names())

    @classmethod
    def names(cls) -> tuple[str, ...]:
        return tuple(field.name for field in fields(cls) if field.name != "choices")


TORCH = Ops()


_FILES = (
    _activation, _attention, _cross_entropy, _dropout, _embedding, _flat, _linear_cross_entropy, _norm,
    _optimizer, _philox, _rotary,
)  # fmt: skip


def select(
    choice: Choice = "auto", device_type: str = "cpu", *, strict: bool | None = None, compiled: bool = False
) -> Ops:
    """The ops for one kind of device.

    "auto" takes Triton on CUDA, where it is installed, and torch elsewhere.  A call that a kernel cannot serve
    (float64, heads beyond 256) goes to torch.  "triton" is strict: such a call raises.  `strict` overrides either.
    compiled: torch.compile works here and compiles the model.  On the CPU it then makes AdamW too.  On CUDA, "auto"
    leaves it the ops that it fuses with their neighbours (FUSED).  Other Triton ops run between the compiled parts.
    Raises ValueError for a choice that this device or installation does not have.  On the CPU, "triton" works only
    in the interpreter, which a person must switch on.
    """
    if choice not in ("auto", "torch", "triton"):
        raise ValueError(f"kernels: {choice!r}; legal are 'auto', 'torch' and 'triton'")
    if choice == "torch" or (choice == "auto" and device_type != "cuda") or device_type == "meta":
        if not compiled or device_type != "cpu":
            return TORCH
        reason = OpChoice("adamw_", "torch", "one pass, by torch.compile")
        return replace(TORCH, adamw_=_optimizer.compiled_adamw_(), choices=(reason,))
    why = why_not_triton(device_type)
    if why is None:
        return _triton_ops(choice, device_type, choice == "triton" if strict is None else strict, compiled)
    if choice == "auto" and not strict:
        return replace(TORCH, choices=tuple(OpChoice(op, "torch", why) for op in TORCH.names()))
    raise ValueError(f"kernels: {choice!r} cannot be: {why}; legal are {LEGAL_WITHOUT}")


FUSED = ("layer_norm", "rms_norm", "add_layer_norm", "add_rms_norm", "gelu", "swiglu", "rotary")
"""Ops of a block that torch.compile fuses with what stands beside them."""
LEGAL_WITHOUT = "'auto', 'torch' (or a CUDA device, or TRITON_INTERPRET=1 to test kernels on a CPU)"


def why_not_triton(device_type: str) -> str | None:
    """Why the Triton kernels cannot run on a kind of device; None if they can."""
    if device_type not in ("cpu", "cuda"):
        return f"triton has no kernels for device {device_type!r}"
    try:
        _launch.load()
    except ImportError as error:
        return f"triton is not installed ({error})"
    if _launch.interpreting() != (device_type == "cpu"):
        in_words = (
            "triton has no kernels for device 'cpu'",
            "TRITON_INTERPRET=1 has kernels interpreted, on the CPU",
        )
        return in_words[device_type != "cpu"]
    return None


def triton_paths() -> dict[str, _launch.TritonOp]:
    """Every op that has a Triton path."""
    return {op: path for file in _FILES for op, path in getattr(file, "TRITON", {}).items()}


def _triton_ops(choice: Choice, device_type: str, strict: bool, compiled: bool) -> Ops:
    paths, left = triton_paths(), {}
    if compiled:  # torch.compile would trace into a launch, and through the checks before it
        paths = {op: replace(path, run=torch.compiler.disable(path.run)) for op, path in paths.items()}
        left = dict.fromkeys(FUSED if choice == "auto" else (), "left to torch.compile, which fuses it")
        paths = {op: path for op, path in paths.items() if op not in left}
    reasons = dict.fromkeys(paths, "in the interpreter" if device_type == "cpu" else f"on {device_type}")
    if choice == "auto":
        for op, best in _attention.BEST.items():
            paths[op] = replace(paths[op], run=functools.partial(best, paths[op].run))
            reasons[op] += ": torch's flash or cuDNN for causal and full masks, Triton for the others"
    rest = "refused" if strict else "torch"
    choices = tuple(
        OpChoice(op, "triton", f"{reasons[op]}; float64: {rest}")
        if op in paths
        else OpChoice(op, "torch", left.get(op, "has no kernel"))
        for op in TORCH.names()
    )
    table = {op: _guarded(op, path, getattr(TORCH, op), device_type, strict) for op, path in paths.items()}
    return replace(TORCH, **table, choices=choices)


def _guarded(op: str, path: _launch.TritonOp, plain: Op, device_type: str, strict: bool) -> Op:
    """The Triton path behind its checks; what it cannot do goes to torch, or raises if strict.

    Raises ValueError for a tensor on another device, or with a dtype or strides that the kernel would misread.
    The message names op, argument, the given value and the legal ones.  Calls on meta tensors alone go to torch.
    """
    names = list(inspect.signature(plain).parameters)

    def call(*args: Any, **named: Any) -> Any:
        given = dict(zip(names, args, strict=False)) | named
        found = list(_tensors(given))
        devices = {x.device for _, _, x in found}
        if "device" in names:
            devices.add(torch.device(given.get("device", "cpu")))
        if {device.type for device in devices} == {"meta"}:
            return plain(*args, **named)
        reason = None
        for label, _, x in found:
            if x.device.type != device_type or x.device != found[0][2].device:
                legal = f"a {device_type} tensor" if x.device.type != device_type else f"{found[0][2].device}"
                raise ValueError(f"{op}: {label} is on {x.device}; legal is {legal}")
            if x.dtype == torch.float64 and x.dim():
                reason = f"{label} is torch.float64"
        if wrong := {device.type for device in devices} - {device_type}:
            raise ValueError(f"{op}: device is {wrong.pop()}; legal is {device_type}")
        reason = reason or path.refuses(*args, **named)
        if reason is not None:
            if strict:
                raise ValueError(f"{op}: {reason}, which strict kernels do not hand to torch")
            return plain(*args, **named)
        for label, name, x in found:
            takes = path.takes[name]
            takes.check(op, label, x, given.get(takes.like))
        return path.run(*args, **named)

    return call


@functools.cache
def _plain(name: str) -> str:
    """q_BTHK is q to people."""
    return re.sub("_[A-Z]+$", "", name)


def _tensors(given: dict[str, Any]) -> Iterator[tuple[str, str, Tensor]]:
    """(its name in messages, its parameter, the tensor) of each tensor argument of an op, alone or in a list."""
    for name, value in given.items():
        plain = _plain(name)
        if isinstance(value, Tensor):
            yield plain, name, value
        elif isinstance(value, list | tuple):
            yield from ((f"{plain}[{i}]", name, x) for i, x in enumerate(value) if isinstance(x, Tensor))


class Dropout(nn.Module):
    """Drop-in for nn.Dropout, with the residual addition of a [B, T, D] activation behind it.

    The engine sets `rows`.  Each forward calls it for the tokens of the current micro-batch.
    Without it (a plain training loop), torch's generator draws the mask.
    """

    def __init__(self, p: float = 0.0) -> None:
        super().__init__()
        self.p = p
        self.rows: Callable[[], Rows] | None = None
        self.ops = TORCH

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """dropout(x), added to the residual if there is one."""
        if not self.training or self.p == 0.0 or self.rows is None:
            y = nn.functional.dropout(x, self.p, self.training)
            return y if residual is None else residual + y
        rows = self.rows()
        y = (
            _dropout.dropped(self.ops.dropout, x, self.p, rows)
            if residual is None
            else self.ops.dropout_add(x, residual, self.p, rows)
        )
        assert isinstance(y, Tensor)
        return y

    def for_a_kernel(self, x: Tensor) -> tuple[Tensor, float, Rows | None]:
        """(x, p, rows) for an op that drops elements of x.  rows is None where it has nothing to drop."""
        if not self.training or self.p == 0.0:
            return x, 0.0, None
        if self.rows is None:
            return nn.functional.dropout(x, self.p), 0.0, None
        return x, self.p, self.rows()

    def extra_repr(self) -> str:
        return f"p={self.p}"
