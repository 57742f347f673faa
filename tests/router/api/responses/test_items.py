"""Items of the Responses API become the messages that the model wrote and read."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given

from services.router.api.answers.field_paths import MessageSources
from services.router.api.openai.ignored_fields import IgnoredFields
from services.router.api.responses.items import add_items
from services.router.api.responses.request import (
    EarlierItems,
    ResponsesRequest,
    decode_response,
    parse_response,
)
from services.router.api.responses.rpc.messages import item_message
from services.router.api.responses.writer import ResponsesShape, ResponsesWriter
from services.router.request.types import ChatInput, ToolChoice
from slipstream.errors import InvalidArgument
from tests.router.support.answer_events import STARTED, Delta, answers, finished, parts_of

USER = {"role": "user", "content": "hi"}
CALL = {"type": "function_call", "call_id": "c1", "name": "look", "arguments": '{"x":1}'}
OUTPUT = {"type": "function_call_output", "call_id": "c1", "output": "found"}
REASONING = {"type": "reasoning", "id": "rs_1", "summary": [{"type": "summary_text", "text": "Hm"}]}
TOOL = {"type": "function", "name": "look", "parameters": {"type": "object"}}


def messages_of(*items: Any) -> list[dict[str, Any]]:
    into = MessageSources()
    add_items(into, [(f"input[{index}]", item) for index, item in enumerate(items)], lambda path: None)
    return into.messages


def parse(**body: Any) -> ResponsesRequest:
    draft = decode_response(json.dumps({"input": "hi", **body}).encode())
    return parse_response(draft, EarlierItems(), is_stored=False)


def chat_of(request: ResponsesRequest) -> ChatInput:
    assert isinstance(request.generation.input, ChatInput)
    return request.generation.input


def test_items_of_one_answer_are_one_message() -> None:
    text = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Wait."}]}
    call = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": '{"x":1}'}}
    other = {**call, "id": "c2"}
    assert messages_of(USER, REASONING, text, CALL, {**CALL, "call_id": "c2"}, OUTPUT, REASONING, text) == [
        USER,
        {"role": "assistant", "reasoning_content": "Hm", "content": "Wait.", "tool_calls": [call, other]},
        {"role": "tool", "tool_call_id": "c1", "content": "found"},
        {"role": "assistant", "reasoning_content": "Hm", "content": "Wait."},
    ]


def test_texts_that_follow_each_other_stay_separate() -> None:
    answer = {"role": "assistant", "content": "a"}
    parts = [{"type": "input_text", "text": "x"}, {"type": "input_text", "text": "y"}]
    assert messages_of(answer, answer, {"role": "developer", "content": parts}) == [
        answer,
        answer,
        {"role": "developer", "content": "xy"},
    ]


@pytest.mark.parametrize(
    ("output", "text"),
    [
        ({"ok": True, "ü": [1]}, '{"ok": true, "ü": [1]}'),
        ([1, {"a": None}], '[1, {"a": null}]'),
        ([{"type": "dog", "name": "rex"}], '[{"type": "dog", "name": "rex"}]'),
        (4, "4"),
        ([{"type": "input_text", "text": "a"}, {"type": "output_text", "text": "b"}], None),
        ([{"type": "input_text", "text": "a"}, {"type": "text", "text": "b"}], "ab"),
        ([{"type": "input_image", "image_url": "x"}], None),
        (None, None),
    ],
)
def test_a_result_may_be_a_value_as_in_chat(output: Any, text: str | None) -> None:
    """None: it is refused by its path."""
    item = {**OUTPUT, "output": output}
    if text is None:
        with pytest.raises(InvalidArgument, match=r"^input\[1\]\.output"):
            messages_of(CALL, item)
        return
    assert messages_of(CALL, item)[1] == {"role": "tool", "tool_call_id": "c1", "content": text}
    assert item_message(item).tool_result.output == text


def test_reasoning_that_led_to_nothing_is_left_out() -> None:
    assert messages_of(REASONING, USER, REASONING) == [USER]


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"input": 5}, "input"),
        ({"input": []}, "input"),
        ({"input": ["x"]}, "input[0]"),
        ({"input": [{"type": "web_search_call", "id": "ws_1"}]}, "input[0].type"),
        ({"input": [{"role": "tool", "content": "x"}]}, "input[0].role"),
        ({"input": [{"role": {}, "content": "x"}]}, "input[0].role"),
        ({"input": [{"role": [], "content": "x"}]}, "input[0].role"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0].type"),
        ({"input": [{"role": "user", "content": [{"type": "input_text"}]}]}, "input[0].content[0].text"),
        ({"input": [{**CALL, "name": None}]}, "input[0].name"),
        ({"input": [{"role": "user", "content": "x", "id": 5}]}, "input[0].id"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [{"type": "custom", "name": "patch"}]}, "tools[0].type"),
        ({"tool_choice": {"type": "web_search_preview"}}, "tool_choice"),
        ({"tool_choice": {"type": "function"}}, "tool_choice.name"),
        ({"text": {"format": {"type": "xml"}}}, "text.format.type"),
        ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format.schema"),
        ({"reasoning": {"effort": "huge"}}, "reasoning.effort"),
        ({"reasoning": {"summary": "long"}}, "reasoning.summary"),
        ({"truncation": "auto"}, "truncation"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"prompt": {"id": "pmpt_1"}}, "prompt"),
        ({"max_tokens": 5}, "max_tokens"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"store": "yes"}, "store"),
    ],
)
def test_what_is_refused_is_named(body: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidArgument) as refused:
        parse(**body)
    assert refused.value.field == field


def test_a_whole_body() -> None:
    schema = {"type": "object", "properties": {}}
    request = parse(
        instructions="Be brief.",
        tools=[{**TOOL, "strict": True, "description": "Looks."}],
        tool_choice={"type": "function", "name": "look"},
        text={"format": {"type": "json_schema", "name": "x", "schema": schema, "strict": True}},
        reasoning={"effort": "low", "summary": "auto"},
        max_output_tokens=7,
        temperature=0.5,
        parallel_tool_calls=False,
        include=["reasoning.encrypted_content", "message.output_text.logprobs"],
        metadata={"a": "b"},
        prompt_cache_key="s1",
        user="u",
        some_new_field=1,
        store=False,
    )
    chat, generation = chat_of(request), request.generation
    assert chat.messages == [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hi"}]
    function = {"name": "look", "parameters": {"type": "object"}, "strict": True, "description": "Looks."}
    assert [dict(tool["function"]) for tool in chat.tools] == [function]
    assert chat.tool_choice == ToolChoice("function", "look")
    assert (chat.thinking, chat.parallel_tool_calls, request.has_summary) == (True, False, True)
    assert generation.output is not None
    assert (generation.output.content, generation.output.field) == (schema, "text.format.schema")
    assert (generation.sampling.max_tokens, generation.sampling.given) == (7, {"temperature": 0.5})
    assert generation.sampling.top_logprobs == 0
    assert request.session == "s1"
    assert set(request.ignored.header().split(",")) == {"some_new_field", "include[]", "user"}
    assert request.echo["tools"][0]["name"] == "look"
    assert request.echo["text"]["format"]["name"] == "x"


def test_an_error_of_the_common_check_has_the_path_of_this_body() -> None:
    request = parse(input=[USER, REASONING, CALL, OUTPUT], instructions="x")
    paths = request.paths
    for path, shown in {
        "messages[0].content": "instructions.content",
        "messages[3].tool_call_id": "input[3].call_id",
        "messages[2].tool_calls[0].id": "input[1].tool_calls[0].id",
        "tools[4].function.name": "tools[4].name",
        "tools[4].function": "tools[4]",
        "tool_choice.function.name": "tool_choice.name",
        "messages": "input",
        "temperature": "temperature",
    }.items():
        renamed = paths.renamed(InvalidArgument(path, "is wrong"))
        assert (renamed.field, renamed.reason) == (shown, "is wrong")


def test_references_name_what_the_database_has_to_supply() -> None:
    body = {"input": [{"id": "msg_k_0"}, {"type": "item_reference", "id": "fc_k_1"}, OUTPUT]}
    draft = decode_response(json.dumps({**body, "previous_response_id": "resp_j"}).encode())
    assert (draft.previous_id, draft.references) == ("resp_j", ["msg_k_0", "fc_k_1"])
    answer = {"type": "message", "role": "assistant", "content": "Wait.", "id": "msg_k_0"}
    earlier = EarlierItems([USER], {"msg_k_0": answer, "fc_k_1": CALL})
    request = parse_response(draft, earlier, is_stored=True)
    roles = [message["role"] for message in chat_of(request).messages]
    assert roles == ["user", "assistant", "tool"]
    assert request.items == [answer, CALL, OUTPUT]
    assert request.echo["previous_response_id"] == "resp_j"


@given(deltas=answers())
def test_an_answer_that_is_sent_back_is_what_the_model_wrote(deltas: list[Delta]) -> None:
    reasoning, text, arguments = parts_of(deltas)
    for has_summary in (False, True):
        writer = ResponsesWriter(STARTED, ResponsesShape("k", {}, has_summary=has_summary))
        for delta in deltas:
            writer.add(delta)
        ignored = IgnoredFields()
        into = MessageSources()
        add_items(into, [("input[0]", item) for item in writer.body(finished())["output"]], ignored.add)
        if not text and not arguments:
            assert not into.messages
            continue
        (message,) = into.messages
        assert message.get("reasoning_content", "") == reasoning
        assert message["content"] == text
        calls = [call["function"]["arguments"] for call in message.get("tool_calls", [])]
        assert calls == [given or "{}" for given in arguments]
        assert not ignored.count
