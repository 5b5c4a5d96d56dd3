"""Checks the finder of planted faults: what moves is found again, a doubled name is refused, no patch stays."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.shared.places import Finder, PlaceError, find, patched, place, product, replaced

PACKAGE = "house_that_moves"
CHUNK = """
class Weights:
    def twice(self, x):
        return 2 * x

class Chunk(Weights):
    size = property(lambda self: 3)
    def accept(self, x):
        return x + 1
    @staticmethod
    def of(x):
        return Chunk().accept(x)
    @classmethod
    def named(cls, x):
        return cls.__name__, x
"""
FACTOR = "def factor(step):\n    return step / 2\n"
USER = (
    "from .{} import factor as of_step\nfrom .{} import Chunk\n\ndef used(step):\n    return of_step(step)\n"
)


class Rooms:
    """A package on disk whose files are written, moved and forgotten."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / PACKAGE
        self.folder.mkdir()
        self.write("__init__", "")

    def write(self, name: str, text: str) -> None:
        path = self.folder / f"{name}.py"
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)

    def finder(self) -> Finder:
        for name in [name for name in sys.modules if name.split(".")[0] == PACKAGE]:
            del sys.modules[name]
        return Finder({PACKAGE: self.folder})


@pytest.fixture
def rooms(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Rooms]:
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    made = Rooms(tmp_path)
    yield made
    made.finder()


def planted(finder: Finder) -> tuple[Any, ...]:
    """What a method and a function give while they are patched, through who uses them."""
    with (
        finder.patched("Chunk.accept", lambda original, self, x: original(self, x) * 10),
        finder.patched("factor", lambda original, step: -original(step)),
    ):
        return finder.find("Chunk").of(1), finder.find("used")(4), finder.find("factor")(4)


@pytest.mark.parametrize(
    "chunk, factor", [("one", "one"), ("two", "one"), ("one", "two"), ("room/deep", "two")]
)
def test_what_has_moved_is_found_again(rooms: Rooms, chunk: str, factor: str) -> None:
    rooms.write("user", USER.format(factor.replace("/", "."), chunk.replace("/", ".")))
    rooms.write(chunk, CHUNK if chunk != factor else CHUNK + FACTOR)
    if chunk != factor:
        rooms.write(factor, FACTOR)
    finder = rooms.finder()
    assert planted(finder) == (20, -2, -2)
    assert (finder.find("Chunk").of(1), finder.find("used")(4), finder.find("factor")(4)) == (2, 2, 2)


def test_a_function_is_patched_in_every_module_that_binds_it(rooms: Rooms) -> None:
    rooms.write("one", CHUNK + FACTOR)
    rooms.write("user", USER.format("one", "one"))
    finder = rooms.finder()
    finder.find("used")
    bound = {(module.__name__, name) for module, name in finder.place("factor").bindings}
    assert bound == {(f"{PACKAGE}.one", "factor"), (f"{PACKAGE}.user", "of_step")}


def test_a_module_that_is_loaded_during_a_patch_keeps_nothing_of_it(rooms: Rooms) -> None:
    rooms.write("one", CHUNK + FACTOR)
    rooms.write("user", USER.format("one", "one"))
    finder = rooms.finder()
    with finder.patched("factor", lambda original, step: "planted"):
        assert finder.find("used")(4) == "planted"
    assert finder.find("used")(4) == 2


def test_a_patch_ends_with_an_error_too_and_patches_may_lie_over_each_other(rooms: Rooms) -> None:
    rooms.write("one", CHUNK + FACTOR)
    finder = rooms.finder()
    with (
        pytest.raises(ZeroDivisionError),
        finder.patched("factor", lambda original, step: original(step) + 1),
    ):
        with finder.patched("factor", lambda original, step: original(step) * 10):
            assert finder.find("factor")(4) == 30
        assert finder.find("factor")(4) == 3
        raise ZeroDivisionError
    assert finder.find("factor")(4) == 2


def test_methods_of_each_kind_are_patched(rooms: Rooms) -> None:
    rooms.write("one", CHUNK)
    finder = rooms.finder()
    chunk = finder.find("Chunk")
    with (
        finder.patched("Chunk.of", lambda original, x: (original(x),)),
        finder.patched("Chunk.named", lambda original, x: (*original(x), "planted")),
        finder.patched("Chunk.twice", lambda original, self, x: -original(self, x)),
        finder.replaced("Chunk.size", property(lambda self: 4)),
    ):
        assert chunk().of(1) == (2,) and chunk.named(1) == ("Chunk", 1, "planted")
        assert chunk().twice(1) == -2 and finder.find("Weights")().twice(1) == 2, (
            "the base class keeps its own"
        )
        assert chunk().size == 4
    assert (chunk.of(1), chunk.named(1), chunk().twice(1), chunk().size) == (2, ("Chunk", 1), 2, 3)
    assert "twice" not in vars(chunk)


@pytest.mark.parametrize(
    "name, words",
    [
        ("Chunc.accept", "no module defines Chunc at its top level; near matches: Chunk"),
        ("Chunk.acept", "Chunk has no acept; near matches: accept"),
        ("Weights.accept", "Weights has no accept; it is a method of Chunk"),
        ("Chunk", "is a class: name one of its methods"),
        ("factor.step", "factor is no class"),
        ("helper", f"helper is ambiguous: {PACKAGE}.one, {PACKAGE}.two define it: say whose"),
        ("factor:nothing", "the module of factor knows no nothing"),
        ("Twin.run", f"Twin is ambiguous: {PACKAGE}.one, {PACKAGE}.two define it: say whose"),
        ("Chunk.size", "Chunk.size is not called"),
        ("nothing_like_it", "no module defines nothing_like_it at its top level$"),
    ],
)
def test_a_name_that_stands_for_nothing_or_for_two_is_refused(rooms: Rooms, name: str, words: str) -> None:
    twin = "class Twin:\n    def run(self): ...\ndef helper(): ...\n"
    rooms.write("one", CHUNK + FACTOR + twin)
    rooms.write("two", twin)
    finder = rooms.finder()
    with pytest.raises(PlaceError, match=words), finder.patched(name, lambda original, *args: None):
        pass


def test_a_doubled_name_is_told_by_who_uses_it(rooms: Rooms) -> None:
    rooms.write("one", "def _half(x):\n    return x / 2\ndef first(x):\n    return _half(x)\n")
    rooms.write("two", "def _half(x):\n    return x // 2\ndef second(x):\n    return _half(x)\n")
    finder = rooms.finder()
    with finder.patched("second:_half", lambda original, x: -original(x)):
        assert (finder.find("first")(3), finder.find("second")(3)) == (1.5, -1)


def test_the_product_is_read_with_its_kernels_and_its_launcher() -> None:
    folders = {name.split(".")[1] for name in product().files if "." in name}
    assert {"kernels", "launcher", "engine", "zero"} <= folders and "tests" not in folders
    assert place("Chunk.accept").original is find("Chunk").accept
    with patched("learning_rate_factor", lambda original, *args: 0.5), replaced("Chunk.accept", print):
        assert find("learning_rate_factor")() == 0.5 and find("Chunk").accept is print
    assert find("learning_rate_factor").__name__ == "learning_rate_factor"
