"""The OpenAI-shaped API before fake workers; the unmodified `openai` client is the client."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families

from libs.common.telemetry.metric_tables.table import metrics_of
from libs.text.special_tokens import TOOL_CALL_TOKENS
from services.router.request.model_card import ModelCard
from services.router.server import RouterServer
from tests.router.conftest import eventually, open_router, script
from tests.router.support.fake_cluster import FakeCluster
from tests.router.support.fake_model import FakeModel
from tests.router.support.fake_workers import BLOCK_TOKENS
from tests.support.api_keys import tenant_keys

HELLO: Any = [{"role": "user", "content": "Where is my order?"}]
TOOLS: Any = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
        },
    }
]


@pytest.fixture
async def client(router: RouterServer) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(
        base_url=f"http://{router.http_endpoint}/v1", api_key="any", max_retries=0
    ) as client:
        yield client


@pytest.fixture
async def http(router: RouterServer) -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession(f"http://{router.http_endpoint}") as session:
        yield session


def text_ids(card: ModelCard, text: str) -> list[int]:
    return [*card.tokenizer.encode_text(text), card.tokenizer.special_id("<|im_end|>")]


def call_ids(card: ModelCard, call: str, arguments: str) -> list[int]:
    special, encode = card.tokenizer.special_id, card.tokenizer.encode_text
    return [
        special("<|tool_calls_section_begin|>"),
        special("<|tool_call_begin|>"),
        *encode(call),
        special("<|tool_call_argument_begin|>"),
        *encode(arguments),
        special("<|tool_call_end|>"),
        special("<|tool_calls_section_end|>"),
        special("<|im_end|>"),
    ]


async def test_a_whole_answer(client: openai.AsyncOpenAI, cluster: FakeCluster, card: ModelCard) -> None:
    answer = text_ids(card, "It is on its way — 你好.")
    script(cluster.model, answer)
    reply = await client.chat.completions.create(model="tiny", messages=HELLO, temperature=0)
    (choice,) = reply.choices
    assert choice.message.content == "It is on its way — 你好."
    assert choice.message.tool_calls is None
    assert choice.finish_reason == "stop"
    assert reply.object == "chat.completion"
    assert reply.usage is not None
    assert reply.usage.completion_tokens == len(answer)
    assert reply.usage.total_tokens == reply.usage.prompt_tokens + len(answer)
    await eventually(lambda: not cluster.held)


async def test_a_streamed_answer_is_the_whole_one_with_the_same_usage(client: openai.AsyncOpenAI) -> None:
    words: Any = [{"role": "user", "content": "order " * 60}]
    await client.chat.completions.create(model="tiny", messages=words, seed=5)
    whole = await client.chat.completions.create(model="tiny", messages=words, seed=5)
    stream = await client.chat.completions.create(
        model="tiny", messages=words, seed=5, stream=True, stream_options={"include_usage": True}
    )
    chunks = [chunk async for chunk in stream]
    texts = [chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices]
    assert "".join(texts) == whole.choices[0].message.content
    # Tokens that came together travel together: in pieces, however many.
    assert len([text for text in texts if text]) > 1
    assert chunks[0].choices[0].delta.role == "assistant"
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "stop"
    assert all(chunk.usage is None for chunk in chunks[:-1])
    assert chunks[-1].choices == []
    for usage in (whole.usage, chunks[-1].usage):
        assert usage is not None
        assert usage.prompt_tokens_details is not None
        cached = usage.prompt_tokens_details.cached_tokens or 0
        assert cached >= (usage.prompt_tokens - 1) // BLOCK_TOKENS * BLOCK_TOKENS > 0
    assert whole.usage == chunks[-1].usage


async def test_tool_calls_whole_and_streamed(
    client: openai.AsyncOpenAI, cluster: FakeCluster, card: ModelCard
) -> None:
    script(cluster.model, call_ids(card, "functions.get_weather:0", '{"city": "Oslo"}'))
    whole = await client.chat.completions.create(model="tiny", messages=HELLO, tools=TOOLS)
    message = whole.choices[0].message
    assert whole.choices[0].finish_reason == "tool_calls"
    assert message.content is None
    assert message.tool_calls is not None
    (call,) = message.tool_calls
    assert call.type == "function"
    assert (call.id, call.function.name) == ("functions.get_weather:0", "get_weather")
    assert json.loads(call.function.arguments) == {"city": "Oslo"}

    stream = await client.chat.completions.create(model="tiny", messages=HELLO, tools=TOOLS, stream=True)
    pieces = [
        piece async for chunk in stream for choice in chunk.choices for piece in choice.delta.tool_calls or ()
    ]
    assert [piece.id for piece in pieces if piece.id] == ["functions.get_weather:0"]
    assert "".join(piece.function.arguments or "" for piece in pieces if piece.function) == '{"city": "Oslo"}'

    # The message goes back as the client gives it, with the tool's result.
    history = [*HELLO, message, {"role": "tool", "tool_call_id": call.id, "content": "21 degrees"}]
    script(cluster.model, text_ids(card, "Warm."))
    reply = await client.chat.completions.create(model="tiny", messages=history, tools=TOOLS)
    assert reply.choices[0].message.content == "Warm."


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "get_weather"}}])
async def test_tool_choice_forces_a_call(
    choice: Any, client: openai.AsyncOpenAI, cluster: FakeCluster, card: ModelCard
) -> None:
    special, encode = card.tokenizer.special_id, card.tokenizer.encode_text
    rest = [*encode("{}"), special("<|tool_call_end|>"), special("<|im_end|>")]
    if choice == "required":
        rest = [*encode("get_weather:0"), special("<|tool_call_argument_begin|>"), *rest]
    script(cluster.model, rest)
    stream = await client.chat.completions.create(
        model="tiny", messages=HELLO, tools=TOOLS, tool_choice=choice, stream=True
    )
    pieces = [p async for chunk in stream for c in chunk.choices for p in c.delta.tool_calls or ()]
    assert (pieces[0].function and pieces[0].function.name) == "get_weather"
    assert "".join(p.function.arguments or "" for p in pieces if p.function) == "{}"


async def test_tool_choice_none_keeps_the_tools_in_the_prompt_and_bans_calls(
    client: openai.AsyncOpenAI, cluster: FakeCluster, card: ModelCard
) -> None:
    script(cluster.model, text_ids(card, "No."))
    with_tools = await client.chat.completions.create(model="tiny", messages=HELLO, tools=TOOLS)
    none = await client.chat.completions.create(model="tiny", messages=HELLO, tools=TOOLS, tool_choice="none")
    assert none.choices[0].message.content == "No."
    assert none.usage and with_tools.usage
    assert none.usage.prompt_tokens == with_tools.usage.prompt_tokens
    banned = [r.sampling.banned_token_ids for worker in cluster.prefills for r in worker.requests]
    tokens = {card.tokenizer.special_id(name) for name in TOOL_CALL_TOKENS}
    assert sorted(tokens <= set(ids) for ids in banned) == [False, True]


async def test_parallel_tool_calls_false_stops_after_the_first(
    client: openai.AsyncOpenAI, cluster: FakeCluster, card: ModelCard
) -> None:
    two = call_ids(card, "functions.get_weather:0", "{}")[:-2] + call_ids(
        card, "functions.get_weather:1", "{}"
    )
    script(cluster.model, two)
    reply = await client.chat.completions.create(
        model="tiny", messages=HELLO, tools=TOOLS, parallel_tool_calls=False
    )
    assert len(reply.choices[0].message.tool_calls or ()) == 1
    assert reply.choices[0].finish_reason == "tool_calls"


async def test_reasoning_content(client: openai.AsyncOpenAI, cluster: FakeCluster, card: ModelCard) -> None:
    thought = [*card.tokenizer.encode_text("Hmm."), card.tokenizer.special_id("</think>")]
    script(cluster.model, [*thought, *text_ids(card, "Yes.")])
    thinking = {"chat_template_kwargs": {"enable_thinking": True}}
    reply: Any = await client.chat.completions.create(model="tiny", messages=HELLO, extra_body=thinking)
    assert reply.choices[0].message.reasoning_content == "Hmm."
    assert reply.choices[0].message.content == "Yes."
    assert reply.usage.completion_tokens_details.reasoning_tokens == len(thought)
    stream: Any = await client.chat.completions.create(
        model="tiny", messages=HELLO, extra_body=thinking, stream=True
    )
    deltas = [chunk.choices[0].delta.model_dump() async for chunk in stream]
    assert "".join(delta.get("reasoning_content") or "" for delta in deltas) == "Hmm."
    assert "".join(delta.get("content") or "" for delta in deltas) == "Yes."


async def test_logprobs(client: openai.AsyncOpenAI, cluster: FakeCluster, card: ModelCard) -> None:
    script(cluster.model, text_ids(card, "zyx"))
    reply = await client.chat.completions.create(model="tiny", messages=HELLO, logprobs=True, top_logprobs=2)
    logprobs = reply.choices[0].logprobs
    assert logprobs is not None and logprobs.content is not None
    content = logprobs.content
    assert "".join(item.token for item in content) == "zyx"
    assert all(len(item.top_logprobs) == 2 and item.bytes == list(item.token.encode()) for item in content)
    stream = await client.chat.completions.create(model="tiny", messages=HELLO, logprobs=True, stream=True)
    seen = [
        item.token
        async for chunk in stream
        if chunk.choices and chunk.choices[0].logprobs
        for item in chunk.choices[0].logprobs.content or ()
    ]
    assert "".join(seen) == "zyx"


async def test_plain_completions(client: openai.AsyncOpenAI, cluster: FakeCluster, card: ModelCard) -> None:
    script(cluster.model, text_ids(card, " way. The end"))
    reply = await client.completions.create(model="tiny", prompt="It is on its", stop=" The", logprobs=1)
    assert (reply.choices[0].text, reply.choices[0].finish_reason) == (" way.", "stop")
    assert reply.usage is not None
    assert reply.usage.prompt_tokens == len(card.tokenizer.encode_text("It is on its"))
    stream = await client.completions.create(
        model="tiny", prompt="It is on its", stream=True, stream_options={"include_usage": True}
    )
    chunks = [chunk async for chunk in stream]
    assert "".join(c.choices[0].text for c in chunks if c.choices) == " way. The end"
    assert chunks[-1].usage is not None


async def test_models(client: openai.AsyncOpenAI) -> None:
    assert [model.id async for model in client.models.list()] == ["tiny"]
    assert (await client.models.retrieve("tiny")).owned_by == "slipstream"
    with pytest.raises(openai.NotFoundError, match="served: tiny"):
        await client.models.retrieve("huge")


async def test_errors_are_the_clients_own_classes(
    client: openai.AsyncOpenAI, cluster: FakeCluster, card: ModelCard
) -> None:
    with pytest.raises(openai.BadRequestError) as bad:
        await client.chat.completions.create(model="tiny", messages=HELLO, temperature=3)
    assert bad.value.param == "temperature"
    with pytest.raises(openai.NotFoundError) as unknown:
        await client.chat.completions.create(model="huge", messages=HELLO)
    assert unknown.value.code == "model_not_found"
    async with open_router(cluster, card, keys=tenant_keys({"sesame": "ali"})) as locked:
        url = f"http://{locked.http_endpoint}/v1"
        async with openai.AsyncOpenAI(base_url=url, api_key="wrong", max_retries=0) as other:
            with pytest.raises(openai.AuthenticationError) as refused:
                await other.chat.completions.create(model="tiny", messages=HELLO)
            assert refused.value.code == "invalid_api_key"
            assert "is wrong" in refused.value.message
        async with openai.AsyncOpenAI(base_url=url, api_key="sesame", max_retries=0) as other:
            assert (await other.chat.completions.create(model="tiny", messages=HELLO)).choices


async def test_keys_of_other_apis_headers_are_taken(cluster: FakeCluster, card: ModelCard) -> None:
    async with (
        open_router(cluster, card, keys=tenant_keys({"sesame": "ali"})) as locked,
        aiohttp.ClientSession(f"http://{locked.http_endpoint}") as session,
    ):
        for header, value in (
            ("Authorization", "Bearer sesame"),
            ("x-api-key", "sesame"),
            ("api-key", "sesame"),
        ):
            async with session.get("/v1/models", headers={header: value}) as answer:
                assert answer.status == 200
        async with session.get("/v1/models") as answer:
            assert answer.status == 401
            error = (await answer.json())["error"]
        assert error["code"] == "invalid_api_key"
        assert "is missing" in error["message"]


async def test_the_stats_are_sent_when_asked_for(http: aiohttp.ClientSession, cluster: FakeCluster) -> None:
    body = {"messages": [{"role": "user", "content": "order " * 30}], "max_tokens": 8}
    headers = {"x-slipstream-stats": "1", "x-request-id": "mine-1", "x-session-affinity": "ses_1"}
    async with http.post("/v1/chat/completions", json=body, headers=headers) as answer:
        assert answer.headers["x-request-id"] == "mine-1"
        whole = await answer.json()
    assert whole["id"] == "chatcmpl-mine-1"
    stats = whole["slipstream"]
    assert stats["prefill_worker"].startswith("prefill-")
    assert stats["kvstore"] == "kvstore-0"
    assert stats["ttft_ms"] > 0
    assert stats["acceptance_length"] > 0
    headers["x-request-id"] = "mine-2"
    async with http.post("/v1/chat/completions", json={**body, "stream": True}, headers=headers) as answer:
        assert answer.content_type == "text/event-stream"
        lines = [line async for line in answer.content if line.strip()]
    assert lines[-1] == b"data: [DONE]\n"
    last = json.loads(lines[-2].removeprefix(b"data: "))
    assert last["slipstream"]["cached_tokens_by_tier"]["dram"] > 0
    # Not the same one for sure: where the first prompt took long, the other may be expected to be faster.
    assert last["slipstream"]["prefill_worker"].startswith("prefill-")
    async with http.post("/v1/chat/completions", json=body) as answer:
        assert "slipstream" not in await answer.json()


async def test_the_deadline_header(http: aiohttp.ClientSession, cluster: FakeCluster) -> None:
    for worker in cluster.prefills:
        worker.gate.clear()
    headers = {"x-request-timeout-ms": "200"}
    async with http.post("/v1/chat/completions", json={"messages": HELLO}, headers=headers) as answer:
        assert answer.status == 504
        assert (await answer.json())["error"]["type"] == "timeout_error"
    await eventually(lambda: not cluster.held)


async def test_health_tells_alive_from_ready(model: FakeModel, card: ModelCard) -> None:
    async with (
        FakeCluster(model, decodes=0) as cluster,
        open_router(cluster, card) as router,
        aiohttp.ClientSession(f"http://{router.http_endpoint}") as http,
    ):
        async with http.get("/healthz/live") as answer:
            assert answer.status == 200
        async with http.get("/healthz/ready") as answer:
            assert answer.status == 503
        async with http.post("/v1/chat/completions", json={"messages": HELLO, "stream": True}) as answer:
            assert answer.status == 503
        await cluster.add_decode("decode-0").start()
        await eventually(lambda: router.fleet.ready)
        async with http.get("/healthz/ready") as answer:
            assert set(await answer.json()) == {"status", "message"}
        async with http.get(f"http://{router.admin_http_endpoint}/healthz") as answer:
            assert answer.status == 200
            assert (await answer.json())["workers"]["decode/decode-0"] is True


async def test_metrics_are_the_routers_own(
    router: RouterServer, http: aiohttp.ClientSession, client: openai.AsyncOpenAI
) -> None:
    await client.chat.completions.create(model="tiny", messages=HELLO)
    async with http.get(f"http://{router.admin_http_endpoint}/metrics") as answer:
        text = await answer.text()
    own = {metric.name for metric in metrics_of("router")}
    for family in text_string_to_metric_families(text):
        assert {family.name, f"{family.name}_total"} & own or family.name.startswith(("vllm:", "process_"))
        assert all({"instance", "role"}.isdisjoint(sample.labels) for sample in family.samples)
    for line in (
        "slipstream_requests_total 1.0",
        'slipstream_requests_finished_total{finish_reason="stop"} 1.0',
        'slipstream_requests_finished_total{finish_reason="length"} 0.0',
        'slipstream_api_requests_total{api="http",endpoint="POST /v1/chat/completions",status="200"} 1.0',
        "slipstream_time_to_first_token_seconds_count 1.0",
        "slipstream_request_queue_seconds_count 1.0",
        "slipstream_request_prefill_seconds_count 1.0",
        "slipstream_request_decode_seconds_count 1.0",
        "slipstream_request_duration_seconds_count 1.0",
        'slipstream_workers{worker_role="decode"} 2.0',
    ):
        assert f"{line}\n" in text
    for gauge in (
        "full_collections_total",
        "event_loop_delay_seconds",
        "event_loop_delay_max_seconds",
        "event_loop_tasks",
        "prefix_index_bytes",
        "prefix_index_blocks",
        "prefix_index_evicted_blocks_total",
        "block_event_pauses_total",
        "token_cache_bytes",
    ):
        assert f"\nslipstream_{gauge} " in text


async def test_unknown_paths_and_methods_have_the_error_shape(http: aiohttp.ClientSession) -> None:
    async with http.get("/v1/nothing") as answer:
        assert (answer.status, (await answer.json())["error"]["type"]) == (404, "invalid_request_error")
    for path in ("/v1/models/", "/v1/models/other", "/v1/models/a/b"):
        async with http.get(path) as answer:
            error = (await answer.json())["error"]
            assert (answer.status, error["param"], error["code"]) == (404, "model", "model_not_found")
    async with http.get("/v1/chat/completions") as answer:
        assert (answer.status, (await answer.json())["error"]["param"]) == (405, None)
        assert answer.headers["Allow"] == "POST"
    async with http.post("/v1/models/tiny") as answer:
        assert (answer.status, answer.headers["Allow"]) == (405, "GET, HEAD")


async def test_a_debug_header_asks_for_the_placement(http: aiohttp.ClientSession) -> None:
    body = {"messages": HELLO, "seed": 1, "max_tokens": 4}
    for stream in (False, True):
        async with http.post(
            "/v1/chat/completions", json={**body, "stream": stream}, headers={"x-slipstream-debug": "1"}
        ) as answer:
            said = json.loads(answer.headers["x-slipstream-placement"])
            await answer.read()
        assert said["prefill"] in ("prefill-0", "prefill-1", "")
        assert said["cost"]["total_ms"] > 0
        assert {c["part"] for c in said["candidates"]} >= {"prefill", "decode"}
    async with http.post("/v1/chat/completions", json=body) as answer:
        assert "x-slipstream-placement" not in answer.headers


async def test_head_answers_as_get_without_a_body(http: aiohttp.ClientSession) -> None:
    async with http.head("/healthz/live") as answer:
        assert (answer.status, await answer.read()) == (200, b"")
    async with http.head("/v1/models/tiny?a=b") as answer:
        assert answer.status == 200
