"""Puts a CUDA device in place that is not there, and counts launches, waits and copies.

Note: for a process of its own, which has loaded cuda_guard.cpp as a library before it imports torch.
What lies on the host is real.  What lies on `cuda` is a fake tensor: shapes, dtypes and devices are checked by torch
itself, autograd runs in its threads, and nothing is computed.  A number that is read from there is one, or True.
Attention in 16 bits is flash attention, as on a GPU.  fake_rank.py trains on it.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
import traceback
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

ROOT = Path(__file__).parents[2]
WAITS = ("_local_scalar_dense", "equal", "is_nonzero", "nonzero", "masked_select", "unique")
NO_KERNEL = (
    *(
        "view",
        "as_strided",
        "t.",
        "transpose",
        "unsqueeze",
        "squeeze",
        "slice",
        "select",
        "expand",
        "permute",
    ),
    *("detach", "alias", "split", "unbind", "chunk", "_unsafe_view", "reshape", "unfold", "narrow", "lift"),
    *("empty", "new_empty", "sym_", "size", "stride", "is_", "set_", "resize", "prim", "device"),
)


@dataclass
class Counts:
    """What a step asked of the device; keys of `waits` and `pageable` say where."""

    kernels: Counter[str] = field(default_factory=Counter)
    triton: Counter[str] = field(default_factory=Counter)
    waits: Counter[str] = field(default_factory=Counter)
    pageable: Counter[str] = field(default_factory=Counter)
    copies: Counter[str] = field(default_factory=Counter)


def here() -> str:
    ours = str(Path(__file__).parent)
    rows = [f for f in traceback.extract_stack() if str(ROOT) in f.filename and ours not in f.filename]
    return " < ".join(f"{Path(f.filename).name}:{f.lineno}" for f in reversed(rows[-3:]))


class FakeDevice(TorchDispatchMode):
    """Sends what touches `cuda` to fake tensors, and counts it."""

    def __init__(self) -> None:
        super().__init__()
        self.fake = FakeTensorMode(allow_non_fake_inputs=True)
        self._lock = threading.RLock()
        self.counts = Counts()
        self.pinned: set[int] = set()
        self.locked: list[tuple[int, int]] = []
        self.messages: list[tuple[tuple[int, ...], list[tuple[str, int]]]] = []
        """Of this rank: the ranks of a group, and what NCCL gets there at once."""

    def is_pinned(self, x: Tensor) -> bool:
        if isinstance(x, FakeTensor):
            return False
        locked = any(start <= x.data_ptr() < stop for start, stop in self.locked)
        return locked or x.untyped_storage()._cdata in self.pinned

    def cudaHostRegister(self, start: int, size: int, flags: int) -> int:  # noqa: N802
        self.locked.append((start, start + size))
        return 0

    def cudaHostUnregister(self, start: int) -> int:  # noqa: N802
        self.locked = [span for span in self.locked if span[0] != start]
        return 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        device = kwargs.get("device")
        to_cuda = device is not None and torch.device(device).type == "cuda"
        if not to_cuda and not any(isinstance(x, FakeTensor) for x in tensors):
            return func(*args, **kwargs)
        name = str(func.__name__)
        if name.startswith(WAITS) and any(x.is_cuda for x in tensors):
            self.counts.waits[f"{name} at {here()}"] += 1
            if name.startswith(WAITS[:3]):
                return one(tensors[0].dtype) if name.startswith(WAITS[0]) else not name.startswith(WAITS[1])
        if name.startswith("_to_copy") and tensors[0].is_cuda != to_cuda and device is not None:
            self.copied(tensors[0], to_cuda, kwargs.get("non_blocking", False))
        if name.startswith("copy_") and args[0].is_cuda != args[1].is_cuda:
            host = args[1] if args[0].is_cuda else args[0]
            self.copied(
                host, args[0].is_cuda, args[2] if len(args) > 2 else kwargs.get("non_blocking", False)
            )
            if not args[0].is_cuda:
                return args[0]  # nothing comes from a device that is not there
        with self._lock:  # links and backward have threads of their own
            fakes = tree_map(lambda x: self.faked(x), (args, kwargs))
            with self.fake:
                out = func(*fakes[0], **fakes[1])
        if any(isinstance(x, Tensor) and x.is_cuda for x in (*tensors, *tree_leaves(out))):
            between = name.startswith(("_to_copy", "copy_")) and any(not x.is_cuda for x in tensors)
            if not name.startswith(NO_KERNEL) and not between and (to_cuda or device is None):
                self.counts.kernels[name] += 1
        if isinstance(out, Tensor) and not out.is_cuda and name.startswith("_to_copy"):
            return torch.ones(out.shape, dtype=out.dtype)
        if name.endswith("_.default") and isinstance(args[0], Tensor) and not isinstance(args[0], FakeTensor):
            return args[0]
        return out

    def faked(self, x: Any) -> Any:
        return self.fake.from_tensor(x) if isinstance(x, Tensor) and not isinstance(x, FakeTensor) else x

    def copied(self, host: Tensor, up: bool, non_blocking: bool) -> None:
        kind = "up" if up else "down"
        self.counts.copies[kind] += 1
        if not (non_blocking and (self.is_pinned(host) or not up)):
            self.counts.waits[f"a copy {kind} at {here()}"] += 1
        if up and not self.is_pinned(host):
            self.counts.pageable[here()] += 1


class InThread(TorchDispatchMode):
    """A thread has modes of its own: this one hands all on to the device."""

    def __init__(self, device: FakeDevice) -> None:
        super().__init__()
        self.device = device

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.device.__torch_dispatch__(func, types, args, kwargs)


def one(dtype: torch.dtype) -> Any:
    return True if dtype == torch.bool else 1.0 if dtype.is_floating_point else 1


class Event:
    """Of this device, whose clock goes a millisecond on with each event."""

    ticks = itertools.count(1)

    def __init__(self, *_: Any, enable_timing: bool = False, **__: Any) -> None:
        self.is_timed, self.at_ms = enable_timing, 0

    def query(self) -> bool:
        return True

    def synchronize(self) -> None: ...

    def elapsed_time(self, end_event: Any) -> float:
        assert self.is_timed and end_event.is_timed, "events without a time"
        assert 0 < self.at_ms <= end_event.at_ms, "events that were not recorded"
        return float(end_event.at_ms - self.at_ms)


class Stream:
    def __init__(self, *_: Any, **__: Any) -> None: ...
    def record_event(self, event: Any = None) -> Any:
        event = event or Event()
        event.at_ms = next(Event.ticks)
        return event

    def wait_event(self, event: Any) -> None: ...
    def wait_stream(self, other: Any) -> None: ...


class Properties:
    multi_processor_count, total_memory, name = 132, 80 << 30, "a device that is not there"
    major, minor, shared_memory_per_block_optin, L2_cache_size = 9, 0, 227 << 10, 50 << 20


@contextlib.contextmanager
def cuda() -> Iterator[FakeDevice]:
    """Within, torch has CUDA devices."""
    device = FakeDevice()
    zero: dict[str, Any] = {
        n: lambda *_: 0 for n in ("memory_allocated", "max_memory_allocated", "memory_reserved")
    }
    module: dict[str, Any] = zero | dict(
        is_available=lambda: True, is_initialized=lambda: True, _lazy_init=lambda: None, device_count=lambda: 8,
        set_device=lambda _: None, current_device=lambda: 0, Stream=Stream, Event=Event, cudart=lambda: device,
        current_stream=lambda *_: Stream(), stream=lambda _: contextlib.nullcontext(), empty_cache=lambda: None,
        device=lambda _: contextlib.nullcontext(), get_device_capability=lambda *_: (9, 0),
        get_device_properties=lambda *_: Properties, get_device_name=lambda *_: Properties.name,
        mem_get_info=lambda *_: (70 << 30, 80 << 30), reset_peak_memory_stats=lambda *_: None,
        memory_stats=lambda *_: Counter(), is_current_stream_capturing=lambda: False,
        is_bf16_supported=lambda *_: True, set_rng_state=lambda *_: None,
        get_rng_state=lambda *_: torch.zeros(16, dtype=torch.uint8),
        synchronize=lambda *_: device.counts.waits.update([f"synchronize at {here()}"]),
    )  # fmt: skip

    def pin(x: Tensor, *_: Any) -> Tensor:
        found = x.clone()
        device.pinned.add(found.untyped_storage()._cdata)
        held.append(found)  # so that no other storage has its address
        return found

    def listed(x: Tensor) -> Any:
        if not isinstance(x, FakeTensor):
            return tolist(x)
        if x.is_cuda:
            device.counts.waits[f"tolist at {here()}"] += 1
        return rows(tuple(x.shape), x.dtype)

    def rows(shape: tuple[int, ...], dtype: torch.dtype) -> Any:
        return [rows(shape[1:], dtype) for _ in range(shape[0])] if shape else one(dtype)

    def made(data: Any, *given: Any, device: Any = None, **more: Any) -> Tensor:
        on_cuda = device is not None and torch.device(device).type == "cuda"
        found = plain(data, *given, **more) if on_cuda else plain(data, *given, device=device, **more)
        return found.to(device) if on_cuda else found

    def attend(
        q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
        is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False,
    ) -> Tensor:  # fmt: skip
        if not q.is_cuda or q.dtype.itemsize > 2 or attn_mask is not None:
            return attention(q, k, v, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
        out: Tensor = torch.ops.aten._scaled_dot_product_flash_attention(
            q, k, v, dropout_p, is_causal, scale=scale
        )[0]
        return out

    def run(thread: threading.Thread) -> None:
        with InThread(device):
            begin(thread)

    begin, attention = threading.Thread.run, F.scaled_dot_product_attention
    tolist, plain, held = Tensor.tolist, torch.tensor, list[Tensor]()
    place, whole = Tensor.data_ptr, torch.UntypedStorage.data_ptr
    with ExitStack() as stack:
        for name, value in module.items():
            stack.enter_context(patch.object(torch.cuda, name, value))
        for owner, name, value in (
            (torch.backends.cuda, "is_flash_attention_available", lambda: True),
            (Tensor, "pin_memory", pin), (Tensor, "is_pinned", lambda x, *_: device.is_pinned(x)),
            (F, "scaled_dot_product_attention", attend), (threading.Thread, "run", run),
            (Tensor, "tolist", listed), (FakeTensor, "tolist", listed), (torch, "tensor", made),
            (Tensor, "data_ptr", lambda x: place(x) if not isinstance(x, FakeTensor)
             else x.untyped_storage()._cdata * 64 + x.storage_offset() * x.element_size()),
            (torch.UntypedStorage, "data_ptr", lambda s: whole(s) if s.device.type == "cpu" else s._cdata * 64),
        ):  # fmt: skip
            stack.enter_context(patch.object(owner, name, value))
        stack.enter_context(device)
        yield device
