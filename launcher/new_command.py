"""Runs `colossal-lite new`: writes a project that runs, with files to launch it on several hosts."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from shlex import quote
from typing import Any

from tyro.conf import Positional

TEMPLATES = Path(__file__).with_name("templates")
FILES = (
    *("train.py", "config.py", "README.md"),
    *("launch/torchrun.sh", "launch/slurm.sh", "launch/kubernetes.yaml"),
)
SEQUENCE = 32
BYTES = 256
"""Vocabulary of a model without a tokenizer: its tokens are bytes."""
GPT = {
    "what": "a small GPT",
    "imports": "",
    "build": "cl.models.GPT(MODEL)",
    "called": "Called with parameters on the meta device: each rank makes its part alone.",
    "given": "build",
    "planned": "train.py:build",
    "tokens": "list(TEXT.read_bytes())",
    "unit": "bytes",
    "model_type": "cl.models.GPTConfig",
    "model": f"cl.models.GPTConfig(vocabulary={BYTES}, layers=2, heads=4, width=64, sequence=SEQUENCE, dropout=0.1)",
    "stage": "1",
}
"""Values of the templates for a model of ours."""
LOADED = {"called": "Loads the weights, the same on every rank.", "given": "build()"}
"""As above, for a model that is read from files: its values cannot be drawn part by part."""


@dataclass(frozen=True)
class NewCommand:
    """Write a project that runs: train.py, config.py, README.md, and launch files for torchrun, SLURM, Kubernetes."""

    directory: Positional[Path]
    """A new or an empty folder."""
    hf: Path | None = None
    """Train this Hugging Face model: a folder with config.json, and perhaps weights and a tokenizer."""

    def run(self) -> int:
        _check_name(self.directory)
        words = GPT if self.hf is None else _hugging_face(self.hf)
        made = rendered(self.directory.absolute().name, words)
        try:
            if self.directory.exists() and any(self.directory.iterdir()):
                raise ValueError(
                    f"directory = {self.directory}: holds files; legal: a new or an empty folder"
                )
            for name, text in made.items():
                path = self.directory / name
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(text, encoding="utf-8")
        except OSError as error:
            raise ValueError(
                f"directory = {self.directory}: {error.strerror}; legal: a folder that can be written"
            ) from error
        print(
            f"{self.directory}: {', '.join(made)}\nnext: cd {quote(str(self.directory))} && python train.py"
        )
        return 0


def _check_name(path: Path) -> None:
    """Raises ValueError for a name that the files of a project cannot hold."""
    try:
        str(path.absolute()).encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"path = {str(path)!a}: is no UTF-8; legal: a name in UTF-8") from error


def rendered(name: str, words: Mapping[str, str]) -> dict[str, str]:
    """The text of each file of a project of this name."""
    job = re.sub(r"[^a-z0-9]+", "-", name.lower()).lstrip("-0123456789")[:40].rstrip("-") or "training"
    values = {"name": name, "job": job, "sequence": str(SEQUENCE), **words}
    values["pod"] = _filled("launch/pod.yaml", values).rstrip("\n")
    return {file: _filled(file, values) for file in FILES}


def _filled(file: str, values: Mapping[str, str]) -> str:
    text = (TEMPLATES / f"{file}.tmpl").read_text(encoding="utf-8")
    return re.sub(r"\{\{(\w+)\}\}", lambda found: values[found[1]], text)


def _hugging_face(given: Path) -> dict[str, str]:
    """Values of the templates for the model of a folder. Raises ValueError for a model that cannot be trained here."""
    folder = (given.parent if given.name == "config.json" else given).absolute()
    _check_name(folder)
    config = _text_model(folder)
    has_weights, has_tokenizer = (
        any(folder.glob("*.safetensors")),
        (folder / "tokenizer_config.json").exists(),
    )
    if not has_tokenizer and config["vocab_size"] < BYTES:
        raise ValueError(
            f"hf = {given}: has no tokenizer, and {config['vocab_size']} ids are fewer than the {BYTES} of bytes; "
            f"legal: a folder with a tokenizer"
        )
    names = ["AutoModelForCausalLM"] + ["AutoConfig"] * (not has_weights) + ["AutoTokenizer"] * has_tokenizer
    loaded = "from_pretrained(MODEL)" if has_weights else "from_config(AutoConfig.from_pretrained(MODEL))"
    read = 'AutoTokenizer.from_pretrained(MODEL)(TEXT.read_text())["input_ids"]'
    return GPT | {
        "what": f"a Hugging Face {config['model_type']} model {'from its weights' if has_weights else 'from scratch'}",
        "imports": f"from transformers import {', '.join(sorted(names))}\n",
        "build": f"AutoModelForCausalLM.{loaded}",
        "model_type": "str",
        "model": repr(str(folder)),
        "planned": quote(str(folder)),
        "stage": "3",
    } | (LOADED if has_weights else {}) | ({"tokens": read, "unit": "tokens"} if has_tokenizer else {})  # fmt: skip


def _text_model(folder: Path) -> dict[str, Any]:
    """The config.json of a folder, if transformers has a causal language model for it."""
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        kind, _ = config["model_type"], config["vocab_size"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"hf = {folder}: {error}; legal: a Hugging Face folder with the config.json of a text model"
        ) from error
    try:
        from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as KNOWN
    except ImportError as error:
        raise ValueError(
            f'hf = {folder}: needs transformers; legal: after pip install "colossal_lite[hf]"'
        ) from error
    if kind not in KNOWN:
        raise ValueError(
            f"hf = {folder}: model_type={kind!r} is no text model of transformers; legal: gpt2, llama, mistral, ..."
        )
    return dict(config)
