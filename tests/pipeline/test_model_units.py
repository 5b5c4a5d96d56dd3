"""Models of any kind as units: what is cut runs as it would whole, or is refused by name."""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import colossal_lite as cl
from colossal_lite.config.pipeline_schema import PipelineConfig
from colossal_lite.distributed.communicator import CommError
from colossal_lite.models import GPT, GPTConfig
from colossal_lite.models.gpt import Block
from colossal_lite.parallel.parallelize import facts_of
from colossal_lite.pipeline.model_units import UnitModules, costs_of, sections_of
from colossal_lite.pipeline.partition import (
    FLOPS_PER_BYTE,
    Partition,
    Unit,
    partition,
    transformer_units,
)
from colossal_lite.pipeline.stages import lay_out
from colossal_lite.pipeline.step_plan import StepShape, compute_plan
from colossal_lite.planner import planner
from colossal_lite.schedule.simulator import simulate
from tests.shared.parity import SIZES, Case, assert_parity, start, steps_of
from tests.shared.pool import RankEnv, run_world

V, D = SIZES["vocabulary"], 8


@dataclass(frozen=True)
class ModelCase(Case):
    """A case of a model of its own."""

    make: Callable[[], nn.Module] = nn.Module
    pipeline: Any = 2

    def model(self) -> nn.Module:
        return self.make()


def case_of(make: Callable[[], nn.Module], **changes: Any) -> ModelCase:
    pipeline = dict(size=2, micro_batches=3) | changes.pop("pipeline", {})
    return ModelCase(
        make=make, build="module", tokens=6, steps=2, ragged=True, pipeline=pipeline, **changes,
    )  # fmt: skip


# ---- how auto lies on its ranks ----


@pytest.mark.parametrize(
    ("layers", "vocabulary", "micro_batches"),
    [(4, 64, 2), (4, 64, 8), (4, 512, 3), (4, 2048, 3), (6, 4096, 8)],
)
def test_auto_lies_in_a_loop_or_folded_by_the_costs_of_its_own_cut(
    layers: int, vocabulary: int, micro_batches: int
) -> None:
    """By uniform costs four of these five would lie the other way, and a step of the last take 1.28 times as long."""
    model = GPT(GPTConfig(**SIZES | dict(layers=layers, vocabulary=vocabulary, sequence=32, tied=False)))
    config = PipelineConfig(size=2, schedule="auto", stages_per_rank=2, micro_batches=micro_batches)
    units = costs_of(sections_of(model), model, facts_of(model))

    def makespan(cut: Partition, placement: tuple[int, ...]) -> float:
        costs = cut.stage_costs()
        shape = StepShape(micro_batches, costs=costs, placement=placement)
        return simulate(compute_plan(config, shape), costs).makespan_s

    def takes(placement: tuple[int, ...]) -> float:
        plan = compute_plan(config, StepShape(micro_batches, placement=placement))
        cut = partition(
            units, 4, placement=plan.placement(),
            makespan=lambda costs: simulate(plan, costs).makespan_s,
        )  # fmt: skip
        return makespan(cut, placement)

    laid = lay_out(model, facts_of(model), config, 0)
    chosen = tuple(rank for _, rank in sorted(laid.placement.items()))
    assert makespan(laid.cut, chosen) == takes(chosen) == min(takes((0, 1, 0, 1)), takes((0, 1, 1, 0)))


# ---- a module in several places ----


def repeats_an_activation() -> nn.Module:
    act = nn.Tanh()
    return nn.Sequential(nn.Embedding(V, V), nn.Linear(V, V), act, nn.Linear(V, V), act, nn.Linear(V, V))


def repeats_a_linear() -> nn.Module:
    """On both stages, and twice on the first of them."""
    shared = nn.Linear(D, D)
    return nn.Sequential(
        nn.Embedding(V, D), shared, nn.Tanh(), shared, nn.Tanh(), nn.Linear(D, D), nn.Tanh(), shared, nn.Linear(D, V)
    )  # fmt: skip


def repeats_a_dropout() -> nn.Module:
    drop = nn.Dropout(0.3)
    return nn.Sequential(nn.Embedding(V, D), drop, nn.Linear(D, D), drop, nn.Linear(D, V))


def uses_inside() -> nn.Module:
    """A member of one unit is a unit elsewhere."""
    shared = nn.Linear(D, D)
    inner = nn.Sequential(shared, nn.Tanh())
    return nn.Sequential(nn.Embedding(V, D), inner, nn.Linear(D, D), shared, nn.Linear(D, V))


REPEATS = {
    "an activation": case_of(repeats_an_activation),
    "a linear, zb-h1": case_of(repeats_a_linear, pipeline=dict(schedule="zb-h1", partition=(5, 4))),
    "a linear, interleaved": case_of(
        repeats_a_linear, pipeline=dict(schedule="interleaved", stages_per_rank=2, partition=(2, 2, 2, 3))
    ),
    "a linear, data 2, ZeRO 1": case_of(
        repeats_a_linear, world_size=4, config=dict(zero=dict(stage=1), clip_grad_norm=0.05)
    ),
    "a dropout": case_of(repeats_a_dropout),
    "a member of another unit": case_of(uses_inside, pipeline=dict(partition=(2, 3))),
}


@pytest.mark.parametrize("name", REPEATS)
def test_a_module_in_several_places_of_a_sequential_runs_in_each(name: str) -> None:
    assert_parity(REPEATS[name])


# ---- what is refused ----


class Half(nn.Sequential):
    def forward(self, x: Any) -> Any:
        return super().forward(x) * 0.5


def half() -> nn.Module:
    return Half(nn.Embedding(V, D), nn.Linear(D, V))


class Scaled(GPT):
    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        return super().forward(*args, **kwargs) * 0.5


class Doubled(Block):
    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        return 2.0 * super().forward(*args, **kwargs)


def gpt(kind: type[GPT] = GPT, block: type[Block] = Block, **own: Any) -> nn.Module:
    model = kind(GPTConfig(**SIZES))
    model.blocks[0].__class__ = block
    for name, value in own.items():
        setattr(model, name, value)
    return model


def patched() -> nn.Module:
    model = nn.Sequential(nn.Embedding(V, D), nn.Linear(D, V))
    model.forward = lambda x: nn.Sequential.forward(model, x) * 0.5  # type: ignore[method-assign]
    return model


def drops_twice() -> nn.Module:
    inner = nn.Sequential(nn.Linear(D, D), nn.Dropout(0.1))
    return nn.Sequential(nn.Embedding(V, D), inner, nn.Linear(D, D), inner, nn.Linear(D, V))


def normed(**options: Any) -> nn.Module:
    return nn.Sequential(
        nn.Embedding(V, D), nn.Linear(D, D), nn.BatchNorm1d(6, **options), nn.Linear(D, D), nn.Linear(D, V)
    )


def counted() -> nn.Module:
    """Statistics of every sample alone, but kept from batch to batch."""
    norm = nn.InstanceNorm1d(6, track_running_stats=True)
    return nn.Sequential(nn.Embedding(V, D), nn.Linear(D, D), norm, nn.Linear(D, V))


def norms_twice() -> nn.Module:
    norm = nn.BatchNorm1d(6)
    return nn.Sequential(nn.Embedding(V, D), norm, nn.Linear(D, D), norm, nn.Linear(D, V))


class Gives(nn.Module):
    """What no stage takes."""

    def __init__(self, wrap: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.linear, self.wrap = nn.Linear(D, D), wrap

    def forward(self, x: Tensor) -> Any:
        return self.wrap(self.linear(x))


def giving(wrap: Callable[[Tensor], Any]) -> Callable[[], nn.Module]:
    return lambda: nn.Sequential(nn.Embedding(V, D), Gives(wrap), nn.Linear(D, D), nn.Linear(D, V))


def makes_a_namespace(x: Tensor) -> Any:
    return SimpleNamespace(h=x)


def makes_a_gap(x: Tensor) -> Any:
    return x, None


def makes_numbers(x: Tensor) -> Any:
    return {0: x}


def hooked(of: Callable[[nn.Module], nn.Module], register: str) -> Callable[[], nn.Module]:
    """A model with a hook that does nothing on one of its modules."""

    def make() -> nn.Module:
        model = gpt()
        getattr(of(model), register)(lambda *_: None)
        return model

    return make


MAKERS: dict[str, Callable[[], nn.Module]] = {
    "sequential": repeats_an_activation,
    "half": half,
    "scaled": lambda: gpt(Scaled),
    "doubled": lambda: gpt(block=Doubled),
    "patched": patched,
    "drops twice": drops_twice,
    "normed": normed,
    "plainly normed": lambda: normed(track_running_stats=False),
    "counted": counted,
    "norms twice": norms_twice,
    "namespace": giving(makes_a_namespace),
    "gap": giving(makes_a_gap),
    "numbers": giving(makes_numbers),
    "hook on the model": hooked(lambda model: model, "register_forward_hook"),
    "hook before the model": hooked(lambda model: model, "register_forward_pre_hook"),
    "hook on a block's backward": hooked(lambda model: model.blocks[1], "register_full_backward_hook"),  # type: ignore[index, union-attr]
}
REFUSED: dict[str, tuple[str, dict[str, Any], tuple[str, ...]]] = {
    "a subclass of Sequential with a forward of its own": (
        "half", {}, ("Half has a forward of its own", "pipeline_sections()"),
    ),
    "a subclass of GPT with a forward of its own": (
        "scaled", {}, ("Scaled has a forward of its own", "pipeline_sections()"),
    ),
    "a block with a forward of its own": ("doubled", {}, ("Doubled has a forward of its own", "mix and feed")),
    "a model with a forward set on it": ("patched", {}, ("Sequential has a forward of its own",)),
    "a hook on the model": ("hook on the model", {}, ("hook on the model itself (GPT)", "within its units")),
    "a hook before the model": ("hook before the model", {}, ("hook on the model itself (GPT)",)),
    "a hook on a block": ("hook on a block's backward", {}, ("hook on blocks.1 (Block)",)),
    "a schedule that holds more than it may": (
        "sequential", dict(pipeline=dict(schedule="gpipe", activation_cap=2)),
        ("activation_cap=2: gpipe holds more; legal: 3 or more", "rank 0 holds 3 activations where 2 are allowed"),
    ),
    "a module with dropout on two stages": (
        "drops twice", dict(pipeline=dict(partition=(3, 2))), ("1.1 and 3.1 are one module on stages 0, 1",),
    ),
    "batch norm in micro-batches": (
        "normed", {}, ("2 is a BatchNorm1d", "pipeline.micro_batches=3", "LayerNorm", "micro_batches=1"),
    ),
    "batch norm in as many micro-batches as come": (
        "normed", dict(pipeline=dict(micro_batches=None)), ("2 is a BatchNorm1d", "pipeline.micro_batches=None"),
    ),
    "batch norm without statistics": ("plainly normed", {}, ("2 is a BatchNorm1d",)),
    "batch norm on data ranks": (
        "normed", dict(world_size=4, pipeline=dict(micro_batches=1)),
        ("2 is a BatchNorm1d", "and data=2 would run it on parts"),
    ),
    "batch norm in accumulation": (
        "normed", dict(pipeline=dict(micro_batches=1), config=dict(gradient_accumulation=3)),
        ("2 is a BatchNorm1d", "gradient_accumulation=3"),
    ),
    "running statistics of samples": ("counted", {}, ("2 is a InstanceNorm1d",)),
    "batch norm on two stages": (
        "norms twice", dict(pipeline=dict(micro_batches=1, partition=(3, 2))), ("1 and 3 are one module",),
    ),
    "a data rank without samples": (
        "sequential", dict(world_size=4, global_batch=1),
        ("micro_batches=3: a part of the batch has no samples on a data rank", "at least 3 samples for each data rank"),
    ),
    "a stage that gives another object": (
        "namespace", dict(pipeline=dict(partition=(2, 2))),
        ("stage 0, by its last unit '1', gives a SimpleNamespace", "a tensor, or a flat tuple, list or dict"),
    ),
    "a stage that gives a tuple with a gap": (
        "gap", dict(pipeline=dict(partition=(2, 2))), ("stage 0, by its last unit '1', gives a tuple of NoneType",),
    ),
    "a stage that gives a dict by numbers": (
        "numbers", dict(pipeline=dict(partition=(2, 2))), ("gives a dict of key 0", "dict (by words)"),
    ),
}  # fmt: skip


def fails(env: RankEnv, case: Case, model: str) -> str:
    try:
        with env.launch(case.full_config) as context:
            torch.manual_seed(3)
            engine = cl.initialize(MAKERS[model](), context=context)
            inputs, labels = (t[context.local_batch(case.global_batch)] for t in case.batch(0))
            engine.forward_backward((inputs, labels))
    except (ValueError, CommError) as error:  # of the rank itself, or of one that it waits for
        return str(error)
    return ""


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_cut_is_refused_by_name(name: str) -> None:
    model, changes, words = REFUSED[name]
    case = case_of(nn.Module, **changes)
    for said in run_world(fails, case.world_size, case, model):
        assert all(word in said for word in words), said


def trains(env: RankEnv, case: Case) -> dict[str, Tensor]:
    """The state dict after the steps of a case."""
    with env.launch(case.full_config) as context:
        engine = start(case, context)
        return [step.parameters for step in steps_of(engine, context, case)][-1]


def test_batch_norm_runs_where_the_batch_is_whole() -> None:
    case = case_of(normed, pipeline=dict(micro_batches=1), config=dict(precision="fp32"))
    assert_parity(case)
    ((alone,), piped) = (
        run_world(trains, n, replace(case, pipeline=p)) for n, p in ((1, 1), (2, case.pipeline))
    )
    for state in piped:
        assert state.keys() == alone.keys() and int(state["2.num_batches_tracked"]) == case.steps
        assert all(torch.allclose(state[name], alone[name], rtol=1e-5, atol=1e-6) for name in alone)


# ---- a model that lists its units ----


def documented() -> nn.Module:
    """The model of docs/pipeline.md."""
    text = (Path(cl.__file__).parents[1] / "docs" / "pipeline.md").read_text()
    found: dict[str, Any] = {}
    exec(text.split("```python\n")[1].split("```")[0], found)
    model: nn.Module = found["Skips"](vocabulary=V, width=D, layers=4)
    return model


LISTED = {
    "cut behind the embedding, where a tensor is sent twice": case_of(
        documented, pipeline=dict(partition=(1, 5)), config=dict(clip_grad_norm=0.05)
    ),
    "zb-v, data 2, ZeRO 2": case_of(
        documented,
        pipeline=dict(schedule="zb-v", stages_per_rank=2),
        world_size=4,
        config=dict(zero=dict(stage=2)),
    ),
    "profiled, as an example shows": case_of(documented, pipeline=dict(partition="profiled"), shows=True),
}


@pytest.mark.parametrize("name", LISTED)
def test_a_model_that_lists_its_units_is_cut_between_them(name: str) -> None:
    assert_parity(LISTED[name])


class Encodes(nn.Module):
    """Torch's own encoder, whose forward reads settings of its first block, and a table that is asked for its dtype."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(D, 2, 2 * D, dropout=0.0, batch_first=True)
        self.tables = nn.ModuleDict({"words": nn.Embedding(V, D)})
        self.encoder, self.head = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False), nn.Linear(D, V)

    def forward(self, ids: Tensor) -> Tensor:
        table = self.tables["words"]
        x = table(ids)
        causal = nn.Transformer.generate_square_subsequent_mask(ids.shape[1], dtype=table.weight.dtype)
        y: Tensor = self.head(self.encoder(x, mask=causal, is_causal=True))
        return y


def evaluates(env: RankEnv, case: Case) -> float:
    with env.launch(case.full_config) as context:
        engine = start(case, context)
        return float(
            engine.eval_step(tuple(t[context.local_batch(case.global_batch)] for t in case.batch(0)))
        )


def encodes() -> nn.Module:
    torch.manual_seed(3)
    return Encodes()


def test_code_around_blocks_reads_their_settings_and_the_dtype_of_a_table_on_every_stage() -> None:
    case = case_of(encodes)
    assert_parity(case)
    (alone,) = run_world(evaluates, 1, replace(case, pipeline=1))
    assert run_world(evaluates, 2, case) == pytest.approx([alone] * 2, rel=1e-12)


class Lists(nn.Module):
    """Units of `parts`, none of which is run."""

    def __init__(self, *parts: UnitModules) -> None:
        super().__init__()
        self.inner, self.other = nn.Sequential(nn.Embedding(V, D)), nn.Linear(D, V)
        self.parts = parts

    def pipeline_sections(self) -> Any:
        return self


@pytest.mark.parametrize(
    ("parts", "words"),
    [
        ((("inner",), ("outer",)), "'b' of .* lists 'outer', and Lists has no module 'outer'"),
        ((("inner",), ("inner.0", "other")), "lists 'inner.0', and inner is in a unit"),
        ((("inner.0",), ("inner", "other")), "lists 'inner', and inner.0 is in a unit"),
        ((("other",), ("other",)), "lists 'other', and other is in a unit"),
    ],
    ids=["no such module", "a child", "a parent", "twice"],
)
def test_units_that_list_what_is_not_there_or_is_listed_are_refused(
    parts: tuple[tuple[str, ...], ...], words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        sections_of(Lists(*map(UnitModules, "ab", parts)))


# ---- what units cost ----


def costs(model: nn.Module) -> tuple[Unit, ...]:
    return costs_of(sections_of(model), model, facts_of(model))


def test_a_lookup_costs_what_it_moves_and_a_head_of_its_size_its_flops() -> None:
    model = nn.Sequential(
        nn.Embedding(50_000, 64), nn.Linear(64, 64, bias=False), nn.Tanh(), nn.Linear(64, 50_000)
    )
    table, square, nothing, head = costs(model)
    assert table.forward == 1 + FLOPS_PER_BYTE * 2 * 1024 * 64 * 4 and table.input == 1
    assert table.weight == 1 + FLOPS_PER_BYTE * (3 * 1024 * 64 * 4 + 4 * 50_000 * 64 * 4)
    assert square.forward == square.input == square.weight == 1 + 2 * 1024 * 64 * 64
    assert 0 < nothing.cost < square.cost and head.forward > 2 * 1024 * 64 * 50_000
    assert partition(costs(model), 2).bounds == ((0, 3), (3, 4)), "not the embedding alone"
    model[0].weight.requires_grad_(False)
    assert costs(model)[0].weight == 1, "a frozen table makes no gradient"


@pytest.mark.parametrize(("name", "matrices"), [("hf-gpt2", 2), ("hf-llama", 3)])
def test_blocks_of_a_library_cost_the_matrices_that_they_have(name: str, matrices: int) -> None:
    from tests.shared.hugging_face import MODELS

    model = MODELS[name](0.0, False, True)
    facts = facts_of(model)
    assert facts is not None
    _, *halves, _ = transformer_units(facts, facts.sequence, gated=matrices == 3)
    blocks = costs(model)[1:-1]
    assert [b.weight for b in blocks] == [
        a.weight + m.weight for a, m in zip(halves[::2], halves[1::2], strict=True)
    ]
    numel = sum(p.numel() for name, p in model.named_parameters() if ".mlp." in name and p.dim() > 1)
    assert numel == matrices * facts.width * facts.ffn * facts.layers


# ---- by the clock ----

SLOW_S = 0.1


class Slow(nn.Linear):
    """Costs what no formula knows, and counts what it has seen."""

    def __init__(self) -> None:
        super().__init__(V, V)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        time.sleep(SLOW_S * x.shape[0] / 2)
        self.get_buffer("seen").add_(0 if self.training else 1)
        return super().forward(x)


def lopsided() -> nn.Module:
    """Of floats, with a loss of its own: nothing says what its inputs are."""
    return nn.Sequential(
        Slow(), Slow(), nn.Linear(V, V), nn.Linear(V, V), nn.Linear(V, V), nn.Linear(V, V)
    ).eval()


def squares(outputs: Tensor, labels: Tensor) -> tuple[Tensor, int]:
    return (outputs[..., 0] - labels).square().sum(), labels.numel()


def cut_by_the_clock(env: RankEnv, how: str) -> tuple[tuple[tuple[int, int], ...], float, float]:
    config = dict(
        parallel=dict(pipeline=dict(size=2, micro_batches=3, partition=how)), optimizer=dict(type="sgd", lr=0.1),
        precision="fp32",
    )  # fmt: skip
    torch.manual_seed(3)
    batch = torch.randn(6, 4, V), torch.randn(6, 4)  # no class is a label
    with env.launch(config) as context:
        engine = cl.initialize(
            lopsided(), context=context, criterion=squares, example=batch if how == "profiled" else None
        )
        seen = engine.full_state_dict()["0.seen"]
        return engine._stages.cut.bounds, float(seen), float(engine.train_step(batch).loss)


def test_a_model_without_sizes_is_cut_by_the_clock_of_an_example() -> None:
    by_layers, by_clock = (run_world(cut_by_the_clock, 2, how) for how in ("balanced", "profiled"))
    for (even, _, loss), (bounds, seen, same) in zip(by_layers, by_clock, strict=True):
        assert even == ((0, 3), (3, 6)) and bounds == ((0, 1), (1, 6)), "one slow layer on each stage"
        assert seen == 0, "buffers are as they were before the profile"
        assert math.isclose(loss, same, rel_tol=1e-6)


class Folded(nn.Module):
    """Fails on no samples, as attention of Hugging Face does."""

    def forward(self, x: Tensor) -> Tensor:
        return x.view(*x.shape[:2], -1, 2).flatten(2).tanh()


def folded() -> nn.Module:
    return nn.Sequential(nn.Embedding(V, D), Folded(), nn.Linear(D, D), Folded(), nn.Linear(D, V))


def test_a_rank_without_samples_of_the_example_takes_part_in_the_profile() -> None:
    pipeline = dict(micro_batches=None, partition="profiled")
    assert_parity(case_of(folded, pipeline=pipeline, world_size=4, global_batch=1, shows=True))


def cut_again(env: RankEnv, folder: str) -> tuple[list[Any], list[str]]:
    """Stages of a run, of its resume after the clock has changed, and of one that knows no directory; warnings."""
    pipeline = dict(size=2, micro_batches=3, partition="profiled")
    config = dict(parallel=dict(pipeline=pipeline), optimizer=dict(type="sgd", lr=0.1), precision="fp32")
    batch = torch.randn(6, 4, V), torch.randn(6, 4)
    bounds, slow = list[Any](), Slow.forward
    with warnings.catch_warnings(record=True) as caught, pytest.MonkeyPatch.context() as patch:
        warnings.simplefilter("always")
        for directory in (folder, folder, None):
            torch.manual_seed(3)
            with env.launch(config) as context:
                engine = cl.initialize(
                    lopsided(), context=context, criterion=squares, example=batch, directory=directory
                )
                engine.resume(folder)
                bounds.append(engine._stages.cut.bounds)
                engine.train_step(batch)
                if engine.steps == 1:
                    engine.save(folder)
            patch.setattr(Slow, "forward", nn.Linear.forward)  # all layers are alike from now on
        patch.setattr(Slow, "forward", slow)
    return bounds, [str(each.message) for each in caught if "by the clock" in str(each.message)]


def test_a_cut_by_the_clock_is_kept_with_the_run_and_repeated(tmp_path: Path) -> None:
    for rank, (bounds, said) in enumerate(run_world(cut_again, 2, str(tmp_path))):
        assert bounds[0] == bounds[1] == ((0, 1), (1, 6)) and bounds[2] != bounds[0]
        assert len(said) == (3 if rank == 0 else 0)
        assert all("partition=[1, 5] or initialize(directory=...) repeats it" in line for line in said[:2])


def test_a_plan_says_in_words_that_it_does_not_know_the_clock() -> None:
    said = {}
    for how in ("balanced", "profiled"):
        config = dict(parallel=dict(pipeline=dict(size=2, micro_batches=2, partition=how)))
        made = planner.plan(config, GPTConfig(**SIZES), batch=4, sequence=12, world_size=2)
        said[how] = str(made)
    assert (
        "a run is cut by the clock" in said["profiled"]
        and "this is the cut by the formula" in said["profiled"]
    )
    assert "clock" not in said["balanced"]
