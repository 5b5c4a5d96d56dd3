"""colossal_lite: train one PyTorch model, with the same numbers, on any mesh of devices.

Public names are loaded on first use: importing the package loads neither torch nor triton nor transformers.
"""

from __future__ import annotations

import importlib
import sys
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from colossal_lite import models as models
    from colossal_lite.config.config import Config as Config
    from colossal_lite.config.config import ConfigError as ConfigError
    from colossal_lite.config.config import Problem as Problem
    from colossal_lite.config.config_dict import ConfigDict as ConfigDict
    from colossal_lite.distributed.mesh import Mesh as Mesh
    from colossal_lite.engine.context import Context as Context
    from colossal_lite.engine.engine import Engine as Engine
    from colossal_lite.engine.initialize import initialize as initialize
    from colossal_lite.engine.run import Run as Run
    from colossal_lite.engine.run import fit as fit
    from colossal_lite.engine.step_totals import StepResult as StepResult
    from colossal_lite.engine.stopping import Stopped as Stopped
    from colossal_lite.launcher import launch as launch
    from colossal_lite.launcher import options as options
    from colossal_lite.launcher import train_many as train_many
    from colossal_lite.many.task import Halving as Halving
    from colossal_lite.many.task import Task as Task
    from colossal_lite.memory.host_store import HostStore as HostStore
    from colossal_lite.parallel.standalone import finish_gradients as finish_gradients
    from colossal_lite.parallel.standalone import parallelize as parallelize
    from colossal_lite.transforms.auxiliary_loss import AuxiliaryLoss as AuxiliaryLoss

__version__ = "0.2.0"

# An editable install is a folder of links, for type checkers. At run time Python loads the tree itself, with new files.
_here = Path(__file__).resolve().parent
__path__[:] = [str(_here)]

_MODULE_OF = {
    "AuxiliaryLoss": "transforms.auxiliary_loss",
    "Config": "config.config",
    "ConfigDict": "config.config_dict",
    "ConfigError": "config.config",
    "Context": "engine.context",
    "Engine": "engine.engine",
    "Halving": "many.task",
    "HostStore": "memory.host_store",
    "Mesh": "distributed.mesh",
    "Problem": "config.config",
    "Run": "engine.run",
    "StepResult": "engine.step_totals",
    "Stopped": "engine.stopping",
    "Task": "many.task",
    "fit": "engine.run",
    "finish_gradients": "parallel.standalone",
    "initialize": "engine.initialize",
    "launch": "launcher",
    "models": "models",
    "options": "launcher",
    "parallelize": "parallel.standalone",
    "train_many": "launcher",
}
__all__ = sorted(_MODULE_OF)


if not TYPE_CHECKING:  # to a type checker, a name that is not listed above is a mistake

    def __getattr__(name: str) -> object:
        if name not in _MODULE_OF:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        module = importlib.import_module(f"{__name__}.{_MODULE_OF[name]}")
        return module if name == _MODULE_OF[name] else getattr(module, name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULE_OF})


def stands_aside(name: str) -> bool:
    """Whether a folder at the root was imported by its bare `name`, which then means another package.

    With the root on sys.path, `import kernels` finds our folder, and hides a public package of that name.  So the
    package on the rest of the path is loaded in its place.  If there is none, the module is left empty, like a folder
    without __init__.py.  It has no __file__, so tools do not take it for an installed package.
    """
    if name.startswith(f"{__name__}."):
        return False
    from importlib.util import module_from_spec

    folder = Path(sys.modules[name].__path__[0]).resolve()
    places = [n for n, place in enumerate(sys.path, 1) if Path(place, name).resolve() == folder]
    rest = sys.path[places[-1] :] if places else []
    specs = (finder.find_spec(name, rest) for finder in sys.meta_path)
    spec = next(filter(None, specs), None) or ModuleSpec(name, None, is_package=True)
    sys.modules[name] = module_from_spec(spec)
    if spec.loader is not None:
        spec.loader.exec_module(sys.modules[name])
    return True


class _OtherPlaces:
    """Finds modules of kernels/ and launcher/ in a source tree, after the search of this folder.

    There they stand beside this folder. For one release, a module of before version 0.2 raises an error that names the
    new place.
    """

    @staticmethod
    def find_spec(name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        if name in (f"{__name__}.kernels", f"{__name__}.launcher"):
            return PathFinder.find_spec(name, [str(_here.parent)])
        if name.startswith(f"{__name__}."):
            from colossal_lite.launcher.old_paths import new_place

            if (told := new_place(name)) is not None:
                raise ImportError(told)
        return None


sys.meta_path.append(_OtherPlaces)
