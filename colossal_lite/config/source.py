"""Reads a configuration from a dict, a file and command-line options into one nested dict.

Note: this file checks only that the source can be read.  Lists become tuples (JSON and TOML have no tuples), and short
forms are expanded.  Numbers written as text are accepted from the command line only, where everything is text.
"""

from __future__ import annotations

import ast
import json
import runpy
import sys
import tomllib
import types
from collections import UserString
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path, PurePath
from typing import Annotated, Any, Literal

from pydantic import BaseModel, TypeAdapter, ValidationError
from pydantic.fields import FieldInfo

from colossal_lite.config.errors import (
    ABSENT,
    ConfigError,
    Problem,
    get_path,
    item_section,
    locate,
    nearest,
    unknown_key,
)
from colossal_lite.config.renamed import RENAMED

# Sections that may be given as a bare value, and the setting which that value is.
SHORT_FORMS: Mapping[str, str] = {
    "parallel.pipeline": "size",
    "parallel.tensor": "size",
    "parallel.sequence": "size",
    "precision": "dtype",
    "memory.rates": "file",
}
WORDS = {"true": True, "false": False, "null": None}
LEGAL = {".py": "a file that runs alone", ".json": "JSON in UTF-8", ".toml": "TOML in UTF-8"}
SUFFIXES = tuple(LEGAL)
DEEPEST = 16
"""Sections and lists within each other; the settings need five."""


# ------------------------------------------------------------------------------------------------------ files


def read_source(source: object) -> tuple[Mapping[Any, Any], Literal["user", "file"]]:
    """The dict in a source, and the name of its origin. Raises ConfigError if there is none."""
    if isinstance(source, Mapping):
        return source, "user"
    if not isinstance(source, (str, Path)):
        raise _unreadable(
            source, f"has the wrong type, {type(source).__name__}", "a dict, a Config or a file name"
        )
    name = str(source)
    file, _, chosen = name.partition(".py:")
    path = Path(f"{file}.py" if chosen else name)
    if path.suffix not in SUFFIXES:
        raise _unreadable(
            name, f"ends in {path.suffix!r}" if path.suffix else "has no ending", ", ".join(SUFFIXES)
        )
    if not path.is_file():
        known = (
            [str(near) for near in path.parent.glob("*") if near.suffix in SUFFIXES and near.is_file()]
            if path.parent.is_dir()
            else []
        )
        raise _unreadable(name, "is no file", "the name of an existing file", nearest(path, known))
    try:
        if path.suffix == ".py":
            return _from_python(path, chosen), "file"
        text = path.read_text(encoding="utf-8-sig")  # editors may write a byte order mark
        read = (
            tomllib.loads(text)
            if path.suffix == ".toml"
            else json.loads(text, object_pairs_hook=_each_key_once)
        )
    except ConfigError:
        raise
    except (Exception, SystemExit) as error:  # any error of the user's file is reported on one line
        line = _line_of(error, path)
        legal = LEGAL[path.suffix]
        raise _unreadable(name, f"cannot be read: {type(error).__name__}{line}: {error}", legal) from error
    if not isinstance(read, Mapping):
        raise _unreadable(name, f"holds a {type(read).__name__}", "a dict")
    return read, "file"


def _unreadable(source: object, rule: str, legal: str, near: str | None = None) -> ConfigError:
    return ConfigError([Problem("config", source, rule, legal, near)])


def _from_python(path: Path, chosen: str) -> Mapping[Any, Any]:
    """`config` of the module, or the chosen name. Colossal-AI's files have their settings at top level.

    Raises ConfigError if there is none of these, or if it is no dict."""
    names = runpy.run_path(str(path), run_name="colossal_lite_config")
    names = {name: value for name, value in names.items() if not name.startswith("_")}
    if not chosen and "config" not in names:
        unlike_settings = (types.ModuleType, types.FunctionType, type)
        settings = {name: value for name, value in names.items() if not isinstance(value, unlike_settings)}
        if not settings:
            functions = [name for name, value in names.items() if isinstance(value, types.FunctionType)]
            legal = ", ".join(["a dict named config", *(f"{path}:{name}" for name in functions)])
            raise _unreadable(str(path), "defines no config and no setting", legal)
        return settings
    wanted = chosen or "config"
    if wanted not in names:
        dicts = [name for name, value in names.items() if isinstance(value, Mapping)]
        legal = ", ".join(dicts) or "a dict, or a function that returns one"
        raise _unreadable(f"{path}:{wanted}", "is not defined there", legal, nearest(wanted, dicts))
    value = names[wanted]() if callable(names[wanted]) else names[wanted]
    if not isinstance(value, Mapping):
        raise _unreadable(
            f"{path}:{wanted}", f"is a {type(value).__name__}", "a dict, or a function that returns one"
        )
    return value


def _each_key_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    read: dict[str, Any] = {}
    for key, value in pairs:
        if key in read:
            raise ValueError(f"key {key!r} is given twice")
        read[key] = value
    return read


def _line_of(error: BaseException, path: Path) -> str:
    """The line of the user's file where an error arose: the last of its frames there."""
    line, trace = getattr(error, "lineno", None), error.__traceback__
    while trace:
        if trace.tb_frame.f_code.co_filename == str(path):
            line = trace.tb_lineno
        trace = trace.tb_next
    return f" in line {line}" if line else ""


# ------------------------------------------------------------------------------------------------------ dicts


def plain(given: Mapping[Any, Any]) -> tuple[dict[str, Any], list[Problem]]:
    """A copy made of dicts and tuples, in which a key with dots (`optimizer.lr`) is the setting that it names. Adds a
    problem for every key that is not a string. Also for a dict that holds itself or is nested too deep."""
    problems: list[Problem] = []

    def copied(value: Any, path: str, within: tuple[int, ...]) -> Any:
        held = id(value)
        try:
            value = _builtin(value)
        except Exception as error:  # of a user's own sequence
            problems.append(_unread(path, error))
            return None
        if not isinstance(value, (Mapping, list, tuple)):
            return value
        if held in within or len(within) == DEEPEST:
            rule = "holds itself" if held in within else f"is nested more than {DEEPEST} levels deep"
            problems.append(Problem(path, f"a {type(value).__name__}", rule, "sections of settings"))
            return None
        within = (*within, held)
        if not isinstance(value, Mapping):
            return tuple(copied(item, f"{path}.{index}", within) for index, item in enumerate(value))
        named: dict[str, Any] = {}
        for key in value:
            try:
                item = value[key]
            except Exception as error:  # of a user's own mapping, as OmegaConf's for a value to fill in
                problems.append(_unread(f"{path}.{key}", error))
                continue
            if isinstance(key, str):
                named[key] = copied(item, f"{path}.{key}", within)
            else:
                problems.append(Problem(f"{path}[{key!r}]", item, "has a key that is no string", "a name"))
        return _without_dots(named, path, problems)

    return copied(given, "config", ()), problems


def _unread(path: str, error: Exception) -> Problem:
    rule = f"cannot be read: {type(error).__name__}: {error}"
    return Problem(path, ABSENT, rule, "a value that can be read")


def _builtin(value: Any) -> Any:
    """Python's own number, text or list, for a number or array of numpy or torch, a path, or a sequence.

    Without it a float of numpy would be a setting, and an int of numpy none. Times of numpy are no numbers."""
    if isinstance(value, PurePath):
        return str(value)
    numpy, torch = sys.modules.get("numpy"), sys.modules.get("torch")
    if numpy is not None and isinstance(value, (numpy.ndarray, numpy.generic)):
        return value if value.dtype.kind in "mM" else value.tolist()
    if torch is not None and isinstance(value, torch.Tensor):
        return value if value.is_meta else value.tolist()
    is_text = isinstance(value, (str, bytes, bytearray, memoryview, UserString))
    if isinstance(value, Sequence) and not is_text and not isinstance(value, (list, tuple)):
        return list(value)
    return value


def _without_dots(section: dict[str, Any], path: str, problems: list[Problem]) -> dict[str, Any]:
    """A section in which each setting that a key with dots names is in its own section."""
    made = {key: value for key, value in section.items() if "." not in key}
    for key, value in section.items():
        if "." not in key:
            continue
        *sections, last = key.split(".")
        holder: Any = made
        for name in sections:
            holder = holder.setdefault(name, {}) if isinstance(holder, dict) else None
        if not all(sections) or not last:
            problems.append(
                Problem(f"{path}.{key}", value, "has an empty name between dots", "section.setting")
            )
        elif not isinstance(holder, dict):
            rule = "names a setting inside a value that is no section"
            problems.append(Problem(f"{path}.{key}", value, rule, "settings in one section"))
        elif last in holder:
            problems.append(Problem(f"{path}.{key}", value, "is given twice", "one of the two"))
        else:
            holder[last] = value
    return made


def write_out(raw: dict[str, Any]) -> None:
    """Replace each short form by the section that it stands for, in place."""
    for path, name in SHORT_FORMS.items():
        *sections, last = path.split(".")
        holder: Any = raw
        for section in sections:
            holder = holder.get(section) if isinstance(holder, dict) else None
        if isinstance(holder, dict) and last in holder and not isinstance(holder[last], (dict, BaseModel)):
            holder[last] = {name: holder[last]}


def given_paths(model: type[BaseModel], raw: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """Paths of the settings that `raw` gives. Keys that the schema does not have are left out."""
    for name, field in model.model_fields.items():
        if name not in raw:
            continue
        path, value, item = prefix + name, raw[name], item_section(field.annotation)
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            if isinstance(value, Mapping):
                yield from given_paths(field.annotation, value, f"{path}.")
        elif item and isinstance(value, tuple) and value:
            for index, entry in enumerate(value):
                if isinstance(entry, Mapping):
                    yield from given_paths(item, entry, f"{path}.{index}.")
        else:
            yield path


# ----------------------------------------------------------------------------------------------- command line


def lay_over(
    root: type[BaseModel], raw: dict[str, Any], options: Sequence[str]
) -> tuple[list[str], list[str], list[Problem]]:
    """Set every option in `raw`, in place. Returns the paths set, a notice for each old name, and the problems."""
    paths: list[str] = []
    names: dict[str, str] = {}  # path -> the name that it was given by
    notices: list[str] = []
    problems: list[Problem] = []
    for option, tokens in _options(options):
        path = given = option.removeprefix("--").replace("-", "_")
        if given in RENAMED:
            path = RENAMED[given]
            notices.append(f"--{given} is now --{path}")
        path += "." + SHORT_FORMS[path] if path in SHORT_FORMS else ""
        found, (_, _, field) = locate(root, tuple(int(s) if s.isdecimal() else s for s in path.split(".")))
        both = {names.setdefault(path, given), given}
        if len(both) > 1 and (old := both & RENAMED.keys()):
            rule = f"is the old name of {path}, which is given too"
            problems.append(Problem(min(old), " ".join(tokens), rule, f"--{path} alone"))
        elif not option.startswith("--") or not path:
            problems.append(Problem("overrides", option, "names no setting", "--section.setting value"))
        elif found != path or field is None:
            problems.append(unknown_key(root, path, " ".join(tokens)))
        elif not tokens:
            problems.append(Problem(path, ABSENT, "needs a value", f"--{path} value"))
        elif not set_path(raw, path, _typed(field, tokens)):
            problems.append(_no_entry(raw, path, _typed(field, tokens)))
        else:
            paths.append(path)
    return paths, notices, problems


def _no_entry(raw: Mapping[str, Any], path: str, value: object) -> Problem:
    """Names the entries that a list has, or how to give one to an empty list. Entries have a pattern to match."""
    names = path.split(".")
    place = next(i for i, name in enumerate(names) if name.isdecimal())
    given = ".".join(names[:place])
    entries = get_path(raw, given)
    count = len(entries) if isinstance(entries, tuple) else 0
    entry = {"match": "*", names[-1]: value}
    legal = f"{given}.0 to {given}.{count - 1}" if count else f'--{given} "[{entry}]"'
    return Problem(path, value, f"is no entry of the list, which has {count or 'none'}", legal)


def _options(tokens: Sequence[str]) -> Iterator[tuple[str, list[str]]]:
    """`--a.b 1 2 --c=3` as (option, its values); a value before any option stands for itself."""
    name, values = "", []
    for token in tokens:
        if not token.startswith("--") and name:
            values.append(token)
            continue
        if name:
            yield name, values
        name, equals, value = token.partition("=") if token.startswith("--") else (token, "", "")
        values = [value] if equals else []
        if not token.startswith("--"):
            yield name, []
            name = ""
    if name:
        yield name, values


def _typed(field: FieldInfo, tokens: list[str]) -> object:
    """The value that the tokens spell for this field: a literal if the field takes one, else text."""
    literals = tuple(_literal(token) for token in tokens)
    candidates: list[object] = [literals, tuple(tokens)]
    if len(tokens) == 1:
        candidates = [literals[0], tokens[0], literals]
    kind: Any = Annotated[(field.annotation, *field.metadata)] if field.metadata else field.annotation
    adapter: TypeAdapter[Any] = TypeAdapter(kind)
    for candidate in candidates:
        try:
            adapter.validate_python(candidate, strict=True)
        except ValidationError:
            continue
        return candidate
    return candidates[0]


def _literal(token: str) -> object:
    if token.lower() in WORDS:
        return WORDS[token.lower()]
    try:
        value = ast.literal_eval(token)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return token
    return tuple(value) if isinstance(value, list) else value


def set_path(raw: dict[str, Any], path: str, value: object) -> bool:
    """Put a value at a dotted path, making sections on the way; False if a list has no such entry."""
    parent, _, last = path.rpartition(".")
    if isinstance(entry := get_path(raw, parent), dict):
        entry[last] = value
        return True
    sections = parent.split(".")
    if any(section.isdecimal() for section in sections):
        return False
    holder = raw
    for section in sections:
        if not isinstance(holder.get(section), dict):
            holder[section] = {}
        holder = holder[section]
    holder[last] = value
    return True
