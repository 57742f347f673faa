"""JobService over gRPC: messages to and from `JobStore`."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import Any

import grpc

from libs.common import api_bounds, job_bounds, service_bounds
from services.router.admission.fair_threads import RunPiece
from services.router.api.followers import Followers, while_allowed
from services.router.api.rpc.callers import Callers, Context
from services.router.api.rpc.server import GrpcServer
from services.router.api.rpc.wire.message_reader import read_message
from services.router.jobs.executor import JobExecutor
from services.router.jobs.store import JobStore
from services.router.jobs.types import (
    DEFAULT_EXPIRES_MS,
    DEFAULT_RETENTION_MS,
    Job,
    JobCounts,
    JobRequest,
    JobState,
    Webhook,
)
from services.router.jobs.webhooks.policy import WebhookHosts
from services.router.request.types import Caller
from slipstream import errors
from slipstream.bound import Rule
from slipstream.v1 import jobs_pb2

SERVICE_NAME = "slipstream.v1.JobService"
_ID = re.compile(r"job-[0-9a-f]{30}")
ReadMessage = Callable[..., Awaitable[Any]]
_STATES = {state: jobs_pb2.JobState.Value(f"JOB_STATE_{state.name}") for state in JobState}
_STATE_OF = {value: state for state, value in _STATES.items()}


class JobService:
    """The methods. `store` is None on a router without a database."""

    def __init__(
        self,
        store: JobStore | None,
        executor: JobExecutor,
        callers: Callers,
        hooks: WebhookHosts,
        *,
        read: ReadMessage,
        run_piece: RunPiece,
    ) -> None:
        """`read` is RequestManager.read."""
        self._run_piece = run_piece
        self._maybe_store = store
        self._executor = executor
        self._callers = callers
        self._hooks = hooks
        self._read = read
        self._followers = Followers("jobs")

    @property
    def _store(self) -> JobStore:
        if self._maybe_store is None:
            raise errors.FailedPrecondition("this router keeps no jobs: it runs without --database")
        return self._maybe_store

    async def submit(self, data: bytes, context: Context) -> jobs_pb2.SubmitJobsResponse:
        """SubmitJobs."""
        store, tenant = self._store, self._callers.tenant(context)
        n_bytes = len(data)
        parse = partial(read_message, data, jobs_pb2.SubmitJobsRequest)
        request = await self._read(Caller(tenant=tenant), parse, n_bytes=n_bytes)
        job_bounds.SUBMITTED.check(len(request.jobs))
        requests, n_read_bytes = [], 0
        for index, new in enumerate(request.jobs):
            field = f"jobs[{index}]"
            if new.HasField("webhook"):
                self._hooks.check(Webhook(new.webhook.url, new.webhook.secret), f"{field}.webhook")
            n_read_bytes += await self._executor.check(tenant, new.path, new.body, field, n_bytes=n_bytes)
            api_bounds.REFERRED.check(n_read_bytes, f"{field}.body.input")
            _check_group(new.group_id, job_bounds.RESERVED_GROUP, f"{field}.group_id")
            requests.append(_request_of(new))
        jobs = await store.submit(tenant, requests, key_sha256=self._callers.key_sha256(context))
        return jobs_pb2.SubmitJobsResponse(jobs=[_message_of(job) for job in jobs])

    async def get(self, request: jobs_pb2.GetJobRequest, context: Context) -> jobs_pb2.GetJobResponse:
        """GetJob."""
        job_bounds.RESULT_OFFSET.check(request.result_offset)
        job_bounds.RESULT_LIMIT.check(request.result_limit)
        tenant, offset = self._callers.tenant(context), request.result_offset
        job = await self._store.get(tenant, request.id)
        response = jobs_pb2.GetJobResponse(job=_message_of(job))
        if not job.state.ended:
            return response
        limit = request.result_limit or job_bounds.MAX_RESULT_PART_BYTES
        part = await self._store.result_part(tenant, request.id, offset=offset, limit=limit)
        if part is not None:
            if not request.result_limit and part.n_bytes - offset > limit:
                raise job_bounds.RESULT_PARTS.refused()
            response.result = part.data
            response.result_bytes = part.n_bytes
        return response

    async def list_jobs(self, request: jobs_pb2.ListJobsRequest, context: Context) -> bytes:
        """ListJobs. Returns the ListJobsResponse as a thread has serialised it: a page has 1,000 jobs."""
        job_bounds.PAGE.check(request.limit)
        if request.state and request.state not in _STATE_OF:
            raise job_bounds.LISTED_STATE.refused()
        if request.after_id and not _ID.fullmatch(request.after_id):
            raise job_bounds.AFTER.refused()
        tenant = self._callers.tenant(context)
        jobs = await self._store.list_jobs(
            tenant,
            group_id=request.group_id,
            state=_STATE_OF.get(request.state),
            after=request.after_id,
            limit=request.limit or service_bounds.JOBS_PAGE,
        )
        return await self._run_piece(tenant, partial(_encode_jobs, jobs))

    async def cancel(
        self, request: jobs_pb2.CancelJobsRequest, context: Context
    ) -> jobs_pb2.CancelJobsResponse:
        """CancelJobs."""
        tenant = self._callers.tenant(context)
        if _named(request) == "group_id":
            _check_group(request.group_id, job_bounds.ENDED_GROUP, "group_id")
            return jobs_pb2.CancelJobsResponse(
                cancelled=await self._store.cancel_group(tenant, request.group_id)
            )
        before = await self._store.get(tenant, request.id)
        after = await self._store.cancel(tenant, request.id)
        is_new = not before.state.ended and after.state is JobState.CANCELLED
        return jobs_pb2.CancelJobsResponse(cancelled=int(is_new))

    async def follow(
        self, request: jobs_pb2.FollowJobsRequest, context: Context
    ) -> AsyncIterator[jobs_pb2.FollowJobsResponse]:
        """FollowJobs."""
        tenant, store = self._callers.tenant(context), self._store
        is_group = _named(request) == "group_id"
        changes: AsyncIterator[Job | JobCounts] = (
            store.follow_group(tenant, request.group_id) if is_group else store.follow(tenant, request.id)
        )
        with self._followers.following(tenant):
            async for change in while_allowed(changes, partial(self._callers.check_key, context)):
                if isinstance(change, Job):
                    yield jobs_pb2.FollowJobsResponse(job=_message_of(change))
                elif change is not None:
                    yield jobs_pb2.FollowJobsResponse(counts=_counts_of(change))


def _named(request: Any) -> str:
    """Which of `id` and `group_id` the request names. Raises InvalidArgument for neither."""
    name: str | None = request.WhichOneof("jobs")
    if name is None or not getattr(request, name):
        raise job_bounds.NAMED.refused()
    return name


def _check_group(group_id: str, rule: Rule, field: str) -> None:
    """Raise InvalidArgument for a group whose jobs are those of something else."""
    if group_id.startswith(job_bounds.RESERVED_GROUPS):
        raise rule.refused(field)


def _request_of(new: jobs_pb2.NewJob) -> JobRequest:
    hook = Webhook(new.webhook.url, new.webhook.secret) if new.HasField("webhook") else None
    return JobRequest(
        new.path,
        new.body,
        reference=new.reference,
        group_id=new.group_id,
        idempotency_key=new.idempotency_key,
        expires_ms=new.expires_ms or DEFAULT_EXPIRES_MS,
        retention_ms=new.retention_ms or DEFAULT_RETENTION_MS,
        webhook=hook,
    )


def _encode_jobs(jobs: Sequence[Job]) -> bytes:
    return jobs_pb2.ListJobsResponse(jobs=[_message_of(job) for job in jobs]).SerializeToString()


def _message_of(job: Job) -> jobs_pb2.Job:
    return jobs_pb2.Job(
        id=job.id,
        state=_STATES[job.state],
        path=job.path,
        reference=job.reference,
        group_id=job.group_id,
        attempt=job.attempt,
        http_status=job.status,
        error=job.error,
        output_tokens=job.output_tokens,
        created_unix_s=job.created_unix_s,
        started_unix_s=job.started_unix_s,
        ended_unix_s=job.ended_unix_s,
        expires_unix_s=job.expires_unix_s,
        is_held=job.is_held,
    )


def _counts_of(counts: JobCounts) -> jobs_pb2.JobCounts:
    return jobs_pb2.JobCounts(**{state.value: getattr(counts, state.value) for state in JobState})


def job_handlers(service: JobService, api: GrpcServer) -> Mapping[str, grpc.RpcMethodHandler[Any, Any]]:
    """The service's methods, the unary ones with their lines in the access log."""
    unary: dict[str, tuple[Any, Any]] = {
        "SubmitJobs": (service.submit, None),  # it reads the message itself
        "GetJob": (service.get, jobs_pb2.GetJobRequest),
        "ListJobs": (service.list_jobs, jobs_pb2.ListJobsRequest),
        "CancelJobs": (service.cancel, jobs_pb2.CancelJobsRequest),
    }
    handlers = api.unary_methods(unary)
    handlers["FollowJobs"] = grpc.unary_stream_rpc_method_handler(
        service.follow,
        request_deserializer=jobs_pb2.FollowJobsRequest.FromString,
        response_serializer=jobs_pb2.FollowJobsResponse.SerializeToString,
    )
    return handlers
