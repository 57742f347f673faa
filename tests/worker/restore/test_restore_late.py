"""Reads that continue after their restore gave up, while the engine thread is busy."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

import numpy as np
import pytest

from libs.common.transport.base import Landed, ReadOp, TransferTimeout
from libs.engine.core.fake import expected_tokens
from libs.engine.step.types import SequenceSpec
from libs.worker.restore.block_fetcher import FetchStats
from slipstream.v1 import common_pb2, prefill_pb2, prefill_pb2_grpc
from tests.worker.kvstore_node import running_kvstore
from tests.worker.nodes import (
    BLOCK_TOKENS,
    SALT,
    WAIT_S,
    Node,
    PrefillCall,
    attempt,
    eventually,
    hashes_of,
    prefill_request,
    prompt_tokens,
    running_nodes,
)
from tests.worker.restore.test_restore_silent import FLOOR_MS, GREEDY, N_TOKENS, counted, prefill

DRAM = common_pb2.CACHE_TIER_DRAM
N_GOOD = 5


class LateRead:
    """A transport read that lands N_GOOD parts, blocks the engine thread, and ignores its cancel."""

    def __init__(self, node: Node) -> None:
        self._node, self._read = node, node.core.transport.read
        self.engine_may_continue = threading.Event()
        self.may_end = asyncio.Event()
        self.ended = False

    async def __call__(
        self, session_id: str, reads: Sequence[ReadOp], *, timeout_s: float, landed: Landed | None = None
    ) -> None:
        await self._read(session_id, reads[:N_GOOD], timeout_s=timeout_s, landed=landed)
        self._node.core.thread.submit(lambda _: self.engine_may_continue.wait(WAIT_S))
        while not self.may_end.is_set():
            try:
                await self.may_end.wait()
            except asyncio.CancelledError:
                continue
        await self._read(session_id, reads[N_GOOD:], timeout_s=timeout_s, landed=landed)
        self.ended = True


class QuarantinedRead:
    """A transport read that fails while late bytes may still land, until `quiet` is set."""

    def __init__(self, node: Node) -> None:
        self._read, self._late = node.core.transport.read, (0, 0)
        self.quiet = False

    async def __call__(
        self, session_id: str, reads: Sequence[ReadOp], *, timeout_s: float, landed: Landed | None = None
    ) -> None:
        await self._read(session_id, reads[:N_GOOD], timeout_s=timeout_s, landed=landed)
        last = reads[N_GOOD]
        self._late = last.local_address, last.local_address + last.n_bytes
        raise TransferTimeout("destination quarantined", quiet=False)

    def quarantined(self, address: int, n_bytes: int) -> bool:
        return not self.quiet and address < self._late[1] and self._late[0] < address + n_bytes


@dataclass
class Rig:
    two: Node
    kvstore: str

    def call(self, name: str) -> PrefillCall:
        tokens = prompt_tokens(N_TOKENS)
        return PrefillCall(
            self.two, prefill_request(self.two, tokens, attempt=attempt(name), kvstore_endpoint=self.kvstore)
        )

    async def release(self, call: PrefillCall) -> None:
        ticket = prefill_pb2.HandoffTicket.FromString(call.events[0].opened.ticket)
        stub = prefill_pb2_grpc.PrefillServiceStub(self.two.channel)
        await stub.ReleaseHandoff(prefill_pb2.ReleaseHandoffRequest(handoff_id=ticket.handoff_id))


@asynccontextmanager
async def rig(monkeypatch: pytest.MonkeyPatch, floor_ms: float) -> AsyncIterator[Rig]:
    """Start a worker that can restore blocks that another worker has stored."""
    monkeypatch.setattr("libs.worker.restore.block_fetcher.JOINED_BYTES", 1)
    async with running_kvstore() as kvstore, running_nodes() as nodes:
        one = await nodes.prefill("prefill-1")
        await prefill(one, one.channel, 0, kvstore_endpoint=kvstore.endpoint)
        await one.core.writer.flush(timeout_s=WAIT_S)
        two = await nodes.prefill("prefill-2", restore_floor_ms=floor_ms)
        yield Rig(two, kvstore.endpoint)
        await two.wait_idle()
        await kvstore.wait_idle()


async def test_blocks_that_land_after_the_restore_gave_up_do_not_count(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with rig(monkeypatch, FLOOR_MS) as at:
        two, late = at.two, LateRead(at.two)
        monkeypatch.setattr(two.core.transport, "read", late)
        call = at.call("a")
        await eventually(lambda: two.core.fetcher.quarantined_pages > 0, "late pages")
        late.may_end.set()
        await eventually(lambda: late.ended, "the end of the read")
        late.engine_may_continue.set()
        first = await call.first_token()
        assert first.token_id == expected_tokens(two.engine, prompt_tokens(N_TOKENS), GREEDY, n=1)[0]
        assert {c.tier: c.tokens for c in first.cached}.get(DRAM, 0) <= N_GOOD * BLOCK_TOKENS
        assert counted(two, "given_up") == 1
        await at.release(call)


async def test_a_cancel_during_a_late_restore_keeps_pages_of_late_bytes_quarantined(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with rig(monkeypatch, FLOOR_MS) as at:
        core, late = at.two.core, LateRead(at.two)
        monkeypatch.setattr(core.transport, "read", late)
        hashes = hashes_of(at.two, prompt_tokens(N_TOKENS))
        spec = SequenceSpec("a", np.asarray(prompt_tokens(N_TOKENS), np.uint32), GREEDY)
        pages = (await core.pages.reserve(spec)).pages

        async def restore() -> None:
            try:
                await core.restorer.restore_prefix(
                    [at.kvstore], hashes, pages, first_block=0, stats=FetchStats(), salt=SALT
                )
            finally:
                await core.release("a", pages)

        restoring = asyncio.create_task(restore())
        await eventually(lambda: core.fetcher.quarantined_pages > 0, "late pages")
        n_late = core.fetcher.quarantined_pages
        restoring.cancel()
        for _ in range(20):  # the cancel proceeds as far as possible while the engine thread is blocked
            await asyncio.sleep(0)
        late.engine_may_continue.set()
        await asyncio.wait({restoring}, timeout=WAIT_S)
        assert restoring.cancelled()
        held = await core.thread.call(lambda engine: engine.ledger())
        assert (held.pages_held, held.pinned_pages, held.sequences) == (n_late, n_late, 0)
        late.may_end.set()
        await eventually(lambda: core.fetcher.quarantined_pages == 0, "no late pages")


async def test_pages_of_a_failed_read_with_late_bytes_are_replaced(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with rig(monkeypatch, WAIT_S * 1e3) as at:
        two, failing = at.two, QuarantinedRead(at.two)
        monkeypatch.setattr(two.core.transport, "read", failing)
        monkeypatch.setattr(two.core.transport, "quarantined", failing.quarantined)
        call = at.call("a")
        first = await call.first_token()
        assert {c.tier: c.tokens for c in first.cached} == {DRAM: N_GOOD * BLOCK_TOKENS}
        # The quarantined page belongs to no sequence: the prompt holds enough other pages.
        assert two.core.fetcher.quarantined_pages == 1
        assert two.core.thread.ledger.pages_held == -(-(N_TOKENS + 1) // BLOCK_TOKENS) + 1
        await at.release(call)
        failing.quiet = True
