"""Speculation end to end: drafts save steps and change no token, with any drafter and with none."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import threading
import time
from collections.abc import Sequence
from typing import NoReturn

import numpy as np
import pytest

from libs.engine.core.fake import expected_tokens
from libs.engine.core.fake_head import FakeHead
from libs.engine.step.draft_head import ContextRows
from libs.engine.step.types import SamplingParams
from services.decode.draft_gate import DraftGate
from services.decode.draft_state import DraftLimits
from services.decode.speculation import RemoteSpeculation
from slipstream.errors import Internal
from slipstream.v1 import common_pb2, decode_pb2
from tests.drafter.nodes import running_drafter
from tests.worker.nodes import (
    WAIT_S,
    Node,
    PrefillCall,
    RouterStream,
    attempt,
    eventually,
    greedy,
    prefill_request,
    prompt_tokens,
    running_nodes,
    script,
    start_request,
)

GREEDY = SamplingParams(temperature=0.0)
# Generous waits: what a step may wait for is tested with DraftState.
LIMITS = DraftLimits(draft_tokens=3, wait_floor_ms=60_000.0, wait_cap_ms=60_000.0, patience_ms=60_000.0)


def guess(token: int) -> int:
    return (token * 7 + 3) % 1000


def speculation_with(
    endpoint: str | None, limits: DraftLimits = LIMITS, gate: DraftGate | None = None
) -> RemoteSpeculation:
    async def find() -> str | None:
        return endpoint

    return RemoteSpeculation(find, limits, gate=gate)


async def trust(node: Node, speculation: RemoteSpeculation) -> None:
    """From now on the drafter is known to answer, and answers are waited for."""
    await eventually(lambda: speculation.connected)
    async with asyncio.timeout(WAIT_S):
        for i in itertools.count():
            await generate(node, prompt_tokens(5), f"trust{i}/{time.monotonic_ns()}", 50)
            if speculation._state.round_trip_ms is not None:
                return


async def generate(
    node: Node, tokens: list[int], request_id: str = "r", n: int = 40, **fields: object
) -> tuple[list[int], decode_pb2.SequenceStats]:
    stream = RouterStream(node)
    start = start_request(node, tokens, attempt=attempt(request_id), sampling=greedy(n), **fields)
    await stream.call.write(start)
    last = await stream.last(request_id)
    await stream.close()
    return stream.tokens(request_id), last.stats


async def test_right_drafts_save_steps_and_change_nothing() -> None:
    tokens = prompt_tokens(20)
    async with running_drafter(FakeHead(guess=guess)) as drafter, running_nodes() as nodes:
        speculation = speculation_with(drafter.host.endpoint)
        node = await nodes.decode(speculation=speculation, next_token=script)
        await trust(node, speculation)
        answer, stats = await generate(node, tokens)
        assert answer == expected_tokens(node.engine, tokens, GREEDY, n=40)
        assert stats.accepted_drafts >= 25
        assert stats.decode_steps <= 15
        plain, without = await generate(node, tokens, "plain", disable_drafts=True)
        assert plain == answer
        assert (without.decode_steps, without.proposed_drafts) == (40, 0)
        await node.wait_idle()
        await eventually(lambda: drafter.batcher.sequences == 0)


async def continued(prefill: Node, decode: Node, tokens: list[int]) -> decode_pb2.SequenceStats:
    """The statistics of 40 tokens after a handoff, which are right. Afterwards the workers hold nothing."""
    call = PrefillCall(prefill, prefill_request(prefill, tokens, sampling=greedy(41)))
    ticket = (await call.opened()).ticket
    first = await call.first_token()
    stream = RouterStream(decode)
    await stream.call.write(start_request(decode, tokens, ticket=ticket, sampling=greedy(41)))
    last = await stream.last()
    assert last.finish_reason == common_pb2.FINISH_REASON_LENGTH
    assert [first.token_id, *stream.tokens()] == expected_tokens(prefill.engine, tokens, GREEDY, n=41)
    await stream.close()
    await prefill.wait_idle()
    await decode.wait_idle()
    return last.stats


async def test_first_step_after_a_handoff_has_drafts() -> None:
    """The decode worker reads the prompt's features with its KV."""
    tokens = prompt_tokens(30)
    async with running_drafter(FakeHead(guess=guess)) as drafter, running_nodes() as nodes:
        speculation = speculation_with(drafter.host.endpoint)
        decode = await nodes.decode(speculation=speculation, next_token=script)
        prefill = await nodes.prefill(next_token=script)
        await trust(decode, speculation)
        stats = await continued(prefill, decode, tokens)
        assert stats.decode_steps == 10
        assert stats.accepted_drafts == 30


async def test_wrong_drafts_change_nothing() -> None:
    tokens = prompt_tokens(20)
    async with running_drafter(FakeHead(guess=lambda token: token)) as drafter, running_nodes() as nodes:
        speculation = speculation_with(drafter.host.endpoint)
        node = await nodes.decode(speculation=speculation)
        await trust(node, speculation)
        answer, stats = await generate(node, tokens)
        assert answer == expected_tokens(node.engine, tokens, GREEDY, n=40)
        assert stats.proposed_drafts > 50
        assert stats.accepted_drafts < 5
        await node.wait_idle()


def test_rows_wait_as_long_as_drafts_do_not_pay() -> None:
    for gate, is_sent in ((DraftGate(), False), (DraftGate(is_forced=True), True)):
        speculation = speculation_with(None, DraftLimits(), gate)
        speculation._state.connect()
        rows = ContextRows("s", 0, np.ones(2, np.uint32), np.ones((2, 4), np.float32))
        speculation.open("s", rows)
        assert not speculation.drafts()
        assert speculation._state.has_message is is_sent


async def test_a_message_that_cannot_be_made_ends_the_stream_at_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The drafter, which has not ended it, gets another one."""
    rows = ContextRows("s", 0, np.ones(2, np.uint32), np.ones((2, 4), np.float32))

    def fail(*_: object) -> NoReturn:
        raise Internal("rows of another width")

    async with running_drafter(FakeHead(guess=guess)) as drafter:
        speculation = speculation_with(drafter.host.endpoint, gate=DraftGate(is_forced=True))
        speculation.start()
        await eventually(lambda: speculation.connected)
        with monkeypatch.context() as patch:
            patch.setattr("services.decode.speculation.as_request", fail)
            speculation.open("s", rows)
            speculation.drafts()
            await eventually(lambda: "rows of another width" in caplog.text)
            assert "speculation failed" in caplog.text and not speculation.connected
        await eventually(lambda: speculation.connected)
        await speculation.close()


async def test_many_sequences_share_one_request() -> None:
    async with running_drafter(FakeHead(guess=guess)) as drafter, running_nodes() as nodes:
        speculation = speculation_with(drafter.host.endpoint)
        node = await nodes.decode(speculation=speculation, next_token=script, n_pages=256)
        await eventually(lambda: speculation.connected)
        stream = RouterStream(node)
        prompts = {f"r{i}": prompt_tokens(10 + i, seed=i) for i in range(8)}
        for name, tokens in prompts.items():
            await stream.call.write(start_request(node, tokens, attempt=attempt(name), sampling=greedy(60)))
        for name, tokens in prompts.items():
            await stream.last(name)
            assert stream.tokens(name) == expected_tokens(node.engine, tokens, GREEDY, n=60)
        await stream.close()
        await node.wait_idle()
        await eventually(lambda: drafter.batcher.sequences == 0)


async def test_killed_drafter_slows_and_changes_nothing_and_its_successor_is_used() -> None:
    tokens = prompt_tokens(20)
    async with contextlib.AsyncExitStack() as first, running_nodes() as nodes:
        drafter = await first.enter_async_context(running_drafter(FakeHead(guess=guess)))
        endpoint = drafter.host.endpoint
        speculation = speculation_with(endpoint)
        node = await nodes.decode(speculation=speculation, next_token=script, n_pages=256)
        await trust(node, speculation)  # or a busy machine may have no draft in time
        stream = RouterStream(node)
        await stream.call.write(start_request(node, tokens, sampling=greedy(300)))
        await stream.until(lambda: len(stream.tokens()) > 50)
        await first.aclose()
        await eventually(lambda: not speculation.connected)
        stats = (await stream.last()).stats
        assert stream.tokens() == expected_tokens(node.engine, tokens, GREEDY, n=300)
        assert stats.accepted_drafts > 0
        await node.wait_idle()
        async with running_drafter(FakeHead(guess=guess), listen=endpoint):
            await trust(node, speculation)
            again, stats = await generate(node, tokens, "again")
            assert again == expected_tokens(node.engine, tokens, GREEDY, n=40)
            assert stats.accepted_drafts >= 25
            await node.wait_idle()
        await stream.close()


class StuckHead(FakeHead):
    """Answers, then hangs until `release` is set."""

    def __init__(self) -> None:
        super().__init__(guess=guess)
        self.stuck = False
        self.release = threading.Event()

    def propose_batch(
        self, seq_ids: Sequence[str], n_drafts: int, *, min_confidence: float = 0.0
    ) -> dict[str, list[int]]:
        if self.stuck:
            assert self.release.wait(WAIT_S)
        return super().propose_batch(seq_ids, n_drafts)


async def test_hanging_drafter_costs_its_patience_once() -> None:
    tokens = prompt_tokens(20)
    head = StuckHead()
    limits = DraftLimits(draft_tokens=3, wait_cap_ms=20.0, patience_ms=30.0)
    async with running_drafter(head) as drafter, running_nodes() as nodes:
        speculation = speculation_with(drafter.host.endpoint, limits)
        node = await nodes.decode(speculation=speculation, next_token=script)
        await trust(node, speculation)
        head.stuck = True
        answer, stats = await generate(node, tokens, n=100)
        assert answer == expected_tokens(node.engine, tokens, GREEDY, n=100)
        assert stats.draft_waits_missed >= 90
        missed = node.core.counters.snapshot()["slipstream_draft_waits_missed_total"]
        assert missed >= stats.draft_waits_missed
        assert speculation.drafts_due >= speculation.drafts_missed >= stats.draft_waits_missed
        # It hangs still; the sequence is done nevertheless.
        assert not head.release.is_set()
        head.release.set()
        head.stuck = False
        await node.wait_idle()
        await eventually(lambda: drafter.batcher.sequences == 0)
