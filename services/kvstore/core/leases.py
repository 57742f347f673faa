"""Leases: what is kept for somebody until they end it, or forget to. Pure; time is given.

Two kinds use them: pins (blocks that a reader will read) and reservations (slots that a writer will
fill). A lease in use by a running call does not expire before that call ends.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

from slipstream.errors import NotFound

DEFAULT_LEASE_MS = 10_000
MAX_LEASE_MS = 60_000

KeptT = TypeVar("KeptT")


def granted_lease_ms(asked_ms: int) -> int:
    """The lease a caller gets: its wish within bounds, the default for 0."""
    return min(asked_ms, MAX_LEASE_MS) if asked_ms > 0 else DEFAULT_LEASE_MS


@dataclass(slots=True)
class PinLeaseRecord(Generic[KeptT]):
    """`kept` is what ends with it. `users` counts the calls that work on it now."""

    lease_id: str
    owner: str
    expires_ms: float
    lease_ms: int
    kept: KeptT
    users: int = 0


class LeaseTable(Generic[KeptT]):
    """Live leases. What ends is returned, so that the caller frees what it kept."""

    def __init__(self, new_id: Callable[[], str]) -> None:
        """`new_id` gives ids that nobody can guess: an id is the right to end the lease."""
        self._new_id = new_id
        self._leases: dict[str, PinLeaseRecord[KeptT]] = {}

    def __len__(self) -> int:
        return len(self._leases)

    def __iter__(self) -> Iterator[PinLeaseRecord[KeptT]]:
        return iter(self._leases.values())

    def grant(self, kept: KeptT, *, owner: str, asked_ms: int, now_ms: float) -> PinLeaseRecord[KeptT]:
        """A new lease on `kept`."""
        lease_ms = granted_lease_ms(asked_ms)
        lease = PinLeaseRecord(self._new_id(), owner, now_ms + lease_ms, lease_ms, kept)
        self._leases[lease.lease_id] = lease
        return lease

    def get(self, lease_id: str, *, now_ms: float) -> PinLeaseRecord[KeptT] | None:
        """The live lease of that id, or None when it has ended or is due to."""
        lease = self._leases.get(lease_id)
        return lease if lease is not None and (lease.users or lease.expires_ms > now_ms) else None

    def renew(self, lease_id: str, *, asked_ms: int, now_ms: float) -> None:
        """Extend from now. NotFound when the lease has ended: what it kept may be gone."""
        lease = self.get(lease_id, now_ms=now_ms)
        if lease is None:
            raise NotFound("the lease has ended", field="lease_id")
        lease.lease_ms = granted_lease_ms(asked_ms)
        lease.expires_ms = max(lease.expires_ms, now_ms + lease.lease_ms)

    def end(self, lease_id: str) -> PinLeaseRecord[KeptT] | None:
        """Take the lease out. None when it is not there: ending is idempotent."""
        return self._leases.pop(lease_id, None)

    def expire(self, *, now_ms: float) -> list[PinLeaseRecord[KeptT]]:
        """Take out all leases that are due and not in use."""
        due = [lease for lease in self._leases.values() if lease.expires_ms <= now_ms and not lease.users]
        for lease in due:
            del self._leases[lease.lease_id]
        return due
