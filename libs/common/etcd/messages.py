"""The etcd client's records and errors: keys, values, revisions, leases.

A revision counts every change of the whole key space. A key's `mod_revision`, the revision of its last
change, serves as a fencing epoch: it only grows, and a compare-and-swap on it has one winner.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from slipstream.errors import FailedPrecondition, NotFound, Unavailable

ABSENT = 0  # the mod_revision of a key that does not exist
NO_LEASE = 0


class EtcdUnavailable(Unavailable):
    """etcd did not answer in time. A pending change may or may not have happened."""


class EtcdCompacted(FailedPrecondition):
    """The requested revision was compacted, so that the caller needs a new snapshot."""


class LeaseNotFound(NotFound):
    """The lease expired or was revoked, which deleted its keys."""


class EtcdRefused(FailedPrecondition):
    """etcd refused the request (malformed, permission, quota), and would refuse a repeat too."""


@dataclass(frozen=True, slots=True)
class KeyValue:
    """One key of etcd with its value."""

    key: str
    value: bytes
    mod_revision: int
    lease_id: int = NO_LEASE


@dataclass(frozen=True, slots=True)
class PrefixSnapshot:
    """All keys under a prefix as of `revision`. Replaces all earlier snapshots and changes."""

    revision: int
    entries: Mapping[str, KeyValue]


@dataclass(frozen=True, slots=True)
class PrefixChanges:
    """The changes after the last update, up to `revision`: the new values, None for deleted keys.

    Several changes of one key are in the order of their revisions.
    """

    revision: int
    changes: tuple[tuple[str, KeyValue | None], ...]


PrefixUpdate = PrefixSnapshot | PrefixChanges


@dataclass(frozen=True, slots=True)
class Swap:
    """Set `key` to `value` (None: delete it) if its mod_revision still is `expected_revision`."""

    key: str
    value: bytes | None
    expected_revision: int
    lease_id: int = NO_LEASE


@dataclass(frozen=True, slots=True)
class SwapOutcome:
    """Whether all swaps of a transaction happened (else none did).

    `revision` is the mod_revision of the keys that were set. `current` has the keys' present values after a
    failure, in the order of the swaps; it is empty after a success.
    """

    succeeded: bool
    revision: int
    current: tuple[KeyValue | None, ...] = ()


@dataclass(frozen=True, slots=True)
class EtcdLease:
    """A granted lease. etcd deletes its keys `ttl_s` seconds after the last renewal."""

    lease_id: int
    ttl_s: int


def fold(entries: Mapping[str, KeyValue], update: PrefixUpdate) -> dict[str, KeyValue]:
    """The keys under a prefix after `update`. Pure; does not change `entries`."""
    if isinstance(update, PrefixSnapshot):
        return dict(update.entries)
    folded = dict(entries)
    for key, value in update.changes:
        if value is None:
            folded.pop(key, None)
        else:
            folded[key] = value
    return folded
