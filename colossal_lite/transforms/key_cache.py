"""Switches off the cache of keys of a library's model, while an engine has the model. No step reads it."""

from __future__ import annotations

from typing import Any

from torch import nn

SWITCHED = "_configs_without_key_cache"


def switch_off_key_cache(module: nn.Module) -> None:
    """Have a model of transformers keep no keys between forwards, by its own config and those of modules in it."""
    configs: dict[int, Any] = {
        id(config): config for m in module.modules() if (config := _config(m)) is not None
    }
    for config in configs.values():
        config.use_cache = False
    if configs:
        module.__dict__[SWITCHED] = (*module.__dict__.get(SWITCHED, ()), *configs.values())


def _config(module: nn.Module) -> Any:
    """A module's config that keeps a cache; else None."""
    config = getattr(module, "config", None)
    return config if getattr(config, "use_cache", None) is True else None


def is_key_cache_off(module: nn.Module) -> bool:
    """Whether `switch_off_key_cache` has switched one off."""
    return SWITCHED in module.__dict__


def give_key_cache_back(module: nn.Module) -> None:
    """Restore the configs' `use_cache`."""
    for config in module.__dict__.pop(SWITCHED, ()):
        config.use_cache = True
