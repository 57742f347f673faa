"""BatchService over gRPC: messages to and from `BatchOperations`."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import grpc

from libs.common import batch_bounds
from libs.common.rpc.call_reset import ending_with_call, resetting_after
from libs.common.rpc.serve import metadata_of
from services.router.admission.fair_threads import RunPiece
from services.router.api.batches.operations import BatchOperations
from services.router.api.batches.rpc.messages import (
    batch_message,
    batches_page,
    file_message,
    new_batch,
    purpose_of,
    ttl_s_of,
)
from services.router.api.batches.upload import FileUpload
from services.router.api.http.answer_delivery import AnswerDelivery
from services.router.api.http.piece_stream import PIECE_BYTES
from services.router.api.rpc.callers import Callers, Context
from services.router.api.rpc.server import GrpcServer
from slipstream.v1 import batches_pb2

BATCH_SERVICE_NAME = "slipstream.v1.BatchService"


class BatchService:
    """The methods. `write_stall_s`: how long a client may leave a piece of a download unread."""

    def __init__(
        self,
        operations: BatchOperations,
        callers: Callers,
        *,
        run_piece: RunPiece,
        delivery: AnswerDelivery,
        write_stall_s: float,
    ) -> None:
        self._operations = operations
        self._callers = callers
        self._run_piece = run_piece
        self._delivery = delivery
        self.write_stall_s = write_stall_s

    # ---- files

    async def upload_file(
        self, request: batches_pb2.UploadFileRequest, context: Context
    ) -> batches_pb2.UploadFileResponse:
        """UploadFile, whose first message is `request`. The rest is read when the upload has a place."""
        tenant = self._tenant(context)
        if request.WhichOneof("part") != "header":
            raise batch_bounds.FILE_HEADER.refused()
        read = partial(_read_content, request.header, context)
        check_key = partial(self._callers.check_key, context)
        file = await self._operations.upload(tenant, read, check_key=check_key)
        return batches_pb2.UploadFileResponse(file=file_message(file))

    async def get_file(
        self, request: batches_pb2.GetFileRequest, context: Context
    ) -> batches_pb2.GetFileResponse:
        """GetFile."""
        file = await self._operations.file(self._tenant(context), request.file_id)
        return batches_pb2.GetFileResponse(file=file_message(file))

    async def list_files(
        self, request: batches_pb2.ListFilesRequest, context: Context
    ) -> batches_pb2.ListFilesResponse:
        """ListFiles."""
        tenant, limit = self._tenant(context), request.limit or batch_bounds.FILES_PAGE
        batch_bounds.FILES_LIMIT.check(limit)
        page = await self._operations.files_page(
            tenant,
            purpose=purpose_of(request.purpose),
            after=request.after,
            limit=limit,
            is_ascending=request.oldest_first,
        )
        files = [file_message(file) for file in page[:limit]]
        return batches_pb2.ListFilesResponse(files=files, has_more=len(page) > limit)

    async def delete_file(
        self, request: batches_pb2.DeleteFileRequest, context: Context
    ) -> batches_pb2.DeleteFileResponse:
        """DeleteFile."""
        await self._operations.delete_file(self._tenant(context), request.file_id)
        return batches_pb2.DeleteFileResponse()

    async def download_file(self, request: batches_pb2.DownloadFileRequest, context: Context) -> None:
        """DownloadFile. A client that reads nothing is cut off, and so is one whose key ends."""
        file = await self._operations.file(self._tenant(context), request.file_id)
        # A chunk is in memory, and a piece of it four times: as such, in the message, encoded, and at gRPC.
        n_bytes = min(file.n_bytes, batch_bounds.FILE_CHUNK_BYTES) + 4 * min(file.n_bytes, PIECE_BYTES)
        with self._delivery.sending(file.tenant, n_bytes):
            async for piece in self._operations.content(file, partial(self._callers.check_key, context)):
                with resetting_after(self.write_stall_s), ending_with_call():
                    await context.write(batches_pb2.DownloadFileResponse(content=piece))

    # ---- batches

    async def create_batch(
        self, request: batches_pb2.CreateBatchRequest, context: Context
    ) -> batches_pb2.CreateBatchResponse:
        """CreateBatch."""
        caller = self._callers.caller(metadata_of(context), context, endpoint="CreateBatch")
        self._operations.check_opened()
        batch = await self._operations.create(caller, new_batch(request, self._operations.endpoints))
        return batches_pb2.CreateBatchResponse(batch=batch_message(batch))

    async def get_batch(
        self, request: batches_pb2.GetBatchRequest, context: Context
    ) -> batches_pb2.GetBatchResponse:
        """GetBatch."""
        batch = await self._operations.batch(self._tenant(context), request.batch_id)
        return batches_pb2.GetBatchResponse(batch=batch_message(batch))

    async def list_batches(self, request: batches_pb2.ListBatchesRequest, context: Context) -> bytes:
        """ListBatches. Returns the ListBatchesResponse as a thread has serialised it."""
        tenant, limit = self._tenant(context), request.limit or batch_bounds.BATCHES_PAGE
        batch_bounds.LIMIT.check(limit)
        async with self._operations.page_slot(tenant):
            records = await self._operations.batches_page(tenant, after=request.after, limit=limit)
            return await self._run_piece(tenant, partial(batches_page, records, limit))

    async def cancel_batch(
        self, request: batches_pb2.CancelBatchRequest, context: Context
    ) -> batches_pb2.CancelBatchResponse:
        """CancelBatch."""
        batch = await self._operations.cancel(self._tenant(context), request.batch_id)
        return batches_pb2.CancelBatchResponse(batch=batch_message(batch))

    def _tenant(self, context: Context) -> str:
        """The caller's tenant. Raises FailedPrecondition without a database."""
        self._operations.check_opened()
        return self._callers.tenant(context)


async def _read_content(header: batches_pb2.FileHeader, context: Context, upload: FileUpload) -> float:
    """Give the messages after the header to the upload; the life of the file. Raises InvalidArgument.

    A broken call ends like a complete one: only the size shows the difference.
    """
    ttl_s, n_left = ttl_s_of(header.ttl_ms, "header.ttl_ms"), header.n_bytes
    batch_bounds.FILE_BYTES.check(header.n_bytes)
    await upload.begin(header.name)
    while (message := await context.read()) is not grpc.aio.EOF:
        if message.WhichOneof("part") != "content":
            raise batch_bounds.FILE_HEADER.refused()
        batch_bounds.FILE_PART.check(len(message.content))
        n_left -= len(message.content)
        if n_left < 0:
            break
        await upload.append(message.content)
    if n_left:
        raise batch_bounds.FILE_WHOLE.refused(n_bytes=header.n_bytes, n_arrived=_arrived(header, n_left))
    return ttl_s


def _arrived(header: batches_pb2.FileHeader, n_left: int) -> str:
    """How many bytes came; what follows too many is not read."""
    return f"more than {header.n_bytes}" if n_left < 0 else str(header.n_bytes - n_left)


def batch_handlers(service: BatchService, api: GrpcServer) -> Mapping[str, grpc.RpcMethodHandler[Any, Any]]:
    """The service's methods, each with its line in the access log."""
    methods: dict[str, tuple[Any, Any]] = {
        # Its host reads the first message of a call, and so bounds how long one may come without any.
        "UploadFile": (service.upload_file, batches_pb2.UploadFileRequest),
        "GetFile": (service.get_file, batches_pb2.GetFileRequest),
        "ListFiles": (service.list_files, batches_pb2.ListFilesRequest),
        "DeleteFile": (service.delete_file, batches_pb2.DeleteFileRequest),
        "CreateBatch": (service.create_batch, batches_pb2.CreateBatchRequest),
        "GetBatch": (service.get_batch, batches_pb2.GetBatchRequest),
        "ListBatches": (service.list_batches, batches_pb2.ListBatchesRequest),
        "CancelBatch": (service.cancel_batch, batches_pb2.CancelBatchRequest),
    }
    handlers = api.unary_methods(methods)
    handlers["DownloadFile"] = api.stream(
        "DownloadFile", service.download_file, batches_pb2.DownloadFileRequest
    )
    return handlers
