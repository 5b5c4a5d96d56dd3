"""A list in brief: it names every action of the list, in its order, and nothing else."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from colossal_lite.config.pipeline_schema import PipelineConfig
from colossal_lite.pipeline.step_plan import StepShape, step_plan
from colossal_lite.schedule.optimizer_updates import update_plan
from colossal_lite.schedule.plan import Action, ActionKind
from colossal_lite.schedule.plan_brief import Word, brief
from colossal_lite.schedule.stage_gathers import StageWeights

END = re.compile(r"\) x (\d+)(?:, all alike|, each time ([^;]*))?(?:;|$)")
SPAN = re.compile(r"(\d+)(?:,(\d+))?(?:(\.\.)(\d+))")


def expanded(text: str) -> list[Action]:
    """The actions that a text in brief names, by its words alone."""
    actions, rest = _read(text)
    assert not rest
    return actions


def _read(text: str) -> tuple[list[Action], str]:
    found: list[Action] = []
    while text and not text.startswith(")"):
        if text.startswith("("):
            inner, text = _read(text[1:])
            end = END.match(text)
            assert end is not None, text
            told = end[2] or ("" if "alike" in end[0] else "next")
            for time in range(int(end[1])):
                found += [_moved(action, told, time, inner) for action in inner]
            text = text[end.end() :].lstrip()
        else:
            word = re.match(r"[^\s)]+", text)
            assert word is not None
            found += _words(word[0])
            text = text[word.end() :].lstrip()
    return found, text


def _moved(action: Action, told: str, time: int, inner: list[Action]) -> Action:
    if told == "next":
        told = "micro-batch +1" if any(a.micro_batch is not None for a in inner) else "chunk +1"
    steps = {name.replace("-", "_"): int(n) for name, n in re.findall(r"([a-z-]+) ([+-]\d+)", told)}
    now = {n: getattr(action, n) + time * by for n, by in steps.items() if getattr(action, n) is not None}
    return replace(action, **now)


def _words(word: str) -> list[Action]:
    span = SPAN.search(word) or re.search(r"(\d+),(\d+)()()", word)
    if span is None:
        return [Action.parse(word)]
    first, second, last = int(span[1]), span[2], int(span[4] or span[2])
    step = int(second) - first if second else 1 if last > first else -1
    numbers = range(first, last + (1 if step > 0 else -1), step)
    return [Action.parse(word[: span.start()] + str(n) + word[span.end() :]) for n in numbers]


@given(st.data())
def test_any_list_is_named_whole_and_in_its_order(data: st.DataObject) -> None:
    kinds = st.sampled_from([ActionKind.F, ActionKind.B, ActionKind.REDUCE, ActionKind.UPDATE])
    small = st.integers(0, 3)

    def action(kind: ActionKind, stage: int, i: int, chunk: int) -> Action:
        if kind in (ActionKind.F, ActionKind.B):
            return Action(kind, stage=stage, micro_batch=i)
        return Action(kind, stage=stage, micro_batch=i if kind is ActionKind.REDUCE else None, chunk=chunk)

    part = st.lists(st.builds(action, kinds, small, small, small), max_size=5)
    some = [
        a for part, times in data.draw(st.lists(st.tuples(part, st.integers(1, 3)))) for a in part * times
    ]
    assert expanded(brief([*map(Word, some)])) == some


@pytest.mark.parametrize(
    ("schedule", "ranks", "chunks"), [("interleaved", 4, 2), ("1f1b", 4, 1), ("bfs", 2, 4), ("zb-v", 3, 2)]
)
def test_the_list_of_a_pipeline_is_named_in_at_most_two_thirds_of_its_words(
    schedule: str, ranks: int, chunks: int
) -> None:
    stages = ranks * chunks
    weights = tuple((2 * stage, 2 * stage + 1) for stage in range(stages))
    step = StepShape(16, 2, weights, (True,) * stages, "micro_batch", weights=StageWeights(weights))
    pipeline = PipelineConfig(size=ranks, stages_per_rank=chunks, schedule=schedule)
    for actions in step_plan(pipeline, step):
        text = brief([*map(Word, actions)])
        assert expanded(text) == [*actions]
        assert 3 * len(text.split()) <= 2 * len(actions)


def test_updates_are_written_with_their_moves() -> None:
    words = [Word(replace(a, stage=None)) for a in update_plan(13, ahead=1)[0]]
    assert brief(words) == "FETCH#0..1 (UPDATE#0 EVICT#0 FETCH#2) x 11; (UPDATE#11 EVICT#11) x 2"
