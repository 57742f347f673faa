"""Items of many tenants in fair order: start-time fair queueing by tokens. Pure.

Each tenant's items leave first in, first out. Between tenants the one whose next item has the lowest start
tag goes first. Taking an item moves its tenant's tag on by the item's cost over the tenant's weight. Virtual
time moves to the tag before. A tenant that returns after a pause starts at virtual time: it has no credit and
no debt. Over any time in which two tenants both have items waiting, what they were served (tokens over
weight) differs by at most one largest item of each (Goyal, Vin, Cheng 1996).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field


@dataclass(slots=True)
class _Tenant:
    start_tag: float
    order: int  # of arrival, for tenants with equal tags
    costs: dict[str, float] = field(default_factory=dict)  # by item, in order of arrival


class FairQueue:
    """Items are names; costs are tokens. Weights default to 1."""

    def __init__(self, weights: Mapping[str, float] | None = None) -> None:
        self._weights = dict(weights or {})
        self._tenants: dict[str, _Tenant] = {}
        self._tenant_of: dict[str, str] = {}
        self._virtual = 0.0
        self._arrivals = 0

    def __len__(self) -> int:
        return len(self._tenant_of)

    def __iter__(self) -> Iterator[str]:
        return iter(self._tenant_of)

    def push(self, tenant: str, item: str, cost_tokens: float) -> None:
        """Add an item at the end of its tenant's. Raises ValueError when it is there already."""
        if item in self._tenant_of:
            raise ValueError(f"{item} waits already")
        self._arrivals += 1
        known = self._tenants.get(tenant)
        if known is None:
            known = self._tenants[tenant] = _Tenant(self._virtual, self._arrivals)
        elif not known.costs:
            known.start_tag = max(known.start_tag, self._virtual)
            known.order = self._arrivals
        known.costs[item] = cost_tokens
        self._tenant_of[item] = tenant

    def peek(self) -> str | None:
        """The item that `pop` would take."""
        tenant = self._next()
        return next(iter(tenant.costs)) if tenant is not None else None

    def heads(self) -> list[str]:
        """The first item of each tenant, in order."""
        waiting = [tenant for tenant in self._tenants.values() if tenant.costs]
        return [next(iter(t.costs)) for t in sorted(waiting, key=lambda t: (t.start_tag, t.order))]

    def pop(self, item: str | None = None) -> str | None:
        """Take the next item, or this head of its tenant; None when nothing waits."""
        following = self._next()
        if following is None:
            return None
        # Virtual time is that of the order: a head that is taken out of order does not move it.
        self._virtual = max(self._virtual, following.start_tag)
        item = next(iter(following.costs)) if item is None else item
        name = self._tenant_of[item]
        tenant = self._tenants[name]
        tenant.start_tag += tenant.costs.pop(item) / self._weights.get(name, 1.0)
        del self._tenant_of[item]
        self._drop_idle_tenants()
        return item

    def remove(self, item: str) -> bool:
        """Remove an item, which costs its tenant nothing. False when it was not there."""
        name = self._tenant_of.pop(item, None)
        if name is None:
            return False
        del self._tenants[name].costs[item]
        self._drop_idle_tenants()
        return True

    def charge(self, tenant: str, tokens: float) -> None:
        """Correct the cost of a served item by this many tokens."""
        known = self._tenants.get(tenant)
        if known is not None:
            moved = known.start_tag + tokens / self._weights.get(tenant, 1.0)
            known.start_tag = max(moved, self._virtual)

    def waiting_of(self, tenant: str) -> int:
        """How many items the tenant has waiting."""
        known = self._tenants.get(tenant)
        return len(known.costs) if known is not None else 0

    def tenants_with(self, tenant: str) -> int:
        """How many tenants have items waiting or are this one."""
        return len({tenant, *[name for name, each in self._tenants.items() if each.costs]})

    def longest(self) -> tuple[str, str, int] | None:
        """(tenant, its newest item, its number of items) of the tenant with the most items."""
        found: tuple[str, str, int] | None = None
        for name, tenant in self._tenants.items():
            if tenant.costs and (found is None or len(tenant.costs) > found[2]):
                found = (name, next(reversed(tenant.costs)), len(tenant.costs))
        return found

    def _next(self) -> _Tenant | None:
        waiting = [tenant for tenant in self._tenants.values() if tenant.costs]
        return min(waiting, key=lambda tenant: (tenant.start_tag, tenant.order), default=None)

    def _drop_idle_tenants(self) -> None:
        """Drop tenants without items whose tag is not after virtual time, where a new tenant starts."""
        if not self._tenant_of:
            self._tenants.clear()
            return
        gone = [n for n, t in self._tenants.items() if not t.costs and t.start_tag <= self._virtual]
        for name in gone:
            del self._tenants[name]
