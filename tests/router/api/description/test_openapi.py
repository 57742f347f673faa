"""The description has a row for each served route, and its types are those of a router's answers."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import AsyncIterator, Sequence
from typing import Any

import aiohttp
import msgspec
import pytest

from libs.database.database import Database
from libs.text import special_tokens as special
from services.router.api.description import answers, error_bodies, events, resources
from services.router.api.description.openapi import openapi_json
from services.router.api.description.operations import OPERATIONS, REQUIRED, Operation
from services.router.request.model_card import ModelCard
from services.router.server import RouterServer
from tests.router.conftest import open_router, script
from tests.router.support.fake_cluster import FakeCluster
from tests.router.support.fake_model import FakeModel
from tests.support.api_keys import tenant_keys

USER = [{"role": "user", "content": "Where is my order?"}]
PARAMETERS = {"type": "object"}
TOOL = {"type": "function", "function": {"name": "look", "parameters": PARAMETERS}}
RUNS = "/client/v4/accounts/a/ai"


def answer_of(card: ModelCard, *, reasoning: str = "", text: str = "", call: bool = False) -> Sequence[int]:
    """The tokens of an answer; with reasoning for a request that thinks."""
    encode, names = card.tokenizer.encode_text, card.tokenizer.special_ids
    ids = [*encode(reasoning), names[special.THINK_END]] if reasoning else []
    ids += encode(text)
    if call:
        ids += [names[special.TOOL_CALLS_SECTION_BEGIN], names[special.TOOL_CALL_BEGIN]]
        ids += [*encode("functions.look:0"), names[special.TOOL_CALL_ARGUMENT_BEGIN], *encode("{}")]
        ids += [names[special.TOOL_CALL_END], names[special.TOOL_CALLS_SECTION_END]]
    return [*ids, names[special.IM_END]]


@pytest.fixture
async def server(cluster: FakeCluster, card: ModelCard, database: Database) -> AsyncIterator[RouterServer]:
    async with open_router(cluster, card, database=database, keys=tenant_keys({"key": "anna"})) as opened:
        yield opened


@pytest.fixture
async def http(server: RouterServer) -> AsyncIterator[aiohttp.ClientSession]:
    url = f"http://{server.http_endpoint}"
    async with aiohttp.ClientSession(url, headers={"authorization": "Bearer key"}) as session:
        yield session


async def test_the_description_has_the_served_routes_and_no_other(server: RouterServer) -> None:
    served = {
        (route.method.lower(), re.sub(r":[^{}]*(?=})", "", route.path)) for route in server._http.routes()
    }
    paths = json.loads(openapi_json())["paths"]
    described = {(method, path) for path, operations in paths.items() for method in operations}
    assert described == served
    assert len(OPERATIONS) == len(served)


async def test_the_routes_that_need_no_key_are_those_that_answer_without_one(server: RouterServer) -> None:
    async with aiohttp.ClientSession(f"http://{server.http_endpoint}") as session:
        for each in OPERATIONS:
            if each.method != "get":
                continue
            async with session.get(re.sub(r"{\w+}", "x", each.path)) as answer:
                assert (answer.status != 401) == each.is_open, each.path


async def give(
    http: aiohttp.ClientSession, path: str, kind: type[msgspec.Struct], status: int = 200, **body: Any
) -> Any:
    """The answer, which the type describes whole."""
    async with http.post(path, json=body, headers={"x-slipstream-stats": "1"}) as answer:
        data = await answer.read()
        assert answer.status == status, data
    return msgspec.json.decode(data, type=kind)


async def test_answers_of_chat_and_completions_have_their_types(
    http: aiohttp.ClientSession, model: FakeModel, card: ModelCard
) -> None:
    both = answer_of(card, reasoning="hm", text="Wait.", call=True)
    script(model, both, *[answer_of(card, text="It is here.")] * 5)
    fields: Any = {"messages": USER, "tools": [TOOL], "logprobs": True, "top_logprobs": 2}
    chat = await give(
        http,
        "/v1/chat/completions",
        answers.ChatCompletion,
        reasoning_effort="low",
        prompt_logprobs=1,
        **fields,
    )
    message = chat.choices[0].message
    assert (message.reasoning_content, message.tool_calls[0].function.name) == ("hm", "look")
    assert chat.choices[0].logprobs.content[0].top_logprobs
    assert chat.slipstream["decode_worker"]
    assert chat.prompt_logprobs[0] is None
    chat = await give(http, RUNS + "/v1/chat/completions", answers.ChatCompletion, messages=USER, n=2)
    assert len(chat.choices) == 2
    for more in ({}, {"logprobs": 1, "echo": True}, {"prompt_logprobs": 1}):
        text = await give(http, "/v1/completions", answers.Completion, prompt="Where", **more)
        assert (text.choices[0].logprobs is None) == ("logprobs" not in more)


async def test_answers_of_responses_and_messages_have_their_types(
    http: aiohttp.ClientSession, model: FakeModel, card: ModelCard
) -> None:
    both = answer_of(card, reasoning="hm", text="Wait.", call=True)
    script(model, both, both, answer_of(card, text="It"))
    response = await give(
        http,
        "/v1/responses",
        answers.Response,
        input="Where?",
        reasoning={"effort": "low"},
        tools=[{"type": "function", "name": "look", "parameters": PARAMETERS}],
        top_logprobs=1,
    )
    assert {type(item) for item in response.output} == {
        answers.ReasoningItem,
        answers.OutputMessage,
        answers.FunctionCall,
    }
    async with http.get(f"/v1/responses/{response.id}") as stored:
        assert msgspec.json.decode(await stored.read(), type=answers.Response) == response
    message = await give(
        http,
        "/v1/messages",
        answers.Message,
        messages=USER,
        max_tokens=99,
        thinking={"type": "adaptive"},
        tools=[{"name": "look", "input_schema": PARAMETERS}],
    )
    assert {type(block) for block in message.content} == {
        answers.ThinkingBlock,
        answers.TextBlock,
        answers.ToolUseBlock,
    }
    await give(http, "/v1/messages", answers.Message, messages=USER, max_tokens=1)


@pytest.mark.parametrize(
    ("path", "like", "body"),
    [
        ("/v1/chat/completions", "", {"messages": USER, "logprobs": True, "top_logprobs": 1}),
        ("/v1/chat/completions", "", {"messages": USER, "stream_options": {"include_usage": True}, "n": 2}),
        ("/v1/chat/completions", "", {"messages": USER, "prompt_logprobs": 1, "reasoning_effort": "low"}),
        (f"{RUNS}/v1/chat/completions", "/v1/chat/completions", {"messages": USER}),
        ("/v1/completions", "", {"prompt": "Where", "logprobs": 1, "echo": True}),
        ("/v1/completions", "", {"prompt": "Where", "prompt_logprobs": 1}),
        ("/v1/responses", "", {"input": "Where?", "reasoning": {"effort": "low"}, "top_logprobs": 1}),
        ("/v1/responses", "", {"input": "Where?", "reasoning": {"effort": "low", "summary": "auto"}}),
        ("/v1/responses", "", {"input": "Where?", "background": True}),
        ("/v1/messages", "", {"messages": USER, "max_tokens": 99, "thinking": {"type": "adaptive"}}),
        (f"{RUNS}/run/tiny", "/ai/run", {"messages": USER}),
    ],
)
async def test_the_events_of_streams_have_their_types(
    http: aiohttp.ClientSession, model: FakeModel, card: ModelCard, path: str, like: str, body: dict[str, Any]
) -> None:
    """Each event is one of the types, and is that one without an unknown field."""
    thinks = any(name in body for name in ("reasoning", "reasoning_effort", "thinking"))
    is_chat = "prompt" not in body
    script(model, *[answer_of(card, reasoning="hm" * thinks, text="Wait.", call=is_chat)] * 2)
    tool: Any = {"name": "look", "input_schema": PARAMETERS}
    if path == "/v1/responses":
        tool = {"type": "function", "name": "look", "parameters": PARAMETERS}
    elif path != "/v1/messages":
        tool = TOOL
    more = {"tools": [tool]} if is_chat else {}
    async with http.post(path, json={**body, **more, "stream": True}) as answer:
        assert answer.status == 200 and answer.content_type == "text/event-stream"
        lines = (await answer.text()).splitlines()
    data = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
    sent = [text for text in data if text != "[DONE]"]
    assert len(sent) > 2
    for text in sent:
        assert fitting(text, events.EVENTS[like or path]), text


def fitting(text: str, kinds: Sequence[type[msgspec.Struct]]) -> list[type[msgspec.Struct]]:
    """The types that take an event."""
    found = []
    for kind in kinds:
        with contextlib.suppress(msgspec.ValidationError):
            msgspec.json.decode(text, type=kind)
            found.append(kind)
    return found


def test_streams_are_described_by_the_types_of_their_events() -> None:
    document = json.loads(openapi_json())
    for each in OPERATIONS:
        content = document["paths"][each.path][each.method]["responses"]["200"].get("content", {})
        assert ("text/event-stream" in content) == bool(each.events)
        if each.events:
            names = [
                item["$ref"].rpartition("/")[2] for item in content["text/event-stream"]["schema"]["anyOf"]
            ]
            assert names == [kind.__name__ for kind in each.events]


def test_all_components_have_public_names() -> None:
    """Clients that are generated from the document have classes of these names."""
    document = json.loads(openapi_json())
    schemas = document["components"]["schemas"]
    assert all(re.fullmatch("[A-Z][A-Za-z]+", name) for name in schemas)
    assert {name: schema["title"] for name, schema in schemas.items()} == {name: name for name in schemas}
    assert {"ChatBody", "CalledFunction", "CalledFunctionParam"} < schemas.keys()
    used = set(re.findall(r"#/components/schemas/(\w+)", openapi_json().decode()))
    assert used == schemas.keys()


async def test_counts_and_errors_have_their_types(http: aiohttp.ClientSession) -> None:
    await give(http, "/v1/messages/count_tokens", answers.MessageTokens, messages=USER)
    await give(http, "/v1/responses/input_tokens", answers.InputTokens, input="Where?")
    tokens = await give(http, "/tokenize", answers.Tokens, prompt="Where", return_token_strs=True)
    assert (await give(http, "/detokenize", answers.TokensText, tokens=tokens.tokens)).prompt == "Where"
    async with http.get("/tokenizer_info") as answer:
        msgspec.json.decode(await answer.read(), type=answers.TokenizerInfo)
    await give(http, f"{RUNS}/run/tiny", answers.RunEnvelope, prompt="Where", max_tokens=2)
    for path, kind in (
        ("/v1/chat/completions", error_bodies.Error),
        ("/v1/responses", error_bodies.Error),
        ("/v1/messages", error_bodies.MessagesError),
        (f"{RUNS}/run/tiny", answers.RunEnvelope),
        (f"{RUNS}/v1/embeddings", answers.RunEnvelope),
    ):
        await give(http, path, kind, status=400, temperature=9)
        reference = json.loads(openapi_json())["paths"][
            path.replace("accounts/a/", "accounts/{account}/").replace("tiny", "{model}")
        ]["post"]["responses"]["default"]["content"]["application/json"]["schema"]["$ref"]
        assert reference.rpartition("/")[2] == kind.__name__


async def fetch(http: aiohttp.ClientSession, path: str, kind: type[msgspec.Struct]) -> Any:
    async with http.get(path) as answer:
        data = await answer.read()
        assert answer.status == 200, data
        return msgspec.json.decode(data, type=kind)


@pytest.mark.parametrize(
    "each", [each for each in OPERATIONS if each.body in REQUIRED], ids=lambda each: each.path
)
async def test_a_body_without_a_required_field_is_refused_by_its_name(
    http: aiohttp.ClientSession, each: Operation
) -> None:
    assert each.body is not None
    values: dict[str, Any] = {"messages": USER, "max_tokens": 1, "input": "a", "prompt": "a", "tokens": [1]}
    values |= {"endpoint": "/v1/completions", "input_file_id": "file-x"}
    needed = REQUIRED[each.body]
    for missing in needed:
        body = {name: values[name] for name in needed if name != missing}
        async with http.post(each.path.replace("{account}", "a"), json=body) as answer:
            said = await answer.text()
            assert answer.status == 400 and missing in said, (missing, said)


async def test_answers_about_models_usage_and_the_process_have_their_types(
    http: aiohttp.ClientSession, card: ModelCard
) -> None:
    models = await fetch(http, "/v1/models", resources.ModelList)
    assert await fetch(http, f"/v1/models/{card.name}", resources.Model) in models.data
    await fetch(http, "/healthz/live", resources.Liveness)
    await fetch(http, "/version", resources.Version)
    usage = await fetch(http, "/v1/usage?group_by=day&group_by=model", resources.UsageList)
    assert usage.group_by == ["day", "model"]


async def test_answers_about_files_batches_and_stored_responses_have_their_types(
    http: aiohttp.ClientSession, model: FakeModel, card: ModelCard
) -> None:
    script(model, *[answer_of(card, text="It")] * 5)
    line = {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": {"messages": USER}}
    files = []
    for _ in range(2):  # one that a batch reads, and one to delete
        form = aiohttp.FormData({"purpose": "batch"})
        form.add_field("file", json.dumps(line).encode(), filename="requests.jsonl")
        async with http.post("/v1/files", data=form) as answer:
            files.append(msgspec.json.decode(await answer.read(), type=resources.File))
    file, deleted_file = files
    assert len((await fetch(http, "/v1/files", resources.FilePage)).data) == 2
    assert await fetch(http, f"/v1/files/{file.id}", resources.File) == file
    batch = await give(
        http,
        "/v1/batches",
        resources.BatchResource,
        input_file_id=file.id,
        endpoint="/v1/chat/completions",
        completion_window="24h",
    )
    await fetch(http, f"/v1/batches/{batch.id}", resources.BatchResource)
    assert len((await fetch(http, "/v1/batches", resources.BatchPage)).data) == 1
    await give(http, f"/v1/batches/{batch.id}/cancel", resources.BatchResource)
    response = await give(http, "/v1/responses", answers.Response, input="Where?")
    path = f"/v1/responses/{response.id}"
    assert (await fetch(http, f"{path}/input_items", resources.InputItemPage)).data
    for deleted in (path, f"/v1/files/{deleted_file.id}"):
        async with http.delete(deleted) as answer:
            assert msgspec.json.decode(await answer.read(), type=resources.Deleted).deleted
