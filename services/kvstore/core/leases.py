"""Leases: resources that their owner must renew before they expire. Pure; the caller passes the time.

The store has two kinds: pins (blocks that a reader reads) and reservations (slots that a writer fills).
A lease that a running call uses does not expire before that call ends.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

from libs.common.rpc.pins.names import bounded_lease_ms
from slipstream.errors import NotFound

ResourceT = TypeVar("ResourceT")


@dataclass(slots=True)
class LeaseRecord(Generic[ResourceT]):
    """A live lease. `resource` ends with it; `users` counts the calls that use it now."""

    lease_id: str
    owner: str
    expires_ms: float
    lease_ms: int
    resource: ResourceT
    users: int = 0


class LeaseTable(Generic[ResourceT]):
    """Live leases. Ended leases are returned, so that the caller frees their resources."""

    def __init__(self, new_id: Callable[[], str]) -> None:
        """`new_id` returns ids that cannot be guessed: an id is the right to end the lease."""
        self._new_id = new_id
        self._leases: dict[str, LeaseRecord[ResourceT]] = {}

    def __len__(self) -> int:
        return len(self._leases)

    def __iter__(self) -> Iterator[LeaseRecord[ResourceT]]:
        return iter(self._leases.values())

    def grant(
        self, resource: ResourceT, *, owner: str, requested_ms: int, now_ms: float
    ) -> LeaseRecord[ResourceT]:
        """Add a lease on `resource`."""
        lease_ms = bounded_lease_ms(requested_ms)
        lease = LeaseRecord(self._new_id(), owner, now_ms + lease_ms, lease_ms, resource)
        self._leases[lease.lease_id] = lease
        return lease

    def get(self, lease_id: str, *, now_ms: float) -> LeaseRecord[ResourceT] | None:
        """The live lease of that id; None if it has ended or is due."""
        lease = self._leases.get(lease_id)
        return lease if lease is not None and (lease.users or lease.expires_ms > now_ms) else None

    def renew(self, lease_id: str, *, requested_ms: int, now_ms: float) -> None:
        """Extend the lease from now. Raises NotFound if it has ended, since its resource may be gone."""
        lease = self.get(lease_id, now_ms=now_ms)
        if lease is None:
            raise NotFound("the lease has ended", field="lease_id")
        lease.lease_ms = bounded_lease_ms(requested_ms)
        lease.expires_ms = max(lease.expires_ms, now_ms + lease.lease_ms)

    def end(self, lease_id: str) -> LeaseRecord[ResourceT] | None:
        """Remove the lease and return it; None if there is none, so ending twice is harmless."""
        return self._leases.pop(lease_id, None)

    def expire(self, *, now_ms: float) -> list[LeaseRecord[ResourceT]]:
        """Remove and return all leases that are due and not in use."""
        due = [lease for lease in self._leases.values() if lease.expires_ms <= now_ms and not lease.users]
        for lease in due:
            del self._leases[lease.lease_id]
        return due
