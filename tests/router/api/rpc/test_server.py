"""RouterService end to end before fake workers; the SDK is the client."""

from __future__ import annotations

import json
from typing import Any

import aiohttp
import pytest

from services.router.request.model_card import ModelCard
from services.router.request.prompt_salts import PromptSalts, system_prompt_ids
from services.router.server import RouterServer
from slipstream import errors
from slipstream.async_client import AsyncClient
from slipstream.rpc.dial import dial
from slipstream.v1 import common_pb2, router_pb2, worker_pb2, worker_pb2_grpc
from tests.router.conftest import HELLO, chat_of, eventually, open_router, script, text_ids
from tests.router.support.fake_cluster import FakeCluster
from tests.router.support.fake_workers import BLOCK_TOKENS
from tests.support.api_keys import tenant_keys

TOOLS = [
    {
        "type": "function",
        "function": {"name": "get_weather", "parameters": {"type": "object", "properties": {}}},
    }
]


async def test_an_answer_is_the_models_and_everything_is_released(
    client: AsyncClient, cluster: FakeCluster, card: ModelCard
) -> None:
    answer = text_ids(card, "It is on its way.")
    script(cluster.model, answer)
    reply = await client.chat(HELLO, temperature=0)
    assert reply.text == "It is on its way."
    assert reply.finish_reason == "stop"
    assert reply.usage is not None
    assert reply.usage.completion_tokens == len(answer)
    assert reply.stats is not None
    assert reply.stats.prefill_worker.startswith("prefill-")
    assert reply.stats.decode_worker.startswith("decode-")
    assert (reply.stats.kvstore, reply.stats.transport, reply.stats.attempts) == ("kvstore-0", "socket", 1)
    assert reply.stats.kv_bytes_pulled == 1000
    assert reply.stats.acceptance_length == pytest.approx((len(answer) - 1) / reply.stats.decode_steps)
    await eventually(lambda: not cluster.held)
    assert not any(worker.aborted for worker in cluster.engines)


async def test_the_first_token_is_sent_before_decode_runs(
    client: AsyncClient, cluster: FakeCluster, card: ModelCard
) -> None:
    script(cluster.model, text_ids(card, "zyx"))
    for worker in cluster.decodes:
        worker.gate.clear()
    stream = client.stream_chat(HELLO)
    events = aiter(stream)
    assert (await anext(events)).text == "z"
    for worker in cluster.decodes:
        worker.gate.set()
    assert [event.text async for event in events]
    assert stream.reply.text == "zyx"


async def test_length_and_one_token_need_no_decode(client: AsyncClient, cluster: FakeCluster) -> None:
    reply = await client.chat(HELLO, max_tokens=5)
    assert (reply.finish_reason, reply.usage and reply.usage.completion_tokens) == ("length", 5)
    starts = sum(len(worker.starts) for worker in cluster.decodes)
    reply = await client.chat(HELLO, max_tokens=1)
    assert (reply.finish_reason, reply.usage and reply.usage.completion_tokens) == ("length", 1)
    assert sum(len(worker.starts) for worker in cluster.decodes) == starts
    # No decode worker pulls that handoff: the router ends it.
    await eventually(lambda: not cluster.held)


async def test_a_stop_string_ends_decode_and_is_not_shown(
    client: AsyncClient, cluster: FakeCluster, card: ModelCard
) -> None:
    text = "abcdef. ghijkl."
    script(cluster.model, [*card.tokenizer.encode_text(text) * 50, card.stop_token_ids[0]])
    reply = await client.chat(HELLO, stop=["ef. g", "zzz"])
    assert (reply.text, reply.finish_reason) == ("abcd", "stop")
    assert reply.stats is not None
    assert reply.stats.decode_steps > 0
    await eventually(lambda: not cluster.held)


async def test_cached_tokens_are_counted_by_tier(client: AsyncClient, cluster: FakeCluster) -> None:
    words = [{"role": "user", "content": "order " * 60}]
    first, second = await client.chat(words), await client.chat(words)
    assert first.usage is not None
    assert second.usage is not None
    assert first.usage.cached_tokens == 0
    whole_blocks = (first.usage.prompt_tokens - 1) // BLOCK_TOKENS * BLOCK_TOKENS
    assert whole_blocks <= second.usage.cached_tokens < second.usage.prompt_tokens
    assert second.usage.cached_by_tier == {"dram": second.usage.cached_tokens}


async def test_tool_calls_arrive_in_pieces_and_finish_with_their_reason(
    client: AsyncClient, cluster: FakeCluster, card: ModelCard
) -> None:
    special = card.tokenizer.special_id
    call = [
        *card.tokenizer.encode_text("Let me look."),
        special("<|tool_calls_section_begin|>"),
        special("<|tool_call_begin|>"),
        *card.tokenizer.encode_text("functions.get_weather:0"),
        special("<|tool_call_argument_begin|>"),
        *card.tokenizer.encode_text('{"city": "Oslo"}'),
        special("<|tool_call_end|>"),
        special("<|tool_calls_section_end|>"),
        special("<|im_end|>"),
    ]
    script(cluster.model, call)
    reply = await client.chat(HELLO, tools=TOOLS)
    assert (reply.text, reply.finish_reason) == ("Let me look.", "tool_calls")
    (made,) = reply.tool_calls
    assert (made.id, made.name, made.arguments) == (
        "functions.get_weather:0",
        "get_weather",
        '{"city": "Oslo"}',
    )


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "get_weather"}}])
async def test_a_forced_call_begins_in_the_prompt(
    choice: Any, client: AsyncClient, cluster: FakeCluster, card: ModelCard
) -> None:
    encode, special = card.tokenizer.encode_text, card.tokenizer.special_id
    rest = [*encode('{"city": "Oslo"}'), special("<|tool_call_end|>"), special("<|im_end|>")]
    if choice == "required":
        rest = [*encode("functions.get_weather:1"), special("<|tool_call_argument_begin|>"), *rest]
    script(cluster.model, rest)
    earlier = {"id": "functions.get_weather:0", "function": {"name": "get_weather", "arguments": "{}"}}
    history: list[dict[str, Any]] = [
        *HELLO,
        {"role": "assistant", "tool_calls": [earlier]},
        {"role": "tool", "tool_call_id": "functions.get_weather:0", "content": "cold"},
    ]
    reply = await client.chat(history, tools=TOOLS, tool_choice=choice)
    assert reply.finish_reason == "tool_calls"
    (made,) = reply.tool_calls
    assert (made.id, made.arguments) == ("functions.get_weather:1", '{"city": "Oslo"}')
    assert reply.usage is not None
    sent = next(worker.requests[0] for worker in cluster.prefills if worker.requests)
    assert reply.usage.prompt_tokens == len(sent.prompt) // 4


async def test_thinking_is_separate_and_not_stored(
    client: AsyncClient, cluster: FakeCluster, card: ModelCard
) -> None:
    encode = card.tokenizer.encode_text
    thought = [*encode("Hmm, order."), card.tokenizer.special_id("</think>")]
    script(cluster.model, [*thought, *text_ids(card, "On its way.")])
    reply = await client.chat(HELLO, thinking=True)
    assert (reply.reasoning, reply.text) == ("Hmm, order.", "On its way.")
    (start,) = [start for worker in cluster.decodes for start in worker.starts]
    assert not start.store_generated


async def test_logprobs_are_those_of_the_text(
    client: AsyncClient, cluster: FakeCluster, card: ModelCard
) -> None:
    script(cluster.model, text_ids(card, "zyxw"))
    reply = await client.chat(HELLO, top_logprobs=2)
    assert "".join(item.token for item in reply.logprobs) == reply.text == "zyxw"
    assert all(len(item.top) == 2 and item.logprob == -0.5 for item in reply.logprobs)


async def test_a_seed_repeats_and_another_differs(client: AsyncClient) -> None:
    same = [(await client.chat(HELLO, seed=7)).text for _ in range(2)]
    assert same[0] == same[1]
    assert (await client.chat(HELLO, seed=8)).text != same[0]
    drawn = {(await client.chat(HELLO)).text for _ in range(3)}
    assert len(drawn) == 3


async def test_a_broken_connection_is_resumed_by_id_without_loss(
    client: AsyncClient, cluster: FakeCluster
) -> None:
    whole = (await client.chat(HELLO, request_id="r-1")).text
    for worker in cluster.decodes:
        worker.gate.clear()
    stream = client.stream_chat(HELLO, request_id="r-1")
    events = aiter(stream)
    got = await anext(events)
    stream.close()
    for worker in cluster.decodes:
        worker.gate.set()
    # At once: the old call may still be ending.
    request = router_pb2.GenerateRequest(
        request_id="r-1", resume_after_tokens=got.completion_tokens, chat=chat_of(HELLO)
    )
    responses = client._stub.Generate(request, timeout=60)
    rest = [event.delta.text async for response in responses for event in response.events]
    assert got.text + "".join(rest) == whole
    await eventually(lambda: not cluster.held)


async def test_the_callers_deadline_ends_the_request_everywhere(
    client: AsyncClient, cluster: FakeCluster, router: RouterServer
) -> None:
    for worker in cluster.decodes:
        worker.gate.clear()
    for timeout_s in (0.3, 3.0, 30.0):  # until it is longer than a slow machine takes to a worker
        with pytest.raises(errors.DeadlineExceeded):
            await client.chat(HELLO, timeout_s=timeout_s)
        await eventually(lambda: not cluster.held and not router.manager.held)
        if sent := [request for worker in cluster.prefills for request in worker.requests]:
            break
    assert 0 < sent[0].deadline_ms <= timeout_s * 1e3


async def test_session_goes_back_to_where_its_kv_is(client: AsyncClient, router: RouterServer) -> None:
    history: list[Any] = [{"role": "user", "content": "order " * 20}]
    timelines = []
    for _ in range(4):
        # What still counts of the turn before would make the other workers cheaper.
        await eventually(lambda: not any(any(link.load()[1:]) for link in router.fleet.links()))
        reply = await client.chat(history, session="s-1", temperature=0)
        assert reply.stats is not None
        timelines.append(reply.stats)
        history += [reply.as_message(), {"role": "user", "content": "and now?"}]
    assert len({timeline.prefill_worker for timeline in timelines}) == 1
    assert len({timeline.decode_worker for timeline in timelines}) == 1
    assert "holds" in timelines[-1].reason


SESSIONS = ("s" * 256, "a/b %2F?#&=~ \"'\\", "ä" * 128, "会话" * 42 + "🚢")


@pytest.mark.parametrize("session", SESSIONS, ids=["longest", "signs", "accents", "chinese"])
async def test_any_text_of_256_bytes_names_one_session_on_both_faces(
    session: str, client: AsyncClient, router: RouterServer
) -> None:
    assert len(session.encode()) <= 256
    await client.chat(HELLO, session=session)
    body, url = {"messages": HELLO}, f"http://{router.http_endpoint}/v1/chat/completions"
    async with (
        aiohttp.ClientSession() as http,
        http.post(url, json=body, headers={"x-session-affinity": session}) as answer,
    ):
        assert answer.status == 200
        await answer.read()
    listed = (await client._stub.ListSessions(router_pb2.ListSessionsRequest())).sessions
    assert [row.session for row in listed] == [session]


async def test_sessions_and_workers_are_listed(
    client: AsyncClient, cluster: FakeCluster, router: RouterServer
) -> None:
    reply = await client.chat([{"role": "user", "content": "order " * 20}], session="s-2")
    (session,) = (await client._stub.ListSessions(router_pb2.ListSessionsRequest())).sessions
    assert (session.tenant, session.session, session.kvstore) == ("default", "s-2", "kvstore-0")
    assert reply.stats is not None
    assert session.prefill_worker == reply.stats.prefill_worker
    assert session.blocks > 0
    workers = (await client._stub.ListWorkers(router_pb2.ListWorkersRequest())).workers
    assert {worker.instance for worker in workers} == {worker.instance for worker in cluster.workers}
    assert all(worker.ready and worker.tokens_in_flight == 0 for worker in workers)


async def test_the_routers_own_status_and_models(client: AsyncClient, router: RouterServer) -> None:
    await client.chat(HELLO)
    assert await client.models() == ["tiny"]
    async with dial(router.admin.endpoint) as channel:
        stub: Any = worker_pb2_grpc.WorkerServiceStub(channel)
        await eventually(lambda: not router.manager.held)
        status = await stub.GetStatus(worker_pb2.GetStatusRequest())
    assert (status.role, status.instance) == (common_pb2.WORKER_ROLE_ROUTER, "router-0")
    assert status.counters["slipstream_requests_finished_total"] == 1
    assert not status.ledger.ListFields()


async def test_api_keys_name_tenants_whose_blocks_never_meet(cluster: FakeCluster, card: ModelCard) -> None:
    tenants = tenant_keys({"key-a": "anna", "key-b": "bert"})
    words = [{"role": "user", "content": "order " * 40}]
    async with open_router(cluster, card, keys=tenants) as router:
        endpoint = router.host.endpoint
        async with AsyncClient(endpoint) as nobody:
            with pytest.raises(errors.Unauthenticated):
                await nobody.chat(words)
            with pytest.raises(errors.Unauthenticated):
                await nobody.models()
        async with AsyncClient(endpoint, api_key="key-a") as anna:
            await anna.chat(words, session="s")
            again = await anna.chat(words, session="s")
        async with AsyncClient(endpoint, api_key="key-b") as bert:
            other = await bert.chat(words, session="s")
            assert again.usage is not None
            assert other.usage is not None
            assert again.usage.cached_tokens > 0
            assert other.usage.cached_tokens == 0
            call = bert._stub.ListSessions(
                router_pb2.ListSessionsRequest(), metadata=(("authorization", "Bearer key-b"),)
            )
            assert [session.tenant for session in (await call).sessions] == ["bert"]


async def test_tenants_share_the_blocks_of_the_configured_prefix_only(
    cluster: FakeCluster, card: ModelCard
) -> None:
    text = "order " * 40
    salts = PromptSalts(b"secret", system_prompt_ids(card.tokenizer, text))
    n_shared = len(system_prompt_ids(card.tokenizer, text)) // BLOCK_TOKENS * BLOCK_TOKENS
    assert n_shared >= 2 * BLOCK_TOKENS
    talk = [{"role": "system", "content": text}, {"role": "user", "content": "order " * 40}]
    cached: dict[str, list[int]] = {}
    tenants = tenant_keys({"key-a": "anna", "key-b": "bert"})
    async with open_router(cluster, card, keys=tenants, salts=salts) as router:
        for key in ("key-a", "key-b", "key-b"):
            async with AsyncClient(router.host.endpoint, api_key=key) as client:
                usage = (await client.chat(talk)).usage
                assert usage is not None
                cached.setdefault(key, []).append(usage.cached_tokens)
    assert cached["key-a"] == [0]
    assert cached["key-b"][0] == n_shared
    assert cached["key-b"][1] > n_shared


async def test_a_requested_prefill_worker(cluster: FakeCluster, card: ModelCard) -> None:
    async with (
        open_router(cluster, card, allow_requested_prefill=True) as router,
        AsyncClient(router.host.endpoint) as client,
    ):
        for instance in ("prefill-1", "prefill-0", "prefill-1"):
            reply = await client.chat(HELLO, session="s", headers={"x-slipstream-prefill": instance})
            assert reply.stats is not None
            assert reply.stats.prefill_worker == instance
        with pytest.raises(errors.InvalidArgument, match="is no ready prefill worker"):
            await client.chat(HELLO, headers={"x-slipstream-prefill": "prefill-9"})


async def test_events_that_are_ready_together_share_a_response(
    client: AsyncClient, cluster: FakeCluster
) -> None:
    request = router_pb2.GenerateRequest(
        prompt="some text", sampling=router_pb2.Sampling(seed=1, max_tokens=9)
    )
    responses = [response async for response in client._stub.Generate(request, timeout=60)]
    events = [event for response in responses for event in response.events]
    assert len(responses) < len(events)
    # The first response names the request, the last one ends with the usage.
    assert responses[0].events[0].HasField("started")
    kinds = [event.WhichOneof("kind") for event in events]
    assert kinds == ["started", *["delta"] * (len(kinds) - 2), "finished"]
    assert responses[-1].events[-1].finished.usage.completion_tokens == 9
    assert "".join(event.delta.text for event in events)
    await eventually(lambda: not cluster.held)


async def test_the_answer_begins_before_its_first_token(client: AsyncClient, cluster: FakeCluster) -> None:
    """From `started` the SDK knows that the request runs, and resumes it when the router is lost."""
    for prefill in cluster.prefills:
        prefill.gate.clear()
    request = router_pb2.GenerateRequest(
        prompt="some text", sampling=router_pb2.Sampling(seed=1, max_tokens=3)
    )
    call = client._stub.Generate(request, timeout=60)
    messages = aiter(call)
    first = await anext(messages)
    (started,) = first.events
    assert started.started.request_id
    for prefill in cluster.prefills:
        prefill.gate.set()
    events = [event async for response in messages for event in response.events]
    assert events[-1].finished.usage.completion_tokens == 3
    await eventually(lambda: not cluster.held)


async def test_debug_metadata_asks_for_the_placement(client: AsyncClient) -> None:
    request = router_pb2.GenerateRequest(
        prompt="some text", sampling=router_pb2.Sampling(seed=1, max_tokens=3)
    )
    for metadata in ((), (("x-slipstream-debug", "1"),)):
        call = client._stub.Generate(request, timeout=60, metadata=metadata)
        async for _ in call:
            pass
        trailers = dict(await call.trailing_metadata())
        assert ("x-slipstream-placement" in trailers) is bool(metadata)
    said = json.loads(trailers["x-slipstream-placement"])
    assert said["decode"].startswith("decode-")
    assert said["cost"]["total_ms"] > 0
