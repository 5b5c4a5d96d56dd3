"""Runs `colossal-lite roles`: the plan that tensor parallelism would use for a model, proven, without training."""

from __future__ import annotations

import importlib
import importlib.util
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Literal

from tyro.conf import Positional

if TYPE_CHECKING:
    from torch import nn

MOST_RANKS = 4_096


@dataclass(frozen=True)
class RolesCommand:
    """The roles that plan="auto" finds in a model, as a dict to paste and edit. Nothing is trained.

    Weights are not read. A small copy runs on emulated ranks, and is compared with the copy in one process.
    """

    model: Positional[str]
    """FILE.py:FUNCTION or module:FUNCTION, which takes nothing and returns the model; or a folder with config.json."""
    size: int = 2
    """Ranks of the tensor axis."""
    mode: Literal["1d", "2d", "2.5d", "3d"] = "1d"
    """As parallel.tensor.mode."""

    def run(self) -> int:
        from colossal_lite.config.parallel_schema import TensorConfig
        from colossal_lite.distributed.emulated_ranks import EmulatedWorld
        from colossal_lite.distributed.mesh import Mesh
        from colossal_lite.parallel.parallelize import parallelize
        from colossal_lite.sharding.mesh_layout import MeshLayout

        if not 2 <= self.size <= MOST_RANKS:
            why = "one rank cuts nothing" if self.size < 2 else "these are too many to emulate"
            raise ValueError(f"--size {self.size}: {why}; legal: 2 to {MOST_RANKS:,}")
        layout = MeshLayout.build(tensor=TensorConfig(size=self.size, mode=self.mode).axis())
        model = built(self.model)
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            made = parallelize(model, Mesh.emulated(layout, EmulatedWorld(1.0))[0])
        print("plan = {")
        for pattern, role in made.plan.items():
            print(f'    "{pattern}": "{role}",')
        print("}")
        if self.mode == "1d":
            print(
                f"# sequence_parallel: {'on' if getattr(made.strategy, 'sequence_parallel', False) else 'off'}"
            )
        for line in told:
            print(line.message, file=sys.stderr)
        return 0


def built(text: str) -> nn.Module:
    """The model that an argument of the command names, with parameters on meta if it is a folder.

    Raises ValueError with the argument and the legal ones."""
    from torch import nn

    if Path(text).is_dir():
        return _of_folder(Path(text))
    function = function_of(text)
    try:
        made = function()
    except (Exception, SystemExit) as error:  # of a user's code, whatever it is
        raise ValueError(f"model {text}: {type(error).__name__}: {error}") from error
    if not isinstance(made, nn.Module):
        raise ValueError(f"model {text}: the function returned {type(made).__name__}; legal: an nn.Module")
    return made


def function_of(text: str) -> Callable[[], object]:
    """The function that FILE.py:FUNCTION or module:FUNCTION names. Raises ValueError if there is none."""
    place, _, name = text.rpartition(":")
    legal = "legal: FILE.py:FUNCTION, module:FUNCTION, or a folder with config.json"
    if not place or not name.isidentifier():
        raise ValueError(f"model {text}: names no function; {legal}")
    if place.endswith(".py") and not Path(place).is_file():
        raise ValueError(f"model {text}: there is no file {place}; {legal}")
    try:
        module = _module_of(Path(place)) if place.endswith(".py") else importlib.import_module(place)
    except (Exception, SystemExit) as error:  # of a user's code, whatever it is
        raise ValueError(f"model {text}: {type(error).__name__}: {error}; {legal}") from error
    found = getattr(module, name, None)
    if not callable(found):
        raise ValueError(f"model {text}: {place} has no function {name}; {legal}")
    function: Callable[[], object] = found
    return function


def _module_of(path: Path) -> ModuleType:
    """The module of a file; files beside it can be imported."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module  # dataclasses look their module up
    sys.path.insert(0, str(path.parent.resolve()))
    spec.loader.exec_module(module)
    return module


def _of_folder(folder: Path) -> nn.Module:
    """The causal or masked language model that a config.json describes; its weights are not read."""
    if not (folder / "config.json").is_file():
        raise ValueError(f"model {folder}: the folder has no config.json")
    try:
        transformers = importlib.import_module("transformers")
    except ModuleNotFoundError:
        raise ValueError(f"model {folder}: a folder needs transformers, which is not installed") from None
    from colossal_lite.numerics.random import build_on_meta

    config = transformers.AutoConfig.from_pretrained(folder)
    kinds = (transformers.AutoModelForCausalLM, transformers.AutoModelForMaskedLM)
    kind = next((kind for kind in kinds if type(config) in kind._model_mapping), None)
    if kind is None:
        raise ValueError(
            f"model {folder}: model_type {config.model_type!r} is no language model of transformers"
        )
    return build_on_meta(lambda: kind.from_config(config))[0]
