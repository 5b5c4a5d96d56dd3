"""`plan` as a function and as a command: arithmetic, depth, refusals, and what it costs at 4,096 ranks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import warnings
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import colossal_lite as cl
from colossal_lite.config.errors import ConfigError
from colossal_lite.launcher import command as cli
from colossal_lite.models import GPT, GPTConfig
from colossal_lite.observe.memory_meter import LiveBytes
from colossal_lite.planner.compare import compare_tensor
from colossal_lite.planner.dry_run import DryRun
from colossal_lite.planner.model_source import parse_model
from colossal_lite.planner.planner import plan
from colossal_lite.planner.run_plan import RunPlan
from colossal_lite.schedule.schedule_drawing import draw
from tests.shared.pool import RankEnv, run_world

ROOT = Path(__file__).parents[2]
DEEP = GPTConfig(vocabulary=96, layers=7, heads=4, width=32, sequence=24, dropout=0.1)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_live_bytes_count_each_storage_once_while_it_lives(device: str) -> None:
    with LiveBytes() as meter:
        a = torch.empty(1000, device=device)
        b = a * 2
        view = b[2:].view(2, -1)
        assert meter.now_bytes == 8000
        del b
        assert meter.now_bytes == 8000  # the view keeps it
        view.add_(1)
        del view
        assert (meter.now_bytes, meter.peak_bytes) == (4000, 8000)
        assert meter.window() == 8000 and meter.peak_bytes == 4000
    del a
    assert meter.now_bytes == 0


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("tensor", [1, 2])
@pytest.mark.parametrize("mode", ["none", "full"])
def test_depth_is_extrapolated_exactly(mode: str, tensor: int, tied: bool) -> None:
    """Two and three blocks foretell seven: the same plan as from running all of them."""
    model = replace(DEEP, tied=tied)
    config = dict(activation_checkpoint=mode, parallel=dict(tensor=tensor), gradient_accumulation=2)
    make = partial(plan, config, batch=7, sequence=24, world_size=4)
    assert make(model) == make(partial(GPT, model))


def test_depth_where_the_worst_moment_comes_after_the_last_block() -> None:
    """A large vocabulary: the embedding's gradient at the very end can weigh more than what the blocks keep."""
    for layers in (4, 12):
        model = GPTConfig(vocabulary=5000, layers=layers, heads=2, width=16, sequence=8, tied=False)
        made = plan({}, model, batch=1, sequence=8, world_size=1)
        assert made == plan({}, partial(GPT, model), batch=1, sequence=8, world_size=1)


def test_the_batch_arithmetic_says_where_each_number_comes_from() -> None:
    config = dict(gradient_accumulation=2, parallel=dict(tensor=2))
    made = plan(config, DEEP, batch=7, sequence=24, world_size=4, rank=3)
    terms = {term.name: (term.value, term.origin) for term in made.batch}
    assert terms["global batch"][0] == 7 and terms["tokens a step"][0] == 7 * 24
    assert terms["data"] == (2, "parallel.data, derived")
    assert terms["local batch"][0] == 3 and made.micro_batches == (2, 1)
    assert terms["accumulation"] == (2, "gradient_accumulation, user")
    assert "7" in str(made) and "all_gather on tensor" in str(made)


def test_state_is_the_formula_and_tensor_parallelism_cuts_it() -> None:
    model = GPTConfig(vocabulary=1024, layers=4, heads=8, width=128, sequence=64, tied=False, bias=False)
    one = plan(dict(precision="bf16"), model, batch=8, sequence=64, world_size=1)
    kinds = {row.kind: row.bytes for row in one.memory}
    stored = kinds["weights"] // 2
    assert 0 <= stored - one.parameters < 0.01 * one.parameters
    assert kinds["masters"] == kinds["gradients"] == 4 * stored and kinds["optimizer"] == 8 * stored
    four = plan(dict(precision="bf16", parallel=dict(tensor=4)), model, batch=8, sequence=64, world_size=4)
    assert 0.25 <= four.state_bytes / one.state_bytes < 0.27
    assert four.parameters == one.parameters


STREAMED = dict(
    parallel=dict(pipeline=dict(size=16, stages_per_rank=2, schedule="interleaved")),
    zero=dict(stage=3),
    memory=dict(placement="host"),
    precision="bf16",
)


@pytest.mark.parametrize(
    ("config", "model", "numel"),
    [
        (dict(parallel=dict(tensor=8)), "llama-70B", 70_553_706_496),
        (STREAMED, "llama-8B", 8_030_261_248),
    ],
)
def test_a_world_of_4096_takes_at_most_3_s_of_cpu_and_no_algebra(
    config: dict[str, Any], model: str, numel: int
) -> None:
    """A whole process, torch's import left out, of a package that was used before: its modules are compiled.
    Torch loads its algebra, half a second, for shapes of which we have no rule. The pipeline has 32 micro-batches."""
    imports = (
        "import sys, time, torch; start = time.process_time(); "
        "from colossal_lite.planner.planner import plan; "
        "from colossal_lite.planner.model_source import parse_model; "
    )
    code = (
        f"{imports}"
        f"made = plan({config}, parse_model({model!r}), batch=8192, sequence=4096, world_size=4096, rank=4095); "
        "print(time.process_time() - start, made.parameters, 'sympy' in sys.modules)"
    )
    env = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    _, ended = (
        subprocess.run(
            [sys.executable, "-c", each], cwd=ROOT, env=env, capture_output=True, text=True, timeout=120
        )
        for each in (imports, code)
    )
    seconds, parameters, has_algebra = ended.stdout.split()
    assert float(seconds) <= 3.0 and (int(parameters), has_algebra) == (numel, "False"), ended


@pytest.mark.parametrize(
    "parallel",
    [
        {},
        dict(tensor=2),
        dict(tensor=dict(size=4, mode="2d")),
        dict(sequence=dict(size=2, mode="ring")),
    ],
    ids=str,
)
def test_stages_of_like_blocks_cost_the_same(parallel: dict[str, Any]) -> None:
    """A dry run measures one of them. `alike=False` measures each."""
    model = GPTConfig(vocabulary=64, layers=11, heads=4, width=16, sequence=16, tied=False, bias=False)
    measure, found = DryRun.stages, list[Any]()

    def both(*given: Any, alike: bool) -> Any:
        assert alike
        found.append([measure(*given, alike=each) for each in (True, False)])
        return found[-1][0]

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(DryRun, "stages", both)
        for schedule, recompute in (("interleaved", "none"), ("zb-v", "full")):
            pipeline = dict(size=4, stages_per_rank=2, schedule=schedule)
            given = dict(parallel={**parallel, "pipeline": pipeline}, activation_checkpoint=recompute)
            plan(given, model, batch=8, sequence=16, world_size=16)
    assert len(found) == 2 and all(once == each for once, each in found)


# ---- bad input ----


def not_gpt() -> nn.Module:
    return nn.Sequential(nn.Embedding(8, 4), nn.Linear(4, 8))


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        (dict(batch=0), "batch = 0"),
        (dict(sequence=25), "sequence = 25: is more than the model takes; legal: 1 to 24"),
        (dict(rank=4), "rank = 4"),
        (dict(world_size=3), "world has 3 ranks"),
        (dict(config=dict(parallel=dict(tensor=8)), world_size=8), "4 heads do not divide"),
        (dict(config=dict(parallel=dict(pipeline=dict(size=2, micro_batches=8)))), "at most 2 micro-batches"),
    ],
)
def test_what_cannot_be_planned_is_refused(changes: dict[str, Any], says: str) -> None:
    asked = dict(config=dict(parallel=dict(tensor=2)), batch=4, sequence=24, world_size=4) | changes
    with pytest.raises(ConfigError, match=says):
        plan(asked.pop("config"), DEEP, **asked)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.cells, self.head = (
            nn.Embedding(8, 4),
            nn.LSTM(4, 4, batch_first=True),
            nn.Linear(4, 8),
        )

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.head(self.cells(self.embedding(ids))[0])
        return found


def test_a_plan_of_a_recurrent_model_says_that_it_leaves_out_what_its_kernels_keep() -> None:
    """On a CPU that of nn.LSTM keeps 2.6 times what a loop over its cells keeps."""
    told = "without what kernels of LSTM keep"
    assert told in str(plan(dict(precision="fp32"), Recurrent, batch=6, sequence=5, world_size=3))
    assert told not in str(plan(dict(precision="fp32"), not_gpt, batch=6, sequence=5, world_size=3))


class Masked(nn.Module):
    """Makes a mask of its own for whole sequences, so that no rank can run it on a part of them."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(8, 16), nn.Linear(16, 8)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(16, 2, 32, 0.0, batch_first=True) for _ in range(2)
        )

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embedding(ids)
        mask = nn.Transformer.generate_square_subsequent_mask(ids.shape[1], ids.device, x.dtype)
        for layer in self.layers:
            x = layer(x, src_mask=mask)
        found: torch.Tensor = self.head(x)
        return found


def trained(env: RankEnv, config: dict[str, Any]) -> tuple[Any, int]:
    """Traffic of a step, and bytes of weights."""
    with env.launch(config) as context, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that sequences are whole
        engine = cl.initialize(Masked, context=context)
        ids = torch.arange(32).view(4, 8) % 8
        for _ in range(2):
            engine.train_step((ids, (ids + 1) % 8))
        (weights,) = (row.now_bytes for row in engine.memory_report() if row.kind == "weights")
        return engine.ledger.rows(), weights


@pytest.mark.parametrize("pipeline", [1, 2])
def test_a_model_that_needs_whole_sequences_is_planned_as_a_run_has_it(pipeline: int) -> None:
    config: dict[str, Any] = dict(precision="fp32", parallel=dict(tensor=dict(size=2)))
    config["parallel"]["pipeline"] = dict(size=pipeline, micro_batches=2 if pipeline > 1 else None)
    for rank, (traffic, weights) in enumerate(run_world(trained, 2 * pipeline, config)):
        made = plan(config, Masked, batch=4, sequence=8, world_size=2 * pipeline, rank=rank, one_host=True)
        assert (made.traffic, made.bytes_of("weights")) == (traffic, weights)
        assert "sequence_parallel: off" in "\n".join(made.head)


def test_more_micro_batches_than_samples_are_refused_once_and_the_legal_number_is_planned() -> None:
    asked = partial(plan, model=DEEP, batch=6, sequence=8, world_size=4)
    with pytest.raises(ConfigError) as caught:
        asked(dict(parallel=dict(pipeline=dict(size=2, micro_batches=4))))
    text = str(caught.value)
    assert "micro_batches = 4: the batch has 3 samples on this data rank; legal: at most 3" in text
    assert text.count("legal: ") == 1
    assert asked(dict(parallel=dict(pipeline=dict(size=2, micro_batches=3)))).micro_batches == (1, 1, 1)


def test_a_plan_says_what_a_run_proves_first() -> None:
    config = dict(precision="fp32", parallel=dict(tensor=dict(size=2)))
    given = dict(precision="fp32", parallel=dict(tensor=dict(size=2, sequence_parallel=False)))
    asked = dict(batch=4, sequence=8, world_size=2)
    assert "taken as on; a run proves it" in plan(config, Recurrent, **asked).head[-1]
    for known in (plan(given, Recurrent, **asked), plan(config, DEEP, **asked)):
        assert "a run proves it" not in str(known)


def test_any_builder_is_planned_as_it_is() -> None:
    made = plan(dict(precision="fp32"), not_gpt, batch=6, sequence=5, world_size=3)
    assert made.parameters == 8 * 4 + 4 * 8 + 8
    assert [(r.operation, r.axis, r.calls) for r in made.traffic] == [
        ("all_reduce", "data", 1),
        ("all_reduce", "world", 1),
    ]
    # ids, the embedding's output, logits and what the loss keeps of each row
    assert made.bytes_of("logits") == 2 * 5 * 8 * 4


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("gpt2-355M", GPTConfig.gpt2("355M")),
        ("llama-8B,layers=4,dropout=0.5", GPTConfig.llama("8B", layers=4, dropout=0.5)),
        ("layers=2,width=8,heads=2,tied=false,position=rotary", GPTConfig(
            layers=2, width=8, heads=2, tied=False, position="rotary")),
    ],
)  # fmt: skip
def test_a_model_in_words(text: str, expected: GPTConfig) -> None:
    assert parse_model(text) == expected


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("gpt3-1B", "legal: gpt2-SIZE"),
        ("gpt2-1B", "legal are '124M'"),
        ("llama-8B,depth=3", "depth=3.*field of GPTConfig"),
        ("layers=two", "legal: a value of type int"),
        ("layers=2,heads=5", "not divisible"),
    ],
)
def test_a_model_that_is_none_is_refused_in_words(text: str, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        parse_model(text)


# ---- the command ----


@pytest.fixture
def config(tmp_path: Path) -> str:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(dict(precision="bf16", clip_grad_norm=1.0)))
    return str(path)


ARGUMENTS = [
    "--model",
    "layers=2,heads=4,width=32,vocabulary=64,sequence=16",
    "--batch",
    "8",
    "--sequence",
    "16",
]


def command(capsys: pytest.CaptureFixture[str], *more: str, model: str = "") -> tuple[int, str, str]:
    code = cli.main(
        ["plan", *more, *ARGUMENTS[:1], ",".join(filter(None, (ARGUMENTS[1], model))), *ARGUMENTS[2:]]
    )
    printed = capsys.readouterr()
    return code, printed.out, printed.err


def test_the_command_prints_the_plan(capsys: pytest.CaptureFixture[str], config: str) -> None:
    code, out, err = command(capsys, config, "--world", "8", "--parallel.tensor.size", "2", "--rank", "7")
    assert code == 0 and err == ""
    for part in ("rank 7 of 8", "data 4 x sequence 1 x tensor 2", "weights", "activations", "reduce_scatter"):
        assert part in out


def test_the_command_says_whether_it_fits(capsys: pytest.CaptureFixture[str], config: str) -> None:
    code, out, _ = command(capsys, config, "--world", "1", "--device-memory", "1GiB")
    assert code == 0 and "fits in 1.00 GiB" in out
    code, out, _ = command(capsys, config, "--world", "1", "--device-memory", "100KiB")
    assert code == 1 and "does not fit in 100.00 KiB" in out


def test_a_pipeline_is_told_in_100_columns_and_drawn_into_a_file(
    capsys: pytest.CaptureFixture[str], config: str, tmp_path: Path
) -> None:
    file = tmp_path / "plan.svg"
    staged = (config, "--parallel.pipeline.size", "8", "--parallel.pipeline.micro_batches", "8")
    code, out, _ = command(capsys, *staged, "--world", "8", "--svg", str(file), model="layers=8")
    assert code == 0 and f"{file}: the schedule" in out and "rank 0 |" not in out
    assert max(map(len, out.replace(str(file), "").splitlines())) <= 100
    assert file.read_text().startswith("<svg") and ">rank 7</text>" in file.read_text()
    code, out, err = command(
        capsys, *staged, "--world", "8", "--svg", str(tmp_path / "no" / "plan.svg"), model="layers=8"
    )
    assert (code, out) == (2, "") and f"there is no folder {tmp_path / 'no'}; legal: a file in one" in err


@pytest.mark.parametrize(
    ("more", "says"),
    [
        (
            ["--world", "1", "--svg", "plan.svg"],
            "has no schedule to draw; legal: with parallel.pipeline.size",
        ),
        (["--world", "3", "--parallel.tensor.size", "2"], "the world has 3 ranks"),
        (["--world", "8", "--parallel.tensor.size", "8"], "4 heads do not divide into 8 parts"),
        (["--world", "1", "--device-memory", "much"], "device memory: 'much'"),
        (["--world", "1", "--optimizer.lrr", "1"], "unknown key"),
    ],
)
def test_the_command_refuses_with_exit_2(
    capsys: pytest.CaptureFixture[str], config: str, more: list[str], says: str
) -> None:
    code, out, err = command(capsys, config, *more)
    assert (code, out) == (2, "") and says in err


def test_a_model_of_other_inputs_than_ids_is_refused_by_name() -> None:
    """Its own error said neither that ids were tried nor what can be planned, and some ended the command raw."""
    for layer in (partial(nn.Conv2d, 3, 8, 2), partial(nn.Unflatten, 2, (2, 2)), partial(nn.Linear, 4, 8)):
        with pytest.raises(
            ValueError, match=r"model: \w+ does not run on ids \[2, 8\].*legal: a model whose"
        ):
            plan({}, layer, batch=2, sequence=8, world_size=1)


class WithBuffer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(8, 4), nn.Linear(4, 8)
        self.register_buffer("scale", torch.ones(4))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.head(self.table(ids) * self.scale)
        return logits


def test_roles_that_a_plan_cannot_read_are_refused_with_what_a_plan_takes() -> None:
    """It named `example=` of cl.initialize, which a plan has not."""
    tensor = dict(parallel=dict(tensor=dict(size=2)))
    with pytest.raises(
        ValueError, match="it has buffers on meta.* Legal: parallel.tensor.size=1, or"
    ) as told:
        plan(tensor, WithBuffer, batch=2, sequence=8, world_size=2)
    assert "example" not in str(told.value)


def test_the_command_prints_the_whole_step_in_brief(capsys: pytest.CaptureFixture[str], config: str) -> None:
    given = ("--zero.stage", "3", "--memory.placement", "host")
    staged = ("--parallel.pipeline.size", "2", "--parallel.pipeline.micro_batches", "4")
    code, out, _ = command(capsys, config, *given, *staged, "--world", "4")
    step = " ".join(out[out.index("2 lists in a step") :].split())
    assert code == 0 and step.startswith("2 lists in a step, each of 2 ranks; of rank 0: 1f1b; messages")
    assert "prefetch 1; gradients summed by micro-batch, updates by step; state in its tiers: host" in step
    assert "(0F0 0SEND_F0) x 2" in step and "from the norm to the next forward: FETCH#0" in step


def test_a_step_without_stages_is_printed_with_the_gathers_of_its_blocks_and_the_parts_on_the_host(
    capsys: pytest.CaptureFixture[str], config: str
) -> None:
    given = ("--zero.stage", "3", "--memory.placement", "host", "--gradient_accumulation", "2")
    code, out, _ = command(capsys, config, *given, "--memory.update_on", "host", "--world", "2")
    step = " ".join(out[out.index("one list in a step") :].split())
    assert code == 0 and "(0F0 0B0 0REDUCE0#3..0) x 2" in step
    assert "within a micro-batch, stages being blocks: UNSHARD#0" in step and "@cpu" in step


def test_a_plan_is_data() -> None:
    made = plan({}, DEEP, batch=4, sequence=24, world_size=2)
    assert isinstance(made, RunPlan) and hash(made) == hash(
        plan({}, DEEP, batch=4, sequence=24, world_size=2)
    )
    assert made.peak_bytes == sum(row.bytes for row in made.memory) and made.fits is None
    assert replace(made, device_bytes=made.peak_bytes).fits
    assert not replace(made, device_bytes=made.peak_bytes - 1).fits


ABSURD: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "layers": (dict(layers=10**6), {}, "model.layers = 1000000"),
    "world": ({}, dict(world_size=10**9), "world = 1000000000"),
    "micro-batches": (
        {}, dict(config=dict(parallel=dict(pipeline=dict(size=2, micro_batches=10**5))), batch=10**5, world_size=2),
        "parallel.pipeline.micro_batches = 100000",
    ),
    "accumulation": ({}, dict(config=dict(gradient_accumulation=10**9)), "gradient_accumulation = 1000000000"),
    "width": (dict(width=10**9), {}, "makes a tensor of more than"),
    "batch": ({}, dict(batch=10**17), "makes a tensor of more than"),
}  # fmt: skip


@pytest.mark.parametrize("what", ABSURD)
def test_absurd_sizes_are_refused_within_a_second(what: str) -> None:
    model, given, words = ABSURD[what]
    options = dict(config={}, batch=4, sequence=24, world_size=1) | given
    begun_s = time.process_time()
    with pytest.raises(ConfigError, match=words):
        plan(options.pop("config"), replace(DEEP, **model), **options)
    assert time.process_time() - begun_s < 1


def test_comparing_modes_in_an_absurd_world_and_drawing_an_absurd_schedule_are_refused_within_a_second() -> (
    None
):
    begun_s = time.process_time()
    with pytest.raises(ConfigError, match="world = 1000000000"):
        compare_tensor({}, DEEP, batch=4, sequence=24, world_size=10**9)
    with pytest.raises(ValueError, match="4000 micro-batches: 16,000,000 forwards.*legal: up to 40,000"):
        draw(4000, 4000, "1f1b")
    assert time.process_time() - begun_s < 1
