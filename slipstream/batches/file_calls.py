"""The calls of BatchService for files, blocking and awaited.

with Client("127.0.0.1:7000") as client:
    file = client.files.upload("requests.jsonl")
    client.files.download(file.id, to="copy.jsonl")
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncGenerator, AsyncIterator, Generator, Iterator
from contextlib import aclosing

import grpc

from slipstream.batches.messages import BatchFile, batch_file, purpose_value
from slipstream.batches.transfers import Content, DownloadTarget, FreshContent, UploadSource
from slipstream.calls.callers import AsyncCaller, BlockingCaller, Metadata
from slipstream.calls.durations import milliseconds
from slipstream.endpoints import Endpoints
from slipstream.errors import SlipstreamError
from slipstream.v1 import batches_pb2, batches_pb2_grpc

_UPLOAD_S = 600.0
_PAGE = 100


class BlockingFiles:
    """The files of the caller's tenant; `Client.files`."""

    def __init__(self, endpoints: Endpoints[grpc.Channel], metadata: Metadata, max_retries: int) -> None:
        self._caller = BlockingCaller(batches_pb2_grpc.BatchServiceStub, endpoints, metadata, max_retries)

    def upload(
        self, content: Content, *, name: str = "", ttl_s: float = 0.0, timeout_s: float | None = None
    ) -> BatchFile:
        """Store the content of a path, of an open binary file, or bytes, read in pieces of 1 MiB.

        `name`: left out, that of the path. `ttl_s`: until it is deleted; 0 = 30 days. An upload that ends
        early leaves nothing.
        """
        source = UploadSource(content, name=name, ttl_ms=milliseconds("ttl_s", ttl_s))
        try:
            return batch_file(
                self._caller.send("UploadFile", source.messages, timeout_s=_upload_s(timeout_s)).file
            )
        except SlipstreamError:
            source.check()
            raise
        finally:
            source.close()

    def get(self, file_id: str) -> BatchFile:
        """What is known of a file. Raises NotFound."""
        return batch_file(self._caller.call("GetFile", batches_pb2.GetFileRequest(file_id=file_id)).file)

    def list_files(self, *, purpose: str = "", oldest_first: bool = False) -> Iterator[BatchFile]:
        """The files page by page, the newest first. `purpose`: batch, batch_output, or any."""
        for file in self._caller.items("ListFiles", _list_request(purpose, oldest_first), "files"):
            yield batch_file(file)

    def content(self, file_id: str) -> Generator[bytes, None, None]:
        """The content in pieces, in order. Raises NotFound."""
        fresh, request = FreshContent(), batches_pb2.DownloadFileRequest(file_id=file_id)
        for n_tries, response in self._caller.stream("DownloadFile", request):
            if piece := fresh.strip(n_tries, response.content):
                yield piece

    def download(self, file_id: str, to: str | os.PathLike[str]) -> None:
        """Write the content to a path, where it appears whole or not at all. Raises NotFound."""
        target = DownloadTarget(to)
        try:
            for piece in self.content(file_id):
                target.write(piece)
            target.finish()
        finally:
            target.discard()

    def delete(self, file_id: str) -> None:
        """Delete a file. Raises FailedPrecondition while a batch reads it, NotFound the second time."""
        request = batches_pb2.DeleteFileRequest(file_id=file_id)
        self._caller.call("DeleteFile", request, is_idempotent=False)


class AsyncFiles:
    """`BlockingFiles` for one event loop; `AsyncClient.files`. Threads read and write files."""

    def __init__(self, endpoints: Endpoints[grpc.aio.Channel], metadata: Metadata, max_retries: int) -> None:
        self._caller = AsyncCaller(batches_pb2_grpc.BatchServiceStub, endpoints, metadata, max_retries)

    async def upload(
        self, content: Content, *, name: str = "", ttl_s: float = 0.0, timeout_s: float | None = None
    ) -> BatchFile:
        """See `BlockingFiles.upload`."""
        ttl_ms = milliseconds("ttl_s", ttl_s)
        source = await asyncio.to_thread(UploadSource, content, name=name, ttl_ms=ttl_ms)
        try:
            answer = await self._caller.send("UploadFile", source.messages, timeout_s=_upload_s(timeout_s))
            return batch_file(answer.file)
        except SlipstreamError:
            source.check()
            raise
        finally:
            source.close()

    async def get(self, file_id: str) -> BatchFile:
        """See `BlockingFiles.get`."""
        request = batches_pb2.GetFileRequest(file_id=file_id)
        return batch_file((await self._caller.call("GetFile", request)).file)

    async def list_files(self, *, purpose: str = "", oldest_first: bool = False) -> AsyncIterator[BatchFile]:
        """See `BlockingFiles.list_files`."""
        request = _list_request(purpose, oldest_first)
        async for file in self._caller.items("ListFiles", request, "files"):
            yield batch_file(file)

    async def content(self, file_id: str) -> AsyncGenerator[bytes, None]:
        """See `BlockingFiles.content`."""
        fresh, request = FreshContent(), batches_pb2.DownloadFileRequest(file_id=file_id)
        async with aclosing(self._caller.stream("DownloadFile", request)) as responses:
            async for n_tries, response in responses:
                if piece := fresh.strip(n_tries, response.content):
                    yield piece

    async def download(self, file_id: str, to: str | os.PathLike[str]) -> None:
        """See `BlockingFiles.download`."""
        target = DownloadTarget(to)
        try:
            async with aclosing(self.content(file_id)) as pieces:
                async for piece in pieces:
                    await asyncio.to_thread(target.write, piece)
            await asyncio.to_thread(target.finish)
        finally:
            target.discard()

    async def delete(self, file_id: str) -> None:
        """See `BlockingFiles.delete`."""
        request = batches_pb2.DeleteFileRequest(file_id=file_id)
        await self._caller.call("DeleteFile", request, is_idempotent=False)


def _list_request(purpose: str, oldest_first: bool) -> batches_pb2.ListFilesRequest:
    return batches_pb2.ListFilesRequest(
        purpose=purpose_value(purpose), limit=_PAGE, oldest_first=oldest_first
    )


def _upload_s(timeout_s: float | None) -> float:
    return _UPLOAD_S if timeout_s is None else timeout_s
