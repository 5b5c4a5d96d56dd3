"""Every optimizer of the table, and a user's own, steps as the plain one does; schedules; what is refused."""

from __future__ import annotations

import math
import random
import warnings
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler as torch_schedules

import colossal_lite as cl
from colossal_lite.config.schema import LRSchedulerConfig
from colossal_lite.kernels import TORCH
from colossal_lite.numerics.lr_schedules import learning_rate_factor
from colossal_lite.numerics.optimizers import OPTIMIZERS, Group, rule_of
from tests.shared.parity import Case, assert_parity
from tests.shared.plain_optimizers import PLAIN
from tests.shared.pool import RankEnv, WorldError, run_world

# Adaptive steps enlarge rounding where a true gradient is zero, as a key bias has it: Llama has no biases.
NOT_MATRICES = [dict(match="*norm*", type="adamw", lr=1e-2, betas=(0.8, 0.9))]
CONFIGS: dict[str, Case] = {
    "sgd": Case(
        config=dict(optimizer=dict(type="sgd", lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1))
    ),
    "adam": Case(
        "llama", config=dict(optimizer=dict(type="adam", lr=1e-2, weight_decay=0.1, betas=(0.8, 0.9)))
    ),
    "adamw": Case(config=dict(optimizer=dict(type="adamw", lr=1e-2, weight_decay=0.1, eps=1e-6))),
    "lion": Case("llama", config=dict(optimizer=dict(type="lion", lr=1e-2, weight_decay=0.1))),
    "lamb": Case(config=dict(optimizer=dict(type="lamb", lr=1e-2, weight_decay=0.1))),
    "muon": Case(
        "llama", config=dict(optimizer=dict(type="muon", lr=0.1, weight_decay=0.1, groups=NOT_MATRICES))
    ),
}


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("name", CONFIGS)
def test_it_steps_as_the_plain_one(name: str, world_size: int) -> None:
    assert CONFIGS.keys() == OPTIMIZERS.keys()
    case = CONFIGS[name]
    config = dict(case.config) | dict(clip_grad_norm=0.5, gradient_accumulation=2)
    assert_parity(case, config=config, world_size=world_size, ragged=True, steps=4)


GROUPS = [
    dict(match="*.bias", weight_decay=0.0),
    dict(match="blocks.0.*", lr=0.5),
    dict(match="token*", type="sgd"),
]


def test_each_group_has_its_own_settings_and_type() -> None:
    optimizer = dict(type="adamw", lr=1e-2, weight_decay=0.3, groups=GROUPS)
    assert_parity(Case(config=dict(optimizer=optimizer)))


def _own(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.NAdam(params, lr=1e-2, weight_decay=0.1)


OWN = {
    "nadam": _own,
    "two groups": partial(torch.optim.Adadelta, lr=0.5),
    "rprop": partial(torch.optim.RMSprop, lr=1e-2, momentum=0.9),
}


@pytest.mark.parametrize("name", OWN)
def test_an_optimizer_of_ones_own_steps_as_in_a_plain_loop(name: str) -> None:
    config = dict(clip_grad_norm=0.5, gradient_accumulation=2)
    assert_parity(Case("llama", config=config, own=OWN[name], ragged=True, steps=4))


def test_an_optimizer_of_ones_own_follows_the_schedule() -> None:
    schedule = dict(type="linear", total_steps=5, final_ratio=0.2)
    plain = partial(torch_schedules.LinearLR, start_factor=1.0, end_factor=0.2, total_iters=5)
    assert_parity(Case("llama", config=dict(lr_scheduler=schedule), own=_own, schedule=plain))


def own_in_bf16(env: RankEnv) -> dict[str, Any]:
    case = Case(config=dict(precision="bf16"), own=_own)
    with env.launch(case.full_config) as context:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            engine = cl.initialize(case.model, context=context, optimizer=_own)
        before = engine.full_state_dict()
        for number in range(2):
            result = engine.train_step(case.batch(number))
        state = engine.full_optimizer_state()["token.weight"]
        rows = {row.kind: row.now_bytes for row in engine.memory_report()}
        value = dict(engine.model.named_parameters())["token.weight"]
        master = engine.full_state_dict()["token.weight"]
        return dict(
            lr=result.lr,
            said=[str(w.message) for w in caught],
            moved=not torch.equal(master, before["token.weight"]),
            published=torch.equal(master.bfloat16(), value.cpu()),
            state={name: (tuple(t.shape), t.dtype) for name, t in state.items()},
            bytes=rows["optimizer"],
            elements=sum(p.numel() for p in engine.model.parameters()),
        )


def test_an_optimizer_of_ones_own_updates_the_master_weights() -> None:
    (out,) = run_world(own_in_bf16, 1)
    assert out["lr"] == 1e-2 and out["moved"] and out["published"]
    assert out["state"]["exp_avg"] == ((37, 16), torch.float32)
    assert out["bytes"] >= 8 * out["elements"]
    assert any("config.optimizer has no effect" in line for line in out["said"])


class Noisy(torch.optim.SGD):
    """Gradient descent with noise, as Langevin dynamics have it. Its size is drawn when the optimizer is made."""

    def __init__(self, given: Any, lr: float) -> None:
        super().__init__(given, lr)
        self.size = 1e-2 * float(torch.rand(()))

    def step(self, closure: Any = None) -> Any:
        super().step(closure)
        with torch.no_grad():
            for parameter in self.param_groups[0]["params"]:
                parameter.add_(torch.randn_like(parameter), alpha=self.size * random.random())


def with_noise(env: RankEnv) -> dict[str, torch.Tensor]:
    case = Case()
    torch.manual_seed(env.rank)
    random.seed(env.rank)
    with env.launch(case.full_config) as context:
        engine = cl.initialize(case.model, context=context, optimizer=lambda given: Noisy(given, lr=0.1))
        for step in range(2):
            engine.train_step(context.local_batch(case.batch(step)))
        return engine.full_state_dict()


def test_an_optimizer_that_draws_draws_alike_on_all_ranks() -> None:
    """Before, each rank drew its own noise, and trained weights of its own from then on."""
    (alone,) = run_world(with_noise, 1)
    for weights in run_world(with_noise, 2):
        for name, weight in weights.items():
            torch.testing.assert_close(weight, alone[name], rtol=0, atol=1e-10)


class Spare(nn.Module):
    """Words to logits, and a parameter that no forward uses."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.spare = nn.Embedding(7, 7), nn.Parameter(torch.ones(3))

    def forward(self, ids: torch.Tensor) -> Any:
        return self.words(ids)


def test_an_optimizer_of_ones_own_leaves_a_parameter_without_a_gradient_as_torch_does() -> None:
    made: list[torch.optim.Optimizer] = []

    def own(params: list[nn.Parameter]) -> torch.optim.Optimizer:
        made.append(torch.optim.AdamW(params, lr=0.1, weight_decay=0.5))
        return made[0]

    ids = torch.arange(6).view(2, 3)
    with cl.launch(dict(precision="fp64", timeout_s=30), rank=0, world_size=1) as context:
        engine = cl.initialize(Spare(), context=context, optimizer=own)
        for _ in range(2):
            engine.train_step((ids, ids + 1))
        weights = engine.full_state_dict()
    assert torch.equal(weights["spare"], torch.ones(3, dtype=torch.float64)) and len(made[0].state) == 1


def _continued_by_hand(env: RankEnv, folder: str) -> tuple[str, list[float]]:
    """What `save` says of an optimizer of one's own; the losses of four steps, the last two on a second engine that
    continues by what the message calls legal."""
    made: list[torch.optim.Optimizer] = []

    def own(params: list[nn.Parameter]) -> torch.optim.Optimizer:
        made.append(_adamw(params))
        return made[-1]

    case, said = Case("llama", steps=4), ""
    losses: list[float] = []
    weights: dict[str, torch.Tensor] = {}
    with env.launch(case.full_config) as context:
        for steps in (range(2), range(2, 4)):
            engine = cl.initialize(case.model, context=context, optimizer=own)
            if made[1:]:
                engine.load_full_state_dict(weights)
                made[1].load_state_dict(made[0].state_dict())
            for step in steps:
                result = engine.train_step(context.local_batch(case.batch(step)))
                losses.append(float(result.loss))
            weights = engine.full_state_dict()
            try:
                engine.save(folder)
            except ValueError as error:
                said = str(error)
            engine.close()
    return said, losses


def test_checkpoints_of_an_optimizer_of_ones_own_are_refused_with_a_way_that_is_exact(tmp_path: Any) -> None:
    """Before, the message did not say that dropout and schedules begin anew on that way."""
    ((said, losses),) = run_world(_continued_by_hand, 1, str(tmp_path))
    assert "Without dropout, lr_scheduler and other draws" in said and "counts its steps from 0" in said
    (whole,) = run_world(_unbroken, 1)
    assert losses == pytest.approx(whole, rel=1e-12, abs=0)


def _adamw(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=0.05)


def _unbroken(env: RankEnv) -> list[float]:
    case = Case("llama", steps=4)
    with env.launch(case.full_config) as context:
        engine = cl.initialize(case.model, context=context, optimizer=_adamw)
        return [float(engine.train_step(context.local_batch(case.batch(i))).loss) for i in range(4)]


def refused(env: RankEnv, what: str) -> None:
    config: dict[str, Any] = {}
    own: Any = None
    if what == "no callable":
        own = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    if what == "no optimizer":
        own = len
    if what == "closure":
        own = torch.optim.LBFGS
    if what == "some only":
        own = _some_only
    if what == "foreign":
        own = _foreign
    if what == "muon":
        config = dict(optimizer=dict(type="muon", lr=0.1))
    if what == "group":
        config = dict(optimizer=dict(type="sgd", lr=0.1, groups=[dict(match="nothing.*", lr=1.0)]))
    if what == "lamb, cut":
        config = dict(optimizer=dict(type="lamb", lr=0.1))
    if what == "muon, cut":
        others = [dict(match=match, type="adamw") for match in ("*norm*", "*bias")]
        config = dict(optimizer=dict(type="muon", lr=0.1, groups=others))
    if what == "own, cut":
        own = _own
    case = Case(config=config, tensor=env.world_size)
    with env.launch(case.full_config) as context:
        cl.initialize(case.model, context=context, optimizer=own)


def _some_only(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(params[1:], lr=1.0)


def _foreign(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD([*params, nn.Parameter(torch.zeros(1))], lr=1.0)


REFUSED = {
    "no callable": "SGD is not callable",
    "no optimizer": "returned int",
    "closure": "LBFGS needs a closure",
    "some only": "lacks token.weight",
    "foreign": "1 parameters that it was not given",
    "muon": r"blocks.0.norm1.weight \(16,\), \S+ \(16,\), \S+ \(\d+,\) and \d+ more: muon updates matrices only",
    "group": "no trainable parameter has such a name",
    "lamb, cut": r"token.weight, \S+, \S+ and \d+ more: lamb needs whole tensors, and each rank holds a part",
    "muon, cut": r"token.weight, \S+, \S+ and \d+ more: muon needs whole tensors, and each rank holds a part",
    "own, cut": r"no tensor axis \(now 2\)",
}


@pytest.mark.parametrize("what", REFUSED)
def test_it_is_refused_in_words(what: str) -> None:
    with pytest.raises(WorldError, match=REFUSED[what]):
        run_world(refused, 2 if "cut" in what else 1, what)


# ---------------------------------------------------------------------------------------- rules and schedules


@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("shape", [(24, 8), (8, 24)])
def test_muon_in_sixteen_bits_is_torchs_own_to_the_bit(shape: tuple[int, int], nesterov: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    start, *gradients = torch.randn(5, *shape, generator=generator)
    theirs = nn.Parameter(start.clone())
    optimizer = torch.optim.Muon([theirs], lr=0.1, weight_decay=0.2, momentum=0.9, nesterov=nesterov)
    group = Group("*", "muon", 0.1, (0.0, 0.0), 1.0, 0.2, 0.9, nesterov)
    ours, state = start.clone(), {"momentum_buffer": torch.zeros(shape)}
    for step, gradient in enumerate(gradients, 1):
        theirs.grad = gradient.clone()
        optimizer.step()
        rule_of(group, torch.bfloat16).update(
            TORCH, group, ours, gradient.clone(), state, step=step, lr=0.1, grad_scale=1.0
        )
    assert torch.equal(ours, theirs.detach())


SETTINGS: dict[str, dict[str, Any]] = {
    "sgd": dict(momentum=0.6, weight_decay=0.3),
    "sgd, nesterov": dict(momentum=0.6, nesterov=True, weight_decay=0.3),
    "sgd, plain": dict(weight_decay=0.3),
    "adam": dict(betas=(0.6, 0.7), eps=0.1, weight_decay=0.3),
    "adamw": dict(betas=(0.6, 0.7), eps=0.1, weight_decay=0.3),
    "lion": dict(betas=(0.6, 0.7), weight_decay=0.3),
    "lamb": dict(betas=(0.6, 0.7), eps=0.1, weight_decay=0.3),
    "muon": dict(momentum=0.6, nesterov=False, weight_decay=0.3),
    "muon, nesterov": dict(momentum=0.6, nesterov=True, weight_decay=0.3),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_each_rule_reads_every_setting_as_the_plain_one_does(name: str) -> None:
    """No value here is a default, so one that is fixed in the code shows."""
    kind, settings = name.partition(",")[0], SETTINGS[name]
    generator = torch.Generator().manual_seed(0)
    start, *gradients = torch.randn(5, 6, 4, generator=generator, dtype=torch.float64)
    theirs, ours = nn.Parameter(start.clone()), start.clone()
    plain = PLAIN[kind]([theirs], lr=0.05, **settings)
    all_of = dict(betas=(0.9, 0.999), eps=1e-8, momentum=0.0, nesterov=False) | settings
    group = Group(match="*", type=kind, lr=0.05, **all_of)
    rule = rule_of(group, torch.float64)
    state = {each: torch.zeros_like(start) for each in rule.states}
    for step, gradient in enumerate(gradients, 1):
        theirs.grad = gradient.clone()
        plain.step()
        rule.update(TORCH, group, ours, gradient * 3, state, step=step, lr=0.05, grad_scale=3.0)
    torch.testing.assert_close(ours, theirs.detach(), rtol=1e-12, atol=1e-12)


def test_muon_leaves_a_matrix_without_a_gradient_as_the_plain_one_does() -> None:
    start = torch.randn(4, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    theirs, ours = nn.Parameter(start.clone()), start.clone()
    theirs.grad = torch.zeros_like(start)
    PLAIN["muon"]([theirs], lr=0.1, weight_decay=0.2).step()
    group = Group("*", "muon", 0.1, (0.0, 0.0), 1.0, 0.2, 0.95, True)
    state = {"momentum_buffer": torch.zeros_like(start)}
    rule_of(group, torch.float64).update(
        TORCH, group, ours, torch.zeros_like(start), state, step=1, lr=0.1, grad_scale=1.0
    )
    assert torch.equal(ours, theirs.detach()) and torch.equal(ours, start * 0.98)


def test_a_parameter_of_zeros_leaves_lamb_with_a_ratio_of_one() -> None:
    group = Group("*", "lamb", 0.1, (0.9, 0.999), 1e-6, 0.0, 0.0, False)
    for start, gradient in ((0.0, 3.0), (2.0, 0.0)):
        weight = torch.full((4,), start)
        state = {name: torch.zeros(4) for name in OPTIMIZERS["lamb"].states}
        OPTIMIZERS["lamb"].update(
            TORCH, group, weight, torch.full((4,), gradient), state, step=1, lr=0.1, grad_scale=1.0
        )
        expected = start - 0.1 * (1.0 if gradient else 0.0)
        assert torch.allclose(weight, torch.full((4,), expected), atol=1e-6)


TOTAL, FINAL, START = 40, 0.1, 0.04
THEIRS: dict[str, Any] = {
    "cosine": partial(torch_schedules.CosineAnnealingLR, T_max=TOTAL, eta_min=FINAL),
    "linear": partial(torch_schedules.LinearLR, start_factor=1.0, end_factor=FINAL, total_iters=TOTAL),
    "polynomial": partial(torch_schedules.PolynomialLR, total_iters=TOTAL, power=2.0),
    "one_cycle": partial(
        torch_schedules.OneCycleLR, max_lr=1.0, total_steps=TOTAL + 1, pct_start=11 / (TOTAL + 1),
        div_factor=1 / START, final_div_factor=START / FINAL,
    ),
}  # fmt: skip
OURS: dict[str, Any] = {
    "cosine": dict(final_ratio=FINAL),
    "linear": dict(final_ratio=FINAL),
    "polynomial": dict(power=2.0),
    "one_cycle": dict(final_ratio=FINAL, start_ratio=START, warmup_steps=10),
    "wsd": dict(final_ratio=FINAL, warmup_steps=5, decay_steps=10),
}


@pytest.mark.parametrize("kind", THEIRS)
def test_a_schedule_is_torchs_own(kind: str) -> None:
    config = LRSchedulerConfig(type=kind, total_steps=TOTAL, **OURS[kind])
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    schedule = THEIRS[kind](optimizer)
    for step in range(TOTAL + 1):
        expected = optimizer.param_groups[0]["lr"]
        assert learning_rate_factor(config, step) == pytest.approx(expected, rel=1e-9, abs=1e-12), step
        if step < TOTAL:
            optimizer.step()
            schedule.step()


def test_warm_up_stable_decay_is_three_lines() -> None:
    config = LRSchedulerConfig(type="wsd", total_steps=TOTAL, **OURS["wsd"])
    factors = [learning_rate_factor(config, step) for step in range(TOTAL + 5)]
    assert factors[:5] == pytest.approx([n / 6 for n in range(1, 6)])
    assert set(factors[5:31]) == {1.0}
    assert factors[30:41] == pytest.approx([1.0 - n * (1.0 - FINAL) / 10 for n in range(11)])
    assert set(factors[40:]) == {FINAL}


@pytest.mark.parametrize("warmup", [0, 1, 10])
@pytest.mark.parametrize("kind", OURS)
def test_a_schedule_rises_to_one_falls_to_its_end_and_never_jumps(kind: str, warmup: int) -> None:
    options = OURS[kind] | dict(warmup_steps=warmup)
    config = LRSchedulerConfig(type=kind, total_steps=TOTAL, **options)
    factors = [learning_rate_factor(config, step) for step in range(TOTAL + 10)]
    assert factors[warmup] == 1.0 and max(factors) == 1.0 and min(factors) >= 0.0
    final = options.get("final_ratio", 0.0)
    assert all(factor == pytest.approx(final, abs=1e-12) for factor in factors[TOTAL:])
    rises = [b - a for a, b in zip(factors, factors[1:], strict=False)]
    assert all(rise > 0 for rise in rises[:warmup]) and all(rise <= 1e-12 for rise in rises[warmup:])
    steepest = math.pi / 2 / min(config.decay_steps or TOTAL, TOTAL - warmup) * max(1.0, config.power)
    assert all(-rise <= steepest for rise in rises[warmup:])


def test_a_constant_schedule_is_one() -> None:
    assert {learning_rate_factor(LRSchedulerConfig(), step) for step in range(9)} == {1.0}


def scheduled(env: RankEnv) -> list[float]:
    case = Case(config=dict(lr_scheduler=dict(type="polynomial", total_steps=4, power=2.0)))
    with env.launch(case.full_config) as context:
        engine = cl.initialize(case.model, context=context)
        return [engine.train_step(case.batch(number)).lr for number in range(5)]


def test_a_step_says_the_learning_rate_it_took() -> None:
    assert run_world(scheduled, 1) == [pytest.approx([0.5 * (1 - n / 4) ** 2 for n in range(5)])]


def grouped(env: RankEnv) -> float:
    case = Case(config=dict(optimizer=dict(type="sgd", lr=0.1, groups=[dict(match="*bias", lr=0.7)])))
    with env.launch(case.full_config) as context:
        return cl.initialize(case.model, context=context).train_step(case.batch(0)).lr


def test_the_learning_rate_of_a_step_is_that_of_parameters_in_no_group() -> None:
    assert run_world(grouped, 1) == [0.1]


def test_the_schedule_of_a_run_is_the_plain_loops() -> None:
    schedule = dict(type="cosine", total_steps=4, final_ratio=0.1)
    plain = partial(torch_schedules.CosineAnnealingLR, T_max=4, eta_min=0.05)
    assert_parity(Case(config=dict(lr_scheduler=schedule), schedule=plain, steps=5))
