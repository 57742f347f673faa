"""The prompt of a partial message: that of the conversation before it, and the message up to its text."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from libs.text.chat_template import encode_chat
from libs.text.response_parser import ToolCallForm
from libs.text.special_tokens import THINK_BEGIN, THINK_END
from services.router.api.openai.request import parse_chat
from services.router.api.openai.token_bodies import parse_tokenize
from services.router.api.rpc.generate_message import parse_generation
from services.router.request.conversations.token_cache import TokenCache
from services.router.request.model_card import ModelCard
from services.router.request.prompt import Prompt, PromptDraft
from services.router.request.prompt_encoder import PromptEncoder
from services.router.request.types import ChatInput, GenerationRequest
from slipstream.errors import InvalidArgument
from slipstream.requests import chat_request
from tests.text.corpus import WEATHER_TOOL

USER: dict[str, Any] = {"role": "user", "content": "Where is my order?"}
BEGUN: dict[str, Any] = {"role": "assistant", "content": "Your order 4711 left the"}
HEAD = "<|im_user|>user<|im_middle|>Where is my order?<|im_end|><|im_assistant|>assistant<|im_middle|>"


def chat_of(**body: Any) -> ChatInput:
    (request,), _ = parse_chat(json.dumps(body).encode())
    assert isinstance(request.input, ChatInput)
    return request.input


def prompt_of(card: ModelCard, chat: ChatInput, memory: TokenCache | None = None) -> Prompt:
    draft = PromptDraft.of(GenerationRequest(chat), card, memory or TokenCache(), tenant="t")
    encoder, encoded = PromptEncoder(draft), None
    while encoded is None:
        encoded = encoder.step()
    return draft.finish(encoded, request_id="r")


def text_of(card: ModelCard, chat: ChatInput) -> str:
    return card.tokenizer.decode(prompt_of(card, chat).token_ids.tolist(), keep_special=True)


@pytest.mark.parametrize(
    "body",
    [
        {"messages": [USER, {**BEGUN, "partial": True}]},
        {"messages": [{**USER, "partial": False}, {**BEGUN, "prefix": True}]},
        {"messages": [USER, BEGUN], "continue_final_message": True, "add_generation_prompt": False},
        {"messages": [USER, BEGUN], "continue_final_message": True},
    ],
)
def test_each_name_ends_the_prompt_with_the_text(card: ModelCard, body: dict[str, Any]) -> None:
    assert text_of(card, chat_of(**body)) == HEAD + "<think></think>" + BEGUN["content"]
    tokenized = parse_tokenize(json.dumps(body).encode()).request.input
    assert isinstance(tokenized, ChatInput)
    assert text_of(card, tokenized) == HEAD + "<think></think>" + BEGUN["content"]


@pytest.mark.parametrize("name", ["partial", "prefix"])
def test_the_sdks_message_is_the_same_prompt(card: ModelCard, name: str) -> None:
    chat = parse_generation(chat_request([USER, {**BEGUN, name: True}], {})).input
    assert isinstance(chat, ChatInput)
    assert text_of(card, chat) == HEAD + "<think></think>" + BEGUN["content"]
    with pytest.raises(InvalidArgument) as refused:
        chat_request([{**BEGUN, name: "yes"}], {})
    assert refused.value.message == f"messages[0].{name}: must be true or false"


def test_without_a_mark_the_message_is_over(card: ModelCard) -> None:
    chat = chat_of(messages=[USER, BEGUN], add_generation_prompt=True, continue_final_message=False)
    assert text_of(card, chat).endswith(
        "left the<|im_end|><|im_assistant|>assistant<|im_middle|><think></think>"
    )


def test_reasoning_is_over_and_stays_in_the_prompt_of_a_model_that_reasons(card: ModelCard) -> None:
    begun = {**BEGUN, "reasoning_content": "It left.", "partial": True}
    body: dict[str, Any] = {"messages": [USER, begun], "thinking": {"type": "enabled"}}
    prompt = prompt_of(card, chat_of(**body))
    text = card.tokenizer.decode(prompt.token_ids.tolist(), keep_special=True)
    assert text == HEAD + f"{THINK_BEGIN}It left.{THINK_END}" + BEGUN["content"]
    assert not prompt.thinking
    body["thinking"] = {"type": "disabled"}
    assert text_of(card, chat_of(**body)) == HEAD + "<think></think>" + BEGUN["content"]


def test_the_messages_before_are_cached_with_their_tools(card: ModelCard) -> None:
    memory = TokenCache()
    first = prompt_of(card, chat_of(messages=[USER], tools=[WEATHER_TOOL]), memory)
    partial = chat_of(messages=[USER, {**BEGUN, "partial": True}], tools=[WEATHER_TOOL])
    prompt = prompt_of(card, partial, memory)
    n_text = len(card.tokenizer.encode_text(BEGUN["content"]))
    assert prompt.token_ids.tolist()[:-n_text] == first.token_ids.tolist()
    assert prompt.encoded_tokens == len(prompt.token_ids) - len(
        encode_chat(card.tokenizer, [USER], [WEATHER_TOOL], add_generation_prompt=False).token_ids
    )
    assert prompt.call_form is ToolCallForm.PARSED


def test_a_partial_message_may_be_all_there_is(card: ModelCard) -> None:
    chat = chat_of(messages=[{"role": "assistant", "content": "It", "partial": True}])
    assert text_of(card, chat) == "<|im_assistant|>assistant<|im_middle|><think></think>It"


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (
            {"messages": [{**BEGUN, "prefix": True}, USER]},
            "messages[0].prefix: is only for a last message of role assistant",
        ),
        (
            {"messages": [{**BEGUN, "partial": True}, {**BEGUN, "partial": True}]},
            "messages[0].partial: is only for a last message of role assistant",
        ),
        ({"messages": [{**BEGUN, "partial": "yes"}]}, "messages[0].partial: must be true or false"),
        (
            {"messages": [USER, BEGUN], "add_generation_prompt": False},
            "add_generation_prompt: must be false when the last message is continued, and true otherwise",
        ),
    ],
)
def test_a_mark_that_does_not_fit_is_refused_by_name(body: dict[str, Any], message: str) -> None:
    parsers: list[Callable[[bytes], object]] = [parse_chat, parse_tokenize]
    for parse in parsers:
        with pytest.raises(InvalidArgument) as refused:
            parse(json.dumps(body).encode())
        assert refused.value.message == message
