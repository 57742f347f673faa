"""Files that arrive from clients of both APIs: bounded together, and each whole or not at all."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from libs.common import batch_bounds
from services.router.admission.tenant_shares import ReceiveSlots
from services.router.api.batches.file_store import FileStore, FileWriter, NewFile
from services.router.api.batches.records import StoredFile
from services.router.api.followers import KEY_CHECK_S
from slipstream import bounds


class FileUpload:
    """A file while it arrives: it begins with its name, and its content follows."""

    def __init__(self, files: FileStore, tenant: str) -> None:
        self._files = files
        self._tenant = tenant
        self._writer: FileWriter | None = None

    @property
    def has_begun(self) -> bool:
        """Whether the name is known."""
        return self._writer is not None

    async def begin(self, name: str) -> None:
        """Take the name. Raises InvalidArgument for none, one too long and a second one, and Overloaded."""
        if self._writer is not None or not name:
            raise batch_bounds.FILE.refused()
        batch_bounds.FILE_NAME.check(len(name.encode(errors="replace")))
        self._writer = await self._files.begin(NewFile(self._tenant, _safe_name(name), "batch"))

    async def append(self, data: bytes) -> None:
        """Take a piece of the content. Raises InvalidArgument and Overloaded as `FileWriter.append` does."""
        assert self._writer is not None
        await self._writer.append(data)

    async def finish(self, *, ttl_s: float) -> StoredFile:
        """Make the file visible for so long. Raises as `append` does."""
        assert self._writer is not None
        return await self._writer.finish(ttl_s=ttl_s)

    async def abandon(self) -> None:
        """Let what arrived be removed."""
        if self._writer is not None:
            await self._writer.abandon()


# Gives the content to the upload, and returns the life of the file in seconds.
ReadContent = Callable[[FileUpload], Awaitable[float]]


class UploadSlots:
    """The uploads of a router. They take longer than other messages, and have separate places."""

    def __init__(self) -> None:
        most, most_tenant = batch_bounds.MAX_UPLOADS
        self._uploads = ReceiveSlots(most=most, most_tenant=most_tenant)

    async def receive(
        self, files: FileStore, tenant: str, read: ReadContent, *, check_key: Callable[[], object]
    ) -> StoredFile:
        """Store the file that `read` receives. What was stored goes where anything fails.

        `check_key` raises Unauthenticated once the key of the upload counts no more: that ends the upload
        within KEY_CHECK_S, also while nothing arrives. Raises InvalidArgument after too long, and Overloaded.
        """
        try:
            async with self._uploads.receiving(tenant), asyncio.timeout(batch_bounds.FILE_UPLOAD_S):
                upload = FileUpload(files, tenant)
                return await _watched(_store(upload, read, check_key), check_key)
        except TimeoutError:
            raise bounds.BODY_TIME.refused() from None


async def _store(upload: FileUpload, read: ReadContent, check_key: Callable[[], object]) -> StoredFile:
    try:
        ttl_s = await read(upload)
        check_key()
        return await upload.finish(ttl_s=ttl_s)
    except BaseException:
        await upload.abandon()
        raise


async def _watched(storing: Coroutine[Any, Any, StoredFile], check_key: Callable[[], object]) -> StoredFile:
    """The result of the upload, which ends with its key, and with the call."""
    task = asyncio.create_task(storing)
    try:
        while not task.done():
            check_key()
            await asyncio.wait([task], timeout=KEY_CHECK_S)
    except BaseException:
        task.cancel()
        await asyncio.wait([task])
        raise
    return task.result()


def _safe_name(name: str) -> str:
    """The name without folders and control characters: it is shown, and never a path."""
    last = re.split(r"[/\\]", name)[-1]
    return "".join(c if c.isprintable() else "?" for c in last) or "file"
