"""Bodies of runs become bodies of chat completions, and defects keep their names."""

from __future__ import annotations

import json
from typing import Any

import pytest

from libs.common.batch_bounds import RUNS
from services.router.api.openai.request import parse_chat
from services.router.api.workers_ai.run_body import (
    BatchBody,
    LoraUnsupported,
    PollBody,
    RunBody,
    parse_run,
)
from services.router.request.types import ChatInput
from slipstream import bounds
from slipstream.errors import InvalidArgument

MODEL = "@cf/moonshotai/kimi-k2.5"
HI = [{"role": "user", "content": "hi"}]
LOOK = {"name": "look", "description": "Looks.", "parameters": {"type": "object"}}


def run(**fields: Any) -> RunBody:
    parsed = parse_run(json.dumps(fields).encode(), MODEL)
    assert isinstance(parsed.body, RunBody) and not parsed.is_queued
    return parsed.body


def chat(**fields: Any) -> Any:
    return json.loads(run(**fields).chat)


def refusal(**fields: Any) -> InvalidArgument:
    with pytest.raises(InvalidArgument) as caught:
        parse_run(json.dumps(fields).encode(), MODEL)
    return caught.value


def test_messages_stay_as_they_are_and_the_path_names_the_model() -> None:
    body = {"messages": HI, "temperature": 0.5, "max_tokens": 7, "seed": 1 << 62, "stop": ["é"]}
    assert chat(**body) == {**body, "model": MODEL}
    assert chat(messages=HI, model="another")["model"] == MODEL
    assert not run(messages=HI).is_native


@pytest.mark.parametrize("name", ["image", "image_b64", "audio", "video"])
def test_media_are_refused_by_their_field(name: str) -> None:
    error = refusal(prompt="What is this?", **{name: [1, 2]})
    assert (error.field, error.reason) == (name, refusal(prompt="hi", raw=True).reason)
    assert refusal(requests=[{"prompt": "hi", name: "AA=="}]).field == f"requests[0].{name}"
    empty: list[object] = [None, "", []]
    for value in empty:
        assert chat(prompt="hi", **{name: value})["messages"]


def test_a_prompt_is_one_message_of_the_user() -> None:
    body = run(prompt="Where is it?", top_k=3)
    assert json.loads(body.chat) == {
        "messages": [{"role": "user", "content": "Where is it?"}],
        "top_k": 3,
        "model": MODEL,
    }
    assert body.is_native


def test_tools_without_function_get_one() -> None:
    nested = {"type": "function", "function": LOOK}
    body = run(messages=HI, tools=[LOOK, nested])
    assert json.loads(body.chat)["tools"] == [nested, nested]
    assert body.is_native
    assert not run(messages=HI, tools=[nested]).is_native
    requests, _ = parse_chat(body.chat)
    assert isinstance(requests[0].input, ChatInput) and len(requests[0].input.tools) == 2


def test_a_null_effort_is_no_reasoning_and_one_that_is_left_out_is_the_default() -> None:
    def thinking(**fields: Any) -> bool | None:
        requests, _ = parse_chat(run(messages=HI, **fields).chat)
        assert isinstance(requests[0].input, ChatInput)
        return requests[0].input.thinking

    assert thinking(reasoning_effort=None) is False
    assert thinking(reasoning_effort="low") is True
    assert thinking() is None


def test_a_schema_without_a_name_is_the_form_of_the_answer() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "string"}}}
    body = run(messages=HI, response_format={"type": "json_schema", "json_schema": schema})
    requests, _ = parse_chat(body.chat)
    assert requests[0].output is not None and requests[0].output.content == schema


def test_a_batch_keeps_order_and_references() -> None:
    requests = [{"prompt": "a", "external_reference": "one"}, {"messages": HI}]
    parsed = parse_run(json.dumps({"requests": requests, "queueRequest": True}).encode(), MODEL)
    assert parsed.is_queued
    assert isinstance(parsed.body, BatchBody)
    assert [item.reference for item in parsed.body.runs] == ["one", None]
    assert [item.is_native for item in parsed.body.runs] == [True, False]
    assert "external_reference" not in json.loads(parsed.body.runs[0].chat)


def test_a_request_id_alone_asks_for_an_answer() -> None:
    assert parse_run(b'{"request_id": "abc"}', MODEL).body == PollBody("abc")
    assert chat(messages=HI, request_id="mine")["request_id"] == "mine"


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({}, "prompt"),
        ({"prompt": None}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": 3}, "prompt"),
        ({"prompt": "a", "messages": HI}, "prompt"),
        ({"prompt": "a", "raw": True}, "raw"),
        ({"prompt": "a", "raw": 1}, "raw"),
        ({"prompt": "a", "stream": "yes"}, "stream"),
        ({"requests": []}, "requests"),
        ({"requests": {}}, "requests"),
        ({"requests": [1]}, "requests"),
        ({"requests": [{"prompt": "a"}] * (RUNS.high + 1)}, "requests"),
        ({"requests": [{"prompt": "a"}, {"prompt": ""}]}, "requests[1].prompt"),
        ({"requests": [{"prompt": "a", "stream": True}]}, "requests[0].stream"),
        ({"prompt": "a", "external_reference": 4}, "external_reference"),
        ({"prompt": "a", "queueRequest": "true"}, "queueRequest"),
    ],
)
def test_a_body_that_does_not_fit_is_refused_by_field(fields: dict[str, Any], named: str) -> None:
    assert refusal(**fields).field == named


def test_a_lora_is_refused_as_what_it_is() -> None:
    assert isinstance(refusal(prompt="a", lora="mine"), LoraUnsupported)
    assert isinstance(refusal(requests=[{"prompt": "a", "lora": "mine"}]), LoraUnsupported)


@pytest.mark.parametrize("body", [b"", b"[]", b"{", b'{"prompt": "a"', b'{"prompt": "\xff"}', b'"x"'])
def test_what_is_no_object_is_refused(body: bytes) -> None:
    with pytest.raises(InvalidArgument):
        parse_chat_of(body)


def parse_chat_of(body: bytes) -> None:
    parsed = parse_run(body, MODEL).body
    assert isinstance(parsed, RunBody)
    parse_chat(parsed.chat)


def test_values_that_only_some_parsers_read_are_refused_by_field() -> None:
    for value in (b"NaN", b"1e999"):
        with pytest.raises(InvalidArgument) as caught:
            parse_chat_of(b'{"prompt": "a", "max_tokens": ' + value + b"}")
        assert caught.value.field == "max_tokens"


def test_structure_is_bounded_before_it_is_parsed() -> None:
    body = b'{"requests": [' + b"[]," * bounds.MAX_STRUCTURE_BYTES + b"1]}"
    with pytest.raises(InvalidArgument) as caught:
        parse_run(body, MODEL)
    assert caught.value.reason == bounds.BODY_STRUCTURE.words


@pytest.mark.parametrize(
    ("body", "field"),
    [
        (b'{"requests": [{"prompt": "a"}, {"prompt": "a", "ma\x91x": 1}]}', "requests[1]"),
        (b'{"requests": [{"prompt": "a", "external_reference": "\x91"}]}', "requests[0].external_reference"),
        (b'{"requests": [{"\\ud800": 1}]}', "requests[0]"),
        (b'{"requests": [5]}', "requests"),
        (b'{"requests": {"prompt": "\x91"}}', "requests.prompt"),
        (b'{"requests": {"prompt": "a"}}', "requests"),
    ],
)
def test_a_batch_of_no_utf8_or_of_no_objects_is_refused_by_field(body: bytes, field: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        parse_run(body, MODEL)
    assert caught.value.field == field


@pytest.mark.parametrize("name", ["tools", "response_format", "me\x91ssages"])
def test_raw_fields_of_no_utf8_are_refused_by_the_parser_of_chats(name: str) -> None:
    field = name.encode("latin-1")
    for nested in (b'[{"na\x91me": "f"}]', b'[{"name": "\x91"}]', b'{"ty\x91pe": "x"}', b'{"type": "\x91"}'):
        body = b'{"messages": [{"role": "user", "content": "a"}], "' + field + b'": ' + nested + b"}"
        with pytest.raises(InvalidArgument) as caught:
            parse_chat_of(body)
        assert caught.value.field.startswith(name if name.isascii() else "body")


def test_numbers_that_json_has_not_do_not_hide_a_batch() -> None:
    body = parse_run(b'{"requests": [{"prompt": "a"}, {"prompt": "a", "max_tokens": NaN}]}', MODEL).body
    assert isinstance(body, BatchBody)
    with pytest.raises(InvalidArgument) as caught:
        parse_chat(body.runs[1].chat)
    assert caught.value.field == "max_tokens"
