"""Workers that fall silent under a request: one that crashes slowly counts, and one that stands still not."""

from __future__ import annotations

import asyncio

import pytest

from libs.common.cluster.exit_reports import NoExitReports, WorkerExit
from services.router.request.model_card import ModelCard
from slipstream import errors
from slipstream.async_client import AsyncClient
from tests.router.conftest import HELLO, eventually, open_router
from tests.router.support.fake_cluster import FakeCluster
from tests.router.support.fake_model import FakeModel

SILENCE_S = 1.0


class _Unanswered(NoExitReports):
    """Reports that never come. `asked` is set by the first question."""

    def __init__(self, asked: asyncio.Event) -> None:
        self._asked = asked

    async def exit_of(self, worker_key: str) -> WorkerExit:
        self._asked.set()
        await asyncio.Event().wait()
        return WorkerExit.UNKNOWN


@pytest.mark.parametrize("way", ["connections lost", "a new incarnation", "stood still"])
async def test_the_ends_of_silent_workers_quarantine_their_request(
    model: FakeModel, card: ModelCard, way: str
) -> None:
    async with (
        FakeCluster(model) as cluster,
        open_router(cluster, card, silence_s=SILENCE_S) as router,
        AsyncClient(router.host.endpoint, resume_within_s=0.0) as client,
    ):
        silent = list(cluster.decodes)
        for worker in silent:  # as while a core file is written
            worker.gate.clear()
            worker.service.load_gate.clear()
        answer = asyncio.create_task(client.chat(HELLO, seed=1))
        quarantine = router.manager.context.failover.quarantine
        await eventually(lambda: len(quarantine._silent) == len(silent))
        assert not answer.done()
        if way == "stood still":
            for worker in silent:
                worker.gate.set()
                worker.service.load_gate.set()
            assert (await answer).finish_reason == "stop"
            await eventually(lambda: not quarantine._silent)
            assert (await client.chat(HELLO, seed=1)).finish_reason == "stop"
            return
        for worker in silent:
            if way == "connections lost":
                await worker.kill()
            else:
                await cluster.add_decode(worker.instance).start()
        if way == "connections lost":  # the evidence is the lost connection alone
            await eventually(lambda: not quarantine._silent)
            await cluster.add_decode("decode-9").start()
        with pytest.raises(errors.Quarantined, match="crashed 2 workers"):
            await answer
        with pytest.raises(errors.Quarantined):  # the same request under another id
            await client.chat(HELLO, seed=2)
        assert not any(worker.starts for worker in cluster.decodes if worker not in silent)


async def test_a_router_that_closes_waits_for_no_exit_report(model: FakeModel, card: ModelCard) -> None:
    async with FakeCluster(model) as cluster, open_router(cluster, card, silence_s=SILENCE_S) as router:
        failover, asked = router.manager.context.failover, asyncio.Event()
        failover.exit_reports = _Unanswered(asked)
        failover._settled("decode/decode-0/run", True)
        await asked.wait()
        await router.manager.close()
        await eventually(lambda: not failover._tasks)


@pytest.mark.parametrize("way", ["crashes", "answers"])
async def test_a_worker_that_crashes_under_a_cancelled_request_is_a_strike(
    model: FakeModel, card: ModelCard, way: str
) -> None:
    """The client leaves, and the worker crashes before it has released the request."""
    async with FakeCluster(model) as cluster, open_router(cluster, card) as router:
        quarantine = router.manager.context.failover.quarantine
        for worker in cluster.prefills:
            worker.gate.clear()
        for _ in range(len(cluster.prefills)):
            for worker in cluster.prefills:
                worker.abort_gate.clear()
            async with AsyncClient(router.host.endpoint, resume_within_s=0.0) as leaving:
                asked = asyncio.create_task(leaving.chat(HELLO, seed=1))
                await eventually(lambda: any(worker.held for worker in cluster.prefills))
                holder = next(worker for worker in cluster.prefills if worker.held)
                asked.cancel()
                await asyncio.gather(asked, return_exceptions=True)
            await eventually(lambda holder=holder: holder.aborted)  # type: ignore[misc]
            assert quarantine.unproven
            if way == "crashes":
                await holder.kill()
                holder.held.clear()
                await eventually(lambda: quarantine.has_suspects)
            else:
                holder.abort_gate.set()
            await eventually(lambda: not (quarantine._silent or quarantine.unproven))
            holder.aborted.clear()
        for worker in cluster.prefills:
            worker.gate.set()
            worker.abort_gate.set()
        async with AsyncClient(router.host.endpoint, resume_within_s=0.0) as client:
            if way == "answers":
                assert not quarantine.has_suspects
                assert (await client.chat(HELLO, seed=1)).finish_reason == "stop"
                return
            with pytest.raises(errors.Quarantined):
                await client.chat(HELLO, seed=1)
