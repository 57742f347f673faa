"""Sends the events of stored responses in pieces, within their tenant's share of a router's memory."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import msgspec

from services.router.api.http.answer_delivery import AnswerDelivery
from services.router.api.http.event_stream import EventStream
from services.router.api.http.piece_stream import PIECE_BYTES
from services.router.api.json_body import Json
from services.router.api.responses.replay import NumberedEvent, events_of


async def send_events(
    delivery: AnswerDelivery, stream: EventStream, tenant: str, response: Json, *, after: int
) -> int:
    """Send the events with numbers above `after`; the number of the last one. Raises Overloaded."""
    n_bytes = len(await asyncio.to_thread(msgspec.json.encode, response))
    with delivery.sending(tenant, n_bytes):
        events = events_of(response, after=after)
        while (batch := await asyncio.to_thread(_next_batch, events)) is not None:
            after, data = batch
            await stream.send(data)
    return after


def _next_batch(events: Iterator[NumberedEvent]) -> NumberedEvent | None:
    """The next events that fill a piece, with the number of the last one; None after the end."""
    last, data = 0, bytearray()
    for number, event in events:
        last = number
        data += event
        if len(data) >= PIECE_BYTES:
            break
    return (last, bytes(data)) if data else None
