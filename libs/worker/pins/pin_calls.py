"""Pins, renewals and releases at lenders, on one stream for each lender."""

from __future__ import annotations

import asyncio
from collections import OrderedDict

from libs.worker.pins.peers import Peers
from libs.worker.pins.pin_client import PinClient
from slipstream.errors import Unavailable
from slipstream.v1 import kvstore_pb2

PIN_TIMEOUT_S = 2.0
RELEASE_TIMEOUT_S = 2.0
MAX_LENDERS = 64


class PinCalls:
    """The streams of one worker, by lender. All calls raise SlipstreamError."""

    def __init__(self, peers: Peers) -> None:
        self._peers = peers
        self._streams: OrderedDict[str, PinClient] = OrderedDict()
        self._closed = False

    async def pin(self, endpoint: str, request: kvstore_pb2.PinRequest) -> kvstore_pb2.PinResponse:
        """Pin blocks. A cancel ends the command; a pin that exists by then can be released by its name."""
        stream = self._stream(endpoint)
        answer = await stream.ask(kvstore_pb2.PinCommand(pin=request), timeout_s=PIN_TIMEOUT_S)
        return answer.pinned

    async def renew(self, endpoint: str, request: kvstore_pb2.RenewPinRequest, *, timeout_s: float) -> None:
        """Extend a pin. NotFound when it has ended."""
        await self._stream(endpoint).ask(kvstore_pb2.PinCommand(renew=request), timeout_s=timeout_s)

    async def release(self, endpoint: str, lease_id: str) -> None:
        """End a pin, by its lease or its name."""
        command = kvstore_pb2.PinCommand(release=kvstore_pb2.ReleasePinRequest(lease_id=lease_id))
        await self._stream(endpoint).ask(command, timeout_s=RELEASE_TIMEOUT_S)

    async def close(self) -> None:
        """End the streams; later calls raise Unavailable."""
        self._closed = True
        streams = list(self._streams.values())
        self._streams.clear()
        await asyncio.gather(*(stream.close() for stream in streams))

    def _stream(self, endpoint: str) -> PinClient:
        if self._closed:
            raise Unavailable("this worker requests no more pins")
        channel, stream = self._peers.channel(endpoint), self._streams.get(endpoint)
        if stream is None or stream.channel is not channel:
            if stream is not None:
                stream.retire()
            stream = self._streams[endpoint] = PinClient(channel, lender=endpoint)
            if len(self._streams) > MAX_LENDERS:
                self._streams.popitem(last=False)[1].retire()
        self._streams.move_to_end(endpoint)
        return stream
