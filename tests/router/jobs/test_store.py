"""What tenants do with jobs, on both databases."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from libs.database.database import open_database
from libs.database.transaction import SqlTransaction, SqlValue
from services.router.jobs.store import JobLimits, JobStore
from services.router.jobs.types import (
    JobCounts,
    JobOutcome,
    JobRequest,
    JobResult,
    JobResultPart,
    JobState,
    Webhook,
)
from slipstream.errors import FailedPrecondition, InvalidArgument, NotFound, Overloaded
from tests.router.jobs.stores import DONE, PATH, JobTables, make_request

CANCELLED = 'slipstream_jobs_ended_total{state="cancelled"}'


async def test_jobs_are_listed_in_the_order_of_their_submission(tables: JobTables) -> None:
    first = await tables.submit("a", "b", "c", group_id="g")
    tables.now_s += 1
    second = await tables.submit("d")
    assert [job.id for job in await tables.store.list_jobs("alice")] == first + second
    assert [
        job.id for job in await tables.store.list_jobs("alice", group_id="g", after=first[0], limit=1)
    ] == [first[1]]
    assert await tables.store.list_jobs("alice", state=JobState.RUNNING) == []


async def test_a_job_of_another_tenant_does_not_exist(tables: JobTables) -> None:
    [job_id] = await tables.submit("a", group_id="g")
    for call in (tables.store.get, tables.store.result, tables.store.request, tables.store.cancel):
        with pytest.raises(NotFound):
            await call("mallory", job_id)
    assert await tables.store.list_jobs("mallory") == []
    assert await tables.store.cancel_group("mallory", "g") == 0
    assert (await tables.store.get("alice", job_id)).state is JobState.QUEUED


async def test_a_job_ends_with_its_result(tables: JobTables) -> None:
    [job_id] = await tables.submit("a", reference="line 1")
    assert await tables.store.result("alice", job_id) is None
    await tables.leases.register("r1")
    claimed = await tables.claim_one("r1")
    assert (await tables.store.get("alice", job_id)).state is JobState.RUNNING
    tables.now_s += 5
    assert await tables.finish("r1", claimed)
    job = await tables.store.get("alice", job_id)
    assert (job.state, job.status, job.reference, job.output_tokens) == (JobState.SUCCEEDED, 200, "line 1", 7)
    assert job.ended_unix_s - job.started_unix_s == 5
    assert await tables.store.result("alice", job_id) == JobResult(200, DONE.body)
    part = await tables.store.result_part("alice", job_id, offset=1, limit=3)
    assert part == JobResultPart(len(DONE.body), DONE.body[1:4])
    assert await tables.store.request("alice", job_id) == make_request("a").body


async def test_an_idempotency_key_answers_the_job_that_exists(tables: JobTables) -> None:
    [first] = await tables.submit("a", idempotency_key="k")
    assert await tables.submit("a", idempotency_key="k") == [first]
    assert await tables.submit("a", idempotency_key="k", tenant="bob") != [first]
    with pytest.raises(FailedPrecondition):
        await tables.submit("other", idempotency_key="k")
    together = await asyncio.gather(*[tables.submit("b", idempotency_key="k2") for _ in range(10)])
    assert len({job_id for [job_id] in together}) == 1
    assert (await tables.store.counts("alice")).queued == 2


async def test_a_tenant_has_a_bounded_number_of_jobs_and_bytes(tables: JobTables) -> None:
    small = JobTables(tables.database, JobLimits(max_live=2, max_stored_bytes=10_000))
    await small.submit("a", "b")
    with pytest.raises(Overloaded):
        await small.submit("c")
    assert (await small.store.counts("alice")).total == 2
    await small.submit("c", tenant="bob")
    await small.store.cancel("alice", (await small.store.list_jobs("alice"))[0].id)
    await small.submit("d")  # an ended job leaves room
    with pytest.raises(Overloaded):
        await small.submit("x" * 10_000, tenant="carol")
    many = JobTables(tables.database, JobLimits(max_live=100, max_stored_bytes=10_000))
    for _ in range(8):  # a short body has a row beside it, which stays after the end
        [ended] = await many.submit("a", tenant="dave")
        await many.store.cancel("dave", ended)
    with pytest.raises(Overloaded):
        await many.submit("a", "b", tenant="dave")


async def test_a_job_runs_by_the_key_that_submitted_it(tables: JobTables) -> None:
    await tables.leases.register("r")
    await tables.store.submit("alice", [make_request("a")], key_sha256=b"k" * 32)
    assert (await tables.claim_one("r")).key_sha256 == b"k" * 32
    await tables.submit("b")
    assert (await tables.claim_one("r")).key_sha256 == b""


async def test_a_cancelled_job_has_no_result_whatever_ran(tables: JobTables) -> None:
    [job_id] = await tables.submit("a")
    await tables.leases.register("r1")
    claimed = await tables.claim_one("r1")
    assert (await tables.store.cancel("alice", job_id)).state is JobState.CANCELLED
    assert not await tables.finish("r1", claimed)
    assert await tables.store.result("alice", job_id) is None
    assert (await tables.store.cancel("alice", job_id)).state is JobState.CANCELLED
    assert tables.counters.snapshot()[CANCELLED] == 1


async def test_a_group_is_cancelled_and_counted(tables: JobTables) -> None:
    await tables.submit("a", "b", group_id="g")
    await tables.submit("c")
    await tables.leases.register("r1")
    await tables.finish("r1", await tables.claim_one("r1"))
    assert await tables.store.cancel_group("alice", "g") == 1
    assert tables.counters.snapshot()[CANCELLED] == 1
    assert await tables.store.counts("alice", "g") == JobCounts(succeeded=1, cancelled=1)
    pairs = await tables.store.results("alice", "g")
    assert [result and result.status for _, result in pairs] == [200, None]
    assert (await tables.store.counts("alice")).queued == 1


async def test_jobs_in_states_of_a_later_router_are_read(tables: JobTables) -> None:
    """Routers of two versions share a database during a rollout."""
    waits, ended, own = await tables.submit("a", "b", "c", group_id="g")
    for job_id, state, ended_unix_s in ((waits, "paused", 0.0), (ended, "refused", 5.0)):
        await tables.database.run(
            lambda tx, values=(state, ended_unix_s, job_id): tx.execute(  # type: ignore[misc]
                "UPDATE jobs SET state = ?, ended_unix_s = ? WHERE id = ?", values
            )
        )
    assert (await tables.store.get("alice", waits)).state is JobState.RUNNING
    assert (await tables.store.get("alice", ended)).state is JobState.FAILED
    assert (await tables.store.get("alice", own)).state is JobState.QUEUED
    assert await tables.store.counts("alice", "g") == JobCounts(queued=1, running=2)
    await tables.leases.register("r1")
    assert [job.id for job in await tables.leases.claim("r1", 3)] == [own]


async def test_a_follower_sees_each_state_to_the_end(tables: JobTables) -> None:
    [job_id] = await tables.submit("a", group_id="g")
    await tables.leases.register("r1")
    states, groups = [], []
    async with asyncio.timeout(30):
        async for job in tables.store.follow("alice", job_id):
            states.append(job.state)
            if job.state is JobState.QUEUED:
                claimed = await tables.claim_one("r1")
            elif job.state is JobState.RUNNING:
                await tables.finish("r1", claimed)
        async for counts in tables.store.follow_group("alice", "g"):
            groups.append(counts)
    assert states == [JobState.QUEUED, JobState.RUNNING, JobState.SUCCEEDED]
    assert groups == [JobCounts(succeeded=1)]


async def test_a_late_job_expires_and_an_old_one_is_dropped(tables: JobTables) -> None:
    [late] = await tables.submit("a", expires_ms=10_000, retention_ms=100_000)
    tables.now_s += 11
    assert await tables.leases.sweep() == (1, 0)
    assert (await tables.store.get("alice", late)).state is JobState.EXPIRED
    tables.now_s += 101
    assert await tables.leases.sweep() == (0, 1)
    with pytest.raises(NotFound):
        await tables.store.get("alice", late)
    rows = await tables.database.read(lambda tx: tx.execute("SELECT live, stored_bytes FROM job_tenants"))
    assert rows == [(0, 0)]


@pytest.mark.parametrize(
    ("request_", "field"),
    [
        (JobRequest(PATH, b"{}", reference="x" * 513), "jobs[0].reference"),
        (JobRequest(PATH, b"{}", idempotency_key="x" * 129), "jobs[0].idempotency_key"),
        (JobRequest(PATH, b"{}", group_id="x" * 129), "jobs[0].group_id"),
        (JobRequest(PATH, b"{}", expires_ms=999), "jobs[0].expires_ms"),
        (JobRequest(PATH, b"{}", retention_ms=0), "jobs[0].retention_ms"),
        (JobRequest(PATH, bytes(9 << 20)), "jobs[0].body"),
    ],
)
async def test_what_no_tenant_may_submit(tables: JobTables, request_: JobRequest, field: str) -> None:
    with pytest.raises(InvalidArgument) as refusal:
        await tables.store.submit("alice", [request_])
    assert refusal.value.field == field


async def test_a_failed_job_has_the_answer_of_the_endpoint(tables: JobTables) -> None:
    [job_id] = await tables.submit("a")
    await tables.leases.register("r1")
    refusal = JobOutcome(400, b'{"error": {}}')
    await tables.leases.finish("r1", await tables.claim_one("r1"), refusal, JobState.FAILED)
    assert await tables.store.result("alice", job_id) == JobResult(400, refusal.body)
    assert isinstance(tables.store, JobStore)


async def test_a_page_of_results_has_few_long_answers(tables: JobTables) -> None:
    ids = await tables.submit("a", "b", "c", "d", "e", group_id="g")
    await tables.leases.register("r1")
    for body in (b"x" * 700_000, b"y" * 700_000, b"z" * 2_000_000, b"1", b"2"):
        await tables.finish("r1", await tables.claim_one("r1"), JobOutcome(200, body))
    pages, after = [], ""
    while page := await tables.store.results("alice", "g", after=after, limit=20):
        pages.append([job.id for job, _ in page])
        assert all(result is not None and result.body for _, result in page)
        after = page[-1][0].id
    assert pages == [[ids[0]], [ids[1]], [ids[2]], ids[3:]]


async def test_webhooks_that_wait_take_the_places_of_jobs(tables: JobTables) -> None:
    """Else jobs that are cancelled at once, and dropped a second later, would fill the database."""
    small = JobTables(tables.database, JobLimits(max_live=2))
    hook = Webhook("https://hooks.example.com/", "whsec_" + "A" * 32)
    for job_id in await small.submit("a", "b", webhook=hook):
        await small.store.cancel("alice", job_id)
    with pytest.raises(Overloaded, match="webhooks"):
        await small.submit("c")
    assert (await small.leases.read_queue()).queued == 0
    await small.submit("c", tenant="bob")


async def test_followers_of_one_tenant_look_in_turn(
    tables: JobTables, monkeypatch: pytest.MonkeyPatch
) -> None:
    await tables.submit("a", group_id="g")
    looking, most = 0, 0

    async def counts(tenant: str, group_id: str = "") -> JobCounts:
        nonlocal looking, most
        looking += 1
        most = max(most, looking)
        await asyncio.sleep(0.001)
        looking -= 1
        return JobCounts(queued=1)

    monkeypatch.setattr(tables.store, "counts", counts)
    follows = [tables.store.follow_group("alice", "g") for _ in range(8)]
    assert [each.queued for each in await asyncio.gather(*[anext(follow) for follow in follows])] == [1] * 8
    assert most == 1


def _explaining(run: Callable[..., Any], plans: list[str]) -> Callable[..., Any]:
    """`run` or `read` of an SQLite database, which notes the plan of each query."""

    async def explained(work: Callable[[SqlTransaction], Any], **options: Any) -> Any:
        def explain(tx: SqlTransaction) -> Any:
            plain = tx.execute

            class Explaining:
                skip_locked = ""

                def execute(self, sql: str, values: Sequence[SqlValue] = ()) -> list[tuple[Any, ...]]:
                    if sql.startswith("SELECT"):
                        plans.extend(row[3] for row in plain(f"EXPLAIN QUERY PLAN {sql}", values))
                    return plain(sql, values)

            return work(Explaining())  # type: ignore[arg-type]

        return await run(explain, **options)

    return explained


async def test_a_claim_reads_no_more_of_a_long_queue_than_it_takes(tmp_path: Path) -> None:
    database = open_database(f"sqlite:{tmp_path}/plans.db")
    tables, plans = JobTables(database), list[str]()
    await tables.submit("a", "b", "c")
    await tables.submit("d", tenant="bob")
    await tables.leases.register("r1")
    database.run = _explaining(database.run, plans)  # type: ignore[method-assign]
    assert len(await tables.leases.claim("r1", 3)) == 3
    await database.close()
    assert any("jobs_queued_alike (tenant=? AND prefix_key=?" in plan for plan in plans)
    assert not [plan for plan in plans if "TEMP" in plan and "GROUP BY" not in plan]
    running = "jobs_by_state (state=?)"  # of those that run, which are few
    assert sum(running in plan for plan in plans) <= 1


async def test_a_tenant_lists_and_counts_by_its_own_indexes(tmp_path: Path) -> None:
    """A page reads neither the jobs of other tenants nor all jobs of this one."""
    database = open_database(f"sqlite:{tmp_path}/plans.db")
    tables, plans = JobTables(database), list[str]()
    database.read = _explaining(database.read, plans)  # type: ignore[method-assign]
    for state in (None, JobState.FAILED):
        for group in ("", "g"):
            await tables.store.list_jobs("alice", group_id=group, state=state)
    await tables.store.counts("alice", "g")
    await tables.store.results("alice", "g")
    await database.close()
    assert len(plans) >= 6
    for plan in plans:
        assert "SCAN" not in plan and "TEMP" not in plan
        assert "tenant=?" in plan or "job_results" in plan
