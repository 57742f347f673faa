"""What an event stream is on the wire: its headers, its chunks, and what becomes of the connection."""

from __future__ import annotations

import asyncio
import json
from email.utils import parsedate_to_datetime
from unittest import mock

import pytest
from aiohttp.http import HttpVersion11, StreamWriter
from aiohttp.test_utils import make_mocked_request

from services.router.api.http.event_stream import EventStream
from services.router.api.http.piece_stream import PIECE_BYTES
from services.router.api.openai.response import ResponseShape, ResponseWriter
from services.router.api.responses.writer import ResponsesShape, ResponsesWriter
from services.router.server import RouterServer
from slipstream import errors
from slipstream.v1 import router_pb2
from tests.router.api.http.test_robustness import HELLO, connect
from tests.router.conftest import eventually
from tests.router.support.answer_events import STARTED, sse_objects
from tests.router.support.fake_cluster import FakeCluster

BODY = json.dumps({"messages": HELLO, "stream": True, "max_tokens": 4}).encode()


def ask(version: str, *headers: str) -> bytes:
    start, kind = f"POST /v1/chat/completions HTTP/{version}", "Content-Type: application/json"
    lines = (start, "Host: localhost", kind, f"Content-Length: {len(BODY)}", *headers)
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + BODY


def headers_of(head: bytes) -> dict[str, str]:
    _, *lines = head.decode().removesuffix("\r\n\r\n").split("\r\n")
    pairs = [line.split(": ", 1) for line in lines]
    assert len({name.lower() for name, _ in pairs}) == len(pairs)
    return {name.lower(): text for name, text in pairs}


async def chunks_of(reader: asyncio.StreamReader) -> bytes:
    """The body, to its last chunk."""
    body = b""
    while n_bytes := int(await reader.readline(), 16):
        body += await reader.readexactly(n_bytes)
        assert await reader.readexactly(2) == b"\r\n"
    assert await reader.readexactly(2) == b"\r\n"
    return body


def delta(text: str) -> router_pb2.GenerateEvent:
    return router_pb2.GenerateEvent(delta=router_pb2.Delta(text=text))


async def open_stream(drain_s: float | None = None) -> tuple[EventStream, mock.Mock]:
    """A stream to a transport that keeps up, or that takes what waits after `drain_s`."""
    client = mock.Mock(spec=asyncio.Transport)
    client.is_closing.return_value, client.get_write_buffer_size.return_value = False, 0
    drain = mock.AsyncMock() if drain_s is None else lambda: asyncio.sleep(drain_s)
    writer = StreamWriter(mock.Mock(transport=client, _drain_helper=drain), mock.Mock())
    request = make_mocked_request("POST", "/", transport=client, writer=writer)
    stream = EventStream(request, lambda: {"x-request-id": "a"}, write_stall_s=60.0)
    stream.answer = ResponseWriter(router_pb2.Started(), ResponseShape(chat=True))
    return stream, client


async def test_answers_are_chunked_and_the_connection_goes_on(router: RouterServer) -> None:
    reader, writer = await connect(router)
    async with asyncio.timeout(60):
        for request_id in ("one", "two"):
            writer.write(ask("1.1", f"x-request-id: {request_id}"))
            head = await reader.readuntil(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 200 OK\r\n")
            headers = headers_of(head)
            assert headers["x-request-id"] == request_id
            assert headers["content-type"] == "text/event-stream; charset=utf-8"
            assert headers["cache-control"] == "no-cache"
            assert headers["x-accel-buffering"] == "no"
            assert headers["transfer-encoding"] == "chunked"
            assert headers["server"] == "slipstream"
            assert parsedate_to_datetime(headers["date"]).utcoffset() is not None
            assert "connection" not in headers and "content-length" not in headers
            assert (await chunks_of(reader)).endswith(b"\n\ndata: [DONE]\n\n")
    writer.close()


async def test_a_connection_that_is_to_close_closes(router: RouterServer) -> None:
    reader, writer = await connect(router)
    writer.write(ask("1.1", "Connection: close"))
    async with asyncio.timeout(60):
        assert headers_of(await reader.readuntil(b"\r\n\r\n"))["connection"] == "close"
        assert (await chunks_of(reader)).endswith(b"data: [DONE]\n\n")
        assert await reader.read() == b""
    writer.close()


async def test_http_1_0_has_no_chunks_and_the_answer_ends_with_the_connection(router: RouterServer) -> None:
    for headers in ((), ("Connection: keep-alive",)):
        reader, writer = await connect(router)
        writer.write(ask("1.0", *headers))
        async with asyncio.timeout(60):
            head = await reader.readuntil(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.0 200 OK\r\n")
            assert "transfer-encoding" not in headers_of(head)
            body = await reader.read()
        assert body.startswith(b"data: {") and body.endswith(b"data: [DONE]\n\n")
        writer.close()


async def test_a_direct_write_needs_an_empty_buffer_and_a_small_delta() -> None:
    stream, client = await open_stream()
    assert stream.try_write([delta("b")])
    written = client.write.call_args.args[0]
    assert b'"content":"b"' in written and written.endswith(b"\r\n")
    calls = client.write.call_count
    assert not stream.try_write([delta("c"), router_pb2.GenerateEvent(finished=router_pb2.Finished())])
    client.get_write_buffer_size.return_value = 1
    assert not stream.try_write([delta("d")])
    client.get_write_buffer_size.return_value, client.is_closing.return_value = 0, True
    assert not stream.try_write([delta("e")])
    with pytest.raises(ConnectionResetError):
        await stream.send(stream.encode([delta("e")]))
    assert client.write.call_count == calls


@pytest.mark.parametrize("n_echoed", [10, 64 << 10])
async def test_each_event_is_encoded_once_whatever_its_length(n_echoed: int) -> None:
    """A long opening is left to the handler; a long delta is sent with the next events."""
    stream, client = await open_stream()
    stream.answer = ResponsesWriter(STARTED, ResponsesShape("k", {"instructions": "x" * n_echoed}))
    texts, queued = ["a", "b" * (64 << 10), "c", "d"], list[router_pb2.GenerateEvent]()
    for text in texts:
        if queued or not stream.try_write([delta(text)]):
            queued.append(delta(text))
        if len(queued) == 1:
            await stream.send(stream.encode(queued))
            queued = []
    await stream.send(stream.encode(queued))
    await stream.fail(stream.answer.failure({"code": "server_error", "message": "no"}))
    reader = asyncio.StreamReader()
    reader.feed_data(sent_to(client).partition(b"\r\n\r\n")[2])
    events = sse_objects(await chunks_of(reader))
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    shown = [event["delta"] for event in events if event["type"] == "response.output_text.delta"]
    assert "".join(shown) == "".join(texts)
    assert events[-1]["response"]["output"][0]["content"][0]["text"] == "".join(texts)


async def test_a_held_delta_comes_before_a_failure() -> None:
    stream, client = await open_stream()
    assert stream.try_write([delta("a")]) and stream.try_write([delta("b" * (64 << 10))])
    await stream.fail([b"data: {}\n\n"])
    sent = sent_to(client)
    assert 0 < sent.index(b"bbbb") < sent.index(b"data: {}")


async def test_the_first_write_sends_headers_and_the_opening_event() -> None:
    stream, client = await open_stream()
    assert not stream.has_begun
    assert stream.try_write([delta("b")])
    assert stream.has_begun
    sent = b"".join(call.args[0] for call in client.write.call_args_list)
    head, _, body = sent.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200 OK\r\n") and b"x-request-id: a" in head
    assert body.count(b"data: ") == 2 and body.index(b'"role":"assistant"') < body.index(b'"content":"b"')
    end = router_pb2.GenerateEvent(finished=router_pb2.Finished())
    await stream.send(b"".join([data for data, _ in stream.encode_end([end])]), is_last=True)
    assert client.write.call_args.args[0].endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")


def sent_to(client: mock.Mock) -> bytes:
    return b"".join(call.args[0] for call in client.write.call_args_list)


async def test_comments_come_until_the_first_event_while_the_client_reads() -> None:
    stream, client = await open_stream()
    stream.keep_open(0.001)
    await eventually(lambda: sent_to(client).count(b": keep-alive") >= 2)
    assert stream.has_begun and not stream.has_events
    client.get_write_buffer_size.return_value, calls = 1, client.write.call_count
    await asyncio.sleep(0.02)
    assert client.write.call_count == calls
    client.get_write_buffer_size.return_value = 0
    await eventually(lambda: client.write.call_count > calls)
    assert stream.try_write([delta("b")])
    calls = client.write.call_count
    await asyncio.sleep(0.02)
    assert client.write.call_count == calls
    stream.stop_comments()


async def test_no_comment_comes_amid_the_events_of_a_failure() -> None:
    """They come in pieces, which may end within an event."""
    stream, client = await open_stream(drain_s=0.02)
    await stream.keep_alive()
    stream.keep_open(0.001)
    await stream.fail([b'data: {"error":', b'"no room"}\n\n'])
    body = sent_to(client).replace(b"\r\n", b"|")
    assert body.count(b": keep-alive") == 1
    assert body.endswith(b'data: {"error":|c|"no room"}\n\n|0||')


def test_the_last_event_of_a_long_response_begins_after_what_must_be_true_before() -> None:
    """So a save that fails amid the end cuts no event in two."""
    stream = EventStream(mock.Mock(version=HttpVersion11), dict, write_stall_s=60)
    stream.answer = writer = ResponsesWriter(STARTED, ResponsesShape("k", {}))
    end = router_pb2.GenerateEvent(finished=router_pb2.Finished())
    pieces = list(stream.encode_end([delta("word " * 100_000), end]))
    shares = [n_before / len(data) for data, n_before in pieces]
    assert shares == sorted(shares, reverse=True) and shares[0] == 1.0 and shares[-1] < 1.0
    before = b"".join([data[:n_before] for data, n_before in pieces])
    after = b"".join([data[n_before:] for data, n_before in pieces])
    assert after.startswith(b"event: response.completed")
    assert b"response.output_text.done" in before and b"event: response.completed" not in before
    assert max(len(data) for data, _ in pieces[1:]) < 3 * PIECE_BYTES
    assert writer.response is not None


async def test_what_fails_before_the_first_token_has_a_status_of_its_own(
    router: RouterServer, cluster: FakeCluster
) -> None:
    """Also where the stream has waited for it."""
    for prefill in cluster.prefills:
        prefill.gate.clear()
        prefill.fail_before_token = errors.InvalidArgument("prompt", "is not what it was")
    reader, writer = await connect(router)
    async with asyncio.timeout(60):
        writer.write(ask("1.1", "x-request-timeout-ms: 300"))
        assert (await reader.readline()).split()[1] == b"504"
        error = json.loads((await reader.readuntil(b"}}"))[-200:].partition(b"\r\n\r\n")[2])["error"]
        assert "deadline" in error["message"]
        before = sum(len(prefill.requests) for prefill in cluster.prefills)
        writer.write(ask("1.1"))
        await eventually(lambda: sum(len(prefill.requests) for prefill in cluster.prefills) > before)
        for prefill in cluster.prefills:
            prefill.gate.set()
        assert (await reader.readline()).split()[1] == b"400"
        assert b"is not what it was" in await reader.readuntil(b"}}")
    writer.close()


async def test_requests_sent_at_once_are_answered_in_their_order_also_after_one_that_fails(
    router: RouterServer, cluster: FakeCluster
) -> None:
    reader, writer = await connect(router)
    async with asyncio.timeout(60):
        writer.write(b"".join(ask("1.1", f"x-request-id: {name}") for name in ("one", "two")))
        for name in ("one", "two"):
            assert headers_of(await reader.readuntil(b"\r\n\r\n"))["x-request-id"] == name
            assert (await chunks_of(reader)).endswith(b"data: [DONE]\n\n")
        for decode in cluster.decodes:  # after the first token, which prefill makes
            decode.refuse = errors.InvalidArgument("prompt", "is not what it was")
        writer.write(ask("1.1", "x-request-id: three") + ask("1.1", "x-request-id: four"))
        for name in ("three", "four"):
            head = await reader.readuntil(b"\r\n\r\n")
            assert (head[:15], headers_of(head)["x-request-id"]) == (b"HTTP/1.1 200 OK", name)
            *_, last = (await chunks_of(reader)).removesuffix(b"\n\n").split(b"\n\n")
            assert json.loads(last.removeprefix(b"data: "))["error"]["param"] == "prompt"
    writer.close()
