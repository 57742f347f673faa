"""The quota of a disk, for millions of blocks: a number a block, a sum a tenant. Pure.

The tenant of a block that a start found is unknown: the first tenant that wants it has it.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from services.kvstore.policy.quota import NO_TENANT, TenantQuota

PUBLIC, UNKNOWN_TENANT = 0, 1
_MAX_TENANTS = 60_000


class DiskQuota(TenantQuota[int]):
    """Bytes in slots by tenant. Numbers stand for tenants."""

    def __init__(self, limit_bytes: int) -> None:
        super().__init__(limit_bytes, (PUBLIC, UNKNOWN_TENANT))
        self._numbers: dict[bytes, int] = {}
        self._free = list(range(_MAX_TENANTS, UNKNOWN_TENANT, -1))

    def number_of(self, tenant: bytes) -> int:
        """The tenant's number; PUBLIC for none, and for one too many."""
        if tenant == NO_TENANT:
            return PUBLIC
        number = self._numbers.get(tenant)
        if number is None:
            if not self._free:
                self._drop_empty()
            if not self._free:
                return PUBLIC
            number = self._numbers[tenant] = self._free.pop()
        return number

    def want(
        self, number: int, tenants: npt.NDArray[np.uint16], n_bytes: npt.NDArray[np.int64]
    ) -> npt.NDArray[np.uint16]:
        """The tenant wanted blocks in slots of `n_bytes`; returns whose they are from now on."""
        if number == PUBLIC:
            return tenants
        shared = (tenants > UNKNOWN_TENANT) & (tenants != number)
        for other, other_bytes in zip(tenants[shared].tolist(), n_bytes[shared].tolist(), strict=True):
            self.add(other, -other_bytes)
        found = tenants == UNKNOWN_TENANT
        self.add(number, int(n_bytes[found].sum()))
        return np.where(shared, PUBLIC, np.where(found, number, tenants)).astype(np.uint16)

    def check(self, tenants: npt.NDArray[np.uint16], n_bytes: npt.NDArray[np.int64]) -> None:
        """AssertionError unless the sums are those of these slots."""
        counted = np.bincount(tenants, weights=n_bytes, minlength=UNKNOWN_TENANT + 1).astype(np.int64)
        counted[: UNKNOWN_TENANT + 1] = 0
        with_blocks = np.flatnonzero(counted)
        assert self._used_bytes == dict(zip(with_blocks.tolist(), counted[with_blocks].tolist(), strict=True))

    def _drop_empty(self) -> None:
        for tenant, number in list(self._numbers.items()):
            if not self.used_bytes(number):
                del self._numbers[tenant]
                self._free.append(number)
