"""Claims, fences and losses of owners, on both databases."""

from __future__ import annotations

import asyncio

import pytest

from services.router.jobs.decisions import MAX_FAILURES, NextState, after_attempt
from services.router.jobs.leases import OwnerLost
from services.router.jobs.types import JobOutcome, JobProgress, JobState
from tests.router.jobs.stores import JobTables, make_request


async def test_each_job_is_claimed_once(tables: JobTables) -> None:
    ids = await tables.submit(*[f"prompt {i}" for i in range(40)])
    owners = [f"r{i}" for i in range(4)]
    for owner in owners:
        await tables.leases.register(owner)
    rounds = await asyncio.gather(*[tables.leases.claim(owner, 3) for owner in owners for _ in range(5)])
    claimed = [job.id for jobs in rounds for job in jobs]
    assert len(claimed) == len(set(claimed))
    while jobs := await tables.leases.claim("r0", 10):
        claimed += [job.id for job in jobs]
    assert sorted(claimed) == ids


async def test_a_common_prefix_is_claimed_together(tables: JobTables) -> None:
    def with_system(system: str, prompt: str) -> bytes:
        return (
            f'{{"messages": [{{"role": "system", "content": "{system}"}},'
            f' {{"role": "user", "content": "{prompt}"}}]}}'
        ).encode()

    requests = [
        make_request("x").__class__(path=make_request("x").path, body=with_system(system, f"q{i}"))
        for i, system in enumerate("ABABAB")
    ]
    jobs = await tables.store.submit("alice", requests)
    await tables.leases.register("r1")
    claimed = await tables.leases.claim("r1", 3)
    assert [job.id for job in claimed] == [jobs[i].id for i in (0, 2, 4)]


async def test_lines_of_a_batch_are_the_jobs_whose_body_was_not_checked(tables: JobTables) -> None:
    await tables.leases.register("r1")
    for group, was_checked in (("", True), ("night", True), ("batch_1", False), ("run_1", False)):
        await tables.submit("a", group_id=group)
        assert (await tables.claim_one("r1")).was_checked is was_checked


async def test_tenants_share_claims(tables: JobTables) -> None:
    await tables.submit(*[f"p{i}" for i in range(20)], tenant="greedy")
    tables.now_s += 1
    await tables.submit("p", tenant="modest")
    await tables.leases.register("r1")
    assert {job.tenant for job in await tables.leases.claim("r1", 2)} == {"greedy", "modest"}


async def test_a_silent_owner_loses_its_jobs_and_its_late_result(tables: JobTables) -> None:
    [job_id] = await tables.submit("a")
    for owner in ("r1", "r2"):
        await tables.leases.register(owner)
    stale = await tables.claim_one("r1")
    heartbeat = (await tables.leases.raise_heartbeat("r2")).heartbeats["r1"]
    assert await tables.leases.remove_owner("r1", heartbeat) == 1
    assert not await tables.finish("r1", stale)
    fresh = await tables.claim_one("r2")
    assert (fresh.id, fresh.attempt) == (job_id, stale.attempt + 1)
    assert not await tables.finish("r1", stale)
    assert await tables.finish("r2", fresh)
    with pytest.raises(OwnerLost):
        await tables.leases.claim("r1", 1)
    with pytest.raises(OwnerLost):
        await tables.leases.raise_heartbeat("r1")


async def test_an_owner_that_beats_is_not_taken_over(tables: JobTables) -> None:
    await tables.submit("a")
    await tables.leases.register("r1")
    job = await tables.claim_one("r1")
    seen = (await tables.leases.raise_heartbeat("r1")).heartbeats["r1"]
    await tables.leases.raise_heartbeat("r1")
    assert await tables.leases.remove_owner("r1", seen) == 0
    assert await tables.finish("r1", job)


async def test_a_job_that_ends_its_routers_fails_at_last(tables: JobTables) -> None:
    [job_id] = await tables.submit("poison")
    for loss in range(MAX_FAILURES):
        owner = f"r{loss}"
        await tables.leases.register(owner)
        tables.now_s += 1000
        await tables.claim_one(owner)
        heartbeat = (await tables.leases.raise_heartbeat(owner)).heartbeats[owner]
        await tables.leases.remove_owner(owner, heartbeat)
    job = await tables.store.get("alice", job_id)
    assert (job.state, job.status) == (JobState.FAILED, 500)


async def test_a_job_that_is_given_back_waits(tables: JobTables) -> None:
    await tables.submit("a")
    await tables.leases.register("r1")
    job = await tables.claim_one("r1")
    assert await tables.leases.release("r1", job.id, 1, NextState(JobState.QUEUED, 30.0, True))
    assert not await tables.leases.release("r1", job.id, 1, NextState(JobState.QUEUED, 0.0, True))
    assert await tables.leases.claim("r1", 1) == []
    tables.now_s += 31
    again = await tables.claim_one("r1")
    assert (again.attempt, again.failures) == (2, 1)


async def test_a_job_that_no_router_understands_expires_with_the_refusal(tables: JobTables) -> None:
    [job_id] = await tables.submit("a")
    await tables.leases.register("r1")
    for attempt in range(1, 3 * MAX_FAILURES):
        job = await tables.claim_one("r1")
        refused = JobOutcome(400, b"{}", is_final=False, refusal=f"temperature: {attempt}")
        then = after_attempt(refused, attempt=job.attempt, failures=job.failures, jitter=1.0)
        assert await tables.leases.release("r1", job.id, job.attempt, then)
        assert await tables.leases.claim("r1", 1) == []  # it is not claimed again at once
        waiting = await tables.store.get("alice", job_id)
        assert (waiting.state, waiting.error) == (JobState.QUEUED, f"temperature: {attempt}")
        tables.now_s += then.delay_s
    tables.now_s = job.expires_unix_s
    assert await tables.leases.sweep() == (1, 0)
    ended = await tables.store.get("alice", job_id)
    assert (ended.state, ended.error) == (JobState.EXPIRED, f"not done in time: temperature: {attempt}")


async def test_a_job_that_a_newer_router_runs_shows_no_refusal(tables: JobTables) -> None:
    [job_id] = await tables.submit("a")
    await tables.leases.register("r1")
    job = await tables.claim_one("r1")
    await tables.leases.release("r1", job.id, 1, NextState(JobState.QUEUED, error="temperature: newer"))
    again = await tables.claim_one("r1")
    assert (await tables.store.get("alice", job_id)).error == ""
    assert await tables.finish("r1", again)


async def test_a_beat_tells_what_an_owner_still_has(tables: JobTables) -> None:
    ids = await tables.submit("a", "b", "c")
    await tables.leases.register("r1")
    jobs = await tables.leases.claim("r1", 2)
    await tables.store.cancel("alice", jobs[0].id)
    state = await tables.leases.raise_heartbeat("r1", {(jobs[1].id, 1): JobProgress(12, is_held=True)})
    assert state.mine == {(jobs[1].id, 1)}
    assert (state.queued, state.running) == (1, 1)
    running = await tables.store.get("alice", jobs[1].id)
    assert (running.output_tokens, running.is_held) == (12, True)
    [queued] = await tables.store.list_jobs("alice", state=JobState.QUEUED)
    assert state.oldest_unix_s == (queued.created_unix_s,)
    await tables.leases.resign("r1")
    assert {job.state for job in await tables.store.list_jobs("alice")} == {
        JobState.QUEUED,
        JobState.CANCELLED,
    }
    assert len(ids) == 3


async def test_jobs_without_an_owner_are_queued_again(tables: JobTables) -> None:
    [job_id] = await tables.submit("a")
    await tables.leases.register("r1")
    await tables.claim_one("r1")
    await tables.database.run(lambda tx: tx.execute("DELETE FROM job_owners"))
    await tables.leases.sweep()
    assert (await tables.store.get("alice", job_id)).state is JobState.QUEUED
