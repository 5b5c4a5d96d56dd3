"""A batch whose length leads a model's code another way is exact, or refused by name."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import colossal_lite as cl
from colossal_lite.parallel import length_proof
from colossal_lite.parallel.length_proof import LengthProofs, pairs_of, proofs_at
from colossal_lite.parallel.padding import Padding
from colossal_lite.parallel.small_copy import SmallCopy, small_copy, table_roles
from colossal_lite.pipeline.traced_sections import OtherStageParameter, Progress
from tests.engine.test_own_models import Attending
from tests.shared.plain_loop import OfBlocks, plain_run
from tests.shared.pool import RankEnv, run_world

V, D, LONG = 16, 8, 9
SGD = dict(precision="fp64", optimizer=dict(type="sgd", lr=0.5), timeout_s=60)


class LongBlock(Attending):
    def __init__(self) -> None:
        super().__init__()
        self.extra = nn.Linear(D, D)

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        return x + self.extra(x) if x.shape[1] > LONG else x


class ForLong(OfBlocks):
    """Takes another path above LONG tokens, at the place `where`."""

    def __init__(self, where: str) -> None:
        super().__init__(V, D, (LongBlock() if where == "in a block" else Attending() for _ in range(2)))
        self.where = where
        if where == "parameter":
            self.scale = nn.Parameter(torch.linspace(0.5, 1.5, D))
        elif where in ("before", "between", "behind", "in training"):
            self.extra = nn.Linear(D, D)
        elif where == "head":
            self.other = nn.Linear(D, V)

    def forward(self, ids: Tensor) -> Any:
        x, where = self.words(ids) * 1.5, self.where if ids.shape[1] > LONG else ""
        if where == "before":
            x = x + self.extra(x)
        for block in self.blocks:
            x = block(x)
            if where == "between":
                x = x + self.extra(x)
        if where == "behind" or (where == "in training" and self.training):
            x = x + self.extra(x)
        if where == "parameter":
            x = x * self.scale
        if where == "values":
            x = x * 2
        return self.other(x) if where == "head" else self.head(x)


def made(where: str) -> nn.Module:
    torch.manual_seed(0)
    return ForLong(where).double()


def given(lengths: Sequence[int]) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    ids = [torch.randint(V, (4, n + 1), generator=generator) for n in lengths]
    return [(each[:, :-1].contiguous(), each[:, 1:].contiguous()) for each in ids]


def trained(
    env: RankEnv, where: str, parallel: dict[str, Any], lengths: list[int]
) -> tuple[list[float], dict[str, Tensor]]:
    with env.launch(SGD | dict(parallel=parallel)) as context:
        engine = cl.initialize(made(where), context=context)
        losses = [float(engine.train_step(batch).loss) for batch in given(lengths)]
        return losses, engine.full_state_dict()


def told(env: RankEnv, where: str, parallel: dict[str, Any], lengths: list[int], loop: str) -> str:
    """What the last of the lengths is refused by."""
    with env.launch(SGD | dict(parallel=parallel)) as context:
        engine = cl.initialize(made(where), context=context)
        *first, last = given(lengths)
        for batch in first:
            engine.train_step(batch)
        try:
            if loop == "own":
                ids, labels = last
                engine.backward(F.cross_entropy(engine(ids).flatten(0, 1), labels.flatten()))
                engine.step()
            elif loop == "evaluation":
                engine.eval_step(last)
            else:
                engine.train_step(last)
        except (ValueError, RuntimeError) as error:  # a rank beside tells of the other's
            return str(error)
        return ""


CUT = dict(tensor=dict(size=2, sequence_parallel=True))
WHOLE = dict(tensor=dict(size=2, sequence_parallel=False))
STAGES = dict(pipeline=dict(size=2, micro_batches=2))
TABLE_APART = dict(pipeline=dict(size=2, micro_batches=2, partition=[1, 3]))
SPILLED = dict(pipeline=dict(size=1, stages_per_rank=2, micro_batches=2, schedule="bfs"))


@pytest.mark.parametrize(
    "where, parallel, lengths",
    [
        ("before", STAGES, [6, 12]),
        ("before", TABLE_APART, [6, 12]),
        ("in a block", STAGES, [6, 12]),
        ("values", STAGES, [6, 12]),
        ("behind", STAGES, [6, 8]),
        ("behind", SPILLED, [6, 8]),
        ("in a block", WHOLE, [6, 12]),
        ("in a block", dict(sequence=2), [6, 12, 7]),
        ("behind", CUT, [6, 12, 11]),
        ("behind", WHOLE, [6, 11]),
        ("values", CUT, [6, 12, 11, 7]),
    ],
    ids=str,
)
def test_another_path_is_that_of_one_process_where_it_is_taken(
    where: str, parallel: dict[str, Any], lengths: list[int]
) -> None:
    truth = plain_run(made(where).train(), given(lengths), 0.5)
    for losses, weights in run_world(trained, 1 if parallel is SPILLED else 2, where, parallel, lengths):
        assert losses == pytest.approx(truth.losses, rel=1e-11)
        for key, right in truth.weights.items():
            torch.testing.assert_close(weights[key], right, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("where", ["between", "behind", "parameter"])
@pytest.mark.parametrize("loop", ["", "evaluation"])
def test_weights_of_another_stage_are_not_read_as_zeros(where: str, loop: str) -> None:
    name = "scale" if where == "parameter" else "extra"
    for stages in (STAGES, TABLE_APART):
        for text in run_world(told, 2, where, stages, [6, 12], loop):
            assert f"{name} is on another stage, and this batch takes a path" in text, text
    if where != "parameter":  # whose gradient comes in another stage's backward, which is refused
        (text,) = run_world(told, 1, where, SPILLED, [6, 12], loop)
        assert f"{name} is on another stage" in text and "pipeline=1" in text


@pytest.mark.parametrize(
    "where, parallel, lengths, says",
    [
        ("head", WHOLE, [6, 12], "its loss is"),
        ("head", CUT, [6, 12], "its loss is"),
        ("in a block", CUT, [6, 12], "its loss is"),
        ("values", CUT, [6, 9], "padding to 10 tokens changes the loss"),
        ("values", dict(sequence=2), [12, 9], "padding to 12 tokens changes the loss"),
    ],
    ids=str,
)
@pytest.mark.parametrize("loop", ["", "own", "evaluation"])
def test_another_path_that_is_not_that_of_one_process_is_refused(
    where: str, parallel: dict[str, Any], lengths: list[int], says: str, loop: str
) -> None:
    for text in run_world(told, 2, where, parallel, lengths, loop):
        assert f"inputs: at {lengths[-1]} tokens the code of ForLong takes another path" in text, text
        assert (
            says in text and ("parallel.sequence on 2" if "sequence" in parallel else "tensor on 2") in text
        )


def test_all_stages_may_ask_what_a_parameter_of_another_stage_is_and_none_for_its_values() -> None:
    progress = Progress()
    parameter = OtherStageParameter.of(nn.Parameter(torch.ones(2, 3)), "scale", progress, torch.ones(()))
    assert parameter.shape == (2, 3) and parameter.dtype == torch.float32 and parameter.is_floating_point()
    assert not parameter.is_cuda and parameter.device.type == "cpu" and parameter.size(1) == 3
    reads: list[Callable[[Tensor], object]] = [
        lambda x: x * 2, lambda x: x.T, lambda x: x.sum(), lambda x: x.tolist(), lambda x: x[0, 0].item(),
        lambda x: torch.equal(x, x), lambda x: bool(x.sum()), lambda x: torch.zeros(2, 3).add_(x),
    ]  # fmt: skip
    for read in reads:
        with pytest.raises(ValueError, match="scale is on another stage"):
            read(parameter)
    with progress.before(1):
        assert type(parameter * 2) is Tensor and parameter.tolist() == 2 * [[0.0, 0.0, 0.0]]


# ---- of one process ----


class Counted:
    """A proof that counts its calls, and finds `what`."""

    def __init__(self, what: str = "") -> None:
        self.at: list[int] = []
        self.what = what

    def __call__(self, small: SmallCopy, tokens: int) -> str:
        self.at.append(tokens)
        return self.what


def proofs(model: nn.Module, proof: Counted, parts: int = 1) -> LengthProofs:
    roles = table_roles(model)
    found = proofs_at(model, {}, roles, [proof], Padding(parts, "a setting"), "a setting")
    assert found is not None
    return found


class Recurrent(OfBlocks):
    def __init__(self) -> None:
        super().__init__(V, D, [nn.Linear(D, D)])

    def forward(self, ids: Tensor) -> Any:
        state, states = torch.zeros_like(self.words(ids[:, 0])), []
        for place in range(ids.shape[1]):
            state = torch.tanh(self.words(ids[:, place]) + self.blocks[0](state))
            states.append(state)
        return self.head(torch.stack(states, 1))


@pytest.mark.parametrize("where", ["behind", "in training", "values"])
def test_lengths_on_one_path_are_proven_once(where: str) -> None:
    """Also where the operations are the same, in another order."""
    proof = Counted()
    lengths = proofs(made(where), proof)
    for tokens in (5, 9, 12, 12, 40, 10):
        lengths.check(tokens)
    assert proof.at == [12], "the first above the length at which the path changes"


def test_a_loop_over_the_tokens_is_one_path() -> None:
    proof = Counted()
    lengths = proofs(Recurrent().double(), proof)
    for tokens in (5, 12, 33):
        lengths.check(tokens)
    assert proof.at == []


def test_a_refused_length_is_refused_again_and_others_are_not() -> None:
    lengths = proofs(made("behind"), Counted("its loss is another"))
    for _ in range(2):
        with pytest.raises(ValueError, match="inputs: at 12 tokens .* its loss is another"):
            lengths.check(12)
    lengths.check(8)


def test_a_path_above_the_lengths_that_are_proven_is_told_once() -> None:
    proof = Counted("its loss is another")
    lengths = proofs(made("behind"), proof)
    with patch.object(length_proof, "MOST_TOKENS", 8):
        with pytest.warns(UserWarning, match="at 12 tokens the code of ForLong takes a path that no proof"):
            lengths.check(12)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            lengths.check(13)
            lengths.check(9)
    assert proof.at == []


def test_a_path_is_read_from_a_copy_and_changes_nothing_of_it() -> None:
    model = made("behind")
    small = small_copy(model, table_roles(model))
    before = {name: x.clone() for name, x in small.model.state_dict().items()}
    state = torch.get_rng_state()
    short, long = (pairs_of(small, tokens, on_meta=False) for tokens in (8, 12))
    assert ("extra", "aten.addmm.default") in {now for _, now in long - short}
    assert not any(module.startswith("extra") for pair in short for module, _ in pair)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(x, before[name]) for name, x in small.model.state_dict().items())
