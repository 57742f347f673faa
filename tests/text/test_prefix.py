"""The next turn's prompt starts with this turn's prompt and reply, so its KV blocks are reused."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from libs.text.chat_template import encode_chat
from libs.text.response_parser import (
    ContentDelta,
    ReasoningDelta,
    ResponseParser,
    ToolCallArguments,
    ToolCallStart,
)
from libs.text.tokenizer import Tokenizer
from tests.text.corpus import WEATHER_TOOL, any_text, texts_with

# Kimi's singular section spelling is removed at the end of a text, so it is not among these.
_reply_text = texts_with(["<|im_end|>", "</think>", "<|tool_call_begin|>", "\n\n", " ", "The weather"])
_names = st.sampled_from(["get_weather", "find-order", "f"])
_call = st.tuples(_names, st.integers(0, 99), _reply_text)
_calls = st.lists(_call, max_size=2, unique_by=lambda call: call[:2])
_some_calls = st.lists(_call, min_size=1, max_size=2, unique_by=lambda call: call[:2])


def _generated(
    tokenizer: Tokenizer, reasoning: str | None, content: str, calls: list[tuple[str, int, str]]
) -> list[int]:
    """Return the canonical tokens of a reply after the generation prompt."""
    special = tokenizer.special_id
    out: list[int] = []
    if reasoning is not None:
        out += [*tokenizer.encode_text(reasoning), special("</think>")]
    out += tokenizer.encode_text(content)
    if calls:
        out.append(special("<|tool_calls_section_begin|>"))
        for name, index, arguments in calls:
            out += [special("<|tool_call_begin|>"), *tokenizer.encode_text(f"functions.{name}:{index}")]
            out += [special("<|tool_call_argument_begin|>"), *tokenizer.encode_text(arguments)]
            out.append(special("<|tool_call_end|>"))
        out.append(special("<|tool_calls_section_end|>"))
    return [*out, special("<|im_end|>")]


def _message(tokenizer: Tokenizer, token_ids: list[int], *, thinking: bool) -> dict[str, Any]:
    """Build the OpenAI message that a client assembles from the streamed deltas."""
    parser = ResponseParser(tokenizer, thinking=thinking, tools=[WEATHER_TOOL])
    message: dict[str, Any] = {"role": "assistant", "content": "", "reasoning_content": "", "tool_calls": []}
    for delta in [d for token_id in token_ids for d in parser.push([token_id])] + parser.finish():
        match delta:
            case ContentDelta(text):
                message["content"] += text
            case ReasoningDelta(text):
                message["reasoning_content"] += text
            case ToolCallStart(_, call_id, name):
                call = {"id": call_id, "type": "function", "function": {"name": name, "arguments": ""}}
                message["tool_calls"].append(call)
            case ToolCallArguments(index, text):
                message["tool_calls"][index]["function"]["arguments"] += text
    return message


@given(st.lists(any_text, min_size=1, max_size=3), _reply_text, _calls, any_text)
def test_every_reply_without_thinking_is_a_prefix_of_the_next_prompt(
    tokenizer: Tokenizer,
    questions: list[str],
    content: str,
    calls: list[tuple[str, int, str]],
    following: str,
) -> None:
    messages: list[dict[str, Any]] = [{"role": "user", "content": text} for text in questions]
    prompt = encode_chat(tokenizer, messages, [WEATHER_TOOL]).token_ids
    generated = _generated(tokenizer, None, content, calls)
    reply = _message(tokenizer, generated, thinking=False)
    full = encode_chat(tokenizer, [*messages, reply, {"role": "user", "content": following}], [WEATHER_TOOL])
    assert full.token_ids[: len(prompt) + len(generated)] == prompt + generated
    assert full.assistant_spans == [(len(prompt), len(prompt) + len(generated))]


@given(any_text, _reply_text, _reply_text, _some_calls, any_text)
def test_a_tool_loop_with_thinking_is_a_prefix_of_the_next_prompt(
    tokenizer: Tokenizer,
    question: str,
    reasoning: str,
    content: str,
    calls: list[tuple[str, int, str]],
    result: str,
) -> None:
    messages: list[dict[str, Any]] = [{"role": "user", "content": question}]
    prompt = encode_chat(tokenizer, messages, thinking=True).token_ids
    generated = _generated(tokenizer, reasoning, content, calls)
    reply = _message(tokenizer, generated, thinking=True)
    answer = {"role": "tool", "tool_call_id": reply["tool_calls"][0]["id"], "content": result}
    full = encode_chat(tokenizer, [*messages, reply, answer], thinking=True)
    assert full.token_ids[: len(prompt) + len(generated)] == prompt + generated
    assert full.assistant_spans == [(len(prompt), len(prompt) + len(generated))]
