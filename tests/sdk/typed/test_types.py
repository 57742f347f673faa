"""Schemas of Python types, and JSON as their values."""

from __future__ import annotations

import dataclasses
import datetime
import enum
import json
import uuid
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, NotRequired, Optional, TypedDict

import jsonschema
import pydantic
import pytest

from slipstream.errors import AnswerMismatch, InvalidArgument
from slipstream.typed.type_schema import schema_of
from slipstream.typed.type_value import json_text, parse_json, value_of


class Level(enum.Enum):
    LOW = "low"
    HIGH = 2


@dataclasses.dataclass
class Node:
    name: str
    children: list[Node] = dataclasses.field(default_factory=list)


@dataclasses.dataclass(frozen=True)
class Ticket:
    subject: Annotated[str, "one line"]
    level: Level
    days: int | None
    tags: tuple[str, ...]
    root: Node
    share: float = 0.5


class Address(TypedDict):
    street: str
    number: NotRequired[int]


class Person(pydantic.BaseModel):
    name: str
    age: Annotated[int, pydantic.Field(ge=0)]
    friends: list[Person] = []


NODE = {"name": "a", "children": [{"name": "b", "children": []}]}
TICKET = {"subject": "x", "level": 2, "days": None, "tags": ["a", "b"], "root": NODE}
NOON = datetime.datetime(2026, 12, 4, 12, 0, tzinfo=datetime.UTC)
ID = uuid.UUID(int=7)
VALUES: list[tuple[Any, Any, Any]] = [
    (int, 3, 3),
    (int, 3.0, 3),
    (float, 3, 3.0),
    (str, "x", "x"),
    (bool, True, True),
    (Any, {"a": [1]}, {"a": [1]}),
    (Optional[int], None, None),  # noqa: UP045
    (int | str, "x", "x"),
    (Literal["a", 1], 1, 1),
    (Level, "low", Level.LOW),
    (list[int], [1, 2], [1, 2]),
    (Sequence[Level], ["low"], [Level.LOW]),
    (set[str], ["a", "a"], {"a"}),
    (tuple[int, str], [1, "a"], (1, "a")),
    (dict[str, int], {"a": 1}, {"a": 1}),
    (Mapping[str, Any], {"a": None}, {"a": None}),
    (datetime.datetime, "2026-12-04T12:00:00+00:00", NOON),
    (datetime.date, "2026-12-04", NOON.date()),
    (uuid.UUID, str(ID), ID),
    (Address, {"street": "x"}, {"street": "x"}),
    (Ticket, TICKET, Ticket("x", Level.HIGH, None, ("a", "b"), Node("a", [Node("b")]))),
    (Person, {"name": "a", "age": 1, "friends": []}, Person(name="a", age=1)),
]
WRONG: list[tuple[Any, Any, str]] = [
    (int, True, "must be a whole number"),
    (int, 2.5, "must be a whole number"),
    (str, 1, "must be a string"),
    (float, "1", "must be a number"),
    (Literal[1], True, "one of the type's values"),
    (Level, "middle", "one of the type's values"),
    (int | None, "x", "of one of 2 types"),
    (tuple[int, str], [1], "a list of 2"),
    (list[int], [1, "x"], r"\[1\]: must be a whole number"),
    (datetime.date, "tomorrow", "must be a date"),
    (Address, {}, "street: is missing"),
    (Ticket, {**TICKET, "more": 1}, "more: is not a field of Ticket"),
    (Ticket, {**TICKET, "root": {"name": 1}}, "root.name: must be a string"),
    (Person, {"name": "a", "age": -1}, "greater than or equal to 0"),
]


@pytest.mark.parametrize(("kind", "data", "value"), VALUES, ids=str)
def test_json_that_is_valid_under_the_schema_becomes_the_value(kind: Any, data: Any, value: Any) -> None:
    schema = schema_of(kind)
    jsonschema.Draft202012Validator.check_schema(schema)
    jsonschema.validate(data, schema)
    made = parse_json(kind, json.dumps(data))
    assert made == value
    assert type(made) is type(value)


@pytest.mark.parametrize(("kind", "data", "words"), WRONG, ids=str)
def test_other_json_is_refused_by_its_path(kind: Any, data: Any, words: str) -> None:
    with pytest.raises(AnswerMismatch, match=words):
        value_of(kind, data)
    if kind is not datetime.date:  # formats are only checked by a validator that is asked to
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(data, schema_of(kind))


def test_objects_are_closed_unless_they_say_otherwise() -> None:
    class Open(pydantic.BaseModel, extra="allow"):
        person: Person

    schema = schema_of(Open)
    assert schema["additionalProperties"] is True
    assert schema["$defs"]["Person"]["additionalProperties"] is False
    assert schema_of(Ticket)["properties"]["subject"] == {"type": "string", "description": "one line"}


def test_types_of_one_name_have_two_definitions() -> None:
    other = dataclasses.make_dataclass("Node", [("number", int)])
    both = dataclasses.make_dataclass("Both", [("one", Node), ("two", other)])
    definitions = schema_of(both)["$defs"]
    assert definitions["Node"]["required"] == ["name"]
    assert definitions["Node_2"]["required"] == ["number"]


@pytest.mark.parametrize("kind", [bytes, dict[int, str], list[complex]])
def test_a_type_without_a_schema_is_refused(kind: Any) -> None:
    with pytest.raises(InvalidArgument, match="response_format: has"):
        schema_of(kind)


def test_an_answer_that_is_not_json_is_a_mismatch() -> None:
    for kind in (Ticket, Person):
        for text in ('{"subject": ', "[" * 100_000):
            with pytest.raises(AnswerMismatch):
                parse_json(kind, text)


def test_values_become_json() -> None:
    person = Person(name="a", age=1)
    made = json_text({"t": Node("a", [Node("b")]), "l": Level.LOW, "p": person, "n": NOON, "s": {1}, "i": ID})
    assert json.loads(made) == {
        "t": NODE,
        "l": "low",
        "p": {"name": "a", "age": 1, "friends": []},
        "n": "2026-12-04T12:00:00+00:00",
        "s": [1],
        "i": str(ID),
    }
    assert json_text("as it is") == "as it is"
