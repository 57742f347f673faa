"""Streams as a client, to a router over gRPC or HTTP, or to the fake workers directly.

Each stream notes when it was sent and when its tokens came. Messages are not decoded but for what the
measurement needs: on a small machine the client's CPU is the router's competitor.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import secrets
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import grpc
import numpy as np

from libs.common.block_hash import chain_hashes, pack_hashes
from libs.common.dial import dial
from libs.common.fingerprint import Fingerprint
from slipstream.v1 import common_pb2, decode_pb2, decode_pb2_grpc, prefill_pb2, prefill_pb2_grpc, router_pb2

GENERATE = "/slipstream.v1.RouterService/Generate"
# First byte of a GenerateResponse: the tag of the event it holds.
_DELTA, _FINISHED = b"\x12", b"\x1a"

Messages = Sequence[dict[str, str]]


@dataclass(slots=True)
class StreamLog:
    """Times in seconds on the monotonic clock. `arrivals`: of messages with tokens."""

    sent_s: float
    arrivals: list[float] = field(default_factory=list)
    completion_tokens: int = 0
    text: str = ""
    refused_after_s: float | None = None
    error: str = ""

    @property
    def ttft_ms(self) -> float:
        """Sent to first token."""
        return (self.arrivals[0] - self.sent_s) * 1e3

    @property
    def total_ms(self) -> float:
        """Sent to last token."""
        return (self.arrivals[-1] - self.sent_s) * 1e3


class GrpcTarget:
    """A Slipstream router over gRPC. Several processes on one port share it by the connection."""

    def __init__(self, endpoint: str, *, connections: int = 1) -> None:
        self._channels = [dial(endpoint) for _ in range(connections)]
        self._generate: Iterator[Any] = itertools.cycle(
            [channel.unary_stream(GENERATE) for channel in self._channels]
        )

    async def stream(
        self, messages: Messages, *, max_tokens: int, session: str = "", want_text: bool = False
    ) -> StreamLog:
        """One request to its end."""
        log, last = StreamLog(time.monotonic()), b""
        texts: list[str] = []
        try:
            async for data in self.open(messages, max_tokens=max_tokens, session=session):
                if data[:1] == _DELTA:
                    log.arrivals.append(time.monotonic())
                    if want_text:
                        texts.append(router_pb2.GenerateResponse.FromString(data).delta.text)
                last = data
        except grpc.aio.AioRpcError as error:
            log.refused_after_s = time.monotonic() - log.sent_s
            log.error = error.code().name
            return log
        if last[:1] == _FINISHED:
            finished = router_pb2.GenerateResponse.FromString(last).finished
            log.completion_tokens = finished.usage.completion_tokens
        log.text = "".join(texts)
        return log

    def open(self, messages: Messages, *, max_tokens: int, session: str = "") -> Any:
        """The call of one request; its messages are bytes."""
        request = router_pb2.GenerateRequest()
        for message in messages:
            request.chat.messages.add(**message)
        request.sampling.max_tokens = max_tokens
        request.sampling.ignore_eos = True
        metadata = (("x-session-affinity", session),) if session else ()
        return next(self._generate)(request.SerializeToString(), metadata=metadata)

    async def close(self) -> None:
        """Close the channels."""
        for channel in self._channels:
            await channel.close()


class HttpTarget:
    """Any OpenAI-style router, or worker, over HTTP."""

    def __init__(self, url: str, *, model: str | None = None) -> None:
        connector = aiohttp.TCPConnector(limit=0)
        self._session = aiohttp.ClientSession(connector=connector, auto_decompress=False)
        self._url = url.rstrip("/") + "/v1/chat/completions"
        self._model = model

    async def stream(
        self, messages: Messages, *, max_tokens: int, session: str = "", want_text: bool = False
    ) -> StreamLog:
        """One request to its end."""
        body: dict[str, Any] = {"messages": messages, "max_tokens": max_tokens, "stream": True}
        if self._model is not None:
            body["model"] = self._model
        else:
            body |= {"ignore_eos": True, "stream_options": {"include_usage": True}}
        headers = {"Content-Type": "application/json"}
        if session:
            headers["x-session-affinity"] = session
        log, tail, texts = StreamLog(time.monotonic()), b"", []
        async with self._session.post(self._url, data=json.dumps(body).encode(), headers=headers) as answer:
            if answer.status != 200:
                log.refused_after_s = time.monotonic() - log.sent_s
                log.error = f"HTTP {answer.status}"
                return log
            async for chunk in answer.content.iter_any():
                tail = tail[-4096:] + chunk
                if _has_text(chunk):
                    log.arrivals.append(time.monotonic())
                if want_text:
                    texts.append(chunk)
        log.completion_tokens = _usage(tail) or max_tokens * (b"[DONE]" in tail)
        log.text = _sse_text(b"".join(texts)) if want_text else ""
        return log

    async def close(self) -> None:
        """Close all connections."""
        await self._session.close()


def _has_text(chunk: bytes) -> bool:
    # Opening chunks hold an empty content; both ways of spacing JSON are about.
    empty = chunk.count(b'"content":""') + chunk.count(b'"content": ""')
    return chunk.count(b'"content":') > empty + chunk.count(b'"content":null') + chunk.count(
        b'"content": null'
    )


def _usage(tail: bytes) -> int:
    at = tail.rfind(b'"completion_tokens":')
    return int(tail[at + 20 :].lstrip().split(b",")[0].split(b"}")[0]) if at >= 0 else 0


def _sse_text(data: bytes) -> str:
    parts = []
    for line in data.split(b"\n"):
        if line.startswith(b"data: {"):
            for choice in json.loads(line[6:])["choices"]:
                parts.append(choice["delta"].get("content") or "")
    return "".join(parts)


class WorkerTarget:
    """The fake workers without a router: a Prefill call and a Decode call for each stream."""

    def __init__(self, prefill: str, decode: str, fingerprint: Fingerprint) -> None:
        self._channels = [dial(prefill), dial(decode)]
        self._prefill: Any = prefill_pb2_grpc.PrefillServiceStub(self._channels[0])
        self._decode: Any = decode_pb2_grpc.DecodeServiceStub(self._channels[1])
        self._fingerprint = fingerprint

    async def stream(self, prompt: Sequence[int], *, max_tokens: int) -> StreamLog:
        """One request to its end."""
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
        async for event in self._prefill.Prefill(prefill_pb2.PrefillRequest(**common)):
            if event.HasField("opened"):
                opened.set_result(event.opened.ticket)
            elif event.HasField("first_token"):
                log.arrivals.append(time.monotonic())
                log.completion_tokens += 1
        await decoding
        log.arrivals.sort()
        return log

    async def _run_decode(self, common: dict[str, Any], opened: Awaitable[bytes], log: StreamLog) -> None:
        start = decode_pb2.StartSequence(**common, ticket=await opened)
        call = self._decode.Decode()
        await call.write(decode_pb2.DecodeRequest(start=start))
        async for frame in call:
            log.arrivals.append(time.monotonic())
            log.completion_tokens += sum(len(delta.tokens) // 4 for delta in frame.deltas)
            if any(delta.finish_reason for delta in frame.deltas):
                break
        call.cancel()

    async def close(self) -> None:
        """Close the channels."""
        for channel in self._channels:
            await channel.close()


async def closed_loop(
    one: Callable[[int], Awaitable[StreamLog]], *, streams: int, requests: int
) -> list[StreamLog]:
    """`streams` requests at a time, `requests` in all; `one(index)` makes each."""
    left = iter(range(requests))

    async def worker() -> list[StreamLog]:
        return [await one(index) for index in left]

    return [log for logs in await asyncio.gather(*(worker() for _ in range(streams))) for log in logs]
