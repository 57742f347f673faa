"""When the next attempts at requests begin whose worker failed."""

from __future__ import annotations

import pytest

from services.router.server import RouterServer
from slipstream import errors
from slipstream.async_client import AsyncClient
from tests.router.conftest import HELLO
from tests.router.support.fake_cluster import FakeCluster


async def test_later_attempts_begin_in_turn_as_first_ones_do(
    router: RouterServer, client: AsyncClient, cluster: FakeCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A lost worker may have had a hundred requests, which would begin in one iteration of the event loop."""
    before = await client.chat(HELLO, seed=1)
    assert before.stats is not None
    broken = next(worker for worker in cluster.prefills if worker.instance == before.stats.prefill_worker)
    broken.fail_before_token = errors.Unavailable("gone")
    n_acquired, pacer = 0, router.manager.context.start_pacer
    acquire = pacer.acquire

    async def counted(tenant: str) -> None:
        nonlocal n_acquired
        n_acquired += 1
        await acquire(tenant)

    monkeypatch.setattr(pacer, "acquire", counted)
    reply = await client.chat(HELLO, seed=1)
    assert reply.stats is not None
    assert n_acquired == reply.stats.attempts == 2
