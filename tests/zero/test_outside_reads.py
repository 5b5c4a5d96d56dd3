"""A weight that code reads without calling the module that owns it has the serial values, or is refused by name."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import colossal_lite as cl
from colossal_lite.pipeline.model_units import UnitModules
from tests.shared.plain_loop import batches, plain_run
from tests.shared.pool import RankEnv, run_world

WORDS, WIDTH, CODES = 16, 8, 6
SGD = dict(precision="fp64", optimizer=dict(type="sgd", lr=0.5), seed=3, timeout_s=60)
STEPS = 3


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.inner(x))


class Reads(nn.Module):
    """Reads weights in a way that no gate sees, as `way` says."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way
        self.words = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        if way == "before the blocks":
            self.scale = nn.Parameter(torch.rand(WIDTH))
        if way == "lists":
            first = nn.ParameterList([torch.rand(WIDTH)])
            self.scales = nn.ParameterDict(dict(first=first, last=nn.Parameter(torch.rand(WIDTH))))
        if way.startswith("written"):
            self.count = nn.Parameter(torch.zeros(()), requires_grad=False)
        self.codes = nn.Embedding(CODES, WIDTH)
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.words(ids)
        if self.way == "nearest":  # of a table, as a quantizer finds it
            with torch.no_grad():
                nearest = torch.cdist(x, self.codes.weight.expand(len(x), -1, -1)).argmin(-1)
            x = x + self.codes(nearest)
        elif self.way == "norm":
            x = x / (1 + self.head.weight.detach().norm())
        elif self.way == "before the blocks":  # what later stages run on zeros
            x = (x * self.scale + self.scale.detach().norm()).square() * self.scale
        elif self.way == "sum":  # autograd saves no term of a sum
            x = x + self.blocks[3].inner.bias
        elif self.way == "shape":  # reads no value
            x = x + torch.zeros_like(self.head.weight).sum() + self.codes.weight.shape[0]
        elif self.way.startswith("written"):
            if self.way == "written in a list":
                torch._foreach_add_([self.count.data], 1)
            elif self.way == "written as out":
                torch.add(self.count.data, 1, out=self.count.data)
            elif self.way == "written anew":
                self.count.data = self.count.data + 1
            else:
                self.count.data += 1
            x = x * self.count
        elif self.way == "evaluated" and not self.training:
            x = x * self.codes.weight.abs().max()
        for block in self.blocks:
            x = block(x)
            if self.way == "lists":
                x = x * self.scales["first"][0] + self.scales["last"]
        logits: Tensor = self.head(x)
        return logits


class Staged(Reads):
    """Says its units itself. The first one reads its own table and the last one its head, before they call these.
    `way` "foreign": the first one reads a table of the last."""

    def forward(self, ids: Tensor) -> Tensor:
        x = self.begin(ids)
        for block in self.blocks:
            x = block(x)
        return self.end(x)

    def begin(self, ids: Tensor) -> Tensor:
        table = self.codes if self.way == "foreign" else self.words
        x: Tensor = self.words(ids) / (1 + table.weight.detach().norm())
        return x

    def end(self, x: Tensor) -> Tensor:
        scale = 1 + self.head.weight.detach().norm()
        logits: Tensor = self.head(x / scale + self.codes.weight.mean())
        return logits

    def pipeline_sections(self) -> Sections:
        return Sections(self)


class Sections:
    def __init__(self, module: Staged) -> None:
        self.module = module
        blocks = (UnitModules(f"block {i}", (f"blocks.{i}",)) for i in range(4))
        self.parts = (UnitModules("first", ("words",)), *blocks, UnitModules("last", ("codes", "head")))

    def run(self, start: int, stop: int, carried: Tensor | None, batch: Any) -> Tensor:
        x = self.module.begin(batch.inputs) if carried is None else carried
        for i in range(max(start, 1), min(stop, 5)):
            x = self.module.blocks[i - 1](x)
        return self.module.end(x) if stop > 5 else x


def model(way: str) -> Reads:
    torch.manual_seed(0)
    return (Staged if way in ("staged", "foreign") else Reads)(way).double()


def parallel(env: RankEnv, way: str, more: dict[str, Any]) -> tuple[list[float], float, dict[str, Tensor]]:
    with env.launch(SGD | dict(memory=dict(chunk_bytes=256)) | more) as context:
        engine = cl.initialize(model(way), context=context)
        mine = slice(env.rank, None, env.world_size)
        losses = [
            float(engine.train_step((inputs[mine].contiguous(), labels[mine].contiguous())).loss)
            for inputs, labels in batches(WORDS, STEPS)
        ]
        inputs, labels = batches(WORDS, STEPS)[0]
        evaluated = float(engine.eval_step((inputs[mine].contiguous(), labels[mine].contiguous())))
        return losses, evaluated, engine.full_state_dict()


def assert_serial(got: tuple[list[float], float, dict[str, Tensor]], way: str) -> None:
    truth = plain_run(model(way), batches(WORDS, STEPS), 0.5)
    assert got[0] == pytest.approx(truth.losses, rel=1e-12)
    assert got[1] == pytest.approx(truth.evaluated, rel=1e-12)
    for name, weight in truth.weights.items():
        torch.testing.assert_close(got[2][name], weight, rtol=1e-11, atol=1e-13)


def offloaded(stage: int) -> dict[str, Any]:
    return dict(
        zero=dict(stage=stage),
        memory=dict(placement="host", chunk_bytes=256, rates=dict(up=10**9, down=10**9)),
    )


SHARDED_STATE = {
    "zero 1": dict(zero=dict(stage=1)),
    "zero 2": dict(zero=dict(stage=2)),
    "zero 2, state on the host": offloaded(2),
    "accumulated": dict(zero=dict(stage=1), gradient_accumulation=2),
}


@pytest.mark.parametrize("way", ["nearest", "norm", "sum", "shape", "evaluated"])
@pytest.mark.parametrize("mode", SHARDED_STATE)
def test_with_whole_weights_a_read_outside_the_owner_is_exact(mode: str, way: str) -> None:
    for got in run_world(parallel, 2, way, SHARDED_STATE[mode]):
        assert_serial(got, way)


@pytest.mark.parametrize("stage", [1, 2])
def test_in_a_pipeline_a_read_outside_the_owner_is_exact_in_its_stage(stage: int) -> None:
    stages = dict(pipeline=dict(size=1, stages_per_rank=2, schedule="bfs"))
    for got in run_world(parallel, 2, "staged", dict(zero=dict(stage=stage), parallel=stages)):
        assert_serial(got, "staged")


def test_in_a_pipeline_at_stage_3_the_weights_of_a_stage_are_there() -> None:
    stages = dict(pipeline=dict(size=1, stages_per_rank=2, schedule="bfs"))
    for got in run_world(parallel, 2, "staged", dict(zero=dict(stage=3), parallel=stages)):
        assert_serial(got, "staged")


def test_in_a_pipeline_at_stage_3_a_read_of_another_stage_s_weight_is_refused_by_name() -> None:
    stages = dict(pipeline=dict(size=1, stages_per_rank=2, schedule="bfs"))
    for told in run_world(told_of_parallel, 2, "foreign", dict(zero=dict(stage=3), parallel=stages)):
        assert "codes.weight" in told and "is read while it is not gathered" in told


@pytest.mark.parametrize(
    "more",
    [
        dict(parallel=dict(pipeline=dict(size=1, stages_per_rank=2, schedule="bfs"))),
        dict(
            parallel=dict(pipeline=dict(size=2, stages_per_rank=2, schedule="zb-v", micro_batches=2)),
            memory=dict(placement="static", host_fraction=dict(weights=1.0, gradients=0.5, optimizer=0.5)),
        ),
    ],
    ids=["shards", "on the host"],
)
def test_in_a_pipeline_at_stage_3_later_stages_may_run_what_reads_weights_of_the_first(
    more: dict[str, Any],
) -> None:
    for got in run_world(parallel_halves, 2, dict(zero=dict(stage=3)) | more):
        assert_serial(got, "before the blocks")


def parallel_halves(env: RankEnv, more: dict[str, Any]) -> tuple[list[float], float, dict[str, Tensor]]:
    """As `parallel` of what is read before the blocks, for any mesh; the first evaluation comes before a step."""
    with env.launch(SGD | dict(memory=dict(chunk_bytes=256)) | more) as context:
        engine = cl.initialize(model("before the blocks"), context=context)
        given = [
            tuple(part[context.local_batch(4)].contiguous() for part in batch)
            for batch in batches(WORDS, STEPS)
        ]
        engine.eval_step(given[0])
        losses = [float(engine.train_step(batch).loss) for batch in given]
        return losses, float(engine.eval_step(given[0])), engine.full_state_dict()


class Late(nn.Module):
    """Reads its head functionally from the second step on."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.calls = model(""), 0

    def forward(self, ids: Tensor) -> Tensor:
        self.calls += 1
        logits: Tensor = self.inner(ids)
        return logits if self.calls == 1 else logits / (1 + self.inner.blocks[0].inner.weight.detach().norm())


def late_reads(env: RankEnv, stage: int) -> list[bool | str]:
    """Of each step whether it is skipped, or its error."""
    found: list[bool | str] = []
    with env.launch(SGD | dict(memory=dict(chunk_bytes=256), zero=dict(stage=stage))) as context:
        engine = cl.initialize(Late(), context=context)
        for inputs, labels in batches(WORDS, STEPS) * 2:
            mine = slice(env.rank, None, env.world_size)
            try:
                found.append(
                    engine.train_step((inputs[mine].contiguous(), labels[mine].contiguous())).skipped
                )
            except ValueError as error:
                return [*found, str(error)]
    return found


def test_after_a_step_that_was_skipped_reads_are_looked_for_again() -> None:
    """At stage 3 a weight that was dropped is NaN. The read is refused when the loss was NaN once."""
    for first, second, told in run_world(late_reads, 2, 3):
        assert not first and second and "inner.blocks.0.inner." in str(told) and "zero.stage=2" in str(told)


@pytest.mark.parametrize("way", ["nearest", "norm", "sum", "evaluated"])
def test_at_stage_3_a_read_outside_the_owner_is_refused_by_name(way: str) -> None:
    for told in run_world(told_of_parallel, 2, way, dict(zero=dict(stage=3))):
        name = dict(nearest="codes.weight", norm="head.weight", sum="blocks.3.", evaluated="codes.weight")[
            way
        ]
        assert name in told and "is read while it is not gathered" in told and "zero.stage=2" in told


def test_at_stage_3_what_reads_no_value_is_exact() -> None:
    for got in run_world(parallel, 2, "shape", dict(zero=dict(stage=3))):
        assert_serial(got, "shape")


@pytest.mark.parametrize("axes", [dict(), dict(tensor=2)], ids=str)
def test_at_stage_3_lists_of_parameters_are_exact(axes: dict[str, int]) -> None:
    """Nobody calls an nn.ParameterList: its weights are there where those of its owner are."""
    for recomputes in ("none", "full"):
        more = dict(zero=dict(stage=3), parallel=axes, activation_checkpoint=recomputes)
        for got in run_world(listed, 2, more):
            assert_serial(got, "lists")


def listed(env: RankEnv, more: dict[str, Any]) -> tuple[list[float], float, dict[str, Tensor]]:
    """As `parallel`, where data ranks alone have parts of a batch."""
    with env.launch(SGD | dict(memory=dict(chunk_bytes=256)) | more) as context:
        engine = cl.initialize(model("lists"), context=context)
        cut = context.local_batch(4)
        losses = [float(engine.train_step((x[cut], y[cut])).loss) for x, y in batches(WORDS, STEPS)]
        inputs, labels = batches(WORDS, STEPS)[0]
        return losses, float(engine.eval_step((inputs[cut], labels[cut]))), engine.full_state_dict()


def told_of_parallel(env: RankEnv, way: str, more: dict[str, Any]) -> str:
    try:
        parallel(env, way, more)
    except ValueError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    "more, world",
    [
        ({}, 2),
        (dict(gradient_accumulation=2), 1),
        (dict(activation_checkpoint="full"), 1),
        (dict(zero=dict(stage=3)), 2),
    ],
)
@pytest.mark.parametrize("way", ["written", "written in a list", "written as out", "written anew"])
def test_a_forward_that_changes_a_frozen_parameter_is_refused_where_several_would(
    way: str, more: dict[str, Any], world: int
) -> None:
    for told in run_world(told_of_parallel, world, way, more):
        assert "its forward changes" in told and "count" in told and "register_buffer" in told


def test_one_forward_a_step_may_change_a_frozen_parameter() -> None:
    (got,) = run_world(parallel, 1, "written", {})
    assert_serial(got, "written")
