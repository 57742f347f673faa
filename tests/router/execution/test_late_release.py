"""A router that stands still while it releases a request: the workers still release it."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest

from services.router.server import RouterServer
from services.router.workers.decode_client import DecodeClient
from slipstream.async_client import AsyncClient
from tests.router.conftest import HELLO, eventually
from tests.router.execution.test_recovery import _drain
from tests.router.support.fake_cluster import FakeCluster


@pytest.mark.parametrize("moment", ["prefilling", "decoding"])
async def test_a_release_survives_a_standstill_longer_than_its_time_out(
    moment: str,
    client: AsyncClient,
    cluster: FakeCluster,
    router: RouterServer,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ask, n_asked = DecodeClient.abort_and_wait, 0

    async def stand_still(self: DecodeClient, attempt: Any, *, timeout_s: float) -> None:
        nonlocal n_asked
        asyncio.get_running_loop().call_soon(time.sleep, 0.5)  # before the call can send anything
        await ask(self, attempt, timeout_s=0.05)
        n_asked += 1

    monkeypatch.setattr(DecodeClient, "abort_and_wait", stand_still)
    for worker in cluster.engines:
        worker.gate.clear()
    if moment == "decoding":
        for prefill in cluster.prefills:
            prefill.gate.set()
    stream = client.stream_chat(HELLO)
    task = asyncio.create_task(_drain(aiter(stream)))
    await eventually(lambda: any(worker.held for worker in cluster.decodes))
    stream.close()
    await asyncio.gather(task, return_exceptions=True)
    await eventually(lambda: n_asked > 0)
    await eventually(lambda: not cluster.held and not router.manager.held)
