"""Undeclared keys: which objects have some, how a pattern spells them, what JSON spells by codes alone."""

from __future__ import annotations

import copy
import json
import re
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from libs.structured.schema.open_keys import (
    can_spell_keys,
    find_control_character,
    forbids_unicode_escapes,
    needs_codes,
    values,
    with_spelled_keys,
)
from libs.structured.schema.schema_walk import Parts, Path

REST = {"type": "integer"}
LONGEST = 100  # characters of a name in a pattern


def parts_of(*schemas: Any) -> Parts:
    return [(Path(None, (f"p{n}",)), schema) for n, schema in enumerate(schemas)]


def is_control(char: str) -> bool:
    return ord(char) < 0x20 or char == "\x7f"


def key_pattern(part: Any) -> tuple[re.Pattern[str], Any]:
    """The pattern of the undeclared keys in Python's syntax, and the schema of their values."""
    ((pattern, schema),) = with_spelled_keys(part)["patternProperties"].items()
    assert pattern[0] == "^" and pattern[-1] == "$"
    python = re.sub(r"\\x\{([0-9A-F]+)\}", lambda code: f"\\U{int(code[1], 16):08X}", pattern[1:-1])
    return re.compile(python, re.DOTALL), schema


# ---- patterns

_names = st.lists(st.text(st.sampled_from('ab.*"\\]^-é🎉\n\x7f'), max_size=4), min_size=1, max_size=6)


@given(names=_names, texts=st.lists(st.text(max_size=5), max_size=4))
@example(names=["", "a", "ab", "abc"], texts=["b", "ac", "abd", "abcd", "X", "aX", "abX", "aXX"])
@example(names=["a", "b"], texts=["X", "aX"])
@example(names=["a\nb", "a"], texts=["a\nb", "\x7f", "\x1f", " ", "~", "\x80"])
def test_the_pattern_matches_all_texts_but_control_characters_and_declared_names(
    names: list[str], texts: list[str]
) -> None:
    part = {"properties": {name: {} for name in names}, "additionalProperties": REST}
    pattern, schema = key_pattern(part)
    assert schema == REST
    near = [
        text for name in names for text in (name, name[:-1], name + "a", name + ".", name[1:], "a" + name)
    ]
    for text in ["", *near, *texts]:
        is_other = text not in names and not any(map(is_control, text))
        assert (pattern.fullmatch(text) is not None) == is_other, (pattern, text)


@pytest.mark.parametrize("stated", [{}, {"additionalProperties": True}])
def test_keys_of_any_value_are_any_text(stated: dict[str, Any]) -> None:
    """Declared names among them: their schemas come first, and any value is one of `True`."""
    pattern, schema = key_pattern({"properties": {"a": {}}, **stated})
    assert schema is True
    assert all(pattern.fullmatch(text) for text in ("", "a", "b", "X", "é🎉", "\x80"))
    assert not any(pattern.fullmatch(text) for text in ("\n", "a\x00", "\x1f", "\x7f"))


@pytest.mark.parametrize(
    "part",
    [
        {"properties": {"a": {}, "b": {}}, "additionalProperties": REST, "title": "t"},
        {"required": ["a"]},
        {"properties": {"a" * LONGEST: {}}},
    ],
)
def test_a_spelled_object_has_its_pattern_instead_of_other_keys(part: dict[str, Any]) -> None:
    before = copy.deepcopy(part)
    made = with_spelled_keys(part)
    assert part == before
    assert made.pop("additionalProperties") is False and len(made.pop("patternProperties")) == 1
    assert made == {name: value for name, value in before.items() if name != "additionalProperties"}
    assert can_spell_keys(parts_of(part))


OPEN = [
    {"properties": {"a": {}}},
    {"required": ["a"]},
    {"patternProperties": {"^x": {}}},
    {"properties": {"a": {}}, "additionalProperties": True},
    {"properties": {"a": {}}, "additionalProperties": REST},
]
CLOSED: list[dict[str, Any]] = [
    {},
    {"type": "string"},
    {"properties": {}, "required": [], "patternProperties": {}},
    {"additionalProperties": REST},
    {"properties": {"a": {}}, "additionalProperties": False},
    {"required": ["a"], "additionalProperties": False},
    {"properties": {"a" * (LONGEST + 1): {}}, "additionalProperties": False},
    {"patternProperties": {"^x": {}}, "additionalProperties": False},
]
UNSPELLED = [
    {"patternProperties": {"^x": {}}},
    {"properties": {"a": {}}, "patternProperties": {"^x": {}}, "additionalProperties": REST},
    {"properties": {"a": {}, "b" * (LONGEST + 1): {}}},
]


@pytest.mark.parametrize("part", [*CLOSED, *UNSPELLED])
def test_other_objects_stay_as_they_are(part: dict[str, Any]) -> None:
    made = with_spelled_keys(part)
    assert made == part and made is not part


def test_keys_can_be_spelled_where_each_open_object_allows_it() -> None:
    assert can_spell_keys([])
    assert can_spell_keys(parts_of(*CLOSED, OPEN[0], OPEN[1]))
    for part in UNSPELLED:
        assert not can_spell_keys(parts_of(part))
        assert not can_spell_keys(parts_of(OPEN[0], part, CLOSED[0]))


# ---- characters that JSON spells by their codes


@given(st.characters())
@example("\x7f")
@example("\x1f")
@example(" ")
def test_a_constant_needs_codes_for_characters_without_another_spelling(char: str) -> None:
    by_code = is_control(char) and (char == "\x7f" or "\\u00" in json.dumps(char))
    assert needs_codes(parts_of({"const": f"a{char}b"})) == by_code


def test_all_short_escapes_need_no_code() -> None:
    assert not needs_codes(parts_of({"enum": list('\b\t\n\f\r"\\/ ~\x80')}))
    spelled = "".join(chr(code) for code in range(0x80) if needs_codes(parts_of({"const": chr(code)})))
    assert spelled == "".join(map(chr, [*range(8), 0x0B, *range(0x0E, 0x20), 0x7F]))


@pytest.mark.parametrize(
    ("part", "path"),
    [
        ({"const": "\x01"}, "p1.const"),
        ({"enum": [1, None, "a", "\x01"]}, "p1.enum"),
        ({"const": {"a": [{"\x01": 1}]}}, "p1.const"),
        ({"const": {"a": [{"b": "\x01"}]}}, "p1.const"),
        ({"default": "\x01", "title": "\x01", "properties": {"\x01": {}}}, None),
        ({"const": {"a": [1, "b", True]}, "enum": []}, None),
        ({"enum": None, "const": None}, None),
    ],
)
def test_the_first_constant_with_such_a_character_is_named(part: dict[str, Any], path: str | None) -> None:
    assert find_control_character(parts_of({}, part, {"type": "string"})) == path
    assert needs_codes(parts_of(part)) == (path is not None)
    last = {"const": "\x02"}
    assert find_control_character(parts_of({}, part, last)) == (path or "p2.const")


@pytest.mark.parametrize("part", [*OPEN, *CLOSED])
def test_escapes_are_forbidden_where_an_object_is_open_and_no_constant_needs_one(
    part: dict[str, Any],
) -> None:
    is_open = part in OPEN
    assert forbids_unicode_escapes(parts_of(part)) == is_open
    assert forbids_unicode_escapes(parts_of(CLOSED[0], part, CLOSED[1])) == is_open
    assert not forbids_unicode_escapes(parts_of(part, {"const": "\x01"}))


_json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=12,
)


@given(_json)
def test_values_are_all_leaves_and_keys(value: Any) -> None:
    def leaves(item: Any) -> list[Any]:
        if isinstance(item, dict):
            return [*item, *[leaf for each in item.values() for leaf in leaves(each)]]
        return [leaf for each in item for leaf in leaves(each)] if isinstance(item, list) else [item]

    assert sorted(map(repr, values(value))) == sorted(map(repr, leaves(value)))
