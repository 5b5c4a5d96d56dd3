"""Trains a GPT on text, with python, torchrun or srun, on any number of ranks, with the same numbers:

torchrun --standalone --nproc-per-node 2 examples/gpt/train.py --config small --optimizer.lr 1e-3
"""

from __future__ import annotations

import itertools
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import tyro
from configs import CONFIGS
from describe import describe, evaluate, read
from generate import codec_of, generate
from safetensors.torch import save_file

import colossal_lite as cl
from colossal_lite.checkpoint.manifest import CheckpointError, changes
from colossal_lite.launcher import env, run
from colossal_lite.observe.run_log import RankLog, RunLog, Scale
from colossal_lite.observe.sinks import run_sinks


@dataclass(frozen=True)
class Options:
    """Train a GPT. Any other option is a setting of the configuration: `--parallel.data 2`."""

    config: Literal[tuple(CONFIGS)] = "small"  # type: ignore[valid-type]
    """a function of configs.py"""
    steps: int | None = None
    """optimizer steps, if not those of the config"""
    global_batch: int | None = None
    """sequences per step over all ranks, if not those of the config"""
    data: Path | None = None
    """a text file, a folder of them, or a folder of tokens; by default the source of Python's standard library"""
    vocabulary: int | None = None
    """ids of the model, if not those of the config"""
    out: Path | None = None
    """where metrics, timeline and model go; by default runs/NAME"""
    save_every: int = 100
    """steps between checkpoints; there is one at the end, and when a signal stops the run, anyway"""
    fresh: bool = False
    """start over: what checkpoints there are is set aside, not deleted"""
    metrics: tuple[Literal["tensorboard", "wandb"], ...] = ()
    """further places for the numbers, offline"""
    prompt: str = "def "
    """how the sample at the end begins"""
    sample: int = 300
    """tokens of the sample"""


def main() -> None:
    speaks = env.speaks(env.environment())
    options, overrides = tyro.cli(Options, return_unknown_args=True, console_outputs=speaks)
    recipe = CONFIGS[options.config](**({} if options.steps is None else {"steps": options.steps}))
    if options.global_batch is not None:
        recipe["global_batch"] = options.global_batch
    if options.vocabulary is not None:
        recipe["model"] |= {"vocabulary": options.vocabulary}
    with cl.launch(recipe["config"], overrides=overrides) as context:
        train(context, recipe, options)


def train(context: cl.Context, recipe: dict[str, Any], options: Options) -> None:
    steps, global_batch = recipe["steps"], recipe["global_batch"]
    model_config = cl.models.GPTConfig(**recipe["model"])
    corpus = read(options.data)
    corpus.check(model_config.vocabulary)
    corpus.assert_same(context.mesh.world)
    windows, held_out = corpus.windows(model_config.sequence, global_batch)
    engine = cl.initialize(lambda: cl.models.GPT(model_config), context=context)
    run_folder = options.out or Path("runs") / options.config
    folder = run_folder if context.is_main else None  # of the one rank that tells
    facts = {"model": recipe["model"], "global_batch": global_batch, "corpus": corpus.sha256}
    loader = context.dataloader(windows, global_batch=global_batch)
    loader.samples = resume(engine, run_folder / "checkpoints", facts, fresh=options.fresh)
    scale = describe(context, corpus, recipe, options.data, folder) if folder else Scale()
    sinks = run_sinks(options.metrics, folder, facts)

    def after_step(result: cl.StepResult) -> None:  # before a signal stops the run, too
        log.step(result, engine.ledger.payload_bytes)
        if result.step % recipe["evaluate_every"] == 0 or result.step == steps:
            with log.timeline.span("evaluate"):
                loss = evaluate(engine, context, held_out, global_batch)
            log.evaluated(result.step, loss)

    def save() -> None:
        try:
            engine.save(run_folder / "checkpoints", samples=loader.samples, extra=facts)
        except CheckpointError as error:  # the same on every rank: the run goes on, the last one still loads
            log.say(f"NOT SAVED: {error}")
        log.lap()

    log = RunLog(
        folder, total_steps=steps, scale=scale, device=context.device, resumed_step=engine.steps, also=sinks
    )
    engine.save_on_stop(run_folder / "checkpoints", samples=lambda: loader.samples, extra=facts)
    engine.on_step(after_step, reads_weights=False)
    with RankLog(run_folder / "logs", context.rank), log:
        for batch in loader.take(steps - engine.steps):
            with log.timeline.span("step"):
                result = engine.train_step(batch)
            if result.step == steps or result.step % options.save_every == 0:
                with log.timeline.span("save"):
                    save()
    # whole on every rank, whatever the mesh, and read before closing ends what rests on disk
    weights = engine.full_state_dict()
    engine.close()
    if folder:
        save_file(weights, folder / "model.safetensors")
        model = cl.models.GPT(model_config)
        model.load_state_dict(weights)
        model.to(context.device)
        text = generate(model, codec_of(folder), options.prompt, options.sample, window=model_config.sequence)
        print(f"--- sample\n{text}\n---")
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


if __name__ == "__main__":
    sys.exit(run(main))
