"""Train a GPT on bytes of text, with python, torchrun or srun, on any number of ranks, with the same numbers:

torchrun --standalone --nproc-per-node 2 examples/gpt/train.py --config small --optimizer.lr 1e-3
"""

from __future__ import annotations

import itertools
import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import tyro
from configs import CONFIGS
from generate import generate
from safetensors.torch import save_file

import colossal_lite as cl
from colossal_lite.data import Corpus, TokenWindows, read_corpus, yardsticks
from colossal_lite.launcher import env, run
from colossal_lite.manifest import CheckpointError, changes
from colossal_lite.observe import RankLog, RunLog, Scale, device_peak_flops, model_flops_per_token, run_sinks

EVALUATED_BATCHES = 16


@dataclass(frozen=True)
class Options:
    """Train a GPT on bytes. Any other option is a setting of the configuration: `--parallel.data 2`."""

    config: Literal[tuple(CONFIGS)] = "small"  # type: ignore[valid-type]
    """a function of configs.py"""
    steps: int | None = None
    """optimizer steps, if not those of the config"""
    global_batch: int | None = None
    """sequences per step over all ranks, if not those of the config"""
    data: Path | None = None
    """a text file or a folder of them; by default the source of Python's standard library"""
    out: Path | None = None
    """where metrics, timeline and model go; by default runs/NAME"""
    save_every: int = 100
    """steps between checkpoints; there is one at the end, and at SIGTERM and SIGUSR1, anyway"""
    fresh: bool = False
    """start over: what checkpoints there are is set aside, not deleted"""
    log: tuple[Literal["tensorboard", "wandb"], ...] = ()
    """further places for the numbers, offline"""
    prompt: str = "def "
    """how the sample at the end begins"""
    sample: int = 300
    """bytes of the sample"""


def main() -> None:
    speaks = env.speaks(env.environment())
    options, overrides = tyro.cli(Options, return_unknown_args=True, console_outputs=speaks)
    recipe = CONFIGS[options.config](**({} if options.steps is None else {"steps": options.steps}))
    if options.global_batch is not None:
        recipe["global_batch"] = options.global_batch
    with cl.launch(recipe["config"], overrides=overrides) as context:
        train(context, recipe, options)


def train(context: cl.Context, recipe: dict[str, Any], options: Options) -> None:
    steps, global_batch = recipe["steps"], recipe["global_batch"]
    model_config = cl.models.GPTConfig(**recipe["model"])
    corpus = read_corpus(options.data)
    corpus.assert_same(context.mesh.world)
    windows, held_out = corpus.windows(model_config.sequence, global_batch)
    engine = cl.initialize(lambda: cl.models.GPT(model_config), context=context)
    run_folder = options.out or Path("runs") / options.config
    folder = run_folder if context.is_main else None  # of the one rank that tells
    facts = {"model": recipe["model"], "global_batch": global_batch, "corpus": corpus.sha256}
    start = resume(engine, run_folder / "checkpoints", facts, fresh=options.fresh)
    loader = context.dataloader(windows, global_batch=global_batch, start=start)
    scale = describe(context, corpus, recipe, folder) if folder else Scale()
    sinks = run_sinks(options.log, folder, facts)

    def save() -> None:
        try:
            engine.save(run_folder / "checkpoints", samples=loader.samples, extra=facts)
        except CheckpointError as error:  # the same on every rank: the run goes on, the last one still loads
            log.say(f"NOT SAVED: {error}")
        log.lap()

    log = RunLog(
        folder, total_steps=steps, scale=scale, device=context.device, resumed_step=engine.steps, also=sinks
    )
    with RankLog(run_folder / "logs", context.rank), log:
        for batch in loader.take(steps - engine.steps):
            with log.timeline.span("step"):
                result = engine.train_step(batch)
            log.step(result, engine.ledger.payload_bytes)
            if result.step % recipe["evaluate_every"] == 0 or result.step == steps:
                with log.timeline.span("evaluate"):
                    loss = evaluate(engine, context, held_out, global_batch)
                log.evaluated(result.step, loss)
            if engine.stop_agreed or result.step == steps or result.step % options.save_every == 0:
                with log.timeline.span("save"):
                    save()
            if engine.stop_agreed:
                break
    engine.close()
    if engine.steps < steps:
        if context.is_main:
            print(f"stopped at step {engine.steps} of {steps}; the same command goes on")
        return
    weights = engine.full_state_dict()  # whole on every rank, whatever the mesh
    if folder:
        save_file(weights, folder / "model.safetensors")
        model = cl.models.GPT(model_config)
        model.load_state_dict(weights)
        model.to(context.device)
        text = generate(model, options.prompt.encode(), options.sample, window=model_config.sequence)
        print(f"--- sample\n{text.decode(errors='replace')}\n---")
        print("left:", *sorted(str(file) for file in folder.iterdir()))


def resume(engine: cl.Engine, checkpoints: Path, facts: dict[str, Any], *, fresh: bool) -> int:
    """Go on from the newest whole checkpoint, if there is one; the samples that the run has seen."""
    context = engine.context
    if fresh and context.is_main and checkpoints.exists():
        aside = next(
            p for i in itertools.count(1) if not (p := checkpoints.with_name(f"checkpoints.{i}")).exists()
        )
        checkpoints.rename(aside)
        print(f"fresh: earlier checkpoints are in {aside}")
    context.mesh.world.barrier()
    loaded = engine.resume(checkpoints)
    if loaded is None:
        return 0
    if context.is_main:
        print(loaded, *(f"  {change}" for change in changes(loaded.manifest.extra, facts)), sep="\n")
    return loaded.samples


def evaluate(engine: cl.Engine, context: cl.Context, held_out: TokenWindows, global_batch: int) -> float:
    """Mean loss over the same held-out windows every time."""
    loader = context.dataloader(held_out, global_batch=global_batch, drop_last=False)
    total, seen = 0.0, 0
    for batch in itertools.islice(loader, EVALUATED_BATCHES):
        total += float(engine.eval_step(batch)) * (loader.samples - seen)
        seen = loader.samples
    return total / seen


def describe(context: cl.Context, corpus: Corpus, recipe: dict[str, Any], folder: Path) -> Scale:
    """Print what is about to run, keep it in run.json, and return what its numbers are measured against."""
    config = cl.models.GPTConfig(**recipe["model"])
    marks = yardsticks(corpus.held_out)
    with torch.device("meta"):  # the whole model, of which this rank may hold a part
        model = cl.models.GPT(config)
    num_params = sum(p.numel() for p in model.parameters())
    print(f"{context!r}\n{corpus}\nheld-out text: {marks}\nGPT with {num_params:,} parameters", flush=True)
    facts = {
        "model": asdict(config),
        "parameters": num_params,
        "steps": recipe["steps"],
        "global_batch": recipe["global_batch"],
        "corpus": {"name": corpus.name, "sha256": corpus.sha256, "files": corpus.num_files},
        "bits_per_byte_of_held_out_text": asdict(marks),
        "config": {row.path: row.value for row in context.config.resolved()},
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "run.json").write_text(json.dumps(facts, indent=2))
    matmul_params = sum(m.weight.numel() for m in model.modules() if isinstance(m, torch.nn.Linear))
    peak = device_peak_flops(context.device, context.config.precision.dtype)
    return Scale(
        yardsticks=f"zlib {marks.zlib:.2f}, lzma {marks.lzma:.2f}",
        flops_per_token=model_flops_per_token(matmul_params, config.layers, config.width, config.sequence),
        peak_flops=peak * context.world_size if peak else None,
    )


if __name__ == "__main__":
    sys.exit(run(main))
