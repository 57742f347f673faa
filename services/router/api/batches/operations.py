"""What clients of both APIs do with files and batches. A tenant's ids name nothing for another tenant."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Collection, Sequence
from contextlib import AbstractAsyncContextManager

from libs.common import batch_bounds
from services.router.admission.tenant_shares import TenantSlots
from services.router.api.batches.batch_store import BatchStore
from services.router.api.batches.file_store import FileStore
from services.router.api.batches.records import (
    BATCH_PREFIX,
    FILE_PREFIX,
    NewBatch,
    RequestBatch,
    StoredFile,
    is_id,
)
from services.router.api.batches.upload import ReadContent, UploadSlots
from services.router.api.http.piece_stream import PIECE_BYTES
from services.router.request.types import Caller
from slipstream import errors

_PAGE_WAIT_S = 10.0  # for the pages of its tenant before it


class BatchOperations:
    """The operations. Without a database every one of them raises FailedPrecondition."""

    def __init__(
        self,
        stores: tuple[FileStore, BatchStore] | None,
        *,
        endpoints: Collection[str],
        on_changed: Callable[[], None],
    ) -> None:
        """`endpoints`: those that a batch may call. `on_changed` is called when there is work to do."""
        self._stores = stores
        self.endpoints = endpoints
        self._on_changed = on_changed
        self._uploads = UploadSlots()
        self._pages = TenantSlots(1, wait_s=_PAGE_WAIT_S)

    @property
    def files(self) -> FileStore:
        """The files. Raises FailedPrecondition."""
        return self._opened()[0]

    # ---- files

    async def upload(self, tenant: str, read: ReadContent, *, check_key: Callable[[], object]) -> StoredFile:
        """Store a file; see `UploadSlots.receive`."""
        return await self._uploads.receive(self.files, tenant, read, check_key=check_key)

    async def file(self, tenant: str, file_id: str) -> StoredFile:
        """A file. Raises NotFound, and InvalidArgument without an id."""
        return await self.files.get(tenant, file_id)

    async def files_page(
        self, tenant: str, *, purpose: str, after: str, limit: int, is_ascending: bool
    ) -> Sequence[StoredFile]:
        """Files after the one named, and one more than the limit where there are more."""
        files = self.files
        _check_after(after, FILE_PREFIX)
        return await files.page(
            tenant, purpose=purpose, after=after, limit=limit + 1, is_ascending=is_ascending
        )

    async def content(self, file: StoredFile, check_key: Callable[[], object]) -> AsyncIterator[bytes]:
        """A file in pieces, each where `check_key` raises nothing. Raises NotFound for a deleted one."""
        async for chunk in self.files.chunks(file):
            for begin in range(0, len(chunk), PIECE_BYTES):
                check_key()
                yield chunk[begin : begin + PIECE_BYTES]

    async def delete_file(self, tenant: str, file_id: str) -> None:
        """Delete a file. Raises NotFound, and FailedPrecondition while a batch reads it."""
        file = await self.file(tenant, file_id)
        await self.files.delete(file.tenant, file.id)
        self._on_changed()

    # ---- batches

    async def create(self, caller: Caller, new: NewBatch) -> RequestBatch:
        """Store a batch. Raises NotFound for its file, InvalidArgument for a file of another purpose."""
        files, batches = self._opened()
        file = await files.get(caller.tenant, new.input_file, field="input_file_id")
        if file.purpose != "batch":
            raise errors.InvalidArgument("input_file_id", "must name a file with the purpose batch")
        batch = await batches.create(caller.tenant, new, key_sha256=caller.key_sha256)
        self._on_changed()
        return batch

    async def batch(self, tenant: str, batch_id: str) -> RequestBatch:
        """A batch. Raises NotFound."""
        _, batches = self._opened()
        return await batches.get(tenant, batch_id)

    async def batches_page(self, tenant: str, *, after: str, limit: int) -> Sequence[str]:
        """Records after the batch named, and one more than the limit where there are more."""
        _, batches = self._opened()
        _check_after(after, BATCH_PREFIX)
        return await batches.page(tenant, after=after, limit=limit + 1)

    def page_slot(self, tenant: str) -> AbstractAsyncContextManager[None]:
        """Held while a page of batches is read and encoded: one of a hundred that failed has megabytes."""
        return self._pages.slot(tenant)

    async def cancel(self, tenant: str, batch_id: str) -> RequestBatch:
        """Ask for the end of a batch. Raises NotFound, and FailedPrecondition for one that is over."""
        _, batches = self._opened()
        batch = await batches.cancel(tenant, batch_id)
        self._on_changed()
        return batch

    def check_opened(self) -> None:
        """Raise FailedPrecondition without a database."""
        self._opened()

    def _opened(self) -> tuple[FileStore, BatchStore]:
        if self._stores is None:
            raise errors.FailedPrecondition("this router has no --database, which files and batches need")
        return self._stores


def _check_after(after: str, prefix: str) -> None:
    if after and not is_id(after, prefix):
        raise batch_bounds.AFTER.refused()
