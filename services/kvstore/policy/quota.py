"""How much of a tier each tenant may fill. Pure.

A tenant at its limit makes room among its own blocks. A block that a second tenant wants is public (only a
public prefix has one hash for two) and counts for no tenant. Blocks without a tenant count for none either.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable
from typing import Generic, TypeVar

NO_TENANT = b""

TenantT = TypeVar("TenantT", bound=Hashable)


class TenantQuota(Generic[TenantT]):
    """The bytes in slots of each tenant, at most `limit_bytes` for each. A tier names tenants in its way."""

    def __init__(self, limit_bytes: int, uncounted: Collection[TenantT]) -> None:
        """`uncounted`: names that stand for no tenant; they have no limit."""
        self.limit_bytes = limit_bytes
        self._uncounted = uncounted
        self._used_bytes: dict[TenantT, int] = {}

    def used_bytes(self, tenant: TenantT) -> int:
        """The bytes in slots that count for the tenant."""
        return self._used_bytes.get(tenant, 0)

    def add(self, tenant: TenantT, n_bytes: int) -> None:
        """Count a slot for the tenant; below 0: it is free, or counts for no tenant from now on."""
        if tenant in self._uncounted:
            return
        used = self._used_bytes.get(tenant, 0) + n_bytes
        if used:
            self._used_bytes[tenant] = used
        else:
            self._used_bytes.pop(tenant, None)

    def has_room(self, tenant: TenantT, n_bytes: int) -> bool:
        """Whether the tenant may take `n_bytes` more."""
        return tenant in self._uncounted or self.used_bytes(tenant) + n_bytes <= self.limit_bytes

    def make_room(self, tenant: TenantT, n_bytes: int, evict_one: Callable[[], bool]) -> bool:
        """Evict blocks of the tenant until it may take `n_bytes`; False when they do not suffice.

        `evict_one` evicts one block of the tenant, and returns False when none may go.
        """
        if n_bytes > self.limit_bytes:  # no eviction makes room for it
            return self.has_room(tenant, n_bytes)
        while not self.has_room(tenant, n_bytes):
            if not evict_one():
                return False
        return True
