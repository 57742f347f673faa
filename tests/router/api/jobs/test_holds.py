"""Jobs that live requests hold: they leave their workers, and go on with the same text."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest

from libs.database.database import Database
from services.router.api.jobs.executor import AnswerExecutor
from services.router.execution.policies.job_holds import LiveSample
from services.router.jobs.types import ClaimedJob, JobOutcome
from services.router.request.model_card import ModelCard
from services.router.server import RouterServer
from slipstream.async_client import AsyncClient
from slipstream.errors import NotFound
from tests.router.conftest import HELLO, WAIT_S, eventually, open_router
from tests.router.support.fake_cluster import FakeCluster
from tests.router.support.fake_model import FakeModel

CHAT = "/v1/chat/completions"


@pytest.fixture
async def router(cluster: FakeCluster, card: ModelCard) -> AsyncIterator[RouterServer]:
    async with open_router(cluster, card) as server:
        yield server


def _run_job(router: RouterServer, number: int, **body: Any) -> asyncio.Task[JobOutcome]:
    """An attempt at a job, as the puller makes one."""
    executor: AnswerExecutor = router.jobs._executor
    data = json.dumps({"messages": HELLO, "max_tokens": 12, **body}).encode()
    job = ClaimedJob(f"job-{number}", "alice", CHAT, data, 1, 0, 1.0, 1e12)
    return asyncio.create_task(executor.run(job))


def _choices(outcome: JobOutcome) -> Any:
    assert outcome.status == 200
    return json.loads(outcome.body)["choices"]


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("stage", ["prefill", "decode"])
async def test_a_held_job_leaves_its_workers_and_gives_the_same_text(
    router: RouterServer, cluster: FakeCluster, stage: str, n: int
) -> None:
    expected = _choices(await _run_job(router, 1, n=n))
    engines = cluster.prefills if stage == "prefill" else cluster.decodes
    for engine in engines:
        engine.gate.clear()
    task = _run_job(router, 1, n=n)
    await eventually(lambda: bool(cluster.held) and router.manager.jobs.running == 1)
    if stage == "decode":
        await eventually(lambda: any(run.sink.completion_tokens for run in router.manager.running))
    router.manager.jobs.set_limit(0)
    await eventually(lambda: not cluster.held and router.manager.gate.controller.running == 0)
    assert (router.manager.jobs.running, router.manager.jobs.held) == (0, 1)
    assert not task.done()
    for engine in engines:
        engine.gate.set()
    router.manager.jobs.set_limit(1)
    async with asyncio.timeout(WAIT_S):
        assert _choices(await task) == expected
    assert router.manager.jobs.held == 0 and not cluster.held


async def test_a_held_job_waits_for_no_statistics_of_its_decode_worker(
    router: RouterServer, cluster: FakeCluster
) -> None:
    """Else prefill would hold the handoff for a second more while live requests wait for its pages."""
    for decode in cluster.decodes:
        decode.gate.clear()
        decode.ends_aborted = False
    task = _run_job(router, 1)
    await eventually(lambda: any(run.sink.completion_tokens for run in router.manager.running))
    router.manager.jobs.set_limit(0)
    await eventually(lambda: not cluster.held, timeout_s=WAIT_S / 2)
    assert router.manager.gate.controller.running == 0
    task.cancel()


async def test_a_live_request_holds_jobs_when_it_comes(router: RouterServer, cluster: FakeCluster) -> None:
    jobs, samples = router.manager.jobs, list[LiveSample]()

    class Observer:
        def observe(self, sample: LiveSample) -> None:
            samples.append(sample)

    jobs.observer = Observer()
    for decode in cluster.decodes:
        decode.gate.clear()
    tasks = [_run_job(router, number) for number in range(3)]
    await eventually(lambda: jobs.running == 3)
    jobs.beside = 1
    async with AsyncClient(router.host.endpoint, timeout_s=WAIT_S) as client:
        live = asyncio.create_task(client.complete("y", max_tokens=8))
        await eventually(lambda: jobs.running == 1)
        await eventually(lambda: len(cluster.held) <= 2)  # the oldest job and the live request
        for decode in cluster.decodes:
            decode.gate.set()
        async with asyncio.timeout(WAIT_S):
            await live
            await asyncio.wait(tasks[:1])
    [sample] = samples
    assert (sample.met, sample.beside) == (3, 1)
    assert sample.ttft_ms > 0 and sample.new_tokens > 0
    assert jobs.held == 2
    jobs.set_limit(None)
    async with asyncio.timeout(WAIT_S):
        texts = [_choices(await task) for task in tasks]
    assert texts[0] and samples == [sample]


async def test_a_held_job_can_be_cancelled(router: RouterServer, cluster: FakeCluster) -> None:
    router.manager.jobs.set_limit(0)
    task = _run_job(router, 1)
    await eventually(lambda: router.manager.jobs.held == 1)
    task.cancel()
    await eventually(lambda: not router.manager.held and router.manager.jobs.held == 0)


async def test_a_request_that_is_refused_holds_no_job(router: RouterServer, cluster: FakeCluster) -> None:
    """Else a client without a right to anything would keep the jobs of all tenants from their workers."""
    jobs = router.manager.jobs
    for decode in cluster.decodes:
        decode.gate.clear()
    tasks = [_run_job(router, number) for number in range(3)]
    await eventually(lambda: jobs.running == 3)
    async with AsyncClient(router.host.endpoint, timeout_s=WAIT_S) as client:
        with pytest.raises(NotFound):
            await client.complete("y", max_tokens=8, model="another")
    assert (jobs.running, jobs.n_held_total) == (3, 0)
    for decode in cluster.decodes:
        decode.gate.set()
    async with asyncio.timeout(WAIT_S):
        await asyncio.gather(*tasks)


@pytest.mark.parametrize(("is_held", "status"), [(False, 504), (True, 429)])
@pytest.mark.parametrize("is_freed", [False, True])
async def test_a_job_whose_deadline_passes_runs_again_only_if_it_was_held(
    router: RouterServer, cluster: FakeCluster, is_held: bool, is_freed: bool, status: int
) -> None:
    for decode in cluster.decodes:
        decode.gate.clear()
    task = _run_job(router, 1)
    await eventually(lambda: bool(cluster.held) and router.manager.jobs.running == 1)
    if is_held:
        router.manager.jobs.set_limit(0)
        await eventually(lambda: not cluster.held)
    if is_freed:
        router.manager.jobs.set_limit(None)
    [run] = router.manager.running
    run.end_at_deadline()
    async with asyncio.timeout(WAIT_S):
        outcome = await task
    assert (outcome.status, outcome.is_final) == (status, not is_held)


async def test_jobs_run_where_decode_workers_compute_the_prompts(
    model: FakeModel, card: ModelCard, database: Database
) -> None:
    async with (
        FakeCluster(model, prefills=0) as cluster,
        open_router(cluster, card, database=database) as router,
        AsyncClient(router.host.endpoint) as client,
    ):
        job = (await client.jobs.submit([{"messages": HELLO, "max_tokens": 4}]))[0]
        assert (await client.jobs.wait(job.id)).job.state == "succeeded"
