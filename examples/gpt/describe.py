"""Reads the text of a run, describes the run in run.json, and evaluates it on held-out text."""

from __future__ import annotations

import itertools
import json
import shutil
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
from corpus import Corpus, TokenWindows, read_corpus, yardsticks
from generate import TOKENIZER
from tokens import is_token_folder, read_token_corpus

import colossal_lite as cl
from colossal_lite.numerics.random import on_meta
from colossal_lite.observe.flops import device_peak_flops, model_flops_per_token
from colossal_lite.observe.run_log import Scale

EVALUATED_BATCHES = 16


def read(data: Path | None) -> Corpus:
    """A folder of tokens, or text as bytes."""
    return read_token_corpus(data) if data is not None and is_token_folder(data) else read_corpus(data)


def describe(
    context: cl.Context, corpus: Corpus, recipe: dict[str, Any], data: Path | None, folder: Path
) -> Scale:
    """Print the run, write run.json, and return the constants that its numbers are compared with."""
    config = cl.models.GPTConfig(**recipe["model"])
    marks = yardsticks(corpus.held_out) if corpus.unit == "bytes" else None
    model = on_meta(partial(cl.models.GPT, config))  # the full model, of which this rank may hold a shard
    num_params = sum(p.numel() for p in model.parameters())
    held_out = f"held-out text: {marks}" if marks else f"{corpus.bytes_per_token:.2f} bytes of text a token"
    print(f"{context!r}\n{corpus}\n{held_out}\nGPT with {num_params:,} parameters", flush=True)
    facts = {
        "model": asdict(config),
        "parameters": num_params,
        "steps": recipe["steps"],
        "global_batch": recipe["global_batch"],
        "corpus": {"name": corpus.name, "sha256": corpus.sha256, "files": corpus.num_files},
        "bits_per_byte_of_held_out_text": asdict(marks) if marks else None,
        "config": {row.path: row.value for row in context.config.resolved()},
    }
    folder.mkdir(parents=True, exist_ok=True)
    if data is not None and (data / TOKENIZER).is_file():
        shutil.copy(data / TOKENIZER, folder / TOKENIZER)  # so that the folder of the run needs no other
    (folder / "run.json").write_text(json.dumps(facts, indent=2))
    matmul_params = sum(m.weight.numel() for m in model.modules() if isinstance(m, torch.nn.Linear))
    peak = device_peak_flops(context.device, context.config.precision.dtype)
    return Scale(
        bytes_per_token=corpus.bytes_per_token,
        yardsticks=f"zlib {marks.zlib:.2f}, lzma {marks.lzma:.2f}" if marks else "",
        flops_per_token=model_flops_per_token(matmul_params, config.layers, config.width, config.sequence),
        peak_flops=peak * context.world_size if peak else None,
    )


def evaluate(engine: cl.Engine, context: cl.Context, held_out: TokenWindows, global_batch: int) -> float:
    """Mean loss over the same held-out windows every time."""
    loader = context.dataloader(held_out, global_batch=global_batch, drop_last=False)
    total, seen = 0.0, 0
    for batch in itertools.islice(loader, EVALUATED_BATCHES):
        total += float(engine.eval_step(batch)) * (loader.samples - seen)
        seen = loader.samples
    return total / seen
