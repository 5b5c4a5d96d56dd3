"""Roles by the names that they had before version 0.2."""

from __future__ import annotations

import warnings

import pytest

from colossal_lite.layers.roles import (
    RENAMED_ROLES,
    ROLES,
    Patterns,
    Role,
    assign_roles,
    match_name,
    with_new_names,
)

OLD = {
    "a.qkv": "first:qkv",
    "a.kv": "first:kv",
    "a.out": "second",
    "head": "lm_head",
    "norm": "norm",
}
NEW = {
    "a.qkv": "colwise:qkv",
    "a.kv": "colwise:kv",
    "a.out": "rowwise",
    "head": "lm_head",
    "norm": "norm",
}


def test_old_roles_are_translated_with_one_warning() -> None:
    with pytest.warns(UserWarning) as caught:
        found = with_new_names(OLD)
    (warning,) = caught
    assert found == NEW and list(found) == list(OLD)
    for old, new in RENAMED_ROLES.items():
        assert f"{old!r} is now {new!r}" in str(warning.message)
    assert warning.filename.endswith(("test_roles.py", "python.py"))  # the line of the caller's caller
    roles = assign_roles(found, NEW, NEW)
    assert roles["a.kv"] == Role("colwise", "kv")


@pytest.mark.parametrize("word", ["lm_head:tie=token", "colwise:kv:tie=token", "norm:x"])
def test_a_form_that_no_layer_reads_is_refused_with_legal_ones(word: str) -> None:
    with pytest.raises(ValueError, match=rf"plan\['head'\] = '{word}': .* has no form") as caught:
        Role.parse(word, "head")
    for legal in str(caught.value).partition("legal: ")[2].partition(", or")[0].split(", "):
        assert Role.parse(legal).name == word.split(":")[0]


@pytest.mark.parametrize(("old", "new"), RENAMED_ROLES.items())
def test_each_old_role_alone_is_translated(old: str, new: str) -> None:
    assert new in ROLES and old not in ROLES
    with pytest.warns(UserWarning, match=f"{old!r} is now {new!r}"):
        assert with_new_names({"x": old, "y": "norm"}) == {"x": new, "y": "norm"}


def test_a_plan_of_new_roles_is_left_alone() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert with_new_names(NEW) == NEW


@pytest.mark.parametrize("new", RENAMED_ROLES.values())
@pytest.mark.parametrize("old", ["first:qkv", "second"])
def test_an_old_role_beside_a_new_one_is_refused(old: str, new: str) -> None:
    with pytest.raises(ValueError, match="new names alone") as caught:
        with_new_names({"x": old, "y": new, "z": "norm"})
    assert f"'x': {old!r}" in str(caught.value)


def test_patterns_are_found_as_one_by_one() -> None:
    patterns = [
        "a.*.up", "a.0.up", "**.up", "a.*", "*.0.up", "a.[01].up", "b", "a.**", "a.?.u*", "**", "a.0.[", "a.x*.up",
    ]  # fmt: skip
    names = ["a", "b", "a.0", "a.0.up", "a.1.up", "a.2.up", "b.0.up", "a.0.[", "a.x*.up", "a.0.up.c"]
    fitting = Patterns(patterns)
    for name in names:
        assert fitting.of(name) == [pattern for pattern in patterns if match_name(pattern, name)], name
