"""Functions as tools: what the model reads of them, and the arguments that it sends."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from typing import Annotated, Any, Literal

import pytest

from slipstream.errors import InvalidArgument
from slipstream.typed.function_tool import FunctionTool, ToolError, tools_of


@dataclasses.dataclass
class Item:
    sku: str
    amount: int = 1


def order(items: list[Item], express: bool = False, note: Annotated[str, "for the parcel"] = "") -> str:
    """Order items.

    The cart is emptied.

    Args:
        items: what to send
        express (bool): by tomorrow
    Returns:
        express: the number
    """
    return f"{len(items)} {express} {note}"


def status(order_id: str, kind: Literal["short", "long"] = "short") -> str:
    """Look up an order.

    :param order_id: six digits
    :returns: a text
    """
    return order_id


class Desk:
    def close(self, reason: str) -> str:
        """Close the desk."""
        return reason


def test_signature_and_docstring_describe_the_tool() -> None:
    declared = FunctionTool.of(order).as_openai()["function"]
    assert (declared["name"], declared["description"]) == ("order", "Order items.\n\nThe cart is emptied.")
    parameters = declared["parameters"]
    assert parameters["required"] == ["items"]
    assert parameters["additionalProperties"] is False
    items, express, note = parameters["properties"].values()
    assert items == {"type": "array", "items": {"$ref": "#/$defs/Item"}, "description": "what to send"}
    assert express == {"type": "boolean", "description": "by tomorrow"}
    assert note["description"] == "for the parcel"
    assert parameters["$defs"]["Item"]["required"] == ["sku"]


def test_sphinx_notes_are_read_too() -> None:
    tool = FunctionTool.of(status)
    assert tool.description == "Look up an order."
    assert tool.parameters["properties"]["order_id"]["description"] == "six digits"
    assert tool.parameters["properties"]["kind"] == {"enum": ["short", "long"]}


def test_arguments_have_their_types() -> None:
    tool = FunctionTool.of(order)
    arguments = tool.arguments('{"items": [{"sku": "a"}], "express": true}')
    assert arguments == {"items": [Item("a")], "express": True}
    assert tool.function(**arguments) == "1 True "
    assert FunctionTool.of(Desk().close).arguments('{"reason": "late"}') == {"reason": "late"}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "not JSON"),
        ("[" * 100_000, "not JSON"),
        ("[]", "not an object"),
        ("{}", r"missing: \['items'\]"),
        ('{"items": [], "more": 1}', r"unknown: \['more'\]"),
        ('{"items": [{"sku": 1}]}', r"items\[0\].sku: must be a string"),
    ],
)
def test_wrong_arguments_are_words_for_the_model(text: str, words: str) -> None:
    with pytest.raises(ToolError, match=words):
        FunctionTool.of(order).arguments(text)


def _untyped(value) -> None:  # type: ignore[no-untyped-def]
    """Without a type."""


def _many(*values: int) -> None:
    """By position."""


def _bytes(value: bytes) -> None:
    """Of a type that JSON lacks."""


@pytest.mark.parametrize("function", [_untyped, _many, _bytes, lambda: None])
def test_a_function_that_json_cannot_call_is_refused(function: Callable[..., Any]) -> None:
    with pytest.raises(InvalidArgument, match=r"functions\."):
        FunctionTool.of(function)


def test_two_functions_of_one_name_are_refused() -> None:
    with pytest.raises(InvalidArgument, match=r"functions\.status: is there twice"):
        tools_of([status, status])
    assert json.loads(json.dumps([tool.as_openai() for tool in tools_of([status, order]).values()]))
