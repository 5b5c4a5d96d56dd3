"""Runs one rank's step on a CUDA device that is not there, and counts launches, waits and copies.

Note: for a process of its own, which has loaded cuda_guard.cpp as a library before it imports torch.
What lies on the host is real.  What lies on `cuda` is a fake tensor: shapes, dtypes and devices are checked by torch
itself, autograd runs in its threads, and nothing is computed.  A number that is read from there is one, or True.  The
ranks of a world are of torch's fake process group: every collective returns at once.  Printed is a JSON row a case.
"""

from __future__ import annotations

import contextlib
import json
import sys
import traceback
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

P2P = ("op", "tensor", "peer", "group")
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
    *(
        "empty",
        "new_empty",
        "sym_",
        "size",
        "stride",
        "is_",
        "set_",
        "resize",
        "prim",
        "device",
        "_to_copy",
        "copy_",
    ),
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
    rows = [f for f in traceback.extract_stack() if str(ROOT) in f.filename and f.filename != __file__]
    return " < ".join(f"{Path(f.filename).name}:{f.lineno}" for f in reversed(rows[-3:]))


class FakeDevice(TorchDispatchMode):
    """Sends what touches `cuda` to fake tensors, and counts it."""

    def __init__(self) -> None:
        super().__init__()
        self.fake = FakeTensorMode(allow_non_fake_inputs=True)
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
        fakes = tree_map(lambda x: self.faked(x), (args, kwargs))
        with self.fake:
            out = func(*fakes[0], **fakes[1])
        if any(isinstance(x, Tensor) and x.is_cuda for x in (*tensors, *tree_leaves(out))):
            if not name.startswith(NO_KERNEL):
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


def one(dtype: torch.dtype) -> Any:
    return True if dtype == torch.bool else 1.0 if dtype.is_floating_point else 1


class Event:
    def __init__(self, *_: Any, **__: Any) -> None: ...
    def query(self) -> bool:
        return True

    def elapsed_time(self, end_event: Any) -> float:
        return 1.0


class Stream:
    def __init__(self, *_: Any, **__: Any) -> None: ...
    def record_event(self, event: Any = None) -> Any:
        return event or Event()

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

    tolist, plain, held = Tensor.tolist, torch.tensor, list[Tensor]()
    place, whole = Tensor.data_ptr, torch.UntypedStorage.data_ptr
    with ExitStack() as stack:
        for name, value in module.items():
            stack.enter_context(patch.object(torch.cuda, name, value))
        for owner, name, value in (
            (Tensor, "pin_memory", pin), (Tensor, "is_pinned", lambda x, *_: device.is_pinned(x)),
            (Tensor, "tolist", listed), (FakeTensor, "tolist", listed), (torch, "tensor", made),
            (Tensor, "data_ptr", lambda x: place(x) if not isinstance(x, FakeTensor)
             else x.untyped_storage()._cdata * 64 + x.storage_offset() * x.element_size()),
            (torch.UntypedStorage, "data_ptr", lambda s: whole(s) if s.device.type == "cpu" else s._cdata * 64),
        ):  # fmt: skip
            stack.enter_context(patch.object(owner, name, value))
        stack.enter_context(device)
        yield device


# --------------------------------------------------------------------------------------------------------- one rank


def on_a_rank(device: FakeDevice, case: dict[str, Any]) -> dict[str, Any]:
    """Three steps of one rank, of which the last is counted, and an evaluation. Updates of one run in the next."""
    import colossal_lite as cl
    from colossal_lite.config.config import Config
    from colossal_lite.distributed.communicator import Communicator
    from colossal_lite.distributed.key_value_store import LimitedStore
    from colossal_lite.distributed.mesh import Mesh
    from colossal_lite.engine.context import Context, FailureBoard
    from colossal_lite.engine.rank_comparison import RankComparison
    from colossal_lite.engine.stopping import StopSignals
    from colossal_lite.kernels import philox
    from colossal_lite.zero import forward_hooks, sharded_weights

    config = Config.load(case["config"]).check_world(case["ranks"])
    store = LimitedStore(dist.HashStore(), 10.0)
    model = cl.models.GPTConfig(**case["model"])
    samples, tokens = case["samples"], model.sequence
    with ExitStack() as stack:
        for owner, name, value in (
            (Communicator, "gather_json", lambda comm, value: [value] * comm.size),
            (Mesh, "check_together", lambda *_: None), (RankComparison, "check", lambda *_: None),
            (sharded_weights, "_disable_current_modes", contextlib.nullcontext),
            (forward_hooks, "_disable_current_modes", contextlib.nullcontext),
        ):  # fmt: skip
            stack.enter_context(patch.object(owner, name, value))
        stack.enter_context(no_triton(device))
        stack.enter_context(messages(device))
        stack.enter_context(FAULTS[case.get("fault", "none")]())
        if case["ranks"] > 1:
            dist.init_process_group("fake", store=FakeStore(), rank=case["rank"], world_size=case["ranks"])
            stack.callback(dist.destroy_process_group)
        mesh = Mesh.create(config.layout(), case["rank"], timeout_s=10.0, backend="fake")
        board = FailureBoard(store, case["rank"])
        place = torch.device("cuda", 0)
        with Context(
            config, mesh, place, 0, store, "fake", board, StopSignals(), ExitStack(), lambda *_: None
        ) as context:
            with patch.object(philox, "_contiguous_words", wraps=philox._contiguous_words) as on_host:
                engine = cl.initialize(lambda: cl.models.GPT(model), context=context)
            drawn = [on_host.call_count, device.counts.triton["_draw_kernel"]]
            rows = [(torch.arange(tokens), torch.arange(1, tokens + 1)) for _ in range(samples * 3)]
            batches = iter(context.dataloader(rows, global_batch=samples))
            for _ in range(3):
                device.counts = Counts()
                batch = next(batches)
                engine.train_step(batch)
            counts, device.counts = device.counts, Counts()
            engine.eval_step(batch)
            evaluated = device.counts
            engine.close()
    return dict(
        kernels=sum(counts.kernels.values()), triton=sum(counts.triton.values()), waits=counts.waits,
        pageable=counts.pageable, evaluated=evaluated.waits, messages=device.messages, drawn=drawn,
    )  # fmt: skip


class Work:
    def wait(self) -> None: ...


@contextlib.contextmanager
def messages(device: FakeDevice) -> Iterator[None]:
    """Collectives end at once. Messages between two ranks are noted as NCCL gets them, a batch as one."""
    from colossal_lite.distributed import communicator

    def alone(kind: str) -> Any:
        def post(tensor: Tensor, *given: Any, **named: Any) -> Work:
            if tensor.is_cuda:
                group = tuple(dist.get_process_group_ranks(named["group"]))
                device.messages.append((group, [(kind, named.get("dst", named.get("src")))]))
            return Work()

        return post

    def batch(operations: Any) -> list[Work]:
        group = tuple(dist.get_process_group_ranks(operations[0].group))
        at_once = [("send" if op.op is send else "receive", op.peer) for op in operations]
        device.messages.append((group, at_once))
        return [Work() for _ in operations]

    def ends_at_once(*_: Any, **__: Any) -> Work:
        return Work()

    send, receive = alone("send"), alone("receive")
    with ExitStack() as stack:
        for owner, name, value in (
            (dist, "isend", send), (dist, "irecv", receive), (dist, "batch_isend_irecv", batch),
            (dist, "P2POp", lambda *given: SimpleNamespace(**dict(zip(P2P, given, strict=True)))),
            *((dist, n, ends_at_once) for n in ("all_reduce", "broadcast", "reduce", "all_to_all_single")),
            *((communicator, n, ends_at_once) for n in ("_native_all_gather", "_native_reduce_scatter")),
        ):  # fmt: skip
            stack.enter_context(patch.object(owner, name, value))
        yield


@contextlib.contextmanager
def no_triton(device: FakeDevice) -> Iterator[None]:
    """Launches of Triton kernels are counted, and their tensors must be on the device."""

    def launched(kernel: Any, grid: Any, *args: Any, **_: Any) -> None:
        name = kernel.fn.__name__
        on_host = [x for x in args if isinstance(x, Tensor) and not x.is_cuda]
        assert not on_host, f"{name} gets a tensor of the host at {here()}"
        device.counts.triton[name] += 0 not in grid

    with ExitStack() as stack:
        for name, module in list(sys.modules.items()):
            if name.startswith("colossal_lite.kernels.") and callable(getattr(module, "launch", None)):
                stack.enter_context(patch.object(module, "launch", launched))
        yield


def unbatched(
    self: Any, outgoing: Any, incoming: Any, tag: str, *, of_all: bool = False
) -> tuple[list[Any], Any]:
    """An exchange as gloo would take it: each send, then each receive."""
    works = [dist.isend(x, dst=self._ranks[to], group=self._group) for to, x in outgoing.items()]
    works += [dist.irecv(x, src=self._ranks[source], group=self._group) for source, x in incoming.items()]
    return works, lambda: None


def host_tensor() -> Any:
    """A forward that adds a tensor of the host."""
    from colossal_lite.models.gpt import Block

    plain = Block.feed
    return patch.object(Block, "feed", lambda self, x: plain(self, x) + torch.ones(x.shape[-1]))


def read_number() -> Any:
    """A step that reads its loss before backward."""
    from colossal_lite.engine.step_totals import LocalSums

    plain = LocalSums.add
    return patch.object(
        LocalSums, "add", lambda self, loss, weight: plain(self, loss * (loss.item() == 1), weight)
    )


def pageable_batch() -> Any:
    """A batch that is copied as it lies on the host."""
    return patch.object(Tensor, "pin_memory", lambda x: x)


def exchange_in_turn() -> Any:
    from colossal_lite.distributed.communicator import TorchTransport

    return patch.object(TorchTransport, "exchange", unbatched)


FAULTS: dict[str, Any] = {
    "none": ExitStack, "host tensor": host_tensor, "read number": read_number, "pageable batch": pageable_batch,
    "exchange in turn": exchange_in_turn,
}  # fmt: skip


def stuck(logs: dict[int, list[Any]]) -> dict[int, Any]:
    """What each rank's queue waits for at the end, by rank; empty if all was matched.

    `logs`: of each rank of one group, what it posts there, as `FakeDevice.messages`.  NCCL has one queue for each
    group: a send and its receive meet when both are in the first batch of their queues.
    """
    queues = {rank: [[tuple(one) for one in at_once] for _, at_once in log] for rank, log in logs.items()}
    while True:
        heads = {rank: queue[0] for rank, queue in queues.items() if queue}
        meeting = [
            (source, to)
            for source, head in heads.items()
            for kind, to in head
            if kind == "send" and ("receive", source) in heads.get(to, [])
        ]
        if not meeting:
            return heads
        source, to = meeting[0]
        heads[source].remove(("send", to))
        heads[to].remove(("receive", source))
        queues = {rank: queue if not queue or queue[0] else queue[1:] for rank, queue in queues.items()}


def main(cases: str) -> None:
    """Print a row for each case of a JSON file."""
    import colossal_lite.engine.initialize  # noqa: F401  (before torch is patched)

    for name, case in json.loads(Path(cases).read_text()).items():
        with cuda() as device:
            try:
                row = on_a_rank(device, case)
            except Exception as error:
                traceback.print_exc()
                row = dict(error=f"{type(error).__name__}: {error}")
        print("ROW " + json.dumps({"name": name} | row), flush=True)
