"""Builds what the tasks of sweep.toml train: small GPTs over the bytes of this repository's own text."""

from __future__ import annotations

from pathlib import Path

import torch

from colossal_lite.models import GPT, GPTConfig

SEQUENCE = 64
HELD_OUT = 8
"""One sample of so many is held out."""


def gpt(layers: int = 2, width: int = 64) -> GPT:
    """A GPT over bytes."""
    return GPT(GPTConfig(vocabulary=256, layers=layers, heads=4, width=width, sequence=SEQUENCE))


def _samples() -> list[tuple[torch.Tensor, torch.Tensor]]:
    text = (Path(__file__).parents[2] / "LICENSE").read_bytes()
    tokens = torch.tensor(list(text))
    cuts = range(0, len(tokens) - SEQUENCE - 1, SEQUENCE)
    return [(tokens[i : i + SEQUENCE], tokens[i + 1 : i + SEQUENCE + 1]) for i in cuts]


def train() -> list[tuple[torch.Tensor, torch.Tensor]]:
    return [sample for n, sample in enumerate(_samples()) if n % HELD_OUT]


def held_out() -> list[tuple[torch.Tensor, torch.Tensor]]:
    return _samples()[::HELD_OUT]
