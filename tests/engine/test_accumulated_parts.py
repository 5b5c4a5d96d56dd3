"""More accumulated parts than samples are refused before they are made; a smaller last batch of an epoch trains."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import colossal_lite as cl
from colossal_lite.data.batch import read_batch
from tests.shared.pool import RankEnv, run_world

SHAPE = cl.models.GPTConfig(vocabulary=32, layers=2, heads=2, width=8, sequence=8)
TOKENS = torch.randint(32, (8, 9), generator=torch.Generator().manual_seed(0))


def batch_of(samples: int) -> tuple[Tensor, Tensor]:
    return TOKENS[:samples, :-1], TOKENS[:samples, 1:]


def refused(env: RankEnv, parallel: dict[str, Any], accumulation: int) -> str:
    """The refusal of a batch of 4 samples on each data rank; or "", after a further batch of 1."""
    config: cl.ConfigDict = dict(precision="fp64", gradient_accumulation=accumulation, timeout_s=30)
    with env.launch(config | dict(parallel=parallel)) as context:
        engine = cl.initialize(lambda: cl.models.GPT(SHAPE), context=context)
        try:
            engine.train_step(batch_of(4))
        except ValueError as error:
            return str(error)
        engine.train_step(batch_of(1))
        return ""


@pytest.mark.parametrize("accumulation", [10**6, 10**18])
@pytest.mark.parametrize(
    ("ranks", "parallel", "most"),
    [
        (1, dict(), 4),
        (1, dict(pipeline=dict(stages_per_rank=2, schedule="bfs")), 4),
        (2, dict(data=2), 4),
        (2, dict(pipeline=2), 4),
    ],
    ids=str,
)
def test_more_parts_than_samples_are_refused_and_the_number_told_trains(
    ranks: int, parallel: dict[str, Any], most: int, accumulation: int
) -> None:
    for text in run_world(refused, ranks, parallel, accumulation):
        assert text.startswith(f"gradient_accumulation={accumulation}: ") and "a batch of 4 samples" in text
        assert f"legal: at most {most}, or larger batches" in text
    assert run_world(refused, ranks, parallel, most) == [""] * ranks


def few(env: RankEnv, accumulation: int) -> list[float]:
    """Losses of steps of one sample, which one rank has."""
    config: cl.ConfigDict = dict(precision="fp64", gradient_accumulation=accumulation, timeout_s=30)
    with env.launch(config) as context:
        torch.manual_seed(0)
        engine = cl.initialize(cl.models.GPT(SHAPE), context=context)
        batch = context.local_batch(batch_of(1))
        return [float(engine.train_step(batch).loss) for _ in range(3)]


def test_a_rank_without_samples_refuses_no_parts_that_another_takes() -> None:
    (alone,) = run_world(few, 1, 1)
    for losses in run_world(few, 2, 3):
        assert losses == pytest.approx(alone, rel=1e-12)


def looped(env: RankEnv, folder: str, accumulation: int, steps: int) -> list[float]:
    config: cl.ConfigDict = dict(precision="fp64", gradient_accumulation=accumulation, timeout_s=30)
    data = list(zip(*batch_of(5), strict=True))
    with env.launch(config) as context:
        engine = cl.initialize(lambda: cl.models.GPT(SHAPE), context=context)
        run = cl.Run(folder, engine)
        batches = run.batches(data, global_batch=4, steps=steps, drop_last=False, shuffle=False)
        return [float(run.step(batch).loss) for batch in batches]


def test_a_run_is_refused_before_its_first_step_and_resumes_at_a_last_batch_of_one_sample(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    def folder(name: str) -> str:
        return str(tmp_path_factory.mktemp(name))

    with pytest.raises(
        Exception, match="gradient_accumulation=5: .* of global_batch=4 samples; legal: at most 4"
    ):
        run_world(looped, 1, folder("refused"), 5, 2)
    (whole,) = run_world(looped, 1, folder("whole"), 4, 2)
    parts = folder("parts")
    assert run_world(looped, 1, parts, 4, 1)[0] + run_world(looped, 1, parts, 4, 2)[0] == whole


def test_a_batch_is_cut_once_for_all_its_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    calls, split = list[int](), Tensor.tensor_split

    def counted(self: Tensor, parts: int) -> Any:
        calls.append(parts)
        return split(self, parts)

    monkeypatch.setattr(Tensor, "tensor_split", counted)
    batch = read_batch(batch_of(8), device=torch.device("cpu"), first_sample=0)
    pieces = batch.cut(8)
    assert [len(piece.inputs) for piece in pieces] == [1] * 8 and len(calls) <= 3


def test_a_loop_of_ones_own_takes_any_number_of_parts() -> None:
    """Its calls of backward are the parts."""
    (loss,) = run_world(called, 1)
    assert loss > 0


def called(env: RankEnv) -> float:
    with env.launch(dict(precision="fp64", gradient_accumulation=10**18, timeout_s=30)) as context:
        engine = cl.initialize(lambda: cl.models.GPT(SHAPE), context=context)
        inputs, labels = batch_of(4)
        engine.backward(torch.nn.functional.cross_entropy(engine(inputs).flatten(0, 1), labels.flatten()))
        return float(engine.step().loss)
