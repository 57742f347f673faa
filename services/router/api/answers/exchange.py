"""One body that was read: its requests, its caller and the format of its answer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from services.router.api.answers.answer_format import (
    AnswerContext,
    AnswerFormat,
    AnswerOptions,
    AnswerWriter,
    ParsedBody,
)
from services.router.api.content_encoding import decompress
from services.router.execution.request_manager import RequestManager
from services.router.request.choices import with_id
from services.router.request.token_texts import TokenTexts
from services.router.request.types import Caller, GenerationRequest
from services.router.request.validation import is_request_id
from slipstream import bounds, errors
from slipstream.v1 import router_pb2


@dataclass(frozen=True, slots=True)
class Exchange:
    """Parts that run a body's requests and write their answer. `n_bytes`: the most that is read for it."""

    body: ParsedBody
    requests: Sequence[GenerationRequest]  # of the body, under the ids that they run by
    format: AnswerFormat
    caller: Caller
    n_bytes: int
    context: AnswerContext

    @property
    def options(self) -> AnswerOptions:
        """How the client wants the answer."""
        return self.body.options

    async def writer(self, started: router_pb2.Started) -> AnswerWriter:
        """The writer of an answer of one choice."""
        await self.body.before_writer(self.context)
        return self.body.writer(started, self.context)


async def read_exchange(
    manager: RequestManager,
    answer_format: AnswerFormat,
    caller: Caller,
    data: bytes,
    *,
    request_id: str,
    encoding: str = "",
    with_stats: bool = False,
) -> Exchange:
    """Parse a body. Raises InvalidArgument naming the first field that does not fit, and Overloaded.

    `encoding` is the body's Content-Encoding. The request's id is the body's own, if it has a valid one. The
    request of a job has the job's: as a takeover it would end other jobs and live requests with the body's.
    """
    n_bytes = bounds.MAX_BODY_BYTES if encoding else len(data)
    counters = manager.context.counters
    try:
        if encoding:
            data = await manager.read(caller, partial(decompress, data, encoding), n_bytes=n_bytes)
        answer_format = await answer_format.for_body(caller, data)
        n_bytes += answer_format.n_further_bytes
        body = await manager.read(caller, partial(answer_format.parse, data, request_id), n_bytes=n_bytes)
    except errors.InvalidArgument:
        counters.add("slipstream_requests_refused_total")
        raise
    requests = with_id(body.requests, request_id) if caller.is_job else body.requests
    own_id = requests[0].request_id
    options = body.options
    if options.n_ignored:
        counters.add("slipstream_ignored_fields_total", options.n_ignored)
    texts = TokenTexts(manager.context.card, manager.context.threads)
    context = AnswerContext(
        request_id=own_id if is_request_id(own_id) else request_id,
        with_stats=with_stats,
        text_of=partial(texts.of_prompt, tenant=caller.tenant),
    )
    return Exchange(body, requests, answer_format, caller.of_session(options.session), n_bytes, context)
