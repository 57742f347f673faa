"""Attempts at jobs that fail in ways that no error of the tree names."""

from __future__ import annotations

import json
from typing import Any

import pytest

from services.router.api.jobs.executor import AnswerExecutor
from services.router.jobs.decisions import MAX_FAILURES, after_attempt
from services.router.jobs.types import ClaimedJob, JobState
from services.router.server import RouterServer
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
    assert after_attempt(outcome, failures=0, jitter=0.0).is_failure
    assert after_attempt(outcome, failures=MAX_FAILURES - 1, jitter=0.0).state is JobState.FAILED
