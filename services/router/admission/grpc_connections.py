"""The shares of a router's gRPC connections: a tenant's, and that of an address without a key. Pure.

grpc.aio shows no connections. The peer of a call, an address and a port, identifies its connection. gRPC
closes a connection some time after its last call; until then the connection counts for the call's tenant.
Which connections there are beside, the kernel shows (accepted_sockets.py).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from libs.common.connection_shares import ConnectionShare, ConnectionShares
from libs.common.service_bounds import ADDRESS_CONNECTIONS, GRPC_IDLE_CONNECTION_S, TENANT_CONNECTIONS
from services.router.admission.accepted_sockets import Address, address_of
from slipstream.rpc.hosts import is_loopback


@dataclass(slots=True)
class _CallConnection:
    share: ConnectionShare
    n_calls: int = 0


class GrpcConnections:
    """The connections that have calls, or had their last one at most `closed_after_s` ago."""

    def __init__(
        self,
        *,
        clock: Callable[[], float],
        most_tenant: int = TENANT_CONNECTIONS,
        most_address: int = ADDRESS_CONNECTIONS,
        closed_after_s: float = 2 * GRPC_IDLE_CONNECTION_S,
    ) -> None:
        self.shares = ConnectionShares(most_tenant=most_tenant)
        self.most_address = most_address
        self.closed_after_s = closed_after_s
        self._clock = clock
        self._connections: dict[str, _CallConnection] = {}
        self._idle_since_s: dict[str, float] = {}  # without calls, the longest idle first
        self._keyless: dict[Address, None] = {}  # those of the last look, the oldest first

    def begin_call(self, peer: str, tenant: str) -> None:
        """Count a call of the tenant on the connection.

        Raises Overloaded when the tenant has its share of connections without this one.
        """
        self._drop_closed()
        # No address: before a call has a key, nothing shows its connection.
        connection = self._connections.get(peer) or _CallConnection(ConnectionShare(self.shares, "localhost"))
        connection.share.claim(tenant)
        self._connections[peer] = connection
        connection.n_calls += 1
        self._idle_since_s.pop(peer, None)

    def end_call(self, peer: str) -> None:
        """Count a call that began no longer."""
        connection = self._connections[peer]
        connection.n_calls -= 1
        if not connection.n_calls:
            self._idle_since_s[peer] = self._clock()

    def keyless_excess(self, clients: Sequence[Address]) -> set[Address]:
        """The newest open connections beyond an address's share that have shown no key.

        A loopback address has no bound: all clients of a proxy on this machine have it.
        """
        keyed = set(map(address_of, self._connections))
        keyless = dict.fromkeys(
            client for client in clients if client not in keyed and not is_loopback(client[0])
        )
        known = [client for client in self._keyless if client in keyless]
        excess: set[Address] = set()
        held: Counter[str] = Counter()
        for client in dict.fromkeys([*known, *keyless]):
            held[client[0]] += 1
            if held[client[0]] > self.most_address:
                excess.add(client)
        self._keyless = dict.fromkeys(c for c in [*known, *keyless] if c not in excess)
        return excess

    def _drop_closed(self) -> None:
        closed_s = self._clock() - self.closed_after_s
        while self._idle_since_s:
            peer, since_s = next(iter(self._idle_since_s.items()))
            if since_s > closed_s:
                return
            del self._idle_since_s[peer]
            self._connections.pop(peer).share.leave()
