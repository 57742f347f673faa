"""The task of one request, and how it ends."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from services.router.execution.running_request import RunningRequest, execute
from services.router.recording.timeline import RequestStatus
from services.router.request.model_card import ModelCard
from services.router.request.types import Caller, GenerationRequest, PromptInput, Sampling
from slipstream import errors
from tests.router.conftest import eventually, open_router
from tests.router.support.fake_cluster import FakeCluster

ENDS = ("failed", "aborted")


class FakeTicket:
    """An admission ticket that is admitted at first, and never again after a preemption."""

    def __init__(self) -> None:
        self.began = self.preempted = False
        self.late_reason = ""
        self._admitted = asyncio.Event()
        self._admitted.set()

    async def admitted(self) -> None:
        await self._admitted.wait()

    def put_back(self) -> None:
        self._admitted.clear()
        self.began, self.preempted = False, True


class EndlessWork:
    async def run(self) -> None:
        await asyncio.Event().wait()


@pytest.mark.parametrize("deadline_first", [True, False])
async def test_a_deadline_ends_a_request_that_is_being_preempted(deadline_first: bool) -> None:
    run, place = RunningRequest("r"), FakeTicket()
    work: Any = EndlessWork()
    run.ticket = place  # type: ignore[assignment]
    task = run.start(execute(run, lambda: work))
    await asyncio.sleep(0)

    def preempt() -> None:
        place.put_back()
        run.preempt()

    for step in (run.end_at_deadline, preempt) if deadline_first else (preempt, run.end_at_deadline):
        step()
    async with asyncio.timeout(60):
        await asyncio.wait([task])
    assert task.cancelled()
    assert isinstance(run.ended_by, errors.DeadlineExceeded)


@pytest.mark.parametrize(("attempt", "submitted_unix_s"), [(0, 0), (1, 0), (0, 1_800_000_000)])
async def test_a_stream_that_a_stopping_router_cuts_fails_unless_it_goes_on(
    cluster: FakeCluster, card: ModelCard, attempt: int, submitted_unix_s: int
) -> None:
    for decode in cluster.decodes:
        decode.gate.clear()
    request = GenerationRequest(PromptInput("in order"), sampling=Sampling(max_tokens=30))
    async with open_router(cluster, card) as router, asyncio.timeout(60):
        run = await router.manager.begin(request, Caller(attempt=attempt, submitted_unix_s=submitted_unix_s))
        await eventually(lambda: run.sink.completion_tokens > 0)
        await router.manager.close()
        ends = {kind: router.counters.total(f"slipstream_requests_{kind}_total") for kind in ENDS}
    goes_on = bool(attempt or submitted_unix_s)
    assert ends == {"failed": not goes_on, "aborted": goes_on}
    assert run.timeline.status == (RequestStatus.CANCELLED if goes_on else RequestStatus.FAILED)
