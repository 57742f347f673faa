"""The Responses API as a format of answers. A body's format holds what the body refers to."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from libs.common import api_bounds
from libs.common.http.failure import HttpFailure
from libs.database.transaction import SqlTransaction
from services.router.api.answers.answer_format import (
    AnswerContext,
    AnswerFormat,
    AnswerOptions,
    AnswerWriter,
    ParsedBody,
)
from services.router.api.responses.background_id import key_of
from services.router.api.responses.errors import error_code, error_shape, response_error
from services.router.api.responses.operations import ResponseOperations
from services.router.api.responses.request import (
    EarlierItems,
    ResponseDraft,
    ResponsesRequest,
    decode_response,
    parse_response,
)
from services.router.api.responses.stored.items import items_to_store
from services.router.api.responses.stored.store import ResponseStore, StoredResponse
from services.router.api.responses.writer import ResponsesShape, ResponsesWriter, event_pieces
from services.router.execution.request_manager import RequestManager
from services.router.request.model_card import ModelCard
from services.router.request.types import Caller, GenerationRequest
from slipstream import errors
from slipstream.v1 import router_pb2

log = logging.getLogger(__name__)


class ResponsesFormat(AnswerFormat):
    """The format of /v1/responses. `new_key` makes the part of an id that makes it unique."""

    def __init__(
        self,
        manager: RequestManager,
        card: ModelCard,
        operations: ResponseOperations,
        *,
        new_key: Callable[[], str],
    ) -> None:
        self._manager = manager
        self.card = card
        self._operations = operations
        self.store = operations.store
        self.new_key = new_key

    async def for_body(self, caller: Caller, data: bytes) -> _FormatOfBody:
        draft = await self._manager.read(caller, lambda: decode_response(data), n_bytes=len(data))
        if draft.is_background and (self.store is None or draft.wants_store is False):
            raise api_bounds.BACKGROUND.refused()
        earlier = await self._operations.earlier_items(caller.tenant, draft)
        return _FormatOfBody(self, caller, draft, earlier)

    def parse(self, data: bytes, request_id: str) -> ParsedBody:
        raise errors.Internal("a body is parsed by the format that for_body returns")

    def error_body(self, failure: HttpFailure) -> Mapping[str, Any]:
        return error_shape(failure)

    def error_events(self, failure: HttpFailure, writer: AnswerWriter | None) -> Iterable[bytes]:
        """`response.failed` with the output so far, or `error` before the response was created."""
        if isinstance(writer, ResponsesWriter):
            return writer.failure(response_error(failure))
        fields = {"code": error_code(failure), "message": failure.message, "param": failure.field}
        return event_pieces("error", {**fields, "sequence_number": 0})


class _FormatOfBody(AnswerFormat):
    """The format with one body that was decoded, and the items that it refers to."""

    def __init__(
        self, whole: ResponsesFormat, caller: Caller, draft: ResponseDraft, earlier: EarlierItems
    ) -> None:
        self._whole = whole
        self._tenant = caller.tenant
        self._is_job = caller.is_job  # a call may have an id like a job's
        self._draft = draft
        self._earlier = earlier
        self.n_further_bytes = earlier.n_bytes
        self.n_read_bytes = earlier.n_read_bytes

    def parse(self, data: bytes, request_id: str) -> ResponsesBody:
        whole, wants_store = self._whole, self._draft.wants_store
        store = None if wants_store is False else whole.store
        is_of_job = self._is_job and self._draft.is_background and key_of(request_id) is not None
        job_id = request_id if is_of_job else ""
        if self._draft.is_background and request_id and not job_id:
            raise api_bounds.BACKGROUND.refused()
        parsed = parse_response(
            self._draft, self._earlier, is_stored=store is not None, request_id=request_id
        )
        parsed.paths.check(parsed.generation, whole.card)
        saving = None
        if store is not None:
            saving = _Saving(
                store,
                self._tenant,
                self._earlier.items,
                is_promised=wants_store is True,
                is_of_job=is_of_job,
            )
        key = key_of(job_id) or whole.new_key()
        return ResponsesBody(parsed, key, saving, is_background=self._draft.is_background)

    def error_body(self, failure: HttpFailure) -> Mapping[str, Any]:
        return self._whole.error_body(failure)

    def error_events(self, failure: HttpFailure, writer: AnswerWriter | None) -> Iterable[bytes]:
        return self._whole.error_events(failure, writer)


class _Saving:
    """How a response is stored. `is_promised`: the client asked for it, so that it must not fail unseen.

    `is_of_job`: a job makes it, and stores it with its own end, by `insertion`.
    """

    def __init__(
        self,
        store: ResponseStore,
        tenant: str,
        earlier: Sequence[Mapping[str, Any]],
        *,
        is_promised: bool,
        is_of_job: bool,
    ) -> None:
        self._store = store
        self._tenant = tenant
        self._earlier = earlier
        self._is_promised = is_promised
        self._is_of_job = is_of_job
        self.insertion: Callable[[SqlTransaction], None] | None = None

    async def save(self, response: Mapping[str, Any], items: Sequence[Mapping[str, Any]]) -> None:
        stored = StoredResponse(response, items, self._earlier)
        if self._is_of_job:
            self.insertion = await self._store.insertion(self._tenant, stored)
            return
        try:
            await self._store.save(self._tenant, stored)
        except errors.SlipstreamError as error:
            if self._is_promised:
                raise
            log.warning("response %s is not stored: %s", response["id"], error.message)


class ResponsesBody(ParsedBody):
    """A parsed body of /v1/responses. `saving` None: the response is not stored."""

    def __init__(
        self, parsed: ResponsesRequest, key: str, saving: _Saving | None, *, is_background: bool = False
    ) -> None:
        self.is_background = is_background
        ignored = parsed.ignored
        self.requests: Sequence[GenerationRequest] = [parsed.generation]
        self.options = AnswerOptions(
            parsed.stream,
            session=parsed.session,
            ignored=ignored.header() if ignored.count else "",
            n_ignored=ignored.count,
        )
        self._key = key
        self._shape = ResponsesShape(key, parsed.echo, has_summary=parsed.has_summary)
        self._items = parsed.items
        self._saving = saving
        self._writer: ResponsesWriter | None = None

    def writer(self, started: router_pb2.Started, context: AnswerContext, index: int = 0) -> ResponsesWriter:
        self._writer = ResponsesWriter(started, self._shape)
        return self._writer

    async def before_end(self) -> None:
        """Store the response, so that the client finds it as soon as it knows the end."""
        if self._saving is not None and self._writer is not None and self._writer.response is not None:
            await self._saving.save(self._writer.response, items_to_store(self._items, self._key))

    def stored_with_end(self) -> Callable[[SqlTransaction], None] | None:
        return self._saving.insertion if self._saving is not None else None
