"""Tenants' files in the database, in chunks: no file is ever whole in memory."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass

from libs.common import batch_bounds
from libs.database.database import Database
from libs.database.transaction import SqlTransaction, SqlValue
from services.router.api.batches.records import FILE_PREFIX, StoredFile, check_id, new_id, unknown
from services.router.api.batches.schema import SCHEMA
from services.router.api.batches.states import ACTIVE
from slipstream import errors

_COLUMNS = "id, tenant, name, purpose, n_bytes, created_unix_s, expires_unix_s"
# Chunks that one transaction deletes: others wait for it.
_SWEPT_CHUNKS = 16
_ACTIVE = ", ".join(f"'{state.value}'" for state in ACTIVE)


@dataclass(frozen=True, slots=True)
class NewFile:
    """The known facts of a file before its content. Files that end a batch are not bounded."""

    tenant: str
    name: str
    purpose: str
    id: str = ""  # empty: a new one
    is_bounded: bool = True


class FileStore:
    """Files by tenant. A tenant's ids name nothing for another tenant."""

    def __init__(self, database: Database, *, wall_clock_s: Callable[[], float]) -> None:
        self._database = database
        self.wall_clock_s = wall_clock_s
        database.declare(SCHEMA)

    async def begin(self, new: NewFile) -> FileWriter:
        """Start a file. Raises Overloaded when the tenant has too many. What it replaces is deleted first."""
        now_s = self.wall_clock_s()
        file_id = new.id or new_id(FILE_PREFIX, now_s, os.urandom(10))

        def insert(tx: SqlTransaction) -> None:
            tx.execute("DELETE FROM file_chunks WHERE file_id = ?", (file_id,))
            tx.execute("DELETE FROM files WHERE id = ?", (file_id,))
            if new.is_bounded:
                check_room(tx, new.tenant, n_new_files=1)
            tx.execute(
                f"INSERT INTO files ({_COLUMNS}, is_whole) VALUES (?, ?, ?, ?, 0, ?, ?, 0)",
                (file_id, new.tenant, new.name, new.purpose, now_s, now_s + batch_bounds.UPLOAD_TTL_S),
            )

        writer = FileWriter(self._database, new, file_id, created_unix_s=now_s)
        try:
            await self._database.run(
                insert, is_idempotent=True, tenant=new.tenant, adds_content=new.is_bounded
            )
        except asyncio.CancelledError:
            if new.is_bounded:  # the transaction may have made the row, and no caller has its id
                await writer.abandon()
            raise
        return writer

    async def get(
        self, tenant: str, file_id: str, *, even_expired: bool = False, field: str = "file_id"
    ) -> StoredFile:
        """A whole file. Raises NotFound, InvalidArgument; `field` has the id in the request.

        `even_expired`: for a running batch, which began before that.
        """
        check_id(file_id, FILE_PREFIX, field)
        now_s = -1.0 if even_expired else self.wall_clock_s()
        rows = await self._database.read(
            lambda tx: tx.execute(
                f"SELECT {_COLUMNS} FROM files WHERE id = ? AND tenant = ? AND is_whole = 1"
                " AND expires_unix_s > ?",
                (file_id, tenant, now_s),
            ),
            tenant=tenant,
        )
        if not rows:
            raise unknown(file_id, field)
        return StoredFile(*rows[0])

    async def page(
        self, tenant: str, *, purpose: str, after: str, limit: int, is_ascending: bool
    ) -> Sequence[StoredFile]:
        """Files in the order of their creation, beginning after the one named."""
        now_s = self.wall_clock_s()
        order, beyond = ("ASC", ">") if is_ascending else ("DESC", "<")
        where = "tenant = ? AND is_whole = 1 AND expires_unix_s > ?"
        values: list[SqlValue] = [tenant, now_s]
        for column, sign, value in (("purpose", "=", purpose), ("id", beyond, after)):
            if value:
                where += f" AND {column} {sign} ?"
                values.append(value)
        rows = await self._database.read(
            lambda tx: tx.execute(
                f"SELECT {_COLUMNS} FROM files WHERE {where} ORDER BY id {order} LIMIT ?", (*values, limit)
            ),
            tenant=tenant,
        )
        return [StoredFile(*row) for row in rows]

    async def chunks(self, file: StoredFile) -> AsyncIterator[bytes]:
        """The content, in pieces. Raises NotFound where the file is deleted meanwhile."""
        n_bytes = position = 0
        while n_bytes < file.n_bytes:
            key = (file.id, position)
            rows = await self._database.read(
                lambda tx, key=key: tx.execute(  # type: ignore[misc]
                    "SELECT content FROM file_chunks WHERE file_id = ? AND position = ?", key
                ),
                tenant=file.tenant,
            )
            if not rows:
                raise errors.NotFound("the file is deleted", field="file_id")
            content = bytes(rows[0][0])
            n_bytes += len(content)
            position += 1
            yield content

    async def delete(self, tenant: str, file_id: str) -> None:
        """Delete a file. Raises NotFound, and FailedPrecondition while a batch reads it."""

        def mark(tx: SqlTransaction) -> None:
            used = tx.execute(
                f"SELECT id FROM batches WHERE input_file = ? AND state IN ({_ACTIVE}) LIMIT 1", (file_id,)
            )
            if used:
                raise errors.FailedPrecondition(f"the file is the input of {used[0][0]}, which is not over")
            tx.execute("UPDATE files SET expires_unix_s = 0 WHERE id = ? AND tenant = ?", (file_id, tenant))

        await self.get(tenant, file_id)
        await self._database.run(mark, is_idempotent=True, tenant=tenant)

    async def sweep(self) -> bool:
        """Remove a piece of what expired; whether there may be more. Inputs of running batches stay."""
        now_s = self.wall_clock_s()

        def remove(tx: SqlTransaction) -> bool:
            rows = tx.execute(
                "SELECT id FROM files WHERE expires_unix_s <= ? AND id NOT IN"
                f" (SELECT input_file FROM batches WHERE state IN ({_ACTIVE})) LIMIT 1",
                (now_s,),
            )
            if not rows:
                return False
            (file_id,) = rows[0]
            positions = tx.execute(
                "SELECT position FROM file_chunks WHERE file_id = ? LIMIT ?", (file_id, _SWEPT_CHUNKS)
            )
            for (position,) in positions:
                tx.execute("DELETE FROM file_chunks WHERE file_id = ? AND position = ?", (file_id, position))
            if len(positions) < _SWEPT_CHUNKS:
                tx.execute("DELETE FROM files WHERE id = ?", (file_id,))
            return True

        return await self._database.run(remove, is_idempotent=True)


class FileWriter:
    """A file that grows. Until `finish` it is invisible, and it is removed if that never comes."""

    def __init__(self, database: Database, new: NewFile, file_id: str, *, created_unix_s: float) -> None:
        self._database = database
        self._new = new
        self.id = file_id
        self._created_unix_s = created_unix_s
        self._pending = bytearray()
        self._position = 0
        self.n_bytes = 0

    async def append(self, data: bytes) -> None:
        """Add content. Raises InvalidArgument beyond the bound of a file, Overloaded beyond the tenant's."""
        self.n_bytes += len(data)
        if self._new.is_bounded:
            batch_bounds.FILE_BYTES.check(max(1, self.n_bytes))
        self._pending += data
        while len(self._pending) >= batch_bounds.FILE_CHUNK_BYTES:
            chunk = bytes(self._pending[: batch_bounds.FILE_CHUNK_BYTES])
            del self._pending[: batch_bounds.FILE_CHUNK_BYTES]
            await self._store(chunk)

    async def finish(self, *, ttl_s: float) -> StoredFile:
        """Make the file visible for so long. Raises as `append` does."""
        if self._new.is_bounded:
            batch_bounds.FILE_BYTES.check(self.n_bytes)
        if self._pending:
            chunk = bytes(self._pending)
            self._pending.clear()
            await self._store(chunk)
        new, expires_unix_s = self._new, self._created_unix_s + ttl_s
        await self._database.run(
            lambda tx: tx.execute(
                "UPDATE files SET is_whole = 1, expires_unix_s = ?, n_bytes = ? WHERE id = ?",
                (expires_unix_s, self.n_bytes, self.id),
            ),
            is_idempotent=True,
            tenant=new.tenant,
        )
        return StoredFile(
            self.id, new.tenant, new.name, new.purpose, self.n_bytes, self._created_unix_s, expires_unix_s
        )

    async def abandon(self) -> None:
        """Let `sweep` remove what is there, also where the task is cancelled amid this."""
        expire = self._database.run(
            lambda tx: tx.execute("UPDATE files SET expires_unix_s = 0 WHERE id = ?", (self.id,)),
            is_idempotent=True,
            tenant=self._new.tenant,  # after the pieces of the tenant that wait
        )
        await asyncio.shield(expire)

    async def _store(self, chunk: bytes) -> None:
        position, n_bytes = self._position, self.n_bytes - len(self._pending)

        def insert(tx: SqlTransaction) -> None:
            if self._new.is_bounded:
                check_room(tx, self._new.tenant, n_new_bytes=len(chunk))
            tx.execute(
                "INSERT INTO file_chunks (file_id, position, content) VALUES (?, ?, ?)"
                " ON CONFLICT (file_id, position) DO NOTHING",
                (self.id, position, chunk),
            )
            tx.execute("UPDATE files SET n_bytes = ? WHERE id = ?", (n_bytes, self.id))

        await self._database.run(
            insert, is_idempotent=True, tenant=self._new.tenant, adds_content=self._new.is_bounded
        )
        self._position += 1


def check_room(tx: SqlTransaction, tenant: str, *, n_new_bytes: int = 0, n_new_files: int = 0) -> None:
    """Raise Overloaded where a tenant's files would exceed its share.

    A deleted file counts until its content is removed: else a tenant could write faster than that.
    """
    ((n_files, n_bytes),) = tx.execute(
        "SELECT COUNT(*), COALESCE(SUM(n_bytes), 0) FROM files WHERE tenant = ?", (tenant,)
    )
    if n_files + n_new_files > batch_bounds.MAX_TENANT_FILES:
        raise errors.Overloaded(f"{batch_bounds.MAX_TENANT_FILES} files are stored: delete some")
    if n_bytes + n_new_bytes > batch_bounds.MAX_TENANT_FILE_BYTES:
        raise errors.Overloaded(f"the files have {n_bytes} bytes already: delete some")
