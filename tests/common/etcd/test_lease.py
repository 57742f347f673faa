"""Lease sessions against a real etcd: whatever happened to it, our keys are there again afterwards."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from libs.common.errors import DeadlineExceeded
from libs.common.etcd.client import EtcdClient
from libs.common.etcd.lease import LeaseSession
from tests.support.etcd_process import EtcdProcess, free_port
from tests.support.fault_proxy import FaultProxy


@asynccontextmanager
async def connected(endpoint: str) -> AsyncIterator[EtcdClient]:
    client = EtcdClient([endpoint], timeout_s=2)
    try:
        yield client
    finally:
        await client.close()


async def value_becomes(client: EtcdClient, key: str, value: bytes | None, *, timeout_s: float = 15) -> None:
    async with asyncio.timeout(timeout_s):
        while (entry := await client.get(key)) is None or entry.value != value:
            if entry is None and value is None:
                return
            await asyncio.sleep(0.05)


@pytest.fixture
def etcd(tmp_path: Path) -> Iterator[EtcdProcess]:
    with EtcdProcess(tmp_path / "etcd") as process:
        yield process


async def test_keys_outlive_the_ttl_and_go_with_the_session(client: EtcdClient) -> None:
    session = LeaseSession(client, ttl_s=1)
    session.set("/l1/a", b"1")
    await session.wait_synced(timeout_s=5)
    lease_id = session.lease_id
    await asyncio.sleep(2.5)  # longer than the TTL: that nothing happens is what is tested
    session.set("/l1/b", b"2")
    await session.wait_synced(timeout_s=5)
    assert session.lease_id == lease_id
    assert session.leases_lost == 0
    assert (await client.get_prefix("/l1/")).entries.keys() == {"/l1/a", "/l1/b"}
    session.unset("/l1/b")
    await session.wait_synced(timeout_s=5)
    assert (await client.get_prefix("/l1/")).entries.keys() == {"/l1/a"}
    await session.close()
    assert not (await client.get_prefix("/l1/")).entries


async def test_a_revoked_lease_is_replaced_with_its_keys(client: EtcdClient) -> None:
    session = LeaseSession(client, ttl_s=1)
    session.set("/l2/a", b"1")
    await session.wait_synced(timeout_s=5)
    lease_id = session.lease_id
    assert lease_id is not None
    await client.revoke_lease(lease_id)
    assert await client.get("/l2/a") is None
    await value_becomes(client, "/l2/a", b"1")
    assert session.leases_lost == 1
    await session.close()


async def test_a_blackhole_longer_than_the_ttl_loses_and_restores_the_keys(etcd: EtcdProcess) -> None:
    async with (
        FaultProxy(etcd.endpoint) as proxy,
        connected(proxy.endpoint) as client,
        connected(etcd.endpoint) as direct,
    ):
        session = LeaseSession(client, ttl_s=1)
        session.set("/a", b"1")
        await session.wait_synced(timeout_s=5)
        term = session.term
        assert term is not None
        proxy.blackhole()
        await value_becomes(direct, "/a", None)
        assert session.term is None  # known without asking anybody
        session.set("/b", b"2")
        with pytest.raises(DeadlineExceeded):
            await session.wait_synced(timeout_s=0.2)
        proxy.restore()
        await value_becomes(direct, "/a", b"1")
        await value_becomes(direct, "/b", b"2")
        await session.wait_synced(timeout_s=5)
        assert session.term not in (None, term)
        await session.close()
        assert not (await direct.get_prefix("/")).entries


async def test_keys_are_there_after_kill_and_after_loss_of_all_data(etcd: EtcdProcess) -> None:
    async with connected(etcd.endpoint) as client:
        session = LeaseSession(client, ttl_s=2)
        session.set("/a", b"1")
        await session.wait_synced(timeout_s=5)
        etcd.kill()
        etcd.start()
        await value_becomes(client, "/a", b"1")
        etcd.kill()
        etcd.wipe()
        etcd.start()
        await value_becomes(client, "/a", b"1")
        assert session.leases_lost >= 1
        await session.close()


async def test_keys_are_there_after_etcd_was_stopped_for_longer_than_the_ttl(etcd: EtcdProcess) -> None:
    async with connected(etcd.endpoint) as client:
        session = LeaseSession(client, ttl_s=1)
        session.set("/a", b"1")
        await session.wait_synced(timeout_s=5)
        etcd.suspend()
        await asyncio.sleep(2.5)  # the length of the fault is what is tested
        etcd.resume()
        session.set("/b", b"2")
        await session.wait_synced(timeout_s=10)
        await value_becomes(client, "/a", b"1")
        await value_becomes(client, "/b", b"2")
        await session.close()


async def test_a_session_started_without_etcd_registers_when_it_comes(tmp_path: Path) -> None:
    etcd = EtcdProcess(tmp_path / "etcd")
    async with connected(etcd.endpoint) as client:
        session = LeaseSession(client, ttl_s=2)
        session.set("/a", b"1")
        with pytest.raises(DeadlineExceeded):
            await session.wait_synced(timeout_s=0.3)
        with etcd:
            await session.wait_synced(timeout_s=15)
            await value_becomes(client, "/a", b"1")
            await session.close()


async def test_a_newer_owner_is_not_displaced(client: EtcdClient) -> None:
    def newer(existing: bytes, mine: bytes) -> bool:
        return mine >= existing

    old = LeaseSession(client, ttl_s=1, may_replace=newer)
    old.set("/l3/a", b"1")
    await old.wait_synced(timeout_s=5)
    new = LeaseSession(client, ttl_s=1, may_replace=newer)
    new.set("/l3/a", b"2")
    await new.wait_synced(timeout_s=5)
    assert old.lease_id is not None
    await client.revoke_lease(old.lease_id)
    async with asyncio.timeout(5):
        while not old.displaced_keys:
            await asyncio.sleep(0.05)
    await value_becomes(client, "/l3/a", b"2")
    await old.close()
    await value_becomes(client, "/l3/a", b"2")
    await new.close()


async def test_who_announces_last_owns_the_key_whatever_a_clock_says(client: EtcdClient) -> None:
    """The new run's clock was set back: its value is the lower one, and it takes the key all the same."""
    old = LeaseSession(client, ttl_s=1, may_replace=lambda existing, mine: existing == mine)
    old.set("/l5/a", b"later")
    await old.wait_synced(timeout_s=5)
    new = LeaseSession(client, ttl_s=1, may_replace=lambda existing, mine: existing == mine)
    new.set("/l5/a", b"earlier")
    await new.wait_synced(timeout_s=5)
    assert not new.displaced_keys
    assert old.lease_id is not None
    await client.revoke_lease(old.lease_id)
    async with asyncio.timeout(5):
        while not old.displaced_keys:
            await asyncio.sleep(0.05)
    await value_becomes(client, "/l5/a", b"earlier")
    await new.close()
    await old.close()


async def test_closing_without_etcd_is_bounded() -> None:
    async with connected(f"127.0.0.1:{free_port()}") as client:
        session = LeaseSession(client, ttl_s=1)
        session.set("/a", b"1")
        async with asyncio.timeout(3):
            await session.close()
