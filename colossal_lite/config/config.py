"""Loads the configuration: a dict, a file or a `Config`, plus command-line options, as one frozen value.

Note: how a configuration is read.
Source and command line become one nested dict.  Short forms are expanded (`tensor=4`).  Colossal-AI's keys and old
names are translated, and options replace values of the source.  The dict is validated once, so all errors are reported
together, each with its path.  Rules that need a world or a model are checked when these are known (`check_world`,
`check_model`).  `check_built` rejects settings without an implementation.  A `Config` records the origin of each value;
`resolved` lists them.
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

from pydantic import BaseModel, PrivateAttr, ValidationError

from colossal_lite.config.errors import (
    ABSENT,
    ConfigError,
    Problem,
    get_path,
    listed,
    problems_of,
    refuse,
    shown,
)
from colossal_lite.config.legacy_keys import translate
from colossal_lite.config.parallel_schema import ModelFacts
from colossal_lite.config.rules import (
    MOST_TRIALS,
    MeshSizes,
    joint_problems,
    model_problems,
    nearest_factorisations,
    shard_problems,
    unbuilt_problems,
    unused_across_sections,
    world_problems,
)
from colossal_lite.config.schema import (
    Section,
    SettingError,
)
from colossal_lite.config.settings import ParallelConfig, Settings
from colossal_lite.config.source import (
    SHORT_FORMS,
    given_paths,
    lay_over,
    plain,
    read_source,
    set_path,
    write_out,
)
from colossal_lite.sharding.mesh_layout import MeshLayout

__all__ = ["Config", "ConfigError", "ParallelConfig", "Problem", "Setting", "render"]

Origin = Literal["default", "user", "file", "command line", "derived", "translated"]


class Setting(NamedTuple):
    """One resolved setting. `value` consists of JSON types."""

    path: str
    value: object
    origin: str


class Config(Settings):
    """All settings that `launch` and `initialize` read. `Config.load` makes it."""

    _given: dict[str, Any] | None = PrivateAttr(default=None)
    _origins: dict[str, Origin] = PrivateAttr(default_factory=dict)
    _notices: tuple[str, ...] = PrivateAttr(default=())

    def __eq__(self, other: object) -> bool:
        """Equal settings, of any origin."""
        return isinstance(other, Config) and self.__dict__ == other.__dict__

    def __hash__(self) -> int:
        return hash(tuple(self.__dict__.values()))

    @classmethod
    def load(cls, source: Mapping[str, Any] | str | Path | Config, overrides: Sequence[str] = ()) -> Config:
        """The configuration in `source`, with `overrides` (`--parallel.tensor.size 2`) over it.

        A source is a dict, a Config, or a .json, .toml or .py file.  Of a .py file the dict `config` is read.
        `file.py:name` reads another dict, or calls a function that returns one.  Raises ConfigError with all problems.
        """
        if isinstance(source, Config):
            given = source.model_dump(exclude_unset=True) if source._given is None else source._given
            raw, problems = plain(given)
            origins: dict[str, Origin] = {
                path: source._origins.get(path, "user") for path in given_paths(cls, raw)
            }
            notices = source._notices
        else:
            read, origin = read_source(source)
            raw, problems = plain(read)
            write_out(raw)
            done = translate(raw)
            problems += done.problems
            origins = {path: "translated" if path in done.moved else origin for path in given_paths(cls, raw)}
            notices = tuple(done.notices)
        overridden, told, faults = lay_over(cls, raw, overrides)
        origins |= dict.fromkeys(overridden, "command line")
        config, invalid = cls._validated(raw)
        refuse([*problems, *faults, *invalid])
        config._given, config._origins, config._notices = raw, origins, (*notices, *told)
        return config

    @classmethod
    def _validated(cls, raw: dict[str, Any]) -> tuple[Config, list[Problem]]:
        """The config and its problems. Invalid settings are left out, so that the rest is checked as well."""
        problems: list[Problem] = []
        spoilt: set[str] = set()  # sections that lack an invalid setting: their other rules are not checked
        rest, _ = plain(raw)
        while True:
            try:
                config = cls.model_validate(rest, strict=True)
                break
            except ValidationError as invalid:
                error, found = invalid, problems_of(invalid, cls, rest)
            problems += [problem for problem in found if problem.path.rpartition(".")[0] not in spoilt]
            spoilt |= {problem.path.rpartition(".")[0] for problem in found} - {""}
            pruned = [_prune(rest, problem.path) for problem in found]
            assert any(pruned), f"no setting to leave out: {error}"
        for path, fault in config._section_errors():
            where = f"{path}.{fault.name}"
            if not spoilt & {path, f"{path}.{fault.reads}"}:
                problems.append(Problem(where, get_path(config.model_dump(), where), fault.rule, fault.legal))
        told = {problem.path for problem in problems}
        problems += [problem for problem in joint_problems(config) if problem.path not in told]
        return config, [cls._with_choices(problem, rest) for problem in problems]

    @classmethod
    def _with_choices(cls, problem: Problem, rest: dict[str, Any]) -> Problem:
        """The problem with the choices that the valid settings take; the others are named apart."""
        refused = []
        for choice in problem.figures:
            changed, _ = plain(rest)
            if not set_path(changed, problem.path, choice):
                return problem
            config, found = cls._validated(changed)
            if problem.path in {other.path for other in (*found, *unbuilt_problems(config))}:
                refused.append(choice)
        taken = [choice for choice in problem.figures if choice not in refused]
        if not refused or not taken:
            return problem
        return replace(problem, legal=f"{listed(taken)}; with other settings {listed(refused)}")

    def _sections(self) -> Iterator[tuple[str, Section]]:
        """Every section below this one with its path."""

        def below(section: BaseModel, prefix: str) -> Iterator[tuple[str, Section]]:
            for name in type(section).model_fields:
                if isinstance(value := getattr(section, name), BaseModel):
                    if isinstance(value, Section):
                        yield prefix + name, value
                    yield from below(value, f"{prefix}{name}.")

        return below(self, "")

    def _section_errors(self) -> Iterator[tuple[str, SettingError]]:
        return ((path, fault) for path, section in self._sections() for fault in section.errors())

    @property
    def notices(self) -> tuple[str, ...]:
        """One line for each key of Colossal-AI that was translated or ignored."""
        return self._notices

    def values(self) -> dict[str, Any]:
        """Every value by its path, as checkpoints store it and ranks compare it."""
        return {row.path: row.value for row in self.resolved()}

    def warnings(self) -> tuple[str, ...]:
        """One line for each setting that differs from its default and has no effect in this combination."""
        lines = {}
        defaults = Config().values()
        values = {row.path: row.value for row in self.resolved() if row.origin != "default"}
        unread = [
            (f"{section}.{u.name}", u.why)
            for section, part in self._sections()
            for u in part.unused_settings()
        ]
        for path, why in (*unread, *unused_across_sections(self)):
            if path in values and (path not in defaults or values[path] != defaults[path]):
                lines[path] = f"{path}={shown(values[path])} has no effect: {why}"
        return tuple(lines.values())

    def check_world(self, world_size: int, facts: ModelFacts | None = None) -> Config:
        """This configuration with `parallel.data` as a number; ConfigError if it cannot fill the world. If the `facts`
        of a model are known, the error offers only sizes that are legal for it."""
        found = self._of_world(world_size, self._meshes(world_size, facts))
        refuse(self._tried(found, world_size, facts))
        if self.parallel.data != "auto":
            return self
        return self.derived("parallel", data=world_size // self.parallel.inner)

    def _of_world(self, world_size: int, offers: Iterable[MeshSizes] = ()) -> list[Problem]:
        asked = world_size, self._origins
        return [
            *world_problems(self.parallel, *asked, offers),
            *shard_problems(self.parallel, self.zero, *asked),
        ]

    def _meshes(self, world_size: int, facts: ModelFacts | None) -> Iterator[MeshSizes]:
        """The nearest meshes that the other settings take; found when the first is asked for."""

        def takes(sizes: MeshSizes) -> bool:
            return not self._refused(sizes.settings, world_size, facts)

        yield from nearest_factorisations(self.parallel, world_size, facts, takes)

    def _refused(
        self, changes: Mapping[str, object], world_size: int | None, facts: ModelFacts | None
    ) -> set[str]:
        """Paths that are refused once these settings are changed, and are not without it."""
        try:
            other = Config.load(self, [f"--{path}={value}" for path, value in changes.items()])
        except ConfigError as error:
            return {problem.path for problem in error.problems}
        before, after = (config._found(world_size, facts) for config in (self, other))
        return after - (before - changes.keys())

    def _found(self, world_size: int | None, facts: ModelFacts | None) -> set[str]:
        """Paths that any rule refuses, in this world and for this model if they are known."""
        found = [*unbuilt_problems(self)]
        if world_size is not None:
            found += self._of_world(world_size)
        if facts is not None:
            found += model_problems(self.parallel, facts)
        return {problem.path for problem in found}

    def _tried(
        self, problems: Iterable[Problem], world_size: int | None, facts: ModelFacts | None
    ) -> Iterator[Problem]:
        """The problems with those legal values alone that the other settings take. Where these take none, a mesh that
        they take is named, and else all."""
        for problem in problems:
            tried = problem.figures[:MOST_TRIALS]
            takes = [
                figure for figure in tried if not self._refused({problem.path: figure}, world_size, facts)
            ]
            legal = listed(takes)
            if not takes and problem.figures and world_size and problem.path.startswith("parallel."):
                meshes = self._meshes(world_size, facts)
                legal = "; ".join(
                    str(sizes) for sizes in meshes if not self._refused(sizes.settings, world_size, facts)
                )
            is_kept = len(takes) == len(tried) or not legal
            yield problem if is_kept else replace(problem, legal=legal, figures=tuple(takes))

    def derived(self, section: str, **values: object) -> Config:
        """This configuration with settings of a section that the program has found."""
        part = getattr(self, section).model_copy(update=values)
        config = self.model_copy(update={section: part})
        config._origins = {**self._origins, **{f"{section}.{name}": "derived" for name in values}}
        return config

    def settled(self, section: str, **values: object) -> Config:
        """As `derived`, with values that `load` of the result keeps."""
        config = self.derived(section, **values)
        given = self._given or {}
        config._given = {**given, section: {**given.get(section, {}), **values}}
        return config

    def check_model(self, facts: ModelFacts) -> None:
        """Raises ConfigError with every rule that a model of these sizes breaks."""
        world_size = None if self.parallel.data == "auto" else self.parallel.data * self.parallel.inner
        refuse(self._tried(model_problems(self.parallel, facts), world_size, facts))

    def check_built(self) -> None:
        """Raises ConfigError for every setting that is not implemented yet."""
        refuse(unbuilt_problems(self))

    def layout(self) -> MeshLayout:
        """The mesh; call `check_world` first. Raises ValueError while parallel.data is "auto"."""
        data, tensor, sequence = self.parallel.data, self.parallel.tensor, self.parallel.sequence
        if data == "auto":
            raise ValueError(
                "parallel.data is 'auto': call check_world(world_size) first, it returns a number"
            )
        return MeshLayout.build(
            pipeline=self.parallel.pipeline.size,
            data=data,
            sequence=sequence.size,
            tensor=tensor.axis(),
            ulysses=sequence.ulysses if sequence.mode == "usp" and sequence.size > 1 else None,
            data_shard=self.zero.shard_size if self.zero.is_hybrid(data) else None,
            data_near=self.zero.near,
        )

    def resolved(self) -> tuple[Setting, ...]:
        """Every setting with its value and origin, in the order of the schema. `render` prints it."""
        return tuple(self._rows(self, ""))

    def _rows(self, section: BaseModel, prefix: str) -> Iterator[Setting]:
        for name in type(section).model_fields:
            path, value = prefix + name, getattr(section, name)
            if isinstance(value, BaseModel):
                yield from self._rows(value, f"{path}.")
            elif isinstance(value, tuple) and value and isinstance(value[0], BaseModel):
                for index, item in enumerate(value):
                    rows = self._rows(item, f"{path}.{index}.")
                    yield from (row for row in rows if row.value is not None)
            else:
                yield Setting(path, _plain(value), self._origins.get(path, "default"))

    @classmethod
    def schema(cls) -> dict[str, Any]:  # type: ignore[override]  # takes the place of pydantic's deprecated method
        """JSON schema of a configuration file, short forms included."""
        schema = cls.model_json_schema()
        for path, short in SHORT_FORMS.items():
            section, _, name = path.rpartition(".")
            owner = schema["$defs"][cls.model_fields[section].annotation.__name__] if section else schema  # type: ignore[union-attr]
            whole = owner["properties"][name]
            leaf = schema["$defs"][whole["$ref"].rpartition("/")[2]]["properties"][short]
            short_form = {key: leaf[key] for key in ("type", "enum", "minimum") if key in leaf}
            owner["properties"][name] = {"anyOf": [whole, short_form]}
        return schema

    @classmethod
    def help(cls, program: str = "colossal-lite") -> str:
        """Lists every option that `overrides` may hold, with its type, meaning and default."""
        import tyro  # 0.1 s, needed for this text only

        text = io.StringIO()
        with contextlib.redirect_stdout(text), contextlib.suppress(SystemExit):
            options = (tyro.conf.FlagConversionOff,)
            tyro.cli(cls, default=cls(), args=["--help"], prog=program, use_underscores=True, config=options)
        return text.getvalue()


def _plain(value: Any) -> Any:
    """The same, of what JSON has."""
    if isinstance(value, dict):
        return {name: _plain(item) for name, item in value.items()}
    return list(value) if isinstance(value, tuple) else value


def _prune(raw: dict[str, Any], path: str) -> bool:
    """Remove an invalid setting, or the whole list of an invalid section. False if it is removed already."""
    holder: Any = raw
    for name in path.split("."):
        inside = holder.get(name, ABSENT)
        if not isinstance(inside, dict):
            return holder.pop(name, ABSENT) is not ABSENT
        section, holder = holder, inside
    del section[name]
    return True


def render(rows: Iterable[Setting]) -> str:
    """Resolved settings as a table for people: path, value, origin."""
    cells = [(row.path, shown(row.value), row.origin) for row in rows]
    widths = [max((len(row[column]) for row in cells), default=0) for column in range(2)]
    return "\n".join(f"{path:<{widths[0]}}  {value:<{widths[1]}}  {origin}" for path, value, origin in cells)
