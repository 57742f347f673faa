"""What the etcd client takes and gives: keys, values, revisions and their errors.

A revision counts every change of the whole key space; a key's `mod_revision` is the revision of its
last change and serves as a fencing epoch: it only grows, and a compare-and-swap on it has one winner.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from slipstream.errors import FailedPrecondition, NotFound, Unavailable

ABSENT = 0  # the mod_revision of a key that does not exist
NO_LEASE = 0


class EtcdUnavailable(Unavailable):
    """etcd did not answer in time. A change that was being made may or may not have happened."""


class EtcdCompacted(FailedPrecondition):
    """The revision asked for is no longer there; only a new snapshot helps."""


class LeaseNotFound(NotFound):
    """The lease expired or was revoked, and its keys are gone."""


class EtcdRefused(FailedPrecondition):
    """etcd understood and refused (bad request, permission, quota); a repeat would be refused too."""


@dataclass(frozen=True, slots=True)
class KeyValue:
    """One key as etcd holds it."""

    key: str
    value: bytes
    mod_revision: int
    lease_id: int = NO_LEASE


@dataclass(frozen=True, slots=True)
class PrefixSnapshot:
    """All keys under a prefix as of `revision`. Replaces whatever was known before."""

    revision: int
    entries: Mapping[str, KeyValue]


@dataclass(frozen=True, slots=True)
class PrefixChanges:
    """What changed at or before `revision` and after the last update: the new value, or None if deleted.

    Several changes of one key are in order of their revisions.
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

    `revision` is the mod_revision of the keys that were set. `current` is what etcd holds when the
    transaction failed, in the order of the swaps; empty when it succeeded.
    """

    succeeded: bool
    revision: int
    current: tuple[KeyValue | None, ...] = ()


@dataclass(frozen=True, slots=True)
class EtcdLease:
    """A lease as granted: etcd deletes its keys `ttl_s` seconds after the last renewal."""

    lease_id: int
    ttl_s: int


def fold(entries: Mapping[str, KeyValue], update: PrefixUpdate) -> dict[str, KeyValue]:
    """The keys under a prefix after `update`. Pure; the argument is not changed."""
    if isinstance(update, PrefixSnapshot):
        return dict(update.entries)
    folded = dict(entries)
    for key, value in update.changes:
        if value is None:
            folded.pop(key, None)
        else:
            folded[key] = value
    return folded
