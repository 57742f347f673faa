"""ResponseService of a whole router before fake workers, and the same responses over HTTP."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from services.router.api.responses.errors import ResponseErrorCode
from services.router.api.responses.rpc.messages import response_message
from services.router.api.responses.stored import store as store_module
from services.router.api.responses.writer import response_object
from services.router.request.model_card import ModelCard
from slipstream import errors
from slipstream.rpc.dial import dial
from slipstream.v1 import responses_pb2, router_pb2
from slipstream.v1.responses_pb2_grpc import ResponseServiceStub
from slipstream.v1.router_pb2_grpc import RouterServiceStub
from tests.router.conftest import HELLO, WAIT_S, eventually, open_router
from tests.router.support.fake_cluster import FakeCluster
from tests.router.support.response_calls import GO_ON, TOOL, Responses, request_of, text_of
from tests.router.support.two_faces import TwoFaces, key_of, refusal, two_faces

PATH = "/v1/responses"

ERROR_CODES = {
    None: responses_pb2.RESPONSE_ERROR_CODE_UNSPECIFIED,
    "server_error": responses_pb2.RESPONSE_ERROR_CODE_SERVER_ERROR,
    "rate_limit_exceeded": responses_pb2.RESPONSE_ERROR_CODE_RATE_LIMIT_EXCEEDED,
    "invalid_prompt": responses_pb2.RESPONSE_ERROR_CODE_INVALID_PROMPT,
    "a_later_code": responses_pb2.RESPONSE_ERROR_CODE_SERVER_ERROR,
}


@pytest.mark.parametrize("code", ERROR_CODES)
def test_the_error_of_a_stored_response_has_its_code(code: str | None) -> None:
    response = response_object(
        "resp_1", created_unix_s=1, status="failed", model="m", output=[], usage=None, echo={}
    )
    response["error"] = None if code is None else {"code": code, "message": "it broke"}
    message = response_message(msgspec.json.encode(response))
    assert (message.error_code, message.error) == (ERROR_CODES[code], "it broke" if code else "")


def test_every_error_code_is_one_of_the_contract() -> None:
    assert set(ERROR_CODES) == {None, "a_later_code", *ResponseErrorCode}
    assert set(ERROR_CODES.values()) == set(responses_pb2.ResponseErrorCode.values())


@pytest.fixture
async def faces(cluster: FakeCluster, card: ModelCard, tmp_path: Path) -> AsyncIterator[TwoFaces]:
    async with two_faces(cluster, card, tmp_path) as opened:
        yield opened


async def test_a_stored_answer_is_the_same_over_both_apis(faces: TwoFaces, card: ModelCard) -> None:
    responses = Responses(faces)
    fields: dict[str, Any] = {
        "metadata": {"a": "b"},
        "temperature": 0.7,
        "tools": [TOOL],
        "tool_choice": "none",
    }
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


@pytest.mark.parametrize("method", ["GetResponse", "ListInputItems", "CancelResponse", "DeleteResponse"])
async def test_a_call_without_an_id_is_refused(faces: TwoFaces, method: str) -> None:
    error = await refusal(Responses(faces).call(method, response_id=""))
    assert isinstance(error, errors.InvalidArgument) and error.field == "response_id"


async def test_a_router_without_a_database_names_it(cluster: FakeCluster, card: ModelCard) -> None:
    async with open_router(cluster, card) as server, dial(server.host.endpoint) as channel:
        stub: Any = ResponseServiceStub(channel)
        for method in ("GetResponse", "ListInputItems", "CancelResponse", "DeleteResponse"):
            request = getattr(responses_pb2, f"{method}Request")(response_id="resp_1")
            error = await refusal(getattr(stub, method)(request, timeout=WAIT_S))
            assert isinstance(error, errors.FailedPrecondition), method
            assert "--database" in error.message
        router: Any = RouterServiceStub(channel)
        for fields, field in (
            ({"store": True}, "store"),
            ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ):
            error = await refusal(router.Generate(request_of(HELLO, **fields), timeout=WAIT_S).read())
            assert isinstance(error, errors.InvalidArgument) and error.field == field
            assert "--database" in error.message
