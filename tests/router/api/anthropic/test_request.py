"""Bodies of Anthropic's API: what they become, what is refused by name, and that answers come back whole."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given

from services.router.api.anthropic.request import MessagesRequest, parse_count_body, parse_messages_body
from services.router.api.anthropic.writer import MessageShape, MessageWriter
from services.router.request.types import ChatInput, ToolChoice
from slipstream.errors import InvalidArgument
from tests.router.support.answer_events import STARTED, Delta, answers, call, finished, parts_of

USER = {"role": "user", "content": "hi"}
TOOL = {"name": "look", "description": "Looks.", "input_schema": {"type": "object"}}


def parse(**body: Any) -> MessagesRequest:
    return parse_messages_body(json.dumps({"max_tokens": 4000, "messages": [USER], **body}).encode())


def chat_of(request: MessagesRequest) -> ChatInput:
    assert isinstance(request.generation.input, ChatInput)
    return request.generation.input


def test_a_conversation_with_tools() -> None:
    answer = [
        {"type": "thinking", "thinking": "Hm", "signature": "x"},
        {"type": "text", "text": "Wait."},
        {"type": "tool_use", "id": "c1", "name": "look", "input": {"b": 1, "a": "\u00e9"}},
    ]
    result = {"type": "tool_result", "tool_use_id": "c1", "content": [{"type": "text", "text": "found"}]}
    request = parse(
        system=[
            {"type": "text", "text": "Be "},
            {"type": "text", "text": "brief.", "cache_control": {"type": "ephemeral"}},
        ],
        messages=[
            USER,
            {"role": "assistant", "content": answer},
            {"role": "user", "content": [{**result, "is_error": True}, {"type": "text", "text": "and?"}]},
        ],
        tools=[{**TOOL, "cache_control": {"type": "ephemeral"}, "eager_input_streaming": True}],
        tool_choice={"type": "any", "disable_parallel_tool_use": True},
    )
    chat = chat_of(request)
    assert chat.messages == [
        {"role": "system", "content": "Be brief."},
        USER,
        {
            "role": "assistant",
            "content": "Wait.",
            "reasoning_content": "Hm",
            "tool_calls": [
                {
                    "id": "c1",
                    "type": "function",
                    "function": {"name": "look", "arguments": '{"b": 1, "a": "\u00e9"}'},
                }
            ],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "found"},
        {"role": "user", "content": "and?"},
    ]
    function = {"name": "look", "description": "Looks.", "parameters": {"type": "object"}}
    assert chat.tools == [{"type": "function", "function": function}]
    assert (chat.tool_choice, chat.parallel_tool_calls) == (ToolChoice("required"), False)
    ignored = set(request.ignored.header().split(","))
    assert ignored == {"messages[].content[].is_error", "tools[].eager_input_streaming"}


def test_a_whole_body() -> None:
    request = parse(
        max_tokens=4000,
        thinking={"type": "enabled", "budget_tokens": 2000, "display": "omitted"},
        stop_sequences=["###", ""],
        temperature=0.5,
        top_k=5,
        top_p=0.9,
        metadata={"user_id": "u1"},
        stream=True,
        service_tier="auto",
        output_config={"effort": "high", "format": {"type": "json_schema", "schema": {"type": "object"}}},
        context_management={"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        some_new_field=1,
    )
    generation, chat = request.generation, chat_of(request)
    assert generation.sampling.given == {"temperature": 0.5, "top_k": 5, "top_p": 0.9}
    assert (generation.sampling.max_tokens, generation.is_capped_by_context) == (4000, True)
    assert generation.stop == ["###"]
    assert generation.output is not None
    assert (generation.output.content, generation.output.field) == (
        {"type": "object"},
        "output_config.format.schema",
    )
    assert (chat.thinking, chat.keeps_reasoning) == (True, True)
    assert (request.session, request.stream, request.shows_thinking) == ("u1", True, False)
    ignored = set(request.ignored.header().split(","))
    assert ignored == {"some_new_field", "service_tier", "thinking.budget_tokens", "output_config.effort"}


@pytest.mark.parametrize(
    ("thinking", "thinks"),
    [(None, False), ({"type": "disabled"}, False), ({"type": "adaptive"}, True), ({"type": "enabled"}, True)],
)
def test_the_model_thinks_where_it_is_asked_to(thinking: Any, thinks: bool) -> None:
    assert chat_of(parse(thinking=thinking)).thinking is thinks


PREFILL = {"role": "assistant", "content": "The answer"}
TOOL_USE = {"type": "tool_use", "id": "t", "name": "f", "input": {}}
IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": ""}}


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": [IMAGE]}]}, "messages[0].content[0].type"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
        ({"messages": [USER, {"role": "assistant", "content": "The answer "}]}, "messages[1].content"),
        ({"messages": [USER, {"role": "assistant", "content": [TOOL_USE]}]}, "messages[1].content"),
        ({"messages": [USER, PREFILL], "thinking": {"type": "adaptive"}}, "thinking"),
        ({"system": [IMAGE]}, "system[0].type"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0].type"),
        ({"tool_choice": {"type": "some"}}, "tool_choice.type"),
        ({"thinking": {"type": "on"}}, "thinking.type"),
        ({"thinking": {"type": "enabled", "budget_tokens": 10}}, "thinking.budget_tokens"),
        ({"thinking": {"type": "enabled", "budget_tokens": 4000}}, "thinking.budget_tokens"),
        ({"stop_sequences": [5]}, "stop_sequences[0]"),
        ({"output_config": {"format": {"type": "xml"}}}, "output_config.format.type"),
        ({"output_format": {"type": "json_schema"}}, "output_format.schema"),
        ({"output_config": {"effort": "huge"}}, "output_config.effort"),
        (
            {"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}},
            "context_management.edits[0].type",
        ),
        ({"mcp_servers": [{"type": "url"}]}, "mcp_servers"),
        ({"container": "c"}, "container"),
        ({"inference_geo": "eu"}, "inference_geo"),
    ],
)
def test_what_is_refused_is_named(body: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidArgument) as refused:
        parse(**body)
    assert refused.value.field == field


def test_an_error_of_the_common_check_has_the_path_of_this_body() -> None:
    result = {"type": "tool_result", "tool_use_id": "c1"}
    texts = [{"type": "text", "text": "a"}, result, {"type": "text", "text": "b"}]
    request = parse(system="x", messages=[{"role": "user", "content": texts}], tools=[TOOL])
    for path, shown in {
        "messages[2].tool_call_id": "messages[0].content[1].tool_use_id",
        "messages[3].content": "messages[0].content[2].content",
        "messages[0].content": "system.content",
        "tools[0].function.parameters": "tools[0].input_schema",
        "stop": "stop_sequences",
    }.items():
        assert request.paths.renamed(InvalidArgument(path, "is wrong")).field == shown


def test_a_body_to_count_needs_no_max_tokens() -> None:
    request = parse_count_body(json.dumps({"messages": [USER], "tools": [TOOL], "system": "x"}).encode())
    assert len(chat_of(request).messages) == 2
    assert not request.ignored.count


@given(deltas=answers())
def test_an_answer_that_is_sent_back_is_what_the_model_wrote(deltas: list[Delta]) -> None:
    reasoning, text, calls = parts_of(deltas)
    deltas = [delta for delta in deltas if not delta.tool_calls]
    for index in range(len(calls)):
        deltas.append(call(index, json.dumps({"x": index}), call_id=f"c{index}", name="look"))
    for shows_thinking in (True, False):
        writer = MessageWriter(STARTED, MessageShape(9, shows_thinking=shows_thinking))
        for delta in deltas:
            writer.add(delta)
        content = writer.body(finished())["content"]
        results = [{"type": "tool_result", "tool_use_id": f"c{index}"} for index in range(len(calls))]
        request = parse(
            messages=[USER, {"role": "assistant", "content": content}, {"role": "user", "content": results}]
        )
        message = chat_of(request).messages[1]
        assert parts_of([delta for delta in deltas if not delta.tool_calls])[:2] == (
            message.get("reasoning_content", ""),
            message["content"],
        )
        made = [made["function"]["arguments"] for made in message.get("tool_calls", [])]
        assert made == [json.dumps({"x": index}) for index in range(len(calls))]
        assert not request.ignored.count
    assert len(reasoning) + len(text) >= 0


@pytest.mark.parametrize("kind", [{}, {"role": "user"}, [], 1, None])
def test_a_block_whose_type_is_no_string_is_refused(kind: Any) -> None:
    message = {"role": "user", "content": [{"type": kind, "text": "a"}]}
    with pytest.raises(InvalidArgument, match=r"messages\[0\]\.content\[0\]\.type"):
        parse(messages=[message])
