"""Unions that would make masks slow: many alternatives at one place, and again inside of them. Pure.

A parser follows all alternatives that fit so far. Where many arrays or objects of a union begin alike, and
hold the same union again, each closing bracket ends all of them. A mask takes seconds then.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any

from libs.structured.schema.schema_walk import Json, Parts, Path, path_text, resolve

# No union of MaskBench's 11,305 schemas has more than 238 arrays and objects, and one below another 39.
MAX_ALTERNATIVES = 256
MAX_NESTED_ALTERNATIVES = 64
_UNIONS = ("anyOf", "oneOf")
_SCALARS = frozenset({"string", "number", "integer", "boolean", "null"})
_MANY = 1_000_000


def find_large_union(schema: Json | bool, parts: Parts) -> tuple[str, str] | None:
    """The path of the first such union, and why it is refused; None without one."""
    unions = _Unions(schema, parts)
    large = [(path, part, n) for path, part in parts if (n := unions.count(part)) > MAX_NESTED_ALTERNATIVES]
    for path, part, n in large:
        if n > MAX_ALTERNATIVES:
            return _place(path, part), f"has {n} arrays and objects at one place: at most {MAX_ALTERNATIVES}"
    above = unions.parts_above([part for _, part, _ in large])
    for path, part, n in large:
        if any(id(held) in above for held in unions.held_by(part)):
            most = MAX_NESTED_ALTERNATIVES
            return _place(
                path, part
            ), f"has {n} arrays and objects that hold another union of more than {most}"
    return None


def _place(path: Path, part: Json) -> str:
    keywords = (*_UNIONS, "patternProperties")
    return path_text(path, next((name for name in keywords if name in part), ""))


class _Unions:
    """How many arrays and objects are possible at each place of a schema, and what they hold."""

    def __init__(self, root: Json | bool, parts: Parts) -> None:
        self._root = root
        self._parts = parts
        self._counts: dict[int, int] = {}

    def count(self, part: Any) -> int:
        """The alternatives at the part's own place, or at that of its keys by pattern."""
        if not isinstance(part, Mapping):
            return int(part is True)
        known = self._counts.get(id(part))
        if known is None:
            self._counts[id(part)] = 0  # for a part that refers to itself
            factors = [sum(map(self.count, options)) for options in self._options(part)]
            n = math.prod(factors) if factors else int(_is_structured(part))
            patterns = part.get("patternProperties")
            n_values = sum(map(self.count, patterns.values())) if isinstance(patterns, Mapping) else 0
            known = self._counts[id(part)] = min(max(n, n_values), _MANY)
        return known

    def parts_above(self, parts: list[Json]) -> set[int]:
        """The identities of these parts, and of all from which one of them is reached."""
        above = defaultdict(list)
        for _, part in self._parts:
            for below in (*self._alike(part), *_held(part)):
                above[id(below)].append(id(part))
        found, stack = set[int](), [id(part) for part in parts]
        while stack:
            identity = stack.pop()
            if identity not in found:
                found.add(identity)
                stack += above[identity]
        return found

    def held_by(self, part: Json) -> Iterator[Any]:
        """The members of all alternatives at the part's place."""
        seen, stack = set[int](), [part]
        while stack:
            alike = stack.pop()
            if isinstance(alike, Mapping) and id(alike) not in seen:
                seen.add(id(alike))
                yield from _held(alike)
                stack += self._alike(alike)

    def _alike(self, part: Json) -> Iterator[Any]:
        """The parts at the same place."""
        for options in self._options(part):
            yield from options

    def _options(self, part: Json) -> Iterator[list[Any]]:
        """Lists of parts of which one holds: for each keyword that has them."""
        for name in _UNIONS:
            if isinstance(part.get(name), list):
                yield part[name]
        if isinstance(part.get("allOf"), list):
            yield from ([item] for item in part["allOf"])
        reference = part.get("$ref")
        if isinstance(reference, str) and reference.startswith("#"):
            yield [resolve(self._root, reference)]


def _is_structured(part: Json) -> bool:
    """Whether a value may be an array or an object."""
    if "const" in part or "enum" in part:
        return False
    kinds = part.get("type", "object")
    return not _SCALARS.issuperset(
        [kind for kind in (kinds if isinstance(kinds, list) else [kinds]) if isinstance(kind, str)]
    )


def _held(part: Json) -> Iterator[Any]:
    """The parts of the values inside."""
    for name in ("properties", "patternProperties"):
        if isinstance(part.get(name), Mapping):
            yield from part[name].values()
    for name in ("prefixItems", "items", "additionalItems", "additionalProperties"):
        value = part.get(name)
        yield from value if isinstance(value, list) else [value]
