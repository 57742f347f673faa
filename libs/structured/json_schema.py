"""JSON Schema as a grammar of llguidance, and the path of what a schema may not use. Pure.

llguidance refuses the keywords that it does not implement. Its message names them without their place, so
`find_unsupported` looks for it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from libs.structured.exact_schema import exact_schema

Json = Mapping[str, Any]

# White space between two parts of JSON: enough for indented text, and never an endless run.
WHITESPACE = r"[\x20\x0A\x0D\x09]{1,40}"
# Without \u: a key that is not declared could spell a declared one with it.
_PLAIN_ESCAPES = 'nrbtf\\"'

UNSUPPORTED = frozenset(
    {
        "$dynamicAnchor",
        "$dynamicRef",
        "$recursiveAnchor",
        "$recursiveRef",
        "contains",
        "dependencies",
        "dependentRequired",
        "dependentSchemas",
        "else",
        "if",
        "maxContains",
        "minContains",
        "not",
        "propertyNames",
        "then",
        "unevaluatedItems",
        "unevaluatedProperties",
        "uniqueItems",
    }
)
FORMATS = frozenset(
    ("date", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "time", "uri", "uuid")
)
_MAPS = ("properties", "patternProperties")
_LISTS = ("allOf", "anyOf", "oneOf", "prefixItems")
_SINGLE = ("additionalItems", "additionalProperties", "items")


def json_grammar(schema: Json | bool) -> Json:
    """The grammar of the texts that are valid under the schema, as one of llguidance's `grammars`."""
    if isinstance(schema, bool):
        schema = {} if schema else {"enum": []}
    options: dict[str, Any] = {"whitespace_pattern": WHITESPACE}
    if forbids_unicode_escapes(schema):
        options["json_allowed_escapes"] = _PLAIN_ESCAPES
    return {"json_schema": {**exact_schema(schema), "x-guidance": options}}


def forbids_unicode_escapes(schema: Json | bool) -> bool:
    """Whether a key could spell a declared one by escapes, or one that a pattern decides about."""
    return any(_is_open(part) for _, part in walk(schema))


def find_unsupported(schema: Json | bool) -> tuple[str, str] | None:
    """The path of the first keyword, format or reference that no grammar can hold, and why; None without."""
    for path, part in walk(schema):
        for name, value in part.items():
            where = f"{path}.{name}" if path else name
            if name in UNSUPPORTED:
                return where, "is not supported"
            if name == "format" and value not in FORMATS and _may_be_text(part):
                return where, f"must be one of {', '.join(sorted(FORMATS))}"
            if name == "$ref" and isinstance(value, str) and "://" in value:
                return where, "must refer to a place in the same schema"
    return None


def is_shallow(schema: object, most: int) -> bool:
    """Whether the JSON value has at most so many levels."""
    level: list[object] = [schema]
    for _ in range(most):
        deeper: list[object] = []
        for item in level:
            if isinstance(item, Mapping):
                deeper.extend(item.values())
            elif isinstance(item, list):
                deeper.extend(item)
        if not deeper:
            return True
        level = deeper
    return False


def walk(schema: Json | bool) -> Iterator[tuple[str, Json]]:
    """All schemas that are reachable from this one, with their paths. Definitions count once referenced."""
    stack: list[tuple[str, object]] = [("", schema)]
    seen: set[int] = set()
    root = schema
    while stack:
        path, part = stack.pop()
        if not isinstance(part, Mapping) or id(part) in seen:
            continue
        seen.add(id(part))
        yield path, part
        stack += reversed(list(_below(path, part, root)))


def _below(path: str, part: Json, root: object) -> Iterator[tuple[str, object]]:
    start = f"{path}." if path else ""
    for name in _MAPS:
        if isinstance(part.get(name), Mapping):
            yield from ((f"{start}{name}.{key}", value) for key, value in part[name].items())
    for name in (*_LISTS, *_SINGLE):
        value = part.get(name)
        if isinstance(value, list):
            yield from ((f"{start}{name}[{index}]", item) for index, item in enumerate(value))
        elif name in _SINGLE:
            yield f"{start}{name}", value
    reference = part.get("$ref")
    if isinstance(reference, str) and reference.startswith("#/"):
        yield reference[2:].replace("/", "."), resolve(root, reference)


def resolve(root: object, reference: str) -> object:
    """What a local pointer such as `#/$defs/node` names; None for nothing."""
    found = root
    if reference == "#":
        return root
    for step in reference[2:].split("/"):
        step = step.replace("~1", "/").replace("~0", "~")
        if isinstance(found, Mapping):
            found = found.get(step)
        elif isinstance(found, list) and step.isdecimal() and int(step) < len(found):
            found = found[int(step)]
        else:
            return None
    return found


def _is_open(part: Json) -> bool:
    """Whether the object may have keys beside those that it declares, or some for which a pattern decides."""
    is_declared = bool(part.get("properties") or part.get("required"))
    return bool(part.get("patternProperties")) or (
        is_declared and part.get("additionalProperties") is not False
    )


def _may_be_text(part: Json) -> bool:
    kind = part.get("type", "string")
    return kind == "string" or (isinstance(kind, list) and "string" in kind)
