"""Finds classes and functions of the product by name alone, and patches them wherever they are used.

Note. A planted fault names its place, "Chunk.accept" or "learning_rate_factor", and no file: it survives a move.
A name that two modules define is refused; then "finish_gradients:_sum" is the one that finish_gradients calls.
The files are scanned once per process for names at their top level (40 ms), and only the file that defines a name
is imported.  A method is patched in its class.  A function is patched in its own module and in every loaded module
that took it by `from x import f`.  A module that is loaded during the patch is set right at its end.  A reference
that stands elsewhere (a table, a default argument) is not patched: such a fault stays green, and its test tells.
"""

from __future__ import annotations

import difflib
import functools
import importlib
import inspect
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import patch

import colossal_lite

Change = Callable[..., Any]
"""What stands in for a function: it is called with the original first, then with the arguments."""
_TOP = re.compile(r"^(?:(?:async )?def (\w+)\s*[\[(]|class (\w+)\s*[\[(:])", re.MULTILINE)
_METHODS = re.compile(r"^(?:class (\w+)|    (?:async )?def (\w+)\()", re.MULTILINE)


class PlaceError(LookupError):
    """A name that stands for nothing in the product, or for more than one thing."""


@dataclass(frozen=True)
class Place:
    """One function and what binds it: its class, or all loaded modules that have it, with the name there."""

    original: Any
    bindings: tuple[tuple[Any, str], ...]


@dataclass(frozen=True)
class Finder:
    """Looks names up in the packages of `folders`, by the dotted name of each folder."""

    folders: Mapping[str, Path]

    @functools.cached_property
    def files(self) -> dict[str, Path]:
        """Every file by its import name."""
        found = {}
        for package, folder in self.folders.items():
            for path in sorted(folder.rglob("*.py")):
                parts = path.relative_to(folder).with_suffix("").parts
                found[".".join((package, *(part for part in parts if part != "__init__")))] = path
        return found

    @functools.cached_property
    def modules_of(self) -> dict[str, list[str]]:
        """The modules that define a class or function of a name at their top level."""
        found: dict[str, list[str]] = {}
        for module, path in self.files.items():
            for names in _TOP.findall(path.read_text()):
                modules = found.setdefault("".join(names), [])
                if module not in modules:
                    modules.append(module)
        return found

    def module_of(self, name: str) -> str:
        """The one module that defines a class or function. Raises PlaceError for none, or for more than one."""
        modules = self.modules_of.get(name, [])
        if len(modules) > 1:
            raise PlaceError(f"{name} is ambiguous: {', '.join(modules)} define it: say whose, user:{name}")
        if not modules:
            raise PlaceError(f"no module defines {name} at its top level{_near(name, self.modules_of)}")
        return modules[0]

    def find(self, name: str) -> Any:
        """The class or function itself; "user:name" is what the module of `user` means by `name`."""
        user, _, own = name.rpartition(":")
        module = importlib.import_module(self.module_of(user or own))
        if own not in vars(module):
            raise PlaceError(f"the module of {user} knows no {own}{_near(own, vars(module))}")
        return vars(module)[own]

    def place(self, name: str) -> Place:
        """Where "Class.method" or "function" is bound. Raises PlaceError, which names near matches."""
        first, _, attribute = name.partition(".")
        found = self.find(first)
        if not attribute:
            if isinstance(found, type):
                raise PlaceError(f"{name} is a class: name one of its methods, {name}.method")
            return Place(found, self.bindings(found))
        if not isinstance(found, type):
            raise PlaceError(f"{name}: {first} is no class")
        if not hasattr(found, attribute):
            holders = [owner for owner, method in self._methods() if method == attribute]
            there = f"; it is a method of {', '.join(holders)}" if holders else _near(attribute, dir(found))
            raise PlaceError(f"{first} has no {attribute}{there}")
        return Place(getattr(found, attribute), ((found, attribute),))

    def bindings(self, value: Any) -> tuple[tuple[ModuleType, str], ...]:
        """Every global of a loaded module of these packages that is this very object."""
        loaded = [sys.modules[name] for name in self.files if name in sys.modules]
        return tuple(
            (module, key) for module in loaded for key, there in [*vars(module).items()] if there is value
        )

    def _methods(self) -> Iterator[tuple[str, str]]:
        for path in self.files.values():
            owner = ""
            for class_name, method in _METHODS.findall(path.read_text()):
                owner = class_name or owner
                if method:
                    yield owner, method

    @contextmanager
    def replaced(self, name: str, value: Any) -> Iterator[None]:
        """Put `value` in the place of a method, a property or a function, for all who use it."""
        place = self.place(name)
        if isinstance(place.bindings[0][0], type):
            with patch.object(*place.bindings[0], value):
                yield
            return

        def stand_in(*args: Any, **named: Any) -> Any:  # an object of its own, so that it is found again
            return value(*args, **named)

        try:
            for module, key in place.bindings:
                setattr(module, key, stand_in)
            yield
        finally:
            for module, key in self.bindings(stand_in):
                setattr(module, key, place.original)

    @contextmanager
    def patched(self, name: str, change: Change) -> Iterator[None]:
        """Call `change(original, *arguments)` in the place of a method or function."""
        place = self.place(name)
        owner, attribute = place.bindings[0]
        if not callable(place.original):
            raise PlaceError(f"{name} is not called: replace it by a value")

        def changed(*args: Any, **named: Any) -> Any:
            return change(place.original, *args, **named)

        bound = isinstance(owner, type) and isinstance(
            inspect.getattr_static(owner, attribute), staticmethod | classmethod
        )
        with self.replaced(name, staticmethod(changed) if bound else changed):
            yield


def _near(name: str, known: Any) -> str:
    matches = difflib.get_close_matches(name, known, n=4)
    return f"; near matches: {', '.join(matches)}" if matches else ""


@functools.cache
def product() -> Finder:
    """The finder over the product, whose kernels and launcher may stand beside the package's folder."""
    here = Path(colossal_lite.__file__).parent
    apart = {f"{colossal_lite.__name__}.{name}": here.parent / name for name in ("kernels", "launcher")}
    return Finder(
        {colossal_lite.__name__: here} | {name: path for name, path in apart.items() if path.is_dir()}
    )


def find(name: str) -> Any:
    """The class or function of the product that has this name."""
    return product().find(name)


def place(name: str) -> Place:
    """Where a method ("Chunk.accept") or a function ("learning_rate_factor") of the product is bound."""
    return product().place(name)


def patched(name: str, change: Change) -> AbstractContextManager[None]:
    """Plant `change(original, *arguments)` in the place of a method or function of the product."""
    return product().patched(name, change)


def replaced(name: str, value: Any) -> AbstractContextManager[None]:
    """Put a value in the place of a method, property or function of the product."""
    return product().replaced(name, value)
