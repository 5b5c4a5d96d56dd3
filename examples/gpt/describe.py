"""Reads the text of a run, and says what the run is."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from corpus import Corpus, read_corpus, yardsticks
from tokens import is_token_folder, read_token_corpus

import colossal_lite as cl


def read(data: Path | None) -> Corpus:
    """A folder of tokens, or text as bytes."""
    return read_token_corpus(data) if data is not None and is_token_folder(data) else read_corpus(data)


def describe(context: cl.Context, corpus: Corpus, config: cl.models.GPTConfig) -> dict[str, Any]:
    """The facts of a run, which rank 0 prints: its model, its text, and what the loss compares with."""
    marks = yardsticks(corpus.held_out) if corpus.unit == "bytes" else None
    if context.is_main:
        held_out = (
            f"held-out text: {marks}" if marks else f"{corpus.bytes_per_token:.2f} bytes of text a token"
        )
        print(
            f"{context!r}\n{corpus}\n{held_out}\nGPT with {matrix_weights(config):,} weights in its matrices",
            flush=True,
        )
    return {
        "model": asdict(config),
        "matrix_weights": matrix_weights(config),
        "corpus": {"name": corpus.name, "sha256": corpus.sha256, "files": corpus.num_files},
        "bits_per_byte_of_held_out_text": asdict(marks) if marks else None,
    }


def matrix_weights(config: cl.models.GPTConfig) -> int:
    """Weights of the matrix products, the head's included, and not those of tables that are looked up."""
    heads = config.heads + 2 * config.key_heads
    attention = config.width * (heads * config.head_width + config.width)
    products = 3 if config.activation == "swiglu" else 2
    feed_forward = products * config.width * config.ffn_width
    return config.layers * (attention + feed_forward) + config.vocabulary * config.width


def flops_per_token(config: cl.models.GPTConfig) -> int:
    """FLOPs of forward and backward for one token: 6 N + 12 L D T (arXiv 2204.02311, appendix B), where N are the
    weights of matrix products."""
    return 6 * matrix_weights(config) + 12 * config.layers * config.width * config.sequence
