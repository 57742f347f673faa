"""What the timeline of a request says of failures, moves, restores and ends, for a whole router."""

from __future__ import annotations

import asyncio

import pytest

from services.router.recording.timeline import RequestTimeline
from services.router.server import RouterServer
from slipstream import errors
from slipstream.async_client import AsyncClient
from tests.router.conftest import HELLO, eventually
from tests.router.support.fake_cluster import FakeCluster


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
