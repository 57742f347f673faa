"""/v1/responses and /v1/messages over HTTP, before fake workers: streams, stored responses and failures."""

from __future__ import annotations

import asyncio
import gzip
import json
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

import aiohttp
import pytest

from libs.database.database import Database
from libs.text import special_tokens as special
from services.router.request.model_card import ModelCard
from services.router.server import RouterServer
from slipstream import errors
from tests.router.conftest import eventually, open_router, script
from tests.router.support.answer_events import sse_objects
from tests.router.support.fake_cluster import FakeCluster
from tests.router.support.fake_model import FakeModel
from tests.support.api_keys import tenant_keys

TOOL = {"type": "function", "name": "look", "parameters": {"type": "object"}}
CLAUDE_TOOL = {"name": "look", "input_schema": {"type": "object"}}
USER = [{"role": "user", "content": "Where is my order?"}]


def answer_of(card: ModelCard, text: str, arguments: str | None = None) -> Sequence[int]:
    """The tokens of an answer, with one call of `look` where arguments are given."""
    encode, names = card.tokenizer.encode_text, card.tokenizer.special_ids
    ids = [*encode(text)]
    if arguments is not None:
        ids += [names[special.TOOL_CALLS_SECTION_BEGIN], names[special.TOOL_CALL_BEGIN]]
        ids += [*encode("functions.look:0"), names[special.TOOL_CALL_ARGUMENT_BEGIN], *encode(arguments)]
        ids += [names[special.TOOL_CALL_END], names[special.TOOL_CALLS_SECTION_END]]
    return [*ids, names[special.IM_END]]


@pytest.fixture
async def server(cluster: FakeCluster, card: ModelCard, database: Database) -> AsyncIterator[RouterServer]:
    keys = tenant_keys({"key-a": "anna", "key-b": "bert"})
    async with open_router(cluster, card, database=database, keys=keys) as opened:
        yield opened


@pytest.fixture
async def http(server: RouterServer) -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession(
        f"http://{server.http_endpoint}", headers={"x-api-key": "key-a"}
    ) as session:
        yield session


async def ask(http: aiohttp.ClientSession, path: str, *, status: int = 200, **body: Any) -> Any:
    async with http.post(path, json=body) as answer:
        assert answer.status == status, await answer.text()
        return await answer.json()


async def stream(http: aiohttp.ClientSession, path: str, **body: Any) -> list[Mapping[str, Any]]:
    async with http.post(path, json={**body, "stream": True}) as answer:
        assert (answer.status, answer.content_type) == (200, "text/event-stream")
        return sse_objects(b"\n\n".join([e for e in (await answer.read()).split(b"\n\n") if e[:1] != b":"]))


async def test_a_conversation_goes_on_from_a_stored_response(
    http: aiohttp.ClientSession, model: FakeModel, card: ModelCard
) -> None:
    script(model, answer_of(card, "Wait.", '{"x": 1}'), answer_of(card, "It is here."))
    first = await ask(http, "/v1/responses", input="Where is my order?", tools=[TOOL])
    assert [item["type"] for item in first["output"]] == ["message", "function_call"]
    assert first["output"][1]["arguments"] == '{"x": 1}'
    result = {"type": "function_call_output", "call_id": first["output"][1]["call_id"], "output": "here"}
    events = await stream(
        http, "/v1/responses", previous_response_id=first["id"], input=[result], tools=[TOOL]
    )
    second = events[-1]["response"]
    assert second["output"][0]["content"][0]["text"] == "It is here."
    items = [*USER, *first["output"], result]
    by_hand = await ask(http, "/v1/responses", input=items, tools=[TOOL], store=False)
    assert by_hand["output"][0]["content"] == second["output"][0]["content"]
    assert by_hand["usage"]["input_tokens"] == second["usage"]["input_tokens"]
    references = [*USER, *[{"type": "item_reference", "id": item["id"]} for item in first["output"]], result]
    counted = await ask(http, "/v1/responses/input_tokens", input=references, tools=[TOOL])
    assert counted["input_tokens"] == second["usage"]["input_tokens"]


async def test_a_stored_response_is_there_when_its_end_is_read_and_until_it_is_deleted(
    http: aiohttp.ClientSession,
) -> None:
    response = (await stream(http, "/v1/responses", input="Hello.", metadata={"a": "b"}))[-1]["response"]
    path = f"/v1/responses/{response['id']}"
    async with http.get(path) as answer:
        assert (answer.status, await answer.json()) == (200, response)
    async with http.get(f"{path}/input_items?limit=1") as answer:
        (item,) = (await answer.json())["data"]
        assert item["content"] == [{"type": "input_text", "text": "Hello."}]
    async with http.get(path, headers={"x-api-key": "key-b"}) as answer:
        assert answer.status == 404
    for query, status in (
        ("?stream=true", 400),
        ("/input_items?limit=0", 400),
        ("/input_items?after=x", 404),
    ):
        async with http.get(path + query) as answer:
            assert answer.status == status
    async with http.delete(path) as answer:
        assert await answer.json() == {"id": response["id"], "object": "response", "deleted": True}
    for method in ("GET", "DELETE"):
        async with http.request(method, path) as answer:
            assert answer.status == 404
    missing = await ask(
        http, "/v1/responses", status=404, input="Go on.", previous_response_id=response["id"]
    )
    assert missing["error"]["param"] == "previous_response_id"


async def test_without_a_database_only_a_promise_to_store_is_refused(
    cluster: FakeCluster, card: ModelCard
) -> None:
    async with (
        open_router(cluster, card) as router,
        aiohttp.ClientSession(f"http://{router.http_endpoint}") as http,
    ):
        response = await ask(http, "/v1/responses", input="Hello.")
        assert response["store"] is False
        for body, field in (
            ({"store": True}, "store"),
            ({"previous_response_id": "resp_x"}, "previous_response_id"),
            ({"input": [{"type": "item_reference", "id": "msg_x_0"}]}, "input"),
        ):
            refused = await ask(http, "/v1/responses", status=400, **{"input": "Hello.", **body})
            assert refused["error"]["param"] == field
            assert "--database" in refused["error"]["message"]
        async with http.get("/v1/responses/resp_x") as answer:
            assert "--database" in (await answer.json())["error"]["message"]


async def test_a_response_that_cannot_be_stored_fails_only_where_it_was_to_be(
    http: aiohttp.ClientSession, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def run(*_: Any, **__: Any) -> None:
        raise errors.Unavailable("the database is unavailable")

    monkeypatch.setattr(database, "run", run)
    assert (await ask(http, "/v1/responses", input="Hello."))["status"] == "completed"
    await ask(http, "/v1/responses", status=503, input="Hello.", store=True)
    events = await stream(http, "/v1/responses", input="Hello.", store=True)
    assert events[-1]["type"] == "response.failed"
    assert events[-1]["response"]["error"] == {
        "code": "server_error",
        "message": "the database is unavailable",
    }
    numbers = [event["sequence_number"] for event in events]
    assert numbers == sorted(set(numbers))


@pytest.mark.parametrize("path", ["/v1/responses", "/v1/messages"])
async def test_a_failure_amid_a_stream(
    path: str, http: aiohttp.ClientSession, server: RouterServer, cluster: FakeCluster
) -> None:
    for worker in cluster.decodes:
        worker.gate.clear()  # the first token is prefill's
    body = {
        "stream": True,
        **({"input": "Hello."} if "responses" in path else {"messages": USER, "max_tokens": 50}),
    }
    try:
        async with http.post(path, json=body, headers={"x-request-id": "fails"}) as answer:
            data = await answer.content.readuntil(b"delta")
            await server.manager.abort("anna", "fails")
            data += await answer.read()
    finally:
        for worker in cluster.decodes:
            worker.gate.set()
    *events, last = sse_objects(data)
    if "responses" in path:
        assert last["type"] == "response.failed"
        assert last["response"]["error"]["code"] == "server_error"
        assert last["response"]["output"][0]["status"] == "incomplete"
        assert last["sequence_number"] == len(events)
    else:
        assert (last["type"], last["error"]["type"]) == ("error", "invalid_request_error")
        assert "message_stop" not in [event["type"] for event in events]


async def test_errors_have_the_shape_and_the_paths_of_their_api(http: aiohttp.ClientSession) -> None:
    orphan = {"type": "tool_result", "tool_use_id": "c9", "content": "x"}
    messages: list[tuple[dict[str, Any], int, str, str]] = [
        (
            {"messages": [{"role": "user", "content": [orphan]}]},
            400,
            "invalid_request_error",
            "messages[0].content[0].tool_use_id: ",
        ),
        ({"model": "other"}, 404, "not_found_error", "'other' is not served"),
        (
            {"messages": [{"role": "user", "content": "x " * 9000}]},
            400,
            "invalid_request_error",
            "prompt is too long",
        ),
        ({"tools": [{"name": "a b"}]}, 400, "invalid_request_error", "tools[0].name: "),
    ]
    for body, status, kind, words in messages:
        refused = await ask(
            http, "/v1/messages", status=status, **{"messages": USER, "max_tokens": 9, **body}
        )
        assert (refused["type"], refused["error"]["type"]) == ("error", kind)
        assert words in refused["error"]["message"]
    responses: list[tuple[dict[str, Any], str]] = [
        ({"input": [{"type": "function_call_output", "call_id": "c9", "output": "x"}]}, "input[0].call_id"),
        ({"input": "x " * 9000}, "input"),
        ({"tools": [{"type": "function", "name": "a b"}]}, "tools[0].name"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
    ]
    for body, field in responses:
        refused = await ask(http, "/v1/responses", status=400, **{"input": "Hello.", **body})
        assert refused["error"]["param"] == field
    headers = {"x-api-key": "wrong", "anthropic-version": "2023-06-01"}
    async with http.post("/v1/messages", json={}, headers=headers) as answer:
        assert answer.status == 401
        assert (await answer.json())["error"]["type"] == "authentication_error"
        assert answer.headers["request-id"] == answer.headers["x-request-id"]


async def test_a_message_in_one_piece_streamed_and_counted(
    http: aiohttp.ClientSession, model: FakeModel, card: ModelCard
) -> None:
    script(model, answer_of(card, "Wait.", '{"x": 1}'))
    body: dict[str, Any] = {"messages": USER, "tools": [CLAUDE_TOOL], "max_tokens": 10**6}
    body |= {"surprise": 1, "prompt_logprobs": 2}
    async with http.post(
        "/v1/messages",
        data=gzip.compress(json.dumps(body).encode()),
        headers={"Content-Encoding": "gzip", "Content-Type": "application/json"},
    ) as answer:
        assert (answer.status, answer.headers["x-slipstream-ignored"]) == (200, "surprise,prompt_logprobs")
        whole = await answer.json()
    assert whole["stop_reason"] == "tool_use"
    assert [block["type"] for block in whole["content"]] == ["text", "tool_use"]
    events = await stream(http, "/v1/messages", **body)
    assert [event["type"] for event in events[:2]] == ["message_start", "ping"]
    assert events[-2]["delta"]["stop_reason"] == "tool_use"
    counted = await ask(http, "/v1/messages/count_tokens", messages=USER, tools=[CLAUDE_TOOL])
    usage = whole["usage"]
    assert counted["input_tokens"] == usage["input_tokens"] + usage["cache_read_input_tokens"]
    stopped = await ask(http, "/v1/messages", messages=USER, max_tokens=99, stop_sequences=["zz", "it."])
    assert (stopped["stop_reason"], stopped["stop_sequence"]) == ("stop_sequence", "it.")
    assert stopped["content"] == [{"type": "text", "text": "Wa"}]


async def test_models_in_the_form_that_the_client_knows(http: aiohttp.ClientSession, card: ModelCard) -> None:
    async with http.get("/v1/models", headers={"anthropic-version": "2023-06-01"}) as answer:
        page = await answer.json()
    assert [(model["type"], model["id"]) for model in page["data"]] == [("model", card.name)]
    assert (page["first_id"], page["has_more"]) == (card.name, False)
    async with http.get(f"/v1/models/{card.name}", headers={"anthropic-version": "2023-06-01"}) as answer:
        assert await answer.json() == page["data"][0]
    async with http.get("/v1/models") as answer:
        assert (await answer.json())["object"] == "list"


@pytest.mark.parametrize(
    ("path", "key", "status", "kind"),
    [
        ("/v1/models/none", "alice", 404, "not_found_error"),
        ("/v1/models/none", "wrong", 401, "authentication_error"),
        ("/v1/models", "wrong", 401, "authentication_error"),
    ],
)
async def test_errors_of_models_in_the_form_that_the_client_knows(
    cluster: FakeCluster, card: ModelCard, path: str, key: str, status: int, kind: str
) -> None:
    async with (
        open_router(cluster, card, keys=tenant_keys({"alice": "alice"})) as router,
        aiohttp.ClientSession(f"http://{router.http_endpoint}", headers={"x-api-key": key}) as http,
    ):
        async with http.get(path, headers={"anthropic-version": "2023-06-01"}) as answer:
            said = await answer.json()
            assert (answer.status, said["type"], said["error"]["type"]) == (status, "error", kind)
            assert "request-id" in answer.headers
        async with http.get(path) as answer:
            plain = await answer.json()
            assert answer.status == status and plain.keys() == {"error"}
            assert plain["error"]["message"] == said["error"]["message"]


async def test_a_client_that_leaves_ends_the_request(
    http: aiohttp.ClientSession, server: RouterServer, cluster: FakeCluster
) -> None:
    for worker in cluster.decodes:
        worker.gate.clear()
    tasks = [
        asyncio.create_task(ask(http, "/v1/responses", input="Hello.")),
        asyncio.create_task(ask(http, "/v1/messages", messages=USER, max_tokens=9)),
    ]
    await eventually(lambda: server.manager.held == 2)
    for task in tasks:
        task.cancel()
    for worker in cluster.decodes:
        worker.gate.set()
    await eventually(lambda: server.manager.held == 0)
