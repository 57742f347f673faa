"""A proxy for Mooncake's TCP protocol that delays, cuts or forges the answers of a correct peer.

The engine's handshake is JSON that names the peer's data port. The proxy replaces it by its own port,
with the same number of digits, so that no length changes.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import Awaitable, Callable

from tests.common.transport.peers import Peer

Forwarder = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
_DATA_PORT = re.compile(rb'"tcp_data_port":(\d+)')


async def forward(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while piece := await reader.read(1 << 18):
        writer.write(piece)
        await writer.drain()


class MooncakeProxy:
    """`session` reaches the peer through the proxy. `to_reader` forwards the bytes of the peer's answers."""

    def __init__(
        self, peer: Peer, to_reader: Forwarder = forward, *, claimed: tuple[bytes, bytes] = (b"", b"")
    ):
        """`claimed`: a text of the peer's handshake and its replacement of the same length."""
        self._peer = peer
        self._to_reader = to_reader
        self._claimed = claimed
        self._servers: list[asyncio.Server] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._data_port = 0

    async def __aenter__(self) -> MooncakeProxy:
        engine, beacon, nonce = self._peer.session.split("/")
        self._handshake_port = int(engine.rsplit(":", 1)[1])
        self.session = f"127.0.0.1:{await self._listen(self._handshake)}/{beacon}/{nonce}"
        self._proxy_port = await self._listen(self._data)
        return self

    async def __aexit__(self, *_: object) -> None:
        for server in self._servers:
            server.close()
        self.cut()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def cut(self) -> None:
        """Close all connections now."""
        for task in self._tasks:
            task.cancel()

    async def _listen(self, forwarder: Forwarder) -> int:
        """Listen on a port of five digits, like those of Mooncake."""
        for port in range(20_000, 30_000):
            with contextlib.suppress(OSError):
                server = await asyncio.start_server(
                    lambda r, w: self._track(forwarder(r, w)), "127.0.0.1", port
                )
                self._servers.append(server)
                return port
        raise AssertionError("no free port")

    async def _track(self, work: Awaitable[None]) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        with contextlib.suppress(OSError, asyncio.CancelledError):
            await work

    async def _handshake(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        async def rewritten(answer: asyncio.StreamReader, to: asyncio.StreamWriter) -> None:
            while piece := await answer.read(1 << 16):
                if found := _DATA_PORT.search(piece):
                    self._data_port = int(found[1])
                    piece = piece.replace(found[1], b"%05d" % self._proxy_port)
                to.write(piece.replace(*self._claimed) if self._claimed[0] else piece)
                await to.drain()

        await self._both(reader, writer, self._handshake_port, rewritten)

    async def _data(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await self._both(reader, writer, self._data_port, self._to_reader)

    async def _both(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, port: int, answers: Forwarder
    ) -> None:
        up_reader, up_writer = await asyncio.open_connection("127.0.0.1", port)
        ways = [
            asyncio.ensure_future(forward(reader, up_writer)),
            asyncio.ensure_future(answers(up_reader, writer)),
        ]
        try:
            await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for way in ways:
                way.cancel()
            await asyncio.gather(*ways, return_exceptions=True)
            for each in (writer, up_writer):
                each.transport.abort()
