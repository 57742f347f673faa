"""Which jobs wait for live requests: order, choices, and that nothing is left of those that have ended."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest

from services.router.execution.event_queue import ResponseQueue
from services.router.execution.policies.job_holds import JobHold, JobHolds, LiveSample, MetJobs
from services.router.request.types import Caller


class Run:
    """A request that counts how often it left its workers."""

    def __init__(self, caller: Caller) -> None:
        self.caller = caller
        self.hold: JobHold | None = None
        self.met_jobs = MetJobs()
        self.figures: Any = ResponseQueue()
        self.n_suspended = 0

    @property
    def is_held(self) -> bool:
        return self.hold is not None and self.hold.is_held

    def suspend(self) -> None:
        self.n_suspended += 1


def job() -> Caller:
    caller = Caller(tenant="alice", submitted_unix_s=1)
    assert caller.is_job
    return caller


def add(jobs: JobHolds, caller: Caller, n_choices: int = 1) -> list[Run]:
    runs = [Run(caller) for _ in range(n_choices)]
    for run in runs:
        jobs.add(run, caller, 0, began_s=0.0)
    return runs


@pytest.mark.parametrize(
    ("limit", "running"),
    [
        (0, [False] * 3),
        (1, [True, False, False]),
        (4, [True, False, False]),
        (5, [True, False, True]),
        (6, [True, True, False]),
        (7, [True] * 3),
        (None, [True] * 3),
    ],
)
@pytest.mark.parametrize("before", [0, 3, None])
async def test_each_choice_of_a_job_counts(
    limit: int | None, running: list[bool], before: int | None
) -> None:
    """Else jobs with many choices would take the places that jobs leave to live requests."""
    jobs = JobHolds()
    added = [add(jobs, job(), n_choices) for n_choices in (4, 2, 1)]
    jobs.set_limit(before)
    jobs.set_limit(limit)
    assert [[not run.is_held for run in runs] for runs in added] == [
        [is_running] * len(runs) for is_running, runs in zip(running, added, strict=True)
    ]
    assert (jobs.running, jobs.held) == (sum(running), 3 - sum(running))


@pytest.mark.parametrize("n_choices", [(1,), (4,), (2, 4), (1, 1, 3)])
@pytest.mark.parametrize("limit", [None, 0, 1, 2, 3, 5])
async def test_a_job_that_begins_is_held_as_the_limit_would_hold_it(
    limit: int | None, n_choices: tuple[int, ...]
) -> None:
    jobs, callers = JobHolds(), [job() for _ in (*n_choices, 1)]
    runs = [run for caller, n in zip(callers, n_choices, strict=False) for run in add(jobs, caller, n)]
    jobs.set_limit(limit)
    runs += add(jobs, callers[-1])
    at_once = [run.is_held for run in runs]
    jobs.set_limit(limit)
    assert [run.is_held for run in runs] == at_once
    assert jobs.n_held_total == sum(at_once) == sum(run.n_suspended for run in runs)
    assert [run.hold is not None and run.hold.was_held for run in runs] == at_once


async def test_choices_share_their_jobs_hold() -> None:
    jobs, caller = JobHolds(), job()
    jobs.set_limit(1)
    assert [run.is_held for run in add(jobs, caller, 3)] == [False] * 3
    jobs.set_limit(0)
    (held,) = add(jobs, caller)
    assert held.is_held and (jobs.running, jobs.held) == (0, 1)


async def test_a_live_request_holds_all_but_the_jobs_beside_it() -> None:
    jobs, live, samples = JobHolds(), Caller(tenant="bob"), list[LiveSample]()
    assert jobs.live_arrived(live) == 0
    runs = [run for _ in range(3) for run in add(jobs, job())]
    jobs.beside = 1
    assert jobs.live_arrived(runs[0].caller) == 0 and jobs.running == 3
    run = Run(live)
    jobs.add(run, live, jobs.live_arrived(live), began_s=5.0)
    assert [each.is_held for each in runs] == [False, True, True]
    assert run.hold is None and run.met_jobs == MetJobs(5.0, met=3, beside=1)
    jobs.beside = 2
    assert jobs.live_arrived(live) == 1 and jobs.running == 1, "the lower limit counts"
    jobs.remove(run, now_s=5.12, is_whole=True)
    jobs.observer = SimpleNamespace(observe=samples.append)
    jobs.remove(run, now_s=5.12, is_whole=False)
    for completion_tokens in (6, 5, 4):
        run.figures = SimpleNamespace(
            ttft_ms=20.0, prompt_tokens=100, cached_tokens=60, completion_tokens=completion_tokens
        )
        jobs.remove(run, now_s=5.12, is_whole=True)
    assert [each.token_ms for each in samples] == pytest.approx([20.0, 25.0, 0.0])
    assert {(each.ttft_ms, each.new_tokens, each.met, each.beside) for each in samples} == {(20.0, 40, 3, 1)}


@pytest.mark.parametrize("seed", range(20))
async def test_nothing_is_left_of_jobs_in_any_order_of_events(seed: int) -> None:
    number, jobs, callers = random.Random(seed), JobHolds(), [job() for _ in range(5)]
    live, runs = Caller(tenant="bob"), list[Run]()
    for _ in range(300):
        match number.randrange(5):
            case 0 | 1:
                caller = number.choice([*callers, live])
                met = jobs.live_arrived(caller)
                run = Run(caller)
                jobs.add(run, caller, met, began_s=0.0)
                runs.append(run)
            case 2 if runs:
                run = runs.pop(number.randrange(len(runs)))
                jobs.remove(run, now_s=1.0, is_whole=number.random() < 0.5)
            case 3:
                jobs.set_limit(number.choice([None, 0, 1, 2, 9]))
            case 4:
                jobs.beside = number.randrange(3)
        present = {id(run.caller) for run in runs if run.hold is not None}
        assert jobs.running + jobs.held == len(present)
        held = {id(run.caller): run.is_held for run in runs if run.hold is not None}
        assert all(held[id(run.caller)] == run.is_held for run in runs if run.hold is not None)
    for run in runs:
        jobs.remove(run, now_s=1.0, is_whole=False)
    assert not jobs._jobs
