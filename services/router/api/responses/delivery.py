"""Sends stored responses in pieces, within their tenant's share of a router's memory.

A client that reads nothing holds what it asked for until it is cut off. So what one tenant's clients are
being sent is bounded. Answers of one piece do not count: the kernel has most of them.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import AsyncIterator, Iterator

import msgspec
from aiohttp import web

from libs.common import api_bounds
from services.router.admission.tenant_shares import TextShares
from services.router.api.http.event_stream import EventStream
from services.router.api.http.piece_stream import PIECE_BYTES, send_pieces
from services.router.api.json_body import Json
from services.router.api.responses.replay import NumberedEvent, events_of


class ResponseDelivery:
    """What the clients of each tenant are being sent."""

    def __init__(self) -> None:
        # Each tenant has its share whatever the others hold.
        most = api_bounds.MAX_TENANT_SENT_RESPONSE_BYTES
        self._sent = TextShares(most_chars=sys.maxsize, most_tenant_chars=most)

    async def send_object(
        self, request: web.Request, tenant: str, answer: Json, *, stall_s: float
    ) -> web.StreamResponse:
        """Answer with an object. Raises Overloaded beyond the tenant's share."""
        data = await asyncio.to_thread(msgspec.json.encode, answer)
        return await self.send_json(request, tenant, data, stall_s=stall_s)

    async def send_json(
        self, request: web.Request, tenant: str, data: bytes, *, stall_s: float
    ) -> web.StreamResponse:
        """Answer with JSON. Raises Overloaded beyond the tenant's share."""
        if len(data) <= PIECE_BYTES:
            return web.Response(body=data, content_type="application/json")
        with self._sending(tenant, len(data)):
            response = web.StreamResponse(headers={"Content-Type": "application/json"})
            response.content_length = len(data)
            return await send_pieces(request, response, _once(data), stall_s=stall_s)

    async def send_events(self, stream: EventStream, tenant: str, response: Json, *, after: int) -> int:
        """Send the events with numbers above `after`; the number of the last one. Raises Overloaded."""
        n_bytes = len(await asyncio.to_thread(msgspec.json.encode, response))
        with self._sending(tenant, n_bytes):
            events = events_of(response, after=after)
            while (batch := await asyncio.to_thread(_next_batch, events)) is not None:
                after, data = batch
                for begin in range(0, len(data), PIECE_BYTES):
                    await stream.send(data[begin : begin + PIECE_BYTES])
        return after

    @contextlib.contextmanager
    def _sending(self, tenant: str, n_bytes: int) -> Iterator[None]:
        self._sent.take(tenant, n_bytes)
        try:
            yield
        finally:
            self._sent.give_back(tenant, n_bytes)


def _next_batch(events: Iterator[NumberedEvent]) -> NumberedEvent | None:
    """The next events that fill a piece, with the number of the last one; None after the end."""
    last, data = 0, bytearray()
    for number, event in events:
        last = number
        data += event
        if len(data) >= PIECE_BYTES:
            break
    return (last, bytes(data)) if data else None


async def _once(data: bytes) -> AsyncIterator[bytes]:
    yield data
