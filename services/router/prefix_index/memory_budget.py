"""What runs of blocks take, by tenant and in all, and which gives way. Pure.

Runs of no tenant, of which only holders told, count together as one tenant's.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice

from services.router.prefix_index.radix_node import RadixNode

# Who has most is looked for among this many tenants, those heard of least lately.
_MOST_COMPARED = 64


@dataclass(slots=True)
class _Pool:
    """A tenant's runs, least recently used first."""

    used: OrderedDict[RadixNode, None] = field(default_factory=OrderedDict)
    n_bytes: int = 0


class MemoryBudget:
    """All runs, in the order of their use. Sizes are in bytes."""

    def __init__(self, *, max_bytes: int, max_tenant_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._max_tenant_bytes = max_tenant_bytes
        self._pools: OrderedDict[str | None, _Pool] = OrderedDict()  # heard of least lately first
        self.n_bytes = 0

    def tenant_bytes(self, tenant: str | None) -> int:
        """What a tenant's runs take."""
        pool = self._pools.get(tenant)
        return pool.n_bytes if pool is not None else 0

    def add(self, run: RadixNode) -> None:
        """A new run, now in use."""
        pool = self._pools.get(run.tenant)
        if pool is None:
            pool = self._pools[run.tenant] = _Pool()
        pool.used[run] = None

    def leave(self, run: RadixNode) -> None:
        """It is no more."""
        pool = self._pools[run.tenant]
        pool.n_bytes -= run.n_bytes
        self.n_bytes -= run.n_bytes
        run.n_bytes = 0
        del pool.used[run]
        if not pool.used:
            del self._pools[run.tenant]

    def account(self, run: RadixNode) -> None:
        """It takes more or less than before."""
        grown = run.size() - run.n_bytes
        if grown:
            run.n_bytes += grown
            self.n_bytes += grown
            self._pools[run.tenant].n_bytes += grown

    def touch(self, path: Sequence[RadixNode], tenant: str) -> None:
        """Runs from the root on are in use, by a tenant."""
        for run in reversed(path):
            self._pools[run.tenant].used.move_to_end(run)
        if tenant in self._pools:
            self._pools.move_to_end(tenant)

    def victim(self, tenant: str | None) -> RadixNode | None:
        """An end that has to give way, where this tenant or all together have too much."""
        pool = self._pools.get(tenant)
        if pool is None or pool.n_bytes <= self._max_tenant_bytes:
            if self.n_bytes <= self._max_bytes:
                return None
            oldest = islice(self._pools, _MOST_COMPARED)
            tenant = max(oldest, key=lambda of: self._pools[of].n_bytes)
        run = next(iter(self._pools[tenant].used))
        while run.children:  # another tenant's chain goes on from it
            run = next(iter(run.children.values()))
        return run
