"""KV transport over plain TCP sockets, for hosts where Mooncake's engine does not load.

Reads go straight from the socket into the destination. Each incarnation has a secret token. The server
refuses a read under another token, so it never reaches a successor's memory. Stopping a read closes its
connection, so no byte can land afterwards.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from libs.common.transport.base import Landed, ReadOp, Region, RegionTable, TransferRefused, TransferTimeout
from libs.common.transport.peers import PeerTransport
from libs.common.transport.socket_read import PROGRESS_TIMEOUT_S, SocketPeer, SocketRead
from libs.common.transport.socket_server import RegionServer
from libs.common.transport.tensor_memory import HOST

_STOP_SLACK_S = 1.0


class SocketTransport(PeerTransport[SocketPeer]):
    """Implements KvTransport. The session id is `host:port/token`.

    `progress_timeout_s`: a peer that sends nothing for so long fails its reads.
    """

    kind = "socket"

    def __init__(
        self,
        host: str = "127.0.0.1",
        *,
        bind: str = "",
        port: int = 0,
        progress_timeout_s: float = PROGRESS_TIMEOUT_S,
        serves: bool = True,
    ) -> None:
        """Peers dial `host` and `port`, by default the bound one; `bind` is the HOST:PORT to listen on, by
        default a free port of `host`. `serves`: else it opens no port, and registers no memory."""
        super().__init__(stop_timeout_s=progress_timeout_s + _STOP_SLACK_S)
        self._progress_timeout_s = progress_timeout_s
        self._server = RegionServer(bind or f"{host}:0", self._regions) if serves else None
        self.session_id = ""
        if self._server is not None:
            self.session_id = f"{host}:{port or self._server.port}/{self._server.token.hex()}"
        self._readers = ThreadPoolExecutor(32, thread_name_prefix="kv-read")

    def _register(self, region: Region) -> None:
        if self._server is None:
            raise TransferRefused("this transport only reads: no peer reads its memory")
        self._check_destination(region)

    def _check_destination(self, region: Region) -> None:
        if region.location != HOST:
            raise TransferRefused(
                f"sockets move memory of the host only, as the kernel cannot read {region.location}: use "
                "--transport rdma or mooncake, with a Mooncake built with CUDA"
            )

    def _make_peer(self, session_id: str) -> SocketPeer:
        return SocketPeer(session_id, progress_timeout_s=self._progress_timeout_s)

    def _discard(self, peer: SocketPeer) -> None:
        peer.close()

    async def close(self) -> None:
        if self._guard.closed:
            return
        self._guard.check()
        self._guard.closed = True
        await self._reads.close()
        for peer in self._peers.values():
            peer.close()
        loop = asyncio.get_running_loop()
        if self._server is not None:
            await loop.run_in_executor(None, self._server.close)
        await loop.run_in_executor(None, self._readers.shutdown)
        self._regions = self._destinations = RegionTable()

    async def _transfer(
        self, peer: SocketPeer, reads: Sequence[ReadOp], landed: Landed | None, stop: asyncio.Event
    ) -> None:
        """Connect without a thread, then read in one, so that silent peers occupy no threads."""
        stopped = asyncio.ensure_future(stop.wait())
        try:
            connection = peer.idle()
            if connection is None:
                connecting = asyncio.ensure_future(peer.connect())
                await asyncio.wait({connecting, stopped}, return_when=asyncio.FIRST_COMPLETED)
                if not connecting.done():
                    connecting.cancel()
                    await asyncio.wait({connecting})
                if connecting.cancelled():
                    raise TransferTimeout("the read was stopped before the peer answered")
                connection = connecting.result()
            job = SocketRead(peer, reads, landed, connection)
            job.ask_first()  # so that the peer sends while the thread starts
            running = asyncio.get_running_loop().run_in_executor(self._readers, job.run)
            try:
                either: set[asyncio.Future[Any]] = {running, stopped}
                await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            finally:
                if not running.done():
                    job.abort()
            await running
        finally:
            stopped.cancel()
