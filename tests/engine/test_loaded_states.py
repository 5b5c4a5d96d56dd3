"""States that are loaded by hand or saved between backward and step: the same on every rank, or refused by name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import colossal_lite as cl
from colossal_lite.checkpoint.manifest import CheckpointError
from colossal_lite.engine.engine import Engine
from tests.shared.pool import RankEnv, run_world
from tests.shared.refusals import told_of

SGD = dict(precision="fp64", optimizer=dict(type="sgd", lr=0.1), timeout_s=30)


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))


def batch(rank: int = 0) -> tuple[Tensor, Tensor]:
    torch.manual_seed(7 + rank)
    return torch.randn(4, 4, dtype=torch.float64), torch.randn(4, 2, dtype=torch.float64)


# ---- what is no state dict ----

NO_STATES: dict[str, tuple[Callable[[dict[str, Tensor]], Any], str]] = {
    "nothing": (lambda state: None, "it is of type NoneType; legal: a mapping of names to tensors"),
    "pairs": (lambda state: list(state.items()), "it is of type list"),
    "a module": (lambda state: model(), "it is of type Sequential"),
    "nested": (
        lambda state: dict(model=state),
        "unexpected: model of type dict; legal: state['model'] alone",
    ),
    "both names": (
        lambda state: state | {f"module.{name}": x + 1 for name, x in state.items()},
        "unexpected: module.0.bias (4,)",
    ),
    "another wrapper": (
        lambda state: {f"model.{name}": x for name, x in state.items()},
        "unexpected: model.0.bias (4,)",
    ),
    "a number": (
        lambda state: state | {"0.bias": 1.0},
        "type: 0.bias is of type float; legal: a dense tensor",
    ),
    "an array": (lambda state: state | {"0.bias": state["0.bias"].numpy()}, "0.bias is of type ndarray"),
    "meta": (lambda state: state | {"0.bias": state["0.bias"].to("meta")}, "0.bias is on the meta device"),
    "sparse": (lambda state: state | {"0.bias": state["0.bias"].to_sparse()}, "0.bias is torch.sparse_coo"),
}


def loads(env: RankEnv, kind: str, stage: int) -> tuple[str, bool]:
    """What the load of such a state says, and whether the weights are as before."""
    with env.launch(SGD | dict(zero=dict(stage=stage))) as context:
        engine = cl.initialize(model(), context=context, criterion=nn.MSELoss())
        before = engine.full_state_dict()
        told = told_of(lambda: engine.load_full_state_dict(NO_STATES[kind][0](before)))
        after = engine.full_state_dict()
    return told, all(torch.equal(after[name], before[name]) for name in before)


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("kind", NO_STATES)
def test_what_is_no_state_dict_is_refused_by_name_and_changes_nothing(kind: str, stage: int) -> None:
    ((told, is_whole),) = run_world(loads, 1, kind, stage)
    assert "load_full_state_dict:" in told and NO_STATES[kind][1] in told and is_whole


# ---- ranks that load otherwise ----

LOADS: dict[str, Callable[[int], float | None]] = {
    "one rank": lambda rank: None if rank else 2.0,
    "other values": lambda rank: 2.0 + rank,
    "the other rank": lambda rank: 2.0 if rank else None,
}


WRAPPERS = (
    "module.{}",
    "_orig_mod.{}",
    "module._orig_mod.{}",
    "_orig_mod.module.{}",
    "_fsdp_wrapped_module.{}",
)


class Within(nn.Module):
    """Has a name of DistributedDataParallel of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.module = model()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.module(x)
        return out


@pytest.mark.parametrize("make", [model, Within])
def test_states_of_wrapped_models_are_loaded(make: Callable[[], nn.Module]) -> None:
    """Those of DistributedDataParallel, of FSDP and of checkpoint_wrapper had only names that were unexpected."""
    with cl.launch(SGD | dict(backend="gloo")) as context:
        engine = cl.initialize(make(), context=context, criterion=F.mse_loss)
        for n, name in enumerate(WRAPPERS, 1):
            engine.load_full_state_dict(
                {name.format(k): x + n for k, x in make().double().state_dict().items()}
            )
            found = engine.full_state_dict()
            assert all(torch.equal(found[k], x + n) for k, x in make().double().state_dict().items())
        inner = {
            k.replace("0.", "0._checkpoint_wrapped_module."): x
            for k, x in make().double().state_dict().items()
        }
        engine.load_full_state_dict(inner)


def load_apart(engine: Engine, kind: str, rank: int) -> dict[str, Tensor]:
    """Load other states on ranks after a step; the state before."""
    engine.train_step(batch(rank))
    state = engine.full_state_dict()
    factor = LOADS[kind](rank)
    if factor is not None:
        engine.load_full_state_dict({name: value * factor for name, value in state.items()})
    return state


def loaded_apart(env: RankEnv, kind: str, stage: int) -> tuple[list[str], float, float]:
    """What a step and an evaluation say after ranks have loaded otherwise. The loss after all have loaded the same, and
    that of torch alone."""
    with env.launch(SGD | dict(zero=dict(stage=stage))) as context:
        engine = cl.initialize(model(), context=context, criterion=nn.MSELoss())
        state = load_apart(engine, kind, env.rank)
        told = [
            told_of(lambda: engine.train_step(batch(env.rank))),
            told_of(lambda: engine.eval_step(batch(env.rank))),
        ]
        engine.load_full_state_dict(state)
        loss = float(engine.train_step(batch(env.rank)).loss)
    twin = model().double()
    twin.load_state_dict(state)
    losses = [F.mse_loss(twin(batch(rank)[0]), batch(rank)[1]).item() for rank in range(2)]
    return told, loss, sum(losses) / 2


@pytest.mark.parametrize("stage", [0, 2, 3])
@pytest.mark.parametrize("kind", LOADS)
def test_ranks_that_load_other_states_are_refused_at_the_next_step(kind: str, stage: int) -> None:
    """At stage 0 the replicas once drifted apart, and at the others weights were a mix, both in silence."""
    for told, loss, truth in run_world(loaded_apart, 2, kind, stage):
        assert all(
            "load_full_state_dict: rank 1 has loaded other values than rank 0" in each for each in told
        )
        assert abs(loss - truth) < 1e-12


def saved_apart(env: RankEnv, kind: str, folder: str) -> tuple[str, list[str]]:
    """What saves say after ranks have loaded otherwise, and what was written before and after all load the same."""
    with env.launch(SGD | dict(zero=dict(stage=2))) as context:
        engine = cl.initialize(model(), context=context, criterion=nn.MSELoss())
        state = load_apart(engine, kind, env.rank)
        with pytest.raises(CheckpointError) as refused:
            engine.save(folder).wait()
        written = [path.name for path in Path(folder).glob("step-*")]
        engine.load_full_state_dict(state)
        engine.save(folder).wait()
        engine.train_step(batch(env.rank))
        engine.save(folder).wait()
    return str(refused.value), [*written, *sorted(path.name for path in Path(folder).glob("step-*"))]


@pytest.mark.parametrize("kind", LOADS)
def test_a_save_of_states_that_differ_between_ranks_writes_nothing(kind: str, tmp_path: Path) -> None:
    """It once wrote a mix of them: each rank its own part."""
    for told, written in run_world(saved_apart, 2, kind, str(tmp_path / "saved")):
        assert "load_full_state_dict: rank 1 has loaded other values than rank 0" in told, told
        assert written == ["step-00000001", "step-00000002"]


# ---- weights alone, of a checkpoint that does not fit ----


def weights_alone(env: RankEnv, folder: str, other: str) -> tuple[str, float]:
    """What the load says into an engine with another optimizer, or that freezes. The difference of its weights from the
    saved ones, after it has taken them from an engine of then."""
    adam = SGD | dict(optimizer=dict(type="adamw", lr=0.1))
    with env.launch(adam) as context:
        engine = cl.initialize(model(), context=context, criterion=nn.MSELoss())
        engine.train_step(batch(env.rank))
        engine.save(folder)
        saved = engine.full_state_dict()
    with env.launch(adam) as context:
        of_then = cl.initialize(model(), context=context, criterion=nn.MSELoss())
        of_then.load(folder)
        state = of_then.full_state_dict()
    with env.launch(SGD if other == "optimizer" else adam) as context:
        net = model()
        if other == "frozen":
            net[0].requires_grad_(False)
        engine = cl.initialize(net, context=context, criterion=nn.MSELoss())
        told = told_of(lambda: engine.load(folder))
        engine.load_full_state_dict(state)
        now = engine.full_state_dict()
        engine.train_step(batch(env.rank))
    return told, max(float((now[name] - saved[name]).abs().max()) for name in saved)


@pytest.mark.parametrize("other", ["optimizer", "frozen"])
def test_a_load_that_does_not_fit_says_how_to_take_the_weights_alone(other: str, tmp_path: Path) -> None:
    for told, apart in run_world(weights_alone, 2, str(tmp_path), other):
        assert "For weights alone: an engine of then loads it, and its full_state_dict() goes to" in told
        assert apart == 0.0


# ---- between backward and step ----


class Counting(nn.Module):
    """Counts its forwards in a buffer that it reads."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros((), dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.count += 1
        return x * (1 + 0.1 * self.count)


def saved_between(env: RankEnv, folder: str, own_loop: bool, counts: bool) -> tuple[str, float]:
    """What a save between backward and step says. The largest difference of a weight between the run that went on, and
    one that resumed from it, or from a save after that step."""
    inputs, labels = batch()

    def begin(engine: cl.Engine) -> None:
        if own_loop:
            engine.backward(F.mse_loss(engine(inputs), labels))
        else:
            engine.forward_backward((inputs, labels))

    found = []
    for resumes in (False, True):
        with env.launch(SGD) as context:
            torch.manual_seed(0)
            middle = Counting() if counts else nn.Tanh()
            net = nn.Sequential(nn.Linear(4, 4), middle, nn.Linear(4, 2))
            engine = cl.initialize(net, context=context, criterion=nn.MSELoss())
            if resumes:
                engine.resume(folder)
            else:
                begin(engine)
                told = told_of(lambda engine=engine: engine.save(folder))  # type: ignore[misc]
                engine.step()
                if told:
                    engine.save(folder)
            while engine.steps < 2:
                begin(engine)
                engine.step()
            found.append(engine.full_state_dict())
    return told, max(float((found[0][name] - found[1][name]).abs().max()) for name in found[0])


@pytest.mark.parametrize("own_loop", [False, True])
@pytest.mark.parametrize("counts", [False, True])
def test_a_save_between_backward_and_step_resumes_exactly_or_is_refused(
    own_loop: bool, counts: bool, tmp_path: Path
) -> None:
    """It has the weights before the step. A buffer that the forward had changed was once changed twice."""
    ((told, apart),) = run_world(saved_between, 1, str(tmp_path), own_loop, counts)
    assert apart == 0.0
    assert ("save: a forward of this step has changed the buffer 1.count" in told) == counts


# ---- after the end ----


def loads_closed(env: RankEnv, folder: str) -> list[str]:
    """What load and resume of a closed engine say at stage 3."""
    with env.launch(SGD | dict(zero=dict(stage=3))) as context:
        engine = cl.initialize(model(), context=context, criterion=nn.MSELoss())
        engine.train_step(batch(env.rank))
        engine.save(folder)
        engine.close()
        told = [told_of(lambda: engine.load(folder)), told_of(lambda: engine.resume(folder))]
        again = cl.initialize(model(), context=context, criterion=nn.MSELoss())
        assert again.load(folder).step == 1
    return told


def test_loads_into_a_closed_engine_of_shards_are_refused(tmp_path: Path) -> None:
    """The first left NaN in the weights of the model, and the second ended in an AssertionError."""
    for load, resume in run_world(loads_closed, 2, str(tmp_path)):
        assert "load: this engine is closed" in load and "resume: this engine is closed" in resume
