"""Stored answers over gRPC of a whole router before fake workers, and the same ones over HTTP."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from libs.common import api_bounds
from services.router.api.responses import store as store_module
from services.router.request.model_card import ModelCard
from slipstream import errors
from slipstream.bound import Size
from slipstream.requests import chat_request
from slipstream.rpc.dial import dial
from slipstream.v1 import responses_pb2, router_pb2
from slipstream.v1.responses_pb2_grpc import ResponseServiceStub
from slipstream.v1.router_pb2_grpc import RouterServiceStub
from tests.router.conftest import HELLO, WAIT_S, eventually, open_router
from tests.router.support.fake_cluster import FakeCluster
from tests.router.support.two_faces import TwoFaces, key_of, refusal, two_faces

PATH = "/v1/responses"
TOOL = {"type": "function", "function": {"name": "find", "parameters": {"type": "object"}}}
GO_ON = [{"role": "user", "content": "Go on."}]


@pytest.fixture
async def faces(cluster: FakeCluster, card: ModelCard, tmp_path: Path) -> AsyncIterator[TwoFaces]:
    async with two_faces(cluster, card, tmp_path) as opened:
        yield opened


class Answer:
    """A whole answer over gRPC."""

    def __init__(self, events: Sequence[router_pb2.GenerateEvent]) -> None:
        [self.started] = [event.started for event in events if event.HasField("started")]
        [self.finished] = [event.finished for event in events if event.HasField("finished")]
        self.text = "".join([event.delta.text for event in events if event.HasField("delta")])
        self.id = self.started.response_id


class Responses:
    """The calls of one tenant."""

    def __init__(self, faces: TwoFaces, tenant: str = "alice") -> None:
        self._responses: Any = ResponseServiceStub(faces.channel)
        self._router: Any = RouterServiceStub(faces.channel)
        self._options: Any = {"metadata": key_of(tenant), "timeout": WAIT_S}

    def call(self, method: str, **fields: Any) -> Any:
        request = getattr(responses_pb2, f"{method}Request")(**fields)
        return getattr(self._responses, method)(request, **self._options)

    async def get(self, response_id: str) -> responses_pb2.Response:
        found: responses_pb2.Response = (await self.call("GetResponse", response_id=response_id)).response
        return found

    def begin(self, messages: Sequence[Any] = HELLO, **fields: Any) -> Any:
        return self._router.Generate(request_of(messages, **fields), **self._options)

    async def answer(self, messages: Sequence[Any] = HELLO, **fields: Any) -> Answer:
        return Answer([event async for part in self.begin(messages, **fields) for event in part.events])

    async def tokens(self, messages: Sequence[Any], **fields: Any) -> Sequence[int]:
        request = router_pb2.TokenizeRequest(request=request_of(messages, **fields))
        found: Sequence[int] = (await self._router.Tokenize(request, **self._options)).token_ids
        return found


def request_of(
    messages: Sequence[Any], *, store: bool = False, previous_response_id: str = "", **arguments: Any
) -> router_pb2.GenerateRequest:
    request = chat_request(messages, {"max_tokens": 6, **arguments})  # type: ignore[typeddict-item]
    request.store, request.previous_response_id = store, previous_response_id
    return request


def text_of(item: responses_pb2.ResponseItem) -> str:
    return "".join([part.text for part in item.message.content])


async def test_a_stored_answer_is_the_same_over_both_apis(faces: TwoFaces, card: ModelCard) -> None:
    responses = Responses(faces)
    fields = {"metadata": {"a": "b"}, "temperature": 0.7, "tools": [TOOL], "tool_choice": "none"}
    answer = await responses.answer(store=True, **fields)
    assert answer.id.startswith("resp_") and answer.text
    found = await responses.get(answer.id)
    [item] = found.output
    assert (found.id, found.model, dict(found.metadata)) == (answer.id, card.name, {"a": "b"})
    assert found.status == responses_pb2.RESPONSE_STATUS_INCOMPLETE  # of six tokens
    assert (text_of(item), item.message.role) == (answer.text, router_pb2.MESSAGE_ROLE_ASSISTANT)
    assert found.usage.completion_tokens == answer.finished.usage.completion_tokens == 6
    assert found.created_unix_s == int(answer.started.created_unix_s)
    shown = await faces.ask("GET", f"{PATH}/{answer.id}")
    assert shown["output"][0]["content"][0]["text"] == answer.text
    assert (shown["temperature"], shown["tool_choice"], shown["store"]) == (0.7, "none", True)
    assert (shown["tools"][0]["name"], shown["max_output_tokens"]) == ("find", 6)
    assert (shown["status"], shown["metadata"]) == ("incomplete", {"a": "b"})


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


async def test_input_items_lead_from_page_to_page(faces: TwoFaces) -> None:
    responses = Responses(faces)
    messages = [
        {"role": "system", "content": "Be kind."},
        *HELLO,
        {"role": "assistant", "content": "a"},
        *GO_ON,
    ]
    answer = await responses.answer(messages, store=True)
    first = await responses.call("ListInputItems", response_id=answer.id, limit=3, oldest_first=True)
    second = await responses.call(
        "ListInputItems", response_id=answer.id, limit=3, oldest_first=True, after=first.items[-1].id
    )
    assert (first.has_more, second.has_more) == (True, False)
    assert [text_of(item) for item in (*first.items, *second.items)] == [
        "Be kind.",
        HELLO[0]["content"],
        "a",
        "Go on.",
    ]
    newest = await responses.call("ListInputItems", response_id=answer.id, limit=1)
    assert newest.items[0] == second.items[-1]
    shown = await faces.ask("GET", f"{PATH}/{answer.id}/input_items?order=asc")
    assert [item["id"] for item in shown["data"]] == [item.id for item in (*first.items, *second.items)]
    for field, given in (("limit", 101), ("after", "none")):
        error = await refusal(responses.call("ListInputItems", response_id=answer.id, **{field: given}))
        assert getattr(error, "field", "") == field


async def test_items_of_http_are_shown_over_grpc(faces: TwoFaces) -> None:
    items = [
        {
            "role": "user",
            "content": [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}],
        },
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "Hm."}]},
        {"type": "function_call", "call_id": "c", "name": "find", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": [{"type": "input_text", "text": "x"}]},
    ]
    made = await faces.ask(
        "POST", PATH, json={"input": items, "instructions": "Be kind.", "max_output_tokens": 2}
    )
    page = await Responses(faces).call("ListInputItems", response_id=made["id"], oldest_first=True)
    message, reasoning, call, result = page.items
    assert (text_of(message), message.message.role) == ("ab", router_pb2.MESSAGE_ROLE_USER)
    assert reasoning.reasoning == "Hm."
    assert (call.tool_call.id, call.tool_call.name, call.tool_call.arguments) == ("c", "find", "{}")
    assert (result.tool_result.tool_call_id, result.tool_result.output) == ("c", "x")
    assert (await Responses(faces).get(made["id"])).instructions == "Be kind."


async def test_a_response_is_deleted_and_what_continues_it_stays(faces: TwoFaces) -> None:
    responses = Responses(faces)
    first = await responses.answer(store=True)
    second = await responses.answer(GO_ON, store=True, previous_response_id=first.id)
    await responses.call("DeleteResponse", response_id=first.id)
    await faces.ask("GET", f"{PATH}/{first.id}", status=404)
    calls = [
        responses.call("GetResponse", response_id=first.id),
        responses.call("DeleteResponse", response_id=first.id),
        responses.call("ListInputItems", response_id=first.id),
        responses.call("CancelResponse", response_id=first.id),
        responses.answer(GO_ON, previous_response_id=first.id),
    ]
    fields = [error.field for call in calls if isinstance(error := await refusal(call), errors.NotFound)]
    assert fields == [*["response_id"] * 4, "previous_response_id"]
    assert await responses.tokens(GO_ON, previous_response_id=second.id)


async def test_a_tenant_sees_its_own_alone(faces: TwoFaces) -> None:
    answer = await Responses(faces).answer(store=True)
    bob = Responses(faces, "bob")
    for method in ("GetResponse", "ListInputItems", "CancelResponse", "DeleteResponse"):
        error = await refusal(bob.call(method, response_id=answer.id))
        assert isinstance(error, errors.NotFound) and error.field == "response_id", method
    for call in (
        bob.answer(previous_response_id=answer.id),
        bob.tokens(GO_ON, previous_response_id=answer.id),
    ):
        error = await refusal(call)
        assert isinstance(error, errors.NotFound) and error.field == "previous_response_id"
    assert await Responses(faces).get(answer.id)


async def test_a_response_in_the_background_is_seen_and_cancelled(
    faces: TwoFaces, cluster: FakeCluster
) -> None:
    for decode in cluster.decodes:
        decode.gate.clear()
    responses = Responses(faces)
    begun = await faces.ask(
        "POST", PATH, json={"input": "Where?", "background": True, "metadata": {"a": "b"}}
    )
    found = await responses.get(begun["id"])
    running = {responses_pb2.RESPONSE_STATUS_QUEUED, responses_pb2.RESPONSE_STATUS_IN_PROGRESS}
    assert found.status in running and dict(found.metadata) == {"a": "b"} and not found.HasField("usage")
    early = await refusal(responses.call("DeleteResponse", response_id=begun["id"]))
    assert isinstance(early, errors.InvalidArgument) and early.field == "response_id"
    going_on = await refusal(responses.answer(GO_ON, previous_response_id=begun["id"]))
    assert isinstance(going_on, errors.InvalidArgument) and going_on.field == "previous_response_id"
    page = await responses.call("ListInputItems", response_id=begun["id"])
    assert [text_of(item) for item in page.items] == ["Where?"]
    cancelled = await responses.call("CancelResponse", response_id=begun["id"])
    assert cancelled.response.status == responses_pb2.RESPONSE_STATUS_CANCELLED
    assert (await faces.ask("GET", f"{PATH}/{begun['id']}"))["status"] == "cancelled"
    await responses.call("DeleteResponse", response_id=begun["id"])
    for decode in cluster.decodes:
        decode.gate.set()


async def test_only_a_response_in_the_background_is_cancelled(faces: TwoFaces) -> None:
    answer = await Responses(faces).answer(store=True)
    error = await refusal(Responses(faces).call("CancelResponse", response_id=answer.id))
    assert isinstance(error, errors.InvalidArgument) and error.field == "response_id"


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
    monkeypatch.setattr(store_module.api_bounds, "STORED", Size("store", 0, 100, "bytes", "-"))
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


async def test_long_answers_count_in_the_share_of_their_tenant(
    faces: TwoFaces, monkeypatch: pytest.MonkeyPatch
) -> None:
    responses = Responses(faces)
    long = [{"role": "user", "content": "word " * 30_000}]  # the context has no room for it
    answer = await responses.answer(store=True)
    sql = "UPDATE stored_responses SET items = ? WHERE id = ?"
    packed = store_module._packed(
        store_module.StoredResponse({}, [{"id": "i", "type": "message", **long[0]}])
    )
    await faces.database.run(lambda tx: tx.execute(sql, (packed[1], answer.id)))
    delivery = faces.router._http.generation.delivery
    monkeypatch.setattr(delivery._sent, "_most_tenant_chars", 100_000)
    error = await refusal(responses.call("ListInputItems", response_id=answer.id))
    assert isinstance(error, errors.Overloaded)
    monkeypatch.setattr(delivery._sent, "_most_tenant_chars", 200_000)
    for _ in range(3):  # each gives its share back
        await responses.call("ListInputItems", response_id=answer.id)
    await eventually(lambda: delivery._sent.held_chars == 0)


@pytest.mark.parametrize("method", ["GetResponse", "ListInputItems", "CancelResponse", "DeleteResponse"])
async def test_a_malformed_message_is_refused(faces: TwoFaces, method: str) -> None:
    call: Any = faces.channel.unary_unary(f"/slipstream.v1.ResponseService/{method}")
    error = await refusal(call(b"\xff\xff", metadata=key_of(), timeout=WAIT_S))
    assert isinstance(error, errors.InvalidArgument) and "well-formed" in error.message


async def test_a_router_without_a_database_names_it(cluster: FakeCluster, card: ModelCard) -> None:
    async with open_router(cluster, card) as server, dial(server.host.endpoint) as channel:
        stub: Any = ResponseServiceStub(channel)
        for method in ("GetResponse", "ListInputItems", "CancelResponse", "DeleteResponse"):
            request = getattr(responses_pb2, f"{method}Request")(response_id="resp_1")
            error = await refusal(getattr(stub, method)(request, timeout=WAIT_S))
            assert isinstance(error, errors.InvalidArgument) and error.field == "response_id", method
            assert "--database" in error.message
        router: Any = RouterServiceStub(channel)
        for fields, field in (
            ({"store": True}, "store"),
            ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ):
            error = await refusal(router.Generate(request_of(HELLO, **fields), timeout=WAIT_S).read())  # type: ignore[arg-type]
            assert isinstance(error, errors.InvalidArgument) and error.field == field
            assert "--database" in error.message


async def test_many_calls_store_side_by_side(faces: TwoFaces) -> None:
    responses = Responses(faces)
    answers = await asyncio.gather(*[responses.answer(store=True) for _ in range(8)])
    assert len({answer.id for answer in answers}) == 8
    for answer in answers:
        assert text_of((await responses.get(answer.id)).output[0]) == answer.text
