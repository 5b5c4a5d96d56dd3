"""`cl.ConfigDict` is what the schema says; `python -m tests.config.test_config_dict` writes it anew."""

from __future__ import annotations

import subprocess
import sys
import textwrap
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel

from colossal_lite.config.config import Config
from colossal_lite.config.config_dict import ConfigDict
from colossal_lite.config.errors import is_section, item_section
from colossal_lite.config.memory_schema import parse_bytes
from colossal_lite.config.settings import Settings
from colossal_lite.config.source import SHORT_FORMS

FILE = Path(__file__).parents[2] / "colossal_lite/config/config_dict.py"
HEAD = '''"""Types a configuration given as a dict, so that editors and type checkers underline a misspelt key.

Note: made from the schema by `python -m tests.config.test_config_dict`. Do not edit: a test compares the two.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, TypedDict
'''
INDENT = 4 * " "


def name_of(section: type[BaseModel]) -> str:
    return section.__name__.removesuffix("Config") + "Dict" if section is not Settings else "ConfigDict"


def written(annotation: Any, metadata: tuple[Any, ...] = ()) -> str:
    """What a dict may hold for a field of this annotation: what JSON and TOML have too, and short forms."""
    origin, args = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return written(args[0], args[1:])
    if origin in (Union, types.UnionType):
        return " | ".join(written(part) for part in args)
    if origin is Literal:
        return f"Literal[{', '.join(map(repr, args))}]"
    if origin is dict:
        return f"dict[str, {written(args[1])}]"  # as dict(every=2) makes it
    if origin is tuple:
        inner = " | ".join(dict.fromkeys(written(part) for part in args if part is not Ellipsis))
        return f"Sequence[{inner}]"
    if is_section(annotation):
        return name_of(annotation)
    text = {type(None): "None"}.get(annotation, getattr(annotation, "__name__", ""))
    return f"{text} | str" if any(getattr(item, "func", None) is parse_bytes for item in metadata) else text


def fields_of(section: type[BaseModel], prefix: str = "") -> Iterator[str]:
    for name, field in section.model_fields.items():
        text = written(field.annotation, tuple(field.metadata))
        if short := SHORT_FORMS.get(prefix + name):
            assert is_section(field.annotation)
            leaf = field.annotation.model_fields[short]
            text += f" | {written(leaf.annotation, tuple(leaf.metadata))}"
        yield f"    {name}: {text}"
        if field.description:
            yield textwrap.fill(
                f'"""{field.description}"""', 110, initial_indent=INDENT, subsequent_indent=INDENT
            )


def sections(section: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, type[BaseModel]]]:
    """Every section with its path, those that it holds before it."""
    for name, field in section.model_fields.items():
        inner = field.annotation if is_section(field.annotation) else item_section(field.annotation)
        if inner is not None:
            yield from sections(inner, f"{prefix}{name}.")
    yield prefix, section


def made() -> str:
    """The text of the file, as ruff formats it."""
    parts = [HEAD]
    for prefix, section in sections(Settings):
        doc = " ".join((section.__doc__ or "").split())
        if section is Settings:
            doc = "Every setting of a configuration. A setting that is left out has its default."
        fields = "\n".join(fields_of(section, prefix))
        parts.append(f'\n\nclass {name_of(section)}(TypedDict, total=False):\n    """{doc}"""\n\n{fields}\n')
    command = [sys.executable, "-m", "ruff", "format", "--stdin-filename", str(FILE), "-"]
    return subprocess.run(command, input="".join(parts), text=True, capture_output=True, check=True).stdout


def test_the_typed_dict_is_what_the_schema_says() -> None:
    assert FILE.read_text() == made(), "run python -m tests.config.test_config_dict"


def test_it_has_every_key_of_the_schema_and_no_other() -> None:
    assert FILE.read_text().count("TypedDict, total=False") == len(list(sections(Settings)))
    assert ConfigDict.__annotations__.keys() == Config.model_fields.keys()


if __name__ == "__main__":
    FILE.write_text(made())
