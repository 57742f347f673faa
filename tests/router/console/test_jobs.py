"""The console's API of jobs: all tenants, pages, one job, its end, and routers that share a database."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from libs.database.database import Database, open_database
from services.router.console.job_view import JobView
from services.router.jobs.overview import JobFilter, JobOverview
from services.router.jobs.types import JobProgress, JobState
from services.router.request.model_card import ModelCard
from slipstream.errors import InvalidArgument, NotFound
from slipstream.rpc.caller_class import CallerClass
from slipstream.rpc.console_key import console_key
from tests.router.console.test_console_access import POST, SECRET, bearer, console_of, token
from tests.router.jobs.stores import JobTables
from tests.router.support.fake_cluster import FakeCluster


@pytest.fixture
async def tables(database: Database) -> JobTables:
    return JobTables(database)


def overview(tables: JobTables) -> JobOverview:
    return JobOverview(tables.database, wall_clock_s=lambda: tables.now_s)


async def test_the_summary_counts_all_tenants_and_times_the_queue(tables: JobTables) -> None:
    await tables.submit("a", "b", "c")
    tables.now_s += 5
    await tables.submit("d", tenant="bob")
    await tables.leases.register("r1.x")
    first, second = await tables.claim_one("r1.x"), await tables.claim_one("r1.x")
    await tables.finish("r1.x", first)
    await tables.leases.raise_heartbeat("r1.x", {(second.id, second.attempt): JobProgress(17)})
    tables.now_s += 10
    found = await overview(tables).summary()
    assert (found.counts.queued, found.counts.running, found.counts.succeeded) == (2, 1, 1)
    assert found.ended_per_min == 1
    assert found.running_tokens == 17
    assert found.oldest_waiting_s == 15
    tables.now_s += 60
    assert (await overview(tables).summary()).ended_per_min == 0


async def test_pages_are_newest_first_and_have_each_job_once(tables: JobTables) -> None:
    ids = await tables.submit(*"abcde") + await tables.submit("f", tenant="bob", group_id="night")
    found, before = [], ""
    for size in (2, 2, 2):
        jobs, following = await overview(tables).page(JobFilter(before=before, limit=2))
        assert len(jobs) == size
        found += [job.id for job in jobs]
        before = following or ""
    assert found == ids[::-1] and not before
    for wanted in (JobFilter(tenant="bob"), JobFilter(group_id="night")):
        assert [job.id for job in (await overview(tables).page(wanted))[0]] == ids[-1:]
    assert (await overview(tables).page(JobFilter(state=JobState.RUNNING)))[0] == []


async def test_one_job_has_its_router_and_no_body(tables: JobTables) -> None:
    [job_id] = await tables.submit("the secret prompt")
    await tables.leases.register("router-7.abc")
    await tables.claim_one("router-7.abc")
    view = JobView(overview(tables))
    detail = await view.detail_json(job_id)
    assert (detail["router"], detail["attempt"], detail["state"]) == ("router-7", 1, "running")
    assert "secret prompt" not in str(detail)
    with pytest.raises(NotFound):
        await view.detail_json("job-none")


@pytest.mark.parametrize(
    "query", [{"state": "lost"}, {"limit": "501"}, {"limit": "0"}, {"before": "x" * 257}]
)
async def test_a_query_out_of_bounds_names_its_field(tables: JobTables, query: dict[str, str]) -> None:
    with pytest.raises(InvalidArgument) as refused:
        await JobView(overview(tables)).page_json(query)
    assert refused.value.field == next(iter(query))


async def get(http: aiohttp.ClientSession, path: str) -> Any:
    async with http.get(f"/console/api/{path}") as answer:
        return await answer.json()


async def test_two_routers_of_one_database_agree_and_either_cancels(
    cluster: FakeCluster, card: ModelCard, database: Database, tables: JobTables
) -> None:
    options = {"database": database, "secret": SECRET}
    async with (
        console_of(cluster, card, instance="router-0", **options) as (router, one),
        console_of(cluster, card, instance="router-1", **options) as (other, two),
    ):
        tables.now_s = time.time() + 3600  # the job is not due, so it waits
        [job_id] = await tables.submit("a", tenant="alice")
        pages = [await get(http, "jobs?tenant=alice") for http in (one, two)]
        assert [[job["id"] for job in page["jobs"]] for page in pages] == [[job_id]] * 2
        path = f"/console/api/jobs/{job_id}/cancel"
        for headers, status in (({}, 401), (token(router, CallerClass.PEER), 403)):
            async with one.post(path, json={}, headers={**POST, **headers}) as answer:
                assert answer.status == status
        key = {**POST, **bearer(console_key(SECRET))}
        async with two.post(path, json={"now": 1}, headers=key) as answer:
            assert answer.status == 400
        async with two.post(path, json={}, headers=key) as answer:
            ended = await answer.json()
        assert ended["state"] == "cancelled"
        assert (await get(one, f"jobs/{job_id}"))["state"] == "cancelled"
        for each in (router, other):
            assert (await each.console.jobs())["counts"]["cancelled"] == 1


async def test_a_router_without_a_database_explains_it(cluster: FakeCluster, card: ModelCard) -> None:
    async with console_of(cluster, card) as (router, http):
        assert await get(http, "jobs") == {"has_database": False, "jobs": [], "next_before": None}
        assert await router.console.jobs() == {"has_database": False}
        async with http.get("/console/api/jobs/job-1") as answer:
            assert answer.status == 404 and "--database" in (await answer.json())["error"]["message"]


async def test_a_database_that_is_unavailable_is_a_state_and_not_the_end_of_the_events(
    tmp_path: Path,
) -> None:
    (tmp_path / "jobs.db").write_bytes(b"this is no database" * 100)
    database = open_database(f"sqlite:{tmp_path}/jobs.db")
    try:
        page = await JobView(JobOverview(database, wall_clock_s=lambda: 0.0)).summary_json()
    finally:
        await database.close()
    assert page["has_database"] and page["unavailable"]
