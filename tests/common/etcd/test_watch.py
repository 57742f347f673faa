"""The watch against a real etcd that is killed, compacted, partitioned, stalled, stopped and wiped.

Each test runs a reader that folds all updates, and changes keys while the reader is disconnected.
The reader must end with exactly the keys of etcd. Without compaction it must also see every change
once and in order.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from libs.common.etcd import channel as etcd_channel
from libs.common.etcd import watch
from libs.common.etcd.client import EtcdClient
from libs.common.etcd.lease import LeaseSession
from libs.common.etcd.messages import (
    EtcdUnavailable,
    KeyValue,
    PrefixChanges,
    PrefixSnapshot,
    fold,
)
from libs.common.etcd.watch import watch_prefix
from tests.support.network.fault_proxy import FaultProxy
from tests.support.processes.etcd_process import EtcdProcess
from tests.support.processes.process_checks import eventually

PREFIX = "/watched/"


class Reader:
    """Folds a watch into a dict and records the changes and snapshots."""

    def __init__(self, client: EtcdClient) -> None:
        self.entries: dict[str, KeyValue] = {}
        self.changes: list[tuple[str, bytes | None]] = []
        self.snapshots = 0
        self._client = client
        self._moved = asyncio.Condition()
        self._task = asyncio.create_task(self._read())

    async def _read(self) -> None:
        async with aclosing(watch_prefix(self._client, PREFIX)) as updates:
            async for update in updates:
                async with self._moved:
                    self.entries = fold(self.entries, update)
                    if isinstance(update, PrefixSnapshot):
                        self.snapshots += 1
                    else:
                        for key, kv in update.changes:
                            self.changes.append((key[len(PREFIX) :], kv.value if kv else None))
                    self._moved.notify_all()

    async def until(self, condition: Callable[[Reader], bool], *, timeout_s: float = 60) -> None:
        async with asyncio.timeout(timeout_s), self._moved:
            await self._moved.wait_for(lambda: condition(self))

    def values(self) -> dict[str, bytes]:
        return {key[len(PREFIX) :]: kv.value for key, kv in self.entries.items()}

    async def close(self) -> None:
        assert not self._task.done(), "the watch must never end by itself"
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)


@asynccontextmanager
async def reading(endpoint: str) -> AsyncIterator[Reader]:
    client = EtcdClient([endpoint], timeout_s=2)
    reader = Reader(client)
    try:
        await reader.until(lambda r: r.snapshots == 1)
        yield reader
    finally:
        await reader.close()
        await client.close()


@asynccontextmanager
async def writing(etcd: EtcdProcess) -> AsyncIterator[EtcdClient]:
    client = EtcdClient([etcd.endpoint], timeout_s=60)
    try:
        yield client
    finally:
        await client.close()


@pytest.fixture
def etcd(tmp_path: Path) -> Iterator[EtcdProcess]:
    with EtcdProcess(tmp_path / "etcd") as process:
        yield process


async def test_a_long_response_comes_in_parts(etcd: EtcdProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    """After an outage etcd sends many revisions together: more than a message may be."""
    lengths: list[int] = []
    messages = watch._messages

    async def noted(*given: Any) -> AsyncIterator[Any]:
        async for message in messages(*given):
            lengths.append(message.ByteSize())
            yield message

    monkeypatch.setattr(watch, "_messages", noted)
    values = [bytes([number]) * 300_000 for number in range(20)]
    async with writing(etcd) as writer, writing(etcd) as client:
        before = (await client.get_prefix(PREFIX)).revision
        for number, value in enumerate(values):
            await writer.put(f"{PREFIX}{number}", value)

        async def stale_prefix(_: str) -> PrefixSnapshot:
            return PrefixSnapshot(before, {})

        monkeypatch.setattr(client, "get_prefix", stale_prefix)
        async with aclosing(watch_prefix(client, PREFIX)) as updates, asyncio.timeout(60):
            assert isinstance(await anext(updates), PrefixSnapshot)
            found: list[tuple[str, bytes]] = []
            while len(found) < len(values):
                update = await anext(updates)
                assert isinstance(update, PrefixChanges)
                found += [(key, kv.value) for key, kv in update.changes if kv is not None]
    assert found == [(f"{PREFIX}{number}", value) for number, value in enumerate(values)]
    assert max(lengths) < 4 << 20 < sum(lengths)


async def test_changes_arrive_once_and_in_order(etcd: EtcdProcess) -> None:
    async with writing(etcd) as writer, reading(etcd.endpoint) as reader:
        for i in range(20):
            await writer.put(f"{PREFIX}a", str(i).encode())
        await writer.delete(f"{PREFIX}a")
        await writer.put("/elsewhere", b"x")
        await writer.put(f"{PREFIX}b", b"last")
        await reader.until(lambda r: "b" in r.values())
        assert reader.changes == [("a", str(i).encode()) for i in range(20)] + [("a", None), ("b", b"last")]


async def test_a_watch_loses_no_change_over_a_kill_and_restart_of_etcd(etcd: EtcdProcess) -> None:
    async with writing(etcd) as writer, reading(etcd.endpoint) as reader:
        await writer.put(f"{PREFIX}a", b"before")
        etcd.kill()
        etcd.start()
        await writer.put(f"{PREFIX}a", b"after")
        await writer.put(f"{PREFIX}b", b"new")
        await reader.until(lambda r: "b" in r.values())
        assert reader.changes == [("a", b"before"), ("a", b"after"), ("b", b"new")]
        assert reader.snapshots == 1


async def test_changes_made_during_a_partition_arrive_afterwards(etcd: EtcdProcess) -> None:
    async with FaultProxy(etcd.endpoint) as proxy, writing(etcd) as writer, reading(proxy.endpoint) as reader:
        await writer.put(f"{PREFIX}a", b"1")
        await reader.until(lambda r: "a" in r.values())
        proxy.cut()
        await writer.put(f"{PREFIX}b", b"2")
        await writer.delete(f"{PREFIX}a")
        proxy.restore()
        await reader.until(lambda r: "b" in r.values() and "a" not in r.values())
        assert reader.changes == [("a", b"1"), ("b", b"2"), ("a", None)]


async def test_compaction_during_a_partition_gives_a_new_snapshot(etcd: EtcdProcess) -> None:
    async with FaultProxy(etcd.endpoint) as proxy, writing(etcd) as writer, reading(proxy.endpoint) as reader:
        await writer.put(f"{PREFIX}gone", b"1")
        await reader.until(lambda r: "gone" in r.values())
        proxy.cut()
        await writer.delete(f"{PREFIX}gone")
        for i in range(5):
            revision = await writer.put(f"{PREFIX}k{i}", str(i).encode())
        etcd.ctl("compact", str(revision))
        proxy.restore()
        await reader.until(lambda r: r.snapshots == 2)
        assert reader.values() == {f"k{i}": str(i).encode() for i in range(5)}
        await writer.put(f"{PREFIX}later", b"x")
        await reader.until(lambda r: "later" in r.values())


async def test_a_blackhole_longer_than_the_time_outs_loses_no_change(etcd: EtcdProcess) -> None:
    async with FaultProxy(etcd.endpoint) as proxy, writing(etcd) as writer, reading(proxy.endpoint) as reader:
        known = proxy.accepted
        proxy.blackhole()
        await writer.put(f"{PREFIX}a", b"1")
        # The client gave up its connection, and one that it dialled during the fault.
        await eventually(lambda: proxy.accepted >= known + 2)
        await writer.put(f"{PREFIX}b", b"2")
        assert reader.changes == []
        proxy.restore()
        await reader.until(lambda r: "b" in r.values())
        assert reader.changes == [("a", b"1"), ("b", b"2")]


async def test_a_watch_continues_after_etcd_was_stopped(etcd: EtcdProcess) -> None:
    async with writing(etcd) as writer, reading(etcd.endpoint) as reader:
        etcd.suspend()
        late = asyncio.create_task(writer.put(f"{PREFIX}a", b"1"))
        await asyncio.sleep(1)  # the length of the fault
        assert not late.done()
        etcd.resume()
        await late
        await reader.until(lambda r: "a" in r.values())
        assert reader.changes == [("a", b"1")]


async def test_a_wiped_etcd_gives_a_new_snapshot(etcd: EtcdProcess) -> None:
    async with writing(etcd) as writer, reading(etcd.endpoint) as reader:
        for i in range(5):
            await writer.put(f"{PREFIX}old{i}", b"1")
        await reader.until(lambda r: "old4" in r.values())
        etcd.kill()
        etcd.wipe()
        etcd.start()
        await reader.until(lambda r: r.snapshots >= 2)
        await writer.put(f"{PREFIX}new", b"1")
        await reader.until(lambda r: r.values() == {"new": b"1"})


KEYS = st.sampled_from("abcd")


@given(
    st.dictionaries(KEYS, st.binary(max_size=2)),
    st.lists(st.tuples(KEYS, st.none() | st.binary(max_size=2)), max_size=12),
)
def test_folding_changes_equals_applying_them_to_a_dict(
    start: dict[str, bytes], changes: list[tuple[str, bytes | None]]
) -> None:
    entries = {key: KeyValue(key, value, 1) for key, value in start.items()}
    expected = dict(start)
    for key, value in changes:
        if value is None:
            expected.pop(key, None)
        else:
            expected[key] = value
    update = PrefixChanges(2, tuple((k, None if v is None else KeyValue(k, v, 2)) for k, v in changes))
    assert {key: kv.value for key, kv in fold(entries, update).items()} == expected
    assert {key: kv.value for key, kv in entries.items()} == start


async def test_a_connection_that_the_network_forgot_is_replaced_by_reads_and_the_change_is_repeated(
    etcd: EtcdProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Runs without gRPC's pings: etcd allows too few of them to rely on."""
    pinged = [option for option in etcd_channel.CHANNEL_OPTIONS if option[0] != "grpc.keepalive_time_ms"]
    monkeypatch.setattr(etcd_channel, "CHANNEL_OPTIONS", pinged)
    async with FaultProxy(etcd.endpoint) as proxy, writing(etcd) as writer, reading(proxy.endpoint) as reader:
        client = EtcdClient([proxy.endpoint])
        session = LeaseSession(client, ttl_s=5)
        try:
            session.set("/elsewhere/a", b"1")
            await session.wait_synced(timeout_s=60)
            await writer.put(f"{PREFIX}a", b"1")
            await reader.until(lambda r: "a" in r.values())
            proxy.drop_state()
            await writer.put(f"{PREFIX}b", b"2")
            await reader.until(lambda r: "b" in r.values())
            assert reader.changes == [("a", b"1"), ("b", b"2")]
            session.set("/elsewhere/a", b"2")
            await session.wait_synced(timeout_s=60)
            entry = await writer.get("/elsewhere/a")
            assert entry is not None and entry.value == b"2"
            assert client._connections.n_replaced
        finally:
            await session.close()
            await client.close()


async def test_one_connection_is_replaced_while_etcd_is_unreachable_or_silent(
    etcd: EtcdProcess,
) -> None:
    async with FaultProxy(etcd.endpoint) as proxy:
        client = EtcdClient([proxy.endpoint])
        try:
            await client.put(f"{PREFIX}a", b"1")
            proxy.blackhole()
            connections = client._connections
            async with asyncio.timeout(60):
                while not connections.n_replaced:
                    await asyncio.sleep(0.02)
            with pytest.raises(EtcdUnavailable):
                await client.get(f"{PREFIX}a")
            assert connections.n_replaced == 1
            proxy.restore()
            async with asyncio.timeout(60):
                while not connections.current.has_answered:
                    with contextlib.suppress(EtcdUnavailable):
                        await client.get(f"{PREFIX}a")
            assert connections.n_replaced == 1
        finally:
            await client.close()
