"""The parts of a JSON schema, with their paths. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any
from urllib.parse import unquote

from libs.text.json_structure import value_levels
from slipstream.bound import shown_name

Json = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Path:
    """The place of a part: its steps from the part above. `path_text` writes it out where a part is refused.

    The walk writes no path: a name may be as long as the schema, and each path below would copy it.
    """

    above: Path | None = None
    steps: tuple[str | int, ...] = ()


# Parts of a schema with their paths, as `walk` finds them.
Parts = Sequence[tuple[Path, Json]]

_MAPS = ("properties", "patternProperties")
_LISTS = ("allOf", "anyOf", "oneOf", "prefixItems")
_DEFINITIONS = ("$defs", "definitions")
_SINGLE = ("additionalItems", "additionalProperties", "items")


def is_shallow(schema: object, most: int) -> bool:
    """Whether the JSON value has at most `most` levels."""
    return next(islice(value_levels(schema), most, None), None) is None


def path_text(path: Path, keyword: str = "") -> str:
    """The path of a part, or of a keyword of it, as an error names it: long names are cut."""
    steps: list[str | int] = [keyword] if keyword else []
    above: Path | None = path
    while above is not None:
        steps += reversed(above.steps)
        above = above.above
    text = "".join(
        f"[{step}]" if isinstance(step, int) else f".{shown_name(step)}" for step in reversed(steps)
    )
    return text.removeprefix(".")


def walk(schema: Json | bool) -> Iterator[tuple[Path, Json]]:
    """All schemas that are reachable from this one, with their paths. Definitions count once referenced."""
    stack: list[tuple[Path, object]] = [(Path(), schema)]
    seen: set[int] = set()
    root = schema
    is_expanded = False
    while stack:
        path, part = stack.pop()
        if not isinstance(part, Mapping) or id(part) in seen:
            continue
        seen.add(id(part))
        yield path, part
        below = list(_below(path, part, root))
        if not is_expanded and _refers_by_name(part):
            # Once for all such references: a schema may have as many of them as definitions.
            is_expanded = True
            below += _definitions(root)
        stack += reversed(below)


def _below(path: Path, part: Json, root: object) -> Iterator[tuple[Path, object]]:
    for name in _MAPS:
        if isinstance(part.get(name), Mapping):
            yield from ((Path(path, (name, key)), value) for key, value in part[name].items())
    for name in (*_LISTS, *_SINGLE):
        value = part.get(name)
        if isinstance(value, list):
            yield from ((Path(path, (name, index)), item) for index, item in enumerate(value))
        elif name in _SINGLE:
            yield Path(path, (name,)), value
    reference = part.get("$ref")
    if isinstance(reference, str) and reference.startswith("#/"):
        yield Path(None, tuple(reference[2:].split("/"))), resolve(root, reference)


def _refers_by_name(part: Json) -> bool:
    """Whether the part refers to an anchor or an id, which any definition may have."""
    reference = part.get("$ref")
    return isinstance(reference, str) and reference != "#" and not reference.startswith("#/")


def _definitions(root: object) -> Iterator[tuple[Path, object]]:
    for name in _DEFINITIONS:
        if isinstance(root, Mapping) and isinstance(root.get(name), Mapping):
            yield from ((Path(None, (name, key)), value) for key, value in root[name].items())


def resolve(root: object, reference: str) -> object:
    """What a local pointer such as `#/$defs/node` names; None for nothing."""
    found = root
    if reference == "#":
        return root
    for step in reference[2:].split("/"):
        step = unquote(step).replace("~1", "/").replace("~0", "~")
        if isinstance(found, Mapping):
            found = found.get(step)
        elif isinstance(found, list) and step.isdecimal() and int(step) < len(found):
            found = found[int(step)]
        else:
            return None
    return found
