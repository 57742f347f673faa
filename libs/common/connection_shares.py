"""A client's share of the connections of a port: an address before its first request, a tenant after it."""

from __future__ import annotations

from collections import Counter

from libs.common.service_bounds import ADDRESS_CONNECTIONS, TENANT_CONNECTIONS
from slipstream.errors import Overloaded
from slipstream.rpc.hosts import is_loopback

# Of a connection whose requests have keys of several tenants: a proxy's, which is no tenant's.
_SHARED = ""


class ConnectionShares:
    """The connections of a port by address and by tenant. Pure."""

    def __init__(
        self, *, most_address: int = ADDRESS_CONNECTIONS, most_tenant: int = TENANT_CONNECTIONS
    ) -> None:
        self.most_address = most_address
        self.most_tenant = most_tenant
        self.nameless: Counter[str] = Counter()  # by address: connections without a tenant
        self.tenants: Counter[str] = Counter()


class ConnectionShare:
    """One connection's part. Its owner calls `leave` at the end."""

    def __init__(self, shares: ConnectionShares, address: str) -> None:
        """A loopback address has no bound: all clients of a proxy on this machine have it."""
        self._shares = shares
        self._address = "" if is_loopback(address) else address
        self._tenant: str | None = None
        self.fits = True  # whether the address may have the connection
        if self._address:
            self.fits = shares.nameless[self._address] < shares.most_address
            shares.nameless[self._address] += 1

    def claim(self, tenant: str) -> None:
        """Count the connection for a tenant. Raises Overloaded when the tenant has its share already."""
        if tenant == self._tenant or self._tenant == _SHARED:
            return
        tenants = self._shares.tenants
        if self._tenant is not None:  # another tenant's request came before
            _release(tenants, self._tenant)
            self._tenant = _SHARED
            return
        most = self._shares.most_tenant
        if tenants[tenant] >= most:
            raise Overloaded(f"this tenant has {most} connections, and may have no more")
        self._leave_address()
        tenants[tenant] += 1
        self._tenant = tenant

    def leave(self) -> None:
        """Count the connection no longer. Idempotent."""
        self._leave_address()
        if self._tenant:
            _release(self._shares.tenants, self._tenant)
        self._tenant = _SHARED

    def _leave_address(self) -> None:
        if self._address:
            _release(self._shares.nameless, self._address)
            self._address = ""


def _release(counter: Counter[str], key: str) -> None:
    counter[key] -= 1
    if not counter[key]:
        del counter[key]
