"""One read of many elements with an engine that ends each at once loses none."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor

from libs.common.transport.base import ReadOp
from libs.common.transport.mooncake_read import ELEMENT_BYTES, LANES, MooncakePeer, MooncakeRead

SESSION = f"127.0.0.1:1/2/{bytes(16).hex()}"


class QuickEngine:
    """An engine whose elements have landed at the first poll."""

    def __init__(self) -> None:
        self.taken = self.held = self.most_held = 0

    def batch_transfer_async_read(self, _peer: str, _to: list[int], _from: list[int], _n: list[int]) -> int:
        self.taken, self.held = self.taken + 1, self.held + 1
        self.most_held = max(self.most_held, self.held)
        return self.taken

    def transfer_check_status(self, _element: int) -> int:
        self.held -= 1
        return 1


def test_a_read_of_thousands_of_elements_ends_and_yields_to_other_tasks() -> None:
    engine, peer, landed = QuickEngine(), MooncakePeer(SESSION), list[ReadOp]()
    peer.reached = True
    n_elements = 20_000
    reads = [ReadOp(0, 0, n_elements // 2 * ELEMENT_BYTES) for _ in range(2)]
    with ThreadPoolExecutor(1) as calls:
        read = MooncakeRead(engine, calls, peer, reads, None, asyncio.Event(), object())
        steps = 0
        while not read.over:
            assert read.step()
            steps += 1
        assert read.complete
        assert (engine.taken, read.n_done, peer.n_elements) == (n_elements, n_elements, 0)
        assert engine.most_held <= LANES
        assert steps > 10
        read = MooncakeRead(
            engine,
            calls,
            peer,
            [ReadOp(n, n, 1) for n in range(100)],
            landed.append,
            asyncio.Event(),
            object(),
        )
        while not read.over:
            read.step()
    assert [op.local_address for op in landed] == list(range(100))
