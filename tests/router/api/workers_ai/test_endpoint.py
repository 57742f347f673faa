"""Workers AI's REST API before fake workers: runs, streams, batches, the queue, errors, tenants."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from libs.common import api_bounds
from libs.database.database import open_database
from services.router.api.workers_ai import endpoint
from services.router.api.workers_ai.endpoint import RUN_PATH
from services.router.execution.request_manager import INLINE_BYTES
from services.router.request.model_card import ModelCard
from services.router.server import RouterServer
from tests.router.conftest import open_router, script, text_ids
from tests.router.support.fake_cluster import FakeCluster
from tests.router.support.fake_model import FakeModel

_UNMET = "JSON Mode couldn't be met"
HI: Any = [{"role": "user", "content": "Where is my order?"}]
LOOK: Any = {"name": "look", "description": "Looks.", "parameters": {"type": "object"}}


@pytest.fixture
async def server(cluster: FakeCluster, card: ModelCard, tmp_path: Path) -> AsyncIterator[RouterServer]:
    database = open_database(f"sqlite:{tmp_path}/router.db")
    async with open_router(cluster, card, database=database) as router:
        yield router
    await database.close()


@pytest.fixture
async def http(server: RouterServer) -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession(f"http://{server.http_endpoint}") as session:
        yield session


def path_of(card: ModelCard, *, account: str = "acc") -> str:
    return RUN_PATH.format(account=account, model=card.name)


async def ask(http: aiohttp.ClientSession, path: str, body: Any, *, status: int = 200, **headers: str) -> Any:
    async with http.post(path, json=body, headers=headers) as answer:
        assert answer.status == status, await answer.text()
        said = await answer.json()
        assert said["success"] is (status == 200)
        assert said.keys() == {"result", "success", "errors", "messages"}
        return said["result"] if status == 200 else said["errors"][0]


async def stream(http: aiohttp.ClientSession, path: str, body: Any) -> list[Any]:
    async with http.post(path, json={**body, "stream": True}) as answer:
        assert answer.content_type == "text/event-stream"
        text = await answer.text()
    assert text.endswith("data: [DONE]\n\n")
    return [json.loads(event.removeprefix("data: ")) for event in text.split("\n\n") if "{" in event]


async def poll(http: aiohttp.ClientSession, path: str, request_id: str) -> Any:
    async with asyncio.timeout(30):
        while True:
            result = await ask(http, path, {"request_id": request_id})
            if "responses" in result:
                return result
            assert result["status"] in ("queued", "running")
            await asyncio.sleep(0.05)


async def test_a_run_of_messages_is_the_chat_completion(http: aiohttp.ClientSession, card: ModelCard) -> None:
    body = {"messages": HI, "seed": 3}
    result = await ask(http, path_of(card), body)
    async with http.post("/v1/chat/completions", json=body) as answer:
        plain = await answer.json()
    assert result["choices"] == plain["choices"]
    assert result["usage"]["completion_tokens"] == plain["usage"]["completion_tokens"]
    assert "response" not in result


async def test_a_stream_has_the_usage_unasked(http: aiohttp.ClientSession, card: ModelCard) -> None:
    whole = await ask(http, path_of(card), {"messages": HI, "seed": 3})
    events = await stream(http, path_of(card), {"messages": HI, "seed": 3})
    text = "".join(event["choices"][0]["delta"].get("content", "") for event in events if event["choices"])
    assert text == whole["choices"][0]["message"]["content"]
    assert events[-1]["usage"]["completion_tokens"] == whole["usage"]["completion_tokens"]
    assert events[-2]["choices"][0]["finish_reason"] == whole["choices"][0]["finish_reason"]


async def test_a_prompt_has_the_older_shapes(http: aiohttp.ClientSession, card: ModelCard) -> None:
    body = {"prompt": HI[0]["content"], "seed": 3}
    whole = await ask(http, path_of(card), body)
    same = await ask(http, path_of(card), {"messages": HI, "seed": 3})
    assert whole["response"] == same["choices"][0]["message"]["content"]
    events = await stream(http, path_of(card), body)
    assert "".join(event["response"] for event in events) == whole["response"]
    assert not any("choices" in event for event in events)
    assert events[-1]["usage"] == {
        **whole["usage"],
        "prompt_tokens_details": events[-1]["usage"]["prompt_tokens_details"],
    }
    assert events[-1]["finish_reason"] == whole["choices"][0]["finish_reason"]


async def test_several_choices_of_a_prompt_have_openais_shape(
    http: aiohttp.ClientSession, card: ModelCard
) -> None:
    result = await ask(http, path_of(card), {"prompt": "hi", "n": 2})
    assert len(result["choices"]) == 2 and "response" not in result


async def test_requests_of_one_call_fail_and_succeed_alone(
    http: aiohttp.ClientSession, card: ModelCard
) -> None:
    requests = [
        {"prompt": "a", "seed": 1, "external_reference": "one"},
        {"messages": HI, "max_tokens": 1 << 30},
        {"messages": HI, "seed": 2},
    ]
    result = await ask(http, path_of(card), {"requests": requests})
    good, bad, third = result["responses"]
    assert [item["id"] for item in result["responses"]] == [0, 1, 2]
    assert (good["success"], good["external_reference"]) == (True, "one")
    assert good["result"]["response"] == (await ask(http, path_of(card), requests[0]))["response"]
    assert bad["success"] is False and bad["errors"][0]["code"] == 5006 and "result" not in bad
    total = good["result"]["usage"]["total_tokens"] + third["result"]["usage"]["total_tokens"]
    assert result["usage"]["total_tokens"] == total


async def test_answers_beyond_the_share_of_a_tenant_are_refused_alone(
    cluster: FakeCluster, card: ModelCard, monkeypatch: pytest.MonkeyPatch
) -> None:
    most = 2_000
    monkeypatch.setattr(api_bounds, "MAX_TENANT_SENT_RESPONSE_BYTES", most)
    requests = [{"messages": HI, "seed": 1}] * 20
    async with (
        open_router(cluster, card) as opened,
        aiohttp.ClientSession(f"http://{opened.http_endpoint}") as http,
    ):
        for _ in range(2):  # what was sent is given back
            responses = (await ask(http, path_of(card), {"requests": requests}))["responses"]
            good = [item for item in responses if item["success"]]
            assert 0 < len(json.dumps(good, separators=(",", ":"))) <= most + len(good) + 2
            bad = [item for item in responses if not item["success"]]
            assert good and {item["errors"][0]["code"] for item in bad} == {3040}


async def test_many_short_runs_of_one_call_are_checked_off_the_event_loop(
    http: aiohttp.ClientSession, card: ModelCard, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[threading.Thread] = []
    check = endpoint._check_run

    def noted_check(*given: Any) -> None:
        threads.append(threading.current_thread())
        check(*given)

    monkeypatch.setattr(endpoint, "_check_run", noted_check)
    path = f"{path_of(card)}?queueRequest=true"
    few = [{"prompt": "x" * 1000, "max_tokens": 1}] * 2
    await ask(http, path, {"requests": few})
    assert threads == [threading.main_thread()] * 2  # the premise: each is short
    threads.clear()
    await ask(http, path, {"requests": few * (INLINE_BYTES // 2000)})
    assert len(threads) == 2 * (INLINE_BYTES // 2000)
    assert threading.main_thread() not in threads


async def test_queued_runs_are_polled_by_their_id(http: aiohttp.ClientSession, card: ModelCard) -> None:
    requests = [{"prompt": "a", "external_reference": "one"}, {"messages": HI}]
    queued = await ask(http, path_of(card) + "?queueRequest=true", {"requests": requests})
    assert (queued["status"], queued["model"]) == ("queued", card.name)
    result = await poll(http, path_of(card), queued["request_id"])
    first, second = result["responses"]
    assert (first["id"], second["id"]) == (0, 1)
    assert first["external_reference"] == "one" and second["external_reference"] is None
    assert first["result"]["response"] == first["result"]["choices"][0]["message"]["content"]
    assert "response" not in second["result"]
    usage = [item["result"]["usage"]["total_tokens"] for item in (first, second)]
    assert result["usage"]["total_tokens"] == sum(usage)


async def test_one_run_may_be_queued_by_its_body(http: aiohttp.ClientSession, card: ModelCard) -> None:
    queued = await ask(http, path_of(card), {"messages": HI, "queueRequest": True})
    result = await poll(http, path_of(card), queued["request_id"])
    assert [item["success"] for item in result["responses"]] == [True]


@pytest.mark.parametrize(
    ("body", "status", "code", "words"),
    [
        ({}, 400, 5006, "prompt: must be given"),
        ({"prompt": "a", "temperature": 9}, 400, 5006, "temperature: "),
        ({"prompt": "a", "lora": "x"}, 405, 5005, "lora: "),
        ({"request_id": "768f15b7-4fd6-4498-906e-ad94ffc7f8d2"}, 404, 5001, "no such request"),
        ({"request_id": "batch_1"}, 404, 5001, "no such request"),
        ({"requests": [{"prompt": "a"}] * 65}, 400, 5006, "requests: must have 1 to 64"),
        ({"requests": [{"prompt": "a"}, {"prompt": "a", "n": 0}]}, 400, 5006, "requests[1].n: "),
        ({"messages": HI, "queueRequest": True, "stream": True}, 400, 5006, "stream: "),
        ({"messages": HI, "queueRequest": True, "top_p": "x"}, 400, 5006, "top_p: "),
    ],
)
async def test_a_bad_run_is_refused_in_the_envelope(
    http: aiohttp.ClientSession, card: ModelCard, body: Any, status: int, code: int, words: str
) -> None:
    error = await ask(http, path_of(card), body, status=status)
    assert error["code"] == code and words in error["message"]


async def test_json_that_ends_too_early_fails_and_a_stream_says_so(
    http: aiohttp.ClientSession, card: ModelCard, model: FakeModel
) -> None:
    script(model, text_ids(card, '{"a": 1'))
    for form in ({"prompt": "a"}, {"messages": HI}):
        body = {**form, "response_format": {"type": "json_object"}}
        failed = await ask(http, path_of(card), body, status=422)
        assert failed["code"] == 5001
        assert failed["message"] == f"{_UNMET}: a stop ended the answer"
        cut = await ask(http, path_of(card), {**body, "max_tokens": 2}, status=422)
        assert cut["message"] == f"{_UNMET}: the answer ended at its limit of tokens"
        assert await stream(http, path_of(card), body)
        assert await ask(http, path_of(card), form)


async def test_statuses_are_those_of_workers_ai(
    http: aiohttp.ClientSession, card: ModelCard, cluster: FakeCluster
) -> None:
    unknown = await ask(http, RUN_PATH.format(account="a", model="@cf/no/no"), {"prompt": "a"}, status=400)
    assert unknown["code"] == 5007
    for name in ("a b", "@cf//x", "x" * 200, "..%2F%00"):
        invalid = await ask(http, RUN_PATH.format(account="a", model=name), {"prompt": "a"}, status=404)
        assert (invalid["code"], invalid["message"]) == (3042, "The model name is invalid")
    embeddings = "/client/v4/accounts/a/ai/v1/embeddings"
    for body in ({"model": card.name, "input": "a"}, {"input": ["a"]}, {"model": 5}):
        assert (await ask(http, embeddings, body, status=400))["code"] == 5007
    for worker in cluster.decodes:
        worker.gate.clear()
    late = await ask(http, path_of(card), {"prompt": "a"}, status=408, **{"x-request-timeout-ms": "300"})
    assert late["code"] == 3007
    for worker in cluster.decodes:
        worker.gate.set()
    async with http.post(path_of(card), headers={"Content-Type": "application/json"}) as answer:
        assert (answer.status, (await answer.json())["errors"][0]["code"]) == (400, 3003)
    async with http.post("/client/v4/accounts/a/ai/nothing", json={}) as answer:
        assert (answer.status, (await answer.json())["errors"][0]["code"]) == (404, 7000)


async def test_openais_endpoints_below_the_account_have_openais_shapes(
    http: aiohttp.ClientSession, card: ModelCard
) -> None:
    prefix = "/client/v4/accounts/acc/ai"
    async with http.post(prefix + "/v1/chat/completions", json={"messages": HI}) as answer:
        assert (await answer.json())["object"] == "chat.completion"
    async with http.post(prefix + "/v1/completions", json={"prompt": "a", "max_tokens": 2}) as answer:
        assert (await answer.json())["object"] == "text_completion"
    async with http.post(prefix + "/v1/chat/completions", json={"messages": []}) as answer:
        assert (answer.status, (await answer.json())["error"]["param"]) == (400, "messages")
    async with http.get(prefix + "/v1/models") as answer:
        assert (await answer.json())["data"][0]["id"] == card.name


async def test_without_a_database_only_the_queue_is_refused(router: RouterServer, card: ModelCard) -> None:
    async with aiohttp.ClientSession(f"http://{router.http_endpoint}") as http:
        assert (await ask(http, path_of(card), {"prompt": "a"}))["response"]
        error = await ask(http, path_of(card), {"prompt": "a", "queueRequest": True}, status=409)
        assert "--database" in error["message"]
        async with http.get("/v1/files") as answer:
            assert answer.status == 409 and "--database" in (await answer.json())["error"]["message"]
