"""`/v1/files` and `/v1/batches` over HTTP, in OpenAI's shapes."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import msgspec
from aiohttp import web

from libs.common import batch_bounds
from libs.common.http.failure import ErrorShape
from libs.common.http.guard import check_form
from services.router.admission.tenant_shares import ReceiveSlots, TenantSlots
from services.router.api.batches.batch_body import parse_batch
from services.router.api.batches.batch_store import BatchStore, decode_batch
from services.router.api.batches.file_store import FileStore
from services.router.api.batches.records import (
    BATCH_PREFIX,
    FILE_PREFIX,
    StoredFile,
    batch_object,
    file_object,
    is_id,
    list_object,
)
from services.router.api.batches.upload import FileUpload, check_length
from services.router.api.http.answer_delivery import AnswerDelivery
from services.router.api.http.content_encoding import decompress
from services.router.api.http.piece_stream import send_pieces
from services.router.api.http.request_reader import RequestReader
from services.router.execution.request_manager import RequestManager
from slipstream import bounds, errors

_DIGITS = re.compile(r"[0-9]{1,9}")
_BATCHES_LIMIT = 20
_PAGE_WAIT_S = 10.0  # for the pages of its tenant before it


class BatchEndpoints:
    """A `RouteFamily`. Without a database every route is refused by a typed error."""

    def __init__(
        self,
        manager: RequestManager,
        reader: RequestReader,
        stores: tuple[FileStore, BatchStore] | None,
        *,
        delivery: AnswerDelivery,
        endpoints: Collection[str],
        on_changed: Callable[[], None],
    ) -> None:
        """`endpoints`: those that a batch may call. `on_changed` is called when there is work to do."""
        self._delivery = delivery
        self._manager = manager
        self._reader = reader
        self._stores = stores
        self._endpoints = endpoints
        self._on_changed = on_changed
        most, most_tenant = batch_bounds.MAX_UPLOADS
        self._pages = TenantSlots(1, wait_s=_PAGE_WAIT_S)
        self._uploads = ReceiveSlots(most=most, most_tenant=most_tenant)

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
        tenant, files = self._reader.tenant(request), self._files()
        check_form(request.headers, content_type=request.content_type)
        check_length(request)
        try:
            async with self._uploads.receiving(tenant), asyncio.timeout(batch_bounds.FILE_UPLOAD_S):
                upload = FileUpload(files, tenant, check_key=lambda: self._reader.tenant(request))
                file = await upload.read(request)
        except TimeoutError:
            raise bounds.BODY_TIME.refused() from None
        return web.json_response(file_object(file))

    async def _list_files(self, request: web.Request) -> web.StreamResponse:
        tenant, files = self._reader.tenant(request), self._files()
        order = request.query.get("order", "desc")
        if order not in ("asc", "desc"):
            raise batch_bounds.ORDER.refused()
        limit = _limit(request, batch_bounds.FILES_LIMIT.high, batch_bounds.FILES_LIMIT)
        page = await files.page(
            tenant,
            purpose=request.query.get("purpose", ""),
            after=_after(request, FILE_PREFIX),
            limit=limit + 1,
            is_ascending=order == "asc",
        )
        found = list_object([file_object(file) for file in page[:limit]], has_more=len(page) > limit)
        return await self._delivery.send_object(request, tenant, found)

    async def _file(self, request: web.Request) -> web.Response:
        _, file = await self._named_file(request)
        return web.json_response(file_object(file))

    async def _delete_file(self, request: web.Request) -> web.Response:
        files, file = await self._named_file(request)
        await files.delete(file.tenant, file.id)
        self._on_changed()
        return web.json_response({"id": file.id, "object": "file", "deleted": True})

    async def _content(self, request: web.Request) -> web.StreamResponse:
        files, file = await self._named_file(request)
        # A browser that is sent here shows nothing, and runs nothing, of what a client uploaded.
        headers = {
            "Content-Type": "application/octet-stream",
            "Content-Disposition": "attachment",
            "X-Content-Type-Options": "nosniff",
        }
        response = web.StreamResponse(headers=headers)
        response.content_length = file.n_bytes
        with self._delivery.sending(file.tenant, min(file.n_bytes, batch_bounds.FILE_CHUNK_BYTES)):
            return await send_pieces(request, response, files.chunks(file))

    async def _named_file(self, request: web.Request) -> tuple[FileStore, StoredFile]:
        tenant, files = self._reader.tenant(request), self._files()
        file_id = request.match_info["id"]
        if not is_id(file_id, FILE_PREFIX):
            raise errors.NotFound("there is no such file", field="file_id")
        return files, await files.get(tenant, file_id)

    # ---- batches

    async def _create(self, request: web.Request) -> web.Response:
        caller, batches, files = self._reader.caller(request, request.path), self._batches(), self._files()
        data = await self._reader.body(request, caller.tenant)
        encoding = request.headers.get("Content-Encoding", "").lower()
        n_bytes = bounds.MAX_BODY_BYTES if encoding else len(data)
        new = await self._manager.read(
            caller, lambda: parse_batch(decompress(data, encoding), self._endpoints), n_bytes=n_bytes
        )
        file = await files.get(caller.tenant, new.input_file)
        if file.purpose != "batch":
            raise errors.InvalidArgument("input_file_id", "must name a file with the purpose batch")
        batch = await batches.create(caller.tenant, new, key_sha256=caller.key_sha256)
        self._on_changed()
        return web.json_response(batch_object(batch))

    async def _list_batches(self, request: web.Request) -> web.StreamResponse:
        tenant, batches = self._reader.tenant(request), self._batches()
        limit = _limit(request, _BATCHES_LIMIT, batch_bounds.LIMIT)
        after = _after(request, BATCH_PREFIX)
        # A hundred batches that failed have ten megabytes of metadata and errors.
        async with self._pages.slot(tenant):
            records = await batches.page(tenant, after=after, limit=limit + 1)
            body = await self._manager.context.threads.run(tenant, partial(_batches_page, records, limit))
        return await self._delivery.send_json(request, tenant, body)

    async def _batch(self, request: web.Request) -> web.StreamResponse:
        tenant, batches = self._reader.tenant(request), self._batches()
        found = batch_object(await batches.get(tenant, _batch_id(request)))
        return await self._delivery.send_object(request, tenant, found)

    async def _cancel(self, request: web.Request) -> web.StreamResponse:
        tenant, batches = self._reader.tenant(request), self._batches()
        await self._reader.body(request, tenant)  # clients send {} or nothing
        batch = await batches.cancel(tenant, _batch_id(request))
        self._on_changed()
        return await self._delivery.send_object(request, tenant, batch_object(batch))

    def _files(self) -> FileStore:
        return self._both()[0]

    def _batches(self) -> BatchStore:
        return self._both()[1]

    def _both(self) -> tuple[FileStore, BatchStore]:
        if self._stores is None:
            raise errors.FailedPrecondition("this router has no --database, which files and batches need")
        return self._stores


def _batch_id(request: web.Request) -> str:
    batch_id = request.match_info["id"]
    if not is_id(batch_id, BATCH_PREFIX):
        raise errors.NotFound("there is no such batch", field="batch_id")
    return batch_id


def _limit(request: web.Request, default: float, row: Any) -> int:
    given = request.query.get("limit")
    return int(default) if given is None else row.parse(given)


def _after(request: web.Request, prefix: str) -> str:
    after = request.query.get("after", "")
    if after and not is_id(after, prefix):
        raise batch_bounds.AFTER.refused()
    return after


def _batches_page(records: Sequence[str], limit: int) -> bytes:
    items = [batch_object(decode_batch(record)) for record in records[:limit]]
    return msgspec.json.encode(list_object(items, has_more=len(records) > limit))
