"""What the timeline of a request says of failures, moves, restores and ends, for a whole router."""

from __future__ import annotations

import asyncio

import pytest

from services.router.recording.timeline import RequestTimeline
from services.router.request.model_card import ModelCard
from services.router.server import RouterServer
from slipstream import errors
from slipstream.async_client import AsyncClient
from slipstream.v1 import common_pb2, decode_pb2
from tests.router.conftest import HELLO, eventually, open_router
from tests.router.support.fake_cluster import FakeCluster
from tests.router.support.fake_model import FakeModel

PREFILL = ("placed", "prefill_started", "restored", "first_token")


async def ended(router: RouterServer) -> RequestTimeline:
    """The newest request, once the router has released it."""
    await eventually(lambda: router.manager.held == 0)
    return next(router.recorder.newest_first())


def kinds(timeline: RequestTimeline) -> list[str]:
    return [entry.kind for entry in timeline.entries]


async def test_a_retried_prefill_shows_both_attempts_and_why(
    router: RouterServer, client: AsyncClient, cluster: FakeCluster
) -> None:
    for worker in cluster.prefills:
        worker.fail_before_token = errors.Unavailable("the power is gone")
    cluster.prefills[1].fail_before_token = None
    timeline, n_tried = RequestTimeline(), 0
    while timeline.attempts != 2:
        n_tried += 1
        assert n_tried < 40  # until a request begins on the broken worker
        await client.chat([{"role": "user", "content": f"Where is order {n_tried}?"}])
        timeline = await ended(router)
    moved = next(entry for entry in timeline.entries if entry.kind == "moved")
    assert (moved.worker, moved.attempt, moved.tokens) == ("prefill-0", 1, 0)
    assert "the power is gone" in moved.text
    assert [placement.attempt for placement in timeline.placements] == [1, 2]
    assert [p.decision.prefill for p in timeline.placements] == ["prefill-0", timeline.prefill]
    refused = [
        row.refused for row in timeline.placements[1].decision.candidates if row.instance == "prefill-0"
    ]
    assert refused == ["failed this request"]
    assert timeline.status == "succeeded" and kinds(timeline)[-1] == "finished"


async def test_a_failed_decode_worker_shows_the_tokens_that_came_before(
    router: RouterServer, client: AsyncClient, cluster: FakeCluster
) -> None:
    cluster.decodes[0].fail_after_tokens = 3
    timeline, n_tried = RequestTimeline(), 0
    while timeline.attempts != 2:
        n_tried += 1
        assert n_tried < 40
        reply = await client.chat([{"role": "user", "content": f"Where is order {n_tried}?"}])
        timeline = await ended(router)
    assert reply.usage is not None
    moved = next(entry for entry in timeline.entries if entry.kind == "moved")
    assert moved.worker == "decode-0" and 0 < (moved.tokens or 0) < timeline.curve.count
    assert timeline.curve.count == reply.usage.completion_tokens
    assert (timeline.decode, timeline.attempts) == ("decode-1", 2)


async def test_a_client_that_leaves_cancels_and_a_prompt_beyond_the_context_fails(
    router: RouterServer, client: AsyncClient
) -> None:
    call = client.chat(HELLO, request_id="left", max_tokens=2000, ignore_eos=True)
    task = asyncio.create_task(call)
    await eventually(lambda: router.recorder.find("left") is not None)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    left = await ended(router)
    assert (left.status, left.code) == ("cancelled", "Aborted")
    with pytest.raises(errors.InvalidArgument):
        await client.chat([{"role": "user", "content": "xyzzy " * 5000}], request_id="long")
    failed = await ended(router)
    assert (failed.request_id, failed.status, failed.code) == ("long", "failed", "ContextExceeded")
    assert kinds(failed) == ["received", "admitted", "failed"] and "xyzzy" not in failed.error
    assert failed.finish_reason == "" and failed.ended_s is not None


async def test_a_prompt_that_the_decode_worker_computes_has_its_start_and_its_restores(
    model: FakeModel, card: ModelCard
) -> None:
    cached = [
        common_pb2.CachedTokens(tier=common_pb2.CACHE_TIER_WORKER, tokens=2),
        common_pb2.CachedTokens(tier=common_pb2.CACHE_TIER_DRAM, tokens=3),
    ]
    async with (
        FakeCluster(model, prefills=0, decodes=1) as cluster,
        open_router(cluster, card) as router,
        AsyncClient(router.host.endpoint) as client,
    ):
        worker = cluster.decodes[0]
        worker.prompt_start = decode_pb2.PromptStart(cached=cached, restore_ms=1.0)
        worker.gate.clear()  # after a frame
        call = asyncio.create_task(client.chat(HELLO, request_id="here"))
        await eventually(lambda: router.counters.total("slipstream_completion_tokens_total") > 0)
        assert router.counters.total("slipstream_cached_tokens_total") == 5, "they count while it runs"
        worker.gate.set()
        await call
        timeline = await ended(router)
    phases = [entry for entry in timeline.entries if entry.kind in PREFILL]
    assert [(entry.kind, entry.worker, entry.tokens) for entry in phases] == [
        ("placed", "decode-0", None),
        ("prefill_started", "decode-0", 2),
        ("restored", "decode-0", 3),
        ("first_token", "decode-0", None),
    ]
    assert phases[2].at_s - phases[1].at_s >= 0.00099, "the restore took a millisecond"


async def test_restored_kv_names_its_source_and_no_text_is_kept(
    router: RouterServer, client: AsyncClient, cluster: FakeCluster
) -> None:
    secret = "xyzzy-plugh"
    for _ in range(2):
        await client.chat([{"role": "user", "content": f"{secret} Where is my order? " * 30}])
    timeline = await ended(router)
    started = next(entry for entry in timeline.entries if entry.kind == "prefill_started")
    assert (started.tokens or 0) + sum(e.tokens or 0 for e in timeline.entries if e.kind == "restored") > 0
    assert router.recorder.cached_tokens.total() > 0
    texts = [entry.text for entry in timeline.entries] + [p.decision.reason for p in timeline.placements]
    assert not any(secret in text for text in [*texts, timeline.error, timeline.code, timeline.model])
