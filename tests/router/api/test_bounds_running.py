"""The bounds that depend on what runs: refused in the same words on both APIs, harming nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import aiohttp
import pytest

from services.router.request.model_card import ModelCard
from services.router.server import RouterServer
from slipstream import errors
from slipstream.async_client import AsyncClient
from slipstream.bounds import REQUEST_ID_IN_USE, REQUESTED_WORKER
from tests.router.conftest import HELLO, eventually, open_router
from tests.router.support.fake_cluster import FakeCluster


async def refused_alike(
    router: RouterServer, *, headers: Mapping[str, str] | None = None, **fields: Any
) -> tuple[str, str]:
    """Field and message of the refusal, which is the same on both APIs."""
    url = f"http://{router.http_endpoint}/v1/chat/completions"
    async with (
        aiohttp.ClientSession() as session,
        session.post(url, json={"messages": HELLO, **fields}, headers=headers) as answer,
    ):
        assert answer.status == 400
        said = (await answer.json())["error"]
    assert said["type"] == "invalid_request_error"
    async with AsyncClient(router.host.endpoint) as client:
        with pytest.raises(errors.InvalidArgument) as caught:
            await client.chat(HELLO, headers=dict(headers or {}), **fields)
    assert (caught.value.field, caught.value.message) == (said["param"], said["message"])
    return said["param"], said["message"]


async def test_an_id_that_runs_is_refused_and_goes_on(
    client: AsyncClient, cluster: FakeCluster, router: RouterServer
) -> None:
    for prefill in cluster.prefills:
        prefill.gate.clear()
    running = asyncio.create_task(client.chat(HELLO, request_id="r-1"))
    await eventually(lambda: any(worker.requests for worker in cluster.prefills))
    field, message = await refused_alike(router, request_id="r-1")
    assert (field, message) == ("request_id", f"request_id: {REQUEST_ID_IN_USE.words}")
    for prefill in cluster.prefills:
        prefill.gate.set()
    assert (await running).finish_reason


async def test_a_prefill_worker_that_is_not_there_is_refused(cluster: FakeCluster, card: ModelCard) -> None:
    async with open_router(cluster, card, allow_requested_prefill=True) as router:
        field, message = await refused_alike(router, headers={"x-slipstream-prefill": "prefill-9"})
        assert field == "x-slipstream-prefill"
        assert message == f"{field}: {REQUESTED_WORKER.words.format(instance=repr('prefill-9'))}"
        assert not cluster.held
