"""Sends the events of stored responses in pieces, within their tenant's share of a router's memory."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

from services.router.api.answers.long_json import json_pieces, long_parts
from services.router.api.http.answer_delivery import AnswerDelivery
from services.router.api.http.event_stream import EventStream
from services.router.api.http.piece_stream import PIECE_BYTES
from services.router.api.json_body import Json
from services.router.api.responses.stored.replay import NumberedPiece, pieces_of


async def send_events(
    delivery: AnswerDelivery, stream: EventStream, tenant: str, response: Json, *, after: int
) -> int:
    """Send the events with numbers above `after`; the number of the last one. Raises Overloaded."""
    n_bytes = await asyncio.to_thread(_length, response)
    with delivery.sending(tenant, n_bytes):
        pieces = pieces_of(response, after=after)
        while (batch := await asyncio.to_thread(_next_batch, pieces)) is not None:
            after, data = batch
            await stream.send(data)
    return after


def _length(response: Json) -> int:
    return sum(map(len, json_pieces(long_parts(response))))


def _next_batch(pieces: Iterator[NumberedPiece]) -> NumberedPiece | None:
    """The next pieces together, as long as one, with the number of the last event; None after the end."""
    last, data = 0, bytearray()
    for number, piece in pieces:
        last = number
        data += piece
        if len(data) >= PIECE_BYTES:
            break
    return (last, bytes(data)) if data else None
