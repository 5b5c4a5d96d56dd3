"""Trains, evaluates, saves and loads on one rank of a world whose CUDA devices are not there (fake_cuda.py).

    python -m tests.shared.fake_rank          (prints launches, waits and pageable copies of a step, by model)

Note: for a process of its own, which has loaded cuda_guard.cpp as a library before it imports torch (`rows_of`).
The ranks of a world are of torch's fake process group: every collective returns at once.  Messages between two ranks
are noted as NCCL gets them, and `stuck` matches those of all ranks as its queues would.  A checkpoint is copied to the
host and back, and nothing is written.  What a stage sends is of the form of the last that one of this case's ranks
sent, so a case of a pipeline has a rank for each.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from tests.shared.fake_cuda import ROOT, Counts, FakeDevice, cuda, here

P2P = ("op", "tensor", "peer", "group")
Case = dict[str, Any]
SIZE: dict[str, Any] = dict(vocabulary=512, layers=1, heads=8, width=256, sequence=64)
LLAMA = dict(position="rotary", norm="rms", activation="swiglu", kv_heads=4, tied=False, bias=False)


def case(
    ranks: int = 1,
    rank: int = 0,
    model: Case | None = None,
    fault: str = "none",
    samples: int = 4,
    **config: Any,
) -> Case:
    """A case: by default a small GPT in bf16. `model` may have `kind`, one of tests/shared/hugging_face.py's."""
    base = dict(precision="bf16", clip_grad_norm=1.0, optimizer=dict(type="adamw"))
    return dict(
        ranks=ranks, rank=rank, samples=samples, model=SIZE | (model or {}), fault=fault, config=base | config
    )


# ---- processes ----

RUN = (
    "import ctypes, sys; ctypes.CDLL(sys.argv[1]); from tests.shared.fake_rank import main; main(sys.argv[2])"
)


def made_guard(folder: Path) -> Path:
    """The device guard as a library. Raises RuntimeError, with the reason, where it cannot be."""
    compiler = shutil.which("c++") or shutil.which("g++")
    if compiler is None:
        raise RuntimeError("no C++ compiler, which the device that is not there needs")
    if torch.version.cuda is not None:
        raise RuntimeError("this torch has a CUDA device of its own")
    made, place = folder / "guard.so", Path(torch.__file__).parent
    include, library = f"-I{place}/include", f"{place}/lib"
    subprocess.run(
        [compiler, "-shared", "-fPIC", "-O0", "-std=c++20", str(ROOT / "tests" / "shared" / "cuda_guard.cpp"),
         "-o", str(made), include, f"-L{library}", f"-Wl,-rpath,{library}", "-lc10", "-ltorch_cpu"], check=True
    )  # fmt: skip
    return made


def rows_of(guard: Path, cases: dict[str, Case], timeout_s: float = 500.0) -> dict[str, Any]:
    """What `on_a_rank` gives for each case, by its name; `error` in place of it where it raised one."""
    file = guard.with_name("cases.json")
    file.write_text(json.dumps(cases))
    done = subprocess.run(
        [sys.executable, "-c", RUN, str(guard), str(file)],
        cwd=ROOT, capture_output=True, text=True, timeout=timeout_s,
    )  # fmt: skip
    told = [json.loads(line[4:]) for line in done.stdout.splitlines() if line.startswith("ROW ")]
    assert len(told) == len(cases), done.stdout + done.stderr
    return {row.pop("name"): row for row in told}


def main(cases: str) -> None:
    """Print a row for each case of a JSON file."""
    import colossal_lite.engine.initialize  # noqa: F401  (before torch is patched)

    forms: dict[str, dict[str, Any]] = {}  # by what stands before the rank
    for name, case in json.loads(Path(cases).read_text()).items():
        with cuda() as device:
            try:
                row = on_a_rank(device, case, forms.setdefault(name.rpartition("/")[0], {}))
            except Exception as error:
                traceback.print_exc()
                row = dict(error=f"{type(error).__name__}: {error}")
        print("ROW " + json.dumps({"name": name} | row), flush=True)


# ---- one rank ----


def on_a_rank(device: FakeDevice, case: Case, forms: dict[str, Any]) -> dict[str, Any]:
    """Three steps of one rank, of which the last is counted, an evaluation, a save and a load."""
    import colossal_lite as cl
    from colossal_lite.config.config import Config
    from colossal_lite.distributed.key_value_store import LimitedStore
    from colossal_lite.distributed.mesh import Mesh
    from colossal_lite.engine.context import Context, FailureBoard
    from colossal_lite.engine.stopping import StopSignals
    from colossal_lite.kernels import philox

    config = Config.load(case["config"]).check_world(case["ranks"])
    store = LimitedStore(dist.HashStore(), 10.0)
    samples, tokens = case["samples"], case["model"]["sequence"]
    with ExitStack() as stack:
        for instead in (alone(), no_triton(device), messages(device), agreed_forms(forms)):
            stack.enter_context(instead)
        saved = stack.enter_context(no_files())
        stack.enter_context(FAULTS[case.get("fault", "none")]())
        if case["ranks"] > 1:
            dist.init_process_group("fake", store=FakeStore(), rank=case["rank"], world_size=case["ranks"])
            stack.callback(dist.destroy_process_group)
        with patch.object(dist, "new_group", wraps=dist.new_group) as made:
            mesh = Mesh.create(config.layout(), case["rank"], timeout_s=10.0, backend="fake")
        groups = [sorted(call.args[0]) for call in made.call_args_list]
        board, signals = FailureBoard(store, case["rank"]), StopSignals()
        place = torch.device("cuda", 0)
        with Context(
            config, mesh, place, 0, store, "fake", board, signals, ExitStack(), lambda *_: None
        ) as context:
            with patch.object(philox, "_contiguous_words", wraps=philox._contiguous_words) as on_host:
                engine = cl.initialize(model_of(case["model"]), context=context)
            drawn = [on_host.call_count, device.counts.triton["_draw_kernel"]]
            rows = [(torch.arange(tokens), torch.arange(1, tokens + 1)) for _ in range(samples * 3)]
            batches = iter(context.dataloader(rows, global_batch=samples))
            for _ in range(3):
                device.counts = Counts()
                batch = next(batches)
                engine.train_step(batch)
            counts = device.counts
            for _ in range(2):  # stages agree on what they send in the first
                device.counts = Counts()
                engine.eval_step(batch)
            evaluated, device.counts = device.counts, Counts()
            spans = engine.timeline().spans
            timed = [[(span.end_s - span.start_s) * 1e3 for span in spans], engine.ledger.waited_s * 1e3]
            engine.save("nowhere")
            engine.load("nowhere")
            engine.close()
    return dict(
        kernels=counts.kernels, triton=counts.triton, waits=counts.waits, pageable=counts.pageable,
        evaluated=evaluated.waits, messages=device.messages, drawn=drawn, saved=saved, timed=timed,
        groups=groups,
    )  # fmt: skip


def model_of(sizes: Case) -> Callable[[], nn.Module]:
    import colossal_lite as cl

    if "kind" in sizes:
        from tests.shared.hugging_face import sized

        return lambda: sized(**{"tied": False} | sizes)
    return lambda: cl.models.GPT(cl.models.GPTConfig(**sizes))


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """What other ranks would say is what this one says, and values that are no fakes are left alone."""
    from colossal_lite.checks.rank_comparison import RankComparison
    from colossal_lite.distributed.communicator import Communicator
    from colossal_lite.distributed.mesh import Mesh

    all_gather = Communicator.all_gather

    def gathered(comm: Communicator, shard: Tensor, out: Tensor | None = None, *, dim: int = 0) -> Tensor:
        """The fake process group leaves the parts of others undefined, and numbers on the host are read. Emulated
        ranks have no such group."""
        if isinstance(shard, FakeTensor) or out is not None or comm._torch is None:
            return all_gather(comm, shard, out, dim=dim)
        return torch.cat([shard] * comm.size, dim)

    from tests.shared.modes import unwatched

    with ExitStack() as stack:
        for owner, name, value in (
            (Communicator, "gather_json", lambda comm, value: [value] * comm.size),
            (Communicator, "all_gather", gathered),
            (Mesh, "check_together", lambda *_: None), (RankComparison, "check", lambda *_: None),
            *((sys.modules[name], word, unwatched) for name, word in _leaving_modes()),
        ):  # fmt: skip
            stack.enter_context(patch.object(owner, name, value))
        yield


def _leaving_modes() -> list[tuple[str, str]]:
    """(module, name) of what leaves the modes of a forward."""
    return [
        (name, word)
        for name, file in sys.modules.items()
        for word in ("without_modes", "_disable_current_modes")
        if name.startswith("colossal_lite.") and hasattr(file, word)
    ]


@contextlib.contextmanager
def no_files() -> Iterator[dict[str, int]]:
    """A save copies what this rank holds to the host, a load copies it back, and nothing is written. Given are the
    tensors of each."""
    from colossal_lite.checkpoint.checkpointer import Checkpointer
    from colossal_lite.checkpoint.run_state import Loaded
    from colossal_lite.memory.transfers import to_host

    found: dict[str, int] = {}
    facts: list[Any] = []

    def save(self: Any, directory: Path, held: Any, given: Any, *, asynchronous: bool) -> Any:
        facts.append(given)
        found["saved"] = sum(to_host(one.elements()).numel() >= 0 for one in held)
        return SimpleNamespace(wait=lambda: directory)

    def load(self: Any, directory: Path, held: Any, *_: Any, **__: Any) -> Loaded:
        for one in held:
            there = one.elements(write=True)
            there.copy_(torch.zeros(there.shape, dtype=there.dtype))
        found["loaded"] = len(held)
        return Loaded(directory, facts[-1], (), ())

    with patch.object(Checkpointer, "save", save), patch.object(Checkpointer, "load", load):
        yield found


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
def agreed_forms(forms: dict[str, Any]) -> Iterator[None]:
    """A header is of the form that a rank of this case sent last in that direction, as nothing else comes from one."""
    from colossal_lite.pipeline.runtime import HEADER_BYTES, MessageMeta, _Step

    send = _Step._send

    def sending(self: Any, action: Any) -> None:
        form, _ = self.leaving[action.kind, (action.stage, action.micro_batch)]
        if torch.is_grad_enabled():
            forms["RECV" + action.kind.name[len("SEND") :]] = form
        send(self, action)

    def form_of(self: Any, action: Any, source: int, about: str) -> Any:
        stage, micro_batch = action.stage, action.micro_batch
        key = self.shapes[micro_batch], action.kind, stage
        if self.agrees:
            header = torch.empty(HEADER_BYTES, dtype=torch.uint8, device=self.runtime.device)
            self.runtime.comm.receive_async(header, source, f"header of {about}").wait()
            sent = forms["RECV_F"]
            if action.kind.name == "RECV_B":
                takes = tuple(row for row in sent.tensors if row[2])
                sent = forms.get("RECV_B") or MessageMeta(None if len(takes) == 1 else len(takes), takes)
            self.runtime._forms[key] = sent
        return self.runtime._forms[key]

    with patch.object(_Step, "_send", sending), patch.object(_Step, "_form", form_of):
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


# ---- planted faults ----


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

    plain = Block.forward
    return patch.object(
        Block, "forward", lambda self, x, *more: plain(self, x, *more) + torch.ones(x.shape[-1])
    )


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


# ---- queues ----


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


def table() -> str:
    """Launches, waits and pageable copies of a step; of a layer the difference between models of 3 and of 2 layers."""
    wide = dict(width=2048, heads=16, kv_heads=16, vocabulary=32000, sequence=4096)
    models = {
        "GPT, 256 wide": {},
        "Llama, 256 wide": LLAMA,
        "Llama, 2048 wide": LLAMA | wide | dict(ffn=5504),
    }
    cases = {
        f"{name}/{n}": case(model=model | dict(layers=n)) for name, model in models.items() for n in (2, 3)
    }
    with tempfile.TemporaryDirectory() as folder:
        rows = rows_of(made_guard(Path(folder)), cases)
    layout = "{:18} {:>9} {:>9} {:>7} {:>9}"
    lines = [layout.format("model", "a layer", "the rest", "waits", "pageable")]
    for name in models:
        two, three = (
            {key: sum(rows[f"{name}/{layers}"][key].values()) for key in COUNTED} for layers in (2, 3)
        )
        launches = [each["kernels"] + each["triton"] for each in (two, three)]
        layer = launches[1] - launches[0]
        lines.append(layout.format(name, layer, launches[0] - 2 * layer, two["waits"], two["pageable"]))
    return "\n".join(lines)


COUNTED = ("kernels", "triton", "waits", "pageable")

if __name__ == "__main__":
    print(table())
