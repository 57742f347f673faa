"""Attempts at jobs that fail in ways that no error of the tree names."""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any

import pytest

from services.router.api.jobs.executor import AnswerExecutor
from services.router.execution.running_request import RunningRequest
from services.router.jobs.decisions import MAX_FAILURES, after_attempt
from services.router.jobs.types import ClaimedJob, JobState
from services.router.request.model_card import ModelCard
from services.router.request.types import GenerationRequest
from services.router.server import RouterServer
from slipstream.errors import DeadlineExceeded, InvalidArgument, Overloaded
from tests.router.conftest import HELLO


async def test_an_unexpected_failure_counts_as_one(
    router: RouterServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A job that fails so each time ends before it expires."""

    async def fail(*_: Any) -> Any:
        raise KeyError("usage")

    monkeypatch.setattr("services.router.api.jobs.executor.run_to_end", fail)
    executor: AnswerExecutor = router.jobs._executor
    data = json.dumps({"messages": HELLO}).encode()
    outcome = await executor.run(ClaimedJob("job-1", "alice", "/v1/chat/completions", data, 1, 0, 1.0, 1e12))
    assert (outcome.status, outcome.is_final) == (500, False)
    assert after_attempt(outcome, attempt=1, failures=0, jitter=0.0).is_failure
    assert after_attempt(outcome, attempt=1, failures=MAX_FAILURES - 1, jitter=0.0).state is JobState.FAILED


@pytest.mark.parametrize(("left_s", "state"), [(0.5, JobState.EXPIRED), (900.0, JobState.FAILED)])
async def test_a_job_that_runs_until_it_expires_has_expired(
    router: RouterServer, monkeypatch: pytest.MonkeyPatch, left_s: float, state: JobState
) -> None:
    """What ends earlier has reached the limit of one request, and failed."""

    async def end_late(*_: Any) -> Any:
        raise DeadlineExceeded("the request's deadline passed")

    monkeypatch.setattr("services.router.api.jobs.executor.run_to_end", end_late)
    executor: AnswerExecutor = router.jobs._executor
    data = json.dumps({"messages": HELLO}).encode()
    expires_unix_s = time.time() + left_s
    outcome = await executor.run(
        ClaimedJob("job-1", "alice", "/v1/chat/completions", data, 1, 0, 1.0, expires_unix_s)
    )
    assert after_attempt(outcome, attempt=1, failures=0, jitter=0.0).state is state


async def test_a_job_of_a_revoked_key_does_not_begin(router: RouterServer) -> None:
    """The look at running requests, once a second, does not see what is as short as a job."""
    router._options.keys.replace([], {})
    executor: AnswerExecutor = router.jobs._executor
    data = json.dumps({"messages": HELLO}).encode()
    job = ClaimedJob("job-1", "alice", "/v1/chat/completions", data, 1, 0, 1.0, 1e12, key_sha256=b"k" * 32)
    outcome = await executor.run(job)
    assert (outcome.status, outcome.is_final) == (401, True)
    assert b"revoked" in outcome.body and not router.manager.held


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        (
            "/v1/chat/completions",
            {"messages": HELLO, "response_format": {"type": "newer"}},
            "response_format",
        ),
        (
            "/v1/chat/completions",
            {"messages": HELLO, "structured_outputs": {"newer": 1}},
            "structured_outputs",
        ),
        ("/v1/completions", {"prompt": "hi", "temperature": 1e9}, "temperature"),
        ("/v9/newer", {}, "no such endpoint"),
    ],
)
async def test_a_body_of_a_newer_release_waits_for_another_router(
    router: RouterServer, path: str, body: dict[str, Any], field: str
) -> None:
    executor: AnswerExecutor = router.jobs._executor
    job = ClaimedJob("job-1", "alice", path, json.dumps(body).encode(), 1, 0, 1.0, 1e12, was_checked=True)
    outcome = await executor.run(job)
    assert outcome.status in (400, 404) and field in outcome.body.decode()
    assert not outcome.is_final
    delays_s = []
    for attempt in (1, MAX_FAILURES, 1000):
        then = after_attempt(outcome, attempt=attempt, failures=MAX_FAILURES - 1, jitter=0.0)
        assert (then.state, then.is_failure) == (JobState.QUEUED, False)
        assert field in then.error
        delays_s.append(then.delay_s)
    assert delays_s == [60.0, 60.0, 150.0]


async def test_a_refusal_that_a_busy_router_cannot_explain_is_not_final(
    router: RouterServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    executor: AnswerExecutor = router.jobs._executor
    refusals = iter([InvalidArgument("temperature", "is newer"), Overloaded("too many messages wait")])

    async def read(*_: Any, **__: Any) -> Any:
        raise next(refusals)

    monkeypatch.setattr(router.manager, "read", read)
    data = json.dumps({"messages": HELLO}).encode()
    job = ClaimedJob("job-1", "alice", "/v1/chat/completions", data, 1, 0, 1.0, 1e12, was_checked=True)
    outcome = await executor.run(job)
    assert (outcome.status, outcome.is_final) == (400, False)
    assert next(refusals, None) is None


async def test_what_only_its_run_refuses_fails_a_job_at_once(router: RouterServer, card: ModelCard) -> None:
    executor: AnswerExecutor = router.jobs._executor
    data = json.dumps({"prompt": [97] * card.max_context_tokens}).encode()
    job = ClaimedJob("job-1", "alice", "/v1/completions", data, 1, 0, 1.0, 1e12, was_checked=True)
    outcome = await executor.run(job)
    assert (outcome.status, outcome.is_final) == (400, True), outcome.body
    data = json.dumps({"input": "hi", "previous_response_id": "resp_gone"}).encode()
    job = ClaimedJob("job-2", "alice", "/v1/responses", data, 1, 0, 1.0, 1e12, was_checked=True)
    outcome = await executor.run(job)
    assert outcome.is_final, outcome.body
    data = json.dumps({"prompt": "hi", "temperature": 1e9}).encode()
    line = ClaimedJob("job-3", "alice", "/v1/completions", data, 1, 0, 1.0, 1e12)  # of a batch
    assert (await executor.run(line)).is_final


@pytest.mark.parametrize("n", [1, 2])
async def test_a_job_runs_under_its_id_and_ends_no_request_with_the_id_of_its_body(
    router: RouterServer, monkeypatch: pytest.MonkeyPatch, n: int
) -> None:
    executor: AnswerExecutor = router.jobs._executor
    begun: list[str] = []
    begin = router.manager.begin

    async def note(request: GenerationRequest, *args: Any, **kwargs: Any) -> RunningRequest:
        begun.append(request.request_id)
        return await begin(request, *args, **kwargs)

    monkeypatch.setattr(router.manager, "begin", note)
    data = json.dumps({"messages": HELLO, "max_tokens": 4, "request_id": "same", "n": n}).encode()
    jobs = [
        ClaimedJob(f"job-{number}", "alice", "/v1/chat/completions", data, 1, 0, 1.0, 1e12)
        for number in range(3)
    ]
    outcomes = await asyncio.gather(*(executor.run(job) for job in jobs))
    assert [outcome.status for outcome in outcomes] == [200] * 3, outcomes
    assert sorted(begun) == sorted(f"{job.id}{end}" for job in jobs for end in ("", ".1")[:n])
