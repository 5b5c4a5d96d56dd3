"""Writes docs/configuration.md: each setting with its values, default and meaning, and what it does not go with.

The last column is found by trying.  Each value of a setting is read as a config, alone and beside each of `BESIDE`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

from colossal_lite.config.config import Config
from colossal_lite.config.errors import ConfigError

Values = tuple[Any, ...]
BESIDE: Mapping[str, dict[str, Any]] = {
    "pipeline": dict(parallel=dict(pipeline=2)),
    "tensor 2d": dict(parallel=dict(tensor=dict(size=4, mode="2d"))),
    "sequence": dict(parallel=dict(sequence=2)),
    "zero.stage=3": dict(zero=dict(stage=3)),
    "state on the host": dict(memory=dict(placement="host")),
    "static fractions": dict(memory=dict(placement="static", host_fraction=dict(optimizer=0.5))),
    "device_budget": dict(memory=dict(placement="auto", device_budget="1GiB")),
    "fp64": dict(precision="fp64"),
    "fp16": dict(precision="fp16"),
    "gradient_accumulation": dict(gradient_accumulation=2),
    "clip_grad_norm": dict(clip_grad_norm=1.0),
    "activation_checkpoint": dict(activation_checkpoint="full"),
    'update_when="backward"': dict(optimizer=dict(update_when="backward")),
    'optimizer "muon"': dict(optimizer=dict(type="muon")),
}
"""What a page of settings calls a feature -> a config that has it."""
NEEDS: Mapping[tuple[str, Any], dict[str, Any]] = {
    ("memory.placement", "static"): dict(memory=dict(host_fraction=dict(optimizer=0.5))),
    ("memory.placement", "disk"): dict(memory=dict(disk_dir="disk")),
    ("lr_scheduler.type", "wsd"): dict(lr_scheduler=dict(total_steps=100, decay_steps=10)),
    **{
        ("lr_scheduler.type", kind): dict(lr_scheduler=dict(total_steps=100))
        for kind in ("cosine", "linear", "one_cycle", "polynomial")
    },
}
"""What a value needs to be legal at all."""
HEAD = """# Configuration

Written by `python -m tests.shared.docs_pages` from the schema. A config is a dict, a `.py`, `.json` or `.toml` file, or
options on the command line (`--parallel.tensor.size 2`), which lie over the file. `colossal-lite config show config.py`
prints every setting with its value and origin. Unknown keys are refused with the nearest known name.

The last column was found by trying each value alone, and beside each of these:

{beside}

A value is refused beside the features that its row names. *Alone* means that it has no effect by itself, and why; a run
warns of that.
"""
SECTIONS = {
    "parallel": "How the world is cut; [Parallelism](parallelism/index.md) says which axis when.",
    "zero": "What data parallelism shards; see [ZeRO](parallelism/zero.md).",
    "memory": "Where model state rests; see [Memory and offload](memory-and-offload.md).",
    "precision": 'Dtypes of weights, masters and gradients; a bare dtype is `precision="bf16"`.',
    "optimizer": "The update rule. A setting that is not given has the default of its `type`.",
    "lr_scheduler": "The learning rate over steps, as a factor on the `lr` of every group. One of your own is "
    "`cl.initialize(lr_lambda=...)`.",
    "checkpoint": "What `engine.save` leaves on disk; see [Checkpoints and faults](checkpoints.md).",
}


def page() -> str:
    """The whole page."""
    schema = Config.schema()
    out = [HEAD.format(beside=", ".join(map(_named, BESIDE)))]
    tops = {name: held for name, held in schema["properties"].items() if name not in SECTIONS}
    for section, words in SECTIONS.items():
        out += [
            f"## {section}\n",
            words + "\n",
            *_table(schema, section, {section: schema["properties"][section]}),
        ]
    out += ["## Other settings\n", *_table(schema, "", tops)]
    return "\n".join(out).rstrip() + "\n"


def _table(schema: Mapping[str, Any], section: str, properties: Mapping[str, Any]) -> Iterator[str]:
    """The settings of a section, by their paths within it. The default stands first among the values, in bold."""
    yield "| key | values, default first | what it does | does not go with |\n|---|---|---|---|"
    for path, held in _leaves(schema, properties, ""):
        text = _escaped(" ".join(held.get("description", "").split()))
        default = [] if "default" not in held else [f"**`{_shown(held['default'])}`**"]
        values = ", ".join([*default, *(v for v in _values(held) if v not in "".join(default))])
        key = path.removeprefix(f"{section}.")
        yield f"| `{key}` | {values} | {text} | {'; '.join(_refused(path, held))} |"
    yield ""


def _leaves(
    schema: Mapping[str, Any], properties: Mapping[str, Any], before: str
) -> Iterator[tuple[str, Any]]:
    """Dotted path and schema of each setting, those of sections within sections too."""
    for name, held in properties.items():
        section = next((part for part in (held, *held.get("anyOf", ())) if "$ref" in part), None)
        if section is not None:
            inner = schema["$defs"][section["$ref"].rpartition("/")[2]]
            yield from _leaves(schema, inner["properties"], f"{before}{name}.")
        else:
            yield before + name, held
        if held.get("type") == "array" and "$ref" in held.get("items", {}):
            inner = schema["$defs"][held["items"]["$ref"].rpartition("/")[2]]
            yield from _leaves(schema, inner["properties"], f"{before}{name}.N.")


def _shown(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return str(value)
    return json.dumps(value).replace("|", "\\|")


def _values(held: Mapping[str, Any]) -> list[str]:
    """The values of a setting in words."""
    if "anyOf" in held:
        return list(dict.fromkeys(value for part in held["anyOf"] for value in _values(part)))
    if "enum" in held:
        return [f"`{_shown(value)}`" for value in held["enum"]]
    if "const" in held:
        return [f"`{_shown(held['const'])}`"]
    bounds = {"minimum": ">=", "exclusiveMinimum": ">", "maximum": "<=", "exclusiveMaximum": "<"}
    limits = " and ".join(f"{sign} {held[key]:g}" for key, sign in bounds.items() if key in held)
    if held.get("type") == "object":
        return [f"`dict({name}=)`" for name in held.get("propertyNames", {}).get("enum", ())] or ["dict"]
    kinds = {"integer": "int", "number": "float", "boolean": "bool", "null": "`None`", "string": "str"}
    kind = kinds.get(held.get("type", ""), "list")
    return [f"{kind} {limits}".strip()]


def _tried(held: Mapping[str, Any]) -> Values:
    """Values of a setting other than its default: all where there are few, one of many numbers."""
    parts = (held, *held.get("anyOf", ()))
    found = [value for part in parts for value in part.get("enum", ())]
    for part in parts:
        low, high = part.get("minimum", part.get("exclusiveMinimum", 0)), part.get("maximum", 10**6)
        if part.get("type") == "boolean":
            found += [True, False]
        elif part.get("type") == "integer":
            found += range(low, high + 1) if high - low < 5 else [max(low, 2)]
        elif part.get("type") == "number":
            found += [(low + 1) / 2 if high > 1 else high / 2]
    return tuple(value for value in dict.fromkeys(found) if value != held.get("default"))


def _laid(config: Mapping[str, Any], path: str, value: Any) -> dict[str, Any] | None:
    """The config with one more value; None if it has another one there, or a section in a short form."""
    name, _, rest = path.partition(".")
    if not rest:
        return None if name in config else {**config, name: value}
    inner = config.get(name, {})
    if not isinstance(inner, dict):
        inner = {"size": inner} if isinstance(inner, int) else {"dtype": inner}
    laid = _laid(inner, rest, value)
    return None if laid is None else {**config, name: laid}


def _joined(config: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any] | None:
    """Both configs in one; None if they differ in a setting."""
    out: dict[str, Any] | None = dict(config)
    for path, value in _settings_of(other):
        out = None if out is None else _laid(out, path, value)
    return out


def _settings_of(config: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in config.items():
        if isinstance(value, dict):
            yield from _settings_of(value, f"{before}{name}.")
        else:
            yield before + name, value


@cache
def _refuses(config: str) -> bool:
    try:
        Config.load(json.loads(config)).check_built()
    except ConfigError:
        return True
    return False


def _refused(path: str, held: Mapping[str, Any]) -> Iterator[str]:
    """For each value that is legal alone: whether it has no effect then, and the features that refuse it."""
    if ".N." in path:
        return
    idle, enumerated = dict[str, None](), any("enum" in part for part in (held, *held.get("anyOf", ())))
    found: dict[str, list[str]] = {}
    for value in _tried(held):
        alone = _laid(NEEDS.get((path, value), {}), path, value)
        if alone is None or _refuses(json.dumps(alone)):
            continue
        idle |= {why: None for line in Config.load(alone).warnings() for why in _why(line, path)}
        beside = {name: _joined(config, alone) for name, config in BESIDE.items()}
        refused = [name for name, config in beside.items() if config and _refuses(json.dumps(config))]
        if refused:
            names = ", ".join(map(_named, refused))
            shown = f"`{_shown(value)}`: " if enumerated or held.get("maximum", 99) < 5 else ""
            found.setdefault(names, []).append(shown)
    for names, shown in found.items():
        yield (
            ", ".join(each.removesuffix(": ") for each in shown if each)
            + (": " if any(shown) else "")
            + names
        )
    yield from (f"alone: {why}" for why in idle)


def _named(feature: str) -> str:
    return f"`{feature}`" if re.search("[=_]", feature) else feature


def _why(line: str, path: str) -> Iterator[str]:
    named, _, why = line.partition(" has no effect: ")
    if why and named.partition("=")[0] == path:
        yield _escaped(why)


def _escaped(text: str) -> str:
    """Signs of Markdown as they are, outside of code."""
    return re.sub(r"(`[^`]*`)|([*|_])", lambda found: found[1] or f"\\{found[2]}", text)
