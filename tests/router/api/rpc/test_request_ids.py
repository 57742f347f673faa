"""Ids of requests: one names one running request of a tenant."""

from __future__ import annotations

import asyncio

import pytest

from services.router.server import RouterServer
from slipstream import errors
from slipstream.async_client import AsyncClient
from tests.router.conftest import HELLO, WAIT_S, eventually
from tests.router.support.fake_cluster import FakeCluster


async def test_an_id_in_use_is_refused(client: AsyncClient, cluster: FakeCluster) -> None:
    for prefill in cluster.prefills:
        prefill.gate.clear()
    stream = asyncio.create_task(client.chat(HELLO, request_id="r-2"))
    await eventually(lambda: any(worker.requests for worker in cluster.prefills))
    with pytest.raises(errors.InvalidArgument, match="request_id: is in use by a running request"):
        await client.chat(HELLO, request_id="r-2")
    await client.abort("r-2")
    with pytest.raises(errors.Aborted):
        await stream
    assert not cluster.held


async def test_the_id_of_an_answered_request_is_free_while_a_worker_releases_it(
    client: AsyncClient, cluster: FakeCluster, router: RouterServer
) -> None:
    for prefill in cluster.prefills:
        prefill.abort_gate.clear()  # an answer of one token has no decode worker: the router ends its handoff
    first = await client.chat(HELLO, request_id="r-3", max_tokens=1)
    again = await client.chat(HELLO, request_id="r-3", max_tokens=1)
    assert again.text == first.text
    assert router.manager.held == 2 and not router.manager._runs
    assert router.manager.gate.controller.running == 2
    aborted = asyncio.create_task(client.abort("r-3"))
    await asyncio.wait({aborted}, timeout=0.2)
    assert not aborted.done()
    for prefill in cluster.prefills:
        prefill.abort_gate.set()
    async with asyncio.timeout(WAIT_S):
        await aborted
    assert not router.manager.held and not cluster.held
    assert router.manager.gate.controller.running == 0
    assert not router.manager.gate.controller._reserve._running


async def test_abort_of_an_unknown_id_is_fine(client: AsyncClient) -> None:
    await client.abort("never-heard-of")
