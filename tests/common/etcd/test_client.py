from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from libs.common.etcd import client as client_module
from libs.common.etcd.channel import channel_target
from libs.common.etcd.client import EtcdClient, prefix_end
from libs.common.etcd.messages import ABSENT, EtcdUnavailable, LeaseNotFound, Swap
from slipstream.errors import InvalidArgument, Unauthenticated
from tests.support.network.fault_proxy import FaultProxy
from tests.support.processes.etcd_process import EtcdProcess, free_port


@given(st.text(min_size=1), st.text())
def test_a_prefix_range_covers_exactly_the_keys_with_the_prefix(prefix: str, other: str) -> None:
    start, end = prefix.encode(), prefix_end(prefix)

    def inside(key: bytes) -> bool:
        return start <= key and (end == b"\0" or key < end)

    assert inside((prefix + other).encode())
    assert inside(other.encode()) == other.encode().startswith(start)


def test_endpoints_become_channel_targets() -> None:
    assert channel_target(["127.0.0.1:2379"]) == "ipv4:127.0.0.1:2379"
    assert channel_target(["10.0.0.1:1", "10.0.0.2:2"]) == "ipv4:10.0.0.1:1,10.0.0.2:2"
    assert channel_target(["[::1]:2379"]) == "ipv6:[::1]:2379"
    assert channel_target(["etcd.svc:2379"]) == "dns:///etcd.svc:2379"
    for bad in ([], ["nonsense"], ["a.example:1", "b.example:1"], ["127.0.0.1:1", "[::1]:1"]):
        with pytest.raises(InvalidArgument):
            channel_target(bad)


async def test_put_get_delete_and_prefix_at_one_revision(client: EtcdClient) -> None:
    first = await client.put("/t1/a", b"1")
    second = await client.put("/t1/b", b"\x00\xff")
    await client.put("/t1x", b"outside")
    entry = await client.get("/t1/a")
    assert entry is not None
    assert (entry.value, entry.mod_revision) == (b"1", first)
    snapshot = await client.get_prefix("/t1/")
    assert {key: kv.value for key, kv in snapshot.entries.items()} == {"/t1/a": b"1", "/t1/b": b"\x00\xff"}
    assert snapshot.revision >= second > first
    assert await client.delete("/t1/a")
    assert not await client.delete("/t1/a")
    assert await client.get("/t1/a") is None


async def test_a_long_prefix_is_read_in_pages_of_one_revision(
    client: EtcdClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In one answer, 100,000 sessions exceed what a channel receives, and what an attempt may take."""
    monkeypatch.setattr(client_module, "_PIECE_KEYS", 3)
    for number in range(10):
        await client.put(f"/t9/{number}", b"old")
    read, sizes = client._read, list[int]()

    async def read_and_write(method: str, request: Any, kind: Any) -> Any:
        response = await read(method, request, kind)
        sizes.append(len(response.kvs))
        await client.put(f"/t9/{9 - len(sizes)}", b"new")
        return response

    monkeypatch.setattr(client, "_read", read_and_write)
    snapshot = await client.get_prefix("/t9/")
    assert sizes == [3, 3, 3, 1]
    assert {key: kv.value for key, kv in snapshot.entries.items()} == {f"/t9/{n}": b"old" for n in range(10)}
    assert max(kv.mod_revision for kv in snapshot.entries.values()) == snapshot.revision
    assert (await client.get_prefix("/t9/nothing")).entries == {}


async def test_a_swap_is_atomic(client: EtcdClient) -> None:
    made = await client.swap([Swap("/t2/a", b"1", ABSENT), Swap("/t2/b", b"1", ABSENT)])
    assert made.succeeded
    changed = await client.put("/t2/b", b"2")
    refused = await client.swap([Swap("/t2/a", b"9", made.revision), Swap("/t2/b", b"9", made.revision)])
    assert not refused.succeeded
    current = [kv and (kv.value, kv.mod_revision) for kv in refused.current]
    assert current == [(b"1", made.revision), (b"2", changed)]
    deleted = await client.swap([Swap("/t2/a", None, made.revision)])
    assert deleted.succeeded
    assert await client.get("/t2/a") is None


async def test_concurrent_swaps_have_one_winner(client: EtcdClient) -> None:
    outcomes = await asyncio.gather(
        *(client.swap([Swap("/t3/a", str(i).encode(), ABSENT)]) for i in range(8))
    )
    winners = [i for i, outcome in enumerate(outcomes) if outcome.succeeded]
    assert len(winners) == 1
    entry = await client.get("/t3/a")
    assert entry is not None
    assert entry.value == str(winners[0]).encode()


async def test_keys_of_a_lease_exist_until_it_is_revoked(client: EtcdClient) -> None:
    lease = await client.grant_lease(60)
    await client.put("/t4/a", b"1", lease_id=lease.lease_id)
    assert await client.renew_lease(lease.lease_id) == lease.ttl_s
    await client.revoke_lease(lease.lease_id)
    assert await client.get("/t4/a") is None
    await client.revoke_lease(lease.lease_id)
    with pytest.raises(LeaseNotFound):
        await client.renew_lease(lease.lease_id)
    with pytest.raises(LeaseNotFound):
        await client.put("/t4/a", b"1", lease_id=lease.lease_id)


async def test_every_call_fails_with_a_typed_error_in_time_without_etcd() -> None:
    client = EtcdClient([f"127.0.0.1:{free_port()}"], timeout_s=0.3)
    try:
        async with asyncio.timeout(60):
            for call in (client.get("/a"), client.put("/a", b""), client.renew_lease(1)):
                with pytest.raises(EtcdUnavailable):
                    await call
    finally:
        await client.close()


async def test_a_read_is_retried_over_a_short_partition(shared_etcd: EtcdProcess) -> None:
    async with FaultProxy(shared_etcd.endpoint) as proxy:
        client = EtcdClient([proxy.endpoint], timeout_s=60)
        try:
            await client.put("/t5/a", b"1")
            proxy.cut()
            read = asyncio.create_task(client.get("/t5/a"))
            refused = proxy.accepted
            async with asyncio.timeout(60):
                while proxy.accepted == refused:
                    await asyncio.sleep(0.02)
            proxy.restore()
            entry = await read
            assert entry is not None
            assert entry.value == b"1"
        finally:
            await client.close()


async def test_an_expired_token_is_renewed(tmp_path: Path) -> None:
    with EtcdProcess(tmp_path / "etcd", "--auth-token-ttl=1") as etcd:
        etcd.ctl("user", "add", "root:secret")
        etcd.ctl("user", "grant-role", "root", "root")
        etcd.ctl("auth", "enable")
        client = EtcdClient([etcd.endpoint], user="root", password=lambda: "secret", timeout_s=60)
        stranger = EtcdClient([etcd.endpoint], user="root", password=lambda: "wrong", timeout_s=60)
        try:
            await client.put("/a", b"1")
            first_token = await client.metadata()
            # etcd drops unused tokens after their TTL; call until it refuses the old one.
            async with asyncio.timeout(60):
                while await client.metadata() == first_token:
                    await asyncio.sleep(2.2)
                    await client.put("/a", b"2")
            with pytest.raises(Unauthenticated):
                await stranger.get("/a")
        finally:
            await client.close()
            await stranger.close()
