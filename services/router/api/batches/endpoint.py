"""`/v1/files` and `/v1/batches` over HTTP, in OpenAI's shapes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import msgspec
from aiohttp import web

from libs.common import batch_bounds
from libs.common.http.failure import ErrorShape
from libs.common.http.guard import check_form
from services.router.api.batches.batch_body import parse_batch
from services.router.api.batches.batch_store import decode_batch
from services.router.api.batches.form import FormReader, check_length
from services.router.api.batches.operations import BatchOperations
from services.router.api.batches.records import batch_object, file_object, list_object
from services.router.api.http.answer_delivery import AnswerDelivery
from services.router.api.http.piece_stream import send_pieces
from services.router.api.http.request_reader import RequestReader
from services.router.execution.request_manager import RequestManager


class BatchEndpoints:
    """A `RouteFamily`. Without a database every route is refused by a typed error."""

    def __init__(
        self,
        manager: RequestManager,
        reader: RequestReader,
        operations: BatchOperations,
        *,
        delivery: AnswerDelivery,
    ) -> None:
        self._manager = manager
        self._reader = reader
        self._operations = operations
        self._delivery = delivery

    def routes(self) -> Iterable[web.RouteDef]:
        """See `RouteFamily`."""
        return [
            web.post("/v1/files", self._upload),
            web.get("/v1/files", self._list_files, allow_head=False),
            web.get("/v1/files/{id:[^/]+}", self._file),
            web.delete("/v1/files/{id:[^/]+}", self._delete_file),
            web.get("/v1/files/{id:[^/]+}/content", self._content, allow_head=False),
            web.post("/v1/batches", self._create),
            web.get("/v1/batches", self._list_batches, allow_head=False),
            web.get("/v1/batches/{id:[^/]+}", self._batch),
            web.post("/v1/batches/{id:[^/]+}/cancel", self._cancel),
        ]

    def error_shapes(self) -> Mapping[str, ErrorShape]:
        """OpenAI's."""
        return {}

    # ---- files

    async def _upload(self, request: web.Request) -> web.Response:
        tenant = self._tenant(request)
        check_form(request.headers, content_type=request.content_type)
        check_length(request)
        check_key = partial(self._reader.tenant, request)
        file = await self._operations.upload(tenant, FormReader(request).read, check_key=check_key)
        return web.json_response(file_object(file))

    async def _list_files(self, request: web.Request) -> web.StreamResponse:
        tenant = self._tenant(request)
        order = request.query.get("order", "desc")
        if order not in ("asc", "desc"):
            raise batch_bounds.ORDER.refused()
        limit = _limit(request, batch_bounds.FILES_LIMIT.high, batch_bounds.FILES_LIMIT)
        page = await self._operations.files_page(
            tenant,
            purpose=request.query.get("purpose", ""),
            after=request.query.get("after", ""),
            limit=limit,
            is_ascending=order == "asc",
        )
        found = list_object([file_object(file) for file in page[:limit]], has_more=len(page) > limit)
        return await self._delivery.send_object(request, tenant, found)

    async def _file(self, request: web.Request) -> web.Response:
        tenant = self._tenant(request)
        return web.json_response(file_object(await self._operations.file(tenant, request.match_info["id"])))

    async def _delete_file(self, request: web.Request) -> web.Response:
        tenant, file_id = self._tenant(request), request.match_info["id"]
        await self._operations.delete_file(tenant, file_id)
        return web.json_response({"id": file_id, "object": "file", "deleted": True})

    async def _content(self, request: web.Request) -> web.StreamResponse:
        tenant = self._tenant(request)
        file = await self._operations.file(tenant, request.match_info["id"])
        # A browser that is sent here shows nothing, and runs nothing, of what a client uploaded.
        headers = {
            "Content-Type": "application/octet-stream",
            "Content-Disposition": "attachment",
            "X-Content-Type-Options": "nosniff",
        }
        response = web.StreamResponse(headers=headers)
        response.content_length = file.n_bytes
        with self._delivery.sending(tenant, min(file.n_bytes, batch_bounds.FILE_CHUNK_BYTES)):
            chunks = self._operations.content(file, partial(self._reader.tenant, request))
            return await send_pieces(request, response, chunks)

    # ---- batches

    async def _create(self, request: web.Request) -> web.Response:
        caller, endpoints = self._reader.caller(request, request.path), self._operations.endpoints
        self._operations.check_opened()
        sent = await self._reader.encoded_body(request, caller.tenant)
        new = await self._manager.read(
            caller, lambda: parse_batch(sent.plain(), endpoints), n_bytes=sent.n_bytes
        )
        return web.json_response(batch_object(await self._operations.create(caller, new)))

    async def _list_batches(self, request: web.Request) -> web.StreamResponse:
        tenant = self._tenant(request)
        limit = _limit(request, batch_bounds.BATCHES_PAGE, batch_bounds.LIMIT)
        after = request.query.get("after", "")
        # A hundred batches that failed have ten megabytes of metadata and errors.
        async with self._operations.page_slot(tenant):
            records = await self._operations.batches_page(tenant, after=after, limit=limit)
            body = await self._manager.context.threads.run(tenant, partial(_batches_page, records, limit))
        return await self._delivery.send_json(request, tenant, body)

    async def _batch(self, request: web.Request) -> web.StreamResponse:
        tenant = self._tenant(request)
        found = batch_object(await self._operations.batch(tenant, request.match_info["id"]))
        return await self._delivery.send_object(request, tenant, found)

    async def _cancel(self, request: web.Request) -> web.StreamResponse:
        tenant = self._tenant(request)
        await self._reader.body(request, tenant)  # clients send {} or nothing
        batch = await self._operations.cancel(tenant, request.match_info["id"])
        return await self._delivery.send_object(request, tenant, batch_object(batch))

    def _tenant(self, request: web.Request) -> str:
        """The caller's tenant. Raises Unauthenticated, and FailedPrecondition without a database."""
        tenant = self._reader.tenant(request)
        self._operations.check_opened()
        return tenant


def _limit(request: web.Request, default: float, row: Any) -> int:
    given = request.query.get("limit")
    return int(default) if given is None else row.parse(given)


def _batches_page(records: Sequence[str], limit: int) -> bytes:
    items = [batch_object(decode_batch(record)) for record in records[:limit]]
    return msgspec.json.encode(list_object(items, has_more=len(records) > limit))
