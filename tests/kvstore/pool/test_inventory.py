"""A node's inventory of the pool, with any events between the request and arrival of a list."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

import services.kvstore.pool.agent.inventory_client as pool_lister
from services.kvstore.pool.agent.inventory_client import InventoryClient
from services.kvstore.pool.eviction_stats import MAX_REMEMBERED_BLOCKS, EvictionStats
from services.kvstore.pool.inventory import Inventory
from services.kvstore.pool.value import key_of, name_of

KEYS = [bytes([number]) * 16 for number in range(8)]
SOME = st.lists(st.sampled_from(KEYS), min_size=1, max_size=3, unique=True)


class InventoryMachine(RuleBasedStateMachine):
    """One node of a shared pool. The master lists at the request; the list may arrive late or never."""

    def __init__(self) -> None:
        super().__init__()
        self.pool: set[bytes] = set()
        self.inventory = Inventory()
        self.reported: set[bytes] = set()
        self.inventory.on_change = self._record
        self.inventory_client = InventoryClient(["master:1"], fetch=self._fetch)
        self.whole = True
        self.list_in_flight: tuple[int, bool, list[bytes], list[bytes], bool] | None = None

    def _record(self, keys: Collection[bytes], held: bool) -> None:
        assert keys
        assert len(set(keys)) == len(keys)
        assert not self.reported.intersection(keys) if held else self.reported.issuperset(keys)
        (self.reported.update if held else self.reported.difference_update)(keys)

    def _fetch(self, address: str, path: str) -> str:
        assert address == "master:1"
        names = [name_of(key) for key in self.pool]
        return "leader" if path == "/role" else "\n".join([*names, "slipstream0-00", "another's"])

    @rule(keys=SOME)
    def others_put(self, keys: list[bytes]) -> None:
        self.pool.update(keys)

    @rule(keys=SOME)
    def evicted(self, keys: list[bytes]) -> None:
        self.pool.difference_update(keys)

    @rule(keys=SOME)
    def own_put(self, keys: list[bytes]) -> None:
        self.pool.update(keys)
        self.inventory.add(keys)

    @rule(keys=SOME)
    def look_up(self, keys: list[bytes]) -> None:
        self.inventory.add([key for key in keys if key in self.pool])
        self.inventory.remove([key for key in keys if key not in self.pool])

    @precondition(lambda self: self.list_in_flight is None)
    @rule(most=st.integers(1, 4))
    def request_list(self, most: int) -> None:
        before, pool_lister.MAX_CHANGES = pool_lister.MAX_CHANGES, most
        number = self.inventory.request_list()
        self.list_in_flight = (number, self.whole, *self.inventory_client.changes(whole=self.whole))
        pool_lister.MAX_CHANGES = before

    @precondition(lambda self: self.list_in_flight is not None)
    @rule()
    def list_arrives(self) -> None:
        assert self.list_in_flight is not None
        number, whole, new, gone, more = self.list_in_flight
        self.inventory.apply_list(number, new=new, gone=gone, whole=whole, last=not more)
        self.list_in_flight, self.whole = None, False

    @precondition(lambda self: self.list_in_flight is not None)
    @rule()
    def list_is_lost(self) -> None:
        self.inventory.list_failed()
        self.list_in_flight, self.whole = None, True

    @rule()
    def pool_becomes_unavailable(self) -> None:
        self.inventory.clear()
        self.list_in_flight, self.whole = None, True
        assert not self.reported

    @invariant()
    def events_equal_the_inventory(self) -> None:
        assert self.reported == set(self.inventory.keys())

    def teardown(self) -> None:
        """Apply lists until there are no more parts and all blocks are known."""
        if self.list_in_flight is not None:
            self.list_arrives()
        for _ in range(2):
            more = True
            while more:
                number = self.inventory.request_list()
                new, gone, more = self.inventory_client.changes(whole=self.whole)
                self.inventory.apply_list(number, new=new, gone=gone, whole=self.whole, last=not more)
                self.whole = False
        assert set(self.inventory.keys()) == self.reported == self.pool


TestLists = InventoryMachine.TestCase


def test_an_inventory_without_lists_holds_its_puts_and_finds() -> None:
    inventory = Inventory(max_blocks=3)
    inventory.add(KEYS[:2])
    inventory.remove(KEYS[1:2])
    assert inventory.keys() == KEYS[:1]
    inventory.add(KEYS)  # blocks beyond the bound take no memory
    assert len(inventory) == 3
    for _ in range(1000):
        inventory.remove(KEYS)
    assert not inventory._removed
    assert not inventory._added


def test_names_of_other_pool_users_are_ignored() -> None:
    assert key_of(name_of(KEYS[3])) == KEYS[3]
    for name in (
        "",
        "slipstream1-",
        "slipstream0-" + "00" * 16,
        name_of(KEYS[3])[:-2],
        "slipstream1-" + "zz" * 16,
    ):
        assert key_of(name) is None


def test_lists_are_requested_from_the_leading_master() -> None:
    requested = []

    def fetch(address: str, path: str) -> str:
        requested.append((address, path))
        if address == "dead:1":
            raise OSError("refused")
        return {"/role": "standby" if address == "second:1" else "leader"}.get(path, name_of(KEYS[0]))

    assert InventoryClient(["dead:1", "second:1", "leads:1"], fetch=fetch).changes(whole=True) == (
        [KEYS[0]],
        [],
        False,
    )
    assert ("second:1", "/get_all_keys") not in requested
    with pytest.raises(OSError, match=r"dead:1: refused; second:1 does not lead"):
        InventoryClient(["dead:1", "second:1"], fetch=fetch).changes(whole=True)
    with pytest.raises(OSError, match="no HTTP endpoint of a master is known"):
        InventoryClient([]).changes(whole=True)


def test_silent_masters_cost_one_time_out_each() -> None:
    """Each silent master costs a time-out; asking all of them twice would exceed the call's time."""
    requested = []

    def fetch(address: str, path: str) -> str:
        requested.append(address)
        if address != "leads:1":
            raise OSError("timed out")
        return {"/role": "leader", "/get_all_segments": "b:1\na:1\n"}.get(path, name_of(KEYS[0]))

    inventory_client = InventoryClient(["dead:1", "stopped:1", "leads:1"], fetch=fetch)
    assert inventory_client.changes(whole=True)[0] == [KEYS[0]]
    assert inventory_client.segments() == ["a:1", "b:1"]
    assert requested.count("dead:1") == requested.count("stopped:1") == 1


@contextlib.contextmanager
def answering(answer: Callable[[socket.socket], object]) -> Iterator[str]:
    """Return the address of a server that runs `answer` on one connection."""
    with socket.create_server(("127.0.0.1", 0)) as server, ThreadPoolExecutor(1) as threads:

        def serve() -> None:
            peer, _ = server.accept()
            with peer:
                peer.recv(4096)
                answer(peer)

        served = threads.submit(serve)
        yield f"127.0.0.1:{server.getsockname()[1]}"
        served.result(timeout=60)


def test_a_truncated_list_is_an_error() -> None:
    """Names missing at the end of the list would count as removed."""
    names = f"{name_of(KEYS[0])}\n{name_of(KEYS[1])}\n".encode()
    answer = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(names) + names

    def answered(n_bytes: int) -> str:
        with answering(lambda peer: peer.sendall(answer[:n_bytes])) as address:
            return pool_lister.fetch(address, "/get_all_keys")

    assert answered(len(answer)).encode() == names
    with answering(lambda peer: peer.sendall(answer.replace(b" OK", b" OK\r\nConnection: close"))) as address:
        assert pool_lister.fetch(address, "/get_all_keys").encode() == names
    for n_bytes in (0, 20, len(answer) - len(names), len(answer) - 45):
        with pytest.raises(OSError):
            answered(n_bytes)


@pytest.mark.parametrize(
    "start", [b"HTTP/1.1 200 OK\r\nContent-Length: 1000000\r\n\r\n", b"HTTP/1.1 200 OK\r\nX-Much: ", b""]
)
def test_a_slowly_sent_list_times_out(monkeypatch: pytest.MonkeyPatch, start: bytes) -> None:
    """The body, a header or the status line arrives byte by byte.

    A call that hangs would get the agent killed, with its segment.
    """
    monkeypatch.setattr(pool_lister, "TIMEOUT_S", 0.5)
    abandoned = threading.Event()

    def answer(peer: socket.socket) -> None:
        peer.sendall(start)
        with contextlib.suppress(OSError):
            while not abandoned.wait(0.01):  # forever, far below http.client's limits
                peer.sendall(b"x")

    with answering(answer) as address:
        try:
            with pytest.raises(OSError, match=r"still answering|timed out"):
                pool_lister.fetch(address, "/get_all_keys")
        finally:
            abandoned.set()


def test_a_request_for_an_evicted_block_counts_once() -> None:
    now_ms = [0.0]
    inventory = Inventory(now_ms=lambda: now_ms[0])
    inventory.apply_list(inventory.request_list(), new=KEYS[:6], gone=[], whole=True)
    inventory.remove(KEYS[:1])  # removed by this node
    now_ms[0] = 1000
    inventory.apply_list(inventory.request_list(), new=[], gone=KEYS[:3])  # blocks 1 and 2 were evicted
    inventory.record_request(KEYS[3:])
    assert inventory.eviction_stats.wanted_blocks == 0
    now_ms[0] = 1500
    inventory.apply_list(inventory.request_list(), new=KEYS[2:3], gone=[])  # another node put it again
    inventory.apply_list(inventory.request_list(), new=[], gone=KEYS[2:3])
    now_ms[0] = 4000
    inventory.record_request(KEYS)
    inventory.record_request(KEYS)
    assert (inventory.eviction_stats.wanted_blocks, inventory.eviction_stats.wanted_gap_ms) == (
        2,
        3000 + 2500,
    )
    inventory.record_miss([KEYS[4], KEYS[7]])  # looked up and missed; 7 was never known
    inventory.remove([KEYS[4], KEYS[7]])
    assert (inventory.eviction_stats.wanted_blocks, inventory.eviction_stats.wanted_gap_ms) == (3, 5500)
    inventory.apply_list(inventory.request_list(), new=[], gone=KEYS[4:5])
    inventory.record_request(KEYS)
    inventory.clear()  # a pool that is unavailable has evicted nothing
    inventory.record_request(KEYS)
    assert inventory.eviction_stats.wanted_blocks == 3


def test_records_of_evicted_blocks_are_bounded() -> None:
    evicted = EvictionStats()
    keys = [number.to_bytes(16, "big") for number in range(MAX_REMEMBERED_BLOCKS + 10)]
    evicted.record_evicted(keys, now_ms=0)
    evicted.record_request(keys, now_ms=1)
    assert evicted.wanted_blocks == MAX_REMEMBERED_BLOCKS
