"""Many prompts on one stream of a router and a prefill worker: both ends over gRPC."""

from __future__ import annotations

import asyncio
import contextvars
import copy
import math
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager
from typing import Any

import pytest

from libs.common.block_hash import as_tokens, chain_hashes
from libs.common.cluster.stream_figures import MAX_TIME_MS
from libs.common.rpc.prefill_server import PrefillServer
from libs.common.rpc.serve import ServiceHost
from services.router.workers import prefill_client as prefill_stream
from services.router.workers.prefill_client import PrefillClient, RemotePrefill
from services.router.workers.prompt_delta import OutgoingPrompt
from slipstream import errors
from slipstream.rpc.dial import dial
from slipstream.rpc.rpc_errors import to_failure
from slipstream.v1 import common_pb2, prefill_pb2, prefill_pb2_grpc
from tests.router.conftest import WAIT_S, eventually
from tests.router.support.listeners import PrefillReader


class Worker(prefill_pb2_grpc.PrefillServiceServicer):
    """Answers with the prompt's first byte as token, once `gate` is open; the name says what goes wrong."""

    def __init__(self) -> None:
        self.gate = asyncio.Event()
        self.gate.set()
        self.running: set[str] = set()
        self.frames = 0

    async def Prefill(
        self, request_iterator: AsyncIterator[prefill_pb2.PrefillRequest], context: Any
    ) -> AsyncIterator[prefill_pb2.PrefillResponse]:
        async with aclosing(PrefillServer(self._follow).serve(request_iterator)) as frames:
            async for frame in frames:
                self.frames += 1
                yield frame

    async def _follow(
        self, request: prefill_pb2.StartPrefill
    ) -> AsyncGenerator[prefill_pb2.PrefillEvent, None]:
        name = request.attempt.request_id
        if name == "refused":
            raise errors.Overloaded("no room", retry_after_ms=7)
        self.running.add(name)
        try:
            yield prefill_pb2.PrefillEvent(opened=prefill_pb2.HandoffOpened(ticket=name.encode()))
            await self.gate.wait()
            for n in range(3):
                progress = prefill_pb2.PrefillProgress(computed_tokens=n + 1)
                yield prefill_pb2.PrefillEvent(progress=progress)
            if name == "broken":
                raise ZeroDivisionError
            if name == "silent":
                return
            if name == "cancelled":
                raise asyncio.CancelledError
            first = prefill_pb2.FirstToken(token_id=request.prompt[0])
            yield prefill_pb2.PrefillEvent(first_token=first)
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


def start(stream: PrefillClient, name: str, token: int = 1) -> tuple[RemotePrefill, PrefillReader]:
    """A prompt of one token."""
    attempt = common_pb2.Attempt(request_id=name, attempt=1)
    prompt = OutgoingPrompt(as_tokens([token]), [], root=bytes(16), salt=b"", block_tokens=16)
    reader = PrefillReader()
    return stream.start(prefill_pb2.StartPrefill(attempt=attempt), prompt, reader), reader


async def test_prompts_get_their_own_events_and_what_is_ready_travels_together() -> None:
    async with connected() as (worker, stream):
        worker.gate.clear()
        readers = [start(stream, f"r{n}", n + 1)[1] for n in range(20)]
        for n, reader in enumerate(readers):
            assert (await reader.next()).opened.ticket == f"r{n}".encode()
        worker.gate.set()
        assert [await reader.first_token() for reader in readers] == list(range(1, 21))
        assert worker.frames < 20  # of 100 events
        assert not stream.receivers
        await eventually(lambda: not worker.running)


def _opened(handle: int) -> prefill_pb2.PrefillEvent:
    return prefill_pb2.PrefillEvent(handle=handle, opened=prefill_pb2.HandoffOpened(ticket=b"t"))


def _first(handle: int, token: int) -> prefill_pb2.PrefillEvent:
    return prefill_pb2.PrefillEvent(handle=handle, first_token=prefill_pb2.FirstToken(token_id=token))


async def test_events_are_pushed_while_their_frame_is_read_and_none_after_a_close() -> None:
    async with connected() as (worker, stream):
        worker.gate.clear()
        (one, first), (_, second), (dropped, none) = (start(stream, f"r{n}") for n in range(3))
        dropped.close()
        events = [
            _opened(one.handle),
            _first(one.handle, 6),
            _opened(one.handle + 1),
            _opened(dropped.handle),
        ]
        stream.dispatch(prefill_pb2.PrefillResponse(events=events))
        assert (first.events.qsize(), second.events.qsize(), none.events.qsize()) == (2, 1, 0)
        assert await first.first_token() == 6
        stream.dispatch(prefill_pb2.PrefillResponse(events=[_first(one.handle, 7)]))
        assert first.events.empty()  # its first token was its last event


async def test_a_false_worker_caches_no_more_than_the_prompt_and_needs_a_finite_time() -> None:
    async with connected() as (worker, stream):
        worker.gate.clear()
        prefill, reader = start(stream, "r")
        event = _first(prefill.handle, 5)
        event.first_token.queue_ms, event.first_token.compute_ms = math.nan, math.inf
        event.first_token.cached.add(tokens=(1 << 32) - 1)
        stream.dispatch(prefill_pb2.PrefillResponse(events=[event]))
        seen = (await reader.next()).first_token
        assert (seen.queue_ms, seen.compute_ms) == (0, MAX_TIME_MS)
        assert [item.tokens for item in seen.cached] == [len(prefill.sent.prompt)]


async def test_what_a_first_token_breaks_is_its_own_requests_alone() -> None:
    class Broken(PrefillReader):
        def on_prefill_event(self, event: prefill_pb2.PrefillEvent) -> None:
            if event.HasField("first_token"):
                raise ZeroDivisionError
            super().on_prefill_event(event)

    async with connected() as (worker, stream):
        worker.gate.clear()
        failing, well = Broken(), PrefillReader()
        prompt = OutgoingPrompt(as_tokens([1]), [], root=bytes(16), salt=b"", block_tokens=16)
        handles = [
            stream.start(prefill_pb2.StartPrefill(), prompt, reader).handle for reader in (failing, well)
        ]
        stream.dispatch(prefill_pb2.PrefillResponse(events=[_first(handle, 1) for handle in handles]))
        assert await well.first_token() == 1
        with pytest.raises(ZeroDivisionError):
            await failing.next()


async def test_a_prompt_that_is_sent_again_stays_in_its_own_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    trace = contextvars.ContextVar("trace", default="the reader's")
    monkeypatch.setattr(prefill_stream, "trace_metadata", lambda: (("traceparent", trace.get()),))
    ids, root = as_tokens(range(2048)), bytes(16)
    hashes = chain_hashes(ids, root=root, salt=b"", block_tokens=64)
    prompt = OutgoingPrompt(ids, hashes, root=root, salt=b"", block_tokens=64)
    async with connected() as (_, stream):
        sent: list[prefill_pb2.StartPrefill] = []
        monkeypatch.setattr(stream, "send", lambda start: sent.append(copy.deepcopy(start)))
        calls = []
        for name in ("whole", "named"):
            token = trace.set(name)
            calls.append(stream.start(prefill_pb2.StartPrefill(), prompt, PrefillReader()))
            trace.reset(token)
        unknown = to_failure(errors.PrefixUnknown("forgotten"))
        event = prefill_pb2.PrefillEvent(handle=calls[1].handle, failure=unknown)
        stream.dispatch(prefill_pb2.PrefillResponse(events=[event]))
        assert [start.prefix.blocks for start in sent] == [0, 32, 0]
        assert [start.trace["traceparent"] for start in sent] == ["whole", "named", "named"]


async def test_a_prompt_fails_alone() -> None:
    async with connected() as (_, stream):
        well, refused, broken = (start(stream, name)[1] for name in ("well", "refused", "broken"))
        with pytest.raises(errors.Overloaded) as caught:
            await refused.first_token()
        assert caught.value.retry_after_ms == 7
        with pytest.raises(errors.Internal):
            await broken.first_token()
        assert await well.first_token() == 1
        assert not (refused.is_connection_lost or broken.is_connection_lost)
        assert not stream.receivers


@pytest.mark.parametrize("name", ["silent", "cancelled"])
async def test_a_prompt_that_ends_without_an_answer_fails(name: str) -> None:
    async with connected() as (worker, stream):
        _, reader = start(stream, name)
        with pytest.raises(errors.Unavailable):
            await reader.first_token()
        assert not reader.is_connection_lost
        assert not stream.receivers
        await eventually(lambda: not worker.running)


async def test_closing_a_call_ends_its_prompt_and_no_other() -> None:
    async with connected() as (worker, stream):
        worker.gate.clear()
        (_, kept), (dropped, reader) = start(stream, "kept"), start(stream, "dropped")
        await reader.next()
        dropped.close()
        await eventually(lambda: worker.running == {"kept"}, timeout_s=WAIT_S)
        assert (await kept.next()).HasField("opened")
        assert kept.events.empty()
        never_sent, _ = start(stream, "never")
        never_sent.close()
        worker.gate.set()
        assert await kept.first_token() == 1


async def test_a_stream_that_ends_fails_all_its_prompts_and_the_next_one_opens_another() -> None:
    async with connected() as (worker, stream):
        worker.gate.clear()
        readers = [start(stream, f"r{n}")[1] for n in range(3)]
        for reader in readers:
            await reader.next()
        await stream.close()
        for reader in readers:
            with pytest.raises(errors.Unavailable):
                await reader.next()
            assert reader.is_connection_lost
        await eventually(lambda: not worker.running, timeout_s=WAIT_S)
        worker.gate.set()
        assert await start(stream, "again")[1].first_token() == 1


@pytest.mark.parametrize("reports", [True, False])
async def test_a_listener_that_raises_while_its_prompt_fails_strands_no_other(reports: bool) -> None:
    class Broken(PrefillReader):
        def on_prefill_failed(self, error: errors.SlipstreamError, *, is_connection_lost: bool) -> None:
            raise ZeroDivisionError

        def on_listener_error(self, error: Exception) -> None:
            if not reports:
                raise error
            super().on_listener_error(error)

    async with connected() as (worker, stream):
        worker.gate.clear()
        prompt = OutgoingPrompt(as_tokens([1]), [], root=bytes(16), salt=b"", block_tokens=16)
        readers = [PrefillReader(), Broken(), PrefillReader(), Broken(), PrefillReader()]
        for reader in readers:
            stream.start(prefill_pb2.StartPrefill(), prompt, reader)
        stream.break_off(errors.Unavailable("silent"))
        for reader in readers[::2]:
            with pytest.raises(errors.Unavailable):
                await reader.next()
            assert reader.is_connection_lost
        for reader in readers[1::2]:
            assert reader.events.qsize() == int(reports)
        worker.gate.set()
        assert await start(stream, "again")[1].first_token() == 1
