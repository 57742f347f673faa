"""Requests that break one bound, in the shapes of both APIs."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from typing import Any

from slipstream import bounds

USER = {"role": "user", "content": "hi"}


@dataclasses.dataclass(frozen=True)
class Case:
    """A request that breaks one bound. None = this API cannot express it."""

    field: str
    http: Mapping[str, Any] | bytes | None = None
    grpc: Mapping[str, Any] | bytes | None = None  # merged into a good message, JSON names
    headers: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    words: str = ""  # part of the message, where a row has placeholders


def both(path: str, **fields: Any) -> Case:
    """A sampling field that has the same name in both APIs."""
    return Case(path, http=fields, grpc={"sampling": json.loads(json.dumps(fields), parse_constant=str)})


def messages(path: str, *items: Mapping[str, Any], grpc: list[Any] | None = None) -> Case:
    return Case(path, http={"messages": list(items)}, grpc={"chat": {"messages": grpc or list(items)}})


def tools(path: str, http: list[Any], grpc: list[Any], words: str = "") -> Case:
    return Case(path, http={"tools": http}, grpc={"chat": {"messages": [USER], "tools": grpc}}, words=words)


def output_schema(schema: Any) -> Case:
    """A schema for the answer."""
    return Case(
        "response_format.json_schema.schema",
        http={"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}},
        grpc={"output": {"jsonSchema": json.dumps(schema)}},
    )


_BEGUN = {"role": "assistant", "content": "Yes, ", "partial": True}
_CALL = {"id": "functions.look:0", "name": "look", "arguments": "{}"}
_FUNCTION = {"name": "look", "parameters": {"type": "object"}}
# A partial message: on another message, and beside what it excludes.
_PARTIAL_CASES = {
    "PARTIAL": messages("messages[1].partial", USER, _BEGUN, {"role": "user", "content": "why?"}),
    "PARTIAL_CALLS": Case(
        "messages[1].tool_calls",
        http={
            "messages": [
                USER,
                {**_BEGUN, "tool_calls": [{"id": _CALL["id"], "function": {"name": "look"}}]},
            ]
        },
        grpc={"chat": {"messages": [USER, {**_BEGUN, "toolCalls": [_CALL]}]}},
    ),
    "PARTIAL_TOOL_CHOICE": Case(
        "tool_choice",
        http={
            "messages": [USER, _BEGUN],
            "tools": [{"type": "function", "function": _FUNCTION}],
            "tool_choice": "required",
        },
        grpc={
            "chat": {
                "messages": [USER, _BEGUN],
                "tools": [{"name": "look", "parameters": json.dumps(_FUNCTION["parameters"])}],
                "toolChoice": {"mode": "required"},
            }
        },
    ),
    "PARTIAL_OUTPUT": Case(
        "response_format",
        http={"messages": [USER, _BEGUN], "response_format": {"type": "json_object"}},
        grpc={"chat": {"messages": [USER, _BEGUN]}, "output": {"jsonObject": True}},
    ),
    "GENERATION_PROMPT": Case(
        "add_generation_prompt",
        http={"messages": [USER, _BEGUN], "add_generation_prompt": True},
    ),
}


_N_DEEP = bounds.MAX_JSON_DEPTH + 1
_DEEP = '{"a":' * _N_DEEP + "1" + "}" * _N_DEEP
_PROMPT_CASES = {
    "BODY_DEPTH": tools(
        "body",
        [{"type": "function", "function": {"name": "look", "parameters": json.loads(_DEEP)}}],
        [{"name": "look", "parameters": _DEEP}],
    ),
    "NUMBERS": Case("prompt", grpc={"tokenIds": {"ids": [1] * (bounds.MAX_MESSAGE_NUMBERS + 1)}}),
}
OTHER_CASES = {**_PARTIAL_CASES, **_PROMPT_CASES}
