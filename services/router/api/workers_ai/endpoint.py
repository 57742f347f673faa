"""`ai/run/{model}` and `ai/v1/...` of Workers AI's REST API over HTTP.

The account of the path is a name that clients have to send: the key alone says whose the request is.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import uuid
from collections.abc import AsyncGenerator, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import msgspec
from aiohttp import web
from aiohttp.typedefs import Handler

from libs.common import batch_bounds
from libs.common.http.failure import ErrorShape, HttpFailure, failure_of
from services.router.api.answers.answer_format import AnswerFormat
from services.router.api.answers.exchange import read_exchange
from services.router.api.answers.whole import run_to_end
from services.router.api.http.generation import GenerationEndpoint
from services.router.api.http.ignored_header import ignored_header
from services.router.api.http.middleware import RECORD
from services.router.api.http.piece_stream import each_piece, send_pieces
from services.router.api.http.request_reader import RequestReader
from services.router.api.openai.ignored_fields import IgnoredFields
from services.router.api.workers_ai.envelope import (
    InvalidRunModel,
    RunBodyMissing,
    RunTimedOut,
    UnknownRunModel,
    envelope,
    error_envelope,
    error_item,
)
from services.router.api.workers_ai.queued_runs import (
    QueuedRuns,
    RunUsage,
    around_answers,
    reference_of,
)
from services.router.api.workers_ai.run_body import (
    BatchBody,
    ParsedRun,
    PollBody,
    RunBody,
    parse_run,
)
from services.router.api.workers_ai.run_format import RunFormat, read_run
from services.router.execution.request_manager import RequestManager
from services.router.jobs.store import JobStore
from services.router.request.types import Caller
from slipstream import bounds, errors
from slipstream.bound import shown

_ACCOUNT = "/client/v4/accounts/{account}/ai"
_MATCHED = "/client/v4/accounts/{account:[^/]+}/ai"
RUN_PATH = _ACCOUNT + "/run/{model}"
# Runs of one call that run at the same time.
_TOGETHER = 8
# What a model may be called: parts such as @cf/moonshotai/kimi-k2.5.
_MODEL_NAME = re.compile(r"@?[\w.:+-]{1,128}(/[\w.:+-]{1,128}){0,7}", re.ASCII)


class _ModelName(msgspec.Struct, gc=False):
    model: str = ""


class RunEndpoints:
    """A `RouteFamily`. Without jobs, what asks for the queue is refused by a typed error."""

    def __init__(
        self,
        manager: RequestManager,
        reader: RequestReader,
        generation: GenerationEndpoint,
        jobs: JobStore | None,
        *,
        formats: Mapping[str, AnswerFormat],
        models: Handler,
    ) -> None:
        """`formats`: those of OpenAI's endpoints by their paths. `models` lists the models."""
        self._manager = manager
        self._reader = reader
        self._generation = generation
        self._queue = None if jobs is None else QueuedRuns(jobs, run_piece=manager.context.threads.run)
        self._formats = formats
        self._models = models

    def routes(self) -> Iterable[web.RouteDef]:
        """See `RouteFamily`."""
        openai = [
            web.post(_MATCHED + path, partial(self._generation.generate, path=path, answer_format=form))
            for path, form in self._formats.items()
        ]
        return [
            *openai,
            web.post(_MATCHED + "/v1/embeddings", self._refuse_task),
            web.get(_MATCHED + "/v1/models", self._models, allow_head=False),
            web.post(_MATCHED + "/run/{model:.+}", self._run),
        ]

    def error_shapes(self) -> Mapping[str, ErrorShape]:
        """OpenAI's for OpenAI's endpoints, and the envelope for all others."""
        no_task = {_ACCOUNT + "/v1/embeddings": error_envelope}
        return {**no_task, _ACCOUNT + "/v1/": HttpFailure.openai_body, "/client/v4/": error_envelope}

    async def _refuse_task(self, request: web.Request) -> web.Response:
        """Embeddings, which no model here makes: this API has the code of an unknown model for it."""
        tenant = self._reader.tenant(request)
        data = await self._reader.body(request, tenant)
        try:
            named = msgspec.json.decode(data, type=_ModelName).model
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            named = ""
        raise UnknownRunModel(f"No such model {shown(named)} or task", field="model")

    async def _run(self, request: web.Request) -> web.StreamResponse:
        try:
            return await self._answer(request)
        except errors.DeadlineExceeded as error:
            raise RunTimedOut(error.message) from None

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        caller = self._reader.caller(request, RUN_PATH)
        model = request.match_info["model"]
        if model not in self._manager.context.card.names:
            if _MODEL_NAME.fullmatch(model) is None:
                raise InvalidRunModel("The model name is invalid", field="model")
            raise UnknownRunModel(f"No such model {shown(model)} or task", field="model")
        parsed = await self._read(request, caller, model)
        body = parsed.body
        if isinstance(body, PollBody):
            return await self._poll(request, caller.tenant, body)
        if parsed.is_queued:
            return await self._submit(caller, model, body, parsed.ignored)
        if isinstance(body, BatchBody):
            return await self._run_all(request, caller, body.runs, parsed.ignored)
        # It reads the body again, which aiohttp keeps.
        return await self._generation.generate(request, path=RUN_PATH, answer_format=RunFormat(body))

    async def _read(self, request: web.Request, caller: Caller, model: str) -> ParsedRun:
        sent = await self._reader.encoded_body(request, caller.tenant)
        if not sent.data:
            raise RunBodyMissing("body", "Request is missing headers or body")
        try:
            parsed = await self._manager.read(
                caller, lambda: parse_run(sent.plain(), model), n_bytes=sent.n_bytes
            )
            is_queued = parsed.is_queued or _flag(request, "queueRequest")
            ignored = await self._check(caller, parsed.body, is_queued=is_queued)
            return ParsedRun(parsed.body, is_queued, ignored.header())
        except errors.InvalidArgument:
            self._manager.context.counters.add("slipstream_requests_refused_total")
            raise

    async def _check(
        self, caller: Caller, body: RunBody | BatchBody | PollBody, *, is_queued: bool
    ) -> IgnoredFields:
        """Check what runs later: its client may not be there then. Each run is a piece of work.

        The result has the fields without effect of all its runs, which count when they run.
        """
        ignored = IgnoredFields()
        if isinstance(body, BatchBody):
            n_bytes = sum([len(run.chat) for run in body.runs])  # many short ones take as long as a long one
            for index, run in enumerate(body.runs):
                check = partial(_check_run, run, f"requests[{index}].", ignored)
                await self._manager.read(caller, check, n_bytes=n_bytes)
        elif isinstance(body, RunBody) and is_queued:
            if body.is_streamed:
                raise batch_bounds.RUN_STREAM.refused()
            await self._manager.read(caller, partial(_check_run, body, "", ignored), n_bytes=len(body.chat))
        return ignored

    # ---- the queue

    async def _submit(
        self, caller: Caller, model: str, body: RunBody | BatchBody, ignored: str
    ) -> web.Response:
        request_id = str(uuid.uuid4())
        runs = body.runs if isinstance(body, BatchBody) else [body]
        queue = self._needed_queue()
        await queue.submit(caller.tenant, request_id, runs, key_sha256=caller.key_sha256)
        queued = {"status": "queued", "request_id": request_id, "model": model}
        return web.json_response(envelope(queued), headers=ignored_header(ignored))

    async def _poll(self, request: web.Request, tenant: str, body: PollBody) -> web.StreamResponse:
        queue = self._needed_queue()
        state = await queue.state(tenant, body.request_id)
        if state != "done":
            return web.json_response(envelope({"status": state, "request_id": body.request_id}))
        response = web.StreamResponse(headers={"Content-Type": "application/json"})
        async with contextlib.aclosing(self._held_pieces(tenant, body.request_id)) as pieces:
            return await send_pieces(request, response, pieces)

    async def _held_pieces(self, tenant: str, request_id: str) -> AsyncGenerator[bytes, None]:
        """The answers of a queued call, each piece in the tenant's share of what is sent to it."""
        async for piece in self._needed_queue().answer(tenant, request_id):
            with self._generation.delivery.sending(tenant, len(piece)):
                yield piece

    def _needed_queue(self) -> QueuedRuns:
        if self._queue is None:
            raise errors.FailedPrecondition("this router has no --database, which queued requests need")
        return self._queue

    # ---- several runs in one call

    async def _run_all(
        self, request: web.Request, caller: Caller, runs: Sequence[RunBody], ignored: str
    ) -> web.StreamResponse:
        """Answer when all have ended. Answers that wait are in the tenant's share of what is sent to it."""
        batch_bounds.RUNS_AT_ONCE.check(len(runs))
        room, usage = asyncio.Semaphore(_TOGETHER), RunUsage()
        request_id = request[RECORD].request_id
        with contextlib.ExitStack() as held:

            async def run_one(index: int, run: RunBody) -> bytes:
                async with room:
                    return await self._run_one(caller, run, index, f"{request_id}-{index}", usage, held)

            async with asyncio.TaskGroup() as tasks:
                started = [tasks.create_task(run_one(index, run)) for index, run in enumerate(runs)]
            head, tail = around_answers(usage)
            pieces = [
                head,
                *[(b"," if index else b"") + task.result() for index, task in enumerate(started)],
                tail,
            ]
            headers = {"Content-Type": "application/json; charset=utf-8", **ignored_header(ignored)}
            response = web.StreamResponse(headers=headers)
            response.content_length = sum(map(len, pieces))
            return await send_pieces(
                request, response, each_piece(pieces), stall_s=self._generation.write_stall_s
            )

    async def _run_one(
        self,
        caller: Caller,
        run: RunBody,
        index: int,
        request_id: str,
        usage: RunUsage,
        held: contextlib.ExitStack,
    ) -> bytes:
        """The JSON of one answer, which `held` counts from now on; `usage` grows by its tokens."""
        item: dict[str, Any] = {"id": index, "success": False, "external_reference": run.reference}
        try:
            exchange = await read_exchange(
                self._manager, RunFormat(run), caller, run.chat, request_id=request_id[-128:]
            )
            answer = await run_to_end(self._manager, exchange)
            usage.add(msgspec.convert(answer["result"].get("usage") or {}, RunUsage))
            data = msgspec.json.encode(item | {"success": True, "result": answer["result"]})
            held.enter_context(self._generation.delivery.sending(caller.tenant, len(data)))
            return data
        except errors.SlipstreamError as error:
            return msgspec.json.encode(item | {"errors": [error_item(failure_of(error))]})


def _check_run(run: RunBody, prefix: str, ignored: IgnoredFields) -> None:
    """Raise InvalidArgument for a run that can never run. `prefix`: where it stands in the body."""
    try:
        for name in read_run(run, "").options.ignored.split(","):
            if name:
                ignored.add(prefix + name)
        reference_of(run)
    except errors.InvalidArgument as error:
        raise type(error)(f"{prefix}{error.field}", error.reason) from None


def _flag(request: web.Request, name: str) -> bool:
    """A query parameter: clients of this API send their options so."""
    given = request.query.get(name)
    if given not in (None, "true", "false"):
        raise bounds.TYPE.refused(name, expected="true or false")
    return given == "true"
