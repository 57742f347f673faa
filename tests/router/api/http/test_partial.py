"""Answers that continue a partial message, before fake workers, over both APIs."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Sequence
from typing import Any

import aiohttp
import pytest

from services.router.request.model_card import ModelCard
from services.router.server import RouterServer
from slipstream.async_client import AsyncClient
from tests.router.support.fake_model import FakeModel

USER: dict[str, Any] = {"role": "user", "content": "Where is my order?"}
ANSWER = "Your order 4711 left the warehouse yesterday, it's on its way."
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 64}


@pytest.fixture
async def http(router: RouterServer) -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession(f"http://{router.http_endpoint}") as session:
        yield session


@pytest.fixture
def ids(model: FakeModel, card: ModelCard) -> list[int]:
    """The tokens of ANSWER, which the model writes on from wherever a prompt ends in it."""
    said = card.tokenizer.encode_text(ANSWER)
    think_end, end = (card.tokenizer.special_id(name) for name in ("</think>", "<|im_end|>"))

    def answer(prompt: Sequence[int], _: Any) -> Sequence[int]:
        begun = list(prompt)[len(prompt) - list(prompt)[::-1].index(think_end) :]
        assert begun == said[: len(begun)]
        return [*said[len(begun) :], end]

    model.answer = answer
    return said


def cuts(card: ModelCard, ids: list[int]) -> list[tuple[str, str]]:
    """Each beginning of the answer whose tokens are those that the model writes, and the rest."""
    decode = card.tokenizer.decode
    found = [(decode(ids[:n]), decode(ids[n:])) for n in range(len(ids))]
    return [
        (begun, rest)
        for begun, rest in found
        if card.tokenizer.encode_text(begun) == ids[: n_of(card, begun)]
    ]


def n_of(card: ModelCard, text: str) -> int:
    return len(card.tokenizer.encode_text(text))


async def ask(http: aiohttp.ClientSession, **body: Any) -> Any:
    async with http.post("/v1/chat/completions", json={**GREEDY, **body}) as answer:
        assert answer.status == 200, await answer.text()
        return await answer.json() if not body.get("stream") else await answer.text()


def streamed(text: str) -> str:
    assert text.endswith("data: [DONE]\n\n")
    events = [event for event in text.split("\n\n") if event.startswith("data: {")]
    chunks = [json.loads(event.removeprefix("data: ")) for event in events]
    return "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks)


async def test_an_answer_goes_on_where_the_text_ends(
    http: aiohttp.ClientSession, card: ModelCard, ids: list[int]
) -> None:
    whole = await ask(http, messages=[USER])
    assert whole["choices"][0]["message"]["content"] == ANSWER
    given = cuts(card, ids)
    assert len(given) > 5
    for begun, rest in given:
        messages = [USER, {"role": "assistant", "content": begun, "partial": True}]
        answer = await ask(http, messages=messages, thinking={"type": "enabled"})
        said = answer["choices"][0]["message"]
        assert (said["content"], said.get("reasoning_content")) == (rest, None)
        usage = answer["usage"]
        assert usage["prompt_tokens"] == whole["usage"]["prompt_tokens"] + n_of(card, begun)
        assert usage["completion_tokens"] == whole["usage"]["completion_tokens"] - n_of(card, begun)


async def test_a_stream_and_vllms_names_and_choices_go_on_alike(
    http: aiohttp.ClientSession, card: ModelCard, ids: list[int]
) -> None:
    begun, rest = cuts(card, ids)[4]
    prefix = [USER, {"role": "assistant", "content": begun, "prefix": True}]
    assert streamed(await ask(http, messages=prefix, stream=True)) == rest
    body = {"continue_final_message": True, "add_generation_prompt": False}
    answer = await ask(http, messages=[USER, {"role": "assistant", "content": begun}], n=2, **body)
    assert [choice["message"]["content"] for choice in answer["choices"]] == [rest, rest]


@pytest.mark.parametrize("as_block", [False, True])
async def test_a_last_message_of_anthropics_api_goes_on(
    http: aiohttp.ClientSession, card: ModelCard, ids: list[int], as_block: bool
) -> None:
    given = [(begun, rest) for begun, rest in cuts(card, ids) if begun == begun.rstrip()]
    for begun, rest in given[:6]:
        content: Any = [{"type": "text", "text": begun}] if as_block else begun
        body = {"messages": [USER, {"role": "assistant", "content": content}], "max_tokens": 64}
        async with http.post("/v1/messages", json=body) as answer:
            assert answer.status == 200, await answer.text()
            said = await answer.json()
        assert said["content"] == [{"type": "text", "text": rest}]
        body["tools"] = [{"name": "f", "input_schema": {"type": "object"}}]
        async with http.post("/v1/messages", json={**body, "tool_choice": {"type": "any"}}) as answer:
            assert (answer.status, (await answer.json())["error"]["type"]) == (400, "invalid_request_error")


async def test_the_sdk_continues_a_message(client: AsyncClient, card: ModelCard, ids: list[int]) -> None:
    begun, rest = cuts(card, ids)[3]
    reply = await client.chat([USER, {"role": "assistant", "content": begun, "partial": True}], **GREEDY)
    assert (reply.text, reply.reasoning) == (rest, "")


async def test_a_mark_on_the_users_message_is_refused_by_name(http: aiohttp.ClientSession) -> None:
    for messages, flags, field in (
        ([{**USER, "partial": True}], {}, "messages[0].partial"),
        ([USER], {"continue_final_message": True}, "continue_final_message"),
    ):
        async with http.post("/v1/chat/completions", json={"messages": messages, **flags}) as answer:
            assert answer.status == 400
            error = (await answer.json())["error"]
        assert error["param"] == field
        assert error["message"] == f"{field}: is only for a last message of role assistant"
