"""A database that is locked, full or gone: a typed error; live requests and later jobs go on."""

from __future__ import annotations

import sqlite3
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from libs.database.database import Database
from services.router.request.model_card import ModelCard
from services.router.server import RouterServer
from slipstream.async_client import AsyncClient
from slipstream.rpc.dial import dial
from slipstream.v1 import jobs_pb2
from slipstream.v1.jobs_pb2_grpc import JobServiceStub
from tests.router.api.jobs.test_service import _refusal, new_job
from tests.router.conftest import WAIT_S, eventually, open_router
from tests.router.support.fake_cluster import FakeCluster

Heal = Callable[[], Any]


@pytest.fixture
async def router(cluster: FakeCluster, card: ModelCard, database: Database) -> AsyncIterator[RouterServer]:
    async with open_router(cluster, card, database=database) as server:
        yield server


def _delete(path: Path) -> Heal:
    files = [path.with_name(path.name + end) for end in ("", "-wal", "-shm")]
    away = [(each, each.rename(each.with_name("away-" + each.name))) for each in files if each.exists()]
    return lambda: [moved.rename(each) for each, moved in away]


async def _pragma(database: Database, text: str) -> None:
    await database.run(lambda tx: tx.execute(f"PRAGMA {text}"))


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("full", "disk of the database is full"),
        ("deleted", "deleted or replaced"),
    ],
)
async def test_a_fault_is_named_and_jobs_go_on_after_it(
    router: RouterServer, cluster: FakeCluster, database: Database, tmp_path: Path, fault: str, words: str
) -> None:
    for decode in cluster.decodes:
        decode.gate.clear()
    async with dial(router.host.endpoint) as channel:
        stub: Any = JobServiceStub(channel)
        await stub.SubmitJobs(jobs_pb2.SubmitJobsRequest(jobs=[new_job(max_tokens=6)]))
        await eventually(lambda: router.manager.jobs.running == 1)
        heal = _delete(tmp_path / "router.db") if fault == "deleted" else None
        if fault == "full":
            await _pragma(database, "max_page_count = 1")
        for decode in cluster.decodes:
            decode.gate.set()  # the job ends, and its end cannot be stored
        large = new_job(user="x" * 100_000)
        error = await _refusal(stub.SubmitJobs(jobs_pb2.SubmitJobsRequest(jobs=[large])))
        assert words in error.message
        await _live(router)
        if heal is not None:
            heal()
        else:
            await _pragma(database, "max_page_count = 100000")
        await eventually(lambda: _succeeded(router) >= 1)
        await stub.SubmitJobs(jobs_pb2.SubmitJobsRequest(jobs=[new_job(max_tokens=2)]))


async def test_a_locked_database_delays_jobs_and_no_live_request(
    router: RouterServer, cluster: FakeCluster, tmp_path: Path
) -> None:
    async with dial(router.host.endpoint) as channel:
        stub: Any = JobServiceStub(channel)
        await stub.SubmitJobs(jobs_pb2.SubmitJobsRequest(jobs=[new_job(max_tokens=2)]))
        await eventually(lambda: _succeeded(router) == 1)
        other = sqlite3.connect(tmp_path / "router.db", isolation_level=None)
        other.execute("BEGIN IMMEDIATE")
        submitted = stub.SubmitJobs(jobs_pb2.SubmitJobsRequest(jobs=[new_job(max_tokens=2)]))
        await _live(router)
        assert not submitted.done()
        other.execute("ROLLBACK")
        other.close()
        [job] = (await submitted).jobs
        assert (await stub.GetJob(jobs_pb2.GetJobRequest(id=job.id))).job.path == job.path


async def _live(router: RouterServer) -> None:
    """A live request is answered."""
    async with AsyncClient(router.host.endpoint, timeout_s=WAIT_S, max_retries=0) as client:
        assert (await client.complete("y", max_tokens=3)).finish_reason


def _succeeded(router: RouterServer) -> float:
    return router.counters.snapshot().get('slipstream_jobs_ended_total{state="succeeded"}', 0.0)
