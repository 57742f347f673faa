"""Orders a tree's nodes by their last use, with a byte budget for each tenant and one for all. Pure.

Using a node also uses all nodes above it. So the least recently used node of a tenant has no children,
unless another tenant's chain continues there.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Generic

from libs.common.radix.node import NodeT

# The search for the tenant with the most bytes covers only this many, the least recently used ones.
_MAX_COMPARED = 64


@dataclass(slots=True)
class _Pool(Generic[NodeT]):
    """One tenant's nodes, least recently used first."""

    used: OrderedDict[NodeT, None] = field(default_factory=OrderedDict)
    n_bytes: int = 0
    used_s: float = 0.0


class TenantLru(Generic[NodeT]):
    """See the module's text. A tenant is any hashable name; roots of trees are not added."""

    def __init__(
        self,
        *,
        max_bytes: int,
        max_tenant_bytes: int,
        tenant_bytes: int = 0,
        idle_s: float = math.inf,
        clock: Callable[[], float] | None = None,
    ) -> None:
        """`tenant_bytes` is the overhead of each tenant with nodes.

        Evictions begin with tenants that were not touched for `idle_s` on `clock`.
        """
        self._max_bytes = max_bytes
        self._max_tenant_bytes = max_tenant_bytes
        self._overhead_bytes = tenant_bytes
        self._idle_s = idle_s
        self._clock = clock
        self._pools: OrderedDict[Hashable, _Pool[NodeT]] = OrderedDict()  # least recently used first
        self.n_bytes = 0

    def tenant_bytes(self, tenant: Hashable) -> int:
        """The bytes of a tenant's nodes."""
        pool = self._pools.get(tenant)
        return pool.n_bytes if pool is not None else 0

    def nodes(self, tenant: Hashable) -> Sequence[NodeT]:
        """A tenant's nodes, least recently used first."""
        pool = self._pools.get(tenant)
        return tuple(pool.used) if pool is not None else ()

    def add(self, node: NodeT) -> None:
        """Add a new node as the most recently used; `resize` counts its bytes."""
        pool = self._pools.get(node.tenant)
        if pool is None:
            pool = self._pools[node.tenant] = _Pool(n_bytes=self._overhead_bytes)
            self.n_bytes += self._overhead_bytes
        pool.used[node] = None

    def remove(self, node: NodeT) -> None:
        """Remove a node and its bytes."""
        pool, n_bytes = self._pools[node.tenant], node.n_bytes
        del pool.used[node]
        node.n_bytes = 0
        if not pool.used:
            del self._pools[node.tenant]
            n_bytes += self._overhead_bytes
        pool.n_bytes -= n_bytes
        self.n_bytes -= n_bytes

    def resize(self, node: NodeT) -> None:
        """Count the node's bytes again."""
        grown_bytes = node.size_bytes() - node.n_bytes
        if grown_bytes:
            node.n_bytes += grown_bytes
            self.n_bytes += grown_bytes
            self._pools[node.tenant].n_bytes += grown_bytes

    def touch(self, path: Sequence[NodeT], tenant: Hashable) -> None:
        """Mark the nodes of a path, in order from the top, and the tenant as the most recently used."""
        for node in reversed(path):
            self._pools[node.tenant].used.move_to_end(node)
        pool = self._pools.get(tenant)
        if pool is not None:
            self._pools.move_to_end(tenant)
            if self._clock is not None:
                pool.used_s = self._clock()

    def choose_victim(self, tenant: Hashable) -> tuple[NodeT, int] | None:
        """The node to evict from while this tenant or all together exceed a budget, and by how many bytes."""
        pool = self._pools.get(tenant)
        excess_bytes = pool.n_bytes - self._max_tenant_bytes if pool is not None else 0
        if pool is None or excess_bytes <= 0:
            excess_bytes = self.n_bytes - self._max_bytes
            if excess_bytes <= 0:
                return None
            pool = self._largest_pool(islice(self._pools.values(), _MAX_COMPARED))
        node = next(iter(pool.used))
        while node.children:  # another tenant's chain continues there
            node = next(iter(node.children.values()))
        return node, excess_bytes

    def _largest_pool(self, oldest: Iterable[_Pool[NodeT]]) -> _Pool[NodeT]:
        pools = list(oldest)
        if self._clock is not None and self._clock() - pools[0].used_s >= self._idle_s:
            return pools[0]
        return max(pools, key=lambda pool: pool.n_bytes)
