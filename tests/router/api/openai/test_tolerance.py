"""What clients send beside the fields of the API: taken and named, refused by name, or given a meaning."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from libs.structured.answer_grammar import OutputFormat
from services.router.api.anthropic.request import parse_messages_body
from services.router.api.description.openapi import openapi_json
from services.router.api.openai.ignored_fields import MAX_HEADER_BYTES, IgnoredFields
from services.router.api.openai.request import BODIES, ResponseOptions, parse_chat, parse_completion
from services.router.api.openai.unsupported import (
    ANSWER_CHANGING,
    OF_CHAT_ONLY,
    SWITCHES_OF_CHAT,
    TEXTS_ELSEWHERE,
)
from services.router.api.responses.request import EarlierItems, decode_response, parse_response
from services.router.request.choices import choice_id, choice_seed
from services.router.request.types import ChatInput, GenerationRequest, PromptInput, ToolChoice
from slipstream.errors import InvalidArgument

HI: Any = {"role": "user", "content": "hi"}
FUNCTION: Any = {"name": "look", "arguments": "{}"}


def chat(**fields: Any) -> tuple[GenerationRequest, ResponseOptions]:
    requests, options = parse_chat(json.dumps({"messages": [HI], **fields}).encode())
    return requests[0], options


def history(call: dict[str, Any] | None = None, **fields: Any) -> tuple[list[Any], str]:
    """The messages and the ignored fields of a body with an assistant message."""
    message = {"role": "assistant", "content": "a", **({"tool_calls": [call]} if call else {}), **fields}
    request, options = chat(messages=[HI, message])
    assert isinstance(request.input, ChatInput)
    return list(request.input.messages), options.ignored


ECHOED: dict[str, Any] = {
    "provider_specific_fields": {"refusal": None},
    "reasoning_details": [{"type": "x"}],
    "thinking_blocks": None,
    "id": "msg_1",
    "timestamp": 1.5,
    "cache_control": {"type": "ephemeral"},
    "is_error": False,
    "refusal": "no",
    "annotations": [{"type": "url_citation"}],
}


@pytest.mark.parametrize("name", ECHOED)
def test_an_unknown_field_of_a_message_is_left_out_and_named(name: str) -> None:
    messages, ignored = history(**{name: ECHOED[name]})
    assert messages[1] == {"role": "assistant", "content": "a"}
    assert ignored == f"messages[].{name}"


def test_unknown_fields_of_parts_tools_and_calls_are_left_out_and_named() -> None:
    messages, ignored = history({"id": "c", "function": {**FUNCTION, "x": 1}, "extra_content": {}})
    assert messages[1]["tool_calls"] == [{"id": "c", "type": "function", "function": FUNCTION}]
    assert ignored == "messages[].tool_calls[].extra_content,messages[].tool_calls[].function.x"
    part = {"type": "text", "text": "hi", "cache_control": {"type": "ephemeral"}}
    request, options = chat(messages=[{"role": "user", "content": [part]}])
    assert isinstance(request.input, ChatInput)
    assert (request.input.messages[0]["content"], options.ignored) == (
        "hi",
        "messages[].content[].cache_control",
    )
    tool = {"type": "function", "function": {"name": "look", "examples": []}, "cache_control": {}}
    request, options = chat(tools=[tool])
    assert isinstance(request.input, ChatInput)
    assert request.input.tools == [{"type": "function", "function": {"name": "look"}}]
    assert options.ignored == "tools[].cache_control,tools[].function.examples"


@pytest.mark.parametrize(
    ("given", "rendered"),
    [
        ("", "{}"),
        (None, "{}"),
        ("{bad", "{bad"),
        ('{"a": 1}', '{"a": 1}'),
        ({"a": "ü", "b": [1]}, '{"a": "ü", "b": [1]}'),
        ([1], "[1]"),
    ],
)
def test_arguments_of_a_call_in_history_never_end_a_session(given: Any, rendered: str) -> None:
    messages, _ = history({"id": "c", "function": {"name": "look", "arguments": given}})
    assert messages[1]["tool_calls"][0]["function"]["arguments"] == rendered


def test_a_call_without_an_id_gets_the_one_of_kimis_format() -> None:
    calls = [{"function": {"name": "look", "arguments": "{}"}} for _ in range(2)]
    request, _ = chat(messages=[HI, *[{"role": "assistant", "tool_calls": [call]} for call in calls]])
    assert isinstance(request.input, ChatInput)
    ids = [message["tool_calls"][0]["id"] for message in request.input.messages[1:]]
    assert ids == ["functions.look:0", "functions.look:1"]


@pytest.mark.parametrize("content", [None, [], ""])
def test_content_may_be_empty(content: Any) -> None:
    request, _ = chat(messages=[{"role": "user", "content": content}])
    assert isinstance(request.input, ChatInput)
    assert not request.input.messages[0].get("content")


def test_reasoning_of_other_servers_is_reasoning() -> None:
    messages, ignored = history(reasoning="so")
    assert (messages[1]["reasoning_content"], ignored) == ("so", "")
    thought = {"type": "thinking", "thinking": "t"}
    messages, ignored = history(content=[thought, {"type": "text", "text": "x"}])
    assert (messages[1]["content"], ignored) == ("x", "messages[].content[]")


def test_an_unknown_top_level_field_is_named_and_counted() -> None:
    _, options = chat(temprature=1, nvext={}, store=True, verbosity="low", user="u", next_year=None)
    assert options.ignored == "temprature,nvext,next_year,store,verbosity"
    assert options.n_ignored == 5


@pytest.mark.parametrize("name", sorted(ANSWER_CHANGING))
def test_a_field_that_would_change_the_answer_is_refused_by_name(name: str) -> None:
    for parse, body in ((parse_chat, {"messages": [HI]}), (parse_completion, {"prompt": "p"})):
        with pytest.raises(InvalidArgument, match="is not supported") as refused:
            parse(json.dumps({**body, name: "something"}).encode(), "")
        assert refused.value.field == name
        for nothing in (None, *ANSWER_CHANGING[name]):
            parse(json.dumps({**body, name: nothing}).encode(), "")


@pytest.mark.parametrize("name", sorted(TEXTS_ELSEWHERE))
def test_a_text_that_no_completion_reads_is_refused_by_name(name: str) -> None:
    for parse, body in ((parse_chat, {"messages": [HI]}), (parse_completion, {"prompt": "p"})):
        with pytest.raises(InvalidArgument, match=f"^{name}: is not supported"):
            parse(json.dumps({**body, name: "Be rude."}).encode(), "")
        for nothing in (None, *TEXTS_ELSEWHERE[name]):
            parse(json.dumps({**body, name: nothing}).encode(), "")
    with pytest.raises(InvalidArgument, match=r"^prompt: is not supported"):
        chat(prompt="p")


@pytest.mark.parametrize("name", ["image", "images", "video", "instructions", "input", "system", "prompt"])
def test_an_empty_input_that_chat_never_reads_is_none(name: str) -> None:
    empty: list[object] = [None, "", []]
    for nothing in empty:
        chat(**{name: nothing})


@pytest.mark.parametrize("name", sorted(OF_CHAT_ONLY))
def test_a_field_of_chat_alone_is_refused_elsewhere(name: str) -> None:
    bodies: list[tuple[Callable[[bytes], object], dict[str, Any]]] = [
        (parse_completion, {"prompt": "p"}),
        (decode_response, {"input": "p"}),
    ]
    for parse, body in bodies:
        with pytest.raises(InvalidArgument, match=f"^{name}: is not supported"):
            parse(json.dumps({**body, name: "something"}).encode())
        for nothing in OF_CHAT_ONLY[name]:
            parse(json.dumps({**body, name: nothing}).encode())


REFUSED_BY_NAME: list[tuple[dict[str, Any], str]] = [
    ({"reasoning": {"max_tokens": 100}}, "reasoning.max_tokens"),
    ({"reasoning": {"effort": "low", "exclude": True}}, "reasoning.exclude"),
    (
        {"structured_outputs": {"json": {}, "whitespace_pattern": " "}},
        "structured_outputs.whitespace_pattern",
    ),
    (
        {"structured_outputs": {"json": {}, "disable_any_whitespace": True}},
        "structured_outputs.disable_any_whitespace",
    ),
    ({"models": ["a", "b"]}, "models"),
    ({"format": "json"}, "format"),
    ({"do_sample": False}, "do_sample"),
    ({"max_new_tokens": 5}, "max_new_tokens"),
    ({"thinking_budget": 0}, "thinking_budget"),
]


@pytest.mark.parametrize(("fields", "field"), REFUSED_BY_NAME, ids=[field for _, field in REFUSED_BY_NAME])
def test_an_option_that_would_change_the_answer_is_refused_by_its_path(
    fields: dict[str, Any], field: str
) -> None:
    with pytest.raises(InvalidArgument, match="is not supported") as refused:
        chat(**fields)
    assert refused.value.field == field


def test_values_that_ask_for_nothing_pass_and_other_fields_of_a_switch_are_named() -> None:
    chat(do_sample=True, models=[], min_new_tokens=0, reasoning={"exclude": False, "max_tokens": None})
    chat(structured_outputs={"json": {}, "disable_any_whitespace": False, "whitespace_pattern": None})
    request, options = chat(thinking={"type": "disabled", "budget_tokens": 1024, "display": "x"})
    assert isinstance(request.input, ChatInput)
    assert request.input.thinking is False
    assert options.ignored == "thinking.budget_tokens,thinking.display"


@pytest.mark.parametrize("name", sorted(SWITCHES_OF_CHAT))
def test_a_switch_of_chat_is_refused_where_another_field_has_its_meaning(name: str) -> None:
    with pytest.raises(InvalidArgument, match=f"^{name}: is not supported"):
        decode_response(json.dumps({"input": "p", name: {"a": 1}}).encode())
    if name != "thinking":
        with pytest.raises(InvalidArgument, match=f"^{name}: is not supported"):
            parse_messages_body(json.dumps({"messages": [HI], "max_tokens": 1, name: {"a": 1}}).encode())


@pytest.mark.parametrize("name", [*sorted(ANSWER_CHANGING), "n", "stop", "response_format", "seed"])
def test_messages_refuse_fields_of_other_apis_that_would_change_the_answer(name: str) -> None:
    with pytest.raises(InvalidArgument, match=f"^{name}: is not supported"):
        parse_messages_body(json.dumps({"messages": [HI], "max_tokens": 1, name: ["x"]}).encode())


def test_a_schema_beside_json_object_holds_the_answer() -> None:
    for kind in ("json_object", "json_schema"):
        request, options = chat(response_format={"type": kind, "schema": {"type": "string"}})
        schema = OutputFormat("json_schema", {"type": "string"}, "response_format.schema")
        assert (request.output, options.ignored) == (schema, "")


def test_the_header_is_bounded_and_safe() -> None:
    ignored = IgnoredFields()
    for index in range(10_000):
        ignored.add(f"messages[{index}].x{index % 200}\r\nset-cookie: a,b")
    assert len(ignored.header()) <= MAX_HEADER_BYTES
    assert ignored.header().endswith(",...")
    assert not set(ignored.header()) & set("\r\n ")
    assert ignored.count == 10_000


@pytest.mark.parametrize(
    ("fields", "thinking", "keeps"),
    [
        ({}, None, False),
        ({"chat_template_kwargs": {"thinking": False}}, False, False),
        ({"chat_template_kwargs": {"enable_thinking": True}}, True, False),
        ({"chat_template_kwargs": {"clear_thinking": False}}, None, True),
        ({"chat_template_kwargs": {"clear_thinking": True}}, None, False),
        ({"thinking": {"type": "disabled"}}, False, False),
        ({"thinking": {"type": "enabled", "keep": "all"}}, True, True),
        ({"thinking": None}, None, False),
        ({"reasoning_effort": "none"}, False, False),
        ({"reasoning_effort": "low"}, True, False),
        ({"reasoning_effort": "high", "chat_template_kwargs": {"thinking": False}}, False, False),
        ({"reasoning_effort": "default"}, None, False),
        ({"reasoning_effort": "auto"}, None, False),
        ({"thinking": {"type": "adaptive"}}, True, False),
        ({"thinking": {"type": "auto", "keep": "all"}}, None, True),
        ({"enable_thinking": False}, False, False),
        ({"enable_thinking": True, "thinking": {"type": "disabled"}}, False, False),
        ({"reasoning": {"enabled": False}}, False, False),
        ({"reasoning": {"enabled": True}}, True, False),
        ({"reasoning": {"effort": "none"}}, False, False),
        ({"reasoning": {"effort": "high"}, "reasoning_effort": "none"}, True, False),
        ({"reasoning": {"effort": "none", "enabled": True}}, True, False),
        ({"reasoning": {"summary": "auto"}, "reasoning_effort": "low"}, True, False),
    ],
)
def test_each_switch_of_reasoning_has_one_meaning(
    fields: dict[str, Any], thinking: bool | None, keeps: bool
) -> None:
    request, _ = chat(**fields)
    assert isinstance(request.input, ChatInput)
    assert (request.input.thinking, request.input.keeps_reasoning) == (thinking, keeps)


@pytest.mark.parametrize("path", ["reasoning_effort", "reasoning.effort"])
def test_an_effort_that_does_not_exist_is_refused_by_its_path(path: str) -> None:
    name, _, inner = path.partition(".")
    with pytest.raises(InvalidArgument, match="must be one of none, minimal") as refused:
        chat(**{name: {inner: "extreme"} if inner else "extreme"}, enable_thinking=True)
    assert refused.value.field == path


@pytest.mark.parametrize(
    ("reasoning", "thinking"),
    [({"effort": "default"}, None), ({"enabled": False}, False), ({"effort": "low"}, True)],
)
def test_responses_take_the_same_object(reasoning: dict[str, Any], thinking: bool | None) -> None:
    draft = decode_response(json.dumps({"input": "p", "reasoning": reasoning}).encode())
    request = parse_response(draft, EarlierItems(), is_stored=False).generation
    assert isinstance(request.input, ChatInput)
    assert request.input.thinking is thinking


def test_a_cache_key_is_the_session() -> None:
    assert chat(prompt_cache_key="user-7")[1].session == "user-7"
    long = chat(prompt_cache_key="k" * 300)[1].session
    assert long is not None
    assert len(long) == 32
    assert chat(prompt_cache_key="")[1].session is None


def test_limits_and_stops_take_every_form() -> None:
    request, _ = chat(max_tokens=5, max_completion_tokens=7, min_tokens=2, stop="", stop_token_ids=[3])
    sampling = request.sampling
    assert (sampling.max_tokens, sampling.min_tokens, sampling.stop_token_ids) == (7, 2, (3,))
    assert request.stop == ()
    assert chat(stop=["a", "", None, "b"])[0].stop == ["a", "b"]
    assert chat(top_logprobs=0)[0].sampling.top_logprobs is None
    assert not chat(stream_options={"include_usage": True})[1].include_usage
    with_usage = chat(stream=True, stream_options={"continuous_usage_stats": True})[1]
    assert with_usage.include_usage
    assert with_usage.continuous_usage


@pytest.mark.parametrize(
    "choice",
    [
        {"type": "function", "function": {"name": "look"}},
        {"type": "function", "name": "look"},
        {"type": "function", "function": {"name": "look"}, "name": "other"},
    ],
)
def test_a_function_is_chosen_in_the_forms_of_chat_and_of_responses(choice: Any) -> None:
    requests, options = parse_chat(json.dumps({"messages": [HI], "tool_choice": choice}).encode())
    source = requests[0].input
    assert isinstance(source, ChatInput)
    assert source.tool_choice == ToolChoice("function", "look")
    assert not options.ignored


def test_each_choice_has_a_seed_and_an_id_of_the_request() -> None:
    requests, _ = parse_chat(json.dumps({"messages": [HI], "n": 3, "seed": 5}).encode(), "a")
    assert [request.request_id for request in requests] == ["a", "a.1", "a.2"]
    seeds = [request.sampling.seed for request in requests]
    assert seeds == [5, choice_seed(5, 1), choice_seed(5, 2)]
    assert len(set(seeds)) == 3
    long = choice_id("x" * 128, 127)
    assert len(long) <= 128
    assert long != choice_id("x" * 127 + "y", 127)


def test_prompts_are_texts_or_ids_or_lists_of_them() -> None:
    def inputs(prompt: Any, **fields: Any) -> list[PromptInput | ChatInput]:
        requests, _ = parse_completion(json.dumps({"prompt": prompt, **fields}).encode())
        return [request.input for request in requests]

    assert inputs("a") == [PromptInput("a")]
    assert inputs(["a"]) == [PromptInput("a")]
    assert inputs([1, 2]) == [PromptInput(token_ids=[1, 2])]
    assert inputs([[1], "b"], n=2) == [PromptInput(token_ids=[1])] * 2 + [PromptInput("b")] * 2
    (request,), options = parse_completion(b'{"prompt": "a", "echo": true, "max_tokens": 0}')
    assert (request.sampling.max_tokens, options.echo, request.is_prompt_alone) == (1, True, True)


def test_the_openapi_document_has_every_field_of_a_body() -> None:
    document = json.loads(openapi_json())
    for path, kind in BODIES.items():
        schema = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
        named = document["components"]["schemas"][schema["$ref"].rpartition("/")[2]]
        assert set(named["properties"]) == set(kind.__struct_fields__)
    assert 'additionalProperties": false' not in openapi_json().decode()
