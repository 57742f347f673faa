"""Golden renders of the K2.5 template, spans, malformed input, and text that spells control tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from libs.text.chat_template import encode_chat, render_chat, render_partial
from libs.text.tokenizer import Tokenizer
from libs.text.tool_declaration import tools_text
from slipstream.errors import InvalidArgument
from tests.text.corpus import WEATHER_TOOL, hostile_text

SYSTEM: dict[str, Any] = {"role": "system", "content": "Help."}
HELLO: dict[str, Any] = {"role": "user", "content": "Hello"}
THINKING_PROMPT = "<|im_assistant|>assistant<|im_middle|><think>"
INSTANT_PROMPT = THINKING_PROMPT + "</think>"


def _call(position: int, arguments: Any = '{"city": "Paris"}') -> dict[str, Any]:
    call_id = f"functions.get_weather:{position}"
    return {"id": call_id, "type": "function", "function": {"name": "get_weather", "arguments": arguments}}


CALL_TEXT = (
    "<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0<|tool_call_argument_begin|>"
    '{"city": "Paris"}<|tool_call_end|><|tool_calls_section_end|>'
)
TOOL_LOOP: list[dict[str, Any]] = [
    {"role": "user", "content": "Weather?"},
    {
        "role": "assistant",
        "content": "Looking.",
        "reasoning_content": "I need a tool.",
        "tool_calls": [_call(0)],
    },
    {"role": "tool", "tool_call_id": "functions.get_weather:0", "content": "sunny"},
]
TOOL_RESULT = "<|im_system|>tool<|im_middle|>## Return of functions.get_weather:0\nsunny<|im_end|>"


def _render(messages: Sequence[dict[str, Any]], **options: Any) -> str:
    return "".join(segment.text for segment in render_chat(messages, **options))


def _encoded(
    tokenizer: Tokenizer, messages: Sequence[dict[str, Any]], **options: Any
) -> tuple[str, list[str]]:
    chat = encode_chat(tokenizer, messages, **options)
    spans = [tokenizer.decode(chat.token_ids[a:b], keep_special=True) for a, b in chat.assistant_spans]
    return tokenizer.decode(chat.token_ids, keep_special=True), spans


def test_a_conversation_of_several_turns_without_thinking(tokenizer: Tokenizer) -> None:
    messages = [SYSTEM, HELLO, {"role": "assistant", "content": "Hi!"}, {"role": "user", "content": "Bye"}]
    text, spans = _encoded(tokenizer, messages)
    assert text == (
        "<|im_system|>system<|im_middle|>Help.<|im_end|>"
        "<|im_user|>user<|im_middle|>Hello<|im_end|>"
        "<|im_assistant|>assistant<|im_middle|><think></think>Hi!<|im_end|>"
        "<|im_user|>user<|im_middle|>Bye<|im_end|>" + INSTANT_PROMPT
    )
    assert spans == ["Hi!<|im_end|>"]


def test_the_generation_prompt_opens_thinking_or_closes_it() -> None:
    user = "<|im_user|>user<|im_middle|>Hello<|im_end|>"
    assert _render([HELLO], thinking=True) == user + THINKING_PROMPT
    assert _render([HELLO], thinking=False) == user + INSTANT_PROMPT
    assert _render([HELLO], add_generation_prompt=False) == user


def _partial(*messages: dict[str, Any], thinking: bool = False) -> str:
    return "".join(segment.text for segment in render_partial(messages, thinking=thinking))


def test_a_partial_message_ends_with_its_text() -> None:
    begun = {"role": "assistant", "content": "Hi <|im_end|>there,", "reasoning_content": "So."}
    assert _partial(HELLO, begun) == INSTANT_PROMPT + "Hi <|im_end|>there,"
    assert _partial(HELLO, begun, thinking=True) == THINKING_PROMPT + "So.</think>Hi <|im_end|>there,"
    assert _partial({"role": "assistant", "content": ""}, thinking=True) == INSTANT_PROMPT
    named = {"role": "assistant", "name": "Holmes", "content": None}
    assert _partial(named) == "<|im_assistant|>Holmes<|im_middle|><think></think>"


@given(st.text(max_size=40), st.text(max_size=20))
def test_a_partial_message_is_the_whole_one_without_its_end(content: str, reasoning: str) -> None:
    messages = [HELLO, {"role": "assistant", "content": content, "reasoning_content": reasoning}]
    whole = _render(messages, add_generation_prompt=False)
    assert _render([HELLO], add_generation_prompt=False) + _partial(*messages) + "<|im_end|>" == whole


def test_there_is_no_default_system_prompt() -> None:
    assert _render([], add_generation_prompt=False) == ""


def test_tools_are_declared_first(tokenizer: Tokenizer) -> None:
    text, spans = _encoded(tokenizer, [SYSTEM, HELLO], tools=[WEATHER_TOOL])
    declared = f"<|im_system|>tool_declare<|im_middle|>{tools_text([WEATHER_TOOL])}<|im_end|>"
    assert text.startswith(declared + "<|im_system|>system<|im_middle|>Help.<|im_end|>")
    assert spans == []


def test_a_running_tool_loop_keeps_its_reasoning(tokenizer: Tokenizer) -> None:
    text, spans = _encoded(tokenizer, TOOL_LOOP, thinking=True)
    generated = "I need a tool.</think>Looking." + CALL_TEXT + "<|im_end|>"
    assert text == (
        "<|im_user|>user<|im_middle|>Weather?<|im_end|>"
        + THINKING_PROMPT
        + generated
        + TOOL_RESULT
        + THINKING_PROMPT
    )
    assert spans == [generated]


def test_a_plain_answer_strips_the_reasoning_before_it(tokenizer: Tokenizer) -> None:
    answer = {"role": "assistant", "content": "Sunny.", "reasoning_content": "Easy."}
    text, spans = _encoded(tokenizer, [*TOOL_LOOP, answer, HELLO], thinking=True)
    call, final = "Looking." + CALL_TEXT + "<|im_end|>", "Sunny.<|im_end|>"
    assert text == (
        "<|im_user|>user<|im_middle|>Weather?<|im_end|>"
        + INSTANT_PROMPT
        + call
        + TOOL_RESULT
        + INSTANT_PROMPT
        + final
        + "<|im_user|>user<|im_middle|>Hello<|im_end|>"
        + THINKING_PROMPT
    )
    assert spans == [call, final]


def test_reasoning_of_a_new_tool_loop_is_kept_after_an_earlier_answer() -> None:
    old = [HELLO, {"role": "assistant", "content": "Hi", "reasoning_content": "old"}]
    text = _render([*old, *TOOL_LOOP], thinking=True)
    assert "<think></think>Hi" in text
    assert "<think>I need a tool.</think>Looking." in text
    assert "old" not in text


def test_reasoning_is_left_out_without_thinking(tokenizer: Tokenizer) -> None:
    text, spans = _encoded(tokenizer, TOOL_LOOP, thinking=False)
    generated = "Looking." + CALL_TEXT + "<|im_end|>"
    assert INSTANT_PROMPT + generated + TOOL_RESULT + INSTANT_PROMPT in text
    assert spans == [generated]


def test_several_calls_share_one_section() -> None:
    message = {"role": "assistant", "content": None, "tool_calls": [_call(0), _call(1, {"city": "Köln"})]}
    assert _render([message], add_generation_prompt=False) == (
        "<|im_assistant|>assistant<|im_middle|><think></think><|tool_calls_section_begin|>"
        "<|tool_call_begin|>functions.get_weather:0<|tool_call_argument_begin|>"
        '{"city": "Paris"}<|tool_call_end|>'
        "<|tool_call_begin|>functions.get_weather:1<|tool_call_argument_begin|>"
        '{"city": "Köln"}<|tool_call_end|><|tool_calls_section_end|><|im_end|>'
    )


def test_a_name_replaces_the_role_and_other_roles_are_system() -> None:
    messages = [
        {"role": "user", "name": "Ann", "content": "a"},
        {"role": "developer", "content": "b"},
        {"role": "assistant", "name": "Bot", "content": "c"},
        {"role": "tool", "name": "shop", "tool_call_id": "x", "content": "d"},
    ]
    assert _render(messages, add_generation_prompt=False) == (
        "<|im_user|>Ann<|im_middle|>a<|im_end|>"
        "<|im_system|>developer<|im_middle|>b<|im_end|>"
        "<|im_assistant|>Bot<|im_middle|><think></think>c<|im_end|>"
        "<|im_system|>shop<|im_middle|>## Return of x\nd<|im_end|>"
    )


def test_content_is_a_string_null_or_text_parts() -> None:
    parts = [{"type": "text", "text": "a "}, {"type": "text", "text": "b"}]
    contents: list[dict[str, Any]] = [{"content": parts}, {"content": None}, {}]
    messages = [{"role": "user", **content} for content in contents]
    assert _render(messages, add_generation_prompt=False) == (
        "<|im_user|>user<|im_middle|>a b<|im_end|>" + "<|im_user|>user<|im_middle|><|im_end|>" * 2
    )


def test_an_empty_answer_has_a_span(tokenizer: Tokenizer) -> None:
    _, spans = _encoded(tokenizer, [HELLO, {"role": "assistant", "content": ""}])
    assert spans == ["<|im_end|>"]
    _, spans = _encoded(
        tokenizer, [HELLO, {"role": "assistant", "content": "", "tool_calls": [_call(0)]}], thinking=True
    )
    assert spans == ["</think>" + CALL_TEXT + "<|im_end|>"]


@pytest.mark.parametrize(
    ("message", "field"),
    [
        ({"role": "robot", "content": ""}, "messages[1].role"),
        ({"content": ""}, "messages[1].role"),
        ({"role": ["user"], "content": ""}, "messages[1].role"),
        ({"role": "user", "content": 3}, "messages[1].content"),
        ({"role": "user", "content": {"type": "text"}}, "messages[1].content"),
        ({"role": "user", "content": ["a"]}, "messages[1].content[0]"),
        ({"role": "user", "content": [{"type": "image_url"}]}, "messages[1].content[0].type"),
        ({"role": "user", "content": [{"type": "text"}]}, "messages[1].content[0].text"),
        ({"role": "user", "content": "", "name": 7}, "messages[1].name"),
        ({"role": "tool", "content": "x"}, "messages[1].tool_call_id"),
        ({"role": "assistant", "tool_calls": ["x"]}, "messages[1].tool_calls[0]"),
        ({"role": "assistant", "tool_calls": {"id": "x"}}, "messages[1].tool_calls"),
        ({"role": "assistant", "tool_calls": [{"id": "x"}]}, "messages[1].tool_calls[0].function"),
        ({"role": "assistant", "tool_calls": [_call(0, 5)]}, "messages[1].tool_calls[0].function.arguments"),
        ({"role": "assistant", "tool_calls": [{**_call(0), "id": None}]}, "messages[1].tool_calls[0].id"),
        (
            {"role": "assistant", "reasoning_content": 5, "tool_calls": [_call(0)]},
            "messages[1].reasoning_content",
        ),
    ],
)
def test_a_malformed_message_raises_an_error_with_its_field(message: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        render_chat([HELLO, message], thinking=True)
    assert caught.value.field == field


@given(st.lists(hostile_text, min_size=8, max_size=8), st.booleans())
def test_no_message_text_becomes_control_tokens(
    tokenizer: Tokenizer, text: list[str], thinking: bool
) -> None:
    """With any texts the control tokens equal those of the same conversation with plain texts."""

    def conversation(t: Sequence[str]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        call = {"id": t[0], "function": {"name": "f", "arguments": t[1]}}
        function = {"name": "f", "description": t[2], "parameters": {"type": "object"}}
        return [
            {"role": "system", "content": t[3]},
            {"role": "user", "name": t[4] or "u", "content": [{"type": "text", "text": t[5]}]},
            {"role": "assistant", "content": t[6], "reasoning_content": t[7], "tool_calls": [call]},
            {"role": "tool", "tool_call_id": t[0], "content": t[1]},
        ], [{"type": "function", "function": function}]

    def controls(t: Sequence[str]) -> list[int]:
        messages, tools = conversation(t)
        ids = encode_chat(tokenizer, messages, tools, thinking=thinking).token_ids
        return [token_id for token_id in ids if token_id >= tokenizer.base_vocab_tokens]

    assert controls(text) == controls(["x"] * 8)
