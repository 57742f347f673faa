"""Requests that found no worker, and how a router counts them."""

from __future__ import annotations

import asyncio

import pytest

from services.router.request.model_card import ModelCard
from services.router.server import RouterServer
from services.router.workers.unplaced_requests import REMEMBERED_S, UnplacedRequests
from slipstream.async_client import AsyncClient
from tests.router.conftest import HELLO, eventually, open_router
from tests.router.support.fake_cluster import FakeCluster
from tests.router.support.fake_model import FakeModel


def test_requests_count_while_they_wait_and_for_a_while_after_they_gave_up() -> None:
    now_s = 100.0
    unplaced = UnplacedRequests(lambda: now_s)
    with unplaced.waiting():
        assert unplaced.count == 1
    assert unplaced.count == 0, "it found a worker"
    with pytest.raises(TimeoutError), unplaced.waiting():
        raise TimeoutError
    now_s += REMEMBERED_S
    assert unplaced.count == 1
    now_s += 0.1
    assert unplaced.count == 0


async def test_requests_that_wait_for_a_worker_count_as_waiting_and_not_as_running(
    model: FakeModel, card: ModelCard
) -> None:
    async with (
        FakeCluster(model, prefills=1, decodes=1) as cluster,
        open_router(cluster, card) as router,
        AsyncClient(router.host.endpoint, resume_within_s=0.0) as client,
    ):
        text, worker = (await client.chat(HELLO, seed=1)).text, cluster.decodes[0]
        worker.gate.clear()
        placed = asyncio.create_task(client.chat(HELLO, seed=1))
        await eventually(lambda: len(worker.held) == 1)
        assert counts(router) == (1, 0)
        await cluster.discovery.withdraw(worker.worker)
        await eventually(lambda: not router.fleet.ready)
        new = asyncio.create_task(client.chat(HELLO, seed=1))
        await eventually(lambda: counts(router) == (1, 1))
        await worker.kill()  # the placed request looks for another worker
        await eventually(lambda: counts(router) == (0, 2))
        gauges = router.metrics.snapshot()
        assert (gauges["slipstream_requests_running"], gauges["slipstream_requests_waiting"]) == (0, 2)
        worker.gate.set()
        await cluster.add_decode("decode-1").start()
        assert [reply.text for reply in (await placed, await new)] == [text, text]
        await eventually(lambda: counts(router) == (0, 0))


def counts(router: RouterServer) -> tuple[int, int]:
    """The requests that run and that wait, by the router's load report."""
    report = router.load()
    return report.requests_running, report.requests_waiting
