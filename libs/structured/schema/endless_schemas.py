"""Schemas without any finite value: a recursion that cannot end would go on until `max_tokens`. Pure.

No JSON text is valid under such a part, so `false` says the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from libs.structured.schema.schema_walk import Json, Parts, resolve


def without_endless(schema: Json | bool, parts: Parts) -> Any:
    """A copy of the schema with false for each part that has no finite value."""
    endless = find_endless(schema, parts)
    return _pruned(schema, endless) if endless else schema


def _pruned(value: Any, endless: frozenset[int]) -> Any:
    if isinstance(value, Mapping):
        return id(value) not in endless and {key: _pruned(item, endless) for key, item in value.items()}
    return [_pruned(item, endless) for item in value] if isinstance(value, list) else value


def find_endless(schema: Json | bool, parts: Parts) -> frozenset[int]:
    """The identities of the parts without a finite value.

    The finite ones are found from the leaves up, so a part that needs itself is never among them.
    Contradictions between keywords are not looked for.
    """
    needs = _Needs(schema, parts)
    needs.settle()
    return frozenset(identity for identity, need in needs.of_part.items() if need.n_missing > 0)


@dataclass(slots=True, eq=False)
class _Need:
    """A need that is met when `n_missing` of the needs that it waits for are met."""

    n_missing: int = 0
    waiting: list[_Need] = field(default_factory=list)  # those that wait for this one


class _Needs:
    """What each part needs for a finite value, as a graph with an edge for each keyword's item.

    Each edge is followed once, so the work is linear in the size of the schema.
    """

    def __init__(self, root: Json | bool, parts: Parts) -> None:
        self.of_part = {id(part): _Need() for _, part in parts}
        self._root = root
        self._met = _Need()
        self._never = _Need(1)
        self._all = [self._met, *self.of_part.values()]
        for _, part in parts:
            self._wait_for_all(self.of_part[id(part)], self._of_keywords(part))

    def settle(self) -> None:
        """Meet all needs that can be met, from the leaves up."""
        met = [need for need in self._all if need.n_missing == 0]
        for need in met:  # grows meanwhile
            for waiting in need.waiting:
                waiting.n_missing -= 1
                if waiting.n_missing == 0:
                    met.append(waiting)

    def _of_keywords(self, part: Json) -> Iterator[_Need]:
        reference = part.get("$ref")
        if isinstance(reference, str) and reference.startswith("#"):
            yield self._of(resolve(self._root, reference))
        yield from map(self._of, _listed(part, "allOf"))
        for name in ("anyOf", "oneOf"):
            if options := _listed(part, name):
                yield self._any(map(self._of, options))
        if "enum" in part or "const" in part:
            return
        kinds = part.get("type", "string")
        tests: Mapping[Any, Callable[[Json], Iterator[Any]]] = {
            "object": _object_items,
            "array": _array_items,
        }
        yield self._any(
            self._all_of(map(self._of, tests[kind](part))) if kind in ("object", "array") else self._met
            for kind in (kinds if isinstance(kinds, list) else [kinds])
        )

    def _of(self, part: object) -> _Need:
        return self.of_part.get(id(part), self._never) if isinstance(part, Mapping) else self._met

    def _any(self, options: Iterable[_Need]) -> _Need:
        need = _Need(1)
        self._all.append(need)
        for option in options:
            option.waiting.append(need)
        return need

    def _all_of(self, items: Iterable[_Need]) -> _Need:
        need = _Need()
        self._all.append(need)
        self._wait_for_all(need, items)
        return need

    @staticmethod
    def _wait_for_all(need: _Need, items: Iterable[_Need]) -> None:
        for item in items:
            item.waiting.append(need)
            need.n_missing += 1


def _object_items(part: Json) -> Iterator[Any]:
    """What an object has to hold."""
    properties = part.get("properties")
    declared = properties if isinstance(properties, Mapping) else {}
    yield from (declared.get(name) for name in _listed(part, "required") if isinstance(name, str))


def _array_items(part: Json) -> Iterator[Any]:
    """What an array has to hold."""
    least = part.get("minItems", 0)
    least = least if isinstance(least, int) else 0
    first = _listed(part, "prefixItems") or _listed(part, "items")
    yield from first[:least]
    if least > len(first):
        yield part.get("items" if isinstance(part.get("items"), Mapping) else "additionalItems")


def _listed(part: Json, name: str) -> list[Any]:
    value = part.get(name)
    return value if isinstance(value, list) else []
