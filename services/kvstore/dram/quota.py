"""The quota of the memory tier: it knows each tenant's blocks. Pure."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence

from services.kvstore.policy.quota import NO_TENANT, TenantQuota


class MemoryQuota(TenantQuota[bytes]):
    """The bytes each tenant has in slots, published or not, and the order in which its blocks go.

    The least recently wanted block goes first, ends of chains before their starts.
    """

    def __init__(self, limit_bytes: int) -> None:
        super().__init__(limit_bytes, (NO_TENANT,))
        self._blocks: dict[bytes, OrderedDict[bytes, int]] = {}  # tenant: its blocks and their bytes
        self._tenants: dict[bytes, bytes] = {}

    def tenant_of(self, key: bytes) -> bytes:
        """The tenant that a published block counts for."""
        return self._tenants.get(key, NO_TENANT)

    def publish(self, tenant: bytes, key: bytes, n_bytes: int) -> None:
        """The block is in a slot taken for the tenant."""
        if tenant != NO_TENANT:
            self._blocks.setdefault(tenant, OrderedDict())[key] = n_bytes
            self._tenants[key] = tenant

    def discard(self, key: bytes) -> None:
        """The block is gone, and its slot free."""
        tenant = self._tenants.pop(key, NO_TENANT)
        if tenant == NO_TENANT:
            return
        blocks = self._blocks[tenant]
        self.add(tenant, -blocks.pop(key))
        if not blocks:
            del self._blocks[tenant]

    def want(self, chain: Sequence[bytes], tenant: bytes) -> None:
        """The tenant wanted the chain."""
        for key in reversed(chain):
            known = self._tenants.get(key)
            if known == tenant:
                self._blocks[known].move_to_end(key)
            elif known is not None and tenant != NO_TENANT:
                self.discard(key)

    def own(self, tenant: bytes) -> Iterator[bytes]:
        """The tenant's blocks, the first to go first; not to be changed meanwhile."""
        return iter(self._blocks.get(tenant, ()))
