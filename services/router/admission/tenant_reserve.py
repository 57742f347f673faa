"""Which tenants have fewer places than their share of them, and so may take one of the reserve. Pure.

One tenant alone takes all places. So that its long answers do not keep others waiting, a tenant below its
share may run beyond the places of all, up to TENANT_RESERVE_SHARE more of them. Tenants that run or wait have
equal shares. The places beyond go when requests end: while all places are taken, nothing is admitted for a
tenant that has its share.
"""

from __future__ import annotations

from collections import Counter

from libs.common.service_bounds import TENANT_RESERVE_SHARE


class TenantReserve:
    """The requests of each tenant that run, and those that wait."""

    def __init__(self) -> None:
        self._running: Counter[str] = Counter()
        self._present: Counter[str] = Counter()

    def enter(self, tenant: str) -> None:
        """Count a request that waits."""
        self._present[tenant] += 1

    def leave(self, tenant: str) -> None:
        """Count a request less that waited."""
        _discount(self._present, tenant)

    def begin(self, tenant: str) -> None:
        """Count a request that runs."""
        self._running[tenant] += 1
        self._present[tenant] += 1

    def end(self, tenant: str) -> None:
        """Count a request less that ran."""
        _discount(self._running, tenant)
        _discount(self._present, tenant)

    def is_below_share(self, tenant: str, places: int) -> bool:
        """Whether one more request of the tenant is within its share of so many places."""
        n_tenants = len(self._present) + (tenant not in self._present)
        return n_tenants > 1 and (self._running[tenant] + 1) * n_tenants <= places


def with_reserve(places: int) -> int:
    """`places` and the places of the reserve together."""
    return places + max(1, int(TENANT_RESERVE_SHARE * places))


def _discount(counts: Counter[str], tenant: str) -> None:
    counts[tenant] -= 1
    if not counts[tenant]:
        del counts[tenant]
