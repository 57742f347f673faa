"""Typed reading of JSON objects with the path of what is wrong. Pure.

    given = typed(body, {"name": TEXT, "seed": INTEGER})
    given.get("seed")  # an int, or None where it is left out or null

A request has few of the many fields it may have. Those it has are judged in one go, by a table; after that
their values are looked up as in any dict.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from slipstream import bounds
from slipstream.bound import shown_name

_LONE_SURROGATE = re.compile("[\ud800-\udfff]")

Json = Mapping[str, Any]


@dataclass(frozen=True)
class Kind:
    """What a field may hold besides null, by the types that JSON is parsed into."""

    words: str
    types: frozenset[type]


def _kind(words: str, *types: type) -> Kind:
    return Kind(words, frozenset((*types, type(None))))


TEXT = _kind("a string", str)
BOOLEAN = _kind("true or false", bool)
NUMBER = _kind("a number", int, float)  # NaN and Infinity, which Python's JSON reads, are left to the bounds
INTEGER = _kind("a number", int)  # 2.0 counts as 2
ARRAY = _kind("a list", list)
OBJECT = _kind("an object", dict)
ANY = _kind("", str, bool, int, float, list, dict)  # judged by who reads it

Shape = Mapping[str, Kind]
NoEffect = Mapping[str, tuple[object, ...]]


def typed(given: object, shape: Shape, *, no_effect: NoEffect | None = None, path: str = "") -> Json:
    """`given` as an object of no fields but those of `shape`, each of its kind. Raises InvalidArgument.

    `no_effect` names more fields, allowed only with one of the given values or null because they ask for
    something that is not supported.
    """
    if not isinstance(given, dict):
        raise bounds.TYPE.refused(path, expected="an object")
    others: list[str] = []
    for name, item in given.items():
        kind = shape.get(name)
        if kind is None:
            _check_no_effect(name, item, no_effect or {}, path)
        elif type(item) not in kind.types:
            others.append(name)
    if not others:
        return given
    return {**given, **{name: _whole(given[name], shape[name], path_of(path, name)) for name in others}}


def nested(given: Json, name: str, shape: Shape, *, path: str = "") -> Json | None:
    """The object in a field, if there is one; see `typed`."""
    item = given.get(name)
    return None if item is None else typed(item, shape, path=f"{path}.{name}" if path else name)


def check_kind(item: object, kind: Kind, path: str) -> None:
    """Raises InvalidArgument for what is neither null nor of a kind without conversions."""
    if type(item) not in kind.types:
        raise bounds.TYPE.refused(path, expected=kind.words)


def path_of(path: str, name: str) -> str:
    """The path of a field of the object at `path`; a name that is no identifier is shortened."""
    safe = shown_name(name)
    return f"{path}.{safe}" if path else safe


def _check_no_effect(name: str, item: object, no_effect: NoEffect, path: str) -> None:
    if name not in no_effect:
        raise bounds.UNKNOWN_FIELD.refused(path_of(path, name))
    if item is not None and item not in no_effect[name]:
        raise bounds.UNSUPPORTED.refused(path_of(path, name))


def _whole(item: object, kind: Kind, path: str) -> int:
    """A whole number that was written as a fraction. Anything else is refused."""
    if kind is not INTEGER or not isinstance(item, float):
        raise bounds.TYPE.refused(path, expected=kind.words)
    if not (math.isfinite(item) and item.is_integer()):
        raise bounds.TYPE.refused(path, expected="a whole number")
    return int(item)


def find_surrogate(value: object, path: str = "") -> str | None:
    """Path of the first string with a lone surrogate, which no UTF-8 can hold; None: all is well."""
    if isinstance(value, str):
        # isascii is a flag of the string: most text costs nothing here.
        return path if not value.isascii() and _LONE_SURROGATE.search(value) else None
    children: Iterable[tuple[str, object]] = ()
    if isinstance(value, dict):
        for key in value:
            if find_surrogate(key) is not None:
                return path
        children = ((f"{path}.{key}" if path else str(key), item) for key, item in value.items())
    elif isinstance(value, list):
        children = ((f"{path}[{index}]", item) for index, item in enumerate(value))
    for where, item in children:
        found = find_surrogate(item, where)
        if found is not None:
            return found
    return None
