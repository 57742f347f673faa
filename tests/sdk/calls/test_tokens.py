"""`client.tokenize` and `client.detokenize` against a whole router."""

from __future__ import annotations

from typing import Any

import pytest

from services.router.request.model_card import ModelCard
from slipstream.errors import InvalidArgument
from tests.router.conftest import HELLO, MAX_CONTEXT_TOKENS
from tests.sdk.calls.either_client import EitherClient


async def test_a_text_becomes_tokens_and_a_text_again(client: EitherClient, card: ModelCard) -> None:
    tokens = await client("tokenize", "Where is my order?")
    assert tokens == card.tokenizer.encode_text("Where is my order?")
    assert tokens.max_context_tokens == MAX_CONTEXT_TOKENS
    assert await client("detokenize", tokens) == "Where is my order?"


async def test_messages_become_the_prompt_that_chat_sends(client: EitherClient) -> None:
    tool = {"type": "function", "function": {"name": "find", "parameters": {"type": "object"}}}
    for arguments in ({}, {"tools": [tool], "max_tokens": 4}):
        given: Any = arguments
        tokens = await client("tokenize", HELLO, **given)
        reply = await client("chat", HELLO, **{"max_tokens": 4, **given})
        assert len(tokens) == reply.usage.prompt_tokens
        assert HELLO[0]["content"] in await client("detokenize", tokens)


async def test_a_completion_of_tokens_is_that_of_their_text(client: EitherClient) -> None:
    tokens = await client("tokenize", "Where is my order?")
    replies = [
        await client("complete", each, max_tokens=4, seed=1) for each in (tokens, "Where is my order?")
    ]
    assert replies[0].text == replies[1].text != ""
    assert [reply.usage.prompt_tokens for reply in replies] == [len(tokens)] * 2


@pytest.mark.parametrize(
    ("method", "given", "field"),
    [
        ("tokenize", [{"role": "nobody", "content": "hi"}], "messages[0].role"),
        ("detokenize", ["a"], "token_ids"),
        ("detokenize", [-1], "token_ids"),
        ("complete", [-1], "prompt"),
        ("complete", [], "prompt"),
        ("complete", [1 << 30], "prompt"),
        ("stream_complete", {"role": "user"}, "prompt"),
    ],
)
async def test_what_has_no_tokens_is_refused_by_field(
    client: EitherClient, method: str, given: Any, field: str
) -> None:
    with pytest.raises(InvalidArgument) as refused:
        await client(method, given)
    assert refused.value.field == field
