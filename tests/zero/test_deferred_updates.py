"""Checks that updates during the next forward give the bits of immediate updates, whatever reads come between."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from contextlib import nullcontext, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn

import colossal_lite as cl
from colossal_lite.engine.engine import Engine
from colossal_lite.memory.chunk import Chunk
from colossal_lite.models.gpt import GPT, GPTConfig
from colossal_lite.numerics.random import on_meta
from colossal_lite.offload import host_updates
from colossal_lite.planner import dry_run, planner
from colossal_lite.schedule.optimizer_updates import Crossing, update_plan
from colossal_lite.schedule.plan import Action, ActionKind
from colossal_lite.zero import build_chunks as packing
from colossal_lite.zero import parameter_order as order
from colossal_lite.zero.deferred_updates import DeferredUpdates
from colossal_lite.zero.optimizer import ChunkOptimizer
from colossal_lite.zero.parameter_order import order_of_use
from tests.offload.test_optimizer_states import ADAMW, on_disk
from tests.shared.covering import covering_array, name_of
from tests.shared.parity import Case, start
from tests.shared.places import patched
from tests.shared.pool import RankEnv, WorldError, run_world
from tests.zero.test_zero import SMALL, VOCABULARY, assert_same_state

CASE = Case(
    layers=3, vocabulary=VOCABULARY, chunk_bytes=SMALL // 2, steps=4, global_batch=8, dropout=0.1,
    config=dict(optimizer=ADAMW, clip_grad_norm=0.05),
)  # fmt: skip

Told = tuple[list[float], dict[str, torch.Tensor], dict[str, dict[str, torch.Tensor]]]


def told(env: RankEnv, case: Case, between: str = "nothing", fault: str = "") -> Told:
    """Losses of a run whose state is read at its end only, if nothing is asked for `between`, and that state."""
    planted = patched(*FAULTS[fault]) if fault else nullcontext()
    with env.launch(case.full_config) as context, planted:
        engine = start(case, context)
        cut, losses = context.local_batch(case.global_batch), []
        for number in range(case.steps):
            inputs, labels = (t[cut] for t in case.batch(number))
            losses.append(float(BETWEEN[between](engine, inputs, labels)))
        return losses, engine.full_state_dict(), engine.full_optimizer_state()


def _by_hand(engine: Engine, inputs: torch.Tensor, labels: torch.Tensor) -> Any:
    """The user's own loop, which forgets gradients first, as loops do."""
    engine.zero_grad()
    logits = engine(inputs)
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())
    engine.backward(loss, count=labels.numel())
    engine.step()
    return loss.detach()


def _with(read: Callable[[Engine, Any], object], *, late: bool = False) -> Callable[..., Any]:
    """A step, and something that is asked for after it, or between its backward and its updates."""

    def run(engine: Engine, inputs: torch.Tensor, labels: torch.Tensor) -> Any:
        loss = engine.forward_backward((inputs, labels))
        if not late:
            read(engine, (inputs, labels))
        engine.step()
        if late:
            read(engine, (inputs, labels))
        return loss

    return run


BETWEEN: dict[str, Callable[..., Any]] = {
    "nothing": lambda engine, *batch: engine.train_step(batch).loss,
    "an evaluation": _with(lambda engine, batch: engine.eval_step(batch), late=True),
    "the state": _with(lambda engine, batch: engine.full_optimizer_state(), late=True),
    "the state before the updates": _with(lambda engine, batch: engine.full_optimizer_state()),
    "other state before the updates": _with(
        lambda engine, batch: engine.load_full_state_dict(
            {name: value * 0.5 for name, value in engine.full_state_dict().items()}
        )
    ),
    "the model's own state dict": _with(lambda engine, batch: engine.model.state_dict(), late=True),
    "a loop by hand": _by_hand,
}


def assert_same(found: list[Told], expected: list[Told]) -> None:
    for ours, theirs in zip(found, expected, strict=True):
        assert ours[0] == theirs[0], "losses"
        assert_same_state(ours[1:], theirs[1:])


def placed(case: Case, tier: str, directory: Path, update: str = "device") -> Case:
    memory = on_disk(directory)["memory"] if tier == "disk" else dict(placement="host")
    return replace(case, config={**case.config, "memory": memory | dict(update=update)})


MESHES: dict[str, dict[str, Any]] = {
    "1": dict(world_size=1),
    "2": dict(world_size=2),
    "tensor 2": dict(world_size=2, tensor=2),
    "pipeline 2": dict(world_size=2, pipeline=dict(size=2, schedule="1f1b", micro_batches=2), global_batch=4),
}
ROWS = covering_array(
    dict(
        mesh=list(MESHES),
        stage=[0, 1, 2, 3],
        tier=["host", "disk"],
        update=["device", "host"],
        precision=["fp32", "bf16"],
        accumulation=[1, 2],
        recomputed=["none", "selective", "full"],
    ),
    lambda row: (
        (row["stage"] < 3 or row["mesh"] != "pipeline 2")
        and (row["recomputed"] != "selective" or row["mesh"] in ("1", "2"))
        and (row["stage"] == 0 or row["mesh"] == "2")
    ),
)


@pytest.mark.parametrize("row", ROWS, ids=name_of)
def test_updates_in_the_next_forward_give_the_bits_of_updates_at_once(
    row: dict[str, Any], tmp_path: Path
) -> None:
    config = dict(
        zero=dict(stage=row["stage"]),
        precision=row["precision"],
        gradient_accumulation=row["accumulation"],
        activation_checkpoint=row["recomputed"],
    )
    case = replace(CASE, **MESHES[row["mesh"]], config={**CASE.config, **config}, steps=3)
    expected = run_world(told, case.world_size, case)
    assert_same(
        run_world(told, case.world_size, placed(case, row["tier"], tmp_path, row["update"])), expected
    )


@pytest.mark.parametrize(("tier", "update"), [("host", "device"), ("disk", "device"), ("disk", "host")])
@pytest.mark.parametrize("between", [name for name in BETWEEN if name != "nothing"])
def test_whatever_is_asked_for_between_finds_every_update(
    between: str, tier: str, update: str, tmp_path: Path
) -> None:
    case = replace(CASE, world_size=1, config={**CASE.config, "precision": "bf16"})
    expected = run_world(told, 1, case, between)
    assert_same(run_world(told, 1, placed(case, tier, tmp_path, update), between), expected)


# ---- they do run late, and nothing is stale meanwhile ----


def ran(env: RankEnv, case: Case) -> tuple[list[str], list[str]]:
    """What a step and the step after it did in order: computing of modules, and actions of updates."""
    done: list[str] = []
    run = DeferredUpdates._run

    def noted(self: DeferredUpdates, stop: int) -> None:
        if self._next < stop and not hasattr(self, "noted"):
            self.noted = True  # type: ignore[attr-defined]
            self._handlers = {
                kind: lambda a, do=do: (done.append(str(a)), do(a))[1] for kind, do in self._handlers.items()
            }
        run(self, stop)

    with env.launch(case.full_config) as context, patch.object(DeferredUpdates, "_run", noted):
        engine = start(case, context)
        for number, block in enumerate(engine.model.blocks):
            block.register_forward_hook(lambda *_, number=number: done.append(f"block {number}"))
        batches = [case.batch(number) for number in range(2)]
        engine.train_step(batches[0])
        states = [str(chunk.weights) for chunk in engine._chunks]
        assert all(p.isnan().all() for p in engine._chunks[-1]._parameters), "nobody reads a stale weight"
        done.clear()
        engine.train_step(batches[1])
        return states, done


def test_a_chunk_is_updated_just_before_the_module_that_reads_it() -> None:
    """In the order of the plan, of which the step before has done what the forward begins with."""
    case = replace(CASE, world_size=1, dropout=0.0, config={**CASE.config, "memory": dict(placement="host")})
    ((states, done),) = run_world(ran, 1, case)
    assert states == ["whole", *["owed"] * (len(states) - 1)]
    updates = [word for word in done if ActionKind.UPDATE in word]
    first = updates.index("0UPDATE#0")
    assert updates[:first] == [f"0UPDATE#{c}" for c in range(1, len(states))]
    # Each block's own updates come after the block before it has computed.
    blocks = [done.index(f"block {number}") for number in range(case.layers)]
    between = [
        [word for word in done[a:b] if ActionKind.UPDATE in word]
        for a, b in zip(blocks, blocks[1:], strict=False)
    ]
    assert all(between), done


# ---- in the order of use, whatever the order of definition ----


class Backwards(nn.Module):
    """Its modules are defined in the reverse of the order in which they are used."""

    def __init__(self, layers: int = 6, width: int = 32, vocabulary: int = 64) -> None:
        super().__init__()
        self.head = nn.Linear(width, vocabulary)
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))
        self.token = nn.Embedding(vocabulary, width)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.token(ids)
        for layer in reversed(self.layers):
            x = x + torch.tanh(layer(x))
        return self.head(x)


class Choosy(Backwards):
    """What it computes depends on values, so nobody can run it without tensors."""

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        assert int(ids.max()) >= 0
        return super().forward(ids)


def in_order(env: RankEnv, kind: type[Backwards], built: bool, stage: int) -> tuple[Any, ...]:
    """What the second step did in order (updates, and uses of modules); names as packed; losses; what was warned of;
    bytes of slots that sums of gradients took, and that were planned."""
    config = dict(
        zero=dict(stage=stage), memory=dict(placement="host"), optimizer=ADAMW, precision="fp32", seed=7
    )
    done: list[str] = []
    update = ChunkOptimizer.update

    def noted(self: ChunkOptimizer, chunk: Chunk, *args: Any, **options: Any) -> None:
        done.append(f"update of {chunk.spec.entries[0].name}")
        update(self, chunk, *args, **options)

    torch.manual_seed(3)
    with (
        patch.object(packing, "CHUNK_BYTES", 4096),
        patch.object(ChunkOptimizer, "update", noted),
        warnings.catch_warnings(record=True) as said,
        env.launch(config) as context,
    ):
        warnings.simplefilter("always")
        engine = cl.initialize(kind() if built else kind, context=context)
        names = [entry.name for chunk in engine._chunks for entry in chunk.spec.entries]
        for name, module in engine.model.named_modules():
            module.register_forward_pre_hook(lambda *_, name=name: done.append(name))
        ids = torch.randint(64, (4, 8), generator=torch.Generator().manual_seed(5))
        losses = [float(engine.train_step((ids, ids.roll(-1, 1))).loss)]
        done.clear()
        losses += [float(engine.train_step((ids, ids.roll(-1, 1))).loss) for _ in range(2)]
        staged = next((r.now_bytes, r.forecast_bytes) for r in engine.memory_report() if r.kind == "staging")
        warned = [str(w.message) for w in said if "in the order of their use" in str(w.message)]
        return done, names, losses, warned, staged


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_a_model_defined_backwards_is_packed_and_updated_in_the_order_of_its_use(stage: int) -> None:
    """Each update just before the use of what it updates, but for the one ahead; sums keep to their slots."""
    for done, names, _, warned, (staged, planned) in run_world(in_order, 2, Backwards, False, stage):
        owners = list(dict.fromkeys(name.rpartition(".")[0] for name in names))
        assert owners == ["token", *(f"layers.{i}" for i in reversed(range(6))), "head"]
        place = {owner: i for i, owner in enumerate(owners)}
        seen = 0
        for word in done[: done.index("head")]:
            if word.startswith("update of "):
                assert place[word.removeprefix("update of ").rpartition(".")[0]] <= seen + 2, done
            else:
                seen = place.get(word, seen)
        assert seen == len(owners) - 2 and not warned and staged == planned


def test_where_the_order_cannot_be_known_beforehand_the_first_forward_tells_it() -> None:
    """And the numbers are the same."""
    ((_, names, losses, _, _),) = run_world(in_order, 1, Backwards, False, 1)
    assert names[0] == "token.weight"
    ((_, names, of_choosy, warned, _),) = run_world(in_order, 1, Choosy, False, 1)
    assert names[0] == "head.weight" and losses == of_choosy
    assert len(warned) == 1 and "Embedding is used before 14 chunks" in warned[0], warned
    ((_, names, _, warned, _),) = run_world(in_order, 1, Backwards, True, 1)
    assert names[0] == "head.weight" and len(warned) == 1


def test_the_plan_packs_in_the_order_of_use_too() -> None:
    config = dict(precision="fp32", optimizer=ADAMW)
    orders = []
    pack_chunks = dry_run.pack_chunks

    def noted(numels: Any, *args: Any, **options: Any) -> Any:
        orders.append(list(numels))
        return pack_chunks(numels, *args, **options)

    with patch.object(dry_run, "pack_chunks", noted):
        planner.plan(config, Backwards, batch=2, sequence=8, world_size=2)
    assert orders and all(order[0] == "token.weight" and order[-1] == "head.bias" for order in orders)


def test_our_gpt_is_defined_in_the_order_of_its_use() -> None:
    """So it need not be asked."""
    for config in (GPTConfig(layers=2), GPTConfig.llama("1B", layers=2)):
        module = on_meta(lambda config=config: GPT(config))
        assert order_of_use(module) is None
        with patch.object(order, "GPT", int):
            assert order_of_use(module) == tuple(name for name, _ in module.named_parameters())


# ---- planted faults ----


def _back_when_it_has_set_out(
    original: Any, self: Any, index: int, target: Any, *after: Any, **more: Any
) -> Any:
    self.down.run(partial(time.sleep, 0.2), 0)  # longer than a busy machine takes to fetch it again
    original(self, index, target, *after, **more)
    return self.up.run(int, 0)


def _forgotten(original: Any, self: Any) -> None:
    self._next = max(self._next, len(self._actions))
    original(self)


def _late_by_one(original: Any, self: Any, needed: Any, module: Any, args: Any) -> None:
    if self._deferred is None:
        original(self, needed, module, args)
    for chunk in needed:
        chunk._show()  # the weights as they were


FAULTS: dict[str, tuple[str, Callable[..., Any]]] = {
    "fetched before it is back": ("OffloadedOptimizerStates._take_back", _back_when_it_has_set_out),
    "not paid": ("ForwardGates._run_deferred_until", lambda original, self, place: original(self, 0)),
    "forgotten": ("DeferredUpdates.finish", _forgotten),
    "read before the update": ("ForwardGates._enter", _late_by_one),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_changes_the_bits(fault: str, tmp_path: Path) -> None:
    case = placed(replace(CASE, world_size=1, config={**CASE.config, "precision": "bf16"}), "host", tmp_path)
    expected = run_world(told, 1, case)
    try:
        found = run_world(told, 1, case, "nothing", fault)
    except WorldError:
        return
    with pytest.raises(AssertionError):
        assert_same(found, expected)


@pytest.mark.parametrize("on_host", [(), (0,), (1,), (0, 2), (1, 2), (0, 1, 2)], ids=str)
@pytest.mark.parametrize("asked", [(), (0, 1, 2), (2,), (1,)], ids=str)
def test_chunks_are_done_in_their_order_wherever_they_are_updated(
    on_host: tuple[int, ...], asked: tuple[int, ...]
) -> None:
    """So ranks gather in one order, also where one of them has nothing to update of a chunk."""
    done: list[int] = []
    plan = update_plan(3, ahead=1, on_host=dict.fromkeys(on_host, Crossing()))
    handlers = dict.fromkeys((ActionKind.UPDATE, ActionKind.FETCH, ActionKind.EVICT), repr)
    updates = DeferredUpdates(plan[0], handlers, lambda: None, done.append)
    for chunk in asked:
        updates.until(chunk)
        assert chunk in done
    updates.finish()
    assert done == [0, 1, 2]


def test_an_update_on_the_device_does_not_wait_for_one_on_the_host_before_it() -> None:
    done: list[str] = []
    plan = update_plan(3, ahead=1, on_host={0: Crossing(), 2: Crossing()})
    handlers: dict[ActionKind, Any] = dict.fromkeys((ActionKind.FETCH, ActionKind.EVICT), repr)
    handlers[ActionKind.UPDATE] = lambda action: done.append(f"update {action.chunk}")
    updates = DeferredUpdates(plan[0], handlers, lambda: None, lambda chunk: done.append(f"came {chunk}"))
    updates.start(2)
    assert done == ["update 0", "update 2", "update 1"]
    updates.until(1)
    assert done[3:] == ["came 0", "came 1"]


def stumbles(env: RankEnv, case: Case, reads_first: bool) -> tuple[list[str], bool]:
    """What a step and each call after it say, where the third update on the host raises; and whether the failure is
    known at the end."""
    calls, run = [0], host_updates._run

    def planted(*args: Any, **more: Any) -> None:
        calls[0] += 1
        if calls[0] == 3:
            raise RuntimeError("the host stumbled")
        run(*args, **more)

    said: list[str] = []
    with suppress(RuntimeError), env.launch(case.full_config) as context:
        engine = start(case, context)
        inputs, labels = (t[context.local_batch(case.global_batch)] for t in case.batch(0))
        with patch.object(host_updates, "_run", planted):
            calls_of: list[Callable[[], Any]] = [lambda: engine.train_step((inputs, labels))] * 2
            for call in [*calls_of[reads_first:], engine.full_state_dict, engine.full_state_dict, *calls_of]:
                try:
                    call()
                    said.append("nothing")
                except RuntimeError as error:
                    said.append(str(error))
        is_known = engine._weights.has_failed  # to a load: the weights are a mix
    return said, is_known


@pytest.mark.parametrize("weights", [0.0, 1.0], ids=["on the device", "at rest on the host"])
@pytest.mark.parametrize("reads_first", [False, True], ids=["a step", "a read"])
def test_an_update_on_the_host_that_fails_is_raised_by_all_that_follows(
    reads_first: bool, weights: float
) -> None:
    """Also where no forward waits for it but a link that fetches its weights."""
    memory = dict(placement="static", update_on="host", host_fraction=dict(optimizer=1.0, weights=weights))
    case = replace(CASE, config=dict(CASE.config, memory=memory, zero=dict(stage=3)))
    ((said, is_known),) = run_world(stumbles, 1, case, reads_first)
    assert is_known and said == ["nothing", *["the host stumbled"] * (len(said) - 1)]


def test_a_step_that_is_given_up_waits_for_its_updates_on_the_host_and_starts_no_other() -> None:
    """In the order of gradients a chunk's turn starts no update of another one."""
    crossings = {chunk: Crossing() for chunk in range(3)}
    (actions,) = update_plan(3, ahead=1, on_host=crossings, backward=True)
    done: list[str] = []

    def note(action: Action) -> None:
        done.append(str(action))

    kinds = (ActionKind.FETCH, ActionKind.EVICT, ActionKind.UPDATE)
    deferred = DeferredUpdates(
        actions, dict.fromkeys(kinds, note), lambda: done.append("end"), lambda chunk: done.append(f"came {chunk}"),
        by_gradient=True,
    )  # fmt: skip
    deferred.start(2)
    assert done == ["0EVICT#5", "0UPDATE#2@cpu", "0FETCH#8"]
    deferred.start(1)
    assert done[3:] == ["0EVICT#4", "0UPDATE#1@cpu", "0FETCH#7"]
    deferred.drain()
    assert done[6:] == ["came 1", "came 2"]
