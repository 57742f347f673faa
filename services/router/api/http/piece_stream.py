"""A long answer that is sent in pieces, as they are read from the database."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Iterable

from aiohttp import web

from libs.common import service_bounds

log = logging.getLogger(__name__)

# A client that takes a piece of this size within WRITE_STALL_S is not cut off.
PIECE_BYTES = 64 << 10


async def send_pieces(
    request: web.Request,
    response: web.StreamResponse,
    pieces: AsyncIterator[bytes],
    *,
    stall_s: float = service_bounds.WRITE_STALL_S,
) -> web.StreamResponse:
    """Send all pieces. A failure amid them cuts the connection, which is how a client knows of it."""
    first = await anext(pieces, b"")  # what fails before anything is sent has its own status
    await response.prepare(request)
    try:
        await _write(response, first, stall_s)
        async for piece in pieces:
            await _write(response, piece, stall_s)
        async with asyncio.timeout(stall_s):
            await response.write_eof()
    except Exception as error:
        if not isinstance(error, ConnectionResetError):
            log.warning("an answer in pieces ended early: %s", type(error).__name__)
        if request.transport is not None:
            request.transport.abort()
    return response


async def each_piece(pieces: Iterable[bytes]) -> AsyncIterator[bytes]:
    """Pieces that are there already, for `send_pieces`."""
    for piece in pieces:
        yield piece


async def _write(response: web.StreamResponse, piece: bytes, stall_s: float) -> None:
    for begin in range(0, len(piece), PIECE_BYTES):
        async with asyncio.timeout(stall_s):
            await response.write(piece[begin : begin + PIECE_BYTES])
