"""Guarded calls to Mooncake Store's client. Runs in the pool agent's process only.

Measured with mooncake-transfer-engine-non-cuda 0.3.13.post1:

- Any call before setup or after close crashes the process; so does close while a call runs.
- setup without a master holds the interpreter for 90 s, close with a stopped master for 62 s. Other calls
  release it; they last 30 s when the master is stopped (-901), 4 s when it is dead (-900).
- A miss of batch_get_replica_desc looks like a missing master; batch_is_exist distinguishes them.
- A second put does not replace a value, yet reports success. A forced removal also takes leased values.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from slipstream.errors import FailedPrecondition, Unavailable

LOCAL_BUFFER_BYTES = 16 << 20
NO_SPACE = -200
MISSING = -704
MASTER_GONE = (-900, -901)


@dataclass(frozen=True, slots=True)
class Replica:
    """A copy of a value: `endpoint` is an engine's address, `address` lies in its memory."""

    endpoint: str
    address: int
    n_bytes: int


class ClientGuard:
    """A client that is set up. Thread-safe; every call may block as long as measured above."""

    def __init__(self, client: Any, placement: Any = None) -> None:
        """`client`: a MooncakeDistributedStore after setup. `placement`: its ReplicateConfig for puts."""
        self._client = client
        self._placement = placement
        self._idle = threading.Condition()
        self._running = 0
        self._closed = False

    @property
    def name(self) -> str:
        """The name of this client's segment in the pool."""
        return str(self._call("get_hostname"))

    def register(self, address: int, n_bytes: int) -> None:
        """Register memory from which values are put. Raises Unavailable."""
        if self._call("register_buffer", address, n_bytes) != 0:
            raise Unavailable(f"Mooncake Store does not register {n_bytes} bytes")

    def exist(self, names: Sequence[str]) -> list[bool]:
        """Whether the pool has each value. Raises Unavailable when the master does not answer."""
        codes = self._call("batch_is_exist", list(names))
        for code in codes:
            if code < 0 and code != MISSING:
                raise Unavailable(f"the pool's master does not answer: {code}")
        return [code == 1 for code in codes]

    def replicas(self, names: Sequence[str]) -> dict[str, list[Replica]]:
        """The complete memory replicas of each value that the pool has. Renews the values' leases."""
        found = self._call("batch_get_replica_desc", list(names))
        return {name: _in_memory(descriptors) for name, descriptors in found.items()}

    def put(self, names: Sequence[str], addresses: Sequence[int], sizes: Sequence[int]) -> list[int]:
        """Put values from registered memory; 0 or a negative code for each."""
        codes = self._call("batch_put_from", list(names), list(addresses), list(sizes), self._placement)
        return [int(code) for code in codes]

    def remove(self, names: Sequence[str]) -> list[bool]:
        """Remove values, leased or not; returns whether the pool had each. Raises Unavailable."""
        codes = self._call("batch_remove", list(names), True)
        if any(code in MASTER_GONE for code in codes):
            raise Unavailable("the pool's master does not answer")
        return [code == 0 for code in codes]

    def remove_all_named(self, pattern: str) -> int:
        """Remove all values whose name matches, leased or not; returns how many. Raises Unavailable."""
        count = int(self._call("remove_by_regex", pattern, True))
        if count < 0:
            raise Unavailable(f"the pool's master does not answer: {count}")
        return count

    def close(self, *, wait_s: float) -> bool:
        """Refuse new calls and close the client after the running ones. Idempotent.

        Returns False, and leaves the client open, if they do not end in time.
        """
        with self._idle:
            was_closed, self._closed = self._closed, True
            if was_closed:
                return True
            if not self._idle.wait_for(lambda: not self._running, timeout=wait_s):
                return False
        self._client.close()
        return True

    def _call(self, name: str, *arguments: Any) -> Any:
        with self._idle:
            if self._closed:
                raise FailedPrecondition("the pool's client is closed")
            self._running += 1
        try:
            return getattr(self._client, name)(*arguments)
        finally:
            with self._idle:
                self._running -= 1
                self._idle.notify_all()


def connect(
    *, host: str, master: str, segment_bytes: int, replicas: int, protocol: str = "tcp", devices: str = ""
) -> ClientGuard:
    """A client that is set up and contributes a segment. Blocks and holds the interpreter.

    Raises Unavailable.
    """
    from mooncake.store import MooncakeDistributedStore, ReplicateConfig

    client = MooncakeDistributedStore()
    code = client.setup(host, "P2PHANDSHAKE", segment_bytes, LOCAL_BUFFER_BYTES, protocol, devices, master)
    if code != 0:
        raise Unavailable(f"Mooncake Store does not connect to its master {master}: {code}")
    placement = ReplicateConfig()
    placement.replica_num = replicas
    return ClientGuard(client, placement)


def _in_memory(descriptors: Sequence[Any]) -> list[Replica]:
    replicas = []
    for descriptor in descriptors:
        if descriptor.is_memory_replica() and descriptor.status.name == "COMPLETE":
            buffer = descriptor.get_memory_descriptor().buffer_descriptor
            replicas.append(Replica(buffer.transport_endpoint, buffer.buffer_address, buffer.size))
    return replicas
