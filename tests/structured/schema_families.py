"""Schemas of the kinds that users write, made from a seed, with keywords that no grammar holds among them."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

Schema = dict[str, Any]

_KEYS = (
    "id",
    "kind",
    "name",
    "größe",
    "a/b",
    "a~b",
    'q"k',
    "x\\y",
    "tab\tkey",
    "$ref",
    "enum",
    "日本",
    "",
    "0",
    "😀",
)
_FORMATS = ("date-time", "date", "time", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri")
_PATTERNS = (
    "^[a-z]{1,5}$",
    "^(a|b)+$",
    "é",
    "^\\d{3}-\\d{4}$",
    '^[^"\\\\]*$',
    "^.{2,4}$",
    "^\\S+@x$",
    "^$",
    "[\\u0430-\\u044f]{2}",
    "a$",
    "^#/",
    "^\\[x\\]$",
    "^[\\w.-]{1,8}$",
    "\\n",
    "^\\t?$",
    "^(?:ab?c){1,3}$",
    "^[A-Z]{2}(_[A-Z]{2})?$",
    "^\\s*$",
)
_VALUES: tuple[Any, ...] = (
    None,
    True,
    False,
    0,
    -1,
    1.5,
    1e20,
    1e-7,
    "",
    "a",
    "é",
    "\n",
    '"',
    "\\",
    "😀",
    " ",
    "\u007f",
    "\u0001",
    [],
    [1, [2]],
    {},
    {"a": 1},
    {"b": {"c": [None]}, "é": "x"},
    12345678901234567890,
    "a" * 60,
)
_DRAFT_7 = "http://json-schema.org/draft-07/schema#"


class FamilyMaker:
    """Makes one schema of each family for a seed."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)

    def schema(self) -> Schema:
        """A schema of one of the families."""
        families: list[Callable[[], Schema]] = [
            self.config,
            self.resource,
            self.openapi,
            self.function,
            self.recursion,
            self.merged,
            self.discriminated,
            self.open_keys,
            self.conditional,
            self.tuples,
            self.values,
            self.numbers,
            self.strings,
            self.deep,
            self.mixed,
        ]
        return self.chance.choice(families)()

    def leaf(self) -> Schema:
        kinds: list[Callable[[], Schema]] = [
            self.string,
            self.number,
            self.value,
            lambda: {"type": "boolean"},
            lambda: {"type": self._types()},
        ]
        return self.chance.choice(kinds)()

    def any(self, depth: int) -> Schema:
        if not depth or self.chance.random() < 0.4:
            return self.leaf()
        made: list[Callable[[int], Schema]] = [self.object, self.array, self.union]
        return self.chance.choice(made)(depth - 1)

    def _types(self) -> list[str]:
        kinds = ["string", "integer", "number", "boolean", "null"]
        return self.chance.sample(kinds, self.chance.randrange(1, 4))

    def string(self) -> Schema:
        chance = self.chance
        made: Schema = {"type": "string"}
        for add in chance.sample(
            (self._lengths, self._format, self._pattern), chance.choice((0, 1, 1, 1, 2))
        ):
            made |= add()
        return made

    def _lengths(self) -> Schema:
        low = self.chance.choice((0, 0, 1, 3, 12))
        made: Schema = {"minLength": low, "maxLength": low + self.chance.choice((0, 1, 7, 30))}
        return made if self.chance.random() < 0.8 else {"maxLength": made["maxLength"]}

    def _format(self) -> Schema:
        return {"format": self.chance.choice(_FORMATS)}

    def _pattern(self) -> Schema:
        return {"pattern": self.chance.choice(_PATTERNS)}

    def number(self) -> Schema:
        chance = self.chance
        made: Schema = {
            "type": chance.choice(("integer", "number", ["integer", "null"], ["number", "string"]))
        }
        low = chance.choice((-1e3, -7.5, -1, 0, 0.001, 1, 3, 99.5, 1e6, -0.25, 12))
        high = low + chance.choice((0, 0.5, 1, 10, 1000, 0.125, 1e9))
        if chance.random() < 0.5:
            made[chance.choice(("minimum", "exclusiveMinimum"))] = low
        if chance.random() < 0.5:
            made[chance.choice(("maximum", "exclusiveMaximum"))] = high
        if chance.random() < 0.3:
            made["multipleOf"] = chance.choice((1, 2, 3, 5, 7, 10, 0.5, 2.5, 12, 100))
        if isinstance(made.get("multipleOf"), float):
            made |= {"minimum": -50, "maximum": 1000}  # jsonschema cannot divide long integers by fractions
        return made

    def value(self) -> Schema:
        chance = self.chance
        if chance.random() < 0.4:
            return {"const": chance.choice(_VALUES)}
        return {"enum": chance.sample(_VALUES, chance.randrange(1, 6))}

    def names(self, most: int = 5) -> list[str]:
        return self.chance.sample(_KEYS, self.chance.randrange(1, most + 1))

    def object(self, depth: int) -> Schema:
        chance, names = self.chance, self.names()
        made: Schema = {"type": "object", "properties": {name: self.any(depth) for name in names}}
        if chance.random() < 0.8:
            made["required"] = [name for name in names if chance.random() < 0.5]
        if chance.random() < 0.2:
            made["required"] = [*made.get("required", ()), "undeclared"]
        kind = chance.random()
        if kind < 0.5:
            made["additionalProperties"] = False if kind < 0.3 else self.any(0)
        if chance.random() < 0.2:
            made["patternProperties"] = {chance.choice(("^x-", "^[a-c]", "[0-9]$", "é")): self.any(0)}
        if chance.random() < 0.1:
            made[chance.choice(("minProperties", "maxProperties"))] = chance.randrange(0, 4)
        return made

    def array(self, depth: int) -> Schema:
        chance = self.chance
        made: Schema = {"type": "array", "items": self.any(depth)}
        if chance.random() < 0.5:
            made["minItems"] = chance.randrange(3)
        made["maxItems"] = made.get("minItems", 0) + chance.randrange(4)
        if chance.random() < 0.3:
            made["prefixItems"] = [self.any(0) for _ in range(chance.randrange(1, 4))]
            made["items"] = chance.choice((False, made["items"]))
        return made

    def union(self, depth: int) -> Schema:
        chance = self.chance
        options = [self.any(depth) for _ in range(chance.randrange(1, 4))]
        made: Schema = {chance.choice(("anyOf", "anyOf", "oneOf", "allOf")): options}
        if chance.random() < 0.2:
            made |= self.leaf()
        return made

    def config(self) -> Schema:
        """A file of settings, as the schemas of repositories: shared definitions, open objects."""
        definitions = {name: self.any(1) for name in ("step", "env", "a/b", "c~d", "e f")}
        used = self.chance.choice(("step", "env", "a~1b", "c~0d", "e%20f", "e f"))
        made = self.object(2)
        made["properties"]["use"] = {"$ref": f"#/definitions/{used}"}
        made["properties"]["list"] = {"type": "array", "items": {"$ref": "#/definitions/step"}, "maxItems": 3}
        return {"$schema": _DRAFT_7, **made, "definitions": definitions}

    def resource(self) -> Schema:
        """A resource of Kubernetes: nested specs, maps of text, numbers or text, nullable parts."""
        text = {"type": "object", "additionalProperties": {"type": ["string", "null"], "maxLength": 5}}
        return {
            "type": "object",
            "description": "a resource",
            "properties": {
                "apiVersion": {"type": ["string", "null"], "enum": ["v1", None]},
                "kind": {"type": "string", "enum": ["Pod"]},
                "metadata": {
                    "type": ["object", "null"],
                    "properties": {"labels": text, "name": self.string()},
                },
                "spec": {**self.object(2), "x-kubernetes-map-type": "atomic"},
                "port": {
                    "oneOf": [{"type": "string", "maxLength": 3}, {"type": "integer", "format": "int32"}]
                },
            },
            "required": ["metadata", "spec"],
        }

    def openapi(self) -> Schema:
        """A component of OpenAPI, with what its dialect adds."""
        made = self.object(2)
        name = next(iter(made["properties"]))
        made["properties"][name] = {
            **made["properties"][name],
            "example": 1,
            "readOnly": True,
            "deprecated": False,
        }
        if self.chance.random() < 0.3:
            made["properties"]["n"] = {"type": "string", "nullable": True, "maxLength": 4}
        if self.chance.random() < 0.3:
            made["discriminator"] = {"propertyName": name}
        return made

    def function(self) -> Schema:
        """The parameters of a function, as agents declare them."""
        names = ("query", "limit", "unit", "tags", "options")
        return {
            "type": "object",
            "properties": {name: {**self.any(1), "description": "what it is"} for name in names},
            "required": list(names[: self.chance.randrange(6)]),
            "additionalProperties": False,
        }

    def recursion(self) -> Schema:
        """Definitions that refer to themselves, to each other or to the root."""
        chance = self.chance
        where = chance.choice(("#", "#/$defs/node", "#/$defs/tree"))
        again: Schema = {"$ref": where}
        if chance.random() < 0.3:
            again = {"anyOf": [again, {"type": "null"}]}
        node = {
            "type": "object",
            "properties": {"next": again, "value": self.leaf()},
            "additionalProperties": False,
        }
        tree = {"type": "array", "items": {"$ref": "#/$defs/node"}, "maxItems": 2}
        return {
            **self.object(0),
            "$defs": {"node": node, "tree": tree},
            "allOf": [{"properties": {"n": {"$ref": "#/$defs/node"}}}],
        }

    def merged(self) -> Schema:
        """Several schemas that hold together, and some beside a reference."""
        chance = self.chance
        parts = [self.object(1) for _ in range(2)]
        for part in parts[: chance.randrange(3)]:
            part.pop("additionalProperties", None)
        base = {"$defs": {"base": parts[0]}, "allOf": [{"$ref": "#/$defs/base"}, parts[1]]}
        return {**base, **(self.object(0) if chance.random() < 0.4 else {})}

    def discriminated(self) -> Schema:
        """Variants that differ by a constant."""
        word = self.chance.choice(("oneOf", "anyOf"))
        tags = self.chance.choice((("a", "b", "c"), (1, 2, "1"), (True, "x", None), ("a", "a", "b")))
        return {
            word: [
                {
                    "type": "object",
                    "properties": {"type": {"const": tag}, "body": self.any(1)},
                    "required": ["type"],
                    **({"additionalProperties": False} if self.chance.random() < 0.5 else {}),
                }
                for tag in tags
            ]
        }

    def open_keys(self) -> Schema:
        """Objects whose keys are not declared."""
        chance = self.chance
        made: Schema = {"type": "object"}
        if chance.random() < 0.7:
            made["patternProperties"] = {
                pattern: self.any(0)
                for pattern in chance.sample(("^x-", "^[a-z]{2}$", "[0-9]", "^é", "_"), 2)
            }
        made["additionalProperties"] = chance.choice((False, True, {"type": "integer"}, {"type": "object"}))
        if chance.random() < 0.3:
            made["properties"] = {"x-a": self.leaf(), "zz": self.leaf()}
        if chance.random() < 0.3:
            made["propertyNames"] = {"maxLength": 3}
        if chance.random() < 0.2:
            made["minProperties"] = chance.randrange(3)
        return made

    def conditional(self) -> Schema:
        """Keywords that depend on other values."""
        chance = self.chance
        extra: list[Schema] = [
            {"if": {"properties": {"kind": {"const": 1}}}, "then": {"required": ["id"]}},
            {"dependentRequired": {"id": ["kind"]}},
            {"dependentSchemas": {"id": {"required": ["name"]}}},
            {"dependencies": {"id": ["kind"]}},
            {"not": {"required": ["id"]}},
            {"unevaluatedProperties": False},
            {"then": {"required": ["zz"]}},
            {"allOf": [{"if": {}, "then": False}]},
        ]
        return {**self.object(1), **chance.choice(extra)}

    def tuples(self) -> Schema:
        """Arrays with places, and with what all their items obey together."""
        chance = self.chance
        extra: list[Schema] = [
            {},
            {"contains": {"const": 1}},
            {"contains": {"type": "integer"}, "minContains": 0},
            {"uniqueItems": True},
            {"uniqueItems": False},
            {"unevaluatedItems": False},
            {"$schema": _DRAFT_7, "items": [self.leaf(), self.leaf()], "additionalItems": False},
            {"additionalItems": False},
        ]
        return {**self.array(1), **chance.choice(extra)}

    def values(self) -> Schema:
        """Constants and enumerations, some large, some beside other keywords."""
        chance = self.chance
        if chance.random() < 0.3:
            return {"enum": [f"value {number} é" for number in range(chance.choice((300, 2000)))]}
        return {
            **self.value(),
            **chance.choice(({}, self.number(), self.string(), {"type": "object"}, {"not": {"const": 1}})),
        }

    def numbers(self) -> Schema:
        return {"type": "array", "items": self.number(), "minItems": 2, "maxItems": 4}

    def strings(self) -> Schema:
        return {"type": "array", "items": self.string(), "minItems": 1, "maxItems": 3}

    def deep(self) -> Schema:
        """Many levels."""
        made = self.leaf()
        for _ in range(self.chance.choice((8, 24))):
            made = {
                "type": "object",
                "properties": {"n": made},
                "required": ["n"],
                "additionalProperties": False,
            }
        return made

    def mixed(self) -> Schema:
        """Keywords of several types in one schema, without a type."""
        chance = self.chance
        parts = [
            self._lengths(),
            {"minimum": 3},
            {"maxItems": 2},
            self._pattern(),
            {"required": ["id"]},
            self._format(),
        ]
        made: Schema = {}
        for part in chance.sample(parts, chance.randrange(1, 4)):
            made |= part
        return {**made, **({"type": self._types()} if chance.random() < 0.5 else {})}
