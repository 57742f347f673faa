"""DecodeService alone: prompts computed here, many sequences on one stream, every kind of end."""

from __future__ import annotations

import asyncio
from functools import partial

import numpy as np
import pytest

from libs.common.cluster.worker_service import held
from libs.engine.core.fake import expected_tokens
from libs.engine.step.types import SamplingParams
from slipstream.errors import Internal
from slipstream.rpc.rpc_errors import from_failure
from slipstream.v1 import common_pb2, decode_pb2, decode_pb2_grpc
from tests.worker.nodes import (
    Gate,
    RouterStream,
    abort_request,
    attempt,
    eventually,
    greedy,
    packed,
    prompt_tokens,
    running_nodes,
    start_request,
    step_until,
)

GREEDY = SamplingParams(temperature=0.0)


def ended(stream: RouterStream, request_id: str) -> bool:
    return any(delta.finish_reason for delta in stream.deltas.get(request_id, ()))


async def test_many_sequences_share_frames() -> None:
    gate = Gate()
    async with running_nodes() as nodes:
        node = await nodes.decode(pace_s_per_token=1, sleep=gate, n_pages=128)
        stream = RouterStream(node)
        prompts = {f"r{i}": prompt_tokens(5 + i, seed=i) for i in range(6)}
        params = greedy(40)
        for name, tokens in prompts.items():
            await stream.call.write(start_request(node, tokens, attempt=attempt(name), sampling=params))
        await step_until(gate, lambda: node.core.pages.running == 6)
        await step_until(gate, lambda: any(len(frame.packed_tokens) == 6 * 4 for frame in stream.frames))
        gate.open()
        for name, tokens in prompts.items():
            last = await stream.last(name)
            assert last.finish_reason == common_pb2.FINISH_REASON_LENGTH
            assert stream.tokens(name) == expected_tokens(node.engine, tokens, GREEDY, n=40)
            assert last.stats.generated_tokens == 40
            assert [d.running for d in stream.deltas[name]] == [True] + [False] * (
                len(stream.deltas[name]) - 1
            )
        assert [frame.step for frame in stream.frames] == list(range(1, len(stream.frames) + 1))
        for frame in stream.frames:
            assert len({d.handle for d in frame.deltas}) == len(frame.deltas)
        await node.wait_idle()
        await stream.close()


async def test_streams_get_their_own_sequences_only() -> None:
    async with running_nodes() as nodes:
        node = await nodes.decode()
        a, b = RouterStream(node), RouterStream(node)
        await a.call.write(start_request(node, prompt_tokens(5), attempt=attempt("a")))
        await b.call.write(start_request(node, prompt_tokens(6), attempt=attempt("b")))
        await a.last("a")
        await b.last("b")
        assert (set(a.deltas), set(b.deltas)) == ({"a"}, {"b"})
        await a.close()
        await b.close()
        await node.wait_idle()


async def test_half_closed_stream_ends_with_its_last_sequence() -> None:
    async with running_nodes() as nodes:
        node = await nodes.decode()
        stream = RouterStream(node)
        await stream.call.write(start_request(node, prompt_tokens(5)))
        await stream.call.done_writing()
        await asyncio.wait_for(stream._reader, 60)
        assert stream.deltas["r"][-1].finish_reason
        await node.wait_idle()


async def test_logprobs_stop_tokens_and_cached_prefix() -> None:
    tokens = prompt_tokens(33)
    async with running_nodes() as nodes:
        node = await nodes.decode()
        answer = expected_tokens(node.engine, tokens, GREEDY, n=8)
        stream = RouterStream(node)
        params = greedy(8, ignore_eos=False, stop_token_ids=[answer[4]], top_logprobs=3)
        for name in ("r1", "r2"):
            await stream.call.write(start_request(node, tokens, sampling=params, attempt=attempt(name)))
            last = await stream.last(name)
            assert last.finish_reason == common_pb2.FINISH_REASON_STOP
            assert stream.tokens(name) == answer[:5]
            logprobs = [p for d in stream.deltas[name] for p in d.logprobs]
            assert [len(p.top) for p in logprobs] == [3] * 5
            cached = {c.tier: c.tokens for c in last.stats.cached}
            assert cached == ({} if name == "r1" else {common_pb2.CACHE_TIER_WORKER: 32})
            (first,) = [d for d in stream.deltas[name] if d.running]
            assert first.HasField("prompt_start") and first.prompt_start.restore_ms >= 0
            assert {c.tier: c.tokens for c in first.prompt_start.cached} == cached
        await node.wait_idle()
        await stream.close()


async def test_log_probabilities_of_a_prompt_computed_here_come_before_its_tokens() -> None:
    """Beside a sequence that does not ask. The second one finds the prompt cached and computes it again."""
    tokens = prompt_tokens(600)
    async with running_nodes() as nodes:
        node = await nodes.decode(n_pages=512)
        stream = RouterStream(node)
        for name in ("r1", "r2"):
            start = start_request(node, tokens, sampling=greedy(8, prompt_logprobs=2), attempt=attempt(name))
            await stream.call.write(start)
            await stream.call.write(start_request(node, tokens[:40], attempt=attempt(f"{name}-plain")))
            last = await stream.last(name)
            await stream.last(f"{name}-plain")
            assert not last.stats.cached
            assert stream.tokens(name) == expected_tokens(node.engine, tokens, GREEDY, n=8)
            rows = [row for d in stream.deltas[name] for row in d.prompt_logprobs]
            with_tokens = [bool(d.tokens) for d in stream.deltas[name] if d.tokens or d.prompt_logprobs]
            assert sorted(with_tokens) == with_tokens
            assert np.frombuffer(b"".join(row.ranks for row in rows), "<u4").tolist() == tokens[1:]
            assert not any(d.prompt_logprobs for d in stream.deltas[f"{name}-plain"])
        await node.wait_idle()
        await stream.close()


async def test_prompts_computed_on_the_decode_worker_share_their_prefix() -> None:
    common = prompt_tokens(240)
    prompts = {f"r{n}": common + prompt_tokens(6, seed=n + 1) for n in range(4)}
    async with running_nodes() as nodes:
        node = await nodes.decode(n_pages=512)
        stream = RouterStream(node)
        for name, tokens in prompts.items():
            await stream.call.write(start_request(node, tokens, attempt=attempt(name)))
        for name, tokens in prompts.items():
            last = await stream.last(name)
            assert stream.tokens(name) == expected_tokens(node.engine, tokens, GREEDY, n=8)
            assert sum(c.tokens for c in last.stats.cached) in (0, 240)
        assert node.core.counters.snapshot()["slipstream_prefill_tokens_total"] == 240 + 4 * 6
        await node.wait_idle()
        await stream.close()


async def test_resume_goes_on_with_the_same_text() -> None:
    tokens = prompt_tokens(10)
    sampling = SamplingParams(temperature=1.0, seed=11)
    async with running_nodes() as nodes:
        node = await nodes.decode()
        answer = expected_tokens(node.engine, tokens, sampling, n=12)
        stream = RouterStream(node)
        for split in (0, 1, 5, 11):
            name = f"r{split}"
            start = start_request(
                node,
                tokens,
                attempt=attempt(name),
                emitted=packed(answer[:split]),
                sampling=greedy(12, temperature=1.0, seed=11),
            )
            await stream.call.write(start)
            await stream.last(name)
            assert stream.tokens(name) == answer[split:]
        await node.wait_idle()
        await stream.close()


async def test_duplicates_aborts_and_refusals_touch_one_sequence_only() -> None:
    gate = Gate()
    async with running_nodes() as nodes:
        node = await nodes.decode(pace_s_per_token=1, sleep=gate)
        stream, other = RouterStream(node), RouterStream(node)
        tokens = prompt_tokens(5)
        await stream.call.write(start_request(node, tokens, attempt=attempt("good")))
        await stream.call.write(start_request(node, tokens, attempt=attempt("gone")))
        await eventually(lambda: node.ledger.sequences == 2)
        await other.call.write(start_request(node, tokens, attempt=attempt("good")))
        refused = await other.last("good")
        assert refused.failure.reason == "FailedPrecondition"
        bad = start_request(node, tokens, attempt=attempt("bad"), fingerprint=common_pb2.Fingerprint())
        await stream.call.write(bad)
        assert (await stream.last("bad")).failure.reason == "FingerprintMismatch"
        await stream.call.write(start_request(node, [], attempt=attempt("empty")))
        assert (await stream.last("empty")).failure.field == "prompt"
        await stream.call.write(abort_request("gone"))
        await stream.call.write(decode_pb2.DecodeRequest(aborts=[0, 0xFFFF_FFFF]))  # unknown handles
        stub = decode_pb2_grpc.DecodeServiceStub(node.channel)
        await stub.AbortDecode(decode_pb2.AbortDecodeRequest(attempt=attempt("unknown")))
        assert (await stream.last("gone")).finish_reason == common_pb2.FINISH_REASON_ABORTED
        gate.open()
        await stream.last("good")
        assert stream.tokens("good") == expected_tokens(node.engine, tokens, GREEDY, n=8)
        late = start_request(node, tokens, attempt=attempt("unknown"))
        await stream.call.write(late)
        assert (await stream.last("unknown")).failure.reason == "Aborted"
        await node.wait_idle()
        await stream.close()
        await other.close()


async def test_abort_and_start_in_one_breath() -> None:
    async with running_nodes() as nodes:
        node = await nodes.decode()
        stream = RouterStream(node)
        for i in range(20):
            await stream.call.write(start_request(node, prompt_tokens(9), attempt=attempt(f"r{i}")))
            await stream.call.write(abort_request(f"r{i}"))
        for i in range(20):
            last = await stream.last(f"r{i}")
            assert last.finish_reason in (
                common_pb2.FINISH_REASON_ABORTED,
                common_pb2.FINISH_REASON_LENGTH,
            )
        await node.wait_idle()
        await stream.close()


@pytest.mark.parametrize("how", ["stream", "rpc", "deadline"])
async def test_ends_while_it_generates(how: str) -> None:
    gate = Gate()
    async with running_nodes() as nodes:
        node = await nodes.decode(pace_s_per_token=1, sleep=gate)
        stream = RouterStream(node)

        def under_way_or_over(request_id: str) -> bool:
            return len(stream.tokens(request_id)) >= 2 or ended(stream, request_id)

        # A deadline that is over before there is a token is none while it generates: then a later one.
        for number, deadline_ms in enumerate((200, 2_000, 20_000) if how == "deadline" else (0,), 1):
            name, params = attempt(f"r{number}"), greedy(200)
            start = start_request(
                node, prompt_tokens(9), attempt=name, sampling=params, deadline_ms=deadline_ms
            )
            await stream.call.write(start)
            gate.allow(3)
            await stream.until(partial(under_way_or_over, name.request_id))
            if len(stream.tokens(name.request_id)) >= 2:
                break
        assert held(node.ledger) or how == "deadline"
        if how == "stream":
            await stream.close()
            await eventually(lambda: not node.service._router_streams.streams)
            gate.open()
        elif how == "rpc":
            stub = decode_pb2_grpc.DecodeServiceStub(node.channel)
            done = asyncio.ensure_future(stub.AbortDecode(decode_pb2.AbortDecodeRequest(attempt=name)))
            assert (await stream.last(name.request_id)).finish_reason == common_pb2.FINISH_REASON_ABORTED
            gate.open()
            await done
            assert node.ledger.blocks_held == 0
        else:
            last = await stream.last(name.request_id)
            assert last.failure.reason == "DeadlineExceeded"
            gate.open()
        await node.wait_idle()
        await stream.close()


async def test_overload_is_refused_and_starvation_ends_one_sequence() -> None:
    gate = Gate()
    async with running_nodes() as nodes:
        node = await nodes.decode(n_pages=6, max_waiting=1, pace_s_per_token=1, sleep=gate)
        stream = RouterStream(node)
        long = greedy(100)

        def running(n: int) -> bool:
            return node.core.pages.running == n

        for i in range(2):
            tokens = prompt_tokens(7, seed=i)
            await stream.call.write(start_request(node, tokens, attempt=attempt(f"r{i}"), sampling=long))
            await step_until(gate, partial(running, i + 1))
        tokens = prompt_tokens(20, seed=9)
        await stream.call.write(start_request(node, tokens, attempt=attempt("waits"), sampling=greedy(2)))
        await eventually(lambda: node.core.pages.waiting == 1)
        await stream.call.write(start_request(node, tokens, attempt=attempt("refused")))
        refused = await stream.last("refused")
        assert refused.failure.reason == "Overloaded"
        assert refused.failure.retry_after_ms > 0
        gate.open()
        # Six pages cannot hold two growing sequences: one fails by itself, then the other fails or ends.
        failures = [(await stream.last(f"r{i}")).failure.reason for i in range(2)]
        assert "OutOfPages" in failures
        await stream.last("waits")
        assert stream.tokens("waits") == expected_tokens(node.engine, tokens, GREEDY, n=2)
        await node.wait_idle()
        await stream.close()


async def test_router_that_does_not_read_gets_everything_later() -> None:
    async with running_nodes() as nodes:
        node = await nodes.decode(n_pages=600)
        call = decode_pb2_grpc.DecodeServiceStub(node.channel).Decode()
        tokens = prompt_tokens(5)
        await call.write(start_request(node, tokens, sampling=greedy(1000, top_logprobs=20)))
        await eventually(lambda: bool(node.service._router_streams.streams))
        (stream,) = node.service._router_streams.streams
        waiting: list[int] = []

        def done() -> bool:
            waiting.append(len(stream.events))
            return not node.service._sequences and node.core.pages.running == 0

        await eventually(done)
        assert max(waiting) <= 1
        received: list[int] = []
        async for frame in call:
            for delta in frame.deltas:
                received += memoryview(delta.tokens).cast("I").tolist()
                assert len(delta.logprobs) == len(delta.tokens) // 4
            if frame.deltas[-1].finish_reason:
                break
        assert received == expected_tokens(node.engine, tokens, GREEDY, n=1000)
        call.cancel()
        await node.wait_idle()


async def test_an_end_that_comes_with_a_failure_does_not_cut_the_release_short() -> None:
    gate = Gate()
    async with running_nodes() as nodes:
        node = await nodes.decode(pace_s_per_token=1, sleep=gate)
        stream = RouterStream(node)
        await stream.call.write(start_request(node, prompt_tokens(9)))
        await eventually(lambda: gate.arrived == 1)  # the engine thread stands: nothing can be released
        (sequence,) = node.service._sequences.values()
        await stream.running()
        sequence.on_error(Internal("a step failed"))
        sequence.end()
        waiting = asyncio.create_task(sequence.wait_ended())
        assert (await stream.last()).finish_reason == common_pb2.FINISH_REASON_ERROR
        assert not waiting.done()
        gate.open()
        await asyncio.wait_for(waiting, 60)
        assert node.core.thread.ledger.sequences == 0
        await node.wait_idle()
        await stream.close()


async def test_a_start_that_raises_fails_its_own_sequence_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    async with running_nodes() as nodes:
        node = await nodes.decode()
        stream = RouterStream(node)

        def broken(*_: object, **__: object) -> None:
            raise RuntimeError("a defect")

        with monkeypatch.context() as patched:
            patched.setattr("services.decode.service.plan_decode", broken)
            await stream.call.write(start_request(node, prompt_tokens(5), attempt=attempt("a")))
            last = await stream.last("a")
        assert isinstance(from_failure(last.failure), Internal)
        assert "defect" not in last.failure.message
        await stream.call.write(start_request(node, prompt_tokens(5), attempt=attempt("a", 2)))
        await stream.until(lambda: stream.deltas["a"][-1].finish_reason == common_pb2.FINISH_REASON_LENGTH)
        await node.wait_idle()
        await stream.close()
