"""Generate stores answers and goes on with them, and with those of HTTP, before fake workers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from libs.common import api_bounds
from services.router.request.model_card import ModelCard
from slipstream import errors
from slipstream.async_client import AsyncClient
from slipstream.bound import Size
from slipstream.v1 import router_pb2
from slipstream.v1.router_pb2_grpc import RouterServiceStub
from tests.router.conftest import HELLO, WAIT_S, eventually
from tests.router.support.fake_cluster import FakeCluster
from tests.router.support.response_calls import GO_ON, TOOL, Responses, request_of, text_of
from tests.router.support.two_faces import KEYS, TwoFaces, key_of, refusal, two_faces

PATH = "/v1/responses"


@pytest.fixture
async def faces(cluster: FakeCluster, card: ModelCard, tmp_path: Path) -> AsyncIterator[TwoFaces]:
    async with two_faces(cluster, card, tmp_path) as opened:
        yield opened


async def test_an_answer_without_store_has_no_id(faces: TwoFaces) -> None:
    assert (await Responses(faces).answer()).id == ""
    rows = await faces.database.read(lambda tx: tx.execute("SELECT id FROM stored_responses"))
    assert rows == []


async def test_a_stored_answer_has_its_log_probabilities_over_http(faces: TwoFaces) -> None:
    answer = await Responses(faces).answer(store=True, top_logprobs=2)
    shown = await faces.ask("GET", f"{PATH}/{answer.id}")
    rows = shown["output"][0]["content"][0]["logprobs"]
    assert len(rows) == 6 and len(rows[0]["top_logprobs"]) == 2
    assert text_of((await Responses(faces).get(answer.id)).output[0]) == answer.text


async def test_a_session_goes_on_by_its_id_over_grpc(faces: TwoFaces) -> None:
    """The prompt is that of the whole conversation, also for calls, their results and reasoning."""
    responses = Responses(faces)
    call = {"id": "c1", "type": "function", "function": {"name": "find", "arguments": '{"x": 1}'}}
    history: list[Any] = [
        {"role": "system", "content": "Be kind."},
        *HELLO,
        {"role": "assistant", "content": "", "reasoning_content": "Hm.", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "there"},
    ]
    last = ""
    for _ in range(3):
        new = history if not last else GO_ON
        answer = await responses.answer(new, store=True, previous_response_id=last, tools=[TOOL])
        history += [*(GO_ON if last else []), {"role": "assistant", "content": answer.text}]
        last = answer.id
    whole = await responses.tokens([*history, *GO_ON], tools=[TOOL])
    assert await responses.tokens(GO_ON, previous_response_id=last, tools=[TOOL]) == whole
    plain = await responses.answer(GO_ON, previous_response_id=last, tools=[TOOL])
    assert (plain.id, plain.started.prompt_tokens) == ("", len(whole))
    found = await responses.get(last)
    assert found.previous_response_id


async def test_an_id_of_one_api_goes_on_in_the_other(faces: TwoFaces) -> None:
    responses = Responses(faces)
    first = await faces.ask("POST", PATH, json={"input": "Where is it?", "max_output_tokens": 4})
    second = await responses.answer(GO_ON, store=True, previous_response_id=first["id"])
    assert (await responses.get(second.id)).previous_response_id == first["id"]
    body = {"input": "And then?", "previous_response_id": second.id}
    counted = await faces.ask("POST", f"{PATH}/input_tokens", json=body)
    third = await faces.ask("POST", PATH, json={**body, "max_output_tokens": 3})
    history = [
        {"role": "user", "content": "Where is it?"},
        {"role": "assistant", "content": first["output"][0]["content"][0]["text"]},
        *GO_ON,
        {"role": "assistant", "content": second.text},
        {"role": "user", "content": "And then?"},
    ]
    whole = await responses.tokens(history)
    assert counted["input_tokens"] == third["usage"]["input_tokens"] == len(whole)
    assert (await responses.get(third["id"])).usage.prompt_tokens == len(whole)
    fourth = [{"role": "user", "content": "!"}]
    assert await responses.tokens(fourth, previous_response_id=third["id"]) == await responses.tokens(
        [*history, {"role": "assistant", "content": third["output"][0]["content"][0]["text"]}, *fourth]
    )


async def test_several_answers_may_go_on_with_one_response(faces: TwoFaces) -> None:
    responses = Responses(faces)
    first = await responses.answer(store=True)
    call = responses.begin(GO_ON, previous_response_id=first.id, n=2)
    events = [event async for part in call for event in part.events]
    starts = [event.started for event in events if event.HasField("started")]
    assert len(starts) == 2
    assert {start.prompt_tokens for start in starts} == {
        len(await responses.tokens(GO_ON, previous_response_id=first.id))
    }


async def test_a_cancelled_call_stores_nothing(faces: TwoFaces, cluster: FakeCluster) -> None:
    for decode in cluster.decodes:
        decode.gate.clear()
    call = Responses(faces).begin(store=True)
    started = (await call.read()).events[0].started
    assert started.response_id
    call.cancel()
    await eventually(lambda: not faces.router.manager.held and not cluster.held)
    error = await refusal(Responses(faces).get(started.response_id))
    assert isinstance(error, errors.NotFound)
    for decode in cluster.decodes:
        decode.gate.set()


@pytest.mark.parametrize(
    ("request_of_call", "field"),
    [
        (router_pb2.GenerateRequest(prompt="x", store=True), "store"),
        (router_pb2.GenerateRequest(prompt="x", previous_response_id="resp_1"), "previous_response_id"),
        (request_of(HELLO, store=True, n=2), "store"),
        (request_of([], previous_response_id="resp_1"), "messages"),
        (request_of([{**HELLO[0], "name": "ann"}], store=True), "messages[0].name"),
        (
            request_of([*HELLO, {"role": "assistant", "content": "I", "partial": True}], store=True),
            "messages[1].partial",
        ),
    ],
)
async def test_what_cannot_be_stored_is_refused_by_field(
    faces: TwoFaces, request_of_call: router_pb2.GenerateRequest, field: str
) -> None:
    stub: Any = RouterServiceStub(faces.channel)
    error = await refusal(stub.Generate(request_of_call, metadata=key_of(), timeout=WAIT_S).read())
    assert isinstance(error, errors.InvalidArgument) and error.field == field


async def test_a_stored_call_cannot_be_resumed(faces: TwoFaces) -> None:
    request = request_of(HELLO, store=True)
    request.resume_after_tokens = 2
    stub: Any = RouterServiceStub(faces.channel)
    error = await refusal(stub.Generate(request, metadata=key_of(), timeout=WAIT_S).read())
    assert isinstance(error, errors.InvalidArgument) and error.field == "resume_after_tokens"


async def test_a_bad_message_is_named_by_its_own_place(faces: TwoFaces) -> None:
    """Messages of the conversation before do not count."""
    responses = Responses(faces)
    answer = await responses.answer(store=True)
    bad = [*GO_ON, {"role": "tool", "content": "x"}]
    error = await refusal(responses.answer(bad, previous_response_id=answer.id))
    assert isinstance(error, errors.InvalidArgument) and error.field.startswith("messages[1]")


async def test_an_answer_that_cannot_be_stored_fails(
    faces: TwoFaces, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(api_bounds, "STORED", Size("store", 0, 100, "bytes", "-"))
    error = await refusal(Responses(faces).answer(store=True))
    assert isinstance(error, errors.InvalidArgument) and error.field == "store"
    assert not faces.router.manager.held


async def test_a_conversation_beyond_its_bound_is_refused(
    faces: TwoFaces, monkeypatch: pytest.MonkeyPatch
) -> None:
    responses = Responses(faces)
    answer = await responses.answer(store=True)
    monkeypatch.setattr(api_bounds, "CONVERSATION", Size("previous_response_id", 0, 10, "bytes", "-"))
    error = await refusal(responses.answer(GO_ON, previous_response_id=answer.id))
    assert isinstance(error, errors.InvalidArgument) and error.field == "previous_response_id"


async def test_many_calls_store_side_by_side(faces: TwoFaces) -> None:
    responses = Responses(faces)
    answers = await asyncio.gather(*[responses.answer(store=True) for _ in range(8)])
    assert len({answer.id for answer in answers}) == 8
    for answer in answers:
        assert text_of((await responses.get(answer.id)).output[0]) == answer.text


async def test_the_sdk_stores_and_continues_answers(faces: TwoFaces) -> None:
    async with AsyncClient(faces.router.host.endpoint, api_key=KEYS["alice"]) as client:
        first = await client.chat(HELLO, store=True, max_tokens=4)
        second = await client.chat(GO_ON, previous_response_id=first.response_id, max_tokens=4)
    assert first.response_id and second.response_id == ""
    assert second.usage is not None
    history = [*HELLO, {"role": "assistant", "content": first.text}, *GO_ON]
    assert second.usage.prompt_tokens == len(await Responses(faces).tokens(history))
