"""Worker failures: a request continues on other workers with the same text or gets one typed error."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest

from libs.common.cluster.placements import InMemoryPlacements
from libs.common.cluster.worker_record import Role
from services.router.options import RouterOptions
from services.router.request.model_card import ModelCard
from services.router.server import RouterServer
from slipstream import errors
from slipstream.async_client import AsyncClient
from tests.router.conftest import HELLO, WAIT_S, eventually, open_router
from tests.router.support.fake_cluster import FakeCluster
from tests.router.support.fake_model import FakeModel
from tests.router.support.fake_workers import FINGERPRINT


async def expected(client: AsyncClient, **arguments: Any) -> str:
    """Return the text of a run without faults."""
    text: str = (await client.chat(HELLO, seed=1, **arguments)).text
    assert len(text) > 10
    return text


@pytest.mark.parametrize("fault", ["fail_before_ticket", "fail_before_token"])
async def test_a_failed_prefill_is_retried_on_another_worker(
    fault: str, client: AsyncClient, cluster: FakeCluster
) -> None:
    before = await client.chat(HELLO, seed=1)
    assert before.stats is not None
    broken = next(worker for worker in cluster.prefills if worker.instance == before.stats.prefill_worker)
    setattr(broken, fault, errors.Unavailable("gone"))
    attempts = []
    for _ in range(3):  # the first attempt starts at the worker that holds the prompt
        reply = await client.chat(HELLO, seed=1)
        assert reply.text == before.text
        assert reply.stats is not None
        assert reply.stats.prefill_worker != broken.instance
        attempts.append(reply.stats.attempts)
    assert attempts[0] == 2
    await eventually(lambda: not cluster.held)


@pytest.mark.parametrize("fault", ["fail_after_tokens", "break_after_tokens"])
@pytest.mark.parametrize("after", [3, 12])
async def test_a_failed_decode_stream_is_resumed_on_another_worker(
    fault: str, after: int, client: AsyncClient, cluster: FakeCluster
) -> None:
    before = await client.chat(HELLO, seed=1)
    assert before.stats is not None
    setattr(
        next(worker for worker in cluster.decodes if worker.instance == before.stats.decode_worker),
        fault,
        after,
    )
    attempts: list[int] = []
    while len(attempts) < 40 and 2 not in attempts:  # until an attempt starts there
        reply = await client.chat(HELLO, seed=1)
        assert reply.text == before.text
        assert reply.usage is not None
        assert reply.usage.completion_tokens == 25
        assert reply.stats is not None
        attempts.append(reply.stats.attempts)
    assert max(attempts) == 2
    resumed = [start for worker in cluster.decodes for start in worker.starts if start.attempt.attempt == 2]
    assert all(len(start.emitted) // 4 >= after for start in resumed)
    await eventually(lambda: not cluster.held)


async def test_the_text_is_whole_if_both_decode_workers_fail_in_turn(
    client: AsyncClient, cluster: FakeCluster
) -> None:
    text = await expected(client)
    for worker in cluster.decodes:
        worker.fail_after_tokens = 9
    reply = await client.chat(HELLO, seed=1)
    assert reply.text == text
    assert reply.stats is not None
    assert reply.stats.attempts == 3


async def test_a_request_survives_the_crash_of_its_decode_worker(
    client: AsyncClient, cluster: FakeCluster
) -> None:
    text = await expected(client)
    for worker in cluster.decodes:
        worker.gate.clear()
    stream = client.stream_chat(HELLO, seed=1)
    events = aiter(stream)
    await anext(events)
    await eventually(lambda: any(worker.held for worker in cluster.decodes))  # prefill sent the first token
    victim = next(worker for worker in cluster.decodes if worker.held)
    await victim.kill()
    for worker in cluster.decodes:
        worker.gate.set()
    assert [event async for event in events]
    assert stream.reply.text == text


async def test_without_prefill_workers_decode_computes_the_prompt(
    cluster: FakeCluster, card: ModelCard
) -> None:
    async with open_router(cluster, card) as router, AsyncClient(router.host.endpoint) as client:
        text = await expected(client)
        for worker in cluster.prefills:
            await worker.kill()
        reply = await client.chat(HELLO, seed=1)
        assert reply.text == text
        assert reply.stats is not None
        assert reply.stats.prefill_worker == ""
        assert "the decode worker computes the prompt" in reply.stats.reason


async def test_a_request_that_crashes_two_workers_is_quarantined(
    client: AsyncClient, cluster: FakeCluster, router: RouterServer
) -> None:
    for worker in cluster.decodes:
        worker.refuse = errors.Internal("a step failed")
    with pytest.raises(errors.Quarantined):
        await client.chat(HELLO)
    assert sum(len(worker.starts) for worker in cluster.decodes) == 2
    for worker in cluster.decodes:
        worker.refuse = None
    with pytest.raises(errors.Quarantined):  # the same request under another id
        await client.chat(HELLO)
    assert sum(len(worker.starts) for worker in cluster.decodes) == 2
    assert (await client.chat([{"role": "user", "content": "Something else"}])).finish_reason == "stop"
    await eventually(lambda: not cluster.held)
    assert not router.manager.context.failover.quarantine.unproven


async def test_attempts_with_progress_do_not_count_against_the_attempt_limit(
    client: AsyncClient, cluster: FakeCluster
) -> None:
    """Each attempt adds three tokens and fails."""
    text = await expected(client)
    for worker in cluster.decodes:
        worker.fail_after_tokens = 3
    reply = await client.chat(HELLO, seed=1)
    assert reply.text == text
    assert reply.stats is not None
    assert reply.stats.attempts > 5


async def test_full_workers_give_overloaded_with_a_retry_time(
    client: AsyncClient, cluster: FakeCluster
) -> None:
    for worker in cluster.prefills:
        worker.fail_before_ticket = errors.OutOfPages("no pages", retry_after_ms=700)
    with pytest.raises(errors.OutOfPages) as refused:
        await client.chat(HELLO)
    assert refused.value.retry_after_ms == 700
    assert not any(worker.starts for worker in cluster.decodes)


async def test_an_invalid_argument_from_a_worker_is_not_retried(
    client: AsyncClient, cluster: FakeCluster
) -> None:
    for worker in cluster.prefills:
        worker.fail_before_ticket = errors.InvalidArgument("prompt", "is too long for this worker")
    with pytest.raises(errors.InvalidArgument):
        await client.chat(HELLO)
    assert sum(len(worker.requests) for worker in cluster.prefills) == 1


async def test_an_empty_fleet_is_unavailable_at_once(model: FakeModel, card: ModelCard) -> None:
    async with (
        FakeCluster(model, prefills=0, decodes=0) as cluster,
        open_router(cluster, card) as router,
        AsyncClient(router.host.endpoint) as client,
    ):
        with pytest.raises(errors.Unavailable, match="no decode worker is ready"):
            await client.chat(HELLO)


async def test_a_new_request_waits_for_workers_that_were_there_a_moment_ago(
    model: FakeModel, card: ModelCard
) -> None:
    async with (
        FakeCluster(model, prefills=1, decodes=1) as cluster,
        open_router(cluster, card) as router,
        AsyncClient(router.host.endpoint, resume_within_s=0.0) as client,
    ):
        text = await expected(client)
        record = cluster.decodes[0].worker
        await cluster.discovery.withdraw(record)
        await eventually(lambda: not router.fleet.ready)
        waiting = asyncio.create_task(client.chat(HELLO, seed=1))
        await eventually(lambda: router.manager.held == 1)
        assert not waiting.done()
        cluster.discovery.announce(record)
        assert (await waiting).text == text


async def test_an_outage_that_lasts_refuses_new_requests(model: FakeModel, card: ModelCard) -> None:
    async with (
        FakeCluster(model, prefills=1, decodes=1) as cluster,
        open_router(cluster, card, recovery_wait_s=0.2) as router,
        AsyncClient(router.host.endpoint, resume_within_s=0.0) as client,
    ):
        await expected(client)
        await cluster.discovery.withdraw(cluster.decodes[0].worker)
        await eventually(lambda: router.fleet.outage_s > 0.2)
        with pytest.raises(errors.Unavailable, match="no decode worker is ready"):
            await client.chat(HELLO, seed=1)
        await eventually(lambda: not router.manager.held)


async def test_a_new_router_knows_the_running_cluster_before_it_serves(
    cluster: FakeCluster, card: ModelCard, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("services.router.server._LOOK_ALONE_S", WAIT_S)
    monkeypatch.setattr("services.router.server._CONNECT_ALONE_S", WAIT_S)
    server = RouterServer(
        card, cluster.discovery, InMemoryPlacements(), RouterOptions(instance="router-0", silence_s=WAIT_S)
    )
    try:
        await server.start()
        assert server.fleet.ready
    finally:
        await server.stop(grace_s=0.2)


async def test_a_restarted_worker_is_used_again(client: AsyncClient, cluster: FakeCluster) -> None:
    """A placed request waits for the restart of the only decode worker."""
    text = await expected(client)
    await cluster.decodes[1].stop()
    for worker in cluster.decodes:
        worker.gate.clear()
    stream = client.stream_chat(HELLO, seed=1)
    events = aiter(stream)
    await anext(events)
    await cluster.decodes[0].kill()
    replacement = cluster.add_decode("decode-0")
    rest = asyncio.create_task(_drain(events))
    await replacement.start()
    await rest
    assert stream.reply.text == text


async def _drain(events: AsyncIterator[Any]) -> None:
    async for _ in events:
        pass


@pytest.mark.parametrize("moment", ["prefilling", "decoding"])
async def test_a_disconnected_client_ends_its_request_on_all_workers(
    moment: str, client: AsyncClient, cluster: FakeCluster, router: RouterServer
) -> None:
    for worker in cluster.engines:
        worker.gate.clear()
    if moment == "decoding":
        for prefill in cluster.prefills:
            prefill.gate.set()
    stream = client.stream_chat(HELLO)
    task = asyncio.create_task(_drain(aiter(stream)))
    holders = cluster.prefills if moment == "prefilling" else cluster.decodes
    await eventually(lambda: any(worker.held for worker in holders))
    stream.close()
    await asyncio.gather(task, return_exceptions=True)
    await eventually(lambda: not cluster.held and not router.manager.held)
    assert not router.fleet.tokens_in_flight


async def test_stopping_the_router_ends_and_releases_all_requests(
    cluster: FakeCluster, card: ModelCard
) -> None:
    for worker in cluster.decodes:
        worker.gate.clear()
    async with open_router(cluster, card) as router:
        client = AsyncClient(router.host.endpoint, resume_within_s=0)  # no other router exists
        running = asyncio.create_task(client.chat(HELLO))
        await eventually(lambda: router.manager.held == 1)
    with pytest.raises(errors.SlipstreamError):
        await running
    await eventually(lambda: not cluster.held)
    await client.close()


async def test_requests_leave_a_silent_worker(cluster: FakeCluster, card: ModelCard) -> None:
    """The worker neither answers nor reports its load over an open connection, as under SIGSTOP."""
    async with (
        open_router(cluster, card, silence_s=1.0) as router,
        AsyncClient(router.host.endpoint) as client,
    ):
        # Idle workers report every second; shorten that.
        text = await expected(client)
        for worker in cluster.workers:
            worker.report_load_often()
        for worker in cluster.decodes:
            worker.gate.clear()
        stream = client.stream_chat(HELLO, seed=1)
        events = aiter(stream)
        await anext(events)
        await eventually(
            lambda: any(worker.held for worker in cluster.decodes)
        )  # prefill sent the first token
        silent = next(worker for worker in cluster.decodes if worker.held)
        silent.service.load_gate.clear()
        for worker in cluster.decodes:
            if worker is not silent:
                worker.gate.set()
        await _drain(events)
        assert stream.reply.text == text
        assert stream.reply.stats is not None
        assert stream.reply.stats.decode_worker != silent.instance
        link = router.fleet.find(Role.DECODE, silent.instance)
        assert link is not None
        assert not link.ready
        silent.service.load_gate.set()
        await eventually(lambda: link.ready)


async def test_all_prompts_of_a_silent_prefill_worker_fail_over(
    cluster: FakeCluster, card: ModelCard
) -> None:
    async with (
        open_router(cluster, card, silence_s=1.0, allow_requested_prefill=True) as router,
        AsyncClient(router.host.endpoint) as client,
    ):
        text = await expected(client)
        for worker in cluster.workers:
            worker.report_load_often()
        silent, other = cluster.prefills
        silent.gate.clear()
        before = len(silent.requests)
        first_choice = {"x-slipstream-prefill": silent.instance}
        asked = [asyncio.create_task(client.chat(HELLO, seed=1, headers=first_choice)) for _ in range(2)]
        await eventually(lambda: len(silent.requests) == before + 2)
        silent.service.load_gate.clear()
        async with asyncio.timeout(WAIT_S):
            replies = await asyncio.gather(*asked)
        assert all(reply.text == text for reply in replies)
        assert {reply.stats.prefill_worker for reply in replies if reply.stats} == {other.instance}
        link = router.fleet.find(Role.PREFILL, silent.instance)
        assert link is not None and not link.ready and not link.listeners
        silent.service.load_gate.set()
        silent.gate.set()
        await eventually(lambda: link.ready and not cluster.held)


async def test_workers_of_another_tokenizer_are_not_used(cluster: FakeCluster, card: ModelCard) -> None:
    other = replace(FINGERPRINT, tokenizer="ab" * 16)
    stranger = cluster.add_decode("decode-9", other)
    async with open_router(cluster, card) as router, AsyncClient(router.host.endpoint) as client:
        await stranger.start()
        await eventually(lambda: router.fleet.find(Role.DECODE, "decode-9") is not None)
        for _ in range(5):
            assert (await client.chat(HELLO)).finish_reason == "stop"
        link = router.fleet.find(Role.DECODE, "decode-9")
        assert link is not None
        assert not link.ready
        assert not stranger.starts


async def test_a_rolling_upgrade_never_pairs_two_models(
    cluster: FakeCluster, card: ModelCard, caplog: pytest.LogCaptureFixture
) -> None:
    """New decode workers start before new prefill workers: each request stays within one fingerprint."""
    newer = replace(FINGERPRINT, model="newer")
    upgraded = cluster.add_decode("decode-9", newer)
    await upgraded.start()
    async with open_router(cluster, card) as router, AsyncClient(router.host.endpoint) as client:
        await eventually(lambda: sum(link.ready for link in router.fleet.links()) == 6)
        messages = [r.getMessage() for r in caplog.records if "gets no requests" in r.getMessage()]
        assert "decode/decode-9 gets no requests: its model differs from the others'" in messages
        for _ in range(5):
            assert (await client.chat(HELLO)).stats.decode_worker != "decode-9"  # type: ignore[union-attr]
        assert not upgraded.starts


async def test_the_prefix_index_drops_workers_that_left(cluster: FakeCluster, card: ModelCard) -> None:
    async with open_router(cluster, card) as router, AsyncClient(router.host.endpoint) as client:
        reply = await client.chat([{"role": "user", "content": "Where is it? " * 200}], seed=1)
        assert reply.stats is not None
        for worker in (*cluster.prefills, *cluster.decodes):
            if worker.instance in (reply.stats.prefill_worker, reply.stats.decode_worker):
                link = router.fleet.find(worker.worker.role, worker.instance)
                assert link is not None and link.key in router.fleet.index.holders
                await cluster.discovery.withdraw(worker.worker)
        names = (f"/{reply.stats.prefill_worker}/", f"/{reply.stats.decode_worker}/")
        await eventually(
            lambda: not any(name in holder for name in names for holder in router.fleet.index.holders)
        )
