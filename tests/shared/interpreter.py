"""Triton's interpreter, made right for bf16, faster, and able to see what a GPU would not forgive.

Note: for a process that runs under TRITON_INTERPRET=1.  Three layers, each checked against itself when
installed:

repair     triton 3.6 to 3.9 hold bf16 values as uint16 in numpy and compute on the bit patterns: products,
sums and
           comparisons are silently wrong and stores truncate.  Here they go through float32 and round to
           nearest even.
           Its fused multiply-add rounds twice; here it rounds once.
speed      the language is patched once a launch instead of once for every nested call (about twice as fast).
sanitizer  within `sanitized()`, every load and store is checked: bytes outside the arguments' elements, two
lanes or
           two programs writing one place, a program reading what another wrote or writing what another read.
           Programs run in reverse order if asked, and fresh tensors start as NaN.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
import triton.runtime.interpreter as interpreter

assert triton.knobs.runtime.interpret, "set TRITON_INTERPRET=1 before triton is imported"

Builder, Handle = interpreter.InterpreterBuilder, interpreter.TensorHandle
FLOATS = (tl.float16, tl.bfloat16, tl.float32, tl.float64)


# ----------------------------------------------------------------------------------------------------- repair


def widen(bits: np.ndarray) -> np.ndarray:
    """bf16 bit patterns to float32."""
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


def narrow(values: np.ndarray) -> np.ndarray:
    """float32 to bf16 bit patterns, to nearest even."""
    values = np.ascontiguousarray(values, dtype=np.float32)
    bits = values.view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    return np.where(np.isnan(values), np.uint16(0x7FC0), rounded.astype(np.uint16))


def is_bf16(handle: Any) -> bool:
    return bool(handle.dtype.scalar == tl.bfloat16)


def as_float32(handle: Any) -> Any:
    return Handle(widen(handle.data), tl.float32) if is_bf16(handle) else handle


def repair() -> None:
    names = ("binary_op", "unary_op", "ternary_op", "create_dot", "cast_impl", "create_fp_to_fp")
    plain = {name: getattr(Builder, name) for name in names}
    on_bits = {np.bitwise_and, np.bitwise_or, np.bitwise_xor}

    def binary_op(self: Any, left: Any, right: Any, op: Any) -> Any:
        if not is_bf16(left) or op in on_bits:
            return plain["binary_op"](self, left, right, op)
        out = op(widen(left.data), widen(right.data) if is_bf16(right) else right.data)
        return Handle(out, tl.int1) if out.dtype == np.bool_ else Handle(narrow(out), tl.bfloat16)

    def unary_op(self: Any, x: Any, op: Any) -> Any:
        return (
            Handle(narrow(op(widen(x.data))), tl.bfloat16) if is_bf16(x) else plain["unary_op"](self, x, op)
        )

    def ternary_op(self: Any, left: Any, right: Any, other: Any, op: Any) -> Any:
        if op is np.where or not is_bf16(other):
            return plain["ternary_op"](self, left, right, other, op)
        return Handle(narrow(op(*(as_float32(t).data for t in (left, right, other)))), tl.bfloat16)

    def create_dot(self: Any, a: Any, b: Any, d: Any, *rest: Any) -> Any:
        return plain["create_dot"](self, as_float32(a), as_float32(b), d, *rest)

    def cast_impl(self: Any, source: Any, target: Any) -> Any:
        if is_bf16(source):
            wide = as_float32(source)
            return wide if target.scalar == tl.float32 else plain["cast_impl"](self, wide, target)
        if target.scalar == tl.bfloat16:
            return Handle(narrow(source.data.astype(np.float32)), tl.bfloat16)
        return plain["cast_impl"](self, source, target)

    def create_fp_to_fp(self: Any, source: Any, target: Any, mode: Any) -> Any:
        pair = (source.dtype.scalar, target.scalar)
        if tl.bfloat16 in pair and all(kind in FLOATS for kind in pair):
            return cast_impl(self, source, target)
        return plain["create_fp_to_fp"](self, source, target, mode)

    for repaired in (binary_op, unary_op, ternary_op, create_dot, cast_impl, create_fp_to_fp):
        setattr(Builder, repaired.__name__, repaired)
    Builder.get_bf16 = lambda self, v: Handle(narrow(np.array([v], np.float32)), tl.bfloat16)


def fused_multiply_add(x: np.ndarray, y: np.ndarray, z: np.ndarray) -> np.ndarray:
    """x * y + z of float32, rounded once. The product is exact in float64. The sum is rounded there to the odd one of
    its two neighbours, so that rounding it to float32 is as rounding the exact sum."""
    product, wide = x.astype(np.float64) * y.astype(np.float64), z.astype(np.float64)
    total = product + wide
    part = total - product
    error = (product - (total - part)) + (wide - part)  # exact: Knuth's two-sum
    bits = np.array(total).view(np.int64)
    away = np.where(np.signbit(error) == np.signbit(total), 1, -1)
    is_even = np.isfinite(error) & (error != 0) & ((bits & 1) == 0)
    return np.where(is_even, bits + away, bits).view(np.float64).astype(np.float32)


def repair_fma() -> None:
    """triton's own rounds the product too."""
    plain = Builder.create_fma

    def create_fma(self: Any, x: Any, y: Any, z: Any) -> Any:
        if z.dtype.scalar != tl.float32:
            return plain(self, x, y, z)
        return Handle(fused_multiply_add(x.data, y.data, z.data), tl.float32)

    Builder.create_fma = create_fma


# ------------------------------------------------------------------------------------------------------ speed


def speed() -> None:
    patched: list[set[Any]] = [set()]
    modules: dict[Any, Any] = {}
    launch = interpreter.GridExecutor.__call__

    def grid_call(self: Any, *args: Any, **named: Any) -> Any:
        patched.append(set())
        try:
            return launch(self, *args, **named)
        finally:
            patched.pop()

    def nested_call(self: Any, *args: Any, **named: Any) -> Any:
        if self.fn not in modules:
            modules[self.fn] = tuple(
                sorted({v.__name__ for v in self.fn.__globals__.values() if v in (tl, tl.core)})
            )
        if modules[self.fn] not in patched[-1]:
            interpreter._patch_lang(self.fn)
            patched[-1].add(modules[self.fn])
        return self.rewrite()(*args, **named)

    interpreter.GridExecutor.__call__ = grid_call
    interpreter.InterpretedFunction.__call__ = nested_call


# -------------------------------------------------------------------------------------------------- sanitizer


@dataclass
class Sanitizer:
    """Shadow memory of one launch: for each byte of an argument, which program last wrote and last read
    it."""

    faults: list[str] = field(default_factory=list)
    on: bool = False
    reverse: bool = False
    program: int = 0
    kernel: str = ""

    def begin(self, kernel: str, tensors: list[torch.Tensor]) -> None:
        self.kernel = kernel
        spans: list[list[int]] = []
        for t in sorted((t for t in tensors if t.numel()), key=lambda t: t.data_ptr()):
            last = sum((n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True))
            span = [t.data_ptr(), t.data_ptr() + (last + 1) * t.element_size()]
            if spans and span[0] < spans[-1][1]:
                spans[-1][1] = max(spans[-1][1], span[1])
            else:
                spans.append(span)
        self.starts = np.array([a for a, _ in spans], np.uint64)
        self.ends = np.array([b for _, b in spans], np.uint64)
        self.wrote = [np.full(b - a, -1, np.int64) for a, b in spans]
        self.read = [np.full(b - a, -1, np.int64) for a, b in spans]

    def fault(self, kind: str, what: str, count: int) -> None:
        self.faults.append(f"{self.kernel}, program {self.program}: {what} in a {kind} ({count})")

    def touch(self, pointers: Any, mask: Any, size: int, kind: str) -> Any:
        """Notes the faults of one access; returns the mask of the lanes that may go on (others would hit memory that
        is not ours)."""
        shape = np.broadcast(pointers, mask).shape
        pointers, mask = np.broadcast_to(pointers, shape), np.broadcast_to(mask, shape)
        span = np.searchsorted(self.starts, pointers.astype(np.uint64), side="right").astype(np.int64) - 1
        ends = self.ends[np.maximum(span, 0)] if self.ends.size else np.zeros(shape, np.uint64)
        legal = (span >= 0) & (pointers.astype(np.uint64) + np.uint64(size) <= ends)
        if (mask & ~legal).any():
            self.fault(kind, "out of bounds", int((mask & ~legal).sum()))
        mask = mask & legal
        for j in np.unique(span[mask]):
            at = (pointers[mask & (span == j)].astype(np.uint64) - self.starts[j]).astype(np.int64)
            wrote, read = self.wrote[j][at], self.read[j][at]
            foreign = (wrote >= 0) & (wrote != self.program)
            if kind == "load":
                if foreign.any():
                    self.fault(kind, "reads what another program wrote", int(foreign.sum()))
                self.read[j][at] = self.program
            else:
                if np.unique(at).size != at.size:
                    self.fault(kind, "two lanes write one place", at.size - np.unique(at).size)
                if foreign.any():
                    self.fault(kind, "writes what another program wrote", int(foreign.sum()))
                other = (read >= 0) & (read != self.program)
                if other.any():
                    self.fault(kind, "writes what another program read", int(other.sum()))
                self.wrote[j][at] = self.program
        return mask


SANITIZER = Sanitizer()


def install_sanitizer() -> None:
    load, store = Builder.create_masked_load, Builder.create_masked_store
    set_index, arguments = Builder.set_grid_idx, interpreter.GridExecutor._init_args_hst

    def size(handle: Any) -> int:
        return int(np.dtype(interpreter._get_np_dtype(handle.get_element_ty())).itemsize)

    def checked_load(self: Any, pointers: Any, mask: Any, *rest: Any) -> Any:
        if SANITIZER.on:
            mask = Handle(SANITIZER.touch(pointers.data, mask.data, size(pointers), "load"), mask.dtype)
        return load(self, pointers, mask, *rest)

    def checked_store(self: Any, pointers: Any, value: Any, mask: Any, *rest: Any) -> Any:
        if SANITIZER.on:
            mask = Handle(SANITIZER.touch(pointers.data, mask.data, size(pointers), "store"), mask.dtype)
        return store(self, pointers, value, mask, *rest)

    def indexed(self: Any, x: int, y: int, z: int) -> Any:
        if SANITIZER.on and SANITIZER.reverse:
            nx, ny, nz = self.grid_dim
            x, y, z = nx - 1 - x, ny - 1 - y, nz - 1 - z
        SANITIZER.program = (x << 42) + (y << 21) + z
        return set_index(self, x, y, z)

    def begun(self: Any, args: Any, named: Any) -> Any:
        result = arguments(self, args, named)
        if SANITIZER.on:
            tensors = [t for t in [*result[0], *result[1].values()] if isinstance(t, torch.Tensor)]
            SANITIZER.begin(self.fn.__name__, tensors)
        return result

    Builder.create_masked_load, Builder.create_masked_store = checked_load, checked_store
    Builder.set_grid_idx, interpreter.GridExecutor._init_args_hst = indexed, begun


@contextmanager
def sanitized(reverse: bool = False) -> Iterator[list[str]]:
    """Checks every launch within; raises AssertionError with the faults at the end.  Fresh tensors start as
    NaN."""
    SANITIZER.faults, SANITIZER.on, SANITIZER.reverse = [], True, reverse
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield SANITIZER.faults
    finally:
        SANITIZER.on = False
        torch.use_deterministic_algorithms(False)
    if SANITIZER.faults:
        raise AssertionError("; ".join(SANITIZER.faults[:8]))


def check_repair() -> None:
    """Raises if a future triton changed what the repair builds on."""
    values = torch.tensor([1.0, -2.5, 3.1415926, 1.00390625, 1.01171875, 1e30])
    assert np.array_equal(
        narrow(values.numpy()).view(np.int16), values.bfloat16().view(torch.int16).numpy()
    ), "bf16 rounding"
    builder = interpreter.interpreter_builder
    bf16 = Handle(narrow(np.eye(2, dtype=np.float32) * 3), tl.bfloat16)
    product = builder.create_dot(bf16, bf16, Handle(np.zeros((2, 2), np.float32), tl.float32), None, 0)
    assert np.array_equal(product.data, np.eye(2) * 9), "bf16 dot"
    total = builder.create_fadd(bf16, bf16)
    assert np.array_equal(widen(total.data), np.eye(2) * 6), "bf16 add"
    tie = builder.create_fp_trunc(Handle(np.array([1.01171875], np.float32), tl.float32), tl.bfloat16)
    assert widen(tie.data)[0] == torch.tensor(1.01171875).bfloat16().item(), "bf16 store"
    low = np.float32(1 + 2**-12)
    fused = builder.create_fma(*(Handle(np.array([v], np.float32), tl.float32) for v in (low, low, -1)))
    assert fused.data[0] == np.float32(2**-11 + 2**-24), "fma"


repair()
repair_fma()
speed()
install_sanitizer()
check_repair()
