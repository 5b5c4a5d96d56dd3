"""Reads the text of a run, and says what the run is."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from corpus import Corpus, read_corpus, yardsticks
from tokens import is_token_folder, read_token_corpus

import colossal_lite as cl


def read(data: Path | None) -> Corpus:
    """A folder of tokens, or text as bytes."""
    return read_token_corpus(data) if data is not None and is_token_folder(data) else read_corpus(data)


def describe(context: cl.Context, corpus: Corpus, config: cl.models.GPTConfig) -> dict[str, Any]:
    """The facts of a run, which rank 0 prints: its model, its text, and what the loss compares with."""
    marks = yardsticks(corpus.held_out) if corpus.unit == "bytes" else None
    with torch.device("meta"):
        num_params = sum(p.numel() for p in cl.models.GPT(config).parameters())
    if context.is_main:
        held_out = (
            f"held-out text: {marks}" if marks else f"{corpus.bytes_per_token:.2f} bytes of text a token"
        )
        print(f"{context!r}\n{corpus}\n{held_out}\nGPT with {num_params:,} parameters", flush=True)
    return {
        "model": asdict(config),
        "parameters": num_params,
        "corpus": {"name": corpus.name, "sha256": corpus.sha256, "files": corpus.num_files},
        "bits_per_byte_of_held_out_text": asdict(marks) if marks else None,
    }


def flops_per_token(config: cl.models.GPTConfig) -> int:
    """FLOPs of forward and backward for one token: 6 N + 12 L D T (arXiv 2204.02311, appendix B), where N are the
    parameters of matrix products: all but those of embeddings."""
    with torch.device("meta"):
        linears = [m for m in cl.models.GPT(config).modules() if isinstance(m, torch.nn.Linear)]
    matmul_params = sum(linear.weight.numel() for linear in linears)
    return 6 * matmul_params + 12 * config.layers * config.width * config.sequence
