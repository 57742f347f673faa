"""JSON Schema as a grammar of llguidance, and the path of what a schema may not use. Pure.

llguidance refuses the keywords that it does not implement. Its message names them without their place, so
`find_unsupported` looks for it.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from libs.structured.schema.distinct_keys import count_distinct_keys
from libs.structured.schema.endless_schemas import without_endless
from libs.structured.schema.exact_schema import exact_schema, has_no_effect
from libs.structured.schema.key_count import PLAIN_ESCAPES
from libs.structured.schema.open_keys import forbids_unicode_escapes, needs_codes
from libs.structured.schema.schema_walk import Json, path_text, walk

# White space between two parts of JSON: enough for indented text, and never an endless run.
WHITESPACE = r"[\x20\x0A\x0D\x09]{1,40}"

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


class JsonGrammar(NamedTuple):
    """The grammar of the texts that are valid under a schema."""

    json_schema: Json  # as llguidance has to see it
    n_distinct: int  # keys that an object has to have that repeats one; 0: none


def json_grammar(schema: Json | bool) -> JsonGrammar:
    """The grammar of a schema, for one of llguidance's `grammars`."""
    parts = list(walk(schema))
    pruned = without_endless(schema, parts)
    if pruned is not schema:
        schema, parts = pruned, list(walk(pruned))
    if isinstance(schema, bool):
        schema = {} if schema else {"enum": []}
    options: dict[str, Any] = {"whitespace_pattern": WHITESPACE}
    n_distinct = count_distinct_keys(parts)
    if n_distinct or forbids_unicode_escapes(parts):
        options["json_allowed_escapes"] = PLAIN_ESCAPES
    made = exact_schema(schema, spells_keys=needs_codes(parts))
    return JsonGrammar({**made, "x-guidance": options}, n_distinct)


def find_unsupported(schema: Json | bool) -> tuple[str, str] | None:
    """The path of the first keyword, format or reference that no grammar can hold, and why; None without."""
    for path, part in walk(schema):
        for name, value in part.items():
            if name in UNSUPPORTED and not has_no_effect(name, value):
                return path_text(path, name), "is not supported"
            if name == "format" and value not in FORMATS and _may_be_text(part):
                return path_text(path, name), f"must be one of {', '.join(sorted(FORMATS))}"
            if name == "$ref" and isinstance(value, str) and "://" in value:
                return path_text(path, name), "must refer to a place in the same schema"
    return None


def _may_be_text(part: Json) -> bool:
    kind = part.get("type", "string")
    return kind == "string" or (isinstance(kind, list) and "string" in kind)
