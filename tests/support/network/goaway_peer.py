"""Peers that begin a connection with GOAWAY, as a server does that stops at that moment."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from hyperframe.frame import GoAwayFrame, SettingsFrame

NO_ERROR, INTERNAL_ERROR = 0, 2
NO_STREAM, ANY_STREAM = 0, 2**31 - 1
_CHUNK_BYTES = 64 << 10


def farewell(last_stream: int = NO_STREAM, why: int = NO_ERROR) -> bytes:
    """SETTINGS, and a GOAWAY that refuses streams beyond `last_stream`."""
    goaway = GoAwayFrame(0, last_stream_id=last_stream, error_code=why)
    return SettingsFrame(0).serialize() + goaway.serialize()


@asynccontextmanager
async def a_peer_that_leaves(last_stream: int, why: int) -> AsyncIterator[str]:
    """Sends GOAWAY on every connection; the client closes it."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(farewell(last_stream, why))
        while await reader.read(4096):
            pass
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}"


@asynccontextmanager
async def the_first_leaves(target: str) -> AsyncIterator[str]:
    """An endpoint of several processes: the first connection gets GOAWAY, `target` serves all others."""
    connections: set[asyncio.Task[None]] = set()

    async def carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while chunk := await reader.read(_CHUNK_BYTES):
                writer.write(chunk)
                await writer.drain()
        writer.close()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        connections.add(task)
        if len(connections) == 1:
            writer.write(farewell())
            await reader.read(_CHUNK_BYTES)
            writer.close()
            return
        host, _, port = target.rpartition(":")
        target_reader, target_writer = await asyncio.open_connection(host, int(port))
        await asyncio.gather(carry(reader, target_writer), carry(target_reader, writer))

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()
        for task in connections:
            task.cancel()
        await asyncio.gather(*connections, return_exceptions=True)
