"""How much of a disk each tenant may fill, for millions of blocks: a number a block, a sum a tenant. Pure.

As `policy/quota.py` has it for memory: a block that a second tenant wants is public and counts for nobody, as
do blocks of no tenant. The tenant of a block that a start found is unknown: the first that wants it has it.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from services.kvstore.policy.quota import NOBODY

PUBLIC, UNKNOWN_TENANT = 0, 1
_MAX_TENANTS = 60_000


class DiskQuota:
    """Bytes in slots by tenant. `limit_bytes` holds for each of them. Numbers stand for tenants."""

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self._numbers: dict[bytes, int] = {}
        self._free = list(range(_MAX_TENANTS, UNKNOWN_TENANT, -1))
        self._used = np.zeros(_MAX_TENANTS + 1, np.int64)

    def used_bytes(self, tenant: bytes) -> int:
        """The bytes that count for the tenant."""
        return int(self._used[self._numbers[tenant]]) if tenant in self._numbers else 0

    def number_of(self, tenant: bytes) -> int:
        """The tenant's number; PUBLIC for none, and for one too many."""
        if tenant == NOBODY:
            return PUBLIC
        number = self._numbers.get(tenant)
        if number is None:
            if not self._free:
                self._forget_empty()
            if not self._free:
                return PUBLIC
            number = self._numbers[tenant] = self._free.pop()
        return number

    def has_room(self, number: int, n_bytes: int) -> bool:
        """Whether the tenant may take so many bytes more."""
        return number <= UNKNOWN_TENANT or int(self._used[number]) + n_bytes <= self.limit_bytes

    def take(self, number: int, n_bytes: int) -> None:
        """A slot was taken for the tenant, or (below 0) given back."""
        if number > UNKNOWN_TENANT:
            self._used[number] += n_bytes

    def want(
        self, number: int, tenants: npt.NDArray[np.uint16], n_bytes: npt.NDArray[np.int64]
    ) -> npt.NDArray[np.uint16]:
        """The tenant wanted blocks in slots of `n_bytes`; returns whose they are from now on."""
        if number == PUBLIC:
            return tenants
        shared = (tenants > UNKNOWN_TENANT) & (tenants != number)
        np.subtract.at(self._used, tenants[shared], n_bytes[shared])
        found = tenants == UNKNOWN_TENANT
        self._used[number] += int(n_bytes[found].sum())
        return np.where(shared, PUBLIC, np.where(found, number, tenants)).astype(np.uint16)

    def check(self, tenants: npt.NDArray[np.uint16], n_bytes: npt.NDArray[np.int64]) -> None:
        """AssertionError unless the sums are those of these slots."""
        counted = np.bincount(tenants, weights=n_bytes, minlength=len(self._used)).astype(np.int64)
        assert (counted[UNKNOWN_TENANT + 1 :] == self._used[UNKNOWN_TENANT + 1 :]).all()

    def _forget_empty(self) -> None:
        for tenant, number in list(self._numbers.items()):
            if not self._used[number]:
                del self._numbers[tenant]
                self._free.append(number)
