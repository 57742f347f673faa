"""Lease sessions against a real etcd: after every fault the session's keys exist again."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from libs.common.etcd.client import EtcdClient
from libs.common.etcd.lease import LeaseSession
from slipstream.errors import DeadlineExceeded
from tests.common.etcd.conftest import WAIT_S
from tests.support.network.fault_proxy import FaultProxy
from tests.support.processes.etcd_process import EtcdProcess, free_port
from tests.support.processes.process_checks import eventually


@asynccontextmanager
async def connected(endpoint: str, *, timeout_s: float = WAIT_S) -> AsyncIterator[EtcdClient]:
    client = EtcdClient([endpoint], timeout_s=timeout_s)
    try:
        yield client
    finally:
        await client.close()


async def value_becomes(
    client: EtcdClient, key: str, value: bytes | None, *, timeout_s: float = WAIT_S
) -> None:
    async with asyncio.timeout(timeout_s):
        while (entry := await client.get(key)) is None or entry.value != value:
            if entry is None and value is None:
                return
            await asyncio.sleep(0.05)


async def wait_for_lease(session: LeaseSession) -> int:
    """Wait for the session's lease. A slow machine may have lost one and got the next."""
    await eventually(lambda: session.lease_id is not None)
    assert session.lease_id is not None
    return session.lease_id


@pytest.fixture
def etcd(tmp_path: Path) -> Iterator[EtcdProcess]:
    with EtcdProcess(tmp_path / "etcd") as process:
        yield process


async def test_keys_outlive_the_ttl_and_are_removed_when_the_session_closes(client: EtcdClient) -> None:
    # A machine that stalls longer than the TTL loses the lease: retry with a longer one.
    for ttl_s in (1, 3, 9, 27):
        session = LeaseSession(client, ttl_s=ttl_s)
        session.set("/l1/a", b"1")
        await session.wait_synced(timeout_s=WAIT_S)
        lease_id = session.lease_id
        await asyncio.sleep(2.5 * ttl_s)  # longer than the TTL: the test checks that nothing happens
        session.set("/l1/b", b"2")
        await session.wait_synced(timeout_s=WAIT_S)
        if session.lease_id == lease_id:
            break
        await session.close()
    assert session.lease_id == lease_id is not None
    assert session.leases_lost == 0
    assert (await client.get_prefix("/l1/")).entries.keys() == {"/l1/a", "/l1/b"}
    await session.close()
    assert not (await client.get_prefix("/l1/")).entries


async def test_a_revoked_lease_is_replaced_with_its_keys(client: EtcdClient) -> None:
    session = LeaseSession(client, ttl_s=1)
    session.set("/l2/a", b"1")
    await session.wait_synced(timeout_s=WAIT_S)
    lease_id = await wait_for_lease(session)
    before = await client.get("/l2/a")
    assert before is not None and before.lease_id == lease_id
    await client.revoke_lease(lease_id)  # revoking also deletes the key
    async with asyncio.timeout(WAIT_S):
        while (entry := await client.get("/l2/a")) is None or entry.lease_id == lease_id:
            await asyncio.sleep(0.05)
    assert entry.value == b"1"
    assert session.leases_lost >= 1
    await session.close()


async def test_a_blackhole_longer_than_the_ttl_loses_and_restores_the_keys(etcd: EtcdProcess) -> None:
    async with (
        FaultProxy(etcd.endpoint) as proxy,
        connected(proxy.endpoint, timeout_s=2) as client,
        connected(etcd.endpoint) as direct,
    ):
        session = LeaseSession(client, ttl_s=1)
        session.set("/a", b"1")
        await session.wait_synced(timeout_s=WAIT_S)
        await eventually(lambda: session.term is not None)
        term = session.term
        proxy.blackhole()
        await value_becomes(direct, "/a", None)
        assert session.term is None  # known without a call to etcd
        session.set("/b", b"2")
        with pytest.raises(DeadlineExceeded):
            await session.wait_synced(timeout_s=0.2)
        proxy.restore()
        await value_becomes(direct, "/a", b"1")
        await value_becomes(direct, "/b", b"2")
        await session.wait_synced(timeout_s=WAIT_S)
        await eventually(lambda: session.term not in (None, term))
        await session.close()
        assert not (await direct.get_prefix("/")).entries


async def test_keys_are_restored_after_a_kill_and_after_loss_of_all_data(etcd: EtcdProcess) -> None:
    async with connected(etcd.endpoint) as client:
        session = LeaseSession(client, ttl_s=2)
        session.set("/a", b"1")
        await session.wait_synced(timeout_s=WAIT_S)
        etcd.kill()
        etcd.start()
        await value_becomes(client, "/a", b"1")
        etcd.kill()
        etcd.wipe()
        etcd.start()
        await value_becomes(client, "/a", b"1")
        assert session.leases_lost >= 1
        await session.close()


async def test_keys_are_restored_after_etcd_was_stopped_for_longer_than_the_ttl(etcd: EtcdProcess) -> None:
    async with connected(etcd.endpoint) as client:
        session = LeaseSession(client, ttl_s=1)
        session.set("/a", b"1")
        await session.wait_synced(timeout_s=WAIT_S)
        etcd.suspend()
        await asyncio.sleep(2.5)  # the fault lasts longer than the TTL
        etcd.resume()
        session.set("/b", b"2")
        await session.wait_synced(timeout_s=WAIT_S)
        await value_becomes(client, "/a", b"1")
        await value_becomes(client, "/b", b"2")
        await session.close()


async def test_a_session_started_without_etcd_registers_when_etcd_starts(tmp_path: Path) -> None:
    etcd = EtcdProcess(tmp_path / "etcd")
    async with connected(etcd.endpoint) as client:
        session = LeaseSession(client, ttl_s=2)
        session.set("/a", b"1")
        with pytest.raises(DeadlineExceeded):
            await session.wait_synced(timeout_s=0.3)
        with etcd:
            await session.wait_synced(timeout_s=WAIT_S)
            await value_becomes(client, "/a", b"1")
            await session.close()


async def test_a_key_of_a_newer_owner_is_not_overwritten(client: EtcdClient) -> None:
    def newer(existing: bytes, mine: bytes) -> bool:
        return mine >= existing

    old = LeaseSession(client, ttl_s=1, may_replace=newer)
    old.set("/l3/a", b"1")
    await old.wait_synced(timeout_s=WAIT_S)
    new = LeaseSession(client, ttl_s=60, may_replace=newer)
    new.set("/l3/a", b"2")
    await new.wait_synced(timeout_s=WAIT_S)
    await client.revoke_lease(await wait_for_lease(old))
    await eventually(lambda: old.displaced_keys)
    await value_becomes(client, "/l3/a", b"2")
    await old.close()
    await value_becomes(client, "/l3/a", b"2")
    await new.close()


async def test_the_last_session_to_register_owns_the_key_even_with_an_older_clock(client: EtcdClient) -> None:
    """The new session's clock was set back: its value is lower, and it still acquires the key."""
    old = LeaseSession(client, ttl_s=1, may_replace=lambda existing, mine: existing == mine)
    old.set("/l5/a", b"later")
    await old.wait_synced(timeout_s=WAIT_S)
    new = LeaseSession(client, ttl_s=60, may_replace=lambda existing, mine: existing == mine)
    new.set("/l5/a", b"earlier")
    await new.wait_synced(timeout_s=WAIT_S)
    assert not new.displaced_keys
    await client.revoke_lease(await wait_for_lease(old))
    await eventually(lambda: old.displaced_keys)
    await value_becomes(client, "/l5/a", b"earlier")
    await new.close()
    await old.close()


async def test_closing_a_session_without_etcd_ends_in_bounded_time() -> None:
    async with connected(f"127.0.0.1:{free_port()}") as client:
        session = LeaseSession(client, ttl_s=1)
        session.set("/a", b"1")
        async with asyncio.timeout(WAIT_S):
            await session.close()
