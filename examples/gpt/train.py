"""Trains a GPT on text, with python, torchrun or srun, on any number of ranks, with the same numbers:

torchrun --standalone --nproc-per-node 2 examples/gpt/train.py --config small --optimizer.lr 1e-3
"""

from __future__ import annotations

import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import tyro
from configs import CONFIGS
from corpus import TokenWindows
from describe import describe, flops_per_token, read
from generate import TOKENIZER, codec_of, generate
from safetensors.torch import save_file
from torch import Tensor
from torch.utils.data import Subset

import colossal_lite as cl
from colossal_lite.launcher import env, run

EVALUATED_BATCHES = 16


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
    steps, global_batch, evaluate_every = recipe["steps"], recipe["global_batch"], recipe["evaluate_every"]
    config = cl.models.GPTConfig(**recipe["model"])
    corpus = read(options.data)
    corpus.check(config.vocabulary)
    windows, held_out = corpus.windows(config.sequence, global_batch)
    engine = cl.initialize(lambda: cl.models.GPT(config), context=context)
    folder = options.out or Path("runs") / options.config
    run = cl.Run(
        folder, engine, save_every=options.save_every, log=options.metrics, fresh=options.fresh,
        facts=describe(context, corpus, config), bytes_per_token=corpus.bytes_per_token,
        flops_per_token=flops_per_token(config),
    )  # fmt: skip
    for batch in run.batches(windows, global_batch=global_batch, steps=steps):
        result = run.step(batch)
        if result.step % evaluate_every == 0 or result.step == steps:
            run.evaluate(some_of(held_out, EVALUATED_BATCHES * global_batch))
    weights = engine.full_state_dict()  # whole on every rank, whatever the mesh
    if context.is_main:
        finish(weights, config, folder, options)


def some_of(windows: TokenWindows, count: int) -> Subset[Any]:
    """`count` windows from all over the text, or all where there are not more: the same every time."""
    return Subset(windows, range(0, len(windows), max(1, len(windows) // count))[:count])


def finish(weights: dict[str, Tensor], config: cl.models.GPTConfig, folder: Path, options: Options) -> None:
    """Write the weights of the serial model, and print a sample of its text."""
    save_file(weights, folder / "model.safetensors")
    if options.data is not None and (options.data / TOKENIZER).is_file():
        shutil.copy(
            options.data / TOKENIZER, folder / TOKENIZER
        )  # so that the folder of the run needs no other
    model = cl.models.GPT(config)
    model.load_state_dict(weights)
    text = generate(model, codec_of(folder), options.prompt, options.sample, window=config.sequence)
    print(f"--- sample\n{text}\n---")
    print("left:", *sorted(str(file) for file in folder.iterdir()))


if __name__ == "__main__":
    sys.exit(run(main))
