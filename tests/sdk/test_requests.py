"""What the SDK sends, and what it refuses to send: by the field's path, in the words of the router."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest

from services.router.api.openai.request import parse_chat
from services.router.request.types import ChatInput
from slipstream.errors import InvalidArgument
from slipstream.requests import chat_request, prompt_request
from slipstream.v1 import router_pb2

USER = {"role": "user", "content": "hi"}


def _calls(*calls: Any) -> list[Any]:
    return [{"role": "assistant", "tool_calls": list(calls)}]


@pytest.mark.parametrize(
    ("messages", "field", "words"),
    [
        (["hi"], "messages[0]", "must be an object"),
        ([{"role": 7, "content": "x"}], "messages[0].role", "must be a string"),
        ([{"role": "user", "content": 7}], "messages[0].content", "must be a string or a list of parts"),
        (
            [{"role": "user", "content": [{"type": "image_url"}]}],
            "messages[0].content[0].type",
            "must be text: other parts are not supported",
        ),
        (
            [{"role": "user", "content": [{"type": "text", "text": 7}]}],
            "messages[0].content[0].text",
            "must be a string",
        ),
        (
            [{"role": "user", "content": [{"type": "text"}]}],
            "messages[0].content[0].text",
            "must be a string",
        ),
        (_calls({"id": "c", "function": 7}), "messages[0].tool_calls[0].function", "must be an object"),
        (
            _calls({"id": "c", "function": {"name": 7}}),
            "messages[0].tool_calls[0].function.name",
            "must be a string",
        ),
        (
            _calls({"id": "c", "type": "custom", "custom": {"name": 7}}),
            "messages[0].tool_calls[0].custom.name",
            "must be a string",
        ),
        (
            _calls({"id": "c", "type": "custom", "custom": "run"}),
            "messages[0].tool_calls[0].custom",
            "must be an object",
        ),
        (
            _calls({"id": "c", "type": "custom", "function": {"name": "run"}}),
            "messages[0].tool_calls[0].type",
            "must be function",
        ),
    ],
)
def test_messages_are_refused_as_over_http(messages: list[Any], field: str, words: str) -> None:
    with pytest.raises(InvalidArgument) as ours:
        chat_request(messages, {})
    with pytest.raises(InvalidArgument) as routers:
        parse_chat(json.dumps({"messages": messages}).encode())
    assert (ours.value.field, ours.value.message) == (field, f"{field}: {words}")
    assert ours.value.message == routers.value.message


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"temperature": "hot"}, "temperature: must be a number"),
        ({"max_tokens": 1.5}, "max_tokens: must be a whole number"),
        ({"ignore_eos": "yes"}, "ignore_eos: must be true or false"),
        ({"top_k": -1}, "top_k: must be a whole number from 0 to 262144, not -1"),
        (
            {"seed": 1 << 63},
            f"seed: must be a whole number from {-(1 << 63)} to {(1 << 63) - 1}, not {1 << 63}",
        ),
        ({"max_tokens": 1 << 63}, f"max_tokens: is out of range: {1 << 63}"),
        ({"model": "\ud800"}, "model: must be valid UTF-8"),
        ({"stop": 3}, "stop: must be a string or a list of strings"),
        ({"stop": ["a", 3]}, "stop: must be a string or a list of strings"),
        ({"logit_bias": {"a": 1.0}}, "logit_bias: must be a mapping of the right types"),
        ({"metadata": 3}, "metadata: must be a mapping of the right types"),
    ],
)
def test_arguments_that_no_message_can_hold_are_refused(arguments: Any, message: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        prompt_request("hi", arguments)
    assert caught.value.message == message


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"tools": ["f"]}, "tools[0].type: must be function"),
        ({"tools": [{"type": "function"}]}, "tools[0].function: must be an object"),
        (
            {"tools": [{"type": "function", "function": {"name": "f", "parameters": {"default": {1}}}}]},
            "tools[0].function.parameters: must be a JSON Schema",
        ),
        (
            {"tool_choice": {"type": "function"}},
            "tool_choice: must be none, auto, required, a function or allowed_tools",
        ),
    ],
)
def test_tools_that_no_message_can_hold_are_refused(arguments: Any, message: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        chat_request([USER], arguments)
    assert caught.value.message == message


@pytest.mark.parametrize("token_ids", [[1, 2, 3], (1, 2, 3), range(1, 4)])
def test_a_prompt_may_be_token_ids(token_ids: Sequence[int]) -> None:
    request = prompt_request(token_ids, {"max_tokens": 2})
    assert request.WhichOneof("input") == "token_ids" and list(request.token_ids.ids) == [1, 2, 3]
    assert prompt_request([], {}).WhichOneof("input") == "token_ids"  # the router's to refuse


@pytest.mark.parametrize("prompt", [7, None, [1.5], ["a"], [-1], [1 << 32], [[1]], [USER], b"ab", {1: 2}])
def test_a_prompt_that_is_neither_text_nor_token_ids_is_refused(prompt: Any) -> None:
    with pytest.raises(InvalidArgument) as caught:
        prompt_request(prompt, {})
    assert caught.value.message == "prompt: must be a string or a list of token ids"


def test_a_prompt_that_is_no_utf8_is_refused() -> None:
    with pytest.raises(InvalidArgument, match=r"^prompt: must be valid UTF-8$"):
        prompt_request("\ud800", {})


def test_an_unknown_argument_is_the_callers_mistake() -> None:
    with pytest.raises(TypeError, match="unexpected argument 'temprature'"):
        prompt_request("hi", {"temprature": 1})  # type: ignore[typeddict-unknown-key]


def test_everything_is_sent() -> None:
    request = prompt_request(
        "hi",
        {
            "model": "m",
            "stop": ("a", "b"),
            "logit_bias": {7: -1.0},
            "metadata": {"k": "v"},
            "priority": "bulk",
            "reject_if_busy": True,
            "session": "not part of the message",
        },
    )
    assert (request.prompt, request.model, list(request.stop)) == ("hi", "m", ["a", "b"])
    assert dict(request.sampling.logit_bias) == {7: -1.0}
    assert (dict(request.metadata), request.reject_if_busy) == ({"k": "v"}, True)
    assert request.priority == router_pb2.PRIORITY_BULK
    asked = _calls({"id": "functions.f:0", "function": {"name": "f", "arguments": "{}"}})
    sent = chat_request([*asked, {"role": "tool", "tool_call_id": "functions.f:0", "content": "1"}], {})
    assert sent.chat.messages[0].tool_calls[0].arguments == "{}"
    assert sent.chat.messages[1].tool_call_id == "functions.f:0"


def test_echoed_fields_are_left_out_and_arguments_may_be_an_object() -> None:
    call = {"id": "c", "function": {"name": "look", "arguments": {"q": "ü"}}}
    message = {"role": "assistant", "content": "a", "tool_calls": [call], "thinking_blocks": None}
    (sent,) = chat_request([message], {}).chat.messages
    assert sent.tool_calls[0].arguments == '{"q": "ü"}'


@pytest.mark.parametrize(
    "call",
    [
        {"id": "c", "type": "custom", "custom": {"name": "run", "input": "ls"}},
        {"id": "c", "type": "function", "function": {"name": "run", "arguments": "ls"}},
        {"id": "c", "name": "run", "arguments": "ls"},
    ],
)
def test_a_call_of_each_form_keeps_its_name_and_its_arguments_as_over_http(call: dict[str, Any]) -> None:
    (sent,) = chat_request(_calls(call), {}).chat.messages[0].tool_calls
    (request, *_), _options = parse_chat(json.dumps({"messages": [USER, *_calls(call)]}).encode())
    assert isinstance(request.input, ChatInput)
    (over_http,) = request.input.messages[1]["tool_calls"]
    function = over_http["function"]
    assert (sent.id, sent.name, sent.arguments) == ("c", "run", "ls")
    assert (over_http["id"], function["name"], function["arguments"]) == ("c", "run", "ls")


def test_stop_tokens_and_limits_are_sent() -> None:
    request = chat_request(
        [USER], {"stop_token_ids": [7, 8], "min_tokens": 2, "keeps_reasoning": True, "thinking": False}
    )
    assert (list(request.sampling.stop_token_ids), request.sampling.min_tokens) == ([7, 8], 2)
    assert (request.keeps_reasoning, request.HasField("thinking")) == (True, True)
    with pytest.raises(InvalidArgument, match="stop_token_ids: must be a list of token ids"):
        chat_request([USER], {"stop_token_ids": ["x"]})  # type: ignore[list-item]
