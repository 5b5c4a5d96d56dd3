"""Checks weights that share memory with gradients: any call between a backward and its updates is either refused with
the reason, or the run has the bits of one whose weights have memory of their own."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import colossal_lite as cl
from colossal_lite.engine.engine import Engine
from colossal_lite.offload.arena_waits import early_records
from tests.shared.parity import Case, start
from tests.shared.places import patched
from tests.shared.pool import RankEnv, WorldError, run_world
from tests.zero.test_memory_budget import DEEP, _extent, auto, config_of

PLAIN = replace(DEEP, dropout=0.0, world_size=2, global_batch=8)
"""Whose numbers do not hang on how many steps there were before."""


def case_of(accumulation: int, precision: str = "bf16") -> Case:
    config = config_of(3, precision=precision, accumulation=accumulation, prefetch=1)
    return replace(PLAIN, config=config)


State = dict[str, Tensor]


def state_of(engine: Engine) -> State:
    moments = engine.full_optimizer_state()
    state = {f"{kind} of {name}": value for name, kinds in moments.items() for kind, value in kinds.items()}
    return state | engine.full_state_dict()


def same(one: State, other: State) -> bool:
    return one.keys() == other.keys() and all(torch.equal(value, other[name]) for name, value in one.items())


def cut_of(case: Case, context: cl.Context, number: int) -> tuple[Tensor, Tensor]:
    part = context.local_batch(case.global_batch)
    inputs, labels = case.batch(number)
    return inputs[part], labels[part]


# ---- what may come between ----


@dataclass
class Run:
    """A run in the middle."""

    engine: Engine
    case: Case
    context: cl.Context
    directory: Path
    store: cl.HostStore
    loss: Loss

    def batch(self, number: int) -> tuple[Tensor, Tensor]:
        return cut_of(self.case, self.context, number)

    def spare(self) -> None:
        """The gradients of a batch that no step uses."""
        self.engine.forward_backward(self.batch(9))


def nothing(run: Run) -> None: ...


def forgotten(run: Run) -> None:
    run.spare()
    run.engine.zero_grad()


class Loss:
    """That of the config, or one that is not finite."""

    factor = 1.0

    def __call__(self, logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        loss = nn.functional.cross_entropy(
            logits.flatten(0, 1).float(), labels.flatten(), ignore_index=-100, reduction="sum"
        )
        return loss * self.factor, (labels != -100).sum()


def skipped(run: Run) -> None:
    run.loss.factor = float("inf")
    assert run.engine.train_step(run.batch(9)).skipped
    run.loss.factor = 1.0


def broken(run: Run) -> None:
    """A backward that comes half way."""
    blocks = [m for m in run.engine.model.modules() if any(True for _ in m.parameters(recurse=False))]

    def stop(*_: Any) -> None:
        raise RuntimeError("half way")

    handle = blocks[len(blocks) // 2].register_full_backward_pre_hook(stop)
    with pytest.raises(RuntimeError, match="half way"):
        run.spare()
    handle.remove()
    run.engine.zero_grad()


def refused(run: Run) -> None:
    """Whatever reads weights; `zero_grad` makes them anew."""
    engine, (inputs, labels) = run.engine, run.batch(9)
    before = state_of(engine)
    run.spare()
    calls: tuple[Callable[[], object], ...] = (
        lambda: engine.eval_step((inputs, labels)), lambda: engine(inputs), engine.full_state_dict,
        engine.full_optimizer_state, lambda: engine.load_full_state_dict({}), lambda: engine.save(run.directory),
        lambda: engine.backward(torch.zeros((), requires_grad=True)),
    )  # fmt: skip
    if any(chunk.lacks_weights for chunk in engine._chunks):
        for call in calls:
            with pytest.raises(ValueError, match=r"gradients in the place of weights .*zero_grad"):
                call()
        lacking = next(chunk for chunk in engine._chunks if chunk.lacks_weights)
        with pytest.raises(ValueError, match="between the last backward of a step and their update"):
            lacking.unshard(torch.empty(lacking.spec.numel, dtype=lacking.types.compute))
    gradients = engine.full_gradients()
    assert gradients and all(torch.isfinite(value).all() for value in gradients.values())
    engine.zero_grad()
    assert same(state_of(engine), before)


def loaded(run: Run) -> None:
    run.engine.save(run.directory / "saved").wait()
    run.spare()
    run.engine.load(run.directory / "saved")


def left(run: Run) -> None:
    """To another engine, by the store."""
    run.spare()
    run.engine.close()
    run.engine = start(run.case, run.context, store=run.store, task="gpt")


def manual(run: Run, calls: int | None = None) -> None:
    """A step of a loop of the user's own, of as many micro-batches as the config says, or of fewer."""
    accumulation = run.case.config["gradient_accumulation"]
    for part in list(zip(*(t.chunk(accumulation) for t in run.batch(5)), strict=True))[:calls]:
        logits, labels = run.engine(part[0]), part[1]
        count = int((labels != -100).sum())
        loss = nn.functional.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), ignore_index=-100)
        run.engine.backward(loss, count)
    run.engine.step()


def early(run: Run) -> None:
    manual(run, 1)


EVENTS = dict(
    nothing=nothing, forgotten=forgotten, skipped=skipped, broken=broken, refused=refused, loaded=loaded, left=left,
    manual=manual, early=early,
)  # fmt: skip


def _forget_first_sums(original: Any, self: Any) -> None:
    is_coming = self._coming is not None
    original(self)
    if is_coming:
        self.gradient.zero_()


def _never_whole(original: Any, self: Any, *, is_whole: bool) -> None:
    original(self, is_whole=True)


def _always_free(original: Any, self: Any, **how: Any) -> None:
    original(self, **{**how, "frees": True})


READ = "the weights .* are read between the last backward of a step and their update"
FAULTS: dict[str, tuple[tuple[str, Any], str, int, str | None]] = {
    "weights are not made anew": (("Updates.remake", lambda original, self: None), "forgotten", 1, READ),
    "what no update writes is not made": (("Chunk.take_weights", _never_whole), "forgotten", 1, None),
    "sums before the last are forgotten": (("Chunk.have_sums", _forget_first_sums), "nothing", 2, None),
    "weights leave in every backward": (("GradientHooks.begin", _always_free), "nothing", 2, READ),
    "weights never leave before the updates": (
        ("Chunk.give_weights", lambda original, self: None), "nothing", 1, "comes to a place that is taken",
    ),
}  # fmt: skip
"""What is planted, the event and the micro-batches that show it, and what is raised; None: other bits."""


SHARE_OF = {1: 0.4, 2: 0.05}
"""With time-shared gradients, or last sums."""


def budget_of(env: RankEnv, case: Case, share: float, criterion: Any = None) -> dict[str, Any]:
    least, whole = _extent(env, case, criterion=criterion)
    memory: dict[str, Any] = auto(round(least + share * (whole - least)))["memory"]
    return memory


def story(
    env: RankEnv, case: Case, share: float | None, event: str, directory: str, fault: str = ""
) -> tuple[list[float], State, tuple[int, int, int]]:
    """A step, what comes then, two more, within a `share` of what lies between the least and all; and of how many
    chunks weights, gradients and last sums share memory."""
    with patched(*FAULTS[fault][0]) if fault else nullcontext():
        criterion = Loss() if event == "skipped" else None  # which takes memory of its own
        memory = dict[str, Any]() if share is None else budget_of(env, case, share, criterion)
        full = replace(case, config=dict(case.config) | dict(memory=memory)).full_config
        store = cl.HostStore()
        with env.launch(full) as context:
            loss, more = Loss(), dict[str, Any]()
            if event in ("left", "skipped"):
                more = dict(store=store, task="gpt") if event == "left" else dict(criterion=loss)
            engine = start(case, context, **more)
            run = Run(engine, case, context, Path(directory), store, loss)
            losses = [float(engine.train_step(run.batch(0)).loss)]
            EVENTS[event](run)
            losses += [float(run.engine.train_step(run.batch(number)).loss) for number in (1, 2)]
            chunks = run.engine._chunks
            turns = (
                sum(chunk.time_shared("weights") for chunk in chunks),
                sum(chunk.time_shared("gradients") for chunk in chunks),
                sum(chunk.waits_on_device for chunk in chunks),
            )
            found = losses, state_of(run.engine), turns
        if event == "left":
            store.drop("gpt")
        return found


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("event", EVENTS)
def test_whatever_comes_between_a_backward_and_its_updates_the_run_goes_on_with_the_same_bits(
    event: str, accumulation: int, tmp_path: Path
) -> None:
    case = case_of(accumulation)
    expected = run_world(story, 2, case, None, event, str(tmp_path / "one"))
    found = run_world(story, 2, case, SHARE_OF[accumulation], event, str(tmp_path / "other"))
    for (losses, state, turns), (true_losses, true_state, none) in zip(found, expected, strict=True):
        assert losses == true_losses and same(state, true_state)
        weights, gradients, last_sums = turns
        assert none == (0, 0, 0) and weights > 3
        assert (gradients > 3, last_sums > 1) == (accumulation == 1, accumulation > 1)


@pytest.mark.parametrize("fault", FAULTS)
def test_so_it_is_not_where(fault: str, tmp_path: Path) -> None:
    _, event, accumulation, message = FAULTS[fault]
    case, share = case_of(accumulation), SHARE_OF[accumulation]
    if message is not None:
        with pytest.raises(WorldError, match=message):
            run_world(story, 2, case, share, event, str(tmp_path), fault)
        return
    ((_, expected, _), _) = run_world(story, 2, case, None, event, str(tmp_path))
    ((_, state, _), _) = run_world(story, 2, case, share, event, str(tmp_path), fault)
    assert not same(state, expected)


# ---- records that come in backward ----

SHARES: dict[str, Any] = dict(placement="static", host_fraction=dict(gradients=1.0, optimizer=1.0))


def story_of_shares(
    env: RankEnv, case: Case, memory: dict[str, Any], event: str, directory: str
) -> tuple[list[float], State, int]:
    """As `story`, with these shares on the host; and how many records have places in the arena before their updates."""
    full = replace(case, config=dict(case.config) | dict(memory=memory)).full_config
    store = cl.HostStore()
    with env.launch(full) as context:
        loss, more = Loss(), dict[str, Any]()
        if event in ("left", "skipped"):
            more = dict(store=store, task="gpt") if event == "left" else dict(criterion=loss)
        run = Run(start(case, context, **more), case, context, Path(directory), store, loss)
        losses = [float(run.engine.train_step(run.batch(0)).loss)]
        EVENTS[event](run)
        losses += [float(run.engine.train_step(run.batch(number)).loss) for number in (1, 2)]
        arena = run.engine._optimizer.arena
        found = losses, state_of(run.engine), len(early_records(arena.plan)) if arena else 0
    if event == "left":
        store.drop("gpt")
    return found


@pytest.mark.parametrize(("accumulation", "stage"), [(1, 2), (2, 2), (1, 3), (2, 3)])
@pytest.mark.parametrize("event", EVENTS)
def test_records_that_came_in_a_backward_wait_for_their_update_whatever_comes_between(
    event: str, accumulation: int, stage: int, tmp_path: Path
) -> None:
    """On one rank, where no sums in flight take the room. At stage 3 weights cross the same link."""
    case = replace(PLAIN, world_size=1, config=config_of(stage, precision="bf16", accumulation=accumulation))
    shares = dict(SHARES, host_fraction=SHARES["host_fraction"] | (dict(weights=1.0) if stage == 3 else {}))
    ((true_losses, true_state, none),) = run_world(story_of_shares, 1, case, {}, event, str(tmp_path / "one"))
    ((losses, state, early),) = run_world(story_of_shares, 1, case, shares, event, str(tmp_path / "other"))
    assert losses == true_losses and same(state, true_state)
    assert early == 2 and none == 0


# ---- beside updates on the host ----

MIXED: dict[str, Any] = dict(
    placement="static", host_fraction=dict(weights=0.5, gradients=1.0, optimizer=0.6), update_on=dict(every=2)
)


def mixed_story(
    env: RankEnv, case: Case, event: str, directory: str, memory: dict[str, Any]
) -> tuple[list[float], State, tuple[bool, bool]]:
    """As `story_of_shares`; and whether some weights share memory, and the host updates others."""
    seen: list[tuple[bool, bool]] = []

    def look(original: Callable[..., Any], self: Engine, *args: Any) -> Any:
        told = original(self, *args)
        shares = any(chunk.time_shared("weights") for chunk in self._chunks)
        seen.append((shares, getattr(self._optimizer, "calls_on_host", 0) > 0))
        return told

    with patched("Engine.train_step", look):
        losses, state, _ = story_of_shares(env, case, memory, event, directory)
    return losses, state, seen[-1]


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("event", EVENTS)
def test_so_it_does_where_the_host_updates_chunks_beside_those_that_share_memory(
    event: str, accumulation: int, tmp_path: Path
) -> None:
    case = replace(
        PLAIN, world_size=1, config=config_of(3, precision="bf16", accumulation=accumulation, prefetch=1)
    )
    ((true_losses, true_state, _),) = run_world(mixed_story, 1, case, event, str(tmp_path / "one"), {})
    ((losses, state, seen),) = run_world(mixed_story, 1, case, event, str(tmp_path / "other"), MIXED)
    assert seen == (True, True)
    assert losses == true_losses and same(state, true_state)
