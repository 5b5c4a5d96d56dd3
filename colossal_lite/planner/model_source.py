"""Finds the model to plan: sizes by name or field, a Hugging Face folder, or a function."""

from __future__ import annotations

import importlib
import json
import runpy
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn

from colossal_lite.models import GPTConfig
from colossal_lite.models.hf import config_from_hf
from colossal_lite.planner.dry_run import Builder

LEGAL = (
    "gpt2-SIZE, llama-SIZE, fields of GPTConfig (layers=6,width=384), a folder with a config.json of Hugging Face, "
    "or MODULE:FUNCTION or FILE.py:FUNCTION that returns a module"
)


def find_model(text: str) -> GPTConfig | Builder:
    """The model argument of `plan`: sizes of a GPT-2 or Llama, or a function that builds another model.

    A folder of the GPT-2 or Llama family is planned as our GPT of those sizes. Any other is planned as transformers
    builds it. Raises ValueError.
    """
    path = Path(text)
    if path.name == "config.json":
        path = path.parent
    if path.is_dir():
        return _of_folder(path)
    place, colon, name = text.partition(":")
    if colon:
        return _of_function(place, name)
    return parse_model(text)


def _of_folder(folder: Path) -> GPTConfig | Builder:
    try:
        theirs = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        kind = theirs["model_type"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"model: {folder}: no config.json of Hugging Face: {error}; legal: {LEGAL}"
        ) from error
    try:
        return config_from_hf(theirs)
    except ValueError as error:
        reason = error
    try:
        from transformers import AutoConfig, AutoModelForCausalLM
    except ImportError:
        raise ValueError(f"model: {folder}: {reason}; others need pip install transformers") from reason
    try:
        build = partial(
            AutoModelForCausalLM.from_config, AutoConfig.from_pretrained(folder, local_files_only=True)
        )
    except (OSError, ValueError, KeyError) as error:
        raise ValueError(f"model: {folder}: transformers knows no {kind!r}: {error}") from error
    return build


def _of_function(place: str, name: str) -> Builder:
    """The function of a module, or of a file; files beside it can be imported, as when it runs."""
    beside = Path(place).parent if place.endswith(".py") else Path()
    try:
        with _first_on_the_path(beside):
            if place.endswith(".py"):
                found = runpy.run_path(place, run_name="colossal_lite_model").get(name)
            else:
                found = getattr(importlib.import_module(place), name, None)
    except (Exception, SystemExit) as error:  # any error of the user's file is reported on one line
        raise ValueError(f"model: {place}: {type(error).__name__}: {error}; legal: {LEGAL}") from error
    if not callable(found):
        raise ValueError(f"model: {place} has no function {name!r}; legal: {LEGAL}")
    return partial(_built, found, f"{place}:{name}")


def _built(function: Callable[[], Any], name: str) -> nn.Module:
    try:
        made = function()
    except (Exception, SystemExit) as error:  # as above
        first, *_ = str(error).splitlines() or [""]
        raise ValueError(
            f"model: {name}: {type(error).__name__}: {first}; legal: a function that builds a module, also on the meta "
            f"device; a Hugging Face folder is planned by its path"
        ) from error
    if not isinstance(made, nn.Module):
        raise ValueError(f"model: {name} returns a {type(made).__name__}; legal: an nn.Module")
    return made


@contextmanager
def _first_on_the_path(folder: Path) -> Iterator[None]:
    sys.path.insert(0, str(folder.absolute()))
    try:
        yield
    finally:
        sys.path.remove(str(folder.absolute()))


def parse_model(text: str) -> GPTConfig:
    """From `gpt2-124M`, `llama-8B`, fields such as `layers=6,width=384`, or both: `llama-8B,layers=4`.

    Raises ValueError with the legal names.
    """
    head, *rest = text.split(",")
    if "=" in head:
        head, rest = "", [head, *rest]
    changes = dict(_field(item) for item in rest)
    if not head:
        return GPTConfig(**changes)
    family, _, named_size = head.partition("-")
    families = {"gpt2": GPTConfig.gpt2, "llama": GPTConfig.llama}
    if family not in families:
        raise ValueError(
            f"model: {head!r}; legal: {LEGAL}; fields: {', '.join(field.name for field in fields(GPTConfig))}"
        )
    return families[family](named_size, **changes)


def _field(item: str) -> tuple[str, Any]:
    """`layers=6` as a name and a value of the field's type."""
    name, sign, value = item.partition("=")
    known = {field.name: str(field.type) for field in fields(GPTConfig)}
    if not sign or name not in known:
        raise ValueError(f"model: {item!r}; legal: FIELD=VALUE with a field of GPTConfig: {', '.join(known)}")
    kind = known[name]
    try:
        if kind == "bool":
            return name, {"true": True, "false": False}[value.lower()]
        return name, int(value) if "int" in kind else float(value) if kind == "float" else value
    except (KeyError, ValueError) as error:
        raise ValueError(f"model: {item!r}; legal: a value of type {kind}") from error
