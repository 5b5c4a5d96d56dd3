"""The committed support matrix says what the rules say, for every pair of features."""

from __future__ import annotations

import pytest

from tests.shared.support import (
    FEATURES,
    PAGE,
    case_of,
    measure,
    pairs,
    read,
    refusal,
    within_least_budget,
    write,
)

BOUND = 1e-10


def test_the_page_reads_back_as_it_was_written() -> None:
    text = PAGE.read_text()
    assert write(read(text)) == text


def test_every_pair_is_there_and_no_other() -> None:
    assert set(read(PAGE.read_text())) == set(pairs())


def test_what_the_page_refuses_is_what_the_rules_refuse_in_the_same_words() -> None:
    page = {pair: state for pair, state in read(PAGE.read_text()).items() if state.startswith("refused")}
    reasons = {pair: refusal(*pair) for pair in pairs()}
    assert page == {pair: f"refused {reason}" for pair, reason in reasons.items() if reason is not None}


def test_every_error_on_the_page_is_within_the_bound() -> None:
    errors = [float(state.split()[1]) for state in read(PAGE.read_text()).values() if state[0] == "e"]
    assert errors and max(errors) <= BOUND


@pytest.mark.parametrize("name", FEATURES)
def test_a_feature_of_the_matrix_is_legal_alone(name: str) -> None:
    assert refusal(name) is None
    assert case_of(name).world_size <= 8


@pytest.mark.parametrize("name", ["ring", "1f1b"])
def test_the_budget_that_a_refusal_names_for_a_batch_is_enough(name: str) -> None:
    """What is refused after the first forecast fails the test: it was told as legal."""
    case = within_least_budget(case_of(name, "budget"))
    assert case.config["memory"]["device_budget"] > 100_000


@pytest.mark.campaign  # six hundred parity runs
@pytest.mark.timeout(3600)
def test_the_matrix_is_measured_and_written() -> None:
    found = dict[tuple[str, str], str]()
    for pair in pairs():
        reason = refusal(*pair)
        found[pair] = f"refused {reason}" if reason else f"exact {measure(*pair):.0e}"
    PAGE.write_text(write(found))
    assert read(PAGE.read_text()) == found
