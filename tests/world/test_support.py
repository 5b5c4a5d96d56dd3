"""The committed support matrix says what the rules say, for every pair of features."""

from __future__ import annotations

import pytest

from tests.support import FEATURES, PAGE, Matrix, case_of, measure, pairs, read, refusal, write

BOUND = 1e-10


def test_the_page_reads_back_as_it_was_written() -> None:
    text = PAGE.read_text()
    assert write(read(text)) == text


def test_every_pair_is_there_and_no_other() -> None:
    assert set(read(PAGE.read_text())) == set(pairs())


def by_the_rules() -> dict[tuple[str, str], str]:
    """Reason by refused pair."""
    found = {pair: refusal(*pair) for pair in pairs()}
    return {pair: reason for pair, reason in found.items() if reason is not None}


def test_what_the_rules_refuse_the_page_refuses_and_what_it_calls_exact_is_legal() -> None:
    """A part that is built later stands on the page as refused until the campaign measures it."""
    exact = {pair for pair, state in read(PAGE.read_text()).items() if state.startswith("exact")}
    assert not exact & by_the_rules().keys()


@pytest.mark.campaign
def test_every_refusal_on_the_page_is_one_of_the_rules_in_the_same_words() -> None:
    page = {pair: state for pair, state in read(PAGE.read_text()).items() if state.startswith("refused")}
    assert page == {pair: f"refused {reason}" for pair, reason in by_the_rules().items()}


def test_every_error_on_the_page_is_within_the_bound() -> None:
    errors = [float(state.split()[1]) for state in read(PAGE.read_text()).values() if state[0] == "e"]
    assert errors and max(errors) <= BOUND


@pytest.mark.parametrize("name", FEATURES)
def test_a_feature_of_the_matrix_is_legal_alone(name: str) -> None:
    assert refusal(name) is None
    assert case_of(name).world_size <= 8


@pytest.mark.campaign  # two hundred parity runs
def test_the_matrix_is_measured_and_written() -> None:
    found: Matrix = {}
    for pair in pairs():
        reason = refusal(*pair)
        found[pair] = f"refused {reason}" if reason else f"exact {measure(*pair):.0e}"
    PAGE.write_text(write(found))
