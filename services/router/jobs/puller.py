"""Runs stored jobs while the cluster has room: claims them, holds them while live requests run.

One owner of leases (leases.py). A job that was claimed starts when a prefill worker is idle. Live requests
hold running jobs, which go on from their tokens; those that are held for long go back to the queue.
"""

from __future__ import annotations

import asyncio
import enum
import logging
import math
import os
import random
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace

from libs.common import service_bounds
from libs.common.telemetry.counters import Counters
from services.router.jobs.decisions import (
    Headroom,
    NextState,
    after_attempt,
    jobs_allowed,
    jobs_on_workers,
    jobs_to_release,
    overdue_jobs,
)
from services.router.jobs.executor import JobExecutor
from services.router.jobs.leases import JobKey, JobLeases, OwnerLost, QueueState
from services.router.jobs.owner_watch import OwnerWatch
from services.router.jobs.rows import count_ended
from services.router.jobs.types import LONGEST_WAIT_S, ClaimedJob, JobOutcome, JobProgress, JobState
from slipstream.errors import Overloaded, SlipstreamError, Unavailable
from slipstream.rpc.backoff import Backoff

log = logging.getLogger(__name__)

HEARTBEAT_S = 2.0
LEASE_S = 15.0
# Live requests that wait are seen this soon; without jobs the database is asked less often.
_BUSY_TICK_S, _IDLE_TICK_S = 0.02, 0.25
_CLAIMED_AT_ONCE = 8
_SWEEP_EVERY = 5  # heartbeats
_AGAIN = NextState(JobState.QUEUED)
# Failures for which the database, as it is later, may make the change.
_PASSING = (Unavailable, Overloaded)


class StopReason(enum.Enum):
    """Why a running job is stopped."""

    PREEMPTED = "preempted"
    LOST = "lost"  # cancelled, expired, or another router has it


@dataclass(eq=False, slots=True)
class _RunningJob:
    job: ClaimedJob
    owner: str
    task: asyncio.Task[None] | None = None
    stop_reason: StopReason | None = None

    def stop(self, reason: StopReason) -> None:
        if self.stop_reason is None and self.task is not None:
            self.stop_reason = reason
            self.task.cancel()


class JobPuller:
    """The jobs that this router runs. `room` is asked at each tick; see `Headroom`."""

    def __init__(
        self,
        leases: JobLeases,
        executor: JobExecutor,
        *,
        instance: str,
        room: Callable[[], Headroom],
        clock: Callable[[], float],
        wall_clock_s: Callable[[], float],
        counters: Counters,
        longest_wait_s: float = LONGEST_WAIT_S,
        heartbeat_s: float = HEARTBEAT_S,
        lease_s: float = LEASE_S,
    ) -> None:
        self._leases = leases
        self._executor = executor
        self._instance = instance
        self._longest_wait_s = longest_wait_s
        self._wall_clock_s = wall_clock_s
        self._room = room
        self._clock = clock
        self._counters = counters
        self._heartbeat_s = heartbeat_s
        self._watch = OwnerWatch(lease_s)
        self._owner = ""  # "" until it is registered
        self._running: dict[tuple[str, int], _RunningJob] = {}
        self._claimed: deque[ClaimedJob] = deque()  # not started yet
        self._on_workers = 0  # running jobs that are not held
        self._held_since_s = math.inf  # since when live requests hold claimed jobs
        self._tasks: list[asyncio.Task[None]] = []
        self._seen = QueueState({}, frozenset(), 0, 0)
        self._is_unavailable = False  # the database did not answer the last heartbeat

    @property
    def running(self) -> int:
        """Jobs that run here."""
        return len(self._running)

    @property
    def waiting(self) -> int:
        """Jobs that no router runs, as the last heartbeat saw the queue of all routers."""
        return self._seen.queued

    @property
    def overdue(self) -> int:
        """Overdue jobs of this router and of the queue, which run beside live requests."""
        mine = [running.job.created_unix_s for running in self._running.values()]
        mine += [job.created_unix_s for job in self._claimed]
        return overdue_jobs(
            [*mine, *self._seen.oldest_unix_s],
            now_unix_s=self._wall_clock_s(),
            longest_wait_s=self._longest_wait_s,
        )

    def gauges(self) -> dict[str, float]:
        """The metrics of the queue, of all routers together, as the last heartbeat saw it."""
        return {
            "slipstream_jobs_waiting": self._seen.queued,
            "slipstream_jobs_running": self._seen.running,
            "slipstream_database_unavailable": float(self._is_unavailable),
        }

    def start(self) -> None:
        """Begin to pull."""
        for work in (self._pull(), self._raise_heartbeats()):
            self._tasks.append(asyncio.create_task(work, name="jobs"))

    async def close(self) -> None:
        """Stop what runs, and give everything back."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._stop_all(StopReason.LOST)
        owner, self._owner = self._owner, ""
        self._claimed.clear()
        if owner:
            try:
                async with asyncio.timeout(service_bounds.DATABASE_END_S):
                    await self._leases.resign(owner)
            except (SlipstreamError, TimeoutError) as error:  # others take the jobs over when the lease ends
                log.warning("jobs are not given back: %s", str(error) or "the database does not answer")

    # ---- pulling

    async def _pull(self) -> None:
        backoff = Backoff()
        while True:
            try:
                await self._tick()
                backoff.succeeded()
                pause_s = _BUSY_TICK_S if self._running or self._claimed else _IDLE_TICK_S
            except OwnerLost:
                await self._lose_owner()
                pause_s = backoff.pause_s(random.random())
            except SlipstreamError as error:
                log.warning("no jobs are pulled: %s", error)
                pause_s = backoff.pause_s(random.random())
            except Exception:  # else this router would keep its jobs, and run none until it ends
                log.exception("no jobs are pulled")
                pause_s = backoff.pause_s(random.random())
            await asyncio.sleep(pause_s)

    async def _tick(self) -> None:
        room, n, claimed = self._room(), self._pace(), self.running + len(self._claimed)
        held = claimed - jobs_allowed(room, max_running=service_bounds.MAX_RUNNING_JOBS)
        self._held_since_s = min(self._held_since_s, self._clock()) if held > 0 else math.inf
        held_s = self._clock() - self._held_since_s
        if n_back := jobs_to_release(room, claimed=claimed, held=held, held_s=held_s):
            await self._release_newest(n_back)
            return
        if not self._owner:
            await self._register()
        if n > claimed and await self._leases.has_queued():
            most = max(n - claimed, min(_CLAIMED_AT_ONCE, service_bounds.MAX_RUNNING_JOBS - claimed))
            found = await self._leases.claim(self._owner, most)
            self._counters.add("slipstream_jobs_claimed_total", len(found))
            self._claimed += found
            self._seen = replace(self._seen, oldest_unix_s=())  # else a job would count twice as overdue
            n = self._pace()
        while self._claimed and self.running < n:
            self._begin(self._claimed.popleft())
        self._on_workers = min(n, self.running)

    def _pace(self) -> int:
        """Hold and free running jobs; how many may be on workers."""
        n = jobs_on_workers(
            self._room(), running=self._on_workers, max_running=service_bounds.MAX_RUNNING_JOBS
        )
        self._executor.limit(n)
        return n

    async def _release_newest(self, n: int) -> None:
        """Give back what has not started, then the newest jobs that run."""
        while self._claimed and n > 0:
            job = self._claimed.pop()  # before the call, amid which a heartbeat may take out others
            await self._leases.release(self._owner, job.id, job.attempt, _AGAIN)
            n -= 1
        stopping = sum(running.stop_reason is not None for running in self._running.values())
        for running in list(reversed(self._running.values()))[: max(0, n - stopping)]:
            if running.stop_reason is None:
                self._counters.add("slipstream_jobs_preempted_total")
                running.stop(StopReason.PREEMPTED)

    async def _register(self) -> None:
        owner = f"{self._instance}.{os.urandom(6).hex()}"
        await self._leases.register(owner)
        self._owner = owner

    async def _lose_owner(self) -> None:
        log.warning("this router was silent for too long; its jobs were given to others")
        self._counters.add("slipstream_job_leases_lost_total", self.running + len(self._claimed))
        self._owner = ""
        self._claimed.clear()
        await self._stop_all(StopReason.LOST)

    async def _stop_all(self, reason: StopReason) -> None:
        tasks = [running.task for running in self._running.values() if running.task is not None]
        for running in list(self._running.values()):
            running.stop(reason)
        await asyncio.gather(*tasks, return_exceptions=True)

    # ---- one job

    def _begin(self, job: ClaimedJob) -> None:
        running = _RunningJob(job, self._owner)
        self._running[job.id, job.attempt] = running
        running.task = asyncio.create_task(self._run(running), name=job.id)

    async def _run(self, running: _RunningJob) -> None:
        try:
            try:
                outcome = await self._executor.run(running.job)
            except asyncio.CancelledError:
                task = asyncio.current_task()
                assert task is not None
                task.uncancel()
                if running.stop_reason is not StopReason.PREEMPTED:
                    return
                await self._release(running, _AGAIN)
                return
            await self._end(running, outcome)
        except Exception:  # the row is still this router's; the heartbeat gives it back
            log.exception("job %s: its end is not stored; it runs again", running.job.id)
        finally:
            self._running.pop((running.job.id, running.job.attempt), None)

    async def _end(self, running: _RunningJob, outcome: JobOutcome) -> None:
        then = after_attempt(
            outcome,
            attempt=running.job.attempt,
            failures=running.job.failures,
            jitter=random.random(),
        )
        state = then.state
        try:
            is_kept = await self._store_end(running, outcome, then)
        except Exception as error:  # the database is there, and takes no such result
            log.exception("job %s: its end cannot be stored", running.job.id)
            reason = f"{type(error).__name__}: {error}"
            is_kept = await self._store(
                running, lambda: self._leases.fail(running.owner, running.job, reason)
            )
            state = JobState.FAILED
        if state is not JobState.QUEUED:
            count_ended(self._counters, state, int(is_kept))
        if not is_kept:
            self._counters.add("slipstream_job_leases_lost_total")

    async def _store_end(self, running: _RunningJob, outcome: JobOutcome, then: NextState) -> bool:
        if then.state is JobState.QUEUED:
            return await self._release(running, then)
        job, owner = running.job, running.owner
        if then.state is JobState.EXPIRED:
            return await self._store(running, lambda: self._leases.expire(owner, job))
        return await self._store(running, lambda: self._leases.finish(owner, job, outcome, then.state))

    async def _release(self, running: _RunningJob, then: NextState) -> bool:
        job = running.job
        return await self._store(
            running, lambda: self._leases.release(running.owner, job.id, job.attempt, then)
        )

    async def _store(self, running: _RunningJob, change: Callable[[], Awaitable[bool]]) -> bool:
        """Make a change in the database, as long as it takes while this router owns the job.

        Raises what the database refuses MAX_REFUSED_ENDS times.
        """
        backoff, refusals = Backoff(), 0
        while self._owner == running.owner:
            try:
                return await change()
            except SlipstreamError as error:
                refusals += not isinstance(error, _PASSING)
                if refusals >= service_bounds.MAX_REFUSED_ENDS:
                    raise
                log.warning("job %s waits for the database: %s", running.job.id, error)
                await asyncio.sleep(backoff.pause_s(random.random()))
        return False

    # ---- the heartbeat

    async def _raise_heartbeats(self) -> None:
        n_heartbeats, unknown = 0, frozenset[JobKey]()
        while True:
            await asyncio.sleep(self._heartbeat_s)
            try:
                if self._owner:
                    unknown = await self._raise_heartbeat(unknown)
                else:  # live requests keep this router from jobs, which wait all the same
                    self._seen = await self._leases.read_queue()
                n_heartbeats += 1
                if n_heartbeats % _SWEEP_EVERY == 1:
                    n_expired, _ = await self._leases.sweep()
                    count_ended(self._counters, JobState.EXPIRED, n_expired)
                self._is_unavailable = False
            except OwnerLost:
                await self._lose_owner()
            except SlipstreamError as error:
                self._is_unavailable = True
                log.warning("the jobs of this router have no heartbeat: %s", error)
            except Exception:
                log.exception("the jobs of this router have no heartbeat")

    async def _raise_heartbeat(self, unknown: frozenset[JobKey]) -> frozenset[JobKey]:
        """Raise the heartbeat and act on its answer; the jobs that this router has and does not know.

        They were claimed by a transaction whose answer was lost. One that a claim has just made is not yet
        known either, so only what was `unknown` before is given back.
        """
        owner, known = self._owner, frozenset(self._running)
        waiting = {(job.id, job.attempt) for job in self._claimed}
        by_id = self._executor.progress()
        progress = {key: by_id[key[0]] for key in known if key[0] in by_id}
        progress |= dict.fromkeys(waiting, JobProgress(is_held=True))
        seen = self._seen = await self._leases.raise_heartbeat(owner, progress)
        for key in known - seen.mine:
            if key in self._running:
                self._running[key].stop(StopReason.LOST)
        lost = waiting - seen.mine
        self._claimed = deque(job for job in self._claimed if (job.id, job.attempt) not in lost)
        for silent, heartbeat in self._watch.silent(seen.heartbeats, self._clock()):
            n_lost = await self._leases.remove_owner(silent, heartbeat) if silent != owner else 0
            self._counters.add("slipstream_job_leases_lost_total", n_lost)
        held = frozenset(self._running) | {(job.id, job.attempt) for job in self._claimed}
        for job_id, attempt in (seen.mine - held) & unknown:
            await self._leases.release(owner, job_id, attempt, _AGAIN)
        return seen.mine - held
