"""A load generator's streams to a router over gRPC, or directly to the fake workers.

Each stream logs when it was sent and when its tokens arrived. The client decodes only what the measurement
needs: on a small machine its CPU time is missing at the router.
"""

from __future__ import annotations

import asyncio
import collections
import random
import secrets
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import numpy as np

from bench.fakes.grpc_client import GrpcConnection
from bench.router.stream import Messages, StreamLog
from libs.common.block_hash import chain_hashes
from libs.common.cluster.fingerprint import Fingerprint
from slipstream.block_hashes import pack_hashes
from slipstream.requests import chat_request
from slipstream.rpc.dial import Dial
from slipstream.v1 import common_pb2, decode_pb2, decode_pb2_grpc, prefill_pb2, prefill_pb2_grpc, router_pb2

GENERATE = "/slipstream.v1.RouterService/Generate"


class GrpcTarget:
    """A Slipstream router over gRPC. Several processes on one port need several connections."""

    def __init__(self, endpoint: str, *, connections: int = 1) -> None:
        self._endpoint = endpoint
        self._to_open = connections
        self._connections: collections.deque[GrpcConnection] = collections.deque()

    async def stream(
        self, messages: Messages, *, max_tokens: int, session: str = "", want_text: bool = False
    ) -> StreamLog:
        """Run one request to its end. Raises ConnectionError without a connection, or when it breaks."""
        log, last = StreamLog(time.monotonic()), b""
        texts: list[str] = []

        def take(data: bytes) -> None:
            nonlocal last
            if begins_with_delta(data) or any(event.HasField("delta") for event in _events(data)):
                log.arrivals.append(time.monotonic())
            if want_text:
                texts.extend(event.delta.text for event in _events(data))
            last = data

        request, metadata = generate_request(messages, max_tokens), _metadata(session)
        connection = await self._connection()
        await connection.call(GENERATE, request, take, metadata=metadata)
        # A refusal has no message, and an incomplete answer has no usage.
        events = _events(last)
        log.completion_tokens = events[-1].finished.usage.completion_tokens if events else 0
        log.error = "" if log.completion_tokens else "no complete answer"
        log.text = "".join(texts)
        return log

    async def _connection(self) -> GrpcConnection:
        """The next connection in turn. A router closes those without a call for seconds: they open again."""
        closed = [connection for connection in self._connections if connection.is_closed]
        for connection in closed:
            self._connections.remove(connection)
        self._to_open += len(closed)
        if self._to_open:
            self._to_open -= 1
            try:
                self._connections.append(await self._open())
            except OSError:
                self._to_open += 1
                raise
        while not self._connections:
            await asyncio.sleep(0.001)
        self._connections.rotate()
        return self._connections[0]

    async def _open(self) -> GrpcConnection:
        host, _, port = self._endpoint.rpartition(":")
        loop = asyncio.get_running_loop()
        _, opened = await loop.create_connection(lambda: GrpcConnection(self._endpoint), host, int(port))
        return opened

    async def close(self) -> None:
        """Close all connections."""
        for connection in self._connections:
            connection.close()


def generate_request(messages: Messages, max_tokens: int, *, reject_if_busy: bool = False) -> bytes:
    """A message of Generate whose answer has so many tokens."""
    request = chat_request(messages, {"reject_if_busy": reject_if_busy})
    request.sampling.max_tokens = max_tokens
    request.sampling.ignore_eos = True
    return request.SerializeToString()


def _metadata(session: str) -> tuple[tuple[str, str], ...]:
    return (("x-session-affinity", session),) if session else ()


def begins_with_delta(data: bytes) -> bool:
    """Whether the first event of a serialised GenerateResponse is a delta, by the tag after its length."""
    length_end = 1
    while length_end < len(data) and data[length_end] & 0x80:
        length_end += 1
    return data[length_end + 1 : length_end + 2] == b"\x12"


def _events(data: bytes) -> Sequence[router_pb2.GenerateEvent]:
    return router_pb2.GenerateResponse.FromString(data).events


class WorkerTarget:
    """The fake workers without a router, with a Prefill call and a Decode call for each stream."""

    def __init__(self, prefill: str, decode: str, fingerprint: Fingerprint, dial: Dial) -> None:
        self._channels = [dial(prefill), dial(decode)]
        self._prefill: Any = prefill_pb2_grpc.PrefillServiceStub(self._channels[0])
        self._decode: Any = decode_pb2_grpc.DecodeServiceStub(self._channels[1])
        self._fingerprint = fingerprint

    async def stream(self, prompt: Sequence[int], *, max_tokens: int) -> StreamLog:
        """Run one request to its end."""
        tokens = np.asarray(prompt, "<u4")
        fingerprint = self._fingerprint
        hashes = chain_hashes(
            tokens, root=fingerprint.digest, salt=b"", block_tokens=fingerprint.block_tokens
        )
        attempt = common_pb2.Attempt(request_id=secrets.token_hex(12), attempt=1)
        sampling = common_pb2.SamplingParams(max_tokens=max_tokens)
        common: dict[str, Any] = {
            "attempt": attempt,
            "fingerprint": fingerprint.to_proto(),
            "prompt": tokens.tobytes(),
            "block_hashes": pack_hashes(hashes),
            "sampling": sampling,
        }
        log = StreamLog(time.monotonic())
        opened: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        decoding = asyncio.create_task(self._run_decode(common, opened, log))
        request = prefill_pb2.PrefillRequest(starts=[prefill_pb2.StartPrefill(handle=1, **common)])
        async for response in self._prefill.Prefill(iter([request])):
            for event in response.events:
                if event.HasField("opened"):
                    opened.set_result(event.opened.ticket)
                elif event.HasField("first_token"):
                    log.arrivals.append(time.monotonic())
                    log.completion_tokens += 1
        await decoding
        log.arrivals.sort()
        return log

    async def _run_decode(self, common: dict[str, Any], opened: Awaitable[bytes], log: StreamLog) -> None:
        start = decode_pb2.StartSequence(handle=1, **common, ticket=await opened)
        call = self._decode.Decode()
        await call.write(decode_pb2.DecodeRequest(starts=[start]))
        async for frame in call:
            log.arrivals.append(time.monotonic())
            n_bytes = len(frame.packed_tokens) + sum(len(delta.tokens) for delta in frame.deltas)
            log.completion_tokens += n_bytes // 4
            if any(delta.finish_reason for delta in frame.deltas):
                break
        call.cancel()

    async def close(self) -> None:
        """Close the channels."""
        for channel in self._channels:
            await channel.close()


async def closed_loop(
    one: Callable[[int], Awaitable[StreamLog]], *, streams: int, requests: int, spread_s: float = 0.0
) -> list[StreamLog]:
    """Run `requests` in all, `streams` at a time; `one(index)` runs one request.

    All streams begin together, or each at a random moment of the first `spread_s`. In the second case only
    the requests after the last stream has begun count among `requests` and are returned."""
    left, begun, drawn = iter(range(requests)), 0, random.Random(streams)

    async def worker() -> list[StreamLog]:
        nonlocal begun
        if spread_s:
            await asyncio.sleep(drawn.uniform(0.0, spread_s))
        begun += 1
        while spread_s and begun < streams:
            await one(begun)
        return [await one(index) for index in left]

    return [log for logs in await asyncio.gather(*(worker() for _ in range(streams))) for log in logs]
