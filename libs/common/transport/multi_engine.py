"""Combines several Mooncake engines into one, because over TCP an engine moves all its bytes in one thread.

An element goes to the engine that holds the fewest elements for its peer. The note of the incarnation probe
names the ports of a peer's engines, the first of which is in the session id.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

# More than two gain nothing on two cores for both ends, and each takes a second to close.
TCP_RAILS = 2


class MultiEngine:
    """The engines of one transport. An element's id is ours, not the engine's. Thread-safe."""

    def __init__(self, engines: Sequence[Any]) -> None:
        self._engines = list(engines)
        self.n_rails = len(self._engines)
        self._lock = threading.Lock()
        self._held: dict[str, list[int]] = {}  # by the peer's first address: elements by engine
        self._elements: dict[int, tuple[int, int, str]] = {}  # engine, its id, peer
        self._last = 0

    @property
    def ports(self) -> list[int]:
        """The engines' ports for peers."""
        return [engine.get_rpc_port() for engine in self._engines]

    def register_memory(self, *arguments: Any) -> int:
        """Register memory with all engines. Returns 0, or the first error code and registers with none."""
        for n_taken, engine in enumerate(self._engines):
            code = int(engine.register_memory(*arguments))
            if code != 0:
                for taken in self._engines[:n_taken]:
                    taken.unregister_memory(arguments[0])
                return code
        return 0

    def batch_transfer_async_read(
        self, addresses: Sequence[str], local: list[int], remote: list[int], sizes: list[int]
    ) -> int:
        """Submit one element to an engine; returns its id. `addresses` are those of the peer's engines."""
        peer = addresses[0]
        with self._lock:
            held = self._held.setdefault(peer, [0] * self.n_rails)
            rail = held.index(min(held))
            held[rail] += 1
        found = 0
        try:
            address = addresses[rail % len(addresses)]
            found = self._engines[rail].batch_transfer_async_read(address, local, remote, sizes)
        finally:
            with self._lock:
                if 0 < found < 1 << 63:
                    self._last += 1
                    self._elements[self._last] = rail, found, peer
                    found = self._last
                else:
                    self._count_end(rail, peer)
        return found

    def rail_of(self, element: int) -> int:
        """The engine of an element that has not ended."""
        return self._elements[element][0]

    def transfer_check_status(self, element: int) -> int:
        """Poll an element that has not ended: 1 means done, -1 failed."""
        rail, found, peer = self._elements[element]
        status = int(self._engines[rail].transfer_check_status(found))
        if status in (1, -1):
            with self._lock:
                del self._elements[element]
                self._count_end(rail, peer)
        return status

    def detach(self) -> list[Any]:
        """Pass the engines to the caller, which drops them. This object is unusable afterwards."""
        engines, self._engines = self._engines, []
        return engines

    def _count_end(self, rail: int, peer: str) -> None:
        held = self._held[peer]
        held[rail] -= 1
        if not any(held):
            del self._held[peer]


def note_of(ports: Sequence[int]) -> bytes:
    """The incarnation probe's note on the engines."""
    return ",".join(map(str, ports)).encode()


def addresses_of(engine_address: str, note: bytes) -> tuple[str, ...]:
    """Addresses of a peer's engines; only that of the session id for a foreign note."""
    host, port = engine_address.rsplit(":", 1)
    try:
        ports = [int(each) for each in note.decode("ascii").split(",")]
    except ValueError:
        return (engine_address,)
    if ports[0] != int(port) or not all(0 < each < 65536 for each in ports):
        return (engine_address,)
    return tuple(f"{host}:{each}" for each in ports)
