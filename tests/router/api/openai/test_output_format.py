"""What of `response_format` counts, and that nothing of it is dropped without a word."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from services.router.api.openai.request import parse_chat
from slipstream import bounds
from slipstream.errors import InvalidArgument

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "name": "of an extension"}


def parse(json_schema: Any) -> tuple[Any, str]:
    """The schema that is held, and the fields without effect."""
    form = {"type": "json_schema", "json_schema": json_schema}
    body = {"messages": [{"role": "user", "content": "hi"}], "response_format": form}
    requests, options = parse_chat(json.dumps(body).encode(), "r")
    assert requests[0].output is not None
    return requests[0].output.content, options.ignored


def test_a_schema_is_held_in_either_form() -> None:
    assert parse({"name": "x", "schema": SCHEMA, "strict": False, "description": "y"}) == (SCHEMA, "")
    assert parse(SCHEMA) == (SCHEMA, "")
    assert parse({}) == ({}, "")


def test_an_unknown_field_beside_the_schema_is_named() -> None:
    assert parse({"schema": SCHEMA, "x": 1}) == (SCHEMA, "response_format.json_schema.x")


@pytest.mark.parametrize(
    ("form", "content", "ignored"),
    [
        ({"type": "json_schema", "json_schema": SCHEMA, "schema": {}}, SCHEMA, "response_format.schema"),
        ({"type": "json_schema", "schema": SCHEMA}, SCHEMA, ""),
        ({"type": "json_object", "schema": SCHEMA}, SCHEMA, ""),
        (
            {"type": "json_object", "schema": SCHEMA, "json_schema": {}},
            SCHEMA,
            "response_format.json_schema",
        ),
        ({"type": "json_object", "json_schema": SCHEMA}, None, "response_format.json_schema"),
        ({"type": "text", "schema": SCHEMA}, None, "response_format.schema"),
        (
            {"type": "text", "schema": True, "json_schema": {}},
            None,
            "response_format.json_schema,response_format.schema",
        ),
        ({"type": "text", "schema": None}, None, ""),
    ],
)
def test_a_schema_that_does_not_hold_is_named(form: Any, content: Any, ignored: str) -> None:
    body = {"messages": [{"role": "user", "content": "hi"}], "response_format": form}
    requests, options = parse_chat(json.dumps(body).encode(), "r")
    output = requests[0].output
    assert (output is None) == (form["type"] == "text")
    assert (output.content if output is not None else None) == content
    assert ",".join(sorted(options.ignored.split(","))) == ignored


@pytest.mark.parametrize(
    "form",
    [
        {"name": "x", "strict": True},
        {"name": "x"},
        {"name": "x", "schema": None},
        {"strict": True, "json": {}},
    ],
)
def test_a_form_without_its_schema_is_refused(form: Any) -> None:
    with pytest.raises(InvalidArgument) as refusal:
        parse(form)
    assert refusal.value.field == "response_format.json_schema.schema"


@pytest.mark.parametrize(
    ("field", "form"),
    [
        ("guided_json", lambda text: {"guided_json": text}),
        ("structured_outputs.json", lambda text: {"structured_outputs": {"json": text}}),
        (
            "response_format.json_schema.schema",
            lambda text: {
                "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": text}}
            },
        ),
    ],
)
def test_a_schema_as_text_has_the_bounds_of_one_that_is_an_object(
    field: str, form: Callable[[str], dict[str, Any]]
) -> None:
    wide = '{"enum": [' + "0," * (bounds.MAX_STRUCTURE_BYTES // 2) + "0]}"
    deep = '{"items": ' * bounds.MAX_JSON_DEPTH + "{}" + "}" * bounds.MAX_JSON_DEPTH
    for text, bound in ((wide, bounds.BODY_STRUCTURE), (deep, bounds.BODY_DEPTH)):
        body = {"messages": [{"role": "user", "content": "hi"}], **form(text)}
        with pytest.raises(InvalidArgument) as refusal:
            parse_chat(json.dumps(body).encode(), "r")
        assert str(refusal.value) == str(bound.refused(field))
