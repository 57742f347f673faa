"""The parts of the pool tier that need no pool: values, extents, health, options, fetches."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from libs.common.checksum import checksum
from libs.common.etcd.access import EtcdAccess
from libs.common.runtime.loading import load_settings
from libs.common.transport.registered_memory import PAGE_BYTES
from services.kvstore.pool.agent.client_guard import ClientGuard, Replica
from services.kvstore.pool.agent.fetch import Fetched, Fetcher
from services.kvstore.pool.agent.node_readers import MAX_READERS, NodeReaders, ValueRead
from services.kvstore.pool.agent.protocol import CORRUPT, MISSING, UNREACHABLE, keys_of, packed, unpacked
from services.kvstore.pool.agent.staging import Extent, Extents, SharedMemory
from services.kvstore.pool.config import PoolOptions, pool_master
from services.kvstore.pool.health import FIRST_PROBE_S, MAX_PROBE_S, PROBE_EVERY_S, PoolHealth
from services.kvstore.pool.value import HEADER_BYTES, name_of, pack_header, verify_value
from services.kvstore.settings import NodeSettings, options_of
from slipstream.errors import FailedPrecondition, InvalidArgument

KEY = bytes(range(16))


def wait_until(true: Callable[[], bool], *, timeout_s: float = 30) -> None:
    deadline_s = time.monotonic() + timeout_s
    while not true():
        assert time.monotonic() < deadline_s
        time.sleep(0.01)


def value(payload: bytes, key: bytes = KEY) -> bytes:
    return pack_header(key, len(payload), checksum(payload)) + payload


@given(st.binary(min_size=1, max_size=300), st.data())
def test_a_value_verifies_only_unchanged_and_under_its_key(payload: bytes, data: st.DataObject) -> None:
    whole = value(payload)
    assert verify_value(memoryview(whole), KEY) == checksum(payload)
    assert verify_value(memoryview(whole), bytes(16)) is None
    bit = data.draw(st.integers(0, len(whole) * 8 - 1))
    if not 88 * 8 <= bit < HEADER_BYTES * 8:  # the zeros behind the seal are not covered
        flipped = bytearray(whole)
        flipped[bit // 8] ^= 1 << bit % 8
        assert verify_value(memoryview(flipped), KEY) is None
    cut = data.draw(st.integers(1, len(whole) - 1))
    assert verify_value(memoryview(whole[:cut]), KEY) is None
    assert verify_value(memoryview(whole + b"\0"), KEY) is None


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 5 * PAGE_BYTES)), max_size=60))
def test_extents_never_overlap_and_merge_when_freed(steps: Sequence[tuple[bool, int]]) -> None:
    extents = Extents(16 * PAGE_BYTES)
    taken: list[Extent] = []
    for free, number in steps:
        if free and taken:
            extents.free(taken.pop(number % len(taken)))
        elif (extent := extents.allocate(number)) is not None:
            assert extent.n_bytes >= number and extent.offset % PAGE_BYTES == 0
            assert extent.offset + extent.n_bytes <= extents.n_bytes
            taken.append(extent)
        ordered = sorted(taken)
        for one, following in itertools.pairwise(ordered):
            assert one.offset + one.n_bytes <= following.offset
        assert extents.allocated_bytes == sum(extent.n_bytes for extent in taken)
    for extent in taken:
        extents.free(extent)
        with pytest.raises(ValueError):
            extents.free(extent)
    assert extents.allocate(extents.n_bytes) == Extent(0, extents.n_bytes)


def test_one_failure_marks_the_pool_unavailable_until_a_probe_succeeds() -> None:
    health = PoolHealth()
    assert health.unavailable and health.probe_in_s(now_s=0) == 0
    assert health.record_success(now_s=10) and not health.unavailable
    assert not health.record_success(now_s=11) and health.probe_in_s(now_s=11) == PROBE_EVERY_S
    assert health.record_failure(now_s=20) and health.unavailable
    assert health.probe_in_s(now_s=20) == FIRST_PROBE_S
    pauses = []
    for _ in range(6):
        assert not health.record_failure(now_s=30)
        pauses.append(health.probe_in_s(now_s=30))
    assert pauses == sorted(pauses) and pauses[-1] == MAX_PROBE_S


def test_the_configuration_is_checked() -> None:
    PoolOptions("127.0.0.1:50051").check()
    PoolOptions("etcd://a:2379;b:2379", segment_bytes=0, replicas=2).check()
    for master in ("", "host", "host:0", "host:x", ":1", "a:1;b:2", "etcd://a:1;b"):
        with pytest.raises(InvalidArgument, match="--pool-master"):
            PoolOptions(master).check()
    with pytest.raises(InvalidArgument, match="--pool-bytes"):
        PoolOptions("a:1", segment_bytes=1).check()
    with pytest.raises(InvalidArgument, match="--pool-replicas"):
        PoolOptions("a:1", replicas=0).check()
    assert pool_master("a:1", EtcdAccess("e:2379", user="u")) == "a:1"
    assert pool_master("", EtcdAccess("e:2379,f:2379")) == "etcd://e:2379;f:2379"
    with pytest.raises(InvalidArgument, match="--pool-master"):
        pool_master("", EtcdAccess())
    with pytest.raises(InvalidArgument, match="Mooncake reaches no etcd with TLS"):
        pool_master("", EtcdAccess("e:2379", user="u"))


def test_a_message_is_one_line() -> None:
    line = packed({"id": 1, "do": "find", "keys": [KEY.hex()]})
    assert line.endswith(b"\n") and line.count(b"\n") == 1
    assert keys_of(unpacked(line)) == [KEY]
    with pytest.raises(ValueError):
        unpacked(b"[]")


@dataclass
class FakePool:
    """Nodes by endpoint, with values by address; None is a node that does not answer."""

    nodes: Mapping[str, Mapping[int, bytes] | None]
    copies: Mapping[str, list[Replica]]
    memory: SharedMemory
    suspected: set[str] = field(default_factory=set)
    hanging: set[str] = field(default_factory=set)
    asked: list[str] = field(default_factory=list)

    def replicas(self, names: Sequence[str]) -> dict[str, list[Replica]]:
        return {name: self.copies[name] for name in names if name in self.copies}

    def is_suspect(self, endpoint: str) -> bool:
        return endpoint in self.suspected

    def is_stuck(self, endpoint: str) -> bool:
        return endpoint in self.hanging

    def read(self, endpoint: str, elements: Sequence[ValueRead], *, deadline_s: float) -> Future[list[bool]]:
        self.asked.append(endpoint)
        ended: Future[list[bool]] = Future()
        node = self.nodes[endpoint]
        if node is not None:
            arrived = []
            for element in elements:
                data = node.get(element.remote_address)
                arrived.append(data is not None)
                if data is not None:
                    at = element.local_address - self.memory.address
                    self.memory.view(at, element.n_bytes)[:] = data
            ended.set_result(arrived)
        return ended


def fetch(pool: FakePool, n_bytes: int) -> Fetched:
    clock = iter(range(1000))
    fetcher = Fetcher(pool, pool, pool.memory, clock_s=lambda: next(clock) / 10)
    return fetcher.fetch([KEY], [Extent(0, n_bytes)], [n_bytes])


def test_a_fetch_fails_over_from_replica_to_replica() -> None:
    memory = SharedMemory(1 << 20)
    whole = value(b"payload")
    size = len(whole)
    wrong = bytearray(whole)
    wrong[-1] ^= 1

    def copies(*endpoints: str) -> dict[str, list[Replica]]:
        return {name_of(KEY): [Replica(endpoint, 7, size) for endpoint in endpoints]}

    nodes: dict[str, Mapping[int, bytes] | None] = {
        "good": {7: whole},
        "wrong": {7: bytes(wrong)},
        "dead": {},
        "stopped": None,
    }
    for order, asked, outcome, unreadable, failovers in (
        (["good", "dead"], ["good"], size, 0, 0),
        (["dead", "good"], ["dead", "good"], size, 0, 1),
        (["wrong", "good"], ["wrong", "good"], size, 0, 1),
        (["stopped", "good"], ["stopped", "good"], size, 0, 1),
        (["wrong", "dead"], ["wrong", "dead"], CORRUPT, 1, 0),
        (["dead"], ["dead"], UNREACHABLE, 1, 0),
        (["stopped"], ["stopped"], UNREACHABLE, 0, 0),  # the node may return with the value
    ):
        pool = FakePool(nodes, copies(*order), memory)
        fetched = fetch(pool, size)
        assert (pool.asked, fetched.outcome) == (asked, [outcome])
        assert (len(fetched.unreadable), fetched.failovers) == (unreadable, failovers)
        assert len(fetched.late) == order.count("stopped")
    # A node that failed recently is tried last; a node with a stuck reader is skipped.
    pool = FakePool(nodes, copies("dead", "good"), memory, suspected={"dead"})
    assert fetch(pool, size).outcome == [size]
    assert pool.asked == ["good"]
    pool = FakePool(nodes, copies("good"), memory, hanging={"good"})
    assert fetch(pool, size).unreadable == []
    assert pool.asked == []
    assert fetch(FakePool(nodes, {}, memory), size).outcome == [MISSING]
    memory.close()


def test_a_reader_continues_after_an_unknown_error_of_its_engine() -> None:
    opened: list[bool] = []

    def open_engine() -> None:
        opened.append(True)
        raise RuntimeError("not known")

    readers = NodeReaders(open_engine)
    for count in (1, 2):
        ended = readers.read("node:1", [ValueRead(1, 1, 1)], deadline_s=float("inf"))
        assert ended.result(timeout=60) == [False]
        assert len(opened) == count and not readers.is_stuck("node:1")
    assert readers.is_suspect("node:1")


class BrokenEngine:
    """An engine that accepts one element and never reports its end."""

    def batch_transfer_async_read(self, *arguments: object) -> int:
        return 7

    def transfer_check_status(self, number: int) -> int:
        raise RuntimeError("not known")


def test_a_read_with_an_unknown_end_never_completes() -> None:
    readers = NodeReaders(BrokenEngine)
    ended = readers.read("node:1", [ValueRead(1, 1, 1)], deadline_s=float("inf"))
    behind = readers.read("node:1", [ValueRead(2, 2, 1)], deadline_s=float("inf"))
    wait_until(lambda: readers.is_stuck("node:1"))
    assert not ended.done() and not behind.done()


class QuickEngine:
    """Every element arrives at once."""

    def batch_transfer_async_read(self, *arguments: object) -> int:
        return 7

    def transfer_check_status(self, number: int) -> int:
        return 1


def test_the_longest_idle_reader_is_closed_for_a_new_one() -> None:
    opened: list[QuickEngine] = []

    def open_engine() -> QuickEngine:
        opened.append(QuickEngine())
        return opened[-1]

    now = itertools.count(1)
    readers = NodeReaders(open_engine, clock_s=lambda: float(next(now)))

    def read(node: int) -> int:
        """Read from a node; return the number of newly opened engines."""
        before = len(opened)
        element = ValueRead(1, 1, 1)
        assert readers.read(f"node:{node}", [element], deadline_s=float("inf")).result(timeout=60) == [True]
        return len(opened) - before

    assert [read(node) for node in range(MAX_READERS)] == [1] * MAX_READERS
    assert read(0) == 0  # the oldest reader, and now the latest used
    assert read(MAX_READERS) == 1  # replaces the reader of node 1
    assert read(0) == 0
    assert read(1) == 1


def test_the_guard_closes_after_running_calls_and_refuses_new_ones() -> None:
    entered, leave, closed = threading.Event(), threading.Event(), threading.Event()

    class Client:
        def batch_is_exist(self, names: list[str]) -> list[int]:
            entered.set()
            assert leave.wait(60) and not closed.is_set()
            return [1] * len(names)

        def close(self) -> None:
            closed.set()

    store = ClientGuard(Client())
    answers: list[list[bool]] = []
    caller = threading.Thread(target=lambda: answers.append(store.exist(["a"])))
    caller.start()
    assert entered.wait(60)
    assert not store.close(wait_s=0.05)  # a call hangs: the client stays open
    assert not closed.is_set()
    with pytest.raises(FailedPrecondition):
        store.exist(["b"])
    leave.set()
    caller.join(60)
    assert answers == [[True]]


@pytest.mark.parametrize(
    ("flags", "host"),
    [
        ((), "10.0.0.7"),
        (("--advertise", "kvstore-0.nodes:0"), "kvstore-0.nodes"),
        (("--advertise", "kvstore-0.nodes:0", "--kv-advertise", "kvstore-0.kv:0"), "kvstore-0.kv"),
    ],
)
def test_other_nodes_reach_the_memory_of_a_node_where_its_kv_is_advertised(
    flags: Sequence[str], host: str
) -> None:
    needed = ["--instance", "kvstore-0", "--listen", "10.0.0.7:7000", "--pool", "mooncake"]
    parsed = load_settings(
        NodeSettings,
        section="kvstore",
        program="test",
        description="test",
        arguments=[*needed, "--pool-master", "master:1", *flags],
        environment={},
    )
    pool = options_of(parsed).pool
    assert pool is not None and pool.host == host
