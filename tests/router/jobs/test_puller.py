"""A router that runs jobs: room, preemption, cancels, losses."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from libs.common import service_bounds
from libs.database.database import open_database
from services.router.jobs.decisions import LONGEST_HOLD_S, Headroom
from services.router.jobs.types import LONGEST_WAIT_S, JobOutcome, JobState
from tests.router.jobs.puller_rig import IDLE, HeldExecutor, PullerRig
from tests.router.jobs.stores import JobTables


async def test_jobs_run_to_their_ends(rig: PullerRig) -> None:
    ids = await rig.tables.submit("a", "b", "c")
    rig.start("r1")
    await rig.until_begun(3)
    rig.executor.finish_all()
    await rig.until_states(succeeded=3)
    ended = 'slipstream_jobs_ended_total{state="succeeded"}'
    async with asyncio.timeout(30):  # a job is counted behind the write of its state
        while rig.counters.snapshot().get(ended) != 3:
            await asyncio.sleep(0.01)
    assert (await rig.tables.store.result("alice", ids[0])) is not None


async def test_nothing_is_pulled_while_a_live_request_waits(rig: PullerRig) -> None:
    rig.room = replace(IDLE, live_waiting=1)
    await rig.tables.submit("a")
    puller = rig.start("r1")
    async with asyncio.timeout(30):
        while not puller._owner:
            await asyncio.sleep(0.01)
    await rig.until_asked(6)  # several ticks pass
    assert rig.executor.begun == []
    rig.room = IDLE
    await rig.until_begun(1)


async def test_live_requests_hold_jobs_and_no_new_one_begins(rig: PullerRig) -> None:
    await rig.tables.submit("a", "b")
    rig.start("r1")
    await rig.until_begun(2)
    rig.room = replace(IDLE, live_running=1)
    await rig.until_limit(0)
    await rig.tables.submit("c")
    heartbeats = len(rig.executor.limits)
    async with asyncio.timeout(30):
        while len(rig.executor.limits) < heartbeats + 5:  # several ticks pass
            await asyncio.sleep(0.01)
    assert len(rig.executor.begun) == 2
    assert (await rig.tables.store.counts("alice")).running == 2
    rig.room = IDLE
    await rig.until_begun(3)
    assert rig.executor.limits[-1] >= 2
    rig.executor.finish_all()
    await rig.until_states(succeeded=3)
    assert {job.attempt for job in await rig.tables.store.list_jobs("alice")} == {1}


async def test_jobs_that_are_held_for_long_go_back_to_the_queue(rig: PullerRig) -> None:
    await rig.tables.submit("a", "b")
    rig.start("r1")
    await rig.until_begun(2)
    rig.room = replace(IDLE, live_running=1, beside_live=1)
    newest = rig.executor.begun[-1][0]
    await rig.until_limit(1)
    rig.clock_s += LONGEST_HOLD_S
    await rig.until_states(running=1, queued=1)
    assert (await rig.tables.store.get("alice", newest)).state is JobState.QUEUED
    rig.room = IDLE
    await rig.until_begun(3)
    assert rig.executor.begun[-1] == (newest, 2)
    rig.executor.finish_all()
    await rig.until_states(succeeded=2)


async def test_a_job_that_is_cancelled_amid_its_release_stops_no_other(
    rig: PullerRig, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    rig.room = replace(IDLE, places=2)  # of which jobs get one
    await rig.tables.submit("a", "b")
    puller, release = rig.start("r1"), rig.tables.leases.release
    await rig.until_begun(1)
    async with asyncio.timeout(30):
        while not puller._claimed:
            await asyncio.sleep(0.01)
    waiting = puller._claimed[-1].id

    async def release_late(owner: str, job_id: str, *rest: Any) -> bool:
        if job_id == waiting:
            await rig.tables.store.cancel("alice", job_id)
            async with asyncio.timeout(30):
                while puller._claimed:  # until a heartbeat has seen it
                    await asyncio.sleep(0.01)
        return await release(owner, job_id, *rest)

    monkeypatch.setattr(rig.tables.leases, "release", release_late)
    rig.room = replace(rig.room, is_draining=True)
    await rig.until_states(queued=1, cancelled=1)
    assert "IndexError" not in caplog.text


async def test_a_job_that_waited_for_too_long_begins_beside_live_requests(rig: PullerRig) -> None:
    rig.room = Headroom(True, 8, 3, 8, 0, live_ended_s=0.0)
    rig.start("r1")
    rig.tables.now_s += LONGEST_WAIT_S
    [late] = await rig.tables.submit("late")
    rig.tables.now_s += LONGEST_WAIT_S
    await rig.tables.submit("young")
    await rig.until_begun(1)
    assert rig.executor.begun == [(late, 1)]
    await rig.until_limit(1)
    rig.executor.finish_all()
    await rig.until_states(succeeded=1)
    await rig.until_limit(0)
    assert len(rig.executor.begun) == 1


async def test_the_store_says_which_running_jobs_are_held(rig: PullerRig) -> None:
    [job_id] = await rig.tables.submit("a")
    rig.start("r1")
    await rig.until_begun(1)
    for room, is_held in ((replace(IDLE, live_waiting=1), True), (IDLE, False)):
        rig.room = room
        async with asyncio.timeout(30):
            while (job := await rig.tables.store.get("alice", job_id)).is_held != is_held:
                await asyncio.sleep(0.01)
        assert job.state is JobState.RUNNING


async def test_a_cancelled_job_stops_running(rig: PullerRig) -> None:
    [job_id] = await rig.tables.submit("a")
    rig.start("r1")
    await rig.until_begun(1)
    await rig.tables.store.cancel("alice", job_id)
    async with asyncio.timeout(30):
        while not rig.executor.ends[job_id].cancelled():
            await asyncio.sleep(0.01)
    assert (await rig.tables.store.get("alice", job_id)).state is JobState.CANCELLED


async def test_the_jobs_of_a_router_that_dies_run_elsewhere(rig: PullerRig) -> None:
    await rig.tables.submit("a", "b")
    dead = rig.start("dead")
    await rig.until_begun(2)
    for task in dead._tasks:
        task.cancel()  # no heartbeat any more, while its jobs still run
    second = HeldExecutor()
    rig.room = replace(IDLE, is_ready=False)
    alive = rig.start("alive", second)
    async with asyncio.timeout(30):
        while "slipstream_jobs_running" not in {k for k, v in alive.gauges().items() if v == 2}:
            await asyncio.sleep(0.01)
    rig.room = IDLE
    async with asyncio.timeout(30):
        while len(second.begun) < 2:
            rig.clock_s += 1.0  # the lease is counted from the new router's first look
            await asyncio.sleep(0.01)
    rig.executor.finish_all()  # the results of the first router come late
    second.finish_all()
    await rig.until_states(succeeded=2)
    assert rig.counters.total("slipstream_job_leases_lost_total") >= 2
    assert {job.attempt for job in await rig.tables.store.list_jobs("alice")} == {2}


async def test_a_router_that_was_silent_registers_again(rig: PullerRig) -> None:
    await rig.tables.submit("a")
    rig.start("r1")
    await rig.until_begun(1)
    await rig.tables.database.run(lambda tx: tx.execute("DELETE FROM job_owners"))
    await rig.until_begun(2)
    assert rig.executor.begun[1][1] == 2
    rig.executor.finish_all()
    await rig.until_states(succeeded=1)


async def test_a_claim_whose_answer_was_lost_is_given_back(rig: PullerRig) -> None:
    puller = rig.start("r1")
    async with asyncio.timeout(30):
        while not puller._owner:
            await asyncio.sleep(0.01)
    rig.room = replace(IDLE, is_ready=False)
    await rig.tables.submit("a")
    await rig.tables.leases.claim(puller._owner, 1)  # this router does not learn of it
    await rig.until_states(queued=1)


async def test_a_router_that_stops_gives_its_jobs_back(rig: PullerRig) -> None:
    await rig.tables.submit("a", "b")
    puller = rig.start("r1")
    await rig.until_begun(2)
    await puller.close()
    assert (await rig.tables.store.counts("alice")).queued == 2


async def test_a_passing_failure_is_repeated_and_a_final_one_is_not(rig: PullerRig) -> None:
    passing, final = JobOutcome(503, b"{}", is_final=False), JobOutcome(400, b'{"error": {}}')
    [job_id] = await rig.tables.submit("a")
    rig.start("r1")
    await rig.until_begun(1)
    rig.executor.ends[job_id].set_result(passing)
    await rig.until_states(queued=1)
    rig.tables.now_s += 1000
    await rig.until_begun(2)
    rig.executor.ends[job_id].set_result(final)
    await rig.until_states(failed=1)
    result = await rig.tables.store.result("alice", job_id)
    assert result is not None and result.body == final.body


async def test_a_job_that_runs_until_it_expires_has_no_result(rig: PullerRig) -> None:
    [job_id] = await rig.tables.submit("a")
    rig.start("r1")
    await rig.until_begun(1)
    rig.executor.ends[job_id].set_result(JobOutcome(504, b"{}", is_late=True))
    await rig.until_states(expired=1)
    assert await rig.tables.store.result("alice", job_id) is None
    assert "in time" in (await rig.tables.store.get("alice", job_id)).error


async def test_a_router_that_live_requests_keep_from_jobs_sees_the_queue(rig: PullerRig) -> None:
    rig.room = replace(IDLE, live_waiting=1)
    await rig.tables.submit("a", "b")
    pullers = [rig.start("r1"), rig.start("r2")]
    async with asyncio.timeout(30):
        while any(puller.waiting != 2 for puller in pullers):
            await asyncio.sleep(0.01)
    assert not rig.executor.begun
    assert all(puller.gauges()["slipstream_database_unavailable"] == 0 for puller in pullers)


async def test_a_database_that_is_unavailable_is_a_figure(tmp_path: Path) -> None:
    (tmp_path / "jobs.db").write_bytes(b"this is no database" * 100)
    database = open_database(f"sqlite:{tmp_path}/jobs.db")
    rig = PullerRig(JobTables(database))
    puller = rig.start("r1")
    try:
        async with asyncio.timeout(30):
            while not puller.gauges()["slipstream_database_unavailable"]:
                await asyncio.sleep(0.01)
    finally:
        await puller.close()
        await database.close()


async def test_an_end_waits_for_no_database_that_is_silent(
    rig: PullerRig, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def wait(owner: str) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr(service_bounds, "DATABASE_END_S", 0.05)
    await rig.tables.submit("a")
    puller = rig.start("r1")
    await rig.until_begun(1)  # so that the router has something to give back
    monkeypatch.setattr(rig.tables.leases, "resign", wait)
    async with asyncio.timeout(30):
        await puller.close()
    assert "jobs are not given back: the database does not answer" in caplog.text


@pytest.mark.parametrize("call", ["claim", "raise_heartbeat"])
async def test_an_unexpected_failure_does_not_end_the_work_of_a_router(
    rig: PullerRig, call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else its heartbeat would keep its jobs from other routers, and none of them would run."""
    original, n_failures = getattr(rig.tables.leases, call), 0

    async def fail_once(*arguments: Any) -> Any:
        nonlocal n_failures
        n_failures += 1
        if n_failures == 1:
            raise KeyError("job")
        return await original(*arguments)

    monkeypatch.setattr(rig.tables.leases, call, fail_once)
    await rig.tables.submit("a")
    rig.start("r1")
    await rig.until_begun(1)
    async with asyncio.timeout(30):
        while n_failures < 2:
            await asyncio.sleep(0.01)
    rig.executor.finish_all()
    await rig.until_states(succeeded=1)
