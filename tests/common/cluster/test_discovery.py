from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st

from libs.common.cluster import worker_record
from libs.common.cluster.discovery import (
    SNAPSHOT_INTERVAL_S,
    Discovery,
    EtcdDiscovery,
    Fleet,
    InMemoryDiscovery,
)
from libs.common.cluster.worker_record import (
    FleetSnapshot,
    FleetState,
    Role,
    Worker,
    decode_worker,
    encode_worker,
    may_replace,
)
from libs.common.etcd.client import EtcdClient
from slipstream.errors import DeadlineExceeded
from slipstream.etcd.v3 import etcd_pb2
from tests.support.network.fault_proxy import FaultProxy
from tests.support.processes.etcd_process import EtcdProcess
from tests.support.processes.process_checks import eventually

WAIT_S = 60.0

WORKERS = st.builds(
    Worker,
    role=st.sampled_from(Role),
    instance=st.from_regex(r"[A-Za-z0-9._-]{1,20}", fullmatch=True),
    endpoint=st.from_regex(r"([a-z0-9._-]{1,20}|\[::1\]):[0-9]{1,4}", fullmatch=True),
    incarnation=st.from_regex(r"[!-~]{0,20}", fullmatch=True),
    fingerprint=st.binary(max_size=16),
    capacity=st.dictionaries(
        st.from_regex("[a-z0-9_]{1,10}", fullmatch=True), st.integers(1, 2**40), max_size=3
    ),
)


def decode(number: int, *, start: int = 1) -> Worker:
    return Worker(Role.DECODE, f"decode-{number}", f"127.0.0.1:{9000 + number}", f"{start:016x}", b"\1" * 16)


@given(WORKERS, st.booleans())
def test_worker_records_round_trip(worker: Worker, leaving: bool) -> None:
    record = decode_worker(worker.key, encode_worker(worker, leaving=leaving))
    assert (record.worker, record.leaving) == (worker, leaving)


@given(st.binary(max_size=40) | st.sampled_from([b"[]", b"{}", b"1", b'{"capacity":1}', b"[" * 9999]))
def test_a_malformed_worker_record_raises_value_error(value: bytes) -> None:
    with pytest.raises(ValueError):
        decode_worker("/slipstream/v1/workers/decode/d", value)
    assert may_replace(value, encode_worker(decode(0)))


_RECORD = b'{"endpoint":"h:1","incarnation":"%s","fingerprint":"","capacity":{%s}}'
HOSTILE_RECORDS = {
    "infinite": b'{"endpoint":"h:1","incarnation":"i","fingerprint":"","capacity":{"kv_blocks":1e999}}',
    "too large": b'{"endpoint":"h:1","incarnation":"i","fingerprint":"","capacity":{"max_batch":1%s}}'
    % (b"0" * 400),
    "negative": b'{"endpoint":"h:1","incarnation":"i","fingerprint":"","capacity":{"max_batch":-1}}',
    "no tokens": b'{"endpoint":"h:1","incarnation":"i","fingerprint":"","capacity":{"block_tokens":0}}',
    "surrogate": b'{"endpoint":"\\ud800:1","incarnation":"i","fingerprint":"","capacity":{}}',
    "port": b'{"endpoint":"h:70000","incarnation":"i","fingerprint":"","capacity":{}}',
    "scheme": b'{"endpoint":"unix:///s","incarnation":"i","fingerprint":"","capacity":{}}',
    "name of a capacity": _RECORD % (b"i", b'"\\ud800":1'),
    "markup": _RECORD % (b'i","admin":"[/x]', b""),
    "page": _RECORD % (b'i","admin_http":"evil.test/a?', b""),
    "capacities": _RECORD % (b"i", b",".join(b'"c%d":1' % number for number in range(33))),
    "control": b'{"endpoint":"h:1","incarnation":"\\u001b[2J","fingerprint":"","capacity":{}}',
}


@pytest.mark.parametrize("record", HOSTILE_RECORDS.values(), ids=HOSTILE_RECORDS)
def test_a_record_that_no_reader_could_use_raises_value_error(record: bytes) -> None:
    with pytest.raises(ValueError):
        decode_worker("/slipstream/v1/workers/decode/d", record)


@given(st.integers(0, 2**60), st.integers(0, 2**60))
def test_an_earlier_incarnation_does_not_overwrite_the_record_of_a_later_one(first: int, second: int) -> None:
    """The order of registration decides; incarnations hold wall-clock times, which can go back."""
    existing, mine = encode_worker(decode(0, start=first)), encode_worker(decode(0, start=second))
    assert may_replace(existing, mine) == (second == first)
    assert may_replace(encode_worker(decode(0, start=first), leaving=True), mine)


def test_a_lost_worker_is_suspect_before_its_removal() -> None:
    state = FleetState(hold_s=10)
    for worker in (decode(0), decode(1)):
        state.put(worker.key, encode_worker(worker))
    state.mark_suspect(decode(0).key, now_s=100)
    state.mark_suspect(decode(1).key, now_s=100)
    assert state.snapshot() == FleetSnapshot.of(
        [decode(0), decode(1)], suspects=[decode(0).key, decode(1).key]
    )
    state.put(decode(1).key, encode_worker(decode(1)))
    state.expire(now_s=109.9)
    assert state.snapshot() == FleetSnapshot.of([decode(0), decode(1)], suspects=[decode(0).key])
    assert state.next_expiry_s() == 110
    state.expire(now_s=110)
    assert state.snapshot() == FleetSnapshot.of([decode(1)])
    state.put(decode(1).key, encode_worker(decode(1), leaving=True))
    assert state.snapshot() == FleetSnapshot.of([], leaving=[decode(1)])
    state.mark_suspect(decode(1).key, now_s=111)
    assert state.snapshot() == FleetSnapshot()
    assert state.next_expiry_s() is None


def test_a_fleet_has_a_bounded_number_of_records(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_record, "MAX_FLEET_RECORDS", 2)
    state = FleetState(hold_s=10)
    for number in (0, 1, 1):
        state.put(decode(number).key, encode_worker(decode(number)))
    with pytest.raises(ValueError, match="2 workers work already"):
        state.put(decode(2).key, encode_worker(decode(2)))
    state.put(decode(0).key, encode_worker(decode(0), leaving=True))
    state.put(decode(2).key, encode_worker(decode(2)))
    assert state.snapshot() == FleetSnapshot.of([decode(1), decode(2)], leaving=[decode(0)])
    state.put(decode(1).key, encode_worker(decode(1), leaving=True))
    state.mark_suspect(decode(2).key, now_s=0)
    with pytest.raises(ValueError, match="2 workers leave already"):
        state.put(decode(2).key, encode_worker(decode(2), leaving=True))
    state.expire(now_s=10)
    assert not state.snapshot().workers


@pytest.fixture(autouse=True)
def long_timeouts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give slow machines enough time to deregister on close."""
    monkeypatch.setattr("libs.common.cluster.discovery.LEAVE_S", WAIT_S)


@pytest.fixture
def etcd(tmp_path: Path) -> Iterator[EtcdProcess]:
    with EtcdProcess(tmp_path / "etcd") as process:
        yield process


@asynccontextmanager
async def etcd_member(endpoint: str, *, ttl_s: int = 1) -> AsyncIterator[EtcdDiscovery]:
    client = EtcdClient([endpoint], timeout_s=2)
    # The hold time exceeds the test's duration, so only deregistration removes a worker.
    discovery = EtcdDiscovery(client, ttl_s=ttl_s, hold_s=1000)
    try:
        yield discovery
    finally:
        await discovery.close()
        await client.close()


@asynccontextmanager
async def three_members(kind: str, tmp_path: Path) -> AsyncIterator[list[Discovery]]:
    if kind == "memory":
        first = InMemoryDiscovery()
        yield [first, InMemoryDiscovery(first.fleet), InMemoryDiscovery(first.fleet)]
        return
    with EtcdProcess(tmp_path / "etcd") as etcd:
        async with (
            etcd_member(etcd.endpoint) as a,
            etcd_member(etcd.endpoint) as b,
            etcd_member(etcd.endpoint) as c,
        ):
            yield [a, b, c]


@pytest.mark.parametrize("kind", ["memory", "etcd"])
async def test_members_see_each_other_join_change_and_leave(kind: str, tmp_path: Path) -> None:
    async with three_members(kind, tmp_path) as (a, b, watcher), Fleet(watcher) as fleet:
        assert fleet.current == FleetSnapshot()
        a.announce(decode(0))
        b.announce(decode(1))
        await a.wait_announced(timeout_s=WAIT_S)
        both = await fleet.wait_until(lambda f: len(f.workers) == 2, timeout_s=60)
        assert both.with_role(Role.DECODE) == (decode(0), decode(1))
        assert both.with_role(Role.PREFILL) == ()
        restarted = decode(0, start=2)
        a.announce(restarted)
        changed = await fleet.wait_until(lambda f: restarted in f.with_role(Role.DECODE), timeout_s=60)
        await a.withdraw(restarted)
        if kind == "memory":
            assert (await fleet.wait_changed(changed)).workers == (decode(1),)
        await fleet.wait_until(lambda f: f.workers == (decode(1),), timeout_s=WAIT_S)
        await b.close()
        # A drained process runs on, and operators must find it, until it ends.
        await fleet.wait_until(lambda f: f == FleetSnapshot.of([], leaving=[restarted]), timeout_s=WAIT_S)
        a.announce(restarted)
        await fleet.wait_until(lambda f: f == FleetSnapshot.of([restarted]), timeout_s=WAIT_S)
        await a.withdraw(restarted)
        await a.close()
        await fleet.wait_until(lambda f: f == FleetSnapshot(), timeout_s=60)
        with pytest.raises(DeadlineExceeded):
            await fleet.wait_until(lambda f: bool(f.workers), timeout_s=0.05)


async def test_the_fleet_is_unchanged_while_etcd_is_unavailable(etcd: EtcdProcess) -> None:
    async with (
        FaultProxy(etcd.endpoint) as proxy,
        etcd_member(proxy.endpoint) as member,
        etcd_member(etcd.endpoint) as watcher,
        Fleet(watcher) as fleet,
    ):
        member.announce(decode(0))
        await fleet.wait_until(lambda f: f.workers == (decode(0),), timeout_s=60)
        await member.wait_announced(timeout_s=WAIT_S)
        assert not member.has_lost_lease
        assert not watcher.has_lost_lease  # it announced nothing
        # The member is cut off until its lease expires: suspect, but still in the fleet.
        proxy.blackhole()
        await fleet.wait_until(lambda f: bool(f.suspects), timeout_s=60)
        assert fleet.current.workers == (decode(0),)
        await eventually(lambda: member.has_lost_lease)
        proxy.restore()
        await fleet.wait_until(lambda f: not f.suspects, timeout_s=60)
        await eventually(lambda: not member.has_lost_lease)
        # etcd loses all its data and restarts: the fleet is never empty.
        seen: list[FleetSnapshot] = []
        collector = asyncio.create_task(collect(fleet, seen))
        etcd.kill()
        etcd.wipe()
        etcd.start()
        # Only the new etcd has this record.
        watcher.announce(decode(1))
        await fleet.wait_until(lambda f: decode(1) in f.workers and not f.suspects, timeout_s=60)
        collector.cancel()
        assert all(decode(0) in snapshot.workers for snapshot in [*seen, fleet.current])


async def collect(fleet: Fleet, seen: list[FleetSnapshot]) -> None:
    while True:
        seen.append(await fleet.wait_changed(fleet.current))


async def test_a_replaced_incarnation_does_not_register_again(etcd: EtcdProcess) -> None:
    async with (
        FaultProxy(etcd.endpoint) as proxy,
        etcd_member(proxy.endpoint) as old,
        etcd_member(etcd.endpoint, ttl_s=60) as new,  # never cut off
        Fleet(new) as fleet,
    ):
        old.announce(decode(0, start=1))
        await fleet.wait_until(lambda f: f.workers == (decode(0, start=1),), timeout_s=60)
        proxy.blackhole()
        await fleet.wait_until(lambda f: bool(f.suspects), timeout_s=60)
        new.announce(decode(0, start=2))
        await fleet.wait_until(lambda f: f.workers == (decode(0, start=2),), timeout_s=60)
        proxy.restore()
        await eventually(lambda: old.displaced_keys)
        assert fleet.current.workers == (decode(0, start=2),)
        await new.withdraw(decode(0, start=2))
        await fleet.wait_until(lambda f: f.workers == (decode(0, start=1),), timeout_s=60)


async def test_malformed_worker_records_are_ignored(etcd: EtcdProcess) -> None:
    client = EtcdClient([etcd.endpoint])
    await client.put("/slipstream/v1/workers/decode/bad", b"\xff")
    await client.put("/slipstream/v1/workers/emperor/x", encode_worker(decode(1)))
    async with etcd_member(etcd.endpoint) as member, Fleet(member) as fleet:
        member.announce(decode(0))
        await fleet.wait_until(lambda f: f.workers == (decode(0),), timeout_s=60)
    await client.close()


async def test_hostile_worker_records_do_not_end_the_watch(etcd: EtcdProcess) -> None:
    """Before the watch begins, in its snapshot, and after that, in its changes."""
    client = EtcdClient([etcd.endpoint])
    await put_raw(etcd.endpoint, b"/slipstream/v1/workers/decode/\xff", b"{}")
    await client.put("/slipstream/v1/workers/decode/early", HOSTILE_RECORDS["infinite"])
    async with etcd_member(etcd.endpoint) as member, Fleet(member) as fleet:
        await fleet.wait_snapshot()
        await put_raw(etcd.endpoint, b"/slipstream/v1/workers/decode/\xfe", b"{}")
        await client.put("/slipstream/v1/workers/decode/late", HOSTILE_RECORDS["infinite"])
        member.announce(decode(0))
        await fleet.wait_until(lambda f: f.workers == (decode(0),), timeout_s=60)
    await client.close()


@pytest.mark.parametrize("n_keys", [1, 200])
async def test_a_flood_of_records_brings_few_snapshots(etcd: EtcdProcess, n_keys: int) -> None:
    """A snapshot of the fleet per change would cost the loop more than the changes that come meanwhile."""
    client = EtcdClient([etcd.endpoint])
    seen: list[FleetSnapshot] = []
    before_flood, is_seen, n_puts = asyncio.Event(), asyncio.Event(), 0

    async def flood(writer: int) -> None:
        nonlocal n_puts
        while n_puts < 2000 or not is_seen.is_set():
            n_puts += 1
            worker = decode(100 + n_puts % n_keys, start=n_puts)
            await client.put(worker.key, encode_worker(worker))
            if writer == 0:
                before_flood.set()

    async with etcd_member(etcd.endpoint, ttl_s=60) as member:
        started_s = time.monotonic()
        async with Fleet(member) as fleet:
            await fleet.wait_snapshot()
            collector = asyncio.create_task(collect(fleet, seen))
            writers = [asyncio.create_task(flood(writer)) for writer in range(20)]
            await before_flood.wait()
            member.announce(decode(0))
            await member.wait_announced(timeout_s=WAIT_S)
            await fleet.wait_until(lambda f: decode(0) in f.workers, timeout_s=WAIT_S)
            is_seen.set()
            await asyncio.gather(*writers)
            await fleet.wait_until(lambda f: len(f.workers) == 1 + n_keys, timeout_s=WAIT_S)
            elapsed_s = time.monotonic() - started_s
            collector.cancel()
    await client.close()
    assert n_puts >= 2000
    assert 1 <= len(seen) <= elapsed_s / SNAPSHOT_INTERVAL_S + 2


async def put_raw(endpoint: str, key: bytes, value: bytes) -> None:
    """Put a key that is no text, as another program could."""
    async with grpc.aio.insecure_channel(endpoint) as channel:
        put = channel.unary_unary(
            "/etcdserverpb.KV/Put",
            request_serializer=etcd_pb2.PutRequest.SerializeToString,
            response_deserializer=etcd_pb2.PutResponse.FromString,
        )
        await put(etcd_pb2.PutRequest(key=key, value=value))
