"""Prefill and decode together: the whole handoff over gRPC and a KV transport, without a kvstore."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any
from unittest.mock import Mock

import pytest

from libs.common.checksum import KvChecksum, memory_at
from libs.engine.core.fake import expected_tokens
from libs.engine.step.types import SamplingParams
from libs.worker.engine.page_exporter import ExportedPage
from services.prefill.handoff_registry import HandoffRegistry
from services.prefill.service import PrefillService
from slipstream.errors import NotFound
from slipstream.rpc.rpc_errors import from_failure
from slipstream.v1 import common_pb2, decode_pb2, decode_pb2_grpc, prefill_pb2, prefill_pb2_grpc
from tests.worker.nodes import (
    BLOCK_TOKENS,
    Gate,
    Node,
    Nodes,
    PrefillCall,
    RouterStream,
    abort_request,
    attempt,
    eventually,
    greedy,
    packed,
    prefill_request,
    prompt_tokens,
    running_nodes,
    start_request,
)

GREEDY = SamplingParams(temperature=0.0)
ERROR = common_pb2.FINISH_REASON_ERROR


async def both_idle(*nodes: Node) -> None:
    for node in nodes:
        await node.wait_idle()


async def test_prompt_is_pulled_and_continued() -> None:
    tokens = prompt_tokens(150)
    async with running_nodes() as nodes:
        prefill, decode = await nodes.prefill(), await nodes.decode()
        call = PrefillCall(prefill, prefill_request(prefill, tokens))
        ticket = (await call.opened()).ticket
        stream = RouterStream(decode)
        await stream.call.write(start_request(decode, tokens, ticket=ticket))
        first = await call.first_token()
        last = await stream.last()
        assert last.finish_reason == common_pb2.FINISH_REASON_LENGTH
        answer = [first.token_id, *stream.tokens()]
        assert answer == expected_tokens(prefill.engine, tokens, GREEDY, n=8)
        assert last.stats.kv_bytes_pulled == 38 * decode.core.info.page_bytes
        assert last.stats.generated_tokens == 7
        assert [d.running for d in stream.deltas["r"]].count(True) == 1
        await both_idle(prefill, decode)
        await stream.close()


async def test_a_handoff_larger_than_the_staging_memory_passes_through_it() -> None:
    tokens = prompt_tokens(150)
    async with running_nodes() as nodes:
        prefill, decode = await nodes.prefill(kv_staging_bytes=5 * 256), await nodes.decode()
        page_bytes = prefill.core.info.page_bytes
        n_slots, n_blocks = prefill.core.exporter.n_slots, 38
        assert n_slots == 5 * 256 // page_bytes < n_blocks
        for request in ("one", "two"):
            call = PrefillCall(prefill, prefill_request(prefill, tokens, attempt=attempt(request)))
            ticket = (await call.opened()).ticket
            stream = RouterStream(decode)
            start = start_request(decode, tokens, ticket=ticket, attempt=attempt(request))
            await stream.call.write(start)
            first = await call.first_token()
            last = await stream.last(request)
            assert last.finish_reason == common_pb2.FINISH_REASON_LENGTH
            answer = [first.token_id, *stream.tokens(request)]
            assert answer == expected_tokens(prefill.engine, tokens, GREEDY, n=8)
            await stream.close()
        await both_idle(prefill, decode)


async def test_a_worker_without_the_clusters_key_uses_no_kv_of_others() -> None:
    tokens = prompt_tokens(60)
    async with running_nodes() as nodes:
        prefill, decode = await nodes.prefill(), await nodes.decode(checksum=KvChecksum(b"another key"))
        call = PrefillCall(prefill, prefill_request(prefill, tokens))
        ticket = (await call.opened()).ticket
        await call.first_token()
        stream = RouterStream(decode)
        await stream.call.write(start_request(decode, tokens, ticket=ticket))
        assert (await stream.last()).failure.reason == "DataCorrupt"
        assert not stream.tokens()
        await both_idle(prefill, decode)
        await stream.close()


async def test_only_missing_blocks_are_pulled() -> None:
    tokens = prompt_tokens(61)
    async with running_nodes() as nodes:
        prefill, decode = await nodes.prefill(), await nodes.decode()
        stream = RouterStream(decode)
        pulled: list[int] = []
        for number in (1, 2):
            name = attempt(f"r{number}")
            call = PrefillCall(prefill, prefill_request(prefill, tokens, attempt=name))
            ticket = (await call.opened()).ticket
            await stream.call.write(start_request(decode, tokens, ticket=ticket, attempt=name))
            first = await call.first_token()
            last = await stream.last(f"r{number}")
            assert prefill.core.exporter.n_exported == sum(pulled) + (1 if pulled else 16)
            pulled.append(last.stats.kv_bytes_pulled // decode.core.info.page_bytes)
            answer = [first.token_id, *stream.tokens(f"r{number}")]
            assert answer == expected_tokens(prefill.engine, tokens, GREEDY, n=8)
        assert pulled == [16, 1]
        await both_idle(prefill, decode)
        await stream.close()


async def test_blocks_travel_while_the_rest_is_computed() -> None:
    gate = Gate()
    tokens = prompt_tokens(100)
    async with running_nodes() as nodes:
        prefill = await nodes.prefill(
            pace_s_per_token=1, sleep=gate, step_tokens=8 * BLOCK_TOKENS, max_batch=4
        )
        decode = await nodes.decode()
        call = PrefillCall(prefill, prefill_request(prefill, tokens))
        ticket = (await call.opened()).ticket
        stream = RouterStream(decode)
        await stream.call.write(start_request(decode, tokens, ticket=ticket))
        gate.allow(2)
        await eventually(
            lambda: (
                decode.core.counters.snapshot().get("slipstream_kv_bytes_pulled_total", 0)
                == 16 * decode.core.info.page_bytes
            )
        )
        assert gate.arrived == 3
        assert not stream.frames
        gate.open()
        first = await call.first_token()
        await stream.last()
        assert [first.token_id, *stream.tokens()] == expected_tokens(prefill.engine, tokens, GREEDY, n=8)
        await both_idle(prefill, decode)
        await stream.close()


async def test_request_that_ends_with_its_first_token() -> None:
    tokens = prompt_tokens(20)
    async with running_nodes() as nodes:
        prefill, decode = await nodes.prefill(), await nodes.decode()
        call = PrefillCall(prefill, prefill_request(prefill, tokens, sampling=greedy(1)))
        ticket = (await call.opened()).ticket
        await call.first_token()
        stream = RouterStream(decode)
        start = start_request(decode, tokens, ticket=ticket, sampling=greedy(2))
        await stream.call.write(start)
        last = await stream.last()
        assert last.finish_reason == common_pb2.FINISH_REASON_LENGTH
        assert not stream.tokens()
        await both_idle(prefill, decode)
        await stream.close()


async def test_resume_from_a_handoff_with_emitted_tokens() -> None:
    tokens = prompt_tokens(30)
    sampling = SamplingParams(temperature=1.0, seed=3)
    params = greedy(12, temperature=1.0, seed=3)
    async with running_nodes() as nodes:
        prefill, decode = await nodes.prefill(), await nodes.decode()
        answer = expected_tokens(prefill.engine, tokens, sampling, n=12)
        request = prefill_request(prefill, tokens + answer[:5], emitted_tokens=5, sampling=params)
        call = PrefillCall(prefill, request)
        ticket = (await call.opened()).ticket
        stream = RouterStream(decode)
        start = start_request(decode, tokens, ticket=ticket, emitted=packed(answer[:5]), sampling=params)
        await stream.call.write(start)
        first = await call.first_token()
        await stream.last()
        assert [first.token_id, *stream.tokens()] == answer[5:]
        await both_idle(prefill, decode)
        await stream.close()


async def prepared(nodes: Nodes, gate: Gate) -> tuple[Node, Node, PrefillCall, RouterStream, bytes]:
    """A prompt of which prefill has computed one chunk, and a decode worker that pulls it."""
    tokens = prompt_tokens(100)
    prefill = await nodes.prefill(pace_s_per_token=1, sleep=gate, step_tokens=8 * BLOCK_TOKENS, max_batch=4)
    decode = await nodes.decode()
    call = PrefillCall(prefill, prefill_request(prefill, tokens))
    ticket = (await call.opened()).ticket
    stream = RouterStream(decode)
    gate.allow(1)
    await stream.call.write(start_request(decode, tokens, ticket=ticket))
    await eventually(lambda: decode.core.pages.running == 1)
    return prefill, decode, call, stream, ticket


async def test_a_damaged_block_is_refused_and_never_run() -> None:
    gate = Gate()
    async with running_nodes() as nodes:
        prefill = await nodes.prefill()
        decode = await nodes.decode()
        tokens = prompt_tokens(60)
        call = PrefillCall(prefill, prefill_request(prefill, tokens))
        ticket = (await call.opened()).ticket
        await call.first_token()
        export = prefill.core.exporter.export

        async def damaged(pages: Any, *, is_read: bool) -> list[ExportedPage]:
            exported = await export(pages, is_read=is_read)
            memory_at(exported[5].address + 7, 1)[0] ^= 1
            return exported

        prefill.core.exporter.export = damaged  # type: ignore[assignment]
        stream = RouterStream(decode)
        await stream.call.write(start_request(decode, tokens, ticket=ticket))
        last = await stream.last()
        assert last.finish_reason == ERROR
        assert last.failure.reason == "DataCorrupt"
        assert decode.core.counters.snapshot()["slipstream_kv_checksum_failures_total"] == 1
        assert not stream.tokens()
        await both_idle(prefill, decode)
        await stream.close()
        gate.open()


@pytest.mark.parametrize("is_late", [False, True])
async def test_prefill_that_fails_fails_the_sequence(monkeypatch: pytest.MonkeyPatch, is_late: bool) -> None:
    if is_late:  # the report of read blocks meets a handoff that has ended: the watch says why
        monkeypatch.setattr(HandoffRegistry, "renew", Mock(side_effect=NotFound("it has ended")))
    gate = Gate()
    async with running_nodes() as nodes:
        prefill, decode, _, stream, _ = await prepared(nodes, gate)
        stub = prefill_pb2_grpc.PrefillServiceStub(prefill.channel)
        abort = asyncio.ensure_future(stub.AbortPrefill(prefill_pb2.AbortPrefillRequest(attempt=attempt())))
        last = await stream.last()
        assert last.failure.reason == "Unavailable", "it was aborted there, not here: to be tried again"
        gate.open()
        await abort
        await both_idle(prefill, decode)
        await stream.close()


async def test_prefill_that_dies_is_unavailable() -> None:
    gate = Gate()
    async with running_nodes() as nodes:
        prefill, decode, _, stream, _ = await prepared(nodes, gate)
        await prefill.host.stop(grace_s=0)
        last = await stream.last()
        assert from_failure(last.failure).code == "UNAVAILABLE"
        await decode.wait_idle()
        await stream.close()
        gate.open()


@pytest.mark.parametrize("how", ["abort", "rpc", "stream", "deadline"])
async def test_ends_while_blocks_are_pulled(how: str) -> None:
    gate = Gate()
    async with running_nodes() as nodes:
        tokens = prompt_tokens(100)
        prefill = await nodes.prefill(
            pace_s_per_token=1, sleep=gate, step_tokens=8 * BLOCK_TOKENS, max_batch=4
        )
        decode = await nodes.decode()
        call = PrefillCall(prefill, prefill_request(prefill, tokens))
        ticket = (await call.opened()).ticket
        stream = RouterStream(decode)
        deadline_ms = 300 if how == "deadline" else 0
        gate.allow(1)
        await stream.call.write(start_request(decode, tokens, ticket=ticket, deadline_ms=deadline_ms))
        await eventually(
            lambda: (
                decode.core.counters.snapshot().get("slipstream_kv_bytes_pulled_total", 0) > 0
                or "r" in stream.deltas  # on a slow machine the deadline comes first
            )
        )
        if how == "abort":
            await stream.call.write(abort_request())
            assert (await stream.last()).finish_reason == common_pb2.FINISH_REASON_ABORTED
        elif how == "rpc":
            stub = decode_pb2_grpc.DecodeServiceStub(decode.channel)
            await stub.AbortDecode(decode_pb2.AbortDecodeRequest(attempt=attempt()))
            assert decode.ledger.blocks_held == 0
            assert (await stream.last()).finish_reason == common_pb2.FINISH_REASON_ABORTED
        elif how == "stream":
            await stream.close()
        else:
            assert (await stream.last()).failure.reason == "DeadlineExceeded"
        await decode.wait_idle()
        # The exporter stops computing blocks that no decode worker pulls.
        gate.open()
        await prefill.wait_idle()
        await stream.close()


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        ("fingerprint", "FingerprintMismatch"),
        ("transport", "FailedPrecondition"),
        ("blocks", "InvalidArgument"),
        ("prompt_tokens", "InvalidArgument"),
        ("n_bytes", "InvalidArgument"),
        ("garbage", "InvalidArgument"),
        ("sequence", "InvalidArgument"),
    ],
)
async def test_tickets_that_do_not_fit_are_refused(damage: str, reason: str) -> None:
    tokens = prompt_tokens(20)
    async with running_nodes() as nodes:
        prefill, decode = await nodes.prefill(), await nodes.decode()
        call = PrefillCall(prefill, prefill_request(prefill, tokens, lease_ms=50))
        ticket = prefill_pb2.HandoffTicket.FromString((await call.opened()).ticket)
        await call.first_token()
        if damage == "fingerprint":
            ticket.fingerprint.model = "other"
        elif damage == "transport":
            ticket.transport = common_pb2.TRANSPORT_MOONCAKE
        elif damage == "blocks":
            del ticket.blocks[0]
        elif damage == "prompt_tokens":
            ticket.prompt_tokens += 1
        elif damage == "n_bytes":
            ticket.blocks[0].n_bytes += 1
        raw = b"\xff\xff" if damage == "garbage" else ticket.SerializeToString()
        name = attempt("r2" if damage == "sequence" else "r")
        stream = RouterStream(decode)
        await stream.call.write(start_request(decode, tokens, ticket=raw, attempt=name))
        last = await stream.last(name.request_id)
        assert last.failure.reason == reason
        await both_idle(prefill, decode)
        await stream.close()


@pytest.mark.parametrize("whose", ["the same attempt", "another request"])
async def test_a_ticket_that_was_used_or_belongs_to_another_sequence_is_refused(whose: str) -> None:
    tokens = prompt_tokens(60)
    async with running_nodes() as nodes:
        prefill, one, two = await nodes.prefill(), await nodes.decode("one"), await nodes.decode("two")
        call = PrefillCall(prefill, prefill_request(prefill, tokens))
        ticket = (await call.opened()).ticket
        await call.first_token()
        if whose == "the same attempt":
            used = RouterStream(one)
            await used.call.write(start_request(one, tokens, ticket=ticket))
            assert (await used.last()).finish_reason == common_pb2.FINISH_REASON_LENGTH
            await used.close()
            await both_idle(prefill, one)
            replayed, name = ticket, attempt()
        else:  # any reader of the ticket
            changed = prefill_pb2.HandoffTicket.FromString(ticket)
            changed.attempt.CopyFrom(name := attempt("stranger"))
            replayed = changed.SerializeToString()
        stream = RouterStream(two)
        await stream.call.write(start_request(two, tokens, ticket=replayed, attempt=name))
        last = await stream.last(name.request_id)
        assert last.finish_reason == ERROR and last.stats.kv_bytes_pulled == 0
        assert last.failure.reason == "FailedPrecondition", last.failure
        assert not stream.tokens(name.request_id)
        await stream.close()
        await both_idle(prefill, one, two)


@pytest.mark.parametrize("deadline_ms", [0, 60_000])
async def test_the_watch_ends_with_the_request(monkeypatch: pytest.MonkeyPatch, deadline_ms: int) -> None:
    left: list[float | None] = []
    plain: Any = PrefillService.WatchHandoff

    async def watched(self: PrefillService, request: Any, context: Any) -> AsyncIterator[Any]:
        left.append(context.time_remaining())
        async with aclosing(plain(self, request, context)) as events:
            async for event in events:
                yield event

    monkeypatch.setattr(PrefillService, "WatchHandoff", watched)
    tokens = prompt_tokens(20)
    async with running_nodes() as nodes:
        prefill, decode = await nodes.prefill(), await nodes.decode()
        call = PrefillCall(prefill, prefill_request(prefill, tokens))
        ticket = (await call.opened()).ticket
        stream = RouterStream(decode)
        await stream.call.write(start_request(decode, tokens, ticket=ticket, deadline_ms=deadline_ms))
        assert (await stream.last()).finish_reason == common_pb2.FINISH_REASON_LENGTH
        await both_idle(prefill, decode)
        await stream.close()
    if deadline_ms:
        assert left[0] is not None
        assert 0 < left[0] <= 60
    else:
        assert left == [None]
