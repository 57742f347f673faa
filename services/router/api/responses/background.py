"""Responses in the background: stored jobs whose answer is a stored response of the same id."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from typing import Any

import msgspec

from libs.common import api_bounds
from services.router.api.json_body import Json
from services.router.api.responses.background_id import job_of
from services.router.api.responses.errors import ResponseErrorCode
from services.router.api.responses.request import (
    EarlierItems,
    ResponseDraft,
    decode_response,
    echo_of,
    input_items,
)
from services.router.api.responses.stored.items import items_to_store, read_response
from services.router.api.responses.stored.store import ResponseStore
from services.router.api.responses.writer import response_object
from services.router.jobs.store import JobStore
from services.router.jobs.types import Job, JobRequest, JobState
from services.router.request.model_card import ModelCard
from slipstream import errors

PATH = "/v1/responses"
_STATUS = {
    JobState.QUEUED: "queued",
    JobState.RUNNING: "in_progress",
    JobState.CANCELLED: "cancelled",
    JobState.FAILED: "failed",
    JobState.EXPIRED: "failed",
}
_CODES = {400: ResponseErrorCode.INVALID_PROMPT, 429: ResponseErrorCode.RATE_LIMIT_EXCEEDED}


class BackgroundResponses:
    """Background responses of tenants. A job whose answer is whole has ended with its stored response."""

    def __init__(self, jobs: JobStore, store: ResponseStore, card: ModelCard) -> None:
        self._jobs = jobs
        self._store = store
        self._card = card

    async def submit(self, tenant: str, data: bytes, *, key_sha256: bytes) -> Json:
        """Queue a body that was checked; the response as it is then."""
        [job] = await self._jobs.submit(tenant, [JobRequest(PATH, data)], key_sha256=key_sha256)
        return await asyncio.to_thread(_unfinished, job, data, self._card.name)

    async def find(self, tenant: str, response_id: str) -> Json | None:
        """A response that has no stored answer, as it is now; None for any other."""
        job = await self._job(tenant, response_id)
        return None if job is None or job.state is JobState.SUCCEEDED else await self._response(job)

    async def input_items(self, tenant: str, response_id: str) -> Sequence[Json] | None:
        """The input of a response that has no stored answer; None for any other. Raises NotFound."""
        job = await self._job(tenant, response_id)
        if job is None or job.state is JobState.SUCCEEDED:
            return None
        async with self._store.slot(tenant):
            data = await self._jobs.request(tenant, job.id)
            draft = await asyncio.to_thread(decode_response, data)
        referred = msgspec.structs.replace(draft, previous_id=None)
        earlier = await self._store.earlier_items(tenant, referred)
        return await asyncio.to_thread(_stored_input, job, draft, earlier)

    async def check_continued(self, tenant: str, response_id: str) -> None:
        """Raises InvalidArgument for a response without an answer that another one may continue."""
        job = await self._job(tenant, response_id)
        if job is not None and job.state is not JobState.SUCCEEDED:
            raise api_bounds.BACKGROUND_PREVIOUS.refused(status=_STATUS[job.state])

    async def cancel(self, tenant: str, response_id: str) -> None:
        """End a response at once; one that has ended stays as it is. Raises NotFound, InvalidArgument."""
        job = await self._job(tenant, response_id)
        if job is None:
            await self._store.find_body(tenant, response_id)
            raise api_bounds.BACKGROUND_CANCEL.refused()
        await self._jobs.cancel(tenant, job.id)

    async def delete(self, tenant: str, response_id: str) -> bool:
        """Drop the job of a response that has ended; whether there was one. Raises InvalidArgument."""
        job = await self._job(tenant, response_id)
        if job is None:
            return False
        if not job.state.ended:
            raise api_bounds.BACKGROUND_DELETE.refused()
        return await self._jobs.delete(tenant, job.id)

    async def follow(self, tenant: str, response_id: str) -> AsyncIterator[Json]:
        """The response now and after each change of its state, until it has ended. Raises NotFound."""
        job = await self._job(tenant, response_id)
        if job is None:
            await self._store.find_body(tenant, response_id)
            raise api_bounds.BACKGROUND_STREAM.refused()
        async for seen in self._jobs.follow(tenant, job.id):
            if seen.state is JobState.SUCCEEDED:
                body = await self._store.find_body(tenant, response_id)
                yield await asyncio.to_thread(read_response, body)
            else:
                yield await self._response(seen)

    async def _job(self, tenant: str, response_id: str) -> Job | None:
        if (job_id := job_of(response_id)) is None:
            return None
        try:
            job = await self._jobs.get(tenant, job_id)
        except errors.NotFound:
            return None
        return job if job.path == PATH else None

    async def _response(self, job: Job) -> Json:
        async with self._store.slot(job.tenant):
            data = await self._jobs.request(job.tenant, job.id)
            response = await asyncio.to_thread(_unfinished, job, data, self._card.name)
        if response["status"] == "failed":
            result = await self._jobs.result(job.tenant, job.id)
            said: Any = json.loads(result.body).get("error") or {} if result is not None else {}
            message = said.get("message") or job.error or "the response has no answer"
            code = _CODES.get(job.status, ResponseErrorCode.SERVER_ERROR)
            response["error"] = {"code": code, "message": message}
        return response


def _stored_input(job: Job, draft: ResponseDraft, earlier: EarlierItems) -> Sequence[Json]:
    return items_to_store(input_items(draft.body.input, earlier), job.id.removeprefix("job-"))


def _unfinished(job: Job, data: bytes, model: str) -> dict[str, Any]:
    draft = decode_response(data)
    return response_object(
        f"resp_{job.id.removeprefix('job-')}",
        created_unix_s=int(job.created_unix_s),
        status=_STATUS[job.state],
        model=draft.body.model or model,
        output=[],
        usage=None,
        echo=echo_of(draft, is_stored=True),
    )
