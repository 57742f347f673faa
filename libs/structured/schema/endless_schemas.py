"""Schemas without any finite value: a recursion that cannot end would go on until `max_tokens`. Pure.

No JSON text is valid under such a part, so `false` says the same.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from libs.structured.schema.schema_walk import Json, Parts, resolve

_Ends = Callable[[object], bool]


def without_endless(schema: Json | bool, parts: Parts) -> Any:
    """The same schema, with false for each part that has no finite value."""
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
    finite: set[int] = set()

    def ends(part: object) -> bool:
        return not isinstance(part, Mapping) or id(part) in finite

    waiting = [part for _, part in reversed(parts)]
    while True:
        left = []
        for part in waiting:
            if _has_value(part, schema, ends):
                finite.add(id(part))
            else:
                left.append(part)
        if len(left) == len(waiting):
            break
        waiting = left
    return frozenset(map(id, waiting))


def _has_value(part: Json, root: object, ends: _Ends) -> bool:
    reference = part.get("$ref")
    if isinstance(reference, str) and reference.startswith("#") and not ends(resolve(root, reference)):
        return False
    if not all(ends(item) for item in _listed(part, "allOf")):
        return False
    for name in ("anyOf", "oneOf"):
        options = _listed(part, name)
        if options and not any(ends(item) for item in options):
            return False
    if "enum" in part or "const" in part:
        return True
    kinds = part.get("type", "string")
    kinds = kinds if isinstance(kinds, list) else [kinds]
    tests: Mapping[Any, Callable[[Json, _Ends], bool]] = {"object": _object_ends, "array": _array_ends}
    return any(kind not in ("object", "array") or tests[kind](part, ends) for kind in kinds)


def _object_ends(part: Json, ends: _Ends) -> bool:
    properties = part.get("properties")
    declared = properties if isinstance(properties, Mapping) else {}
    return all(ends(declared.get(name)) for name in _listed(part, "required") if isinstance(name, str))


def _array_ends(part: Json, ends: _Ends) -> bool:
    least = part.get("minItems", 0)
    least = least if isinstance(least, int) else 0
    first = _listed(part, "prefixItems") or _listed(part, "items")
    rest = part.get("items" if isinstance(part.get("items"), Mapping) else "additionalItems")
    return all(ends(item) for item in first[:least]) and (least <= len(first) or ends(rest))


def _listed(part: Json, name: str) -> list[Any]:
    value = part.get(name)
    return value if isinstance(value, list) else []
