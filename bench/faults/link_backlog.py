"""The backlog behind a faulty link: bytes in its sockets, waiting commands, memory of the processes."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from supervisor.process_stats import resident_bytes
from tests.support.clusters.mesh import Mesh

_EVERY_S = 0.05


class LinkBacklog:
    """Samples a mesh periodically."""

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh
        self._pids = [os.getpid(), *(worker.pid for worker in mesh.workers.values())]

    @asynccontextmanager
    async def watched(self, link: str) -> AsyncIterator[dict[str, int]]:
        """The largest value of each quantity inside the block."""
        largest: dict[str, int] = {}
        rss_before = {pid: resident_bytes(pid) for pid in self._pids}
        ports = self._mesh.ports(link)

        def sample() -> None:
            seen = {
                "socket_bytes": socket_bytes(ports),
                "waiting_commands": self._mesh.router.fleet.commands_waiting,
                "rss_growth_bytes": max(resident_bytes(pid) - before for pid, before in rss_before.items()),
            }
            for name, amount in seen.items():
                largest[name] = max(largest.get(name, 0), amount)

        async def keep_sampling() -> None:
            while True:
                sample()
                await asyncio.sleep(_EVERY_S)

        sampling = asyncio.create_task(keep_sampling())
        try:
            yield largest
        finally:
            sampling.cancel()
            await asyncio.gather(sampling, return_exceptions=True)


def socket_bytes(ports: set[int]) -> int:
    """Bytes sent but not acknowledged, or received but not read, on TCP connections of these local ports.

    Both ends of a connection count. Reads /proc/net/tcp, so Linux only."""
    total = 0
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        fields = line.split()
        if {int(fields[end].rpartition(":")[2], 16) for end in (1, 2)} & ports:
            sent, received = fields[4].split(":")
            # A listening socket's second number counts connections that wait.
            total += int(sent, 16) + (int(received, 16) if fields[3] != "0A" else 0)
    return total
