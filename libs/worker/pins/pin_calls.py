"""Pins, renewals and releases at lenders: on a stream for each, or by single calls where it knows none."""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from typing import TypeVar

import grpc

from libs.common.rpc.pin_streams import MAX_COMMANDS
from libs.worker.pins.peers import Peers
from libs.worker.pins.pin_stream import PinClient, StreamUnheard, StreamUnknown
from slipstream.errors import Unavailable
from slipstream.rpc_errors import from_rpc_error
from slipstream.v1 import kvstore_pb2, kvstore_pb2_grpc

PIN_TIMEOUT_S = 2.0
RELEASE_TIMEOUT_S = 2.0
# A lender that knows no stream is offered one again after so long: it may be another program by then.
ASK_AGAIN_S = 60.0
MAX_LENDERS = 64

AnswerT = TypeVar("AnswerT")


class PinCalls:
    """The streams of one worker, by lender. All calls raise SlipstreamError as unary calls would."""

    def __init__(self, peers: Peers, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._peers = peers
        self._clock = clock
        self._streams: OrderedDict[str, PinClient] = OrderedDict()
        self._single_until_s: OrderedDict[str, float] = OrderedDict()
        self._closed = False

    async def pin(self, endpoint: str, request: kvstore_pb2.PinRequest) -> kvstore_pb2.PinResponse:
        """Who is cancelled here ends the call; a pin that was made all the same can be ended by its name."""
        command = kvstore_pb2.PinCommand(pin=request)
        answer = await self._ask(endpoint, command, PIN_TIMEOUT_S)
        if answer is not None:
            return answer.pinned
        return await self._single(endpoint, lambda stub: stub.Pin(request, timeout=PIN_TIMEOUT_S))

    async def renew(self, endpoint: str, request: kvstore_pb2.RenewPinRequest, *, timeout_s: float) -> None:
        """Extend a pin. NotFound when it has ended."""
        if await self._ask(endpoint, kvstore_pb2.PinCommand(renew=request), timeout_s) is None:
            await self._single(endpoint, lambda stub: stub.RenewPin(request, timeout=timeout_s))

    async def release(self, endpoint: str, lease_id: str) -> None:
        """End a pin, by its lease or its name."""
        request = kvstore_pb2.ReleasePinRequest(lease_id=lease_id)
        if await self._ask(endpoint, kvstore_pb2.PinCommand(release=request), RELEASE_TIMEOUT_S) is None:
            await self._single(endpoint, lambda stub: stub.ReleasePin(request, timeout=RELEASE_TIMEOUT_S))

    async def close(self) -> None:
        """End the streams; whatever is asked from now on is Unavailable."""
        self._closed = True
        streams = list(self._streams.values())
        self._streams.clear()
        await asyncio.gather(*(stream.close() for stream in streams))

    async def _ask(
        self, endpoint: str, command: kvstore_pb2.PinCommand, timeout_s: float
    ) -> kvstore_pb2.PinAnswer | None:
        """None: it is to be asked by a single call."""
        if self._closed:
            raise Unavailable("this worker asks for no more pins")
        stream = self._stream(endpoint)
        if stream is None or stream.unanswered >= MAX_COMMANDS // 2:
            return None
        try:
            return await stream.ask(command, timeout_s=timeout_s)
        except StreamUnheard:
            return None
        except StreamUnknown:
            self._single_until_s[endpoint] = self._clock() + ASK_AGAIN_S
            while len(self._single_until_s) > MAX_LENDERS:
                self._single_until_s.popitem(last=False)
            return None

    def _stream(self, endpoint: str) -> PinClient | None:
        if self._clock() < self._single_until_s.get(endpoint, 0.0):
            return None
        channel, stream = self._peers.channel(endpoint), self._streams.get(endpoint)
        if stream is None or stream.ended or stream.channel is not channel:
            if stream is not None:
                stream.retire()
            stream = self._streams[endpoint] = PinClient(channel, lender=endpoint)
            if len(self._streams) > MAX_LENDERS:
                self._streams.popitem(last=False)[1].retire()
        self._streams.move_to_end(endpoint)
        return stream

    async def _single(
        self, endpoint: str, call: Callable[[kvstore_pb2_grpc.KvstoreServiceAsyncStub], Awaitable[AnswerT]]
    ) -> AnswerT:
        try:
            return await call(kvstore_pb2_grpc.KvstoreServiceStub(self._peers.channel(endpoint)))
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error) from None
