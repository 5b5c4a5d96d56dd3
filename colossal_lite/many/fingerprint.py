"""Says by what a directory of many knows its tasks again: settings, functions, arguments and settings of objects."""

from __future__ import annotations

import argparse
import functools
import hashlib
import json
import os
import types
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from datetime import date, time
from enum import Enum
from numbers import Number
from operator import length_hint
from typing import Any

import numpy
import torch
from torch import Tensor, nn

from colossal_lite.config.config import Config
from colossal_lite.many.task import Task
from colossal_lite.memory.transfers import to_host

SETTING = (bool, int, float, str, type(None))
"""Kinds of the attributes of an object that are compared."""


def fingerprint(tasks: Sequence[Task], shared: Mapping[str, Any]) -> dict[str, str]:
    """For each task what its directory is compared by: a hash of its steps, batch and settings, and of its parts.
    Of functions these are names and arguments, of objects their settings too, of data the length. The code of a
    function may change."""

    def of(task: Task) -> str:
        config = Config.load(task.settings(shared)).check_world(task.devices)
        loader = [dict(task.loader)] if task.loader else []
        made_by = [_part(task.build), _part(task.criterion), _data(task.data), _data(task.evaluate)]
        facts = [task.steps, task.global_batch, config.values(), *loader, *made_by]
        text = json.dumps(_told(facts), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    return {task.name: of(task) for task in tasks}


def _part(given: Any) -> Any:
    """A model or a criterion."""
    if isinstance(given, nn.Module):
        shapes = {name: list(part.shape) for name, part in given.named_parameters()}
        return [_name(given), shapes, {name: _settings(part) for name, part in given.named_modules()}]
    return [_name(given) if given is None else _told(given), length_hint(given, -1)]


def _data(given: Any) -> Any:
    """A dataset, or a function of one."""
    is_made = isinstance(given, functools.partial | types.MethodType)
    return [_told(given) if is_made else _name(given), length_hint(given, -1)]


def _told(value: Any) -> Any:
    """A value as JSON has it: the same in every process, so without the address of an object."""
    if isinstance(value, Enum):
        return [_name(type(value)), value.name]
    if value is None or isinstance(value, str | bool | int | float):
        return value
    if isinstance(value, list | tuple):
        return [_told(each) for each in value]
    if isinstance(value, Mapping):
        return _mapping(value)
    if isinstance(value, set | frozenset):
        return sorted((_told(each) for each in value), key=json.dumps)
    if isinstance(value, Tensor | numpy.ndarray):
        return _array(value)
    return _object(value)


def _object(value: Any) -> Any:
    """As `_told`, of one that is no container."""
    if isinstance(value, functools.partial):
        return [_told(value.func), _told(value.args), _told(value.keywords)]
    if isinstance(value, types.MethodType):
        return [_name(value), _told(value.__self__)]
    if is_dataclass(value) and not isinstance(value, type):
        return [_name(type(value)), {each.name: _told(getattr(value, each.name)) for each in fields(value)}]
    if not isinstance(value, type) and hasattr(value, "model_type") and hasattr(value, "to_dict"):
        return [_name(type(value)), _told(value.to_dict())]  # a config of Hugging Face
    if isinstance(value, argparse.Namespace | types.SimpleNamespace):
        return [_name(value), _told(vars(value))]
    if isinstance(
        value, os.PathLike | Number | torch.dtype | torch.device | bytes | range | slice | date | time
    ):
        return str(value)
    settings = _settings(value)
    return [_name(value), settings] if settings else _name(value)


def _mapping(given: Mapping[Any, Any]) -> Any:
    if all(isinstance(key, str) for key in given):
        return {key: _told(each) for key, each in given.items()}
    return sorted(([_told(key), _told(each)] for key, each in given.items()), key=json.dumps)


def _array(given: Tensor | numpy.ndarray[Any, Any]) -> Any:
    """Shape, dtype and a hash of the numbers."""
    facts = [list(given.shape), str(given.dtype)]
    if isinstance(given, Tensor):
        if given.is_meta:
            return facts
        given = to_host(given.detach()).to_dense().flatten().view(torch.uint8).numpy()
    elif given.dtype.hasobject:
        return [*facts, _told(given.tolist())]
    return [*facts, hashlib.sha256(given.tobytes()).hexdigest()[:16]]


def _settings(value: Any) -> dict[str, Any]:
    """The attributes of an object that are numbers, words or None."""
    if hasattr(value, "__qualname__"):  # a function or a class
        return {}
    found = getattr(value, "__dict__", {})
    return {name: each for name, each in found.items() if type(each) in SETTING and not name.startswith("_")}


def _name(value: Any) -> str:
    kind = value if hasattr(value, "__qualname__") else type(value)
    return f"{kind.__module__}.{kind.__qualname__}"
