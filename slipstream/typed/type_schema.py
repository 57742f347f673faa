"""JSON Schema of a Python type: dataclasses, pydantic models, enums, literals, containers. Pure."""

from __future__ import annotations

import collections.abc
import dataclasses
import datetime
import enum
import json
import types
import typing
import uuid
from collections.abc import Mapping
from typing import Any

from slipstream.errors import InvalidArgument

Schema = dict[str, Any]

_PLAIN: Mapping[Any, Schema] = {
    str: {"type": "string"},
    int: {"type": "integer"},
    float: {"type": "number"},
    bool: {"type": "boolean"},
    type(None): {"type": "null"},
    Any: {},
    object: {},
    datetime.datetime: {"type": "string", "format": "date-time"},
    datetime.date: {"type": "string", "format": "date"},
    datetime.time: {"type": "string", "format": "time"},
    uuid.UUID: {"type": "string", "format": "uuid"},
}
_REFERENCE = "#/$defs/"
LISTS = (list, collections.abc.Sequence, set, frozenset, collections.abc.Set)
MAPPINGS = (dict, collections.abc.Mapping)
UNIONS = (typing.Union, types.UnionType)


def is_pydantic(kind: Any) -> bool:
    """Whether the type is a pydantic model, known by what it offers."""
    return isinstance(kind, type) and hasattr(kind, "model_json_schema")


def schema_of(kind: Any, name: str = "response_format") -> Schema:
    """The schema of values of a type. Raises InvalidArgument, which names `name`, for a type without one.

    Objects are closed: they have no other keys than those of the type.
    """
    found = _Schemas(name)
    schema = found.of(kind)
    if "$ref" in schema:  # at the root some readers take no reference
        root = found.definitions[schema.pop("$ref").removeprefix(_REFERENCE)]
        schema = {**root, **schema}
    closed: Schema = _closed(found.with_definitions(schema))
    return closed


def described(kind: Any) -> tuple[Any, str]:
    """The type without Annotated, and the first text in its annotations."""
    if typing.get_origin(kind) is not typing.Annotated:
        return kind, ""
    inner, *notes = typing.get_args(kind)
    return inner, next((note for note in notes if isinstance(note, str)), "")


def typed_fields(kind: Any) -> dict[str, Any]:
    """The types of a dataclass's fields that its constructor takes, or of a TypedDict's keys."""
    hints = typing.get_type_hints(kind, include_extras=True)
    if typing.is_typeddict(kind):
        return {name: _unmarked(hint) for name, hint in hints.items()}
    return {field.name: hints[field.name] for field in dataclasses.fields(kind) if field.init}


def required_names(kind: Any) -> list[str]:
    """The fields of a dataclass without a default, or the keys that a TypedDict must have."""
    if typing.is_typeddict(kind):
        hints = typing.get_type_hints(kind, include_extras=True)
        marks = {name: typing.get_origin(hint) for name, hint in hints.items()}
        if kind.__total__:
            return [name for name, mark in marks.items() if mark is not typing.NotRequired]
        return [name for name, mark in marks.items() if mark is typing.Required]
    missing = dataclasses.MISSING
    fields = [field for field in dataclasses.fields(kind) if field.init]
    return [f.name for f in fields if f.default is missing and f.default_factory is missing]


def _unmarked(hint: Any) -> Any:
    """A TypedDict's type without Required or NotRequired."""
    is_marked = typing.get_origin(hint) in (typing.Required, typing.NotRequired)
    return typing.get_args(hint)[0] if is_marked else hint


class _Schemas:
    """Collects the definitions that one schema refers to, so that a type may contain itself."""

    def __init__(self, name: str) -> None:
        self._name = name
        self.definitions: dict[str, Schema] = {}
        self._owners: dict[str, Any] = {}

    def of(self, kind: Any) -> Schema:
        kind, description = described(kind)
        schema = self._of_plain(kind)
        return {**schema, "description": description} if description else schema

    def with_definitions(self, schema: Schema) -> Schema:
        """The schema with the definitions that it refers to."""
        needed, texts = {}, [json.dumps(schema)]
        while texts:
            text = texts.pop()
            for label, definition in self.definitions.items():
                if label not in needed and f'"{_REFERENCE}{label}"' in text:
                    needed[label] = definition
                    texts.append(json.dumps(definition))
        return {**schema, "$defs": needed} if needed else schema

    def _of_plain(self, kind: Any) -> Schema:
        origin, arguments = typing.get_origin(kind), typing.get_args(kind)
        if origin is None and isinstance(kind, typing.Hashable) and kind in _PLAIN:
            return dict(_PLAIN[kind])
        if origin is typing.Literal:
            return {"enum": list(arguments)}
        if origin in UNIONS:
            return {"anyOf": [self.of(argument) for argument in arguments]}
        if kind in LISTS or origin in LISTS:
            return {"type": "array", "items": self.of(arguments[0]) if arguments else {}}
        if origin is tuple:
            return self._tuple(arguments)
        if kind in MAPPINGS or origin in MAPPINGS:
            return self._mapping(arguments)
        if isinstance(kind, type) and issubclass(kind, enum.Enum):
            return {"enum": [member.value for member in kind]}
        if is_pydantic(kind):
            return self._pydantic(kind)
        if dataclasses.is_dataclass(kind) or typing.is_typeddict(kind):
            return self._named(kind)
        raise InvalidArgument(self._name, f"has no JSON Schema for {kind!r}")

    def _tuple(self, arguments: tuple[Any, ...]) -> Schema:
        if len(arguments) == 2 and arguments[1] is ...:
            return {"type": "array", "items": self.of(arguments[0])}
        items = [self.of(argument) for argument in arguments]
        return {"type": "array", "prefixItems": items, "minItems": len(items), "items": False}

    def _mapping(self, arguments: tuple[Any, ...]) -> Schema:
        if arguments and arguments[0] is not str:
            raise InvalidArgument(self._name, f"has keys of {arguments[0]!r}: keys of JSON are strings")
        return {"type": "object", "additionalProperties": self.of(arguments[1]) if arguments else True}

    def _named(self, kind: Any) -> Schema:
        """A reference to the type's definition, which is made at the first one."""
        label = self._label(kind)
        if label not in self.definitions:
            self.definitions[label] = {}
            fields = typed_fields(kind)
            self.definitions[label] = {
                "type": "object",
                "properties": {name: self.of(field) for name, field in fields.items()},
                "required": required_names(kind),
                "additionalProperties": False,
            }
        return {"$ref": f"{_REFERENCE}{label}"}

    def _pydantic(self, kind: Any) -> Schema:
        label = self._label(kind)
        if label not in self.definitions:
            schema = kind.model_json_schema()
            self.definitions.update(schema.pop("$defs", {}))
            self.definitions.setdefault(label, schema)
        return {"$ref": f"{_REFERENCE}{label}"}

    def _label(self, kind: type) -> str:
        """The type's name; numbered where another type has the same."""
        label, number = kind.__name__, 1
        while self._owners.setdefault(label, kind) is not kind:
            number += 1
            label = f"{kind.__name__}_{number}"
        return label


def _closed(schema: Any) -> Any:
    """The schema, whose objects with properties allow no others unless they say so."""
    if isinstance(schema, list):
        return [_closed(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    closed = {
        key: {name: _closed(part) for name, part in value.items()}
        if key in ("properties", "$defs") and isinstance(value, dict)
        else value
        if key in ("enum", "const", "default", "examples")
        else _closed(value)
        for key, value in schema.items()
    }
    if "properties" in closed:
        closed.setdefault("additionalProperties", False)
    return closed
