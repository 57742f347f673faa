"""Echoed prompts and single calls over gRPC and in the SDK: what HTTP has, too."""

from __future__ import annotations

import pytest

from libs.text import special_tokens as special
from services.router.request.model_card import ModelCard
from slipstream.async_client import AsyncClient
from slipstream.v1 import router_pb2
from tests.router.conftest import HELLO, script, text_ids
from tests.router.support.decodings import note_decodings
from tests.router.support.fake_model import FakeModel

PROMPT = "Where is my order?"
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}


@pytest.mark.parametrize("n", [1, 2])
async def test_an_echoed_prompt_stands_before_each_answer(
    client: AsyncClient, model: FakeModel, card: ModelCard, n: int
) -> None:
    script(model, text_ids(card, " It is here."))
    plain = await client.complete(PROMPT, n=n, temperature=0.0)
    echoed = await client.complete(PROMPT, n=n, temperature=0.0, echo=True)
    assert [each.text for each in echoed.choices] == [PROMPT + each.text for each in plain.choices]
    for each, of_plain in zip(echoed.choices, plain.choices, strict=True):
        assert each.usage is not None and of_plain.usage is not None
        assert each.usage.completion_tokens == of_plain.usage.completion_tokens


async def test_the_echo_of_token_ids_is_their_text_and_one_delta(
    client: AsyncClient, card: ModelCard
) -> None:
    ids = card.tokenizer.encode_text(PROMPT)
    request = router_pb2.GenerateRequest(token_ids=router_pb2.TokenIds(ids=ids), echo=True)
    request.sampling.max_tokens = 2
    events = [event async for part in client._stub.Generate(request) for event in part.events]
    assert [event.WhichOneof("kind") for event in events[:2]] == ["started", "delta"]
    assert (events[1].delta.text, events[1].delta.completion_tokens) == (PROMPT, 0)
    assert PROMPT not in "".join(event.delta.text for event in events[2:])
    request.resume_after_tokens = 1
    events = [event async for part in client._stub.Generate(request) for event in part.events]
    assert PROMPT not in "".join(event.delta.text for event in events)


@pytest.mark.parametrize("n", [1, 3])
async def test_a_long_prompt_is_decoded_once_off_the_event_loop(
    client: AsyncClient, card: ModelCard, monkeypatch: pytest.MonkeyPatch, n: int
) -> None:
    ids = card.tokenizer.encode_text(PROMPT) * 200
    text = card.tokenizer.decode(ids)
    decodings = note_decodings(card, ids, monkeypatch)
    request = router_pb2.GenerateRequest(token_ids=router_pb2.TokenIds(ids=ids), echo=True, n=n)
    request.sampling.max_tokens = 1
    events = [event async for part in client._stub.Generate(request) for event in part.events]
    assert sorted(event.delta.index for event in events if event.delta.text == text) == list(range(n))
    assert decodings == [False]


async def test_no_tokens_answer_the_prompt_alone_with_its_log_probabilities(
    client: AsyncClient, card: ModelCard
) -> None:
    reply = await client.complete(PROMPT, max_tokens=0, echo=True, prompt_logprobs=1)
    assert (reply.text, reply.finish_reason, reply.logprobs) == (PROMPT, "length", [])
    assert reply.usage is not None
    assert reply.usage.completion_tokens == 0
    assert "".join(row.token for row in reply.prompt_logprobs) == PROMPT


async def test_without_parallel_calls_the_answer_ends_after_the_first(
    client: AsyncClient, model: FakeModel, card: ModelCard
) -> None:
    encode, names = card.tokenizer.encode_text, card.tokenizer.special_ids
    ids = [names[special.TOOL_CALLS_SECTION_BEGIN]]
    for number in range(2):
        ids += [names[special.TOOL_CALL_BEGIN], *encode(f"functions.look:{number}")]
        ids += [names[special.TOOL_CALL_ARGUMENT_BEGIN], *encode("{}"), names[special.TOOL_CALL_END]]
    script(model, [*ids, names[special.TOOL_CALLS_SECTION_END], names[special.IM_END]])
    assert len((await client.chat(HELLO, tools=[TOOL])).tool_calls) == 2
    for parallel, n_calls in ((True, 2), (False, 1)):
        reply = await client.chat(HELLO, tools=[TOOL], parallel_tool_calls=parallel)
        assert (len(reply.tool_calls), reply.finish_reason) == (n_calls, "tool_calls")
