"""Jobs that have waited for too long go on beside live requests, whatever these do."""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import given
from hypothesis import strategies as st

from services.router.execution.event_queue import ResponseQueue
from services.router.execution.policies.job_holds import JobHold, JobHolds, MetJobs
from services.router.jobs.decisions import (
    LONGEST_HOLD_S,
    MOST_OVERDUE,
    Headroom,
    jobs_allowed,
    jobs_on_workers,
    jobs_to_release,
    overdue_jobs,
    share_claims,
)
from services.router.request.types import Caller

WAIT_S, MAX_RUNNING, MOST_WORK_S = 20, 4, 6
COUNTS = st.integers(0, 4)
LIVE = st.builds(
    Headroom,
    is_ready=st.just(True),
    live_running=COUNTS,
    live_waiting=COUNTS,
    places=st.integers(0, 8),
    idle_prefills=COUNTS,
    live_ended_s=st.sampled_from([0.0, 60.0]),
    beside_live=st.sampled_from([0, 0, 1]),
)


@dataclass(eq=False)
class SimulatedJob:
    """A job whose tokens are seconds of work."""

    tenant: str
    submitted_s: int
    work_s: int
    ended_s: int | None = None
    caller: Caller = field(init=False)
    hold: JobHold | None = None
    met_jobs: MetJobs = field(default_factory=MetJobs)
    figures: ResponseQueue = field(default_factory=ResponseQueue)

    def __post_init__(self) -> None:
        self.caller = Caller(tenant=self.tenant, submitted_unix_s=self.submitted_s + 1)

    def suspend(self) -> None: ...


class SimulatedRouter:
    """One router by the decisions of the puller, a second a tick."""

    def __init__(self) -> None:
        self.queued: list[SimulatedJob] = []
        self.running: list[SimulatedJob] = []
        self.holds = JobHolds()
        self.held_since_s: int | None = None

    def tick(self, live: Headroom, now_s: int) -> None:
        submitted = [float(job.submitted_s) for job in (*self.queued, *self.running)]
        overdue = overdue_jobs(submitted, now_unix_s=now_s, longest_wait_s=WAIT_S)
        room = Headroom(
            live.is_ready,
            live.live_running,
            live.live_waiting,
            live.places,
            live.idle_prefills,
            live_ended_s=live.live_ended_s,
            beside_live=live.beside_live,
            overdue=overdue,
        )
        held = len(self.running) - jobs_allowed(room, max_running=MAX_RUNNING)
        self.held_since_s = None if held <= 0 else now_s if self.held_since_s is None else self.held_since_s
        held_s = 0 if self.held_since_s is None else now_s - self.held_since_s
        n_back = jobs_to_release(room, claimed=len(self.running), held=held, held_s=held_s)
        for job in self.running[len(self.running) - n_back :]:
            self._leave(job)
            self.queued.append(job)
        n_beside = sum(not (job.hold and job.hold.is_held) for job in self.running)
        n = jobs_on_workers(room, running=n_beside, max_running=MAX_RUNNING)
        self._claim(n - len(self.running))
        self.holds.set_limit(n)
        for job in [job for job in self.running if job.hold and not job.hold.is_held]:
            job.work_s -= 1
            if not job.work_s:
                self._leave(job)
                job.ended_s = now_s

    def _leave(self, job: SimulatedJob) -> None:
        self.running.remove(job)
        self.holds.remove(job, now_s=0.0, is_whole=False)

    def _claim(self, n: int) -> None:
        waiting: dict[str, float] = {}
        counts: dict[str, int] = {}
        for job in self.queued:
            waiting[job.tenant] = min(waiting.get(job.tenant, job.submitted_s), job.submitted_s)
        for job in self.running:
            counts[job.tenant] = counts.get(job.tenant, 0) + 1
        for tenant, share in share_claims(waiting, counts, max(0, n)).items():
            mine = sorted((j for j in self.queued if j.tenant == tenant), key=lambda job: job.submitted_s)
            for job in mine[:share]:
                self.queued.remove(job)
                self.running.append(job)
                self.holds.add(job, job.caller, 0, began_s=0.0)


@given(
    st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 60), st.integers(1, MOST_WORK_S)), max_size=12),
    st.lists(LIVE, min_size=1, max_size=8),
)
async def test_every_job_ends_in_time_whatever_live_requests_do(
    submissions: list[tuple[str, int, int]], live: list[Headroom]
) -> None:
    """The wait, then the older jobs and those that the router had begun, one second a tick."""
    jobs = [SimulatedJob(*each) for each in submissions]
    bounds_s = {
        id(job): job.submitted_s
        + WAIT_S
        + 2 * LONGEST_HOLD_S
        + sum(each.work_s for each in jobs if each.submitted_s <= job.submitted_s)
        + MAX_RUNNING * MOST_WORK_S
        for job in jobs
    }
    router = SimulatedRouter()
    for now_s in range(60 + WAIT_S + int(2 * LONGEST_HOLD_S) + 20 * MOST_WORK_S):
        router.queued += [job for job in jobs if job.submitted_s == now_s]
        router.tick(live[now_s % len(live)], now_s)
    for job in jobs:
        assert job.ended_s is not None and job.ended_s <= bounds_s[id(job)], (job, router.queued)


@given(st.lists(st.floats(0, 100), max_size=8), st.floats(0, 200), st.floats(1, 50))
def test_few_jobs_are_overdue_and_only_old_ones(
    submitted: list[float], now_s: float, longest_wait_s: float
) -> None:
    n = overdue_jobs(submitted, now_unix_s=now_s, longest_wait_s=longest_wait_s)
    assert n <= MOST_OVERDUE
    assert bool(n) == any(now_s - each >= longest_wait_s for each in submitted)


def test_an_overdue_job_runs_beside_live_requests_that_leave_no_room() -> None:
    crowded = Headroom(True, 8, 3, 8, 0, live_ended_s=0.0)
    assert jobs_on_workers(crowded, running=0, max_running=64) == 0
    overdue = Headroom(True, 8, 3, 8, 0, live_ended_s=0.0, overdue=2)
    assert jobs_on_workers(overdue, running=0, max_running=64) == 2
    assert jobs_on_workers(overdue, running=0, max_running=1) == 1
    draining = Headroom(True, 8, 3, 8, 0, is_draining=True, overdue=2)
    assert jobs_on_workers(draining, running=2, max_running=64) == 0
