"""State beside a real GPU: every placement has the bits of state that stays on the device, however late copies are.

pytest -m gpu tests/gpu        (skipped, with the reason, where there is no CUDA device)
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

import colossal_lite as cl
from colossal_lite.config.errors import ConfigError
from colossal_lite.engine.engine import Engine
from colossal_lite.memory.chunk import Chunk
from colossal_lite.memory.copy_streams import StreamExecutor, ended
from colossal_lite.memory.link import Transfer
from colossal_lite.memory.pinned import host_pages, host_room
from colossal_lite.models import GPT, GPTConfig

if not torch.cuda.is_available():
    pytest.skip("no CUDA device is visible", allow_module_level=True)
pytest.importorskip("triton", reason="triton is not installed")
pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda")
MODEL = GPTConfig(vocabulary=512, layers=4, heads=4, width=256, sequence=128)
STEPS = 4
LATE_CYCLES = 3_000_000
"""Some milliseconds: longer than any copy or update here."""


@dataclass(frozen=True)
class Told:
    losses: list[float]
    weights: dict[str, Tensor]
    state: dict[str, dict[str, Tensor]]
    peak_bytes: int
    """Allocated in the steps after the first."""
    tiers: dict[tuple[str, str], int]
    moved_bytes: dict[str, int]


def config_of(memory: dict[str, Any], **more: Any) -> dict[str, Any]:
    return dict(
        precision="bf16", optimizer=dict(type="adamw", lr=1e-2, weight_decay=0.1), clip_grad_norm=0.1, seed=5,
        kernels="triton", activation_checkpoint="full", memory=dict(chunk_bytes=2**18) | memory, timeout_s=120,
    ) | more  # fmt: skip


def batch(number: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(number)
    ids = torch.randint(MODEL.vocabulary, (4, MODEL.sequence + 1), generator=generator)
    return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()


def told(config: dict[str, Any], look: Callable[[Engine], object] = lambda engine: None) -> Told:
    with cl.launch(config) as context:
        engine = cl.initialize(lambda: GPT(MODEL), context=context)
        losses = []
        for number in range(STEPS):
            if number == 1:
                torch.cuda.synchronize()
                torch.cuda.reset_peak_memory_stats()
            losses.append(float(engine.train_step(batch(number)).loss))
        torch.cuda.synchronize()
        peak = torch.cuda.max_memory_allocated()
        assert len(engine._chunks) > 8, "copies of several chunks overlap"
        look(engine)
        moved = {row.link: row.moved_bytes for row in engine.link_report()}
        tiers = {(row.kind, row.tier): row.now_bytes for row in engine.memory_report()}
        found = Told(losses, engine.full_state_dict(), engine.full_optimizer_state(), peak, tiers, moved)
        engine.close()
    del engine
    gc.collect()
    torch.cuda.empty_cache()
    return found


def assert_same(found: Told, expected: Told) -> None:
    assert found.losses == expected.losses
    for name, value in expected.weights.items():
        assert torch.equal(found.weights[name], value), name
    for name, values in expected.state.items():
        for kind, value in values.items():
            assert torch.equal(found.state[name][kind], value), f"{kind} of {name}"


ALL = dict(weights=1.0, gradients=1.0, optimizer=1.0)
HALF = dict(weights=0.5, gradients=0.5, optimizer=0.5)
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "host": (dict(placement="host"), {}),
    "host, stage 1, accumulated": (dict(placement="host"), dict(zero=dict(stage=1), gradient_accumulation=2)),
    "host, split masters": (dict(placement="host"), dict(precision=dict(dtype="bf16", master="split"))),
    "disk": (dict(placement="disk"), {}),
    "half of each": (dict(placement="static", host_fraction=HALF), dict(zero=dict(stage=3))),
    "all of each, accumulated": (
        dict(placement="static", host_fraction=ALL), dict(zero=dict(stage=3), gradient_accumulation=2)
    ),
    "all of each, in rank order": (
        dict(placement="static", host_fraction=ALL), dict(zero=dict(stage=3, sum_order="ordered"), precision="fp32")
    ),
}  # fmt: skip
STREAM_RUN, STREAM_NOW = StreamExecutor.run, StreamExecutor.now


def _late_copies(cycles: int = LATE_CYCLES) -> AbstractContextManager[object]:
    """Every copy begins long after it could."""

    def run(self: StreamExecutor, work: Callable[[], object], *more: Any) -> Any:
        def late() -> None:
            torch.cuda._sleep(cycles)
            work()

        return STREAM_RUN(self, late, *more)

    return patch.object(StreamExecutor, "run", run)


def _late_computing() -> AbstractContextManager[object]:
    """Whatever was computed for a copy is there long after it was asked for."""

    def now(self: StreamExecutor) -> Any:
        torch.cuda._sleep(LATE_CYCLES)
        return STREAM_NOW(self)

    return patch.object(StreamExecutor, "now", now)


DELAYS: dict[str, Callable[[], AbstractContextManager[object]]] = {
    "as it comes": nullcontext,
    "copies late": _late_copies,
    "computing late": _late_computing,
}


@pytest.fixture(scope="module")
def truth() -> Iterator[Callable[[dict[str, Any]], Told]]:
    """The run on the device with these settings, made once."""
    made: dict[str, Told] = {}

    def of(more: dict[str, Any]) -> Told:
        if str(more) not in made:
            made[str(more)] = told(config_of(dict(placement="device"), **more))
        return made[str(more)]

    yield of


def on_disk(memory: dict[str, Any], directory: Path) -> dict[str, Any]:
    return memory | (dict(disk_dir=str(directory)) if memory["placement"] == "disk" else {})


def test_a_run_on_the_device_has_the_same_bits_twice(truth: Callable[[dict[str, Any]], Told]) -> None:
    """Else nothing below could be told apart from a race."""
    assert_same(told(config_of(dict(placement="device"))), truth({}))


@pytest.mark.parametrize("delay", DELAYS)
@pytest.mark.parametrize("name", CASES)
def test_a_placement_has_the_bits_of_state_that_stays_on_the_device(
    name: str, delay: str, truth: Callable[[dict[str, Any]], Told], tmp_path: Path
) -> None:
    memory, more = CASES[name]
    with DELAYS[delay]():
        found = told(config_of(on_disk(memory, tmp_path), **more))
    assert_same(found, truth(more))
    assert found.moved_bytes["h2d"] > 0 and found.moved_bytes["d2h"] > 0
    tier = "disk" if memory["placement"] == "disk" else "host"
    assert found.tiers["optimizer", tier] > 0, found.tiers


def test_a_run_within_a_budget_stays_within_it_and_has_the_bits_of_one_without(
    truth: Callable[[dict[str, Any]], Told],
) -> None:
    more = dict(zero=dict(stage=3))
    free: list[int] = []

    def note(engine: Engine) -> None:
        placement = engine._memory_budget.placement if engine._memory_budget else None
        assert placement is not None and not placement.on_host
        free.extend((placement.device_bytes, sum(piece.bytes for piece in placement.pieces)))

    much = torch.cuda.mem_get_info()[0] // 2
    whole = told(config_of(dict(placement="auto", device_budget=much), **more), note)
    assert_same(whole, truth(more))
    assert whole.peak_bytes <= free[0], "what the plan counts is no less than what there is"
    for share in (0.2, 0.5):
        budget = int(free[0] - share * free[1])
        found = told(config_of(dict(placement="auto", device_budget=budget), **more))
        assert_same(found, whole)
        assert found.peak_bytes <= budget, (found.peak_bytes, budget, found.tiers)
        assert found.peak_bytes < whole.peak_bytes and found.moved_bytes["h2d"] > 0


def test_a_budget_that_nothing_fits_is_refused_with_the_bytes_that_it_needs() -> None:
    with pytest.raises(ConfigError, match="memory.device_budget"):
        told(config_of(dict(placement="auto", device_budget="1MiB"), zero=dict(stage=3)))


def test_state_rests_in_memory_that_is_locked_and_no_larger_than_it_needs() -> None:
    def look(engine: Engine) -> None:
        tiers: Any = engine._optimizer.tiers
        assert all(room.is_pinned() for room in tiers._host.rest.values())
        chunk: Chunk
        for chunk in engine._chunks:
            for room in (chunk.weights_at_rest, chunk.gradient_at_rest):
                assert room is not None and room.is_pinned()

    told(config_of(dict(placement="static", host_fraction=ALL), zero=dict(stage=3)), look)
    room, several = host_room(5_000_003, torch.float32, CUDA), host_pages(9_000_001, CUDA)
    assert room.is_pinned() and several.is_pinned()
    assert room.untyped_storage().nbytes() <= 20_000_012 + 2 * 4096


def test_the_host_goes_on_while_the_device_waits_for_a_copy_and_the_wait_is_counted() -> None:
    from colossal_lite.memory.link import Link

    link = Link("h2d", StreamExecutor(CUDA), timeout_s=60)
    source, target = host_room(2**22, torch.float32, CUDA).fill_(3.0), torch.zeros(2**22, device=CUDA)
    torch.cuda._sleep(1)  # these kernels are loaded now: loading one waits for all that runs
    target.sum()
    torch.cuda.synchronize()
    with _late_copies(100 * LATE_CYCLES):
        transfer = link.copy(target, source)
    transfer.wait()
    total = target.sum()
    behind = torch.cuda.current_stream().record_event()
    assert not behind.query(), "the host has not waited"
    assert float(total) == 3.0 * 2**22
    ended(behind, 60)
    assert link.waited_s > 1e-4 and link.moved_bytes == 2**24
    link.close()


def test_a_closed_engine_leaves_weights_that_rest_on_the_host_there_and_the_device_empty(
    truth: Callable[[dict[str, Any]], Told],
) -> None:
    config = config_of(dict(placement="static", host_fraction=ALL), zero=dict(stage=3))
    with cl.launch(config) as context:
        engine = cl.initialize(lambda: GPT(MODEL), context=context)
        for number in range(STEPS):
            engine.train_step(batch(number))
        expected = truth(dict(zero=dict(stage=3))).weights
        model, before = engine.model, torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        engine.close()
        weights = sum(parameter.nbytes for parameter in model.parameters())
        assert torch.cuda.max_memory_allocated() - before < weights / 4, "a few chunks at once"
    for name, parameter in model.named_parameters():
        assert parameter.device.type == "cpu" and torch.equal(
            parameter.detach(), expected[name].to(parameter.dtype)
        ), name


def test_a_wait_that_is_forgotten_changes_the_bits(truth: Callable[[dict[str, Any]], Told]) -> None:
    """So late copies are a test of waits."""
    with _late_copies(), patch.object(Transfer, "wait", lambda self: self.handed()):
        found = told(config_of(dict(placement="host")))
    with pytest.raises(AssertionError):
        assert_same(found, truth({}))


def test_a_checkpoint_from_the_host_loads_on_the_device(tmp_path: Path) -> None:
    def saved(engine: Engine) -> None:
        engine.save(tmp_path)

    expected = told(config_of(dict(placement="host")), saved)
    with cl.launch(config_of(dict(placement="device"))) as context:
        engine = cl.initialize(lambda: GPT(MODEL), context=context)
        engine.load(tmp_path)
        weights, state = engine.full_state_dict(), engine.full_optimizer_state()
        engine.close()
    assert_same(Told(expected.losses, weights, state, 0, {}, {}), expected)
