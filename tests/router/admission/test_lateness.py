"""Requests with a time limit: tried alone, else refused by what is the cause, their prompt or others."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import aiohttp
import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.router.admission.controller import AdmissionController
from services.router.admission.forecast import Capacity
from services.router.admission.types import (
    BUSY_MESSAGE,
    AdmissionDecision,
    AdmissionLimits,
    AdmissionRequest,
    Priority,
    Verdict,
)
from services.router.request.model_card import ModelCard
from services.router.server import RouterServer
from slipstream.async_client import AsyncClient
from slipstream.errors import ContextExceeded, DeadlineExceeded
from tests.router.conftest import eventually, open_router
from tests.router.support.fake_cluster import FakeCluster

LIVE = [priority for priority in Priority if priority is not Priority.JOB]
NOW_MS = 1_000.0
# 100 s for a prompt of 1,000 characters: what comes before the decision takes less on any machine.
SLOW = Capacity(prefill_tokens_per_ms=0.0025, decode_sequences=64)
LONG: Any = [{"role": "user", "content": "Where is my order? " * 53}]


def _offer(
    tokens: int, left_ms: float, capacity: Capacity, *, n_running: int, priority: Priority = Priority.DEFAULT
) -> AdmissionDecision:
    """Beside `n_running` requests of as many tokens."""
    controller = AdmissionController(AdmissionLimits())
    for index in range(n_running):
        controller.offer(AdmissionRequest(f"r{index}", "other", prefill_tokens=tokens), capacity, 0.0)
        controller.first_token(f"r{index}", 0.0)
    assert controller.running == n_running
    ask = AdmissionRequest("k", "t", priority, prefill_tokens=tokens, deadline_ms=NOW_MS + left_ms)
    refusal = controller.refuses(ask, capacity, NOW_MS)
    decision = controller.offer(ask, capacity, NOW_MS)
    assert refusal == (decision if decision.verdict is Verdict.REFUSED else None)
    return decision


CASES = {
    "tokens": st.integers(0, 100_000),
    "left_ms": st.floats(-10.0, 1e6),
    "rate": st.floats(1e-6, 1e3),
    "workers": st.integers(1, 4),
}


@given(**CASES, priority=st.sampled_from(list(Priority)))
def test_what_finds_nothing_running_is_tried_whatever_the_estimate(
    tokens: int, left_ms: float, rate: float, workers: int, priority: Priority
) -> None:
    """One slow prompt makes the estimate: without a try, it would refuse all longer ones for good."""
    capacity = Capacity(prefill_tokens_per_ms=rate, prefill_workers=workers)
    decision = _offer(tokens, left_ms, capacity, n_running=0, priority=priority)
    assert decision.verdict is Verdict.ADMITTED
    estimate_ms = tokens * workers / rate
    assert decision.late_ms in (0.0, pytest.approx(estimate_ms))
    assert bool(decision.late_ms) == (bool(tokens) and NOW_MS + estimate_ms > NOW_MS + left_ms)


@given(**CASES, priority=st.sampled_from(LIVE), n_running=st.integers(1, 3))
def test_beside_others_the_prompt_or_the_others_are_the_cause(
    tokens: int, left_ms: float, rate: float, workers: int, priority: Priority, n_running: int
) -> None:
    capacity = Capacity(prefill_tokens_per_ms=rate, prefill_workers=workers)
    decision = _offer(tokens, left_ms, capacity, n_running=n_running, priority=priority)
    estimate_ms, limits = tokens * workers / rate, AdmissionLimits()
    if NOW_MS + estimate_ms <= NOW_MS + left_ms:
        assert decision.verdict is Verdict.ADMITTED and not decision.late_ms
    elif estimate_ms > 2 * max(NOW_MS + left_ms - NOW_MS, 0.0):
        assert (decision.verdict, decision.retry_after_ms) == (Verdict.REFUSED, 0)
        assert decision.late_ms == pytest.approx(estimate_ms)
        job = _offer(tokens, left_ms, capacity, n_running=n_running, priority=Priority.JOB)
        assert job.verdict is Verdict.REFUSED and not job.late_ms  # it is tried again
    else:
        assert decision.verdict is Verdict.REFUSED and not decision.late_ms
        assert limits.min_retry_after_ms <= decision.retry_after_ms <= limits.max_retry_after_ms


@given(**CASES, more_ms=st.floats(0.0, 1e6), n_running=st.integers(0, 2))
def test_a_longer_limit_is_never_worse(
    tokens: int, left_ms: float, rate: float, workers: int, more_ms: float, n_running: int
) -> None:
    capacity = Capacity(prefill_tokens_per_ms=rate, prefill_workers=workers)
    ranks = []
    for each_ms in (left_ms, left_ms + more_ms):
        decision = _offer(tokens, each_ms, capacity, n_running=n_running)
        ranks.append((decision.verdict is Verdict.ADMITTED, not decision.late_ms))
    assert ranks[0] <= ranks[1]


def test_short_prompts_refuse_no_long_one_before_one_was_tried() -> None:
    """Their rate is that of their fixed part: 10 tokens in 5 ms, where 10,000 take 1 s."""
    controller, short = AdmissionController(AdmissionLimits()), Capacity(prefill_tokens_per_ms=2.0)
    for index in range(80):
        controller.offer(AdmissionRequest(f"r{index}", "other", prefill_tokens=10), short, NOW_MS)
        controller.first_token(f"r{index}", NOW_MS)

    def offer(key: str, tokens: int, capacity: Capacity) -> AdmissionDecision:
        ask = AdmissionRequest(key, "t", prefill_tokens=tokens, deadline_ms=NOW_MS + 2_000.0)
        return controller.offer(ask, capacity, NOW_MS)

    assert offer("a", 10_000, short).verdict is Verdict.ADMITTED
    assert offer("b", 10, short).verdict is Verdict.ADMITTED  # the estimate of the first delays no others
    assert offer("c", 10_000, short).verdict is Verdict.REFUSED  # one try is enough
    controller.first_token("a", NOW_MS)
    assert offer("d", 10_000, Capacity(prefill_tokens_per_ms=10.0)).verdict is Verdict.ADMITTED


async def _ask(
    router: RouterServer, limit_ms: int, messages: Any = LONG
) -> tuple[int, Mapping[str, str], str]:
    async with aiohttp.ClientSession(f"http://{router.http_endpoint}") as http:
        headers, body = {"x-request-timeout-ms": str(limit_ms)}, {"messages": messages, "max_tokens": 1}
        async with http.post("/v1/chat/completions", json=body, headers=headers) as answer:
            said = await answer.json()
            return answer.status, answer.headers, said.get("error", {}).get("message", "")


async def test_a_spoilt_estimate_locks_nothing_out_of_an_idle_cluster(
    cluster: FakeCluster, card: ModelCard, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with open_router(cluster, card) as router, AsyncClient(router.host.endpoint) as client:
        monkeypatch.setattr(router.manager.gate, "capacity", lambda: Capacity(prefill_tokens_per_ms=1e-4))
        assert (await client.chat(LONG, timeout_s=120.0, max_tokens=1)).finish_reason == "length"
        await eventually(lambda: not router.manager.held)
        status, _, _ = await _ask(router, 100_000)
        assert status == 200


async def test_a_try_that_fails_names_the_time_left_and_the_estimate(
    cluster: FakeCluster, card: ModelCard, monkeypatch: pytest.MonkeyPatch
) -> None:
    for worker in cluster.prefills:
        worker.gate.clear()
    try:
        async with open_router(cluster, card) as router:
            monkeypatch.setattr(router.manager.gate, "capacity", lambda: SLOW)
            status, headers, message = await _ask(router, 1_000)
            assert (status, headers.get("x-should-retry"), headers.get("Retry-After")) == (504, "false", None)
            assert message.startswith("the request's deadline passed: the time limit leaves ")
            assert message.endswith(" ms on an idle cluster")
    finally:
        for worker in cluster.prefills:
            worker.gate.set()


async def test_a_limit_that_no_idle_cluster_meets_is_refused_as_such_beside_others(
    cluster: FakeCluster, card: ModelCard, monkeypatch: pytest.MonkeyPatch
) -> None:
    for worker in cluster.decodes:
        worker.gate.clear()
    async with open_router(cluster, card) as router, AsyncClient(router.host.endpoint) as client:
        first = asyncio.create_task(client.chat(LONG))
        try:
            await eventually(lambda: any(worker.requests for worker in cluster.prefills))
            assert router.manager.gate.controller.running == 1
            monkeypatch.setattr(router.manager.gate, "capacity", lambda: SLOW)
            n_before = sum(len(worker.requests) for worker in cluster.prefills)
            status, headers, message = await _ask(router, 30_000)
            assert (status, headers.get("x-should-retry"), headers.get("Retry-After")) == (504, "false", None)
            assert message.startswith("the time limit leaves ") and "the prompt takes about 100" in message
            with pytest.raises(DeadlineExceeded, match="on an idle cluster"):
                await client.chat(LONG, timeout_s=30.0)
            # A prompt that no time limit helps is refused for its length.
            overlong = [{"role": "user", "content": "Where is my order? " * card.model_context_tokens}]
            with pytest.raises(ContextExceeded):
                await client.chat(overlong, timeout_s=30.0)
            # With a limit near the estimate others may be the cause.
            status, headers, message = await _ask(router, 90_000)
            assert (status, message) == (429, BUSY_MESSAGE)
            assert "Retry-After" in headers
            assert sum(len(worker.requests) for worker in cluster.prefills) == n_before
        finally:
            for worker in cluster.decodes:
                worker.gate.set()
            await first
