from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from libs.common.cluster import placements as placements_module
from libs.common.cluster.placement_record import Placement, SessionId, decode_placement, encode_placement
from libs.common.cluster.placements import (
    SESSION_TTL_S,
    EtcdPlacements,
    InMemoryPlacements,
    Placements,
)
from libs.common.cluster.write_behind import PlacementWriteBehind
from libs.common.etcd.client import EtcdClient
from libs.common.etcd.messages import KeyValue, PrefixSnapshot
from slipstream.errors import DeadlineExceeded
from tests.support.network.fault_proxy import FaultProxy
from tests.support.processes.etcd_process import EtcdProcess

WAIT_S = 60.0
SESSION = SessionId("tenant", "session/1 ü")


@given(st.text(), st.text())
def test_session_keys_round_trip_any_text(tenant: str, session: str) -> None:
    identity = SessionId(tenant, session)
    assert SessionId.from_key(identity.key) == identity
    assert identity.key.count("/") == 5


INSTANCES = st.from_regex(r"[A-Za-z0-9._-]{0,9}", fullmatch=True)


@given(
    st.builds(
        Placement,
        kvstore=INSTANCES,
        prefill=INSTANCES,
        decode=INSTANCES,
        block_count=st.integers(0, 2**31),
        tail_hash=st.binary(max_size=16),
        epoch=st.integers(0, 2**62),
    )
)
def test_placement_records_round_trip(placement: Placement) -> None:
    assert decode_placement(encode_placement(placement), epoch=placement.epoch) == placement


HOSTILE = [
    b'{"kvstore":"","prefill":"","decode":"","block_count":1e999,"tail_hash":""}',
    b'{"kvstore":"","prefill":"","decode":"","block_count":-1,"tail_hash":""}',
    b'{"kvstore":"","prefill":"","decode":"","block_count":4294967296,"tail_hash":""}',
    b'{"kvstore":"\\ud800","prefill":"","decode":"","block_count":1,"tail_hash":""}',
    b'{"kvstore":"","prefill":"\\u001b[2J","decode":"","block_count":1,"tail_hash":""}',
]


@given(st.binary(max_size=40) | st.sampled_from([b"[]", b"{}", b"null", b"[" * 4000]))
def test_a_malformed_placement_record_raises_value_error(value: bytes) -> None:
    with pytest.raises(ValueError):
        decode_placement(value, epoch=1)


@pytest.mark.parametrize("value", HOSTILE)
def test_a_placement_that_no_reader_could_use_raises_value_error(value: bytes) -> None:
    with pytest.raises(ValueError):
        decode_placement(value, epoch=1)


@pytest.fixture
def etcd(tmp_path: Path) -> Iterator[EtcdProcess]:
    with EtcdProcess(tmp_path / "etcd") as process:
        yield process


@asynccontextmanager
async def router(
    endpoint: str,
    *,
    timeout_s: float = WAIT_S,
    session_ttl_s: int = SESSION_TTL_S,
    write_interval_s: float = 0.0,
) -> AsyncIterator[EtcdPlacements]:
    client = EtcdClient([endpoint], timeout_s=timeout_s)
    placements = EtcdPlacements(
        client, flush_interval_s=0.01, session_ttl_s=session_ttl_s, write_interval_s=write_interval_s
    )
    await placements.start(timeout_s=WAIT_S)
    try:
        yield placements
    finally:
        await placements.close()
        await client.close()


async def wait_for_placement(
    placements: Placements, session: SessionId, expected: Placement | None
) -> Placement | None:
    """Wait until `placements` has `expected` with any epoch, and return it."""
    async with asyncio.timeout(60):
        while True:
            found = placements.get(session)
            if found is None or expected is None:
                if found is expected:
                    return found
            elif found.same_place(expected):
                return found
            await asyncio.sleep(0.01)


@asynccontextmanager
async def two_routers(kind: str, tmp_path: Path) -> AsyncIterator[tuple[Placements, Placements]]:
    if kind == "memory":
        shared = InMemoryPlacements()
        yield shared, shared
        return
    with EtcdProcess(tmp_path / "etcd") as etcd:
        async with router(etcd.endpoint) as a, router(etcd.endpoint) as b:
            yield a, b


@pytest.mark.parametrize("kind", ["memory", "etcd"])
async def test_routers_share_placements(kind: str, tmp_path: Path) -> None:
    async with two_routers(kind, tmp_path) as (a, b):
        assert a.get(SESSION) is None
        first = Placement(kvstore="kv-0", prefill="p-0", decode="d-0", block_count=3, tail_hash=b"\1" * 16)
        a.put(SESSION, first)
        mine = a.get(SESSION)
        assert mine is not None
        assert mine.same_place(first)
        await a.flush(timeout_s=WAIT_S)
        seen = await wait_for_placement(b, SESSION, first)
        assert seen is not None
        assert seen.epoch > 0
        for router, name in ((b, "d-1"), (a, "d-2")):
            later = Placement(decode=name)
            router.put(SESSION, later)
            await router.flush(timeout_s=WAIT_S)
            for each in (a, b):
                changed = await wait_for_placement(each, SESSION, later)
                assert changed is not None and changed.epoch > seen.epoch
        assert a.all() == b.all()
        assert list(a.all()) == [SESSION] == a.sessions_of(SESSION.tenant)
        assert a.tenants() == [SESSION.tenant] and a.peek(SESSION) == a.get(SESSION)


async def test_a_router_without_etcd_evicts_the_least_recently_used_sessions() -> None:
    placements = InMemoryPlacements(max_sessions=3)
    sessions = [SessionId("t", name) for name in "abcd"]
    for session in sessions[:3]:
        placements.put(session, Placement(decode="d-0"))
    placements.put(sessions[1], Placement(decode="d-1"))
    assert placements.get(sessions[0]) is not None  # used: "c" is now the least recently used one
    placements.put(sessions[3], Placement(decode="d-0"))
    assert list(placements.all()) == [sessions[1], sessions[0], sessions[3]]
    assert placements.get(sessions[2]) is None
    placements.put(sessions[2], Placement(decode="d-2"))
    assert sessions[1] not in placements.all() and len(placements.all()) == 3
    assert placements.tenants() == ["t"] and set(placements.sessions_of("t")) == set(placements.all())
    assert placements.sessions_of("u") == []


async def test_a_look_at_a_session_keeps_it_no_longer() -> None:
    placements = InMemoryPlacements(max_sessions=2)
    sessions = [SessionId("t", name) for name in "abc"]
    for session in sessions[:2]:
        placements.put(session, Placement(decode="d-0"))
    assert placements.peek(sessions[0]) == placements.all()[sessions[0]]
    placements.put(sessions[2], Placement(decode="d-0"))
    assert placements.peek(sessions[0]) is None


async def test_many_placement_changes_are_written_in_few_transactions(etcd: EtcdProcess) -> None:
    client = EtcdClient([etcd.endpoint])
    before = (await client.get_prefix("/")).revision
    async with router(etcd.endpoint) as placements:
        for block_count in range(1000):
            placements.put(SESSION, Placement(block_count=block_count))
            placements.put(SessionId("tenant", f"s{block_count % 100}"), Placement(block_count=block_count))
        await placements.flush(timeout_s=WAIT_S)
        snapshot = await client.get_prefix("/slipstream/v1/sessions/")
        assert len(snapshot.entries) == 101
        assert decode_placement(snapshot.entries[SESSION.key].value, epoch=1).block_count == 999
        # 2,000 changes of 101 sessions: two transactions of at most 64 keys.
        assert snapshot.revision - before == 2
        assert placements.figures() == {
            "slipstream_session_writes_total": 101,
            "slipstream_session_conflicts_total": 0,
            "slipstream_session_writes_dropped_total": 0,
        }
    await client.close()


async def test_reads_and_changes_continue_without_etcd_and_are_written_later(etcd: EtcdProcess) -> None:
    async with (
        FaultProxy(etcd.endpoint) as proxy,
        router(proxy.endpoint, timeout_s=1) as cut,
        router(etcd.endpoint) as peer,
    ):
        cut.put(SESSION, Placement(decode="d-0"))
        await cut.flush(timeout_s=WAIT_S)
        proxy.cut()
        cut.put(SESSION, Placement(decode="d-1"))
        found = cut.get(SESSION)
        assert found is not None
        assert found.decode == "d-1"
        with pytest.raises(DeadlineExceeded):
            await cut.flush(timeout_s=0.5)
        proxy.restore()
        await cut.flush(timeout_s=WAIT_S)
        await wait_for_placement(peer, SESSION, Placement(decode="d-1"))
        assert cut.figures()["slipstream_session_conflicts_total"] == 0


async def test_a_change_made_during_a_partition_yields_to_the_other_routers_change(etcd: EtcdProcess) -> None:
    async with (
        FaultProxy(etcd.endpoint) as proxy,
        router(proxy.endpoint, timeout_s=1) as cut,
        router(etcd.endpoint) as peer,
    ):
        cut.put(SESSION, Placement(decode="d-0"))
        await wait_for_placement(peer, SESSION, Placement(decode="d-0"))
        await cut.flush(timeout_s=WAIT_S)
        proxy.cut()
        cut.put(SESSION, Placement(decode="mine"))
        peer.put(SESSION, Placement(decode="theirs"))
        await peer.flush(timeout_s=WAIT_S)
        proxy.restore()
        await wait_for_placement(cut, SESSION, Placement(decode="theirs"))
        await cut.flush(timeout_s=WAIT_S)
        assert cut.figures()["slipstream_session_conflicts_total"] == 1


async def test_placements_expire_and_a_restarted_router_loads_the_others(etcd: EtcdProcess) -> None:
    for ttl_s in (1, 3, 9, 27):  # until a router has started before a record expires
        async with router(etcd.endpoint, session_ttl_s=ttl_s) as placements:
            placements.put(SESSION, Placement(decode="d-0"))
            await placements.flush(timeout_s=WAIT_S)
            async with router(etcd.endpoint) as restarted:
                knew = restarted.get(SESSION) is not None
                await wait_for_placement(restarted, SESSION, None)
            await wait_for_placement(placements, SESSION, None)
            # The window's lease has expired too; the next change gets a new one.
            placements.put(SESSION, Placement(decode="d-1"))
            await placements.flush(timeout_s=WAIT_S)
        if knew:
            break
    assert knew


async def test_changes_within_a_window_share_a_lease(etcd: EtcdProcess) -> None:
    now_s, client = 100.0, EtcdClient([etcd.endpoint])
    leases = placements_module._WindowLeases(client, 400, lambda: now_s)
    try:
        first = await leases.current()
        now_s += 99
        assert await leases.current() == first
        now_s += 1
        second = await leases.current()
        assert second != first
        leases.drop()
        assert await leases.current() not in (first, second)
    finally:
        await client.close()


async def test_a_lost_lease_only_delays_a_write(etcd: EtcdProcess) -> None:
    async with router(etcd.endpoint) as placements:
        placements.put(SESSION, Placement(decode="d-0"))
        await placements.flush(timeout_s=WAIT_S)
        etcd.kill()
        etcd.wipe()
        etcd.start()
        placements.put(SESSION, Placement(decode="d-1"))
        await placements.flush(timeout_s=WAIT_S)
        found = await wait_for_placement(placements, SESSION, Placement(decode="d-1"))
        assert found is not None


async def test_a_busy_session_is_written_once_a_second(etcd: EtcdProcess) -> None:
    client = EtcdClient([etcd.endpoint])
    began_s = asyncio.get_running_loop().time()
    async with router(etcd.endpoint, write_interval_s=1.0) as placements:
        last = Placement()
        for block_count in range(100):
            last = Placement(decode="d-0", block_count=block_count)
            placements.put(SESSION, last)
            await asyncio.sleep(0.02)
        await placements.flush(timeout_s=WAIT_S)
        took_s = asyncio.get_running_loop().time() - began_s
        stored = await client.get(SESSION.key)
        assert stored is not None
        assert decode_placement(stored.value, epoch=1).same_place(last)
        written = placements.figures()["slipstream_session_writes_total"]
        assert 1 < written <= took_s + 1
    await client.close()


async def test_malformed_placements_are_ignored(etcd: EtcdProcess) -> None:
    client = EtcdClient([etcd.endpoint])
    await client.put("/slipstream/v1/sessions/too/many/parts", b"{}")
    await client.put(SESSION.key, b"\xff")
    async with router(etcd.endpoint) as placements:
        await client.put("/slipstream/v1/sessions/one", b"{}")
        await client.put("/slipstream/v1/sessions/tenant/hostile", HOSTILE[0])
        await client.put(SessionId("tenant", "seen").key, encode_placement(Placement(decode="d-1")))
        await wait_for_placement(placements, SessionId("tenant", "seen"), Placement(decode="d-1"))
        placements.put(SESSION, Placement(decode="d-0"))
        await placements.flush(timeout_s=WAIT_S)
        await wait_for_placement(placements, SESSION, Placement(decode="d-0"))
    await client.close()


async def test_a_snapshot_is_applied_piece_by_piece() -> None:
    """Other work has a turn after each piece, of the records that are there and of those that expired."""
    sessions = [SessionId("t", str(number)) for number in range(3000)]
    value = encode_placement(Placement(decode="d-0"))
    entries = {each.key: KeyValue(each.key, value, mod_revision=1) for each in sessions}
    state = PlacementWriteBehind(max_dirty=10)
    for expected, update in (
        (sessions, PrefixSnapshot(5, {**entries, "/slipstream/v1/sessions/a/b/c": KeyValue("", b"", 1)})),
        (sessions[:100], PrefixSnapshot(9, dict(list(entries.items())[:100]))),
    ):
        applying = asyncio.create_task(placements_module._observe(state, update))
        counts = [state.names.count("t")]
        while not applying.done():
            await asyncio.sleep(0)
            counts.append(state.names.count("t"))
        await applying
        assert set(state.names.of("t")) == set(expected)
        assert (
            len(set(counts)) > 3 and max(abs(b - a) for a, b in pairwise(counts)) <= placements_module._PIECE
        )
