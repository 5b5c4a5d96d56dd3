"""Generates text with the model of a finished run: `python examples/gpt/generate.py runs/small --prompt "class "`."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Protocol

import torch
import tyro
from safetensors.torch import load_file
from torch import nn

import colossal_lite as cl


class Codec(Protocol):
    """Text to ids below `size` and back."""

    size: int

    def encode(self, text: str) -> list[int]: ...
    def decode(self, ids: Sequence[int]) -> str: ...


class Bytes:
    """A token is a byte."""

    size = 256

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, ids: Sequence[int]) -> str:
        return bytes(ids).decode(errors="replace")


class Bpe:
    """The tokenizer that prepare.py has made."""

    def __init__(self, path: Path) -> None:
        from tokenizers import Tokenizer

        self._tokenizer: Any = Tokenizer.from_file(str(path))
        self.size = self._tokenizer.get_vocab_size()

    def encode(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text).ids)

    def decode(self, ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(ids)))


TOKENIZER = "tokenizer.json"


def codec_of(folder: Path) -> Codec:
    """Of a folder of tokens or of a run: its tokenizer, or bytes where it has none."""
    return Bpe(folder / TOKENIZER) if (folder / TOKENIZER).is_file() else Bytes()


@torch.no_grad()
def generate(
    model: nn.Module,
    codec: Codec,
    prompt: str,
    length: int,
    *,
    window: int,
    temperature: float = 0.8,
    seed: int = 0,
) -> str:
    """`prompt` and `length` tokens, each drawn given the last `window`; temperature 0 takes the likeliest."""
    was_training = model.training
    model.eval()
    device = next(model.parameters()).device
    generator = torch.Generator().manual_seed(seed)  # on the host: the same draws for every device
    ids = codec.encode(prompt or "\n")
    for _ in range(length):
        logits_BTV = model(torch.tensor([ids[-window:]], device=device))
        logits_V = logits_BTV[0, -1, : codec.size].float().cpu()
        if temperature <= 0:
            ids.append(int(logits_V.argmax()))
        else:
            share_V = (logits_V / temperature).softmax(0)
            ids.append(int(torch.multinomial(share_V, 1, generator=generator)))
    model.train(was_training)
    return codec.decode(ids)


@dataclass(frozen=True)
class Options:
    """Continue a text with the model of a run."""

    folder: Annotated[Path, tyro.conf.Positional]
    """what train.py was given as --out"""
    prompt: str = "def "
    """the text to continue; a new line if empty"""
    length: int = 400
    """tokens to add"""
    temperature: float = 0.8
    """0 takes the likeliest token each time"""
    seed: int = 0


def main(options: Options) -> int:
    files = [options.folder / name for name in ("run.json", "model.safetensors")]
    if missing := [str(file) for file in files if not file.is_file()]:
        print(
            f"folder {options.folder} has no {' and no '.join(missing)}; legal: a finished run",
            file=sys.stderr,
        )
        return 2
    config = cl.models.GPTConfig(**json.loads(files[0].read_text())["facts"]["model"])
    model = cl.models.GPT(config)
    model.load_state_dict(load_file(files[1]))
    text = generate(
        model, codec_of(options.folder), options.prompt, options.length,
        window=config.sequence, temperature=options.temperature, seed=options.seed,
    )  # fmt: skip
    print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main(tyro.cli(Options)))
