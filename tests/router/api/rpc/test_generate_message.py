"""`GenerateRequest` messages as the pipeline sees them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from msgspec.structs import asdict, fields

from services.router.api.rpc.generate_message import parse_generation
from services.router.api.rpc.wire.message_reader import read_message
from services.router.request.types import ChatInput, GenerationRequest, PromptInput, Sampling, ToolChoice
from slipstream.enum_names import MESSAGE_ROLES, PRIORITIES, TOOL_CHOICE_MODES
from slipstream.errors import InvalidArgument
from slipstream.sampling import SAMPLING_RANGES
from slipstream.v1 import router_pb2

_PAGE = Path(__file__).parents[4] / "docs" / "http-api.md"


def test_sampling_has_all_fields_of_the_message_by_the_same_names() -> None:
    stated = {field.name for field in router_pb2.Sampling.DESCRIPTOR.fields}
    names = {field.name for field in fields(Sampling)} - {"given", "max_tokens_field"}
    assert stated == names | set(SAMPLING_RANGES)


def test_what_is_left_out_is_as_in_a_request_that_says_nothing() -> None:
    assert parse_generation(router_pb2.GenerateRequest(prompt="a")) == GenerationRequest(PromptInput("a"))


def test_every_sampling_field_arrives_also_when_it_is_zero() -> None:
    message = router_pb2.GenerateRequest(prompt="a")
    sampling = message.sampling
    sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p = 0.0, 0.5, 0, 0.0
    sampling.presence_penalty, sampling.frequency_penalty, sampling.repetition_penalty = 0.0, -1.0, 1.5
    sampling.seed, sampling.max_tokens, sampling.top_logprobs, sampling.ignore_eos = 0, 3, 0, True
    sampling.logit_bias[7], sampling.min_tokens, sampling.prompt_logprobs = 2.0, 2, 0
    sampling.stop_token_ids.extend([4, 5])
    assert asdict(parse_generation(message).sampling) == {
        "given": {
            **{"temperature": 0.0, "top_p": 0.5, "top_k": 0, "min_p": 0.0},
            **{"presence_penalty": 0.0, "frequency_penalty": -1.0, "repetition_penalty": 1.5},
        },
        **{"seed": 0, "max_tokens": 3, "top_logprobs": 0, "ignore_eos": True, "logit_bias": {7: 2.0}},
        "prompt_logprobs": 0,
        **{"max_tokens_field": "max_tokens", "min_tokens": 2, "stop_token_ids": (4, 5)},
    }


def test_a_conversation_with_all_it_may_have() -> None:
    call = router_pb2.ToolCall(id="c", name="f", arguments="{}")
    chat = router_pb2.Chat(
        messages=[
            router_pb2.Message(
                role=router_pb2.MESSAGE_ROLE_USER,
                content=[router_pb2.ContentPart(text="h"), router_pb2.ContentPart(text="i")],
                name="Ann",
            ),
            router_pb2.Message(
                role=router_pb2.MESSAGE_ROLE_ASSISTANT, reasoning_content="so", tool_calls=[call]
            ),
            router_pb2.Message(
                role=router_pb2.MESSAGE_ROLE_TOOL,
                content=[router_pb2.ContentPart(text="4")],
                tool_call_id="c",
            ),
        ],
        tools=[router_pb2.Tool(name="f", description="d", parameters="{}")],
    )
    chat.tool_choice.mode = router_pb2.TOOL_CHOICE_MODE_FUNCTION
    chat.tool_choice.function = "f"
    message = router_pb2.GenerateRequest(
        chat=chat,
        thinking=True,
        model="m",
        stop=["s"],
        request_id="id",
        resume_after_tokens=2,
        metadata={"k": "v"},
        priority=router_pb2.PRIORITY_BULK,
        reject_if_busy=True,
    )
    function = {"name": "f", "arguments": "{}"}
    assert parse_generation(message) == GenerationRequest(
        ChatInput(
            messages=[
                {"role": "user", "content": "hi", "name": "Ann"},
                {
                    "role": "assistant",
                    "content": "",
                    "reasoning_content": "so",
                    "tool_calls": [{"id": "c", "type": "function", "function": function}],
                },
                {"role": "tool", "content": "4", "tool_call_id": "c"},
            ],
            tools=[{"type": "function", "function": {"name": "f", "description": "d", "parameters": {}}}],
            tool_choice=ToolChoice("function", "f"),
            thinking=True,
        ),
        model="m",
        stop=("s",),
        request_id="id",
        resume_after_tokens=2,
        metadata={"k": "v"},
        priority="bulk",
        reject_if_busy=True,
    )


def test_a_content_part_without_text_is_named() -> None:
    user = router_pb2.Message(role=router_pb2.MESSAGE_ROLE_USER)
    user.content.add(text="")  # a text, though an empty one
    user.content.add()
    message = router_pb2.GenerateRequest(chat=router_pb2.Chat(messages=[user]))
    with pytest.raises(InvalidArgument) as refused:
        parse_generation(read_message(message.SerializeToString(), router_pb2.GenerateRequest))
    assert refused.value.message == "messages[0].content[1].text: must be a string"
    del user.content[1]
    chat = parse_generation(router_pb2.GenerateRequest(chat=router_pb2.Chat(messages=[user]))).input
    assert isinstance(chat, ChatInput) and chat.messages[0]["content"] == ""


def test_every_enum_of_a_request_has_names() -> None:
    assert set(MESSAGE_ROLES.values) == {"developer", "system", "user", "assistant", "tool"}
    assert set(TOOL_CHOICE_MODES.values) == {"auto", "none", "required", "function"}
    assert set(PRIORITIES.values) == {"interactive", "default", "bulk"}


def test_a_field_that_is_encoded_twice_counts_once_and_is_no_unknown_field() -> None:
    once = router_pb2.GenerateRequest(prompt="b").SerializeToString()
    twice = router_pb2.GenerateRequest(prompt="a").SerializeToString() + once
    assert read_message(twice, router_pb2.GenerateRequest) == router_pb2.GenerateRequest(prompt="b")


def test_an_unknown_field_in_a_wasteful_encoding_is_named() -> None:
    data = router_pb2.GenerateRequest(prompt="a").SerializeToString() * 2 + b"\xf8\x3f\x01"  # field 1023
    with pytest.raises(InvalidArgument) as caught:
        read_message(data, router_pb2.GenerateRequest)
    assert caught.value.field == "1023"


def test_the_page_of_the_api_names_every_field_of_the_contract() -> None:
    """One table has the HTTP and the gRPC name of each field."""
    page = _PAGE.read_text()
    table = page[page.index("## Fields of a request") : page.index("## Fields without effect")]
    for message in (router_pb2.GenerateRequest, router_pb2.Sampling):
        for field in message.DESCRIPTOR.fields:
            assert f"`{field.name}`" in table, field.name


@pytest.mark.parametrize(
    "text", ['{"a": 1e999}', '{"a": -Infinity}', '"\\ud800"', '{"a": [1.5, "b"], "a": 2}']
)
def test_parameters_are_what_the_standard_library_reads(text: str) -> None:
    message = router_pb2.GenerateRequest()
    message.chat.tools.add(name="f", parameters=text)
    chat = parse_generation(message).input
    assert isinstance(chat, ChatInput)
    assert chat.tools[0]["function"]["parameters"] == json.loads(text)
