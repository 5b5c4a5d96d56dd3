"""Switches off the cache of keys of a library's model, while an engine has the model. No step reads it."""

from __future__ import annotations

from typing import Any

from torch import nn

SWITCHED = "_config_without_key_cache"


def switch_off_key_cache(module: nn.Module) -> None:
    """Have a model of transformers keep no keys between forwards, if its config says that it does."""
    config: Any = getattr(module, "config", None)
    if getattr(config, "use_cache", None) is True:
        config.use_cache = False
        module.__dict__[SWITCHED] = config


def is_key_cache_off(module: nn.Module) -> bool:
    """Whether `switch_off_key_cache` has switched one off."""
    return SWITCHED in module.__dict__


def give_key_cache_back(module: nn.Module) -> None:
    """Restore the config's `use_cache`."""
    if (config := module.__dict__.pop(SWITCHED, None)) is not None:
        config.use_cache = True
