"""Many prompts on one stream of a router and a prefill worker: both ends over gRPC, and older workers."""

from __future__ import annotations

import asyncio
import contextvars
import copy
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace
from typing import Any

import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st

from libs.common.block_hash import as_tokens, chain_hashes
from libs.common.rpc.prefill_streams import PrefillServer
from libs.common.rpc.serve import ServiceHost
from services.router.request.model_card import ModelCard
from services.router.workers import prefill_stream
from services.router.workers.multiplexed_stream import BATCH_BYTES, batches
from services.router.workers.prefill_stream import PrefillClient, RemotePrefill, StreamedPrefill
from services.router.workers.prompt_delta import OutgoingPrompt
from slipstream import errors
from slipstream.dial import dial
from slipstream.rpc_errors import to_failure
from slipstream.v1 import common_pb2, prefill_pb2, prefill_pb2_grpc, router_pb2, router_pb2_grpc
from tests.router.conftest import WAIT_S, eventually, open_router
from tests.router.support.fake_cluster import FakeCluster


class Worker(prefill_pb2_grpc.PrefillServiceServicer):
    """Answers with the prompt's first byte as token, once `gate` is open; the name says what goes wrong."""

    def __init__(self) -> None:
        self.gate = asyncio.Event()
        self.gate.set()
        self.running: set[str] = set()
        self.frames = 0

    async def Prefills(
        self, request_iterator: AsyncIterator[prefill_pb2.PrefillsRequest], context: Any
    ) -> AsyncIterator[prefill_pb2.PrefillsResponse]:
        async with aclosing(PrefillServer(self._follow).serve(request_iterator)) as frames:
            async for frame in frames:
                self.frames += 1
                yield frame

    async def _follow(
        self, request: prefill_pb2.PrefillRequest
    ) -> AsyncGenerator[prefill_pb2.PrefillResponse, None]:
        name = request.attempt.request_id
        if name == "refused":
            raise errors.Overloaded("no room", retry_after_ms=7)
        self.running.add(name)
        try:
            yield prefill_pb2.PrefillResponse(opened=prefill_pb2.HandoffOpened(ticket=name.encode()))
            await self.gate.wait()
            for n in range(3):
                progress = prefill_pb2.PrefillProgress(computed_tokens=n + 1)
                yield prefill_pb2.PrefillResponse(progress=progress)
            if name == "broken":
                raise ZeroDivisionError
            if name == "silent":
                return
            if name == "cancelled":
                raise asyncio.CancelledError
            first = prefill_pb2.FirstToken(token_id=request.prompt[0])
            yield prefill_pb2.PrefillResponse(first_token=first)
        finally:
            self.running.discard(name)


@asynccontextmanager
async def connected() -> AsyncIterator[tuple[Worker, PrefillClient]]:
    worker, host = Worker(), ServiceHost("127.0.0.1:0")  # type: ignore[abstract]
    prefill_pb2_grpc.add_PrefillServiceServicer_to_server(worker, host.server)
    await host.start([])
    channel = dial(host.endpoint)
    stream = PrefillClient(channel, instance="prefill-0")
    try:
        yield worker, stream
    finally:
        await stream.close()
        await channel.close()
        await host.stop(grace_s=0)


def start(stream: PrefillClient, name: str, token: int = 1) -> StreamedPrefill:
    """A prompt of one token."""
    attempt = common_pb2.Attempt(request_id=name, attempt=1)
    prompt = OutgoingPrompt(as_tokens([token]), [], root=bytes(16), salt=b"", block_tokens=16)
    request = prefill_pb2.PrefillRequest(attempt=attempt)
    return stream.start(prefill_pb2.PrefillStart(request=request), prompt)


async def next_event(call: RemotePrefill) -> prefill_pb2.PrefillResponse:
    async with asyncio.timeout(WAIT_S):
        while True:
            response = await call.next_or_idle()
            if response is not None:
                return response


async def first_token(call: RemotePrefill) -> int:
    while True:
        event = await next_event(call)
        if event.HasField("first_token"):
            return event.first_token.token_id


async def test_prompts_get_their_own_events_and_what_is_ready_travels_together() -> None:
    async with connected() as (worker, stream):
        worker.gate.clear()
        calls = [start(stream, f"r{n}", n + 1) for n in range(20)]
        for n, call in enumerate(calls):
            assert (await next_event(call)).opened.ticket == f"r{n}".encode()
        worker.gate.set()
        assert [await first_token(call) for call in calls] == list(range(1, 21))
        assert worker.frames < 20  # of 100 events
        assert stream.open_calls == 0
        await eventually(lambda: not worker.running)


def _opened(handle: int) -> prefill_pb2.PrefillEvent:
    response = prefill_pb2.PrefillResponse(opened=prefill_pb2.HandoffOpened(ticket=b"t"))
    return prefill_pb2.PrefillEvent(handle=handle, response=response)


def _first(handle: int, token: int) -> prefill_pb2.PrefillEvent:
    response = prefill_pb2.PrefillResponse(first_token=prefill_pb2.FirstToken(token_id=token))
    return prefill_pb2.PrefillEvent(handle=handle, response=response)


async def test_first_tokens_are_handed_over_while_they_are_waited_for() -> None:
    """Together with the handoff or after it; never without one, nor to a task that does not wait, as one that
    was just cancelled."""
    async with connected() as (worker, stream):
        worker.gate.clear()
        took: list[int] = []

        def take(first: prefill_pb2.FirstToken) -> bool:
            took.append(first.token_id)
            return first.token_id != 3

        calls = [start(stream, f"r{n}") for n in range(5)]
        for call in calls:
            call.on_first = take
            assert (await next_event(call)).HasField("opened")
        stopped = asyncio.create_task(next_event(calls[0]))
        waits = [asyncio.create_task(first_token(call)) for call in calls[1:4]]
        await asyncio.sleep(0)
        stopped.cancel()
        frame = prefill_pb2.PrefillsResponse(events=[_first(call.handle, n) for n, call in enumerate(calls)])
        stream.take(frame)
        assert took == [1, 2, 3]
        assert [call.first_taken for call in calls] == [False, True, True, False, False]
        assert await asyncio.gather(*waits) == [1, 2, 3]
        assert await first_token(calls[4]) == 4

        together, unopened = start(stream, "together"), start(stream, "unopened")
        both = [asyncio.create_task(next_event(call)) for call in (together, unopened)]
        await asyncio.sleep(0)
        together.on_first = unopened.on_first = take
        events = [_opened(together.handle), _first(together.handle, 6), _first(unopened.handle, 7)]
        stream.take(prefill_pb2.PrefillsResponse(events=events))
        assert took[3:] == [6] and together.first_taken and not unopened.first_taken
        opened, first = await asyncio.gather(*both)
        assert opened.HasField("opened") and first.HasField("first_token")
        assert await first_token(together) == 6


async def test_what_a_first_token_breaks_is_its_own_requests_alone() -> None:
    def broken(_: prefill_pb2.FirstToken) -> bool:
        raise ZeroDivisionError

    async with connected() as (worker, stream):
        worker.gate.clear()
        calls = [start(stream, name) for name in ("unlucky", "well")]
        for call in calls:
            assert (await next_event(call)).HasField("opened")
        calls[0].on_first = broken
        failing, well = (asyncio.create_task(first_token(call)) for call in calls)
        await asyncio.sleep(0)
        stream.take(prefill_pb2.PrefillsResponse(events=[_first(call.handle, 1) for call in calls]))
        assert await well == 1
        with pytest.raises(ZeroDivisionError):
            await failing


async def test_a_prompt_that_is_sent_again_stays_in_its_own_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    trace = contextvars.ContextVar("trace", default="the reader's")
    monkeypatch.setattr(prefill_stream, "trace_metadata", lambda: (("traceparent", trace.get()),))
    ids, root = as_tokens(range(2048)), bytes(16)
    hashes = chain_hashes(ids, root=root, salt=b"", block_tokens=64)
    prompt = OutgoingPrompt(ids, hashes, root=root, salt=b"", block_tokens=64)
    async with connected() as (_, stream):
        sent: list[prefill_pb2.PrefillStart] = []
        monkeypatch.setattr(stream._stream, "send", lambda start: sent.append(copy.deepcopy(start)))
        calls = []
        for name in ("whole", "named"):
            token = trace.set(name)
            calls.append(stream.start(prefill_pb2.PrefillStart(), prompt, may_name=True))
            trace.reset(token)
        unknown = to_failure(errors.PrefixUnknown("forgotten"))
        event = prefill_pb2.PrefillEvent(handle=calls[1].handle, failure=unknown)
        stream.take(prefill_pb2.PrefillsResponse(events=[event]))
        assert [start.request.prefix.blocks for start in sent] == [0, 32, 0]
        assert [start.trace["traceparent"] for start in sent] == ["whole", "named", "named"]


async def test_a_prompt_fails_alone() -> None:
    async with connected() as (_, stream):
        well, refused, broken = (start(stream, name) for name in ("well", "refused", "broken"))
        with pytest.raises(errors.Overloaded) as caught:
            await first_token(refused)
        assert caught.value.retry_after_ms == 7
        with pytest.raises(errors.Internal):
            await first_token(broken)
        assert await first_token(well) == 1
        assert not (refused.broke or broken.broke)
        assert stream.open_calls == 0


@pytest.mark.parametrize("name", ["silent", "cancelled"])
async def test_a_prompt_that_ends_without_a_word_is_told_of(name: str) -> None:
    async with connected() as (worker, stream):
        call = start(stream, name)
        with pytest.raises(errors.Unavailable):
            await first_token(call)
        assert not call.broke
        assert stream.open_calls == 0
        await eventually(lambda: not worker.running)


async def test_closing_a_call_ends_its_prompt_and_no_other() -> None:
    async with connected() as (worker, stream):
        worker.gate.clear()
        kept, dropped = start(stream, "kept"), start(stream, "dropped")
        await next_event(dropped)
        dropped.close()
        await eventually(lambda: worker.running == {"kept"}, timeout_s=WAIT_S)
        assert await kept.next_or_idle() is not None
        assert await kept.next_or_idle() is None  # nothing for a while
        never_sent = start(stream, "never")
        never_sent.close()
        worker.gate.set()
        assert await first_token(kept) == 1


async def test_a_stream_that_ends_fails_all_its_prompts_and_the_next_one_opens_another() -> None:
    async with connected() as (worker, stream):
        worker.gate.clear()
        calls = [start(stream, f"r{n}") for n in range(3)]
        for call in calls:
            await next_event(call)
        await stream.close()
        for call in calls:
            with pytest.raises(errors.Unavailable):
                await next_event(call)
            assert call.broke
        await eventually(lambda: not worker.running, timeout_s=WAIT_S)
        worker.gate.set()
        assert await first_token(start(stream, "again")) == 1


async def test_an_older_worker_gets_a_call_for_each_prompt(model: Any, card: ModelCard) -> None:
    cluster = FakeCluster(model)
    for worker in cluster.workers:
        worker.service._identity = _without_features(worker.service._identity)
    async with cluster, open_router(cluster, card) as router, dial(router.host.endpoint) as channel:
        stub: router_pb2_grpc.RouterServiceAsyncStub = router_pb2_grpc.RouterServiceStub(channel)
        texts = [await _answer(stub) for _ in range(2)]
        assert texts[0] == texts[1] != ""
        assert all(link.prefills.open_calls == 0 for link in router.fleet.links())
        cluster.prefills[0].fail_before_ticket = errors.Overloaded("full", retry_after_ms=5)
        cluster.prefills[1].fail_before_ticket = errors.Overloaded("full", retry_after_ms=5)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await _answer(stub)
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        await eventually(lambda: not cluster.held)


def _without_features(identity: Any) -> Any:
    return replace(identity, features=())


async def _answer(stub: router_pb2_grpc.RouterServiceAsyncStub) -> str:
    generate = router_pb2.GenerateRequest(
        chat=router_pb2.Chat(messages=[router_pb2.Message(role="user", content="hi")]),
        sampling=router_pb2.Sampling(seed=1, max_tokens=8),
    )
    return "".join(
        [
            event.delta.text
            async for response in stub.Generate(generate, timeout=WAIT_S)
            for event in response.events
        ]
    )


@given(st.lists(st.integers(0, BATCH_BYTES * 2), min_size=1, max_size=30))
def test_batches_keep_order_and_bound(sizes: list[int]) -> None:
    packed = list(batches(sizes, lambda size: size))
    assert [size for batch in packed for size in batch] == sizes
    assert all(batch and (len(batch) == 1 or sum(batch) <= BATCH_BYTES) for batch in packed)
