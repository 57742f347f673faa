"""How much of a tier each tenant may fill. Pure.

A tenant at its limit makes room among its own blocks, least recently wanted first, ends of chains first. A
block that a second tenant wants is public (only a public prefix has one hash for two) and counts for
nobody. Blocks of no tenant count for nobody either.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence

NOBODY = b""


class TenantQuota:
    """The bytes each tenant has in slots, published or not. `limit_bytes` holds for each of them."""

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self._used: dict[bytes, int] = {}
        self._blocks: dict[bytes, OrderedDict[bytes, int]] = {}  # tenant: its blocks and their bytes
        self._tenants: dict[bytes, bytes] = {}

    def used_bytes(self, tenant: bytes) -> int:
        """What counts for the tenant."""
        return self._used.get(tenant, 0)

    def tenant_of(self, key: bytes) -> bytes:
        """The tenant that a published block counts for."""
        return self._tenants.get(key, NOBODY)

    def has_room(self, tenant: bytes, n_bytes: int) -> bool:
        """Whether the tenant may take so many bytes more."""
        return tenant == NOBODY or self.used_bytes(tenant) + n_bytes <= self.limit_bytes

    def take(self, tenant: bytes, n_bytes: int) -> None:
        """A slot was taken for the tenant."""
        if tenant != NOBODY:
            self._used[tenant] = self.used_bytes(tenant) + n_bytes

    def give_back(self, tenant: bytes, n_bytes: int) -> None:
        """Free a slot of the tenant, or let it count for no tenant."""
        if tenant != NOBODY:
            self._used[tenant] -= n_bytes
            if not self._used[tenant]:
                del self._used[tenant]

    def publish(self, tenant: bytes, key: bytes, n_bytes: int) -> None:
        """The block is in a slot taken for the tenant."""
        if tenant != NOBODY:
            self._blocks.setdefault(tenant, OrderedDict())[key] = n_bytes
            self._tenants[key] = tenant

    def discard(self, key: bytes) -> None:
        """The block is gone, and its slot free."""
        tenant = self._tenants.pop(key, NOBODY)
        if tenant == NOBODY:
            return
        blocks = self._blocks[tenant]
        self.give_back(tenant, blocks.pop(key))
        if not blocks:
            del self._blocks[tenant]

    def want(self, chain: Sequence[bytes], tenant: bytes) -> None:
        """The tenant wanted the chain."""
        for key in reversed(chain):
            known = self._tenants.get(key)
            if known == tenant:
                self._blocks[known].move_to_end(key)
            elif known is not None and tenant != NOBODY:
                self.discard(key)

    def own(self, tenant: bytes) -> Iterator[bytes]:
        """The tenant's blocks, the first to go first; not to be changed meanwhile."""
        return iter(self._blocks.get(tenant, ()))
