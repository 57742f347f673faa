"""Workers read prefix caches of peers over real gRPC and sockets, with the fake engine."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from libs.common.checksum import memory_at
from libs.engine.core.fake import expected_tokens
from libs.engine.step.types import SamplingParams
from libs.worker.engine.page_exporter import ExportedPage
from libs.worker.peer_cache.peer_cache_server import MAX_LEASED_SHARE, PeerCacheServer
from libs.worker.restore.block_fetcher import FetchStats
from slipstream.block_hashes import pack_hashes
from slipstream.errors import FingerprintMismatch, InvalidArgument, NotFound
from slipstream.v1 import common_pb2, kvstore_pb2, prefill_pb2, prefill_pb2_grpc
from tests.support.stubs.pin_stub import PinStub
from tests.worker.kvstore_node import running_kvstore
from tests.worker.nodes import (
    WAIT_S,
    Gate,
    Node,
    PrefillCall,
    attempt,
    eventually,
    hashes_of,
    prefill_request,
    prompt_tokens,
    running_nodes,
)

GREEDY = SamplingParams(temperature=0.0)
WORKER, DRAM, PEER = common_pb2.CACHE_TIER_WORKER, common_pb2.CACHE_TIER_DRAM, common_pb2.CACHE_TIER_PEER


def endpoint_of(node: Node) -> str:
    return node.host.endpoint


def stub_of(node: Node) -> PinStub:
    return PinStub(node.channel)


async def prefill_once(node: Node, tokens: list[int], request_id: str, **fields: Any) -> dict[int, int]:
    """Prefill and release, check the first token, and return the cached tokens by tier."""
    call = PrefillCall(node, prefill_request(node, tokens, attempt=attempt(request_id), **fields))
    ticket = prefill_pb2.HandoffTicket.FromString((await call.opened()).ticket)
    first = await call.first_token()
    await prefill_pb2_grpc.PrefillServiceStub(node.channel).ReleaseHandoff(
        prefill_pb2.ReleaseHandoffRequest(handoff_id=ticket.handoff_id)
    )
    assert first.token_id == expected_tokens(node.engine, tokens, GREEDY, n=1)[0]
    await node.wait_idle()
    return {c.tier: c.tokens for c in first.cached}


def pin_request(node: Node, tokens: list[int], **fields: Any) -> kvstore_pb2.PinRequest:
    values: dict[str, Any] = {
        "fingerprint": node.core.fingerprint.to_proto(),
        "block_hashes": pack_hashes(hashes_of(node, tokens)),
        **fields,
    }
    return kvstore_pb2.PinRequest(**values)


async def test_a_worker_continues_from_blocks_of_a_peer() -> None:
    tokens = prompt_tokens(102)
    async with running_nodes() as nodes:
        one, two = await nodes.prefill("prefill-0"), await nodes.prefill("prefill-1")
        assert await prefill_once(one, tokens, "a") == {}
        longer = tokens + prompt_tokens(30, seed=1)
        assert await prefill_once(two, longer, "b", peer_endpoint=endpoint_of(one)) == {PEER: 100}
        # 25 blocks of the local cache and the 8 new ones of the peer.
        assert await prefill_once(one, longer, "c", peer_endpoint=endpoint_of(two)) == {WORKER: 100, PEER: 28}
        assert await prefill_once(one, longer, "d", peer_endpoint=endpoint_of(two)) == {WORKER: 128}
        await one.wait_idle()
        await two.wait_idle()


async def test_blocks_that_the_peer_lacks_come_from_the_kvstore() -> None:
    tokens = prompt_tokens(102)
    longer = tokens + prompt_tokens(30, seed=1)
    async with running_kvstore() as kvstore, running_nodes() as nodes:
        one, two = await nodes.prefill("prefill-0"), await nodes.prefill("prefill-1")
        three = await nodes.prefill("prefill-2")
        store = {"kvstore_endpoint": kvstore.endpoint}
        await prefill_once(one, tokens, "a")
        await prefill_once(two, longer, "b", **store)
        await eventually(lambda: kvstore.blocks == 33)
        both = await prefill_once(three, longer, "c", peer_endpoint=endpoint_of(one), **store)
        assert both == {PEER: 100, DRAM: 28}
        await one.wait_idle()
        await kvstore.wait_idle()


async def test_a_prompt_is_computed_if_its_peer_is_gone() -> None:
    tokens = prompt_tokens(102)
    async with running_nodes() as nodes:
        one, two = await nodes.prefill("prefill-0"), await nodes.prefill("prefill-1")
        await prefill_once(one, tokens, "a")
        await one.host.stop(grace_s=0)
        assert await prefill_once(two, tokens, "b", peer_endpoint=endpoint_of(one)) == {}


async def test_a_damaged_block_of_a_peer_is_computed_instead() -> None:
    tokens = prompt_tokens(60)
    async with running_nodes() as nodes:
        one, two = await nodes.prefill("prefill-0"), await nodes.prefill("prefill-1")
        await prefill_once(one, tokens, "a")
        pinned = await stub_of(one).pin(pin_request(one, tokens), timeout=WAIT_S)
        export = one.core.exporter.export

        async def damaged(pages: Any) -> list[ExportedPage]:  # the copy changes after its checksum
            exported = await export(pages)
            memory_at(exported[3].address, 1)[0] ^= 1
            return exported

        one.core.exporter.export = damaged  # type: ignore[assignment]
        await stub_of(one).release(pinned.lease_id)
        cached = await prefill_once(two, tokens, "b", peer_endpoint=endpoint_of(one))
        assert cached.get(PEER, 0) < 56
        assert two.core.counters.snapshot()["slipstream_kv_checksum_failures_total"] == 1
        await one.wait_idle()


async def test_a_pin_ends_with_the_next_pin_that_names_it() -> None:
    tokens = prompt_tokens(40)
    async with running_nodes() as nodes:
        node = await nodes.prefill()
        await prefill_once(node, tokens, "a")
        stub = stub_of(node)
        first = await stub.pin(pin_request(node, tokens), timeout=WAIT_S)
        second = await stub.pin(pin_request(node, tokens, released=[first.lease_id]), timeout=WAIT_S)
        assert second.lease_id and second.ended_pins == node.ledger.pins == 1
        await stub.release(second.lease_id)
        await node.wait_idle()


async def test_a_pin_ends_by_release_or_expiry_and_can_be_renewed() -> None:
    tokens = prompt_tokens(40)
    async with running_nodes() as nodes:
        node = await nodes.prefill()
        await prefill_once(node, tokens, "a")
        stub = stub_of(node)
        pinned = await stub.pin(pin_request(node, tokens, first_block=2, max_blocks=5), timeout=WAIT_S)
        assert (len(pinned.blocks), node.ledger.pins, node.core.lender.leased_blocks) == (5, 1, 5)
        assert node.core.thread.ledger.pages_held == 5 and node.ledger.blocks_leaked == 0
        await stub.renew(pinned.lease_id, lease_ms=60_000)
        await stub.release(pinned.lease_id)
        await stub.release(pinned.lease_id)
        await node.wait_idle()
        with pytest.raises(NotFound):
            await stub.renew(pinned.lease_id)
        await stub.pin(pin_request(node, tokens, lease_ms=20), timeout=WAIT_S)
        await node.wait_idle()


async def test_a_cancelled_pin_holds_nothing() -> None:
    tokens = prompt_tokens(40)
    async with running_nodes() as nodes:
        node = await nodes.prefill()
        await prefill_once(node, tokens, "a")
        busy = Gate()
        blocked = node.core.thread.submit(lambda engine: busy(1.0))  # the engine thread is busy
        pin = asyncio.create_task(stub_of(node).pin(pin_request(node, tokens), timeout=WAIT_S))
        await eventually(lambda: node.core.lender.leases == 1)
        pin.cancel()
        with pytest.raises(asyncio.CancelledError):
            await pin
        busy.open()
        await blocked
        await node.wait_idle()
        assert node.core.lender.leased_blocks == 0


async def test_malformed_pins_are_refused_and_unknown_blocks_pin_nothing() -> None:
    tokens = prompt_tokens(40)
    async with running_nodes() as nodes:
        node = await nodes.prefill()
        stub = stub_of(node)
        assert not (await stub.pin(pin_request(node, tokens), timeout=WAIT_S)).lease_id
        await prefill_once(node, tokens, "a")
        other = node.core.fingerprint.to_proto()
        other.digest = bytes(16)
        for request, error in (
            (pin_request(node, tokens, fingerprint=other), FingerprintMismatch),
            (pin_request(node, tokens, block_hashes=b"odd"), InvalidArgument),
        ):
            with pytest.raises(error):
                await stub.pin(request, timeout=WAIT_S)
        await node.service.drain()
        assert not (await stub.pin(pin_request(node, tokens), timeout=WAIT_S)).lease_id
        await node.wait_idle()


async def test_only_a_share_of_the_pages_can_be_pinned_by_peers() -> None:
    tokens = prompt_tokens(200)
    async with running_nodes() as nodes:
        node = await nodes.prefill()
        await prefill_once(node, tokens, "a")
        limit = int(MAX_LEASED_SHARE * node.core.info.n_pages)
        first = await stub_of(node).pin(pin_request(node, tokens), timeout=WAIT_S)
        assert len(first.blocks) == limit < 50
        assert not (await stub_of(node).pin(pin_request(node, tokens), timeout=WAIT_S)).blocks
        await stub_of(node).release(first.lease_id)
        await node.wait_idle()


async def test_concurrent_pins_stay_within_the_share_for_peers() -> None:
    tokens = prompt_tokens(200)
    async with running_nodes() as nodes:
        node = await nodes.prefill()
        await prefill_once(node, tokens, "a")
        limit = int(MAX_LEASED_SHARE * node.core.info.n_pages)
        busy, lender = Gate(), node.core.lender
        blocked = node.core.thread.submit(lambda engine: busy(1.0))  # the engine thread is busy
        wanted = limit * 2 // 3
        pins = [
            asyncio.ensure_future(
                stub_of(node).pin(pin_request(node, tokens, max_blocks=wanted), timeout=WAIT_S)
            )
            for _ in range(3)
        ]
        await eventually(lambda: lender.leased_blocks == limit)
        busy.open()
        await blocked
        pinned = await asyncio.gather(*pins)
        assert sorted(len(each.blocks) for each in pinned) == [0, limit - wanted, wanted]
        assert not (await stub_of(node).pin(pin_request(node, tokens), timeout=WAIT_S)).blocks
        for each in pinned:
            await stub_of(node).release(each.lease_id)
        await node.wait_idle()
        assert lender.leased_blocks == 0


async def test_blocks_that_a_peer_has_read_are_evicted_first() -> None:
    """The third prompt needs three of the 48 pages.

    Without the peer's read it would evict blocks of the first prompt, which are older.
    """
    kept, lent, new = prompt_tokens(40), prompt_tokens(40, seed=1), prompt_tokens(120, seed=2)
    async with running_nodes() as nodes:
        one, two = await nodes.prefill("prefill-0", n_pages=48), await nodes.prefill("prefill-1")
        await prefill_once(one, kept, "a")
        await prefill_once(one, lent, "b")
        assert await prefill_once(two, lent, "c", peer_endpoint=endpoint_of(one)) == {PEER: 36}
        await one.wait_idle()
        await prefill_once(one, new, "d")
        assert await prefill_once(one, kept, "e") == {WORKER: 36}
        assert await prefill_once(one, lent, "f", peer_endpoint=endpoint_of(two)) != {WORKER: 36}


@pytest.mark.parametrize("when", ["before", "during", "after"])
async def test_a_pin_ends_by_its_name_in_any_order_of_messages(when: str) -> None:
    """A reader cancelled before the answer knows no lease, so it releases by name; releases may repeat."""
    tokens = prompt_tokens(40)
    async with running_nodes() as nodes:
        node = await nodes.prefill()
        await prefill_once(node, tokens, "a")
        stub, ended = stub_of(node), 0
        export, summing = node.core.exporter.export, asyncio.Event()

        async def slow(pages: Any) -> list[ExportedPage]:
            summing.set()
            if when == "during":
                while not ended:
                    await asyncio.sleep(0.001)
            return await export(pages)

        async def end() -> None:
            nonlocal ended
            await stub.release("mine", timeout=WAIT_S)
            ended += 1

        node.core.exporter.export = slow  # type: ignore[assignment]
        if when == "before":
            await end()
        pinning = asyncio.create_task(stub.pin(pin_request(node, tokens, name="mine"), timeout=WAIT_S))
        if when == "during":
            await asyncio.wait_for(summing.wait(), WAIT_S)
            await end()
        pinned = await pinning
        assert bool(pinned.lease_id) == (when == "after")
        if when == "after":
            assert (node.ledger.pins, node.core.lender.leased_blocks) == (1, 10)
            await end()
        await end()
        assert (node.ledger.pins, node.core.lender.leased_blocks) == (0, 0)
        await node.wait_idle()


async def test_a_restore_cancelled_before_its_pin_is_answered_leaves_no_pin(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The reader is cancelled after the pin and before its answer, and releases the pin by its name."""
    tokens, made = prompt_tokens(40), asyncio.Event()
    pin = PeerCacheServer.pin

    async def unanswered(self: PeerCacheServer, request: Any, context: Any) -> Any:
        assert (await pin(self, request, context)).lease_id
        made.set()
        await asyncio.Event().wait()

    async with running_nodes() as nodes:
        monkeypatch.setattr(PeerCacheServer, "pin", unanswered)
        one, two = await nodes.prefill("prefill-0"), await nodes.prefill("prefill-1")
        await prefill_once(one, tokens, "a")
        two.core.restorer._lease_ms = 60_000  # longer than this test waits
        restoring = asyncio.create_task(
            two.core.restorer.restore(
                endpoint_of(one), hashes_of(two, tokens), range(10), first_block=0, stats=FetchStats()
            )
        )
        await asyncio.wait_for(made.wait(), WAIT_S)
        assert one.core.lender.leases == 1
        restoring.cancel()
        await asyncio.gather(restoring, return_exceptions=True)
        await eventually(lambda: not one.core.lender.leases)
        await one.wait_idle()
        await two.wait_idle()
