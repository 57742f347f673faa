"""Tool definitions as the TypeScript declarations that Kimi K2.5 was trained to read.

Source of the format: the `tools_ts_str` of K2.5's tokenizer (moonshotai/Kimi-K2.5, tool_declaration_ts.py).
Required parameters come first, then optional ones, each sorted by name. Integers become numbers; descriptions
and bounds become comments. Pure.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from libs.text.digest_cache import DigestCache, digest_of

Schema = Mapping[str, Any]

_INDENT = "  "
_BOUNDS: Mapping[str, tuple[str, ...]] = {
    "string": ("maxLength", "minLength", "pattern"),
    "number": ("maximum", "minimum"),
    "integer": ("maximum", "minimum"),
    "array": ("maxItems", "minItems"),
}
_UNION_NAMES = {
    "string": "string",
    "number": "number",
    "integer": "number",
    "boolean": "boolean",
    "null": "null",
    "object": "{}",
    "array": "Array<any>",
}
_ENUM_KINDS: Mapping[str, type | tuple[type, ...]] = {
    "string": str,
    "number": (int, float),
    "integer": int,
    "boolean": bool,
}

_ENTRY_BYTES = 300  # objects around a text
_texts: DigestCache[str] = DigestCache(max_bytes=16 << 20)


class UnsupportedSchema(ValueError):
    """The schema has no TypeScript form; the template then declares the tools as JSON."""


def tools_text(tools: Sequence[Mapping[str, Any]]) -> str:
    """The text of the `tool_declare` message: TypeScript, or compact JSON for unsupported schemas.

    Keys are sorted at every depth, so that equal tools give equal text.
    """
    digest = digest_of(tools)
    text = _texts.get(digest)
    if text is None:
        text = _written(tools)
        _texts.keep(digest, text, n_bytes=_ENTRY_BYTES + sys.getsizeof(text))
    return text


def cached_tools_text(tools: Sequence[Mapping[str, Any]]) -> str | None:
    """The result of `tools_text`, if a recent call made it; None: making it takes up to 0.2 s."""
    return _texts.get(digest_of(tools))


def _written(tools: Sequence[Mapping[str, Any]]) -> str:
    ordered = _sorted(list(tools))
    try:
        text = typescript_tools(ordered)
    except UnsupportedSchema:
        text = ""
    return text or json.dumps(ordered, ensure_ascii=False, separators=(",", ":"))


def typescript_tools(tools: Sequence[Mapping[str, Any]]) -> str:
    """TypeScript of the tools of type function; "" if there is none. Raises UnsupportedSchema."""
    functions = [
        tool["function"] for tool in tools if tool.get("type") == "function" and tool.get("function")
    ]
    if not functions:
        return ""
    body = "\n".join(_Declaration(function).text() for function in functions)
    return f"# Tools\n\n## functions\nnamespace functions {{\n{body}\n}}\n"


def _sorted(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _sorted(value[key]) for key in sorted(value)}
    if isinstance(value, (list, tuple)):
        return [_sorted(item) for item in value]
    return value


def _comment(text: str, indent: str) -> str:
    return "\n".join(f"{indent}// {line}" if line else "" for line in text.split("\n"))


class _Declaration:
    """One function. `$defs` become interfaces; `#` refers to the parameters themselves."""

    def __init__(self, function: Mapping[str, Any]) -> None:
        self._function = function
        self._definitions: dict[str, Any] = {}
        self._refers_to_itself = False

    def text(self) -> str:
        name = self._function.get("name", "function")
        if isinstance(self._function.get("parameters"), bool):
            raise UnsupportedSchema("the parameters are no object")
        parameters: Schema = self._function.get("parameters") or {}
        root = self._object(parameters, "")
        blocks: list[str] = []
        if self._refers_to_itself:
            # The interface keeps the order of the schema, as Kimi's tokenizer writes it.
            fields = self._fields(parameters, _INDENT)
            blocks.append(
                "interface parameters {" + ("\n" + ",\n".join(fields) + "\n" if fields else "") + "}"
            )
            root = "parameters"
        blocks += [self._interface(key, schema) for key, schema in list(self._definitions.items())]
        if description := self._function.get("description"):
            blocks.append(_comment(description, ""))
        return "\n".join([*blocks, f"type {name} = (_: {root}) => any;"])

    def _interface(self, name: str, schema: Any) -> str:
        if not isinstance(schema, Mapping):
            raise UnsupportedSchema(f"$defs.{name} is not an object")
        description = _description(schema)
        head = _comment(description, "") + "\n" if description else ""
        return f"{head}interface {name} {self._type(schema, '')}"

    def _type(self, schema: Any, indent: str) -> str:
        if isinstance(schema, bool):
            return "any" if schema else "null"
        if not isinstance(schema, Mapping):
            raise UnsupportedSchema(f"not a schema: {schema!r}")
        if "$ref" in schema:
            return self._reference(schema["$ref"])
        if "anyOf" in schema:
            return " | ".join(self._type(choice, indent) for choice in _list(schema, "anyOf"))
        if "enum" in schema:
            return _enum(schema)
        kind = schema.get("type")
        if isinstance(kind, list):
            return _union(kind)
        if kind == "object":
            return self._object(schema, indent)
        if kind == "array":
            return self._array(schema, indent)
        if isinstance(kind, str):
            return "number" if kind == "integer" else kind
        if schema:
            raise UnsupportedSchema("a schema has neither type, enum, anyOf nor $ref")
        return "any"

    def _reference(self, reference: object) -> str:
        if reference == "#":
            self._refers_to_itself = True
            return "parameters"
        if not isinstance(reference, str):
            raise UnsupportedSchema("$ref is not a text")
        name = reference.rpartition("/")[2]
        if not reference.startswith("#/$defs/") or name not in self._definitions:
            raise UnsupportedSchema(f"reference {reference!r} is not in $defs")
        return name

    def _array(self, schema: Schema, indent: str) -> str:
        items = schema.get("items")
        if not items:
            return "Array<any>"
        inner = indent + _INDENT
        comments = _comments(items, inner)
        if not comments:
            return f"Array<{self._type(items, indent)}>"
        return f"Array<\n{comments}{inner}{self._type(items, inner)}\n{indent}>"

    def _object(self, schema: Schema, indent: str) -> str:
        self._definitions.update(_mapping(schema, "$defs"))
        inner = indent + _INDENT
        required = _required(schema)
        names = sorted(_mapping(schema, "properties"), key=lambda name: (name not in required, name))
        fields = self._fields(schema, inner, names)
        more = schema.get("additionalProperties")
        if isinstance(more, bool):
            fields.append(f"{inner}[k: string]: {'any' if more else 'never'}")
        elif more is not None:
            fields.append(f"{inner}[k: string]: {self._type(more, inner)}")
        if not fields:
            return "{}"
        return "{\n" + ",\n".join(fields) + f"\n{indent}}}"

    def _fields(self, schema: Schema, indent: str, names: Sequence[str] | None = None) -> list[str]:
        properties = _mapping(schema, "properties")
        required = _required(schema)
        return [
            self._field(name, properties[name], name not in required, indent)
            for name in (properties if names is None else names)
        ]

    def _field(self, name: str, schema: Any, optional: bool, indent: str) -> str:
        comments = _comments(schema, indent)
        default = schema.get("default") if isinstance(schema, Mapping) else None
        if default is not None:
            # Numbers and booleans have Python's spelling, as in Kimi's training data.
            number = isinstance(default, (int, float))
            shown = repr(default) if number else json.dumps(default, ensure_ascii=False)
            comments += f"{indent}// Default: {shown}\n"
        return f"{comments}{indent}{name}{'?' if optional else ''}: {self._type(schema, indent)}"


def _mapping(schema: Schema, key: str) -> Schema:
    """The object at `key`, empty if it is absent."""
    found = schema.get(key)
    if found is None:
        return {}
    if not isinstance(found, Mapping):
        raise UnsupportedSchema(f"{key} is not an object")
    return found


def _list(schema: Schema, key: str) -> Sequence[Any]:
    """The list at `key`, empty if it is absent."""
    found = schema.get(key)
    if found is None:
        return ()
    if not isinstance(found, (list, tuple)):
        raise UnsupportedSchema(f"{key} is not a list")
    return found


def _required(schema: Schema) -> set[str]:
    names = _list(schema, "required")
    if not all(isinstance(name, str) for name in names):
        raise UnsupportedSchema("required is not a list of names")
    return set(names)


def _description(schema: Schema) -> str:
    text = schema.get("description") or ""
    if not isinstance(text, str):
        raise UnsupportedSchema("a description is not a text")
    return text


def _comments(schema: Any, indent: str) -> str:
    """Description and bounds as comment lines, each ended by a newline."""
    if not isinstance(schema, Mapping):
        return ""
    lines = []
    if description := _description(schema):
        lines.append(_comment(description, indent))
    kind = schema.get("type")
    plain = not any(key in schema for key in ("$ref", "anyOf", "enum"))
    keys = _BOUNDS.get(kind, ()) if isinstance(kind, str) and plain else ()
    bounds = ", ".join(f"{key}: {schema[key]}" for key in keys if key in schema)
    if bounds:
        lines.append(f"{indent}// {bounds}")
    return "".join(f"{line}\n" for line in lines)


def _enum(schema: Schema) -> str:
    kind = schema.get("type")
    if isinstance(kind, list):
        kinds = [name for name in kind if name != "null"] if len(kind) == 2 else kind
        if len(kinds) != 1:
            raise UnsupportedSchema(f"enum of the types {kind}")
        kind = kinds[0]
    expected = _ENUM_KINDS.get(kind) if isinstance(kind, str) else None
    values = _list(schema, "enum")
    for value in values:
        if value is not None and expected is not None and not isinstance(value, expected):
            raise UnsupportedSchema(f"enum value {value!r} is not a {kind}")
    return " | ".join(f'"{value}"' if isinstance(value, str) else str(value) for value in values)


def _union(kinds: Sequence[str]) -> str:
    unknown = [kind for kind in kinds if not isinstance(kind, str) or kind not in _UNION_NAMES]
    if unknown:
        raise UnsupportedSchema(f"unknown types {unknown}")
    return " | ".join(_UNION_NAMES[kind] for kind in kinds)
