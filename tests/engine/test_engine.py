"""What the engine promises besides parity: odd parameters, odd batches, odd criteria, and a user's own loop."""

from __future__ import annotations

import gc
from dataclasses import replace
from typing import Any
from weakref import ref

import pytest
import torch
from torch import Tensor, nn

import colossal_lite as cl
from colossal_lite.zero.gradient_hooks import GradientHooks
from tests.shared.parity import Case, initial_values, relative_error, serial_run, start
from tests.shared.pool import RankEnv, WorldError, run_world

SGD = dict(precision="fp64", optimizer=dict(type="sgd", lr=0.5), seed=7, timeout_s=30)


class Branches(nn.Module):
    """A classifier with a branch that only even samples take, a parameter nobody uses, and a frozen scale."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(8, 4)
        self.left, self.right = nn.Linear(4, 4), nn.Linear(4, 4)
        self.unused = nn.Parameter(torch.ones(3))
        self.scale = nn.Parameter(torch.full((4,), 2.0), requires_grad=False)
        self.head = nn.Linear(4, 8)

    def forward(self, x: Tensor) -> Tensor:
        h = self.embedding(x) * self.scale
        even = x[:, 0] % 2 == 0
        if even.all() or not even.any():
            taken = (self.left if even.all() else self.right)(h)
        else:
            taken = torch.where(even[:, None, None], self.left(h), self.right(h))
        return self.head(torch.tanh(taken))


def batch_of(*firsts: int) -> tuple[Tensor, Tensor]:
    inputs = torch.tensor([[first, 1, 2, 3] for first in firsts])
    return inputs, (inputs + 3) % 8


def conditional(env: RankEnv, firsts: list[int], decay: float) -> dict[str, Any]:
    """One AdamW step in which rank r takes the branch of firsts[r]."""
    config = SGD | dict(optimizer=dict(type="adamw", lr=0.1, weight_decay=decay))
    with env.launch(config) as context:
        torch.manual_seed(0)
        engine = cl.initialize(Branches(), context=context)
        before = engine.full_state_dict()
        engine.train_step(batch_of(firsts[env.rank]))
        after = engine.full_state_dict()
        state = engine.full_optimizer_state()
        steps = {name: int(values["step"]) for name, values in state.items()}
        return dict(moved={n: not torch.equal(before[n], after[n]) for n in before}, steps=steps, after=after)


def test_a_parameter_that_no_rank_used_is_left_alone_and_one_that_some_rank_used_moves_on_all() -> None:
    for out in run_world(conditional, 2, [0, 2], 0.5):
        assert out["moved"]["left.weight"] and not out["moved"]["right.weight"] and not out["moved"]["unused"]
        assert not out["moved"]["scale"] and "scale" not in out["steps"]
        assert (
            out["steps"]["left.weight"] == 1 and out["steps"]["right.weight"] == out["steps"]["unused"] == 0
        )
    first, second = run_world(conditional, 2, [0, 1], 0.5)
    assert first["moved"]["left.weight"] and first["moved"]["right.weight"]
    assert all(torch.equal(first["after"][name], second["after"][name]) for name in first["after"])


def not_finite(env: RankEnv) -> dict[str, Any]:
    with env.launch(SGD) as context:
        torch.manual_seed(0)
        engine = cl.initialize(Branches(), context=context, criterion=_inf_on_rank_1(env.rank))
        before = engine.full_state_dict()
        seen: list[cl.engine.StepResult] = []
        engine.on_step(seen.append)
        result = engine.train_step(batch_of(0))
        assert seen == [result]
        same = all(torch.equal(value, before[name]) for name, value in engine.full_state_dict().items())
        return dict(skipped=result.skipped, loss=result.loss.item(), same=same, step=result.step)


def _inf_on_rank_1(rank: int) -> Any:
    def criterion(logits: Tensor, labels: Tensor) -> tuple[Tensor, int]:
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
        return (loss * torch.inf if rank == 1 else loss), labels.numel()

    return criterion


def test_a_step_that_is_not_finite_on_one_rank_changes_nothing_on_any() -> None:
    for out in run_world(not_finite, 2):
        assert out["skipped"] and out["same"] and out["step"] == 1 and out["loss"] == float("inf")


CRITERION_CASE = Case(ragged=True, steps=1, global_batch=5)


def _sum_and_count(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    loss = nn.functional.cross_entropy(
        logits.flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="sum"
    )
    return loss, (labels != -100).sum()


def _mean(logits: Tensor, labels: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100)


def _wrong(logits: Tensor, labels: Tensor) -> Tensor:
    return logits


CRITERIA = {"sum and count": _sum_and_count, "mean": _mean}


def with_criterion(env: RankEnv, kind: str) -> dict[str, Tensor]:
    with env.launch(CRITERION_CASE.full_config) as context:
        engine = cl.initialize(CRITERION_CASE.model, context=context, criterion=CRITERIA[kind])
        inputs, labels = CRITERION_CASE.batch(0)
        cut = context.local_batch(CRITERION_CASE.global_batch)
        engine.forward_backward((inputs[cut], labels[cut]))
        return engine.full_gradients()


@pytest.mark.parametrize("kind", CRITERIA)
def test_a_custom_criterion_is_weighted_by_its_tokens(kind: str) -> None:
    (truth,) = serial_run(CRITERION_CASE)
    whole = sum(float(g.norm()) ** 2 for g in truth.gradients.values()) ** 0.5
    for gradients in run_world(with_criterion, 2, kind):
        for name, expected in truth.gradients.items():
            assert relative_error(gradients[name], expected, whole) < 1e-10, name


def own_loop(env: RankEnv, by_count: bool, case: Case = CRITERION_CASE) -> dict[str, Any]:
    """The Colossal-AI manner: engine(x), backward, step; two calls a step when counts are given."""
    with env.launch(case.full_config) as context:
        engine = cl.initialize(case.model, context=context)
        inputs, labels = case.batch(0)
        cut = context.local_batch(case.global_batch)
        engine.zero_grad()
        parts = 2 if by_count else 1
        for x, y in zip(inputs[cut].tensor_split(parts), labels[cut].tensor_split(parts), strict=True):
            loss = _mean(engine(x), y)
            engine.backward(loss, int((y != -100).sum()) if by_count else None)
        result = engine.step()
        state = engine.full_state_dict()
        return dict(state={n: state[n] for n, _ in engine.model.named_parameters()}, tokens=result.tokens)


def test_a_users_own_loop_with_counts_is_the_serial_step() -> None:
    (truth,) = serial_run(CRITERION_CASE)
    tokens = int((CRITERION_CASE.batch(0)[1] != -100).sum())
    for out in run_world(own_loop, 2, True):
        assert out["tokens"] == tokens
        for name, expected in truth.parameters.items():
            assert relative_error(out["state"][name], expected, 1.0) < 1e-10, name


def half_labelled(env: RankEnv, as_tensor: bool) -> dict[str, Any]:
    """A step whose first samples, all of rank 0 of two, have no label."""
    with env.launch(CRITERION_CASE.full_config) as context:
        engine = cl.initialize(CRITERION_CASE.model, context=context)
        inputs, labels = CRITERION_CASE.batch(0)
        labels[: (len(labels) + 1) // 2] = -100
        cut = context.local_batch(CRITERION_CASE.global_batch)
        count = (labels[cut] != -100).sum()
        logits = engine(inputs[cut])
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), labels[cut].flatten())
        engine.backward(loss, count if as_tensor else int(count))
        return dict(gradients=engine.full_gradients(), loss=float(engine.step().loss))


@pytest.mark.parametrize("as_tensor", [False, True])
def test_a_rank_whose_count_is_0_adds_no_mean_of_nothing(as_tensor: bool) -> None:
    (truth,) = run_world(half_labelled, 1, as_tensor)
    for out in run_world(half_labelled, 2, as_tensor):
        assert out["loss"] == pytest.approx(truth["loss"], rel=1e-12)
        for name, expected in truth["gradients"].items():
            assert relative_error(out["gradients"][name], expected, 1.0) < 1e-10, name


def after_close(env: RankEnv) -> list[str]:
    """What each call says once the engine is closed."""
    case, said = Case(world_size=1), []
    with env.launch(case.full_config) as context:
        engine = cl.initialize(case.model, context=context)
        engine.train_step(case.batch(0))
        engine.close()
        calls = (engine.train_step, engine.forward_backward, lambda batch: engine(batch[0]))
        for call in calls:
            with pytest.raises(ValueError) as caught:
                call(case.batch(1))
            said.append(str(caught.value))
    return said


def test_a_closed_engine_refuses_to_train() -> None:
    (said,) = run_world(after_close, 1)
    assert len(said) == 3 and all("this engine is closed; make a new one" in words for words in said)


def both_loops(env: RankEnv, case: Case) -> dict[str, Tensor]:
    """How far the weights after two steps of a user's own loop are from those of `train_step`, in all."""
    found = []
    for is_own in (False, True):
        with env.launch(case.full_config) as context:
            engine = cl.initialize(case.model, context=context)
            for number in range(2):
                cut = context.local_batch(case.global_batch)
                inputs, labels = (part[cut] for part in case.batch(number))
                if not is_own:
                    engine.train_step((inputs, labels))
                    continue
                parts = context.config.gradient_accumulation
                for x, y in zip(inputs.tensor_split(parts), labels.tensor_split(parts), strict=True):
                    outputs = engine(x)
                    logits = getattr(outputs, "logits", outputs)
                    assert logits.shape[:2] == x.shape
                    count = int((y != -100).sum())
                    total = nn.functional.cross_entropy(logits.flatten(0, 1), y.flatten(), reduction="sum")
                    engine.backward(total / max(count, 1), count=count)
                engine.step()
            found.append(engine.full_state_dict())
            engine.close()
    return {name: relative_error(found[1][name], value, 1.0) for name, value in found[0].items()}


@pytest.mark.parametrize(
    "case",
    [
        Case(world_size=4, global_batch=2),
        Case(world_size=4, global_batch=2, dropout=0.1, config=dict(zero=dict(stage=3))),
        Case(world_size=4, global_batch=2, family="hf-gpt2"),
        Case(world_size=4, global_batch=2, family="hf-llama", tied=False, config=dict(zero=dict(stage=3))),
        Case(world_size=4, global_batch=1, family="hf-gpt2", tensor=2),
    ],
    ids=["our GPT", "sharded, with dropout", "hf-gpt2", "hf-llama, sharded", "hf-gpt2, tensor 2"],
)
def test_a_rank_without_samples_takes_part_in_a_users_own_loop(case: Case) -> None:
    for errors in run_world(both_loops, case.world_size, case):
        assert max(errors.values()) < 1e-12


def test_every_micro_batch_of_a_users_own_loop_has_dropout_masks_of_its_own() -> None:
    case = Case(global_batch=5, tensor=2, dropout=0.3, config=dict(gradient_accumulation=2))
    for errors in run_world(both_loops, case.world_size, case):
        assert max(errors.values()) < 1e-12


def test_a_users_own_loop_without_counts_weighs_data_ranks_equally() -> None:
    """Its labels are not seen, those that count are not equally many on both ranks."""
    case = replace(CRITERION_CASE, global_batch=6)
    model = case.model().double()
    named = dict(model.named_parameters())
    with torch.no_grad():
        for name, value in initial_values(case).items():
            named[name].copy_(value)
    inputs, labels = case.batch(0)
    means = [_mean(model(x), y) for x, y in zip(inputs.tensor_split(2), labels.tensor_split(2), strict=True)]
    (sum(means) / 2).backward()
    torch.optim.SGD(model.parameters(), lr=0.5).step()
    for out in run_world(own_loop, 2, False, case):
        assert out["tokens"] == 0
        for name, expected in named.items():
            assert relative_error(out["state"][name], expected.detach(), 1.0) < 1e-10, name


def evaluates(env: RankEnv) -> float:
    case = Case(ragged=True, dropout=0.3, global_batch=5)
    with env.launch(case.full_config) as context:
        engine = cl.initialize(case.model, context=context)
        cut = context.local_batch(5)
        inputs, labels = case.batch(0)
        loss = engine.eval_step((inputs[cut], labels[cut]))
        assert engine.model.training
        return loss.item()


def test_evaluation_is_the_mean_over_all_tokens_without_dropout() -> None:
    case = Case(ragged=True, dropout=0.0, global_batch=5, steps=1)
    expected = serial_run(case)[0].loss
    for world_size in (1, 2, 4):
        assert run_world(evaluates, world_size) == pytest.approx([expected] * world_size, rel=1e-12)


def bf16_errors(env: RankEnv) -> dict[str, float]:
    """Distance of the bf16 gradient from the float64 truth, as a share of its norm: ours, and a plain bf16 run's."""
    case = Case(config=dict(precision="bf16"), steps=1)
    exact = Case(steps=1)
    truth = serial_run(exact)[0].gradients
    with env.launch(case.full_config) as context:
        engine = cl.initialize(case.model, context=context)
        assert {p.dtype for p in engine.model.parameters()} == {torch.bfloat16}
        assert engine.full_state_dict()["token.weight"].dtype == torch.float32
        inputs, labels = case.batch(0)
        cut = context.local_batch(case.global_batch)
        engine.forward_backward((inputs[cut], labels[cut]))
        ours = {name: g.double() for name, g in engine.full_gradients().items()}
    model = case.model()
    named = dict(model.named_parameters())
    with torch.no_grad():
        for name, value in initial_values(exact).items():
            named[name].copy_(value)
    model.bfloat16()
    _mean(model(inputs).float(), labels).backward()
    whole = sum(float(g.norm()) ** 2 for g in truth.values()) ** 0.5

    def distance(gradients: dict[str, Tensor]) -> float:
        return sum(float((gradients[n] - truth[n]).norm()) ** 2 for n in truth) ** 0.5 / whole

    return dict(ours=distance(ours), plain=distance({n: p.grad.double() for n, p in named.items()}))


def test_bf16_is_no_further_from_the_truth_than_a_plain_bf16_run() -> None:
    for world_size in (1, 2):
        for errors in run_world(bf16_errors, world_size):
            assert 0 < errors["ours"] <= 1.5 * errors["plain"], errors


def repeats(env: RankEnv) -> list[float]:
    case = Case(dropout=0.2, config=dict(precision="fp32", clip_grad_norm=0.1), steps=4)
    losses = []
    with env.launch(case.full_config) as context:
        engine = cl.initialize(case.model, context=context)
        for number in range(case.steps):
            inputs, labels = case.batch(number)
            cut = context.local_batch(case.global_batch)
            result = engine.train_step((inputs[cut], labels[cut]))
            losses += [result.loss.item(), result.grad_norm]
    return losses


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_the_same_mesh_twice_gives_the_same_bits(world_size: int) -> None:
    assert run_world(repeats, world_size) == run_world(repeats, world_size)


def loads(env: RankEnv) -> str:
    case = Case()
    with env.launch(case.full_config) as context:
        engine = cl.initialize(case.model, context=context)
        state = engine.full_state_dict()
        assert set(state) == set(case.model().state_dict())
        doubled = {name: value * 2 for name, value in state.items()}
        engine.load_full_state_dict(doubled)
        assert all(torch.equal(v, doubled[n]) for n, v in engine.full_state_dict().items())
        del doubled["norm.bias"]
        doubled["token.weight"] = torch.zeros(1, 2)
        doubled["extra"] = torch.zeros(3)
        try:
            engine.load_full_state_dict(doubled)
        except ValueError as error:
            assert all(torch.equal(v, state[n] * 2) for n, v in engine.full_state_dict().items())
            return str(error)
    return ""


def test_loading_lists_every_fault_and_then_changes_nothing() -> None:
    (text,) = run_world(loads, 1)
    for word in (
        "missing: norm.bias",
        "unexpected: extra (3,)",
        "shape: token.weight is (1, 2), the model has (37, 16)",
    ):
        assert word in text


def memory(env: RankEnv, precision: str) -> list[tuple[str, int, int]]:
    case = Case(config=dict(precision=precision, optimizer=dict(type="adamw", lr=1e-3)))
    with env.launch(case.full_config) as context:
        engine = cl.initialize(case.model, context=context)
        return [(row.kind, row.now_bytes, row.forecast_bytes) for row in engine.memory_report()]


@pytest.mark.parametrize(
    ("precision", "per_parameter"),
    [("fp32", (4, 0, 4, 8, 0)), ("bf16", (2, 4, 4, 8, 0)), ("fp64", (8, 0, 8, 16, 0))],
)
def test_memory_of_each_kind_is_the_formula(precision: str, per_parameter: tuple[int, ...]) -> None:
    (rows,) = run_world(memory, 1, precision)
    assert [kind for kind, _, _ in rows] == ["weights", "masters", "gradients", "optimizer", "staging"]
    numel = rows[0][1] // per_parameter[0]
    assert numel >= sum(v.numel() for v in initial_values(Case()).values())
    for (_, now, forecast), each in zip(rows, per_parameter, strict=True):
        assert now == forecast == numel * each


def misused(env: RankEnv, what: str) -> None:
    with env.launch(SGD) as context:
        torch.manual_seed(env.rank if what == "differs" else 0)
        if what == "differs":
            cl.initialize(Branches(), context=context)
        if what == "frozen":
            cl.initialize(Branches().requires_grad_(False), context=context)
        engine = cl.initialize(Branches(), context=context, criterion=_wrong if what == "criterion" else None)
        if what == "step":
            engine.step()
        if what == "twice":
            engine.forward_backward(batch_of(0))
        if what == "gradients":
            engine.full_gradients()
        if what == "counts":
            engine.backward(_mean(engine(batch_of(0)[0]), batch_of(0)[1]), 4)
            engine.backward(_mean(engine(batch_of(0)[0]), batch_of(0)[1]))
        engine.forward_backward(batch_of(0))


MISUSES = {
    "differs": "embedding.weight on ranks \\[1\\] differs",
    "frozen": "nothing to train",
    "criterion": "legal: a tuple \\(sum, count\\)",
    "step": "there are no gradients",
    "twice": "were not used",
    "gradients": "after forward_backward",
    "counts": "in all or none",
}


@pytest.mark.parametrize("what", MISUSES)
def test_misuse_is_refused_in_words(what: str) -> None:
    with pytest.raises(WorldError, match=MISUSES[what]):
        run_world(misused, 2 if what == "differs" else 1, what)


# ---- an engine that nobody has any more ----

MADE: list[ref[GradientHooks]] = []
"""All hooks of this process: those of runs without tensors, which plan, too."""


def left_open(env: RankEnv, case: Case, steps: int) -> tuple[int, int]:
    """Steps of an engine that is never closed; how many hooks were made, and how many are there when it is dropped."""
    init = GradientHooks.__init__

    def noted(hooks: GradientHooks, *args: Any) -> None:
        init(hooks, *args)
        MADE.append(ref(hooks))

    MADE.clear()
    with pytest.MonkeyPatch.context() as patch, env.launch(case.full_config) as context:
        patch.setattr(GradientHooks, "__init__", noted)
        engine, cut = start(case, context), context.local_batch(case.global_batch)
        model = ref(engine.model)
        for step in range(steps):
            inputs, labels = case.batch(step)
            engine.train_step((inputs[cut], labels[cut]))
    del engine
    gc.collect()
    assert model() is None, "the model"
    return len(MADE), sum(hooks() is not None for hooks in MADE)


@pytest.mark.parametrize("steps", [0, 2])
@pytest.mark.parametrize(
    ("stage", "memory", "pipeline"),
    [
        (0, {}, 1),
        (2, dict(placement="static", host_fraction=dict(optimizer=1.0)), 1),
        (3, {}, 1),
        (3, dict(placement="auto", device_budget="500KB"), 1),
        (1, {}, dict(size=2, schedule="zb-h1", micro_batches=2)),
    ],
)
def test_an_engine_that_was_not_closed_leaves_nothing_behind(
    stage: int, memory: dict[str, Any], pipeline: Any, steps: int
) -> None:
    """Its hooks hang on parameters where the garbage collector does not look."""
    config = dict(zero=dict(stage=stage), optimizer=dict(type="adamw", lr=0.1), memory=memory)
    case = replace(Case(pipeline=pipeline, config=config), global_batch=4)
    for made, left in run_world(left_open, 2, case, steps):
        assert made > 0 and left == 0
