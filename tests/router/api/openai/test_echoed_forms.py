"""Messages in forms of older clients and other servers have the prompt of the same message of today."""

from __future__ import annotations

import json
from typing import Any

import pytest

from libs.text.chat_template import render_chat
from services.router.api.openai.request import parse_chat
from services.router.request.types import ChatInput
from services.router.request.validation import validate
from slipstream import bounds
from slipstream.errors import InvalidArgument

HI: Any = {"role": "user", "content": "hi"}


def call(call_id: str = "functions.look:0", name: str = "look", arguments: str = '{"a": 1}') -> Any:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def calling(*calls: Any, content: Any = None, **fields: Any) -> Any:
    return {
        "role": "assistant",
        "content": content,
        **({"tool_calls": list(calls)} if calls else {}),
        **fields,
    }


def result(content: Any, call_id: Any = "functions.look:0") -> Any:
    return {"role": "tool", "tool_call_id": call_id, "content": content}


def prompt(*messages: Any) -> tuple[str, str]:
    """The text of the prompt, and the ignored fields."""
    (request, *_), options = parse_chat(json.dumps({"messages": [HI, *messages]}).encode())
    assert isinstance(request.input, ChatInput)
    validate(request, models=[""], vocab_size=1000, max_context_tokens=1000)
    segments = render_chat(request.input.messages, thinking=True)
    return "".join(segment.text for segment in segments), options.ignored


OLDER_CALL = {
    "role": "assistant",
    "content": None,
    "function_call": {"name": "look", "arguments": '{"a": 1}'},
}
PART = {"type": "tool_use", "id": "functions.look:0", "name": "look", "input": {"a": 1}}
FORMS: dict[str, tuple[list[Any], list[Any]]] = {
    "function_call and its result": (
        [OLDER_CALL, {"role": "function", "name": "look", "content": "4"}],
        [calling(call()), result("4")],
    ),
    "two older calls": (
        [
            OLDER_CALL,
            {"role": "function", "name": "look", "content": "4"},
            OLDER_CALL,
            {"role": "function", "name": "look", "content": "5"},
        ],
        [calling(call()), result("4"), calling(call("functions.look:1")), result("5", "functions.look:1")],
    ),
    "ids that are numbers": (
        [calling({**call(), "id": 7}), result("4", 7)],
        [calling(call("7")), result("4", "7")],
    ),
    "a call with its fields at the top": (
        [calling({"id": "c", "name": "look", "arguments": {"a": 1}}), result("4", "c")],
        [calling(call("c")), result("4", "c")],
    ),
    "a call without function": (
        [calling({"id": "c", "type": "function"}), result("4", "c")],
        [calling(call("c", "", "{}")), result("4", "c")],
    ),
    "a custom call": (
        [calling({"id": "c", "type": "custom", "custom": {"name": "run", "input": "ls"}})],
        [calling(call("c", "run", "ls"))],
    ),
    "a result without an id": (
        [calling(call("c")), {"role": "tool", "content": "4"}],
        [calling(call("c")), result("4", "c")],
    ),
    "results without ids of parallel calls": (
        [calling(call("a"), call("b")), {"role": "tool", "content": "4"}, {"role": "tool", "content": "5"}],
        [calling(call("a"), call("b")), result("4", "a"), result("5", "b")],
    ),
    "results by name of parallel calls": (
        [
            calling(call("a"), call("b", "run"), call("c")),
            {"role": "tool", "name": "run", "content": "4"},
            {"role": "tool", "name": "look", "content": "5"},
            {"role": "tool", "name": "look", "content": "6"},
        ],
        [
            calling(call("a"), call("b", "run"), call("c")),
            {**result("4", "b"), "name": "run"},
            {**result("5", "a"), "name": "look"},
            {**result("6", "c"), "name": "look"},
        ],
    ),
    "a result without an id after one with an id": (
        [calling(call("a"), call("b")), result("4", "a"), {"role": "tool", "content": "5"}],
        [calling(call("a"), call("b")), result("4", "a"), result("5", "b")],
    ),
    "a result without an id after a call that was given up": (
        [calling(call("a")), HI, calling(call("b")), {"role": "tool", "content": "5"}],
        [calling(call("a")), HI, calling(call("b")), result("5", "b")],
    ),
    "a second result without an id": (
        [calling(call("a")), {"role": "tool", "content": "4"}, {"role": "tool", "content": "5"}],
        [calling(call("a")), result("4", "a"), result("5", "a")],
    ),
    "results as values": (
        [calling(call()), result({"ok": True, "ü": [1]}), result([1, {"a": None}]), result(4)],
        [calling(call()), result('{"ok": true, "ü": [1]}'), result('[1, {"a": null}]'), result("4")],
    ),
    "results as objects with types of their own": (
        [
            calling(call()),
            result([{"type": "dog", "name": "rex"}]),
            result([{"type": "file", "name": "a.py"}, {"type": "directory", "name": "b"}]),
            result([]),
        ],
        [
            calling(call()),
            result('[{"type": "dog", "name": "rex"}]'),
            result('[{"type": "file", "name": "a.py"}, {"type": "directory", "name": "b"}]'),
            result("[]"),
        ],
    ),
    "results as parts": (
        [calling(call()), result([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}])],
        [calling(call()), result("ab")],
    ),
    "tool_use among the parts": (
        [calling(content=[{"type": "text", "text": "so"}, PART]), result("4")],
        [calling(call(), content="so"), result("4")],
    ),
    "reasoning as an object": (
        [calling(call(), reasoning={"content": "I think", "effort": "low"})],
        [calling(call(), reasoning_content="I think")],
    ),
    "reasoning as a list": (
        [calling(call(), reasoning=[{"type": "x", "text": "I "}, {"summary": [{"text": "think"}]}])],
        [calling(call(), reasoning_content="I think")],
    ),
}


@pytest.mark.parametrize("form", FORMS)
def test_an_echoed_form_has_the_prompt_of_todays_form(form: str) -> None:
    echoed, todays = FORMS[form]
    assert prompt(*echoed) == prompt(*todays)
    assert prompt(*echoed)[1] == ""


def test_what_stands_twice_is_rendered_once_and_named() -> None:
    twice = calling(call(), content=[PART], function_call=OLDER_CALL["function_call"])
    text, ignored = prompt(twice, result("4"))
    assert text == prompt(calling(call()), result("4"))[0]
    assert ignored == "messages[].content[],messages[].function_call"


def test_reasoning_without_a_text_is_named() -> None:
    assert prompt(calling(content="a", reasoning={"effort": "low"}))[1] == "messages[].reasoning"


def test_a_result_that_answers_no_call_is_refused_by_its_field() -> None:
    for message, field in (
        ({"role": "function", "name": "other", "content": "4"}, "messages[2].name"),
        ({"role": "tool", "tool_call_id": "x", "content": "4"}, "messages[2].tool_call_id"),
    ):
        with pytest.raises(InvalidArgument, match="answers no tool call") as refused:
            prompt(calling(call()), message)
        assert refused.value.field == field


def test_a_part_of_a_call_needs_an_id_and_a_name() -> None:
    for name in ("id", "name"):
        with pytest.raises(InvalidArgument, match="must be a string") as refused:
            prompt(calling(content=[{**PART, name: None}]))
        assert refused.value.field == f"messages[1].content[0].{name}"


@pytest.mark.parametrize("depth", [500, 900, 999])
def test_values_that_are_nested_deep_are_taken_or_refused(depth: int) -> None:
    deep = "[" * depth + "]" * depth
    for message in (
        f'{{"role": "tool", "tool_call_id": "x", "content": {deep}}}',
        f'{{"role": "assistant", "content": "a", "reasoning": {deep}}}',
        f'{{"role": "assistant", "tool_calls": [{{"function": {{"name": "a", "arguments": {deep}}}}}]}}',
    ):
        body = f'{{"messages": [{message}]}}'.encode()
        if depth < bounds.MAX_JSON_DEPTH - 10:
            parse_chat(body)
        else:
            with pytest.raises(InvalidArgument, match=bounds.BODY_DEPTH.words):
                parse_chat(body)


def test_too_many_calls_are_refused_before_any_is_read() -> None:
    unreadable = {"id": "c", "type": "other"}  # which has another refusal
    with pytest.raises(InvalidArgument) as refusal:
        prompt(calling(*[unreadable] * (bounds.TOOL_CALLS.high + 1)))
    assert refusal.value.field == "messages[1].tool_calls"


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image_url", "image_url": {"url": "data:,"}},
        {"type": "file", "file": {"file_id": "f"}},
        {"type": "input_text", "text": "a"},
    ],
)
def test_another_part_of_a_message_is_no_result_as_a_value(part: Any) -> None:
    with pytest.raises(InvalidArgument) as refusal:
        prompt(calling(call()), result([part]))
    assert refusal.value.field == "messages[2].content[0].type"
