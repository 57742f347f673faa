"""A tenant's share of the text and of the messages that a router holds."""

from __future__ import annotations

import asyncio
import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.router.admission.tenant_shares import ReceiveSlots, TenantSlots, TextShares
from slipstream.errors import Overloaded

WAIT_S = 60.0


def test_a_tenant_at_its_share_leaves_room_to_another() -> None:
    shares = TextShares(most_chars=100, most_tenant_chars=60)
    shares.acquire("a", 60)
    with pytest.raises(Overloaded):
        shares.acquire("a", 1)
    shares.acquire("b", 40)
    with pytest.raises(Overloaded):
        shares.acquire("b", 1)  # the whole is taken
    shares.release("a", 60)
    shares.acquire("b", 20)


def test_a_share_is_held_inside_and_given_back_after_a_failure() -> None:
    shares = TextShares(most_chars=100, most_tenant_chars=60)
    with contextlib.suppress(KeyError), shares.holding("a", 40):
        with pytest.raises(Overloaded), shares.holding("a", 21):
            raise AssertionError("a refused share runs nothing")
        raise KeyError
    assert shares.held_chars == 0
    shares.acquire("a", 60)


def test_jobs_leave_half_of_each_share_to_live_requests() -> None:
    shares = TextShares(most_chars=100, most_tenant_chars=60)
    shares.acquire("a", 30, is_job=True)
    with pytest.raises(Overloaded):
        shares.acquire("a", 1, is_job=True)
    shares.acquire("b", 20, is_job=True)
    with pytest.raises(Overloaded):
        shares.acquire("c", 1, is_job=True)
    shares.acquire("a", 30)
    shares.acquire("c", 20)
    assert shares.held_chars == 100


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 50))))
def test_shares_return_to_nothing_and_never_exceed_their_bounds(takes: list[tuple[str, int]]) -> None:
    shares, held = TextShares(most_chars=100, most_tenant_chars=60), []
    for tenant, chars in takes:
        with contextlib.suppress(Overloaded):
            shares.acquire(tenant, chars)
            held.append((tenant, chars))
        assert shares.held_chars == sum(chars for _, chars in held) <= 100
        assert all(sum(n for name, n in held if name == tenant) <= 60 for tenant in "abc")
    for tenant, chars in held:
        shares.release(tenant, chars)
    assert not shares.held_chars and not shares._held


async def test_a_tenant_that_receives_slowly_delays_only_itself() -> None:
    slots, ends = ReceiveSlots(most=8, most_tenant=2), asyncio.Event()

    async def receive(tenant: str) -> None:
        async with slots.receiving(tenant):
            await ends.wait()

    slow = [asyncio.create_task(receive("a")) for _ in range(5)]
    async with asyncio.timeout(WAIT_S):
        while slots._of_tenants._users["a"] < 5:
            await asyncio.sleep(0)
        async with slots.receiving("b"):
            assert slots._of_tenants._tenants["a"].locked() and not slots._all.locked()
        ends.set()
        await asyncio.gather(*slow)
    assert not slots._of_tenants._users and not slots._of_tenants._tenants


async def test_a_message_without_room_in_time_is_refused_and_holds_nothing() -> None:
    slots = ReceiveSlots(most=1, most_tenant=1, wait_s=0.05)
    async with slots.receiving("a"):
        for tenant in ("a", "b"):
            with pytest.raises(Overloaded):
                async with slots.receiving(tenant):
                    pass
    async with slots.receiving("b"):
        pass
    assert not slots._of_tenants._users and not slots._of_tenants._tenants


async def test_a_turn_that_does_not_come_in_time_is_refused_and_holds_nothing() -> None:
    slots, held = TenantSlots(1, wait_s=0.01), asyncio.Event()

    async def hold() -> None:
        async with slots.slot("a"):
            await held.wait()

    holding = asyncio.create_task(hold())
    await asyncio.sleep(0)
    async with asyncio.timeout(WAIT_S):
        with pytest.raises(Overloaded):
            async with slots.slot("a"):
                pass
        async with slots.slot("b"):
            pass
        held.set()
        await holding
        async with slots.slot("a"):
            pass
    assert not slots._tenants and not slots._users


async def test_a_tenant_whose_messages_do_not_arrive_takes_a_bounded_number_of_calls() -> None:
    slots, ends = ReceiveSlots(most=8, most_tenant=1, most_tenant_calls=3), asyncio.Event()

    async def receive(tenant: str) -> None:
        async with slots.receiving(tenant):
            await ends.wait()

    waiting = [asyncio.create_task(receive("a")) for _ in range(3)]
    async with asyncio.timeout(WAIT_S):
        while slots._of_tenants._users["a"] < 3:
            await asyncio.sleep(0)
        with pytest.raises(Overloaded):
            async with slots.receiving("a"):
                pytest.fail("there is no room")
        async with slots.receiving("b"):
            ends.set()
        await asyncio.gather(*waiting)
    assert not slots._of_tenants._users
