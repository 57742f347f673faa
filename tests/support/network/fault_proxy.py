"""A TCP proxy on loopback that injects faults: cut, reset, blackhole, delay, trickle, drop_state.

async with FaultProxy("127.0.0.1:2379") as proxy:
    client = dial(proxy.endpoint)
    proxy.cut()          # connections are reset and new ones refused
    proxy.blackhole()    # connections stay open and new ones are accepted, but no byte passes
    proxy.reset()        # connections are reset once; new ones work
    proxy.drop_state()   # bytes of open connections are lost for good, without a reset; new ones work
    proxy.delay(0.05)    # every chunk arrives 50 ms late
    proxy.trickle(2000)  # no more than 2,000 bytes a second pass, each way of each connection
    proxy.restore()      # no fault; bytes that a blackhole held back are delivered
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import TracebackType

_CHUNK_BYTES = 64 << 10
_TRICKLE_S = 0.02


class FaultProxy:
    """Forwards one port to `target` ("host:port") with the current fault."""

    def __init__(self, target: str, *, rewrite: Callable[[bytes], bytes] | None = None) -> None:
        """`rewrite` changes bytes on their way from the target to the client."""
        self.aim(target)
        self._rewrite = rewrite
        self._server: asyncio.Server | None = None
        self._refusing = False
        self._flowing = asyncio.Event()
        self._flowing.set()
        self._delay_s = 0.0
        self._bytes_per_s = 0.0
        self._era = 0  # connections of an earlier era carry no bytes any more
        self._writers: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self.accepted = 0
        # Connections that a fault reset or refused, and chunks that it held back.
        self.struck = 0
        self.carried_bytes = 0  # from the target to its clients

    async def __aenter__(self) -> FaultProxy:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.endpoint = f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._server is not None
        self._server.close()
        self._reset_connections()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def aim(self, target: str) -> None:
        """Forward new connections to `target`."""
        host, _, port = target.rpartition(":")
        self._target = (host, int(port))

    def cut(self) -> None:
        """Reset open connections, and every new one."""
        self._refusing = True
        self.reset()

    def reset(self) -> None:
        """Reset open connections; new ones work."""
        self.struck += len(self._writers)
        self._reset_connections()

    def drop_state(self) -> None:
        """Lose open connections, as a network that loses its state: neither end gets another packet."""
        self.struck += len(self._writers)
        self._era += 1

    def blackhole(self) -> None:
        """Hold every byte back in both directions; connections stay open."""
        self._flowing.clear()

    def delay(self, delay_s: float) -> None:
        """Forward every chunk `delay_s` late."""
        self._delay_s = delay_s

    def trickle(self, bytes_per_s: float) -> None:
        """Forward at most `bytes_per_s` in each direction of each connection."""
        self._bytes_per_s = bytes_per_s

    def restore(self) -> None:
        """End all faults."""
        self._refusing = False
        self._delay_s = 0.0
        self._bytes_per_s = 0.0
        self._flowing.set()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.accepted += 1
        self._writers.add(writer)
        if self._refusing:
            self.struck += 1
            self._drop(writer)
            return
        try:
            self.struck += not self._flowing.is_set()
            await self._flowing.wait()
            up_reader, up_writer = await asyncio.open_connection(*self._target)
        except OSError:
            self._drop(writer)
            return
        self._writers.add(up_writer)
        for source, sink, answers in ((reader, up_writer, False), (up_reader, writer, True)):
            task = asyncio.create_task(self._pump(source, sink, answers=answers))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _pump(
        self,
        source: asyncio.StreamReader,
        sink: asyncio.StreamWriter,
        *,
        answers: bool,
    ) -> None:
        era = self._era
        try:
            while chunk := await source.read(_CHUNK_BYTES):
                if era != self._era:
                    continue
                if answers:
                    self.carried_bytes += len(chunk)
                    chunk = self._rewrite(chunk) if self._rewrite is not None else chunk
                self.struck += bool(self._delay_s or self._bytes_per_s or not self._flowing.is_set())
                if self._delay_s:
                    await asyncio.sleep(self._delay_s)
                await self._flowing.wait()
                while self._bytes_per_s and chunk:
                    piece = max(1, int(self._bytes_per_s * _TRICKLE_S))
                    sink.write(chunk[:piece])
                    await sink.drain()
                    chunk = chunk[piece:]
                    await asyncio.sleep(_TRICKLE_S)
                sink.write(chunk)
                await sink.drain()
            await self._flowing.wait()
        except OSError:
            pass
        finally:
            if era == self._era:
                self._drop(sink)

    def _drop(self, writer: asyncio.StreamWriter) -> None:
        self._writers.discard(writer)
        writer.transport.abort()

    def _reset_connections(self) -> None:
        for writer in list(self._writers):
            self._drop(writer)
