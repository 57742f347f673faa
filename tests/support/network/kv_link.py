"""The link that carries KV bytes from their owner to a reader, through fault proxies.

async with KvLink("socket") as link:
    worker = WorkerProcess(..., launcher=link.launcher(Role.PREFILL, run_dir))
    ...                                     # the worker is up
    link.aim()
    link.each(FaultProxy.blackhole)
"""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import AsyncExitStack
from pathlib import Path
from types import TracebackType

from libs.common.cluster.worker_record import Role
from tests.support.network.fault_proxy import FaultProxy

_NOWHERE = "127.0.0.1:1"
_DATA_PORT = re.compile(rb'"tcp_data_port":(\d+)')


class KvLink:
    """One proxied port of the socket transport, or three of Mooncake's: handshake, data and beacon.

    The handshake names the data port. The proxy replaces it by its own port, which has as many digits.
    """

    def __init__(self, transport: str) -> None:
        self._transport = transport
        self._session_file = Path()
        self._stack = AsyncExitStack()
        self._data = FaultProxy(_NOWHERE)
        self._handshake = FaultProxy(_NOWHERE, rewrite=self._put_own_port)
        self._beacon = FaultProxy(_NOWHERE)

    @property
    def _proxies(self) -> list[FaultProxy]:
        return [self._data, self._handshake, self._beacon] if self._transport == "mooncake" else [self._data]

    @property
    def ports(self) -> set[int]:
        """The ports that readers dial."""
        return {int(proxy.endpoint.rpartition(":")[2]) for proxy in self._proxies}

    @property
    def carried_bytes(self) -> int:
        """Bytes that readers received, a few bytes of protocol included."""
        return self._data.carried_bytes

    @property
    def accepted(self) -> int:
        """Connections that readers tried to open."""
        return sum(proxy.accepted for proxy in self._proxies)

    @property
    def struck(self) -> int:
        """How often a fault affected readers."""
        return sum(proxy.struck for proxy in self._proxies)

    async def __aenter__(self) -> KvLink:
        for proxy in self._proxies:
            await self._stack.enter_async_context(proxy)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._stack.aclose()

    def launcher(self, role: Role, run_dir: Path) -> list[str]:
        """The Python arguments that run a service whose KV is read through this link."""
        self._session_file = run_dir / f"kv-session-{id(self)}"
        announced = self._data.endpoint
        if self._transport == "mooncake":
            announced = f"{self._handshake.endpoint}/{self._beacon.endpoint.rpartition(':')[2]}"
        return ["-m", "tests.support.network.proxied_kv", role, announced, str(self._session_file)]

    def aim(self) -> None:
        """Forward to the service, which is up."""
        address, beacon, *_ = self._session_file.read_text().split("/")
        if self._transport == "mooncake":
            self._handshake.aim(address)
            self._beacon.aim(f"127.0.0.1:{beacon}")
        else:
            self._data.aim(address)

    def each(self, fault: Callable[[FaultProxy], None]) -> None:
        """Call a method of every proxy: a fault, or `restore`."""
        for proxy in self._proxies:
            fault(proxy)

    def _put_own_port(self, handshake: bytes) -> bytes:
        if found := _DATA_PORT.search(handshake):
            self._data.aim(f"127.0.0.1:{int(found[1])}")
            own = self._data.endpoint.rpartition(":")[2].encode()
            assert len(own) == len(found[1])
            handshake = handshake.replace(found[1], own)
        return handshake
