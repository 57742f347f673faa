"""The calls of JobService, blocking and awaited. A router that is lost is replaced by the next one.

with Client("127.0.0.1:7000") as client:
    jobs = client.jobs.submit([{"messages": [{"role": "user", "content": "Hello"}]}])
    done = client.jobs.wait(jobs[0].id)
    print(done.answer["choices"][0]["message"]["content"])
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import aclosing
from typing import Any, TypeVar

import grpc

from slipstream.calls.callers import AsyncCaller, BlockingCaller, Metadata
from slipstream.endpoints import Endpoints
from slipstream.errors import SlipstreamError
from slipstream.jobs.messages import (
    FinishedJob,
    GroupProgress,
    JobOptions,
    ResultParts,
    SubmittedJob,
    amid,
    finished_job,
    group_progress,
    state_value,
    submissions,
    submitted_job,
    with_key,
)
from slipstream.v1 import jobs_pb2, jobs_pb2_grpc

T = TypeVar("T")
_PAGE = 1000
_RESULT_PART_BYTES = 4 << 20


class BlockingJobs:
    """The jobs of the caller's tenant; `Client.jobs`."""

    def __init__(self, endpoints: Endpoints[grpc.Channel], metadata: Metadata, max_retries: int) -> None:
        self._caller = BlockingCaller(jobs_pb2_grpc.JobServiceStub, endpoints, metadata, max_retries)

    def submit(
        self,
        bodies: Sequence[Mapping[str, Any]],
        *,
        references: Sequence[str] = (),
        options: JobOptions | None = None,
    ) -> list[SubmittedJob]:
        """Store bodies of an endpoint as jobs, which survive any crash from here on.

        Many bodies are several calls, each stored whole or not at all. An error after the first one has a
        note: how many jobs are stored, and the idempotency key that submits the others.
        """
        parts = self.submit_parts(bodies, references=references, options=options)
        return [job for part in parts for job in part]

    def submit_parts(
        self,
        bodies: Sequence[Mapping[str, Any]],
        *,
        references: Sequence[str] = (),
        options: JobOptions | None = None,
    ) -> Iterator[list[SubmittedJob]]:
        """Submit like `submit`; yield the jobs of each call as soon as they are stored."""
        options, n_stored = with_key(options), 0
        for request in submissions(bodies, references, options):
            try:
                answer = self._caller.call("SubmitJobs", request)
            except SlipstreamError as error:
                raise amid(error, n_stored, len(bodies), options.idempotency_key) from None
            n_stored += len(answer.jobs)
            yield [submitted_job(job) for job in answer.jobs]

    def get(self, job_id: str) -> FinishedJob:
        """One job, and its answer once it has one. Raises NotFound."""
        request = jobs_pb2.GetJobRequest(id=job_id, result_limit=_RESULT_PART_BYTES)
        parts = ResultParts(self._caller.call("GetJob", request))
        while parts.missing:
            request.result_offset = parts.n_bytes
            parts.add(self._caller.call("GetJob", request))
        return finished_job(parts.first.job, parts.result)

    def list_jobs(self, *, group_id: str = "", state: str = "") -> Iterator[SubmittedJob]:
        """The jobs in the order of their submission."""
        request = jobs_pb2.ListJobsRequest(group_id=group_id, state=state_value(state), limit=_PAGE)
        while page := self._caller.call("ListJobs", request).jobs:
            yield from [submitted_job(job) for job in page]
            request.after_id = page[-1].id

    def cancel(self, job_id: str = "", *, group_id: str = "") -> int:
        """End one job or all of a group; how many had not ended."""
        return int(self._caller.call("CancelJobs", _cancel_request(job_id, group_id)).cancelled)

    def follow(self, job_id: str) -> Iterator[SubmittedJob]:
        """The job now and after each change, until it has ended."""
        request = jobs_pb2.FollowJobsRequest(id=job_id)
        yield from self._follow(request, lambda r: submitted_job(r.job), lambda job: job.ended)

    def follow_group(self, group_id: str) -> Iterator[GroupProgress]:
        """The counts of a group now and after each change, until all its jobs have ended."""
        request = jobs_pb2.FollowJobsRequest(group_id=group_id)
        yield from self._follow(request, lambda r: group_progress(r.counts), lambda c: c.ended == c.total)

    def wait(self, job_id: str) -> FinishedJob:
        """The job and its answer, when it has ended."""
        for _ in self.follow(job_id):
            pass
        return self.get(job_id)

    def _follow(self, request: Any, read: Callable[[Any], T], is_last: Callable[[T], bool]) -> Iterator[T]:
        seen: T | None = None

        def is_whole() -> bool:
            return seen is None or is_last(seen)

        for _, response in self._caller.stream("FollowJobs", request, is_whole=is_whole):
            if (found := read(response)) != seen:
                seen = found
                yield found


class AsyncJobs:
    """`BlockingJobs` for one event loop; `AsyncClient.jobs`."""

    def __init__(self, endpoints: Endpoints[grpc.aio.Channel], metadata: Metadata, max_retries: int) -> None:
        self._caller = AsyncCaller(jobs_pb2_grpc.JobServiceStub, endpoints, metadata, max_retries)

    async def submit(
        self,
        bodies: Sequence[Mapping[str, Any]],
        *,
        references: Sequence[str] = (),
        options: JobOptions | None = None,
    ) -> list[SubmittedJob]:
        """See `BlockingJobs.submit`."""
        parts = self.submit_parts(bodies, references=references, options=options)
        return [job async for part in parts for job in part]

    async def submit_parts(
        self,
        bodies: Sequence[Mapping[str, Any]],
        *,
        references: Sequence[str] = (),
        options: JobOptions | None = None,
    ) -> AsyncIterator[list[SubmittedJob]]:
        """See `BlockingJobs.submit_parts`."""
        options, n_stored = with_key(options), 0
        for request in submissions(bodies, references, options):
            try:
                answer = await self._caller.call("SubmitJobs", request)
            except SlipstreamError as error:
                raise amid(error, n_stored, len(bodies), options.idempotency_key) from None
            n_stored += len(answer.jobs)
            yield [submitted_job(job) for job in answer.jobs]

    async def get(self, job_id: str) -> FinishedJob:
        """See `BlockingJobs.get`."""
        request = jobs_pb2.GetJobRequest(id=job_id, result_limit=_RESULT_PART_BYTES)
        parts = ResultParts(await self._caller.call("GetJob", request))
        while parts.missing:
            request.result_offset = parts.n_bytes
            parts.add(await self._caller.call("GetJob", request))
        return finished_job(parts.first.job, parts.result)

    async def list_jobs(self, *, group_id: str = "", state: str = "") -> AsyncIterator[SubmittedJob]:
        """See `BlockingJobs.list_jobs`."""
        request = jobs_pb2.ListJobsRequest(group_id=group_id, state=state_value(state), limit=_PAGE)
        while page := (await self._caller.call("ListJobs", request)).jobs:
            for job in page:
                yield submitted_job(job)
            request.after_id = page[-1].id

    async def cancel(self, job_id: str = "", *, group_id: str = "") -> int:
        """See `BlockingJobs.cancel`."""
        return int((await self._caller.call("CancelJobs", _cancel_request(job_id, group_id))).cancelled)

    async def follow(self, job_id: str) -> AsyncIterator[SubmittedJob]:
        """See `BlockingJobs.follow`."""
        request = jobs_pb2.FollowJobsRequest(id=job_id)
        async for job in self._follow(request, lambda r: submitted_job(r.job), lambda job: job.ended):
            yield job

    async def follow_group(self, group_id: str) -> AsyncIterator[GroupProgress]:
        """See `BlockingJobs.follow_group`."""
        request = jobs_pb2.FollowJobsRequest(group_id=group_id)
        counts = self._follow(request, lambda r: group_progress(r.counts), lambda c: c.ended == c.total)
        async for each in counts:
            yield each

    async def wait(self, job_id: str) -> FinishedJob:
        """See `BlockingJobs.wait`."""
        async for _ in self.follow(job_id):
            pass
        return await self.get(job_id)

    async def _follow(
        self, request: Any, read: Callable[[Any], T], is_last: Callable[[T], bool]
    ) -> AsyncIterator[T]:
        seen: T | None = None

        def is_whole() -> bool:
            return seen is None or is_last(seen)

        async with aclosing(self._caller.stream("FollowJobs", request, is_whole=is_whole)) as responses:
            async for _, response in responses:
                if (found := read(response)) != seen:
                    seen = found
                    yield found


def _cancel_request(job_id: str, group_id: str) -> jobs_pb2.CancelJobsRequest:
    if group_id:
        return jobs_pb2.CancelJobsRequest(group_id=group_id)
    return jobs_pb2.CancelJobsRequest(id=job_id)
