"""The net of drawn cases: it draws the same twice, reads back what it prints, and finds a fault that is planted."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from colossal_lite.config.config import Config
from colossal_lite.data.batch_checks import StatedSizes, check_batch
from tests import draws
from tests.draws import outcome_of
from tests.house.drawn_faults import FAULTS
from tests.shared.drawn_cases import STEPS, DrawnCase, case_of, draw
from tests.shared.drawn_runs import Ended, PlainLoop, Seen, Truth, at_own_weights, plain_run, refused_batch
from tests.shared.drawn_signs import LionSigns, wrong_beside_signs
from tests.shared.drawn_verdicts import follows_rounding, judge_end, masked, unlike, wrong
from tests.shared.places import place

PLAIN: dict[str, Any] = dict(
    world=2, seed=1,
    model=dict(kind="gpt", sizes=dict(vocabulary=16, layers=1, heads=2, width=8, sequence=4, tied=False)),
    batch=dict(samples=3, labels="ragged", form="tuple", tokens=4, mask="none", positions=False),
    habits=dict(
        build="module", drive="forward_backward", gradients=True, criterion="none", optimizer=None, example=False,
        chunk_bytes=None, evaluate_after=1, evaluate_samples=2, refuse_after=2, refuse="id", reads="nothing",
        load_before=None,
    ),
    config=dict(precision="fp64", optimizer=dict(type="sgd", lr=0.1), zero=dict(stage=1), seed=1, timeout_s=20),
    resume_world=1,
    resume=dict(precision="fp64", optimizer=dict(type="sgd", lr=0.1), seed=1, timeout_s=20),
)  # fmt: skip
CASE = DrawnCase(**PLAIN)


def test_a_draw_follows_from_its_three_numbers() -> None:
    assert [draw(4, 7, n) for n in range(50)] == [draw(4, 7, n) for n in range(50)]
    assert len({draw(4, 7, n).text() for n in range(50)}) == 50 and draw(4, 8, 0) != draw(4, 7, 0)


@pytest.mark.parametrize("world", [1, 2, 4, 8])
def test_a_case_is_read_back_as_it_was_printed(world: int) -> None:
    for number in range(50):
        case = draw(world, 3, number)
        assert case_of(case.text()) == case


def test_draws_reach_every_setting_of_the_schema() -> None:
    """But for what runs on a GPU alone, or takes seconds to compile, or only says who writes where."""
    left_out = {
        "compile",
        "memory.rates.disk",
        "memory.rates.file",
        "memory.rates.flops",
        "optimizer.groups.moments",
    }
    reached = {path for n in range(1500) for path in _paths(draw(8, 1, n).config)}
    known = {row.path for row in Config().resolved()} - left_out
    assert known <= reached, sorted(known - reached)


def _paths(config: Any, prefix: str = "") -> set[str]:
    if prefix == "precision." and isinstance(config, str):
        return {"precision.dtype"}
    found = set()
    for name, value in config.items():
        if isinstance(value, dict):
            found |= _paths(value, f"{prefix}{name}.")
        found.add(f"{prefix}{name}" if name != "precision" or isinstance(value, dict) else "precision.dtype")
    return found


def test_a_plain_case_is_exact_and_a_case_that_cannot_be_is_refused() -> None:
    assert outcome_of(CASE).outcome == "exact"
    broken = DrawnCase(**PLAIN | dict(config=PLAIN["config"] | dict(parallel=dict(tensor=3))))
    verdict = outcome_of(broken)
    assert verdict.outcome == "refused" and "the world has 2 ranks" in verdict.why


@pytest.mark.parametrize("fault", ["a reduce is dropped", "a gradient is scaled"])
def test_a_planted_fault_is_wrong_or_unlike(fault: str) -> None:
    assert outcome_of(CASE, fault).outcome in ("WRONG", "UNLIKE")


SPLIT = PLAIN["config"] | dict(precision=dict(dtype="bf16", master="split"))


def test_low_bits_that_split_masters_lose_are_wrong() -> None:
    case = DrawnCase(**PLAIN | dict(config=SPLIT, resume_world=0, resume={}))
    assert outcome_of(case).outcome == "exact"
    verdict = outcome_of(case, "low bits of split masters are lost")
    assert verdict.outcome == "WRONG" and "has other bits than whole" in verdict.why


def test_a_state_dict_whose_masters_on_the_host_are_lost_is_wrong() -> None:
    config = PLAIN["config"] | dict(precision="bf16", memory=dict(placement="host"))
    habits = PLAIN["habits"] | dict(load_before=1)
    case = DrawnCase(**PLAIN | dict(config=config, habits=habits, resume_world=0, resume={}))
    assert outcome_of(case).outcome == "exact"
    assert outcome_of(case, "what is written to state on the host is lost").outcome == "WRONG"


def test_every_planted_fault_has_its_place() -> None:
    for name, (where, _) in FAULTS.items():
        assert place(where).bindings, name


def test_a_step_in_sixteen_bits_is_judged_at_the_weights_that_the_ranks_saved() -> None:
    case = DrawnCase(**PLAIN | dict(config=SPLIT))
    truth = plain_run(case, "fp64", [False] * 4)
    same = at_own_weights(case, truth, Seen(weights=truth.saved), Seen(weights=truth.last), "fp64")
    assert same.losses[:STEPS] == truth.losses[:STEPS] and same.saved is truth.saved
    assert same.losses[STEPS] == pytest.approx(truth.losses[STEPS], rel=1e-2)
    zeros = Seen(weights={name: torch.zeros_like(value) for name, value in truth.saved.items()})
    other = at_own_weights(case, truth, zeros, zeros, "fp64")
    assert other.losses[STEPS] == pytest.approx(math.log(16)) == other.evaluated[1]


def test_muon_in_sixteen_bits_is_judged_beside_a_plain_loop_that_iterates_in_them_too() -> None:
    """A gradient of one sample has few singular values, and the iteration makes the noise of the others large."""
    sizes = PLAIN["model"]["sizes"] | dict(bias=False, width=16)
    norms = dict(match="*norm*", type="adamw", lr=1e-2)
    config = PLAIN["config"] | dict(
        precision="fp16", optimizer=dict(type="muon", lr=2e-2, groups=(norms,)), zero=dict(stage=0)
    )
    changes = dict(model=dict(kind="gpt", sizes=sizes), batch=PLAIN["batch"] | dict(labels="one sample"))
    assert outcome_of(DrawnCase(**PLAIN | changes | dict(config=config, resume_world=0))).outcome == "exact"


def test_a_swap_that_its_proof_disproves_is_wrong() -> None:
    words = "ValueError: plan: a small copy of the model is not that of one process: gradient of head"
    refused = Ended("refused", "initialize", words, "")
    assert judge_end(DrawnCase(**PLAIN), [Seen(ended=refused)] * 2, "first").outcome == "WRONG"  # type: ignore[union-attr]


def lion_run(dtype: str, flipped: str) -> tuple[DrawnCase, Seen, list[dict[str, torch.Tensor]]]:
    """(case, seen, weights after each step) of ranks that take the other sign in step 0 for the weight with the
    `flipped` gradient."""
    config = PLAIN["config"] | dict(precision=dtype, optimizer=dict(type="lion", lr=1e-3), clip_grad_norm=0.5)
    case = DrawnCase(**PLAIN | dict(config=config, resume_world=0, resume={}))
    states: list[dict[str, torch.Tensor]] = []

    def flip(loop: PlainLoop, number: int, norm: float, gradients: Mapping[str, torch.Tensor]) -> None:
        if number == 0:
            sizes = {
                (n, i): float(g)
                for n, t in gradients.items()
                for i, g in enumerate(t.abs().view(-1))
                if g > 0
            }
            name, i = (min if flipped == "least" else max)(sizes, key=lambda key: sizes[key])
            master, initial = loop.masters[name].view(-1), loop.initial[name].view(-1)
            master[i] = 2 * initial[i] - master[i]
        states.append(loop.weights())

    run = plain_run(case, dtype, [False] * 4, flip)
    seen = Seen(
        losses=run.losses[:3], norms=run.norms[:3], skipped=[False] * 3, gradients=run.gradients[:3],
        evaluated=run.evaluated[0], told="ValueError: 3", weights=states[2],
    )  # fmt: skip
    return case, seen, states[:3]


def test_a_weight_that_comes_back_to_zero_moved_by_no_more_than_its_signs() -> None:
    """Of a rate of zero in the last step, and of a weight that is exactly zero on the ranks alone."""
    case, seen, states = lion_run("fp64", "least")
    case = replace(case, config=case.config | dict(lr_scheduler=dict(type="one_cycle", total_steps=2)))
    signs = LionSigns(case, states, [False] * 4)
    loop = PlainLoop(case, "fp64")
    loop.step(2, skip=True)
    for name, value in loop.masters.items():
        value.fill_(1e-19)
        states[2][name] = torch.zeros_like(value)
    signs.tossed = [
        {},
        {},
        {name: torch.ones_like(value, dtype=torch.bool) for name, value in states[2].items()},
    ]
    signs.check(loop, 2)
    assert signs.fault == ""
    states[2] = {name: value + 1e-5 for name, value in states[2].items()}
    signs.check(loop, 2)
    assert "moved by more than two signs" in signs.fault


@pytest.mark.parametrize("when", ["now", "before"])
def test_at_a_rate_of_zero_only_a_weight_that_is_taken_over_now_has_what_earlier_steps_moved(
    when: str,
) -> None:
    case, seen, states = lion_run("fp64", "least")
    case = replace(case, config=case.config | dict(lr_scheduler=dict(type="linear", total_steps=2)))
    signs, loop = LionSigns(case, states, [False] * 4), PlainLoop(case, "fp64")
    everything = {name: torch.ones_like(value, dtype=torch.bool) for name, value in states[0].items()}
    nothing = {name: ~value for name, value in everything.items()}
    signs.tossed = [nothing, everything if when == "before" else nothing, everything]
    for number in range(3):
        loop.step(number, skip=True)
        states[number] = {name: value.clone() for name, value in loop.masters.items()}
        if number == 2:
            states[2] = {name: value + 0.2 * signs._rate for name, value in states[2].items()}
        signs.check(loop, number)
    assert max(group["lr"] for each in loop.optimizers for group in each.param_groups) == 0.0
    assert ("moved by more than two signs" in signs.fault) == (when == "before")


@pytest.mark.parametrize("dtype", ["fp64", "fp32", "fp16"])
def test_a_sign_that_rounding_decides_under_lion_is_taken_over_and_no_other(dtype: str) -> None:
    """The gradient of a key's bias is rounding alone."""
    case, seen, states = lion_run(dtype, "least")
    assert wrong_beside_signs(case, seen, None, states) == ""
    case, seen, states = lion_run(dtype, "largest")
    assert wrong_beside_signs(case, seen, None, states)


@pytest.mark.parametrize("fault", [None, "a gradient is scaled", "a loss is told a little larger"])
def test_steps_of_rounding_under_lamb_are_judged_at_the_weights_of_the_ranks(fault: str | None) -> None:
    """Of one sample of which the first token alone has a label: no query matters, and LAMB makes a full step of it."""
    sizes = dict(vocabulary=37, layers=3, heads=1, width=8, ffn=3)
    config = dict(precision="fp64", optimizer=dict(type="lamb", lr=0.01), seed=89, timeout_s=20)
    batch = dict(samples=1, labels="ragged", form="tuple", tokens=8, mask="none", positions=False)
    model = dict(kind="own", sizes=sizes, frozen=("*head*",))
    own = dict(
        world=1, seed=169, model=model, batch=batch, habits=PLAIN["habits"] | dict(refuse="no labels"), config=config,
        resume_world=0, resume={},
    )  # fmt: skip
    case = DrawnCase(**PLAIN | own)
    assert follows_rounding(case, plain_run(case, "fp64", [False] * 4))
    assert outcome_of(case, fault).outcome == ("WRONG" if fault else "exact")


def test_a_weight_that_moves_by_more_than_two_signs_is_not_taken_over() -> None:
    case, seen, states = lion_run("fp64", "least")
    states[1] = {name: value + 3e-3 for name, value in states[1].items()}
    assert "moved by more than two signs of Lion" in wrong_beside_signs(case, seen, None, states)


def test_runs_that_rounding_has_parted_are_compared_at_the_weights_of_the_ranks() -> None:
    """Lion makes a full step of a gradient of 1e-14: then the next gradient is judged at the ranks' own weights."""
    case = DrawnCase(**PLAIN | dict(config=PLAIN["config"] | dict(optimizer=dict(type="lion", lr=1e-3))))
    start, gradient = torch.zeros(2, dtype=torch.float64), torch.tensor([1.0, 1e-14], dtype=torch.float64)
    truth = Truth(
        [1.0] * 4, [1.0] * 4, [dict(w=gradient)] * 4, dict(w=start), dict(w=start), dict(w=start), (1.0, 1.0)
    )
    seen = Seen(
        losses=[1.0] * 4, norms=[1.0] * 4, skipped=[False] * 4, told="ValueError: 3", weights=dict(w=start)
    )
    seen.gradients = [dict(w=gradient)] * 3 + [dict(w=gradient * (1 + 1e-6))]
    assert follows_rounding(case, truth) and wrong(case, seen, None, truth, None) == ""
    assert wrong(case, seen, None, replace(truth, own=frozenset({3})), None).startswith(
        "step 3: gradient of w is off"
    )
    plain = replace(truth, gradients=[dict(w=torch.ones(2, dtype=torch.float64))] * 4)
    assert not follows_rounding(case, plain)


@pytest.mark.parametrize(("labels", "outcome"), [("sparse", "refused"), ("full", "CRASH")])
def test_a_run_that_skips_too_many_steps_is_refused_if_no_label_counts(labels: str, outcome: str) -> None:
    config = PLAIN["config"] | dict(optimizer=dict(type="sgd", lr=0.1, max_skipped_steps=2))
    model = dict(kind="perceptron", sizes=dict(features=8, classes=5))
    batch = dict(samples=2, labels=labels, form="tuple")
    case = DrawnCase(**PLAIN | dict(config=config, model=model, batch=batch, seed=666))
    ended = Ended("refused", "step 2", "ValueError: 2 in a row, and optimizer.max_skipped_steps=2", "")
    assert judge_end(case, [Seen(ended=ended)] * 2, "first").outcome == outcome  # type: ignore[union-attr]


def test_ranks_that_end_apart_are_unlike_and_a_late_refusal_is_a_crash() -> None:
    refused = Ended("refused", "step 0", "ValueError: 3 is odd", "")
    assert (
        judge_end(DrawnCase(**PLAIN), [Seen(ended=refused), Seen(ended=refused)], "first").outcome
        == "refused"
    )  # type: ignore[union-attr]
    assert judge_end(DrawnCase(**PLAIN), [Seen(ended=refused), Seen()], "first").outcome == "UNLIKE"  # type: ignore[union-attr]
    late = Ended("refused", "step 1", "ValueError: 3 is odd", "")
    assert judge_end(DrawnCase(**PLAIN), [Seen(ended=late)] * 2, "first").outcome == "CRASH"  # type: ignore[union-attr]
    left = Ended("left", "step 1", "CommError: rank 0: all_reduce; timeout 12 s", "")
    assert judge_end(DrawnCase(**PLAIN), [Seen(ended=left)] * 2, "first").outcome == "HANG"  # type: ignore[union-attr]
    assert judge_end(DrawnCase(**PLAIN), [Seen(), Seen()], "first") is None
    assert unlike([Seen(losses=[1.0]), Seen(losses=[1.0 + 1e-16])], "first") is None
    assert unlike([Seen(losses=[1.0]), Seen(losses=[1.1])], "first") is not None


def test_refusals_are_counted_by_their_words_without_numbers() -> None:
    words = "ConfigError: parallel.data = 3: 12 ranks, no multiple of 1.5e-3; legal: 2, 4"
    assert masked(words) == "ConfigError: parallel.data = #: # ranks, no multiple of #"


@pytest.mark.parametrize("kind", ["negative id", "id", "label", "no labels", "shape", "too long"])
def test_every_refused_batch_is_refused(kind: str) -> None:
    case = DrawnCase(**PLAIN | dict(habits=PLAIN["habits"] | dict(refuse=kind)))
    with pytest.raises(ValueError):
        check_batch(refused_batch(case), StatedSizes(vocabulary=16, tokens=4))


def test_the_command_prints_a_tally_and_where_to_go_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code = draws.main(["--world", "1", "--draws", "2", "--seed", "5", "--out", str(tmp_path)])
    said = capsys.readouterr().out
    assert "world 1, seed 5, draws 0 to 1: " in said and said.rstrip().endswith("go on with --from 2")
    assert code == int(bool(list(tmp_path.iterdir())))
    file = tmp_path / "plain.case"
    file.write_text(CASE.text())
    assert draws.main(["--case", str(file)]) == 0 and torch.get_num_threads() == 1
