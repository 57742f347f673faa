"""Leases end exactly once, never during use, and at their expiry at the latest."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from libs.common.rpc.pins.names import DEFAULT_LEASE_MS, MAX_LEASE_MS, bounded_lease_ms
from services.kvstore.core.leases import LeaseTable
from slipstream.errors import NotFound


def table() -> LeaseTable[int]:
    numbers = itertools.count()
    return LeaseTable(lambda: f"lease-{next(numbers)}")


steps = st.lists(
    st.tuples(st.sampled_from(["grant", "renew", "end", "use", "done", "wait"]), st.integers(0, 9)),
    max_size=60,
)


@given(steps)
def test_every_lease_ends_exactly_once_and_none_early(actions: list[tuple[str, int]]) -> None:
    leases = table()
    now_ms = 0.0
    expires: dict[str, float] = {}
    users: dict[str, int] = {}
    ended: list[str] = []
    for action, number in actions:
        name = f"lease-{number}"
        live = name in expires and name not in ended
        if action == "grant":
            lease = leases.grant(number, owner="w", requested_ms=1000 * (number + 1), now_ms=now_ms)
            expires[lease.lease_id] = now_ms + 1000 * (number + 1)
            users[lease.lease_id] = 0
        elif action == "renew":
            if live and (users[name] or expires[name] > now_ms):
                leases.renew(name, requested_ms=3000, now_ms=now_ms)
                expires[name] = max(expires[name], now_ms + 3000)
            else:
                with pytest.raises(NotFound):
                    leases.renew(name, requested_ms=3000, now_ms=now_ms)
        elif action == "end":
            assert (leases.end(name) is not None) == live
            if live:
                ended.append(name)
        elif live and action in ("use", "done"):
            lease_or_none = leases.get(name, now_ms=now_ms)
            if lease_or_none is not None:
                change = 1 if action == "use" else -min(1, users[name])
                lease_or_none.users += change
                users[name] += change
        elif action == "wait":
            now_ms += 700 * number
            due = {lease.lease_id for lease in leases.expire(now_ms=now_ms)}
            assert due == {n for n in expires if n not in ended and not users[n] and expires[n] <= now_ms}
            ended.extend(due)
    assert len(ended) == len(set(ended))
    assert {lease.lease_id for lease in leases} == set(expires) - set(ended)


def test_a_renewal_never_makes_a_lease_shorter() -> None:
    leases = table()
    lease = leases.grant(1, owner="w", requested_ms=30_000, now_ms=0)
    leases.renew(lease.lease_id, requested_ms=1_000, now_ms=0)
    assert leases.get(lease.lease_id, now_ms=29_999) is lease
    assert leases.get(lease.lease_id, now_ms=30_000) is None


def test_an_expired_lease_counts_as_ended_before_its_collection() -> None:
    leases = table()
    lease = leases.grant(1, owner="w", requested_ms=100, now_ms=0)
    assert leases.get(lease.lease_id, now_ms=99) is lease
    assert leases.get(lease.lease_id, now_ms=100) is None
    with pytest.raises(NotFound):
        leases.renew(lease.lease_id, requested_ms=0, now_ms=100)
    assert leases.expire(now_ms=100) == [lease]
    assert leases.end(lease.lease_id) is None


@given(st.integers(0, 10**9))
def test_lease_times_are_bounded(requested_ms: int) -> None:
    granted = bounded_lease_ms(requested_ms)
    assert granted == (DEFAULT_LEASE_MS if requested_ms == 0 else min(requested_ms, MAX_LEASE_MS))
