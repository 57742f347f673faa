"""PrefillService over real gRPC with the fake engine: streams, leases, refusals, and nothing left behind."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import weakref
from typing import Any

import grpc
import pytest

from libs.engine.core.fake import expected_tokens
from libs.engine.step.types import SamplingParams
from libs.worker.requests.attempts import AttemptKey
from slipstream.errors import (
    Aborted,
    DeadlineExceeded,
    FailedPrecondition,
    FingerprintMismatch,
    Internal,
    InvalidArgument,
    NotFound,
    Overloaded,
    SlipstreamError,
    Unavailable,
)
from slipstream.rpc.rpc_errors import from_failure, from_rpc_error
from slipstream.v1 import common_pb2, prefill_pb2, prefill_pb2_grpc
from tests.support.host_memory import host_memory
from tests.worker.nodes import (
    BLOCK_TOKENS,
    CHECKSUM,
    WAIT_S,
    Gate,
    Node,
    PrefillCall,
    attempt,
    eventually,
    greedy,
    prefill_request,
    prompt_tokens,
    running_nodes,
)

GREEDY = SamplingParams(temperature=0.0)


def stub_of(node: Node) -> prefill_pb2_grpc.PrefillServiceAsyncStub:
    return prefill_pb2_grpc.PrefillServiceStub(node.channel)


async def watch(node: Node, ticket: prefill_pb2.HandoffTicket) -> list[prefill_pb2.WatchHandoffResponse]:
    request = prefill_pb2.WatchHandoffRequest(handoff_id=ticket.handoff_id, attempt=ticket.attempt)
    return [event async for event in stub_of(node).WatchHandoff(request, timeout=WAIT_S)]


async def release(node: Node, ticket: prefill_pb2.HandoffTicket) -> None:
    await stub_of(node).ReleaseHandoff(prefill_pb2.ReleaseHandoffRequest(handoff_id=ticket.handoff_id))


async def open_ticket(call: PrefillCall) -> prefill_pb2.HandoffTicket:
    return prefill_pb2.HandoffTicket.FromString((await call.opened()).ticket)


def tiers(cached: object) -> dict[int, int]:
    return {c.tier: c.tokens for c in cached}  # type: ignore[attr-defined]


async def test_stream_and_handoff_from_open_to_release() -> None:
    tokens = prompt_tokens(150)
    async with running_nodes() as nodes:
        node = await nodes.prefill()
        call = PrefillCall(node, prefill_request(node, tokens))
        ticket = await open_ticket(call)
        first = await call.first_token()
        assert first.token_id == expected_tokens(node.engine, tokens, GREEDY, n=1)[0]
        assert first.finish_reason == common_pb2.FINISH_REASON_UNSPECIFIED
        progress = [e.progress.computed_tokens for e in call.events if e.HasField("progress")]
        assert progress == sorted(progress)
        assert progress[-1] == 150
        assert len(progress) == 3
        assert len(ticket.blocks) == 38
        assert ticket.prompt_tokens == 150
        assert node.ledger.handoffs == 1
        # A watcher that comes after the fact sees everything from the first block on.
        events = await watch(node, ticket)
        sums = b"".join(e.ready.checksums for e in events if e.HasField("ready"))
        assert len(sums) == 38 * 16
        addresses = [address for e in events if e.HasField("ready") for address in e.ready.addresses]
        for i, (block, address) in enumerate(zip(ticket.blocks, addresses, strict=True)):
            assert CHECKSUM.at(address, block.n_bytes) == sums[16 * i : 16 * i + 16]
        complete = events[-1].complete
        assert complete.first_token_id == first.token_id
        await release(node, ticket)
        await release(node, ticket)
        await node.wait_idle()


async def test_second_prompt_takes_the_first_ones_blocks() -> None:
    tokens = prompt_tokens(64)
    async with running_nodes() as nodes:
        node = await nodes.prefill()
        for number, cached in ((1, {}), (2, {common_pb2.CACHE_TIER_WORKER: 60})):
            call = PrefillCall(node, prefill_request(node, tokens, attempt=attempt(f"r{number}")))
            opened = await call.opened()
            first = await call.first_token()
            assert tiers(opened.cached) == cached
            assert tiers(first.cached) == cached
            assert first.token_id == expected_tokens(node.engine, tokens, GREEDY, n=1)[0]
            await release(node, prefill_pb2.HandoffTicket.FromString(opened.ticket))
        await node.wait_idle()


async def test_prompts_that_come_together_compute_their_common_prefix_once() -> None:
    common = prompt_tokens(240)
    prompts = [common + prompt_tokens(6, seed=n + 1) for n in range(4)]
    async with running_nodes() as nodes:
        node = await nodes.prefill(n_pages=512)
        requests = [prefill_request(node, p, attempt=attempt(f"r{n}")) for n, p in enumerate(prompts)]
        calls = [PrefillCall(node, request) for request in requests]
        opened = [await call.opened() for call in calls]
        firsts = [await call.first_token() for call in calls]
        for prompt, first in zip(prompts, firsts, strict=True):
            assert first.token_id == expected_tokens(node.engine, prompt, GREEDY, n=1)[0]
        assert node.core.counters.snapshot()["slipstream_prefill_tokens_total"] == 240 + 4 * 6
        # Shared blocks count as cached, whether found at once or waited for.
        assert sorted(sum(tiers(first.cached).values()) for first in firsts) == [0, 240, 240, 240]
        for each in opened:
            ticket = prefill_pb2.HandoffTicket.FromString(each.ticket)
            assert (await watch(node, ticket))[-1].HasField("complete")
            await release(node, ticket)
        await node.wait_idle()


async def test_request_that_ends_with_its_first_token_holds_nothing() -> None:
    async with running_nodes() as nodes:
        node = await nodes.prefill()
        call = PrefillCall(node, prefill_request(node, prompt_tokens(20), sampling=greedy(1, top_logprobs=2)))
        ticket = await open_ticket(call)
        first = await call.first_token()
        assert first.finish_reason == common_pb2.FINISH_REASON_LENGTH
        assert len(first.logprobs.top) == 2
        await node.wait_idle()
        (only,) = await watch(node, ticket)
        assert only.complete.finish_reason == common_pb2.FINISH_REASON_LENGTH
        assert not only.complete.HasField("draft_features")  # no step follows it, and it is remembered


async def test_resume_counts_emitted_tokens() -> None:
    """The same seeded request, split anywhere, goes on with the same token."""
    tokens = prompt_tokens(30)
    sampling = SamplingParams(temperature=1.0, seed=7)
    async with running_nodes() as nodes:
        node = await nodes.prefill()
        answer = expected_tokens(node.engine, tokens, sampling, n=6)
        request = prefill_request(
            node, tokens + answer[:5], emitted_tokens=5, sampling=greedy(6, temperature=1.0, seed=7)
        )
        first = await PrefillCall(node, request).first_token()
        assert first.token_id == answer[5]
        # The sixth of six tokens: counted from the first emitted one.
        assert first.finish_reason == common_pb2.FINISH_REASON_LENGTH
        await node.wait_idle()


@pytest.mark.parametrize(
    ("change", "error", "match"),
    [
        ({"prompt": b""}, InvalidArgument, "prompt"),
        ({"prompt": b"abc"}, InvalidArgument, "prompt"),
        ({"block_hashes": bytes(16)}, InvalidArgument, "block_hashes"),
        ({"emitted_tokens": 20}, InvalidArgument, "emitted_tokens"),
        ({"sampling": greedy(0)}, InvalidArgument, "max_tokens"),
        ({"attempt": common_pb2.Attempt()}, InvalidArgument, "request_id"),
        ({"fingerprint": common_pb2.Fingerprint(model="x")}, FingerprintMismatch, "digest, model, template"),
    ],
)
async def test_refusals(change: dict[str, object], error: type[SlipstreamError], match: str) -> None:
    async with running_nodes() as nodes:
        node = await nodes.prefill()
        caught = await PrefillCall(node, prefill_request(node, prompt_tokens(20), **change)).error()
        assert type(caught) is error
        assert match in caught.message
        await node.wait_idle()


async def test_prompt_that_cannot_fit_is_refused_and_the_queue_is_bounded() -> None:
    gate = Gate()
    async with running_nodes() as nodes:
        node = await nodes.prefill(n_pages=8, max_waiting=1, pace_s_per_token=1, sleep=gate)
        long = prefill_request(node, prompt_tokens(100), attempt=attempt("long"))
        assert type(await PrefillCall(node, long).error()) is InvalidArgument
        running = PrefillCall(node, prefill_request(node, prompt_tokens(25)))
        await running.opened()
        waits = PrefillCall(node, prefill_request(node, prompt_tokens(25, seed=1), attempt=attempt("w")))
        await eventually(lambda: node.core.pages.waiting == 1)
        refused = prefill_request(node, prompt_tokens(25, seed=2), attempt=attempt("x"))
        caught = await PrefillCall(node, refused).error()
        assert isinstance(caught, Overloaded)
        assert caught.retry_after_ms > 0
        # Cancelled while it waits: nothing of it remains.
        waits.call.cancel()
        await eventually(lambda: node.core.pages.waiting == 0)
        gate.open()
        await running.first_token()
        await stub_of(node).AbortPrefill(prefill_pb2.AbortPrefillRequest(attempt=attempt()))
        await node.wait_idle()


async def test_duplicate_and_older_attempts_are_refused() -> None:
    gate = Gate()
    async with running_nodes() as nodes:
        node = await nodes.prefill(pace_s_per_token=1, sleep=gate)
        tokens = prompt_tokens(20)
        first = PrefillCall(node, prefill_request(node, tokens, attempt=attempt(number=2, epoch=5)))
        ticket = await open_ticket(first)
        for number, epoch in ((2, 5), (1, 5), (3, 4)):
            again = prefill_request(node, tokens, attempt=attempt(number=number, epoch=epoch))
            assert type(await PrefillCall(node, again).error()) is FailedPrecondition
        # A newer attempt takes the place of the one that runs.
        newer = PrefillCall(node, prefill_request(node, tokens, attempt=attempt(number=3, epoch=5)))
        opening = asyncio.create_task(open_ticket(newer))
        assert isinstance(await first.error(), Aborted)
        gate.allow(1)
        newer_ticket = await opening
        assert isinstance(from_failure((await watch(node, ticket))[-1].failure), Aborted)
        gate.open()
        await newer.first_token()
        await release(node, newer_ticket)
        await node.wait_idle()


async def test_abort_ends_everything_at_once_and_bars_a_late_start() -> None:
    gate = Gate()
    async with running_nodes() as nodes:
        node = await nodes.prefill(pace_s_per_token=1, sleep=gate)
        call = PrefillCall(node, prefill_request(node, prompt_tokens(40)))
        ticket = await open_ticket(call)
        watching = asyncio.create_task(watch(node, ticket))
        abort = asyncio.ensure_future(
            stub_of(node).AbortPrefill(prefill_pb2.AbortPrefillRequest(attempt=attempt()))
        )
        assert isinstance(await call.error(), Aborted)
        assert isinstance(from_failure((await watching)[-1].failure), Aborted)
        gate.open()
        await abort
        assert node.ledger.blocks_held == 0
        await node.wait_idle()
        await stub_of(node).AbortPrefill(prefill_pb2.AbortPrefillRequest(attempt=attempt()))
        await stub_of(node).AbortPrefill(prefill_pb2.AbortPrefillRequest(attempt=attempt("unknown")))
        late = prefill_request(node, prompt_tokens(4), attempt=attempt("unknown"))
        assert isinstance(await PrefillCall(node, late).error(), Aborted)


async def test_cancel_after_open_leaves_the_export_to_its_lease() -> None:
    async with running_nodes() as nodes:
        node = await nodes.prefill()
        call = PrefillCall(node, prefill_request(node, prompt_tokens(40), lease_ms=60_000))
        ticket = await open_ticket(call)
        call.call.cancel()
        events = await watch(node, ticket)
        assert events[-1].HasField("complete")
        assert node.ledger.handoffs == 1
        await release(node, ticket)
        await node.wait_idle()


async def test_lease_runs_out_without_renewals() -> None:
    async with running_nodes() as nodes:
        node = await nodes.prefill()
        for number, lease_ms in enumerate((50, 500, 5_000, 50_000), 1):  # until it is computed before that
            request = prefill_request(
                node, prompt_tokens(40), lease_ms=lease_ms, attempt=attempt(number=number)
            )
            call = PrefillCall(node, request)
            ticket = await open_ticket(call)
            with contextlib.suppress(grpc.aio.AioRpcError):
                await call.first_token()
                break
        await node.wait_idle()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub_of(node).RenewHandoff(prefill_pb2.RenewHandoffRequest(handoff_id=ticket.handoff_id))
        assert isinstance(from_rpc_error(caught.value), NotFound)
        assert node.core.counters.snapshot()["slipstream_handoffs_expired_total"] == number
        assert isinstance(from_failure((await watch(node, ticket))[-1].failure), Unavailable)


async def test_deadline_frees_the_pages() -> None:
    gate = Gate()
    async with running_nodes() as nodes:
        node = await nodes.prefill(pace_s_per_token=1, sleep=gate)
        for number, deadline_ms in enumerate((50, 500, 5_000, 50_000), 1):  # until it is open before that
            request = prefill_request(
                node, prompt_tokens(40), deadline_ms=deadline_ms, attempt=attempt(number=number)
            )
            call = PrefillCall(node, request)
            with contextlib.suppress(grpc.aio.AioRpcError):
                ticket = await open_ticket(call)
                break
        assert isinstance(await call.error(), DeadlineExceeded)
        assert isinstance(from_failure((await watch(node, ticket))[-1].failure), DeadlineExceeded)
        gate.open()
        await node.wait_idle()


async def test_watch_refuses_strangers() -> None:
    async with running_nodes() as nodes:
        node = await nodes.prefill()
        call = PrefillCall(node, prefill_request(node, prompt_tokens(10)))
        ticket = await open_ticket(call)
        await call.first_token()
        ticket.attempt.attempt = 9
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await watch(node, ticket)
        assert isinstance(from_rpc_error(caught.value), FailedPrecondition)
        ticket.handoff_id = "unknown"
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await watch(node, ticket)
        assert isinstance(from_rpc_error(caught.value), NotFound)


async def test_a_broken_step_fails_its_requests_and_the_worker_goes_on() -> None:
    """A page is damaged between two chunks and found by the engine; the request fails, others work."""
    gate = Gate()
    async with running_nodes() as nodes:
        node = await nodes.prefill(pace_s_per_token=1, sleep=gate, step_tokens=2 * BLOCK_TOKENS, max_batch=4)
        call = PrefillCall(node, prefill_request(node, prompt_tokens(40)))
        await open_ticket(call)
        gate.allow(1)
        await eventually(lambda: gate.arrived == 2)
        job = node.service._jobs[AttemptKey("r", 1)]
        at = job._pages[0] * node.core.info.page_bytes
        host_memory(node.core.memory)[at] ^= 0xFF
        gate.open()
        caught = await call.error()
        assert caught.code == "DATA_LOSS"
        await node.wait_idle()
        good = PrefillCall(node, prefill_request(node, prompt_tokens(40, seed=1), attempt=attempt("good")))
        ticket = await open_ticket(good)
        await good.first_token()
        await release(node, ticket)
        await node.wait_idle()


async def test_a_failed_handoff_is_remembered_without_its_prompt() -> None:
    gate = Gate()
    async with running_nodes() as nodes:
        node = await nodes.prefill(pace_s_per_token=1, sleep=gate)
        call = PrefillCall(node, prefill_request(node, prompt_tokens(9)))
        ticket = await open_ticket(call)
        (job,) = node.service._jobs.values()
        job.on_error(Internal("a step failed"))
        assert isinstance(await call.error(), Internal)
        gate.open()
        await node.wait_idle()
        failed = weakref.ref(job)
        del job

        def is_freed() -> bool:
            gc.collect()
            return failed() is None

        await eventually(is_freed, "the job is freed")
        assert isinstance(from_failure((await watch(node, ticket))[-1].failure), Internal)


async def test_an_end_that_comes_with_a_failure_does_not_cut_the_release_short() -> None:
    gate = Gate()
    async with running_nodes() as nodes:
        node = await nodes.prefill(pace_s_per_token=1, sleep=gate)
        call = PrefillCall(node, prefill_request(node, prompt_tokens(9)))
        await eventually(lambda: gate.arrived == 1)  # the engine thread stands: nothing can be released
        (job,) = node.service._jobs.values()
        await eventually(lambda: bool(job._outputs._getters))
        job.on_error(Internal("a step failed"))
        job.end()
        waiting = asyncio.create_task(job.wait_ended())
        assert isinstance(await call.error(), Internal)
        assert not waiting.done()
        gate.open()
        await asyncio.wait_for(waiting, 60)
        assert node.core.thread.ledger.sequences == 0
        await node.wait_idle()


async def test_a_worker_that_closes_ends_the_streams_of_its_routers() -> None:
    """Open streams would make the server wait for its whole grace time."""
    async with running_nodes() as nodes:
        node = await nodes.prefill()
        call: Any = stub_of(node).Prefill()
        await call.write(prefill_pb2.PrefillRequest(starts=[prefill_request(node, prompt_tokens(5))]))
        async with asyncio.timeout(WAIT_S):
            while not (await call.read()).events[-1].HasField("first_token"):
                pass
            await node.service.close()
            assert await call.read() is grpc.aio.EOF
