"""Shares of a limit: whatever routers do and whenever they renew, together they stay within the bound."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.router.metering.lease import Lease, granted_of, overdraft, wanted

N_STEPS = 200


class Routers:
    """Routers with one limit, and the table of their leases. A renewal begins and ends in two steps."""

    def __init__(self, limit: int, count: int) -> None:
        self.limit = limit
        self.leases = [Lease(limit, n_routers=count) for _ in range(count)]
        self.rows = [(0, 0)] * count  # granted, used
        self.asked: dict[int, tuple[int, int]] = {}

    def step(self, index: int, action: str, amount: int) -> None:
        lease = self.leases[index]
        if action == "use":
            lease.ask(amount)
            if lease.room >= amount:
                lease.use(amount)
        elif action == "give back":  # an estimate was too high
            lease.use(-amount)
        elif action == "begin" and index not in self.asked:
            self.asked[index] = lease.begin_renewal()
        elif action in ("end", "fail") and index in self.asked:
            used, asked = self.asked.pop(index)
            others = sum(granted for at, (granted, _) in enumerate(self.rows) if at != index)
            held = self.rows[index][0]
            granted = granted_of(self.limit, used=used, asked=asked, held=held, others=others)
            self.rows[index] = granted, used
            if action == "end":  # else the answer is lost after the commit
                others_used = sum(row[1] for at, row in enumerate(self.rows) if at != index)
                lease.renew(granted, others_granted=others, others_used=others_used, now_unix_s=0)

    @property
    def used(self) -> int:
        return sum(lease.used for lease in self.leases)


@given(limit=st.integers(1, 200), count=st.integers(1, 6), largest=st.integers(1, 40), seed=st.integers(0))
def test_all_routers_together_use_the_limit_and_one_overdraft_each_at_most(
    limit: int, count: int, largest: int, seed: int
) -> None:
    routers, random = Routers(limit, count), Random(seed)
    for _ in range(N_STEPS):
        action = random.choice(["use", "use", "use", "give back", "begin", "end", "end", "fail"])
        routers.step(random.randrange(count), action, random.randint(1, largest))
        if count == 1:
            assert routers.used <= limit
        else:
            assert routers.used <= limit + count * overdraft(limit, count)
            assert sum(granted for granted, _ in routers.rows) <= limit + count * overdraft(limit, count)


@given(limit=st.integers(1, 10_000), count=st.integers(2, 8))
def test_one_busy_router_gets_the_whole_limit_and_no_more_while_the_others_are_idle(
    limit: int, count: int
) -> None:
    routers = Routers(limit, count)
    for _ in range(64):
        routers.leases[0].ask(limit)
        routers.leases[0].use(max(0, routers.leases[0].room))
        routers.step(0, "begin", 1)
        routers.step(0, "end", 1)
    assert limit <= routers.used <= limit + overdraft(limit, count)


def test_what_a_router_holds_in_advance_is_given_back_when_no_request_comes() -> None:
    routers = Routers(1000, 2)
    routers.step(0, "use", 40)
    routers.step(0, "begin", 1)
    routers.step(0, "end", 1)
    assert routers.rows[0][0] > 40 and routers.leases[0].is_changed
    routers.step(0, "begin", 1)
    routers.step(0, "end", 1)
    assert routers.rows[0] == (40, 40) and not routers.leases[0].is_changed


def test_one_router_alone_holds_nothing_in_advance_and_has_the_whole_limit() -> None:
    assert wanted(100, used=30, recent=50, others=0, n_routers=1) == 30
    lease = Lease(100, n_routers=1, granted=30, used=30)
    assert lease.room == 70
    lease.renew(30, others_granted=60, others_used=60, now_unix_s=0)
    assert lease.room == 10  # what it used before it was started again counts


@pytest.mark.parametrize(("n_routers", "limit", "expected"), [(1, 60, 60), (2, 60, 7), (8, 60, 1), (4, 2, 1)])
def test_the_overdraft_is_a_quarter_for_all_routers_together(
    n_routers: int, limit: int, expected: int
) -> None:
    assert overdraft(limit, n_routers) == expected


@pytest.mark.parametrize(("recent", "expected"), [(0, 100), (5, 200), (80, 260), (500, 900)])
def test_a_router_asks_for_twice_its_use_and_at_least_its_part_of_half_of_what_is_free(
    recent: int, expected: int
) -> None:
    assert wanted(1000, used=100, recent=recent, others=100, n_routers=4) == expected


@pytest.mark.parametrize(("others", "free"), [(60, 10), (69, 1), (70, 0), (90, 0)])
def test_what_no_router_holds_is_free_and_worth_a_renewal(others: int, free: int) -> None:
    lease = Lease(100, n_routers=2, granted=30, used=30, others_granted=others)
    assert (lease.free, lease.is_low) == (free, free > 0)
    assert not Lease(100, n_routers=2, granted=31, used=30, others_granted=others).is_low
