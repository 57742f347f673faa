"""KV between workers through a real kvstore: blocks are stored after and restored before computing."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from libs.common.checksum import memory_at
from libs.common.rpc.serve import ServiceHost
from libs.common.transport.registered_memory import page_rounded
from libs.engine.core.fake import expected_tokens
from libs.engine.step.types import FullBlock, SamplingParams
from libs.worker.requests.tenant_tag import tenant_tag
from libs.worker.restore.prefix_restore import PrefixRestorer
from slipstream.v1 import (
    common_pb2,
    decode_pb2,
    kvstore_pb2,
    kvstore_pb2_grpc,
    prefill_pb2,
    prefill_pb2_grpc,
)
from tests.support.stubs.partial_servicer import partial_servicer
from tests.worker.kvstore_node import KvstoreNode, running_kvstore
from tests.worker.nodes import (
    SALT,
    WAIT_S,
    Gate,
    Node,
    PrefillCall,
    RouterStream,
    attempt,
    eventually,
    greedy,
    hashes_of,
    packed,
    prefill_request,
    prompt_tokens,
    running_nodes,
    start_request,
)

GREEDY = SamplingParams(temperature=0.0)
WORKER, DRAM = common_pb2.CACHE_TIER_WORKER, common_pb2.CACHE_TIER_DRAM


def by_tier(cached: Any) -> dict[int, int]:
    return {c.tier: c.tokens for c in cached}


async def prefill_once(
    node: Node, kvstore: KvstoreNode | ServiceHost, tokens: list[int], request_id: str, **fields: Any
) -> prefill_pb2.FirstToken:
    """Prefill and release."""
    request = prefill_request(
        node, tokens, attempt=attempt(request_id), kvstore_endpoint=kvstore.endpoint, **fields
    )
    call = PrefillCall(node, request)
    ticket = prefill_pb2.HandoffTicket.FromString((await call.opened()).ticket)
    first = await call.first_token()
    await prefill_pb2_grpc.PrefillServiceStub(node.channel).ReleaseHandoff(
        prefill_pb2.ReleaseHandoffRequest(handoff_id=ticket.handoff_id)
    )
    assert first.token_id == expected_tokens(node.engine, tokens, GREEDY, n=1)[0]
    return first


async def decode_once(
    node: Node, kvstore: KvstoreNode, tokens: list[int], request_id: str, n: int = 8, **fields: Any
) -> decode_pb2.SequenceStats:
    stream = RouterStream(node)
    start = start_request(
        node,
        tokens,
        attempt=attempt(request_id),
        sampling=greedy(n),
        kvstore_endpoint=kvstore.endpoint,
        **fields,
    )
    await stream.call.write(start)
    last = await stream.last(request_id)
    emitted = len(fields.get("emitted", b"")) // 4
    assert stream.tokens(request_id) == expected_tokens(node.engine, tokens, GREEDY, n=n)[emitted:]
    await stream.close()
    return last.stats


async def test_a_worker_continues_from_blocks_of_the_kvstore() -> None:
    tokens = prompt_tokens(102)
    async with running_kvstore() as kvstore, running_nodes() as nodes:
        one, two = await nodes.prefill("prefill-0"), await nodes.prefill("prefill-1")
        assert not by_tier((await prefill_once(one, kvstore, tokens, "a")).cached)
        await one.wait_idle()
        assert kvstore.blocks == 25
        longer = tokens + prompt_tokens(30, seed=1)
        assert by_tier((await prefill_once(two, kvstore, longer, "b")).cached) == {DRAM: 100}
        await two.wait_idle()
        # 25 blocks of the local cache and the 8 that the other worker has stored.
        assert by_tier((await prefill_once(one, kvstore, longer, "c")).cached) == {WORKER: 100, DRAM: 28}
        assert by_tier((await prefill_once(one, kvstore, longer, "d")).cached) == {WORKER: 128}
        await one.wait_idle()
        await kvstore.wait_idle()


async def test_a_prompt_wholly_in_the_kvstore_still_computes_its_last_block() -> None:
    tokens = prompt_tokens(64)
    async with running_kvstore() as kvstore, running_nodes() as nodes:
        one, two = await nodes.prefill("prefill-0"), await nodes.prefill("prefill-1")
        await prefill_once(one, kvstore, tokens, "a")
        await one.wait_idle()
        assert by_tier((await prefill_once(two, kvstore, tokens, "b")).cached) == {DRAM: 60}
        await two.wait_idle()
        await kvstore.wait_idle()


async def test_generated_blocks_are_stored_and_reused() -> None:
    tokens = prompt_tokens(21)
    async with running_kvstore() as kvstore, running_nodes() as nodes:
        decode, prefill = await nodes.decode(), await nodes.prefill()
        await decode_once(decode, kvstore, tokens, "a", n=32, store_generated=True)
        await decode.wait_idle()
        assert kvstore.blocks == 13  # 52 of 53 tokens have KV
        answer = expected_tokens(decode.engine, tokens, GREEDY, n=32)
        next_turn = tokens + answer + prompt_tokens(9, seed=5)
        assert by_tier((await prefill_once(prefill, kvstore, next_turn, "b")).cached) == {DRAM: 52}
        await prefill.wait_idle()
        await kvstore.wait_idle()


async def test_blocks_are_charged_to_the_tenant_of_their_prompt() -> None:
    async with running_kvstore(tenant_share=0.5) as kvstore, running_nodes() as nodes:
        prefill, decode = await nodes.prefill(), await nodes.decode()
        await prefill_once(prefill, kvstore, prompt_tokens(64), "a")
        await decode_once(decode, kvstore, prompt_tokens(21, seed=3), "b", n=32, store_generated=True)
        await prefill.wait_idle()
        await decode.wait_idle()
        table = kvstore.node.store.dram.table
        assert table.quota is not None and kvstore.blocks == 16 + 13
        slot_bytes = page_rounded(prefill.core.info.page_bytes)
        assert table.quota.used_bytes(tenant_tag(SALT)) == 29 * slot_bytes
        await kvstore.wait_idle()


async def test_generated_blocks_that_the_template_drops_are_not_stored() -> None:
    async with running_kvstore() as kvstore, running_nodes() as nodes:
        decode = await nodes.decode()
        await decode_once(decode, kvstore, prompt_tokens(21), "a", n=32)
        await decode.wait_idle()
        assert kvstore.blocks == 5
        await kvstore.wait_idle()


async def test_a_resume_on_another_decode_worker_restores_prompt_and_output() -> None:
    tokens = prompt_tokens(21)
    async with running_kvstore() as kvstore, running_nodes() as nodes:
        one, two = await nodes.decode("decode-0"), await nodes.decode("decode-1")
        await decode_once(one, kvstore, tokens, "a", n=32, store_generated=True)
        await one.wait_idle()
        answer = expected_tokens(one.engine, tokens, GREEDY, n=32)
        stats = await decode_once(two, kvstore, tokens, "b", n=60, emitted=packed(answer))
        assert by_tier(stats.cached) == {DRAM: 52}
        assert stats.kv_bytes_pulled == 13 * two.core.info.page_bytes
        await two.wait_idle()
        await kvstore.wait_idle()


async def test_a_handoff_and_a_restore_in_one_request() -> None:
    tokens = prompt_tokens(90)
    async with running_kvstore() as kvstore, running_nodes() as nodes:
        one, two = await nodes.prefill("prefill-0"), await nodes.prefill("prefill-1")
        decode = await nodes.decode()
        await prefill_once(one, kvstore, tokens, "a")
        await one.wait_idle()
        call = PrefillCall(
            two, prefill_request(two, tokens, attempt=attempt("b"), kvstore_endpoint=kvstore.endpoint)
        )
        ticket = (await call.opened()).ticket
        stream = RouterStream(decode)
        await stream.call.write(start_request(decode, tokens, attempt=attempt("b"), ticket=ticket))
        first = await call.first_token()
        await stream.last("b")
        assert by_tier(first.cached) == {DRAM: 88}
        assert [first.token_id, *stream.tokens("b")] == expected_tokens(two.engine, tokens, GREEDY, n=8)
        for node in (one, two, decode, kvstore):
            await node.wait_idle()
        await stream.close()


async def test_a_damaged_block_of_the_kvstore_is_computed_instead() -> None:
    tokens = prompt_tokens(60)
    async with running_kvstore() as kvstore, running_nodes() as nodes:
        one, two = await nodes.prefill("prefill-0"), await nodes.prefill("prefill-1", step_tokens=64)
        await prefill_once(one, kvstore, tokens, "a")
        await one.wait_idle()
        memory = kvstore.node.store.dram.memory
        memory_at(memory.address, memory.n_bytes)[100] ^= 1
        first = await prefill_once(two, kvstore, tokens, "b")
        # All blocks are in one batch of reads, so none of them is used.
        assert not by_tier(first.cached)
        assert two.core.counters.snapshot()["slipstream_kv_checksum_failures_total"] == 1
        await two.wait_idle()
        await kvstore.wait_idle()


async def test_requests_succeed_without_the_kvstore_and_no_page_stays_pinned() -> None:
    tokens = prompt_tokens(60)
    async with running_nodes() as nodes:
        prefill, decode = await nodes.prefill(), await nodes.decode()
        async with running_kvstore() as kvstore:
            gone = kvstore
        assert not by_tier((await prefill_once(prefill, gone, tokens, "a")).cached)
        stats = await decode_once(decode, gone, tokens, "b", store_generated=True)
        assert not by_tier(stats.cached)
        await prefill.wait_idle()
        await decode.wait_idle()
        assert prefill.core.writer.dropped_blocks > 0


class MalformedStore(kvstore_pb2_grpc.KvstoreServiceServicer):
    """A kvstore whose answers have hashes of a wrong length."""

    async def Reserve(self, request: Any, context: Any) -> kvstore_pb2.ReserveResponse:
        return kvstore_pb2.ReserveResponse(reservation_id="r", wanted=b"short")


async def test_blocks_are_dropped_where_a_kvstore_answers_with_malformed_hashes() -> None:
    store, host = partial_servicer(MalformedStore), ServiceHost("127.0.0.1:0")
    kvstore_pb2_grpc.add_KvstoreServiceServicer_to_server(store, host.server)
    await host.start([])
    async with running_nodes() as nodes:
        node = await nodes.prefill()
        writer, blocks = node.core.writer, hashes_of(node, prompt_tokens(60))
        await prefill_once(node, host, prompt_tokens(60), "a")
        await node.wait_idle()
        assert (writer.dropped_blocks, writer.reservations) == (len(blocks), 0)
    await host.stop(grace_s=0)


async def test_a_full_kvstore_stores_the_blocks_that_fit() -> None:
    async with running_kvstore(dram_bytes=1 << 20) as kvstore, running_nodes() as nodes:
        prefill = await nodes.prefill(row_bytes=16 << 10)
        await prefill_once(prefill, kvstore, prompt_tokens(200), "a")
        await prefill.wait_idle()
        assert 0 < kvstore.blocks < 50
        await kvstore.wait_idle()


@pytest.mark.parametrize("how", ["abort", "cancel"])
async def test_a_request_that_ends_during_its_restore_frees_its_pages_afterwards(how: str) -> None:
    """The pages of a running read are released only after its end."""
    tokens = prompt_tokens(100)
    gate = Gate()
    async with running_kvstore() as kvstore, running_nodes() as nodes:
        one, two = await nodes.prefill("prefill-0"), await nodes.prefill("prefill-1")
        await prefill_once(one, kvstore, tokens, "a")
        await one.wait_idle()
        # The engine thread is blocked: the restore can start only after the gate opens.
        two.core.thread.submit(lambda _: gate(0))
        request = prefill_request(two, tokens, kvstore_endpoint=kvstore.endpoint)
        call = PrefillCall(two, request)
        await eventually(lambda: two.core.pages.waiting == 1)
        gate.open()
        await eventually(lambda: bool(two.core.restorer.pins or two.service._attempts.running == 0))
        if how == "abort":
            await prefill_pb2_grpc.PrefillServiceStub(two.channel).AbortPrefill(
                prefill_pb2.AbortPrefillRequest(attempt=attempt())
            )
        else:
            call.call.cancel()
            await asyncio.sleep(0)
            await prefill_pb2_grpc.PrefillServiceStub(two.channel).AbortPrefill(
                prefill_pb2.AbortPrefillRequest(attempt=attempt())
            )
        await two.wait_idle()
        await kvstore.wait_idle()


async def test_a_reused_page_is_not_stored_under_its_former_hash() -> None:
    async with running_kvstore() as kvstore, running_nodes() as nodes:
        node = await nodes.decode(n_pages=7)
        stream = RouterStream(node)
        for name, seed in (("a", 1), ("b", 2)):  # the second prompt needs the pages of the first
            start = start_request(node, prompt_tokens(20, seed=seed), attempt=attempt(name))
            await stream.call.write(start)
            await stream.last(name)
            await node.wait_idle()
        old, new = (hashes_of(node, prompt_tokens(20, seed=seed)) for seed in (1, 2))
        (held,) = await node.core.thread.call(lambda engine: engine.pin_blocks([FullBlock(new[0], 0)]))
        await node.core.thread.call(lambda engine: engine.unpin([held.page]))
        writer = node.core.writer
        writer.offer(kvstore.endpoint, [FullBlock(old[0], held.page)])
        await writer.flush(timeout_s=WAIT_S)
        assert (writer.dropped_blocks, kvstore.blocks) == (1, 0)
        writer.offer(kvstore.endpoint, [held])
        await writer.flush(timeout_s=WAIT_S)
        assert (writer.dropped_blocks, kvstore.blocks) == (1, 1)
        await node.wait_idle()
        await kvstore.wait_idle()
        await stream.close()


async def test_restored_blocks_are_not_offered_to_the_kvstore_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tokens = prompt_tokens(102)
    async with running_kvstore() as kvstore, running_nodes() as nodes:
        one, two = await nodes.prefill("prefill-0"), await nodes.prefill("prefill-1")
        await prefill_once(one, kvstore, tokens, "a")
        await one.wait_idle()
        offered: list[int] = []
        monkeypatch.setattr(two.core.writer, "offer", lambda _, blocks, **_rest: offered.append(len(blocks)))
        assert by_tier((await prefill_once(two, kvstore, tokens, "b")).cached) == {DRAM: 100}
        assert offered == [0, 0]  # restored blocks are not offered, and no block became full
        assert by_tier((await prefill_once(two, kvstore, tokens, "c")).cached) == {WORKER: 100}
        assert offered[2] == 25
        await two.wait_idle()


async def test_a_pin_is_renewed_while_its_blocks_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    # A machine that stalls for a whole lease loses the pin: retry with a longer lease.
    for lease_ms in (1500, 6000, 24_000):
        with monkeypatch.context() as patched:
            if await pin_outlives_its_lease(patched, lease_ms):
                return
    raise AssertionError("each pin was lost")


async def pin_outlives_its_lease(monkeypatch: pytest.MonkeyPatch, lease_ms: int) -> bool:
    """Return whether a pin still existed and was used after two lease times."""
    tokens, renewed = prompt_tokens(102), [0]
    async with running_kvstore() as kvstore, running_nodes() as nodes:
        one, two = await nodes.prefill("prefill-0"), await nodes.prefill("prefill-1")
        await prefill_once(one, kvstore, tokens, "a")
        await one.wait_idle()
        core, may_read = two.core, asyncio.Event()
        core.restorer = PrefixRestorer(
            core.fetcher,
            core.peers,
            transport_kind=core.transport.kind,
            instance=core.instance,
            fingerprint=core.fingerprint,
            lease_ms=lease_ms,
            floor_ms=WAIT_S * 1e3,
        )
        read, renew = core.transport.read, kvstore.node.store.renew_pin

        async def slow_read(*args: Any, **named: Any) -> None:
            await may_read.wait()
            await read(*args, **named)

        def counted(lease_id: str, *, requested_ms: int) -> None:
            assert requested_ms == lease_ms
            renew(lease_id, requested_ms=requested_ms)
            renewed[0] += 1

        monkeypatch.setattr(core.transport, "read", slow_read)
        monkeypatch.setattr(kvstore.node.store, "renew_pin", counted)
        prefilling = asyncio.create_task(prefill_once(two, kvstore, tokens, "b"))
        await eventually(lambda: kvstore.node.store.pins == 1)
        await eventually(lambda: renewed[0] >= 7 or not kvstore.node.store.pins)  # longer than two leases
        lives = kvstore.node.store.pins == 1
        may_read.set()
        used = by_tier((await prefilling).cached) == {DRAM: 100}
        await two.wait_idle()
        await kvstore.wait_idle()
        return lives and used
