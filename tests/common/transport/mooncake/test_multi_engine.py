"""MultiEngine: each engine has its share, and the first read of a peer connects to all of them."""

from __future__ import annotations

import asyncio
import random
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from libs.common.transport.base import ReadOp
from libs.common.transport.incarnation_probe import IncarnationProbe, ProbeAddress, greet
from libs.common.transport.mooncake_read import LANES, MooncakePeer, MooncakeRead
from libs.common.transport.multi_engine import MultiEngine, addresses_of, note_of

SESSION = f"127.0.0.1:1/2/{bytes(16).hex()}"
PEERS = (("a:1", "a:2"), ("b:1",))


class SlowEngine:
    """An engine whose elements end when `end` is called."""

    def __init__(self, code: int = 0) -> None:
        self.code = code
        self.asked: list[str] = []
        self.held: list[int] = []
        self.refuses = False
        self.registered: set[int] = set()
        self._ended: dict[int, int] = {}
        self._lock = threading.Lock()  # reads start in other threads than `end` is called from

    def register_memory(self, address: int, _n_bytes: int) -> int:
        if self.code == 0:
            self.registered.add(address)
        return self.code

    def unregister_memory(self, address: int) -> int:
        self.registered.remove(address)
        return 0

    def batch_transfer_async_read(self, peer: str, *_: object) -> int:
        if self.refuses:
            return 0
        with self._lock:
            self.asked.append(peer)
            self.held.append(len(self.asked))
            return len(self.asked)

    def transfer_check_status(self, element: int) -> int:
        return self._ended.pop(element, 0)

    def end(self, status: int = 1) -> None:
        with self._lock:
            self._ended.update(dict.fromkeys(self.held, status))
            self.held.clear()


@pytest.mark.parametrize("seed", range(20))
def test_no_engine_exceeds_its_share_of_a_peers_open_elements(seed: int) -> None:
    rng, engines = random.Random(seed), [SlowEngine(), SlowEngine()]
    rails = MultiEngine(engines)
    held: dict[tuple[str, ...], dict[int, int]] = {peer: {} for peer in PEERS}
    for _ in range(300):
        peer = rng.choice(PEERS)
        open_elements = held[peer]
        if len(open_elements) < LANES and rng.random() < 0.6:
            engines[rng.randrange(2)].refuses = rng.random() < 0.1
            element = rails.batch_transfer_async_read(peer, [0], [0], [1])
            if element:
                open_elements[element] = rails._elements[element][0]
            engines[0].refuses = engines[1].refuses = False
        elif open_elements:
            element = rng.choice(list(open_elements))
            rail, found, _ = rails._elements[element]
            engines[rail]._ended[found] = rng.choice([1, -1])
            assert rails.transfer_check_status(element) in (1, -1)
            del open_elements[element]
        for rail in range(2):
            assert sum(each == rail for each in open_elements.values()) <= LANES // 2 + LANES % 2
    assert set(engines[0].asked) == {"a:1", "b:1"} and set(engines[1].asked) == {"a:2", "b:1"}
    for open_elements in held.values():
        for element in open_elements:
            rail, found, _ = rails._elements[element]
            engines[rail]._ended[found] = 1
            assert rails.transfer_check_status(element) == 1
    assert not rails._elements and not rails._held


def test_memory_is_registered_with_each_engine_or_not_at_all() -> None:
    both = [SlowEngine(), SlowEngine()]
    assert MultiEngine(both).register_memory(1, 2) == 0
    assert [engine.registered for engine in both] == [{1}, {1}]
    for refusing in ([SlowEngine(), SlowEngine(-3)], [SlowEngine(-3), SlowEngine()]):
        assert MultiEngine(refusing).register_memory(1, 2) == -3
        assert not any(engine.registered for engine in refusing)


@pytest.mark.parametrize(("n_bytes", "reached"), [(1 << 20, True), (2, True), (1, False)])
def test_the_first_read_of_a_peer_connects_to_all_its_engines(n_bytes: int, reached: bool) -> None:
    engines, peer = [SlowEngine(), SlowEngine()], MooncakePeer(SESSION)
    peer.addresses, landed = PEERS[0], list[ReadOp]()
    op = ReadOp(0, 0, n_bytes)
    with ThreadPoolExecutor(1) as calls:
        read = MooncakeRead(MultiEngine(engines), calls, peer, [op], landed.append, asyncio.Event(), object())
        while not read.over:
            for engine in engines:
                engine.end()
            read.step()
    assert read.complete and landed == [op]
    assert read.reached == reached == bool(engines[1].asked)


def test_two_concurrent_first_reads_report_only_engines_that_answered() -> None:
    """One engine serves both elements of the first read while the other engine still connects."""
    asked_second, unblock = threading.Event(), threading.Event()

    class BlockingEngine(SlowEngine):
        """An engine whose first connection blocks until the test unblocks it."""

        def batch_transfer_async_read(self, peer: str, *arguments: object) -> int:
            asked_second.set()
            assert unblock.wait(60)
            return super().batch_transfer_async_read(peer, *arguments)

    class LeadingEngine(SlowEngine):
        """An engine that starts the other read after the first element of this one."""

        def batch_transfer_async_read(self, peer: str, *arguments: object) -> int:
            if not self.asked:
                other.step()
                assert asked_second.wait(60)
            return super().batch_transfer_async_read(peer, *arguments)

    engines, peer = [LeadingEngine(), BlockingEngine()], MooncakePeer(SESSION)
    peer.addresses = PEERS[0]
    rails = MultiEngine(engines)
    with ThreadPoolExecutor(2) as calls:
        first, other = (
            MooncakeRead(rails, calls, peer, [ReadOp(0, 0, 2)], None, asyncio.Event(), object())
            for _ in range(2)
        )
        while not first.over:
            first.step()
            engines[0].end()
        assert first.complete and not engines[1].asked
        assert not first.reached  # the second engine has no connection yet
        unblock.set()
        while not other.over:
            for engine in engines:
                engine.end()
            other.step()
        assert other.complete and other.reached and peer.reached_by == {0, 1}


async def test_a_probe_note_holds_the_engine_addresses_and_may_be_empty() -> None:
    with_note, without_note = (
        IncarnationProbe("127.0.0.1:0", note=note_of([16000, 15001])),
        IncarnationProbe("127.0.0.1:0"),
    )
    try:
        note = await greet(ProbeAddress("127.0.0.1", with_note.port, with_note.nonce))
        assert addresses_of("h:16000", note) == ("h:16000", "h:15001")
        assert addresses_of("h:16001", note) == ("h:16001",)  # a proxy is in between
        assert await greet(ProbeAddress("127.0.0.1", without_note.port, without_note.nonce)) == b""
        reader, writer = await asyncio.open_connection("127.0.0.1", with_note.port)
        assert await reader.readexactly(16) == with_note.nonce  # a reader may ignore the note
        writer.close()
    finally:
        with_note.close()
        without_note.close()


@pytest.mark.parametrize("note", [b"", b"x", b"1,", b"1,0", b"1,65536", b"1,-2", b"\xff", b"2,1"])
def test_a_malformed_note_is_ignored(note: bytes) -> None:
    assert addresses_of("h:1", note) == ("h:1",)
