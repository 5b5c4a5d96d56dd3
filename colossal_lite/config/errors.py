"""Describes configuration errors: path, value, rule, legal values, and the nearest name.

Note: `Problem` is data.  `ConfigError` carries all problems and prints them as a list; nothing here raises.  Legal
values are read from a field's annotation, so a message never drifts from the schema.
"""

from __future__ import annotations

import difflib
import enum
import re
import types
import typing
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt
from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from colossal_lite.config.foreign_keys import SAME_VALUES, answer, nested, place_of_argument, written
from colossal_lite.config.schema import Legal

if typing.TYPE_CHECKING:
    from pydantic_core import ErrorDetails

RANGES = frozenset({"greater_than", "greater_than_equal", "less_than", "less_than_equal", "string_too_short"})
"""Errors of pydantic for a value beyond a bound."""
WIDTH = 120  # characters of a value that a message shows


class Absent(enum.Enum):
    """The value of a required setting that is not given."""

    ABSENT = "not given"

    def __repr__(self) -> str:
        return str(self.value)


ABSENT = Absent.ABSENT


@dataclass(frozen=True)
class Problem:
    """One fault: path, value, the rule it breaks, legal values, and the nearest legal name. `figures`: the legal values
    one by one, where `legal` lists them; `Config` tries each beside the other settings."""

    path: str
    value: object
    rule: str
    legal: str
    nearest: str | None = None
    figures: tuple[object, ...] = ()

    @classmethod
    def listing(cls, path: str, value: object, rule: str, figures: Iterable[object]) -> Problem:
        """A problem whose legal values are these."""
        legal = tuple(figures)
        return cls(path, value, rule, listed(legal), figures=legal)

    def __str__(self) -> str:
        hint = f"; did you mean {self.nearest}?" if self.nearest else ""
        return f"{self.path or repr('')} = {shown(self.value)}: {self.rule}; legal: {self.legal}{hint}"


class ConfigError(ValueError):
    """A configuration that cannot run. `problems` has every fault found; the text is their list."""

    def __init__(self, problems: Iterable[Problem]) -> None:
        self.problems = tuple(problems)
        super().__init__(self.problems)  # args rebuild the error on another process

    def __str__(self) -> str:
        count = len(self.problems)
        head = f"the configuration has {count} problem{'s' if count > 1 else ''}:"
        return "\n".join([head, *(f"  {problem}" for problem in self.problems)])


def listed(figures: Iterable[object]) -> str:
    return ", ".join(map(repr, figures))


def first_few(names: Iterable[str]) -> str:
    """The first three names, and the number of the others; "none" of none."""
    names = list(names)
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return (", ".join(names[:3]) or "none") + more


def refuse(problems: Iterable[Problem]) -> None:
    """Raise ConfigError if there are any problems."""
    if found := tuple(problems):
        raise ConfigError(found)


def shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= WIDTH else f"{text[: WIDTH - 4]} ..."


def nearest(name: object, names: Iterable[str]) -> str | None:
    """The legal name that looks most like `name`; None if none is near. Our names are in lower case."""
    found = difflib.get_close_matches(str(name).lower(), list(names), n=1)
    return found[0] if found else None


# ----------------------------------------------------------------------------------------------------- schema


def is_section(annotation: Any) -> typing.TypeGuard[type[BaseModel]]:
    return isinstance(annotation, type) and issubclass(annotation, BaseModel)


def item_section(annotation: Any) -> type[BaseModel] | None:
    """The section that a list holds: ParamGroup of tuple[ParamGroup, ...]."""
    args = get_args(annotation)
    return args[0] if get_origin(annotation) is tuple and is_section(args[0]) else None


def walk(model: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    """Every leaf below a model: its dotted path and its field. A list of sections is one leaf."""
    for name, field in model.model_fields.items():
        if is_section(field.annotation):
            yield from walk(field.annotation, f"{prefix}{name}.")
        else:
            yield prefix + name, field


def choices(annotation: Any) -> tuple[str, ...]:
    """The strings among the legal values."""
    if get_origin(annotation) is Literal:
        return tuple(value for value in get_args(annotation) if isinstance(value, str))
    if get_origin(annotation) in (Union, types.UnionType, Annotated):
        return tuple(name for part in get_args(annotation) for name in choices(part))
    return ()


def describe(annotation: Any, metadata: Sequence[Any] = ()) -> str:
    """What a field takes, in words: "an int >= 1 or 'auto'"."""
    metadata = [item for entry in metadata for item in getattr(entry, "metadata", [entry])]
    for item in metadata:
        if isinstance(item, Legal):
            return item.text
    origin, args = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return describe(args[0], args[1:])
    if origin in (Union, types.UnionType):
        return " or ".join(describe(part, metadata) for part in args)
    if origin is Literal:
        return ", ".join(repr(value) for value in args)
    if origin is tuple:
        if args[-1] is Ellipsis:
            return f"a list of {_plural(describe(args[0]))}"
        return f"a list of {len(args)}: " + ", ".join(describe(part) for part in args)
    if is_section(annotation):
        return f"a dict with {', '.join(annotation.model_fields)}"
    words = {int: "an int", float: "a number", bool: "True or False", str: "a string", type(None): "None"}
    return " ".join([words[annotation], _bounds(metadata)]).rstrip()


def _plural(words: str) -> str:
    return re.sub(r"^an? (\w+)", r"\1s", words)


def _bounds(metadata: Sequence[Any]) -> str:
    limits = {Ge: ("ge", ">="), Gt: ("gt", ">"), Le: ("le", "<="), Lt: ("lt", "<")}
    known = [(limits[type(item)], item) for item in metadata if type(item) in limits]
    return " and ".join(f"{sign} {getattr(item, key)}" for (key, sign), item in known)


# ------------------------------------------------------------------------------------- from pydantic's errors


def problems_of(error: ValidationError, root: type[BaseModel], raw: Mapping[str, Any]) -> list[Problem]:
    """pydantic's errors as one problem for each path. `raw` is what was validated against `root`."""
    by_path: dict[str, list[ErrorDetails]] = {}
    places: dict[str, tuple[type[BaseModel], str, FieldInfo | None]] = {}
    for details in error.errors(include_url=False):
        path, place = locate(root, details["loc"])
        if details["type"] == "value_error" and (named := _field_of_rule(details, place)):
            path, place = ".".join([path, named]).strip("."), (place[0], named, place[0].model_fields[named])
        by_path.setdefault(path, []).append(details)
        places[path] = place
    return [
        _problem(root, path, errors, places[path], get_path(raw, path)) for path, errors in by_path.items()
    ]


def locate(
    root: type[BaseModel], loc: tuple[str | int, ...]
) -> tuple[str, tuple[type[BaseModel], str, FieldInfo | None]]:
    """The setting an error is about: its path; section, name and field. Tags of unions are left out."""
    model, path, name, field = root, [], "", None
    steps = iter(loc)
    for step in steps:
        name, field = str(step), model.model_fields.get(str(step))
        path.append(name)
        if field is None:
            break
        if is_section(field.annotation):
            model = field.annotation
        elif (item := item_section(field.annotation)) and (index := next(steps, None)) is not None:
            path.append(str(index))
            model = item
        else:
            break
    return ".".join(path), (model, name, field)


def _field_of_rule(details: ErrorDetails, place: tuple[type[BaseModel], str, FieldInfo | None]) -> str | None:
    """The setting that a rule over a whole section names first, as in "chunks=3: ..."."""
    match = re.match(r"(\w+)(=\S+)?: ", str(details["ctx"]["error"]))
    return match[1] if match and match[1] in place[0].model_fields else None


def _problem(
    root: type[BaseModel],
    path: str,
    errors: list[ErrorDetails],
    place: tuple[type[BaseModel], str, FieldInfo | None],
    value: object,
) -> Problem:
    model, name, field = place
    kinds = {details["type"] for details in errors}
    if field is None:
        return unknown_key(root, path, value if path else errors[0]["input"])
    if value is ABSENT:
        return Problem(path, ABSENT, "must be given", describe(field.annotation, field.metadata))
    if "value_error" in kinds:
        told = next(str(details["ctx"]["error"]) for details in errors if details["type"] == "value_error")
        rule, _, legal = re.sub(r"^\w+(=\S+)?: ", "", told).partition("; ")
        return Problem(path, value, rule, legal or describe(field.annotation, field.metadata))
    names = choices(field.annotation)
    near = _nearest_value(str(value), names)  # a torch.dtype has a name too
    if entries := _wrong_entries(name, path, errors, value):
        rule = entries
    elif kinds & {"missing", "too_long"} and isinstance(value, tuple):
        rule = f"has the wrong length, {len(value)}"
    elif names and isinstance(value, str) and not kinds & RANGES:
        rule = "is not one of the legal values"
    else:
        rule = _wrong(value, kinds)
        if is_section(field.annotation) and (section := _as_section(field.annotation, path, value)):
            return Problem(path, value, rule, section)
    figures = names if get_origin(field.annotation) is Literal else ()
    return Problem(
        path, value, rule, describe(field.annotation, field.metadata), near and repr(near), figures
    )


def _wrong_entries(name: str, path: str, errors: Sequence[ErrorDetails], value: object) -> str:
    """Which entries of a list or dict are wrong, and how, or "". Of an entry with parts, the parts."""
    found: dict[str, tuple[object, set[str]]] = {}
    for details in errors:
        entry, where = value, name
        for step in details["loc"][path.count(".") + 1 :]:  # tags of unions are between
            if isinstance(entry, Mapping) and step in entry:
                entry, where = entry[step], f"{where}[{step!r}]"
            elif isinstance(entry, tuple) and isinstance(step, int) and step < len(entry):
                entry, where = entry[step], f"{where}[{step}]"
        if where != name:
            kind = "unknown_key" if details["loc"][-1] == "[key]" else details["type"]
            found.setdefault(where, (entry, set()))[1].add(kind)
    parts = [each for each in found if not any(other.startswith(f"{each}[") for other in found)]
    return " and ".join(f"{each} = {shown(found[each][0])} {_wrong(*found[each])}" for each in parts)


def _wrong(value: object, kinds: Collection[str]) -> str:
    """The fault of a value, by the kinds of pydantic's errors."""
    if "unknown_key" in kinds:
        return "is an unknown key"
    if RANGES.intersection(kinds):
        return "is out of range"
    if "finite_number" in kinds:
        return "is not a finite number"
    return f"has the wrong type, {type(value).__name__}"


def _nearest_value(value: str, names: tuple[str, ...]) -> str | None:
    """The nearest legal value: by meaning, such as fp32 for float32, else by spelling."""
    same = SAME_VALUES.get(value.lower().removeprefix("torch."))
    return same if same in names else nearest(value, names) if names else None


def _as_section(section: type[BaseModel], path: str, value: object) -> str | None:
    """A bare value as the setting that it means within the section: `zero=dict(stage=3), or --zero.stage 3`."""
    name = next(iter(section.model_fields), "")
    try:
        section.model_validate({name: value})
    except ValidationError:
        return None
    return f"{written(nested({path: {name: value}}))}, or --{path}.{name} {value}"


def unknown_key(root: type[BaseModel], path: str, value: object) -> Problem:
    """The problem of a path that names no setting. The nearest one may belong to another section."""
    if told := answer(path.rpartition(".")[2], value):
        return Problem(path, value, "is a key of another framework", told)
    if told := place_of_argument(path):
        return Problem(path, value, "is an argument of a call and no setting", told)
    found, (model, _, _) = locate(root, tuple(path.split(".")))
    legal = list(model.model_fields)
    section = found.rpartition(".")[0]
    here = (".".join(filter(None, [section, name])) for name in legal)
    near = nearest_path(path, {*here, *paths_of(root)})
    return Problem(path, value, "is an unknown key", ", ".join(legal), near)


def paths_of(model: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """The path of every section and setting."""
    for name, field in model.model_fields.items():
        yield prefix + name
        if is_section(field.annotation):
            yield from paths_of(field.annotation, f"{prefix}{name}.")


def nearest_path(path: str, paths: Iterable[str]) -> str | None:
    """The path whose segments look most like these, counted from the last; None where no last segment is near."""
    *_, last = given = path.lower().split(".")
    by_last: dict[str, list[str]] = {}
    for candidate in paths:
        by_last.setdefault(candidate.rpartition(".")[2], []).append(candidate)
    near = difflib.get_close_matches(last, list(by_last), n=len(by_last))

    def unlike(candidate: str) -> tuple[float, str]:
        pairs = zip_longest(reversed(given), reversed(candidate.split(".")), fillvalue="")
        return sum(1 - difflib.SequenceMatcher(None, *pair).ratio() for pair in pairs), candidate

    return min((candidate for name in near for candidate in by_last[name]), key=unlike, default=None)


def get_path(raw: Any, path: str) -> Any:
    """The value at a dotted path of nested dicts and lists; ABSENT if there is none."""
    for step in path.split(".") if path else ():
        if isinstance(raw, Mapping) and step in raw:
            raw = raw[step]
        elif isinstance(raw, tuple) and step.isdecimal() and int(step) < len(raw):
            raw = raw[int(step)]
        else:
            return ABSENT
    return raw


def more_ranks(stage: int) -> str:
    """The ranks with which each has less state: ZeRO shards it over them from stage 1 on."""
    return "more ranks" if stage else "zero.stage=1 on two or more ranks"
